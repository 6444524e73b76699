"""Divergences of two softmaxes: those of the oracle and of 60 digits, with the bits of one process on any ranks."""

from functools import cache
import itertools

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Replicate, Shard, dense
from pce_mpi.kernels import definition
from pce_mpi.kernels.divergence import mean_of
from pce_mpi.kernels.interface import (
    ROW_GRADIENT,
    ROW_SOFTMAX,
    SINGLE,
    ClassWeights,
    GradientOf,
    Pair,
    Pass,
    StateFields,
    Transform,
)
from ranks.exact import exact_divergence
from ranks.grids import mesh_of, squarest
from ranks.problems import is_same, split
from ranks.test_definition import DTYPES, KINDS, kernel as kernel, logits_of
from ulps import DIVERGENCE, WIDE_DIVERGENCE, worst

DIRECTIONS = ["forward", "reverse", "jensen-shannon"]
ROWS, CLASSES = 9, 37
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "logit_scale": 0.5},
    "none": {"reduction": "none", "logit_scale": 1 / 0.7},
    "rows": {"rows": np.arange(ROWS) % 3 != 1},
    "no rows": {"rows": np.zeros(ROWS, bool)},
}
WEIGHTED = [("jensen-shannon", 0.1), ("jensen-shannon", 0.9), ("jensen-shannon", 0.001)]
by_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def draw(dtype=np.float64, distance=1.0, seed=3, rows=ROWS, classes=CLASSES):
    """Logits of a student and a teacher; both mask some classes of a row."""
    rng = np.random.default_rng(seed)
    student = 3.0 * rng.standard_normal((rows, classes))
    teacher = student + distance * rng.standard_normal((rows, classes))
    student[2:3, ::3] = teacher[2:3, ::3] = -np.inf
    return student.astype(dtype), teacher.astype(dtype)


def both_gradients(student, teacher, dloss=1.0, **options):
    """The divergence and the gradients of plain arrays; the backward passes communicate nothing."""
    divergence, residuals = pce.kl_divergence_forward(student, teacher, **options)
    with pce.trace() as trace:
        gradients = [pce.kl_divergence_backward(dloss, residuals, of=of) for of in ("student", "teacher")]
    assert trace.count(purpose=None) == 0
    return divergence, *gradients


def sharded(comm, student, teacher, how="balanced", **options):
    """The divergence of shards, the gradients of this rank's classes, and the classes."""
    start, stop = split(student.shape[-1], comm.size, how)[comm.rank]
    mine = slice(start, stop)
    shards = [np.ascontiguousarray(each[:, mine]) for each in (student, teacher)]
    more = {"comm": comm, "class_start": start, "num_classes": student.shape[-1]}
    return *both_gradients(*shards, **more, **options), mine


# ------------------------------------------------------------------------------------------------------ right numbers


CORNERS = {
    "far": lambda x, noise: 5 * noise,
    "apart": lambda x, noise: x + 2.0 * noise,
    "mixed": lambda x, noise: x + noise * 10.0 ** np.linspace(-6, 0.5, len(x)),
    "near": lambda x, noise: x + 2.0**-6 * noise,
    "1e-8": lambda x, noise: x + 2e-4 * noise,
    "1e-11": lambda x, noise: x + 5e-6 * noise,
    "shifted": lambda x, noise: x + 2.0**-8 * np.rint(noise) + 64.0,
    "shifted by 10": lambda x, noise: x + 1e-3 * noise + 10.0,
    "shifted by 300": lambda x, noise: x + noise + 300.0,
    "shifted by 1e6": lambda x, noise: x + 1e-3 * noise - 1e6,
    "one class": lambda x, noise: x + 1e-3 * (np.arange(len(x)) == 3),
    "masked": lambda x, noise: np.where(noise < 1.0, x + 0.1 * noise, -np.inf),
    "certain": lambda x, noise: x + 40.0 * (np.arange(len(x)) == 3) + 0.1 * noise,
    "both certain": lambda x, noise: np.where(np.arange(len(x)) == x.argmax(), x + 1e-3, x),
    "other certain": lambda x, noise: x + 120.0 * (np.arange(len(x)) == 3),
}


@pytest.mark.ranks(1)  # the bits are those of any number of ranks
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize(("direction", "beta"), [*((each, 0.5) for each in DIRECTIONS), *WEIGHTED])
def test_divergence_and_gradients_have_all_digits(direction, beta, name, dtype):
    rng = np.random.default_rng(17)
    tolerance = DIVERGENCE if dtype is np.float32 else WIDE_DIVERGENCE
    for scale, classes in itertools.product((1.0, 1 / 1.7), (5, 300)):
        x, noise = 3.0 * rng.standard_normal(classes), rng.standard_normal(classes)
        if name == "both certain":
            x[1] = 30.0
        if name == "shifted":
            x = np.rint(256 * x) / 256
        with np.errstate(over="ignore"):
            student, teacher = x.astype(dtype), CORNERS[name](x.astype(dtype), noise).astype(dtype)
        if name == "masked" and direction == "reverse":
            student = np.where(teacher == -np.inf, -np.inf, student).astype(dtype)
        exact = exact_divergence(*(each.astype(np.float64) for each in (student, teacher)), direction, scale, beta)
        options = {"direction": direction, "logit_scale": scale, "reduction": "none", "beta": beta}
        divergence, *gradients = both_gradients(student[None], teacher[None], **options)
        assert worst(divergence, exact.divergence.near, dtype, None, exact.divergence.rest) <= tolerance
        for got, expected, size in zip(gradients, exact.gradients, exact.sizes, strict=True):
            if dtype is np.float64:  # the difference of two logsumexp errs by some ulp of 1
                size = np.maximum(size, exact.largest * scale)
            assert worst(got[0], expected.near, dtype, size, expected.rest) <= tolerance


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@by_direction
def test_offset_of_any_size_changes_no_number(comm, direction, dtype):
    others, _ = draw(dtype)
    others = np.where(np.isfinite(others), others, dtype(0.0))
    zeros, largest = np.zeros_like(others), float(ml_dtypes.finfo(dtype).max)
    for size, sign, scale in itertools.product((1e4, 3e38, 1e308), (-1, 1), (1.0, 1.1)):
        if size > largest:
            continue
        offset, options = np.full_like(zeros, sign * size / 2), {"direction": direction, "logit_scale": scale}
        for far, near in (((offset, others), (zeros, others)), ((others, offset), (others, zeros))):
            *found, mine = sharded(comm, *far, **options)
            loss, *gradients = dense.kl_divergence_value_and_grad(*near, **options)
            for got, wanted in zip(found, (loss, *(each[:, mine] for each in gradients)), strict=True):
                eps = float(ml_dtypes.finfo(got.dtype).eps)
                np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=WIDE_DIVERGENCE * eps, atol=eps)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@by_direction
def test_huge_logits_stand_beside_ordinary_ones(direction, dtype):
    student, teacher = np.array([[3e38, 3e38, 7.0, -3e38], [5.0, 0.0, -1.0, 3e38]], dtype)
    for pair in ((student[:2], teacher[:2]), (student[:3], teacher[:3]), (student, teacher)):
        expected = dense.kl_divergence_value_and_grad(*pair, direction=direction)
        for got, wanted in zip(both_gradients(*pair, direction=direction), expected, strict=True):
            with np.errstate(over="ignore"):  # a divergence may exceed float32
                np.testing.assert_allclose(got, wanted.astype(dtype), rtol=1e-6, atol=1e-15)


@by_direction
def test_equal_logits_have_no_divergence(comm, direction):
    for dtype in DTYPES:
        logits, _ = draw(dtype)
        others = logits.astype(np.float32) if dtype is not np.float64 else logits
        for teacher in (logits, others):
            divergence, dstudent, dteacher, _ = sharded(
                comm, logits, teacher, direction=direction, logit_scale=1 / 3, reduction="none"
            )
            assert not divergence.any()
            assert not dstudent.any()
            assert not dteacher.any()


@by_direction
def test_special_logits_give_special_divergences(comm, direction):
    student, teacher = draw(np.float32)
    student[0, 3], teacher[1, 3], student[3, 0], teacher[4, 36] = -np.inf, -np.inf, np.nan, np.inf
    student[5], teacher[6] = -np.inf, np.nan
    divergence, dstudent, dteacher, mine = sharded(comm, student, teacher, direction=direction, reduction="none")
    infinite = {"forward": [0], "reverse": [1], "jensen-shannon": []}[direction]
    assert np.flatnonzero(np.isposinf(divergence)).tolist() == infinite
    assert np.flatnonzero(np.isnan(divergence)).tolist() == [3, 4, 5, 6]
    for gradient in (dstudent, dteacher):
        assert np.isnan(gradient[3:7]).all()
        assert not np.isnan(gradient[[2, 7, 8]]).any()
    expected = dense.kl_divergence_value_and_grad(student, teacher, direction=direction, reduction="none")
    for got, wanted in ((dstudent, expected.dstudent), (dteacher, expected.dteacher)):
        np.testing.assert_allclose(got[:3], wanted[:3, mine], rtol=1e-6, atol=1e-7)
    # Rows that do not count may be anything.
    rows = np.isfinite(divergence)
    found = sharded(comm, student, teacher, direction=direction, rows=rows)
    assert all(np.isfinite(each).all() for each in found[:3])
    assert not found[1][~rows].any()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@by_direction
def test_infinite_divergence_has_gradients_of_dense(direction, dtype):
    far, out = -2000.0, -np.inf  # a probability of 0 that float64 has not, and one of a masked class
    student = np.array([[out, 0.3, 1.0], [0.7, out, -1.0], [out, out, 1.0], [out, out, 1.0], [out, 0.3, 1.0]], dtype)
    teacher = np.array([[0.7, 0.1, -1.0], [out, 0.3, 1.0], [0.7, out, 1.0], [0.0, 2.0, out], [far, 0.3, 2.0]], dtype)
    for pair in ((student, teacher), (teacher, student)):
        found = both_gradients(*pair, direction=direction, reduction="none")
        expected = dense.kl_divergence_value_and_grad(*pair, direction=direction, reduction="none")
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)
    without = dense.kl_divergence_value_and_grad(student[1:4], teacher[1:4]).dteacher == 0.0
    assert np.array_equal(without, np.eye(3))  # the classes that the teacher has masked


@pytest.mark.ranks(1, 3)
def test_weighted_divergence_is_that_of_dense(comm):
    for beta, dtype in itertools.product((0.1, 0.3, 0.75), DTYPES):
        student, teacher = draw(dtype)
        student[0, 3], teacher[1, 4] = -np.inf, -np.inf
        options = {"direction": "jensen-shannon", "beta": beta, "reduction": "none"}
        *found, mine = sharded(comm, student, teacher, **options)
        alone = both_gradients(student, teacher, **options)
        expected = dense.kl_divergence_value_and_grad(student, teacher, **options)
        assert is_same(found[0], alone[0])
        for got, whole, wanted in zip(found[1:], alone[1:], expected[1:], strict=True):
            assert is_same(got, np.ascontiguousarray(whole[:, mine]))
            eps, least = (float(getattr(ml_dtypes.finfo(dtype), name)) for name in ("eps", "smallest_subnormal"))
            np.testing.assert_allclose(
                got.astype(np.float64), wanted[:, mine], rtol=8 * eps, atol=max(2.0**-8 * eps, least, 1e-15)
            )
        np.testing.assert_allclose(found[0], expected.divergence, rtol=1e-6, atol=1e-15)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("beta", "direction"), [(0, "forward"), (1, "reverse")])
def test_mean_that_is_one_softmax_gives_kl(comm, beta, direction):
    student, teacher = draw(np.float32)
    *found, _ = sharded(comm, student, teacher, direction="jensen-shannon", beta=beta)
    *expected, _ = sharded(comm, student, teacher, direction=direction)
    *near, _ = sharded(comm, student, teacher, direction="jensen-shannon", beta=abs(beta - 2.0**-20))
    assert all(map(is_same, found, expected))
    # As beta comes near to 0 or 1, so does the divergence: beside KL it has a factor, which goes to 0.
    assert near[0] < 1e-4 * found[0]


# --------------------------------------------------------------------------------------------------------- equal bits


def sums_and_gradients(kernel, student, teacher, transform, single, cuts=()):
    """The results of the loops for two arrays (rows, classes): merged sums of both kinds, and every gradient."""
    how, rows = Pass(StateFields(hold_largest=True), transform, SINGLE), []
    with np.errstate(all="ignore"):
        for x in (teacher, student):
            states = definition.fill_states(x[:, :, None], None, how, ClassWeights(), 0)
            softmax = definition.row_softmax(states, how, None)
            gradient = np.zeros((len(x), len(ROW_GRADIENT)))
            for name, source in {"top": "top", "most": "most", "factor": "normalizer", "exponent": "exponent"}.items():
                gradient[:, ROW_GRADIENT[name]] = softmax[:, ROW_SOFTMAX[source]]
            gradient.view(np.int64)[:, ROW_GRADIENT["column"]] = -1
            rows.append((gradient, *(softmax[:, ROW_SOFTMAX[name]] for name in ("held", "held_nll"))))
        p_rows, q_rows = rows[0][0], rows[1][0]
        held, held_nll = (np.concatenate([rows[1][at], rows[0][at]]) for at in (1, 2))
        difference = definition.logsumexp_differences(held, held_nll, transform)
    rest_of = difference, transform, single
    found = []
    for mean in (None, mean_of(0.5), mean_of(0.1)):
        parts = []
        for start, stop in itertools.pairwise([0, *cuts, student.shape[1]]):
            p, q = (x[:, start:stop, None] for x in (teacher, student))
            parts.append(kernel.divergence_sums(Pair(p, q, p_rows, q_rows, *rest_of, mean)))
        total = parts[0].copy()
        for part in parts[1:]:
            grid = np.ascontiguousarray(total[:, :4])
            kernel.add(np.ascontiguousarray(part[:, :4]), grid)
            total[:, :4], total[:, 4:] = grid, total[:, 4:] + part[:, 4:]
        found.append(total)
    whole = Pair(teacher[:, :, None], student[:, :, None], p_rows, q_rows, *rest_of)
    slope, constant = np.linspace(-1.0, 2.0, len(student)), np.linspace(0.0, 0.1, len(student))
    with np.errstate(invalid="ignore"):
        constant = np.where(np.isfinite(difference[:, 0]), constant, np.nan)
    beside = whole._replace(mean=mean_of(0.1))
    kinds = [(of, pair) for of in (GradientOf.KL_BY_Q, GradientOf.KL_BY_P) for pair in (whole, whole.swapped())]
    kinds += [(GradientOf.JENSEN_SHANNON_BY_Q, pair) for pair in (beside, beside.swapped())]
    for of, pair in kinds:
        out = np.empty(student.shape, student.dtype)
        kernel.write_divergence_gradient(out[:, :, None], pair, of, slope, constant, np.arange(len(student)) != 3)
        found.append(out)
    return found


@cache
def pairs_and_results(kind, dtype):
    """Pairs of logits with what the definition gives for them, which takes most of the time of all kernels."""
    rng = np.random.default_rng(KINDS.index(kind))
    large = Transform(0.25 if dtype is np.float64 else 3.0)  # finite logits times a scale must be finite
    teachers, found = itertools.cycle(["same", "near", "other", "mixed"]), []
    problems = (1, Transform(0.7)), (7, Transform()), (523, Transform()), (523, Transform(0.7)), (523, large)
    for classes, transform in problems:
        student, _ = logits_of(kind, classes, dtype, rng)
        others, _ = logits_of(kind, classes, dtype, rng)
        with np.errstate(all="ignore"):
            nearby = (student.astype(np.float64) * (1 + 1e-3 * rng.standard_normal(student.shape))).astype(dtype)
        mixed = np.where(student > 0, nearby, others)
        drawn = {"same": student, "near": nearby, "other": others, "mixed": mixed}
        teacher = drawn[next(teachers)]
        cuts = sorted(rng.integers(0, classes + 1, 2).tolist())
        for single in {False, dtype is not np.float64}:
            given_pair = student, teacher, transform, single
            found.append((given_pair, cuts, sums_and_gradients(definition, *given_pair)))
    return found


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_loops_of_divergences_have_bits_of_definition(kernel, kind, dtype):
    for given_pair, cuts, expected in pairs_and_results(kind, dtype):
        for got, wanted in zip(sums_and_gradients(kernel, *given_pair, cuts), expected, strict=True):
            assert got.tobytes() == wanted.tobytes()


# ------------------------------------------------------------------------------------------------ arguments and memory


def test_divergence_of_no_rows_is_nan(comm):
    shard = np.zeros((0, 3 if comm.rank == comm.size - 1 else 0), np.float32)
    for given_shard, over in ((shard, comm), (np.zeros((0, 3), np.float32), None)):
        divergence, gradient = pce.kl_divergence_value_and_grad(given_shard, given_shard, comm=over)
        assert np.isnan(divergence)
        assert gradient.shape == given_shard.shape
        assert pce.kl_divergence(given_shard, given_shard, comm=over, reduction="sum") == 0.0


@pytest.mark.parametrize("scale", [2.0**-64, 2.0**64])
def test_scale_at_its_limit_is_taken(scale):
    assert pce.kl_divergence(np.ones((1, 2)), np.ones((1, 2)), logit_scale=scale) == 0.0


WRONG = [
    ({"teacher": np.zeros((ROWS, 2))}, ValueError, "teacher must have the shape of student"),
    ({"teacher": np.zeros((ROWS, CLASSES), int)}, TypeError, "teacher must be float16, bfloat16, float32 or float64"),
    ({"student": np.zeros((ROWS, CLASSES), complex)}, TypeError, "student must be float16"),
    ({"direction": "backward"}, ValueError, "direction must be 'forward', 'reverse' or 'jensen-shannon', got"),
    ({"beta": 0.25}, ValueError, "beta is of direction='jensen-shannon', got beta = 0.25 and direction = 'forward'"),
    ({"direction": "jensen-shannon", "beta": 1.5}, ValueError, r"beta must be 0, or from 2\*\*-64 to 1, got 1.5"),
    ({"direction": "jensen-shannon", "beta": 2.0**-65}, ValueError, "beta must be 0, or from"),
    ({"direction": "jensen-shannon", "beta": np.nan}, ValueError, "beta must be 0, or from"),
    ({"direction": "jensen-shannon", "beta": "1"}, TypeError, "beta"),
    ({"logit_scale": 0.0}, ValueError, "logit_scale must be positive and finite, got 0.0"),
    ({"logit_scale": 1e20}, ValueError, r"logit_scale must be from 2\*\*-64 to 2\*\*64, got 1e\+20"),
    ({"logit_scale": "1"}, TypeError, "logit_scale"),
    ({"reduction": "batchmean"}, ValueError, "reduction must be"),
    ({"rows": np.ones(ROWS)}, TypeError, "rows must be bool, got float64"),
    ({"rows": np.ones(ROWS - 1, bool)}, ValueError, "rows must have the logits' shape without the class axis"),
    ({"axis": 2}, ValueError, "axis = 2 is out of bounds"),
    ({"compute_dtype": np.float16}, TypeError, "compute_dtype must be"),
    ({"softcap": 3.0}, TypeError, "unexpected keyword argument 'softcap'"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG, ids=str)
def test_wrong_divergence_raises_on_every_rank(comm, change, error, text):
    student, teacher = draw(np.float32)
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    right = {"student": student[:, mine], "teacher": teacher[:, mine], "comm": comm, "num_classes": CLASSES}
    wrong = right | change if comm.rank == comm.size - 1 or "softcap" in change else right
    with pytest.raises(error, match=text):
        pce.kl_divergence_value_and_grad(**wrong)
    assert pce.kl_divergence(**right) > 0


@pytest.mark.ranks(1, 2)
@by_direction
def test_cupy_arrays_give_same_divergence(comm, cupy, direction):
    for dtype, options in itertools.product((np.float32, ml_dtypes.bfloat16, np.float64), OPTIONS.values()):
        student, teacher = draw(dtype)
        *expected, mine = sharded(comm, student, teacher, direction=direction, **options)
        shards = [cupy.asarray(np.ascontiguousarray(each[:, mine])) for each in (student, teacher)]
        found = both_gradients(*shards, comm=comm, num_classes=CLASSES, direction=direction, **options)
        for got, wanted in zip(found, expected, strict=True):
            assert isinstance(got, cupy.ndarray)
            assert is_same(cupy.asnumpy(got), wanted)


# ------------------------------------------------------------------------------------------------ distributed arrays


@pytest.mark.parametrize("reproducible", [False, True], ids=["plain", "reproducible"])
@by_direction
def test_divergence_of_distributed_arrays_has_same_bits(comm, direction, reproducible):
    student, teacher = draw(np.float32)
    mesh = mesh_of(comm, *squarest(comm.size))
    for reduction, counts in itertools.product(("mean", "none"), (None, np.arange(ROWS) % 3 != 1)):
        options = {"direction": direction, "reduction": reduction, "rows": counts, "logit_scale": 0.5}
        expected = both_gradients(student, teacher, **options)
        for placed in ({"model": Shard(1)}, {"data": Shard(0), "model": Shard(1)}, {"data": Shard(1)}):
            x, y = (pce.distribute(each, mesh, requires_grad=True, **placed) for each in (student, teacher))
            with pce.reproducible() if reproducible else pce.trace():
                divergence = pce.kl_divergence(x, y, **options)
                pce.sum(divergence).backward()
            assert is_same(divergence.full(), expected[0])
            assert is_same(x.grad.full(), expected[1])
            assert is_same(y.grad.full(), expected[2])
            assert x.grad.placements == y.grad.placements == x.placements
            rows = {dim: place if place == Shard(0) else Replicate() for dim, place in x.placements.items()}
            assert divergence.placements == (rows if reduction == "none" else dict.fromkeys(rows, Replicate()))


def test_plain_array_is_placed_beside_distributed_one(comm):
    student, teacher = draw(np.float32)
    expected = both_gradients(student, teacher)
    mesh = mesh_of(comm, comm.size)
    for at, name in enumerate(("student", "teacher")):
        x = pce.distribute((student, teacher)[at], mesh, requires_grad=True, data=Shard(1))
        arguments = {"student": student, "teacher": teacher} | {name: x}
        with pce.trace() as trace:
            divergence = pce.kl_divergence(**arguments)
            divergence.backward()
        assert is_same(divergence.full(), expected[0])
        assert is_same(x.grad.full(), expected[1 + at])
        assert trace.count() == 2


@by_direction
def test_partial_gradient_keeps_sign_of_zero(comm, direction):
    student, teacher = draw(np.float32)
    expected = both_gradients(student, teacher, dloss=-1.0, direction=direction, reduction="sum")
    assert any((np.signbit(each) & (each == 0)).any() for each in expected[1:])
    mesh = mesh_of(comm, comm.size)
    for placed in ((Replicate(), Shard(1)), (Shard(1), Replicate())):
        pair = [
            pce.distribute(each, mesh, requires_grad=True, data=place)
            for each, place in zip((student, teacher), placed, strict=True)
        ]
        (-pce.kl_divergence(*pair, direction=direction, reduction="sum")).backward()
        assert all(is_same(x.grad.full(), wanted) for x, wanted in zip(pair, expected[1:], strict=True))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"teacher": np.zeros((ROWS, 2))}, ValueError, "teacher must have the shape"),
        ({"teacher": None}, TypeError, "teacher"),
        ({"rows": np.ones(3, bool)}, ValueError, "rows must have the shape"),
        ({"rows": np.ones(ROWS)}, TypeError, "rows must be bool"),
        ({"direction": "sideways"}, ValueError, "direction must be"),
    ],
    ids=str,
)
def test_wrong_distributed_divergence_raises_on_every_rank(comm, change, error, text):
    student, teacher = draw(np.float32)
    x = pce.distribute(student, mesh_of(comm, comm.size), data=Shard(1))
    right = {"student": x, "teacher": teacher}
    with pytest.raises(error, match=text):
        pce.kl_divergence(**right | (change if comm.rank == comm.size - 1 else {}))
    assert pce.kl_divergence(**right).item() > 0
    with pytest.raises(ValueError, match="rows must have the shape"):  # of a teacher that alone is distributed
        pce.kl_divergence(student, x, rows=np.ones(3, bool))
