"""A trace with fingerprints lists the results of operations: the same list on any mesh, up to the first fault."""

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Replicate, Rule, Shard
from ranks.grids import factorizations, mesh_of
from ranks.op_cases import CASES, alone, evaluate, replicated
from ranks.placed import error_of, numbers

X, W = numbers(5, 4), numbers(4, 6)


def program(mesh, x_placements=None, w_placements=None, *, double=lambda y: 2 * y):
    """Whole numbers, whose sums are exact in any order."""
    x = pce.distribute(X, mesh, **(x_placements or {}))
    w = pce.distribute(W, mesh, **(w_placements or {}), requires_grad=True)
    with pce.named_scope("layer 0"):
        y = (x @ w).redistribute(data=Replicate())
        with pce.named_scope("double"):
            y = double(y)
    (y * y).sum().backward()
    return w


def results_of(*arguments, **options):
    with pce.trace(fingerprints=True) as trace:
        program(*arguments, **options)
    return trace.results


def test_results_have_names_scopes_and_fingerprints(comm):
    mesh = mesh_of(comm, comm.size)
    found = results_of(mesh, {"data": Shard(1)}, {"data": Shard(0)})
    y = 2 * (X @ W)
    upstream = 2 * y
    expected = [
        ("forward", "matmul", X @ W, "layer 0"),
        ("forward", "multiply", y, "layer 0/double"),
        ("forward", "multiply", y * y, ""),
        ("forward", "sum", (y * y).sum(), ""),
        ("backward", "reshape", np.ones((1, 1)), ""),
        ("backward", "broadcast_to", np.ones_like(y), ""),
        ("backward", "multiply", y, ""),
        ("backward", "multiply", y, ""),
        ("backward", "add", upstream, ""),
        ("backward", "multiply", 2 * upstream, "layer 0/double"),
        ("backward", "matmul", X.T @ (2 * upstream), "layer 0"),
        ("backward", "gradient", X.T @ (2 * upstream), "layer 0"),
    ]
    assert [(each.phase, each.operation, each.scope) for each in found] == [(p, o, s) for p, o, _, s in expected]
    for each, (*_, array, _) in zip(found, expected, strict=True):
        assert (each.dtype, each.shape) == ("float64", np.shape(array))
        assert each.fingerprint == pce.fingerprint(pce.distribute(array, mesh))


def test_results_are_equal_on_any_mesh(comm):
    expected = results_of(alone())
    for sizes in factorizations(comm.size, 2):
        mesh = mesh_of(comm, *sizes)
        placed = [{}, {"data": Shard(0)}, {"data": Shard(1), "model": Shard(0)}, {"model": Shard(1)}]
        for of_x in placed:
            for of_w in placed:
                assert results_of(mesh, of_x, of_w) == expected


@pytest.mark.ranks(3)  # any split shows an operation that is made of others there
def test_operations_are_the_same_where_operands_are_sharded(comm):
    mesh = mesh_of(comm, comm.size)
    for case in {case.op: case for case in CASES}.values():
        listed = []
        for ranks, placed in (alone(), {}), (mesh, {"data": Shard(0)}):
            shardings = [each.with_placements(placed if each.shape else {}) for each in replicated(case, ranks)]
            with pce.trace(fingerprints=True) as trace:
                evaluate(case, ranks, shardings)
            listed.append([(each.phase, each.operation, each.dtype, each.shape) for each in trace.results])
        assert listed[0] == listed[1] != [], case.name


def test_wrong_element_changes_results_from_there(comm):
    def operation(wrong):
        def double(y):
            y = 2 * y
            y[:1, :1] += wrong
            return y

        return pce.op(double, lambda g, y, x: 2 * g, lambda shape: Rule.of("ij->ij", shape), name="multiply")

    right, wrong = operation(False), operation(comm.rank == min(comm.size, len(X)) - 1)  # the last that has a row
    mesh, expected = mesh_of(comm, comm.size), results_of(alone())
    found, off = (
        results_of(mesh, double=lambda y, double=double: double(y.redistribute(data=Shard(0))))
        for double in (right, wrong)
    )
    assert found == expected
    # The backward pass begins with ones, made in two steps.
    same = [one == other for one, other in zip(off, expected, strict=True)]
    assert same == [True, False, False, False, True, True, *[False] * 6]


@pytest.mark.ranks(2, 3, 4)
def test_replicas_that_differ_raise_on_every_rank(comm):
    mesh = mesh_of(comm, comm.size)
    off = pce.op(lambda y: y + (comm.rank == comm.size - 1), rule=lambda shape: Rule.of("ij->ij", shape), name="off")
    x = pce.distribute(X, mesh)
    with pce.trace():
        off(x)  # nobody looks
    with pce.trace(fingerprints=True) as trace, pytest.raises(ValueError, match="replicas differ") as caught:
        off(x)
    assert f"(rank {comm.size - 1})" in str(caught.value)
    assert caught.value.__notes__ == ["in the fingerprint of the result of off, forward"]
    assert trace.results == []


def test_results_have_scopes_of_open_traces(comm):
    x = pce.distribute(X, mesh_of(comm, comm.size), data=Shard(1))
    with pce.trace(fingerprints=True) as outer:
        with pytest.raises(KeyError), pce.named_scope("outer"), pce.trace(fingerprints=True) as inner:
            with pce.named_scope("inner"):
                pce.exp(x)
                raise KeyError
        found = pce.top_k(x, 2)
    pce.sin(x)
    assert [(each.operation, each.scope) for each in inner.results] == [("exp", "outer/inner")]
    assert [(each.operation, each.scope) for each in outer.results[1:]] == [("top_k", "")] * 2
    assert [each.fingerprint for each in outer.results[1:]] == [pce.fingerprint(each) for each in found]
    first = inner.results[0]
    assert str(first) == f"forward  exp float64 (5, 4) {first.fingerprint[:16]} outer/inner"


def test_fingerprints_are_not_events(comm):
    mesh = mesh_of(comm, comm.size)
    with pce.trace() as expected:
        program(mesh, {"data": Shard(1)}, {"data": Shard(0)})
    with pce.trace() as outer, pce.trace(fingerprints=True) as inner:
        program(mesh, {"data": Shard(1)}, {"data": Shard(0)})
    assert outer.events == inner.events == expected.events != []
    assert len(inner.results) == 12
    assert outer.results == expected.results == []


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("tracing", ["first", "last"])
def test_only_some_ranks_fingerprint_raises_everywhere(comm, impatient, tracing):
    mesh = mesh_of(comm, comm.size)
    x = pce.distribute(X, mesh, data=Shard(0))
    here = comm.rank == {"first": 0, "last": comm.size - 1}[tracing]

    def run():
        with pce.trace(fingerprints=here):
            pce.exp(x).sum().item()

    kind, text = error_of(run)
    assert kind == "CollectiveError" and "fingerprint" in text
    assert set(comm.allgather(text)) == {text}


def test_backward_leaves_scope_as_it_was(comm):
    w = pce.distribute(W, mesh_of(comm, comm.size), requires_grad=True)
    with pce.trace(fingerprints=True) as trace:
        with pce.named_scope("made"):
            loss = pce.square(w).sum()
        with pce.named_scope("other"):
            loss.backward()
            pce.exp(w)
    backward = [each for each in trace.results if each.phase == "backward"]
    assert {each.scope for each in backward} == {"made"} and len(backward) >= 3
    assert trace.results[-1].scope == "other"
