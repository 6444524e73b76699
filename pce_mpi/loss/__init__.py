"""Softmax cross entropy over a class axis that is sharded over the ranks of a communicator: the array-level functions.

A forward pass fills one state per row from this rank's classes, merges the states of all ranks in one Allreduce and
derives the loss from what comes back; a backward pass writes this rank's part of the gradient from the same merged
states and communicates nothing. Arrays are NumPy or CuPy, or anything that speaks DLPack or the buffer protocol.

Options, the same for the four loss functions, all keyword-only:

==================  ===========  =====================================================================================
`comm`              `None`       mpi4py communicator over the class axis; `None`: one process, no MPI needed
`class_start`       `None`       global number of this shard's first class; `None`: shards follow each other by rank
`num_classes`       `None`       if given, must equal the number of classes of all shards together; without it, shards
                                 whose logits are equal are refused: they may be gathered logits
`axis`              `-1`         the class axis of `logits`
`weight`            `None`       class weights of this shard, (local classes,)
`ignore_index`      `-100`       rows with this target count for nothing and have a zero gradient
`label_smoothing`   `0.0`        in [0, 1], over all classes of all shards
`z_loss`            `0.0`        adds `z_loss * logsumexp**2` to each row
`logit_scale`       `1.0`        the loss is taken of z = logit_scale x,
`softcap`           `None`       or of z = softcap tanh(logit_scale x / softcap)
`reduction`         `"mean"`     `"none"`, `"sum"` or `"mean"`
`batch_comm`        `None`       communicator over which rows are sharded: `sum` and `mean` are over all of them
`compute_dtype`     `None`       arithmetic and the loss's dtype: float32, or float64 for float64 logits, unless given
==================  ===========  =====================================================================================

Errors: `TypeError`, `ValueError` or `IndexError` for bad arguments (arrays on the host beside arrays on a GPU are a
`TypeError`, numbers go with both), `CollectiveError` for arguments that differ between ranks; each is raised alike on
every rank of `comm` and `batch_comm`, before anything is written, and leaves the communicators usable.
`CollectiveTimeout` when a rank does not arrive (see `collectives`). `RuntimeError` before `MPI.Init`, after
`MPI.Finalize`, and where MPI has no communicator left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, check_one_library
from pce_mpi.gpu import check_on_current_gpu
from pce_mpi.loss.arguments import Call, check_out, rows_and_classes
from pce_mpi.loss.passes import Residuals, evaluate, evaluate_and_write, row_softmax, write_gradient_rows
from pce_mpi.loss.preparation import prepare
from pce_mpi.loss.softmax_state import StateFields
from pce_mpi.memory import same_memory, shares_memory

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "ClassStatistics",
    "Residuals",
    "class_statistics",
    "forward_of",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "softmax_cross_entropy_forward",
    "softmax_cross_entropy_value_and_grad",
    "value_and_grad_of",
]

Array = Any  # numpy.ndarray or cupy.ndarray


def softmax_cross_entropy(
    logits: Any,
    targets: Any,
    *,
    comm: MPI.Intracomm | None = None,
    class_start: int | None = None,
    num_classes: int | None = None,
    axis: int = -1,
    weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    batch_comm: MPI.Intracomm | None = None,
    compute_dtype: Any = None,
) -> Array:
    """The softmax cross entropy of `logits`, of which each rank of `comm` passes its own classes of the same rows.

    With p the softmax over the classes of all shards and t a row's target, the loss of a row, in nats, is

        index targets         (1 - s) w_t (-log p_t) + (s / C) sum_c w_c (-log p_c)
        probability targets   sum_c w_c (q_c (1 - s) + s / C) (-log p_c)

    plus z_loss logsumexp(z)**2, with s = label_smoothing, w = weight and C the number of classes of all shards. `mean`
    divides the sum over rows by the sum of w_t over the rows that are not ignored, or by the number of rows for
    probability targets. These are the conventions of PyTorch's dense `torch.nn.functional.cross_entropy`.

    `logits`: float16, bfloat16, float32 or float64, any shape with at least the class axis; a shard may be empty.
    `targets`: integers, the logits' shape without the class axis, global class numbers and the same on every rank of
    `comm`; or floating-point probabilities, shaped and sharded as the logits. What each option means, and which errors
    are raised: see `help(pce_mpi.loss)`.

    Returns the loss, a 0-d array, or one per row for `reduction="none"`, the same bits on every rank. No row left
    gives `nan` for `mean`. A row of only -inf, with a +inf or a `nan`, gives `nan`; a single -inf masks its class.

    Collective over `comm`: one Allgather of 56 bytes to agree on the call, and one Allreduce of 24 bytes a row (more
    with options, at most 64). With `batch_comm`: an Allgather of 56 bytes over it, and an Allreduce of 16 bytes
    for `sum` and `mean`.

    >>> import numpy as np
    >>> softmax_cross_entropy(np.zeros((2, 4)), np.array([0, 3]))  # log 4
    array(1.38629436)
    """
    return forward_of(Call(operation="softmax_cross_entropy", **locals()))[0]


def softmax_cross_entropy_forward(
    logits: Any,
    targets: Any,
    *,
    comm: MPI.Intracomm | None = None,
    class_start: int | None = None,
    num_classes: int | None = None,
    axis: int = -1,
    weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    batch_comm: MPI.Intracomm | None = None,
    compute_dtype: Any = None,
) -> tuple[Array, Residuals]:
    """The loss, and the residuals that `softmax_cross_entropy_backward` takes the gradient from.

    Formula, arguments, communication and errors are those of `softmax_cross_entropy`. The residuals hold references
    to the arrays that were passed, of which logits and probability targets must not change until the backward pass,
    the weights in float64, and about 100 bytes a row.

    >>> import numpy as np
    >>> loss, residuals = softmax_cross_entropy_forward(np.zeros((1, 2)), np.array([0]))
    >>> softmax_cross_entropy_backward(1.0, residuals)
    array([[-0.5,  0.5]])
    """
    return forward_of(Call(operation="softmax_cross_entropy_forward", **locals()))


def softmax_cross_entropy_backward(dloss: Any, residuals: Residuals, out: Any = None) -> Array:
    """The gradient of the logits, given that of the loss.

    For index targets, dlogits_c = g w_t (p_c - [c = t]) with g = dloss, divided by the divisor of `mean`; likewise
    for the other terms of the loss. Rows that are ignored have a zero gradient, whatever their logits.

    `dloss`: a real number, or an array with the shape of the loss. `out`: where to put the gradient; the logits' shape
    and either exactly the logits or no memory of theirs. Backward into the logits uses the residuals up.

    Returns `out`, or a new array of the logits' dtype and shape. Can be called again, unless `out` was the logits.

    Communicates nothing, and so raises where it fails, on that rank alone: `RuntimeError` for residuals that were used
    up, `TypeError` or `ValueError` for a `dloss` or `out` that does not fit.

    >>> import numpy as np
    >>> _, residuals = softmax_cross_entropy_forward(np.zeros((1, 2)), np.array([0]), reduction="none")
    >>> softmax_cross_entropy_backward(np.array([3.0]), residuals)
    array([[-1.5,  1.5]])
    """
    if not isinstance(residuals, Residuals):
        raise TypeError(f"residuals must come from softmax_cross_entropy_forward, got {type(residuals).__name__}")
    if residuals.used_up:
        raise RuntimeError("these residuals were used up by a backward pass into out=logits")
    problem = residuals.problem
    upstream = as_array(dloss, "dloss")
    if upstream.dtype.kind not in "iuf" and upstream.dtype.name != "bfloat16":
        raise TypeError(f"dloss must be real numbers, got {upstream.dtype}")
    if upstream.shape not in ((), residuals.loss_shape):
        raise ValueError(
            f"dloss must be a scalar or have the loss's shape, {residuals.loss_shape}, got {upstream.shape}"
        )
    logits = problem.logits
    xp = array_namespace(logits)
    check_one_library({"logits": logits, "dloss": dloss if isinstance(dloss, np.generic | float | int) else upstream})
    check_on_current_gpu({"logits": logits, "dloss": upstream})
    if out is None:
        array = xp.empty_like(logits)
    else:
        array = check_out(out, problem.inputs)
        residuals.used_up = same_memory(array, logits)
    rows = rows_and_classes(array, problem.axis)
    write_gradient_rows(rows, residuals, xp.asarray(upstream.astype(np.float64).reshape(-1)))
    _copy_back(rows, array)
    return array if out is None else out


def softmax_cross_entropy_value_and_grad(
    logits: Any,
    targets: Any,
    *,
    comm: MPI.Intracomm | None = None,
    class_start: int | None = None,
    num_classes: int | None = None,
    axis: int = -1,
    weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    batch_comm: MPI.Intracomm | None = None,
    compute_dtype: Any = None,
    out: Any = None,
) -> tuple[Array, Array]:
    """The loss and its gradient with respect to `logits`, in one pass over the logits where that is possible.

    Formula, arguments, communication and errors are those of `softmax_cross_entropy`; the gradient is that of the
    loss, or of its sum over this rank's rows for `reduction="none"`. `out` is where to put the gradient: the logits'
    shape and either exactly `logits`, which are then overwritten, or no memory of any argument's.

    Returns the loss and `out`, or a new array of the logits' dtype and shape.

    >>> import numpy as np
    >>> loss, dlogits = softmax_cross_entropy_value_and_grad(np.zeros((1, 2)), np.array([0]))
    >>> dlogits
    array([[-0.5,  0.5]])
    """
    loss, gradient = value_and_grad_of(
        Call(operation="softmax_cross_entropy_value_and_grad", with_gradient=True, **locals())
    )
    return loss, gradient if out is None else out


def forward_of(call: Call) -> tuple[Array, Residuals]:
    """The loss and the residuals that `call` asks for; collective over its communicators."""
    return evaluate(call, prepare(call))[:2]


def value_and_grad_of(call: Call) -> tuple[Array, Array]:
    """The loss and the gradient that `call` asks for; collective over its communicators."""
    problem = prepare(call)
    gradient = problem.out
    assert gradient is not None  # allocated before the ranks agreed, unless the caller passed it
    rows = rows_and_classes(gradient, problem.axis)
    xp = array_namespace(gradient)
    if xp is not np and (loss := evaluate_and_write(call, problem, rows)) is not None:
        _copy_back(rows, gradient)
        return loss, gradient
    # On the host one exponential does if the gradient can keep it until the merged states are known, and if nothing
    # else of the logits is needed then.
    kept = (
        xp is np
        and gradient.dtype == problem.compute_dtype
        and problem.targets is not None
        and problem.transform.softcap is None
    )
    loss, residuals, references = evaluate(call, problem, exponentials=rows if kept else None)
    write_gradient_rows(rows, residuals, xp.ones(1), references=references if kept else None)
    _copy_back(rows, gradient)
    return loss, gradient


def class_statistics(
    logits: Any,
    targets: Any = None,
    *,
    comm: MPI.Intracomm | None = None,
    class_start: int | None = None,
    num_classes: int | None = None,
    axis: int = -1,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    compute_dtype: Any = None,
) -> ClassStatistics:
    """What can be said of each row's softmax over the classes of all shards, without gathering a logit.

    Arguments are those of `softmax_cross_entropy`; probability targets are a `ValueError`. Collective over `comm`: one
    Allgather of 56 bytes, and one Allreduce of 40 bytes a row, 8 more with targets and 8 more with
    a scale.

    >>> import numpy as np
    >>> class_statistics(np.log([[1.0, 3.0]])).entropy
    array([0.56233514])
    """
    call = Call(operation="class_statistics", needs_targets=False, **locals())
    problem = prepare(call)
    state_fields = StateFields(
        scaled=problem.transform.of_differences != 1.0,
        hold_largest=True,
        target=problem.targets is not None,
        entropy=True,
    )
    softmax, _ = row_softmax(call, problem, state_fields)
    xp, fields = array_namespace(problem.logits), softmax.fields

    @np.errstate(all="ignore")
    def rows(values: Array) -> Array:
        one_nan = xp.where(xp.isnan(values), np.nan, values)  # of the many, the same on every rank
        return one_nan.astype(problem.compute_dtype).reshape(problem.rows_shape)

    with_targets = problem.targets is not None
    return ClassStatistics(
        max=rows(problem.transform.of_differences * fields["largest"]),
        sum_exp=rows(softmax.sum_exp_of_all),
        logsumexp=rows(softmax.logsumexp),
        log_prob=rows(xp.where(xp.asarray(problem.valid), softmax.target_log_prob, 0.0)) if with_targets else None,
        entropy=rows(softmax.entropy),
        argmax=fields["argmax"].reshape(problem.rows_shape),
    )


class ClassStatistics(NamedTuple):
    """Statistics of each row, shaped as the logits without the class axis; the compute dtype, but for `argmax`.

    Of z, the logits after `logit_scale` and `softcap`, and p, their softmax; entropy and log-probability in nats.

    max         the largest z
    sum_exp     sum_c exp(z_c - max)
    logsumexp   log sum_c exp(z_c)
    log_prob    log p of the target, and 0 where that is `ignore_index`: leave those rows out of a mean; None without
                targets
    entropy     -sum_c p_c log p_c
    argmax      the global number of the class with the largest z, the lowest on ties; int64
    """

    max: Array
    sum_exp: Array
    logsumexp: Array
    log_prob: Array | None
    entropy: Array
    argmax: Array


def _copy_back(rows: Array, array: Array) -> None:
    """Where the strides of `array` did not allow `rows` to be a view of it, make them agree."""
    if not shares_memory(rows, array):
        array[...] = rows.reshape(array.shape)
