"""Optimizers of distributed arrays: Partial gradients are reduced together, then each rank updates alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, check_one_library, compute_dtype_of, to_host
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.calls import Kind, public_methods
from pce_mpi.comm.tracing import cause, phase
from pce_mpi.distributed.array import DistArray, described, redistribute
from pce_mpi.distributed.creation import distribute
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Partial, Shard
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.hollow import Hollow, enter, hollow
from pce_mpi.optim.synchronization import meshes_of, synchronize
from pce_mpi.text import names_shown, shown

# The number of elements that are updated at a time, few enough to stay in the cache.
_BLOCK = 2**16
# A GPU's cache keeps nothing between two kernels, and starting a kernel takes as long as updating 100,000 elements.
_BLOCK_OF_DEVICE = 2**24


# A mapping has them by name, as `shard_parameters` returns them; they count in the order of their names.
Parameters = Iterable[DistArray] | Mapping[str, DistArray]
Options = Mapping[str, Any]
Groups = Parameters | Iterable[Options]


def listed(parameters: Any) -> list[DistArray]:
    if isinstance(parameters, DistArray):
        raise TypeError("parameters must be a list of distributed arrays, got one distributed array")
    if not isinstance(parameters, Mapping):
        return list(parameters)
    if "params" in parameters and not isinstance(parameters["params"], DistArray):
        raise TypeError("groups of parameters must be in a list, got one group")
    # Ranks may have made their mappings in different orders.
    return [parameters[name] for name in sorted(parameters, key=str)]


def in_groups(parameters: Any) -> list[dict[str, Any]]:
    """Return groups, each a dict of "params" and its own options; parameters alone are one group."""
    given: list[Any] = listed(parameters)
    if not any(isinstance(each, Mapping) for each in given):
        return [{"params": tuple(given)}]
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                f"a group of parameters must be a dict that has 'params', got {described(group)} as number {index}"
            )
    return [{**group, "params": tuple(listed(group["params"]))} for group in given]


def check_parameters(parameters: Sequence[Any]) -> None:
    if not parameters:
        raise ValueError("parameters are missing: the list is empty")
    seen: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        what = f"parameters[{index}]"
        if not isinstance(parameter, DistArray):
            raise TypeError(f"{what} must be a distributed array, got {type(parameter).__name__}")
        if not (parameter.is_leaf and parameter.requires_grad):
            raise ValueError(
                f"{what} must be an array that was made with requires_grad=True, got {described(parameter)}"
            )
        if parameter.sharding.partial_dims:
            raise ValueError(f"{what} must not be Partial, got {described(parameter)}")
        if id(parameter) in seen:
            raise ValueError(f"{what} is the same array as parameters[{seen[id(parameter)]}]")
        seen[id(parameter)] = index
    check_one_library({f"parameters[{index}]": parameter.local for index, parameter in enumerate(parameters)})


def not_negative(value: Any, name: str, finite: bool = True) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = to_host(value).item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if not 0.0 <= value or (finite and value == math.inf):
        raise ValueError(f"{name} must not be negative{' and must be finite' * finite}, got {value}")
    return float(value)


def block_of(xp: Any) -> int:
    return _BLOCK if xp is np else _BLOCK_OF_DEVICE


@lru_cache(maxsize=1024)
def blocks(shape: tuple[int, ...], most: int) -> tuple[tuple[int | slice, ...], ...]:
    """Return indices that cut an array of `shape` into contiguous blocks of at most `most` elements."""
    if not shape:
        return ((),)
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    count = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    ranges = [slice(start, start + count) for start in range(0, shape[axis], count)]
    return tuple((*outer, part) for outer in np.ndindex(shape[:axis]) for part in ranges)


# More steps than any training has; one more still fits int64.
_MOST_STEPS = 2**62


def option(name: str, meaning: str) -> Any:
    """Make an option of `defaults` an attribute that may be read and assigned, checked as at construction."""

    def check_is_used(self: Optimizer) -> None:
        if all(name in group.maps[0] for group in self.param_groups):
            raise ValueError(f"each group has {name!r} of its own: use param_groups[...][{name!r}]")

    def read(self: Optimizer) -> Any:
        check_is_used(self)
        return self.defaults[name]

    def assign(self: Optimizer, value: Any) -> None:
        check_is_used(self)
        self.defaults[name] = self._checked({**self.defaults, name: value})[name]

    return property(read, assign, doc=f"{meaning}, in each group without one of its own.")


def _public(kind: Kind) -> Kind:
    """Make the methods of an optimizer public, whose parameters may be on several meshes."""
    return public_methods(kind, {"state"}, has_meshes=True)  # which communicates nothing


@_public
class Optimizer(ABC):
    """The common part of all optimizers: groups of parameters, communication, and the state that is saved.

    A subclass checks the options of a group, names its buffers and updates a block. Each buffer is an array with the
    shape of the parameter's shard, in the dtype of the arithmetic, and is 0 before the first step.
    """

    # An attribute that is none, as a misspelt option, cannot be assigned.
    __slots__ = (
        "__weakref__",
        "_all_peers",
        "_buffers",
        "_group_of",
        "_groups_on",
        "_largest",
        "_meshes",
        "_params",
        "_peers",
        "_steps",
        "defaults",
        "param_groups",
        "parameters",
    )

    lr = option("lr", "The learning rate of the next step")
    weight_decay = option("weight_decay", "The weight decay of the next step")

    # The buffers of squares, which must not be negative.
    _squares: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        _public(cls)

    def __init__(self, parameters: Groups, **defaults: Any) -> None:
        groups = in_groups(parameters)
        self.parameters: list[DistArray] = [parameter for group in groups for parameter in group["params"]]
        check_parameters(self.parameters)
        self.defaults = self._checked(defaults)
        # An option that a group does not have is read from `defaults`, each time anew.
        self.param_groups = tuple(ChainMap[str, Any](group, self.defaults) for group in groups)
        self._params = [group["params"] for group in groups]
        self._group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        self._options()
        self._meshes = meshes_of(self.parameters)
        self._peers = self._meshes[0]._peers
        self._all_peers = tuple(mesh._peers for mesh in self._meshes)
        self._groups_on = [self._groups_of(mesh) for mesh in self._meshes]
        self._largest = max(parameter.local.size for parameter in self.parameters)
        for parameter in self.parameters:
            parameter.own_memory()
        self._steps = [0] * len(self.parameters)
        self._buffers: list[dict[str, Array]] = [{} for _ in self.parameters]
        _keep_freed_memory()

    @abstractmethod
    def _checked(self, options: Options) -> dict[str, Any]:
        """Return the options of a step, checked, in a form that ranks can compare."""

    @abstractmethod
    def _buffer_names(self, options: Options) -> tuple[str, ...]:
        """Return the names of the buffers of each parameter."""

    @abstractmethod
    def _update(
        self, options: Options, step: int, value: Array, d: Array, buffers: dict[str, Array], scratch: list[Array]
    ) -> None:
        """Update a block of a parameter, `value`, in place from its gradient `d`, which is kept; `step` counts from 1.

        `scratch` has two arrays of the block's shape.
        """

    def _options(self) -> list[dict[str, Any]]:
        """Return the options of each group, checked."""
        found = []
        for number, group in enumerate(self.param_groups):
            try:
                if unknown := group.keys() - self.defaults.keys() - {"params"}:
                    raise TypeError(f"{shown(min(unknown, key=str))} is none of {', '.join(self.defaults)}")
                if group["params"] is not self._params[number]:
                    raise ValueError("'params' cannot be exchanged: make another optimizer")
                found.append(self._checked({name: group[name] for name in self.defaults}))
            except (TypeError, ValueError) as error:
                raise type(error)(f"param_groups[{number}]: {error}") from None
        return found

    def _groups_of(self, mesh: Mesh) -> dict[int, str]:
        """Return the numbers of the groups with parameters over `mesh`, and their names in its ranks' agreement."""
        # Counted within the mesh, whose other ranks need not know of other meshes.
        numbered = zip(self.parameters, self._group_of, strict=True)
        here = [group for parameter, group in numbered if parameter.mesh is mesh]
        ends = {group: end for end, group in enumerate(here, 1)}
        starts = [0, *ends.values()]
        if len(ends) == 1:
            return dict.fromkeys(ends, "")
        return {group: f"parameters[{start}:{end}] " for start, (group, end) in zip(starts, ends.items(), strict=False)}

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
        options: list[dict[str, Any]] = []
        called: list[dict[str, Any]] = [{} for _ in self._groups_on]
        with local_checks() as checks:
            options = self._options()
            for said, groups in zip(called, self._groups_on, strict=True):
                for group, where in groups.items():
                    said |= {f"{where}{name}": value for name, value in options[group].items()}
        with phase("step"):
            synchronize(self.parameters, self._meshes, type(self).__name__, called, checks.error)
        rooms: dict[tuple[Any, np.dtype[Any]], Array] = {}
        with np.errstate(all="ignore"):
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is None:
                    continue
                local = parameter.local
                xp, dtype = array_namespace(local), compute_dtype_of(local.dtype)
                room = rooms.get((xp, dtype))
                if room is None:
                    size = max(1, min(block_of(xp), self._largest))
                    room = rooms[xp, dtype] = xp.empty((2, size), dtype)
                self._steps[index] += 1
                self._update_blocks(index, options[self._group_of[index]], local, parameter.grad.local, room)

    def _update_blocks(self, index: int, options: Options, parameter: Array, gradient: Array, room: Array) -> None:
        """Update one parameter, block by block, so that memory is read once."""
        buffers = self._buffers[index]
        for name in self._buffer_names(options):
            if name not in buffers:
                buffers[name] = self._zeros(self.parameters[index])
        if parameter.flags.c_contiguous and gradient.flags.c_contiguous:
            parameter, gradient = parameter.reshape(-1), gradient.reshape(-1)
            buffers = {name: buffer.reshape(-1) for name, buffer in buffers.items()}
        half = parameter.dtype != room.dtype
        for block in blocks(parameter.shape, room.shape[1]):
            value, d = parameter[block], gradient[block]
            if half:  # `value` is a copy in float32, which is rounded at the end
                value, d = value.astype(room.dtype), d.astype(room.dtype)
            scratch = [row[: value.size].reshape(value.shape) for row in room]
            of_block = {name: buffer[block] for name, buffer in buffers.items()}
            self._update(options, self._steps[index], value, d, of_block, scratch)
            if half:
                parameter[block] = value.astype(parameter.dtype)

    def _zeros(self, parameter: DistArray) -> Array:
        dtype = compute_dtype_of(parameter.dtype)
        zeros = array_namespace(parameter.local).zeros(parameter.local.shape, dtype)
        enter(zeros, "optimizer state")
        return zeros

    def state(self) -> dict[str, DistArray]:
        """Return copies of the state, to be saved beside the parameters.

        Returns
        -------
        dict of str to DistArray
            For parameter number i, counted through all groups, the number of its steps, `"i.step"`, a checksum of its
            values, `"i.checksum"`, which is Partial where the parameter is sharded, and its buffers, such as
            `"i.momentum"`, in the sharding of the parameter. The buffers of a parameter that was never stepped are 0,
            and read-only, as they take no memory.

        Notes
        -----
        Communicates nothing. `load` takes the placements of a saved state from that of a new optimizer.

        Examples
        --------
        >>> import numpy as np, pce_mpi as pce
        >>> from mpi4py import MPI
        >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
        >>> w = pce.distribute(np.zeros(2), mesh, requires_grad=True)
        >>> optimizer = pce.SGD([w], lr=0.1, momentum=0.9)
        >>> w.grad = pce.distribute(np.ones(2), mesh)
        >>> optimizer.step()
        >>> sorted(optimizer.state())
        ['0.checksum', '0.momentum', '0.step']
        """
        arrays: dict[str, DistArray] = {}
        options = self._options()
        for index, (parameter, buffers) in enumerate(zip(self.parameters, self._buffers, strict=True)):
            xp, dtype = array_namespace(parameter.local), compute_dtype_of(parameter.dtype)
            arrays[f"{index}.step"] = distribute(xp.asarray(np.int64(self._steps[index])), parameter.mesh)
            arrays[f"{index}.checksum"] = _checksum(parameter)
            for name in self._buffer_names(options[self._group_of[index]]):
                held = name in buffers
                buffer = buffers[name].copy() if held else xp.broadcast_to(xp.zeros((), dtype), parameter.local.shape)
                arrays[f"{index}.{name}"] = DistArray(buffer, parameter.mesh, parameter.sharding)
        return arrays

    def load_state(self, arrays: Mapping[str, DistArray]) -> None:
        """Load a state that `state` returned, from any number of ranks and in any placement.

        Parameters
        ----------
        arrays : mapping of str to DistArray
            Arrays by exactly the names of `state`, over the meshes of the parameters.

        Raises
        ------
        TypeError, ValueError
            If a name is missing or unknown, an array does not fit its parameter, a number of steps is negative or above
            2**62, a mean of squares is negative, or parameters are in another order than that of the state: some of
            one shape and dtype have each other's values of the time when the state was taken. So load the parameters
            first; with other values any order is taken.
        CollectiveError
            If ranks pass different arrays, or different numbers of steps.

        Notes
        -----
        Collective over each mesh of the parameters: one Allgather of 56 bytes, and the redistribution of each array to
        the placement of its parameter, and of two checksums for each parameter that is not the only one of its shape
        and dtype. Every rank raises the same error, before anything is changed.
        """
        names: list[tuple[str, ...]] = []
        steps: list[int] = []
        with local_checks() as checks:
            names = [self._buffer_names(options) for options in self._options()]
            steps = self._checked_state(arrays, names)
        error, named = checks.error, False
        for mesh in self._meshes:
            # Counted within the mesh, whose other ranks need not know of other meshes.
            here = [index for index, parameter in enumerate(self.parameters) if parameter.mesh is mesh]
            called: dict[str, Any] = {}
            for number, index in enumerate(here) if error is None else ():
                called[f"{number}.step"] = steps[index]
                for name in names[self._group_of[index]]:
                    array = arrays[f"{index}.{name}"]
                    called[f"{number}.{name}"] = f"{array.dtype} {array.sharding}"
            comm, over = mesh.along(mesh.dims)
            with local_checks() as checks:
                agree(comm, "load_state", called, error=error, over=over, ranks_named=named)
                self._check_order(here, arrays)
            if checks.error is not None:  # to be told to the ranks of the other meshes
                error, named = checks.error, True
        if error is not None:
            raise error
        taken = []
        for index, parameter in enumerate(self.parameters):
            buffers = {}
            with cause("load_state", text_of_dims(parameter.mesh.dims), "a state goes to its parameter"):
                for name in names[self._group_of[index]]:
                    buffers[name] = redistribute(arrays[f"{index}.{name}"], parameter.sharding).local.copy()
            taken.append(buffers)
        self._steps, self._buffers = steps, taken

    def _check_order(self, indices: Sequence[int], arrays: Mapping[str, DistArray]) -> None:
        """Raise `ValueError`, on every rank, if parameters have each other's values of the time of the state.

        Collective over the mesh of the parameters with these indices.
        """
        alike: dict[Any, list[int]] = {}
        for index in indices:
            parameter = self.parameters[index]
            alike.setdefault((parameter.shape, parameter.dtype), []).append(index)
        for several in alike.values():
            if len(several) > 1:
                found = [_sum_of_shards(_checksum(self.parameters[index])) for index in several]
                saved = [_sum_of_shards(arrays[f"{index}.checksum"]) for index in several]
                if found != saved and sorted(found) == sorted(saved):
                    moved = next(place for place, each in enumerate(found) if each != saved[place])
                    here, there = (f"parameters[{several[place]}]" for place in (moved, saved.index(found[moved])))
                    raise ValueError(
                        f"{here} has the values that {there} had when the state was taken: give {type(self).__name__} "
                        "the parameters in that order"
                    )

    def _checked_state(self, arrays: Mapping[str, DistArray], names: Sequence[tuple[str, ...]]) -> list[int]:
        """Return the number of steps of each parameter; `names` has the names of the buffers of each group."""
        if not isinstance(arrays, Mapping):
            raise TypeError(f"arrays must be a mapping of names to distributed arrays, got {type(arrays).__name__}")
        expected: dict[str, tuple[DistArray, tuple[int, ...], np.dtype[Any]]] = {}
        for index, parameter in enumerate(self.parameters):
            expected[f"{index}.step"] = parameter, (), np.dtype(np.int64)
            expected[f"{index}.checksum"] = parameter, (), np.dtype(np.uint64)
            for name in names[self._group_of[index]]:
                expected[f"{index}.{name}"] = parameter, parameter.shape, compute_dtype_of(parameter.dtype)
        for word, wrong in (("unknown", arrays.keys() - expected.keys()), ("missing", expected.keys() - arrays.keys())):
            if wrong:
                raise ValueError(f"{word} in the state of {type(self).__name__}: {names_shown(sorted(wrong, key=str))}")
        steps = []
        for key, (parameter, shape, dtype) in expected.items():
            array = arrays[key]
            if not isinstance(array, DistArray):
                raise TypeError(f"{key} must be a distributed array, got {type(array).__name__}")
            name = key.partition(".")[2]
            if array.mesh is not parameter.mesh or (array.sharding.partial_dims and name != "checksum"):
                raise ValueError(
                    f"{key} must be over the mesh of its parameter and not Partial, got {described(array)}"
                )
            if (array.shape, array.dtype) != (shape, dtype):
                raise ValueError(f"{key} must be {dtype} {shape}, got {array.dtype} {array.shape}")
            if name == "step":
                steps.append(int(to_host(array.local)))
                if not 0 <= steps[-1] <= _MOST_STEPS:
                    raise ValueError(f"{key} must be a number of steps from 0 to 2**62, got {steps[-1]}")
            elif name in self._squares and bool((array.local < 0).any()):
                raise ValueError(f"{key} is a mean of squares, and has a negative element")
        return steps


def _checksum(parameter: DistArray) -> DistArray:
    """Return the sum of the bits of all elements modulo 2**64, Partial over the dims along which there are shards.

    It tells values apart, whatever their placement, and communicates nothing.
    """
    local, mesh = parameter.local, parameter.mesh
    total: Any = hollow((), np.uint64)
    if not isinstance(local, Hollow):
        bits = array_namespace(local).ascontiguousarray(local).view(f"u{local.itemsize}")
        total = bits.sum(dtype=np.uint64)
    shards = {dim: Partial("sum") for dim, placed in parameter.sharding.by_dim.items() if isinstance(placed, Shard)}
    return DistArray(array_namespace(local).asarray(total), mesh, Sharding.of(mesh.dim_sizes, (), shards))


def _sum_of_shards(checksum: DistArray) -> int:
    with cause("load_state", text_of_dims(checksum.mesh.dims), "parameters are in the order of the state"):
        total = redistribute(checksum, checksum.sharding.natural).local
    return 0 if isinstance(total, Hollow) else int(to_host(total))


def _keep_freed_memory() -> None:
    """Make the C library keep up to 64 MiB of freed memory, which each step needs again.

    glibc keeps up to twice the size of the largest block that was freed, and counts blocks of up to 32 MiB. So this
    frees a block of 32 MiB without touching a page of it. A training step of 50 ms takes about 5 % less time.
    """
    np.empty(2**25 - 2**16, np.uint8)
