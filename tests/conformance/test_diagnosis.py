"""The explanation of a wrong answer: the known fault that gives it, or the place of its errors."""

from dataclasses import replace
import re

import ml_dtypes
import numpy as np
import pytest

from candidates.by_hand import candidate
from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.candidates.catalogue import catalogue
from pce_mpi.conformance.candidates.fitting import problem_of
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.judging.diagnosis import explain
from pce_mpi.conformance.problems.cases import Expects
from pce_mpi.conformance.problems.kinds.loss import LOSS
from pce_mpi.conformance.problems.textbook import Textbook
from ranks.test_conformance_catches import PLANTED
from ranks.test_conformance_wild import SHIPPED
import ulps

# p - 1 in float64, where p is within 1e-7 of 1, has an error of 2**-53 / 1e-7: that many ulp of its own size.
PLAIN_ARITHMETIC = 2**24

RANKS = 3
CASES = {
    case.name: case
    for case in catalogue(candidate.offer)
    if case.expects == Expects.ANSWER and case.family != "many-rows"
}


def problem_named(name, ranks=RANKS, seed=0):
    case = CASES[name]
    return problem_of(case, candidate.offer, ranks, seed=seed)


def text_of(faults):
    """The sentence of a report, or None."""
    return "; ".join(fault.said for fault in faults) or None


def said(problem, change_loss=None, change_gradient=None):
    """Explain the right answer with these changes; `gradient` gets an array (rows, classes)."""
    loss, gradient = problem.expected
    losses = [np.array(loss) for _ in range(problem.ranks)]
    gradient = problem.row_major(gradient).copy()
    if change_loss:
        losses = [np.asarray(change_loss(loss, rank)) for rank, loss in enumerate(losses)]
    if change_gradient:
        change_gradient(gradient)
    assert problem.axis in (-1, problem.logits.ndim - 1)
    dlogits = gradient.reshape(problem.logits.shape)
    wrong = [far(problem, loss, problem.expected[0]) for loss in losses]
    return text_of(explain(problem, losses, dlogits, wrong, far(problem, dlogits, problem.expected[1])))


def far(problem, got, exact):
    return ~np.isclose(got, exact, rtol=4.0 * float(ml_dtypes.finfo(problem.dtype).eps), atol=0.0, equal_nan=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_textbook_without_fault_is_dense(ranks):
    for name in CASES:
        problem = problem_named(name, ranks)
        with np.errstate(all="ignore"):
            book = Textbook.of(problem)
            loss, gradient = book.loss(), book.gradient()
        exact = problem.row_major(problem.expected[1])
        size = np.broadcast_to(np.abs(exact).max(axis=-1, keepdims=True, initial=0.0), exact.shape)
        assert ulps.worst(loss, problem.expected[0], np.float64, np.maximum(np.abs(loss), 1.0)) < PLAIN_ARITHMETIC, name
        assert ulps.worst(gradient, exact, np.float64, size) < PLAIN_ARITHMETIC, name


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_fault_has_an_answer_for_every_case(ranks):
    for name in CASES:
        problem = problem_named(name, ranks)
        with np.errstate(all="ignore"):
            for text, answer in LOSS.faults(Textbook.of(problem)):
                for loss in answer.losses or ():
                    assert loss.shape == problem.loss_shape, (name, text)
                if answer.gradient is not None:
                    assert answer.gradient.shape == (problem.rows, problem.classes), (name, text)
                assert answer.losses is None or len(answer.losses) in (1, ranks), (name, text)


ONCE_MORE = "the gradient is 3 times too large: it is summed over the ranks once more"


def test_factor_is_named():
    problem = problem_named("random-logits/float32")
    assert said(problem, None, lambda g: np.multiply(g, 3, g)) == ONCE_MORE
    assert said(problem, None, lambda g: np.divide(g, 6, g)) == "the gradient is 6 times too small: the number of rows"
    assert "of the opposite sign" in said(problem, None, lambda g: np.negative(g, g))
    assert "0.3 times what is due" in said(problem, None, lambda g: np.multiply(g, 0.3, g))


def test_factor_within_rounding_is_not_named():
    problem = problem_named("random-logits/bfloat16")
    assert said(problem, None, lambda g: np.multiply(g, 1.01, g)) is None


def test_constant_is_named():
    problem = problem_named("random-logits/float32")
    text = said(problem, lambda loss, rank: loss + np.log(24.0))
    assert "off by the constant 3.17805 = log(24), the number of classes" in text


def test_lower_precision_is_named():
    problem = problem_named("random-logits/float64")
    text = said(
        problem,
        lambda loss, rank: loss.astype(np.float32).astype(np.float64),
        lambda g: np.copyto(g, g.astype(np.float32)),
    )
    assert text == "the loss is rounded to float32; every entry of the gradient is rounded to float32"


def test_other_half_precision_is_not_named():
    problem = problem_named("random-logits/float16")
    noise = 1 + 2.0**-8 * np.random.default_rng(0).uniform(-2, 2, problem.logits.shape)
    text = said(problem, None, lambda g: np.multiply(g, noise, g))
    assert text is None


@pytest.mark.parametrize(("dtype", "may_overflow"), [("float16", True), ("float32", False)])
def test_infinite_loss_of_float16_names_overflow(dtype, may_overflow):
    text = said(problem_named(f"logits-of-1000-smoothed/{dtype}"), lambda loss, rank: np.inf)
    assert "log p is the logarithm of an exponential that has become 0" in text
    assert ("a sum of log p over classes and rows overflows float16" in text) == may_overflow


def test_divisor_is_named_despite_nan_in_ignored_row():
    problem = problem_named("nan/in-an-ignored-row")
    loss, gradient = problem.expected
    counts = problem.valid[:, None]
    got = np.where(counts, gradient * problem.valid.mean(), np.nan)
    wrong = np.ones(problem.ranks, np.bool_), np.broadcast_to(counts, got.shape)
    text = text_of(explain(problem, [loss * problem.valid.mean()] * problem.ranks, got, *wrong))
    assert text == "the mean divides by all 6 rows, not by the 4 that are not ignored"


def test_ranks_with_wrong_loss_are_named():
    problem = problem_named("reduction/none")
    text = said(problem, lambda loss, rank: loss + (rank == 1) * np.arange(loss.size) ** 2)
    assert "the loss is wrong on rank 1 only in rows 1, 2, 3, 4 and 1 more" in text


@pytest.mark.parametrize(
    ("where", "place"),
    [
        (np.s_[:, 8:16], "on rank 1 only"),
        (np.s_[:, :16], "on all ranks but 2"),
        (np.s_[:, ::8], "at the first class of each shard only"),
        (np.s_[:, 7::8], "at the last class of each shard only"),
        (np.s_[1::3], "in ignored rows only"),
        (np.s_[[0, 2, 3, 5]], "in rows that count"),
    ],
)
def test_place_of_errors_is_named(where, place):
    problem = problem_named("ignore_index/float32")
    assert problem.splits == (0, 8, 16, 24)

    def change(gradient):
        gradient[where] += np.linspace(0.1, 0.9, gradient[where].size).reshape(gradient[where].shape)

    assert said(problem, None, change) == f"the gradient is wrong {place}"


def test_errors_at_targets_and_elsewhere_are_distinguished():
    problem = problem_named("random-logits/float32")
    target = (np.arange(problem.rows), problem.targets)

    def at_targets(gradient):
        gradient[target] *= np.linspace(0.5, 0.9, problem.rows)

    def elsewhere(gradient):
        at_target = gradient[target]
        gradient *= np.linspace(0.5, 0.9, problem.rows)[:, None]
        gradient[target] = at_target

    assert said(problem, None, at_targets) == "the gradient is wrong at the targets only"
    assert said(problem, None, elsewhere) == "the gradient is wrong everywhere but at the targets"


def test_errors_without_pattern_are_not_explained():
    problem = problem_named("random-logits/float32")
    noise = np.random.default_rng(0).standard_normal(problem.logits.shape)
    assert said(problem, lambda loss, rank: loss + 0.3, lambda g: np.add(g, noise, g)) is None


def test_two_faults_are_both_named():
    problem = replace(problem_named("label_smoothing/float32"), reduction="sum")
    text = said(problem, lambda loss, rank: loss * 3, lambda g: np.multiply(g, 0.3, g))
    assert text.startswith(
        "the loss is 3 times too large: it is summed over the ranks once more; the gradient is wrong: 0.3 times"
    )


def test_fault_of_gradient_does_not_hide_wrong_loss():
    problem = problem_named("label_smoothing/float32")
    one_hot = np.arange(problem.classes) == problem.targets[:, None]
    s = problem.options["label_smoothing"]

    def over_the_others(gradient):
        gradient += s * (1 / problem.classes - (1 - one_hot) / (problem.classes - 1)) / problem.rows

    spread = "label smoothing is spread over the 23 other classes, not over all 24"
    assert said(problem, None, over_the_others) == f"{spread}, in the gradient only"
    text = said(problem, lambda loss, rank: loss * 0.37 + 0.3, over_the_others)
    assert text == f"in the gradient: {spread}; the loss is wrong too"


def test_answer_that_passes_is_not_explained():
    problem = problem_named("random-logits/float32")
    loss, gradient = problem.expected
    wrong = np.zeros(problem.ranks, np.bool_), np.zeros(problem.logits.shape, np.bool_)
    losses = [loss + 1.0] * problem.ranks
    assert explain(problem, losses, gradient, *wrong) == []


@pytest.mark.parametrize("noise", [2.0**-8, 2.0**-11])
def test_size_of_errors_is_no_cause(noise):
    """Errors as large as those of bfloat16 or float16 say nothing on where they come from."""
    problem = problem_named("random-logits/float32")
    factors = 1 + noise * np.random.default_rng(0).uniform(-1, 1, problem.logits.shape)
    assert said(problem, None, lambda g: np.multiply(g, factors, g)) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_of_every_entry_is_named(dtype):
    problem = problem_named("random-logits/float32")
    text = said(problem, None, lambda g: np.copyto(g, g.astype(dtype_named(dtype)).astype(np.float64)))
    assert text == f"every entry of the gradient is rounded to {dtype}"


def test_one_entry_that_is_not_rounded_contradicts_rounding():
    problem = problem_named("random-logits/float32")

    def all_but_one(gradient):
        kept = gradient[2, 3]
        gradient[...] = gradient.astype(np.float16)
        gradient[2, 3] = kept

    assert said(problem, None, all_but_one) is None


def test_classes_beyond_a_boundary_are_named():
    problem = problem_named("many-classes/float32")
    text = said(problem, None, lambda g: np.copyto(g[:, 2000:], 0.0))
    assert text.startswith("the gradient is wrong from class 2000 on: 0 where numbers up to")


def test_every_fault_model_is_shown_by_candidate():
    """The candidates are those that tests/ranks runs; a model that none of them shows has no place in the kit."""

    def without_numbers(text):
        return re.sub(r"\{ranks\}|\d+(, \d+)*", "#", re.sub(r"b?float16", "half", text))

    words = [without_numbers(each.words.removeprefix("second backward pass: ")) for each in (*PLANTED, *SHIPPED)]
    texts = set()
    for name in CASES:
        with np.errstate(all="ignore"):
            for ranks in (1, 3):
                texts |= {text for text, _ in LOSS.faults(Textbook.of(problem_named(name, ranks)))}
    shown = [f"the ranks' losses differ: {text}" for text in sorted(set(map(without_numbers, texts)))]
    unseen = [text for text in shown if not any(word in text for word in words)]
    assert unseen == [], "\n".join(unseen)


def explained(problem, losses, dlogits):
    wrong = [far(problem, loss, problem.expected[0]) for loss in losses]
    return text_of(explain(problem, losses, dlogits, wrong, far(problem, dlogits, problem.expected[1])))


def test_gradient_of_0_comes_before_formulas():
    (case,) = (each for each in catalogue(Offer(kind="entropy")) if each.name == "logits-of-1000/float32")
    problem = problem_of(case, Offer(kind="entropy"), RANKS)
    loss, gradient = problem.expected
    text = explained(problem, [loss] * RANKS, np.zeros_like(gradient))
    assert text.startswith("the gradient of the entropy is dropped: it is 0 for all classes")


def test_factor_comes_before_formula_of_one_quantity():
    problem = problem_named("ignore_index/float32")
    loss, gradient = problem.expected
    fewer = problem.valid.mean()  # as a mean that divides by all rows
    assert "divides by all 6 rows" in explained(problem, [loss * fewer] * RANKS, gradient * fewer)
    text = explained(problem, [loss + 1.0] * RANKS, gradient * fewer)
    assert "the gradient is wrong in rows that count: 0.6667 times what is due" in text


@pytest.mark.parametrize(
    ("name", "nan", "words"),
    [
        (
            "masked-shard/last",
            "rows",
            "the loss is wrong: nan in rows that have a logit of -inf; the gradient is wrong",
        ),
        ("masked-shard/last", "even rows", "a shard whose logits are all -inf makes the row nan"),
        ("masked-shard/last", "loss", "0 times the logit -inf of another class gives nan"),
        ("masked-shard/last", "gradient", "the gradient is wrong: nan in rows that have a logit of -inf"),
        ("masked-classes/every-third", "loss", "0 times the logit -inf of another class gives nan"),
    ],
)
def test_cause_of_nan_is_told_by_rows(name, nan, words):
    problem = replace(problem_named(name), reduction="none")
    loss, gradient = (np.array(each) for each in problem.expected)
    rows = (problem.logits == -np.inf).any(axis=-1)
    if nan == "even rows":
        rows[1::2] = False
    if nan != "gradient":
        loss[rows] = np.nan
    if nan != "loss":
        gradient[rows] = np.nan
    assert explained(problem, [loss] * RANKS, gradient).startswith(words)


@pytest.mark.parametrize("seed", range(8))
def test_one_number_near_a_fault_is_not_explained(seed):
    """A mean in half precision is within the roundings of one of many formulas by accident."""
    problem = problem_named("label_smoothing/bfloat16", seed=seed)
    loss, gradient = problem.expected
    for faulty in (answer.losses for _, answer in LOSS.faults(Textbook.of(problem)) if answer.losses):
        near = np.asarray(faulty[0] + (loss - faulty[0]) / 16).astype(ml_dtypes.bfloat16)
        if faulty[0] != loss and len(faulty) == 1:
            assert explained(problem, [near] * RANKS, gradient) is None


def test_rank_that_cannot_be_wrong_is_no_place():
    problem = problem_named("masked-shard/last")
    right = problem.expected[1]
    even = np.arange(problem.rows) % 2 == 0
    noise = np.random.default_rng(0).uniform(0.5, 0.9, right.shape)
    masked = replace(problem, logits=problem.logits[even], targets=problem.targets[even])
    loss, right = masked.expected
    text = explained(masked, [loss] * RANKS, right * noise[even])
    assert text is None or "all ranks but" not in text


def test_float32_inside_float64_is_named():
    problem = problem_named("reduction/none")
    problem = replace(problem, logits=problem.logits.astype(np.float64))
    loss, gradient = problem.expected
    near = (loss * (1 + 1e-6 * np.arange(1, loss.size + 1))).astype(np.float32).astype(np.float64)
    assert explained(problem, [near] * RANKS, gradient) == "every entry of the loss is computed in float32"


def test_half_of_fault_in_halves_is_unnamed():
    problem = replace(problem_named("p-near-1/bfloat16"), reduction="none")
    low = next(a for text, a in LOSS.faults(Textbook.of(problem)) if text.startswith("log-probabilities are kept"))
    loss, _ = problem.expected
    noise = 1 + 2.0**-5 * np.random.default_rng(0).uniform(-1, 1, loss.shape)
    assert explained(problem, [low.losses[0]] * RANKS, low.gradient).startswith("log-probabilities are kept")
    text = explained(problem, [(loss * noise).astype(ml_dtypes.bfloat16).astype(np.float64)] * RANKS, low.gradient)
    assert text is None or "log-probabilities" not in text


@pytest.mark.parametrize(
    "name", ["random-logits/float32", "p-near-1/float32", "pair/weight+z_loss", "finite-mask/1e30"]
)
def test_rounding_errors_within_the_floor_have_no_cause(name):
    """A fault that changes nothing in a case does not explain small errors there."""
    problem = problem_named(name)
    noise = 1 + 2.0**-20 * np.random.default_rng(0).uniform(-1, 1, problem.logits.shape)
    text = said(problem, lambda loss, rank: loss * (1 + 2.0**-21), lambda g: np.multiply(g, noise, g))
    assert text is None or text.startswith("the gradient is wrong")


def entropies_of_halves():
    offer = Offer(kind="entropy", dtypes=("bfloat16",))
    (case,) = (each for each in catalogue(offer) if each.name == "random-logits/bfloat16")
    return problem_of(case, offer, RANKS)


def test_entropies_in_halves_are_no_multiples_of_units():
    problem = entropies_of_halves()
    loss, gradient = problem.expected
    noise = 1 + 2.0**-4 * np.random.default_rng(0).uniform(-1, 1, loss.shape)
    text = explained(problem, [(loss * noise).astype(ml_dtypes.bfloat16).astype(np.float64)] * RANKS, gradient)
    assert text is None or "logsumexp" not in text


def of_losses(problem, losses):
    """Explain these losses of each rank, beside the right gradient; all of them are wrong."""
    wrong = [np.ones(losses.shape, np.bool_)] * RANKS
    return text_of(
        explain(problem, [losses] * RANKS, problem.expected[1], wrong, np.zeros(problem.logits.shape, np.bool_))
    )


@pytest.mark.parametrize(("noise", "before"), [(0.0, ""), (2.0**-6, ", and was inexact before")])
def test_float32_entropies_with_bits_of_bfloat16_are_named(noise, before):
    problem = entropies_of_halves()
    loss, _ = problem.expected
    factors = 1 + noise * np.random.default_rng(0).uniform(-1, 1, loss.shape)
    got = (loss * factors).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert of_losses(problem, got).startswith(f"every entry of the loss is rounded to bfloat16{before}")
    # In the dtype of the logits that is no fault, and one number with more bits contradicts it.
    assert "rounded" not in (of_losses(problem, got.astype(ml_dtypes.bfloat16)) or "")
    got[2] = loss[2] * 1.001
    assert "rounded" not in (of_losses(problem, got) or "")


def test_differences_of_logits_are_no_rounded_losses():
    """Those of bfloat16 often are numbers of bfloat16, and near the loss where one class has all of the probability."""
    problem = replace(problem_named("offset/1e4/bfloat16"), reduction="none")
    logits = problem.logits.astype(np.float64)
    got = logits.max(axis=-1) - logits[np.arange(problem.rows), problem.targets]
    assert (got == got.astype(ml_dtypes.bfloat16)).all()
    assert "rounded to bfloat16" not in (of_losses(problem, got.astype(np.float32)) or "")


def test_entropies_rounded_to_bfloat16_are_no_differences():
    offer = Offer(kind="entropy", dtypes=("float32",))
    for name in ("offset/1e3/float32", "offset/1e4/float32"):
        (case,) = (each for each in catalogue(offer) if each.name == name)
        problem = problem_of(case, offer, RANKS)
        loss, gradient = problem.expected
        noise = 1 + 2.0**-7 * np.random.default_rng(0).uniform(-1, 1, loss.shape)
        got = (loss * noise).astype(ml_dtypes.bfloat16).astype(np.float32)
        wrong = [np.ones(got.shape, np.bool_)] * RANKS
        text = text_of(explain(problem, [got] * RANKS, gradient, wrong, np.zeros(problem.logits.shape, np.bool_)))
        assert text is None or "logsumexp" not in text


def test_plain_arithmetic_in_bfloat16_has_no_cause():
    problem = replace(problem_named("p-near-1/bfloat16"), reduction="none")
    x = problem.logits - problem.logits.max(axis=-1, keepdims=True)
    total = np.exp(x).astype(np.float32).sum(axis=-1).astype(ml_dtypes.bfloat16)
    losses = np.log(total) - x[np.arange(problem.rows), problem.targets]
    assert losses.dtype == ml_dtypes.bfloat16
    assert of_losses(problem, losses) is None or "logsumexp" not in of_losses(problem, losses)


def test_float32_logsumexp_of_halves_is_named():
    problem = replace(problem_named("offset/1e4/float16"), reduction="none")
    x = problem.logits.astype(np.float32)
    top = x.max(axis=-1)
    lse = top + np.log(np.exp(x - top[:, None]).sum(axis=-1))
    assert of_losses(problem, lse - x[np.arange(problem.rows), problem.targets]).startswith("logsumexp is rounded")


@pytest.mark.parametrize("name", ["p-near-1/bfloat16", "many-classes/bfloat16", "many-classes/float16"])
def test_log_probabilities_kept_in_halves_are_named(name):
    """As `loss_parallel` of PyTorch has them: each number of the backward pass is rounded too."""
    problem = problem_named(name)
    half = problem.dtype.type
    x = problem.logits.astype(np.float32)
    shifted = x - x.max(axis=-1, keepdims=True)
    log_p = (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(half)
    if problem.classes > 1_000:  # of many numbers, one was near the border of two roundings
        likely = 0, shifted[0].argmax()
        log_p[likely] = np.nextafter(log_p[likely], half(0.0))
    p = np.exp(log_p.astype(np.float32)).astype(half)
    one_hot = (np.arange(problem.classes) == problem.targets[:, None]).astype(half)
    loss = (-log_p[one_hot == 1].astype(np.float32).mean()).astype(half)
    gradient = (p - one_hot) * half(1.0 / problem.rows)
    assert gradient.dtype == problem.dtype
    assert explained(problem, [loss] * RANKS, gradient).startswith(f"log-probabilities are kept in {problem.dtype}")
