"""Operations on distributed arrays; importing this package registers those that the methods of `DistArray` call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pce_mpi.autograd.gradients import backward_from
from pce_mpi.autograd.inference import Inference, Sent, infer_placements
from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.array import OPERATIONS
from pce_mpi.ops.arithmetic import add, comparison, divide, equal, maximum, multiply, power, subtract, where
from pce_mpi.ops.broadcasting import broadcast_to, sum
from pce_mpi.ops.custom import op
from pce_mpi.ops.elementwise import astype, exp, gelu, log, negative, relu, sigmoid, sqrt, square, tanh
from pce_mpi.ops.embedding import embedding
from pce_mpi.ops.indexing import concatenate, getitem, split
from pce_mpi.ops.linear_loss import linear_cross_entropy
from pce_mpi.ops.loss import cross_entropy, mse
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.normalization import layer_norm, rms_norm
from pce_mpi.ops.numpy_protocol import call_function, call_ufunc
from pce_mpi.ops.redistribution import redistribute
from pce_mpi.ops.reductions import logsumexp, max, mean, min
from pce_mpi.ops.shape import reshape, swapaxes, transpose
from pce_mpi.ops.softmax import log_softmax, softmax

__all__ = [
    "Inference",
    "Rule",
    "Sent",
    "add",
    "astype",
    "broadcast_to",
    "concatenate",
    "cross_entropy",
    "divide",
    "embedding",
    "equal",
    "exp",
    "gelu",
    "getitem",
    "infer_placements",
    "layer_norm",
    "linear_cross_entropy",
    "log",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "mse",
    "multiply",
    "negative",
    "op",
    "power",
    "relu",
    "reshape",
    "rms_norm",
    "sigmoid",
    "softmax",
    "split",
    "sqrt",
    "square",
    "subtract",
    "sum",
    "swapaxes",
    "tanh",
    "transpose",
    "where",
]

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(add, astype, broadcast_to, concatenate, cross_entropy, divide, embedding, equal, exp, gelu, getitem, layer_norm),
    linear_cross_entropy,
    *(log, log_softmax, logsumexp, matmul, max, maximum, mean, min, mse, multiply, negative, power, relu, reshape),
    *(rms_norm, sigmoid, softmax, split, sqrt, square, subtract, sum, swapaxes, tanh, transpose, where),
    *map(comparison, ("greater", "greater_equal", "less", "less_equal", "not_equal")),
)
OPERATIONS |= {function.__name__: function for function in _FUNCTIONS}
OPERATIONS["slice"] = getitem  # its name in the trace

# NumPy's functions with the same meaning, by name.
_NUMPY = {name: function for name, function in OPERATIONS.items() if hasattr(np, name)} | {
    "broadcast_to": broadcast_to,
    "amax": max,
    "amin": min,
    "ndim": lambda a: a.ndim,
    "shape": lambda a: a.shape,
    "size": lambda a, axis=None: a.size if axis is None else a.shape[axis],
}

# For methods of `DistArray` that are not functions of the package.
OPERATIONS |= {
    "_backward": partial(backward_from, add=add),
    "_redistribute": redistribute,
    "_ufunc": partial(call_ufunc, _NUMPY),
    "_function": partial(call_function, _NUMPY),
}
