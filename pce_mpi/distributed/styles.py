"""Styles: the placement of each parameter of a model along one dim of a mesh, by patterns of its name.

Matrices are used as `x @ w`, with w (in, out). With w split by columns, each rank computes its own features of the
result from all of x. With w split by rows, each rank needs only its own features of x, and the result is Partial. A
product of each kind, one after the other, is the tensor-parallel block, with one all-reduce at its end:

    styles = {"up*": Colwise(), "down*": Rowwise(), "norm.*": SequenceParallel(), "embedding": VocabParallel()}

The placement of an array between two layers is set by `x.redistribute(model=...)`.
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

    `x @ w + b` is sharded along its features, and nothing is sent. The gradient of x is Partial over the dim: the
    backward pass has the only all-reduce of this layer.
    """

    def placement(self, ndim: int) -> Placement:
        """Return the placement of an array along the dim.

        Parameters
        ----------
        ndim : int
            The number of its axes.

        Returns
        -------
        Shard or Replicate
            The placement.
        """
        if ndim < 1:
            raise ValueError("Colwise takes a matrix or a vector, got a 0-d array")
        return Shard(ndim - 1)


@dataclass(frozen=True)
class Rowwise:
    """Split over the inputs: a matrix (in, out) is Shard(-2), its bias (out,) Replicate.

    With x sharded along its features, as after `Colwise`, `x @ w` is Partial over the dim: the forward pass has the
    only all-reduce of this layer, or a reduce-scatter if the result is to be sharded along the sequence.
    """

    def placement(self, ndim: int) -> Placement:
        """Return the placement of an array along the dim; see `pce_mpi.Colwise.placement`."""
        return Shard(ndim - 2) if ndim >= 2 else Replicate()


@dataclass(frozen=True)
class SequenceParallel:
    """Replicate, for the scale and bias of norms whose input is sharded along the sequence.

    Each rank has seen only its own part of the sequence, so the gradient is Partial over the dim, and the step
    all-reduces it. With an input that is Replicate over the dim, the gradient is Replicate and nothing is sent.
    """

    def placement(self, ndim: int) -> Placement:
        """Return the placement of an array along the dim; see `pce_mpi.Colwise.placement`."""
        return Replicate()


@dataclass(frozen=True)
class VocabParallel:
    """Split over the entries of a vocabulary: an embedding table (entries, features) is Shard(0).

    A lookup of ids gives a Partial result. As the last layer, the transposed table gives logits whose class axis is
    sharded, and `cross_entropy` computes the loss without gathering them.
    """

    def placement(self, ndim: int) -> Placement:
        """Return the placement of an array along the dim; see `pce_mpi.Colwise.placement`."""
        if ndim < 1:
            raise ValueError("VocabParallel takes a table or a vector, got a 0-d array")
        return Shard(0)


@dataclass(frozen=True)
class Replicated:
    """Replicate: every rank holds the whole parameter and does the same work.

    The gradient is Replicate too, if the other operands are.
    """

    def placement(self, ndim: int) -> Placement:
        """Return the placement of an array along the dim; see `pce_mpi.Colwise.placement`."""
        return Replicate()


Style = Colwise | Rowwise | SequenceParallel | VocabParallel | Replicated


def shard_parameters(
    params: Mapping[str, Any], mesh: Mesh, styles: Mapping[str, Style], dim: str = "model"
) -> dict[str, DistArray]:
    """Make distributed parameters, each placed along one dim in the style that its name has in `styles`.

    Parameters
    ----------
    params : mapping of str to array_like
        Global arrays by name, of floating dtype, the same on every rank.
    mesh : Mesh
        The ranks.
    styles : mapping of str to style
        A style, such as `Colwise()`, for each pattern of names, as `fnmatch` has them (`*`, `?`, `[...]`; case counts).
        The first pattern that matches a name decides.
    dim : str, optional
        The dim along which the styles place parameters. They are Replicate over the other dims.

    Returns
    -------
    dict of str to DistArray
        Arrays that require a gradient, by the same names in the same order.

    Raises
    ------
    TypeError
        If an argument is no array, no mesh or no style.
    ValueError
        If a pattern matches no parameter, a parameter matches no pattern, or the mesh does not have `dim`.

    Notes
    -----
    Communicates nothing, and so raises on the rank that fails.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> params = {"up.w": np.ones((2, 8)), "up.b": np.zeros(8), "down.w": np.ones((8, 2))}
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1, model=1)
    >>> shard_parameters(params, mesh, {"up.*": Colwise(), "down.*": Rowwise()})["up.b"].placements
    {'data': Replicate(), 'model': Shard(0)}
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a dict of arrays by name, got {type(params).__name__}")
    if not isinstance(styles, Mapping):
        raise TypeError(f"styles must be a dict of styles by pattern, got {type(styles).__name__}")
    for what, names in (("a parameter", list(params)), ("a pattern of styles", list(styles))):
        for name in names:
            _check_name(name, what)
    for pattern, style in styles.items():
        _check_style(style, f"styles[{pattern!r}]")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a Mesh, got {type(mesh).__name__}")
    if not isinstance(dim, str) or dim not in mesh.dims:
        raise ValueError(f"the mesh has no dim {dim!r}; its dims are {', '.join(mesh.dims)}")
    chosen = {
        name: next((style for pattern, style in styles.items() if fnmatchcase(name, pattern)), None) for name in params
    }
    found = {
        "patterns that match no parameter": [
            pattern for pattern in styles if not any(fnmatchcase(name, pattern) for name in params)
        ],
        "parameters that no pattern matches": [name for name, style in chosen.items() if style is None],
    }
    if any(found.values()):
        raise ValueError("; ".join(f"{what}: {', '.join(map(repr, names))}" for what, names in found.items() if names))
    placed = {}
    for name, its_style in chosen.items():
        assert its_style is not None  # the error would have been raised
        array = as_array(params[name], f"params[{name!r}]")
        try:
            placements: dict[str, Any] = {dim: its_style.placement(array.ndim)}
            placed[name] = distribute(array, mesh, requires_grad=True, **placements)
        except (TypeError, ValueError) as error:
            raise type(error)(f"params[{name!r}]: {error}") from None
    return placed


def _check_name(name: Any, what: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of {what} must be a str, got {name!r}")


def _check_style(style: Any, what: str) -> None:
    if not isinstance(style, Style):
        called = f"; write {style.__name__}()" if isinstance(style, type) and issubclass(style, Style) else ""
        raise TypeError(f"{what} must be a style such as Colwise(), got {style!r}{called}")
