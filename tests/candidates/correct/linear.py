"""A fused head in chunks of rows and tiles of the vocabulary, step by step; a wrong candidate replaces a step."""

from types import SimpleNamespace

from mpi4py import MPI
import numpy as np

from pce_mpi.conformance.candidates.offers import Offer


class Head:
    """Loss of hidden @ w; padded columns of the last tile are masked."""

    chunk, tile = 5, 16
    dtype: type = np.float32
    offer = Offer(
        kind="linear",
        dtypes=("float32", "bfloat16"),
        options=("ignore_index", "softcap", "temperature", "bias"),
        reductions=("mean", "none", "sum"),
        dims=(1, 2, 3),
        num_classes=False,
        checks_targets=False,
    )

    def __call__(self, hidden, w, targets=None, *, class_start, num_classes, comm, bias=None, softcap=None, **options):
        s = SimpleNamespace(comm=comm, start=class_start, softcap=softcap, w=w.astype(self.dtype))
        s.temperature, s.ignored = options.get("temperature", 1.0), options.get("ignore_index", -100)
        s.bias = np.zeros(w.shape[1], self.dtype) if bias is None else bias.astype(self.dtype)
        rows = hidden.reshape(-1, w.shape[0]).astype(self.dtype)
        flat = np.zeros(len(rows), np.int64) if targets is None else targets.reshape(-1)
        s.counts, s.of_lse = flat != s.ignored, []
        losses, dhidden = np.zeros(len(rows)), np.zeros(rows.shape)
        dw, dbias = np.zeros(w.shape, self.sum_dtype(w)), np.zeros(w.shape[1])
        s.reduction = reduction = options.get("reduction", "none")
        with np.errstate(all="ignore"):
            factor = self.factor(s, reduction)
            for first in range(0, len(rows), self.chunk):
                part = slice(first, first + self.chunk)
                losses[part], dlogits = self.rows(s, rows[part], flat[part], s.counts[part])
                dlogits = self.scaled(s, dlogits * s.counts[part, None], factor)
                dhidden[part] = self.over_ranks(s, dlogits @ s.w.T)
                dw = self.with_rows(dw, rows[part].T @ dlogits)
                dbias += dlogits.sum(axis=0)
            losses = self.counted(s, losses)
            loss = losses.reshape(hidden.shape[:-1]) if reduction == "none" else self.total(s, losses, factor)
        gradients = [dhidden.reshape(hidden.shape), dw, dbias][: 2 if bias is None else 3]
        return np.asarray(loss, np.float32), *(each.astype(w.dtype) for each in gradients)

    def sum_dtype(self, w):
        return np.float64

    def with_rows(self, dw, part):
        return dw + part

    def counted(self, s, losses):
        return np.where(s.counts, losses, 0.0)

    def total(self, s, losses, factor):
        return losses.sum() * factor

    def factor(self, s, reduction):
        return 1.0 / np.float64(s.counts.sum()) if reduction == "mean" else np.float64(1.0)

    def scaled(self, s, dlogits, factor):
        return dlogits * (factor if s.counts.any() else 0.0)

    def over_ranks(self, s, part, op=MPI.SUM):
        whole = np.empty_like(part := np.ascontiguousarray(part))
        s.comm.Allreduce(part, whole, op)
        return whole

    def logits(self, s, hidden):
        """This rank's logits, padded to whole tiles, and the derivative of the softcap."""
        z = (hidden @ s.w + s.bias) / self.dtype(s.temperature)
        z = np.pad(z, ((0, 0), (0, -z.shape[1] % self.tile)), constant_values=-np.inf)
        return self.capped(s, z)

    def capped(self, s, z):
        if s.softcap is None:
            return z, np.ones_like(z)
        t = np.tanh(z / self.dtype(s.softcap))
        return np.where(z == -np.inf, z, self.dtype(s.softcap) * t), 1 - t * t

    def at_target(self, s, z, targets):
        columns = np.arange(z.shape[1]) + s.start
        return (columns == targets[:, None]) & (np.arange(z.shape[1]) < s.w.shape[1])

    def rows(self, s, hidden, targets, counts):
        z, slope = self.logits(s, hidden)
        top = self.over_ranks(s, z.max(axis=-1, initial=-np.inf), MPI.MAX)[:, None]
        e = np.exp(z - top)
        total = self.over_ranks(s, e.sum(axis=-1))[:, None]
        s.of_lse.append(np.log(total)[:, 0])
        wanted = self.at_target(s, z, targets)
        s.log_p = z - top - np.log(total)
        loss, dz = self.numbers(s, e / total, wanted)
        return loss, (dz * slope / self.dtype(s.temperature))[:, : s.w.shape[1]]

    def numbers(self, s, p, wanted):
        others = np.where(wanted, 0.0, p).sum(axis=-1, dtype=np.float64)  # p - 1 has no digits where p is near 1
        others = self.over_ranks(s, others)[:, None]
        loss = -self.over_ranks(s, np.where(wanted, s.log_p, 0.0).sum(axis=-1, dtype=np.float64))
        loss = np.where(others[:, 0] < 0.5, -np.log1p(-others[:, 0]), loss)
        return loss, np.where(wanted, -others, p)


class Rows(Head):
    """Other chunks, and dhidden that the caller sums."""

    chunk, tile = 1_000, 64
    offer = Offer(**(vars(Head.offer) | {"dhidden": "partial"}))

    def over_ranks(self, s, part, op=MPI.SUM):
        return part.copy() if part.ndim == 2 else super().over_ranks(s, part, op)


class Wide(Head):
    """Products in float64."""

    chunk, dtype = 100, np.float64


class Entropy(Head):
    """The entropy of each row."""

    offer = Offer(**(vars(Head.offer) | {"kind": "linear_entropy", "options": ("softcap", "temperature", "bias")}))

    def numbers(self, s, p, wanted):
        of_class = np.where(p == 0.0, 0.0, p * s.log_p)
        entropy = -self.over_ranks(s, of_class.sum(axis=-1, dtype=np.float64))
        return entropy, np.where(p == 0.0, 0.0, -of_class - p * entropy[:, None])
