"""Dataclasses as the types of JSON, and back, by the annotations of their fields."""

from dataclasses import fields, is_dataclass
from enum import EnumType
from functools import cache
import math
from typing import Any, get_args, get_origin, get_type_hints


def to_json(value: Any) -> Any:
    """Return a dataclass as types of JSON, with "inf", "-inf" and "nan" for numbers that are not finite."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: Any, value: Any) -> Any:
    """Return the `kind` of which `to_json` made this, but for unknown fields, or raise `TypeError` or `ValueError`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if type(None) in arguments:
        return None if value is None else from_json(arguments[0], value)
    json_type = dict if is_dataclass(kind) or origin is dict else list if origin in (list, tuple) else kind
    if kind is float or isinstance(kind, EnumType):
        return kind(value)
    if json_type in (dict, list, str, int, bool) and type(value) is not json_type:
        raise TypeError(f"{json_type.__name__} is due, got {type(value).__name__}")
    if is_dataclass(kind):
        hints: dict[str, Any] = _hints(kind)
        of_fields = {name: from_json(hint, value[name]) for name, hint in hints.items() if name in value}
        return kind(**of_fields)  # type: ignore[operator]  # a class
    if origin is dict:
        return {name: from_json(arguments[1], each) for name, each in value.items()}
    if origin in (list, tuple):
        kinds = arguments if origin is tuple and arguments[-1] is not ... else arguments[:1] * len(value)
        return origin(from_json(each, one) for each, one in zip(kinds, value, strict=True))
    return value


_hints: Any = cache(get_type_hints)
