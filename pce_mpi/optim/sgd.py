"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pce_mpi.arrays import array_namespace
from pce_mpi.distributed.array import DistArray
from pce_mpi.optim.optimizer import Optimizer
from pce_mpi.optim.parameters import not_negative

Array = Any  # numpy.ndarray or cupy.ndarray


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's momentum and weight decay.

    As in `torch.optim.SGD`, a step takes each parameter p with gradient g to p - lr d, where

        d = g + weight_decay p
        b = momentum b + d                     with momentum; b = d in the first step
        d = b, or d + momentum b               with momentum; the second with nesterov

    Parameters
    ----------
    parameters : iterable of DistArray
        Arrays that were made with `requires_grad=True`, each once, over any meshes, of any floating dtype; none may be
        Partial.
    lr : float
        The learning rate, finite and not negative; it may be assigned between steps.
    momentum : float, optional
        The factor of b, finite and not negative.
    nesterov : bool, optional
        Use Nesterov's momentum, which needs a `momentum` that is not 0.
    weight_decay : float, optional
        The factor of p in d, finite and not negative.

    Raises
    ------
    TypeError
        If a parameter is no distributed array or a factor no number, or NumPy arrays are beside CuPy arrays.
    ValueError
        If there are no parameters, one is given twice, is Partial or is not a leaf that requires a gradient, or a
        factor is out of range.

    Notes
    -----
    An optimizer communicates only in `step` and `load_state`. The arithmetic is in the dtype of the parameter; float16
    and bfloat16 are computed in float32 and rounded once a step. b is sharded as the parameter is.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.array([1.0, 2.0]), mesh, requires_grad=True)
    >>> w.grad = pce.from_local(np.array([10.0, 0.0]), mesh, data=pce.Partial("sum"))
    >>> SGD([w], lr=0.05).step()
    >>> w.local, w.grad.placements
    (array([0.5, 2. ]), {'data': Replicate()})
    """

    def __init__(
        self,
        parameters: Iterable[DistArray],
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr)
        self.momentum = not_negative(momentum, "momentum")
        self.nesterov = bool(nesterov)
        self.weight_decay = not_negative(weight_decay, "weight_decay")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum that is not 0")

    @property
    def _buffer_names(self) -> tuple[str, ...]:
        """The buffers of each parameter: b, if there is a momentum."""
        return ("momentum",) if self.momentum else ()

    @property
    def _numbers(self) -> dict[str, float | bool]:
        """The numbers of a step, the same on every rank."""
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }

    def _update(self, step: int, value: Array, d: Array, buffers: dict[str, Array], scratch: list[Array]) -> None:
        """Update a block of a parameter in place."""
        xp, (s, t) = array_namespace(value), scratch
        if self.weight_decay:
            xp.multiply(value, self.weight_decay, out=s)
            d = xp.add(s, d, out=s)
        if self.momentum:
            b = buffers["momentum"]
            if step == 1:
                b[...] = d
            else:
                xp.multiply(b, self.momentum, out=b)
                xp.add(b, d, out=b)
            d = xp.add(xp.multiply(b, self.momentum, out=t), d, out=t) if self.nesterov else b
        xp.multiply(d, self.lr, out=s)
        xp.subtract(value, s, out=value)
