"""python tests/peers/on_gloo_ranks.py RANK RANKS FOLDER: what functions of plain arrays do on a rank of a gloo group.

It prints lines of JSON, which test_torch_groups.py reads: a name, and bits or an error. MPI cannot be imported.
"""

from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
import json
import os
from pathlib import Path
import sys
from unittest import mock

import numpy as np
import torch
from torch import distributed

import pce_mpi as pce
from pce_mpi.jobs.patience import slowdown, wait_until
from pce_mpi.loss import passes

ROWS, CLASSES = 6, 13


def problem():
    """Logits of a student and a teacher, targets and upstream gradients."""
    rng = np.random.default_rng(0)
    x, y = (4 * rng.standard_normal((2, ROWS, CLASSES), np.float32)).round(3)
    x[0, 3], x[1] = -np.inf, 1.5
    return x, y, rng.integers(CLASSES, size=ROWS), rng.standard_normal(ROWS)


def shared(comm, mine):
    """The results that are alike on every rank, by name, of the classes `mine` of the problem."""
    x, y, targets, _ = problem()
    found = {
        "loss": pce.softmax_cross_entropy(x[:, mine], targets, label_smoothing=0.1, z_loss=1e-3, comm=comm),
        "statistics": pce.class_statistics(x[:, mine], targets, comm=comm),
        "several": pce.class_statistics(x[:, mine], targets[:, None] // [1, 2], comm=comm).log_prob,
        "divergence": pce.kl_divergence(y[:, mine], x[:, mine], reduction="none", comm=comm),
        "top_k": pce.top_k(x[:, mine], 5, comm=comm),
        "argmax": pce.argmax(x[:, mine], comm=comm),
        "nucleus": pce.nucleus(y[:, mine], top_p=0.9, comm=comm),
        "chosen": pce.take_classes(x[:, mine], targets[:, None], comm=comm),
    }
    # States of more than 2^20 bytes
    found["many rows"] = pce.softmax_cross_entropy(np.tile(x[:, mine], (4500, 1)), np.tile(targets, 4500), comm=comm)
    more = {"targets": targets, "comm": comm, "chunk": 4}
    statistics = pce.linear_class_statistics(np.eye(ROWS, dtype=np.float32), y[:, mine], **more)
    return found | {"linear": statistics}


def sharded(comm, mine):
    """The gradients of the classes `mine`, by name."""
    x, y, targets, upstream = problem()
    _, residuals = pce.softmax_cross_entropy_forward(x[:, mine], targets, reduction="none", comm=comm)
    _, of_statistics = pce.class_statistics_forward(x[:, mine], targets, comm=comm)
    options = {"label_smoothing": 0.1, "weight": np.arange(CLASSES)[mine] + 0.5, "comm": comm}
    return {
        "value_and_grad": pce.softmax_cross_entropy_value_and_grad(x[:, mine], targets, **options)[1],
        "backward": pce.softmax_cross_entropy_backward(upstream, residuals),
        "of_entropy": pce.class_statistics_backward(of_statistics, entropy=upstream),
        "of_divergence": pce.kl_divergence_value_and_grad(y[:, mine], x[:, mine], comm=comm)[1],
    }


def bits(found):
    parts = found if isinstance(found, tuple) else (found,)
    return [np.ascontiguousarray(part).tobytes().hex() for part in parts if part is not None]


def told(name, call):
    """Print the bits that a call returns, or the error that it raises."""
    try:
        said = bits(call())
    except Exception as error:
        said = [type(error).__name__, str(error)]
    print(json.dumps([name, said]), flush=True)


def in_a_child(call, path):
    """The words of a forked process that calls."""
    if (pid := os.fork()) == 0:
        try:
            call()
        except RuntimeError as error:
            path.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    raise RuntimeError(path.read_text())


@contextmanager
def ctrl_c_in(owner, name):
    """A program that is interrupted as soon as it comes to that function."""

    def interrupted(*_, **options):
        raise KeyboardInterrupt

    with mock.patch.object(owner, name, interrupted), suppress(KeyboardInterrupt):
        yield


def main():
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    assert "mpi4py" not in sys.modules
    sys.modules["mpi4py"] = None
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    comm, last, (x, _, targets, _) = distributed.group.WORLD, rank == size - 1, problem()
    mine = slice(*pce.shard_range(CLASSES, size, rank))
    for found in (shared(comm, mine), sharded(comm, mine)):
        for name, result in found.items():
            told(name, lambda result=result: result)
    with pce.trace() as trace:
        told("row losses", lambda: pce.softmax_cross_entropy(x[:, mine], targets, reduction="none", comm=comm))
    print(json.dumps(["trace", [[e.collective, e.purpose, e.ranks, e.bytes] for e in trace.events]]))

    def loss(given=targets, reduction="mean", **options):
        return lambda: pce.softmax_cross_entropy(x[:, mine], given, reduction=reduction, **{"comm": comm, **options})

    told("error on one rank", loss(targets[: ROWS - last]))
    told("disagreement", loss(reduction="sum" if last else "mean"))
    told("other targets", loss(targets - (targets > 0) * last))
    told("same ranks", loss(batch_comm=comm))
    told("usable", loss())
    told("forked", lambda: in_a_child(loss(), folder / f"child-{rank}"))
    rows = slice(*pce.shard_range(ROWS, size, rank))
    told("rows", lambda: pce.softmax_cross_entropy(x[rows], targets[rows], batch_comm=comm))
    tensors = torch.from_numpy(x[:, mine]), torch.from_numpy(targets)
    told("tensors", lambda: pce.softmax_cross_entropy(*tensors, comm=comm))

    short = distributed.new_group(timeout=timedelta(seconds=2 * slowdown()))
    done = [folder / str(other) for other in range(size - 1)]
    if last:
        wait_until(lambda: all(path.exists() for path in done))
    else:
        told("timeout", loss(comm=short))
        told("afterwards", loss(comm=short))
        done[rank].touch()
    # The first rank is interrupted between two collectives of a call, and catches it.
    left = distributed.new_group(timeout=timedelta(seconds=2 * slowdown()))
    with ctrl_c_in(passes, "start_all_reduce") if rank == 0 else nullcontext():
        told("beside one that left", loss(comm=left))
    told("after Ctrl-C", loss(comm=left))
    if rank == 0:
        told("after Ctrl-C again", lambda: pce.class_statistics(x[:, mine], comm=left).entropy)
    assert sys.modules["mpi4py"] is None


if __name__ == "__main__":
    main()
