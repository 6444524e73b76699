"""Divergences over sharded classes in float64, step by step; a wrong candidate replaces one of the steps."""

from dataclasses import replace
from types import SimpleNamespace

from mpi4py import MPI
import numpy as np

from pce_mpi.conformance.candidates.offers import Offer


class Forward:
    """KL(teacher || student): two softmaxes and a sum over the ranks."""

    offer = Offer(
        kind="kl", dtypes=("float32",), options=("temperature",), reductions=("none", "mean"), num_classes=False
    )

    def __call__(self, student, teacher, *, class_start, num_classes, comm, temperature=1.0, reduction="none"):
        s = SimpleNamespace(**locals())
        with np.errstate(all="ignore"):
            s.log_p, s.log_q = self.log_softmax(s, student), self.log_softmax(s, teacher)
            rows, gradient = self.divergence(s)
            factor = self.factor(s) / np.float64(len(rows) if reduction == "mean" else 1)
            loss = rows * factor if reduction == "none" else rows.sum() * factor
            return np.float32(loss), np.float32(gradient * factor / temperature)

    def log_softmax(self, s, logits):
        z = logits.astype(np.float64) / s.temperature
        top = self.over_ranks(s, z.max(axis=-1, initial=-np.inf), MPI.MAX)
        z = z - top[:, None]
        return z - np.log(self.over_ranks(s, np.exp(z).sum(axis=-1)))[:, None]

    def over_ranks(self, s, rows, op=MPI.SUM):
        result = np.empty_like(rows)
        s.comm.Allreduce(rows, result, op)
        return result

    def divergence(self, s):
        p, q = np.exp(s.log_p), np.exp(s.log_q)
        of_class = np.where(q == 0.0, 0.0, q * (s.log_q - s.log_p))
        return self.over_ranks(s, of_class.sum(axis=-1)), p - q

    def factor(self, s):
        return 1.0


class Differences(Forward):
    """Divergences in float32, of the differences of logits; for a student that is close to its teacher."""

    def divergence(self, s):
        p, q = np.exp(np.float32(s.log_p)), np.exp(np.float32(s.log_q))
        difference = s.teacher - s.student
        common = np.log1p(self.over_ranks(s, (p * np.expm1(difference)).sum(axis=-1)))[:, None]
        return self.over_ranks(s, (q * (difference - common)).sum(axis=-1)), p - q


class TopK(Forward):
    """KL(teacher || student) over the teacher's largest classes: the ranks exchange their own largest."""

    offer = Offer(kind="topk_kl", reductions=("none",), num_classes=False)

    def __call__(self, student, teacher, *, top_k, **arguments):
        self.top_k = top_k
        return super().__call__(student, teacher, **arguments)

    def chosen(self, s):
        """Return a mask of this rank's classes that are among the largest of all."""
        own = np.sort(s.teacher, axis=-1)[:, ::-1][:, : self.top_k]
        everyone = np.sort(np.concatenate(s.comm.allgather(own), axis=-1), axis=-1)[:, ::-1]
        return s.teacher >= everyone[:, self.top_k - 1 : self.top_k]

    def divergence(self, s):
        p, q = np.exp(s.log_p), np.exp(s.log_q)
        q = np.where(self.chosen(s) | np.isnan(q), q, 0.0)
        of_class = np.where(q == 0.0, 0.0, q * (s.log_q - s.log_p))
        rows, mass = (self.over_ranks(s, each.sum(axis=-1)) for each in (of_class, q))
        return rows, mass[:, None] * p - q


class ReverseTopK(TopK):
    """KL(student || teacher) over the teacher's largest classes, with a class more for all others."""

    offer = replace(TopK.offer, direction="reverse", rest="bucket")

    def divergence(self, s):
        chosen, p = self.chosen(s), np.exp(s.log_p)
        of_others = self.log_of_others(s, s.log_p, chosen) - self.log_of_others(s, s.log_q, chosen)
        ratio = np.where(p == 0.0, 0.0, np.where(chosen, s.log_p - s.log_q, of_others[:, None]))
        rows = self.over_ranks(s, (p * ratio).sum(axis=-1))
        return rows, p * (ratio - rows[:, None])

    def log_of_others(self, s, logs, chosen):
        logs = np.where(chosen, -np.inf, logs)
        top = self.over_ranks(s, logs.max(axis=-1, initial=-np.inf), MPI.MAX)
        return top + np.log(self.over_ranks(s, np.exp(logs - top[:, None]).sum(axis=-1)))


forward, top_k, reverse_top_k = Forward(), TopK(), ReverseTopK()
