"""A vocabulary-parallel cross entropy, written out step by step; a wrong candidate replaces one of the steps.

`s` is the state of the steps: the arguments by their names, and the results of the steps. All arrays of `s` have one
row per sample, and this rank's classes as columns.
"""

from types import SimpleNamespace

from mpi4py import MPI
import numpy as np

from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.problems.cases import OPTIONS, Gradient


class ByHand:
    """Right in everything that it offers; float64 inside."""

    offer = Offer(
        dtypes=("float16", "bfloat16", "float32", "float64"),
        options=OPTIONS,
        reductions=("none", "sum", "mean"),
        probabilities=True,
        dims=(1, 2, 3, 4, 5),
        any_axis=True,
        gradient=Gradient.BACKWARD,
        batch_comm=True,
    )

    def __call__(
        self,
        logits,
        targets,
        *,
        class_start,
        num_classes,
        comm,
        axis=-1,
        reduction="mean",
        weight=None,
        ignore_index=-100,
        label_smoothing=0.0,
        z_loss=0.0,
        logit_scale=1.0,
        softcap=None,
        batch_comm=None,
    ):
        s = SimpleNamespace(**locals())
        with np.errstate(all="ignore"):
            self.flatten(s)
            self.refuse(s)
            self.coefficients(s)
            self.transform(s)
            self.softmax(s)
            self.row_losses(s)
            s.divisor = self.divisor(s)
            loss = self.reduce(s)

        def backward(dloss=1.0):
            with np.errstate(all="ignore"):
                return self.backward(s, dloss)

        return loss, backward

    def sum(self, s, array):
        """The sum over the ranks, one number per row."""
        total = np.empty_like(array)
        s.comm.Allreduce(np.ascontiguousarray(array), total, MPI.SUM)
        return np.where(np.isnan(total), np.nan, total)  # every rank has one nan

    def flatten(self, s):
        """Rows by classes, in float64; the rows that count, and those whose target this rank has."""
        x = np.moveaxis(s.logits, s.axis, -1)
        s.rows_shape, s.classes = x.shape[:-1], x.shape[-1]
        s.rows = int(np.prod(s.rows_shape))
        s.x = x.astype(np.float64).reshape(s.rows, s.classes)
        s.with_probabilities = s.targets.dtype.kind not in "iu"
        s.w = np.ones(s.classes) if s.weight is None else np.asarray(s.weight).astype(np.float64)
        if s.with_probabilities:
            s.q = np.moveaxis(s.targets, s.axis, -1).astype(np.float64).reshape(s.rows, s.classes)
            s.valid = np.ones(s.rows, bool)
            s.mine = np.zeros(s.rows, bool)
        else:
            s.t = s.targets.reshape(s.rows).astype(np.int64)
            s.valid = s.t != s.ignore_index
            s.mine = self.owned(s)
        s.column = np.where(s.mine, s.t - s.class_start, 0) if not s.with_probabilities else np.zeros(s.rows, int)

    def owned(self, s):
        return s.valid & (s.t >= s.class_start) & (s.t < s.class_start + s.classes)

    def refuse(self, s):
        """Every rank sees the same targets and the same sum, so every rank raises the same error."""
        classes = s.comm.allreduce(s.classes)
        if classes != s.num_classes:
            raise ValueError(f"num_classes is {s.num_classes}, but the shards have {classes} classes together")
        if not s.with_probabilities and (s.valid & ((s.t < 0) | (s.t >= s.num_classes))).any():
            raise IndexError(f"a target is outside [0, {s.num_classes})")

    def coefficients(self, s):
        """u: the loss of a row is sum_c u_c (-log p_c)."""
        s.u = self.smoothing(s)
        if s.with_probabilities:
            s.u = s.u + s.w * s.q * (1.0 - s.label_smoothing)
        else:
            row = np.flatnonzero(s.mine)
            s.u[row, s.column[row]] += (1.0 - s.label_smoothing) * s.w[s.column[row]]

    def smoothing(self, s):
        return np.zeros((s.rows, s.classes)) + s.w * (s.label_smoothing / s.num_classes)

    def transform(self, s):
        """z = factor * source, and dz/dx."""
        if s.softcap is None:
            s.source, s.factor = s.x, s.logit_scale
            s.slope = np.full_like(s.x, s.logit_scale)
        else:
            angle = s.logit_scale * s.x / s.softcap
            s.source, s.factor = np.where(np.isinf(s.x), s.x, s.softcap * np.tanh(angle)), 1.0
            s.slope = s.logit_scale / np.cosh(angle) ** 2

    def softmax(self, s):
        s.top = self.maximum(s)
        s.shifted = s.factor * (s.source - s.top[:, None])
        s.exp = np.exp(s.shifted)
        s.sum_exp = self.sum(s, s.exp.sum(axis=-1))
        s.logsumexp = s.factor * s.top + np.log(s.sum_exp)
        s.p = s.exp / s.sum_exp[:, None]

    def maximum(self, s):
        top = np.empty(s.rows)
        s.comm.Allreduce(s.source.max(axis=-1, initial=-np.inf), top, MPI.MAX)
        return top

    def row_losses(self, s):
        s.sum_u = self.sum(s, s.u.sum(axis=-1))
        weighted = self.sum(s, np.where(s.u == 0.0, 0.0, s.u * s.shifted).sum(axis=-1))
        loss = s.sum_u * np.log(s.sum_exp) - weighted + self.z_term(s)
        s.row_loss = np.where(s.valid, loss, 0.0)

    def z_term(self, s):
        return s.z_loss * s.logsumexp**2

    def divisor(self, s):
        """The divisor of the sum over rows."""
        if s.reduction != "mean":
            return 1.0
        if s.with_probabilities:
            return self.rows_of_all(s, float(s.rows))
        if s.weight is None:
            return self.rows_of_all(s, float(s.valid.sum()))
        return self.rows_of_all(s, float(self.sum(s, np.where(s.mine, self.weight_of_target(s), 0.0)).sum()))

    def rows_of_all(self, s, number):
        """The sum over the ranks that have other rows."""
        return number if s.batch_comm is None else s.batch_comm.allreduce(number)

    def weight_of_target(self, s):
        """The value at the target, for the rows whose target this rank has; anything in others."""
        return s.w[s.column] if s.classes else np.zeros(s.rows)

    def reduce(self, s):
        dtype = np.float64 if s.logits.dtype == np.float64 else np.float32
        if s.reduction == "none":
            return s.row_loss.reshape(s.rows_shape).astype(dtype)
        total = s.row_loss.sum()
        total = total if s.batch_comm is None else s.batch_comm.allreduce(total)
        return np.asarray(np.divide(total, s.divisor)).astype(dtype)

    def backward(self, s, dloss):
        upstream = self.upstream(s, np.asarray(dloss, np.float64))
        dx = self.gradient_of_z(s) * s.slope * (upstream / s.divisor)[:, None]
        dx = np.where(self.rows_with_gradient(s)[:, None], dx, 0.0)
        return self.give(s, self.round(s, dx))

    def upstream(self, s, dloss):
        return np.broadcast_to(dloss.reshape(-1), s.rows)

    def gradient_of_z(self, s):
        return s.p * (s.sum_u + 2.0 * s.z_loss * s.logsumexp)[:, None] - s.u

    def rows_with_gradient(self, s):
        return s.valid

    def round(self, s, dx):
        return dx.astype(s.logits.dtype)

    def give(self, s, dx):
        """In the shape of the logits."""
        return np.ascontiguousarray(np.moveaxis(dx.reshape(*s.rows_shape, s.classes), -1, s.axis))


candidate = ByHand()
