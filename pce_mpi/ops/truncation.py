"""The classes that top-k, top-p and min-p leave, wherever axes are sharded, on top of `loss/truncation.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from pce_mpi.arrays import array_namespace, to_host
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Partial
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.kernels import standard_arithmetic
from pce_mpi.loss.options import AxisOptions, Options, ShardedAxisOptions, takes
from pce_mpi.loss.tensors import tensors_for_tensors
from pce_mpi.loss.truncation import Limits, Nucleus, nucleus_of
from pce_mpi.ops.primitive import sharded_options
from pce_mpi.ops.shape import normalized_axis

HostArray = np.ndarray[Any, Any]


@takes(ShardedAxisOptions)
@tensors_for_tensors
def nucleus(
    logits: Any,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logit_scale: float = 1.0,
    **options: Unpack[ShardedAxisOptions],
) -> Nucleus:
    """Find the classes of rows that top-k, then top-p, then min-p leave, of a distributed array or of plain shards.

    The steps and their order are those of Hugging Face's transformers, in exact arithmetic: with z =
    logit_scale x, x being the logits, p the softmax of z, and classes in the order of their logits, the largest first
    and among equal ones the lowest class first,

    - top-k keeps the classes whose logit is at least the k-th, all that are equal to it included;
    - top-p keeps, of these, each class before which less than `top_p` of their mass comes: all up to and including the
      one that reaches it, and so at least one. Among equal logits those of the lowest classes are kept;
    - min-p keeps, of these, each class c with p_c >= `min_p` max p, decided as x_c - max x >= log(min_p) / logit_scale.

    Parameters
    ----------
    logits : DistArray or array
        A distributed array, which is reduced first if it is Partial; or this rank's classes of the same rows, as
        `softmax_cross_entropy` takes them. Only these take `comm`, `class_start` and `num_classes`. A class with the
        logit -inf is never kept.
    top_k : int, optional
        At least 1; more than there are classes are all.
    top_p, min_p : float, optional
        In (0, 1] and [0, 1]; 1 and 0 keep all.
    logit_scale : float, default 1.0
        From 2**-64 to 2**64: 1 / T for a temperature T. It changes the mass of a class and never the order of two.

    Returns
    -------
    Nucleus
        `ids`, `offsets`, `mass` and `log_mass`, arrays with the same bits on every rank, for any number of ranks and
        any split; for a distributed array they are of all rows, on every rank, and have no gradient. A row with a nan
        or a +inf, or of only -inf, keeps nothing and has a mass of nan.

    Raises
    ------
    ValueError
        For a limit or a scale out of range.
    TypeError
        For hollow arrays, as the number of classes that are kept depends on elements; for the options of plain shards
        beside a distributed array. All other errors are those of `softmax_cross_entropy`, on every rank.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the classes. To find the sets: one Allgather of 56 bytes, one
    Allreduce of 48 bytes a row, as many for each bit of a logit with `top_k` and once more with `top_p`, and one with
    `min_p`; for any number of classes. To gather them: one Allgather of 16 bytes a row and 8, and one of 8 bytes for
    each class that this rank has of a set. If rows of a distributed array are sharded, over their dims: one Allgather
    of 56 bytes, one Allreduce of 24 bytes for each row of all ranks, and one of `ids`.

    On the host a copy of the logits is put in order, in float32 for halves; a GPU passes over them for each Allreduce,
    and needs memory for a copy. The mass of a set is a sum of integers, exp(z) in units of 2^-42 of the largest or
    finer ones, so that no order of summation decides whether it reaches `top_p`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> x = np.log([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    >>> found = pce.nucleus(x, top_p=0.75)
    >>> found.ids, found.offsets, found.mass.round(4)
    (array([0, 1, 1]), array([0, 2, 3]), array([0.8, 0.8]))
    >>> pce.nucleus(pce.distribute(x, pce.Mesh(MPI.COMM_SELF, data=1), data=pce.Shard(0)), top_k=1).ids
    array([0, 1])
    """
    limits, own = Limits(top_k, top_p, min_p), (*Limits._fields, "logit_scale")
    if not isinstance(logits, DistArray):
        with standard_arithmetic():
            given = replace(Options.of("nucleus", options, ShardedAxisOptions, *own), logit_scale=logit_scale)
            return nucleus_of(given, logits, limits)
    axis = normalized_axis(Options.of("nucleus", options, AxisOptions, *own).axis, logits.ndim)
    with cause("nucleus", reason="the logits are reduced"):
        x = redistribute(logits.detach(), logits.sharding.natural)
    sharding, mesh = x.sharding, x.mesh
    rows = [each for each in range(x.ndim) if each != axis]
    checked = sharded_options(mesh, [sharding], "nucleus", [axis], rows, axis=axis, logit_scale=logit_scale)
    with standard_arithmetic():
        found = nucleus_of(checked, x.local, limits)
    ids, offsets, mass, log_mass = map(to_host, found)
    mine = sharding.slices(mesh.coordinates)
    mine, shape = mine[:axis] + mine[axis + 1 :], x.shape[:axis] + x.shape[axis + 1 :]
    counts, sets, row_dims = np.diff(offsets), np.zeros((3, *shape)), sharding.dims_along(rows)
    sets[:, *mine] = counts.reshape(mass.shape), mass, log_mass
    sets = _summed(sets, mesh, row_dims, "the sets of the rows of all ranks")
    all_offsets = np.concatenate([[0], np.cumsum(sets[0].astype(np.int64))])
    first = all_offsets[:-1].reshape(shape)[mine].reshape(-1)  # the places of the first classes of this rank's rows
    all_ids = np.zeros(all_offsets[-1], np.int64)
    all_ids[np.arange(len(ids)) + np.repeat(first - offsets[:-1], counts)] = ids
    all_ids = _summed(all_ids, mesh, row_dims, "the classes in the sets of the rows of all ranks")
    xp = array_namespace(x.local)
    return Nucleus(*map(xp.asarray, (all_ids, all_offsets, *sets[1:].astype(mass.dtype))))


def _summed(array: HostArray, mesh: Mesh, dims: tuple[str, ...], reason: str) -> HostArray:
    """Return the sum of arrays over `dims`; each element is 0 on all ranks but one."""
    sharding = Sharding.of(mesh.dim_sizes, array.shape, dict.fromkeys(dims, Partial("sum")))
    with cause("nucleus", text_of_dims(dims), reason):
        total: HostArray = redistribute(DistArray(array, mesh, sharding), sharding.replicated).local
    return total
