"""`nucleus` keeps the classes that samplers in torch keep, but for rows where float32 or equal logits decide."""

from collections import Counter

import numpy as np
import pytest
import torch

import pce_mpi as pce
from ranks.warpers import drawn, our_limits, reason

ROWS = 100_000


def hugging_face(z, top_k, top_p, min_p):
    """The steps of transformers' warpers, of which each masks the logits for the next."""
    if top_k is not None:
        z = z.masked_fill(z < torch.topk(z, min(top_k, z.shape[1]))[0][:, -1:], -torch.inf)
    if top_p is not None:
        ascending, order = torch.sort(z)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        removed[:, -1] = False
        z = z.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    if min_p is not None:
        p = z.softmax(-1)
        z = z.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    return z


def vllm(z, top_k, top_p, min_p):
    """The masks of `apply_top_k_top_p_pytorch`, both on the logits in order; limits are tensors there."""
    assert min_p is None
    ascending, order = z.sort(dim=-1)
    if top_k is not None:
        ascending.masked_fill_(ascending < ascending[:, [max(0, z.shape[1] - top_k)]], -torch.inf)
    if top_p is not None:
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - torch.tensor([[top_p]])
        removed[:, -1] = False
        ascending.masked_fill_(removed, -torch.inf)
    return z.scatter(-1, order, ascending)


@pytest.mark.ranks(1)  # any ranks draw these sets
@pytest.mark.parametrize("sampler", [hugging_face, vllm])
def test_each_row_that_differs_has_reason(sampler):
    found = Counter()
    for x, options in drawn(ROWS):
        if sampler is vllm:  # it has a min-p elsewhere, before the other two
            options = options | {"min_p": None}
        limits = {name: value for name, value in options.items() if name != "temperature"}
        nucleus = pce.nucleus(x, **our_limits(options))
        ours = np.zeros(x.shape, np.bool_)
        ours[np.repeat(np.arange(len(x)), np.diff(nucleus.offsets)), nucleus.ids] = True
        z = torch.from_numpy(x.astype(np.float32)) / options["temperature"]
        theirs = (sampler(z, **limits) > -torch.inf).numpy()
        differ = np.flatnonzero((ours != theirs).any(1))
        found.update(reason(x[row], ours[row], theirs[row], options) for row in differ)
        found["same"] += len(x) - len(differ)
    assert "" not in found, found
    assert found["same"] > 0.9 * found.total()
