"""Save and load distributed arrays in one safetensors file, for any number of ranks and any placements.

Rank 0 of the mesh writes the file as the shards arrive. To load it, each rank reads its own part. An error of one rank
is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
import errno
import os
from pathlib import Path
import stat
from typing import TYPE_CHECKING, Any, BinaryIO
import zlib

import numpy as np

from pce_mpi.arrays import HostArray, is_floating, is_half, to_host
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.collectives import all_to_all
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placements, Replicate
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.distributed.tensor_files import (
    CODES,
    LONGEST_HEADER,
    TensorFile,
    header_of,
    kind_of_file,
    length_of_block,
    stored_dtype,
)
from pce_mpi.temporary_files import abandoned, new_file
from pce_mpi.text import names_shown, shown

Blocks = Sequence[tuple[tuple[slice, ...], HostArray]]  # parts of a global array and their places in it


class TensorWriter:
    """A temporary file, of its full length from the start, beside the file that it replaces at the end."""

    def __init__(self, path: Path, arrays: Mapping[str, DistArray]) -> None:
        self._replaced = _replaceable(path)
        self._entries, size = _entries(arrays)
        self._block = length_of_block(size)
        self._start = len(header_of(self._entries, self._block, [0] * -(-size // self._block)))
        if self._start > LONGEST_HEADER:
            raise ValueError(f"the header has {self._start} bytes, more than {LONGEST_HEADER}: use shorter names")
        self._path = Path(os.path.realpath(path))  # a link stays, and the file that it leads to is replaced
        # The temporary file's name has 17 more characters, and at most 255 bytes.
        folder, stem = self._path.parent, f".{os.fsdecode(os.fsencode(self._path.name)[:200])}."
        for leftover in abandoned(folder, stem):  # first, as the new file may need the space of these
            with suppress(OSError):
                leftover.unlink()
        # Only users who may read the final file may read the temporary one.
        self._temporary, descriptor = new_file(folder, stem, 0o666 if self._replaced is None else 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        try:
            _reserve(self._file, self._start + size)
            self._bytes = np.memmap(self._file, np.uint8, "r+")
            self._data = {}
            for name, array in arrays.items():
                start, stop = (self._start + offset for offset in self._entries[name]["data_offsets"])
                self._data[name] = self._bytes[start:stop].view(stored_dtype(array.dtype)).reshape(array.shape)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, blocks: Blocks) -> None:
        """Write blocks of the array `name` to their places."""
        for where, block in blocks:
            self._data[name][where] = block

    def finish(self) -> None:
        """Add the checksums and put the file in its place, so that it is there after a power failure too."""
        starts = range(self._start, len(self._bytes), self._block)
        checksums = [zlib.crc32(self._bytes[start : start + self._block].data) for start in starts]
        header = header_of(self._entries, self._block, checksums)
        self._bytes[: self._start] = np.frombuffer(header, np.uint8)
        self._bytes.flush()
        if self._replaced is not None:
            _take_over(self._file.fileno(), self._replaced)
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._path)
        _flush_folder(self._path.parent)

    def discard(self) -> None:
        """Remove the temporary file if it is still there."""
        self._temporary.unlink(missing_ok=True)
        self._file.close()


def _replaceable(path: Path) -> os.stat_result | None:
    """Return the status of the regular file at `path`, if any; refuse any other file that a rename would destroy."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if kind := kind_of_file(status.st_mode):
        raise FileExistsError(errno.EEXIST, f"it is {kind}, and only a regular file is replaced")
    return status


def _take_over(descriptor: int, replaced: os.stat_result) -> None:
    """Give a file the mode of the one that it replaces and, if this user may, its owner and group."""
    for owner in (replaced.st_uid, -1), (-1, replaced.st_gid):
        with suppress(OSError):
            os.fchown(descriptor, *owner)
    mode = stat.S_IMODE(replaced.st_mode)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:  # file systems with one mode for all files refuse
        os.fchmod(descriptor, mode)


def _flush_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, if its file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder may be writable but not readable
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _reserve(file: BinaryIO, size: int) -> None:
    """Reserve `size` bytes or raise `OSError`: a write to a mapped file on a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, 2**20):
        file.write(bytes(min(2**20, size - start)))
    file.flush()
    file.seek(0)


def _entries(arrays: Mapping[str, DistArray]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entry of each array in the header, and the length of the data."""
    # In the library's order: dtypes with large elements first, so that every element is at a multiple of its size.
    ranked = list(CODES)
    order = sorted(arrays, key=lambda name: (-ranked.index(arrays[name].dtype.name), name))
    entries, end = {}, 0
    for name in order:
        array = arrays[name]
        start, end = end, end + array.size * array.dtype.itemsize
        entries[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    return entries, end


if TYPE_CHECKING:
    from mpi4py import MPI

# The longest text that a message shows whole.
_TEXT_SHOWN = 100


def save(path: str | os.PathLike[str], arrays: Mapping[str, DistArray]) -> None:
    """Write distributed arrays to one safetensors file, which any number of ranks can load.

    Parameters
    ----------
    path : str or path
        The file. A link is followed; anything but a regular file, such as a folder or a device, is refused, and so is
        a path that ends in a slash.
    arrays : mapping of str to DistArray
        Arrays by name, all over one mesh, of any placements; a Partial array is reduced first. The file has the global
        arrays, as the safetensors library would write them, and their checksums. A number, such as a step, goes in as a
        0-d array.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    CollectiveError
        If the arrays differ between ranks.
    OSError
        If the file cannot be written: no permission, disk full; `FileExistsError` if it is no regular file.

    Notes
    -----
    Collective over the mesh: two Allgathers of 56 bytes, and for each array one Alltoallv in which each shard is sent
    to rank 0 once. Every rank raises the same error. Only rank 0 touches the file, and no rank ever holds more than one
    full array besides its own shards.

    The file is replaced as a whole: a temporary file beside it is filled, flushed to the disk and then renamed, so that
    an error leaves the old file as it was. The new file takes the mode of the old one and, if this user may set them,
    its owner and group.

    The metadata of the file have a CRC-32 of its header and of each 64 KiB of its data (of more in a file of over
    4 GiB), which `load` compares. Equal arrays make equal files, byte for byte.

    A killed job leaves its temporary file, `.NAME.` and 17 characters. The next save of that name by the same user
    removes it: at once on the same machine; on another machine only after a week without a change, as a job may still
    write to it.

    Examples
    --------
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
    _check_ranks(mesh)
    comm, over = mesh.along(mesh.dims)
    described: dict[str, str] = {}
    writer: TensorWriter | None = None
    with local_checks() as checks:
        where = _checked_path(path)
        _refuse_folder(path)
        _check(arrays, mesh)
        described = {name: f"{array.dtype} {array.shape}, {array.sharding}" for name, array in arrays.items()}
        if mesh.rank == 0:
            writer = TensorWriter(where, arrays)
    try:
        _agree_on(comm, "save", {"path": str(path)}, described, _named(checks.error, path), over)
        for name, array in arrays.items():
            blocks = _gathered(array)
            with checks:
                # After an error of rank 0 the other ranks go on sending; the last agreement tells them.
                if writer is not None and checks.error is None:
                    writer.write(name, blocks)
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
    placements: Mapping[str, Placements | DistArray] | None = None,
    requires_grad: bool = False,
) -> dict[str, DistArray]:
    """Read the arrays of a safetensors file as distributed arrays.

    Parameters
    ----------
    path : str or path
        The file, from `save` with any number of ranks, or from elsewhere.
    mesh : Mesh
        The ranks.
    placements : mapping of str to mapping of str to placement, or to DistArray, optional
        The arrays to load, by name, with their placements: `{"w": {"model": Shard(0)}, "b": {}}`. Dims that are not
        named are Replicate, and so are Partial ones, as `save` reduces them. Shards are balanced, however they were
        saved. A distributed array instead of a mapping means its placements and split points; its shape must be that in
        the file. So the parameters of a model, such as `{"w": w}`, or the `state` of an optimizer can be passed as they
        are. Without `placements` all arrays are loaded, Replicate.
    requires_grad : bool, optional
        `backward` finds the gradients of the floating-point arrays. The others, such as a step number, have none.

    Returns
    -------
    dict of str to DistArray
        NumPy's arrays, by name, in the order of the file. bfloat16 needs `ml_dtypes`, and so do F8_E4M3, F8_E5M2 and
        F8_E8M0: arrays of these are saved, redistributed, and converted by `astype`, and nothing is computed in them.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file is no safetensors file, has changed since it was saved, or lacks a name of `placements`; if an array
        that is loaded has another dtype, such as C64; or if a placement does not fit.
    CollectiveError
        If ranks find different files, or want different placements.

    Notes
    -----
    Collective over `mesh`: one Allgather of 56 bytes, after each rank has read its own part of each array. Every rank
    raises the same error.

    Each rank reads the blocks of 64 KiB that have elements of its shards, and compares their checksums; the ranks
    together read every block of the loaded arrays. A rank opens the file once, and the ranks agree on the checksum of
    its header, which has those of the data. So a changed bit is an error, and so are files of two saves on two ranks. A
    file from elsewhere has no checksums: the ranks agree only on its header.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pce.save(f"{folder}/w", {"w": pce.distribute(np.ones((4, 2)), mesh)})
    ...     pce.load(f"{folder}/w", mesh, {"w": {"data": pce.Shard(0)}})["w"].placements
    {'data': Shard(0)}
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")
    _check_ranks(mesh)
    comm, over = mesh.along(mesh.dims)
    arrays: dict[str, DistArray] = {}
    called: dict[str, Any] = {"requires_grad": bool(requires_grad)}
    described: dict[str, str] = {}
    with local_checks() as checks:
        with TensorFile(_checked_path(path)) as file:
            called["file, which may have been saved anew meanwhile"] = f"checksum {file.checksum:08x}"
            for name, sharding in _laid_out(file, path, mesh, placements):
                local = file.read(name, sharding.slices(mesh.coordinates))
                arrays[name] = DistArray(
                    local, mesh, sharding, requires_grad=requires_grad and is_floating(local.dtype)
                )
                described[name] = f"{local.dtype} {sharding.shape}, {sharding}"
    _agree_on(comm, "load", called, described, checks.error, over)
    return arrays


def _agree_on(
    comm: MPI.Intracomm,
    operation: str,
    called: Mapping[str, Any],
    described: Mapping[str, str],
    error: Exception | None,
    over: str,
) -> None:
    """Agree on the call and on the arrays; the message shows only the arrays that differ."""
    checksum = zlib.crc32(repr(list(described.items())).encode())
    (checksums,) = agree(comm, operation, called, error=error, facts=(checksum,), over=over)
    if len(set(checksums)) > 1:
        by_name = {_brief(name): text for name, text in described.items()}
        agree(comm, operation, {**by_name, "names, in order": _brief(repr(tuple(described)))}, over=over)  # raises


def _brief(text: str) -> str:
    """Return `text`, or the beginning of a long one and a checksum, so that different texts stay different."""
    if len(text) <= _TEXT_SHOWN:
        return text
    return f"{text[:_TEXT_SHOWN]}... (checksum {zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x})"


def _check_ranks(mesh: Mesh) -> None:
    if mesh.is_hollow:
        raise TypeError("arrays of a mesh without ranks have no elements, so none are saved or loaded in a rehearsal")


def _mesh_of(arrays: Any) -> Mesh:
    """Return the mesh of the first array; without one there are no ranks to tell of an error."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays must be a dict of distributed arrays by name, got {type(arrays).__name__}")
    mesh = next((array.mesh for array in arrays.values() if isinstance(array, DistArray)), None)
    if mesh is None:
        raise ValueError("arrays has no distributed array: there is nothing to save")
    return mesh


def _checked_path(path: Any) -> Path:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"path must be a str or a path, got {shown(path)}")
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ValueError(f"path has a character that no name of a file has: {shown(text)}")
    return Path(text)


def _refuse_folder(path: Any) -> None:
    """Refuse 'name/', which `Path` would take for 'name'."""
    if str(path).endswith(os.sep):
        raise IsADirectoryError(errno.EISDIR, f"a path that ends in {os.sep!r} is that of a folder")


def _check(arrays: Mapping[Any, Any], mesh: Mesh) -> None:
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of an array must be a str, got {shown(name)}")
        if any("\ud800" <= each <= "\udfff" for each in name):
            raise ValueError(f"the name of an array must be Unicode text, got {shown(name)}, which has a surrogate")
        if name == "__metadata__":
            raise ValueError("the format keeps the name '__metadata__' for itself")
        if not isinstance(array, DistArray):
            raise TypeError(f"arrays[{shown(name)}] must be a distributed array, got {type(array).__name__}")
        if array.mesh is not mesh:
            raise ValueError(f"arrays[{shown(name)}] is over another mesh than the first array")
        if array.dtype.name not in CODES or not array.dtype.isnative:
            raise TypeError(f"arrays[{shown(name)}] is {array.dtype}, which the format has no name for")


def _gathered(array: DistArray) -> Blocks:
    """Send all blocks of the global array to rank 0, which returns them with their places; other ranks return none."""
    mesh, reason = array.mesh, "rank 0 writes the file"
    with cause("save", reason=reason):
        array = redistribute(array, array.sharding.natural)
    sharding = array.sharding
    local = to_host(array.local)
    if is_half(local.dtype):  # MPI has no datatype for these, and needs none to send bytes
        local = local.view(np.uint16)
    everyone = list(sharding.members(tuple(mesh.dims), mesh.coordinates))
    # The first of equal replicas is sent.
    shapes = [
        sharding.local_shape(where) if mesh.rank == 0 and _is_first(sharding, where) else (0,) for where in everyone
    ]
    blocks = [local.reshape(-1)[:0]] * mesh.size
    if _is_first(sharding, mesh.coordinates):
        blocks[0] = local
    comm, over = mesh.along(mesh.dims)
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
    """Return `error`; an `OSError` names the path that the caller passed."""
    if not isinstance(error, OSError) or error.errno is None:
        return error
    where = f"{str(path)!r}, a link to {os.path.realpath(path)!r}" if os.path.islink(path) else repr(str(path))
    return OSError(error.errno, f"cannot save to {where}: {error.strerror}")  # errno decides the class


def _is_first(sharding: Sharding, where: Mapping[str, int]) -> bool:
    """Tell whether the rank at `where` is the first of those that hold equal replicas."""
    return not any(where[dim] for dim, placement in sharding.by_dim.items() if placement == Replicate())


def _laid_out(
    file: TensorFile, path: Any, mesh: Mesh, placements: Mapping[str, Placements | DistArray] | None
) -> Iterator[tuple[str, Sharding]]:
    """Yield name and sharding of each array of `file` that is loaded, in the order of the file."""
    if placements is None:
        placements = {name: {} for name in file.arrays}
    if not isinstance(placements, Mapping):
        raise TypeError(f"placements must be a dict of placements by name, got {shown(placements)}")
    missing = [name for name in placements if name not in file.arrays]
    if missing:
        there = names_shown(list(file.arrays)) or "nothing"
        raise ValueError(f"placements name {names_shown(missing)}, which {str(path)!r} has not; it has {there}")
    for name, shape in file.arrays.items():
        if name not in placements:
            continue
        try:
            yield name, _wanted(placements[name], mesh, shape, path)
        except (TypeError, ValueError) as error:
            raise type(error)(f"placements[{shown(name)}]: {error}") from None


def _wanted(placements: Placements | DistArray, mesh: Mesh, shape: tuple[int, ...], path: Any) -> Sharding:
    """Return the sharding of a stored array of `shape` with these placements, or with those of a distributed array."""
    if isinstance(placements, DistArray):
        if placements.mesh is not mesh:
            raise ValueError("the array is over another mesh")
        if placements.shape != shape:
            raise ValueError(f"the array has the shape {placements.shape}, but the one in {str(path)!r} has {shape}")
        sharding = placements.sharding.natural
    elif isinstance(placements, Mapping):
        sharding = Sharding.of(mesh.dim_sizes, shape, placements).natural
    else:
        raise TypeError(f"expected a dict of placements by dim, or a distributed array, got {placements!r}")
    return sharding
