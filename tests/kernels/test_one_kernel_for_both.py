"""One kernel writes states and gradients, or two do where that cannot be; the numbers are right either way."""

import numpy as np
import pytest

from kernels.comparing import (
    assert_gradient,
    expected_gradient,
    expected_states,
    fused,
    options_of,
    row_gradient,
    write_gradient,
)
import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.loss.kernels.parameters import Transform
from pce_mpi.loss.softmax_state import StateFields
from ulps import FLOAT32, worst

SINGLE = np.dtype(np.float32)


def value_and_grad(cupy, logits, targets, **options):
    arrays = cupy.asarray(logits), cupy.asarray(targets)
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(*arrays, **options)
    return cupy.asnumpy(loss), cupy.asnumpy(gradient)


def assert_right(found, logits, targets, **options):
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(logits, targets, **options)
    assert worst(found[0], loss, SINGLE) <= FLOAT32
    assert worst(found[1], gradient, SINGLE, np.abs(gradient).max(axis=-1, keepdims=True)) <= FLOAT32


@pytest.mark.parametrize("scale", [2.0**-70, 2.0**70, 1e-37, 1e37])
def test_scale_beyond_float32_takes_two_kernels_in_float64(cuda, cupy, scale):
    logits = (np.random.default_rng(0).normal(0, 1, (3, 50)) / scale).astype(np.float32)
    targets = np.array([0, 49, 7])
    assert np.isfinite(logits).all()
    assert not cuda.fused_fits(cupy.asarray(logits[:, :, None]), SINGLE, Transform(scale))
    with np.errstate(over="ignore"):
        assert_right(
            value_and_grad(cupy, logits, targets, logit_scale=scale, reduction="sum"),
            logits,
            targets,
            logit_scale=scale,
            reduction="sum",
        )


@pytest.mark.parametrize("scale", [2.0**-64, 2.0**64])
def test_fused_kernel_takes_extreme_scales_of_float32(cuda, cupy, scale):
    logits = (np.random.default_rng(1).normal(0, 1, (3, 50)) / scale).astype(np.float32)
    assert cuda.fused_fits(cupy.asarray(logits[:, :, None]), SINGLE, Transform(scale))
    assert_right(
        value_and_grad(cupy, logits, np.array([0, 49, 7]), logit_scale=scale),
        logits,
        np.array([0, 49, 7]),
        logit_scale=scale,
    )


def refuse_clusters(cuda, monkeypatch):
    """Launches of the fused kernel fail as CuPy lets them, for clusters of blocks; how many blocks a row each had."""
    tried, launch = [], cuda._launch

    def refusing(kernel, *arguments):
        if kernel.file == "fused.cu":
            tried.append(kernel.name)
            if not kernel.name.endswith(", 1>"):
                raise RuntimeError("CUDA_ERROR_INVALID_CLUSTER_SIZE: planted")
        launch(kernel, *arguments)

    monkeypatch.setattr(cuda, "_devices_without_clusters", set())
    monkeypatch.setattr(cuda, "_launch", refusing)
    return tried


def test_failed_cluster_launch_takes_two_kernels_ever_after(cuda, stand_in, monkeypatch):
    tried = refuse_clusters(cuda, monkeypatch)
    logits = np.random.default_rng(2).normal(0, 3, (2, 12_289)).astype(np.float32)
    targets = np.array([12_288, -100])
    with pytest.warns(UserWarning, match=r"clusters of blocks cannot be launched.*CLUSTER_SIZE: planted"):
        first = value_and_grad(stand_in, logits, targets)
    again = value_and_grad(stand_in, logits, targets)
    assert_right(first, logits, targets)
    assert first[1].tobytes() == again[1].tobytes()
    assert tried == ["fill_states_and_write_gradient<float, 2>"]
    # In place, nothing had been written before it was refused.
    cuda._devices_without_clusters.clear()
    strided = stand_in.asarray(logits)
    with pytest.warns(UserWarning, match="cannot be launched"):
        pce.softmax_cross_entropy_value_and_grad(strided, stand_in.asarray(targets), out=strided)
    assert strided.get().tobytes() == first[1].tobytes()
    # Rows that fit one block have their kernel still.
    value_and_grad(stand_in, logits[:, :100], np.array([3, 99]))
    assert tried[2:] == ["fill_states_and_write_gradient<float, 1>"]


def test_launch_that_fails_without_cluster_raises(cuda, stand_in, monkeypatch):
    def failing(*_):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: planted")

    monkeypatch.setattr(cuda, "_launch", failing)
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS: planted"):
        value_and_grad(stand_in, np.zeros((2, 10), np.float32), np.array([0, 1]))


@pytest.mark.parametrize("out_dtype", [np.float32, np.float64])
def test_gradient_keeps_subnormal_entries(cuda, out_dtype):
    # Others have probabilities of e**-89 and less; -ftz=true, which CuPy compiles with, would make them 0.
    logits = np.random.default_rng(3).uniform(-4, 0, (2, 45, 1)).astype(np.float32)
    columns, fields, options = np.array([3, 44]), StateFields(), options_of(SINGLE)
    logits[[0, 1], columns] = 88.0
    expected = expected_states(logits, columns, fields, options)
    gradient = row_gradient(fields, expected, columns, np.ones(2, np.bool_))
    wanted = expected_gradient(logits, gradient, options)
    others = np.delete(wanted[0], 3)
    assert ((0 < others) & (others < 2.0**-126)).all()
    for write in (
        lambda out: write_gradient(cuda, out, logits, gradient, options),
        lambda out: fused(cuda, out, logits, columns, fields),
    ):
        out = np.zeros(logits.shape, out_dtype)
        write(out)
        assert_gradient(out, wanted, SINGLE)
