"""Other people's cross entropy on a GPU, as far as it is installed: torch.compile, Liger and quack."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
import sys
from typing import Any

__all__ = ["Peer", "peers", "release_memory"]

# Imported by name, as people who check these files have none of it.
Loss = Callable[[Any, Any], Any]


def _compiled() -> Loss:
    torch: Any = import_module("torch")
    # Each size is compiled for itself, and as if it were the first: after a few torch would compile no more.
    torch.compiler.reset()
    compiled: Loss = torch.compile(torch.nn.functional.cross_entropy, dynamic=False)
    return compiled


def _liger() -> Loss:
    # It writes the gradient over the logits; these are random numbers as well.
    loss: Loss = import_module("liger_kernel.transformers").LigerCrossEntropyLoss()
    return loss


def _quack() -> Loss:
    loss: Loss = import_module("quack.cross_entropy").cross_entropy
    return loss


_FOUND_IN = {"torch.compile": ("torch", _compiled), "liger": ("liger_kernel", _liger), "quack": ("quack", _quack)}


class Peer:
    """The mean loss of logits and targets, torch's tensors, with autograd."""

    def __init__(self, name: str, targets: Any):
        """`targets` is a CuPy array. Raises whatever importing the peer does."""
        self._torch: Any = import_module("torch")
        self._loss = _FOUND_IN[name][1]()
        self._targets = self._torch.from_dlpack(targets)

    def tensor(self, logits: Any) -> Any:
        """A CuPy array of logits as a tensor that shares its memory."""
        if logits.dtype.name == "bfloat16":  # which not every version of DLPack's two ends knows
            tensor = self._torch.from_dlpack(logits.view("int16")).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_dlpack(logits)
        return tensor.requires_grad_()

    def event(self) -> Any:
        """A CUDA event on torch's current stream."""
        return self._torch.cuda.Event(enable_timing=True)

    def forward(self, logits: Any) -> None:
        """The loss alone."""
        with self._torch.no_grad():
            self._loss(logits, self._targets)

    def both(self, logits: Any) -> None:
        """The loss and the gradient of the logits."""
        self._loss(logits, self._targets).backward()
        logits.grad = None


def peers() -> list[str]:
    """The names of those that are installed; none where torch sees no GPU."""
    if find_spec("torch") is None or not import_module("torch").cuda.is_available():
        return []
    return [name for name, (package, _) in _FOUND_IN.items() if find_spec(package) is not None]


def release_memory() -> None:
    """Give back what torch, if it has been imported, keeps of the GPU's memory for later."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
