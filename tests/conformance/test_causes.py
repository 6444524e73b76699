"""The choice of causes by all failures of a run."""

from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.judging.outcomes import Fault, Finding, Outcome, Report, Verdict, agree
from pce_mpi.conformance.reports.summary import by_cause


def outcome(case, *faults):
    text = "; ".join(fault.said for fault in faults if fault.said)
    finding = Finding("loss", f"{text} (loss is 1 where 2 is right)" if text else "loss is 1 where 2 is right")
    finding.faults = list(faults)
    return Outcome(case, "", Verdict.FAIL, [finding])


def told(*outcomes):
    agree(outcomes)
    blocks = by_cause(Report("candidate", Offer(), (3,), {}, 0, False, 1.0, list(outcomes)))
    return {block[0].findings[0].text.partition(" (")[0]: [each.case for each in block] for block in blocks}


def test_cause_that_fits_all_cases_is_told():
    several = (
        outcome("a", Fault(["by rows", "by 3 ranks"])),
        outcome("b", Fault(["by 3 ranks"])),
        outcome("c", Fault(["by 3 ranks"])),
    )
    assert told(*several) == {"by 3 ranks": ["a", "b", "c"]}


def test_causes_that_fit_equally_are_both_told():
    assert told(*(outcome(case, Fault(["by 3 ranks", "by 3 rows"], 2)) for case in "ab")) == {
        "by 3 ranks, or by 3 rows": ["a", "b"]
    }
    assert told(outcome("a", Fault(["closest", "close"]))) == {"closest": ["a"]}


def test_cause_of_nan_is_told_by_others():
    def nan():
        return Fault(["x", "y"], 0, place="the loss is wrong: nan")

    assert told(outcome("a", nan())) == {"the loss is wrong: nan": ["a"]}
    assert told(outcome("a", nan()), outcome("b", Fault(["y"]))) == {"y": ["a", "b"]}
    assert told(outcome("a", Fault(["y"], 0)), outcome("b", Fault(["y"]))) == {"y": ["a", "b"]}


def test_cause_of_another_size_is_the_same():
    assert told(outcome("a", Fault(["over 8 classes"])), outcome("b", Fault(["over 16 classes"]))) == {
        "over 8 classes": ["a", "b"]
    }


def test_case_of_two_faults_is_apart():
    both = outcome("c", Fault(["x"], form="in the loss: {}"), Fault(["y"], form="in the gradient: {}"))
    assert told(outcome("a", Fault(["x"])), outcome("b", Fault(["x"])), both) == {
        "x": ["a", "b"],
        "in the loss: x; in the gradient: y": ["c"],
    }


def test_fault_of_loss_and_gradient_is_told_once():
    both = outcome("a", Fault(["x", "y"], form="in the loss: {}"), Fault(["z", "y"], form="in the gradient: {}"))
    assert told(both, outcome("b", Fault(["y"])), outcome("c", Fault(["y"]))) == {"y": ["a", "b", "c"]}


def test_numbers_of_most_failures_are_told():
    orders = [outcome(case, Fault(["in order 1, 0, 2", "in order 1, 2, 0"], 2)) for case in "ab"]
    assert told(*orders, outcome("c", Fault(["in order 1, 2, 0"]))) == {"in order 1, 2, 0": ["a", "b", "c"]}
