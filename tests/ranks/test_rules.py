"""Rules of operations: the placements of results and gradients, and what is sent for them.

A row of a table runs on hollow arrays, so it needs no ranks. That operations on ranks do what they do on hollow arrays
is the subject of `test_inference.py` and `test_hollow.py`, and that their numbers are those of one process that of
`test_op_placements.py` and `test_random_programs.py`. The end of the file has what no table can say.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Shard, infer_placements
from pce_mpi.comm.communicators import Channel
from pce_mpi.comm.tracing import Purpose
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.hollow import hollow
from ranks.grids import factorizations, mesh_of
from ranks.placed import AVG, MAX, MIN, SUM, R, at, check, collectives, numbers, traced, whole_of

Formula = Callable[..., Any]

S0, S1, S2, S3 = (Shard(axis) for axis in range(4))
LINE = Mesh.without_ranks(data=4)
GRID = Mesh.without_ranks(data=2, model=3)

pytestmark = pytest.mark.usefixtures("impatient")

# ------------------------------------------------------------------------------------------------- a row and its run


class Operand(NamedTuple):
    """Its shape, its placement over the dim of a line or over those of a grid, and the ends of its shards."""

    shape: tuple[int, ...]
    placed: Placement | tuple[Placement, ...]
    splits: tuple[int, ...] | None = None
    dtype: Any = np.float64

    def made(self, requires_grad: bool = False) -> DistArray:
        placed, mesh = (self.placed, GRID) if isinstance(self.placed, tuple) else ((self.placed,), LINE)
        splits = {each.axis: self.splits for each in placed if isinstance(each, Shard) and self.splits}
        sharding = Sharding.of(mesh.dim_sizes, self.shape, dict(zip(mesh.dims, placed, strict=True)), splits)
        local = hollow(sharding.local_shape(mesh.coordinates), self.dtype)
        return DistArray(local, mesh, sharding, requires_grad=requires_grad)


def whole_numbers(shape: tuple[int, ...], placed: Any) -> Operand:
    return Operand(shape, placed, dtype=np.int64)


SAME = "the sharding of the operand"


class Row(NamedTuple):
    """An operation of operands, the placements of its result, and what is sent: "all_reduce 48" with its bytes.

    `gradients` are those of the sum of the result by the operands, None where none is asked for, and `back` is what
    they send.
    """

    call: Formula
    operands: list[Operand]
    gives: Any
    sends: str = ""
    gradients: list[Any] | None = None
    back: str = ""


def sent(trace: pce.Trace) -> str:
    """Each payload with its bytes, and its dim if one is not "data"; "agreement" if there is nothing else."""
    several = len({event.over for event in trace.events} | {"data"}) > 1
    payload = [f"{event.over}: " * several + f"{event.collective} {event.bytes}" for event in trace.select()]
    return ", ".join(payload) or "agreement" * bool(trace.events)


def placed(array: DistArray) -> Any:
    found = array.sharding.placements
    return found if len(found) > 1 else found[0]


def ran(row: Row) -> Row:
    """The row with what it really gives and sends."""
    wanted = row.gradients or [None] * len(row.operands)
    operands = [each.made(gradient is not None) for each, gradient in zip(row.operands, wanted, strict=True)]
    result, trace = traced(row.call, *operands)
    row = row._replace(gives=placed(result), sends=sent(trace))
    if row.gradients is None:
        return row
    back = backward(pce.sum(result))
    found = [
        None if x.grad is None else (SAME if wanted is SAME and x.grad.sharding == x.sharding else placed(x.grad))
        for x, wanted in zip(operands, row.gradients, strict=True)
    ]
    return row._replace(gradients=found, back=sent(back))


def backward(loss: DistArray) -> pce.Trace:
    _, trace = traced(loss.backward)
    return trace


def of(shape: tuple[int, ...], *placed: Any) -> list[Operand]:
    """One operand, over a line or a grid."""
    return [Operand(shape, placed if len(placed) > 1 else placed[0])]


def uneven(shape: tuple[int, ...], axis: int) -> list[Operand]:
    """One operand that is sharded along `axis`: some ranks have nothing, and one has all but one."""
    return [Operand(shape, Shard(axis), (0, 0, 1, shape[axis], shape[axis]))]


# ------------------------------------------------------------------------------------------------- what stays Partial

OTHER = numbers(6, 4, seed=1)
MATRIX = numbers(4, 3, seed=2)
CONDITION = OTHER > 2

MOVEMENTS: dict[str, Formula] = {
    "reshape": lambda p: np.reshape(p, (2, 12)),
    "reshape of all": lambda p: np.reshape(p, -1),
    "transpose": lambda p: p.T,
    "swapaxes": lambda p: np.swapaxes(p, 0, 1),
    "broadcast_to": lambda p: np.broadcast_to(p, (2, 6, 4)),
    "slice": lambda p: p[1:5:2, ::-1],
    "one row": lambda p: p[-1],
    "split": lambda p: np.split(p, 2)[1],
    "concatenate": lambda p: np.concatenate([p, p], axis=1),
    "concatenate with a constant": lambda p: np.concatenate([p, OTHER]),
}

LINEAR: dict[str, Formula] = {
    "negation": lambda p: -p,
    "times a number": lambda p: 3.0 * p * 2,
    "divided by a number": lambda p: p / 4.0,
    "times an array": lambda p: OTHER * p,
    "divided by an array": lambda p: p / OTHER,
    "plus itself": lambda p: p + p,
    "minus itself": lambda p: p - 3.0 * p,
    "plus a number": lambda p: p + 1,
    "a number minus": lambda p: 1.0 - p,
    "plus an array": lambda p: OTHER + p,
    "plus a row": lambda p: p - OTHER[0],
    "matrix product": lambda p: p @ MATRIX,
    "matrix product from the left": lambda p: OTHER.T @ p,
    "product with a vector": lambda p: p @ MATRIX[:, 0],
    "sum": lambda p: np.sum(p),
    "sum of an axis": lambda p: np.sum(p, axis=1, keepdims=True),
    "mean": lambda p: np.mean(p, axis=0),
    "where of two": lambda p: np.where(CONDITION, p, 2.0 * p),
    "where with a number": lambda p: np.where(CONDITION, 1.0, p),
    "another dtype": lambda p: p.astype(np.float32),
}

NOT_LINEAR: dict[str, Formula] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "square": np.square,
    "power": lambda p: p**3.0,
    "a power of a number": lambda p: 2.0**p,
    "a number divided by": lambda p: 1.0 / p,
    "maximum": lambda p: np.maximum(p, 2.0),
    "largest": lambda p: np.max(p, axis=0),
    "smallest": lambda p: np.min(p),
    "equal": lambda p: np.equal(p, 2.0),
    "where p is not 0": lambda p: np.where(p, 1.0, 2.0),
    "whole numbers": lambda p: (p / 2.0).astype(np.int64),
    "softmax": pce.softmax,
    "log_softmax": pce.log_softmax,
    "logsumexp": lambda p: pce.logsumexp(p, axis=1),
    "cross_entropy": lambda p: pce.cross_entropy(p, np.array([0, 3, 1, 2, 0, 0])),
    "kl_divergence": lambda p: pce.kl_divergence(p, np.arange(24.0).reshape(6, 4)),
    "sort, which has no rule": lambda p: np.sort(p, axis=0),
}


def of_partial(formula: Formula, kind: Placement) -> tuple[Any, list[str]]:
    """The placement of the result, and the names of collectives."""
    result, trace = traced(formula, *(each.made() for each in of((6, 4), kind)))
    return placed(result), collectives(trace, purpose=None)


@pytest.mark.parametrize("kind", [SUM, AVG], ids=str)
def test_linear_operations_keep_partial_and_send_nothing(kind):
    for name, formula in (MOVEMENTS | LINEAR).items():
        assert of_partial(formula, kind) == (kind, []), name


@pytest.mark.parametrize("kind", [MAX, MIN], ids=str)
def test_maxima_and_minima_survive_movement_alone(kind):
    for name, formula in MOVEMENTS.items():
        assert of_partial(formula, kind) == (kind, []), name
    for name, formula in LINEAR.items():
        result, sent = of_partial(formula, kind)
        assert (result, set(sent)) == (R, {"all_gather", "all_reduce"}), name  # agreements, and payload


@pytest.mark.filterwarnings("ignore:numpy.sort has no placement rule")
@pytest.mark.parametrize("kind", [SUM, AVG, MAX, MIN], ids=str)
def test_other_operations_reduce_partial_operands_first(kind):
    for name, formula in NOT_LINEAR.items():
        result, sent = of_partial(formula, kind)
        assert (result, sent.count("all_reduce")) == (R, 1), name


# ---------------------------------------------------------------------------------------------------- rows of operands


def over_two_dims() -> Iterator[tuple[str, Row]]:
    """Matrix products of stacks: what may be done over each dim alone may be done over both."""
    alone = {S0: (S0, S0), S1: (S1, R), S2: (R, S2), SUM: (S2, S1)}
    for one, (a_one, b_one) in alone.items():
        for other, (a_other, b_other) in alone.items():
            if one != other:
                operands = [*of((3, 4, 5), a_one, a_other), *of((3, 5, 6), b_one, b_other)]
                yield f"stacks, {one} and {other}", Row(pce.matmul, operands, (one, other))


PRODUCTS = {
    **{
        f"{name}, {one} and {other}": Row(formula, of((3, 2), one, R) + of((3, 2), R, other), (one, other))
        for one in (SUM, AVG)
        for other in (SUM, AVG)
        for name, formula in (("product", lambda a, b: a * b), ("matrix product", lambda a, b: a @ b.T))
    },
    **{
        f"{name} over one dim, {kind}": Row(formula, of((3, 2), kind) * 2, kind, "all_reduce 48")
        for kind in (SUM, AVG)
        for name, formula in (("product", lambda a, b: a * b), ("matrix product", lambda a, b: a @ b.T))
    },
    "sum of Partial arrays": Row(pce.add, of((5, 2), SUM) + of((2,), SUM), SUM),
    "sum over different dims": Row(pce.add, of((3, 2), SUM, R) + of((3, 2), R, SUM), (SUM, SUM)),
    "sum plus average": Row(pce.add, of((3, 2), SUM) + of((3, 2), AVG), SUM, "all_reduce 48"),
    "maximum times sum": Row(pce.multiply, of((3, 2), MAX, R) + of((3, 2), R, SUM), (R, SUM), "data: all_reduce 48"),
    "maximum beside sum": Row(
        lambda a, b: pce.concatenate([a, b]), of((3, 2), MAX, R) + of((3, 2), R, SUM), (R, SUM), "all_reduce 48"
    ),
    **dict(over_two_dims()),
}

REDUCTIONS = {
    **{
        f"{name} of sharded axis {axis}": Row(
            lambda x, f=function, a=axis: f(x, a), of((7, 3), S0), SUM if axis != 1 else S0, "", [SAME]
        )
        for name, function in (("sum", pce.sum), ("mean", pce.mean))
        for axis in (0, 1, None, (0, 1))
    },
    "mean of uneven shards": Row(pce.mean, uneven((7, 3), 0), SUM, "", [SAME]),
    "axes move up": Row(lambda x: pce.sum(x, 0), of((2, 3, 7), S2), S1),
    "axes move up by two": Row(lambda x: pce.mean(x, (0, 1)), of((2, 3, 7), S2), S0),
    "axes that are kept": Row(lambda x: pce.sum(x, 1, keepdims=True), of((2, 3, 7), S2), S2),
    **{
        f"mean is never an average, {one} {other}": Row(
            pce.mean, of((6, 4), one, other), tuple(each if each == R else SUM for each in (one, other))
        )
        for one, other in [(S0, R), (R, S1), (S0, S1), (S0, S0), (SUM, S1)]
    },
    "mean of an average": Row(lambda x: pce.mean(x, 1), of((5, 3), AVG), AVG),
    "mean of a mean": Row(lambda x: pce.mean(pce.mean(x, 0)), of((5, 3), S0), SUM),
    **{
        f"{function.__name__} of {dtype}": Row(
            lambda x, f=function: f(x, 0), [Operand((7, 3), S0, dtype=dtype)], R, f"all_reduce {3 * size}"
        )
        for function in (pce.max, pce.min)
        for dtype, size in (("float64", 8), ("int32", 4), ("bool", 1))
    },
    "max of another axis": Row(lambda x: pce.max(x, 1), of((7, 3), S0), S0, "", [SAME]),
    "logsumexp": Row(lambda x: pce.logsumexp(x, 1), of((3, 7), S1), R, "all_reduce 120", [SAME]),
    "logsumexp of uneven shards": Row(lambda x: pce.logsumexp(x, 1), uneven((3, 7), 1), R, "all_reduce 120", [SAME]),
    "variance": Row(lambda x: pce.var(x, axis=0), of((12, 3), S0), R, "all_reduce 24, all_reduce 48", [SAME]),
    "norm": Row(lambda x: pce.sqrt(pce.sum(pce.square(x))), of((7, 3), S0), R, "all_reduce 8", [SAME]),
}


# The bytes that 3 rows send over a sharded axis, forward and backward.
NORMALIZATIONS: dict[Formula, tuple[str, str]] = {
    pce.softmax: ("all_reduce 120", "all_reduce 24"),
    pce.log_softmax: ("all_reduce 120", "all_reduce 24"),
    pce.layer_norm: ("all_reduce 24, all_reduce 48", "all_reduce 48"),
    pce.rms_norm: ("all_reduce 24", "all_reduce 24"),
}
NORMALIZED = {
    **{
        f"{function.__name__} over {name} shards": Row(function, operands, S1, forward, [SAME], back)
        for function, (forward, back) in NORMALIZATIONS.items()
        for name, operands in (("sharded", of((3, 9), S1)), ("uneven", uneven((3, 9), 1)))
    },
    **{
        f"{function.__name__} of sharded rows": Row(function, of((7, 3), S0), S0, "", [SAME])
        for function in NORMALIZATIONS
    },
}


def entropy(reduction: str = "mean", axis: int = -1) -> Formula:
    return lambda logits, targets: pce.cross_entropy(logits, targets, axis=axis, reduction=reduction)


def entropy_of_product(hidden: DistArray, w: DistArray) -> DistArray:
    return pce.linear_class_statistics(hidden, w).entropy


TARGETS = whole_numbers((7,), R)
LOSSES = {
    "sharded logits": Row(entropy(), [*of((7, 5), S0), TARGETS], R, "all_reduce 64", [SAME, None]),
    "sharded targets": Row(entropy(), [*of((7, 5), R), whole_numbers((7,), S0)], R, "all_reduce 64", [SUM, None]),
    "sharded rows": Row(entropy(), [*of((7, 5), S0), whole_numbers((7,), S0)], R, "all_reduce 64", [SAME, None]),
    "whole rows": Row(entropy(), [*of((7, 5), R), TARGETS], R, "", [SAME, None]),
    "each row, sharded logits": Row(entropy("none"), [*of((7, 5), S0), TARGETS], S0, "agreement", [SAME, None]),
    "each row, sharded targets": Row(
        entropy("none"), [*of((7, 5), R), whole_numbers((7,), S0)], S0, "agreement", [SUM, None]
    ),
    **{
        f"{reduction} of {classes}": Row(
            entropy(reduction, axis), [*operands, TARGETS], R, "all_reduce 280", [SAME, None]
        )
        for reduction in ("none", "sum", "mean")
        for classes, axis, operands in (
            ("sharded classes", 1, of((7, 5), S1)),
            ("sharded classes first", 0, of((5, 7), S0)),
            ("uneven classes", 1, uneven((7, 5), 1)),
        )
    },
    "product, sharded rows": Row(entropy_of_product, of((7, 3), S0) + of((3, 5), R), S0, "agreement", [SAME, SUM]),
    "product, sharded classes": Row(
        entropy_of_product, of((7, 3), R) + of((3, 5), S1), R, "all_reduce 560", [SUM, SAME]
    ),
    "product, rows and classes": Row(
        entropy_of_product,
        of((7, 3), S0, R) + of((3, 5), R, S1),
        (S0, R),
        "model: all_reduce 320",
        [(S0, SUM), (SUM, S1)],
    ),
    "rows and classes": Row(
        entropy(),
        [*of((7, 5), S0, S1), whole_numbers((7,), (R, R))],
        (R, R),
        "model: all_reduce 160, data: all_reduce 64",
        [SAME, None],
    ),
    "each row of rows and classes": Row(
        entropy("none"),
        [*of((7, 5), S0, S1), whole_numbers((7,), (R, R))],
        (S0, R),
        "model: all_reduce 160",
        [SAME, None],
    ),
    **{
        f"three axes, {one} {other}": Row(
            entropy(axis=1), [*of((2, 5, 3), one, other), whole_numbers((2, 3), (R, R))], (R, R), sends, [SAME, None]
        )
        for one, other, sends in [
            (S1, S1, "data, model: all_reduce 240"),
            (S0, S2, "data, model: all_reduce 64"),
            (S2, S1, "model: all_reduce 160, data: all_reduce 64"),
            (S0, S0, "data, model: all_reduce 64"),
        ]
    },
}

IDS = whole_numbers((4, 3), R)
EMBEDDINGS = {
    "rows of the table": Row(pce.embedding, [IDS, *of((11, 3), S0)], SUM, "agreement", [None, SAME]),
    "uneven rows of the table": Row(pce.embedding, [IDS, *uneven((11, 3), 0)], SUM, "agreement", [None, SAME]),
    "columns of the table": Row(pce.embedding, [IDS, *of((11, 3), S1)], S2, "agreement", [None, SAME]),
    "terms of the table": Row(pce.embedding, [IDS, *of((11, 3), SUM)], SUM, "agreement"),
    "ids": Row(pce.embedding, [whole_numbers((4, 3), S1), *of((11, 3), R)], S1, "agreement", [None, SUM]),
    "ids over the dim of the table": Row(
        pce.embedding, [whole_numbers((4, 3), S0), *of((50_000, 64), S0)], SUM, "all_gather 24", [None, SAME]
    ),
    "ids and table": Row(
        pce.embedding, [whole_numbers((4, 3), (S0, R)), *of((11, 3), R, S0)], (S0, SUM), "agreement", [None, (SUM, S0)]
    ),
}

# For each: shape, placement, new shape, new placement. Nothing is sent.
KEPT = {
    "leads a merged group": ((4, 6), S0, (24,), S0),
    "leads a merged group of three": ((4, 2, 3), S0, (24,), S0),
    "leads a part of the axes": ((2, 3, 4), S0, (6, 4), S0),
    "stands alone behind": ((2, 3, 4), S2, (6, 4), S1),
    "stands alone in front": ((4, 2, 3), S0, (4, 6), S0),
    "another axis comes": ((3, 4), S1, (3, 1, 4), S2),
    "another axis goes": ((1, 3, 1, 4), S3, (3, 4), S1),
    "stays what it was": ((3, 4), S1, (3, 4), S1),
}


def reshaped(*after: int) -> Formula:
    return lambda x: pce.reshape(x, after)


RESHAPES = {
    **{
        f"{name}{how}": Row(reshaped(*after), operands, then, "", [SAME])
        for name, (before, shard, after, then) in KEPT.items()
        for how, operands in (("", of(before, shard)), (", unevenly", uneven(before, shard.axis)))
    },
    "split point within a row": Row(
        reshaped(8, 3), [Operand((24,), S0, (0, 1, 2, 3, 24))], S0, "all_to_all 0", [SAME], "all_to_all 40"
    ),
    **{
        f"shard behind in a merged group, {after}": Row(reshaped(*after), of((4, 6), S1), S0, sends, [SAME], back)
        for after, sends, back in [
            ((24,), "all_to_all 48", "all_to_all 32"),
            ((2, 12), "all_to_all 32", "all_to_all 64"),
            ((8, 3), "all_to_all 48", "all_to_all 32"),
        ]
    },
    **{
        f"joined {shard}": Row(lambda x, y: pce.concatenate([x, y]), of((4, 3), shard) + of((2, 3), shard), shard)
        for shard in (S1, R, SUM, AVG, MAX)
    },
    "joined along shards": Row(
        lambda x, y: pce.concatenate([x, y]), of((4, 3), S0) + of((2, 3), S0), S1, "all_to_all 16, all_to_all 16"
    ),
    **{f"split {shard}": Row(lambda x: pce.split(x, [1, 3])[1], of((4, 3), shard), shard) for shard in (S1, R, SUM)},
    "split along shards": Row(
        lambda x: pce.split(x, [1, 3])[1], of((4, 3), S0), S1, "all_to_all 16, all_to_all 16, all_to_all 16"
    ),
    **{
        f"one row beside many, {other}": Row(pce.multiply, of((1, 3), S0) + of((16, 3), other), gives, sends)
        for other, gives, sends in [
            (R, S1, "all_to_all 16"),
            (S0, S0, "all_gather 24"),
            (S1, S1, "all_to_all 16"),
            (SUM, S1, "all_to_all 16, reduce_scatter 384"),
        ]
    },
    "one row stretched": Row(lambda x: pce.broadcast_to(x, (4, 3)), of((1, 3), S0), S1, "all_to_all 16"),
    "one matrix beside a stack": Row(pce.matmul, of((1, 2, 3), S0) + of((4, 3, 2), S0), S0, "all_gather 48"),
}


def attention(x: Any, w: Any) -> Any:
    """Queries stay sharded along the sequence, keys and values are gathered."""
    keys, values = (x @ w).T.redistribute(data=R), pce.tanh(x @ w).redistribute(data=R)
    return pce.square(pce.softmax(x @ keys) @ values).sum()


def thrice(x: Any, w: Any) -> Any:
    h = pce.square(x)
    return (h @ w).sum() + (h @ (2.0 * w)).sum() + pce.square(h @ w).sum()


def sharded_and_partial(x: Any, w: Any, s: Any) -> Any:
    h = pce.square(x)
    return (h @ w).sum() + (h * s).sum()


def also_transposed(x: Any, w: Any) -> Any:
    h = pce.square(x)
    return (h @ w).sum() + (h.T @ w).sum() + (h.reshape(2, 8) * 3.0).sum()


WEIGHT = of((4, 6), S1)
GRADIENTS = {
    "weight of a sharded batch": Row(pce.matmul, of((7, 4), S0) + of((4, 3), R), S0, "", [SAME, SUM]),
    "bias over batch and sequence": Row(
        lambda x, b: pce.square(x + b), of((4, 6, 3), S0, S1) + of((3,), R, R), (S0, S1), "", [SAME, (SUM, SUM)]
    ),
    "layer norm over batch and sequence": Row(
        pce.layer_norm, of((4, 6, 5), S0, S1) + of((5,), R, R) * 2, (S0, S1), "", [SAME, (SUM, SUM), (SUM, SUM)]
    ),
    "columns of a weight": Row(pce.matmul, of((7, 4), S0, R) + of((4, 5), R, S1), (S0, S1), "", [(S0, SUM), (SUM, S1)]),
    "rows of a weight": Row(pce.matmul, of((7, 4), S0, S1) + of((4, 5), R, S0), (S0, SUM), "", [SAME, (SUM, S0)]),
    **{
        f"{shape} stretched over shards": Row(pce.multiply, of(shape, R) + of((7, 3), S0), S0, "", [SUM, SAME])
        for shape in [(), (3,), (1, 3), (1, 1), (7, 1)]
    },
    "factor of something Partial": Row(pce.multiply, of((3, 2), R) + of((3, 2), SUM), SUM, "", [SUM, R]),
    **{
        f"whole parameter beside {one} {other}": Row(
            lambda w, x: (w * x).sum(), of((4, 6), R, R) + of((4, 6), one, other), sums, "", [sums, SAME]
        )
        for one, other, sums in [(S0, R, (SUM, R)), (R, S1, (R, SUM)), (S0, S1, (SUM, SUM)), (S1, S1, (SUM, SUM))]
    },
    **{
        f"sharded parameter beside {other}": Row(
            pce.multiply, uneven((7, 3), 0) + of((7, 3), other), S0, sends, [SAME, gradient], back
        )
        for other, sends, gradient, back in [
            (R, "", SUM, ""),
            (S1, "all_to_all 56", SAME, "all_to_all 0"),
            (SUM, "reduce_scatter 168", SUM, ""),
        ]
    },
    "context parallelism": Row(
        attention,
        of((6, 4), S0) + of((4, 4), R),
        SUM,
        "all_gather 64, all_gather 64",
        [SAME, SUM],
        "reduce_scatter 192, reduce_scatter 192",
    ),
    "sequence parallelism": Row(
        lambda x, w: x.redistribute(data=R) @ w,
        of((6, 4), S0) + of((4, 5), S1),
        S1,
        "all_gather 64",
        [SAME, SAME],
        "reduce_scatter 192",
    ),
    # A value's gradient is brought home once, when all its consumers have contributed.
    "three consumers": Row(thrice, of((5, 4), R) + WEIGHT, SUM, "", [R, SAME], "all_reduce 160"),
    "consumers over one dim of two": Row(
        sharded_and_partial,
        of((5, 4), R, R) + of((4, 6), S1, R) + of((5, 4), S0, R),
        (SUM, R),
        "",
        [(R, R), None, None],
        "all_reduce 160",
    ),
    "a value and its transpose": Row(also_transposed, of((4, 4), R) + WEIGHT, SUM, "", [R, SAME], "all_reduce 128"),
    "a leaf stays Partial": Row(pce.matmul, of((5, 4), R) + WEIGHT, S1, "", [SUM, SAME]),
    "no value but a leaf stays Partial": Row(
        lambda x, w: (x * 1.0) @ w, of((5, 4), R) + WEIGHT, S1, "", [R, SAME], "all_reduce 160"
    ),
    "moved to where it is": Row(
        lambda x, w: x.redistribute(data=R) @ w, of((5, 4), R) + WEIGHT, S1, "", [R, SAME], "all_reduce 160"
    ),
}

CONSUMERS: dict[str, Formula] = {
    "P": lambda h, w, s, p: h @ w,
    "S": lambda h, w, s, p: h * s,
    "R": lambda h, w, s, p: h * 2.0,
    "A": lambda h, w, s, p: h * p,
}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (name, row)
        for table in (PRODUCTS, REDUCTIONS, NORMALIZED, LOSSES, EMBEDDINGS, RESHAPES, GRADIENTS)
        for name, row in table.items()
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operation_gives_and_sends_what_row_says(name, row):
    assert ran(row) == row


def test_consumers_of_every_placement_are_joined_first():
    for order in ("SPP", "PSP", "PPS", "RPS", "SSP", "PRS", "SPR", "PA", "AP", "SAP"):
        x = Operand((5, 4), R).made(requires_grad=True)
        others = [each.made() for each in (*WEIGHT, *of((5, 4), S0), *of((5, 4), AVG))]
        h = pce.square(x)
        trace = backward(sum(CONSUMERS[name](h, *others).sum() for name in order))
        assert (x.grad.sharding, sent(trace)) == (x.sharding, "all_reduce 160"), order


def test_redistribution_gradient_has_natural_placement_of_operand():
    for source in (S0, S1, R, SUM, AVG, MAX):
        operands = uneven((5, 4), source.axis) if isinstance(source, Shard) else of((5, 4), source)
        for target in (S0, S1, R, SUM, AVG, MIN):
            x = operands[0].made(requires_grad=True)
            backward(pce.square(x.redistribute(data=target)).sum())
            assert x.grad.sharding == (x.sharding if isinstance(source, Shard) else x.sharding.natural), (
                source,
                target,
            )


def test_reshape_keeps_shard_split_between_rows():
    for ends in [(0, 2, 4, 6, 8), (0, 1, 1, 1, 8), (0, 5, 6, 7, 8)]:
        x = Operand((24,), S0, tuple(3 * end for end in ends)).made()
        result, trace = traced(pce.reshape, x, (8, 3))
        assert result.sharding.splits[0] == ends
        assert trace.events == []


def test_split_points_of_one_operand_are_kept():
    x, y = (Operand((9, 2), S0, splits).made() for splits in [(0, 1, 1, 4, 9), (0, 2, 4, 6, 9)])
    result, trace = traced(pce.add, x, y)
    assert result.sharding in (x.sharding, y.sharding)
    assert collectives(trace) == ["all_to_all"]


def test_events_say_what_is_moved_and_why():
    reduced, back = Operand((7, 3), S0).made(), Operand((5, 4), R).made(requires_grad=True)
    _, forward = traced(pce.max, reduced, 0)
    trace = backward((pce.square(back) @ Operand((4, 6), S1).made()).sum())
    moved = Operand((24,), S0, (0, 1, 2, 3, 24)).made()
    _, exchange = traced(pce.reshape, moved, (8, 3))
    assert [(event.before, event.after) for event in forward.select()] == [("Partial('max')", "Replicate()")]
    assert [(event.operation, event.reason) for event in trace.select()] == [("square", "its gradient is complete")]
    assert all(event.reason and event.operation == "reshape" for event in exchange.events)


def test_computed_array_keeps_its_redistribution():
    p = Operand((5, 4), SUM).made() * 1.0
    _, trace = traced(lambda: (pce.square(p), pce.sqrt(p)))
    assert collectives(trace) == ["all_reduce"]


# ------------------------------------------------------------------------------------------------- which operand moves

F32, F64 = np.float32, np.float64
TWO = {"data": 2, "model": 4}


class Plan(NamedTuple):
    """An operation, its operands, where it needs them and puts its result; the dtype is float32 unless told."""

    why: str
    name: str
    operands: list[Operand]
    needs: list[Any]
    gives: Any
    dtypes: Any = F32


PLANS = [
    Plan("stay", "matmul", of((1000, 4), S1) + of((4, 1000), S0), [S1, S0], SUM),  # though its result will cost more
    Plan("stay", "matmul", of((1000, 4), SUM) + of((4, 1000), R), [SUM, R], SUM),
    Plan("stay", "matmul", of((9, 4), R) + of((4, 9), R), [R, R], R),
    Plan("stay", "add", of((9, 4), R) * 2, [R, R], R),
    Plan("a whole operand is sliced", "matmul", of((2, 500), R) + of((500, 40), S0), [S1, S0], SUM),
    Plan("a whole operand need not be sliced", "matmul", of((2, 500), R) + of((500, 40), S1), [R, S1], S1),
    Plan("fewer bytes: the row", "add", of((100, 4), S0) + of((4,), S0), [S0, R], S0),
    Plan("fewer bytes: the row", "add", of((4,), S0) + of((100, 4), S0), [R, S0], S0),
    Plan("fewer bytes: the second", "matmul", of((100, 8), S0) + of((8, 8), S1), [S0, R], S0),
    Plan("fewer bytes: the first", "matmul", of((8, 8), S0) + of((8, 100), S1), [R, S1], S1),
    # Bytes, not elements: 8 * n/16 * 3 for the first against 4 * n/16 * 3 for the second.
    Plan("bytes: the second", "add", of((8, 8), S0) + of((8, 8), S1), [S0, S0], S0, (F64, F32)),
    Plan("bytes: the first", "add", of((8, 8), S0) + of((8, 8), S1), [S1, S1], S1, (F32, F64)),
    # Gathering w: 3/4 * 784 * 10 * 4 = 23520 bytes. Exchanging x: 3/16 * 16 * 784 * 4 = 9408 bytes, and 960 for the
    # all_reduce of the result, 2 * 3/4 * 16 * 10 * 4.
    Plan("exchange", "matmul", of((16, 784), S0) + of((784, 10), S0), [S1, S0], SUM),
    # Gathering w: 3/4 * 800 * 4 = 2400. Exchanging x: 600, and 60000 for the result.
    Plan("Partial result", "matmul", of((100, 8), S0) + of((8, 100), S0), [S0, R], S0),
    # Exchanging the condition: 3/16 * n * 8 bytes at once; the others: 3/16 * n * 4 bytes each.
    Plan("once", "where", of((8, 8), S0) + of((8, 8), S1) * 2, [S0, S1, S1], S1, (F64, F32, F32)),
    Plan("tie: the second moves", "matmul", of((8, 8), S0) + of((8, 8), S1), [S0, R], S0),
    *(
        plan
        for name in ("add", "multiply", "maximum")
        for plan in (
            Plan("a whole operand is sliced", name, of((9, 4), R) + of((9, 4), S1), [S1, S1], S1),
            Plan("tie: the second moves", name, of((8, 8), S0) + of((8, 8), S1), [S0, S0], S0),
            Plan("tie: the second moves", name, of((8, 8), S1) + of((8, 8), S0), [S1, S1], S1),
        )
    ),
    *(
        plan
        for name in ("maximum", "multiply", "add", "divide")
        for plan in (
            Plan("Partial becomes whole", name, of((8, 4), MAX) + of((8, 4), R), [R, R], R),
            Plan("Partial is scattered", name, of((8, 4), SUM) + of((8, 4), S1), [S1, S1], S1),
            Plan("Partial is scattered", name, of((8, 4), S0) + of((8, 4), SUM), [S0, S0], S0),
        )
    ),
    Plan("Partial becomes whole", "maximum", of((8, 4), SUM) + of((8, 4), R), [R, R], R),
    Plan("dims together", "matmul", of((8, 6), S0, S1) + of((6, 4), R, S0), [(S0, S1), (R, S0)], (S0, SUM)),
    Plan("dims together", "matmul", of((8, 6), S0, R) + of((6, 4), R, S1), [(S0, R), (R, S1)], (S0, S1)),
    Plan("dims together", "multiply", of((8, 6), SUM, R) + of((8, 6), R, SUM), [(SUM, R), (R, SUM)], (SUM, SUM)),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}, {plan.why}")
def test_cheapest_plan_is_chosen(plan):
    def placed(placements: Any) -> Any:
        found = tuple(placements.values())
        return found if len(found) > 1 else found[0]

    mesh = TWO if isinstance(plan.gives, tuple) else {"model": 4}
    named = [
        dict(zip(mesh, each.placed if isinstance(each.placed, tuple) else (each.placed,), strict=True))
        for each in plan.operands
    ]
    shapes = [each.shape for each in plan.operands]
    found = infer_placements(plan.name, shapes, named, mesh=mesh, dtypes=plan.dtypes)
    assert [placed(each) for each in found.operands] == plan.needs
    assert placed(found.result) == plan.gives
    if plan.why == "Partial is scattered":
        assert [event.collective for event in found.collectives] == ["reduce_scatter"]


# ------------------------------------------------------------------------------------- operands that do not go together


def test_shard_of_one_row_does_not_broadcast():
    # Each rank but the last has one row of x, which would fit any number of rows of y.
    x, y = Operand((5, 2), S0, (0, 1, 2, 3, 5)).made(), Operand((25, 2), S0).made()
    for function in (pce.add, pce.multiply, pce.maximum):
        with pytest.raises(ValueError, match="broadcast"):
            function(x, y)
    with pytest.raises(ValueError, match="differ"):
        pce.matmul(numbers(3, 1), x)


def test_operands_of_two_meshes_are_refused():
    x = Operand((3,), R).made()
    y = DistArray(x.local, Mesh.without_ranks(data=4), x.sharding)
    for function in (pce.add, pce.multiply, lambda x, y: pce.concatenate([x, y]), np.hypot):
        with pytest.raises(ValueError, match="takes operands of one mesh, got Mesh"):
            function(x, y)


# ------------------------------------------------------------------------------------- on ranks: what no table can say


def grids(comm) -> Iterator[Mesh]:
    """Every mesh of two dims."""
    return (mesh_of(comm, *sizes) for sizes in factorizations(comm.size, 2))


def test_plain_arrays_and_numbers_are_whole(line):
    a, b = numbers(5, 4), numbers(5, 4, seed=1)
    x = at(line, a, Shard(0))
    for left, right, expected in [
        (x, b, a * b),
        (b, x, a * b),
        (x, b.tolist(), a * b),
        (x, np.float64(3), a * 3),
        (np.float64(3), x, a * 3),
        (x, True, a),
        (memoryview(b), x, a * b),
    ]:
        check(traced(pce.multiply, left, right), expected, Shard(0), silent=True)
    check(b @ at(line, a, Shard(0)).T, b @ a.T, Shard(1))


TABLE = numbers(11, 3)


@pytest.mark.parametrize("placed", [R, Shard(0), SUM], ids=str)
def test_id_outside_table_raises_everywhere_whoever_has_it(line, placed):
    known = np.array([[0, 10, 3], [3, 7, 3], [5, 1, 9], [10, 10, 0]])
    for wrong in (11, -1, 10**12, -11):
        bad = known.copy()
        bad[-1, -1] = wrong  # sharded, it is only the last rank with any ids that sees it
        ids = at(line, bad, placed)
        for placement in (R, Shard(0), Shard(1), SUM):
            table = at(line, TABLE, placement)
            with pytest.raises(IndexError, match=rf"id {wrong} is outside \[0, 11\)") as raised:
                pce.embedding(ids, table)
            texts = line.comm("data").allgather(str(raised.value))
            assert len(set(texts)) == 1
    np.testing.assert_array_equal(whole_of(pce.embedding(known, table)), TABLE[known])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [pce.layer_norm, pce.rms_norm, pce.var], ids=lambda each: each.__name__)
def test_sums_of_rows_trace_their_dim(line, function):
    _, trace = traced(lambda: function(at(line, numbers(7, 5), Shard(1)), axis=1))
    assert {event.over for event in trace.events} == {"data"}


@pytest.mark.parametrize(
    "function", [pce.cross_entropy, pce.class_statistics, pce.kl_divergence], ids=lambda each: each.__name__
)
def test_losses_trace_dims_of_classes_and_rows(square, function):
    logits, targets = at(square, numbers(7, 5), Shard(0), Shard(1)), np.array([0, 4, 2, -100, 1, 1, 3])
    other = numbers(7, 5) if function is pce.kl_divergence else targets
    _, trace = traced(lambda: function(logits, other))
    agreements = trace.select("all_gather", operation=function.__name__, purpose=Purpose.AGREEMENT)
    assert [event.over for event in agreements] == ["model", "data"]


def test_micro_batches_leave_gradient_of_sharded_parameter_partial(line):
    w = at(line, numbers(4, 3), Shard(0), requires_grad=True)
    data = [numbers(9 * line.size, 4, seed=seed) for seed in range(2)]
    traces = [backward((at(line, each, Shard(0)) @ w).sum()) for each in data]
    check(w.grad, sum(each.sum(0)[:, None] * np.ones(3) for each in data), SUM)
    assert sum(trace.count(operation="backward") for trace in traces) == 0


@pytest.mark.parametrize("whole_first", [True, False])
def test_whole_gradient_joins_partial_one_once(line, whole_first):
    a, b = numbers(4, 3), numbers(7, 4, seed=1)
    for together in (True, False):
        w = at(line, a, R, requires_grad=True)
        losses = [lambda w=w: (w * 10.0).sum(), lambda w=w: (at(line, b, Shard(0)) @ w).sum()]
        if not whole_first:
            losses.reverse()
        if together:
            sent = backward(losses[0]() + losses[1]()).count(purpose=None)
        else:
            sent = sum(backward(loss()).count(purpose=None) for loss in losses)
        check(w.grad, 10 + b.T @ np.ones((7, 3)), SUM)
        assert sent == 0


def test_made_array_is_redistributed_anew_after_writing(line):
    a = numbers(5, 4)
    x = at(line, a, SUM)
    first = pce.square(x)
    x.local[...] *= 2
    second, trace = traced(pce.square, x)
    check(first, a * a, R)
    check(second, 4 * a * a, R)
    assert collectives(trace) == ["all_reduce"]


# ------------------------------------------------------------------------------------------------------------ the trace


def training_step(mesh: Mesh) -> None:
    """A bit of everything, with much that has to be moved."""
    x = at(mesh, numbers(6, 4) / 4, Shard(0), R)
    w = at(mesh, numbers(4, 5, seed=1) / 4, R, Shard(1), requires_grad=True)
    v = at(mesh, numbers(5, 7, seed=2) / 4, R, Shard(0), requires_grad=True)
    table = at(mesh, numbers(9, 4, seed=3) / 4, R, Shard(0), requires_grad=True)
    h = x + pce.embedding(np.arange(6), table).redistribute(data=Shard(0), model=R)
    h = pce.layer_norm(h.redistribute(model=Shard(1))).redistribute(model=R)
    logits = pce.tanh(h @ w) @ v
    loss = pce.cross_entropy(logits.redistribute(model=Shard(1)), np.arange(6)) + pce.max(h) + pce.mean(pce.square(h))
    loss.backward()
    pce.SGD([w, v, table], lr=0.1).step()
    pce.check_replicas(w)


def test_trace_shows_all_communication_with_reasons(comm, monkeypatch):
    for mesh in grids(comm):
        training_step(mesh)
        waited: list[str] = []
        wait = Channel.wait

        def counting(
            self: Channel,
            request: Any,
            operation: str,
            *arguments: Any,
            wait: Any = wait,
            seen: Any = waited,
            **options: Any,
        ):
            seen.append(operation)
            return wait(self, request, operation, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "wait", counting)
            _, trace = traced(training_step, mesh)
        assert len(trace.events) == len(waited) > 20
        for event in trace.events:
            assert event.operation
            assert event.reason
            assert event.over in ("data", "model", "data, model")
            if event.purpose == Purpose.PAYLOAD and event.operation not in ("cross_entropy", "logsumexp"):
                assert event.before
                assert event.after
        assert {event.phase for event in trace.select()} == {"forward", "backward", "step"}
