"""Softmax cross entropy to 60 digits by mpmath, as pairs of float64: the nearest one and what is left over.

Rows are given with few different logits, as numbers do come after rounding, so that mpmath computes each exponential
once. The difference of two float64 numbers and its product with a factor are exact at this precision.
"""

from typing import Any, NamedTuple

import mpmath
import numpy as np

Array = np.ndarray[Any, Any]

DIGITS = 60


class Pair(NamedTuple):
    """`near + rest`, to about 32 digits."""

    near: Array
    rest: Array


def pair(numbers: list[Any]) -> Pair:
    near = np.array([float(number) for number in numbers])
    return Pair(near, np.array([float(number - mpmath.mpf(n)) for number, n in zip(numbers, near, strict=True)]))


class ExactRow(NamedTuple):
    """A row's loss, its gradient at the target, and that at each of the different logits of other classes."""

    target: int
    loss: Pair
    at_target: Pair
    different: Array
    elsewhere: Pair

    def largest(self) -> float:
        """Return the largest of all entries of the gradient, by size."""
        return max(abs(float(self.at_target.near[0])), float(self.elsewhere.near.max(initial=0.0)))

    def gradient(self, logits: Array, start: int) -> Pair:
        """The gradient of the classes from `start`, given their logits."""
        if not len(self.different):
            elsewhere = [np.zeros(len(logits))] * 2
        else:
            place = np.minimum(np.searchsorted(self.different, logits), len(self.different) - 1)
            elsewhere = [part[place] for part in self.elsewhere]
        at_target = np.arange(start, start + len(logits)) == self.target
        return Pair(*(np.where(at_target, at, part) for at, part in zip(self.at_target, elsewhere, strict=True)))


def exact_row(
    logits: Array, target: int, scale: float = 1.0, margin: tuple[float, float, float] = (1.0, 0.0, 0.0)
) -> ExactRow:
    """Loss and gradient of a row of float64 numbers; with a margin, the target's is inside (-1, 1)."""
    with mpmath.workdps(DIGITS):
        different, count = np.unique(np.delete(logits, target), return_counts=True)
        s, (m1, m2, m3), x_target = mpmath.mpf(scale), map(mpmath.mpf, margin), mpmath.mpf(float(logits[target]))
        z_target, slope = s * (x_target - m3), s
        if (m1, m2) != (1, 0):
            angle = m1 * mpmath.acos(x_target) + m2
            z_target = s * (mpmath.cos(angle) - m3)
            slope = s * m1 * mpmath.sin(angle) / mpmath.sqrt(1 - x_target**2)
        odds = [mpmath.exp(s * mpmath.mpf(x) - z_target) for x in different.tolist()]
        total = mpmath.fsum(o * c for o, c in zip(odds, count.tolist(), strict=True))
        elsewhere = pair([s * o / (1 + total) for o in odds])
        at_target = pair([-slope * total / (1 + total)])
        return ExactRow(int(target), pair([mpmath.log1p(total)]), at_target, different, elsewhere)


class ExactStatistics(NamedTuple):
    sum_exp: Pair
    logsumexp: Pair
    log_prob: Pair
    entropy: Pair


def exact_statistics(logits: Array, target: int) -> ExactStatistics:
    """Return the exact values of what `class_statistics` gives of a row of float64 numbers."""
    with mpmath.workdps(DIGITS):
        different, count = np.unique(logits, return_counts=True)
        top = mpmath.mpf(different[-1])
        gaps = [mpmath.mpf(x) - top for x in different.tolist()]
        e = [mpmath.exp(gap) * c for gap, c in zip(gaps, count.tolist(), strict=True)]
        total = mpmath.fsum(e)
        log_total = mpmath.log(total)
        entropy = mpmath.fsum((e_c / total) * (log_total - gap) for e_c, gap in zip(e, gaps, strict=True) if e_c)
        log_prob = mpmath.mpf(float(logits[target])) - top - log_total
        return ExactStatistics(*(pair([value]) for value in (total, top + log_total, log_prob, entropy)))


class ExactWeighted(NamedTuple):
    """A row's sum_c u_c (-log p_c), its gradient, and the size of the largest term of each entry of that."""

    loss: Pair
    gradient: Pair
    size: Array


def exact_weighted(logits: Array, u: Array) -> ExactWeighted:
    """The loss of a row with probability targets, or any other weights u of a sum over classes."""
    with mpmath.workdps(DIGITS):
        x, weights = ([mpmath.mpf(value) for value in numbers.tolist()] for numbers in (logits, u))
        top = int(np.argmax(logits))
        e = [mpmath.exp(value - x[top]) for value in x]
        others = mpmath.fsum(value for c, value in enumerate(e) if c != top)
        nll = [mpmath.log1p(others) + (x[top] - value) for value in x]
        p = [value / (1 + others) for value in e]
        whole, rest = mpmath.fsum(weights), mpmath.fsum(value for c, value in enumerate(weights) if c != top)
        gradient = [whole * p_c - u_c for p_c, u_c in zip(p, weights, strict=True)]
        size = [max(whole * p_c, u_c) for p_c, u_c in zip(p, weights, strict=True)]
        # For the class held apart, p - 1 is a number of its own, not a difference.
        size[top] = max(weights[top] * others / (1 + others), rest * p[top])
        loss = mpmath.fsum(a * b for a, b in zip(weights, nll, strict=True) if a)
        return ExactWeighted(pair([loss]), pair(gradient), np.array([float(value) for value in size]))


class ExactDivergence(NamedTuple):
    """A row's divergence, its gradients, and the sizes of the larger term of each entry of those."""

    divergence: Pair
    gradients: tuple[Pair, Pair]
    sizes: tuple[Array, Array]
    largest: Array  # the larger probability of each class


def exact_divergence(student: Array, teacher: Array, direction: str, scale: float, beta: float) -> ExactDivergence:
    """The divergence of two rows of float64 numbers times `scale`, which may have -inf."""
    with mpmath.workdps(DIGITS):
        zero, masked = mpmath.mpf(0), mpmath.mpf("-inf")

        def log_softmax(x: Array) -> list[Any]:
            z = [mpmath.mpf(value) * mpmath.mpf(scale) for value in x.tolist()]
            top = max(z)
            total = top + mpmath.log(mpmath.fsum(mpmath.exp(value - top) for value in z))
            return [value - total for value in z]

        def kl(a: list[Any], b: list[Any]) -> tuple[Any, list[Any], list[Any]]:
            """KL(a || b), its gradient by a, and the size of its terms."""
            logs = [zero if at == masked else at - bt for at, bt in zip(a, b, strict=True)]
            p = [mpmath.exp(value) for value in a]
            divergence = mpmath.fsum(p_c * log for p_c, log in zip(p, logs, strict=True))
            gradient = [p_c * (log - divergence) if p_c else zero for p_c, log in zip(p, logs, strict=True)]
            return divergence, gradient, [p_c * max(abs(log), divergence) for p_c, log in zip(p, logs, strict=True)]

        s, t = log_softmax(student), log_softmax(teacher)
        difference = [mpmath.exp(a) - mpmath.exp(b) for a, b in zip(s, t, strict=True)]
        if direction == "forward":
            divergence, dt, size = kl(t, s)
            both, sizes = (difference, dt), (difference, size)
        elif direction == "reverse":
            divergence, ds, size = kl(s, t)
            both, sizes = (ds, [-value for value in difference]), (size, difference)
        else:
            b, a = mpmath.mpf(beta), 1 - mpmath.mpf(beta)  # of the teacher, and of the student
            m = [mpmath.log(a * mpmath.exp(x) + b * mpmath.exp(y)) for x, y in zip(s, t, strict=True)]
            (of_s, ds, of_ds), (of_t, dt, of_dt) = kl(s, m), kl(t, m)
            divergence, both, sizes = a * of_s + b * of_t, ([a * v for v in ds], [b * v for v in dt]), (of_ds, of_dt)
        of_student, of_teacher = ([value * mpmath.mpf(scale) for value in each] for each in both)
        student_size, teacher_size = (np.array([abs(float(value)) * scale for value in each]) for each in sizes)
        larger = np.array([float(mpmath.exp(max(a, b))) for a, b in zip(s, t, strict=True)])
        return ExactDivergence(
            pair([divergence]), (pair(of_student), pair(of_teacher)), (student_size, teacher_size), larger
        )
