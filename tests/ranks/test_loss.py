"""The sharded loss equals the dense one: shapes, dtypes, splits of the classes, and what is communicated for it."""

from collections import Counter
import copy
from itertools import product
import pickle
import re
from typing import ClassVar

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.comm.tracing import Purpose
from pce_mpi.testing import in_step
from ranks.problems import WIDE, draw, evaluate, is_same, part_of, right_results

# Two ranks and four give the same bits (test_properties.py, tests/jobs/test_digests.py).
pytestmark = pytest.mark.ranks(1, 3)

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
TARGETS = ["index", "probabilities"]


# Results


def test_class_start_of_empty_shard_may_be_anything(comm):
    problem = draw(5, 3, peaked=True)
    part = part_of(comm, problem, "all on the last rank")
    start = part.start if part.stop > part.start else 3  # after the last class
    right_results(comm, problem, part, class_start=start)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(("shape", "axis"), [((0, 7), -1), ((3, 7, 0), 1), ((7, 0, 2), 0)])
def test_loss_of_no_rows(comm, shape, axis, targets, reduction):
    problem = draw(*shape, axis=axis, targets=targets, reduction=reduction)
    for loss in right_results(comm, problem).losses.values():
        assert loss.size == 0 if reduction == "none" else np.isnan(loss) if reduction == "mean" else loss == 0


@pytest.mark.ranks(2)  # all classes are on one rank
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 300_001), 1),  # rows wider than a tile
        ((300_001, 2), 0),  # with another axis inside
        ((2, 70_001, 2), 1),
        ((60_000, 5), 1),  # more short rows than one tile has
        ((2, 5, 60_000), 1),  # an inner axis longer than a tile has rows
        ((700, 5, 100), 1),  # an inner axis that fits into a tile many times over
        ((2, 30_000, 11), 1),
    ],
)
def test_rows_may_be_wider_than_a_tile(comm, shape, axis, targets):
    problem = draw(*shape, axis=axis, targets=targets, reduction="none")
    right_results(comm, problem, "all on the last rank")


@pytest.mark.ranks(2)  # all classes are on one rank
def test_row_wider_than_tile_has_options_and_statistics(comm):
    classes = 270_001
    problem = draw(2, classes, weight=True, label_smoothing=0.1, z_loss=0.01, logit_scale=1.5, reduction="sum")
    logits, targets, _ = part_of(comm, problem, "all on the first rank").on_this_rank(problem)
    statistics = pce.class_statistics(logits, targets, comm=comm)
    right_results(comm, problem, "all on the first rank")
    assert statistics.argmax.tolist() == problem.logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_index_targets_may_have_any_integer_dtype(comm, dtype):
    ignore_index = 100 if np.dtype(dtype).kind == "u" else -100
    problem = draw(6, 11, ignored=0.4, ignore_index=ignore_index)
    problem = problem.but(targets=problem.targets.astype(dtype))
    right_results(comm, problem)


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64 - 1])
def test_any_unsigned_number_may_be_ignored(comm, number):
    problem = draw(6, 11, ignored=0.4, ignore_index=100)
    targets = np.where(problem.targets == 100, np.uint64(number), problem.targets.astype(np.uint64))
    logits, _, options = part_of(comm, problem).on_this_rank(problem, comm=comm)
    options["ignore_index"] = number
    losses = pce.softmax_cross_entropy(logits, targets, **options, reduction="none")
    statistics = pce.class_statistics(logits, targets[:, None], comm=comm, ignore_index=number)
    other = number - 1 if number > 2**63 else 2**64 - 1
    with pytest.raises(IndexError, match=f"targets\\[0\\] = {other} is no class number"):
        pce.softmax_cross_entropy(logits, np.full(6, other, np.uint64), **options)
    assert np.array_equal(losses == 0.0, targets == number)
    assert np.array_equal(statistics.log_prob[:, 0] == 0.0, targets == number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_probability_targets_may_have_another_dtype_than_logits(comm, dtype):
    problem = draw(6, 11, targets="probabilities")
    problem = problem.but(targets=problem.targets.astype(dtype))
    right_results(comm, problem)


# Backward


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dloss", [2.5, 3, np.float32(0.1), np.array(-1.5), 0.0])
def test_dloss_may_have_any_real_type(comm, reduction, dloss):
    problem = draw(6, WIDE, targets="probabilities", reduction=reduction)
    right_results(comm, problem, dloss=dloss)


def test_backward_may_be_called_twice(comm):
    problem = draw(6, WIDE, reduction="none", peaked=True)
    logits, targets, options = part_of(comm, problem).on_this_rank(problem, comm=comm)
    _, residuals = pce.softmax_cross_entropy_forward(logits, targets, **options)
    first = pce.softmax_cross_entropy_backward(2.0, residuals)
    kept = first.copy()
    second = pce.softmax_cross_entropy_backward(1.0, residuals)
    assert is_same(first, kept)
    assert is_same(first, 2 * second)


def test_backward_keeps_its_inputs_alive(comm):
    problem = draw(40, WIDE, weight=True, targets="probabilities", label_smoothing=0.1)
    part = part_of(comm, problem)
    expected = evaluate(comm, problem, part)
    logits, targets, options = part.on_this_rank(problem, comm=comm)
    _, residuals = pce.softmax_cross_entropy_forward(logits, targets, **options)
    del logits, targets, options
    litter = [np.full((40, WIDE), np.nan) for _ in range(20)]  # freed memory would be taken for these
    gradient = pce.softmax_cross_entropy_backward(1.0, residuals)
    assert len(litter) == 20
    assert is_same(gradient, expected.gradients["backward"])


# Communication


class CountingComm(MPI.Intracomm):
    """A communicator that counts the calls made on it and on its duplicates; knows nothing of the package."""

    calls: ClassVar[Counter] = Counter()


def _counted(name):
    def call(self, *args, **kwargs):
        CountingComm.calls[name] += 1
        return getattr(MPI.Intracomm, name)(self, *args, **kwargs)

    return call


COMMUNICATES = re.compile(r"i?(all|reduce|gather|scatter|bcast|barrier|scan|exscan|[sbr]?send|recv)", re.IGNORECASE)
for method in filter(COMMUNICATES.match, dir(MPI.Intracomm)):
    setattr(CountingComm, method, _counted(method))


@pytest.fixture
def counting(comm):
    counting = CountingComm(comm.Dup())
    # The first use of a communicator duplicates it; what it takes to do so is not counted.
    pce.softmax_cross_entropy(np.zeros((1, 2)), np.zeros(1, int), comm=counting)
    CountingComm.calls.clear()
    yield counting
    counting.Free()


def calls_since_last_time() -> dict[str, int]:
    calls = dict(CountingComm.calls)
    CountingComm.calls.clear()
    return calls


ONE_OPTION = [
    {},
    {"targets": "probabilities"},
    {"weight": True},
    {"ignored": 0.5},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "weight": True},
    {"targets": "probabilities", "label_smoothing": 0.1, "weight": True},
    {"z_loss": 0.1},
    {"logit_scale": 2.0},
    {"softcap": 5.0},
    {"reduction": "none"},
    {"reduction": "sum"},
    {"dtype": np.float16},
    {"dtype": ml_dtypes.bfloat16},
    {"dtype": np.float64},
    {"axis": 0},
]
# Reference implementations need three.
FORWARD = {"Iallgather": 1, "Iallreduce": 1}


@pytest.mark.parametrize("options", ONE_OPTION, ids=lambda options: ", ".join(options) or "no option")
def test_forward_is_one_allreduce_and_backward_is_silent(comm, counting, options):
    problem = draw(12, 12, **options)
    part = part_of(comm, problem)
    for local in ({}, {"compute_dtype": np.float64, "class_start": part.start, "num_classes": 12}):
        with in_step(comm):
            assert_one_allreduce(comm, counting, *part.on_this_rank(problem, comm=counting, **local))


def assert_one_allreduce(comm, counting, logits, targets, arguments):
    with pce.trace() as trace:
        pce.softmax_cross_entropy(logits, targets, **arguments)
        alone = calls_since_last_time()
        _, residuals = pce.softmax_cross_entropy_forward(logits, targets, **arguments)
        forward = calls_since_last_time()
        pce.softmax_cross_entropy_backward(1.0, residuals)
        pce.softmax_cross_entropy_backward(1.0, residuals, out=logits)
        backward = calls_since_last_time()
        pce.softmax_cross_entropy_value_and_grad(logits, targets, **arguments, out=logits)
        fused = calls_since_last_time()
    assert alone == forward == fused == FORWARD
    assert backward == {}
    assert trace.count() == trace.count("all_reduce") == 3
    assert trace.count(purpose=Purpose.AGREEMENT) == 3
    assert trace.count(purpose=None) == 6
    assert all(event.ranks == comm.size and event.over == "comm" for event in trace.events)


@pytest.mark.parametrize("with_targets", [False, True])
def test_class_statistics_are_one_allreduce_after_one_agreement(comm, counting, with_targets):
    logits = np.zeros((3, 5), np.float32)
    targets = np.zeros(3, int) if with_targets else None
    with pce.trace() as trace:
        pce.class_statistics(logits, targets, comm=counting)
    assert calls_since_last_time() == FORWARD
    assert (trace.count(), trace.count("all_reduce"), trace.count(purpose=Purpose.AGREEMENT)) == (1, 1, 1)


@pytest.mark.parametrize(("reduction", "payload"), [("none", 0), ("sum", 1), ("mean", 1)])
@pytest.mark.parametrize("targets", TARGETS)
def test_batch_comm_adds_one_allreduce_of_two_sums(comm, counting, reduction, payload, targets):
    problem = draw(4, 5, targets=targets, reduction=reduction)
    with pce.trace() as trace:
        pce.softmax_cross_entropy(
            problem.logits, problem.targets, comm=MPI.COMM_SELF, batch_comm=counting, reduction=reduction
        )
    assert calls_since_last_time() == {"Iallgather": 1} | ({"Iallreduce": 1} if payload else {})
    assert trace.count("all_reduce", over="comm") == 1
    assert trace.count("all_reduce", over="batch_comm") == payload
    assert trace.bytes("all_reduce", over="batch_comm") == 64 * payload
    assert trace.count(over="batch_comm", purpose=Purpose.AGREEMENT) == 1


def test_residuals_are_neither_copied_nor_pickled():
    logits, targets = np.eye(3), np.arange(3)
    _, first = pce.softmax_cross_entropy_forward(logits, targets)
    _, second = pce.class_statistics_forward(logits, targets)
    for residuals, how in product((first, second), (copy.copy, copy.deepcopy, pickle.dumps)):
        with pytest.raises(TypeError, match="residuals are neither copied nor pickled"):
            how(residuals)


def test_loss_of_the_tape_takes_plain_shards(comm):
    mine = np.random.default_rng(comm.rank).normal(size=(4, 3))
    of_shards = pce.cross_entropy(mine, np.arange(4) % 3, comm=comm, reduction="none")
    np.testing.assert_array_equal(
        of_shards, pce.softmax_cross_entropy(mine, np.arange(4) % 3, comm=comm, reduction="none")
    )
    x = pce.distribute(mine[:, :1], pce.Mesh(comm, data=comm.size))
    with pytest.raises(TypeError, match="unexpected keyword argument 'comm'"):
        pce.cross_entropy(x, np.zeros(4, int), comm=comm)
