"""The docstrings of the public names follow numpydoc, and the examples in docstrings print what they say."""

from ast import literal_eval
from collections.abc import Iterator
import doctest
from enum import Enum
from functools import cached_property
from importlib import import_module
import inspect
import re
from typing import Any, TypedDict, Unpack
import warnings

import pytest

from jobs.launch import ROOT
from jobs.public_names import public_names
from pce_mpi.loss import options

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "pce_mpi").rglob("*.py")
    if path.name != "__main__.py" and ">>>" in path.read_text(encoding="utf-8")
)


ELSEWHERE = re.compile(r"(Those|That) of `")
# A thing with several names is tested by the first one.
PUBLIC: dict[str, Any] = {}
for each, found in public_names():
    if found not in PUBLIC.values():
        PUBLIC[each] = found


def parameters_of(thing: Any) -> list[str]:
    """The parameters of a function or a class; options that are unpacked from a TypedDict by their own names."""
    names: list[str] = []
    for parameter in inspect.signature(thing).parameters.values():
        if unpacked := re.fullmatch(r"Unpack\[([\w.]+)\]", str(parameter.annotation)):
            names += eval(unpacked[1], inspect.unwrap(thing).__globals__).__annotations__
        elif parameter.name != "self":
            names.append(str(parameter.replace(annotation=parameter.empty, default=parameter.empty)))
    return names


def faults(thing: Any) -> Iterator[str]:
    """Yield the ways in which the docstring of a public name does not follow numpydoc."""
    docscrape = pytest.importorskip("numpydoc.docscrape", reason="`make lint` installs numpydoc")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpydoc warns of sections that it does not know
            doc = docscrape.NumpyDocString(inspect.cleandoc(thing.__doc__ or ""))
    except (UserWarning, ValueError) as problem:
        yield str(problem)
        return
    summary = " ".join(doc["Summary"])
    if not re.fullmatch(r"[A-Z].*\.", summary) or re.search(r"\. [A-Z]", summary):
        yield f"the summary is no sentence: {summary!r}"
    parameters = [name for each in doc["Parameters"] for name in each.name.split(", ")]
    attributes = [name for each in doc["Attributes"] for name in each.name.split(", ")]
    for each in [*doc["Parameters"], *doc["Attributes"], *doc["Returns"]]:
        if not "".join(each.desc).strip():
            yield f"{each.name or each.type} has no description"
    for each in doc["Parameters"]:
        names = each.name.split(", ")
        is_option = set(names) & options.Options.__annotations__.keys()
        if is_option and ELSEWHERE.match(" ".join(each.desc)) and ".dense." not in thing.__module__:
            yield f"the meaning of {each.name} is elsewhere"
        if default := re.search(r'default ([-"\d].*|True|False)', each.type):
            known = inspect.signature(thing).parameters
            if wrong := [name for name in names if name in known and known[name].default != literal_eval(default[1])]:
                yield f"the default of {wrong} is not {default[1]}"
    is_class = inspect.isclass(thing)
    if isinstance(thing, property | cached_property) or (is_class and issubclass(thing, Exception | Enum)):
        return
    expected = parameters_of(thing)
    if is_class and attributes and not parameters:  # its instances are made by functions
        missing = [name for name in attributes if name not in expected and not hasattr(thing, name)]
        if missing or not set(getattr(thing, "_fields", ())) <= set(attributes):
            yield f"Attributes are not those of {expected}: {attributes}"
        return
    # A function that is another one by another name leaves the sections to that one.
    same = re.search(r"[;:] see `([\w.]+)`\.$", summary)
    if same and same[1] in PUBLIC and not any(faults(PUBLIC[same[1]])):
        return
    if parameters != expected:
        yield f"Parameters are {expected}, not {parameters}"
    if is_class:
        return
    result = str(inspect.signature(thing).return_annotation)
    returns = not re.fullmatch(r"None|NoReturn|(.*\.)?Iterator\[None\]", result)
    said = bool(doc["Returns"] or doc["Yields"]) or (not expected and summary.startswith("Return "))
    if said != returns:
        yield f"the result is {result}, and {'a' if said else 'no'} section Returns describes it"


def test_public_names_are_found():
    assert {"pce_mpi.add", "pce_mpi.Mesh.comm", "pce_mpi.DistArray.T", "pce_mpi.Rule.of"} <= set(PUBLIC)
    assert {"pce_mpi.dense.softmax_cross_entropy", "pce_mpi.conformance.run_case"} <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_of_public_name_follows_numpydoc(name):
    assert list(faults(PUBLIC[name])) == []


class Options(TypedDict, total=False):
    """Options that a function takes by name."""

    seed: int
    rows: int


def documented(x: int, y: int = 3, **options: "Unpack[Options]") -> int:
    """Return `x`.

    Parameters
    ----------
    x : int
        A number.
    y : int, default 3
        A number.
    seed, rows : int
        Nothing.

    Returns
    -------
    int
        That number.
    """
    return x


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("Return `x`.", "return `x`."),
        ("Return `x`.", "Return `x`"),
        ("Return `x`.", "Return `x`. It is a number."),
        ("x : int", "z : int"),
        ("default 3", "default 4"),
        ("seed, rows", "rows, seed"),
        ("seed, rows", "options"),
        ("    Nothing.\n", ""),
        ("Nothing.", "Those of `f`."),
        ("Parameters\n----------", "Arguments\n---------"),
        ("Returns\n-------", "Notes\n-----"),
    ],
)
def test_planted_fault_of_docstring_is_found(right, wrong, monkeypatch):
    assert list(faults(documented)) == []
    text = inspect.cleandoc(documented.__doc__)
    monkeypatch.setattr(documented, "__doc__", text.replace(right, wrong))
    assert documented.__doc__ != text
    assert list(faults(documented)) != []


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_module_print_what_they_say(module):
    results = doctest.testmod(import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
