"""Judge a recording: measure the errors of all its rows, in pieces, and name the fault of some of them.

The units and what is allowed are those of `judging`. For logits that are hidden @ w, an ulp is never less than that of
the norm of the row's hidden times the largest norm of a column of w, as the products may cancel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
import re
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.judging.comparing import Gradients, Losses, Tolerance, allowed, least_unit
from pce_mpi.conformance.judging.judge import Answer, judge
from pce_mpi.conformance.judging.outcomes import Accuracy, Finding
from pce_mpi.conformance.offline.recordings import LOGITS, NUMBERS, Piece, Recording, each_piece, exact_numbers, pieces
from pce_mpi.conformance.problems.cases import has_dtype
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.problem import Array, Problem, row_name
from pce_mpi.conformance.problems.textbook import Textbook
from pce_mpi.ulps import ulp

_USUAL = Tolerance()
# Faults are named by so many rows, or more if they have no more logits than a piece: few could be named by accident.
_ROWS = 8
_BESIDE = {"next": 1, "previous": -1}
# The words that the kit says of a function, to be said of a tensor.
_DECLARED = re.compile(r'declared by @offers\(kind="(loss|log_prob|entropy)"(?:, reductions=\("none",\))?\)')


class Measured(NamedTuple):
    """The errors of one quantity: the worst one, the median of all rows' if they have one, and the wrong rows."""

    accuracy: Accuracy
    median: float | None
    wrong: int


class Judged(NamedTuple):
    """The errors of a recording, and its faults."""

    measured: list[Measured]
    findings: list[Finding]


class Judge:
    """Judges a recording: first `run`, to its end, and then `judged`; `ValueError` if there is nothing to judge."""

    def __init__(self, recording: Recording) -> None:
        if wrong := _unjudged(recording):
            raise ValueError(f"{recording.path}: {wrong}")
        self._recording = recording
        self._names = [name for name in NUMBERS if recording.has(name)] or ["loss"]
        self._exact = {name: np.zeros(recording.rows) for name in self._names}
        self._upstream = {name: np.zeros(recording.rows) for name in self._names}
        self._products = np.zeros(recording.rows)
        self._flips = {name: np.zeros(recording.rows) for name in self._names}
        self._ratios: dict[str, Array] = {}
        self._gradients: dict[str, Accuracy] = {}
        self._wrong_gradient = np.zeros(recording.rows, np.bool_)
        of_mean = recording.reduction == "mean" and self._names[0] == "loss"
        self._divisor = self._divisor_of_mean() if of_mean else 1.0

    def run(self) -> Iterator[int]:
        """Measure the errors of all rows; yield now and then how many are done."""
        recording = self._recording
        if recording.has("hidden"):
            self._products += recording.options.get("logit_scale", 1.0) * recording.largest_of_w
        for rows, accuracies in each_piece(self._measure, pieces(recording)):
            for each in accuracies:
                worst = self._gradients.get(each.quantity, each)
                best, where = max(each.best, worst.best), self._renamed(each.where, rows)
                if worst is each or each.error > worst.error:
                    worst = replace(each, where=where)
                self._gradients[each.quantity] = replace(worst, best=best)
            yield int(rows[-1]) + 1

    @np.errstate(all="ignore")
    def judged(self) -> Judged:
        """Return the errors and the faults."""
        measured, findings = [], []
        for name in self._names:
            own = None
            if self._recording.has(name):
                result, own = self._losses(name)
                measured.append(result)
            wrong = np.zeros(self._recording.rows, np.bool_) if own is None else self._ratios[name] > 1.0
            with_gradient = self._has_gradient(name)
            if with_gradient:
                wrong |= self._wrong_gradient
                count = int(self._wrong_gradient.sum())
                measured += [Measured(accuracy, None, count) for accuracy in self._gradients.values()]
            if wrong.any():
                findings += self._named(name, wrong, own)
        return Judged(measured, findings)

    def _has_gradient(self, name: str) -> bool:
        return name == self._names[0] and self._recording.has("gradient")

    def _divisor_of_mean(self) -> float:
        recording = self._recording
        if recording.targets is None:
            return float(recording.rows)
        counted = recording.targets[recording.targets != recording.options.get("ignore_index", -100)]
        return float(len(counted) if recording.weight is None else recording.weight.astype(np.float64)[counted].sum())

    def _problem(self, name: str, rows: Array, logits: Array, reduction: str = "none") -> Problem:
        recording, kind = self._recording, KINDS[name]
        options = {option: recording.options[option] for option in kind.options if option in recording.options}
        if recording.weight is not None and "weight" in kind.options:
            options["weight"] = recording.weight
        if recording.targets is None:
            targets = np.concatenate(recording.rows_of("targets", rows), axis=-1)[:, : recording.classes]
        else:
            targets = recording.targets[rows]
        reduced = reduction == "none" and self._divisor != 1.0
        return Piece(
            logits=logits[:, : recording.classes],
            targets=targets,
            splits=tuple(min(split, recording.classes) for split in recording.splits),
            kind=kind,
            options=options,
            reduction=reduction,
            conventions={"smoothing": recording.options.get("smoothing", "all")},
            dloss=np.full(len(rows), np.float64(1.0) / self._divisor) if reduced else None,
            sums=self._products[rows],
            flips=self._flips[name][rows],
        )

    @np.errstate(all="ignore")
    def _measure(self, rows: Array) -> list[Accuracy]:
        """Fill in the exact numbers of some rows, and return the errors of their gradient."""
        recording = self._recording
        logits = products = recording.logits(rows)
        if recording.has("hidden"):
            hidden = recording.rows_of("hidden", rows)[0].astype(np.float64)
            self._products[rows] *= np.sqrt((hidden**2).sum(axis=-1))
            logits = self._rounded_as_declared(products)
        accuracies = []
        for name in self._names:
            problem = self._problem(name, rows, logits)
            try:
                exact, gradient = exact_numbers(name, problem, self._has_gradient(name))
            except (TypeError, ValueError) as error:  # options that exclude each other
                raise ValueError(f"{recording.path}: {error}") from error
            self._exact[name][rows] = exact
            if logits is not products:
                self._flips[name][rows] = self._most_of_flips(name, problem, rows, products)
            terms = problem.options.keys() & {"weight", "label_smoothing", "z_loss"} or problem.with_probabilities
            sizes = problem.kind.sizes(Textbook.of(problem))[0] if terms else problem.valid
            self._upstream[name][rows] = sizes
            if gradient is not None:
                accuracies = self._measured_gradient(problem, rows, exact, gradient)
        return accuracies

    def _rounded_as_declared(self, logits: Array) -> Array:
        """Return products as the head rounds them, if that is declared."""
        dtype = self._recording.options.get("logits_dtype")
        return logits if dtype is None else logits.astype(dtype_named(dtype)).astype(np.float64)

    def _most_of_flips(self, name: str, problem: Problem, rows: Array, products: Array) -> Array:
        """Return how much the numbers change where errors of products round logits to the other neighbour."""
        scale = self._recording.options.get("logit_scale", 1.0)
        arithmetic = compute_dtype_of(self._recording.dtype).name
        error = (allowed(_USUAL, arithmetic) * ulp(self._products[rows] / scale, arithmetic))[:, None]
        low, high = (self._rounded_as_declared(products + each) for each in (-error, error))
        gradient = np.asarray(exact_numbers(name, problem, True)[1])
        changes = (high - low)[:, : self._recording.classes]
        return np.asarray(np.where(changes == 0.0, 0.0, np.abs(gradient) * np.expm1(changes)).sum(axis=-1))

    def _measured_gradient(self, problem: Problem, rows: Array, exact: Array, gradient: Array) -> list[Accuracy]:
        if problem.dloss is not None:
            gradient *= problem.dloss[:, None]
        known = replace(problem.kind, exact=lambda _: (exact, gradient))
        gradients = Gradients(replace(problem, kind=known), self._shards(problem, rows), _USUAL)
        self._wrong_gradient[rows] = gradients.wrong.any(axis=-1)
        return gradients.accuracies()

    def _shards(self, problem: Problem, rows: Array) -> list[Array]:
        """Return the recorded gradient of some rows for each rank, without padding."""
        shards = self._recording.rows_of("gradient", rows)
        return [
            shard[:, : stop - start].astype(problem.dtype)
            for shard, (start, stop) in zip(shards, pairwise(problem.splits), strict=True)
        ]

    def _losses(self, name: str) -> tuple[Measured, Finding | None]:
        """Compare the numbers of all ranks with the exact ones."""
        recording, exact, upstream = self._recording, self._exact[name], self._upstream[name]
        arithmetic = compute_dtype_of(recording.dtype).name
        floor, flips = least_unit(self._products, arithmetic) * np.nan_to_num(upstream), self._flips[name]
        by_row = name != "loss" or recording.reduction == "none"
        if not by_row:
            exact, floor, flips = (np.asarray(each.sum() / self._divisor) for each in (exact, floor, flips))
        noun, got, added = KINDS[name].noun, recording.losses(name), 1 if by_row else recording.rows
        losses = Losses(noun, got, exact, recording.dtype, floor, flips, added, self._row_name, _USUAL)
        # Beside what is allowed; more than 1 where ranks differ, too.
        ratio = np.where(losses.unequal, np.maximum(losses.ratios, 1.5), losses.ratios).max(axis=0)
        self._ratios[name] = np.broadcast_to(ratio, recording.rows)
        (accuracy,) = losses.accuracies()
        median = float(np.median(losses.errors.max(axis=0))) if by_row else None
        measured = Measured(accuracy, median, int((self._ratios[name] > 1.0).sum()))
        return measured, next(iter(losses.findings() or losses.differing()), None)

    def _row_name(self, row: int) -> str:
        return row_name(self._recording.rows_shape, row)

    def _named(self, name: str, wrong: Array, own: Finding | None) -> list[Finding]:
        """Name the fault by wrong rows and as many right ones; by all, if they are few."""
        recording = self._recording
        rows = self._telling(name, wrong)
        logits = recording.logits(rows)
        natural = compute_dtype_of(recording.dtype)
        reduction = recording.reduction if name == "loss" else "none"
        by_row = reduction == "none"
        if own is not None and by_row:
            explainers = (self._another_scale, self._rounded_to, self._misread)  # in order of precedence
            if text := next(filter(None, (explained(name, wrong) for explained in explainers)), None):
                own.text = f"{text} ({own.text})"
                return [own]
        if recording.has("hidden"):
            logits = self._rounded_as_declared(logits).astype(natural)
        # A mean or sum over all rows says nothing of some.
        alone = not by_row and len(rows) < recording.rows
        problem = self._problem(name, rows, logits, "none" if alone else reduction)
        if recording.has(name) and not alone:
            losses = [each if each.ndim == 0 else each[rows] for each in recording.losses(name)]
        else:
            losses = [problem.expected[0].astype(natural)] * problem.ranks
        shards: list[Any] = self._shards(problem, rows) if self._has_gradient(name) else [None] * problem.ranks
        answers = [Answer(loss, shard) for loss, shard in zip(losses, shards, strict=True)]
        findings = judge(problem, answers, _USUAL).findings
        for finding in findings:
            finding.text = _DECLARED.sub(r"recorded as \1", self._renamed(finding.text, rows))
        return [own, *findings] if own is not None and (alone or not findings) else findings

    def _telling(self, name: str, wrong: Array) -> Array:
        most = max(_ROWS, LOGITS // self._recording.classes)
        if len(wrong) <= most:
            return np.arange(len(wrong))
        bad, good = np.flatnonzero(wrong), np.flatnonzero(~wrong)
        worst = [int(np.argmax(self._ratios[name]))] if name in self._ratios else []
        right = min(len(good), most // 2)
        some = spread(bad, max(1, most - right - len(worst))), spread(good, right)
        return np.unique(np.concatenate([worst, *some]).astype(np.int64))

    def _some(self, name: str, wrong: Array) -> Array:
        """Return some wrong rows whose numbers are finite."""
        rows = np.flatnonzero(wrong & np.isfinite(self._exact[name]))
        return spread(rows, max(_ROWS, LOGITS // self._recording.classes))

    def _another_scale(self, name: str, wrong: Array) -> str | None:
        rows = self._some(name, wrong)
        if len(rows) < LEAST_ROWS:
            return None
        problem = self._problem(name, rows, self._rounded_as_declared(self._recording.logits(rows)))
        scale = fitted_scale(name, problem, self._recording.losses(name)[0][rows])
        if not scale:
            return None
        temperature = self._recording.options.get("logit_scale", 1.0) / scale
        return (
            f"the logits were divided by a temperature of {temperature:.4g} more: where that is meant, "
            f"record logit_scale={scale:.6g}"
        )

    def _rounded_to(self, name: str, wrong: Array) -> str | None:
        rows = self._some(name, wrong)
        if not len(rows):
            return None
        recording = self._recording
        natural = compute_dtype_of(recording.dtype).name if recording.has("hidden") else recording.dtype.name
        declared = recording.options.get("logits_dtype", natural)
        dtypes = [dtype for dtype in dict.fromkeys(("bfloat16", "float16", natural)) if dtype != declared]
        got, problem = recording.losses(name)[0][rows], self._problem(name, rows, recording.logits(rows))
        if not (dtype := dtype_of_rounded(name, problem, self._exact[name][rows], got, dtypes)):
            return None
        declaration = f", not to {declared}," if recording.has("hidden") and "logits_dtype" in recording.options else ""
        return f"the logits are rounded to {dtype}{declaration} before the softmax"

    def _misread(self, name: str, wrong: Array) -> str | None:
        recording = self._recording
        between = np.pad(wrong[1:-1], 1)[: recording.rows]  # rows that have one before and one after them
        rows = self._some(name, between)
        if len(rows) < LEAST_ROWS:
            return None
        logits = self._rounded_as_declared(recording.logits(rows))
        problem = self._problem(name, rows, logits)
        padded = replace(problem, logits=logits, splits=recording.splits)
        got = recording.losses(name)[0][rows]
        if text := misapplied_option(name, problem, padded, got):
            return text
        targets = recording.targets if problem.with_numbers else None
        if targets is None:
            return None
        beside = {f"each target is that of the {which} row": targets[rows + step] for which, step in _BESIDE.items()}
        return misread_targets(name, problem, beside, got)

    def _renamed(self, text: str, rows: Array) -> str:
        """Return the text with the names of rows of the recording in place of places in `rows`."""

        def renamed(match: re.Match[str]) -> str:
            names = [self._row_name(int(rows[int(number)])) for number in match[2].split(", ")]
            return match[1] + ", ".join(name.removeprefix("row ") for name in names)

        return re.sub(r"\b(rows? )(\d+(?:, \d+)*)", renamed, text)


def spread(rows: Array, most: int) -> Array:
    """Return so many of the rows at most, from the first to the last."""
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64)]


def _unjudged(recording: Recording) -> str:
    """Say why a recording has nothing to judge; '' if it has."""
    if not any(recording.has(name) for name in (*NUMBERS, "gradient")) or not recording.splits[-1]:
        return "there is nothing to judge without logits, or hidden and w, and a loss, log_prob, entropy or gradient"
    if limits := [name for name in ("top_k", "top_p", "min_p") if name in recording.options]:
        return f"{limits[0]} is an option of a rollout; what is judged is the softmax over all classes"
    if recording.has("logits") and recording.options.get("logits_dtype", recording.dtype.name) != recording.dtype.name:
        return f"logits_dtype is {recording.options['logits_dtype']}, and the logits have dtype {recording.dtype}"
    return ""


# Causes that are fitted to the numbers of some rows: temperatures, roundings, softcaps, padding, and top-p.

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
            finite = np.where(np.isfinite(rounded), rounded, -1).astype(np.int64)
            yield f"the class numbers are rounded to {dtype}", finite
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
