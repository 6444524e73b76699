"""DTensors, and all-reduces that autograd differentiates, with the gradients of local tensors.

A partial DTensor is one of `from_local`; `whole` asks for gradients of the array that its terms make, `terms` for those
of the terms.
"""

from types import SimpleNamespace

import torch
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from pce_mpi.conformance import Gradient, Offer
from pce_mpi.conformance.candidates.torch_tensors import ProcessGroup, loss_and_backward, tensor_of


class InTorch:
    """A function of this rank's tensor, which autograd differentiates; `computes` and `partial` as in `Offer`."""

    def __init__(self, function, computes, **declared):
        self._function, self._group = function, ProcessGroup()
        self.offer = Offer(
            kind="placement",
            computes=computes,
            dtypes=("float32", "bfloat16"),
            gradient=Gradient.BACKWARD,
            **{"shards": "chunks"} | declared,
        )

    def start(self, comm):
        self._group.start(comm)
        self._mesh = init_device_mesh("cpu", (comm.size,))

    def stop(self):
        self._group.stop()

    def __call__(self, array, *, splits, comm):
        local = tensor_of(array).requires_grad_()
        return loss_and_backward(self._function(local, self._mesh, splits[-1]), [local])


def of_shards(function):
    """A function of a DTensor whose last axis is sharded."""

    def of_local(local, mesh, length):
        shape = (len(local), length)
        x = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=torch.Size(shape), stride=(length, 1))
        return function(x).full_tensor()

    return of_local


def of_terms(op):
    """A partial DTensor that is brought to all ranks."""
    return lambda local, mesh, length: DTensor.from_local(local[:, 0], mesh, [Partial(op)]).full_tensor()


def reduced_by(op):
    """An all-reduce of `torch.distributed.nn`."""
    return lambda local, mesh, length: all_reduce(local[:, 0], op)


def cut(local, mesh, length):
    return DTensor.from_local(local, mesh, [Replicate()]).redistribute(mesh, [Shard(1)]).to_local()


DTENSOR = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "prod": lambda x: x.prod(1),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "norm-inf": lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "replicate": lambda x: x,
}
OPERATORS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "prod": ReduceOp.PRODUCT}
PARTIAL = {"sum": "sum", "mean": "avg", "max": "max", "min": "min", "prod": "product"}


def named(functions, **declared):
    """Candidates by the names of what they compute."""
    return SimpleNamespace(
        **{name.replace("-", "_"): InTorch(each, name, **declared) for name, each in functions.items()}
    )


dtensor = named({name: of_shards(function) for name, function in DTENSOR.items()} | {"shard": cut})
whole = named({name: of_terms(op) for name, op in PARTIAL.items()}, partial="array")
terms = named({name: of_terms(op) for name, op in PARTIAL.items()}, partial="term")
reduced = named({name: reduced_by(op) for name, op in OPERATORS.items()}, partial="term")
