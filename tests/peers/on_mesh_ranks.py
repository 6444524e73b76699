"""python tests/peers/on_mesh_ranks.py RANK RANKS FOLDER: what functions of plain arrays do with DTensors on a rank.

It prints lines of JSON, which test_dtensors.py reads: a name, and what has gone wrong, or an error. MPI cannot be
imported.
"""

import json
from pathlib import Path
import sys
import traceback

import ml_dtypes
import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import pce_mpi as pce
from pce_mpi.loss import passes
from peers.on_gloo_ranks import ctrl_c_in
from ulps import FLOAT64, HALF, SHARDED, worst

LINE = {
    "classes": ((6, 13), -1, [Shard(1)]),
    "classes of halves": ((6, 13), -1, [Shard(1)]),
    "fewer classes than ranks": ((6, 2), 1, [Shard(1)]),
    "rows": ((5, 13), 1, [Shard(0)]),
    "replicate": ((6, 13), 1, [Replicate()]),
    "classes first": ((13, 6), 0, [Shard(0)]),
    "classes between": ((2, 13, 3), 1, [Shard(1)]),
    "rows after classes": ((2, 13, 3), 1, [Shard(2)]),
    "one row": ((13,), 0, [Shard(0)]),
}
SQUARE = {
    "rows, classes": ((5, 13), 1, [Shard(0), Shard(1)]),
    "classes, rows": ((5, 13), 1, [Shard(1), Shard(0)]),
    "replicate, classes": ((6, 13), 1, [Replicate(), Shard(1)]),
    "rows, replicate": ((5, 13), 1, [Shard(0), Replicate()]),
    "rows twice": ((5, 13), 1, [Shard(0), Shard(0)]),
    "classes twice": ((6, 13), 1, [Shard(1), Shard(1)]),
    "two axes of rows": ((3, 2, 13), 2, [Shard(1), Shard(0)]),
    "rows after, classes": ((2, 13, 3), 1, [Shard(2), Shard(1)]),
}

# The shape of hidden, its placements and those of w, for products.
PRODUCTS_ON_LINE = {
    "product, classes": ((6, 4), [Replicate()], [Shard(1)]),
    "product, rows": ((5, 4), [Shard(0)], [Replicate()]),
    "product, hidden is plain": ((2, 3, 4), None, [Shard(1)]),
    "product, w is plain": ((5, 4), [Shard(0)], None),
}
PRODUCTS_ON_SQUARE = {
    "product, rows and classes": ((5, 4), [Shard(0), Replicate()], [Replicate(), Shard(1)]),
    "product, classes and rows": ((3, 2, 4), [Replicate(), Shard(0)], [Shard(1), Replicate()]),
    "product, two axes of rows": ((3, 2, 4), [Shard(1), Shard(0)], [Replicate(), Replicate()]),
    "product, classes twice": ((6, 4), None, [Shard(1), Shard(1)]),
}


def products(size):
    """Shape and placements of the operands of products, by name, on so many ranks."""
    return PRODUCTS_ON_SQUARE if size == 4 else PRODUCTS_ON_LINE


def layouts(size):
    """Shape, class axis and placements, by name, on so many ranks."""
    return SQUARE if size == 4 else LINE


def mesh_of(size):
    if size == 4:
        return distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return distributed.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def operands(shape, axis, dtype=torch.float32):
    """Whole tensors, by name."""
    rng, axis = np.random.default_rng(0), axis % len(shape)
    rows, several = shape[:axis] + shape[axis + 1 :], (*shape[:axis], 3, *shape[axis + 1 :])
    x, y = (4 * rng.standard_normal((2, *shape), np.float32)).round(3)
    x.reshape(-1)[::5] = -np.inf
    targets = rng.integers(shape[axis], size=rows)
    counts = rng.integers(2, size=rows)
    of_row = rng.integers(1, 1 + shape[axis], size=targets.size)
    drawn = [rng.permutation(shape[axis])[:n] for n in of_row]
    q = rng.random(shape)
    found = {
        "x": torch.from_numpy(x).to(dtype),
        "y": torch.from_numpy(y).to(dtype),
        "targets": np.where(counts, targets, -100),
        "q": q / q.sum(axis=axis, keepdims=True),
        "weight": rng.random(shape[axis]),
        "rows": counts > 0,
        "ids": rng.integers(shape[axis], size=several),
        "upstream": rng.standard_normal(rows),
        "upstreams": rng.standard_normal(several),
        "support": np.concatenate(drawn),
        "offsets": np.concatenate([[0], np.cumsum(of_row)]),
    }
    return {name: torch.as_tensor(each) for name, each in found.items()}


def calls(given, axis):
    """The results of functions, by name: those of one row or class axis, and gradients."""
    x, y, targets, q, weight, rows, ids, upstream, upstreams, support, offsets = given.values()
    more = {"axis": axis}
    losses, residuals = pce.softmax_cross_entropy_forward(
        x, targets, weight=weight, label_smoothing=0.1, reduction="none", **more
    )
    total, of_total = pce.softmax_cross_entropy_forward(x, targets, reduction="sum", **more)
    statistics, of_statistics = pce.class_statistics_forward(x, ids, support=(support, offsets), outside="-inf", **more)
    divergence, of_divergence = pce.kl_divergence_forward(y, x, rows=rows, reduction="none", **more)
    chosen, of_chosen = pce.take_classes_forward(x, ids, **more)
    of_teacher = pce.kl_divergence_backward(upstream, of_divergence, of="teacher")
    sets = pce.nucleus(x, top_p=0.9, **more)
    in_place = y.clone()
    mean, of_mean = pce.softmax_cross_entropy_value_and_grad(in_place, targets, out=in_place, **more)
    assert of_mean is in_place
    return {
        "losses": losses,
        "sum": total,
        "mean": mean,
        "weighted mean": pce.cross_entropy(x, targets, weight=weight, **more),
        "statistics": list(pce.class_statistics(x, targets, **more)),
        "divergence": divergence,
        "mean divergence": pce.kl_divergence(x, y, **more),
        "argmax": pce.argmax(x, **more),
        "sets": list(sets[:2]),
        "masses": list(sets[2:]),
        "several": [statistics.log_prob, chosen, *pce.top_k(x, 2, **more)],
        "of several rows": statistics.entropy,
        "probabilities": pce.softmax_cross_entropy(x, q.to(x.dtype), weight=weight, z_loss=1e-3, **more),
        "gradients": [
            pce.softmax_cross_entropy_backward(upstream, residuals),
            pce.softmax_cross_entropy_backward(2.0, of_total),
            of_mean,
            pce.softmax_cross_entropy_value_and_grad(x, q.to(x.dtype), weight=weight, **more)[1],
            pce.class_statistics_backward(of_statistics, log_prob=upstreams, entropy=upstream),
            pce.kl_divergence_backward(upstream, of_divergence),
            of_teacher,
            pce.kl_divergence_value_and_grad(x, y, rows=rows, **more)[1],
            pce.take_classes_backward(upstreams, of_chosen),
        ],
    }


def expected_placements(name, placements, axis):
    """The placements of a result: those of the rows, or of the logits."""
    axes = {each.dim for each in placements if each.is_shard()}
    if name in ("sum", "mean", "weighted mean", "mean divergence", "probabilities", "sets") or not axes:
        return [Replicate()] * len(placements)
    if name == "gradients":
        return placements
    moved = {each: Replicate() if each == axis else Shard(each - (each > axis and name != "several")) for each in axes}
    return [moved[each.dim] if each.is_shard() else each for each in placements]


def compare(mesh, shape, axis, placements, dtype, place):
    """Compare the results of DTensors with those of whole tensors, bit for bit."""
    whole, axis = operands(shape, axis, dtype), axis % len(shape)
    on_mesh = {"x": placements, "y": placements, "q": placements}
    on_mesh |= dict.fromkeys(["targets", "rows", "upstream"], expected_placements("losses", placements, axis))
    on_mesh |= dict.fromkeys(["ids", "upstreams"], expected_placements("several", placements, axis))
    on_mesh["weight"] = [Shard(0) if each == Shard(axis) else Replicate() for each in placements]
    replicated = [Replicate()] * mesh.ndim
    given = {
        name: each
        if place == "plain" and name not in ("x", "y")
        else distribute_tensor(each, mesh, on_mesh.get(name, replicated) if name in "xy" or place else replicated)
        for name, each in whole.items()
    }
    expected = calls(whole, axis)
    for name, parts in calls(given, axis).items():
        pairs = zip(parts, expected[name], strict=True) if isinstance(parts, list) else [(parts, expected[name])]
        for number, (part, right) in enumerate(pairs):
            where = name, number, place
            assert isinstance(part, DTensor), where
            assert list(part.placements) == expected_placements(name, placements, axis), (where, part.placements)
            assert part.shape == right.shape and part.dtype == right.dtype, where
            assert part.stride() == right.stride(), (where, part.stride(), right.stride())
            local, _ = compute_local_shape_and_global_offset(part.shape, mesh, part.placements)
            assert part.to_local().shape == local, where
            found, right = (each.contiguous().reshape(-1).view(torch.uint8) for each in (part.full_tensor(), right))
            assert found.equal(right), where


def linear_calls(hidden, w, targets, bias, weight, upstream):
    """The results of functions of hidden @ w, by name, with the operand that they are placed as."""
    given, options = (hidden, w, targets), {"bias": bias, "chunk": 2}
    mean = pce.linear_cross_entropy_value_and_grad(*given, weight=weight, label_smoothing=0.1, **options)
    rows = pce.linear_cross_entropy_value_and_grad(*given, reduction="none", logit_scale=0.5, **options)
    statistics, residuals = pce.linear_class_statistics_forward(*given, **options)
    pulled = pce.linear_class_statistics_backward(residuals, log_prob=upstream, entropy=0.5)
    losses = {"mean": (mean.loss, "mean"), "losses": (rows.loss, "rows"), "entropy": (statistics.entropy, "rows")}
    alone = {"without residuals": (pce.linear_class_statistics(*given).log_prob, "rows")}
    gradients = {
        f"d{name} of {number}": (getattr(each, f"d{name}"), name)
        for number, each in enumerate((mean, rows, pulled))
        for name in ("hidden", "w", "bias")
    }
    return losses | alone, gradients


def compare_product(mesh, shape, of_hidden, of_w, dtype, place):
    """Compare results of DTensors with those of whole tensors: bit for bit, or gradients to a few ulps."""
    rng, rows, nowhere = np.random.default_rng(0), shape[:-1], [Replicate()] * mesh.ndim
    # Sums of few short numbers are exact, in any order.
    hidden, w, bias = (
        torch.from_numpy(rng.integers(-16, 17, each) / 8).to(dtype) for each in (shape, (shape[-1], 13), 13)
    )
    targets, weight, upstream = (
        torch.as_tensor(each) for each in (rng.integers(13, size=rows), rng.random(13), rng.standard_normal(rows))
    )
    targets.reshape(-1)[: targets.numel() // 2] = -100  # all rows of a rank, if its shard has them
    given = {"hidden": hidden, "w": w, "targets": targets, "bias": bias, "weight": weight, "upstream": upstream}
    along = {"hidden": of_hidden or nowhere, "w": of_w or nowhere, "rows": of_hidden or nowhere, "mean": nowhere}
    along["targets"] = along["upstream"] = along["rows"]
    along["bias"] = along["weight"] = [Shard(0) if each.is_shard() else each for each in along["w"]]
    placed = {
        name: each
        if (name, None) in (("hidden", of_hidden), ("w", of_w)) or (place == "plain" and name not in ("hidden", "w"))
        else distribute_tensor(each, mesh, along[name])
        for name, each in given.items()
    }
    exact, gradients = linear_calls(**given)
    found = linear_calls(**placed)
    for name, (part, role) in (found[0] | found[1]).items():
        right = (exact | gradients)[name][0]
        assert isinstance(part, DTensor) and list(part.placements) == along[role], (name, part.placements)
        assert part.shape == right.shape and part.dtype == right.dtype, name
        if name in exact:
            assert part.full_tensor().equal(right), name
            continue
        got, right = (each.double().numpy() for each in (part.full_tensor(), right))
        of_dtype = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float32
        off = worst(got, right, of_dtype, size=np.full(right.shape, np.abs(right).max()))
        assert off <= (HALF if dtype == torch.bfloat16 else SHARDED), (name, off)


def check(mesh, name):
    if name in (operands := products(distributed.get_world_size())):
        for dtype in (torch.float32, torch.bfloat16):
            for place in ("plain", "sharded"):
                compare_product(mesh, *operands[name], dtype, place)
        return
    shape, axis, placements = layouts(distributed.get_world_size())[name]
    dtype = torch.bfloat16 if "halves" in name else torch.float32
    for place in ("plain", "", "sharded"):
        compare(mesh, shape, axis, placements, dtype, place)


def check_autograd(mesh):
    """A loss in a graph of torch has the gradient that whole logits have there, and both are those of dense."""
    from torch_tensor_parallel import ShardedCrossEntropy  # the tests of this program import it without the examples

    placements = [Shard(0), Shard(1)][-mesh.ndim :]
    whole = operands((5, 13), 1, torch.float64)
    x, targets, factors = whole["x"].clamp(min=-4), whole["targets"], whole["upstream"]
    found = []
    for logits in (x.clone(), distribute_tensor(x, mesh, placements)):
        logits.requires_grad_()
        scale = distribute_tensor(factors, mesh, [Replicate()] * mesh.ndim) if found else factors
        losses = ShardedCrossEntropy.apply(logits, targets, {"reduction": "none", "weight": whole["weight"]})
        (total := (losses * scale).sum()).backward()
        found.append((losses, total, logits.grad))
    alone, ours = found[0], [each.full_tensor() for each in found[1]]
    assert list(found[1][2].placements) == placements
    assert alone[0].equal(ours[0]) and alone[2].equal(ours[2])
    arrays = [each.numpy() for each in (x, targets, whole["weight"], factors)]
    loss, gradient = pce.dense.softmax_cross_entropy_value_and_grad(*arrays[:2], weight=arrays[2], reduction="none")
    assert worst(ours[0].detach(), loss, np.float64) <= FLOAT64
    largest = np.abs(gradient * arrays[3][:, None]).max(axis=1, keepdims=True)
    assert worst(ours[2], gradient * arrays[3][:, None], np.float64, size=largest) <= FLOAT64


def refusals(mesh, last):
    """Calls that are refused on every rank, by name."""
    whole = operands((6, 13), 1)
    x, targets = whole["x"], whole["targets"]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(1)]
    logits, ways, group = distribute_tensor(x, mesh, placements), mesh.size(), mesh.get_group(mesh.ndim - 1)

    def of(*given, of=pce.softmax_cross_entropy, **options):
        return lambda: of(*(given or (logits, targets)), **options)

    def placed(each, *more):
        return DTensor.from_local(x, mesh, [*more, *[Replicate()] * (mesh.ndim - 1 - len(more)), each], run_check=False)

    def backward(dloss, **options):
        return pce.softmax_cross_entropy_backward(dloss, residuals, **options)

    def pulled(log_prob):
        return pce.linear_class_statistics_backward(of_product, log_prob=log_prob)

    _, residuals = pce.softmax_cross_entropy_forward(logits, targets, reduction="none")
    rows = distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim)
    w = distribute_tensor(x.T.contiguous(), mesh, placements)
    hidden = distribute_tensor(x, mesh, [*[Shard(0)] * (mesh.ndim - 1), Replicate()])
    _, of_product = pce.linear_class_statistics_forward(hidden, w, targets % 6)
    unlike = DTensor.from_local(x[:, : 3 + last], mesh, placements)
    cut = {"shape": torch.Size((6, 12 * ways + 1)), "stride": (12 * ways + 1, 1)}
    return {
        "Partial": of(placed(Partial()), targets),
        "Partial avg": of(placed(Partial("avg")), None, of=pce.class_statistics),
        "strided": of(placed(_StridedShard(1, split_factor=2)), targets),
        "comm": of(comm=group),
        "batch_comm": of(batch_comm=group),
        "class_start": of(class_start=0),
        "num_classes": of(num_classes=13),
        "comm on one rank": of(comm=group if last else None),
        "local targets": of(logits, targets[: 6 - last]),
        "targets of classes": of(logits, distribute_tensor(targets, mesh, [Shard(0)] * mesh.ndim)),
        "local weight": of(weight=torch.ones(13 - last)),
        "teacher": of(logits, rows, of=pce.kl_divergence),
        "target out of range": of(logits, torch.where(targets == targets.max(), 13, targets) if last else targets),
        "axis": of(axis=2),
        "out": of(out=torch.zeros(6, 13), of=pce.softmax_cross_entropy_value_and_grad),
        "dloss": lambda: backward(distribute_tensor(torch.ones(6), mesh, [Shard(0)] * mesh.ndim)),
        "requires grad": of(logits.detach().requires_grad_(bool(last)), targets),
        "unlike shards": of(unlike, targets),
        "other cuts": of(DTensor.from_local(x, mesh, placements, **cut), targets),
        "falling ranks": of(distribute_tensor(x, DeviceMesh("cpu", [*range(ways)][::-1]), [Shard(1)]), targets),
        "plain logits": of(x, distribute_tensor(targets, mesh, [Replicate()] * mesh.ndim)),
        "features of hidden": of(logits, x.T, targets % 6, of=pce.linear_class_statistics),
        "features of w": of(x.T, rows, of=pce.linear_class_statistics),
        "rows where classes are": of(rows, w, of=pce.linear_class_statistics),
        "product": of(x, w[:12], of=pce.linear_class_statistics),
        "upstream of linear": lambda: pulled(torch.ones(6 - last)),
        "dtype of upstream": lambda: pulled(torch.ones(6) > 0 if last else torch.ones(6)),
        "other option": of(temperature=2.0),
        "usable": lambda: pce.argmax(logits).full_tensor().equal(x.argmax(1)),
    }


def refused(call):
    """The error that a call raises."""
    try:
        return ["nothing", str(call())]
    except Exception as error:
        return [type(error).__name__, str(error)]


def main():
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    assert "mpi4py" not in sys.modules
    sys.modules["mpi4py"] = None
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = mesh_of(size)
    for name in (*layouts(size), *products(size), "autograd"):
        try:
            check_autograd(mesh) if name == "autograd" else check(mesh, name)
            said = ""
        except Exception:
            said = traceback.format_exc()
        print(json.dumps([name, said]), flush=True)
    for name, call in refusals(mesh, int(rank == size - 1)).items():
        print(json.dumps([f"refused: {name}", refused(call)]), flush=True)
    logits, targets = distribute_tensor(torch.zeros(2, size), mesh, [Shard(1)] * mesh.ndim), torch.tensor([0, 0])
    with ctrl_c_in(passes, "start_all_reduce"):
        pce.softmax_cross_entropy(logits, targets)
    print(json.dumps(["after Ctrl-C", refused(lambda: pce.softmax_cross_entropy(logits, targets))]), flush=True)
    assert sys.modules["mpi4py"] is None


if __name__ == "__main__":
    main()
