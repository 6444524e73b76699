"""The arithmetic of the loss: the same bits for any cut of the classes and in every kernel, and how many are right."""

from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from hypothesis import given, settings, strategies as st
import ml_dtypes
import mpmath
import numpy as np
import pytest

from pce_mpi.kernels import compiled, definition
from pce_mpi.kernels.elementary import any_two_product, fma32
from pce_mpi.kernels.interface import (
    DOUBLE,
    ROW_GRADIENT,
    ROW_SOFTMAX,
    SINGLE,
    STATISTICS,
    ClassWeights,
    Pass,
    Precision,
    StateFields,
    Transform,
)
from pce_mpi.kernels.losses import LossTerms
from ulps import LOSS, OPTIONS, errors

SETS = compiled.instruction_sets()
KINDS = ["plain", "below", "zeros", "small", "offset", "far", "huge", "largest", "masked", "certain", "equal"]
KINDS += ["special"]
FIELDS = {
    "plain": StateFields(),
    "weighted": StateFields(held_weight=True),
    "smoothed": StateFields(held_weight=True, weighted_logit=True),
    "probabilities": StateFields(hold_largest=True, held_weight=True, weight=True, weighted_logit=True),
    "softmax": StateFields(hold_largest=True),
    "statistics": StateFields(hold_largest=True, argmax=True, target=True, entropy=True),
}
TRANSFORMS = [Transform(), Transform(0.5), Transform(0.7), Transform(3.0), Transform(1.3, 30.0), Transform(1.0, 50.0)]
TRANSFORMS += [Transform(2.0**-40, 5.0), Transform(2.0**30, 2.0**-30)]  # powers of scale / softcap leave float64
# For states that hold the target apart.
MARGINS = [
    *(Transform(64.0, None, margin) for margin in ((1.0, 0.5, 0.0), (1.35, 0.0, 0.0), (4.0, 0.0, 0.0))),
    *(Transform(0.7, None, margin) for margin in ((1.0, 0.0, 0.35), (-2.5, 900.0, -1.0))),
    Transform(2.0**61, None, (1.0, 1.0, 0.0)),
]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ROWS = 8
_MOST = float(np.finfo(np.float64).max)
EVERY_TERM = LossTerms(*np.linspace(0.1, 0.3, len(LossTerms._fields)).tolist())


@pytest.fixture(params=["NumPy", *SETS], scope="module")
def kernel(request):
    """Each kernel for the host, the compiled one with each instruction set of this processor."""
    if request.param == "NumPy":
        yield definition
    else:
        compiled.choose(request.param)
        yield compiled
        compiled.choose("")


def logits_of(kind, classes, dtype, rng):
    """Eight rows of a kind, and their targets."""
    x = rng.standard_normal((ROWS, classes)) * 4
    targets = rng.integers(0, classes, ROWS)
    rows = np.arange(ROWS)
    if kind == "below":  # some logits of every size far below the others
        low = rng.random(x.shape) < 0.3
        x[low] = -(10.0 ** rng.uniform(1, np.log10(float(ml_dtypes.finfo(dtype).max)), low.sum()))
    elif kind == "zeros":  # 0 above all others, most of which are far below
        x = -(10.0 ** rng.uniform(-1, 4.5, x.shape)) * rng.integers(0, 2, x.shape)
    elif kind == "small":  # some logits of every size near 0
        low = rng.random(x.shape) < 0.3
        x[low] *= 10.0 ** rng.uniform(np.log10(float(ml_dtypes.finfo(dtype).smallest_subnormal)), 0, low.sum())
    elif kind == "offset":
        x += 1e4
    elif kind == "far":
        x *= 3000
    elif kind == "huge":  # among them logits that differ by more than any exponential can tell
        x *= 10.0 ** rng.integers(0, 38, (ROWS, 1))
    elif kind == "largest":  # products with them overflow; some are equal
        x = np.clip(np.rint(x) / 8, -1, 1) * float(ml_dtypes.finfo(dtype).max)
    elif kind == "masked":
        x[rng.random(x.shape) < 0.3] = -np.inf
        x[rows, targets] = 1
    elif kind == "certain":
        x[rows, targets] = 30 + rows
    elif kind == "equal":
        x[:] = rng.standard_normal((ROWS, 1))
        x[rows, targets] += 20
    elif kind == "special":
        x[0, 0], x[1, -1], x[2], x[3] = np.nan, np.inf, -np.inf, np.where(np.arange(classes) == targets[3], 1, -np.inf)
        x[4, targets[4]], x[5, targets[5]], x[6, targets[6]] = -np.inf, np.nan, np.inf
        x[7] = np.where(x[7] < 0, -0.0, 0.0)
    with np.errstate(over="ignore"):
        return x.astype(dtype), targets


class Drawn(NamedTuple):
    """Rows of logits, and all that a kernel takes besides; weights and probabilities where the fields need them."""

    logits: np.ndarray
    targets: np.ndarray
    fields: StateFields
    transform: Transform
    precision: Precision
    weights: ClassWeights

    @property
    def how(self) -> Pass:
        return Pass(self.fields, self.transform, self.precision)

    @property
    def has_targets(self) -> bool:
        return self.fields.target or not self.fields.hold_largest

    def states(self, kernel, start=0, stop=None):
        """The states of a shard of the classes."""
        stop = self.logits.shape[1] if stop is None else stop
        weight, probabilities, *others = self.weights
        mine = ClassWeights(
            None if weight is None else weight[start:stop].copy(),
            None if probabilities is None else probabilities[:, start:stop],
            *others,
        )
        columns = self.targets - start if self.has_targets else None  # others' are no columns here
        logits = self.logits[:, start:stop, None]
        return kernel.fill_states(logits, columns, self.how, mine, start)

    def class_weights(self, kernel):
        """The sum of all weights, if it is not in the states."""
        if not self.fields.weighted_logit or self.fields.weight:
            return None
        weight = self.weights.weight
        return kernel.sums_of(np.ones(self.logits.shape[1]) if weight is None else weight)[0]

    def softmax(self, kernel, states):
        return kernel.row_softmax(states, self.how, self.class_weights(kernel))


@st.composite
def drawn(draw, kinds=KINDS, most=60):
    """A problem, from few draws."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    name, dtype = draw(st.sampled_from(sorted(FIELDS))), draw(st.sampled_from(DTYPES))
    classes = draw(st.integers(1, most))
    kind = draw(st.sampled_from(kinds))
    logits, targets = logits_of(kind, classes, dtype, rng)
    wide = dtype == np.float64 or draw(st.integers(0, 4)) == 0
    weight = rng.random(classes) * 10.0 ** rng.integers(-20, 3) if draw(st.booleans()) else None
    if weight is not None and draw(st.integers(0, 3)) == 0:  # of every size
        weight = np.ldexp(1.0 - rng.random(classes) / 2, rng.integers(-1073, 1025, classes))
    # Not positive, or no number; not in rows of only -inf, of which a class and no class weigh differently.
    if weight is not None and kind != "special" and draw(st.booleans()):
        weight *= rng.choice([1.0, -1.0, 0.0, np.nan, np.inf, -np.inf], classes, p=[0.5, 0.3, 0.1, 0.04, 0.03, 0.03])
    probabilities = None
    if name == "probabilities":
        probabilities = rng.random((ROWS, classes, 1)).astype(dtype)
        if draw(st.booleans()):
            probabilities[:] = np.arange(classes)[:, None] == targets[:, None, None]
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    weights = ClassWeights(weight, probabilities, smoothing, classes)
    precision = DOUBLE if wide else SINGLE
    transforms = TRANSFORMS if FIELDS[name].hold_largest else TRANSFORMS + MARGINS
    transform = draw(st.sampled_from(transforms))
    if transform in MARGINS and draw(st.booleans()):
        with np.errstate(invalid="ignore"):
            logits = np.sin(logits.astype(np.float64)).astype(dtype)
    return Drawn(logits, targets, FIELDS[name], transform, precision, weights)


def same_bits(found, expected):
    """True if two arrays have equal bits, but for which of the many nan a nan is."""
    return found.dtype == expected.dtype and np.array_equal(_bits(found), _bits(expected))


def _bits(array):
    if array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16:
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("name", FIELDS)
def test_state_takes_at_most_96_bytes(name):
    sizes = {"plain": 40, "weighted": 48, "smoothed": 80, "probabilities": 96, "softmax": 40, "statistics": 88}
    assert FIELDS[name].dtype.itemsize == sizes[name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FIELDS)
def test_special_values_are_no_floating_point_errors(kernel, kind, name):
    rng = np.random.default_rng(0)
    logits, targets = logits_of(kind, 7, np.float64, rng)
    probabilities = rng.random((ROWS, 7, 1)) if name == "probabilities" else None
    problem = Drawn(logits, targets, FIELDS[name], Transform(), DOUBLE, ClassWeights(None, probabilities, 0.1, 7))
    with np.errstate(all="raise"):
        parts = [problem.states(kernel, 0, 3), problem.states(kernel, 3)]
        kernel.merge(*parts, problem.how)
        softmax = problem.softmax(kernel, parts[1])
        kernel.row_losses(softmax, problem.fields, np.ones(ROWS, np.bool_), EVERY_TERM)


@settings(max_examples=150)
@given(problem=drawn(), seed=st.integers(0, 2**32))
def test_states_of_any_cut_merge_to_same_bits(kernel, problem, seed):
    rng, classes = np.random.default_rng(seed), problem.logits.shape[1]
    whole = problem.states(kernel)
    cuts = [0, *np.sort(rng.integers(0, classes + 1, rng.integers(0, 7))).tolist(), classes]
    parts = [problem.states(kernel, *ends) for ends in pairwise(cuts)]
    before = [part.tobytes() for part in parts]
    kept = list(parts)
    while len(parts) > 1:  # a random tree
        a, b = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
        union = b.copy()
        kernel.merge(a, union, problem.how)
        parts.append(union)
    for name in problem.fields.names:
        assert parts[0][name].tobytes() == whole[name].tobytes(), name
    assert [part.tobytes() for part in kept] == before


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=100)
@given(problem=drawn(), seed=st.integers(0, 2**32))
def test_compiled_kernel_has_bits_of_definition(name, problem, seed):
    compiled.choose(name)
    states, expected = problem.states(compiled), problem.states(definition)
    for field in problem.fields.names:
        assert states[field].tobytes() == expected[field].tobytes(), field
    softmax, wanted = problem.softmax(compiled, states), problem.softmax(definition, states)
    pairs = (compiled, softmax), (definition, wanted)
    bad = np.isnan(wanted[:, ROW_SOFTMAX["normalizer"]])
    for field, column in ROW_SOFTMAX.items():
        counts = ~bad if field == "exponent" else np.ones(ROWS, np.bool_)
        assert same_bits(softmax[counts, column], wanted[counts, column]), field
    rng = np.random.default_rng(seed)
    fields, terms, valid = problem.fields, LossTerms(*EVERY_TERM[: None if seed % 2 else 2]), np.arange(ROWS) != 3
    assert same_bits(*(kernel.row_losses(of, fields, valid, terms) for kernel, of in pairs))
    if fields.entropy:
        check_statistics(pairs, problem.targets, valid, rng)
    upstream = rng.standard_normal(ROWS if seed % 3 else 1) * 10.0 ** rng.integers(-6, 7)
    given = (fields, valid, problem.targets, upstream, np.array([1.7]), problem.transform.scale, terms)
    computed, rows = (kernel.row_gradients(of, *given) for kernel, of in pairs)
    if fields.entropy:
        fill_gradients_of_statistics(rows, wanted, problem.targets, rng)
    for dtype in {problem.logits.dtype, np.dtype(np.float32)}:
        for inner in (1, 2):  # consecutive, and not
            found, right = (np.empty((ROWS, problem.logits.shape[1], inner), dtype)[:, :, :1] for _ in range(2))
            definition.write_gradient(right, problem.logits[:, :, None], rows, problem.how, problem.weights)
            for each in [rows] if fields.entropy else [rows, computed]:
                compiled.write_gradient(found, problem.logits[:, :, None], each, problem.how, problem.weights)
                assert same_bits(found, right), (dtype, inner, each is rows)
    compiled.choose("")


def check_statistics(pairs, targets, valid, rng):
    """Statistics of rows, and the rows of their gradients, from each kernel and the softmax that it made."""
    for dtype in np.float32, np.float64:
        mine, expected = (kernel.row_statistics(of, valid, dtype) for kernel, of in pairs)
        assert all(map(same_bits, mine, expected))
    upstream = [rng.standard_normal(1), rng.standard_normal(ROWS), rng.integers(0, 2, ROWS) * 1.0]
    for columns in targets, None:
        given = valid, columns, range(2, 9), 0.7, dict(zip(STATISTICS, upstream, strict=True))
        mine, expected = (kernel.statistics_gradients(of, *given) for kernel, of in pairs)
        counts = np.isfinite(expected[:, ROW_GRADIENT["factor"]])
        assert same_bits(mine[counts], expected[counts])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "of all kinds"])
@pytest.mark.parametrize("classes", [1, 40])
def test_plain_loss_has_bits_of_definition(kernel, classes, kind, dtype):
    # It has functions of its own, which handle a vector of rows at a time: all rows alike, or of kinds in any order.
    rng, precision = np.random.default_rng(7), DOUBLE if dtype == np.float64 else SINGLE
    blocks = [
        logits_of(each, classes, dtype, rng) for each in ([kind] * 12 if kind in KINDS else KINDS + ["plain"] * 3)
    ]
    order = rng.permutation(len(blocks) * ROWS - 3)  # the last rows fill no vector
    logits, targets = (np.concatenate(each)[order] for each in zip(*blocks, strict=True))
    problem = Drawn(logits, targets, StateFields(), Transform(), precision, ClassWeights())
    found, rows = [], len(logits)
    valid, upstream, divisor = np.arange(rows) % 5 != 2, np.linspace(-2, 2, rows), np.array([3.0])
    for each in kernel, definition:
        states = cut_at(problem, each, [(0, classes // 3), (classes // 3, classes)])
        softmax = problem.softmax(each, states)
        results = [states.view(np.uint64)]
        for terms in LossTerms(), LossTerms(0.1), *(LossTerms(**{name: 0.3}) for name in LossTerms._fields[2:]):
            results.append(each.row_losses(softmax, StateFields(), valid, terms))
            of = each.row_gradients(softmax, StateFields(), valid, targets, upstream, divisor, 1.0, terms)
            results.append(np.empty_like(logits)[:, :, None])
            each.write_gradient(results[-1], logits[:, :, None], of, problem.how, ClassWeights())
        found.append(results)
    for mine, expected in zip(*found, strict=True):
        assert same_bits(mine, expected)


@pytest.mark.parametrize("far", [-(2**31), -(2**32), -(2**40), 2**32])
def test_column_of_far_shard_is_no_column(kernel, far):
    logits, targets = logits_of("plain", 6, np.float32, np.random.default_rng(3))
    for fields in StateFields(), StateFields(held_weight=True):
        problem = Drawn(logits, targets + far, fields, Transform(), SINGLE, ClassWeights())
        elsewhere = Drawn(logits, targets * 0 - 1, fields, Transform(), SINGLE, ClassWeights())
        assert problem.states(kernel).tobytes() == elsewhere.states(kernel).tobytes()


@pytest.mark.parametrize("precision", [SINGLE, DOUBLE], ids=["float32", "float64"])
def test_zero_factor_of_gradient_has_no_sign(kernel, precision):
    logits = np.tile(np.array([-np.inf, 0.3, 1.0, -200.0], precision.dtype), (ROWS, 5))
    targets, weight = np.arange(ROWS), np.ones(20)
    weight[::2] = 0.0
    for fields in StateFields(), StateFields(held_weight=True), StateFields(held_weight=True, weighted_logit=True):
        problem = Drawn(logits, targets, fields, Transform(), precision, ClassWeights(weight))
        for upstream, divisor in (-0.0, 3.0), (-2.0, 3.0), (0.0, -3.0), (-0.0, -3.0):
            found = []
            for each in kernel, definition:
                softmax = problem.softmax(each, problem.states(each))
                given = fields, np.ones(ROWS, np.bool_), targets, np.array([upstream]), np.array([divisor])
                rows = each.row_gradients(softmax, *given, 1.0, LossTerms())
                found.append(np.empty_like(logits)[:, :, None])
                each.write_gradient(found[-1], logits[:, :, None], rows, problem.how, problem.weights)
            assert same_bits(*found), (fields, upstream, divisor)


@pytest.mark.parametrize("classes", [5, 900, 5000])
def test_changing_grids_have_bits_of_definition(kernel, classes):
    # The exponentials of a row are added on the grid of the row before, and again if it has another one.
    rng = np.random.default_rng(classes)
    offsets = np.array([0.0, 30.0, -40.0, 14.2, 14.3, 500.0, -np.inf, 3.0])
    logits = (rng.standard_normal((ROWS, classes)) + offsets[:, None]).astype(np.float32)
    logits[:, classes // 2 :] += np.float32(25.0)  # a coarser grid
    logits[7, 3] = np.nan
    targets = rng.integers(0, classes, ROWS)
    for fields in (StateFields(), StateFields(hold_largest=True), StateFields(held_weight=True, weighted_logit=True)):
        for transform in (Transform(), Transform(0.5), Transform(0.7)):
            problem = Drawn(logits, targets, fields, transform, SINGLE, ClassWeights())
            assert problem.states(kernel).tobytes() == problem.states(definition).tobytes(), (fields, transform)


def fill_gradients_of_statistics(rows, softmax, targets, rng):
    """The columns that only gradients of statistics have."""
    for name in ("constant", "slope", "target_gradient"):
        rows[:, ROW_GRADIENT[name]] = rng.standard_normal(len(rows))
    rows[:, ROW_GRADIENT["origin"]] = softmax[:, ROW_SOFTMAX["held"]]
    rows.view(np.int64)[:, ROW_GRADIENT["target"]] = targets


@cache
def long_rows():
    """Problems of rows of several chunks, and their states by the definition, merged from those of two parts."""
    rng, found = np.random.default_rng(5), []
    for kind in KINDS:
        for name, fields in FIELDS.items():
            logits, targets = logits_of(kind, 9001, np.float32, rng)
            probabilities = rng.random((ROWS, 9001, 1)).astype(np.float32) if name == "probabilities" else None
            weights = ClassWeights(None, probabilities, 0.0, 9001)
            problem = Drawn(logits, targets, fields, Transform(), SINGLE, weights)
            half, union = problem.states(definition, 0, 4099), problem.states(definition, 4099)
            definition.merge(half, union, problem.how)
            found.append((kind, name, problem, union.tobytes()))
    return found


def test_rows_longer_than_a_chunk_have_same_bits(kernel):
    for kind, name, problem, expected in long_rows():
        assert problem.states(kernel).tobytes() == expected, (kind, name)


CUTS = [[(0, 3)], [(0, 0), (0, 3)], [(0, 3), (3, 3)], [(0, 1), (1, 3)], [(1, 3), (0, 1)], [(2, 3), (0, 0), (0, 2)]]


def cut_at(problem, kernel, cuts):
    """The states of shards of the classes, merged one after the other."""
    union, *parts = (problem.states(kernel, *ends) for ends in cuts)
    for part in parts:
        kernel.merge(part, union, problem.how)
    return union


def weighted(logits, weight, precision):
    """A problem of three classes whose rows have these logits, with probability targets of these weights."""
    rows = np.broadcast_to(np.array(logits, precision.dtype), (ROWS, 3)).copy()
    ones = np.ones((ROWS, 3, 1), precision.dtype)
    weights = ClassWeights(np.array(weight), ones, 0.0, 3)
    return Drawn(rows, np.zeros(ROWS, int), FIELDS["probabilities"], Transform(), precision, weights)


@pytest.mark.parametrize("precision", [SINGLE, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "weight", [(-1.0, -2.0, -3.0), (np.nan, -1.0, 2.0), (np.nan,) * 3, (0.0, -1.0, np.inf)], ids=str
)
def test_rows_of_masked_classes_are_nan_however_cut(kernel, weight, precision):
    # A class of negative weight, or of none that is a number, loses against no class at all.
    problem = weighted([-np.inf] * 3, weight, precision)
    valid, terms = np.ones(ROWS, np.bool_), LossTerms()
    for cuts in CUTS:
        softmax = problem.softmax(kernel, cut_at(problem, kernel, cuts))
        losses = kernel.row_losses(softmax, problem.fields, valid, terms)
        rows = kernel.row_gradients(softmax, problem.fields, valid, None, np.ones(1), np.ones(1), 1.0, terms)
        out = np.zeros_like(problem.logits)[:, :, None]
        kernel.write_gradient(out, problem.logits[:, :, None], rows, problem.how, problem.weights)
        assert np.isnan(losses[0]).all(), cuts
        assert np.isnan(out).all(), cuts


@pytest.mark.parametrize("precision", [SINGLE, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("nan", [0, 1, 2])
def test_weight_that_is_nan_loses_ties(kernel, nan, precision):
    weight = np.array([-4.0, -5.0, -6.0])
    weight[nan] = np.nan
    problem = weighted([1.5] * 3, weight, precision)
    whole = cut_at(problem, kernel, CUTS[0])
    assert (whole["held_weight"] == np.nanmax(weight)).all()
    for cuts in CUTS:
        assert cut_at(problem, kernel, cuts).tobytes() == whole.tobytes(), cuts


def test_nan_of_class_held_has_one_pattern(kernel):
    rows = np.zeros((1, len(ROW_GRADIENT)))
    rows[:, ROW_GRADIENT["valid"]] = np.array(1).view(np.float64)
    rows[:, ROW_GRADIENT["held_gradient"]] = -np.float64(np.nan)
    gradient = np.empty((1, 2, 1))
    kernel.write_gradient(gradient, np.zeros((1, 2, 1)), rows, Pass(StateFields(), Transform(), DOUBLE), ClassWeights())
    assert gradient[0, 0].tobytes() == np.array(np.nan).tobytes()


def test_infinite_weight_makes_gradient_of_its_class_nan():
    weights = ClassWeights(np.array([np.inf, 1.0, 1.0]))
    problem = Drawn(np.ones((ROWS, 3)), np.zeros(ROWS, int), FIELDS["weighted"], Transform(), DOUBLE, weights)
    given = problem.fields, np.ones(ROWS, np.bool_), problem.targets, np.ones(1), np.ones(1), 1.0, LossTerms()
    rows = definition.row_gradients(problem.softmax(definition, problem.states(definition)), *given)
    assert np.isnan(rows[:, ROW_GRADIENT["held_gradient"]]).all()


@pytest.mark.parametrize("precision", [SINGLE, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("scale", [2.0**60, 0.7 * 2.0**63, 2.0**100])
def test_entropy_of_logits_scaled_below_huge(kernel, scale, precision):
    rows = np.array([[-2.0, -2.0, -2.0], [-4.0, -2.0, -2.0], [-2.0, -4.0, -8.0], [-3.0, -np.inf, -3.0]] * 2)
    classes_at_top = np.array([3, 2, 1, 2] * 2)
    logits = rows.astype(precision.dtype)
    fields, transform = FIELDS["statistics"], Transform(scale)
    problem = Drawn(logits, np.zeros(ROWS, int), fields, transform, precision, ClassWeights())
    whole = cut_at(problem, kernel, CUTS[0])
    entropy = problem.softmax(kernel, whole)[:, ROW_SOFTMAX["entropy"]]
    np.testing.assert_allclose(entropy, np.log(classes_at_top), rtol=1e-15, atol=0)
    expected = problem.softmax(definition, cut_at(problem, definition, CUTS[0]))
    assert same_bits(problem.softmax(kernel, whole)[:], expected)
    for cuts in CUTS:
        assert cut_at(problem, kernel, cuts).tobytes() == whole.tobytes(), cuts


def test_entropy_of_equal_huge_logits_is_logarithm(kernel):
    rng = np.random.default_rng(0)
    for _ in range(100):
        classes = int(rng.integers(2, 6))
        scale = float(10.0 ** rng.uniform(-5, 0))
        least = int(62 - np.log2(scale))
        values = np.append(np.ldexp(1 + rng.random(ROWS - 1), rng.integers(least, 1024, ROWS - 1)), _MOST)
        logits = np.repeat(values[:, None] * rng.choice([-1.0, 1.0], (ROWS, 1)), classes, axis=1)
        fields = FIELDS["statistics"]
        problem = Drawn(logits, np.zeros(ROWS, int), fields, Transform(scale), DOUBLE, ClassWeights())
        entropy = problem.softmax(kernel, problem.states(kernel))[:, ROW_SOFTMAX["entropy"]]
        np.testing.assert_allclose(entropy, np.log(classes), rtol=1e-15, atol=0)


def test_scaled_logits_near_largest_float64_keep_digits(kernel):
    distances = np.linspace(0, 4, ROWS)[:, None] * 2.0**990
    logits, scale = _MOST - distances * [0.0, 1.0], 1e-300
    targets = np.ones(ROWS, int)
    problem = Drawn(logits, targets, FIELDS["plain"], Transform(scale), DOUBLE, ClassWeights())
    loss = problem.softmax(kernel, problem.states(kernel))[:, ROW_SOFTMAX["held_nll"]]
    with mpmath.workprec(200):
        z = [[mpmath.mpf(scale) * mpmath.mpf(x) for x in row] for row in logits.tolist()]
        expected = [float(mpmath.log1p(mpmath.exp(other - held))) for other, held in z]
    assert errors(loss, expected, np.float64).max() <= LOSS


def test_smoothed_loss_with_largest_weight_is_finite(kernel):
    weights = ClassWeights(np.array([1.0, _MOST]), None, 1e-10, 2)
    problem = Drawn(np.ones((ROWS, 2)), np.zeros(ROWS, int), FIELDS["smoothed"], Transform(), DOUBLE, weights)
    softmax = problem.softmax(kernel, problem.states(kernel))
    np.testing.assert_allclose(softmax[:, ROW_SOFTMAX["weighted_nll"]], _MOST * np.log(2), rtol=1e-15)


def test_error_of_any_product_is_rounded_once():
    rng = np.random.default_rng(0)
    a, b = (np.ldexp(rng.uniform(-1, 1, 4000), rng.integers(-1074, 1025, 4000)) for _ in range(2))
    a[:10], a[10:20], a[20:30] = _MOST, np.nextafter(_MOST, 0), 0.0
    exponents = rng.integers(-1090, -900, 3000)  # of products, most of which have subnormal errors
    b[1000:] = np.ldexp(rng.uniform(-1, 1, 3000), exponents - np.frexp(a[1000:])[1])
    with np.errstate(all="ignore"):
        products, rests = any_two_product(a, b)
    finite = np.isfinite(products) & np.isfinite(b)
    assert finite.sum() > 3000
    for x, y, p, rest in zip(*(array[finite].tolist() for array in (a, b, products, rests)), strict=True):
        assert rest == float(Fraction(x) * Fraction(y) - Fraction(p)), (x.hex(), y.hex())


def test_losses_at_any_odds_keep_digits(kernel):
    others = np.linspace(30, 50, 500)  # at odds of 2**60 the loss is computed in another way
    problem = Drawn(
        np.stack([0 * others, others], 1), 0 * others.astype(int), FIELDS["plain"], Transform(), DOUBLE, ClassWeights()
    )
    loss = problem.softmax(kernel, problem.states(kernel))[:, ROW_SOFTMAX["held_nll"]]
    assert errors(loss, [float(mpmath.log1p(mpmath.exp(z))) for z in others], np.float64).max() <= LOSS


def test_weighted_logits_near_largest_float64_keep_digits(kernel):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, 9)) * 2.0 ** rng.integers(780, 1000, (ROWS, 1))
    weights = ClassWeights(rng.random(9), None, 0.1, 9)
    problem = Drawn(logits, np.arange(ROWS), FIELDS["smoothed"], Transform(), DOUBLE, weights)
    softmax = problem.softmax(kernel, problem.states(kernel))
    expected = [
        float(
            sum(
                Fraction(weight) * (Fraction(row.max()) - Fraction(z))
                for weight, z in zip(weights.weight, row, strict=True)
            )
        )
        for row in logits
    ]
    assert errors(softmax[:, ROW_SOFTMAX["weighted_nll"]], expected, np.float64).max() <= OPTIONS


@pytest.mark.parametrize("ignore_index", [-100, 3, 5, 2**70, -(2**70)])
def test_rows_count_unless_target_is_ignored(kernel, ignore_index):
    for numbers in ([3, -100, 7, 3], [3, 3], [7, 2**62], [-(2**63)], []):
        targets = np.array(numbers, np.int64)
        valid, all_valid, highest = kernel.valid_rows(targets, ignore_index)
        counted = [target for target in numbers if target != ignore_index]
        assert valid.tolist() == [target != ignore_index for target in numbers]
        assert all_valid is (len(counted) == len(numbers))
        assert highest == max((target % 2**64 for target in counted), default=0)


@pytest.mark.parametrize("mean", [True, False])
def test_loss_is_quotient_of_sums(kernel, mean):
    for losses, weights in ([3.0, 5.0], [0.5, 2.0]), ([np.inf], [1.0]), ([0.0], [0.0]), ([np.nan], [1.0]), ([], []):
        divisor = (sum(weights) or np.nan) if mean else 1.0
        for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
            found = kernel.loss_of(kernel.sums_of(np.array(losses), np.array(weights)), mean, dtype)
            np.testing.assert_array_equal(found[0], dtype.type(sum(losses) / divisor))
            np.testing.assert_array_equal(found[1], [divisor])
            assert found[0].dtype == dtype
    loss, _ = kernel.loss_of(kernel.sums_of(np.array([np.inf]), np.array([np.inf])), True, np.dtype(np.float64))
    assert loss.tobytes() == np.array(np.nan).tobytes()  # processors make one with a sign


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "probabilities"])
def test_class_axis_not_last_has_same_bits(kernel, dtype, name):
    rng, classes, copies = np.random.default_rng(6), 1100, 22
    logits, targets = logits_of("certain", classes, dtype, rng)
    probabilities = rng.random((ROWS, classes, 1)).astype(dtype) if name == "probabilities" else None
    precision = DOUBLE if dtype == np.float64 else SINGLE
    problem = Drawn(logits, targets, FIELDS[name], Transform(), precision, ClassWeights(None, probabilities))
    states = problem.states(definition)

    def rows_of(kernel, copies):
        softmax, every, one = problem.softmax(kernel, np.tile(states, copies)), np.ones(ROWS * copies, bool), np.ones(1)
        given = problem.fields, every, np.tile(targets, copies), one, one, 1.0, LossTerms()
        return kernel.row_gradients(softmax, *given)

    def placed(values):  # the rows many times over, (2, classes, rows / 2)
        many = np.tile(values, (copies, 1)).reshape(2, -1, classes)
        return np.ascontiguousarray(many.transpose(0, 2, 1))

    weights = ClassWeights(None, None if probabilities is None else placed(probabilities[:, :, 0]))
    columns = np.tile(targets, copies) if problem.has_targets else None
    found = kernel.fill_states(placed(logits), columns, problem.how, weights, 0)
    assert found.tobytes() == np.tile(states, copies).tobytes()
    expected = np.empty((ROWS, classes, 1), dtype)
    definition.write_gradient(expected, logits[:, :, None], rows_of(definition, 1), problem.how, problem.weights)
    for rows in rows_of(definition, copies), rows_of(kernel, copies):
        out = placed(logits)
        kernel.write_gradient(out, out, rows, problem.how, weights)
        assert same_bits(out, placed(expected[:, :, 0]))


@given(seed=st.integers(0, 2**32), special=st.lists(st.sampled_from([np.inf, -np.inf, np.nan, 0.0]), max_size=3))
def test_sums_have_same_bits_in_any_order(kernel, seed, special):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(20) * 10.0 ** rng.integers(-30, 30, 20)
    numbers = np.append(numbers, special)
    shuffled, cut = rng.permutation(numbers), int(rng.integers(0, len(numbers) + 1))
    sums = kernel.sums_of(numbers, shuffled[:cut].copy(), shuffled[cut:].copy())
    total = sums[2:].copy()
    kernel.add(sums[1:2], total)
    assert total.tobytes() == sums[:1].tobytes()
    assert sums.tobytes() == definition.sums_of(numbers, shuffled[:cut], shuffled[cut:]).tobytes()
    value = kernel.loss_of(sums[:2], False, np.dtype(np.float64))[0]
    if special:
        assert np.array_equal(value, np.sum(special) if not np.all(np.isfinite(special)) else value, equal_nan=True)
    if np.all(np.isfinite(numbers)):
        assert value == float(sum((Fraction(number) for number in numbers.tolist()), Fraction(0)))


@pytest.mark.parametrize("near", ["any", "a middle"])
def test_fma32_rounds_the_exact_sum_once(near):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    c = (rng.standard_normal(1000) * 2.0 ** rng.integers(-30, 30, 1000)).astype(np.float32)
    if near == "a middle":  # a b is 2^24 + 1, and c too small for float64 to see it beside that
        a, b = np.full(1000, 97 * 257, np.float32), np.full(1000, 673, np.float32)
        c = (np.sign(c) * 2.0 ** rng.integers(-149, -40, 1000)).astype(np.float32)
    found = fma32(a, b, c)
    for x, y, z, result in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        beside = [np.nextafter(result, np.float32(end)) for end in (-np.inf, np.inf)]
        error = abs(Fraction(float(result)) - exact)
        assert all(error <= abs(Fraction(float(other)) - exact) for other in beside)


# Ulps of the precision's dtype, of the result itself.
LIMITS = {SINGLE: {"loss": 1, "gradient": 2}, DOUBLE: {"loss": 4, "gradient": 4}}


def ulps(found, exact, dtype):
    return abs(float((mpmath.mpf(float(found)) - exact) / mpmath.mpf(float(np.spacing(dtype(abs(float(exact))))))))


@pytest.mark.parametrize("kind", ["plain", "offset", "certain", "equal", "far"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("classes", [2, 300])
def test_loss_and_gradient_have_their_bits(kind, dtype, classes):
    precision, rng = (DOUBLE if dtype == np.float64 else SINGLE), np.random.default_rng(classes)
    x, targets = logits_of(kind, classes, dtype, rng)
    worst = {"loss": 0.0, "gradient": 0.0}
    for transform in TRANSFORMS[:3]:
        problem = Drawn(x, targets, StateFields(), transform, precision, ClassWeights())
        softmax = problem.softmax(definition, problem.states(definition))
        held_nll, held_minus_one = (softmax[:, ROW_SOFTMAX[name]] for name in ("held_nll", "held_minus_one"))
        one, every = np.ones(1), np.ones(ROWS, np.bool_)
        rows = definition.row_gradients(softmax, StateFields(), every, targets, one, one, 1.0, LossTerms())
        gradient = definition.gradient_of(x, rows, problem.how)
        with mpmath.workprec(200):
            for row, target in enumerate(targets):
                z = [mpmath.mpf(float(value)) * mpmath.mpf(transform.scale) for value in x[row]]
                exps = [mpmath.e ** (value - z[target]) for value in z]
                total = sum(exps)
                odds = sum(e for index, e in enumerate(exps) if index != target)
                if odds < 1e-30:
                    assert 0 <= held_nll[row] < 1e-29
                    continue
                worst["loss"] = max(worst["loss"], ulps(dtype(held_nll[row]), mpmath.log1p(odds), dtype))
                worst["gradient"] = max(worst["gradient"], ulps(dtype(held_minus_one[row]), -odds / total, dtype))
                for index in rng.integers(0, classes, 20):
                    if index != target and exps[index] / total > 1e-30:
                        error = ulps(gradient[row, index], exps[index] / total, dtype)
                        worst["gradient"] = max(worst["gradient"], error)
    assert all(worst[what] <= LIMITS[precision][what] for what in worst), worst


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_more_classes_than_22_bits_count(dtype):
    classes = 2**22 + 5
    logits = np.full((1, classes, 1), 3.0, dtype)
    how = Pass(StateFields(weighted_logit=True), Transform(), DOUBLE if dtype == np.float64 else SINGLE)
    states = compiled.fill_states(logits, np.array([7]), how, ClassWeights(), 0)
    weights = compiled.sums_of(np.array([float(classes)]))[0]
    softmax = compiled.row_softmax(states, how, weights)[0]
    loss = np.log(float(classes))
    assert softmax[ROW_SOFTMAX["odds"]] == pytest.approx(classes - 1, rel=1e-7 if dtype == np.float32 else 1e-15)
    assert softmax[ROW_SOFTMAX["held_nll"]] == pytest.approx(loss, rel=1e-7 if dtype == np.float32 else 1e-15)
    assert softmax[ROW_SOFTMAX["weighted_nll"]] == pytest.approx(classes * loss, rel=1e-7)


def test_large_gradient_in_memory_off_any_alignment(kernel):
    rows, classes = 2**22 // 2**14, 2**12
    logits = np.random.default_rng(0).standard_normal((rows, classes, 1), np.float32)
    out = np.zeros(logits.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(logits.shape)
    how, targets, one = Pass(StateFields(), Transform(), SINGLE), np.zeros(rows, int), np.ones(1)
    softmax = kernel.row_softmax(kernel.fill_states(logits, targets, how, ClassWeights(), 0), how, None)
    gradient = kernel.row_gradients(softmax, how.fields, np.ones(rows, bool), targets, one, one, 1.0, LossTerms())
    kernel.write_gradient(out, logits, gradient, how, ClassWeights())
    expected = np.empty_like(logits)
    kernel.write_gradient(expected, logits, gradient, how, ClassWeights())
    assert same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_larger_than_caches_has_same_bits(kernel, dtype):
    # It is written past the caches, but for the ends of rows: `out` is a number off any alignment.
    rows, classes = 2**22 // 2**14 + 9, 2**14 // np.dtype(dtype).itemsize + 5
    memory = np.zeros(rows * classes + 1, dtype)
    out = memory[1:].reshape(rows, classes, 1)
    logits = np.tile(logits_of("below", classes, dtype, np.random.default_rng(2))[0], (rows // ROWS + 1, 1))[:rows]
    logits[0, :7] = -np.inf
    softmax, fields = np.zeros((rows, len(ROW_SOFTMAX))), StateFields()
    softmax[:, ROW_SOFTMAX["normalizer"]], softmax[:, ROW_SOFTMAX["most"]] = 1e-3, 20
    given = np.arange(rows) % 5 != 4, np.arange(rows) % classes, np.linspace(-1, 1, rows), np.array([1.7])
    gradient = definition.row_gradients(softmax, fields, *given, 1.0, LossTerms())
    how = Pass(fields, Transform(), DOUBLE if dtype == np.float64 else SINGLE)
    kernel.write_gradient(out, logits[:, :, None], gradient, how, ClassWeights())
    in_place = logits.copy()
    for row in range(0, rows, 50):
        few = slice(row, row + 50)
        kernel.write_gradient(in_place[few, :, None], logits[few, :, None], gradient[few], how, ClassWeights())
    assert memory[0] == 0
    assert same_bits(out[:, :, 0], in_place)
    assert np.count_nonzero(in_place) > rows * classes / 2
