"""The placements of results and gradients, what is sent for them, and numbers that are those of one process.

The functions of NumPy run on distributed arrays as well, so that one formula gives both a result and what it is to be.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard, dense, infer_placements
from pce_mpi.comm.communicators import Channel
from pce_mpi.comm.tracing import Purpose
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.sharding import Sharding
from ranks import op_cases
from ranks.grids import factorizations, mesh_of
from ranks.placed import AVG, MAX, MIN, ROUNDING, SUM, R, at, check, collectives, numbers, traced, whole_of

Array = np.ndarray
Formula = Callable[[Any], Any]

pytestmark = pytest.mark.usefixtures("impatient")


def grids(comm) -> Iterator[Mesh]:
    """Every mesh of two dims."""
    return (mesh_of(comm, *sizes) for sizes in factorizations(comm.size, 2))


def placements(x: DistArray) -> tuple[Placement, ...]:
    return x.sharding.placements


def by_name(formulas: dict[str, Any]):
    return pytest.mark.parametrize("formula", formulas.values(), ids=formulas)


kinds = pytest.mark.parametrize("kind", [SUM, AVG], ids=["sum", "avg"])
extremes = pytest.mark.parametrize("kind", [MAX, MIN], ids=["max", "min"])

# ------------------------------------------------------------------------------------------------ what stays Partial

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
    **MOVEMENTS,
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


@kinds
def test_linear_operations_keep_partial_and_send_nothing(line, kind):
    whole = numbers(6, 4)
    for name, formula in LINEAR.items():
        check(traced(formula, at(line, whole, kind)), formula(whole), kind, name=name, silent=True)


@kinds
def test_sum_of_partial_arrays_stays_partial(line, kind):
    a, b = numbers(5, 2), numbers(2, seed=1)
    check(traced(lambda: at(line, a, kind) + at(line, b, kind, seed=1)), a + b, kind, silent=True)


def test_embedding_in_partial_table_is_partial(line):
    table, ids = numbers(5, 2), np.array([[4, 0], [1, 4]])
    check(traced(pce.embedding, ids, at(line, table, SUM)), table[ids], SUM, sent=[])


@extremes
def test_maxima_and_minima_survive_what_only_moves_data(line, kind):
    whole = numbers(6, 4)
    for name, formula in MOVEMENTS.items():
        check(traced(formula, at(line, whole, kind)), formula(whole), kind, name=name, silent=True)


@extremes
def test_maxima_and_minima_survive_nothing_else(line, kind):
    whole = numbers(6, 4)
    for name, formula in LINEAR.items():
        if name not in MOVEMENTS:
            result, trace = traced(formula, at(line, whole, kind))
            check(result, formula(whole), R, name=name)
            assert set(collectives(trace)) == {"all_reduce"}, name


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
    "sort, which has no rule": lambda p: np.sort(p, axis=0),
}


@pytest.mark.parametrize("kind", [SUM, AVG, MAX, MIN], ids=lambda kind: kind.operator)
def test_other_operations_reduce_partial_operands_first(line, kind):
    whole = numbers(6, 4)
    for name, formula in NOT_LINEAR.items():
        check(traced(formula, at(line, whole, kind)), formula(whole), R, name=name, sent=["all_reduce"])


def test_softmax_and_losses_of_partial_logits_reduce_first(line):
    logits, targets = numbers(6, 4), np.array([0, 3, 1, 2, 0, 0])
    p = at(line, logits, SUM)
    e = np.exp(logits)
    for function, expected in [
        (pce.softmax, e / e.sum(axis=1, keepdims=True)),
        (pce.log_softmax, np.log(e / e.sum(axis=1, keepdims=True))),
        (lambda p: pce.logsumexp(p, axis=1), np.log(e.sum(axis=1))),
        (lambda p: pce.cross_entropy(p, targets), dense.softmax_cross_entropy(logits, targets)),
    ]:
        check(traced(function, p), expected, R, sent=["all_reduce"])


# ------------------------------------------------------------------------------- a Partial operand and a whole one


@kinds
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_term_added_to_partial_is_counted_once(line, kind, first):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    p = at(line, a, kind)
    for other, value in [(at(line, b, R), b), (b, b), (7, 7), (np.float64(7), 7), (np.array(7.0), 7)]:
        (result, trace), expected = (
            traced(lambda o: p + o if first else o - p, other),
            a + value if first else value - a,
        )
        check(result, expected, kind)
        assert trace.count(purpose=None) == 0


def test_term_made_partial_is_kept_by_one_rank(line):
    p = at(line, np.zeros(3), SUM)
    result = p + 5.0
    added = [
        local - before for local, before in zip(*map(line.comm("data").allgather, (result.local, p.local)), strict=True)
    ]
    assert [term.tolist() for term in added] == [[5.0] * 3, *([[0.0] * 3] * (line.size - 1))]


def test_terms_over_different_dims_are_added_over_both(comm):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    for mesh in grids(comm):
        check(traced(lambda m: at(m, a, SUM, R) + at(m, b, R, SUM), mesh), a + b, SUM, SUM, silent=True)


def test_sum_plus_average_reduces_one_first(line):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    result, trace = traced(lambda: at(line, a, SUM) + at(line, b, AVG))
    got = whole_of(result)
    assert collectives(trace) == ["all_reduce"]
    np.testing.assert_allclose(got, a + b, rtol=ROUNDING)


# ------------------------------------------------------------------------------------------ products of Partial arrays

PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {"product": lambda a, b: a * b, "matrix product": lambda a, b: a @ b.T}


@by_name(PRODUCTS)
@pytest.mark.parametrize("kinds", [(SUM, SUM), (SUM, AVG), (AVG, SUM), (AVG, AVG)], ids=str)
def test_product_of_partials_is_partial_over_both_dims(comm, formula, kinds):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    for mesh in grids(comm):
        check(
            traced(formula, at(mesh, a, kinds[0], R), at(mesh, b, R, kinds[1], seed=1)),
            formula(a, b),
            *kinds,
            silent=True,
        )


@by_name(PRODUCTS)
@kinds
def test_product_of_partials_over_one_dim_reduces_one(line, formula, kind):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    p, q = at(line, a, kind), at(line, b, kind, seed=1)
    result, trace = traced(formula, p, q)
    check((result, trace), formula(a, b), kind, sent=["all_reduce"])
    assert trace.bytes() == 3 * 2 * 8


def test_square_of_partial_is_no_sum_of_squares(line):
    a = numbers(3, 2)
    p = at(line, a, SUM)
    for square in (p * p, p**2, pce.square(p)):
        got = whole_of(square)
        np.testing.assert_array_equal(got, a * a)


def test_maximum_is_reduced_before_it_meets_a_sum(comm):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    for mesh in grids(comm):
        result, trace = traced(lambda m: at(m, a, MAX, R) * at(m, b, R, SUM), mesh)
        check(result, a * b, R, SUM)
        assert [(event.over, event.collective) for event in trace.select()] == [("data", "all_reduce")]


def test_concatenation_reduces_maximum_beside_a_sum(comm):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    for mesh in grids(comm):
        result, trace = traced(lambda m: pce.concatenate([at(m, a, MAX, R), at(m, b, R, SUM)]), mesh)
        got = whole_of(result)
        assert collectives(trace) == ["all_reduce"]
        np.testing.assert_array_equal(got, np.concatenate([a, b]))


def test_matmul_of_stacks_follows_rule_on_every_axis(comm):
    a, b = numbers(3, 4, 5), numbers(3, 5, 6, seed=1)
    placed = {
        Shard(0): (Shard(0), Shard(0)),
        Shard(1): (Shard(1), R),
        Shard(2): (R, Shard(2)),
        SUM: (Shard(2), Shard(1)),
    }
    for mesh in grids(comm):
        for one, (a_one, b_one) in placed.items():
            for other, (a_other, b_other) in placed.items():
                if one == other:
                    continue
                x, y = at(mesh, a, a_one, a_other), at(mesh, b, b_one, b_other)
                check(traced(pce.matmul, x, y), a @ b, one, other, silent=True)


# ---------------------------------------------------------------------------------------------------------- reductions


def test_sum_over_sharded_axis_is_partial(line):
    a = numbers(7, 3)
    for splits in (None, [1], [2]):
        x = at(line, a, Shard(0), splits=splits)
        for axis, keepdims, placed in [(0, False, SUM), ((0, 1), True, SUM), (None, False, SUM), (1, False, Shard(0))]:
            check(traced(pce.sum, x, axis, keepdims=keepdims), a.sum(axis, keepdims=keepdims), placed, silent=True)


def test_axes_behind_a_summed_one_move_up(line):
    a = numbers(2, 3, 7)
    x = at(line, a, Shard(2))
    check(pce.sum(x, 0), a.sum(0), Shard(1))
    check(pce.mean(x, (0, 1)), a.mean((0, 1)), Shard(0))
    check(pce.sum(x, 1, keepdims=True), a.sum(1, keepdims=True), Shard(2))


def test_mean_over_sharded_axis_divides_by_global_count(line):
    a = numbers(7, 3)
    for splits in (None, [1], [2], [3]):
        x = at(line, a, Shard(0), requires_grad=True, splits=splits)
        result, trace = traced(pce.mean, x)
        np.testing.assert_allclose(result.local, x.local.sum() / 21, rtol=ROUNDING)  # never a mean of its own rows
        check(result, a.mean(), SUM)
        assert trace.count(purpose=None) == 0
        _, trace = traced(result.backward)
        assert x.grad.sharding == x.sharding
        np.testing.assert_array_equal(x.grad.local, np.full(x.local.shape, 1 / 21))
        assert trace.count(purpose=None) == 0


def test_mean_is_never_average_over_ranks(square):
    a = numbers(6, 4)
    for placed in [(Shard(0), R), (R, Shard(1)), (Shard(0), Shard(1)), (Shard(0), Shard(0)), (SUM, Shard(1))]:
        result = pce.mean(at(square, a, *placed))
        check(result, a.mean(), *(R if placement == R else SUM for placement in placed))


def test_mean_of_average_and_mean_of_mean(line):
    a = numbers(5, 3)
    check(pce.mean(at(line, a, AVG), 1), a.mean(1), AVG)
    check(pce.mean(pce.mean(at(line, a, Shard(0)), 0)), a.mean(), SUM)


@pytest.mark.parametrize("name", ["max", "min"])
def test_max_over_sharded_axis_reduces_at_once(line, name):
    function, in_numpy = getattr(pce, name), getattr(np, name)
    for a in (numbers(7, 3) - 3, numbers(1, 3), -numbers(5, 3), numbers(5, 3).astype(np.int32), numbers(5, 3) > 2):
        for splits in (None, [1]):
            result, trace = traced(function, at(line, a, Shard(0), splits=splits), 0)
            check((result, trace), in_numpy(a, 0), R, sent=["all_reduce"])
            assert trace.bytes() == 3 * a.dtype.itemsize
            assert trace.events[-1].before == f"Partial({name!r})"
            assert result.dtype == a.dtype
    b = numbers(7, 3)
    result = check(traced(function, at(line, b, Shard(0)), 1), in_numpy(b, 1), Shard(0), silent=True)


@pytest.mark.parametrize("name", ["max", "min"])
def test_max_and_min_see_nan_of_any_rank(line, name):
    a = numbers(7, 2)
    a[-1, 1] = np.nan
    got = whole_of(getattr(pce, name)(at(line, a, Shard(0)), 0))
    np.testing.assert_array_equal(got, getattr(np, name)(a, 0))


@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_share_gradient_counted_over_all_ranks(line, name):
    sign = 1.0 if name == "max" else -1.0
    # Column 0: the largest three times; column 1: once; column 2: everywhere.
    a = sign * np.array([[9.0, 1, 4], [2, 1, 4], [9, 1, 4], [1, 8, 4], [9, 1, 4], [0, 1, 4]])
    expected = np.array(
        [[1 / 3, 0, 1 / 6], [0, 0, 1 / 6], [1 / 3, 0, 1 / 6], [0, 1, 1 / 6], [1 / 3, 0, 1 / 6], [0, 0, 1 / 6]]
    )
    for splits in (None, [1], [2]):
        x = at(line, a, Shard(0), requires_grad=True, splits=splits)
        weights = np.array([1.0, 10.0, 100.0])
        (getattr(pce, name)(x, 0) * weights).sum().backward()
        assert x.grad.sharding == x.sharding
        check(x.grad, expected * weights, Shard(0))


def test_logsumexp_over_sharded_axis_is_whole(line):
    a = numbers(3, 7) + np.array([[0.0], [1e4], [-1e4]])
    shifted = np.exp(a - a.max(axis=1, keepdims=True))
    expected = a.max(axis=1) + np.log(shifted.sum(axis=1))
    for splits in (None, [1]):
        x = at(line, a, Shard(1), requires_grad=True, splits=splits)
        result = check(traced(pce.logsumexp, x, 1), expected, R, sent=["all_reduce"])
        _, trace = traced(result.sum().backward)
        check(x.grad, shifted / shifted.sum(axis=1, keepdims=True), Shard(1))
        assert x.grad.sharding == x.sharding
        assert trace.count(purpose=None) == 0


def test_norm_over_sharded_axis_is_whole(line):
    a = numbers(7, 3)
    x = at(line, a, Shard(0), requires_grad=True)
    result, trace = traced(lambda: pce.sqrt(pce.sum(pce.square(x))))
    check((result, trace), np.sqrt((a * a).sum()), R, sent=["all_reduce"])
    assert trace.bytes() == 8
    result.backward()
    check(x.grad, a / np.sqrt((a * a).sum()), Shard(0))
    check(np.linalg.norm(x), np.linalg.norm(a), R)


# Each normalization, the same in NumPy, and the number of collectives that it takes over a sharded axis.
NORMALIZATIONS: dict[str, tuple[Formula, Formula, int]] = {
    "softmax": (pce.softmax, op_cases.softmax, 1),
    "log_softmax": (pce.log_softmax, op_cases.log_softmax, 1),
    "layer_norm": (pce.layer_norm, op_cases.layer_norm, 2),
    "rms_norm": (pce.rms_norm, op_cases.rms_norm, 1),
}


@by_name(NORMALIZATIONS)
def test_normalization_over_sharded_axis_sends_little(line, formula):
    function, in_numpy, calls = formula
    # With fewer columns than ranks it is cheaper to move them.
    shape = (3, 2 * line.size + 1)
    a, weights = numbers(*shape), numbers(*shape, seed=1)
    whole = at(line, a, R, requires_grad=True)
    (function(whole) * weights).sum().backward()
    for splits in (None, [1]):
        x = at(line, a, Shard(1), requires_grad=True, splits=splits)
        result, trace = traced(function, x)
        assert result.sharding == x.sharding
        check(result, in_numpy(a), Shard(1))
        assert collectives(trace) == ["all_reduce"] * calls
        assert {event.over for event in trace.events} == {"data"}
        assert trace.bytes() <= calls * 3 * 40
        _, trace = traced((result * weights).sum().backward)
        assert x.grad.sharding == x.sharding
        check(x.grad, whole.grad.local, Shard(1))
        assert set(collectives(trace)) == {"all_reduce"}
        assert trace.bytes() <= 4 * 3 * 8


@by_name(NORMALIZATIONS)
def test_normalization_of_sharded_rows_sends_nothing(line, formula):
    function, in_numpy, _ = formula
    a = numbers(7, 3)
    x = at(line, a, Shard(0), requires_grad=True)
    result = check(traced(function, x), in_numpy(a), Shard(0), silent=True)
    _, trace = traced(pce.square(result).sum().backward)
    assert trace.count(purpose=None) == 0


# ------------------------------------------------------------------------------------------------------- cross entropy

LOGITS = numbers(7, 5) / 2
TARGETS = np.array([0, 4, 2, -100, 1, 1, 3])


@pytest.mark.parametrize("function", [pce.cross_entropy, pce.class_statistics], ids=lambda each: each.__name__)
def test_losses_trace_dims_of_classes_and_rows(square, function):
    _, trace = traced(lambda: function(at(square, LOGITS, Shard(0), Shard(1)), TARGETS))
    agreements = trace.select("all_gather", operation=function.__name__, purpose=Purpose.AGREEMENT)
    assert [event.over for event in agreements] == ["model", "data"]


@pytest.mark.parametrize(
    ("logits", "targets", "placed"),
    [(Shard(0), R, Shard(0)), (R, Shard(0), Shard(0)), (Shard(0), Shard(0), Shard(0)), (R, R, R)],
    ids=str,
)
def test_cross_entropy_rows_follow_the_sharded_operand(line, logits, targets, placed):
    x = at(line, LOGITS, logits, requires_grad=True)
    t = at(line, TARGETS, targets)
    check(
        traced(pce.cross_entropy, x, t, reduction="none"),
        dense.softmax_cross_entropy(LOGITS, TARGETS, reduction="none"),
        placed,
        sent=[],
    )
    loss, trace = traced(pce.cross_entropy, x, t)
    expected, gradient = dense.softmax_cross_entropy_value_and_grad(LOGITS, TARGETS)
    check(loss, expected, R)
    assert [event.bytes for event in trace.select()] == [64] * (placed == Shard(0))
    trace = backward(loss)
    check((x.grad, trace), gradient, SUM if logits != placed else logits, silent=True)


def test_cross_entropy_keeps_split_points_of_logits(line):
    x, t = at(line, LOGITS, Shard(0), splits=[1]), at(line, TARGETS, Shard(0), splits=[2])
    result = pce.cross_entropy(x, t, reduction="none")
    check(result, dense.softmax_cross_entropy(LOGITS, TARGETS, reduction="none"), Shard(0))
    assert result.sharding.splits == x.sharding.splits[:1]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("axis", [1, 0])
def test_cross_entropy_over_sharded_classes_is_whole(line, axis, reduction):
    logits = LOGITS if axis == 1 else LOGITS.T
    for splits in (None, [1]):
        x = at(line, logits, Shard(axis), requires_grad=True, splits=splits)
        loss, trace = traced(pce.cross_entropy, x, TARGETS, axis=axis, reduction=reduction)
        expected, gradient = dense.softmax_cross_entropy_value_and_grad(logits, TARGETS, axis=axis, reduction=reduction)
        check(loss, expected, R)  # never Partial
        assert [(event.over, event.collective) for event in trace.select()] == [("data", "all_reduce")]
        _, trace = traced(loss.sum().backward)
        assert x.grad.sharding == x.sharding
        check((x.grad, trace), gradient, Shard(axis), silent=True)


def test_cross_entropy_mean_takes_one_more_all_reduce(comm):
    weight = np.array([1.0, 2.0, 0.5, 3.0, 1.5])
    options = {"weight": weight, "label_smoothing": 0.1, "z_loss": 0.01}
    for mesh in grids(comm):
        x = at(mesh, LOGITS, Shard(0), Shard(1), requires_grad=True)
        loss, trace = traced(pce.cross_entropy, x, TARGETS, **options)
        expected, gradient = dense.softmax_cross_entropy_value_and_grad(LOGITS, TARGETS, **options)
        check(loss, expected, R, R)
        assert [(event.over, event.collective) for event in trace.select()] == [
            ("model", "all_reduce"),
            ("data", "all_reduce"),
        ]
        assert trace.bytes(over="data") == 64
        trace = backward(loss)
        check((x.grad, trace), gradient, Shard(0), Shard(1), silent=True)


def test_cross_entropy_per_row_is_sharded_like_rows(comm):
    for mesh in grids(comm):
        x = at(mesh, LOGITS, Shard(0), Shard(1), requires_grad=True)
        loss, trace = traced(pce.cross_entropy, x, TARGETS, reduction="none")
        check(loss, dense.softmax_cross_entropy(LOGITS, TARGETS, reduction="none"), Shard(0), R)
        assert [event.over for event in trace.select()] == ["model"]


def test_cross_entropy_classes_may_take_two_dims(comm):
    logits = numbers(2, 5, 3) / 2
    targets = np.array([[0, 4, 2], [1, 1, -100]])
    expected, gradient = dense.softmax_cross_entropy_value_and_grad(logits, targets, axis=1)
    for mesh in grids(comm):
        for placed in [(Shard(1), Shard(1)), (Shard(0), Shard(2)), (Shard(2), Shard(1)), (Shard(0), Shard(0))]:
            x = at(mesh, logits, *placed, requires_grad=True)
            loss, trace = traced(pce.cross_entropy, x, targets, axis=1)
            check(loss, expected, R, R)
            assert trace.count() == ((Shard(1) in placed) + (set(placed) != {Shard(1)}))
            trace = backward(loss)
            check((x.grad, trace), gradient, *placed, silent=True)


# ----------------------------------------------------------------------------------------------------------- embedding

TABLE = numbers(11, 3)
IDS = np.array([[0, 10, 3], [3, 7, 3], [5, 1, 9], [10, 10, 0]])


def test_embedding_of_row_sharded_table_is_partial(line):
    for splits in (None, [1]):
        table = at(line, TABLE, Shard(0), requires_grad=True, splits=splits)
        result = check(traced(pce.embedding, IDS, table), TABLE[IDS], SUM, sent=[])
        weights = numbers(4, 3, 3, seed=1)
        _, trace = traced((result * weights).sum().backward)
        expected = np.zeros_like(TABLE)
        np.add.at(expected, IDS, weights)
        assert table.grad.sharding == table.sharding
        check((table.grad, trace), expected, Shard(0), silent=True)


def test_table_that_is_sharded_by_columns_gives_columns(line):
    check(traced(pce.embedding, IDS, at(line, TABLE, Shard(1))), TABLE[IDS], Shard(2), sent=[])


def test_sharded_ids_give_whole_table_partial_gradient(line):
    table = at(line, TABLE, R, requires_grad=True)
    result = check(traced(pce.embedding, at(line, IDS, Shard(1)), table), TABLE[IDS], Shard(1), sent=[])
    _, trace = traced(result.sum().backward)
    check((table.grad, trace), np.repeat(np.bincount(IDS.ravel(), minlength=11)[:, None], 3, axis=1), SUM, silent=True)


def test_embedding_gathers_ids_over_dim_of_table(line):
    for placement in (Shard(0), Shard(1)):
        np.testing.assert_array_equal(
            whole_of(pce.embedding(at(line, IDS, placement), at(line, TABLE, Shard(0)))), TABLE[IDS]
        )
    found = inferred("embedding", ((4, 3), Shard(0)), ((50_000, 64), Shard(0)), dtypes=(np.int64, np.float32))
    assert found == [R, Shard(0), SUM]


def test_embedding_over_different_dims_of_ids_and_table(comm):
    for mesh in grids(comm):
        table = at(mesh, TABLE, R, Shard(0), requires_grad=True)
        result = check(traced(pce.embedding, at(mesh, IDS, Shard(0), R), table), TABLE[IDS], Shard(0), SUM, sent=[])
        _, trace = traced(result.sum().backward)
        check(
            (table.grad, trace),
            np.repeat(np.bincount(IDS.ravel(), minlength=11)[:, None], 3, axis=1),
            SUM,
            Shard(0),
            silent=True,
        )


@pytest.mark.parametrize("placed", [R, Shard(0), SUM], ids=str)
def test_id_outside_table_raises_everywhere_whoever_has_it(line, placed):
    for wrong in (11, -1, 10**12, -11):
        bad = IDS.copy()
        bad[-1, -1] = wrong  # sharded, it is only the last rank with any ids that sees it
        ids = at(line, bad, placed)
        for placement in (R, Shard(0), Shard(1), SUM):
            table = at(line, TABLE, placement)
            with pytest.raises(IndexError, match=rf"id {wrong} is outside \[0, 11\)") as raised:
                pce.embedding(ids, table)
            texts = line.comm("data").allgather(str(raised.value))
            assert len(set(texts)) == 1
    np.testing.assert_array_equal(whole_of(pce.embedding(IDS, table)), TABLE[IDS])


def test_partial_ids_are_summed_before_their_check(line):
    check(pce.embedding(at(line, np.array([3, 5]), SUM, seed=2) * 1, at(line, TABLE, R)), TABLE[[3, 5]], R)


def test_ids_are_whole_numbers(line):
    for ids in (np.array([0.0]), at(line, np.array([1.0]), R), np.array([True])):
        with pytest.raises(TypeError, match="ids must be integers, got"):
            pce.embedding(ids, at(line, TABLE, R))
    with pytest.raises(ValueError, match="table has two axes, got shape"):
        pce.embedding(IDS, at(line, TABLE[0], R))


# --------------------------------------------------------------------------------------------------- shapes are global


def test_shard_of_one_row_does_not_broadcast(line):
    # Each rank has one row of x, which would fit any number of rows of y.
    n = line.size + 1
    splits = (*range(n - 1), n)
    x = DistArray(
        numbers(n, 2)[splits[line.rank] : splits[line.rank + 1]],
        line,
        Sharding.of(line.dim_sizes, (n, 2), {"data": Shard(0)}, {0: splits}),
    )
    y = at(line, numbers(5 * n, 2), Shard(0))
    for function in (pce.add, pce.multiply, pce.maximum):
        with pytest.raises(ValueError, match="broadcast"):
            function(x, y)
    with pytest.raises(ValueError, match="differ"):
        pce.matmul(numbers(3, 1), x)
    check(x + numbers(n, 2, seed=1), numbers(n, 2) + numbers(n, 2, seed=1), Shard(0))


def test_minus_one_in_reshape_counts_all_elements(line):
    a = numbers(4, 3)
    for placement in (Shard(0), Shard(1), R, SUM):
        got = pce.reshape(at(line, a, placement), -1)
        assert got.shape == (12,)
        np.testing.assert_array_equal(whole_of(got), a.reshape(-1))
        assert at(line, a, placement).reshape(2, -1).shape == (2, 6)


@pytest.mark.parametrize("other", [R, Shard(0), Shard(1), SUM], ids=str)
def test_axis_of_length_one_is_replicated_before_broadcasting(line, other):
    # With so many rows it is x that moves, at any number of ranks.
    a, b = numbers(1, 3), numbers(4 * line.size, 3, seed=1)
    x = at(line, a, Shard(0), requires_grad=True)  # only one rank has it
    result, trace = traced(lambda: x * at(line, b, other))
    np.testing.assert_array_equal(whole_of(result), a * b)
    moved = [event for event in trace.select() if event.before == "Shard(0)"]
    result.sum().backward()
    check(x.grad, b.sum(axis=0, keepdims=True), *placements(x.grad))
    np.testing.assert_array_equal(whole_of(pce.broadcast_to(x, (4, 3))), np.broadcast_to(a, (4, 3)))
    assert len(moved) == 1


def test_stack_of_one_matrix_is_replicated_before_broadcasting(line):
    a, b = numbers(1, 2, 3), numbers(4, 3, 2, seed=1)
    result = at(line, a, Shard(0)) @ at(line, b, Shard(0))
    check(result, a @ b, Shard(0))


# For each: shape, placement, new shape, new placement. Nothing is sent.
KEPT = {
    "leads a merged group": ((4, 6), Shard(0), (24,), Shard(0)),
    "leads a merged group of three": ((4, 2, 3), Shard(0), (24,), Shard(0)),
    "leads a part of the axes": ((2, 3, 4), Shard(0), (6, 4), Shard(0)),
    "stands alone behind": ((2, 3, 4), Shard(2), (6, 4), Shard(1)),
    "stands alone in front": ((4, 2, 3), Shard(0), (4, 6), Shard(0)),
    "another axis comes": ((3, 4), Shard(1), (3, 1, 4), Shard(2)),
    "another axis goes": ((1, 3, 1, 4), Shard(3), (3, 4), Shard(1)),
    "stays what it was": ((3, 4), Shard(1), (3, 4), Shard(1)),
}


def test_reshape_keeps_leading_and_separate_shards(line):
    for name, (before, placed, after, then) in KEPT.items():
        a, weights = numbers(*before), numbers(*after, seed=1)
        for splits in (None, [1]):
            x = at(line, a, placed, requires_grad=True, splits=splits)
            result = check(traced(pce.reshape, x, after), a.reshape(after), then, name=name, silent=True)
            _, trace = traced((result * weights).sum().backward)
            assert x.grad.sharding == x.sharding, name
            check((x.grad, trace), weights.reshape(before), placed, name=name, silent=True)


def test_reshape_keeps_shard_split_between_rows(line):
    rows = 2 * line.size
    a = numbers(3 * rows)
    for ends in (
        range(0, rows + 1, 2),
        [0, *[1] * (line.size - 1), rows],
        [0, *range(rows - line.size + 1, rows), rows],
    ):
        splits = tuple(3 * end for end in ends)
        local = a[splits[line.rank] : splits[line.rank + 1]]
        x = DistArray(local, line, Sharding.of(line.dim_sizes, a.shape, {"data": Shard(0)}, {0: splits}))
        result, trace = traced(pce.reshape, x, (rows, 3))
        check(result, a.reshape(rows, 3), Shard(0))
        assert result.sharding.splits[0] == tuple(ends)
        assert trace.count(purpose=None) == 0


def test_reshape_redistributes_where_split_point_is_within_row(line):
    rows = 2 * line.size
    a = numbers(3 * rows)
    splits = (0, *range(1, line.size), 3 * rows)
    x = DistArray(
        a[splits[line.rank] : splits[line.rank + 1]],
        line,
        Sharding.of(line.dim_sizes, a.shape, {"data": Shard(0)}, {0: splits}),
    )
    result, trace = traced(pce.reshape, x, (rows, 3))
    check(result, a.reshape(rows, 3), Shard(0))
    assert collectives(trace) == ["all_to_all"] * (line.size > 1)
    assert all(event.reason and event.operation == "reshape" for event in trace.events)


def test_reshape_redistributes_shard_behind_in_merged_group(line):
    a = numbers(4, 6)
    for after in [(24,), (2, 12), (8, 3), (6, 4)]:
        x = at(line, a, Shard(1), requires_grad=True)
        result, trace = traced(pce.reshape, x, after)
        np.testing.assert_array_equal(whole_of(result), a.reshape(after))
        assert trace.count(operation="reshape") == trace.count() == 1
        weights = numbers(*after, seed=1)
        (result * weights).sum().backward()
        check(x.grad, weights.reshape(4, 6), Shard(1), name=str(after))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), R, SUM, AVG, MAX], ids=str)
def test_concatenate_and_split_along_sharded_axes(line, placement):
    a, b = numbers(4, 3), numbers(2, 3, seed=1)
    for splits in (None, [1]):
        x, y = (at(line, whole, placement, splits=splits) for whole in (a, b))
        joined, trace = traced(pce.concatenate, [x, y])
        np.testing.assert_array_equal(whole_of(joined), np.concatenate([a, b]))
        assert (trace.count() == 0) == (placement != Shard(0))
        if placement != Shard(0):
            assert placements(joined) == (placement,)
        parts, trace = traced(pce.split, x, [1, 3])
        for part, expected in zip(parts, np.split(a, [1, 3]), strict=True):
            np.testing.assert_array_equal(whole_of(part), expected)
        assert (trace.count() == 0) == (placement != Shard(0))
        if placement != Shard(0):
            assert {placements(part) for part in parts} == {(placement,)}


# ------------------------------------------------------------------------------------------------- which operand moves

FOUR = {"model": 4}


def inferred(name: str, *operands: tuple[tuple[int, ...], Any], mesh: Any = FOUR, **options: Any) -> Any:
    """(placements that the operands need, placement of the result) over one dim."""
    shapes, placed = zip(*operands, strict=True)
    dims = list(mesh)
    named = [dict(zip(dims, each if isinstance(each, tuple) else (each,), strict=True)) for each in placed]
    found = infer_placements(name, shapes, named, mesh=mesh, **options)
    one = len(dims) == 1
    return [
        *(next(iter(each.values())) if one else tuple(each.values()) for each in found.operands),
        next(iter(found.result.values())) if one else tuple(found.result.values()),
    ]


def test_operands_that_may_stay_do():
    # Even where the Partial result will cost more than gathering a row and a column.
    assert inferred("matmul", ((1000, 4), Shard(1)), ((4, 1000), Shard(0))) == [Shard(1), Shard(0), SUM]
    assert inferred("matmul", ((1000, 4), SUM), ((4, 1000), R)) == [SUM, R, SUM]
    assert inferred("matmul", ((9, 4), R), ((4, 9), R)) == [R, R, R]
    assert inferred("add", ((9, 4), R), ((9, 4), R)) == [R, R, R]


def test_whole_operand_is_sliced_beside_a_shard():
    for name in ("add", "multiply", "maximum"):
        assert inferred(name, ((9, 4), R), ((9, 4), Shard(1))) == [Shard(1), Shard(1), Shard(1)]
    assert inferred("matmul", ((2, 500), R), ((500, 40), Shard(0))) == [Shard(1), Shard(0), SUM]
    assert inferred("matmul", ((2, 500), R), ((500, 40), Shard(1))) == [R, Shard(1), Shard(1)]


def test_operand_with_fewer_bytes_moves():
    # (100, 4) stays, (4,) is gathered.
    assert inferred("add", ((100, 4), Shard(0)), ((4,), Shard(0))) == [Shard(0), R, Shard(0)]
    assert inferred("add", ((4,), Shard(0)), ((100, 4), Shard(0))) == [R, Shard(0), Shard(0)]
    assert inferred("matmul", ((100, 8), Shard(0)), ((8, 8), Shard(1))) == [Shard(0), R, Shard(0)]
    assert inferred("matmul", ((8, 8), Shard(0)), ((8, 100), Shard(1))) == [R, Shard(1), Shard(1)]
    # Bytes, not elements: 8 * n/16 * 3 for the first against 4 * n/16 * 3 for the second.
    same = ((8, 8), Shard(0)), ((8, 8), Shard(1))
    assert inferred("add", *same, dtypes=(np.float64, np.float32))[-1] == Shard(0)
    assert inferred("add", *same, dtypes=(np.float32, np.float64))[-1] == Shard(1)


def test_exchange_is_cheaper_than_gather():
    # Gathering w: 3/4 * 784 * 10 * 4 = 23520 bytes. Exchanging x: 3/16 * 16 * 784 * 4 = 9408 bytes, and 960 for the
    # all_reduce of the result, 2 * 3/4 * 16 * 10 * 4.
    assert inferred("matmul", ((16, 784), Shard(0)), ((784, 10), Shard(0))) == [Shard(1), Shard(0), SUM]


def test_plan_counts_all_reduce_of_partial_result():
    # Gathering w: 3/4 * 800 * 4 = 2400. Exchanging x: 600, and 60000 for the result.
    assert inferred("matmul", ((100, 8), Shard(0)), ((8, 100), Shard(0))) == [Shard(0), R, Shard(0)]


def test_plan_of_equal_bytes_takes_fewer_collectives():
    # Exchanging the condition: 3/16 * n * 8 bytes at once; the others: 3/16 * n * 4 bytes each.
    shapes = ((8, 8), Shard(0)), ((8, 8), Shard(1)), ((8, 8), Shard(1))
    assert inferred("where", *shapes, dtypes=(np.float64, np.float32, np.float32))[-1] == Shard(1)
    for name in ("add", "multiply", "maximum"):
        assert inferred(name, ((8, 8), Shard(0)), ((8, 8), Shard(1))) == [Shard(0)] * 3
        assert inferred(name, ((8, 8), Shard(1)), ((8, 8), Shard(0))) == [Shard(1)] * 3
    assert inferred("matmul", ((8, 8), Shard(0)), ((8, 8), Shard(1)))[0] == Shard(0)


def test_partial_operand_becomes_whole_unless_another_is_sharded():
    for name in ("maximum", "multiply", "add", "divide"):
        assert inferred(name, ((8, 4), MAX), ((8, 4), R)) == [R, R, R]
        assert inferred(name, ((8, 4), SUM), ((8, 4), Shard(1))) == [Shard(1), Shard(1), Shard(1)]
        assert inferred(name, ((8, 4), Shard(0)), ((8, 4), SUM)) == [Shard(0), Shard(0), Shard(0)]
    assert inferred("maximum", ((8, 4), SUM), ((8, 4), R)) == [R, R, R]
    found = infer_placements("add", [(8, 4), (8, 4)], [{"model": SUM}, {"model": Shard(1)}], mesh=FOUR)
    assert [sent.collective for sent in found.collectives] == ["reduce_scatter"]


def test_dims_are_decided_together():
    mesh = {"data": 2, "model": 4}
    assert inferred("matmul", ((8, 6), (Shard(0), Shard(1))), ((6, 4), (R, Shard(0))), mesh=mesh) == [
        (Shard(0), Shard(1)),
        (R, Shard(0)),
        (Shard(0), SUM),
    ]
    assert inferred("matmul", ((8, 6), (Shard(0), R)), ((6, 4), (R, Shard(1))), mesh=mesh)[-1] == (Shard(0), Shard(1))
    assert inferred("multiply", ((8, 6), (SUM, R)), ((8, 6), (R, SUM)), mesh=mesh)[-1] == (SUM, SUM)


def test_split_points_of_one_operand_are_kept(line):
    a, b = numbers(9, 2), numbers(9, 2, seed=1)
    x, y = at(line, a, Shard(0), splits=[1]), at(line, b, Shard(0), splits=[2])
    result, trace = traced(pce.add, x, y)
    check(result, a + b, Shard(0))
    assert result.sharding.splits in (x.sharding.splits, y.sharding.splits)
    assert collectives(trace) == ["all_to_all"] * (x.sharding != y.sharding)


# --------------------------------------------------------------------------- gradients: what was summed away is Partial


def backward(loss: DistArray) -> pce.Trace:
    _, trace = traced(loss.backward)
    return trace


def test_weight_of_sharded_batch_has_partial_gradient(line):
    x, w = at(line, numbers(7, 4), Shard(0)), at(line, numbers(4, 3), R, requires_grad=True)
    trace = backward((x @ w).sum())
    check((w.grad, trace), numbers(7, 4).T @ np.ones((7, 3)), SUM, silent=True)


def test_bias_gradient_is_partial_over_batch_and_sequence(comm):
    a = numbers(4, 6, 3)
    for mesh in grids(comm):
        bias = at(mesh, numbers(3), R, R, requires_grad=True)
        trace = backward(pce.square(at(mesh, a, Shard(0), Shard(1)) + bias).sum())
        check((bias.grad, trace), 2 * (a + numbers(3)).sum((0, 1)), SUM, SUM, silent=True)


def test_layer_norm_gradients_are_partial_over_both_dims(comm):
    a = numbers(4, 6, 5)
    weights = numbers(4, 6, 5, seed=1)
    normed = op_cases.layer_norm(a)
    for mesh in grids(comm):
        scale, bias = (at(mesh, numbers(5, seed=seed), R, R, requires_grad=True) for seed in (2, 3))
        x = at(mesh, a, Shard(0), Shard(1))
        result = pce.layer_norm(x, scale, bias)
        check(result, normed * numbers(5, seed=2) + numbers(5, seed=3), Shard(0), Shard(1))
        trace = backward((result * weights).sum())
        check(scale.grad, (weights * normed).sum((0, 1)), SUM, SUM)
        check((bias.grad, trace), weights.sum((0, 1)), SUM, SUM, silent=True)


def test_tensor_parallel_weight_has_gradient_of_its_shard(comm):
    a, b = numbers(7, 4), numbers(4, 5, seed=1)
    for mesh in grids(comm):
        for placed in (Shard(1), Shard(0)):
            w = at(mesh, b, R, placed, requires_grad=True)
            trace = backward(pce.square(at(mesh, a, Shard(0), Shard(1) if placed == Shard(0) else R) @ w).sum())
            check(w.grad, 2 * a.T @ (a @ b), SUM, placed)
            assert w.grad.sharding.splits == w.sharding.splits
            assert trace.count(purpose=None) == 0


def test_input_broadcast_over_shards_has_partial_gradient(line):
    for shape in [(), (3,), (1, 3), (1, 1), (7, 1)]:
        x = at(line, numbers(*shape), R, requires_grad=True)
        trace = backward((x * at(line, numbers(7, 3), Shard(0))).sum())
        expected = numbers(7, 3)
        if shape:
            axes = tuple(axis for axis in range(2) if axis < 2 - len(shape) or shape[axis - 2 + len(shape)] == 1)
            expected = expected.sum(axes, keepdims=True).reshape(shape)
        check((x.grad, trace), expected if shape else expected.sum(), SUM, silent=True)


def test_factor_of_something_partial_has_partial_gradient(line):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    x, p = at(line, a, R, requires_grad=True), at(line, b, SUM, requires_grad=True)
    trace = backward((x * p).sum())
    check(x.grad, b, SUM)
    check((p.grad, trace), a, R, silent=True)


def test_context_parallelism_gathers_keys_and_values(line):
    # Attention: queries stay sharded along the sequence, keys and values are gathered, their gradients scattered back.
    x = numbers(6, 4) / 4

    def attention(x: Any, w: Any) -> Any:
        keys, values = (x @ w).T.redistribute(data=R), pce.tanh(x @ w).redistribute(data=R)
        return pce.square(pce.softmax(x @ keys) @ values).sum()

    w, reference = (at(line, numbers(4, 4, seed=1) / 4, R, requires_grad=True) for _ in range(2))
    backward(attention(at(line, x, R), reference))
    loss, forward = traced(attention, at(line, x, Shard(0)), w)
    trace = backward(loss)
    check(w.grad, reference.grad.local, SUM)
    assert collectives(forward) == ["all_gather"] * 2
    assert collectives(trace) == ["reduce_scatter"] * 2


# ---------------------------------------------------------------------------------- gradients: where they start and end


@pytest.mark.parametrize("kind", [R, SUM, AVG, MAX, MIN], ids=str)
def test_loss_at_any_placement_is_one_global_loss(line, kind):
    a = numbers(3, 2)
    weights = numbers(3, 2, seed=1)
    # The loss is placed as x is: no operation here needs all of it.
    x = at(line, a, kind, requires_grad=True)
    loss = x[1, 1]
    assert placements(loss) == (kind,)
    backward(loss)
    expected = np.zeros_like(a)
    expected[1, 1] = 1
    check(x.grad, expected, R)
    # A loss that is a function of what it is altogether, and not of its terms.
    y = at(line, a, kind, requires_grad=True)
    backward((pce.square(y) * weights).sum())
    check(y.grad, 2 * a * weights, R)


@pytest.mark.parametrize("kind", [AVG, MAX, MIN], ids=str)
def test_gradients_of_what_is_partial_accumulate_without_communication(line, kind):
    a, b = numbers(3), numbers(4, 3, seed=1)
    x = at(line, a, kind, requires_grad=True)
    sent = []
    for _ in range(2):
        backward((x * 2.0).sum())
        loss = (x * at(line, b, Shard(0))).sum()
        sent.append(backward(loss).count(purpose=None))
    check(x.grad, 2 * (2 + b.sum(0)), SUM)
    assert sent == [0, 0]


def test_loss_summed_over_shards_seeds_one_everywhere(line):
    x = at(line, numbers(7), Shard(0), requires_grad=True)
    loss = x.sum()
    assert placements(loss) == (SUM,)
    backward(loss)
    check(x.grad, np.ones(7), Shard(0))


def test_gradient_of_whole_parameter_is_never_sharded(comm):
    a, b = numbers(4, 6), numbers(4, 6, seed=1)
    for mesh in grids(comm):
        for placed, expected in [
            ((Shard(0), R), (SUM, R)),
            ((R, Shard(1)), (R, SUM)),
            ((Shard(0), Shard(1)), (SUM, SUM)),
            ((Shard(1), Shard(1)), (SUM, SUM)),
        ]:
            w = at(mesh, a, R, R, requires_grad=True)
            trace = backward((w * at(mesh, b, *placed)).sum())
            check((w.grad, trace), b, *expected, silent=True)


def test_micro_batches_send_nothing(comm):
    data = [numbers(5, 4, seed=seed) for seed in range(3)]
    for mesh in grids(comm):
        w = at(mesh, numbers(4, 3), R, Shard(1), requires_grad=True)
        bias = at(mesh, numbers(3), R, Shard(0), requires_grad=True)
        mask = at(mesh, numbers(5, 4), R, R, requires_grad=True)
        sent = 0
        for each in data:
            loss = ((at(mesh, each, Shard(0), R) * mask) @ w + bias).sum()
            sent += backward(loss).count(over="data", purpose=None)
        check(w.grad, sum((each * numbers(5, 4)).T @ np.ones((5, 3)) for each in data), SUM, Shard(1))
        check(bias.grad, np.full(3, 15.0), SUM, Shard(0))
        check(mask.grad, sum(each for each in data) * numbers(4, 3).sum(1), SUM, *placements(mask.grad)[1:])
        assert sent == 0


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


def test_gradient_of_sharded_parameter_has_its_split_points(line):
    a, b = numbers(7, 3), numbers(7, 3, seed=1)
    for splits in (None, [1], [2]):
        for other in (R, Shard(0), Shard(1), SUM):
            w = at(line, a, Shard(0), requires_grad=True, splits=splits)
            backward((w * at(line, b, other)).sum())
            check(w.grad, b, Shard(0))
            assert w.grad.sharding == w.sharding


# ---------------------------------------------------------------------- gradients: intermediate values are settled once


def test_value_of_three_consumers_takes_one_all_reduce(line):
    a, b = numbers(5, 4), numbers(4, 6, seed=1)
    w = at(line, b, Shard(1))
    x = at(line, a, R, requires_grad=True)
    h = pce.square(x)
    loss = (h @ w).sum() + (h @ (2.0 * w)).sum() + pce.square(h @ w).sum()
    trace = backward(loss)
    g = 3 * np.ones((5, 6)) @ b.T + 2 * a**2 @ b @ b.T
    check((x.grad, trace), 2 * a * g, R, sent=["all_reduce"])
    assert trace.bytes() == 5 * 4 * 8
    assert trace.select()[0].reason == "its gradient is complete"
    assert trace.select()[0].operation == "square"


def test_consumers_of_every_kind_are_joined_first(line):
    a, b, c = numbers(5, 4), numbers(4, 6, seed=1), numbers(5, 4, seed=2)
    w, s, p = at(line, b, Shard(1)), at(line, c, Shard(0)), at(line, c, AVG)
    consumers: dict[str, tuple[Formula, Array]] = {
        "P": (lambda h: h @ w, np.ones((5, 6)) @ b.T),
        "S": (lambda h: h * s, c),
        "R": (lambda h: h * c, c),
        "A": (lambda h: h * p, c),
    }
    for order in ("SPP", "PSP", "PPS", "RPS", "SSP", "PRS", "SPR", "PA", "AP", "SAP"):
        x = at(line, a, R, requires_grad=True)
        h = pce.square(x)
        loss: Any = 0.0
        for name in order:
            loss = loss + consumers[name][0](h).sum()
        trace = backward(loss)
        check(x.grad, 2 * a * sum(consumers[name][1] for name in order), R, name=order)
        assert collectives(trace) == ["all_reduce"], order


def test_consumers_over_two_dims_add_up(comm):
    a, c = numbers(5, 4), numbers(5, 4, seed=2)
    placed = [(Shard(0), Shard(0)), (SUM, Shard(0)), (Shard(1), R), (R, AVG), (Shard(0), Shard(1)), (SUM, SUM)]
    for mesh in grids(comm):
        for natural in [(R, R), (Shard(0), R), (Shard(0), Shard(0)), (R, Shard(1))]:
            x = at(mesh, a, *natural, requires_grad=True)
            h = pce.square(x)
            loss: Any = 0.0
            for number, each in enumerate(placed):
                loss = loss + (h * at(mesh, c, *each) * float(number + 1)).sum()
            backward(loss)
            got = whole_of(x.grad)
            np.testing.assert_array_equal(got, 2 * a * c * sum(range(1, len(placed) + 1)))
            assert x.grad.sharding == x.sharding


def test_gradients_stay_partial_at_leaves_only(line):
    a, b = numbers(5, 4), numbers(4, 6, seed=1)
    x = at(line, a, R, requires_grad=True)
    w = at(line, b, Shard(1))
    direct = backward((x @ w).sum())
    check(x.grad, np.ones((5, 6)) @ b.T, SUM)
    assert direct.count(purpose=None) == 0
    x.grad = None
    through = backward(((x * 1.0) @ w).sum())
    check(x.grad, np.ones((5, 6)) @ b.T, R)
    assert collectives(through) == ["all_reduce"]


def test_moved_elements_relay_partial_gradients(line):
    a, b = numbers(4, 6), numbers(5, 4, seed=1)
    x = at(line, b, Shard(0))
    g = b.T @ np.ones((5, 6))
    # Functions that make the stored parameter, and those that use it.
    uses: dict[str, tuple[Formula, Formula]] = {
        "transpose": (lambda w: w.T, lambda w: w.T),
        "reshape": (lambda w: w.reshape(2, 12), lambda w: w.reshape(4, 6)),
        "dtype": (lambda w: w, lambda w: w.astype(np.float32)),
        "all of them": (lambda w: w.T.reshape(24), lambda w: w.reshape(6, 4).astype(np.float32).T),
    }
    for name, (stored, used) in uses.items():
        w = at(line, stored(a), R, requires_grad=True)
        losses = [(x @ used(w)).sum() for _ in range(2)]
        sent = sum(backward(loss).count(purpose=None) for loss in losses)
        check(w.grad, 2 * stored(g), SUM, name=name)
        assert sent == 0, name


def test_value_and_its_transpose_are_brought_home_together(line):
    a, b = numbers(4, 4), numbers(4, 6, seed=1)
    w = at(line, b, Shard(1))
    x = at(line, a, R, requires_grad=True)
    h = pce.square(x)
    trace = backward((h @ w).sum() + (h.T @ w).sum() + (h.reshape(2, 8) * 3.0).sum())
    g = np.ones((4, 6)) @ b.T
    check((x.grad, trace), 2 * a * (g + g.T + 3), R, sent=["all_reduce"])


# ------------------------------------------------------------------------------------------------------- redistribution


def test_redistribution_that_moves_nothing_is_still_node(line):
    a, b = numbers(5, 4), numbers(4, 6, seed=1)
    x = at(line, a, R, requires_grad=True)
    there, trace = traced(x.redistribute, data=R)
    assert trace.count(purpose=None) == 0
    assert there is not x
    assert not there.is_leaf
    trace = backward((there @ at(line, b, Shard(1))).sum())
    check(x.grad, np.ones((5, 6)) @ b.T, R)  # without it, Partial
    assert collectives(trace, operation="redistribute") == ["all_reduce"]


@pytest.mark.parametrize("source", [Shard(0), Shard(1), R, SUM, AVG, MAX], ids=str)
def test_redistribution_gradient_has_natural_placement_of_operand(line, source):
    a, weights = numbers(5, 4), numbers(5, 4, seed=1)
    for target in (Shard(0), Shard(1), R, SUM, AVG, MIN):
        x = at(line, a, source, requires_grad=True, splits=[1])
        y = x.redistribute(data=target)
        check(y, a, target, name=str(target))
        backward((pce.square(y) * weights).sum())
        check(x.grad, 2 * a * weights, source if isinstance(source, Shard) else R, name=str(target))
        if isinstance(source, Shard):
            assert x.grad.sharding == x.sharding


def test_sequence_parallelism_gathers_forward_and_scatters_backward(line):
    x = at(line, numbers(6, 4), Shard(0), requires_grad=True)
    w = at(line, numbers(4, 5, seed=1), Shard(1), requires_grad=True)
    loss, forward = traced(lambda: (x.redistribute(data=R) @ w).sum())
    trace = backward(loss)
    check(x.grad, np.ones((6, 5)) @ numbers(4, 5, seed=1).T, Shard(0))
    assert collectives(forward) == ["all_gather"]
    assert collectives(trace) == ["reduce_scatter"]  # and no all_reduce with a slice


# -------------------------------------------------------------------------------------------------- what is not sharded


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


def test_numbers_take_dtype_of_arrays_that_they_meet(line):
    x = at(line, numbers(3).astype(np.float32), Shard(0))
    assert [(x * each).dtype for each in (2, 2.5, True)] == [np.float32] * 3
    assert (x * np.float64(2.5)).dtype == np.float64
    assert (at(line, np.arange(3), R) * 2.5).dtype == np.float64
    assert (at(line, np.arange(3), R) / 2).dtype == np.float64


def test_operands_of_two_meshes_are_refused(comm):
    one, other = pce.Mesh(comm, data=comm.size), mesh_of(comm, comm.size)
    x, y = at(one, numbers(3), R), at(other, numbers(3), R)
    for function in (pce.add, pce.multiply, lambda x, y: pce.concatenate([x, y]), lambda x, y: np.hypot(x, y)):
        with pytest.raises(ValueError, match="takes operands of one mesh, got Mesh"):
            function(x, y)
    check(x + 0.0, numbers(3), R)


def test_operation_without_distributed_array_is_refused():
    a = numbers(3, 3)
    for call in (
        lambda: pce.add(a, a),
        lambda: pce.exp(a),
        lambda: pce.exp(1.0),
        lambda: pce.matmul(a, a),
        lambda: pce.embedding(np.array([0]), a),
        lambda: pce.concatenate([a, a]),
        lambda: pce.where(a > 0, a, 0.0),
        lambda: pce.op(np.exp)(a),
    ):
        with pytest.raises(TypeError, match="takes at least one DistArray"):
            call()


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
            self: Channel, request: Any, operation: str, *arguments: Any, wait: Any = wait, seen: Any = waited
        ):
            seen.append(operation)
            return wait(self, request, operation, *arguments)

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


def test_computed_array_keeps_its_redistribution(line):
    a = numbers(5, 4)
    p = at(line, a, SUM) * 1.0
    (one, other), trace = traced(lambda: (pce.square(p), pce.sqrt(p)))
    check(one, a * a, R)
    check(other, np.sqrt(a), R)
    assert collectives(trace) == ["all_reduce"]


def test_made_array_is_redistributed_anew_after_writing(line):
    a = numbers(5, 4)
    x = at(line, a, SUM)
    first = pce.square(x)
    x.local[...] *= 2
    second, trace = traced(pce.square, x)
    check(first, a * a, R)
    check(second, 4 * a * a, R)
    assert collectives(trace) == ["all_reduce"]
