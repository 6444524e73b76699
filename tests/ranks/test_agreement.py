"""Bad input, and ranks that disagree: one clear error, alike on every rank, and the communicator works afterwards."""

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
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.options import Options
from pce_mpi.loss.passes import forward

ROWS, CLASSES = 5, 16

# What a float32 loss and gradient of a few rows may differ from the oracle by: 8 ulp. Accuracy is not the matter here.
TOLERANCE = 8 * float(np.finfo(np.float32).eps)

LOSSES: list[Callable[..., object]] = [
    pce.softmax_cross_entropy,
    pce.softmax_cross_entropy_forward,
    pce.softmax_cross_entropy_value_and_grad,
]
FUNCTIONS: list[Callable[..., object]] = [*LOSSES, pce.class_statistics]

# Options that only some of the functions take.
ONLY_LOSSES = {"weight", "label_smoothing", "z_loss", "reduction", "batch_comm"}

by_name = partial(pytest.mark.parametrize, ids=lambda value: getattr(value, "__name__", None))


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


def my_arguments(comm: MPI.Intracomm) -> dict[str, Any]:
    """The arguments of a call that is right on every rank."""
    logits, targets = whole_problem()
    return {"logits": logits[:, my_classes(comm)].copy(), "targets": targets, "comm": comm}


def probabilities(comm: MPI.Intracomm) -> np.ndarray:
    logits, _ = whole_problem(seed=4)
    return (np.abs(logits) / np.abs(logits).sum(axis=1, keepdims=True))[:, my_classes(comm)].copy()


def loss_and_gradient(comm: MPI.Intracomm) -> tuple[np.ndarray, np.ndarray]:
    """What a right call gives; collective over `comm`."""
    return pce.softmax_cross_entropy_value_and_grad(**my_arguments(comm))


def assert_right(comm: MPI.Intracomm, result: tuple[np.ndarray, np.ndarray]) -> None:
    """`result` of `loss_and_gradient` is what the oracle says; communicates nothing."""
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(*whole_problem())
    np.testing.assert_allclose(result[0], loss, rtol=TOLERANCE)
    np.testing.assert_allclose(
        result[1], gradient[:, my_classes(comm)], rtol=0, atol=TOLERANCE * np.abs(gradient).max()
    )


# ------------------------------------------------------------------------------------------------------ what was raised


class Raised(NamedTuple):
    """What a call raised; the type by name, since it travels between ranks."""

    kind: str
    text: str


def outcome(function: Callable[..., object], **arguments: Any) -> Raised | None:
    """What the call raises here, None if it returns."""
    try:
        function(**arguments)
    except Exception as error:
        return Raised(type(error).__name__, str(error))
    return None


def assert_refused(
    comm: MPI.Intracomm,
    function: Callable[..., object],
    arguments: dict[str, Any],
    kind: type[Exception],
    *fragments: str,
    ranks: set[int] | None = None,
) -> str:
    """The call raises `kind` on every rank with one text, which has the fragments and names exactly `ranks`.

    Nothing is written, and the communicator computes a right loss afterwards.
    """
    written = {}
    if function is pce.softmax_cross_entropy_value_and_grad and "out" not in arguments:
        out = np.full_like(arguments["logits"] if readable(arguments["logits"]) else 0.0, 7.0, dtype=np.float32)
        arguments = arguments | {"out": out}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and value.dtype != object:
            written[name] = (value, value.tobytes())
    outcomes = comm.allgather(outcome(function, **arguments))
    afterwards = loss_and_gradient(comm)
    raised = outcomes[comm.rank]
    assert raised is not None, f"the call returned on this rank, of all ranks: {outcomes}"
    assert raised.kind == kind.__name__, raised.text
    assert outcomes == [raised] * comm.size
    for fragment in fragments:
        assert fragment in raised.text
    if ranks is not None:
        assert ranks_named_in(raised.text) == ranks, raised.text
    for name, (value, before) in written.items():
        assert value.tobytes() == before, f"{name} was written to"
    assert_right(comm, afterwards)
    return raised.text


def readable(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def ranks_named_in(text: str) -> set[int]:
    """The ranks in '(rank 1)' and '(ranks 0, 2)' at the end of each part of the text."""
    found = re.findall(r"\(ranks? ([\d, ]+)\)(?=; |$)", text)
    return {int(rank) for numbers in found for rank in numbers.split(", ")}


def ranks_text(*ranks: int) -> str:
    return f"(rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


def taken_by(function: Callable[..., object], arguments: dict[str, Any]) -> bool:
    """Whether the function has all these arguments."""
    if function is pce.class_statistics:
        return not ONLY_LOSSES & arguments.keys() and "out" not in arguments
    return "out" not in arguments or function is pce.softmax_cross_entropy_value_and_grad


# ------------------------------------------------------------------------------------- 1. what one rank finds by itself


class Bad(NamedTuple):
    """Arguments that are wrong by themselves: what they replace, and what the error says."""

    name: str
    kind: type[Exception]
    fragments: tuple[str, ...]
    change: Callable[[dict[str, Any]], dict[str, Any]]
    # What every rank passes, the one with the bad argument and the others.
    common: Callable[[MPI.Intracomm], dict[str, Any]] = lambda comm: {}


def bad(name: str, kind: type[Exception], *fragments: str, **changes: Any) -> Bad:
    """Constants in place of arguments; see `computed` for what depends on the right arguments."""
    return Bad(name, kind, fragments, lambda right: changes)


def computed(
    name: str,
    kind: type[Exception],
    *fragments: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    common: Callable[[MPI.Intracomm], dict[str, Any]] = lambda comm: {},
) -> Bad:
    return Bad(name, kind, fragments, change, common)


def targets_with(value: int, row: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(right: dict[str, Any]) -> dict[str, Any]:
        targets = right["targets"].copy()
        targets[row] = value
        return {"targets": targets}

    return change


def logits_as(dtype: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda right: {"logits": right["logits"].astype(dtype)}


def targets_as(dtype: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda right: {"targets": right["targets"].astype(dtype)}


def weight_with(dtype: Any, *more: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A weight for each class, and `more`: axes, or classes too many where there is one negative number."""

    def change(right: dict[str, Any]) -> dict[str, Any]:
        classes = right["logits"].shape[1]
        shape = (classes - more[0],) if more and more[0] < 0 else (classes, *more)
        return {"weight": np.ones(shape, dtype)}

    return change


def out_like_logits(change: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda right: {"out": change(np.zeros_like(right["logits"]))}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def out_over_part_of_the_logits(right: dict[str, Any]) -> dict[str, Any]:
    rows, classes = right["logits"].shape
    memory = np.zeros((rows + 1, classes), np.float32)
    memory[:rows] = right["logits"]
    return {"logits": memory[:rows], "out": memory[1:]}


def out_over_reversed_logits(right: dict[str, Any]) -> dict[str, Any]:
    return {"out": right["logits"][::-1]}


def out_over_the_targets(right: dict[str, Any]) -> dict[str, Any]:
    rows, classes = right["logits"].shape
    memory = np.zeros(max(rows * classes, 2 * rows), np.float32)
    targets = memory[: 2 * rows].view(np.int64)
    targets[:] = right["targets"]
    return {"targets": targets, "out": memory[: rows * classes].reshape(rows, classes)}


def out_over_the_weight(right: dict[str, Any]) -> dict[str, Any]:
    out = np.ones_like(right["logits"])
    return {"weight": out[0], "out": out}


def out_over_the_probabilities(right: dict[str, Any]) -> dict[str, Any]:
    return {"out": right["targets"]}


def weight_given(comm: MPI.Intracomm) -> dict[str, Any]:
    return {"weight": np.ones(my_arguments(comm)["logits"].shape[1])}


def probability_targets(comm: MPI.Intracomm) -> dict[str, Any]:
    return {"targets": probabilities(comm)}


def float64_logits(comm: MPI.Intracomm) -> dict[str, Any]:
    return {"logits": my_arguments(comm)["logits"].astype(np.float64)}


class Unreadable:
    """Fails with what no check expects when it is read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise KeyError("this array cannot be read")


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


BAD = [
    # targets
    computed("target_too_large", IndexError, "targets[3] = 16 is outside [0, 16)", change=targets_with(16, 3)),
    computed("target_far_too_large", IndexError, "targets[0] = 9223372036854775807", change=targets_with(2**63 - 1, 0)),
    computed("negative_target", IndexError, "targets[1] = -1 is outside [0, 16)", change=targets_with(-1, 1)),
    computed(
        "the_usual_ignored_target_where_another_is_ignored",
        IndexError,
        "targets[4] = -100 is outside [0, 16)",
        change=targets_with(-100, 4),
        common=lambda comm: {"ignore_index": -1},
    ),
    computed(
        "target_beyond_int64",
        IndexError,
        "targets[2] = 18446744073709551615",
        change=lambda right: {"targets": np.array([1, 2, 2**64 - 1, 3, 4], np.uint64)},
    ),
    computed(
        "index_targets_of_the_wrong_length",
        ValueError,
        "targets",
        "(5,)",
        "(6,)",
        change=lambda right: {"targets": np.ones(6, np.int64)},
    ),
    computed(
        "index_targets_with_the_class_axis_kept",
        ValueError,
        "targets",
        "(5,)",
        "(5, 1)",
        change=lambda right: {"targets": right["targets"][:, None]},
    ),
    computed(
        "float_targets_of_the_wrong_shape",
        ValueError,
        "targets",
        "logits' shape",
        "got (5,)",
        change=targets_as(np.float32),
    ),
    computed("complex_targets", TypeError, "targets", "integers", "complex128", change=targets_as(np.complex128)),
    computed("bool_targets", TypeError, "targets", "integers", "bool", change=targets_as(np.bool_)),
    computed("object_targets", TypeError, "targets", "integers", "object", change=targets_as(object)),
    computed("string_targets", TypeError, "targets", "integers", "<U21", change=targets_as(str)),
    bad("targets_that_are_no_array", TypeError, "targets", "array", "object", targets=object()),
    computed(
        "an_ignored_class_with_probability_targets",
        ValueError,
        "ignore_index",
        "probability",
        "got",
        "3",
        change=lambda right: {"ignore_index": 3},
        common=probability_targets,
    ),
    # logits
    computed("integer_logits", TypeError, "logits", "float32", "int64", change=logits_as(np.int64)),
    computed("complex_logits", TypeError, "logits", "float32", "complex64", change=logits_as(np.complex64)),
    computed("bool_logits", TypeError, "logits", "float32", "bool", change=logits_as(np.bool_)),
    computed("object_logits", TypeError, "logits", "float32", "object", change=logits_as(object)),
    computed("string_logits", TypeError, "logits", "float32", "<U", change=logits_as(str)),
    computed("foreign_byte_order", TypeError, "logits", "float32", ">f4", change=logits_as(">f4")),
    computed(
        "logits_without_an_axis",
        ValueError,
        "logits",
        "class axis",
        "0-d",
        change=lambda right: {"logits": np.float32(1)},
    ),
    bad("logits_that_are_no_array", TypeError, "logits", "array", "object", logits=object()),
    bad("ragged_logits", TypeError, "logits", "array", logits=[[1.0, 2.0], [3.0]]),
    bad("logits_that_cannot_be_read_nor_say_why", RuntimeError, "Mute", logits=Muting()),
    bad("logits_that_cannot_be_read", RuntimeError, "this array cannot be read", logits=Unreadable()),
    # weight
    computed(
        "weight_too_short",
        ValueError,
        "weight",
        "per class",
        "got (",
        change=weight_with(np.float32, -1),
        common=weight_given,
    ),
    computed(
        "weight_of_two_axes",
        ValueError,
        "weight",
        "per class",
        ", 2)",
        change=weight_with(np.float32, 2),
        common=weight_given,
    ),
    computed(
        "complex_weight",
        TypeError,
        "weight",
        "real",
        "complex64",
        change=weight_with(np.complex64),
        common=weight_given,
    ),
    computed("bool_weight", TypeError, "weight", "real", "bool", change=weight_with(np.bool_), common=weight_given),
    computed("string_weight", TypeError, "weight", "real", "<U1", change=weight_with("<U1"), common=weight_given),
    # numbers and words
    bad("smoothing_below_0", ValueError, "label_smoothing", "[0, 1]", "-0.1", label_smoothing=-0.1),
    bad("smoothing_above_1", ValueError, "label_smoothing", "[0, 1]", "1.5", label_smoothing=1.5),
    bad("smoothing_nan", ValueError, "label_smoothing", "[0, 1]", "nan", label_smoothing=np.nan),
    bad("smoothing_in_words", TypeError, "label_smoothing", "number", "'a lot'", label_smoothing="a lot"),
    bad("smoothing_true", TypeError, "label_smoothing", "number", "True", label_smoothing=True),
    bad("z_loss_inf", ValueError, "z_loss", "finite", "inf", z_loss=np.inf),
    bad("z_loss_nan", ValueError, "z_loss", "finite", "nan", z_loss=np.nan),
    bad("z_loss_none", TypeError, "z_loss", "number", "None", z_loss=None),
    bad("reduction_unknown", ValueError, "reduction", "'none', 'sum' or 'mean'", "'average'", reduction="average"),
    bad("reduction_none", ValueError, "reduction", "'none', 'sum' or 'mean'", "None", reduction=None),
    bad("axis_too_large", ValueError, "axis", "2 dimensions", "2", axis=2),
    bad("axis_too_small", ValueError, "axis", "2 dimensions", "-3", axis=-3),
    bad("axis_between_two", TypeError, "axis", "integer", "0.5", axis=0.5),
    *(
        bad(f"{name}_{value}", ValueError, name, "positive", str(value), **{name: value})
        for name, value in itertools.product(("logit_scale", "softcap"), (0.0, -1.0, np.inf, -np.inf, np.nan))
    ),
    bad("logit_scale_none", TypeError, "logit_scale", "number", "None", logit_scale=None),
    bad("softcap_in_words", TypeError, "softcap", "number", "'30'", softcap="30"),
    bad("ignore_index_between_two", TypeError, "ignore_index", "integer", "0.5", ignore_index=0.5),
    bad("class_start_negative", ValueError, "class_start", "0", "-4", class_start=-4),
    bad("class_start_between_two", TypeError, "class_start", "integer", "0.5", class_start=0.5),
    bad("class_start_beyond_int64", ValueError, "class_start", str(2**70), class_start=2**70),
    bad("num_classes_0", ValueError, "num_classes", "1", "0", num_classes=0),
    bad("num_classes_in_a_list", TypeError, "num_classes", "integer", "[16]", num_classes=[16]),
    bad("num_classes_in_words", TypeError, "num_classes", "integer", "'16'", num_classes="16"),
    bad("compute_dtype_half", TypeError, "compute_dtype", "float32", "float16", compute_dtype=np.float16),
    bad("compute_dtype_integer", TypeError, "compute_dtype", "float32", "int64", compute_dtype=np.int64),
    bad("compute_dtype_unknown", TypeError, "compute_dtype", "float32", "float31", compute_dtype="float31"),
    computed(
        "compute_dtype_narrower_than_the_logits",
        ValueError,
        "compute_dtype",
        "float32",
        "float64",
        change=lambda right: {"compute_dtype": np.float32},
        common=float64_logits,
    ),
    # out
    computed("out_too_small", ValueError, "out", "shape", "got (4,", change=out_like_logits(lambda out: out[1:])),
    computed(
        "out_of_integers",
        TypeError,
        "out",
        "float32",
        "int64",
        change=out_like_logits(lambda out: out.astype(np.int64)),
    ),
    computed(
        "out_complex",
        TypeError,
        "out",
        "float32",
        "complex64",
        change=out_like_logits(lambda out: out.astype(np.complex64)),
    ),
    computed("out_read_only", ValueError, "out", "read-only", change=out_like_logits(read_only)),
    computed("out_over_itself", ValueError, "out", "share", change=out_like_logits(every_element_in_one_place)),
    computed("out_of_sliding_windows", ValueError, "out", "share", change=out_like_logits(sliding_windows)),
    computed("out_that_is_no_array", TypeError, "out", "list", change=out_like_logits(np.ndarray.tolist)),
    computed("out_over_part_of_the_logits", ValueError, "out", "logits", change=out_over_part_of_the_logits),
    computed("out_over_the_logits_in_another_order", ValueError, "out", "logits", change=out_over_reversed_logits),
    computed("out_over_the_targets", ValueError, "out", "targets", change=out_over_the_targets),
    computed("out_over_the_weight", ValueError, "out", "weight", change=out_over_the_weight, common=weight_given),
    computed(
        "out_over_the_probabilities",
        ValueError,
        "out",
        "targets",
        change=out_over_the_probabilities,
        common=probability_targets,
    ),
]

bad_arguments = pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)


def functions_for(case: Bad, comm: MPI.Intracomm) -> list[Callable[..., object]]:
    right = my_arguments(comm) | case.common(comm)
    changed = case.common(comm) | case.change(right)
    functions = [function for function in FUNCTIONS if taken_by(function, changed)]
    probabilities_given = np.asarray(changed.get("targets", 0)).dtype.kind == "f"
    # class_statistics takes no probabilities, and would say so instead.
    return [function for function in functions if not (probabilities_given and function is pce.class_statistics)]


@bad_arguments
def test_a_bad_argument_on_every_rank_raises_the_same_error_on_every_rank(comm, case):
    right = my_arguments(comm) | case.common(comm)
    wrong = right | case.change(right)
    everyone = set(range(comm.size))
    assert_refused(comm, pce.softmax_cross_entropy_value_and_grad, wrong, case.kind, *case.fragments, ranks=everyone)


@bad_arguments
def test_a_bad_argument_on_one_rank_raises_its_error_on_every_rank_and_names_the_rank(comm, case):
    last = comm.size - 1
    for function in functions_for(case, comm):
        arguments = my_arguments(comm) | case.common(comm)
        if comm.rank == last:
            arguments |= case.change(arguments)
        assert_refused(comm, function, arguments, case.kind, *case.fragments, ranks={last})


def test_an_out_of_range_target_on_one_rank_has_the_text_of_the_design(comm):
    arguments = my_arguments(comm)
    if comm.rank == comm.size - 1:
        arguments |= targets_with(16, 3)(arguments)
    text = assert_refused(comm, pce.softmax_cross_entropy, arguments, IndexError)
    assert text == f"targets[3] = 16 is outside [0, 16) (rank {comm.size - 1})"


def test_an_out_of_range_target_is_named_by_its_index_in_all_axes(comm):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, CLASSES)).astype(np.float32)[..., my_classes(comm)]
    targets = np.zeros((2, 3), np.int32)
    targets[1, 2] = 99
    everyone = set(range(comm.size))
    arguments = {"logits": logits, "targets": targets, "comm": comm}
    assert_refused(
        comm, pce.softmax_cross_entropy, arguments, IndexError, "targets[1, 2] = 99 is outside", ranks=everyone
    )
    arguments = {"logits": logits[0, 0], "targets": np.int16(-3), "comm": comm}
    assert_refused(comm, pce.softmax_cross_entropy, arguments, IndexError, "= -3 is outside [0, 16)", ranks=everyone)


@by_name("function", LOSSES)
def test_a_target_beyond_the_last_class_is_refused_even_where_only_another_shard_could_hold_it(comm, function):
    # A shard that looked only for targets of its own would let every one of these pass.
    for target in (CLASSES, CLASSES + 1, -1, -CLASSES):
        arguments = my_arguments(comm)
        arguments |= targets_with(target, 2)(arguments)
        assert_refused(comm, function, arguments, IndexError, f"targets[2] = {target} is outside [0, 16)")


def test_an_error_says_what_every_failing_rank_found(comm):
    arguments = my_arguments(comm)
    if comm.rank == 0:
        arguments["axis"] = 7
    elif comm.rank == 1:
        arguments["logits"] = arguments["logits"].astype(np.int64)
    elif comm.rank == 3:
        arguments["axis"] = 7
    text = assert_refused(
        comm, pce.softmax_cross_entropy, arguments, ValueError, "axis = 7", ranks={0, 1, 3} & set(range(comm.size))
    )
    if comm.size > 1:
        assert "int64 (rank 1)" in text
    if comm.size > 3:
        assert text.count("axis = 7") == 1
        assert "(ranks 0, 3)" in text


def test_the_lowest_failing_rank_gives_the_error_its_type(comm):
    arguments = my_arguments(comm) | {"reduction": "average" if comm.rank < comm.size - 1 else "mean"}
    if comm.rank == comm.size - 1:
        arguments |= {"label_smoothing": "a lot"}
    kind = ValueError if comm.size > 1 else TypeError
    assert_refused(comm, pce.softmax_cross_entropy, arguments, kind, "a lot", ranks=set(range(comm.size)))


def test_an_error_is_told_even_if_the_ranks_disagree_as_well(comm):
    arguments = my_arguments(comm) | {"z_loss": 0.1 * comm.rank}
    if comm.rank == comm.size - 1:
        arguments |= {"softcap": -1.0}
    assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError, "softcap", "-1.0", ranks={comm.size - 1})


def test_many_long_messages_arrive_whole(comm):
    word = "average" * 500 + str(comm.rank)
    arguments = my_arguments(comm) | {"reduction": word}
    text = assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError)
    assert all("average" * 500 + f"{rank}' (rank {rank})" in text for rank in range(comm.size))


def test_an_error_with_letters_beyond_ascii_arrives_on_every_rank(comm):
    arguments = my_arguments(comm) | {"reduction": "mittel-größe-平均"}
    assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError, "mittel-größe-平均")


@by_name("function", FUNCTIONS)
@pytest.mark.parametrize("wrong", [3, "world", MPI.COMM_NULL, MPI.GROUP_EMPTY], ids=["3", "world", "null", "group"])
def test_what_is_no_communicator_is_a_local_type_error(comm, function, wrong):
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
        assert repr(wrong) in error.text
    assert_right(comm, afterwards)


def test_an_intercommunicator_is_a_local_type_error(comm):
    if comm.size == 1:
        pytest.skip("an intercommunicator takes two ranks")
    half = comm.Split(comm.rank % 2)
    inter = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    error = outcome(pce.softmax_cross_entropy, **(my_arguments(comm) | {"comm": inter}))
    inter.Free()
    half.Free()
    afterwards = loss_and_gradient(comm)
    assert error is not None
    assert error.kind == "TypeError"
    assert "comm must be an mpi4py intracommunicator" in error.text
    assert_right(comm, afterwards)


def test_a_freed_communicator_is_a_local_type_error(comm):
    freed = comm.Dup()
    freed.Free()
    error = outcome(pce.softmax_cross_entropy, **(my_arguments(comm) | {"comm": freed}))
    assert error is not None
    assert error.kind == "TypeError"


# ------------------------------------------------------------------------------------- 2. what ranks only find together


def test_gathered_logits_passed_as_a_shard_are_caught_by_num_classes(comm):
    logits, targets = whole_problem()
    arguments = {"logits": logits, "targets": targets, "comm": comm, "num_classes": CLASSES}
    if comm.size == 1:
        arguments["num_classes"] = CLASSES + 1
    together = f"{CLASSES * comm.size} classes together"
    for function in FUNCTIONS:
        assert_refused(comm, function, arguments, ValueError, f"num_classes = {arguments['num_classes']}", together)


def gathered(comm: MPI.Intracomm, name: str) -> dict[str, Any]:
    """Arguments of a call in which each rank that passes classes passes all of them; `name` says in what form."""
    logits, targets = whole_problem()
    if name == "masked":
        logits[:, 1:] = np.where(np.arange(1, CLASSES) % 3 == 0, logits[:, 1:], -np.inf)
    if name == "one row":
        logits, targets = logits[0], targets[0]
    arguments = {"logits": logits, "targets": targets, "comm": comm}
    if name == "classes first":
        arguments |= {"logits": logits.T.copy() if comm.rank % 2 else logits.T, "axis": 0}
    if name == "classes between":
        arguments |= {"logits": logits.T[np.newaxis, :, :], "targets": targets[np.newaxis], "axis": 1}
    if name == "bfloat16":
        arguments |= {"logits": logits.astype(ml_dtypes.bfloat16)}
    if name == "an empty shard" and comm.rank == comm.size - 1:
        arguments |= {"logits": logits[:, :0]}
    if name == "class_start":
        arguments |= {"class_start": CLASSES * comm.rank}
    if name == "probabilities":
        arguments |= {"targets": np.full(logits.shape, 1 / CLASSES)}
    return arguments


GATHERED = (
    *("as they are", "masked", "one row", "classes first", "classes between", "bfloat16", "an empty shard"),
    *("class_start", "probabilities"),
)


@by_name("function", FUNCTIONS)
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_logits_raise_everywhere_without_num_classes(comm, function, name):
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


def shards_without_two_values(comm: MPI.Intracomm) -> dict[str, np.ndarray]:
    """Equal shards which are no copies of one another, as far as can be told."""
    constant = np.repeat(np.arange(ROWS, dtype=np.float32)[:, np.newaxis], CLASSES, axis=1)
    masked = np.where(np.arange(CLASSES) % 2, -np.inf, constant).astype(np.float32)
    return {
        "zeros": np.zeros((ROWS, CLASSES), np.float32),
        "signed zeros": np.where(np.arange(CLASSES) % 2, -0.0, np.zeros((ROWS, 1))).astype(np.float32),
        "constant rows": constant,
        "masked classes": masked,
        "nan": np.where(np.arange(CLASSES) % 3, masked, np.nan).astype(np.float32),
        "one class": whole_problem()[0][:, :1],
        "no rows": np.zeros((0, CLASSES), np.float32),
    }


def test_equal_shards_without_two_values_are_legal(comm):
    shards = shards_without_two_values(comm)
    raised = {
        name: outcome(pce.softmax_cross_entropy, logits=shard, targets=np.zeros(len(shard), int), comm=comm)
        for name, shard in shards.items()
    }
    assert raised == dict.fromkeys(shards)


def test_copies_of_different_lengths_are_legal(comm):
    logits, targets = whole_problem()
    arguments = {"logits": logits[:, : CLASSES - comm.rank], "targets": targets, "comm": comm}
    raised = outcome(pce.softmax_cross_entropy, **arguments)
    assert raised is None


def test_equal_shards_of_a_distributed_array_are_legal(comm):
    mesh = pce.Mesh(comm, classes=comm.size)
    logits, targets = whole_problem()
    x = pce.from_local(logits, mesh, classes=pce.Shard(1))
    loss = pce.cross_entropy(x, targets)
    largest = pce.max(pce.softmax(x, axis=1)).full()
    assert float(loss.full()) == pytest.approx(
        float(dense.softmax_cross_entropy(np.tile(logits, comm.size), targets)), rel=TOLERANCE
    )
    assert 0 < float(largest) < 1


def test_num_classes_is_compared_with_the_sum_over_all_shards(comm):
    for wrong in (1, CLASSES - 1, CLASSES + 1, 10**12):
        arguments = my_arguments(comm) | {"num_classes": wrong}
        text = assert_refused(
            comm, pce.softmax_cross_entropy, arguments, ValueError, f"num_classes = {wrong}", "16 classes"
        )
        for rank in range(comm.size):
            start, stop = shard_range(CLASSES, comm.size, rank)
            assert str(stop - start) in text
        assert ranks_named_in(text.replace("), ", "); ")) == set(range(comm.size))


def test_agreement_does_not_depend_on_earlier_calls(comm):
    if comm.rank == 0:
        agree(MPI.COMM_SELF, "a test of earlier calls", {"flag": 1})
    facts = agree(comm, "a test of earlier calls", {"flag": True}, facts=(comm.rank,))
    assert facts[:, 0].tolist() == list(range(comm.size))


def test_equal_numbers_are_equal_whatever_their_type_and_sign_of_nought(comm):
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


def split_at(comm: MPI.Intracomm, shift: int) -> dict[str, Any]:
    """Arguments whose last shard says that it starts `shift` classes further on."""
    start = my_classes(comm).start
    return my_arguments(comm) | {"class_start": start + shift * (comm.rank == comm.size - 1)}


@by_name("function", FUNCTIONS)
def test_class_ranges_that_leave_a_gap_are_refused_everywhere(comm, function):
    start, stop = shard_range(CLASSES, comm.size, comm.size - 1)
    gap = f"[{start + 2}, {stop + 2}) (rank {comm.size - 1})"
    assert_refused(comm, function, split_at(comm, 2), ValueError, "class ranges leave a gap", f"at class {start}", gap)


@by_name("function", FUNCTIONS)
def test_class_ranges_that_overlap_are_refused_everywhere(comm, function):
    if comm.size == 1:
        pytest.skip("one range overlaps nothing")
    start, stop = shard_range(CLASSES, comm.size, comm.size - 1)
    overlap = f"[{start - 1}, {stop - 1}) (rank {comm.size - 1})"
    assert_refused(
        comm, function, split_at(comm, -1), ValueError, "class ranges overlap", f"at class {start - 1}", overlap
    )


def test_two_shards_of_the_same_classes_are_refused_everywhere(comm):
    if comm.size == 1:
        pytest.skip("one shard is no two")
    logits, targets = whole_problem()
    arguments = {"logits": logits, "targets": targets, "comm": comm, "class_start": 0}
    assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError, "class ranges overlap")


@pytest.mark.parametrize("start", [None, 0, 3])
def test_no_classes_at_all_are_refused_everywhere(comm, start):
    for function in FUNCTIONS:
        arguments = my_arguments(comm)
        arguments |= {"logits": arguments["logits"][:, :0], "class_start": start}
        assert_refused(comm, function, arguments, ValueError, "no classes", "empty")


def test_class_ranges_may_come_in_any_order_with_empty_ones_anywhere(comm):
    logits, targets = whole_problem()
    start, stop = shard_range(CLASSES, max(1, comm.size - 1), max(0, comm.size - 2 - comm.rank))
    if comm.rank == comm.size - 1 > 0:
        start = stop = 5
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(
        logits[:, start:stop], targets, comm=comm, class_start=start
    )
    expected_loss, expected = dense.softmax_cross_entropy_value_and_grad(logits, targets)
    np.testing.assert_allclose(loss, expected_loss, rtol=TOLERANCE)
    np.testing.assert_allclose(gradient, expected[:, start:stop], rtol=0, atol=TOLERANCE)


def test_probability_targets_of_class_statistics_are_refused_everywhere(comm):
    arguments = my_arguments(comm) | probability_targets(comm)
    text = assert_refused(comm, pce.class_statistics, arguments, ValueError, "index targets", "probabilities")
    assert ranks_named_in(text) == set(range(comm.size))


# ----------------------------------------------------------------------------------------------- 3. ranks that disagree


class Disagreement(NamedTuple):
    """What the last rank does differently, and how the error tells it: name: theirs (ranks ...), its (rank ...)."""

    name: str
    theirs: str
    its: str
    change: Callable[[MPI.Intracomm], dict[str, Any]]
    common: Callable[[MPI.Intracomm], dict[str, Any]] = lambda comm: {}


def option(name: str, theirs: Any, its: Any) -> Disagreement:
    return Disagreement(name, repr(theirs), repr(its), lambda comm: {name: its}, lambda comm: {name: theirs})


def fewer_rows(comm: MPI.Intracomm) -> dict[str, Any]:
    right = my_arguments(comm)
    return {"logits": right["logits"][1:], "targets": right["targets"][1:]}


def rows_of_two_axes(comm: MPI.Intracomm) -> dict[str, Any]:
    right = my_arguments(comm)
    return {"logits": right["logits"][None], "targets": right["targets"][None]}


def class_axis_first(comm: MPI.Intracomm) -> dict[str, Any]:
    return {"logits": my_arguments(comm)["logits"].T, "axis": 0}


def bfloat16_logits(comm: MPI.Intracomm) -> dict[str, Any]:
    return {"logits": my_arguments(comm)["logits"].astype(ml_dtypes.bfloat16)}


DISAGREEMENTS = [
    Disagreement("rows", "(5,)", "(4,)", fewer_rows),
    Disagreement("rows", "(5,)", "(1, 5)", rows_of_two_axes),
    Disagreement("dtype", "'float32'", "'float64'", float64_logits),
    Disagreement("dtype", "'float32'", "'bfloat16'", bfloat16_logits),
    Disagreement("axis", "1", "0", class_axis_first),
    Disagreement("kind of targets", "'class numbers'", "'probabilities'", probability_targets),
    Disagreement("weight given", "False", "True", weight_given),
    Disagreement("weight given", "True", "False", lambda comm: {"weight": None}, weight_given),
    option("ignore_index", -100, -1),
    option("label_smoothing", 0.1, 0.2),
    option("z_loss", 0.0, 1e-4),
    option("logit_scale", 1.0, 1.0000000000000002),
    option("softcap", None, 30.0),
    option("softcap", 50.0, 30.0),
    option("reduction", "mean", "sum"),
    Disagreement("compute_dtype", "'float32'", "'float64'", lambda comm: {"compute_dtype": np.float64}),
    Disagreement("class_start given", "False", "True", lambda comm: {"class_start": my_classes(comm).start}),
    option("num_classes", 16, None),
    option("num_classes", 16, 17),
]


@pytest.mark.parametrize("case", DISAGREEMENTS, ids=lambda case: f"{case.name}_{case.its}")
def test_ranks_that_differ_raise_collective_error_which_says_who_said_what(comm, case):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")
    last = comm.size - 1
    said = f"{case.name}: {case.theirs} {ranks_text(*range(last))}, {case.its} {ranks_text(last)}"
    for function in FUNCTIONS:
        arguments = my_arguments(comm) | case.common(comm)
        if comm.rank == last:
            arguments |= case.change(comm)
        if not taken_by(function, case.common(comm) | case.change(comm)):
            continue
        if function is pce.class_statistics and case.name == "kind of targets":
            continue
        text = assert_refused(comm, function, arguments, CollectiveError, "ranks disagree on", said)
        # Another dtype brings another compute dtype with it, and another number of axes another class axis.
        if case.its not in ("'float64'", "(1, 5)"):
            assert text == f"ranks disagree on {said}"


def test_targets_of_statistics_are_given_on_every_rank_or_on_none(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")
    arguments = my_arguments(comm)
    if comm.rank == 0:
        arguments["targets"] = None
    said = f"kind of targets: 'none' (rank 0), 'class numbers' {ranks_text(*range(1, comm.size))}"
    assert_refused(comm, pce.class_statistics, arguments, CollectiveError, said)


def test_every_rank_may_say_something_else_about_everything(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")
    arguments = my_arguments(comm) | {"z_loss": float(comm.rank), "softcap": comm.rank + 10.0}
    text = assert_refused(comm, pce.softmax_cross_entropy, arguments, CollectiveError)
    for name, first in (("z_loss", 0), ("softcap", 10)):
        said = ", ".join(f"{float(first + rank)} (rank {rank})" for rank in range(comm.size))
        assert f"{name}: {said}" in text


@by_name("function", FUNCTIONS)
def test_targets_whose_values_differ_are_refused_everywhere(comm, function):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")
    arguments = my_arguments(comm)
    if comm.rank == comm.size - 1:
        arguments |= targets_with(0, 4)(arguments)
    text = assert_refused(comm, function, arguments, CollectiveError, "ranks disagree on the values of targets")
    named = [int(rank) for numbers in re.findall(r"\(ranks? ([\d, ]+)\)", text) for rank in numbers.split(", ")]
    assert sorted(named) == list(range(comm.size))
    assert ranks_text(*range(comm.size - 1)) in text


def test_targets_of_other_integer_types_and_memory_orders_are_equal_if_their_values_are(comm):
    logits = np.zeros((2, 3, CLASSES))[..., my_classes(comm)]
    targets = np.array([[1, 2, 3], [4, -100, 5]])
    mine = [targets, targets.astype(np.int8), np.asfortranarray(targets), targets.astype(">i4")][comm.rank % 4]
    loss = pce.softmax_cross_entropy(logits, mine, comm=comm)
    np.testing.assert_allclose(loss, np.log(CLASSES), rtol=1e-15)


def test_an_ignored_row_must_be_ignored_on_every_rank(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")
    arguments = my_arguments(comm)
    if comm.rank == 0:
        arguments |= targets_with(-100, 0)(arguments)
    assert_refused(comm, pce.softmax_cross_entropy, arguments, CollectiveError, "values of targets", "(rank 0)")


@pytest.mark.parametrize(
    "functions", list(itertools.permutations(FUNCTIONS, 2)), ids=lambda pair: " ".join(f.__name__ for f in pair)
)
def test_ranks_that_call_different_functions_are_told_so(comm, functions):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")
    last = comm.size - 1
    function = functions[comm.rank == last]
    text = assert_refused(comm, function, my_arguments(comm), CollectiveError)
    theirs, its = (each.__name__ for each in functions)
    assert text == f"ranks disagree on operation: {theirs} {ranks_text(*range(last))}, {its} {ranks_text(last)}"


def test_batch_comm_is_given_on_every_rank_or_on_none(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")
    arguments = my_arguments(comm)
    if comm.rank == comm.size - 1:
        arguments["batch_comm"] = MPI.COMM_SELF
    others = ranks_text(*range(comm.size - 1))
    said = f"batch_comm given: False {others}, True {ranks_text(comm.size - 1)}"
    assert_refused(comm, pce.softmax_cross_entropy, arguments, CollectiveError, said)


# ------------------------------------------------------------------------------------------- a grid of rows and classes


class Grid(NamedTuple):
    """Ranks as row groups times class groups; `comm` joins the shards of one row group, `batch_comm` the row groups."""

    world: MPI.Intracomm
    row_groups: int
    row_group: int
    comm: Any
    batch_comm: Any

    def arguments(self) -> dict[str, Any]:
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
        self, function: Callable[..., object], arguments: dict[str, Any], kind: type[Exception], *fragments: str
    ) -> str:
        """Every rank of the grid raises `kind` with the same text, and both communicators work afterwards."""
        if function is pce.softmax_cross_entropy_value_and_grad:
            arguments = {"out": np.full_like(arguments["logits"], 7.0)} | arguments
        outcomes = self.world.allgather(outcome(function, **arguments))
        afterwards = self.result()
        raised = outcomes[self.world.rank]
        assert raised is not None, outcomes
        assert raised.kind == kind.__name__, raised.text
        assert outcomes == [raised] * self.world.size
        for fragment in fragments:
            assert fragment in raised.text
        if function is pce.softmax_cross_entropy_value_and_grad:
            assert (arguments["out"] == 7.0).all()
        self.assert_right(afterwards)
        return raised.text


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


def test_row_groups_may_have_different_numbers_of_rows(comm):
    for grid in grids(comm):
        result = grid.result()
        losses = comm.allgather(result[0].tobytes())
        grid.assert_right(result)
        assert set(losses) == {losses[0]}


def test_a_row_group_may_have_no_rows(comm):
    for grid in grids(comm):
        arguments = grid.arguments()
        if grid.row_group > 0:
            arguments |= {"logits": arguments["logits"][:0], "targets": arguments["targets"][:0]}
        loss = pce.softmax_cross_entropy(**arguments)
        logits, targets = whole_problem(rows=grid.stop(grid.row_groups - 1))
        np.testing.assert_allclose(loss, dense.softmax_cross_entropy(logits[:2], targets[:2]), rtol=TOLERANCE)


@by_name("function", LOSSES)
def test_an_error_on_one_rank_reaches_every_rank_of_the_grid(comm, function):
    for grid in grids(comm):
        for failing in range(comm.size):
            row_group, shard = divmod(failing, grid.comm.size)
            arguments = grid.arguments()
            if comm.rank == failing:
                arguments["targets"] = arguments["targets"].astype(np.complex64)
            text = grid.assert_refused(function, arguments, TypeError, "targets", "complex64", f"(rank {shard})")
            assert f"(batch_comm rank {row_group})" in text or grid.row_groups == 1


def test_an_out_of_range_target_in_one_row_group_reaches_every_rank_of_the_grid(comm):
    for grid in grids(comm):
        arguments = grid.arguments()
        if grid.row_group == grid.row_groups - 1:
            arguments |= targets_with(CLASSES, 1)(arguments)
        text = grid.assert_refused(
            pce.softmax_cross_entropy, arguments, IndexError, "targets[1] = 16 is outside [0, 16)"
        )
        assert ranks_text(*range(grid.comm.size)) in text
        assert f"(batch_comm rank {grid.row_groups - 1})" in text or grid.row_groups == 1


def test_different_errors_in_different_row_groups_are_all_told(comm):
    for grid in grids(comm):
        arguments = grid.arguments() | {"softcap": -1.0 - grid.row_group}
        text = grid.assert_refused(pce.softmax_cross_entropy, arguments, ValueError)
        assert [f"got {-1.0 - row_group}" in text for row_group in range(grid.row_groups)] == [True] * grid.row_groups


def test_a_disagreement_within_one_row_group_reaches_every_rank_of_the_grid(comm):
    for grid in grids(comm):
        if grid.comm.size > 1:
            arguments = grid.arguments()
            if comm.rank == comm.size - 1:
                arguments |= {"reduction": "sum"}
            said = f"'sum' (rank {grid.comm.size - 1})"
            grid.assert_refused(pce.softmax_cross_entropy, arguments, CollectiveError, "disagree on reduction", said)


def test_targets_that_differ_within_one_row_group_reach_every_rank_of_the_grid(comm):
    for grid in grids(comm):
        if grid.comm.size > 1:
            arguments = grid.arguments()
            if comm.rank == 0:
                arguments |= targets_with(0, 1)(arguments)
            grid.assert_refused(pce.softmax_cross_entropy, arguments, CollectiveError, "values of targets", "(rank 0)")


BETWEEN_ROW_GROUPS = [
    option("reduction", "mean", "sum"),
    option("reduction", "none", "mean"),
    option("label_smoothing", 0.0, 0.1),
    option("logit_scale", 1.0, 2.0),
    option("ignore_index", -100, -1),
]


@pytest.mark.parametrize("case", BETWEEN_ROW_GROUPS, ids=lambda case: f"{case.name}_{case.its}")
def test_row_groups_that_differ_in_an_option_are_told_so_on_every_rank(comm, case):
    for grid in grids(comm):
        if grid.row_groups > 1:
            last = grid.row_groups - 1
            arguments = grid.arguments() | (case.change if grid.row_group == last else case.common)(comm)
            said = f"{case.name}: {case.theirs} {ranks_text(*range(last))}, {case.its} {ranks_text(last)}"
            grid.assert_refused(pce.softmax_cross_entropy_value_and_grad, arguments, CollectiveError, said)


def test_row_groups_with_different_numbers_of_classes_are_told_so_on_every_rank(comm):
    for grid in grids(comm):
        if grid.row_groups > 1:
            arguments = grid.arguments()
            if grid.row_group == 0 and grid.comm.rank == 0:
                arguments["logits"] = np.pad(arguments["logits"], ((0, 0), (0, 3)))
            said = f"num_classes: 19 (rank 0), 16 {ranks_text(*range(1, grid.row_groups))}"
            grid.assert_refused(pce.softmax_cross_entropy, arguments, CollectiveError, said)


def test_row_groups_that_call_different_functions_are_told_so_on_every_rank(comm):
    for grid in grids(comm):
        if grid.row_groups > 1:
            function = LOSSES[grid.row_group > 0]
            said = "operation: softmax_cross_entropy (rank 0), softmax_cross_entropy_forward"
            grid.assert_refused(function, grid.arguments(), CollectiveError, said)


def test_an_error_of_rows_alone_reaches_every_row_group_without_a_class_communicator(comm):
    logits, targets = whole_problem()
    targets = targets.copy()
    if comm.rank == comm.size - 1:
        targets[3] = 16
    arguments = {"logits": logits, "targets": targets, "batch_comm": comm}
    assert_refused(
        comm,
        pce.softmax_cross_entropy,
        arguments,
        IndexError,
        "targets[3] = 16 is outside [0, 16)",
        f"rank {comm.size - 1}",
    )


# ----------------------------------------------------------------------------- calls that communicate nothing: backward


def residuals_of(comm: MPI.Intracomm, **options: Any) -> pce.Residuals:
    return pce.softmax_cross_entropy_forward(**my_arguments(comm), **options)[1]


BAD_BACKWARD = {
    "dloss_of_the_wrong_length": (ValueError, ["dloss", "scalar", "(5,)", "(4,)"], {"dloss": np.ones(4)}),
    "dloss_of_too_many_axes": (ValueError, ["dloss", "scalar", "(5,)", "(5, 1)"], {"dloss": np.ones((5, 1))}),
    "dloss_complex": (TypeError, ["dloss", "real", "complex128"], {"dloss": 1j}),
    "dloss_bool": (TypeError, ["dloss", "real", "bool"], {"dloss": True}),
    "dloss_in_words": (TypeError, ["dloss", "real", "<U3"], {"dloss": "one"}),
    "dloss_none": (TypeError, ["dloss", "array", "NoneType"], {"dloss": None}),
    "residuals_of_another_kind": (
        TypeError,
        ["residuals", "softmax_cross_entropy_forward", "float"],
        {"residuals": 1.0},
    ),
    "out_too_small": (ValueError, ["out", "shape", "(4,"], {"out": lambda logits: np.zeros_like(logits)[1:]}),
    "out_of_integers": (
        TypeError,
        ["out", "float32", "int64"],
        {"out": lambda logits: np.zeros(logits.shape, np.int64)},
    ),
    "out_read_only": (ValueError, ["out", "read-only"], {"out": lambda logits: read_only(np.zeros_like(logits))}),
    "out_over_reversed_logits": (ValueError, ["out", "logits"], {"out": lambda logits: logits[::-1]}),
    "out_that_is_no_array": (TypeError, ["out", "list"], {"out": lambda logits: np.zeros_like(logits).tolist()}),
}


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_a_bad_argument_of_backward_raises_on_its_own_rank_and_leaves_the_residuals_usable(comm, name):
    kind, fragments, changes = BAD_BACKWARD[name]
    residuals = residuals_of(comm, reduction="none")
    logits = residuals.problem.logits
    changes = {key: value(logits) if callable(value) else value for key, value in changes.items()}
    raised = None
    if comm.rank == comm.size - 1:  # nobody waits for the others
        raised = outcome(pce.softmax_cross_entropy_backward, **({"dloss": 1.0, "residuals": residuals} | changes))
    gradient = pce.softmax_cross_entropy_backward(1.0, residuals)
    afterwards = loss_and_gradient(comm)
    if comm.rank == comm.size - 1:
        assert raised is not None
        assert raised.kind == kind.__name__
        for fragment in fragments:
            assert fragment in raised.text
    problem = whole_problem()
    _, expected = dense.softmax_cross_entropy_value_and_grad(*problem, reduction="none")
    np.testing.assert_allclose(gradient, expected[:, my_classes(comm)], rtol=0, atol=TOLERANCE)
    assert_right(comm, afterwards)


def test_backward_into_memory_of_the_targets_or_the_weight_is_refused(comm):
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


def test_residuals_that_were_used_up_are_a_runtime_error_on_their_own_rank(comm):
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


def test_agree_gives_the_facts_of_every_rank(comm):
    facts = tuple(100 * comm.rank + number for number in range(FACTS))
    everything = agree(comm, "a test", {"size": comm.size}, facts=facts)
    some = agree(comm, "a test", {}, facts=facts[:2])
    none = agree(comm, "a test", {})
    expected = [[100 * rank + number for number in range(FACTS)] for rank in range(comm.size)]
    assert everything.tolist() == expected
    assert some.tolist() == [row[:2] for row in expected]
    assert none.shape == (comm.size, 0)
    assert everything.tolist() == expected  # the later calls have not written to it


def test_agreement_is_traced_as_agreement_and_not_counted_as_payload(comm):
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


def test_communicators_are_traced_under_the_names_that_a_call_has_for_them(comm, named):
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
    "a check of one rank's own": ({"reduction": "average"}, r"reduction must be .* \(tensor ranks? "),
    "a target": ({}, r"targets\[0\] = .* \(tensor ranks? "),
    "the number of classes": ({"num_classes": CLASSES + 1}, r"classes together: .* \(tensor ranks? "),
    "the class ranges": ({"class_start": 1}, r"class ranges .* \(tensor rank 0\)"),
    "a communicator": ({"comm": "all"}, r"tensor must be an mpi4py intracommunicator"),
    "a communicator over rows": ({"batch_comm": "all"}, r"data must be an mpi4py .* \(tensor ranks? "),
}


@pytest.mark.parametrize(("change", "text"), BAD_IN_A_NAMED_CALL.values(), ids=BAD_IN_A_NAMED_CALL)
def test_errors_name_the_communicators_as_the_call_does(comm, named, change, text):
    logits, targets = whole_problem()
    targets[0] = CLASSES
    with pytest.raises((IndexError, TypeError, ValueError), match=text) as raised:
        prepare(replace(named, **change), logits[:, my_classes(comm)], targets)
    texts = comm.allgather(str(raised.value))
    assert texts == [texts[0]] * comm.size


def test_a_call_that_is_refused_sends_no_payload_and_the_trace_shows_what_it_sends(comm):
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


def test_backward_sends_nothing(comm):
    residuals = residuals_of(comm)
    with pce.trace() as trace:
        pce.softmax_cross_entropy_backward(1.0, residuals)
    assert trace.count(purpose=None) == 0


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


def forward_and_backward(*arguments: Any, **options: Any) -> tuple[object, object]:
    loss, residuals = pce.softmax_cross_entropy_forward(*arguments, **options)
    return loss, pce.softmax_cross_entropy_backward(1.0, residuals)


def bits(call: Callable[[], Any]) -> list[bytes | None] | str:
    try:
        return [None if part is None else np.asarray(part).tobytes() for part in call()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_numpy_errors_that_raise_and_warnings_as_errors_change_nothing(comm):
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


def test_an_error_is_the_same_under_strict_floating_point_handling(comm):
    with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
        arguments = my_arguments(comm)
        arguments |= targets_with(16, 3)(arguments)
        assert_refused(
            comm, pce.softmax_cross_entropy, arguments, IndexError, "targets[3] = 16", ranks=set(range(comm.size))
        )
        arguments = my_arguments(comm) | {"label_smoothing": np.float32(np.nan)}
        assert_refused(comm, pce.softmax_cross_entropy, arguments, ValueError, "label_smoothing")


# ----------------------------------------------------------------------------------------------------------- afterwards


def test_a_hundred_errors_in_a_row_leave_the_communicator_as_it_was(comm):
    names = ["target_too_large", "integer_logits", "weight_too_short", "reduction_unknown", "softcap_-1.0"]
    cases = [next(case for case in BAD if case.name == name) for name in names]
    kinds = []
    for number in range(100):
        case = cases[number % len(cases)]
        arguments = my_arguments(comm) | case.common(comm)
        if comm.rank == number % comm.size:
            arguments |= case.change(arguments)
        raised = outcome(pce.softmax_cross_entropy, **arguments)
        kinds.append(raised and raised.kind)
    afterwards = loss_and_gradient(comm)
    assert kinds == [case.kind.__name__ for case in cases] * 20
    assert_right(comm, afterwards)


def test_nothing_a_caller_sends_is_mistaken_for_an_agreement(comm):
    inbox = np.zeros(1, np.int64)
    waiting = comm.Irecv(inbox, MPI.ANY_SOURCE, MPI.ANY_TAG)
    arguments = my_arguments(comm)
    arguments |= targets_with(16, 3)(arguments)
    raised = outcome(pce.softmax_cross_entropy, **arguments)
    early = waiting.Test()
    comm.Barrier()
    comm.Send(np.array([comm.rank]), (comm.rank + 1) % comm.size, 5)
    waiting.Wait()
    afterwards = loss_and_gradient(comm)
    assert raised is not None
    assert raised.kind == "IndexError"
    assert not early
    assert inbox[0] == (comm.rank - 1) % comm.size
    assert_right(comm, afterwards)


def test_a_rank_without_memory_for_the_gradient_says_so_before_the_others_wait(comm, monkeypatch):
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


def test_the_same_ranks_cannot_share_both_rows_and_classes(comm):
    arguments = {"comm": comm, "batch_comm": comm}
    if comm.size == 1:
        assert np.isfinite(pce.softmax_cross_entropy(np.zeros((3, 4)), np.zeros(3, int), **arguments))
        return
    with pytest.raises(ValueError, match="comm and batch_comm are the same ranks"):
        pce.softmax_cross_entropy(np.zeros((3, 4)), np.zeros(3, int), **arguments)
    assert np.isfinite(pce.softmax_cross_entropy(np.zeros((3, 4)), np.zeros(3, int), comm=comm))
