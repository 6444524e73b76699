"""The tape: what was computed from what, and one backward pass over it.

A node knows the nodes that it was computed from and how to turn the gradient of its value into theirs. Nodes are
numbered as they are made, so that a node always has a higher number than those it was computed from: going through
them by falling number, every node has heard from all its consumers when its turn comes. No recursion, no cycles, and
the same order on every rank.
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
    parameter is a node without parents, whose `vjp` keeps what it is given.
    """

    __slots__ = ("name", "number", "parents", "vjp")

    def __init__(self, name: str, parents: Sequence[Node | None], vjp: Vjp) -> None:
        self.name = name
        self.number = next(_numbers)
        self.parents: Sequence[Node | None] = parents
        self.vjp: Vjp | None = vjp


def backward(root: Node, gradient: Gradient, add: Callable[[Gradient, Gradient], Gradient]) -> None:
    """Hand `gradient`, that of the value of `root`, down to everything that it was computed from.

    Each node is freed as soon as it has been passed. `RuntimeError` for a node that was freed before.
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
            if parent.number in gradients:
                gradients[parent.number] = add(gradients[parent.number], contribution)
            else:
                gradients[parent.number] = contribution
                heappush(waiting, (-parent.number, parent))


def is_grad_enabled() -> bool:
    """Whether operations go onto the tape."""
    return _grad_enabled.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without recording: results of the block have no gradient, and nothing is kept for a backward pass.

    Communicates nothing.

    >>> with no_grad():
    ...     is_grad_enabled()
    False
    """
    token = _grad_enabled.set(False)
    try:
        yield
    finally:
        _grad_enabled.reset(token)
