"""The judge: answers that pass, and the measured errors of those that do not."""

from dataclasses import replace
import re

import numpy as np
import pytest

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance import Gradient, Offer, Tolerance, cases
from pce_mpi.conformance.candidates.fitting import problem_of
from pce_mpi.conformance.judging.judge import Answer, judge
from pce_mpi.conformance.judging.outcomes import Finding
from pce_mpi.conformance.problems.cases import DTYPES
from pce_mpi.conformance.problems.kinds.loss import LOSS
from pce_mpi.conformance.problems.problem import Problem
from pce_mpi.ulps import ulp
import ulps

USUAL, STRICT = Tolerance(), Tolerance(strict=True)
RANKS = 3
EVERYTHING = Offer(
    dtypes=DTYPES,
    options=("ignore_index", "label_smoothing"),
    reductions=("mean", "sum", "none"),
    probabilities=True,
    dims=(2, 3),
    gradient=Gradient.BACKWARD,
)


def problem_named(name, **changes):
    case = next(case for case in cases(EVERYTHING) if case.name == name)
    return replace(problem_of(case, EVERYTHING, RANKS), **changes)


def answers_of(problem, loss=None, gradient=None, loss_dtype=None):
    """The answers of all ranks: the exact values, rounded, unless given."""
    loss = problem.expected[0] if loss is None else loss
    gradient = problem.expected[1] if gradient is None else gradient
    with np.errstate(all="ignore"):
        loss = np.asarray(loss).astype(loss_dtype or (np.float64 if problem.dtype == np.float64 else np.float32))
        gradient = gradient.astype(problem.dtype)
    return [Answer(loss.copy(), problem.part(gradient, rank)) for rank in range(problem.ranks)]


def kinds(problem, answers, tolerance=USUAL):
    return [finding.kind for finding in judge(problem, answers, tolerance).findings]


def probabilities_of(problem, dtype):
    """The textbook softmax, computed in `dtype`."""
    x = problem.logits.astype(dtype)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True, dtype=dtype)


def minus_one_at_targets(problem, p):
    gradient = p.copy()
    gradient[np.arange(problem.rows), problem.targets] -= np.ones((), p.dtype)
    return gradient / np.asarray(problem.rows, p.dtype)


ANSWERED = [case for case in cases(EVERYTHING) if case.expects == "an answer" and case.rows * case.classes < 10_000]


@pytest.mark.parametrize("tolerance", [USUAL, STRICT], ids=["usual", "strict"])
@pytest.mark.parametrize("case", ANSWERED, ids=str)
def test_exact_values_rounded_pass_every_case(case, tolerance):
    problem = problem_of(case, EVERYTHING, RANKS)
    judgement = judge(problem, answers_of(problem), tolerance)
    assert judgement.findings == [] and judgement.picture is None
    for accuracy in judgement.accuracies:
        assert accuracy.error == accuracy.best <= 0.501 < accuracy.allowed


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_depends_on_the_dtype(dtype):
    values = [0.0, 1e-30, 1.0, 1.5, -2.0, 3e4, 6e-8]
    assert ulp(values, dtype).tolist() == ulps.ulp(values, dtype_named(dtype)).tolist()


@pytest.mark.parametrize(("dtype", "usual", "strict"), [("float64", 32, 8), ("float32", 8, 5), ("bfloat16", 2, 1)])
def test_tolerance_sets_how_many_ulps_pass(dtype, usual, strict):
    problem = problem_named(f"random-logits/{dtype}", reduction="none")
    exact = problem.expected[1]
    row, number = 2, int(problem.targets[2])
    floor = ulp(1.0, "float64" if dtype == "float64" else "float32")
    for tolerance, allowed in ((USUAL, usual), (STRICT, strict), (Tolerance(factor=3.0), 3 * usual)):
        unit = max(ulp(exact[row, number], dtype), 0.0 if tolerance.strict else floor)
        for ulps_off, passes in ((allowed - 0.6, True), (allowed + 0.6, False)):
            gradient = exact.copy()
            gradient[row, number] += ulps_off * unit
            found = kinds(problem, answers_of(problem, gradient=gradient), tolerance)
            assert found == ([] if passes else ["gradient at targets"])


def test_entry_off_target_is_measured_by_row_maximum():
    problem = problem_named("random-logits/float32", reduction="none")
    gradient = problem.expected[1].copy()
    row = 1
    least = int(np.argmin(np.abs(gradient[row])))
    others = np.delete(gradient[row], problem.targets[row])
    assert np.abs(others).max() < 0.5 * np.abs(gradient[row]).max()
    unit = ulp(np.abs(others).max(), "float32")
    gradient[row, least] += 4.4 * unit
    assert abs(gradient[row, least] - problem.expected[1][row, least]) > 100 * ulp(gradient[row, least], "float32")
    assert kinds(problem, answers_of(problem, gradient=gradient), STRICT) == []
    gradient[row, least] += 1.2 * unit
    assert kinds(problem, answers_of(problem, gradient=gradient), STRICT) == ["gradient"]


def test_small_gradients_beside_the_target_count_in_half():
    problem = problem_named("many-classes/bfloat16")
    filtered = np.where(np.abs(problem.expected[1]) < 2.0**-12, 0.0, problem.expected[1])
    assert kinds(problem, answers_of(problem, gradient=filtered)) == ["gradient"]


def test_p_minus_1_before_rounding_to_bfloat16_passes():
    problem = problem_named("p-near-1/bfloat16")
    p = probabilities_of(problem, np.float32)
    for tolerance in (USUAL, STRICT):
        right = minus_one_at_targets(problem, p)
        wrong = minus_one_at_targets(problem, p.astype(problem.dtype).astype(np.float32))
        # the smallest entries are below an ulp of 1 in float32: only the strict judge sees them
        expected = [] if tolerance == USUAL else ["gradient at targets"]
        assert kinds(problem, answers_of(problem, gradient=right), tolerance) == expected
        assert kinds(problem, answers_of(problem, gradient=wrong), tolerance) == ["gradient at targets"]


def test_p_minus_1_in_float32_passes_unless_strict():
    problem = problem_named("p-near-1/float32")
    answers = answers_of(problem, gradient=minus_one_at_targets(problem, probabilities_of(problem, np.float32)))
    assert kinds(problem, answers) == []
    # Differences of 16 are not exact in float32 either, so that other entries are off by more than 5 ulp as well.
    assert kinds(problem, answers, STRICT) == ["gradient"]


@pytest.mark.parametrize("offset", ["1e3", "1e4"])
def test_offset_of_logits_excuses_no_error(offset):
    problem = problem_named(f"offset/{offset}/float32", reduction="none")
    x = problem.logits
    top = x.max(axis=-1)
    logsumexp = top + np.log(np.exp(x - top[:, None]).sum(axis=-1))
    losses = logsumexp - x[np.arange(problem.rows), problem.targets]
    assert losses.dtype == np.float32
    assert kinds(problem, answers_of(problem, loss=losses)) == ["loss"]


@pytest.mark.parametrize(
    ("dtype", "returned", "ulps_of", "factor", "found"),
    [
        ("float32", "float64", "float32", 1 + 1e-7, []),
        ("bfloat16", "bfloat16", "bfloat16", 1.0, []),
        ("float32", "float16", "float32", 1.0, ["loss"]),
        ("float64", "float32", "float64", 1.0, ["loss"]),
    ],
)
def test_loss_has_ulps_of_what_was_returned(dtype, returned, ulps_of, factor, found):
    """Not coarser than those of the logits, nor finer than those of the arithmetic."""
    problem = problem_named(f"random-logits/{dtype}")
    answers = answers_of(problem, loss=problem.expected[0] * factor, loss_dtype=dtype_named(returned))
    judgement = judge(problem, answers, USUAL)
    assert [finding.kind for finding in judgement.findings] == found
    assert judgement.accuracies[0].dtype == ulps_of


def test_sum_over_rows_may_lose_pairwise_error():
    problem = problem_named("same-on-every-rank", reduction="sum")  # 64 rows
    assert judge(problem, answers_of(problem), USUAL).accuracies[0].allowed == 8 + 6
    problem = problem_named("same-on-every-rank", reduction="none")
    assert judge(problem, answers_of(problem), USUAL).accuracies[0].allowed == 8


def test_nan_for_number_and_number_for_nan_fail():
    problem = problem_named("random-logits/float32")
    assert kinds(problem, answers_of(problem, loss=np.nan)) == ["not finite"]
    gradient = problem.expected[1].copy()
    gradient[0, 3] = np.inf
    assert kinds(problem, answers_of(problem, gradient=gradient)) == ["not finite"]
    problem = problem_named("nan/in-a-row", reduction="none")
    assert kinds(problem, answers_of(problem, loss=np.nan_to_num(problem.expected[0]))) == ["loss"]
    assert kinds(problem, answers_of(problem, gradient=np.nan_to_num(problem.expected[1]))) == ["gradient"]


def test_row_without_softmax_needs_one_nan():
    problem = problem_named("masked-row", reduction="none")
    gradient = np.nan_to_num(problem.expected[1])
    gradient[problem.rows // 2, 0] = np.nan
    assert kinds(problem, answers_of(problem, gradient=gradient), STRICT) == []


def test_nan_of_pytorch_passes_unless_strict():
    problem = problem_named("nan/in-an-ignored-row")
    gradient = problem.expected[1].copy()
    gradient[~problem.valid] = np.nan
    assert kinds(problem, answers_of(problem, gradient=gradient)) == []
    assert kinds(problem, answers_of(problem, gradient=gradient), STRICT) == ["not finite"]
    # a row that does not count excuses nothing
    assert kinds(problem, answers_of(problem, loss=np.nan)) == ["not finite"]
    gradient[~problem.valid] = 1.0
    assert kinds(problem, answers_of(problem, gradient=gradient)) == ["gradient"]
    problem = problem_named("probabilities/zero-at-minus-inf")
    assert kinds(problem, answers_of(problem, loss=np.nan)) == []
    assert kinds(problem, answers_of(problem, loss=np.nan), STRICT) == ["not finite"]


def test_infinity_passes_if_exact_or_overflow():
    problem = problem_named("masked-target", reduction="none")
    assert np.isinf(problem.expected[0]).any() and kinds(problem, answers_of(problem)) == []
    problem = problem_named("logits-of-1000/float16", reduction="sum")
    problem = replace(problem, **{name: np.tile(getattr(problem, name).T, 40).T for name in ("logits", "targets")})
    assert 65504 < problem.expected[0] < np.inf
    assert kinds(problem, answers_of(problem, loss_dtype=np.float16)) == []
    assert kinds(problem, answers_of(problem, loss=-np.inf, loss_dtype=np.float16)) == ["not finite"]


def test_one_bit_between_ranks_fails_but_nan_sign():
    problem = problem_named("same-on-every-rank", reduction="none")
    answers = answers_of(problem)
    loss = answers[2].loss.copy()
    loss[5] = np.nextafter(loss[5], np.float32(9))
    answers[2] = replace(answers[2], loss=loss)
    (finding,) = judge(problem, answers, USUAL).findings
    assert finding.kind == "ranks differ" and "row 5" in finding.text and "rank 2" in finding.text
    problem = problem_named("masked-row", reduction="none")
    answers = answers_of(problem)
    answers[1] = replace(answers[1], loss=np.where(np.isnan(answers[1].loss), -answers[1].loss, answers[1].loss))
    assert kinds(problem, answers) == []


def one_rank(problem, loss=None, gradient=None):
    """The answer of one rank: the exact values, rounded, unless given."""
    (answer,) = answers_of(replace(problem, splits=(0, problem.classes)), loss, gradient)
    return answer


def up(array, place, dtype):
    """A copy with the next number of `dtype` in one place."""
    array = array.astype(dtype)
    array[place] = np.nextafter(array[place], dtype(np.inf))
    return array


def test_first_place_of_other_bits_is_named():
    problem = problem_named("random-logits/float64", reduction="none")
    loss = np.full(problem.rows, 3.0)
    exact = replace(problem)
    exact.__dict__["expected"] = loss, problem.expected[1]  # a cached property
    one = one_rank(exact, loss=up(up(loss, 3, np.float64), 5, np.float64))
    (finding,) = judge(exact, answers_of(exact), USUAL, one).findings
    said = "loss in row 3: 0x1.8p+1 against 0x1.8000000000001p+1; 2 of 6 differ"
    assert (finding.kind, finding.text) == ("other bits", f"the bits differ from one rank's ({said})")
    one = one_rank(problem, gradient=up(problem.expected[1], (1, 17), np.float64))
    (finding,) = judge(problem, answers_of(problem), USUAL, one).findings
    rank = problem.rank_of(17)
    assert f"(gradient in row 1, class 17 (rank {rank}): " in finding.text and "; 1 of 144 differ)" in finding.text
    answers = answers_of(problem)
    answers[2] = replace(answers[2], loss=up(answers[2].loss, 5, np.float64))
    differing, other = judge(problem, answers, USUAL, one_rank(problem)).findings
    assert differing.kind == "ranks differ" and "(loss on rank 2 in row 5: " in other.text


def test_other_bits_within_tolerance_fail():
    """Zeros of either sign and dtypes have other bits, and a nan is a nan."""
    problem = problem_named("nan/in-a-row", reduction="none")
    loss = np.where(np.isnan(problem.expected[0]), -np.float64(np.nan), problem.expected[0])
    assert judge(problem, answers_of(problem), USUAL, one_rank(problem, loss=loss)).findings == []
    problem = problem_named("ignore_index/float32")
    zeros = np.where(problem.expected[1] == 0, -0.0, problem.expected[1])
    assert (problem.expected[1] == 0).any()
    (finding,) = judge(problem, answers_of(problem), USUAL, one_rank(problem, gradient=zeros)).findings
    assert ": 0x0p+0 against -0x0p+0; " in finding.text
    problem = problem_named("random-logits/bfloat16")
    wide = replace(one_rank(problem), dlogits=problem.expected[1].astype(np.float32))
    (finding,) = judge(problem, answers_of(problem), USUAL, wide).findings
    assert "(gradient: bfloat16(6, 24) against float32(6, 24))" in finding.text


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"loss": np.zeros((2,), np.float32)}, "shape", r"loss has shape \(2,\), where \(\) is due \(rank 1\)"),
        ({"loss": np.zeros((), np.int32)}, "dtype", r"loss has dtype int32, which is no floating-point one \(rank 1\)"),
        ({"dlogits": np.zeros((6, 24), np.float32)}, "shape", r"gradient has shape \(6, 24\), where \(6, 8\) is due"),
    ],
)
def test_wrong_shape_or_dtype_is_named(change, kind, text):
    problem = problem_named("random-logits/float32")
    answers = answers_of(problem)
    answers[1] = replace(answers[1], **change)
    (finding,) = judge(problem, answers, USUAL).findings
    assert finding.kind == kind
    with pytest.raises(ValueError, match=text):
        raise ValueError(finding.text)


def test_worst_error_is_named_with_place_and_rank():
    problem = problem_named("dims/3-D")
    gradient = problem.expected[1].copy()
    gradient[1, 2, 17] += 1.0
    judgement = judge(problem, answers_of(problem, gradient=gradient), USUAL)
    worst = max(judgement.accuracies, key=lambda accuracy: accuracy.error)
    assert worst.where == "row (1, 2), class 17 (rank 2)"


def test_picture_has_errors_by_row_and_class():
    problem = problem_named("random-logits/float32")
    gradient = problem.expected[1].copy()
    gradient[4, 9] += 1.0
    picture = judge(problem, answers_of(problem, gradient=gradient), USUAL).picture
    assert (picture.rows, picture.classes, picture.splits) == (6, 24, [0, 8, 16, 24])
    assert picture.targets == [(row, int(number)) for row, number in enumerate(problem.targets)]
    errors = np.array(picture.errors)
    assert np.argwhere(errors > 1).tolist() == [[4, 9]]
    gradient[4, 9] -= 2.0
    assert judge(problem, answers_of(problem, gradient=gradient), USUAL).picture.errors[4][9] < -1


def test_large_picture_has_worst_of_each_block():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(100, 700)).astype(np.float32), rng.integers(0, 700, 100)
    problem = Problem(logits, targets, (0, 100, 400, 700), LOSS, reduction="none")
    gradient = problem.expected[1].copy()
    gradient[99, 699] += 1.0
    gradient[0, 0] = np.nan
    picture = judge(problem, answers_of(problem, gradient=gradient), USUAL).picture
    errors = np.array(picture.errors)
    assert errors.shape == (48, 192) and errors[0, 0] == np.inf and errors[-1, -1] > 1
    assert (errors > 1).sum() == 2 and picture.splits == pytest.approx([0, 27.43, 109.71, 192], abs=0.01)


def judged_numbers(problem):
    noise = np.random.default_rng(0).standard_normal(problem.logits.shape)
    (found,) = judge(problem, answers_of(problem, gradient=problem.expected[1] + noise), USUAL).findings
    return found.text


def test_cause_of_finding_has_no_numbers():
    problem = problem_named("random-logits/float32")
    noise = np.random.default_rng(0).standard_normal(problem.logits.shape)
    exact = problem.expected
    (found,) = judge(problem, answers_of(problem, gradient=exact[1] + noise), USUAL).findings
    assert found.text.startswith("gradient is ") and found.cause == ""
    (found,) = judge(problem, answers_of(problem, loss=np.nan), USUAL).findings
    assert found.text.startswith("the loss is wrong: nan (") and found.cause == "the loss is wrong: nan"
    found = judge(problem, answers_of(problem, exact[0] * 3, exact[1] * 3), USUAL).findings[0]
    times = "is # times too large: it is summed over the ranks once more"
    assert found.likeness == f"the loss {times}; the gradient {times}"
    assert Finding("gradient", f"second backward pass: {judged_numbers(problem)}").cause == ""
    (found,) = judge(problem, answers_of(problem), USUAL, one_rank(problem, gradient=exact[1] + noise)).findings
    assert found.cause == found.likeness == "the bits differ from one rank's"
    masked = problem_named("masked-row", reduction="none")
    finite = judge(masked, answers_of(masked, gradient=np.nan_to_num(masked.expected[1])), USUAL).findings[0]
    assert "is finite where nan is right" in finite.text and "finite" not in finite.cause


def test_wrong_number_differs_from_right_one_in_print():
    problem = problem_named("random-logits/float64")
    loss = problem.expected[0] * (1 + 2.0**-40)
    (found,) = judge(problem, answers_of(problem, loss=loss), USUAL).findings
    got, exact = re.search(r"loss is (\S+) where (\S+) is right", found.text).groups()
    assert got != exact and got[:-1] == exact[:-1]
    assert float(got) == pytest.approx(float(loss), rel=2.0**-41)


def test_error_where_0_is_right_is_no_ulps():
    problem = problem_named("one-class")
    assert not problem.expected[0].any()
    loss = np.full(problem.loss_shape, 0.5, np.float32)
    (finding,) = judge(problem, answers_of(problem, loss=loss), STRICT).findings
    assert "is 0.5 where 0 is right: no more than 1.06e-44 is allowed" in finding.text


def test_differing_ranks_come_first_with_the_cause():
    problem = problem_named("random-logits/float32")
    answers = answers_of(problem)
    answers[1] = replace(answers[1], loss=answers[1].loss * np.float32(1.5))
    first, second = judge(problem, answers, USUAL).findings
    assert first.text.startswith("the ranks' losses differ: the loss is wrong on rank 1 only (the loss is ")
    assert (first.cause, second.cause) == ("the ranks' losses differ: the loss is wrong on rank 1 only", "")
    assert judge(problem, answers, USUAL).accuracies[0].where == "(rank 1)"


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_loss_of_another_shape_is_judged(shape):
    problem = problem_named("random-logits/float32")
    right = [replace(answer, loss=answer.loss.reshape(shape)) for answer in answers_of(problem)]
    judgement = judge(problem, right, USUAL)
    assert judgement.findings == [] and judgement.accuracies
    assert [finding.text for finding in judgement.form] == [f"loss has shape {shape}, where () is due"]
    wrong = [replace(answer, loss=answer.loss * 2) for answer in right]
    assert [finding.kind for finding in judge(problem, wrong, USUAL).findings] == ["loss"]


def test_entropy_has_no_targets_in_words():
    """Wrong rows are those of one rank's targets by accident: the candidate has not seen the targets."""
    (case,) = cases(pattern="random-logits/float32")
    problem = problem_of(case, Offer(kind="entropy"), RANKS)
    of_rank = (problem.targets >= problem.splits[1]) & (problem.targets < problem.splits[2])
    entropy, gradient = problem.expected
    wrong = np.where(of_rank, entropy * np.linspace(1.1, 1.3, entropy.size), entropy).astype(np.float32)
    shards = [problem.part(gradient.astype(np.float32), rank) for rank in range(RANKS)]
    (found,) = judge(problem, [Answer(wrong, shard) for shard in shards], USUAL).findings
    assert found.cause.startswith("the entropy is wrong in row") and "target" not in found.cause
    offered = cases(replace(EVERYTHING, kind="entropy", options=(), reductions=("none",), probabilities=False))
    assert not [each for each in offered if each.needs.checks_targets]
    words = "|".join(("at the target", "targets?", "loss", "losses", "reduction"))
    assert [each.catches for each in offered if re.search(rf"\b({words})\b", each.catches)] == []
    assert "an entropy of shape (1,)" in next(each.catches for each in offered if each.form).lower()


@pytest.mark.parametrize("error", [4e-6, 1e-4])
def test_factor_of_nearly_1_is_not_named(error):
    problem = replace(problem_named("random-logits/float32"), reduction="none")
    loss, gradient = problem.expected
    shards = [problem.part(gradient.astype(np.float32), rank) for rank in range(RANKS)]
    wrong = np.float32(loss * (1 + error))
    findings = judge(problem, [Answer(wrong, shard) for shard in shards], USUAL).findings
    assert findings and not any("times" in each.text for each in findings)
