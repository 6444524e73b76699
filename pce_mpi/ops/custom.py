"""Operations made from the user's functions of plain arrays; without a rule they run on Replicate operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op, Vjp
from pce_mpi.autograd.rules import Rule
from pce_mpi.comm.doors import telling


def op(
    forward: Callable[..., Any],
    vjp: Vjp | Sequence[Vjp | None] | None = None,
    rule: Callable[..., Rule] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Make an operation on distributed arrays from a function of plain arrays.

    Parameters
    ----------
    forward : callable
        Takes the local arrays of the operands, and parameters by name; returns an array or a tuple of arrays.
    vjp : callable or sequence of callable or None, optional
        One function, or one for each operand; None for an operand without a gradient. It takes the gradient of the
        result, the result and the operands, all distributed, and the parameters by name; it returns the gradient of
        its operand, which is that of the global array. If several results are real numbers, it takes the tuple of
        their gradients, with zeros for those that nothing was computed from, and the tuple of these results.
    rule : callable, optional
        Takes the global shapes of the operands, and the parameters by name; returns a `Rule` (see `Rule.of`). Without
        a rule the operation runs on Replicate operands on every rank: slow, never wrong, and the trace shows it.
    name : str, optional
        The name in the trace and in errors; that of `forward` unless given.

    Returns
    -------
    callable
        A function of distributed arrays, and of parameters by name.

    Raises
    ------
    TypeError
        If `forward` or `rule` is not callable, or `vjp` or `name` is none.

    Notes
    -----
    A backward pass through an operation without a `vjp` raises `NotImplementedError`, which names the operation.

    Examples
    --------
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
    if not isinstance(name, str | None):
        raise TypeError(f"name must be a str, got {name!r}")
    vjps = (vjp,) if callable(vjp) else () if vjp is None else vjp
    if not isinstance(vjps, Sequence) or not all(each is None or callable(each) for each in vjps):
        raise TypeError(f"vjp must be a function, or a sequence of functions and None, got {vjp!r}")
    name = name or str(getattr(forward, "__name__", type(forward).__name__))
    made = Op(name, lambda call, *arrays, **parameters: forward(*arrays, **parameters), tuple(vjps), rule)

    def operation(*operands: Any, **parameters: Any) -> Any:
        return apply(made, *operands, **parameters)

    operation.__name__ = operation.__qualname__ = made.name
    operation.__doc__ = forward.__doc__
    return telling(operation)
