"""Every tolerance of the tests on numbers, in ulps: each stands here, once, with its reason.

A result is allowed so many ulps of its own size, or of the size of the terms that it is a sum of, where those may
cancel. The arithmetic of ulps is that of the package.
"""

import numpy as np

from pce_mpi.ulps import errors as errors, ulp as ulp, worst as worst

# A row's loss in float32: its sum of exponentials errs by less than one of them does, 0.7 ulp, and the loss is rounded
# once more.
LOSS = 1
# The gradient at the target, and any other entry in ulps of the row's largest: an exponential, a product, a rounding.
GRADIENT = 2
# Losses that are sums over rows, have other terms, or are taken of shards of rounded numbers.
FLOAT32 = 4
# float64 arithmetic errs by 2**-20 of a float32 ulp or so. Only where the exact loss is so close to the middle
# between two float32 numbers may it be rounded to the other one.
FLOAT64_ROUNDED_TO_FLOAT32 = 1
# The float32 (or wider) gradient is rounded once; float32's own error can tip that to the neighbour.
HALF = 1
# Functions of our own arithmetic: float32 is computed in float64 and rounded once; float64 loses less than half an ulp
# before its result is rounded.
FUNCTION = {np.float32: 0.501, np.float64: 1}
# gelu, and its derivative: in float64 the exponential is a product of two, with a correction. The derivative is in ulps
# of the larger term of a difference.
GELU = {np.float32: 0.501, np.float64: 4}
GELU_SLOPE = {np.float32: 0.501, np.float64: 6}
# A number of float32 rounded once to a half: float32's own errors, up to some 16 ulp, are less than 2**-8 of a half's.
ROUNDED_ONCE = 0.51
# numpy's exp and log1p in float64 err by less than 1 ulp each, the sums over classes by about as much.
DENSE = 4
# With options: each of at most five terms (target, smoothing, z-loss, class weights, probabilities) is rounded once or
# twice more. In ulps of the largest of the terms that make up a loss or an entry of the gradient: they may cancel.
OPTIONS = 5
# float64 arithmetic against dense, which errs as well: the terms of both.
FLOAT64 = 8
# Entropy and log-probability are sums of at most three terms of one sign in float64; their exponentials are `LOSS`.
STATISTICS = 1
# Statistics in float64, in which no result is rounded again: some eight roundings on the way.
WIDE_STATISTICS = 4
# The part of the largest exponential that a sum of float32 may drop of each class: no ulp, and added to those allowed.
DROPPED = 2.0**-42
# The mass of a set, and the mass that it leaves out by that of the set: a quotient of two sums of exponentials, which
# err as in `LOSS`, 0.7 ulp each at most, and a rounding.
MASS = 2
# A divergence and its gradient: the sums of exponentials of float32 err by half an ulp or so, which scales all
# probabilities of a row; all else is float64, rounded once. The gradient in ulps of the larger term of a difference.
DIVERGENCE = 2
# Divergences in float64: no result is rounded again; some ten roundings of each term, none larger than the sum.
WIDE_DIVERGENCE = 16
# The entropy of dense is a sum of products of two numbers that are each good to `DENSE`.
DENSE_ENTROPY = 8
# Central differences with step eps**(1/3): truncation and rounding both leave about eps**(2/3), 2**18 ulp, and third
# derivatives of up to a few hundred.
FINITE_DIFFERENCE = 2**26
# An operation against NumPy's textbook formula, and in float32 against float64: some ten roundings of the largest
# numbers on the way, each of half an ulp or, in exponentials, of one or two.
OPERATION = 16
# Variances, norms and their gradients, in ulps of the largest element of a row: computed in float64 and rounded once;
# some eight roundings of float64.
MOMENTS = 4
# A sharded operation, or its gradient, against that of one process: what shards give is added up in another order, and
# where softmax states are merged it is in float64. Norms of rows of small numbers magnify that.
SHARDED = 64
# A random program of a dozen operations, and its derivative along a direction, against complex NumPy: each operation
# magnifies the rounding errors of those before it. In ulps of the largest number, or of the terms of the derivative.
PROGRAM = 2**16
# The worst errors that hill-climbing over rows finds, which pages name: of a float32 result half an ulp of its own
# rounding, and an exponential's 0.74 (more in ulps of a row's largest entry, where two are rounded); in float64 some 10
# roundings. The gradient of a divergence in ulps of the larger term of its formula, or of the larger probability.
CLIMBED = {
    ("loss", np.float32): 1.25,
    ("loss", np.float64): 5.5,
    ("log_prob", np.float32): 1.25,
    ("log_prob", np.float64): 5.5,
    ("gradient at the target", np.float32): 1.25,
    ("gradient at the target", np.float64): 5.0,
    ("gradient elsewhere", np.float32): 1.75,
    ("gradient elsewhere", np.float64): 4.5,
    ("entropy", np.float32): 1.25,
    ("entropy", np.float64): 5.5,
    ("loss of dense", np.float64): 4.5,
    ("gradient of dense", np.float64): 5.0,
    ("gradient of a divergence", np.float32): 2,
    ("gradient of a divergence", np.float64): 16,
}
