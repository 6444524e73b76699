"""A process group of torch as `comm`, without MPI: bits of one process, errors on every rank, and no wait for ever.

Tensors of torch come out of calls in which all arrays are tensors.
"""

import ast
from concurrent.futures import ThreadPoolExecutor
from functools import cache
import json
import os
import re
import sys
import tempfile
import textwrap

import numpy as np
import pytest
import torch

from jobs.launch import ROOT, complete, job_environment, launch_source
import pce_mpi as pce
from pce_mpi.arrays import as_array
from peers.on_gloo_ranks import CLASSES, ROWS, bits, problem, sharded, shared

PROGRAM = ROOT / "tests" / "peers" / "on_gloo_ranks.py"
SIZES = [1, 2, 3]


@cache
def on_ranks(size, program=PROGRAM):
    """The results of each rank of a program, by name."""
    environment = job_environment(size)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests"), str(ROOT / "examples"), environment["PYTHONPATH"]]
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:
        commands = [[sys.executable, str(program), str(rank), str(size), folder] for rank in range(size)]
        jobs = list(pool.map(lambda command: complete(command, env=environment), commands))
    assert [job.returncode for job in jobs] == [0] * size, "\n".join(job.stderr for job in jobs)
    return [dict(map(json.loads, job.stdout.splitlines())) for job in jobs]


def everyones(size, name, program=PROGRAM):
    """The one thing that all ranks say."""
    first, *others = (rank[name] for rank in on_ranks(size, program))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("size", SIZES)
def test_gloo_ranks_have_bits_of_one_process(size):
    expected = {name: bits(found) for name, found in shared(None, slice(None)).items()}
    assert {name: everyones(size, name) for name in expected} == expected
    for name, gradient in sharded(None, slice(None)).items():
        for rank, said in enumerate(on_ranks(size)):
            mine = slice(*pce.shard_range(CLASSES, size, rank))
            assert said[name] == bits(gradient[:, mine]), (name, rank)


@pytest.mark.parametrize("size", SIZES)
def test_rows_over_gloo_ranks_give_one_mean(size):
    x, _, targets, _ = problem()
    mean = bits(pce.softmax_cross_entropy(x, targets))
    assert [everyones(size, name) for name in ("rows", "tensors", "usable")] == [mean] * 3


@pytest.mark.parametrize("size", SIZES)
def test_gloo_collectives_are_traced_as_mpi_collectives(size):
    assert everyones(size, "trace") == [
        ["all_gather", "agreement", size, 56],
        ["all_reduce", "payload", size, 40 * ROWS],
    ]


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("error on one rank", "ValueError", r"index targets must have the logits' shape .* \(rank LAST\)"),
        ("disagreement", "CollectiveError", r"ranks disagree on reduction: 'mean' \(ranks? 0.*\), 'sum' \(rank LAST\)"),
        ("other targets", "CollectiveError", r"ranks disagree on the values of targets: .* \(rank LAST\); pass .*"),
        ("same ranks", "ValueError", r"comm and batch_comm are the same ranks: .* \(ranks 0.*, LAST\)"),
    ],
)
def test_error_is_alike_on_all_gloo_ranks(size, name, kind, text):
    found = everyones(size, name)
    assert found[0] == kind
    assert re.fullmatch(text.replace("LAST", str(size - 1)), found[1])


@pytest.mark.parametrize("size", SIZES[1:])
def test_gloo_rank_that_never_arrives_raises_elsewhere(size):
    for rank, said in enumerate(on_ranks(size)[:-1]):
        for kind, text in (said["timeout"], said["afterwards"]):
            assert kind == "CollectiveTimeout"
            where = f"in softmax_cross_entropy: agreement, on rank {rank} of {size}"
            assert text.startswith(f"torch's process group failed, or waited for its timeout, {where}")


@pytest.mark.parametrize("size", SIZES)
def test_forked_child_of_gloo_rank_raises(size):
    kind, text = everyones(size, "forked")
    assert kind == "RuntimeError"
    assert text.startswith("this process was forked from a rank and is no rank: only the rank itself communicates")


@pytest.mark.parametrize("size", SIZES[1:])
def test_group_of_rank_that_left_call_is_unusable(size):
    first, *others = on_ranks(size)
    text = "this process group is not usable any more: softmax_cross_entropy was left by KeyboardInterrupt"
    assert [first["after Ctrl-C"], first["after Ctrl-C again"]] == [["CollectiveTimeout", text]] * 2
    for said in others:
        assert {said[name][0] for name in ("beside one that left", "after Ctrl-C")} == {"CollectiveTimeout"}


# --------------------------------------------------------------------------------------------------------- the examples

IMPORTABLE = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
TRAINS = """
    import sys

    import numpy as np
    from torch import distributed

    import pce_mpi as pce
    import torch
    from torch_loss import CrossEntropy, train

    def logits_that_change(group):
        logits = torch.ones(4, 6, requires_grad=True) * 1.0
        loss = CrossEntropy.apply(logits, torch.zeros(4, dtype=torch.int64), group)
        logits.mul_(0.5)
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)

    def main(group):
        assert logits_that_change(group)
        losses, logits, targets = train(group)
        log_prob = pce.class_statistics(logits, targets, comm=group).log_prob
        np.savez(f"{sys.argv[1]}/{group.rank()}.npz", logits=logits, targets=targets, log_prob=log_prob, losses=losses)

    distributed.init_process_group("gloo")
    main(distributed.group.WORLD)
    distributed.destroy_process_group()
    """
SCORES = """
    import sys

    from mpi4py import MPI
    import numpy as np

    import pce_mpi as pce

    comm = MPI.COMM_WORLD
    shards = [np.load(f"{sys.argv[1]}/{rank}.npz") for rank in range(3)]
    logits = np.concatenate([shard["logits"] for shard in shards], axis=1)
    mine = slice(*pce.shard_range(logits.shape[1], comm.size, comm.rank))
    log_prob = pce.class_statistics(logits[:, mine], shards[0]["targets"], comm=comm).log_prob
    for shard in shards:
        assert shard["log_prob"].tobytes() == log_prob.tobytes()
        assert shard["losses"].tobytes() == shards[0]["losses"].tobytes()
    """


def torchrun(*program, ranks=3):
    """Run a program on ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    job = complete(command, env=job_environment(ranks) | {"PYTHONPATH": IMPORTABLE})
    assert job.returncode == 0, job.stderr
    return job.stdout


@pytest.mark.parametrize(
    ("name", "ranks"), [("torch_loss", 3), ("torch_tensor_parallel", 2), ("torch_tensor_parallel", 3)]
)
def test_torch_example_prints_what_it_says(name, ranks):
    path = f"examples/{name}.py"
    said = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    assert f"    torchrun --nproc-per-node 3 {path}\n" in said
    shown = said.split("prints\n\n")[1].partition("\n\n")[0]
    assert torchrun(path, ranks=ranks).splitlines() == [line.removeprefix("    ") for line in shown.splitlines()]


def test_log_probabilities_under_torchrun_have_bits_of_mpi(tmp_path):
    program = tmp_path / "trains.py"
    program.write_text(textwrap.dedent(TRAINS), encoding="utf-8")
    torchrun(str(program), str(tmp_path))
    job = launch_source(2, SCORES, str(tmp_path))
    assert job.returncode == 0, job.stderr


# ---------------------------------------------------------------------------------------------- tensors in, tensors out

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def calls(x, y, targets, upstream):
    """Results of all functions of plain arrays, by name."""
    options = {"label_smoothing": 0.1, "reduction": "none"}
    loss, residuals = pce.softmax_cross_entropy_forward(x, targets, **options)
    statistics, of_statistics = pce.class_statistics_forward(x, targets)
    divergence, of_divergence = pce.kl_divergence_forward(x, y, reduction="none")
    chosen, of_chosen = pce.take_classes_forward(x, targets[:, None])
    nucleus = pce.nucleus(y, top_p=0.9)
    linear, of_linear = pce.linear_class_statistics_forward(x, y.T, targets % ROWS)
    found = {
        "loss": (pce.softmax_cross_entropy(x, targets), loss),
        "value_and_grad": pce.softmax_cross_entropy_value_and_grad(x, targets),
        "backward": pce.softmax_cross_entropy_backward(upstream, residuals),
        "statistics": statistics,
        "of_statistics": pce.class_statistics_backward(of_statistics, log_prob=1.0, entropy=upstream),
        "divergence": divergence,
        "of_divergence": pce.kl_divergence_backward(upstream, of_divergence),
        "chosen": (chosen, pce.take_classes_backward(chosen, of_chosen)),
        "nucleus": nucleus,
        "support": pce.class_statistics(y, support=nucleus[:2]).entropy,
        "top_k": (*pce.top_k(x, 3), pce.argmax(x)),
        "linear": (*linear, *pce.linear_class_statistics_backward(of_linear, entropy=upstream)),
        "linear loss": pce.linear_cross_entropy_value_and_grad(x, y.T, targets % ROWS),
    }
    return {name: parts if isinstance(parts, tuple) else (parts,) for name, parts in found.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_tensors_are_tensors_with_same_bits(dtype):
    x, y, *others = map(torch.from_numpy, problem())
    tensors = x.to(dtype), y.to(dtype), *others
    expected = calls(*(as_array(each, "") for each in tensors))
    for name, parts in calls(*tensors).items():
        for part, array in zip(parts, expected[name], strict=True):
            assert type(part) is type(array) is type(None) or isinstance(part, torch.Tensor), name
            assert isinstance(array, np.ndarray | None), name
            assert part is None or as_array(part, "").dtype == array.dtype
            assert part is None or as_array(part, "").tobytes() == array.tobytes(), name


def test_one_numpy_array_makes_all_results_numpy_arrays():
    x, _, targets, upstream = problem()
    tensor, whole = torch.from_numpy(x), torch.from_numpy(targets)
    weight = np.ones(CLASSES)
    assert isinstance(pce.softmax_cross_entropy(tensor, targets), np.ndarray)
    assert isinstance(pce.softmax_cross_entropy(tensor, whole, weight=weight), np.ndarray)
    _, residuals = pce.softmax_cross_entropy_forward(tensor, whole, reduction="none")
    assert isinstance(pce.softmax_cross_entropy_backward(1.0, residuals), torch.Tensor)
    assert isinstance(pce.softmax_cross_entropy_backward(upstream, residuals), np.ndarray)
    _, residuals = pce.softmax_cross_entropy_forward(x, whole, reduction="none")
    assert isinstance(pce.softmax_cross_entropy_backward(torch.from_numpy(upstream), residuals), np.ndarray)
