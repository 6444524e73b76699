"""The user's own operations, and NumPy's functions: with a rule they run where the data is, without one everywhere."""

from collections.abc import Callable
import gc
from typing import Any
import warnings
import weakref

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Rule, Shard
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import Placement
from pce_mpi.ops import custom
from ranks.grids import factorizations, local_of, mesh_of, spread
from ranks.placed import AVG, MAX, ROUNDING, SUM, R, at, check, traced, whole_of

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.filterwarnings("ignore:numpy.* has no placement rule")]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers from 1 to 5, of which sums are exact, and a diagonal that makes matrices regular."""
    whole = np.random.default_rng([seed, *shape]).integers(1, 6, shape).astype(np.float64)
    return whole + 10 * np.eye(*shape) if len(shape) == 2 else whole


# ------------------------------------------------------------------------------------------------------- without a rule


def test_operation_without_rule_runs_on_whole_operands(comm):
    inverse = pce.op(np.linalg.inv)
    a = numbers(5, 5)
    for mesh in [mesh_of(comm, *sizes) for sizes in factorizations(comm.size, 2)]:
        for placed, due in [
            ((Shard(0), R), ["all_gather"]),
            ((R, SUM), ["all_reduce"]),
            ((R, R), []),
            ((Shard(1), MAX), ["all_reduce", "all_gather"]),
        ]:
            result, trace = traced(inverse, at(mesh, a, *placed))
            check(result, np.linalg.inv(a), R, R)
            assert [event.collective for event in trace.select()] == due
            assert {(event.operation, event.reason) for event in trace.select()} <= {
                ("inv", "no rule for inv: operand 0 is replicated")
            }


def test_operation_without_rule_has_the_global_gradient(line):
    a, weights = numbers(5, 5), numbers(5, 5, seed=1)
    inverse = pce.op(np.linalg.inv, lambda g, y, x: -(y.T @ g @ y.T))
    y = np.linalg.inv(a)
    for placed in (Shard(0), Shard(1), R, SUM, AVG, MAX):
        x = at(line, a, placed, requires_grad=True, splits=[1])
        (inverse(x) * weights).sum().backward()
        check(x.grad, -(y.T @ weights @ y.T), placed if isinstance(placed, Shard) else R)


def test_operation_without_vjp_has_no_gradient(line):
    x = at(line, numbers(4, 4), Shard(0), requires_grad=True)
    for operation, name in [(pce.op(np.linalg.inv), "inv"), (pce.op(np.exp, name="my exp"), "my exp")]:
        y = operation(x)
        assert y.requires_grad
        with pytest.raises(NotImplementedError, match=rf"^{name} has no vjp: its result has no gradient"):
            y.sum().backward()
    with pytest.raises(NotImplementedError, match=r"numpy\.sort has no vjp"):
        np.sort(x).sum().backward()
    assert x.grad is None


def test_operation_without_vjp_works_for_constants(line):
    x, constant = at(line, numbers(4, 4), R, requires_grad=True), at(line, numbers(4, 4), Shard(0))
    inverse = pce.op(np.linalg.inv)
    assert not inverse(constant).requires_grad
    with pce.no_grad():
        assert not inverse(x).requires_grad
    (x * inverse(constant)).sum().backward()
    check(x.grad, np.linalg.inv(numbers(4, 4)), R)


def test_each_operand_may_have_vjp_or_none(line):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    ldexp = pce.op(lambda x, y: x * y**2, [lambda g, z, x, y: g * y * y, None], name="x y²")
    x, y = at(line, a, Shard(0), requires_grad=True), at(line, b, Shard(0), requires_grad=True)
    ldexp(x, y.detach()).sum().backward()
    check(x.grad, b * b, Shard(0))
    with pytest.raises(NotImplementedError, match=r"^x y² has no vjp for operand 1"):
        ldexp(x, y).sum().backward()
    with pytest.raises(NotImplementedError, match=r"^short has no vjp for operand 1"):
        pce.op(np.hypot, [lambda g, z, x, y: g], name="short")(x, y).sum().backward()


def test_parameters_reach_forward_vjp_and_rule_by_name(line):
    seen = []

    def rule(shape: tuple[int, ...], *, times: float, where: list[int]) -> Rule:
        seen.append(("rule", times, tuple(where)))
        return Rule.of("ab->ab", shape, linear=[[0]])

    def vjp(g: DistArray, y: DistArray, x: DistArray, *, times: float, where: list[int]) -> DistArray:
        seen.append(("vjp", times, tuple(where)))
        return g * times

    scaled = pce.op(lambda x, times, where: x * times, vjp, rule)
    x = at(line, numbers(3, 2), Shard(0), requires_grad=True)
    result = scaled(x, times=3.0, where=[1, 2])  # a list, which cannot be hashed
    check(result, 3 * numbers(3, 2), Shard(0))
    result.sum().backward()
    check(x.grad, np.full((3, 2), 3.0), Shard(0))
    assert set(seen) == {("rule", 3.0, (1, 2)), ("vjp", 3.0, (1, 2))}


def test_operation_has_name_and_docstring_of_its_function():
    def twice(x: Any) -> Any:
        """Two of them."""
        return x + x

    assert pce.op(twice).__name__ == "twice"
    assert pce.op(twice).__doc__ == "Two of them."
    assert pce.op(twice, name="double").__name__ == "double"


def test_plain_arrays_and_numbers_are_operands_too(line):
    a, b = numbers(3, 2), numbers(3, 2, seed=1)
    for operands in [(at(line, a, Shard(0)), b), (a, at(line, b, SUM)), (a.tolist(), at(line, b, R))]:
        check(pce.op(np.hypot)(*operands), np.hypot(a, b), R)
    check(pce.op(np.hypot)(at(line, a, SUM), 2), np.hypot(a, 2), R)


def test_operation_may_give_several_results(line):
    a = numbers(5, 3)
    parts = pce.op(lambda x: (x.min(axis=0), x.sum(), x > 2))(at(line, a, Shard(0), requires_grad=True))
    assert isinstance(parts, tuple)
    for part, expected in zip(parts, (a.min(axis=0), a.sum(), a > 2), strict=True):
        np.testing.assert_array_equal(whole_of(part), expected)
    assert [part.requires_grad for part in parts] == [True, True, False]


def test_whole_numbers_beside_result_need_no_vjp(line):
    doubled = pce.op(lambda x: (x > 2, x * 2), lambda g, y, x: g * 2 + 0 * y)
    x = at(line, numbers(5, 3), Shard(0), requires_grad=True)
    large, y = doubled(x)
    assert (large.requires_grad, y.requires_grad) == (False, True)
    pce.where(large, y, 0.0).sum().backward()
    np.testing.assert_array_equal(whole_of(x.grad), 2 * (numbers(5, 3) > 2))


def test_vjp_takes_gradients_of_several_results(line):
    def parts(x):
        return x * 2, x > 0, x.sum(axis=0), x * 5

    def vjp(g, y, x):
        assert [each.shape for each in g] == [each.shape for each in y] == [(4, 3), (3,), (4, 3)]
        return g[0] * 2 + g[1] + g[2] * 5

    x = at(line, numbers(4, 3), Shard(0), requires_grad=True)
    twice, _, total, _ = pce.op(parts, vjp)(x)
    (twice.sum() + (total * 3).sum()).backward()
    np.testing.assert_array_equal(whole_of(x.grad), np.full((4, 3), 2 + 3))


@pytest.mark.parametrize("nothing", [None, "text", {"a": 1}, ...], ids=str)
def test_operand_that_is_no_array_is_refused(line, nothing):
    with pytest.raises(TypeError, match=r"^empty must give an array of bool, integers, float16, .* byte order, got"):
        pce.op(lambda x: nothing, name="empty")(at(line, numbers(2, 2), R))


def test_numbers_are_arrays(line):
    for number in (3, 2.5, True, np.float32(2)):
        check(pce.op(lambda x, number=number: number)(at(line, numbers(2, 2), Shard(0))), number, R)


def test_vjp_of_wrong_shape_is_refused(line):
    x = at(line, numbers(3, 2), Shard(0), requires_grad=True)
    flat = pce.op(lambda x: x * 1, lambda g, y, x: g.reshape(-1), name="flat")
    with pytest.raises(ValueError, match=r"the vjp of flat for operand 0 gave shape \(6,\), the operand has \(3, 2\)"):
        flat(x).sum().backward()


def test_vjp_may_give_plain_array_and_any_dtype(line):
    whole = numbers(3, 2).astype(np.float32)
    for slope in (np.full((3, 2), 7.0), np.full((3, 2), 7, np.int32)):
        x = at(line, whole, Shard(0), requires_grad=True)
        pce.op(lambda x: x * 1, lambda g, y, x, slope=slope: slope)(x).sum().backward()
        check(x.grad, np.full((3, 2), 7.0), Shard(0))
        assert x.grad.dtype == np.float32


# ---------------------------------------------------------------------------------------------------------- with a rule


def linear_layer() -> Callable[..., Any]:
    """x @ w, from scratch."""
    letters: dict[str, Any] = {"linear": [[0], [1]], "reduces": "sum"}
    return pce.op(
        lambda x, w: x @ w,
        [lambda g, y, x, w: g @ w.T, lambda g, y, x, w: x.T @ g],
        lambda x, w: Rule.of("bk,km->bm", x, w, **letters),
        name="my product",
    )


def test_operation_with_rule_runs_where_data_is(comm):
    product = linear_layer()
    a, b, weights = numbers(7, 4), numbers(4, 5), numbers(7, 5, seed=1)
    for mesh in [mesh_of(comm, *sizes) for sizes in factorizations(comm.size, 2)]:
        for x_lies, w_lies, result_lies, w_grad_lies in [
            ((Shard(0), R), (R, Shard(1)), (Shard(0), Shard(1)), (SUM, Shard(1))),
            ((Shard(0), Shard(1)), (R, Shard(0)), (Shard(0), SUM), (SUM, Shard(0))),
            ((R, R), (R, R), (R, R), (R, R)),
            ((SUM, R), (R, Shard(1)), (SUM, Shard(1)), (SUM, Shard(1))),
        ]:
            x, w = at(mesh, a, *x_lies), at(mesh, b, *w_lies, requires_grad=True)
            result, forward = traced(product, x, w)
            check(result, a @ b, *result_lies)
            _, backward = traced((result * weights).sum().backward)
            check(w.grad, a.T @ weights, *w_grad_lies)
            assert forward.count(purpose=None) == backward.count(purpose=None) == 0


def test_rule_moves_what_it_must_and_no_more(line):
    a, b = numbers(7, 4), numbers(4, 5)
    result, trace = traced(linear_layer(), at(line, a, Shard(0)), at(line, b, Shard(1)))
    np.testing.assert_array_equal(whole_of(result), a @ b)
    assert trace.count() == 1
    assert trace.select()[0].operation == "my product"


def test_dot_in_rule_is_an_unsharded_axis(line):
    sorted_rows = pce.op(lambda x: np.sort(x, axis=1), rule=lambda shape: Rule.of("a.->a.", shape), name="sort rows")
    a = numbers(7, 4)
    result = check(traced(sorted_rows, at(line, a, Shard(0))), np.sort(a, axis=1), Shard(0), silent=True)
    result, trace = traced(sorted_rows, at(line, a, Shard(1)))
    np.testing.assert_array_equal(whole_of(result), np.sort(a, axis=1))
    assert trace.count() == 1


def test_operand_not_called_linear_is_reduced_first(line):
    a = numbers(7, 4)
    for linear, placed in [([[0]], SUM), ([], R)]:
        twice = pce.op(lambda x: x + x, rule=lambda shape, linear=linear: Rule.of("ab->ab", shape, linear=linear))
        check(twice(at(line, a, SUM)), 2 * a, placed)


def test_rule_may_join_shards_by_their_largest(line):
    largest = pce.op(
        lambda x: x.max(axis=0, initial=-np.inf), rule=lambda shape: Rule.of("ab->b", shape, reduces="max"), name="top"
    )
    a = numbers(7, 4)
    result, trace = traced(largest, at(line, a, Shard(0)))
    check(result, a.max(axis=0), R)
    assert [(event.operation, event.collective, event.bytes) for event in trace.select()] == [("top", "all_reduce", 32)]


def test_axis_that_goes_unreduced_is_not_sharded(line):
    product = pce.op(lambda x: x.prod(axis=0), rule=lambda shape: Rule.of("ab->b", shape))
    a = numbers(7, 4)
    for placed in (Shard(0), Shard(1), R, SUM):
        np.testing.assert_allclose(whole_of(product(at(line, a, placed))), a.prod(axis=0), rtol=ROUNDING)


def test_rule_of_wrong_shape_is_refused(line):
    for forward, letters in [(lambda x: x[:, :2], "ab->ab"), (lambda x: x, "ab->a"), (lambda x: x.T, "ab->ab")]:
        liar = pce.op(forward, rule=lambda shape, letters=letters: Rule.of(letters, shape, reduces="sum"), name="liar")
        for placed in (R, Shard(0)):
            with pytest.raises(ValueError, match=r"^the rule of liar says that its result has shape .* but it has"):
                liar(at(line, numbers(12, 5), placed))


def test_rule_for_other_operands_is_refused(line):
    x = at(line, numbers(3, 3), Shard(0))
    for rule in (
        lambda *shapes: Rule.of("ab->ab", shapes[0]),
        lambda *shapes: Rule.of("ab,ab,ab->ab", *shapes, shapes[0]),
        lambda *shapes: Rule.of("a,a->a", (3,), (3,)),
    ):
        with pytest.raises(ValueError, match=r"^the rule of odd is for operands of other shapes"):
            pce.op(np.add, rule=rule, name="odd")(x, x)
    with pytest.raises(TypeError, match=r"^the rule of odd must be a Rule, got 'ab->ab'"):
        pce.op(np.exp, rule=lambda shape: "ab->ab", name="odd")(x)


@pytest.mark.parametrize(
    ("letters", "shapes", "message"),
    [
        ("ab->ab", [(2,)], r"'ab->ab' does not fit shapes \(2,\)"),
        ("ab,ab->ab", [(2, 3)], "does not fit shapes"),
        ("ab,bc->ac", [(2, 3), (4, 5)], "axes 'b' have lengths 3 and 4"),
        ("ab->ac", [(2, 3)], "has a letter in its result that no operand has"),
    ],
)
def test_letters_that_do_not_fit_are_refused(letters, shapes, message):
    with pytest.raises(ValueError, match=message):
        Rule.of(letters, *shapes)


def test_letters_of_rule_may_be_spaced(line):
    assert Rule.of("a b, b -> a", (2, 3), (3,)) == Rule.of("ab,b->a", (2, 3), (3,))
    total = pce.op(lambda x: x.sum(), rule=lambda shape: Rule.of("ab->", shape, linear=[[0]], reduces="sum"))
    check(total(at(line, numbers(5, 3), Shard(0))), numbers(5, 3).sum(), SUM)


# --------------------------------------------------------------------------------------------------- NumPy's functions

LIES = (Shard(0), Shard(1), SUM, MAX)

OTHER = numbers(4, 4, seed=1)

# All of these work on a plain array, too, which says what they should be.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "inv": np.linalg.inv,
    "solve": lambda x: np.linalg.solve(x, OTHER),
    "svd": np.linalg.svd,
    "singular values": lambda x: np.linalg.svd(x).S,
    "cumsum": lambda x: np.cumsum(x, axis=0),
    "sort": np.sort,
    "argmax": lambda x: np.argmax(x, axis=1),
    "clip": lambda x: np.clip(x, a_min=2.0, a_max=OTHER),
    "abs": np.abs,
    "hypot": lambda x: np.hypot(OTHER, x),
    "greater": lambda x: np.greater(x, 2.0),
    "divmod": lambda x: np.divmod(x, 2.0),
    "modf": np.modf,
    "add.reduce": lambda x: np.add.reduce(x, axis=1),
    "add.accumulate": lambda x: np.add.accumulate(x, axis=0),
    "multiply.outer": lambda x: np.multiply.outer(x, np.arange(3.0)),
    "exp as float32": lambda x: np.exp(x, dtype=np.float32),
    "einsum": lambda x: np.einsum("ij,jk->ki", x, OTHER),
    "tensordot": lambda x: np.tensordot(x, OTHER, axes=1),
    "dot": lambda x: np.dot(OTHER, x),
    "stack": lambda x: np.stack([x, OTHER, x]),
    "vstack": lambda x: np.vstack((x, x)),
    "block": lambda x: np.block([[x, OTHER], [OTHER, x]]),
    "concatenate flat": lambda x: np.concatenate([x, OTHER], axis=None),
    "array_split": lambda x: np.array_split(x, 3),
    "split at an array": lambda x: np.split(x, np.array([1, 3]), axis=1),
    "reshape to an array": lambda x: np.reshape(x, np.array([2, 8])),
    "reshape in Fortran order": lambda x: np.reshape(x, (2, 8), order="F"),
    "broadcast a row": lambda x: np.broadcast_to(x[0], (3, 4)),
    "broadcast to a length": lambda x: np.broadcast_to(x[0, :1], 5),
    "sum as float32": lambda x: np.sum(x, dtype=np.float32),
    "sum as float32, third": lambda x: np.sum(x, 0, np.float32),
    "sum from 5": lambda x: np.sum(x, axis=1, initial=5.0),
    "mean where": lambda x: np.mean(x, where=OTHER > 1),
    "largest from 3": lambda x: np.max(x, axis=0, initial=3.0),
    "var": np.var,
    "median": lambda x: np.median(x, axis=0),
    "histogram": lambda x: np.histogram(x, bins=3),
    "where of one": lambda x: np.where(np.greater(x, 3.0)),
    "nonzero": np.nonzero,
    "squeeze": np.squeeze,
    "expand_dims": lambda x: np.expand_dims(x, 1),
    "moveaxis": lambda x: np.moveaxis(x, 0, 1),
    "allclose": lambda x: np.allclose(x, OTHER),
    "array_equal": lambda x: np.array_equal(x, x),
    "zeros_like": np.zeros_like,
    "meshgrid": lambda x: np.meshgrid(x[0], x[1]),
    "methods": lambda x: [
        *(x.argmax(), x.argmax(0), x.argmax(axis=-1), x.std(), x.var(1), x.var(axis=0, ddof=1, keepdims=True)),
        *(x.cumsum(), x.cumsum(1), x.clip(2.0, OTHER), x.clip(max=3.0), x[:1].squeeze(), x[:1].squeeze(axis=0)),
    ],
}


@pytest.mark.ranks(3)  # shards of several lengths
@pytest.mark.parametrize("placed", LIES, ids=str)
def test_any_function_of_numpy_is_never_wrong(line, placed):
    whole = numbers(4, 4)
    x = at(line, whole, placed)
    for name, function in FUNCTIONS.items():
        result, expected = function(x), function(whole)
        if not isinstance(expected, list | tuple):
            result, expected = [result], [expected]
        assert len(result) == len(expected), name
        for got, wanted in zip(result, expected, strict=True):
            assert got.dtype == np.asarray(wanted).dtype, name
            np.testing.assert_allclose(whole_of(got), wanted, rtol=1e-12, atol=1e-12, err_msg=name)


def test_function_that_gathers_says_so_once(comm, monkeypatch):
    monkeypatch.setattr(custom, "_warned", set())
    line = mesh_of(comm, comm.size)
    x = at(line, numbers(7, 3), Shard(0))
    with pytest.warns(UserWarning, match=r"numpy\.median has no placement rule .* 168 bytes are gathered") as met:
        np.median(x)
    assert [warning.filename for warning in met] == [__file__]
    with pytest.warns(UserWarning, match=r"numpy\.sinh has .* 84 bytes are gathered"):
        np.sinh(x.astype(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.median(x), np.sinh(x), np.sort(at(line, numbers(4), R)), np.sin(x)
        np.sort(at(line, numbers(0, 3), Shard(0)))


def test_function_of_numpy_takes_our_operation(line):
    a, b = numbers(7, 3), numbers(7, 3, seed=1)
    x, y = at(line, a, Shard(0), requires_grad=True), at(line, b, Shard(0))
    ours: dict[str, tuple[Callable[[Any, Any], Any], Placement]] = {
        "exp": (lambda x, y: np.exp(x / 8), Shard(0)),
        "ufuncs": (lambda x, y: np.add(np.multiply(x, y), np.negative(np.square(x))), Shard(0)),
        "plain first": (lambda x, y: b * x - OTHER[0, :3] / x, Shard(0)),
        "sum": (lambda x, y: np.sum(x, axis=0), SUM),
        "mean": (lambda x, y: np.mean(x), SUM),
        "amax": (lambda x, y: np.amax(x, axis=1, keepdims=True), Shard(0)),
        "concatenate": (lambda x, y: np.concatenate([x, y], axis=1), Shard(0)),
        "split": (lambda x, y: np.split(x, 3, axis=1)[1], Shard(0)),
        "transpose": (lambda x, y: np.transpose(x) @ y, SUM),
        "where": (lambda x, y: np.where(b > 2, x, y), Shard(0)),
        "reshape": (lambda x, y: np.reshape(x, (7, 3, 1)), Shard(0)),
        "absolute": (lambda x, y: abs(np.absolute(x)) + np.cos(x), Shard(0)),
        "einsum": (lambda x, y: np.einsum("ij,ik->jk", x, y), SUM),
        "clip": (lambda x, y: np.clip(x, 1.0, 2.0) + np.mod(x, 2) + x % 3, Shard(0)),
        "stack": (lambda x, y: np.squeeze(np.expand_dims(np.stack([x, y], axis=1), -1)), Shard(0)),
        "var": (lambda x, y: np.var(x, axis=1, ddof=1) + np.cumsum(x, axis=1)[:, 2], Shard(0)),
    }
    for name, (function, placed) in ours.items():
        result, trace = traced(function, x, y)
        check(result, function(a, b), placed, name=name)
        assert result.requires_grad, name
        assert trace.count(purpose=None) == 0, name
    assert isinstance(np.split(x, 3, axis=1), list)


def test_functions_of_others_are_not_ours_by_name(line):
    def square(x: Any) -> Any:
        return np.asarray(x) * 100

    class Foreign:
        """A function of another library that follows NumPy's protocol and has one of our names."""

        __name__, __module__ = "square", "elsewhere"

        def __call__(self, *arrays: Any) -> Any:
            return square(*arrays)

    x = at(line, numbers(3, 2), Shard(0))
    check(x.__array_function__(Foreign(), (DistArray,), (x,), {}), 100 * numbers(3, 2), R)
    foreign = np.frompyfunc(square, 1, 1)
    assert np.square(x).sharding == x.sharding
    with pytest.raises(TypeError):  # an array of objects
        foreign(x)


def test_functions_of_shape_and_dtype_give_plain_values(line):
    x, trace = traced(at, line, numbers(7, 3), Shard(0))
    assert (np.shape(x), np.ndim(x), np.size(x), np.size(x, 1)) == ((7, 3), 2, 21, 3)
    assert isinstance(np.size(x), int)
    assert trace.count(purpose=None) == 0


def test_results_with_named_parts_keep_them(line):
    a = numbers(4, 4)
    found = np.linalg.svd(at(line, a, Shard(0)))
    np.testing.assert_allclose(whole_of(found.S), np.linalg.svd(a).S)
    assert found[1] is found.S
    values, _ = np.linalg.eigh(at(line, a + a.T, Shard(0)))
    np.testing.assert_allclose(whole_of(values), np.linalg.eigh(a + a.T).eigenvalues)


def test_distributed_array_is_never_written_to(line):
    a = numbers(3, 3)
    plain = np.zeros((3, 3))
    for placed in (R, Shard(0)):
        x = at(line, a, placed)
        before = x.local.copy()
        for call in (
            lambda x=x: np.exp(x, out=plain),
            lambda x=x: np.add(plain, plain, out=x),
            lambda x=x: np.sum(x, axis=0, out=plain[0]),
            lambda x=x: np.concatenate([plain], out=x),
            lambda x=x: np.add.reduce(x, out=plain[0]),
            lambda x=x: np.add.at(x, [0], 1.0),
            lambda x=x: plain.__iadd__(x),
        ):
            with pytest.raises(TypeError, match="a distributed array is never written to"):
                call()
        for write in (np.save, np.savez, np.savez_compressed, np.savetxt):
            with pytest.raises(TypeError, match="would write on every rank"):
                write(None, x)
        for call in (
            lambda x=x: np.copyto(x, 1.0),
            lambda x=x: np.put(x, [0], 1.0),
            lambda x=x: np.place(x, a > 0, 1.0),
            lambda x=x: np.fill_diagonal(x, 1.0),
        ):
            with pytest.raises((TypeError, ValueError), match=r"read-only|never written to"):
                call()
        np.testing.assert_array_equal(x.local, before)
    np.testing.assert_array_equal(plain, np.zeros((3, 3)))


def test_errors_of_numpy_are_raised_on_every_rank(line):
    x = at(line, np.ones((3, 3)), Shard(0))
    with pytest.raises(np.linalg.LinAlgError, match="Singular matrix"):
        np.linalg.inv(x)
    with pytest.raises(ValueError):
        np.linalg.solve(x, np.ones(5))
    whole_of(x + 1.0)


@pytest.mark.ranks(1)  # the memory of one rank
def test_operands_of_function_are_not_kept(line):
    x = at(line, numbers(4), Shard(0))
    points = np.linspace(0.0, 9.0, 1000)
    watched = weakref.ref(points)
    gc.collect()
    np.interp(x, points, points)
    np.hypot(x, points[:4])
    del points
    gc.collect()
    assert watched() is None


def test_cupy_arrays_stay_where_they_are(line, cupy):
    whole = numbers(5, 3)
    sharding = spread(line.dim_sizes, whole.shape, Shard(0))
    x = DistArray(cupy.asarray(local_of(whole, sharding, line.coordinates)), line, sharding)
    result = pce.op(lambda x: x * 2)(x)
    assert isinstance(result.local, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(result.local), 2 * whole)


@pytest.mark.parametrize("forward", [lambda x: x, lambda x: x[::-1]], ids=["argument", "view"])
def test_result_shares_no_memory_with_parameter(line, forward):
    whole = numbers(5)
    w = at(line, whole, R, requires_grad=True)
    y = pce.op(forward, lambda g, y, x: g)(w)
    w.local[...] = 0
    np.testing.assert_array_equal(y.full(), forward(whole))
