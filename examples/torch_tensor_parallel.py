"""A torch model that parallelize_module has sharded learns with losses that take the place of loss_parallel().

    torchrun --nproc-per-node 3 examples/torch_tensor_parallel.py

prints

    loss 7.132, after 40 steps 1.060
    class numbers          0.084, bits of one process: True
    weights, ignored rows  0.082, bits of one process: True
    label smoothing        1.053, bits of one process: True
    probabilities          1.053, bits of one process: True
    entropy                0.800, bits of one process: True

The logits are a DTensor, of which each rank has its own part of 1,001 classes, and go into the loss as they are. Their
mesh and placements say the rest; the loss is a DTensor, and so is the gradient, placed as the logits are. Of these,
loss_parallel() gives the first alone.
"""

import torch
from torch import distributed, nn
from torch.autograd.function import Function, once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pce_mpi as pce

TOKENS, CLASSES, WIDTH, STEPS = 64, 1001, 32, 40


class ShardedCrossEntropy(Function):
    """The loss of logits that are a DTensor, or a tensor of all classes, with the options of the package."""

    @staticmethod
    def forward(ctx, logits, targets, options):
        ctx.save_for_backward(logits)
        loss, ctx.kept = pce.softmax_cross_entropy_forward(logits.detach(), targets, **options)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        (_,) = ctx.saved_tensors  # raises if the logits, which `kept` has without a copy, were changed in place
        return pce.softmax_cross_entropy_backward(dloss, ctx.kept), None, None


class Entropy(Function):
    """The entropy of the softmax of each row."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        statistics, ctx.kept = pce.class_statistics_forward(logits.detach())
        return statistics.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dentropy):
        (_,) = ctx.saved_tensors
        return pce.class_statistics_backward(ctx.kept, entropy=dentropy)


class Block(nn.Module):
    """One block of a language model, without attention."""

    def __init__(self):
        super().__init__()
        self.table, self.up = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down, self.head = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}


def losses(targets):
    """Return functions of the logits, by name."""
    weight, smoothed = torch.linspace(0.5, 1.5, CLASSES), torch.full((TOKENS, CLASSES), 0.1 / CLASSES)
    smoothed[torch.arange(TOKENS), targets] += 0.9
    some = torch.where(torch.arange(TOKENS) % 4 == 0, -100, targets)
    return {
        "class numbers": lambda x: ShardedCrossEntropy.apply(x, targets, {}),
        "weights, ignored rows": lambda x: ShardedCrossEntropy.apply(x, some, {"weight": weight}),
        "label smoothing": lambda x: ShardedCrossEntropy.apply(x, targets, {"label_smoothing": 0.1}),
        "probabilities": lambda x: ShardedCrossEntropy.apply(x, smoothed, {}),
        "entropy": lambda x: Entropy.apply(x).mean(),
    }


def train(mesh):
    """Return the loss of each step, the model and its input and targets."""
    torch.manual_seed(0)
    model, ids, targets = Block(), torch.arange(TOKENS), torch.randint(CLASSES, (TOKENS,))
    model = parallelize_module(model, mesh, PLAN)
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    loss = losses(targets)["label smoothing"]
    for _ in range(STEPS):
        optimizer.zero_grad()
        (value := loss(model(ids))).backward()
        optimizer.step()
        found.append(value.item())
    return found, model, ids, targets


def main(mesh):
    found, model, ids, targets = train(mesh)
    said = [f"loss {found[0]:.3f}, after {STEPS} steps {found[-1]:.3f}"]
    sharded = model(ids).detach().requires_grad_()
    whole = sharded.full_tensor().detach().requires_grad_()
    for name, loss in losses(targets).items():
        alone, ours = loss(whole), loss(sharded)
        gradients = torch.autograd.grad(alone, whole)[0], torch.autograd.grad(ours, sharded)[0].full_tensor()
        equal = torch.equal(alone, ours.full_tensor()) and torch.equal(*gradients)
        said.append(f"{name:<22} {alone.item():.3f}, bits of one process: {equal}")
    if distributed.get_rank() == 0:
        print(*said, sep="\n")


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    main(init_device_mesh("cpu", (distributed.get_world_size(),)))
    distributed.destroy_process_group()
