"""lweitkamp/transformer_parallelisms, 44fa59c: the cross entropy of its tensor parallel layers, in NumPy."""

from dataclasses import replace

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class NoMaximumAtAll(VocabParallel):
    """Exponentials of the logits as they are."""

    offer = replace(VocabParallel.offer, options=())

    def softmax(self, s):
        super().softmax(s)
        s.shifted = s.x
        s.exp = np.exp(s.x)
        s.sum_exp = self.over_ranks(s, s.exp.sum(axis=-1))
        s.log_sum = np.log(s.sum_exp)
        s.p = s.exp / s.sum_exp[:, None]
