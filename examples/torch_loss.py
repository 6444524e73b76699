"""A small torch model learns with a vocabulary that is sharded over the ranks of a process group, without MPI.

    torchrun --nproc-per-node 3 examples/torch_loss.py

prints

    loss 7.404, after 40 steps 0.001
    log-probabilities have the bits of one process: True

Each rank has the output weights of its own classes. The loss sends one softmax state a row and its gradient nothing;
torch sums that of the hidden states. Engines that score these logits have the same bits, on any ranks and under MPI.
"""

import torch
from torch import distributed
from torch.autograd.function import Function, once_differentiable

import pce_mpi as pce

TOKENS, CLASSES, WIDTH, STEPS = 64, 1001, 32, 40


class CrossEntropy(Function):
    """The loss of logits whose classes are sharded over `group`: a mean, or one number a row for "none"."""

    @staticmethod
    def forward(ctx, logits, targets, group, reduction="mean"):
        ctx.save_for_backward(logits)
        loss, ctx.kept = pce.softmax_cross_entropy_forward(logits.detach(), targets, comm=group, reduction=reduction)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        (_,) = ctx.saved_tensors  # raises if the logits, which `kept` has without a copy, were changed in place
        return pce.softmax_cross_entropy_backward(dloss, ctx.kept), None, None, None


class OnAllRanks(Function):
    """The same numbers on every rank; their gradient is the sum over the ranks, each of which has its own classes."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        distributed.all_reduce(total := dx.clone(), group=ctx.group)
        return total, None


def train(group):
    """Return the loss of each step, and the logits of this rank's classes with their targets."""
    torch.manual_seed(0)
    table, w, targets = torch.randn(TOKENS, WIDTH), torch.randn(CLASSES, WIDTH) / 4, torch.randint(CLASSES, (TOKENS,))
    table, w = table.requires_grad_(), w.tensor_split(group.size())[group.rank()].clone().requires_grad_()
    optimizer, losses = torch.optim.Adam([table, w], lr=0.03), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = OnAllRanks.apply(torch.tanh(table), group) @ w.T
        (loss := CrossEntropy.apply(logits, targets, group)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, logits.detach(), targets


def main(group):
    losses, logits, targets = train(group)
    distributed.all_gather_object(shards := [None] * group.size(), logits)
    sharded = pce.class_statistics(logits, targets, comm=group).log_prob
    alone = pce.class_statistics(torch.cat(shards, dim=1), targets).log_prob
    if group.rank() == 0:
        print(f"loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.3f}")
        print(f"log-probabilities have the bits of one process: {torch.equal(sharded, alone)}")


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    main(distributed.group.WORLD)
    distributed.destroy_process_group()
