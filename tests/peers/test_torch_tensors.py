"""CPU tensors of torch's as logits, targets and out: wrapped, not copied."""

import numpy as np
import pytest
import torch

import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.arrays import as_array

ROWS, CLASSES = 5, 12


@pytest.fixture
def problem(comm):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, CLASSES, generator=generator)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    start, stop = pce.shard_range(CLASSES, comm.size, comm.rank)
    return logits, targets, slice(start, stop)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_torch_tensor_is_wrapped_without_copy(dtype):
    tensor = torch.zeros(3, 4, dtype=dtype)
    array = as_array(tensor, "logits")
    tensor[1, 2] = 1.5
    assert array.shape == (3, 4)
    assert float(array[1, 2]) == 1.5
    assert array.dtype.name == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tensors_give_numbers_of_arrays_they_hold(comm, problem, dtype):
    logits, targets, mine = problem
    logits = logits.to(dtype)
    found = pce.softmax_cross_entropy_value_and_grad(logits[:, mine], targets, comm=comm)
    loss, dlogits = (as_array(each, "a result") for each in found)
    expected, gradient = dense.softmax_cross_entropy_value_and_grad(logits.double().numpy(), targets.numpy())
    assert abs(loss - expected) <= 4 * np.finfo(loss.dtype).eps * abs(expected)
    # Entries are at most 1/ROWS. Arithmetic in the logits' own dtype may cost 4 ulp of that, wider arithmetic 1.
    ulps = 1 if dtype.itemsize == 2 else 4
    error = np.abs(dlogits.astype(np.float64) - gradient[:, mine]).max(initial=0.0)
    assert error <= ulps * torch.finfo(dtype).eps * 2.0 ** np.floor(np.log2(1 / ROWS))


def test_gradient_is_written_into_the_given_tensor(comm, problem):
    logits, targets, mine = problem
    shard = logits[:, mine].clone()
    out = torch.full_like(shard, 7.0)
    _, returned = pce.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm, out=out)
    _, expected = pce.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm)
    _, in_place = pce.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm, out=shard)
    assert returned is out and in_place is shard
    assert torch.equal(out, expected)
    assert torch.equal(shard, expected)


def test_tensor_that_requires_grad_is_refused_everywhere(comm, problem):
    logits, targets, mine = problem
    shard = logits[:, mine].clone().requires_grad_(comm.rank == comm.size - 1)
    with pytest.raises(TypeError, match=r"logits cannot be taken as an array: .*requires? grad"):
        pce.softmax_cross_entropy(shard, targets, comm=comm)
    loss = pce.softmax_cross_entropy(shard.detach(), targets, comm=comm)
    assert torch.isfinite(loss)
