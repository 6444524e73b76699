#!/usr/bin/env bash
# torch 2.13.0, numpy 2.4.6: DLPack exports the empty shell of a tensor that has its elements in others.
# MaskedTensor and DTensor are such tensors. Their .numpy() refuses with an error, but np.from_dlpack takes them and gives
# an array of the right shape and dtype whose numbers are those of no tensor: what lies in memory at the time.
# A guesser expects the data without its mask, the local shard, or the refusal that .numpy() gives.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 2>"$work/log" || { cat "$work/log"; exit 1; }
"$work/v/bin/python" -W ignore - <<'E'
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.masked import masked_tensor

print("torch", torch.__version__, "numpy", np.__version__)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.full((1000,), 1234.5)
wrapped = {
    "MaskedTensor": masked_tensor(x, torch.ones(1000, dtype=torch.bool)),
    "DTensor": distribute_tensor(x, init_device_mesh("cpu", (1,)), [Replicate()]),
}
for name, tensor in wrapped.items():
    try:
        tensor.numpy()
        refused = "none"
    except Exception as error:
        refused = type(error).__name__
    arrived = np.from_dlpack(tensor)
    right = int((arrived == 1234.5).sum())
    print(f"{name}: .numpy() raises {refused}; np.from_dlpack: {arrived.shape} {arrived.dtype}, {right} of 1000 right")
    assert refused == "RuntimeError" and arrived.shape == (1000,) and arrived.dtype == np.float32 and right == 0
print("the tensors themselves:", *(float(each.sum().to_local() if n == "DTensor" else each.sum().get_data()) for n, each in wrapped.items()))
dist.destroy_process_group()
E
