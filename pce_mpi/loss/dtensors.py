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
_OF_CLASSES, _OF_PRODUCT = ("weight", "bias", "dbias"), ("hidden", "dhidden", "w", "dw")
_OPERANDS = {*_LOGITS, *_UPSTREAM, *_SEVERAL, *_OF_CLASSES, *_OF_PRODUCT, "rows"}
_OF_SETS = ("ids", "offsets")  # of all rows, as a support is


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
) -> tuple[Any, Layout, Callable[[Any, str], Any]] | None:
    """Call a function of plain arrays with this rank's parts of DTensors; None if its logits, or factors, are none.

    Returns the results, the layout of the logits, and a function that makes a DTensor of a tensor of the results.
    """
    try:
        given = inspect.signature(function).bind(*arguments, **options).arguments
    except TypeError:
        return None  # the function itself says it in words
    given |= given.pop("options", {})
    (name, logits), operation = next(iter(given.items())), function.__name__
    if name == "hidden" and is_distributed(given.get("w")):
        name, logits = "w", given["w"]
    if is_distributed(given.get("residuals")):
        layout: Layout = given["residuals"].layout
        with local_checks() as checks:
            local = {each: layout.local(each, value) for each, value in given.items()}
        if operation == "linear_class_statistics_backward":  # the only one that communicates
            everyone, over = _group_along(layout.name, layout.mesh)
            agree(everyone, operation, {}, error=checks.error, over=over)
        elif checks.error is not None:
            raise checks.error
        results = function(**local)
    elif name in (*_LOGITS, "hidden", "w") and is_distributed(logits):
        everyone, over = _group_along(name, logits.device_mesh)
        with local_checks() as checks:
            known = *ShardOptions.__annotations__, *BatchOptions.__annotations__
            if said := [each for each in known if given.get(each) is not None]:
                raise TypeError(f"{name} is a DTensor, whose mesh and placements say {said[0]}: leave it out")
            if name in _LOGITS:
                layout = Layout.of(name, logits, given.get("axis", -1))
            else:
                layout = Layout.of_product(name, logits.device_mesh, given["hidden"], given["w"])
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
        of_classes = np.lib.array_utils.normalize_axis_index(integer(axis, "axis"), logits.ndim)
        return cls._of(name, logits.device_mesh, tuple(logits.shape), of_classes, _sharded(name, logits))

    @classmethod
    def of_product(cls, name: str, mesh: Any, hidden: Any, w: Any) -> Layout:
        """Return the layout of the logits `hidden @ w`, of which at least `name` is a DTensor."""
        operands = {"hidden": hidden, "w": w}
        for each, value in operands.items():
            operands[each] = value if is_distributed(value) else as_array(value, each)
        shapes = tuple(operands["hidden"].shape), tuple(operands["w"].shape)
        if len(shapes[1]) != 2 or shapes[0][-1:] != shapes[1][:1]:
            raise ValueError(f"hidden must be (..., features) and w (features, classes), got {shapes[0]}, {shapes[1]}")
        of_classes, nowhere = len(shapes[0]) - 1, (None,) * mesh.ndim
        of_hidden, of_w = (
            _sharded(each, value) if is_distributed(value) and value.device_mesh == mesh else nowhere
            for each, value in operands.items()
        )
        for rows, of_this in zip(of_hidden, of_w, strict=True):
            if rows == of_classes or of_this == 0 or None not in (rows, of_this):
                got = [list(each.placements) if is_distributed(each) else "whole" for each in operands.values()]
                raise ValueError(
                    "over each dim of the mesh either rows of hidden are sharded or classes of w, and no features, got "
                    f"hidden {got[0]} and w {got[1]}: redistribute one of them"
                )
        along = tuple(rows if of_this is None else of_classes for rows, of_this in zip(of_hidden, of_w, strict=True))
        return cls._of(name, mesh, (*shapes[0][:-1], shapes[1][1]), of_classes, along)

    @classmethod
    def _of(cls, name: str, mesh: Any, shape: tuple[int, ...], axis: int, sharded: tuple[int | None, ...]) -> Layout:
        mine = [slice(0, length) for length in shape]
        for size, rank, each in zip(mesh.shape, mesh.get_coordinate(), sharded, strict=True):
            if each is not None:  # as torch.chunk cuts what the dims before have left
                start, stop = mine[each].start, mine[each].stop
                width = -(-(stop - start) // size)
                mine[each] = slice(min(start + rank * width, stop), min(start + (rank + 1) * width, stop))
        return cls(name, mesh, shape, axis, sharded, tuple(mine))

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
            place["sums_rows"] = True
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

    def result(self, has_gradient: bool, out: tuple[Any, Any], tensor: Any, name: str) -> Any:
        """Return the DTensor of which `tensor` is this rank's part; `out` has that of a DTensor, and the DTensor."""
        if tensor is out[0]:
            return out[1]
        if name not in (*_OF_CLASSES, *_OF_PRODUCT, *_OF_SETS):
            name = "logits" if has_gradient and tensor.ndim == len(self.shape) else "dchosen"
        axes = (None,) if name in _OF_SETS else self._axes_of(name, tensor)
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
        if name in _OF_CLASSES:
            return (self.axis,)
        if name in _OF_PRODUCT:
            return (None, self.axis) if name in ("w", "dw") else (*every[:-1], None)
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
