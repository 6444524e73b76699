"""The outcome of a case and the report of a run: plain values for messages between ranks, files and reports.

Errors are in ulps, as `judging` defines them, unless stated otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
import re

from pce_mpi.comm.errors import ranks_text
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.problem import PRODUCTS, Kind, Problem
from pce_mpi.text import bounded, grouped

# The words of `comparing` for a wrong number; `judge` puts them in brackets after a known cause.
_RESULT = "|".join(kind.noun for kind in KINDS.values())
_SEEN = re.compile(
    rf"\b(({_RESULT}|gradient|gradient at targets|{'|'.join(PRODUCTS)}) is \S+ where \S+ is right"
    r"|the gradient of row .* is finite where nan is"
    r"|(?<=differ from one rank's \()\w"
    rf"|the ({_RESULT}) (in row .* )?(is|has dtype) \S+ on rank \d+ and).*"
)
# The names that procedures give to several answers are no cause.
_WHICH = re.compile(
    "(target [1-3] of 3|(first|second) (of two losses|backward pass)|the (least|greatest) of all copies): "
)
# The characters of a finding that a report has: most are a candidate's own.
_MOST_TEXT = 20_000
# So many cases have a divisor in common by no accident: two of them have the same tokens.
_SEVERAL = 3
# A number, or a list of several. A constant is the same in every case.
_NUMBERS = re.compile(r"(?<!the constant )(?<![\d.])-?\d[\d.]*(e[+-]?\d+)?((, | and )\d+)*( more)?")


class Verdict(StrEnum):
    """The end of a case."""

    PASS = "pass"
    FAIL = "FAIL"
    NOT_OFFERED = "not offered"
    REFUSED = "refused"
    CRASHED = "crashed"
    DEADLOCKED = "deadlocked"
    SLOW = "slow"
    KNOWN = "known"
    NOT_RUN = "not run"

    @property
    def failed(self) -> bool:
        """True unless the case passed, is not offered, is known to fail, or was not run as others had failed."""
        return self not in (Verdict.PASS, Verdict.NOT_OFFERED, Verdict.KNOWN, Verdict.NOT_RUN)

    @property
    def unended(self) -> bool:
        """True if the case did not end by itself: its findings after the first are what was printed."""
        return self in (Verdict.CRASHED, Verdict.DEADLOCKED, Verdict.SLOW)


@dataclass
class Accuracy:
    """The worst error of one quantity of one case.

    quantity  "loss" (or "log-probability", "entropy"), "gradient", "gradient at targets", "dhidden", "dw" or "dbias"
    dtype     the dtype of the ulps
    error     the error of the candidate; infinite if it is nan, infinite or finite and should not be
    best      the largest error of the exact values, rounded to the candidate's dtype
    allowed   the largest error that passes
    where     the place of `error`: "row 3, class 17 (rank 2)"
    plain     where logits are products, the largest error that plain ones give, in the dtype of the arithmetic
    """

    quantity: str
    dtype: str
    error: float
    best: float
    allowed: float
    where: str
    plain: float | None = None


@dataclass
class Fault:
    """A fault of an answer by its causes: each of them gives the numbers that were seen.

    causes  the closest first; the choice among them is that of `agree`
    alike   so many of the first are told, as they give equal numbers; 0: none is told by this case alone
    form    the sentence, with "{}" for the cause
    place   the sentence where no cause is told
    shared  causes that fit any one case, and are told where several cases have the same
    """

    causes: list[str]
    alike: int = 1
    form: str = "{}"
    place: str = ""
    shared: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        """The words of the finding."""
        return self.form.replace("{}", ", or ".join(self.causes[: self.alike])) if self.alike else self.place

    def of(self, kind: Kind) -> Fault:
        """Return the fault in the words of a kind of candidates."""
        *causes, form, place = map(kind.worded, (*self.causes, self.form, self.place))
        return Fault(causes, self.alike, form, place, self.shared)


@dataclass
class Finding:
    """One fault of an answer.

    kind    A few words, always the same for the same fault
    text    one line that describes it, or what a process printed; bounded
    faults  what explains wrong numbers: one fault, or one of the loss and one of the gradient
    """

    kind: str
    text: str
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = bounded(self.text, _MOST_TEXT)

    @property
    def cause(self) -> str:
        """The text without the numbers that were seen; "" if only these are known."""
        cause = _SEEN.sub("", self.text).rstrip(" (:")
        return "" if _WHICH.fullmatch(f"{cause}: ") else cause

    @property
    def likeness(self) -> str:
        """The cause with "#" for every number."""
        return likeness(_WHICH.sub("", self.cause))


def likeness(cause: str) -> str:
    """Return the cause with "#" for every number: the same for the same fault at another shape."""
    return _NUMBERS.sub("#", cause)


def together(findings: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return each finding of the ranks once, with those that found it if they are not all."""
    ranks = grouped(((finding.kind, finding.text), rank) for rank, each in enumerate(findings) for finding in each)
    return [
        Finding(kind, text if len(who) == len(findings) else f"{text} ({ranks_text(who)})")
        for (kind, text), who in ranks.items()
    ]


@dataclass
class ErrorMap:
    """The errors of a gradient by row and class.

    errors         errors in units of what is allowed, so that more than 1 or less than -1 fails; negative where the
                   gradient is too small. At most 48 x 192, each the worst of a block of rows and classes
    splits         the split points of the shards, in columns of `errors`
    rows, classes  the size of the problem
    targets        (row, column) of the `errors` with a target
    """

    errors: list[list[float]]
    splits: list[float]
    rows: int
    classes: int
    targets: list[tuple[int, int]]


@dataclass
class Outcome:
    """The result of one case.

    Parameters
    ----------
    case, catches : str
        The name of the case, and the fault that it finds.
    verdict : Verdict
        How it ended.
    findings : list of Finding
        The faults that were found.
    accuracies : list of Accuracy
        The worst error of each quantity.
    rows, classes, ranks : int
        The size of the problem.
    splits : tuple of int
        The split points of the shards; empty if they are not known.
    dtype : str
        The dtype of the logits.
    seconds : float
        The time that the candidate took.
    picture : ErrorMap, optional
        The errors of a wrong gradient.
    rerun : str
        The command that runs this case alone.
    note : str
        Why a case is not offered or was not run, or how a call was refused that had to be.
    about : str
        "numbers", "special values" or "contracts": the subject of the case.
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
    rerun: str = ""
    note: str = ""
    about: str = "numbers"

    @property
    def failed(self) -> bool:
        """As of its verdict."""
        return self.verdict.failed

    @property
    def fault(self) -> str:
        """The cause of the first finding, without the name of the case; "" if there is none."""
        cause = self.findings[0].cause if self.findings else ""
        return cause.removeprefix(f"{self.verdict} in case {self.case}: ")

    @property
    def family(self) -> str:
        """The part of the case's name that cases of one kind share."""
        return self.case.partition("/")[0]


def shaped(outcome: Outcome, problem: Problem) -> Outcome:
    """Return the outcome with the shape of its problem."""
    rows = problem.rows * problem.copies
    return replace(outcome, rows=rows, classes=problem.classes, splits=problem.splits)


@dataclass
class Report:
    """The result of a run.

    candidate    the name of the candidate
    offer        what it offers
    ranks        the numbers of ranks; each case has an outcome for each
    versions     versions by the name of the package
    seed         seed of the random numbers
    strict       the judge was strict
    tolerance    the factor on what is allowed
    outcomes     the outcome of each case
    interrupted  the user interrupted the run, so that cases may be missing
    """

    candidate: str
    offer: Offer
    ranks: tuple[int, ...]
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
        """The number of cases by verdict."""
        met = Counter(outcome.verdict for outcome in self.outcomes)
        return {verdict: met[verdict] for verdict in Verdict}


def agree(outcomes: Sequence[Outcome]) -> None:
    """Choose the causes of all failures together, and rewrite the texts of their findings."""
    findings = [finding for outcome in outcomes if outcome.failed for finding in outcome.findings]
    faults = [fault for finding in findings for fault in finding.faults]
    agreed = {
        cause for cause, number in Counter(chain(*(each.shared for each in faults))).items() if number >= _SEVERAL
    }
    for fault in faults:
        fault.causes += [cause for cause in fault.shared if cause in agreed]
    left = [(finding, fault) for finding in findings for fault in finding.faults if fault.causes]
    while any(fault.alike or agreed.intersection(fault.causes) for _, fault in left):
        alike = [dict.fromkeys(map(likeness, fault.causes)) for _, fault in left]
        fitting = grouped((cause, place) for place, causes in enumerate(alike) for cause in causes)
        ranks = {
            cause: (-len(places), sum(_closer(left[place][1], cause) for place in places))
            for cause, places in fitting.items()
            if cause in agreed or any(left[place][1].alike for place in places)
        }
        best = min(ranks, key=lambda cause: ranks[cause])
        equal = [cause for cause, rank in ranks.items() if rank == ranks[best] and fitting[cause] == fitting[best]]
        common = Counter(cause for place in fitting[best] for cause in set(left[place][1].causes))
        for place in fitting[best]:
            _tell(*left[place], equal, common)
        covered = set(fitting[best])
        left = [each for place, each in enumerate(left) if place not in covered]
    for finding in findings:
        _join(finding)


def _closer(fault: Fault, cause: str) -> int:
    """Return how many causes give closer numbers."""
    return max(0, list(map(likeness, fault.causes)).index(cause) + 1 - fault.alike)


def _tell(finding: Finding, fault: Fault, chosen: Sequence[str], common: Counter[str]) -> None:
    """Tell the chosen causes; of those that differ in numbers alone, the ones that most failures have."""
    words = fault.said
    numbers = {name: [each for each in fault.causes if likeness(each) == name] for name in chosen}
    most = {name: max((common[each] for each in causes), default=0) for name, causes in numbers.items()}
    fault.causes = [each for each in fault.causes if common[each] == most.get(likeness(each))]
    fault.alike = len(fault.causes)
    finding.text = finding.text.replace(words, fault.said, 1) if words else f"{fault.said} ({finding.text})"


def _join(finding: Finding) -> None:
    """Tell a fault of loss and gradient once."""
    if len(finding.faults) == 2 and finding.faults[0].alike and finding.faults[0].causes == finding.faults[1].causes:
        words = "; ".join(fault.said for fault in finding.faults)
        finding.faults = [Fault(finding.faults[0].causes, finding.faults[0].alike)]
        finding.text = finding.text.replace(words, finding.faults[0].said, 1)
