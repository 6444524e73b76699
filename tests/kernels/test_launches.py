"""Budgets of what public functions ask of a GPU, by CuPy on the CPU: launches, copies and waits.

A number that falls belongs here; one that rises needs a reason. Operations on the tape count with their
backward passes.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.distributed.array import DistArray
from ranks.op_cases import OPS, alone, cases_of, listed, replicated


class Asked(NamedTuple):
    launches: int
    uploads: int
    downloads: int
    waits: int
    early_waits: int = 0  # before the last launch


@pytest.fixture
def count(request, cupy):
    """Tells what a call asks for, once all that it launches has been compiled."""
    if not request.config.option.cupy_on_cpu:
        pytest.skip("counted with CuPy on the CPU: `make test-cupy`")
    from cupy_on_cpu.runtime import counts

    def count(call):
        call()
        counts.clear()
        call()
        return Asked(*(counts[name] for name in Asked._fields))

    return count


LOSS = {
    "softmax_cross_entropy": Asked(4, 0, 1, 1),
    "softmax_cross_entropy_forward": Asked(4, 0, 1, 1),
    "softmax_cross_entropy_backward": Asked(2, 0, 0, 0),
    "softmax_cross_entropy_value_and_grad": Asked(6, 0, 1, 1),
    "value_and_grad, targets on the host": Asked(5, 1, 0, 0),
    "value_and_grad, ignored rows": Asked(5, 1, 0, 0),
    "value_and_grad, many rows": Asked(6, 1, 0, 0),
    "value_and_grad, reduction none": Asked(6, 0, 1, 1),
    "value_and_grad, weight": Asked(7, 0, 1, 1),
    "value_and_grad, weight and targets on the host": Asked(5, 2, 0, 0),
    "value_and_grad, smoothing": Asked(6, 1, 1, 1),
    "value_and_grad, smoothing and weight": Asked(8, 0, 1, 1),
    "value_and_grad, int32": Asked(7, 0, 1, 1),
    "value_and_grad, out that is copied": Asked(7, 0, 1, 1, 1),
    "value_and_grad, probabilities": Asked(5, 0, 0, 0),
    "value_and_grad, float16": Asked(6, 0, 1, 1),
    "value_and_grad, float64": Asked(6, 0, 1, 1),
    "value_and_grad, classes first": Asked(6, 0, 1, 1),
    "value_and_grad, one long row": Asked(7, 0, 1, 1),
    "class_statistics": Asked(3, 0, 1, 1),
    "class_statistics, no targets": Asked(2, 0, 0, 0),
    "class_statistics_forward": Asked(3, 0, 1, 1),
    "class_statistics_backward": Asked(2, 0, 0, 0),
    "kl_divergence": Asked(26, 0, 0, 0),
    "kl_divergence_forward": Asked(26, 0, 0, 0),
    "kl_divergence_backward": Asked(5, 0, 0, 0),
    "kl_divergence, rows": Asked(26, 0, 0, 0),
    "kl_divergence_value_and_grad": Asked(31, 1, 0, 0),
    "class_statistics, several targets": Asked(10, 4, 0, 0),
    "class_statistics_backward, several targets": Asked(44, 6, 0, 0),
    "class_statistics, support": Asked(16, 5, 0, 0),
    "class_statistics_backward, support": Asked(3, 1, 0, 0),
    "take_classes": Asked(1, 2, 0, 0),
    "take_classes_forward": Asked(1, 2, 0, 0),
    "take_classes_backward": Asked(21, 3, 0, 0),
    "nucleus": Asked(139, 71, 135, 135, 133),
    "top_k": Asked(28, 0, 0, 0),
    "argmax": Asked(9, 0, 0, 0),
    "linear_cross_entropy_value_and_grad": Asked(20, 1, 1, 1, 1),
    "linear_class_statistics": Asked(3, 1, 1, 1, 1),
    "linear_class_statistics_forward": Asked(3, 1, 1, 1, 1),
    "linear_class_statistics_backward": Asked(7, 0, 0, 0),
    "linear, two chunks": Asked(30, 1, 1, 1, 1),
    "linear, float16": Asked(39, 1, 1, 1, 1),
    "linear, float16, rounded gradient": Asked(37, 1, 1, 1, 1),
}
# Most operations launch kernels and ask for nothing else; their launches, forward and backward:
LAUNCHES = """
negative:5 square:6 exp:6 tanh:13 sin:6 cos:7 abs:6 log:5 sqrt:7 log1p:6 sigmoid:19 relu:6 gelu:31 add:6 subtract:6
multiply:6 divide:9 maximum:18 minimum:19 floor_divide:25 remainder:37 bitwise_and:1 bitwise_or:1 invert:1 clip:11
power:20 equal:1 where:6 astype:4 matmul:8 einsum:11 sum:5 mean:8 logsumexp:16 max:11 min:11 var:31 std:37 cumsum:7
reshape:5 transpose:4 swapaxes:4 concatenate:7 stack:6 squeeze:5 expand_dims:5 split:5 slice:5 broadcast_to:4
redistribute:4 op:7 softmax:16 log_softmax:13 scaled_dot_product_attention:22 layer_norm:41 rms_norm:30 mse:12
argmax:10
"""
OPERATIONS = {name: Asked(int(number), 0, 0, 0) for name, number in (each.split(":") for each in LAUNCHES.split())}
OPERATIONS |= {
    "embedding": Asked(15, 0, 3, 3, 3),
    "cross_entropy": Asked(9, 0, 1, 1, 1),
    "linear_cross_entropy": Asked(19, 1, 1, 1, 1),
    "linear_class_statistics": Asked(36, 1, 1, 1, 1),
    "class_statistics": Asked(9, 0, 1, 1, 1),
    "kl_divergence": Asked(39, 0, 0, 0),
    "take_classes": Asked(27, 4, 1, 1, 1),
    "top_k": Asked(39, 0, 0, 0),
}
TRAINING = {
    "SGD.step": Asked(2, 0, 0, 0),
    "SGD, momentum.step": Asked(4, 0, 0, 0),
    "AdamW.step": Asked(14, 0, 0, 0),
    "clip_grad_norm": Asked(4, 0, 1, 1, 1),
    "distribute": Asked(1, 0, 0, 0),
    "fingerprint": Asked(67, 0, 4, 4, 3),
    "full": Asked(1, 0, 0, 0),
}


def calls_of_loss(cupy):
    """Every function on plain arrays, with what changes the kernels that run."""
    rng = np.random.default_rng(1)
    logits = cupy.asarray(rng.standard_normal((4, 1000), np.float32))
    targets, weight = cupy.asarray(rng.integers(0, 1000, 4)), cupy.asarray(rng.random(1000))
    hidden, w = (cupy.asarray(rng.standard_normal(shape, np.float32)) for shape in ((4, 8), (8, 1000)))
    halves = hidden.astype(np.float16), w.astype(np.float16)
    long = cupy.asarray(rng.standard_normal((1, 20000), np.float32))
    gradient, per_row = cupy.asarray(np.float32(1)), cupy.asarray(np.ones(4, np.float32))
    both = pce.softmax_cross_entropy_value_and_grad
    _, residuals = pce.softmax_cross_entropy_forward(logits, targets)
    _, of_divergence = pce.kl_divergence_forward(logits, logits)
    _, of_statistics = pce.class_statistics_forward(logits, targets)
    several, over = np.array([[0, 3], [1, 1], [4, 2], [2, 999]]), {"support": (np.arange(8), np.arange(0, 9, 2))}
    _, of_several = pce.class_statistics_forward(logits, several)
    _, of_support = pce.class_statistics_forward(logits, **over)
    _, of_chosen = pce.take_classes_forward(logits, several)
    _, of_linear = pce.linear_class_statistics_forward(hidden, w, targets)
    back = pce.class_statistics_backward
    return {
        "softmax_cross_entropy": partial(pce.softmax_cross_entropy, logits, targets),
        "softmax_cross_entropy_forward": partial(pce.softmax_cross_entropy_forward, logits, targets),
        "softmax_cross_entropy_backward": partial(pce.softmax_cross_entropy_backward, gradient, residuals),
        "softmax_cross_entropy_value_and_grad": partial(both, logits, targets),
        "value_and_grad, targets on the host": partial(both, logits, targets.get()),
        "value_and_grad, ignored rows": partial(both, logits, np.array([1, -100, 2, 3])),
        "value_and_grad, many rows": partial(both, cupy.zeros((3000, 8), np.float32), np.zeros(3000, np.int64)),
        "value_and_grad, reduction none": partial(both, logits, targets, reduction="none"),
        "value_and_grad, weight": partial(both, logits, targets, weight=weight),
        "value_and_grad, weight and targets on the host": partial(both, logits, targets.get(), weight=weight.get()),
        "value_and_grad, smoothing": partial(both, logits, targets, label_smoothing=0.1),
        "value_and_grad, smoothing and weight": partial(both, logits, targets, label_smoothing=0.1, weight=weight),
        "value_and_grad, int32": partial(both, logits, targets.astype(np.int32), out=cupy.empty_like(logits)),
        "value_and_grad, out that is copied": partial(both, logits, targets, out=cupy.empty((1000, 4), np.float32).T),
        "value_and_grad, probabilities": partial(both, logits, logits),
        "value_and_grad, float16": partial(both, logits.astype(np.float16), targets),
        "value_and_grad, float64": partial(both, logits.astype(np.float64), targets),
        "value_and_grad, classes first": partial(both, logits.T, targets, axis=0),
        "value_and_grad, one long row": partial(both, long, targets[:1]),
        "class_statistics": partial(pce.class_statistics, logits, targets),
        "class_statistics, no targets": partial(pce.class_statistics, logits),
        "class_statistics_forward": partial(pce.class_statistics_forward, logits, targets),
        "class_statistics_backward": partial(pce.class_statistics_backward, of_statistics, log_prob=per_row, entropy=1),
        "kl_divergence": partial(pce.kl_divergence, logits, logits),
        "kl_divergence_forward": partial(pce.kl_divergence_forward, logits, logits),
        "kl_divergence_backward": partial(pce.kl_divergence_backward, gradient, of_divergence),
        "kl_divergence, rows": partial(pce.kl_divergence, logits, logits, rows=targets > 500),
        "kl_divergence_value_and_grad": partial(pce.kl_divergence_value_and_grad, logits, logits),
        "class_statistics, several targets": partial(pce.class_statistics, logits, several),
        "class_statistics_backward, several targets": partial(back, of_several, log_prob=1.0, entropy=1),
        "class_statistics, support": partial(pce.class_statistics, logits, **over),
        "class_statistics_backward, support": partial(back, of_support, entropy=1),
        "take_classes": partial(pce.take_classes, logits, several),
        "take_classes_forward": partial(pce.take_classes_forward, logits, several),
        "take_classes_backward": partial(pce.take_classes_backward, 1.0, of_chosen),
        "nucleus": partial(pce.nucleus, logits, top_k=50, top_p=0.9, min_p=0.01),
        "top_k": partial(pce.top_k, logits, 5),
        "argmax": partial(pce.argmax, logits),
        "linear_cross_entropy_value_and_grad": partial(pce.linear_cross_entropy_value_and_grad, hidden, w, targets),
        "linear_class_statistics": partial(pce.linear_class_statistics, hidden, w, targets),
        "linear_class_statistics_forward": partial(pce.linear_class_statistics_forward, hidden, w, targets),
        "linear_class_statistics_backward": partial(pce.linear_class_statistics_backward, of_linear, entropy=1),
        "linear, two chunks": partial(pce.linear_cross_entropy_value_and_grad, hidden, w, targets, chunk=2),
        "linear, float16": partial(pce.linear_cross_entropy_value_and_grad, *halves, targets),
        "linear, float16, rounded gradient": partial(
            pce.linear_cross_entropy_value_and_grad, *halves, targets, rounded_gradient=True
        ),
    }


def over_budget(found, budgets):
    """The calls that the table lacks, or that ask for more than it says."""
    return {
        name: f"{asked}, and the budget is {budgets.get(name)}"
        for name, asked in found.items()
        if name not in budgets or any(map(np.greater, asked, budgets[name]))
    }


def test_losses_ask_for_no_more_than_budget(count, cupy):
    found = {name: count(call) for name, call in calls_of_loss(cupy).items()}
    assert over_budget(found, LOSS) == {}
    assert found.keys() == LOSS.keys()


def with_gradient(case, cupy):
    """A call of the operation and of its backward pass."""
    arrays = [cupy.asarray(x) for x in case.in_dtype(np.float32)]
    placed = list(zip(arrays, replicated(case, alone()), case.has_gradient, strict=True))

    def call():
        operands = [DistArray(x, alone(), sharding, requires_grad=needed) for x, sharding, needed in placed]
        results = listed(case.call(*operands))
        for result in results[:1] if any(case.has_gradient) else []:
            pce.sum(result).backward()

    return call


def test_operations_ask_for_no_more_than_budget(count, cupy):
    found = {op: count(with_gradient(cases_of(op)[0], cupy)) for op in OPS}
    assert over_budget(found, OPERATIONS) == {}
    assert found.keys() == OPERATIONS.keys()


def calls_of_training(cupy):
    """The calls of a step of training beside operations, for one parameter."""
    mesh, values = alone(), cupy.asarray(np.ones((3, 5), np.float32))
    w = pce.distribute(values, mesh, requires_grad=True)
    w.grad = pce.distribute(values, mesh)
    optimizers = {"SGD": pce.SGD([w], 0.1), "SGD, momentum": pce.SGD([w], 0.1, 0.9), "AdamW": pce.AdamW([w], 0.1)}
    return {
        **{f"{name}.step": optimizer.step for name, optimizer in optimizers.items()},
        "clip_grad_norm": partial(pce.clip_grad_norm, [w], 1.0),
        "distribute": partial(pce.distribute, values, mesh),
        "fingerprint": partial(pce.fingerprint, w),
        "full": w.full,
    }


def test_training_asks_for_no_more_than_budget(count, cupy):
    found = {name: count(call) for name, call in calls_of_training(cupy).items()}
    assert over_budget(found, TRAINING) == {}
    assert found.keys() == TRAINING.keys()
