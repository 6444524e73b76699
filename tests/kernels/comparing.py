"""Comparison of kernels with the definition: the same bits, from random problems in any memory."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from kernels.device_arrays import rows_in_memory
from kernels.places import OnGpu, OnHost
from pce_mpi.loss.kernels.definition import (
    RowSoftmax,
    StateFields,
    Sums,
    gradient_of,
    states_of,
    sum_of,
)
from pce_mpi.loss.kernels.elementary import DOUBLE, SINGLE, Arithmetic, softcap_slope
from pce_mpi.loss.kernels.parameters import ClassWeights, Transform
from ranks.test_definition import FIELDS, ROWS, logits_of

DTYPES = [np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
TRANSFORMS = [
    *(Transform(scale) for scale in (1.0, 0.5, 3.0, 2.0**-30, 2.0**60)),  # scales of float32
    *(Transform(scale) for scale in (0.7, 2.0**-70, 2.0**70)),
    Transform(1.3, 30.0),
    Transform(1.0, 2.0**-10),
]
PLAIN, NO_WEIGHTS = StateFields(), ClassWeights()
# `RowSoftmax` of states.h, in its order; the last two are an exponent and a logit.
SOFTMAX = ["held_nll", "held_probability", "held_minus_one", "normalizer", "logsumexp"]
SOFTMAX += ["weight", "weighted_nll", "entropy", "target_log_prob", "exponent", "top"]


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
    arithmetic: Arithmetic = SINGLE
    first_class: int = 0

    @property
    def u(self):
        """The weight of each class of each row, or None."""
        weight, probabilities = self.weights.weight, self.weights.probabilities
        if probabilities is None:
            return None if weight is None else np.broadcast_to(weight, self.logits.shape)
        u = probabilities[:, :, 0].astype(np.float64)
        if self.weights.smoothing:
            u = u * (1.0 - self.weights.smoothing) + self.weights.smoothing / self.weights.classes
        return u if weight is None else u * weight

    @property
    def class_weights(self):
        """The sum of the weights of all classes, for states that do not have one."""
        if not self.fields.weighted_logit or self.fields.weight:
            return None
        weight = self.weights.weight
        return sum_of([np.ones((1, self.logits.shape[1])) if weight is None else weight[None, :]])

    def states(self):
        with np.errstate(all="ignore"):
            return states_of(
                self.logits,
                self.columns,
                self.fields,
                u=self.u,
                transform=self.transform,
                arithmetic=self.arithmetic,
                first_class=self.first_class,
            )

    def softmax(self):
        return RowSoftmax(self.states(), self.fields, self.transform, self.arithmetic, self.class_weights)


def problem_of(seed, kind, name=None, dtype=None, transform=None):
    """Draw a problem of that kind; what is not given is random too."""
    rng = np.random.default_rng([seed, len(kind), ord(kind[1])])
    name = name or sorted(FIELDS)[rng.integers(len(FIELDS))]
    dtype = dtype or DTYPES[rng.integers(len(DTYPES))]
    transform = transform or TRANSFORMS[rng.integers(len(TRANSFORMS))]
    arithmetic = DOUBLE if dtype == np.float64 or rng.random() < 0.2 else SINGLE
    classes = int(rng.integers(1, 100) if rng.random() < 0.9 else rng.integers(4000, 9000))
    logits, targets = logits_of(kind, classes, dtype, rng)
    if rng.random() < 0.3:
        with np.errstate(all="ignore"):
            logits = (logits.astype(np.float64) / transform.scale).astype(dtype)
    columns = None if name in ("probabilities", "softmax") else np.where(rng.random(ROWS) < 0.8, targets, -1)
    weights = ClassWeights()
    if name in ("weighted", "smoothed", "probabilities") and rng.random() < 0.6:
        weights = ClassWeights(rng.random(classes) * 10.0 ** rng.integers(-20, 3))
    if name == "probabilities":
        probabilities = rng.random((ROWS, classes, 1)).astype(DTYPES[rng.integers(4)])
        if rng.random() < 0.3:  # those of one class: many classes with weight 0
            probabilities[:] = 0
            probabilities[np.arange(ROWS), targets] = 1
        weights = replace(weights, probabilities=probabilities, smoothing=0.1 * (seed % 2), classes=classes)
    return Problem(logits, columns, FIELDS[name], weights, transform, arithmetic, 7)


def rows_of(problem, seed):
    """The words of a gradient, with factors of any size, and rows that do not count."""
    rng, softmax, states = np.random.default_rng(seed), problem.softmax(), problem.states()
    rows = np.zeros((len(states), 10))
    slope = rng.standard_normal(len(states)) * 10.0 ** rng.integers(-6, 7, len(states))
    if rng.random() < 0.3:
        slope = slope * 10.0 ** rng.integers(-60, 60, len(states))
    slope[rng.random(len(states)) < 0.1] = 0
    with np.errstate(all="ignore"):
        numbers = rows.view(np.int64)
        numbers[:, 0] = softmax.exponent
        numbers[:, 1] = -1 if problem.columns is None else problem.columns
        numbers[:, 2] = rng.random(len(states)) < 0.9
        rows[:, 3], rows[:, 4] = softmax.top, np.fmax(softmax.top, softmax.held)
        rows[:, 5], rows[:, 6] = slope * softmax.normalizer, 0.01 * slope * problem.fields.weighted_logit
        rows[:, 7], rows[:, 8] = slope * softmax.held_minus_one, softmax.held
    if problem.fields.held_weight:
        rows[:, 9] = states["held_weight"]
    return rows


def expected_gradient(problem, rows, dtype):
    """The gradient in that dtype, by the definition."""
    x, u, softmax = problem.logits, problem.u, problem.softmax()
    column, valid = rows.view(np.int64)[:, 1], rows.view(np.int64)[:, 2] != 0
    with np.errstate(all="ignore"):
        weight_factor = rows[:, 6] if problem.fields.weighted_logit else None
        dx = gradient_of(
            x,
            rows[:, 5],
            softmax,
            problem.transform,
            problem.arithmetic,
            weight_factor=weight_factor,
            u=1.0 if u is None else u,
        )
        held = np.arange(x.shape[1]) == column[:, None]
        if problem.weights.probabilities is not None:
            held = (x.astype(np.float64) == rows[:, 8, None]) & (u == rows[:, 9, None])
        held_dx = np.broadcast_to(rows[:, 7, None], x.shape)
        if problem.transform.softcap is not None:
            held_dx = held_dx * softcap_slope(x.astype(np.float64), problem.transform)
        dx = np.where(valid[:, None], np.where(held, held_dx.astype(dx.dtype), dx), 0)
        return (dx.astype(np.float32) if dtype.itemsize < 4 else dx).astype(dtype)


def weights_on_device(weights):
    given = {name: getattr(weights, name) for name in ("weight", "probabilities")}
    return replace(weights, **{name: on_device(array) for name, array in given.items() if array is not None})


def states_on_device(cuda, problem, logits=None):
    """The states that the kernels give, from those logits in (outer, classes, inner)."""
    states = cuda.fill_states(
        on_device(problem.logits[:, :, None] if logits is None else logits),
        problem.columns,
        problem.fields,
        weights=weights_on_device(problem.weights),
        transform=problem.transform,
        arithmetic=problem.arithmetic,
        class_start=problem.first_class,
    ).get()
    place.forget()
    assert states.dtype == np.uint64
    return states.reshape(-1).view(problem.fields.dtype)


def write_gradient(cuda, problem, rows, out, logits):
    cuda.write_gradient(
        on_device(out),
        on_device(logits),
        on_device(rows.view(np.uint64)),
        problem.fields,
        weights=weights_on_device(problem.weights),
        transform=problem.transform,
        arithmetic=problem.arithmetic,
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


def check_softmax(cuda, problem):
    states = problem.states()
    words = on_device(states.view(np.uint64).reshape(len(states), states.dtype.itemsize // 8))
    found = cuda.row_softmax(words, problem.fields, problem.transform, problem.arithmetic, problem.class_weights).get()
    place.forget()
    softmax, fields = problem.softmax(), problem.fields
    needs = dict.fromkeys(("weight", "weighted_nll"), fields.weighted_logit)
    needs |= {"entropy": fields.entropy, "target_log_prob": fields.target}
    for index, name in enumerate(SOFTMAX):
        column, expected = found[:, index], np.asarray(getattr(softmax, name)) if needs.get(name, True) else None
        if name == "exponent":  # means nothing where there are no probabilities
            column, expected = (np.where(np.isnan(softmax.normalizer), 0, n) for n in (column.view(np.int64), expected))
        if expected is not None:
            assert_equal(column, expected, name)


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


def words_of(sums: Sums):
    return np.concatenate([sums.grids[:, None].view(np.uint64), sums.limbs], axis=1)
