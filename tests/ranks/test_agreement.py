"""Wrong calls, and ranks that disagree: every rank raises the same clear error, and the communicator still works."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
import itertools
import re
from typing import Any, NamedTuple
import warnings

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import CollectiveError, dense, shard_range
from pce_mpi.comm.agreement import FACTS, agree
from pce_mpi.comm.tracing import Purpose
from pce_mpi.hints import HINTS, hinted
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.options import Options
from pce_mpi.loss.passes import forward
from ranks.grids import awaiting_a_message, read_only

ROWS, CLASSES = 5, 16

# A float32 loss and gradient of a few rows may differ from the oracle by 8 ulp. Accuracy is not the subject here.
TOLERANCE = 8 * float(np.finfo(np.float32).eps)

Arguments = dict[str, Any]

LOSSES: list[Callable[..., object]] = [
    pce.softmax_cross_entropy,
    pce.softmax_cross_entropy_forward,
    pce.softmax_cross_entropy_value_and_grad,
]
FUNCTIONS: list[Callable[..., object]] = [*LOSSES, pce.class_statistics]

# Options that class_statistics does not take.
ONLY_LOSSES = {"weight", "label_smoothing", "z_loss", "margin", "reduction", "batch_comm", "out"}

by_name = partial(pytest.mark.parametrize, ids=lambda value: getattr(value, "__name__", None))

several = pytest.mark.usefixtures("several")


@pytest.fixture
def comm(comm, impatient):
    """A communicator of the test's own, on which a rank that waits in vain gives up before the session does."""
    own = comm.Dup()
    yield own
    own.Free()


# ----------------------------------------------------------------------------------------------- a problem and its call


def whole_problem(rows: int = ROWS, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """(logits, targets), the same on every rank; every target is a class and none is class 0."""
    rng = np.random.default_rng(seed)
    return rng.normal(0, 3, (rows, CLASSES)).astype(np.float32), rng.integers(1, CLASSES, rows)


def my_classes(comm: MPI.Intracomm) -> slice:
    return slice(*shard_range(CLASSES, comm.size, comm.rank))


def my_arguments(comm: MPI.Intracomm) -> Arguments:
    """The arguments of a call that is right on every rank."""
    logits, targets = whole_problem()
    return {"logits": logits[:, my_classes(comm)].copy(), "targets": targets, "comm": comm}


def loss_and_gradient(comm: MPI.Intracomm) -> tuple[np.ndarray, np.ndarray]:
    """The results of a right call; collective over `comm`."""
    return pce.softmax_cross_entropy_value_and_grad(**my_arguments(comm))


def assert_right(comm: MPI.Intracomm, result: tuple[np.ndarray, np.ndarray]) -> None:
    """`result` of `loss_and_gradient` is the oracle's; communicates nothing."""
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(*whole_problem())
    np.testing.assert_allclose(result[0], loss, rtol=TOLERANCE)
    np.testing.assert_allclose(
        result[1], gradient[:, my_classes(comm)], rtol=0, atol=TOLERANCE * np.abs(gradient).max()
    )


# --------------------------------------------------------------------------------------------------------------- errors


class Raised(NamedTuple):
    """The error of a call; the type by name, since it travels between ranks."""

    kind: str
    text: str


def outcome(function: Callable[..., object], **arguments: Any) -> Raised | None:
    """The error of the call on this rank, None if it returns."""
    try:
        function(**arguments)
    except Exception as error:
        return Raised(type(error).__name__, str(error))
    return None


def assert_refused(
    comm: MPI.Intracomm,
    function: Callable[..., object],
    arguments: Arguments,
    kind: type[Exception],
    *fragments: str,
    ranks: set[int] | None = None,
    grid: Any = None,
) -> str:
    """The call raises `kind` on every rank with one text, which has the fragments and names exactly `ranks`.

    A fragment may leave out parts of the text ("..."). Nothing is written, and the communicator, or those of the grid,
    compute a right loss afterwards.
    """
    if function is pce.softmax_cross_entropy_value_and_grad and "out" not in arguments:
        shape = np.shape(arguments["logits"]) if isinstance(arguments["logits"], np.ndarray) else ()
        arguments = arguments | {"out": np.full(shape, 7.0, np.float32)}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    written = {name: (value, value.tobytes()) for name, value in arrays.items() if value.dtype != object}
    outcomes = comm.allgather(outcome(function, **arguments))
    afterwards = grid.result() if grid else loss_and_gradient(comm)
    raised = outcomes[comm.rank]
    assert raised is not None, f"the call returned on this rank, of all ranks: {outcomes}"
    assert raised.kind == kind.__name__, raised.text
    assert outcomes == [raised] * comm.size
    for fragment in fragments:
        assert re.search(".*".join(map(re.escape, fragment.split("..."))), raised.text), raised.text
    if ranks is not None:
        assert ranks_named_in(raised.text) == ranks, raised.text
    for name, (value, before) in written.items():
        assert value.tobytes() == before, f"{name} was written to"
    grid.assert_right(afterwards) if grid else assert_right(comm, afterwards)
    return raised.text


def ranks_named_in(text: str) -> set[int]:
    """The ranks in '(rank 1)' and '(ranks 0, 2)'."""
    return {int(rank) for numbers in re.findall(r"\(ranks? ([\d, ]+)\)", text) for rank in numbers.split(", ")}


def ranks_text(*ranks: int) -> str:
    return f"(rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


# ----------------------------------------------------------------------------------------------- a table of wrong calls

# The arguments that a rank passes instead of the right ones; a function makes them of the right ones.
Changes = Arguments | Callable[[Arguments], Arguments]
NOTHING: Arguments = {}


class Wrong(NamedTuple):
    """A wrong call: the error, what a rank at fault passes, and what all ranks pass.

    In the text of a disagreement, {others} and {last} name ranks: the last one is at fault.
    """

    kind: type[Exception]
    text: str
    changes: Changes
    everywhere: Changes = NOTHING

    def __str__(self) -> str:
        return self.text

    def arguments(self, right: Arguments, fault: bool) -> Arguments:
        """The arguments of a rank that has the fault or has it not."""
        right = right | changed(self.everywhere, right)
        return right | changed(self.changes, right) if fault else right

    def functions(self, comm: MPI.Intracomm) -> list[Callable[..., object]]:
        """The functions that take such arguments."""
        both = self.arguments(my_arguments(comm), False) | self.arguments(my_arguments(comm), True)
        if "out" in both:
            return [pce.softmax_cross_entropy_value_and_grad]
        # Probability targets are another error of class_statistics.
        others = ONLY_LOSSES & both.keys() or np.asarray(both["targets"]).dtype.kind == "f"
        return LOSSES if others else FUNCTIONS


def changed(changes: Changes, right: Arguments) -> Arguments:
    return changes if isinstance(changes, dict) else changes(right)


def with_target(row: int, value: int) -> Changes:
    return lambda right: {"targets": np.where(np.arange(ROWS) == row, value, right["targets"])}


def logits_as(dtype: Any) -> Changes:
    return lambda right: {"logits": right["logits"].astype(dtype)}


def targets_as(dtype: Any) -> Changes:
    return lambda right: {"targets": right["targets"].astype(dtype)}


def weight_as(dtype: Any = np.float64, *more: int, classes: int = 0) -> Changes:
    """A weight for each class and a few too many, with `more` axes."""
    return lambda right: {"weight": np.ones((right["logits"].shape[1] + classes, *more), dtype)}


def out_of(change: Callable[[np.ndarray], Any]) -> Changes:
    """An array like the logits, changed."""
    return lambda right: {"out": change(np.zeros_like(right["logits"]))}


def probabilities(right: Arguments) -> Arguments:
    classes = right["logits"].shape[1]
    return {"targets": np.arange(1.0, ROWS * classes + 1).reshape(ROWS, classes) / (80 * CLASSES)}


def out_over_part_of_the_logits(right: Arguments) -> Arguments:
    rows, classes = right["logits"].shape
    memory = np.zeros((rows + 1, classes), np.float32)
    memory[:rows] = right["logits"]
    return {"logits": memory[:rows], "out": memory[1:]}


def out_over_transposed_logits(right: Arguments) -> Arguments:
    square = np.ones((ROWS, ROWS), np.float32)
    return {"logits": square, "out": square.T}


def out_over_the_targets(right: Arguments) -> Arguments:
    rows, classes = right["logits"].shape
    memory = np.zeros(max(rows * classes, 2 * rows), np.float32)
    targets = memory[: 2 * rows].view(np.int64)
    targets[:] = right["targets"]
    return {"targets": targets, "out": memory[: rows * classes].reshape(rows, classes)}


def out_over_the_weight(right: Arguments) -> Arguments:
    out = np.ones_like(right["logits"])
    return {"weight": out[0], "out": out}


class Unreadable:
    """Fails with what no check expects when it is read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise LookupError("this array cannot be read")


class Mute(Exception):
    """An exception that cannot even say what went wrong."""

    def __str__(self) -> str:
        raise StopIteration


class Muting:
    """Fails with that when it is read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise Mute


def every_element_in_one_place(array: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array, strides=(0, array.itemsize))


def sliding_windows(array: np.ndarray) -> np.ndarray:
    # By half an element, so that rows of a single class overlap too.
    return np.lib.stride_tricks.as_strided(array, strides=(array.itemsize // 2, array.itemsize))


INDEX_TARGETS = "index targets must have the logits' shape without the class axis, (5,), got "
TARGETS = "targets must be integers or floating-point probabilities, got "
LOGITS = "logits must be float16, bfloat16, float32 or float64, got "
OUT = "out must be float16, bfloat16, float32 or float64, got "
WEIGHT = "weight must have one entry per class of this shard, ...got ("
REDUCTION = "reduction must be 'none', 'sum' or 'mean', got "
COMPUTE_DTYPE = "compute_dtype must be float32, float64 or None, got "
NOT_THE_LOGITS = "out must be exactly the logits, or share no memory with them"
NOT_AN_INPUT = "out must not share memory with another argument"


def outside(target: str, mistake: str = "other class numbers") -> str:
    return hinted(f"{target} is outside [0, 16)", mistake)


# Errors that one rank finds by itself.
BAD = [
    Wrong(IndexError, outside("targets[3] = 16"), with_target(3, 16)),
    Wrong(IndexError, outside("targets[1] = -1", "-1 for no class"), with_target(1, -1)),
    Wrong(IndexError, outside("targets[0] = 9223372036854775807"), with_target(0, 2**63 - 1)),
    Wrong(IndexError, outside("targets[4] = -100"), with_target(4, -100), {"ignore_index": -1}),
    Wrong(
        IndexError,
        "targets[2] = 18446744073709551615 is no class number",
        {"targets": np.array([1, 2, 2**64 - 1, 3, 4], np.uint64)},
    ),
    Wrong(ValueError, f"{INDEX_TARGETS}(6,)", {"targets": np.ones(6, np.int64)}),
    Wrong(ValueError, f"{INDEX_TARGETS}(1, 5)", lambda right: {"targets": right["targets"][None]}),
    Wrong(
        ValueError,
        "targets of dtype float32 are probabilities and must have the logits' shape, ...got (5,); "
        "class numbers must be integers",
        targets_as(np.float32),
    ),
    Wrong(TypeError, f"{TARGETS}complex128", targets_as(np.complex128)),
    Wrong(TypeError, f"{TARGETS}bool", targets_as(np.bool_)),
    Wrong(TypeError, f"{TARGETS}object", targets_as(object)),
    Wrong(TypeError, f"{TARGETS}<U21", targets_as(str)),
    Wrong(TypeError, "targets must be an array of numbers, got object", {"targets": object()}),
    Wrong(
        ValueError, "probability targets have no ignored rows, got ignore_index = 3", {"ignore_index": 3}, probabilities
    ),
    Wrong(TypeError, f"{LOGITS}int64", logits_as(np.int64)),
    Wrong(TypeError, f"{LOGITS}complex64", logits_as(np.complex64)),
    Wrong(TypeError, f"{LOGITS}bool", logits_as(np.bool_)),
    Wrong(TypeError, f"{LOGITS}object", logits_as(object)),
    Wrong(TypeError, f"{LOGITS}<U32", logits_as(str)),
    Wrong(TypeError, f"{LOGITS}>f4", logits_as(">f4")),
    Wrong(ValueError, "logits must have a class axis, got a 0-d array", {"logits": np.float32(1)}),
    Wrong(TypeError, "logits must be an array of numbers, got object", {"logits": object()}),
    Wrong(TypeError, "logits cannot be taken as an array: ...", {"logits": [[1.0, 2.0], [3.0]]}),
    Wrong(RuntimeError, "Mute", {"logits": Muting()}),
    Wrong(LookupError, "this array cannot be read", {"logits": Unreadable()}),
    Wrong(ValueError, f"{WEIGHT}...,)", weight_as(np.float32, classes=1), weight_as()),
    Wrong(ValueError, f"{WEIGHT}..., 2)", weight_as(np.float32, 2), weight_as()),
    Wrong(TypeError, "weight must be real numbers, got complex64", weight_as(np.complex64), weight_as()),
    Wrong(TypeError, "weight must be real numbers, got bool", weight_as(np.bool_), weight_as()),
    Wrong(TypeError, "weight must be real numbers, got <U1", weight_as("<U1"), weight_as()),
    Wrong(ValueError, "label_smoothing must be in [0, 1], got -0.1", {"label_smoothing": -0.1}),
    Wrong(ValueError, "label_smoothing must be in [0, 1], got 1.5", {"label_smoothing": 1.5}),
    Wrong(ValueError, "label_smoothing must be in [0, 1], got nan", {"label_smoothing": np.nan}),
    Wrong(TypeError, "label_smoothing must be a real number, got 'a lot'", {"label_smoothing": "a lot"}),
    Wrong(TypeError, "label_smoothing must be a real number, got True", {"label_smoothing": True}),
    Wrong(ValueError, "z_loss must be finite, got inf", {"z_loss": np.inf}),
    Wrong(ValueError, "z_loss must be finite, got nan", {"z_loss": np.nan}),
    Wrong(TypeError, "z_loss must be a real number, got None", {"z_loss": None}),
    *(
        Wrong(
            TypeError,
            f"margin must be three numbers, (m1, m2, m3), as (1, 0.5, 0) for ArcFace, got {margin!r}",
            {"margin": margin},
        )
        for margin in (0.5, (1.0, 0.5), "1.0", {1.0, 2.0, 0.0})
    ),
    Wrong(TypeError, "margin[1] must be a real number, got '0.5'", {"margin": (1.0, "0.5", 0.0)}),
    Wrong(ValueError, "margin[0] must be at most 1000 by size, got nan", {"margin": (np.nan, 0.5, 0.0)}),
    Wrong(ValueError, "margin[2] must be at most 1000 by size, got -inf", {"margin": [1.0, 0.5, -np.inf]}),
    Wrong(
        ValueError,
        "margin and softcap exclude each other, got margin = (1.0, 0.5, 0.0) and softcap = 30.0",
        {"margin": (1, 0.5, 0), "softcap": 30},
    ),
    Wrong(
        ValueError,
        "margin is of the target alone, which must be a class number, got probabilities",
        lambda right: probabilities(right) | {"margin": (1.0, 0.5, 0.0)},
    ),
    Wrong(ValueError, f"{REDUCTION}'average'", {"reduction": "average"}),
    Wrong(ValueError, f"{REDUCTION}'mittel-größe-平均'", {"reduction": "mittel-größe-平均"}),
    Wrong(ValueError, f"{REDUCTION}None", {"reduction": None}),
    Wrong(ValueError, "axis = 2 is out of bounds for logits of 2 dimensions", {"axis": 2}),
    Wrong(ValueError, "axis = -3 is out of bounds for logits of 2 dimensions", {"axis": -3}),
    Wrong(TypeError, "axis must be an integer, got 0.5", {"axis": 0.5}),
    *(
        Wrong(ValueError, f"{name} must be positive and finite, got {value}", {name: value})
        for name, value in itertools.product(("logit_scale", "softcap"), (0.0, -1.0, np.inf, -np.inf, np.nan))
    ),
    Wrong(TypeError, "logit_scale must be a real number, got None", {"logit_scale": None}),
    Wrong(TypeError, "softcap must be a real number, got '30'", {"softcap": "30"}),
    Wrong(TypeError, "ignore_index must be an integer, got 0.5", {"ignore_index": 0.5}),
    Wrong(ValueError, "class_start must be at least 0 and fit 64 bits, got -4", {"class_start": -4}),
    Wrong(ValueError, f"class_start must be at least 0 and fit 64 bits, got {2**70}", {"class_start": 2**70}),
    Wrong(TypeError, "class_start must be an integer, got 0.5", {"class_start": 0.5}),
    Wrong(ValueError, "num_classes must be at least 1 and fit 64 bits, got 0", {"num_classes": 0}),
    Wrong(TypeError, "num_classes must be an integer, got [16]", {"num_classes": [16]}),
    Wrong(TypeError, "num_classes must be an integer, got '16'", {"num_classes": "16"}),
    Wrong(TypeError, f"{COMPUTE_DTYPE}<class 'numpy.float16'>", {"compute_dtype": np.float16}),
    Wrong(TypeError, f"{COMPUTE_DTYPE}<class 'numpy.int64'>", {"compute_dtype": np.int64}),
    Wrong(TypeError, f"{COMPUTE_DTYPE}'float31'", {"compute_dtype": "float31"}),
    Wrong(
        ValueError,
        "compute_dtype float32 would lose bits of float64 logits",
        {"compute_dtype": np.float32},
        logits_as(np.float64),
    ),
    Wrong(ValueError, "out must have the logits' shape, ...got (4, ...)", out_of(lambda out: out[1:])),
    Wrong(TypeError, f"{OUT}int64", out_of(lambda out: out.astype(np.int64))),
    Wrong(TypeError, f"{OUT}complex64", out_of(lambda out: out.astype(np.complex64))),
    Wrong(ValueError, "out is read-only", out_of(read_only)),
    Wrong(ValueError, "out is read-only", out_of(lambda out: np.broadcast_to(out[0], out.shape))),
    Wrong(ValueError, "elements of out share memory: ...strides (0, 4)", out_of(every_element_in_one_place)),
    Wrong(ValueError, "elements of out share memory: ...strides (2, 4)", out_of(sliding_windows)),
    Wrong(TypeError, "out must be an array to write to, got list", out_of(np.ndarray.tolist)),
    Wrong(ValueError, NOT_THE_LOGITS, out_over_part_of_the_logits),
    Wrong(ValueError, NOT_THE_LOGITS, lambda right: {"out": right["logits"][::-1]}),
    Wrong(ValueError, NOT_THE_LOGITS, out_over_transposed_logits),
    Wrong(ValueError, NOT_AN_INPUT, out_over_the_targets),
    Wrong(ValueError, NOT_AN_INPUT, out_over_the_weight, weight_as()),
    Wrong(ValueError, NOT_AN_INPUT, lambda right: {"out": right["targets"]}, probabilities),
]


def differ(name: str, theirs: str, its: str, changes: Changes, everywhere: Changes = NOTHING) -> Wrong:
    text = f"ranks disagree on {name}: {theirs} {{others}}, {its} {{last}}"
    hint = [f"{name} differ"] if f"{name} differ" in HINTS else []
    return Wrong(CollectiveError, hinted(text, *hint), changes, everywhere)


def option(name: str, theirs: Any, its: Any) -> Wrong:
    return differ(name, repr(theirs), repr(its), {name: its}, {name: theirs})


# Differences that ranks only find together; "..." stands for what differs along with them.
DISAGREEMENTS = [
    differ("rows", "(5,)", "(4,)", lambda right: {name: right[name][1:] for name in ("logits", "targets")}),
    differ("...rows", "(5,)", "(1, 5)...", lambda right: {name: right[name][None] for name in ("logits", "targets")}),
    differ("dtype", "'float32'", "'float64'...", logits_as(np.float64)),
    differ("dtype", "'float32'", "'bfloat16'", logits_as(ml_dtypes.bfloat16)),
    differ("axis", "1", "0", lambda right: {"logits": right["logits"].T, "axis": 0}),
    differ("kind of targets", "'class numbers'", "'probabilities'", probabilities),
    differ("weight given", "False", "True", weight_as()),
    differ("weight given", "True", "False", {"weight": None}, weight_as()),
    option("ignore_index", -100, -1),
    option("label_smoothing", 0.1, 0.2),
    option("z_loss", 0.0, 1e-4),
    option("logit_scale", 1.0, 1.0000000000000002),
    option("softcap", None, 30.0),
    option("softcap", 50.0, 30.0),
    option("margin", None, (1.0, 0.5, 0.0)),
    option("margin", (1.0, 0.5, 0.0), (1.0, 0.5, 0.35)),
    option("reduction", "mean", "sum"),
    differ("compute_dtype", "'float32'", "'float64'", {"compute_dtype": np.float64}),
    differ("class_start given", "False", "True", lambda right: {"class_start": my_classes(right["comm"]).start}),
    differ("batch_comm given", "False", "True", {"batch_comm": MPI.COMM_SELF}),
    option("num_classes", 16, None),
    option("num_classes", 16, 17),
]


# Each rank checks by itself, so that one shows it for every function; of three the one at fault is named.
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", BAD, ids=str)
def test_wrong_call_on_one_rank_raises_everywhere(comm, case):
    last, functions = comm.size - 1, case.functions(comm)
    for function in functions if last == 0 else functions[-1:]:
        arguments = case.arguments(my_arguments(comm), fault=comm.rank == last)
        text = assert_refused(comm, function, arguments, case.kind, ranks={last})
        assert re.fullmatch(".*".join(map(re.escape, f"{case.text} (rank {last})".split("..."))), text)


@several
@pytest.mark.ranks(3)  # two ranks against one
@pytest.mark.parametrize("case", DISAGREEMENTS, ids=str)
def test_disagreement_says_which_rank_passed_what(comm, case):
    last = comm.size - 1
    said = case.text.format(others=ranks_text(*range(last)), last=ranks_text(last))
    for function in case.functions(comm):
        arguments = case.arguments(my_arguments(comm), fault=comm.rank == last)
        text = assert_refused(comm, function, arguments, CollectiveError)
        assert re.fullmatch(".*".join(map(re.escape, said.split("..."))), text), text


def test_target_out_of_range_is_named_by_index(comm):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, CLASSES)).astype(np.float32)[..., my_classes(comm)]
    targets = np.zeros((2, 3), np.int32)
    targets[1, 2] = 99
    everyone = set(range(comm.size))
    for one, other, text in [
        (logits, targets, "targets[1, 2] = 99 is outside [0, 16)"),
        (logits[0, 0], np.int16(-3), "= -3 is outside [0, 16)"),
    ]:
        arguments = {"logits": one, "targets": other, "comm": comm}
        assert_refused(comm, pce.softmax_cross_entropy, arguments, IndexError, text, ranks=everyone)


def test_error_says_what_every_failing_rank_found(comm):
    arguments = my_arguments(comm)
    if comm.rank in (0, 3):
        arguments["axis"] = 7
    elif comm.rank == 1:
        arguments["logits"] = arguments["logits"].astype(np.int64)
    text = assert_refused(
        comm, pce.softmax_cross_entropy, arguments, ValueError, "axis = 7", ranks={0, 1, 3} & set(range(comm.size))
    )
    if comm.size > 1:
        assert "int64 (rank 1)" in text
    if comm.size > 3:
        assert text.count("axis = 7") == 1
        assert "(ranks 0, 3)" in text


def test_error_precedes_disagreement(comm):
    arguments = my_arguments(comm) | {"z_loss": 0.1 * comm.rank}
    if comm.rank == comm.size - 1:
        arguments |= {"softcap": -1.0}
    assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError, "softcap", "-1.0", ranks={comm.size - 1})


def test_long_messages_arrive_whole(comm):
    word = "average" * 500 + str(comm.rank)
    arguments = my_arguments(comm) | {"reduction": word}
    text = assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError)
    assert all("average" * 500 + f"{rank}' (rank {rank})" in text for rank in range(comm.size))


@by_name("function", FUNCTIONS)
@pytest.mark.parametrize("wrong", [3, "world", MPI.COMM_NULL, MPI.GROUP_EMPTY], ids=["3", "world", "null", "group"])
def test_wrong_communicator_raises_on_its_own_rank(comm, function, wrong):
    names = ["comm"] if function is pce.class_statistics else ["comm", "batch_comm"]
    raised = {}
    if comm.rank == comm.size - 1:  # the others do not call: nobody may wait for them
        for name in names:
            raised[name] = outcome(function, **(my_arguments(comm) | {"comm": MPI.COMM_SELF} | {name: wrong}))
    afterwards = loss_and_gradient(comm)
    for name, error in raised.items():
        assert error is not None
        assert error.kind == "TypeError"
        assert error.text.startswith(f"{name} must be an mpi4py intracommunicator")
        assert ("MPI.COMM_NULL, which has no ranks" if wrong is MPI.COMM_NULL else repr(wrong)) in error.text
    assert_right(comm, afterwards)


@several
def test_useless_communicator_raises_on_its_own_rank(comm):
    half, freed = comm.Split(comm.rank % 2), comm.Dup()
    freed.Free()
    inter = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    errors = [outcome(pce.softmax_cross_entropy, **(my_arguments(comm) | {"comm": wrong})) for wrong in (inter, freed)]
    inter.Free()
    half.Free()
    afterwards = loss_and_gradient(comm)
    assert [error and error.kind for error in errors] == ["TypeError"] * 2
    assert "comm must be an mpi4py intracommunicator" in errors[0].text
    assert errors[1].text.endswith("got a null communicator: it was freed, or Split or Create left this rank out")
    assert_right(comm, afterwards)


# ---------------------------------------------------------------------------------------- what ranks only find together


def gathered(comm: MPI.Intracomm, name: str) -> Arguments:
    """Arguments of a call in which each rank that passes classes passes all of them; `name` says in what form."""
    logits, targets = whole_problem()
    if name == "masked":
        logits[:, 1:] = np.where(np.arange(1, CLASSES) % 3 == 0, logits[:, 1:], -np.inf)
    if name == "one row":
        logits, targets = logits[0], targets[0]
    arguments = {"logits": logits, "targets": targets, "comm": comm}
    forms: dict[str, Arguments] = {
        "classes first": {"logits": logits.T.copy() if comm.rank % 2 else logits.T, "axis": 0},
        "classes between": {"logits": logits.T[np.newaxis], "targets": targets[np.newaxis], "axis": 1},
        "bfloat16": {"logits": logits.astype(ml_dtypes.bfloat16)},
        "an empty shard": {"logits": logits[..., : 0 if comm.rank == comm.size - 1 else CLASSES]},
        "class_start": {"class_start": CLASSES * comm.rank},
        "probabilities": {"targets": np.full(logits.shape, 1 / CLASSES)},
    }
    return arguments | forms.get(name, {})


GATHERED = (
    *("as they are", "masked", "one row", "classes first", "classes between", "bfloat16", "an empty shard"),
    *("class_start", "probabilities"),
)


@pytest.mark.ranks(1, 3)  # one rank has nothing to compare with
@by_name("function", FUNCTIONS)
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_logits_raise_without_num_classes(comm, function, name):
    arguments = gathered(comm, name)
    if name == "probabilities" and function is pce.class_statistics:
        arguments["targets"] = None
    ranks = set(range(comm.size - (name == "an empty shard")))
    if len(ranks) > 1:
        settled = f"num_classes={CLASSES * len(ranks)}"
        text = assert_refused(comm, function, arguments, ValueError, "gathered logits", settled)
        assert f"the same logits of {CLASSES} classes {ranks_text(*ranks)}" in text
    elif ranks:
        assert outcome(function, **arguments) is None


def test_equal_shards_are_settled_by_num_classes(comm):
    logits, targets = whole_problem()
    targets = targets + CLASSES * (np.arange(ROWS) % comm.size)
    loss = pce.softmax_cross_entropy(logits, targets, comm=comm, num_classes=CLASSES * comm.size)
    expected = dense.softmax_cross_entropy(np.tile(logits, comm.size), targets)
    np.testing.assert_allclose(loss, expected, rtol=TOLERANCE)


def test_equal_shards_without_two_values_are_legal(comm):
    # They are no copies of one another, as far as can be told.
    constant = np.repeat(np.arange(ROWS, dtype=np.float32)[:, np.newaxis], CLASSES, axis=1)
    masked = np.where(np.arange(CLASSES) % 2, -np.inf, constant).astype(np.float32)
    shards = {
        "zeros": np.zeros((ROWS, CLASSES), np.float32),
        "signed zeros": np.where(np.arange(CLASSES) % 2, -0.0, np.zeros((ROWS, 1))).astype(np.float32),
        "constant rows": constant,
        "masked classes": masked,
        "nan": np.where(np.arange(CLASSES) % 3, masked, np.nan).astype(np.float32),
        "one class": whole_problem()[0][:, :1],
        "no rows": np.zeros((0, CLASSES), np.float32),
        "copies of different lengths": whole_problem()[0][:, : CLASSES - comm.rank],
    }
    raised = {
        name: outcome(pce.softmax_cross_entropy, logits=shard, targets=np.zeros(len(shard), int), comm=comm)
        for name, shard in shards.items()
    }
    assert raised == dict.fromkeys(shards)


def test_equal_shards_of_distributed_array_are_legal(comm):
    mesh = pce.Mesh(comm, classes=comm.size)
    logits, targets = whole_problem()
    x = pce.from_local(logits, mesh, classes=pce.Shard(1))
    loss = pce.cross_entropy(x, targets)
    largest = pce.max(pce.softmax(x, axis=1)).full()
    assert float(loss.full()) == pytest.approx(
        float(dense.softmax_cross_entropy(np.tile(logits, comm.size), targets)), rel=TOLERANCE
    )
    assert 0 < float(largest) < 1


def test_num_classes_is_compared_with_all_shards(comm):
    shards, whole = my_arguments(comm), my_arguments(comm) | {"logits": whole_problem()[0]}
    cases = [(shards, CLASSES, wrong) for wrong in (1, CLASSES - 1, CLASSES + 1, 10**12)]
    cases += [(whole, CLASSES * comm.size, CLASSES)] * (comm.size > 1)
    for function, (arguments, together, wrong) in itertools.product(FUNCTIONS, cases):
        said = f"num_classes = {wrong}", f"{together} classes together"
        call = arguments | {"num_classes": wrong}
        text = assert_refused(comm, function, call, ValueError, *said, ranks=set(range(comm.size)))
        assert (f"where the last {together - wrong} are padding, slice these columns off, or mask" in text) == (
            wrong < together
        )
        for rank in range(comm.size):
            start, stop = shard_range(CLASSES, comm.size, rank)
            assert str(CLASSES if arguments is whole else stop - start) in text


def test_agreement_does_not_depend_on_earlier_calls(comm):
    if comm.rank == 0:
        agree(MPI.COMM_SELF, "a test of earlier calls", {"flag": 1})
    facts = agree(comm, "a test of earlier calls", {"flag": True}, facts=(comm.rank,))
    assert facts == [tuple(range(comm.size))]


def test_equal_numbers_of_different_types_agree(comm):
    start = my_classes(comm).start
    ours = [
        {"num_classes": [16, np.int64(16), np.uint8(16), np.int32(16)][comm.rank % 4]},
        {"class_start": [start, np.int64(start)][comm.rank % 2]},
        {"z_loss": [1, 1.0, np.float32(1), np.int8(1)][comm.rank % 4]},
        {"ignore_index": [np.int8(-7), -7][comm.rank % 2]},
        {"axis": [-1, 1][comm.rank % 2]},
        {"label_smoothing": [0.0, -0.0, 0, np.float64(0)][comm.rank % 4]},
    ]
    # A scale of each call's own: none of them profits from what a call before it has settled.
    results = [
        outcome(pce.softmax_cross_entropy, **(my_arguments(comm) | {"logit_scale": 1.5 + number} | options))
        for number, options in enumerate(ours)
    ]
    assert results == [None] * len(ours)


@by_name("function", FUNCTIONS)
@pytest.mark.parametrize(("shift", "fault"), [(2, "leave a gap"), (-1, "overlap")])
def test_class_ranges_with_gap_or_overlap_raise(comm, function, shift, fault):
    start, stop = shard_range(CLASSES, comm.size, comm.size - 1)
    if start + shift >= 0:  # one range overlaps nothing
        mine = my_classes(comm).start + shift * (comm.rank == comm.size - 1)
        text = f"at class {start + min(shift, 0)}...[{start + shift}, {stop + shift}) (rank {comm.size - 1})"
        arguments = my_arguments(comm) | {"class_start": mine}
        assert_refused(comm, function, arguments, ValueError, f"class ranges {fault}", text)


@pytest.mark.parametrize("start", [None, 0, 3])
def test_call_without_any_classes_raises(comm, start):
    for function in FUNCTIONS:
        arguments = my_arguments(comm)
        arguments |= {"logits": arguments["logits"][:, :0], "class_start": start}
        assert_refused(comm, function, arguments, ValueError, "no classes", "empty")


def test_class_ranges_may_come_in_any_order(comm):
    logits, targets = whole_problem()
    start, stop = shard_range(CLASSES, max(1, comm.size - 1), max(0, comm.size - 2 - comm.rank))
    if comm.rank == comm.size - 1 > 0:
        start = stop = 5  # an empty one among them
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(
        logits[:, start:stop], targets, comm=comm, class_start=start
    )
    expected_loss, expected = dense.softmax_cross_entropy_value_and_grad(logits, targets)
    np.testing.assert_allclose(loss, expected_loss, rtol=TOLERANCE)
    np.testing.assert_allclose(gradient, expected[:, start:stop], rtol=0, atol=TOLERANCE)


def test_class_statistics_of_probability_targets_raise(comm):
    arguments = my_arguments(comm)
    arguments |= probabilities(arguments)
    text = "index targets...probabilities"
    assert_refused(comm, pce.class_statistics, arguments, ValueError, text, ranks=set(range(comm.size)))


# -------------------------------------------------------------------------------------------------- ranks that disagree


@several
def test_statistics_have_targets_everywhere_or_nowhere(comm):
    arguments = my_arguments(comm)
    if comm.rank == 0:
        arguments["targets"] = None
    said = f"kind of targets: 'none' (rank 0), 'class numbers' {ranks_text(*range(1, comm.size))}"
    assert_refused(comm, pce.class_statistics, arguments, CollectiveError, said)


@several
def test_disagreement_of_all_ranks_names_all(comm):
    arguments = my_arguments(comm) | {"z_loss": float(comm.rank), "softcap": comm.rank + 10.0}
    text = assert_refused(comm, pce.softmax_cross_entropy, arguments, CollectiveError)
    for name, first in (("z_loss", 0), ("softcap", 10)):
        said = ", ".join(f"{float(first + rank)} (rank {rank})" for rank in range(comm.size))
        assert f"{name}: {said}" in text


@several
@by_name("function", FUNCTIONS)
@pytest.mark.parametrize("target", [0, -100], ids=["a class", "ignored"])
def test_targets_that_differ_raise(comm, function, target):
    arguments = my_arguments(comm)
    if comm.rank == comm.size - 1:
        arguments |= changed(with_target(4, target), arguments)
    text = assert_refused(comm, function, arguments, CollectiveError, "ranks disagree on the values of targets")
    assert ranks_named_in(text) == set(range(comm.size))
    assert ranks_text(*range(comm.size - 1)) in text


def test_equal_targets_of_different_types_agree(comm):
    logits = np.zeros((2, 3, CLASSES))[..., my_classes(comm)]
    targets = np.array([[1, 2, 3], [4, -100, 5]])
    mine = [targets, targets.astype(np.int8), np.asfortranarray(targets), targets.astype(">i4")][comm.rank % 4]
    loss = pce.softmax_cross_entropy(logits, mine, comm=comm)
    np.testing.assert_allclose(loss, np.log(CLASSES), rtol=1e-15)


@several
@pytest.mark.parametrize(
    "functions", list(itertools.permutations(FUNCTIONS, 2)), ids=lambda pair: " ".join(f.__name__ for f in pair)
)
def test_different_functions_on_different_ranks_raise(comm, functions):
    last = comm.size - 1
    function = functions[comm.rank == last]
    text = assert_refused(comm, function, my_arguments(comm), CollectiveError)
    theirs, its = (each.__name__ for each in functions)
    assert text == f"ranks disagree on operation: {theirs} {ranks_text(*range(last))}, {its} {ranks_text(last)}"


# ------------------------------------------------------------------------------------------- a grid of rows and classes


class Grid(NamedTuple):
    """Ranks as row groups times class groups; `comm` joins the shards of one row group, `batch_comm` the row groups."""

    world: MPI.Intracomm
    row_groups: int
    row_group: int
    comm: Any
    batch_comm: Any

    def arguments(self) -> Arguments:
        """A right call, with row_group + 2 rows in each row group."""
        logits, targets = whole_problem(rows=self.stop(self.row_groups - 1))
        rows = slice(self.stop(self.row_group - 1), self.stop(self.row_group))
        return {
            "logits": logits[rows, my_classes(self.comm)].copy(),
            "targets": targets[rows],
            "comm": self.comm,
            "batch_comm": self.batch_comm,
        }

    @staticmethod
    def stop(row_group: int) -> int:
        return sum(group + 2 for group in range(row_group + 1))

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        return pce.softmax_cross_entropy_value_and_grad(**self.arguments())

    def assert_right(self, result: tuple[np.ndarray, np.ndarray]) -> None:
        problem = whole_problem(rows=self.stop(self.row_groups - 1))
        loss, gradient = dense.softmax_cross_entropy_value_and_grad(*problem)
        rows = slice(self.stop(self.row_group - 1), self.stop(self.row_group))
        np.testing.assert_allclose(result[0], loss, rtol=TOLERANCE)
        np.testing.assert_allclose(result[1], gradient[rows, my_classes(self.comm)], rtol=0, atol=TOLERANCE)

    def assert_refused(
        self, function: Callable[..., object], arguments: Arguments, kind: type[Exception], *fragments: str
    ) -> str:
        """`assert_refused` on every rank of the grid."""
        return assert_refused(self.world, function, arguments, kind, *fragments, grid=self)


def grids(comm: MPI.Intracomm) -> Iterator[Grid]:
    """Every grid that these ranks can form."""
    for row_groups in range(1, comm.size + 1):
        if comm.size % row_groups == 0:
            classes = comm.size // row_groups
            row_group, class_group = divmod(comm.rank, classes)
            over_classes, over_rows = comm.Split(row_group), comm.Split(class_group)
            yield Grid(comm, row_groups, row_group, over_classes, over_rows)
            over_classes.Free()
            over_rows.Free()


def test_row_group_may_have_no_rows(comm):
    for grid in grids(comm):
        arguments = grid.arguments()
        if grid.row_group > 0:
            arguments |= {"logits": arguments["logits"][:0], "targets": arguments["targets"][:0]}
        loss = pce.softmax_cross_entropy(**arguments)
        logits, targets = whole_problem(rows=grid.stop(grid.row_groups - 1))
        np.testing.assert_allclose(loss, dense.softmax_cross_entropy(logits[:2], targets[:2]), rtol=TOLERANCE)


@by_name("function", LOSSES)
def test_error_on_one_rank_reaches_grid(comm, function):
    for grid in grids(comm):
        for failing in range(comm.size):
            row_group, shard = divmod(failing, grid.comm.size)
            arguments = grid.arguments()
            if comm.rank == failing:
                arguments["targets"] = arguments["targets"].astype(np.complex64)
            text = grid.assert_refused(function, arguments, TypeError, "targets", "complex64", f"(rank {shard})")
            assert f"(rank {row_group} of batch_comm)" in text or grid.row_groups == 1


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])
def test_target_out_of_range_reaches_grid(comm, cupy, on_gpu):
    for grid in grids(comm):
        arguments = grid.arguments()
        if grid.row_group == grid.row_groups - 1:
            arguments["targets"] = np.full_like(arguments["targets"], CLASSES)
        if on_gpu:
            arguments |= {name: cupy.asarray(arguments[name]) for name in ("logits", "targets")}
        said = f"{outside('targets[0] = 16')} {ranks_text(*range(grid.comm.size))}"
        text = grid.assert_refused(pce.softmax_cross_entropy, arguments, IndexError, said)
        assert f"(rank {grid.row_groups - 1} of batch_comm)" in text or grid.row_groups == 1


def test_different_errors_of_row_groups_are_all_told(comm):
    for grid in grids(comm):
        arguments = grid.arguments() | {"softcap": -1.0 - grid.row_group}
        said = [f"got {-1.0 - row_group}" for row_group in range(grid.row_groups)]
        grid.assert_refused(pce.softmax_cross_entropy, arguments, ValueError, *said)


def test_disagreement_within_row_group_reaches_grid(comm):
    for grid in grids(comm):
        if grid.comm.size > 1:
            one = grid.arguments() | ({"reduction": "sum"} if comm.rank == comm.size - 1 else {})
            said = f"'sum' (rank {grid.comm.size - 1})"
            other = grid.arguments()
            if comm.rank == 0:
                other["targets"] = np.zeros_like(other["targets"])
            grid.assert_refused(pce.softmax_cross_entropy, one, CollectiveError, "disagree on reduction", said)
            grid.assert_refused(pce.softmax_cross_entropy, other, CollectiveError, "values of targets", "(rank 0)")


BETWEEN_ROW_GROUPS = [
    option("reduction", "mean", "sum"),
    option("reduction", "none", "mean"),
    option("label_smoothing", 0.0, 0.1),
    option("logit_scale", 1.0, 2.0),
    option("ignore_index", -100, -1),
]


@several
@pytest.mark.parametrize("case", BETWEEN_ROW_GROUPS, ids=str)
def test_row_groups_that_differ_in_option_raise(comm, case):
    for grid in grids(comm):
        if grid.row_groups > 1:
            last = grid.row_groups - 1
            arguments = case.arguments(grid.arguments(), fault=grid.row_group == last)
            others, fault = (
                text.replace(")", " of batch_comm)") for text in (ranks_text(*range(last)), ranks_text(last))
            )
            said = case.text.format(others=others, last=fault)
            grid.assert_refused(pce.softmax_cross_entropy_value_and_grad, arguments, CollectiveError, said)


@several
def test_row_groups_of_other_classes_or_function_raise(comm):
    for grid in grids(comm):
        if grid.row_groups > 1:
            arguments = grid.arguments()
            if grid.row_group == 0 and grid.comm.rank == 0:
                arguments["logits"] = np.pad(arguments["logits"], ((0, 0), (0, 3)))
            others = ranks_text(*range(1, grid.row_groups)).replace(")", " of batch_comm)")
            said = f"num_classes: 19 (rank 0 of batch_comm), 16 {others}"
            grid.assert_refused(pce.softmax_cross_entropy, arguments, CollectiveError, said)
            said = "operation: softmax_cross_entropy (rank 0 of batch_comm), softmax_cross_entropy_forward"
            grid.assert_refused(LOSSES[grid.row_group > 0], grid.arguments(), CollectiveError, said)


def test_error_over_rows_alone_reaches_every_rank(comm):
    logits, targets = whole_problem()
    targets = targets.copy()
    if comm.rank == comm.size - 1:
        targets[3] = 16
    arguments = {"logits": logits, "targets": targets, "batch_comm": comm}
    said = f"targets[3] = 16 is outside [0, 16)...rank {comm.size - 1}"
    assert_refused(comm, pce.softmax_cross_entropy, arguments, IndexError, said)


# ----------------------------------------------------------------------------- calls that communicate nothing: backward


def residuals_of(comm: MPI.Intracomm, **options: Any) -> pce.Residuals:
    return pce.softmax_cross_entropy_forward(**my_arguments(comm), **options)[1]


# These change the arguments `logits`, `dloss` and `residuals`.
BAD_BACKWARD = [
    Wrong(ValueError, "dloss...scalar...(5,)...(4,)", {"dloss": np.ones(4)}),
    Wrong(ValueError, "dloss...scalar...(5,)...(5, 1)", {"dloss": np.ones((5, 1))}),
    Wrong(ValueError, "dloss...scalar...(5,)...(4,)", lambda right: {"dloss": np.ones(4), "out": right["logits"]}),
    Wrong(TypeError, "dloss...real...complex128", {"dloss": 1j}),
    Wrong(TypeError, "dloss...real...bool", {"dloss": True}),
    Wrong(TypeError, "dloss...real...<U3", {"dloss": "one"}),
    Wrong(TypeError, "dloss...array...NoneType", {"dloss": None}),
    Wrong(TypeError, "residuals...softmax_cross_entropy_forward...float", {"residuals": 1.0}),
    Wrong(ValueError, "out...shape...(4,", out_of(lambda out: out[1:])),
    Wrong(TypeError, f"{OUT}int64", out_of(lambda out: out.astype(np.int64))),
    Wrong(ValueError, "out is read-only", out_of(read_only)),
    Wrong(ValueError, NOT_THE_LOGITS, lambda right: {"out": right["logits"][::-1]}),
    Wrong(TypeError, "out must be an array to write to, got list", out_of(np.ndarray.tolist)),
]


@pytest.mark.ranks(1, 2)  # nobody else hears of it
@pytest.mark.parametrize("case", BAD_BACKWARD, ids=str)
def test_wrong_backward_raises_and_keeps_residuals_usable(comm, case):
    residuals = residuals_of(comm, reduction="none")
    arguments = {"dloss": 1.0, "residuals": residuals}
    raised = None
    if comm.rank == comm.size - 1:  # nobody waits for the others
        changes = changed(case.changes, {"logits": residuals.problem.logits})
        raised = outcome(pce.softmax_cross_entropy_backward, **(arguments | changes))
    gradient = pce.softmax_cross_entropy_backward(**arguments)
    afterwards = loss_and_gradient(comm)
    if comm.rank == comm.size - 1:
        assert raised is not None
        assert raised.kind == case.kind.__name__
        assert re.search(".*".join(map(re.escape, case.text.split("..."))), raised.text)
    problem = whole_problem()
    _, expected = dense.softmax_cross_entropy_value_and_grad(*problem, reduction="none")
    np.testing.assert_allclose(gradient, expected[:, my_classes(comm)], rtol=0, atol=TOLERANCE)
    assert_right(comm, afterwards)


def test_backward_into_targets_or_weight_is_refused(comm):
    right = my_arguments(comm)
    raised = []
    for change in (out_over_the_targets(right), out_over_the_weight(right)):
        arguments = right | {name: value for name, value in change.items() if name != "out"}
        _, residuals = pce.softmax_cross_entropy_forward(**arguments)
        before = change["out"].tobytes()
        raised.append(outcome(pce.softmax_cross_entropy_backward, dloss=1.0, residuals=residuals, out=change["out"]))
        raised.append(change["out"].tobytes() == before or "out was written to")
    kinds = [each.kind if isinstance(each, Raised) else each for each in raised]
    empty = right["logits"].size == 0
    assert kinds == ["ValueError", True, "ValueError", True] or empty


def test_residuals_used_up_raise_on_their_own_rank(comm):
    residuals = residuals_of(comm)
    logits = residuals.problem.logits
    first = pce.softmax_cross_entropy_backward(1.0, residuals, out=logits)
    kept = logits.tobytes()
    raised = []
    if comm.rank == comm.size - 1:
        raised = [
            outcome(pce.softmax_cross_entropy_backward, dloss=1.0, residuals=residuals, out=out)
            for out in (None, logits, np.zeros_like(logits))
        ]
    afterwards = loss_and_gradient(comm)
    assert first is logits
    assert [each and each.kind for each in raised] == ["RuntimeError"] * len(raised)
    assert all("used up" in each.text for each in raised)
    assert logits.tobytes() == kept
    assert_right(comm, afterwards)


# -------------------------------------------------------------------------------------------------------- the agreement


def test_agree_gives_facts_of_every_rank(comm):
    facts = tuple(100 * comm.rank + number for number in range(FACTS))
    everything = agree(comm, "a test", {"size": comm.size}, facts=facts)
    some = agree(comm, "a test", {}, facts=facts[:2])
    none = agree(comm, "a test", {})
    expected = [tuple(100 * rank + number for rank in range(comm.size)) for number in range(FACTS)]
    assert everything == expected
    assert some == expected[:2]
    assert none == []


def test_agreement_is_traced_and_not_counted_as_payload(comm):
    for grid in grids(comm):
        with pce.trace() as trace:
            grid.result()
        agreements = trace.select(purpose=Purpose.AGREEMENT)
        assert [(event.over, event.ranks, event.bytes) for event in agreements] == [
            ("comm", grid.comm.size, 56),
            ("batch_comm", grid.batch_comm.size, 56),
        ]
        assert {event.collective for event in agreements} == {"all_gather"}
        assert [(event.collective, event.over) for event in trace.select()] == [
            ("all_reduce", "comm"),
            ("all_reduce", "batch_comm"),
        ]
        assert trace.count() == 2
        assert trace.count(purpose=None) == 4


@pytest.fixture
def named(comm):
    """Options whose communicators have names of their own: classes over all ranks, rows over each alone."""
    return Options(operation="a loss", comm=comm, batch_comm=MPI.COMM_SELF, over="tensor", batch_over="data")


def test_communicators_are_traced_by_names_of_call(comm, named):
    logits, targets = whole_problem()
    with pce.trace() as trace:
        forward(prepare(named, logits[:, my_classes(comm)], targets))
    assert [(event.collective, event.over) for event in trace.events] == [
        ("all_gather", "tensor"),
        ("all_gather", "data"),
        ("all_reduce", "tensor"),
        ("all_reduce", "data"),
    ]


BAD_IN_A_NAMED_CALL = {
    "a check of one rank's own": ({"reduction": "average"}, r"reduction must be .* \(ranks? [\d, ]+ along tensor\)"),
    "a target": ({}, r"targets\[0\] = .* \(ranks? [\d, ]+ along tensor\)"),
    "the number of classes": ({"num_classes": CLASSES + 1}, r"classes together: .* \(ranks? [\d, ]+ along tensor\)"),
    "the class ranges": ({"class_start": 1}, r"class ranges .* \(rank 0 along tensor\)"),
    "a communicator": ({"comm": "all"}, r"tensor must be an mpi4py intracommunicator"),
    "a communicator over rows": ({"batch_comm": "all"}, r"data must be an mpi4py .* \(ranks? [\d, ]+ along tensor\)"),
}


@pytest.mark.parametrize(("change", "text"), BAD_IN_A_NAMED_CALL.values(), ids=BAD_IN_A_NAMED_CALL)
def test_errors_name_communicators_as_call_does(comm, named, change, text):
    logits, targets = whole_problem()
    targets[0] = CLASSES
    with pytest.raises((IndexError, TypeError, ValueError), match=text) as raised:
        prepare(replace(named, **change), logits[:, my_classes(comm)], targets)
    texts = comm.allgather(str(raised.value))
    assert texts == [texts[0]] * comm.size


def test_refused_call_sends_no_payload(comm):
    arguments = my_arguments(comm)
    if comm.rank == comm.size - 1:
        arguments["reduction"] = "average"
    with pce.trace() as trace:
        raised = outcome(pce.softmax_cross_entropy, **arguments)
    assert raised is not None
    assert trace.count() == 0
    agreements = trace.select(purpose=Purpose.AGREEMENT)
    assert agreements[0].bytes == 56
    # The failing rank's message went over the wire as well.
    message = raised.text.removesuffix(f" (rank {comm.size - 1})") if comm.rank == comm.size - 1 else ""
    assert sum(event.bytes for event in agreements[1:]) >= len(message)
    assert len(agreements) > 1


# --------------------------------------------------------------------------- the caller's floating-point error handling


def awkward_calls(comm: MPI.Intracomm) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls whose arithmetic overflows, underflows, divides by zero or meets nan."""
    mine = my_classes(comm)
    logits, targets = whole_problem()
    certain = np.zeros_like(logits)
    certain[np.arange(ROWS), targets] = 200.0  # a loss of 16 e^-200
    extreme = np.where(np.arange(CLASSES) % 2, -3e38, 3e38).astype(np.float32) * np.ones((ROWS, 1), np.float32)
    extreme64 = np.where(np.arange(CLASSES) % 2, -1.7e308, 1.7e308) * np.ones((ROWS, 1))
    masked = np.where(np.arange(CLASSES) == targets[:, None], 0.0, -np.inf).astype(np.float32)
    impossible = np.full_like(logits, -np.inf)
    broken = logits.copy()
    broken[1, 3], broken[2, 5] = np.nan, np.inf
    tiny = (logits * np.float32(1e-40)).astype(np.float32)
    odd = np.arange(ROWS) * 2 + 1
    ignored = np.full(ROWS, -100)
    problems: dict[str, Any] = {
        "plain": (logits, targets, {}),
        "almost certain": (certain, targets, {}),
        "almost certain, float64 arithmetic": (certain, targets, {"compute_dtype": np.float64}),
        "beyond float32": (extreme, odd, {}),
        "beyond float32, a sum": (extreme, odd, {"reduction": "sum"}),
        "beyond float64, a sum": (extreme64, odd, {"reduction": "sum"}),
        "beyond float32, squared": (extreme, odd, {"z_loss": 1.0}),
        "masked but for the target": (masked, targets, {"label_smoothing": 0.1}),
        "everything masked": (impossible, targets, {"reduction": "none"}),
        "nan and inf": (broken, targets, {"reduction": "none", "softcap": 5.0}),
        "all ignored": (logits, ignored, {}),
        "denormal": (tiny, targets, {"logit_scale": 1e-3}),
        "denormal, capped": (tiny, targets, {"softcap": 1e-30}),
        "float16": (certain.astype(np.float16), targets, {}),
        "bfloat16": (certain.astype(ml_dtypes.bfloat16), targets, {"z_loss": 1e-5}),
        "weights of nought": (logits, targets, {"weight": np.zeros(CLASSES)}),
        "weights beyond float32": (logits, targets, {"weight": np.full(CLASSES, 1e300), "reduction": "sum"}),
    }
    for name, (all_logits, all_targets, options) in problems.items():
        options = options | {"num_classes": CLASSES}  # some of these shards are equal
        if "weight" in options:
            options["weight"] = options["weight"][mine]
        shard = all_logits[:, mine]
        yield name, partial(pce.softmax_cross_entropy_value_and_grad, shard, all_targets, comm=comm, **options)
        yield f"{name}, backward", partial(forward_and_backward, shard, all_targets, comm=comm, **options)
        if not {"label_smoothing", "z_loss", "weight"} & options.keys():
            options.pop("reduction", None)
            yield f"{name}, statistics", partial(pce.class_statistics, shard, all_targets, comm=comm, **options)
    share = np.zeros_like(certain)
    share[:, 0] = 1e-30
    yield (
        "probabilities",
        partial(
            pce.softmax_cross_entropy_value_and_grad, masked[:, mine], share[:, mine], comm=comm, label_smoothing=0.5
        ),
    )
    more: dict[str, Any] = {"comm": comm, "num_classes": CLASSES}
    for name, all_logits in {"beyond float32": extreme, "nan and inf": broken, "everything masked": impossible}.items():
        shard = all_logits[:, mine]
        yield f"{name}, divergence", partial(pce.kl_divergence_value_and_grad, shard, -certain[:, mine], **more)
        yield f"{name}, nucleus", partial(pce.nucleus, shard, top_k=3, top_p=0.5, min_p=0.1, **more)
        yield f"{name}, largest", partial(pce.top_k, shard, 3, **more)
    # Gradients that are too large, and products of which only the first shard's are.
    for dtype, large, first in (("float16", 6e4, 1.0), ("float32", 1e30, 1e30), ("float64", 1e200, 1e200)):
        yield f"{dtype}, chosen", partial(chosen_and_gradient, certain[:, mine].astype(dtype), targets[:, None], **more)
        hidden, w = np.full((ROWS, 2), large, dtype), np.ones((2, CLASSES), dtype)
        w[:, 0] = first
        operands = hidden, w[:, mine], 0 * targets
        loss = partial(pce.linear_cross_entropy_value_and_grad, *operands, reduction="sum", **more)
        yield f"{dtype}, product", loss
        yield f"{dtype}, statistics of a product", partial(statistics_and_gradients, *operands, **more)


def chosen_and_gradient(*arguments: Any, **options: Any) -> tuple[object, object]:
    chosen, residuals = pce.take_classes_forward(*arguments, **options)
    return chosen, pce.take_classes_backward(1e60, residuals)


def statistics_and_gradients(*arguments: Any, **options: Any) -> tuple[object, ...]:
    statistics, residuals = pce.linear_class_statistics_forward(*arguments, **options)
    return *statistics, *pce.linear_class_statistics_backward(residuals, log_prob=1e30)


def forward_and_backward(*arguments: Any, **options: Any) -> tuple[object, object]:
    loss, residuals = pce.softmax_cross_entropy_forward(*arguments, **options)
    return loss, pce.softmax_cross_entropy_backward(1.0, residuals)


def bits(call: Callable[[], Any]) -> list[bytes | None] | str:
    try:
        return [None if part is None else np.asarray(part).tobytes() for part in call()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_strict_floating_point_handling_changes_nothing(comm):
    differing = []
    for name, call in awkward_calls(comm):
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            expected = bits(call)
        with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
            strictly = bits(call)
        with np.errstate(all="warn"), warnings.catch_warnings(action="error"):
            without_warning = bits(call)
        if isinstance(expected, str) or not expected == strictly == without_warning:
            differing.append((name, *(each if isinstance(each, str) else "" for each in (strictly, without_warning))))
    everywhere = comm.allgather(differing)
    assert everywhere == [[]] * comm.size


def test_error_is_same_under_strict_floating_point_handling(comm):
    with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
        arguments = my_arguments(comm) | {"targets": np.full(ROWS, 16)}
        assert_refused(comm, pce.softmax_cross_entropy, arguments, IndexError, "targets[0] = 16")
        arguments = my_arguments(comm) | {"label_smoothing": np.float32(np.nan)}
        assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError, "label_smoothing")


# ----------------------------------------------------------------------------------------------------------- afterwards


def test_messages_of_caller_are_no_agreement(comm):
    with awaiting_a_message(comm):
        raised = outcome(pce.softmax_cross_entropy, **my_arguments(comm) | {"targets": np.full(ROWS, 16)})
    afterwards = loss_and_gradient(comm)
    assert raised is not None
    assert raised.kind == "IndexError"
    assert_right(comm, afterwards)


def test_rank_without_memory_raises_everywhere(comm, monkeypatch):
    logits = np.zeros((3, 4), np.float32)

    def out_of_memory(*_: Any, **__: Any) -> np.ndarray:
        raise MemoryError("no room for the gradient")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(np, "empty_like", out_of_memory)
        with pytest.raises(MemoryError) as raised:
            pce.softmax_cross_entropy_value_and_grad(logits, np.zeros(3, int), comm=comm)
    texts = comm.allgather(str(raised.value))
    assert texts == [f"no room for the gradient (rank {comm.size - 1})"] * comm.size
    assert np.isfinite(pce.softmax_cross_entropy(logits, np.zeros(3, int), comm=comm))


def test_same_ranks_cannot_share_both_rows_and_classes(comm):
    both = outcome(pce.softmax_cross_entropy, **my_arguments(comm) | {"batch_comm": comm})
    afterwards = loss_and_gradient(comm)
    assert both is None if comm.size == 1 else both.text.startswith("comm and batch_comm are the same ranks")
    assert_right(comm, afterwards)
