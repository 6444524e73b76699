"""Optimizers of distributed arrays: Partial gradients are reduced together, then each rank updates alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, compute_dtype_of, to_host
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.tracing import cause, phase
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.creation import distribute
from pce_mpi.distributed.mesh import text_of_dims
from pce_mpi.optim.parameters import block_of, blocks, check_parameters, listed, not_negative
from pce_mpi.optim.synchronization import meshes_of, synchronize

Array = Any  # numpy.ndarray or cupy.ndarray


class Optimizer(ABC):
    """The common part of all optimizers: what is stepped, when it communicates, and the state that is saved.

    A subclass has the names of its buffers, the numbers of a step, and the update of a block. Each buffer is an array
    of the parameter's shard, in the dtype of the arithmetic, and is 0 before the first step.
    """

    def __init__(self, parameters: Iterable[DistArray], lr: float) -> None:
        self.parameters = listed(parameters)
        check_parameters(self.parameters)
        for parameter in self.parameters:
            parameter.own_memory()
        self.lr = lr
        self._steps = [0] * len(self.parameters)
        self._buffers: list[dict[str, Array]] = [{} for _ in self.parameters]
        _keep_freed_memory()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = not_negative(value, "lr")

    @property
    @abstractmethod
    def _buffer_names(self) -> tuple[str, ...]:
        """The names of the buffers of each parameter."""

    @property
    @abstractmethod
    def _numbers(self) -> dict[str, float | bool]:
        """The numbers of a step, the same on every rank."""

    @abstractmethod
    def _update(self, step: int, value: Array, d: Array, buffers: dict[str, Array], scratch: list[Array]) -> None:
        """Update a block of a parameter, `value`, in place, from its gradient `d`, which stays; `step` counts from 1.

        `scratch` has two arrays of the block's shape.
        """

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
        with phase("step"):
            synchronize(self.parameters, type(self).__name__, self._numbers)
        largest = max(each.local.size for each in self.parameters)
        rooms: dict[tuple[Any, np.dtype[Any]], Array] = {}
        with np.errstate(all="ignore"):
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is None:
                    continue
                local = parameter.local
                xp, dtype = array_namespace(local), compute_dtype_of(local.dtype)
                room = rooms.get((xp, dtype))
                if room is None:
                    size = max(1, min(block_of(xp), largest))
                    room = rooms[xp, dtype] = xp.empty((2, size), dtype)
                self._steps[index] += 1
                self._update_blocks(index, local, parameter.grad.local, room)

    def _update_blocks(self, index: int, parameter: Array, gradient: Array, room: Array) -> None:
        """Update one parameter, block by block, so that memory is read once."""
        buffers = self._buffers[index]
        for name in self._buffer_names:
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
            self._update(self._steps[index], value, d, of_block, scratch)
            if half:
                parameter[block] = value.astype(parameter.dtype)

    def _zeros(self, parameter: DistArray) -> Array:
        dtype = compute_dtype_of(parameter.dtype)
        return array_namespace(parameter.local).zeros(parameter.local.shape, dtype)

    def state(self) -> dict[str, DistArray]:
        """Return copies of the state, to be saved beside the parameters.

        Returns
        -------
        dict of str to DistArray
            For parameter number i, the number of its steps, `"i.step"`, and its buffers, such as `"i.momentum"`, in the
            sharding of the parameter. Parameters that were never stepped have none.

        Notes
        -----
        Communicates nothing.

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
        ['0.momentum', '0.step']
        """
        arrays: dict[str, DistArray] = {}
        for index, (parameter, buffers) in enumerate(zip(self.parameters, self._buffers, strict=True)):
            if self._steps[index]:
                xp = array_namespace(parameter.local)
                arrays[f"{index}.step"] = distribute(xp.asarray(np.int64(self._steps[index])), parameter.mesh)
                for name in self._buffer_names:
                    buffer = buffers[name].copy() if name in buffers else self._zeros(parameter)
                    arrays[f"{index}.{name}"] = DistArray(buffer, parameter.mesh, parameter.sharding)
        return arrays

    def load_state(self, arrays: Mapping[str, DistArray]) -> None:
        """Take a state that `state` gave, from any number of ranks and in any placement.

        Parameters
        ----------
        arrays : mapping of str to DistArray
            Arrays by the names of `state`, over the meshes of the parameters, no name too many.

        Raises
        ------
        TypeError, ValueError
            If a name is missing or unknown, or an array does not fit its parameter.
        CollectiveError
            If ranks pass different arrays.

        Notes
        -----
        Collective over each mesh of the parameters: one Allgather of 56 bytes, and what brings each array to the
        placement of its parameter. Every rank raises the same error, before anything is taken.
        """
        with local_checks() as checks:
            self._check_state(arrays)
        error = checks.error
        for mesh in meshes_of(self.parameters):
            # Counted within the mesh, whose other ranks need not know of other meshes.
            here = [index for index, parameter in enumerate(self.parameters) if parameter.mesh is mesh]
            called = {
                f"{number}.{name}": f"{arrays[key].dtype} {arrays[key].sharding}"
                for number, index in enumerate(here)
                for name in ("step", *self._buffer_names)
                if error is None and (key := f"{index}.{name}") in arrays
            }
            with local_checks() as checks:
                agree(mesh.comm(*mesh.dims), "load_state", called, error=error, over=text_of_dims(mesh.dims))
            error = error or checks.error  # the ranks of the other meshes must hear of it
        if error is not None:
            raise error
        steps, taken = [], []
        for index, parameter in enumerate(self.parameters):
            held = f"{index}.step" in arrays
            steps.append(int(to_host(arrays[f"{index}.step"].full())) if held else 0)
            buffers = {}
            with cause("load_state", text_of_dims(parameter.mesh.dims), "a state goes to its parameter"):
                for name in self._buffer_names if held else ():
                    buffers[name] = redistribute(arrays[f"{index}.{name}"], parameter.sharding).local.copy()
            taken.append(buffers)
        self._steps, self._buffers = steps, taken

    def _check_state(self, arrays: Mapping[str, DistArray]) -> None:
        if not isinstance(arrays, Mapping):
            raise TypeError(f"arrays must be a mapping of names to distributed arrays, got {type(arrays).__name__}")
        expected: dict[str, tuple[DistArray, tuple[int, ...], np.dtype[Any]]] = {}
        for index, parameter in enumerate(self.parameters):
            if any(str(name).startswith(f"{index}.") for name in arrays):
                expected[f"{index}.step"] = parameter, (), np.dtype(np.int64)
                for name in self._buffer_names:
                    expected[f"{index}.{name}"] = parameter, parameter.shape, compute_dtype_of(parameter.dtype)
        for word, names in (("unknown", arrays.keys() - expected.keys()), ("missing", expected.keys() - arrays.keys())):
            if names:
                raise ValueError(f"{word} in the state of {type(self).__name__}: {', '.join(sorted(map(str, names)))}")
        for name, (parameter, shape, dtype) in expected.items():
            array = arrays[name]
            if not isinstance(array, DistArray):
                raise TypeError(f"{name} must be a distributed array, got {type(array).__name__}")
            if array.mesh is not parameter.mesh or array.sharding.partial_dims:
                raise ValueError(f"{name} must be over the mesh of its parameter and not Partial, got {array!r}")
            if (array.shape, array.dtype) != (shape, dtype):
                raise ValueError(f"{name} must be {dtype} {shape}, got {array.dtype} {array.shape}")


def _keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB of freed memory, which each step takes again.

    glibc gives freed memory back beyond twice the largest block that was freed, of up to 32 MiB. So this frees a block
    of 32 MiB without ever touching a page of it. A training step of 50 ms takes about 5 % less.
    """
    np.empty(2**25 - 2**16, np.uint8)
