"""Run the conformance kit's command from a test."""

import os
from pathlib import Path
import subprocess
import sys
import time

from jobs.launch import ROOT

CONFORMANCE = [sys.executable, "-m", "pce_mpi", "conformance"]


def conformance(*arguments, folder=ROOT, timeout=100, **environment):
    """The completed command, which must have left no process behind."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [*CONFORMANCE, *map(str, arguments)], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
    )


def processes_of(folder):
    """The command lines that name `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
