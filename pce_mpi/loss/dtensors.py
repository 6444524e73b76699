"""DTensors of torch: their mesh and placements say which classes and which rows each rank has.

Torch is imported by those who make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
import inspect
import math
import sys
from typing import Any

import numpy as np

from pce_mpi.arrays import as_array, is_floating
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.errors import RanksAlong, names_ranks
from pce_mpi.comm.torch_group import TorchGroup
from pce_mpi.loss.options import BatchOptions, Place, ShardOptions
from pce_mpi.loss.passes import MadeResiduals
from pce_mpi.validation import integer

_LOGITS = ("logits", "student", "teacher", "out")
_UPSTREAM = ("dloss", "dchosen", "log_prob", "entropy", "logsumexp")
_SEVERAL = ("targets", "ids", "dchosen", "log_prob")  # perhaps with some classes in place of the class axis
_OPERANDS = {*_LOGITS, *_UPSTREAM, *_SEVERAL, "weight", "rows"}


def is_distributed(value: Any) -> bool:
    """Return whether `value` is a DTensor of torch, or residuals of DTensors."""
    if isinstance(value, MadeResiduals):
        return value.layout is not None
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(value, kind)


def groups_of(values: Iterable[Any]) -> list[Any]:
    """Return the process groups of the meshes of DTensors."""
    return [group for each in values if hasattr(each, "device_mesh") for group in each.device_mesh.get_all_groups()]


def call_on_mesh(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Any, Layout, Callable[[Any], Any]] | None:
    """Call a function of plain arrays with this rank's parts of DTensors; None if the first argument is none.

    Returns the results, the layout of the logits, and a function that makes a DTensor of a tensor of the results.
    """
    given = inspect.signature(function).bind(*arguments, **options).arguments
    given |= given.pop("options", {})
    (name, logits), operation = next(iter(given.items())), function.__name__
    if is_distributed(given.get("residuals")):
        layout: Layout = given["residuals"].layout
        local = {each: layout.local(each, value) for each, value in given.items()}
        results = function(**local)
    elif name in _LOGITS and is_distributed(logits):
        everyone, over = _group_along(name, logits.device_mesh)
        with local_checks() as checks:
            known = *ShardOptions.__annotations__, *BatchOptions.__annotations__
            if said := [each for each in known if given.get(each) is not None]:
                raise TypeError(f"{name} is a DTensor, whose mesh and placements say {said[0]}: leave it out")
            layout = Layout.of(name, logits, given.get("axis", -1))
            if operation == "nucleus" and layout.dims[1]:
                raise ValueError(f"nucleus takes no DTensor whose rows are sharded, got {list(logits.placements)}")
            local = {each: layout.local(each, value) for each, value in given.items()}
        call = {"shape": tuple(logits.shape), "placements": str(logits.placements)}
        agree(everyone, operation, call, error=checks.error, over=over)
        with local_checks() as checks:
            results = function(**{**local, "comm": layout.place()})
        if layout.dims[2]:  # replicas, which do not communicate otherwise
            is_named = checks.error is not None and names_ranks(checks.error)
            agree(everyone, operation, call, error=checks.error, over=over, ranks_named=is_named)
        elif checks.error is not None:
            raise checks.error
    else:
        return None
    out = local.get("out"), given.get("out")
    return results, layout, partial(layout.result, operation.endswith(("_backward", "_value_and_grad")), out)


@dataclass(frozen=True, eq=False)
class Layout:
    """The placement of the logits of a call: `sharded` has the axis that each dim of the mesh shards, or None.

    `name` is that of the logits, and `mine` has this rank's part of each axis.
    """

    name: str
    mesh: Any
    shape: tuple[int, ...]
    axis: int
    sharded: tuple[int | None, ...]
    mine: tuple[slice, ...]

    @classmethod
    def of(cls, name: str, logits: Any, axis: Any) -> Layout:
        """Return the layout of logits, or raise for placements that are not taken."""
        mesh, shape, sharded = logits.device_mesh, tuple(logits.shape), _sharded(name, logits)
        mine = [slice(0, length) for length in shape]
        for size, rank, each in zip(mesh.shape, mesh.get_coordinate(), sharded, strict=True):
            if each is not None:  # as torch.chunk cuts what the dims before have left
                start, stop = mine[each].start, mine[each].stop
                width = -(-(stop - start) // size)
                mine[each] = slice(min(start + rank * width, stop), min(start + (rank + 1) * width, stop))
        of_classes = np.lib.array_utils.normalize_axis_index(integer(axis, "axis"), len(shape))
        return cls(name, mesh, shape, of_classes, sharded, tuple(mine))

    @property
    def dims(self) -> tuple[list[int], list[int], list[int]]:
        """The dims of the mesh that shard classes, those that shard rows, and the others."""
        found: tuple[list[int], list[int], list[int]] = [], [], []
        for dim, axis in enumerate(self.sharded):
            found[2 if axis is None else int(axis != self.axis)].append(dim)
        return found

    def place(self) -> Place:
        """Return the options of a call that say which classes and rows this rank has."""
        place = Place(comm=None, num_classes=self.shape[self.axis])
        of_classes, of_rows, _ = self.dims
        if of_classes:
            place["comm"], place["over"] = _group_along(self.name, self.mesh, of_classes)
            place["class_start"] = self.mine[self.axis].start
        if of_rows:
            place["batch_comm"], place["batch_over"] = _group_along(self.name, self.mesh, of_rows)
            rows = np.arange(math.prod(self._of_rows(self.shape))).reshape(self._of_rows(self.shape))
            place["support_rows"] = rows.size, rows[self._of_rows(self.mine)].reshape(-1)
        return place

    def local(self, name: str, value: Any) -> Any:
        """Return this rank's part of an argument: of an operand that is placed as the logits are, or whole."""
        if name == "support":
            pair = (value.ids, value.offsets) if hasattr(value, "offsets") else value
            return tuple(map(_whole, pair)) if isinstance(pair, tuple | list) else pair
        if name not in _OPERANDS or value is None:
            return value
        of_mesh = is_distributed(value)
        array = value if of_mesh else as_array(value, name)
        if of_mesh and value.device_mesh != self.mesh:
            raise ValueError(f"{name} must be on the mesh of {self.name}, {self.mesh}, got {value.device_mesh}")
        axes = self._axes_of(name, array)
        shape = tuple(-1 if axis is None else self.shape[axis] for axis in axes)
        if len(shape) != array.ndim or any(n not in (-1, m) for n, m in zip(shape, array.shape, strict=True)):
            raise ValueError(
                f"{name} must have the global shape {str(shape).replace('-1', 'any')}, got {tuple(array.shape)}: each "
                "rank takes its own part of a whole array beside a DTensor"
            )
        mine = tuple(slice(None) if axis is None else self.mine[axis] for axis in axes)
        expected, placed = self._along(axes), _sharded(name, value) if of_mesh else (None,) * self.mesh.ndim
        local = value.to_local() if of_mesh else array
        if of_mesh and placed == expected:
            cut = tuple(len(range(n)[each]) for n, each in zip(value.shape, mine, strict=True))
            if tuple(local.shape) != cut:
                raise ValueError(
                    f"{name} has {tuple(local.shape)} of {tuple(value.shape)} on this rank, where torch.chunk cuts "
                    f"{cut}: give DTensor.from_local such shards, with the shape= and stride= of all"
                )
            return local
        if name == "out" or any(axis is not None for axis in placed):
            got = list(value.placements) if of_mesh else f"no DTensor but a {type(value).__name__}"
            also = "" if name == "out" else ", or be whole on every rank"
            raise ValueError(
                f"{name} must have the placements {_placements(expected)}, as {self.name}{also}, got {got}"
            )
        return local[mine]

    def result(self, has_gradient: bool, out: tuple[Any, Any], tensor: Any) -> Any:
        """Return the DTensor of which `tensor` is this rank's part; `out` has that of a DTensor, and the DTensor."""
        if tensor is out[0]:
            return out[1]
        axes = self._axes_of("logits" if has_gradient and tensor.ndim == len(self.shape) else "dchosen", tensor)
        along, of_torch = self._along(axes), sys.modules["torch.distributed.tensor"]
        shape = [self.shape[axes[place] or 0] if place in along else n for place, n in enumerate(tensor.shape)]
        whole = tensor.new_empty(shape, device="meta")
        more = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        return of_torch.DTensor.from_local(tensor.contiguous(), self.mesh, _placements(along), **more)

    def _of_rows(self, each: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return entries for the axes of the logits without that of the class axis."""
        return each[: self.axis] + each[self.axis + 1 :]

    def _axes_of(self, name: str, array: Any) -> tuple[int | None, ...]:
        """Return the axis of the logits for each axis of an operand; None for one of several classes."""
        every = tuple(range(len(self.shape)))
        if name == "weight":
            return (self.axis,)
        if name in _UPSTREAM and not array.ndim:
            return ()
        is_whole = array.ndim == len(every)
        if name in _LOGITS or (name == "targets" and is_whole and _is_floating(array)):
            return every
        if name in _SEVERAL and is_whole:
            return tuple(None if axis == self.axis else axis for axis in every)
        return self._of_rows(every)

    def _along(self, axes: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return, for each dim of the mesh, the place among `axes` of the one that it shards."""
        return tuple(None if axis is None or axis not in axes else axes.index(axis) for axis in self.sharded)


def _is_floating(array: Any) -> bool:
    return bool(array.is_floating_point()) if hasattr(array, "is_floating_point") else is_floating(array.dtype)


def _group_along(name: str, mesh: Any, dims: Sequence[int] | None = None) -> tuple[Any, RanksAlong]:
    """Return this rank's group along dims of a mesh, or all, and its name in messages; `name` is that of the logits."""
    if mesh.device_type != "cpu":
        raise TypeError(f"{name} must be on the CPU if it is a DTensor, got a mesh of {mesh.device_type}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name} has a mesh in which this rank is not: {mesh}")
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in range(mesh.ndim)):
        raise ValueError(
            f"{name} has a mesh on which ranks fall, which torch takes in two orders: {mesh.mesh.tolist()}"
        )
    dims = range(mesh.ndim) if dims is None else dims
    place = tuple(slice(None) if dim in dims else index for dim, index in enumerate(mesh.get_coordinate()))
    ranks = mesh.mesh[place].flatten().tolist()
    names = mesh.mesh_dim_names or [f"dim {dim} of the mesh" for dim in range(mesh.ndim)]
    over = RanksAlong(", ".join(names[dim] for dim in dims), ranks.__getitem__)
    return TorchGroup(*map(mesh.get_group, dims), ranks=ranks), over


def _sharded(name: str, value: Any) -> tuple[int | None, ...]:
    """Return the axis that each dim of the mesh of a DTensor shards; `ValueError` unless it is Shard or Replicate."""
    of_torch: Any = sys.modules["torch.distributed.tensor"]
    taken, placements = (of_torch.Shard, of_torch.Replicate), value.placements
    if wrong := [each for each in placements if type(each) not in taken]:
        instead = [each if type(each) in taken else of_torch.Replicate() for each in placements]
        raise ValueError(
            f"{name} must be Shard or Replicate over each dim of the mesh, got {wrong[0]!r}: take "
            f"{name}.redistribute(placements={instead})"
        )
    return tuple(each.dim % value.ndim if each.is_shard() else None for each in placements)


def _placements(sharded: Sequence[int | None]) -> list[Any]:
    """Return the placements of torch that shard these axes."""
    of_torch: Any = sys.modules["torch.distributed.tensor"]
    return [of_torch.Replicate() if axis is None else of_torch.Shard(axis) for axis in sharded]


def _whole(part: Any) -> Any:
    """Return a part of a support, which every rank has whole, as a plain array."""
    if not is_distributed(part):
        return part
    if any(axis is not None for axis in _sharded("support", part)):
        raise ValueError(f"support must be Replicate on the whole mesh, got {list(part.placements)}")
    return part.to_local()
