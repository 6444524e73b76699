"""The options of the losses, in one table: `Options`. The TypedDicts before it say which calls take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
import inspect
import math
import re
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

import numpy as np

from pce_mpi.arrays import Array, compute_dtype_of
from pce_mpi.comm.torch_group import groups_wrapped
from pce_mpi.kernels.interface import DOUBLE, NO_MARGIN, SINGLE, Precision, Transform
from pce_mpi.validation import flag, integer, real

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    Comm: TypeAlias = MPI.Intracomm | ProcessGroup

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

    ignore_index: int
    logit_scale: float
    softcap: float | None
    compute_dtype: Any


class TermOptions(TypedDict, total=False):
    """The terms of a loss."""

    weight: Any
    label_smoothing: float
    z_loss: float
    margin: tuple[float, float, float] | None
    reduction: str


class ShardOptions(TypedDict, total=False):
    """The place of a shard among all classes."""

    comm: Comm | None
    class_start: int | None
    num_classes: int | None


class BatchOptions(TypedDict, total=False):
    """The place of this rank's rows among all rows."""

    batch_comm: Comm | None


class AxisOptions(TypedDict, total=False):
    """The shape of the logits."""

    axis: int


class SoftmaxOptions(AxisOptions, TransformOptions, total=False):
    """The options that every function of logits takes."""


class CrossEntropyOptions(SoftmaxOptions, TermOptions, total=False):
    """The options of `cross_entropy` on distributed arrays."""


class SupportOptions(TypedDict, total=False):
    """The classes that the softmax is taken over."""

    support: Any
    outside: str


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

    direction: str
    beta: float
    logit_scale: float
    rows: Any
    reduction: str
    compute_dtype: Any


class ShardedDivergenceOptions(DivergenceOptions, ShardOptions, BatchOptions, total=False):
    """The options of `kl_divergence` on plain arrays."""


class ProductOptions(TypedDict, total=False):
    """The logits as a product."""

    bias: Any
    chunk: int | None
    rounded_gradient: bool


class LinearCrossEntropyOptions(TransformOptions, TermOptions, ProductOptions, total=False):
    """The options of `linear_cross_entropy` on distributed arrays."""


class LinearSoftmaxOptions(TransformOptions, ProductOptions, total=False):
    """The options of `linear_class_statistics` on distributed arrays."""


class LinearStatisticsOptions(TransformOptions, ShardOptions, ProductOptions, total=False):
    """The options of `linear_class_statistics` on plain arrays."""


class LinearOptions(TransformOptions, TermOptions, ShardOptions, BatchOptions, ProductOptions, total=False):
    """The options of the loss of `hidden @ w`, of plain arrays."""


class Place(dict[str, Any]):
    """Options that a call takes in place of its `comm`, those that no user gives included."""


Check: TypeAlias = Callable[[Any, str], Any]


def _checked(kind: Callable[[Any, str], Any], accepts: Callable[[Any], bool], words: str) -> Check:
    def check(value: Any, name: str) -> Any:
        if not accepts(checked := kind(value, name)):
            raise ValueError(f"{name} must be {words}, got {checked!r}")
        return checked

    return check


def _count(least: int) -> Check:
    return _or_none(_checked(integer, lambda number: least <= number <= _LARGEST, f"at least {least} and fit 64 bits"))


def _one_of(kind: type[StrEnum]) -> Check:
    *others, last = (repr(str(each)) for each in kind)
    words = f"{', '.join(others)} or {last}"
    return _checked(lambda value, name: value, lambda value: isinstance(value, str) and value in list(kind), words)


def _margin(value: Any, name: str) -> tuple[float, ...]:
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise TypeError(f"{name} must be three numbers, (m1, m2, m3), as (1, 0.5, 0) for ArcFace, got {value!r}")
    check = _checked(real, lambda number: abs(number) <= _LARGEST_MARGIN, f"at most {_LARGEST_MARGIN:g} by size")
    return tuple(check(each, f"{name}[{index}]") for index, each in enumerate(value))


def _or_none(check: Check) -> Check:
    return lambda value, name: None if value is None else check(value, name)


def _option(default: Any, check: Check | None = None, **kit: Any) -> Any:
    """Return a row of the table: `check` gives the value that kernels take, the same on every rank, or raises.

    If `catches` says what it catches, the conformance kit has a case with this option alone, of the value `sample`.
    """
    return field(default=default, metadata={"check": check, **kit})


_POSITIVE = _checked(real, lambda number: 0.0 < number < math.inf, "positive and finite")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call: for each its default, check and text, which `help` shows for every call that takes it.

    `over` and `batch_over` are the names of `comm` and `batch_comm` in the trace and in errors; `found` has the error
    of earlier checks, if one has failed. `support_rows` has the number of rows that `support` has, and the numbers of
    those that are passed; None if these are all. With `sums_rows` gradients of `w` and `bias` are sums over them all.

    Attributes
    ----------
    axis : int, default -1
        The class axis of the logits.
    weight : array of real numbers, shape (local classes,), optional
        The weights of this shard's classes.
    ignore_index : int, default -100
        A row with this target counts for nothing and has a zero gradient.
    label_smoothing : float, default 0.0
        In [0, 1], over the classes of all shards.
    z_loss : float, default 0.0
        Adds z_loss logsumexp(z)**2 to each row.
    logit_scale : float, default 1.0
        The loss is taken of z = logit_scale x, x being the logits.
    softcap : float, optional
        The loss is taken of z = softcap tanh(logit_scale x / softcap).
    margin : tuple of three floats, optional
        With (m1, m2, m3), z of the target is logit_scale (cos(m1 arccos x + m2) - m3), for logits that are cosines:
        (m1, 0, 0) is SphereFace, (1, m2, 0) ArcFace, (1, 0, m3) CosFace. Each is at most 1,000 by size. Needs class
        numbers, and no softcap. Unless m1 is 1 and m2 is 0, a target beyond [-1, 1] counts as -1 or 1; its derivative
        there is the limit, or 0 if the limit is infinite.
    reduction : {"mean", "sum", "none"}, default "mean"
        `"mean"` divides the sum over the rows by the sum of w_t over the rows that are not ignored, or by the number of
        rows for probabilities.
    compute_dtype : dtype, optional
        Dtype of the arithmetic and of the loss: float32, or float64 for float64 logits, unless given.
    comm : mpi4py.MPI.Intracomm or torch.distributed.ProcessGroup, optional
        The communicator over which the classes are sharded. Without it the call is one process's and needs no MPI, and
        neither does a process group, whose backend for the CPU, such as gloo, gathers what MPI would reduce. Nor does a
        DTensor, which has this and the like from its mesh and placements.
    class_start : int, optional
        The global number of this shard's first class. Without it the shards follow each other in rank order.
    num_classes : int, optional
        The number of classes of all shards, to be checked. Without it, shards with equal logits are refused: they may
        be gathered logits.
    batch_comm : mpi4py.MPI.Intracomm or torch.distributed.ProcessGroup, optional
        The communicator over which the rows are sharded: `"sum"` and `"mean"` are over the rows of all its ranks.
    bias : array of the dtype of `hidden`, shape (local classes,), optional
        The bias of this shard's classes.
    chunk : int, optional
        The number of rows of logits that are held at once, at least 2 if there are other ranks; the same on every rank.
        The default is 512, or 4,096 on a GPU.
    rounded_gradient : bool, default False
        Round the gradient of the logits of halves to their dtype before it is multiplied. On a GPU that takes three
        products rather than five. Other dtypes are not rounded.
    direction : {"forward", "reverse", "jensen-shannon"}, default "forward"
        The divergence.
    beta : float, default 0.5
        The weight of the teacher in the mean of "jensen-shannon", 0 or from 2**-64 to 1. As in TRL, it is KL(t || s)
        at 0 and KL(s || t) at 1. It is that of Agarwal et al., On-Policy Distillation of Language Models, 2023; TRL
        (GKDTrainer), Liger and ms-swift call it so too. TRL and Liger weight as here, the teacher by beta.
    rows : array of bool, optional
        True for rows that count, shaped as the logits without the class axis; the same on every rank of `comm`. Other
        rows have the divergence 0 and zero gradients, whatever their logits are.
    support : (ids, offsets), optional
        The classes that the softmax is taken over: those of row r, counted in the order of the logits without the class
        axis, are `ids[offsets[r]:offsets[r + 1]]`, global numbers in any order, none twice. Arrays of integers, the
        same on every rank, also on the host beside logits on a GPU.
    outside : {"raise", "-inf", "add"}, default "raise"
        A target outside its support is an error; or has a log-probability of -inf, whose gradient is that of -logsumexp
        of the support; or the support has one class more, the target. Several targets are all added to their row's.
    """

    operation: str
    axis: int = _option(-1, integer)
    weight: Any = _option(  # noqa: RUF009  # it makes a field
        None, catches="Class weights: a rank has those of its own classes, and needs that of the target."
    )
    ignore_index: int = _option(
        -100,
        integer,
        catches="Ignored rows, a third of all: they count neither in the sum nor in the divisor of the mean.",
    )
    label_smoothing: float = _option(
        0.0,
        _checked(real, lambda number: 0.0 <= number <= 1.0, "in [0, 1]"),
        sample=0.125,
        catches="Smoothing that is spread over this rank's classes, or whose sum is not reduced over ranks (Megatron, "
        "TransformerEngine).",
    )
    z_loss: float = _option(
        0.0,
        _checked(real, math.isfinite, "finite"),
        sample=1e-2,
        catches="z_loss * logsumexp**2, logsumexp over all ranks, and its gradient, 2 * z_loss * logsumexp * softmax.",
    )
    logit_scale: float = _option(
        1.0, _POSITIVE, sample=0.75, catches="A scale on the logits: the gradient has it as a factor once more."
    )
    softcap: float | None = _option(
        None,
        _or_none(_POSITIVE),
        sample=5.0,
        catches="A soft cap on the logits: the gradient has the derivative of tanh as a factor.",
    )
    margin: tuple[float, float, float] | None = _option(None, _or_none(_margin))
    reduction: str = _option("mean", _one_of(Reduction))
    compute_dtype: Any = None
    comm: Any = None
    class_start: int | None = _option(None, _count(0))
    num_classes: int | None = _option(None, _count(1))
    batch_comm: Any = None
    direction: str = _option("forward", _one_of(Direction))
    beta: float = _option(
        0.5,
        _checked(real, lambda number: number == 0.0 or 2.0**-64 <= number <= 1.0, "0, or from 2**-64 to 1"),
        sample=0.125,
    )
    rows: Any = None
    bias: Any = None
    chunk: int | None = _option(None, _count(1))
    rounded_gradient: bool = _option(False, flag)
    support: Any = None
    outside: str = "raise"
    support_rows: Any = None
    sums_rows: bool = False
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
                names = ", ".join([*own, *known.__annotations__])
                ours, formula = _OTHER_NAMES.get(name, (None, ""))
                said = f"; {ours} = {formula}" if ours in (*own, *known.__annotations__) else ""
                raise TypeError(
                    f"{function}() got an unexpected keyword argument {name!r}{said}; its options are {names}"
                )
        options = {"operation": function, **given}
        if isinstance(place := options.get("comm"), Place):
            options |= place
        return cls._of(groups_wrapped(options) if "torch" in sys.modules else options)

    def with_checked(self, values: Mapping[str, Any], weight: Array | None) -> Options:
        """Return these options with checked values."""
        return self._of({**self.__dict__, **values, "weight": weight})

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Options:
        """Make options by hand, with the class's defaults: `__init__` takes as long as the states of a few rows."""
        options = object.__new__(cls)
        options.__dict__.update(given)
        return options


ROWS = {each.name: each.metadata for each in fields(Options)}
_CHECKS = {name: row["check"] for name, row in ROWS.items() if row.get("check")}
_NUMBERS = {*_CHECKS, "compute_dtype"}
# An entry of a docstring whose indentation is removed: the names, then the text.
_ENTRY = re.compile(r"^(\w[\w, ]*) : .*\n(?:    .*\n)+", re.MULTILINE)


def _entries(text: str) -> dict[str, str]:
    return {found[1]: found[0] for found in _ENTRY.finditer(text)}


_TEXTS = _entries(inspect.cleandoc(Options.__doc__ or "") + "\n")


def takes(known: type[Any], like: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """Make `help` and `inspect.signature` show the options of the TypedDict `known`, with defaults and meaning.

    An option that the docstring does not describe means the same as for the function `like`, or in `Options`.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, name))
            for name in known.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        begin, title, rest = inspect.cleandoc(function.__doc__ or "").partition("Parameters\n----------\n")
        if title:
            section, _, end = rest.partition("\n\n")
            texts = {**_TEXTS, **_entries(like.__doc__ or "" if like else "")}
            texts |= (own := _entries(section + "\n"))
            names = [*(name for name in own if name not in known.__annotations__), *known.__annotations__]
            function.__doc__ = f"{begin}{title}{''.join(texts[name] for name in names)}\n{end}\n"
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


@lru_cache(maxsize=256, typed=True)
def _check_numbers(ndim: int, dtype: np.dtype[Any], **given: Any) -> Numbers:
    options = Options._of(given)
    values = {name: check(getattr(options, name), name) for name, check in _CHECKS.items()}
    del values["class_start"], values["num_classes"]  # each rank's own
    axis, margin, softcap = values["axis"], values["margin"], values["softcap"]
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis = {axis} is out of bounds for logits of {ndim} dimensions")
    if margin is not None and softcap is not None:
        raise ValueError(f"margin and softcap exclude each other, got margin = {margin} and softcap = {softcap}")
    values |= {"axis": axis % ndim, "compute_dtype": compute_dtype_of(dtype, options.compute_dtype)}
    precision = DOUBLE if values["compute_dtype"] == np.float64 else SINGLE
    return Numbers(values, Transform(values["logit_scale"], softcap, margin or NO_MARGIN), precision)


def check_scale_is_near(options: Options) -> None:
    """Raise unless products with the scale, and with its inverse, stay far from the limits of float64."""
    if not 2.0**-64 <= options.logit_scale <= 2.0**64:
        raise ValueError(f"logit_scale must be from 2**-64 to 2**64, got {options.logit_scale}")
