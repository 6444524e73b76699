"""A function on shards in `torch.distributed`, with the arguments of Megatron's vocabulary-parallel cross entropy."""

from __future__ import annotations

from collections.abc import Callable
import inspect
from typing import TYPE_CHECKING, Any

from pce_mpi.conformance.adapters.torch_tensors import ProcessGroup, loss_and_backward, tensor_of
from pce_mpi.conformance.kinds import KINDS
from pce_mpi.conformance.kinds.entropy import NOT_DECLARED
from pce_mpi.conformance.offers import check_kind, offer_of, signature_of
from pce_mpi.conformance.terms import OPTIONS, Gradient

if TYPE_CHECKING:
    from mpi4py import MPI

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
        raise TypeError(
            f"torch-shards calls a function with (logits, targets, group), and this one takes {signature}: {error}; "
            + (
                NOT_DECLARED
                if alone and "targets" in by_place
                else "write one that calls it: "
                "def cross_entropy(logits, targets, group, class_start, num_classes): return ..."
            )
        ) from None
