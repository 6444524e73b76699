"""The oracle: softmax cross entropy in one process, unsharded, in float64, from the textbook.

This folder imports nothing else of the package: the code that is compared with it cannot share its mistakes. Options
and conventions are those of `pce_mpi.softmax_cross_entropy` without `comm`, `batch_comm` and `class_start`;
`compute_dtype` can only be float64.
"""

from pce_mpi.dense.divergence import KLValueAndGrad, kl_divergence_value_and_grad
from pce_mpi.dense.linear import LinearValueAndGrad, linear_cross_entropy_value_and_grad
from pce_mpi.dense.losses import softmax_cross_entropy, softmax_cross_entropy_value_and_grad
from pce_mpi.dense.statistics import Statistics, class_statistics, class_statistics_backward

__all__ = [
    "KLValueAndGrad",
    "LinearValueAndGrad",
    "Statistics",
    "class_statistics",
    "class_statistics_backward",
    "kl_divergence_value_and_grad",
    "linear_cross_entropy_value_and_grad",
    "softmax_cross_entropy",
    "softmax_cross_entropy_value_and_grad",
]
