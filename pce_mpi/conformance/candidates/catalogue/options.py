"""Cases about options: each alone, all pairs, all at once."""

from __future__ import annotations

from itertools import combinations

from pce_mpi.conformance.problems.cases import OPTIONS, Cases, Setting
from pce_mpi.conformance.problems.generators import random_problem, uneven
from pce_mpi.conformance.problems.problem import Problem
from pce_mpi.loss.options import ROWS

CASES = Cases()

_PAIR = """Options that are right alone and wrong together: a weight in the smoothing term, a divisor that one of them
changes, a factor that is left out of the other's gradient."""


def _with(setting: Setting, options: tuple[str, ...]) -> Problem:
    # A single option on equal shards, so that only the option can be wrong; several on uneven ones.
    return random_problem(setting, uneven(setting) if len(options) > 1 else None, options=options)


_ALONE = [{"option": each, "options": (each,), "catches": ROWS[each]["catches"]} for each in OPTIONS]
_PAIRS = [{"pair": "+".join(each), "options": each, "catches": _PAIR} for each in combinations(OPTIONS, 2)]
CASES.case("{option}/{dtype}", _ALONE)(_with)
CASES.case("pair/{pair}", _PAIRS)(_with)
CASES.case("all-options", [{"options": OPTIONS, "catches": "All options at once."}], rows=12)(_with)
