"""Operations made from the user's functions of plain arrays, and NumPy's functions on distributed arrays.

Without a rule an operation gathers its operands; for a function of NumPy that has none of ours, it warns once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import inspect
from typing import Any
import warnings

import numpy as np

from pce_mpi.autograd.apply import Op, Vjp, apply
from pce_mpi.autograd.rules import Rule
from pce_mpi.comm.calls import public
from pce_mpi.distributed.array import OPERATIONS, DistArray
from pce_mpi.ops.classes import argmax
from pce_mpi.ops.elementwise import abs
from pce_mpi.ops.products import einsum
from pce_mpi.ops.reductions import max, min
from pce_mpi.ops.shape import reshape, swapaxes


def op(
    forward: Callable[..., Any],
    vjp: Vjp | Sequence[Vjp | None] | None = None,
    rule: Callable[..., Rule] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Make an operation on distributed arrays from a function of plain arrays.

    Parameters
    ----------
    forward : callable
        Takes the local arrays of the operands, and parameters by name; returns an array or a tuple of arrays.
    vjp : callable or sequence of callable or None, optional
        One function, or one for each operand; None for an operand without a gradient. It takes the gradient of the
        result, the result and the operands, all distributed, and the parameters by name; it returns the gradient of
        its operand, which is that of the global array. If several results are real numbers, it takes the tuple of
        their gradients, with zeros for those that nothing was computed from, and the tuple of these results.
    rule : callable, optional
        Takes the global shapes of the operands, and the parameters by name; returns a `Rule` (see `Rule.of`). Without
        a rule the operation runs on Replicate operands on every rank: slow, never wrong, and the trace shows it.
    name : str, optional
        The name in the trace and in errors; that of `forward` unless given.

    Returns
    -------
    callable
        A function of distributed arrays, and of parameters by name.

    Raises
    ------
    TypeError
        If `forward` or `rule` is not callable, or `vjp` or `name` is none.

    Notes
    -----
    A backward pass through an operation without a `vjp` raises `NotImplementedError`, which names the operation.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> inverse = pce.op(np.linalg.inv, lambda g, y, x: -(y.T @ g @ y.T))
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> inverse(pce.distribute(np.eye(2) * 2, mesh, data=pce.Shard(0))).full()
    array([[0.5, 0. ],
           [0. , 0.5]])
    """
    if not callable(forward) or not (rule is None or callable(rule)):
        raise TypeError(f"forward and rule must be functions, got {forward!r} and {rule!r}")
    if not isinstance(name, str | None):
        raise TypeError(f"name must be a str, got {name!r}")
    vjps = (vjp,) if callable(vjp) else () if vjp is None else vjp
    if not isinstance(vjps, Sequence) or not all(each is None or callable(each) for each in vjps):
        raise TypeError(f"vjp must be a function, or a sequence of functions and None, got {vjp!r}")
    name = name or str(getattr(forward, "__name__", type(forward).__name__))
    made = Op(name, lambda call, *arrays, **parameters: forward(*arrays, **parameters), tuple(vjps), rule)

    def operation(*operands: Any, **parameters: Any) -> Any:
        return apply(made, *operands, **parameters)

    operation.__name__ = operation.__qualname__ = made.name
    operation.__doc__ = forward.__doc__
    return public(operation)


# Functions whose name or arguments in NumPy differ from those in `OPERATIONS`.
_OTHERWISE: dict[str, Callable[..., Any]] = {
    "einsum": einsum,
    "argmax": lambda a, axis=None: argmax(reshape(a, -1)) if axis is None else argmax(a, axis=axis),
    "absolute": abs,
    "amax": max,
    "amin": min,
    "ndim": lambda a: a.ndim,
    "shape": lambda a: a.shape,
    "size": lambda a, axis=None: a.size if axis is None else a.shape[axis],
    "matrix_transpose": lambda x: swapaxes(x, -1, -2),
    "isnan": lambda x: OPERATIONS["not_equal"](x, x),
    "isinf": lambda x: OPERATIONS["equal"](abs(x), np.inf),
    "isfinite": lambda x: OPERATIONS["less"](abs(x), np.inf),
    "can_cast": lambda from_, to, casting="safe": np.can_cast(from_.dtype, to, casting),
    "result_type": lambda *a: np.result_type(*(x.dtype if isinstance(x, DistArray) else x for x in a)),
}


def _ours(name: str) -> Callable[..., Any] | None:
    """Return our function for NumPy's function `name`, if there is one."""
    return _OTHERWISE.get(name) or OPERATIONS.get(name)


def call_ufunc(ufunc: Any, method: str, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return `ufunc.method(*operands, **options)` of distributed arrays."""
    if options.get("out") is not None or method == "at":
        raise TypeError(f"a distributed array is never written to: {ufunc.__name__} takes no out, and has no at")
    known: Any = getattr(np, ufunc.__name__, None)  # other libraries have ufuncs with the same names
    own = _ours(ufunc.__name__) if known is ufunc else None
    if own is not None and method == "__call__" and not options:
        return own(*operands)
    function = getattr(ufunc, method)
    _warn_once(f"numpy.{ufunc.__name__}", operands)
    dtypes = [np.dtype(options["dtype"])] if options.get("dtype") else []

    def forward(*arrays: Any, **_: Any) -> Any:
        if method in ("__call__", "outer"):  # those of ml_dtypes are right
            return function(*arrays, **options)
        return _narrowed(function(*map(_wide, arrays), **options), [*(each.dtype for each in arrays), *dtypes])

    # The options are parameters for the ranks to compare.
    return op(forward, name=f"numpy.{ufunc.__name__}")(*operands, method=method, options=tuple(options.items()))


def call_function(function: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return `function(*positional, **named)` of distributed arrays."""
    if named.get("out") is not None:
        raise TypeError(f"a distributed array is never written to: {function.__name__} takes no out")
    if function.__name__ in _WRITERS:
        raise TypeError(f"numpy.{function.__name__} would write on every rank; pce_mpi.save writes one file")
    own = _ours(function.__name__) if function.__module__ in ("numpy", "numpy.linalg") else None
    if own is not None and _fits(own, positional, named):
        return own(*positional, **named)
    found: list[DistArray] = []
    given: list[np.dtype[Any]] = [np.dtype(named["dtype"])] if named.get("dtype") is not None else []
    named_parts: list[Any] = []

    def taken_out(value: Any) -> Any:
        """Replace each distributed array in `value` by its place in `found`."""
        if isinstance(value, DistArray):
            found.append(value)
            return _Place(len(found) - 1)
        if isinstance(value, np.ndarray | np.generic):
            given.append(value.dtype)
        elif isinstance(value, np.dtype | type):
            given.append(np.dtype(value))
        return type(value)(map(taken_out, value)) if type(value) in (list, tuple) else value

    places = taken_out(tuple(positional)), {name: taken_out(value) for name, value in named.items()}

    def forward(*arrays: Any, **_: Any) -> Any:
        def put_back(value: Any) -> Any:
            if isinstance(value, _Place):
                return _read_only(_wide(arrays[value]))
            if isinstance(value, np.ndarray):
                return _wide(value)
            return type(value)(map(put_back, value)) if type(value) in (list, tuple) else value

        result = function(*put_back(places[0]), **{name: put_back(value) for name, value in places[1].items()})
        if hasattr(result, "_fields"):  # numpy.linalg names some parts
            named_parts.append(type(result))
        return _narrowed(result, [*(each.dtype for each in arrays), *given])

    _warn_once(f"numpy.{function.__name__}", found)
    # The arguments are parameters for the ranks to compare.
    arguments = {"positional": places[0], "named": tuple(places[1].items())}
    results = op(forward, name=f"numpy.{function.__name__}")(*found, **arguments)
    return named_parts[0](*results) if named_parts else results


def _wide(array: Any) -> Any:
    """Return `array`, bfloat16 as float32: ml_dtypes does not sort a nan, takes it for none, and adds in bfloat16."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _narrowed(result: Any, dtypes: Sequence[np.dtype[Any]]) -> Any:
    """Return the `result` of a function that took bfloat16 as float32; `dtypes` are those that it was given."""
    floating = [dtype for dtype in dtypes if dtype.kind not in "biu"]
    if {dtype.name for dtype in floating} != {"bfloat16"}:
        return result
    if isinstance(result, tuple | list):
        return [_narrowed(part, dtypes) for part in result]
    return result.astype(floating[0]) if getattr(result, "dtype", None) == np.float32 else result


_WRITERS = {"save", "savez", "savez_compressed", "savetxt"}

_warned: set[str] = set()


def _warn_once(name: str, operands: Sequence[Any]) -> None:
    """Warn how many bytes the function `name`, which has no rule, gathers: on every rank, in the first call alone."""
    arrays = [x for x in operands if isinstance(x, DistArray) and x.sharding is not x.sharding.replicated]
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    if size and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} has no placement rule and runs on the whole array on every rank: {size:,} bytes are gathered, and "
            "again in each later call, without this warning. Gather once by .full(), or give it a rule by pce_mpi.op",
            stacklevel=5,
        )


def _read_only(array: Any) -> Any:
    """Return a view that functions such as numpy.copyto cannot write to."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


class _Place(int):
    """The place of an array among the arguments."""


def _fits(own: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> bool:
    if len(positional) > 2 and "keepdims" in inspect.signature(own).parameters:
        return False  # the third argument of NumPy's reductions is a dtype or out
    signature = inspect.signature(own)
    try:
        given = signature.bind(*positional, **named).arguments
    except TypeError:
        return False
    # numpy.einsum also takes lists of axes in place of letters.
    texts = [name for name in given if signature.parameters[name].annotation == "str"]
    return all(isinstance(given[name], str) for name in texts)
