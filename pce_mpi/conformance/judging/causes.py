"""Tell the fewest causes that explain all failures of a run: one case alone may have several, or one by accident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pce_mpi.conformance.judging.outcomes import Fault, Finding, Outcome, likeness


def agree(outcomes: Sequence[Outcome]) -> None:
    """Choose the causes of all failures together, and rewrite the texts of their findings."""
    findings = [finding for outcome in outcomes if outcome.failed for finding in outcome.findings]
    left = [(finding, fault) for finding in findings for fault in finding.faults if fault.causes]
    while any(fault.alike for _, fault in left):
        fitting: dict[str, list[int]] = {}
        for place, (_, fault) in enumerate(left):
            for cause in dict.fromkeys(map(likeness, fault.causes)):
                fitting.setdefault(cause, []).append(place)
        ranks = {
            cause: (-len(places), sum(_closer(left[place][1], cause) for place in places))
            for cause, places in fitting.items()
            if any(left[place][1].alike for place in places)
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
