"""Operations on distributed arrays; importing this gives `DistArray` its operators and methods."""

from __future__ import annotations

from typing import Any

from pce_mpi.dist_array import DistArray
from pce_mpi.ops.broadcasting import expand, sum
from pce_mpi.ops.elementwise import (
    add,
    astype,
    divide,
    equal,
    exp,
    gelu,
    log,
    maximum,
    multiply,
    negative,
    power,
    relu,
    sigmoid,
    sqrt,
    square,
    subtract,
    tanh,
    where,
)
from pce_mpi.ops.embedding import embedding
from pce_mpi.ops.fallback import op
from pce_mpi.ops.gradient import backward_from
from pce_mpi.ops.inference import Inference, infer_placements
from pce_mpi.ops.loss import cross_entropy, mse
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.normalization import layer_norm, rms_norm
from pce_mpi.ops.numpy_protocol import call_function, call_ufunc
from pce_mpi.ops.op import Sent
from pce_mpi.ops.redistribution import redistribute
from pce_mpi.ops.reductions import logsumexp, max, mean, min
from pce_mpi.ops.rules import Rule
from pce_mpi.ops.shape import concatenate, cut, reshape, split, swapaxes, transpose
from pce_mpi.ops.softmax import log_softmax, softmax

__all__ = [
    "Inference",
    "Rule",
    "Sent",
    "add",
    "astype",
    "concatenate",
    "cross_entropy",
    "divide",
    "embedding",
    "equal",
    "exp",
    "expand",
    "gelu",
    "infer_placements",
    "layer_norm",
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

# What NumPy calls by the same name and means the same by.
_NUMPY = {
    function.__name__: function
    for function in (
        *(add, divide, equal, exp, log, matmul, maximum, multiply, negative, power, sqrt, square, subtract, tanh),
        *(concatenate, expand, max, mean, min, reshape, split, sum, swapaxes, transpose, where),
    )
} | {
    "broadcast_to": expand,
    "amax": max,
    "amin": min,
    "ndim": lambda a: a.ndim,
    "shape": lambda a: a.shape,
    "size": lambda a, axis=None: a.size if axis is None else a.shape[axis],
}


def _attach() -> None:
    def reflected(operation: Any) -> Any:
        return lambda self, other: operation(other, self)

    for name, operation in (
        ("add", add),
        ("sub", subtract),
        ("mul", multiply),
        ("truediv", divide),
        ("pow", power),
        ("matmul", matmul),
    ):
        setattr(DistArray, f"__{name}__", lambda self, other, operation=operation: operation(self, other))
        setattr(DistArray, f"__r{name}__", reflected(operation))
    methods: dict[str, Any] = {
        "__neg__": negative,
        "__getitem__": cut,
        "__array_ufunc__": lambda self, ufunc, method, *operands, **options: call_ufunc(
            _NUMPY, ufunc, method, operands, options
        ),
        "__array_function__": lambda self, function, types, positional, named: call_function(
            _NUMPY, function, positional, named
        ),
        "T": property(transpose),
        "astype": astype,
        "backward": lambda self: backward_from(self, add),
        "max": max,
        "mean": mean,
        "min": min,
        "redistribute": redistribute,
        "reshape": lambda self, *shape: reshape(self, shape[0] if len(shape) == 1 else shape),
        "sum": sum,
        "swapaxes": swapaxes,
        "transpose": lambda self, *axes: transpose(self, axes[0] if len(axes) == 1 else axes or None),
    }
    for name, method in methods.items():
        setattr(DistArray, name, method)


_attach()
