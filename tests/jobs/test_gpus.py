"""Messages on a machine without a GPU, or with a stand-in for some; CuPy may be installed or not."""

import ast
import importlib.util
import json
import sys
import textwrap

import pytest

from jobs.launch import ROOT, complete, launch_source


def run(program):
    done = complete([sys.executable, "-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy_arrays_never_import_cupy():
    program = """
        import sys
        import numpy as np
        import pce_mpi as pce

        pce.softmax_cross_entropy_value_and_grad(np.zeros((2, 8), np.float32), np.array([0, 7]))
        pce.class_statistics(np.zeros((2, 8)))
        print(sorted(name for name in sys.modules if name.startswith("cupy")))
        """
    assert run(program) == "[]\n"


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None,
    reason="CuPy is not installed; `make test-kernels` installs it and runs this",
)
def test_numpy_arrays_work_beside_imported_cupy():
    program = """
        import cupy
        import numpy as np
        import pce_mpi as pce
        from pce_mpi.cli import main

        loss = pce.softmax_cross_entropy(np.zeros((2, 8)), np.array([0, 7]))
        assert type(loss) is np.ndarray
        main(["info"])
        """
    printed = run(program)
    assert ("no GPU on rank 0: CuPy is installed, but sees no GPU: " in printed) != ("GPUs seen" in printed)


WITHOUT_A_GPU = """
    import sys
    sys.path.insert(0, "tests")
    import strict_cupy
    sys.modules["cupy"] = strict_cupy.without_a_gpu()
    from pce_mpi.cli import main
    main(["info", *sys.argv[1:]])
    """


def test_info_says_why_cupy_sees_no_gpu():
    job = launch_source(2, WITHOUT_A_GPU)
    assert job.returncode == 0, job.stderr
    line = "no GPU on ranks 0-1: CuPy is installed, but sees no GPU: cudaErrorInsufficientDriver: too old"
    assert job.stdout.count(line) == 1
    assert "and more" not in job.stdout
    report = json.loads(launch_source(2, WITHOUT_A_GPU, "--json").stdout)
    assert [(rank["gpus"], rank["takes gpu"], rank["cuda"]) for rank in report["ranks"]] == [([], None, {})] * 2


WITH_TWO_GPUS = """
    import sys
    sys.path.insert(0, "tests")
    import strict_cupy
    sys.modules.update(strict_cupy.STAND_INS)
    from pce_mpi.cli import main
    main(["info", *sys.argv[1:]])
    """


def test_info_shows_gpus_of_each_rank():
    job = launch_source(3, WITH_TWO_GPUS)
    assert job.returncode == 0, job.stderr
    heads = ("rank", "GPUs seen", "takes", "name", "GiB", "compute capability", "CUDA driver", "runtime")
    assert any(all(head in line for head in heads) for line in job.stdout.splitlines())
    assert job.stdout.count("Stand-in") == 3
    report = json.loads(launch_source(3, WITH_TWO_GPUS, "--json").stdout)
    assert [rank["takes gpu"] for rank in report["ranks"]] == [0, 1, 0]
    for rank in report["ranks"]:
        assert rank["gpus"] == [{"name": "Stand-in", "memory": 2**30, "compute_capability": "9.0"}] * 2
        assert rank["cuda"] == {"driver": "13.0", "runtime": "13.2"}
        assert rank["no gpu"] is None


@pytest.mark.parametrize(
    ("told", "aware", "way"),
    [
        ("0", "no (PCE_MPI_GPU_AWARE=0)", "staged through pinned host memory"),
        ("1", "yes (PCE_MPI_GPU_AWARE=1)", "handed to MPI where they are"),
    ],
)
def test_info_says_how_gpu_arrays_reach_mpi(told, aware, way):
    source = "import sys; from pce_mpi.cli import main; main(['info', '--json'])"
    report = json.loads(launch_source(1, source, env={"PCE_MPI_GPU_AWARE": told}).stdout)["mpi"]
    assert report["GPU-aware"] == aware
    assert report.get("CuPy arrays", "").startswith(way)


def functions_taken_from_the_array_library():
    """The names of `xp.name` and `array_namespace(...).name` in the package, and where they stand."""
    for path in sorted((ROOT / "pce_mpi").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case (
                    ast.Attribute(value=ast.Name(id="xp") | ast.Attribute(attr="_xp"), attr=name)
                    | ast.Attribute(value=ast.Call(func=ast.Name(id="array_namespace")), attr=name)
                ):
                    yield name, f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None,
    reason="CuPy is not installed; `make test-kernels` installs it and runs this",
)
def test_cupy_has_every_function_that_is_used():
    used = dict(functions_taken_from_the_array_library())
    assert {"exp", "where", "concatenate"} <= used.keys()
    program = f"import cupy, json; print(json.dumps([name for name in {sorted(used)} if not hasattr(cupy, name)]))"
    assert [f"{used[name]}: {name}" for name in json.loads(run(program))] == []
