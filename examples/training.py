"""Train a language model: compare the first steps with those of one process, then take all steps."""

from argparse import Namespace
from collections.abc import Callable
import contextlib
import json
from pathlib import Path
import time
from typing import Protocol, TypeVar

import numpy as np

from comparison import compare_steps
from corpus import Corpus
from loss_curve import plot
import pce_mpi as pce
from pce_mpi.cli.progress import Bar


class Model(Protocol):
    """A model: its parameters, and its optimizers with their learning rates."""

    mesh: pce.Mesh
    parameters: dict[str, pce.DistArray]
    optimizers: list[tuple[float, pce.SGD]]

    def loss(self, rows: np.ndarray) -> pce.DistArray: ...


M = TypeVar("M", bound=Model)


def step(model: Model, rows: np.ndarray, number: int, args: Namespace) -> float:
    """Take a step of gradient descent on random rows, the same on every rank, and return the loss before it."""
    drawn = np.random.default_rng([args.seed, number]).integers(len(rows), size=args.batch)
    loss = model.loss(rows[drawn])
    loss.backward()
    if args.max_norm:
        pce.clip_grad_norm(model.parameters.values(), args.max_norm)
    for rate, optimizer in model.optimizers:
        # The rate rises during the first twentieth of the steps, then falls to zero.
        optimizer.lr = rate * min(20 * number / args.steps, 1 - (number - 1) / args.steps)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def resume(model: Model, path: Path) -> int:
    """Load parameters that were saved on any number of ranks, and return after how many steps."""
    saved = pce.load(path, model.mesh, {name: array.placements for name, array in model.parameters.items()})
    for name, array in model.parameters.items():
        array.local[...] = saved[name].local
    return int(saved["steps"].item())


def train(start: Callable[[pce.Mesh], M], mesh: pce.Mesh, rows: np.ndarray, corpus: Corpus, args: Namespace) -> M:
    """Make a model on `mesh` by `start` and train it; rank 0 shows the progress, writes the log and plots the loss."""
    numbers = range(1, min(3, args.steps) + 1)
    compare_steps(mesh, start, lambda model, number: step(model, rows, number, args), numbers)
    model, here = start(mesh), mesh.rank == 0
    if here:
        own, whole = np.sum([(array.local.size, array.size) for array in model.parameters.values()], axis=0)
        share = f"{own:,} of {whole:,} parameters"
        print(f"training on {len(rows):,} tokens; rank 0 of {mesh.size} holds {share}", flush=True)
    first = resume(model, args.resume) + 1 if args.resume else 1
    last = args.stop or args.steps
    history, begin = list[dict[str, float]](), time.perf_counter()
    with contextlib.closing(Bar("training", last + 1 - first, shown=here)) as bar:
        for number in range(first, last + 1):
            loss, seconds = step(model, rows, number, args), time.perf_counter() - begin
            history.append({"step": number, "loss": loss, "seconds": round(seconds, 3)})
            bar.finished(f"loss {np.mean([entry['loss'] for entry in history[-50:]]):.3f}, {seconds:.0f} s")
    if args.save:
        pce.save(args.save, model.parameters | {"steps": pce.distribute(last, mesh)})
    if here and args.log:
        args.log.write_text("".join(json.dumps(entry) + "\n" for entry in history), encoding="utf-8")
    if here and args.plot:
        plot(args.plot, history, -corpus.unigram()[np.concatenate(corpus.training)].mean(), mesh.size)
    return model
