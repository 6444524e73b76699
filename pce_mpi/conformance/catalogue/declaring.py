"""Declare the cases of a family, each as the function that builds its problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
import inspect
from typing import Any

from pce_mpi.conformance.cases import Case, Problem, Setting
from pce_mpi.conformance.offers import DTYPES, Needs

_Build = Callable[[Setting], Problem]
_NEEDS = {field.name for field in fields(Needs)}


class Cases:
    """The cases of one file, in their order; the docstring of a function that builds a problem says what it catches."""

    def __init__(self) -> None:
        self._declared: list[Case] = []

    def case(self, name: str, build: _Build | None = None, catches: str = "", **given: Any) -> Any:
        """Declare a case with these fields of `Case` and `Needs`; one for each dtype if the name has "{dtype}"."""
        if build is None:
            return lambda build: self.case(name, build, **given) or build
        needs = Needs(**{field: given.pop(field) for field in _NEEDS & given.keys()})
        documented = getattr(build, "func", build)  # a partial has no docstring of its own
        catches = " ".join((catches or inspect.getdoc(documented) or "").split())
        self._declared.append(Case(name, catches, given.pop("dtype", ""), build, needs, **given))
        return None

    def of(self, main: str) -> Iterator[Case]:
        """Yield every case, in the dtype `main` where its name has none."""
        for case in self._declared:
            for dtype in DTYPES if "{dtype}" in case.name else (case.dtype or main,):
                yield replace(case, name=case.name.format(dtype=dtype, main=main), dtype=dtype)
