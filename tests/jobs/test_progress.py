"""Progress of a run: a few lines in a log, a bar on a terminal."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import textwrap

import pytest

from jobs.launch import ROOT
from pce_mpi.cli import output
from pce_mpi.cli.output import Bar
from pce_mpi.jobs.patience import slowdown


class Clock:
    """Replaces `time` in a module; the test sets its time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(output, "time", clock)
    return clock


@pytest.mark.parametrize(("total", "lines_due"), [(800, 10), (10, 10), (7, 7), (1, 1), (23, 10)])
def test_log_gets_a_line_a_tenth(total, lines_due, clock, capsys):
    bar = Bar("training", total)
    for number in range(total):
        bar.finished(f"loss {number}")
    bar.close()
    text = capsys.readouterr().err
    assert "\r" not in text
    lines = text.splitlines()
    assert len(lines) == lines_due
    assert lines[-1] == f"training {total}/{total}  loss {total - 1}"


def test_log_of_slow_steps_gets_line_per_minute(clock, capsys):
    bar = Bar("training", 10_000)
    for number in range(20):
        clock.now += 25
        bar.finished(f"loss {number}")
    done = [int(number) for number in re.findall(r"training (\d+)/10000 ", capsys.readouterr().err)]
    assert done == [3, 6, 9, 12, 15, 18]  # every 75 s


def test_line_of_log_says_what_time_is_left(clock, capsys):
    bar = Bar("training", 400)
    for number in range(400):
        clock.now += 1 if number < 200 else 0.1
        bar.finished(f"loss {number}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training 40/400  loss 39, 6 min left"
    assert lines[-2] == "training 360/400  loss 359, 24 s left"
    assert lines[-1] == "training 400/400  loss 399"


def test_log_gets_every_line_that_is_worth_it(clock, capsys):
    bar = Bar("conformance", 100)
    for number in range(5):
        bar.finished(f"case {number}", worth_a_line=number == 3)
    assert capsys.readouterr().err == "conformance 4/100  case 3\n"


def test_bar_that_is_not_shown_prints_nothing(clock, capsys):
    bar = Bar("training", 3, shown=False)
    for _ in range(3):
        bar.finished("")
    bar.close()
    assert capsys.readouterr().err == ""
    assert bar.done == 3


def test_terminal_gets_a_bar_in_one_line():
    program = """
        from pce_mpi.cli.output import Bar

        bar = Bar("training", 30)
        for number in range(30):
            bar.finished(f"loss {number}")
        bar.say("that was all")
        bar.close()
        """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, stderr=theirs, timeout=60 * slowdown()
    )
    os.close(theirs)
    text = ""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # its end on Linux
        while piece := terminal.read(1000):
            text += piece.decode(errors="replace")
    assert done.returncode == 0, text
    assert "\rtraining: " in text and "/30 [" in text
    assert text.count("\n") == 1 and "that was all\r\n" in text
