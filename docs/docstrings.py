"""Prepare the docstrings for the reference: public names become links, and signatures show the options by name."""

import inspect
from pydoc import locate
import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Link the public names in all docstrings of the package, and take signatures as Python shows them."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        # Other names, such as `sum`, are often values of options or everyday words.
        names = [name for name, member in pkg.members.items() if member.is_alias and re.search("[A-Z_]", name)]
        _prepare(pkg, re.compile(rf"(?<!`)`({'|'.join(names)})`(?!`)"), pkg.path)


def _prepare(thing: griffe.Object, public: re.Pattern[str], package: str) -> None:
    if isinstance(thing, griffe.Function) and any("Unpack[" in str(each.annotation) for each in thing.parameters):
        _show_options(thing)
    if thing.docstring is not None:
        # Griffe would show the default of the first one for all.
        text = re.sub(
            r"^(\w+(?:, \w+)+ : (?:.*, )?optional)$",
            r"\1, default as in the signature",
            thing.docstring.value,
            flags=re.M,
        )
        thing.docstring.value = public.sub(rf"[`\1`][{package}.\1]", text)
    for member in thing.members.values():
        if not member.is_alias:
            _prepare(member, public, package)


def _show_options(function: griffe.Function) -> None:
    """Replace `**options`, which is all that the source says, by the options that Python shows, and their texts."""
    del function.parameters["options"]
    shown: Any = locate(function.path)
    if function.docstring is not None:
        function.docstring.value = inspect.cleandoc(shown.__doc__)
    for each in inspect.signature(shown).parameters.values():
        if each.name not in function.parameters:
            kind = griffe.ParameterKind(each.kind.description)
            function.parameters.add(griffe.Parameter(each.name, kind=kind, default=repr(each.default)))
