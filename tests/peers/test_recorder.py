"""The recorder that docs/recordings.md prints records what torch computes, and `judge` judges it."""

import re

import pytest

from jobs.launch import ROOT
from pce_mpi.conformance.offline.recording_errors import Judge
from pce_mpi.conformance.offline.recordings import Recording

torch = pytest.importorskip("torch", reason="make test-peers installs torch")


def recorder():
    page = (ROOT / "docs" / "recordings.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```text\n(# recorder.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(source.splitlines()) <= 25
    names = {}
    exec(source, names)
    return names["record"]


def problem(dtype):
    torch.manual_seed(0)
    shards = [(3.0 * torch.randn(4, 3, 8)).to(dtype).requires_grad_() for _ in range(3)]
    return shards, torch.cat(shards, dim=-1).float(), torch.randint(24, (4, 3))


def findings(folder):
    judge = Judge(Recording(folder))
    list(judge.run())
    return [each.text for each in judge.judged().findings]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("smoothing", [0.1, 0.2])
def test_recorded_torch_loss_is_judged(tmp_path, dtype, smoothing):
    """One that was computed with the option that was recorded is right; the other one is not."""
    shards, logits, targets = problem(getattr(torch, dtype))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    for rank, shard in enumerate(shards):
        recorder()(tmp_path, rank, 3, logits=shard, targets=targets, loss=loss, label_smoothing=0.1)
    assert (findings(tmp_path) == []) == (smoothing == 0.1)


def test_recorded_torch_head_is_judged(tmp_path):
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(16, 24, bias=False), torch.randn(4, 3, 16), torch.randint(24, (4, 3))
    log_prob = head(hidden).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    for rank, w in enumerate(head.weight.t().chunk(3, dim=-1)):
        recorder()(tmp_path, rank, 3, hidden=hidden, w=w, targets=targets, log_prob=log_prob)
    assert findings(tmp_path) == []
