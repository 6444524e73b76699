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

from pce_mpi.conformance.candidates.catalogue import cases as cases
from pce_mpi.conformance.candidates.loading import adapted as adapted, load as load
from pce_mpi.conformance.candidates.offers import Offer as Offer, offer_of as offer_of, offers as offers
from pce_mpi.conformance.judging.comparing import Tolerance as Tolerance
from pce_mpi.conformance.judging.outcomes import Outcome as Outcome, Verdict as Verdict
from pce_mpi.conformance.problems.cases import Case as Case, Gradient as Gradient
from pce_mpi.conformance.runs.running import assert_conforms as assert_conforms, run_case as run_case

# Type checkers cannot compute this, and would take it for an empty list.
globals()["__all__"] = sorted(name for name, value in globals().items() if callable(value))
