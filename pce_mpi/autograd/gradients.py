"""The gradients of made arrays: the pass that finds them, where they may lie, and how they add up.

A Replicate array has a Replicate or a Partial gradient, a sharded one a gradient in the same shards or Partial. So the
gradients of micro-batches add up without communication, and what is Partial is reduced once, before a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.autograd.tape import Node, backward, no_grad
from pce_mpi.comm.tracing import phase
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.placements import Partial, Replicate


def node_of(x: DistArray) -> Node | None:
    """What stands for `x` on the tape; None if no gradient is to reach it."""
    if x.node is not None or not x.requires_grad:
        return x.node

    def keep(gradient: DistArray) -> tuple[()]:
        _accumulate(x, gradient)
        return ()

    return Node("an array that requires a gradient", (), keep)


def backward_from(loss: DistArray, add: Callable[[DistArray, DistArray], DistArray]) -> None:
    """Add to the gradient of every array that `loss`, a scalar, was computed from and that requires one.

    There is one global loss: however it lies, every rank starts from 1.
    """
    if loss.shape != ():
        raise ValueError(f"backward starts from a scalar, got shape {loss.shape}: take a sum or a mean of it first")
    root = node_of(loss)
    if root is None:
        raise RuntimeError("nothing that this was computed from requires a gradient, or it was computed under no_grad")
    one = array_namespace(loss.local).ones((), loss.dtype)

    def together(a: DistArray, b: DistArray) -> DistArray:
        # Where one is Partial both are: it is reduced once, when all consumers have contributed.
        a, b = _summed(a), _summed(b)
        terms = tuple(dim for dim in a.mesh.dims if Partial("sum") in (a.sharding.by_dim[dim], b.sharding.by_dim[dim]))
        return add(_with_terms_over(terms, a), _with_terms_over(terms, b))

    with phase("backward"), no_grad(), np.errstate(all="ignore"):
        backward(root, DistArray(one, loss.mesh, loss.sharding.replicated), together)


def _with_terms_over(dims: tuple[str, ...], gradient: DistArray) -> DistArray:
    destination = gradient.sharding.with_partial_over(dims)
    return redistribute(gradient, destination, operation="backward", reason="gradients that add up lie alike")


def _accumulate(leaf: DistArray, gradient: DistArray) -> None:
    """Add `gradient` to that of `leaf`; sends nothing, unless it is sharded where `leaf` is not sharded that way."""
    gradient = _summed(gradient)
    before = leaf.grad
    terms = []
    for dim, placement in leaf.sharding.natural.by_dim.items():
        here = {each.sharding.by_dim[dim] for each in (gradient, before) if each is not None}
        # A shard of what is Replicate is padded with zeros, and then is a term like all others.
        if Partial("sum") in here or (placement == Replicate() and here != {Replicate()}):
            terms.append(dim)
    destination = leaf.sharding.natural.with_partial_over(tuple(terms))
    local = redistribute(
        gradient, destination, operation="backward", reason="the gradient lies as its array does"
    ).local
    if before is not None:
        old = redistribute(before, destination, operation="backward", reason="gradients that add up lie alike")
        local = array_namespace(local).asarray(old.local + local)  # of 0-d arrays NumPy makes a scalar
    elif not local.flags.owndata and getattr(local.base, "size", 0) != local.size:
        local = local.copy()  # of a view all that it is a part of would stay in memory
    leaf.grad = DistArray(local, leaf.mesh, destination)


def _summed(gradient: DistArray) -> DistArray:
    """The same gradient, an average written as a sum."""
    averaged = [dim for dim in gradient.sharding.partial_dims if gradient.sharding.by_dim[dim] == Partial("avg")]
    if not averaged:
        return gradient
    parts = gradient.sharding.parts(tuple(averaged))
    sharding = gradient.sharding.replacing(dict.fromkeys(averaged, Partial("sum")))
    local = array_namespace(gradient.local).asarray(gradient.local / gradient.dtype.type(parts))
    return DistArray(local, gradient.mesh, sharding)
