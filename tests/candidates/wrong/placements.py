"""Faults in reductions over the ranks, in the gradient of each rank's part, and in moves."""

import numpy as np

from candidates.placement_by_hand import PlacementByHand


class ComparedInOrder(PlacementByHand):
    """The maximum of ranks by comparisons, which a nan does not pass: as gloo's."""

    def over_ranks(self, s, values):
        found = values[0]
        for value in values[1:]:
            found = np.where(found > value, found, value)
        return found


class ComparedFromOwn(PlacementByHand):
    """Each rank begins with its own maximum, and takes what is larger: as MPICH's, whose ranks disagree."""

    def over_ranks(self, s, values):
        found = values[s.comm.rank]
        for value in values:
            found = np.where(value > found, value, found)
        return found


class PassedOn(PlacementByHand):
    """The backward pass of the reduction is that of a sum: each rank goes on with what it has itself."""

    def slope(self, s, value):
        if self.computes in ("norm", "logsumexp"):
            return super().slope(s, s.own)
        if self.computes == "mean":
            return np.ones_like(s.x) / s.x.shape[-1]
        if self.computes == "prod":
            return self.products_of_others(s)
        x = np.abs(s.x) if self.computes == "norm-inf" else s.x
        found = x == self.of_rank(s)[:, None]
        return found / found.sum(-1, keepdims=True) * (np.sign(s.x) if self.computes == "norm-inf" else 1)


class SummedOnceMore(PlacementByHand):
    """The backward pass sums the upstream gradients, which all ranks have alike: as that of `torch.distributed.nn`."""

    def upstream(self, s, g):
        return s.comm.size * g


class Averaged(PlacementByHand):
    """The gradient is divided by the number of ranks, as that of replicas is."""

    def upstream(self, s, g):
        return g / s.comm.size


class UpstreamMultiplied(PassedOn):
    """The backward pass of a product multiplies the upstream gradients: as that of `torch.distributed.nn`."""

    def upstream(self, s, g):
        return g**s.comm.size


class EachTies(PlacementByHand):
    """Each of the elements that tie has the whole gradient."""

    def share(self, s, found):
        return found


class EachRankTies(PlacementByHand):
    """Elements that tie share the gradient on each rank, and the ranks that tie do not."""

    def share(self, s, found):
        return found / np.maximum(found.sum(-1, keepdims=True), 1)


class FirstOfTies(PlacementByHand):
    """The first of the elements that tie has the gradient."""

    def share(self, s, found):
        return found & (np.cumsum(found, -1) + self.before(s, found)[:, None] == 1)


class OneForEmpty(PlacementByHand):
    """A rank without elements takes part with 1."""

    number = 1.0

    def of_rank(self, s):
        return super().of_rank(s) if s.x.size else np.full(len(s.x), self.number)


class ZeroForEmpty(OneForEmpty):
    """A rank without elements takes part with 0."""

    number = 0.0


class NeverReduced(PlacementByHand):
    """Each rank returns what it has of its own elements."""

    def over_ranks(self, s, values):
        return values[s.comm.rank] / (s.x.shape[-1] if self.computes == "mean" else 1)


class ValuesAdded(PlacementByHand):
    """The ranks' norms, or logarithms, are added."""

    def over_ranks(self, s, values):
        return values.sum(0)


class MeanOfMeans(PlacementByHand):
    """The ranks' means are averaged, and the gradient is that."""

    def over_ranks(self, s, values):
        return np.mean(values / np.diff(s.splits)[:, None], 0)

    def slope(self, s, value):
        return np.ones_like(s.x) / s.x.shape[-1] / s.comm.size


class MeansMerged(PlacementByHand):
    """Means are merged rank by rank, by their differences: as Heat's."""

    def over_ranks(self, s, values):
        lengths = np.diff(s.splits)
        mean, before = values[0] / lengths[0], lengths[0]
        for value, length in zip(values[1:], lengths[1:], strict=True):
            before += length
            mean = mean + (value / length - mean) * (length / before)
        return mean


class SumForMean(PlacementByHand):
    """The sum is divided by nothing."""

    def over_ranks(self, s, values):
        return values.sum(0)

    def slope(self, s, value):
        return np.ones_like(s.x)


class SumsInHalves(PlacementByHand):
    """Each rank's sum is rounded to the dtype of the array, and added up in it."""

    def over_ranks(self, s, values):
        total, *others = values.astype(s.array.dtype)
        for value in others:
            total = total + value
        return total.astype(np.float64)


class ProductOverElement(PlacementByHand):
    """The gradient of a product is the product divided by the element."""

    def slope(self, s, value):
        return value[:, None] / s.x


class SquaresInFloat32(PlacementByHand):
    """The squares of a norm are added up as they are."""

    def over_ranks(self, s, values):
        return np.sqrt(s.comm.allreduce(np.square(s.array.astype(np.float32)).sum(-1)))


class InPlace(PlacementByHand):
    """The elements are written over."""

    def of_rank(self, s):
        s.array *= 1.0
        s.array += 1.0
        return super().of_rank(s)


class OwnElements(PlacementByHand):
    """Nothing moves: each rank keeps what it was given."""

    def moved(self, s):
        return s.array.copy()


class SummedMove(PlacementByHand):
    """The backward pass of a gather sums what all ranks have alike."""

    def moved_back(self, s, g):
        return s.comm.size * super().moved_back(s, g)


class AveragedMove(PlacementByHand):
    """The backward pass of a gather is divided by the number of ranks."""

    def moved_back(self, s, g):
        return super().moved_back(s, g) / s.comm.size


class OwnGradient(PlacementByHand):
    """The backward pass of a cut has this rank's elements alone, and 0 elsewhere."""

    def moved_back(self, s, g):
        whole = np.zeros_like(s.array)
        whole[:, s.here] = g
        return whole


class ZerosAdded(PlacementByHand):
    """Shards are put in zeros, and added: the sign of -0.0 is lost."""

    def moved(self, s):
        return super().moved(s) + 0.0


class AnotherOrder(PlacementByHand):
    """Shards are gathered in another order."""

    def moved(self, s):
        return np.concatenate(s.comm.allgather(s.array)[::-1], -1)
