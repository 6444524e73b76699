"""The array library is the logits' own: CuPy arrays stay on their GPU, and come back as CuPy arrays.

A strict stand-in for CuPy shows that nothing mixes the two libraries on the way, and what crosses from one to the
other; the kernels are those for GPUs, compiled for the host. The numbers are those of the host, bit for bit.
"""

from functools import partial
import gc

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard, kernels
from pce_mpi.arrays import to_host
from pce_mpi.comm import collectives
from pce_mpi.kernels.interface import StateFields
from pce_mpi.testing import in_step
from ranks.placed import error_of
from ranks.problems import NARROW, SPLITS, WIDE, Results, draw, evaluate as on_host, part_of, same_on_every_rank

# One rank reads its logits once, several read them twice and merge.
pytestmark = pytest.mark.ranks(1, 2)

TARGETS = ["index", "probabilities"]
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]

OPTIONS = [
    {},
    {"weight": True},
    {"label_smoothing": 0.1},
    {"weight": True, "label_smoothing": 0.3},
    {"z_loss": 0.01},
    {"z_loss": 0.01, "weight": True},
    {"logit_scale": 0.7},
    {"logit_scale": 7.0, "weight": True, "label_smoothing": 0.1},
    {"softcap": 10.0},
    {"softcap": 5.0, "logit_scale": 2.0, "z_loss": 0.1},
    {"reduction": "none"},
    {"reduction": "sum"},
]


def on_device(cupy, problem, part):
    """Logits, targets and options of this rank, all arrays among them CuPy's."""
    logits, targets, options = part.on_this_rank(problem)
    if "weight" in options:
        options["weight"] = cupy.asarray(options["weight"])
    return cupy.asarray(logits), cupy.asarray(targets), options


def evaluate(comm, cupy, problem, part, order=None, **more):
    """`ranks.problems.evaluate` with CuPy arrays, and backward with a CuPy `dloss`, a number and in place."""
    logits, targets, options = on_device(cupy, problem, part)
    if order is not None:
        logits = order(logits, cupy)
    options = {**options, "comm": comm, **more}
    arrays = {"logits": logits, "targets": targets}
    before = {name: cupy.asnumpy(array).tobytes() for name, array in arrays.items()}
    alone = pce.softmax_cross_entropy(logits, targets, **options)
    forward, residuals = pce.softmax_cross_entropy_forward(logits, targets, **options)
    backward = pce.softmax_cross_entropy_backward(cupy.ones(forward.shape), residuals)
    of_a_number = pce.softmax_cross_entropy_backward(1.0, residuals)
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, targets, **options)
    out = cupy.zeros(logits.shape, logits.dtype)
    _, into_out = pce.softmax_cross_entropy_value_and_grad(logits, targets, out=out, **options)
    changed = [name for name, array in arrays.items() if cupy.asnumpy(array).tobytes() != before[name]]
    in_place = pce.softmax_cross_entropy_backward(1.0, residuals, out=logits)
    losses = {"softmax_cross_entropy": alone, "forward": forward, "value_and_grad": loss}
    gradients = {"backward": backward, "of a number": of_a_number, "value_and_grad": gradient, "in place": in_place}
    assert all(isinstance(array, cupy.ndarray) for array in [*losses.values(), *gradients.values()])
    assert in_place is logits
    assert into_out is out
    losses, gradients = ({name: cupy.asnumpy(a) for name, a in each.items()} for each in (losses, gradients))
    assert np.array_equal(cupy.asnumpy(out), gradients["value_and_grad"], equal_nan=True)
    return Results(losses, gradients, changed, [], comm is None or same_on_every_rank(comm, *losses.values()))


# Numbers


def assert_numbers_of_host(comm, cupy, problem, how="uneven", order=None, **more):
    part = part_of(comm, problem, how)
    found = evaluate(comm, cupy, problem, part, order, **more)
    expected = on_host(comm, problem, part, **more)
    for got, wanted in ((found.losses, expected.losses), (found.gradients, expected.gradients)):
        for name, array in got.items():
            assert array.dtype == wanted["value_and_grad"].dtype, name
            assert np.array_equal(array, wanted["value_and_grad"], equal_nan=True), name
    assert found.changed == expected.changed == expected.aliased == []
    assert found.same_everywhere


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("targets", TARGETS)
def test_cupy_arrays_give_cupy_arrays_with_right_numbers(comm, cupy, targets, options):
    for classes, peaked in ((NARROW, True), (WIDE, False)):
        with in_step(comm):
            ignored = 0.0 if targets == "probabilities" else 0.2
            problem = draw(5, classes, targets=targets, peaked=peaked, ignored=ignored, **options)
            assert_numbers_of_host(comm, cupy, problem)


@pytest.mark.ranks(2)  # the states are merged as well
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("targets", TARGETS)
def test_any_dtype_of_logits_and_of_arithmetic(comm, cupy, dtype, targets):
    for requested in (None, np.float64):
        with in_step(comm):
            problem = draw(4, WIDE, dtype=dtype, targets=targets, peaked=True)
            assert_numbers_of_host(comm, cupy, problem, compute_dtype=requested)


@pytest.mark.ranks(2)  # one rank has all classes
@pytest.mark.parametrize("how", SPLITS)
def test_shards_on_gpu_may_be_uneven_and_empty(comm, cupy, how):
    for targets in TARGETS:
        with in_step(comm):
            assert_numbers_of_host(comm, cupy, draw(4, NARROW, targets=targets), how)


def fortran(array, cupy):
    return cupy.asarray(cupy.asnumpy(array.T)).T


def strided(array, cupy):
    wide = cupy.zeros(tuple(2 * length for length in array.shape), array.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in array.shape)]
    view[...] = array
    return view


def misaligned(array, cupy):
    flat = cupy.zeros(array.size + 1, array.dtype)[1:]
    flat[...] = array.reshape(-1)
    return flat.reshape(array.shape)


@pytest.mark.ranks(1)  # a rank reads its own
@pytest.mark.parametrize("order", [fortran, strided, misaligned], ids=lambda order: order.__name__)
@pytest.mark.parametrize(("shape", "axis"), [((5, NARROW), -1), ((WIDE, 3), 0), ((2, NARROW, 3), 1), ((NARROW,), 0)])
def test_logits_on_gpu_may_have_any_strides(comm, cupy, order, shape, axis):
    for targets in TARGETS:
        with in_step(comm):
            assert_numbers_of_host(comm, cupy, draw(*shape, axis=axis, targets=targets), order=order)


@pytest.mark.parametrize(
    ("rows", "options"),
    [(0, {"reduction": "none"}), (0, {"reduction": "sum"}), (0, {}), (3, {}), (3, {"weight": True})],
    ids=str,
)
def test_loss_on_gpu_of_no_rows(comm, cupy, rows, options):
    problem = draw(rows, NARROW, **options)
    assert_numbers_of_host(comm, cupy, problem.but(targets=np.full(rows, -100)))


@pytest.mark.parametrize("options", [{}, {"weight": True}, {"label_smoothing": 0.1}], ids=str)
def test_special_rows_give_what_they_give_on_host(comm, cupy, options):
    problem = draw(6, NARROW, reduction="none", **options)
    logits, targets = problem.logits.copy(), problem.targets.copy()
    logits[0] = -np.inf
    logits[1, 3] = np.inf
    logits[2, 5] = np.nan
    logits[3], targets[3] = np.nan, -100  # counts for nothing
    logits[4, (targets[4] + 1) % NARROW] = -np.inf
    assert_numbers_of_host(comm, cupy, problem.but(logits=logits, targets=targets))
    mean = draw(3, NARROW, **options)
    assert_numbers_of_host(comm, cupy, mean.but(weight=np.zeros(NARROW, np.float32)))


def test_state_of_cupy_row_is_one_element(comm, cupy, several, monkeypatch):
    given, operator = [], collectives._operator
    monkeypatch.setattr(collectives, "_operator", lambda op, dtype: (given.append(dtype), operator(op, dtype))[1])
    logits = cupy.asarray(np.zeros((3, 4), np.float32))
    pce.softmax_cross_entropy(logits, cupy.asarray(np.arange(3)), comm=comm, num_classes=4 * comm.size)
    assert given == [StateFields().dtype]  # MPI may cut a message between elements


@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5}, {"softcap": 5.0}], ids=str)
def test_class_statistics_of_cupy_arrays_are_cupy_arrays(comm, cupy, options):
    problem = draw(5, WIDE, ignored=0.2)
    part = part_of(comm, problem, "uneven")
    logits, targets, _ = part.on_this_rank(problem)
    expected = pce.class_statistics(logits, targets, comm=comm, **options)
    got = pce.class_statistics(cupy.asarray(logits), cupy.asarray(targets), comm=comm, **options)
    without = pce.class_statistics(cupy.asarray(logits), comm=comm, **options)
    assert without.log_prob is None
    for name, value in expected._asdict().items():
        field = getattr(got, name)
        assert isinstance(field, cupy.ndarray), name
        assert field.dtype == value.dtype, name
        assert np.array_equal(cupy.asnumpy(field), value), name


def test_rows_that_are_sharded_are_reduced_together(comm, cupy):
    problem = draw(4, NARROW, ignored=0.3, seed=1)
    mine = problem.logits[comm.rank :: comm.size], problem.targets[comm.rank :: comm.size]
    found = pce.softmax_cross_entropy_value_and_grad(*map(cupy.asarray, mine), batch_comm=comm)
    expected = pce.softmax_cross_entropy_value_and_grad(*mine, batch_comm=comm)
    assert bits(found) == bits(expected)


# Bytes that cross between the host and the GPU, and reads of the logits


@pytest.fixture
def crossed(cupy, monkeypatch):
    """The bytes of each array that leaves the stand-in's GPU."""
    sizes, get = [], cupy.ndarray.get
    monkeypatch.setattr(
        cupy.ndarray, "get", lambda array, *given, **more: (sizes.append(array.nbytes), get(array, *given, **more))[1]
    )
    return sizes


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("targets", TARGETS)
def test_gpu_sends_class_numbers_and_states_only(comm, cupy, crossed, targets, reduction):
    problem = draw(6, NARROW, targets=targets, reduction=reduction)
    logits, chosen, options = on_device(cupy, problem, part_of(comm, problem, "uneven"))
    crossed.clear()
    pce.softmax_cross_entropy_value_and_grad(logits, chosen, comm=comm, num_classes=NARROW, **options)
    told = sum(crossed)
    pce.softmax_cross_entropy_value_and_grad(logits, chosen, comm=comm, **options)
    sample = sum(crossed) - 2 * told
    checked = 0 if targets != "index" else 4 if comm.size == 1 else chosen.nbytes  # alone, the GPU checks them
    record = 40 if targets == "index" else 96
    assert told == checked + (6 * record if comm.size > 1 else 0)
    # Without num_classes a few logits tell gathered ones from shards.
    assert 0 < sample <= 29 * 5 * logits.itemsize if comm.size > 1 and logits.size else sample == 0


def noted(monkeypatch, *functions):
    """The names of functions, pairs of what has them and their name, in the order of their calls from now on."""
    called = []
    for owner, name in functions:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, n=name, c=call, **more: (called.append(n), c(*a, **more))[1])
    return called


@pytest.mark.parametrize(
    ("targets", "options"),
    [("index", {}), ("index", {"weight": True, "z_loss": 0.1}), ("index", {"softcap": 3.0}), ("probabilities", {})],
    ids=str,
)
def test_logits_on_gpu_are_read_twice(comm, cupy, monkeypatch, targets, options):
    problem = draw(3, NARROW, targets=targets, **options)
    logits, chosen, options = on_device(cupy, problem, part_of(comm, problem, "uneven"))
    kernel = kernels.kernel_of(logits)
    started = noted(monkeypatch, (kernel, "fill_states"), (kernel, "write_gradient"))
    pce.softmax_cross_entropy_value_and_grad(logits, chosen, comm=comm, **options)
    assert started == ["fill_states", "write_gradient"]


def test_gpu_sends_what_the_host_sends(comm, cupy):
    problem = draw(5, NARROW, weight=True)
    part = part_of(comm, problem, "uneven")
    with pce.trace() as on_host:
        logits, targets, options = part.on_this_rank(problem)
        pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, **options)
    with pce.trace() as on_gpu:
        logits, targets, options = on_device(cupy, problem, part)
        pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, **options)
    agreement, *others = on_host.events
    assert on_gpu.events == [agreement] * min(comm.size, 2) + others
    with pce.trace() as without_waiting:
        pce.softmax_cross_entropy(logits, cupy.asnumpy(targets), comm=comm, num_classes=NARROW)
    assert len(without_waiting.events) == len(on_host.events)


@pytest.mark.parametrize("options", [{}, {"weight": True}, {"targets": "probabilities"}], ids=str)
def test_nobody_waits_before_states_are_launched(comm, stand_in, monkeypatch, options):
    problem = draw(6, NARROW, **options)
    logits, targets, options = on_device(stand_in, problem, part_of(comm, problem, "uneven"))
    kernel, stream = kernels.kernel_of(logits), stand_in.cuda.get_current_stream()
    first = "fill_states", "write_gradient", "taken", "largest_of"
    happened = noted(monkeypatch, *((kernel, name) for name in first), (stream, "synchronize"))
    pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, **options)
    alone = ["fill_states", "write_gradient"] + ["synchronize"] * (targets.ndim == 1)
    assert happened[:3] == (alone if comm.size == 1 else ["fill_states", "synchronize", "synchronize"])
    chosen = partial(pce.take_classes, logits, np.zeros((6, 2), np.int64))
    calls = [partial(pce.kl_divergence, logits, logits), chosen, partial(pce.top_k, logits, 2)]
    if "weight" not in options:
        calls.append(partial(pce.class_statistics, logits, targets if targets.ndim == 1 else None))
    for call in calls:
        happened.clear()
        call(comm=comm)
        assert happened[0] in first


def test_failed_call_keeps_memory_that_is_written_to(comm, stand_in, monkeypatch):
    problem = draw(6, NARROW)
    logits, targets, _ = on_device(stand_in, problem, part_of(comm, problem, "uneven"))
    monkeypatch.setattr(kernels.kernel_of(logits), "fill_states", lambda *_: [][0])
    assert error_of(lambda: pce.softmax_cross_entropy(logits, targets, comm=comm))[0] == "IndexError"
    gc.collect()
    assert stand_in.cuda.get_current_stream().mistakes == []


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrong", ["", "number", "other numbers", "unsigned", "shards"])
@pytest.mark.parametrize("on_gpu", ["all", "first", "last"])
def test_ranks_agree_on_class_numbers_of_gpus(comm, cupy, on_gpu, wrong):
    logits, targets = np.random.default_rng(6).standard_normal((5, NARROW), np.float32), np.array([0, 18, -100, 7, 4])
    if wrong == "unsigned":
        targets = targets.astype(np.uint64)  # which -100 is not
    elif comm.rank == comm.size - 1:
        targets[3] = {"number": -5, "other numbers": 8}.get(wrong, 7)
    logits = logits if wrong == "shards" else np.roll(logits, comm.rank, axis=1)
    is_there = on_gpu == "all" or comm.rank == {"first": 0, "last": comm.size - 1}[on_gpu]
    there = cupy.asarray(logits), cupy.asarray(targets) if is_there else targets
    both = partial(pce.softmax_cross_entropy_value_and_grad, comm=comm)
    on_host, found = (error_of(partial(both, *arrays)) for arrays in ((logits, targets), there))
    # Ranks with such numbers on the host tell them before the others do.
    cut = " (rank" if wrong == "unsigned" and on_gpu != "all" else "\n"
    assert found[0] == on_host[0]
    assert found[1].split(cut)[0] == on_host[1].split(cut)[0]
    fails = bool(wrong) and (comm.size > 1 or wrong in ("number", "unsigned"))
    assert (on_host[0] != "") == fails
    assert cupy.asnumpy(there[0]).tobytes() == logits.tobytes()
    if not fails:
        for ours, theirs in zip(both(*there), both(logits, targets), strict=True):
            assert cupy.asnumpy(ours).tobytes() == theirs.tobytes()


WRONG = {
    "class after the last": ([0, 3, -100, NARROW], np.int64),
    "negative": ([1, -1, 2, 3], np.int64),
    "least": ([1, -(2**63), 2, 3], np.int64),
    "of 16 bits": ([-2, 300, -100, 3], np.int16),
    "negative if it had a sign": ([2, 2**64 - 100, 2, 3], np.uint64),
}


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"weight": True}], ids=str)
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_class_number_on_gpu_writes_nothing(comm, cupy, wrong, order, options):
    problem, targets = draw(4, NARROW, **options), np.array(*WRONG[wrong])
    logits, _, options = part_of(comm, problem, "uneven").on_this_rank(problem)
    there = cupy.asarray(logits) if order == "C" else cupy.asarray(logits.T.copy()).T
    given, outs = [(logits, targets), (there, cupy.asarray(targets))], (there, cupy.ones(logits.shape[::-1]).T)
    ways = [{"comm": comm, "num_classes": NARROW}]
    if comm.size == 1:
        ways += [{}, {"comm": comm, "batch_comm": comm}]
    for way in ways:
        more = {**options, **way}
        for out in outs:
            before = cupy.asnumpy(out)  # kept, as memory that is given back may be an array that is not written to
            both = partial(pce.softmax_cross_entropy_value_and_grad, **more)
            on_host, on_gpu = error_of(partial(both, *given[0])), error_of(partial(both, *given[1], out=out))
            assert on_gpu == on_host
            assert "targets[" in on_gpu[1]
            assert cupy.asnumpy(out).tobytes() == before.tobytes()
        for function in [pce.softmax_cross_entropy] + [pce.class_statistics] * (not options):
            on_host, on_gpu = (error_of(partial(function, *arrays, **more)) for arrays in given)
            assert on_gpu == on_host


# Arrays of two libraries


LOSSES = [
    pce.softmax_cross_entropy,
    pce.softmax_cross_entropy_forward,
    pce.softmax_cross_entropy_value_and_grad,
    pce.class_statistics,
]


@pytest.mark.parametrize("function", LOSSES, ids=lambda function: function.__name__)
def test_losses_name_arrays_on_gpu_and_host(comm, cupy, function):
    problem = draw(3, NARROW)
    logits, targets, _ = part_of(comm, problem, "uneven").on_this_rank(problem)
    error = error_of(lambda: function(logits, cupy.asarray(targets), comm=comm))
    assert error[0] == "TypeError"
    assert "targets (CuPy, on a GPU)" in error[1]
    assert "logits (NumPy, on the host)" in error[1]
    assert np.isfinite(pce.softmax_cross_entropy(logits, targets, comm=comm))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_numbers_and_weights_may_be_on_host(comm, cupy, smoothing):
    problem = draw(6, NARROW, weight=True, ignored=0.3, label_smoothing=smoothing)
    part = part_of(comm, problem, "uneven")
    logits, chosen, options = on_device(cupy, problem, part)
    _, targets, on_host = part.on_this_rank(problem)
    expected = pce.softmax_cross_entropy_value_and_grad(logits, chosen, comm=comm, **options)
    for here, more in ((targets, options), (chosen, on_host), (targets, on_host)):
        found = pce.softmax_cross_entropy_value_and_grad(logits, here, comm=comm, **more)
        for ours, theirs in zip(found, expected, strict=True):
            assert isinstance(ours, cupy.ndarray)
            assert cupy.asnumpy(ours).tobytes() == cupy.asnumpy(theirs).tobytes()


def test_class_numbers_on_host_send_states_only(comm, cupy, crossed):
    problem = draw(6, NARROW)
    logits, targets = on_device(cupy, problem, part_of(comm, problem, "uneven"))[0], problem.targets
    crossed.clear()
    pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, num_classes=NARROW)
    assert sum(crossed) == (6 * 40 if comm.size > 1 else 0)


def test_other_operands_have_the_library_of_logits(comm, cupy):
    problem = draw(3, NARROW, weight=True, reduction="none")
    part = part_of(comm, problem, "uneven")
    logits, targets, options = part.on_this_rank(problem)
    on_gpu, chosen, options_on_gpu = on_device(cupy, problem, part)
    with_grad = pce.softmax_cross_entropy_value_and_grad
    weight = error_of(lambda: with_grad(logits, targets, comm=comm, **options_on_gpu))
    assert "logits (NumPy, on the host); weight (CuPy, on a GPU)" in weight[1]
    probabilities = error_of(lambda: with_grad(on_gpu, logits, comm=comm))
    assert "logits (CuPy, on a GPU); targets (NumPy, on the host)" in probabilities[1]
    out = error_of(lambda: with_grad(logits, targets, comm=comm, out=cupy.asarray(logits), **options))
    assert "logits (NumPy, on the host); out (CuPy, on a GPU)" in out[1]
    _, residuals = pce.softmax_cross_entropy_forward(on_gpu, chosen, comm=comm, **options_on_gpu)
    dloss = error_of(lambda: pce.softmax_cross_entropy_backward(np.ones(3), residuals))
    assert dloss[1] == "arrays of two libraries do not mix: logits (CuPy, on a GPU); dloss (NumPy, on the host)"
    out = error_of(lambda: pce.softmax_cross_entropy_backward(1.0, residuals, out=np.zeros(logits.shape)))
    assert out[1] == "arrays of two libraries do not mix: logits (CuPy, on a GPU); out (NumPy, on the host)"
    assert {error[0] for error in (weight, probabilities, out, dloss)} == {"TypeError"}
    for number in (2, 2.0, np.float32(2)):
        assert isinstance(pce.softmax_cross_entropy_backward(number, residuals), cupy.ndarray)


def test_operand_misplaced_on_one_rank_raises_everywhere(comm, cupy):
    problem = draw(3, NARROW)
    logits, targets, _ = on_device(cupy, problem, part_of(comm, problem, "uneven"))
    if comm.rank == comm.size - 1:
        logits = cupy.asnumpy(logits)
    error = error_of(lambda: pce.softmax_cross_entropy(logits, targets, comm=comm))
    assert error[0] == "TypeError"
    assert f"(rank {comm.size - 1})" in error[1]
    texts = comm.allgather(error[1])
    assert len(set(texts)) == 1


def test_operations_name_operands_that_do_not_mix(comm, cupy):
    mesh = pce.Mesh(comm, data=comm.size)
    host, gpu = np.ones((4, 3)), cupy.asarray(np.ones((4, 3)))
    x = pce.distribute(host, mesh, data=pce.Shard(0))
    y = pce.distribute(gpu, mesh, data=pce.Shard(0))
    ids, table = np.array([0, 2]), pce.distribute(gpu, mesh, data=pce.Shard(0))
    numbers = pce.distribute(np.zeros(4, int), mesh, data=pce.Shard(0))
    calls = {
        "x + y": (lambda: x + y, ["operand 0 of add (NumPy", "operand 1 of add (CuPy"]),
        "y * host": (lambda: y * host, ["operand 0 of multiply (CuPy", "operand 1 of multiply (NumPy"]),
        "x - gpu": (lambda: x - gpu, ["operand 0 of subtract (NumPy", "operand 1 of subtract (CuPy"]),
        "y @ host": (lambda: y @ np.ones((3, 2)), ["operand 0 of matmul (CuPy", "operand 1 of matmul (NumPy"]),
        "concatenate": (lambda: pce.concatenate([x, y]), ["operand 0 of concatenate (NumPy", "operand 1 of"]),
        "where": (lambda: pce.where(x > 0, y, 0.0), ["(NumPy, on the host)", "(CuPy, on a GPU)"]),
        "embedding": (lambda: pce.embedding(ids, table), ["ids (NumPy", "table (CuPy"]),
        "cross_entropy": (lambda: pce.cross_entropy(y, numbers), ["logits (CuPy", "targets (NumPy"]),
        "0-d": (lambda: y + np.ones(()), ["operand 1 of add (NumPy"]),
    }
    found = {name: error_of(call) for name, (call, _) in calls.items()}
    for name, (_, words) in calls.items():
        assert found[name][0] == "TypeError", f"{name}: {found[name]}"
        assert all(word in found[name][1] for word in words), f"{name}: {found[name]}"
    assert len(set(comm.allgather(tuple(found.values())))) == 1


def test_numbers_meet_arrays_of_any_library(comm, cupy):
    mesh = pce.Mesh(comm, data=comm.size)
    for library in (np, cupy):
        x = pce.distribute(library.asarray(np.ones((4, 3), np.float32)), mesh, data=pce.Shard(0))
        for number in (2, 2.0, np.float32(2), np.int64(2)):
            assert isinstance((x * number).local, library.ndarray)
            assert isinstance((number + x).local, library.ndarray)


def test_parameters_and_gradients_of_two_libraries_are_refused(comm, cupy):
    mesh = pce.Mesh(comm, data=comm.size)
    host = pce.distribute(np.ones(3), mesh, requires_grad=True)
    gpu = pce.distribute(cupy.asarray(np.ones(3)), mesh, requires_grad=True)
    with pytest.raises(TypeError, match=r"parameters\[0\] \(NumPy, on the host\); parameters\[1\] \(CuPy, on a GPU\)"):
        pce.SGD([host, gpu], lr=0.1)
    gpu.grad = pce.distribute(np.ones(3), mesh)
    error = error_of(pce.SGD([gpu], lr=0.1).step)
    assert error[0] == "TypeError"
    assert "the gradient of parameters[0] (NumPy, on the host)" in error[1]
    texts = comm.allgather(error[1])
    assert len(set(texts)) == 1


@pytest.mark.parametrize("unaligned", ["logits", "targets", "out"])
def test_arrays_at_odd_addresses_raise_everywhere(comm, cupy, unaligned):
    problem = draw(3, NARROW)
    logits, targets, _ = on_device(cupy, problem, part_of(comm, problem, "uneven"))
    given = {"logits": logits, "targets": targets, "out": cupy.empty(logits.shape, logits.dtype)}
    if comm.rank == comm.size - 1:
        array = given[unaligned]
        size = max(array.nbytes, array.dtype.itemsize)
        given[unaligned] = cupy.zeros(size + 1, np.uint8)[1:].view(array.dtype)[: array.size].reshape(array.shape)
    error = error_of(lambda: pce.softmax_cross_entropy_value_and_grad(**given, comm=comm))
    assert error[0] == "ValueError"
    assert f"{unaligned} has elements of {given[unaligned].dtype.itemsize} bytes at addresses" in error[1]
    assert len(set(comm.allgather(error[1]))) == 1


def test_distributed_arrays_at_odd_addresses_are_refused(line, cupy):
    halves = cupy.zeros(7, np.uint8)[1:].view(np.float16)
    with pytest.raises(ValueError, match="array has elements of 2 bytes at addresses that are no multiples of 2"):
        pce.distribute(halves, line)


# CuPy's own float32 takes numbers below 2^-126 for 0; on the stand-in they are NumPy's.


def bits(arrays):
    return [to_host(each).tobytes() for each in arrays]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_subnormal_losses_have_bits_of_host(comm, cupy, reduction):
    mine = np.full((3, 4), -100.0, np.float32)
    mine[:, 0] = -6.0 if comm.rank == 0 else -100.0
    targets, upstream = np.zeros(3, np.int64), np.float32([1e-40, 3e-45, 1.0])
    upstream = upstream if reduction == "none" else upstream[:1].reshape(())

    def results(xp):
        logits, chosen = xp.asarray(mine), xp.asarray(targets)
        loss, residuals = pce.softmax_cross_entropy_forward(logits, chosen, comm=comm, reduction=reduction)
        yield loss
        yield pce.softmax_cross_entropy_backward(xp.asarray(upstream), residuals)
        statistics, residuals = pce.class_statistics_forward(logits, chosen, comm=comm)
        yield from statistics
        yield pce.class_statistics_backward(residuals, entropy=xp.asarray(np.float32([1e-40, 3e-45, 1.0])))

    found, expected = list(results(cupy)), list(results(np))
    assert 0 < expected[0].max() < 2.0**-126
    assert bits(found) == bits(expected)


def test_subnormal_sums_and_products_have_bits_of_host(line, cupy):
    values = np.float32([[1e-40, -3e-45, 2e-39, 1e-38]] * 3)

    def results(xp):
        with pce.reproducible():
            x = pce.distribute(xp.asarray(values), line, data=Shard(0))
            ones = pce.distribute(xp.asarray(np.ones((4, 2), np.float32)), line)
            yield from (pce.sum(x), pce.mean(x, 1), x @ ones, pce.cumsum(x, 1))
            far = pce.distribute(xp.asarray(np.float32([[6, -85, -85, -85]] * 3)), line, data=Shard(0))
            yield from (pce.exp(far - 5), pce.log_softmax(far, 1), pce.logsumexp(x, 1))

    found, expected = ([y.full() for y in results(xp)] for xp in (cupy, np))
    assert bits(found) == bits(expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_subnormal_logits_have_order_and_bits_of_host(comm, cupy, dtype):
    mine = np.array([[-1e-39, 0.0, 3e-41, 1e-40 * (1 + comm.rank), -1.0]] * 3).astype(dtype)

    def results(xp):
        yield from pce.top_k(xp.asarray(mine), 4, comm=comm)
        yield from pce.class_statistics(xp.asarray(mine), comm=comm)[:3]

    assert bits(results(cupy)) == bits(results(np))


# GPUs


@pytest.mark.parametrize("elsewhere", ["logits", "targets", "out"])
def test_arrays_on_another_gpu_raise_everywhere(comm, stand_in, elsewhere):
    problem = draw(3, NARROW)
    logits, targets, _ = part_of(comm, problem, "uneven").on_this_rank(problem)
    given = {"logits": logits, "targets": targets, "out": logits}
    for name, array in given.items():
        stand_in.cuda.Device(int(name == elsewhere)).use()
        given[name] = stand_in.asarray(array)
    stand_in.cuda.Device(0).use()
    error = error_of(lambda: pce.softmax_cross_entropy_value_and_grad(**given, comm=comm))
    assert error[0] == "ValueError"
    assert f"{elsewhere} must be on the current GPU, 0, got an array on GPU 1" in error[1]
    assert len(set(comm.allgather(error[1]))) == 1


def test_backward_pass_on_another_gpu_is_refused(comm, stand_in):
    problem = draw(3, NARROW)
    logits, targets, _ = on_device(stand_in, problem, part_of(comm, problem, "uneven"))
    _, residuals = pce.softmax_cross_entropy_forward(logits, targets, comm=comm)
    stand_in.cuda.Device(1).use()
    with pytest.raises(ValueError, match="logits must be on the current GPU, 1, got an array on GPU 0"):
        pce.softmax_cross_entropy_backward(1.0, residuals)
