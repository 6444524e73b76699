"""The definition of the arithmetic: the same bits for any cut of the classes, and how many of them are right."""

from fractions import Fraction
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import ml_dtypes
import mpmath
import numpy as np
import pytest

from pce_mpi.loss.kernels.definition import Merge, RowSoftmax, StateFields, gradient_of, states_of
from pce_mpi.loss.kernels.elementary import DOUBLE, SINGLE, fma32
from pce_mpi.loss.kernels.parameters import Transform

KINDS = ["plain", "offset", "far", "huge", "masked", "certain", "equal", "special"]
FIELDS = {
    "plain": StateFields(),
    "weighted": StateFields(held_weight=True),
    "smoothed": StateFields(held_weight=True, weighted_logit=True),
    "probabilities": StateFields(hold_largest=True, held_weight=True, weight=True, weighted_logit=True),
    "softmax": StateFields(hold_largest=True),
    "statistics": StateFields(hold_largest=True, argmax=True, target=True, entropy=True),
}
TRANSFORMS = [Transform(), Transform(0.5), Transform(0.7), Transform(1.3, 30.0)]
ROWS = 8


def arithmetic_of(dtype):
    return DOUBLE if dtype == np.float64 else SINGLE


def logits_of(kind, classes, dtype, rng):
    """Eight rows of a kind, and their targets."""
    x = rng.standard_normal((ROWS, classes)) * 4
    targets = rng.integers(0, classes, ROWS)
    rows = np.arange(ROWS)
    if kind == "offset":
        x += 1e4
    elif kind == "far":
        x *= 3000
    elif kind == "huge":  # among them logits that differ by more than any exponential can tell
        x *= 10.0 ** rng.integers(0, 38, (ROWS, 1))
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


def states(x, targets, fields, u, transform, start=0, stop=None):
    """The states of a shard of the classes."""
    columns = np.where((targets >= start) & (targets < (x.shape[1] if stop is None else stop)), targets - start, -1)
    weights = None if u is None else u[:, start:stop]
    options: dict[str, Any] = {"transform": transform, "arithmetic": arithmetic_of(x.dtype), "first_class": start}
    with np.errstate(all="ignore"):
        return states_of(x[:, start:stop], columns, fields, u=weights, **options)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    fields=st.sampled_from(sorted(FIELDS)),
    transform=st.sampled_from(TRANSFORMS),
    dtype=st.sampled_from([np.float32, np.float64, np.float16, ml_dtypes.bfloat16]),
)
def test_states_of_any_cut_merge_to_same_bits(seed, kind, fields, transform, dtype):
    rng, needed = np.random.default_rng(seed), FIELDS[fields]
    classes = int(rng.integers(1, 60))
    x, targets = logits_of(kind, classes, dtype, rng)
    u = rng.random(x.shape) * 10.0 ** rng.integers(-20, 3) if needed.held_weight and seed % 4 else None
    whole = states(x, targets, needed, u, transform)
    cuts = [0, *np.sort(rng.integers(0, classes + 1, rng.integers(0, 7))).tolist(), classes]
    parts = [states(x, targets, needed, u, transform, *ends) for ends in pairwise(cuts)]
    while len(parts) > 1:  # a random tree
        a, b = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
        parts.append(Merge(needed, transform, arithmetic_of(dtype))(a, b))
    for name in needed.names:
        assert parts[0][name].tobytes() == whole[name].tobytes(), (name, parts[0][name], whole[name])


@pytest.mark.parametrize("near", ["any", "a middle"])
def test_fma32_rounds_the_exact_sum_once(near):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    c = (rng.standard_normal(1000) * 2.0 ** rng.integers(-30, 30, 1000)).astype(np.float32)
    if near == "a middle":  # a b is 1 + 2^-24, and c too small for float64 to see it beside that
        a, b = np.full(1000, 1 + 2.0**-12, np.float32), np.full(1000, 1 - 2.0**-12 + 2.0**-23, np.float32)
        c = (np.sign(c) * 2.0 ** rng.integers(-149, -40, 1000)).astype(np.float32)
    found = fma32(a, b, c)
    for x, y, z, result in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        beside = [np.nextafter(result, np.float32(end)) for end in (-np.inf, np.inf)]
        error = abs(Fraction(float(result)) - exact)
        assert all(error <= abs(Fraction(float(other)) - exact) for other in beside)


# Ulps of the arithmetic's dtype, of the result itself.
LIMITS = {SINGLE: {"loss": 1, "gradient": 2}, DOUBLE: {"loss": 4, "gradient": 4}}


def ulps(found, exact, dtype):
    return abs(float((mpmath.mpf(float(found)) - exact) / mpmath.mpf(float(np.spacing(dtype(abs(float(exact))))))))


@pytest.mark.parametrize("kind", ["plain", "offset", "certain", "equal", "far"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("classes", [2, 300])
def test_loss_and_gradient_have_their_bits(kind, dtype, classes):
    arithmetic, rng = arithmetic_of(dtype), np.random.default_rng(classes)
    x, targets = logits_of(kind, classes, dtype, rng)
    worst = {"loss": 0.0, "gradient": 0.0}
    for transform in TRANSFORMS[:3]:
        softmax = RowSoftmax(states(x, targets, FIELDS["plain"], None, transform), StateFields(), transform, arithmetic)
        gradient = gradient_of(x, softmax.normalizer, softmax, transform, arithmetic)
        with mpmath.workprec(200):
            for row, target in enumerate(targets):
                z = [mpmath.mpf(float(value)) * mpmath.mpf(transform.scale) for value in x[row]]
                exps = [mpmath.e ** (value - z[target]) for value in z]
                total = sum(exps)
                odds = sum(e for index, e in enumerate(exps) if index != target)
                if odds < 1e-30:
                    assert 0 <= softmax.held_nll[row] < 1e-29
                    continue
                worst["loss"] = max(worst["loss"], ulps(dtype(softmax.held_nll[row]), mpmath.log1p(odds), dtype))
                worst["gradient"] = max(
                    worst["gradient"], ulps(dtype(softmax.held_minus_one[row]), -odds / total, dtype)
                )
                for index in rng.integers(0, classes, 20):
                    if index != target and exps[index] / total > 1e-30:
                        error = ulps(gradient[row, index], exps[index] / total, dtype)
                        worst["gradient"] = max(worst["gradient"], error)
    assert all(worst[what] <= LIMITS[arithmetic][what] for what in worst), worst
