"""The public names of `pce_mpi.testing`."""

from pce_mpi.testing.assertions import (
    assert_close as assert_close,
    assert_same_bits as assert_same_bits,
    assert_same_on_ranks as assert_same_on_ranks,
    assert_ulps as assert_ulps,
)
from pce_mpi.testing.examples import in_step as in_step
from pce_mpi.testing.gradients import check_gradients as check_gradients
from pce_mpi.testing.placing import shards_of as shards_of
from pce_mpi.testing.programs import compare_with_one_process as compare_with_one_process

# Type checkers cannot compute this, and would take it for an empty list.
globals()["__all__"] = sorted(name for name, value in globals().items() if callable(value))
