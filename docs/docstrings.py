"""Prepare the docstrings for the reference: public names become links, and types stay as they are written."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """What the site does to the docstrings of the package before it reads their sections."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        # Of the others, such as `sum`, many are values of options or words of everyday.
        names = [str(name) for name in pkg.exports or () if re.search("[A-Z_]", str(name))]
        _prepare(pkg, re.compile(rf"(?<!`)`({'|'.join(names)})`(?!`)"), pkg.path)


def _prepare(thing: griffe.Object, public: re.Pattern[str], package: str) -> None:
    if thing.docstring is not None:
        text = public.sub(rf"[`\1`][{package}.\1]", thing.docstring.value)
        # A type such as `array_like, shape (rows,)` is no Python; griffe shows what it cannot read as it is written.
        thing.docstring.value = re.sub(r"^(\*{0,2}\w.*? : )(?=\S)", "\\1\u2060", text, flags=re.MULTILINE)
    for member in thing.members.values():
        if not member.is_alias:
            _prepare(member, public, package)
