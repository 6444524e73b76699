"""Running cases of the conformance kit on all ranks: arguments, checks and outcomes."""

from dataclasses import asdict, replace
from functools import partial
import re
import unittest

import numpy as np
import pytest

from candidates.by_hand import candidate as by_hand
from candidates.wrong.probabilities import ProbabilitiesSumTo1
from candidates.wrong.rows import ClassNumbersInUint8
import pce_mpi as pce
from pce_mpi.conformance import Gradient, Offer, Tolerance, Verdict, assert_conforms, cases, offers, run_case
from pce_mpi.conformance.candidates.catalogue import catalogue, shapes
from pce_mpi.conformance.candidates.loading import NAMED_CANDIDATES
from pce_mpi.conformance.problems.cases import OPTIONS, REDUCTIONS

# One rank alone, and shards of several lengths.
pytestmark = pytest.mark.ranks(1, 3)

STRICT = Tolerance(strict=True)


def case_of(name, offer=None):
    return next(case for case in cases(offer) if case.name == name)


def run(candidate, name, comm, offer=None, **options):
    """Run a case for a candidate that offers the options in its signature, and a gradient by value."""
    return run_case(candidate, case_of(name), comm, offer=offer, **options)


def kinds(outcome):
    return [finding.kind for finding in outcome.findings]


def right(logits, targets, *, class_start, num_classes, comm, **options):
    return pce.softmax_cross_entropy_value_and_grad(
        logits, targets, comm=comm, class_start=class_start, num_classes=num_classes, **options
    )


def right_backward(logits, targets, *, comm, **options):
    loss, residuals = pce.softmax_cross_entropy_forward(logits, targets, comm=comm, **options)
    return loss, lambda dloss: pce.softmax_cross_entropy_backward(dloss, residuals)


def right_but(change):
    """A candidate that changes the logits or its right results."""

    def candidate(logits, targets, *, comm, **options):
        result = pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, **options)
        return change(logits, *result)

    return candidate


def overwriting(logits, loss, gradient, factor=1):
    logits -= 1.0
    return loss, gradient * np.float32(factor)


BACKWARD = Offer(gradient=Gradient.BACKWARD, reductions=REDUCTIONS)


@pytest.mark.parametrize("name", ["pce", "pce-value-and-grad"])
def test_own_functions_pass_strictly(comm, name):
    candidate = NAMED_CANDIDATES[name]
    # All rows are on every rank: one rank shows what very many of them do.
    chosen = [case for case in cases(candidate) if comm.size == 1 or case.family != "many-rows"]
    outcomes = [run_case(candidate, case, comm, tolerance=STRICT) for case in chosen]
    assert [outcome for outcome in outcomes if outcome.verdict != Verdict.PASS] == []


@pytest.mark.parametrize("name", ["random-logits/float32", "same-in-every-run", "target-out-of-range/far"])
def test_run_case_without_communicator_is_one_process(name):
    outcome = run(right_backward, name, None, offer=BACKWARD)
    assert (outcome.verdict, outcome.ranks, outcome.findings) == (Verdict.PASS, 1, [])


# Arguments.


def test_candidate_gets_only_options_of_case(comm):
    seen = []

    @offers(options=OPTIONS, reductions=("mean",), dims=(2, 3), any_axis=True, gradient="none")
    def candidate(logits, targets, *, class_start, num_classes, comm, **options):
        seen.append(options)
        return pce.softmax_cross_entropy(logits, targets, comm=comm, **options)

    for name in ("random-logits/float32", "label_smoothing/float32", "axis/3-D-first"):
        assert not run(candidate, name, comm).failed
    assert seen == [{}, {"label_smoothing": 0.125}, {"axis": 0}]


def test_reduction_is_passed_if_several_are_offered(comm):
    seen = []

    def candidate(logits, targets, *, class_start, num_classes, comm, reduction="mean"):
        seen.append(reduction)
        return right(logits, targets, class_start=class_start, num_classes=num_classes, comm=comm, reduction=reduction)

    for reduction in REDUCTIONS:
        assert not run(candidate, f"reduction/{reduction}", comm).failed
    assert seen == list(REDUCTIONS)


def test_rank_gets_own_classes_and_private_communicator(comm):
    seen = []

    def candidate(logits, targets, *, class_start, num_classes, comm):
        seen.append((class_start, logits.shape[-1], num_classes, comm.size, comm.handle))
        return right(logits, targets, class_start=class_start, num_classes=num_classes, comm=comm)

    assert not run(candidate, "uneven-shards/any", comm).failed
    ((start, width, classes, size, handle),) = seen
    assert comm.allreduce(width) == classes == 29 and size == comm.size and handle != comm.handle
    assert start == sum(comm.allgather(width)[: comm.rank])


def test_upstream_gradient_is_shaped_as_loss(comm):
    seen = []

    def candidate(logits, targets, *, comm, **options):
        loss, backward = right_backward(logits, targets, comm=comm, **options)

        def recorded(dloss):
            seen.append((dloss.shape, dloss.dtype.name))
            return backward(dloss)

        return loss, recorded

    for name in ("random-logits/float32", "upstream/scalar", "upstream/each-row"):
        assert not run(candidate, name, comm, offer=BACKWARD).failed
    assert seen == [((), "float32"), ((), "float32"), ((6,), "float32")]


def test_candidate_of_cupy_gets_cupy_arrays(comm, cupy):
    def candidate(logits, targets, *, class_start, num_classes, comm, **options):
        assert all(isinstance(each, cupy.ndarray) for each in (logits, targets, options.get("weight", logits)))
        return on_host(logits, targets, comm, {name: cupy.asnumpy(array) for name, array in options.items()})

    def on_host(logits, targets, comm, options):
        arrays = cupy.asnumpy(logits), cupy.asnumpy(targets)
        return tuple(map(cupy.asarray, pce.softmax_cross_entropy_value_and_grad(*arrays, comm=comm, **options)))

    offer = Offer(arrays="cupy", options=OPTIONS)
    for name in ("random-logits/float32", "weight/float32", "inputs-unmodified"):
        outcome = run(candidate, name, comm, offer=offer)
        assert outcome.findings == []

    def writes(logits, targets, *, class_start, num_classes, comm):
        result = on_host(logits, targets, comm, {})
        logits[...] = 0.0
        return result

    assert kinds(run(writes, "inputs-unmodified", comm, offer=offer)) == ["inputs modified"]


# Cases that are not offered, refusals, errors.


def test_case_not_offered_is_not_run(comm):
    def candidate(*_, **__):
        raise AssertionError("was called")

    outcome = run(candidate, "random-logits/bfloat16", comm, offer=Offer())
    assert (outcome.verdict, outcome.note, outcome.failed) == (Verdict.NOT_OFFERED, "bfloat16", False)


def test_expected_refusal_passes(comm):
    outcome = run(right, "target-out-of-range/one-too-many", comm)
    assert outcome.verdict == Verdict.PASS and "IndexError: targets[3] = 24 is outside [0, 24)" in outcome.note


def test_refusal_of_answerable_case_fails(comm):
    def candidate(logits, targets, **_):
        raise NotImplementedError("one day")

    outcome = run(candidate, "random-logits/float32", comm)
    assert outcome.verdict == Verdict.REFUSED and outcome.failed and kinds(outcome) == ["raised"]
    assert "NotImplementedError: one day" in outcome.findings[0].text


def test_refusal_on_some_ranks_fails(comm):
    if comm.size == 1:
        pytest.skip("one rank is all ranks")

    def candidate(logits, targets, *, comm, **_):
        if comm.rank == 1:
            raise IndexError("index 8 is out of bounds")
        return np.zeros((), np.float32), np.zeros_like(logits)

    for name in ("target-out-of-range/far", "random-logits/float32", "gathered-logits"):
        outcome = run(candidate, name, comm)
        assert outcome.verdict == Verdict.FAIL and kinds(outcome) == ["raised on some ranks"]
        place = r"IndexError: index 8 is out of bounds at \S*test_conformance_running.py:\d+ in candidate \(rank 1\)"
        assert re.search(place, outcome.findings[0].text)


def test_function_that_needs_an_adapter_is_told(comm):
    def function(logits, targets, group): ...

    with pytest.raises(TypeError, match=r"in Python adapted\(\"torch-shards\", function\)$"):
        assert_conforms(function, case_of("random-logits/float32"), comm)


def test_malformed_result_does_not_hide_missing_refusal(comm):
    outcome = run(lambda *_, **__: {"loss": 1.0}, "target-out-of-range/far", comm, offer=Offer())
    refusal, result = (finding.text for finding in outcome.findings)
    assert refusal.startswith("targets[3] =") and "no rank refused it; where that is meant" in refusal
    assert result == "(loss, dlogits) is due, got dict"


@pytest.mark.parametrize("name", ["random-logits/float32", "same-in-every-run"])
def test_candidate_that_frees_its_communicator_is_told(comm, name):
    def frees(logits, targets, *, class_start, num_classes, comm, **options):
        found = pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, **options)
        comm.Free()
        return found

    (case,) = cases(pattern=name)
    outcome = run_case(frees, case, comm)
    assert outcome.failed
    assert "it freed the communicator that it was given" in outcome.findings[0].text
    assert "running.py" not in str(outcome)


def test_unknown_keyword_is_no_refusal_of_a_target(comm):
    @offers(options=("ignore_index",))
    def candidate(logits, targets, *, class_start, num_classes, comm):
        return right(logits, targets, class_start=class_start, num_classes=num_classes, comm=comm)

    outcome = run(candidate, "target-out-of-range/another-ignore_index", comm)
    assert outcome.verdict == Verdict.REFUSED
    assert "unexpected keyword argument 'ignore_index'" in outcome.findings[0].text


@pytest.mark.ranks(1)  # a rank looks at its own
@pytest.mark.parametrize(
    ("offer", "returned", "text"),
    [
        (Offer(), 1.0, r"\(loss, dlogits\) is due, got float"),
        (Offer(), (1.0,), r"\(loss, dlogits\) is due, got a tuple of 1: float"),
        (Offer(), {"loss": 1.0}, r"^\(loss, dlogits\) is due, got dict$"),
        (
            Offer(),
            (1.0, [1.0] * 6),
            r"the gradient is due as an array, got a list of 6: float, float, float, float, ...$",
        ),
        (Offer(), (1.0, None), "the gradient is due as an array, got NoneType"),
        (Offer(gradient=Gradient.NONE), (1.0, 2.0), "the loss is due as an array, got a tuple of 2: float, float"),
        (Offer(gradient=Gradient.BACKWARD), (1.0, 2.0), "backward can be called, got float"),
        (Offer(gradient=Gradient.NONE), "one", "dtype"),
    ],
)
def test_malformed_result_is_named(comm, offer, returned, text):
    outcome = run(lambda *_, **__: returned, "random-logits/float32", comm, offer=offer)
    assert outcome.verdict == Verdict.FAIL
    assert re.search(text, outcome.findings[0].text)


# Checks beside the numbers.


def test_writing_beside_view_fails(comm):
    def beside(logits, *result):
        logits.base[..., -1] = 0.0
        return result

    assert kinds(run(right_but(beside), "padded-columns/sliced-off", comm)) == ["inputs modified"]


# The bits of one rank.

SAME_BITS = replace(BACKWARD, same_bits=True, batch_comm=True)


def test_same_bits_calls_each_problem_on_one_rank(comm):
    calls = []

    def candidate(logits, targets, *, comm, **options):
        calls.append((comm.size, options["class_start"], logits.shape[-1]))
        return right_backward(logits, targets, comm=comm, **options)

    assert run(candidate, "two-losses-alive/plain", comm, offer=SAME_BITS).verdict == Verdict.PASS
    assert calls[2:] == ([(1, 0, 24)] * 2 if comm.size > 1 else [])
    calls.clear()
    assert run(candidate, "backward-twice/scalar", comm, offer=SAME_BITS).verdict == Verdict.PASS
    assert calls[1:] == ([(1, 0, 24)] if comm.size > 1 else [])
    calls.clear()
    assert run(candidate, "target-out-of-range/far", comm, offer=SAME_BITS).verdict == Verdict.PASS
    assert run(candidate, "two-losses-alive/plain", comm, offer=BACKWARD).verdict == Verdict.PASS
    assert len(calls) == 3  # refusals have no bits, and others did not declare them


def test_other_communicator_with_same_bits_fails(comm, several):
    everyone = comm

    def sends_to_all(logits, targets, *, comm, **options):
        return right_backward(logits, targets, comm=everyone, **options)

    outcome = run(sends_to_all, "random-logits/float32", comm, offer=SAME_BITS)
    assert kinds(outcome) == ["other bits"]
    assert outcome.findings[0].text.startswith("raised on one rank, with all classes, where several ranks returned: ")
    assert run(sends_to_all, "random-logits/float32", comm, offer=BACKWARD).verdict == Verdict.PASS


# Outcomes.


def test_outcome_is_the_same_on_every_rank(comm):
    factor = np.float32(1 + (comm.rank == comm.size - 1))
    outcome = run(right_but(lambda _, loss, gradient: (loss, gradient * factor)), "random-logits/float32", comm)
    assert outcome.verdict == Verdict.FAIL and outcome.picture is not None
    outcomes = comm.allgather(asdict(outcome))
    assert all(each == outcomes[0] for each in outcomes)
    assert (outcome.ranks, outcome.rows, outcome.dtype, outcome.splits[-1]) == (comm.size, 6, "float32", 24)


def test_rows_and_classes_replace_those_of_case(comm):
    outcome = run(right, "random-logits/float32", comm, rows=2, classes=5)
    assert (outcome.rows, outcome.classes, outcome.splits[-1]) == (2, 5, 5)
    assert run(right, "zero-rows/mean", comm, rows=2).rows == 0


def test_assert_conforms_raises_on_every_rank(comm):
    candidate = right_but(lambda _, loss, gradient: (loss, gradient * np.float32(2)))
    with pytest.raises(
        AssertionError, match=f"random-logits/float32 on {comm.size} rank.*FAIL\n  gradient: "
    ) as caught:
        assert_conforms(candidate, case_of("random-logits/float32"), comm)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert "what this case catches: Random logits, equal shards, p(target) near 0" in str(caught.value)


def test_assert_conforms_skips_case_not_offered(comm):
    with pytest.raises(unittest.SkipTest, match="random-logits/bfloat16 is not offered: bfloat16"):
        assert_conforms(right, case_of("random-logits/bfloat16"), comm)


def test_assert_conforms_starts_candidate_once(comm):
    class Candidate:
        started = 0

        def start(self, comm):
            self.started += 1

        def __call__(self, logits, targets, *, class_start, num_classes, comm):
            assert self.started == 1
            return right(logits, targets, class_start=class_start, num_classes=num_classes, comm=comm)

    candidate = Candidate()
    for name in ("random-logits/float32", "reduction/mean"):
        assert_conforms(candidate, case_of(name), comm)
    assert candidate.started == 1


def test_tolerance_of_caller_decides(comm):
    candidate = right_but(lambda _, loss, gradient: (loss * np.float32(1 + 4e-6), gradient))
    case = replace(case_of("random-logits/float32"), name="renamed")
    assert run_case(candidate, case, comm).failed
    assert not run_case(candidate, case, comm, tolerance=Tolerance(factor=10)).failed


def test_case_about_memory_names_it_before_numbers(comm):
    candidate = right_but(partial(overwriting, factor=2))
    assert kinds(run(candidate, "inputs-unmodified", comm)) == ["inputs modified", "gradient"]
    assert kinds(run(candidate, "random-logits/float32", comm)) == ["gradient"]


def test_large_case_catches_elements_beyond_limit(comm, monkeypatch):
    monkeypatch.setattr(shapes, "BEYOND", 2**18)  # for 2**31
    (case,) = (case for case in catalogue(dtypes=["float32"], large=True) if case.name.startswith("large/more"))
    assert case.name not in {each.name for each in catalogue(dtypes=["float32"])}

    def places_of_few_bits(logits, targets, *, reduction, **options):
        assert logits.size > 2**18 or comm.rank > 0
        loss, gradient = right(logits, targets, reduction=reduction, **options)
        gradient.reshape(-1)[2**18 :] = 0.0
        return loss, gradient

    offer = Offer(reductions=REDUCTIONS)
    fine, wrong = (run_case(each, case, comm, offer=offer) for each in (right, places_of_few_bits))
    assert (fine.verdict, fine.rows, fine.findings) == (Verdict.PASS, 64, [])
    assert wrong.failed and "the least of all copies: the gradient is wrong: 0 where" in wrong.findings[0].text


@pytest.mark.ranks(3)
@pytest.mark.parametrize("classes", [50_257, 128_256])
def test_large_vocabulary_catches_class_numbers_of_16_bits(comm, classes):
    every = catalogue(by_hand.offer, dtypes=["float32"], large=True)
    (case,) = (case for case in every if case.name == f"large/vocabulary-{classes}")
    assert run_case(by_hand, case, comm).verdict == Verdict.PASS
    candidate = ClassNumbersInUint8()
    candidate.dtype = np.dtype(np.uint16)
    cut = run_case(candidate, case, comm)
    assert cut.failed == (classes > 2**16)
    assert not cut.failed or "class numbers are cut to uint16" in cut.findings[0].text


def test_softmax_less_probabilities_passes_where_declared(comm):
    candidate = ProbabilitiesSumTo1()
    offer = replace(candidate.offer, normalized=True, options=())
    outcomes = [run_case(candidate, case, comm, offer=offer) for case in cases(offer, pattern="probabilities")]
    assert [(outcome.case, outcome.findings) for outcome in outcomes if outcome.failed] == []
    assert "probabilities/zero-at-minus-inf" in {outcome.case for outcome in outcomes}


def test_second_backward_pass_may_be_refused(comm):
    def once(*arrays, **given):
        loss, backward = right_backward(*arrays, **given)
        upstream = []

        def refusing(dloss):
            if upstream:
                raise RuntimeError("one of the variables needed for gradient computation has been modified")
            upstream.append(dloss)
            return backward(dloss)

        return loss, refusing

    outcome = run(once, "backward-twice/scalar", comm, BACKWARD)
    assert outcome.verdict is Verdict.PASS and "has been modified" in outcome.note
    declared = replace(BACKWARD, backward_twice=False)
    assert run(once, "backward-twice/scalar", comm, declared).note == "a second backward pass"


def test_case_of_bits_does_not_judge_numbers(comm):
    wrong = right_but(lambda logits, loss, gradient: (loss * np.float32(1.001), gradient))
    verdicts = [
        run(wrong, name, comm).verdict for name in ("reduction/mean", "same-on-every-rank", "same-in-every-run")
    ]
    assert verdicts == [Verdict.FAIL, Verdict.PASS, Verdict.PASS]


def test_candidate_of_probabilities_alone_has_ordinary_cases(comm):
    def soft(logits, targets, *, comm, **given):
        whole = [np.concatenate(comm.allgather(each), axis=-1) for each in (logits, targets)]
        loss, gradient = pce.dense.softmax_cross_entropy_value_and_grad(*whole)
        mine = slice(given["class_start"], given["class_start"] + logits.shape[-1])
        return np.float32(loss), gradient[:, mine].astype(np.float32)

    offer = Offer(class_numbers=False, num_classes=False)
    outcomes = [
        run_case(soft, case, comm, offer=offer) for case in cases(offer, pattern=["random-logits", "masked-*", "nan"])
    ]
    assert [(outcome.case, outcome.findings) for outcome in outcomes if outcome.failed] == []
    assert {"random-logits/float32", "masked-classes/every-third"} <= {each.case for each in outcomes}
