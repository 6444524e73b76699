"""Print the public names with their signatures, a line for each: what users may rely on.

Annotations are left out. The parameters of a class are public if its docstring has Parameters; its Attributes are.
"""

from collections.abc import Iterator
from enum import Enum
from functools import cached_property
import inspect
from typing import Any

import pce_mpi
from pce_mpi.cli import _parser
import pce_mpi.conformance
from pce_mpi.conformance.problems.kinds import KINDS
import pce_mpi.loss


def public_names() -> Iterator[tuple[str, Any]]:
    """Every public function and class, and every public method and property of those classes, by its full name."""
    for module in (pce_mpi, pce_mpi.dense, pce_mpi.loss, pce_mpi.conformance):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                continue
            yield f"{module.__name__}.{name}", thing
            for member, value in vars(thing).items() if inspect.isclass(thing) else ():
                if not member.startswith("_"):
                    if isinstance(value, property | cached_property):
                        yield f"{module.__name__}.{name}.{member}", value
                    elif inspect.isroutine(attribute := getattr(thing, member)):
                        yield f"{module.__name__}.{name}.{member}", attribute


class Named:
    """A default that is a class or a module, written by its name."""

    def __init__(self, thing: Any) -> None:
        self.name = thing.__name__

    def __repr__(self) -> str:
        return self.name


def signature_of(thing: Any) -> str:
    signature = inspect.signature(thing)
    parameters = []
    for each in signature.parameters.values():
        if (inspect.isclass(each.default) and each.default is not each.empty) or inspect.ismodule(each.default):
            each = each.replace(default=Named(each.default))
        parameters.append(each.replace(annotation=each.empty))
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def form_of(thing: Any) -> str:
    """The use of a public name, as far as one line says it."""
    if isinstance(thing, property | cached_property):
        return ""
    if not inspect.isclass(thing):
        return signature_of(thing)
    if issubclass(thing, Exception):
        return f"({thing.__mro__[1].__name__})"
    if issubclass(thing, Enum):
        return f": {', '.join(thing.__members__)}"
    from numpydoc.docscrape import NumpyDocString

    sections = NumpyDocString(inspect.cleandoc(thing.__doc__ or ""))
    made = signature_of(thing) if sections["Parameters"] else ""
    attributes = ", ".join(each.name for each in sections["Attributes"])
    return made + (f": {attributes}" if attributes else "")


def options() -> Iterator[str]:
    """Every command of the command line with its options."""
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    for name, parser in commands.items():
        words = [max(action.option_strings, key=len, default=action.dest) for action in parser._actions]
        yield f"python -m pce_mpi {name}: {', '.join(sorted(words))}"


def lines() -> list[str]:
    names = {f"{name}{form_of(thing)}" for name, thing in public_names()}
    return sorted([*names, *options(), f"pce_mpi.conformance.offers(kind=...): {', '.join(sorted(KINDS))}"])


if __name__ == "__main__":
    print("\n".join(lines()))
