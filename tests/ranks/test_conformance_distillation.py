"""Divergences of the kinds "kl" and "topk_kl": right ones conform, shipped faults are named, ours pass strictly."""

from dataclasses import replace

import numpy as np
import pytest

from candidates.correct.distillation import Differences, Forward, ReverseTopK, TopK
from candidates.shipped import Shipped, assert_named_first, defined_in
from candidates.wild import distillation as wild
import pce_mpi as pce
from pce_mpi.conformance import offers
from pce_mpi.conformance.candidates.catalogue import cases, catalogue
from pce_mpi.conformance.candidates.fitting import unmet_need
from pce_mpi.conformance.candidates.offers import Offer, offer_of
from pce_mpi.conformance.judging.comparing import Tolerance
from pce_mpi.conformance.judging.outcomes import Outcome, Report, Verdict
from pce_mpi.conformance.reports.summary import facts, hint
from pce_mpi.conformance.runs.running import run_case


def ours(direction, squared, beta=0.5, declared=None):
    """This package's own divergence as a candidate."""

    @offers(
        kind="kl",
        direction=direction,
        beta=beta if declared is None else declared,
        temperature_squared=squared,
        dtypes=("float32", "float64", "float16", "bfloat16"),
        options=("temperature",),
        reductions=("mean", "sum", "none"),
        gradient="backward",
        dims=(1, 2, 3, 4, 5),
        any_axis=True,
        same_bits=True,
    )
    def divergence(student, teacher, *, temperature=1.0, **options):
        factor = temperature**2 if squared else 1.0
        options |= {"direction": direction, "beta": beta, "logit_scale": 1 / temperature}
        value, residuals = pce.kl_divergence_forward(student, teacher, **options)
        return value * value.dtype.type(factor), lambda dloss: pce.kl_divergence_backward(dloss * factor, residuals)

    return divergence


def failures(candidate, comm, pattern=None, **how):
    outcomes = [run_case(candidate, case, comm, **how) for case in cases(candidate, pattern=pattern)]
    return [(outcome.case, outcome.findings) for outcome in outcomes if outcome.verdict != Verdict.PASS]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "meaning",
    [("forward", True), ("reverse", False), ("jensen-shannon", False), ("jensen-shannon", True, 0.1)],
    ids=str,
)
def test_our_divergences_pass_a_strict_judge(comm, meaning):
    families = [
        "far-teacher",
        "near-teacher",
        "close-teacher",
        "equal-logits",
        "certain-teacher",
        "temperature",
        "masked-*",
    ]
    families += ["offset", "logits-of-1000", "reduction", "upstream", "dims", "uneven-shards", "empty-shard"]
    assert failures(ours(*meaning), comm, families, tolerance=Tolerance(strict=True)) == []


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("candidate", [Forward(), TopK(), ReverseTopK()], ids=lambda each: type(each).__name__)
def test_divergences_written_by_hand_conform(comm, candidate):
    assert failures(candidate, comm) == []


@pytest.mark.ranks(3)  # the directions are those of one process
def test_other_direction_over_largest_classes_is_named(comm):
    candidate = ReverseTopK()
    offer = replace(candidate.offer, direction="forward")
    (case,) = cases(offer, pattern="far-teacher/float32")
    outcome = run_case(candidate, case, comm, offer=offer)
    assert 'this is KL(student || teacher): where that is meant, declare it: @offers(direction="reverse")' in str(
        outcome.findings
    )
    with pytest.raises(ValueError, match="direction='jensen-shannon' says nothing of a candidate of kind='topk_kl'"):
        offer_of(offers(kind="topk_kl", direction="jensen-shannon")(lambda student, teacher: None))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [{}, {"classes": 1000}], ids=str)
def test_float32_has_digits_of_close_divergences(comm, seed, size):
    """Those that log-probabilities in float32 do not have, within half of what is allowed."""
    (case,) = cases(Differences(), pattern="close-teacher")
    outcome = run_case(Differences(), case, comm, seed=seed, tolerance=Tolerance(factor=0.5), **size)
    assert outcome.verdict == Verdict.PASS, outcome.findings
    rounded = run_case(wild.LogProbabilitiesInSingle(), case, comm, seed=seed, **size)
    assert rounded.verdict == Verdict.FAIL


@pytest.mark.ranks(1, 3)
def test_weight_of_wrong_side_is_named(comm):
    for beta, text in ((0.9, "beta weighs the student, not the teacher"), (0.5, "the mean has equal weights")):
        candidate = ours("jensen-shannon", False, beta, declared=0.1)
        (case,) = cases(candidate, pattern="far-teacher/float32")
        outcome = run_case(candidate, case, comm)
        said = str(outcome.findings)
        assert outcome.verdict == Verdict.FAIL
        assert text in said
        assert f"@offers(beta={beta})" in said
    with pytest.raises(ValueError, match=r"beta=0.1 says nothing of a candidate of kind='kl'"):
        offer_of(offers(kind="kl", direction="forward", beta=0.1)(lambda student, teacher: None))
    with pytest.raises(ValueError, match="beta must be a number from 0 to 1, got 2"):
        offer_of(offers(kind="kl", direction="jensen-shannon", beta=2)(lambda student, teacher: None))


ONCE_MORE = "the gradient is {ranks} times too large: it is summed over the ranks once more"
SHIPPED = [
    Shipped(wild.AutomodelKL, "random-logits/float32", ONCE_MORE, 2),
    Shipped(wild.AutomodelKL, "temperature/float32", ONCE_MORE, 2),
    Shipped(wild.ModelOptimizerTopK, "far-teacher/float32", ONCE_MORE, 2),
    Shipped(
        wild.SkyRLTopK,
        "random-logits/float32",
        "the 4 classes are each rank's own: the divergence depends on the number of ranks",
        2,
    ),
    Shipped(wild.LocalTeacher, "far-teacher/float32", "the teacher's softmax is of each rank's own classes only", 2),
    Shipped(wild.LocalStudent, "far-teacher/float32", "the student's softmax is of each rank's own classes only", 2),
    Shipped(wild.LocalSoftmaxes, "far-teacher/float32", "both softmaxes are of each rank's own classes only", 2),
    Shipped(wild.NoTemperatureInGradient, "temperature/float32", "the gradient lacks the factor 1 / temperature"),
    Shipped(wild.TemperatureOfStudent, "temperature/float32", "the temperature divides the student's logits only"),
    Shipped(
        wild.LocalSum,
        "far-teacher/float32",
        "the divergence is of each rank's own classes only: it is never reduced",
        2,
    ),
    Shipped(
        wild.LogProbabilitiesInSingle,
        "close-teacher/float32",
        "the divergence has the errors of log-probabilities in float32 that were subtracted",
    ),
    Shipped(wild.CrossEntropy, "far-teacher/float32", "the entropy of the teacher is not subtracted"),
    Shipped(wild.MeanOfEntries, "reduction/mean", "the mean divides by rows times classes, 144, not by the"),
    Shipped(wild.MeanOfEntries, "logits-of-1000/float32", "the mean divides by rows times classes, 144, not by the"),
    Shipped(wild.ZeroTimesInfinity, "masked-classes/every-third", "0 times -inf gives nan: a class to which the"),
    Shipped(wild.Reverse, "far-teacher/float32", "this is KL(student || teacher): where that is meant, declare"),
    Shipped(wild.TemperatureSquared, "temperature/float32", "has the square of the temperature as a factor"),
    Shipped(wild.Renormalized, "far-teacher/float32", "the probabilities of the largest classes are renormalized"),
]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_shipped_divergence_is_named_first(comm, shipped):
    assert_named_first(shipped, comm)


def test_every_shipped_divergence_has_a_test():
    assert defined_in(wild) == {each.candidate for each in SHIPPED}


@pytest.mark.parametrize("wrong", [{"direction": "backward"}, {"rest": "none"}, {"options": ("weight",)}])
def test_wrong_declaration_of_a_divergence_raises(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        offers(kind="kl", **wrong)


def test_a_divergence_is_told_what_opens_its_cases():
    offer = Offer(kind="kl", dtypes=("float32",))
    outcomes = [
        Outcome(case.name, case.catches, Verdict.NOT_OFFERED)
        for case in catalogue(offer)
        if unmet_need(offer, case.needs, case.dtype)
    ]
    report = Report("divergence", offer, (1,), {}, 0, False, 1.0, outcomes)
    assert "opens" in hint(report) and "probabilities" not in hint(report)
    assert "a teacher's logits" in facts(report)["offers"]


def test_teacher_is_given_in_place_of_targets():
    seen = []

    @offers(kind="topk_kl", reductions=("none",))
    def candidate(student, teacher, *, top_k, class_start, num_classes, comm):
        seen.append((student.shape, teacher.shape, top_k))
        return np.zeros(len(student), np.float32), np.zeros_like(student)

    (case,) = cases(candidate, pattern="random-logits/float32")
    run_case(candidate, case, None)
    assert seen == [((6, 24), (6, 24), 4)]
