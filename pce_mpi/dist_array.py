"""A distributed array: what this rank holds, the mesh, and how the whole lies over it.

Every function here is the identity on the global array: it changes where numbers are, never what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
import hashlib
import json
import math
import operator
from typing import TYPE_CHECKING, Any, NoReturn
import zlib

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, dtype_named, is_floating, is_real, library_named, to_host
from pce_mpi.channel import by_value
from pce_mpi.collectives import all_gather_text, all_to_all
from pce_mpi.mesh import Mesh, over_text
from pce_mpi.placements import Partial, Placement, Replicate
from pce_mpi.sharding import Sharding
from pce_mpi.transitions import steps
from pce_mpi.transport import carry_out

__all__ = ["DistArray", "check_replicas", "distribute", "from_local", "redistribute"]

Array = Any  # numpy.ndarray or cupy.ndarray


class DistArray:
    """A global array that the ranks of a mesh hold together; `distribute` and `from_local` make one.

    local          this rank's part, a NumPy or CuPy array; a term of the whole where a placement is Partial
    mesh           the ranks
    sharding       the global shape, the placement of each dim, and the split points
    requires_grad  whether `backward` is to find the gradient of this array or of what it was computed from
    grad           that gradient, a `DistArray`, for arrays that were made with `requires_grad=True`; else None

    Operators and functions work on the global array and never change one in place; == compares elements. Every rank of
    the mesh calls them, as it does `full`, `item` and `float`. `copy.deepcopy` makes another array on the same mesh, in
    memory of its own and with a copy of `grad`; it refuses what is on the tape.
    """

    __slots__ = ("__weakref__", "grad", "local", "mesh", "moved", "node", "requires_grad", "sharding")

    def __init__(
        self, local: Array, mesh: Mesh, sharding: Sharding, *, requires_grad: bool = False, computed: bool = False
    ) -> None:
        self.local = local
        self.mesh = mesh
        self.sharding = sharding
        self.requires_grad = requires_grad
        self.grad: DistArray | None = None
        self.node: Any = None  # of the tape, for what was computed while it was recording
        # Copies of a computed array in other shardings, which operations needed and which took communication. A made
        # array, and a view of one, may be written to (by a step of SGD for one), so no copy of it is kept. All ranks
        # must decide alike: by the operations that led here, never by the memory of the local array.
        self.moved: dict[Sharding, DistArray] | None = {} if computed else None

    @property
    def computed(self) -> bool:
        """Whether the local arrays are written to no more."""
        return self.moved is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.sharding.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.sharding.shape)

    @property
    def size(self) -> int:
        """The number of elements of the global array."""
        return math.prod(self.sharding.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.local.dtype

    @property
    def placements(self) -> dict[str, Placement]:
        """The placement of each dim of the mesh."""
        return dict(self.sharding.by_dim)

    @property
    def is_leaf(self) -> bool:
        """Whether this array was made rather than computed: what `backward` leaves gradients on."""
        return self.node is None

    def detach(self) -> DistArray:
        """The same array, holding the same memory, that the tape knows nothing of."""
        return DistArray(self.local, self.mesh, self.sharding)

    def full(self) -> Array:
        """The global array, on every rank, in memory of its own. Communicates unless every placement is Replicate."""
        whole = redistribute(self, self.sharding.replicated, operation="full", reason="the global array is asked for")
        return whole.local.copy()

    def item(self) -> Any:
        """The only element of the global array, as a Python number. Communicates as `full` does."""
        if self.size != 1:
            raise ValueError(f"only an array of one element is a number, and this one has shape {self.shape}")
        return self.full().item()

    def __float__(self) -> float:
        return float(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[DistArray]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return (self[index] for index in range(self.shape[0]))

    def __bool__(self) -> bool:
        raise TypeError("a distributed array is not true or false; compare what .full() or .item() gives")

    # Data frames leave an operator to the operand that has more of this: frame + x is x + frame.
    __pandas_priority__ = 5000

    def __array__(self, *_: Any, **__: Any) -> Any:
        # Sparse matrices, and the products of data frames, ask for it before this class has its say.
        raise TypeError(
            "a distributed array becomes a NumPy array by .full(), which communicates, or .local. If the other operand "
            "belongs to another library, as in csr @ w or frame @ w, convert one of the two: "
            "distribute(csr.toarray(), mesh) @ w or csr @ w.full(), distribute(frame, mesh) @ w or frame @ w.full()"
        )

    def __copy__(self) -> DistArray:
        copied = DistArray(self.local, self.mesh, self.sharding, requires_grad=self.requires_grad)
        copied.grad, copied.node, copied.moved = self.grad, self.node, self.moved
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> DistArray:
        if not self.is_leaf:
            raise RuntimeError(
                "only arrays that were made, or computed under no_grad, are deeply copied: the tape would not know "
                "where the gradient of a copy belongs; copy x.detach()"
            )
        local = _owned(self.local, self.local)
        copied = DistArray(local, self.mesh, self.sharding, requires_grad=self.requires_grad)
        copied.grad = deepcopy(self.grad, memo)
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a distributed array is not pickled, as each rank has only a part of it: write it to a file by "
            "pce_mpi.save, or pickle what .full() or .local gives"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"DistArray(shape={self.shape}, dtype={self.dtype}, {self.sharding}{grad})"

    if TYPE_CHECKING:  # `ops` gives these

        def backward(self) -> None: ...
        def redistribute(self, **placements: Placement) -> DistArray: ...
        def astype(self, dtype: Any) -> DistArray: ...
        def sum(self, axis: Any = None, keepdims: bool = False) -> DistArray: ...
        def mean(self, axis: Any = None, keepdims: bool = False) -> DistArray: ...
        def max(self, axis: Any = None, keepdims: bool = False) -> DistArray: ...
        def min(self, axis: Any = None, keepdims: bool = False) -> DistArray: ...
        def reshape(self, *shape: Any) -> DistArray: ...
        def transpose(self, *axes: Any) -> DistArray: ...
        def swapaxes(self, axis1: int, axis2: int) -> DistArray: ...
        def __getitem__(self, index: Any) -> DistArray: ...
        def __neg__(self) -> DistArray: ...
        def __add__(self, other: Any) -> DistArray: ...
        def __radd__(self, other: Any) -> DistArray: ...
        def __sub__(self, other: Any) -> DistArray: ...
        def __rsub__(self, other: Any) -> DistArray: ...
        def __mul__(self, other: Any) -> DistArray: ...
        def __rmul__(self, other: Any) -> DistArray: ...
        def __truediv__(self, other: Any) -> DistArray: ...
        def __rtruediv__(self, other: Any) -> DistArray: ...
        def __pow__(self, other: Any) -> DistArray: ...
        def __rpow__(self, other: Any) -> DistArray: ...
        def __lt__(self, other: Any) -> DistArray: ...
        def __le__(self, other: Any) -> DistArray: ...
        def __gt__(self, other: Any) -> DistArray: ...
        def __ge__(self, other: Any) -> DistArray: ...
        def __matmul__(self, other: Any) -> DistArray: ...
        def __rmatmul__(self, other: Any) -> DistArray: ...
        @property
        def T(self) -> DistArray: ...


def distribute(
    array: Any,
    mesh: Mesh,
    /,
    *,
    requires_grad: bool = False,
    src_rank: int | None = None,
    **placements: Placement,
) -> DistArray:
    """A distributed array made of the global `array`, which every rank passes.

    `placements` are given by dim, `data=Shard(0)`; dims that are not named are Replicate. `array`: anything that
    NumPy takes as an array, or a CuPy array; of bool, integers or real numbers. Memory is never shared with it.

    Communicates nothing, and so raises where it fails; that the arrays are equal is not checked (`check_replicas`).
    With `src_rank`, the rank of the mesh that has the array, only that rank's counts and others may pass None:
    one Allgather of its shape and one Alltoallv of the parts, and errors are raised on every rank.

    Raises `TypeError` for what is no array, `ValueError` for dims, axes or ranks that do not exist.
    """
    if src_rank is not None:
        return _sent_from(array, mesh, src_rank, requires_grad, placements)
    taken = _numbers(as_array(array, "array"), placements, requires_grad)
    target = Sharding.of(mesh.layout, taken.shape, placements)
    said = f"distribute an array of shape {taken.shape} as {taken.dtype.name}, {target}"
    mesh.note(zlib.crc32(said.encode()), said, said)
    local = taken
    for step in steps(target.replicated, target):
        local = carry_out(step, local, mesh, "distribute", "")
    return DistArray(_owned(local, taken), mesh, target, requires_grad=requires_grad)


def _owned(local: Array, foreign: Array) -> Array:
    """`local` in memory of its own, in C order."""
    return array_namespace(foreign).array(local, order="C")


def _sent_from(
    array: Any, mesh: Mesh, src_rank: int, requires_grad: bool, placements: Mapping[str, Placement]
) -> DistArray:
    comm, over = mesh.comm(*mesh.dims), over_text(mesh.dims)
    error: Exception | None = None
    said = ""
    taken: Array = None
    try:
        src_rank = operator.index(src_rank)
        if not 0 <= src_rank < mesh.size:
            raise ValueError(f"src_rank = {src_rank} is outside [0, {mesh.size})")
        if mesh.rank == src_rank:
            taken = _numbers(as_array(array, "array"), placements, requires_grad)
            Sharding.of(mesh.layout, taken.shape, placements)
            said = json.dumps([taken.shape, taken.dtype.name, array_namespace(taken).__name__])
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    called = {"src_rank": src_rank, "placements": repr(placements), "requires_grad": requires_grad}
    mesh.agree(mesh.dims, "distribute", called, error)
    texts = all_gather_text(said, comm, operation="distribute", over=over)
    shape, dtype, library = json.loads(texts[src_rank])
    target = Sharding.of(mesh.layout, tuple(shape), placements)
    whole = target.replicated
    here = library_named(library).empty(0, dtype_named(dtype)) if taken is None else taken
    # Of what is Partial the terms are made where they belong, from shards that are sent.
    sharded = target.natural
    blocks, sizes = [here.reshape(-1)[:0]] * mesh.size, [(0,)] * mesh.size
    if taken is not None:
        members = whole.members(tuple(mesh.dims), mesh.coordinates)
        blocks = [taken[sharded.slices(member)] for member in members]
    shapes: list[tuple[int, ...]] = list(sizes)
    shapes[src_rank] = sharded.local_shape(mesh.coordinates)
    reason = f"rank {src_rank} has the array"
    received = all_to_all(blocks, comm, shapes, operation="distribute", over=over, reason=reason)
    local = received[src_rank]
    for step in steps(sharded, target):
        local = carry_out(step, local, mesh, "distribute", "")
    return DistArray(_owned(local, here), mesh, target, requires_grad=requires_grad)


def from_local(
    local: Any,
    mesh: Mesh,
    /,
    *,
    shape: Sequence[int] | None = None,
    requires_grad: bool = False,
    **placements: Placement,
) -> DistArray:
    """A distributed array made of what each rank has: `local` is this rank's shard, replica or term.

    Shards may be uneven and empty; the split points are taken from them. `shape` is the global shape, if there is one
    to be held to. `local` itself is kept, and copied only if it `requires_grad`, as a step of SGD writes to it.

    Collective over the mesh: an Allgather of 56 bytes, and one of the local shapes. Raises on every rank `ValueError`
    for shards that do not fit each other or the `shape`, `CollectiveError` where ranks say different things. That
    replicas are equal is not checked (`check_replicas`).
    """
    comm, over = mesh.comm(*mesh.dims), over_text(mesh.dims)
    error: Exception | None = None
    taken: Array = None
    called: dict[str, Any] = {}
    try:
        taken = _numbers(as_array(local, "local"), placements, requires_grad)
        Sharding.of(mesh.layout, taken.shape, placements)  # for its errors
        called = {
            "dimensions": taken.ndim,
            "dtype": taken.dtype.name,
            "placements": repr(placements),
            "shape": None if shape is None else tuple(operator.index(length) for length in shape),
            "requires_grad": requires_grad,
        }
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    mesh.agree(mesh.dims, "from_local", called, error)
    texts = all_gather_text(json.dumps(taken.shape), comm, operation="from_local", over=over)
    target = _joined([tuple(json.loads(text)) for text in texts], mesh, placements, called["shape"])
    return DistArray(_owned(taken, taken) if requires_grad else taken, mesh, target, requires_grad=requires_grad)


def _joined(
    shapes: list[tuple[int, ...]], mesh: Mesh, placements: Mapping[str, Placement], given: tuple[int, ...] | None
) -> Sharding:
    """The sharding in which rank r holds an array of `shapes[r]`; every rank finds the same, or the same error."""
    # Any lengths do to find out which dims shard which axis.
    pattern = Sharding.of(mesh.layout, shapes[0], placements)
    coordinates = list(pattern.members(tuple(mesh.dims), mesh.coordinates))
    lengths, splits = [], {}
    for axis in range(len(shapes[0])):
        dims = pattern.dims_of(axis)
        blocks: dict[tuple[int, ...], dict[int, str]] = {}
        for rank, where in enumerate(coordinates):
            blocks.setdefault(tuple(where[dim] for dim in dims), {})[rank] = str(shapes[rank][axis])
        for block in blocks.values():
            if len(set(block.values())) > 1:
                raise ValueError(
                    f"axis {axis} must have one length on ranks that hold the same part of it: {by_value(block)}"
                )
        ends = [0]
        for index in sorted(blocks):
            ends.append(ends[-1] + int(next(iter(blocks[index].values()))))
        lengths.append(ends[-1])
        if dims:
            splits[axis] = tuple(ends)
    if given is not None and given != tuple(lengths):
        raise ValueError(f"shape = {given}, but the local arrays make up {tuple(lengths)}")
    return Sharding.of(mesh.layout, tuple(lengths), placements, splits)


def _numbers(array: Array, placements: Mapping[str, Placement], requires_grad: bool) -> Array:
    """`array`, if its dtype is one that these placements have a meaning for."""
    dtype = array.dtype
    if not is_real(dtype):
        raise TypeError(f"a distributed array holds bool, integers or real numbers, got {dtype}")
    if requires_grad and not is_floating(dtype):
        raise TypeError(f"only real numbers have a gradient, got {dtype}")
    for placement in placements.values():
        sums = isinstance(placement, Partial) and placement.operator in ("sum", "avg")
        if sums and (dtype.kind == "b" or (placement == Partial("avg") and not is_floating(dtype))):
            raise TypeError(f"{placement} of {dtype} has no meaning")
    return array


def redistribute(x: DistArray, target: Sharding, *, operation: str, reason: str) -> DistArray:
    """The same global array, lying as `target` says; `x` itself, if it already does. The tape does not hear of it.

    Collective over the dims of each step that sends (see `transitions`), which an Allgather of 56 bytes precedes.
    Raises `CollectiveError`, on the ranks that a step brings together, where they do not ask for the same; `TypeError`
    for a Partial that the dtype has no meaning for.
    """
    local = _numbers(x.local, target.by_dim, requires_grad=False) if target.partial_dims else x.local
    taken = steps(x.sharding, target)
    for step in taken:
        local = carry_out(step, local, x.mesh, operation, reason)
    computed = x.computed or any(step.copies for step in taken)
    return DistArray(local, x.mesh, target, computed=computed) if taken else x


def check_replicas(x: DistArray) -> None:
    """Raise `ValueError`, on every rank, if ranks that should hold the same bits of `x` do not.

    Those are the ranks along the dims where `x` is Replicate. The text names them, by their ranks in the mesh.
    Collective over the mesh: an Allgather of 56 bytes, and one of a checksum of 32 bytes.
    """
    mesh, over = x.mesh, over_text(x.mesh.dims)
    comm = mesh.comm(*mesh.dims)
    mesh.agree(mesh.dims, "check_replicas", {"sharding": str(x.sharding), "shape": x.shape, "dtype": x.dtype.name})
    host = np.ascontiguousarray(to_host(x.local))
    digest = hashlib.blake2b(host.view(np.uint8).data if host.size else b"", digest_size=16).hexdigest()
    digests = all_gather_text(digest, comm, operation="check_replicas", over=over)
    groups: dict[tuple[int, ...], dict[int, str]] = {}
    for rank, where in enumerate(x.sharding.members(tuple(mesh.dims), mesh.coordinates)):
        key = tuple(where[dim] for dim, placed in x.sharding.by_dim.items() if placed != Replicate())
        groups.setdefault(key, {})[rank] = f"checksum {digests[rank][:8]}"
    differing = [by_value(group) for group in groups.values() if len(set(group.values())) > 1]
    if differing:
        raise ValueError(f"replicas differ: {'; '.join(differing)}")
