"""The oracle: softmax cross entropy in one process, unsharded, in float64, from the textbook.

This folder imports nothing else of the package: the code that is compared with it cannot share its mistakes. Options
and conventions are those of `pce_mpi.softmax_cross_entropy` without `comm`, `batch_comm` and `class_start`;
`compute_dtype` can only be float64.
"""

from pce_mpi.dense.chosen import take_classes, take_classes_backward
from pce_mpi.dense.divergence import KLValueAndGrad, kl_divergence_value_and_grad
from pce_mpi.dense.linear import (
    LinearGradients,
    LinearValueAndGrad,
    linear_class_statistics,
    linear_class_statistics_backward,
    linear_cross_entropy_value_and_grad,
)
from pce_mpi.dense.losses import softmax_cross_entropy, softmax_cross_entropy_value_and_grad
from pce_mpi.dense.statistics import Statistics, class_statistics, class_statistics_backward
from pce_mpi.dense.truncation import Nucleus, nucleus

__all__ = [
    "KLValueAndGrad",
    "LinearGradients",
    "LinearValueAndGrad",
    "Nucleus",
    "Statistics",
    "class_statistics",
    "class_statistics_backward",
    "kl_divergence_value_and_grad",
    "linear_class_statistics",
    "linear_class_statistics_backward",
    "linear_cross_entropy_value_and_grad",
    "nucleus",
    "softmax_cross_entropy",
    "softmax_cross_entropy_value_and_grad",
    "take_classes",
    "take_classes_backward",
]
