"""Save and load: one safetensors file, whatever the number of ranks and the placements.

The file has the documented format (https://github.com/huggingface/safetensors): 8 bytes with the length of the header,
the header in JSON, the data. Rank 0 of the mesh writes it as the shards arrive; to load it, each rank reads its own
part. Whatever fails on one rank is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
import errno
import json
import math
import os
from pathlib import Path
import stat
from typing import TYPE_CHECKING, Any, BinaryIO
import zlib

import numpy as np

from pce_mpi.arrays import dtype_named, is_floating, is_half, to_host
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.collectives import all_to_all
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Placement, Replicate
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.distributed.tensor_files import CODES, dtype_name, kind_of_file, opened, safetensors_library, shown
from pce_mpi.leftovers import abandoned, new_file

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["load", "save"]

HostArray = np.ndarray[Any, Any]
Blocks = Sequence[tuple[tuple[slice, ...], HostArray]]  # parts of a global array and their places in it

# How many names a message lists, and the longest text in it that is shown whole.
_NAMES_SHOWN = 20
_TEXT_SHOWN = 100


def save(path: str | os.PathLike[str], arrays: Mapping[str, DistArray]) -> None:
    """Write distributed arrays to one safetensors file, which any number of ranks can load.

    `arrays` by name, all over one mesh, of any placements; what is Partial is reduced first. The global arrays are
    written, as the safetensors library would write them. Whatever else there is to keep, a step number for one, goes in
    as a 0-d array.

    The file comes into being at once: a temporary file beside it is filled, flushed to the disk and then renamed, so
    that an error leaves the old file as it was. A file that is replaced hands on its mode and, where this user may set
    them, its owner and group; a link is followed; anything that is neither a regular file nor a link to one, a device
    for example, is refused. Only rank 0 of the mesh touches the file, and no rank ever holds more than one full array
    besides its own shards.

    A killed job leaves its temporary file, `.NAME.` and 17 characters. The next save of that name by the same user
    removes it: at once on the same machine, elsewhere when it was not changed for a week, as a job on another machine
    may still write to it.

    Collective over the mesh: two Allgathers of 56 bytes, and for each array one Alltoallv in which each shard is sent
    to rank 0 once. Raises on every rank, whichever it happened on, `TypeError` or `ValueError` for bad arguments,
    `CollectiveError` for arrays that differ between ranks, `OSError` where the file cannot be written (no permission,
    disk full; `FileExistsError`: no regular file), `ImportError` without safetensors.

    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pce.save(f"{folder}/step", {"step": pce.distribute(7, mesh)})
    ...     pce.load(f"{folder}/step", mesh)["step"].item()
    7
    """
    mesh = _mesh_of(arrays)
    comm, over = mesh.comm(*mesh.dims), text_of_dims(mesh.dims)
    described: dict[str, str] = {}
    writer: _Writer | None = None
    with local_checks() as checks:
        safetensors_library()
        _check(arrays, mesh)
        described = {name: f"{array.dtype} {array.shape}, {array.sharding}" for name, array in arrays.items()}
        if mesh.rank == 0:
            writer = _Writer(Path(path), arrays)
    try:
        _agree_on(comm, "save", {"path": str(path)}, described, _named(checks.error, path), over)
        for name, array in arrays.items():
            blocks = _gathered(array)
            with checks:
                # After an error of rank 0 the others go on sending, and hear of it at the end.
                if writer is not None and checks.error is None:
                    writer.write_all(name, blocks)
            del blocks  # before the next array is gathered
        with checks:
            if writer is not None and checks.error is None:
                writer.finish()
        agree(comm, "save", {}, error=_named(checks.error, path), over=over)
    finally:
        if writer is not None:
            writer.discard()


def load(
    path: str | os.PathLike[str],
    mesh: Mesh,
    placements: Mapping[str, Mapping[str, Placement]] | None = None,
    requires_grad: bool = False,
) -> dict[str, DistArray]:
    """The arrays of a safetensors file by name, distributed over `mesh`; each rank reads its own part of each.

    `placements` by name and then by dim, `{"w": {"model": Shard(0)}}`: arrays and dims that are not named are
    Replicate, and nothing can be Partial. Shards are balanced, whatever they were when they were saved. The file may
    come from `save` with any number of ranks, or from elsewhere; the arrays are NumPy's. bfloat16 needs `ml_dtypes`.
    With `requires_grad` the floating-point arrays are parameters; the others, such as a step number, have no gradient.

    Collective over `mesh`: one Allgather of 56 bytes, by which time every rank has read what is its own. Raises on
    every rank, whichever it happened on, `OSError` for a file that cannot be read, `ValueError` for one that is no
    safetensors file, has a dtype that there is none for, or lacks a name that `placements` has, and for placements that
    do not fit; `CollectiveError` where ranks find different arrays or want different placements; `ImportError` without
    safetensors.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")
    comm, over = mesh.comm(*mesh.dims), text_of_dims(mesh.dims)
    arrays: dict[str, DistArray] = {}
    described: dict[str, str] = {}
    with local_checks() as checks:
        with opened(Path(path)) as file:
            for name, sharding, stored in _laid_out(file, path, mesh, placements or {}):
                local = _part_of(name, stored, sharding.slices(mesh.coordinates))
                arrays[name] = DistArray(
                    local, mesh, sharding, requires_grad=requires_grad and is_floating(local.dtype)
                )
                described[name] = f"{local.dtype} {sharding.shape}, {sharding}"
    _agree_on(comm, "load", {"requires_grad": bool(requires_grad)}, described, checks.error, over)
    return arrays


def _agree_on(
    comm: MPI.Intracomm,
    operation: str,
    called: Mapping[str, Any],
    described: Mapping[str, str],
    error: Exception | None,
    over: str,
) -> None:
    """Agree on the call and on the arrays; of arrays that differ, the message shows only those."""
    checksum = zlib.crc32(repr(list(described.items())).encode())
    checksums = agree(comm, operation, called, error=error, facts=(checksum,), over=over)[:, 0].tolist()
    if checksums != checksums[:1] * len(checksums):
        by_name = {_brief(name): text for name, text in described.items()}
        agree(comm, operation, {**by_name, "names, in order": _brief(repr(tuple(described)))}, over=over)  # raises


def _brief(text: str) -> str:
    """`text`, or where that is long its beginning and a checksum, so that different texts stay different."""
    if len(text) <= _TEXT_SHOWN:
        return text
    return f"{text[:_TEXT_SHOWN]}... (checksum {zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x})"


# --------------------------------------------------------------------------------------------------------------- save


def _mesh_of(arrays: Any) -> Mesh:
    """The mesh of the first array; without one there is nobody to tell of an error."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays must be a dict of distributed arrays by name, got {type(arrays).__name__}")
    mesh = next((array.mesh for array in arrays.values() if isinstance(array, DistArray)), None)
    if mesh is None:
        raise ValueError("arrays has no distributed array: there is nothing to save")
    return mesh


def _check(arrays: Mapping[Any, Any], mesh: Mesh) -> None:
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of an array must be a str, got {shown(name)}")
        if name == "__metadata__":
            raise ValueError("the format keeps the name '__metadata__' for itself")
        if not isinstance(array, DistArray):
            raise TypeError(f"arrays[{shown(name)}] must be a distributed array, got {type(array).__name__}")
        if array.mesh is not mesh:
            raise ValueError(f"arrays[{shown(name)}] lies over another mesh than the first array")
        if array.dtype.name not in CODES or not array.dtype.isnative:
            raise TypeError(f"arrays[{shown(name)}] is {array.dtype}, which the format has no name for")


def _gathered(array: DistArray) -> Blocks:
    """Bring all blocks of the global array to rank 0; return them there with their places, elsewhere nothing."""
    mesh, reason = array.mesh, "rank 0 writes the file"
    array = redistribute(array, array.sharding.natural, operation="save", reason=reason)
    sharding = array.sharding
    local = to_host(array.local)
    if is_half(local.dtype):  # MPI does not know these, but it need not know what it carries
        local = local.view(np.uint16)
    everyone = list(sharding.members(tuple(mesh.dims), mesh.coordinates))
    # Of equal replicas the first is sent.
    shapes = [
        sharding.local_shape(where) if mesh.rank == 0 and _is_first(sharding, where) else (0,) for where in everyone
    ]
    blocks = [local.reshape(-1)[:0]] * mesh.size
    if _is_first(sharding, mesh.coordinates):
        blocks[0] = local
    comm, over = mesh.comm(*mesh.dims), text_of_dims(mesh.dims)
    with cause("save", over, reason):
        received = all_to_all(blocks, comm, shapes)
    if mesh.rank > 0:
        return []
    return [
        (sharding.slices(where), block.view(array.dtype))
        for where, block in zip(everyone, received, strict=True)
        if _is_first(sharding, where)
    ]


def _named(error: Exception | None, path: Any) -> Exception | None:
    """Name the path that the caller knows in an `OSError`."""
    if not isinstance(error, OSError) or error.errno is None:
        return error
    where = f"{str(path)!r}, a link to {os.path.realpath(path)!r}" if os.path.islink(path) else repr(str(path))
    return OSError(error.errno, f"cannot save to {where}: {error.strerror}")  # of the class that belongs to errno


def _is_first(sharding: Sharding, where: Mapping[str, int]) -> bool:
    """Whether the rank at `where` is the first of those that hold equal replicas."""
    return not any(where[dim] for dim, placement in sharding.by_dim.items() if placement == Replicate())


class _Writer:
    """The file while it is being written, on rank 0: of its full length from the start, beside where it is to be."""

    def __init__(self, path: Path, arrays: Mapping[str, DistArray]) -> None:
        self._replaced = _replaceable(path)
        header, offsets, size = _header(arrays)
        self._path = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
        folder, stem = self._path.parent, _stem(self._path.name)
        for leftover in abandoned(folder, stem):  # first, as the room that they take may be needed
            with suppress(OSError):
                leftover.unlink()
        # Nobody may read on the way what nobody may read in the end.
        self._temporary, descriptor = new_file(folder, stem, 0o666 if self._replaced is None else 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        try:
            _reserve(self._file, size)
            self._file.write(header)
            self._file.flush()
            self._bytes = np.memmap(self._file, np.uint8, "r+")
            self._data = {}
            for name, array in arrays.items():
                length = array.size * array.dtype.itemsize
                flat = self._bytes[offsets[name] : offsets[name] + length].view(_stored_dtype(array.dtype))
                self._data[name] = flat.reshape(array.shape)
        except BaseException:
            self.discard()
            raise

    def write_all(self, name: str, blocks: Blocks) -> None:
        for where, block in blocks:
            self.write(name, where, block)

    def write(self, name: str, where: tuple[slice, ...], block: HostArray) -> None:
        """Put `block` of the array `name` where it belongs."""
        self._data[name][where] = block

    def finish(self) -> None:
        """Make the file what is at the path, also after a power failure."""
        self._bytes.flush()
        if self._replaced is not None:
            _take_over(self._file.fileno(), self._replaced)
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._path)
        _flush_folder(self._path.parent)

    def discard(self) -> None:
        """Remove the temporary file, if it still is there."""
        self._temporary.unlink(missing_ok=True)
        self._file.close()


def _replaceable(path: Path) -> os.stat_result | None:
    """The regular file at `path`, if there is anything; `FileExistsError` for all else that a rename would destroy."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if kind := kind_of_file(status.st_mode):
        raise FileExistsError(errno.EEXIST, f"it is {kind}, and only a regular file is replaced")
    return status


def _stem(name: str) -> str:
    """The beginning of the temporary file's name, which may have 255 bytes, 17 of them its own."""
    return f".{os.fsdecode(os.fsencode(name)[:200])}."


def _take_over(descriptor: int, replaced: os.stat_result) -> None:
    """Give a file the mode of the one that it replaces and, as far as this user may, its owner and group."""
    for owner in (replaced.st_uid, -1), (-1, replaced.st_gid):
        with suppress(OSError):
            os.fchown(descriptor, *owner)
    mode = stat.S_IMODE(replaced.st_mode)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:  # some file systems have one mode for all, and refuse
        os.fchmod(descriptor, mode)


def _flush_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk, where its file system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # one may write to it and not read it
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _reserve(file: BinaryIO, size: int) -> None:
    """Room for `size` bytes, or an `OSError`: writing to a mapped file on a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, 2**20):
        file.write(bytes(min(2**20, size - start)))
    file.flush()
    file.seek(0)


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The file is little-endian."""
    return dtype if dtype.name == "bfloat16" else dtype.newbyteorder("<")


def _header(arrays: Mapping[str, DistArray]) -> tuple[bytes, dict[str, int], int]:
    """The file up to its data, where in the file each array begins, and the length of the file."""
    # As the library does it: wide dtypes first, so that every element lies at a multiple of its size.
    ranked = list(CODES)
    order = sorted(arrays, key=lambda name: (-ranked.index(arrays[name].dtype.name), name))
    entries, starts, end = {}, {}, 0
    for name in order:
        array = arrays[name]
        starts[name], end = end, end + math.prod(array.shape) * array.dtype.itemsize
        entries[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end


# --------------------------------------------------------------------------------------------------------------- load


def _laid_out(
    file: Any, path: Any, mesh: Mesh, placements: Mapping[str, Mapping[str, Placement]]
) -> Iterator[tuple[str, Sharding, Any]]:
    """Name, sharding and what can be read of each array of `file`."""
    names = list(file.keys())
    missing = [name for name in placements if name not in names]
    if missing:
        raise ValueError(
            f"placements name {_listed(missing)}, which {str(path)!r} has not; it has {_listed(names) or 'nothing'}"
        )
    for name in names:
        stored = file.get_slice(name)
        wanted = placements.get(name, {})
        if not isinstance(wanted, Mapping):
            raise TypeError(f"placements[{shown(name)}] must be a dict of placements by dim, got {wanted!r}")
        try:
            sharding = Sharding.of(mesh.dim_sizes, tuple(stored.get_shape()), wanted)
        except (TypeError, ValueError) as error:
            raise type(error)(f"placements[{shown(name)}]: {error}") from error
        if sharding.partial_dims:
            raise ValueError(f"placements[{shown(name)}]: what is loaded cannot be Partial, got {dict(wanted)}")
        yield name, sharding, stored


def _listed(names: list[str]) -> str:
    """Names to be read by a person, who needs no more than some."""
    some = ", ".join(map(shown, names[:_NAMES_SHOWN]))
    return some + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _part_of(name: str, stored: Any, part: tuple[slice, ...]) -> HostArray:
    kind = dtype_name(name, stored)
    try:
        dtype = dtype_named(kind)
    except TypeError:
        raise ImportError(f"{kind} needs ml_dtypes: pip install 'pce_mpi[bf16]'") from None
    shape = tuple(each.stop - each.start for each in part)
    # safetensors has no empty slices at the end of an axis.
    return stored[part] if math.prod(shape) else np.empty(shape, dtype)
