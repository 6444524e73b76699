"""Classes of sharded logits: those that the caller names, the largest ones, and the sets of top-k, top-p and min-p."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack
import zlib

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import Array, HostArray, Shape, array_namespace, to_host
from pce_mpi.autograd.apply import Call, Op, apply, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Partial
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.kernels import standard_arithmetic
from pce_mpi.loss.classes import checked_k, chosen_logits, largest, take_classes_backward
from pce_mpi.loss.nucleus import Limits, Nucleus, nucleus_of
from pce_mpi.loss.options import AxisOptions, Options, ShardedAxisOptions, takes
from pce_mpi.loss.tensors import tensors_for_tensors
from pce_mpi.ops.primitive import Primitive, axes_of, sharded_options
from pce_mpi.ops.shape import normalized_axis

_TAKE_CLASSES = Primitive(
    "take_classes",
    {"logits": "rc", "ids": "rn"},
    AxisOptions,
    lambda call, options, logits, ids: chosen_logits(options, logits, ids),
    {"logits": take_classes_backward},
    dtype=lambda logits, _: logits,
    result="ids",
)


@operation
@takes(ShardedAxisOptions)
def take_classes(logits: Any, ids: Any, **options: Unpack[ShardedAxisOptions]) -> Any:
    """Take the logits of chosen classes of each row: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array
        A distributed array, which is reduced first if it is Partial; or this rank's classes of the same rows, as
        `softmax_cross_entropy` takes them. Only these take `comm`, `class_start` and `num_classes`.
    ids : DistArray or array of integers
        Class numbers: the logits' shape with any number of classes in place of the class axis, as `top_k` gives them. A
        class may be chosen more than once. Beside a distributed array they are global, and placed as its rows are;
        beside plain shards the same on every rank, also on the host beside logits on a GPU.

    Returns
    -------
    DistArray or array
        The logits in the shape of `ids`, with all their bits. For a distributed array they are Replicate over the dims
        that shard the classes; other axes stay sharded, and the gradient goes to the classes that were chosen.

    Raises
    ------
    IndexError
        For a class out of range, on every rank.
    TypeError, ValueError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank; and for the options of plain shards beside a distributed array.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the classes: one Allgather of 56 bytes (two with logits on a
    GPU, unless `num_classes` is given), and one Allreduce of the bytes of the result. If rows of a distributed array
    are sharded, one Allgather of 56 bytes over their dims. Backward communicates nothing. For the gradient of plain
    shards see `take_classes_forward`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> x, ids = np.array([[1.0, 2.0, 3.0]]), np.array([[2, 0]])
    >>> pce.take_classes(x, ids)
    array([[3., 1.]])
    >>> logits = pce.distribute(x, pce.Mesh(MPI.COMM_SELF, data=1), requires_grad=True, data=pce.Shard(1))
    >>> pce.sum(pce.take_classes(logits, ids)).backward()
    >>> logits.grad.full()
    array([[1., 0., 1.]])
    """
    if not isinstance(logits, DistArray):
        return loss.take_classes(logits, ids, **options)
    return _TAKE_CLASSES.apply({"logits": logits, "ids": ids}, options)


def _rule(shape: Shape, axis: int, k: int | None = None) -> Rule:
    labels, found = tuple(map(Axis, range(len(shape)))), () if k is None else (k,)
    result = axes_of("r" if k is None else "rn", axis, labels)
    return Rule((labels,), result, (*shape[:axis], *found, *shape[axis + 1 :]), merged=frozenset({axis}))


def _top_k(call: Call, x: Array, axis: int, k: int) -> tuple[Array, Array]:
    with standard_arithmetic():
        found = largest(sharded_options(call.mesh, call.operands, "top_k", [axis], axis=axis), x, k)
    call.residuals = found[1]
    return found


def _argmax(call: Call, x: Array, axis: int) -> Array:
    with standard_arithmetic():
        options = sharded_options(call.mesh, call.operands, "argmax", [axis], axis=axis)
        return largest(options, x, 1)[1].squeeze(axis)


def _put_rule(g: Shape, classes: Shape, x: Shape, axis: int) -> Rule:
    labels = tuple(map(Axis, range(len(x))))
    taken = axes_of("rn", axis, labels)
    return Rule((taken, taken, labels), labels, x, linear=((0,),))


def _put(call: Call, g: Array, classes: Array, x: Array, axis: int) -> Array:
    """Return zeros, with `g` at those of `classes` that this shard has."""
    xp = array_namespace(g)
    start, stop = call.operands[2].block(axis, call.mesh.coordinates)
    here = (classes >= start) & (classes < stop)
    # Classes of other shards go to one extra place, which is left out.
    filled = xp.zeros([*call.shape[:axis], stop - start + 1, *call.shape[axis + 1 :]], g.dtype)
    xp.put_along_axis(filled, xp.where(here, classes - start, stop - start), g, axis)
    return filled[(*[slice(None)] * axis, slice(stop - start))]


# The operand is there for its sharding alone.
_PUT = Op("top_k", _put, rule=_put_rule, dtype=lambda g, *_: g)


_TOP_K = Op(
    "top_k",
    _top_k,
    (lambda g, y, x, axis, k, residuals: apply(_PUT, g, DistArray(residuals, y.mesh, y.sharding), x, axis=axis),),
    _rule,
    uses=[()],
)
_ARGMAX = Op("argmax", _argmax, rule=_rule, dtype=lambda _: np.int64)


@operation
@takes(ShardedAxisOptions)
def top_k(logits: Any, k: int, **options: Unpack[ShardedAxisOptions]) -> tuple[Any, Any]:
    """Find the k largest elements along an axis, and their places: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array of real numbers
        A distributed array, which is reduced first if it is Partial; or this rank's classes of the same rows, as
        `softmax_cross_entropy` takes them. Only these take `comm`, `class_start` and `num_classes`. Integers and bool
        are accepted too.
    k : int
        How many, at least 1 and at most the length of the axis over all shards; the same on every rank.
    axis : int, default -1
        The axis, or the class axis.

    Returns
    -------
    values : DistArray or array
        The k largest elements, largest first, in the dtype of `logits`, with k in place of the axis. A `nan` is larger
        than any number, as in NumPy's and PyTorch's order. For a distributed array they are Replicate over the dims
        that shard the axis; other axes stay sharded, and the gradient goes to the elements that were taken.
    classes : DistArray or array of int64
        Their places along the axis, or global class numbers; among equal elements the lowest come first.

    Raises
    ------
    ValueError
        If there are fewer than k elements or classes, or the axis does not exist.
    TypeError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank; and for the options of plain shards beside a distributed array.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the axis: one Allgather of 56 bytes (two with `x` on a GPU,
    unless `num_classes` is given), and one Allreduce of 16 k bytes a row. Every rank gets the bits that one process
    gets from all classes. Backward communicates nothing.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = np.array([[1.0, 3.0, 2.0, 3.0]])
    >>> pce.top_k(x, 3)
    (array([[3., 3., 2.]]), array([[1, 3, 2]]))
    >>> values, classes = pce.top_k(pce.distribute(x, mesh, data=pce.Shard(1)), 3)
    >>> classes.placements, classes.full()
    ({'data': Replicate()}, array([[1, 3, 2]]))
    """
    if not isinstance(logits, DistArray):
        return loss.top_k(logits, k, **options)
    axis = normalized_axis(Options.of("top_k", options, AxisOptions).axis, logits.ndim)
    number = checked_k(k)
    if number > logits.shape[axis]:
        raise ValueError(f"k = {k}, but axis {axis} of {logits.shape} has {logits.shape[axis]} elements")
    found: tuple[Any, Any] = apply(_TOP_K, logits, axis=axis, k=number)
    return found


@operation
@takes(ShardedAxisOptions)
def argmax(logits: Any, **options: Unpack[ShardedAxisOptions]) -> Any:
    """Find the place of the largest element along an axis: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array of real numbers
        Those of `top_k`.
    axis : int, default -1
        The axis, or the class axis. (`numpy.argmax` of a distributed array is over all elements unless told an axis.)

    Returns
    -------
    DistArray or array of int64
        The place along the axis, or the global class number: the lowest on ties, and the first `nan` if there is one,
        as in NumPy. It has no gradient. Placement as in `top_k`.

    Raises
    ------
    ValueError
        If there are no elements or classes, or the axis does not exist.

    Notes
    -----
    All other errors, and communication, are those of `top_k` for k = 1.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> pce.argmax(np.array([[1.0, 3.0, 2.0, 3.0]]))
    array([1])
    """
    if not isinstance(logits, DistArray):
        return loss.argmax(logits, **options)
    axis = normalized_axis(Options.of("argmax", options, AxisOptions).axis, logits.ndim)
    if not logits.shape[axis]:
        raise ValueError(f"argmax of no elements: shape {logits.shape}, axis {axis}")
    return apply(_ARGMAX, logits, axis=axis)


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
        given = replace(Options.of("nucleus", options, ShardedAxisOptions, *own), logit_scale=logit_scale)
        return nucleus_of(given, logits, limits)
    axis = normalized_axis(Options.of("nucleus", options, AxisOptions, *own).axis, logits.ndim)
    with cause("nucleus", reason="the logits are reduced"):
        x = redistribute(logits.detach(), logits.sharding.natural)
    sharding, mesh = x.sharding, x.mesh
    rows = [each for each in range(x.ndim) if each != axis]
    checked = sharded_options(mesh, [sharding], "nucleus", [axis], rows, axis=axis, logit_scale=logit_scale)
    ids, offsets, mass, log_mass = map(to_host, nucleus_of(checked, x.local, limits))
    numbers = [None if number is None else float(number) for number in (*limits, logit_scale)]
    text = f"nucleus of {x.dtype.name} {x.shape}, {sharding} along axis {axis} with {numbers}"
    mesh.note(zlib.crc32(text.encode()), "nucleus", text)
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
