"""The gradients of made arrays: the backward pass, the placements of a gradient, and how gradients add up.

The gradient of a Replicate array is Replicate or Partial; that of a sharded array has the same shards or is Partial. So
the gradients of micro-batches add up without communication, and a Partial gradient is reduced once, before a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.autograd.tape import Node, Place, backward, no_grad
from pce_mpi.comm.tracing import cause, listeners, phase
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.fingerprint import announce_result
from pce_mpi.distributed.placements import Partial, Replicate
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.exact.arithmetic import current, reset_current, set_current
from pce_mpi.hollow import enter, has_other_size, open_ledger

_ONE_PLACEMENT = "gradients that add up have one placement"


def place_of(x: DistArray) -> Place | None:
    """Return the place of `x` on the tape; None if no gradient is to reach it."""
    if x.place is not None or not x.requires_grad:
        return x.place

    def keep(gradients: Sequence[DistArray]) -> tuple[()]:
        _accumulate(x, gradients[0])
        return ()

    return Node("an array that requires a gradient", (), keep, 1, current()), 0


def backward_from(loss: DistArray, add: Callable[[DistArray, DistArray], DistArray]) -> None:
    """Add the gradients of `loss`, a scalar, to the arrays that it was computed from and that require a gradient.

    There is one global loss: every rank starts from 1, whatever the placement.
    """
    if loss.shape != ():
        raise ValueError(f"backward starts from a scalar, got shape {loss.shape}: take a sum or a mean of it first")
    root = place_of(loss)
    if root is None:
        raise RuntimeError("nothing that this was computed from requires a gradient, or it was computed under no_grad")
    one = array_namespace(loss.local).ones((), loss.dtype)

    def together(a: DistArray, b: DistArray) -> DistArray:
        # If one is Partial, both become Partial: the sum is reduced once, when all consumers have contributed.
        a, b = _summed(a), _summed(b)
        if a.sharding is not b.sharding:
            dims = tuple(dim for dim in a.mesh.dims if dim in (*a.sharding.summed_dims, *b.sharding.summed_dims))
            a, b = (_placed_as(each, each.sharding.with_partial_over(dims), _ONE_PLACEMENT) for each in (a, b))
        return add(a, b)

    token = set_current(current())
    try:
        with phase("backward"), no_grad(), np.errstate(all="ignore"):
            backward(root, DistArray(one, loss.mesh, loss.sharding.replicated), together, set_current)
    finally:
        reset_current(token)


def _placed_as(gradient: DistArray, destination: Sharding, reason: str) -> DistArray:
    if gradient.sharding is destination:
        return gradient
    with cause("backward", reason=reason):
        return redistribute(gradient, destination)


def _accumulate(leaf: DistArray, gradient: DistArray) -> None:
    """Add `gradient` to `leaf.grad`; communicate only if `gradient` is sharded in a way that `leaf` is not."""
    if listeners():
        announce_result("gradient", gradient)
    gradient = _summed(gradient)
    before = leaf.grad
    destination = leaf.sharding.natural
    if current().partial_gradients:
        destination = _placed(leaf.sharding, gradient.sharding, None if before is None else before.sharding)
    local = _placed_as(gradient, destination, "the gradient is placed as its array").local
    if before is not None:
        old = _placed_as(before, destination, _ONE_PLACEMENT)
        local = array_namespace(local).asarray(old.local + local)  # NumPy's sum of 0-d arrays is a scalar
    elif has_other_size(local):
        local = local.copy()  # a view would keep the whole array in memory
    if open_ledger() is not None:
        enter(local, "gradients")
    leaf.grad = DistArray(local, leaf.mesh, destination)


@lru_cache(maxsize=1024)
def _placed(leaf: Sharding, gradient: Sharding, before: Sharding | None) -> Sharding:
    """Return the sharding of a made array's gradient; `before` is that of its gradient so far, if any."""
    dims = []
    for dim, placement in leaf.natural.by_dim.items():
        here = {each.by_dim[dim] for each in (gradient, before) if each is not None}
        # A shard of the gradient of a Replicate array is padded with zeros, which makes it a partial.
        if Partial("sum") in here or (placement == Replicate() and here != {Replicate()}):
            dims.append(dim)
    return leaf.natural.with_partial_over(tuple(dims))


def _summed(gradient: DistArray) -> DistArray:
    """Return the same gradient with Partial("sum") instead of Partial("avg")."""
    if gradient.sharding.partial_dims == gradient.sharding.summed_dims:
        return gradient
    averaged = [dim for dim in gradient.sharding.partial_dims if gradient.sharding.by_dim[dim] == Partial("avg")]
    parts = gradient.sharding.parts(tuple(averaged))
    sharding = gradient.sharding.replacing(dict.fromkeys(averaged, Partial("sum")))
    local = array_namespace(gradient.local).asarray(gradient.local / gradient.dtype.type(parts))
    return DistArray(local, gradient.mesh, sharding)
