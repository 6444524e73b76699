"""The door of all functions of plain arrays: tensors of torch come out where only tensors go in, and DTensors where
logits are one; errors are told.

Torch is imported by those who make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
import sys
from typing import Any

import numpy as np

from pce_mpi.comm.communicators import tell
from pce_mpi.hints import hint_at_position
from pce_mpi.kernels import standard_arithmetic
from pce_mpi.loss.dtensors import Layout, call_on_mesh, groups_of, is_distributed
from pce_mpi.loss.options import Function
from pce_mpi.loss.passes import MadeResiduals


def tensors_for_tensors(function: Function) -> Function:
    """Make the results of a function tensors of torch if all arrays among its arguments are, those of residuals too.

    It computes in the standard arithmetic. An error that the ranks have not agreed on is told to those of `comm` and
    `batch_comm`.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            if "torch" in sys.modules:
                return _outside_graphs(function, arguments, options)
            with standard_arithmetic():
                return function(*arguments, **options)
        except BaseException as error:
            hint_at_position(error, function, "comm by position")
            comms = [comm for each in arguments if isinstance(each, MadeResiduals) for comm in each._comms]
            if not isinstance(error, Exception):  # otherwise nothing is told to groups of torch
                comms += groups_of([*arguments, *options.values()])
            tell(error, [*comms, options.get("comm"), options.get("batch_comm")], function.__name__)
            raise

    return call  # type: ignore[return-value]  # it has the signature of `function`


def tensors_on_this_rank(function: Function) -> Function:
    """Make the results tensors, as `tensors_for_tensors` does, of a function that is each rank's own affair."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch" in sys.modules:
            return _outside_graphs(function, arguments, options)
        with standard_arithmetic():
            return function(*arguments, **options)

    return call  # type: ignore[return-value]  # as above


def _outside_graphs(function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Call `function`; `torch.compile`, which cannot follow what NumPy and MPI do, breaks its graph here.

    It does so at `disable` itself, which therefore is called each time: it takes 10 us, and to keep what it returns is
    a state that graphs would have to guard.
    """
    if "torch._dynamo" in sys.modules:  # before that nothing is compiled; to import it would take seconds
        return sys.modules["torch"].compiler.disable(_called)(function, arguments, options)
    return _called(function, arguments, options)


def _called(function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    values = *arguments, *options.values()
    with standard_arithmetic():
        if any(map(is_distributed, values)) and (found := call_on_mesh(function, arguments, options)):
            return _converted(*found)
        results = function(*arguments, **options)
    return _converted(results) if set(_kinds(values)) == {True} else results


def _kinds(values: Iterable[Any]) -> Iterator[bool]:
    """Yield for each array, and for residuals, whether it is a tensor."""
    for value in values:
        if isinstance(value, tuple):
            yield from _kinds(value)
        elif isinstance(value, MadeResiduals):
            yield value.of_tensors
        elif hasattr(value, "__dlpack__"):
            yield isinstance(value, sys.modules["torch"].Tensor)


def _converted(
    results: Any,
    layout: Layout | None = None,
    convert: Callable[[Any, str], Any] = lambda tensor, name: tensor,
    name: str = "",
) -> Any:
    """Return results with tensors for NumPy arrays, which share their memory, converted; residuals remember it."""
    import torch

    if isinstance(results, tuple):
        names = getattr(results, "_fields", [""] * len(results))
        parts = [_converted(each, layout, convert, name) for each, name in zip(results, names, strict=True)]
        return type(results)(*parts) if hasattr(results, "_fields") else tuple(parts)
    if isinstance(results, MadeResiduals):
        results.of_tensors, results.layout = True, layout
    elif isinstance(results, np.ndarray):
        if results.dtype.name == "bfloat16":
            return convert(torch.from_numpy(results.view(np.int16)).view(torch.bfloat16), name)
        return convert(torch.from_numpy(results), name)
    return convert(results, name) if isinstance(results, torch.Tensor) else results
