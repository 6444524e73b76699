"""Operations in one process: results are NumPy's, and gradients agree with finite differences, on all of the table."""

from dataclasses import replace
import importlib
import inspect

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard
from pce_mpi.arrays import is_floating
from pce_mpi.autograd.apply import apply, put_on_tape
from pce_mpi.distributed.array import OPERATIONS, DistArray
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.testing.gradients import normal_numbers as numbers, slope
from ranks.op_cases import (
    CASES,
    DEFINED,
    OPS,
    alone,
    cases_of,
    error_of,
    evaluate,
    listed,
    one_process,
    replicated,
)
from ulps import FINITE_DIFFERENCE, HALF, OPERATION


def test_every_operation_is_in_table():
    assert set(OPS) == DEFINED - {"getitem"} | {"op", "redistribute", "slice"}  # the trace calls `getitem` a slice


def test_public_functions_of_operations_are_entered():
    # The shape of what nucleus gives depends on elements, so it has no rule.
    functions = [getattr(pce, name) for name in pce.__all__ if name not in ("einsum", "nucleus", "op")]
    functions = [vars(each).get("__wrapped__", each) for each in functions if inspect.isfunction(each)]
    ours = [each for each in functions if inspect.isfunction(each) and each.__module__.startswith("pce_mpi.ops.")]
    assert len(ours) > 50
    assert [each.__name__ for each in ours if OPERATIONS.get(each.__name__) is not each] == []


METHODS = [name for name in OPS if name in DEFINED and name in vars(DistArray)]
# The shape, or the axes, may be given one by one; argmax without an axis is over all elements, as in NumPy.
OTHERWISE = ("reshape", "transpose", "argmax")


def test_methods_of_numpy_are_methods():
    assert {name for name in DEFINED if hasattr(np.ndarray, name)} <= vars(DistArray).keys()
    assert {"softmax", "log_softmax", "logsumexp"} <= set(METHODS)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OTHERWISE])
def test_method_takes_what_its_function_takes(name):
    ours, function = ([*inspect.signature(f).parameters.values()] for f in (vars(DistArray)[name], OPERATIONS[name]))
    assert [(each.name, each.kind, each.default) for each in ours[1:]] == [
        (each.name, each.kind, each.default) for each in function[1:]
    ]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OTHERWISE])
def test_method_gives_what_its_function_gives(name):
    cases = [case for case in cases_of(name) if case.parameters is not None]
    for case in cases:
        function = one_process(case)
        parameters = case.parameters
        method = one_process(replace(case, call=lambda x, *y, by=parameters: getattr(x, name)(*y, **by)))
        assert repr(method) == repr(function), case.name
    assert cases


# -------------------------------------------------------------------------------------------- results and gradients


def faults_of(case):
    """Return the faults in the gradients of one line of the table in one process, as text."""
    outcome = evaluate(case, alone(), replicated(case, alone()))
    found = [f"{case.name}: operand {index} was written to" for index in outcome.changed]
    for index, (x, gradient) in enumerate(zip(case.operands, outcome.gradients, strict=True)):
        if (gradient is not None) != case.has_gradient[index]:
            found.append(f"{case.name}: operand {index} has {'no' if gradient is None else 'a'} gradient")
        if gradient is None or case.smooth is None:
            continue
        direction = numbers(np.random.default_rng(index), x.shape)
        got = np.sum(np.where(np.isfinite(x), gradient.local * direction, 0.0))
        quotient = slope(lambda *y: listed(case.smooth(*y)), case.projections, case.operands, index, direction)
        error = error_of(case, got, np.asarray(quotient))
        if not error <= FINITE_DIFFERENCE:
            found.append(f"{case.name}: the gradient of operand {index} is {error:.3g} ulp off")
    return found


@pytest.mark.parametrize("op", OPS)
def test_results_are_those_of_numpy(op):
    for case in cases_of(op):
        with np.errstate(all="ignore"):
            expected = listed(case.reference(*case.operands))
        for got, wanted in zip(one_process(case)[0], expected, strict=True):
            assert got.dtype == (case.dtype or np.float64), case.name
            assert error_of(case, got, np.asarray(wanted)) <= OPERATION, case.name


@pytest.mark.parametrize("op", OPS)
def test_every_vjp_agrees_with_finite_differences(op):
    assert [fault for case in cases_of(op) for fault in faults_of(case)] == []


def scaled(op):
    first, *others = op.vjps
    vjps = (lambda *arrays, **parameters: first(*arrays, **parameters) * 1.001, *others)
    return replace(op, vjps=vjps, uses=None)


def scaled_gradient(primitive):
    right = primitive.gradients["logits"]
    return replace(primitive, gradients={"logits": lambda g, residuals: right(g, residuals) * 1.001})


def without_the_sum(op):
    """Take only one element along a stretched axis."""

    def vjp(g, y, a, b):
        product = (g * b)[tuple(slice(0, length) for length in a.shape)] if g.ndim == a.ndim else (g * b)[0]
        return product.reshape(a.shape)

    return replace(op, vjps=(vjp, op.vjps[1]), uses=None)


@pytest.mark.parametrize(
    ("room", "name", "plant", "op"),
    [
        ("products", "_MATMUL", scaled, "matmul"),
        ("losses", "CROSS_ENTROPY", scaled_gradient, "cross_entropy"),
        ("joining", "_PICK", scaled, "slice"),
        ("arithmetic", "_MULTIPLY", without_the_sum, "multiply"),
    ],
)
def test_wrong_vjp_is_caught(monkeypatch, room, name, plant, op):
    module = importlib.import_module(f"pce_mpi.ops.{room}")
    right = getattr(module, name)
    assert not any(map(faults_of, cases_of(op)))
    monkeypatch.setattr(module, name, plant(right))
    found = []
    for case in cases_of(op):
        try:
            found += faults_of(case)
        except ValueError as error:  # which the tape raises for a gradient that has not the shape of its operand
            found.append(str(error))
    assert found


def gradient_of(call, *operands):
    """That of the sum of what `call` makes of `operands`, in one process."""
    held = [pce.distribute(np.array(x), alone(), requires_grad=True) for x in operands]
    pce.sum(call(*held)).backward()
    return [x.grad.local for x in held]


def test_gradients_at_edges_are_those_of_pytorch():
    np.testing.assert_array_equal(gradient_of(pce.relu, [-1.0, 0.0, 1.0])[0], [0, 0, 1])
    base, exponent = gradient_of(pce.power, [0.0, 0.0, 0.0, 2.0], [0.0, 1.0, 2.0, 0.0])
    np.testing.assert_array_equal(base, [0, 1, 0, 0])
    np.testing.assert_array_equal(exponent, [0, 0, 0, np.log(2)])
    np.testing.assert_array_equal(gradient_of(lambda x: x**0, [0.0, 3.0])[0], [0, 0])


# ----------------------------------------------------------------------------------------------- what the tape holds


def gradients_without(monkeypatch, case, dropped=None):
    """Return the gradients as bytes, or an error, and what the tape holds: operations with numbers of operands.

    It does not hold `dropped`. The result is operand -1.
    """
    held = set()

    def put_without(op, results, operands, inputs, required, *others):
        if any(required) and is_floating(results[0].dtype):
            count = len(required)
            uses = op.uses or [range(-1, count)] * count
            used = {index for each, needs in zip(uses, required, strict=False) if needs for index in each}
            held.update((op, index) for index in used if index < count)
            if dropped and dropped[0] is op:
                op = replace(op, uses=[used - {dropped[1]}] * count)
        put_on_tape(op, results, operands, inputs, required, *others)

    with monkeypatch.context() as patch:
        patch.setitem(apply.__globals__, "put_on_tape", put_without)
        try:
            gradients = evaluate(case, alone(), replicated(case, alone())).gradients
        except (IndexError, TypeError, ValueError) as error:  # as an array has no elements
            return str(error), held
    return [None if x is None else x.local.tobytes() for x in gradients], held


def test_tape_holds_only_operands_that_gradients_need(monkeypatch):
    held, needed = set(), set()
    for case in CASES:
        if case.op != "op":  # operations of users hold everything
            expected, found = gradients_without(monkeypatch, case)
            held |= found
            needed |= {each for each in found - needed if gradients_without(monkeypatch, case, each)[0] != expected}
    # That of logsumexp costs nothing: its residuals hold the same elements.
    assert {(op.name, index) for op, index in held - needed} == {("logsumexp", 0)}


# ----------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("op", OPS)
def test_float32_stays_float32_within_rounding(op):
    for case in cases_of(op):
        outcome = evaluate(case, alone(), replicated(case, alone()), dtype=np.float32)
        results, gradients = one_process(case)
        expected = [*results, *(gradient for gradient in gradients if gradient is not None)]
        wanted = [case.dtype or np.float32] * len(results) + [np.float32] * (len(expected) - len(results))
        assert [x.dtype for x in outcome.arrays] == wanted, case.name
        for got, exact in zip(outcome.arrays, expected, strict=True):
            assert error_of(case, got.local, exact, np.float32) <= OPERATION, case.name


def test_each_operand_has_gradient_of_its_own_dtype():
    mesh = alone()
    x = pce.distribute(np.ones(3, np.float32), mesh, requires_grad=True)
    y = pce.distribute(np.full(3, 2.0), mesh, requires_grad=True)
    z = x * y + x
    assert z.dtype == np.float64
    pce.sum(z).backward()
    assert (x.grad.dtype, y.grad.dtype) == (np.float32, np.float64)
    np.testing.assert_array_equal(x.grad.local, [3, 3, 3])


HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "op", ["multiply", "sum", "mean", "matmul", "where", "cross_entropy", "einsum", "var", "sin", "remainder"]
)
def test_halves_are_computed_with_and_rounded_at_end(op, dtype):
    for case in cases_of(op):
        rounded = case.rounded(dtype)
        outcome = evaluate(rounded, alone(), replicated(case, alone()), dtype=dtype)
        results, gradients = one_process(rounded)
        expected = [*results, *(gradient for gradient in gradients if gradient is not None)]
        of_results = case.dtype or (np.float32 if op == "cross_entropy" else dtype)
        assert [x.dtype for x in outcome.results] == [of_results] * len(results), case.name
        for got, exact in zip(outcome.arrays, expected, strict=True):
            unit = dtype if got.dtype == dtype else np.float32
            assert error_of(case, got.local, exact, unit) <= (4 * HALF if unit is dtype else OPERATION), case.name


def test_mean_of_halves_survives_overflow_of_sum():
    for dtype in HALVES:
        (gradient,) = gradient_of(pce.mean, np.full(2**17, 100, dtype))
        assert pce.mean(pce.distribute(np.full(2**17, 100, dtype), alone())).item() == 100
        assert gradient.dtype == dtype
        assert (gradient == dtype(2.0**-17)).all()


@pytest.mark.parametrize("dtype", [*HALVES, np.float32])
def test_python_numbers_take_dtype_of_array(dtype):
    x = pce.distribute(np.ones(3, dtype), alone())
    for y in (x + 1, 2.5 * x, 1 / x, x - True, x**3, x**0.5, pce.maximum(x, 0.5), pce.where(x.local > 0, x, 0)):
        assert y.dtype == dtype
    assert (x * np.float64(2.5)).dtype == np.float64
    assert (pce.distribute(np.arange(3), alone()) * 0.5).dtype == np.float64
    assert (pce.distribute(np.arange(3), alone()) * 2).dtype == np.int64


def test_dtype_is_third_argument_of_numpy_reductions():
    x = pce.distribute(np.ones((2, 3), np.float32), alone())
    for function in (np.sum, np.mean):
        y = function(x, 0, np.float64)
        assert (y.shape, y.dtype) == ((3,), np.float64)


# ------------------------------------------------------------------------------------------------------------- cupy


def differences(case, cupy, got, expected):
    """Yield the faults of arrays of CuPy's that should have the numbers of NumPy's."""
    for array, wanted in zip(got, expected, strict=True):
        if not isinstance(array.local, cupy.ndarray):
            yield f"{case.name}: {type(array.local)}"
        elif not error_of(case, cupy.asnumpy(array.local), wanted) <= OPERATION:
            yield f"{case.name}: {cupy.asnumpy(array.local)} where NumPy has {wanted}"


@pytest.mark.parametrize("op", OPS)
def test_cupy_arrays_give_cupy_arrays_with_same_numbers(cupy, op):
    for case in cases_of(op):
        results, gradients = one_process(case)
        got = evaluate(case, alone(), replicated(case, alone()), library=cupy)
        assert not got.changed
        expected = [*results, *(gradient for gradient in gradients if gradient is not None)]
        assert list(differences(case, cupy, got.arrays, expected)) == []


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cupy_remainders_are_those_of_numpy(cupy, name, dtype):
    sizes = np.array([0.0, 0.1, 0.7, 1.0, 3.0, 5.5, 1e6, 2.0**24 + 2, 1e30, np.inf, np.nan], dtype)
    values = np.concatenate([sizes, -sizes])
    a, b = values[:, None], values[None]
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(a, b)
        found = getattr(pce, name)(*(pce.distribute(cupy.asarray(x), alone()) for x in (a, b)))
    got = cupy.asnumpy(found.local)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(expected[number]))


@pytest.mark.ranks(2)  # the library does not depend on the size
@pytest.mark.parametrize("op", OPS)
def test_sharded_cupy_arrays_give_numbers_of_numpy(line, cupy, op):
    for case in cases_of(op):
        shardings = [Sharding.of(line.dim_sizes, x.shape, {"data": Shard(0)} if x.ndim else {}) for x in case.operands]
        expected = evaluate(case, line, shardings)
        got = evaluate(case, line, shardings, library=cupy)
        assert [x.sharding for x in got.arrays] == [x.sharding for x in expected.arrays], case.name
        assert list(differences(case, cupy, got.arrays, [x.local for x in expected.arrays])) == []
