"""Softmax cross entropy over a class axis that is sharded across MPI ranks, and distributed arrays with a tape.

The loss of plain arrays. Each rank passes its own classes of the same rows; `softmax_cross_entropy` has the options:

>>> import numpy as np, pce_mpi as pce
>>> loss = pce.softmax_cross_entropy(np.zeros((2, 4)), np.array([0, 3]), comm=None)

Arrays that are distributed over the ranks of a mesh; see `Mesh`, `distribute`, `DistArray`, `cross_entropy` and `SGD`:

>>> from mpi4py import MPI
>>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
>>> w = pce.distribute(np.zeros((3, 4)), mesh, requires_grad=True)
>>> pce.cross_entropy(pce.distribute(np.ones((2, 3)), mesh, data=pce.Shard(0)) @ w, np.array([0, 3])).backward()
>>> w.grad.placements
{'data': Partial('sum')}
"""

from pce_mpi import dense
from pce_mpi.autograd.tape import no_grad
from pce_mpi.comm.communicators import CollectiveError, CollectiveTimeout
from pce_mpi.comm.tracing import Trace, named_scope, trace
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.checkpoint import load, save
from pce_mpi.distributed.creation import distribute, from_local
from pce_mpi.distributed.drawing import normal, uniform
from pce_mpi.distributed.fingerprint import fingerprint
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Partial, Replicate, Shard, shard_range
from pce_mpi.distributed.replicas import check_replicas
from pce_mpi.distributed.styles import Colwise, Replicated, Rowwise, SequenceParallel, VocabParallel, shard_parameters
from pce_mpi.exact.arithmetic import reproducible
from pce_mpi.loss import (
    ClassStatistics,
    LinearValueAndGrad,
    Residuals,
    StatisticsResiduals,
    class_statistics_backward,
    class_statistics_forward,
    linear_cross_entropy_value_and_grad,
    softmax_cross_entropy,
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)
from pce_mpi.ops import (
    Inference,
    Rule,
    abs,
    add,
    argmax,
    broadcast_to,
    class_statistics,
    clip,
    concatenate,
    cos,
    cross_entropy,
    cumsum,
    divide,
    einsum,
    embedding,
    exp,
    expand_dims,
    floor_divide,
    gelu,
    infer_placements,
    layer_norm,
    linear_cross_entropy,
    log,
    log1p,
    log_softmax,
    logsumexp,
    matmul,
    max,
    maximum,
    mean,
    min,
    minimum,
    mse,
    multiply,
    negative,
    op,
    power,
    relu,
    remainder,
    reshape,
    rms_norm,
    scaled_dot_product_attention,
    sigmoid,
    sin,
    softmax,
    split,
    sqrt,
    square,
    squeeze,
    stack,
    std,
    subtract,
    sum,
    swapaxes,
    tanh,
    top_k,
    transpose,
    var,
    where,
)
from pce_mpi.optim.adamw import AdamW
from pce_mpi.optim.clipping import clip_grad_norm
from pce_mpi.optim.schedules import cosine_schedule, linear_schedule
from pce_mpi.optim.sgd import SGD

__version__ = "0.2.0"

__all__ = [
    "SGD",
    "AdamW",
    "ClassStatistics",
    "CollectiveError",
    "CollectiveTimeout",
    "Colwise",
    "DistArray",
    "Inference",
    "LinearValueAndGrad",
    "Mesh",
    "Partial",
    "Replicate",
    "Replicated",
    "Residuals",
    "Rowwise",
    "Rule",
    "SequenceParallel",
    "Shard",
    "StatisticsResiduals",
    "Trace",
    "VocabParallel",
    "abs",
    "add",
    "argmax",
    "broadcast_to",
    "check_replicas",
    "class_statistics",
    "class_statistics_backward",
    "class_statistics_forward",
    "clip",
    "clip_grad_norm",
    "concatenate",
    "cos",
    "cosine_schedule",
    "cross_entropy",
    "cumsum",
    "dense",
    "distribute",
    "divide",
    "einsum",
    "embedding",
    "exp",
    "expand_dims",
    "fingerprint",
    "floor_divide",
    "from_local",
    "gelu",
    "infer_placements",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_value_and_grad",
    "linear_schedule",
    "load",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mse",
    "multiply",
    "named_scope",
    "negative",
    "no_grad",
    "normal",
    "op",
    "power",
    "relu",
    "remainder",
    "reproducible",
    "reshape",
    "rms_norm",
    "save",
    "scaled_dot_product_attention",
    "shard_parameters",
    "shard_range",
    "sigmoid",
    "sin",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "softmax_cross_entropy_forward",
    "softmax_cross_entropy_value_and_grad",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "subtract",
    "sum",
    "swapaxes",
    "tanh",
    "top_k",
    "trace",
    "transpose",
    "uniform",
    "var",
    "where",
]
