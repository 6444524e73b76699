"""Operations on distributed arrays; importing this package registers those that the methods of `DistArray` call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pce_mpi.autograd.gradients import backward_from
from pce_mpi.autograd.inference import Inference, infer_placements
from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.array import OPERATIONS
from pce_mpi.ops.activations import gelu, relu, sigmoid, tanh
from pce_mpi.ops.arithmetic import (
    add,
    bitwise_and,
    bitwise_or,
    divide,
    floor_divide,
    invert,
    multiply,
    power,
    remainder,
    subtract,
)
from pce_mpi.ops.attention import scaled_dot_product_attention
from pce_mpi.ops.broadcasting import broadcast_to, sum
from pce_mpi.ops.cumulative import cumsum
from pce_mpi.ops.custom import op
from pce_mpi.ops.einsum import einsum
from pce_mpi.ops.elementwise import abs, astype, cos, exp, log, log1p, negative, sin, sqrt, square
from pce_mpi.ops.embedding import embedding
from pce_mpi.ops.indexing import getitem
from pce_mpi.ops.joining import concatenate, split, stack
from pce_mpi.ops.largest import argmax, top_k
from pce_mpi.ops.linear_loss import linear_cross_entropy
from pce_mpi.ops.loss import cross_entropy, mse
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.normalization import layer_norm, rms_norm
from pce_mpi.ops.numpy_protocol import call_function, call_ufunc
from pce_mpi.ops.redistribution import redistribute
from pce_mpi.ops.reductions import logsumexp, max, mean, min
from pce_mpi.ops.selection import clip, comparison, equal, maximum, minimum, where
from pce_mpi.ops.shape import expand_dims, reshape, squeeze, swapaxes, transpose
from pce_mpi.ops.softmax import log_softmax, softmax
from pce_mpi.ops.statistics import class_statistics
from pce_mpi.ops.variance import std, var

__all__ = [
    "Inference",
    "Rule",
    "abs",
    "add",
    "argmax",
    "astype",
    "bitwise_and",
    "bitwise_or",
    "broadcast_to",
    "class_statistics",
    "clip",
    "concatenate",
    "cos",
    "cross_entropy",
    "cumsum",
    "divide",
    "einsum",
    "embedding",
    "equal",
    "exp",
    "expand_dims",
    "floor_divide",
    "gelu",
    "getitem",
    "infer_placements",
    "invert",
    "layer_norm",
    "linear_cross_entropy",
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
    "negative",
    "op",
    "power",
    "relu",
    "remainder",
    "reshape",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "sin",
    "softmax",
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
    "transpose",
    "var",
    "where",
]

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(abs, add, argmax, astype, bitwise_and, bitwise_or, broadcast_to, class_statistics, clip, concatenate, cos),
    *(cross_entropy, cumsum, divide, embedding, equal, exp, expand_dims, floor_divide, gelu, getitem, invert),
    *(layer_norm, linear_cross_entropy, log, log1p, log_softmax, logsumexp, matmul, max, maximum, mean, min, minimum),
    *(mse, multiply, negative, power, relu, remainder, reshape, rms_norm, scaled_dot_product_attention, sigmoid, sin),
    *(softmax, split, sqrt, square, squeeze, stack, std, subtract, sum, swapaxes, tanh, top_k, transpose, var, where),
    *map(comparison, ("greater", "greater_equal", "less", "less_equal", "not_equal")),
)
OPERATIONS |= {function.__name__: function for function in _FUNCTIONS}
OPERATIONS["slice"] = getitem  # its name in the trace
OPERATIONS["einsum"] = lambda *operands, subscripts: einsum(subscripts, *operands)  # operands come first

# NumPy's functions with the same meaning, by name.
_NUMPY = {name: function for name, function in OPERATIONS.items() if hasattr(np, name)} | {
    "broadcast_to": broadcast_to,
    "einsum": einsum,
    "argmax": lambda a, axis=None: argmax(reshape(a, -1)) if axis is None else argmax(a, axis=axis),
    "absolute": abs,
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
