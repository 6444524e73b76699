"""Faults of the entropy of each row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pce_mpi.conformance.faults.answer import Given, of_gradient
from pce_mpi.conformance.textbook import Textbook


def of_entropy(b: Textbook) -> Iterator[tuple[str, Given]]:
    """Parts of the entropy that stay on their ranks, in the value or in the gradient alone."""
    of_class = np.where(b.p == 0.0, 0.0, b.p * b.nll)
    own, local = np.zeros_like(b.p), []
    for start, stop in pairwise(b.problem.splits):
        here = slice(start, stop)
        entropy, part = of_class[:, here].sum(-1, keepdims=True), b.p[:, here].sum(-1, keepdims=True)
        local.append(entropy.reshape(b.problem.rows_shape))
        own[:, here] = of_class[:, here] - b.p[:, here] * (1.0 + entropy - part)
        if start < stop:
            # ms-swift: the shard's maximum is not detached
            largest = start + b.z[:, here].argmax(axis=-1)
            own[np.arange(len(own)), largest] += ((1.0 - part) * (part - entropy))[:, 0]
    yield (
        "the entropy is of each rank's own classes only: it is never reduced over the ranks",
        Given(tuple(local), None),
    )
    text = (
        "each rank has the gradient of its own classes' part of the entropy: an all-reduce that autograd does not see"
    )
    yield text, of_gradient(own * b.slope * b.g[:, None])
