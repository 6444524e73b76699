"""Adapters: losses of other frameworks as candidates. Each imports its framework when it starts.

Ready to be judged, by name:

==========================  ============================================================================================
`pce`                       this package's forward, then its backward
`pce-value-and-grad`        this package's loss and gradient in one call
==========================  ============================================================================================

For a function of your own:

==========================  ============================================================================================
`torch-shards`              `function(logits, targets, group, **options)` on each rank's tensors, as Megatron's
`jax-shard-map`             `function(logits, targets, axis_name=..., **options)` under `jax.shard_map`
==========================  ============================================================================================

An adapter whose framework owns its process group has `start(comm)` and `stop()`, called once for each launch.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pce_mpi import loss
from pce_mpi.conformance.candidates.offers import EVERYTHING
from pce_mpi.conformance.problems.cases import Gradient


class ForwardAndBackward:
    """`softmax_cross_entropy_forward`, then `softmax_cross_entropy_backward` with the kit's upstream gradient."""

    offer = EVERYTHING

    def __call__(self, logits: Any, targets: Any, **options: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the loss and its backward pass."""
        value, residuals = loss.softmax_cross_entropy_forward(logits, targets, **options)
        return value, lambda dloss: loss.softmax_cross_entropy_backward(dloss, residuals)


class ValueAndGrad:
    """`softmax_cross_entropy_value_and_grad`."""

    offer = replace(EVERYTHING, gradient=Gradient.VALUE)
    __call__ = staticmethod(loss.softmax_cross_entropy_value_and_grad)


# This package's own loss: it must pass everything.
NAMED_CANDIDATES = {"pce": ForwardAndBackward(), "pce-value-and-grad": ValueAndGrad()}
# The file and the class; imported on demand.
FUNCTION_ADAPTERS = {
    "torch-shards": ("torch_tensors", "TorchShards"),
    "jax-shard-map": ("jax_shard_map", "JaxShardMap"),
}


def adapted(name: str, function: Callable[..., Any]) -> Any:
    """Make a function on shards of a framework a candidate.

    Parameters
    ----------
    name : str
        "torch-shards", for `function(logits, targets, group, **options)` on tensors; or "jax-shard-map", for
        `function(logits, targets, axis_name=..., **options)` under `jax.shard_map`.
    function : callable
        The function. Its signature and the adapter tell all that it does not declare with `@offers`.

    Returns
    -------
    callable
        The candidate, with `start(comm)`, which starts the framework's process group, and `stop()`. `assert_conforms`
        and the command call both.

    Raises
    ------
    TypeError
        The function cannot be called so.
    ValueError
        There is no such adapter; or `same_bits` is declared: the framework's process group is that of all ranks, and
        cannot give the answer on one.

    Examples
    --------
    >>> def cross_entropy(logits, targets, group, label_smoothing=0.0): ...
    >>> adapted("torch-shards", cross_entropy).offer.options
    ('label_smoothing',)
    """
    if name not in FUNCTION_ADAPTERS:
        raise ValueError(f"there is no adapter {name!r}; there are {', '.join(FUNCTION_ADAPTERS)}")
    file, kind = FUNCTION_ADAPTERS[name]
    candidate = getattr(import_module(f"{__name__}.{file}"), kind)(function)
    if candidate.offer.same_bits:
        raise ValueError(
            f"same_bits cannot be judged through the adapter {name}: bits are compared with those on one rank, and the "
            "framework's process group has all ranks; leave it out, or make the function a candidate that takes `comm`"
        )
    return candidate


def missing_framework(name: str) -> str | None:
    """Return the package that the adapter `name` needs, if it is not installed."""
    framework = name.partition("-")[0]
    return framework if find_spec(framework) is None else None
