"""Placements are plain values, shards are balanced, and a trace tells what was sent."""

import dataclasses
import json

from hypothesis import given, strategies as st
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Replicate, Shard, shard_range
from pce_mpi.comm.tracing import Event, Purpose, cause, phase, record
from pce_mpi.testing import in_step

# Shards


@given(length=st.integers(0, 200), parts=st.integers(1, 60))
def test_shard_ranges_are_consecutive_and_balanced(comm, length, parts):
    with in_step(comm):
        ranges = [shard_range(length, parts, index) for index in range(parts)]
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == length
        lengths = [stop - start for start, stop in ranges]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) - min(lengths) <= 1
        assert lengths == [len(block) for block in np.array_split(np.empty(length), parts)]


def test_shards_of_very_long_axes_are_exact():
    length, parts = 10**18 + 1, 7
    assert shard_range(length, parts, 6)[1] == length
    assert sum(stop - start for start, stop in (shard_range(length, parts, i) for i in range(parts))) == length


@pytest.mark.parametrize(("length", "parts", "index"), [(-1, 2, 0), (5, 0, 0), (5, -1, 0), (5, 2, 2), (5, 2, -1)])
def test_shard_range_out_of_bounds_is_value_error(length, parts, index):
    with pytest.raises(ValueError, match=f"{length}, {parts}, {index}"):
        shard_range(length, parts, index)


# Placements

VALUES = [Shard(0), Shard(1), Shard(-1), Replicate(), Partial("sum"), Partial("avg"), Partial("max"), Partial("min")]


def test_placements_are_compared_by_value():
    for i, one in enumerate(VALUES):
        for j, other in enumerate(VALUES):
            assert (one == other) == (i == j)
    assert len(set(VALUES)) == len(VALUES)
    assert hash(Partial()) == hash(Partial("sum"))
    assert Shard(1) == Shard(axis=1)
    assert Partial() == Partial("sum") == Partial(operator="sum")
    assert Replicate() == Replicate()
    assert Shard(0) != 0
    assert Partial("sum") != "sum"


def test_placement_prints_as_what_makes_it():
    assert [repr(value) for value in VALUES[2:6]] == ["Shard(-1)", "Replicate()", "Partial('sum')", "Partial('avg')"]
    for value in VALUES:
        assert eval(repr(value), {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}) == value
    assert str({"data": Partial("sum"), "classes": Shard(1)}) == "{'data': Partial('sum'), 'classes': Shard(1)}"


def test_placements_are_frozen():
    for value, name in ((Shard(0), "axis"), (Partial(), "operator")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1)


@pytest.mark.parametrize("axis", [1.0, "0", None, True, np.float64(1)])
def test_axis_of_shard_is_integer(axis):
    with pytest.raises(TypeError, match="axis of Shard must be an int"):
        Shard(axis)


@pytest.mark.parametrize("operator", ["mean", "prod", "", None, 0, "SUM"])
def test_partial_value_has_one_of_four_operators(operator):
    with pytest.raises(ValueError, match=r"'sum', 'avg', 'max', 'min'.*got " + repr(operator)):
        Partial(operator)


# Traces


def note(operation="op", collective="all_reduce", purpose=Purpose.PAYLOAD, size=8, over="comm", **placements):
    record(cause(operation, over, "because", **placements), collective, purpose, ranks=3, bytes=size)


def test_traces_nest_and_close_when_their_block_fails():
    note("before")
    with pce.trace() as outer:
        note("1")
        with pytest.raises(KeyError), pce.trace() as inner:
            note("2")
            raise KeyError
        note("3")
    note("after")
    assert [event.operation for event in outer.events] == ["1", "2", "3"]
    assert inner.events == [Event("forward", "2", "all_reduce", Purpose.PAYLOAD, "comm", 3, 8, "because")]


def test_trace_counts_payload_unless_asked_for_agreement():
    with pce.trace() as trace:
        note(size=8)
        note(size=16)
        with phase("step"):
            note("other", size=100)
        note(collective="all_gather", size=1000, over="batch_comm")
        note(collective="all_gather", purpose=Purpose.AGREEMENT, size=64)
    assert trace.count() == 4
    assert trace.bytes() == 1124
    assert trace.count("all_reduce") == 3
    assert trace.bytes("all_reduce") == 124
    assert trace.count("all_reduce", operation="op") == 2
    assert trace.bytes(over="batch_comm") == 1000
    assert trace.bytes(phase="forward") == 1024
    assert trace.count(phase="step") == trace.count(operation="other") == 1
    assert trace.bytes(phase="step") == trace.bytes(operation="other") == 100
    assert trace.count(over="model") == 0
    assert trace.count("all_gather") == 1
    assert trace.count("all_gather", purpose=Purpose.AGREEMENT) == 1
    assert trace.count("all_gather", purpose=None) == 2
    assert trace.bytes(purpose=None) == 1188
    assert trace.count("broadcast") == trace.bytes("broadcast") == 0
    assert trace.select("all_reduce", operation="other") == [trace.events[2]]


def test_events_have_phases_that_nest():
    with pce.trace() as trace:
        note()
        with phase("backward"):
            note()
            with phase("step"):
                note()
            note()
        note()
        with pytest.raises(KeyError), phase("backward"):
            raise KeyError
        note()
    assert [event.phase for event in trace.events] == ["forward", "backward", "step", "backward", "forward", "forward"]
    assert trace.count(phase="backward") == 2


def test_table_shows_placements_where_some_event_has_them():
    with pce.trace() as trace:
        note("loss", size=24)
        for _ in range(2):
            note("sum", before="Partial('sum')", after="Replicate()")
        with phase("backward"):
            note("sum", over="data", purpose=Purpose.AGREEMENT, before="Partial('sum')", after="Shard(0)")
    head, *lines = str(trace).splitlines()
    assert head.split()[-5:] == ["calls", "bytes", "before", "after", "reason"]
    assert [line.split() for line in lines] == [
        ["forward", "loss", "all_reduce", "payload", "comm", "3", "1", "24", "because"],
        ["forward", "sum", "all_reduce", "payload", "comm", "3", "2", "16", "Partial('sum')", "Replicate()", "because"],
        ["backward", "sum", "all_reduce", "agreement", "data", "3", "1", "8", "Partial('sum')", "Shard(0)", "because"],
    ]
    for column in head.split()[1:]:
        assert {line[head.index(column) - 1] for line in lines} == {" "}, column
    assert {line.index("because") for line in lines} == {head.index("reason")}
    assert {line.index("Partial('sum')") for line in lines[1:]} == {head.index("before")}
    assert not any(line != line.rstrip() for line in lines)


def test_empty_trace_prints_its_head():
    with pce.trace() as trace:
        pass
    names = ["phase", "operation", "collective", "purpose", "over", "ranks", "calls", "bytes", "reason"]
    assert [line.split() for line in str(trace).splitlines()] == [names]
    assert json.loads(trace.to_json()) == []


def test_trace_is_json_as_well():
    with pce.trace() as trace:
        note("loss", size=24, before="Shard(0)", after="Replicate()")
        note(purpose=Purpose.AGREEMENT)
    events = json.loads(trace.to_json())
    assert events[0] == {
        "phase": "forward",
        "operation": "loss",
        "collective": "all_reduce",
        "purpose": "payload",
        "over": "comm",
        "ranks": 3,
        "bytes": 24,
        "before": "Shard(0)",
        "after": "Replicate()",
        "reason": "because",
    }
    assert [events[1][name] for name in ("purpose", "before", "after")] == ["agreement", "", ""]
    assert len(events) == 2


def test_trace_has_what_its_rank_sent(comm):
    logits, targets = np.zeros((5, 2 + comm.rank), np.float32), np.zeros(5, int)
    with pce.trace() as trace:
        pce.softmax_cross_entropy(logits, targets, comm=comm)
    mine = [(event.collective, event.ranks, event.bytes) for event in trace.events]
    assert comm.allgather(mine) == [[("all_gather", comm.size, 56), ("all_reduce", comm.size, 5 * 40)]] * comm.size
    assert all(event.operation == "softmax_cross_entropy" and event.phase == "forward" for event in trace.events)
    assert all(event.reason for event in trace.events)


def test_loss_without_communicator_has_an_empty_trace():
    with pce.trace() as trace:
        _, residuals = pce.softmax_cross_entropy_forward(np.zeros((2, 3)), np.array([0, 1]))
        pce.softmax_cross_entropy_backward(1.0, residuals)
    assert trace.events == []
