"""Run the conformance kit's command from a test."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

from jobs.launch import ROOT, complete
from pce_mpi.cli import main

CONFORMANCE = [sys.executable, "-m", "pce_mpi", "conformance"]


def conformance(*arguments, folder=ROOT, **environment):
    """Run the command; it must leave no process behind."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return complete([*CONFORMANCE, *map(str, arguments)], cwd=folder, env=env)


def status(arguments):
    """Run the command in this process, and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code or 0


def started(*arguments, folder, **options):
    """Start the command, which has its temporary files in `folder` as well."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.Popen([*CONFORMANCE, *arguments], cwd=folder, env=env, stderr=subprocess.PIPE, **options)


def processes_of(folder):
    """Return the command lines of processes that name `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found
