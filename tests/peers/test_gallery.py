"""Packages of docs/gallery.md: of the versions on that page the kit says, on three ranks, what the page says."""

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import pytest

from jobs.launch import ROOT
from pce_mpi.conformance import adapted, cases, load, run_case
from peers.gallery import peers

PAGE = " ".join((ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").split())

LOCAL = "label smoothing is spread over the 8 local classes, with the factor K / (K - 1), not over all 24"
REFUSED = "no rank refused it"
OVERFLOW = "a sum of log p over classes and rows overflows"


class Row(NamedTuple):
    """A package and its version, the candidate, the case, and the words of the page."""

    package: str
    version: str
    candidate: str
    case: str
    words: str

    def __str__(self):
        return f"{self.candidate}-{self.case}"


TABLE = peers()


def pinned(peer: str, key: str) -> tuple[str, str]:
    """The package of a peer, and the version that `make test-peers` installs."""
    package, _, at = TABLE[peer][key].partition("==")
    return package, at


MEGATRON, COLOSSALAI = pinned("megatron_core", "alone"), pinned("colossalai", "alone")
TORCH = pinned("torch_losses", "packages")
ROWS = [
    Row(*MEGATRON, "megatron_core:unfused", "label_smoothing/float32", f"the ranks' losses differ: {LOCAL}"),
    Row(
        *MEGATRON,
        "megatron_core:unfused",
        "logits-of-1000-smoothed/float32",
        "log p is the logarithm of an exponential",
    ),
    Row(*MEGATRON, "megatron_core:unfused", "target-out-of-range/far", REFUSED),
    Row(*MEGATRON, "megatron_core:unfused", "inputs-unmodified", "logits were modified"),
    Row(
        *MEGATRON, "megatron_core:fused", "random-logits/float32", "every entry of the gradient is rounded to bfloat16"
    ),
    Row(*MEGATRON, "megatron_core:fused", "zero-rows/none", "not enough values to unpack"),
    Row(*COLOSSALAI, "colossalai:cross_entropy", "p-equal-1", "the mean counts the rows whose loss is not 0"),
    Row(
        *COLOSSALAI, "colossalai:cross_entropy", "ignored/inside", "ignored rows have a gradient of -1 at their target"
    ),
    Row(*COLOSSALAI, "colossalai:cross_entropy", "ignored/all-rows-mean", "the gradient is divided by their number 0"),
    Row(*COLOSSALAI, "colossalai:cross_entropy", "target-out-of-range/one-too-many", REFUSED),
    Row(*TORCH, "torch_losses:dense", "finite-mask/lowest-smoothed", f"{OVERFLOW} float32"),
    Row(*TORCH, "torch_losses:dense", "logits-of-1000-smoothed/float16", f"{OVERFLOW} float16"),
    Row(*TORCH, "torch_losses:loss_parallel", "dims/4-D", "gradient is -0.0833329 where 4.29113e-07 is right"),
    Row(*TORCH, "torch_losses:loss_parallel", "target-out-of-range/negative", REFUSED),
    Row(*TORCH, "torch_losses:loss_parallel", "ignored/weighted-mean", "index -100 is out of bounds"),
    Row(
        *TORCH,
        "torch_losses:loss_parallel",
        "p-near-1/bfloat16",
        "log-probabilities are kept in bfloat16",
    ),
    *(
        Row(*TORCH, f"torch_placements:{candidate}", f"placement/{case}", words)
        for candidate, case, words in (
            ("dtensor.max", "nan-on-one-rank", "a nan of one rank is lost: the value is the max of others"),
            ("dtensor.prod", "random/float32", "aten.cat.default got mixed torch.Tensor and DTensor"),
            ("dtensor.norm", "large", "the squares of the elements overflow"),
            (
                "dtensor.sum",
                "random/bfloat16",
                "the ranks' values of the sum are rounded to bfloat16, and added up in it",
            ),
            ("whole.max", "nan-on-one-rank", "a nan of one rank is lost: the value is the max of others"),
            ("terms.max", "nan-on-one-rank", "a nan of one rank is lost: the value is the max of others"),
            ("terms.mean", "random/float32", "as if the reduction over the ranks were a sum"),
            ("terms.max", "random/float32", "as if the reduction over the ranks were a sum"),
            ("terms.prod", "random/float32", "as if the reduction over the ranks were a sum"),
            ("reduced.sum", "random/float32", "it is summed over the ranks once more"),
            ("reduced.prod", "upstream", "the upstream gradients of the ranks are multiplied, as the numbers are"),
        )
    ),
    *(
        Row(*TORCH, "torch_losses:linear", case, words)
        for case, words in (
            ("accumulated-loss/mean/bfloat16", "the mean is added up over chunks of rows in bfloat16"),
            ("accumulated-dw/bfloat16", "dw is added up in bfloat16, in steps of 32 rows"),
            ("bias/masks-first-classes", "an ignored row adds 0 times the logit of class 0: nan where that is -inf"),
            ("ignored/all-rows-mean", "the gradient is divided by their number 0"),
            ("many-classes/more-than-32768-a-shard", "dhidden is -0.782343 where -0.78168 is right"),
        )
    ),
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_package_gives_the_words_of_gallery(comm, row):
    try:
        installed = version(row.package)
    except PackageNotFoundError:
        pytest.skip(f"{row.package} is not installed: make test-peers installs it")
    if comm.size != 3:
        pytest.skip("the words are those of 3 ranks: make test-peers N=3 runs it")
    candidate = started(row.candidate, comm)
    try:
        (chosen,) = cases(candidate, pattern=row.case)
        outcome = run_case(candidate, chosen, comm)
    finally:
        getattr(candidate, "stop", lambda: None)()
    assert installed.partition("+")[0] == row.version
    assert outcome.failed
    first = outcome.findings[0]
    assert row.words in " ".join((first.text, *(cause for fault in first.faults for cause in fault.causes))), first


@pytest.mark.ranks(3)
@pytest.mark.parametrize("candidate", ["dtensor.logsumexp", "dtensor.replicate", "dtensor.shard", "whole.sum"])
def test_right_placement_of_gallery_passes(comm, candidate):
    candidate = started(f"torch_placements:{candidate}", comm)
    try:
        failed = [outcome.case for case in cases(candidate) if (outcome := run_case(candidate, case, comm)).failed]
    finally:
        candidate.stop()
    assert failed == []


def started(name, comm):
    candidate = load(f"candidates.gallery.{name}")
    if not hasattr(candidate, "offer"):
        candidate = adapted("torch-shards", candidate)
    if hasattr(candidate, "start"):
        candidate.start(comm)
    return candidate


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gallery_has_the_tested_words(row):
    assert f"{row.package} {row.version}" in PAGE and row.words in PAGE
