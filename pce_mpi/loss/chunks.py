"""The logits `hidden @ w + bias`, a chunk of rows at a time, so that all of them are never held at once.

The logits of some rows are computed and reduced to states. The merge of the states over the ranks runs while the next
rows are multiplied. Then the caller has these logits with their softmax, and may write a gradient over them, which is
multiplied to give the gradients of the operands. Of halves, logits and gradients are computed in float32: on a GPU,
cuBLAS's `gemmEx` takes halves and adds up in float32, and elsewhere halves are converted, a block at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, as_array, check_one_library, cupy_of, is_floating, is_half, name_of
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.gpu import check_on_current_gpu
from pce_mpi.kernels import gemm, kernel_of
from pce_mpi.kernels.interface import RowSoftmax, StateFields
from pce_mpi.loss.agreement import agree_on
from pce_mpi.loss.options import Options
from pce_mpi.loss.passes import start_row_softmax
from pce_mpi.loss.problem import Problem, check, check_per_class

# The default number of rows of a chunk. More rows make products faster, and additions to the gradient of w rarer.
_ROWS, _ROWS_ON_GPU = 512, 4096
# Bounds of the class weights: sums of gradients are weighted, and divided at the end.
_LEAST, _MOST = 1e-18, 1e18


@dataclass
class Gradients:
    """The gradients of the operands, summed over rows; those of halves are float32, that of `bias` is float64.

    The gradient of `hidden` has its shape, and is summed over this rank's classes alone until `sum_over_shards`.
    """

    hidden: Array
    w: Array
    bias: Array

    def sum_over_shards(self, operation: str, options: Options) -> None:
        """Sum the gradient of `hidden` over the classes of all shards; collective over `comm`."""
        if options.comm is not None:
            with cause(operation, options.over, "the gradient of hidden, a sum over all classes"):
                self.hidden = all_reduce(self.hidden, options.comm, "sum", overwrite=True)


def over_all_rows(operation: str, options: Options, *gradients: Array) -> Sequence[Array]:
    """Return gradients of `w` and `bias`, with `sums_rows` their sums over the ranks of `batch_comm`."""
    if not options.sums_rows:
        return gradients
    with cause(operation, options.batch_over, "the gradients of w and bias, sums over all rows"):
        return [all_reduce(each, options.batch_comm, "sum", overwrite=True) for each in gradients]


@dataclass
class Product:
    """The operands, and room for logits and gradients: nothing large is allocated once the ranks have agreed.

    `hidden` is (rows, features), and `shape` the one that it was passed in. `held` rows are multiplied at once.
    """

    hidden: Array
    w: Array
    bias: Array | None
    shape: tuple[int, ...]
    held: int = 0
    logits: Sequence[Array] = ()  # one buffer, or two if states are merged while the next rows are multiplied
    gradients: Gradients | None = None

    @classmethod
    def of(cls, hidden: Any, w: Any, bias: Any) -> Product:
        given = {"hidden": hidden, "w": w} | ({} if bias is None else {"bias": bias})
        arrays = {name: as_array(value, name) for name, value in given.items()}
        check_one_library(arrays)
        check_on_current_gpu(arrays)
        check_product(arrays)
        hidden, w, bias = arrays["hidden"], arrays["w"], arrays.get("bias")
        if bias is not None:
            check_per_class("bias", bias, w.shape[1], " of this shard")
        return cls(hidden.reshape(math.prod(hidden.shape[:-1]), w.shape[0]), w, bias, hidden.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of logits and gradients."""
        return np.dtype(np.float32) if is_half(self.w.dtype) else self.w.dtype

    def check(self, options: Options, targets: Any, needs_targets: bool) -> Problem:
        """Return the checked arguments; the logits are without memory, as checks need only their shape and dtype."""
        xp = array_namespace(self.w)
        absent = xp.broadcast_to(xp.zeros((), self.dtype), (*self.shape[:-1], self.w.shape[1]))
        problem = check(options, absent, targets, needs_targets=needs_targets)
        if problem.probabilities is not None:
            raise TypeError("targets must be class numbers, got probabilities")
        problem.sharded, problem.hidden = (self.w, 1), self.hidden
        chunk = problem.options.chunk or (_ROWS if cupy_of(self.w) is None else _ROWS_ON_GPU)
        problem.also = {"features": self.w.shape[0], "dtype of w": name_of(self.w.dtype), "chunk": chunk}
        problem.also["bias given"] = self.bias is not None
        weight = problem.options.weight
        sizes = np.abs(weight[weight != 0]) if weight is not None and self.dtype == np.float32 else np.ones(1)
        if not np.all((sizes >= _LEAST) & (sizes <= _MOST)):
            raise ValueError(f"weight must be 0 or from {_LEAST:g} to {_MOST:g}, as gradients are summed in float32")
        self.held = max(1, min(len(self.hidden), chunk // buffers_of(options)))
        if gemm.takes(self.w):
            self.hidden, self.w = gemm.readable(self.hidden), gemm.readable(self.w)
        self.bias = None if self.bias is None else self.bias.astype(self.dtype, copy=False)
        return problem

    def make_room(self, buffers: int, with_gradients: bool) -> None:
        """Allocate buffers for the logits of some rows, and gradients of 0."""
        xp, dtype, classes = array_namespace(self.w), self.dtype, self.w.shape[1]
        self.logits = [xp.empty((self.held, classes), dtype) for _ in range(buffers)]
        if with_gradients:
            dhidden, dw = xp.zeros(self.shape, dtype), xp.zeros(self.w.shape, dtype)
            self.gradients = Gradients(dhidden, dw, xp.zeros(classes))

    def rows(self) -> Iterator[slice]:
        """Give the rows that are multiplied at once, one part after the other."""
        for first in range(0, len(self.hidden), self.held):
            yield slice(first, min(first + self.held, len(self.hidden)))

    @np.errstate(all="ignore")  # a warning that is an error would be one of this rank alone
    def part_of(self, problem: Problem, rows: slice, buffer: int = 0) -> Problem:
        """Compute the logits of some rows, and return the problem of these."""
        logits = self.logits[buffer][: rows.stop - rows.start]
        multiply(self.hidden[rows], self.w, logits)
        if self.bias is not None:
            logits += self.bias
        arrays = {name: getattr(problem, name) for name in ("targets", "target_column", "valid", "counted")}
        of_rows: dict[str, Any] = {name: None if array is None else array[rows] for name, array in arrays.items()}
        options = problem.options.with_checked({"axis": 1}, problem.options.weight)
        return replace(problem, options=options, logits=logits, rows_shape=logits.shape[:1], inputs=(), **of_rows)

    def parts_of(self, problem: Problem, fields: StateFields) -> Iterator[tuple[slice, Problem, RowSoftmax]]:
        """Give rows, their problem and their softmax, until all rows are done; collective over `comm`.

        The logits of a part may be written to; they are gone when the next part is asked for.
        """
        merging: deque[Any] = deque()
        for number, rows in enumerate(self.rows()):
            part = self.part_of(problem, rows, number % len(self.logits))
            merging.append((rows, part, start_row_softmax(part, fields)))
            if len(merging) == len(self.logits):
                yield _merged(*merging.popleft())
        while merging:
            yield _merged(*merging.popleft())

    @np.errstate(all="ignore")
    def add_gradients(self, hidden: Array, rows: slice, part: Problem) -> None:
        """Add the gradients of some rows, `hidden`, whose logits have been overwritten with their gradient."""
        assert self.gradients is not None
        dhidden = self.gradients.hidden.reshape(self.hidden.shape)[rows]
        add_gradients(hidden, self.w, part.logits, dhidden, self.gradients.w, part.options.rounded_gradient)
        if self.bias is not None:
            self.gradients.bias += part.logits.sum(axis=0, dtype=np.float64)


def _merged(rows: slice, part: Problem, softmax: Any) -> tuple[slice, Problem, RowSoftmax]:
    return rows, part, softmax()


def agree_on_product(
    options: Options, hidden: Any, w: Any, targets: Any, *, needs_targets: bool, with_gradients: bool
) -> tuple[Problem, Product]:
    """Check the arguments on this rank, and agree on the call with the others; the product has room."""
    found: list[Product] = []

    def check_arguments() -> Problem:
        found[:] = [Product.of(hidden, w, options.bias)]
        problem = found[0].check(options, targets, needs_targets)
        found[0].make_room(buffers_of(options), with_gradients)
        return problem

    return agree_on(options, check_arguments), found[0]


def check_product(operands: Mapping[str, Any]) -> None:
    """Raise unless `hidden` and `w`, by name, can be multiplied, and all operands have the same floating dtype."""
    dtypes = [operand.dtype for operand in operands.values()]
    for name, dtype in zip(operands, dtypes, strict=True):
        if not is_floating(dtype):
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype}")
    if len(set(dtypes)) > 1:
        raise TypeError(f"{', '.join(operands)} must have one dtype, got {', '.join(map(str, dtypes))}")
    hidden, w = operands["hidden"], operands["w"]
    if w.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != w.shape[0]:
        raise ValueError(f"hidden must be (..., features) and w (features, classes), got {hidden.shape}, {w.shape}")


def buffers_of(options: Options) -> int:
    """Return into how many parts a chunk is cut, one of which is merged while the next one is multiplied."""
    return 1 if options.comm is None or options.comm.size == 1 else 2


# Elements of a block of columns. On a GPU a block has a part of the columns, at least so many, to occupy all of it.
_BLOCK, _PART_ON_GPU, _COLUMNS_ON_GPU = 2**20, 32, 1024
# Gradients that become float16 are scaled by at most 2^127, so that the largest is between 2^14 and 2^15.
_LARGEST_EXPONENT, _LARGEST_SHIFT = 15, 127


def multiply(hidden: Array, w: Array, logits: Array) -> None:
    """Compute `logits = hidden @ w`; halves give float32."""
    if gemm.takes(w):
        gemm.gemm(hidden, w, logits)
    elif not is_half(w.dtype):
        array_namespace(w).matmul(hidden, w, out=logits)
    else:
        hidden = hidden.astype(logits.dtype)
        for columns in _blocks(w):
            logits[:, columns] = hidden @ w[:, columns].astype(logits.dtype)


def add_gradients(hidden: Array, w: Array, dlogits: Array, dhidden: Array, dw: Array, rounded: bool = False) -> None:
    """Compute `dhidden = dlogits @ w.T`, which is 0 before, and `dw += hidden.T @ dlogits`; halves give float32.

    With `rounded`, `dlogits` are rounded to halves first, if `w` is of halves.
    """
    half = is_half(w.dtype)
    if gemm.takes(w):
        _add_gradients_of_halves(hidden, w, dlogits, dhidden, dw, 1 if rounded else 2)
        return
    hidden = hidden.astype(dlogits.dtype, copy=False)
    if not half:
        array_namespace(w).matmul(dlogits, w.T, out=dhidden)
    scale = _scale(dlogits, w) if half and rounded else None
    for columns in _blocks(w):
        part = dlogits[:, columns]
        if half and rounded:
            part = part.astype(w.dtype) if scale is None else (part * scale).astype(w.dtype)
            part = part.astype(dlogits.dtype) if scale is None else part.astype(dlogits.dtype) / scale
        dw[:, columns] += hidden.T @ part
        if half:
            dhidden += part @ w[:, columns].astype(dlogits.dtype).T


def _add_gradients_of_halves(hidden: Array, w: Array, dlogits: Array, dhidden: Array, dw: Array, halves: int) -> None:
    """Add the gradients by products that take only halves: `dlogits` is split into a sum of two, which keep 16 bits.

    In float16, elements less than 2^-24 of the largest one keep fewer bits. One of the two alone keeps 8 bits, or 11.
    """
    scale = _scale(dlogits, w)
    for columns in _blocks(w):
        total = dw[:, columns] if scale is None else array_namespace(w).zeros(dw[:, columns].shape, dw.dtype)
        for half in kernel_of(w).halves_of(dlogits[:, columns], w.dtype, scale, halves):
            gemm.gemm(hidden.T, half, total, add=True)
            gemm.gemm(half, w[:, columns].T, dhidden, add=True)
        if scale is not None:
            dw[:, columns] += total / scale
    if scale is not None:
        dhidden /= scale


def _blocks(w: Array) -> list[slice]:
    """Return slices of the columns of `w`, each with as many as fit a block."""
    rows, columns = w.shape
    on_host = array_namespace(w) is np
    width = max(1, _BLOCK // max(1, rows)) if on_host else max(_COLUMNS_ON_GPU, columns // _PART_ON_GPU)
    return [slice(first, first + width) for first in range(0, columns, width)]


def _scale(dlogits: Array, w: Array) -> Array | None:
    """Return the power of two, () float32, by which gradients fit float16; rows without finite maximum are ignored.

    None if `w` is bfloat16, which has the exponents of float32.
    """
    if name_of(w.dtype) != "float16":
        return None
    xp = array_namespace(dlogits)
    if not dlogits.size:
        return xp.ones((), dlogits.dtype)
    of_rows = xp.maximum(dlogits.max(axis=1), -dlogits.min(axis=1))
    largest = xp.where(xp.isfinite(of_rows), of_rows, 0).max()
    exponent = xp.minimum(_LARGEST_EXPONENT - xp.frexp(largest)[1], _LARGEST_SHIFT)
    return xp.ldexp(xp.ones((), dlogits.dtype), exponent)
