"""The memory that calls read and write: orders, read-only and foreign arrays, `out`, and arrays that stay the same."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.arrays import DLPACK_IS_READ_ONLY
from pce_mpi.testing import in_step
from ranks.grids import MEMORY_ORDERS, backwards, fortran, strided
from ranks.problems import (
    NARROW,
    WIDE,
    assert_as_dense,
    draw,
    evaluate,
    excess_of_gradient,
    expect,
    is_same,
    part_of,
    right_results,
)

# A rank reads and writes its own arrays: alone it reads its logits once, else twice.
pytestmark = pytest.mark.ranks(1, 2)

TARGETS = ["index", "probabilities"]
SHAPES = [((7, NARROW), -1), ((WIDE, 7), 0), ((3, WIDE, 4), 1), ((4, WIDE), -1), ((NARROW,), 0)]


class Tensor:
    """An array of a library that is unknown, with no more than DLPack."""

    def __init__(self, values):
        self._values = values
        self.dtype = f"tensor.{values.dtype}"

    def __dlpack__(self, **arguments):
        return self._values.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


# More memory orders


def transposed(values):
    order = np.roll(np.arange(values.ndim), 1).astype(int)
    return values.transpose(order).copy(order="C").transpose(np.argsort(order))


def unaligned(values):
    raw = np.empty(values.nbytes + 1, np.uint8)
    view = raw[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


class Subclass(np.ndarray):
    """An array type that a library may derive from NumPy's."""


def subclass(values):
    return values.copy().view(Subclass)


ORDERS = [*MEMORY_ORDERS, transposed, unaligned, subclass, Tensor]
WRITABLE = [np.copy, fortran, strided, backwards, transposed, unaligned]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("targets", TARGETS)
def test_arrays_may_have_any_strides(comm, order, targets):
    for shape, axis in SHAPES:
        with in_step(comm):
            problem = draw(*shape, axis=axis, targets=targets, weight=True, label_smoothing=0.1)
            part = part_of(comm, problem, "uneven")
            logits, chosen, options = part.on_this_rank(problem)
            options["weight"] = order(options["weight"])
            if order is Tensor:
                loss, gradient = pce.softmax_cross_entropy_value_and_grad(
                    Tensor(logits), Tensor(chosen), comm=comm, **options
                )
                assert type(loss) is type(gradient) is np.ndarray
                assert excess_of_gradient(gradient, expect(problem, part), problem) <= 1
                continue
            results = evaluate(comm, problem, part, inputs=(order(logits), order(chosen), options))
            assert_as_dense(results, problem, part)
            assert all(type(found) is np.ndarray for found in [*results.losses.values(), *results.gradients.values()])


@pytest.mark.parametrize("targets", TARGETS)
def test_array_may_repeat_elements_by_stride_0(comm, targets):
    problem = draw(1, WIDE, targets=targets, peaked=True)
    part = part_of(comm, problem, "uneven")
    logits, chosen, options = part.on_this_rank(problem)
    repeated = problem.but(logits=np.repeat(problem.logits, 5, axis=0), targets=np.repeat(problem.targets, 5, axis=0))
    inputs = (np.broadcast_to(logits, (5, logits.shape[1])), np.broadcast_to(chosen, (5, *chosen.shape[1:])), options)
    results = evaluate(comm, repeated, part, inputs=inputs)
    constant = draw(5, WIDE, targets=targets)
    constant = constant.but(logits=np.full((5, WIDE), 2.5, np.float32))
    _, chosen, options = part.on_this_rank(constant)
    inputs = (np.broadcast_to(np.float32(2.5), (5, part.stop - part.start)), chosen, options)
    constant_results = evaluate(comm, constant, part, inputs=inputs)
    assert_as_dense(results, repeated, part)
    assert_as_dense(constant_results, constant, part)


def test_gradient_of_repeated_elements_is_whole_array(comm):
    logits = np.broadcast_to(np.float32(0), (3, 4))
    _, residuals = pce.softmax_cross_entropy_forward(logits, np.array([0, 1, 2]), comm=comm)
    for gradient in (
        pce.softmax_cross_entropy_backward(1.0, residuals),
        pce.softmax_cross_entropy_value_and_grad(logits, np.array([0, 1, 2]), comm=comm)[1],
    ):
        assert gradient.flags.writeable
        gradient[0, 0] = 17
        assert (gradient == 17).sum() == 1


# Foreign arrays


def test_logits_of_tensor_are_not_copied(comm):
    # Between forward and backward nobody may change them. A caller that does so anyway sees that there is no copy.
    values, targets = np.zeros((2, 3), np.float32), np.array([0, 1])
    _, residuals = pce.softmax_cross_entropy_forward(Tensor(values), targets, comm=comm)
    before = pce.softmax_cross_entropy_backward(1.0, residuals)
    values[...] = -np.inf
    after = pce.softmax_cross_entropy_backward(1.0, residuals)
    assert before[0, 2] > 0
    assert after[0, 2] == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_out_of_tensor_is_written_where_it_is(comm, dtype):
    problem = draw(7, WIDE, dtype=dtype)
    part = part_of(comm, problem, "uneven")
    logits, targets, options = part.on_this_rank(problem, comm=comm)
    values = [np.full(logits.shape, 7, dtype) for _ in range(2)]
    outs = [Tensor(value) for value in values]
    _, residuals = pce.softmax_cross_entropy_forward(logits, targets, **options)
    if DLPACK_IS_READ_ONLY:
        with pytest.raises(ValueError, match=r"out is read-only, as all that comes by DLPack to NumPy 2.0: take 2.1"):
            pce.softmax_cross_entropy_backward(1.0, residuals, out=outs[0])
        return
    assert pce.softmax_cross_entropy_backward(1.0, residuals, out=outs[0]) is outs[0]
    assert pce.softmax_cross_entropy_value_and_grad(logits, targets, **options, out=outs[1])[1] is outs[1]
    for value in values:
        assert excess_of_gradient(value, expect(problem, part), problem) <= 1


def test_out_may_be_logits_seen_otherwise(comm):
    problem = draw(7, WIDE, dtype=np.float64)
    part = part_of(comm, problem, "uneven")
    for view in (*[Tensor] * (not DLPACK_IS_READ_ONLY), memoryview, lambda logits: logits[:]):
        with in_step(comm):
            logits, targets, options = part.on_this_rank(problem, comm=comm)
            out = view(logits)
            _, gradient = pce.softmax_cross_entropy_value_and_grad(logits, targets, **options, out=out)
            assert gradient is out
            assert excess_of_gradient(logits, expect(problem, part), problem) <= 1


# out


@pytest.mark.parametrize("order", WRITABLE, ids=lambda order: order.__name__)
@pytest.mark.parametrize("targets", TARGETS)
def test_out_is_filled_and_given_back(comm, order, targets):
    for shape, axis in SHAPES:
        with in_step(comm):
            problem = draw(*shape, axis=axis, targets=targets, weight=True, ignored=0.2)
            part = part_of(comm, problem, "uneven")
            logits, chosen, options = part.on_this_rank(problem, comm=comm)
            outs = [order(np.full(logits.shape, np.nan, np.float32)) for _ in range(2)]
            loss, residuals = pce.softmax_cross_entropy_forward(logits, chosen, **options)
            backward = pce.softmax_cross_entropy_backward(1.0, residuals, out=outs[0])
            fused_loss, fused = pce.softmax_cross_entropy_value_and_grad(logits, chosen, **options, out=outs[1])
            plain = right_results(comm, problem, part)
            assert backward is outs[0]
            assert fused is outs[1]
            assert is_same(backward.copy(order="C"), plain.gradients["backward"])
            assert is_same(fused.copy(order="C"), plain.gradients["value_and_grad"])
            assert is_same(loss, fused_loss)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_out_may_be_logits(comm, dtype):
    for targets, softcap, (shape, axis) in product(TARGETS, (None, 4.0), SHAPES[1:4]):
        problem = draw(*shape, axis=axis, dtype=dtype, targets=targets, ignored=0.2, softcap=softcap)
        part = part_of(comm, problem, "uneven")
        plain = evaluate(comm, problem, part)
        logits, chosen, options = part.on_this_rank(problem, comm=comm)
        with in_step(comm):
            assert_as_dense(plain, problem, part)
        for order in WRITABLE:
            with in_step(comm):
                to_fuse, to_go_back_into = order(logits), order(logits)
                loss, fused = pce.softmax_cross_entropy_value_and_grad(to_fuse, chosen, **options, out=to_fuse)
                _, residuals = pce.softmax_cross_entropy_forward(to_go_back_into, chosen, **options)
                backward = pce.softmax_cross_entropy_backward(1.0, residuals, out=to_go_back_into)
                assert fused is to_fuse, order
                assert backward is to_go_back_into, order
                assert is_same(loss, plain.losses["value_and_grad"]), order
                assert is_same(fused.copy(order="C"), plain.gradients["value_and_grad"]), order
                assert is_same(backward.copy(order="C"), plain.gradients["backward"]), order


def test_out_may_stand_beside_logits_in_memory(comm):
    both = np.zeros((2, 2, 5), np.float32)
    logits, out = both[:, 0], both[:, 1]
    logits[...] = np.random.default_rng(comm.rank).normal(size=(2, 5))
    before = logits.copy()
    _, gradient = pce.softmax_cross_entropy_value_and_grad(logits, np.array([0, 4]), comm=comm, out=out)
    assert gradient is out
    assert np.array_equal(logits, before)
    assert out.all()


# Inputs stay as they are


def test_statistics_leave_their_inputs_as_they_are(comm):
    problem = draw(7, WIDE)
    logits, targets, _ = part_of(comm, problem, "uneven").on_this_rank(problem)
    before = logits.tobytes(), targets.tobytes()
    statistics = pce.class_statistics(logits, targets, comm=comm)
    assert (logits.tobytes(), targets.tobytes()) == before
    for name, values in zip(statistics._fields, statistics, strict=True):
        assert not np.shares_memory(values, logits), name
        assert not np.shares_memory(values, targets), name


def test_targets_weights_and_loss_may_change_after_forward(comm):
    problem = draw(7, WIDE, weight=True, label_smoothing=0.1, reduction="none")
    part = part_of(comm, problem, "uneven")
    plain = evaluate(comm, problem, part)
    logits, targets, options = part.on_this_rank(problem, comm=comm)
    loss, residuals = pce.softmax_cross_entropy_forward(logits, targets, **options)
    kept = loss.copy()
    targets[...] = 0
    options["weight"][...] = np.nan
    assert is_same(loss, kept)
    loss[...] = np.nan
    assert is_same(pce.softmax_cross_entropy_backward(1.0, residuals), plain.gradients["backward"])


def test_settings_of_numpy_stay_as_they_are(comm):
    problem = draw(7, WIDE, targets="probabilities", softcap=3.0)
    with np.errstate(all="raise", under="warn"):
        np.setbufsize(4096)  # until the end of the block
        before = np.geterr()
        evaluate(comm, problem, part_of(comm, problem, "uneven"))
        assert np.geterr() == before
        assert np.getbufsize() == 4096
