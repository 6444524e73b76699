"""The README does what it says: its programs run and print what stands below them, its commands exist."""

from importlib.util import find_spec
from inspect import signature
import re
import shlex
import sys

import pytest

from jobs.launch import ROOT, complete, launch, launch_source
import pce_mpi

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROGRAMS = [
    (text, BLOCKS[index + 1][1] if BLOCKS[index + 1][0] == "text" else None)
    for index, (language, text) in enumerate(BLOCKS)
    if language == "python"
]
COMMANDS = [
    line.removeprefix("$ ").partition(" #")[0].strip()
    for language, text in BLOCKS
    if language == "console"
    for line in text.splitlines()
    if line.startswith("$ ")
]
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
EXTRAS = re.findall(
    r"^([a-z0-9]+) =", (ROOT / "setup.cfg").read_text(encoding="utf-8").split("extras_require]")[1], re.M
)


def name_of(program):
    return program[0].partition(":")[0].removeprefix("# ")


def test_there_are_programs_and_commands_to_test():
    assert len(PROGRAMS) >= 3
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_prints_what_stands_below_it(program):
    source, output = program
    start = re.match(r"# \S+\.py: mpiexec -n (\d+) python -m mpi4py \S+\.py\n", source)
    assert start, "the first line says how to start the program"
    assert output is not None, "a block of text below the program shows its output"
    job = launch_source(int(start[1]), source)
    assert job.returncode == 0, job.stderr
    assert job.stdout.rstrip() == output.rstrip()


@pytest.mark.parametrize("name", ["distribute", "from_local", "load"])
def test_table_shows_every_option_of_a_call(name):
    shown = re.search(rf"^\|.*`{name}\((.*?)\)` *[|,]", README, re.MULTILINE)[1]
    named = [
        each for each in signature(getattr(pce_mpi, name)).parameters.values() if each.kind is not each.VAR_KEYWORD
    ]
    for option in named:
        default = "" if option.default is option.empty else f"={option.default}"
        assert f"{option.name}{default}" in shown.split(", ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_there_is(command):
    words = shlex.split(command)
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= set(TARGETS)
    elif words[:2] == ["pip", "install"]:
        assert set(re.findall(r"\w+", " ".join(re.findall(r"\[(.*?)\]", command)))) <= set(EXTRAS)
    elif words[:4] == ["python", "-m", "pce_mpi", "conformance"]:
        if find_spec("torch") is None and any("torch" in word for word in words):
            pytest.skip("torch is not installed; `make test-peers` installs it, and then this runs")
        # The reader's own file is not here: a candidate that is takes its place.
        words = ["pce" if word == "own_loss.py:cross_entropy" else word for word in words]
        listed = complete([sys.executable, *words[1:], "--list"])
        assert listed.returncode == 0, listed.stderr
        assert "random-logits" in listed.stdout
    elif words[:2] == ["python", "tests/peers/compare_speed.py"]:
        assert (ROOT / words[1]).exists()
    elif words[0] == "mpiexec" and words[1] == "-n":
        at = words.index("python")
        assert words[3:at] == []
        arguments = words[at + 1 :]
        if arguments[:2] == ["-m", "pce_mpi"]:
            # Of two equal options the last one counts: what the command says is read, and measured is a small problem.
            small = ["--rows=8", "--repeat=1"] if "bench" in arguments else []
            job = launch(int(words[2]), *arguments, *small)
        elif arguments[:4] == ["-m", "mpi4py", "-m", "pytest"]:
            job = launch(int(words[2]), *arguments[2:], "--collect-only")
        else:
            assert arguments[:2] == ["-m", "mpi4py"]
            job = launch(int(words[2]), *arguments[2:], "--help")
        assert job.returncode == 0, job.stdout + job.stderr
    else:
        # For several machines, which a test on one cannot start: at least it starts its program as all others do.
        assert words[0] in ("mpiexec", "srun")
        assert "python -m mpi4py" in command
