"""Recordings: the faults that the kit's run names are named from files, and broken files are refused."""

from argparse import Namespace
from itertools import pairwise
import json
from pathlib import Path
import re
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conformance.recorded_faults import FAULTS
from jobs.launch import ROOT, complete, launch
from pce_mpi import dense
from pce_mpi.arrays import dtype_named
from pce_mpi.cli import judge
from pce_mpi.conformance.judging.comparing import Losses, Tolerance
from pce_mpi.conformance.offline import recording_errors, recordings
from pce_mpi.conformance.offline.logprob_differences import PARTS, Differences
from pce_mpi.conformance.offline.recording_errors import Judge
from pce_mpi.conformance.offline.recordings import Recording
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.problem import Problem

ROWS, CLASSES, RANKS = (2, 3), 10, 2
SPLITS = (0, 4, 10)


def write(folder, *, shared, shards=None, **metadata):
    """Write a recording: `shared` has what all ranks have, `shards` what is cut along its last axis."""
    folder.mkdir(exist_ok=True)
    for rank in range(RANKS):
        cut = {name: whole[..., slice(*SPLITS[rank : rank + 2])] for name, whole in (shards or {}).items()}
        tensors = {name: np.array(tensor, order="C") for name, tensor in (shared | cut).items()}
        texts = {"rank": rank, "ranks": RANKS, **metadata}
        save_file(tensors, folder / f"{rank}.safetensors", {name: str(value) for name, value in texts.items()})
    return folder


def rng():
    return np.random.default_rng(0)


def drawn(dtype=np.float32, rows=ROWS):
    logits = (3.0 * rng().standard_normal((*rows, CLASSES))).astype(dtype)
    return logits, rng().integers(0, CLASSES, rows)


def judged(folder):
    judge_ = Judge(Recording(folder))
    list(judge_.run())
    return judge_.judged()


def status(recording, rollout=None):
    return judge.run(Namespace(recording=recording, rollout=rollout), None)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    program = str(Path(__file__).parent / "recorded_faults.py")
    job = launch(RANKS, program, str(folder), env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    assert job.returncode == 0, job.stderr
    return folder


@pytest.mark.parametrize("name", [kind.__name__ for kind, _ in FAULTS])
def test_recorded_fault_has_words_of_run(faults, name):
    said = json.loads((faults / "said.json").read_text())
    assert len(said) >= 10
    first, *_ = judged(faults / name).findings
    assert first.text == said[name]
    assert first.cause, "the fault has a name"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_right_numbers_are_right(tmp_path, dtype, reduction):
    logits, targets = drawn(dtype_named(dtype))
    targets[0, 1] = 7
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(
        logits, targets, reduction=reduction, label_smoothing=0.1, ignore_index=7
    )
    wide = np.float64 if dtype == "float64" else np.float32
    write(
        tmp_path,
        shared={"targets": targets, "loss": np.asarray(loss, wide)},
        shards={"logits": logits, "gradient": gradient.astype(logits.dtype)},
        reduction=reduction,
        label_smoothing=0.1,
        ignore_index=7,
    )
    result = judged(tmp_path)
    assert not result.findings
    assert [each.accuracy.quantity for each in result.measured] == ["loss", "gradient", "gradient at targets"]
    assert all(each.accuracy.error <= 1.0 and not each.wrong for each in result.measured)
    assert status(tmp_path) == 0


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}, {"label_smoothing": 0.125, "logit_scale": 0.75}])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_errors_are_those_of_the_kit(tmp_path, options, reduction):
    logits, targets = drawn(rows=(6,))
    weight = rng().uniform(0.25, 2.0, CLASSES).astype(np.float32)
    problem = Problem(logits, targets, SPLITS, KINDS["loss"], {**options, "weight": weight}, reduction)
    loss = (problem.expected[0] * (1.0 + 3e-6)).astype(np.float32)
    write(tmp_path, shared={"targets": targets, "loss": loss}, shards={"logits": logits, "weight": weight}, **options)
    ((measured, *_), _) = judged(tmp_path)
    (kits,) = Losses.of(problem, [loss, loss], Tolerance()).accuracies()
    got = measured.accuracy
    assert (got.quantity, got.dtype, got.where) == (kits.quantity, kits.dtype, kits.where)
    assert [got.error, got.best, got.allowed] == pytest.approx([kits.error, kits.best, kits.allowed], rel=1e-3)


@pytest.mark.parametrize(
    ("of_rank_1", "words"),
    [
        (lambda loss: np.nextafter(loss, np.float32(9.0)), r"the loss is \S+ on rank 0 and \S+ on rank 1"),
        (lambda loss: loss + np.float32(1.0), r"loss is \S+ where \S+ is right \(rank 1\): \S+ ulp of float32 off, "),
        (lambda loss: np.float32(np.inf), r"loss is inf where \S+ is right \(rank 1\)$"),
    ],
    ids=["unequal", "wrong", "infinite"],
)
def test_mean_of_one_rank_has_words_of_kit(tmp_path, monkeypatch, of_rank_1, words):
    """One number says nothing of some rows: no cause is looked for."""
    monkeypatch.setattr(recording_errors, "LOGITS", 100)
    logits, targets = drawn(rows=(30,))
    loss = np.asarray(dense.softmax_cross_entropy(logits, targets), np.float32)
    write(tmp_path, shared={"targets": targets, "loss": loss}, shards={"logits": logits})
    shard = {"targets": targets, "loss": of_rank_1(loss), "logits": np.ascontiguousarray(logits[:, SPLITS[1] :])}
    save_file(
        {name: np.asarray(each) for name, each in shard.items()},
        tmp_path / "1.safetensors",
        {"rank": "1", "ranks": "2"},
    )
    (finding,) = judged(tmp_path).findings
    assert re.match(words, finding.text), finding.text


def test_wrong_rows_among_many_are_named(tmp_path, monkeypatch):
    """The rows are read in many pieces, and only some are compared with known faults."""
    monkeypatch.setattr(recording_errors, "LOGITS", 200)
    monkeypatch.setattr(recordings, "LOGITS", 70)
    logits, targets = drawn(rows=(30, 10))
    log_prob = dense.class_statistics(logits, targets).log_prob.astype(np.float32)
    log_prob[17:, :] *= np.float32(1.5)
    write(tmp_path, shared={"targets": targets, "log_prob": log_prob}, shards={"logits": logits})
    result = judged(tmp_path)
    assert result.measured[0].wrong == 130
    assert "1.5 times what is due" in result.findings[0].text
    where = result.measured[0].accuracy.where
    assert where in result.findings[0].text and 17 <= int(where.strip("row ()").split(",")[0]) < 30


def test_row_without_axes_is_judged(tmp_path):
    """And the difference to a rollout that is infinite."""
    logits, targets = drawn(rows=())
    log_prob = dense.class_statistics(logits, targets).log_prob.astype(np.float32)
    write(tmp_path / "a", shared={"targets": targets, "log_prob": log_prob}, shards={"logits": logits})
    write(tmp_path / "b", shared={"targets": targets, "log_prob": log_prob - np.inf})
    assert status(tmp_path / "a", tmp_path / "b") == 0


def test_options_that_exclude_each_other_are_refused(tmp_path, capsys):
    logits, _ = drawn()
    shards = {"logits": logits, "targets": np.abs(logits)}
    write(tmp_path, shared={"loss": np.zeros(ROWS)}, shards=shards, ignore_index=3)
    assert status(tmp_path) == 2
    assert f"error: {tmp_path}: probability targets" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["log_prob", "entropy"])
@pytest.mark.parametrize("options", [{}, {"reduction": "mean"}], ids=["", "mean of a loss"])
def test_gradient_of_numbers_of_rows_is_not_divided(tmp_path, name, options):
    """It is that of their sum, as the recorder has it; a mean is one of losses."""
    logits, targets = drawn()
    statistics = dense.class_statistics(logits, targets)
    gradient = dense.class_statistics_backward(logits, targets, **{name: np.ones(ROWS)})
    shared = {"targets": targets, name: getattr(statistics, name).astype(np.float32)}
    folder = write(
        tmp_path / "x", shared=shared, shards={"logits": logits, "gradient": gradient.astype(np.float32)}, **options
    )
    assert status(folder) == 0


def test_gradient_alone_is_that_of_a_sum(tmp_path):
    logits, targets = drawn()
    _, gradient = dense.softmax_cross_entropy_value_and_grad(logits, targets, reduction="sum")
    shards = {"logits": logits, "gradient": gradient.astype(np.float32)}
    assert status(write(tmp_path, shared={"targets": targets}, shards=shards)) == 0


def test_entropy_alone_needs_no_gradient(tmp_path, capsys):
    logits, targets = drawn()
    entropy = dense.class_statistics(logits).entropy.astype(np.float32)
    entropy[1, 2] += 1.0
    write(tmp_path, shared={"targets": targets, "entropy": entropy}, shards={"logits": logits})
    assert status(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed and "row (1, 2)" in printed and printed.endswith("wrong\n")


def test_head_that_rounds_its_logits_is_named(tmp_path):
    hidden = rng().standard_normal((*ROWS, 33)).astype(ml_dtypes.bfloat16)
    w, targets = rng().standard_normal((33, CLASSES)).astype(ml_dtypes.bfloat16), drawn()[1]
    product = hidden.astype(np.float32) @ w.astype(np.float32)
    for name, logits in (("float32", product), ("bfloat16", product.astype(ml_dtypes.bfloat16))):
        log_prob = dense.class_statistics(logits, targets).log_prob.astype(np.float32)
        shared = {"hidden": hidden, "targets": targets, "log_prob": log_prob}
        texts = [each.text for each in judged(write(tmp_path / name, shared=shared, shards={"w": w})).findings]
        assert [text.partition(" (")[0] for text in texts] == (
            [] if name == "float32" else ["the logits are rounded to bfloat16 before the softmax"]
        )
        folder = write(tmp_path / f"{name} declared", shared=shared, shards={"w": w}, logits_dtype="bfloat16")
        texts = [each.text for each in judged(folder).findings]
        assert [text.partition(" (")[0] for text in texts] == (
            [] if name == "bfloat16" else ["the logits are rounded to float32, not to bfloat16, before the softmax"]
        )


def test_only_wrong_rows_of_products_are_named(tmp_path):
    """One whose loss is small has a larger error in its own ulps."""
    hidden, w = (30.0 * rng().standard_normal((*ROWS, 64))).astype(np.float32), rng().standard_normal((64, CLASSES))
    w = w.astype(np.float32)
    logits = hidden @ w
    targets = logits.argmax(axis=-1)
    loss = dense.softmax_cross_entropy(logits, targets, reduction="none")
    loss[1, 0] += 0.5
    write(tmp_path, shared={"hidden": hidden, "targets": targets, "loss": loss.astype(np.float32)}, shards={"w": w})
    result = judged(tmp_path)
    (text,) = [each.text for each in result.findings]
    assert result.measured[0].wrong == 1 and "row (1, 0): " in text
    assert f"{result.measured[0].accuracy.error:.3g} ulp" in text


def test_differences_add_up_and_find_parts(tmp_path):
    """A rollout with a head in bfloat16, at temperature 0.5, without two padded classes, of the classes of top-p."""
    logits, targets = drawn(rows=(40,))
    targets[:] = logits[:, :8].argmax(axis=-1)
    targets[5] = -100
    first = dense.class_statistics(logits, targets).log_prob.astype(np.float32)
    rounded = logits.astype(ml_dtypes.bfloat16).astype(np.float64)
    steps = [
        dense.class_statistics(x, targets).log_prob for x in (logits, rounded, rounded / 0.5, rounded[:, :8] / 0.5)
    ]
    _, _, mass, _ = dense.nucleus(rounded[:, :8] / 0.5, top_p=0.7)
    kept = np.where(targets < 0, 0.0, -np.log(mass))
    second = steps[-1] + kept + 1e-3 * (targets >= 0)
    write(tmp_path / "a", shared={"targets": targets, "log_prob": first}, shards={"logits": logits})
    told = {"logits_dtype": "bfloat16", "logit_scale": 2.0, "num_classes": 8, "top_p": 0.7}
    write(tmp_path / "b", shared={"targets": targets, "log_prob": second}, **told)
    differences = Differences(Recording(tmp_path / "a"), Recording(tmp_path / "b"))
    list(differences.run())
    due = {"head": steps[1] - steps[0], "temperature": steps[2] - steps[1], "padded classes": steps[3] - steps[2]}
    for name, part in {**due, "kept mass": kept}.items():
        np.testing.assert_allclose(differences.parts[name], part, atol=1e-12, err_msg=name)
        assert np.abs(part).max() > 1e-4, name
    np.testing.assert_allclose(differences.parts["rest"][targets >= 0], 1e-3, atol=1e-6)
    np.testing.assert_allclose(sum(differences.parts[name] for name in PARTS), differences.whole, atol=1e-12)


def test_tokens_outside_of_top_p_are_left_out(tmp_path, capsys):
    """And one whose rollout is infinite for no reason that was recorded."""
    logits, _ = drawn(rows=(40,))
    targets = logits.argmax(axis=-1)
    targets[[3, 7]] = logits[[3, 7]].argmin(axis=-1)
    first = dense.class_statistics(logits, targets).log_prob
    _, _, mass, _ = dense.nucleus(logits.astype(np.float64), top_p=0.7)
    second = first - np.log(mass)
    second[[3, 7, 9]] = -np.inf
    write(tmp_path / "a", shared={"targets": targets, "log_prob": first}, shards={"logits": logits})
    write(tmp_path / "b", shared={"targets": targets, "log_prob": second}, top_p=0.7)
    assert status(tmp_path / "a", tmp_path / "b") == 0
    printed = capsys.readouterr().out
    assert "2 tokens are outside what top-p 0.7 keeps: the rollout gives them probability 0 (row 3, row 7)" in printed
    assert "1 token is of a difference that is not finite, and nothing that was recorded tells why (row 9)" in printed
    assert (
        "log_prob of 37 tokens" in printed and "inf" not in printed.partition("log_prob of 37")[2].partition("part ")[2]
    )


def test_table_has_ten_worst_tokens(tmp_path, capsys):
    logits, targets = drawn(rows=(40,))
    first = dense.class_statistics(logits, targets).log_prob.astype(np.float32)
    second = first + np.linspace(0.0, 1.0, 40, dtype=np.float32)
    write(tmp_path / "a", shared={"targets": targets, "log_prob": first}, shards={"logits": logits})
    write(tmp_path / "b", shared={"targets": targets, "log_prob": second}, logits_dtype="float64")
    assert status(tmp_path / "a", tmp_path / "b") == 0
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines()[-10:]] == [str(row) for row in range(39, 29, -1)]
    assert "the head's part is in the rest" in printed


def test_worst_tokens_are_those_of_largest_difference(tmp_path, capsys):
    """A temperature explains most of them; the table of parts says where the largest rest is."""
    logits, targets = drawn(rows=(40,))
    first = dense.class_statistics(logits, targets).log_prob
    second = dense.class_statistics(2.0 * logits, targets).log_prob
    quiet = int(np.abs(second - first).argmin())
    second[quiet] += 1e-3
    write(tmp_path / "a", shared={"targets": targets, "log_prob": first}, shards={"logits": logits})
    write(tmp_path / "b", shared={"targets": targets, "log_prob": second}, logit_scale=2.0)
    status(tmp_path / "a", tmp_path / "b")
    printed = capsys.readouterr().out.splitlines()
    largest = np.argsort(-np.abs(second - first))[:10]
    assert [line.split()[1] for line in printed[-10:]] == [str(row) for row in largest]
    (rest,) = [line for line in printed if line.startswith("rest")]
    assert rest.endswith(f"row {quiet}") and str(quiet) not in map(str, largest)


@pytest.mark.parametrize("one, other", [({}, {"ignore_index": -100}), ({"ignore_index": -100}, {})])
def test_rollout_may_say_the_default(tmp_path, one, other):
    logits, targets = drawn()
    log_prob = dense.class_statistics(logits, targets).log_prob
    write(tmp_path / "a", shared={"targets": targets, "log_prob": log_prob}, shards={"logits": logits}, **one)
    write(tmp_path / "b", shared={"targets": targets, "log_prob": log_prob}, **other)
    assert status(tmp_path / "a", tmp_path / "b") == 0


@pytest.mark.parametrize("name", ["loss", "log_prob", "entropy"])
@pytest.mark.parametrize("temperature, declared", [(0.7, {}), (1.3, {}), (4.0, {}), (0.5, {"logit_scale": 0.75})])
def test_undeclared_temperature_is_named(tmp_path, name, temperature, declared):
    logits, targets = drawn()
    scaled = declared.get("logit_scale", 1.0) / temperature * logits.astype(np.float64)
    found = dense.class_statistics(scaled, targets)
    numbers = -found.log_prob if name == "loss" else getattr(found, name)
    shared = {"targets": targets, name: numbers.astype(np.float32)}
    write(tmp_path, shared=shared, shards={"logits": logits}, **declared)
    (finding,) = judged(tmp_path).findings
    meant = declared.get("logit_scale", 1.0) / temperature
    said = f"divided by a temperature of {temperature:.4g} more: where that is meant, record logit_scale={meant:.6g} ("
    assert said in finding.text


def log_softmax(logits):
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


# The logits that a rank gives that has the classes `mine`.
OF_ROWS = {
    "the logits were divided by a temperature of 0.7 more": lambda logits, at, mine: (
        -log_softmax(logits / np.float64(0.7))[at]
    ),
    "the logits are rounded to bfloat16 before the softmax": lambda logits, at, mine: (
        -log_softmax(logits.astype(ml_dtypes.bfloat16))[at]
    ),
    "the loss is wrong in rows that count: 1.5 times what is due": lambda logits, at, mine: (
        -1.5 * log_softmax(logits)[at]
    ),
    "label smoothing is spread over the {} local classes, not over all {}": lambda logits, at, mine: (
        -(0.875 * log_softmax(logits)[at] + 0.125 * log_softmax(logits)[:, mine].mean(axis=-1))
    ),
}


@pytest.mark.parametrize("classes", [1_000, 50_000, 262_208])
@pytest.mark.parametrize("said", OF_ROWS)
def test_names_do_not_depend_on_vocabulary(tmp_path, classes, said):
    """Rows of the largest ones alone have as many logits as a piece; a third of the rows is ignored."""
    logits = (3.0 * rng().standard_normal((15, classes))).astype(np.float32)
    targets = rng().integers(0, classes, 15)
    at = np.arange(15), targets.copy()
    targets[::3] = -100
    options = {"label_smoothing": "0.125"} if "smoothing" in said else {}
    half = classes // 2
    for rank, mine in enumerate((slice(half), slice(half, None))):
        loss = np.where(targets < 0, 0.0, OF_ROWS[said](logits, at, mine)).astype(np.float32)
        tensors = {"logits": logits[:, mine].copy(), "targets": targets, "loss": loss}
        save_file(tensors, tmp_path / f"{rank}.safetensors", {"rank": str(rank), "ranks": "2", **options})
    result = judged(tmp_path)
    assert result.measured[0].wrong == 10
    assert said.format(half, classes) in result.findings[0].text


@pytest.mark.parametrize("name", ["loss", "log_prob", "entropy"])
@pytest.mark.parametrize(
    ("done", "declared", "said"),
    [
        ({"softcap": 8.0}, {}, "the logits had a softcap of 8: where that is meant, record softcap=8"),
        ({"softcap": 50.0, "logit_scale": 2.0}, {"logit_scale": 2.0}, "the logits had a softcap of 50: where that is"),
        ({}, {"softcap": 8.0}, "the softcap of 8 is not applied"),
        ({"twice": 8.0}, {"softcap": 8.0}, "the softcap of 8 is applied twice"),
        ({}, {"num_classes": 8}, "the 2 columns of padding count, which num_classes leaves out"),
    ],
)
def test_option_left_out_or_added_is_named(tmp_path, name, done, declared, said):
    logits, _ = drawn(rows=(20,))
    targets = rng().integers(0, 8, 20)
    targets[::3] = -100
    twice = done.get("twice")
    x = logits.astype(np.float64) if twice is None else twice * np.tanh(logits / twice)
    found = dense.class_statistics(x, targets, **({"softcap": twice} if twice else done))
    numbers = -found.log_prob if name == "loss" else getattr(found, name)
    shared = {"targets": targets, name: numbers.astype(np.float32)}
    write(tmp_path, shared=shared, shards={"logits": logits}, **declared)
    (finding,) = judged(tmp_path).findings
    assert said in finding.text


MISREAD = {
    "the class numbers are cut to uint8": lambda targets: targets.astype(np.uint8),
    "the class numbers are cut to uint16": lambda targets: targets.astype(np.uint16),
    "the class numbers are rounded to bfloat16": lambda targets: targets.astype(ml_dtypes.bfloat16),
    "the class numbers are one too large": lambda targets: targets + 1,
    "each target is that of the next row": lambda targets: np.roll(targets, -1),
    "each target is that of the previous row": lambda targets: np.roll(targets, 1),
    "the shards are those of the ranks in reverse order": lambda targets: (targets + 50_000) % 100_000,
}


@pytest.mark.parametrize("name", ["loss", "log_prob"])
@pytest.mark.parametrize("said", MISREAD)
def test_misread_targets_are_named(tmp_path, name, said):
    logits = (3.0 * rng().standard_normal((12, 100_000))).astype(np.float32)
    targets = rng().integers(66_000, 99_000, 12)
    read = MISREAD[said](targets).astype(np.int64)
    targets[::3] = -100
    read = MISREAD[said](targets).astype(np.int64) if "row" in said else np.where(targets < 0, -100, read)
    read[[0, -1]] = 7  # whatever stands before or after the rows
    log_prob = dense.class_statistics(logits, read).log_prob.astype(np.float32)
    for rank, mine in enumerate((slice(50_000), slice(50_000, None))):
        tensors = {
            "logits": logits[:, mine].copy(),
            "targets": targets,
            name: -log_prob if name == "loss" else log_prob,
        }
        save_file(tensors, tmp_path / f"{rank}.safetensors", {"rank": str(rank), "ranks": "2"})
    (finding,) = judged(tmp_path).findings
    assert finding.text.startswith(f"{said} ({'loss' if name == 'loss' else 'log-probability'} is ")


@pytest.mark.parametrize(
    ("temperature", "top_p", "told", "said"),
    [
        (0.7, 0.9, {}, "a temperature of 0.7 and top-p 0.9 would explain the rest: "),
        (0.7, 1.0, {}, "a temperature of 0.7 would explain the rest: "),
        (1.0, 0.8, {}, "top-p 0.8 would explain the rest: "),
        (0.5, 0.9, {"logit_scale": 2.0}, "top-p 0.9 would explain the rest: "),
        (0.7, 0.9, {"logit_scale": 1 / 0.7, "top_p": 0.9}, ""),
    ],
)
def test_undeclared_sampling_of_rollout_is_told(tmp_path, capsys, temperature, top_p, told, said):
    logits = (3.0 * rng().standard_normal((60, 100))).astype(np.float32)
    ids, offsets, mass, _ = dense.nucleus(logits / temperature, top_p=top_p)
    targets = np.array([rng().choice(ids[start:stop]) for start, stop in pairwise(offsets)])
    first = dense.class_statistics(logits, targets).log_prob
    second = dense.class_statistics(logits, targets, logit_scale=1.0 / temperature).log_prob - np.log(mass)
    targets[::7], first[::7], second[::7] = -100, 0.0, 0.0
    shared = {"logits": logits, "targets": targets, "log_prob": first.astype(np.float32)}
    save_file(shared, tmp_path / "a.safetensors", {"rank": "0", "ranks": "1"})
    texts = {name: str(value) for name, value in {"rank": 0, "ranks": 1, **told}.items()}
    rollout = {"targets": targets, "log_prob": second.astype(np.float32)}
    save_file(rollout, tmp_path / "b.safetensors", texts)
    assert status(tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert bool(said) == ("explain" in printed) and said in printed
    if "temperature" in said:
        scale, _, limit = printed.partition("record logit_scale=")[2].partition(" with the rollout")[0].partition(", ")
        assert float(scale) == pytest.approx(1.0 / temperature, rel=1e-4) and limit == f"top_p={top_p}" * (top_p < 1)


def test_rest_of_another_model_is_told_so(tmp_path, capsys):
    logits, targets = drawn(rows=(40,))
    first = dense.class_statistics(logits, targets).log_prob.astype(np.float32)
    second = first + 0.3 * rng().standard_normal(40).astype(np.float32)
    write(tmp_path / "a", shared={"targets": targets, "log_prob": first}, shards={"logits": logits})
    write(tmp_path / "b", shared={"targets": targets, "log_prob": second})
    assert status(tmp_path / "a", tmp_path / "b") == 0
    assert "no temperature and no top-p explains it" in capsys.readouterr().out


def test_other_faults_are_no_temperature(tmp_path):
    logits, targets = drawn(rows=(40,))
    right = dense.class_statistics(logits, targets)
    noise = 1e-2 * rng().standard_normal(40)
    for name, numbers in {
        "noise": right.log_prob + noise,
        "times": 1.1 * right.log_prob,
        "off": right.log_prob - 0.5,
        "softcap": dense.class_statistics(8.0 * np.tanh(logits / 8.0), targets).log_prob,
        "rounded": dense.class_statistics(logits.astype(ml_dtypes.bfloat16), targets).log_prob,
    }.items():
        shared = {"targets": targets, "log_prob": numbers.astype(np.float32)}
        text = judged(write(tmp_path / name, shared=shared, shards={"logits": logits})).findings[0].text
        assert "a temperature" not in text, name


def test_equal_logits_have_no_temperature(tmp_path):
    targets = drawn(rows=(40,))[1]
    write(tmp_path, shared={"targets": targets, "loss": np.full(40, 7.0)}, shards={"logits": np.zeros((40, CLASSES))})
    (finding,) = judged(tmp_path).findings
    assert "a temperature" not in finding.text


def test_naming_allows_what_the_judge_allows(tmp_path):
    """Logits halfway between two numbers of bfloat16: a head may round them to either, and one row is wrong besides."""
    w = np.ones((2, CLASSES), np.float32)
    w[1] = np.where(np.arange(CLASSES) % 3 == 0, 2.0**-8, 0.0)
    targets = np.zeros(ROWS, np.int64)
    other = np.broadcast_to(np.where(np.arange(CLASSES) % 3 == 0, 1.0 + 2.0**-7, 1.0), (*ROWS, CLASSES))
    log_prob = dense.class_statistics(other, targets).log_prob
    shared = {"hidden": np.ones((*ROWS, 2), np.float32), "targets": targets}
    for name, off, said in (("right", 0.0, []), ("one row", 0.5, ["(1, 0)"])):
        log_prob[1, 0] += off
        shared["log_prob"] = log_prob.astype(np.float32)
        folder = write(tmp_path / name, shared=shared, shards={"w": w}, logits_dtype="bfloat16")
        texts = [each.text for each in judged(folder).findings]
        assert len(texts) == len(said)
        assert all("wrong in row (1, 0)" in text for text in texts), texts


def good(folder):
    logits, targets = drawn()
    log_prob = dense.class_statistics(logits, targets).log_prob
    return write(folder, shared={"targets": targets, "log_prob": log_prob}, shards={"logits": logits})


def changed(folder, rank, change):
    path = folder / f"{rank}.safetensors"
    tensors, metadata = load_file(path), {"rank": str(rank), "ranks": str(RANKS)}
    change(tensors, metadata)
    save_file(tensors, path, metadata)


MALFORMED = {
    "unknown metadata 'temprature'": lambda t, m: m.update(temprature="1"),
    "the metadata top_k = 'many': invalid literal": lambda t, m: m.update(top_k="many"),
    "the metadata reduction = 'max': expected mean, sum or none": lambda t, m: m.update(reduction="max"),
    "its metadata have no rank": lambda t, m: m.pop("rank"),
    "it is rank 0 of 2, as another file": lambda t, m: m.update(rank="0"),
    "it is rank 2 of 2": lambda t, m: m.update(rank="2"),
    "it is one of 3 ranks, and there are 2 files": lambda t, m: m.update(ranks="3"),
    "the options of rank 0 are {}, and those of rank 1 {'z_loss': 0.5}": lambda t, m: m.update(z_loss="0.5"),
    "unknown tensors 'code'": lambda t, m: t.update(code=t["targets"]),
    "it has no targets": lambda t, m: t.pop("targets"),
    "it has logits and w, where logits, or hidden and w, are expected": lambda t, m: t.update(w=t["logits"]),
    "ranks 0 and 1 have other tensors": lambda t, m: t.pop("log_prob"),
    "log_prob has dtype int64": lambda t, m: t.update(log_prob=t["targets"]),
    "log_prob has shape (3,) on rank 1, where (2, 3) is due": lambda t, m: t.update(log_prob=t["log_prob"][0]),
    "logits has shape (3, 6) on rank 1": lambda t, m: t.update(logits=t["logits"][0]),
    "logits has dtype float32 on rank 0, float64 on 1": lambda t, m: t.update(logits=t["logits"].astype(np.float64)),
    "the targets of rank 1 differ from those of rank 0 in row 4": lambda t, m: np.put(t["targets"], 4, 99),
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_recording_is_one_error(tmp_path, capsys, text):
    changed(good(tmp_path / "dump"), 1, MALFORMED[text])
    assert status(tmp_path / "dump") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {tmp_path / 'dump'}") and printed.err.count("\n") == 1
    assert text in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"label_smoothing": 2.0}, "label_smoothing must be in [0, 1], got 2.0"),
        ({"num_classes": 11}, "num_classes = 11, and the shards have 10 classes"),
        ({"num_classes": 1}, "is outside [0, 1)"),
        ({"top_p": 0.9}, "top_p is an option of a rollout"),
        ({"logits_dtype": "float16"}, "logits_dtype is float16, and the logits have dtype float32"),
    ],
)
def test_wrong_option_is_refused(tmp_path, capsys, options, text):
    logits, targets = drawn()
    log_prob = dense.class_statistics(logits, targets).log_prob
    write(tmp_path, shared={"targets": targets, "log_prob": log_prob}, shards={"logits": logits}, **options)
    assert status(tmp_path) == 2
    assert text in capsys.readouterr().err


def test_broken_bytes_are_refused(tmp_path, capsys):
    path = good(tmp_path / "dump") / "1.safetensors"
    whole = path.read_bytes()
    for broken in (
        b"",
        whole[:5],
        whole[:-1],
        whole[:200],
        b"\xff" * 64,
        whole[:9] + b"\0" + whole[10:],
        b"\x80\x04K.",
    ):
        path.write_bytes(broken)
        assert status(tmp_path / "dump") == 2
        error = capsys.readouterr().err
        assert str(path) in error and error.count("\n") == 1


def test_nothing_to_judge_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for path, text in (("empty", "the folder has no file called *.safetensors"), ("missing", "No such file")):
        assert status(tmp_path / path) == 2
        assert text in capsys.readouterr().err
    logits, targets = drawn()
    write(tmp_path / "bare", shared={"targets": targets}, shards={"logits": logits})
    write(tmp_path / "rollout", shared={"targets": targets, "log_prob": np.zeros(ROWS)})
    for path in ("bare", "rollout"):
        assert status(tmp_path / path) == 2
        assert "nothing to judge" in capsys.readouterr().err


def test_rollout_of_other_tokens_is_refused(tmp_path, capsys):
    good(tmp_path / "a")
    shutil.copytree(good(tmp_path / "b"), tmp_path / "c")
    for rank in range(RANKS):
        changed(tmp_path / "c", rank, lambda tensors, metadata: np.put(tensors["targets"], 0, 9))
    assert status(tmp_path / "a", tmp_path / "c") == 2
    assert "its targets are not those of" in capsys.readouterr().err


def test_rollout_option_without_part_is_refused(tmp_path, capsys):
    logits, targets = drawn()
    shared = {"targets": targets, "log_prob": dense.class_statistics(logits, targets).log_prob}
    write(tmp_path / "a", shared=shared, shards={"logits": logits})
    write(tmp_path / "b", shared=shared, softcap=30.0)
    assert status(tmp_path / "a", tmp_path / "b") == 2
    assert "b: softcap = 30.0 is not an option of" in capsys.readouterr().err


def test_loss_of_shape_1_is_a_number(tmp_path):
    logits, targets = drawn()
    loss = dense.softmax_cross_entropy(logits, targets).astype(np.float32)
    write(tmp_path, shared={"targets": targets, "loss": loss.reshape(1)}, shards={"logits": logits})
    assert status(tmp_path) == 0


def test_hidden_without_axes_is_refused(tmp_path, capsys):
    shared = {"targets": np.array(2), "hidden": np.float32(1.0), "loss": np.float32(1.0)}
    write(tmp_path, shared=shared, shards={"w": np.ones(CLASSES, np.float32)})
    assert status(tmp_path) == 2
    assert "0.safetensors: hidden has shape ()" in capsys.readouterr().err


def test_opposite_sign_is_told_in_words_of_files(tmp_path):
    logits, targets = drawn()
    loss = dense.class_statistics(logits, targets).log_prob
    write(tmp_path, shared={"targets": targets, "loss": loss}, shards={"logits": logits})
    assert "a log-probability is recorded as log_prob (" in judged(tmp_path).findings[0].text


def test_judge_shows_progress_and_status(tmp_path):
    good(tmp_path / "dump")
    run = complete([sys.executable, "-m", "pce_mpi", "judge", str(tmp_path / "dump")])
    assert run.returncode == 0 and run.stdout.endswith("right\n") and "judge 1/1" in run.stderr


@pytest.mark.parametrize("scale", ["1e308", "1.7e308", "1e-308", "5e-324"])
def test_temperature_beyond_float64_loses_no_verdict(tmp_path, scale, capsys):
    logits, targets = drawn(np.float64)
    logits /= 8.0 * max(1.0, float(scale))
    right = dense.class_statistics(logits * float(scale), targets)
    for name, numbers in (("noise", right.log_prob + rng().standard_normal(ROWS)), ("zero", np.full(ROWS, -7.0))):
        shared = {"targets": targets, "log_prob": numbers}
        folder = write(tmp_path / name, shared=shared, shards={"logits": logits}, logit_scale=scale)
        assert status(folder) == 1
        assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "logit_scale", "softcap", "top_p", "min_p"])
def test_nan_is_no_option(tmp_path, name, capsys):
    logits, targets = drawn()
    write(tmp_path, shared={"targets": targets, "loss": np.zeros(ROWS)}, shards={"logits": logits}, **{name: "nan"})
    assert status(tmp_path) == 2
    assert f"the metadata {name} = 'nan': a number is due" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [2**64 - 100, 2**63 + 5, 2**63, CLASSES])
def test_large_target_is_no_ignored_row(tmp_path, wrong, capsys):
    logits, targets = drawn()
    shared = {"targets": targets.astype(np.uint64), "log_prob": np.zeros(ROWS)}
    shared["targets"][0, 1] = wrong
    assert status(write(tmp_path, shared=shared, shards={"logits": logits})) == 2
    assert f"targets[0, 1] = {wrong} is outside [0, {CLASSES})" in capsys.readouterr().err
    if wrong > CLASSES:  # a rollout has no logits
        write(tmp_path / "a", shared=shared | {"targets": targets}, shards={"logits": logits})
        assert status(tmp_path / "a", write(tmp_path / "b", shared=shared)) == 2
        assert f"targets[0, 1] = {wrong} is outside [0, {2**63 - 1})" in capsys.readouterr().err
