"""Candidates of `kind="step"`: planted normalisations are named with what they do, and right ones pass."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from candidates.correct import steps as correct
from candidates.step_by_hand import StepByHand, candidate as by_hand
from candidates.wrong import steps as wrong
import pce_mpi as pce
from pce_mpi.conformance import Offer, cases, offer_of, offers, run_case
from pce_mpi.conformance.judging.outcomes import Verdict


class Planted(NamedTuple):
    """A fault, a case, and the words of the finding on 2 and on 3 ranks."""

    fault: type
    case: str
    words: str
    on_three: str = ""

    def __str__(self):
        return f"{self.fault.__name__}-{self.case}"


OWN = "each rank divides by its own count of valid tokens: a token of rank 1 counts 3 times one of rank 0"
APART = "each rank divides each micro-batch by its own count of valid tokens: "
OR_1 = "; where a count is 0, so is the gradient, as with max(count, 1)"
OF_ALL_RANKS = "each micro-batch is divided by its count of valid tokens on all ranks: "
AT_LEAST_1 = "a {} without valid tokens is counted as one token: the divisor is a sum of max(count, 1)"
NO_TOKEN = "the gradient of micro-batch {} of rank {}, which has no valid token, is nan, and so is that of the step"
NO_LOSS = "the loss of micro-batch 0 is nan, where no token of it is valid"
PLANTED = [
    Planted(wrong.OwnCount, "data-ranks", OWN),
    Planted(wrong.OwnCount, "context-ranks", OWN),
    Planted(
        wrong.OwnCount,
        "micro-batches",
        APART + "a token of micro-batch 1 of rank 0 counts 4 times one of micro-batch 0 of rank 0",
        APART + "a token of micro-batch 1 of rank 0 counts 9 times one of micro-batch 1 of rank 2",
    ),
    Planted(wrong.OwnCount, "empty-rank", NO_TOKEN.format(0, 0)),
    Planted(wrong.OwnCount, "empty-micro-batch", NO_TOKEN.format(1, 0)),
    Planted(wrong.OwnCount, "no-valid-token", NO_TOKEN.format(0, 0)),
    Planted(wrong.OwnCountOr1, "empty-micro-batch", APART),
    Planted(wrong.OwnCountOr1, "empty-micro-batch", "and all together count 2/3 of what is due" + OR_1),
    Planted(
        wrong.OwnCountOr1,
        "empty-rank",
        APART
        + "a token of micro-batch 1 counts 3 times one of micro-batch 0, and all together count 1/2 of what is due"
        + OR_1,
        APART
        + "a token of micro-batch 1 counts 3 times one of micro-batch 0, and all together count 2/3 of what is due"
        + OR_1,
    ),
    Planted(
        wrong.OwnCountOr1,
        "one-token",
        "the trainer averages over the 2 context ranks and the 2 micro-batches, and nothing makes up for it; where it "
        'sums, leave "context" and "micro-batches" out of `averaged`, or each rank divides by its own count of valid '
        "tokens: every token counts 1/4 of what is due",
        "the trainer averages over the 3 context ranks and the 2 micro-batches, and nothing makes up for it",
    ),
    Planted(
        wrong.RankWithoutTokensIsOne,
        "empty-rank",
        AT_LEAST_1.format("rank") + ": every token counts 4/5 of what is due",
        AT_LEAST_1.format("rank") + ", or each rank divides by its own count of all tokens, the ignored ones included: "
        "every token counts 8/9 of what is due",
    ),
    Planted(
        wrong.RankWithoutTokensIsOne,
        "one-token",
        AT_LEAST_1.format("rank") + ", or a micro-batch without valid tokens",
        AT_LEAST_1.format("rank") + ", or the gradient is divided by the 3 context ranks, over which the trainer sums",
    ),
    Planted(
        wrong.MicroBatchWithoutTokensIsOne,
        "empty-micro-batch",
        AT_LEAST_1.format("micro-batch of a rank") + ": every token counts 0.867 times what is due",
        AT_LEAST_1.format("micro-batch of a rank") + ": every token counts 7/8 of what is due",
    ),
    Planted(wrong.MicroBatchOfNoRankIsOne, "empty-micro-batch", AT_LEAST_1.format("micro-batch") + ": every token"),
    Planted(wrong.ConstantDivisor, "micro-batches", "every token counts "),
    Planted(wrong.OwnCountSummed, "data-ranks", "and all together count 2 times", "and all together count 3 times"),
    Planted(
        wrong.OwnMicroBatches,
        "micro-batches",
        "each rank divides by its own count of valid tokens: a token of rank 0 counts 1.43 times one of rank 1",
        "each rank divides by its own count of valid tokens: a token of rank 0 counts 2.14 times one of rank 2",
    ),
    Planted(
        wrong.MicroBatchOfAllRanks,
        "micro-batches",
        OF_ALL_RANKS + "a token of micro-batch 2 counts 2 times one of micro-batch 0",
        OF_ALL_RANKS + "a token of micro-batch 2 counts 2.33 times one of micro-batch 1",
    ),
    Planted(wrong.MicroBatchOfAllRanks, "empty-rank", "a token of micro-batch 1 counts 3 times one of", OF_ALL_RANKS),
    Planted(wrong.DataRanksAlone, "context-ranks", OWN),
    Planted(
        wrong.AllTokens,
        "data-ranks",
        "the divisor is the count of all tokens, the ignored ones included: every token counts 0.615 times what is due",
        "the divisor is the count of all tokens, the ignored ones included: every token counts 0.632 times what is due",
    ),
    Planted(
        wrong.LossesThatAreNot0,
        "certain-tokens",
        "the divisor is the count of tokens whose cross entropy is not 0: every token counts 1.5 times what is due",
    ),
    Planted(
        wrong.WithoutFirstTargets,
        "data-ranks",
        "the divisor is the count of targets without the first of each micro-batch: every token counts 1.33 times",
    ),
    Planted(
        wrong.TargetsShiftedTwice,
        "data-ranks",
        "targets that were shifted are shifted once more: each token has the target of the next one",
    ),
    Planted(
        wrong.RoundedDown,
        "micro-batches",
        "the count over the 2 ranks, rounded down: every token counts 1.06 times what is due",
        "the count over the 3 ranks, rounded down: every token counts 1.07 times what is due",
    ),
    Planted(
        wrong.CountOfRank0,
        "data-ranks",
        "every rank takes the count of rank 0 for its own: every token counts 2/3 of what is due",
    ),
    Planted(
        wrong.LastMicroBatch,
        "micro-batches",
        "every micro-batch is divided by the count of the last one: every token counts 4.25 times what is due",
        "every micro-batch is divided by the count of the last one: every token counts 5.33 times what is due",
    ),
    *(
        Planted(
            wrong.HalvedByContext,
            case,
            "the trainer averages over the 2 context ranks, and nothing makes up for it; where it sums, leave "
            f'"context" out of `averaged`{others}: every token counts 1/2 of what is due',
            "the trainer averages over the 3 context ranks, and nothing makes up for it; where it sums, leave "
            f'"context" out of `averaged`{others}: every token counts 1/3 of what is due',
        )
        for case, others in {
            "context-ranks": "",
            "one-token": ", or each rank divides by its own count of valid tokens",
        }.items()
    ),
    Planted(
        wrong.WorldSizeForDataRanks,
        "context-ranks",
        "multiplied by the 2 context ranks, over which the trainer sums; where it averages, add "
        '"context" to `averaged`: every token counts 2 times what is due',
        "the gradient is multiplied by the 3 context ranks, over which the trainer sums",
    ),
    Planted(
        wrong.RanksTwice,
        "data-ranks",
        "the gradient is multiplied by the 2 data ranks, over which the trainer sums; where it averages, add "
        '"data" to `averaged`: every token counts 2 times what is due',
        "every token counts 3 times what is due",
    ),
    Planted(
        wrong.AccumulationTwice,
        "micro-batches",
        "the trainer averages over the 3 micro-batches, and nothing makes up for it; where it sums, leave "
        '"micro-batches" out of `averaged`: every token counts 1/3 of what is due',
    ),
    Planted(
        wrong.NotDividedByRanks,
        "data-ranks",
        "divided by the 2 data ranks, over which the trainer sums: every token counts 1/2 of what is due",
        "divided by the 3 data ranks, over which the trainer sums: every token counts 1/3 of what is due",
    ),
    Planted(wrong.CountInFloat16, "many-tokens", "the count of valid tokens is kept in float16: every token counts"),
    Planted(wrong.CountInBfloat16, "many-tokens", "the count of valid tokens is kept in bfloat16: every token counts"),
    Planted(wrong.NanWithoutToken, "no-valid-token", NO_LOSS),
    Planted(
        wrong.NanWithoutToken, "empty-rank", "the loss of micro-batch 0 is nan, where no token of it is valid (rank 0)"
    ),
    Planted(
        wrong.IgnoredHaveGradient, "data-ranks", "a token of micro-batch 0 of rank 0 that is ignored has a gradient"
    ),
    Planted(
        wrong.AnotherGradient,
        "data-ranks",
        "the gradient of a token in micro-batch 0 of rank 0 is no multiple of that of its cross entropy",
    ),
    Planted(wrong.SumForLoss, "data-ranks", "is right: the sum is not divided by the count of valid tokens"),
    Planted(wrong.SumForLoss, "micro-batches", "is right: the sum is not divided by the count of valid tokens"),
    Planted(wrong.OwnMeanForLoss, "data-ranks", "is right: each micro-batch has the mean of its own valid tokens"),
    Planted(wrong.OwnMeanForLoss, "context-ranks", "is right: each micro-batch has the mean of its own valid tokens"),
    Planted(wrong.AnotherLoss, "data-ranks", "the gradient of the step is right, and its loss is "),
    Planted(wrong.AnotherLoss, "no-valid-token", "the gradient of the step is right, and its loss is "),
    Planted(wrong.RaisesWithoutToken, "empty-rank", "not all ranks raised: ZeroDivisionError"),
    Planted(wrong.CountOfNoTokenRaises, "no-valid-token", "ZeroDivisionError: division by zero"),
]


def case_named(name, candidate):
    (case,) = cases(candidate, pattern=f"step/{name}")
    return case


def test_every_wrong_step_has_a_test():
    def below(kind):
        return {each for one in kind.__subclasses__() for each in (one, *below(one))}

    assert {each for each in below(StepByHand) if each.__module__ == wrong.__name__} == {each.fault for each in PLANTED}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_planted_normalisation_is_named_with_effect(comm, planted):
    candidate = planted.fault()
    outcome = run_case(candidate, case_named(planted.case, candidate), comm)
    assert outcome.failed
    said = "\n".join(finding.text for finding in outcome.findings)
    assert (planted.words if comm.size == 2 else planted.on_three or planted.words) in said, said
    assert run_case(by_hand, case_named(planted.case, by_hand), comm).verdict == Verdict.PASS


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("candidate", [by_hand, *correct.CORRECT, correct.ours], ids=lambda each: type(each).__name__)
def test_right_step_passes_whatever_trainer_averages(comm, candidate):
    outcomes = [run_case(candidate, case, comm) for case in cases(offer_of(candidate))]
    assert len(outcomes) == 10
    assert [(outcome.case, outcome.findings) for outcome in outcomes if outcome.verdict != Verdict.PASS] == []


@pytest.mark.ranks(2)  # the roundings of a dtype do not depend on the ranks
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_step_in_other_dtype_is_named_or_passes(comm, dtype):
    for candidate, words in (
        (by_hand, None),
        (wrong.OwnMicroBatches(), OWN.partition(":")[0]),
        (wrong.AllTokens(), "all tokens, the ign"),
    ):
        offer = replace(offer_of(candidate), dtypes=(dtype,))
        outcomes = {case.name: run_case(candidate, case, comm, offer=offer) for case in cases(offer)}
        assert len(outcomes) == 10
        if words is None:
            assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.PASS}
        else:
            assert words in outcomes["step/data-ranks"].findings[0].text


@pytest.mark.ranks(1)
def test_step_is_judged_in_one_process_without_mpi():
    @offers(kind="step")
    def candidate(logits, targets, *, comm, context_ranks, micro_batches):
        return pce.softmax_cross_entropy_value_and_grad(logits, targets)

    outcome = run_case(candidate, case_named("micro-batches", candidate), None)
    assert "each rank divides each micro-batch by its own count of valid tokens: " in outcome.findings[0].text
    assert run_case(candidate, case_named("data-ranks", candidate), None).verdict == Verdict.PASS


@pytest.mark.ranks(1)
@pytest.mark.parametrize("which", [0, 1], ids=["loss", "gradient"])
@pytest.mark.parametrize("dtype", [np.complex128, np.int64])
def test_step_of_other_numbers_fails(which, dtype):
    @offers(kind="step")
    def candidate(logits, targets, *, comm, context_ranks, micro_batches):
        given = list(pce.softmax_cross_entropy_value_and_grad(logits, targets))
        given[which] = given[which].astype(dtype)
        return tuple(given)

    outcome = run_case(candidate, case_named("data-ranks", candidate), None)
    name = ("loss", "gradient")[which]
    assert f"the {name} has dtype {np.dtype(dtype)}, which is no floating-point one" in outcome.findings[0].text


@pytest.mark.ranks(1)
@pytest.mark.parametrize("which", [1, 2], ids=["dhidden", "dw"])
def test_complex_gradients_of_factors_fail(which):
    @offers(kind="linear_entropy")
    def candidate(hidden, w, **_):
        given = [np.zeros(len(hidden)), np.zeros_like(hidden), np.zeros_like(w)]
        given[which] = given[which].astype(np.complex64)
        return tuple(given)

    (case,) = cases(candidate, pattern="product/float32")
    text = run_case(candidate, case, None).findings[0].text
    assert f"{('dhidden', 'dw')[which - 1]} has dtype complex64, which is no floating-point one" in text


def test_step_has_cases_of_its_own_alone():
    names = [case.name for case in cases(Offer(kind="step"))]
    assert len(names) == 10 and {name.partition("/")[0] for name in names} == {"step"}
    assert not [case for case in cases(Offer()) if case.family == "step"]
