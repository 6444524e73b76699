"""Communication of each kind of parallelism: the collectives of whole training steps, one by one, with their bytes.

A budget is a list of (phase, collective, dims, bytes that this rank puts in), payload only, in order.
"""

from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import SGD, Colwise, Partial, Replicate, Replicated, Rowwise, SequenceParallel, Shard, VocabParallel
from pce_mpi.comm.tracing import Purpose
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.sharding import Sharding
from ranks.grids import factorizations, mesh_of

SUM, R = Partial("sum"), Replicate()

B, S, D, H = 5, 6, 8, 12  # batch, sequence, features and hidden features, none of which 3 or 4 ranks divide all of


class Sent(NamedTuple):
    phase: str
    collective: str
    over: str
    bytes: int


pytestmark = pytest.mark.usefixtures("impatient")


def budget(trace: pce.Trace) -> list[Sent]:
    return [Sent(event.phase, event.collective, event.over, event.bytes) for event in trace.select()]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(0, 0.3, shape).astype(np.float32)


def parameters(seed: int = 0) -> dict[str, np.ndarray]:
    return {
        "norm.scale": 1 + normal(seed, D),
        "norm.bias": normal(seed + 1, D),
        "up.w": normal(seed + 2, D, H),
        "up.b": normal(seed + 3, H),
        "down.w": normal(seed + 4, H, D),
    }


MEGATRON = {"norm.*": Replicated(), "up.*": Colwise(), "down.w": Rowwise()}
EVERYWHERE = {"*": Replicated()}


def local_bytes(mesh: Mesh, shape: tuple[int, ...], itemsize: int = 4, **placements: Any) -> int:
    """Return the number of bytes of this rank's part of an array."""
    sharding = Sharding.of(mesh.dim_sizes, shape, placements)
    return itemsize * prod(sharding.local_shape(mesh.coordinates))


def block(x: Any, p: dict[str, Any]) -> Any:
    """A residual MLP block; its parameters say how everything is placed."""
    h = pce.layer_norm(x, p["norm.scale"], p["norm.bias"])
    h = pce.gelu(h @ p["up.w"] + p["up.b"]) @ p["down.w"]
    return x + h.redistribute(**dict.fromkeys(h.sharding.partial_dims, R))


def two_blocks(mesh: Mesh, styles: dict[str, Any], **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The parameters of two blocks, and all of them by name."""
    first, second = (pce.shard_parameters(parameters(seed), mesh, styles, **options) for seed in (0, 10))
    return first, second, {f"{number}.{name}": p[name] for number, p in ((1, first), (2, second)) for name in p}


def gradients(p: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: each.grad.full() for name, each in p.items()}


def check_gradients(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, gradient in expected.items():
        size = np.abs(gradient).max()
        np.testing.assert_allclose(got[name], gradient, rtol=0, atol=1e-5 * size, err_msg=name)


def one_process(x: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of two blocks with nothing sharded."""
    from mpi4py import MPI

    mesh = mesh_of(MPI.COMM_SELF, 1)
    first, second, both = two_blocks(mesh, EVERYWHERE, dim="data")
    pce.square(block(block(pce.distribute(x, mesh), first), second)).mean().backward()
    return gradients(both)


def test_vocabulary_parallel_takes_two_all_reduces(comm):
    mesh = mesh_of(comm, 1, comm.size)
    ids = np.arange(B * S).reshape(B, S) % 17
    styles = {"table": VocabParallel(), "w": Colwise()}
    p = pce.shard_parameters({"table": normal(0, 17, D), "w": normal(1, D, 17)}, mesh, styles)
    with pce.trace() as trace:
        x = pce.embedding(ids, p["table"]).redistribute(model=R)
        pce.cross_entropy(x @ p["w"], ids).backward()
        SGD(p.values(), lr=0.1).step()
    assert budget(trace) == [
        ("forward", "all_reduce", "model", 4 * B * S * D),
        ("forward", "all_reduce", "model", 40 * B * S),
        ("backward", "all_reduce", "model", 4 * B * S * D),
    ]


def test_distillation_of_top_k_sends_no_logits(comm):
    mesh, k = mesh_of(comm, 1, comm.size), 3
    logits = [pce.distribute(normal(seed, B, 17), mesh, requires_grad=seed == 0, model=Shard(1)) for seed in (0, 1)]
    with pce.trace() as trace:
        ids = pce.top_k(logits[1], k)[1]
        log_p, log_q = (pce.class_statistics(each, ids).log_prob for each in logits)
        pce.sum(pce.exp(log_q) * (log_q - log_p)).backward()
    statistics = [("forward", "all_reduce", "model", size) for size in (80 * B, 4 * k * B)]
    assert budget(trace) == [("forward", "all_reduce", "model", 16 * k * B), *statistics, *statistics]


# ------------------------------------------------------------------------------------------------------------- blocks


def test_blocks_in_a_row_take_no_more(comm):
    # The term that a block adds stays Partial: each of its two users has it reduced, and the second finds that done.
    x = pce.distribute(normal(50, B, S, D), mesh_of(comm, 1, comm.size))
    p = pce.shard_parameters(parameters(), x.mesh, MEGATRON)
    with pce.trace() as trace, pce.no_grad():
        for _ in range(3):
            normed = pce.layer_norm(x, p["norm.scale"], p["norm.bias"])
            x = x + pce.gelu(normed @ p["up.w"] + p["up.b"]) @ p["down.w"]
        pce.square(x).mean()
    assert budget(trace) == [("forward", "all_reduce", "model", 4 * B * S * D)] * 3


def test_data_parallel_block_takes_one_more_at_step(comm):
    x = normal(50, B, S, D)
    expected = one_process(x)
    for sizes in factorizations(comm.size, 2):
        mesh = mesh_of(comm, *sizes)
        first, second, both = two_blocks(mesh, MEGATRON)
        with pce.trace() as trace:
            h = block(pce.distribute(x, mesh, data=Shard(0)), first)
            pce.square(block(h, second)).mean().backward()
            SGD(both.values(), lr=0.0).step()
        of_a_block = ("all_reduce", "model", local_bytes(mesh, (B, S, D), data=Shard(0)))
        held = sum(each.local.nbytes for each in both.values())
        assert budget(trace) == [
            *[("forward", *of_a_block)] * 2,
            *[("backward", *of_a_block)] * 2,
            ("step", "all_reduce", "data", held),
        ]
        check_gradients(gradients(both), expected)


def test_sequence_parallel_block_gathers_and_scatters(comm):
    x = normal(50, B, S, D)
    expected = one_process(x)
    mesh = mesh_of(comm, 1, comm.size)
    styles = MEGATRON | {"norm.*": SequenceParallel()}
    first, second, both = two_blocks(mesh, styles)

    def sequence_block(x: Any, p: dict[str, Any]) -> Any:
        h = pce.layer_norm(x, p["norm.scale"], p["norm.bias"]).redistribute(model=R)
        h = pce.gelu(h @ p["up.w"] + p["up.b"]) @ p["down.w"]
        return x + h.redistribute(model=Shard(1))

    with pce.trace() as trace:
        h = sequence_block(pce.distribute(x, mesh, model=Shard(1)), first)
        pce.square(sequence_block(h, second)).mean().backward()
        SGD(both.values(), lr=0.0).step()
    mine, whole = local_bytes(mesh, (B, S, D), model=Shard(1)), 4 * B * S * D
    forward = [("forward", "all_gather", "model", mine), ("forward", "reduce_scatter", "model", whole)]
    backward = [("backward", "all_gather", "model", mine), ("backward", "reduce_scatter", "model", whole)]
    assert budget(trace) == [*forward, *forward, *backward, *backward, ("step", "all_reduce", "model", 2 * 2 * 4 * D)]
    check_gradients(gradients(both), expected)


def test_sharded_heads_take_one_all_reduce_each_way(comm):
    heads, width = 5, 3
    mesh = mesh_of(comm, 1, comm.size)
    names = {"q": (D, heads * width), "k": (D, heads * width), "v": (D, heads * width), "out": (heads * width, D)}
    params = {name: normal(number, *shape) for number, (name, shape) in enumerate(names.items())}

    def attention(x: Any, p: dict[str, Any]) -> Any:
        x = pce.rms_norm(x)
        q, k, v = ((x @ p[name]).reshape(B, S, heads, width).swapaxes(1, 2) for name in "qkv")
        mixed = pce.softmax(q @ k.swapaxes(-1, -2)) @ v
        return mixed.swapaxes(1, 2).reshape(B, S, heads * width) @ p["out"]

    results = []
    for styles in (EVERYWHERE, {"[qkv]": Colwise(), "out": Rowwise()}):
        # A head must not be cut in two: its shards are whole heads.
        x = pce.distribute(normal(9, B, S, D), mesh, requires_grad=True)
        p = pce.shard_parameters(params, mesh, styles)
        if styles is not EVERYWHERE:
            p = {name: whole_heads(mesh, params[name], 1 if name != "out" else 0, width) for name in params}
        with pce.trace() as trace:
            pce.square(x + attention(x * 1.0, p)).mean().backward()
            SGD(p.values(), lr=0.0).step()
        results.append((gradients(p), x.grad.full(), budget(trace)))
    (expected, x_expected, nothing), (got, x_got, sent) = results
    assert nothing == []
    assert sent == [
        ("forward", "all_reduce", "model", 4 * B * S * D),
        ("backward", "all_reduce", "model", 4 * B * S * D),
    ]
    check_gradients(got, expected)
    np.testing.assert_allclose(x_got, x_expected, rtol=0, atol=1e-5 * np.abs(x_expected).max())


def whole_heads(mesh: Mesh, whole: np.ndarray, axis: int, width: int) -> Any:
    """A parameter whose `axis` is sharded between heads."""
    start, stop = pce.shard_range(whole.shape[axis] // width, mesh.dims["model"], mesh.coordinates["model"])
    local = whole.take(range(start * width, stop * width), axis)
    return pce.from_local(local, mesh, model=Shard(axis), requires_grad=True)


def test_context_parallel_attention_gathers_and_scatters(line):
    params = {name: normal(number, D, D) for number, name in enumerate("qkv")}
    results = []
    for placement in (R, Shard(1)):
        p = pce.shard_parameters(params, line, EVERYWHERE, dim="data")
        x = pce.distribute(normal(9, B, S, D), line, data=placement)
        with pce.trace() as trace:
            k = (x @ p["k"]).swapaxes(-1, -2).redistribute(data=R)
            v = (x @ p["v"]).redistribute(data=R)
            pce.square(pce.softmax(x @ p["q"] @ k) @ v).mean().backward()
            SGD(p.values(), lr=0.0).step()
        results.append((gradients(p), budget(trace)))
    (expected, nothing), (got, sent) = results
    mine, whole = local_bytes(line, (B, S, D), data=Shard(1)), 4 * B * S * D
    assert nothing == []
    assert sent == [
        *[("forward", "all_gather", "data", mine)] * 2,
        *[("backward", "reduce_scatter", "data", whole)] * 2,
        ("step", "all_reduce", "data", 3 * 4 * D * D),
    ]
    check_gradients(got, expected)


# ------------------------------------------------------------------------------------------------------------ the trace


def test_step_is_agreed_on_and_traced_with_reasons(line):
    w = pce.distribute(normal(0, D, H), line, requires_grad=True)
    v = pce.distribute(normal(2, H, D), line, data=Shard(1))
    x = pce.distribute(normal(1, B, D), line, data=Shard(0))
    with pce.trace() as trace:
        h = (x @ w).redistribute(data=R)
        pce.square(pce.tanh(h) @ v).mean().backward()
        pce.max(x)
        SGD([w], lr=0.1).step()
    events = trace.select()
    assert [(event.phase, event.operation, event.collective, event.before, event.after) for event in events] == [
        ("forward", "redistribute", "all_gather", "Shard(0)", "Replicate()"),
        ("backward", "tanh", "all_reduce", "Partial('sum')", "Replicate()"),
        ("forward", "max", "all_reduce", "Partial('max')", "Replicate()"),
        ("step", "SGD", "all_reduce", "Partial('sum')", "Replicate()"),
    ]
    assert [event.reason for event in events[:2]] == ["asked for", "its gradient is complete"]
    assert "largest" in events[2].reason
    agreements = trace.select(purpose=Purpose.AGREEMENT)
    assert {(event.collective, event.bytes) for event in agreements} == {("all_gather", 56)}
    assert trace.bytes(purpose=None) == trace.bytes() + 56 * len(agreements)
    # Whatever is sent for an operation has been agreed on.
    for event, after in pairwise(trace.events):
        assert Purpose.AGREEMENT in (event.purpose, after.purpose)
