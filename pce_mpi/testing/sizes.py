"""The numbers of ranks at which a test runs."""

from collections.abc import Callable, Mapping, Sequence
import math
import re
from typing import Any

import pytest


def with_size(test: str, size: int) -> str:
    """Return the name of a test on so many ranks: the number stands before the parameters.

    >>> with_size("tests/test_sum.py::test_total[int]", 3)
    'tests/test_sum.py::test_total@3[int]'
    """
    path, colons, names = test.partition("::")
    name, bracket, parameters = (names if colons else path).partition("[")
    if not name:  # [doctest] and the name of what it is of
        return f"{test}@{size}"
    return f"{path if colons else ''}{colons}{name}@{size}{bracket}{parameters}"


def at_size(test: str) -> tuple[str, int]:
    """Return the name of a test without the number of ranks in it, and that; 0 where there is none.

    >>> at_size("tests/test_sum.py::test_total@3[int]")
    ('tests/test_sum.py::test_total[int]', 3)
    """
    found = re.fullmatch(r"([^\[]*::[^\[]*)@(\d+)(\[.*)?", test, re.DOTALL)
    return (found[1] + (found[3] or ""), int(found[2])) if found else (test, 0)


def parse_sizes(text: str) -> list[int]:
    """Return the numbers of ranks in a text such as "1,2,4", each once; `pytest.UsageError` for another text."""
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text, re.ASCII):
        raise pytest.UsageError(f"--ranks {text}: give numbers of ranks, such as --ranks 1,2,4")
    return list(dict.fromkeys(map(int, text.split(","))))


def select(config: pytest.Config, items: list[pytest.Item], here: int, asked: Sequence[int], missing: str) -> None:
    """Keep the tests that run on `here` ranks; one that runs at no size of those `asked` is skipped at the first."""
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        needs = _needs(item)
        if any(all(fits(size) for _, fits in needs) for size in asked):
            runs = all(fits(here) for _, fits in needs)
        else:
            text = " and ".join(text for text, _ in needs)
            sizes = " and ".join(map(str, asked))
            reason = f"runs on {text}, which {sizes} {'are' if asked[1:] else 'is'} not{missing}"
            item.add_marker(pytest.mark.skip(reason=reason))
            runs = here == asked[0]
        (kept if runs else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


def _needs(item: pytest.Item) -> list[tuple[str, Callable[[int], bool]]]:
    """Return what the marks of a test ask of the number of ranks, in words and as a function."""
    needs: list[tuple[str, Callable[[int], bool]]] = []
    if mark := item.get_closest_marker("ranks"):
        sizes, least = mark.args, mark.kwargs.get("min", 1)
        if mark.kwargs.keys() - {"min"} or not all(isinstance(each, int) and each > 0 for each in (*sizes, least)):
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.ranks takes numbers of ranks, or min=number")
        if sizes:
            text = " or ".join(map(str, sizes)) + f" rank{'s' * (sizes != (1,))}"
            needs.append((text, lambda size: size in sizes))
        if least > 1:
            needs.append((f"{least} ranks or more", lambda size: size >= least))
    if shape := shape_of(item):
        known = math.prod(each for each in shape.values() if each != "rest")
        rest = "rest" in shape.values()
        text = f"a multiple of {known} ranks" if rest else f"{known} rank{'s' * (known > 1)}"
        needs.append((text, lambda size: size % known == 0 if rest else size == known))
    return needs


def shape_of(item: Any) -> Mapping[str, Any]:
    """Return the dims of the mesh that a test is parametrized with, or marked with; none for a line of all ranks."""
    mark = item.get_closest_marker("mesh")
    shape = mark.kwargs if mark else {}
    fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    if "mesh" in fixtures and fixtures["mesh"][-1].func.__module__ == "pce_mpi.testing.fixtures":  # and no other mesh
        calls = getattr(item, "callspec", None)
        shape = (calls and calls.params.get("mesh")) or shape
    lengths = list(shape.values()) if isinstance(shape, Mapping) else [0]
    if (mark and mark.args) or not all(each == "rest" or (isinstance(each, int) and each > 0) for each in lengths):
        raise pytest.UsageError(f'{item.nodeid}: pytest.mark.mesh takes lengths by name, such as data=2, model="rest"')
    if lengths.count("rest") > 1:
        raise pytest.UsageError(
            f'{item.nodeid}: one dim of a mesh can be the "rest", and here {lengths.count("rest")} are'
        )
    return shape
