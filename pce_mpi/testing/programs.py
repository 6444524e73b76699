"""A program on one rank and on many: the first operation whose result differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.arrays import is_floating, is_real
from pce_mpi.comm.agreement import local_checks
from pce_mpi.comm.calls import public
from pce_mpi.comm.library import comm_text, is_comm
from pce_mpi.comm.tracing import current_phase, current_scope, listening
from pce_mpi.comm.waits import current_line
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.testing.assertions import Place, Together, elements_off, held_by, leaves, not_negative, other_bits, part_of
from pce_mpi.testing.placing import alone
from pce_mpi.ulps import distances, ulp
from pce_mpi.validation import flag

if TYPE_CHECKING:
    from mpi4py import MPI

Array = np.ndarray[Any, Any]

__tracebackhide__ = True  # as in assertions.py


@partial(public, finds_mesh=False)
def compare_with_one_process(
    program: Callable[[Mesh], object], mesh: Mesh | MPI.Intracomm, *, most: float = 64.0, bits: bool = False
) -> None:
    """Run a program on one rank and on many, and assert that every operation gives the same result.

    Each element of a result, of the forward pass and of the backward pass, must have |many - one| <= most ulp(m), where
    m is the largest finite magnitude in the whole result on one rank, and ulp(m) the distance of neighbours around m in
    the dtype of the result: numbers that cancel have the error of their terms. Integers and bool must be equal. What
    the program returns must have the same parts, by their indices and keys, and is compared in the same way.

    Parameters
    ----------
    program : callable
        Takes a mesh, makes distributed arrays on it, and may return some, or plain arrays and numbers, also in lists,
        tuples and dicts. It runs twice and must begin anew each time: with the same numbers, whatever the mesh.
    mesh : Mesh or mpi4py.MPI.Intracomm
        The mesh of many ranks; a communicator stands for `Mesh(comm, data=comm.size)`. The mesh of one rank has the
        same dims.
    most : float, optional
        The number of ulps that are allowed: the order of a sum costs less than 1 for each of its terms.
    bits : bool, optional
        Results must have equal bits, as those inside `pce_mpi.reproducible` have; all nan count as equal.

    Raises
    ------
    AssertionError
        If a result differs, on every rank. The text names the first such operation, by its number among the operations
        on the mesh, its name, the line of the program, the phase and `named_scope`; and for each rank on which elements
        differ, how many do, and of the worst ones the global index and both numbers.
    TypeError, ValueError
        If an argument is wrong, on every rank.
    Exception
        The error that the program raises.

    Notes
    -----
    Collective over the mesh: what the program sends, the reduction of each Partial result, an Allgather of 56 bytes and
    text. Each rank runs the whole program alone first, and keeps copies of all results of both runs.

    Functions of plain arrays, such as `softmax_cross_entropy`, are no operations on the mesh; return what they give. If
    the program goes another way on many ranks, as after `if mesh.size > 1`, the operations from there on are not
    compared, and what it returns still is.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> from pce_mpi.testing.programs import compare_with_one_process
    >>> def program(mesh):
    ...     x = pce.distribute(np.arange(6.0).reshape(2, 3), mesh, data=pce.Shard(0))
    ...     return pce.softmax(x, axis=0)
    >>> compare_with_one_process(program, MPI.COMM_WORLD)
    """
    if not isinstance(mesh, Mesh):
        if not is_comm(mesh):
            raise TypeError(f"mesh must be a Mesh or an mpi4py intracommunicator, got {comm_text(mesh)}")
        return compare_with_one_process(program, Mesh(mesh, data=mesh.size), most=most, bits=bits)
    if mesh.is_hollow:
        raise TypeError("compare_with_one_process compares elements, which arrays of a mesh without ranks do not have")
    ranks = Together("compare_with_one_process", *mesh.along(mesh.dims))
    with local_checks() as checks:
        most, bits = not_negative(most, "most"), flag(bits, "bits")
        if not callable(program):
            raise TypeError(f"program must be a function that takes a mesh, got {program!r}")
    ranks.agree(checks.error, most=most, bits=bits)
    one, many = _run(program, alone(*mesh.dims)), _run(program, mesh)
    differing = (
        (number, f"{name} {difference}")
        for number, name, here, there in _pairs(many, one)
        if (difference := here.difference(there, most, bits))
    )
    number, failure = next(differing, (0, ""))
    ranks.fail(failure, number)


@dataclass(frozen=True, eq=False)
class _Result:
    """This rank's part of a result: of an operation `at` a phase, a line and a scope, or of the program."""

    name: str
    at: tuple[str, str, str]
    shape: tuple[int, ...]
    held: Array
    place: Place

    @staticmethod
    def of(name: str, value: Any, at: tuple[str, str, str] = ("", "", "")) -> _Result:
        """Return the part of `value`; a copy, as a step may write to it."""
        if isinstance(value, DistArray):
            held, place = held_by(value)
            return _Result(name, at, value.shape, held.copy(), place)
        plain = np.array(value)
        return _Result(name, at, plain.shape, plain, ())

    def __str__(self) -> str:
        phase, line, scope = self.at
        backward = f", {phase}" if phase != "forward" else ""
        return f"{self.name} at {line}{backward}{scope and f', in {scope}'}"

    @np.errstate(all="ignore")
    def difference(self, one: _Result, most: float, bits: bool) -> str:
        """Say how this result of many ranks differs from that of one; "" if it does not."""
        if self.name != one.name:  # a part of what the program returns: operations of two names are no pair
            return f"is missing on one rank, which has {one.name}"
        dtype = self.held.dtype
        if (dtype, self.shape) != (one.held.dtype, one.shape):
            return f"is {dtype} {self.shape}, on one rank {one.held.dtype} {one.shape}"
        right = part_of(one.held, self.place)
        if bits and is_real(dtype):
            return other_bits("has other bits than on one rank", self.held, right, self.place)
        if is_floating(dtype):
            finite = np.abs(one.held[np.isfinite(one.held)].astype(np.float64))
            ulps = distances(self.held, right) / ulp(finite.max(initial=0.0), dtype)
            title, off = f"is more than {most:g} ulp of {dtype} off", ulps > most
        else:
            title, off = "differs", self.held != right
            ulps = np.where(off, np.inf, 0.0)

        def describe(index: tuple[int, ...]) -> str:
            apart = f", {ulps[index]:.3g} ulp" if np.isfinite(ulps[index]) else ""
            return f"{self.held[index]!s}, on one rank {right[index]!s}{apart}"

        return elements_off(title, off, describe, place=self.place, distance=ulps)


Run = tuple[list[_Result], list[_Result]]


def _run(program: Callable[[Mesh], object], mesh: Mesh) -> Run:
    """Return the results of the operations of a program, and what it returns."""
    results: list[_Result] = []

    def listen(operation: str, x: DistArray) -> None:
        if x.mesh is mesh:
            results.append(_Result.of(operation, x, (current_phase(), current_line(), current_scope())))

    with listening(listen):
        returned = program(mesh)
    return results, [_Result.of(f"the returned value{path}", leaf) for path, leaf in leaves(returned)]


def _pairs(many: Run, one: Run) -> Iterator[tuple[int, str, _Result, _Result]]:
    """Yield results that must be equal, with the number and the text of each: those that are returned come last."""
    (results, returned), (expected, expected_returned) = many, one
    for number, (here, there) in enumerate(zip(results, expected, strict=False), start=1):
        if (here.name, here.at) != (there.name, there.at):
            break  # the programs go different ways
        yield number, f"operation {number} of {len(results)}, {here},", here, there
    for here, there in zip(returned, expected_returned, strict=False):
        yield len(results) + 1, here.name, here, there
