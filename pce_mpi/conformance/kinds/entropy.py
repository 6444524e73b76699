"""The entropy of each row's softmax, in nats; it is called without targets."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.kinds import sharding, support
from pce_mpi.conformance.kinds.log_prob import exact_statistic
from pce_mpi.conformance.problems import Array, Kind, Told
from pce_mpi.conformance.textbook import Faults, Given, Textbook, of_gradient
from pce_mpi.conformance.units import has_dtype

# The hint for a function without targets that declares no kind.
NOT_DECLARED = 'where it is an entropy, which takes no targets, declare it: @offers(kind="entropy")'


def _sizes(book: Textbook) -> tuple[Array, Array, Array]:
    slope = np.abs(book.g * book.problem.exact_options.get("logit_scale", 1.0))
    of_class = np.where(book.p == 0.0, 0.0, book.p * book.nll)
    whole = np.maximum(of_class, book.p * of_class.sum(axis=-1, keepdims=True))
    return np.ones(book.problem.rows), slope, slope[:, None] * whole


def _faults(b: Textbook) -> Faults:
    """verl, NeMo-RL; and parts of the entropy that stay on their ranks, as ms-swift's."""
    yield from support.faults(b)
    yield from _of_other_softmaxes(b)
    of_class = np.where(b.p == 0.0, 0.0, b.p * b.nll)
    masked = (b.z == -np.inf).any(axis=-1)
    if masked.any():
        entropy, nan = of_class.sum(-1, keepdims=True), np.where(masked, np.nan, 0.0)
        right = (of_class - b.p * entropy) * b.slope * b.g[:, None]
        yield (
            "0 times -inf gives nan: a class whose logit is -inf has probability 0, and adds 0 to the entropy",
            Given(((entropy[:, 0] + nan).reshape(b.problem.rows_shape),), right + nan[:, None]),
        )
    own, local = np.zeros_like(b.p), []
    for start, stop in pairwise(b.problem.splits):
        here = slice(start, stop)
        entropy, part = of_class[:, here].sum(-1, keepdims=True), b.p[:, here].sum(-1, keepdims=True)
        local.append(entropy.reshape(b.problem.rows_shape))
        own[:, here] = of_class[:, here] - b.p[:, here] * (1.0 + entropy - part)
        if start < stop:
            # The shard's maximum is not detached.
            largest = start + b.z[:, here].argmax(axis=-1)
            own[np.arange(len(own)), largest] += ((1.0 - part) * (part - entropy))[:, 0]
    if np.ptp(local, axis=0).max(initial=0.0) > 2.0**-7:
        text = "the entropy is of each rank's own classes only: it is never reduced over the ranks"
        yield text, Given(tuple(local), None)
    yield (
        "each rank has the gradient of its own classes' part of the entropy: an all-reduce that autograd does not see",
        of_gradient(own * b.slope * b.g[:, None]),
    )


def _of_other_softmaxes(b: Textbook) -> Faults:
    """Entropies of softmaxes that no sum, or a wrong one, has gone into."""
    shape, shards = b.problem.rows_shape, [b.in_shard(rank) for rank in range(b.problem.ranks)]
    for text, books in sharding.softmaxes(b):
        p = books[0].p
        of_class = np.where(p == 0.0, 0.0, p * books[0].nll)
        parts = np.stack([of_class[:, mine].sum(axis=-1) for mine in shards])
        own = np.repeat(parts.T, np.diff(b.problem.splits), axis=-1)
        whole = parts.sum(axis=0)
        for losses in ((whole.reshape(shape),), tuple(part.reshape(shape) for part in parts)):
            for less in (whole[:, None], own):
                yield text, Given(losses, (of_class - p * less) * b.slope * b.g[:, None])


def _tell(b: Textbook, name: str, got: Array) -> Told | None:
    """Name a gradient that is dropped (trl before #6625), or entropies that are differences of large numbers."""
    if name == "gradient" and not got.any():
        return Told(("the gradient of the entropy is dropped: it is 0 for all classes",))
    if not _is_unshifted(b, name, got):
        return None
    return Told(("the entropy is logsumexp less the mean logit: an offset that all logits share costs its digits",))


def _is_unshifted(b: Textbook, name: str, got: Array) -> bool:
    """Return True if entropies, or their gradient, are differences of two large numbers.

    A difference of float32 numbers near 1e4 is a multiple of 2^-10, and so is the factor of each p in its gradient.
    """
    wide = np.float64 if b.problem.dtype == np.float64 else np.float32
    mean = np.where(b.p == 0.0, 0.0, b.p * b.z).sum(axis=-1)
    unit = np.spacing(np.minimum(np.abs(b.lse), np.abs(mean)).astype(wide)).astype(np.float64)
    half = b.problem.dtype.name if b.problem.dtype.itemsize == 2 else "bfloat16"
    if has_dtype(half) and np.array_equal(got, got.astype(dtype_named(half)), equal_nan=True):
        return False  # any half is a multiple
    if name == "loss":
        parts, units, slack, least = got, np.broadcast_to(unit, got.shape), 0.0, 2.0
    else:
        large = (b.p > 2.0**-12) & (b.slope != 0.0) & (b.g[:, None] != 0.0)
        parts = (got / (b.p * b.slope * b.g[:, None]))[large]
        units, slack, least = np.broadcast_to(unit[:, None], got.shape)[large], 0.05, 64.0
    ratio = units / np.spacing(np.abs(parts).astype(wide))
    tell = np.isfinite(parts) & (ratio > least)
    multiples, nearest = parts[tell] / units[tell], np.rint(parts[tell] / units[tell])
    # By accident, one in `ratio` numbers is a multiple; 0 is one anyway.
    return bool(np.log2(ratio[tell][nearest != 0]).sum() >= 24.0 and not (np.abs(multiples - nearest) > slack).any())


ENTROPY = Kind(
    noun="entropy",
    plural="entropies",
    exact=partial(exact_statistic, "entropy"),
    sizes=_sizes,
    faults=_faults,
    told='the loss is an entropy: that is declared by @offers(kind="entropy"), and gets no targets',
    options=("logit_scale", "softcap", "support"),
    cases=support.CASES,
    arrays=("logits",),
    tell=_tell,
    catches={
        "random-logits": "Random logits, equal shards: a candidate that fails here has the formula wrong.",
        "reduction": "One entropy for each row, once, and not once for each rank.",
        "p-near-1": "One class has nearly all of the probability: a difference of large numbers has no digits.",
        "p-equal-1": "One class has all of the probability: the entropy is 0 and so is its gradient, not nan.",
        "offset": "log Z - sum p x, which loses what an offset common to all classes pushes out (verl, slime, AReaL).",
        "logits-of-1000": "exp without the maximum subtracted overflows; 0 times the logarithm of 0 is nan.",
        "backward-twice": "A second backward pass in memory that the first changed: right, or refused everywhere.",
    },
)
