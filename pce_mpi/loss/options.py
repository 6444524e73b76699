"""The options of the losses: their names, types, defaults and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
import inspect
import math
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.comm.torch_group import groups_wrapped
from pce_mpi.kernels.elementary import DOUBLE, SINGLE, Precision
from pce_mpi.kernels.parameters import NO_MARGIN, Transform
from pce_mpi.validation import flag, integer, real

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    Comm: TypeAlias = MPI.Intracomm | ProcessGroup

Array = Any  # numpy.ndarray or cupy.ndarray
Function = TypeVar("Function", bound=Callable[..., Any])

_LARGEST = np.iinfo(np.int64).max
_LARGEST_MARGIN = 1000.0
# Words of others for an option, with the option that has the same meaning and the formula of its value.
_OTHER_NAMES = {"temperature": ("logit_scale", "1 / temperature")}


class Reduction(StrEnum):
    """The reduction of the losses of the rows to the loss."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


class Direction(StrEnum):
    """The divergence of a student from a teacher: KL(teacher || student), KL(student || teacher), or between both."""

    FORWARD = "forward"
    REVERSE = "reverse"
    JENSEN_SHANNON = "jensen-shannon"


class TransformOptions(TypedDict, total=False):
    """The rows that count, and the function of the logits that the softmax is taken of."""

    ignore_index: int  # a row with this target counts for nothing and has a zero gradient
    logit_scale: float  # the loss is taken of z = logit_scale x,
    softcap: float | None  # or of z = softcap tanh(logit_scale x / softcap)
    compute_dtype: Any  # float32 or float64: the dtype of the arithmetic and of the loss


class TermOptions(TypedDict, total=False):
    """The terms of a loss."""

    weight: Any  # one weight for each class
    label_smoothing: float  # in [0, 1], over the classes of all shards
    z_loss: float  # adds z_loss logsumexp(z)**2 to each row
    margin: tuple[float, float, float] | None  # z of a target is logit_scale (cos(m1 arccos x + m2) - m3)
    reduction: str  # "none", "sum" or "mean"


class ShardOptions(TypedDict, total=False):
    """The place of a shard among all classes."""

    comm: Comm | None  # the communicator over which the classes are sharded
    class_start: int | None  # the global number of this shard's first class
    num_classes: int | None  # the number of classes of all shards


class BatchOptions(TypedDict, total=False):
    """The place of this rank's rows among all rows."""

    batch_comm: Comm | None  # the communicator over which the rows are sharded


class AxisOptions(TypedDict, total=False):
    """The shape of the logits."""

    axis: int  # the class axis of the logits


class SoftmaxOptions(AxisOptions, TransformOptions, total=False):
    """The options that every function of logits takes."""


class CrossEntropyOptions(SoftmaxOptions, TermOptions, total=False):
    """The options of `cross_entropy` on distributed arrays."""


class SupportOptions(TypedDict, total=False):
    """The classes that the softmax is taken over."""

    support: Any  # (ids, offsets) of the classes of each row
    outside: str  # "raise", "-inf" or "add": the meaning of a target outside its support


class SupportedOptions(SoftmaxOptions, SupportOptions, total=False):
    """The options of `class_statistics` on distributed arrays."""


class StatisticsOptions(SoftmaxOptions, ShardOptions, SupportOptions, total=False):
    """The options of `class_statistics`."""


class ShardedAxisOptions(AxisOptions, ShardOptions, total=False):
    """The options of `top_k` and `argmax`."""


class LossOptions(CrossEntropyOptions, ShardOptions, BatchOptions, total=False):
    """The options of the losses of plain arrays."""


class DivergenceOptions(AxisOptions, total=False):
    """The options of `kl_divergence` on distributed arrays."""

    direction: str  # "forward", "reverse" or "jensen-shannon"
    logit_scale: float  # both softmaxes are taken of logit_scale x
    rows: Any  # the rows that count
    reduction: str  # "none", "sum" or "mean"
    compute_dtype: Any  # float32 or float64: the dtype of the divergence


class ShardedDivergenceOptions(DivergenceOptions, ShardOptions, BatchOptions, total=False):
    """The options of `kl_divergence` on plain arrays."""


class ProductOptions(TypedDict, total=False):
    """The logits as a product."""

    bias: Any  # one number for each class, which is added to `hidden @ w`
    chunk: int | None  # so many rows of logits are held at once
    rounded_gradient: bool  # the gradient of the logits is rounded to halves before it is multiplied


class LinearCrossEntropyOptions(TransformOptions, TermOptions, ProductOptions, total=False):
    """The options of `linear_cross_entropy` on distributed arrays."""


class LinearSoftmaxOptions(TransformOptions, ProductOptions, total=False):
    """The options of `linear_class_statistics` on distributed arrays."""


class LinearStatisticsOptions(TransformOptions, ShardOptions, ProductOptions, total=False):
    """The options of `linear_class_statistics` on plain arrays."""


class LinearOptions(TransformOptions, TermOptions, ShardOptions, BatchOptions, ProductOptions, total=False):
    """The options of the loss of `hidden @ w`, of plain arrays."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call with their defaults.

    `over` and `batch_over` are the names of `comm` and `batch_comm` in the trace and in errors; `found` has the error
    of earlier checks, if one has failed. `support_rows` has the number of rows that `support` has, and the numbers of
    those that are passed; None if these are all.
    """

    operation: str
    axis: int = -1
    ignore_index: int = -100
    logit_scale: float = 1.0
    softcap: float | None = None
    compute_dtype: Any = None
    weight: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    margin: tuple[float, float, float] | None = None
    reduction: str = "mean"
    comm: Any = None
    class_start: int | None = None
    num_classes: int | None = None
    batch_comm: Any = None
    direction: str = "forward"
    rows: Any = None
    bias: Any = None
    chunk: int | None = None
    rounded_gradient: bool = False
    support: Any = None
    outside: str = "raise"
    support_rows: Any = None
    over: str = "comm"
    batch_over: str = "batch_comm"
    found: Sequence[Exception] = ()

    @classmethod
    def of(cls, function: str, given: TransformOptions | AxisOptions, known: type[Any], *own: str) -> Options:
        """Return the options of a call of `function`; `TypeError` for a keyword that the TypedDict `known` lacks.

        `own` are keywords that the function takes by name.
        """
        for name in given:
            if name not in known.__optional_keys__:
                options = ", ".join([*own, *known.__annotations__])
                ours, formula = _OTHER_NAMES.get(name, (None, ""))
                said = f"; {ours} = {formula}" if ours in (*own, *known.__annotations__) else ""
                raise TypeError(
                    f"{function}() got an unexpected keyword argument {name!r}{said}; its options are {options}"
                )
        return cls._of({"operation": function, **(groups_wrapped(given) if "torch" in sys.modules else given)})

    def with_checked(self, values: Mapping[str, Any], weight: Array | None) -> Options:
        """Return these options with checked values."""
        return self._of({**self.__dict__, **values, "weight": weight})

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Options:
        """Make options by hand, with the class's defaults: `__init__` takes as long as the states of a few rows."""
        options = object.__new__(cls)
        options.__dict__.update(given)
        return options


def takes(known: type[Any]) -> Callable[[Function], Function]:
    """Make `help` and `inspect.signature` show the options of the TypedDict `known`, with their defaults."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, name))
            for name in known.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True, eq=False)
class Numbers:
    """The checked values of the options that are no arrays, by name and in the form that kernels take."""

    values: Mapping[str, Any]
    transform: Transform
    precision: Precision


def checked_numbers(options: Options, ndim: int, dtype: np.dtype[Any]) -> Numbers:
    """Return the checked values of the options that are no arrays, cached, as programs repeat few of them."""
    given: dict[str, Any] = {}
    check: Callable[..., Numbers] = _check_numbers
    for name, value in options.__dict__.items():
        if name in _NUMBERS:
            given[name] = value
            # An array of one element may have another value in the next call, and True is not 1 in a tuple.
            known = {*map(type, value)} <= {int, float} if type(value) is tuple else type(value) in _UNCHANGING
            if not known:
                check = _check_numbers.__wrapped__
    return check(ndim, dtype, **given)


_UNCHANGING = {int, float, bool, str, Reduction, type(None), type}
_ALL = (LossOptions, LinearOptions, DivergenceOptions)
_NUMBERS = {name for each in _ALL for name in each.__annotations__} - {"weight", "bias", "rows", "comm", "batch_comm"}


@lru_cache(maxsize=256, typed=True)
def _check_numbers(ndim: int, dtype: np.dtype[Any], **given: Any) -> Numbers:
    options = Options._of(given)
    axis = integer(options.axis, "axis")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis = {axis} is out of bounds for logits of {ndim} dimensions")
    ignore_index = integer(options.ignore_index, "ignore_index")
    label_smoothing = real(options.label_smoothing, "label_smoothing")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    logit_scale = real(options.logit_scale, "logit_scale")
    softcap = None if options.softcap is None else real(options.softcap, "softcap")
    for name, value in (("logit_scale", logit_scale), ("softcap", softcap)):
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    z_loss = real(options.z_loss, "z_loss")
    if not math.isfinite(z_loss):
        raise ValueError(f"z_loss must be finite, got {z_loss}")
    margin = None if options.margin is None else _checked_margin(options.margin)
    if margin is not None and softcap is not None:
        raise ValueError(f"margin and softcap exclude each other, got margin = {margin} and softcap = {softcap}")
    reduction, chunk = options.reduction, options.chunk
    if not isinstance(reduction, str) or reduction not in list(Reduction):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    if not isinstance(options.direction, str) or options.direction not in list(Direction):
        raise ValueError(f"direction must be 'forward', 'reverse' or 'jensen-shannon', got {options.direction!r}")
    for name, least in (("class_start", 0), ("num_classes", 1), ("chunk", 1)):
        count = getattr(options, name)
        if count is not None and not least <= integer(count, name) <= _LARGEST:
            raise ValueError(f"{name} must be at least {least} and fit 64 bits, got {count}")
    values = {
        "compute_dtype": compute_dtype_of(dtype, options.compute_dtype),
        "axis": axis % ndim,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "margin": margin,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "reduction": Reduction(reduction),
        "direction": Direction(options.direction),
        "chunk": None if chunk is None else integer(chunk, "chunk"),
        "rounded_gradient": flag(options.rounded_gradient, "rounded_gradient"),
    }
    precision = DOUBLE if values["compute_dtype"] == np.float64 else SINGLE
    return Numbers(values, Transform(logit_scale, softcap, margin or NO_MARGIN), precision)


def check_scale_is_near(options: Options) -> None:
    """Raise unless products with the scale, and with its inverse, stay far from the limits of float64."""
    if not 2.0**-64 <= options.logit_scale <= 2.0**64:
        raise ValueError(f"logit_scale must be from 2**-64 to 2**64, got {options.logit_scale}")


def _checked_margin(margin: Any) -> tuple[float, float, float]:
    if not isinstance(margin, tuple | list) or len(margin) != 3:
        raise TypeError(f"margin must be three numbers, (m1, m2, m3), as (1, 0.5, 0) for ArcFace, got {margin!r}")
    m1, m2, m3 = (real(value, f"margin[{index}]") for index, value in enumerate(margin))
    for index, value in enumerate((m1, m2, m3)):
        if not abs(value) <= _LARGEST_MARGIN:
            raise ValueError(f"margin[{index}] must be at most {_LARGEST_MARGIN:g} by size, got {value}")
    return m1, m2, m3
