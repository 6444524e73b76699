"""mpiexec -n 2 python -m mpi4py tests/peers/compare_transformer.py: a step of examples/transformer.py, and torch's.

Both train the GPT of the example from equal weights on equal random tokens, in one process a rank with one thread, and
take turns step by step, so that a noisy machine is noisy for both. On several ranks the batch is sharded, in torch by
DistributedDataParallel with gloo. The losses of the first 20 steps must agree to 1e-6; the steps after them are timed.
"""

import argparse
import os
from pathlib import Path
import sys
import tempfile
import time

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

from mpi4py import MPI
import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional

import pce_mpi as pce

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peers.compare_speed import processor
import transformer
from transformer import BETAS, EPS, GPT

COMM = MPI.COMM_WORLD
COMPARED = 20  # steps; they also warm up


class TorchGPT(nn.Module):
    """The model of examples/transformer.py."""

    def __init__(self, arrays, args):
        super().__init__()
        self.args = args
        # The names of parameters must not have dots.
        self.of = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(array) for name, array in arrays.items()})

    def forward(self, ids, targets):
        p, width = self.of, self.args.width
        x = p["tokens"][ids] + p["positions"][: ids.shape[1]]
        for layer in range(self.args.layers):
            y = functional.layer_norm(x, (width,), p[f"{layer}_attention_norm"])
            heads = (y @ p[f"{layer}_qkv"]).reshape(*ids.shape, self.args.heads, -1).transpose(1, 2)
            attended = functional.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
            x = x + attended.transpose(1, 2).reshape(x.shape) @ p[f"{layer}_out"]
            y = functional.layer_norm(x, (width,), p[f"{layer}_hidden_norm"])
            x = x + functional.gelu(y @ p[f"{layer}_up"], approximate="tanh") @ p[f"{layer}_down"]
        logits = functional.layer_norm(x, (width,), p["norm"]) @ p["tokens"].T + p["unigram"]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_torch(arrays, rows, args):
    """Make the function that takes a step, given its number, and returns the loss of this rank's rows before it."""
    model = TorchGPT(arrays, args)
    parallel = nn.parallel.DistributedDataParallel(model) if COMM.size > 1 else model
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in ((2, args.decay), (1, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, args.rate, BETAS, EPS)
    mine = slice(*pce.shard_range(args.batch, COMM.size, COMM.rank))

    def step(number):
        drawn = np.random.default_rng([args.seed, number]).integers(len(rows), size=args.batch)
        batch = torch.from_numpy(rows[drawn][mine])
        loss = parallel(batch[:, :-1], batch[:, 1:])
        loss.backward()
        clip = nn.utils.clip_grad_norm_ if number > COMPARED else clip_by_rows
        clip(model.parameters(), args.max_norm)
        lr = pce.cosine_schedule(number - 1, lr=args.rate, steps=args.steps, warmup=args.steps // 20)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def clip_by_rows(parameters, max_norm):
    """Clip as torch does, by a norm that is right to 1e-7.

    torch adds up the squares of a parameter in float32: of 2,560,000 elements the norm has an error of 1e-5 to 1e-4,
    and AdamW, which mixes the gradients of several steps, passes 1e-6 to 1e-5 of that on to the losses.
    """
    parameters = list(parameters)
    rows = [torch.linalg.vector_norm(parameter.grad, dim=-1) for parameter in parameters]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in rows]))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def main():
    args = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if COMM.size > 1:
            meeting = COMM.bcast(f"file://{folder}/meeting")
            distributed.init_process_group("gloo", init_method=meeting, rank=COMM.rank, world_size=COMM.size)
        compare(args)
        if COMM.size > 1:
            distributed.destroy_process_group()


def arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in (
        ("layers", 2),
        ("heads", 12),
        ("width", 96),
        ("length", 32),
        ("classes", 10_000),
        ("batch", 16),
        ("steps", 60),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate; if the loss rises, roundings grow")
    parser.set_defaults(seed=0, decay=0.1, max_norm=1.0, sequence_parallel=False)
    args = parser.parse_args()
    if args.steps <= COMPARED:
        parser.error(f"--steps must be above {COMPARED}, the number of steps before those that are timed")
    if args.batch % COMM.size:
        parser.error("each rank must have as many rows, as DistributedDataParallel averages over ranks")
    return args


def compare(args):
    rng = np.random.default_rng(1)
    rows = rng.integers(0, args.classes, (1000, args.length + 1))
    unigram = np.log(rng.dirichlet(np.ones(args.classes)))
    model = GPT(pce.Mesh(COMM, data=COMM.size, context=1, model=1), unigram, args)
    theirs = in_torch({name: torch.from_numpy(array.full()) for name, array in model.parameters.items()}, rows, args)
    steps = {"ours": lambda number: transformer.step(model, rows, number, args), "torch": theirs}
    losses, seconds, processor_seconds = ({name: [] for name in steps} for _ in range(3))
    for number in range(1, args.steps + 1):
        for name, step in steps.items():
            COMM.Barrier()
            start, processor_start = time.perf_counter(), time.process_time()
            losses[name].append(step(number))
            processor_seconds[name].append(time.process_time() - processor_start)
            COMM.Barrier()
            seconds[name].append(time.perf_counter() - start)
    losses["torch"] = COMM.allreduce(np.array(losses["torch"])) / COMM.size
    apart = max(abs(np.array(losses["ours"]) - losses["torch"])[:COMPARED] / losses["torch"][:COMPARED])
    if COMM.rank == 0:
        size = f"width {args.width}, {args.heads} heads, {args.layers} layers, {args.batch} x {args.length} tokens"
        print(
            f"{COMM.size} ranks; {processor()}; {size}, {args.classes} classes; median of {args.steps - COMPARED} steps"
        )
        report("time", seconds)
        report("processor time of rank 0", processor_seconds)
        print(f"losses of {COMPARED} steps differ by {apart:.1e} at most")
    if not apart <= 1e-6:
        sys.exit("losses differ")


def report(what, seconds):
    """Print the medians of both, the median of the ratios of steps that took turns, and that of the fastest steps."""
    ours, theirs = (1e3 * np.array(seconds[name][COMPARED:]) for name in ("ours", "torch"))
    medians = f"ours {np.median(ours):.1f} ms, torch {np.median(theirs):.1f} ms"
    ratios = f"{np.median(ours / theirs):.2f}, of the fastest steps {ours.min() / theirs.min():.2f}"
    print(f"{what}: {medians}, ratio {ratios}")


if __name__ == "__main__":
    main()
