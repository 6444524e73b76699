"""AdamW is the textbook's at any placement, optimizers resume from their state, and learning rates follow the step."""

from fractions import Fraction
import math

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import SGD, AdamW, Shard, cosine_schedule, linear_schedule
from pce_mpi.optim.adamw import power_of
from ranks.grids import mesh_of, squarest
from ranks.placed import SUM, traced

OPTIONS = {
    "default": {},
    "all": {"lr": 0.1, "betas": (0.5, 0.75), "eps": 0.01, "weight_decay": 0.3},
    "no decay": {"lr": 0.1, "weight_decay": 0.0},
    "no memory": {"betas": (0.0, 0.0)},
}


def textbook(p, gradients, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    """The parameter after a step with each of the gradients; one that is None is no step."""
    m, v, t = np.zeros_like(p), np.zeros_like(p), 0
    for g in gradients:
        if g is None:
            continue
        t += 1
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        p = p - lr * weight_decay * p
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


def drawn(shape=(5, 3), steps=4, dtype=np.float64):
    rng = np.random.default_rng(1)
    return rng.standard_normal(shape).astype(dtype), rng.standard_normal((steps, *shape)).astype(dtype)


def after(optimizer, w, gradients, **placements):
    """Step with each of these whole gradients."""
    for gradient in gradients:
        w.grad = pce.distribute(gradient, w.mesh, **placements)
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_adamw_is_that_of_textbook_at_any_placement(comm, options):
    values, gradients = drawn()
    expected = textbook(values, gradients, **options)
    for placements in ([], [Shard(0)], [Shard(1), Shard(0)], [pce.Replicate(), Shard(0)]):
        mesh = mesh_of(comm, *squarest(comm.size))
        placements = dict(zip(mesh.dims, placements, strict=False))
        w = pce.distribute(values, mesh, requires_grad=True, **placements)
        after(AdamW([w], **options), w, gradients, **placements)
        np.testing.assert_allclose(w.full(), expected, rtol=1e-12, atol=1e-14, err_msg=str(placements))


def test_adamw_step_by_hand():
    mesh = mesh_of(MPI.COMM_SELF, 1)
    w = pce.distribute(np.array([1.0, -2.0]), mesh, requires_grad=True)
    optimizer = AdamW([w], lr=0.5, betas=(0.5, 0.75), eps=0.0, weight_decay=0.5)
    after(optimizer, w, [np.array([2.0, -4.0])])
    # p - p/4, and half a step against the sign of the gradient
    np.testing.assert_allclose(w.local, [0.25, -1.0], rtol=1e-15)


def test_partial_gradients_are_reduced_before_step(comm):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn()
    w = pce.distribute(values, mesh, requires_grad=True)
    optimizer = AdamW([w], lr=0.1)
    for gradient in gradients:
        mine = gradient if comm.rank == 0 else np.zeros_like(gradient)
        w.grad = pce.from_local(mine, mesh, data=SUM)
        _, trace = traced(optimizer.step)
        assert trace.count("all_reduce") == 1
    np.testing.assert_allclose(w.local, textbook(values, gradients, lr=0.1), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_adamw_steps_halves_in_float32(comm, dtype):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn(dtype=dtype)
    w = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    optimizer = AdamW([w], lr=0.1)
    after(optimizer, w, gradients[:1])
    expected = textbook(values.astype(np.float64), gradients[:1].astype(np.float64), lr=0.1)
    np.testing.assert_array_equal(w.full(), expected.astype(dtype))
    assert {optimizer.state()[f"0.{name}"].dtype.name for name in ("exp_avg", "exp_avg_sq")} == {"float32"}


def test_parameter_without_gradient_is_not_stepped(comm):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn()
    first, second = (pce.distribute(values, mesh, requires_grad=True) for _ in range(2))
    optimizer = AdamW([first, second], lr=0.1)
    for number, gradient in enumerate(gradients):
        first.grad = pce.distribute(gradient, mesh)
        second.grad = None if number % 2 else pce.distribute(gradient, mesh)
        optimizer.step()
    np.testing.assert_allclose(first.local, textbook(values, gradients, lr=0.1), rtol=1e-12)
    np.testing.assert_allclose(second.local, textbook(values, gradients[::2], lr=0.1), rtol=1e-12)


MAKERS = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_resumed_training_has_bits_of_one_straight_through(comm, tmp_path_factory, name):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn((7, 3), steps=6, dtype=np.float32)
    folder = comm.bcast(str(tmp_path_factory.mktemp("state")) if comm.rank == 0 else None)
    straight = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    after(MAKERS[name]([straight]), straight, gradients, data=Shard(0))

    begun = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    optimizer = MAKERS[name]([begun])
    after(optimizer, begun, gradients[:3], data=Shard(0))
    pce.save(f"{folder}/file", {"w": begun} | {f"optimizer.{key}": each for key, each in optimizer.state().items()})

    read = pce.load(f"{folder}/file", mesh, {"w": {"data": Shard(0)}})
    w = pce.from_local(read["w"].local, mesh, shape=(7, 3), requires_grad=True, data=Shard(0))
    resumed = MAKERS[name]([w])
    start = "optimizer."
    resumed.load_state({key.removeprefix(start): each for key, each in read.items() if key.startswith(start)})
    after(resumed, w, gradients[3:], data=Shard(0))
    assert w.local.tobytes() == straight.local.tobytes()


def test_state_is_a_copy_sharded_as_parameter(comm):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn((7, 3))
    w = pce.distribute(values, mesh, requires_grad=True, data=Shard(0))
    optimizer = AdamW([w], lr=0.1)
    assert optimizer.state() == {}
    after(optimizer, w, gradients[:1], data=Shard(0))
    state = optimizer.state()
    before = state["0.exp_avg"].local.copy()
    after(optimizer, w, gradients[1:], data=Shard(0))
    assert state["0.exp_avg"].sharding == w.sharding
    assert state["0.exp_avg"].local.tobytes() == before.tobytes()
    assert (state["0.step"].item(), optimizer.state()["0.step"].item()) == (1, 4)
    np.testing.assert_allclose(state["0.exp_avg"].full(), 0.1 * gradients[0], rtol=1e-12)


def changed(state, mesh, name):
    """A state that is wrong in one way, and the error that says so."""
    step, buffer = state["0.step"], state["0.exp_avg"]
    return {
        "unknown": (state | {"3.step": step}, ValueError, "unknown in the state of AdamW: 3.step"),
        "missing": ({"0.step": step}, ValueError, "missing in the state of AdamW: 0.exp_avg, 0.exp_avg_sq"),
        "shape": (state | {"0.exp_avg": step}, ValueError, "0.exp_avg must be float64"),
        "mesh": (state | {"0.step": pce.distribute(1, mesh_of(MPI.COMM_SELF, 1))}, ValueError, "mesh of its parameter"),
        "array": (state | {"0.exp_avg": buffer.local}, TypeError, "0.exp_avg must be a distributed array"),
        "mapping": ([], TypeError, "arrays must be a mapping"),
    }[name]


@pytest.mark.parametrize("name", ["unknown", "missing", "shape", "mesh", "array", "mapping"])
def test_wrong_state_on_one_rank_raises_everywhere(comm, name):
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn()
    w = pce.distribute(values, mesh, requires_grad=True)
    optimizer = AdamW([w], lr=0.1)
    after(optimizer, w, gradients[:1])
    right = optimizer.state()
    wrong, error, text = changed(right, mesh, name)
    with pytest.raises(error) as raised:
        AdamW([w]).load_state(wrong if comm.rank == comm.size - 1 else right)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"betas": 0.9}, TypeError),
        ({"betas": (0.9, 1.0)}, ValueError),
        ({"betas": (-0.1, 0.9)}, ValueError),
        ({"eps": -1.0}, ValueError),
        ({"weight_decay": math.inf}, ValueError),
        ({"lr": "fast"}, TypeError),
    ],
    ids=str,
)
def test_bad_numbers_of_adamw_raise(given, error):
    w = pce.distribute(np.zeros(2), mesh_of(MPI.COMM_SELF, 1), requires_grad=True)
    with pytest.raises(error):
        AdamW([w], **given)


def test_ranks_with_other_betas_raise_together(comm):
    if comm.size == 1:
        return
    w = pce.distribute(np.zeros(2), mesh_of(comm, comm.size), requires_grad=True)
    w.grad = pce.distribute(np.ones(2), w.mesh)
    with pytest.raises(pce.CollectiveError, match="beta1"):
        AdamW([w], betas=(0.1 * (comm.rank + 1) / comm.size, 0.9)).step()


@pytest.mark.parametrize("schedule", [linear_schedule, cosine_schedule])
def test_schedule_rises_falls_and_stays(schedule):
    rates = [schedule(step, lr=2.0, steps=10, warmup=4, final=0.5) for step in range(13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[7] == pytest.approx(1.25)
    assert rates[10:] == [0.5] * 3
    assert sorted(rates[4:], reverse=True) == rates[4:]
    for warmup in (-1, 10):
        with pytest.raises(ValueError, match="warmup"):
            schedule(0, lr=1.0, steps=10, warmup=warmup)


def test_cosine_schedule_calls_no_libm(monkeypatch):
    rates = [cosine_schedule(step, lr=2.0, steps=10) for step in range(10)]
    assert rates == pytest.approx([1.0 + math.cos(math.pi * step / 10) for step in range(10)], rel=1e-15)
    monkeypatch.setattr(math, "cos", None)
    assert [cosine_schedule(step, lr=2.0, steps=10) for step in range(10)] == rates


@pytest.mark.parametrize("beta", [0.0, 1e-300, 0.5, 0.9, 0.999, 1 - 2.0**-53])
def test_bias_correction_is_rounded_power(beta):
    for step in (*range(1, 40), 700):
        assert 1.0 - power_of(beta, step) == 1.0 - float(Fraction(beta) ** step)


def test_state_of_another_parameter_raises_together(comm):
    if comm.size == 1:
        return
    mesh = mesh_of(comm, comm.size)
    values, gradients = drawn()
    parameters = [pce.distribute(values, mesh, requires_grad=True) for _ in range(2)]
    optimizer = AdamW(parameters)
    after(optimizer, parameters[0], gradients[:1])
    first = optimizer.state()
    second = {name.replace("0.", "1."): each for name, each in first.items()}
    with pytest.raises(pce.CollectiveError, match=r"0\.step"):
        AdamW(parameters).load_state(first if comm.rank else second)


def test_state_follows_momentum_that_is_assigned():
    mesh = mesh_of(MPI.COMM_SELF, 1)
    values, gradients = drawn()
    w = pce.distribute(values, mesh, requires_grad=True)
    optimizer = SGD([w], lr=0.1, momentum=0.9)
    after(optimizer, w, gradients[:1])
    optimizer.momentum = 0.0
    assert list(optimizer.state()) == ["0.step"]
    SGD([w], lr=0.1).load_state(optimizer.state())
    plain = SGD([w], lr=0.1)
    after(plain, w, gradients[:1])
    plain.momentum = 0.9
    assert not plain.state()["0.momentum"].local.any()
