"""Judge a recording: measure the errors of all its rows, in pieces, and name the fault of some of them.

The units and what is allowed are those of `judging`. For logits that are hidden @ w, an ulp is never less than that of
the norm of the row's hidden times the largest norm of a column of w, as the products may cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
import re
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.judging.comparing import Gradients, Losses
from pce_mpi.conformance.judging.judge import Answer, judge
from pce_mpi.conformance.judging.outcomes import Accuracy, Finding
from pce_mpi.conformance.offline.recorded_causes import (
    LEAST_ROWS,
    dtype_of_rounded,
    fitted_scale,
    misapplied_option,
    misread_targets,
)
from pce_mpi.conformance.offline.recordings import LOGITS, NUMBERS, Piece, Recording, each_piece, exact_numbers, pieces
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.problem import Array, Problem, row_name
from pce_mpi.conformance.problems.textbook import Textbook
from pce_mpi.conformance.problems.tolerances import Tolerance, allowed, least_unit
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
        some = [
            rows[np.linspace(0, len(rows) - 1, min(len(rows), count)).astype(np.int64)]
            for rows, count in ((bad, max(1, most - right - len(worst))), (good, right))
        ]
        return np.unique(np.concatenate([worst, *some]).astype(np.int64))

    def _some(self, name: str, wrong: Array) -> Array:
        """Return some wrong rows whose numbers are finite."""
        rows = np.flatnonzero(wrong & np.isfinite(self._exact[name]))
        most = max(_ROWS, LOGITS // self._recording.classes)
        return rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64)]

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


def _unjudged(recording: Recording) -> str:
    """Say why a recording has nothing to judge; '' if it has."""
    if not any(recording.has(name) for name in (*NUMBERS, "gradient")) or not recording.splits[-1]:
        return "there is nothing to judge without logits, or hidden and w, and a loss, log_prob, entropy or gradient"
    if limits := [name for name in ("top_k", "top_p", "min_p") if name in recording.options]:
        return f"{limits[0]} is an option of a rollout; what is judged is the softmax over all classes"
    if recording.has("logits") and recording.options.get("logits_dtype", recording.dtype.name) != recording.dtype.name:
        return f"logits_dtype is {recording.options['logits_dtype']}, and the logits have dtype {recording.dtype}"
    return ""
