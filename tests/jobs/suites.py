"""Suites of tests: repositories with the harness, and tests of their own."""

from pathlib import Path
import shutil
import sys
import textwrap

from jobs.launch import ROOT, CompletedJob, complete

HARNESS = [ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py"), ROOT / "tests/jobs/launch.py"]


def new_suite(folder: Path) -> Path:
    """Make a repository that has the harness and no tests yet."""
    for path in HARNESS:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (folder / "tests/ranks").mkdir()
    return folder


def write(suite: Path, path: str, source: str) -> None:
    (suite / path).write_text(textwrap.dedent(source), encoding="utf-8")


def change(suite: Path, path: str, old: str, new: str) -> None:
    """Give the suite another setting than the repository has."""
    text = (suite / path).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (suite / path).write_text(text.replace(old, new), encoding="utf-8")


def run(suite: Path, *arguments: str) -> CompletedJob:
    """`python tests/run.py ARGUMENTS` in the suite."""
    return complete([sys.executable, "tests/run.py", *arguments], cwd=suite)


def closing_line(job: CompletedJob) -> str:
    return job.stdout.splitlines()[-1]
