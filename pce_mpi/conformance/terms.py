"""The terms in which a candidate's offer and the needs of a case are declared."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

OPTIONS = ("weight", "ignore_index", "label_smoothing", "z_loss", "logit_scale", "softcap")
DTYPES = ("float32", "float64", "bfloat16", "float16")
# Further options, of candidates of one kind.
MORE_OPTIONS = ("temperature", "support", "bias")
REDUCTIONS = ("mean", "sum", "none")
AVERAGED = ("data", "context", "micro-batches")

Shards = Literal["equal", "array_split", "chunks", "any"]
Arrays = Literal["numpy", "cupy", "torch"]
Smoothing = Literal["all", "others"]
Direction = Literal["forward", "reverse", "jensen-shannon"]
DHidden = Literal["summed", "partial"]
Rest = Literal["dropped", "renormalized", "bucket"]
# The fields of an offer in which candidates of one kind mean different numbers.
CONVENTIONS = ("smoothing", "direction", "temperature_squared", "rest", "dhidden")


class Gradient(StrEnum):
    """The result of a candidate beside the loss: none, the gradient, or a function of the upstream gradient."""

    NONE = "none"
    VALUE = "value"
    BACKWARD = "backward"
