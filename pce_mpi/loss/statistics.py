"""Statistics of each row's softmax, over all classes or a support, and the gradient of the logits from theirs.

Each rank copies its members of every row's support into an array (rows, most members of a row), filled up with -inf,
which adds nothing to any sum. The loops run on that as they do on the logits of all classes. The states number a member
by the shard's first class plus its column there: numbers that are in the order of the classes, as ties need them.

The states of rows hold one target at most. The logits of several come by an exchange of their own, and their
log-probabilities follow from the merged states as that of one target does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
import math
from typing import Any, NamedTuple, Unpack
import zlib

import numpy as np

from pce_mpi.arrays import Array, HostArray, array_namespace, as_array, cupy_of, is_true
from pce_mpi.hollow import Hollow
from pce_mpi.kernels import converted
from pce_mpi.kernels.classes import bits_of, nought_of
from pce_mpi.kernels.interface import ROW_GRADIENT, ClassWeights, RowSoftmax, StateFields, Upstream
from pce_mpi.loss.agreement import agree_on, confirm
from pce_mpi.loss.classes import (
    all_logits,
    by_row,
    check_several,
    columns_of,
    fits_several,
    in_shape,
    upstream_of_several,
)
from pce_mpi.loss.options import Options, StatisticsOptions, takes
from pce_mpi.loss.passes import PassResiduals, row_softmax, write_statistics_gradient
from pce_mpi.loss.problem import LARGEST, Problem, check, class_numbers_of, target_text, upstream_of
from pce_mpi.loss.tensors import tensors_for_tensors, tensors_on_this_rank


class ClassStatistics(NamedTuple):
    """The statistics of each row, shaped as the logits without the class axis.

    z are the logits after `logit_scale` and `softcap`, and p their softmax, both of the classes of the support if there
    is one. A row whose support is empty is like one of only -inf, and its `argmax` is -1. All arrays but `argmax` have
    the compute dtype.

    Attributes
    ----------
    max : array
        The largest z.
    sum_exp : array
        sum_c exp(z_c - max).
    logsumexp : array
        log sum_c exp(z_c).
    log_prob : array or None
        log p of the target, in nats; 0 where the target is `ignore_index`: leave these out of a mean. It has the shape
        of the targets, and is None without any.
    entropy : array
        -sum_c p_c log p_c, in nats.
    argmax : array of int64
        The global number of the class with the largest logit, the lowest on ties.
    """

    max: Array
    sum_exp: Array
    logsumexp: Array
    log_prob: Array | None
    entropy: Array
    argmax: Array


@takes(StatisticsOptions)
@tensors_for_tensors
def class_statistics(logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]) -> ClassStatistics:
    """Compute the statistics of plain shards; see `pce_mpi.class_statistics`."""
    return statistics_of(Options.of("class_statistics", options, StatisticsOptions), logits, targets)[0]


@dataclass(eq=False, repr=False)
class StatisticsResiduals(PassResiduals):
    """The arrays that `class_statistics_forward` keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments, with references to the caller's arrays.
    softmax : RowSoftmax
        The numbers that follow from the merged softmax states.
    inner : Problem
        The problem of the classes that statistics are taken over.
    members : Members or None
        This shard's part of the support.
    several : SeveralTargets or None
        The targets, if there are several a row.
    used_up : bool
        True once a backward pass has overwritten the logits.
    """

    made_by = "class_statistics_forward"

    softmax: RowSoftmax
    inner: Problem
    members: Members | None
    several: SeveralTargets | None


@takes(StatisticsOptions)
@tensors_for_tensors
def class_statistics_forward(
    logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]
) -> tuple[ClassStatistics, StatisticsResiduals]:
    """Compute `class_statistics`, and the residuals from which `class_statistics_backward` computes a gradient.

    Parameters
    ----------
    logits, targets : array
        Those of `class_statistics`. Logits must not change until the backward pass.

    Returns
    -------
    statistics : ClassStatistics
        Those of `class_statistics`.
    residuals : StatisticsResiduals
        References to the arrays that were passed, about 110 bytes a row, 150 more with several targets or a support, 33
        a target of several, and the logits of this shard's members of a support with 8 bytes for each.

    Notes
    -----
    Errors and communication are those of `class_statistics`.

    Examples
    --------
    >>> import numpy as np
    >>> statistics, residuals = class_statistics_forward(np.zeros((1, 2)), np.array([0]))
    >>> class_statistics_backward(residuals, log_prob=1.0)
    array([[ 0.5, -0.5]])
    """
    return statistics_of(Options.of("class_statistics_forward", options, StatisticsOptions), logits, targets)


@tensors_on_this_rank
def class_statistics_backward(
    residuals: StatisticsResiduals, *, log_prob: Any = None, entropy: Any = None, logsumexp: Any = None, out: Any = None
) -> Array:
    """Compute the gradient of the logits from those of log-probabilities, entropies and logsumexp, in one pass.

    With p the softmax over the classes of all shards, t the target of a row and H its entropy, the derivatives by z_c
    are [c = t] - p_c of log p_t, -p_c (log p_c + H) of H, and p_c of logsumexp. With a support p is its
    softmax, and the gradient of other classes is 0.

    Parameters
    ----------
    residuals : StatisticsResiduals
        Those of `class_statistics_forward`. They can be used again, unless `out` was the logits.
    log_prob, entropy, logsumexp : float or array of real numbers, optional
        The upstream gradient of each: a number, or an array of its shape. That of `log_prob` does not count where the
        target is ignored.
    out : array of a floating dtype, optional
        That of `softmax_cross_entropy_backward`.

    Returns
    -------
    array
        `out`, or a new array of the logits' dtype and shape.

    Raises
    ------
    RuntimeError
        If a backward pass into the logits has used the residuals up.
    TypeError, ValueError
        For upstream gradients or an `out` that do not fit, and for `log_prob` without targets.

    Notes
    -----
    Communicates nothing. Errors are raised on the rank that finds them, alone.

    Examples
    --------
    >>> import numpy as np
    >>> _, residuals = class_statistics_forward(np.log([[1.0, 3.0]]))
    >>> class_statistics_backward(residuals, entropy=1.0).round(4)
    array([[ 0.206, -0.206]])
    """
    StatisticsResiduals.check(residuals)
    problem, inner, members = residuals.problem, residuals.inner, residuals.members
    upstream = upstream_of_statistics(problem, log_prob, entropy, logsumexp)
    gradient = residuals.gradient_for(out, problem.logits)
    # That of a support is written to its own array first, as `out` may be the logits.
    written = gradient if members is None else problem.xp.empty(inner.logits.shape, gradient.dtype)
    write = write_statistics_gradient if residuals.several is None else residuals.several.write_gradient
    write(written, inner, residuals.softmax, upstream)
    if members is not None:
        bits_of(gradient)[...] = 0
        problem.kernel.put(gradient, problem.options.axis, members.columns, written)
    return gradient if out is None else out


def upstream_of_statistics(
    problem: Problem, log_prob: Any = None, entropy: Any = None, logsumexp: Any = None
) -> dict[str, Array]:
    """Return the upstream gradients of statistics, checked, each that of `upstream_of`; None is 0."""
    if log_prob is not None and problem.targets is None:
        raise ValueError("log_prob has no gradient without targets")
    upstream = {}
    for name, value in (("log_prob", log_prob), ("entropy", entropy), ("logsumexp", logsumexp)):
        number = 0.0 if value is None else value
        if name == "log_prob" and problem.several:
            upstream[name] = upstream_of_several(number, name, problem)
        else:
            upstream[name] = upstream_of(number, name, problem.rows_shape, problem)
    return upstream


def statistics_fields(with_targets: bool) -> StateFields:
    """Return the fields that the states of statistics have."""
    return StateFields(hold_largest=True, argmax=True, target=with_targets, entropy=True)


def statistics_of(options: Options, logits: Any, targets: Any = None) -> tuple[ClassStatistics, StatisticsResiduals]:
    """Return the statistics and the residuals; collective over the communicators of `options`."""
    supports: list[Support | None] = []

    def check_arguments() -> Problem:
        problem, support = _check(options, logits, targets)
        supports[:] = [support]
        return problem

    problem = agree_on(options, check_arguments)
    inner, members, several = problem, None, None
    if supports[0] is not None:
        members = Members.of(supports[0], problem)
        inner = members.inner
    if problem.several:
        several = SeveralTargets.of(problem, members)
        inner = without_targets(inner)
    elif members is not None and problem.targets is not None:
        columns, _ = members.columns_of(*(by_row(each, problem) for each in (problem.targets, problem.valid)))
        inner = replace(inner, target_column=problem.xp.asarray(columns[:, 0]))
    softmax = row_softmax(inner, statistics_fields(inner.targets is not None))
    numbers, argmax = inner.kernel.row_statistics(softmax.columns, inner.counted, inner.options.compute_dtype)
    if members is not None:
        argmax = members.classes_of(argmax, softmax.held)
    statistics = named_statistics(problem, numbers, argmax)
    if several is not None:
        statistics = statistics._replace(log_prob=in_shape(several.log_probs(inner, softmax, argmax), problem))
    confirm(problem)
    return statistics, StatisticsResiduals(problem, softmax, inner, members, several)


def named_statistics(problem: Problem, numbers: Array, argmax: Array) -> ClassStatistics:
    """Name the statistics of all rows, (5, rows) and (rows,)."""
    shape = problem.rows_shape
    largest, sum_exp, logsumexp, log_prob, entropy = (each.reshape(shape) for each in numbers)
    given = None if problem.targets is None else log_prob
    return ClassStatistics(largest, sum_exp, logsumexp, given, entropy, argmax.reshape(shape))


def _check(options: Options, logits: Any, targets: Any) -> tuple[Problem, Support | None]:
    """Return the checked arguments; the support is None if there is none, or if a class is out of range."""
    logits, outside = as_array(logits, "logits"), Outside.named(options.outside)
    targets = None if targets is None else as_array(targets, "targets")
    several = targets is not None and targets.dtype.kind in "iu" and targets.ndim == logits.ndim
    later = options.support is None and not several
    problem = check(options, logits, None if several else targets, needs_targets=False, later=later)
    if several:
        if not fits_several(problem, targets):
            check(options, logits, targets, needs_targets=False)  # raises, and says which shape targets have
        check_several(problem, targets, "targets")
    if options.support is None:
        return problem, None
    rows = math.prod(problem.rows_shape)
    total, numbers = options.support_rows or (rows, np.arange(rows))
    ids, offsets = checked_support(options.support, total)
    problem.members = ids
    problem.highest_target = max(problem.highest_target, min(int(ids.view(np.uint64).max(initial=0)), LARGEST))
    checksum = zlib.crc32(offsets.data, zlib.crc32(ids.data))
    problem.also = {"support": f"checksum {checksum:08x}", "outside": str(outside)}
    if problem.targets is None:
        return problem, Support.of(ids, offsets, numbers)
    classes, valid = (by_row(array, problem) for array in (problem.targets, problem.valid))
    known = type(classes) is not Hollow
    more = None
    if outside is Outside.ADD and known:
        more = np.stack([np.broadcast_to(np.arange(rows)[:, None], classes.shape)[valid], classes[valid]])
    support = Support.of(ids, offsets, numbers, more)
    if support is not None and outside is Outside.RAISE and known:
        missing = np.flatnonzero(in_shape(valid & ~support.place_of(classes)[1], problem))
        if missing.size:
            which = target_text(problem.targets, problem.targets_shape, missing[0])
            raise ValueError(f"{which} is outside the support of its row; outside='-inf' or 'add' gives that a meaning")
    return problem, support


def without_targets(problem: Problem) -> Problem:
    """Return the problem of the same rows without targets."""
    every = np.ones(math.prod(problem.rows_shape), np.bool_)
    counted = None if cupy_of(problem.logits) is not None else every
    return replace(problem, targets=None, target_column=None, valid=every, all_valid=True, counted=counted)


@dataclass(eq=False)
class SeveralTargets:
    """The `classes` of the targets, (rows, targets of a row) on the host, and their `columns` in this shard's logits.

    `valid` are those that count, `absent` those of them that are outside the support, and `is_largest` those that are
    the largest class of their row.
    """

    classes: HostArray
    columns: HostArray
    valid: HostArray
    absent: HostArray | None
    is_largest: Array = field(default=None, init=False)

    @classmethod
    def of(cls, problem: Problem, members: Members | None) -> SeveralTargets:
        """Return the targets of `problem`, with their columns in the logits of `members` if there is a support."""
        classes, valid = by_row(problem.targets, problem), by_row(problem.valid, problem)
        if members is None:
            return cls(classes, columns_of(problem), valid, None)
        columns, absent = members.columns_of(classes, valid)
        return cls(classes, columns, valid, absent)

    def log_probs(self, problem: Problem, softmax: RowSoftmax, argmax: Array) -> Array:
        """Return the log-probabilities; collective over the class communicator, as `all_logits`.

        `problem` is that of the classes that the softmax is taken over, and `argmax` has their largest.
        """
        xp, chosen = problem.xp, all_logits(problem, self.columns)
        self.is_largest = xp.asarray(self.classes) == argmax[:, None]
        if self.absent is not None and is_true(self.absent.any()):
            bits_of(chosen)[xp.asarray(self.absent)] = nought_of(chosen.dtype)
        given = chosen, xp.asarray(self.valid), problem.transform, problem.options.compute_dtype
        return problem.kernel.target_log_probs(softmax.columns, *given)

    def write_gradient(self, array: Array, problem: Problem, softmax: RowSoftmax, upstream: Upstream) -> None:
        """Fill `array` as `write_statistics_gradient` does; the upstream `log_prob` is (rows, targets of a row).

        With g_k the gradients of the log-probabilities, theirs is sum_k g_k ([c = t_k] - p_c). That of the largest
        class h is S (1 - p_h) - R p_h with the sums S of the g_k that are on it and R of the others: nothing cancels if
        p_h is close to 1. Other targets are written once more, each with the sum of its own g_k.
        """
        xp, kernel, axis, count = problem.xp, problem.kernel, problem.options.axis, self.columns.size
        # They are taken first, as `array` may be the logits.
        logits = kernel.taken(problem.logits, axis, self.columns).view(problem.logits.dtype).reshape(count, 1, 1)
        g = xp.where(xp.asarray(self.valid), upstream["log_prob"], 0.0)
        on_largest, on_others = (_in_order(xp.where(here, g, 0.0)) for here in (self.is_largest, ~self.is_largest))
        logsumexp = xp.asarray(converted(upstream["logsumexp"], np.float64)) - on_others
        as_one = replace(problem, target_column=softmax.argmax.view(np.int64) - problem.class_start)
        given = {"log_prob": on_largest, "entropy": upstream["entropy"], "logsumexp": logsumexp}
        rows = write_statistics_gradient(array, as_one, softmax, given)
        # A row of the gradient for each target, with one logit.
        shape = *self.columns.shape, rows.shape[1]
        each = xp.broadcast_to(rows[:, None], shape).reshape(count, shape[2]).copy()
        whole, is_largest = each.view(np.int64), self.is_largest.reshape(-1)
        whole[:, ROW_GRADIENT["column"]] = xp.where(is_largest, 0, -1)
        whole[:, ROW_GRADIENT["target"]] = xp.where(is_largest, -1, 0)
        own = kernel.sums_of_equal(self.classes, g).reshape(-1)
        whole[:, ROW_GRADIENT["valid"]] |= own != 0.0
        each[:, ROW_GRADIENT["target_gradient"]] = problem.transform.scale * own
        found = xp.empty(logits.shape, array.dtype)
        kernel.write_gradient(found, logits, each, softmax.how, ClassWeights())
        kernel.put(array, axis, self.columns, found.reshape(self.columns.shape))


def _in_order(values: Array) -> Array:
    """Return the sum of each row, added from the first to the last."""
    total = array_namespace(values).zeros(len(values))
    for place in range(values.shape[1]):
        total = total + values[:, place]
    return total


class Outside(StrEnum):
    """The meaning of a target outside its support: an error, a probability of 0, or one more class of the support."""

    RAISE = "raise"
    NOUGHT = "-inf"
    ADD = "add"

    @classmethod
    def named(cls, name: Any) -> Outside:
        if not isinstance(name, str) or name not in list(cls):
            raise ValueError(f"outside must be 'raise', '-inf' or 'add', got {name!r}")
        return cls(name)


def checked_support(support: Any, rows: int) -> tuple[HostArray, HostArray]:
    """Return the ids and the offsets of a support of so many rows, on the host."""
    pair = [support.ids, support.offsets] if hasattr(support, "offsets") else support  # a Nucleus has masses besides
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"support must be a pair (ids, offsets), or what nucleus gives, got {type(support).__name__}")
    names = "ids of the support", "offsets of the support"
    arrays = [as_array(part, name) for part, name in zip(pair, names, strict=True)]
    for name, array in zip(names, arrays, strict=True):
        if (array.size and array.dtype.kind not in "iu") or array.ndim != 1:
            raise TypeError(f"{name} must be integers with one axis, got {array.dtype} of {array.shape}")
        if type(array) is Hollow:
            raise TypeError(f"{name} must have elements, got a hollow array")
    ids, offsets = (class_numbers_of(array, name) for array, name in zip(arrays, names, strict=True))
    if len(offsets) != rows + 1:
        raise ValueError(f"offsets of the support must be one more than the rows, {rows + 1}, got {len(offsets)}")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        before, after = offsets[falls[0] : falls[0] + 2]
        raise ValueError(f"offsets of the support must not fall, got {before} and then {after} after row {falls[0]}")
    if offsets[0] != 0 or offsets[-1] != len(ids):
        ends = f"{offsets[0]} to {offsets[-1]}"
        raise ValueError(f"offsets of the support must go from 0 to the {len(ids)} ids, got {ends}")
    return ids, offsets


@dataclass(eq=False)
class Support:
    """The members of each row, on the host: `keys`, in rising order, are row * span + class."""

    rows: int
    span: int
    keys: HostArray

    @classmethod
    def of(
        cls, ids: HostArray, offsets: HostArray, numbers: HostArray, more: HostArray | None = None
    ) -> Support | None:
        """Return the support of the rows with these `numbers`; `more` are (row, class) pairs to be added if missing.

        None if some class cannot exist, which the agreement of the ranks tells.
        """
        extra = np.empty((2, 0), np.int64) if more is None else more
        lowest, highest = (int(f(np.concatenate([ids, extra[1]]), initial=0)) for f in (np.min, np.max))
        rows, span = len(numbers), highest + 1
        if lowest < 0 or span * max(1, rows) >= 2**62:
            return None
        place = np.full(len(offsets) - 1, -1)
        place[numbers] = np.arange(rows)
        row = np.repeat(place, np.diff(offsets))
        keys = row * span + ids
        if rows < len(place):
            keys = keys[row >= 0]
        if (keys[1:] <= keys[:-1]).any():
            keys = np.sort(keys)
            twice = np.flatnonzero(keys[1:] == keys[:-1])
            if twice.size:
                where, number = divmod(int(keys[twice[0]]), span)
                raise ValueError(f"the support of row {numbers[where]} has class {number} twice")
        if extra.size:
            keys = np.union1d(keys, extra[0] * span + extra[1])
        return cls(rows, span, keys)

    def place_of(self, classes: HostArray) -> tuple[HostArray, HostArray]:
        """Return the places of (rows, several) classes among all members, and which of them are members."""
        if type(classes) is Hollow:
            return classes, classes >= 0
        keys = np.arange(self.rows)[:, None] * self.span + classes
        places = np.searchsorted(self.keys, keys)
        # A number below the first key is that of no member.
        found = np.append(self.keys, -1)[places] == keys
        return places, found & (classes >= 0) & (classes < self.span)

    @cached_property
    def first(self) -> HostArray:
        """The place of each row's first member, (rows,)."""
        return np.searchsorted(self.keys, np.arange(self.rows) * self.span)


@dataclass(eq=False)
class Members:
    """The members that this shard has: their `columns` in it, (rows, most members of a row), -1 after the last one.

    `inner` is the problem of these alone, with the logits (rows, most members of a row).
    """

    support: Support
    columns: HostArray
    first: HostArray
    inner: Problem

    @classmethod
    def of(cls, support: Support, problem: Problem) -> Members:
        start, axis = problem.class_start, problem.options.axis
        own = np.arange(support.rows) * support.span
        skipped, end = (
            np.searchsorted(support.keys, own + min(c, support.span)) for c in (start, start + problem.classes)
        )
        counts = end - skipped
        places = np.arange(counts.max(initial=0))
        member = np.minimum(skipped[:, None] + places, len(support.keys) - 1)
        columns = np.where(places < counts[:, None], support.keys[member] - (own + start)[:, None], -1)
        dtype = problem.logits.dtype
        logits = problem.kernel.taken(problem.logits, axis, columns, nought_of(dtype)).view(dtype)
        inner = replace(problem, options=problem.options.with_checked({"axis": 1}, None), logits=logits)
        inner = replace(inner, rows_shape=logits.shape[:1], classes=logits.shape[1])
        return cls(support, columns, skipped, inner)

    def columns_of(self, classes: HostArray, valid: HostArray) -> tuple[HostArray, HostArray]:
        """Return the columns of (rows, several) classes in the logits of `inner`, and which valid ones are no members.

        A class that is not valid, or no member of this shard, has the column -1.
        """
        places, found = self.support.place_of(classes)
        columns = places - self.first[:, None]
        here = found & valid & (columns >= 0) & (columns < self.counts)
        return np.where(here, columns, -1), valid & ~found

    @cached_property
    def counts(self) -> HostArray:
        """The number of this shard's members of each row, (rows, 1)."""
        return (self.columns >= 0).sum(axis=1, keepdims=True)

    def classes_of(self, numbers: Array, largest: Array) -> Array:
        """Return the classes of members from their numbers in states, (rows,).

        A row whose `largest` logit is -inf has its lowest class, or -1 if its support is empty.
        """
        if type(numbers) is Hollow:
            return numbers
        support, xp = self.support, self.inner.xp
        starts = np.unique([start for start, count in zip(*self.inner.shards, strict=False) if count])
        keys, last = np.append(support.keys, -1), np.append(support.first[1:], len(support.keys))
        own = np.arange(support.rows) * support.span
        lowest = np.where(support.first < last[: support.rows], keys[support.first] - own, -1)
        keys, starts, own, lowest = map(xp.asarray, (keys, starts, own, lowest))
        start = starts[xp.searchsorted(starts, numbers, side="right") - 1]
        places = xp.searchsorted(keys[:-1], own + start) + (numbers - start)
        return xp.where(largest == -np.inf, lowest, keys[xp.clip(places, 0, len(keys) - 1)] - own)
