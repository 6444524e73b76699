"""Declare cases, each by the function that builds its problem; the function's docstring says what the case catches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
import inspect
from typing import Any, TypeVar

from pce_mpi.conformance.cases import Case, Problem
from pce_mpi.conformance.offers import DTYPES, Needs

_Build = TypeVar("_Build", bound=Callable[..., Problem])
_NEEDS = {field.name for field in fields(Needs)}


class Cases:
    """The cases of one file, in their order; one for each dtype where the name has "{dtype}"."""

    def __init__(self) -> None:
        self._declared: list[Case] = []

    def case(self, name: str, **given: Any) -> Callable[[_Build], _Build]:
        """Declare a case with these fields of `Case` and `Needs`, and the decorated function."""

        def declare(build: _Build) -> _Build:
            self.add(name, build, **given)
            return build

        return declare

    def add(self, name: str, build: Callable[..., Problem], catches: str = "", **given: Any) -> None:
        """Declare a case of a function, or a partial, that others share."""
        needs = Needs(**{field: given.pop(field) for field in _NEEDS & given.keys()})
        catches = " ".join((catches or inspect.getdoc(getattr(build, "func", build)) or "").split())
        self._declared.append(Case(name, catches, given.pop("dtype", ""), build, needs, **given))

    def of(self, main: str) -> Iterator[Case]:
        """Yield every case, in the dtype `main` where its name has none."""
        for case in self._declared:
            for dtype in DTYPES if "{dtype}" in case.name else (case.dtype or main,):
                yield replace(case, name=case.name.format(dtype=dtype, main=main), dtype=dtype)
