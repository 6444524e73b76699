"""Operations on shards, replicas and terms: results and gradients are those of one process at any placements.

For the whole table, all placements of any two operands along one dim, and along two dims those that Hypothesis draws.
Blocks are uneven and empty, and there are more ranks than elements. `grids.assembled` puts together what all ranks
hold, and refuses replicas that differ by a bit.
"""

from dataclasses import dataclass, replace
import importlib
from itertools import product

from hypothesis import given, settings, strategies as st
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Shard, check_replicas
from pce_mpi.ops.shape import reduction_rule
from pce_mpi.testing import in_step
from ranks.grids import assembled, factorizations, mesh_of, placements_of, spread
from ranks.op_cases import CASES, OPS, Outcome, cases_of, error_of, evaluate, one_process
from ulps import SHARDED

SUM = Partial("sum")

# ------------------------------------------------------------------------------------------- what must hold of a run


@dataclass(frozen=True)
class Run:
    """One line of the table with operands placed in one way, and what came of it on this rank."""

    case: object
    shardings: list
    dtype: object
    outcome: Outcome

    def __str__(self):
        return f"{self.case.name}, {np.dtype(self.dtype)}: {' and '.join(map(str, self.shardings))}"


def run(case, mesh, shardings, dtype=np.float64, **more):
    try:
        return Run(case, shardings, dtype, evaluate(case, mesh, shardings, dtype=dtype, **more))
    except Exception as error:
        error.add_note(f"in {case.name}: {' and '.join(map(str, shardings))}")
        raise


def misplaced(leaf, gradient):
    """The reason why a gradient may not be placed as it is; None if it may."""
    for dim, placed in leaf.sharding.natural.by_dim.items():
        if gradient.sharding.by_dim[dim] not in (placed, SUM):
            return f"the gradient of {leaf.sharding} is {gradient.sharding}"
    for axis in range(leaf.ndim):
        if gradient.sharding.dims_of(axis) == leaf.sharding.dims_of(axis):
            if gradient.sharding.splits[axis] != leaf.sharding.splits[axis]:
                return f"the gradient of {leaf.sharding} has other blocks: {gradient.sharding}"
    return None


def faults_here(done):
    """Yield the faults that this rank sees by itself."""
    for index in done.outcome.changed:
        yield f"operand {index} was written to"
    for index, (x, gradient) in enumerate(zip(done.outcome.operands, done.outcome.gradients, strict=True)):
        if (gradient is not None) != x.requires_grad:
            yield f"operand {index} has {'no' if gradient is None else 'a'} gradient"
        elif gradient is not None and (why := misplaced(x, gradient)):
            yield why


def said_of(array):
    """Return the properties that ranks must agree on."""
    return str(array.sharding), array.shape, array.dtype.name


def faults_together(done, held):
    """Yield the faults of all ranks' arrays: `held` has by rank and array what `said_of` returns and what is local."""
    results, gradients = one_process(done.case)
    asked = [each for each, found in zip(gradients, done.outcome.gradients, strict=True) if found is not None]
    names = [f"result {index}" for index in range(len(results))]
    names += [f"gradient {index}" for index, found in enumerate(done.outcome.gradients) if found is not None]
    dtypes = [done.case.dtype or done.dtype] * len(results) + [done.dtype] * len(asked)
    for index, (array, expected, dtype) in enumerate(zip(done.outcome.arrays, [*results, *asked], dtypes, strict=True)):
        said = {rank[index][0] for rank in held}
        if said != {said_of(array)}:
            yield f"ranks disagree on {names[index]}: {sorted(said)}"
            continue
        if array.dtype != dtype:
            yield f"{names[index]} is {array.dtype}"
        try:
            whole = assembled(array.sharding, [rank[index][1] for rank in held])
            error = error_of(done.case, whole, expected, done.dtype)
        except AssertionError as wrong:
            yield f"{names[index]}, {array.sharding}: {wrong}"
            continue
        if not error <= SHARDED:
            yield f"{names[index]}, {array.sharding}, is {error:.3g} ulp off"


def faults_of(comm, runs):
    """Return the faults of `runs`, as text; collective. Each rank looks at some of them."""
    to_send = [[] for _ in range(comm.size)]
    for number, done in enumerate(runs):
        to_send[number % comm.size].append([(said_of(array), array.local) for array in done.outcome.arrays])
    received = comm.alltoall(to_send)
    faults = [f"{done}: {fault}" for done in runs for fault in faults_here(done)]
    for number, done in enumerate(runs[comm.rank :: comm.size]):
        faults += [f"{done}: {fault}" for fault in faults_together(done, [ranks[number] for ranks in received])]
    return faults


# ------------------------------------------------------------------------------------- every combination of placements

# The more operands, the fewer kinds of terms: most operations reduce them all first, whatever they are.
OPERATORS = {1: ["sum", "avg", "max", "min"], 2: ["sum", "avg"], 3: ["sum"], 4: []}


def placements_for(case, index):
    operand, operands = case.operands[index], len(case.operands)
    if case.has_gradient[index]:
        return placements_of(operand.ndim, *OPERATORS[operands])
    operators = {"b": ["max", "min"], "i": ["sum", "max"]}.get(operand.dtype.kind, ["sum", "avg"])
    return placements_of(operand.ndim, *(operators if operands < 3 else []))


def combinations_of(case, mesh):
    """Shardings of the operands: any two placements of any two of them meet, and all may be placed alike.

    Shards of a single operand are balanced blocks, and then uneven ones; those of several are so by turns.
    """
    ways = [placements_for(case, index) for index in range(len(case.operands))]
    fewest = min(map(len, ways))
    for number, combination in enumerate(product(*map(enumerate, ways))):
        indices, placements = zip(*combination, strict=True)
        if len(ways) > 2 and len(set(indices)) > 1 and sum(indices) % fewest:
            continue
        single_shard = len(ways) == 1 and isinstance(placements[0], Shard)
        for uneven in (False, True) if single_shard else [sum(indices[:2]) % 2 == 1]:
            yield (
                number,
                [
                    spread(mesh.dim_sizes, x.shape, placed, seed=[number, index] if uneven else None)
                    for index, (x, placed) in enumerate(zip(case.operands, placements, strict=True))
                ],
            )


def runs_of(comm, cases):
    mesh = mesh_of(comm, comm.size)
    return [run(case, mesh, each, seed=number) for case in cases for number, each in combinations_of(case, mesh)]


@pytest.mark.ranks(3)  # shards of several lengths; two dims are another test
@pytest.mark.parametrize("op", OPS)
def test_op_at_any_placements_equals_one_process(comm, op):
    faults = faults_of(comm, runs_of(comm, cases_of(op)))
    assert not faults, "\n".join(faults[:10])


# ----------------------------------------------------------------------------------------------------------- two dims

# Those that may meet in one array.
FAMILIES = [["sum", "avg"], ["max"], ["min"]]


@st.composite
def shardings_over(draw, shape, dtype, dims):
    """A sharding over two dims, which may split one axis together, in blocks of any lengths."""
    families = {"b": [["max"], ["min"]], "i": [["sum"], ["max"]]}.get(dtype.kind, FAMILIES)
    ways = placements_of(len(shape), *draw(st.sampled_from(families)))
    placements = [draw(st.sampled_from(ways)) for _ in dims]
    return spread(dims, shape, *placements, seed=draw(st.none() | st.tuples(st.integers(0, 9))))


@pytest.mark.ranks(2, 4)  # a dim of one rank, and none of one
@given(data=st.data(), case=st.sampled_from(CASES), dtype=st.sampled_from([np.float64, np.float32]))
@settings(max_examples=250 if MPI.COMM_WORLD.size > 3 else 80)
def test_op_over_two_dims_equals_one_process(comm, data, case, dtype):
    mesh = mesh_of(comm, *data.draw(st.sampled_from(list(factorizations(comm.size, 2)))))
    shardings = [data.draw(shardings_over(x.shape, x.dtype, mesh.dim_sizes)) for x in case.operands]
    required = [has and data.draw(st.integers(0, 3)) > 0 for has in case.has_gradient]
    with in_step(comm):
        done = run(case, mesh, shardings, dtype, required=required, agreed=True)
        for array in done.outcome.arrays:
            check_replicas(array)
        faults = faults_of(comm, [done])
        assert not faults, "\n".join(faults)


# ------------------------------------------------------------------------------- what parameters are told, and when


PARAMETERS = {
    "x @ w.T": ((3, 4), lambda x, w: x @ w.T),
    "x @ w of one axis": ((4,), lambda x, w: x @ w),
    "x @ w in another shape": ((2, 2, 3), lambda x, w: x @ w.reshape(4, 3)),
    "x @ w in another dtype": ((4, 3), lambda x, w: x @ w.astype(np.float32)),
    "layer_norm along the middle axis": ((3,), lambda x, w: pce.layer_norm(x, w, w, axis=1)),
    "rms_norm along the last axis": ((4,), pce.rms_norm),
}


@pytest.mark.parametrize("shape, call", PARAMETERS.values(), ids=PARAMETERS)
def test_reshaped_parameter_has_partial_gradient_silently(line, shape, call):
    x = pce.distribute(np.ones((5, 3, 4)), line, data=Shard(0))
    w = pce.distribute(np.ones(shape), line, requires_grad=True)
    with pce.trace() as trace:
        for _ in range(2):  # micro-batches
            pce.sum(call(x, w)).backward()
    assert w.grad.placements == {"data": SUM}
    assert trace.count() == 0


def test_axis_of_one_element_is_not_newly_sharded():
    mesh, shapes = {"data": 4}, [(1, 8), (8, 3)]
    inferred = pce.infer_placements("matmul", shapes, [{"data": Shard(1)}, {}], mesh=mesh)
    assert inferred.operands[0]["data"] != Shard(0)
    inferred = pce.infer_placements("matmul", shapes, [{"data": Shard(0)}, {}], mesh=mesh)
    assert inferred.operands[0]["data"] == Shard(0)  # it may stay there


# ------------------------------------------------------------------------------------------------- wrong rules, planted


def contraction_called_replicate(matmul):
    return replace(matmul, rule=lambda a, b: replace(matmul.rule(a, b), reduces=None, merged=frozenset({"k"})))


def logsumexp_called_a_sum(logsumexp):
    return replace(logsumexp, rule=lambda shape, axes, keepdims: reduction_rule(shape, axes, keepdims, linear=False))


@pytest.mark.ranks(1, 3)  # a fault shows at any size above 1
@pytest.mark.parametrize(
    ("room", "name", "plant", "op"),
    [
        ("products", "_MATMUL", contraction_called_replicate, "matmul"),
        ("reductions", "_LOGSUMEXP", logsumexp_called_a_sum, "logsumexp"),
    ],
)
def test_wrong_rule_is_caught_wherever_there_are_shards(comm, monkeypatch, room, name, plant, op):
    module = importlib.import_module(f"pce_mpi.ops.{room}")
    monkeypatch.setattr(module, name, plant(getattr(module, name)))
    faults = faults_of(comm, runs_of(comm, cases_of(op)[:3]))
    assert any(comm.allgather(bool(faults))) == (comm.size > 1)
