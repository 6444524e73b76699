"""Losses of optax and NumPyro on gathered logits; JAX, optax and NumPyro must be installed."""

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import CategoricalLogits
import optax

from pce_mpi.conformance import offers

jax.config.update("jax_enable_x64", True)
_HALVES_TOO = ("float16", "bfloat16", "float32", "float64")


def _dense(function, logits, comm, class_start):
    """Return what `function` gives for all classes, and the backward pass to this rank's."""
    whole = jnp.asarray(np.concatenate(comm.allgather(np.asarray(logits)), axis=-1))
    result, pull_back = jax.vjp(function, whole)
    mine = slice(class_start, class_start + logits.shape[-1])
    return result, lambda dloss: pull_back(jnp.asarray(dloss, result.dtype))[0][..., mine]


@offers(dtypes=_HALVES_TOO, reductions=("none",), dims=(1, 2, 3), gradient="backward", num_classes=False)
def optax_labels(logits, targets, *, class_start, num_classes, comm):
    labels = jnp.asarray(targets)
    return _dense(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels), logits, comm, class_start)


@offers(dtypes=_HALVES_TOO, reductions=("none",), probabilities=True, options=("label_smoothing",), gradient="backward")
def optax_probabilities(logits, targets, *, class_start, num_classes, comm, label_smoothing=0.0):
    if targets.ndim == logits.ndim:
        labels = jnp.asarray(np.concatenate(comm.allgather(np.asarray(targets)), axis=-1))
    else:
        labels = jax.nn.one_hot(jnp.asarray(targets), num_classes, dtype=logits.dtype)
    labels = optax.smooth_labels(labels, label_smoothing)
    return _dense(lambda x: optax.softmax_cross_entropy(x, labels), logits, comm, class_start)


@offers(kind="log_prob", dtypes=_HALVES_TOO, dims=(1, 2, 3), gradient="backward", num_classes=False)
def numpyro_log_prob(logits, targets, *, class_start, num_classes, comm):
    values = jnp.asarray(targets)
    return _dense(lambda x: CategoricalLogits(x).log_prob(values), logits, comm, class_start)


@offers(kind="entropy", dtypes=_HALVES_TOO, dims=(1, 2, 3), gradient="backward")
def numpyro_entropy(logits, *, class_start, num_classes, comm):
    return _dense(lambda x: CategoricalLogits(x).entropy(), logits, comm, class_start)
