"""Placement rules: how an operation may run on sharded operands, and the plan that sends the least.

A rule gives every axis of every operand a label, as einsum does; axes with one label are sharded together. For `x @ w`:

    x: b k      w: k m      result: b m

Along one dim of a mesh an operation may then run in these ways, and in no others:

- every operand Replicate: the result is Replicate;
- one label sharded in all operands that have it, the others Replicate: the result is sharded if it has the label, and
  Partial if the axis was summed away;
- operands in which the result is linear are Partial, the others Replicate: the result is Partial.

So x sharded on b is data parallelism, and w sharded on m, or both on k, is tensor parallelism. Gradients are
operations themselves, with rules of this kind: that of w is b k, b m -> k m, which sums b away, so it is Partial if b
is sharded. Batch, sequence and context parallelism are this one rule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
import math
from typing import NamedTuple

from pce_mpi.arrays import Shape
from pce_mpi.distributed.placements import Partial, Placement, ReduceOperator, Replicate, Shard
from pce_mpi.distributed.sharding import Sharding, Splits, Step, balanced_splits, steps, wire_bytes


class Axis(NamedTuple):
    """The label of an axis; `inner` is the product of the lengths of the next axes, which a reshape merges into it."""

    label: Hashable
    inner: int = 1


Axes = tuple[Axis | None, ...]


@dataclass(frozen=True)
class Rule:
    """The placements in which an operation may run; `Rule.of` makes one from letters.

    Parameters
    ----------
    operands : tuple of tuple of Axis or None
        The axes of each operand; None is an axis that must not be sharded.
    result : tuple of Axis or None
        The axes of the result.
    shape : tuple of int
        The global shape of the result.
    linear : tuple of tuple of int
        Sets of operands: if all of a set are Partial and the others Replicate, the result is Partial.
    moves_data : bool
        The operation only moves elements, so Partial "max" and "min" stay Partial too.
    reduces : {"sum", "avg", "max", "min"} or None
        The reduction of shards whose label the result does not have; None: such a label must not be sharded.
    merged : frozenset
        Labels whose shards the operation itself merges by communicating; the result is Replicate.
    """

    operands: tuple[Axes, ...]
    result: Axes
    shape: tuple[int, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    moves_data: bool = False
    reduces: ReduceOperator | None = None
    merged: frozenset[Hashable] = frozenset()

    @staticmethod
    def of(
        letters: str, *shapes: Shape, linear: Sequence[Sequence[int]] = (), reduces: ReduceOperator | None = None
    ) -> Rule:
        """Make a rule from letters, as in `numpy.einsum`.

        Parameters
        ----------
        letters : str
            One letter for each axis, a dot for an axis that must not be sharded: "bk,km->bm". Dots in the result are
            the dots of the operands, in order.
        *shapes : tuple of int
            The global shape of each operand.
        linear : sequence of sequence of int, optional
            Sets of operands: if all of a set are Partial and the others Replicate, the result is Partial.
        reduces : {"sum", "avg", "max", "min"}, optional
            The reduction of shards whose label the result does not have.

        Returns
        -------
        Rule
            The rule.

        Raises
        ------
        ValueError
            If letters and shapes do not fit.

        Examples
        --------
        >>> Rule.of("bk,km->bm", (7, 5), (5, 3), linear=[[0], [1]], reduces="sum").shape
        (7, 3)
        """
        sources, _, result = letters.replace(" ", "").partition("->")
        lengths: dict[str, int] = {}
        operands = sources.split(",")
        if [len(operand) for operand in operands] != [len(shape) for shape in shapes]:
            raise ValueError(f"{letters!r} does not fit shapes {', '.join(map(str, shapes))}")
        dots: list[int] = []
        for operand, shape in zip(operands, shapes, strict=True):
            for letter, length in zip(operand, shape, strict=True):
                if letter == ".":
                    dots.append(length)
                elif lengths.setdefault(letter, length) != length:
                    raise ValueError(f"axes {letter!r} have lengths {lengths[letter]} and {length}")
        if not set(result) - {"."} <= set(lengths) or result.count(".") > len(dots):
            raise ValueError(f"{letters!r} has a letter in its result that no operand has")
        of_dots = iter(dots)
        return Rule(
            tuple(_axes(operand) for operand in operands),
            _axes(result),
            tuple(next(of_dots) if letter == "." else lengths[letter] for letter in result),
            linear=tuple(tuple(group) for group in linear),
            reduces=reduces,
        )


def _axes(letters: str) -> Axes:
    return tuple(None if letter == "." else Axis(letter) for letter in letters)


@dataclass(frozen=True)
class Plan:
    """The shardings in which an operation needs its operands, and the sharding of its result."""

    operands: tuple[Sharding, ...]
    result: Sharding

    def moves(self, operands: Sequence[Sharding]) -> list[tuple[Step, ...]]:
        """Return the steps that bring each of `operands` to the plan's sharding."""
        return [steps(before, after) for before, after in zip(operands, self.operands, strict=True)]


class _Arrangement(NamedTuple):
    """One way to run along one dim."""

    operands: tuple[Placement, ...]
    result: Placement
    label: Hashable = None


def plan(rule: Rule, operands: Sequence[Sharding], itemsizes: Sequence[int], itemsize: int) -> Plan:
    """Plan how to run `rule` on operands in these shardings; `itemsizes` are theirs, `itemsize` is the result's.

    Operands stay as they are along a dim if they can. Otherwise the plan with the fewest bytes on the wire wins,
    counting the all_reduce that a new Partial will cost; then the one with the fewest collectives; then the one that
    leaves the first operands in place. A dim over which nothing is sharded stays so.
    """
    dims = operands[0].dims
    every = [list(_arrangements(rule, operands, index)) for index in range(len(dims))]
    fitting = [
        [way for way in ways if way.operands == tuple(operand.placements[index] for operand in operands)][:1] or ways
        for index, ways in enumerate(every)
    ]
    # Arrangements that fit along each dim may not fit together: sums over one dim do not mix with maxima over another.
    found = list(_plans(rule, operands, fitting)) or list(_plans(rule, operands, every))
    return min(found, key=lambda candidate: _cost(candidate, operands, itemsizes, itemsize))


def _arrangements(rule: Rule, operands: Sequence[Sharding], index: int) -> Iterator[_Arrangement]:
    current = [operand.placements[index] for operand in operands]
    if any(isinstance(placement, Shard) for placement in current):
        lengths: dict[Hashable, int] = {}
        for operand, axes in zip(operands, rule.operands, strict=True):
            lengths |= {axis.label: operand.shape[i] * axis.inner for i, axis in enumerate(axes) if axis}
        for label, length in lengths.items():
            placed = tuple(_placed(axes, label) for axes in rule.operands)
            if length == 1 and not any(
                here == there != Replicate() for here, there in zip(current, placed, strict=True)
            ):
                continue  # one element is not sharded: all other ranks would have nothing to do
            result = _placed(rule.result, label)
            if isinstance(result, Shard) or label in rule.merged:
                yield _Arrangement(placed, result, label)
            elif rule.reduces:
                yield _Arrangement(placed, Partial(rule.reduces), label)
    else:
        for kind in dict.fromkeys(placement for placement in current if isinstance(placement, Partial)):
            if rule.moves_data or kind.operator in ("sum", "avg"):
                for group in rule.linear:
                    if any(current[i] == kind for i in group):
                        placed = tuple(kind if i in group else Replicate() for i in range(len(operands)))
                        yield _Arrangement(placed, kind)
    yield _Arrangement((Replicate(),) * len(operands), Replicate())


def _placed(axes: Axes, label: Hashable) -> Placement:
    return next((Shard(i) for i, axis in enumerate(axes) if axis and axis.label == label), Replicate())


def _plans(rule: Rule, operands: Sequence[Sharding], ways: Sequence[Sequence[_Arrangement]]) -> Iterator[Plan]:
    for combination in product(*ways):
        placements = list(zip(*(way.operands for way in combination), strict=True))
        result = tuple(way.result for way in combination)
        if not all(_mixes(placed) for placed in (*placements, result)):
            continue
        labels = list(dict.fromkeys(way.label for way in combination if way.label is not None))
        of_label = [_split_points(rule, operands, combination, label) for label in labels]
        for choice in product(*of_label):
            splits = dict(zip(labels, choice, strict=True))
            dims = operands[0].dims
            yield Plan(
                tuple(
                    Sharding(dims, operand.shape, placed, _splits(axes, placed, splits))
                    for operand, placed, axes in zip(operands, placements, rule.operands, strict=True)
                ),
                Sharding(dims, rule.shape, result, _splits(rule.result, result, splits)),
            )


def _mixes(placements: Sequence[Placement]) -> bool:
    operators = {placement.operator for placement in placements if isinstance(placement, Partial)}
    return len(operators) < 2 or operators == {"sum", "avg"}


def _split_points(
    rule: Rule, operands: Sequence[Sharding], combination: Sequence[_Arrangement], label: Hashable
) -> list[Splits]:
    """Return the split points that `label` may have: those of an operand, or even ones, in innermost elements."""
    dims = tuple(dim for (dim, _), way in zip(operands[0].dims, combination, strict=True) if way.label == label)
    unit = math.lcm(
        *(max(1, axis.inner) for axes in (*rule.operands, rule.result) for axis in axes if axis and axis.label == label)
    )
    possible: list[Splits] = []
    for operand, axes in zip(operands, rule.operands, strict=True):
        for index, axis in enumerate(axes):
            if axis and axis.label == label:
                length = operand.shape[index] * axis.inner
                splits = operand.splits[index]
                if splits is not None and operand.dims_of(index) == dims:
                    possible.append(tuple(point * axis.inner for point in splits))
    sizes = tuple(operands[0].sizes[dim] for dim in dims)
    possible.append(tuple(point * unit for point in balanced_splits(length // unit, sizes)))
    return [splits for splits in dict.fromkeys(possible) if all(point % unit == 0 for point in splits)]


def _splits(axes: Axes, placements: Sequence[Placement], of_label: dict[Hashable, Splits]) -> tuple[Splits | None, ...]:
    sharded = {placement.axis for placement in placements if isinstance(placement, Shard)}
    return tuple(
        tuple(point // max(1, axis.inner) for point in of_label[axis.label]) if axis and index in sharded else None
        for index, axis in enumerate(axes)
    )


def _cost(
    candidate: Plan, operands: Sequence[Sharding], itemsizes: Sequence[int], itemsize: int
) -> tuple[float, int, list[bool]]:
    moves = candidate.moves(operands)
    sent = [(step, size) for taken, size in zip(moves, itemsizes, strict=True) for step in taken if step.sends]
    result = candidate.result
    new = tuple(
        dim
        for index, (dim, _) in enumerate(result.dims)
        if isinstance(result.placements[index], Partial)
        and not any(isinstance(operand.placements[index], Partial) for operand in candidate.operands)
    )
    if new:
        reduced = result.replacing(dict.fromkeys(new, Replicate()))
        sent.append((Step("all_reduce", new, result, reduced), itemsize))
    moved = [bool(taken) for taken in moves]
    return round(sum(wire_bytes(step, size) for step, size in sent), 3), len(sent), moved
