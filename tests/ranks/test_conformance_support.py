"""Log-probabilities and entropies over a support: right ones conform, and shipped faults are named."""

import numpy as np
import pytest

from candidates.correct.policy import EntropyOverSupport, LogProbOverSupport
from candidates.wild import support as wild
import pce_mpi as pce
from pce_mpi.conformance import offers
from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.judging.comparing import Tolerance
from pce_mpi.conformance.judging.outcomes import Verdict
from pce_mpi.conformance.runs.running import run_case


def ours(kind):
    """A statistic of this package as a candidate."""

    @offers(
        kind=kind,
        dtypes=("float32", "float64", "float16", "bfloat16"),
        options=("support",),
        several_targets=kind == "log_prob",
        gradient="backward",
        dims=(1, 2, 3, 4, 5),
        same_bits=True,
    )
    def statistic(logits, *targets, **options):
        statistics, residuals = pce.class_statistics_forward(logits, *targets, **options)
        return getattr(statistics, kind), lambda upstream: pce.class_statistics_backward(residuals, **{kind: upstream})

    return statistic


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "candidate, strict",
    [(ours("log_prob"), True), (ours("entropy"), True), (LogProbOverSupport(), False), (EntropyOverSupport(), False)],
    ids=["our log_prob", "our entropy", "log_prob by hand", "entropy by hand"],
)
def test_right_statistics_of_a_support_conform(comm, candidate, strict):
    outcomes = [
        run_case(candidate, case, comm, tolerance=Tolerance(strict=strict))
        for case in cases(candidate, pattern="support")
    ]
    assert len(outcomes) > 5
    assert [(each.case, each.findings) for each in outcomes if each.verdict != Verdict.PASS] == []


@pytest.mark.ranks(1, 2, 3)
def test_several_targets_are_judged_one_by_one(comm):
    right = ours("log_prob")
    for case in cases(right, pattern="several-targets"):
        assert run_case(right, case, comm, tolerance=Tolerance(strict=True)).findings == []

    @offers(kind="log_prob", gradient="backward", several_targets=True)
    def of_all(logits, targets, **options):
        log_prob, backward = right(logits, targets, **options)
        return log_prob, lambda upstream: backward(np.ones_like(upstream))

    (case,) = cases(of_all, pattern="several-targets/float32")
    outcome = run_case(of_all, case, comm)
    assert [finding.text[:13] for finding in outcome.findings] == ["target 1 of 3", "target 2 of 3", "target 3 of 3"]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "candidate, words, least_ranks",
    [
        (wild.TrlLogProb, "the support is not looked at: the numbers are those of the softmax over all classes", 1),
        (wild.SlimeEntropy, "the support is not looked at: the numbers are those of the softmax over all classes", 1),
        (wild.LocalIds, "the ids of the support are taken for numbers of each rank's own classes", 2),
        (wild.LocalSum, "the softmax is over the classes of the support that the target's rank has: its sum is", 2),
    ],
)
def test_shipped_fault_of_a_support_is_named(comm, candidate, words, least_ranks):
    (case,) = cases(candidate(), pattern="support/some-classes/float32")
    outcome = run_case(candidate(), case, comm)
    assert outcome.failed == (comm.size >= least_ranks)
    if outcome.failed:
        assert words in outcome.findings[0].text, outcome.findings


def test_support_is_given_as_ids_and_offsets():
    seen = []

    @offers(kind="entropy", gradient="none")
    def entropy(logits, *, support=None, class_start, num_classes, comm):
        seen.append(support)
        return np.zeros(len(logits), np.float32)

    (case,) = cases(entropy, pattern="support/all-classes")
    run_case(entropy, case, None)
    ((ids, offsets),) = seen
    assert sorted(ids[offsets[2] : offsets[3]]) == list(range(24)) and len(offsets) == 7
