"""The loss of all classes and its gradient as one writes them with numba: a loop that ends a row while it is cached.

For float32 and, as words of 16 bits, bfloat16. The exponential is a polynomial: LLVM turns it into vectors, and not a
call of the C library.
"""

import math

import numba
import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

# 2^f for f in [0, 1), to about the precision of float32.
EXP2 = [np.float32(c) for c in Chebyshev.interpolate(np.exp2, 6, [0, 1]).convert(kind=Polynomial).coef]
C0, C1, C2, C3, C4, C5, C6 = EXP2
LOG2_E, SMALLEST, BIAS = np.float32(1 / math.log(2)), np.float32(-126), np.int32(127)

fast = numba.njit(fastmath=True, error_model="numpy")


@fast
def exp(x):
    """e^x for x <= 0."""
    t = max(x * LOG2_E, SMALLEST)
    whole = np.floor(t)
    f = t - whole
    power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * (C5 + f * C6)))))
    return power * np.int32((np.int32(whole) + BIAS) << 23).view(np.float32)


@fast
def same(x):
    return x


@fast
def widened(word):
    return np.uint32(np.uint32(word) << 16).view(np.float32)


@fast
def narrowed(x):
    """The nearest bfloat16; of two, the even one."""
    word = np.float32(x).view(np.uint32)
    return np.uint16(np.uint32(word + np.uint32(0x7FFF) + np.uint32(np.uint32(word >> 16) & 1)) >> 16)


# The functions that read and write an element.
FORMS = {"float32": (same, same), "bfloat16": (widened, narrowed)}


def value_and_grad_of(dtype):
    """A function that writes the gradient and returns the mean loss; bfloat16 as uint16."""
    load, store = FORMS[dtype]

    @fast
    def value_and_grad(logits, targets, gradient):
        rows, classes = logits.shape
        row, loss = np.empty(classes, np.float32), 0.0
        for i in range(rows):
            top = np.float32(-np.inf)
            for c in range(classes):
                row[c] = load(logits[i, c])
                top = max(top, row[c])
            at_target, total = row[targets[i]], np.float32(0)
            for c in range(classes):
                row[c] = exp(row[c] - top)
                total += row[c]
            loss += math.log(total) + top - at_target
            factor = np.float32(1 / (total * rows))
            row[targets[i]] -= total
            for c in range(classes):
                gradient[i, c] = store(row[c] * factor)
        return loss / rows

    return value_and_grad
