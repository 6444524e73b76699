"""The forward and the backward loop on a GPU: launches the CUDA kernels in the .cu files of this folder.

README.md in this folder has a picture of the grids, and says which kernel is launched when. `blockwise` has the same
loops for the host.

Logits are (outer, classes, inner), the class axis in the middle. The kernels read rows of consecutive classes at a
constant pitch. Logits in another memory order are copied first, and their gradient is copied back. Rows may start at
any address: a kernel loads vectors between the first and the last multiple of 16 bytes, and single classes outside.

The launch configuration and the order of every sum depend on shapes and dtypes alone: equal arguments give equal bits.

Each kernel is compiled when it is first launched, and CuPy caches the result on disk. Work goes to the current stream.
"""

from __future__ import annotations

from functools import cache
from typing import Any
import warnings

import cupy
import numpy as np

from pce_mpi.loss.kernels.compilation import (
    CPP_TYPES,
    DTYPE_CODES,
    FIELD_BITS,
    OPTIONS,
    Kernel,
    fused_kernel,
    source_of,
)
from pce_mpi.loss.kernels.launch_config import (
    CLUSTER_CAPABILITY,
    CLUSTER_SIZES,
    MAX_GRID_X,
    MERGE_BLOCK_THREADS,
    WARP_SIZE,
    LaunchConfig,
    cluster_size,
    fused_block_threads,
)
from pce_mpi.loss.kernels.parameters import ClassWeights, RowGradient, Transform
from pce_mpi.loss.kernels.rows import Output, Rows, rows_of
from pce_mpi.loss.softmax_state import StateFields

Array = Any  # cupy.ndarray

# Scales outside are multiplied in float64: in float32 the products would overflow or lose bits.
_FLOAT32_SCALES = (2.0**-64, 2.0**64)


_NULL = np.uint64(0)


@cache
def _function(kernel: Kernel, device: int) -> Any:
    module = cupy.RawModule(code=source_of(kernel.file), options=OPTIONS, name_expressions=[kernel.name])
    return module.get_function(kernel.name)


def _launch(kernel: Kernel, grid: tuple[int, int], block_threads: int, *arguments: Any) -> None:
    """Launch a kernel; None among its arguments is a null pointer, arrays live until the launch."""
    given = tuple(_NULL if argument is None else argument for argument in arguments)
    _function(kernel, cupy.cuda.Device().id)((*grid, 1), (block_threads, 1, 1), given)


def _in_rows(rows: Rows) -> tuple[Array, np.int64]:
    return rows.array, np.int64(rows.pitch)


def _arithmetic(compute_dtype: np.dtype[Any], transform: Transform) -> str:
    """Return the C++ type to compute in; a softcap needs double, as the exponential magnifies the error of its tanh."""
    least, most = _FLOAT32_SCALES
    in_float32 = compute_dtype == np.float32 and transform.softcap is None and least <= transform.scale <= most
    return "float" if in_float32 else "double"


def _fields_of(state_fields: StateFields) -> np.uint32:
    return np.uint32(FIELD_BITS["held"] + sum(FIELD_BITS[name] for name in state_fields.names[1:]))


def _columns_of(columns: Array | None) -> Array | None:
    return None if columns is None else cupy.asarray(columns, dtype=np.int64)


def _float64(array: Array | None) -> Array | None:
    """Convert to one number per row, contiguous as the kernels read it: a column of the states is strided."""
    return None if array is None else cupy.ascontiguousarray(array, dtype=np.float64)


def _weight_of(weights: ClassWeights) -> Array | None:
    return None if weights.weight is None else cupy.asarray(weights.weight, dtype=np.float64)


def _options_of(weights: ClassWeights, transform: Transform) -> list[Any]:
    """Return the arguments of the general kernels for class weights and a softcap, but the weight itself."""
    probabilities, code, pitch = None, 0, 0
    if weights.probabilities is not None:
        probabilities, pitch = rows_of(weights.probabilities)
        code = DTYPE_CODES[weights.probabilities.dtype.name]
    softcap = transform.softcap or 0.0
    return [
        probabilities,
        np.int32(code),
        np.int64(pitch),
        np.float64(1.0 - weights.smoothing),
        np.float64(weights.smoothing / weights.classes),
        np.float64(softcap),
        np.float64(transform.scale / softcap if softcap else 0.0),
    ]


def fill_states(
    logits: Array,
    target_column: Array | None,
    state_fields: StateFields,
    *,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    class_start: int,
) -> tuple[Array, None]:
    """Return the state of each row of this shard, and None, as no exponentials are kept for the backward pass.

    `logits` is (outer, classes, inner). `target_column` (rows,), in NumPy or CuPy, has the local column of each row's
    target, -1 if another shard has it; None if there are no index targets. States are (rows, fields) in float64, a
    column for each field of `state_fields.dtype`; the column of `argmax` has the bits of an int64.
    """
    outer, classes, inner = logits.shape
    rows = outer * inner
    scale = transform.of_differences
    if rows == 0 or classes == 0:
        return _identity(state_fields, rows, scale), None
    source = rows_of(logits)
    config = LaunchConfig.for_forward(rows, classes, logits.dtype.itemsize)
    fields, columns = _fields_of(state_fields), len(state_fields.names)
    split_states = cupy.empty((rows, config.splits, columns), np.float64)
    arguments = [
        *_grid_arguments(source, rows, classes, config),
        _columns_of(target_column),
        _weight_of(weights),
        np.float64(scale),
        fields,
        split_states,
    ]
    cpp_type, arithmetic = CPP_TYPES[logits.dtype.name], _arithmetic(compute_dtype, transform)
    plain = target_column is not None and not (
        state_fields.hold_largest or state_fields.weights or state_fields.entropy
    )
    if plain and arithmetic == "float":
        kernel = Kernel("forward.cu", f"fill_states<{cpp_type}>")
    else:
        kernel = Kernel("general_forward.cu", f"fill_general_states<{cpp_type}, {arithmetic}>")
        arguments += [*_options_of(weights, transform), np.int64(class_start)]
    _launch(kernel, (config.blocks, config.splits), config.block_threads, *arguments)
    if config.splits == 1:
        return split_states.reshape(rows, columns), None
    states = cupy.empty((rows, columns), np.float64)
    arguments = [split_states, np.int64(rows), np.int32(config.splits), np.float64(scale), fields, states]
    merge_blocks = -(-rows // (MERGE_BLOCK_THREADS // WARP_SIZE))
    _launch(Kernel("merge.cu", "merge_states"), (merge_blocks, 1), MERGE_BLOCK_THREADS, *arguments)
    return states, None


def _grid_arguments(source: Rows, rows: int, classes: int, config: LaunchConfig) -> list[Any]:
    """Return the first arguments of the forward and backward kernels: the logits, and how the grid covers them."""
    sizes = np.int64(rows), np.int64(classes), np.int32(config.chunk), np.int32(config.group_size)
    return [*_in_rows(source), *sizes]


def _identity(state_fields: StateFields, rows: int, scale: float) -> Array:
    """Return the states of no classes."""
    states = state_fields.identity(rows)
    if state_fields.scaled:
        states["scale"] = scale
    return cupy.asarray(states.view(np.float64).reshape(rows, len(state_fields.names)))


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
    """Write the gradient of the logits into `out`; both are (outer, classes, inner) and may be the same array."""
    outer, classes, inner = out.shape
    rows = outer * inner
    if rows == 0 or classes == 0:
        return
    output = Output.of(out)
    _write(output, rows_of(logits), logits.dtype, gradient, weights, transform, compute_dtype)
    output.copy_back()


def _write(
    output: Output,
    source: Rows,
    dtype: np.dtype[Any],
    gradient: RowGradient,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
) -> None:
    outer, classes, inner = output.out.shape
    rows = outer * inner
    config = LaunchConfig.for_backward(rows, classes, dtype.itemsize)
    arguments = [
        *_grid_arguments(source, rows, classes, config),
        *_in_rows(output.rows),
        _float64(gradient.max),
        _float64(gradient.factor),
        _columns_of(gradient.held_column),
        _float64(gradient.held_gradient),
        cupy.ascontiguousarray(gradient.valid),
        np.float64(transform.of_differences),
    ]
    cpp_type, arithmetic = CPP_TYPES[dtype.name], _arithmetic(compute_dtype, transform)
    if gradient.weight_factor is None and arithmetic == "float" and output.aligned_with(source, dtype):
        kernel = Kernel("backward.cu", f"write_gradient<{cpp_type}>")
    else:
        kernel = Kernel("general_backward.cu", f"write_general_gradient<{cpp_type}, {arithmetic}>")
        out_code = np.int32(DTYPE_CODES[output.out.dtype.name])
        arguments += [out_code, _float64(gradient.weight_factor), _weight_of(weights)]
        arguments += _options_of(weights, transform)
    _launch(kernel, (config.blocks, config.splits), config.block_threads, *arguments)


_NO_TRANSFORM = Transform()
# The ids of devices on which the launch of a cluster failed.
_devices_without_clusters: set[int] = set()


def fused_fits(logits: Array, compute_dtype: np.dtype[Any], transform: Transform = _NO_TRANSFORM) -> bool:
    """Return whether the fused kernel can take these rows, (outer, classes, inner).

    It computes in float32. A row must fit in the registers of a block, or from compute capability 9.0 on in those of a
    cluster of 8 blocks: 131,072 classes of 16 bits, or 98,304 of float32.
    """
    outer, classes, inner = logits.shape
    if _arithmetic(compute_dtype, transform) == "double" or not outer * classes * inner:
        return False
    blocks, device = cluster_size(classes, logits.dtype.itemsize), cupy.cuda.Device()
    if blocks > 1 and (int(device.compute_capability) < CLUSTER_CAPABILITY or device.id in _devices_without_clusters):
        return False
    return blocks <= CLUSTER_SIZES[-1] and outer * inner * blocks <= MAX_GRID_X


def fill_states_and_write_gradient(
    out: Array,
    logits: Array,
    target_column: Array,
    state_fields: StateFields,
    *,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    class_start: int,
    slope: Array,
    held: Array,
    valid: Array,
    z_loss: float,
) -> Array | None:
    """Write the gradient of unsharded rows into `out` and return their states; each logit is read once.

    Requires `fused_fits`, index targets, and neither smoothing nor softcap. The gradient, with respect to scale times
    the logits, is that of `slope` (`held` (-log p_target) + `z_loss` logsumexp**2), with p the softmax. Rows that are
    not `valid` get 0; their `target_column` is -1. `slope` and `held` are (rows,) in float64, `valid` (rows,) bool. The
    states are those of `fill_states`, with `held` in the field `held_weight`, if there is one.

    Returns None, with nothing written, if the launch of the cluster fails; from then on `fused_fits` is False for rows
    that need a cluster on this device.
    """
    outer, classes, inner = logits.shape
    rows, dtype = outer * inner, logits.dtype
    source = rows_of(logits)
    output = Output.of(out)
    blocks = cluster_size(classes, dtype.itemsize)
    states = cupy.empty((rows, len(state_fields.names)), np.float64)
    column = _columns_of(target_column)
    # Without a common alignment another kernel writes the gradient, from a factor and a held gradient for each row.
    aligned = output.aligned_with(source, dtype)
    factor, held_gradient = (None, None) if aligned else (cupy.empty(rows, np.float64) for _ in range(2))
    arguments = [
        *_in_rows(source),
        np.int32(classes),
        *_in_rows(output.rows if aligned else Rows(None, output.rows.pitch)),
        column,
        _float64(slope),
        _float64(held),
        cupy.ascontiguousarray(valid),
        np.float64(transform.scale),
        np.float64(z_loss),
        _fields_of(state_fields),
        states,
        factor,
        held_gradient,
    ]
    kernel = fused_kernel(CPP_TYPES[dtype.name], blocks)
    try:
        _launch(kernel, (rows * blocks, 1), fused_block_threads(classes, dtype.itemsize, blocks), *arguments)
    except RuntimeError as error:  # from the driver
        if blocks == 1:
            raise
        warnings.warn(f"clusters of blocks cannot be launched, logits are read twice: {error}", stacklevel=2)
        _devices_without_clusters.add(cupy.cuda.Device().id)
        return None
    if not aligned:
        gradient = RowGradient(states[:, 1], factor, None, column, held_gradient, valid)
        _write(output, source, dtype, gradient, ClassWeights(), transform, compute_dtype)
    output.copy_back()
    return states
