"""MindSpeed's `calculate_predicted_logits`, `mindspeed/core/tensor_parallel/cross_entropy.py`, 028de58c."""

from dataclasses import replace

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class FirstClassTimes0(VocabParallel):
    """A rank that does not have the target adds 0 times the logit of its first class, which may be -inf.

    Fast-LLM's too: `fast_llm/functional/entropy_loss.py`, 7d61a1ba: `predicted_logits_from_labels`.
    """

    offer = replace(VocabParallel.offer, options=())

    def find_targets(self, s):
        super().find_targets(s)
        column = np.where(s.mine, s.targets.reshape(-1) - s.class_start, 0)
        s.nll = s.log_sum - self.over_ranks(s, s.shifted[np.arange(s.rows), column] * s.mine)
