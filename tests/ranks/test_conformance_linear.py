"""Fused heads, of the kinds "linear": right ones conform, shipped faults are named, ours pass."""

import pytest

from candidates.correct.linear import Entropy, Head, Rows, Wide
from candidates.shipped import Shipped, assert_named_first, defined_in
from candidates.wild import linear as wild
import pce_mpi as pce
from pce_mpi.conformance import offers
from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.judging.outcomes import Verdict
from pce_mpi.conformance.runs.running import run_case

USUAL = {"dtypes": ("float32", "float64", "float16", "bfloat16"), "dims": (1, 2, 3, 4, 5)}


@offers(
    kind="linear",
    options=("weight", "ignore_index", "label_smoothing", "z_loss", "logit_scale", "softcap", "bias"),
    reductions=("mean", "sum", "none"),
    **USUAL,
)
def our_loss(hidden, w, targets, *, chunk=6, **options):
    found = pce.linear_cross_entropy_value_and_grad(hidden, w, targets, chunk=chunk, **options)
    return found[: 3 + (found.dbias is not None)]


def statistic(kind, name, options):
    @offers(kind=kind, gradient="backward", options=options, **USUAL)
    def candidate(hidden, w, targets=None, **given):
        found, residuals = pce.linear_class_statistics_forward(hidden, w, targets, chunk=8, **given)

        def backward(upstream):
            gradients = pce.linear_class_statistics_backward(residuals, **{name: upstream})
            return gradients[: 2 + (gradients.dbias is not None)]

        return getattr(found, name), backward

    return candidate


our_log_prob = statistic("linear_log_prob", "log_prob", ("ignore_index", "logit_scale", "softcap", "bias"))
our_entropy = statistic("linear_entropy", "entropy", ("logit_scale", "softcap", "bias"))


def failures(candidate, comm, pattern=None, **how):
    outcomes = [run_case(candidate, case, comm, **how) for case in cases(candidate, pattern=pattern)]
    return [(outcome.case, outcome.findings) for outcome in outcomes if outcome.verdict != Verdict.PASS]


FAMILIES = ["random-logits", "ignored", "zero-rows", "dims", "*-shard*", "gathered-logits", "offset", "product"]
FAMILIES += ["chunk-borders", "accumulated-dw"]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("candidate", [our_loss, our_log_prob, our_entropy], ids=["loss", "log_prob", "entropy"])
def test_our_linear_functions_conform(comm, candidate):
    patterns = FAMILIES if candidate is not our_entropy else [each for each in FAMILIES if each != "ignored"]
    patterns = [*patterns, *["accumulated-loss"] * (candidate is our_loss)]
    assert failures(candidate, comm, [*patterns, "bias", "softcap", "padded-softcap", "upstream"]) == []


@pytest.mark.ranks(1)
@pytest.mark.parametrize("head", [Head, Rows, Wide, Entropy])
def test_heads_written_by_hand_pass_every_case(comm, head):
    assert failures(head(), comm) == []


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("head", [Head, Rows, Wide])
def test_heads_written_by_hand_conform(comm, head):
    assert failures(head(), comm, [*FAMILIES, "bias", "temperature", "softcap", "padded-softcap"]) == []


NOT_SUMMED = "dhidden is of each rank's own classes: it is not summed over the ranks; where that is meant, declare it"
SENTINEL = "the loss is infinite, and all logits are finite: a padded column of -inf is taken for the target's"
DROPPED = "the gradient of the entropy is dropped: it is 0 for all classes"
SHIPPED = [
    Shipped(wild.NotSummed, "product/float32", NOT_SUMMED, 2),
    Shipped(wild.NotSummed, "random-logits/bfloat16", NOT_SUMMED, 2),
    Shipped(wild.SummedTwice, "product/float32", "dhidden is {ranks} times too large: each rank has the sum", 2),
    Shipped(wild.Sentinel, "chunk-borders/classes", SENTINEL, 2),
    Shipped(wild.Sentinel, "random-logits/float32", SENTINEL, 2),
    Shipped(wild.PaddedLanes, "padded-softcap/float32", "padded columns count with logits of -softcap"),
    Shipped(wild.PaddedLanes, "softcap/float32", "padded columns count with logits of -softcap"),
    Shipped(wild.NoRowsCount, "ignored/all-rows-mean", "no row counts, and the gradient is divided by their number 0"),
    Shipped(wild.EntropyWithoutGradient, "random-logits/float32", DROPPED),
    Shipped(wild.HalfLogits, "product/bfloat16", "the logits are rounded to bfloat16"),
    Shipped(wild.HalfSums, "accumulated-dw/bfloat16", "dw is added up in bfloat16, in steps of 2 rows ("),
    Shipped(wild.TorchSums, "accumulated-dw/bfloat16", "dw is added up in bfloat16, in steps of 32 rows ("),
    *(
        Shipped(head, f"accumulated-loss/{total}/bfloat16", f"the {total} is added up over chunks of rows in bfloat16")
        for head in (wild.TotalInHalf, wild.TorchTotal)
        for total in ("mean", "sum")
    ),
    Shipped(wild.First1024Features, "product/4096-features", "loss is"),
    Shipped(wild.IgnoredTimes0, "bias/masks-first-classes", "an ignored row adds 0 times the logit of class 0: nan"),
]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_shipped_head_is_named_first(comm, shipped):
    assert_named_first(shipped, comm)


@pytest.mark.ranks(1)
def test_errors_stand_beside_those_of_plain_products(comm):
    errors = {}
    for head in (Head, Wide):
        (case,) = cases(head(), pattern="product/float32")
        errors[head] = {each.quantity: each for each in run_case(head(), case, comm).accuracies}
    for name in ("dhidden", "dw"):
        assert errors[Wide][name].error <= 0.5 < errors[Head][name].error
        assert errors[Wide][name].plain == errors[Head][name].plain > 0.5


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "returned, said",
    [
        (lambda loss, dhidden, dw: loss, r"(loss, dhidden, dw) is due, got"),
        (lambda loss, dhidden, dw: (loss, dw), r"(loss, dhidden, dw) is due, got a tuple of 2"),
        (lambda loss, dhidden, dw: (loss, dhidden, dw.T), r"dw has shape (24, 6), where that of w is due, (6, 24)"),
    ],
)
def test_results_of_another_form_are_told(comm, returned, said):
    @offers(kind="linear")
    def candidate(hidden, w, targets, **given):
        return returned(*Head()(hidden, w, targets, **given))

    (case,) = cases(candidate, pattern="random-logits/float32")
    assert said in run_case(candidate, case, comm).findings[0].text


def test_every_shipped_head_has_a_test():
    assert defined_in(wild) == {each.candidate for each in SHIPPED}
