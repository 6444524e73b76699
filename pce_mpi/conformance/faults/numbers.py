"""Faults of numbers: infinities, nan, and early rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.conformance.faults.answer import Faults, Given, of_gradient
from pce_mpi.conformance.textbook import Textbook, softmax

Array = np.ndarray[Any, Any]


def special_values(b: Textbook) -> Faults:
    """Infinities, nan, empty shards."""
    ranks = b.problem.ranks
    masked = np.stack([(b.z[:, b.in_shard(rank)] == -np.inf).all(-1) for rank in range(ranks)])
    empty = np.diff(b.problem.splits) == 0
    zero_times = (b.u == 0.0) & (b.nll == np.inf)
    lost = b.but(lost=np.where(zero_times.any(-1), np.nan, 0.0))
    if zero_times.any() and b.problem.with_probabilities:
        yield "a target probability of 0 times the logit -inf gives nan, where it is due to give 0", lost
    if masked[~empty].any():
        text = "a shard whose logits are all -inf makes the row nan: -inf less the maximum -inf"
        yield text, _nan(b, masked[~empty].any(0))
        where = np.repeat(masked.T, np.diff(b.problem.splits), axis=1)
        yield text, of_gradient(np.where(where, np.nan, b.gradient()))
    if zero_times.any():
        yield "0 times the logit -inf of another class gives nan, where it is due to give 0", lost
    special = ~b.valid & ~np.isfinite(b.lse)
    if special.any():
        text = "nan or infinite logits of an ignored row get into the {}: 0 times nan is nan"
        rows = np.where(special, np.nan, b.row_losses())
        yield text.format("gradient"), of_gradient(np.where(special[:, None], np.nan, b.gradient()))
        yield text.format("loss"), Given((b.reduce(rows),), None)
        yield text.format("result"), Given((b.reduce(rows),), np.where(special[:, None], np.nan, b.gradient()))
    z = b.z.astype(_arithmetic(b))
    e = np.exp(z)
    total = e.sum(-1, keepdims=True)
    yield (
        "exponentials overflow or vanish: no maximum is subtracted from the logits",
        b.but(p=e / total, nll=np.log(total) - z, lse=np.log(total)[:, 0]),
    )


def roundings(b: Textbook) -> Faults:
    """Numbers that are rounded, clipped or added up too early."""
    dtype, top = b.problem.dtype, b.z.max(-1, keepdims=True, initial=-np.inf)
    log_p = -softmax(np.maximum(b.z - top, -64.0))["nll"]
    yield "differences to the maximum are clipped at -64", b.but(nll=-log_p, p=np.exp(log_p))
    if dtype.itemsize == 2:

        def rounded(array: Array) -> Array:
            return array.astype(dtype).astype(np.float64)

        yield f"log-probabilities are kept in {dtype}", b.but(p=np.exp(-rounded(b.nll)), nll=rounded(b.nll))
        at_target = np.where(b.q != 0, rounded(b.p), b.p)
        scale = (b.g / b.divisor)[:, None]
        late = np.where((b.q != 0) & b.valid[:, None], rounded(b.p * scale) - b.u * scale, b.gradient())
        text = f"1 is subtracted at the target after rounding to {dtype}, when p close to 1 has become 1"
        yield text, of_gradient(b.but(p=at_target).gradient())
        yield text, of_gradient(b.but(p=rounded(b.p)).gradient())
        yield text, of_gradient(rounded(late))
        shards = np.split(np.exp(b.z - top).astype(dtype), b.problem.splits[1:-1], axis=-1)
        total = sum(shard.cumsum(-1, dtype=dtype)[:, -1:].astype(np.float64).sum(-1, keepdims=True) for shard in shards)
        low = np.log(total) + top
        text = f"the sum of exponentials is kept in {dtype}: small terms are lost in it"
        yield text, b.but(p=np.exp(b.z - low), nll=low - b.z)
    lse = b.lse.astype(_arithmetic(b)).astype(np.float64)[:, None]
    text = "logsumexp is rounded before a logit is subtracted: an offset that all logits share costs its bits"
    yield text, b.but(nll=lse - b.z, p=np.exp(b.z - lse))


def _arithmetic(b: Textbook) -> Any:
    return np.float64 if b.problem.dtype == np.float64 else np.float32


def _nan(b: Textbook, rows: Array) -> Textbook:
    """Replace these rows by nan."""
    nan = np.where(rows & b.valid, np.nan, 0.0)
    return b.but(lost=nan, p=b.p + nan[:, None])
