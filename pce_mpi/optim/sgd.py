"""Gradient descent on distributed arrays: Partial gradients are reduced together, then each rank steps alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, check_one_library, compute_dtype_of, to_host
from pce_mpi.comm.agreement import local_checks
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.library import same_ranks
from pce_mpi.comm.tracing import cause, phase
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Replicate
from pce_mpi.optim.synchronization import meshes_of, synchronize

Array = Any  # numpy.ndarray or cupy.ndarray

# The number of elements that are updated at a time, few enough to stay in the cache.
_BLOCK = 2**16
# A GPU keeps nothing between two kernels, and the start of one takes as long as 100,000 elements.
_BLOCK_OF_DEVICE = 2**24


class SGD:
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
    An optimizer communicates only in `step`. The arithmetic is in the dtype of the parameter; float16 and bfloat16 are
    computed in float32 and rounded once a step. b is sharded as the parameter is.

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
        self.parameters = _listed(parameters)
        _check_parameters(self.parameters)
        for parameter in self.parameters:
            parameter.own_memory()
        self.lr = lr
        self.momentum = _not_negative(momentum, "momentum")
        self.nesterov = bool(nesterov)
        self.weight_decay = _not_negative(weight_decay, "weight_decay")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum that is not 0")
        self._buffers: list[Array | None] = [None] * len(self.parameters)
        _keep_freed_memory()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = _not_negative(value, "lr")

    def zero_grad(self) -> None:
        """Set the gradients to None, so that the next backward pass starts anew.

        Notes
        -----
        Communicates nothing.
        """
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Reduce the gradients and update the parameters in place; parameters without a gradient stay as they are.

        Afterwards each `grad` has the sharding of its parameter, so that a second step has nothing to reduce.

        Raises
        ------
        TypeError, ValueError
            If a gradient does not fit its parameter.
        CollectiveError
            If ranks step different parameters, have gradients of different ones, or different numbers such as `lr`.

        Notes
        -----
        Collective over each mesh of the parameters: one Allgather of 56 bytes; then, for each set of dims and dtype,
        one Allreduce of the gradients that are Partial over those dims and whose parameters are Replicate there, and
        one Reduce_scatter of those whose parameters are Shard. Gradients that are Partial "max" or "min" are
        redistributed one by one. Every rank raises the same error, before anything is written.
        """
        called = {
            "lr": self.lr,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }
        with phase("step"):
            synchronize(self.parameters, "SGD", called)
        largest = max(each.local.size for each in self.parameters)
        rooms: dict[tuple[Any, np.dtype[Any]], Array] = {}
        with np.errstate(all="ignore"):
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is None:
                    continue
                local = parameter.local
                xp = array_namespace(local)
                room = rooms.get((xp, local.dtype))
                if room is None:
                    size = max(1, min(_block_of(xp), largest))
                    room = rooms[xp, local.dtype] = xp.empty((2, size), compute_dtype_of(local.dtype))
                self._update(xp, index, local, parameter.grad.local, room)

    def _update(self, xp: Any, index: int, parameter: Array, gradient: Array, room: Array) -> None:
        """Update one parameter, block by block, so that memory is read once; `room` is for two blocks."""
        first = bool(self.momentum) and self._buffers[index] is None
        if first:
            self._buffers[index] = xp.empty(parameter.shape, room.dtype)
        buffer = self._buffers[index]
        if parameter.flags.c_contiguous and gradient.flags.c_contiguous:
            parameter, gradient = parameter.reshape(-1), gradient.reshape(-1)
            buffer = None if buffer is None else buffer.reshape(-1)
        half = parameter.dtype != room.dtype
        for block in _blocks(parameter.shape, room.shape[1]):
            value, d = parameter[block], gradient[block]
            if half:  # `value` is a copy in float32, which is rounded at the end
                value, d = value.astype(room.dtype), d.astype(room.dtype)
            s = room[0, : value.size].reshape(value.shape)
            if self.weight_decay:
                xp.multiply(value, self.weight_decay, out=s)
                d = xp.add(s, d, out=s)
            if buffer is not None:
                b = buffer[block]
                if first:
                    b[...] = d
                else:
                    xp.multiply(b, self.momentum, out=b)
                    xp.add(b, d, out=b)
                if self.nesterov:
                    t = xp.multiply(b, self.momentum, out=room[1, : value.size].reshape(value.shape))
                    d = xp.add(t, d, out=t)
                else:
                    d = b
            xp.multiply(d, self._lr, out=s)
            xp.subtract(value, s, out=value)
            if half:
                parameter[block] = value.astype(parameter.dtype)


def clip_grad_norm(parameters: Iterable[DistArray], max_norm: float) -> float:
    """Scale the gradients so that their norm is at most `max_norm`.

    As in `torch.nn.utils.clip_grad_norm_`, each gradient is multiplied by min(1, max_norm / (norm + 1e-6)).

    Parameters
    ----------
    parameters : iterable of DistArray
        As for `SGD`. Those without a gradient count for nothing.
    max_norm : float
        The bound, not negative.

    Returns
    -------
    float
        The norm before: the 2-norm of all gradients as one vector, each element of a global array counted once, in
        float64. It is the same on every rank; if it is `nan`, all gradients become `nan`.

    Raises
    ------
    TypeError, ValueError
        As in `SGD` and `SGD.step`; `ValueError` if `max_norm` is negative, or the parameters are over meshes of
        different ranks.
    CollectiveError
        As in `SGD.step`.

    Notes
    -----
    Collective over each mesh of the parameters: one Allgather of 56 bytes, the collectives of `SGD.step`, and one
    Allreduce of 8 bytes. A Partial gradient is reduced first; `SGD.step` then has nothing to reduce. Every rank raises
    the same error, before anything is written.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.zeros(2), mesh, requires_grad=True)
    >>> w.grad = pce.distribute(np.array([3.0, 4.0]), mesh)
    >>> clip_grad_norm([w], 1.0), w.grad.local.round(3)
    (5.0, array([0.6, 0.8]))
    """
    given = _listed(parameters)
    called = {}
    with local_checks() as checks:
        _check_parameters(given)
        max_norm = called["max_norm"] = _not_negative(max_norm, "max_norm", finite=False)
        first, *others = (mesh.comm(*mesh.dims) for mesh in meshes_of(given))
        if not all(same_ranks(first, other) for other in others):
            raise ValueError("all parameters must be over the same ranks: not every rank knows the norm of the others")
    with phase("step"):
        synchronize(given, "clip_grad_norm", called, checks.error)
        norm = math.sqrt(sum(_sum_of_squares(given, mesh) for mesh in meshes_of(given)))
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1.0:  # nan as well
        for parameter in given:
            if parameter.grad is not None:
                scaled = _times(parameter.grad.local, scale)
                parameter.grad = DistArray(scaled, parameter.mesh, parameter.grad.sharding)
    return norm


@np.errstate(all="ignore")
def _sum_of_squares(parameters: Sequence[DistArray], mesh: Mesh) -> float:
    """Return the sum of the squares of all gradients over `mesh`, the same bits on every rank."""
    squares = []
    for parameter in parameters:
        if parameter.mesh is not mesh or parameter.grad is None:
            continue
        # The first of equal replicas counts.
        placed = parameter.grad.sharding.by_dim.items()
        if any(mesh.coordinates[dim] for dim, placement in placed if placement == Replicate()):
            continue
        local = parameter.grad.local
        for index in _blocks(local.shape, _block_of(array_namespace(local))):
            block = local[index].astype(np.float64)
            block *= block
            squares.append(float(block.sum()))
    reason = "the squares of all gradients, each element counted once"
    with cause("clip_grad_norm", text_of_dims(mesh.dims), reason, "Partial('sum')", "Replicate()"):
        sums = all_reduce(np.array([sum(squares, 0.0)]), mesh.comm(*mesh.dims), "sum")
    return float(sums[0])


@np.errstate(all="ignore")
def _times(array: Array, scale: float) -> Array:
    """Return `array` times `scale`, rounded once to its dtype."""
    return (array.astype(compute_dtype_of(array.dtype), copy=False) * scale).astype(array.dtype, copy=False)


def _listed(parameters: Any) -> list[DistArray]:
    if isinstance(parameters, DistArray):
        raise TypeError("parameters must be a list of distributed arrays, got one distributed array")
    return list(parameters)


def _check_parameters(parameters: Sequence[Any]) -> None:
    if not parameters:
        raise ValueError("parameters are missing: the list is empty")
    seen: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        what = f"parameters[{index}]"
        if not isinstance(parameter, DistArray):
            raise TypeError(f"{what} must be a distributed array, got {type(parameter).__name__}")
        if not (parameter.is_leaf and parameter.requires_grad):
            raise ValueError(f"{what} must be an array that was made with requires_grad=True, got {parameter!r}")
        if parameter.sharding.partial_dims:
            raise ValueError(f"{what} must not be Partial, got {parameter!r}")
        if id(parameter) in seen:
            raise ValueError(f"{what} is the same array as parameters[{seen[id(parameter)]}]")
        seen[id(parameter)] = index
    check_one_library({f"parameters[{index}]": parameter.local for index, parameter in enumerate(parameters)})


def _not_negative(value: Any, name: str, finite: bool = True) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = to_host(value).item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if not 0.0 <= value or (finite and value == math.inf):
        raise ValueError(f"{name} must not be negative{' and must be finite' * finite}, got {value}")
    return float(value)


def _block_of(xp: Any) -> int:
    return _BLOCK if xp is np else _BLOCK_OF_DEVICE


@lru_cache(maxsize=1024)
def _blocks(shape: tuple[int, ...], most: int) -> tuple[tuple[int | slice, ...], ...]:
    """Return indices that cut an array of `shape` into contiguous blocks of at most `most` elements."""
    if not shape:
        return ((),)
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    count = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    ranges = [slice(start, start + count) for start in range(0, shape[axis], count)]
    return tuple((*outer, part) for outer in np.ndindex(shape[:axis]) for part in ranges)


def _keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB of freed memory, which each step takes again.

    glibc gives freed memory back beyond twice the largest block that was freed, of up to 32 MiB. So this frees a block
    of 32 MiB without ever touching a page of it. A training step of 50 ms takes about 5 % less.
    """
    np.empty(2**25 - 2**16, np.uint8)
