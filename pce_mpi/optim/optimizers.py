"""Stochastic gradient descent, and Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pce_mpi.arrays import Array, array_namespace
from pce_mpi.optim.optimizer import Groups, Optimizer, Options, not_negative, option


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's momentum and weight decay.

    As in `torch.optim.SGD`, a step takes each parameter p with gradient g to p - lr d, where

        d = g + weight_decay p
        b = momentum b + d                     with momentum; b = d in the first step
        d = b                                  with momentum; with nesterov instead d = d + momentum b

    Parameters
    ----------
    parameters : iterable or mapping of DistArray, or iterable of dict
        Arrays that were made with `requires_grad=True`, each once, over any meshes, of any floating dtype; none may be
        Partial. The values of a mapping count, in the order of their names. Or groups of them, as in torch: each is a
        dict with such arrays as "params", and with its own values for some of the options below, such as
        `{"params": biases, "weight_decay": 0.0}`.
    lr : float
        The learning rate, finite and not negative. It and the options below may be assigned between steps:
        `optimizer.lr`, or `optimizer.param_groups[i]["lr"]` for one group.
    momentum : float, optional
        The factor of b, finite and not negative.
    nesterov : bool, optional
        Use Nesterov's momentum, which needs a `momentum` that is not 0.
    weight_decay : float, optional
        The factor of p in d, finite and not negative.

    Raises
    ------
    TypeError
        If a parameter is no distributed array, a factor is no number, NumPy and CuPy arrays are mixed, or a group has
        an unknown option.
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

    __slots__ = ()

    momentum = option("momentum", "The momentum of the next step")
    nesterov = option("nesterov", "True if the next step takes Nesterov's momentum")

    def __init__(
        self, parameters: Groups, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def _checked(self, options: Options) -> dict[str, Any]:
        found: dict[str, Any] = {name: not_negative(options[name], name) for name in ("lr", "momentum", "weight_decay")}
        found["nesterov"] = bool(options["nesterov"])
        if found["nesterov"] and not found["momentum"]:
            raise ValueError("nesterov needs a momentum that is not 0")
        return found

    def _buffer_names(self, options: Options) -> tuple[str, ...]:
        """Return the names of the buffers of each parameter: b, if there is a momentum."""
        return ("momentum",) if options["momentum"] else ()

    def _update(
        self, options: Options, step: int, value: Array, d: Array, buffers: dict[str, Array], scratch: list[Array]
    ) -> None:
        """Update a block of a parameter in place."""
        xp, (s, t), momentum = array_namespace(value), scratch, options["momentum"]
        if options["weight_decay"]:
            xp.multiply(value, options["weight_decay"], out=s)
            d = xp.add(s, d, out=s)
        if momentum:
            b = buffers["momentum"]
            if step == 1:
                b[...] = d
            else:
                xp.multiply(b, momentum, out=b)
                xp.add(b, d, out=b)
            d = xp.add(xp.multiply(b, momentum, out=t), d, out=t) if options["nesterov"] else b
        xp.multiply(d, options["lr"], out=s)
        xp.subtract(value, s, out=value)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    As in `torch.optim.AdamW`, step t of a parameter p with gradient g is

        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g**2
        p = (1 - lr weight_decay) p - lr (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    Parameters
    ----------
    parameters : iterable or mapping of DistArray, or iterable of dict
        Those of `SGD`, or groups of them.
    lr : float, default 1e-3
        The learning rate, finite and not negative; all options may be assigned between steps, as in `SGD`.
    betas : pair of float, default (0.9, 0.999)
        beta1 and beta2, in [0, 1).
    eps : float, default 1e-8
        Added to the square root, finite and not negative.
    weight_decay : float, default 0.01
        The decay, finite and not negative.

    Raises
    ------
    TypeError, ValueError
        As in `SGD`.

    Notes
    -----
    An optimizer communicates only in `step` and `load_state`. The arithmetic is in the dtype of the parameter; float16
    and bfloat16 are computed in float32 and rounded once a step, and their m and v are float32. m and v are sharded as
    the parameter is; `state` calls them `"exp_avg"` and `"exp_avg_sq"`. t counts the steps in which the parameter had a
    gradient.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.array([1.0, 2.0]), mesh, requires_grad=True)
    >>> w.grad = pce.from_local(np.array([10.0, 0.0]), mesh, data=pce.Partial("sum"))
    >>> AdamW([w], lr=0.1).step()
    >>> w.local
    array([0.899, 1.998])
    """

    __slots__ = ()

    _squares = ("exp_avg_sq",)
    betas = option("betas", "The factors beta1 and beta2 of the next step")
    eps = option("eps", "The number that the next step adds to the square root")

    def __init__(
        self,
        parameters: Groups,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _checked(self, options: Options) -> dict[str, Any]:
        found: dict[str, Any] = {name: not_negative(options[name], name) for name in ("lr", "eps", "weight_decay")}
        betas = options["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        found["betas"] = tuple(not_negative(beta, f"betas[{index}]") for index, beta in enumerate(betas))
        if max(found["betas"]) >= 1.0:
            raise ValueError(f"betas must be below 1, got {found['betas']}")
        return found

    def _buffer_names(self, options: Options) -> tuple[str, ...]:
        """Return the names of the buffers of each parameter, m and v."""
        return "exp_avg", "exp_avg_sq"

    def _update(
        self, options: Options, step: int, value: Array, d: Array, buffers: dict[str, Array], scratch: list[Array]
    ) -> None:
        """Update a block of a parameter in place."""
        xp, (s, t), (beta1, beta2), lr = array_namespace(value), scratch, options["betas"], options["lr"]
        m, v = buffers["exp_avg"], buffers["exp_avg_sq"]
        xp.multiply(m, beta1, out=m)
        xp.add(m, xp.multiply(d, 1.0 - beta1, out=s), out=m)
        xp.multiply(v, beta2, out=v)
        xp.multiply(xp.multiply(d, d, out=s), 1.0 - beta2, out=s)
        xp.add(v, s, out=v)
        root = xp.sqrt(xp.divide(v, 1.0 - power_of(beta2, step), out=s), out=s)
        xp.add(root, options["eps"], out=root)
        xp.multiply(m, lr / (1.0 - power_of(beta1, step)), out=t)
        if options["weight_decay"]:
            xp.multiply(value, 1.0 - lr * options["weight_decay"], out=value)
        xp.subtract(value, xp.divide(t, root, out=t), out=value)


@lru_cache(maxsize=64)
def power_of(beta: float, step: int) -> float:
    """Return beta**step, by integers of 128 bits after the point; the bits of Python's power depend on the libm."""
    one = 1 << 128
    power, square = one, int(beta * one)
    while step:
        if step & 1:
            power = power * square >> 128
        square, step = square * square >> 128, step >> 1
    return power / one
