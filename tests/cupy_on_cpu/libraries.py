"""cuBLAS and Thrust, by NumPy."""

import ctypes
from types import ModuleType

import ml_dtypes
import numpy as np

from cupy_on_cpu.runtime import counts

# `cudaDataType`, by its numbers.
DTYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: np.dtype(ml_dtypes.bfloat16)}
ADDRESSES = np.dtype(np.uint64)


def in_memory(address, count, dtype):
    """The elements that lie there."""
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


def matrix(address, rows, columns, step, dtype):
    """The matrix that lies there by columns, so many elements from one to the next."""
    if step < max(1, rows):
        raise ValueError(f"CUBLAS_STATUS_INVALID_VALUE: {step} elements from one column of {rows} to the next")
    flat = in_memory(address, (columns - 1) * step + rows if rows and columns else 0, dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, step * dtype.itemsize))


def multiply(op_a, op_b, m, n, k, alpha, a, a_dtype, lda, b, b_dtype, ldb, beta, c, c_dtype, ldc):
    """c = alpha op(a) op(b) + beta c, added up in the wider of float32 and the dtype of c."""
    counts["launches"] += 1
    wide = np.promote_types(c_dtype, np.float32)
    alpha, beta = (in_memory(address, 1, wide)[0] for address in (alpha, beta))
    left = matrix(a, *((k, m) if op_a else (m, k)), lda, a_dtype).astype(wide)
    right = matrix(b, *((n, k) if op_b else (k, n)), ldb, b_dtype).astype(wide)
    result = matrix(c, m, n, ldc, c_dtype)
    before = beta * result.astype(wide) if beta else 0  # an element that is not asked for is not read
    result[...] = alpha * ((left.T if op_a else left) @ (right.T if op_b else right)) + before


class Cublas(ModuleType):
    """`cupy_backends.cuda.libs.cublas`."""

    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
    CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 69, 77
    CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_64F_PEDANTIC = 70, 71
    CUBLAS_GEMM_DEFAULT, CUBLAS_GEMM_DEFAULT_TENSOR_OP = -1, 99

    @staticmethod
    def create():
        return 7

    @staticmethod
    def setStream(*_):
        pass

    destroy = setPointerMode = setMathMode = setStream

    @staticmethod
    def getMathMode(handle):
        return 0

    getPointerMode = getMathMode

    @staticmethod
    def gemmEx(handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, *_):
        operands = a, DTYPES[a_type], lda, b, DTYPES[b_type], ldb, beta, c, DTYPES[c_type], ldc
        multiply(op_a, op_b, m, n, k, alpha, *operands)

    @staticmethod
    def sgemmEx(*arguments):
        Cublas.gemmEx(*arguments)

    @staticmethod
    def gemmStridedBatchedEx(
        handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, step_a, b, b_type, ldb, step_b, beta, c, c_type, ldc,
        step_c, count, *_
    ):  # fmt: skip  # in the order of the C function, not a line for each
        a_dtype, b_dtype, c_dtype = DTYPES[a_type], DTYPES[b_type], DTYPES[c_type]
        for i in range(count):
            operands = (
                *(a + i * step_a * a_dtype.itemsize, a_dtype, lda),
                *(b + i * step_b * b_dtype.itemsize, b_dtype, ldb, beta),
                *(c + i * step_c * c_dtype.itemsize, c_dtype, ldc),
            )
            multiply(op_a, op_b, m, n, k, alpha, *operands)


def of_one_dtype(letter, dtype):
    """The functions that BLAS has once for each dtype."""

    def gemm(handle, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        multiply(op_a, op_b, m, n, k, alpha, a, dtype, lda, b, dtype, ldb, beta, c, dtype, ldc)

    def gemmBatched(handle, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count):
        for each in zip(*(in_memory(address, count, ADDRESSES).tolist() for address in (a, b, c)), strict=True):
            gemm(handle, op_a, op_b, m, n, k, alpha, each[0], lda, each[1], ldb, beta, each[2], ldc)

    def gemmStridedBatched(
        handle, op_a, op_b, m, n, k, alpha, a, lda, step_a, b, ldb, step_b, beta, c, ldc, step_c, count
    ):
        for i in range(count):
            places = (address + i * step * dtype.itemsize for address, step in ((a, step_a), (b, step_b), (c, step_c)))
            first, second, third = places
            gemm(handle, op_a, op_b, m, n, k, alpha, first, lda, second, ldb, beta, third, ldc)

    def gemv(handle, op, m, n, alpha, a, lda, x, step_x, beta, y, step_y):
        # A vector is a matrix of one row, its elements so far apart.
        rows, columns = (n, m) if op else (m, n)
        multiply(0, 1 - op, 1, rows, columns, alpha, x, dtype, step_x, a, dtype, lda, beta, y, dtype, step_y)

    def dot(handle, n, x, step_x, y, step_y, result):
        first, second = matrix(x, 1, n, max(1, step_x), dtype), matrix(y, 1, n, max(1, step_y), dtype)
        in_memory(result, 1, dtype)[0] = first[0] @ second[0]

    functions = {function.__name__: function for function in (gemm, gemmBatched, gemmStridedBatched, gemv, dot)}
    return {letter + name: staticmethod(function) for name, function in functions.items()}


for _letter, _dtype in (("s", DTYPES[0]), ("d", DTYPES[1])):
    for _name, _function in of_one_dtype(_letter, _dtype).items():
        setattr(Cublas, _name, _function)


class Thrust:
    """`cupy.cuda.thrust`."""

    def sort(dtype, data, keys, shape):
        values = in_memory(data, int(np.prod(shape)), np.dtype(dtype)).reshape(shape)
        values[...] = np.sort(values, kind="stable")

    def argsort(dtype, indices, data, keys, shape):
        size = int(np.prod(shape))
        values = in_memory(data, size, np.dtype(dtype)).reshape(shape)
        in_memory(indices, size, np.dtype(np.intp)).reshape(shape)[...] = np.argsort(values, kind="stable")

    def lexsort(dtype, indices, keys, count, length):
        values = in_memory(keys, count * length, np.dtype(dtype)).reshape(count, length)
        in_memory(indices, length, np.dtype(np.intp))[...] = np.lexsort(values)
