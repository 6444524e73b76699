"""What came of a case, and of a run of many: plain values that the ranks send each other, files keep and reports show.

Errors are in ulps unless they say otherwise; `judging` says of what.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
import math
import re
from typing import Any

from pce_mpi.conformance.offers import Offer

__all__ = ["Accuracy", "ErrorMap", "Finding", "Outcome", "Report", "Verdict"]


# What `comparing` says of a number that is wrong; `judging` puts it in brackets behind what is known of the cause.
_SEEN = re.compile(
    r"\b((loss|gradient|gradient at targets) is \S+ where \S+ is right|the gradient of row .* is finite where nan is).*"
)
# One, or several in a list.
_NUMBERS = re.compile(r"-?\d[\d.]*(e[+-]?\d+)?((, | and )\d+)*( more)?")


class Verdict(StrEnum):
    """How a case ended."""

    PASS = "pass"
    FAIL = "FAIL"
    NOT_OFFERED = "not offered"
    REFUSED = "refused"
    CRASHED = "crashed"
    DEADLOCKED = "deadlocked"

    @property
    def failed(self) -> bool:
        """Whether the candidate did not do what it was due to do."""
        return self not in (Verdict.PASS, Verdict.NOT_OFFERED)


@dataclass
class Accuracy:
    """The worst error of one quantity of one case.

    quantity   "loss", "gradient" or "gradient at targets"
    dtype      that of the ulps
    error      of the candidate; infinite where it is nan, infinite or finite and should not be
    best       of the exact value, rounded to the candidate's dtype, at the worst place for it
    allowed    what passes
    where      the place of `error`: "row 3, class 17 (rank 2)"
    """

    quantity: str
    dtype: str
    error: float
    best: float
    allowed: float
    where: str


@dataclass
class Finding:
    """One thing that is wrong: a short `kind`, always the same for the same fault, and one line in words."""

    kind: str
    text: str

    @property
    def cause(self) -> str:
        """What is wrong without the numbers that were seen; "" where nothing but these is known."""
        return _SEEN.sub("", self.text).removesuffix(" (").removesuffix(":").strip()

    @property
    def likeness(self) -> str:
        """`cause` with # for every number: the same for the same fault at another shape."""
        return _NUMBERS.sub("#", self.cause)


@dataclass
class ErrorMap:
    """Where in (row, class) the gradient errs.

    errors    in units of what is allowed, so that more than 1 fails; at most 48 x 192, each the worst of a block of
              rows and classes
    splits    where the shards begin and end, in columns of `errors`
    rows, classes   of the problem
    targets   (row, column) of `errors` that hold a target
    """

    errors: list[list[float]]
    splits: list[float]
    rows: int
    classes: int
    targets: list[tuple[int, int]]


@dataclass
class Outcome:
    """What came of one case.

    `note` says what is worth saying where nothing failed: how a call was refused that was to be, or what a case needs
    that is not offered. `costs` is of the case "cost" alone: what "candidate" took and what "ours", this package's own,
    took for the same problem, each as `seconds`, `peak bytes`, `collectives` and `bytes`, None where it cannot be
    known. `rerun` is the command that runs this case alone.
    """

    case: str
    catches: str
    verdict: Verdict
    findings: list[Finding] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
    rows: int = 0
    classes: int = 0
    ranks: int = 0
    splits: tuple[int, ...] = ()
    dtype: str = ""
    seconds: float = 0.0
    picture: ErrorMap | None = None
    costs: dict[str, dict[str, float | None]] | None = None
    rerun: str = ""
    shrunk: bool = False
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether the candidate did not do what it was due to do."""
        return self.verdict.failed

    @property
    def family(self) -> str:
        """The part of the case's name that cases of one kind share."""
        return self.case.partition("/")[0]

    def to_json(self) -> dict[str, Any]:
        """As what JSON knows; numbers that are not finite become "inf", "-inf" and "nan"."""
        return _plain(asdict(self))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        """The outcome that `to_json` made `value` of."""
        given = dict(value)
        given["verdict"] = Verdict(given["verdict"])
        given["findings"] = [Finding(**each) for each in given["findings"]]
        given["accuracies"] = [
            Accuracy(**each | {name: float(each[name]) for name in ("error", "best", "allowed")})
            for each in given["accuracies"]
        ]
        given["splits"] = tuple(given["splits"])
        if given["picture"] is not None:
            picture = ErrorMap(**given["picture"])
            picture.errors = [[float(error) for error in row] for row in picture.errors]
            picture.targets = [(row, column) for row, column in picture.targets]
            given["picture"] = picture
        return cls(**given)


@dataclass
class Report:
    """A run: the candidate by name, what it offers, on how many ranks and by which versions, and what came of it.

    `tolerance` is the factor by which what is allowed was multiplied. `interrupted`: by the user, so that cases may be
    missing.
    """

    candidate: str
    offer: Offer
    ranks: int
    versions: dict[str, str]
    seed: int
    strict: bool
    tolerance: float
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failed(self) -> list[Outcome]:
        """The outcomes that failed."""
        return [outcome for outcome in self.outcomes if outcome.failed]

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many cases ended in each of the verdicts."""
        met = Counter(outcome.verdict for outcome in self.outcomes)
        return {verdict: met[verdict] for verdict in Verdict}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
