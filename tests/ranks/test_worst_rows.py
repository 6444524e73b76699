"""The worst rows that hill-climbing finds: what the pages say of accuracy is what this search finds."""

import functools

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import dense
from ulps import CLIMBED, errors

ROWS, STEPS = 1000, 250
LONG = np.longdouble  # 11 bits more than float64 tell hundredths of an ulp
pytestmark = pytest.mark.skipif(np.finfo(LONG).nmant < 63, reason="longdouble is float64 on this processor")


def climb(error_of, dtype, columns):
    """Return the largest error, in ulps, of rows that change at random wherever that makes their error larger."""
    rng = np.random.default_rng(columns)
    x = (rng.normal(0, 1, (ROWS, columns)) * rng.uniform(0.1, 20, (ROWS, 1))).astype(dtype)
    error = error_of(x)
    for step in range(1, STEPS):
        size = 10.0 ** rng.uniform(-9 if dtype is np.float32 else -17, 0.5, (ROWS, 1))
        other = (x + rng.normal(0, size, x.shape) * (rng.random(x.shape) < 0.6)).astype(dtype)
        other_error = error_of(other)
        x = np.where((other_error > error)[:, None], other, x)
        error = np.maximum(error, other_error)
        if step % 40 == 0:  # the better half goes on twice
            best = np.argsort(-error)[: ROWS // 2]
            x, error = np.tile(x[best], (2, 1)), np.tile(error[best], 2)
    return error.max()


def ulps(found, exact, dtype, size=None):
    near = exact.astype(np.float64)
    return errors(found, near, dtype, size, (exact - near).astype(np.float64))


def loss_and_gradient(x):
    """Return the loss of class 1 and its gradient in longdouble."""
    e = np.exp(x.astype(LONG) - x[:, 1:2].astype(LONG))
    e[:, 1] = 0
    odds = e.sum(axis=1, keepdims=True)
    gradient = e / (1 + odds)
    gradient[:, 1:2] = -odds / (1 + odds)
    return np.log1p(odds[:, 0]), gradient


def loss(x, module=pce):
    found = module.softmax_cross_entropy(x, np.ones(len(x), int), reduction="none")
    return ulps(found, loss_and_gradient(x)[0], x.dtype)


def log_prob(x):
    return ulps(-pce.class_statistics(x, np.ones(len(x), int)).log_prob, loss_and_gradient(x)[0], x.dtype)


def gradient(x, columns, module=pce):
    options = {"reduction": "sum"}
    _, found = module.softmax_cross_entropy_value_and_grad(x, np.ones(len(x), int), **options)
    exact = loss_and_gradient(x)[1]
    size = np.broadcast_to(np.abs(exact).max(axis=1, keepdims=True), exact.shape).astype(np.float64)
    return ulps(found, exact, x.dtype, size)[:, columns].max(axis=1)


def entropy(x):
    wide = x.astype(LONG)
    below = wide.max(axis=1, keepdims=True) - wide
    e = np.exp(-below)
    others = np.where(np.arange(x.shape[1]) == x.argmax(axis=1)[:, None], 0, e).sum(axis=1)
    exact = np.log1p(others) + (e * below).sum(axis=1) / (1 + others)
    return ulps(pce.class_statistics(x).entropy, exact, x.dtype)


def divergence_gradient(pairs, direction, of):
    """Return the errors of the gradient in ulps of the larger term of its formula, or of the larger probability."""
    classes = pairs.shape[1] // 2
    logits = [np.ascontiguousarray(part) for part in (pairs[:, :classes], pairs[:, classes:])]
    logs = []
    for x in logits:
        near = x.astype(LONG) - x.max(axis=1, keepdims=True)
        logs.append(near - np.log(np.exp(near).sum(axis=1, keepdims=True)))
    _, residuals = pce.kl_divergence_forward(*logits, direction=direction, reduction="sum")
    found = pce.kl_divergence_backward(1.0, residuals, of=of)
    log_p, log_q = logs if direction == "reverse" else logs[::-1]
    p, q = np.exp(log_p), np.exp(log_q)
    if (direction, of) in (("forward", "student"), ("reverse", "teacher")):
        exact, size = q - p, np.maximum(p, q)
    else:
        divergence = (p * (log_p - log_q)).sum(axis=1, keepdims=True)
        exact = p * (log_p - log_q - divergence)
        size = np.maximum(p * np.abs(log_p - log_q), p * divergence)
    size = np.maximum(size, np.maximum(p, q)).astype(np.float64)
    return ulps(found, exact, pairs.dtype, size).max(axis=1)


QUANTITIES = {
    "loss": loss,
    "log_prob": log_prob,
    "gradient at the target": functools.partial(gradient, columns=[1]),
    "gradient elsewhere": functools.partial(gradient, columns=[0, 2]),
    "entropy": entropy,
    "loss of dense": functools.partial(loss, module=dense),
    "gradient of dense": functools.partial(gradient, columns=[0, 1, 2], module=dense),
}
DIVERGENCES = [(direction, of) for direction in ("forward", "reverse") for of in ("student", "teacher")]


@pytest.mark.parametrize(("name", "dtype"), [key for key in CLIMBED if key[0] in QUANTITIES])
def test_climb_finds_what_pages_say(name, dtype):
    said = CLIMBED[name, dtype]
    assert 0.6 * said <= climb(QUANTITIES[name], dtype, 3) <= said


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_climb_finds_error_of_divergence_gradients(dtype):
    errors = [climb(functools.partial(divergence_gradient, direction=a, of=b), dtype, 6) for a, b in DIVERGENCES]
    assert 0.6 * CLIMBED["gradient of a divergence", dtype] <= max(errors) <= CLIMBED["gradient of a divergence", dtype]
