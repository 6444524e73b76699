"""Packages whose public names are imported when the first of them is used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
import sys


def public_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, for the names in `__all__` of its module `public` (PEP 562).

    Commands and every pytest import a part of this package, and do not wait for the rest.
    """

    def get(name: str) -> object:
        if name == "__all__" or (name.isidentifier() and not name.startswith("_")):
            if find_spec(f"{package}.{name}"):
                return import_module(f"{package}.{name}")
            public = import_module(f"{package}.public")
            if name in (known := ("__all__", *public.__all__)):
                there = vars(sys.modules[package])  # and what a program has set itself stays
                there |= {each: getattr(public, each) for each in known if each not in there}
                return there[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        dunders = (each for each in vars(sys.modules[package]) if each.startswith("__"))
        return sorted({*dunders, *import_module(f"{package}.public").__all__})

    return get, names
