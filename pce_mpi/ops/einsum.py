"""Sums of products, in Einstein's notation, whose letters are the labels of the placement rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
import math
from string import ascii_letters
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, result_type
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.broadcasting import broadcast_to, sum
from pce_mpi.ops.elementwise import astype, widened
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.shape import reshape, transpose

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _terms(letters: str) -> tuple[list[str], str]:
    sources, _, result = letters.partition("->")
    return sources.split(","), result


def _rule(*shapes: Shape, letters: str) -> Rule:
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
    "einsum", _einsum, [_vjp(0)], lambda shape, letters: replace(_rule(shape, letters=letters), reduces=None), uses=[()]
)


@cache
def _op(count: int) -> Op:
    others = [tuple(other for other in range(count) if other != index) for index in range(count)]
    vjps = [_vjp(index) for index in range(count)]
    return Op("einsum", _einsum, vjps, _rule, uses=others, wide=True, composition=_composed)


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
