"""The offers of candidates, the catalogue of cases, and the problems that they build."""

from dataclasses import fields, replace
import functools
from functools import partial
import math
import operator
import pydoc
import re
import sys
import textwrap
from typing import get_args

import numpy as np
import pytest

from jobs.launch import complete
from pce_mpi import dense
from pce_mpi.conformance import Gradient, Offer, Outcome, Verdict, cases, load, offer_of, offers
from pce_mpi.conformance.candidates.catalogue import cases_of_all_kinds, catalogue
from pce_mpi.conformance.candidates.fitting import problem_of, unmet_need
from pce_mpi.conformance.candidates.loading import FUNCTION_ADAPTERS, adapted
from pce_mpi.conformance.candidates.offers import EVERYTHING
from pce_mpi.conformance.judging.outcomes import Accuracy, ErrorMap, Finding
from pce_mpi.conformance.problems.cases import DTYPES, OPTIONS, REDUCTIONS, Cases, Expects, Needs, Shards, fits
from pce_mpi.conformance.problems.generators import chunks, random_problem
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.kinds.statistics import exact_statistic
from pce_mpi.conformance.serialization import from_json, to_json

ALL = cases(EVERYTHING)


def build(case, ranks, offer=EVERYTHING, **shape):
    return problem_of(case, offer, ranks, **shape)


def named(name):
    return next(case for case in ALL if case.name == name)


# Offers.


@pytest.mark.parametrize(
    ("candidate", "offer"),
    [
        (
            lambda logits, targets, *, comm, label_smoothing=0.0, weight=None: None,
            {"options": ("weight", "label_smoothing")},
        ),
        (lambda logits, targets, *, comm, **options: None, {"options": OPTIONS}),
        (lambda logits, targets, *, reduction="mean", axis=-1: None, {"reductions": REDUCTIONS, "any_axis": True}),
    ],
    ids=["named options", "open keywords", "reduction and axis"],
)
def test_offer_without_declaration_is_inferred(candidate, offer):
    assert offer_of(candidate) == Offer(**offer)


def test_offer_of_attributes_extends_signature():
    class Candidate:
        dtypes = ("bfloat16",)
        gradient = "none"

        def __call__(self, logits, targets, *, class_start, num_classes, comm, z_loss=0.0): ...

    assert offer_of(Candidate()) == Offer(dtypes=("bfloat16",), gradient=Gradient.NONE, options=("z_loss",))


def test_undeclared_parts_of_offer_stay_inferred():
    @offers(dims=[2, 3], shards="equal")
    def candidate(logits, targets, *, label_smoothing=0.0, reduction="mean"): ...

    expected = Offer(options=("label_smoothing",), reductions=REDUCTIONS, dims=(2, 3), shards="equal")
    assert offer_of(candidate) == expected
    more = offers(dims=(3,), options=())(candidate)
    assert offer_of(more) == replace(expected, dims=(3,), options=())
    assert offer_of(partial(candidate, label_smoothing=0.1)) == offer_of(candidate)
    assert offer_of(offers(dims=(4,))(partial(candidate))) == replace(offer_of(candidate), dims=(4,))
    assert offer_of(candidate, gradient="backward", dims=(4,)) == replace(offer_of(candidate), gradient="backward")


def test_signature_of_wrapper_offers_no_options():
    class Module:
        def __call__(self, *arguments, **keywords): ...

        def forward(self, logits, targets, ignore_index=-100): ...

    assert offer_of(lambda *arguments, **keywords: None) == Offer()
    assert offer_of(Module()) == Offer(options=("ignore_index",))
    assert offer_of(max) == Offer()  # without a signature


def test_class_is_no_candidate():
    class Loss:
        def __call__(self, logits, targets, **options): ...

    class Function:
        @classmethod
        def apply(cls, *arguments): ...

    with pytest.raises(
        TypeError, match=r"Loss is a class, .* the candidate is an instance of it, as in loss = Loss\(\)"
    ):
        offer_of(Loss)
    with pytest.raises(TypeError, match=r"the candidate is Function\.apply$"):
        offer_of(Function)


def test_bound_method_takes_no_declarations():
    with pytest.raises(TypeError, match="a method takes no declarations: write a function that calls it"):
        offers(dims=(2, 3))(Finding("loss", "wrong").__eq__)


def test_help_on_offers_has_every_parameter():
    text = pydoc.render_doc(offers, renderer=pydoc.plaintext)
    assert [each.name for each in fields(Offer) if f"    {each.name} : " not in text] == []
    assert 'kind="log_prob"' in text and "candidate(logits, targets, *, class_start" in text


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        ("dtypes", "float32", TypeError, "dtypes of an offer must be a tuple, got 'float32'"),
        ("dtypes", ("int8",), ValueError, "got 'int8'"),
        ("dtypes", (), ValueError, "must not be empty"),
        ("options", ("smoothing",), ValueError, "label_smoothing.*got 'smoothing'"),
        ("reductions", ("max",), ValueError, "mean, sum, none, got 'max'"),
        ("gradient", "yes", ValueError, "none, value, backward, got 'yes'"),
        ("shards", "even", ValueError, "equal, array_split, chunks, any, got 'even'"),
        ("arrays", "jax", ValueError, "numpy, cupy, torch, got 'jax'"),
        ("averaged", ("ranks",), ValueError, "data, context, micro-batches, got 'ranks'"),
        ("dims", (0,), ValueError, "got 0"),
        ("dims", (2.0,), ValueError, "got 2.0"),
        ("ignore_index", "a", TypeError, "ignore_index of an offer must be an int, got 'a'"),
        ("ignore_index", 1.5, TypeError, "must be an int, got 1.5"),
        ("ignore_index", True, TypeError, "must be an int, got True"),
        *(
            (each.name, wrong, TypeError, f"{each.name} of an offer must be True or False, got {wrong!r}")
            for each in fields(Offer)
            if isinstance(each.default, bool)
            for wrong in ("x", 1, None)
        ),
    ],
)
def test_offer_with_unknown_value_raises(field, value, error, text):
    with pytest.raises(error, match=text):
        Offer(**{field: value})


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"kind": "kl", "probabilities": True}, "probabilities=True says nothing of a candidate of kind='kl'"),
        ({"kind": "linear", "probabilities": True}, "probabilities=True says nothing"),
        ({"kind": "loss", "direction": "reverse"}, "direction='reverse' says nothing of .* kind='loss'"),
        ({"temperature_squared": True}, "temperature_squared=True says nothing"),
        ({"averaged": ("data",)}, "averaged=.* says nothing"),
        ({"dhidden": "partial"}, "dhidden='partial' says nothing"),
        ({"kind": "kl", "rest": "bucket"}, "rest='bucket' says nothing"),
        ({"kind": "log_prob", "smoothing": "others"}, "smoothing='others' says nothing"),
        ({"kind": "entropy", "several_targets": True}, "several_targets=True says nothing"),
        ({"kind": "entropy", "ignore_index": -1}, "ignore_index=-1 says nothing"),
        ({"class_numbers": False, "probabilities": False}, "class_numbers=False says that it takes probabilities, and"),
        ({"normalized": True}, "normalized=True is of probabilities"),
    ],
)
def test_declarations_that_contradict_are_refused(declared, text):
    @offers(**declared)
    def candidate(*arrays, comm, **facts): ...

    with pytest.raises(ValueError, match=text):
        offer_of(candidate)


def test_offer_of_another_type_raises():
    def candidate(logits, targets): ...

    candidate.offer = {"dtypes": ("float32",)}
    with pytest.raises(TypeError, match="must be an Offer, got dict"):
        offer_of(candidate)


@pytest.mark.parametrize("name", FUNCTION_ADAPTERS)
def test_adapters_of_functions_refuse_same_bits(name):
    @offers(same_bits=True)
    def candidate(logits, targets, group): ...

    with pytest.raises(ValueError, match=f"same_bits cannot be judged through the adapter {name}: .* leave it out"):
        adapted(name, candidate)


def test_adapter_that_shards_classes_refuses_step():
    @offers(kind="step")
    def candidate(logits, targets, axis_name): ...

    with pytest.raises(
        ValueError, match="jax-shard-map shards the classes of logits, and a candidate of kind 'step' takes others"
    ):
        adapted("jax-shard-map", candidate)


@pytest.mark.parametrize(
    ("needs", "lacks", "what"),
    [
        (Needs(options=("z_loss",)), {"options": ()}, "z_loss"),
        (Needs(reductions=("none",)), {"reductions": ("mean", "sum")}, "reduction none"),
        (Needs(probabilities=True), {"probabilities": False}, "probability targets"),
        (Needs(dims=4), {"dims": (2, 3)}, "4-D logits"),
        (Needs(any_axis=True), {"any_axis": False}, "a class axis that is not the last"),
        (Needs(shards="chunks"), {"shards": "equal"}, "uneven shards"),
        (Needs(shards="any"), {"shards": "chunks"}, "shards of any length"),
        (Needs(gradient=Gradient.VALUE), {"gradient": "none"}, "a gradient"),
        (Needs(gradient=Gradient.BACKWARD), {"gradient": "value"}, "an upstream gradient"),
        (Needs(strided=True), {"strided": False}, "logits that are not contiguous"),
        (Needs(keeps_logits=True), {"overwrites_logits": True}, "logits left as they are"),
        (Needs(deterministic=True), {"deterministic": False}, "the same bits in every run"),
        (Needs(empty=True), {"empty": False}, "zero rows"),
        (Needs(any_ignore_index=True), {"options": (), "ignore_index": -100}, "any ignore_index"),
        (Needs(unnormalized=True), {"normalized": True}, "probabilities that do not sum to 1"),
        (Needs(checks_targets=True), {"checks_targets": False}, "the refusal of targets that are no class"),
        (Needs(num_classes=True), {"num_classes": False}, "num_classes"),
    ],
)
def test_missing_need_of_a_case_is_named(needs, lacks, what):
    assert unmet_need(EVERYTHING, needs, "float32") is None
    assert unmet_need(replace(EVERYTHING, **lacks), needs, "float32") == what


def test_case_fits_conventions_of_offer():
    smoothed = named("label_smoothing/float64")
    others = problem_of(smoothed, replace(EVERYTHING, smoothing="others"), 3)
    wanted = np.full((others.rows, others.classes), 0.125 / (others.classes - 1))
    wanted[np.arange(others.rows), others.targets] = 1 - 0.125
    log_p = -dense.softmax_cross_entropy(
        np.repeat(others.logits, others.classes, axis=0),
        np.tile(np.arange(others.classes), others.rows),
        reduction="none",
    ).reshape(wanted.shape)
    assert np.allclose(others.expected[0], -(wanted * log_p).sum() / others.rows, rtol=1e-14)
    ignored = problem_of(named("ignore_index/float32"), replace(EVERYTHING, options=(), ignore_index=-1), 3)
    assert ignored.options == {"ignore_index": -1} and (~ignored.valid).sum() == 2
    sums = problem_of(named("probabilities/weight"), replace(EVERYTHING, normalized=True), 3).targets.sum(axis=-1)
    assert np.allclose(sums, 1.0, rtol=1e-6)
    masked = problem_of(named("probabilities/zero-at-minus-inf"), replace(EVERYTHING, normalized=True), 3)
    assert np.allclose(masked.targets.sum(axis=-1), 1.0, rtol=1e-6)
    assert (masked.targets[masked.logits == -np.inf] == 0.0).all()


def test_probabilities_alone_stand_for_class_numbers():
    offer = replace(EVERYTHING, class_numbers=False, probabilities=False)
    assert offer.probabilities
    for name in ("random-logits/float32", "axis/3-D-second", "upstream/each-row", "label_smoothing/float32"):
        numbers, one_hot = problem_of(named(name), EVERYTHING, 3), problem_of(named(name), offer, 3)
        assert one_hot.targets.shape == one_hot.logits.shape and one_hot.targets.dtype == one_hot.dtype
        for got, due in zip(one_hot.expected, numbers.expected, strict=True):
            assert np.allclose(got, due, rtol=1e-13, atol=1e-16), name
    for name in ("ignore_index/float32", "target-out-of-range/far", "targets-on-one-rank", "ignored/inside"):
        assert unmet_need(offer, named(name).needs, "float32") == "class numbers"


@pytest.mark.parametrize("ranks", [3, 4])
def test_rows_that_ranks_divide_are_given(ranks):
    offer = replace(EVERYTHING, any_rows=False, dims=(2, 3, 4))
    for case in cases(offer):
        if case.family not in ("many-rows", "rows-sharded"):
            assert build(case, ranks, offer).rows % ranks == 0, case.name


def test_offer_without_2_d_has_every_case():
    offer = replace(EVERYTHING, dims=(3,))
    for case in cases(offer):
        if case.rows * case.classes > 1000:
            continue
        problem = problem_of(case, offer, 3)
        assert problem.logits.ndim == 3, case.name
        if case.needs.dims == 2 and case.expects == Expects.ANSWER:
            flat = problem_of(case, EVERYTHING, 3)
            assert np.array_equal(problem.expected[0].reshape(-1), flat.expected[0].reshape(-1), equal_nan=True), (
                case.name
            )
    assert len(cases(offer)) > 100


def test_row_of_kinds_is_a_kind(monkeypatch):
    """Logsumexps, called without targets, of twice the logits."""
    own = Cases()
    own.case("own-case/{dtype}")(random_problem)

    def doubled(problem, seed):
        return replace(problem, logits=2 * problem.logits)

    exact = partial(exact_statistic, "logsumexp")
    monkeypatch.setitem(KINDS, "logsumexp", replace(KINDS["entropy"], exact=exact, fitted=doubled, cases=own))
    offer = Offer(kind="logsumexp", options=("softcap",))
    assert offer.reductions == ("none",)
    chosen = {case.name: case for case in cases(offer)}
    assert "own-case/float32" in chosen and not [case for case in cases(EVERYTHING) if case.family == "own-case"]
    assert {"random-logits/float32", "softcap/float32"} <= chosen.keys() and "targets/int32" not in chosen
    problem, plain_one = (problem_of(chosen["random-logits/float32"], each, 2) for each in (offer, Offer()))
    assert np.array_equal(problem.logits, 2 * plain_one.logits)
    assert np.allclose(problem.expected[0], np.log(np.exp(problem.logits.astype(np.float64)).sum(axis=-1)))
    with pytest.raises(
        ValueError, match="options of an offer must be among logit_scale, softcap, support, got 'weight'"
    ):
        Offer(kind="logsumexp", options=("weight",))
    with pytest.raises(
        ValueError, match="topk_kl, step, placement, linear, linear_log_prob, linear_entropy, logsumexp, got 'mar"
    ):
        Offer(kind="margin")


# Loading candidates.


def test_load_finds_candidate_in_file_with_imports(tmp_path):
    (tmp_path / "neighbour_of_candidate.py").write_text("SCALE = 2\n")
    (tmp_path / "file_of_candidate.py").write_text(
        textwrap.dedent(
            """
            from neighbour_of_candidate import SCALE

            class Group:
                @staticmethod
                def candidate(logits): return SCALE * logits
            """
        )
    )
    assert load(f"{tmp_path}/file_of_candidate.py:Group.candidate")(4) == 8


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("candidate", ValueError, "package.module:candidate or path/to/file.py:candidate, got 'candidate'"),
        ("no_such_package.module:candidate", ImportError, "there is no module 'no_such_package'"),
        ("pce_mpi.no_such_module:candidate", ImportError, "there is no module 'pce_mpi.no_such_module'"),
        ("no_such_folder/file.py:candidate", ImportError, "there is no file"),
        ("pce_mpi.loss:no_such_function", ImportError, "pce_mpi.loss has no 'no_such_function'"),
        ("pce_mpi.loss:__name__", TypeError, "must be callable, got str"),
    ],
)
def test_load_of_unknown_candidate_names_it(name, error, text):
    with pytest.raises(error, match=text):
        load(name)


# The catalogue.


def test_case_has_unique_name_and_description():
    assert len({case.name for case in ALL}) == len(ALL)
    for case in ALL:
        assert " " not in case.name and case.catches.endswith((".", ")")), case.name


def test_catalogue_has_each_option_alone_and_in_pairs():
    names = {case.name for case in ALL}
    for option in OPTIONS:
        assert {f"{option}/{dtype}" for dtype in DTYPES} <= names
        pairs = [name for name in names if name.startswith("pair/") and option in name.removeprefix("pair/").split("+")]
        assert len(pairs) == len(OPTIONS) - 1


def test_cases_of_candidate_are_offered():
    offer = Offer(options=("weight",), reductions=("none",), gradient=Gradient.NONE)
    chosen = cases(offer)
    assert chosen and all(unmet_need(offer, case.needs, case.dtype) is None for case in chosen)
    assert {case.name for case in chosen} == {
        case.name for case in catalogue(offer) if not unmet_need(offer, case.needs, case.dtype)
    }
    assert not [case for case in chosen if case.family in ("label_smoothing", "upstream", "axis", "probabilities")]


def test_cases_not_about_numbers_have_offered_dtype():
    assert {case.dtype for case in cases(Offer(dtypes=("float16", "bfloat16")))} == {"float16", "bfloat16"}
    assert [case.dtype for case in cases(Offer(dtypes=("float16",)), pattern="p-equal-1")] == ["float16"]
    assert [case.dtype for case in cases(EVERYTHING, pattern="p-equal-1", dtypes=["bfloat16"])] == ["bfloat16"]


def test_pattern_is_name_family_or_shell_pattern():
    assert [case.name for case in cases(pattern="weight/float64")] == ["weight/float64"]
    assert {case.family for case in cases(pattern="weight")} == {"weight"}
    assert {case.family for case in cases(pattern=["empty-*", "one-class"])} == {"empty-shard", "one-class"}


def test_pattern_or_dtype_without_case_raises():
    with pytest.raises(ValueError, match="no case is called 'smoothing'; families: random-logits"):
        cases(pattern=["weight", "smoothing"])
    with pytest.raises(ValueError, match="got 'float8'"):
        cases(dtypes=["float8"])


# The large cases that stand for families of small ones, and why others have none.
AT_SIZE = {
    "large/vocabulary-*": "random-logits many-classes uneven-shards targets-at-shard-borders chunk-borders product",
    "large/65536-tokens": "many-rows reduction accumulated-dw accumulated-loss",
    "options do not depend on the number of classes or rows": "weight ignore_index label_smoothing z_loss logit_scale "
    "softcap padded-softcap temperature pair all-options ignored probabilities several-targets support bias",
    "special values are of one row": "offset logits-of-1000 logits-of-1000-smoothed p-near-1 p-equal-1 masked-shard "
    "masked-classes finite-mask masked-target masked-row nan plus-inf certain-teacher",
    "close and far teachers are of one row": "far-teacher near-teacher close-teacher equal-logits",
    "contracts are the same at any size": "upstream backward-twice two-losses-alive inputs-unmodified targets "
    "results-not-aliased one-after-the-other result-form same-on-every-rank same-in-every-run same-bits "
    "target-out-of-range gathered-logits dims axis strides padded-columns",
    "the subject is small": "empty-shard fewer-classes-than-ranks one-class zero-rows targets-on-one-rank",
    "rows are few on a grid, and in a step": "rows-sharded step",
    "a placement has no classes": "placement",
}


def test_families_have_large_counterparts_or_reasons():
    large = {case.name for case in cases_of_all_kinds(large=True) if case.family == "large"}
    families = {case.family for case in cases_of_all_kinds()}
    assert sorted(" ".join(AT_SIZE.values()).split()) == sorted(families)
    patterns = [each for each in AT_SIZE if each.startswith("large/")]
    assert all(any(fits(name, pattern) for name in large) for pattern in patterns)
    assert {name for name in large if not any(fits(name, each) for each in patterns)} == {
        "large/more-than-2**31-elements"
    }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].shared_cases])
def test_large_vocabularies_are_those_of_models(kind):
    """Sampled: one vocabulary of each kind, on uneven shards."""
    (case,) = (case for case in catalogue(Offer(kind=kind), large=True) if case.name == "large/vocabulary-32003")
    problem = problem_of(case, Offer(kind=kind), 3)
    assert problem.classes == 32_003 and len(set(np.diff(problem.splits))) > 1
    assert set(problem.splits[1:-1]) <= {*problem.targets.reshape(-1)} or not problem.with_numbers


@pytest.mark.parametrize("kind", ["linear", "linear_log_prob", "linear_entropy"])
def test_heads_have_tokens_of_a_long_context(kind):
    """Sampled: some rows of real products, as an identity of so many rows would not fit."""
    (case,) = (case for case in catalogue(Offer(kind=kind), large=True) if case.name == "large/65536-tokens")
    problem = problem_of(case, Offer(kind=kind), 3)
    assert problem.operands.hidden.shape == (65_536, 8) and not problem.operands.with_identity
    rows = np.random.default_rng(0).choice(65_536, 64)
    hidden, w = (each.astype(np.float64) for each in (problem.operands.hidden[rows], problem.operands.w))
    assert np.allclose(problem.logits[rows], hidden @ w, rtol=1e-14, atol=1e-14)


# Problems.


@pytest.mark.parametrize("shards", get_args(Shards))
def test_reported_shape_builds_the_same_problem(shards):
    """The command that reruns a failure has the rows and classes of the report, not those of the setting."""
    offer = replace(EVERYTHING, shards=shards)
    for case in cases(offer):
        if case.rows * case.classes < 1000:
            first = build(case, 3, offer, rows=7, classes=10)
            again = build(case, 3, offer, rows=first.rows, classes=first.classes)
            assert first.splits == again.splits, case.name
            assert np.array_equal(first.logits, again.logits, equal_nan=True), case.name
            assert np.array_equal(first.targets, again.targets), case.name


@pytest.mark.parametrize("shards", get_args(Shards))
def test_shards_of_any_size_are_within_offer(shards):
    offer = replace(EVERYTHING, shards=shards)
    for case in cases(offer):
        if case.family == "rows-sharded":
            continue  # its shards are those of a grid
        shapes = [{}, {"rows": 1, "classes": 1}, {"rows": 2, "classes": 3}] if case.rows * case.classes < 1000 else [{}]
        for ranks in range(1, 7):
            for shape in shapes:
                problem = build(case, ranks, offer, **shape)
                splits = problem.splits
                assert len(splits) == ranks + 1 and (splits[0], splits[-1]) == (0, problem.classes), case.name
                assert list(splits) == sorted(splits), case.name
                if case.expects != Expects.REFUSAL and not problem.with_probabilities:
                    counted = problem.targets.reshape(-1)[problem.valid]
                    assert ((counted >= 0) & (counted < problem.classes)).all(), case.name
                if shards == "equal":
                    assert len(set(np.diff(splits))) == 1, case.name
                elif shards == "array_split":
                    lengths = np.diff(splits)
                    assert lengths.min() > 0 and lengths.max() - lengths.min() < 2, case.name
                elif shards == "chunks":
                    assert splits == chunks(problem.classes, ranks), case.name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "loss"])
def test_cases_of_one_kind_have_any_size(kind):
    """Fewer classes than ranks, too."""
    offer = Offer(kind=kind, options=KINDS[kind].options, gradient="value")
    shared = {case.name for case in catalogue()}
    own = [case for case in cases(offer) if case.name not in shared]
    for case in own:
        for ranks, classes in [(1, 1), (3, 2), (4, 5)]:
            problem = problem_of(case, offer, ranks, rows=2, classes=classes)
            assert problem.gradients, case.name
            assert np.isfinite(problem.expected[0]).all() or kind == "placement", case.name
    assert own


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_are_uneven_or_empty_as_named(ranks):
    def lengths(name, shards="any"):
        return np.diff(build(named(name), ranks, replace(EVERYTHING, shards=shards)).splits)

    assert len(set(lengths("uneven-shards/any"))) > 1 and 0 not in lengths("uneven-shards/any")
    assert lengths("uneven-shards/chunks", "chunks")[-1] < lengths("uneven-shards/chunks", "chunks")[0]
    for shards in ("chunks", "any"):
        assert lengths("empty-shard/last", shards)[-1] == 0
        assert lengths("fewer-classes-than-ranks", shards).tolist() == [1] * (ranks - 1) + [0]
        assert lengths("one-class", shards).tolist() == [1] + [0] * (ranks - 1)
    assert len(set(lengths("uneven-shards/chunks", "array_split"))) == 2
    assert lengths("empty-shard/first")[0] == 0
    assert lengths("empty-shard/middle")[1] == 0


def test_logits_have_memory_order_of_case():
    assert build(named("random-logits/float32"), 2).shard(0).arrays["logits"].flags.c_contiguous
    assert build(named("strides/transposed"), 2).shard(0).arrays["logits"].flags.f_contiguous
    for name in ("strides/every-second", "padded-columns/sliced-off"):
        logits = build(named(name), 2).shard(0).arrays["logits"]
        assert not logits.flags.c_contiguous and not logits.flags.f_contiguous
        # The elements between are large, so that reading them shows.
        assert logits.base.max() > 1e4


def test_only_bad_targets_and_gathered_logits_are_refusable():
    assert {case.family for case in ALL if case.expects == Expects.REFUSAL} == {"target-out-of-range"}
    assert {case.family for case in ALL if case.expects == Expects.EITHER} == {
        "gathered-logits",
        "targets",
        "backward-twice",
    }


def test_special_values_are_in_named_places():
    masked = build(named("masked-shard/another-in-each-row"), 3)
    for row in range(0, masked.rows, 2):
        owners = {masked.rank_of(number) for number in np.flatnonzero(masked.logits[row] == -np.inf)}
        assert owners == {row // 2 % 3} and masked.rank_of(masked.targets[row]) != row // 2 % 3
    assert [(row == -np.inf).sum() for row in masked.logits[1::2]] == [8, 8, 8, 8]  # of 24: no shard of -inf alone
    assert np.isnan(build(named("masked-row"), 3).expected[0].astype(float)).sum() == 1
    assert np.isfinite(build(named("nan/in-an-ignored-row"), 3).expected[0])
    assert np.isinf(build(named("masked-target"), 3).expected[0]).sum() == 1
    assert np.count_nonzero(build(named("p-equal-1"), 3).expected[1].any(axis=-1)) == 3  # of 6 rows


# Outcomes.


def test_outcome_survives_json():
    picture = ErrorMap([[0.5, math.inf]], [0.0, 1.0, 2.0], 1, 2, [(0, 1)])
    outcome = Outcome(
        case="weight/float32",
        catches="A fault.",
        verdict=Verdict.FAIL,
        findings=[Finding("loss", "off")],
        accuracies=[Accuracy("loss", "float32", math.inf, 0.5, 16.0, "row 1")],
        splits=(0, 1, 2),
        picture=picture,
    )
    given = to_json(outcome)
    assert given["verdict"] == "FAIL" and given["picture"]["errors"] == [[0.5, "inf"]]
    assert from_json(Outcome, given) == outcome
    for path, wrong, said in [
        (["rows"], "6", "int is due, got str"),
        (["verdict"], "perhaps", "'perhaps' is not a valid Verdict"),
        (["note"], None, "str is due, got NoneType"),
        (["splits"], {}, "list is due, got dict"),
        (["findings", 0], 7, "dict is due, got int"),
        (["accuracies", 0, "error"], "much", "could not convert"),
        (["picture", "errors", 0, 1], None, "NoneType"),
    ]:
        damaged = to_json(outcome)
        place = functools.reduce(operator.getitem, path[:-1], damaged)
        place[path[-1]] = wrong
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            from_json(Outcome, damaged)
    with pytest.raises(TypeError, match=r"missing .* 'catches'"):
        from_json(Outcome, {"case": "a", "verdict": "pass"})
    assert outcome.failed and outcome.family == "weight"


def test_importing_the_kit_does_not_start_mpi():
    program = "import sys, pce_mpi.conformance as kit; kit.cases(); print('mpi4py.MPI' in sys.modules)"
    process = complete([sys.executable, "-c", program])
    assert process.stdout == "False\n"
