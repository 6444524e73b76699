#!/usr/bin/env bash
# torch 2.13.0 (2.14.1 gave the same), CPU, gloo, 2 ranks: the gradient of a product along a sharded axis of a DTensor.
# One row has the right gradient; two rows raise RuntimeError "aten.cat.default got mixed torch.Tensor and DTensor" in
# backward, on every rank, although the products themselves are right, and sum, amax and logsumexp of the same tensor
# have gradients. A guesser expects one answer for one row and for two.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 >"$work/pip.log" 2>&1 || { tail -n 5 "$work/pip.log"; exit 1; }
cat >"$work/seen.py" <<'P'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import spawn

WORDS = "aten.cat.default got mixed torch.Tensor and DTensor"


def gradient(mesh, rows, function):
    x = distribute_tensor(torch.tensor([[1.0, 2.0, 3.0, 4.0]] * rows), mesh, [Shard(1)]).requires_grad_()
    value = function(x).full_tensor()
    try:
        value.sum().backward()
    except RuntimeError as error:
        return value.tolist(), WORDS if WORDS in str(error) else str(error)
    return value.tolist(), x.grad.full_tensor().tolist()


def rank_of_two(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    one, two = (gradient(mesh, rows, lambda x: x.prod(1)) for rows in (1, 2))
    summed = gradient(mesh, 2, lambda x: x.sum(1))
    if rank == 0:
        print("torch", torch.__version__)
        print("product of one row:", *one)
        print("products of two rows:", *two)
        print("sums of two rows:", *summed)
    assert one == ([24.0], [[24.0, 12.0, 8.0, 6.0]]), "the behaviour has changed"
    assert two == ([24.0, 24.0], WORDS), "the behaviour has changed"
    assert summed == ([10.0, 10.0], [[1.0] * 4] * 2), "the behaviour has changed"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(rank_of_two, (sys.argv[1],), nprocs=2)
P
"$work/venv/bin/python" "$work/seen.py" "$work/store" 2>"$work/errors" || { tail -n 5 "$work/errors"; exit 1; }
