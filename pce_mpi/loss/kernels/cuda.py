"""The two hot loops on a GPU: what `blockwise` does on the host, by the CUDA kernels in the .cu files beside this one.

Logits come as (outer, classes, inner), the class axis in the middle. The kernels want rows of consecutive classes, one
pitch apart; what lies otherwise is copied first, and its gradient copied back. Rows may start anywhere: the classes
before the first and after the last multiple of 16 bytes are read and written one by one.

Threads work on a row in groups: several groups are in a block where rows are short, and a row is cut into parts, a
block for each, where rows are few. Which group, and which part, only depends on shapes and dtypes, and so do the orders
of all sums: equal arguments give equal bits.

Each kernel is compiled when it is first launched, and kept in CuPy's cache on disk. Work goes to the current stream.
"""

from __future__ import annotations

from functools import cache
import hashlib
from pathlib import Path
from typing import Any, NamedTuple
import warnings

import cupy
import numpy as np

from pce_mpi.loss.kernels.grids import CLUSTERS, Grid, blocks_of_cluster, threads_of_block
from pce_mpi.loss.kernels.rows import Rows, Target, rows_of
from pce_mpi.loss.kernels.terms import ClassWeights, RowGradient, Transform
from pce_mpi.loss.records import Layout

__all__ = ["fill_records", "fill_records_and_write_gradient", "fused_fits", "instantiations", "write_gradient"]

Array = Any  # cupy.ndarray

source_folder = Path(__file__).parent
# fmad: products and sums that are to be fused say so themselves, so that every compiler rounds alike.
OPTIONS = ("-std=c++17", "-fmad=false", f"-I{source_folder}")

# In the order of `Kind` in storage.cuh.
_STORAGE = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
_KINDS = {name: np.int32(kind) for kind, name in enumerate(_STORAGE)}
# The bits of `Field` in record.cuh, of the fields that not every record has.
_FIELDS = {
    "scale": 8,
    "target": 16,
    "held_weight": 32,
    "weight": 64,
    "weighted_gap": 128,
    "exp_gap": 256,
    "argmax": 512,
}

_HAS_CLUSTERS = 90  # compute capability, from which on there are any
_MOST_BLOCKS = 2**31 - 1

# Beyond these a scale is multiplied in float64: float32 would overflow or lose bits.
_SCALES_OF_FLOAT32 = (2.0**-64, 2.0**64)


class Kernel(NamedTuple):
    """One instantiation: its file, its name as an expression in C++, and the compute capability that it needs."""

    file: str
    name: str
    capability: int = 80


def instantiations() -> list[Kernel]:
    """Every kernel that can be asked for."""
    storages = list(_STORAGE.values())
    general = [(t, a) for t in storages for a in ("float", "double") if (t, a) != ("double", "float")]
    return [
        *(Kernel("forward.cu", f"fill_records<{t}>") for t in storages[:3]),
        *(Kernel("general_forward.cu", f"fill_general_records<{t}, {a}>") for t, a in general),
        Kernel("merge.cu", "merge_records"),
        *(Kernel("backward.cu", f"write_gradient<{t}>") for t in storages[:3]),
        *(Kernel("general_backward.cu", f"write_general_gradient<{t}, {a}>") for t, a in general),
        *(_fused(t, blocks) for t in storages[:3] for blocks in CLUSTERS),
    ]


def _fused(storage: str, blocks: int) -> Kernel:
    capability = _HAS_CLUSTERS if blocks > 1 else 80
    return Kernel("fused.cu", f"fill_records_and_write_gradient<{storage}, {blocks}>", capability)


@cache
def source_of(file: str) -> str:
    """The source of a file of kernels, and a digest of what it includes: by both CuPy knows what it has compiled."""
    digest = hashlib.sha256()
    for path in sorted(source_folder.glob("*.cuh")):
        digest.update(path.read_bytes())
    return f"// {digest.hexdigest()}\n" + (source_folder / file).read_text(encoding="utf-8")


@cache
def _function(kernel: Kernel, device: int) -> Any:
    module = cupy.RawModule(code=source_of(kernel.file), options=OPTIONS, name_expressions=[kernel.name])
    return module.get_function(kernel.name)


def _launch(kernel: Kernel, blocks: tuple[int, int], threads: int, *arguments: Any) -> None:
    _function(kernel, cupy.cuda.Device().id)((*blocks, 1), (threads, 1, 1), arguments)


def _arithmetic(compute_dtype: np.dtype[Any], transform: Transform) -> str:
    """What is computed in: float32 cannot hold softcap tanh(...) well enough to take exponentials of it."""
    least, most = _SCALES_OF_FLOAT32
    in_float32 = compute_dtype == np.float32 and transform.softcap is None and least <= transform.scale <= most
    return "float" if in_float32 else "double"


def _fields_of(layout: Layout) -> np.uint32:
    return np.uint32(7 + sum(_FIELDS[name] for name in layout.names[3:]))


def _columns_of(columns: Array) -> Array:
    return cupy.asarray(columns, dtype=np.int64)


_NULL = np.uint64(0)


def _options_of(weights: ClassWeights, transform: Transform) -> tuple[list[Array], list[Any]]:
    """What the kernels take for class weights and a softcap, and the arrays that must live until they are launched.

    In the order of the kernels' arguments: the weight, and then all others.
    """
    weight = _NULL if weights.weight is None else cupy.asarray(weights.weight, dtype=np.float64)
    probabilities, kind, pitch = _NULL, np.int32(0), 0
    if weights.probabilities is not None:
        rows = rows_of(weights.probabilities)
        probabilities, kind, pitch = rows.array, _KINDS[weights.probabilities.dtype.name], rows.pitch
    softcap = transform.softcap or 0.0
    return [weight], [
        probabilities,
        kind,
        np.int64(pitch),
        np.float64(1.0 - weights.smoothing),
        np.float64(weights.smoothing / weights.classes),
        np.float64(softcap),
        np.float64(transform.scale / softcap if softcap else 0.0),
    ]


def fill_records(
    logits: Array,
    target_column: Array | None,
    layout: Layout,
    *,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    class_start: int,
) -> tuple[Array, None]:
    """The record of every row of this shard, and None, as there are no exponentials to keep.

    `logits` is (outer, classes, inner). `target_column` (rows,) is the local column of the row's target, -1 where it
    is elsewhere; None where rows have no one target; on either side. Returns records as (rows, fields) of float64, a
    column for each field of `layout.dtype`; that of `argmax` has the bits of an int64.
    """
    outer, classes, inner = logits.shape
    rows = outer * inner
    scale = transform.of_differences
    if rows == 0 or classes == 0:
        return _identity(layout, rows, scale), None
    source = rows_of(logits)
    grid = Grid.reading(rows, classes, logits.dtype.itemsize)
    fields, columns = _fields_of(layout), len(layout.names)
    parts = cupy.empty((rows, grid.parts, columns), np.float64)
    [weight], options = _options_of(weights, transform)
    arguments = [
        source.array,
        np.int64(source.pitch),
        np.int64(rows),
        np.int64(classes),
        np.int32(grid.chunk),
        np.int32(grid.lanes),
        _NULL if target_column is None else _columns_of(target_column),
        weight,
        np.float64(scale),
        fields,
        parts,
    ]
    storage, arithmetic = _STORAGE[logits.dtype.name], _arithmetic(compute_dtype, transform)
    plain = target_column is not None and not (layout.hold_largest or layout.weights or layout.entropy)
    if plain and arithmetic == "float":
        kernel = Kernel("forward.cu", f"fill_records<{storage}>")
    else:
        kernel = Kernel("general_forward.cu", f"fill_general_records<{storage}, {arithmetic}>")
        arguments += [*options, np.int64(class_start)]
    _launch(kernel, (grid.blocks, grid.parts), grid.threads, *arguments)
    if grid.parts == 1:
        return parts.reshape(rows, columns), None
    records = cupy.empty((rows, columns), np.float64)
    merging = (parts, np.int64(rows), np.int32(grid.parts), np.float64(scale), fields, records)
    _launch(Kernel("merge.cu", "merge_records"), (-(-rows // 4), 1), 128, *merging)
    return records, None


def _identity(layout: Layout, rows: int, scale: float) -> Array:
    """Records of no classes."""
    records = layout.identity(rows)
    if layout.scaled:
        records["scale"] = scale
    return cupy.asarray(records.view(np.float64).reshape(rows, len(layout.names)))


def write_gradient(
    out: Array,
    logits: Array,
    gradient: RowGradient,
    *,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    references: None = None,
) -> None:
    """Write the gradient of the logits into `out`; both are (outer, classes, inner) and may be one array."""
    outer, classes, inner = out.shape
    rows = outer * inner
    if rows == 0 or classes == 0:
        return
    target = Target.of(out)
    _write(target, rows_of(logits), logits.dtype, gradient, weights, transform, compute_dtype)
    target.finish()


def _write(
    target: Target,
    source: Rows,
    dtype: np.dtype[Any],
    gradient: RowGradient,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
) -> None:
    outer, classes, inner = target.out.shape
    rows = outer * inner
    grid = Grid.writing(rows, classes, dtype.itemsize)
    arguments = [
        source.array,
        np.int64(source.pitch),
        np.int64(rows),
        np.int64(classes),
        np.int32(grid.chunk),
        np.int32(grid.lanes),
        target.rows.array,
        np.int64(target.rows.pitch),
        *(_float64(each) for each in (gradient.max, gradient.factor)),
        _columns_of(gradient.held_column),
        _float64(gradient.held_gradient),
        cupy.ascontiguousarray(gradient.valid),
        np.float64(transform.of_differences),
    ]
    storage, arithmetic = _STORAGE[dtype.name], _arithmetic(compute_dtype, transform)
    if gradient.weight_factor is None and arithmetic == "float" and target.lies_as(source, dtype):
        kernel = Kernel("backward.cu", f"write_gradient<{storage}>")
    else:
        kernel = Kernel("general_backward.cu", f"write_general_gradient<{storage}, {arithmetic}>")
        factor = _NULL if gradient.weight_factor is None else _float64(gradient.weight_factor)
        [weight], options = _options_of(weights, transform)
        arguments += [_KINDS[target.out.dtype.name], factor, weight, *options]
    _launch(kernel, (grid.blocks, grid.parts), grid.threads, *arguments)


def _float64(array: Array) -> Array:
    """What is one number per row, as the kernels read it: a column of the records lies in steps."""
    return cupy.ascontiguousarray(array, dtype=np.float64)


_AS_IT_IS = Transform()
# The GPUs, by their numbers, on which a cluster could not be launched.
_without_clusters: set[int] = set()


def fused_fits(logits: Array, compute_dtype: np.dtype[Any], transform: Transform = _AS_IT_IS) -> bool:
    """Whether there is a kernel that keeps rows like these, (outer, classes, inner), on the chip.

    There is one for float32 arithmetic, and rows that fit in the registers of a block, or on GPUs of compute
    capability 9.0 and up in those of a cluster of 8 blocks: 131,072 classes of 16 bits, or 98,304 of float32.
    """
    outer, classes, inner = logits.shape
    if _arithmetic(compute_dtype, transform) == "double" or not outer * classes * inner:
        return False
    blocks, device = blocks_of_cluster(classes, logits.dtype.itemsize), cupy.cuda.Device()
    if blocks > 1 and (int(device.compute_capability) < _HAS_CLUSTERS or device.id in _without_clusters):
        return False
    return blocks <= CLUSTERS[-1] and outer * inner * blocks <= _MOST_BLOCKS


def fill_records_and_write_gradient(
    out: Array,
    logits: Array,
    target_column: Array,
    layout: Layout,
    *,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    class_start: int,
    slope: Array,
    held: Array,
    valid: Array,
    z_loss: float,
) -> Array | None:
    """The records of rows that are whole, and their gradient into `out`, each logit read once; where `fused_fits`.

    For class numbers, without smoothing or softcap. With p the softmax, the gradient is that of `slope` times
    (`held` (-log p_target) + `z_loss` logsumexp**2), in logits times the scale; 0 in rows that are not `valid`, whose
    `target_column` is -1. These are (rows,) float64, the last bool. Returns records as `fill_records` does;
    `held_weight`, where there is one, is `held`. None, with nothing written, where a cluster cannot be launched;
    nothing `fused_fits` one on this GPU from then on.
    """
    outer, classes, inner = logits.shape
    rows, dtype = outer * inner, logits.dtype
    source = rows_of(logits)
    target = Target.of(out)
    blocks = blocks_of_cluster(classes, dtype.itemsize)
    records = cupy.empty((rows, len(layout.names)), np.float64)
    column = _columns_of(target_column)
    # Where vectors of logits are no vectors of gradients, another kernel writes those.
    writes = target.lies_as(source, dtype)
    factor, held_gradient = (_NULL, _NULL) if writes else (cupy.empty(rows, np.float64) for _ in range(2))
    arguments = [
        source.array,
        np.int64(source.pitch),
        np.int32(classes),
        target.rows.array if writes else _NULL,
        np.int64(target.rows.pitch),
        column,
        _float64(slope),
        _float64(held),
        cupy.ascontiguousarray(valid),
        np.float64(transform.scale),
        np.float64(z_loss),
        _fields_of(layout),
        records,
        factor,
        held_gradient,
    ]
    kernel, threads = _fused(_STORAGE[dtype.name], blocks), threads_of_block(classes, dtype.itemsize, blocks)
    try:
        _launch(kernel, (rows * blocks, 1), threads, *arguments)
    except RuntimeError as error:  # from the driver
        if blocks == 1:
            raise
        warnings.warn(f"clusters of blocks cannot be launched, logits are read twice: {error}", stacklevel=2)
        _without_clusters.add(cupy.cuda.Device().id)
        return None
    if not writes:
        gradient = RowGradient(records[:, 1], factor, None, column, held_gradient, valid)
        _write(target, source, dtype, gradient, ClassWeights(), transform, compute_dtype)
    target.finish()
    return records
