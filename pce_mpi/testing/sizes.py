"""The numbers of ranks at which a test runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    if not re.fullmatch(r"\s*[1-9]\d{0,5}\s*(,\s*[1-9]\d{0,5}\s*)*", text, re.ASCII):
        raise pytest.UsageError(f"--ranks {text!r}: give numbers of ranks below a million, such as --ranks 1,2,4")
    return list(dict.fromkeys(map(int, text.split(","))))


def select(items: list[pytest.Item], here: int, asked: Sequence[int], missing: str, own_marks: bool = True) -> None:
    """Keep the tests that run on `here` ranks; one that runs at no size of those `asked` is skipped at the first.

    Unless all `own_marks` are this plugin's, a mark `ranks` with other arguments is of somebody else.
    """
    kept: list[pytest.Item] = []
    for item in items:
        needs = _needs(item, own_marks)
        if any(all(fits(size) for _, fits in needs) for size in asked):
            runs = all(fits(here) for _, fits in needs)
        else:
            text = " and ".join(text for text, _ in needs)
            sizes = " and ".join(map(str, asked))
            reason = f"runs on {text}, which {sizes} {'are' if asked[1:] else 'is'} not{missing}"
            item.add_marker(pytest.mark.skip(reason=reason))
            runs = here == asked[0]
        kept += [item] * runs
    items[:] = kept  # the others run at their sizes: they are not deselected


def asks_for_ranks(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture of this plugin, or is marked for numbers of ranks."""
    mark = item.get_closest_marker("ranks")
    return (mark is not None and _are_sizes(mark)) or any(map(partial(_uses, item), ("comm", "mesh", "rank_tmp_path")))


def _uses(item: Any, fixture: str) -> bool:
    """Return whether a test uses a fixture of this plugin, and no other one of that name."""
    definitions: Any = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).get(fixture)
    return bool(definitions) and definitions[-1].func.__module__ == "pce_mpi.testing.fixtures"


def _are_sizes(mark: pytest.Mark) -> bool:
    sizes = (*mark.args, mark.kwargs.get("min", 1))
    return mark.kwargs.keys() <= {"min"} and all(isinstance(size, int) and size > 0 for size in sizes)


def _needs(item: pytest.Item, own_marks: bool) -> list[tuple[str, Callable[[int], bool]]]:
    """Return what the marks of a test ask of the number of ranks, in words and as a function."""
    needs: list[tuple[str, Callable[[int], bool]]] = []
    mark = item.get_closest_marker("ranks")
    if mark and not _are_sizes(mark):
        if own_marks:
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.ranks takes numbers of ranks, or min=number")
    elif mark:
        sizes, least = mark.args, mark.kwargs.get("min", 1)
        if sizes:
            text = " or ".join(map(str, sizes)) + f" rank{'s' * (sizes != (1,))}"
            needs.append((text, lambda size: size in sizes))
        if least > 1:
            needs.append((f"{least} ranks or more", lambda size: size >= least))
    if shape := shape_of(item):
        product = math.prod(length for length in shape.values() if length != "rest")
        rest = "rest" in shape.values()
        text = f"a multiple of {product} ranks" if rest else f"{product} rank{'s' * (product > 1)}"
        needs.append((text, lambda size: size % product == 0 if rest else size == product))
    return needs


def shape_of(item: Any) -> Mapping[str, Any]:
    """Return the dims of the mesh that a test is parametrized with, or marked with; none for a line of all ranks.

    A mark `mesh` of a test that does not use the fixture is of somebody else.
    """
    if not _uses(item, "mesh"):
        return {}
    mark = item.get_closest_marker("mesh")
    calls = getattr(item, "callspec", None)
    shape = (calls and calls.params.get("mesh")) or (mark.kwargs if mark else {})
    lengths = list(shape.values()) if isinstance(shape, Mapping) else [0]
    if (mark and mark.args) or not all(each == "rest" or (isinstance(each, int) and each > 0) for each in lengths):
        raise pytest.UsageError(f'{item.nodeid}: pytest.mark.mesh takes lengths by name, such as data=2, model="rest"')
    if lengths.count("rest") > 1:
        raise pytest.UsageError(
            f'{item.nodeid}: one dim of a mesh can be the "rest", and here {lengths.count("rest")} are'
        )
    return shape
