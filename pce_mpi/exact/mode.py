"""The mode in which a training step has the same bits on any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
import os

_SETTING = "PCE_MPI_REPRODUCIBLE"


_AT_START = os.environ.get(_SETTING, "0")
_mode: ContextVar[bool] = ContextVar("reproducible", default=_AT_START == "1")


def _refuse() -> bool:
    raise ValueError(f"{_SETTING} must be 0 or 1, got {_AT_START!r}")


# Tells whether the mode is on, in every operation and without entering a Python function. Not the import refuses what
# the variable may not be: a command says it in one line.
is_reproducible = _mode.get if _AT_START in ("0", "1") else _refuse


@contextmanager
def reproducible(on: bool = True) -> Iterator[None]:
    """Compute with bits that depend on the global operands alone.

    Inside, every operation, its gradient, `clip_grad_norm`, `SGD` and `AdamW` give the same bits on any mesh, with any
    placements, split points and number of ranks, by any BLAS, instruction set and MPI. So any difference between two
    meshes is a fault of the program. Sums and matrix products are sums of integers, which are exact in any order (after
    Demmel and Nguyen, Parallel Reproducible Summation, 2015; Ozaki et al., Error-free transformations of matrix
    multiplication, 2012); functions such as `exp` are of `+ - * /` alone.

    Parameters
    ----------
    on : bool, default True
        False leaves the mode for a block.

    Raises
    ------
    NotImplementedError
        On every rank, by an operation of `pce_mpi.op` whose rule sums over an axis: it has no reproducible form.
    RuntimeError
        By a backward pass inside through what was computed outside, or the other way. By the next operation that
        communicates, on every rank, if the floating-point unit of a rank rounds otherwise than to nearest, or takes
        subnormal numbers for 0.

    Notes
    -----
    A sum over a sharded axis is reduced where it arises, so that nothing is Partial: one Allreduce of 4 bytes for each
    sum, and one of 8 bytes for each slice, after the agreement. The whole step belongs inside, on every rank. A thread
    that is started inside is outside, as with `no_grad`; `PCE_MPI_REPRODUCIBLE=1` turns the mode on for all of a
    program as it stands.

    A sum is off by less than the last bit of its largest term, and an element of a product by less than that of the
    largest element of its row times that of its column: terms that are smaller than this count as 0.

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
    token = _mode.set(on)
    try:
        yield
    finally:
        _mode.reset(token)
