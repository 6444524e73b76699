"""Hypothesis draws problems and splits: the loss and its neighbours are those of dense, with bits of one process."""

from hypothesis import assume, example, given, settings, strategies as st
import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.testing import in_step
from ranks.problems import Part, Problem, as_cosines, assert_as_dense, evaluate, grid, rounding_of_z
from ranks.test_divergence import DIRECTIONS, both_gradients
from ulps import DIVERGENCE, FINITE_DIFFERENCE, FLOAT64, MASS, ROUNDED_ONCE, WIDE_DIVERGENCE, errors, ulp

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]
KINDS = ["normal", "equal", "large", "masked", "peaked", "dominated", "bad"]


def logits_of(kind, shape, rng):
    """Logits of a kind, the class axis last."""
    x = rng.normal(0, 2, shape)
    if kind == "equal":
        x = np.round(x / 4)
    elif kind == "large":
        x *= 1000
    elif kind == "masked":
        x[rng.random(shape) < 0.5] = -np.inf
    elif kind in ("peaked", "dominated"):
        x[..., rng.integers(0, shape[-1])] += rng.uniform(10, 30)
        if kind == "dominated":
            x[..., rng.integers(0, shape[-1])] += rng.uniform(10, 30)
    elif kind == "bad":
        x[rng.random(shape) < 0.05] = rng.choice([np.nan, np.inf])
    return x


def numbers(low, high):
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def problems(draw):
    """A problem, from few draws: a seed stands for its values, so that shrinking makes it small and not strange."""
    axes = draw(st.integers(1, 4))
    classes = draw(st.integers(1, 40) | st.integers(41, 700))
    rows_shape = tuple(draw(st.lists(st.integers(0, 4), min_size=axes - 1, max_size=axes - 1)))
    axis = draw(st.integers(-axes, axes - 1))
    kind = draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    offset = draw(st.sampled_from([0.0, 1.0, -100.0, 1e4]))
    dtype = draw(st.sampled_from(FLOATS))
    x = np.moveaxis(logits_of(kind, (*rows_shape, classes), rng) + offset, -1, axis)
    options = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]) | numbers(0, 1)),
        "z_loss": draw(st.just(0.0) | numbers(1e-6, 1)),
        "logit_scale": draw(st.just(1.0) | numbers(0.01, 10) | st.sampled_from([1e-4, 300.0, 1e4])),
        "softcap": draw(st.none() | numbers(0.1, 100)),
        "reduction": draw(st.sampled_from(["none", "sum", "mean"])),
    }
    weight = None
    if draw(st.booleans()):
        weight = rng.uniform(0.1, 3, classes).astype(np.float32)
    if draw(st.booleans()):
        drawn = rng.gamma(draw(st.sampled_from([0.05, 1.0])), size=x.shape)
        targets = (drawn / drawn.sum(axis=axis, keepdims=True).clip(1e-30)).astype(np.float32)
    else:
        options["ignore_index"] = draw(st.sampled_from([-100, 0]))
        targets = rng.integers(0, classes, rows_shape)
        targets = np.where(rng.random(rows_shape) < draw(st.sampled_from([0.0, 0.3])), options["ignore_index"], targets)
        if options["softcap"] is None and draw(st.booleans()):
            options["margin"] = tuple(draw(st.tuples(numbers(-4, 4), numbers(-4, 4), numbers(-1, 1))))
            x = as_cosines(x - offset)
    with np.errstate(over="ignore"):
        return Problem(x.astype(dtype), targets, axis, weight, options)


def ranges(draw, length, parts):
    """Consecutive ranges, empty ones among them, handed to the ranks in any order."""
    ends = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    order = draw(st.permutations(range(parts)))
    ends = [0, *ends, length]
    return [(ends[index], ends[index + 1]) for index in order]


@pytest.mark.ranks(1)  # the tests of bits below show that no other number gives others
@settings(max_examples=150)
@given(data=st.data(), problem=problems(), compute=st.sampled_from([None, np.float64]), seed=st.integers(0, 99))
def test_loss_and_gradient_are_those_of_dense(comm, data, problem, compute, seed):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    part = Part(start, stop)
    dloss = 1.0
    if problem.reduction == "none":
        dloss = np.random.default_rng(seed).normal(size=problem.rows_shape)
    with in_step(comm):
        results = evaluate(comm, problem, part, dloss=dloss, class_start=start, compute_dtype=compute)
        assert_as_dense(results, problem, part, dloss, requested=compute)


def small_problem(row, target, **options):
    return Problem(np.array([row], np.float32), np.array([target]), options={"reduction": "sum", **options})


@pytest.mark.ranks(4)  # a grid of two by two is among others
@given(problem=problems(), batched=st.booleans())
# A row of which only the target is not masked, where the mask is a number.
@example(problem=small_problem([-1.0, -3e38, -3e38], 0), batched=False)
@example(problem=small_problem([0.0, -np.inf, -np.inf], 1, label_smoothing=0.5), batched=False)
@example(problem=small_problem([-np.inf] * 3, 1), batched=False)
@example(problem=small_problem([1e4, 1e4 - 20], 0, z_loss=0.01, logit_scale=0.3), batched=True)
@settings(max_examples=40)
def test_rows_sharded_over_any_grid_of_ranks(comm, problem, batched):
    rows = comm.size if batched else 1
    assume(problem.rows_shape or rows == 1)
    with in_step(comm), grid(comm, rows) as (over_classes, over_rows):
        first_last = pce.shard_range(problem.rows_shape[0], rows, over_rows.rank) if problem.rows_shape else (0, None)
        part = Part(*pce.shard_range(problem.classes, over_classes.size, over_classes.rank), *first_last)
        results = evaluate(over_classes, problem, part, batch_comm=over_rows)
        assert_as_dense(results, problem, part)


@pytest.mark.ranks(1)  # the tests of bits below show that no other number gives others
@settings(max_examples=60)
@given(data=st.data(), problem=problems())
def test_statistics_are_those_of_dense(comm, data, problem):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    options = {name: problem.options[name] for name in ("logit_scale", "softcap")}
    logits = Part(start, stop).of(problem.logits, problem.axis)
    targets = problem.logits.astype(np.float64).argmax(axis=problem.axis)
    with in_step(comm):
        statistics = pce.class_statistics(
            logits, targets, comm=comm, axis=problem.axis, class_start=start, compute_dtype=np.float64, **options
        )
        expected = pce.dense.class_statistics(problem.logits, targets, axis=problem.axis, **options)
        assert np.array_equal(statistics.argmax, expected.argmax)
        for name in ("max", "sum_exp", "logsumexp", "log_prob", "entropy"):
            wanted = getattr(expected, name)
            size = np.maximum(1.0, np.abs(expected.logsumexp)) * np.maximum(1.0, np.abs(wanted))
            found = errors(getattr(statistics, name), wanted, np.float64, np.where(np.isfinite(size), size, 1.0))
            assert found.max(initial=0.0) <= FLOAT64 + rounding_of_z(problem), name


def same_bits(found, expected):
    """True if two arrays have equal bits, but for which of the many nan a nan is."""
    found, expected = np.asarray(found), np.asarray(expected)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    nan = np.isnan(expected)
    equal = np.where(nan, 0, found).tobytes() == np.where(nan, 0, expected).tobytes()
    return equal and np.array_equal(np.isnan(found), nan)


@pytest.mark.ranks(2, 3)  # one rank is one process
@given(data=st.data(), problem=problems(), compute=st.sampled_from([None, np.float64]))
@settings(max_examples=100)
def test_results_have_bits_of_one_process(comm, data, problem, compute):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    whole = Part(0, problem.classes)
    logits, targets, options = whole.on_this_rank(problem, compute_dtype=compute)
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, targets, **options)
    part = Part(start, stop)
    mine, targets, options = part.on_this_rank(problem, compute_dtype=compute, comm=comm, class_start=start)
    found, found_gradient = pce.softmax_cross_entropy_value_and_grad(mine, targets, **options)
    with in_step(comm):
        assert same_bits(found, loss)
        assert same_bits(found_gradient, part.of(gradient, problem.axis))


@pytest.mark.ranks(3)  # one rank is one process
@given(problem=problems())
@settings(max_examples=40)
def test_rows_of_any_grid_have_same_bits(comm, problem):
    assume(problem.rows_shape)
    logits, targets, options = Part(0, problem.classes).on_this_rank(problem)
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, targets, **options)
    with in_step(comm), grid(comm, comm.size) as (over_classes, over_rows):
        part = Part(0, problem.classes, *pce.shard_range(problem.rows_shape[0], comm.size, over_rows.rank))
        mine, targets, options = part.on_this_rank(problem, comm=over_classes, batch_comm=over_rows)
        found, found_gradient = pce.softmax_cross_entropy_value_and_grad(mine, targets, **options)
        if problem.reduction != "none":
            assert same_bits(found, loss)
        assert same_bits(found_gradient, part.of(gradient, problem.axis))


@pytest.mark.ranks(3)  # one rank is one process
@given(data=st.data(), problem=problems())
@settings(max_examples=40)
def test_statistics_have_bits_of_one_process(comm, data, problem):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    options = {name: problem.options[name] for name in ("logit_scale", "softcap")} | {"axis": problem.axis}
    with np.errstate(invalid="ignore"):
        targets = problem.logits.astype(np.float64).argmin(axis=problem.axis)
    expected = pce.class_statistics(problem.logits, targets, **options)
    mine = Part(start, stop).of(problem.logits, problem.axis)
    found = pce.class_statistics(mine, targets, comm=comm, class_start=start, **options)
    with in_step(comm):
        for name, values in expected._asdict().items():
            assert same_bits(getattr(found, name), values), name


@pytest.mark.ranks(1, 3)  # one rank is compared with dense, three with one
@given(data=st.data(), problem=problems(), chosen=st.integers(1, 5), outside=st.sampled_from(["-inf", "add"]))
@settings(max_examples=60)
def test_supports_have_bits_of_one_process(comm, data, problem, chosen, outside):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    options = {name: problem.options[name] for name in ("logit_scale", "softcap")} | {"axis": problem.axis}
    axis, shape = problem.axis % problem.logits.ndim, list(problem.logits.shape)
    shape[axis] = chosen
    targets = rng.integers(0, problem.classes, shape)
    counts = rng.integers(0, problem.classes + 1, int(np.prod(problem.rows_shape)))
    ids = [rng.permutation(problem.classes)[:count] for count in counts]
    support = np.concatenate([*ids, np.zeros(0, np.int64)]), np.cumsum([0, *counts])
    options |= {"support": support, "outside": outside}
    upstream = {"log_prob": rng.standard_normal(shape), "entropy": 0.5, "logsumexp": -1.25}
    expected, whole = pce.class_statistics_forward(problem.logits, targets, **options)
    gradient = pce.class_statistics_backward(whole, **upstream)
    mine = Part(start, stop).of(problem.logits, problem.axis)
    found, residuals = pce.class_statistics_forward(mine, targets, comm=comm, class_start=start, **options)
    back = pce.class_statistics_backward(residuals, **upstream)
    with in_step(comm):
        for name, values in expected._asdict().items():
            assert same_bits(getattr(found, name), values), name
        assert same_bits(back, Part(start, stop).of(gradient, problem.axis))
        if comm.size == 1:
            exact = pce.dense.class_statistics(problem.logits, targets, **options)
            known = np.isfinite(exact.logsumexp)
            assert np.array_equal(known, np.isfinite(expected.logsumexp))
            assert np.array_equal(exact.argmax[known], expected.argmax[known])
            scale = 1.0 + np.abs(exact.logsumexp[known])
            for name in ("logsumexp", "entropy"):
                assert np.all(np.abs(getattr(exact, name) - getattr(expected, name))[known] <= 1e-5 * scale), name


@pytest.mark.ranks(3)  # one rank is one process
@given(problem=problems(), function=st.sampled_from(["softmax", "log_softmax", "logsumexp"]))
@settings(max_examples=60)
def test_softmax_of_shards_has_bits_of_one_process(comm, problem, function):
    axis, ndim = problem.axis % problem.logits.ndim, problem.logits.ndim
    alone = getattr(pce, function)(pce.distribute(problem.logits, pce.Mesh(MPI.COMM_SELF, data=1)), axis=axis)
    mesh = pce.Mesh(comm, data=comm.size)
    x = pce.distribute(problem.logits, mesh, data=pce.Shard(axis))
    found = getattr(pce, function)(x, axis=axis).full()
    with in_step(comm):
        assert found.ndim == (ndim if function != "logsumexp" else ndim - 1)
        assert same_bits(found, alone.full())


def assert_divergence_as_dense(found, student, teacher, options):
    """The divergence and both gradients are those of dense, and in float64 those of finite differences."""
    exact = pce.dense.kl_divergence_value_and_grad(student, teacher, **options)
    of_rows = pce.dense.kl_divergence_value_and_grad(student, teacher, **options | {"reduction": "none"}).divergence
    given_logits = [each.astype(np.float64) for each in (student, teacher)]
    known = [each[np.isfinite(each)] * options["logit_scale"] for each in given_logits]
    spread = 1.0 + sum(np.ptp(each) for each in known if each.size)
    largest = 1.0 + sum(np.abs(each).max(initial=0.0) for each in known)
    unit = np.finfo(found[0].dtype).eps * (DIVERGENCE if found[0].dtype == np.float32 else WIDE_DIVERGENCE)
    of_dense = FLOAT64 * np.finfo(np.float64).eps * largest
    assert np.allclose(found[0], exact.divergence, rtol=unit, atol=of_dense * of_rows.size, equal_nan=True)
    finite = np.isfinite(of_rows)  # dense has nan where a divergence is infinite
    for got, wanted in zip(found[1:], exact[1:], strict=True):
        got, wanted = (np.moveaxis(each, options["axis"], -1)[finite] for each in (got, wanted))
        limit = ROUNDED_ONCE * ulp(wanted, got.dtype) + (unit * spread + of_dense) * options["logit_scale"]
        assert np.all(np.abs(got - wanted) <= limit)
    options = options | {"rows": options["rows"] & finite, "reduction": "sum"}
    along, step = np.random.default_rng(8).uniform(-1, 1, (2, *student.shape)), np.finfo(np.float64).eps ** (1 / 3)
    ends = [pce.kl_divergence(*(given_logits + sign * step * along), **options) for sign in (1, -1)]
    slope = (along * both_gradients(*given_logits, **options)[1:]).sum()
    limit = FINITE_DIFFERENCE * np.finfo(np.float64).eps * largest * of_rows.size
    assert abs(slope - (ends[0] - ends[1]) / (2 * step)) <= limit


@pytest.mark.ranks(1, 3)  # one rank is compared with dense, three with one
@given(
    data=st.data(),
    problem=problems(),
    dtype=st.sampled_from(FLOATS),
    distance=st.sampled_from([0.0, 1e-3, 1.0, None]),
    direction=st.sampled_from(DIRECTIONS),
    scale=st.sampled_from([2.0, 1.0, 1 / 3]),
    compute=st.sampled_from([None, np.float64]),
)
@settings(max_examples=60)
def test_divergences_have_bits_of_one_process(comm, data, problem, dtype, distance, direction, scale, compute):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    student, noise = problem.logits, rng.standard_normal(problem.logits.shape)
    with np.errstate(all="ignore"):
        apart = np.where(noise < -1.5, -np.inf, 3 * noise)
        teacher = (apart if distance is None else student.astype(np.float64) + distance * noise).astype(dtype)
    options = {"direction": direction, "logit_scale": scale, "reduction": problem.reduction, "axis": problem.axis}
    options["rows"] = rng.random(problem.rows_shape) < 0.8
    expected = both_gradients(student, teacher, compute_dtype=compute, **options)
    mine = [Part(start, stop).of(each, problem.axis) for each in (student, teacher)]
    found = both_gradients(*mine, comm=comm, class_start=start, compute_dtype=compute, **options)
    with in_step(comm):
        assert same_bits(found[0], expected[0])
        for got, whole in zip(found[1:], expected[1:], strict=True):
            assert same_bits(got, Part(start, stop).of(whole, problem.axis))
        if comm.size == 1:
            assert_divergence_as_dense(expected, student, teacher, options)


@pytest.mark.ranks(1, 3)  # one rank is compared with dense, three with one
@given(
    data=st.data(),
    problem=problems(),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.none() | numbers(1e-3, 1),
    min_p=st.none() | numbers(0, 1),
    scale=st.just(1.0) | numbers(0.1, 10),
    ties=st.booleans(),
)
@settings(max_examples=40)
def test_sets_of_classes_are_those_of_dense(comm, data, problem, top_k, top_p, min_p, scale, ties):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    logits = np.round(problem.logits / 2).astype(problem.logits.dtype) if ties else problem.logits
    limits = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "logit_scale": scale, "axis": problem.axis}
    expected = pce.nucleus(logits, **limits)
    mine = Part(start, stop).of(logits, problem.axis)
    found = pce.nucleus(mine, comm=comm, class_start=start, **limits)
    with in_step(comm):
        assert all(map(same_bits, found, expected))
        if comm.size == 1:
            exact, dtype = pce.dense.nucleus(logits, **limits), found.mass.dtype
            assert dtype == found.log_mass.dtype == (np.float64 if logits.dtype == np.float64 else np.float32)
            assert found.ids.tolist() == exact.ids.tolist()
            assert same_bits(found.offsets, exact.offsets)
            assert errors(found.mass, exact.mass, dtype).max(initial=0.0) <= MASS
            # The mass that is left out is cut at 2^-42 of the largest, of each class.
            near = np.abs(found.log_mass - exact.log_mass) <= problem.classes * 2.0**-42
            assert np.all(near | (errors(found.log_mass, exact.log_mass, dtype) <= MASS))


@pytest.mark.ranks(1, 3)  # one rank alone, and shards of several lengths
@given(data=st.data(), problem=problems(), chosen=st.integers(0, 5), scalar=st.booleans())
@settings(max_examples=40)
def test_chosen_logits_are_those_of_numpy(comm, data, problem, chosen, scalar):
    start, stop = ranges(data.draw, problem.classes, comm.size)[comm.rank]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = list(problem.logits.shape)
    shape[problem.axis] = chosen
    ids = rng.integers(0, rng.integers(1, problem.classes + 1), shape)
    upstream = 1.0 if scalar else rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 6, shape)
    mine = Part(start, stop).of(problem.logits, problem.axis)
    found, residuals = pce.take_classes_forward(mine, ids, comm=comm, class_start=start, axis=problem.axis)
    gradient = pce.take_classes_backward(upstream, residuals)
    exact = np.zeros((*problem.rows_shape, problem.classes))
    of_chosen = np.moveaxis(np.broadcast_to(upstream, shape), problem.axis, -1)
    for *row, place in np.ndindex(of_chosen.shape):  # in order
        exact[*row, np.moveaxis(ids, problem.axis, -1)[*row, place]] += of_chosen[*row, place]
    exact = np.moveaxis(exact, -1, problem.axis)
    oracle = pce.dense.take_classes_backward(np.broadcast_to(upstream, shape), ids, problem.classes, axis=problem.axis)
    wide = np.float64 if problem.logits.dtype == np.float64 else np.float32
    with np.errstate(over="ignore"):
        rounded = exact.astype(wide).astype(problem.logits.dtype)
    with in_step(comm):
        assert same_bits(found, np.take_along_axis(problem.logits, ids, problem.axis))
        assert same_bits(gradient, Part(start, stop).of(rounded, problem.axis))
        np.testing.assert_allclose(oracle, exact, rtol=0, atol=1e-15 * np.abs(of_chosen).sum())


@pytest.mark.ranks(1, 3)  # one rank alone, and shards of several lengths
@given(
    data=st.data(),
    problem=problems(),
    chunk=st.none() | st.integers(1, 9),
    masked=st.sampled_from([None, 0.0, 0.2]),
    compute=st.sampled_from([None, np.float64]),
)
@settings(max_examples=40)
def test_statistics_of_products_are_those_of_logits(comm, data, problem, chunk, masked, compute):
    mine = slice(*ranges(data.draw, problem.classes, comm.size)[comm.rank])
    rng, dtype = np.random.default_rng(data.draw(st.integers(0, 99))), problem.logits.dtype
    options = {name: problem.options[name] for name in ("logit_scale", "softcap")} | {"ignore_index": 0}
    # Small whole numbers times powers of two: no BLAS rounds their products.
    hidden, w = (rng.integers(-8, 9, shape) for shape in ((*problem.rows_shape, 3), (3, problem.classes)))
    hidden, w = (hidden / 8).astype(dtype), (w / 2).astype(dtype)
    bias = rng.integers(-8, 9, problem.classes) / 4
    bias[:-1][rng.random(problem.classes - 1) < (masked or 0.0)] = -np.inf
    more = {} if masked is None else {"bias": bias.astype(dtype)}
    wide = np.float64 if dtype == np.float64 else np.float32
    logits = hidden.astype(wide) @ w.astype(wide) + (0 if masked is None else bias.astype(wide))
    targets = rng.integers(0, problem.classes, problem.rows_shape)
    upstream = {"log_prob": rng.standard_normal(problem.rows_shape), "entropy": 0.5, "logsumexp": -1.25}
    asked = {name: upstream[name] for name in data.draw(st.sets(st.sampled_from(list(upstream)), min_size=1))}
    expected = pce.class_statistics(logits, targets, compute_dtype=compute, **options)
    exact = pce.dense.linear_class_statistics_backward(hidden, w, targets, **asked, **options, **more)
    here = {name: each[mine] for name, each in more.items()} | {"comm": comm, "class_start": mine.start}
    found, residuals = pce.linear_class_statistics_forward(
        hidden, w[:, mine], targets, chunk=chunk, compute_dtype=compute, **options, **here
    )
    gradients = pce.linear_class_statistics_backward(residuals, **asked)
    # Each term of a gradient is at most an upstream number times an operand, at most 4, times the largest logit.
    largest = 1.0 + options["logit_scale"] * np.abs(logits[np.isfinite(logits)]).max(initial=0.0).astype(np.float64)
    size = 1.0 + options["logit_scale"] * 4.0 * largest * (np.abs(upstream["log_prob"]) + 2.0).sum()
    unit = FLOAT64 * (np.finfo(wide).eps + np.finfo(np.float64).eps * largest)
    with in_step(comm):
        for name, values in expected._asdict().items():
            assert same_bits(getattr(found, name), values), name
        for got, wanted, part in zip(gradients, exact, (slice(None), mine, mine), strict=True):
            assert (got is None) == (wanted is None)
            if got is not None:
                assert got.dtype == dtype
                limit = ROUNDED_ONCE * ulp(wanted[..., part], dtype) + unit * size
                assert np.all(np.abs(got - wanted[..., part]) <= limit)
