"""The public names, which `import pce_mpi` imports when the first of them is used."""

# Each name is public by being imported as itself, which says so to type checkers too (PEP 484).
from pce_mpi import dense as dense
from pce_mpi.autograd.rehearsal import (
    Inference as Inference,
    infer_placements as infer_placements,
    rehearse as rehearse,
)
from pce_mpi.autograd.rules import Rule as Rule
from pce_mpi.autograd.tape import no_grad as no_grad
from pce_mpi.comm.calls import public_functions as _public_functions
from pce_mpi.comm.errors import CollectiveError as CollectiveError, CollectiveTimeout as CollectiveTimeout
from pce_mpi.comm.rehearsed import Rehearsal as Rehearsal
from pce_mpi.comm.tracing import Trace as Trace, named_scope as named_scope, trace as trace
from pce_mpi.distributed.array import DistArray as DistArray
from pce_mpi.distributed.checkpoint import load as load, save as save
from pce_mpi.distributed.creation import (
    distribute as distribute,
    from_local as from_local,
    normal as normal,
    uniform as uniform,
)
from pce_mpi.distributed.fingerprint import check_replicas as check_replicas, fingerprint as fingerprint
from pce_mpi.distributed.mesh import Mesh as Mesh
from pce_mpi.distributed.placements import (
    Partial as Partial,
    Replicate as Replicate,
    Shard as Shard,
    shard_range as shard_range,
)
from pce_mpi.distributed.styles import (
    Colwise as Colwise,
    Replicated as Replicated,
    Rowwise as Rowwise,
    SequenceParallel as SequenceParallel,
    VocabParallel as VocabParallel,
    shard_parameters as shard_parameters,
)
from pce_mpi.exact.arithmetic import reproducible as reproducible
from pce_mpi.kernels import get_include as get_include
from pce_mpi.loss import (
    ChosenResiduals as ChosenResiduals,
    ClassStatistics as ClassStatistics,
    DivergenceResiduals as DivergenceResiduals,
    LinearGradients as LinearGradients,
    LinearStatisticsResiduals as LinearStatisticsResiduals,
    LinearValueAndGrad as LinearValueAndGrad,
    Nucleus as Nucleus,
    Residuals as Residuals,
    StatisticsResiduals as StatisticsResiduals,
    class_statistics_backward as class_statistics_backward,
    class_statistics_forward as class_statistics_forward,
    kl_divergence_backward as kl_divergence_backward,
    kl_divergence_forward as kl_divergence_forward,
    kl_divergence_value_and_grad as kl_divergence_value_and_grad,
    linear_class_statistics_backward as linear_class_statistics_backward,
    linear_class_statistics_forward as linear_class_statistics_forward,
    linear_cross_entropy_value_and_grad as linear_cross_entropy_value_and_grad,
    softmax_cross_entropy as softmax_cross_entropy,
    softmax_cross_entropy_backward as softmax_cross_entropy_backward,
    softmax_cross_entropy_forward as softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad as softmax_cross_entropy_value_and_grad,
    take_classes_backward as take_classes_backward,
    take_classes_forward as take_classes_forward,
)
from pce_mpi.ops.arithmetic import (
    add as add,
    clip as clip,
    divide as divide,
    floor_divide as floor_divide,
    maximum as maximum,
    minimum as minimum,
    multiply as multiply,
    power as power,
    remainder as remainder,
    subtract as subtract,
    where as where,
)
from pce_mpi.ops.attention import scaled_dot_product_attention as scaled_dot_product_attention
from pce_mpi.ops.classes import argmax as argmax, nucleus as nucleus, take_classes as take_classes, top_k as top_k
from pce_mpi.ops.custom import op as op
from pce_mpi.ops.elementwise import (
    abs as abs,
    cos as cos,
    exp as exp,
    gelu as gelu,
    log as log,
    log1p as log1p,
    negative as negative,
    relu as relu,
    sigmoid as sigmoid,
    sin as sin,
    sqrt as sqrt,
    square as square,
    tanh as tanh,
)
from pce_mpi.ops.embedding import embedding as embedding
from pce_mpi.ops.joining import concatenate as concatenate, split as split, stack as stack
from pce_mpi.ops.losses import (
    cross_entropy as cross_entropy,
    kl_divergence as kl_divergence,
    linear_cross_entropy as linear_cross_entropy,
    mse as mse,
)
from pce_mpi.ops.normalization import layer_norm as layer_norm, rms_norm as rms_norm
from pce_mpi.ops.products import einsum as einsum, matmul as matmul
from pce_mpi.ops.reductions import (
    cumsum as cumsum,
    logsumexp as logsumexp,
    max as max,
    mean as mean,
    min as min,
    std as std,
    var as var,
)
from pce_mpi.ops.shape import (
    broadcast_to as broadcast_to,
    expand_dims as expand_dims,
    reshape as reshape,
    squeeze as squeeze,
    sum as sum,
    swapaxes as swapaxes,
    transpose as transpose,
)
from pce_mpi.ops.softmax import log_softmax as log_softmax, softmax as softmax
from pce_mpi.ops.statistics import (
    class_statistics as class_statistics,
    linear_class_statistics as linear_class_statistics,
)
from pce_mpi.optim.clipping import clip_grad_norm as clip_grad_norm
from pce_mpi.optim.optimizers import SGD as SGD, AdamW as AdamW
from pce_mpi.optim.schedules import cosine_schedule as cosine_schedule, linear_schedule as linear_schedule

# Type checkers cannot compute this, and would take it for an empty list.
globals()["__all__"] = [
    "dense",
    *sorted(name for name, value in globals().items() if callable(value) and not name.startswith("_")),
]

# Every rank calls these, so that an error of one rank is every rank's. They call each other as they are defined.
_on_one_rank = {"shard_range", "op", "cosine_schedule", "linear_schedule"}
_over_meshes = {"clip_grad_norm", "fingerprint", "save"}
_public_functions(globals(), _on_one_rank, _over_meshes, "pce_mpi.distributed", "pce_mpi.ops", "pce_mpi.optim")
