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

from pce_mpi.conformance.adapters import adapted
from pce_mpi.conformance.cases import Case
from pce_mpi.conformance.catalogue import cases
from pce_mpi.conformance.loading import load
from pce_mpi.conformance.offers import Offer, offer_of, offers
from pce_mpi.conformance.outcomes import Outcome, Verdict
from pce_mpi.conformance.running import assert_conforms, run_case
from pce_mpi.conformance.terms import Gradient
from pce_mpi.conformance.units import Tolerance

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
