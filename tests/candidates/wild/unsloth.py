"""unsloth-zoo's `chunked_selective_log_softmax`, `unsloth_zoo/rl_replacements.py`, ce232d6, here over shards."""

from dataclasses import replace

import numpy as np

from candidates.correct.policy import LogProb


class UnslothLogProb(LogProb):
    """float32 inside, also for logits of float64."""

    offer = replace(LogProb.offer, dtypes=("float32", "float64"))

    def reduce(self, s):
        return super().reduce(s).astype(np.promote_types(s.logits.dtype, np.float32))
