"""One file, whatever the ranks and placements; what fails on one rank fails on all, and leaves the old file alone."""

import errno
import gc
import io
from itertools import product
import json
import os
from pathlib import Path
import pickle
import re
import resource
import socket
import stat
import sys
import tempfile
import time
import tracemalloc

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import pce_mpi as pce
from pce_mpi import CollectiveError, Partial, Replicate, Shard
from pce_mpi.comm.tracing import Purpose
from pce_mpi.distributed import checkpoint, tensor_files
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.sharding import Sharding
from ranks.grids import assembled, local_of, mesh_of, placements_of, spread, squarest
from ranks.problems import is_same

DTYPES = [
    *(np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64),
]
EIGHT_BITS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu]


@pytest.fixture
def folder(comm):
    """One folder for all ranks, which rank 0 makes and removes."""
    made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    yield Path(comm.bcast(made and made.name))
    comm.Barrier()
    if made:
        made.cleanup()


def values(shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).integers(-9, 10, shape).astype(dtype)


def held(whole, mesh, sharding):
    return DistArray(local_of(whole, sharding, mesh.coordinates), mesh, sharding)


def wholes_of(comm, arrays):
    """The global arrays, put together from what all ranks hold."""
    everyone = comm.allgather({name: np.asarray(array.local) for name, array in arrays.items()})
    return {name: assembled(array.sharding, [parts[name] for parts in everyone]) for name, array in arrays.items()}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, whole in expected.items():
        assert got[name].dtype == whole.dtype, name
        np.testing.assert_array_equal(got[name], whole, err_msg=name)


def parted(content):
    """The header of a file as text without its metadata, the metadata, the data."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].decode().strip()
    metadata = header[len('{"__metadata__":') : header.index("}") + 1]
    return header.replace(metadata, "", 1), json.loads(metadata), content[end:]


def files_in(comm, folder):
    """Return the names in the folder once all ranks are through."""
    comm.Barrier()
    found = sorted(path.name for path in folder.iterdir())
    comm.Barrier()
    return found


def refused(comm, kind, function, *arguments, **options):
    """The text that all ranks got alike when the call raised `kind` on this one, as it must."""
    with pytest.raises(kind) as raised:
        function(*arguments, **options)
    outcomes = comm.allgather((type(raised.value).__name__, str(raised.value)))
    assert outcomes == outcomes[:1] * comm.size
    return str(raised.value)


# ---------------------------------------------------------------------------------------------------------- round trips


def test_saved_arrays_are_loaded_at_any_placements(comm, folder):
    results = []
    for number, mesh in enumerate([mesh_of(comm, comm.size), mesh_of(comm, *squarest(comm.size))]):
        operators = ["sum", "avg", "max", "min"][: 4 if len(mesh.dims) == 1 else 1]  # which do not mix
        saved_as = product(placements_of(2, *operators), repeat=len(mesh.dims))
        loaded_as = list(product(placements_of(2), repeat=len(mesh.dims)))
        whole, arrays, placements = values((5, 3)), {}, {}
        for before, after in product(saved_as, loaded_as):
            name = f"{before} -> {after}"
            arrays[name] = held(whole, mesh, spread(mesh.dim_sizes, (5, 3), *before))
            placements[name] = dict(zip(mesh.dims, after, strict=True))
        path = folder / f"{number}.safetensors"
        pce.save(path, arrays)
        loaded = pce.load(path, mesh, placements)
        for name, array in loaded.items():
            assert array.sharding == Sharding.of(mesh.dim_sizes, (5, 3), placements[name])
            assert not array.requires_grad
        results.append((wholes_of(comm, loaded), dict.fromkeys(arrays, whole)))
    for got, expected in results:
        assert_equal(got, expected)


def test_file_equals_that_of_safetensors(comm, square, folder):
    dtypes = [*DTYPES, *EIGHT_BITS]
    wholes = {f"{np.dtype(dtype).name} {shape}": values(shape, dtype=dtype) for dtype in dtypes for shape in [(5,), ()]}
    wholes |= {"empty": values((0, 3)), 'a name with "quotes", ünïcode and\nlines': values((2, 3, 4))}
    # Numbers that a detour by float32 or by arithmetic would change.
    wholes["nan with a payload"] = np.array([0x7E01, 0xFD55, 0x8000], np.uint16).view(np.float16)
    wholes["bfloat16 with a payload"] = np.array([0x7FA1, 0xFFC3, 0x8000], np.uint16).view(ml_dtypes.bfloat16)
    wholes["long"] = np.array([2**63 - 1])
    placements = {name: {"data": Shard(0)} if whole.ndim else {} for name, whole in wholes.items()}
    arrays = {
        name: held(whole, square, Sharding.of(square.dim_sizes, whole.shape, placements[name]))
        for name, whole in wholes.items()
    }
    pce.save(folder / "ours", arrays)
    pce.save(folder / "again", arrays)
    loaded = wholes_of(comm, pce.load(folder / "ours", square, placements))
    ours, again = ((folder / name).read_bytes() for name in ("ours", "again"))
    with safetensors.safe_open(folder / "ours", "np") as file:
        known = [name for name in file.keys() if not name.startswith("float8")]  # only torch's
        metadata, found = file.metadata(), {name: file.get_tensor(name) for name in known}
    # The library writes several metadata in an order of chance, so that all but their order is compared.
    theirs, mine = (parted(each) for each in (safetensors.numpy.save(wholes, metadata), ours))
    assert loaded.keys() == wholes.keys() == {*found, *(name for name in wholes if name.startswith("float8"))}
    assert all(is_same(got[name], wholes[name]) for got in (found, loaded) for name in got)
    assert not any(len(tensor_files.header_of({"x" * length: []}, 1, [])) % 8 for length in range(8))
    assert mine == theirs
    assert ours == again


def test_uneven_arrays_stand_for_their_placements(comm, line, folder):
    wholes = {"w": values((7, 2)), "v": values((4, 5)), "step": np.array(3)}
    like = {
        "w": held(wholes["w"], line, spread(line.dim_sizes, (7, 2), Shard(0), seed=[3])),
        "v": pce.distribute(wholes["v"], line, data=Shard(1)),
    }
    pce.save(folder / "f", like | {"step": pce.distribute(3, line)})
    loaded = pce.load(folder / "f", line, like | {"step": {}})
    balanced = pce.load(folder / "f", line, {"w": {"data": Shard(0)}, "v": {}, "step": {}})
    for found in (loaded, balanced):
        assert_equal(wholes_of(comm, found), wholes)
    assert {name: loaded[name].sharding for name in like} == {name: array.sharding for name, array in like.items()}
    assert balanced["w"].sharding == Sharding.of(line.dim_sizes, (7, 2), {"data": Shard(0)})


def test_file_from_elsewhere_is_loaded_and_replicated(comm, line, folder):
    wholes = {"w": values((4, 3)), "b": values((3,), dtype=ml_dtypes.bfloat16), "n": np.array(3)}
    if comm.rank == 0:
        safetensors.numpy.save_file(wholes, folder / "f", metadata={"format": "pt"})
    comm.Barrier()
    loaded = pce.load(str(folder / "f"), line, {"w": {"data": Shard(0)}, "b": {}, "n": {}})
    assert {name: array.placements["data"] for name, array in loaded.items()} == {
        "w": Shard(0),
        "b": Replicate(),
        "n": Replicate(),
    }
    assert_equal(wholes_of(comm, loaded), wholes)


def test_file_of_earlier_version_has_same_bits(comm, line):
    earlier = Path(__file__).with_name("saved_by_0.2.safetensors")
    wholes = {np.dtype(dtype).name: values((3, 2), dtype=dtype) for dtype in DTYPES} | {"step": np.array(7)}
    loaded = pce.load(earlier, line, {name: {"data": Shard(0)} if whole.ndim else {} for name, whole in wholes.items()})
    assert_equal(wholes_of(comm, loaded), wholes)


def test_loaded_parameters_are_floating_arrays_that_step(line, folder):
    wholes = {np.dtype(dtype).name: values((3, 2), dtype=dtype) for dtype in DTYPES} | {"step": np.array(7)}
    pce.save(folder / "f", {name: pce.distribute(whole, line) for name, whole in wholes.items()})
    loaded = pce.load(folder / "f", line, {name: {} for name in wholes} | {"float32": {"data": Shard(0)}}, True)
    parameters = {name for name, array in loaded.items() if array.requires_grad}
    w = loaded["float32"]
    w.grad = pce.distribute(wholes["float32"], line, data=Shard(0))
    pce.SGD([w], lr=1.0).step()
    assert parameters == {"float16", "bfloat16", "float32", "float64"}
    assert w.is_leaf
    assert w.local.flags.c_contiguous
    assert not w.local.any()
    assert loaded["step"].item() == 7


def test_cupy_arrays_are_saved(comm, line, folder, cupy):
    wholes = {"w": values((4, 3)), "h": values((4,), dtype=np.float16)}
    pce.save(folder / "f", {name: pce.distribute(cupy.asarray(w), line, data=Shard(0)) for name, w in wholes.items()})
    assert_equal(wholes_of(comm, pce.load(folder / "f", line)), wholes)


# ------------------------------------------------------------------------------------------ what is at the path already


def saved(comm, path, number=1):
    """A save of `number` to `path`, over all ranks."""
    pce.save(path, {"step": pce.distribute(number, mesh_of(comm, comm.size))})


def loaded_from(comm, path):
    return pce.load(path, mesh_of(comm, comm.size))["step"].item()


def prepared(comm, make, *arguments):
    """Call `make` on rank 0 alone, once all ranks have come here, and return its result on every rank."""
    comm.Barrier()
    return comm.bcast(make(*arguments) if comm.rank == 0 else None)


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is a named pipe"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)), "is a socket"),
        (lambda path: path.symlink_to("/dev/null"), "is a character device"),
    ],
    ids=["pipe", "socket", "link to a device"],
)
def test_saving_replaces_regular_files_only(comm, folder, make, words):
    path = folder / "f"
    before = prepared(comm, lambda: (make(path), os.lstat(path).st_ino)[1])
    texts = [refused(comm, FileExistsError, saved, comm, path), refused(comm, ValueError, loaded_from, comm, path)]
    after = prepared(comm, lambda: os.lstat(path).st_ino)
    found = files_in(comm, folder)
    assert found == ["f"]
    assert before == after
    assert f"cannot save to '{path}'" in texts[0]
    assert f"cannot load '{path}'" in texts[1]
    assert texts[0].endswith("(rank 0 along data)")
    for text in texts:
        assert words in text


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
def test_links_are_followed_and_stay_links(comm, folder):
    def make():
        for name in ("here", "there"):
            (folder / name).mkdir()
        (folder / "here" / "link").symlink_to("second")
        (folder / "here" / "second").symlink_to(folder / "there" / "f")

    prepared(comm, make)
    for number in range(2):  # the first time the link leads nowhere
        saved(comm, folder / "here" / "link", number)
        found = [files_in(comm, folder / name) for name in ("here", "there")]
        assert found == [["link", "second"], ["f"]]
        assert loaded_from(comm, folder / "there" / "f") == number
    assert (folder / "here" / "link").is_symlink()
    assert (folder / "here" / "second").is_symlink()


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
def test_links_in_circle_or_to_nowhere_are_errors(comm, folder):
    def make():
        (folder / "a").symlink_to("b")
        (folder / "b").symlink_to("a")
        (folder / "c").symlink_to("missing/f")

    prepared(comm, make)
    circle = refused(comm, OSError, saved, comm, folder / "a")
    nowhere = refused(comm, FileNotFoundError, saved, comm, folder / "c")
    found = files_in(comm, folder)
    assert found == ["a", "b", "c"]
    assert f"[Errno {errno.ELOOP}] cannot save to '{folder / 'a'}'" in circle
    assert f"'{folder / 'c'}', a link to '{os.path.realpath(folder / 'missing' / 'f')}'" in nowhere


@pytest.mark.ranks(2)  # rank 0 writes
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444], ids=oct)
def test_saving_over_file_keeps_its_mode(comm, folder, mode):
    saved(comm, folder / "f", 1)
    prepared(comm, (folder / "f").chmod, mode)
    saved(comm, folder / "f", 2)
    found = prepared(comm, lambda: stat.S_IMODE((folder / "f").stat().st_mode))
    assert loaded_from(comm, folder / "f") == 2
    assert found == mode


@pytest.mark.ranks(2)  # rank 0 writes
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_new_file_has_mode_umask_leaves(comm, folder, mask):
    before = os.umask(mask)
    try:
        saved(comm, folder / "f")
    finally:
        os.umask(before)
    comm.Barrier()
    assert stat.S_IMODE((folder / "f").stat().st_mode) == 0o666 & ~mask


def test_private_file_is_private_while_written(comm, old_file, monkeypatch):
    prepared(comm, old_file.chmod, 0o600)
    modes = []
    original = checkpoint.TensorWriter.finish

    def finish(self):
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in old_file.parent.iterdir())
        original(self)

    monkeypatch.setattr(checkpoint.TensorWriter, "finish", finish)
    saved(comm, old_file)
    assert modes == ([] if comm.rank else [0o600, 0o600])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away: run this as root")
def test_saving_over_file_keeps_its_owner(comm, old_file):
    prepared(comm, os.chown, old_file, 1234, 2345)
    saved(comm, old_file)
    owner = prepared(comm, lambda: (old_file.stat().st_uid, old_file.stat().st_gid))
    assert owner == (1234, 2345)


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
def test_file_is_flushed_before_its_rename(comm, folder, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def flush(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("rename"), replace(*paths)))
    saved(comm, folder / "f")
    assert events == ([] if comm.rank else ["file", "rename", "folder"])


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127], ids=["ascii", "of two bytes each"])
def test_longest_name_can_be_saved(comm, folder, name):
    saved(comm, folder / name)
    found = files_in(comm, folder)
    assert loaded_from(comm, folder / name) == 1
    assert found == [name]


def test_saving_of_one_name_by_two_jobs(comm, folder, monkeypatch):
    alone = mesh_of(MPI.COMM_SELF, 1)
    finish = checkpoint.TensorWriter.finish

    def overtaken(self):
        monkeypatch.setattr(checkpoint.TensorWriter, "finish", finish)
        pce.save(folder / "f", {"step": pce.distribute(1, alone)})
        overtaken.step = pce.load(folder / "f", alone)["step"].item()
        self.finish()

    monkeypatch.setattr(checkpoint.TensorWriter, "finish", overtaken)
    saved(comm, folder / "f", 2)
    found = files_in(comm, folder)
    assert loaded_from(comm, folder / "f") == 2
    assert found == ["f"]
    assert comm.rank or overtaken.step == 1


# ------------------------------------------------------------------------------------------------ what is sent and held


def test_saving_sends_each_shard_once(comm, square, folder):
    arrays = {
        "replicated": pce.distribute(values((6, 4)), square),
        "sharded": pce.distribute(values((6, 4)), square, data=Shard(0)),
        "half": pce.distribute(values((6, 4), dtype=np.float16), square, model=Shard(1), data=Shard(0)),
    }
    with pce.trace() as trace:
        pce.save(folder / "f", arrays)
    sent = comm.allgather([event.bytes for event in trace.select("all_to_all", operation="save", over="data, model")])
    mine = {name: array.local.nbytes for name, array in arrays.items()}
    at_rank_0 = comm.bcast(mine)
    assert trace.count() == 3
    assert trace.count(purpose=Purpose.AGREEMENT) == 2
    totals = dict(zip(arrays, np.sum(sent, axis=0).tolist(), strict=True))
    assert totals == {"replicated": 0, "sharded": 96 - at_rank_0["sharded"], "half": 48 - at_rank_0["half"]}


def test_saving_holds_one_full_array_at_a_time(comm, line, folder):
    shape, names = (1024, 256), "abcdefgh"
    full = 4 * 1024 * 256
    own = -(-full // comm.size)
    arrays = {name: pce.distribute(np.zeros(shape, np.float32), line, data=Shard(0)) for name in names}
    tracemalloc.start()
    pce.save(folder / "f", arrays)
    saving = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tracemalloc.start()
    loaded = pce.load(folder / "f", line, {name: {"data": Shard(0)} for name in names})
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    slack = 2**18
    # The elements to send are put into one buffer first.
    assert saving < own + (full if comm.rank == 0 else 0) + slack
    assert len(loaded) * own - slack < loading < len(loaded) * own + own + slack


def test_loading_takes_one_agreement_and_sends_nothing(line, folder):
    pce.save(folder / "f", {name: pce.distribute(values((4, 3)), line) for name in "abc"})
    with pce.trace() as trace:
        pce.load(folder / "f", line, {"a": {"data": Shard(0)}})
    assert [(event.operation, event.purpose) for event in trace.events] == [("load", Purpose.AGREEMENT)]


@pytest.fixture
def mixed(comm, folder):
    """A file from elsewhere: a large array, a small one, arrays of 8 bits, and one of complex numbers."""
    wholes = {"large": np.zeros((1024, 1024), np.float32), "small": values((4, 4)), "z": np.ones(4, np.complex64)}
    wholes |= {np.dtype(dtype).name: values((4, 3), dtype=np.float32).astype(dtype) for dtype in EIGHT_BITS}
    prepared(comm, lambda: safetensors.numpy.save_file(wholes, folder / "f") and None)
    return folder / "f", wholes


def test_loading_reads_named_arrays_alone(comm, line, mixed, monkeypatch):
    path, wholes = mixed
    pread, lengths = os.pread, []
    monkeypatch.setattr(os, "pread", lambda *arguments: (lengths.append(arguments[1]), pread(*arguments))[1])
    loaded = pce.load(path, line, {"small": {"data": Shard(0)}})
    read = sum(lengths)
    lengths.clear()
    third = pce.load(path, line, {"large": {"data": Shard(0)}})["large"]
    assert_equal(wholes_of(comm, loaded), {"small": wholes["small"]})
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert read <= 8 + header + 2**16
    # Of 4 blocks that are read at a time, one may be read twice.
    assert sum(lengths) <= 8 + header + third.local.nbytes * 5 // 4 + 2 * 2**16


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_arrays_of_8_bits_are_moved_and_converted(comm, line, mixed, dtype):
    path, wholes = mixed
    name = np.dtype(dtype).name
    x = pce.load(path, line, {name: {"data": Shard(0)}}, requires_grad=True)[name]
    columns = x.redistribute(data=Shard(1))
    got = [x.full(), columns.full(), (x.astype(np.float32) * 2.0).full(), x.astype(ml_dtypes.bfloat16).full()]
    pce.save(path.with_name("g"), {name: columns})
    again = pce.load(path.with_name("g"), line)[name].local
    whole = wholes[name]
    expected = [whole, whole, whole.astype(np.float32) * 2, whole.astype(ml_dtypes.bfloat16)]
    assert all(map(is_same, [*got, again], [*expected, whole]))
    assert not x.requires_grad
    numbers = pce.from_local(np.full((2, 3), comm.rank + 1.5), line, data=Partial("sum"), requires_grad=True)
    made = [numbers.astype(dtype), pce.distribute(whole, line, data=Shard(0)), pce.from_local(whole, line)]
    made += [pce.distribute(whole if comm.rank == 0 else None, line, src_rank=0)]
    total = np.full((2, 3), comm.size * (comm.size + 2) / 2).astype(dtype)
    assert all(map(is_same, [each.full() for each in made], [total, whole, whole, whole]))
    assert not made[0].requires_grad
    with pytest.raises(TypeError, match=f"only float16, bfloat16, float32 and float64 have a gradient, got {name}"):
        pce.distribute(whole, line, requires_grad=True)
    with pytest.raises(TypeError, match=rf"Partial\('max'\) of {name} has no meaning: nothing is computed in {name}"):
        x.redistribute(data=Partial("max"))
    for compute in (
        lambda: x + x,
        lambda: x * 2,
        lambda: x * np.arange(3),
        lambda: x == x,
        lambda: x[0],
        x.max,
        lambda: np.sort(x),
    ):
        with pytest.raises(TypeError, match=rf"{name}.*: convert it first, as by .astype\(np.float32\)"):
            compute()


def test_foreign_dtype_is_error_where_named(comm, line, mixed, monkeypatch):
    path, wholes = mixed
    others = {name: {} for name in wholes if name != "z"}
    assert pce.load(path, line, others).keys() == others.keys()
    texts = [refused(comm, ValueError, pce.load, path, line, named) for named in (None, {"z": {}})]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr(tensor_files, "dtype_named", lambda name: np.dtype(name.replace("float8", "no such type")))
    missing = refused(comm, ImportError, pce.load, path, line, {"float8_e4m3fn": {}})
    assert pce.load(path, line, {"small": {}}).keys() == {"small"}
    assert all("'z' is C64, and only BOOL, U8" in text for text in texts)
    assert "'float8_e4m3fn' is F8_E4M3: float8_e4m3fn needs ml_dtypes: pip install 'pce_mpi[bf16]'" in missing


# ----------------------------------------------------------------------------------------------------- errors of saving


@pytest.fixture
def old_file(comm, folder):
    """A file that an error must leave as it is."""
    path = folder / "f"
    pce.save(path, {"w": pce.distribute(values((2, 2)), mesh_of(comm, comm.size))})
    return path


def assert_old_file_is_left(comm, path):
    found = files_in(comm, path.parent)
    loaded = wholes_of(comm, pce.load(path, mesh_of(comm, comm.size)))
    assert found == [path.name]
    assert_equal(loaded, {"w": values((2, 2))})


def large(mesh):
    return {name: pce.distribute(np.zeros((256, 256)), mesh, data=Shard(0)) for name in "abc"}


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
def test_paths_that_cannot_be_saved_to_raise(comm, old_file):
    arrays, slash = large(mesh_of(comm, comm.size)), ": a path that ends in '/' is that of a folder"
    paths = {
        f"{old_file.parent}/missing/f": (FileNotFoundError, ""),
        f"{old_file.parent}": (IsADirectoryError, ""),
        f"{old_file}/": (IsADirectoryError, slash),
        f"{old_file.parent}/": (IsADirectoryError, slash),
        f"{old_file.parent}/new//": (IsADirectoryError, slash),
    }
    with pce.trace() as trace:
        texts = [refused(comm, kind, pce.save, path, arrays) for path, (kind, _) in paths.items()]
    assert_old_file_is_left(comm, old_file)
    for text, (path, (_, words)) in zip(texts, paths.items(), strict=True):
        assert f"cannot save to {path!r}{words}" in text
        assert words or text.endswith("(rank 0 along data)")
    assert trace.count() == 0


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
def test_full_disk_is_found_before_sending(comm, old_file):
    # A limit on the length of files is what a test can have of a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    arrays = large(mesh_of(comm, comm.size))
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pce.trace() as trace:
            text = refused(comm, OSError, pce.save, old_file, arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_old_file_is_left(comm, old_file)
    assert f"[Errno {errno.EFBIG}] cannot save to '{old_file}'" in text
    assert trace.count() == 0


def test_file_has_room_on_disk_before_sending(comm, folder, monkeypatch):
    arrays = large(mesh_of(comm, comm.size))
    room = []

    def write(self, *_):
        room.append(512 * os.stat(self._temporary).st_blocks)

    monkeypatch.setattr(checkpoint.TensorWriter, "write", write)
    pce.save(folder / "f", arrays)
    assert all(taken >= 3 * 8 * 256 * 256 for taken in room)
    assert len(room) == (0 if comm.rank else 3)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: run this as another user")
def test_folder_that_may_not_be_written_to(comm, old_file):
    if comm.rank == 0:
        old_file.parent.chmod(0o500)
    text = refused(comm, PermissionError, pce.save, old_file, large(mesh_of(comm, comm.size)))
    if comm.rank == 0:
        old_file.parent.chmod(0o700)
    assert_old_file_is_left(comm, old_file)
    assert text.endswith("(rank 0 along data)")


@pytest.mark.parametrize("stage", ["write", "finish"])
def test_error_while_saving_leaves_old_file_alone(comm, old_file, monkeypatch, stage):
    calls = []
    original = getattr(checkpoint.TensorWriter, stage)

    def failing(self, *arguments):
        calls.append(stage)
        if len(calls) == (2 if stage == "write" else 1):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(self, *arguments)

    monkeypatch.setattr(checkpoint.TensorWriter, stage, failing)
    text = refused(comm, OSError, pce.save, old_file, large(mesh_of(comm, comm.size)))
    monkeypatch.undo()
    assert_old_file_is_left(comm, old_file)
    assert text == f"[Errno {errno.EIO}] cannot save to '{old_file}': {os.strerror(errno.EIO)} (rank 0 along data)"
    assert len(calls) == (0 if comm.rank else 2 if stage == "write" else 1)


@pytest.mark.ranks(2)  # rank 0 alone looks at the path
def test_interrupt_in_middle_leaves_no_temporary_file(comm, old_file, monkeypatch):
    monkeypatch.setattr(checkpoint.TensorWriter, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    alone = mesh_of(MPI.COMM_SELF, 1)
    mine = old_file.parent / f"of rank {comm.rank}"
    with pytest.raises(KeyboardInterrupt):
        pce.save(mine, {"w": pce.distribute(values((2, 2)), alone)})
    monkeypatch.undo()
    assert_old_file_is_left(comm, old_file)


@pytest.mark.ranks(2)  # a rank refuses it by itself
def test_saving_anything_else_is_an_error(comm, old_file):
    mesh, other = mesh_of(comm, comm.size), mesh_of(comm, comm.size, 1)
    w = pce.distribute(values((2, 2)), mesh)
    cases = [
        ({"w": w, "v": values((2, 2))}, TypeError, "arrays['v'] must be a distributed array, got ndarray"),
        ({"w": w, 3: w}, TypeError, "the name of an array must be a str, got 3"),
        ({"w": w, "\ud800": w}, ValueError, r"must be Unicode text, got '\ud800', which has a surrogate"),
        ({"w": w, "__metadata__": w}, ValueError, "the format keeps the name '__metadata__' for itself"),
        ({"w": w, "v": pce.distribute(values((2, 2)), other)}, ValueError, "arrays['v'] is over another mesh"),
    ]
    texts = [refused(comm, kind, pce.save, old_file, arrays) for arrays, kind, _ in cases]
    nothing = [refused(comm, ValueError, pce.save, old_file, arrays) for arrays in ({}, {"v": values((2, 2))})]
    no_dict = refused(comm, TypeError, pce.save, old_file, [w])
    assert_old_file_is_left(comm, old_file)
    for text, (_, _, expected) in zip(texts, cases, strict=True):
        assert expected in text
    assert all("nothing to save" in text for text in nothing)
    assert "arrays must be a dict" in no_dict


@pytest.mark.ranks(2)  # a rank refuses it by itself
@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        (3, TypeError, "path must be a str or a path, got 3"),
        (b"f", TypeError, "path must be a str or a path, got b'f'"),
        ("a\0b", ValueError, r"path has a character that no name of a file has: 'a\x00b'"),
        ("\ud800", ValueError, r"path has a character that no name of a file has: '\ud800'"),
    ],
    ids=["number", "bytes", "null byte", "surrogate"],
)
def test_argument_that_is_no_path_is_named(comm, line, path, kind, said):
    for call in (lambda: pce.save(path, {"w": pce.distribute(values((3,)), line)}), lambda: pce.load(path, line)):
        assert said in refused(comm, kind, call)


def test_ranks_that_save_different_arrays_all_raise(comm, line, old_file, several):
    first = comm.rank == 0
    w, v = pce.distribute(values((2, 2)), line), pce.distribute(values((3, 2)), line)
    shape = refused(comm, CollectiveError, pce.save, old_file, {"u": w, "w": w if first else v})
    names = refused(comm, CollectiveError, pce.save, old_file, {"w": w} if first else {"w": w, "v": v})
    order = refused(comm, CollectiveError, pce.save, old_file, {"w": w, "v": v} if first else {"v": v, "w": w})
    paths = refused(comm, CollectiveError, pce.save, old_file if first else f"{old_file}.2", {"w": w})
    one_bad = refused(comm, TypeError, pce.save, old_file, {"w": w, "v": v if first else 3})
    assert_old_file_is_left(comm, old_file)
    assert "disagree on w: 'float32 (2, 2), data: Replicate()' (rank 0 along data)" in shape
    assert "u:" not in shape
    assert "v: not given (rank 0 along data)" in names
    assert "in order" in order
    assert "path" in paths
    assert "rank 0" not in one_bad


# ---------------------------------------------------------------------------------------------------- errors of loading


def test_file_wrong_on_one_rank_raises_everywhere(comm, line, old_file):
    mine, last = old_file.parent / f"damaged {comm.rank}", comm.rank == comm.size - 1
    mine.write_bytes(old_file.read_bytes()[:-1])
    wrong = {
        f"{old_file}.2": (FileNotFoundError, ""),
        old_file.parent: (IsADirectoryError, ""),
        mine: (ValueError, "is not a safetensors file"),
    }
    texts = [refused(comm, kind, pce.load, path if last else old_file, line) for path, (kind, _) in wrong.items()]
    mine.unlink()
    assert_old_file_is_left(comm, old_file)
    for text, (_, words) in zip(texts, wrong.values(), strict=True):
        assert str(old_file.parent) in text
        assert words in text
        assert text.endswith(f"(rank {comm.size - 1} along data)")


def test_long_names_do_not_make_long_messages(comm, folder):
    mesh, name = mesh_of(comm, comm.size), "n" * 100_000
    for number, entry in enumerate([{"w": (name, [0], [0, 0])}, {name: ("C64", [0], [0, 0])}]):
        prepared(comm, (folder / str(number)).write_bytes, entries(**entry))
    w = pce.distribute(values((2, 2)), mesh)
    texts = [refused(comm, ValueError, pce.load, folder / str(number), mesh) for number in range(2)]
    texts.append(refused(comm, TypeError, pce.save, folder / "f", {"w": w, name: 3}))
    saved(comm, folder / "f")
    texts.append(refused(comm, ValueError, pce.load, folder / "f", mesh, {name: {}}))
    if comm.size > 1:
        mine = {name + "1": w} if comm.rank else {name + "2": w}
        texts.append(refused(comm, CollectiveError, pce.save, folder / "g", mine))
    assert max(map(len, texts)) < 1000 + len(str(folder))


def flipped(content, bit):
    """The bytes with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_any_flipped_bit_of_file_is_found(tmp_path):
    wholes = {"00000000": values((3, 5)), "spaces": np.full(9, ord(" "), np.uint8), "s": values((2,), dtype=np.float16)}
    alone = mesh_of(MPI.COMM_SELF, 1)
    pce.save(tmp_path / "f", {name: pce.distribute(whole, alone) for name, whole in wholes.items()})
    content, found = (tmp_path / "f").read_bytes(), []
    for bit in range(8 * len(content)):
        (tmp_path / "g").write_bytes(flipped(content, bit))
        try:
            with tensor_files.TensorFile(tmp_path / "g") as file:
                for name in file.arrays:
                    file.read(name)
        except ValueError as error:
            found.append(str(error))
    assert len(found) == 8 * len(content)
    assert all(f"'{tmp_path / 'g'}' is not a" in text or "has changed since it was saved" in text for text in found)


@pytest.mark.parametrize("length", [8, 24, 1000])
def test_any_part_is_read_in_short_blocks(tmp_path, monkeypatch, length):
    for module in (tensor_files, checkpoint):
        monkeypatch.setattr(module, "length_of_block", lambda size: length)
    monkeypatch.setattr(tensor_files, "_AT_A_TIME", 3 * length)
    rng, alone = np.random.default_rng(length), mesh_of(MPI.COMM_SELF, 1)
    shapes = [(5, 3), (2, 3, 4), (1, 7, 1, 3), (40,), (), (3, 0, 2), (2, 2, 2, 2, 2)]
    wholes = {str(shape): values(shape, dtype=rng.choice(DTYPES)) for shape in shapes}
    pce.save(tmp_path / "f", {name: pce.distribute(whole, alone) for name, whole in wholes.items()})
    found = []
    with tensor_files.TensorFile(tmp_path / "f") as file:
        for name, whole in wholes.items():
            for _ in range(30):
                ends = [sorted(rng.integers(0, each + 1, 2)) for each in whole.shape]
                part = tuple(slice(int(first), int(last)) for first, last in ends)
                found.append((part, whole[part], file.read(name, part)))
    for part, expected, got in found:
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), part
        np.testing.assert_array_equal(got, expected, err_msg=str(part))


@pytest.mark.parametrize("axis", [0, 1])
def test_bit_flipped_in_one_shard_raises_everywhere(comm, line, folder, axis):
    whole = values((300, 400), dtype=np.float64)  # some blocks a rank
    placements = {"w": {"data": Shard(axis)}}
    pce.save(folder / "f", {"w": pce.distribute(whole, line)})
    content, texts = (folder / "f").read_bytes(), {}
    for byte in (len(content) - 8 * whole.size, len(content) - 4 * whole.size - 1, len(content) - 1):
        changed = flipped(content, 8 * byte)
        prepared(comm, (folder / "g").write_bytes, changed)
        texts[byte] = refused(comm, ValueError, pce.load, folder / "g", line, placements)
    assert_equal(wholes_of(comm, pce.load(folder / "f", line, placements)), {"w": whole})
    for byte, text in texts.items():
        start = int(re.search(r"the 65536 bytes from (\d+) on", text)[1])
        assert start <= byte < start + 65536


@pytest.mark.parametrize("late", [0, -1])
def test_ranks_that_open_different_files_all_raise(comm, folder, monkeypatch, several, late):
    for number in range(2):  # equal shapes, other data
        saved(comm, folder / str(number), number)
    original = tensor_files.TensorFile.__init__

    def opened(self, path):
        if comm.rank == late % comm.size:
            comm.Barrier()
            os.replace(folder / "1", folder / "0")
            original(self, path)
        else:
            original(self, path)
            comm.Barrier()

    monkeypatch.setattr(tensor_files.TensorFile, "__init__", opened)
    text = refused(comm, CollectiveError, loaded_from, comm, folder / "0")
    monkeypatch.undo()
    assert loaded_from(comm, folder / "0") == 1
    assert "ranks disagree on file, which may have been saved anew meanwhile: 'checksum " in text


def test_file_replaced_while_read_is_not_mixed(comm, folder, monkeypatch):
    for number in range(2):
        saved(comm, folder / str(number), number)
    original = tensor_files.TensorFile.read

    def read(self, *arguments):
        prepared(comm, lambda: (folder / "1").exists() and os.replace(folder / "1", folder / "0"))
        return original(self, *arguments)

    monkeypatch.setattr(tensor_files.TensorFile, "read", read)
    found = [loaded_from(comm, folder / "0") for _ in range(2)]
    assert found == [0, 1]


def test_file_cut_off_while_read_raises_everywhere(comm, line, old_file, monkeypatch):
    length, original = old_file.stat().st_size, tensor_files.TensorFile.read

    def read(self, *arguments):
        prepared(comm, os.truncate, old_file, length - 3)
        return original(self, *arguments)

    monkeypatch.setattr(tensor_files.TensorFile, "read", read)
    text = refused(comm, ValueError, pce.load, old_file, line)
    assert f"'{old_file}' is not a safetensors file: it ends 3 bytes early" in text


def headed(header, data=b""):
    """A file with that header."""
    return len(header).to_bytes(8, "little") + header + data


def entries(**arrays):
    """A file of three bytes of data whose header says that of each array: dtype, shape, offsets."""
    names = ("dtype", "shape", "data_offsets")
    header = {name: dict(zip(names, entry, strict=True)) for name, entry in arrays.items()}
    return headed(json.dumps(header).encode(), b"123")


def written(write, *arguments, **arrays):
    """The bytes that a function of NumPy's writes."""
    file = io.BytesIO()
    write(file, *arguments, **arrays)
    return file.getvalue()


NO_FILES = {
    ".npz": (written(np.savez, w=np.ones(3)), "it is a zip archive, as .npz, .pt and .pth files are; read it with"),
    ".npz, compressed": (written(np.savez_compressed, w=np.ones(3)), "it is a zip archive"),
    ".pth": (b"PK\3\4\0\0\x08\x08\0\0\0\0\0\0archive/data.pkl", "it is a zip archive"),
    ".npy": (written(np.save, np.ones(3)), "it is an array of np.save, a .npy file"),
    **{
        f".pkl, protocol {protocol}": (pickle.dumps({"w": np.ones(3)}, protocol), "it is a pickle, as .pkl and older")
        for protocol in range(2, 6)
    },
    ".onnx": (b"\x08\x07\x12\x07pytorch\x1a\x031.7", "it is a protocol buffer, as .onnx files are"),
    "tokenizer.json": (b'{"version": "1.0"}', "it is text, such as JSON"),
    "a hole": (entries(w=("U8", [2], [1, 3])), "the data of 'w' do not begin where others end"),
    "an overlap": (entries(v=("U8", [2], [0, 2]), w=("U8", [2], [1, 3])), "the data of 'w' do not begin"),
    "too few bytes": (entries(w=("F32", [1], [0, 3])), "'w' is 'F32' [1] and has the bytes 0 to 3"),
    "data left over": (entries(w=("U8", [2], [0, 2])), "its arrays have 2 bytes, and its data 3"),
    "data missing": (entries(w=("U8", [4], [0, 4])), "its arrays have 4 bytes, and its data 3"),
    "a product that overflows": (entries(w=("U8", [2**32, 2**32, 3], [0, 3])), "'w' is 'U8' [4294967296, 4294967296"),
    "a negative length": (entries(w=("U8", [-3, -1], [0, 3])), "the entry of 'w' is not one"),
    "truth for a length": (entries(w=("U8", [True, 3], [0, 3])), "the entry of 'w' is not one"),
    "offsets backwards": (entries(w=("F8", [3], [3, 0])), "'w' is 'F8' [3] and has the bytes 3 to 0"),
    "too many axes": (entries(w=("U8", [1] * 65 + [3], [0, 3])), "'w' is 'U8' [1, 1, 1, 1, 1, 1, ...]"),
    "an axis too long": (entries(v=("U8", [2**70, 0], [0, 0]), w=("U8", [3], [0, 3])), "'v' has the shape (118"),
    "axes too long": (entries(v=("F32", [2**40, 0, 2**21], [0, 0]), w=("U8", [3], [0, 3])), "which no array of NumPy"),
    "no dtype of arrays": (entries(q=("F6_E2M3", [4], [0, 3])), "'q' is F6_E2M3"),
    "a name twice": (headed(b'{"w":1,"w":2}'), "is not a safetensors file: a name occurs twice"),
    "deep lists": (headed(b"[" * 100_000), "recursion"),
    "deep objects": (headed(b'{"w":' * 100_000), "recursion"),
    "a list": (headed(b"[]"), "its header is no JSON object"),
    "metadata of numbers": (headed(b'{"__metadata__":{"a":1}}'), "its metadata are not texts"),
    "half of the checksums": (headed(b'{"__metadata__":{"pce_mpi.data":"65536"}}'), "its header has changed"),
    "no text": (headed(b'{"\xff":1}'), "'utf-8'"),
    "a long number": (headed(b'{"w":' + b"9" * 5000 + b"}"), "4300"),
    "nothing": (b"", "is not a safetensors file"),
    "no header": ((80).to_bytes(8, "little"), "is not a safetensors file"),
    "text": (b"these are no tensors, and this is no header\n" * 10, "is not a safetensors file"),
    **{
        f"a header of {length} bytes": (length.to_bytes(8, "little") + b"{}", f"a header of {length} bytes is too long")
        for length in (100_000_001, 2**63, 2**64 - 1)
    },
}


@pytest.mark.ranks(1)  # each rank reads all of it
@pytest.mark.parametrize(("content", "words"), NO_FILES.values(), ids=NO_FILES)
def test_content_of_any_other_file_is_error(comm, line, folder, content, words):
    prepared(comm, (folder / "f").write_bytes, content)
    assert words in refused(comm, ValueError, pce.load, folder / "f", line)


@pytest.mark.ranks(1)  # each rank reads them all
def test_placements_of_many_arrays_take_linear_time(folder, line):
    names = [f"array {number}" for number in range(10_000)]
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    mine = folder / f"of rank {line.rank}"
    mine.write_bytes(headed(json.dumps(dict.fromkeys(names, entry)).encode()))
    seconds = []
    gc.disable()  # a collection looks at all that the tests before have left
    try:
        for placements in [None, {name: {"data": Shard(0)} for name in names}] * 2:
            start = time.process_time()
            pce.load(mine, line, placements)
            seconds.append(time.process_time() - start)
    finally:
        gc.enable()
    assert min(seconds[1::2]) < 3 * min(seconds[::2])


@pytest.mark.ranks(2)  # as above
def test_placements_that_do_not_fit_file_are_errors(comm, line, folder):
    pce.save(folder / "f", {"w": pce.distribute(values((2, 2)), line), "step": pce.distribute(3, line)})
    shard, other = {"data": Shard(0)}, mesh_of(comm, comm.size, 1)
    cases = [
        ({"w": shard, "v": shard, "u": {}}, ValueError, "placements name 'v', 'u', which"),
        ({"w": {"model": Shard(0)}}, ValueError, "placements['w']: the mesh has no dim 'model'"),
        ({"w": {"data": Shard(2)}}, ValueError, "placements['w']: data=Shard(2) is out of bounds"),
        ({"step": shard}, ValueError, "placements['step']: data=Shard(0) is out of bounds"),
        ({"w": {"data": 0}}, TypeError, "placements['w']: data must be Shard(axis), Replicate()"),
        (["w"], TypeError, "placements must be a dict of placements by name, got ['w']"),
        ({"w": pce.distribute(np.zeros((2, 3)), line)}, ValueError, "placements['w']: the array has the shape (2, 3)"),
        ({"w": pce.distribute(np.zeros((2, 2)), other)}, ValueError, "placements['w']: the array is over another mesh"),
        ({"w": Shard(0)}, TypeError, "placements['w']: expected a dict of placements by dim, or"),
    ]
    texts = [refused(comm, kind, pce.load, folder / "f", line, placements) for placements, kind, _ in cases]
    for text, (_, _, expected) in zip(texts, cases, strict=True):
        assert expected in text
    with pytest.raises(TypeError, match="mesh must be a Mesh"):
        pce.load(folder / "f", comm)


def test_array_placed_as_partial_one_is_replicated(line, folder):
    pce.save(folder / "f", {"w": pce.distribute(values((2, 2)), line)})
    total = held(np.zeros((2, 2)), line, Sharding.of(line.dim_sizes, (2, 2), {"data": Partial("sum")}))
    for placed in (total, total.placements):
        loaded = pce.load(folder / "f", line, {"w": placed})["w"]
        assert loaded.placements == {"data": Replicate()}
        np.testing.assert_array_equal(loaded.local, values((2, 2)))


def test_ranks_that_load_different_things_all_raise(comm, line, old_file, several):
    first = comm.rank == 0
    placed = refused(comm, CollectiveError, pce.load, old_file, line, {"w": {"data": Shard(int(first))}})
    required = refused(comm, CollectiveError, pce.load, old_file, line, requires_grad=first)
    assert "disagree on w: 'float32 (2, 2), data: Shard(1)' (rank 0 along data)" in placed
    assert "requires_grad: True (rank 0 along data), False" in required


def test_loading_without_ml_dtypes_says_what_to_install(comm, line, folder, monkeypatch):
    pce.save(folder / "f", {"w": pce.distribute(values((2, 2), dtype=ml_dtypes.bfloat16), line)})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr(tensor_files, "dtype_named", lambda name: np.dtype({"bfloat16": "no such type"}[name]))
    text = refused(comm, ImportError, pce.load, folder / "f", line)
    assert "'w' is BF16: bfloat16 needs ml_dtypes: pip install 'pce_mpi[bf16]'" in text
