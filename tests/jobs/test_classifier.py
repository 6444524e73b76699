"""examples/classifier.py, as a user starts it on files."""

import re

import numpy as np
import pytest
from scipy.sparse import csr_matrix, save_npz

from jobs.launch import launch

PROGRAM = "examples/classifier.py"
SIZES = ["--classes=11", "--hidden=9", "--batch=50", "--chunk=17", "--steps=20", "--every=5", "--validation=100"]
SIZES += ["--rate=0.1"]
RESULT = r"^step +(\d+): validation loss (\d+\.\d+), top-1 (\d+\.\d)%, top-5 (\d+\.\d)%$"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Ten classes that follow from the features; the same features dense and sparse."""
    folder = tmp_path_factory.mktemp("data")
    features = np.random.default_rng(0).standard_normal((1000, 14))
    np.save(folder / "x.npy", features)
    save_npz(folder / "x.npz", csr_matrix(features))
    np.save(folder / "y.npy", features[:, :10].argmax(1))
    np.save(folder / "short.npy", np.arange(10))
    return folder


def data_of(folder, features="x.npy"):
    return [f"--features={folder / features}", f"--labels={folder / 'y.npy'}"]


def trained(ranks, folder, *args, features="x.npy"):
    """Return the steps that were validated, their losses, and their accuracies in percent: first, among five."""
    job = launch(ranks, PROGRAM, *data_of(folder, features), *SIZES, *args)
    assert job.returncode == 0, job.stderr
    found = np.array(re.findall(RESULT, job.stdout, re.MULTILINE), np.float64)
    return found[:, 0].astype(int).tolist(), found[:, 1], found[:, 2:]


@pytest.fixture(scope="module")
def alone(files):
    return trained(1, files)


def test_sparse_features_on_three_ranks_learn_alike(files, alone):
    steps, losses, accuracies = trained(3, files, features="x.npz")
    assert steps == alone[0] == [5, 10, 15, 20]
    # The sums of a batch are taken in another order: some units of float32 a step, of which four digits are printed.
    np.testing.assert_allclose(losses, alone[1], rtol=0, atol=2e-4)
    np.testing.assert_allclose(accuracies, alone[2], rtol=0, atol=1.0)  # one row of 100
    assert losses[-1] < losses[0] - 0.2 and accuracies[-1, 1] > accuracies[-1, 0] > 15


def test_run_is_resumed_on_another_number_of_ranks(files, alone, tmp_path):
    steps, losses, _ = trained(2, files, "--stop=10", f"--save={tmp_path / 'half'}")
    assert steps == [5, 10]
    more, more_losses, _ = trained(3, files, f"--resume={tmp_path / 'half'}", f"--plot={tmp_path / 'curves.svg'}")
    assert more == [15, 20]
    np.testing.assert_allclose([*losses, *more_losses], alone[1], rtol=0, atol=2e-4)
    wrong = launch(1, PROGRAM, *SIZES, "--classes=12", f"--resume={tmp_path / 'half'}")
    assert (
        f"has the shape (64, 9), but the one in '{tmp_path / 'half'}' has (14, 9)" in wrong.stderr
        and wrong.returncode == 1
    )
    done = launch(1, PROGRAM, *data_of(files), *SIZES, "--steps=10", f"--resume={tmp_path / 'half'}")
    assert "10 steps are taken already, of 10" in done.stderr and done.returncode == 1
    for text in ("11 classes", "training step", "loss (nats a row)", "training", "validation"):
        assert f"<!-- {text} -->" in (tmp_path / "curves.svg").read_text()


def test_margin_of_cosines_is_learnt_on_any_ranks(files):
    steps, losses, accuracies = trained(1, files, "--margin=0.5")
    assert steps == [5, 10, 15, 20]
    assert losses[-1] < losses[0] - 1 and accuracies[-1, 0] > accuracies[0, 0] + 15
    _, found, _ = trained(3, files, "--margin=0.5")
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-3)  # scaled by 16, sums in another order weigh more
    _, other, _ = trained(1, files, "--margin=0.1")
    assert abs(other - losses).max() > 0.1


def test_data_are_generated_without_files():
    job = launch(2, PROGRAM, *SIZES, "--classes=1000", "--steps=2")
    assert job.returncode == 0, job.stderr
    assert "19,900 rows, 1,000 classes; rank 0 of 2 holds" in job.stdout and re.search(RESULT, job.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("labels", "sizes", "said"),
    [
        ("short.npy", [], "got (1000, 14) of float64, and (10,) of int64"),
        ("x.npy", [], "one whole number a row"),
        ("x.npz", [], "arrays are saved as .npy, by np.save"),
        ("y.npy", ["--validation=1000"], "1000 rows leave none to train on beside 1000 for validation"),
        ("y.npy", ["--classes=5"], "is outside [0, 5): see --classes"),
        ("y.npy", [f"--resume={__file__}"], "is not a safetensors file"),
    ],
)
def test_wrong_file_ends_job_with_reason(files, labels, sizes, said):
    job = launch(2, PROGRAM, f"--features={files / 'x.npy'}", f"--labels={files / labels}", *SIZES, *sizes)
    assert job.returncode == 1
    assert job.stderr.count("classifier.py: error: ") == 1 and said in job.stderr and "Traceback" not in job.stderr
