"""NeMo, `nemo/collections/nlp/modules/common/megatron/vocab_parallel_cross_entropy.py`, 8cfedd72."""

from candidates.wild.megatron import MegatronSmoothing


class NeMoSmoothing(MegatronSmoothing):
    """Megatron-LM's label smoothing over the classes of a shard; the logits stay as they are.

    And RLinf, `rlinf/utils/distributed.py`, a3816b59: `_VocabParallelEntropyAndCrossEntropy`.
    """

    overwrites = False
