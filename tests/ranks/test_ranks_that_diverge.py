"""Most operations send nothing, so ranks that run different ones would not notice: the next collective does."""

from functools import partial

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Shard

NUMBERS = np.arange(12.0).reshape(4, 3)


@pytest.fixture
def mesh(comm, impatient):
    return Mesh(comm, data=comm.size)


def text_of(call):
    try:
        call()
    except pce.CollectiveError as error:
        return str(error)
    return ""


def here_and_there(comm, one, other):
    """`text`, or nothing where there is no other rank to differ from."""
    ranks = ", ".join(f"{rank}" for rank in range(1, comm.size))
    others = f"rank{'s' * (comm.size > 2)} {ranks} along data"
    return (
        f"ranks have run different operations: {one} (rank 0 along data), {other} ({others})" if comm.size > 1 else ""
    )


def test_first_difference_is_named_once_on_every_rank(comm, mesh):
    x = pce.distribute(NUMBERS, mesh, data=Shard(0))
    y = pce.exp(x) if comm.rank == 0 else pce.tanh(x)
    text = text_of(lambda: (y * 2 + 1).sum().item())
    assert comm.allgather(text) == [here_and_there(comm, "exp", "tanh")] * comm.size
    assert x.sum().item() == NUMBERS.sum()
    y = pce.exp(x) if comm.rank == 0 else pce.tanh(x)
    for _ in range(100):
        y = y * 2
    text = text_of(lambda: y.sum().item())
    assert text.endswith("; the first of them more than 64 operations ago") == (comm.size > 1)


def test_additional_operation_is_noticed_at_the_step(comm, mesh):
    w = pce.distribute(np.ones(3), mesh, requires_grad=True)
    (pce.distribute(NUMBERS, mesh, data=Shard(0)) * w).sum().backward()
    if comm.rank == 0:
        pce.exp(w)
    text = text_of(pce.SGD([w], lr=0.1).step)
    assert comm.allgather(text) == [here_and_there(comm, "exp", "nothing")] * comm.size


def test_objects_that_print_differently_are_no_difference(comm, mesh):
    x = pce.distribute(NUMBERS, mesh, data=Shard(0))
    unnamed = pce.op(partial(np.add, 1.0), rule=lambda shape, **_: pce.Rule.of("ij->ij", shape))
    assert unnamed(x).sum().item() == NUMBERS.sum() + NUMBERS.size
    scaled = pce.op(lambda x, by: by(x), rule=lambda shape, by: pce.Rule.of("ij->ij", shape), name="scaled")
    assert scaled(x, by=lambda x: 2 * x).sum().item() == 2 * NUMBERS.sum()


@pytest.mark.parametrize(
    ("name", "call", "one", "other"),
    [
        ("clip", lambda x, low: pce.clip(x, low, 7.0), 0.0, 1.0),
        ("clip", lambda x, high: pce.clip(x, max=high), 2, 3),
        ("clip", lambda x, high: pce.clip(x, -3.0, high), np.float32(2), np.float32(3)),
        ("multiply", lambda x, by: x * by, 0.0, -0.0),
        ("add", lambda x, by: x + by, 1.0, float("nan")),
        ("add", lambda x, by: by + x, np.array(1.5), np.array(2.5)),
        ("divide", lambda x, by: x / by, True, 2),
        ("power", lambda x, by: x**by, 2.0, 3.0),
        ("where", lambda x, by: pce.where(x > 2, x, by), 0.0, 0.5),
        ("layer_norm", lambda x, eps: pce.layer_norm(x, eps=eps), 1e-5, 1e-6),
        ("var", lambda x, ddof: pce.var(x, 1, ddof), 0, 1),
        ("sum", lambda x, axis: x.sum(axis=axis), 0, 1),
        ("slice", lambda x, stop: x[:stop], 1, 2),
        ("distribute an array", lambda x, rows: pce.distribute(np.ones(rows), x.mesh, data=Shard(0)), 5, 4),
    ],
    ids=[f"{number}" for number in range(14)],
)
def test_other_number_or_shape_is_noticed(comm, mesh, name, call, one, other):
    x = pce.distribute(NUMBERS, mesh, data=Shard(0))
    text = text_of(lambda: call(x, one if comm.rank == 0 else other).sum().item())
    assert (f"ranks have run different operations: {name} of" in text) == (comm.size > 1)
    assert len(set(comm.allgather(text))) == 1


def test_numbers_that_are_equal_are_no_difference(comm, mesh):
    x = pce.distribute(NUMBERS.astype(np.float32), mesh, data=Shard(0))
    alike = [
        (0.1, np.float32(0.1)),
        (2, 2.0),
        (True, np.float32(1)),
        (np.array(3, np.float32), 3),
        (float("nan"), -np.float32("nan")),
    ]
    for pair in alike:
        y = pce.clip(x * pair[comm.rank % 2], -pair[comm.rank % 2], None)
        assert y.sum().dtype == np.float32
        y.sum().item()
    assert pce.sum(x, axis=0, keepdims=True if comm.rank == 0 else 1).sum().item() == NUMBERS.sum()
    for _ in range(100):  # more than are remembered by name
        total = pce.square(x).sum()
    assert total.item() == (NUMBERS**2).sum()
    # A plan that one rank alone has made before, for an equal number.
    own = Mesh(comm.Split(comm.rank), data=1)
    pce.layer_norm(pce.distribute(NUMBERS, own), eps=-0.0 if comm.rank else 0.0)
    assert pce.layer_norm(pce.distribute(NUMBERS, mesh), eps=0.0).sum().item() == pytest.approx(0)


def test_parameters_of_operation_without_rule_are_compared_too(comm, mesh):
    times = pce.op(lambda x, by: by * x, name="times")
    text = text_of(lambda: times(pce.distribute(NUMBERS, mesh, data=Shard(0)), by=comm.rank).full())
    text = text or text_of(lambda: pce.distribute(NUMBERS, mesh, data=Shard(0)).sum().item())
    assert ("times" in text) == (comm.size > 1)
