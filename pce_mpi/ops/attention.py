"""Scaled dot product attention as one operation: keys and values are whole on each rank, queries may be sharded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, Shape, array_namespace, is_floating, is_half, result_type
from pce_mpi.autograd.apply import Call, Op, apply, operands_of, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.kernels import layer_loops
from pce_mpi.ops.arithmetic import where
from pce_mpi.ops.elementwise import astype, widened_with_sums
from pce_mpi.ops.products import matmul, transposed_times
from pce_mpi.ops.shape import local_extreme, swapaxes
from pce_mpi.ops.softmax import softmax
from pce_mpi.validation import flag, real


def _rule(q: Shape, k: Shape, v: Shape, causal: bool, scale: float) -> Rule:
    """Return the rule: a row of the result takes one query, and all keys and values of its stack."""
    stack = tuple(map(Axis, range(len(q) - 2)))
    query, column = Axis("query"), Axis("column")
    return Rule(
        ((*stack, query, None), (*stack, None, None), (*stack, None, column)), (*stack, query, column), (*q[:-1], v[-1])
    )


class _Probabilities:
    """The probabilities of a call, and the gradient of its scores, which the vjps of queries and keys share."""

    def __init__(self, local: Array) -> None:
        self._local = local
        self._of_scores: DistArray | None = None

    def placed(self, y: DistArray, keys: int) -> DistArray:
        """Return the probabilities, placed as the result `y`."""
        return DistArray(self._local, y.mesh, y.sharding.with_whole_axis(y.ndim - 1, keys))

    def gradient_of_scores(self, g: DistArray, y: DistArray, v: DistArray, scale: float) -> DistArray:
        """Return the gradient of q @ k.T."""
        if self._of_scores is None:
            self._of_scores = apply(_SCORES, g, y, v, self.placed(y, v.shape[-2]), scale=scale)
        return self._of_scores


def _attention(call: Call, q: Array, k: Array, v: Array, causal: bool, scale: float) -> Array:
    xp = array_namespace(q)
    p = xp.matmul(q * q.dtype.type(scale), k.swapaxes(-1, -2))
    first = call.operands[0].block(q.ndim - 2, call.mesh.coordinates)[0] if causal else p.shape[-1]
    if p.dtype == np.float32 and (loops := layer_loops(p)):
        loops.attend(p, first + 1)
    else:
        _softmax(xp, p, first)
    call.residuals = _Probabilities(p)
    return xp.matmul(p, v)


def _softmax(xp: Any, p: Array, first: int) -> None:
    """Replace scores by their softmax; query q sees the keys 0 to `first` + q."""
    if first < p.shape[-1]:
        xp.copyto(p, p.dtype.type(-np.inf), where=xp.triu(xp.ones(p.shape[-2:], bool), 1 + first))
    p -= local_extreme("max", p, (p.ndim - 1,), True, 0)
    xp.exp(p, out=p)
    p /= _row_sums(p)


def _row_sums(x: Array) -> Array:
    """Return the sums along the last axis, which stays with length 1."""
    # For the short rows of a head this takes a fifth of the time of x.sum(-1).
    return array_namespace(x).einsum("...i->...", x)[..., None]


def _scores(call: Call, g: Array, y: Array, v: Array, p: Array, scale: float) -> Array:
    """Return the gradient of q @ k.T: scale p (g v.T - sum(g y))."""
    scores = array_namespace(g).matmul(g, v.swapaxes(-1, -2))
    scores -= _row_sums(g * y)
    scores *= p
    scores *= scores.dtype.type(scale)
    return scores


def _scores_rule(g: Shape, y: Shape, v: Shape, p: Shape, scale: float) -> Rule:
    stack = tuple(map(Axis, range(len(g) - 2)))
    query, column = Axis("query"), Axis("column")
    row, whole = (*stack, query, column), (*stack, query, None)
    return Rule((row, row, (*stack, None, column), whole), whole, p, reduces="sum")


_SCORES = Op("scaled_dot_product_attention", _scores, rule=_scores_rule)


def _composed(q: DistArray, k: DistArray, v: DistArray, causal: bool, scale: float) -> DistArray:
    """Compute the result from operations that have a reproducible form."""
    scores = matmul(q * scale, swapaxes(k, -1, -2))
    if causal:
        scores = where(array_namespace(q.local).tri(*scores.shape[-2:], dtype=bool), scores, -math.inf)
    return matmul(softmax(scores), v)


_ATTENTION = Op(
    "scaled_dot_product_attention",
    _attention,
    (
        lambda g, y, q, k, v, residuals, causal, scale: residuals.gradient_of_scores(g, y, v, scale) @ k,
        lambda g, y, q, k, v, residuals, causal, scale: transposed_times(
            residuals.gradient_of_scores(g, y, v, scale), q
        ),
        lambda g, y, q, k, v, residuals, **_: transposed_times(residuals.placed(y, v.shape[-2]), g),
    ),
    _rule,
    uses=[(-1, 1, 2), (-1, 0, 2), ()],
    composition=_composed,
)


@operation
def scaled_dot_product_attention(
    q: DistArray, k: DistArray, v: DistArray, causal: bool = False, scale: float | None = None
) -> DistArray:
    """Average values by the softmax of the products of queries and keys.

    The result is softmax(scale q k.T) v, the softmax along the keys; Vaswani et al., Attention Is All You Need, 2017.

    Parameters
    ----------
    q : DistArray of shape (..., queries, d)
        The queries, of a floating dtype.
    k : DistArray of shape (..., keys, d)
        The keys.
    v : DistArray of shape (..., keys, columns)
        The values.
    causal : bool, optional
        Query i sees the keys 0 to i only.
    scale : float, optional
        The factor of the products; d**-0.5 unless given.

    Returns
    -------
    DistArray
        The averages, of shape (..., queries, columns). Halves are computed in float32 and rounded once.

    Raises
    ------
    TypeError
        If an operand is not of a floating dtype.
    ValueError
        If the shapes do not fit; those before the last two axes must be equal.

    Notes
    -----
    Sharded stacks, and sharded queries or columns of values beside whole keys, stay so, and nothing is sent. Operands
    whose keys are sharded are redistributed with the fewest bytes. The gradients of whole keys and values are Partial
    if queries are sharded; those of halves are reduced at once, in float32, and then rounded.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, context=1)
    >>> q, k, v = (pce.distribute(np.eye(2), mesh, context=pce.Shard(0)) for _ in range(3))
    >>> pce.scaled_dot_product_attention(q, k, v, causal=True, scale=0.0).full()
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    name = "scaled_dot_product_attention"
    operands = operands_of(name, (q, k, v))
    for x in operands:
        if not is_floating(x.dtype):
            raise TypeError(f"{name} is of real numbers, got {x.dtype}")
    shapes = [x.shape for x in operands]
    fit = all(len(shape) > 1 and shape[:-2] == shapes[0][:-2] for shape in shapes)
    if not fit or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]:
        raise ValueError(f"{name}: queries, keys and values of shapes {', '.join(map(str, shapes))} do not fit")
    factor = 1 / math.sqrt(max(1, shapes[0][-1])) if scale is None else real(scale, "scale")
    # Plain arrays stay plain: `apply` compares those of which ranks hold the same elements.
    wide = [
        widened_with_sums(x) if x is value else x.local.astype(np.float32) if is_half(x.dtype) else x.local
        for x, value in zip(operands, (q, k, v), strict=True)
    ]
    y = apply(_ATTENTION, *wide, causal=flag(causal, "causal"), scale=factor)
    return astype(y, result_type(*(x.dtype for x in operands)))
