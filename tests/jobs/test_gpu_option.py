"""`pytest --gpu`, with the stand-in for CuPy where a GPU's own would be: which tests run, and on what."""

import os
import sys

import pytest

from jobs.launch import complete, launch_source

PYTEST = """
    import sys
    sys.path.insert(0, "tests")
    import pytest
    import strict_cupy
    sys.modules.update(strict_cupy.STAND_INS)
    sys.exit(pytest.main(["--gpu", "--color=no", "-q", "-rs", *sys.argv[1:]]))
    """


def test_gpu_option_runs_gpu_tests_on_every_rank():
    job = launch_source(2, PYTEST, "tests/ranks/test_array_library.py", "tests/ranks/test_loss.py", "-k", "no_rows")
    assert job.returncode == 0, job.stdout
    last = job.stdout.splitlines()[-1]
    assert last.startswith("5 passed, ")
    assert " deselected" in last


def test_gpu_option_skips_tests_of_stand_in():
    job = launch_source(1, PYTEST, "tests/ranks/test_staging.py", "-k", "share_its_gpus_out or used_again")
    assert job.returncode == 0, job.stdout
    assert "about the stand-in for CuPy, or by its means" in job.stdout
    assert job.stdout.splitlines()[-1].startswith("3 skipped")


@pytest.mark.parametrize("name", ["tests/kernels -k anywhere", "tests/ranks/test_accuracy.py -k rounded_after"])
def test_gpu_option_copies_arrays_both_ways(name):
    job = launch_source(1, PYTEST, *name.split())
    assert job.returncode == 0, job.stdout
    assert " passed" in job.stdout
    assert "skipped" not in job.stdout


@pytest.mark.parametrize("command", [["-m", "pytest", "--gpu", "tests/gpu"], ["tests/run.py", "--gpu"]], ids=" ".join)
def test_gpu_option_without_gpu_is_an_error(command):
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = complete([sys.executable, *command], env=hidden)
    assert done.returncode in (2, 4)
    assert "--gpu: CuPy is " in done.stderr
    assert "Traceback" not in done.stderr


def test_gpu_tests_without_option_are_skipped():
    command = [sys.executable, "-m", "pytest", "--color=no", "-q", "-rs", "tests/gpu"]
    done = complete(command)
    assert done.returncode == 0
    assert "needs a GPU, and pytest --gpu" in done.stdout
    assert " passed" not in done.stdout
