"""The examples, as a user starts them."""

import ast
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from jobs.launch import ROOT, job_environment, launch, launch_source

LANGUAGE_MODEL = "examples/language_model.py"
SHARDED_LOSS = "examples/sharded_loss.py"

# A small slice of the standard library, and sizes that 2, 3 and 4 do not divide.
STEPS = 50
SLICE = ["--max-files=21", f"--steps={STEPS}", "--batch=130", "--embed=21", "--hidden=61", "--test-tokens=500"]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The losses of training on the small slice, by number of ranks."""
    folder = tmp_path_factory.mktemp("logs")
    losses = {}
    for ranks in 1, 2, 3, 4:
        job = launch(ranks, LANGUAGE_MODEL, *SLICE, f"--log={folder / str(ranks)}")
        assert job.returncode == 0, job.stderr
        entries = [json.loads(line) for line in (folder / str(ranks)).read_text(encoding="utf-8").splitlines()]
        assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
        losses[ranks] = np.array([entry["loss"] for entry in entries])
    return losses


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_language_model_has_the_same_losses_on_any_number_of_ranks(losses, ranks):
    # On each number of ranks the gradient of the hidden layer is summed in another order, so that the parameters move
    # apart by about one rounding of float32 a step. A batch's loss is a mean, where most of that cancels: 1 ulp was
    # seen in 800 steps. Without the all-reduce of that gradient it is 10,000 ulp after 12.
    np.testing.assert_allclose(losses[ranks], losses[1], rtol=16 * np.finfo(np.float32).eps, atol=0)


def test_the_language_model_learns(losses):
    assert losses[1][-10:].mean() < losses[1][:10].mean() - 0.5


def test_the_backward_pass_of_the_language_model_is_the_derivative_of_its_loss():
    # In float64, and along a random direction for each parameter: central differences are right to 1e-9 or so there.
    job = launch_source(
        3,
        """
        from argparse import Namespace

        from mpi4py import MPI
        import numpy as np

        from examples.language_model import Model
        import pce_mpi

        comm = MPI.COMM_WORLD
        model = Model(comm, np.zeros(23), Namespace(context=3, embed=5, hidden=7, batch=11, seed=0))
        rng = np.random.default_rng(1)
        whole = {"embedding": (23, 5), "w": (15, 7), "b": (7,), "u": (7, 23), "c": (23,)}
        parameters = {name: rng.standard_normal(shape) for name, shape in whole.items()}
        directions = {name: rng.standard_normal(shape) for name, shape in whole.items()}
        for sharded in parameters, directions:
            sharded["u"], sharded["c"] = sharded["u"][:, model.classes].copy(), sharded["c"][model.classes].copy()
        model.logits, model.du = model.logits.astype(np.float64), model.du.astype(np.float64)
        contexts, targets = rng.integers(23, size=(11, 3)), rng.integers(23, size=11)

        def loss(name, step):
            vars(model).update(parameters | {name: parameters[name] + step * directions[name]})
            return float(pce_mpi.softmax_cross_entropy(model.forward(contexts)[2], targets, comm=comm))

        vars(model).update({name: value.copy() for name, value in parameters.items()})
        model.train(contexts, targets, rate=1.0, embedding_rate=1 / len(contexts))
        slopes = {name: np.sum((parameters[name] - vars(model)[name]) * directions[name]) for name in whole}
        for name in whole:
            slope = comm.allreduce(slopes[name]) if name in "uc" else slopes[name]
            difference = (loss(name, 1e-5) - loss(name, -1e-5)) / 2e-5
            assert np.isclose(slope, difference, rtol=1e-7, atol=0), (name, slope, difference)
        """,
    )
    assert job.returncode == 0, job.stderr


def test_the_language_model_runs_without_mpiexec_and_plots_its_losses(tmp_path):
    picture = tmp_path / "losses.png"
    command = [sys.executable, LANGUAGE_MODEL, *SLICE, f"--plot={picture}"]
    job = subprocess.run(command, cwd=ROOT, env=job_environment(1), capture_output=True, text=True, timeout=60)
    assert job.returncode == 0, job.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rank_0_alone_prints_the_result():
    job = launch(3, LANGUAGE_MODEL, *SLICE)
    assert job.returncode == 0, job.stderr
    perplexities = re.findall(r"^(unigram|this) model +[\d.]+ +([\d.]+)$", job.stdout, re.MULTILINE)
    assert [name for name, _ in perplexities] == ["unigram", "this"]
    assert float(perplexities[1][1]) < float(perplexities[0][1])
    assert job.stdout.count("\nraise ValueError(|") == 1
    assert job.stderr.count(f"{STEPS}/{STEPS}") == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_language_model_explains_its_options_once(ranks):
    job = launch(ranks, LANGUAGE_MODEL, "--help")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("usage:") == 1
    assert job.stdout.count("--max-files N") == 2
    assert not job.stderr


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--steps=0", "argument --steps: expected a whole number from 1 up, got '0'"),
        ("--max-files=1", "argument --max-files: expected a whole number from 2 up, got '1'"),
        ("--batch=many", "argument --batch: expected a whole number from 1 up, got 'many'"),
        ("--plot=/no/such/folder/losses.png", "argument --plot: cannot write '/no/such/folder/losses.png'"),
        ("--vocabulary=9", "unrecognized arguments: --vocabulary=9"),
    ],
)
def test_a_bad_argument_is_reported_once(argument, complaint):
    job = launch(3, LANGUAGE_MODEL, argument)
    assert job.returncode != 0
    assert job.stderr.count("error:") == 1
    assert complaint in job.stderr
    assert "Abort" not in job.stderr
    assert not job.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sharded_loss_agrees_with_the_dense_one(ranks):
    job = launch(ranks, SHARDED_LOSS)
    assert job.returncode == 0, job.stderr
    assert re.search(r"loss, sharded +([\d.]+)\nloss, dense +\1\ngradients agree on each rank +True\n", job.stdout)


def test_sharded_loss_prints_what_its_docstring_says():
    docstring = ast.get_docstring(ast.parse((ROOT / SHARDED_LOSS).read_text(encoding="utf-8")))
    shown = [line.removeprefix("    ") for line in docstring.split("prints\n\n")[1].splitlines()]
    assert launch(4, SHARDED_LOSS).stdout.splitlines() == shown
