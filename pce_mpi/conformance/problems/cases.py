"""Cases, each declared by the function that builds its problem, whose docstring says what fault the case catches."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
import inspect
from typing import Any, Literal, TypeVar

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.problems.problem import Kind, Problem
from pce_mpi.loss.options import ROWS

OPTIONS = tuple(name for name, row in ROWS.items() if "catches" in row)
DTYPES = ("float32", "float64", "bfloat16", "float16")
REDUCTIONS = ("mean", "sum", "none")

Shards = Literal["equal", "array_split", "chunks", "any"]
# The fields of an offer in which candidates of one kind mean different numbers.
CONVENTIONS = (
    *("smoothing", "direction", "beta", "temperature_squared", "rest", "dhidden"),
    *("computes", "partial", "ties"),
)


class Gradient(StrEnum):
    """The result of a candidate beside the loss: none, the gradient, or a function of the upstream gradient."""

    NONE = "none"
    VALUE = "value"
    BACKWARD = "backward"


class About(StrEnum):
    """The subject of a case, and so the harm of a failure, the greatest first."""

    NUMBERS = "numbers"
    SPECIAL = "special values"
    CONTRACT = "contracts"


class Expects(StrEnum):
    """The expected result: the right answer; an exception on every rank; or either, but never a wrong answer."""

    ANSWER = "an answer"
    REFUSAL = "a refusal"
    EITHER = "an answer or a refusal"


def has_dtype(dtype: str) -> bool:
    """Return False for bfloat16 without ml_dtypes."""
    try:
        dtype_named(dtype)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Setting:
    """The arguments of `Case.build`: `rows` and `classes` are wishes, the rest is what is offered."""

    ranks: int
    rows: int
    classes: int
    dtype: str
    reduction: str
    seed: int
    shards: Shards
    kind: Kind
    ignore_index: int = -100
    normalized: bool = False
    any_rows: bool = True
    averaged: tuple[str, ...] = ()


def fits(name: str, pattern: str) -> bool:
    """Return True if a case of this name has the pattern for its name or family, or fits it as a shell pattern."""
    return pattern in (name, name.partition("/")[0]) or fnmatchcase(name, pattern)


def grid(ranks: int) -> tuple[int, int]:
    """Return how many parts of the rows, and of the classes, a grid of so many ranks has."""
    return (2, ranks // 2) if ranks % 2 == 0 else (ranks, 1)


@dataclass(frozen=True)
class Needs:
    """The demands of a case on a candidate, in the fields of `Offer`.

    `reductions`: any of them will do, and the first that is offered is used. `shards`: how uneven
    they have to be.
    """

    options: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ("mean", "none", "sum")
    probabilities: bool = False
    dims: int = 2
    any_axis: bool = False
    shards: Shards = "equal"
    gradient: Gradient = Gradient.NONE
    strided: bool = False
    keeps_logits: bool = False
    deterministic: bool = False
    empty: bool = False
    any_ignore_index: bool = False
    unnormalized: bool = False
    checks_targets: bool = False
    num_classes: bool = False
    targets: bool = False
    several_targets: bool = False
    batch_comm: bool = False
    same_bits: bool = False
    backward_twice: bool = False


@dataclass(frozen=True)
class Case:
    """One call, or sequence of calls, that a candidate is judged by.

    Parameters
    ----------
    name : str
        Unique, without spaces: "family" or "family/which".
    catches : str
        The fault that it finds, and the software in which that was seen.
    dtype : str
        The dtype of the logits.
    build : callable
        Builds the `Problem` for a `Setting`; the split points are within what `Setting.shards` allows.
    needs : Needs
        What a candidate has to offer.
    expects : Expects
        The expected result.
    procedure : str
        A name in `procedures.PROCEDURES`: how the candidate is called.
    rows, classes : int
        The usual size.
    resizable : bool
        The case makes sense at other sizes too.
    form : bool
        The case is about shapes and dtypes of the results; other cases do not look at them.
    special : bool
        The logits have infinities, nan or large numbers.
    """

    name: str
    catches: str
    dtype: str
    build: Callable[[Setting], Problem]
    needs: Needs = field(default_factory=Needs)
    expects: Expects = Expects.ANSWER
    procedure: str = "plain"
    rows: int = 6
    classes: int = 24
    resizable: bool = True
    form: bool = False
    special: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def family(self) -> str:
        """The part of the name that cases of one kind share."""
        return self.name.partition("/")[0]

    @property
    def of_bits(self) -> bool:
        """True if the case is about differing bits, whatever the numbers are: other cases judge these."""
        return self.needs.deterministic or self.needs.same_bits or self.name == "same-on-every-rank"

    @property
    def about(self) -> About:
        """Its subject: numbers, gradients, bits, ..."""
        needs, usual = (
            self.needs,
            self.procedure not in ("backward-twice", "two-at-once", "one-after-the-other", "run-twice"),
        )
        asked = self.of_bits or self.form or needs.keeps_logits or needs.strided or needs.empty
        if asked or not usual or self.expects is not Expects.ANSWER:
            return About.CONTRACT
        return About.SPECIAL if self.special else About.NUMBERS

    @property
    def compares_bits(self) -> bool:
        """True if results with `same_bits` are compared with those on one rank.

        Not so for targets that are no class, for logits that were gathered by mistake, for copies of rows, which take
        all memory, and for steps and placements, which have no classes.
        """
        judged = self.expects is not Expects.REFUSAL and not self.needs.num_classes
        return judged and self.procedure not in ("copies", "step", "placement")


_Build = TypeVar("_Build", bound=Callable[..., Problem])
_NEEDS, _OWN = ({field.name for field in fields(kind)} for kind in (Needs, Case))


def table(words: str, *rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return a variation for each of these rows."""
    return [dict(zip(words.split(), row, strict=True)) for row in rows]


EACH_REDUCTION = table("reductions", *(((each,),) for each in REDUCTIONS))


class Cases:
    """The cases of one file, in their order; one for each dtype where the name has "{dtype}".

    `usual` are fields of each case that does not say otherwise.
    """

    def __init__(self, **usual: Any) -> None:
        self._usual = usual
        self._declared: list[Case] = []

    def case(self, name: str, each: Iterable[dict[str, Any]] = ({},), **given: Any) -> Callable[[_Build], _Build]:
        """Declare a case with these fields of `Case` and `Needs`, and the decorated function; one for `each` variation.

        The items of a variation are words in the name and in the docstring, arguments of the function, and fields.
        """

        def declare(build: _Build) -> _Build:
            takes = inspect.signature(build).parameters.keys()
            for variation in each:
                arguments = {word: variation[word] for word in takes & variation.keys()}
                values = {"catches": inspect.getdoc(build) or "", "dtype": ""} | self._usual | given | variation
                needs = Needs(**{key: values[key] for key in _NEEDS & values.keys()})
                own = {key: values[key] for key in _OWN & values.keys()}
                own["catches"] = " ".join(own["catches"].format(**variation).split())
                own["name"] = name.format(**{"dtype": "{dtype}"} | variation)
                self._declared.append(Case(build=partial(build, **arguments), needs=needs, **own))
            return build

        return declare

    def of(self, main: str) -> Iterator[Case]:
        """Yield every case, in the dtype `main` where its name has none."""
        for case in self._declared:
            for dtype in DTYPES if "{dtype}" in case.name else (case.dtype or main,):
                yield replace(case, name=case.name.format(dtype=dtype, main=main), dtype=dtype)
