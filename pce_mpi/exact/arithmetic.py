"""The two arithmetics: how numbers are added up, and which functions of elements compute.

A program chooses with `reproducible`. Operations, optimizers and collectives ask the current arithmetic for what they
need, and never which one it is. A node of the tape remembers the one that it was computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
import os
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, is_floating, is_half, number_of, numpy_dtype
from pce_mpi.comm.collectives import all_reduce, all_to_all, reduce_scatter
from pce_mpi.exact import functions
from pce_mpi.exact.sums import average, sums_of_squares
from pce_mpi.kernels import check_choice, converted as converted

_SETTING = "PCE_MPI_REPRODUCIBLE"
# Elements that are squared together, and stay in a cache.
_BLOCK, _BLOCK_ON_GPU = 2**16, 2**24


class Arithmetic:
    """The plain arithmetic: that of the array's library, its BLAS and MPI.

    name               its name when ranks agree on a call; `prefix` precedes the name of an operation that has run
    partial_gradients  the gradient of a made array may be Partial, and be reduced later, together with others
    rounds_to_nearest  bits are promised, so the floating-point unit must be in its usual state
    functions          the library that computes functions of an array's elements
    """

    name, prefix = "plain", ""
    partial_gradients = True
    rounds_to_nearest = False
    functions: Callable[[Array], Any] = staticmethod(array_namespace)

    def form(self, op: Any) -> Callable[..., Any]:
        """Return the function of `op` that computes."""
        return op.forward

    def rule(self, op: Any, rule: Any) -> Any:
        """Return the placement rule by which `op` runs."""
        return rule

    def total(self, partial: Array, comm: Any, averaging: tuple[float, float]) -> Array:
        """Divide partials by `averaging[0]`, add them up over the ranks of `comm`, divide the sum by `averaging[1]`.

        Collective over `comm`: one Allreduce.
        """
        found = all_reduce(_divided(partial, averaging[0]), comm, "sum")
        return _divided(found, averaging[1], overwrite=True).astype(partial.dtype, copy=False)

    def scattered_total(self, blocks: Sequence[Array], comm: Any, averaging: tuple[float, float]) -> Array:
        """Return this rank's block of such a sum over the ranks of `comm`; each rank passes one block for every rank.

        Collective over `comm`: one Reduce_scatter, or the bytes of one.
        """
        found = reduce_scatter([_divided(block, averaging[0]) for block in blocks], comm, "sum")
        return _divided(found, averaging[1], overwrite=True).astype(blocks[0].dtype, copy=False)

    def sums_of_squares(self, vectors: Sequence[Array], lengths: Sequence[int], comm: Any) -> list[float]:
        """Return numbers whose sum is that of all squared elements; vectors have `lengths` over all ranks of `comm`."""
        squares = []
        for vector in vectors:
            step = _BLOCK if array_namespace(vector) is np else _BLOCK_ON_GPU
            for start in range(0, len(vector), step):
                block = vector[start : start + step].astype(np.float64)
                block *= block
                squares.append(number_of(block.sum()))
        return all_reduce(np.array([sum(squares, 0.0)]), comm, "sum").tolist()


class Reproducible(Arithmetic):
    """Integer sums, and functions made of `+ - * /`: bits depend on the global operands alone."""

    name, prefix = "reproducible", "reproducible "
    partial_gradients = False  # an exact sum of zeros is 0.0, whatever their signs
    rounds_to_nearest = True

    @staticmethod
    def functions(array: Array) -> Any:
        return _own_functions(array_namespace(array))

    def form(self, op: Any) -> Callable[..., Any]:
        return op.composition or op.exact or op.forward

    def rule(self, op: Any, rule: Any) -> Any:
        if rule.reduces in ("sum", "avg") and self.form(op) is op.forward:
            raise NotImplementedError(
                f"{op.name} sums over shards by a rule of its own, and has no reproducible form: inside reproducible() "
                "compose it of the package's operations, or give it no rule, so that it runs on the whole arrays"
            )
        return replace(rule, linear=())  # nothing stays Partial

    def total(self, partial: Array, comm: Any, averaging: tuple[float, float]) -> Array:
        if not is_floating(partial.dtype):
            return super().total(partial, comm, averaging)
        found = average(partial[None], comm.size, comm, averaging[0] * averaging[1])
        return array_namespace(partial).asarray(found)  # NumPy's element of an array is a scalar

    def scattered_total(self, blocks: Sequence[Array], comm: Any, averaging: tuple[float, float]) -> Array:
        if not is_floating(blocks[0].dtype):
            return super().scattered_total(blocks, comm, averaging)
        # Each rank adds up all blocks for it, exactly and in any order; a reduce_scatter would send as many bytes.
        parts = all_to_all(blocks, comm, [blocks[comm.rank].shape] * comm.size)
        return average(array_namespace(blocks[0]).stack(parts), comm.size, None, averaging[0] * averaging[1])

    def sums_of_squares(self, vectors: Sequence[Array], lengths: Sequence[int], comm: Any) -> list[float]:
        return sums_of_squares(vectors, lengths, comm)


def _divided(array: Array, divisor: float, overwrite: bool = False) -> Array:
    """Return `array / divisor`; halves that are divided become float32, as they are rounded once, at the end."""
    if divisor == 1:
        return array
    quotient = array.astype(np.float32 if is_half(array.dtype) else array.dtype, copy=not overwrite)
    quotient /= quotient.dtype.type(divisor)
    return quotient


_OWN = {
    each.__name__: each
    for each in (
        *(functions.exp, functions.log, functions.log1p, functions.tanh, functions.sin, functions.cos),
        *(functions.power, functions.maximum, functions.minimum),
    )
}


class _OwnFunctions:
    """An array library in which our functions of elements take the place of its own."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._xp, name)
        if name in _OWN:
            found = partial(_computed, name, found)
        setattr(self, name, found)
        return found


def _computed(name: str, of_library: Callable[..., Array], *arrays: Array) -> Array:
    dtype = numpy_dtype(name)(*(x.dtype for x in arrays))
    if not is_floating(dtype):  # a power of integers is exact
        return of_library(*arrays)
    return _OWN[name](*(x if is_floating(x.dtype) else x.astype(np.float64) for x in arrays)).astype(dtype)


_own_functions = cache(_OwnFunctions)

PLAIN, REPRODUCIBLE = Arithmetic(), Reproducible()

_AT_START = os.environ.get(_SETTING, "0")
_current: ContextVar[Arithmetic] = ContextVar("arithmetic", default=PLAIN if _AT_START == "0" else REPRODUCIBLE)
set_current, reset_current = _current.set, _current.reset


def _refuse() -> Arithmetic:
    raise ValueError(f"{_SETTING} must be 0 or 1, got {_AT_START!r}")


#: Return the current arithmetic, without entering a Python function. A wrong value of the variable raises in this call
#: and not in the import, so that a command can report it in one line.
current = _current.get if _AT_START in ("0", "1") else _refuse


def check_settings() -> None:
    """Raise `ValueError` or `ImportError` if a variable of the environment names no arithmetic, or no kernel."""
    current()
    check_choice()


@contextmanager
def computing_in(arithmetic: Arithmetic) -> Iterator[None]:
    """Compute in an arithmetic."""
    token = set_current(arithmetic)
    try:
        yield
    finally:
        reset_current(token)


@contextmanager
def reproducible(on: bool = True) -> Iterator[None]:
    """Compute with bits that depend on the global operands alone.

    Inside, every operation, its gradient, `clip_grad_norm`, `SGD` and `AdamW` give the same bits on any mesh, with any
    placements, split points and number of ranks, by any BLAS, instruction set and MPI. So any difference between two
    meshes is a fault of the program. Sums and matrix products are sums of integers, which are exact in any order (after
    Demmel and Nguyen, Parallel Reproducible Summation, 2015; Ozaki et al., Error-free transformations of matrix
    multiplication, 2012); functions such as `exp` are made of `+ - * /` alone.

    Parameters
    ----------
    on : bool, default True
        False leaves the mode for a block.

    Raises
    ------
    NotImplementedError
        On every rank, by an operation of `pce_mpi.op` whose rule sums over an axis: it has no reproducible form.
    RuntimeError
        By the next operation that communicates, on every rank, if the floating-point unit of a rank rounds otherwise
        than to nearest, or takes subnormal numbers for 0.

    Notes
    -----
    A sum over a sharded axis is reduced where it arises, so that nothing is Partial: one Allreduce of 2 bytes for each
    sum, and one of 8 bytes for each slice, after the agreement. Run the whole step inside, on every rank; a gradient
    is computed as its operation was, wherever `backward` is called. A thread that is started inside the block runs
    outside the mode, as with `no_grad`; `PCE_MPI_REPRODUCIBLE=1` turns the mode on for a whole, unchanged program.

    The error of a sum is less than the last bit of its largest term. The error of an element of a product, before it is
    rounded, is at most 2^-25 of the product of the largest elements of its row and its column for each term; in float64
    it is less than the last bit of that product.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([1e16, 1.0, -1e16]), mesh, data=pce.Shard(0))
    >>> with pce.reproducible():
    ...     pce.sum(x).item()
    1.0
    """
    with computing_in(REPRODUCIBLE if on else PLAIN):
        yield
