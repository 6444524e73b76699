"""Functions of a JAX array whose last axis is sharded, explicitly; collectives of shard_map. JAX must be installed.

Each rank's process has a device for every rank, and returns what its own device has.
"""

from types import SimpleNamespace

import jax
from jax import lax, numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from pce_mpi.conformance import Gradient, Offer

SHARDED, WHOLE = PartitionSpec(None, "ranks"), PartitionSpec()


class InJax:
    """A function of a global array, from one sharding to another, which JAX differentiates."""

    def __init__(self, function, computes, sharded=SHARDED, result=WHOLE, **declared):
        self._function, self._sharded, self._result = function, sharded, result
        self.offer = Offer(
            kind="placement",
            computes=computes,
            dtypes=("float32", "bfloat16"),
            shards="equal",
            gradient=Gradient.BACKWARD,
            **declared,
        )

    def start(self, comm):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", comm.size)
        jax.set_mesh(jax.make_mesh((comm.size,), ("ranks",), axis_types=(AxisType.Explicit,)))

    def __call__(self, array, *, splits, comm):
        whole = np.concatenate(comm.allgather(np.asarray(array)), -1) if self._sharded == SHARDED else array
        x = self._placed(whole, self._sharded)
        value, pull_back = jax.vjp(jax.jit(self._function), x)

        def backward(g):
            whole = np.concatenate(comm.allgather(np.asarray(g)), -1) if self._result == SHARDED else np.asarray(g)
            (gradient,) = pull_back(self._placed(whole.astype(value.dtype), self._result))
            return self._own(gradient, comm.rank)

        return self._own(value, comm.rank), backward

    def _placed(self, array, spec):
        return jax.device_put(jnp.asarray(array), NamedSharding(jax.sharding.get_mesh(), spec))

    def _own(self, array, rank):
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        return np.array(by_device[jax.devices()[rank]])


def mapped(function, checked):
    """A function of each device's term, under shard_map."""

    def of_terms(x):
        return jax.shard_map(lambda x: function(x[:, 0]), in_specs=SHARDED, out_specs=WHOLE, check_vma=checked)(x)

    return of_terms


def inside(function, checked):
    """The same, whose gradient is computed inside of shard_map, as by a trainer that maps all of its step."""

    def of_device(x, g):
        _, pull_back = jax.vjp(lambda x: function(x[:, 0]), x)
        return pull_back(g)[0]

    def backward(x, g):
        return (jax.shard_map(of_device, in_specs=(SHARDED, WHOLE), out_specs=SHARDED, check_vma=checked)(x, g),)

    of_terms = jax.custom_vjp(mapped(function, checked))
    of_terms.defvjp(lambda x: (mapped(function, checked)(x), x), backward)
    return of_terms


JAX = {
    "sum": lambda x: jnp.sum(x, 1),
    "mean": lambda x: jnp.mean(x, 1),
    "max": lambda x: jnp.max(x, 1),
    "min": lambda x: jnp.min(x, 1),
    "prod": lambda x: jnp.prod(x, 1),
    "norm": lambda x: jnp.linalg.norm(x, axis=1),
    "norm-inf": lambda x: jnp.linalg.norm(x, jnp.inf, axis=1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 1),
}
REDUCED = {"sum": lambda x: lax.psum(x, "ranks"), "mean": lambda x: lax.pmean(x, "ranks")}  # pmax has no gradient


def named(functions, **declared):
    """Candidates by the names of what they compute."""
    return SimpleNamespace(
        **{name.replace("-", "_"): InJax(each, name, **declared) for name, each in functions.items()}
    )


sharded = named(JAX)
terms, unchecked = (
    named({name: mapped(each, checked) for name, each in REDUCED.items()}, partial="term") for checked in (True, False)
)
inner, inner_unchecked = (
    named({name: inside(each, checked) for name, each in REDUCED.items()}, partial="term") for checked in (True, False)
)
replicate = InJax(lambda x: jax.sharding.reshard(x, WHOLE), "replicate")
shard = InJax(lambda x: jax.sharding.reshard(x, SHARDED), "shard", WHOLE, SHARDED)
