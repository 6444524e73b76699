"""Programs on hollow arrays: what they send on a mesh without ranks is what they send on one with ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Shard
from pce_mpi.hollow import hollow
from ranks.placed import SUM

pytestmark = pytest.mark.usefixtures("impatient")

ROWS, FEATURES, CLASSES = 7, 6, 11
TARGETS = np.arange(ROWS) % CLASSES


class Made:
    """Makes the arrays of a program on a mesh: x (rows, features) and w (features, classes) of the vocabulary."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.rows = {"data": Shard(0)} if "data" in mesh.dims else {}

    def array(self, *shape: int, **placed: Any) -> pce.DistArray:
        numbers = np.random.default_rng(shape).normal(size=shape).astype(np.float32)
        return pce.distribute(numbers, self.mesh, requires_grad=True, **placed)

    @property
    def logits(self) -> pce.DistArray:
        return self.array(ROWS, CLASSES, **self.rows, model=Shard(1))


def classify(made: Made, **options: Any) -> None:
    x, w = made.array(ROWS, FEATURES, **made.rows), made.array(FEATURES, CLASSES, model=Shard(1))
    pce.cross_entropy(x @ w, TARGETS, **options).backward()
    pce.SGD([x, w], lr=0.1).step()


def smoothed(made: Made) -> None:
    classify(made, label_smoothing=0.1, z_loss=0.1, weight=np.ones(CLASSES), reduction="sum")


def margined(made: Made) -> None:
    classify(made, margin=(1.0, 0.5, 0.0), logit_scale=8.0)


def rows_apart(made: Made) -> None:
    pce.mean(pce.cross_entropy(made.logits, TARGETS, reduction="none")).backward()


def probabilities(made: Made) -> None:
    pce.cross_entropy(made.logits, np.full((ROWS, CLASSES), 1 / CLASSES)).backward()


def statistics(made: Made) -> None:
    found = pce.class_statistics(made.logits, TARGETS)
    pce.mean(found.entropy + found.log_prob).backward()


def divergences(made: Made) -> None:
    student, teacher = made.logits, made.logits
    pce.kl_divergence(student, teacher, rows=TARGETS > 1).backward()
    for direction in ("reverse", "jensen-shannon"):
        pce.mean(pce.kl_divergence(student, teacher, direction=direction, reduction="none")).backward()


def softmaxes(made: Made) -> None:
    pce.sum(pce.square(pce.softmax(made.logits))).backward()
    pce.sum(pce.log_softmax(made.logits)).backward()
    pce.sum(pce.logsumexp(made.logits, axis=1)).backward()


def largest(made: Made) -> None:
    pce.sum(pce.top_k(made.logits, 3)[0]).backward()
    pce.argmax(made.logits)


def chosen(made: Made) -> None:
    ids = np.stack([TARGETS, TARGETS], 1)
    pce.sum(pce.take_classes(made.logits, ids)).backward()
    support = np.arange(2 * ROWS) % CLASSES, np.arange(0, 2 * ROWS + 1, 2)
    for targets, given in ((ids, None), (TARGETS, support)):
        found: Any = pce.class_statistics(made.logits, targets, support=given, outside="add")
        (pce.sum(found.entropy) + pce.sum(found.log_prob)).backward()


def linear(made: Made) -> None:
    x, w = made.array(ROWS, FEATURES, **made.rows), made.array(FEATURES, CLASSES, model=Shard(1))
    pce.linear_cross_entropy(x, w, TARGETS, chunk=4).backward()


def linear_statistics(made: Made) -> None:
    x, w = made.array(ROWS, FEATURES, **made.rows), made.array(FEATURES, CLASSES, model=Shard(1))
    found = pce.linear_class_statistics(x, w, TARGETS, bias=np.zeros(CLASSES, np.float32), chunk=4)
    pce.mean(found.entropy + found.log_prob).backward()
    pce.SGD([x, w], lr=0.1).step()


def perceptron(made: Made) -> None:
    x = made.array(ROWS, FEATURES, **made.rows)
    w = [made.array(FEATURES, 10, model=Shard(1)), made.array(10, 5, model=Shard(0))]
    y = pce.layer_norm(pce.gelu(x @ w[0]) @ w[1])
    pce.mean(y * y).backward()
    optimizer = pce.AdamW(w, lr=0.1)
    pce.clip_grad_norm(w, 1.0)
    optimizer.step()


def attention(made: Made) -> None:
    q, k, v = (made.array(2, 6, 4, model=Shard(1)) for _ in range(3))
    pce.sum(pce.scaled_dot_product_attention(q, k, v, causal=True)).backward()


def contraction(made: Made) -> None:
    a, b = made.array(5, 6, model=Shard(1)), made.array(6, 3, model=Shard(0))
    pce.sum(pce.square(pce.einsum("ij,jk->ik", a, b))).backward()


def norms(made: Made) -> None:
    x = made.array(5, 6, model=Shard(1))
    pce.sum(pce.square(pce.rms_norm(x)) + pce.var(x, axis=1, keepdims=True)).backward()


def lookup(made: Made) -> None:
    table = made.array(10, 4, model=Shard(0))
    pce.sum(pce.square(pce.embedding(np.arange(7) % 10, table))).backward()
    pce.SGD([table], lr=0.1, momentum=0.9).step()


def moves(made: Made) -> None:
    x = made.array(5, 6, model=Shard(0))
    y = x.redistribute(model=Shard(1)).redistribute(model=SUM).redistribute(model=Shard(0))
    pce.sum(y[1:, ::2] * 2).backward()


PROGRAMS = (
    *(classify, smoothed, margined, rows_apart, probabilities, statistics, divergences, softmaxes),
    *(largest, chosen, linear, linear_statistics, perceptron, attention, contraction, norms, lookup, moves),
)


@pytest.mark.ranks(3, 4)  # shards of several lengths, and two dims
@pytest.mark.parametrize("exact", [False, True], ids=["plain", "reproducible"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_mesh_without_ranks_traces_what_ranks_send(comm, program: Callable[[Made], None], exact: bool):
    here = Mesh(comm, data=2, model=2) if comm.size == 4 else Mesh(comm, model=comm.size)
    nowhere = Mesh.without_ranks(here.coordinates, **here.dims)
    traced = []
    for mesh in (here, nowhere):
        with pce.reproducible(exact), pce.trace() as trace:
            program(Made(mesh))
        traced.append(trace.events)
    assert traced[0] == traced[1]


def test_step_of_large_model_takes_no_memory():
    mesh = Mesh.without_ranks(data=8, model=8)
    rows, width, classes = 2**16, 2**12, 128_256
    x = pce.distribute(hollow((rows, width), np.float32), mesh, data=Shard(0))
    w = pce.distribute(hollow((width, classes), np.float32), mesh, model=Shard(1), requires_grad=True)
    with pce.trace() as trace:
        pce.cross_entropy(x @ w, hollow((rows,), np.int64)).backward()
        pce.SGD([w], lr=0.1).step()
    assert trace.bytes("all_reduce", over="model") == rows // 8 * 40
    assert trace.bytes(phase="step") == width * classes // 8 * 4


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.item(),
        lambda x: x[x > 0],
        lambda x: bool(x.full()),
    ],
)
def test_value_of_hollow_array_is_refused(ask):
    x = pce.distribute(np.ones(1), Mesh.without_ranks(model=3))
    with pytest.raises(TypeError, match="hollow arrays"):
        ask(x)


def test_mesh_without_ranks_refuses_place_outside():
    with pytest.raises(ValueError, match=r"has no rank at model = 2"):
        Mesh.without_ranks({"model": 2}, model=2)


def test_relu_of_integers_keeps_their_dtype():
    assert pce.relu(pce.distribute(np.arange(4), pce.Mesh.without_ranks(data=2))).dtype == np.int64
