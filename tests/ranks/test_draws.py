"""Random numbers are functions of seed and place alone: the same bits on any mesh, and no rank computes another's."""

import hashlib
import json
import math
import tracemalloc

import ml_dtypes
from mpi4py import MPI
import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Replicate, Shard
from pce_mpi.exact import philox
from ranks.grids import mesh_of, placements_of, squarest
from ranks.placed import traced, whole_of

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
DIGESTS = {
    "normal float16": "f132cb17e80580db",
    "normal bfloat16": "54481fabd84fd43f",
    "normal float32": "33f3a0b6b751bdf2",
    "normal float64": "a22ee95bbbc3549c",
    "uniform float16": "289bdfad06e87bb6",
    "uniform bfloat16": "ccac2069f3dbde9d",
    "uniform float32": "c038010511683219",
    "uniform float64": "dbb2ddc8b8fe7691",
}
DRAWS = {
    "normal": lambda *given, **more: pce.normal(*given, loc=0.5, scale=3.0, **more),
    "uniform": lambda *given, **more: pce.uniform(*given, low=-0.5, high=3.0, **more),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def alone():
    return mesh_of(MPI.COMM_SELF, 1)


def generated(index, seed):
    """The two numbers of 53 bits for an index, by the definition in whole numbers."""
    digest = int.from_bytes(hashlib.blake2b(json.dumps(seed).encode(), digest_size=16).digest(), "little")
    key, word = [digest % 2**32, digest // 2**32 % 2**32], 2**32
    a, b, c, d = index % word, index // word, digest // 2**64 % word, digest // 2**96
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q // word ^ b ^ key[0], q % word, p // word ^ d ^ key[1], p % word
        key = [(key[0] + 0x9E3779B9) % word, (key[1] + 0xBB67AE85) % word]
    return (a + word * b) >> 11, (c + word * d) >> 11


# The vectors of the paper's library, Random123 (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_generator_gives_published_vectors(counter, key, expected):
    found = philox.philox([np.array([word], np.uint64) for word in counter], key)
    assert [int(word[0]) for word in found] == expected


def test_numbers_are_those_of_definition():
    index = np.array([0, 1, 2, 3, 16383, 16384, 2**32 - 1, 2**32, 2**40 + 7, 2**62 + 1], np.uint64)
    stream = philox.stream_of([3, 1])
    normals, uniforms = philox.normal(index, stream), philox.uniform(index, stream)
    for place, normal, uniform in zip(index.tolist(), normals, uniforms, strict=True):
        u, v = generated(place, [3, 1])
        with mpmath.workdps(40):
            exact = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(u + 1) / 2**53)) * mpmath.cos(2 * mpmath.pi * v / 2**53)
            assert abs(normal - exact) <= 4e-15
        assert uniform == u / 2**53


@pytest.mark.ranks(3, 4)  # shards of several lengths, and two dims
@each_draw
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_draws_have_same_bits_at_any_placement(comm, draw, dtype):
    for shape in [(5, 3), (2, 1, 4), (7,), (), (0, 3)]:
        expected, found = draw(shape, alone(), seed=(3, 1), dtype=dtype).local, []
        for mesh in [mesh_of(comm, comm.size), mesh_of(comm, *squarest(comm.size))]:
            for first in placements_of(len(shape)):
                for last in placements_of(len(shape)):
                    placed = dict(zip(mesh.dims, (first, last), strict=False))
                    found.append((placed, whole_of(draw(shape, mesh, seed=(3, 1), dtype=dtype, **placed))))
        for placed, whole in found:
            assert (whole.dtype, whole.shape) == (np.dtype(dtype), shape)
            assert whole.tobytes() == expected.tobytes(), placed


def test_draws_keep_their_bits_for_ever():
    found = {}
    for name, draw in DRAWS.items():
        for dtype in DTYPES:
            bits = draw((211, 97), alone(), seed=5, dtype=dtype).local.tobytes()
            found[f"{name} {np.dtype(dtype).name}"] = hashlib.blake2b(bits, digest_size=8).hexdigest()
    assert found == DIGESTS


def test_draws_count_in_c_order_and_by_seed():
    mesh = alone()
    flat = pce.normal(40_000, mesh, seed=2).local
    assert pce.normal((200, 200), mesh, seed=[2]).local.tobytes() == flat.tobytes()
    assert pce.normal(100, mesh, seed=np.int64(2)).local.tobytes() == flat[:100].tobytes()
    others = [pce.normal(40_000, mesh, seed=seed).local for seed in (3, (2, 0), (0, 2), (2, 1), 2**70)]
    for other in others:
        assert abs(np.corrcoef(flat, other)[0, 1]) < 0.02
    assert len({other.tobytes() for other in others}) == 5


def test_draws_have_their_distributions():
    count = 2**18
    x = np.sort(pce.normal(count, alone(), seed=0, dtype=np.float64).local)
    u = np.sort(pce.uniform(count, alone(), seed=0, dtype=np.float64).local)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x[::16]])
    # The largest distance between the two distributions (Kolmogorov), which is below 1.63 / sqrt(count) in 99 of 100.
    bound = 1.63 / math.sqrt(count)
    assert np.abs(below - np.arange(0, count, 16) / count).max() < bound + 1 / count
    assert np.abs(u - np.arange(count) / count).max() < bound + 1 / count
    neighbours = pce.normal((count // 2, 2), alone(), seed=1).local
    assert abs(np.corrcoef(neighbours.T)[0, 1]) < 4 / math.sqrt(count // 2)
    assert 0.0 <= u[0] <= u[-1] < 1.0


@each_draw
def test_drawing_sends_nothing_and_makes_parameters(comm, draw):
    mesh = mesh_of(comm, comm.size)
    x, trace = traced(draw, (6, 4), mesh, seed=1, requires_grad=True, data=Shard(0))
    assert trace.events == []
    assert x.is_leaf
    assert x.requires_grad
    assert x.placements == {"data": Shard(0)}
    x.grad = pce.distribute(np.ones((6, 4), np.float32), mesh, data=Shard(0))
    before = x.local.copy()
    pce.SGD([x], lr=1.0).step()
    np.testing.assert_array_equal(x.local, before - 1)


def test_rank_never_holds_more_than_its_shard(comm, several):
    mesh, count = mesh_of(comm, comm.size), 2**20
    tracemalloc.start()
    x = pce.normal((2, count), mesh, seed=1, data=Shard(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert x.local.nbytes <= peak < x.local.nbytes + 2**22


@each_draw
def test_cupy_arrays_have_bits_of_numpy(comm, draw, cupy):
    mesh = mesh_of(comm, comm.size)
    on_host = draw((50, 7), mesh, seed=1, data=Shard(0))
    on_device = draw((50, 7), mesh, seed=1, data=Shard(0), xp=cupy)
    assert isinstance(on_device.local, cupy.ndarray)
    assert cupy.asnumpy(on_device.local).tobytes() == on_host.local.tobytes()


@pytest.mark.parametrize(
    ("draw", "shape", "options", "error", "text"),
    [
        ("normal", (2, -1), {"seed": 0}, ValueError, "shape must have no negative numbers"),
        ("normal", 2.5, {"seed": 0}, TypeError, "integer"),
        ("normal", 2, {"seed": -1}, ValueError, "seed must have no negative numbers, got -1"),
        ("normal", 2, {"seed": 0.5}, TypeError, "integer"),
        ("normal", 2, {"seed": "0"}, TypeError, "integer"),
        ("normal", 2, {"seed": 0, "scale": -1.0}, ValueError, "scale must not be negative, got -1.0"),
        ("normal", 2, {"seed": 0, "loc": math.nan}, ValueError, "loc must be finite, got nan"),
        ("normal", 2, {"seed": 0, "dtype": np.int32}, TypeError, "dtype must be a floating-point dtype, got int32"),
        ("uniform", 2, {"seed": 0, "low": 2.0}, ValueError, "low must not be above high"),
        ("uniform", 2, {"seed": 0, "low": -1e308, "high": 1e308}, ValueError, "by a finite difference"),
        ("normal", 2, {"seed": 0, "data": Partial("sum")}, ValueError, "random numbers cannot be Partial"),
        ("normal", 2, {"seed": 0, "model": Replicate()}, ValueError, "the mesh has no dim 'model'"),
    ],
)
def test_wrong_arguments_of_draws_are_errors(draw, shape, options, error, text):
    with pytest.raises(error, match=text):
        getattr(pce, draw)(shape, alone(), **options)


def test_ranks_that_draw_other_seeds_are_told(comm, several):
    mesh = pce.Mesh(comm, data=comm.size)
    x = pce.normal(4, mesh, seed=comm.rank, data=Shard(0))
    with pytest.raises(pce.CollectiveError, match="seed"):
        x.full()
