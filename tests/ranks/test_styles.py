"""Styles say by name how parameters are placed along one dim; an error names those that do not fit."""

from dataclasses import FrozenInstanceError

from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import (
    Colwise,
    Partial,
    Replicate,
    Replicated,
    Rowwise,
    SequenceParallel,
    Shard,
    VocabParallel,
    shard_parameters,
)
from ranks.grids import factorizations, mesh_of

STYLES = [Colwise(), Rowwise(), SequenceParallel(), VocabParallel(), Replicated()]


def parameters():
    rng = np.random.default_rng(1)
    return {
        "embedding": rng.standard_normal((11, 6)),
        "block.0.norm.scale": rng.standard_normal(6),
        "block.0.up.w": rng.standard_normal((6, 10)).astype(np.float32),
        "block.0.up.b": rng.standard_normal(10).astype(np.float32),
        "block.0.down.w": rng.standard_normal((10, 6)),
        "block.0.down.b": rng.standard_normal(6),
        "temperature": np.array(0.5),
    }


PLAN = {
    "embedding": VocabParallel(),
    "*.norm.*": SequenceParallel(),
    "*.up.?": Colwise(),
    "*.down.[wb]": Rowwise(),
    "temperature": Replicated(),
}


# -------------------------------------------------------------------------------------------------------------- styles


@pytest.mark.parametrize(
    ("style", "vector", "matrix", "stack"),
    [
        (Colwise(), Shard(0), Shard(1), Shard(2)),
        (Rowwise(), Replicate(), Shard(0), Shard(1)),
        (VocabParallel(), Shard(0), Shard(0), Shard(0)),
        (SequenceParallel(), Replicate(), Replicate(), Replicate()),
        (Replicated(), Replicate(), Replicate(), Replicate()),
    ],
    ids=repr,
)
def test_style_places_vectors_matrices_and_stacks(square, style, vector, matrix, stack):
    params = {"vector": np.zeros(3), "matrix": np.zeros((3, 5)), "stack": np.zeros((2, 3, 5))}
    with pce.trace() as trace:
        placed = shard_parameters(params, square, {"*": style})
        [other] = shard_parameters({"matrix": params["matrix"]}, square, {"*": style}, dim="data").values()
    assert trace.events == []
    assert other.placements == {"data": matrix, "model": Replicate()}
    assert all(array.requires_grad and array.is_leaf for array in placed.values())
    assert not any(np.shares_memory(array.local, params[name]) for name, array in placed.items())
    assert {name: array.placements for name, array in placed.items()} == {
        "vector": {"data": Replicate(), "model": vector},
        "matrix": {"data": Replicate(), "model": matrix},
        "stack": {"data": Replicate(), "model": stack},
    }


def test_styles_are_values():
    assert Colwise() == Colwise()
    assert len(set(STYLES)) == len(STYLES)
    assert [repr(style) for style in STYLES] == [
        "Colwise()",
        "Rowwise()",
        "SequenceParallel()",
        "VocabParallel()",
        "Replicated()",
    ]
    with pytest.raises(FrozenInstanceError):
        STYLES[0].axis = 1


# ------------------------------------------------------------------------------------------------------------ training


def loss_of(w, ids, targets, mesh, between):
    """A block of a language model; `between` places the activations between layers, along the sequence's axis."""
    ids = pce.distribute(ids, mesh, data=Shard(0))
    x = pce.embedding(ids, w["embedding"]).redistribute(model=between)
    y = pce.layer_norm(x, w["block.0.norm.scale"], None).redistribute(model=Replicate())
    y = pce.tanh(pce.matmul(y, w["block.0.up.w"]) + w["block.0.up.b"])
    y = pce.matmul(y, w["block.0.down.w"]).redistribute(model=between) + w["block.0.down.b"]
    x = (x + y).redistribute(model=Replicate())
    return pce.cross_entropy(pce.matmul(x, w["embedding"].T) * w["temperature"], targets)


def train(params, mesh, between):
    """The losses and norms of some steps, and the parameters after them."""
    w = shard_parameters(params, mesh, PLAN)
    optimizer = pce.SGD(w.values(), lr=0.05, momentum=0.9, weight_decay=0.01)
    rng = np.random.default_rng(5)
    numbers = []
    for _ in range(3):
        ids = rng.integers(0, 11, (7, 5))
        optimizer.zero_grad()
        loss = loss_of(w, ids[:, :-1], pce.distribute(ids[:, 1:], mesh, data=Shard(0)), mesh, between)
        loss.backward()
        numbers += [loss.item(), pce.clip_grad_norm(w.values(), 0.5)]
        optimizer.step()
        for array in w.values():
            pce.check_replicas(array)
    return numbers, {name: array.full() for name, array in w.items()}


@pytest.mark.parametrize("between", [Replicate(), Shard(1)], ids=["tensor parallel", "sequence parallel"])
def test_training_by_plan_gives_numbers_of_one_process(comm, between):
    params = {name: array.astype(np.float64) for name, array in parameters().items()}
    expected, expected_params = train(params, mesh_of(MPI.COMM_SELF, 1, 1), between)
    results = [train(params, mesh_of(comm, *sizes), between) for sizes in factorizations(comm.size, 2)]
    for numbers, trained in results:
        # Sums of a few hundred terms in another order, in float64.
        np.testing.assert_allclose(numbers, expected, rtol=1e-12)
        for name, array in trained.items():
            np.testing.assert_allclose(array, expected_params[name], rtol=1e-10, atol=1e-13, err_msg=name)


def test_norms_have_partial_gradients_along_sequence_only(square):
    found = {}
    for between in (Replicate(), Shard(1)):
        w = shard_parameters(parameters(), square, PLAN)
        ids = np.arange(30).reshape(6, 5) % 11
        loss_of(w, ids, pce.distribute(ids, square, data=Shard(0)), square, between).backward()
        found[between] = w["block.0.norm.scale"].grad.placements["model"]
    assert found == {Replicate(): Replicate(), Shard(1): Partial("sum")}


# -------------------------------------------------------------------------------------------------------------- styles


def test_first_pattern_that_matches_decides_and_case_counts(square):
    params = {"a.W": np.zeros((2, 2)), "a.w": np.zeros((2, 2))}
    placed = shard_parameters(params, square, {"a.w": Rowwise(), "a.*": Colwise()})
    assert [array.placements["model"] for array in placed.values()] == [Shard(1), Shard(0)]
    # A pattern that earlier ones leave nothing to, such as "all others", is none that matches nothing.
    placed = shard_parameters(params, square, {"a.*": Colwise(), "*": Replicated()})
    assert [array.placements["model"] for array in placed.values()] == [Shard(1), Shard(1)]


def test_patterns_and_parameters_without_match_are_named(square):
    params = parameters()
    styles = {"embeding": VocabParallel(), "block.*": Replicated(), "head.*": Colwise()}
    with pytest.raises(ValueError) as raised:
        shard_parameters(params, square, styles)
    assert str(raised.value) == (
        "patterns that match no parameter: 'embeding', 'head.*'; "
        "parameters that no pattern matches: 'embedding', 'temperature'"
    )
    with pytest.raises(ValueError, match=r"^parameters that no pattern matches: 'w'$"):
        shard_parameters({"w": np.zeros(2)}, square, {})
    with pytest.raises(ValueError, match=r"^patterns that match no parameter: '\*'$"):
        shard_parameters({}, square, {"*": Colwise()})
    assert shard_parameters({}, square, {}) == {}


def test_style_that_fits_nowhere_says_where(comm, square):
    w, integers = {"w": np.zeros((2, 2))}, {"n": np.zeros(2, int)}
    cases = [
        ((w, square, {"w": Colwise}), TypeError, r"styles\['w'\] must be a style .* write Colwise\(\)"),
        ((w, square, {"w": Shard(0)}), TypeError, r"styles\['w'\] must be a style such as Colwise\(\), got Shard\(0\)"),
        ((w, square, [("w", Colwise())]), TypeError, "styles must be a dict of styles by pattern, got list"),
        ((w, square, {0: Colwise()}), TypeError, "the name of a pattern of styles must be a str, got 0"),
        (({0: w["w"]}, square, {"*": Colwise()}), TypeError, "the name of a parameter must be a str, got 0"),
        (([w["w"]], square, {"*": Colwise()}), TypeError, "params must be a dict of arrays by name, got list"),
        ((w, comm, {"w": Colwise()}), TypeError, "mesh must be a Mesh, got Intracomm"),
        ((w, mesh_of(comm, comm.size), {"w": Colwise()}), ValueError, "the mesh has no dim 'model'; its dims are data"),
        (({"s": np.array(1.0)}, square, {"*": Colwise()}), ValueError, r"params\['s'\]: Colwise takes a matrix or a"),
        (({"s": np.array(1.0)}, square, {"*": VocabParallel()}), ValueError, r"params\['s'\]: VocabParallel takes a"),
        (
            (integers, square, {"*": Colwise()}),
            TypeError,
            r"params\['n'\]: only float16, bfloat16, float32 and float64 have a grad",
        ),
        (({"x": object()}, square, {"*": Colwise()}), TypeError, r"params\['x'\] must be an array of numbers"),
    ]
    for arguments, kind, text in cases:
        with pytest.raises(kind, match=text):
            shard_parameters(*arguments)
