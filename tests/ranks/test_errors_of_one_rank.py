"""A wrong argument, or another error, of one rank alone: every rank raises it, and later calls are right."""

from collections.abc import Callable
import time
from typing import Any

from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi
from pce_mpi import Partial, Replicate, Shard
from pce_mpi.comm import communicators
from pce_mpi.jobs.patience import slowdown
from ranks.grids import LINE_AND_GRID, mesh_of

# How long the others may wait for a rank that has raised, in seconds of an idle machine.
AT_MOST = 2.0
pce: Any = pce_mpi  # wrong arguments are the subject of these tests
TARGETS = np.array([0, 3, 1, 2])


class At:
    """Arrays of 4 rows and 6 columns, sharded along both axes if the mesh has two dims."""

    def __init__(self, comm: MPI.Intracomm, grid: bool) -> None:
        self.comm = comm
        self.mesh = mesh_of(comm, 2, comm.size // 2) if grid else mesh_of(comm, comm.size)
        first, last = next(iter(self.mesh.dims)), list(self.mesh.dims)[-1]
        self.rows: Any = {first: Shard(0)} | ({last: Shard(1)} if grid else {})
        self.classes: Any = ({first: Shard(0)} if grid else {}) | {last: Shard(1)}
        self.first = first
        self.values = np.arange(24.0).reshape(4, 6) / 7
        self.x = pce.distribute(self.values, self.mesh, **self.rows)
        self.logits = pce.distribute(self.values, self.mesh, **self.classes, requires_grad=True)
        self.mask = pce.distribute(self.values > 1, self.mesh, **self.rows)
        self.partial = pce.from_local(
            self.values + comm.rank, self.mesh, **dict.fromkeys(self.mesh.dims, Partial("sum"))
        )
        self.whole = pce.distribute(self.values, self.mesh)
        self.vector = pce.distribute(np.ones(6), self.mesh)

    def parameter(self) -> Any:
        w = pce.distribute(self.values, self.mesh, requires_grad=True)
        (w * self.x).sum().backward()
        return w

    def step(self, optimizer: Any) -> None:
        optimizer.step()


Call = Callable[[At, bool], Any]


def with_axis(name: str) -> Call:
    return lambda at, bad: getattr(pce, name)(at.x, 7 if bad else 0)


def with_keyword(name: str, of: str) -> Call:
    """With a keyword that a function, or a method, does not know."""
    return lambda at, bad: getattr(*((pce, name) if of == "function" else (at.x, name)))(
        *((at.x,) if of == "function" else ()), **({"axes": 0} if bad else {})
    )


REDUCTIONS = ("softmax", "log_softmax", "logsumexp", "sum", "mean", "max", "std", "cumsum")

# Each call is right if `bad` is False. Where it sends nothing, the ranks meet in `full` of its result.
CALLS: dict[str, Call] = {
    **{f"axis of {name}": with_axis(name) for name in (*REDUCTIONS, "min", "var")},
    **{f"unknown keyword of {name}": with_keyword(name, "function") for name in (*REDUCTIONS, "gelu", "transpose")},
    **{f"unknown keyword of method {name}": with_keyword(name, "method") for name in (*REDUCTIONS, "squeeze")},
    "axis of kl_divergence": lambda at, bad: pce.kl_divergence(at.logits, at.logits * 2, axis=5 if bad else 1),
    "axis of take_classes": lambda at, bad: pce.take_classes(at.logits, TARGETS[:, None], axis=5 if bad else 1),
    "ids of take_classes": lambda at, bad: pce.take_classes(at.logits, TARGETS[:, None] + 99 * bad),
    "ids of take_classes, of Partial logits": lambda at, bad: pce.take_classes(at.partial, TARGETS[:, None] + 99 * bad),
    "axis of nucleus": lambda at, bad: pce.nucleus(at.logits, top_p=0.5, axis=5 if bad else 1).mass,
    "top_k of nucleus": lambda at, bad: pce.nucleus(at.logits, top_k=0 if bad else 2).mass,
    "top_k of nucleus, of Partial logits": lambda at, bad: pce.nucleus(at.partial, top_k=0 if bad else 2).mass,
    "axis of cross_entropy": lambda at, bad: pce.cross_entropy(at.logits, TARGETS, axis=5 if bad else 1),
    "targets of cross_entropy": lambda at, bad: pce.cross_entropy(at.logits, TARGETS + 99 * bad),
    "reduction of cross_entropy": lambda at, bad: pce.cross_entropy(
        at.logits, TARGETS, reduction="avg" if bad else "sum"
    ),
    "option of cross_entropy": lambda at, bad: pce.cross_entropy(at.logits, TARGETS, **({"smooth": 0} if bad else {})),
    "targets of class_statistics": lambda at, bad: pce.class_statistics(at.logits, TARGETS + 99 * bad).log_prob,
    "hidden of linear_class_statistics": lambda at, bad: (
        pce.linear_class_statistics(
            pce.distribute(np.ones((4, 3 if bad else 6)), at.mesh),
            pce.distribute(np.ones((6, 6)), at.mesh, **at.classes),
            TARGETS,
        ).log_prob
    ),
    "scale of layer_norm": lambda at, bad: pce.layer_norm(at.x, np.ones(5 if bad else 6), np.ones(6)),
    "bias of layer_norm": lambda at, bad: pce.layer_norm(at.x, np.ones(6), np.ones(5 if bad else 6)),
    "axis of layer_norm": lambda at, bad: pce.layer_norm(at.x, np.ones(6), np.ones(6), axis=5 if bad else 1),
    "eps of layer_norm": lambda at, bad: pce.layer_norm(at.x, np.ones(6), np.ones(6), eps="a" if bad else 1e-5),
    "scale of rms_norm": lambda at, bad: pce.rms_norm(at.x, np.ones(5 if bad else 6)),
    "eps of rms_norm": lambda at, bad: pce.rms_norm(at.x, np.ones(6), eps=-1.0 if bad else 1e-5),
    "k of top_k": lambda at, bad: pce.top_k(at.logits, 99 if bad else 2)[0],
    "text of einsum": lambda at, bad: pce.einsum("ij,jk" if bad else "ij,ij->i", at.x, at.x),
    "shape of reshape": lambda at, bad: at.x.reshape((5, 5) if bad else (6, 4)),
    "shape of broadcast_to": lambda at, bad: pce.broadcast_to(at.x, (4, 5) if bad else (2, 4, 6)),
    "operand of matmul": lambda at, bad: at.x @ np.ones((5 if bad else 6, 3)),
    "operand of an operator": lambda at, bad: at.x + np.ones(5 if bad else 6),
    "operand on the left": lambda at, bad: np.ones(5 if bad else 6) * at.x,
    "operand of a ufunc": lambda at, bad: np.add(at.x, np.ones(5 if bad else 6)),
    "operand of a NumPy function": lambda at, bad: np.concatenate([at.x, np.ones((2, 5 if bad else 6))]),
    "dtype of an operand": lambda at, bad: at.x * (np.ones(6, complex) if bad else 2.0),
    "index": lambda at, bad: at.x[9 if bad else 1],
    "mask of an index": lambda at, bad: at.x[np.ones(5 if bad else 4, bool)],
    "condition of where": lambda at, bad: pce.where(np.ones(5 if bad else 6, bool), at.x, 0.0),
    "part of concatenate": lambda at, bad: pce.concatenate([at.x, at.x[:, : 5 if bad else 6]]),
    "part of stack": lambda at, bad: pce.stack([at.x, at.x[:, : 5 if bad else 6]]),
    "sections of split": lambda at, bad: pce.split(at.x, 3 if bad else 2)[1],
    "limit of clip": lambda at, bad: pce.clip(at.x, "low" if bad else 0.0, 1.0),
    "dtype of astype": lambda at, bad: at.x.astype("number" if bad else np.float32),
    "axis of expand_dims": lambda at, bad: pce.expand_dims(at.x, 9 if bad else 0),
    "axis of squeeze": lambda at, bad: pce.squeeze(pce.expand_dims(at.x, 0), 1 if bad else 0),
    "axes of transpose": lambda at, bad: pce.transpose(at.x, (0, 0) if bad else (1, 0)),
    "axes of swapaxes": lambda at, bad: pce.swapaxes(at.x, 0, 9 if bad else 1),
    "axis of redistribute": lambda at, bad: at.x.redistribute(**{at.first: Shard(5 if bad else 1)}),
    "dim of redistribute": lambda at, bad: at.x.redistribute(**{"other" if bad else at.first: Replicate()}),
    "array of distribute": lambda at, bad: pce.distribute("text" if bad else at.values, at.mesh),
    "placement of distribute": lambda at, bad: pce.distribute(at.values, at.mesh, **{at.first: Shard(5 if bad else 0)}),
    "shape of from_local": lambda at, bad: pce.from_local(np.ones(3), at.mesh, shape=(5,) if bad else (3,)),
    "seed of normal": lambda at, bad: pce.normal((4, 6), at.mesh, seed="a" if bad else 3),
    "shape of normal": lambda at, bad: pce.normal((-4, 6) if bad else (4, 6), at.mesh, seed=3),
    "dtype of normal": lambda at, bad: pce.normal((4, 6), at.mesh, seed=3, dtype=int if bad else float),
    "dim of uniform": lambda at, bad: pce.uniform((4, 6), at.mesh, seed=3, **{"other" if bad else at.first: Shard(0)}),
    "ids of embedding": lambda at, bad: pce.embedding(np.array([0, 99 if bad else 1]), at.x),
    "power": lambda at, bad: at.x ** (np.ones(5) if bad else 2.0),
    "queries of attention": lambda at, bad: pce.scaled_dot_product_attention(
        at.whole.reshape((1, 1, 4, 6)),
        at.whole.reshape((1, 1, 4, 6) if not bad else (1, 1, 6, 4)),
        at.whole.reshape((1, 1, 4, 6)),
    ),
    "an operation of one's own": lambda at, bad: pce.op(np.linalg.inv)(
        at.whole[:, : 3 if bad else 4] + np.eye(4)[:, :4]
    ),
    "targets of mse": lambda at, bad: pce.mse(at.x, np.ones((5 if bad else 4, 6))),
    "lr of SGD": lambda at, bad: at.step(pce.SGD([at.parameter()], lr=-1 if bad else 0.1)),
    "option of SGD": lambda at, bad: at.step(pce.SGD([at.parameter()], lr=0.1, **({"decay": 1} if bad else {}))),
    "betas of AdamW": lambda at, bad: at.step(pce.AdamW([at.parameter()], lr=0.1, betas=(2, 2) if bad else (0.9, 0.9))),
    "option of a group": lambda at, bad: at.step(
        pce.SGD([{"params": [at.parameter()], ("decay" if bad else "weight_decay"): 0.0}], lr=0.1)
    ),
    "norm of clipping": lambda at, bad: pce.clip_grad_norm([at.parameter()], "a" if bad else 1.0),
    "array of fingerprint": lambda at, bad: pce.fingerprint("text" if bad else at.x),
    "array of check_replicas": lambda at, bad: pce.check_replicas("text" if bad else at.x),
    "backward of a matrix": lambda at, bad: (at.logits * 1.0 if bad else (at.logits * 1.0).sum()).backward(),
    "item of a matrix": lambda at, bad: (at.x if bad else at.x.sum()).item(),
    "dims of Mesh": lambda at, bad: pce.Mesh(at.comm, data=at.comm.size + bad),
    "plain targets": lambda at, bad: pce.softmax_cross_entropy(
        at.values, TARGETS + 999 * bad, comm=at.comm, num_classes=6 * at.comm.size
    ),
    "plain option": lambda at, bad: pce.softmax_cross_entropy(
        at.values, TARGETS, comm=at.comm, **({"smooth": 0} if bad else {"num_classes": 6 * at.comm.size})
    ),
}


def outcome(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The kind and the text of what the call raises, and how long it took in seconds of an idle machine."""
    start, kind, text = time.monotonic(), "", ""
    try:
        call()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, (time.monotonic() - start) / slowdown()


def met(at: At, found: Any) -> None:
    """Let all ranks meet."""
    if isinstance(found, pce.DistArray):
        found.full()
    at.x.sum().full()
    pce.fingerprint(at.whole)


def assert_heard(everywhere: list[tuple[str, str, float]], last: int) -> None:
    """All ranks have raised the error of the last one, with its words."""
    kind, text, _ = everywhere[last]
    words = text.partition(f" (rank {last}")[0]
    assert kind in {"TypeError", "ValueError", "IndexError", "NotImplementedError", "AttributeError", "CollectiveError"}
    for rank, (other, text, seconds) in enumerate(everywhere):
        assert other == kind
        assert words in text
        assert f"(rank {last}" in text or rank == last
        assert seconds < AT_MOST


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grid", LINE_AND_GRID)
def test_wrong_argument_of_one_rank_raises_everywhere(comm, name, grid, impatient):
    at = At(comm, grid)
    last = comm.size - 1
    met(at, CALLS[name](at, False))
    error = outcome(lambda: met(at, CALLS[name](at, comm.rank == last)))
    later = outcome(lambda: np.testing.assert_allclose(at.x.mean().full(), at.values.mean()))
    again = outcome(lambda: at.x.sum().full())
    everywhere, afterwards = comm.allgather(error), comm.allgather((later[:2], again[:2]))
    assert_heard(everywhere, last)
    if comm.size == 1 or all(each == (("", ""), ("", "")) for each in afterwards):  # the ranks have agreed
        return
    for results in afterwards:  # the mesh is closed
        for kind, text in results:
            assert kind == "CollectiveError"
            assert "this mesh is closed since an error" in text
            assert f"(rank {last}" in text


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grid", LINE_AND_GRID)
def test_wrong_argument_within_attempt_leaves_the_mesh_usable(comm, name, grid, impatient):
    at = At(comm, grid)
    last = comm.size - 1

    def step(is_bad: bool) -> None:
        with at.mesh.attempt():
            met(at, CALLS[name](at, is_bad))

    error = outcome(lambda: step(comm.rank == last))
    step(False)
    np.testing.assert_allclose(at.x.mean().full(), at.values.mean())
    assert_heard(comm.allgather(error), last)


@pytest.mark.ranks(3)
def test_error_is_heard_before_a_rank_sleeps(comm, impatient, monkeypatch):
    at = At(comm, False)
    monkeypatch.setattr(communicators, "_YIELDS", 10**6)
    monkeypatch.setattr(communicators.Channel, "_wait_longer", lambda *_: pytest.fail("it sleeps"))
    with pytest.raises(ValueError, match="7"), at.mesh.attempt():
        met(at, CALLS["axis of sum"](at, comm.rank == 0))
    assert at.x.mean().full() == pytest.approx(at.values.mean())
