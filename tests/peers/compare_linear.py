"""python tests/peers/compare_linear.py: the loss of hidden @ w and its gradients, in chunks, beside torch's.

With --statistics: log-probabilities, entropies and logsumexp, and then the gradients of their sum, for which the logits
of each chunk are computed again.

All run under mpiexec with one thread a rank, each pair one after the other. torch's chunks are those of Liger's fused
linear cross entropy: the gradient of a chunk is taken while its logits are at hand. Its dense loss, which holds all
logits, is timed on one rank. Memory is what a call takes beyond its arguments and results, in chunks of logits.
"""

import argparse
import json
from pathlib import Path
import statistics
import sys

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.compare_speed import check_ranks, launch, memory_of, processor, timed

OURS, THEIRS = ("ours",), ("chunked", "dense")


def main():
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(": ")[2].partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--classes", type=int, default=32000, help="of all shards together")
    parser.add_argument("--chunk", type=int, default=512, help="rows of logits that are held at once")
    parser.add_argument("--pairs", type=int, default=5, help="alternations, of whose ratios the median counts")
    parser.add_argument("--statistics", action="store_true", help="statistics and their gradients in place of the loss")
    parser.add_argument("--role", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        check_ranks(options.ranks)
        found = {"ours": ours, "theirs": theirs}[options.role](options)
        if found is not None:
            print(json.dumps(found), flush=True)
    else:
        compare(options)


def compare(options):
    from tqdm import tqdm

    given = [
        word for name in ("rows", "features", "classes", "chunk") for word in (f"--{name}", str(getattr(options, name)))
    ]
    given += ["--statistics"] * options.statistics
    pairs = [
        {**launch("theirs", options, given, __file__), **launch("ours", options, given, __file__)}
        for _ in tqdm(range(options.pairs), desc="pairs", file=sys.stderr, disable=None)
    ]
    chunk = 4 * options.chunk * -(-options.classes // options.ranks)
    size = (
        f"{options.rows} rows, {options.features} features, {options.classes} classes, chunks of {options.chunk} rows"
    )
    print(f"{options.ranks} ranks; {processor()}; float32; {size}; median of {options.pairs} pairs")
    print(f"{'':8} {'ms':>8} {'of chunked':>22} {'chunks of memory':>17}")
    for name in (*THEIRS, *OURS):
        if name in pairs[0]:
            ratios = [pair[name] / pair["chunked"] for pair in pairs]
            middle = 1e3 * statistics.median(pair[name] for pair in pairs)
            part = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
            memory = statistics.median(pair[f"{name}, memory"] for pair in pairs) / chunk
            print(f"{name:8} {middle:8.1f} {part:>22} {memory:17.2f}")
    losses = {round(pair[name], 5) for pair in pairs for name in ("our loss", "their loss")}
    print(f"losses: {', '.join(map(str, sorted(losses)))}")


def operands(options, rank, size):
    """The hidden states, this rank's classes, and the targets."""
    from pce_mpi import shard_range

    start, stop = shard_range(options.classes, size, rank)
    hidden = np.random.default_rng(0).standard_normal((options.rows, options.features), np.float32)
    w = np.random.default_rng(rank + 1).standard_normal((options.features, stop - start), np.float32)
    return (
        hidden,
        w / np.float32(options.features**0.5),
        np.random.default_rng(0).integers(0, options.classes, options.rows),
        start,
    )


def measured(steps, comm, results):
    """The seconds of each step and the memory beyond its results, and the loss of each."""
    memory = {f"{name}, memory": memory_of(step) - results for name, step in steps.items()}
    seconds = timed(steps, comm)
    most = comm.gather(memory)
    return None if seconds is None else seconds | {name: max(each[name] for each in most) for name in memory}


def ours(options):
    from mpi4py import MPI

    import pce_mpi as pce

    comm = MPI.COMM_WORLD
    hidden, w, targets, _ = operands(options, comm.rank, comm.size)
    pce.linear_cross_entropy_value_and_grad(hidden[:2], w[:, :8], targets[:2] % 8, comm=comm)
    losses = []

    def loss():
        losses[:] = [pce.linear_cross_entropy_value_and_grad(hidden, w, targets, comm=comm, chunk=options.chunk)[0]]

    def statistics():
        found, residuals = pce.linear_class_statistics_forward(hidden, w, targets, comm=comm, chunk=options.chunk)
        pce.linear_class_statistics_backward(residuals, log_prob=1.0, entropy=1.0, logsumexp=1.0)
        losses[:] = [np.mean(found.entropy - found.log_prob)]

    found = measured({"ours": statistics if options.statistics else loss}, comm, hidden.nbytes + w.nbytes)
    return None if found is None else found | {"our loss": float(losses[0])}


def theirs(options):
    from mpi4py import MPI
    import torch
    from torch import distributed

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{comm.bcast(options.meeting)}", rank=comm.rank, world_size=comm.size
    )
    hidden, w, targets, start = operands(options, comm.rank, comm.size)
    h, weight, t = torch.from_numpy(hidden), torch.from_numpy(np.ascontiguousarray(w.T)), torch.from_numpy(targets)
    losses = []

    def chunks():
        """Give the place, the rows, their logits, and where the targets of this shard are."""
        for first in range(0, options.rows, options.chunk):
            part, own = h[first : first + options.chunk], t[first : first + options.chunk]
            here = (own >= start) & (own < start + len(weight))
            yield (
                slice(first, first + len(part)),
                part,
                part @ weight.T,
                (torch.arange(len(part))[here], (own - start)[here]),
            )

    def chunked():
        dh, dw, total = torch.empty_like(h), torch.zeros_like(weight), 0.0
        for place, part, z, (rows, columns) in chunks():
            top = z.amax(1)
            if comm.size > 1:
                distributed.all_reduce(top, op=distributed.ReduceOp.MAX)
            z.sub_(top[:, None])
            target = torch.zeros(len(part))
            target[rows] = z[rows, columns]
            z.exp_()
            both = torch.stack([z.sum(1), target])
            if comm.size > 1:
                distributed.all_reduce(both)
            total += float((both[0].log() - both[1]).sum())
            z.div_(both[0][:, None])
            z[rows, columns] -= 1
            z.div_(options.rows)
            torch.mm(z, weight, out=dh[place])
            dw.addmm_(z.T, part)
        if comm.size > 1:
            distributed.all_reduce(dh)
        losses[:] = [total / options.rows]

    def chunked_statistics():
        log_prob, entropy, logsumexp = torch.empty(3, options.rows)
        for place, part, z, target in chunks():
            top = z.amax(1)
            if comm.size > 1:
                distributed.all_reduce(top, op=distributed.ReduceOp.MAX)
            sums = torch.zeros(3, len(part))
            sums[2, target[0]] = z[target]
            e = torch.exp(z - top[:, None])
            sums[0], sums[1] = e.sum(1), z.mul_(e).sum(1)
            if comm.size > 1:
                distributed.all_reduce(sums)
            logsumexp[place] = sums[0].log() + top
            log_prob[place], entropy[place] = sums[2] - logsumexp[place], logsumexp[place] - sums[1] / sums[0]
        losses[:] = [float((entropy - log_prob).mean())]
        # The gradient of log_prob + entropy + logsumexp: [c = t] - p_c (log p_c + entropy)
        dh, dw = torch.empty_like(h), torch.zeros_like(weight)
        for place, part, z, target in chunks():
            z.sub_(logsumexp[place, None])
            p = z.exp()
            z.add_(entropy[place, None]).mul_(p).neg_()
            z[target] += 1
            torch.mm(z, weight, out=dh[place])
            dw.addmm_(z.T, part)
        if comm.size > 1:
            distributed.all_reduce(dh)

    def dense():
        a, b = h.detach().requires_grad_(), weight.detach().requires_grad_()
        torch.nn.functional.cross_entropy(a @ b.T, t).backward()

    steps = {"chunked": chunked_statistics if options.statistics else chunked}
    steps |= {"dense": dense} if comm.size == 1 and not options.statistics else {}
    found = measured(steps, comm, hidden.nbytes + w.nbytes)
    distributed.destroy_process_group()
    return None if found is None else found | {"their loss": losses[0]}


if __name__ == "__main__":
    main()
