"""Gradients of functions on distributed arrays, against finite differences, at every placement of the operands."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from math import prod
from operator import add
from random import Random
from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating, to_host
from pce_mpi.autograd.tape import no_grad
from pce_mpi.comm.agreement import local_checks
from pce_mpi.comm.calls import public
from pce_mpi.distributed.array import DistArray, described
from pce_mpi.distributed.mesh import Mesh, check_mesh
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.testing.assertions import Together, not_negative, real_array
from pce_mpi.testing.placing import alone, local_of, placements_of
from pce_mpi.ulps import distances
from pce_mpi.validation import integer

Array = np.ndarray[Any, Any]

__tracebackhide__ = True  # as in assertions.py
Function = Callable[..., Any]

# A power of two, so that numbers and the direction are added without rounding: close to eps**(1/3).
STEP = 2.0**-17
# Central differences with this step leave about eps**(2/3), 2**-35, and third derivatives of up to a few hundred.
_RTOL = 2.0**-26
# Rounding leaves eps / STEP, 2**-35, of the largest result in a difference quotient of a function that is constant.
_ROUNDING = 2.0**-31
_MOST_SHOWN = 3


@partial(public, finds_mesh=False)
def check_gradients(
    function: Function,
    *arrays: Any,
    mesh: Mesh | None = None,
    rtol: float = _RTOL,
    most_placements: int = 100,
    most_elements: int = 10,
) -> int:
    """Check the gradients that `backward` finds, at every placement of the operands that a mesh allows.

    For operands x, a random upstream gradient v of the results, and J the Jacobian of the function, in float64:

    - each element i of the gradient J^T v is compared with the central difference (L(x + h e_i) - L(x - h e_i)) / 2h of
      L(x) = <v, function(x)>, where h = 2^-17, so that operands should have numbers of a size near 1;
    - <J^T v, u> is compared with <v, J u> for a random direction u of each operand (the dot test), where J u is such a
      difference along u: this covers all elements;
    - the results themselves are compared with those on one rank.

    Two numbers may differ by `rtol` max(1, |difference quotient|, largest |result|). An operand whose derivatives
    are all smaller than what may differ, but not 0, fails: a gradient of 0 would pass as well.

    Parameters
    ----------
    function : callable
        Takes distributed arrays and returns one, or a list or tuple of them: operations of `pce_mpi`, or one that
        `pce_mpi.op` has made. It must be differentiable at `arrays`. Results that are no real numbers are left out.
    *arrays : array_like
        The global operands, which every rank passes. Those of a floating dtype become float64, and have gradients;
        integers and bool have none.
    mesh : Mesh, optional
        The ranks. Unless given, a mesh of this rank alone.
    rtol : float, optional
        The difference that is allowed.
    most_placements : int, optional
        The most placements that are tried. Each dim of the mesh may hold each operand as Replicate, as Shard of each of
        its axes, and, if it has a gradient, as Partial("sum") with random terms: for operands of a_1, a_2, ... axes on
        d dims they are (a_1 + 2)^d (a_2 + 2)^d ... in all. If they are more, so many of them are drawn, the same ones
        in each run.
    most_elements : int, optional
        The most elements of each operand that are compared one by one, drawn in the same way.

    Returns
    -------
    int
        The number of placements that were tried.

    Raises
    ------
    AssertionError
        On every rank, if a number is wrong. The text says at how many placements, and for the first ones the operand,
        the placement of each operand, the global index, and both numbers. Or that an operand's
        derivatives are smaller than what may differ.
    TypeError, ValueError
        If an argument is wrong, on every rank.
    Exception
        The error that the function raises, with the placements of the operands in a note.

    Notes
    -----
    Collective over the mesh: what the function and `backward` send, and text. On each rank alone the function runs
    2 (`most_elements` + 1) times for each operand with a gradient, and once on the mesh at each placement. Elements
    that are not finite are left out.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> from pce_mpi.testing.gradients import check_gradients
    >>> check_gradients(lambda x, w: pce.tanh(x @ w), np.ones((2, 3)), np.ones((3, 2)))
    16
    """
    mesh = alone("data") if mesh is None else mesh
    check_mesh(mesh)
    if mesh.is_hollow:
        raise TypeError("check_gradients computes with elements, which arrays of a mesh without ranks do not have")
    ranks, operands = Together("check_gradients", *mesh.along(mesh.dims)), list[Array]()
    with local_checks() as checks:
        rtol = not_negative(rtol, "rtol")
        for name, least in (("most_placements", most_placements), ("most_elements", most_elements)):
            if integer(least, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {least}")
        if not callable(function):
            raise TypeError(f"function must take distributed arrays, got {function!r}")
        for index, array in enumerate(arrays):
            x = real_array(array, f"operand {index}")
            operands.append(x.astype(np.float64) if is_floating(x.dtype) else x)
        if not any(x.dtype == np.float64 for x in operands):
            raise TypeError("check_gradients takes at least one array of a floating dtype")
    shapes = tuple((x.shape, x.dtype.name) for x in operands)
    ranks.agree(checks.error, operands=shapes, rtol=rtol, most=(most_placements, most_elements))
    total, ways = _ways(operands, mesh, most_placements)
    check, wrong, tried = _Check(function, operands, alone(*mesh.dims), most_elements), list[str](), 0
    for tried, shardings in enumerate(ways, start=1):
        placed = "; ".join(f"operand {number} {sharding}" for number, sharding in enumerate(shardings))
        try:
            if fault := next(check.faults(mesh, shardings, tried, rtol), None):
                wrong.append(f"\n  {fault}\n    with {placed}")
        except Exception as error:
            error.add_note(f"in check_gradients, with {placed}")
            raise
    of_all = f"{tried} placements{f' tried, of {total}' if total > tried else ''}"
    ranks.fail(f"wrong at {len(wrong)} of {of_all}:{''.join(wrong[:_MOST_SHOWN])}" if wrong else check.unseen(rtol))
    return tried


class _Check:
    """A function with its results on one rank, a random gradient for them, and difference quotients of what follows."""

    def __init__(self, function: Function, operands: Sequence[Array], mesh: Mesh, elements: int) -> None:
        def plain(*values: Array) -> list[Array]:
            held = [DistArray(x, mesh, Sharding.of(mesh.dim_sizes, x.shape, {})) for x in values]
            with no_grad():
                return [to_host(result.full()) for result in self._results_of(held)]

        rng = np.random.default_rng(0)
        self._function, self._operands = function, operands
        self._results = plain(*operands)
        self._upstream = [np.where(np.isfinite(x), normal_numbers(rng, x.shape), 0.0) for x in self._results]
        self._largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in self._results)
        self._size = max(1.0, self._largest)
        self._probes = [
            (number, text, direction, slope(plain, self._upstream, operands, number, direction))
            for number, x in enumerate(operands)
            if x.dtype == np.float64
            for text, direction in _directions(x, elements, rng)
        ]
        # By operand: the largest derivative, by finite differences or by `backward`.
        self._steepest = dict[int, float]()
        for number, _, _, quotient in self._probes:
            self._note(number, quotient)

    def _note(self, number: int, derivative: float) -> None:
        self._steepest[number] = max(self._steepest.get(number, 0.0), abs(derivative))

    def _results_of(self, held: Sequence[DistArray]) -> list[DistArray]:
        results = self._function(*held)
        several = results if isinstance(results, list | tuple) else [results]
        real = [each for each in several if isinstance(each, DistArray) and is_floating(each.dtype)]
        if not real:
            said = described(results)
            raise TypeError(f"the function must return distributed arrays of a floating dtype, got {said}")
        return real

    def faults(self, mesh: Mesh, shardings: Sequence[Sharding], seed: int, rtol: float) -> Iterator[str]:
        """Yield the numbers that are wrong with operands so placed; collective."""
        held = []
        for number, (x, sharding) in enumerate(zip(self._operands, shardings, strict=True)):
            local = local_of(x, sharding, mesh.coordinates, [seed, number])
            held.append(DistArray(local, mesh, sharding, requires_grad=x.dtype == np.float64))
        results = self._results_of(held)
        reduce(add, ((result * v).sum() for result, v in zip(results, self._upstream, strict=True))).backward()
        whole = [to_host(result.full()) for result in results]
        gradients = [np.zeros(x.shape) if x.grad is None else to_host(x.grad.full()) for x in held]
        for number, (got, right) in enumerate(zip(whole, self._results, strict=True)):
            off = np.argwhere(~(distances(got, right) <= rtol * self._size))
            for at in map(tuple, off[:1].tolist()):
                yield f"result {number} at {at} is {got[at]!s}, on one rank {right[at]!s}"
        for number, text, direction, quotient in self._probes:
            derivative = float(np.sum(np.where(direction == 0.0, 0.0, gradients[number] * direction)))
            self._note(number, derivative)
            if not abs(derivative - quotient) <= rtol * max(self._size, abs(quotient)):
                yield f"operand {number}: {text.format(derivative)}, by finite differences {quotient!r}"

    def unseen(self, rtol: float) -> str:
        """Say which operand has derivatives that are not 0, but are where 0 would pass too; "" if none has."""
        most, rounding = rtol * self._size, _ROUNDING * min(1.0, self._largest)
        for number, steepest in self._steepest.items():
            if rounding < steepest <= most:
                return (
                    f"has seen nothing but 0 of operand {number}: its largest derivative is {steepest:.2g}, and "
                    f"numbers may differ by {most:.2g}, {rtol:.2g} of the largest result or of 1. "
                    "Let operands and results have a size near 1, or pass a smaller rtol"
                )
        return ""


def _directions(x: Array, elements: int, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """Yield elements of an operand, and then all of them, as directions, with the text for a wrong derivative."""
    finite = np.isfinite(x)
    places = np.argwhere(finite)
    for place in sorted(rng.permutation(places)[:elements].tolist()):
        direction = np.zeros(x.shape)
        direction[tuple(place)] = 1.0
        yield f"the gradient at {tuple(place)} is {{!r}}", direction
    yield "<J^T v, u> is {!r}, and <v, J u>", np.where(finite, normal_numbers(rng, x.shape), 0.0)


def _ways(operands: Sequence[Array], mesh: Mesh, most: int) -> tuple[int, Iterator[list[Sharding]]]:
    """Return how many placements there are, and those to try: all, or the same `most` of them in each run."""
    kinds = [placements_of(x.ndim, *(["sum"] if x.dtype == np.float64 else [])) for x in operands]
    total, rng = prod(len(kind) ** len(mesh.dims) for kind in kinds), Random(0)
    numbers = set(range(total)) if total <= most else set[int]()
    while len(numbers) < min(most, total):
        numbers.add(rng.randrange(total))

    def shardings(number: int) -> Iterator[Sharding]:
        for x, kind in zip(operands, kinds, strict=True):
            placed: dict[str, Placement] = {}
            for dim in mesh.dims:
                number, index = divmod(number, len(kind))
                placed[dim] = kind[index]
            yield Sharding.of(mesh.dim_sizes, x.shape, placed)

    return total, (list(shardings(number)) for number in sorted(numbers))


def normal_numbers(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Return normally distributed multiples of 1/256, but never 0."""
    drawn = np.round(rng.normal(0, 1, shape) * 128) / 128
    return np.asarray(drawn + 1 / 256)


@np.errstate(all="ignore")
def slope(
    function: Callable[..., Sequence[Array]],
    upstream: Sequence[Array],
    operands: Sequence[Array],
    number: int,
    direction: Array,
) -> float:
    """Return the derivative of <upstream, function> along a direction of one operand, by a central difference.

    Elements that are not finite are left out. Each element is subtracted by itself: small ones stay beside large ones.
    """
    steps = ([*operands[:number], operands[number] + h * direction, *operands[number + 1 :]] for h in (STEP, -STEP))
    after, before = (function(*each) for each in steps)
    total = 0.0
    for x, y, v in zip(after, before, upstream, strict=True):
        total += float(np.sum(np.where(np.isfinite(x - y), x - y, 0.0) * v))
    return total / (2 * STEP)
