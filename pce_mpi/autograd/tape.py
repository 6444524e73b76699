"""The tape: the nodes of computed values, and one backward pass over them.

A node refers to the nodes that it was computed from and turns the gradient of its value into theirs. Nodes are numbered
as they are made, so that a node has a higher number than those that it was computed from. The pass visits the highest
number first, so all consumers of a node come before it. There is no recursion, no cycle, and one order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from heapq import heappop, heappush
from itertools import count
from typing import Any

from pce_mpi.hints import hinted

Gradient = Any
Vjp = Callable[[Any], Sequence[Gradient | None]]

_numbers = count()
_grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)


class Node:
    """The values of one operation on the tape; a `Place` is one of them.

    `vjp` takes the gradients of the values, None for those that nothing was computed from, and returns one for each of
    `parents`; a parent that is None needs none. A parameter is a node without parents, whose `vjp` keeps the gradient.
    Its gradients are computed, and add up, in the `arithmetic` that the node was made in.
    """

    __slots__ = ("arithmetic", "name", "number", "parents", "values", "vjp")

    def __init__(self, name: str, parents: Sequence[Place | None], vjp: Vjp, values: int, arithmetic: Any) -> None:
        self.name = name
        self.number = next(_numbers)
        self.parents: Sequence[Place | None] = parents
        self.vjp: Vjp | None = vjp
        self.values = values
        self.arithmetic = arithmetic


Place = tuple[Node, int]


def backward(
    root: Place, gradient: Gradient, add: Callable[[Gradient, Gradient], Gradient], enter: Callable[[Any], object]
) -> None:
    """Pass `gradient`, that of the value at `root`, back to everything that this value was computed from.

    `enter` takes the arithmetic of a node, before gradients of the node are added or its `vjp` is called. Each node is
    freed as soon as the pass has visited it; a freed node raises `RuntimeError`.
    """
    gradients: dict[int, list[Gradient | None]] = {}
    waiting: list[tuple[int, Node]] = []
    arrived: Iterable[tuple[Place | None, Gradient | None]] = [(root, gradient)]
    while True:
        for place, contribution in arrived:
            if place is None or contribution is None:
                continue
            node, value = place
            if node.number not in gradients:
                gradients[node.number] = [None] * node.values
                heappush(waiting, (-node.number, node))
            known = gradients[node.number]
            if known[value] is None:
                known[value] = contribution
            else:
                enter(node.arithmetic)
                known[value] = add(known[value], contribution)
        if not waiting:
            return
        _, node = heappop(waiting)
        if node.vjp is None:
            text = f"the result of {node.name} has been through a backward pass, which freed its tape"
            raise RuntimeError(hinted(text, "second backward"))
        enter(node.arithmetic)
        arrived = zip(node.parents, node.vjp(gradients.pop(node.number)), strict=True)
        node.parents, node.vjp = (), None


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
