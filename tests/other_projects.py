"""Tests of other projects on 2 ranks, by their own commands: the plugin of pytest, installed, changes no count.

`make test-others` runs it, and downloads the projects. They run by `--ranks 2` too, where one process can import their
conftest.
"""

import argparse
import os
from pathlib import Path
import re
import subprocess
import sys
import tarfile
import tempfile
from typing import NamedTuple

from pce_mpi.jobs.mpiexec import mpiexec


class Project(NamedTuple):
    """A project whose tests are in its source distribution."""

    packages: list[str]  # the first is that of the tests
    tests: list[str]
    takes_option: bool  # its conftest does not want several ranks where it is imported


PROJECTS = [
    # Its conftest writes the rank into the names of tests, by an attribute that pytest 9.2 has no more.
    Project(
        ["pylops-mpi==0.8.0", "pylops==2.8.0", "pyproximal==0.13.0", "scipy==1.17.1", "pytest==9.0.2"],
        ["tests/test_blockdiag.py", "tests/test_stack.py", "tests/test_distributedarray.py"],
        takes_option=True,
    ),
    Project(
        ["numba-mpi==1.3.1", "numba==0.68.1", "llvmlite==0.50.0", "psutil==7.2.2"], ["tests/api"], takes_option=False
    ),
]


def counts(project: Path, packages: Path, command: list[str], options: list[str], tests: list[str]) -> set[str]:
    """Return the last line of pytest on each rank, without its seconds and warnings."""
    done = subprocess.run(
        [*command, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = re.findall(r"^=* ?((?:\d+ \w+(?:, )?)+) in \d", done.stdout, re.MULTILINE)
    return {re.sub(r", \d+ warnings?", "", line) for line in lines} or {
        f"status {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"
    }


def main() -> None:
    """Compare the counts with the plugin and without it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    differing = []
    for packages, tests, takes_option in PROJECTS:
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder, "site")
            pip = [sys.executable, "-m", "pip", "--quiet"]
            subprocess.run([*pip, "install", "--no-deps", "--target", site, *packages], check=True)
            source = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", folder, packages[0]]
            subprocess.run(source, check=True)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
            project = archive.with_name(archive.name.removesuffix(".tar.gz"))
            launched = [*mpiexec(), "-n", "2"]
            found = {
                "without the plugin": counts(project, site, launched, ["-p", "no:pce_mpi"], tests),
                "with it": counts(project, site, launched, [], tests),
            }
            if takes_option:
                found["with --ranks 2"] = counts(project, site, [], ["--ranks", "2"], tests)
        for how, lines in found.items():
            print(f"{packages[0]}, {how}: {'; '.join(sorted(lines))}")
        if len({*map(frozenset, found.values())}) > 1 or "passed" not in str(found):
            differing.append(packages[0])
    if differing:
        sys.exit(f"the counts differ: {', '.join(differing)}")


if __name__ == "__main__":
    main()
