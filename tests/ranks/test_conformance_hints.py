"""The declarations that a report asks of the author of a candidate, tried on that candidate."""

from functools import partial, update_wrapper
import re

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.conformance import cases, offers, run_case

# A mean over rows is divided by their number once.
SELECTION = [
    "random-logits",
    "dims/3-D",
    "smoothed-rows",
    "two-losses-alive/plain",
    "inputs-unmodified",
    "gathered-logits",
]


def loss_alone(logits, targets, *, class_start, num_classes, comm):
    return pce.softmax_cross_entropy(logits, targets, comm=comm, num_classes=num_classes)


def loss_and_backward(logits, targets, *, class_start, num_classes, comm, label_smoothing=0.0):
    loss, residuals = pce.softmax_cross_entropy_forward(
        logits, targets, comm=comm, num_classes=num_classes, label_smoothing=label_smoothing
    )
    return loss, lambda dloss: pce.softmax_cross_entropy_backward(dloss, residuals)


@offers(gradient="backward")
def value_and_grad(logits, targets, *, class_start, num_classes, comm):
    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, num_classes=num_classes)


def loss_per_row(logits, targets, *, class_start, num_classes, comm):
    return pce.softmax_cross_entropy_value_and_grad(
        logits, targets, comm=comm, num_classes=num_classes, reduction="none"
    )


@offers(reductions=("none",))
def mean(logits, targets, *, class_start, num_classes, comm):
    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, num_classes=num_classes)


@offers(reductions=("none",))
def log_prob(logits, targets, *, class_start, num_classes, comm):
    loss, gradient = loss_per_row(logits, targets, class_start=class_start, num_classes=num_classes, comm=comm)
    return -loss, -gradient


@offers(kind="log_prob")
def loss_declared_as_log_prob(logits, targets, *, class_start, num_classes, comm):
    return loss_per_row(logits, targets, class_start=class_start, num_classes=num_classes, comm=comm)


@offers(reductions=("none",), gradient="none")
def entropy(logits, targets=None, *, class_start, num_classes, comm):
    return pce.class_statistics(logits, comm=comm, num_classes=num_classes).entropy


def overwrites(logits, targets, *, class_start, num_classes, comm):
    loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, num_classes=num_classes)
    logits[...] = gradient
    return loss, logits


def unchecked(logits, targets, *, class_start, num_classes, comm):
    return value_and_grad(
        logits,
        np.clip(targets, 0, num_classes - 1),
        class_start=class_start,
        num_classes=num_classes,
        comm=comm,
    )


def of_any_width(logits, targets, *, class_start, num_classes, comm):
    shards = comm.allreduce(logits.shape[-1])
    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, num_classes=shards)


DUE = {"value": "(loss, dlogits)", "backward": "(loss, backward)", "none": "the loss alone"}
CANDIDATES = {
    loss_alone: '(gradient="none")',
    loss_and_backward: '(gradient="backward")',
    value_and_grad: '(gradient="value")',
    loss_per_row: '(reductions=("none",))',
    mean: '(reductions=("mean",))',
    log_prob: '(kind="log_prob")',
    loss_declared_as_log_prob: '(kind="loss", reductions=("none",))',
    entropy: '(kind="entropy")',
    overwrites: "(overwrites_logits=True)",
    unchecked: "(checks_targets=False)",
    of_any_width: "(num_classes=False)",
}


def failures(candidate, comm):
    pattern = ["random-logits", "uneven-shards", "upstream", "label_smoothing", "inputs-unmodified", "two-losses-alive"]
    pattern += {"unchecked": ["target-out-of-range"], "of_any_width": ["gathered-logits"]}.get(candidate.__name__, [])
    outcomes = [run_case(candidate, case, comm) for case in cases(candidate, pattern=pattern)]
    assert outcomes
    return [outcome for outcome in outcomes if outcome.failed]


@pytest.mark.ranks(3)  # the words do not depend on the ranks
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.__name__)
def test_declaration_that_report_asks_for_is_right(comm, candidate):
    if candidate is of_any_width and comm.size == 1:
        pytest.skip("the logits of all classes are the only shard")
    texts = {finding.text for outcome in failures(candidate, comm) for finding in outcome.findings}
    hints = {hint for text in texts for hint in re.findall(r"@offers(\((?:[^()]|\([^()]*\))*\))", text)}
    assert hints == {CANDIDATES[candidate]}, texts
    # `declared` is an attribute of the function, which other tests may take.
    declared = eval(f"offers{hints.pop()}")(update_wrapper(partial(candidate), candidate))
    assert failures(declared, comm) == []


@pytest.mark.ranks(3)  # the words do not depend on the ranks
@pytest.mark.parametrize("gradient", ["value", "backward", "none"])
def test_two_quantities_in_tuple_need_two_candidates(comm, gradient):
    @offers(gradient=gradient, reductions=("none",))
    def both(logits, targets, *, class_start, num_classes, comm):
        of_rows = pce.class_statistics(logits, targets, comm=comm, num_classes=num_classes)
        return of_rows.log_prob, of_rows.entropy

    (failed, *_) = failures(both, comm)
    assert failed.findings[0].text.startswith(
        f"{DUE[gradient]} is due, got a tuple of 2: ndarray, ndarray of one shape; where they are log-probabilities"
    )

    @offers(kind="log_prob", gradient="none")
    def first(*arrays, **given):
        return both(*arrays, **given)[0]

    @offers(kind="entropy", gradient="none")
    def second(logits, **given):
        return both(logits, np.zeros(logits.shape[:-1], np.int64), **given)[1]

    assert failures(first, comm) == failures(second, comm) == []
