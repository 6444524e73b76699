"""Mistakes that newcomers make: each row of the table of hints, and what an error says of values that differ."""

from collections.abc import Callable
import copy
import inspect
import pickle
import re
from typing import Any, NamedTuple, cast

from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import CollectiveError, Shard, shard_range
from pce_mpi.hints import HINTS, hinted
from ranks.grids import mesh_of

ROWS, CLASSES, FEATURES = 6, 9, 2
RNG = np.random.default_rng(0)
LOGITS, HIDDEN = RNG.normal(size=(ROWS, CLASSES)), RNG.normal(size=(ROWS, FEATURES))
TARGETS = np.arange(1, ROWS + 1)

several = pytest.mark.usefixtures("several")
pytestmark = pytest.mark.usefixtures("impatient")


def is_last(comm: MPI.Intracomm) -> bool:
    return comm.rank == comm.size - 1


def classes_of(comm: MPI.Intracomm) -> slice:
    return slice(*shard_range(CLASSES, comm.size, comm.rank))


def loss(comm: MPI.Intracomm, targets: Any = TARGETS, **options: Any) -> Any:
    options.setdefault("num_classes", CLASSES)
    return pce.softmax_cross_entropy(LOGITS[:, classes_of(comm)], targets, comm=comm, **options)


def parameter(comm: MPI.Intracomm) -> pce.DistArray:
    return pce.distribute(LOGITS, mesh_of(comm, comm.size), data=Shard(1), requires_grad=True)


# ------------------------------------------------------------------------------------------------ a mistake of each row


class Mistake(NamedTuple):
    """A call, and the error that it raises on every rank, up to the hint; some mistakes need several ranks."""

    error: type[Exception]
    text: str
    call: Callable[[MPI.Intracomm], object]
    ranks: int = 1


def one_hot(comm: MPI.Intracomm) -> None:
    loss(comm, np.eye(CLASSES + 1)[TARGETS])


def shards_rows(comm: MPI.Intracomm) -> None:
    rows = slice(*shard_range(ROWS + 1, comm.size, comm.rank))
    pce.softmax_cross_entropy(np.ones((ROWS + 1, CLASSES))[rows], np.zeros(ROWS + 1, int)[rows], comm=comm)


def starts_at_products(comm: MPI.Intracomm) -> None:
    logits = np.ones((1, 2 + (comm.rank == 0)))
    pce.softmax_cross_entropy(logits, np.zeros(1, int), comm=comm, class_start=2 * comm.rank)


def adds_over_two_meshes(comm: MPI.Intracomm) -> None:
    x, other = parameter(comm), pce.Mesh(comm, ranks=comm.size)
    x + pce.distribute(LOGITS, other)


def goes_back_twice(comm: MPI.Intracomm) -> None:
    found = pce.cross_entropy(parameter(comm), TARGETS)
    found.backward()
    found.backward()


def assigns_an_element(comm: MPI.Intracomm) -> None:
    parameter(comm)[0] = 0


def no_placement(text: str) -> str:
    return f"data must be Shard(axis), Replicate() or Partial(operator), got <class 'pce_mpi.distributed.{text}'>"


DISAGREE = "ranks disagree on"
MISTAKES = {
    "other class numbers": Mistake(
        IndexError,
        "targets[0] = ... is outside [0, 9)",
        lambda comm: loss(comm, TARGETS - 5 if is_last(comm) else TARGETS),
    ),
    "-1 for no class": Mistake(
        IndexError, "targets[2] = -1 is outside [0, 9)", lambda comm: loss(comm, np.array([1, 2, -1, 4, -1, 5]))
    ),
    "forgotten comm": Mistake(
        IndexError,
        "targets[5] = 6 is outside [0, 6)",
        lambda comm: pce.softmax_cross_entropy(LOGITS[:, :6], TARGETS),
    ),
    "comm by position": Mistake(
        TypeError,
        "softmax_cross_entropy() takes 2 positional arguments but 3 were given",
        lambda comm: cast(Any, pce.softmax_cross_entropy)(LOGITS, TARGETS, comm),
    ),
    "probabilities of all classes": Mistake(
        ValueError, "targets of dtype float64 are probabilities...must have the logits' shape, ...got (6, 10)", one_hot
    ),
    "rows differ": Mistake(CollectiveError, f"{DISAGREE} rows: (3,) (rank 0), (2,) (rank...", shards_rows, ranks=3),
    "num_classes differ": Mistake(
        CollectiveError,
        f"{DISAGREE} num_classes: 5 (rank 0), 4 (rank...)",
        lambda comm: loss(comm, num_classes=5 - (comm.rank > 0)),
        ranks=2,
    ),
    "class_start by hand": Mistake(
        ValueError, "class ranges overlap at class 2: [0, 3)...", starts_at_products, ranks=2
    ),
    "values differ": Mistake(
        CollectiveError,
        f"{DISAGREE} the values of targets: targets[0] = 1 (rank...), 2 (rank...)",
        lambda comm: loss(comm, TARGETS + is_last(comm)),
        ranks=2,
    ),
    "sizes without names": Mistake(
        TypeError,
        "Mesh.__init__() takes 2 positional arguments but 3 were given",
        lambda comm: pce.Mesh(comm, [comm.size]),
    ),
    "class of placements": Mistake(
        TypeError,
        no_placement("placements.Shard"),
        lambda comm: pce.distribute(LOGITS, mesh_of(comm, comm.size), data=Shard),  # type: ignore[arg-type]
    ),
    "two meshes": Mistake(
        ValueError, "add takes operands of one mesh, got Mesh(...) and another Mesh(...)", adds_over_two_meshes
    ),
    "array of another library": Mistake(
        AttributeError,
        "'DistArray' object has no attribute 'numpy'",
        lambda comm: parameter(comm).numpy(),  # type: ignore[attr-defined]
    ),
    "assignment": Mistake(TypeError, "a distributed array does not support item assignment", assigns_an_element),
    "second backward": Mistake(
        RuntimeError,
        "the result of cross_entropy has been through a backward pass, which freed its tape",
        goes_back_twice,
    ),
}


# The mistakes are those of one rank, or of any two that differ.
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("mistake", list(dict.fromkeys([*HINTS, *MISTAKES])))
def test_error_of_mistake_ends_with_its_hint(comm, mistake):
    error, text, call, ranks = MISTAKES[mistake]
    if comm.size < ranks:
        pytest.skip(f"a mistake of {ranks} ranks or more")
    with pytest.raises(error) as raised:
        call(comm)
    said = hinted(text, mistake, name="targets")
    pattern = ".*".join(map(re.escape, said.split("...")))
    assert re.match(pattern, str(raised.value)), str(raised.value)


@pytest.mark.ranks(1)  # Python refuses the call before there are ranks
def test_hint_leaves_signatures_and_other_errors(comm):
    assert str(inspect.signature(pce.Mesh)) == "(comm: 'MPI.Intracomm', /, **dims: 'int') -> 'None'"
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'comm'$"):
        pce.Mesh(data=1)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'targets'$"):
        pce.softmax_cross_entropy(LOGITS)
    with pytest.raises(TypeError, match=r"got <class 'pce_mpi.*Shard'>, got|got 3$"):
        pce.distribute(LOGITS, mesh_of(comm, 1), data=3)


# ----------------------------------------------------------------------------------- attributes of a distributed array


@pytest.mark.ranks(1)  # attributes are this rank's own
def test_missing_attributes_are_missing_as_before(comm):
    x = parameter(comm)
    for name in ("data", "numpy", "values", "tolist", "colour", "__array_interface__", "__dlpack__", "__getstate_x__"):
        assert not hasattr(x, name)
        assert getattr(x, name, 5) == 5
        with pytest.raises(AttributeError) as raised:
            getattr(x, name)
        assert (raised.value.name, raised.value.obj is x) == (name, True)
        plain = f"'DistArray' object has no attribute {name!r}"
        has_hint = name in ("data", "numpy", "values", "tolist")
        assert str(raised.value) == (hinted(plain, "array of another library") if has_hint else plain)
    with pytest.raises(AttributeError, match=r"^'DistArray' object has no attribute 'sharding'$"):
        getattr(pce.DistArray.__new__(pce.DistArray), "shape")  # noqa: B009  # the error of a property is its own


@pytest.mark.ranks(1)
def test_missing_attributes_do_not_disturb_protocols(comm):
    x = parameter(comm)
    assert copy.copy(x).local is x.local
    assert copy.deepcopy(x).local is not x.local
    assert isinstance(np.mean(x), pce.DistArray)
    assert isinstance(np.ones(CLASSES) * x, pce.DistArray)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(x)
    with pytest.raises(TypeError, match=r"by \.full\(\)"):
        np.asarray(x)


# --------------------------------------------------------------------------------------------------- values that differ


def differing(comm: MPI.Intracomm, function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """What the call says on every rank, after few messages."""
    with pce.trace() as record, pytest.raises(CollectiveError) as raised:
        function(*arguments, comm=comm, **options)
    texts = comm.allgather(str(raised.value))
    assert texts == texts[:1] * comm.size
    assert len(record.events) <= 1 + 2 * 4 + 2
    return texts[0]


def difference(comm: MPI.Intracomm, name: str, where: str, others: object, last: object) -> str:
    before = f"ranks {', '.join(map(str, range(comm.size - 1)))}" if comm.size > 2 else "rank 0"
    text = f"ranks disagree on the values of {name}: {name}{where} = {others} ({before}), {last} (rank {comm.size - 1})"
    return hinted(text, "values differ", name=name)


@several
@pytest.mark.ranks(2, 3)  # one rank against one, and against two
@pytest.mark.parametrize("rows", [1, 2, 64, 65, 4097, 70_001])
def test_first_row_that_differs_is_named(comm, rows):
    for row in {0, 1, rows // 2, rows - 1} & {*range(rows)}:
        targets = np.arange(rows) % 7
        if is_last(comm):
            targets[row:] += 1
        logits = np.zeros((rows, comm.rank + 8))
        said = differing(comm, pce.softmax_cross_entropy, logits, targets)
        assert said == difference(comm, "targets", f"[{row}]", row % 7, row % 7 + 1)


@several
@pytest.mark.ranks(3)
def test_difference_is_named_by_all_axes(comm):
    shard, w = LOGITS.reshape(2, 3, CLASSES)[..., classes_of(comm)], np.ones((FEATURES, 3))
    targets, hidden = TARGETS.reshape(2, 3), HIDDEN.reshape(2, 3, FEATURES).copy()
    others, rows, ids = targets.copy(), np.ones((2, 3), bool), np.zeros((2, 3, 4), int)
    before = hidden[1, 2, 1]
    if is_last(comm):
        others[1, 0] = rows[0, 2] = 0
        ids[1, 1, 3], hidden[1, 2, 1] = 8, 0.5
    given = {"num_classes": CLASSES}
    said = differing(comm, pce.softmax_cross_entropy, shard, others, **given)
    assert said == difference(comm, "targets", "[1, 0]", 4, 0)
    said = differing(comm, pce.kl_divergence, shard, shard, rows=rows, **given)
    assert said == difference(comm, "rows", "[0, 2]", True, False)
    said = differing(comm, pce.take_classes, shard, ids, **given)
    assert said == difference(comm, "ids", "[1, 1, 3]", 0, 8)
    said = differing(comm, pce.linear_cross_entropy_value_and_grad, hidden, w, targets, **given)
    assert said == difference(comm, "hidden", "[1, 2, 1]", before, 0.5)


@several
@pytest.mark.ranks(3)
def test_difference_of_equal_texts_shows_bits(comm):
    hidden = np.full((1, 1), np.nan, np.float32)
    hidden.view(np.uint32)[...] |= is_last(comm)
    w = np.ones((1, 3), np.float32)
    said = differing(comm, pce.linear_cross_entropy_value_and_grad, hidden, w, np.zeros(1, int))
    assert said == difference(comm, "hidden", "[0, 0]", "nan of bits 0x7fc00000", "nan of bits 0x7fc00001")


@several
@pytest.mark.ranks(3)
def test_difference_on_gpus_is_named(comm, cupy):
    hidden, w, targets = HIDDEN.copy(), np.ones((FEATURES, 3)), TARGETS.copy()
    before = hidden[4, 1]
    if is_last(comm):
        hidden[4, 1], targets[3] = -1.0, 0
    on_gpu, numbers = [cupy.asarray(array) for array in (hidden, w)], cupy.asarray(targets)
    shard = cupy.asarray(LOGITS[:, classes_of(comm)])
    given = {"num_classes": CLASSES, "chunk": 4}
    said = differing(comm, pce.linear_cross_entropy_value_and_grad, *on_gpu, TARGETS, **given)
    assert said == difference(comm, "hidden", "[4, 1]", before, -1.0)
    said = differing(comm, pce.softmax_cross_entropy, shard, numbers, num_classes=CLASSES)
    assert said == difference(comm, "targets", "[3]", 4, 0)
    mine = [cupy.asarray(array) for array in (HIDDEN, w)] if is_last(comm) else [HIDDEN, w]
    said = differing(comm, pce.linear_cross_entropy_value_and_grad, *mine, TARGETS, **given)
    assert said == f"ranks disagree on the library of hidden: numpy (ranks 0, 1), {cupy.__name__} (rank 2)"
