"""Comparison of kernels with the definition: the same bits, from random problems in any memory."""

from dataclasses import dataclass
import itertools

import ml_dtypes
import numpy as np

from kernels.device_arrays import rows_in_memory
from kernels.places import OnGpu, OnHost
from pce_mpi.kernels import definition
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
from ranks.test_definition import EVERY_TERM, FIELDS, MARGINS, ROWS, fill_gradients_of_statistics, logits_of

DTYPES = [np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
TRANSFORMS = [
    *(Transform(scale) for scale in (1.0, 0.5, 3.0, 2.0**-30, 2.0**60)),  # scales of float32
    *(Transform(scale) for scale in (0.7, 2.0**-70, 2.0**70)),
    Transform(1.3, 30.0),
    Transform(1.0, 2.0**-10),
]
PLAIN, NO_WEIGHTS = StateFields(), ClassWeights()

place: OnHost | OnGpu = OnHost()


def on_device(array):
    return place.on_device(array)


@dataclass(frozen=True)
class Problem:
    """Logits (rows, classes) and what a pass over them is asked for, in arrays of the host."""

    logits: np.ndarray
    columns: np.ndarray | None
    fields: StateFields = PLAIN
    weights: ClassWeights = NO_WEIGHTS
    transform: Transform = TRANSFORMS[0]
    precision: Precision = SINGLE
    first_class: int = 0

    @property
    def how(self):
        return Pass(self.fields, self.transform, self.precision)

    @property
    def class_weights(self):
        """The sum of the weights of all classes, for states that do not have one."""
        if not self.fields.weighted_logit or self.fields.weight:
            return None
        weight = self.weights.weight
        return definition.sums_of(np.ones(self.logits.shape[1]) if weight is None else weight)[0]

    def states(self):
        return definition.fill_states(self.logits[:, :, None], self.columns, self.how, self.weights, self.first_class)

    def softmax_columns(self):
        return definition.row_softmax(self.states(), self.how, self.class_weights)

    def softmax(self):
        """The columns of `ROW_SOFTMAX`, by name."""
        columns = self.softmax_columns()
        return {name: columns[:, column] for name, column in ROW_SOFTMAX.items()}


def problem_of(seed, kind, name=None, dtype=None, transform=None):
    """Draw a problem of that kind; what is not given is random too."""
    rng = np.random.default_rng([seed, len(kind), ord(kind[1])])
    name = name or sorted(FIELDS)[rng.integers(len(FIELDS))]
    dtype = dtype or DTYPES[rng.integers(len(DTYPES))]
    transforms = TRANSFORMS if FIELDS[name].hold_largest else TRANSFORMS + MARGINS
    transform = transform or transforms[rng.integers(len(transforms))]
    precision = DOUBLE if dtype == np.float64 or rng.random() < 0.2 else SINGLE
    classes = int(rng.integers(1, 100) if rng.random() < 0.9 else rng.integers(4000, 9000))
    logits, targets = logits_of(kind, classes, dtype, rng)
    if rng.random() < 0.3:
        with np.errstate(all="ignore"):
            logits = (logits.astype(np.float64) / transform.scale).astype(dtype)
    columns = None if name in ("probabilities", "softmax") else np.where(rng.random(ROWS) < 0.8, targets, -1)
    weights = ClassWeights()
    if name in ("weighted", "smoothed", "probabilities") and rng.random() < 0.6:
        weights = ClassWeights(rng.random(classes) * 10.0 ** rng.integers(-20, 3))
        if rng.random() < 0.3 and kind != "special":  # see test_definition.py
            few = [0.9, 0.05, 0.03, 0.01, 0.005, 0.005]
            weights.weight[...] *= rng.choice([1.0, -1.0, 0.0, np.inf, -np.inf, np.nan], classes, p=few)
    if name == "probabilities":
        probabilities = rng.random((ROWS, classes, 1)).astype(DTYPES[rng.integers(4)])
        if rng.random() < 0.3:  # those of one class: many classes with weight 0
            probabilities[:] = 0
            probabilities[np.arange(ROWS), targets] = 1
        weights = weights._replace(probabilities=probabilities, smoothing=0.1 * (seed % 2), classes=classes)
    return Problem(logits, columns, FIELDS[name], weights, transform, precision, 7)


def rows_of(problem, seed):
    """The words of a gradient, with factors of any size, and rows that do not count."""
    rng, softmax, states = np.random.default_rng(seed), problem.softmax(), problem.states()
    rows = np.zeros((len(states), len(ROW_GRADIENT)))
    slope = rng.standard_normal(len(states)) * 10.0 ** rng.integers(-6, 7, len(states))
    if rng.random() < 0.3:
        slope = slope * 10.0 ** rng.integers(-60, 60, len(states))
    slope[rng.random(len(states)) < 0.1] = 0
    with np.errstate(all="ignore"):
        whole = rows.view(np.int64)
        whole[:, ROW_GRADIENT["column"]] = -1 if problem.columns is None else problem.columns
        whole[:, ROW_GRADIENT["valid"]] = rng.random(len(states)) < 0.9
        values = {name: softmax[name] for name in ("exponent", "top", "most", "held")}
        values["factor"] = slope * softmax["normalizer"]
        values["weight_factor"] = 0.01 * slope * problem.fields.weighted_logit
        values["held_gradient"] = slope * softmax["held_minus_one"]
        if problem.fields.held_weight:
            values["held_weight"] = states["held_weight"]
        for name, column in values.items():
            rows[:, ROW_GRADIENT[name]] = column
    if problem.fields.entropy:
        targets = rng.integers(-1, problem.logits.shape[1], len(rows)) if len(rows) else -1
        fill_gradients_of_statistics(rows, problem.softmax_columns(), targets, rng)
    return rows


def expected_gradient(problem, rows, dtype):
    """The gradient in that dtype, by the definition."""
    dx = np.empty((*problem.logits.shape, 1), dtype)
    definition.write_gradient(dx, problem.logits[:, :, None], rows, problem.how, problem.weights)
    return dx[:, :, 0]


def weights_on_device(weights):
    given = {name: getattr(weights, name) for name in ("weight", "probabilities")}
    return weights._replace(**{name: on_device(array) for name, array in given.items() if array is not None})


def states_on_device(cuda, problem, logits=None):
    """The states that the kernels give, from those logits in (outer, classes, inner)."""
    given = on_device(problem.logits[:, :, None] if logits is None else logits), problem.columns, problem.how
    states = cuda.fill_states(*given, weights_on_device(problem.weights), problem.first_class).get()
    place.forget()
    assert states.dtype == np.uint64
    return states.reshape(-1).view(problem.fields.dtype)


def write_gradient(cuda, problem, rows, out, logits):
    given = on_device(out), on_device(logits), on_device(rows.view(np.uint64)), problem.how
    cuda.write_gradient(*given, weights_on_device(problem.weights))
    place.bring_back(out)


class Divergences:
    """The loops of divergences on a device, for arrays of the host."""

    def __init__(self, cuda):
        self.cuda = cuda

    @staticmethod
    def pair_on_device(pair):
        return pair._replace(**{name: on_device(getattr(pair, name)) for name in pair._fields[:5]})

    def divergence_sums(self, pair):
        sums = self.cuda.divergence_sums(self.pair_on_device(pair)).get()
        place.forget()
        return sums

    def write_divergence_gradient(self, out, pair, of, *numbers):
        self.cuda.write_divergence_gradient(
            on_device(out), self.pair_on_device(pair), of, *(on_device(each) for each in numbers)
        )
        place.bring_back(out)


def assert_states(found, problem):
    expected = problem.states()
    for name in problem.fields.names:
        assert found[name].tobytes() == expected[name].tobytes(), (name, found[name], expected[name])


def assert_equal(found, expected, what=""):
    """Equal numbers, or nan in both."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    different = np.argwhere((found != expected) & ~(np.isnan(found) & np.isnan(expected)))
    assert not len(different), (what, len(different), different[0], found[different[0, 0]], expected[different[0, 0]])


def merged_states(cuda, problem):
    states = problem.states()
    words = on_device(states.view(np.uint64).reshape(len(states), states.dtype.itemsize // 8))
    return cuda.row_softmax(words, problem.how, problem.class_weights)


def check_softmax(cuda, problem):
    found = merged_states(cuda, problem)[:].get()
    place.forget()
    softmax, fields = problem.softmax(), problem.fields
    needs = dict.fromkeys(("weight", "weighted_nll"), fields.weighted_logit)
    needs |= {"entropy": fields.entropy, "target_log_prob": fields.target}
    for name, index in ROW_SOFTMAX.items():
        column, expected = found[:, index], softmax[name]
        if name in ("exponent", "argmax"):  # an exponent means nothing where there are no probabilities
            bad = np.isnan(softmax["normalizer"]) & (name == "exponent")
            column, expected = (np.where(bad, 0, n.copy().view(np.int64)) for n in (column, expected))
        if needs.get(name, True):
            assert_equal(column, expected, name)
    if fields.entropy:
        check_statistics(cuda, problem)
    else:
        check_losses(cuda, problem)


def check_losses(cuda, problem):
    """Losses of rows, and the rows of their gradients."""
    softmax, fields, terms = problem.softmax_columns(), problem.fields, EVERY_TERM
    rows, columns = len(softmax), None if problem.columns is None else on_device(problem.columns)
    upstream, divisor, scale = np.linspace(-1.0, 2.0, rows), np.array([1.7]), problem.transform.scale
    halves, one = upstream.astype(np.float16), np.ones(1)  # a single number may be on the host
    upstreams = [(on_device(upstream), upstream), (on_device(halves), halves.astype(np.float64))]
    upstreams += [(on_device(upstream[:1]), upstream[:1]), (one / 3, one / 3)] if rows else []
    for valid in (np.arange(rows) % 4 != 3, np.ones(rows, np.bool_)):
        given, counted = merged_states(cuda, problem), None if valid.all() else on_device(valid)
        found = cuda.row_losses(given, fields, counted, terms).get()
        assert_equal(found, definition.row_losses(softmax, fields, valid, terms))
        for (here, each), (by_here, by) in itertools.product(upstreams, [(on_device(divisor), divisor), (one, one)]):
            found = cuda.row_gradients(given, fields, counted, columns, here, by_here, scale, terms).get()
            expected = definition.row_gradients(softmax, fields, valid, problem.columns, each, by, scale, terms)
            assert_rows(found, expected, softmax)
    place.forget()


def named(*upstream):
    return dict(zip(STATISTICS, upstream, strict=True))


def check_statistics(cuda, problem):
    """Statistics of rows, and the rows of their gradients."""
    softmax, classes = problem.softmax_columns(), range(problem.first_class, problem.first_class + 5)
    rows, scale, largest = len(softmax), problem.transform.scale, softmax[:, ROW_SOFTMAX["argmax"]].view(np.int64)
    columns = np.where(np.arange(rows) % 3 == 0, largest - classes.start, np.arange(rows) % 4 - 1)
    log_prob, entropy, logsumexp = np.linspace(-1.0, 2.0, rows), np.linspace(0.0, 3.0, rows), np.array([0.3])
    for valid in (np.arange(rows) % 4 != 3, np.ones(rows, np.bool_)):
        given, counted = merged_states(cuda, problem), None if valid.all() else on_device(valid)
        for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
            with np.errstate(all="ignore"):
                expected = definition.row_statistics(softmax, valid, dtype)
            for ours, theirs in zip(cuda.row_statistics(given, counted, dtype), expected, strict=True):
                assert_equal(ours.get(), theirs)
        for target_column in (columns, None) if rows else ():
            found = cuda.statistics_gradients(
                *(given, counted, None if target_column is None else on_device(target_column), classes, scale),
                named(on_device(log_prob), on_device(entropy.astype(np.float32)), logsumexp),
            ).get()
            upstream = named(log_prob, entropy.astype(np.float32).astype(np.float64), logsumexp)
            expected = definition.statistics_gradients(softmax, valid, target_column, classes, scale, upstream)
            assert_rows(found, expected, softmax)
        place.forget()


def assert_rows(found, expected, softmax):
    """Equal rows of gradients, but for rows without probabilities, whose exponents mean nothing."""
    good = ~np.isnan(softmax[:, ROW_SOFTMAX["normalizer"]])
    assert_equal(found[good], expected[good])
    for name in ("exponent", "column", "valid", "target"):
        column = ROW_GRADIENT[name]
        assert found[good, column].tobytes() == expected[good, column].tobytes(), name


def check_everything(cuda, problem, seed, *, pitch=0, shift=0):
    """States, what follows from them, and gradients: in rows of their own memory, in another, and over the logits."""
    given = problem.logits[:, :, None]
    logits, fence = rows_in_memory(given, pitch=pitch, shift=shift)
    assert_states(states_on_device(cuda, problem, logits), problem)
    check_softmax(cuda, problem)
    rows = rows_of(problem, seed)
    for dtype in {given.dtype, np.dtype(np.float32)}:
        expected = expected_gradient(problem, rows, dtype)[:, :, None]
        out, out_fence = rows_in_memory(np.empty(given.shape, dtype), pitch=pitch, shift=shift)
        write_gradient(cuda, problem, rows, out, logits)
        assert_equal(out, expected)
        out = np.empty((*given.shape[:2], 2), dtype)[:, :, :1]
        write_gradient(cuda, problem, rows, out, logits)
        assert_equal(out, expected)
        assert out_fence.is_whole()
    write_gradient(cuda, problem, rows, logits, logits)
    assert_equal(logits, expected_gradient(problem, rows, given.dtype)[:, :, None])
    assert fence.is_whole()
