"""python tests/peers/compare_neighbours.py: options and neighbours of the loss beside what torch users write, in turn.

Ours runs under mpiexec with one thread a rank. torch computes the same from the logits of all classes, in one process
with a thread for each rank. Each pair runs one after the other, so that a noisy machine is noisy for both; the median
of the ratios counts. torch takes halves as float32, as trainers do.
"""

import argparse
import json
from pathlib import Path
import sys
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.compare_speed import DTYPES, check_ranks, launch, processor, timed


def logits(options, start, stop, seed):
    """Logits of some classes; those of a block of classes are the same in any shard."""
    blocks = range(start // 1000, -(-stop // 1000))
    drawn = [np.random.default_rng([seed, block]).standard_normal((options.rows, 1000), np.float32) for block in blocks]
    mine = np.concatenate(drawn, axis=1)[:, start - 1000 * blocks.start :][:, : stop - start]
    return mine.astype(DTYPES[options.dtype])


def tensor(array):
    import torch

    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def wide(x):
    """The tensor in float32 if its elements are halves."""
    return x.float() if x.itemsize == 2 else x


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

        student, teacher = map(tensor, pair_of(options, 0, options.classes))
        student.requires_grad_()

        def step():
            student.grad = None
            s, t = log_softmax(wide(student), -1), log_softmax(wide(teacher), -1)
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

        x, (ids, places) = tensor(3 * logits(options, 0, options.classes, 0)), support_of(options)
        ids, places = torch.from_numpy(ids), torch.from_numpy(places)[:, None]

        def step():
            log_p = torch.log_softmax(wide(x.gather(1, ids) if with_support else x), -1)
            log_p.gather(1, places if with_support else ids.gather(1, places))
            return -(log_p.exp() * log_p).sum(-1).mean()

        return step

    return prepare


def our_nucleus(options, comm, start, stop):
    import pce_mpi as pce

    x = 3 * logits(options, start, stop, 0)
    return lambda: pce.nucleus(x, top_p=0.9, comm=comm, num_classes=options.classes).offsets[-1]


def their_nucleus(options):

    from peers.test_samplers import hugging_face

    x = wide(tensor(3 * logits(options, 0, options.classes, 0)))
    return lambda: hugging_face(x, None, 0.9, None).isfinite().sum()


def targets_of(options):
    return np.random.default_rng(3).integers(options.classes, size=options.rows)


def weights_of(options):
    return np.random.default_rng(4).random(options.classes)


def probabilities_of(options):
    """Powers of two, which are exact in halves, that add up to 1."""
    whole = 2 ** (options.classes - 1).bit_length()
    p = np.where(np.arange(options.classes) < whole - options.classes, 2, 1) / whole
    return np.tile(p.astype(DTYPES[options.dtype]), (options.rows, 1))


def our_loss(given, weighted=False, probabilities=False):
    def prepare(options, comm, start, stop):
        import pce_mpi as pce

        x = 3 * logits(options, start, stop, 0)
        targets = probabilities_of(options)[:, start:stop].copy() if probabilities else targets_of(options)
        weight = weights_of(options)[start:stop] if weighted else None
        more = {"comm": comm, "num_classes": options.classes, "weight": weight, "out": np.zeros_like(x), **given}
        return lambda: pce.softmax_cross_entropy_value_and_grad(x, targets, **more)[0]

    return prepare


def their_loss(given, weighted=False, probabilities=False):
    def prepare(options):
        import torch

        x = tensor(3 * logits(options, 0, options.classes, 0)).requires_grad_()
        targets = wide(tensor(probabilities_of(options))) if probabilities else tensor(targets_of(options))
        weight = tensor(weights_of(options)).to(wide(x).dtype) if weighted else None
        smoothing = given.get("label_smoothing", 0.0)

        def step():
            x.grad = None
            seen = wide(x) * given["logit_scale"] if "logit_scale" in given else wide(x)
            if "softcap" in given:
                seen = given["softcap"] * torch.tanh(seen / given["softcap"])
            loss = torch.nn.functional.cross_entropy(seen, targets, weight, label_smoothing=smoothing)
            if "z_loss" in given:
                loss = loss + given["z_loss"] * torch.logsumexp(seen, -1).square().mean()
            loss.backward()
            return loss.detach()

        return step

    return prepare


def our_statistics_with_gradient(options, comm, start, stop):
    import pce_mpi as pce

    x, targets = 3 * logits(options, start, stop, 0), targets_of(options)
    out, ones = np.zeros_like(x), np.ones(options.rows)

    def step():
        found, residuals = pce.class_statistics_forward(x, targets, comm=comm, num_classes=options.classes)
        pce.class_statistics_backward(residuals, log_prob=ones, entropy=ones, out=out)
        return found.entropy.mean()

    return step


def their_statistics_with_gradient(options):
    import torch

    x = tensor(3 * logits(options, 0, options.classes, 0)).requires_grad_()
    targets = tensor(targets_of(options))[:, None]

    def step():
        x.grad = None
        log_p = torch.log_softmax(wide(x), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (log_p.gather(1, targets).sum() + entropy.sum()).backward()
        return entropy.detach().mean()

    return step


def our_largest(name):
    def prepare(options, comm, start, stop):
        import pce_mpi as pce

        x, given = 3 * logits(options, start, stop, 0), {"comm": comm, "num_classes": options.classes}
        if name == "argmax":
            return lambda: pce.argmax(x, **given).mean()
        return lambda: pce.top_k(x, 10, **given)[0].astype(np.float64).mean()

    return prepare


def their_largest(name):
    def prepare(options):
        x = tensor(3 * logits(options, 0, options.classes, 0))
        if name == "argmax":
            return lambda: x.argmax(-1).double().mean()
        return lambda: x.topk(10)[0].double().mean()

    return prepare


LOSSES: dict[str, dict[str, Any]] = {
    "the plain loss": {"given": {}},
    "weight": {"given": {}, "weighted": True},
    "probabilities as targets": {"given": {}, "probabilities": True},
    "label_smoothing with weight": {"given": {"label_smoothing": 0.1}, "weighted": True},
    **{
        f"{name}={value}": {"given": {name: value}}
        for name, value in (("z_loss", 1e-4), ("logit_scale", 0.7), ("label_smoothing", 0.1), ("softcap", 30.0))
    },
}

# Our function, prepared with this rank's classes, and torch's, with all classes; what both return is compared.
CASES = {
    f"kl_divergence, {direction}": (our_divergence(direction), their_divergence(direction))
    for direction in ("forward", "reverse", "jensen-shannon")
} | {
    "class_statistics": (our_support(False), their_support(False)),
    "class_statistics, 64 classes": (our_support(True), their_support(True)),
    "nucleus, top-p 0.9": (our_nucleus, their_nucleus),
    **{name: (our_loss(**given), their_loss(**given)) for name, given in LOSSES.items()},
    "class_statistics and gradient": (our_statistics_with_gradient, their_statistics_with_gradient),
    **{name: (our_largest(name), their_largest(name)) for name in ("top_k of 10", "argmax")},
}


def main():
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(": ")[2].partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=32000, help="of all shards together")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of the logits")
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

    print(f"{options.ranks} ranks; {processor()}; {options.dtype}; {options.rows} rows, {options.classes} classes")
    print(f"{'':32} {'torch, ms':>10} {'ours, ms':>10} {'ratio':>22}")
    given = ["--rows", str(options.rows), "--classes", str(options.classes), "--dtype", options.dtype, "--case"]
    pairs = [
        [launch(role, options, [*given, *options.case], __file__) for role in ("theirs", "ours")]
        for _ in tqdm(range(options.pairs), desc="pairs", file=sys.stderr, disable=None)
    ]
    for case in options.case:
        seconds = np.array([[each[case]["seconds"] for each in pair] for pair in pairs])
        theirs_ms, ours_ms = 1e3 * np.median(seconds, axis=0)
        ratios = seconds[:, 1] / seconds[:, 0]
        part = f"{np.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        print(f"{case:32} {theirs_ms:10.1f} {ours_ms:10.1f} {part:>22}", flush=True)
    for case in options.case:
        results = [each[case]["result"] for each in pairs[0]]
        np.testing.assert_allclose(*results, rtol=1e-4, err_msg=case)


def ours(options):
    from mpi4py import MPI

    from pce_mpi import shard_range

    check_ranks(options.ranks)
    comm = MPI.COMM_WORLD
    shard = shard_range(options.classes, comm.size, comm.rank)
    found = {case: measured(CASES[case][0](options, comm, *shard), comm) for case in options.case}
    return None if comm.rank else found


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
    found = {case: measured(CASES[case][1](options), MPI.COMM_SELF) for case in options.case}
    comm.Ibarrier().Wait()
    return found


def measured(step, comm):
    """The median seconds of a step, of the slowest rank, and what it returns; None on other ranks than the first."""
    results = []

    def kept():
        results[:] = [step()]

    seconds = timed({"seconds": kept}, comm)
    return None if seconds is None else seconds | {"result": np.asarray(results[0], np.float64).tolist()}


if __name__ == "__main__":
    main()
