"""Assertions about equality: of bits, over arrays, ranks and meshes, and of any value over ranks."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
import hashlib
import json
import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.arrays import as_array, cupy_of, dtype_named, to_host
from pce_mpi.comm.agreement import local_checks
from pce_mpi.comm.collectives import all_gather
from pce_mpi.comm.errors import agreed, named, ranks_text
from pce_mpi.comm.tracing import cause, untraced
from pce_mpi.distributed.array import DistArray
from pce_mpi.testing.assertions import real_array
from pce_mpi.testing.together import Place, Together, elements_off
from pce_mpi.text import shown

if TYPE_CHECKING:
    from mpi4py import MPI

Array = np.ndarray[Any, Any]


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
    >>> from pce_mpi.testing.equality import assert_same_bits
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
    forms = [(x.dtype.name, list(x.shape), hashlib.sha256(_bits(x).tobytes()).hexdigest()) for x in whole]
    said = [json.loads(text) for text in ranks.texts(json.dumps(forms))]
    right = said[0][0]
    if all(each == right for every in said for each in every):
        return
    reference = whole[0] if ranks.comm is None else _from_rank_0(whole[0], right, ranks)
    name = "array 0" if ranks.comm is None else "array 0 of rank 0"
    failures = []
    for number, (x, form) in enumerate(zip(whole, forms, strict=True)):
        if list(form) != right:
            failures.append(other_bits(f"array {number} has other bits than {name}", x, reference))
    ranks.fail("\n".join(failures))


def _bits(array: Array) -> Array:
    """Return the bits of each element as a whole number, those of every nan alike."""
    bits = array.view(f"u{array.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        return np.where(array == array, bits, np.iinfo(bits.dtype).max)


def _from_rank_0(array: Array, form: Any, ranks: Together) -> Array:
    """Return rank 0's array, of the dtype and shape that it has said."""
    dtype, shape = dtype_named(form[0]), tuple(form[1])
    empty = np.empty(0, np.uint8)
    flat = array.reshape(-1).view(np.uint8) if ranks.comm.rank == 0 else empty
    size = dtype.itemsize * math.prod(shape)
    with untraced(), cause("assert_same_bits", ranks.over, "bits differ from those of rank 0"):
        parts = all_gather(flat, ranks.comm, [(size,), *[(0,)] * (ranks.comm.size - 1)])
    return parts[0].view(dtype).reshape(shape)


def other_bits(title: str, x: Array, reference: Array, place: Place = ()) -> str:
    """Say which elements of `x` have other bits than those of `reference`; "" if none has."""
    if (x.dtype, x.shape) != (reference.dtype, reference.shape):
        return f"{title}: {x.dtype} {x.shape}, not {reference.dtype} {reference.shape}"

    def describe(index: tuple[int, ...]) -> str:
        return ", ".join(f"{each[index]!s} is 0x{each[index].tobytes()[::-1].hex()}" for each in (x, reference))

    return elements_off(title, _bits(x) != _bits(reference), describe, place=place)


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
    >>> from pce_mpi.testing.equality import assert_same_on_ranks
    >>> assert_same_on_ranks({"step": 3, "losses": [0.5, 0.25]}, MPI.COMM_SELF)
    """
    if comm is None:
        raise TypeError("assert_same_on_ranks takes the communicator of the ranks, got None")
    ranks, text = Together.of("assert_same_on_ranks", comm), ""
    with local_checks() as checks:
        try:
            text = b64encode(pickle.dumps(dict(leaves(value)))).decode()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(f"the value cannot be sent to other ranks: {error}") from error
    ranks.agree(checks.error)
    values = [pickle.loads(b64decode(text)) for text in ranks.texts(text)]
    groups: list[list[int]] = []
    for rank, each in enumerate(values):
        like = next((group for group in groups if not _difference(each, values[group[0]])), None)
        groups.append([rank]) if like is None else like.append(rank)
    most = max(groups, key=len)
    if len(groups) > 1:
        said = [
            f"{ranks_text(group)} differ{'s' * (len(group) == 1)} from {ranks_text(most)}"
            f"{_difference(values[group[0]], values[most[0]])}"
            for group in groups
            if group is not most
        ]
        raise agreed(named(AssertionError("\n".join(said))), comm.size)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that are no lists, tuples or dicts, by their path, and the kind of these."""
    if isinstance(value, dict | list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}[{key!r}]")
    elif cupy_of(value) is not None or (hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray)):
        yield path, to_host(as_array(value, f"value{path}"))
    else:
        yield path, value


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Say where the leaves of two values differ first, and how; "" if they do not."""
    for path in [*one, *other]:
        at = f" at {path}" if path else ""
        if path not in one or path not in other:
            said = [shown(each[path]) if path in each else "nothing" for each in (one, other)]
            return f"{at}: {', not '.join(said)}"
        if difference := _difference_of(one[path], other[path]):
            return f"{at}: {difference}"
    return ""


def _difference_of(one: Any, other: Any) -> str:
    are_arrays = isinstance(one, np.ndarray), isinstance(other, np.ndarray)
    if not any(are_arrays) and (one == other or (one != one and other != other)):
        return ""
    if not all(are_arrays):
        return f"{shown(one)}, not {shown(other)}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {one.shape}, not {other.dtype} {other.shape}"
    off = (one != other) & ~((one != one) & (other != other))

    def describe(index: tuple[int, ...]) -> str:
        return f"{one[index]!s}, not {other[index]!s}"

    return elements_off("other elements", off, describe)
