"""megatron-core's vocabulary-parallel cross entropies, for `--adapter torch-shards`; it must be installed."""

import os

# The fused loss is compiled otherwise, for minutes.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def unfused(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing)


def fused(vocab_parallel_logits, target, tp_group=None):
    return fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group)


for each in (unfused, fused):
    vars(each).update(
        start=lambda comm: parallel_state.initialize_model_parallel(comm.size),
        stop=parallel_state.destroy_model_parallel,
    )
