"""Gradient descent on distributed arrays: partial gradients are brought together first, then each rank steps alone.

After a backward pass the gradient of a parameter may still be Partial: a term on each rank. `SGD` and `clip_grad_norm`
bring every such gradient to where its parameter lies, all of them together: one flat buffer, and so one collective, for
each mesh, set of dims, kind of collective and dtype, the parameters in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
import math
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import array_namespace, compute_dtype_of, to_host
from pce_mpi.channel import CollectiveTimeout, same_ranks
from pce_mpi.collectives import agree, all_reduce, reduce_scatter
from pce_mpi.dist_array import DistArray, over_text, redistribute
from pce_mpi.mesh import Mesh
from pce_mpi.placements import Partial, Replicate
from pce_mpi.sharding import Coordinates, Sharding
from pce_mpi.tracing import phase
from pce_mpi.transitions import Step, Verb, steps

__all__ = ["SGD", "clip_grad_norm"]

Array = Any  # numpy.ndarray or cupy.ndarray

# How many elements are updated at a time: few enough that what is read of them once stays in the cache.
_BLOCK = 2**16
# A GPU keeps nothing between two kernels, and starting one takes as long as 100,000 elements.
_BLOCK_OF_DEVICE = 2**24


class SGD:
    """Stochastic gradient descent with momentum, Nesterov's momentum and weight decay, as PyTorch's `SGD` has them.

    A step takes each parameter p with gradient g to p - lr d, where

        d = g + weight_decay p
        b = momentum b + d                     with momentum; b = d in the first step
        d = b, or d + momentum b               with momentum; the second with nesterov

    `parameters`: arrays that were made with `requires_grad=True`, each once, over any meshes, of any floating dtype;
    none may be Partial. `lr`, `momentum`, `weight_decay`: finite numbers that are not negative; `lr` may be assigned
    between steps. Arithmetic is done in the dtype of the parameter, for float16 and bfloat16 in float32, of which the
    parameter is rounded once a step; b lies as the parameter does.

    Making one communicates nothing. Raises `TypeError` for what is no distributed array or no number, `ValueError` for
    no parameters, a parameter that is given twice, is not a leaf that requires a gradient or is Partial, a negative
    number, and `nesterov` without `momentum`.

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
        self.lr = lr
        self.momentum = _not_negative(momentum, "momentum")
        self.nesterov = bool(nesterov)
        self.weight_decay = _not_negative(weight_decay, "weight_decay")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum that is not 0")
        self._buffers: list[Array | None] = [None] * len(self.parameters)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = _not_negative(value, "lr")

    def zero_grad(self) -> None:
        """Forget the gradients: the next backward pass starts from none. Communicates nothing."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Bring the gradients together and update the parameters in place; those without a gradient stay as they are.

        Each `grad` lies as its parameter does afterwards, so that a second step finds nothing to bring together.

        Collective over each mesh of the parameters: an Allgather of 56 bytes to agree on the step; then for each set
        of dims and dtype one Allreduce of the gradients that are Partial over those dims and whose parameters are
        Replicate there, and one Reduce_scatter of those whose parameters are Shard. Gradients that are Partial as
        "max" or "min" are brought to their parameters one by one.

        Raises on every rank, before anything is written, `CollectiveError` where ranks step different parameters, have
        gradients of different ones or other numbers such as `lr`, and `TypeError` or `ValueError` for a gradient
        that does not fit its parameter.
        """
        called = {
            "lr": self.lr,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }
        with phase("step"):
            _synchronize(self.parameters, "SGD", called)
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
        """One step of one parameter, block by block, so that memory is gone through once; `room` is for two blocks."""
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
            if half:  # no arithmetic is done in these: `value` is a copy, which is rounded at the end
                value, d = value.astype(room.dtype), d.astype(room.dtype)
            s, t = room[:, : value.size].reshape(2, *value.shape)
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
                    xp.multiply(b, self.momentum, out=t)
                    d = xp.add(t, d, out=t)
                else:
                    d = b
            xp.multiply(d, self._lr, out=s)
            xp.subtract(value, s, out=value)
            if half:
                parameter[block] = value.astype(parameter.dtype)


def clip_grad_norm(parameters: Iterable[DistArray], max_norm: float) -> float:
    """Scale the gradients so that their norm is at most `max_norm`, and return what it was.

    The norm is the 2-norm of all gradients together as one vector, every element of a global array counted once, in
    float64. Each gradient is multiplied by min(1, max_norm / (norm + 1e-6)), as PyTorch's `clip_grad_norm_` does; a
    norm that is `nan` makes all gradients `nan`. Parameters without a gradient count for nothing. What is Partial is
    brought to its parameter first, as `SGD.step` does, which then finds that done.

    `parameters` as for `SGD`. Returns a Python float, the same on every rank.

    Collective over each mesh of the parameters: an Allgather of 56 bytes, the collectives of `SGD.step`, and one
    Allreduce of 8 bytes. Raises, on every rank and before anything is written, the errors of `SGD` and `SGD.step`,
    and `ValueError` for a negative `max_norm` and for parameters over meshes of other ranks.

    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.zeros(2), mesh, requires_grad=True)
    >>> w.grad = pce.distribute(np.array([3.0, 4.0]), mesh)
    >>> clip_grad_norm([w], 1.0), w.grad.local.round(3)
    (5.0, array([0.6, 0.8]))
    """
    given = _listed(parameters)
    error: Exception | None = None
    called = {}
    try:
        _check_parameters(given)
        max_norm = called["max_norm"] = _not_negative(max_norm, "max_norm", finite=False)
        first, *others = (mesh.comm(*mesh.dims) for mesh in _meshes(given))
        if not all(same_ranks(first, other) for other in others):
            raise ValueError("all parameters must lie over the same ranks: not every rank knows the norm of the others")
    except (TypeError, ValueError) as caught:
        error = caught
    with phase("step"):
        _synchronize(given, "clip_grad_norm", called, error)
        norm = math.sqrt(sum(_sum_of_squares(given, mesh) for mesh in _meshes(given)))
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1.0:  # nan as well
        for parameter in given:
            if parameter.grad is not None:
                scaled = _times(parameter.grad.local, scale)
                parameter.grad = DistArray(scaled, parameter.mesh, parameter.grad.sharding)
    return norm


@np.errstate(all="ignore")
def _sum_of_squares(parameters: Sequence[DistArray], mesh: Mesh) -> float:
    """Of the elements of all gradients over `mesh`, which lie as their parameters do; the same bits on every rank."""
    squares = []
    for parameter in parameters:
        if parameter.mesh is not mesh or parameter.grad is None:
            continue
        # Of equal replicas the first counts.
        placed = parameter.grad.sharding.by_dim.items()
        if any(mesh.coordinates[dim] for dim, placement in placed if placement == Replicate()):
            continue
        local = parameter.grad.local
        xp = array_namespace(local)
        for index in _blocks(local.shape, _block_of(xp)):
            block = local[index].astype(np.float64).reshape(-1)
            squares.append(float(xp.dot(block, block)))
    sums = all_reduce(
        np.array([sum(squares, 0.0)]),
        mesh.comm(*mesh.dims),
        "sum",
        operation="clip_grad_norm",
        over=over_text(mesh.dims),
        before="Partial('sum')",
        after="Replicate()",
        reason="the squares of all gradients, each element counted once",
    )
    return float(sums[0])


@np.errstate(all="ignore")
def _times(array: Array, scale: float) -> Array:
    """`array` times `scale`, rounded once to its dtype."""
    return (array.astype(compute_dtype_of(array.dtype), copy=False) * scale).astype(array.dtype, copy=False)


# -------------------------------------------------------------------------------------- bringing gradients together


@dataclass(frozen=True)
class _Group:
    """Gradients that go into one collective over the same ranks, as one of these ranks has to deal with them.

    `members` are the numbers of their parameters. For each of them: `divisors` what a term is divided by to be one of a
    sum, and `shapes` what this rank holds of the gradient afterwards; `ends` are where that ends in the flat buffer.
    `parts` says, for a reduce_scatter, what each rank is sent of each member. `before` and `after` are for the trace.
    """

    mesh: int
    verb: Verb
    dims: tuple[str, ...]
    dtype: np.dtype[Any]
    members: tuple[int, ...]
    divisors: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    parts: tuple[tuple[tuple[slice, ...], ...], ...]
    before: str
    after: str


# Of a parameter: which mesh, how it lies, how its gradient lies, and the dtype of both.
_Placed = tuple[int, Sharding, Sharding | None, np.dtype[Any]]
# Of this rank, on a mesh.
_Coordinates = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Plan:
    """What is to be done with the gradients of a list of parameters, worked out from how they lie alone.

    `described` and `checksums` have one entry for each mesh. `alone` are the parameters whose gradients find their way
    by themselves.
    """

    described: tuple[Mapping[str, str], ...]
    checksums: tuple[int, ...]
    alone: tuple[int, ...]
    groups: tuple[_Group, ...]


def _synchronize(
    parameters: Sequence[DistArray],
    operation: str,
    called: Mapping[str, Hashable],
    error: Exception | None = None,
) -> None:
    """Bring each gradient to the sharding of its parameter; `called` must be the same on every rank.

    Collective over each mesh of `parameters`. `error` is what checks on this rank found.
    """
    meshes = _meshes(parameters)
    plan: _Plan | None = None
    if error is None:
        try:
            placed = tuple(_checked_gradient(parameter, index, meshes) for index, parameter in enumerate(parameters))
            plan = _plan(placed, tuple(tuple(mesh.coordinates.items()) for mesh in meshes))
        except (TypeError, ValueError) as caught:
            error = caught
    named = False
    for number, mesh in enumerate(meshes):
        try:
            _agree_on(mesh, operation, called, plan, number, error, named)
        except CollectiveTimeout:
            raise
        except Exception as caught:  # the ranks of the other meshes must hear of it
            error, named = caught, True
    if error is not None:
        raise error
    assert plan is not None  # the error would have been raised
    gradients = {index: each.grad for index, each in enumerate(parameters) if each.grad is not None}
    for index in plan.alone:
        parameter = parameters[index]
        reason = "the gradient belongs where its parameter lies"
        parameter.grad = redistribute(gradients[index], parameter.sharding, operation=operation, reason=reason)
    terms = {index: gradients[index].local for group in plan.groups for index in group.members}
    for group in plan.groups:
        _bring_together(group, terms, meshes[group.mesh], operation)
    for index, term in terms.items():
        parameter = parameters[index]
        # Views of the buffer that was reduced, which lives as long as these gradients do: copies would take as long as
        # the rest of this function.
        parameter.grad = DistArray(term.astype(parameter.dtype, copy=False), parameter.mesh, parameter.sharding)


def _agree_on(
    mesh: Mesh,
    operation: str,
    called: Mapping[str, Hashable],
    plan: _Plan | None,
    number: int,
    error: Exception | None,
    named: bool,
) -> None:
    comm, over = mesh.comm(*mesh.dims), over_text(mesh.dims)
    facts = () if plan is None else (plan.checksums[number],)
    said = agree(comm, operation, called, error=error, facts=facts, over=over, ranks_named=named)
    checksums = said[:, 0].tolist()
    if checksums != checksums[:1] * len(checksums) and plan is not None:
        agree(comm, operation, plan.described[number], over=over)  # raises, and says which parameters differ


@lru_cache(maxsize=64)
def _plan(placed: tuple[_Placed, ...], coordinates: tuple[_Coordinates, ...]) -> _Plan:
    described: list[dict[str, str]] = [{} for _ in range(1 + max(mesh for mesh, *_ in placed))]
    alone, pending = [], {}
    for index, (mesh, sharding, gradient, dtype) in enumerate(placed):
        has = "no gradient" if gradient is None else f"gradient {gradient}"
        # Counted within the mesh: its other ranks need not know of other meshes.
        number = len(described[mesh])
        described[mesh][f"parameters[{number}]"] = f"{dtype.name} {sharding.shape}, {sharding}; {has}"
        if gradient is None or gradient == sharding:
            continue
        taken = steps(gradient, sharding)
        if all(step.verb in ("all_reduce", "reduce_scatter") and _is_sum(step) for step in taken):
            pending[index] = list(taken)
        else:
            alone.append(index)
    texts = [repr(sorted(each.items())) for each in described]
    groups = []
    while any(pending.values()):
        waiting = {index: [_key(placed[index], step) for step in taken] for index, taken in pending.items() if taken}
        keys = list(dict.fromkeys(keys[0] for keys in waiting.values()))
        # Not before all who need this collective are ready for it, so that one does for all of them.
        key = next((key for key in keys if not any(key in later for _, *later in waiting.values())), keys[0])
        group = {index: pending[index].pop(0) for index, keys in waiting.items() if keys[0] == key}
        groups.append(_group(key, group, dict(coordinates[key[0]])))
    groups.sort(key=lambda group: group.mesh)  # one mesh after the other, as their ranks may not be the same
    return _Plan(tuple(described), tuple(zlib.crc32(text.encode()) for text in texts), tuple(alone), tuple(groups))


_Key = tuple[int, Verb, tuple[str, ...], np.dtype[Any]]


def _key(placed: _Placed, step: Step) -> _Key:
    mesh, _, _, dtype = placed
    return mesh, step.verb, step.dims, dtype


def _is_sum(step: Step) -> bool:
    return all(step.before.by_dim[dim] in (Partial("sum"), Partial("avg")) for dim in step.dims)


def _group(key: _Key, taken: Mapping[int, Step], here: Coordinates) -> _Group:
    """The group of the steps `taken`, by number of parameter, for the rank at `here`."""
    mesh, verb, dims, dtype = key
    shapes = tuple(step.after.local_shape(here) for step in taken.values())
    parts = []
    if verb == "reduce_scatter":
        for member in next(iter(taken.values())).before.members(dims, here):
            parts.append(tuple(_part(step, here, member) for step in taken.values()))
    return _Group(
        mesh=mesh,
        verb=verb,
        dims=dims,
        dtype=dtype,
        members=tuple(taken),
        divisors=tuple(math.prod(size for _, size in _averaged(step)) for step in taken.values()),
        shapes=shapes,
        ends=tuple(accumulate(math.prod(shape) for shape in shapes)),
        parts=tuple(parts),
        before=", ".join(dict.fromkeys(step.placement_before for step in taken.values())),
        after=", ".join(dict.fromkeys(step.placement_after for step in taken.values())),
    )


def _averaged(step: Step) -> list[tuple[str, int]]:
    return [
        (dim, size) for dim, size in step.before.dims if dim in step.dims and step.before.by_dim[dim] == Partial("avg")
    ]


def _part(step: Step, here: Mapping[str, int], member: Mapping[str, int]) -> tuple[slice, ...]:
    """Of what this rank holds before `step`, the part that belongs to the rank at `member` after it."""
    held, wanted = step.before.slices(here), step.after.slices(member)
    return tuple(slice(b.start - a.start, b.stop - a.start) for a, b in zip(held, wanted, strict=True))


def _bring_together(group: _Group, terms: dict[int, Array], mesh: Mesh, operation: str) -> None:
    """Replace what this rank holds of each gradient in `group` by what it holds after the group's collective."""
    dtype = compute_dtype_of(group.dtype)  # so that halves are rounded only once
    held = [terms[index] for index in group.members]
    for number, divisor in enumerate(group.divisors):
        if divisor > 1:
            held[number] = held[number].astype(dtype, copy=False) / divisor
    xp, comm = array_namespace(held[0]), mesh.comm(*group.dims)
    why: dict[str, Any] = {
        "operation": operation,
        "over": over_text(group.dims),
        "before": group.before,
        "after": group.after,
        "reason": "gradients are brought to their parameters, in one buffer",
    }
    if group.verb == "all_reduce":
        flat = xp.concatenate([term.reshape(-1) for term in held], dtype=dtype)
        flat = all_reduce(flat, comm, "sum", overwrite=True, **why)
    else:
        blocks = []
        for parts in group.parts:
            sent = [term[part].reshape(-1) for term, part in zip(held, parts, strict=True)]
            blocks.append(xp.concatenate(sent, dtype=dtype))
        flat = reduce_scatter(blocks, comm, "sum", **why)
    starts = (0, *group.ends[:-1])
    for index, start, end, shape in zip(group.members, starts, group.ends, group.shapes, strict=True):
        terms[index] = flat[start:end].reshape(shape)


# ------------------------------------------------------------------------------------------------------------- checks


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


def _checked_gradient(parameter: DistArray, index: int, meshes: Sequence[Mesh]) -> _Placed:
    """How a parameter and its gradient lie, if the gradient fits the parameter."""
    gradient, mesh = parameter.grad, meshes.index(parameter.mesh)
    if gradient is None:
        return mesh, parameter.sharding, None, parameter.dtype
    what = f"the gradient of parameters[{index}]"
    if not isinstance(gradient, DistArray):
        raise TypeError(f"{what} must be a distributed array or None, got {type(gradient).__name__}")
    if gradient.mesh is not parameter.mesh:
        raise ValueError(f"{what} lies over another mesh than its parameter")
    if gradient.shape != parameter.shape:
        raise ValueError(f"{what} must have its shape, {parameter.shape}, got {gradient.shape}")
    if gradient.dtype != parameter.dtype:
        raise TypeError(f"{what} must have its dtype, {parameter.dtype}, got {gradient.dtype}")
    if array_namespace(gradient.local) is not array_namespace(parameter.local):
        raise TypeError(f"{what} must be of the same array library")
    return mesh, parameter.sharding, gradient.sharding, parameter.dtype


def _not_negative(value: Any, name: str, finite: bool = True) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = to_host(value).item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if not 0.0 <= value or (finite and value == math.inf):
        raise ValueError(f"{name} must not be negative{' and must be finite' * finite}, got {value}")
    return float(value)


def _meshes(parameters: Sequence[Any]) -> list[Mesh]:
    """The meshes of `parameters`, in the order in which they appear."""
    return list(dict.fromkeys(parameter.mesh for parameter in parameters if isinstance(parameter, DistArray)))


def _block_of(xp: Any) -> int:
    return _BLOCK if xp is np else _BLOCK_OF_DEVICE


@lru_cache(maxsize=1024)
def _blocks(shape: tuple[int, ...], most: int) -> tuple[tuple[int | slice, ...], ...]:
    """Indices that cut an array of `shape` into blocks of at most `most` elements that lie next to each other."""
    if not shape:
        return ((),)
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    count = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    ranges = [slice(start, start + count) for start in range(0, shape[axis], count)]
    return tuple((*outer, part) for outer in np.ndindex(shape[:axis]) for part in ranges)
