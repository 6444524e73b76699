"""Tests that need a real GPU: clusters of blocks, streams of one's own, and more elements than 32 bits can count."""

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.loss.kernels import kernels_of
from ulps import FLOAT32, HALF, errors

GIB = 2**30


@pytest.fixture
def gpu(request, cupy):
    """CuPy itself."""
    if not request.config.option.gpu:
        pytest.skip("needs a GPU, and pytest --gpu")
    yield cupy
    cupy.get_default_memory_pool().free_all_blocks()


def memory_for(gpu, needed):
    gpu.get_default_memory_pool().free_all_blocks()
    free, _ = gpu.cuda.runtime.memGetInfo()
    if free < needed:
        pytest.skip(f"needs {needed / GIB:.1f} GiB of a GPU's memory, {free / GIB:.1f} are free")


def test_rank_works_on_its_own_gpu(comm, gpu):
    # All ranks of the tests are on one host.
    assert gpu.cuda.Device().id == comm.rank % gpu.cuda.runtime.getDeviceCount()


# Clusters


CLUSTER = r"""
extern "C" __global__ void __cluster_dims__(8) sizes(int* found) {
  unsigned size, rank;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0) found[blockIdx.x] = 100 * size + rank;
}
"""


@pytest.fixture
def clusters(gpu):
    capability = int(gpu.cuda.Device().compute_capability)
    if capability < 90:
        pytest.skip(f"clusters need compute capability 9.0, this GPU has {capability / 10}")
    return gpu


def test_kernels_with_cluster_size_are_launched_as_clusters(clusters):
    found = clusters.zeros(24, np.int32)
    clusters.RawKernel(CLUSTER, "sizes", options=("-std=c++17",))((24, 1, 1), (512, 1, 1), (found,))
    assert clusters.asnumpy(found).tolist() == [800 + rank for rank in range(8)] * 3


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(np.float16, HALF), (ml_dtypes.bfloat16, HALF), (np.float32, FLOAT32)],
    ids=["f2", "bf16", "f4"],
)
@pytest.mark.parametrize("classes", [16_384, 32_768, 65_536, 98_304])
def test_rows_over_blocks_have_gradient_of_two_passes(clusters, classes, dtype, limit):
    rng = np.random.default_rng(classes)
    host = rng.normal(0, 3, (300, classes)).astype(dtype)
    logits, targets = clusters.asarray(host), clusters.asarray(rng.integers(0, classes, 300))
    assert kernels_of(logits).fused_fits(logits[:, :, None], np.dtype(np.float32))
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, targets, reduction="none")
    two_passes, residuals = pce.softmax_cross_entropy_forward(logits, targets, reduction="none")
    expected = pce.softmax_cross_entropy_backward(1.0, residuals)
    loss, two_passes, gradient, expected = map(clusters.asnumpy, (loss, two_passes, gradient, expected))
    # Each of the two is allowed its own errors.
    assert errors(loss, two_passes, np.float32).max() <= 2 * FLOAT32
    wide = expected.astype(np.float64)
    size = None if limit == HALF else np.broadcast_to(np.abs(wide).max(axis=1, keepdims=True), wide.shape)
    assert errors(gradient, wide, dtype, size).max() <= 2 * limit


# Streams


def test_work_waits_for_stream_in_use(comm, gpu):
    rng = np.random.default_rng(1)
    host, targets = rng.standard_normal((64, 1000), np.float32), rng.integers(0, 1000 * comm.size, 64)
    logits, chosen = gpu.zeros((64, 1000), np.float32), gpu.asarray(targets)
    values, ballast = gpu.asarray(host), gpu.ones(GIB // 4, np.float32)
    gpu.cuda.Device().synchronize()
    stream = gpu.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(50):  # some 20 ms, after which the logits are what they should be
            ballast += 1.0
        logits[...] = values
        loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, chosen, comm=comm)
        arrived = gpu.asnumpy(loss), gpu.asnumpy(gradient)
    expected, whole = dense.softmax_cross_entropy_value_and_grad(np.concatenate([host] * comm.size, axis=1), targets)
    mine = whole[:, 1000 * comm.rank : 1000 * (comm.rank + 1)]
    size = np.broadcast_to(np.abs(whole).max(axis=1, keepdims=True), mine.shape)
    assert errors(arrived[0], expected, np.float32).max() <= FLOAT32
    assert errors(arrived[1], mine, np.float32, size).max() <= FLOAT32


# More elements than 2**31


@pytest.mark.parametrize(("rows", "classes"), [(2**20 + 1, 2048), (33, 2**26 + 8)], ids=["short", "long"])
@pytest.mark.parametrize("way", ["value_and_grad", "forward and backward"])
def test_logits_of_more_than_2_to_31_elements(gpu, rows, classes, way):
    # float32, as the gradients of so many classes are too small for half of it; and in place.
    memory_for(gpu, 3 * 4 * rows * classes // 2)
    logits = gpu.zeros((rows, classes), np.float32)
    columns = np.random.default_rng(2).integers(0, classes, rows)
    targets = gpu.asarray(columns)
    each = gpu.arange(rows)
    logits[each, targets] = 3.0
    others = classes - 1
    if way == "value_and_grad":
        loss, _ = pce.softmax_cross_entropy_value_and_grad(logits, targets, out=logits, reduction="none")
    else:
        loss, residuals = pce.softmax_cross_entropy_forward(logits, targets, reduction="none")
        pce.softmax_cross_entropy_backward(1.0, residuals, out=logits)
    total = np.exp(3.0) + others
    assert errors(gpu.asnumpy(loss), np.full(rows, np.log(total) - 3.0), np.float32).max() <= FLOAT32
    at_target = gpu.asnumpy(logits[each, targets])
    assert errors(at_target, np.full(rows, -others / total), np.float32).max() <= FLOAT32
    elsewhere = float(logits[0, (columns[0] + 1) % classes])
    assert errors(elsewhere, 1 / total, np.float32) <= FLOAT32
    logits[each, targets] = elsewhere
    step = max(1, 2**28 // classes)
    assert all((logits[first : first + step] == elsewhere).all() for first in range(0, rows, step))
