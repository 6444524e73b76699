"""NumPy arrays as tensors on the same memory, gradients from autograd, and a process group over the ranks of MPI."""

from __future__ import annotations

from collections.abc import Callable
import os
from typing import TYPE_CHECKING, Any
import warnings

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI


def tensor_of(array: Any) -> Any:
    """Return a tensor on the memory of a NumPy array, bfloat16 included; a copy if torch does not have its strides."""
    import torch

    array = np.asarray(array)
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def class_dim(dims: int) -> int:
    """Return the class dim of `cross_entropy`: (C,), (N, C) or (N, C, d1, ...)."""
    return 0 if dims == 1 else 1


def loss_and_backward(loss: Any, logits: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a loss that autograd recorded and its backward pass to `logits`, as plain tensors."""
    import torch

    def backward(dloss: Any) -> Any:
        upstream = tensor_of(dloss).to(loss.dtype).broadcast_to(loss.shape)
        (gradient,) = torch.autograd.grad(loss, logits, grad_outputs=upstream, retain_graph=True)
        return gradient.detach()

    return loss.detach(), backward


class ProcessGroup:
    """torch.distributed over gloo, with the ranks of an MPI communicator on one machine."""

    def start(self, comm: MPI.Intracomm) -> None:
        """Meet at a port that rank 0 finds free, and set the variables that torchrun sets; collective over `comm`."""
        from torch import distributed

        os.environ |= {"RANK": str(comm.rank), "LOCAL_RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}

        store_of: Any = distributed.TCPStore  # type: ignore[attr-defined,unused-ignore]  # public, and not in __all__
        if comm.rank == 0:
            store = store_of("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            comm.bcast(store.port)
        else:
            store = store_of("127.0.0.1", comm.bcast(None))
        distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def stop(self) -> None:
        """Leave the group."""
        from torch import distributed

        distributed.destroy_process_group()
