"""The kinds of candidates, a file for each: what they offer, what is exact, and the faults that are known."""

from pce_mpi.conformance.problems.kinds.kl import KL, TOPK_KL
from pce_mpi.conformance.problems.kinds.linear import LINEAR, LINEAR_ENTROPY, LINEAR_LOG_PROB
from pce_mpi.conformance.problems.kinds.loss import LOSS
from pce_mpi.conformance.problems.kinds.placement import PLACEMENT
from pce_mpi.conformance.problems.kinds.statistics import ENTROPY, LOG_PROB
from pce_mpi.conformance.problems.kinds.step import STEP
from pce_mpi.conformance.problems.problem import Kind

# By the name in an offer.
KINDS: dict[str, Kind] = {
    "loss": LOSS,
    "log_prob": LOG_PROB,
    "entropy": ENTROPY,
    "kl": KL,
    "topk_kl": TOPK_KL,
    "step": STEP,
    "placement": PLACEMENT,
    "linear": LINEAR,
    "linear_log_prob": LINEAR_LOG_PROB,
    "linear_entropy": LINEAR_ENTROPY,
}
