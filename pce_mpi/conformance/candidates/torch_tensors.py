"""NumPy arrays as tensors on the same memory, gradients from autograd, and a process group over the ranks of MPI.

So a function on shards in `torch.distributed`, with the arguments of Megatron's vocabulary-parallel cross entropy, is a
candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import inspect
import os
from typing import TYPE_CHECKING, Any
import warnings

import numpy as np

from pce_mpi.conformance.candidates.offers import check_kind, offer_of, signature_of
from pce_mpi.conformance.problems.cases import OPTIONS, Gradient
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.kinds.statistics import NOT_DECLARED

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
        detached = [each.detach() for each in gradients]
        return detached if len(detached) > 1 else detached[0]

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


_GROUP_NAMES = ("group", "tp_group", "process_group")
_NO_GROUP = {*OPTIONS, *(fact for kind in KINDS.values() for fact in kind.facts), "reduction", "axis"}


class TorchShards:
    """`function(logits, targets, group, **options)`: this rank's tensors, all targets, and a gloo process group.

    The group is passed by keyword if a parameter is called `group`, `tp_group` or `process_group`, else third, if there
    is a third parameter that is no option; else not at all: it is the default group. Unless declared, the function
    returns one loss per row, as Megatron's does, or the losses of its parameter `reduction`; autograd differentiates
    them. It gets `class_start` and `num_classes`, or `context_ranks` and `micro_batches`, if it has parameters of these
    names; without `num_classes` it is not failed for logits that were gathered by mistake. Shards have equal
    lengths, unless it declares others.

    Raises `TypeError` if the function cannot be called so.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        check_kind(function)
        self._function = function
        self._group = ProcessGroup()
        signature = signature_of(function)
        parameters = signature.parameters
        self._group_name = next((name for name in _GROUP_NAMES if name in parameters), None)
        inferred: dict[str, Any] = {"shards": "equal", "gradient": Gradient.BACKWARD}
        inferred["num_classes"] = "num_classes" in parameters
        if "reduction" not in parameters:
            inferred["reductions"] = ("none",)
        self.offer = offer_of(function, **inferred)
        kind = KINDS[self.offer.kind]
        arrays, facts = list(kind.arrays), [name for name in kind.facts if name in parameters]
        self._left_out = set(kind.facts) - set(facts)
        self._group_last = self._group_name is None and _takes_a_group_after(len(arrays), signature)
        _check_call(signature, arrays + ["group"] * self._group_last, [self._group_name or "", *facts])

    def start(self, comm: MPI.Intracomm) -> None:
        """Start a gloo process group over the ranks of `comm`, and what the function starts itself, if not done yet."""
        if not self._group.started:
            self._group.start(comm)
            if hasattr(self._function, "start"):
                self._function.start(comm)

    def stop(self) -> None:
        """Stop what the function has started, and leave the process group."""
        if self._group.started:
            if hasattr(self._function, "stop"):
                self._function.stop()
            self._group.stop()

    def __call__(self, *arrays: Any, comm: MPI.Intracomm, **options: Any) -> Any:
        """Return the function's results; for a loss that autograd recorded, the loss and its backward pass."""
        from torch import distributed

        arguments = list(map(tensor_of, arrays))
        for name in self._left_out:
            del options[name]
        if "micro_batches" in options:
            options["micro_batches"] = [tensor_of(each) for each in options["micro_batches"]]
        for name in {"weight", "bias"} & options.keys():
            options[name] = tensor_of(options[name])
        if "support" in options:
            options["support"] = tuple(map(tensor_of, options["support"]))
        # Those that have a gradient: the logits, or hidden, w and the bias.
        inputs = arguments[: 2 if KINDS[self.offer.kind].arrays[0] == "hidden" else 1]
        inputs += [options["bias"]] if "bias" in options else []
        if self.offer.gradient is Gradient.BACKWARD:
            for each in inputs:
                each.requires_grad_()
        if self._group_name:
            options[self._group_name] = distributed.group.WORLD
        elif self._group_last:
            arguments.append(distributed.group.WORLD)
        result = self._function(*arguments, **options)
        # A result that is no tensor, or that autograd has not recorded, is judged as it is.
        recorded = self.offer.gradient is Gradient.BACKWARD and getattr(result, "requires_grad", False)
        return loss_and_backward(result, inputs) if recorded else result


def _by_place(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters that may be given by place."""
    keyword = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    return [each for each in signature.parameters.values() if each.kind not in keyword]


def _takes_a_group_after(arrays: int, signature: inspect.Signature) -> bool:
    """Return True if the parameter after the arrays may be the group, whatever its name."""
    parameters = _by_place(signature)
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return True
    after = parameters[arrays : arrays + 1]
    return any(each.name not in _NO_GROUP and each.default in (each.empty, None) for each in after)


def _check_call(signature: inspect.Signature, by_place: list[str], by_name: list[str]) -> None:
    """Raise `TypeError` if a function cannot be called so; say what to do."""
    try:
        signature.bind(*by_place, **dict.fromkeys(filter(None, by_name)))
    except TypeError as error:
        alone = {each.name for each in _by_place(signature)[1:]} <= {*_GROUP_NAMES, *_NO_GROUP}
        hint = "def cross_entropy(logits, targets, group, class_start, num_classes): return ..."
        hint = NOT_DECLARED if alone and "targets" in by_place else f"write one that calls it: {hint}"
        takes = f"calls a function with (logits, targets, group), and this one takes {signature}"
        raise TypeError(f"torch-shards {takes}: {error}; {hint}") from None
