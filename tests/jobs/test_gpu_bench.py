"""benchmarks/loss_on_gpu.py, on the stand-in for CuPy unless pytest is given --gpu."""

import json

import pytest

from jobs.launch import launch, launch_source

WITH_THE_STAND_IN = """
    import sys
    sys.path[:0] = ["tests", "benchmarks"]
    import strict_cupy
    sys.modules.update(strict_cupy.STAND_INS)
    from loss_on_gpu import main
    sys.exit(main())
    """

WITHOUT_A_GPU = """
    import sys
    sys.path[:0] = ["tests", "benchmarks"]
    import strict_cupy
    sys.modules["cupy"] = strict_cupy.without_a_gpu()
    from loss_on_gpu import main
    sys.exit(main())
    """

SMALL = ["--rows", "5", "--repeat", "1"]
ON_ANY_NUMBER_OF_RANKS = [
    "kernel: copy",
    "kernel: forward",
    "kernel: backward",
    "kernel: backward in place",
    "forward",
    "backward",
    "forward + backward",
    "value_and_grad",
]


@pytest.fixture
def bench(request, cupy):
    """Run it on that many ranks."""

    def run(ranks, *arguments):
        if request.config.option.gpu:
            return launch(ranks, "benchmarks/loss_on_gpu.py", *arguments)
        return launch_source(ranks, WITH_THE_STAND_IN, *arguments)

    return run


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, ["kernels and collective"])], ids=str)
def test_every_function_is_measured_beside_a_copy(bench, ranks, more):
    job = bench(ranks, *SMALL, "--classes", "50", "33", "--json")
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    assert report["gpu"]["memory"] > 0
    ours = [one for one in report["measurements"] if ": value" not in one["function"]]
    for classes in (50, 33):
        measured = {one["function"]: one for one in ours if one["classes"] == classes}
        assert {*ON_ANY_NUMBER_OF_RANKS, *more} <= measured.keys()
        copy = measured["kernel: copy"]
        assert copy["of_copy"] == 1
        passes = {"kernel: forward": 1, "forward": 1, "forward + backward": 3, "kernels and collective": 3}
        for name, one in measured.items():
            if name in (*ON_ANY_NUMBER_OF_RANKS, *more):
                moved = passes.get(name, 2) * 5 * -(-classes // ranks) * 4
                assert one["ms"] > 0
                assert one["gigabytes_per_second"] == pytest.approx(1e-6 * moved / one["ms"])
                assert one["of_copy"] == pytest.approx(one["gigabytes_per_second"] / copy["gigabytes_per_second"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_is_measured(bench, dtype):
    job = bench(1, *SMALL, "--classes", "40", "--dtype", dtype)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    for function in ON_ANY_NUMBER_OF_RANKS:
        assert any(dtype in line and f" {function} " in line for line in lines), function


def test_size_beyond_the_gpu_is_left_out(bench):
    job = bench(2, *SMALL, "--classes", str(2**40), "20", "--json")
    assert job.returncode == 0, job.stderr
    assert {one["classes"] for one in json.loads(job.stdout)["measurements"]} == {20}
    assert f"left out: {2**40} classes: " in job.stderr
    assert "bytes, " in job.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_bench_without_gpu_prints_one_line(ranks):
    job = launch_source(ranks, WITHOUT_A_GPU)
    assert job.returncode == 2
    assert len(job.stdout.splitlines()) == 1
    assert "CuPy is installed, but sees no GPU: cudaErrorInsufficientDriver: too old" in job.stdout
    assert "Traceback" not in job.stderr
