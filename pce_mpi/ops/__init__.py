"""Operations on distributed arrays; importing this gives `DistArray` its operators and methods."""

from __future__ import annotations

from typing import Any

from pce_mpi.autograd.gradients import backward_from
from pce_mpi.autograd.inference import OPERATIONS, Inference, Sent, infer_placements
from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.broadcasting import expand, sum
from pce_mpi.ops.custom import op
from pce_mpi.ops.elementwise import (
    add,
    astype,
    comparison,
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
from pce_mpi.ops.loss import cross_entropy, mse
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.normalization import layer_norm, rms_norm
from pce_mpi.ops.numpy_protocol import call_function, call_ufunc
from pce_mpi.ops.redistribution import redistribute
from pce_mpi.ops.reductions import logsumexp, max, mean, min
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
    "cut",
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

OPERATIONS |= {
    function.__name__: function
    for function in (
        *(add, astype, concatenate, cross_entropy, cut, divide, embedding, equal, exp, expand, gelu, layer_norm, log),
        *(log_softmax, logsumexp, matmul, max, maximum, mean, min, mse, multiply, negative, power, relu, reshape),
        *(rms_norm, sigmoid, softmax, split, sqrt, square, subtract, sum, swapaxes, tanh, transpose, where),
    )
}
OPERATIONS["slice"] = cut  # the trace's name for it

_COMPARISONS = {name: comparison(name) for name in ("less", "less_equal", "greater", "greater_equal", "not_equal")}

# What NumPy calls by the same name and means the same by.
_NUMPY = {
    **_COMPARISONS,
    **{
        function.__name__: function
        for function in (
            *(add, divide, equal, exp, log, matmul, maximum, multiply, negative, power, sqrt, square, subtract, tanh),
            *(concatenate, expand, max, mean, min, reshape, split, sum, swapaxes, transpose, where),
        )
    },
    "broadcast_to": expand,
    "amax": max,
    "amin": min,
    "ndim": lambda a: a.ndim,
    "shape": lambda a: a.shape,
    "size": lambda a, axis=None: a.size if axis is None else a.shape[axis],
}


def _backward(self: DistArray) -> None:
    """Add the gradient of this scalar to `grad` of every array that it was computed from and that requires one.

    Frees the tape behind it: a second backward pass takes a new forward pass. Gradients of several passes add up until
    they are set to None (`SGD.zero_grad`). Collective wherever the operations that are gone through backward are.

    Raises `ValueError` for what is no scalar, `RuntimeError` where nothing requires a gradient or the tape was freed.
    """
    backward_from(self, add)


def _reshape(self: DistArray, *shape: Any) -> DistArray:
    """`reshape(x, shape)`; the lengths may also be given one by one."""
    return reshape(self, shape[0] if len(shape) == 1 else shape)


def _transpose(self: DistArray, *axes: Any) -> DistArray:
    """`transpose(x, axes)`; the axes may also be given one by one."""
    return transpose(self, axes[0] if len(axes) == 1 else axes or None)


def _call_ufunc(self: DistArray, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
    return call_ufunc(_NUMPY, ufunc, method, operands, options)


def _call_function(self: DistArray, function: Any, types: Any, positional: Any, named: Any) -> Any:
    return call_function(_NUMPY, function, positional, named)


def _attach() -> None:
    """Give `DistArray` its operators and methods."""

    def operator(operation: Any) -> Any:
        return lambda self, other: operation(self, other)

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
        setattr(DistArray, f"__{name}__", operator(operation))
        setattr(DistArray, f"__r{name}__", reflected(operation))
    for name, numpys in (("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")):
        setattr(DistArray, f"__{name}__", operator(_COMPARISONS[numpys]))
    methods: dict[str, Any] = {
        "__array_function__": _call_function,
        "__array_ufunc__": _call_ufunc,
        "__eq__": operator(equal),
        "__getitem__": cut,
        "__hash__": object.__hash__,
        "__ne__": operator(_COMPARISONS["not_equal"]),
        "__neg__": negative,
        "T": property(transpose),
        "astype": astype,
        "backward": _backward,
        "max": max,
        "mean": mean,
        "min": min,
        "redistribute": redistribute,
        "reshape": _reshape,
        "sum": sum,
        "swapaxes": swapaxes,
        "transpose": _transpose,
    }
    for name, method in methods.items():
        setattr(DistArray, name, method)
    for name in ("backward", "reshape", "transpose"):
        methods[name].__name__ = name


_attach()
