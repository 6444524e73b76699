"""Declare cases, each by the function that builds its problem; the function's docstring says what the case catches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
import inspect
from typing import Any, TypeVar

from pce_mpi.conformance.cases import Case, Needs
from pce_mpi.conformance.problems import Problem
from pce_mpi.conformance.terms import DTYPES, REDUCTIONS

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
                fields = {"catches": inspect.getdoc(build) or "", "dtype": ""} | self._usual | given | variation
                needs = Needs(**{field: fields[field] for field in _NEEDS & fields.keys()})
                own = {field: fields[field] for field in _OWN & fields.keys()}
                own["catches"] = " ".join(own["catches"].format(**variation).split())
                own["name"] = name.format(**{"dtype": "{dtype}"} | variation)
                self._declared.append(
                    Case(build=partial(build, **arguments) if arguments else build, needs=needs, **own)
                )
            return build

        return declare

    def of(self, main: str) -> Iterator[Case]:
        """Yield every case, in the dtype `main` where its name has none."""
        for case in self._declared:
            for dtype in DTYPES if "{dtype}" in case.name else (case.dtype or main,):
                yield replace(case, name=case.name.format(dtype=dtype, main=main), dtype=dtype)
