"""PyTorch's `loss_parallel`: cross entropy of a DTensor whose classes are sharded over the same ranks, by gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.conformance.adapters import check_classes
from pce_mpi.conformance.adapters.torch_tensors import ProcessGroup, class_dim, tensor_of
from pce_mpi.conformance.offers import Gradient, Offer

if TYPE_CHECKING:
    from mpi4py import MPI


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

    def __init__(self) -> None:
        self._group = ProcessGroup()
        self._mesh: Any = None
        # For the adapter alone: the candidate sends through torch.
        self._comm: Any = None

    def start(self, comm: MPI.Intracomm) -> None:
        """Start a process group, and a mesh of one dim over it."""
        self._group.start(comm)
        self._comm = comm.Dup()
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh = init_device_mesh("cpu", (comm.size,))

    def stop(self) -> None:
        """Leave the process group."""
        self._comm.Free()
        self._group.stop()

    def __call__(
        self,
        logits: Any,
        targets: Any,
        *,
        class_start: int,
        num_classes: int,
        comm: MPI.Intracomm,
        axis: int = -1,
        weight: Any = None,
        **options: Any,
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Return the loss and its backward pass, as tensors."""
        import torch
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import loss_parallel
        from torch.nn import functional

        # DTensor does not compare the shape that it is given with those of the shards.
        check_classes(sum(self._comm.allgather(logits.shape[axis])), num_classes)
        where = class_dim(logits.ndim)
        # Contiguous, as `distribute_tensor` makes it.
        local = tensor_of(logits).movedim(axis, where).contiguous()
        shape = torch.Size((*local.shape[:where], num_classes, *local.shape[where + 1 :]))
        strides = torch.empty(shape, device="meta").stride()
        x = DTensor.from_local(local, self._mesh, [Shard(where)], run_check=False, shape=shape, stride=strides)
        x.requires_grad_()
        w = None if weight is None else tensor_of(np.concatenate(self._comm.allgather(np.asarray(weight))))
        with loss_parallel():
            loss: Any = functional.cross_entropy(x, tensor_of(targets), w, **options)

        def backward(dloss: Any) -> Any:
            upstream = tensor_of(dloss).to(loss.dtype).broadcast_to(loss.shape)
            upstream = DTensor.from_local(upstream, self._mesh, [Replicate()], run_check=False)
            with loss_parallel():
                gradient: Any
                (gradient,) = torch.autograd.grad(loss, x, grad_outputs=upstream, retain_graph=True)
            return gradient.to_local().movedim(where, axis)

        return loss.to_local().detach(), backward
