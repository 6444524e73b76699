"""The definition of an operation: forward, vjp and placement rule together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.sharding import Sharding

Vjp = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. Its functions take the operands in order and the parameters by name.

    forward       the local arrays of the operands -> that of the result, or a tuple of them, of one shape
    vjps          for each operand: gradient of the result, result, operands -> gradient of the operand, all of them
                  `DistArray`; None for an operand that has none. If several results are real numbers the first two are
                  tuples, with zeros for the gradient of a result that nothing was computed from
    rule          the global shapes of the operands -> `Rule`; None: the operation runs on Replicate operands
    dtype         the dtypes of the operands -> that of the result
    uses          for each of `vjps` the operands whose elements it uses, -1 for the result; the tape holds only these.
                  A vjp sees the shardings of the others, but no elements. None: all of them
    takes_shardings  `forward` takes the `shardings` of the local arrays too
    relays        the vjp gives the same elements in another order, shape or dtype: a Partial gradient stays Partial,
                  as it may be on its way to a parameter, whose gradients add up without communication
    gives_residuals  `forward` returns something else besides, which the vjps take as `residuals`
    views         the result of `forward` may share the memory of an operand
    exact         `forward` inside `reproducible`, for operations that sum: takes the `shardings` too, and reduces the
                  sums itself over the ranks of `shardings.summed`, so that the result is not Partial
    """

    name: str
    forward: Callable[..., Any]
    vjps: Sequence[Vjp | None] = ()
    rule: Callable[..., Rule] | None = None
    dtype: Callable[..., Any] = np.result_type
    uses: Sequence[Sequence[int]] | None = None
    takes_shardings: bool = False
    relays: bool = False
    gives_residuals: bool = False
    views: bool = False
    exact: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Shardings:
    """The shardings of one call; `required` says of each operand whether it requires a gradient.

    `summed` has the dims over which `exact` reduces its sums, and `made` says of each operand whether it is an array
    that was made, such as a parameter, or a view of one.
    """

    mesh: Mesh
    operands: tuple[Sharding, ...]
    result: Sharding
    required: tuple[bool, ...]
    summed: tuple[str, ...] = ()
    made: tuple[bool, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result on this rank."""
        return self.result.local_shape(self.mesh.coordinates)

    def dims(self, axes: Sequence[int]) -> tuple[str, ...]:
        """Return the dims that shard `axes` of the first operand."""
        return tuple(dim for dim in self.mesh.dims if any(dim in self.operands[0].dims_of(axis) for axis in axes))

    def comm(self, axes: Sequence[int]) -> Any:
        """Return the communicator over those dims; None if there are none."""
        dims = self.dims(axes)
        return self.mesh.comm(*dims) if dims else None

    @property
    def summed_comm(self) -> Any:
        """The communicator over the dims whose sums are reduced; None if there are none."""
        return self.mesh.comm(*self.summed) if self.summed else None
