"""Matrix products of a linear loss: logits and gradients, which are computed in float32 for halves.

On a GPU, cuBLAS's `gemmEx` takes halves and adds up in float32. Elsewhere halves are converted, a block at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_half, name_of
from pce_mpi.kernels import gemm, kernel_of

Array = Any  # numpy.ndarray or cupy.ndarray

# Elements of a block of columns. On a GPU a block has a part of the columns, at least so many, to occupy all of it.
_BLOCK, _PART_ON_GPU, _COLUMNS_ON_GPU = 2**20, 32, 1024
# Gradients that become float16 are scaled by at most 2^127, so that the largest is between 2^14 and 2^15.
_LARGEST_EXPONENT, _MOST = 15, 127


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
    exponent = xp.minimum(_LARGEST_EXPONENT - xp.frexp(largest)[1], _MOST)
    return xp.ldexp(xp.ones((), dlogits.dtype), exponent)
