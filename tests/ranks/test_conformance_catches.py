"""The proof of the kit: planted faults, one in each class of tests/candidates/wrong, and the words that name them.

Faults that hang or crash are in tests/conformance, as only a launcher survives them.
"""

from dataclasses import replace
import math
from pathlib import Path
import re
from typing import NamedTuple

import numpy as np
import pytest

from candidates.by_hand import ByHand, candidate as by_hand
from candidates.wrong import (
    calls,
    numbers,
    options,
    probabilities,
    rows,
    shapes_and_memory,
    shards,
    special_values,
    textbook,
)
from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.candidates.loading import load
from pce_mpi.conformance.candidates.offers import offer_of, offers
from pce_mpi.conformance.judging.outcomes import Verdict
from pce_mpi.conformance.runs.running import run_case


def subclasses(kind):
    return [each for below in kind.__subclasses__() for each in (below, *subclasses(below))]


FAMILIES = [calls, numbers, options, probabilities, rows, shapes_and_memory, shards, special_values, textbook]
WRONG = {each.__name__: each for each in subclasses(ByHand)}

CORRECT = [
    "candidates.correct.policy:log_prob",
    "candidates.correct.policy:entropy",
    "candidates.correct.sums:sequential",
    "candidates.correct.sums:kahan",
    "candidates.correct.sums:exp2",
    "candidates.correct.sums:online",
    "candidates.by_hand:candidate",
    "candidates.correct.gathered:candidate",
    "candidates.correct.three_all_reduces:candidate",
    "candidates.correct.online_maximum:candidate",
]


class Planted(NamedTuple):
    """A fault: the case that is meant for it, the words of the finding, and on how many ranks it shows."""

    fault: str
    case: str
    words: str
    ranks: int = 1
    dtype: str = "float32"  # of the case with random logits
    most: float = math.inf  # ranks
    kinds: frozenset[str] = frozenset()  # of the findings, where the words do not tell

    def __str__(self) -> str:
        return f"{self.fault}-{self.case}"


ALIASED = frozenset({"inputs modified", "aliasing"})

# They pass a test with random logits.
SUBTLE = [
    # Numbers
    Planted("one_subtracted_after_rounding", "p-near-1/bfloat16", "after rounding to bfloat16", dtype="bfloat16"),
    Planted("rounded_logsumexp", "offset/1e4/float32", "logsumexp is rounded before"),
    Planted("rounded_logsumexp", "offset/1e4/float16", "logsumexp is rounded before"),
    Planted("no_maximum", "logits-of-1000/float32", "exponentials are of logits from which no maximum"),
    Planted("clipped_at_64", "logits-of-1000/float32", "clipped at -64"),
    Planted("logarithm_of_exponential", "logits-of-1000-smoothed/float32", "logarithm of an exponential"),
    Planted("small_gradients_filtered", "many-classes/bfloat16", "0 where numbers up to", dtype="bfloat16"),
    Planted("sums_in_half", "many-classes/bfloat16", "gradient is", dtype="float32"),
    Planted("log_probabilities_in_half", "p-near-1/bfloat16", "log-probabilities are kept in bfloat16"),
    Planted("total_in_half", "many-rows/bfloat16", "the mean is added up over chunks of rows in bfloat16"),
    Planted("first_65535_rows", "many-rows/float32", "from row 65535 on"),
    # Special values
    Planted("masked_shard_is_nan", "masked-shard/last", "all -inf makes the row nan", ranks=2),
    Planted("ignored_rows_times_0", "nan/in-an-ignored-row", "the loss is wrong: nan"),
    Planted("infinite_logsumexp", "plus-inf/in-a-row", "the loss is wrong in rows with nan or infinite logits only"),
    Planted("zero_times_infinity", "masked-classes/every-third", "0 times the logit -inf"),
    Planted("ignored_rows_are_class0", "masked-classes/first-of-each-shard", "adds 0 times the logit of class 0: nan"),
    # Shards
    Planted("equal_shards_assumed", "uneven-shards/any", "which is right where all shards are equal; where", ranks=3),
    Planted("gathered_logits_counted_on_every_rank", "gathered-logits", "= log({ranks}), the number of ranks", ranks=2),
    Planted(
        "target_out_of_range_is_silent",
        "target-out-of-range/one-too-many",
        "targets[3] = 24 is outside [0, 24), and no rank refused it: the loss is",
        kinds=frozenset({"not refused"}),
    ),
    Planted("target_out_of_range_raises_on_one_rank", "target-out-of-range/far", "not all ranks raised", ranks=2),
    Planted(
        "ranks_reduce_in_another_order", "same-on-every-rank", "on rank 0 and", 3, kinds=frozenset({"ranks differ"})
    ),
    # Shapes and memory
    Planted("gradient_transposed_in_4d", "dims/4-D", "gradient is"),
    Planted("class_axis_not_moved", "axis/3-D-second", "loss is"),
    Planted("strides_not_heeded", "padded-columns/sliced-off", "loss is"),
    # Options
    Planted("smoothing_over_local_classes", "label_smoothing/float32", "local classes, not over all", ranks=2),
    Planted("smoothed_sum_not_reduced", "label_smoothing/float32", "never reduced over the ranks", ranks=2),
    Planted("smoothing_without_weights", "pair/weight+label_smoothing", "loss is"),
    Planted("smoothing_of_ignored_rows", "ignored/smoothed", "label smoothing counts ignored rows too"),
    Planted("mean_of_smoothing_over_all_rows", "ignored/smoothed", "label smoothing counts ignored rows too"),
    Planted("smoothing_not_in_gradient", "label_smoothing/float32", "gradient is"),
    Planted("options_left_out", "weight/float32", "weight is not looked at"),
    Planted("options_left_out", "label_smoothing/float32", "label_smoothing is not looked at"),
    Planted("options_left_out", "z_loss/float32", "z_loss is not looked at"),
    Planted("options_left_out", "logit_scale/float32", "logit_scale is not looked at"),
    Planted("options_left_out", "softcap/float32", "softcap is not looked at"),
    Planted("softcap_twice", "softcap/float32", "softcap is applied twice"),
    Planted("divisor_without_weights", "weight/float32", "loss is"),
    Planted("weight_of_each_class", "weight/float32", "everywhere but at the targets"),
    Planted(
        "weight_known_to_the_owner",
        "weight/float32",
        "the gradient is wrong on the shards that do not own the target only",
        2,
    ),
    Planted("z_loss_not_in_gradient", "z_loss/float32", "gradient is"),
    Planted("z_loss_of_local_classes", "z_loss/float32", "the ranks' losses differ", ranks=2),
    Planted("softcap_without_derivative", "softcap/float32", "gradient is"),
    Planted("gradient_without_logit_scale", "logit_scale/float32", "1.333 times what is due"),
    # Rows
    Planted("mean_over_all_rows", "ignore_index/float32", "the mean divides by all 6 rows, not by the 4"),
    Planted("mean_of_losses_that_are_not_0", "p-equal-1", "the mean counts the rows whose loss is not 0"),
    Planted("mean_of_no_rows_is_0", "ignored/all-rows-mean", "the mean divides by max(count, 1)"),
    Planted("ignored_rows_have_a_gradient", "ignore_index/float32", "the gradient is wrong in ignored rows only"),
    Planted("ignore_index_in_range_not_heeded", "ignored/inside", "loss is"),
    Planted("zero_rows_raise", "zero-rows/mean", "division by zero"),
    # Probabilities
    Planted(
        "probabilities_sum_to_1",
        "probabilities/do-not-sum-to-1",
        "the gradient is p - q, which is right where the probabilities q of a row sum to 1",
    ),
    Planted("gradient_of_log_probabilities", "probabilities/sum-to-1", "it has not gone through log_softmax"),
    # Calls
    Planted("upstream_of_the_first_row", "upstream/each-row", "the upstream gradient of row 0 is taken for all rows"),
    Planted("upstream_left_out", "upstream/scalar", "-0.4 times what is due"),
    Planted(
        "second_backward_scales_again",
        "backward-twice/scalar",
        "second backward pass: the gradient is wrong: -2.5 times what is due",
    ),
    Planted("one_buffer_for_all_calls", "two-losses-alive/plain", "first of two losses"),
    Planted("weights_of_the_first_call", "two-losses-alive/other-weights", "second of two losses"),
    Planted("upstream_strides_not_heeded", "upstream/strided", "gradient is"),
    Planted("upstream_strides_not_heeded", "upstream/expanded", "gradient is"),
    Planted("upstream_in_float16", "upstream/loss-scale", "gradient is inf"),
    Planted("upstream_in_float16", "upstream/inexact-in-halves", "gradient is"),
    Planted("gradients_add_up", "one-after-the-other", "second of two losses: gradient is"),
    Planted("mean_over_own_rows", "rows-sharded/mean", "loss is", ranks=2),
    Planted("targets_in32_bits", "target-out-of-range/wraps-in-int32", "4294967297 is outside [0, 24)"),
    Planted("targets_taken_for64_bits", "targets/int32", "loss is"),
    Planted("target_strides_not_heeded", "targets/strided", "loss is"),
    Planted("target_strides_not_heeded", "targets/expanded", "loss is"),
    Planted("ignored_after_shift", "ignored/as-local-number", "loss is", ranks=2),
    Planted("ignored_after_shift", "ignored/as-shifted-number", "loss is", ranks=2),
    Planted(
        "first32768_classes",
        "many-classes/more-than-32768-a-shard",
        "on: 0 where numbers up to",
        most=1,
    ),
    Planted("first65536_classes", "many-classes/more-than-65536-a-shard", "0 where numbers up to"),
    Planted("online_maximum_of_masked_block", "masked-classes/first-block", "is nan where"),
    Planted("sum_of_masks_overflows", "finite-mask/lowest-smoothed", "a sum of log p over classes and rows overflows"),
    Planted("large_masks_taken_for_infinity", "finite-mask/1e30-smoothed", "loss is"),
    # A sum of two is the same in either order: a rank must have three of the 24 classes.
    Planted("not_deterministic", "same-in-every-run", "two calls with the same arguments gave another", most=11),
]

PLANTED = [
    *SUBTLE,
    Planted("small_gradients_filtered", "many-classes/float32", "0 where numbers up to"),
    Planted(
        "first_class_of_a_shard",
        "targets-at-shard-borders/equal",
        "a mask begins a class too late",
    ),
    Planted(
        "last_class_of_a_shard",
        "targets-at-shard-borders/equal",
        "a mask ends a class too early",
    ),
    Planted(
        "one_subtracted_on_every_shard",
        "targets-on-one-rank",
        "taken for a class of this one: it is clamped, and not masked, in the gradient only",
        2,
    ),
    Planted(
        "gradient_reduced_twice",
        "reduction/mean",
        "the gradient is {ranks} times too large: it is summed over the ranks once more",
        2,
    ),
    Planted("softmax_of_local_classes", "random-logits/float32", "its sum is never reduced over the ranks", 2),
    Planted("sums_of_other_maxima", "random-logits/float32", "that are relative to maxima of their own", 2),
    Planted("sums_of_other_maxima_afterwards", "logits-of-1000/float32", "relative to maxima of their own", 2),
    Planted("logsumexps_added", "random-logits/float32", "the ranks' logsumexps are added", 2),
    Planted("global_numbers_for_local", "random-logits/float32", "global class numbers are taken for numbers of", 2),
    Planted("backward_sees_other_logits", "random-logits/float32", "the probabilities of row 2 sum to 1.00"),
    Planted("mask_ends_too_late", "targets-at-shard-borders/equal", "is taken for a class of this one: a mask ends", 2),
    Planted("target_clamped_not_masked", "random-logits/float32", "it is clamped, and not masked", 2),
    Planted("target_wrapped_not_masked", "random-logits/float32", "its number is wrapped, and not masked", 2),
    Planted("global_number_wrapped", "many-classes/float32", "its number is wrapped, and not masked", 2),
    Planted("maxima_left_in", "random-logits/float32", "relative to maxima of their own", 2),
    Planted("class_numbers_in_bfloat16", "many-classes/float32", "class numbers are rounded to bfloat16"),
    Planted("class_numbers_in_uint8", "many-classes/float32", "class numbers are cut to uint8"),
    Planted("targets_shifted_twice", "random-logits/float32", "the targets are shifted by one row against"),
    Planted("shards_in_reverse", "random-logits/float32", "the shards are taken in the order of ranks {last}, ", 2),
    Planted("first_two_shards_exchanged", "random-logits/float32", "are taken in the order of ranks 1, 0, 2", 3),
    Planted("padded_to_8", "uneven-shards/any", "padding counts, with logits of 0"),
    Planted("padded_to_64", "random-logits/float32", "padding counts, with logits of 0"),
    Planted("padded_to_128", "random-logits/float32", "padding counts, with logits of 0"),
    Planted("padded_to_largest", "uneven-shards/any", "padding counts, with logits of 0", 2),
    Planted("softcap_of_30", "random-logits/float32", "a softcap of 30 is applied, and none was given"),
    Planted("softcap_of_15", "random-logits/float32", "a softcap of 15 is applied, and none was given"),
    Planted("loss_on_rank_0_alone", "same-on-every-rank", "the ranks' losses differ: the loss is wrong on rank", 2),
    Planted("mean_of_the_ranks_means", "ignored/unevenly-over-ranks", "loss is", 2),
    Planted("other_bits_on_other_ranks", "same-bits/float32", "the bits differ from one rank's (", ranks=2),
    Planted(
        "means_of_chunks_added", "random-logits/float32", "means of chunks of 4 rows are added up, and chunks count "
    ),
    Planted("means_of_chunks_averaged", "random-logits/float32", "means of chunks of 4 rows are averaged, and chunks "),
    Planted("ignore_index_not_looked_at", "ignored/inside", "ignore_index is not looked at ("),
    Planted("ignore_index_not_looked_at", "ignored/negative", "ignore_index is not looked at ("),
    Planted("overwrites_logits", "inputs-unmodified", "logits were modified"),
    Planted("gradient_in_the_logits", "results-not-aliased", "the gradient shares memory with logits", kinds=ALIASED),
]

# Run by tests/conformance/test_hangs.py.
DEADLOCKS_AND_CRASHES = {"empty_shard_waits", "target_out_of_range_waits", "empty_shard_crashes"}


# Tests of their own plant the faults of other kinds of candidates.
OTHER_KINDS = {"steps", "placements"}


def wrong(fault):
    """The candidate with that fault."""
    return WRONG[fault.title().replace("_", "")]()


def test_every_wrong_candidate_has_a_test():
    assert set(WRONG) == {type(wrong(each.fault)).__name__ for each in PLANTED}
    files = {path.stem for path in Path(calls.__file__).parent.glob("*.py")}
    assert files == {module.__name__.rpartition(".")[2] for module in FAMILIES} | DEADLOCKS_AND_CRASHES | OTHER_KINDS


def case_named(name, candidate):
    (found,) = cases(candidate, pattern=name)
    return found


# Three ranks show all but what one rank has too few classes for.
@pytest.mark.parametrize(
    "planted", [pytest.param(each, marks=pytest.mark.ranks(min(3, each.most))) for each in PLANTED], ids=str
)
def test_planted_fault_is_caught_and_named(comm, planted):
    if not planted.ranks <= comm.size <= planted.most:
        pytest.skip(f"shows on {planted.ranks} to {planted.most} ranks")
    candidate = wrong(planted.fault)
    case = case_named(planted.case, candidate)
    outcome, without_fault = run_case(candidate, case, comm), run_case(by_hand, case, comm, offer=offer_of(candidate))
    assert outcome.failed
    assert planted.kinds in (frozenset(), {finding.kind for finding in outcome.findings})
    said = "\n".join(finding.text for finding in outcome.findings)
    assert planted.words.format(ranks=comm.size, last=comm.size - 1) in said, said
    assert without_fault.verdict == Verdict.PASS, without_fault.findings


@pytest.mark.ranks(3)  # shards of equal length, as everybody's test has them
@pytest.mark.parametrize("planted", SUBTLE, ids=str)
def test_subtle_fault_passes_random_logits(comm, planted):
    candidate = wrong(planted.fault)
    outcome = run_case(candidate, case_named(f"random-logits/{planted.dtype}", candidate), comm)
    assert outcome.verdict == Verdict.PASS, outcome.findings


@pytest.mark.ranks(2)  # rank 0 judges the results of all
@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("0.5", "the loss has dtype <U3, which is no floating-point one"),
        (np.array("a loss"), "the loss has dtype <U6, which is no floating-point one"),
        (np.array([(1, 0.5)], "i4,f4"), "the loss has dtype [('f0', '<i4'), ('f1', '<f4')], which is no"),
    ],
    ids=repr,
)
def test_result_of_no_numbers_is_a_finding(comm, result, words):
    """One that also takes a target beyond the classes has both findings: neither hides the other."""

    @offers(gradient="none")
    def candidate(logits, targets, *, class_start, num_classes, comm):
        return result

    both, alone = (
        run_case(candidate, case_named(name, candidate), comm).findings
        for name in ("target-out-of-range/far", "random-logits/float32")
    )
    assert [finding.kind for finding in both] == ["not refused", "result"]
    assert re.search(r"^targets\[\d\] = \d+ is outside \[0, \d+\), and no rank refused it; where", both[0].text)
    assert [finding.kind for finding in alone] == ["result"]
    assert words in both[1].text and words in alone[0].text


@pytest.mark.ranks(2, 3)  # on one rank there is nothing to compare with
def test_other_bits_fail_only_if_declared(comm):
    candidate = load("candidates.correct.three_all_reduces:candidate")
    declared = replace(offer_of(candidate), same_bits=True)
    outcomes = [run_case(candidate, case, comm, offer=declared) for case in cases(declared)]
    failed = {outcome.case: outcome.findings for outcome in outcomes if outcome.failed}
    assert {"random-logits/float32", "two-losses-alive/plain", "same-bits/float32"} <= set(failed)
    assert {finding.kind for findings in failed.values() for finding in findings} == {"other bits"}
    # `test_correct_candidate_passes` has all its cases without the declaration
    assert run_case(candidate, case_named("random-logits/float32", candidate), comm).verdict == Verdict.PASS


# They differ in how a rank adds up its own classes, and reduce over the ranks as `online` does, which runs on three.
WITHIN_A_RANK = {f"candidates.correct.sums:{name}" for name in ("sequential", "kahan", "exp2")}


# One rank and an odd number of them show it. All rows are on every rank: one rank shows what very many of them do.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ranks(*([1] if name in WITHIN_A_RANK else [1, 3]))) for name in CORRECT],
)
def test_correct_candidate_passes(comm, name):
    candidate = load(name)
    chosen = [case for case in cases(offer_of(candidate)) if comm.size == 1 or case.family != "many-rows"]
    outcomes = [run_case(candidate, case, comm) for case in chosen]
    failed = [(outcome.case, outcome.findings, outcome.accuracies) for outcome in outcomes if outcome.failed]
    assert failed == []
