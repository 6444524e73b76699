"""python tests/peers/compare_speed.py: our loss and gradient beside Megatron's algorithm in torch, alternating.

All run under mpiexec with one thread a rank, each pair one after the other, so that a noisy machine is noisy for both.
Megatron's algorithm is that of its unfused vocabulary-parallel cross entropy, in float32 for halves as there:
all-reduce the maximum, subtract, all-reduce the target's logit and the sum of exponentials, keep the exponentials and
turn them into the gradient in place. Beside them stand what a good engineer writes with torch.compile, the local parts
of sharded classes with one all-gather of three numbers a row, and the loss of a rank's own classes; both write the
gradient to memory that is there, as our functions do. So does a loop in numba over the rows of a rank's own
classes, for float32 and bfloat16. Before they are timed, these have to give the loss and the gradient of Megatron's
algorithm. Then torch's dense cross entropy of a rank's own classes, forward and backward, a copy of the logits, and the
memory that `value_and_grad(out=logits)` takes beyond them. torch gets transparent huge pages (THP_MEM_ALLOC_ENABLE=1),
as NumPy has anyway.
"""

import argparse
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
REPETITIONS, WARM_UP = 7, 2
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
OURS = ("forward then backward", "value_and_grad", "copy")
PEERS = ("compiled shards", "compiled dense", "numba dense", "torch dense")
MEMORY = "memory in place"


def main():
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(": ")[2].partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, help="default: as many as make the logits of a rank 125 MB")
    parser.add_argument("--classes", type=int, nargs="+", default=[32000], help="of all shards together")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["float32"])
    parser.add_argument("--pairs", type=int, default=7, help="alternations, of whose ratios the median counts")
    parser.add_argument(
        "--backend",
        default="inductor",
        help="of torch.compile; aot_eager takes no time to compile, and shows the numbers",
    )
    parser.add_argument("--role", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        check_ranks(options.ranks)
        options.classes, options.dtype = options.classes[0], options.dtype[0]
        seconds = {"ours": ours, "theirs": theirs}[options.role](options)
        if seconds is not None:
            print(json.dumps(seconds), flush=True)
    else:
        compare(options)


def check_ranks(ranks):
    from mpi4py import MPI

    from pce_mpi.comm.launcher import why_apart

    if apart := why_apart(MPI.COMM_WORLD, ranks):
        sys.exit(f"error: {apart}")


def compare(options):
    from tqdm import tqdm

    from pce_mpi.kernels import kernel_text

    sizes = [(dtype, classes) for dtype in options.dtype for classes in options.classes]
    print(f"{options.ranks} ranks; {processor()}; kernel: {kernel_text()}; median of {options.pairs} pairs")
    print("ms of Megatron's algorithm, the others in parts of it (lowest - highest), and MiB of memory in place\n")
    names = (*OURS, *PEERS)
    print(
        f"{'dtype':9} {'classes':>8} {'rows':>7} {'megatron':>9}  "
        + "  ".join(f"{name:>25}" for name in names)
        + "   MiB"
    )
    with tqdm(total=len(sizes) * options.pairs, desc="pairs", file=sys.stderr, disable=None) as bar:
        for dtype, classes in sizes:
            rows = options.rows or max(1, 125_000_000 * options.ranks // (classes * np.dtype(DTYPES[dtype]).itemsize))
            pairs = []
            for _ in range(options.pairs):
                given = ["--rows", str(rows), "--classes", str(classes), "--dtype", dtype]
                given += ["--backend", options.backend]
                pairs.append({**launch("theirs", options, given), **launch("ours", options, given)})
                bar.update()
            middle = statistics.median(pair["megatron"] for pair in pairs)
            cells = []
            for name in names:
                ratios = [pair[name] / pair["megatron"] for pair in pairs if name in pair]
                cells.append(
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})" if ratios else ""
                )
            memory = max(pair[MEMORY] for pair in pairs) / 2**20
            figures = "  ".join(f"{cell:>25}" for cell in cells)
            print(f"{dtype:9} {classes:8} {rows:7} {1e3 * middle:9.1f}  {figures}  {memory:4.1f}")


def processor():
    """The name of the processor, where the system tells it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "a processor")


def launch(role, options, given, program=__file__):
    """Run one role of a program on the ranks, and return what its first rank prints."""
    beside = Path(sys.executable).with_name("mpiexec")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            os.environ.get("MPIEXEC") or str(beside),
            *["-n", str(options.ranks), sys.executable, "-m", "mpi4py", program, "--role", role],
            *["--ranks", str(options.ranks), *given, "--meeting", f"{folder}/meeting"],
        ]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = os.environ | threads | {"THP_MEM_ALLOC_ENABLE": "1"}
        done = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def shard_of(options, rank, size):
    """Logits and targets of one rank; the same for both programs."""
    from pce_mpi import shard_range

    start, stop = shard_range(options.classes, size, rank)
    logits = np.random.default_rng(rank).standard_normal((options.rows, stop - start), np.float32)
    logits = logits.astype(DTYPES[options.dtype])
    return logits, np.random.default_rng(size).integers(0, options.classes, options.rows), start


def timed(steps, comm):
    """The median seconds of each step, of the slowest rank, in a dict by name; the steps run in turn."""
    seconds = {name: [] for name in steps}
    for repetition in range(WARM_UP + REPETITIONS):
        for name, step in steps.items():
            comm.Barrier()
            start = time.perf_counter()
            step()
            if repetition >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    slowest = comm.gather({name: statistics.median(values) for name, values in seconds.items()})
    return None if slowest is None else {name: max(rank[name] for rank in slowest) for name in steps}


def ours(options):
    from mpi4py import MPI

    import pce_mpi as pce

    comm = MPI.COMM_WORLD
    logits, targets, _ = shard_of(options, comm.rank, comm.size)
    out = np.zeros_like(logits)

    def forward_then_backward():
        _, residuals = pce.softmax_cross_entropy_forward(logits, targets, comm=comm)
        pce.softmax_cross_entropy_backward(1.0, residuals, out=out)

    def value_and_grad():
        pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=out)

    def copy():
        np.copyto(out, logits)

    seconds = timed(dict(zip(OURS, (forward_then_backward, value_and_grad, copy), strict=True)), comm)
    grown = comm.gather(
        memory_of(lambda: pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=logits))
    )
    return None if seconds is None else seconds | {MEMORY: max(grown)}


def memory_of(call):
    """The bytes by which the memory of this process grows at most, as Linux counts them."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = kibibytes("VmRSS")
    call()
    return 1024 * (kibibytes("VmHWM") - before)


def kibibytes(name):
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{name}:")[2].split()[0])


def theirs(options):
    from mpi4py import MPI
    import torch
    from torch import distributed

    from peers import fused_in_numba

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{comm.bcast(options.meeting)}", rank=comm.rank, world_size=comm.size
    )
    array, class_numbers, start = shard_of(options, comm.rank, comm.size)
    if options.dtype == "bfloat16":
        logits = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        logits = torch.from_numpy(array)
    targets, own = torch.from_numpy(class_numbers), torch.from_numpy(class_numbers % array.shape[1])
    rows = torch.arange(options.rows)

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets, start, group):
            ctx.dtype = logits.dtype
            if logits.dtype in (torch.float16, torch.bfloat16):
                logits = logits.float()
            top = logits.amax(dim=1)
            distributed.all_reduce(top, distributed.ReduceOp.MAX, group)
            shifted = logits - top[:, None]
            here = (targets >= start) & (targets < start + logits.shape[1])
            columns = torch.where(here, targets - start, 0)
            target_logit = torch.where(here, shifted[rows, columns], 0.0)
            distributed.all_reduce(target_logit, group=group)
            exponentials = shifted.exp_()
            total = exponentials.sum(dim=1)
            distributed.all_reduce(total, group=group)
            ctx.save_for_backward(exponentials, total, here, columns)
            return (total.log() - target_logit).mean()

        @staticmethod
        def backward(ctx, dloss):
            exponentials, total, here, columns = ctx.saved_tensors
            upstream = dloss / options.rows
            gradient = exponentials.mul_((upstream / total)[:, None])
            gradient[rows, columns] -= torch.where(here, upstream, 0.0)
            return gradient.to(ctx.dtype), None, None, None

    def forward_then_backward(targets=targets, start=start, group=None):
        x = logits.detach().requires_grad_()
        loss = CrossEntropy.apply(x, targets, start, group)
        loss.backward()
        return loss, x.grad

    alone = [distributed.new_group([rank]) for rank in range(comm.size)][comm.rank]

    def dense():
        x = logits.detach().requires_grad_()
        torch.nn.functional.cross_entropy(x, own).backward()

    compiled = torch.compile(backend=options.backend)
    out = torch.zeros_like(logits)
    here = (targets >= start) & (targets < start + logits.shape[1])
    columns = torch.where(here, targets - start, 0)

    wide = torch.promote_types(logits.dtype, torch.float32)

    @compiled
    def parts_of(x, columns, here):
        x = x.to(wide)
        top = x.amax(dim=1)
        total = (x - top[:, None]).exp().sum(dim=1)
        return torch.stack([top, total, torch.where(here, x.gather(1, columns[:, None])[:, 0], 0.0)])

    @compiled
    def loss_of(parts):
        top = parts[:, 0].amax(dim=0)
        logsumexp = top + ((parts[:, 0] - top).exp() * parts[:, 1]).sum(dim=0).log()
        return (logsumexp - parts[:, 2].sum(dim=0)).mean(), logsumexp

    @compiled
    def write_gradient(x, logsumexp, columns, here, out):
        at_target = (torch.arange(x.shape[1]) == columns[:, None]) & here[:, None]
        out.copy_(((x.to(wide) - logsumexp[:, None]).exp() - at_target.to(wide)) / len(x))

    def compiled_shards():
        part = parts_of(logits, columns, here)
        parts = part.new_empty(comm.size * len(part), part.shape[1])
        distributed.all_gather_single(parts, part)
        loss, logsumexp = loss_of(parts.view(comm.size, *part.shape))
        write_gradient(logits, logsumexp, columns, here, out)
        return loss

    everywhere = torch.ones_like(here)

    def compiled_dense():
        loss, logsumexp = loss_of(parts_of(logits, own, everywhere)[None])
        write_gradient(logits, logsumexp, own, everywhere, out)
        return loss

    peers = {"compiled shards": compiled_shards, "compiled dense": compiled_dense}
    if options.dtype in fused_in_numba.FORMS:
        fused = fused_in_numba.value_and_grad_of(options.dtype)
        x, gradient = (
            each.view(torch.uint16).numpy() if each.itemsize == 2 else each.numpy() for each in (logits, out)
        )
        peers["numba dense"] = lambda: torch.tensor(fused(x, own.numpy(), gradient))
    for name, peer in peers.items():
        right = forward_then_backward() if name == "compiled shards" else forward_then_backward(own, 0, alone)
        torch.testing.assert_close((peer(), out), right, rtol=1e-2, atol=1e-7, check_dtype=False)
    steps = {"megatron": forward_then_backward, **peers, "torch dense": dense}
    seconds = timed(steps, comm)
    distributed.destroy_process_group()
    return seconds


if __name__ == "__main__":
    main()
