"""Arguments of every wrong kind: each public function with each of its arguments replaced, on all ranks and on one.

`CALLS` has a sound call of each public function, and `WRONG` what takes the place of one argument after the other.
"""

from collections.abc import Callable
import re
from typing import Any

from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard
from ranks.grids import mesh_of

WRONG: dict[str, Any] = {
    "None": None,
    "text": "text",
    "ragged": [[1], [2, 3]],
    "objects": np.array([object(), None]),
    "complex": np.ones((4, 3), complex),
    "structured": np.zeros(4, [("a", float)]),
    "masked": np.ma.masked_array(np.ones((4, 3)), np.eye(4, 3, dtype=bool)),
    "foreign byte order": np.ones((4, 3), np.dtype(float).newbyteorder()),
    "0-d": np.array(2.5),
    "huge": 10**30,
    "negative": -99,
    "nan": float("nan"),
    "dict": {"a": 1},
    "function": lambda *_, **__: None,
    "empty tuple": (),
    "other shape": np.ones((5, 2)),
}

# Words of Python and NumPy for the programmer of a function, not for its caller.
INTERNAL = re.compile(
    "has no attribute|subscriptable|not callable|not iterable|unhashable|referenced before|cannot access local|no len"
    "|unsupported operand|not supported between|cannot be interpreted as an integer|is ambiguous|scalar index"
)
# Objects and complex numbers meet operators of Python and NumPy in operations on the tape, which say what these say.
SAID_BY_NUMPY = re.compile("could not be promoted|Cannot compare structured|too large to convert")

KINDS = (TypeError, ValueError, IndexError, OverflowError, NotImplementedError)


class At:
    """Sound arguments of all functions on this communicator; those that are calls are made anew for each use."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.mesh = comm, mesh_of(comm, comm.size)
        self.classes = 3 * comm.size
        self.targets = np.array([0, self.classes - 1, 1, 0])
        self.logits = np.arange(12.0).reshape(4, 3) / 7 + comm.rank

    def x(self) -> pce.DistArray:
        return pce.distribute(np.arange(1.0, 13.0).reshape(4, 3), self.mesh, data=Shard(0))

    def stacks(self) -> pce.DistArray:
        return pce.distribute(np.ones((2, 4, 3)), self.mesh, data=Shard(0))

    def classified(self, rows: int = 4) -> pce.DistArray:
        whole = np.arange(float(rows * self.classes)).reshape(rows, -1) / 9
        return pce.distribute(whole, self.mesh, data=Shard(1))


TERMS = {"weight": np.linspace(0.5, 1, 3), "label_smoothing": 0.1, "z_loss": 0.1, "reduction": "mean"}


def plain(at: At) -> dict[str, Any]:
    return {"comm": at.comm, "class_start": 3 * at.comm.rank, "num_classes": at.classes}


def statistics(at: At) -> dict[str, Any]:
    options = {"axis": -1, "ignore_index": -100, "logit_scale": 1.0, "softcap": 5.0, "compute_dtype": np.float64}
    return {"logits": at.logits, "targets": at.targets, **options, **plain(at)}


def over_support(at: At) -> dict[str, Any]:
    return statistics(at) | {"support": (np.array([0, 1, 1, 2]), np.arange(5)), "outside": "-inf"}


def choice(at: At) -> dict[str, Any]:
    return {"logits": at.logits, "ids": np.stack([at.targets] * 2, 1), "axis": -1, **plain(at)}


def divergence(at: At) -> dict[str, Any]:
    options = {"direction": "reverse", "logit_scale": 2.0, "rows": at.targets >= 0, "reduction": "sum", "axis": -1}
    more = {"compute_dtype": np.float64, "batch_comm": MPI.COMM_SELF}
    return {"student": at.logits, "teacher": at.logits + 1.0, **options, **more, **plain(at)}


def losses(at: At) -> dict[str, Any]:
    return statistics(at) | TERMS | {"batch_comm": MPI.COMM_SELF}


def linear(at: At) -> dict[str, Any]:
    options = losses(at) | {"hidden": np.ones((4, 2)), "w": np.ones((2, 3)) / 4, "chunk": 2}
    del options["axis"], options["logits"]
    return options


def linear_statistics(at: At) -> dict[str, Any]:
    options = linear(at) | {"bias": np.ones(3)}
    return {name: value for name, value in options.items() if name not in {*TERMS, "batch_comm"}}


def on_tape(at: At, options: dict[str, Any], **arrays: Any) -> dict[str, Any]:
    named = {name: value for name, value in options.items() if name not in {"batch_comm", *plain(at)}}
    return named | {"weight": np.linspace(0.5, 1, at.classes), **arrays}


def forward_residuals(at: At) -> Any:
    return pce.softmax_cross_entropy_forward(at.logits, at.targets, comm=at.comm)[1]


def linear_residuals(at: At) -> Any:
    given = np.ones((4, 2)), np.ones((2, 3)), at.targets
    return pce.linear_class_statistics_forward(*given, comm=at.comm, num_classes=at.classes)[1]


def statistics_residuals(at: At) -> Any:
    return pce.class_statistics_forward(at.logits, at.targets, comm=at.comm)[1]


# The arguments in order; the names of those that are passed by position begin with "/".
CALLS: dict[str, Callable[[At], dict[str, Any]]] = {
    **dict.fromkeys(
        ("abs", "cos", "exp", "gelu", "log", "log1p", "negative", "relu", "sigmoid", "sin", "sqrt", "square", "tanh"),
        lambda at: {"/x": at.x()},
    ),
    **dict.fromkeys(
        ("add", "divide", "floor_divide", "maximum", "minimum", "mse", "multiply", "power", "remainder", "subtract"),
        lambda at: {"/x": at.x(), "/y": at.x()},
    ),
    **dict.fromkeys(("max", "mean", "min", "sum", "logsumexp"), lambda at: {"/x": at.x(), "axis": 1, "keepdims": True}),
    **dict.fromkeys(("std", "var"), lambda at: {"/x": at.x(), "axis": 1, "keepdims": True}),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "expand_dims"), lambda at: {"/x": at.x(), "axis": 1}),
    **dict.fromkeys(("concatenate", "stack"), lambda at: {"/arrays": [at.x(), at.x()], "axis": 1}),
    **dict.fromkeys(
        ("cosine_schedule", "linear_schedule"),
        lambda at: {"/step": 2, "lr": 0.1, "steps": 9, "warmup": 3, "final": 0.01},
    ),
    "Mesh": lambda at: {"/comm": at.comm, "data": at.comm.size},
    "Partial": lambda at: {"operator": "sum"},
    "Shard": lambda at: {"axis": 0},
    "argmax": lambda at: {"logits": at.logits, "axis": -1, **plain(at)},
    "broadcast_to": lambda at: {"/x": at.x(), "shape": (2, 4, 3)},
    "check_replicas": lambda at: {"/x": at.x()},
    "class_statistics": over_support,
    "class_statistics_backward": lambda at: {
        "/residuals": statistics_residuals(at),
        **dict.fromkeys(("log_prob", "entropy", "logsumexp"), np.ones(4)),
        "out": np.ones((4, 3)),
    },
    "class_statistics_forward": over_support,
    "clip": lambda at: {"/x": at.x(), "/min": 1.0, "/max": 4.0},
    "cross_entropy": lambda at: on_tape(at, losses(at), logits=at.classified()),
    **{
        name: lambda at: {"/shape": (4, 3), "/mesh": at.mesh, "seed": 0, "dtype": np.float32, "data": Shard(0)}
        for name in ("normal", "uniform")
    },
    "distribute": lambda at: {"/array": at.logits, "/mesh": at.mesh, "requires_grad": False, "src_rank": 0},
    "einsum": lambda at: {"/subscripts": "ij,jk->ik", "/x": at.x(), "/y": np.ones((3, 2))},
    "embedding": lambda at: {"ids": np.array([0, 3]), "table": at.x()},
    "fingerprint": lambda at: {"/arrays": {"a": at.x()}},
    "from_local": lambda at: {
        **{"/local": at.logits, "/mesh": at.mesh, "requires_grad": False},
        **{"shape": (4, at.classes), "data": Shard(1)},
    },
    "infer_placements": lambda at: {
        **{"/name": "matmul", "/shapes": [(4, 3), (3, 2)], "/placements": [{}, {}]},
        **{"mesh": at.mesh, "dtypes": np.float32},
    },
    "layer_norm": lambda at: {"/x": at.x(), "scale": np.ones(3), "bias": np.ones(3), "axis": -1, "eps": 1e-5},
    "linear_class_statistics": linear_statistics,
    "linear_class_statistics_backward": lambda at: {
        "/residuals": linear_residuals(at),
        **dict.fromkeys(("log_prob", "entropy", "logsumexp"), np.ones(4)),
    },
    "linear_class_statistics_forward": linear_statistics,
    "linear_cross_entropy": lambda at: on_tape(
        at, linear(at), hidden=pce.distribute(np.ones((4, 2)), at.mesh), w=at.classified(2)
    ),
    "linear_cross_entropy_value_and_grad": linear,
    "matmul": lambda at: {"/x": at.x(), "/y": np.ones((3, 2))},
    "nucleus": lambda at: {
        **{"logits": at.logits, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "logit_scale": 1.0, "axis": -1},
        **plain(at),
    },
    "kl_divergence": divergence,
    "kl_divergence_backward": lambda at: {
        **{"dloss": 1.0, "residuals": pce.kl_divergence_forward(**divergence(at))[1], "out": np.ones((4, 3))},
        **{"of": "teacher"},
    },
    "kl_divergence_forward": divergence,
    "kl_divergence_value_and_grad": lambda at: divergence(at) | {"out": np.ones((4, 3))},
    "op": lambda at: {"forward": np.add, "vjp": None, "rule": None, "name": "mine"},
    "reshape": lambda at: {"/x": at.x(), "shape": (3, 4)},
    "rms_norm": lambda at: {"/x": at.x(), "scale": np.ones(3), "axis": -1, "eps": 1e-5},
    "scaled_dot_product_attention": lambda at: {
        **{"q": at.stacks(), "k": at.stacks(), "v": at.stacks()},
        **{"causal": True, "scale": 1.0},
    },
    "shard_parameters": lambda at: {
        **{"params": {"w": at.logits}, "mesh": at.mesh, "styles": {"w": pce.Replicated()}, "dim": "data"},
    },
    "shard_range": lambda at: {"length": 7, "parts": 3, "index": 1},
    "softmax_cross_entropy": losses,
    "softmax_cross_entropy_backward": lambda at: {
        **{"dloss": 1.0, "residuals": forward_residuals(at), "out": np.ones((4, 3))},
    },
    "softmax_cross_entropy_forward": losses,
    "softmax_cross_entropy_value_and_grad": lambda at: losses(at) | {"out": np.ones((4, 3))},
    "split": lambda at: {"/x": at.x(), "indices_or_sections": 2, "axis": 0},
    "squeeze": lambda at: {"/x": at.x()[None], "axis": 0},
    "swapaxes": lambda at: {"/x": at.x(), "axis1": 0, "axis2": 1},
    "take_classes": choice,
    "take_classes_backward": lambda at: {
        "/dchosen": np.ones((4, 2)),
        "/residuals": pce.take_classes_forward(**choice(at))[1],
    },
    "take_classes_forward": choice,
    "top_k": lambda at: {"logits": at.logits, "k": 2, "axis": -1, **plain(at)},
    "trace": lambda at: {"fingerprints": False},
    "transpose": lambda at: {"/x": at.x(), "axes": (1, 0)},
    "rehearse": lambda at: {"/program": lambda mesh: None, "/mesh": {"data": 2}, "links": {"data": (1e-6, 1e9)}},
    "where": lambda at: {"/condition": at.x() > 2, "/x": at.x(), "/y": 1.0},
}
# They take no arguments or any, are made by the package alone, or have tables of their own.
LEFT_OUT = {
    *("ChosenResiduals", "ClassStatistics", "CollectiveError", "CollectiveTimeout", "Colwise", "DistArray"),
    *("DivergenceResiduals", "get_include", "Inference"),
    *("LinearGradients", "LinearStatisticsResiduals", "LinearValueAndGrad", "Nucleus", "Rehearsal"),
    *("Replicate", "Replicated", "Residuals", "Rowwise", "Rule", "SequenceParallel"),
    *("StatisticsResiduals", "Trace", "VocabParallel", "named_scope", "no_grad", "reproducible", "dense", "load"),
    *("save", "SGD", "AdamW", "clip_grad_norm"),
}
# Each rank's own arguments are checked before the ranks agree; these bring the ranks together.
AGREED = {
    *("argmax", "class_statistics", "distribute", "embedding", "from_local", "linear_cross_entropy_value_and_grad"),
    *("linear_class_statistics", "linear_class_statistics_backward", "linear_class_statistics_forward"),
    *("kl_divergence", "kl_divergence_forward", "kl_divergence_value_and_grad"),
    *("nucleus", "softmax_cross_entropy_value_and_grad", "take_classes", "top_k"),
}
BRING_TOGETHER = {"comm", "batch_comm", "/mesh", "table", "src_rank", "/residuals"}


def told(name: str, given: dict[str, Any]) -> tuple[str, str]:
    """The kind and the text of what the call raises; nothing if it returns."""
    function = getattr(pce, name)
    positional = [value for key, value in given.items() if key[0] == "/"]
    try:
        function(*positional, **{key: value for key, value in given.items() if key[0] != "/"})
    except KINDS as error:
        kind = next(kind for kind in KINDS if isinstance(error, kind))
        return kind.__name__, str(error)
    except Exception as error:
        return f"not one of the kinds: {type(error).__name__}", str(error)
    return "", ""


def test_every_public_function_has_a_call():
    assert CALLS.keys() | LEFT_OUT == {*pce.__all__}
    assert not CALLS.keys() & LEFT_OUT


@pytest.mark.ranks(2)  # whoever does not communicate needs one rank, and whoever does any other
@pytest.mark.parametrize("name", CALLS)
def test_wrong_argument_is_told_alike_on_all_ranks(comm, name, impatient):
    at = At(comm)
    assert "".join(told(name, CALLS[name](at))) == ""
    found = {}
    for argument in CALLS[name](at):
        for kind, wrong in WRONG.items():
            found[argument, kind] = told(name, CALLS[name](at) | {argument: wrong})
    everywhere = comm.allgather(found)
    for call, (kind, text) in found.items():
        assert kind in {"", *(each.__name__ for each in KINDS)}, (call, kind, text)
        assert SAID_BY_NUMPY.search(text) or not INTERNAL.search(text), (call, kind, text)
        assert {ranks[call][0] for ranks in everywhere} == {kind}, call
    assert "".join(told(name, CALLS[name](at))) == ""


@pytest.mark.ranks(2)  # one rank errs and one is right
@pytest.mark.parametrize("name", sorted(AGREED))
def test_wrong_argument_on_one_rank_raises_everywhere(comm, name, several, impatient):
    at = At(comm)
    found = {}
    for argument in sorted(CALLS[name](at).keys() - BRING_TOGETHER):
        for kind, wrong in WRONG.items():
            given = CALLS[name](at)
            found[argument, kind] = told(name, given | {argument: wrong} if comm.rank == comm.size - 1 else given)
    for call, texts in zip(found, zip(*(ranks.values() for ranks in comm.allgather(found)), strict=True), strict=True):
        assert len(set(texts)) == 1, (call, texts)
    assert "".join(told(name, CALLS[name](at))) == ""


LOSSES = ["class_statistics", "cross_entropy", "linear_class_statistics", "linear_cross_entropy"]


def of_distributed(at: At, name: str) -> dict[str, Any]:
    """A sound call of a loss or of statistics, with classes sharded over the ranks."""
    if name in {"cross_entropy", "linear_cross_entropy"}:
        return CALLS[name](at)
    if name == "class_statistics":
        return {"logits": at.classified(), "targets": at.targets}
    product = {"hidden": pce.distribute(np.ones((4, 2)), at.mesh), "w": at.classified(2)}
    return product | {"targets": at.targets, "bias": np.ones(at.classes)}


def check_wrong_array_of_one_rank(comm: MPI.Intracomm, name: str, sound: dict[str, Any]) -> None:
    found = {}
    for argument in sorted(sound.keys() & {"targets", "weight", "bias"}):
        for kind, wrong in WRONG.items():
            given = sound | {argument: wrong} if comm.rank == comm.size - 1 else sound
            found[argument, kind] = told(name, given)
    kinds = {"None", "text", "ragged", "complex"} - ({"None"} if "statistics" in name else set())
    assert {found["targets", kind][0] for kind in kinds} == {"TypeError", "ValueError"}
    for call, texts in ((call, comm.allgather(found[call])) for call in sorted(found)):
        assert len(set(texts)) == 1, (call, texts)
    assert "".join(told(name, sound)) == ""


@pytest.mark.ranks(2)  # as above
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "classes"])
@pytest.mark.parametrize("name", LOSSES)
def test_wrong_array_of_one_rank_raises_on_all(comm, name, axis, several, impatient):
    sound = of_distributed(At(comm), name)
    if axis == 0:  # the rows are sharded, of the logits or of the hidden vectors
        if "logits" in sound:
            sound["logits"] = sound["logits"].redistribute(data=Shard(0))
        else:
            sound["hidden"] = sound["hidden"].redistribute(data=Shard(0))
            sound["w"] = sound["w"].redistribute(data=pce.Replicate())
    check_wrong_array_of_one_rank(comm, name, sound)


@pytest.mark.ranks(2)  # as above
@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("name", LOSSES)
def test_wrong_array_beside_partial_one_raises_everywhere(comm, name, kind, several, impatient):
    sound = of_distributed(At(comm), name)
    for operand in sound.keys() & {"logits", "hidden"}:  # reduced before the ranks agree
        sound[operand] = pce.from_local(np.ones(sound[operand].shape), sound[operand].mesh, data=pce.Partial(kind))
    check_wrong_array_of_one_rank(comm, name, sound)


@pytest.mark.parametrize("wrong", ["targets", "weight"])
def test_wrong_array_beside_sharded_one_raises_on_all(comm, line, wrong, several, impatient):
    sound = {
        "targets": pce.distribute(np.arange(4), line, data=Shard(0)) if wrong == "weight" else np.arange(4),
        "weight": pce.distribute(np.ones(6), line, data=Shard(0)) if wrong == "targets" else np.ones(6),
    }
    given = sound | ({wrong: np.ones(5)} if comm.rank == 0 else {})
    with pytest.raises(ValueError, match=rf"{wrong} must .*rank 0"):
        pce.cross_entropy(pce.distribute(np.zeros((4, 6)), line), given["targets"], weight=given["weight"])
