"""Suites of tests that go wrong: repositories with the harness, and tests of their own."""

from pathlib import Path
import re
import shutil
import sys
import textwrap

from jobs.launch import ROOT, CompletedJob, complete, launch

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


def run_at(suite: Path, n: int, source: str) -> CompletedJob:
    """Run one file of tests on n ranks, and nothing else."""
    write(suite, "tests/ranks/test_it.py", source)
    return run(suite, "-n", str(n), "--no-jobs")


def pytest_at(n: int, suite: Path, *options: str) -> CompletedJob:
    """pytest itself on the suite's rank tests, without tests/run.py."""
    return launch(n, "-m", "pytest", "--color=no", "-c", f"{suite}/pyproject.toml", f"{suite}/tests/ranks", *options)


def closing_line(job: CompletedJob) -> str:
    return job.stdout.splitlines()[-1]


def reports(job: CompletedJob) -> dict[str, str]:
    """Return what the run says of each test that failed."""
    return dict(
        re.findall(r"^===== \d ranks: .*?::(\w+)(.*?)(?=^===== \d ranks: |\Z)", job.stdout, re.DOTALL | re.MULTILINE)
    )


def last_words(job: CompletedJob) -> list[str]:
    """The lines of a run after its table."""
    return job.stdout.rpartition("\n\n")[2].splitlines()
