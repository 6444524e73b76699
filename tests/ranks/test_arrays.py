"""Objects that count as arrays, the owners of their memory, and the dtypes of arithmetic.

See test_array_library.py for what CuPy's arrays need of this.
"""

import array
import ctypes

import ml_dtypes
import numpy as np
import pytest

from pce_mpi.arrays import (
    DLPACK_IS_READ_ONLY,
    array_namespace,
    as_array,
    compute_dtype_of,
    is_floating,
    is_half,
    same_memory,
    shares_memory,
    to_host,
)
from pce_mpi.ops.embedding import scatter_rows

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOATS = [*HALVES, np.dtype(np.float32), np.dtype(np.float64)]
OTHERS = [np.int8, np.uint8, np.int64, np.bool_, np.complex64, np.longdouble, ml_dtypes.float8_e4m3fn, ">f4", ">f8"]


class Tensor:
    """An array of an unknown library, with no more than DLPack."""

    def __init__(self, values):
        self._values = values
        self.dtype = values.dtype

    def __dlpack__(self, **arguments):
        return self._values.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


# In


def test_numpy_array_passes_as_it_is():
    values = np.zeros((2, 3))[:, ::2]
    assert as_array(values, "logits") is values
    values.flags.writeable = False
    assert as_array(values, "logits") is values


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
def test_tensor_is_wrapped_without_copy(dtype):
    values = np.arange(6).astype(dtype).reshape(2, 3).T
    wrapped = as_array(Tensor(values), "logits")
    assert wrapped.dtype == dtype
    assert np.array_equal(wrapped, values)
    assert np.shares_memory(wrapped, values)
    assert wrapped.strides == values.strides
    if DLPACK_IS_READ_ONLY:
        assert not wrapped.flags.writeable
        return
    wrapped[0, 0] = 42
    assert values[0, 0] == 42


def test_buffer_is_wrapped_without_copy():
    numbers = array.array("d", [1.0, 2.0, 3.0])
    for buffer in (numbers, memoryview(numbers)):
        wrapped = as_array(buffer, "logits")
        assert wrapped.dtype == np.float64
        wrapped[1] += 1
    assert numbers.tolist() == [1.0, 4.0, 3.0]
    c_array = (ctypes.c_float * 3)(1, 2, 3)
    assert as_array(c_array, "logits").tolist() == [1, 2, 3]
    assert as_array(c_array, "logits").dtype == np.float32


def test_nested_sequences_and_numbers_become_arrays():
    assert as_array([[1.0, 2.0], (3.0, 4.0)], "logits").tolist() == [[1, 2], [3, 4]]
    assert as_array(3, "targets").shape == ()
    assert as_array(np.float32(3), "dloss").dtype == np.float32
    assert as_array([], "logits").shape == (0,)


class Sealed:
    """Something with `__array__` only."""

    def __init__(self, values):
        self.values = values
        self.dtype = values.dtype

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_object_with_array_method_becomes_an_array():
    values = np.arange(3.0)
    assert np.shares_memory(as_array(Sealed(values), "logits"), values)


def test_bfloat16_unknown_to_dlpack_comes_by_array():
    class Tensor16(Sealed):
        def __dlpack__(self, **arguments):
            raise BufferError("no such dtype")

        def __dlpack_device__(self):
            return 1, 0

    values = np.arange(3).astype(ml_dtypes.bfloat16)
    wrapped = as_array(Tensor16(values), "logits")
    assert wrapped.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(wrapped, values)


@pytest.mark.parametrize(
    "value",
    [None, object(), {1: 2}, [[1.0], [2.0, 3.0]], [None]],
    ids=["None", "object", "dict", "ragged", "list of None"],
)
def test_argument_that_is_no_array_is_type_error(value):
    with pytest.raises(TypeError, match="weight"):
        as_array(value, "weight")


@pytest.mark.parametrize("shape", [(3,), (0, 3), ()], ids=str)
def test_null_pointer_with_elements_is_refused(shape):
    class Unallocated(Tensor):
        def __dlpack__(self, **arguments):
            capsule = self._values.__dlpack__()
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
            ctypes.c_void_p.from_address(pointer(capsule, b"dltensor")).value = None
            return capsule

    values = np.ones(shape)
    if not values.size:
        assert as_array(Unallocated(values), "logits").shape == shape
        return
    with pytest.raises(TypeError, match=f"Unallocated gives a null pointer for {values.size} elements"):
        as_array(Unallocated(values), "logits")


@pytest.mark.parametrize(
    ("name", "said"), [("targets", r"\.filled\(ignore_index\)$"), ("logits", "-inf masks the class")]
)
def test_masked_array_is_told_how_to_mask(name, said):
    with pytest.raises(TypeError, match=f"{name} is a masked array, whose mask would be lost; take .*{said}"):
        as_array(np.ma.masked_array([1, 2], [True, False]), name)


def test_tensor_that_refuses_export_is_type_error():
    class Refusing(Tensor):
        def __dlpack__(self, **arguments):
            raise BufferError("it requires grad")

    with pytest.raises(TypeError, match=r"logits.*it requires grad"):
        as_array(Refusing(np.zeros(3)), "logits")


# Namespaces


def test_numpy_arrays_belong_to_numpy_on_host():
    values = np.zeros(3)
    assert array_namespace(values) is np
    assert to_host(values) is values


# Dtypes


def test_logits_may_have_four_dtypes():
    assert all(is_floating(dtype) for dtype in FLOATS)
    assert not any(is_floating(np.dtype(dtype)) for dtype in OTHERS)


def test_dtypes_for_storage_only():
    assert [is_half(dtype) for dtype in FLOATS] == [True, True, False, False]
    assert not any(is_half(np.dtype(dtype)) for dtype in OTHERS)


def test_arithmetic_is_float32_but_for_float64_logits():
    assert [compute_dtype_of(dtype) for dtype in FLOATS] == [np.float32, np.float32, np.float32, np.float64]
    for requested in (np.float64, "float64", "f8", np.dtype(np.float64), float):
        assert [compute_dtype_of(dtype, requested) for dtype in FLOATS] == [np.float64] * 4
    assert [compute_dtype_of(dtype, np.float32) for dtype in FLOATS[:3]] == [np.float32] * 3
    assert all(isinstance(compute_dtype_of(dtype, float), np.dtype) for dtype in FLOATS)


def test_arithmetic_narrower_than_logits_is_value_error():
    with pytest.raises(ValueError, match=r"float32.*float64"):
        compute_dtype_of(np.dtype(np.float64), np.float32)


@pytest.mark.parametrize("requested", [np.float16, ml_dtypes.bfloat16, np.int32, np.longdouble, "no dtype"])
def test_arithmetic_is_in_float32_or_float64(requested):
    with pytest.raises(TypeError):
        compute_dtype_of(np.dtype(np.float32), requested)


# Rows


def rows_to_add(count, dtype):
    rng = np.random.default_rng(count)
    return rng.standard_normal((7, 3)).astype(dtype), rng.integers(0, 5, count), rng.standard_normal((count, 3), dtype)


@pytest.mark.parametrize("index_dtype", [np.int64, np.int32, np.uint8, np.uint64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_rows_named_twice_are_added_twice(count, dtype, index_dtype):
    target, rows, values = rows_to_add(count, dtype)
    target[5:] = np.nan  # not named: left alone
    expected = target.astype(np.float64)
    for row, value in zip(rows, values, strict=True):
        expected[row] += value
    indices, addends = rows.astype(index_dtype), values.copy()
    assert scatter_rows("add", target, indices, addends) is None
    # A sum of n terms in another order is off by at most n ulps of the sum of their magnitudes.
    atol = (count + 1) * np.finfo(dtype).eps * (np.abs(values).sum(axis=0).max(initial=0.0) + 5.0)
    np.testing.assert_allclose(target, expected, rtol=0, atol=atol)
    assert np.array_equal(indices, rows)
    assert np.array_equal(addends, values)


def test_rows_are_added_in_same_order_always():
    target, rows, values = rows_to_add(1000, np.float32)
    again, transposed = target.copy(), target.T.copy().T
    scatter_rows("add", target, rows, values)
    scatter_rows("add", again, rows, values)
    scatter_rows("add", transposed, rows, values.T.copy().T)
    assert target.tobytes() == again.tobytes() == np.ascontiguousarray(transposed).tobytes()


@pytest.mark.parametrize(("height", "width"), [(4, 0), (0, 3)])
def test_rows_may_be_empty_when_added(height, width):
    target = np.zeros((height, width))
    rows = np.arange(height) // 2
    scatter_rows("add", target, rows, np.ones((height, width)))
    assert target.size == 0


@pytest.mark.parametrize("count", [0, 100])
def test_rows_of_cupy_arrays_are_added_by_cupy(cupy, count):
    target, rows, values = rows_to_add(count, np.float64)
    on_device = cupy.asarray(target)
    scatter_rows("add", on_device, cupy.asarray(rows), cupy.asarray(values))
    scatter_rows("add", target, rows, values)
    np.testing.assert_allclose(cupy.asnumpy(on_device), target, rtol=0, atol=1e-12)


# Memory


def test_same_memory_has_same_elements_in_order():
    values = np.zeros((3, 4), np.float32)
    assert same_memory(values, values)
    assert same_memory(values, values[:])
    assert same_memory(values, values.T.T)
    assert same_memory(as_array(Tensor(values), "out"), values)
    for other in (
        values.copy(),
        values[:2],
        values[::-1],
        values.T,
        values.reshape(4, 3),
        values.view(np.int32),
        values[:, ::-1][:, ::-1][:, 1:],
    ):
        assert not same_memory(values, other)
    square = np.zeros((3, 3))
    assert not same_memory(square, square.T)


def test_shared_memory_may_change_by_writing_elsewhere():
    values = np.zeros((4, 6))
    for other in (values, values[1:], values.T, values[:, 3], values.view(np.int64), values.reshape(-1)[5:6]):
        assert shares_memory(values, other)
    assert not shares_memory(values, values.copy())
    assert not shares_memory(values[::2], values[1::2])
    assert not shares_memory(values[:, :3], values[:, 3:])
    assert not shares_memory(values, np.zeros((0, 6)))
    assert shares_memory(values[:, ::2], values[:, ::4])
    assert not shares_memory(values[:, ::2], values[:, 1::2])


def test_entangled_views_are_taken_to_share_memory(monkeypatch):
    # It is a Diophantine problem whether two views share an element; NumPy gives up within a bound on its work.
    monkeypatch.setattr("pce_mpi.arrays._OVERLAP_WORK", 1)
    base = np.zeros(20_000, np.int8)
    a = np.lib.stride_tricks.as_strided(base, (6, 6, 4, 4, 3), (114, 48, 234, 978, 786))
    b = np.lib.stride_tricks.as_strided(base[1:], (6, 6, 4, 4, 3), (1093, 619, 739, 1165, 883))
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(a, b, max_work=1)
    assert shares_memory(a, b)
