"""Train the model of examples/transformer.py inside `reproducible` on many meshes, and print the fingerprints as JSON.

    python tests/jobs/equal_training.py STEPS FOLDER MESH ...

A mesh is written as `1x2x1`, the ranks of data, context and model, with an `s` for sequence parallelism. Batches, heads
and classes divide by nothing. `1x2x1-after-1x1x1` goes on from what that mesh has saved in the folder after half of the
steps, and `2x1x1-FAULT` has one of the faults below.
"""

from functools import partial
import json
from pathlib import Path
import sys
from types import SimpleNamespace

from mpi4py import MPI
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pce_mpi as pce
from transformer import GPT, resume, save, step

VOCABULARY, LENGTH, BATCH = 29, 6, 5
ARGS: dict[str, float] = {"layers": 1, "heads": 3, "width": 12, "length": LENGTH, "batch": BATCH}
ARGS |= {"decay": 0.1, "rate": 0.01, "max_norm": 0.5, "seed": 0}


def rows():
    return np.random.default_rng(1).integers(0, VOCABULARY, (20, LENGTH + 1))


def model_on(mesh, steps, sequence_parallel):
    unigram = -np.log(np.arange(1, VOCABULARY + 1))
    return GPT(mesh, unigram, SimpleNamespace(steps=steps, sequence_parallel=sequence_parallel, **ARGS))


def unsynchronized(model, rows):
    """The loss of this rank's part of the batch, said to be that of all."""
    ids = rows[model.mesh.rank :: model.mesh.size][: len(rows) // model.mesh.size]
    return pce.cross_entropy(model.logits(pce.distribute(ids[:, :-1], model.mesh)), ids[:, 1:])


def wrongly_split(model, rows):
    """The loss of a batch that each rank but the first begins a row early."""
    start, stop = (len(rows) * (model.mesh.rank + each) // model.mesh.size for each in (0, 1))
    mine = rows[max(0, start - 1) : stop]
    ids, targets = (
        pce.from_local(np.ascontiguousarray(part), model.mesh, data=pce.Shard(0))
        for part in (mine[:, :-1], mine[:, 1:])
    )
    return pce.cross_entropy(model.logits(ids), targets)


def twice_reduced(model, rows):
    """The sum over the ranks of a mean that is over all ranks already."""
    return GPT.loss(model, rows) * model.mesh.size


FAULTS = {each.__name__: each for each in (unsynchronized, wrongly_split, twice_reduced)}


def fingerprints(name, steps, folder):
    """The fingerprint of all parameters after each step; half of them is saved for other meshes to go on from."""
    sizes, _, how = name.partition("-")
    dims = zip(("data", "context", "model"), map(int, sizes.rstrip("s").split("x")), strict=True)
    model = model_on(pce.Mesh(MPI.COMM_WORLD, **dict(dims)), steps, sequence_parallel=sizes.endswith("s"))
    if how in FAULTS:
        model.loss = partial(FAULTS[how], model)
    first = resume(model, folder / how.removeprefix("after-")) if how.startswith("after-") else 0
    found = []
    for number in range(first + 1, steps + 1):
        step(model, rows(), number, model.args)
        found.append(pce.fingerprint(model.parameters)[:16])
        if number == steps // 2:
            save(model, folder / sizes, number)
    return found


if __name__ == "__main__":
    with pce.reproducible():
        found = {name: fingerprints(name, int(sys.argv[1]), Path(sys.argv[2])) for name in sys.argv[3:]}
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found, indent=2))
