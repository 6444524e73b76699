"""Cases about targets: ignored rows, class numbers out of range, and probabilities."""

from dataclasses import replace

import numpy as np

from pce_mpi.conformance.problems.cases import EACH_REDUCTION, OPTIONS, Cases, Expects, Gradient, Setting, table
from pce_mpi.conformance.problems.generators import even, option_values, random_problem, random_targets, rounded, uneven
from pce_mpi.conformance.problems.problem import Array, Problem

CASES = Cases()

_IGNORED = ("ignore_index",)


@CASES.case(
    "ignored/{name}",
    table("name which", ("negative", -1), ("first-class", 0), ("inside", 5), ("last-class", -2)),
    options=_IGNORED,
    any_ignore_index=True,
)
def _ignored(setting: Setting, which: int, **options: float) -> Problem:
    """An ignore_index that is -1, or a class: rows with that target count neither in the sum nor in the mean's divisor,
    and have no gradient (ColossalAI: a wrong gradient; Paddle: divides by all rows).
    """
    problem = random_problem(setting)
    number = problem.classes - 1 if which == -2 else min(which, problem.classes - 1)
    targets = problem.targets.copy()
    targets[1::2] = number  # never the only row of a small shape: that is another case
    return replace(problem, targets=targets, options={"ignore_index": number, **options})


@CASES.case(
    "ignored/{name}",
    table("name number", ("as-local-number", 2), ("as-shifted-number", -1)),
    options=_IGNORED,
    any_ignore_index=True,
)
def _ignored_after_shift(setting: Setting, number: int) -> Problem:
    """Targets that equal ignore_index once class_start is subtracted from them: who compares after the shift ignores
    rows that count.
    """
    # Targets that are `number` once `class_start` of their shard, or of the next one, is subtracted.
    problem = random_problem(setting)
    starts = np.array(problem.splits[1:-1] or (0,))
    targets = np.resize(starts + number, problem.rows)
    targets[targets == number] = problem.classes - 1
    targets[::4] = number
    return replace(problem, targets=np.clip(targets, number, problem.classes - 1), options={"ignore_index": number})


@CASES.case("ignored/all-rows-{reductions[0]}", EACH_REDUCTION, options=_IGNORED)
def _all_ignored(setting: Setting) -> Problem:
    """No row is left: the mean is nan, the sum 0, and the gradient 0, as PyTorch's dense loss has it."""
    problem = random_problem(setting, options=_IGNORED)
    return replace(problem, targets=np.full_like(problem.targets, setting.ignore_index))


@CASES.case("ignored/unevenly-over-ranks", options=_IGNORED, rows=12)
def _ignored_unevenly(setting: Setting) -> Problem:
    """The rows that count have their targets on one rank, but for one: a mean over each rank's own rows, averaged over
    ranks, is wrong.
    """
    problem = random_problem(setting, uneven(setting), options=_IGNORED)
    targets = problem.targets.copy()
    first, last = problem.splits[0], problem.splits[-1] - 1
    targets[problem.rank_of(targets) != problem.ranks - 1] = setting.ignore_index
    targets[:3] = (last, last, first)[: targets[:3].size]
    return replace(problem, targets=targets)


@CASES.case("ignored/weighted-mean", options=("weight", "ignore_index"), reductions=("mean",), rows=12)
def _ignored_with_weights(setting: Setting) -> Problem:
    """The divisor of the mean is the sum of the weights of the targets that count, over all ranks; a rank knows the
    weights of its own classes only (PyTorch's loss_parallel with weights: index -100 is out of bounds).
    """
    return random_problem(setting, uneven(setting), options=("weight", "ignore_index"))


@CASES.case("ignored/smoothed", options=("ignore_index", "label_smoothing"), any_ignore_index=True)
def _ignored_and_smoothed(setting: Setting) -> Problem:
    """Label smoothing must not bring ignored rows back (Paddle, with an ignore_index that is a class)."""
    return _ignored(setting, which=5, label_smoothing=0.125)


@CASES.case("targets/int32", targets=True, expects=Expects.EITHER)
def _targets_of_32_bits(setting: Setting) -> Problem:
    """Targets of 32 bits that are read as if they had 64: refused, or right."""
    problem = random_problem(setting)
    return replace(problem, targets=problem.targets.astype(np.int32))


@CASES.case("targets/strided", targets=True, strided=True)
def _targets_strided(setting: Setting) -> Problem:
    """Targets that are a slice of a longer array: a kernel that takes them for contiguous."""
    return random_problem(setting, target_memory="strided")


@CASES.case("targets/expanded", targets=True, strided=True)
def _targets_expanded(setting: Setting) -> Problem:
    """Targets that are one number for all rows, with strides of 0: a kernel that takes them for contiguous."""
    problem = random_problem(setting, target_memory="expanded")
    return replace(problem, targets=np.full_like(problem.targets, problem.targets[:1].sum()))


_NO_CLASS = """A target that no rank owns: a loss of logsumexp, a gradient of softmax and a row that counts, without a
word (Megatron, PyTorch's loss_parallel). To be refused on every rank, without hanging."""
_WRAPPED = "A target of 2**32 + 1, which is class 1 for who keeps targets in 32 bits."
_FROM_END = "A negative target that is not ignore_index: an index from the end, on the rank that takes it for its own."
_UNUSUAL = "-100 where ignore_index is something else: no class and not ignored either."


@CASES.case(
    "target-out-of-range/{name}",
    table(
        "name number beyond options any_ignore_index catches",
        ("one-too-many", 0, True, (), False, _NO_CLASS),
        ("far", 10**9, True, (), False, _NO_CLASS),
        ("wraps-in-int32", 2**32 + 1, False, (), False, _WRAPPED),
        ("negative", -1, False, (), False, _FROM_END),
        ("another-ignore_index", -100, False, _IGNORED, True, _UNUSUAL),
    ),
    checks_targets=True,
    expects=Expects.REFUSAL,
)
def _no_class(setting: Setting, number: int, beyond: bool, options: tuple[str, ...]) -> Problem:
    problem = random_problem(setting)
    targets = problem.targets.copy()
    alone = number if number != setting.ignore_index or options else -2
    targets[setting.rows // 2] = problem.classes + number if beyond else alone
    return replace(problem, targets=targets, options=dict.fromkeys(options, -1))


def _soft(setting: Setting, total: float | None = None, options: tuple[str, ...] = ()) -> Problem:
    """Probabilities with this sum; 0: one-hot; None: a different sum in each row, if the candidate takes that."""
    problem = random_problem(setting, even(setting))
    drawn = np.asarray(np.random.default_rng([setting.seed, 3]).standard_exponential(problem.logits.shape))
    drawn /= drawn.sum(axis=-1, keepdims=True)
    if total is None and not setting.normalized:
        drawn *= np.linspace(0.5, 3.0, setting.rows)[:, None]
    elif total == 0.0:
        drawn = np.eye(problem.classes)[problem.targets]
    values = option_values(setting, options, problem.classes)
    return replace(problem, targets=rounded(setting, drawn), options=values)


@CASES.case("probabilities/sum-to-1", probabilities=True)
def _normalized(setting: Setting) -> Problem:
    """Targets as probabilities: the loss is right and the gradient is not (PyTorch's loss_parallel)."""
    return _soft(setting, total=1.0)


@CASES.case("probabilities/do-not-sum-to-1", probabilities=True, unnormalized=True)
def _unnormalized(setting: Setting) -> Problem:
    """The gradient is softmax times the sum of a row's probabilities, over all ranks, less the probabilities: not
    softmax - q.
    """
    return _soft(setting)


@CASES.case("probabilities/one-hot", probabilities=True)
def _one_hot(setting: Setting) -> Problem:
    """All of a row's probability in one class, on one rank: as index targets."""
    return _soft(setting, total=0.0)


# No probabilities are a row to ignore.
_WITH_OPTIONS = [{"options": (each,)} for each in OPTIONS if each != "ignore_index"]


@CASES.case("probabilities/{options[0]}", _WITH_OPTIONS, probabilities=True)
def _soft_with(setting: Setting, options: tuple[str, ...]) -> Problem:
    """Probabilities with {options[0]}: the mean divides by the number of rows, also with weights; smoothing mixes with
    1 / C of all classes; other options are as with class numbers.
    """
    return _soft(setting, options=options)


@CASES.case("probabilities/zero-at-minus-inf", probabilities=True, special=True)
def _zero_at_minus_inf(setting: Setting) -> Problem:
    """A probability of 0 at a logit of -inf: 0 * inf is nan, where the loss has a limit. nan passes (PyTorch's own
    dense loss has it) unless strict; a number must be right.
    """
    problem = _soft(setting, total=1.0)
    logits, targets = problem.logits.copy(), problem.targets.copy()
    masked: Array = np.zeros(logits.shape, np.bool_)
    masked[::2, 1::4] = True
    logits[masked], targets[masked] = -np.inf, 0.0
    if setting.normalized:
        targets = rounded(setting, targets / targets.astype(np.float64).sum(axis=-1, keepdims=True))
    return replace(problem, logits=logits, targets=targets, may_be_nan=np.asarray(masked.any(axis=-1)))


@CASES.case(
    "several-targets/{dtype}",
    several_targets=True,
    targets=True,
    gradient=Gradient.BACKWARD,
    reductions=("none",),
    procedure="several-targets",
)
def _several_targets(setting: Setting) -> Problem:
    """Several targets a row, as the labels of a top-k distillation: gradients of one that are added to another's."""
    problem = random_problem(replace(setting, seed=0))
    return replace(problem, targets=random_targets(setting, problem.rows_shape, problem.classes))
