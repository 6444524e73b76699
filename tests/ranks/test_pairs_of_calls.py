"""Ranks that make different collective calls are refused with a true account, and the next sound call works."""

from itertools import combinations, product
from pathlib import Path
import re
from typing import Any, cast

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Partial, Replicate, Shard

NUMBERS = np.arange(1.0, 13.0).reshape(4, 3)
TARGETS = np.array([0, 2, 1, 0])


class Operands:
    """The operands of the calls."""

    def __init__(self, mesh, folder):
        self.mesh, self.path = mesh, str(folder / "there")
        self.rows = pce.distribute(NUMBERS, mesh, data=Shard(0))
        self.columns = pce.distribute(NUMBERS, mesh, data=Shard(1), requires_grad=True)
        self.partial = pce.from_local(NUMBERS / mesh.size, mesh, data=Partial())
        self.all, self.classes = pce.distribute(NUMBERS, mesh), pce.distribute(NUMBERS.T, mesh, data=Shard(1))
        self.w = pce.distribute(NUMBERS.T, mesh, requires_grad=True)
        (self.rows @ self.w).sum().backward()
        self.wrong = pce.distribute(NUMBERS.T, mesh, requires_grad=True)
        self.sgd, self.adamw = pce.SGD([self.w], lr=0.1), pce.AdamW([self.w], lr=0.1)


# Each call with the names that an account may have for it: that of the call, or of the operations within it.
CALLS = {
    "full": (lambda o: o.rows.full(), "full"),
    "item": (lambda o: o.rows.sum().item(), "item|full"),
    "redistribute": (lambda o: o.rows.redistribute(data=Shard(1)), "redistribute"),
    "reduce": (lambda o: o.partial.redistribute(data=Replicate()), "redistribute"),
    "reduce and scatter": (lambda o: o.partial.redistribute(data=Shard(0)), "redistribute"),
    "exp of partial": (lambda o: pce.exp(o.partial), "exp"),
    "max": (lambda o: o.rows.max(), "max"),
    "rows by number": (lambda o: o.rows[np.array([0, 3, 1])], "slice"),
    "slice": (lambda o: o.rows[1:3].full(), "slice"),
    "embedding": (lambda o: pce.embedding(np.array([0, 3]), o.rows), "embedding"),
    "softmax": (lambda o: pce.softmax(o.columns), "softmax"),
    "log_softmax": (lambda o: pce.log_softmax(o.columns), "log_softmax"),
    "logsumexp": (lambda o: pce.logsumexp(o.columns, axis=1), "logsumexp"),
    "cross_entropy": (lambda o: pce.cross_entropy(o.columns, TARGETS), "cross_entropy"),
    "cross_entropy of rows": (lambda o: pce.cross_entropy(o.rows, TARGETS), "cross_entropy"),
    "class_statistics": (lambda o: pce.class_statistics(o.columns, TARGETS), "class_statistics"),
    "top_k": (lambda o: pce.top_k(o.columns, 2), "top_k"),
    "argmax": (lambda o: pce.argmax(o.columns), "argmax"),
    "linear": (lambda o: pce.linear_cross_entropy(o.all, o.classes, TARGETS), "linear_cross_entropy"),
    "linear statistics": (lambda o: pce.linear_class_statistics(o.all, o.classes, TARGETS), "linear_class_statistics"),
    "layer_norm": (lambda o: pce.layer_norm(o.columns), "sum"),
    "cumsum": (lambda o: pce.cumsum(o.rows, axis=0), "cumsum"),
    "backward": (lambda o: (o.columns.redistribute(data=Shard(0)) * 2.0).sum().backward(), "redistribute"),
    "fingerprint": (lambda o: pce.fingerprint(o.rows), "fingerprint"),
    "check_replicas": (lambda o: pce.check_replicas(o.rows), "check_replicas"),
    "save of partial": (lambda o: pce.save(o.path + " too", {"partial": o.partial}), "save"),
    "fingerprint of partial": (lambda o: pce.fingerprint(o.partial), "fingerprint"),
    "save": (lambda o: pce.save(o.path + " too", {"rows": o.rows}), "save"),
    "load": (lambda o: pce.load(o.path, o.mesh), "load"),
    "from_local": (lambda o: pce.from_local(np.ones((2, 2)), o.mesh, data=Shard(0)), "from_local"),
    "distribute": (lambda o: pce.distribute(NUMBERS, o.mesh, src_rank=0), "distribute"),
    "SGD.step": (lambda o: o.sgd.step(), "SGD"),
    "AdamW.step": (lambda o: o.adamw.step(), "AdamW"),
    "clip_grad_norm": (lambda o: pce.clip_grad_norm([o.w], 1.0), "clip_grad_norm"),
    "loss over a mesh": (
        lambda o: pce.softmax_cross_entropy(NUMBERS * (1 + o.mesh.rank), TARGETS, comm=o.mesh.comm("data")),
        "softmax_cross_entropy",
    ),
    "statistics over a mesh": (
        lambda o: pce.class_statistics(NUMBERS * (1 + o.mesh.rank), comm=o.mesh.comm("data")),
        "class_statistics",
    ),
}


# Calls whose checks fail on the rank that makes them, with the error of all.
FAULTS = {
    "save nowhere": (lambda o: pce.save(o.path + "/none/x", {"rows": o.rows}), OSError),
    "save an array of numpy": (
        lambda o: pce.save(o.path + " too", {"rows": o.rows, "x": cast("Any", NUMBERS)}),
        TypeError,
    ),
    "load nothing": (lambda o: pce.load(o.path + " none", o.mesh), OSError),
    "embedding out of range": (lambda o: pce.embedding(np.array([0, 9]), o.rows), IndexError),
    "from_local of text": (lambda o: pce.from_local("text", o.mesh), TypeError),
    "dtype of logits": (lambda o: pce.softmax_cross_entropy(TARGETS, TARGETS, comm=o.mesh.comm("data")), TypeError),
    "step of a wrong gradient": (lambda o: pce.SGD([o.wrong], lr=0.1).step(), TypeError),
}


@pytest.fixture
def operands(comm, impatient, several, tmp_path_factory):
    mesh = Mesh(comm, data=comm.size)
    folder = Path(comm.bcast(str(tmp_path_factory.mktemp("calls"))))
    pce.save(folder / "there", {"numbers": pce.distribute(NUMBERS, mesh)})
    return Operands(mesh, folder)


def refused(call, operands):
    """The error of a call that must not end, and whether the next call of all ranks is sound."""
    error = None
    try:
        call(operands)
    except Exception as raised:
        error = raised
    try:
        sound = bool((operands.rows.full() == NUMBERS).all())
    except pce.CollectiveError as false_account:
        sound = str(false_account)
    return error, sound


def fault_of(text, first, second, comm):
    """The fault in the account that rank 0 made the first call, and all others the second one."""
    ranks = ", ".join(f"{rank}" for rank in range(1, comm.size))
    others = f"rank{'s' * (comm.size > 2)} {ranks}"
    (_, one), (_, other) = CALLS[first], CALLS[second]
    text = text.replace(" along data", "")  # which a plain function over the mesh's communicator does not know
    if re.fullmatch(rf"ranks disagree on operation: ({one}) \(rank 0\), ({other}) \({others}\)", text):
        return ""
    # Both begin with one operation, and its arguments differ.
    names = {name for name in re.split(r"\W+", one) if name} & {name for name in re.split(r"\W+", other) if name}
    told = text.startswith("ranks disagree on ") and "operation" not in text and " (rank 0), " in text
    return "" if names and told and f" ({others})" in text else f"{first} and {second}: {text}"


def test_calls_are_collective(operands):
    for name, (call, _) in CALLS.items():
        with pce.trace() as trace:
            call(operands)
        assert trace.events, name


@pytest.mark.ranks(2)  # the account of more ranks is that of failed checks
def test_different_calls_are_refused_with_true_account(comm, operands):
    faults = []
    for number, pair in enumerate(combinations(CALLS, 2)):
        first, second = pair if number % 2 else pair[::-1]
        error, sound = refused(CALLS[first if comm.rank == 0 else second][0], operands)
        faults += [] if sound is True else [f"after {first} and {second}: {sound}"]
        fault = fault_of(str(error), first, second, comm) if isinstance(error, pce.CollectiveError) else repr(error)
        faults += [fault] if fault else []
    assert comm.allgather(faults) == [[]] * comm.size


@pytest.mark.ranks(2, 3)
def test_failed_checks_beside_other_calls_are_told(comm, operands):
    operands.wrong.grad = NUMBERS.T
    faults = []
    for first, second in product(FAULTS, CALLS):
        call, kind = FAULTS[first]
        error, sound = refused(call if comm.rank == 0 else CALLS[second][0], operands)
        if sound is not True or type(error) not in (kind, *kind.__subclasses__()) or "(rank 0" not in str(error):
            faults.append(f"{first} and {second}: {error!r}, then {sound}")
    assert comm.allgather(faults) == [[]] * comm.size


@pytest.mark.ranks(4)
def test_refusal_along_one_dim_is_told_and_ends(comm, impatient):
    mesh = Mesh(comm, data=2, model=2)
    x = pce.distribute(NUMBERS, mesh, model=Shard(0))
    calls = {0: lambda: x.max(), 1: lambda: x.full()}

    def attempt():
        with mesh.attempt():
            calls.get(comm.rank, calls[1])()

    # Ranks 2 and 3 make the same call along model, and hear of the error at the end of the attempt.
    texts = comm.allgather(str(refused_alone(attempt)))
    assert len(set(texts)) == 1
    assert "max (rank 0 along" in texts[0]
    assert len(set(comm.allgather(pce.fingerprint(x)))) == 1
    assert (x.full() == NUMBERS).all()
    assert len(set(comm.allgather(pce.fingerprint(x)))) == 1


def refused_alone(call):
    try:
        call()
    except pce.CollectiveError as error:
        return error
    return None
