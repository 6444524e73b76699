"""Gradients of a function at any placement, and a program on one rank against many: what they find, and their words."""

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Rule, Shard
from pce_mpi.testing.gradients import check_gradients
from pce_mpi.testing.placing import alone
from pce_mpi.testing.programs import compare_with_one_process
from ranks.grids import mesh_of, squarest
from ranks.placed import numbers
from ranks.test_testing_assertions import failure_of, words_of

rng = np.random.default_rng(0)
X, W = rng.normal(size=(4, 3)), rng.normal(size=(3, 5))

# ------------------------------------------------------------------------------------------------------------ gradients


def op_with(factor=1.0, rule=None):
    """x * |x|, with a gradient that is right if `factor` is 1."""
    return pce.op(lambda x: x * abs(x), lambda g, y, x: 2 * factor * abs(x) * g, rule, name="signed_square")


def elementwise_rule(x):
    return Rule.of("ab->ab", x)


def test_right_gradients_pass_at_every_placement(comm):
    mesh = mesh_of(comm, comm.size)
    assert check_gradients(op_with(rule=elementwise_rule), X, mesh=mesh) == 4
    assert check_gradients(lambda x, w: pce.tanh(x @ w), X, W, mesh=mesh) == 16
    assert check_gradients(lambda x, y: [pce.exp(x), x * y], X.astype(np.float32), X[0], mesh=mesh) == 4 * 3
    assert check_gradients(lambda x, ids: pce.cross_entropy(x, ids), X, np.array([0, 2, 1, 1]), mesh=mesh) == 4 * 2
    masked = np.where(X > 1, -np.inf, X)
    assert check_gradients(lambda x: pce.logsumexp(x, axis=1), masked, mesh=mesh) == 4


def test_placements_beyond_the_most_are_drawn_alike(comm):
    mesh = mesh_of(comm, *squarest(comm.size))
    assert check_gradients(lambda x, w: x @ w, X, W, mesh=mesh, most_placements=7, most_elements=2) == 7
    text = words_of(comm, check_gradients, lambda x, w: op_with(1.01)(x @ w), X, W, mesh=mesh, most_placements=3)
    assert "wrong at 3 of 3 placements tried, of 256:\n  operand 0: the gradient at (" in text


def test_wrong_gradient_is_told_with_both_numbers(comm):
    mesh = mesh_of(comm, comm.size)
    x = np.array([1.0, 2.0])
    text = words_of(comm, check_gradients, lambda y: pce.sum(op_with(1.5)(y)), x, mesh=mesh)
    who = f"ranks {', '.join(map(str, range(comm.size)))}" if comm.size > 1 else "rank 0"
    assert text.startswith(f"{who} along data: wrong at 3 of 3 placements:\n  operand 0: the gradient at (0,) is ")
    got, quotient = (float(part.split()[0]) for part in text.split(" is ")[1].split(", by finite differences "))
    assert got == pytest.approx(1.5 * quotient)
    assert "\n    with operand 0 data: Shard(0)\n" in text


def test_dot_test_covers_elements_not_drawn():
    def wrong_at_end(x):
        return pce.op(lambda x: x**3, lambda g, y, x: 3 * g * x.local**2 * np.r_[np.ones(99), 2.0], name="cube")(x)

    text = words_of(mesh_of_self(), check_gradients, wrong_at_end, np.full(100, 0.5), most_elements=1)
    assert "operand 0: <J^T v, u> is " in text


def mesh_of_self():
    return alone("data").comm("data")


@pytest.mark.parametrize("kind", ["small results", "large operands", "a large result beside"])
def test_gradients_below_the_tolerance_are_no_proof(kind):
    def half_of_gradient(x):
        y = op_with(0.5)(x)
        return {"small results": 1e-9 * y, "large operands": y, "a large result beside": [y, 1e9 + 0 * x]}[kind]

    x = np.array([0.5, 2.0]) * (1e9 if kind == "large operands" else 1.0)
    text = words_of(mesh_of_self(), check_gradients, half_of_gradient, x)
    assert "has seen nothing but 0 of operand 0: its largest derivative is " in text


def test_gradients_of_constants_are_right():
    for constant in (
        lambda x: 0 * x,
        lambda x: pce.softmax(x).sum(axis=-1),
        lambda x: 1e-9 * pce.softmax(x).sum(axis=-1),
    ):
        assert check_gradients(constant, X) == 4


@pytest.mark.ranks(2, 3)  # where there are shards and terms
def test_wrong_rule_is_found_where_it_is_wrong(comm):
    mesh = mesh_of(comm, comm.size)

    def linear_rule(x):
        return Rule.of("ab->ab", x, linear=[[0]])

    text = words_of(comm, check_gradients, op_with(rule=linear_rule), X, mesh=mesh)
    assert "wrong at 1 of 4 placements:\n  result 0 at (0, 0) is " in text
    assert text.count("with operand 0 data: Partial('sum')") == 1


def test_wrong_arguments_of_gradients_raise_everywhere(comm):
    mesh = mesh_of(comm, comm.size)
    for arguments, options, kind in [
        ((None, X), {}, TypeError),
        ((pce.exp, np.arange(3)), {}, TypeError),
        ((pce.exp, "x"), {}, TypeError),
        ((lambda x: x.local, X), {}, TypeError),
        ((lambda x: [], X), {}, TypeError),
        ((pce.exp, X), {"rtol": -1.0}, ValueError),
        ((pce.exp, X), {"most_elements": 0}, ValueError),
        ((pce.exp, X), {"most_placements": 1.5}, TypeError),
    ]:
        assert failure_of(comm, check_gradients, *arguments, mesh=mesh, **options)[0] == kind.__name__
    if comm.size > 1:
        found = failure_of(comm, check_gradients, pce.exp, X if comm.rank else X[:1], mesh=mesh)
        assert found[0] == "CollectiveError"


def test_error_at_a_placement_names_that(comm):
    def whole_alone(x):
        if x.placements["data"] == Shard(1):
            raise ValueError("no columns")
        return pce.exp(x)

    with pytest.raises(ValueError, match="no columns") as caught:
        check_gradients(whole_alone, X, mesh=mesh_of(comm, comm.size))
    assert caught.value.__notes__ == ["in check_gradients, with operand 0 data: Shard(1)"]


# ------------------------------------------------------------------------------------------------------------- programs


def program(mesh, double=lambda y: 2 * y, step=True):
    x = pce.distribute(numbers(6, 4), mesh, data=Shard(0))
    w = pce.distribute(numbers(4, 5), mesh, data=Shard(1), requires_grad=True)
    with pce.named_scope("layer"):
        y = double(x @ w)
    loss = (y * y).mean()
    loss.backward()
    if step:
        pce.SGD([w], lr=2.0**-10).step()
    return {"loss": loss.item(), "w": w, "grad": [w.grad]}


def test_program_on_many_ranks_is_that_of_one(comm):
    compare_with_one_process(program, comm)
    with pce.reproducible():
        compare_with_one_process(program, mesh_of(comm, comm.size), bits=True)
    compare_with_one_process(lambda mesh: pce.layer_norm(pce.normal((3, 8), mesh, seed=0, data=Shard(1))), comm)


@pytest.mark.ranks(2, 3)
def test_first_operation_that_differs_is_named(comm):
    def doubled_wrongly(y):
        local = y.local.copy()
        if y.mesh.size > 1 and y.mesh.rank == 1:
            local[0, 3] += 0.125
        return pce.op(lambda x: 2 * local, lambda g, y, x: 2 * g, elementwise_rule, name="double")(y)

    text = words_of(comm, compare_with_one_process, lambda mesh: program(mesh, doubled_wrongly), comm)
    whole, (start, stop) = 2 * numbers(6, 4) @ numbers(4, 5), pce.shard_range(6, comm.size, 1)
    right = whole[start, 3]
    assert text.startswith("rank 1 along data: operation 2 of ")
    assert ", double at test_testing_programs.py:" in text
    assert text.endswith(
        f", in layer, is more than 64 ulp of float64 off: 1 of {5 * (stop - start)} elements\n"
        f"  at ({start}, 3): {right + 0.25}, on one rank {right}, {0.25 / np.spacing(whole.max()):.3g} ulp"
    )
    with pce.reproducible():
        text = words_of(comm, compare_with_one_process, lambda mesh: program(mesh, doubled_wrongly), comm, bits=True)
    assert "has other bits than on one rank: 1 of " in text


@pytest.mark.ranks(2)
def test_backward_and_returned_values_are_compared(comm, monkeypatch):
    one = alone("data")

    def with_gradient(mesh):
        def vjp(g, y, x):
            return g * (1.0 if mesh is one else 1.5)

        x = pce.distribute(numbers(4, 4), mesh, data=Shard(0), requires_grad=True)
        pce.op(np.negative, vjp, elementwise_rule, name="minus")(x).sum().backward()

    text = words_of(comm, compare_with_one_process, with_gradient, mesh_of(comm, 2))
    assert ", multiply at test_testing_programs.py:" in text
    assert ", backward, is more than 64 ulp of float64 off: 8 of 8 elements\n  at (" in text
    for returned, words in [
        (
            lambda mesh: [1, {"n": mesh.size}],
            "the returned value[1]['n'] differs: 1 of 1 elements\n  at (): 2, on one rank 1",
        ),
        (lambda mesh: np.zeros(mesh.size), "the returned value is float64 (2,), on one rank float64 (1,)"),
        (
            lambda mesh: [0] * mesh.size,
            "the returned value differs: 1 of 1 elements\n  at (): list of 2, on one rank list of 1",
        ),
        (
            lambda mesh: {"a": 1.0} if mesh is one else {"b": 1.0},
            "the returned value['b'] is missing on one rank, which has the returned value['a']",
        ),
    ]:
        assert words_of(comm, compare_with_one_process, returned, comm) == f"ranks 0, 1 along data: {words}"


def test_programs_going_other_ways_are_compared_so_far(comm):
    def other_way(mesh):
        x = pce.distribute(numbers(4), mesh)
        if mesh.size > 1:
            return 2.0 * x
        return x + wrong * x

    wrong = 1.0
    compare_with_one_process(other_way, comm)
    wrong = 1.5
    if comm.size > 1:
        text = words_of(comm, compare_with_one_process, other_way, comm)
        assert "along data: the returned value is more than 64 ulp of float64 off: 4 of 4 elements" in text


def test_errors_of_programs_and_arguments_raise_everywhere(comm):
    def fails_on_last(mesh):
        if mesh.size == comm.size and mesh.rank == mesh.size - 1:
            raise ValueError("only here")
        return pce.distribute(numbers(4), mesh, data=Shard(0)).full()

    kind, text = failure_text(comm, compare_with_one_process, fails_on_last, mesh_of(comm, comm.size))
    assert (kind, text.removesuffix(f" (rank {comm.size - 1} along data)")) == ("ValueError", "only here")
    for arguments, options, kind in [
        ((program, 3), {}, "TypeError"),
        ((None, comm), {}, "TypeError"),
        ((program, comm), {"most": -1}, "ValueError"),
        ((program, comm), {"bits": "no"}, "TypeError"),
        ((program, pce.Mesh.without_ranks(data=2)), {}, "TypeError"),
    ]:
        assert failure_of(comm, compare_with_one_process, *arguments, **options)[0] == kind


def failure_text(comm, call, *arguments):
    """The type and the text of the error here, where the text names the rank on others alone."""
    with pytest.raises(Exception) as caught:
        call(*arguments)
    return type(caught.value).__name__, str(caught.value)
