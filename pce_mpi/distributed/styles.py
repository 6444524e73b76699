"""Plans: how the parameters of a model lie along one dim of a mesh, said once, by patterns of their names.

Matrices are used as `x @ w`, with w (in, out). Split by columns, each rank computes its own features of the result from
all of x; split by rows, each rank needs its own features of x only and gives a term of the result. One after the other
they make the tensor-parallel block, with one all-reduce at its end:

    plan = {"up*": Colwise(), "down*": Rowwise(), "norm.*": SequenceParallel(), "embedding": VocabParallel()}

What lies between two layers is said where the layers are called, by `x.redistribute(model=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pce_mpi.arrays import as_array
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.creation import distribute
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement, Replicate, Shard


@dataclass(frozen=True)
class Colwise:
    """Split over the outputs: a matrix (in, out) is Shard(-1), its bias (out,) Shard(0).

    x @ w + b is sharded along its features, and nothing is sent for it. The gradient of x is Partial over the dim: the
    one all-reduce of this layer comes in the backward pass.
    """

    def placement(self, ndim: int) -> Placement:
        """Where an array of `ndim` axes lies along the plan's dim."""
        if ndim < 1:
            raise ValueError("Colwise takes a matrix or a vector, got a 0-d array")
        return Shard(ndim - 1)


@dataclass(frozen=True)
class Rowwise:
    """Split over the inputs: a matrix (in, out) is Shard(-2), its bias (out,) Replicate.

    With x sharded along its features, as Colwise leaves it, x @ w is Partial over the dim: the one all-reduce of this
    layer comes in the forward pass, or a reduce-scatter if the result is to be sharded along the sequence.
    """

    def placement(self, ndim: int) -> Placement:
        """Where an array of `ndim` axes lies along the plan's dim."""
        return Shard(ndim - 2) if ndim >= 2 else Replicate()


@dataclass(frozen=True)
class SequenceParallel:
    """Replicate, for the scale and bias of norms whose input is sharded along the sequence.

    Each rank has seen its own part of the sequence only, so that the gradient is Partial over the dim and the step
    all-reduces it. With an input that is Replicate over the dim, the gradient is Replicate and nothing is sent.
    """

    def placement(self, ndim: int) -> Placement:
        """Where an array of `ndim` axes lies along the plan's dim."""
        return Replicate()


@dataclass(frozen=True)
class VocabParallel:
    """Split over the entries of a vocabulary: an embedding table (entries, features) is Shard(0).

    Looking ids up in it gives a Partial result. Transposed, as the last layer, it gives logits whose class axis is
    sharded, from which `cross_entropy` takes the loss without gathering them.
    """

    def placement(self, ndim: int) -> Placement:
        """Where an array of `ndim` axes lies along the plan's dim."""
        if ndim < 1:
            raise ValueError("VocabParallel takes a table or a vector, got a 0-d array")
        return Shard(0)


@dataclass(frozen=True)
class Replicated:
    """Replicate: every rank holds all of it and does the same work.

    The gradient is Replicate too, as long as what the parameter is used with is.
    """

    def placement(self, ndim: int) -> Placement:
        """Where an array of `ndim` axes lies along the plan's dim."""
        return Replicate()


Style = Colwise | Rowwise | SequenceParallel | VocabParallel | Replicated


def shard_parameters(
    params: Mapping[str, Any], mesh: Mesh, plan: Mapping[str, Style], dim: str = "model"
) -> dict[str, DistArray]:
    """The arrays of `params` as distributed parameters, lying along `dim` as `plan` says, Replicate over other dims.

    `params`: global arrays by name, the same on every rank, of floating dtype. `plan`: a style for each pattern of
    names, as `fnmatch` has them (`*`, `?`, `[...]`; case counts); the first pattern that matches a name decides.

    Returns arrays that require a gradient, by the same names in the same order. Communicates nothing, and so raises
    where it fails: `ValueError` for patterns that match no parameter and parameters that no pattern matches, all of
    them named, and for a mesh without `dim`; `TypeError` for what is no style, no mesh or no array.

    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> params = {"up.w": np.ones((2, 8)), "up.b": np.zeros(8), "down.w": np.ones((8, 2))}
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1, model=1)
    >>> shard_parameters(params, mesh, {"up.*": Colwise(), "down.*": Rowwise()})["up.b"].placements
    {'data': Replicate(), 'model': Shard(0)}
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a dict of arrays by name, got {type(params).__name__}")
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a dict of styles by pattern, got {type(plan).__name__}")
    for what, names in (("a parameter", list(params)), ("a pattern of plan", list(plan))):
        for name in names:
            _check_name(name, what)
    for pattern, style in plan.items():
        _check_style(style, f"plan[{pattern!r}]")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")
    if dim not in mesh.dims:
        raise ValueError(f"the mesh has no dim {dim!r}; its dims are {', '.join(mesh.dims)}")
    styles = {
        name: next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None) for name in params
    }
    found = {
        "patterns that match no parameter": [
            pattern for pattern in plan if not any(fnmatchcase(name, pattern) for name in params)
        ],
        "parameters that no pattern matches": [name for name, style in styles.items() if style is None],
    }
    if any(found.values()):
        raise ValueError("; ".join(f"{what}: {', '.join(map(repr, names))}" for what, names in found.items() if names))
    placed = {}
    for name, chosen in styles.items():
        assert chosen is not None  # the error would have been raised
        array = as_array(params[name], f"params[{name!r}]")
        try:
            placements: dict[str, Any] = {dim: chosen.placement(array.ndim)}
            placed[name] = distribute(array, mesh, requires_grad=True, **placements)
        except (TypeError, ValueError) as error:
            raise type(error)(f"params[{name!r}]: {error}") from error
    return placed


def _check_name(name: Any, what: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of {what} must be a str, got {name!r}")


def _check_style(style: Any, what: str) -> None:
    if not isinstance(style, Style):
        called = f"; write {style.__name__}()" if isinstance(style, type) and issubclass(style, Style) else ""
        raise TypeError(f"{what} must be a style such as Colwise(), got {style!r}{called}")
