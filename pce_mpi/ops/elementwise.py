"""Functions of each element of one operand, activations of neural networks among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, compute_dtype_of, is_floating, is_half, numpy_dtype, result_type
from pce_mpi.autograd.apply import Call, Op, apply, operation
from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.exact import functions
from pce_mpi.kernels import converted, layer_loops
from pce_mpi.kernels.elementary import two_product, two_sum
from pce_mpi.ops.shape import aligned

Function = Callable[..., Array]  # of arrays; some take their library first


def elementwise_rule(*linear: Sequence[int]) -> Callable[..., Rule]:
    """Make the rule of an elementwise operation: axes are labelled from the last, as NumPy aligns them."""

    def rule(*shapes: tuple[int, ...], **_: Any) -> Rule:
        shape = np.broadcast_shapes(*shapes)
        operands = tuple(aligned(operand, shape) for operand in shapes)
        return Rule(operands, aligned(shape, shape), shape, linear=tuple(tuple(group) for group in linear))

    return rule


def library_function(name: str) -> Function:
    """Make the forward function that is the function `name` of the array's library."""
    return lambda call, *arrays: getattr(call.functions(arrays[0]), name)(*arrays)


def gradient_op(name: str, forward: Function, *linear: Sequence[int]) -> Op:
    """Make one operation of a whole gradient, so that a gradient of halves is rounded once."""
    return Op(name, _of_functions(forward), rule=elementwise_rule(*linear), wide=True)


def unary(name: str, pull: Function, forward: Function | None = None, exact: Function | None = None) -> Op:
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
        dtype=result_type if forward else numpy_dtype(name),
        uses=[(0,)],
        wide=True,
        exact=exact,
    )


def _of_functions(function: Function) -> Function:
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
    """Return -x, elementwise, where a Partial "max" or "min" is reduced first; see `pce_mpi.exp`."""
    return apply(_NEGATIVE, x)


@operation
def square(x: Any) -> DistArray:
    """Return x * x, elementwise, in the dtype of `x`; see `pce_mpi.exp`."""
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
    """Return the natural logarithm, elementwise, -inf at 0 and `nan` below 0; see `pce_mpi.exp`."""
    return apply(_LOG, x)


@operation
def log1p(x: Any) -> DistArray:
    """Return log(1 + x), elementwise, with all bits for small x, -inf at -1 and `nan` below; see `pce_mpi.exp`."""
    return apply(_LOG1P, x)


@operation
def sin(x: Any) -> DistArray:
    """Return the sine of angles in radians, elementwise; see `pce_mpi.exp`."""
    return apply(_SIN, x)


@operation
def cos(x: Any) -> DistArray:
    """Return the cosine of angles in radians, elementwise; see `pce_mpi.exp`."""
    return apply(_COS, x)


@operation
def abs(x: Any) -> DistArray:
    """Return |x|, elementwise, in the dtype of `x`, whose gradient at 0 is 0; see `pce_mpi.exp`."""
    return apply(_ABS, x)


@operation
def sqrt(x: Any) -> DistArray:
    """Return the square root, elementwise, `nan` below 0, whose gradient at 0 is `inf`; see `pce_mpi.exp`."""
    return apply(_SQRT, x)


@operation
def astype(x: DistArray, dtype: Any) -> DistArray:
    """Return the same numbers as `dtype`; the gradient has the dtype of `x`, integers, bool and 8-bit floats have none.

    To float16, bfloat16, float32 and float64 this is linear: a Partial array stays Partial. To other dtypes it is
    reduced first. 8-bit floats are those of `ml_dtypes`: they are kept, moved, saved and converted back, and nothing is
    computed in them. Numbers are rounded once.
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


def _sigmoid(xp: Any, x: Array) -> Array:
    small = xp.exp(-xp.abs(x))  # never overflows
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(small.dtype, copy=False)


def _exact_sigmoid(call: Call, x: Array) -> Array:
    return functions.sigmoid(x.astype(np.float32) if is_half(x.dtype) else x).astype(x.dtype, copy=False)


def _sigmoid_gradient(xp: Any, g: Array, x: Array) -> Array:
    small = xp.exp(-xp.abs(x))
    both = 1 + small
    return g * (small / (both * both))


def _constants() -> tuple[tuple[float, float], tuple[float, float]]:
    """Return a = 2 sqrt(2 / pi) and 0.044715 a, each as a head and a tail."""
    bits = 200
    a = math.isqrt((4 << 2 * bits + functions.PI_BITS) // functions.HALF_PI)

    def parts(n: int) -> tuple[float, float]:
        head = n / 2**bits
        return head, (n - int(math.ldexp(head, bits))) / 2**bits

    return parts(a), parts(a * 44715 // 10**6)


# gelu(x) = x (1 + tanh(v / 2)) / 2 = x / (1 + exp(-v)) with v = a x + b x**3, and a, b as heads and tails.
_A, _B = _constants()
# exp(-v) is 0 if |x| is above the first. If v is above the second, exp(-v) is computed as two factors, so that it keeps
# its digits until it is multiplied by x.
_BENT, _DEEP = 24.0, 600.0


def _gelu(call: Call, x: Array) -> Array:
    """Return gelu(x); if a gradient is required, keep the derivative too: both share most of the computation.

    Both are computed in float64. Compiled loops, for float32, take the exact exponential.
    """
    xp, exp, flat = array_namespace(x), call.functions(x).exp, x.reshape(-1)
    y = xp.empty(flat.shape, x.dtype)
    slope = xp.empty(flat.shape, compute_dtype_of(x.dtype)) if call.required[0] else None
    if x.dtype == np.float32 and (loops := layer_loops(flat)):
        loops.gelu(flat, y, slope, _A[0], _B[0], _BENT)
    else:
        size = functions.BLOCK if xp is np else functions.BLOCK_ON_GPU
        for start in range(0, flat.size, size):
            block = slice(start, start + size)
            _gelu_of(xp, exp, flat[block], y[block], None if slope is None else slope[block])
    call.residuals = None if slope is None else slope.reshape(x.shape)
    return y.reshape(x.shape)


def _gelu_of(xp: Any, exp: Callable[[Array], Array], x: Array, y: Array, slope: Array | None) -> None:
    """Write gelu(x) and its derivative, s (1 + x v' (1 - s)) with s = 1 / (1 + exp(-v))."""
    in_double, x = x.dtype == np.float64, x.astype(np.float64)
    z, negative = xp.clip(x, -_BENT, _BENT), x < 0
    size, square = xp.abs(z), z * z
    if in_double:  # a rounding error of v makes one of exp(-v) that is some hundred times as large
        p, p_tail = two_product(square, xp.full_like(square, _B[0]))
        p_tail += square * _B[1] + two_product(z, z)[1] * _B[0]
        p, rest = two_sum(_A[0], p)
        v, tail = two_product(size, p)
        tail += size * (p_tail + (rest + _A[1]))
        near = xp.minimum(v, _DEEP)
        e = exp(-near)
        e -= e * tail
        deep = xp.where(negative, exp(near - v), 1.0)
    else:
        e, deep = exp(size * (-_A[0] - _B[0] * square)), 1.0
    both = 1.0 + e
    # As e is from 0 to 1, maximum chooses as where(negative, e, 1) would, which takes ten times as long.
    share = xp.maximum(e, ~negative) / both
    y[...] = xp.clip(x, -_BENT, np.inf) * share * deep
    if slope is not None:
        other = xp.maximum(e, negative) / both
        slope[...] = share * (1.0 + z * (_A[0] + 3.0 * _B[0] * square) * other) * deep


_TANH = unary("tanh", lambda xp, g, x: 4 * _sigmoid_gradient(xp, g, 2 * x))
_SIGMOID = unary("sigmoid", _sigmoid_gradient, _sigmoid, _exact_sigmoid)
_RELU = unary("relu", lambda xp, g, x: g * (x > 0), lambda xp, x: xp.maximum(x, x.dtype.type(0)))
_GELU = Op(
    "gelu",
    _gelu,
    (lambda g, y, x, residuals: g * DistArray(residuals, y.mesh, y.sharding),),
    elementwise_rule(),
    uses=[()],
)


@operation
def tanh(x: Any) -> DistArray:
    """Return the hyperbolic tangent, elementwise; see `pce_mpi.exp`."""
    return apply(_TANH, x)


@operation
def sigmoid(x: Any) -> DistArray:
    """Return 1 / (1 + exp(-x)), elementwise and without overflow, float64 for integers; see `pce_mpi.exp`."""
    return apply(_SIGMOID, _real(x))


@operation
def relu(x: Any) -> DistArray:
    """Return max(x, 0), elementwise, in the dtype of `x`, whose gradient at 0 is 0; see `pce_mpi.exp`."""
    return apply(_RELU, x)


@operation
def gelu(x: Any) -> DistArray:
    """Return the Gaussian error linear unit in its tanh approximation, elementwise.

    The formula is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))) / 2, which approximates x times the normal
    distribution function; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016. PyTorch calls it
    `gelu(approximate="tanh")`.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The result, in the dtype of `x`, or float64 for integers; placement as in `exp`.

    Notes
    -----
    At any `x` the result and the derivative are those of the formula, rounded once. In float64 the error of the result
    is at most 4 ulp; that of the derivative is at most 6 ulp of the larger of the derivative and 1 / (1 + exp(-v)),
    with v = sqrt(8 / pi) (x + 0.044715 x**3).
    """
    return apply(_GELU, _real(x))


def _real(x: Any) -> Any:
    """Return `x`; integers and bool become float64."""
    return astype(x, np.float64) if isinstance(x, DistArray) and not is_floating(x.dtype) else x
