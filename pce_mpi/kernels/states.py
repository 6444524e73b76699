"""The states of rows and their merge, in NumPy; `states.h` has the same bits.

The grid of a row's sum of exponentials follows from the largest logit that is not held apart, so that the state of a
union is the merge of the states, to the last bit, in any order and for any cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.kernels.elementary import HUGE, any_two_product, exponential, f32, f64, i64, scaled, transformed, u64
from pce_mpi.kernels.interface import FORGOTTEN, NO_ENTROPY, SINGLE, Pass, Precision, StateFields, Transform
from pce_mpi.kernels.limbs import Sums, limbs_of, of_kinds, shifted, sum_of, sum_of_numbers, united, united_numbers

Array = Any  # numpy.ndarray, whose operators on fields of states would take mypy a third of its time

# The grid of an empty sum of exponentials.
_NO_SUM = -(2**61)
_LARGE = 2.0**800


def states_of(x: Array, target_column: Array | None, how: Pass, u: Array | None, first_class: int) -> Array:
    """Return the states of a block of logits, (rows, classes), with the weights u.

    `target_column` has the column of each row's target, -1 if the block does not have it.
    """
    fields = how.fields
    states = fields.identity(len(x))
    if not x.shape[1]:
        return states
    here, columns = np.empty(0, np.intp), np.empty(0, np.intp)
    if target_column is not None:
        here = np.flatnonzero((target_column >= 0) & (target_column < x.shape[1]))
        columns = target_column[here]
    if fields.target:
        states["target"][here] = _canonical(x[here, columns])
    if fields.hold_largest:
        here, columns = np.arange(len(x)), _largest(x, u if fields.held_weight else None)
    if fields.argmax:
        states["argmax"] = first_class + columns
    states["held"][here] = _canonical(x[here, columns])
    others = np.ones(x.shape, np.bool_)
    others[here, columns] = False
    weight = np.broadcast_to(1.0 if u is None else u, x.shape)
    if fields.held_weight:
        states["held_weight"][here] = _canonical(weight[here, columns])
    _fill_sums(states, x, others, weight, how)
    return states


def _largest(x: Array, u: Array | None) -> Array:
    """Return the column of the largest logit, a nan before numbers; among equal ones the first, or that of most weight.

    A weight that is nan loses.
    """
    if u is None:
        return x.argmax(axis=1)
    largest = x.max(axis=1, keepdims=True)
    is_largest = (x == largest) | (np.isnan(largest) & np.isnan(x))
    known = is_largest & ~np.isnan(u)
    heaviest = np.where(known, u, -np.inf).max(axis=1, keepdims=True)
    chosen = np.where(known.any(axis=1, keepdims=True), known & (u == heaviest), is_largest)
    return chosen.argmax(axis=1)


def _canonical(values: Array) -> Array:
    """Return float64 with one bit pattern for nan and one for zero."""
    return np.where(np.isnan(values), np.nan, values.astype(f64)) + 0.0


def grid_of(x: Array, transform: Transform, precision: Precision) -> Array:
    """Return the grid of a sum of exponentials whose largest term is that of the logit x, (rows,)."""
    finite = np.where(np.isfinite(x), x, 0.0)
    if precision is SINGLE:
        finite = finite.astype(f32)
    return exponential(finite, transform, precision).n // precision.width


def is_huge(x: Array, transform: Transform) -> Array:
    """Return which logits are finite and so large that beside one as the largest only equal ones count."""
    return np.isfinite(x) & ~(np.abs(transformed(x, transform)[0]) < HUGE)


def _counts(x: Array, largest: Array, transform: Transform) -> Array:
    """Return which logits count beside the largest: beside a huge one only equal ones do.

    A sum of exponentials drops by itself what is so far below.
    """
    return (x == largest) | ~is_huge(largest, transform)


def _fill_sums(states: Array, x: Array, others: Array, weight: Array, how: Pass) -> None:
    """Fill the sums of `states` from the classes that are not held apart."""
    fields, transform, precision = how
    if not fields.hold_largest:
        top = np.max(x, axis=1, where=others, initial=-np.inf).astype(f64)
        states["top"] = _canonical(np.where(top == np.inf, np.nan, top))
    largest = states["held" if fields.hold_largest else "top"]
    counted = others & np.isfinite(x) & np.isfinite(largest)[:, None]
    counted &= _counts(x, largest[:, None], transform)
    e = exponential(x, transform, precision)
    if fields.hold_largest:
        none = np.iinfo(i64).min // 2
        n = np.where(counted, e.n, none).max(axis=1)
        depth = grid_of(largest, transform, precision) - n // precision.width
        states["depth"] = np.where(n == none, FORGOTTEN, np.minimum(depth, FORGOTTEN))
        grids = np.where(n == none, 0, n // precision.width)
    else:
        grids = grid_of(states["top"], transform, precision)
    unit = precision.width * (grids - 2)[:, None]
    fixed = np.where(counted, e.fixed_point(precision), 0)
    exponent = e.n - precision.point
    states["sum"] = limbs_of(fixed, exponent, unit, precision.width).sum(axis=1, dtype=u64)
    if fields.hold_largest:
        states["sum"][states["depth"] == FORGOTTEN] = 0
    if fields.entropy:
        z, low = transformed(x.astype(f64), transform)
        needed = counted & (np.abs(z) < HUGE)  # beside a huge logit only equal ones count
        z, low = np.where(needed, z, 0.0), np.where(needed, low, 0.0)
        # A float64 holds all bits of SINGLE's fixed-point numbers, and half of those of DOUBLE's.
        digits = max(0, precision.point - 30)
        upper = fixed >> digits << digits
        parts = [*any_two_product(upper.astype(f64), z), *any_two_product((fixed - upper).astype(f64), z)]
        parts.append(fixed.astype(f64) * low)
        states["entropy_grid"], states["exp_logit"] = sum_of(parts, exponent, NO_ENTROPY)
    weight = np.where(others, weight, 0.0)
    if fields.weight:
        states["weight_grid"], states["weight"] = sum_of_numbers(weight)
    if fields.weighted_logit:
        states["logit_grid"], states["weighted_logit"] = _weighted_logits(x, weight, transform)


def _weighted_logits(x: Array, weight: Array, transform: Transform) -> Sums:
    """Sum u z over all classes whose u is not 0."""
    z, low = transformed(x.astype(f64), transform)
    masked, usable = (z == -np.inf) & (weight != 0.0), np.isfinite(z)
    z, low, unit = in_units(np.where(usable, z, 0.0), np.where(usable, low, 0.0))
    product, rest = any_two_product(weight, z)
    # The kind is that of the sum of u (-log p): weights on masked classes make it infinite, and so do infinite ones.
    strange = np.where(masked, np.copysign(np.inf, weight), np.where(np.isfinite(product), 0.0, np.nan))
    return of_kinds(sum_of([product, rest + weight * low], unit), np.where(np.isfinite(weight), strange, weight))


def in_units(z: Array, low: Array) -> tuple[Array, Array, Array]:
    """Return z 2^-unit, its rounding error and the unit: 128 for z whose products may overflow, else 0."""
    unit = np.where(np.abs(z) >= _LARGE, i64(128), i64(0))
    return (scaled(z, -unit), scaled(low, -unit), unit) if unit.any() else (z, low, unit)


def merge(a: Array, b: Array, how: Pass) -> None:
    """Merge the states `a` of some classes into the states `b` of others, of the same rows."""
    with np.errstate(all="ignore"):
        union_of = _union_holding_largest if how.fields.hold_largest else _union_holding_targets
        b[...] = union_of(a, b, how)


def _union_holding_targets(a: Array, b: Array, how: Pass) -> Array:
    fields, transform, precision = how
    union = fields.identity(*a.shape)
    union["held"] = np.maximum(a["held"], b["held"])
    union["top"] = top = np.maximum(a["top"], b["top"])
    if fields.held_weight:  # 0 on every shard but the one that has the target
        union["held_weight"] = a["held_weight"] + b["held_weight"]
    grids, huge = grid_of(top, transform, precision), is_huge(top, transform)
    for state in (a, b):
        coarser = np.where(huge & (state["top"] != top), 3, grids - grid_of(state["top"], transform, precision))
        union["sum"] += shifted(state["sum"], np.where(state["top"] == -np.inf, 3, coarser))
    union["sum"][np.isnan(top)] = 0
    _unite_weighted(union, fields, a, b)
    return union


def _union_holding_largest(a: Array, b: Array, how: Pass) -> Array:
    """Hold the larger of the two classes held apart; the other one joins the sums."""
    fields, transform, precision = how
    union = fields.identity(*a.shape)
    swap = _b_is_held(a, b, fields)
    smaller: Array = np.where(swap, a, b)
    larger: Array = np.where(swap, b, a)
    for name in {"held", "held_weight", "argmax"} & set(fields.names):
        union[name] = larger[name]
    if fields.target:
        union["target"] = np.maximum(a["target"], b["target"])
    alone = fields.identity(*a.shape)
    alone["held"] = smaller["held"]
    weight = smaller["held_weight"] if fields.held_weight else np.zeros(a.shape)
    others = np.ones((len(a), 1), np.bool_)
    _fill_sums(alone, smaller["held"][:, None], others, weight[:, None], how)
    bad = ~np.isfinite(union["held"])
    sums, entropies = [], []
    for state in (a, b, alone):
        gone = bad | ~_counts(state["held"], union["held"], transform)
        grids = grid_of(state["held"], transform, precision) - state["depth"]
        sums.append(Sums(np.where(gone | (state["depth"] == FORGOTTEN), _NO_SUM, grids), state["sum"]))
        if fields.entropy:
            entropies.append(Sums(np.where(gone, NO_ENTROPY, state["entropy_grid"]), state["exp_logit"]))
    grids, limbs = united(_NO_SUM, *sums)
    depth = np.minimum(grid_of(union["held"], transform, precision) - grids, FORGOTTEN)
    union["depth"] = depth = np.where(grids == _NO_SUM, FORGOTTEN, depth)
    union["sum"] = np.where((depth == FORGOTTEN)[:, None], u64(0), limbs)
    if fields.entropy:
        union["entropy_grid"], union["exp_logit"] = united(NO_ENTROPY, *entropies)
    _unite_weighted(union, fields, a, b, alone)
    return union


def _unite_weighted(union: Array, fields: StateFields, *states: Array) -> None:
    for present, grid, name in (
        (fields.weight, "weight_grid", "weight"),
        (fields.weighted_logit, "logit_grid", "weighted_logit"),
    ):
        if present:
            sums = (Sums(state[grid].astype(i64), state[name]) for state in states)
            union[grid], union[name] = united_numbers(*sums)


def _b_is_held(a: Array, b: Array, fields: StateFields) -> Array:
    """Return the rows whose class held apart is that of `b`: a nan before numbers, then the larger logit.

    Among equal logits the lower class is held or, if states have no classes, that with the larger weight; a nan loses.
    """
    nan_a, nan_b = np.isnan(a["held"]), np.isnan(b["held"])
    first = np.zeros(a.shape, np.bool_)
    if fields.argmax:
        first = b["argmax"] < a["argmax"]
    elif fields.held_weight:
        first = (b["held_weight"] > a["held_weight"]) | (np.isnan(a["held_weight"]) & ~np.isnan(b["held_weight"]))
    larger = (b["held"] > a["held"]) | ((b["held"] == a["held"]) & first)
    return np.where(nan_a | nan_b, nan_b & (~nan_a | first), larger)
