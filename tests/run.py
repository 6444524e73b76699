"""Run the tests: tests/ranks by `pytest --ranks 1,2,3,4`, others once, each file in a process of its own.

They run side by side where there are cores. With --gpu, all tests of CuPy arrays and no others run, on a GPU: those
that also run on a stand-in for CuPy, and those of tests/gpu. With --cupy-on-cpu they run with CuPy itself on the CPU.
"""

import argparse
from collections import Counter, deque
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

from jobs.launch import ROOT, job_environment, stop
from pce_mpi.jobs.mpiexec import memory_shared_by, number_of_cores

TESTS = ROOT / "tests"
RANKS = TESTS / "ranks"
PEERS = TESTS / "peers"
GPU = TESTS / "gpu"
JOBS = TESTS / "jobs"
CONFORMANCE = TESTS / "conformance"
KERNELS = TESTS / "kernels"

# Seconds of an idle machine in which no phase of a test ends; a job that a test launches has less.
SILENCE = 150

# Files whose tests let ranks wait in vain: they take more time than they keep a core busy, and run beside the others.
WAITING = ["conformance/test_hangs", "jobs/test_failing_ranks", "jobs/test_faulty_tests", "jobs/test_hosts"]

# Ranks that are killed leave the memory behind that MPICH lets them share. Other jobs share some too, and one that has
# just begun may not hold it yet: what is younger than this many seconds stays.
SHARED_MEMORY = "/dev/shm"
SETTLED = 60

# Seconds between two lines that say how far the run is; and what pytest prints of tests that are over: their letters,
# and behind some of them what part of all tests is over.
TELLING = 60
LETTERS = re.compile(r"^(?:\S+\.py )?([.sFE]+)(?: +\[ *(\d+)%\])?$", re.MULTILINE)

COLUMNS = ["passed", "failed", "skipped"]


class Run:
    """Tests in one process of pytest, and how it went; all of a `part` of a folder may be skipped."""

    def __init__(self, name: str, arguments: list[str], files: int, sizes: str = "1", part: bool = False) -> None:
        self.name, self.files, self.part = name, files, part
        self.report, self.output = Path(), Path(os.devnull)  # before it starts
        self.waits = name in WAITING
        self.command = [sys.executable, "-m", "pytest", f"--ranks={sizes}", f"--ranks-timeout={SILENCE}", *arguments]
        self.counts = Counter[str]()
        self.failures: list[str] = []
        self.seconds = 0.0

    def start(self, folder: Path) -> None:
        self.report, self.output = folder / "report.xml", folder / "output"
        self.began = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.command, f"--junitxml={self.report}"],
                cwd=ROOT,
                env=job_environment(1),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_over(self, may_be_empty: bool) -> bool:
        """Return whether it has ended; then judge it, and show what it has printed if tests have failed."""
        if self.process.poll() is None:
            return False
        self.seconds = time.monotonic() - self.began
        cases = ElementTree.parse(self.report).iter("testcase") if self.report.exists() else []
        for case in cases:
            wrong = [each for each in case if each.tag in ("failure", "error")]
            self.counts["failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"] += 1
            test = f"{case.get('classname')}::{case.get('name')}"
            self.failures += [f"{test}: {(each.get('message') or '').partition(chr(10))[0]}" for each in wrong[:1]]
        status = self.process.returncode
        empty = not (
            self.counts["passed"] or self.counts["failed"] or may_be_empty or (self.part and self.counts["skipped"])
        )
        if not self.failures and (empty or status not in (0, 5)):
            self.counts["failed"] += 1
            self.failures.append("no test was executed" if empty else f"pytest ended with exit status {status}")
        if self.failures:
            print(f"\n===== {self.name}\n{self.printed()}", flush=True)
        return True

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def so_far(self) -> Counter[str]:
        """Return how many tests have passed and failed, and how many files are over, of a run that may go on."""
        if self.seconds:
            return self.counts + Counter(files=self.files)
        lines = LETTERS.findall(self.printed())
        letters = Counter("".join(letters for letters, _ in lines))
        percent = max((int(part) for _, part in lines if part), default=0)
        return Counter(passed=letters["."], failed=letters["F"] + letters["E"], files=self.files * percent // 100)

    def summary(self) -> str:
        return ", ".join(f"{self.counts[column]} {column}" for column in COLUMNS)


def main() -> int:
    options = parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    runs = plan(options)
    interrupted = False
    start = time.time()
    try:
        execute(runs, may_be_empty=bool(options.paths or options.k))
    except KeyboardInterrupt:
        interrupted = True
    remove_memory_left_behind(start)
    executed = [run for run in runs if run.seconds]
    print_table(executed)
    for run in executed:  # once more, in a line each: the end of a long output may be all that is kept
        for failure in run.failures:
            print(f"failed: {run.name}: {failure}")
    total = sum((run.counts for run in executed), Counter[str]())
    if not interrupted and not total["failed"] and not total["passed"]:
        print("no test was executed")
    print(", ".join(f"{total[column]} {column}" for column in COLUMNS))
    return 1 if interrupted or total["failed"] or not total["passed"] else 0


def execute(runs: list[Run], may_be_empty: bool) -> None:
    """Execute them in this order, several at once where there are cores, and tell of each when it is over.

    Each minute, say how far they all are. Interrupted, stop those that are under way.
    """
    queues = [deque(run for run in runs if run.waits is waits) for waits in (False, True)]
    running: list[Run] = []
    last_line = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while any(queues) or running:
                for queue in queues:
                    while queue and sum(run.waits is queue[0].waits for run in running) < number_of_cores():
                        running.append(queue.popleft())
                        running[-1].start(Path(tempfile.mkdtemp(dir=folder)))
                for run in [run for run in running if run.is_over(may_be_empty)]:
                    running.remove(run)
                    print(f"{run.name}: {run.summary()}, {run.seconds:.1f} s", flush=True)
                if time.monotonic() - last_line >= TELLING:
                    last_line = time.monotonic()
                    so_far = sum((run.so_far() for run in runs), Counter[str]())
                    of_all = f"{so_far['files']} of {sum(run.files for run in runs)} files"
                    print(f"{of_all}, {so_far['passed']} passed, {so_far['failed']} failed", flush=True)
                time.sleep(0.1)
        except KeyboardInterrupt:
            print(f"interrupted in {' and '.join(run.name for run in running)}")
            raise
        finally:
            for run in running:
                stop(run.process, signal.SIGINT)


def remove_memory_left_behind(since: float) -> None:
    """Remove the memory that MPICH's ranks have shared since then and that no process holds any more."""
    pids = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
    held = set[Path]().union(*(memory_shared_by(pid) for pid in pids))
    for segment in Path(SHARED_MEMORY).glob("mpich_shm_*"):
        try:
            status = segment.stat()
            if status.st_uid == os.getuid() and since < status.st_mtime < time.time() - SETTLED:
                if segment not in held:
                    segment.unlink()
        except FileNotFoundError:
            continue  # its own job was faster


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [-h] [paths ...] [-n N ...] [-k EXPR] [--no-jobs] [--gpu | --cupy-on-cpu]"
    )
    parser.add_argument(
        "-n", nargs="+", default=["1", "2", "3", "4"], metavar="N", help="numbers of ranks (default: 1 2 3 4)"
    )
    parser.add_argument("-k", metavar="EXPR", help="only tests whose name matches, as pytest -k")
    parser.add_argument(
        "--jobs", action=argparse.BooleanOptionalAction, default=True, help="run what runs once as well"
    )
    library = parser.add_mutually_exclusive_group()
    library.add_argument("--gpu", action="store_true", help="run the tests of CuPy arrays, and no others, on a GPU")
    library.add_argument("--cupy-on-cpu", action="store_true", help="run them with CuPy on the CPU; needs g++")
    parser.add_argument(
        "paths",
        nargs="*",
        help="files, folders or file.py::test (default: all of tests/ranks, tests/jobs and tests/conformance, with "
        "--gpu tests/gpu and tests/kernels too); what is below tests/ranks, tests/peers or tests/gpu runs at each "
        "size, anything else once",
    )
    options = parser.parse_intermixed_args()
    # `-n 1 2 tests/ranks` says what it means: the numbers end where a path begins.
    options.paths = [Path(os.path.abspath(path)) for path in options.paths + [n for n in options.n if not n.isdigit()]]
    options.n = [int(n) for n in options.n if n.isdigit()]
    for path in options.paths:
        if not file_of(path).exists():
            parser.error(f"{path} does not exist")
        if TESTS not in file_of(path).parents:
            parser.error(f"{path} is not below {TESTS}")
    if options.gpu:
        from pce_mpi.gpu import gpus

        try:
            gpus()
        except RuntimeError as error:
            parser.error(f"--gpu: {error}")
    return options


def file_of(path: Path) -> Path:
    """The file of `file.py::test`."""
    return Path(str(path).partition("::")[0])


def files_of(path: Path) -> list[Path]:
    """The files of tests in a folder, or the one of `file.py::test`."""
    return list(path.rglob("test_*.py")) if path.is_dir() else [file_of(path)]


def plan(options: argparse.Namespace) -> list[Run]:
    """Return the runs for these options, in order."""
    with_cupy = ["--gpu"] * options.gpu + ["--cupy-on-cpu"] * options.cupy_on_cpu
    everything = [RANKS, *[GPU] * options.gpu, JOBS, KERNELS] if with_cupy else [RANKS, JOBS, CONFORMANCE]
    paths = options.paths or [folder for folder in everything if folder.exists()]
    with_ranks = [path for path in paths if any(path.is_relative_to(folder) for folder in (RANKS, PEERS, GPU))]
    in_one_process = [path for path in paths if path not in with_ranks]
    pytest = [*(["-k", options.k] if options.k else []), *with_cupy]
    runs: list[Run] = []
    if with_ranks:
        sizes = ",".join(map(str, options.n))
        files = sum(len(files_of(path)) for path in with_ranks)
        runs.append(Run(f"--ranks {sizes}", [*pytest, *map(str, with_ranks)], files, sizes))
    if in_one_process and options.jobs:
        parts = dict[str, list[Path]]()
        for path in in_one_process:
            # The files of a folder share the cores. Those from which a few tests are chosen do not repay a start each.
            chosen = path.is_file() or "::" in path.name or options.k or with_cupy
            for part in [path] if chosen else sorted(files_of(path), key=_size):
                name = part.relative_to(TESTS)
                parts.setdefault(name.parts[0] if chosen else str(name.with_suffix("")), []).append(part)
        for name, paths in parts.items():
            files = sum(len(files_of(path)) for path in paths)
            runs.append(Run(name, [*pytest, *map(str, paths)], files, part="/" in name))
    return runs


def _size(path: Path) -> int:
    """A guess at how long a file of tests takes: short ones begin, and tell soon; --ranks, beside them, ends last."""
    return path.stat().st_size


def print_table(runs: list[Run]) -> None:
    width = max([len(run.name) for run in runs], default=0)
    print(f"\n{'':{width}}  " + "  ".join(COLUMNS) + "  seconds")
    for run in runs:
        counts = "  ".join(f"{run.counts[column]:{len(column)}}" for column in COLUMNS)
        print(f"{run.name:{width}}  {counts}  {run.seconds:7.1f}")
    print()


if __name__ == "__main__":
    sys.exit(main())
