"""The tape: every gradient is complete when it is passed on, nothing recurses, and nothing stays in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
import gc
import operator
import tracemalloc
from typing import Any
import weakref

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Replicate, Shard
from pce_mpi.autograd.apply import Op, apply
from pce_mpi.autograd.tape import Node, backward, is_grad_enabled
from pce_mpi.comm.tracing import Purpose, cause, record

# Python recurses 1,000 deep.
DEEP = 3_000


# Every rank has a tape of its own: a second one shows that none of them waits.
pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.ranks(2)]


# ---------------------------------------------------------------------------------- the engine alone, on plain numbers


class Tape:
    """Numbers on the tape, and the order in which they are passed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.gradients: dict[str, float] = {}

    def leaf(self, name: str) -> Node:
        return self.node(name)

    def node(self, name: str, *terms: tuple[float, Node | None]) -> Node:
        """The sum of terms, each a factor times another number."""

        def vjp(gradients: list[float]) -> list[float | None]:
            (gradient,) = gradients
            self.passed.append(name)
            self.gradients[name] = self.gradients.get(name, 0) + gradient
            return [None if parent is None else factor * gradient for factor, parent in terms]

        return Node(name, [None if parent is None else (parent, 0) for _, parent in terms], vjp, 1, None)

    def backward(self, root: Node, gradient: float = 1) -> None:
        backward((root, 0), gradient, lambda a, b: a + b, lambda _: None)


def test_nodes_of_root_are_passed_once_in_reverse():
    # Terms of 199 numbers are drawn from all that come before, also twice; some need no gradient.
    tape, rng = Tape(), np.random.default_rng(1)
    made, terms_of = [tape.leaf("0")], [[]]
    for number in range(1, 200):
        chosen = rng.integers(max(0, number - 5), number, rng.integers(1, 4)).tolist()
        terms_of.append([(float(rng.integers(1, 3)), index if rng.random() < 0.9 else None) for index in chosen])
        parents = [(factor, None if index is None else made[index]) for factor, index in terms_of[-1]]
        made.append(tape.node(str(number), *parents))
    expected = {190: 5.0}
    for number in range(190, -1, -1):
        for factor, index in terms_of[number] if number in expected else ():
            if index is not None:
                expected[index] = expected.get(index, 0.0) + factor * expected[number]
    tape.backward(made[190], 5)
    assert tape.gradients == {str(number): gradient for number, gradient in expected.items()}
    assert tape.passed == [str(number) for number in sorted(expected, reverse=True)]
    assert len(expected) > 100


def test_wrong_number_of_contributions_is_error():
    tape = Tape()
    a = tape.leaf("a")
    with pytest.raises(ValueError):
        tape.backward(Node("wrong", [(a, 0), (a, 0)], lambda gradients: gradients, 1, None))


def test_passed_node_holds_nothing_and_says_so():
    tape = Tape()
    a = tape.leaf("a")
    b = tape.node("the middle", (2, a))
    c = tape.node("c", (3, b))
    tape.backward(c)
    for node in (a, b, c):
        assert node.vjp is None
        assert node.parents == ()
    with pytest.raises(RuntimeError, match="the result of the middle has been through a backward pass, which freed"):
        tape.backward(b)


# --------------------------------------------------------------------------------------------- on distributed arrays


def ones(mesh: Any, *shape: int, **placements: Any) -> Any:
    return pce.distribute(np.ones(shape), mesh, requires_grad=True, **placements)


def test_thousands_of_operations_run_and_are_forgotten(line):
    x = ones(line, 2, 2)
    for passed in (True, False):
        y = x
        for _ in range(DEEP // 5):
            y = (-(y * 1.0 + 0.0)).T.reshape(4).reshape(2, 2).redistribute(data=Replicate())
        if passed:
            y.sum().backward()
        del y
    np.testing.assert_array_equal(x.grad.full(), np.ones((2, 2)))


def test_freed_node_is_refused_by_name(line):
    x = ones(line, 4, data=Shard(0))
    shared, (one, other) = pce.tanh(x), pce.split(x, 2)
    for name, first, second in (
        ("tanh", shared.sum(), (shared * 2.0).sum()),
        ("sum", loss := x.sum(), loss),
        ("split", one.sum(), other.sum()),  # the parts are one pass
    ):
        first.backward()
        gradient = x.grad
        with pytest.raises(RuntimeError, match=f"the result of {name} has been through a backward pass"):
            second.backward()
        assert x.grad is gradient


def test_several_results_have_one_vjp(line):
    passed = []

    def vjp(gradients: Any, results: Any, x: Any) -> Any:
        passed.append([gradient.full().tolist() for gradient in gradients])
        return pce.concatenate(gradients)

    thirds = Op("thirds", lambda call, x: tuple(np.split(x, 3)), [vjp], uses=[()])
    x = ones(line, 6, data=Shard(0))
    first, _, last = apply(thirds, x)
    (pce.sum(first * 2.0) + pce.sum(first * 3.0) + pce.sum(last)).backward()
    assert passed == [[[5.0, 5.0], [0.0, 0.0], [1.0, 1.0]]]
    np.testing.assert_array_equal(x.grad.full(), [5.0, 5.0, 0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize("shape", [(1,), (3,), (1, 1), (0,)], ids=str)
def test_backward_starts_from_scalar(line, shape):
    with pytest.raises(ValueError, match="starts from a scalar, got shape " + str(shape).replace("(", r"\(")[:-1]):
        (ones(line, *shape) * 2.0).backward()


def test_backward_of_constant_is_refused(line):
    constant = pce.distribute(np.ones(3), line)
    with pce.no_grad():
        unrecorded = ones(line, 3).sum()
    whole_numbers = ones(line, 3).sum().astype(np.int64)
    for nothing in (constant.sum(), unrecorded, whole_numbers, constant.sum().detach()):
        assert not nothing.requires_grad
        with pytest.raises(RuntimeError, match="nothing that this was computed from requires a gradient"):
            nothing.backward()


def test_scalar_leaf_is_its_own_loss(line):
    x = pce.distribute(np.array(3.0), line, requires_grad=True)
    x.backward()
    x.backward()
    assert x.grad.item() == 2.0


def test_no_grad_records_nothing_nested_and_after_exceptions(line):
    x = ones(line, 3)
    seen = []

    def requires() -> None:
        seen.append((is_grad_enabled(), (x * 2.0).requires_grad, x.redistribute(data=Shard(0)).requires_grad))

    with pce.no_grad():
        requires()
        with pce.no_grad():
            requires()
        requires()
        with pytest.raises(KeyError):
            with pce.no_grad():
                raise KeyError
        requires()
    requires()
    with pytest.raises(KeyError):
        with pce.no_grad():
            raise KeyError
    requires()
    assert seen == [(False,) * 3] * 4 + [(True,) * 3] * 2


def test_arrays_of_no_grad_may_require_gradients_later(line):
    with pce.no_grad():
        x = ones(line, 3)
    (x * 2.0).sum().backward()
    np.testing.assert_array_equal(x.grad.full(), np.full(3, 2.0))


def test_backward_records_nothing(line):
    x, w = ones(line, 3), ones(line, 3)
    seen = []

    def vjp(g: Any, y: Any, x: Any) -> Any:
        seen.append((is_grad_enabled(), (g * w).requires_grad))
        return g * w

    pce.op(lambda x: x * 1, vjp)(x).sum().backward()
    assert seen == [(False, False)]
    assert not x.grad.requires_grad


def test_backward_under_no_grad_finds_earlier_nodes(line):
    x = ones(line, 3)
    loss = (x * 2.0).sum()
    with pce.no_grad():
        loss.backward()
        assert not is_grad_enabled()
    np.testing.assert_array_equal(x.grad.full(), np.full(3, 2.0))


def test_detached_array_has_same_memory_and_no_past(line):
    x = ones(line, 3, data=Shard(0))
    y = x * 4.0
    detached = y.detach()
    assert detached.local is y.local
    assert detached.sharding == y.sharding
    assert detached.is_leaf
    assert not detached.requires_grad
    (detached * x).sum().backward()
    np.testing.assert_array_equal(x.grad.full(), np.full(3, 4.0))


def test_leaves_are_what_was_made(line):
    x = ones(line, 3)
    constant = pce.distribute(np.ones(3), line)
    assert x.is_leaf
    assert constant.is_leaf
    assert (constant * 2.0).is_leaf
    y = x * constant
    assert y.requires_grad
    assert not y.is_leaf
    y.sum().backward()
    assert y.grad is None
    assert constant.grad is None
    assert x.grad is not None


def test_micro_batches_add_up_and_keep_earlier_gradients(line):
    x = np.arange(12.0).reshape(6, 2)
    w = ones(line, 2, 3)
    seen = []
    for rows in np.split(x, 3):
        (pce.distribute(rows, line, data=Shard(0)) @ w).sum().backward()
        seen.append((w.grad, w.grad.local.copy()))
    whole = w.grad.full()
    for gradient, then in seen:
        np.testing.assert_array_equal(gradient.local, then)
    assert [gradient.placements for gradient, _ in seen] == [{"data": Partial("sum")}] * 3
    np.testing.assert_allclose(whole, np.repeat(x.sum(axis=0)[:, None], 3, axis=1), rtol=1e-15)


def test_gradient_may_be_set_and_forgotten(line):
    x = ones(line, 3)
    x.grad = pce.distribute(np.full(3, 10.0), line)
    (x * 2.0).sum().backward()
    np.testing.assert_array_equal(x.grad.full(), np.full(3, 12.0))
    x.grad = None
    (x * 2.0).sum().backward()
    np.testing.assert_array_equal(x.grad.full(), np.full(3, 2.0))


def test_error_in_backward_leaves_tape_recording(line):
    x = ones(line, 3)
    one_way = pce.op(np.exp, name="one way")
    with pytest.raises(NotImplementedError, match="one way has no vjp"):
        one_way(x).sum().backward()
    with pce.trace() as trace:
        record(cause("a test"), "none", Purpose.PAYLOAD, ranks=1, bytes=0)
    assert is_grad_enabled()
    assert [event.phase for event in trace.events] == ["forward"]
    (x * 2.0).sum().backward()
    np.testing.assert_array_equal(x.grad.full(), np.full(3, 2.0))


# ------------------------------------------------------------------------------------------------------------- memory


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing is found by the garbage collector: what goes, goes because nobody holds it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def network(x: Any, w: Any, v: Any) -> list[Any]:
    """Every array between parameters and loss of a network with two layers, one of them with another placement."""
    arrays = [x @ w]
    for function in (pce.tanh, lambda h: h + h * 0.5, lambda h: h.redistribute(data=Replicate()), pce.softmax):
        arrays.append(function(arrays[-1]))
    arrays.append(arrays[-1] @ v)
    arrays.append(pce.cross_entropy(arrays[-1], np.zeros(x.shape[0], int)))
    return arrays


def test_intermediate_arrays_go_when_they_have_been_passed(line):
    x = pce.distribute(np.ones((6, 4)), line, data=Shard(0))
    w, v = ones(line, 4, 5), ones(line, 5, 7, data=Shard(1))
    network(x, w, v)[-1].backward()  # whatever is made once is made now
    with without_collector():
        arrays = network(x, w, v)
        loss = arrays[-1]
        watched = [weakref.ref(each.local) for each in arrays] + [weakref.ref(each) for each in arrays]
        del arrays
        alive = sum(reference() is not None for reference in watched)
        loss.backward()
        left = [reference() for reference in watched if reference() is not None]
    assert alive > 2
    assert len(left) == 2, "only the loss itself, and its number, is still held"
    assert any(each is loss for each in left)


def test_passes_make_no_reference_cycles(line):
    x = pce.distribute(np.ones((6, 4)), line, data=Shard(0))
    w, v = ones(line, 4, 5), ones(line, 5, 7, data=Shard(1))

    def steps() -> None:
        network(x, w, v)
        network(x, w, v)[-1].backward()
        (pce.sum(pce.max(x @ w, axis=0)) + pce.mean(pce.layer_norm(pce.concatenate([w[:2], w[2:]])))).backward()
        (pce.logsumexp(x, axis=0).sum() * pce.sum(w)).backward()
        left, _ = pce.split(pce.gelu(w), 2)
        left.sum().backward()

    steps()
    with without_collector():
        steps()
        cyclic = gc.collect()
    assert cyclic == 0


@contextmanager
def traced_memory() -> Iterator[None]:
    with without_collector():
        tracemalloc.start()
        try:
            yield
        finally:
            tracemalloc.stop()


MEGABYTE = 2**20


def test_backward_leaves_parameters_and_gradients_only(line):
    w = ones(line, 512, 256, data=Shard(0))
    v = ones(line, 256, 512)

    def step() -> None:
        # The gradient of w is cut out of that of all of it.
        whole = w.redistribute(data=Replicate())
        hidden = pce.tanh(whole * 0.5) @ v
        (hidden * hidden).mean().backward()

    step()
    w.grad = v.grad = None
    with traced_memory():
        before, _ = tracemalloc.get_traced_memory()
        step()
        after, _ = tracemalloc.get_traced_memory()
    gradients = w.grad.local.nbytes + v.grad.local.nbytes
    assert w.grad.local.nbytes == w.local.nbytes
    assert gradients <= after - before < gradients + 0.1 * MEGABYTE


def test_backward_pass_frees_as_it_goes(line):
    x = ones(line, 128, 1024)  # a megabyte

    def chain() -> Any:
        y = x
        for _ in range(20):
            y = pce.tanh(y)
        return y.sum()

    chain().backward()
    x.grad = None
    with traced_memory():
        start, _ = tracemalloc.get_traced_memory()
        loss = chain()
        recorded, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        loss.backward()
        _, peak = tracemalloc.get_traced_memory()
    assert recorded - start > 19 * MEGABYTE
    # Were gradients, or what has been passed, kept to the end it would be 40.
    assert peak - start < 26 * MEGABYTE


def test_tape_holds_only_elements_for_vjps(line):
    x = ones(line, 64, 1024)
    with traced_memory():
        start, _ = tracemalloc.get_traced_memory()
        y = x
        for _ in range(10):
            y = ((y + 1.0) * 2.0).reshape(1024, 64).T.reshape(64, 1024)
        held, _ = tracemalloc.get_traced_memory()
        y.sum().backward()
    assert held - start < 2 * MEGABYTE
    np.testing.assert_array_equal(x.grad.full(), np.full((64, 1024), 2.0**10))


def test_assignment_that_would_lose_parameter_is_refused(line):
    w, x = ones(line, 2, 2), ones(line, 2, 2).detach()
    (w * x).sum().backward()
    names = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
    for name in names:
        with pytest.raises(TypeError, match=r"would not change the parameter.* step by pce_mpi.SGD\(\[w\], lr\)"):
            getattr(operator, f"i{name}")(w, x)
        with pce.no_grad(), pytest.raises(TypeError, match="would not change the parameter"):
            getattr(operator, f"i{name}")(w, x)
        for computed in (x, w * 1.0):  # another array under the same name, as in NumPy's functions
            found = getattr(operator, f"i{name}")(computed, x).full()
            np.testing.assert_array_equal(found, getattr(operator, name)(np.ones((2, 2)), np.ones((2, 2))))
    w.local[...] -= w.grad.local
    assert not w.full().any()
