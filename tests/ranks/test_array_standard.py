"""Functions of the array API standard on sharded arrays do what their row in docs/arrays.md says."""

from operator import attrgetter
import re
from typing import Any
import warnings

import numpy as np
import pytest

from jobs.launch import ROOT
from pce_mpi import DistArray, Shard
from pce_mpi.ops import custom
from ranks.placed import ROUNDING, at, numbers, whole_of

pytestmark = pytest.mark.usefixtures("impatient")

ELEMENTWISE = """abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or
    bitwise_right_shift bitwise_xor ceil conj copysign cos cosh divide equal exp expm1 floor floor_divide greater
    greater_equal hypot imag isfinite isinf isnan less less_equal log log1p log2 log10 logaddexp logical_and logical_not
    logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow real reciprocal remainder
    round sign signbit sin sinh square sqrt subtract tan tanh trunc"""
OF_TWO = """add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign divide equal
    floor_divide greater greater_equal hypot less less_equal logaddexp logical_and logical_or logical_xor maximum
    minimum multiply nextafter not_equal pow remainder subtract"""


def calls(x: Any, y: Any, whole: Any, square: Any) -> dict[str, tuple[Any, ...]]:
    """Arguments of each function: (4, 3) arrays of which `whole` holds integers, and a regular matrix."""
    found: dict[str, tuple[Any, ...]] = {
        name: (x, y) if name in OF_TWO.split() else (x,) for name in ELEMENTWISE.split()
    }
    found |= {name: (whole, whole) for name in OF_TWO.split() if name.startswith("bitwise")}
    found |= dict.fromkeys(("acos", "asin", "atanh"), (x / 8,))
    found |= {"bitwise_invert": (whole,), "clip": (x, 2, 4)}
    found |= dict.fromkeys("empty_like ones_like tril triu zeros_like".split(), (x,))
    found |= {"asarray": (x,), "from_dlpack": (x,), "full_like": (x, 2.0), "meshgrid": (x[0], x[1])}
    found |= {"astype": (x, np.float32), "broadcast_arrays": (x, x[0]), "broadcast_to": (x, (2, 4, 3))}
    found |= {"can_cast": (x, np.float32)}
    found |= {"result_type": (x, whole)}
    found |= {"take": (x, np.array([2, 0]), 0), "take_along_axis": (x, np.array([[0], [1], [2], [0]]), 1)}
    found |= {"matmul": (x, square[:3, :3]), "matrix_transpose": (x,), "tensordot": (x, y, 2), "vecdot": (x, y)}
    found |= {
        "concat": ([x, y],),
        "expand_dims": (x, 1),
        "flip": (x,),
        "moveaxis": (x, 0, 1),
        "permute_dims": (x, (1, 0)),
    }
    found |= {"repeat": (x, 2), "reshape": (x, (3, 4)), "roll": (x, 1), "squeeze": (x[:1], 0), "stack": ([x, y],)}
    found |= {"tile": (x, (2, 1)), "unstack": (x,)}
    found |= dict.fromkeys("argmax argmin count_nonzero nonzero argsort sort all any diff".split(), (x,))
    found |= {"searchsorted": (x[0], np.array([1.0, 4.0])), "where": (x > y, x, y)}
    found |= dict.fromkeys("unique_all unique_counts unique_inverse unique_values".split(), (x,))
    found |= dict.fromkeys("max mean min prod std sum var".split(), (x,))
    found |= {"cumulative_prod": (x[0],), "cumulative_sum": (x[0],)}
    found |= dict.fromkeys((f"linalg.{name}" for name in "cholesky det inv slogdet eigh eigvalsh".split()), (square,))
    found |= dict.fromkeys((f"linalg.{name}" for name in "diagonal matrix_norm trace".split()), (square,))
    found |= dict.fromkeys((f"linalg.{name}" for name in "pinv matrix_rank qr svd svdvals vector_norm".split()), (x,))
    found |= {"linalg.cross": (x, y), "linalg.matmul": (x, square[:3, :3]), "linalg.matrix_power": (square, 2)}
    found |= {"linalg.matrix_transpose": (x,), "linalg.outer": (x[0], y[0]), "linalg.solve": (square, x)}
    found |= {"linalg.vecdot": (x, y), "linalg.tensordot": (x, y)}
    found |= dict.fromkeys(
        (f"fft.{name}" for name in "fft ifft fftn ifftn rfft irfft rfftn irfftn hfft ihfft".split()), (x,)
    )
    found |= dict.fromkeys(("fft.fftshift", "fft.ifftshift"), (x,))
    return found


def row(heading: str) -> list[str]:
    """Functions in the row of the page that begins with these words."""
    page = (ROOT / "docs" / "arrays.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {heading}[^|]*\|(.*)\|$", page, re.MULTILINE)
    assert found, heading
    return re.findall(r"`([\w.]+)`", found[1])


STAYS, GATHERS, REFUSED = row("run where the data is"), row("gather their operands"), row("raise an error")

LACKING = ("cumulative_prod", "cumulative_sum", "unstack")  # NumPy 2.0 has these not yet


def parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


@pytest.fixture
def operands(line):
    """NumPy's arguments of each function, and ours with rows sharded."""
    square = numbers(4, 4) + 10 * np.eye(4)
    whole = numbers(4, 3), numbers(4, 3, seed=1), numbers(4, 3).astype(np.int64), square + square.T
    return calls(*whole), calls(*(at(line, array, Shard(0)) for array in whole))


def test_page_lists_every_standard_function_once(operands):
    assert sorted(STAYS + GATHERS + REFUSED) == sorted(operands[0])
    assert len(operands[0]) + len(row("take no array")) == 170  # functions of the version of 2024.12


def test_standard_function_does_what_page_says(operands, monkeypatch):
    plain, placed = operands
    for name in STAYS + GATHERS:
        if name in LACKING and not hasattr(np, name):
            continue
        monkeypatch.setattr(custom, "_warned", set())
        function = attrgetter(name)(np)
        with warnings.catch_warnings(record=True) as met:
            warnings.simplefilter("always")
            found = parts(function(*placed[name]))
        assert any("has no placement rule" in str(warning.message) for warning in met) == (name in GATHERS), name
        expected = parts(function(*plain[name]))
        assert len(found) == len(expected), name
        for got, wanted in zip(found, expected, strict=True):
            if not isinstance(got, DistArray):
                assert got == wanted, name
                continue
            assert (got.shape, got.dtype) == (np.shape(wanted), np.asarray(wanted).dtype), name
            if name != "empty_like":
                np.testing.assert_allclose(whole_of(got), wanted, rtol=ROUNDING, atol=ROUNDING, err_msg=name)


@pytest.mark.filterwarnings("ignore:numpy.* has no placement rule")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_standard_function_names_the_reason(name, operands):
    reason = "complex128|becomes a NumPy array by .full|no attribute '__dlpack__'"
    with pytest.raises((TypeError, AttributeError), match=reason):
        attrgetter(name)(np)(*operands[1][name])


def test_non_finite_elements_are_found_in_place(line):
    whole = np.array([[np.nan, np.inf], [-np.inf, 0.0], [-0.0, 1e308]])
    for dtype in (np.float16, np.float32, np.float64, np.int8, np.uint64, np.bool_):
        with np.errstate(all="ignore"):
            array = whole.astype(dtype)
        for function in (np.isnan, np.isinf, np.isfinite):
            found = function(at(line, array, Shard(0)))
            assert found.placements == {"data": Shard(0)}
            np.testing.assert_array_equal(whole_of(found), function(array), err_msg=f"{function} {dtype}")
