"""The matrix product of matrices, stacks of matrices and vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, is_floating, is_half, result_type
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.exact.products import product
from pce_mpi.exact.sums import reduced
from pce_mpi.ops.broadcasting import aligned, sum_to
from pce_mpi.ops.shape import reshape

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _rule(a: Shape, b: Shape) -> Rule:
    """Return the rule: m k times k n gives m n, stacks broadcast, and shards of k give a Partial result."""
    stack = np.broadcast_shapes(a[:-2], b[:-2])
    m, k, n = Axis("m"), Axis("k"), Axis("n")
    return Rule(
        ((*aligned(a[:-2], stack), m, k), (*aligned(b[:-2], stack), k, n)),
        (*aligned(stack, stack), m, n),
        (*stack, a[-2], b[-1]),
        linear=((0,), (1,)),
        reduces="sum",
    )


def _tall(stack: Array) -> Array:
    """Concatenate the matrices of `stack` by rows."""
    return stack.reshape(math.prod(stack.shape[:-1]), stack.shape[-1])  # not -1: a shard may have no columns


def _product(a: Array, b: Array) -> Array:
    xp = array_namespace(a)
    dtype = result_type(a.dtype, b.dtype)
    if xp is np and is_half(dtype):  # NumPy's product of halves is slow, and that of bfloat16 is float32
        return xp.matmul(a.astype(np.float32), b.astype(np.float32)).astype(dtype)
    return xp.matmul(a, b)


def _matmul(call: Call, a: Array, b: Array, product: Callable[[Array, Array], Array] = _product) -> Array:
    if a.ndim > 2 and b.ndim == 2:  # one product of a tall matrix is faster than a stack of products
        return product(_tall(a), b).reshape(*a.shape[:-1], b.shape[-1])
    return product(a, b)


def _exact(multiply: Callable[..., Array], length: Callable[[Shape], int]) -> Callable[..., Array]:
    """Make the exact form of `multiply(call, a, b, product)`; its sums have `length(global shape of a)` terms."""

    def exact(call: Call, a: Array, b: Array) -> Array:
        dtype, comm = result_type(a.dtype, b.dtype), call.summed_comm
        if not is_floating(dtype):
            return reduced(multiply(call, a, b, _product), comm)
        terms = length(call.operands[0].shape)
        a, b = (x.astype(dtype, copy=False) for x in (a, b))
        return multiply(call, a, b, lambda a, b: product(a, b, terms, comm))

    return exact


def _transposed_product_rule(a: Shape, g: Shape) -> Rule:
    stack = tuple(Axis(index) for index in range(len(a) - 1))
    return Rule(
        ((*stack, Axis("k")), (*stack, Axis("n"))),
        (Axis("k"), Axis("n")),
        (a[-1], g[-1]),
        linear=((0,), (1,)),
        reduces="sum",
    )


def _transposed_product(call: Call, a: Array, g: Array, product: Callable[[Array, Array], Array] = _product) -> Array:
    return product(_tall(a).T, _tall(g))


# a.T @ g, summed over the stack: the gradient of a matrix that multiplies a stack.
_TRANSPOSED_PRODUCT = Op(
    "matmul",
    _transposed_product,
    rule=_transposed_product_rule,
    exact=_exact(_transposed_product, lambda a: math.prod(a[:-1])),
)


def _by_transposed(call: Call, g: Array, b: Array, *product: Callable[[Array, Array], Array]) -> Array:
    return _matmul(call, g, b.swapaxes(-1, -2), *product)


def _of_transposed(call: Call, a: Array, g: Array, *product: Callable[[Array, Array], Array]) -> Array:
    return _matmul(call, a.swapaxes(-1, -2), g, *product)


# The products g @ b.T and a.T @ g of stacks of matrices, each in one operation rather than with a transposition.
_BY_TRANSPOSED = Op(
    "matmul",
    _by_transposed,
    rule=lambda g, b: _exchanged(_rule(g, _turned(b)), 1),
    exact=_exact(_by_transposed, lambda g: g[-1]),
)
_OF_TRANSPOSED = Op(
    "matmul",
    _of_transposed,
    rule=lambda a, g: _exchanged(_rule(_turned(a), g), 0),
    exact=_exact(_of_transposed, lambda a: a[-2]),
)


def _turned(axes: Any) -> Any:
    return (*axes[:-2], axes[-1], axes[-2])


def _exchanged(rule: Rule, operand: int) -> Rule:
    """Return `rule` for an operand whose last two axes are exchanged."""
    operands = list(rule.operands)
    operands[operand] = _turned(operands[operand])
    return replace(rule, operands=tuple(operands))


def times_transposed(a: DistArray, b: DistArray) -> DistArray:
    """Return a @ b.T for matrices or stacks of them; it has no gradient."""
    return apply(_BY_TRANSPOSED, a, b)


def transposed_times(a: DistArray, b: DistArray) -> DistArray:
    """Return a.T @ b for matrices or stacks of them; it has no gradient."""
    return apply(_OF_TRANSPOSED, a, b)


def _to_first(g: DistArray, y: DistArray, a: DistArray, b: DistArray) -> DistArray:
    return sum_to(times_transposed(g, b), a.shape)


def _to_second(g: DistArray, y: DistArray, a: DistArray, b: DistArray) -> DistArray:
    if b.ndim == 2:
        return apply(_TRANSPOSED_PRODUCT, a, g)
    return sum_to(transposed_times(a, g), b.shape)


_MATMUL = Op(
    "matmul", _matmul, (_to_first, _to_second), _rule, uses=[(1,), (0,)], exact=_exact(_matmul, lambda a: a[-1])
)


# NumPy adds up products of booleans by "or", which is their maximum.
_OF_BOOLEANS = Op("matmul", _matmul, rule=lambda a, b: replace(_rule(a, b), linear=(), reduces="max"))


@operation
def matmul(x: Any, y: Any) -> DistArray:
    """Multiply matrices, stacks of matrices or vectors, as the operator `@` does.

    Parameters
    ----------
    x : DistArray or array_like of shape (..., m, k) or (k,)
        The first factor; at least one factor is a `DistArray`.
    y : DistArray or array_like of shape (..., k, n) or (k,)
        The second factor.

    Returns
    -------
    DistArray
        The product, of shape (..., m, n); a vector's axis is left out. Stacks broadcast and dtypes promote as in
        NumPy. Products of halves are computed in float32 and rounded once; those of booleans are booleans.

    Raises
    ------
    TypeError
        If neither factor is a `DistArray`.
    ValueError
        If a factor is 0-d, the lengths of k differ, or the stacks do not broadcast.

    Notes
    -----
    Beside a Replicate factor a sharded m or n stays sharded, and Partial @ Replicate is Partial. If both factors are
    sharded on k the product is Partial. Nothing is sent in these cases, except that a product of booleans is reduced at
    once; in others, factors are redistributed with the fewest bytes. The gradient of `y` is Partial if m or the stack
    is sharded.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([[1.0, 2.0]]), mesh, data=pce.Shard(1))
    >>> y = pce.matmul(x, pce.distribute(np.eye(2), mesh, data=pce.Shard(0)))
    >>> y.placements, y.full()
    ({'data': Partial('sum')}, array([[1., 2.]]))
    """
    shapes = [each.sharding.shape if isinstance(each, DistArray) else np.shape(each) for each in (x, y)]
    if not all(shapes):
        raise ValueError("matmul takes no scalars; use *")
    (a, b), first, second = shapes, x, y
    if a[-1] != (b[-2] if len(b) > 1 else b[0]):
        raise ValueError(
            f"matmul: the last axis of {a} and the {'last but one' if len(b) > 1 else 'axis'} of {b} differ"
        )
    if len(a) == 1:
        first = _as_matrix(x, (1, *a))
    if len(b) == 1:
        second = _as_matrix(y, (*b, 1))
    op = _MATMUL
    for each, other in ((first, second), (second, first)):
        if isinstance(each, DistArray) and each.local.dtype == np.bool_ and _dtype_of(other) == np.bool_:
            op = _OF_BOOLEANS
    product = apply(op, first, second)
    if len(a) > 1 and len(b) > 1:
        return product
    shape = [*product.shape[:-2], *product.shape[-2:-1][len(a) == 1 :], *product.shape[-1:][len(b) == 1 :]]
    return reshape(product, shape)


def _dtype_of(value: Any) -> np.dtype[Any]:
    return value.dtype if isinstance(value, DistArray) else as_array(value, "a factor of matmul").dtype


def _as_matrix(vector: Any, shape: Shape) -> Any:
    return reshape(vector, shape) if isinstance(vector, DistArray) else np.reshape(vector, shape)
