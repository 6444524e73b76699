"""`pytest --gpu`, with the stand-in for CuPy where a GPU's own would be: which tests run, and on what."""

import os
import sys
from types import SimpleNamespace

import pytest

from cupy_on_cpu import hooks
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
    job = launch_source(
        2, PYTEST, "tests/ranks/test_array_library.py", "tests/ranks/test_loss.py", "-k=no_rows", "--ranks=2"
    )
    assert job.returncode == 0, job.stdout
    last = job.stdout.splitlines()[-1]
    assert last.startswith("5 passed, ")
    assert " deselected" in last


def test_gpu_option_skips_tests_of_stand_in():
    job = launch_source(1, PYTEST, "tests/ranks/test_staging.py", "-k", "share_its_gpus_out or used_again")
    assert job.returncode == 0, job.stdout
    assert "about the stand-in for CuPy, or by its means" in job.stdout
    assert job.stdout.splitlines()[-1].startswith("3 skipped, ")


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "tests/kernels -k anywhere"), (2, "tests/ranks/test_accuracy.py -k rounded_after")]
)
def test_gpu_option_copies_arrays_both_ways(ranks, name):
    job = launch_source(ranks, PYTEST, *name.split(), *["--ranks=2"] * (ranks > 1))
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


def test_cupy_on_cpu_without_cupy_is_an_error():
    hidden = "import sys, pytest; sys.modules['cupy_backends'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    done = complete([sys.executable, "-c", hidden, "--cupy-on-cpu", "tests/gpu"])
    assert done.returncode == 4
    assert "--cupy-on-cpu: No module named 'cupy_backends" in done.stderr


def test_moved_function_of_cupy_is_named():
    module = SimpleNamespace(__name__="runtime", __pyx_capi__={})
    with pytest.raises(RuntimeError, match=r"runtime of this CuPy exports no malloc: tests/cupy_on_cpu knows CuPy"):
        hooks.replace(module, type("Runtime", (), {"malloc": lambda size: 0}), {})
    with pytest.raises(RuntimeError, match=r"thrust of this CuPy has no sort"):
        hooks.replace_in_python(SimpleNamespace(__name__="thrust"), type("Thrust", (), {"sort": print}))
    for signature in ("intptr_t (size_t, int, int __pyx_skip_dispatch)", "cudaExtent (size_t)"):
        with pytest.raises(RuntimeError, match=r"malloc of this CuPy is .*, and not of 1 arguments"):
            hooks.c_function(signature, "malloc", lambda size: 0)


def test_gpu_tests_without_option_are_skipped():
    command = [sys.executable, "-m", "pytest", "--color=no", "-q", "-rs", "tests/gpu"]
    done = complete(command)
    assert done.returncode == 0
    assert "needs a GPU, and pytest --gpu" in done.stdout
    assert " passed" not in done.stdout
