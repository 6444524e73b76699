"""Candidates of the conformance kit that want tensors of PyTorch and return such."""

import pytest

import pce_mpi as pce
from pce_mpi.conformance import Offer, Verdict, cases, run_case

torch = pytest.importorskip("torch", reason="make test-peers installs torch")

OFFER = Offer(
    dtypes=("float16", "bfloat16", "float32", "float64"),
    options=("weight",),
    reductions=("none", "mean"),
    arrays="torch",
)
CASES = ["random-logits", "weight", "strides", "padded-columns", "inputs-unmodified", "zero-rows"]


def candidate(logits, targets, *, comm, **options):
    assert all(isinstance(each, torch.Tensor) for each in (logits, targets, options.get("weight", logits)))
    result = pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, **options)
    return tuple(each.requires_grad_() for each in result)


@pytest.mark.parametrize("case", cases(OFFER, pattern=CASES), ids=str)
def test_tensors_go_in_and_come_out(comm, case):
    outcome = run_case(candidate, case, comm, offer=OFFER)
    assert (outcome.verdict, outcome.findings) == (Verdict.PASS, [])


def test_tensor_that_is_written_to_is_found(comm):
    def overwrites(logits, *arguments, **options):
        result = candidate(logits, *arguments, **options)
        logits -= logits.max() if logits.numel() else 0.0
        return result

    (case,) = cases(OFFER, pattern="inputs-unmodified")
    assert [each.kind for each in run_case(overwrites, case, comm, offer=OFFER).findings] == ["inputs modified"]
