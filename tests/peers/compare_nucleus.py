"""python tests/peers/compare_nucleus.py: the classes that top-k and top-p leave, beside a sort of all logits in torch.

All run under mpiexec with one thread a rank, each pair one after the other. In torch each rank gathers the logits of
all shards and masks all rows, as Hugging Face's warpers do: "gathered" is both, "sort" is the masking alone.
"""

import argparse
import json
from pathlib import Path
import statistics
import sys

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.compare_speed import check_ranks, launch, processor, timed


def main():
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(": ")[2].partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=32000, help="of all shards together")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--pairs", type=int, default=3, help="alternations, of whose ratios the median counts")
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

    given = ["--rows", str(options.rows), "--classes", str(options.classes), "--top-p", str(options.top_p)]
    given += [] if options.top_k is None else ["--top-k", str(options.top_k)]
    pairs = [
        {**launch("theirs", options, given, __file__), **launch("ours", options, given, __file__)}
        for _ in tqdm(range(options.pairs), desc="pairs", file=sys.stderr)
    ]
    size = f"{options.rows} rows, {options.classes} classes, top-k {options.top_k}, top-p {options.top_p}"
    print(f"{options.ranks} ranks; {processor()}; float32; {size}; median of {options.pairs} pairs")
    for name in ("gathered", "sort", "ours"):
        middle = 1e3 * statistics.median(pair[name] for pair in pairs)
        print(f"{name:8} {middle:8.1f} ms {statistics.median(pair[name] / pair['gathered'] for pair in pairs):6.2f}")


def shard_of(options, rank, size):
    """The logits of this rank: those of the ranks are of one length."""
    shape = options.rows, options.classes // size
    return 3 * np.random.default_rng(rank).standard_normal(shape, np.float32)


def ours(options):
    from mpi4py import MPI

    import pce_mpi as pce

    comm = MPI.COMM_WORLD
    logits = shard_of(options, comm.rank, comm.size)
    limits = {"top_k": options.top_k, "top_p": options.top_p}
    pce.nucleus(logits[:2], comm=comm, **limits)
    return timed({"ours": lambda: pce.nucleus(logits, comm=comm, **limits)}, comm)


def theirs(options):
    from mpi4py import MPI
    import torch
    from torch import distributed

    from peers.test_samplers import hugging_face

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{comm.bcast(options.meeting)}", rank=comm.rank, world_size=comm.size
    )
    logits = torch.from_numpy(shard_of(options, comm.rank, comm.size))
    shards = [torch.empty_like(logits) for _ in range(comm.size)]
    whole = torch.cat([logits] * comm.size, dim=1)

    def gathered():
        distributed.all_gather(shards, logits)
        hugging_face(torch.cat(shards, dim=1), options.top_k, options.top_p, None)

    steps = {"gathered": gathered, "sort": lambda: hugging_face(whole, options.top_k, options.top_p, None)}
    found = timed(steps, comm)
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
