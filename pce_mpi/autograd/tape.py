"""The tape: the nodes of computed values, and one backward pass over them.

A node refers to the nodes that it was computed from and turns the gradient of its value into theirs. Nodes are numbered
as they are made, so that a node has a higher number than those that it was computed from. The pass goes by falling
number: all consumers of a node come before it. There is no recursion, no cycle, and one order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from heapq import heappop, heappush
from itertools import count
from typing import Any

Gradient = Any
Vjp = Callable[[Gradient], Sequence[Gradient | None]]

_numbers = count()
_grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)


class Node:
    """One value on the tape.

    `vjp` takes the gradient of the value and returns one for each of `parents`; a parent that is None needs none. A
    parameter is a node without parents, whose `vjp` keeps the gradient. An operation with several results is a node
    too, the parent of theirs: they hand it their gradients themselves and return None.
    """

    __slots__ = ("name", "number", "parents", "vjp")

    def __init__(self, name: str, parents: Sequence[Node | None], vjp: Vjp) -> None:
        self.name = name
        self.number = next(_numbers)
        self.parents: Sequence[Node | None] = parents
        self.vjp: Vjp | None = vjp


def backward(root: Node, gradient: Gradient, add: Callable[[Gradient, Gradient], Gradient]) -> None:
    """Pass `gradient`, that of the value of `root`, to everything that it was computed from.

    Each node is freed as soon as it was passed; a freed node raises `RuntimeError`.
    """
    gradients = {root.number: gradient}
    waiting = [(-root.number, root)]
    while waiting:
        _, node = heappop(waiting)
        if node.vjp is None:
            raise RuntimeError(f"the result of {node.name} has been through a backward pass, which freed its tape")
        parents, contributions = node.parents, node.vjp(gradients.pop(node.number))
        node.parents, node.vjp = (), None
        for parent, contribution in zip(parents, contributions, strict=True):
            if parent is None:
                continue
            if parent.number not in gradients:
                gradients[parent.number] = contribution
                heappush(waiting, (-parent.number, parent))
            elif contribution is not None:
                gradients[parent.number] = add(gradients[parent.number], contribution)


def is_grad_enabled() -> bool:
    """Tell whether operations go onto the tape."""
    return _grad_enabled.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without the tape: results of the block have no gradient, and nothing is kept for a backward pass.

    Notes
    -----
    Communicates nothing.

    Examples
    --------
    >>> with no_grad():
    ...     is_grad_enabled()
    False
    """
    token = _grad_enabled.set(False)
    try:
        yield
    finally:
        _grad_enabled.reset(token)
