"""PyTorch's dense cross entropy of the gathered logits, in their own dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.conformance.adapters import check_classes
from pce_mpi.conformance.adapters.torch_tensors import class_dim, loss_and_backward, tensor_of
from pce_mpi.conformance.offers import Gradient, Offer

if TYPE_CHECKING:
    from mpi4py import MPI


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

    def start(self, comm: MPI.Intracomm) -> None:
        """Import torch, so that the report has its version."""
        import torch  # noqa: F401

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
        from torch.nn import functional

        def gathered(shard: Any, along: int) -> Any:
            return tensor_of(np.concatenate(comm.allgather(np.asarray(shard)), axis=along))

        where = class_dim(logits.ndim)
        x = gathered(logits, axis).requires_grad_()
        check_classes(x.shape[axis], num_classes)
        probabilities = targets.ndim == logits.ndim
        t = gathered(targets, axis).movedim(axis, where) if probabilities else tensor_of(targets)
        w = None if weight is None else gathered(weight, 0)
        loss, backward = loss_and_backward(functional.cross_entropy(x.movedim(axis, where), t, w, **options), x)
        local = logits.shape[axis]
        return loss, lambda dloss: backward(dloss).narrow(axis, class_start, local)
