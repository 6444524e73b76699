"""The array library is the logits' own: CuPy arrays take the same path as NumPy's and come back as CuPy arrays.

There is no GPU here. A strict stand-in for CuPy shows that nothing mixes the two libraries on the way.
"""

import numpy as np
import pytest

import pce_mpi as pce

ROWS, CLASSES = 6, 13

OPTIONS = {
    "plain": {},
    "weight": {"weight": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "both": {"weight": True, "label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 10.0},
    "none": {"reduction": "none"},
    "float64": {"compute_dtype": np.float64},
}


def problem(comm, probabilities):
    rng = np.random.default_rng(3)
    logits = 3 * rng.standard_normal((ROWS, CLASSES), np.float32)
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    targets = rng.random((ROWS, CLASSES), np.float32)[:, mine] if probabilities else rng.integers(0, CLASSES, ROWS)
    if not probabilities:
        targets[2] = -100
    return logits[:, mine].copy(), targets, rng.uniform(0.5, 2, CLASSES)[mine]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("probabilities", [False, True], ids=["class numbers", "probabilities"])
def test_cupy_arrays_give_cupy_arrays_with_the_same_numbers(comm, cupy, probabilities, options):
    logits, targets, weight = problem(comm, probabilities)
    options = options | ({"weight": weight} if "weight" in options else {})
    on_device = options | ({"weight": cupy.asarray(weight)} if "weight" in options else {})
    device_logits, device_targets = cupy.asarray(logits), cupy.asarray(targets)

    loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, **options)
    got = pce.softmax_cross_entropy_value_and_grad(device_logits, device_targets, comm=comm, **on_device)
    _, residuals = pce.softmax_cross_entropy_forward(device_logits, device_targets, comm=comm, **on_device)
    dloss = cupy.asarray(np.ones(loss.shape))
    two_passes = pce.softmax_cross_entropy_backward(dloss, residuals)
    in_place = pce.softmax_cross_entropy_backward(1.0, residuals, out=device_logits)

    assert all(isinstance(array, cupy.ndarray) for array in (*got, two_passes, in_place))
    assert in_place is device_logits
    assert np.array_equal(cupy.asnumpy(got[0]), loss)
    assert np.array_equal(cupy.asnumpy(got[1]), gradient)
    # One pass and two passes round differently, but for the same exponentials.
    assert np.allclose(cupy.asnumpy(two_passes), gradient, rtol=0, atol=4 * np.finfo(np.float32).eps)
    assert np.array_equal(cupy.asnumpy(in_place), cupy.asnumpy(two_passes))


def test_class_statistics_of_cupy_arrays_are_cupy_arrays(comm, cupy):
    logits, targets, _ = problem(comm, False)
    expected = pce.class_statistics(logits, targets, comm=comm)
    got = pce.class_statistics(cupy.asarray(logits), cupy.asarray(targets), comm=comm)
    assert all(isinstance(field, cupy.ndarray) for field in got)
    for name, value in expected._asdict().items():
        assert np.array_equal(cupy.asnumpy(getattr(got, name)), value), name


def test_arrays_of_two_libraries_do_not_mix(comm, cupy):
    logits, targets, _ = problem(comm, True)
    with pytest.raises(TypeError, match="probability targets and logits must be arrays of the same library"):
        pce.softmax_cross_entropy(cupy.asarray(logits), targets, comm=comm)
    with pytest.raises(TypeError, match="out and logits must be arrays of the same library"):
        pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=cupy.asarray(logits))
    assert np.isfinite(pce.softmax_cross_entropy(logits, targets, comm=comm))
