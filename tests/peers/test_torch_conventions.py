"""PyTorch's dense cross entropy is the convention: the same numbers, option by option, except where ours are documented
to differ."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional

import pce_mpi as pce
from pce_mpi import dense

# Both sides work in float64 here, PyTorch with one sum over all classes: a few ulp of the largest entry.
TOLERANCE = 64 * np.finfo(np.float64).eps

SHAPES = {"rows": (11, 7), "one row": (7,), "images": (3, 7, 2, 5), "volumes": (2, 7, 2, 3, 2)}


def torch_value_and_grad(logits, targets, *, axis, weight, dloss=None, **options):
    x = torch.from_numpy(logits).movedim(axis, 1 if logits.ndim > 1 else 0).clone().requires_grad_()
    t = torch.from_numpy(targets)
    if targets.dtype.kind == "f":
        t = t.movedim(axis, 1 if logits.ndim > 1 else 0)
    loss = functional.cross_entropy(x, t, weight=None if weight is None else torch.from_numpy(weight), **options)
    loss.sum().backward()
    return loss.detach().numpy(), x.grad.movedim(1 if logits.ndim > 1 else 0, axis).numpy()


def class_axis(shape):
    return 0 if len(shape) == 1 else 1


def problem(shape, probabilities, seed=0):
    rng = np.random.default_rng(seed)
    axis = class_axis(shape)
    logits = 3 * rng.standard_normal(shape)
    weight = rng.uniform(0.5, 2, shape[axis])
    if probabilities:
        return logits, rng.random(shape), weight
    targets = rng.integers(0, shape[axis], shape[:axis] + shape[axis + 1 :])
    if targets.size > 2:
        targets.flat[::3] = -100
    return logits, targets, weight


def shard(array, axis, comm):
    index = [slice(None)] * array.ndim
    index[axis] = slice(*pce.shard_range(array.shape[axis], comm.size, comm.rank))
    return array[tuple(index)]


def close(got, expected):
    scale = np.abs(expected).max(initial=np.finfo(np.float64).tiny)
    return got.shape == expected.shape and np.abs(got - expected).max(initial=0.0) <= TOLERANCE * scale


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("probabilities", [False, True], ids=["class numbers", "probabilities"])
def test_every_option_means_what_it_means_to_torch(comm, shape, probabilities):
    logits, targets, weight = problem(shape, probabilities)
    axis = class_axis(shape)
    outcomes = []
    for reduction, smoothing, weighted in itertools.product(("none", "sum", "mean"), (0.0, 0.3, 1.0), (False, True)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        w = weight if weighted else None
        # One row has no axis to put channels on: torch takes (C,) then, and divides its mean by one row all the same.
        loss, gradient = torch_value_and_grad(logits, targets, axis=axis, weight=w, **options)
        got = pce.softmax_cross_entropy_value_and_grad(
            shard(logits, axis, comm),
            shard(targets, axis, comm) if probabilities else targets,
            weight=None if w is None else shard(w, 0, comm),
            axis=axis,
            comm=comm,
            **options,
        )
        oracle = dense.softmax_cross_entropy_value_and_grad(logits, targets, weight=w, axis=axis, **options)
        outcomes.append((options | {"weighted": weighted}, close(got[0], loss), close(oracle[0], loss)))
        outcomes.append(
            (options | {"weighted": weighted}, close(got[1], shard(gradient, axis, comm)), close(oracle[1], gradient))
        )
    assert [outcome for outcome in outcomes if not all(outcome[1:])] == []


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignore_index_inside_range_as_in_torch(comm, reduction):
    logits, targets, weight = problem((11, 7), False)
    targets[targets == -100] = 4
    options = {"ignore_index": 4, "reduction": reduction, "label_smoothing": 0.1}
    loss, gradient = torch_value_and_grad(logits, targets, axis=1, weight=weight, **options)
    got = pce.softmax_cross_entropy_value_and_grad(
        shard(logits, 1, comm), targets, weight=shard(weight, 0, comm), comm=comm, **options
    )
    assert close(got[0], loss)
    assert close(got[1], shard(gradient, 1, comm))


def test_ignored_rows_only_as_in_torch(comm):
    logits, targets = np.zeros((3, 7)), np.full(3, -100)
    loss, gradient = torch_value_and_grad(logits, targets, axis=1, weight=None, reduction="mean")
    got = pce.softmax_cross_entropy_value_and_grad(shard(logits, 1, comm), targets, comm=comm)
    assert np.isnan(loss) and np.isnan(got[0])
    assert not gradient.any() and not got[1].any()


def test_weights_of_sum_zero_as_in_torch(comm):
    logits, targets, weight = np.arange(21.0).reshape(3, 7), np.array([1, 1, 1]), np.ones(7)
    weight[1] = 0.0
    loss, gradient = torch_value_and_grad(logits, targets, axis=1, weight=weight, reduction="mean")
    got = pce.softmax_cross_entropy_value_and_grad(
        shard(logits, 1, comm), targets, weight=shard(weight, 0, comm), comm=comm
    )
    assert np.isnan(loss) and np.isnan(got[0])
    assert np.isnan(gradient).all() and np.isnan(got[1]).all()


def test_nan_in_ignored_row_spoils_torch_only(comm):
    logits, targets = np.zeros((2, 7)), np.array([-100, 3])
    logits[0, 5] = np.nan
    loss, gradient = torch_value_and_grad(logits, targets, axis=1, weight=None, reduction="mean")
    got = pce.softmax_cross_entropy_value_and_grad(shard(logits, 1, comm), targets, comm=comm)
    assert close(got[0], loss)
    assert np.isnan(gradient[0]).all() and not got[1][0].any()
    assert close(got[1][1], shard(gradient, 1, comm)[1])


def test_masked_class_of_probability_0_spoils_torch_only(comm):
    logits, targets = np.zeros((1, 7)), np.full((1, 7), 1 / 6)
    logits[0, 2], targets[0, 2] = -np.inf, 0.0
    loss, _ = torch_value_and_grad(logits, targets, axis=1, weight=None, reduction="mean")
    got = pce.softmax_cross_entropy(shard(logits, 1, comm), shard(targets, 1, comm), comm=comm)
    assert np.isnan(loss)
    assert abs(got - np.log(6)) <= TOLERANCE * np.log(6)


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.1, "betas": (0.5, 0.75), "eps": 0.01, "weight_decay": 0.3}], ids=["default", "all"]
)
def test_adamw_steps_as_that_of_torch(comm, options):
    rng = np.random.default_rng(2)
    values, gradients = rng.standard_normal((5, 3)), rng.standard_normal((6, 5, 3))
    theirs = torch.from_numpy(values.copy()).requires_grad_()
    ours = pce.distribute(values, pce.Mesh(comm, data=comm.size), requires_grad=True, data=pce.Shard(0))
    optimizers = torch.optim.AdamW([theirs], **options), pce.AdamW([ours], **options)
    for gradient in gradients:
        theirs.grad = torch.from_numpy(gradient)
        ours.grad = pce.distribute(gradient, ours.mesh, data=pce.Shard(0))
        for optimizer in optimizers:
            optimizer.step()
    np.testing.assert_allclose(ours.full(), theirs.detach().numpy(), rtol=1e-12, atol=1e-14)
