"""Packages of docs/gallery.md: the kit says of them, on three ranks, what the page says."""

import importlib
from importlib.metadata import PackageNotFoundError, version

import pytest

from pce_mpi.conformance import cases, run_case
from pce_mpi.conformance.adapters import adapted

LOCAL = "label smoothing is spread over the 8 local classes, with the factor K / (K - 1), not over all 24"


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    ("module", "function", "case", "words"),
    [
        ("megatron_core", "unfused", "label_smoothing/float32", f"the ranks' losses differ: {LOCAL}"),
        ("megatron_core", "unfused", "logits-of-1000-smoothed/float32", "log p is the logarithm of an exponential"),
        ("megatron_core", "unfused", "inputs-unmodified", "logits were modified"),
        ("megatron_core", "fused", "random-logits/float32", "every entry of the gradient is rounded to bfloat16"),
        ("colossalai", "cross_entropy", "p-equal-1", "the mean counts the rows whose loss is not 0"),
        ("colossalai", "cross_entropy", "ignored/inside", "ignored rows have a gradient of -1 at their target"),
    ],
)
def test_package_gives_the_words_of_gallery(comm, module, function, case, words):
    try:
        version(module)
    except PackageNotFoundError:
        pytest.skip(f"{module} is not installed: make test-peers installs it")
    if comm.size != 3:
        pytest.skip("the words are those of 3 ranks: make test-peers N=3 runs it")
    candidate = adapted("torch-shards", getattr(importlib.import_module(f"candidates.gallery.{module}"), function))
    candidate.start(comm)
    try:
        (chosen,) = cases(candidate, pattern=case)
        outcome = run_case(candidate, chosen, comm)
    finally:
        candidate.stop()
    assert outcome.failed and words in outcome.findings[0].text, outcome.findings
