"""Operations on one element of each operand, broadcasting as NumPy's do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating, is_half
from pce_mpi.autograd.apply import apply, operands_of, redistributed
from pce_mpi.autograd.inference import AbstractMesh
from pce_mpi.autograd.op import Op
from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.broadcasting import aligned, sum_to

__all__ = [
    "add",
    "astype",
    "comparison",
    "divide",
    "equal",
    "exp",
    "gelu",
    "log",
    "maximum",
    "multiply",
    "negative",
    "power",
    "relu",
    "sigmoid",
    "sqrt",
    "square",
    "subtract",
    "tanh",
    "where",
    "widened",
]

Array = Any  # numpy.ndarray or cupy.ndarray
Vjp = Callable[..., DistArray]


def broadcasting(*linear: Sequence[int]) -> Callable[..., Rule]:
    """The rule of an elementwise operation: axes are labelled from the last one on, as NumPy aligns them."""

    def rule(*shapes: tuple[int, ...], **_: Any) -> Rule:
        shape = np.broadcast_shapes(*shapes)
        operands = tuple(aligned(operand, shape) for operand in shapes)
        return Rule(operands, aligned(shape, shape), shape, linear=tuple(tuple(group) for group in linear))

    return rule


def _of_library(name: str) -> Callable[..., Array]:
    def forward(*arrays: Array) -> Array:
        return getattr(array_namespace(arrays[0]), name)(*arrays)

    return forward


def _floating(*dtypes: Any) -> Any:
    """The dtype of what NumPy computes of integers in floating point."""
    dtype = np.result_type(*dtypes)
    return np.float64 if dtype.kind in "iub" else dtype


def _once(forward: Callable[..., Array]) -> Callable[..., Array]:
    """`forward`, halves being computed with in float32: what it gives is rounded once."""

    def computed(*arrays: Array) -> Array:
        dtypes = [x.dtype for x in arrays]
        if not any(map(is_half, dtypes)):
            return forward(*arrays)
        wide = [x.astype(np.float32) if is_half(x.dtype) else x for x in arrays]
        return forward(*wide).astype(np.result_type(*dtypes), copy=False)

    return computed


def _gradient(name: str, forward: Callable[..., Array], *linear: Sequence[int]) -> Op:
    """A whole gradient in one operation, so that that of halves is rounded once as well."""
    return Op(name, _once(forward), rule=broadcasting(*linear))


def _dtype_by_numpy(name: str) -> Callable[[np.dtype[Any]], np.dtype[Any]]:
    """The dtype of NumPy's function of this name, which for integers depends on their size."""

    @cache
    def dtype_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
        return dtype if is_floating(dtype) else getattr(np, name)(np.ones(1, dtype)).dtype

    return dtype_of


def _unary(name: str, pull: Callable[[Array, Array], Array], forward: Callable[..., Array] | None = None) -> Op:
    """`pull` takes the gradient of the result and the operand; a result that was rounded to a half would not do.

    Without `forward` it is NumPy's function of this name; else the dtype of the operand is kept.
    """
    gradient = _gradient(name, pull)
    return Op(
        name,
        _once(forward or _of_library(name)),
        (lambda g, y, x: apply(gradient, g, x),),
        broadcasting(),
        dtype=np.result_type if forward else _dtype_by_numpy(name),
        uses=[(0,)],
    )


def _binary(
    name: str,
    first: Vjp,
    second: Vjp,
    *linear: Sequence[int],
    uses: Sequence[Sequence[int]],
    dtype: Any = np.result_type,
    forward: Callable[..., Array] | None = None,
) -> Op:
    """`first` and `second` take the gradient of the result and both operands; what was stretched is summed here."""

    def pull(vjp: Vjp, g: DistArray, x: DistArray, a: DistArray, b: DistArray) -> DistArray:
        # Terms of a sum are not rounded, but the sum.
        return vjp(g, a, b) if g.shape == x.shape else sum_to(vjp(widened(g), a, b), x.shape)

    vjps = (lambda g, y, a, b: pull(first, g, a, a, b), lambda g, y, a, b: pull(second, g, b, a, b))
    return Op(name, forward or _of_library(name), vjps, broadcasting(*linear), dtype=dtype, uses=uses)


# --------------------------------------------------------------------------------------------------- one operand


def _sigmoid(x: Array) -> Array:
    xp = array_namespace(x)
    small = xp.exp(-xp.abs(x))  # never overflows
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(small.dtype, copy=False)


def _sigmoid_gradient(g: Array, x: Array) -> Array:
    xp = array_namespace(x)
    small = xp.exp(-xp.abs(x))
    return g * (small / (1 + small) ** 2)


def _relu(x: Array) -> Array:
    return array_namespace(x).maximum(x, x.dtype.type(0))


# gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(v) with v = 2 u = c (x + k x**3), which does not cancel
_C, _K = 2 * (2 / np.pi) ** 0.5, 0.044715
# sigmoid(v) is 0 from the negative of this on, and 1 from here on, in float64 too; beyond, x**3 may be infinite.
_BENT = 32


def _gelu(x: Array) -> Array:
    z = array_namespace(x).clip(x, -_BENT, _BENT)
    return array_namespace(x).maximum(x, -_BENT) * _sigmoid(_C * (z + _K * z * z * z))


def _gelu_gradient(g: Array, x: Array) -> Array:
    z = array_namespace(x).clip(x, -_BENT, _BENT)
    v = _C * (z + _K * z * z * z)
    return g * (_sigmoid(v) * (1 + z * _sigmoid(-v) * (_C * (1 + 3 * _K * z * z))))


_NEGATIVE = Op("negative", _of_library("negative"), (lambda g, y, x: -g,), broadcasting([0]), uses=[()])
_SQUARE = _unary("square", lambda g, x: 2 * (g * x))
_EXP = _unary("exp", lambda g, x: g * array_namespace(x).exp(x))
_LOG = _unary("log", lambda g, x: g / x)
_SQRT = _unary("sqrt", lambda g, x: g / (2 * array_namespace(x).sqrt(x)))
_TANH = _unary("tanh", lambda g, x: 4 * _sigmoid_gradient(g, 2 * x))
_SIGMOID = _unary("sigmoid", _sigmoid_gradient, _sigmoid)
_RELU = _unary("relu", lambda g, x: g * (x > 0), _relu)
_GELU = _unary("gelu", _gelu_gradient, _gelu)


def negative(x: Any) -> DistArray:
    """-x. Linear: what is Partial "sum" or "avg" stays so, and so do shards; nothing is sent."""
    return apply(_NEGATIVE, x)


def square(x: Any) -> DistArray:
    """x * x, in the dtype of x; placement as in `exp`."""
    return apply(_SQUARE, x)


def exp(x: Any) -> DistArray:
    """exp(x) of each element; of integers, in the floating-point dtype that NumPy has for them.

    A sharded axis stays sharded. What is Partial is reduced first: nothing else is ever sent. Nothing is raised for
    what overflows or has no real value; it is `inf` or `nan`. `TypeError` if x is no `DistArray`.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> y = pce.exp(pce.distribute(np.array([0.0, 1.0]), mesh, data=pce.Shard(0)))
    >>> y.placements, y.full()
    ({'data': Shard(0)}, array([1.        , 2.71828183]))
    """
    return apply(_EXP, x)


def log(x: Any) -> DistArray:
    """The natural logarithm of each element, -inf at 0 and `nan` below; dtype and placement as in `exp`."""
    return apply(_LOG, x)


def sqrt(x: Any) -> DistArray:
    """The square root of each element, `nan` below 0; its gradient at 0 is inf. Dtype and placement as in `exp`."""
    return apply(_SQRT, x)


def tanh(x: Any) -> DistArray:
    """The hyperbolic tangent of each element; dtype and placement as in `exp`."""
    return apply(_TANH, x)


def sigmoid(x: Any) -> DistArray:
    """1 / (1 + exp(-x)), without overflow; of integers in float64. Placement as in `exp`."""
    return apply(_SIGMOID, _real(x))


def relu(x: Any) -> DistArray:
    """max(x, 0), in the dtype of x; its gradient at 0 is 0. Placement as in `exp`."""
    return apply(_RELU, x)


def gelu(x: Any) -> DistArray:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))) / 2, of real numbers; placement as in `exp`.

    The approximation of x times the normal distribution function given by Hendrycks and Gimpel, Gaussian Error Linear
    Units, 2016: what PyTorch calls `gelu(approximate="tanh")`.
    """
    return apply(_GELU, _real(x))


def _real(x: Any) -> Any:
    """`x`, or its integers or truth values in float64."""
    return astype(x, np.float64) if isinstance(x, DistArray) and not is_floating(x.dtype) else x


# -------------------------------------------------------------------------------------------------- two operands


def _maximum_gradient(g: Array, x: Array, other: Array) -> Array:
    """That of x in max(x, other): all, none or, where they are equal, half; `nan`, if either is."""
    where, kind = array_namespace(g).where, g.dtype.type
    return g * where(x > other, kind(1), where(x == other, kind(0.5), where(x < other, kind(0), kind(np.nan))))


def _power_gradient_of_base(g: Array, a: Array, b: Array) -> Array:
    """That of a in a**b; in a**0 it is 0, at a = 0 as well."""
    xp = array_namespace(a)
    return xp.where(b == 0, 0, g * (b * xp.power(a, xp.where(b == 0, 1, b) - 1)))


def _power_gradient_of_exponent(g: Array, a: Array, b: Array) -> Array:
    """That of b in a**b; at a = 0 it is 0 for b that are not negative, as in PyTorch."""
    xp = array_namespace(a)
    return xp.where((a == 0) & (b >= 0), 0, g * (xp.power(a, b) * xp.log(a)))


_DIVISOR = _gradient("divide", lambda g, a, b: -(g / b) * (a / b), [1])
_BASE = _gradient("power", _power_gradient_of_base)
_EXPONENT = _gradient("power", _power_gradient_of_exponent)
_LARGER = _gradient("maximum", _maximum_gradient)
_ADD = _binary("add", lambda g, a, b: g, lambda g, a, b: g, [0, 1], uses=[(), ()])
_SUBTRACT = _binary("subtract", lambda g, a, b: g, lambda g, a, b: -g, [0, 1], uses=[(), ()])
_MULTIPLY = _binary("multiply", lambda g, a, b: g * b, lambda g, a, b: g * a, [0], [1], uses=[(1,), (0,)])
_DIVIDE = _binary(
    "divide",
    lambda g, a, b: g / b,
    lambda g, a, b: apply(_DIVISOR, g, a, b),
    [0],
    uses=[(1,), (0, 1)],
    dtype=_floating,
)
_POWER = _binary(
    "power",
    lambda g, a, b: apply(_BASE, g, a, b),
    lambda g, a, b: apply(_EXPONENT, g, a, b),
    uses=[(0, 1), (0, 1)],
    forward=_once(_of_library("power")),
)
_MAXIMUM = _binary(
    "maximum",
    lambda g, a, b: apply(_LARGER, g, a, b),
    lambda g, a, b: apply(_LARGER, g, b, a),
    uses=[(0, 1), (0, 1)],
)
_COMPARISONS = {
    name: Op(name, _of_library(name), rule=broadcasting(), dtype=lambda *_: np.bool_)
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
}
_WHERE = Op(
    "where",
    _of_library("where"),
    (
        None,
        lambda g, y, condition, a, b: sum_to(where(condition, g, 0), a.shape),
        lambda g, y, condition, a, b: sum_to(where(condition, 0, g), b.shape),
    ),
    broadcasting([1, 2]),
    dtype=lambda condition, *dtypes: np.result_type(*dtypes),
    uses=[(), (0,), (0,)],
)


def _astype_rule(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rule:
    # What is cut off of the terms of a sum is not what is cut off of the sum.
    return broadcasting(*([[0]] if is_floating(dtype) else []))(shape)


_ASTYPE = Op(
    "astype", lambda x, dtype: x.astype(dtype), (lambda g, y, x, dtype: g,), _astype_rule, uses=[()], relays=True
)


def add(x: Any, y: Any) -> DistArray:
    """x + y; shapes broadcast and dtypes promote as NumPy's do, and a Python number takes the dtype that it meets.

    Plain arrays and numbers are Replicate. Shards beside a Replicate operand stay shards. Linear in both together:
    Partial + Partial is Partial, and so is Partial + Replicate; nothing is sent. Operands that lie otherwise are
    brought together with the fewest bytes. The gradient of what was stretched is summed over that.

    Raises `ValueError` for shapes that do not broadcast and for operands of two meshes, `TypeError` if no operand is
    a `DistArray`.
    """
    return apply(_ADD, x, y)


def subtract(x: Any, y: Any) -> DistArray:
    """x - y; shapes, dtypes, placement and errors as in `add`."""
    return apply(_SUBTRACT, x, y)


def multiply(x: Any, y: Any) -> DistArray:
    """x * y; shapes, dtypes and errors as in `add`.

    Linear in each operand: Partial times Replicate is Partial, and nothing is sent. Of two that are Partial over the
    same dim one is reduced first.
    """
    return apply(_MULTIPLY, x, y)


def divide(x: Any, y: Any) -> DistArray:
    """x / y, of integers in float64; shapes and errors as in `add`.

    Linear in x: Partial over Replicate is Partial, and nothing is sent; a y that is Partial is reduced first. What is
    divided by 0 is `inf` or `nan`.
    """
    return apply(_DIVIDE, x, y)


def power(x: Any, y: Any) -> DistArray:
    """x ** y; shapes, dtypes and errors as in `add`, and `ValueError` for integers to a negative power.

    What is Partial is reduced first. The gradient of x**0 by x is 0, at x = 0 as well; that by y is 0 at x = 0 for
    y >= 0, as in PyTorch.
    """
    if type(y) is int and y == 2:
        return square(x)
    base, exponent = operands_of("power", (x, y))
    if all(each.dtype.kind in "biu" for each in (base, exponent)):
        exponent = _checked(exponent, agreed=isinstance(y, int))
    return apply(_POWER, base, exponent)


def _checked(exponents: DistArray, agreed: bool) -> DistArray:
    """`exponents`, reduced, of whole numbers; `agreed`: the same number on every rank.

    NumPy complains of negative ones, but only on ranks that have elements.
    """
    mesh = exponents.mesh
    # A term may be negative where the exponent is not.
    reduced = redistributed(exponents, exponents.sharding.natural, operation="power", reason="exponents are checked")
    if not isinstance(mesh, AbstractMesh):
        negative = ValueError("integers to negative integer powers are not allowed")
        found = negative if bool((reduced.local < 0).any()) else None
        if not agreed:
            mesh.agree(mesh.dims, "power", {}, found)
        elif found:
            raise found
    return reduced


def maximum(x: Any, y: Any) -> DistArray:
    """The larger of x and y; where they are equal, each has half of the gradient. `nan`, if either is.

    Shapes, dtypes and errors as in `add`. Shards stay; what is Partial is reduced first.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([0.0, 1.0, 2.0]), mesh, requires_grad=True, data=pce.Shard(0))
    >>> pce.sum(pce.maximum(x, 1.0)).backward()
    >>> x.grad.full()
    array([0. , 0.5, 1. ])
    """
    return apply(_MAXIMUM, x, y)


def equal(x: Any, y: Any) -> DistArray:
    """Whether x equals y, as bool; has no gradient. Shapes, placement and errors as in `maximum`."""
    return apply(_COMPARISONS["equal"], x, y)


def comparison(name: str) -> Callable[[Any, Any], DistArray]:
    """NumPy's function of this name, "less" for one, for distributed arrays; its result has no gradient."""

    def compare(x: Any, y: Any) -> DistArray:
        return apply(_COMPARISONS[name], x, y)

    compare.__name__ = name
    return compare


def where(condition: Any, x: Any, y: Any) -> DistArray:
    """x where `condition` holds, y elsewhere; the three broadcast, and the dtype is that of x and y together.

    `condition`: bool, or numbers, which hold where they are not 0; it has no gradient. Shards stay. Linear in x and y
    together: beside a Replicate condition Partial terms stay so, and nothing is sent. Errors as in `add`.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([1.0, 2.0]), mesh, data=pce.Shard(0))
    >>> pce.where(np.array([True, False]), x, 0.0).full()
    array([1., 0.])
    """
    if getattr(condition, "dtype", np.bool_) != np.bool_:  # whose dtype is none of the result's concern
        condition = condition != 0
    return apply(_WHERE, condition, x, y)


def astype(x: DistArray, dtype: Any) -> DistArray:
    """The same numbers as `dtype`; the gradient has the dtype of `x`, and there is none for integers and bool.

    Linear to a floating-point dtype: what is Partial stays so, and nothing is sent. To others it is reduced first.
    """
    return x if x.dtype == dtype else apply(_ASTYPE, x, dtype=np.dtype(dtype))


def widened(x: DistArray) -> DistArray:
    """`x`, halves as float32."""
    return astype(x, np.float32) if is_half(x.dtype) else x
