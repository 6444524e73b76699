"""Train one GPT on one rank and on meshes of all ranks, and tell how far the meshes part from the one.

    mpiexec -n 2 python -m mpi4py benchmarks/drift.py --steps 10000 --plot docs/drift.svg

The model and its text are those of examples/transformer.py. All start with the same numbers and take the same steps;
`reproducible` is off unless PCE_MPI_REPRODUCIBLE is 1, and then nothing parts. `apart` is the length of the difference
of all parameters, and `way` how far those of one rank have come, both as a part of their length now. Losses are those
of held-out text. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import sys
from typing import Any

from mpi4py import MPI
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import pce_mpi as pce
from pce_mpi.cli.arguments import positive
from pce_mpi.svg import new_figure
from pce_mpi.text import table
from transformer import GPT, passages, read_corpus, step

COMM = MPI.COMM_WORLD
Array = np.ndarray[Any, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default, what in (
        ("steps", 10_000, "training steps"),
        ("layers", 2, "layers"),
        ("heads", 4, "attention heads"),
        ("width", 32, "length of the vector of a token"),
        ("length", 16, "tokens of a sequence"),
        ("batch", 16, "sequences of a step"),
        ("test", 256, "held-out sequences"),
        ("max-files", 100, "files of text to read, at most"),
        ("min-count", 10, "tokens that occur less often are unknown"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=what)
    parser.add_argument("--plot", metavar="FILE", help="draw the picture, with matplotlib")
    parser.set_defaults(seed=0, rate=0.01, decay=0.1, max_norm=1.0, sequence_parallel=False)
    args = parser.parse_args()
    figure = new_figure(10, 4) if args.plot and COMM.rank == 0 else None  # fails before the training
    corpus = read_corpus(COMM, args)
    rows, test = (passages(files, args.length + 1) for files in (corpus.training, corpus.held_out))
    test = test[:: max(1, len(test) // args.test)][: args.test]
    shapes = {"one rank": (MPI.COMM_SELF, 1, 1)} if COMM.rank == 0 else {}  # which the others do not train
    shapes |= {f"data {COMM.size}": (COMM, COMM.size, 1), f"model {COMM.size}": (COMM, 1, COMM.size)}
    models = {
        name: GPT(pce.Mesh(comm, data=data, context=1, model=model), corpus.unigram(), args)
        for name, (comm, data, model) in shapes.items()
    }
    start, found = whole(models[f"data {COMM.size}"]), []
    for number in range(1, args.steps + 1):
        for model in models.values():
            step(model, rows, number, args)
        if is_told(number) or number == args.steps:
            found.append([number, *compared(models, start, test)])
            if COMM.rank == 0:
                print(f"step {number} of {args.steps}", file=sys.stderr, flush=True)
    if COMM.rank == 0:
        meshes = [name for name in models if name != "one rank"]
        heads = ["step", "way", *(f"apart, {name}" for name in meshes), *(f"loss, {name}" for name in models)]
        size = f"width {args.width}, {args.layers} layers, {args.batch} x {args.length} tokens"
        print(f"{COMM.size} ranks, {size}, {len(corpus.vocabulary)} classes\n")
        print(
            table(
                [
                    heads,
                    *(
                        [f"{n}", *(f"{each:.3g}" for each in rest[:3]), *(f"{each:.4f}" for each in rest[3:])]
                        for n, *rest in found
                    ),
                ]
            )
        )
        if figure:
            draw(figure, np.array(found), meshes)
            figure.savefig(args.plot)


def is_told(number: int) -> bool:
    """Tell whether it is 1, 2 or 5 times a power of ten."""
    return str(number).rstrip("0") in ("1", "2", "5")


def whole(model: GPT) -> Array:
    """All parameters, one after the other."""
    return np.concatenate([array.full().ravel() for array in model.parameters.values()]).astype(float)


def compared(models: dict[str, GPT], start: Array, test: Array) -> list[float]:
    """How far the first model has come, how far the others are from it, and the losses of all."""
    with pce.no_grad():
        losses = [model.loss(test).item() for model in models.values()]
    one, *others = [whole(model) for model in models.values()]  # on ranks other than 0 one of the meshes, and of no use
    length = np.linalg.norm(one)
    return [float(np.linalg.norm(each - one) / length) for each in (start, *others)] + losses


def draw(figure: Any, found: Array, meshes: list[str]) -> None:
    apart, losses = figure.subplots(1, 2)
    steps, way = found[:, 0], found[:, 1]
    apart.plot(steps, way, "k--", linewidth=1, label="way from the start")
    for number, mesh in enumerate(meshes):
        apart.plot(steps, found[:, 2 + number], "o-", markersize=4, linewidth=1, label=f"{mesh} from one rank")
        losses.plot(steps, abs(found[:, 5 + number] - found[:, 4]), "o-", markersize=4, linewidth=1, label=mesh)
    apart.set(title="Parameters", ylabel="distance / length of all parameters")
    losses.set(title="Held-out loss", ylabel="difference from one rank, nats a token")
    for axes in (apart, losses):
        axes.set(xlabel="training step", xscale="log", yscale="log")
        axes.legend(fontsize=7)


if __name__ == "__main__":
    main()
