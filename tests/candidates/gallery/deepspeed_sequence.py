"""DeepSpeed's losses and statistics over vocabulary shards, for `--adapter torch-shards`; it must be installed."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # which is read when it is imported

from deepspeed import comm as deepspeed_comm
from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy, vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from deepspeed.sequence.vocab_parallel_ops import (
    vocab_parallel_entropy,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
)

from pce_mpi.conformance import offers

_HALVES_TOO = ("float32", "bfloat16", "float16")
_DECLARED = {"shards": "any", "gradient": "backward", "dtypes": _HALVES_TOO}
_LOSSES = {"options": ("ignore_index",), "reductions": ("none", "sum", "mean"), "checks_targets": True}


def _bounds(local, class_start):
    return {"vocab_start_index": class_start, "vocab_end_index": class_start + local}


def _groups(group, batch_comm):
    """The groups over which classes and rows are sharded; of 2 and of 3 ranks the kit makes a grid of one column."""
    assert batch_comm is None or batch_comm.size == deepspeed_comm.get_world_size(group), "classes are sharded too"
    return {"tp_group": group, "sp_group": None} if batch_comm is None else {"tp_group": None, "sp_group": group}


@offers(**_DECLARED, **_LOSSES, dims=(1, 2, 3, 4), batch_comm=True, num_classes=True)
def cross_entropy(logits, targets, group, class_start, batch_comm=None, **options):
    groups = _groups(group, batch_comm)
    return vocab_parallel_cross_entropy(logits, targets, **groups, **_bounds(logits.shape[-1], class_start), **options)


_GATHERED = _DECLARED | {"options": ("ignore_index",), "reductions": ("sum",), "batch_comm": True, "any_rows": False}


def _gathered(function, logits, targets, group, class_start, batch_comm, **options):
    gathers = {"reduction": "none", "gather_sequence_loss": batch_comm is not None}
    groups, bounds = _groups(group, batch_comm), _bounds(logits.shape[-1], class_start)
    return function(logits, targets, **groups, **bounds, **gathers, **options).sum()


@offers(**_GATHERED)
def gathered_sequence(logits, targets, group, class_start, batch_comm=None, **options):
    return _gathered(vocab_parallel_cross_entropy, logits, targets, group, class_start, batch_comm, **options)


@offers(**_GATHERED)
def gathered_slices(logits, targets, group, class_start, batch_comm=None, **options):
    return _gathered(vocab_sequence_parallel_cross_entropy, logits, targets, group, class_start, batch_comm, **options)


@offers(**_DECLARED, kind="log_prob", dims=(1, 2, 3, 4), several_targets=True, num_classes=True)
def log_prob(logits, targets, group, class_start):
    return vocab_parallel_logprobs(logits, targets, tp_group=group, **_bounds(logits.shape[-1], class_start))


@offers(**_DECLARED, kind="entropy", dims=(1, 2, 3, 4))
def entropy(logits, group):
    return vocab_parallel_entropy(logits, group)


@offers(**_DECLARED, kind="kl", reductions=("none",), dims=(1, 2, 3, 4))
def kl(logits, teacher, group):
    return vocab_parallel_kl_div(logits, teacher, tp_group=group)


@offers(**_DECLARED, kind="kl", reductions=("none",), dims=(1, 2, 3, 4), direction="reverse")
def reverse_kl(logits, teacher, group):
    return vocab_parallel_kl_div(logits, teacher, reverse=True, tp_group=group)


@offers(
    kind="linear",
    shards="any",
    gradient="backward",
    dtypes=_HALVES_TOO,
    options=("ignore_index", "bias"),
    reductions=("none", "sum", "mean"),
    dims=(2, 3),
    num_classes=True,
)
def head(hidden, w, targets, group, class_start, bias=None, **options):
    bounds = _bounds(w.shape[1], class_start)
    return vocab_parallel_linear_cross_entropy(hidden, w.T, targets, bias, group, **bounds, **options)


for each in (cross_entropy, gathered_sequence, gathered_slices, log_prob, entropy, kl, reverse_kl, head):
    vars(each).update(start=lambda comm: deepspeed_comm.init_distributed("gloo", auto_mpi_discovery=False))
