"""Ways of arrays from a GPU to MPI and back: through pinned host memory, or handed over where they are."""

import gc

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

from pce_mpi import CollectiveTimeout
from pce_mpi.cli.info import gpu_of, take_gpu_of_rank
from pce_mpi.comm import collectives, communicators
from pce_mpi.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from pce_mpi.comm.communicators import channel_of
from pce_mpi.comm.library import gpu_aware
from pce_mpi.comm.tracing import cause
from pce_mpi.kernels.interface import SINGLE, Pass, StateFields, Transform
from pce_mpi.loss.passes import merge_of
from ranks.problems import softmax_states
import strict_cupy

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.uint8, np.int64]
SHAPES = [(), (0,), (3,), (2, 3), (2, 0, 3)]


@pytest.fixture(autouse=True)
def why():
    """The cause of every collective here."""
    with cause("a test", reason="to see what arrives"):
        yield


@pytest.fixture
def comm(comm, impatient):
    own = comm.Dup()
    yield own
    own.Free()


def forbid_staging(monkeypatch):
    def refused(*_):
        raise AssertionError("staged, where MPI takes arrays as they are")

    monkeypatch.setattr(strict_cupy.STAND_INS["cupyx"], "empty_pinned", refused)


def forbid_handing_over(monkeypatch):
    def refused(_):
        raise AssertionError("handed to MPI, which cannot take it")

    monkeypatch.setattr(strict_cupy.ndarray, "__cuda_array_interface__", property(refused))


@pytest.fixture(params=["staged", "handed over"])
def way(request, cupy, monkeypatch):
    """Both ways, on the stand-in each with what makes the other fail."""
    on_a_gpu = request.config.option.gpu and not request.config.option.cupy_on_cpu
    if on_a_gpu and request.param == "handed over" and not gpu_aware()[0]:
        pytest.skip("this MPI library takes no arrays on a GPU: run this with one that does, or PCE_MPI_GPU_AWARE=1")
    monkeypatch.setenv("PCE_MPI_GPU_AWARE", str(int(request.param == "handed over")))
    (forbid_staging if request.param == "handed over" else forbid_handing_over)(monkeypatch)
    if not on_a_gpu:
        # The memory is the host's, which Open MPI reduces too.
        monkeypatch.setattr(collectives, "reduces_on_gpus", lambda: True)
    return request.param


def drawn(rank, shape, dtype):
    return np.asarray(np.random.default_rng(1 + rank).integers(0, 4, shape)).astype(dtype)


def same(got, expected):
    return got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


@pytest.mark.ranks(2, 3)  # numbers of ranks that MPI joins in two ways
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_staged_collectives_equal_those_of_host(comm, cupy, way, shape, dtype):
    ranks = range(comm.size)

    def results(library):
        mine = library.asarray(drawn(comm.rank, shape, dtype))
        blocks = [library.asarray(drawn(comm.rank + to, shape, dtype)) for to in ranks]
        yield all_reduce(mine, comm, "sum")
        yield all_reduce(mine.copy(), comm, "sum", overwrite=True)
        yield from all_gather(mine, comm, [shape] * comm.size)
        yield from all_to_all(blocks, comm, [shape] * comm.size)
        yield reduce_scatter(blocks, comm, "sum")
        yield mine

    on_host, on_gpu = list(results(np)), list(results(cupy))
    assert all(isinstance(array, cupy.ndarray) for array in on_gpu)
    assert [same(cupy.asnumpy(got), expected) for got, expected in zip(on_gpu, on_host, strict=True)] == [True] * len(
        on_host
    )


def test_blocks_of_different_sizes_arrive_where_they_belong(comm, cupy, way):
    shapes = [((2, 0, 5, 1)[rank % 4], 3) for rank in range(comm.size)]
    mine = drawn(comm.rank, shapes[comm.rank], np.float32)
    gathered = all_gather(cupy.asarray(mine), comm, shapes)
    blocks = [cupy.asarray(drawn(10 * comm.rank + to, shapes[to], np.float32)) for to in range(comm.size)]
    exchanged = all_to_all(blocks, comm, [shapes[comm.rank]] * comm.size)
    reduced = reduce_scatter(blocks, comm, "sum")
    for rank, (one, other) in enumerate(zip(gathered, exchanged, strict=True)):
        assert same(cupy.asnumpy(one), drawn(rank, shapes[rank], np.float32))
        assert same(cupy.asnumpy(other), drawn(10 * rank + comm.rank, shapes[comm.rank], np.float32))
    expected = sum(drawn(10 * rank + comm.rank, shapes[comm.rank], np.float32) for rank in range(comm.size))
    assert same(cupy.asnumpy(reduced), expected)


def test_staged_arrays_may_have_any_memory_order(comm, cupy, way):
    whole = drawn(comm.rank, (4, 6), np.float64)
    for view in (lambda a: a[::2, ::3], lambda a: a.T, lambda a: a[::-1, ::-1]):
        mine = view(cupy.asarray(whole))
        expected = all_reduce(view(whole), comm, "sum")
        assert same(cupy.asnumpy(all_reduce(mine, comm, "sum")), np.ascontiguousarray(expected))
        assert np.array_equal(cupy.asnumpy(mine), view(whole))


STATE_FIELDS = [
    StateFields(),
    StateFields(held_weight=True, weighted_logit=True),
    StateFields(hold_largest=True, argmax=True, target=True, entropy=True),
]


@pytest.mark.parametrize("fields", STATE_FIELDS, ids=lambda fields: " ".join(fields.names))
@pytest.mark.parametrize("aware", ["0", "1"])
def test_states_on_gpu_merge_as_structured_ones_do(comm, cupy, monkeypatch, fields, aware):
    monkeypatch.setenv("PCE_MPI_GPU_AWARE", aware)
    merge = merge_of(Pass(fields, Transform(), SINGLE))
    for rows in (0, 5):
        mine = softmax_states(comm.rank, fields)[:rows]
        expected = all_reduce(mine, comm, merge)
        columns = cupy.asarray(mine.view(np.uint64).reshape(rows, fields.dtype.itemsize // 8))
        merged = all_reduce(columns, comm, merge, element=fields.dtype)
        assert cupy.asnumpy(merged).tobytes() == expected.tobytes()


def test_unsupported_reduction_is_staged_by_gpu_aware_mpi(comm, cupy, monkeypatch):
    monkeypatch.setenv("PCE_MPI_GPU_AWARE", "1")
    forbid_handing_over(monkeypatch)
    mine = cupy.asarray(np.full(3, float(comm.rank)))
    assert cupy.asnumpy(all_reduce(mine, comm, "max")).tolist() == [comm.size - 1.0] * 3
    monkeypatch.setattr(collectives, "reduces_on_gpus", lambda: False)  # Open MPI
    assert cupy.asnumpy(all_reduce(mine, comm, "sum")).tolist() == [sum(range(comm.size))] * 3
    blocks = [mine] * comm.size
    assert cupy.asnumpy(reduce_scatter(blocks, comm, "sum")).tolist() == [sum(range(comm.size))] * 3


def test_reduction_of_one_rank_stays_on_gpu(cupy, monkeypatch):
    forbid_staging(monkeypatch)
    mine = cupy.asarray(np.arange(6.0).reshape(2, 3))
    for more in ({}, {"element": StateFields().dtype}):
        result = all_reduce(mine, MPI.COMM_SELF, np.add, **more)
        assert np.array_equal(cupy.asnumpy(result), cupy.asnumpy(mine))
        assert result.data.ptr != mine.data.ptr


@pytest.mark.ranks(2)  # a rank has pinned memory of its own
def test_pinned_memory_is_taken_once_and_used_again(comm, stand_in, monkeypatch):
    monkeypatch.setenv("PCE_MPI_GPU_AWARE", "0")
    mine = stand_in.asarray(np.zeros(1021))

    def blocks():
        all_gather(mine, comm, [(1021,)] * comm.size)
        all_reduce(mine, comm, "max")
        gc.collect()
        return {size: len(free) for size, free in strict_cupy.FREE.items()}

    assert blocks() == blocks() == blocks()


class NeverDone:
    """A request of a collective that some rank never joins."""

    @staticmethod
    def Test():
        return False


class Silent:
    """A communicator on which nobody answers; keeps what it was given to write to."""

    def __init__(self):
        self.buffers = []

    def Iallgatherv(self, sent, received):
        self.buffers += [sent.ctypes.data, received[0].ctypes.data]
        return NeverDone()

    def Iprobe(self, *_):
        return False


def test_timed_out_memory_is_not_used_again(stand_in, monkeypatch):
    monkeypatch.setenv("PCE_MPI_TIMEOUT", "0.01")
    monkeypatch.setenv("PCE_MPI_GPU_AWARE", "0")
    monkeypatch.setattr(communicators, "_abandoned", [])  # nothing here would ever end it
    comm, silent = MPI.COMM_SELF.Dup(), Silent()
    opened = channel_of(comm, "a test")
    monkeypatch.setattr(opened, "comm", silent)
    mine = stand_in.asarray(np.zeros(77))
    with pytest.raises(CollectiveTimeout) as caught:
        all_gather(mine, comm, [(77,)])
    del caught
    gc.collect()
    assert len(silent.buffers) == 2
    again = [strict_cupy.empty_pinned(77) for _ in range(50)]
    assert not {array.ctypes.data for array in again} & set(silent.buffers)


def test_gpu_awareness_of_mpi_is_told_by_library(monkeypatch):
    monkeypatch.delenv("PCE_MPI_GPU_AWARE", raising=False)
    asked, why = gpu_aware()
    assert isinstance(asked, bool)
    assert "MPIX_Query_cuda_support" in why
    for told, aware in (("1", True), ("0", False)):
        monkeypatch.setenv("PCE_MPI_GPU_AWARE", told)
        assert gpu_aware() == (aware, f"PCE_MPI_GPU_AWARE={told}")
    monkeypatch.setenv("PCE_MPI_GPU_AWARE", "yes")
    with pytest.raises(ValueError, match="PCE_MPI_GPU_AWARE must be 0 or 1, got 'yes'"):
        gpu_aware()


# The GPU that a rank takes


def test_ranks_of_one_host_share_its_gpus_out(comm, stand_in):
    hosts = ["a", "b", "a", "a", "b", "a", "a"]
    assert [gpu_of(rank, hosts, 4) for rank in range(7)] == [0, 0, 1, 2, 1, 3, 0]
    taken = take_gpu_of_rank(comm)
    assert strict_cupy.Device.current == taken == comm.rank % 2
    assert take_gpu_of_rank(None) == 0
