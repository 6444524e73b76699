"""The conformance kit: judge any sharded softmax cross entropy by `dense`.

A candidate is a callable that computes the loss of logits whose classes are sharded over the ranks of a communicator;
`help(offers)` specifies its arguments and results. On the command line:

    python -m pce_mpi conformance -n 4 package.module:candidate

In pytest, started on any number of ranks:

    @pytest.mark.parametrize("case", cases(candidate), ids=str)
    def test_conforms(case):
        assert_conforms(candidate, case)

A function in torch or JAX becomes a candidate by `adapted`. Importing this package does not start MPI.
"""

from pce_mpi.conformance.candidates.adapters import adapted
from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.candidates.loading import load
from pce_mpi.conformance.candidates.offers import Offer, offer_of, offers
from pce_mpi.conformance.judging.outcomes import Outcome, Verdict
from pce_mpi.conformance.problems.cases import Case, Gradient
from pce_mpi.conformance.problems.tolerances import Tolerance
from pce_mpi.conformance.runs.running import assert_conforms, run_case

__all__ = [
    "Case",
    "Gradient",
    "Offer",
    "Outcome",
    "Tolerance",
    "Verdict",
    "adapted",
    "assert_conforms",
    "cases",
    "load",
    "offer_of",
    "offers",
    "run_case",
]
