"""A JAX function under `jax.shard_map`: rank 0 runs it on as many host devices as there are ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.comm.agreement import agree
from pce_mpi.conformance.candidates.offers import offer_of
from pce_mpi.conformance.problems.cases import Gradient
from pce_mpi.conformance.problems.kinds import KINDS

if TYPE_CHECKING:
    from mpi4py import MPI

_AXIS_NAME = "classes"


class JaxShardMap:
    """`function(logits, targets, axis_name="classes", **options)`, mapped over the class axis of logits.

    Logits, probability targets and `weight` are sharded, class numbers are not; `shard_map` needs shards of equal
    length, and a loss that it can infer to be equal on all devices. The gradient is that of `jax.vjp` of the mapped
    function. All JAX devices belong to one process, rank 0; the other ranks send it their shards, and receive the
    results of their device.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._mesh: Any = None
        # For the adapter alone: the candidate sends through JAX.
        self._comm: Any = None
        # XLA cannot compile the backward pass of a shard_map of zero rows (JAX 0.10).
        self.offer = replace(offer_of(function), shards="equal", gradient=Gradient.BACKWARD, empty=False)
        if not KINDS[self.offer.kind].shared_cases:
            raise ValueError(
                f"jax-shard-map shards the classes of logits, and a candidate of kind {self.offer.kind!r} takes others"
            )

    def start(self, comm: MPI.Intracomm) -> None:
        """Create one CPU device for each rank of `comm`, on rank 0; collective."""

        def start() -> None:
            import jax

            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", comm.size)
            self._mesh = jax.sharding.Mesh(np.array(jax.devices()), (_AXIS_NAME,))
            if self._mesh.size != comm.size:
                raise RuntimeError(
                    f"JAX was used before it could be given {comm.size} devices, and has {self._mesh.size}: "
                    "the function's module must not compute anything with JAX when it is imported"
                )

        self._comm = comm.Dup()
        self._on_the_first_rank(start)

    def stop(self) -> None:
        """Free the communicator; the devices end with the process."""
        self._comm.Free()

    def __call__(
        self, logits: Any, targets: Any, *, class_start: int, num_classes: int, comm: MPI.Intracomm, **options: Any
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Return the loss of this rank's device, and the backward pass to this rank's shard."""
        axis = options.get("axis", -1) % logits.ndim
        weight = options.pop("weight", None)
        shards: Any = self._comm.gather((logits, targets, weight))
        mapped = self._on_the_first_rank(lambda: self._map(shards, num_classes, axis, options))
        losses, pull_back = mapped or (None, lambda dloss: None)

        def backward(dloss: Any) -> Any:
            return self._comm.scatter(self._on_the_first_rank(lambda: pull_back(dloss)))

        return self._comm.scatter(losses), backward

    def _map(
        self, shards: list[tuple[Any, Any, Any]], num_classes: int, axis: int, options: dict[str, Any]
    ) -> tuple[list[Any], Callable[[Any], list[Any]]]:
        """Return the loss of each device, and the backward pass to the shard of each."""
        import jax
        from jax.sharding import PartitionSpec

        logits, targets, weight = zip(*shards, strict=True)
        sharded = PartitionSpec(*(None,) * axis, _AXIS_NAME)
        probabilities = targets[0].ndim == logits[0].ndim
        others = [targets[0] if not probabilities else np.concatenate(targets, axis)]
        specs = [sharded if probabilities else PartitionSpec()]
        if weight[0] is not None:
            others.append(np.concatenate(weight))
            specs.append(PartitionSpec(_AXIS_NAME))

        def function(x: Any, t: Any, *w: Any) -> Any:
            weighted = {"weight": w[0]} if w else {}
            return self._function(x, t, axis_name=_AXIS_NAME, **weighted, **options)

        x = np.concatenate(logits, axis)
        if x.shape[axis] != num_classes:  # JAX does not look at that
            raise ValueError(f"the shards must have num_classes = {num_classes} together, got {x.shape[axis]}")
        with _precision_of(x):
            mapped = jax.jit(
                jax.shard_map(function, mesh=self._mesh, in_specs=(sharded, *specs), out_specs=PartitionSpec())
            )
            loss, vjp = jax.vjp(lambda x: mapped(x, *others), x)
            by_device = {shard.device: np.array(shard.data) for shard in loss.addressable_shards}

        def pull_back(dloss: Any) -> list[Any]:
            with _precision_of(x):
                (gradient,) = vjp(jax.numpy.broadcast_to(np.asarray(dloss, loss.dtype), loss.shape))
                return [part.copy() for part in np.split(np.asarray(gradient), len(shards), axis)]

        return [by_device[device] for device in self._mesh.devices.flat], pull_back

    def _on_the_first_rank(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work` on rank 0, None elsewhere; raise its error on every rank. Collective."""
        result, error = None, None
        if self._comm.rank == 0:
            try:
                result = work()
            except Exception as raised:
                error = raised
        agree(self._comm, "jax.shard_map", {}, error=error)
        return result


def _precision_of(array: Any) -> AbstractContextManager[Any]:
    """Let JAX use float64 for a float64 array."""
    import jax

    return jax.enable_x64(array.dtype == np.float64)
