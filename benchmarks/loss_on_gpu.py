"""Time the kernels and the public functions on a GPU, each beside a copy on the same device.

    mpiexec -n 1 python -m mpi4py benchmarks/loss_on_gpu.py --dtype bfloat16

A copy from device memory to device memory reads each byte once and writes it once, and nothing is faster. A figure is
given as gigabytes a second, of the bytes that the function must touch, and as a share of the speed of the copy in the
same run: a forward pass reads the logits, a backward pass reads them and writes the gradient.

CUDA events take the times, over arrays which together do not fit the second-level cache. On one rank a kernel spins
until the timed work has been launched: kernels take a few microseconds, Python some ten times as much. The spinning
kernel writes nothing, as written lines would go back to memory while the time runs. Kernels and whole functions have
tables of their own. On one rank, the losses of torch.compile, Liger and quack are timed as well, where they are
installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
import json
import math
import statistics
import sys
import time
from typing import Any, TypeVar, cast

from mpi4py import MPI
import numpy as np

from gpu_peers import Peer, peers, release_memory
from pce_mpi.arrays import dtype_named, import_cupy
from pce_mpi.cli.arguments import positive
from pce_mpi.cli.info import take_gpu_of_rank
from pce_mpi.cli.output import progress
from pce_mpi.comm.agreement import agree
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.placements import shard_range
from pce_mpi.gpu import gpus
from pce_mpi.kernels import kernel_of
from pce_mpi.kernels.compilation import OPTIONS
from pce_mpi.kernels.interface import DOUBLE, ROW_GRADIENT, SINGLE, ClassWeights, Pass, StateFields, Transform
from pce_mpi.loss import (
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)
from pce_mpi.loss.passes import merge_of
from pce_mpi.text import table

COMM = MPI.COMM_WORLD
Array = Any  # cupy.ndarray
Result = TypeVar("Result")

# Arrays that are used in turn take this many times the second-level cache.
CACHES = 4
# A GPU spins for so many clock cycles, about 1 ms, before it comes to the timed work.
CYCLES = 2_000_000
SPIN = """
#include <device.cuh>

__global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
"""
WARM_UP = 3
# What a loss without options keeps of a row.
PLAIN = StateFields()
# This many random numbers are drawn on the host, and repeated.
DRAWN = 2**22


@dataclass(frozen=True)
class Measurement:
    """One function at one size; the time is the slowest rank's median, bytes are those of one rank's shard."""

    rows: int
    classes: int
    dtype: str
    function: str
    ms: float
    gigabytes_per_second: float
    of_copy: float


def main() -> int:
    options = arguments()
    dtype = dtype_named(options.dtype)
    try:
        number = together(lambda: take_gpu_of_rank(COMM))
    except RuntimeError as error:
        return failed(str(error))
    measured = []
    names = [f"{classes} classes" for classes in options.classes]
    for classes, _ in zip(options.classes, progress("bench", names, COMM), strict=True):
        try:
            found, missing = measure(options.rows, classes, dtype, options.repeat)
        except MemoryError as error:
            found, missing = [], [f"{classes} classes: {error}"]
        measured += found
        if COMM.rank == 0:
            print(*(f"left out: {text}" for text in missing), sep="\n", end="\n" * bool(missing), file=sys.stderr)
    if COMM.rank > 0:
        return 0
    if options.json:
        print(json.dumps({"gpu": asdict(gpus()[number]), "measurements": [asdict(one) for one in measured]}, indent=1))
        return 0
    print(f"{gpus()[number].name}, {COMM.size} rank{'s' * (COMM.size > 1)}, median of {options.repeat}\n")
    head = ("rows", "classes", "dtype", "function", "ms", "GB/s", "of copy")
    for of_kernels in (True, False):
        rows = [tuple(asdict(one).values()) for one in measured if one.function.startswith("kernel") == of_kernels]
        print(table([head, *rows]), end="\n\n" if of_kernels else "\n")
    print(
        "\nGB/s: of one shard; forward reads its bytes once, all else reads and writes them, and `forward + backward`"
        "\nreads them twice; of copy: beside the copy from device memory to device memory of the same lines"
    )
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=positive, default=16384, help="rows of the logits (default: %(default)s)")
    parser.add_argument(
        "--classes", type=positive, nargs="+", default=[32000], help="classes of all shards together, sizes"
    )
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the logits; bfloat16 needs ml_dtypes")
    parser.add_argument("--repeat", type=positive, default=7, help="timed repetitions, of which the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")
    return parser.parse_args()


def failed(text: str) -> int:
    if COMM.rank == 0:
        print(text, flush=True)
    COMM.Barrier()  # the first rank to leave with an error ends the job
    return 2


def measure(rows: int, classes: int, dtype: np.dtype[Any], repeat: int) -> tuple[list[Measurement], list[str]]:
    """Time everything at one size on the current device of every rank.

    Also return which peers were left out and why. Raise `MemoryError` on every rank if the arrays of this size do not
    fit the device of one.
    """
    xp = import_cupy()
    start, stop = shard_range(classes, COMM.size, COMM.rank)
    xp.get_default_memory_pool().free_all_blocks()
    release_memory()
    agree(COMM, "bench", {})  # ranks that share a GPU have all given back the memory of an earlier size
    shards = together(lambda: Shards(rows, stop - start, dtype, xp))
    targets = xp.asarray(np.random.default_rng(COMM.size).integers(0, classes, rows))
    shard_bytes = rows * -(-classes // COMM.size) * dtype.itemsize
    found: list[Measurement] = []

    def add(function: str, milliseconds: float, passes: int) -> None:
        with cause("bench", reason="the slowest rank"):
            taken = float(all_reduce(np.array(milliseconds), COMM, "max"))
        speed = 1e-6 * passes * shard_bytes / taken
        copy = found[0].gigabytes_per_second if found else speed
        found.append(Measurement(rows, classes, dtype.name, function, taken, speed, speed / copy))

    def timed(call: Callable[[Array, Array], object], before: Callable[[Array, Array], object] | None = None) -> float:
        return event_milliseconds(call, before, shards, repeat, xp)

    add("kernel: copy", timed(lambda logits, out: xp.copyto(out, logits)), 2)
    kernels = Kernels(shards.pairs[0][0], targets, start, xp)
    parts = [timed(lambda logits, _: kernels.forward(logits)), timed(kernels.backward)]
    add("kernel: forward", parts[0], 1)
    add("kernel: backward", parts[1], 2)
    add("kernel: backward in place", timed(lambda logits, _: kernels.backward(logits, logits)), 2)
    shards.refill()  # logits again, where gradients have been written
    residuals: list[Any] = []

    def forward(logits: Array, _: Array) -> None:
        residuals[:] = [softmax_cross_entropy_forward(logits, targets, comm=COMM, num_classes=classes)[1]]

    def backward(_: Array, out: Array) -> None:
        softmax_cross_entropy_backward(1.0, residuals[0], out=out)

    def both(logits: Array, out: Array) -> None:
        forward(logits, out)
        backward(logits, out)

    def value_and_grad(logits: Array, out: Array) -> None:
        softmax_cross_entropy_value_and_grad(logits, targets, comm=COMM, num_classes=classes, out=out)

    add("forward", timed(forward), 1)
    add("backward", timed(backward, before=forward), 2)
    add("forward + backward", timed(both), 3)
    add("value_and_grad", timed(value_and_grad), 2)
    if COMM.size > 1:
        collective = 1e3 * merge_seconds(rows, repeat)
        add("kernels and collective", sum(parts) + collective, 3)
        return found, []
    left_out = []
    for name in peers():
        try:
            peer = Peer(name, targets)
            for function, call, passes in (("forward", peer.forward, 1), ("value_and_grad", peer.both, 2)):
                add(f"{name}: {function}", peer_milliseconds(peer, call, shards, repeat), passes)
        except Exception as error:  # it may lack a package, or know no such dtype or GPU, and says so in any way
            reason = str(error).partition("\n")[0]
            left_out.append(f"{name}, {classes} classes: {type(error).__name__}: {reason}")
    return found, left_out


def together(work: Callable[[], Result]) -> Result:
    """Return what `work` returns, or raise, on every rank alike, the error that it raised on one."""
    result, error = None, None
    try:
        result = work()
    except (MemoryError, RuntimeError) as raised:
        error = raised
    agree(COMM, "bench", {}, error=error)
    return cast("Result", result)


class Shards:
    """Pairs of random logits and room for their gradients, too many to fit the cache together."""

    def __init__(self, rows: int, classes: int, dtype: np.dtype[Any], xp: Any):
        self._xp = xp
        pair = max(1, 2 * rows * classes * dtype.itemsize)
        cache = xp.cuda.Device().attributes["L2CacheSize"]
        self._spin = xp.RawModule(code=SPIN, options=OPTIONS, name_expressions=["spin"]).get_function("spin")
        free = xp.cuda.runtime.memGetInfo()[0]
        most = int(free / (1.1 * pair))  # there are also states, and the random numbers
        if not most:
            raise MemoryError(
                f"{rows} x {classes} {dtype} logits and their gradient need {pair} bytes, {free} are free"
            )
        self.pairs = [
            (xp.empty((rows, classes), dtype), xp.empty((rows, classes), dtype))
            for _ in range(min(most, math.ceil(CACHES * cache / pair)))
        ]
        self.refill()

    def refill(self) -> None:
        """Write random logits."""
        rows, classes = self.pairs[0][0].shape
        step = min(rows, max(1, DRAWN // max(1, classes)))
        drawn = np.random.default_rng(0).standard_normal((step, classes), np.float32)
        slab = self._xp.asarray(drawn.astype(self.pairs[0][0].dtype))
        for logits, _ in self.pairs:
            for first in range(0, rows, step):
                logits[first : first + step] = slab[: rows - first]

    def keep_busy(self) -> None:
        self._spin((1, 1, 1), (32, 1, 1), (np.int64(CYCLES),))


class Kernels:
    """The kernels alone, with all their arguments prepared."""

    def __init__(self, logits: Array, targets: Array, class_start: int, xp: Any):
        rows, classes = logits.shape
        self._module = kernel_of(logits)
        columns = targets - class_start
        self._columns = xp.where((columns >= 0) & (columns < classes), columns, -1)
        self._how = Pass(PLAIN, Transform(), DOUBLE if logits.dtype == np.float64 else SINGLE)
        self._class_start = class_start
        # Logits that are gradients already become small numbers again.
        gradients = np.zeros((rows, len(ROW_GRADIENT)))
        gradients.view(np.int64)[:, ROW_GRADIENT["column"]] = xp.asnumpy(self._columns)
        gradients.view(np.int64)[:, ROW_GRADIENT["valid"]] = 1
        gradients[:, ROW_GRADIENT["factor"]], gradients[:, ROW_GRADIENT["held_gradient"]] = 1.0 / max(1, classes), -1.0
        self._gradients = xp.asarray(gradients.view(np.uint64))

    def forward(self, logits: Array) -> None:
        self._module.fill_states(logits[:, :, None], self._columns, self._how, ClassWeights(), self._class_start)

    def backward(self, logits: Array, out: Array) -> None:
        self._module.write_gradient(out[:, :, None], logits[:, :, None], self._gradients, self._how, ClassWeights())


def event_milliseconds(
    call: Callable[[Array, Array], object],
    before: Callable[[Array, Array], object] | None,
    shards: Shards,
    repeat: int,
    xp: Any,
) -> float:
    """The median time of `call`; `before` runs first, untimed."""
    times = []
    for repetition, (logits, out) in zip(range(WARM_UP + repeat), cycle(shards.pairs), strict=False):
        if before is not None:
            before(logits, out)
        if COMM.size > 1:
            agree(COMM, "bench", {})  # all ranks start together
        else:
            shards.keep_busy()
        begin, end = xp.cuda.Event(), xp.cuda.Event()
        begin.record()
        call(logits, out)
        end.record()
        end.synchronize()
        if repetition >= WARM_UP:
            times.append(float(xp.cuda.get_elapsed_time(begin, end)))
    return statistics.median(times)


def peer_milliseconds(peer: Peer, call: Callable[[Any], object], shards: Shards, repeat: int) -> float:
    """Time a function of torch's; its stream is CuPy's default."""
    times = []
    tensors = [peer.tensor(logits) for logits, _ in shards.pairs]
    for repetition, tensor in zip(range(WARM_UP + repeat), cycle(tensors), strict=False):
        begin, end = peer.event(), peer.event()
        shards.keep_busy()
        begin.record()
        call(tensor)
        end.record()
        end.synchronize()
        if repetition >= WARM_UP:
            times.append(float(begin.elapsed_time(end)))
    return statistics.median(times)


def merge_seconds(rows: int, repeat: int) -> float:
    """The median time of the all-reduce of one plain softmax state a row, on the host."""
    states, merge = PLAIN.identity(rows), merge_of(Pass(PLAIN, Transform(), SINGLE))
    times = []
    for _ in range(WARM_UP + repeat):
        agree(COMM, "bench", {})
        begin = time.perf_counter()
        with cause("bench", reason="the softmax states of the shards, merged"):
            all_reduce(states, COMM, merge)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())
