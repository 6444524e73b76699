"""The orders that the ranks of a launch execute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
import json
from pathlib import Path

from pce_mpi.conformance.candidates.catalogue import cases_of_all_kinds, catalogue
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.problems.cases import DTYPES, Case, fits
from pce_mpi.conformance.serialization import from_json, to_json

KIT = ("python", "-m", "pce_mpi", "conformance")

_NAME = "orders.json"
_SETTINGS = ("strict", "tolerance", "seed", "rows", "classes", "large", "memory")


@cache
def names_of_all_cases(dtypes: tuple[str, ...] = DTYPES, large: bool = False) -> list[str]:
    """Return the names of cases in these dtypes, whatever a candidate is and offers, in the order of the catalogue."""
    # The dtype of a case can depend on the offer; with a single dtype, all cases have that.
    every = (case for dtype in dtypes for case in cases_of_all_kinds([dtype], large=large))
    return list(dict.fromkeys(case.name for case in every))


@dataclass(frozen=True)
class Orders:
    """One candidate, and the cases to run.

    candidate   a name in `loading.NAMED_CANDIDATES`, or package.module:candidate, or path/to/file.py:candidate
    adapter     a name in `loading.FUNCTION_ADAPTERS` that makes a candidate of a function; None: it is one
    patterns    names, families or shell patterns of names; None: all cases
    but         the same, of cases to leave out
    dtypes      of the logits; None: all
    strict, tolerance   as in `Tolerance`
    rows, classes       in place of each case's own; None: its own
    large       also large cases, one of which takes GiB of memory
    memory      GiB that a process of a rank may take; None: not limited
    tasks       the names of the cases to run; None: each case that `patterns` and `dtypes` select, once
    """

    candidate: str
    adapter: str | None = None
    patterns: tuple[str, ...] | None = None
    but: tuple[str, ...] = ()
    dtypes: tuple[str, ...] | None = None
    strict: bool = False
    tolerance: float = 1.0
    seed: int = 0
    rows: int | None = None
    classes: int | None = None
    large: bool = False
    memory: float | None = None
    tasks: tuple[str, ...] | None = None

    def cases(self, offer: Offer) -> dict[str, Case]:
        """Return the selected cases by name, also those that `offer` does not cover."""
        return {case.name: case for case in catalogue(offer, self.dtypes, large=self.large) if self._select(case)}

    def cases_of_all_kinds(self) -> list[Case]:
        """Return the selected cases of candidates of every kind."""
        return [case for case in cases_of_all_kinds(self.dtypes, large=self.large) if self._select(case)]

    def patterns_of_no_case(self, more: Iterable[str] = ()) -> list[str]:
        """Return the patterns, those of `more` included, that fit no case, whatever a candidate is and offers."""
        patterns = (*(self.patterns or ()), *self.but, *more)
        names = names_of_all_cases(self.dtypes or DTYPES, self.large) if patterns else []
        return [pattern for pattern in patterns if not any(fits(name, pattern) for name in names)]

    def _select(self, case: Case) -> bool:
        selected = self.patterns is None or any(fits(case.name, pattern) for pattern in self.patterns)
        return selected and not any(fits(case.name, pattern) for pattern in self.but)

    def settings(self) -> list[str]:
        """Return the options of the command for what is not as usual, but for those that select cases."""
        found = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _SETTINGS and value != each.default:
                text = f"{value:g}" if isinstance(value, float) else str(value)
                found += [f"--{each.name}", *([] if value is True else [text])]
        return found

    def write(self, folder: Path) -> None:
        (folder / _NAME).write_text(json.dumps(to_json(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Orders:
        return from_json(cls, json.loads((folder / _NAME).read_text(encoding="utf-8")))
