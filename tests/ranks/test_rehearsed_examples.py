"""Rehearsals of the examples that train on a mesh: they send what was rehearsed, on any number of ranks."""

from collections.abc import Callable, Iterator
from importlib import import_module
import sys
from typing import Any

import numpy as np
import pytest

from jobs.launch import ROOT
import pce_mpi as pce
from pce_mpi import Mesh
from ranks.grids import squarest
from ranks.test_rehearsal import outcome, rehearsed, traced

pytestmark = pytest.mark.usefixtures("impatient", "examples")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let programs import the examples, which take no options from the tests' command line."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["example"])
    yield


def transformer(*options: str) -> Callable[[Mesh], None]:
    def program(mesh: Mesh) -> None:
        sys.argv[1:] = ["--batch", "5", "--length", "7", "--width", "24", "--vocabulary", "101", *options]
        import_module("transformer").program(mesh)

    return program


def language_model(mesh: Mesh) -> None:
    example = import_module("language_model")
    args = example.options().parse_args(["--steps=3", "--batch=9"])
    model = example.Model(mesh, np.zeros(101), args)
    example.step(model, np.arange(50).reshape(10, 5), 1, args)


def classifier(*options: str) -> Callable[[Mesh], None]:
    def program(mesh: Mesh) -> None:
        example = import_module("classifier")
        args = example.parser().parse_args(["--classes", "1001", "--batch", "13", "--validation", "3", *options])
        features, labels = np.ones((40, 6), np.float32), np.arange(40)
        model = example.Classifier(mesh, 6, args)
        for number in range(2):
            model.step(features, labels, number)

    return program


def data_and_model_parallel(mesh: Mesh) -> None:
    example = import_module("data_and_model_parallel")
    image, w0, w1, label = (
        pce.distribute(array, mesh, requires_grad=name.startswith("w"), **example.SHARDS[name])
        for name, array in example.problem().items()
    )
    pce.mse(image @ w0 @ w1, label).backward()
    pce.SGD([w0, w1], lr=0.1).step()


def gradient_synchronization(mesh: Mesh) -> None:
    example = import_module("gradient_synchronization")
    parameters = example.parameters_with_gradients(mesh, ("data", "model"))
    pce.SGD(parameters.values(), lr=0.1).step()


def loss_parallel(gather: bool) -> Callable[[Mesh], None]:
    return lambda mesh: import_module("loss_parallel").loss_and_gradients(mesh, gather)


def first_difference(mesh: Mesh) -> None:
    example = import_module("first_difference")
    parameters = example.initial(mesh)
    example.loss_of(parameters, mesh, lambda x: x, 1).backward()
    pce.AdamW(parameters.values(), lr=0.01).step()


def distillation(name: str) -> Callable[[Mesh], None]:
    def program(mesh: Mesh) -> None:
        example: Any = import_module("distillation")
        example.STEPS = 3  # all steps send the same
        example.learn(mesh, getattr(example, name))

    return program


PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[Mesh], Any]]] = {
    "transformer": (("data", "model"), transformer()),
    "transformer of sequences": (("context", "model"), transformer("--sequence-parallel")),
    "language_model": (("classes",), language_model),
    "classifier": (("ranks",), classifier()),
    "classifier by angles": (("ranks",), classifier("--margin", "0.2")),
    "data_and_model_parallel": (("data", "model"), data_and_model_parallel),
    "gradient_synchronization": (("data", "context", "model"), gradient_synchronization),
    "loss_parallel": (("model",), loss_parallel(gather=False)),
    "loss_parallel of gathered logits": (("model",), loss_parallel(gather=True)),
    "first_difference": (("data", "model"), first_difference),
    **{
        f"distillation, {name}": (("data", "classes"), distillation(name))
        for name in ("all_classes", "rest_mass_dropped", "renormalized", "one_more_class")
    },
}


@pytest.mark.parametrize("example", PROGRAMS)
def test_example_sends_what_was_rehearsed(comm, example):
    dims, program = PROGRAMS[example]
    mesh = Mesh(comm, **dict(zip(dims, squarest(comm.size, len(dims)), strict=True)))
    assert outcome(rehearsed, program, mesh) == outcome(traced, program, mesh)
