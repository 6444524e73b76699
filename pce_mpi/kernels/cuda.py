"""The loops over the logits on a GPU, which launch the CUDA kernels in the .cu files of this folder.

README.md in this folder has a picture of the grids, and says which kernel is launched when. `compiled` has the same
loops for the host, and `definition` defines the bits of both.

Logits are (outer, classes, inner), the class axis in the middle. The kernels read rows of consecutive classes at a
constant pitch. Logits in another memory order are copied first, and their gradient is copied back. Rows may start at
any address: a kernel loads vectors between the first and the last multiple of 16 bytes, and single classes outside.

States, and the numbers computed from them, are matrices of words of 8 bytes, a row for each row of logits.

Each kernel is compiled when it is first launched, and CuPy caches the result on disk. Work goes to the current stream.
"""

from __future__ import annotations

from functools import cache, cached_property, lru_cache
from typing import Any

import cupy
import numpy as np

from pce_mpi.arrays import DType, HostArray, is_floating
from pce_mpi.kernels import classes, compilation
from pce_mpi.kernels.classes import bits_of, sums_of_equal as sums_of_equal
from pce_mpi.kernels.compilation import Kernel, LaunchConfig, loop, source_of
from pce_mpi.kernels.interface import (
    DOUBLE,
    ROW_GRADIENT,
    ROW_SOFTMAX,
    SINGLE,
    STATISTICS,
    ClassWeights,
    GradientOf,
    Mean,
    MergedStates,
    Pair,
    Pass,
    Precision,
    StateFields,
    Transform,
    Upstream,
)
from pce_mpi.kernels.losses import LossTerms
from pce_mpi.kernels.row_layout import Output, Rows, rows_of

Array = Any  # cupy.ndarray

# The loops over vectors take scales in this range: products with others could overflow or lose bits.
_NEAR_SCALES = (2.0**-64, 2.0**64)
_NULL = np.uint64(0)


@cache
def _function(kernel: Kernel, device: int) -> Any:
    module = cupy.RawModule(code=source_of(kernel.file), options=compilation.OPTIONS, name_expressions=[kernel.name])
    return module.get_function(kernel.name)


@cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


def _launch(
    kernel: Kernel, grid: tuple[int, int], *arguments: Any, block_threads: int = compilation.BLOCK_THREADS
) -> None:
    """Launch a kernel; None among its arguments is a null pointer, and arrays are kept until the launch."""
    given = tuple(_NULL if argument is None else argument for argument in arguments)
    _function(kernel, cupy.cuda.Device().id)((*grid, 1), (block_threads, 1, 1), given)


def _launch_for_rows(kernel: Kernel, rows: int, *arguments: Any) -> None:
    """Launch a kernel with a thread for each row."""
    _launch(kernel, (-(-rows // compilation.BLOCK_THREADS), 1), *arguments)


def _code_of(dtype: DType) -> np.int32:
    return np.int32(compilation.DTYPE_CODES[dtype.name])


def _name_of(precision: Precision) -> str:
    """Return the C++ type of a precision."""
    return compilation.PRECISIONS[precision is not SINGLE]


def _way_of(scale: float) -> str:
    """Return how the vector loops compute z: `Way` in reduction.cuh."""
    exact = float(np.float32(scale)) == scale
    return "PLAIN" if scale == 1.0 else "SCALED" if exact else "SCALED_IN_DOUBLE"


@lru_cache(maxsize=1024)
def _loop_of(function: str, dtype: DType, fields: int, weighted: bool, how: Pass) -> Kernel | None:
    """Return the kernel with a loop over vectors for these fields, None if the general one has to do it."""
    (least, most), scale = _NEAR_SCALES, how.transform.scale
    ones = not fields & compilation.WEIGHTED_LOGIT or not weighted
    if how.precision is not SINGLE or how.transform.softcap is not None or not ones or not least <= scale <= most:
        return None
    kernel = loop(function, dtype.name, _way_of(scale), fields)
    return kernel if kernel in compilation.LOOPS else None


def _weight_of(weights: ClassWeights, used: bool) -> Array | None:
    return cupy.asarray(weights.weight, dtype=np.float64) if used and weights.weight is not None else None


def _probabilities_of(weights: ClassWeights, used: bool) -> list[Any]:
    """Return the arguments of the general kernels for target probabilities."""
    if not used or weights.probabilities is None:
        return [None, np.int32(0), np.int64(0), np.float64(1.0), np.float64(0.0)]
    probabilities, pitch = rows_of(weights.probabilities)
    code, share = _code_of(weights.probabilities.dtype), weights.smoothing / weights.classes
    return [probabilities, code, np.int64(pitch), np.float64(1.0 - weights.smoothing), np.float64(share)]


def _transform_arguments(transform: Transform) -> tuple[np.float64, np.float64]:
    return np.float64(transform.scale), np.float64(transform.softcap or 0.0)


def valid_rows(targets: Array, _: int) -> tuple[None, bool, int]:
    """Return that nothing is known: `columns_of` finds which rows count, and the host does not wait for that."""
    return None, False, 0


def columns_of(targets: Array, ignored: int, class_start: int, num_classes: int) -> tuple[Array, Array, Array]:
    """Return the local columns of contiguous class numbers (rows,), -1 in rows that do not count, and which rows count.

    Also return whether one of those that count is no class: 1 or 0 in an int32, (1,).
    """
    rows, numbers = len(targets), targets.astype(np.int64, copy=False)
    found = cupy.empty(rows, np.int64), cupy.empty(rows, np.bool_), cupy.zeros(1, np.int32)
    if rows:
        least = 0 if targets.dtype.kind == "u" else -(2**63)
        can_be = least <= ignored < least + 2**64
        of_ignored = np.uint64(ignored % 2**64 if can_be else 0).view(np.int64), np.bool_(can_be)
        given = np.int64(rows), *of_ignored, np.int64(class_start), np.int64(num_classes)
        _launch_for_rows(Kernel("targets.cu", "pce::fill_target_columns"), rows, numbers, *given, *found)
    return found


def fill_states(
    logits: Array, target_column: Array | None, how: Pass, weights: ClassWeights, class_start: int
) -> Array:
    """Return the states of the rows of logits (outer, classes, inner), uint64 (rows, words), as in `fields.dtype`.

    `target_column` (rows,), in NumPy or CuPy, has the local column of each row's target, -1 if another shard has it;
    None if there are no index targets.
    """
    outer, classes, inner = logits.shape
    rows, fields = outer * inner, how.fields
    if rows == 0 or classes == 0:
        return cupy.asarray(fields.identity(rows).view(np.uint64).reshape(rows, fields.dtype.itemsize // 8))
    words = fields.dtype.itemsize // 8
    source = rows_of(logits)
    multiprocessors = _multiprocessors(cupy.cuda.Device().id)
    config = LaunchConfig.for_forward(rows, classes, logits.dtype.itemsize, multiprocessors=multiprocessors)
    sums = fields.weight or fields.weighted_logit or fields.entropy
    scale, softcap = _transform_arguments(how.transform)
    split_states = cupy.empty((rows, config.splits, words), np.uint64)
    targets = None if target_column is None else cupy.asarray(target_column, dtype=np.int64)
    given = targets, _weight_of(weights, sums or fields.held_weight), scale, np.int32(fields.flags), split_states
    arguments = [*_grid_arguments(source, rows, classes, config), *given]
    looped = fields.flags & (compilation.HOLD_LARGEST | compilation.WEIGHTED_LOGIT | compilation.ENTROPY)
    kernel = _loop_of("fill_states", logits.dtype, looped, weights.differ, how)
    if kernel is not None:
        arguments.append(np.int64(class_start))
    else:
        types = f"{compilation.CPP_TYPES[logits.dtype.name]}, {_name_of(how.precision)}"
        kernel = Kernel("general_forward.cu", f"pce::fill_general_states<{types}>")
        arguments += [softcap, *_probabilities_of(weights, sums or fields.held_weight), np.int64(class_start)]
    _launch(kernel, (config.blocks, config.splits), *arguments, block_threads=config.block_threads)
    if config.splits == 1:
        return split_states.reshape(rows, words)
    states = cupy.empty((rows, words), np.uint64)
    arguments = [split_states, np.int64(rows), np.int32(config.splits), scale, softcap, np.int32(fields.flags), states]
    merge_blocks = -(-rows // (compilation.MERGE_BLOCK_THREADS // compilation.WARP_SIZE))
    kernel = Kernel("merge.cu", f"pce::merge_states<{_name_of(how.precision)}>")
    _launch(kernel, (merge_blocks, 1), *arguments, block_threads=compilation.MERGE_BLOCK_THREADS)
    return states


def _grid_arguments(source: Rows, rows: int, classes: int, config: LaunchConfig) -> list[Any]:
    """Return the first arguments of the forward and backward kernels: the logits, and how the grid covers them."""
    sizes = np.int64(rows), np.int64(classes), np.int32(config.chunk), np.int32(config.group_size)
    return [source.array, np.int64(source.pitch), *sizes]


class GpuStates(MergedStates):
    """Merged states on a GPU."""

    def __init__(self, states: Array, how: Pass, class_weights: Array | None):
        super().__init__(states)
        self.precision = how.precision
        sums = None if class_weights is None else cupy.asarray(class_weights)
        self.margin = _numbers_of(how.transform.margin)
        call = *_transform_arguments(how.transform), np.int32(how.fields.flags), sums
        self._arguments = cupy.ascontiguousarray(states), np.int64(len(self)), *call

    def launch(self, file: str, function: str, *arguments: Any) -> None:
        """Launch a kernel that computes something for each row."""
        if len(self):
            kernel = Kernel(file, f"pce::{function}<{_name_of(self.precision)}>")
            _launch_for_rows(kernel, len(self), *self._arguments, *arguments)

    @cached_property
    def columns(self) -> Array:
        """The columns of `ROW_SOFTMAX`."""
        columns = cupy.empty((len(self), len(ROW_SOFTMAX)), np.float64)
        self.launch("row_softmax.cu", "fill_row_softmax", *self.margin, columns)
        return columns


def row_softmax(states: Array, how: Pass, class_weights: Array | None) -> GpuStates:
    """Return the softmax of each row.

    `class_weights`, here or on the host, is the sum of the weights of all classes, for states without such a sum.
    """
    return GpuStates(states, how, class_weights)


def _numbers_of(terms: tuple[float, ...]) -> list[np.float64]:
    return [np.float64(number) for number in terms]


def row_losses(softmax: GpuStates, fields: StateFields, valid: Array | None, terms: LossTerms) -> Array:
    """Return the losses and weights of rows, (2, rows); `losses.row_losses` has the arguments.

    `valid` is None if all rows count.
    """
    losses = cupy.empty((2, len(softmax)), np.float64)
    softmax.launch("losses.cu", "fill_row_losses", *softmax.margin, valid, *_numbers_of(terms), losses)
    return losses


def _upstream_arguments(upstream: Any) -> list[Any]:
    """Return the arguments of kernels for an upstream gradient: a NumPy array of one number, or any of CuPy's."""
    if isinstance(upstream, np.ndarray):
        return [None, np.int32(0), np.int32(0), np.float64(upstream[0])]
    array = cupy.ascontiguousarray(upstream)
    return [array, _code_of(array.dtype), np.int32(array.size > 1), np.float64(0.0)]


def row_gradients(
    softmax: GpuStates,
    fields: StateFields,
    valid: Array | None,
    target_column: Array | None,
    upstream: Any,
    divisor: Any,
    _: float,
    terms: LossTerms,
    wrong: Array | None = None,
) -> Array:
    """Return the rows of a gradient; `losses.row_gradients` has the arguments.

    If `wrong`, that of `columns_of`, is 1, nothing is to be written: `valid` is -1 in all rows.

    `valid` is None if all rows count. `upstream` and `divisor` are of floating-point numbers, and in NumPy if they are
    one that the host knows; such a divisor is 1. The kernel takes the scale from the transform of the softmax.
    """
    gradients = cupy.empty((len(softmax), len(ROW_GRADIENT)), np.float64)
    given = *_upstream_arguments(upstream), None if isinstance(divisor, np.ndarray) else divisor
    numbers = *softmax.margin, valid, *_numbers_of(terms)
    softmax.launch("losses.cu", "fill_row_gradients", *numbers, target_column, *given, wrong, gradients)
    return gradients


def row_statistics(softmax: GpuStates, valid: Array | None, dtype: DType) -> tuple[Array, Array]:
    """Return statistics of rows; `losses.row_statistics` has the arguments. `valid` is None if all rows count."""
    numbers, argmax = cupy.empty((5, len(softmax)), dtype), cupy.empty(len(softmax), np.int64)
    softmax.launch("statistics.cu", "fill_row_statistics", valid, numbers, _code_of(numbers.dtype), argmax)
    return numbers, argmax


def target_log_probs(softmax: GpuStates, chosen: Array, valid: Array, transform: Transform, dtype: DType) -> Array:
    """Return the log-probabilities of chosen logits; `losses.target_log_probs` has the arguments.

    Each is computed as that of a single target, from a copy of its row's state.
    """
    states = cupy.repeat(softmax.states[:, :_WORDS], chosen.shape[1], axis=0)
    targets = (_wide(chosen) + 0.0).reshape(-1, 1).view(np.uint64)
    how = Pass(StateFields(hold_largest=True, target=True), transform, softmax.precision)
    each = GpuStates(cupy.concatenate([states, targets], axis=1), how, None)
    return row_statistics(each, cupy.ascontiguousarray(valid).reshape(-1), dtype)[0][3].reshape(chosen.shape)


# The words of a state whose largest logit is held apart, but for optional fields.
_WORDS = StateFields(hold_largest=True).dtype.itemsize // 8


def statistics_gradients(
    softmax: GpuStates, valid: Array | None, target_column: Array | None, classes: range, _: float, upstream: Upstream
) -> Array:
    """Return the rows of a gradient of statistics; `losses.statistics_gradients` has the arguments.

    Those that `row_gradients` takes are as there.
    """
    gradients = cupy.empty((len(softmax), len(ROW_GRADIENT)), np.float64)
    given = [argument for name in STATISTICS for argument in _upstream_arguments(upstream[name])]
    shard = np.int64(classes.start), np.int64(len(classes))
    softmax.launch("statistics.cu", "fill_statistics_gradients", valid, target_column, *shard, *given, gradients)
    return gradients


def _partial_sums(items: Array) -> Array:
    """Return the sums of parts of (arrays, count) numbers, (arrays, parts, 4), or the numbers, if these are few."""
    arrays, count = items.shape
    if count <= compilation.VALUES_OF_BLOCK:
        return items
    sums = cupy.empty((arrays, -(-count // compilation.VALUES_OF_BLOCK), 4), np.uint64)
    _launch(Kernel("sums.cu", "pce::sum_items<double>"), (sums.shape[1], arrays), *_items(items), sums)
    return sums


def _items(items: Array) -> tuple[Array, np.int64]:
    return items, np.int64(items.shape[1])


def _kernel_of_sums(function: str, items: Array) -> Kernel:
    """Return the kernel that adds up float64 numbers, or sums of them."""
    return Kernel("sums.cu", f"pce::{function}<{'double' if items.dtype == np.float64 else 'pce::Sum'}>")


def sums_of(*arrays: Array) -> Array:
    """Return the sums of arrays of float64 numbers, finite or not: (arrays, 4) words, a grid and limbs."""
    sums = cupy.empty((len(arrays), 4), np.uint64)
    for total, values in zip(sums, arrays, strict=True):
        items = _partial_sums(cupy.ascontiguousarray(values, np.float64)[None])
        _launch(_kernel_of_sums("sum_items", items), (1, 1), *_items(items), total)
    return sums


def loss_of_rows(losses: Array, mean: bool, dtype: DType) -> tuple[Array, Array]:
    """Return the loss and the divisor of its gradient; `losses` is that of `row_losses`."""
    return _loss_of(_partial_sums(losses), mean, dtype)


def loss_of(sums: Array, mean: bool, dtype: DType) -> tuple[Array, Array]:
    """Return the loss and the divisor of its gradient; `definition.loss_of` has the arguments."""
    return _loss_of(cupy.ascontiguousarray(sums)[:, None], mean, dtype)


def _loss_of(items: Array, mean: bool, dtype: DType) -> tuple[Array, Array]:
    loss, divisor = cupy.empty((), dtype), cupy.empty(1, np.float64)
    arguments = *_items(items), np.bool_(mean), loss, _code_of(loss.dtype), divisor
    _launch(_kernel_of_sums("fill_loss", items), (1, 1), *arguments)
    return loss, divisor


def largest_of(x: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest elements of each row and their columns; see `classes.largest_of`."""
    if not is_floating(x.dtype):
        return classes.largest_of(x, k)
    if k == 1:
        columns = _largest_columns(x)
        bits = cupy.take_along_axis(x.view(f"u{x.dtype.itemsize}"), columns, axis=1)
        return _wide(bits.view(x.dtype)), columns
    return classes.largest_of(x, k, _wide)


def _wide(x: Array) -> Array:
    """Return floating-point numbers as float64: CuPy compares all subnormal numbers of float32 as equal."""
    return converted(x, np.dtype(np.float64))


def _largest_columns(x: Array) -> Array:
    """Return the column of the largest element of each row, (rows, 1), by the pass of the statistics."""
    how = Pass(StateFields(hold_largest=True, argmax=True), Transform(), DOUBLE if x.dtype == np.float64 else SINGLE)
    states = fill_states(x[:, :, None], None, how, ClassWeights(), 0)
    return states[:, -1:].view(np.int64)  # the last field of such states


def taken(x: Array, axis: int, columns: HostArray, other: int = 0) -> Array:
    """Return the bits of the elements in `columns`; `chosen.taken` has the arguments."""
    found = cupy.empty(columns.shape, f"u{x.dtype.itemsize}")
    _launch_for_columns("take", x, axis, columns, np.uint64(other), found)
    return found


def put(x: Array, axis: int, columns: HostArray, values: Array) -> None:
    """Put `values` into `columns` of each row of `x`; `chosen.put` has the arguments."""
    _launch_for_columns("put", x, axis, columns, cupy.ascontiguousarray(bits_of(values)))


def _launch_for_columns(function: str, x: Array, axis: int, columns: HostArray, *arguments: Any) -> None:
    """Launch a kernel with a thread for each of `columns`, (rows, chosen)."""
    if columns.size:
        lengths, strides = ((*each[:axis], *each[axis + 1 :], each[axis]) for each in (x.shape, x.strides))
        rows = np.zeros(1, np.int64)
        for length, stride in zip(lengths[:-1], strides[:-1], strict=True):
            rows = np.add.outer(rows, stride // x.itemsize * np.arange(length)).reshape(-1)
        places = rows[:, None] + columns * (strides[-1] // x.itemsize)
        places = np.where((columns >= 0) & (columns < lengths[-1]), places, np.iinfo(np.int64).min)
        kernel = Kernel("chosen.cu", f"pce::{function}_elements<{compilation.WORDS[x.itemsize]}>")
        given = cupy.asarray(np.ascontiguousarray(places))
        _launch_for_rows(kernel, columns.size, bits_of(x), given, np.int64(columns.size), *arguments)


def kept_at_least(x: Array, least: HostArray) -> tuple[Array, Array]:
    """Return rows (rows, classes) with -inf in place of the elements below the value of their row in `least`.

    Also return how many of each row are not below it, a nan among them: (rows,).
    """
    rows, classes = x.shape
    kept, counts = cupy.empty(x.shape, x.dtype), cupy.zeros(rows, np.int64)
    if x.size:
        source = rows_of(x[:, :, None])
        sizes = _code_of(x.dtype), np.int64(source.pitch), np.int64(classes)
        given = source.array, *sizes, cupy.asarray(least, np.float64), kept, counts
        _launch(Kernel("chosen.cu", "pce::keep_at_least"), (rows, 1), *given)
    return kept, counts


def converted(values: Array, dtype: DType) -> Array:
    """Return floating-point numbers in another dtype, rounded once, subnormal ones too."""
    result = cupy.empty(values.shape, dtype)
    if result.size:
        source = cupy.ascontiguousarray(values), _code_of(values.dtype), np.int64(result.size)
        kernel = Kernel("conversion.cu", "pce::convert")
        _launch_for_rows(kernel, result.size, *source, result, _code_of(dtype))
    return result


def halves_of(values: Array, dtype: DType, scale: Array | None, count: int) -> list[Array]:
    """Return halves of which a matrix of float32 numbers, times `scale`, is the sum: two, or the first alone.

    The rows of the matrix are of consecutive elements; `scale` is one float32 number, None for 1.
    """
    rows, columns = values.shape
    halves = [cupy.empty(values.shape, dtype) for _ in range(count)]
    if values.size:
        parts, pitch = -(-columns // compilation.BLOCK_THREADS), values.strides[0] // values.itemsize
        sizes = np.int64(pitch), np.uint32(parts), np.int64(columns)
        outputs = halves[0], halves[1] if count > 1 else None, _code_of(np.dtype(dtype))
        kernel = Kernel("conversion.cu", "pce::split_halves")
        _launch(kernel, (rows * parts, 1), values, *sizes, scale, *outputs)
    return halves


def write_gradient(out: Array, logits: Array, rows: Array, how: Pass, weights: ClassWeights) -> None:
    """Write the gradient of the logits into `out`; both are (outer, classes, inner) and may be the same array.

    `rows` has the columns of `ROW_GRADIENT`, (rows, columns).
    """
    outer, classes, inner = out.shape
    count = outer * inner
    if count == 0 or classes == 0:
        return
    output, source = Output.of(out), rows_of(logits)
    config = LaunchConfig.for_backward(count, classes, logits.dtype.itemsize)
    scale, softcap = _transform_arguments(how.transform)
    fields, used = how.fields, how.fields.weighted_logit
    given = output.rows.array, np.int64(output.rows.pitch), cupy.ascontiguousarray(rows), scale
    arguments = [*_grid_arguments(source, count, classes, config), *given]
    looped = fields.flags & (compilation.WEIGHTED_LOGIT | compilation.ENTROPY)
    kernel = _loop_of("write_gradient", logits.dtype, looped, weights.differ, how)
    if kernel is None or not output.aligned_with(source, logits.dtype):
        types = f"{compilation.CPP_TYPES[logits.dtype.name]}, {_name_of(how.precision)}"
        kernel = Kernel("general_backward.cu", f"pce::write_general_gradient<{types}>")
        arguments += [np.int32(fields.flags), _code_of(out.dtype), softcap]
        arguments += [_weight_of(weights, used), *_probabilities_of(weights, used)]
    _launch(kernel, (config.blocks, config.splits), *arguments, block_threads=config.block_threads)
    output.copy_back()


def is_written_in_place(out: Array) -> bool:
    """Return whether `write_gradient` writes to `out` itself, rather than to memory that is copied there."""
    return Output.of(out).scratch is None


def logsumexp_differences(held: Array, held_nll: Array, transform: Transform) -> Array:
    """Return the differences of logsumexp of rows, (rows, 3); see `divergence.logsumexp_differences`."""
    rows = len(held) // 2
    differences = cupy.empty((rows, 3), np.float64)
    given = *map(cupy.ascontiguousarray, (held, held_nll)), np.int64(rows), np.float64(transform.scale)
    if rows:
        _launch_for_rows(Kernel("divergence.cu", "pce::fill_logsumexp_differences"), rows, *given, differences)
    return differences


def _pair_arguments(pair: Pair) -> list[Any]:
    arguments: list[Any] = []
    for logits in (pair.p, pair.q):
        source = rows_of(logits)
        arguments += [source.array, _code_of(logits.dtype), np.int64(source.pitch)]
    numbers = pair.p_rows, pair.q_rows, pair.difference
    mean = map(np.float64, pair.mean or [0.0] * 4)
    scale, single = np.float64(pair.transform.scale), np.bool_(pair.single)
    return [*arguments, *map(cupy.ascontiguousarray, numbers), scale, *mean, single]


def divergence_sums(pair: Pair) -> Array:
    """Return the sums of a divergence over this shard's classes; see `divergence.divergence_sums`."""
    rows, classes = len(pair.difference), np.int64(pair.p.shape[1])
    sums = cupy.empty((rows, 6), np.uint64)
    if rows:
        given = *_pair_arguments(pair), classes
        _launch(Kernel("divergence.cu", "pce::sum_divergences"), (rows, 1), *given, sums)
    return sums


def row_divergences(words: Array, mean: Mean | None) -> Array:
    """Return the divergence of each row and more, (3, rows); see `divergence.row_divergences`."""
    rows = len(words)
    divergences = cupy.empty((3, rows), np.float64)
    if rows:
        weights = map(np.float64, mean[:2] if mean else (0.0, 0.0))
        given = cupy.ascontiguousarray(words), np.int64(rows), *weights, divergences
        _launch_for_rows(Kernel("divergence.cu", "pce::fill_divergences"), rows, *given)
    return divergences


def write_divergence_gradient(
    out: Array, pair: Pair, of: GradientOf, slope: Array, constant: Array, valid: Array
) -> None:
    """Write the gradient of a divergence; `divergence.write_divergence_gradient` has the arguments."""
    rows, classes = len(slope), out.shape[1]
    if rows == 0 or classes == 0:
        return
    output = Output.of(out)
    of_rows = *map(cupy.ascontiguousarray, (slope, constant, valid)), output.rows.array
    given = *_pair_arguments(pair), np.int64(classes), np.int32(of), *of_rows
    to = _code_of(out.dtype), np.int64(output.rows.pitch)
    _launch(Kernel("divergence.cu", "pce::write_divergence_gradient"), (rows, 1), *given, *to)
    output.copy_back()
