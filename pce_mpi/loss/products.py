"""Matrix products of a linear loss: logits and gradients, in float32 of halves.

On a GPU, cuBLAS's `gemmEx` takes halves and adds up in float32. Elsewhere halves are converted, a block at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_half, name_of
from pce_mpi.loss.kernels import gemm

Array = Any  # numpy.ndarray or cupy.ndarray

# Elements of a block of columns. On a GPU, a block is to occupy all of it.
_BLOCK, _BLOCK_ON_GPU = 2**20, 2**22
# Gradients that become float16 are scaled by at most 2^127, so that the largest is between 2^14 and 2^15.
_LARGEST_EXPONENT, _MOST = 15, 127


def multiply(hidden: Array, w: Array, logits: Array) -> None:
    """`logits = hidden @ w`; of halves in float32."""
    if gemm.takes(w):
        gemm.gemm(hidden, w, logits)
    elif not is_half(w.dtype):
        array_namespace(w).matmul(hidden, w, out=logits)
    else:
        hidden = hidden.astype(logits.dtype)
        for columns in _blocks(w):
            logits[:, columns] = hidden @ w[:, columns].astype(logits.dtype)


def add_gradients(hidden: Array, w: Array, dlogits: Array, dhidden: Array, dw: Array) -> None:
    """`dhidden = dlogits @ w.T`, where there are zeros before, and `dw += hidden.T @ dlogits`; of halves in float32."""
    half = is_half(w.dtype)
    if gemm.takes(w):
        _add_gradients_of_halves(hidden, w, dlogits, dhidden, dw)
        return
    hidden = hidden.astype(dlogits.dtype, copy=False)
    if not half:
        array_namespace(w).matmul(dlogits, w.T, out=dhidden)
    for columns in _blocks(w):
        dw[:, columns] += hidden.T @ dlogits[:, columns]
        if half:
            dhidden += dlogits[:, columns] @ w[:, columns].astype(dlogits.dtype).T


def _add_gradients_of_halves(hidden: Array, w: Array, dlogits: Array, dhidden: Array, dw: Array) -> None:
    """Gradients by products that take halves only: `dlogits` is the sum of two, which have 16 bits of it at least."""
    scale = _scale(dlogits, w.dtype)
    for columns in _blocks(w, len(hidden)):
        part = dlogits[:, columns] * scale
        high = part.astype(w.dtype)
        part -= high.astype(part.dtype)
        product = array_namespace(w).empty(dw[:, columns].shape, dw.dtype)
        for half in (high, part.astype(w.dtype)):
            gemm.gemm(hidden.T, half, product, add=half is not high)
            gemm.gemm(half, w[:, columns].T, dhidden, add=True)
        product /= scale
        dw[:, columns] += product
    dhidden /= scale


def _blocks(w: Array, rows: int = 0) -> list[slice]:
    """Columns of `w`, as many at a time as fit a block, also beside so many rows."""
    size = _BLOCK if array_namespace(w) is np else _BLOCK_ON_GPU
    width = max(1, size // max(1, w.shape[0], rows))
    return [slice(first, first + width) for first in range(0, w.shape[1], width)]


def _scale(dlogits: Array, dtype: np.dtype[Any]) -> Array:
    """The power of two by which gradients fit `dtype`, (), float32; bfloat16 has the range of float32."""
    xp = array_namespace(dlogits)
    one = xp.ones((), dlogits.dtype)
    if not dlogits.size or name_of(dtype) != "float16":
        return one
    largest = xp.maximum(dlogits.max(), -dlogits.min())
    exponent = _LARGEST_EXPONENT - xp.frexp(largest)[1]
    usable = xp.isfinite(largest) & (largest > 0)
    return xp.ldexp(one, xp.where(usable, xp.minimum(exponent, _MOST), 0))
