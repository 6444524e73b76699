"""Tests that need a real GPU: streams of one's own, and more elements than 32 bits can count."""

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import dense
from ulps import FLOAT32, errors

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
        given = {"comm": comm, "num_classes": 1000 * comm.size}  # ranks may pass equal logits
        loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, chosen, **given)
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
