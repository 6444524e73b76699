"""The house: which file of the package may import which, and what no file of the repository may contain."""

import ast
from collections.abc import Iterator
from pathlib import Path
import re
import sys
import textwrap
from typing import NamedTuple

import pytest

from jobs.launch import ROOT, complete


class Room(NamedTuple):
    """One file of the package, or one folder, and what it must not import although that stands above it."""

    name: str
    never: frozenset[str] = frozenset()
    standard_library_only: bool = False


def room(name: str, *never: str, standard_library_only: bool = False) -> Room:
    return Room(name, frozenset(never), standard_library_only)


# A file imports only files above it in this list, and files of its own room. Names below `pce_mpi.` are rooms,
# the others are other people's packages.
HOUSE = [
    room("placements", standard_library_only=True),
    room("tracing", standard_library_only=True),
    room("launching", standard_library_only=True),
    room("launched", "numpy"),
    room("tables", standard_library_only=True),
    room("leftovers", standard_library_only=True),
    room("tensor_files", "numpy", "mpi4py", "placements", "tracing"),
    room("sharding", "numpy", "mpi4py", "tracing"),
    room("transitions", "numpy", "mpi4py", "tracing"),
    room("arrays", "mpi4py"),
    room("dense", "mpi4py", "placements", "tracing", "arrays"),
    room("channel", "placements", "tracing", "arrays", "dense"),
    room("staging", "mpi4py", "placements", "tracing", "dense"),
    room("collectives", "placements", "dense"),
    room("records", "dense"),
    room("kernels", "mpi4py", "dense"),
    room("arguments", "dense"),
    room("agreement", "dense"),
    room("passes", "dense"),
    room("loss", "dense"),
    room("mesh"),
    room("transport", "loss"),
    room("dist_array", "loss"),
    room("tape", "numpy", "mpi4py", "placements", "sharding", "transitions"),
    room("ops", "collectives"),
    room("synchronization", "mpi4py", "tape", "ops"),
    room("sgd", "mpi4py", "tape", "ops"),
    room("plans", "mpi4py"),
    room("checkpoint", "tape"),
    room("conformance", "tape"),
    room("cli"),
    room("__main__"),
]
NAMES = [each.name for each in HOUSE]

# The front door: it may import every room, and only the command line may come in through it.
FRONT_DOOR = "__init__"
COMES_THROUGH_THE_FRONT_DOOR = {"cli", "__main__"}

# The kit only says the word: a candidate may want to be handed CuPy's arrays.
NAMES_CUPY = {"arrays", "kernels", "conformance"}


def room_of(path: Path) -> str:
    """The room of a file, given by its path below the package."""
    return path.parts[0].removesuffix(".py")


def imports_of(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, wherever in the file and by whichever form."""
    package = ["pce_mpi", *path.parts[:-1]]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                for alias in names:
                    yield (node.lineno, ".".join([*base, *filter(None, [module]), alias.name]))
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def names_cupy(tree: ast.AST) -> Iterator[int]:
    """The lines that name cupy in code: a variable, an attribute, an import or the name of a module as a string."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=str(name))
                | ast.Attribute(attr=str(name))
                | ast.alias(name=str(name))
                | ast.ImportFrom(module=str(name))
                | ast.Constant(value=str(name))
            ) if re.fullmatch(r"cupy(x|_backends)?(\.\w+)*", name):
                yield node.lineno


def broken_laws(path: Path, source: str) -> list[str]:
    """What a file of the package, given by its path below the package, does against the order of the house."""
    tree = ast.parse(source)
    here = room_of(path)
    broken = []
    if here not in NAMES and here != FRONT_DOOR:
        return [f"{path} has no place in the house: add its room to HOUSE"]
    if here not in NAMES_CUPY:
        broken += [f"{path}:{line} names cupy" for line in names_cupy(tree)]
    if here == FRONT_DOOR:
        return broken
    law = HOUSE[NAMES.index(here)]
    for line, name in imports_of(tree, path):
        where = f"{path}:{line} imports {name}"
        top, *below = name.split(".")
        if top != "pce_mpi":
            if top in law.never or (law.standard_library_only and top not in sys.stdlib_module_names):
                broken.append(f"{where}, which {here} must never")
            continue
        target = below[0] if below and below[0] in NAMES else FRONT_DOOR
        if target == here:
            continue
        if target in law.never or law.standard_library_only:
            broken.append(f"{where}, which {here} must never")
        elif target == FRONT_DOOR:
            if here not in COMES_THROUGH_THE_FRONT_DOOR:
                broken.append(f"{where}, and only the command line comes in through the front door")
        elif NAMES.index(target) > NAMES.index(here):
            broken.append(f"{where}, which stands below {here}")
    return broken


PACKAGE = ROOT / "pce_mpi"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_imports_only_files_above_it(path):
    assert broken_laws(path, (PACKAGE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("records.py", "import pce_mpi.loss"),
        ("records.py", "from pce_mpi import loss"),
        ("records.py", "from pce_mpi.loss import softmax_cross_entropy"),
        ("records.py", "from . import loss"),
        ("records.py", "from .loss import softmax_cross_entropy"),
        ("records.py", "import numpy, pce_mpi.loss"),
        ("records.py", "def later():\n    from pce_mpi import loss"),
        ("records.py", "from importlib import import_module\nimport_module('pce_mpi.loss')"),
        ("records.py", "import importlib\nimportlib.import_module('pce_mpi.loss')"),
        ("records.py", "import pce_mpi"),
        ("records.py", "from pce_mpi import softmax_cross_entropy"),
        ("kernels/blockwise.py", "from ..loss import softmax_cross_entropy"),
        ("kernels/blockwise.py", "from .. import loss"),
        ("kernels/blockwise.py", "from mpi4py import MPI"),
        ("placements.py", "import numpy"),
        ("tracing.py", "from pce_mpi import placements"),
        ("arrays.py", "import mpi4py"),
        ("dense.py", "from pce_mpi import records"),
        ("dense.py", "from pce_mpi.arrays import array_namespace"),
        ("collectives.py", "from pce_mpi.placements import Shard"),
        ("loss.py", "from pce_mpi import dense"),
        ("loss.py", "from pce_mpi import mesh"),
        ("mesh.py", "from pce_mpi import tape"),
        ("dist_array.py", "from pce_mpi import loss"),
        ("tape.py", "import numpy as np"),
        ("ops/matmul.py", "from pce_mpi.collectives import all_reduce"),
        ("sgd.py", "from mpi4py import MPI"),
        ("conformance/runner.py", "from pce_mpi import tape"),
        ("conformance/runner.py", "from pce_mpi import cli"),
        ("loss.py", "import cupy as cp"),
        ("loss.py", "from cupyx import jit"),
        ("collectives.py", "import cupyx"),
        ("cli/gpus.py", "import cupy"),
        ("kernels/terms.py", "from pce_mpi.passes import evaluate"),
        ("kernels/cuda.py", "from mpi4py import MPI"),
        ("loss.py", "import sys\nsys.modules['cupy']"),
        ("loss.py", "def f(cupy): return cupy.asarray"),
        ("__init__.py", "import cupy"),
        ("utils.py", ""),
        ("kernel/blockwise.py", ""),
    ],
)
def test_a_planted_violation_is_found(path, source):
    assert broken_laws(Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("records.py", "import numpy as np"),
        ("records.py", "from pce_mpi import arrays"),
        ("kernels/blockwise.py", "from pce_mpi.records import merge"),
        ("kernels/cuda.py", "import cupy\nfrom .blockwise import fill_records\nfrom pce_mpi.kernels import blockwise"),
        ("kernels/cuda.py", "from pce_mpi.kernels.terms import RowGradient\nfrom pce_mpi.records import Layout"),
        ("passes.py", "from pce_mpi.kernels import kernels_of"),
        ("cli/gpus.py", "from pce_mpi.arrays import gpus, take_gpu"),
        ("loss.py", '"""CuPy arrays follow the same path."""'),
        ("arrays.py", "import cupy"),
        ("cli/info.py", "import pce_mpi\nfrom pce_mpi import __version__, dense"),
        ("__main__.py", "from pce_mpi.cli import main"),
        ("__init__.py", "from pce_mpi import dense, loss\nfrom pce_mpi.tape import backward"),
    ],
)
def test_a_lawful_import_is_left_alone(path, source):
    assert broken_laws(Path(path), source) == []


# A shard may be empty, or a view on one rank and a copy on another: where elements are in memory must never decide
# whether ranks communicate. These files ask, but only to know what this rank is to copy or may write to.
ASK_ABOUT_MEMORY = {"arrays.py", "arguments.py", "loss.py", "sgd.py", "ops/applying.py", "ops/gradient.py"}
ASK_ABOUT_MEMORY |= {"ops/numpy_protocol.py"}
ONE_RANK_ALONE = {"kernels", "conformance", "cli"}
FUNCTIONS = {"byte_bounds", "may_share_memory", "same_memory", "shares_memory"}
ATTRIBUTES = {"base", "flags", "strides"}


def questions_about_memory(source: str) -> Iterator[str]:
    """Where a file asks in which memory, or in which order there, the elements of an array are."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=str(name)) if name in FUNCTIONS | ATTRIBUTES:
                yield f"line {node.lineno} asks for {name}"
            case ast.Name(id=str(name)) if name in FUNCTIONS:
                yield f"line {node.lineno} asks for {name}"


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) not in ONE_RANK_ALONE], ids=str)
def test_few_files_ask_about_memory(path):
    asks = list(questions_about_memory((PACKAGE / path).read_text(encoding="utf-8")))
    assert bool(asks) == (path.as_posix() in ASK_ABOUT_MEMORY), asks


@pytest.mark.parametrize(
    "source", ["np.may_share_memory(a, b)", "shares_memory(a, b)", "x.local.flags.c_contiguous", "a.base is b"]
)
def test_planted_question_about_memory_is_found(source):
    assert list(questions_about_memory(source))


# Folders of a developer's machine, and where Windows has them.
PERSONAL_PATH = re.compile(r"(?<![\w.~}])/(home|Users|root|work|workspace|mnt|scratch)/\w|\b[A-Z]:\\+Users\\")

TOP_LEVEL = [
    ".ci",
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "examples",
    "pce_mpi",
    "pyproject.toml",
    "setup.cfg",
    "tests",
]


def text_files() -> Iterator[tuple[Path, str]]:
    for top in (ROOT / name for name in TOP_LEVEL):
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                try:
                    yield path, path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    pass  # a picture


def test_no_file_names_a_folder_of_a_developer_s_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if PERSONAL_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("start", ["/home", "/Users", "/root", "C:\\Users"])
def test_a_planted_folder_is_found(start):
    separator = "\\" if "\\" in start else "/"
    assert PERSONAL_PATH.search(f"data = '{start}{separator}ada{separator}data.npz'")


def test_a_single_process_needs_no_mpi_library():
    program = """
        import importlib.abc
        import math
        import sys

        class NoMPILibrary(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "mpi4py.MPI":
                    raise RuntimeError("cannot load MPI library")  # what mpi4py raises where there is none

        sys.meta_path.insert(0, NoMPILibrary())

        import numpy as np
        import pce_mpi

        loss = pce_mpi.softmax_cross_entropy(np.zeros((2, 8)), np.array([0, 7]))
        assert math.isclose(loss, math.log(8)), loss

        try:
            import mpi4py.MPI
        except RuntimeError:
            print("there was no MPI library")
        """
    process = complete([sys.executable, "-c", textwrap.dedent(program)])
    assert process.stderr == ""
    assert process.stdout == "there was no MPI library\n"
