"""Operations on elements of several operands, which broadcast as in NumPy: arithmetic, comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, in_one_dtype, is_floating, numpy_dtype, result_type
from pce_mpi.autograd.apply import Call, Op, apply, operands_of, operation, redistributed
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.elementwise import elementwise_rule, gradient_op, library_function, square, widened
from pce_mpi.ops.shape import sum_to

Vjp = Callable[..., DistArray]


def binary(
    name: str,
    first: Vjp,
    second: Vjp,
    *linear: Sequence[int],
    uses: Sequence[Sequence[int]],
    dtype: Any = result_type,
    forward: Callable[..., Array] | None = None,
    wide: bool = False,
    variant: str = "",
) -> Op:
    """Make an operation on two operands, from vjps that take the gradient of the result and both operands.

    `first` is the vjp of the first operand. Gradients of operands that were broadcast are summed here.
    """

    def pull(vjp: Vjp, g: DistArray, x: DistArray, a: DistArray, b: DistArray) -> DistArray:
        # In halves the sum is rounded, not its terms.
        return vjp(g, a, b) if g.shape == x.shape else sum_to(vjp(widened(g), a, b), x.shape)

    vjps = (lambda g, y, a, b: pull(first, g, a, a, b), lambda g, y, a, b: pull(second, g, b, a, b))
    rule = elementwise_rule(*linear)
    return Op(name, forward or library_function(name), vjps, rule, dtype=dtype, uses=uses, wide=wide, variant=variant)


def _power(xp: Any, a: Array, b: Array) -> Array:
    """Return a**b as IEEE 754 has it: NumPy takes a square root for it where b is 0.5, depending on its version."""
    found = xp.power(a, b)
    if xp is not np or not (half := b == 0.5).any():
        return found
    return xp.where(half & (a == -np.inf), np.inf, xp.where(half & (found == 0), 0.0, found))


def _power_gradient_of_exponent(xp: Any, g: Array, a: Array, b: Array) -> Array:
    """Return the gradient of b in a**b; at a = 0 it is 0 for b >= 0, as in PyTorch."""
    return xp.where((a == 0) & (b >= 0), 0, g * (_power(xp, a, b) * xp.log(a)))


def _floor_divide(a: Array, b: Array) -> Array:
    """Return NumPy's floor(a / b)."""
    xp = array_namespace(a)
    if xp is np or not is_floating(result_type(a.dtype, b.dtype)):
        return xp.floor_divide(a, b)
    rest = xp.fmod(a, b)
    quotient = (a - rest) / b - ((rest != 0) & ((rest < 0) != (b < 0)))
    whole = xp.floor(quotient)
    whole = xp.where(quotient - whole > 0.5, whole + 1, whole)
    return xp.where(b == 0, a / b, xp.where(quotient == 0, xp.copysign(whole, a / b), whole))


def _remainder(a: Array, b: Array) -> Array:
    """Return a - floor(a / b) b as NumPy does, without rounding errors on the way; CuPy rounds each step."""
    xp = array_namespace(a)
    if xp is np or not is_floating(result_type(a.dtype, b.dtype)):
        return xp.remainder(a, b)
    rest = xp.fmod(a, b)
    return xp.where(rest == 0, xp.copysign(rest, b), xp.where((rest < 0) != (b < 0), rest + b, rest))


_DIVISOR = gradient_op("divide", lambda xp, g, a, b: -(g / b) * (a / b), [1])
# For b = 0 the gradient of a in a**b is 0, at a = 0 as well.
_BASE = gradient_op(
    "power", lambda xp, g, a, b: xp.where(b == 0, 0, g * (b * _power(xp, a, xp.where(b == 0, 1, b) - 1)))
)
_EXPONENT = gradient_op("power", _power_gradient_of_exponent)
_NOTHING = gradient_op("floor_divide", lambda xp, g: xp.zeros_like(g), [0])
_MODULUS = gradient_op("remainder", lambda xp, g, a, b: -g * _floor_divide(a, b), [0])
_ADD = binary("add", lambda g, a, b: g, lambda g, a, b: g, [0, 1], uses=[(), ()])
_SUBTRACT = binary(
    "subtract",
    lambda g, a, b: g,
    lambda g, a, b: -g,
    [0, 1],
    uses=[(), ()],
    dtype=numpy_dtype("subtract"),  # refuses bool
)
_MULTIPLY = binary("multiply", lambda g, a, b: g * b, lambda g, a, b: g * a, [0], [1], uses=[(1,), (0,)])
_DIVIDE = binary(
    "divide",
    lambda g, a, b: g / b,
    lambda g, a, b: apply(_DIVISOR, g, a, b),
    [0],
    uses=[(1,), (0, 1)],
    dtype=numpy_dtype("divide"),
)
_POWER = binary(
    "power",
    lambda g, a, b: apply(_BASE, g, a, b),
    lambda g, a, b: apply(_EXPONENT, g, a, b),
    uses=[(0, 1), (0, 1)],
    forward=lambda call, a, b: _power(call.functions(a), a, b),
    wide=True,
)
_FLOOR_DIVIDE = binary(
    "floor_divide",
    lambda g, a, b: apply(_NOTHING, g),
    lambda g, a, b: apply(_NOTHING, g),
    uses=[(), ()],
    dtype=numpy_dtype("floor_divide"),
    forward=lambda call, a, b: _floor_divide(a, b),
    wide=True,
)
_REMAINDER = binary(
    "remainder",
    lambda g, a, b: g,
    lambda g, a, b: apply(_MODULUS, g, a, b),
    uses=[(), (0, 1)],
    dtype=numpy_dtype("remainder"),
    forward=lambda call, a, b: _remainder(a, b),
    wide=True,
)
# Operations on the bits of integers, and on bool; they have no gradient.
_BITWISE = {
    name: Op(name, library_function(name), rule=elementwise_rule(), dtype=numpy_dtype(name, floating=False))
    for name in ("bitwise_and", "bitwise_or", "invert")
}


@operation
def add(x: Any, y: Any) -> DistArray:
    """Return x + y, elementwise.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, at least one of them a `DistArray`; plain arrays and numbers are Replicate. Shapes broadcast and
        dtypes promote as in NumPy; a Python number takes the dtype of the other operand.

    Returns
    -------
    DistArray
        The sum. Shards beside a Replicate operand stay sharded; Partial + Partial of one kind, and Partial + Replicate,
        are Partial. Operands with other placements are redistributed with the fewest bytes.

    Raises
    ------
    TypeError
        If neither operand is a `DistArray`.
    ValueError
        If the shapes do not broadcast, or the operands have two meshes.

    Notes
    -----
    The gradient of an operand that was broadcast is summed over the axes it was broadcast along.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> y = pce.add(pce.distribute(np.array([1.0, 2.0]), mesh, data=pce.Shard(0)), 1)
    >>> y.placements, y.full()
    ({'data': Shard(0)}, array([2., 3.]))
    """
    return apply(_ADD, x, y)


@operation
def subtract(x: Any, y: Any) -> DistArray:
    """Return x - y, elementwise; see `pce_mpi.add`."""
    return apply(_SUBTRACT, x, y)


@operation
def multiply(x: Any, y: Any) -> DistArray:
    """Return x * y, elementwise.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, as in `add`.

    Returns
    -------
    DistArray
        The product. Partial times Replicate is Partial, and nothing is sent; of two operands that are Partial over the
        same dim one is reduced first. Shards as in `add`.
    """
    return apply(_MULTIPLY, x, y)


@operation
def divide(x: Any, y: Any) -> DistArray:
    """Return x / y, elementwise.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, as in `add`.

    Returns
    -------
    DistArray
        The quotient, in float64 for integers; `inf` or `nan` where y is 0. Partial over Replicate is Partial, and
        nothing is sent; a Partial divisor is reduced first. Shards as in `add`.
    """
    return apply(_DIVIDE, x, y)


@operation
def power(x: Any, y: Any) -> DistArray:
    """Return x ** y, elementwise.

    Parameters
    ----------
    x, y : DistArray or array_like
        The base and the exponent, as the operands of `add`.

    Returns
    -------
    DistArray
        The power, that of IEEE 754: (-inf)**0.5 is inf and (-0.0)**0.5 is 0.0. Shards as in `add`; Partial operands are
        reduced first.

    Raises
    ------
    ValueError
        If integers are raised to a negative integer power.

    Notes
    -----
    The gradient of x in x**0 is 0, at x = 0 as well. The gradient of y at x = 0 is 0 for y >= 0, as in PyTorch.
    """
    if type(y) is int and y == 2:
        return square(x)
    base, exponent = operands_of("power", (x, y))
    if all(each.dtype.kind in "biu" for each in (base, exponent)):
        exponent = _checked(exponent, agreed=isinstance(y, int))
    return apply(_POWER, x, exponent if isinstance(y, DistArray) else y)  # `apply` compares numbers between ranks


def _checked(exponents: DistArray, agreed: bool) -> DistArray:
    """Reduce integer `exponents` and refuse negative ones; `agreed`: they are the same number on every rank.

    NumPy refuses them as well, but only on ranks that have elements.
    """
    mesh = exponents.mesh
    # A partial may be negative although the exponent is not.
    with cause("power", reason="exponents are checked"):
        reduced = redistributed(exponents, exponents.sharding.natural)
    negative = ValueError("integers to negative integer powers are not allowed")
    found = negative if bool((reduced.local < 0).any()) else None
    if not agreed:
        mesh.agree(mesh.dims, "power", {}, found)
    elif found:
        raise found
    return reduced


@operation
def floor_divide(x: Any, y: Any) -> DistArray:
    """Return the largest whole number that is not above x / y, elementwise, as the operator `//` does.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, as in `add`.

    Returns
    -------
    DistArray
        The whole numbers, in NumPy's dtype; integers over 0 give 0. Its gradient is 0. Shards as in `add`; Partial
        operands are reduced first.
    """
    return apply(_FLOOR_DIVIDE, x, y)


@operation
def remainder(x: Any, y: Any) -> DistArray:
    """Return x - y * (x // y), elementwise, which has the sign of y, as the operator `%` does.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, as in `add`.

    Returns
    -------
    DistArray
        The remainder, in NumPy's dtype; integers over 0 give 0. Placement as in `floor_divide`.

    Notes
    -----
    The gradient of y is -(x // y).
    """
    return apply(_REMAINDER, x, y)


@operation
def bitwise_and(x: Any, y: Any) -> DistArray:
    """Return x & y of integers or bool, elementwise; it has no gradient. Placement as in `floor_divide`."""
    return apply(_BITWISE["bitwise_and"], x, y)


@operation
def bitwise_or(x: Any, y: Any) -> DistArray:
    """Return x | y of integers or bool, elementwise; it has no gradient. Placement as in `floor_divide`."""
    return apply(_BITWISE["bitwise_or"], x, y)


@operation
def invert(x: DistArray) -> DistArray:
    """Return ~x of integers or bool, elementwise; it has no gradient. Placement as in `floor_divide`."""
    return apply(_BITWISE["invert"], x)


def _maximum_gradient(xp: Any, g: Array, x: Array, other: Array) -> Array:
    """Return the gradient of x in max(x, other): g, 0 or, for equal elements, g / 2; `nan` if either element is."""
    where, kind = xp.where, g.dtype.type  # no product with 0, which an infinite g turns into nan
    return where(x > other, g, where(x == other, g * kind(0.5), where(x < other, kind(0), kind(np.nan))))


_LARGER = gradient_op("maximum", _maximum_gradient)
_MAXIMUM = binary(
    "maximum", lambda g, a, b: apply(_LARGER, g, a, b), lambda g, a, b: apply(_LARGER, g, b, a), uses=[(0, 1), (0, 1)]
)
_MINIMUM = binary(
    "minimum", lambda g, a, b: apply(_LARGER, g, b, a), lambda g, a, b: apply(_LARGER, g, a, b), uses=[(0, 1), (0, 1)]
)
# Unlike in `maximum` and `minimum`, an element equal to its bound has all of the gradient.
_AT_LEAST = binary(
    "clip",
    lambda g, x, low: where(comparison("greater_equal")(x, low), g, 0),
    lambda g, x, low: where(comparison("less")(x, low), g, 0),
    uses=[(0, 1), (0, 1)],
    forward=library_function("maximum"),
    variant="min",
)
_AT_MOST = binary(
    "clip",
    lambda g, x, high: where(comparison("less_equal")(x, high), g, 0),
    lambda g, x, high: where(comparison("greater")(x, high), g, 0),
    uses=[(0, 1), (0, 1)],
    forward=library_function("minimum"),
    variant="max",
)
_COMPARISONS = {
    name: Op(name, library_function(name), rule=elementwise_rule(), dtype=lambda *_: np.bool_)
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
}


def _where(call: Call, condition: Array, a: Array, b: Array) -> Array:
    return array_namespace(a).where(condition, *in_one_dtype(a, b))


_WHERE = Op(
    "where",
    _where,
    (
        None,
        lambda g, y, condition, a, b: sum_to(where(condition, g, 0), a.shape),
        lambda g, y, condition, a, b: sum_to(where(condition, 0, g), b.shape),
    ),
    elementwise_rule([1, 2]),
    dtype=lambda condition, *dtypes: result_type(*dtypes),
    uses=[(), (0,), (0,)],
)


@operation
def maximum(x: Any, y: Any) -> DistArray:
    """Return the larger of x and y, elementwise.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, as in `add`.

    Returns
    -------
    DistArray
        The larger element, or `nan` if either is. Shards as in `add`; Partial operands are reduced first.

    Notes
    -----
    Equal elements have half of the gradient each.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([0.0, 1.0, 2.0]), mesh, requires_grad=True, data=pce.Shard(0))
    >>> pce.sum(pce.maximum(x, 1.0)).backward()
    >>> x.grad.full()
    array([0. , 0.5, 1. ])
    """
    return apply(_MAXIMUM, x, y)


@operation
def minimum(x: Any, y: Any) -> DistArray:
    """Return the smaller of x and y, elementwise; see `pce_mpi.maximum`."""
    return apply(_MINIMUM, x, y)


@operation
def clip(x: Any, min: Any = None, max: Any = None) -> DistArray:
    """Bring elements below `min` up to it, and those above `max` down to it.

    Parameters
    ----------
    x : DistArray or array_like
        The array.
    min, max : DistArray, array_like or None, optional
        The bounds, which broadcast with `x`; None is no bound. At least one bound is needed, and `x` or a bound must be
        a `DistArray`.

    Returns
    -------
    DistArray
        The clipped array: `max` where `min` is above it. Dtype and placement as in `maximum`.

    Raises
    ------
    TypeError
        If there is no `DistArray`.
    ValueError
        If there is no bound.

    Notes
    -----
    Elements at a bound have all of the gradient and the bound none, as in PyTorch.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.clip(pce.distribute(np.array([-2.0, 0.5, 3.0]), mesh), 0, 1).full()
    array([0. , 0.5, 1. ])
    """
    if min is None and max is None:
        raise ValueError("clip takes min or max, or both")
    if min is not None:
        low = _within_dtype(min, x)
        both_plain = not isinstance(x, DistArray) and not isinstance(low, DistArray) and isinstance(max, DistArray)
        x = np.maximum(x, low) if both_plain else apply(_AT_LEAST, x, low)
    return x if max is None else apply(_AT_MOST, x, _within_dtype(max, x))


def _within_dtype(bound: Any, x: Any) -> Any:
    """Return `bound`, or the limit of the dtype of integers `x` for a Python int beyond it."""
    if type(bound) is not int or getattr(x, "dtype", np.dtype(bool)).kind not in "iu":
        return bound
    limits = np.iinfo(x.dtype)
    return sorted((limits.min, bound, limits.max))[1]


def comparison(name: str) -> Callable[[Any, Any], DistArray]:
    """Make the function of distributed arrays for NumPy's comparison `name`; its result has no gradient."""

    def compare(x: Any, y: Any) -> DistArray:
        return apply(_COMPARISONS[name], x, y)

    compare.__name__ = name
    return compare


for _name in _COMPARISONS:
    operation(comparison(_name))


@operation
def where(condition: Any, x: Any, y: Any) -> DistArray:
    """Select elements of x where a condition holds, and of y elsewhere.

    Parameters
    ----------
    condition : DistArray or array_like
        Truth values; numbers hold where they are not 0. It broadcasts with `x` and `y` and has no gradient.
    x, y : DistArray or array_like
        The operands, as in `add`; one of the three must be a `DistArray`.

    Returns
    -------
    DistArray
        The selected elements, in the dtype of `x` and `y` together. Placement as in `add`: beside a Replicate condition
        the selection is linear in `x` and `y` together.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([1.0, 2.0]), mesh, data=pce.Shard(0))
    >>> pce.where(np.array([True, False]), x, 0.0).full()
    array([1., 0.])
    """
    if getattr(condition, "dtype", np.bool_) != np.bool_:  # its dtype must not affect that of the result
        condition = condition != 0
    return apply(_WHERE, condition, x, y)
