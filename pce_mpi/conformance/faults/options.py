"""Faults of options: label smoothing, class weights, z_loss, logit_scale and softcap."""

from __future__ import annotations

import numpy as np

from pce_mpi.conformance.faults.answer import Computed, Faults, Given, each_rank, of_gradient
from pce_mpi.conformance.textbook import Textbook, softmax


def smoothing(b: Textbook) -> Faults:
    """Label smoothing: over the wrong classes, with the wrong weights, not reduced or reduced twice."""
    s, classes = b.smoothing, b.problem.classes
    if not s or not classes:
        return
    shards = np.diff(b.problem.splits)
    smooth = np.broadcast_to(b.w * s / classes, b.u.shape)
    target = b.u - smooth
    if b.problem.ranks > 1:
        local = b.w * s * np.repeat(1.0 / np.maximum(shards, 1), shards)
        what = f"the {shards[0]}" if len(set(shards)) == 1 else f"each rank's own {', '.join(map(str, shards))}"
        spread = f"label smoothing is spread over {what} local classes, not over all {classes}"
        by_rank = Computed(each_rank(b, lambda rank: b.with_u(target + b.in_shard(rank) * local)))
        summed = b.with_u(target + local)
        yield spread, by_rank.books
        yield spread, Given((summed.loss(),), by_rank.gradient)  # the losses are summed over the ranks
        yield f"{spread}, and summed over the ranks", summed
        partly = each_rank(b, lambda rank: b.with_u(target + b.in_shard(rank) * smooth))
        text = "the sum of label smoothing is of each rank's own classes only: it is never reduced over the ranks"
        yield text, partly
        yield text, Given(Computed(partly).losses, b.gradient())
        yield text, tuple(book.but(total=b.total) for book in partly)
        yield (
            f"the term of label smoothing is {b.problem.ranks} times too large: reduced over the ranks twice",
            b.with_u(target + smooth * b.problem.ranks),
        )
    yield "label smoothing is left out", b.with_u(b.w * b.q)
    yield "label smoothing leaves out the class weights", b.with_u(target + s / classes)
    yield (
        "label smoothing uses the weight of the target, not that of each class",
        b.with_u(target + (b.q @ b.w)[:, None] * s / classes),
    )
    yield "with label smoothing the target still has all of its part, not 1 - s of it", b.with_u(b.w * b.q + smooth)
    yield (
        f"label smoothing is spread over the {classes - 1} other classes, not over all {classes}",
        b.with_u(b.w * (b.q * (1.0 - s) + (1.0 - b.q) * s / max(classes - 1, 1))),
    )
    yield "ignored rows have the loss of label smoothing", b.but(valid=np.ones_like(b.valid))
    text = "log p is the logarithm of an exponential that has become 0, and infinite where label smoothing needs it"
    infinite = b.but(nll=np.where(b.p < np.finfo(np.float32).smallest_subnormal, np.inf, b.nll))
    largest = np.finfo(np.float16).max
    if b.problem.dtype == np.float16 and b.nll.sum() > largest:  # the loss of both is infinite
        text = f"a sum of log p over classes and rows overflows float16, which ends at {largest:.0f}; or {text}"
    yield text, infinite


def other_options(b: Textbook) -> Faults:
    """Class weights, z_loss, logit_scale and softcap."""
    options, ranks = b.problem.options, b.problem.ranks
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
        yield "class weights are left out, but for the divisor of the mean", b.with_u(b.u / b.w)
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
        yield "the gradient of z_loss lacks the factor 2", of_gradient(b.but(z_loss=b.z_loss / 2.0).gradient())
        yield f"z_loss is counted {ranks} times, once per rank", b.but(z_loss=b.z_loss * ranks)
        yield "z_loss is multiplied by the weight of the target", b.but(z_loss=b.z_loss * (b.q @ b.w))
        yield "z_loss is not divided by the divisor of the mean", b.but(z_loss=b.z_loss * b.divisor)
        yield (
            "z_loss has the logsumexp of each rank's own classes only",
            each_rank(b, lambda rank: b.but(lse=softmax(b.z[:, b.in_shard(rank)])["lse"])),
        )
    if scale != 1.0:
        yield "logit_scale is left out", b.with_x(b.x, 1.0, cap)
        yield "logit_scale is left out of the gradient", of_gradient(b.but(slope=b.slope / scale).gradient())
    if cap is not None:
        yield "softcap is left out", b.with_x(b.x, scale, None)
        after = scale * cap * np.tanh(b.x / cap)
        yield (
            "softcap comes before logit_scale, not after it",
            b.but(z=after, slope=scale / np.cosh(b.x / cap) ** 2, **softmax(after)),
        )
        yield "the derivative of softcap is left out", of_gradient(b.but(slope=np.full_like(b.x, scale)).gradient())
