"""Operations on distributed arrays. Each file enters its own into `OPERATIONS`, for the methods of `DistArray`."""

from functools import partial

from pce_mpi.autograd.apply import redistribute_on_tape
from pce_mpi.autograd.gradients import backward_from
from pce_mpi.distributed.array import OPERATIONS
from pce_mpi.ops.arithmetic import add
from pce_mpi.ops.custom import call_function, call_ufunc
from pce_mpi.ops.joining import getitem
from pce_mpi.ops.products import einsum

# Those that are called otherwise than they are defined.
OPERATIONS |= {
    "slice": getitem,  # its name in the trace
    "einsum": lambda *operands, subscripts: einsum(subscripts, *operands),  # operands come first
    "_backward": partial(backward_from, add=add),
    "_redistribute": redistribute_on_tape,
    "_ufunc": call_ufunc,
    "_function": call_function,
}
