"""Run the tests: tests/ranks under mpiexec at each size, others once, each file in a process that launches jobs itself.

A test in tests/ranks that does not ask for `comm` runs at the first size only, and one that is marked with `sizes` at
these: at those of them that are asked for, or else at them all. With --gpu, all tests of CuPy arrays and no others run,
on a GPU: those that also run on a stand-in for CuPy, and those of tests/gpu. With --cupy-on-cpu they run with CuPy
itself on the CPU.
"""

import argparse
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from jobs.launch import ROOT, end_with_stacks, job_command, job_environment, stop
from patience import Patience
from pce_mpi.jobs.mpiexec import memory_shared_by, number_of_cores

TESTS = ROOT / "tests"
RANKS = TESTS / "ranks"
PEERS = TESTS / "peers"
GPU = TESTS / "gpu"
JOBS = TESTS / "jobs"
CONFORMANCE = TESTS / "conformance"
KERNELS = TESTS / "kernels"

# A session that tells of nothing for so many seconds of `Patience` hangs; until it has found its tests, they are more.
# A job that a test launches has less.
SILENCE = 150
COLLECTION = 150

# Files whose tests let ranks wait in vain: they take more time than they keep a core busy, and run beside the others.
WAITING = ["conformance/test_hangs", "jobs/test_failing_ranks", "jobs/test_ending_sessions", "jobs/test_hosts"]

# Tests that end their session are left behind, but not any number of them: a hang takes its time.
MOST_SESSIONS = 10

# Ranks that are killed leave the memory behind that MPICH lets them share. Other jobs share some too, and one that has
# just begun may not hold it yet: what is younger than this many seconds stays.
SHARED_MEMORY = "/dev/shm"
SETTLED = 60

# The end of what a run has printed, shown when no test can say what went wrong.
LINES_SHOWN = 200

# The line of a failure that says what was wrong, as pytest or Python shows it; not one that only heads other texts.
ERROR = re.compile(r"^(?:E +)?((?:assert\b|[\w.]*(?:Error|Exception|Timeout|Failed)(?:$|: (?!-----))).*)", re.MULTILINE)

FROM_GOOD_TO_BAD = ["passed", "skipped", "failed"]


class Session(NamedTuple):
    """The end of a pytest session, and what it has printed."""

    returncode: int
    how_it_ended: str
    printed: str


class Run:
    """Tests on so many ranks: the pytest session to start, and how it went.

    All tests of a run may be skipped if it `is_part` of a folder.
    """

    def __init__(self, name: str, ranks: int, command: list[str], is_part: bool = False) -> None:
        self.arguments: list[str] = []
        self.is_part = is_part
        self.name = name
        self.waits = name in WAITING
        self.ranks = ranks
        self.command = command
        self.environment = job_environment(ranks)
        self.outcomes: dict[str, str] = {}
        self.failures: list[tuple[str, str]] = []
        self.running = ""
        self.waiting: list[str] = []
        self.not_asked_for: list[int] = []
        self.seconds = 0.0

    def execute(self, may_be_empty: bool) -> Generator[None]:
        """Start it, follow it to its end and judge it, a step at a time; closed before its end, it is stopped.

        A test that takes the session down with it, as it hangs or kills a rank, fails alone: another session goes on
        with the one after it.
        """
        start = time.monotonic()
        session = yield from self.session(self.command)
        for _ in range(MOST_SESSIONS - 1):
            if not self.running or not self.waiting:
                break
            ended, self.running = self.running, ""
            self.fail(ended, f"{ended} did not come to its end: the session {session.how_it_ended}\n{session.printed}")
            session = yield from self.session([*self.command, f"--after={ended}"])
        self.seconds = time.monotonic() - start
        self.judge(session, may_be_empty)

    def session(self, command: list[str]) -> Generator[None, None, "Session"]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            output, course = folder / "output", folder / "course"
            course.touch()
            with output.open("wb") as sink, course.open(encoding="utf-8") as events:
                process = subprocess.Popen(
                    [*command, f"--record={folder}"],
                    cwd=ROOT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    text=True,
                )
                try:
                    how_it_ended = yield from self.follow(process, events)
                finally:
                    stop(process)
            printed = output.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_SHOWN:]
            for rank in range(self.ranks):
                stacks = folder / f"stacks-{rank}"
                if stacks.exists() and (lines := stacks.read_text(encoding="utf-8", errors="replace").splitlines()):
                    printed += [f"----- stacks of rank {rank}", *lines[:LINES_SHOWN]]
            return Session(process.returncode, how_it_ended, "\n".join(printed))

    def follow(self, process: subprocess.Popen[str], events: Iterable[str]) -> Generator[None, None, str]:
        """Take in what the process records, as it happens, until it has ended; say how it ended."""
        patience = Patience(COLLECTION)
        line = ""
        while not patience.is_over():
            ended = process.poll() is not None
            for piece in events:
                patience = Patience(SILENCE)
                line += piece
                if line.endswith("\n"):
                    self.take_in(json.loads(line))
                    line = ""
            if ended:
                return f"ended with exit status {process.returncode}"
            yield
        end_with_stacks(process)
        return "was ended, as it had told of nothing for too long"

    def take_in(self, event: dict[str, Any]) -> None:
        if event["event"] == "collected":
            self.waiting, self.not_asked_for = event["tests"], event["not_asked_for"]
            return
        test = event["test"]
        if event["event"] == "started":
            self.running = test
            self.waiting.remove(test)
        elif event["event"] == "finished":
            self.running = ""
        else:
            # A test is as bad as the worst of its phases.
            before = self.outcomes.get(test, "passed")
            self.outcomes[test] = max(before, event["outcome"], key=FROM_GOOD_TO_BAD.index)
            if event["outcome"] == "failed":
                self.failures.append((test, f"{test} failed ({event['phase']})\n{event['text']}"))

    def judge(self, last: "Session", may_be_empty: bool) -> None:
        """Add the failures that no test has reported."""
        what = ""
        if self.running:
            what = f"{self.running} did not come to its end: the session {last.how_it_ended}"
        elif not self.count("passed") and not self.count("failed") and last.returncode in (0, 5):
            # pytest found nothing to run (5), or all that it ran was skipped.
            if not may_be_empty and not (self.is_part and self.count("skipped")):
                what = "no test was executed"
        elif self.waiting or (last.returncode and not self.count("failed")):
            what = f"the session {last.how_it_ended}" + ", though no test failed" * (not self.count("failed"))
        if what:
            if self.waiting:
                what += f"; not run: {self.waiting[0]} and all after it, {len(self.waiting)} in all"
            self.fail(self.running or self.name, f"{what}\n{last.printed}")

    def fail(self, what: str, text: str) -> None:
        self.outcomes[what] = "failed"
        self.failures.append((what, text))

    def count(self, outcome: str) -> int:
        return list(self.outcomes.values()).count(outcome)

    def summary(self) -> str:
        return ", ".join(f"{self.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))


def main() -> int:
    options = parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    selection = bool(options.paths or options.k)
    runs = plan(options)
    interrupted = False
    start = time.time()
    try:
        execute(runs, may_be_empty=selection)
    except KeyboardInterrupt:
        interrupted = True
    remove_memory_left_behind(start)
    executed = [run for run in runs if run.seconds]
    print_table(executed)
    print_failures(executed)
    failed = sum(run.count("failed") for run in executed)
    passed = sum(run.count("passed") for run in executed)
    skipped = sum(run.count("skipped") for run in executed)
    if not interrupted and not failed and not passed:
        print("no test was executed")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if interrupted or failed or not passed else 0


def execute(runs: list[Run], may_be_empty: bool) -> None:
    """Execute them in this order, several at once where there are cores, and tell of each when it is over.

    Sizes that tests turn out to name follow, and are added to `runs`. Interrupted, stop those that are under way.
    """
    queues = [deque(run for run in runs if run.waits is waits) for waits in (False, True)]
    courses = dict[Run, Generator[None]]()
    with ExitStack() as stack:
        try:
            while any(queues) or courses:
                for queue in queues:
                    while queue and fits(queue[0], [run for run in courses if run.waits is queue[0].waits]):
                        run = queue.popleft()
                        courses[run] = stack.enter_context(closing(run.execute(may_be_empty)))
                for run in [run for run, course in courses.items() if is_over(course)]:
                    del courses[run]
                    show_live("")
                    print(f"{run.name}: {run.summary()}, {run.seconds:.1f} s", flush=True)
                    for _, text in run.failures:
                        print(f"\n===== {run.name}: {text}\n", flush=True)
                    for more in [on_ranks(n, [*run.arguments, "--only-with-comm"]) for n in run.not_asked_for]:
                        if more.name not in {other.name for other in runs}:
                            runs.append(more)
                            queues[False].append(more)
                show_live("; ".join(f"{run.name}: {run.summary()}" for run in courses))
                time.sleep(0.1)
        except KeyboardInterrupt:
            show_live("")
            print(f"interrupted in {' and '.join(run.name for run in courses)}")
            raise


def fits(run: Run, running: list[Run]) -> bool:
    """Return whether there is a core for each rank, or it is alone. A run that launches jobs counts as one."""
    return not running or run.ranks + sum(other.ranks for other in running) <= number_of_cores()


def is_over(course: Generator[None]) -> bool:
    """Take the next step."""
    return next(course, "over") == "over"


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


def on_ranks(n: int, arguments: list[str]) -> Run:
    """Return the run of these arguments of Python on so many ranks, which remembers them."""
    run = Run(f"{n} rank{'s' if n > 1 else ''}", n, job_command(n, *arguments))
    run.arguments = arguments
    return run


def plan(options: argparse.Namespace) -> list[Run]:
    """Return the runs for these options, in order."""
    with_cupy = ["--gpu"] * options.gpu + ["--cupy-on-cpu"] * options.cupy_on_cpu
    everything = [RANKS, *[GPU] * options.gpu, JOBS, KERNELS] if with_cupy else [RANKS, JOBS, CONFORMANCE]
    paths = options.paths or [folder for folder in everything if folder.exists()]
    with_ranks = [path for path in paths if any(path.is_relative_to(folder) for folder in (RANKS, PEERS, GPU))]
    in_one_process = [path for path in paths if path not in with_ranks]
    # Open MPI gives its ranks a terminal; what they print ends up in a pipe all the same.
    pytest = ["-m", "pytest", "--color=no", *(["-k", options.k] if options.k else []), *with_cupy]
    runs: list[Run] = []
    if with_ranks:
        for n in options.n:
            # A test that asks for no communicator is the same at every size: it runs at the first one.
            once = ["--only-with-comm"] if runs else []
            sizes = f"--sizes={','.join(map(str, options.n))}"
            runs.append(on_ranks(n, [*pytest, *once, sizes, *map(str, with_ranks)]))
    if in_one_process and options.jobs:
        parts = dict[str, list[Path]]()
        for path in in_one_process:
            # The files of a folder share the cores. Those from which a few tests are chosen do not repay a start each.
            chosen = path.is_file() or "::" in path.name or options.k or with_cupy
            for part in [path] if chosen else sorted(path.rglob("test_*.py"), key=_size, reverse=True):
                name = part.relative_to(TESTS)
                parts.setdefault(name.parts[0] if chosen else str(name.with_suffix("")), []).append(part)
        # Right after the first size: if that is one rank, they run beside it.
        runs[1:1] = [
            Run(name, 1, [sys.executable, *pytest, *map(str, paths)], is_part="/" in name)
            for name, paths in parts.items()
        ]
    return runs


def _size(path: Path) -> int:
    """A guess at how long a file of tests takes: the longest run begins first, so that none is left at the end."""
    return path.stat().st_size


def show_live(text: str) -> None:
    """Replace the last line of a terminal; a file or a pipe gets finished lines only."""
    if sys.stdout.isatty():
        print(f"\r{text}\x1b[K", end="", flush=True)


def print_table(runs: list[Run]) -> None:
    columns = ["passed", "failed", "skipped"]
    width = max([len(run.name) for run in runs], default=0)
    print(f"\n{'':{width}}  " + "  ".join(columns) + "  seconds")
    for run in runs:
        counts = "  ".join(f"{run.count(column):{len(column)}}" for column in columns)
        print(f"{run.name:{width}}  {counts}  {run.seconds:7.1f}")
    print()


def print_failures(runs: list[Run]) -> None:
    """Repeat what failed, in a line each: the end of a long output may be all that is kept."""
    for run in runs:
        for test, text in run.failures:
            error = ERROR.search(text)
            what = error[1] if error else text.partition("\n")[0].removeprefix(f"{test} ")
            print("failed:", *dict.fromkeys([f"{run.name}:", f"{test}:", what]))


if __name__ == "__main__":
    sys.exit(main())
