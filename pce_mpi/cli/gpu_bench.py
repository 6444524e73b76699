"""What `bench --device gpu` measures: the kernels and the public functions, each beside a copy on the same device.

A copy from device memory to device memory reads each byte once and writes it once, and nothing is faster. So a figure
is given as gigabytes a second, of the bytes that the function cannot but touch, and as a share of what the copy of the
same run reached: a forward pass reads the logits, a backward pass and a fused one read them and write the gradient.

Times are taken with CUDA events, over arrays which together do not fit the second-level cache. On one rank the GPU is
kept busy before, until what is timed has been launched: kernels take a few microseconds, Python some ten times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
import math
import statistics
import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from pce_mpi.cli.gpu_peers import Peer, peers, release_memory
from pce_mpi.comm.collectives import agree, all_reduce
from pce_mpi.distributed.placements import shard_range
from pce_mpi.loss import (
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)
from pce_mpi.loss.kernels import kernels_of
from pce_mpi.loss.kernels.terms import ClassWeights, RowGradient, Transform
from pce_mpi.loss.softmax_state import StateFields, merge

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["GpuMeasurement", "measure", "together"]

Array = Any  # cupy.ndarray
Result = TypeVar("Result")

# Arrays that are used in turn hold so many times what the second-level cache does.
_CACHES = 4
# What is written before a kernel is timed, in caches: this takes an H200 about 0.2 ms.
_AHEAD = 16
_WARM_UP = 3
# Random numbers are drawn on the host, so many, and repeated.
_DRAWN = 2**22


@dataclass(frozen=True)
class GpuMeasurement:
    """One function at one size; the time is the slowest rank's median, bytes are those of one rank's shard."""

    rows: int
    classes: int
    dtype: str
    function: str
    ms: float
    gigabytes_per_second: float
    of_copy: float


def measure(
    rows: int, classes: int, dtype: np.dtype[Any], repeat: int, comm: MPI.Intracomm | None, xp: Any
) -> tuple[list[GpuMeasurement], list[str]]:
    """Time everything at one size on the current device of every rank; `xp` is cupy.

    Collective over `comm`. On one rank the peers that can be imported (torch.compile, Liger, quack) are timed as well;
    also returns which of them were left out and why. Raises `MemoryError` where the arrays of this size do not fit the
    device.
    """
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    start, stop = shard_range(classes, size, rank)
    xp.get_default_memory_pool().free_all_blocks()
    release_memory()
    if comm is not None:
        agree(comm, "bench", {})  # ranks that share a GPU have all given back the memory of an earlier size
    shards = together(comm, lambda: _Shards(rows, stop - start, dtype, xp))
    targets = xp.asarray(np.random.default_rng(size).integers(0, classes, rows))
    shard_bytes = rows * -(-classes // size) * dtype.itemsize
    found: list[GpuMeasurement] = []

    def add(function: str, milliseconds: float, passes: int) -> None:
        taken = _slowest(comm, milliseconds)
        speed = 1e-6 * passes * shard_bytes / taken
        copy = found[0].gigabytes_per_second if found else speed
        found.append(GpuMeasurement(rows, classes, dtype.name, function, taken, speed, speed / copy))

    def timed(call: Callable[[Array, Array], object], before: Callable[[Array, Array], object] | None = None) -> float:
        return _milliseconds(call, before, shards, repeat, comm, xp)

    add("copy", timed(lambda logits, out: xp.copyto(out, logits)), 2)
    kernels = _Kernels(shards.pairs[0][0], targets, start, xp)
    parts = [timed(lambda logits, _: kernels.forward(logits)), timed(kernels.backward)]
    add("kernel: forward", parts[0], 1)
    add("kernel: backward", parts[1], 2)
    if size == 1 and kernels.fused_fits:
        add("kernel: both at once", timed(kernels.fused), 2)
    add("kernel: backward in place", timed(lambda logits, _: kernels.backward(logits, logits)), 2)
    shards.refill()  # logits again, where gradients have been written
    residuals: list[Any] = []

    def forward(logits: Array, _: Array) -> None:
        residuals[:] = [softmax_cross_entropy_forward(logits, targets, comm=comm, num_classes=classes)[1]]

    def backward(_: Array, out: Array) -> None:
        softmax_cross_entropy_backward(1.0, residuals[0], out=out)

    def both(logits: Array, out: Array) -> None:
        forward(logits, out)
        backward(logits, out)

    def fused(logits: Array, out: Array) -> None:
        softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, num_classes=classes, out=out)

    add("forward", timed(forward), 1)
    add("backward", timed(backward, before=forward), 2)
    add("forward + backward", timed(both), 3)
    add("value_and_grad", timed(fused), 2)
    if comm is not None and size > 1:
        collective = 1e3 * _merge_seconds(rows, repeat, comm)
        add("the two kernels and the collective", sum(parts) + collective, 3)
        return found, []
    left_out = []
    for name in peers():
        try:
            peer = Peer(name, targets)
            for function, call, passes in (("forward", peer.forward, 1), ("value_and_grad", peer.both, 2)):
                add(f"{name}: {function}", _peer_milliseconds(peer, call, shards, repeat), passes)
        except Exception as error:  # it may lack a package, or know no such dtype or GPU, and says so in any way
            reason = str(error).partition("\n")[0]
            left_out.append(f"{name}, {classes} classes: {type(error).__name__}: {reason}")
    return found, left_out


def together(comm: MPI.Intracomm | None, work: Callable[[], Result]) -> Result:
    """What `work` returns, or, on every rank alike, the error that it raised on one."""
    error: Exception | None = None
    result = None
    try:
        result = work()
    except (MemoryError, RuntimeError) as raised:
        if comm is None:
            raise
        error = raised
    if comm is not None:
        agree(comm, "bench", {}, error=error)
    return cast("Result", result)


class _Shards:
    """Pairs of random logits and a place for their gradients, enough of them not to fit the cache together."""

    def __init__(self, rows: int, classes: int, dtype: np.dtype[Any], xp: Any):
        self._xp = xp
        pair = max(1, 2 * rows * classes * dtype.itemsize)
        cache = xp.cuda.Device().attributes["L2CacheSize"]
        self._ahead = xp.empty(_AHEAD * cache, np.uint8)
        free = xp.cuda.runtime.memGetInfo()[0]
        most = int(free / (1.1 * pair))  # there are also states, and the random numbers
        if not most:
            raise MemoryError(
                f"{rows} x {classes} {dtype} logits and their gradient need {pair} bytes, {free} are free"
            )
        self.pairs = [
            (xp.empty((rows, classes), dtype), xp.empty((rows, classes), dtype))
            for _ in range(min(most, math.ceil(_CACHES * cache / pair)))
        ]
        self.refill()

    def refill(self) -> None:
        """Other logits."""
        rows, classes = self.pairs[0][0].shape
        step = min(rows, max(1, _DRAWN // max(1, classes)))
        drawn = np.random.default_rng(0).standard_normal((step, classes), np.float32)
        slab = self._xp.asarray(drawn.astype(self.pairs[0][0].dtype))
        for logits, _ in self.pairs:
            for first in range(0, rows, step):
                logits[first : first + step] = slab[: rows - first]

    def keep_busy(self) -> None:
        """Give the device something to do."""
        self._ahead.fill(0)


class _Kernels:
    """The two kernels alone, with everything that is not theirs prepared."""

    def __init__(self, logits: Array, targets: Array, class_start: int, xp: Any):
        rows, classes = logits.shape
        self._module = kernels_of(logits)
        columns = targets - class_start
        self._columns = xp.where((columns >= 0) & (columns < classes), columns, -1)
        self._layout = StateFields()
        self._options: dict[str, Any] = {
            "weights": ClassWeights(),
            "transform": Transform(),
            "compute_dtype": np.dtype(np.float64 if logits.dtype == np.float64 else np.float32),
        }
        self._class_start = class_start
        self._ones = xp.ones(rows)
        self._valid = xp.ones(rows, np.bool_)
        # Of logits that are gradients already it makes small numbers again.
        self._gradient = RowGradient(
            max=self._ones,
            factor=self._ones / max(1, classes),
            weight_factor=None,
            held_column=self._columns,
            held_gradient=-self._ones,
            valid=self._valid,
        )
        self.fused_fits = bool(self._module.fused_fits(logits[:, :, None], self._options["compute_dtype"]))

    def forward(self, logits: Array) -> None:
        self._module.fill_states(
            logits[:, :, None], self._columns, self._layout, class_start=self._class_start, **self._options
        )

    def backward(self, logits: Array, out: Array) -> None:
        self._module.write_gradient(out[:, :, None], logits[:, :, None], self._gradient, **self._options)

    def fused(self, logits: Array, out: Array) -> None:
        self._module.fill_states_and_write_gradient(
            out[:, :, None],
            logits[:, :, None],
            self._columns,
            self._layout,
            transform=self._options["transform"],
            compute_dtype=self._options["compute_dtype"],
            class_start=self._class_start,
            slope=self._ones,
            held=self._ones,
            valid=self._valid,
            z_loss=0.0,
        )


def _milliseconds(
    call: Callable[[Array, Array], object],
    before: Callable[[Array, Array], object] | None,
    shards: _Shards,
    repeat: int,
    comm: MPI.Intracomm | None,
    xp: Any,
) -> float:
    """The median time of `call`, `before` being done first and not timed."""
    times = []
    for repetition, (logits, out) in zip(range(_WARM_UP + repeat), cycle(shards.pairs), strict=False):
        if before is not None:
            before(logits, out)
        if comm is not None and comm.size > 1:
            agree(comm, "bench", {})  # all ranks start together
        else:
            shards.keep_busy()
        begin, end = xp.cuda.Event(), xp.cuda.Event()
        begin.record()
        call(logits, out)
        end.record()
        end.synchronize()
        if repetition >= _WARM_UP:
            times.append(float(xp.cuda.get_elapsed_time(begin, end)))
    return statistics.median(times)


def _peer_milliseconds(peer: Peer, call: Callable[[Any], object], shards: _Shards, repeat: int) -> float:
    """The same for a function of torch's; its stream is the one that CuPy uses unless told otherwise."""
    times = []
    tensors = [peer.tensor(logits) for logits, _ in shards.pairs]
    for repetition, tensor in zip(range(_WARM_UP + repeat), cycle(tensors), strict=False):
        begin, end = peer.event(), peer.event()
        shards.keep_busy()
        begin.record()
        call(tensor)
        end.record()
        end.synchronize()
        if repetition >= _WARM_UP:
            times.append(float(begin.elapsed_time(end)))
    return statistics.median(times)


def _merge_seconds(rows: int, repeat: int, comm: MPI.Intracomm) -> float:
    """The median time of the all-reduce of one plain record a row, on the host."""
    states = StateFields().identity(rows)
    times = []
    for _ in range(_WARM_UP + repeat):
        agree(comm, "bench", {})
        begin = time.perf_counter()
        all_reduce(states, comm, merge, operation="bench", reason="the softmax states of the shards, merged")
        times.append(time.perf_counter() - begin)
    return statistics.median(times[_WARM_UP:])


def _slowest(comm: MPI.Intracomm | None, value: float) -> float:
    if comm is None:
        return value
    return float(all_reduce(np.array(value), comm, "max", operation="bench", reason="the slowest rank's time"))
