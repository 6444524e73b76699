"""Sums over axes for variances and norms, in float64, and distances from the mean that keep their digits.

The mean of numbers far from 0 is rounded to a multiple of a large ulp, so the distances from it do not sum to 0. Their
sum corrects them; over a sharded axis it is sent together with the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.autograd.apply import apply, redistributed
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import Replicate
from pce_mpi.exact.sums import total
from pce_mpi.ops.broadcasting import kept_shape
from pce_mpi.ops.elementwise import elementwise_rule, widened

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _terms(x: Array, *factor: Array, plain: bool) -> list[Array]:
    return ([x] if plain else []) + [x * other for other in factor]


def _sums(call: Call, x: Array, *factor: Array, axes: tuple[int, ...], plain: bool) -> Array:
    xp, shape = array_namespace(x), kept_shape(x.shape, axes)
    left = [axis for axis in range(x.ndim) if axis not in axes]
    found = [
        # NumPy adds up in pairs only along the last axis.
        xp.ascontiguousarray(term.transpose(*left, *axes)).reshape(*(x.shape[axis] for axis in left), -1).sum(-1)
        if term.size
        else xp.zeros(math.prod(shape))
        for term in _terms(x, *factor, plain=plain)
    ]
    return xp.stack([each.reshape(shape) for each in found])


def _exact_sums(call: Call, x: Array, *factor: Array, axes: tuple[int, ...], plain: bool) -> Array:
    length = count_of(call.operands[0].shape, axes)
    terms = array_namespace(x).stack(_terms(x, *factor, plain=plain))
    return total(terms, tuple(axis + 1 for axis in axes), length, call.summed_comm)


def _rule(x: Shape, *factor: Shape, axes: tuple[int, ...], plain: bool) -> Rule:
    labels = tuple(map(Axis, range(len(x))))
    rows = tuple(None if axis in axes else label for axis, label in enumerate(labels))
    shape = (plain + len(factor), *kept_shape(x, axes))
    return Rule((labels,) * (1 + len(factor)), (None, *rows), shape, reduces="sum")


_IN_FLOAT64 = Op(
    "astype",
    lambda call, x: x.astype(np.float64),
    (lambda g, y, x: g,),
    elementwise_rule(),
    dtype=lambda _: np.float64,
    uses=[()],
    relays=True,
)
_SUMS = Op("sum", _sums, rule=_rule, exact=_exact_sums)


def sums(x: DistArray, *factor: DistArray, axes: tuple[int, ...], plain: bool = True) -> DistArray:
    """Return the sums of `x`, if `plain`, and then of `x` times `factor`, along a new first axis.

    They are float64 and have no gradient. The summed axes stay with length 1. Sums over a sharded axis are reduced
    together.
    """
    found = apply(_SUMS, x.detach(), *(each.detach() for each in factor), axes=axes, plain=plain)
    with cause("sum", reason="the sums of all shards, together"):
        return redistributed(found, found.sharding.replacing(dict.fromkeys(found.sharding.partial_dims, Replicate())))


def count_of(shape: Shape, axes: Sequence[int]) -> int:
    """Return the number of elements along `axes`."""
    return math.prod(shape[axis] for axis in axes)


def in_float64(x: DistArray) -> DistArray:
    """Return `x` as float64; a Partial one is reduced first, while it is smaller."""
    x = widened(x)
    return x if x.dtype == np.float64 else apply(_IN_FLOAT64, x)


def deviations(x: DistArray, axes: tuple[int, ...]) -> tuple[DistArray, DistArray]:
    """Return the distances of `x` from its rounded mean, in float64, and the sums of them and of their squares.

    The mean has no gradient. Equal elements have equal distances of a few ulp: their sums are exact, so that the square
    of their mean is the mean of their squares.
    """
    near = x - sums(x, axes=axes)[0] / count_of(x.shape, axes)
    return near, sums(near, near, axes=axes)
