"""The door of all functions of plain arrays: tensors of torch come out where only tensors go in; errors are told.

Torch is imported by those who make them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import wraps
import sys
from typing import Any

import numpy as np

from pce_mpi.comm.communicators import give_up
from pce_mpi.comm.doors import door, tell_from_here
from pce_mpi.comm.program import program
from pce_mpi.loss.options import Function
from pce_mpi.loss.passes import MadeResiduals


def tensors_for_tensors(function: Function) -> Function:
    """Make the results of a function tensors of torch if all arrays among its arguments are, those of residuals too.

    The other ranks hear of its errors. A call that is left in the middle, by Ctrl-C, leaves its communicators marked as
    unusable.
    """
    name, is_backward = function.__name__, function.__name__.endswith("_backward")

    @door
    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        communicates = is_backward or options.get("comm") is not None or options.get("batch_comm") is not None
        if communicates:
            program.count += 1
            program.name = name
        try:
            results = function(*arguments, **options)
        except Exception as error:
            if communicates:
                tell_from_here(error)
            raise
        except BaseException as error:
            comms = [comm for each in arguments if isinstance(each, MadeResiduals) for comm in each._comms]
            give_up([*comms, options.get("comm"), options.get("batch_comm")], function.__name__, error)
            raise
        return _like(results, arguments, options) if "torch" in sys.modules else results

    return call  # type: ignore[return-value]  # it has the signature of `function`


def tensors_on_this_rank(function: Function) -> Function:
    """Make the results tensors, as `tensors_for_tensors` does, of a function that is each rank's own affair."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        results = function(*arguments, **options)
        return _like(results, arguments, options) if "torch" in sys.modules else results

    return call  # type: ignore[return-value]  # as above


def _like(results: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    kinds = set(_kinds((*arguments, *options.values())))
    return _as_tensors(results) if kinds == {True} else results


def _kinds(values: Iterable[Any]) -> Iterator[bool]:
    """Yield for each array, and for residuals, whether it is a tensor."""
    for value in values:
        if isinstance(value, tuple):
            yield from _kinds(value)
        elif isinstance(value, MadeResiduals):
            yield value.of_tensors
        elif hasattr(value, "__dlpack__"):
            yield isinstance(value, sys.modules["torch"].Tensor)


def _as_tensors(results: Any) -> Any:
    """Return results with NumPy arrays as tensors, which share their memory; residuals remember it."""
    import torch

    if isinstance(results, tuple):
        parts = map(_as_tensors, results)
        return type(results)(*parts) if hasattr(results, "_fields") else tuple(parts)
    if isinstance(results, MadeResiduals):
        results.of_tensors = True
    elif isinstance(results, np.ndarray):
        if results.dtype.name == "bfloat16":
            return torch.from_numpy(results.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(results)
    return results
