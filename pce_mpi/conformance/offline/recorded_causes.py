"""Causes that are fitted to the numbers of a recording: temperatures, roundings, softcaps, padding, and top-p."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.offline.recordings import exact_numbers
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.problems.tolerances import has_dtype

# Rounded logits explain numbers that are this much closer to theirs than to the exact ones.
_CLOSER = 8.0
# A temperature explains the numbers of at least so many rows whose largest error is so many times smaller with it. It
# is searched in so many steps, with derivatives over a relative difference of so much.
LEAST_ROWS, _FITS = 4, 64.0
_STEPS, _STEP = 8, 2.0**-12

# Options explain what is left of a rollout if they make its mean size so many times smaller; others that make it more
# than twice as small as these explain more. A temperature is searched in steps of a quarter of an octave, and between
# two of them by so many golden sections, top-p among numbers that people write.
_EXPLAINS, _SECTIONS = 4.0, 24
# Softcaps are searched around this one, which models have.
_SOFTCAP = 30.0
_TOP_P = np.array([*np.arange(1, 200) / 200.0, 0.999])


def fitted_scale(name: str, problem: Problem, got: Array) -> float | None:
    """Return the logit_scale by which the numbers `got` of these rows are right, if there is one."""
    got = got.astype(np.float64)
    if not np.isfinite(got).all():
        return None
    declared = float(problem.options.get("logit_scale", 1.0))

    def error(scale: float) -> Array:
        if not 0.0 < scale < np.inf:
            return np.full_like(got, np.inf)
        options = {**problem.options, "logit_scale": scale}
        return np.asarray(exact_numbers(name, replace(problem, options=options))[0]) - got

    scale = min((declared * 2.0 ** (power / 2.0) for power in range(-6, 7)), key=lambda each: _size(error(each)))
    for _ in range(_STEPS):  # steps of Gauss and Newton
        slope = (error(scale * (1.0 + _STEP)) - error(scale * (1.0 - _STEP))) / (2.0 * _STEP)
        with np.errstate(all="ignore"):
            step = -(slope @ error(scale)) / (slope @ slope)
        if np.isnan(step):  # as numbers of equal logits depend on no scale
            return None
        scale *= float(np.exp(np.clip(step, -1.0, 1.0)))
    return scale if _size(error(scale)) * _FITS < _size(error(declared)) else None


def fitted_sampling(
    logits: Array, targets: Array, rest: Array, declared: float, softcap: float | None, wanted: Sequence[str]
) -> tuple[dict[str, float], float] | None:
    """Return the `wanted` ones of logit_scale and top_p that explain the rest of a rollout's log-probabilities in some
    rows, and the mean size of what they leave of it; None if they do not.
    """
    at_target, ordered = np.take_along_axis(logits, targets[:, None], -1)[:, 0], -np.sort(-logits)

    def capped(z: Array) -> Array:
        return z if softcap is None else np.where(np.isinf(z), z, softcap * np.tanh(z / softcap))

    def log_prob(scale: float) -> tuple[Array, Array]:
        """Return those of the targets, and the sums of the probabilities from the largest one on."""
        z = capped(scale * ordered)
        sums = np.exp(z - z[:, :1]).cumsum(axis=-1)
        return capped(scale * at_target) - z[:, 0] - np.log(sums[:, -1]), sums / sums[:, -1:]

    own = log_prob(declared)[0]

    def left(scale: float, top_p: Array) -> tuple[float, float]:
        """Return the mean size of what this scale and the best `top_p` leave, and that top_p; 1 keeps all classes."""
        changed, sums = log_prob(scale)
        masses = np.array([each[np.minimum(each.searchsorted(top_p), len(each) - 1)] for each in sums])
        sizes = np.abs((rest - changed + own)[:, None] + np.log(masses)).mean(axis=0)
        return float(sizes.min()), float(top_p[sizes.argmin()])

    def fitted(limits: Array) -> float:
        return _least(lambda scale: left(scale, limits)[0], declared)

    scaled, limited, results = "logit_scale" in wanted, "top_p" in wanted, []
    trials = [(True, np.ones(1))] * scaled + [(False, _TOP_P)] * limited
    for fits, limits in [*trials, *[(True, np.append(_TOP_P, 1.0))] * (scaled and limited)]:
        scale = fitted(limits) if fits else declared
        size, top_p = left(scale, limits)
        results.append((size, {"logit_scale": scale} if fits else {}, {"top_p": top_p} if top_p < 1.0 else {}))
    least = min(size for size, _, _ in results)
    if not least * _EXPLAINS <= float(np.abs(rest).mean()):
        return None
    return next((scale | top_p, size) for size, scale, top_p in results if size <= 2.0 * least)


def _least(function: Callable[[float], float], start: float) -> float:
    """Return a number near `start` where a function has its least value, by the logarithm."""
    centre = min((power / 4.0 for power in range(-12, 13)), key=lambda power: function(start * 2.0**power))
    low, high, part = centre - 0.25, centre + 0.25, (np.sqrt(5.0) - 1.0) / 2.0
    for _ in range(_SECTIONS):
        a, b = high - part * (high - low), low + part * (high - low)
        low, high = (low, b) if function(start * 2.0**a) < function(start * 2.0**b) else (a, high)
    return float(start * 2.0 ** ((low + high) / 2.0))


def dtype_of_rounded(name: str, problem: Problem, exact: Array, got: Array, dtypes: Sequence[str]) -> str | None:
    """Return the first of `dtypes` such that `got` are the numbers of logits rounded to it, if there is one."""
    got = got.astype(np.float64)
    for dtype in filter(has_dtype, dtypes):
        rounded = replace(problem, logits=problem.logits.astype(dtype_named(dtype)))
        error, other = (np.median(np.abs(got - each)) for each in (exact, exact_numbers(name, rounded)[0]))
        if other * _CLOSER <= error:
            return dtype
    return None


def misapplied_option(name: str, problem: Problem, padded: Problem, got: Array) -> str | None:
    """Say which option gives the numbers `got` by being left out or added, if one does; `padded` has all columns."""

    def size(other: Problem) -> float:
        return _size(np.asarray(exact_numbers(name, other)[0]) - got.astype(np.float64))

    def explains(other: Problem) -> bool:
        return size(other) * _FITS < size(problem)

    def with_softcap(value: float | None) -> Problem:
        return replace(problem, options={**problem.options, "softcap": value})

    columns = padded.classes - problem.classes
    of_classes = "weight" in problem.options or (problem.with_probabilities and name != "entropy")
    if columns and not of_classes and explains(padded):
        return f"the {columns} columns of padding count, which num_classes leaves out"
    softcap, scale = problem.options.get("softcap"), problem.options.get("logit_scale", 1.0)
    if softcap is None:
        fitted = _least(lambda value: size(with_softcap(value)), _SOFTCAP)
        if not explains(with_softcap(fitted)):
            return None
        return f"the logits had a softcap of {fitted:.4g}: where that is meant, record softcap={fitted:.6g}"
    if explains(with_softcap(None)):
        return f"the softcap of {softcap:g} is not applied"
    twice = softcap * np.tanh(scale * problem.logits.astype(np.float64) / softcap) / scale
    return f"the softcap of {softcap:g} is applied twice" if explains(replace(problem, logits=twice)) else None


def misread_targets(name: str, problem: Problem, beside: Mapping[str, Array], got: Array) -> str | None:
    """Say for which other class numbers, or order of the shards, `got` are right; `beside` has those of rows nearby."""
    targets, valid, got = problem.targets, problem.valid, got.astype(np.float64)

    def read() -> Iterator[tuple[str, Array]]:
        for dtype in ("uint8", "uint16", "int16"):
            yield f"the class numbers are cut to {dtype}", targets.astype(dtype).astype(np.int64)
        for dtype in filter(has_dtype, ("float16", "bfloat16")):
            rounded = targets.astype(dtype_named(dtype)).astype(np.float64)
            yield (
                f"the class numbers are rounded to {dtype}",
                np.where(np.isfinite(rounded), rounded, -1).astype(np.int64),
            )
        yield "the class numbers are one too large", targets + 1
        yield "the class numbers are one too small", targets - 1

    most = _size(np.asarray(exact_numbers(name, problem)[0]) - got) / _FITS
    for text, numbers in [*((text, np.where(valid, numbers, targets)) for text, numbers in read()), *beside.items()]:
        other = replace(problem, targets=numbers)
        inside = other.valid == ((numbers >= 0) & (numbers < problem.classes))
        if inside.all() and (numbers != targets).any():
            if _size(np.asarray(exact_numbers(name, other)[0]) - got) < most:
                return text
    shards = [problem.logits[:, start:stop] for start, stop in pairwise(problem.splits)]
    reverse = replace(problem, logits=np.concatenate(shards[::-1], axis=-1))
    if problem.ranks > 1 and _size(np.asarray(exact_numbers(name, reverse)[0]) - got) < most:
        return "the shards are those of the ranks in reverse order"
    return None


def _size(errors: Array) -> float:
    return float(np.abs(errors).max())
