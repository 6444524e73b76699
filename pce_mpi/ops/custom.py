"""Operations of the user's own, and any other function of NumPy's: without a rule they run on replicated operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op, Vjp
from pce_mpi.autograd.rules import Rule

__all__ = ["op"]


def op(
    forward: Callable[..., Any],
    vjp: Vjp | Sequence[Vjp | None] | None = None,
    rule: Callable[..., Rule] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """An operation on distributed arrays made of `forward`, a function of plain arrays.

    `forward` takes the local arrays of the operands, and parameters by name, and returns an array, or a tuple of them.
    `vjp`, one function or one per operand (None: no gradient), takes the gradient of the result, the result and the
    operands, all distributed, and the parameters; it returns the gradient of the operand, which is of the global array.
    `rule` takes the global shapes of the operands, and the parameters, and returns a `Rule` (`Rule.of`). Without one
    the operation runs on Replicate operands, on every rank: slow, never wrong, and the trace shows it. `name` is what
    the trace and errors call it.

    Without a `vjp`, a backward pass that comes through raises `NotImplementedError`, which names the operation.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> inverse = pce.op(np.linalg.inv, lambda g, y, x: -(y.T @ g @ y.T))
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> inverse(pce.distribute(np.eye(2) * 2, mesh, data=pce.Shard(0))).full()
    array([[0.5, 0. ],
           [0. , 0.5]])
    """
    if not callable(forward) or not (rule is None or callable(rule)):
        raise TypeError(f"forward and rule must be functions, got {forward!r} and {rule!r}")
    vjps = (vjp,) if callable(vjp) else tuple(vjp or ())
    made = Op(name or str(getattr(forward, "__name__", type(forward).__name__)), forward, vjps, rule)

    def operation(*operands: Any, **parameters: Any) -> Any:
        return apply(made, *operands, **parameters)

    operation.__name__ = operation.__qualname__ = made.name
    operation.__doc__ = forward.__doc__
    return operation
