"""Checks of what optimizers take, and blocks in which arrays are updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import check_one_library, to_host
from pce_mpi.distributed.array import DistArray, described

# The number of elements that are updated at a time, few enough to stay in the cache.
_BLOCK = 2**16
# A GPU's cache keeps nothing between two kernels, and starting a kernel takes as long as updating 100,000 elements.
_BLOCK_OF_DEVICE = 2**24


# A mapping has them by name, as `shard_parameters` returns them; they count in the order of their names.
Parameters = Iterable[DistArray] | Mapping[str, DistArray]


def listed(parameters: Any) -> list[DistArray]:
    if isinstance(parameters, DistArray):
        raise TypeError("parameters must be a list of distributed arrays, got one distributed array")
    if not isinstance(parameters, Mapping):
        return list(parameters)
    if "params" in parameters and not isinstance(parameters["params"], DistArray):
        raise TypeError("groups of parameters must be in a list, got one group")
    # Ranks may have made their mappings in different orders.
    return [parameters[name] for name in sorted(parameters, key=str)]


def in_groups(parameters: Any) -> list[dict[str, Any]]:
    """Return groups, each a dict of "params" and its own options; parameters alone are one group."""
    given: list[Any] = listed(parameters)
    if not any(isinstance(each, Mapping) for each in given):
        return [{"params": tuple(given)}]
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                f"a group of parameters must be a dict that has 'params', got {described(group)} as number {index}"
            )
    return [{**group, "params": tuple(listed(group["params"]))} for group in given]


def check_parameters(parameters: Sequence[Any]) -> None:
    if not parameters:
        raise ValueError("parameters are missing: the list is empty")
    seen: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        what = f"parameters[{index}]"
        if not isinstance(parameter, DistArray):
            raise TypeError(f"{what} must be a distributed array, got {type(parameter).__name__}")
        if not (parameter.is_leaf and parameter.requires_grad):
            raise ValueError(
                f"{what} must be an array that was made with requires_grad=True, got {described(parameter)}"
            )
        if parameter.sharding.partial_dims:
            raise ValueError(f"{what} must not be Partial, got {described(parameter)}")
        if id(parameter) in seen:
            raise ValueError(f"{what} is the same array as parameters[{seen[id(parameter)]}]")
        seen[id(parameter)] = index
    check_one_library({f"parameters[{index}]": parameter.local for index, parameter in enumerate(parameters)})


def not_negative(value: Any, name: str, finite: bool = True) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = to_host(value).item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if not 0.0 <= value or (finite and value == math.inf):
        raise ValueError(f"{name} must not be negative{' and must be finite' * finite}, got {value}")
    return float(value)


def block_of(xp: Any) -> int:
    return _BLOCK if xp is np else _BLOCK_OF_DEVICE


@lru_cache(maxsize=1024)
def blocks(shape: tuple[int, ...], most: int) -> tuple[tuple[int | slice, ...], ...]:
    """Return indices that cut an array of `shape` into contiguous blocks of at most `most` elements."""
    if not shape:
        return ((),)
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    count = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    ranges = [slice(start, start + count) for start in range(0, shape[axis], count)]
    return tuple((*outer, part) for outer in np.ndindex(shape[:axis]) for part in ranges)
