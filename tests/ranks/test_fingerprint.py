"""Fingerprints of global arrays: the same in any placement, another one for any other bit."""

import hashlib
import json

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Replicate, Shard
from ranks.grids import mesh_of, squarest
from ranks.placed import error_of

# Three axes that no number of ranks divides, fewer elements than ranks, one element, and none.
SHAPES = [(5, 3, 7), (2,), (), (0, 4)]
DTYPES = [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_]


def by_definition(arrays):
    """The fingerprint of whole arrays, one element after the other."""

    def mixed(x):
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    found = []
    for name, array in arrays.items():
        bits = array.reshape(-1).view(f"u{array.dtype.itemsize}").tolist()
        total = sum(
            mixed(element ^ mixed(place ^ salt)) << shift
            for place, element in enumerate(bits)
            for shift, salt in ((0, 0x243F6A8885A308D3), (64, 0x13198A2E03707344))
        )
        found.append([name, array.dtype.name, list(array.shape), f"{total % 2**128:032x}"])
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()


def placements_of(mesh, ndim):
    """Nothing sharded, each axis over each dim, and one axis over all dims."""
    yield {}
    for axis in range(ndim):
        yield from ({dim: Shard(axis)} for dim in mesh.dims)
        yield dict.fromkeys(mesh.dims, Shard(axis))


@pytest.mark.ranks(3, 4)  # shards of several lengths, and two dims
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fingerprint_is_that_of_definition_anywhere(comm, shape, dtype):
    whole = (100 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    mesh = mesh_of(comm, *squarest(comm.size))
    expected = by_definition({"0": np.asarray(whole)})
    found = {pce.fingerprint(pce.distribute(whole, mesh, **placed)) for placed in placements_of(mesh, whole.ndim)}
    assert found == {expected}


def test_uneven_shards_and_partials_have_same_fingerprint(comm):
    mesh = mesh_of(comm, comm.size)
    whole = np.arange(24.0).reshape(6, 4)
    first = 6 if comm.rank == 0 else 0
    uneven = pce.from_local(whole[:first], mesh, data=Shard(0))
    partial = pce.from_local(whole * (comm.rank == 0), mesh, data=Partial("sum"))
    assert pce.fingerprint(uneven) == pce.fingerprint(partial) == by_definition({"0": whole})


def test_names_belong_to_fingerprint_and_order_does_not(comm):
    mesh = mesh_of(comm, comm.size)
    w, b = (pce.distribute(np.full(3, value), mesh) for value in (1.0, 2.0))
    both = pce.fingerprint({"w": w, "b": b})
    assert both == pce.fingerprint({"b": b, "w": w}) == by_definition({"b": np.full(3, 2.0), "w": np.full(3, 1.0)})
    assert len({both, pce.fingerprint({"w": b, "b": w}), pce.fingerprint([w, b]), pce.fingerprint([b, w])}) == 4
    assert len(both) == 64


@pytest.mark.parametrize("change", ["sign of zero", "two swapped", "one bit", "shape", "dtype"])
def test_any_change_gives_another_fingerprint(comm, change):
    mesh = mesh_of(comm, comm.size)
    array = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    other = {
        "sign of zero": np.array([-0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        "two swapped": array[[0, 2, 1, 3, 4, 5]],
        "one bit": np.where(array == 3.0, np.nextafter(3.0, 4.0), array),
        "shape": array.reshape(2, 3),
        "dtype": array.view(np.int64),
    }[change]
    first, second = (pce.fingerprint(pce.distribute(each, mesh, data=Shard(0))) for each in (array, other))
    assert first != second


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16], ids=lambda dtype: dtype.__name__)
def test_all_nans_are_one(comm, dtype):
    mesh = mesh_of(comm, comm.size)
    positive, negative = (np.array([np.copysign(np.nan, sign), 1.0], dtype) for sign in (1, -1))
    infinite = np.array([np.inf, 1.0], dtype)
    first, second, third = (pce.fingerprint(pce.distribute(each, mesh)) for each in (positive, negative, infinite))
    assert positive.tobytes() != negative.tobytes()
    assert first == second != third
    # A sum of them has the bits of one or the other, in MPI not the same on every rank.
    terms = pce.from_local(positive if comm.rank % 2 else negative, mesh, data=Partial("avg"))
    assert pce.fingerprint(terms) == first


def test_elements_are_hashed_in_parts(comm, monkeypatch):
    monkeypatch.setattr("pce_mpi.distributed.fingerprint._ELEMENTS", 5)
    whole = np.arange(77.0).reshape(7, 11)
    x = pce.distribute(whole, mesh_of(comm, comm.size), data=Shard(1))
    assert pce.fingerprint(x) == by_definition({"0": whole})


@pytest.mark.ranks(2, 3, 4)
def test_replicas_that_differ_are_named(comm):
    mesh = mesh_of(comm, comm.size)
    x = pce.distribute(np.arange(4.0), mesh, data=Replicate())
    x.local[2] += comm.rank == comm.size - 1
    error = error_of(lambda: pce.fingerprint({"w": x}))
    assert error[0] == "ValueError" and "replicas differ" in error[1] and f"(rank {comm.size - 1})" in error[1]


def test_fingerprint_sends_one_reduction(comm):
    mesh = mesh_of(comm, comm.size)
    arrays = [pce.distribute(np.arange(9.0), mesh, data=Shard(0)), pce.distribute(np.ones(3), mesh)]
    with pce.trace() as sent:
        pce.fingerprint(arrays)
    assert [(event.collective, event.bytes) for event in sent.select()] == [("all_reduce", 2 * 64)]


@pytest.mark.parametrize("wrong", ["array", "nothing", "other mesh"])
def test_wrong_arrays_raise_on_every_rank(comm, wrong):
    mesh, other = (mesh_of(comm, *sizes) for sizes in ((comm.size,), (1, comm.size)))
    x = pce.distribute(np.ones(3), mesh)
    last = comm.rank == comm.size - 1
    given, kind, text = {
        "array": ([x, np.ones(3) if last else x], "TypeError", "fingerprint takes distributed arrays, but '1' is"),
        "nothing": ([], "TypeError", "fingerprint takes distributed arrays, got []"),
        "other mesh": ([x, pce.distribute(np.ones(3), other)], "ValueError", "but '1' is on another one"),
    }[wrong]
    found = error_of(lambda: pce.fingerprint(given))
    assert found[0] == kind and text in found[1]


def test_device_has_fingerprint_of_host(comm, cupy):
    mesh = mesh_of(comm, comm.size)
    whole = np.arange(10.0).reshape(5, 2)
    on_device = pce.distribute(cupy.asarray(whole), mesh, data=Shard(0))
    assert pce.fingerprint(on_device) == by_definition({"0": whole})
