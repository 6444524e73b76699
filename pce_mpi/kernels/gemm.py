"""Products of halves on a GPU, added up in float32: cuBLAS's `gemmEx`, which CuPy's own products do not offer."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, cupy_of, name_of

Array = Any  # cupy.ndarray

# CUDA's numbers of dtypes (`cudaDataType`).
_FLOAT32 = 0
_HALVES = {"float16": 2, "bfloat16": 14}
# GPUs multiply bfloat16 from this compute capability on.
_AMPERE = 80


def takes(array: Array) -> bool:
    """Return whether `array` is of halves that its GPU multiplies."""
    cupy, name = cupy_of(array), name_of(array.dtype)
    if cupy is None or name not in _HALVES:
        return False
    return name == "float16" or int(cupy.cuda.Device().compute_capability) >= _AMPERE


def readable(x: Array) -> Array:
    """Return a matrix that cuBLAS can read: `x`, or a copy if neither its rows nor its columns are contiguous.

    This loads cuBLAS: `ImportError` if it is missing.
    """
    array_namespace(x).cuda.device.get_cublas_handle()
    return x if _layout(x)[1] else x.copy()


def gemm(a: Array, b: Array, out: Array, add: bool = False) -> None:
    """Compute `out = a @ b`, or `out += a @ b`, of `readable` halves; `out` is float32, with contiguous rows."""
    if not a.size or not b.size:
        if not add:
            out.fill(0)
        return
    # cuBLAS reads by columns, so a matrix that is stored by rows is its transpose, and out.T = b.T @ a.T.
    (a_by_columns, a_step), (b_by_columns, b_step), (_, out_step) = _layout(a), _layout(b), _layout(out)
    one, kept = np.array(1.0, np.float32), np.array(add, np.float32)
    dtype = _HALVES[name_of(a.dtype)]
    cuda = array_namespace(a).cuda
    cublas = cuda.cublas
    cublas.gemmEx(
        cuda.device.get_cublas_handle(),
        cublas.CUBLAS_OP_T if b_by_columns else cublas.CUBLAS_OP_N,
        cublas.CUBLAS_OP_T if a_by_columns else cublas.CUBLAS_OP_N,
        *(b.shape[1], a.shape[0], a.shape[1]),
        one.ctypes.data,
        *(b.data.ptr, dtype, b_step),
        *(a.data.ptr, dtype, a_step),
        kept.ctypes.data,
        *(out.data.ptr, _FLOAT32, out_step),
        cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )


def _layout(x: Array) -> tuple[bool, int]:
    """Return whether the columns of a matrix are contiguous rather than its rows, and their step; 0 if neither are."""
    for by_columns, (lines, length), (far, near) in (
        (False, x.shape, x.strides),
        (True, x.shape[::-1], x.strides[::-1]),
    ):
        if (near == x.itemsize or length == 1) and (far >= length * x.itemsize or lines == 1):
            return by_columns, length if lines == 1 else far // x.itemsize
    return False, 0
