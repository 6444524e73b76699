"""A function on shards in `torch.distributed`, with the arguments of Megatron's vocabulary-parallel cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import inspect
from typing import TYPE_CHECKING, Any

from pce_mpi.conformance.adapters.torch_tensors import ProcessGroup, loss_and_backward, tensor_of
from pce_mpi.conformance.offers import Gradient, offer_of

if TYPE_CHECKING:
    from mpi4py import MPI

_GROUP_NAMES = ("group", "tp_group", "process_group")


class TorchShards:
    """`function(logits, targets, group, **options)`: this rank's tensors, all targets, and a gloo process group.

    The group is passed by keyword if a parameter is called `group`, `tp_group` or `process_group`, else third. The
    function returns the loss, which autograd differentiates, or the results that its `@offers` declares. Without
    `@offers` it returns one loss per row, as Megatron's does, unless it has a parameter `reduction`. It gets
    `class_start` and `num_classes` if it has parameters of these names; without the latter it is not failed for logits
    that were gathered by mistake. Shards have equal lengths, unless it declares others.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._group = ProcessGroup()
        parameters = inspect.signature(function).parameters
        self._group_name = next((name for name in _GROUP_NAMES if name in parameters), None)
        self._facts = [name for name in ("class_start", "num_classes") if name in parameters]
        self.offer = replace(offer_of(function), num_classes="num_classes" in parameters)
        if "shards" not in getattr(function, "declared", ()) and not hasattr(function, "shards"):
            self.offer = replace(self.offer, shards="equal")
        if not hasattr(function, "offer"):
            reductions = self.offer.reductions if "reduction" in parameters else ("none",)
            self.offer = replace(self.offer, gradient=Gradient.BACKWARD, reductions=reductions)

    def start(self, comm: MPI.Intracomm) -> None:
        """Start a gloo process group over the ranks of `comm`, and what the function starts itself."""
        self._group.start(comm)
        if hasattr(self._function, "start"):
            self._function.start(comm)

    def stop(self) -> None:
        """Stop what the function has started, and leave the process group."""
        if hasattr(self._function, "stop"):
            self._function.stop()
        self._group.stop()

    def __call__(self, logits: Any, *targets: Any, comm: MPI.Intracomm, **options: Any) -> Any:
        """Return the function's results; for a loss that autograd recorded, the loss and its backward pass."""
        from torch import distributed

        x = tensor_of(logits)
        if self.offer.gradient is Gradient.BACKWARD:
            x.requires_grad_()
        for name in ("class_start", "num_classes"):
            if name not in self._facts:
                del options[name]
        if "weight" in options:
            options["weight"] = tensor_of(options["weight"])
        arguments = [x, *map(tensor_of, targets)]  # the entropy has no targets
        if self._group_name:
            options[self._group_name] = distributed.group.WORLD
        else:
            arguments.append(distributed.group.WORLD)
        result = self._function(*arguments, **options)
        if isinstance(result, tuple) or self.offer.gradient is not Gradient.BACKWARD:
            return result
        return loss_and_backward(result, x)
