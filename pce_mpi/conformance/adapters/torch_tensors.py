"""NumPy arrays as tensors on the same memory, gradients from autograd, and a process group over the ranks of MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def loss_and_backward(loss: Any, inputs: Sequence[Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Return a loss that autograd recorded and its backward pass to the inputs, as a plain tensor or a list of them."""
    import torch

    def backward(dloss: Any) -> Any:
        upstream = tensor_of(dloss).to(loss.dtype).broadcast_to(loss.shape)
        try:  # with the graph kept for another backward pass
            gradients = torch.autograd.grad(loss, inputs, grad_outputs=upstream, retain_graph=True)
        except RuntimeError as error:  # torch.compile may have given away what the graph needs for that
            if "donated buffer" not in str(error):
                raise
            gradients = torch.autograd.grad(loss, inputs, grad_outputs=upstream)
        found = [each.detach() for each in gradients]
        return found if len(found) > 1 else found[0]

    return loss.detach(), backward


class ProcessGroup:
    """torch.distributed over gloo, with the ranks of an MPI communicator on one machine.

    The candidates of a process share the default group, which may be there before: the last one to stop leaves it, if
    the first one has made it.
    """

    _users = 0
    _made = False

    def __init__(self) -> None:
        self.started = False

    def start(self, comm: MPI.Intracomm) -> None:
        """Meet at a port that rank 0 finds free, and set the variables that torchrun sets; collective over `comm`.

        Raises `RuntimeError` on every rank if there is a default group of other ranks.
        """
        from torch import distributed

        if self.started:
            return
        is_there = distributed.is_available() and distributed.is_initialized()
        there = comm.allgather((distributed.get_rank(), distributed.get_world_size()) if is_there else None)
        if there == [None] * comm.size:
            os.environ |= {"RANK": str(comm.rank), "LOCAL_RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
            store_of: Any = distributed.TCPStore  # type: ignore[attr-defined,unused-ignore]  # not in __all__
            if comm.rank == 0:
                store = store_of("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                comm.bcast(store.port)
            else:
                store = store_of("127.0.0.1", comm.bcast(None))
            distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
            ProcessGroup._made = True
        elif there != [(rank, comm.size) for rank in range(comm.size)]:
            raise RuntimeError(
                f"the default process group of torch must have the {comm.size} ranks of the communicator, in their "
                f"order; (rank, size) is {there} on them: let the adapter start it"
            )
        ProcessGroup._users += 1
        self.started = True

    def stop(self) -> None:
        """Leave the group, if no other candidate needs it."""
        from torch import distributed

        if not self.started:
            return
        self.started = False
        ProcessGroup._users -= 1
        if ProcessGroup._made and not ProcessGroup._users:
            ProcessGroup._made = False
            distributed.destroy_process_group()
