"""The loops over the logits on a GPU: launches the CUDA kernels in the .cu files of this folder.

README.md in this folder has a picture of the grids, and says which kernel is launched when. `compiled` has the same
loops for the host, and `definition` defines the bits of both.

Logits are (outer, classes, inner), the class axis in the middle. The kernels read rows of consecutive classes at a
constant pitch. Logits in another memory order are copied first, and their gradient is copied back. Rows may start at
any address: a kernel loads vectors between the first and the last multiple of 16 bytes, and single classes outside.

States, and what follows from them, are matrices of words of 8 bytes, a row for each row of logits.

Each kernel is compiled when it is first launched, and CuPy caches the result on disk. Work goes to the current stream.
"""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any

import cupy
import numpy as np

from pce_mpi.loss.kernels.compilation import ARITHMETICS, CPP_TYPES, DTYPE_CODES, OPTIONS, Kernel, source_of
from pce_mpi.loss.kernels.definition import StateFields, Sums
from pce_mpi.loss.kernels.elementary import SINGLE, Arithmetic
from pce_mpi.loss.kernels.launch_config import BLOCK_THREADS, MERGE_BLOCK_THREADS, WARP_SIZE, LaunchConfig
from pce_mpi.loss.kernels.parameters import ClassWeights, Transform
from pce_mpi.loss.kernels.rows import Output, Rows, rows_of

Array = Any  # cupy.ndarray

# The plain kernels reduce exponents in float32 alone; products with scales outside could overflow or lose bits.
_PLAIN_SCALES = (2.0**-64, 2.0**64)
# `RowSoftmax` in states.h.
_SOFTMAX_WORDS = 11
_NULL = np.uint64(0)


@cache
def _function(kernel: Kernel, device: int) -> Any:
    module = cupy.RawModule(code=source_of(kernel.file), options=OPTIONS, name_expressions=[kernel.name])
    return module.get_function(kernel.name)


def _launch(kernel: Kernel, grid: tuple[int, int], block_threads: int, *arguments: Any) -> None:
    """Launch a kernel; None among its arguments is a null pointer, arrays live until the launch."""
    given = tuple(_NULL if argument is None else argument for argument in arguments)
    _function(kernel, cupy.cuda.Device().id)((*grid, 1), (block_threads, 1, 1), given)


def _launch_for_rows(kernel: Kernel, rows: int, *arguments: Any) -> None:
    """Launch a kernel with a thread for each row."""
    _launch(kernel, (-(-rows // BLOCK_THREADS), 1), BLOCK_THREADS, *arguments)


def _bits_of(fields: StateFields) -> np.int32:
    """Return the fields as `Field` in states.h has them."""
    names = [field.name for field in dataclass_fields(StateFields)]
    return np.int32(sum(getattr(fields, name) << bit for bit, name in enumerate(names)))


def _name_of(arithmetic: Arithmetic) -> str:
    """Return the C++ type of an arithmetic."""
    return ARITHMETICS[arithmetic is not SINGLE]


def _is_plain(transform: Transform, arithmetic: Arithmetic) -> bool:
    """Return whether the kernels without options can compute z: float32 alone can."""
    least, most = _PLAIN_SCALES
    exact = float(np.float32(transform.scale)) == transform.scale
    return arithmetic is SINGLE and transform.softcap is None and least <= transform.scale <= most and exact


def _plain_name(function: str, dtype: np.dtype[Any], transform: Transform) -> str:
    return f"pce::{function}<{CPP_TYPES[dtype.name]}, {'true' if transform.scale != 1.0 else 'false'}>"


def _weight_of(weights: ClassWeights, used: bool) -> Array | None:
    return cupy.asarray(weights.weight, dtype=np.float64) if used and weights.weight is not None else None


def _probabilities_of(weights: ClassWeights, used: bool) -> list[Any]:
    """Return the arguments of the general kernels for target probabilities."""
    if not used or weights.probabilities is None:
        return [None, np.int32(0), np.int64(0), np.float64(1.0), np.float64(0.0)]
    probabilities, pitch = rows_of(weights.probabilities)
    code = np.int32(DTYPE_CODES[weights.probabilities.dtype.name])
    share = weights.smoothing / weights.classes
    return [probabilities, code, np.int64(pitch), np.float64(1.0 - weights.smoothing), np.float64(share)]


def _transform_arguments(transform: Transform) -> tuple[np.float64, np.float64]:
    return np.float64(transform.scale), np.float64(transform.softcap or 0.0)


def fill_states(
    logits: Array,
    target_column: Array | None,
    fields: StateFields,
    *,
    weights: ClassWeights,
    transform: Transform,
    arithmetic: Arithmetic,
    class_start: int,
) -> Array:
    """Return the states of the rows of logits (outer, classes, inner), uint64 (rows, words), as in `fields.dtype`.

    `target_column` (rows,), in NumPy or CuPy, has the local column of each row's target, -1 if another shard has it;
    None if there are no index targets.
    """
    outer, classes, inner = logits.shape
    rows, words = outer * inner, fields.dtype.itemsize // 8
    if rows == 0 or classes == 0:
        return cupy.asarray(fields.identity(rows).view(np.uint64).reshape(rows, words))
    source = rows_of(logits)
    config = LaunchConfig.for_forward(rows, classes, logits.dtype.itemsize)
    sums = fields.weight or fields.weighted_logit or fields.entropy
    scale, softcap = _transform_arguments(transform)
    split_states = cupy.empty((rows, config.splits, words), np.uint64)
    arguments = [
        *_grid_arguments(source, rows, classes, config),
        None if target_column is None else cupy.asarray(target_column, dtype=np.int64),
        _weight_of(weights, sums or fields.held_weight),
        scale,
        _bits_of(fields),
        split_states,
    ]
    special = sums or fields.hold_largest or fields.argmax or fields.target or target_column is None
    if not special and weights.probabilities is None and _is_plain(transform, arithmetic):
        kernel = Kernel("forward.cu", _plain_name("fill_states", logits.dtype, transform))
    else:
        types = f"{CPP_TYPES[logits.dtype.name]}, {_name_of(arithmetic)}"
        kernel = Kernel("general_forward.cu", f"pce::fill_general_states<{types}>")
        arguments += [softcap, *_probabilities_of(weights, sums or fields.held_weight), np.int64(class_start)]
    _launch(kernel, (config.blocks, config.splits), config.block_threads, *arguments)
    if config.splits == 1:
        return split_states.reshape(rows, words)
    states = cupy.empty((rows, words), np.uint64)
    arguments = [split_states, np.int64(rows), np.int32(config.splits), scale, softcap, _bits_of(fields), states]
    merge_blocks = -(-rows // (MERGE_BLOCK_THREADS // WARP_SIZE))
    kernel = Kernel("merge.cu", f"pce::merge_states<{_name_of(arithmetic)}>")
    _launch(kernel, (merge_blocks, 1), MERGE_BLOCK_THREADS, *arguments)
    return states


def _grid_arguments(source: Rows, rows: int, classes: int, config: LaunchConfig) -> list[Any]:
    """Return the first arguments of the forward and backward kernels: the logits, and how the grid covers them."""
    sizes = np.int64(rows), np.int64(classes), np.int32(config.chunk), np.int32(config.group_size)
    return [source.array, np.int64(source.pitch), *sizes]


def row_softmax(
    states: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic, class_weights: Sums | None
) -> Array:
    """Return the softmax of each row, float64 (rows, 11): the words of `RowSoftmax` in states.h.

    `exponent` has the bits of an int64. `class_weights` is the sum of the weights of all classes, one row of `Sums`,
    for states without such a sum.
    """
    softmax = cupy.empty((len(states), _SOFTMAX_WORDS), np.float64)
    if not len(states):
        return softmax
    sums = None
    if class_weights is not None:
        grids, limbs = (cupy.asarray(part) for part in class_weights)
        sums = cupy.concatenate([grids.astype(np.int64).view(np.uint64), limbs[0]])
    kernel = Kernel("row_softmax.cu", f"pce::fill_row_softmax<{_name_of(arithmetic)}>")
    arguments = [np.int64(len(states)), *_transform_arguments(transform), _bits_of(fields), sums, softmax]
    _launch_for_rows(kernel, len(states), cupy.ascontiguousarray(states), *arguments)
    return softmax


def sum_of(values: Array) -> Array:
    """Return the sum of float64 numbers as uint64 (4,): the grid and the limbs of `Sum` in states.h."""
    total = cupy.empty(4, np.uint64)
    arguments = cupy.ascontiguousarray(values, np.float64), np.int64(values.size), total
    _launch(Kernel("sums.cu", "pce::sum_values"), (1, 1), BLOCK_THREADS, *arguments)
    return total


def values_of(sums: Array) -> Array:
    """Return the values of sums, (k, 4) words, rounded to float64 (k,)."""
    values = cupy.empty(len(sums), np.float64)
    if len(sums):
        arguments = cupy.ascontiguousarray(sums), np.int64(len(sums)), values
        _launch_for_rows(Kernel("sums.cu", "pce::fill_values"), len(sums), *arguments)
    return values


def write_gradient(
    out: Array,
    logits: Array,
    rows: Array,
    fields: StateFields,
    *,
    weights: ClassWeights,
    transform: Transform,
    arithmetic: Arithmetic,
) -> None:
    """Write the gradient of the logits into `out`; both are (outer, classes, inner) and may be the same array.

    `rows` has the words of `RowGradient` in gradients.h, (rows, 10).
    """
    outer, classes, inner = out.shape
    count = outer * inner
    if count == 0 or classes == 0:
        return
    output, source = Output.of(out), rows_of(logits)
    config = LaunchConfig.for_backward(count, classes, logits.dtype.itemsize)
    scale, softcap = _transform_arguments(transform)
    used = fields.weighted_logit
    arguments = [
        *_grid_arguments(source, count, classes, config),
        output.rows.array,
        np.int64(output.rows.pitch),
        cupy.ascontiguousarray(rows),
        scale,
    ]
    if not used and _is_plain(transform, arithmetic) and output.aligned_with(source, logits.dtype):
        kernel = Kernel("backward.cu", _plain_name("write_gradient", logits.dtype, transform))
    else:
        types = f"{CPP_TYPES[logits.dtype.name]}, {_name_of(arithmetic)}"
        kernel = Kernel("general_backward.cu", f"pce::write_general_gradient<{types}>")
        arguments += [_bits_of(fields), np.int32(DTYPE_CODES[out.dtype.name]), softcap]
        arguments += [_weight_of(weights, used), *_probabilities_of(weights, used)]
    _launch(kernel, (config.blocks, config.splits), config.block_threads, *arguments)
    output.copy_back()
