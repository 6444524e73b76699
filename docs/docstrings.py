"""Prepare the docstrings for the reference: public names become links."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Link the public names in all docstrings of the package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        # Other names, such as `sum`, are often values of options or everyday words.
        names = [name for name, member in pkg.members.items() if member.is_alias and re.search("[A-Z_]", name)]
        _link(pkg, re.compile(rf"(?<!`)`({'|'.join(names)})`(?!`)"), pkg.path)


def _link(thing: griffe.Object, public: re.Pattern[str], package: str) -> None:
    if thing.docstring is not None:
        thing.docstring.value = public.sub(rf"[`\1`][{package}.\1]", thing.docstring.value)
    for member in thing.members.values():
        if not member.is_alias:
            _link(member, public, package)
