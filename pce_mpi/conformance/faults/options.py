"""Faults of options: label smoothing, class weights, z_loss, logit_scale and softcap."""

from __future__ import annotations

import numpy as np

from pce_mpi.conformance.faults.answer import Computed, Faults, Given, each_rank, of_gradient
from pce_mpi.conformance.textbook import Textbook, softmax

_LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128, "float32": 2.0**128, "float64": np.finfo(np.float64).max}


def smoothing(b: Textbook) -> Faults:
    """Label smoothing over the wrong classes, with the wrong weights, or not reduced."""
    s, classes = b.smoothing, b.problem.classes
    if not s or not classes:
        return
    shards = np.diff(b.problem.splits)
    smooth = np.broadcast_to(b.w * s / classes, b.u.shape)
    target = b.u - smooth
    if b.problem.ranks > 1:
        what = f"the {shards[0]}" if len(set(shards)) == 1 else f"each rank's own {', '.join(map(str, shards))}"
        spread = f"label smoothing is spread over {what} local classes"
        share = b.w * s * np.repeat(1.0 / np.maximum(shards, 1), shards)
        local = Computed(each_rank(b, lambda rank: b.with_u(target + b.in_shard(rank) * share)))
        yield f"{spread}, not over all {classes}", local.books
        # The losses are summed over the ranks.
        yield f"{spread}, not over all {classes}", Given((b.with_u(target + share).loss(),), local.gradient)
        if shards.min() > 1:
            # Megatron-LM: s K / (K - 1) in place of s, over the K classes of a shard
            hard, more = target / (1.0 - s), s * shards / (shards - 1)
            each = np.repeat(more / shards, shards) * b.w
            yield (
                f"{spread}, with the factor K / (K - 1), not over all {classes}",
                each_rank(b, lambda rank: b.with_u(hard * (1.0 - more[rank]) + b.in_shard(rank) * each)),
            )
        text = "the sum of label smoothing is of each rank's own classes only: it is never reduced over the ranks"
        partly = each_rank(b, lambda rank: b.with_u(target + b.in_shard(rank) * smooth))
        yield text, Given(Computed(partly).losses, b.gradient())
        # TransformerEngine: the sum of logits that are not shifted is local, its other terms are not
        top = b.z.max(axis=-1, initial=-np.inf)
        unreduced = tuple(
            book.but(total=b.total, lost=(b.total - book.u.sum(axis=-1)) * np.where(b.valid, top, 0.0))
            for book in partly
        )
        yield text, Given(Computed(unreduced).losses, b.gradient())
    yield "label smoothing is left out", b.with_u(b.w * b.q)
    yield "label smoothing leaves out the class weights", b.with_u(target + s / classes)
    yield (
        f"label smoothing is spread over the {classes - 1} other classes, not over all {classes}",
        b.with_u(b.w * (b.q * (1.0 - s) + (1.0 - b.q) * s / max(classes - 1, 1))),
    )
    text = "log p is the logarithm of an exponential that has become 0, and infinite where label smoothing needs it"
    infinite = b.but(nll=np.where(b.p < np.finfo(np.float32).smallest_subnormal, np.inf, b.nll))
    largest = _LARGEST[b.problem.dtype.name]
    if b.nll.sum() > largest:  # the loss of both is infinite
        dtype = b.problem.dtype
        text = f"a sum of log p over classes and rows overflows {dtype}, which ends at {largest:.5g}; or {text}"
    yield text, infinite


def other_options(b: Textbook) -> Faults:
    """Class weights, z_loss, logit_scale and softcap."""
    options = b.problem.options
    scale, cap = options.get("logit_scale", 1.0), options.get("softcap")
    if options.get("weight") is not None:
        counted = b.divisor
        if b.problem.reduction == "mean" and not b.problem.with_probabilities:
            counted = float(b.valid.sum())
            yield (
                f"the weighted mean divides by {counted:g} rows, not by the sum of their weights",
                b.but(divisor=counted),
            )
        yield "class weights are left out", b.with_u(b.u / b.w).but(divisor=counted)
        yield (
            "the gradient has the weight of each class, where that of the row's target is due",
            of_gradient(b.gradient_of(b.w * b.p * b.q.sum(-1, keepdims=True) - b.u)),
        )
        if not b.problem.with_probabilities:
            unknown = b.u / (b.q @ b.w)[:, None]
            yield (
                "only the rank that owns a row's target knows its weight, others take 1",
                each_rank(b, lambda rank: b.with_u(np.where(b.owns(rank)[:, None], b.u, unknown))),
            )
    if options.get("z_loss"):
        yield "z_loss is left out", b.but(z_loss=0.0)
        top = b.z.max(axis=-1, initial=-np.inf)
        yield "z_loss lacks the maximum that the logits were shifted by", b.but(lse=b.lse - top)
        yield (
            "z_loss has the logsumexp of each rank's own classes only",
            each_rank(b, lambda rank: b.but(lse=softmax(b.z[:, b.in_shard(rank)])["lse"])),
        )
    if scale != 1.0:
        yield "logit_scale is left out", b.with_x(b.x, 1.0, cap)
        yield "logit_scale is left out of the gradient", of_gradient(b.but(slope=b.slope / scale).gradient())
    if cap is not None:
        yield "softcap is left out", b.with_x(b.x, scale, None)
        yield "the derivative of softcap is left out", of_gradient(b.but(slope=np.full_like(b.x, scale)).gradient())
