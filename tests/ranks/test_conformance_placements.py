"""Candidates of `kind="placement"`: planted faults are named, and right ones pass at every number of ranks."""

import re
from typing import NamedTuple

import numpy as np
import pytest

from candidates.correct.placements import OURS
from candidates.placement_by_hand import FUNCTIONS, MOVES, PlacementByHand
from candidates.shipped import defined_in
from candidates.wrong import placements as wrong
from pce_mpi.conformance import Offer, Tolerance, cases, offer_of, run_case
from pce_mpi.conformance.judging.outcomes import Report, Verdict
from pce_mpi.conformance.problems.kinds import placement
from pce_mpi.conformance.reports import html, terminal

STRICT = Tolerance(strict=True)
FINDS = placement.FINDS


class Planted(NamedTuple):
    """A fault in what a candidate computes, a case, and the words of its finding."""

    fault: type
    computes: str
    case: str
    words: str
    partial: str = "no"

    def __str__(self):
        return f"{self.fault.__name__}-{self.computes}-{self.case}"


LOST = "a nan of one rank is lost: the value is the {} of others"
PASSED = "the upstream gradient is passed on as it is to the function of each rank's own elements"
AS_A_SUM = (
    f"{PASSED}, as if the reduction over the ranks were a sum; where that is meant, declare it: "
    '@offers(partial="array")'
)
ONCE_MORE = "the gradient is {ranks} times too large: it is summed over the ranks once more"
OWN = "the value is this rank's own elements: nothing is gathered"
PLANTED = [
    *(Planted(wrong.ComparedInOrder, "max", "nan-on-one-rank", LOST.format("max"), each) for each in ("no", "term")),
    Planted(wrong.ComparedInOrder, "norm-inf", "nan-on-one-rank", LOST.format("norm-inf")),
    Planted(wrong.ComparedFromOwn, "max", "nan-on-one-rank", f"the ranks' values differ: {LOST.format('max')}"),
    *(Planted(wrong.PassedOn, each, "upstream", PASSED) for each in FUNCTIONS if each != "sum"),
    *(
        Planted(wrong.PassedOn, each, case, AS_A_SUM, "term")
        for each in ("mean", "max", "min", "prod")
        for case in ("random/float32", "upstream")
    ),
    *(Planted(wrong.SummedOnceMore, each, "upstream", ONCE_MORE) for each in ("sum", "mean", "max", "norm")),
    Planted(wrong.SummedOnceMore, "sum", "random/float32", ONCE_MORE, "term"),
    Planted(wrong.Averaged, "sum", "upstream", "{ranks} times too small: it is divided by the number of ranks", "term"),
    Planted(wrong.UpstreamMultiplied, "prod", "upstream", "the upstream gradients of the ranks are multiplied", "term"),
    *(Planted(wrong.EachTies, each, "ties", "each of the elements that tie has the whole gradient") for each in FINDS),
    Planted(wrong.EachRankTies, "max", "ties", "each rank whose own element ties has the whole gradient"),
    Planted(
        wrong.FirstOfTies,
        "min",
        "ties",
        'the first of the elements that tie has the gradient; where that is meant, declare it: @offers(ties="first")',
    ),
    *(
        Planted(wrong.ZeroForEmpty, each, f"empty-shard/{where}", "a rank without elements counts as 0")
        for each in ("max", "min", "prod", "logsumexp")
        for where in ("first", "last")
    ),
    *(
        Planted(wrong.OneForEmpty, each, "empty-shard/last", "a rank without elements counts as 1")
        for each in ("sum", "norm", "logsumexp")
    ),
    Planted(
        wrong.NeverReduced, "mean", "random/float32", "the mean is of each rank's own elements: it is never reduced"
    ),
    *(
        Planted(wrong.ValuesAdded, each, "random/float32", f"the ranks' values of the {each} are added")
        for each in ("norm", "logsumexp")
    ),
    Planted(wrong.MeanOfMeans, "mean", "uneven-shards", "the ranks' values of the mean are averaged, however many"),
    Planted(wrong.MeansMerged, "mean", "infinities", "means are merged by their differences, and inf less inf is nan"),
    Planted(wrong.SumForMean, "mean", "random/float32", "the sum is not divided by the number of elements"),
    Planted(
        wrong.SumsInHalves,
        "sum",
        "random/bfloat16",
        "the ranks' values of the sum are rounded to bfloat16, and added up in it",
    ),
    Planted(wrong.ProductOverElement, "prod", "zeros", "the gradient is the product divided by the element: nan where"),
    Planted(wrong.SquaresInFloat32, "norm", "large", "the squares of the elements overflow"),
    Planted(wrong.InPlace, "max", "arguments-unmodified", "array was modified; where that is meant, declare it"),
    Planted(wrong.OwnElements, "replicate", "random/float32", OWN),
    Planted(wrong.OwnElements, "shard", "random/float32", "the value is all elements: nothing is cut"),
    *(Planted(wrong.SummedMove, each, "random/float32", ONCE_MORE) for each in MOVES),
    Planted(wrong.AveragedMove, "replicate", "uneven-shards", "{ranks} times too small: it is divided by the number"),
    Planted(
        wrong.OwnGradient,
        "shard",
        "random/bfloat16",
        "the gradient is that of this rank's own elements: nothing is gathered from the others",
    ),
    Planted(wrong.ZerosAdded, "replicate", "zeros", "the value is 0.0 where -0.0 is right in row "),
    Planted(wrong.AnotherOrder, "replicate", "random/float32", " is right in row 0, element 0 of what is due"),
]


def case_named(name, candidate):
    (case,) = cases(candidate, pattern=f"placement/{name}")
    return case


def test_every_wrong_placement_has_a_test():
    assert defined_in(wrong) == {each.fault for each in PLANTED}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_planted_placement_is_named(comm, planted):
    candidate = planted.fault(planted.computes, partial=planted.partial)
    outcome = run_case(candidate, case_named(planted.case, candidate), comm)
    said = "\n".join(finding.text for finding in outcome.findings)
    assert planted.words.format(ranks=comm.size) in said, said


def failures(candidate, comm):
    outcomes = [run_case(candidate, case, comm, tolerance=STRICT) for case in cases(offer_of(candidate))]
    assert len(outcomes) > 9
    return [(outcome.case, outcome.findings) for outcome in outcomes if outcome.verdict != Verdict.PASS]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("partial", ["no", "term"])
@pytest.mark.parametrize("computes", [*FUNCTIONS, *MOVES])
def test_right_placement_passes(comm, computes, partial):
    if partial == "no" or computes in FUNCTIONS:
        assert failures(PlacementByHand(computes, partial=partial), comm) == []
    for ties in ("first",) if computes in FINDS else ():
        assert failures(PlacementByHand(computes, partial=partial, ties=ties), comm) == []


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("candidate", OURS, ids=lambda each: f"{each.offer.computes}-{each.offer.partial}")
def test_distributed_arrays_pass_strictly(comm, candidate):
    assert failures(candidate, comm) == []


@pytest.mark.ranks(1)
def test_placement_is_judged_in_one_process_without_mpi():
    class Alone(PlacementByHand):
        def __call__(self, array, *, splits, comm):
            return array.max(-1), lambda g: (array == array.max(-1, keepdims=True)) * g[:, None]

    assert run_case(Alone("max"), case_named("random/float32", Alone("max")), None).verdict == Verdict.PASS


def whole_numbers(array, *, splits, comm):
    return np.zeros(len(array), np.int64), lambda g: g


def wide_gradient(array, *, splits, comm):
    return np.zeros(len(array)), lambda g: np.full_like(array, 9.0, np.float64)


def aliased(array, *, splits, comm):
    return array[:, 0], lambda g: array


def nothing(array, *, splits, comm): ...


@pytest.mark.ranks(3)  # the words do not depend on the ranks
@pytest.mark.parametrize("gradient", ["backward", "value", "none"])
@pytest.mark.parametrize("function", [whole_numbers, wide_gradient, aliased, nothing])
def test_reports_of_placements_have_no_word_of_losses(comm, function, gradient):
    offer = Offer(kind="placement", gradient=gradient)
    outcomes = [run_case(function, case, comm, offer=offer) for case in cases(Offer(kind="placement"))]
    report = Report("candidate", offer, (comm.size,), {}, 0, False, 1.0, outcomes)
    page = html.render(report)
    said = [terminal.render(report), *re.findall("<figure>.*</figure>", page, re.DOTALL)]
    assert len(report.failed) > 6 and "FAIL" in said[0]
    found = re.findall(r"\b(?:loss|losses|d?logits|class|classes|targets?)\b", re.sub("<[^>]*>", "", " ".join(said)))
    assert found == [], said[0]


def test_placement_has_cases_of_its_own_alone():
    names = [case.name for case in cases(Offer(kind="placement", gradient="backward"))]
    assert len(names) == 11 and {name.partition("/")[0] for name in names} == {"placement"}
    assert not [case for case in cases(Offer()) if case.family == "placement"]
    terms = Offer(kind="placement", partial="term", shards="any")
    assert terms.shards == "equal" and "placement/empty-shard/first" not in map(str, cases(terms))


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"computes": "max"}, "computes='max' says nothing of a candidate of kind='loss'"),
        ({"kind": "placement", "computes": "sum", "ties": "first"}, "ties='first' says nothing"),
        ({"kind": "placement", "computes": "shard", "partial": "term"}, "partial='term' says nothing"),
        ({"kind": "placement", "computes": "median"}, "computes of an offer must be one of sum, mean, .*got 'median'"),
    ],
)
def test_declarations_of_placements_that_mean_nothing_are_refused(declared, text):
    def candidate(*arrays, comm, **facts): ...

    candidate.declared = declared
    with pytest.raises(ValueError, match=text):
        offer_of(candidate)
