"""Every option of the loss, each alone, every pair of them together, and rows that are sharded as well."""

from dataclasses import fields
import inspect
from itertools import combinations, product

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.loss.options import ROWS, LinearOptions, LossOptions, Options, ShardedDivergenceOptions, StatisticsOptions
from pce_mpi.testing import in_step
from ranks.op_cases import alone
from ranks.problems import (
    NARROW,
    SPLITS,
    WIDE,
    Part,
    as_cosines,
    assert_as_dense,
    divisors,
    draw,
    evaluate,
    excess_of_gradient,
    expect,
    grid,
    part_of,
    right_results,
    same_on_every_rank,
    split,
)

# One rank reads its logits once, several read them twice and merge.
pytestmark = pytest.mark.ranks(1, 2)

TARGETS = ["index", "probabilities"]
REDUCTIONS = ["none", "sum", "mean"]


# Keywords


@pytest.mark.parametrize(
    ("function", "keyword"),
    [
        (pce.softmax_cross_entropy, "labels"),
        (pce.softmax_cross_entropy, "out"),
        (pce.softmax_cross_entropy, "over"),
        (pce.softmax_cross_entropy_forward, "operation"),
        (pce.softmax_cross_entropy_value_and_grad, "smoothing"),
        (pce.class_statistics, "weight"),
        (pce.linear_class_statistics, "label_smoothing"),
        (pce.kl_divergence_value_and_grad, "weight"),
        (pce.nucleus, "topk"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_unknown_keyword_raises_the_type_error_of_python(function, keyword):
    logits = np.zeros((2, 3))
    with pytest.raises(TypeError) as raised:
        function(
            logits,
            *[np.zeros(2, int)] * (function is not pce.nucleus),
            **{keyword: None},
        )
    named = [each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    options = ", ".join(named)
    begin = f"{function.__name__}() got an unexpected keyword argument {keyword!r}"
    assert str(raised.value) == f"{begin}; its options are {options}"


def taking(name, *modules):
    """The public functions that have a parameter of this name."""
    functions = {getattr(module, each) for module in modules for each in module.__all__}
    found = [each for each in functions if inspect.isfunction(each) and name in inspect.signature(each).parameters]
    return sorted(found, key=lambda each: each.__name__)


@pytest.mark.parametrize("function", taking("logit_scale", pce), ids=lambda each: each.__name__)
def test_temperature_raises_and_names_the_scale(comm, function):
    assert not taking("temperature", pce, pce.dense)
    x = pce.distribute(np.zeros((2, 2)), alone())
    required = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    given_arrays = [x if inspect.unwrap(function).__module__.startswith("pce_mpi.ops") else x.full() for _ in required]
    with pytest.raises(TypeError, match="argument 'temperature'; logit_scale = 1 / temperature; its options are"):
        function(*given_arrays, temperature=2.0)


def test_every_option_has_a_default():
    added = {"operation", "over", "batch_over", "found", "support_rows", "sums_rows"}
    known = (LossOptions, LinearOptions, StatisticsOptions, ShardedDivergenceOptions)
    names = {name for each in known for name in each.__optional_keys__}
    assert {field.name for field in fields(Options)} - added == names


# Values that the pairs below and test_properties.py do not have


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 7, WIDE - 1, 1000, -(2**63), 2**63 - 1])
def test_ignored_rows_count_for_nothing(comm, ignore_index):
    for reduction in REDUCTIONS:
        with in_step(comm):
            problem = draw(
                12, WIDE, ignored=0.4, ignore_index=ignore_index, weight=True, z_loss=-1e-3, reduction=reduction
            )
            assert 0 < (problem.targets == ignore_index).sum() < 12
            for gradient in right_results(comm, problem).gradients.values():
                assert not gradient[problem.targets == ignore_index].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.uint8])
def test_weights_of_any_dtype_may_be_zero(comm, dtype):
    for targets, smoothing in product(TARGETS, (0.0, 0.1)):
        with in_step(comm):
            problem = draw(7, WIDE, targets=targets, weight=True, label_smoothing=smoothing)
            problem = problem.but(weight=(problem.weight * 4).astype(dtype))
            problem.weight[[0, 200, 201, WIDE - 1]] = 0
            if targets == "index":
                problem.weight[problem.targets[:2]] = 0
            right_results(comm, problem)


def test_probabilities_need_not_sum_to_1(comm):
    for smoothing, weight in product((0.0, 0.1), (False, True)):
        with in_step(comm):
            problem = draw(7, WIDE, targets="probabilities", label_smoothing=smoothing, weight=weight)
            factors = np.array([0, 0.5, 1, 2, 10, 0.01, 1], np.float32)
            problem = problem.but(targets=problem.targets * factors[:, None])
            right_results(comm, problem)


def test_one_hot_probabilities_equal_index_targets(comm):
    for peaked, weight in product((False, True), (False, True)):
        with in_step(comm):
            by_index = draw(7, WIDE, peaked=peaked, reduction="sum", weight=weight)
            by_probability = by_index.but(targets=np.eye(WIDE, dtype=np.float32)[by_index.targets])
            part = part_of(comm, by_index)
            results = evaluate(comm, by_probability, part)
            assert_as_dense(results, by_index.but(options={**by_index.options, "z_loss": 0.0}), part)


# Every pair of options

FACTORS = {
    "shape": [
        ((7, NARROW), -1),
        ((7, WIDE), -1),
        ((WIDE,), 0),
        ((WIDE, 6), 0),
        ((3, NARROW, 4), 1),
        ((2, WIDE, 3, 2), 1),
        ((2, 1, 3, 2, WIDE), 4),
    ],
    "dtype": [np.float32, np.float16, ml_dtypes.bfloat16, np.float64],
    "targets": TARGETS,
    "weight": [False, True],
    "ignore_index": [-100, -1, 3],
    "label_smoothing": [0.0, 0.1, 1.0],
    "logit_scale": [1.0, 0.7, 3.0],
    "margin": [None, (1.0, 0.5, 0.0), (1.35, -0.2, 0.1)],
    "reduction": ["mean", "sum", "none"],
    "compute_dtype": [None, np.float64],
    "split": SPLITS,
    "class_start": [False, True],
    "num_classes": [False, True],
    "batch_comm": [False, True],
    "peaked": [False, True],
    "offset": [0.0, 100.0],
    "dloss": ["1", "scalar", "per row"],
}
for name, row in ROWS.items():
    if "sample" in row and name in LossOptions.__annotations__ and name not in FACTORS:
        FACTORS[name] = [getattr(Options, name), row["sample"]]


def pairs_of(choice):
    return set(combinations(choice.items(), 2))


def covering_choices():
    """Choices of one value, by its place, for each factor, until every pair of values has been chosen together."""
    rng = np.random.default_rng(0)
    wanted = set()
    for (a, values_a), (b, values_b) in combinations(FACTORS.items(), 2):
        wanted |= {((a, i), (b, j)) for i in range(len(values_a)) for j in range(len(values_b))}
    all_pairs = set(wanted)
    choices = []
    while wanted:
        # Start from a pair that is missing; give each other factor the value that completes most missing pairs.
        choice = dict(min(wanted))
        for name in rng.permutation([name for name in FACTORS if name not in choice]):
            gains = []
            for value in range(len(FACTORS[name])):
                tried = {known: {**choice, name: value}[known] for known in FACTORS if known in choice or known == name}
                gains.append(len(pairs_of(tried) & wanted))
            choice[str(name)] = int(np.argmax(gains))
        choice = {name: choice[name] for name in FACTORS}
        choices.append(choice)
        wanted -= pairs_of(choice)
    assert set().union(*map(pairs_of, choices)) == all_pairs
    return choices


CHOICES = covering_choices()


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_every_pair_of_options_together(comm, number):
    chosen = {name: FACTORS[name][value] for name, value in CHOICES[number].items()}
    shape, axis = chosen.pop("shape")
    chosen = {**chosen, "axis": axis}
    local = {"compute_dtype": chosen.pop("compute_dtype")}
    how, reordered, counted = chosen.pop("split"), chosen.pop("class_start"), chosen.pop("num_classes")
    batched, upstream = chosen.pop("batch_comm"), chosen.pop("dloss")
    if chosen["targets"] == "probabilities":
        chosen["ignore_index"] = -100
    if chosen["softcap"] is not None or chosen["targets"] == "probabilities":
        chosen["margin"] = None
    problem = draw(*shape, ignored=0.3, seed=number, **chosen)
    if chosen["margin"] is not None:
        problem = problem.but(logits=as_cosines(problem.logits - problem.logits.dtype.type(chosen["offset"])))
    rng = np.random.default_rng(number)
    per_row = upstream == "per row" and chosen["reduction"] == "none"
    dloss = rng.normal(size=problem.rows_shape) if per_row else 1.0 if upstream == "1" else rng.normal()
    for rows in divisors(comm.size) if batched and problem.logits.ndim > 1 else [1]:
        with in_step(comm):
            with grid(comm, rows) as (over_classes, over_rows):
                ranges = split(problem.classes, over_classes.size, how, seed=number)
                start, stop = ranges[::-1][over_classes.rank] if reordered else ranges[over_classes.rank]
                first_last = (
                    split(problem.rows_shape[0], rows, "uneven", number)[over_rows.rank] if rows > 1 else (0, None)
                )
                part = Part(start, stop, *first_last)
                if reordered:
                    local["class_start"] = start
                if counted:
                    local["num_classes"] = problem.classes
                if batched:
                    local["batch_comm"] = over_rows
                mine = part.of_rows(dloss) if per_row else dloss
                results = evaluate(over_classes, problem, part, dloss=mine, **local)
            assert_as_dense(results, problem, part, dloss, requested=local["compute_dtype"])


# Rows that are sharded too


@pytest.mark.ranks(1, 2, 3, 4)  # every grid of rows and classes
@pytest.mark.parametrize("left", [0, 1], ids=["no row", "one row"])
def test_mean_counts_rows_left_on_all_ranks(comm, left):
    for rows in divisors(comm.size):
        with in_step(comm):
            problem = draw(2 * rows, WIDE)
            targets = problem.targets.copy()
            targets[: 2 * rows - left] = -100  # the row that counts is on the last rank
            problem = problem.but(targets=targets)
            with grid(comm, rows) as (over_classes, over_rows):
                part = Part(*split(WIDE, over_classes.size)[over_classes.rank], *split(2 * rows, rows)[over_rows.rank])
                right_results(over_classes, problem, part, batch_comm=over_rows)


@pytest.mark.ranks(1, 2, 3, 4)  # every grid of rows and classes
def test_rows_may_be_sharded_where_classes_are_whole(comm):
    problem = draw(9, WIDE, weight=True, ignored=0.3)
    part = Part(0, WIDE, *split(9, comm.size, "uneven")[comm.rank])
    results = evaluate(None, problem, part, batch_comm=comm)
    same = same_on_every_rank(comm, *results.losses.values())
    assert_as_dense(results, problem, part)
    assert same


# Statistics


def test_statistics_without_targets_have_no_log_prob(comm):
    problem = draw(9, WIDE)
    logits, targets, _ = part_of(comm, problem).on_this_rank(problem)
    with_targets = pce.class_statistics(logits, targets, comm=comm)
    without = pce.class_statistics(logits, comm=comm)
    assert without.log_prob is None
    assert with_targets.log_prob is not None
    for name in set(without._fields) - {"log_prob"}:
        assert np.array_equal(getattr(without, name), getattr(with_targets, name)), name


# Results into another dtype


@pytest.mark.parametrize("logits_dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("out_dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_out_may_have_another_dtype_than_logits(comm, logits_dtype, out_dtype):
    for targets, peaked in product(TARGETS, (False, True)):
        with in_step(comm):
            problem = draw(7, WIDE, dtype=logits_dtype, targets=targets, peaked=peaked)
            part = part_of(comm, problem)
            logits, chosen, options = part.on_this_rank(problem, comm=comm)
            outs = [np.full(logits.shape, 7, out_dtype) for _ in range(2)]
            _, residuals = pce.softmax_cross_entropy_forward(logits, chosen, **options)
            assert pce.softmax_cross_entropy_backward(1.0, residuals, out=outs[0]) is outs[0]
            assert pce.softmax_cross_entropy_value_and_grad(logits, chosen, **options, out=outs[1])[1] is outs[1]
            for out in outs:
                assert out.dtype == out_dtype
                assert excess_of_gradient(out, expect(problem, part), problem) <= 1


def test_scale_that_changes_in_place_counts_anew():
    logits, targets, scale = np.array([[0.0, 1.0]]), np.array([0]), np.array(1.0)
    losses = []
    for value in (1.0, 2.0):
        scale[...] = value
        losses.append(pce.softmax_cross_entropy(logits, targets, logit_scale=scale).item())
    np.testing.assert_allclose(losses, np.log1p(np.exp([1.0, 2.0])))
    mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    learned = pce.distribute(np.array(1.0), mesh)
    for value, expected in zip((1.0, 2.0), losses, strict=True):
        learned.local[...] = value
        assert pce.softmax_cross_entropy(logits, targets, logit_scale=learned).item() == expected
