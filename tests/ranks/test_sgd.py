"""A step is that of one process, gradients come together in as few collectives as can be, and ranks stay equal."""

from itertools import product
import math
import re

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import SGD, CollectiveError, Shard, clip_grad_norm
from pce_mpi.comm.errors import ranks_text
from pce_mpi.comm.tracing import Purpose
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.sharding import Sharding
from ranks.grids import assembled, local_of, mesh_of, spread, squarest
from ranks.placed import AVG, MAX, MIN, SUM, R, traced, whole_of

OPTIONS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "all": {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)

SHAPES = [(5, 3), (7,), (), (1, 4), (0, 3), (2, 3, 4), (40, 1700), (3, 70_001)]


def meshes(comm):
    """A mesh of one dim, and one of two dims, the longer one first or last."""
    both = squarest(comm.size)
    return [mesh_of(comm, *sizes) for sizes in dict.fromkeys([(comm.size,), both, both[::-1]])]


def wholes(shape, steps, seed, dtype=np.float32):
    """A parameter and its gradients of some steps; whole numbers, of which sums are exact, as the test needs bits."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(-9, 10, (1 + steps, *shape)).astype(dtype)


def held(whole, mesh, sharding, requires_grad=False, seed=0):
    """The distributed array that is `whole`, placed as `sharding` says."""
    return DistArray(local_of(whole, sharding, mesh.coordinates, seed), mesh, sharding, requires_grad=requires_grad)


def parameter(whole, mesh, **placements):
    return pce.distribute(whole, mesh, requires_grad=True, **placements)


def gradient(whole, mesh, seed=0, **placements):
    return held(whole, mesh, Sharding.of(mesh.dim_sizes, whole.shape, placements), seed=seed)


def with_gradients(shapes, mesh, dtype=np.float64, over=("data",), **placements):
    """Parameters of zeros, with Partial gradients that are ones altogether."""
    parameters = [parameter(np.zeros(shape, dtype), mesh, **placements) for shape in shapes]
    for w in parameters:
        w.grad = gradient(np.ones(w.shape, dtype), mesh, **dict.fromkeys(over, SUM))
    return parameters


def one_process(p, gradients, lr, momentum=0.0, nesterov=False, weight_decay=0.0):
    """The parameter after a step with each of `gradients`, as a textbook has it; `lr` is one rate, or one a step."""
    b = None
    rates = lr if isinstance(lr, list) else [lr] * len(gradients)
    for g, rate in zip(gradients, rates, strict=True):
        d = g + weight_decay * p
        if momentum:
            b = d if b is None else momentum * b + d
            d = d + momentum * b if nesterov else b
        p = p - rate * d
    return p


def placements_with_gradients(ndim, dims):
    """For `dims` dims, every placement of a parameter of `ndim` axes, with every one that its gradient may have."""
    single = [
        (placed, of_gradient)
        for placed in (R, *(Shard(axis) for axis in range(ndim)))
        for of_gradient in (placed, SUM, AVG)
    ]
    of_sums = [tuple(zip(*pairs, strict=True)) for pairs in product(single, repeat=dims)]
    others = [((R,) * dims, (MAX,) * dims), ((Shard(0),) * dims, (MIN,) * dims)] if ndim else []
    return [*of_sums, *others]


# ------------------------------------------------------------------------------------------------------------ the step


@pytest.mark.ranks(1, 4)  # a line of four, and two by two
@each_option
def test_steps_at_any_placement_equal_one_process(comm, options):
    lr = [0.5, 0.25, 1.0]
    results = []
    for mesh in meshes(comm):
        cases, parameters = [], []
        for shape in [(5, 3), (7,), ()]:
            for placed, of_gradient in placements_with_gradients(len(shape), len(mesh.dims)):
                values = wholes(shape, 3, seed=len(cases))
                # Every second parameter has uneven and empty shards.
                placement = spread(mesh.dim_sizes, shape, *placed, seed=[len(cases)] if len(cases) % 2 else None)
                cases.append(
                    (values, placement if placed == of_gradient else spread(mesh.dim_sizes, shape, *of_gradient))
                )
                parameters.append(held(values[0], mesh, placement, requires_grad=True))
        optimizer = SGD(parameters, lr=0.0, **options)
        for step, rate in enumerate(lr):
            optimizer.lr = rate
            for w, (values, placement) in zip(parameters, cases, strict=True):
                w.grad = held(values[1 + step], mesh, placement, seed=step)
            optimizer.step()
        everyone = comm.allgather([w.local for w in parameters])
        for number, (w, (values, placement)) in enumerate(zip(parameters, cases, strict=True)):
            got = assembled(w.sharding, [parts[number] for parts in everyone])
            results.append((w, placement, got, one_process(values[0], values[1:], lr, **options), w.grad, values[-1]))
    for w, placement, got, expected, after, last in results:
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected, err_msg=f"{w.sharding} with gradient {placement}")
        assert after.sharding == w.sharding
        np.testing.assert_array_equal(after.local, last[after.sharding.slices(after.mesh.coordinates)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_of_any_shape_are_stepped(square, shape):
    values = wholes(shape, 2, seed=1)
    placements = {"data": Shard(0)} if shape else {}
    w = parameter(values[0], square, **placements)
    optimizer = SGD([w], lr=0.5, momentum=0.5, nesterov=True, weight_decay=0.25)
    for step in range(2):
        w.grad = gradient(values[1 + step], square, data=SUM, model=SUM)
        optimizer.step()
    got = whole_of(w)
    np.testing.assert_array_equal(got, one_process(values[0], values[1:], 0.5, 0.5, True, 0.25))


def test_gradient_may_have_any_memory_order(comm, line):
    values = wholes((6, 4), 1, seed=2)
    by_column = np.asfortranarray(values[1])
    one = np.broadcast_to(np.float32(1), (6, 4))
    parameters = [parameter(values[0], line) for _ in range(4)]
    whole = Sharding.of(line.dim_sizes, (6, 4), {})
    partial = Sharding.of(line.dim_sizes, (6, 4), {"data": SUM})
    for w, local, placement in zip(parameters, [by_column, one] * 2, [whole, whole, partial, partial], strict=True):
        w.grad = DistArray(local, line, placement)
    before = [w.local for w in parameters]
    SGD(parameters, lr=1.0, momentum=0.5, weight_decay=1.0).step()
    assert all(w.local is array for w, array in zip(parameters, before, strict=True)), "parameters change in place"
    np.testing.assert_array_equal(by_column, values[1])
    for w, g in zip(parameters, [values[1], one, comm.size * values[1], comm.size * one], strict=True):
        np.testing.assert_array_equal(w.local, -g)


def test_parameters_may_share_memory_of_gradient(line):
    values = wholes((5,), 1, seed=4)
    shared = gradient(values[1], line, data=SUM)
    parameters = [parameter(values[0], line) for _ in range(2)]
    for w in parameters:
        w.grad = shared
    norm = clip_grad_norm(parameters, 1e-3)
    SGD(parameters, lr=1.0).step()
    assert shared.placements == {"data": SUM}
    assert norm == pytest.approx(math.sqrt(2) * np.linalg.norm(values[1]), rel=1e-6)
    expected = values[0] - values[1] * np.float32(1e-3 / (norm + 1e-6))
    for w in parameters:
        np.testing.assert_allclose(w.local, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_halves_are_stepped_in_float32(square, dtype):
    values = wholes((6, 4), 3, seed=8)
    w = parameter(values[0].astype(dtype), square, data=Shard(0))
    optimizer = SGD([w], lr=0.01, momentum=0.9, weight_decay=0.1)
    p, b = values[0], 0
    for g in values[1:]:
        w.grad = gradient(g.astype(dtype), square, data=SUM, model=AVG)
        optimizer.step()
        b = np.float32(0.9) * b + (g + np.float32(0.1) * p)
        p = (p - np.float32(0.01) * b).astype(dtype).astype(np.float32)
    got = whole_of(w)
    assert w.dtype == w.grad.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), p)


def test_terms_of_half_gradient_add_in_float32(comm, square):
    # 2048 + 1 is 2048 in float16, however often; and so after each of two collectives that round.
    w = parameter(np.zeros((4, 2), np.float16), square, data=Shard(0))
    local = np.full((4, 2), 2048 if square.rank == 0 else 1, np.float16)
    w.grad = DistArray(local, square, Sharding.of(square.dim_sizes, (4, 2), {"data": SUM, "model": SUM}))
    SGD([w], lr=1.0).step()
    expected = np.float32(2048 + comm.size - 1).astype(np.float16)
    np.testing.assert_array_equal(w.grad.local, np.full_like(w.local, expected))


def test_parameters_are_stepped_in_their_own_dtype(line):
    parameters = [parameter(np.ones(3, dtype), line) for dtype in (np.float64, np.float32)]
    for w in parameters:
        w.grad = gradient(np.ones(3, w.dtype), line, data=SUM)
    SGD(parameters, lr=0.1).step()
    assert [w.local[0] for w in parameters] == [1 - 0.1, np.float32(1) - np.float32(0.1)]
    assert [w.dtype for w in parameters] == [np.float64, np.float32]


def test_parameters_without_gradient_stay_with_their_momentum(line):
    values = wholes((4,), 3, seed=9)
    options = {"momentum": 0.5, "weight_decay": 0.5}
    always, sometimes, never = parameters = [parameter(values[0], line) for _ in range(3)]
    optimizer = SGD(parameters, lr=0.5, **options)
    for step in range(3):
        optimizer.zero_grad()
        assert [w.grad for w in parameters] == [None] * 3
        always.grad = gradient(values[1 + step], line, data=SUM)
        if step != 1:
            sometimes.grad = gradient(values[1 + step], line, data=SUM)
        optimizer.step()
    np.testing.assert_array_equal(always.local, one_process(values[0], values[1:], 0.5, **options))
    np.testing.assert_array_equal(sometimes.local, one_process(values[0], values[[1, 3]], 0.5, **options))
    np.testing.assert_array_equal(never.local, values[0])
    assert never.grad is None


def test_cupy_arrays_are_stepped_where_they_are(line, cupy):
    values = wholes((6, 2), 2, seed=10)
    options = {"momentum": 0.5, "nesterov": True, "weight_decay": 0.5}
    parameters = [parameter(cupy.asarray(values[0]), line, data=placed) for placed in (R, Shard(0))]
    optimizer = SGD(parameters, lr=0.5, **options)
    for step in range(2):
        for w in parameters:
            partial = gradient(values[1 + step], line, data=SUM)
            w.grad = DistArray(cupy.asarray(partial.local), line, partial.sharding)
        norm = clip_grad_norm(parameters, 1e9)
        optimizer.step()
    expected = one_process(values[0], values[1:], 0.5, **options)
    assert norm == pytest.approx(math.sqrt(2) * np.linalg.norm(values[2]))
    for w in parameters:
        assert isinstance(w.local, cupy.ndarray)
        assert isinstance(w.grad.local, cupy.ndarray)
        np.testing.assert_array_equal(cupy.asnumpy(w.local), expected[w.sharding.slices(line.coordinates)])


# ------------------------------------------------------------------------------------------ bringing gradients together


def agreements(trace):
    return trace.count(purpose=Purpose.AGREEMENT)


@pytest.mark.parametrize(
    ("placements", "shapes", "collective", "after"),
    [
        ({}, [(3, 4), (), (5,), (0, 2), (100,)], "all_reduce", "Replicate()"),
        ({"data": Shard(0)}, [(7, 2), (3,)], "reduce_scatter", "Shard(0)"),
    ],
    ids=["replicated", "sharded"],
)
def test_gradients_over_same_dims_share_one_collective(line, placements, shapes, collective, after):
    parameters = with_gradients(shapes, line, np.float32, **placements)
    _, trace = traced(SGD(parameters, lr=1.0).step)
    assert [event.collective for event in trace.events] == ["all_gather", collective]
    assert agreements(trace) == 1
    [event] = trace.select(collective, operation="SGD", phase="step", over="data")
    assert (event.bytes, event.ranks) == (4 * sum(map(math.prod, shapes)), line.size)
    assert (event.before, event.after) == ("Partial('sum')", after)
    assert event.reason


def test_step_takes_one_collective_per_dims_and_dtype(square):
    both, rows = {"data": SUM, "model": SUM}, {"data": Shard(0)}
    lists = [
        # placements of the parameter, of its gradient, dtype
        ({}, {"data": SUM}, np.float32),
        ({}, {"data": AVG}, np.float32),
        ({}, {"data": SUM}, np.float64),
        ({"model": Shard(0)}, {"data": SUM, "model": Shard(0)}, np.float32),
        ({}, {"model": SUM}, np.float32),
        ({}, both, np.float32),
        (rows, both, np.float32),
        (rows, {"data": SUM}, np.float32),
        ({"data": Shard(1)}, {"data": SUM}, np.float32),
        # These send nothing; the last parameter takes its part of a whole gradient.
        (rows, rows, np.float32),
        ({"data": Shard(1)}, {}, np.float32),
        ({}, {}, np.float32),
    ]
    parameters = []
    for placed, of_gradient, dtype in lists * 2:
        parameters.append(parameter(np.zeros((4, 6), dtype), square, **placed))
        parameters[-1].grad = gradient(np.ones((4, 6), dtype), square, **of_gradient)
    _, trace = traced(SGD(parameters, lr=1.0).step)
    found = sorted((event.collective, event.over, event.bytes) for event in trace.select())
    mine = len(range(4)[slice(*pce.shard_range(4, square.dims["data"], square.coordinates["data"]))]) * 6
    model = len(range(4)[slice(*pce.shard_range(4, square.dims["model"], square.coordinates["model"]))]) * 6
    assert found == sorted(
        [
            ("all_reduce", "data", 2 * 4 * (24 + 24 + model)),
            ("all_reduce", "data", 2 * 8 * 24),
            # A gradient that was Partial over both dims and scattered over one is completed here, with the others.
            ("all_reduce", "model", 2 * 4 * (24 + mine)),
            ("all_reduce", "data, model", 2 * 4 * 24),
            ("reduce_scatter", "data", 2 * 4 * 3 * 24),
        ]
    )
    assert agreements(trace) == 1


def test_scattered_axes_take_a_collective_each(square):
    # The second waits with its only collective until the first has come to its second one.
    placed = [{"data": Shard(0), "model": Shard(1)}, {"model": Shard(0)}]
    of_gradient = [{"data": SUM, "model": SUM}, {"model": SUM}]
    parameters = [parameter(np.zeros((4, 6)), square, **each) for each in placed]
    values = wholes((4, 6), 1, seed=11, dtype=np.float64)[1]
    for w, placement in zip(parameters, of_gradient, strict=True):
        w.grad = gradient(values, square, **placement)
    _, trace = traced(SGD(parameters, lr=1.0).step)
    results = [whole_of(w) for w in parameters]
    assert [(event.collective, event.over) for event in trace.select()] == [
        ("reduce_scatter", "data"),
        ("reduce_scatter", "model"),
    ]
    for got in results:
        np.testing.assert_array_equal(got, -values)


def test_second_step_sends_nothing(square):
    dims = tuple(square.dims)
    parameters = [*with_gradients([(5, 3)], square, over=dims), *with_gradients([7], square, over=dims, data=Shard(0))]
    optimizer = SGD(parameters, lr=1.0)
    optimizer.step()
    gradients = [w.grad for w in parameters]
    _, trace = traced(optimizer.step)
    assert [w.grad.sharding for w in parameters] == [w.sharding for w in parameters]
    assert all(w.grad is g for w, g in zip(parameters, gradients, strict=True))
    assert trace.count() == 0
    assert agreements(trace) == 1
    for w in parameters:
        np.testing.assert_array_equal(w.local, np.full_like(w.local, -2))


# ------------------------------------------------------------------------------------------------------------ clipping


def test_norm_counts_each_element_of_global_arrays_once(comm):
    results = []
    for mesh in meshes(comm):
        cases = [
            (shape, pair)
            for shape in [(5, 3), (7,), ()]
            for pair in placements_with_gradients(len(shape), len(mesh.dims))
        ]
        parameters, values = [], []
        for number, (shape, (placed, of_gradient)) in enumerate(cases):
            values.append(wholes(shape, 1, seed=number)[1])
            w = parameter(np.zeros(shape, np.float32), mesh, **dict(zip(mesh.dims, placed, strict=True)))
            w.grad = gradient(values[-1], mesh, **dict(zip(mesh.dims, of_gradient, strict=True)))
            parameters.append(w)
        results.append((clip_grad_norm(parameters, math.inf), math.sqrt(sum((v**2).sum() for v in values))))
    for got, expected in results:
        assert type(got) is float
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("max_norm", [0.5, 13.0, 1e6, 0, np.float32(2)], ids=str)
def test_clipping_scales_gradients_as_pytorch_does(comm, square, max_norm):
    parameters = [
        parameter(np.zeros(2), square),
        parameter(np.zeros(4), square, data=Shard(0)),
        parameter(np.zeros(1), square),
    ]
    parameters[0].grad = gradient(np.array([3.0, -4.0]), square, data=SUM, model=SUM)
    parameters[1].grad = gradient(np.array([0.0, 0.0, 12.0, 0.0]), square, data=SUM)
    norm = clip_grad_norm(parameters, max_norm)
    norms = comm.allgather(norm)
    results = [whole_of(w.grad) for w in parameters[:2]]
    assert norms == [13.0] * comm.size
    factor = min(1.0, float(max_norm) / (13.0 + 1e-6))
    np.testing.assert_array_equal(results[0], factor * np.array([3.0, -4.0]))
    np.testing.assert_array_equal(results[1], factor * np.array([0.0, 0.0, 12.0, 0.0]))
    assert parameters[2].grad is None
    assert [w.grad.sharding for w in parameters[:2]] == [w.sharding for w in parameters[:2]]


def test_clipping_adds_one_all_reduce_of_one_number(square):
    parameters = with_gradients([5, (6, 2)], square, np.float32)
    _, clipping = traced(clip_grad_norm, parameters, 1.0)
    _, stepping = traced(SGD(parameters, lr=1.0).step)
    assert [(event.collective, event.over, event.bytes) for event in clipping.select()] == [
        ("all_reduce", "data", 4 * 17),
        ("all_reduce", "data, model", 8),
    ]
    assert clipping.count(operation="clip_grad_norm", phase="step") == 2
    assert agreements(clipping) == 1
    assert stepping.count() == 0


def test_norm_of_nan_shows_on_every_rank(comm, line):
    for bad, expected in ((np.nan, np.nan), (np.inf, 0.0)):
        w, v = (parameter(np.zeros(5), line, data=Shard(0)) for _ in range(2))
        w.grad, v.grad = gradient(np.ones(5), line, data=SUM), gradient(np.ones(5), line, data=Shard(0))
        if line.rank == comm.size - 1:
            w.grad.local[0] = bad
        norm = clip_grad_norm([w, v], 1.0)
        first = whole_of(w.grad)[0]
        np.testing.assert_equal(norm, abs(bad))
        np.testing.assert_array_equal(v.grad.local, np.full_like(v.local, expected))
        assert np.isnan(first)


def test_squares_for_norm_are_summed_in_float64(line):
    for dtype, value in ((np.float32, 1e30), (np.float32, 1e-30), (np.float16, 6e4), (ml_dtypes.bfloat16, 1e-30)):
        w = parameter(np.zeros(100, dtype), line)
        whole = np.full(100, value, np.float32).astype(dtype)
        w.grad = gradient(whole, line, data=R)
        norm = clip_grad_norm([w], value)
        assert norm == pytest.approx(10 * float(whole[0]), rel=1e-14)
        assert w.grad.dtype == dtype
        scale = np.float32(value / (norm + 1e-6))
        np.testing.assert_array_equal(w.grad.local, (whole.astype(np.float32) * scale).astype(dtype))


# -------------------------------------------------------------------------------------------------------------- errors


def refused(comm, kind, function):
    """The texts that all ranks got when `function` raised `kind` on this one, as it must."""
    with pytest.raises(kind) as raised:
        function()
    return comm.allgather(str(raised.value))


def two(mesh):
    """Two parameters with partial gradients."""
    return [*with_gradients([(3, 2)], mesh), *with_gradients([4], mesh, data=Shard(0))]


def refused_in_vain(comm, kind, function, parameters):
    """The text that all ranks got alike; no parameter was written to, and afterwards a step works."""
    texts = refused(comm, kind, function)
    for w in parameters:
        assert not w.local.any()
    [w, v] = two(parameters[0].mesh)
    SGD([w, v], lr=1.0).step()
    assert (w.local == -1).all()
    assert (v.local == -1).all()
    assert texts == texts[:1] * comm.size
    return texts[0]


def without_gradients(parameters, *numbers):
    for number in numbers:
        parameters[number].grad = None
    return parameters


def with_whole_gradient(parameters):
    parameters[0].grad = gradient(np.ones((3, 2)), parameters[0].mesh)
    return parameters


# The parameters that rank 0 makes, and the error of all ranks.
DIFFERENT = {
    "one gradient less": (lambda p: without_gradients(p, 1), r"parameters\[1\]: '.*no gradient' \(rank 0 along data\)"),
    "no gradient at all": (
        lambda p: without_gradients(p, 0, 1),
        r"parameters\[0\]: '.*no gradient' \(rank 0 along data\)",
    ),
    "gradient placed otherwise": (
        with_whole_gradient,
        r"gradient data: Replicate\(\).*gradient data: Partial\('sum'\)",
    ),
    "another order": (lambda p: p[::-1], r"parameters\[0\]"),
    "fewer": (lambda p: p[:1], r"parameters\[1\]: not given \(rank 0 along data\), "),
}


def call_of(number, parameters, value=1.0):
    """A step, or the clipping of a norm."""
    return [SGD(parameters, lr=value, momentum=0.5).step, lambda: clip_grad_norm(parameters, value)][number]


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("number", [0, 1], ids=["SGD", "clip_grad_norm"])
def test_ranks_that_differ_are_told_alike(comm, line, number):
    first = line.rank == 0
    for name, (change, words) in DIFFERENT.items():
        parameters = two(line)
        mine = change(parameters) if first else parameters
        text = refused_in_vain(comm, CollectiveError, call_of(number, mine), parameters)
        assert re.search(words, text), (name, text)
    parameters = two(line)
    text = refused_in_vain(comm, CollectiveError, call_of(number, parameters, 0.5 if first else 0.25), parameters)
    assert f"{['lr', 'max_norm'][number]}: 0.5 (" in text
    text = refused_in_vain(comm, CollectiveError, call_of(number ^ first, parameters), parameters)
    assert "ranks disagree on operation: " in text


@pytest.mark.parametrize("number", [0, 1], ids=["SGD", "clip_grad_norm"])
def test_unfit_gradient_of_one_rank_or_all(comm, line, number):
    bad = [
        (np.ones((3, 2)), TypeError, "must be a distributed array or None, got ndarray"),
        (gradient(np.ones((2, 3)), line, data=SUM), ValueError, "must have the parameter's shape, (3, 2), got (2, 3)"),
        (gradient(np.ones((3, 2), np.float32), line, data=SUM), TypeError, "must have the parameter's dtype"),
        (gradient(np.ones((3, 2)), mesh_of(comm, comm.size, 1), data=SUM), ValueError, "is over another mesh"),
    ]
    for (wrong, kind, said), ranks in product(bad, ([comm.size - 1], range(comm.size))):
        parameters = two(line)
        if line.rank in ranks:
            parameters[0].grad = wrong
        text = refused_in_vain(comm, kind, call_of(number, parameters), parameters)
        assert f"the gradient of parameters[0] {said}" in text
        assert text.endswith(f" ({ranks_text(ranks, 'data')})")


def test_error_reaches_ranks_through_shared_meshes(comm):
    # Stages of a pipeline: ranks 0 and 1 share a mesh, ranks 1 and 2, ranks 2 and 3; only rank 0 has a bad gradient.
    parameters = []
    for first in range(comm.size):
        ranks = [rank for rank in (first, first + 1) if rank < comm.size]
        stage = comm.Split(0 if comm.rank in ranks else MPI.UNDEFINED)
        if comm.rank in ranks:
            parameters.append(parameter(np.zeros(3), pce.Mesh(stage, data=len(ranks))))
            parameters[-1].grad = gradient(np.ones(3), parameters[-1].mesh, data=SUM)
    good = parameters[0].grad
    if comm.rank == 0:
        parameters[0].grad = np.ones(3)
    texts = refused(comm, TypeError, SGD(parameters, lr=1.0).step)
    untouched = not any(w.local.any() for w in parameters)
    parameters[0].grad = good
    # A norm that a rank knows only a part of would scale replicas differently.
    if comm.size > 2:
        refused(comm, ValueError, lambda: clip_grad_norm(parameters, 1.0))
    SGD(parameters, lr=1.0).step()
    assert untouched
    assert all("the gradient of parameters[0] must be a distributed array" in text for text in texts)
    assert all((w.local == -1).all() for w in parameters)


def test_error_of_two_meshes_names_ranks_once(comm, line, square):
    parameters = [*two(line), *two(square)]
    if comm.rank == comm.size - 1:
        parameters[0].grad = np.ones(3)
    optimizer = SGD(parameters, lr=1.0)
    state = {} if comm.rank == comm.size - 1 else optimizer.state()
    for kind, call in ((TypeError, optimizer.step), (ValueError, lambda: optimizer.load_state(state))):
        assert [text.count("(rank") for text in refused(comm, kind, call)] == [1] * comm.size
