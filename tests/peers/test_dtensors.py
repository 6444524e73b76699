"""DTensors of torch as logits: results have the bits of whole logits and fit the mesh, errors are on every rank."""

import re

import pytest

from jobs.launch import ROOT
from peers.on_mesh_ranks import layouts, products
from peers.test_torch_groups import everyones, on_ranks

PROGRAM = ROOT / "tests" / "peers" / "on_mesh_ranks.py"
SIZES = [1, 2, 3, 4]
CHECKS = [(size, name) for size in SIZES for name in (*layouts(size), *products(size), "autograd")]
LEAVE_OUT = "TypeError: logits is a DTensor, whose mesh and placements say {}: leave it out"
# The error, of all ranks or of the last alone.
REFUSED = {
    "Partial": (
        r"ValueError: logits must be Shard or Replicate .*, got Partial\(sum\): take logits\.redistribute\(",
        "all",
    ),
    "Partial avg": (r"ValueError: logits must be Shard or Replicate .*, got Partial\(avg\): take ", "all"),
    "strided": (r"ValueError: logits must be Shard or Replicate .*, got _StridedShard\(dim=1, sf=2\): take ", "all"),
    "comm": (LEAVE_OUT.format("comm"), "all"),
    "batch_comm": (LEAVE_OUT.format("batch_comm"), "all"),
    "class_start": (LEAVE_OUT.format("class_start"), "all"),
    "num_classes": (LEAVE_OUT.format("num_classes"), "all"),
    "comm on one rank": (LEAVE_OUT.format("comm"), "last"),
    "local targets": (r"ValueError: targets must have the global shape \(6,\), got \(5,\): ", "last"),
    "targets of classes": (
        r"ValueError: targets must have the placements \[Replicate\(\).*, got \[Shard\(dim=0\)",
        "all",
    ),
    "local weight": (r"ValueError: weight must have the global shape \(13,\), got \(12,\): ", "last"),
    "teacher": (r"ValueError: teacher must have the placements .*Shard\(dim=1\)\], .*, got \[Shard\(dim=0\)", "all"),
    "target out of range": (r"IndexError: targets\[\d\] = 13 is outside \[0, 13\)", "last"),
    "axis": ("ValueError: axis 2 is out of bounds", "all"),
    "out": (r"ValueError: out must have the placements .*Shard\(dim=1\)\], .*, got no DTensor but a Tensor", "all"),
    "requires grad": (
        r"TypeError: logits .*: it requires a gradient, .* within a torch\.autograd\.Function, as",
        "last",
    ),
    "other cuts": (r"ValueError: logits has \(6, 13\) of \(6, \d+\) on this rank, where torch\.chunk cuts ", "some"),
    "features of hidden": (
        r"ValueError: over each dim of the mesh either rows of hidden .* and no features, got",
        "all",
    ),
    "features of w": ("ValueError: over each dim of the mesh either rows .*: redistribute one of them", "all"),
    "rows where classes are": (r"ValueError: over each dim .*, got hidden \[.*Shard\(dim=0\)\] and w \[.*Shard", "all"),
    "product": (r"ValueError: hidden must be \(\.\.\., features\) .*, got \(6, 13\), \(12, 6\)", "all"),
    "upstream of linear": (r"ValueError: log_prob must have the global shape \(6,\), got \(5,\): ", "last"),
    # Nothing is sent, so that each rank raises by itself.
    "dloss": (r"ValueError: dloss must have the placements \[Replicate\(\).*, got \[Shard\(dim=0\)", ""),
    "falling ranks": ("ValueError: logits has a mesh on which ranks fall, which torch takes in two orders", ""),
    "plain logits": ("TypeError: targets cannot be taken as an array: a DTensor of torch may have", ""),
    "other option": (r"TypeError: softmax_cross_entropy\(\) got an unexpected keyword argument 'temperature'", ""),
}


@pytest.mark.parametrize(("size", "name"), CHECKS)
def test_results_of_dtensors_have_bits_of_whole_logits(size, name):
    assert [rank[name] for rank in on_ranks(size, PROGRAM)] == [""] * size


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("name", REFUSED)
def test_dtensor_is_refused_in_words_on_every_rank(size, name):
    (text, who), (kind, said) = REFUSED[name], everyones(size, f"refused: {name}", PROGRAM)
    assert re.match(text, f"{kind}: {said}")
    ranks = {"all": ", ".join(map(str, range(size))), "last": str(size - 1)}.get(who)
    assert ranks is None or re.search(rf"\(ranks? {ranks} along (dp, )?tp\)", said)


@pytest.mark.parametrize("size", SIZES[1:])
def test_upstream_of_one_rank_is_refused_on_all(size):  # over the classes, and then over the rows
    said = [rank["refused: dtype of upstream"] for rank in on_ranks(size, PROGRAM)]
    text = f"log_prob must be real numbers, got bool (rank {size - 1} along tp)"
    assert [(kind, each.startswith(text)) for kind, each in said] == [("TypeError", True)] * size


@pytest.mark.parametrize("size", SIZES[1:])
def test_shards_of_unlike_shapes_are_refused(size):
    kind, said = everyones(size, "refused: unlike shards", PROGRAM)
    assert kind == "CollectiveError"
    assert said.startswith("ranks disagree on shape: (6, ")


@pytest.mark.parametrize("size", SIZES)
def test_mesh_of_call_that_was_left_is_unusable(size):
    text = "this process group is not usable any more: softmax_cross_entropy was left by KeyboardInterrupt"
    assert everyones(size, "after Ctrl-C", PROGRAM) == ["CollectiveTimeout", text]


@pytest.mark.parametrize("size", SIZES)
def test_group_is_usable_after_refusals(size):
    assert everyones(size, "refused: usable", PROGRAM) == ["nothing", "True"]
