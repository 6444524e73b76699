"""Functions of each element of one operand, and what they share with operations on several operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating, is_half, numpy_dtype
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op
from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.kernels import converted
from pce_mpi.ops.broadcasting import aligned

Array = Any  # numpy.ndarray or cupy.ndarray


def elementwise_rule(*linear: Sequence[int]) -> Callable[..., Rule]:
    """Make the rule of an elementwise operation: axes are labelled from the last, as NumPy aligns them."""

    def rule(*shapes: tuple[int, ...], **_: Any) -> Rule:
        shape = np.broadcast_shapes(*shapes)
        operands = tuple(aligned(operand, shape) for operand in shapes)
        return Rule(operands, aligned(shape, shape), shape, linear=tuple(tuple(group) for group in linear))

    return rule


def library_function(name: str) -> Callable[..., Array]:
    """Make the forward function that is the function `name` of the array's library."""
    return lambda call, *arrays: getattr(call.functions(arrays[0]), name)(*arrays)


def gradient_op(name: str, forward: Callable[..., Array], *linear: Sequence[int]) -> Op:
    """Make one operation of a whole gradient, so that a gradient of halves is rounded once."""
    return Op(name, _of_functions(forward), rule=elementwise_rule(*linear), wide=True)


def unary(
    name: str,
    pull: Callable[..., Array],
    forward: Callable[..., Array] | None = None,
    exact: Callable[..., Array] | None = None,
) -> Op:
    """Make an operation on one operand: NumPy's function of that name, or `forward`, which keeps the dtype.

    `pull` takes the gradient of the result and the operand, as the result may be rounded to a half. Both functions
    take the library of the array as their first argument.
    """
    gradient = gradient_op(name, pull)
    return Op(
        name,
        _of_functions(forward) if forward else library_function(name),
        (lambda g, y, x: apply(gradient, g, x),),
        elementwise_rule(),
        dtype=np.result_type if forward else numpy_dtype(name),
        uses=[(0,)],
        wide=True,
        exact=exact,
    )


def _of_functions(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda call, *arrays: function(call.functions(arrays[0]), *arrays)


def _astype_rule(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rule:
    # A conversion to integers truncates, which is not linear.
    return elementwise_rule(*([[0]] if is_floating(dtype) else []))(shape)


_NEGATIVE = Op(
    "negative",
    library_function("negative"),
    (lambda g, y, x: -g,),
    elementwise_rule([0]),
    numpy_dtype("negative"),  # refuses bool
    uses=[()],
)
_SQUARE = unary("square", lambda xp, g, x: 2 * (g * x))
_EXP = unary("exp", lambda xp, g, x: g * xp.exp(x))
_LOG = unary("log", lambda xp, g, x: g / x)
_LOG1P = unary("log1p", lambda xp, g, x: g / (1 + x))
_SIN = unary("sin", lambda xp, g, x: g * xp.cos(x))
_COS = unary("cos", lambda xp, g, x: -g * xp.sin(x))
_ABS = unary("abs", lambda xp, g, x: g * xp.sign(x))
_SQRT = unary("sqrt", lambda xp, g, x: g / (2 * xp.sqrt(x)))


@cache
def _astype_op(dtype: np.dtype[Any]) -> Op:
    return Op(
        "astype",
        lambda call, x, dtype: converted(x, dtype),
        (lambda g, y, x, dtype: g,),
        _astype_rule,
        dtype=lambda _: dtype,
        uses=[()],
        relays=True,
    )


@operation
def negative(x: Any) -> DistArray:
    """Return -x, elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The negated array, with the placements of `x`; a Partial "max" or "min" is reduced first.
    """
    return apply(_NEGATIVE, x)


@operation
def square(x: Any) -> DistArray:
    """Return x * x, elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The squares, in the dtype of `x`; placement as in `exp`.
    """
    return apply(_SQUARE, x)


@operation
def exp(x: Any) -> DistArray:
    """Return exp(x), elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The exponentials, in the dtype that NumPy gives: that of `x`, or a floating-point dtype for integers. Sharded
        axes stay sharded. The result is `inf` or `nan` for elements that overflow or have no real value.

    Raises
    ------
    TypeError
        If `x` is not a `DistArray`.

    Notes
    -----
    A Partial `x` is reduced first; nothing else is sent.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> y = pce.exp(pce.distribute(np.array([0.0, 1.0]), mesh, data=pce.Shard(0)))
    >>> y.placements, y.full()
    ({'data': Shard(0)}, array([1.        , 2.71828183]))
    """
    return apply(_EXP, x)


@operation
def log(x: Any) -> DistArray:
    """Return the natural logarithm, elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The logarithms, -inf at 0 and `nan` below 0; dtype and placement as in `exp`.
    """
    return apply(_LOG, x)


@operation
def log1p(x: Any) -> DistArray:
    """Return the natural logarithm of 1 + x, elementwise, with all bits for small x.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The logarithms, -inf at -1 and `nan` below -1; dtype and placement as in `exp`.
    """
    return apply(_LOG1P, x)


@operation
def sin(x: Any) -> DistArray:
    """Return the sine of angles in radians, elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The sines; dtype and placement as in `exp`.
    """
    return apply(_SIN, x)


@operation
def cos(x: Any) -> DistArray:
    """Return the cosine of angles in radians, elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The cosines; dtype and placement as in `exp`.
    """
    return apply(_COS, x)


@operation
def abs(x: Any) -> DistArray:
    """Return the absolute value, elementwise, as Python's `abs` does.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The absolute values, in the dtype of `x`; the gradient at 0 is 0. Placement as in `exp`.
    """
    return apply(_ABS, x)


@operation
def sqrt(x: Any) -> DistArray:
    """Return the square root, elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The square roots, `nan` below 0; the gradient at 0 is `inf`. Dtype and placement as in `exp`.
    """
    return apply(_SQRT, x)


@operation
def astype(x: DistArray, dtype: Any) -> DistArray:
    """Return the same numbers as `dtype`; the gradient has the dtype of `x`, integers and bool have none.

    To a floating-point dtype this is linear: a Partial array stays Partial. To other dtypes it is reduced first.
    """
    wanted = np.dtype(dtype)
    return x if x.dtype == wanted else apply(_astype_op(wanted), x, dtype=wanted)


def widened(x: DistArray) -> DistArray:
    """Return `x`, halves as float32."""
    return astype(x, np.float32) if is_half(x.dtype) else x


_WIDENED = replace(_astype_op(np.dtype(np.float32)), relays=False)


def widened_with_sums(x: DistArray) -> DistArray:
    """Return `x`, halves as float32, whose gradient is reduced in float32 before it is rounded."""
    return apply(_WIDENED, x, dtype=np.dtype(np.float32)) if is_half(x.dtype) else x
