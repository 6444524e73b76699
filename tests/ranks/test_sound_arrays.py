"""Arrays of every kind that are sound arguments: results have the bits of those of plain copies."""

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard
from ranks.grids import mesh_of


class Silent(np.ndarray):
    """An array of a user's own kind, of which NumPy's functions get nothing."""

    def __array_ufunc__(self, *_, **__):
        raise RuntimeError("a function of NumPy met a subclass")

    __array_function__ = __array_ufunc__


def read_only(array, folder):
    array.flags.writeable = False
    return array


def memory_map(array, folder):
    np.save(folder / "array.npy", array)
    return np.load(folder / "array.npy", mmap_mode="r")


def strided(array, folder):
    return np.stack([array, array + 1], -1)[..., 0]


def not_aligned(array, folder):
    moved = np.ndarray(array.shape, array.dtype, np.empty(array.nbytes + 1, np.uint8)[1:].data)
    moved[...] = array
    return moved


KINDS = {
    "memory map": memory_map,
    "read-only": read_only,
    "subclass": lambda array, _: array.view(Silent),
    "record array": lambda array, _: array.view(np.recarray),
    "strided": strided,
    "reversed": lambda array, _: np.flip(np.flip(array).copy()),
    "column by column": lambda array, _: np.asfortranarray(array),
    "not aligned": not_aligned,
    "foreign byte order": lambda array, _: array.astype(array.dtype.newbyteorder()),
}


def bits(array):
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def results(comm, logits, targets, path):
    """The results of the functions for the arguments, each as bits or as the error."""
    classes = {"comm": comm, "num_classes": 7 * comm.size}
    calls = {
        "value_and_grad": lambda: pce.softmax_cross_entropy_value_and_grad(
            logits, targets, comm=comm, num_classes=7 * comm.size
        ),
        "loss": lambda: [pce.softmax_cross_entropy(logits, targets, **classes)],
        "statistics": lambda: pce.class_statistics(logits, targets, **classes),
        "distribute": lambda: [pce.distribute(logits, mesh, data=Shard(1)).full()],
        "from_local": lambda: [pce.from_local(logits, mesh, data=Shard(0)).full()],
        "save": lambda: saved(),
    }

    def saved():
        pce.save(path, {"logits": pce.from_local(logits, mesh, data=Shard(0))})
        return [np.fromfile(path, np.uint8)]

    mesh, found = mesh_of(comm, comm.size), {}
    for name, call in calls.items():
        try:
            found[name] = [bits(np.asarray(each)) for each in call()]
        except TypeError as error:
            found[name] = str(error)
    return found


@pytest.mark.ranks(2)  # arguments are looked at on each rank alone, and two of them send
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_every_kind_count_as_copies(comm, kind, dtype, tmp_path):
    path = comm.bcast(tmp_path / "saved")
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((5, 7)).astype(dtype), rng.integers(7 * comm.size, size=5)
    plain = results(comm, logits.copy(), targets.copy(), path)
    of_targets = results(comm, logits.copy(), KINDS[kind](targets.copy(), tmp_path), path)
    of_logits = results(comm, KINDS[kind](logits.copy(), tmp_path), targets, path)
    assert not any(isinstance(each, str) for each in plain.values()), plain
    assert of_targets == plain
    if kind == "foreign byte order":
        assert all(f"got {np.dtype(dtype).newbyteorder().str}" in text for text in of_logits.values()), of_logits
    else:
        assert of_logits == plain
