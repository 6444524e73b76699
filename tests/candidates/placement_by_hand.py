"""Functions of a sharded or partial array, written out; wrong candidates replace one of the steps."""

from types import SimpleNamespace

import numpy as np

FUNCTIONS = ("sum", "mean", "max", "min", "prod", "norm", "norm-inf", "logsumexp")
MOVES = ("replicate", "shard")


def norm(x, axis):
    largest = np.abs(x).max(axis, keepdims=True, initial=0.0)
    unit = np.where(np.isfinite(largest) & (largest > 0.0), largest, 1.0)
    return np.squeeze(unit, axis) * np.sqrt(np.square(x / unit).sum(axis))


class PlacementByHand:
    """A function of each row, float64 inside."""

    kind = "placement"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    gradient = "backward"
    partial = "no"
    ties = "shared"

    def __init__(self, computes="max", **declared):
        self.computes = computes
        self.__dict__ |= declared

    def __call__(self, array, *, splits, comm):
        s = SimpleNamespace(comm=comm, splits=splits, here=slice(*splits[comm.rank : comm.rank + 2]), array=array)
        if self.computes in MOVES:
            return self.moved(s), lambda g: self.moved_back(s, g)
        with np.errstate(all="ignore"):
            s.x = array.astype(np.float64)
            s.own = self.of_rank(s)
            s.value = self.over_ranks(s, np.stack(comm.allgather(s.own)))

        def backward(g):
            with np.errstate(all="ignore"):
                upstream = self.upstream(s, g.astype(np.float64))
                return (self.slope(s, s.value) * upstream[:, None]).astype(array.dtype)

        return s.value, backward

    def of_rank(self, s):
        """The function of this rank's elements."""
        return self.reduced(s.x, -1)

    def over_ranks(self, s, values):
        """The function of all ranks' values."""
        value = self.reduced(values, 0)
        return value / s.splits[-1] if self.computes == "mean" else value

    def reduced(self, x, axis):
        return {
            "sum": lambda: x.sum(axis),
            "mean": lambda: x.sum(axis),
            "max": lambda: x.max(axis, initial=-np.inf),
            "min": lambda: x.min(axis, initial=np.inf),
            "prod": lambda: x.prod(axis),
            "norm": lambda: norm(x, axis),
            "norm-inf": lambda: np.abs(x).max(axis, initial=0.0),
            "logsumexp": lambda: np.logaddexp.reduce(x, axis, initial=-np.inf),
        }[self.computes]()

    def slope(self, s, value):
        """The derivative of a value by this rank's elements."""
        if self.computes in ("sum", "mean"):
            return np.ones_like(s.x) / (s.splits[-1] if self.computes == "mean" else 1)
        if self.computes == "prod":
            others = np.delete(np.stack(s.comm.allgather(s.own)), s.comm.rank, 0).prod(0)
            return self.products_of_others(s) * others[:, None]
        if self.computes == "norm":
            return s.x / value[:, None]
        if self.computes == "logsumexp":
            return np.exp(s.x - value[:, None])
        if self.computes == "norm-inf":
            return self.share(s, np.abs(s.x) == value[:, None]) * np.sign(s.x)
        return self.share(s, s.x == value[:, None])

    def products_of_others(self, s):
        others = [np.delete(s.x, each, -1).prod(-1) for each in range(s.x.shape[-1])]
        return np.stack(others, -1) if others else np.ones_like(s.x)

    def share(self, s, found):
        """What of the gradient elements get that tie."""
        if self.ties == "first":
            return found & (np.cumsum(found, -1) + self.before(s, found)[:, None] == 1)
        return found / s.comm.allreduce(found.sum(-1, keepdims=True))

    def before(self, s, found):
        counts = s.comm.allgather(found.sum(-1))
        return sum(counts[: s.comm.rank], np.zeros(len(found)))

    def upstream(self, s, g):
        return g

    def moved(self, s):
        if self.computes == "shard":
            return s.array[:, s.here].copy()
        return np.concatenate(s.comm.allgather(s.array), -1)

    def moved_back(self, s, g):
        return g[:, s.here].copy() if self.computes == "replicate" else np.concatenate(s.comm.allgather(g), -1)


candidate = PlacementByHand()
