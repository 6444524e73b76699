"""Infer what an operation, or rehearse what a program would do, on hollow arrays, without data, MPI or other ranks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product, zip_longest
import math
from typing import Any

import numpy as np

from pce_mpi.autograd.apply import moves
from pce_mpi.comm.rehearsed import Link, Rehearsal
from pce_mpi.comm.tracing import Event, trace, untraced
from pce_mpi.distributed.array import OPERATIONS, DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement, Placements, checked_dims
from pce_mpi.distributed.sharding import Coordinates, Sharding, balanced_splits
from pce_mpi.hollow import hollow, keeping
from pce_mpi.validation import integers, real


@dataclass(frozen=True)
class Inference:
    """The placements and collectives of an operation; `infer_placements` makes one.

    Attributes
    ----------
    operands : tuple of dict of str to placement
        The placements in which the operation needs its operands.
    result : dict of str to placement
        The placements of the result.
    collectives : tuple of Event
        The collectives that a trace records on the rank at the origin of the mesh, whose shards are the longest.
    """

    operands: tuple[dict[str, Placement], ...]
    result: dict[str, Placement]
    collectives: tuple[Event, ...]

    @property
    def bytes(self) -> int:
        """The sum of the bytes over the collectives."""
        return sum(event.bytes for event in self.collectives)


def infer_placements(
    name: str,
    shapes: Sequence[Sequence[int]],
    placements: Sequence[Placements],
    *,
    mesh: Mesh | Mapping[str, int],
    dtypes: Any = np.float32,
    **parameters: Any,
) -> Inference:
    """Infer what an operation would do with operands of these global shapes and placements.

    The operation itself runs, on arrays without elements; inside `reproducible` it runs in that arithmetic.

    Parameters
    ----------
    name : str
        The operation, such as "matmul".
    shapes : sequence of sequence of int
        The global shape of each operand.
    placements : sequence of mapping of str to placement
        The placements of each operand by dim. Dims that are not named are Replicate.
    mesh : Mesh or mapping of str to int
        The mesh, or the sizes of its dims by name.
    dtypes : dtype or sequence of dtype, optional
        One for all operands, or one for each.
    **parameters
        The parameters of the operation, such as `index` of "slice".

    Returns
    -------
    Inference
        The placements, and what is sent.

    Raises
    ------
    ValueError
        If the operation does not exist, or the arguments do not belong together.
    TypeError
        If the placements or collectives depend on the elements of an operand, as those of an index by a mask do.
    Exception
        The error that the operation raises for its arguments.

    Notes
    -----
    Communicates nothing, and needs no MPI.

    Examples
    --------
    >>> from pce_mpi import Replicate, Shard, infer_placements
    >>> shapes, mesh = [(16, 784), (784, 10)], {"model": 2}
    >>> inferred = infer_placements("matmul", shapes, [{"model": Shard(1)}, {"model": Shard(0)}], mesh=mesh)
    >>> inferred.result, inferred.bytes
    ({'model': Partial('sum')}, 0)
    """
    if not isinstance(name, str) or name not in OPERATIONS or name.startswith("_"):
        raise ValueError(f"there is no operation {name!r}")
    for what, given in (("shapes", shapes), ("placements", placements)):
        if not isinstance(given, Sequence):
            raise TypeError(f"{what} must be a sequence, one for each operand, got {given!r}")
    of_each = list(dtypes) if isinstance(dtypes, Sequence) and not isinstance(dtypes, str) else [dtypes] * len(shapes)
    try:
        of_each = [np.dtype(each) for each in of_each]
    except (TypeError, ValueError):
        raise TypeError(f"dtypes must be a dtype, or one for each operand, got {dtypes!r}") from None
    if not len(shapes) == len(placements) == len(of_each):
        raise ValueError(f"{len(shapes)} shapes, {len(placements)} placements and {len(of_each)} dtypes")
    checked = [tuple(integers(shape, "a shape")) for shape in shapes]
    if any(length < 0 for shape in checked for length in shape):
        raise ValueError(f"a shape has no negative lengths, got {', '.join(map(str, checked))}")
    for each in (mesh, *placements):
        if not isinstance(each, Mapping) and not (each is mesh and isinstance(each, Mesh)):
            raise TypeError(f"mesh and placements are given by dim, such as data=2, got {each!r}")
    here = Mesh.without_ranks(**(mesh.dims if isinstance(mesh, Mesh) else mesh))
    operands = []
    for shape, placed, dtype in zip(checked, placements, of_each, strict=True):
        sharding = Sharding.of(here.dim_sizes, shape, placed)
        operands.append(DistArray(hollow(sharding.local_shape(here.coordinates), dtype), here, sharding))
    arguments: list[Any] = [operands] if name in ("concatenate", "stack") else list(operands)
    moved: dict[int, Sharding] = {}
    token = moves.set(moved)
    try:
        with untraced(), trace() as noted:
            result = OPERATIONS[name](*arguments, **parameters)
    finally:
        moves.reset(token)
    first = result[0] if isinstance(result, list | tuple) else result
    needed = tuple(dict(moved.get(id(operand), operand.sharding).by_dim) for operand in operands)
    return Inference(needed, first.placements, tuple(noted.select()))


# One run for each kind of rank: those of a large program take seconds each.
_MOST_KINDS = 10_000
Links = Mapping[str, tuple[float, float]]  # latency and bandwidth by dim


def rehearse(
    program: Callable[[Mesh], object], mesh: Mesh | Mapping[str, int], *, links: Links | None = None
) -> Rehearsal:
    """Run a program without ranks, data or MPI, and return what it would send and keep on a large mesh.

    Parameters
    ----------
    program : callable
        Takes a mesh, and does with it what it does on a real one: `distribute`, operations, `backward`,
        `clip_grad_norm`, `step`.
    mesh : Mesh or mapping of str to int
        The sizes of the dims by name, such as `{"data": 512, "model": 8}`, or a mesh that has them.
    links : mapping of str to pair of float, optional
        For each dim the latency of a collective, in seconds, and the bytes a second from a rank, as `python -m pce_mpi
        bench --collectives` measures them. Then the trace has estimated seconds.

    Returns
    -------
    Rehearsal
        The trace: every collective, with its bytes on the rank that puts in most, and the bytes that a rank keeps.

    Raises
    ------
    TypeError
        If `program` is no function that runs when it is called, or asks for the value of an element.
    ValueError
        If the sizes are none or those of more than 4,194,304 ranks, a link is no pair of positive numbers of a dim,
        the program sends something else when it runs for another kind of rank, or there are more than 10,000 kinds.
    RuntimeError
        If the program sends something over a communicator that has ranks.
    Exception
        The error that the program raises.

    Notes
    -----
    Communicates nothing, and needs no MPI. The arrays of the mesh, which is `mesh.is_hollow`, have shapes and dtypes
    but no elements. A program that needs a number says what it is in a rehearsal: `loss.item(rehearsed=0.0)`. Plain
    arrays may take no memory either: `np.broadcast_to(np.float32(0), shape)`.

    If shards have several lengths, the program runs once for each kind of rank, and must start anew each time: an
    iterator from outside it would have ended. `from_local` takes balanced shards and
    needs their `shape`. A lookup by rows of a sharded table or by a mask takes as many elements as it can.

    Inside `reproducible` the program is rehearsed in that arithmetic.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> def program(mesh):
    ...     x = pce.distribute(np.ones((4096, 64), np.float32), mesh, data=pce.Shard(0))
    ...     w = pce.distribute(np.ones((64, 1000), np.float32), mesh, requires_grad=True, model=pce.Shard(1))
    ...     pce.cross_entropy(x @ w, np.zeros(4096, int)).backward()
    ...     pce.SGD([w], lr=0.1).step()
    >>> trace = rehearse(program, mesh={"data": 512, "model": 8})
    >>> trace.bytes(phase="forward", over="model"), trace.memory["parameters"]
    (320, 32000)
    """
    return rehearsed(program, mesh, links, iter)


def rehearsed(
    program: Callable[[Mesh], object],
    mesh: Mesh | Mapping[str, int],
    links: Links | None,
    follow: Callable[[list[dict[str, int]]], Iterable[Coordinates]],
) -> Rehearsal:
    """Rehearse; `follow` yields each of the further kinds of ranks, and may show how many of them are done."""
    if not callable(program):
        raise TypeError(f"program must be a function that takes a mesh, got {program!r}")
    if not isinstance(mesh, Mesh | Mapping):
        raise TypeError(f"mesh must be the sizes of dims by name, such as {{'data': 512}}, got {mesh!r}")
    sizes = checked_dims(mesh.dims if isinstance(mesh, Mesh) else mesh)
    checked = _checked_links({} if links is None else links, sizes)
    first, shardings = _run(program, sizes, dict.fromkeys(sizes, 0))
    first.links = checked
    for coordinates in follow(list(_other_kinds(sizes, shardings))):
        _take_most(first, _run(program, sizes, coordinates)[0], coordinates)
    return first


def _run(program: Callable[[Mesh], object], sizes: dict[str, int], at: Coordinates) -> tuple[Rehearsal, set[Sharding]]:
    """Return the rehearsal of the rank at these coordinates, and the shardings of all arrays."""
    here = Mesh.without_ranks(at, **sizes)
    with untraced(), trace() as noted, keeping() as ledger:
        result = program(here)
        if isinstance(result, AsyncGenerator | Coroutine | Generator):
            if isinstance(result, Coroutine):
                result.close()  # or Python warns of it
            raise TypeError(
                f"program must be a function that runs when it is called; {program!r} returned a "
                f"{type(result).__name__}, of which nothing has run: it must have no `yield` and no `async`"
            )
    assert here.shardings is not None
    return Rehearsal(sizes, noted.events, ledger.most, {}), here.shardings


def _checked_links(links: Links, sizes: Mapping[str, int]) -> dict[str, Link]:
    needed = [dim for dim, size in sizes.items() if size > 1]
    for dim in links if isinstance(links, Mapping) else ():
        if dim not in sizes:
            raise ValueError(f"there is no dim {dim} to link: the mesh has {', '.join(sizes)}")
    if not isinstance(links, Mapping) or (links and not set(needed) <= set(links)):
        raise ValueError(f"links must have a latency and a bandwidth for each of {', '.join(needed)}, got {links!r}")
    found = {}
    for dim, link in links.items():
        if not isinstance(link, tuple | list) or len(link) != 2:
            raise ValueError(f"the link of {dim!r} must be a latency and a bandwidth, got {link!r}")
        latency, bandwidth = (real(number, f"the link of {dim!r}") for number in link)
        if not (0.0 <= latency < math.inf and 0.0 < bandwidth):
            raise ValueError(f"the link of {dim!r} must be seconds and bytes a second, got {link!r}")
        found[dim] = Link(latency, bandwidth)
    return found


def _take_most(most: Rehearsal, other: Rehearsal, at: Coordinates) -> None:
    """Let each collective, and each kind of memory, have the bytes of the rank that has more; `other` ran at `at`."""
    for index, (a, b) in enumerate(zip_longest(most.events, other.events)):
        if a is None or b is None or replace(a, bytes=b.bytes) != b:
            raise ValueError(
                "the program ran once for each kind of rank, and sent something else at "
                f"{_text_of_place(at)} than at {_text_of_place(dict.fromkeys(at, 0))}: collective {index + 1} is "
                f"{_text_of_event(b)} rather than {_text_of_event(a)}. It must start anew in each run, not go on with "
                "an iterator, say, from outside, and must send the same on every rank"
            )
    most.events[:] = [max(pair, key=lambda event: event.bytes) for pair in zip(most.events, other.events, strict=True)]
    most.memory |= {purpose: max(size, other.memory[purpose]) for purpose, size in most.memory.items()}


def _text_of_place(at: Coordinates) -> str:
    return ", ".join(f"{dim}={index}" for dim, index in at.items())


def _text_of_event(event: Event | None) -> str:
    return f"the {event.collective} of {event.operation} over {event.over}" if event else "none"


def _other_kinds(sizes: dict[str, int], shardings: set[Sharding]) -> Iterator[dict[str, int]]:
    """Yield the coordinates of one rank of each kind but that at the origin: ranks of a kind have equal shapes."""
    uneven = [sharding for sharding in shardings if not _is_even(sharding)]
    starts = {dim: {0} for dim in sizes}
    for sharding in uneven:
        for dim, places in _starts(sharding):
            starts[dim].update(places)
    if (count := math.prod(map(len, starts.values()))) > _MOST_KINDS:
        raise ValueError(
            f"the shards of this program's arrays have so many lengths that it would run for {count:,} kinds of "
            f"ranks; at most {_MOST_KINDS:,} are rehearsed: take lengths that the dims divide, or a smaller mesh"
        )
    known: set[tuple[Any, ...]] = set()
    for place in product(*map(sorted, starts.values())):
        at = dict(zip(sizes, place, strict=True))
        kind = tuple(_held(sharding, at) for sharding in uneven)
        if known and kind not in known:
            yield at
        known.add(kind)


def _starts(sharding: Sharding) -> Iterator[tuple[str, Iterable[int]]]:
    """Yield, for each dim that shards an axis, where shards of another kind may start: the longer ones come first."""
    balanced = _is_balanced(sharding)
    for axis, length in enumerate(sharding.shape):
        lengths = {length}
        for dim in sharding.dims_of(axis):
            size = sharding.sizes[dim]
            yield dim, {each % size for each in lengths} if balanced else range(size)
            lengths = {part for each in lengths for part in (each // size, -(-each // size))}


def _is_even(sharding: Sharding) -> bool:
    """Tell whether the shards of each axis have one length."""
    return all(points is None or len({b - a for a, b in pairwise(points)}) == 1 for points in sharding.splits)


def _is_balanced(sharding: Sharding) -> bool:
    return all(
        points is None or points == balanced_splits(sharding.shape[axis], sharding.sizes_along(axis))
        for axis, points in enumerate(sharding.splits)
    )


def _held(sharding: Sharding, at: Coordinates) -> Any:
    """Return what decides how many bytes a rank moves: the shape of its shard; where shards end anywhere, its part."""
    return sharding.local_shape(at) if _is_balanced(sharding) else str(sharding.slices(at))
