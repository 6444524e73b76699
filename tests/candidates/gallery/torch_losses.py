"""PyTorch's own losses: `cross_entropy` of the gathered logits, and under `loss_parallel`; the head in chunks."""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel as in_parallel
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import cross_entropy, linear_cross_entropy

from pce_mpi.conformance import Gradient, Offer
from pce_mpi.conformance.candidates.torch_tensors import ProcessGroup, loss_and_backward, tensor_of


class TorchDense:
    """`torch.nn.functional.cross_entropy` of all classes on every rank, with this rank's part of the gradient."""

    offer = Offer(
        dtypes=("float16", "bfloat16", "float32", "float64"),
        options=("weight", "ignore_index", "label_smoothing"),
        reductions=("none", "sum", "mean"),
        probabilities=True,
        dims=(1, 2, 3, 4, 5),
        any_axis=True,
        shards="any",
        gradient=Gradient.BACKWARD,
    )

    def __call__(self, logits, targets, *, class_start, num_classes, comm, axis=-1, weight=None, **options):
        where = _class_dim(logits.ndim)
        x = _gathered(comm, logits, axis).requires_grad_()
        assert x.shape[axis] == num_classes, "these are not all classes"
        probabilities = targets.ndim == logits.ndim
        t = _gathered(comm, targets, axis).movedim(axis, where) if probabilities else tensor_of(targets)
        w = None if weight is None else _gathered(comm, weight, 0)
        loss, backward = loss_and_backward(cross_entropy(x.movedim(axis, where), t, w, **options), [x])
        local = logits.shape[axis]
        return loss, lambda dloss: backward(dloss).narrow(axis, class_start, local)


class TorchLinear:
    """`linear_cross_entropy` of all classes on every rank, in chunks of rows, as its default options say."""

    offer = Offer(
        kind="linear",
        dtypes=("bfloat16", "float16", "float32", "float64"),
        options=("weight", "ignore_index", "bias"),
        reductions=("none", "mean", "sum"),
        gradient=Gradient.BACKWARD,
    )

    def __call__(self, hidden, w, targets, *, class_start, num_classes, comm, bias=None, weight=None, **options):
        weight, bias = (None if each is None else _gathered(comm, each, 0) for each in (weight, bias))
        inputs = [tensor_of(hidden), _gathered(comm, w, -1).T.contiguous(), *([] if bias is None else [bias])]
        assert len(inputs[1]) == num_classes, "these are not all classes"
        for each in inputs:
            each.requires_grad_()
        options |= {"linear_bias": bias, "weight": weight, "options": LinearCrossEntropyOptions()}
        loss, backward = loss_and_backward(linear_cross_entropy(*inputs[:2], tensor_of(targets), **options), inputs)

        def of_shard(dloss):
            dhidden, *others = backward(dloss)
            dw, *dbias = (each[class_start : class_start + w.shape[1]] for each in others)
            return dhidden, dw.T, *dbias

        return loss, of_shard


class TorchLossParallel:
    """`cross_entropy` and its backward pass inside `torch.distributed.tensor.parallel.loss_parallel()`.

    The offer is that of its documentation in PyTorch 2.13: class numbers, no label smoothing, the whole weights on
    every rank, shards as `torch.chunk` makes them (some may be empty).
    """

    offer = Offer(
        dtypes=("float16", "bfloat16", "float32", "float64"),
        options=("weight", "ignore_index"),
        reductions=("none", "sum", "mean"),
        dims=(1, 2, 3, 4, 5),
        any_axis=True,
        shards="chunks",
        gradient=Gradient.BACKWARD,
        strided=False,
    )

    def __init__(self):
        self._group = ProcessGroup()

    def start(self, comm):
        self._group.start(comm)
        self._comm = comm.Dup()  # the candidate sends through torch
        self._mesh = init_device_mesh("cpu", (comm.size,))

    def stop(self):
        self._comm.Free()
        self._group.stop()

    def __call__(self, logits, targets, *, class_start, num_classes, comm, axis=-1, weight=None, **options):
        # DTensor does not compare the shape that it is given with those of the shards.
        there = sum(self._comm.allgather(logits.shape[axis]))
        assert there == num_classes, "these are not all classes"
        where = _class_dim(logits.ndim)
        # Contiguous, as `distribute_tensor` makes it.
        local = tensor_of(logits).movedim(axis, where).contiguous()
        shape = torch.Size((*local.shape[:where], num_classes, *local.shape[where + 1 :]))
        strides = torch.empty(shape, device="meta").stride()
        x = DTensor.from_local(local, self._mesh, [Shard(where)], run_check=False, shape=shape, stride=strides)
        x.requires_grad_()
        w = None if weight is None else tensor_of(np.concatenate(self._comm.allgather(np.asarray(weight))))
        with in_parallel():
            loss = cross_entropy(x, tensor_of(targets), w, **options)

        def backward(dloss):
            upstream = tensor_of(dloss).to(loss.dtype).broadcast_to(loss.shape)
            upstream = DTensor.from_local(upstream, self._mesh, [Replicate()], run_check=False)
            with in_parallel():
                (gradient,) = torch.autograd.grad(loss, x, grad_outputs=upstream, retain_graph=True)
            return gradient.to_local().movedim(where, axis)

        return loss.to_local().detach(), backward


def _gathered(comm, shard, along):
    return tensor_of(np.concatenate(comm.allgather(np.asarray(shard)), axis=along))


def _class_dim(dims):
    """Return the class dim of `cross_entropy`: (C,), (N, C) or (N, C, d1, ...)."""
    return 0 if dims == 1 else 1


dense, linear, loss_parallel = TorchDense(), TorchLinear(), TorchLossParallel()
