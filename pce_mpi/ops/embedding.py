"""Look up rows of a table, which may be sharded by rows or by columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, Shape, array_namespace, as_array, check_one_library, is_true, to_host
from pce_mpi.autograd.apply import Call, Op, apply, operation, redistributed
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import Replicate
from pce_mpi.exact.sums import reduced, scattered
from pce_mpi.kernels import converted

_ROW, _COLUMN = Axis("row of the table"), Axis("column of the table")


def _rule(table: Shape, ids: Shape) -> Rule:
    """Return the rule: each shard of the table gives its own rows, and zeros for the others: a Partial result."""
    places = tuple(Axis(index) for index in range(len(ids)))
    return Rule(((_ROW, _COLUMN), places), (*places, _COLUMN), (*ids, table[1]), linear=((0,),), reduces="sum")


def _rows_here(call: Call, ids: Array, table: int) -> tuple[Array, Array]:
    """Return a mask of the `ids` that are rows of this shard of the table, and their row numbers in this shard."""
    start, stop = call.operands[table].block(0, call.mesh.coordinates)
    here = (ids >= start) & (ids < stop)
    return here, ids[here] - start


def _embedding(call: Call, table: Array, ids: Array) -> Array:
    if not call.operands[0].dims_of(0):
        return table[ids]
    here, rows = _rows_here(call, ids, 0)
    found = array_namespace(table).zeros(call.shape, table.dtype)
    found[here] = table[rows]
    return found


def _exact_embedding(call: Call, table: Array, ids: Array) -> Array:
    """Return the rows of all shards, as a sum of integers: the bits of this shard's rows, and 0 for all others."""
    found = array_namespace(table).ascontiguousarray(_embedding(call, table, ids))
    return reduced(found.view(f"i{found.dtype.itemsize}"), call.summed_comm).view(table.dtype)


def _gradient_rule(g: Shape, ids: Shape, table: Shape) -> Rule:
    places = tuple(Axis(index) for index in range(len(ids)))
    return Rule(((*places, _COLUMN), places, (_ROW, _COLUMN)), (_ROW, _COLUMN), table, linear=((0,),), reduces="sum")


def _gradient(call: Call, g: Array, ids: Array, table: Array) -> Array:
    here, rows = _rows_here(call, ids, 2)
    gradient = array_namespace(g).zeros(call.shape, g.dtype)
    scatter_rows("add", gradient, rows, g[here])
    return gradient


def _exact_gradient(call: Call, g: Array, ids: Array, table: Array) -> Array:
    here, rows = _rows_here(call, ids, 2)
    found = scattered(
        lambda how, zeros, values: scatter_rows(how, zeros, rows, values),
        lambda zeros: zeros[rows],
        g[here],
        call.shape,
        math.prod(call.operands[1].shape),
        call.summed_comm,
    )
    return converted(found, g.dtype)


# The table is an operand for its sharding alone: each rank adds up the rows of its own shard.
_GRADIENT = Op("embedding", _gradient, rule=_gradient_rule, dtype=lambda g, *_: g, wide=True, exact=_exact_gradient)


_EMBEDDING = Op(
    "embedding",
    _embedding,
    (
        # Its natural placement: a Partial table is not reduced, as its elements are not used.
        lambda g, y, table, ids: apply(_GRADIENT, g, ids, DistArray(table.local, table.mesh, table.sharding.natural)),
        None,
    ),
    _rule,
    dtype=lambda table, ids: table,
    uses=[(1,)],
    exact=_exact_embedding,
)


@operation
def embedding(ids: Any, table: Any) -> DistArray:
    """Look up rows of a table: `table[ids]`.

    Parameters
    ----------
    ids : DistArray or array_like of integers
        Row numbers in [0, rows), of any shape.
    table : DistArray or array_like of shape (rows, columns)
        The table.

    Returns
    -------
    DistArray
        The rows, of shape `ids.shape + (columns,)`, in the table's dtype. Sharded ids and columns stay sharded. If the
        rows of the table are sharded the result is Partial: each rank holds the rows of its shard, and zeros.

    Raises
    ------
    IndexError
        On every rank, if an id is outside [0, rows); negative ids do not count from the end.
    TypeError
        If the ids are not integers.
    ValueError
        If the table does not have two axes.

    Notes
    -----
    Collective over the mesh: an Allgather of 56 bytes. Ids that are sharded over a dim that shards the rows of the
    table are gathered first. The gradient of a row sums over the ids that name it; it is Partial if ids are sharded.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> y = pce.embedding(np.array([1, 0]), pce.distribute(np.eye(2), mesh, data=pce.Shard(0)))
    >>> y.placements, y.full()
    ({'data': Partial('sum')}, array([[0., 1.],
           [1., 0.]]))
    """
    table = table if isinstance(table, DistArray) else as_array(table, "table")
    if table.ndim != 2:
        raise ValueError(f"an embedding's table has two axes, got shape {table.shape}")
    error: Exception | None = None
    try:  # plain ids may be wrong on one rank alone; the agreement of the lookup tells the others
        ids = ids if isinstance(ids, DistArray) else as_array(ids, "ids")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        named = {"ids": ids, "table": table}
        check_one_library({name: x.local if isinstance(x, DistArray) else x for name, x in named.items()})
    except TypeError as found:
        error = found
    mesh = next((x.mesh for x in (table, ids) if isinstance(x, DistArray)), None)
    if mesh is None or (error is not None and isinstance(ids, DistArray)):
        raise error or TypeError("embedding takes at least one DistArray; make one with pce_mpi.distribute")
    if isinstance(ids, DistArray):
        # Every rank that holds rows of the table looks up all ids, and a partial is no id.
        rows = table.sharding.dims_of(0) if isinstance(table, DistArray) else ()
        everywhere = dict.fromkeys((*ids.sharding.partial_dims, *rows), Replicate())
        with cause("embedding", reason="ids are looked up in every shard of the table"):
            ids = redistributed(ids, ids.sharding.with_placements(everywhere))
    if error is None:
        local = to_host(ids.local if isinstance(ids, DistArray) else ids)
        outside = (local < 0) | (local >= table.shape[0])
        if is_true(outside.any()):
            error = IndexError(f"id {local[outside].flat[0]} is outside [0, {table.shape[0]})")
    mesh.agree(mesh.dims, "embedding", {"rows": table.shape[0]}, error)
    return apply(_EMBEDDING, table, ids)


def scatter_rows(how: str, target: Any, rows: Any, values: Any) -> None:
    """Add values[i] to target[rows[i]] for each i, also if rows repeat; with `how` "maximum" take the larger instead.

    `target` is (v, d), `rows` (n,) integers in [0, v), `values` (n, d), all of one library. On the host, equal
    arguments give equal bits: the values of a row are summed in their order and then added.
    """
    xp = array_namespace(target)
    ufunc = getattr(xp, how)
    if xp is not np:
        ufunc.at(target, rows, values)
        return
    order = np.argsort(rows, kind="stable")
    met, first = np.unique(rows[order], return_index=True)
    if met.size:  # reduceat takes no empty arrays
        target[met] = ufunc(target[met], ufunc.reduceat(values[order], first))
