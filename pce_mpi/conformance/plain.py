"""Dataclasses as the types of JSON, and back: what others may have written is checked by the annotations of fields."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import EnumType
from functools import cache
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pce_mpi.distributed.tensor_files import shown


def plain(value: Any) -> Any:
    """Return a dataclass as types of JSON, with "inf", "-inf" and "nan" for numbers that are not finite."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def made(kind: Any, value: Any, name: str = "") -> Any:
    """Return the `kind` of which `plain` made this, fields of no such name left out; raise `ValueError` otherwise."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if type(None) in arguments:
        return made(arguments[0], value, name)
    if (expected := _expected(kind, origin, arguments, value)) is not None:
        raise ValueError(f"{name or 'it'} must be {expected}, got {shown(value)}")
    if is_dataclass(kind):
        try:
            return _made_of_fields(kind, value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if name else str(error)) from error
    if origin is dict:
        return {key: made(arguments[1], each, f"{name}[{shown(key)}]") for key, each in value.items()}
    if origin in (list, tuple):
        kinds = arguments if origin is tuple and arguments[-1] is not ... else arguments[:1] * len(value)
        return origin(made(each, one, f"{name}[{n}]") for n, (each, one) in enumerate(zip(kinds, value, strict=True)))
    return kind(value) if isinstance(kind, type) else value


def _expected(kind: Any, origin: Any, arguments: tuple[Any, ...], value: Any) -> str | None:
    """Return what must come in place of this value; None if it may be of this kind."""
    words: Any = arguments if origin is Literal else list(kind) if isinstance(kind, EnumType) else ()
    if words:
        return None if value in words else " or ".join(repr(str(word)) for word in words)
    if kind is float:
        return None if type(value) in (float, int) or value in ("nan", "inf", "-inf") else "a number"
    for kinds, types, expected in _TYPES:
        if kind in kinds or origin in kinds:
            return None if type(value) is types else expected
    return None if type(value) is dict else "an object"


_TYPES = (
    ((bool,), bool, "true or false"),
    ((int,), int, "a whole number"),
    ((str,), str, "text"),
    ((list, tuple), list, "a list"),
)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _made_of_fields(kind: Any, given: dict[str, Any]) -> Any:
    for field in fields(kind):
        if field.name not in given and field.default is field.default_factory is MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**{name: made(hint, given[name], name) for name, hint in _hints(kind).items() if name in given})
