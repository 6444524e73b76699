"""Products of matrices, stacks of matrices and vectors, and sums of products in Einstein's notation.

The letters of that notation are the labels of the placement rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
import math
from string import ascii_letters
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, Shape, array_namespace, as_array, is_floating, is_half, result_type
from pce_mpi.autograd.apply import Call, Op, apply, operation
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.exact.products import product
from pce_mpi.exact.sums import reduced
from pce_mpi.ops.elementwise import astype, widened
from pce_mpi.ops.shape import aligned, broadcast_to, reshape, sum, sum_to, transpose


def _matmul_rule(a: Shape, b: Shape) -> Rule:
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
    stack, k, n = tuple(Axis(index) for index in range(len(a) - 1)), Axis("k"), Axis("n")
    return Rule(((*stack, k), (*stack, n)), (k, n), (a[-1], g[-1]), linear=((0,), (1,)), reduces="sum")


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
    rule=lambda g, b: _exchanged(_matmul_rule(g, _turned(b)), 1),
    exact=_exact(_by_transposed, lambda g: g[-1]),
)
_OF_TRANSPOSED = Op(
    "matmul",
    _of_transposed,
    rule=lambda a, g: _exchanged(_matmul_rule(_turned(a), g), 0),
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


def _to_second(g: DistArray, y: DistArray, a: DistArray, b: DistArray) -> DistArray:
    if b.ndim == 2:
        return apply(_TRANSPOSED_PRODUCT, a, g)
    return sum_to(transposed_times(a, g), b.shape)


_MATMUL = Op(
    "matmul",
    _matmul,
    (lambda g, y, a, b: sum_to(times_transposed(g, b), a.shape), _to_second),
    _matmul_rule,
    uses=[(1,), (0,)],
    exact=_exact(_matmul, lambda a: a[-1]),
)


# NumPy adds up products of booleans by "or", which is their maximum.
_OF_BOOLEANS = Op("matmul", _matmul, rule=lambda a, b: replace(_matmul_rule(a, b), linear=(), reduces="max"))


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


def _terms(letters: str) -> tuple[list[str], str]:
    sources, _, result = letters.partition("->")
    return sources.split(","), result


def _einsum_rule(*shapes: Shape, letters: str) -> Rule:
    sources, result = _terms(letters)
    diagonal = {letter for source in sources for letter in source if source.count(letter) > 1}
    lengths = dict(zip("".join(sources), (length for shape in shapes for length in shape), strict=True))

    def axes(term: str) -> Axes:
        return tuple(None if letter in diagonal else Axis(letter) for letter in term)

    return Rule(
        tuple(map(axes, sources)),
        axes(result),
        tuple(lengths[letter] for letter in result),
        linear=tuple((index,) for index in range(len(sources))),
        reduces="sum",
    )


def _einsum(call: Call, *arrays: Array, letters: str) -> Array:
    # `optimize` multiplies the operands in pairs, as products of matrices.
    return array_namespace(arrays[0]).einsum(letters, *arrays, optimize=len(arrays) > 1)


def _vjp(index: int) -> Callable[..., DistArray]:
    def vjp(g: DistArray, y: DistArray, *operands: DistArray, letters: str) -> DistArray:
        sources, result = _terms(letters)
        mine, shape = sources.pop(index), operands[index].shape
        terms, factors = [result, *sources], [g, *operands[:index], *operands[index + 1 :]]
        unused = (letter for letter in ascii_letters if letter not in letters)
        wanted = ""
        for place, letter in enumerate(mine):
            if letter in mine[:place]:  # only a diagonal was used
                wanted += (other := next(unused))
                terms.append(letter + other)
                factors.append(array_namespace(g.local).eye(shape[place], dtype=g.dtype))
            else:
                wanted += letter
        there = [letter in "".join(terms) for letter in wanted]
        kept = "".join(letter for letter, known in zip(wanted, there, strict=True) if known)
        found = einsum(f"{','.join(terms)}->{kept}", *factors)
        # All elements along an axis that only this operand has and that was summed away have the same gradient.
        lengths = [length if known else 1 for length, known in zip(shape, there, strict=True)]
        return broadcast_to(reshape(found, lengths), shape)

    return vjp


def _composed(*operands: DistArray, letters: str) -> DistArray:
    """Compute the result from operations that have a reproducible form: products of two matrices, and sums."""
    sources, result = _terms(letters)
    arrays = list(map(widened, operands))
    for index, source in enumerate(sources):
        sources[index] = "".join(dict.fromkeys(source))
        if sources[index] != source:
            arrays[index] = apply(_DIAGONAL, arrays[index], letters=f"{source}->{sources[index]}")
    (labels, found), *others = zip(sources, arrays, strict=True)
    for index, (source, array) in enumerate(others):
        wanted = {*result, *"".join(sources[index + 2 :])}
        labels, found = _times(labels, found, source, array, wanted)
    labels, found = _summed(labels, found, set(result))
    found = transpose(found, [labels.index(letter) for letter in result])
    return astype(found, result_type(*(each.dtype for each in operands)))


def _summed(letters: str, x: DistArray, wanted: set[str]) -> tuple[str, DistArray]:
    """Sum `x` over the axes whose letters are not `wanted`."""
    axes = [axis for axis, letter in enumerate(letters) if letter not in wanted]
    return "".join(letter for letter in letters if letter in wanted), sum(x, axes) if axes else x


def _times(a: str, x: DistArray, b: str, y: DistArray, wanted: set[str]) -> tuple[str, DistArray]:
    """Multiply two operands, and sum over the letters that they share and that are not `wanted`."""
    a, x = _summed(a, x, wanted | set(b))
    b, y = _summed(b, y, wanted | set(a))
    lengths = dict(zip(a, x.shape, strict=True)) | dict(zip(b, y.shape, strict=True))
    stack, inner = ([each for each in a if each in b and (each in wanted) == kept] for kept in (True, False))
    rows, columns = [each for each in a if each not in b], [each for each in b if each not in a]

    def matrices(letters: str, z: DistArray, first: list[str], second: list[str]) -> DistArray:
        ordered = transpose(z, [letters.index(each) for each in (*stack, *first, *second)])
        sizes = [math.prod(lengths[each] for each in group) for group in (first, second)]
        return reshape(ordered, [*(lengths[each] for each in stack), *sizes])

    found = matmul(matrices(a, x, rows, inner), matrices(b, y, inner, columns))
    letters = "".join((*stack, *rows, *columns))
    return letters, reshape(found, [lengths[each] for each in letters])


# Picks elements, and sums nothing.
_DIAGONAL = Op(
    "einsum",
    _einsum,
    [_vjp(0)],
    lambda shape, letters: replace(_einsum_rule(shape, letters=letters), reduces=None),
    uses=[()],
)


@cache
def _op(count: int) -> Op:
    others = [tuple(other for other in range(count) if other != index) for index in range(count)]
    vjps = [_vjp(index) for index in range(count)]
    return Op("einsum", _einsum, vjps, _einsum_rule, uses=others, wide=True, composition=_composed)


def einsum(subscripts: str, *operands: Any) -> DistArray:
    """Multiply arrays, and sum the products over axes, in Einstein's notation.

    Parameters
    ----------
    subscripts : str
        A letter for each axis of each operand, and after "->" those of the result: "bk,km->bm" is the product of two
        matrices. "..." stands for all other axes, which broadcast. Without "->" the result has the letters that occur
        once, in alphabetical order.
    *operands : DistArray or array_like
        The factors, at least one of them a `DistArray`; plain arrays are Replicate. An axis of length 1 is stretched.

    Returns
    -------
    DistArray
        The sums, in the dtype that the operands promote to; those of halves are computed in float32 and rounded once.

    Raises
    ------
    TypeError
        If no operand is a `DistArray`, or `subscripts` is no string.
    ValueError
        If `subscripts` does not fit the operands.

    Notes
    -----
    A letter that is sharded in the operands that have it stays sharded; if the result does not have it, the result is
    Partial. The sums are linear in each operand: if one operand is Partial and the others Replicate, the result is
    Partial. Nothing is sent in these cases; in others, operands are redistributed with the fewest bytes. An axis of a
    diagonal, such as "ii->i", is not sharded.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.arange(6.0).reshape(3, 2), mesh, data=pce.Shard(0))
    >>> y = pce.einsum("ij,ij->i", x, x)
    >>> y.placements, y.full()
    ({'data': Shard(0)}, array([ 1., 13., 41.]))
    """
    if not isinstance(subscripts, str):
        raise TypeError(f"subscripts must be a string such as 'ij,jk->ik', got {subscripts!r}")
    arrays = [each if isinstance(each, DistArray) else as_array(each, "an operand of einsum") for each in operands]
    sources, result = _with_letters_for_dots(subscripts.replace(" ", ""), [each.shape for each in arrays])
    lengths: dict[str, int] = {}
    for source, array in zip(sources, arrays, strict=True):
        for letter, length in zip(source, array.shape, strict=True):
            # An axis of length 1 is stretched to that of another operand, not to another axis of its own operand.
            if (length != 1 or source.count(letter) > 1) and lengths.setdefault(letter, length) != length:
                raise ValueError(f"einsum {subscripts!r}: axes {letter!r} have lengths {lengths[letter]} and {length}")
    for index, (source, array) in enumerate(zip(sources, arrays, strict=True)):
        stretched = [letter in lengths and length == 1 for letter, length in zip(source, array.shape, strict=True)]
        if any(stretched):
            kept = [place for place, drop in enumerate(stretched) if not drop]
            shape = [array.shape[place] for place in kept]
            sources[index] = "".join(source[place] for place in kept)
            arrays[index] = array.reshape(shape)
    letters = f"{','.join(sources)}->{result}"
    if result_type(*(each.dtype for each in arrays)) == np.bool_:  # NumPy adds bool by "or", which no Partial does
        arrays = [each.astype(np.int64) for each in arrays]
        return einsum(letters, *arrays) != 0
    return apply(_op(len(arrays)), *arrays, letters=letters)


def _with_letters_for_dots(subscripts: str, shapes: list[Shape]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with letters for all axes that "..." stands for."""
    given, arrow, result = subscripts.partition("->")
    sources = given.split(",")
    unused = [letter for letter in ascii_letters if letter not in subscripts]
    hidden = [len(shape) - len(source.replace("...", "")) for source, shape in zip(sources, shapes, strict=False)]
    most = max((count for source, count in zip(sources, hidden, strict=False) if "..." in source), default=0)
    dots = "".join(unused[: max(0, most)])
    for index, (source, count) in enumerate(zip(sources, hidden, strict=False)):
        sources[index] = source.replace("...", dots[len(dots) - count :], 1) if 0 <= count <= most else source
    if not arrow:
        joined = "".join(sources)
        result = dots + "".join(sorted(letter for letter in set(joined) - set(dots) if joined.count(letter) == 1))
    elif dots and "..." not in result:
        raise ValueError(f"einsum {subscripts!r}: the result must have the axes of '...'")
    result = result.replace("...", dots, 1)
    fits = [len(source) for source in sources] == [len(shape) for shape in shapes]
    letters = set("".join(sources))
    if not fits or not set(result) <= letters <= set(ascii_letters) or len(set(result)) < len(result):
        raise ValueError(f"einsum {subscripts!r} does not fit shapes {', '.join(map(str, shapes)) or '(no operands)'}")
    return sources, result
