"""Softmax cross entropy over a class axis that is sharded over the ranks of a communicator: functions on plain arrays.

The forward pass computes one small state per row from this rank's classes and merges the states of all ranks in one
Allreduce. The loss, and this rank's part of the gradient, follow from the merged states; the backward pass communicates
nothing. Arrays are NumPy or CuPy, or anything that supports DLPack or the buffer protocol.

`softmax_cross_entropy` describes the options, all keyword-only. `pce_mpi.loss.options` has their names and types, for
functions that pass them on.
"""

from __future__ import annotations

from typing import Any, Unpack

from pce_mpi.arrays import Array
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.classes import (
    ChosenResiduals,
    argmax,
    take_classes,
    take_classes_backward,
    take_classes_forward,
    top_k,
)
from pce_mpi.loss.divergence import (
    DivergenceResiduals,
    kl_divergence,
    kl_divergence_backward,
    kl_divergence_forward,
    kl_divergence_value_and_grad,
)
from pce_mpi.loss.linear import (
    LinearGradients,
    LinearStatisticsResiduals,
    LinearValueAndGrad,
    linear_class_statistics,
    linear_class_statistics_backward,
    linear_class_statistics_forward,
    linear_cross_entropy_value_and_grad,
)
from pce_mpi.loss.nucleus import Nucleus
from pce_mpi.loss.options import LossOptions, Options, takes
from pce_mpi.loss.passes import Residuals, forward, value_and_grad, write_gradient
from pce_mpi.loss.problem import upstream_of
from pce_mpi.loss.statistics import (
    ClassStatistics,
    StatisticsResiduals,
    class_statistics,
    class_statistics_backward,
    class_statistics_forward,
)
from pce_mpi.loss.tensors import tensors_for_tensors, tensors_on_this_rank

__all__ = [
    "ChosenResiduals",
    "ClassStatistics",
    "DivergenceResiduals",
    "LinearGradients",
    "LinearStatisticsResiduals",
    "LinearValueAndGrad",
    "Nucleus",
    "Residuals",
    "StatisticsResiduals",
    "argmax",
    "class_statistics",
    "class_statistics_backward",
    "class_statistics_forward",
    "kl_divergence",
    "kl_divergence_backward",
    "kl_divergence_forward",
    "kl_divergence_value_and_grad",
    "linear_class_statistics",
    "linear_class_statistics_backward",
    "linear_class_statistics_forward",
    "linear_cross_entropy_value_and_grad",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "softmax_cross_entropy_forward",
    "softmax_cross_entropy_value_and_grad",
    "take_classes",
    "take_classes_backward",
    "take_classes_forward",
    "top_k",
]


@takes(LossOptions)
@tensors_for_tensors
def softmax_cross_entropy(logits: Any, targets: Any, **options: Unpack[LossOptions]) -> Array:
    """Compute the softmax cross entropy of logits whose classes are sharded over the ranks of `comm`.

    Each rank passes its own classes of the same rows. With p the softmax over the classes of all shards and t the
    target of a row, the loss of the row, in nats, is

        class numbers   (1 - s) w_t (-log p_t) + (s / C) sum_c w_c (-log p_c)
        probabilities   sum_c w_c (q_c (1 - s) + s / C) (-log p_c)

    plus z_loss logsumexp(z)**2, with s = label_smoothing, w = weight, q the target probabilities and C the number of
    classes of all shards. These are the conventions of PyTorch's dense `torch.nn.functional.cross_entropy`.

    Parameters
    ----------
    logits : array of float16, bfloat16, float32 or float64
        Any shape that has a class axis; a shard may have no classes. Or a DTensor of torch, whose mesh and placements
        say which classes and rows a rank has. The arrays beside it are then DTensors placed as its axes are, or global.
    targets : array of integers or floating-point numbers
        Class numbers: integers with the logits' shape without the class axis, global, the same on every rank of `comm`.
        Probabilities: floating-point, shaped and sharded as the logits are. Class numbers may be on the host beside
        logits on a GPU, and so may `weight`.
    axis : int, default -1
        The class axis of `logits`.

    Returns
    -------
    array
        The loss: 0-d, or one number per row for `reduction="none"`; the same bits on every rank of `comm`. A mean over
        no rows is `nan`, and so is the loss of a row of only -inf, with a +inf or with a `nan`. A single -inf masks its
        class. It is a tensor of torch's on the CPU if all arrays of the call are, and a DTensor if the logits are one;
        so is what any other function of plain arrays returns.

    Raises
    ------
    TypeError, ValueError, IndexError
        For bad arguments. Like all errors they are raised alike on every rank of `comm` and `batch_comm`, before
        anything is written, and leave the communicators usable.
    CollectiveError
        If arguments differ between ranks that must be equal.
    CollectiveTimeout
        If a rank does not arrive within `PCE_MPI_TIMEOUT` seconds, or within the timeout of the process group. The
        communicator cannot be used any more.
    RuntimeError
        Before `MPI.Init`, after `MPI.Finalize`, and if MPI has no communicator left.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes to agree on the call, and one Allreduce of 40 bytes a row (more
    with options, at most 96). Collective over `batch_comm`: one Allgather of 56 bytes and, for `"sum"` and `"mean"`,
    one Allreduce of 64 bytes. Over a process group an Allreduce is an all-gather of as many bytes from each rank; from
    3 ranks and 1 MiB on an all-to-all, of which each rank merges a block, and an all-gather of the blocks. There is an
    Allgather of 56 bytes more over each, while the GPU works, if class numbers are on a GPU, or logits without
    `num_classes`.

    Examples
    --------
    >>> import numpy as np
    >>> softmax_cross_entropy(np.zeros((2, 4)), np.array([0, 3]))  # log 4
    array(1.38629436)
    """
    return forward(prepare(Options.of("softmax_cross_entropy", options, LossOptions), logits, targets))[0]


@takes(LossOptions)
@tensors_for_tensors
def softmax_cross_entropy_forward(logits: Any, targets: Any, **options: Unpack[LossOptions]) -> tuple[Array, Residuals]:
    """Compute the loss, and the residuals from which `softmax_cross_entropy_backward` computes the gradient.

    Formula, communication and errors are those of `softmax_cross_entropy`.

    Parameters
    ----------
    logits, targets : array
        Those of `softmax_cross_entropy`. Logits and probabilities must not change until the backward pass.

    Returns
    -------
    loss : array
        0-d, or one number per row for `reduction="none"`.
    residuals : Residuals
        References to the arrays that were passed, the weights in float64, and about 60 bytes a row (more
        with options, at most 100).

    Examples
    --------
    >>> import numpy as np
    >>> loss, residuals = softmax_cross_entropy_forward(np.zeros((1, 2)), np.array([0]))
    >>> softmax_cross_entropy_backward(1.0, residuals)
    array([[-0.5,  0.5]])
    """
    return forward(prepare(Options.of("softmax_cross_entropy_forward", options, LossOptions), logits, targets))


@tensors_on_this_rank
def softmax_cross_entropy_backward(dloss: Any, residuals: Residuals, out: Any = None) -> Array:
    """Compute the gradient of the logits from the gradient of the loss.

    For class numbers, dlogits_c = g w_t (p_c - [c = t]) with g = dloss, divided by the divisor of `"mean"`; the other
    parts of the loss add theirs. Rows that are ignored have a zero gradient, whatever their logits are.

    Parameters
    ----------
    dloss : float or array of real numbers
        A number, or one per row for `reduction="none"`.
    residuals : Residuals
        Those of `softmax_cross_entropy_forward`. They can be used again, unless `out` was the logits.
    out : array of a floating dtype, optional
        The array for the gradient. It has the logits' shape and is exactly the logits, which are then overwritten, or
        shares no memory with an argument of the forward pass.

    Returns
    -------
    array
        `out`, or a new array of the logits' dtype and shape.

    Raises
    ------
    RuntimeError
        If a backward pass into the logits has used the residuals up.
    TypeError, ValueError
        For a `dloss` or an `out` that does not fit.

    Notes
    -----
    Communicates nothing. Errors are raised on the rank that finds them, alone.

    Examples
    --------
    >>> import numpy as np
    >>> _, residuals = softmax_cross_entropy_forward(np.zeros((1, 2)), np.array([0]), reduction="none")
    >>> softmax_cross_entropy_backward(np.array([3.0]), residuals)
    array([[-1.5,  1.5]])
    """
    Residuals.check(residuals)
    upstream = upstream_of(dloss, "dloss", residuals.loss_shape, residuals.problem)
    gradient = residuals.gradient_for(out, residuals.problem.logits)
    write_gradient(gradient, residuals, upstream)
    return gradient if out is None else out


@takes(LossOptions)
@tensors_for_tensors
def softmax_cross_entropy_value_and_grad(
    logits: Any, targets: Any, *, out: Any = None, **options: Unpack[LossOptions]
) -> tuple[Array, Array]:
    """Compute the loss and the gradient of the logits, in one pass over the logits if possible.

    Formula, communication and errors are those of `softmax_cross_entropy`.

    Parameters
    ----------
    logits, targets : array
        Those of `softmax_cross_entropy`.
    out : array of a floating dtype, optional
        The array for the gradient. It has the logits' shape and is exactly the logits, which are then overwritten, or
        shares no memory with another argument.

    Returns
    -------
    loss : array
        0-d, or one number per row for `reduction="none"`.
    gradient : array
        `out`, or a new array of the logits' dtype and shape: the gradient of the loss, or of the sum over this rank's
        rows for `reduction="none"`.

    Examples
    --------
    >>> import numpy as np
    >>> loss, dlogits = softmax_cross_entropy_value_and_grad(np.zeros((1, 2)), np.array([0]))
    >>> dlogits
    array([[-0.5,  0.5]])
    """
    checked = Options.of("softmax_cross_entropy_value_and_grad", options, LossOptions, "out")
    loss, gradient = value_and_grad(prepare(checked, logits, targets, out=out, with_gradient=True))
    return loss, gradient if out is None else out
