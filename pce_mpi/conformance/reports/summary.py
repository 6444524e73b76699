"""The words and tables that all reports share; a table is a list of rows, with the head first."""

from collections import Counter
from dataclasses import replace
from itertools import chain
import math
import re

from pce_mpi.conformance.candidates.catalogue import catalogue
from pce_mpi.conformance.candidates.fitting import unmet_need
from pce_mpi.conformance.candidates.offers import EVERYTHING, Offer
from pce_mpi.conformance.judging.outcomes import Accuracy, Finding, Outcome, Report, Verdict, likeness
from pce_mpi.conformance.problems.cases import About, Gradient
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.text import visible
from pce_mpi.text import Cell, grouped

MEANING = {
    Verdict.PASS: "right, or refused where that is due",
    Verdict.FAIL: "wrong, or raised on some ranks only",
    Verdict.NOT_OFFERED: "not supported, as declared; never held against the candidate",
    Verdict.REFUSED: "raised on every rank where an answer was due",
    Verdict.CRASHED: "a process died",
    Verdict.DEADLOCKED: "some ranks never returned, and others had raised or returned",
    Verdict.KNOWN: "failed, as the file given with --known says",
    Verdict.NOT_RUN: "left out: those before it ended alike, one failed under -x, or the candidate did not start again",
    Verdict.SLOW: "not done in time: all ranks were at the same step, or still moving",
}

_GRADIENT = {
    Gradient.NONE: "the loss alone",
    Gradient.VALUE: "the loss and its gradient",
    Gradient.BACKWARD: "the loss and a backward function",
}
_SHARDS = {
    "equal": "of equal length",
    "array_split": "as numpy.array_split makes them",
    "chunks": "as torch.chunk makes them",
    "any": "of any lengths",
}
_TARGETS = {
    (True, True): "index or probability targets",
    (True, False): "index targets",
    (False, True): "probability targets",
}
_HARM: list[str] = list(About)
# What a finding says may be declared.
_DECLARE = re.compile(r"declare it: @offers\((.*?)\)")
_DECLARED = ("dtypes", "options", "reductions", "probabilities", "dims", "any_axis", "shards", "batch_comm")


def headline(report: Report) -> str:
    """Summarize the run in one sentence."""
    counts = report.counts
    others = {Verdict.NOT_OFFERED: "not offered", Verdict.KNOWN: "known to fail", Verdict.NOT_RUN: "not run"}
    ran = len(report.outcomes) - sum(counts[verdict] for verdict in others)
    left = "".join(f"; {counts[verdict]} {what}" for verdict, what in others.items() if counts[verdict])
    left += "; interrupted before the last case" * report.interrupted
    if not report.failed:
        return f"{_counted(ran, 'case')} passed{left}" if ran else f"no case was run{left}"
    kinds = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if verdict.failed and count)
    return f"{len(report.failed)} of {_counted(ran, 'case')} failed ({kinds}){left}"


def open_contracts(report: Report) -> str:
    """Say of a function whose numbers are right which declarations close its contracts; '' unless all do."""
    contracts = [outcome for outcome in report.failed if outcome.about == About.CONTRACT]
    ran = [outcome for outcome in report.outcomes if outcome.failed or outcome.verdict is Verdict.PASS]
    numbers = sum(outcome.about != About.CONTRACT for outcome in ran)
    declared = [_DECLARE.findall(finding.text) for outcome in contracts for finding in outcome.findings]
    if not contracts or len(contracts) < len(report.failed) or not numbers or not all(declared):
        return ""
    words = " and ".join(dict.fromkeys(chain(*declared)))
    return f"{numbers} of {numbers} numbers right; {_counted(len(contracts), 'contract')} open: declare {words}"


def facts(report: Report) -> dict[str, str]:
    """Return the settings of the run."""
    tolerance = ("strict" if report.strict else "usual") + f", times {report.tolerance:g}" * (report.tolerance != 1.0)
    return {
        "candidate": report.candidate,
        "offers": _offered(report.offer),
        "ranks": ", ".join(map(str, report.ranks)),
        "seed": str(report.seed),
        "tolerance": tolerance,
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }


def title(outcome: Outcome, report: Report) -> str:
    """Return the name of the case, with the number of ranks if the report has several."""
    return outcome.case + f" on {_counted(outcome.ranks, 'rank')}" * (len(report.ranks) > 1)


def by_cause(report: Report) -> list[list[Outcome]]:
    """Return the failures of each cause, whatever its numbers: the most harmful first, then the most frequent."""
    causes = [_causes(outcome) for outcome in report.failed]
    number = Counter(cause for each in causes for cause in each)
    # A case of two faults stands where the rarer one is told.
    rarest = [min(each, key=lambda cause: number[cause]) for each in causes]
    groups = grouped(zip(rarest, report.failed, strict=True))
    return sorted(groups.values(), key=lambda failed: (_HARM.index(about(failed)), -len(failed)))


def about(failed: list[Outcome]) -> str:
    """Return what the most harmful of these cases is about."""
    return min((outcome.about for outcome in failed), key=_HARM.index)


def by_harm(report: Report) -> list[tuple[bool, list[list[Outcome]]]]:
    """Return the failures of each cause, apart, as True says, those of contracts alone."""
    both: tuple[list[list[Outcome]], list[list[Outcome]]] = [], []
    for failed in by_cause(report):
        both[about(failed) == About.CONTRACT].append(failed)
    return [(bool(fold), groups) for fold, groups in enumerate(both) if groups]


def _causes(outcome: Outcome) -> list[str]:
    """Return the causes in one case without their numbers; its family where only numbers are known."""
    if not outcome.findings:
        return [problem(outcome)]
    first = outcome.findings[0]
    told = [likeness(fault.causes[0]) for fault in first.faults if fault.alike]
    if told:
        others = (fault.place for fault in first.faults if not fault.alike)
        return told + [place.partition("nan")[0] for place in others if "nan" in place]
    if outcome.verdict is Verdict.FAIL and not first.cause:
        return [f"{first.kind} in {outcome.family}"]
    return [f"{outcome.verdict}: {Finding(first.kind, outcome.fault).likeness}"]


def hint(report: Report) -> str:
    """Say how to get more cases; '' if the candidate declares more than its signature."""
    offer, plain = report.offer, Offer()
    if offer.dtypes != plain.dtypes or not (most := _declarations(report)):
        return ""
    alone = KINDS[offer.kind].worded("All logits were float32")
    if (offer.dims, offer.probabilities) != (plain.dims, plain.probabilities):
        return f'{alone}: @offers(dtypes=("float32", "bfloat16")) adds what else the candidate takes.'
    told = f"the option{'s' * (len(offer.options) > 1)} {', '.join(offer.options)}" if offer.options else "no option"
    left = _counted(report.counts[Verdict.NOT_OFFERED], "case")
    opened = ", then ".join(f"@offers({each}) opens {_counted(count, 'case')}" for each, count in most.items())
    return (
        f"{alone}, and {left} were left out: the signature tells {told}, and the rest has to be declared. "
        f"As far as it is true, {opened}. What is not named stays as it is. "
        "help(pce_mpi.conformance.offers) has all that can be declared."
    )


def _declarations(report: Report) -> dict[str, int]:
    """Return the three declarations that open most cases, each after those before it, with the number of cases."""
    offer, counts = report.offer, dict[str, int]()
    whole = replace(EVERYTHING, kind=offer.kind, options=KINDS[offer.kind].options)
    left = {outcome.case for outcome in report.outcomes if outcome.verdict is Verdict.NOT_OFFERED}
    cases = [case for case in catalogue(whole) if case.name in left]
    for _ in range(3):
        more = {name: replace(offer, **{name: getattr(whole, name)}) for name in _DECLARED}
        opened = {name: [c for c in cases if unmet_need(more[name], c.needs, c.dtype) is None] for name in _DECLARED}
        best = max(_DECLARED, key=lambda name: len(opened[name]))
        if not opened[best]:
            break
        offer, cases = more[best], [case for case in cases if case not in opened[best]]
        value = str(getattr(offer, best)).replace("'", '"') if best != "shards" else f'"{offer.shards}"'
        counts[f"{best}={value}"] = len(opened[best])
    return counts


def extreme_rows(report: Report) -> list[list[Cell]]:
    """Return the table of the largest errors of passing and of all cases, by dtype and quantity; [] without any."""
    worst: dict[tuple[str, str], tuple[Accuracy, str]] = {}
    passing: dict[tuple[str, str], float] = {}
    for outcome in report.outcomes:
        for each in outcome.accuracies:
            key = each.dtype, each.quantity
            if not outcome.failed:
                passing[key] = max(each.error, passing.get(key, 0.0))
            if key not in worst or each.error > worst[key][0].error:
                worst[key] = each, outcome.case
    head: list[Cell] = ["dtype", "quantity", "passing cases", "all cases", "best possible", "plain product", "allowed"]
    rows: list[list[Cell]] = [
        [*key, _ulps(passing.get(key)), _ulps(each.error), each.best, _ulps(each.plain), each.allowed, case, each.where]
        for key, (each, case) in worst.items()
    ]
    shown = [[*head, "in case", "at"], *rows]
    if all(each.plain is None for each, _ in worst.values()):
        shown = [[*row[:5], *row[6:]] for row in shown]
    return shown if rows else []


def _ulps(error: float | None) -> Cell:
    """Round large errors."""
    return error if error is None or error < 1000.0 or math.isinf(error) else f"{error:.2g}"


def problem(outcome: Outcome) -> str:
    """Describe a fault in one line: the first finding, and the kinds of the others."""
    if not outcome.findings:
        return in_a_line(outcome.note) or MEANING[outcome.verdict]
    first, *others = outcome.findings
    also = dict.fromkeys(finding.kind for finding in others if finding.kind != first.kind)
    return in_a_line(first.text) + (f" (also: {', '.join(also)})" if also else "")


def lines(outcome: Outcome) -> list[str]:
    """Return a line for each finding."""
    return [in_a_line(finding.text) for finding in outcome.findings if finding not in _prints(outcome)]


def printed(outcome: Outcome) -> str:
    """Return the output of a process that crashed or hung; '' if there is none."""
    return "\n".join(visible(finding.text) for finding in _prints(outcome))


def _prints(outcome: Outcome) -> list[Finding]:
    """Return the findings that are output: all but the first, for a case that did not end."""
    return outcome.findings[1:] if outcome.verdict.unended else []


def shape(outcome: Outcome, report: Report) -> str:
    """Return the shape of the problem in words; '' if it is not known."""
    if not outcome.splits:
        return ""
    lengths = [stop - start for start, stop in zip(outcome.splits[:-1], outcome.splits[1:], strict=True)]
    split = f" ({' + '.join(map(str, lengths))} classes)" if len(lengths) > 1 else ""
    size = f"{_counted(outcome.rows, 'row')}, {_counted(outcome.classes, 'class')}"
    return KINDS[report.offer.kind].worded(f"{size}, {outcome.dtype}, on {_counted(outcome.ranks, 'rank')}{split}")


def in_a_line(text: str) -> str:
    """Remove line breaks and control characters."""
    return " ".join(visible(text).split())


def _offered(offer: Offer) -> str:
    return "; ".join(
        [
            ", ".join(offer.dtypes),
            *([_placed(offer)] if offer.kind == "placement" else _of_logits(offer)),
            f"shards {_SHARDS[offer.shards]}",
            f"gives {KINDS[offer.kind].of_results(_GRADIENT[offer.gradient])}",
            *["with the bits of one rank"] * offer.same_bits,
            *[f"gradients averaged over {' and '.join(offer.averaged)}"] * bool(offer.averaged),
        ]
    )


def _placed(offer: Offer) -> str:
    of = {"no": "", "term": " of terms", "array": " of terms, gradients of the array that they make"}[offer.partial]
    return f"computes {offer.computes}{of}"


def _of_logits(offer: Offer) -> list[str]:
    return [
        "options " + (", ".join(offer.options) or "none"),
        "reductions " + ", ".join(offer.reductions),
        _beside_logits(offer),
        ", ".join(f"{dims}-D" for dims in offer.dims) + " logits",
        "any class axis" if offer.any_axis else "classes last",
    ]


def _beside_logits(offer: Offer) -> str:
    arrays = KINDS[offer.kind].arrays
    if "teacher" in arrays:
        return "a teacher's logits"
    return _TARGETS[offer.class_numbers, offer.probabilities] if "targets" in arrays else "no targets"


def _counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"
