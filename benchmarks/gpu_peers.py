"""The cross entropy of torch.compile, Liger and quack on a GPU, as far as they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
import sys
from typing import Any

# Imported by name: type checkers of this file do without them.
Loss = Callable[[Any, Any], Any]


def compiled() -> Loss:
    torch: Any = import_module("torch")
    # Each size is compiled as if it were the first: after a few, torch would compile no more.
    torch.compiler.reset()
    loss: Loss = torch.compile(torch.nn.functional.cross_entropy, dynamic=False)
    return loss


def liger() -> Loss:
    # It writes the gradient over the logits: the next repetition takes that for its logits.
    loss: Loss = import_module("liger_kernel.transformers").LigerCrossEntropyLoss()
    return loss


def quack() -> Loss:
    loss: Loss = import_module("quack.cross_entropy").cross_entropy
    return loss


FOUND_IN = {"torch.compile": ("torch", compiled), "liger": ("liger_kernel", liger), "quack": ("quack", quack)}


class Peer:
    """The mean loss of torch tensors, with autograd."""

    def __init__(self, name: str, targets: Any):
        """`targets` is a CuPy array. Raise whatever importing the peer raises."""
        self._torch: Any = import_module("torch")
        self._loss = FOUND_IN[name][1]()
        self._targets = self._torch.from_dlpack(targets)

    def tensor(self, logits: Any) -> Any:
        """Return a tensor on the memory of a CuPy array of logits."""
        if logits.dtype.name == "bfloat16":  # not every version of DLPack has it
            tensor = self._torch.from_dlpack(logits.view("int16")).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_dlpack(logits)
        return tensor.requires_grad_()

    def event(self) -> Any:
        """Return a CUDA event on torch's current stream."""
        return self._torch.cuda.Event(enable_timing=True)

    def forward(self, logits: Any) -> None:
        """Compute the loss alone."""
        with self._torch.no_grad():
            self._loss(logits, self._targets)

    def both(self, logits: Any) -> None:
        """Compute the loss and the gradient of the logits."""
        self._loss(logits, self._targets).backward()
        logits.grad = None


def peers() -> list[str]:
    """Return the names of the installed peers; none where torch sees no GPU."""
    if find_spec("torch") is None or not import_module("torch").cuda.is_available():
        return []
    return [name for name, (package, _) in FOUND_IN.items() if find_spec(package) is not None]


def release_memory() -> None:
    """Free the GPU memory that torch, if it has been imported, caches."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
