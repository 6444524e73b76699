"""Log-probabilities of each row's target: the negative of a loss, in options and faults too."""

from __future__ import annotations

from functools import partial
from itertools import chain

from pce_mpi.conformance.kinds import support
from pce_mpi.conformance.kinds.loss import LOSS, sizes
from pce_mpi.conformance.kinds.statistics import exact_statistic
from pce_mpi.conformance.problems import Kind

LOG_PROB = Kind(
    noun="log-probability",
    plural="log-probabilities",
    exact=partial(exact_statistic, "log_prob"),
    sizes=sizes,
    faults=lambda book: chain(support.faults(book), LOSS.faults(book)),
    told='the loss is of the opposite sign: a log-probability is declared by @offers(kind="log_prob")',
    options=("ignore_index", "logit_scale", "softcap", "support"),
    cases=support.CASES,
    negates=LOSS,
)
