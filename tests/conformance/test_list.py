"""The list of cases that --list shows."""

from pce_mpi.conformance.catalogue import cases
from pce_mpi.conformance.offers import Offer
from pce_mpi.conformance.reports import listing


def test_list_has_a_line_for_each_case():
    found = cases(pattern=["random-logits", "zero-rows"])
    text = listing.render(found, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == [case.name for case in found]
    assert " ".join(text.split()).count(found[0].catches) == 1
    lines = listing.render(found, Offer(reductions=("mean",))).splitlines()
    offered = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines if not line.startswith(" ")}
    assert offered["random-logits/float32"] == offered["zero-rows/mean"] == "offered"
    assert offered["random-logits/float64"] == "not offered: float64"
    assert offered["zero-rows/sum"] == "not offered: reduction sum"


def test_list_says_which_cases_compare_bits():
    found = cases(pattern=["random-logits/float32", "target-out-of-range/far", "gathered-logits"])
    lines = listing.render(found, Offer(same_bits=True)).splitlines()
    offered = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines if not line.startswith(" ")}
    assert offered["random-logits/float32"] == "offered, to the bits of one rank"
    assert offered["target-out-of-range/far"] == offered["gathered-logits"] == "offered"
