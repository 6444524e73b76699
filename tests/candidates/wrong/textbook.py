"""Faults of a first draft: sums over the ranks that are left out or wrong, and class numbers of other ranks."""

import inspect

import numpy as np

from candidates.by_hand import ByHand
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.problems.cases import Gradient


class SoftmaxOfLocalClasses(ByHand):
    """Nothing is reduced but the loss at the targets, which the ranks that have them add."""

    def maximum(self, s):
        return s.source.max(axis=-1, initial=-np.inf)

    def softmax(self, s):
        super().softmax(s)
        s.sum_exp = s.exp.sum(axis=-1)
        s.logsumexp = s.factor * s.top + np.log(s.sum_exp)
        s.p = s.exp / s.sum_exp[:, None]

    def row_losses(self, s):
        s.sum_u = self.sum(s, s.u.sum(axis=-1))
        nll = np.log(s.sum_exp)[:, None] - s.shifted
        loss = self.sum(s, np.where(s.u == 0.0, 0.0, s.u * nll).sum(axis=-1)) + self.z_term(s)
        s.row_loss = np.where(s.valid, loss, 0.0)


class SumsOfOtherMaxima(ByHand):
    """Exponentials relative to each rank's own maximum, which are added as they are."""

    def maximum(self, s):
        return s.source.max(axis=-1, initial=-np.inf)


class SumsOfOtherMaximaAfterwards(ByHand):
    """Such exponentials, and the logarithm of their sum is taken to be relative to the maximum of all."""

    def softmax(self, s):
        own = s.source.max(axis=-1, initial=-np.inf)
        sums = np.where(own == -np.inf, 0.0, np.exp(s.factor * (s.source - own[:, None])).sum(axis=-1))
        super().softmax(s)
        s.sum_exp = self.sum(s, sums)
        s.logsumexp = s.factor * s.top + np.log(s.sum_exp)
        s.p = s.exp / s.sum_exp[:, None]


class LogsumexpsAdded(ByHand):
    """The logsumexp of each rank's own classes is reduced by a sum."""

    def softmax(self, s):
        super().softmax(s)
        s.logsumexp = self.sum(s, s.factor * s.top + np.log(s.exp.sum(axis=-1)))
        s.shifted, s.sum_exp = s.factor * s.source - s.logsumexp[:, None], np.ones(s.rows)
        s.p = np.exp(s.shifted)
        s.logsumexp = s.logsumexp if s.z_loss else np.zeros(s.rows)  # 0 times inf is another fault


class GlobalNumbersForLocal(ByHand):
    """class_start is not subtracted."""

    def owned(self, s):
        s.class_start = 0
        return super().owned(s)


class TargetClampedNotMasked(ByHand):
    """A target of another rank is clamped to a class of this one, whose logit is added too; the gradient is right."""

    def row_losses(self, s):
        super().row_losses(s)
        if not s.with_probabilities:
            logits = np.zeros(s.rows)
            if s.classes:
                column = np.clip(s.t - s.class_start, 0, s.classes - 1)
                logits = (s.factor * s.source)[np.arange(s.rows), column] * s.w[column] * (1.0 - s.label_smoothing)
            s.row_loss = s.row_loss - self.sum(s, np.where(s.valid & ~s.mine, logits, 0.0))


class MaskEndsTooLate(ByHand):
    """A rank also takes the first class of the next shard for its own, and clamps it."""

    def coefficients(self, s):
        if not s.with_probabilities:
            own = s.t - s.class_start
            s.mine = s.valid & (own >= 0) & (own <= s.classes) & bool(s.classes)
            s.column = np.where(s.mine, np.minimum(own, s.classes - 1), 0)
        super().coefficients(s)


class TargetWrappedNotMasked(ByHand):
    """The number of a target is taken modulo the number of this rank's classes, on every rank."""

    def coefficients(self, s):
        if not s.with_probabilities:
            s.mine, s.column = s.valid & bool(s.classes), (s.t - s.class_start) % max(s.classes, 1)
        super().coefficients(s)


class GlobalNumberWrapped(ByHand):
    """The same, of global class numbers."""

    def coefficients(self, s):
        if not s.with_probabilities:
            s.mine, s.column = s.valid & bool(s.classes), s.t % max(s.classes, 1)
        super().coefficients(s)


class MaximaLeftIn(SumsOfOtherMaxima):
    """Each rank's logsumexp has its own maximum, and the logit at the target is that of all ranks."""

    def row_losses(self, s):
        logits = self.sum(s, np.where(s.u == 0.0, 0.0, s.u * s.factor * s.source).sum(axis=-1))
        s.sum_u = self.sum(s, s.u.sum(axis=-1))
        s.row_loss = np.where(s.valid, s.sum_u * s.logsumexp - logits + self.z_term(s), 0.0)


class LogProb:
    """The log-probabilities that a loss gives."""

    def __init__(self, loss):
        self.loss = loss

    offer = Offer(kind="log_prob", dtypes=ByHand.offer.dtypes, options=("ignore_index",), gradient=Gradient.BACKWARD)

    def __call__(self, logits, targets, **given):
        loss, backward = self.loss(logits, targets, reduction="none", **given)
        return -loss, lambda dloss: -backward(dloss)


class Head:
    """The loss of hidden @ w."""

    def __init__(self, loss):
        self.loss = loss

    offer = Offer(
        kind="linear",
        dtypes=("float32", "float64"),
        options=("ignore_index",),
        reductions=("mean", "none"),
        gradient=Gradient.BACKWARD,
    )

    def __call__(self, hidden, w, targets, *, comm, **given):
        a, b = (each.astype(np.float64) for each in (hidden, w))
        loss, backward = self.loss(a @ b, targets, comm=comm, **given)

        def products(dloss=1.0):
            gradient = backward(dloss)
            dhidden = np.empty_like(a)
            comm.Allreduce(gradient @ b.T, dhidden)
            return self.of_hidden(comm, dhidden).astype(w.dtype), (a.T @ gradient).astype(w.dtype)

        return loss.astype(w.dtype), products

    def of_hidden(self, comm, dhidden):
        return dhidden


class Entropy:
    """The entropies of the softmax of a loss, in nats."""

    def __init__(self, loss):
        self.loss = loss

    offer = Offer(kind="entropy", dtypes=ByHand.offer.dtypes, gradient=Gradient.BACKWARD)

    def __call__(self, logits, **given):
        targets = np.zeros(logits.shape[:-1], np.int64)
        _, of_loss = self.loss(logits, targets, reduction="none", **given)
        s = inspect.getclosurevars(of_loss).nonlocals["s"]
        with np.errstate(all="ignore"):
            log_p = np.log(s.sum_exp)[:, None] - s.shifted
            of_class = np.where(s.p == 0.0, 0.0, s.p * log_p)
            entropy = self.loss.sum(s, of_class.sum(axis=-1))
            gradient = of_class - s.p * entropy[:, None]

        def backward(upstream):
            return (gradient * upstream.reshape(-1, 1)).astype(logits.dtype).reshape(logits.shape)

        return entropy.astype(np.float64 if logits.dtype == np.float64 else np.float32), backward


class HeadTimesRanks(Head):
    """dhidden is summed over the ranks twice."""

    def of_hidden(self, comm, dhidden):
        return dhidden * comm.size


class HeadOverRanks(Head):
    """dhidden is averaged over the ranks."""

    def of_hidden(self, comm, dhidden):
        return dhidden / comm.size
