"""The state of the floating-point unit, which other libraries may change, decides no bit that is promised."""

from contextlib import nullcontext

import numpy as np
import pytest

from floating_point_states import STATES, control_word, floating_point
import pce_mpi as pce
from pce_mpi import Shard
from ranks.grids import mesh_of

ROWS, CLASSES = 8, 97


def bits(results):
    return [np.asarray(each).tobytes() for each in results if each is not None]


def results_of(comm, state, state_backward):
    """Everything of plain arrays that has promised bits, with subnormal operands and results."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((ROWS, CLASSES)) * 40).astype(np.float32)
    logits[0] = rng.integers(-9, 9, CLASSES) * np.float32(1e-41)
    targets = rng.integers(0, CLASSES, ROWS)
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    shard, weight = logits[:, mine], (rng.random(CLASSES) * 1e-39).astype(np.float32)[mine]
    options = {"comm": comm, "label_smoothing": 0.1, "reduction": "none", "z_loss": 1e-3}
    with state():
        losses = pce.softmax_cross_entropy(shard, targets, weight=weight, **options)
        loss, dlogits = pce.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm)
        each, residuals = pce.softmax_cross_entropy_forward(shard, targets, **options)
        statistics, kept = pce.class_statistics_forward(shard, targets, comm=comm)
        largest = pce.top_k(shard, 5, comm=comm)
        first = pce.argmax(shard, comm=comm)
        linear = pce.linear_cross_entropy_value_and_grad(np.eye(4, dtype=np.float32), shard[:4], targets[:4], comm=comm)
    upstream = np.linspace(-1e-39, 1.0, ROWS).astype(np.float32)
    given = {"log_prob": upstream, "entropy": 0.3 * upstream, "logsumexp": 1e-310}
    with state_backward():
        from_losses = pce.softmax_cross_entropy_backward(upstream, residuals)
        from_statistics = pce.class_statistics_backward(kept, **given)
    plain = [losses, loss, dlogits, each, *statistics, *largest, first, linear[0]]
    return bits([*plain, from_losses, from_statistics])


@pytest.mark.ranks(1, 2)  # one rank alone, and one that differs from another
@pytest.mark.parametrize("state", STATES)
def test_plain_arrays_have_same_bits_in_any_state(comm, state):
    def other():
        return floating_point(state)

    before, expected = control_word(), results_of(comm, nullcontext, nullcontext)
    last = other if comm.rank == comm.size - 1 else nullcontext
    found = [results_of(comm, *states) for states in ((other, other), (last, last), (nullcontext, last))]
    assert found == [expected] * 3
    assert control_word() == before


def tape_of(mesh, logits, targets, state):
    x = pce.distribute(logits, mesh, data=Shard(1), requires_grad=True)
    with state():
        loss = pce.cross_entropy(x, targets)
        statistics = pce.class_statistics(x, targets)
        softmax, log_softmax = pce.softmax(x), pce.log_softmax(x)
        found = [loss, *statistics, softmax, log_softmax, pce.logsumexp(x, axis=1), *pce.top_k(x, 3), pce.argmax(x)]
        loss.backward()
    return bits([*(each.full() for each in found), x.grad.full()])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("state", STATES)
def test_tape_has_same_bits_in_any_state(comm, state):
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((ROWS, CLASSES)) * 30).astype(np.float32)
    logits[1] = rng.integers(-9, 9, CLASSES) * np.float32(1e-41)
    targets, mesh = rng.integers(0, CLASSES, ROWS), mesh_of(comm, comm.size)
    expected = tape_of(mesh, logits, targets, nullcontext)
    assert tape_of(mesh, logits, targets, lambda: floating_point(state)) == expected
    last = comm.rank == comm.size - 1
    assert tape_of(mesh, logits, targets, lambda: floating_point(state) if last else nullcontext()) == expected


@pytest.mark.parametrize("state", STATES)
def test_reproducible_refuses_other_state_on_every_rank(comm, state):
    mesh = mesh_of(comm, comm.size)
    x = pce.distribute(np.linspace(-1.0, 1.0, 7), mesh, data=Shard(0))
    guilty = comm.size - 1
    # In the operation that communicates, and in one before it that does not.
    for names in ("exp", "sum"), ("exp",), ("sum",):
        with pce.reproducible(), pytest.raises(RuntimeError) as caught:
            y = x
            for name in ("exp", "sum"):
                other = name in names and comm.rank == guilty
                with floating_point(state) if other else nullcontext():
                    y = getattr(pce, name)(y)
            y.full()
        rounding = state not in ("results to 0", "operands to 0", "both to 0")
        what = "does not round to nearest" if rounding else "takes subnormal numbers for 0"
        assert f"the floating-point unit {what}, which" in str(caught.value)
        assert comm.size == 1 or f"(rank {guilty} along data)" in str(caught.value)
        with pce.reproducible():
            assert pce.sum(pce.exp(x)).full() == pytest.approx(np.exp(np.linspace(-1.0, 1.0, 7)).sum())
