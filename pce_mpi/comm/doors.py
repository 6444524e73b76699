"""The functions that users call: an error that leaves one is told to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import isfunction
import sys
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from pce_mpi.comm.board import tell
from pce_mpi.comm.program import program
from pce_mpi.comm.uncaught import install

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

_doors: set[CodeType] = set()


def telling(function: Function) -> Function:
    """Make `function`, which users call, tell its errors to the other ranks."""

    name = function.__name__

    @door
    @wraps(function)
    def told(*arguments: Any, **options: Any) -> Any:
        program.count += 1
        program.name = name
        try:
            return function(*arguments, **options)
        except Exception as error:
            tell_from_here(error)
            raise

    return cast(Function, told)


def telling_functions(names: dict[str, Any], *wings: str) -> None:
    """Make the public functions among `names` tell their errors, of those that are defined in `wings`."""
    for name in names["__all__"]:
        if isfunction(value := names[name]) and value.__module__.startswith(wings):
            names[name] = told = telling(value)
            told.__module__ = "pce_mpi"  # where it is found to be pickled


def telling_methods(kind: Kind, but: Collection[str] = ()) -> Kind:
    """Make the methods of the class `kind` that users call, its operators and what they assign, tell their errors."""
    for name, value in list(vars(kind).items()):
        if (name.startswith("_") and not name.endswith("__")) or name in but:
            continue
        if isfunction(value) and value.__name__ not in but:
            setattr(kind, name, telling(value))
        elif isinstance(value, classmethod):
            setattr(kind, name, classmethod(telling(value.__func__)))
        elif isinstance(value, property) and value.fset:
            setattr(kind, name, value.setter(telling(value.fset)))
    return kind


def door(function: Function) -> Function:
    """Note that errors that leave `function` are told, unless another such function has called it."""
    _doors.add(function.__code__)
    return function


def tell_from_here(error: Exception) -> None:
    """Tell the other ranks about an error, unless a function of this package has called the one that calls this.

    The package may catch it.
    """
    install()
    if not is_within_door(sys._getframe(1).f_back):
        tell(error)


def is_within_door(frame: FrameType | None) -> bool:
    """Return whether the errors of the function in `frame` are told by one that led to it."""
    while frame is not None:
        if frame.f_code in _doors:
            return True
        frame = frame.f_back
    return False
