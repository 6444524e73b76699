"""python tests/peers/compare_neighbours.py: the neighbours of the loss beside what torch users write, alternating.

Ours runs under mpiexec with one thread a rank. torch computes the same from the logits of all classes, in one process
with a thread for each rank. Each pair runs one after the other, so that a noisy machine is noisy for both; the median
of the ratios counts.
"""

import argparse
import json
from pathlib import Path
import statistics
import sys

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.compare_speed import check_ranks, launch, processor, timed


def logits(options, start, stop, seed):
    """Logits of some classes, in float32; those of a block of classes are the same in any shard."""
    blocks = range(start // 1000, -(-stop // 1000))
    drawn = [np.random.default_rng([seed, block]).standard_normal((options.rows, 1000), np.float32) for block in blocks]
    return np.concatenate(drawn, axis=1)[:, start - 1000 * blocks.start :][:, : stop - start].copy()


def pair_of(options, start, stop):
    """A student, and a teacher that is near."""
    student = 3 * logits(options, start, stop, 0)
    return student, student + logits(options, start, stop, 1)


def our_divergence(direction):
    def prepare(options, comm, start, stop):
        import pce_mpi as pce

        student, teacher = pair_of(options, start, stop)
        out = np.zeros_like(student)
        more = {"comm": comm, "num_classes": options.classes, "direction": direction, "out": out}
        return lambda: pce.kl_divergence_value_and_grad(student, teacher, **more)[0]

    return prepare


def their_divergence(direction):
    def prepare(options):
        import torch
        from torch.nn.functional import kl_div, log_softmax

        student, teacher = map(torch.from_numpy, pair_of(options, 0, options.classes))
        student.requires_grad_()

        def step():
            student.grad = None
            s, t = log_softmax(student, -1), log_softmax(teacher, -1)
            if direction == "forward":
                loss = kl_div(s, t, reduction="batchmean", log_target=True)
            elif direction == "reverse":
                loss = kl_div(t, s, reduction="batchmean", log_target=True)
            else:
                m = torch.logaddexp(s, t) - np.log(2)
                both = [kl_div(m, each, reduction="batchmean", log_target=True) for each in (s, t)]
                loss = sum(both) / 2
            loss.backward()
            return loss.detach()

        return step

    return prepare


def support_of(options):
    """64 classes a row, a target among them, the same on every rank."""
    rng = np.random.default_rng(2)
    first = rng.integers(options.classes // 64, size=(options.rows, 1))
    return first + np.arange(64) * (options.classes // 64), rng.integers(64, size=options.rows)


def our_support(with_support):
    def prepare(options, comm, start, stop):
        import pce_mpi as pce

        x, (ids, places) = 3 * logits(options, start, stop, 0), support_of(options)
        support = (ids.reshape(-1), 64 * np.arange(options.rows + 1)) if with_support else None
        given = {"comm": comm, "num_classes": options.classes, "support": support}
        return lambda: pce.class_statistics(x, ids[np.arange(len(ids)), places], **given).entropy.mean()

    return prepare


def their_support(with_support):
    def prepare(options):
        import torch

        x, (ids, places) = torch.from_numpy(3 * logits(options, 0, options.classes, 0)), support_of(options)
        ids, places = torch.from_numpy(ids), torch.from_numpy(places)[:, None]

        def step():
            log_p = torch.log_softmax(x.gather(1, ids) if with_support else x, -1)
            log_p.gather(1, places if with_support else ids.gather(1, places))
            return -(log_p.exp() * log_p).sum(-1).mean()

        return step

    return prepare


def our_nucleus(options, comm, start, stop):
    import pce_mpi as pce

    x = 3 * logits(options, start, stop, 0)
    return lambda: pce.nucleus(x, top_p=0.9, comm=comm, num_classes=options.classes).offsets[-1]


def their_nucleus(options):
    import torch

    from peers.test_samplers import hugging_face

    x = torch.from_numpy(3 * logits(options, 0, options.classes, 0))
    return lambda: hugging_face(x, None, 0.9, None).isfinite().sum()


# Our function, prepared with this rank's classes, and torch's, with all classes; what both return is compared.
CASES = {
    f"kl_divergence, {direction}": (our_divergence(direction), their_divergence(direction))
    for direction in ("forward", "reverse", "jensen-shannon")
} | {
    "class_statistics": (our_support(False), their_support(False)),
    "class_statistics, 64 classes": (our_support(True), their_support(True)),
    "nucleus, top-p 0.9": (our_nucleus, their_nucleus),
}


def main():
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(": ")[2].partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=32000, help="of all shards together")
    parser.add_argument("--pairs", type=int, default=5, help="alternations, of whose ratios the median counts")
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--role", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        found = {"ours": ours, "theirs": theirs}[options.role](options)
        if found is not None:
            print(json.dumps(found), flush=True)
    else:
        compare(options)


def compare(options):
    from tqdm import tqdm

    print(f"{options.ranks} ranks; {processor()}; float32; {options.rows} rows, {options.classes} classes")
    print(f"{'':32} {'torch, ms':>10} {'ours, ms':>10} {'ratio':>22}")
    for case in options.case:
        given = ["--rows", str(options.rows), "--classes", str(options.classes), "--case", case]
        pairs = [
            [launch(role, options, given, __file__) for role in ("theirs", "ours")]
            for _ in tqdm(range(options.pairs), desc=case, file=sys.stderr)
        ]
        ratios = [mine["seconds"] / other["seconds"] for other, mine in pairs]
        theirs_ms, ours_ms = (1e3 * statistics.median(pair[at]["seconds"] for pair in pairs) for at in (0, 1))
        part = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        print(f"{case:32} {theirs_ms:10.1f} {ours_ms:10.1f} {part:>22}", flush=True)
        np.testing.assert_allclose(pairs[0][1]["result"], pairs[0][0]["result"], rtol=1e-4)


def ours(options):
    from mpi4py import MPI

    from pce_mpi import shard_range

    check_ranks(options.ranks)
    comm = MPI.COMM_WORLD
    prepare, _ = CASES[options.case[0]]
    step = prepare(options, comm, *shard_range(options.classes, comm.size, comm.rank))
    return measured(step, comm)


def theirs(options):
    """The first rank computes with the threads of all; the others wait without taking a core."""
    import os
    import time

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.rank:
        done = comm.Ibarrier()
        while not done.Test():
            time.sleep(0.05)
        return None
    import torch

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # mpiexec may have bound the rank to a core
    torch.set_num_threads(options.ranks)
    _, prepare = CASES[options.case[0]]
    found = measured(prepare(options), MPI.COMM_SELF)
    comm.Ibarrier().Wait()
    return found


def measured(step, comm):
    results = []

    def kept():
        results[:] = [step()]

    seconds = timed({"seconds": kept}, comm)
    return None if seconds is None else seconds | {"result": np.asarray(results[0], np.float64).tolist()}


if __name__ == "__main__":
    main()
