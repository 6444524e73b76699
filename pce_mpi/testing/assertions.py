"""Assertions about arrays and values on ranks: close to the right numbers, equal in all bits, equal on all ranks.

An assertion with a communicator, or with a distributed array, whose mesh has one, is collective: the ranks check their
arguments, compare, and tell each other the result before any of them raises.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
import math
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from pce_mpi.arrays import REAL, as_array, is_floating, is_real, to_host
from pce_mpi.comm.agreement import agree, all_gather_text, local_checks
from pce_mpi.comm.communicators import channel_of
from pce_mpi.comm.errors import agreed, named, ranks_text
from pce_mpi.comm.library import comm_text, is_comm
from pce_mpi.comm.tracing import cause, untraced
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.text import grouped, shown
from pce_mpi.ulps import distances, ulp
from pce_mpi.validation import integers, real

if TYPE_CHECKING:
    from mpi4py import MPI


Array = np.ndarray[Any, Any]

# pytest leaves the frames of this file out of the text of a failure.
__tracebackhide__ = True
Place = tuple[slice, ...]

# The number of elements that a failure shows, and of failures of many ranks.
_MOST_SHOWN, _MOST_FAILURES = 3, 4


@dataclass(frozen=True)
class Together:
    """The ranks that make an assertion; this one alone if `comm` is None."""

    operation: str
    comm: Any
    over: str = "comm"

    @staticmethod
    def of(operation: str, comm: Any, *values: Any) -> Together:
        """Return the ranks of `comm`, or those of the largest mesh of the distributed arrays among `values`."""
        meshes = [x.mesh for x in values if isinstance(x, DistArray)]
        if any(mesh.is_hollow for mesh in meshes):
            raise TypeError(f"{operation} compares elements, which the arrays of a mesh without ranks do not have")
        if comm is not None and not is_comm(comm):
            raise TypeError(f"comm must be an mpi4py intracommunicator or None, got {comm_text(comm)}")
        if comm is not None or not meshes:
            return Together(operation, comm)
        largest = max(meshes, key=lambda mesh: mesh.size)
        return Together(operation, *largest.along(largest.dims))

    def agree(self, error: Exception | None, **arguments: Any) -> None:
        """Raise the error of a rank on all of them, or go on with equal arguments."""
        if self.comm is not None:
            agree(self.comm, self.operation, arguments, error=error, over=self.over)
        elif error is not None:
            raise error

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, pickled and back."""
        if self.comm is None:
            return [value]
        text = b64encode(pickle.dumps(value)).decode()
        texts = all_gather_text(text, self.comm, operation=self.operation, over=self.over)
        return [pickle.loads(b64decode(each)) for each in texts]

    def fail(self, failure: str, number: int = 0) -> None:
        """Raise `AssertionError` if ranks have a failure: those of the least `number`, equal ones once."""
        found = self.gather((number, failure))
        least = min((number for number, failure in found if failure), default=-1)
        ranks = grouped((failure, rank) for rank, (number, failure) in enumerate(found) if failure and number == least)
        if ranks and self.comm is None:
            raise AssertionError(*ranks)
        if ranks:
            self.raise_together([f"{ranks_text(who, self.over)}: {failure}" for failure, who in ranks.items()])

    def raise_together(self, failures: Sequence[str]) -> NoReturn:
        """Raise `AssertionError`, as all ranks do, with the first of `failures`."""
        more = [f"and {len(failures) - _MOST_FAILURES} more"] if len(failures) > _MOST_FAILURES else []
        error = named(AssertionError("\n".join([*failures[:_MOST_FAILURES], *more])))
        raise agreed(error, channel_of(self.comm, self.operation).peers, self.comm.size)


def held_by(x: DistArray) -> tuple[Array, Place]:
    """Return the elements of the global array that this rank holds, on the host, and their place; collective."""
    natural = x.sharding.natural
    with untraced(), cause("testing", reason="elements are compared"):
        return to_host(redistribute(x, natural).local), natural.slices(x.mesh.coordinates)


def part_of(whole: Array, place: Place) -> Array:
    """Return the elements at `place`, all for (), as an array also where there is one alone."""
    index: Any = (*place, ...)
    return whole[index]


def elements_off(
    title: str, off: Array, describe: Callable[..., str], *, place: Place = (), distance: Array | None = None
) -> str:
    """Say how many elements are `off`, and describe the furthest ones, or the first ones; "" if none is.

    They are those of a global array from `place` on.
    """
    places = np.argwhere(off)
    if not len(places):
        return ""
    order = np.arange(len(places)) if distance is None else np.argsort(-distance[off], kind="stable")
    lines = [f"{title}: {len(places)} of {off.size} elements"]
    for index in map(tuple, places[order[:_MOST_SHOWN]].tolist()):
        at = tuple(first + part.start for first, part in zip(index, place, strict=True)) if place else index
        lines.append(f"  at {at}: {describe(index)}")
    return "\n".join(lines)


def assert_ulps(
    got: Any, exact: Any, most: float, *, comm: Any = None, offset: int | Sequence[int] | None = None
) -> None:
    """Assert that no number is further than some ulps from the exact one.

    Every element must have |got - exact| <= most ulp(exact), where ulp(x) = 2^(floor(log2 |x|) - p) is the distance of
    neighbours around x in the dtype of `got`, whose fraction has p bits: 10 (float16), 7 (bfloat16), 23 (float32), 52
    (float64). Around 0 and subnormal numbers it is the smallest positive number; for integers and bool it is 1.
    A result that was rounded correctly is at most 0.5 ulp off.

    Parameters
    ----------
    got : DistArray or array_like
        The numbers to judge: bool, integers, float16, bfloat16, float32 or float64.
    exact : DistArray or array_like
        The right numbers, of the same global shape. Numbers wider than float64 (`fractions.Fraction`, `mpmath.mpf`,
        `decimal.Decimal`, int) are taken from an array or a list of objects, to all of their digits.
    most : float
        The number of ulps that are allowed.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that assert together. A `DistArray` has those of its mesh, and needs no `comm`; without either this
        rank asserts alone.
    offset : int or sequence of int, optional
        For a plain array that is this rank's shard: the index of its first element in the global array, one number for
        each axis. Then `exact` is the global array, and indices in the text are global. `Piece.offset` of `shards_of`
        is one.

    Raises
    ------
    AssertionError
        If numbers are further off, on every rank of `comm`. The text has, for each rank that has found some, how many
        of its elements they are, and of the worst ones the global index, both numbers and the distance.
    TypeError, ValueError
        If an argument is wrong, on every rank of `comm`.
    CollectiveError
        If ranks differ in `most`.

    Notes
    -----
    nan equals nan. Infinities must be equal; an exact number that rounds to infinity in the dtype counts as infinity.

    Collective over `comm` or the mesh: an Allgather of 56 bytes, one of 8 and an Allgatherv of text. A Partial array is
    reduced first, and an `exact` that is a `DistArray` is gathered.

    Examples
    --------
    >>> from fractions import Fraction
    >>> import numpy as np
    >>> from pce_mpi.testing.assertions import assert_ulps
    >>> assert_ulps(np.float32(1) / np.float32(3), Fraction(1, 3), 0.5)
    >>> assert_ulps(np.array([1.0, 2.5], np.float32), [1.0, 2.0], 1)
    Traceback (most recent call last):
    AssertionError: more than 1 ulp of float32 off: 1 of 2 elements
      at (1,): got 2.5, exact 2.0, 2.1e+06 ulp
    """

    _assert_near("assert_ulps", got, exact, {"most": most}, comm, offset)


def assert_close(
    got: Any,
    expected: Any,
    rtol: float = 1e-7,
    atol: float = 0.0,
    *,
    comm: Any = None,
    offset: int | Sequence[int] | None = None,
) -> None:
    """Assert that no number is further from the expected one than a part of it, as `numpy.testing.assert_allclose`.

    Every element must have |got - expected| <= atol + rtol |expected|.

    Parameters
    ----------
    got, expected : DistArray or array_like
        As `got` and `exact` of `assert_ulps`.
    rtol, atol : float, optional
        The distance that is allowed, as a part of the expected number, and in its unit.
    comm, offset
        Those of `assert_ulps`.

    Raises
    ------
    AssertionError, TypeError, ValueError, CollectiveError
        As `assert_ulps` does.

    Notes
    -----
    nan equals nan, and infinities must be equal. Communicates as `assert_ulps` does.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> from pce_mpi.testing.assertions import assert_close
    >>> x = pce.distribute(np.ones((2, 3)), pce.Mesh(MPI.COMM_SELF, data=1), data=pce.Shard(0))
    >>> assert_close(x * 2, np.full((2, 3), 2.0))
    """

    _assert_near("assert_close", got, expected, {"rtol": rtol, "atol": atol}, comm, offset)


def assert_same_bits(*arrays: Any, comm: MPI.Intracomm | None = None) -> None:
    """Assert that arrays have the same dtype, shape and bits: each other's, on this rank and on all others.

    Distributed arrays are compared by their global values, whatever their placements, and may be on different meshes.
    All nan count as equal, as the bits of nan depend on the processor; 0.0 and -0.0 differ.

    Parameters
    ----------
    *arrays : DistArray or array_like
        Arrays of bool, integers or real numbers, each of the same global shape. A single one is compared over ranks.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks on which all of `arrays` must be equal. Unless given, those of the largest mesh of a `DistArray`;
        without such a one this rank asserts alone.

    Raises
    ------
    AssertionError
        If arrays differ, on every rank of `comm`. The text has for each rank that holds another array, or differing
        ones, the dtypes or shapes; or the number of elements with other bits, and of the first ones the global index,
        both numbers and both bit patterns, in hexadecimal digits.
    TypeError
        If there is no array, or nothing to compare a single one with, on every rank of `comm`.

    Notes
    -----
    Collective over `comm`, and over the mesh of each `DistArray`, which is gathered as `full` does: an Allgather of 56
    bytes, and text. If bits differ, rank 0 sends the bits of its first array to the others.

    Examples
    --------
    >>> import numpy as np
    >>> from pce_mpi.testing.assertions import assert_same_bits
    >>> assert_same_bits(np.float32([1, 2]), np.float32([1, 2.0000002]))
    Traceback (most recent call last):
    AssertionError: array 1 has other bits than array 0: 1 of 2 elements
      at (1,): 2.0000002 is 0x40000001, 2.0 is 0x40000000
    """
    ranks = Together.of("assert_same_bits", comm, *arrays)
    with local_checks() as checks:
        if len(arrays) < 1 + (ranks.comm is None):
            raise TypeError(f"assert_same_bits takes two arrays or more, or one and comm, got {len(arrays)}")
        arrays = tuple(x if isinstance(x, DistArray) else real_array(x, f"array {i}") for i, x in enumerate(arrays))
    ranks.agree(checks.error, arrays=len(arrays))
    whole = [np.asarray(to_host(x.full()) if isinstance(x, DistArray) else x, order="C") for x in arrays]
    name = "array 0" if ranks.comm is None else "array 0 of rank 0"
    right = ranks.gather(whole[0] if ranks.comm is None or ranks.comm.rank == 0 else None)[0]
    failures = (other_bits(f"array {number} has other bits than {name}", x, right) for number, x in enumerate(whole))
    ranks.fail("\n".join(filter(None, failures)))


def assert_same_on_ranks(value: Any, comm: MPI.Intracomm) -> None:
    """Assert that a value is equal on all ranks.

    Numbers, texts, arrays, and lists, tuples and dicts of them are compared part by part. Arrays must have equal
    dtypes, shapes and elements; nan equals nan. Other objects are compared by `==`.

    Parameters
    ----------
    value : object
        This rank's value. It must be possible to pickle it.
    comm : mpi4py.MPI.Intracomm
        The ranks.

    Raises
    ------
    AssertionError
        If ranks differ, on every rank. The text names the ranks that differ from most others, and the first part, and
        of an array the first index, at which they do, with both values.
    TypeError
        If `comm` is no communicator; or, on every rank, if `value` cannot be pickled, as a `DistArray` cannot.

    Notes
    -----
    Collective: an Allgather of 56 bytes, one of 8, and an Allgatherv of all values, pickled.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from pce_mpi.testing.assertions import assert_same_on_ranks
    >>> assert_same_on_ranks({"step": 3, "losses": [0.5, 0.25]}, MPI.COMM_SELF)
    """
    if comm is None:
        raise TypeError("assert_same_on_ranks takes the communicator of the ranks, got None")
    ranks, sent = Together.of("assert_same_on_ranks", comm), b""
    with local_checks() as checks:
        try:
            sent = pickle.dumps(list(leaves(value)))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(f"the value cannot be sent to other ranks: {error}") from error
    ranks.agree(checks.error)
    values = [pickle.loads(each) for each in ranks.gather(sent)]
    groups: list[list[int]] = []
    for rank, each in enumerate(values):
        like = next((group for group in groups if not _difference(each, values[group[0]])), None)
        groups.append([rank]) if like is None else like.append(rank)
    most = max(groups, key=len)
    differing = [
        f"{ranks_text(group)} differ{'s' * (len(group) == 1)} from {ranks_text(most)}"
        f"{_difference(values[group[0]], values[most[0]])}"
        for group in groups
        if group is not most
    ]
    if differing:
        ranks.raise_together(differing)


class Numbers(NamedTuple):
    """Right numbers as they were given, as float64, and what those leave."""

    given: Array
    head: Array
    rest: Array

    @staticmethod
    def of(value: Any, name: str) -> Numbers:
        """Return the numbers of an array; `TypeError`, which names the argument, if it has others."""
        try:
            given = value if hasattr(value, "__dlpack__") else np.asarray(value)
            if given.dtype != object:
                given = real_array(given, name)
                if given.dtype.kind not in "iu":  # float64 has not all whole numbers
                    return Numbers(given, given.astype(np.float64), np.zeros(given.shape))
            objects = given.astype(object)
            head = [_as_float(each) for each in objects.flat]
            rest = [float(x - type(x)(y)) if math.isfinite(y) else 0.0 for x, y in zip(objects.flat, head, strict=True)]
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} cannot be taken as an array of real numbers: {error}") from error
        return Numbers(given, np.array(head).reshape(given.shape), np.array(rest).reshape(given.shape))


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _exactly(value: Any) -> Any:
    """Return a number in a type that Python compares with ints, and takes from them, without rounding."""
    value = value.item() if isinstance(value, np.generic) else value
    is_float = isinstance(value, float | np.floating) and math.isfinite(value)
    return Fraction(*value.as_integer_ratio()) if is_float else value


def real_array(value: Any, name: str) -> Array:
    """Return an array of real numbers on the host; `TypeError`, which names the argument, for others."""
    array = to_host(as_array(value, name))
    if not is_real(array.dtype):
        raise TypeError(f"{name} must be {REAL}, got {array.dtype}")
    return array


def not_negative(value: Any, name: str) -> float:
    """Return `value` as a float; an error, which names the argument, if it is no number or below 0."""
    number = real(value, name)
    if not number >= 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return number


def _place(held: Array, offset: Any) -> Place:
    """Return the part of the global array that begins at `offset`, or at 0 without one."""
    start = [0] * held.ndim if offset is None else integers(offset, "offset")
    if len(start) != held.ndim or min(start, default=0) < 0:
        raise ValueError(f"offset must have a number for each of {held.ndim} axes, none below 0, got {offset!r}")
    return tuple(slice(first, first + length) for first, length in zip(start, held.shape, strict=True))


def _assert_near(operation: str, got: Any, right: Any, limits: dict[str, float], comm: Any, offset: Any) -> None:
    ranks = Together.of(operation, comm, got, right)
    name, place, at = ("exact" if "most" in limits else "expected"), Place(), ""
    with local_checks() as checks:
        limits = {limit: not_negative(value, limit) for limit, value in limits.items()}
        if not isinstance(got, DistArray):
            got = real_array(got, "got")
            place = _place(got, offset)
            at = "" if offset is None else f" at {tuple(part.start for part in place)}"
        elif offset is not None:
            raise TypeError("offset is for plain arrays, as a DistArray knows its place")
        if not isinstance(right, DistArray):
            right = Numbers.of(right, name)
    ranks.agree(checks.error, **limits)
    if isinstance(right, DistArray):
        right = Numbers.of(right.full(), name)
    held = got
    if isinstance(got, DistArray):
        held, place = held_by(got)
    shape = right.given.shape
    if shape == got.shape or (at and len(shape) == held.ndim):
        right = Numbers(*(part_of(each, place) for each in right))
    # A piece that goes on behind the end of the right array has more elements than that has there.
    if right.given.shape == held.shape:
        ranks.fail(_far(held, right, limits, place))
    else:
        ranks.fail(f"got shape {got.shape}{at}, {name} shape {shape}")


@np.errstate(all="ignore")
def _far(held: Array, right: Numbers, limits: dict[str, float], place: Place) -> str:
    """Say which elements are further off than the limits allow; "" if none is."""
    dtype, head, in_ulps = held.dtype, right.head, is_floating(held.dtype)
    name, title = "expected", f"further off than {', '.join(f'{limit}={most:g}' for limit, most in limits.items())}"
    if "most" in limits:
        name, title = "exact", f"more than {limits['most']:g} ulp of {dtype} off"
        if in_ulps:  # what rounds to infinity is infinity
            head = np.where(np.isinf(head.astype(dtype).astype(np.float64)), np.copysign(np.inf, head), head)
    if in_ulps:
        distance, unit = distances(held, head, right.rest), ulp(head, dtype)
    else:
        exact = right.given if right.given.dtype.kind in "iuO" else right.head
        apart = [abs(x - _exactly(y)) for x, y in zip(held.astype(object).flat, exact.astype(object).flat, strict=True)]
        distance, unit = np.array([_as_float(each) for each in apart]).reshape(held.shape), np.ones(held.shape)
    ulps = np.where(np.isnan(distance), np.inf, distance / unit)
    close = ulps <= limits["most"] if "most" in limits else distance <= limits["atol"] + limits["rtol"] * np.abs(head)
    off = ~((distance == 0) | close) | np.isinf(distance)

    def describe(index: tuple[int, ...]) -> str:
        apart = f", {ulps[index]:.3g} ulp" if in_ulps and np.isfinite(ulps[index]) else ""
        return f"got {held[index]!s}, {name} {right.given[index]!s}{apart}"

    return elements_off(title, off, describe, place=place, distance=ulps)


def _bits(array: Array) -> Array:
    """Return the bits of each element as a whole number, those of every nan alike."""
    bits = array.view(f"u{array.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        return np.where(array == array, bits, np.iinfo(bits.dtype).max)


def other_bits(title: str, x: Array, reference: Array, place: Place = ()) -> str:
    """Say which elements of `x` have other bits than those of `reference`; "" if none has."""
    if (x.dtype, x.shape) != (reference.dtype, reference.shape):
        return f"{title}: {x.dtype} {x.shape}, not {reference.dtype} {reference.shape}"

    def describe(index: tuple[int, ...]) -> str:
        return ", ".join(f"{each[index]!s} is 0x{each[index].tobytes()[::-1].hex()}" for each in (x, reference))

    return elements_off(title, _bits(x) != _bits(reference), describe, place=place)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that are no lists, tuples or dicts, by their path, and the kind of these."""
    if isinstance(value, dict | list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        items = sorted(value.items(), key=lambda item: repr(item[0])) if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from leaves(part, f"{path}[{key!r}]")
    elif hasattr(value, "__dlpack__"):
        yield path, to_host(as_array(value, f"value{path}"))
    else:
        yield path, value


def _difference(one: list[tuple[str, Any]], other: list[tuple[str, Any]]) -> str:
    """Say where the leaves of two values differ first, and how; "" if they do not."""
    for (path, x), (other_path, y) in zip(one, other, strict=False):
        if path != other_path:
            return f": it has {path}, not {other_path}"
        if difference := _difference_of(x, y):
            return f"{path and f' at {path}'}: {difference}"
    return ""


def _difference_of(one: Any, other: Any) -> str:
    are_arrays = isinstance(one, np.ndarray), isinstance(other, np.ndarray)
    if not any(are_arrays) and (_exactly(one) == _exactly(other) or (one != one and other != other)):
        return ""
    if not all(are_arrays):
        return f"{shown(one)}, not {shown(other)}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {one.shape}, not {other.dtype} {other.shape}"
    off = (one != other) & ~((one != one) & (other != other))

    def describe(index: tuple[int, ...]) -> str:
        return f"{one[index]!s}, not {other[index]!s}"

    return elements_off("other elements", off, describe)
