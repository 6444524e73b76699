"""The examples, as a user starts them."""

import ast
from collections import defaultdict
from functools import cache
import json
import os
from pathlib import Path
import re
import shutil
import sys
import tempfile

from mpi4py import MPI
import numpy as np
import pytest

from jobs.launch import ROOT, complete, job_command, job_environment, launch, launch_source
import pce_mpi as pce
import pce_mpi.conformance

EXAMPLES = ROOT / "examples"
CLASSIFIER = "examples/classifier.py"
DATA_AND_MODEL = "examples/data_and_model_parallel.py"
DISTILLATION = "examples/distillation.py"
FIRST_DIFFERENCE = "examples/first_difference.py"
GRADIENTS = "examples/gradient_synchronization.py"
IN_ONE_FILE = "examples/in_one_file.py"
LANGUAGE_MODEL = "examples/language_model.py"
LOSS_PARALLEL = "examples/loss_parallel.py"
POLICY_GRADIENT = "examples/policy_gradient.py"
SHARDED_LOSS = "examples/sharded_loss.py"
TRANSFORMER = "examples/transformer.py"
VERIFY_YOUR_LOSS = "examples/verify_your_loss.py"
PROGRAMS = [
    CLASSIFIER,
    DATA_AND_MODEL,
    DISTILLATION,
    FIRST_DIFFERENCE,
    GRADIENTS,
    IN_ONE_FILE,
    LANGUAGE_MODEL,
    LOSS_PARALLEL,
    POLICY_GRADIENT,
    SHARDED_LOSS,
    TRANSFORMER,
]
WITH_OPTIONS = [CLASSIFIER, FIRST_DIFFERENCE, LANGUAGE_MODEL, TRANSFORMER]

# One rank, an odd number of them, and two dims of several ranks each; planted faults are found on 2.
RANKS = [1, 3, 4]
# For a program on a mesh of one dim: four ranks show nothing that three do not.
ON_A_LINE = [1, 3]

# A small slice of the standard library, and sizes that 2, 3 and 4 do not divide.
STEPS = 30
SLICE = ["--max-files=21", f"--steps={STEPS}", "--batch=130", "--embed=21", "--hidden=61", "--test-tokens=500"]
SLICE += ["--write=2"]
GPT_STEPS = 12
GPT_SLICE = ["--max-files=5", f"--steps={GPT_STEPS}", "--batch=5", "--length=13", "--test-tokens=70", "--write=2"]
GPT_SLICE += ["--layers=2", "--heads=12", "--width=24"]  # as many heads as any number of ranks shares evenly

# The search path by which tests import a program.
IMPORTABLE = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, EXAMPLES, ROOT / "benchmarks"]))}


@cache
def job(ranks, program, *args):
    """A run that may serve several tests, of a copy in an empty folder, where it leaves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        name = Path(shutil.copy(ROOT / program, folder)).name
        output = complete(job_command(ranks, name, *args), cwd=folder, env=job_environment(ranks))
        assert os.listdir(folder) == [name]
    return output


def losses_in(path):
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [entry["step"] for entry in entries], np.array([entry["loss"] for entry in entries])


def docstring_of(program):
    return ast.get_docstring(ast.parse((ROOT / program).read_text(encoding="utf-8")))


def test_programs_of_examples_are_all_tested():
    started = {path.name for path in EXAMPLES.glob("*.py") if "mpiexec -n" in docstring_of(path)}
    assert started == {program.removeprefix("examples/") for program in PROGRAMS}


# Model, training and options in one file, to be changed as a whole.
WHOLE_PROGRAMS = {
    "classifier.py": 300,
    "transformer.py": 425,
    "in_one_file.py": 151,
    "language_model.py": 315,
    "torch_tensor_parallel.py": 125,
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_shorter_than_100_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < WHOLE_PROGRAMS.get(path.name, 100)


# ------------------------------------------------------------------------------------------------------- to be copied


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_imports_public_names_alone(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {"pce_mpi": pce, "pce_mpi.conformance": pce_mpi.conformance}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            assert not {name.split(".")[0] for name in of} & {path.stem for path in EXAMPLES.glob("*.py")}
            assert {name for name in of if name.startswith("pce_mpi")} <= set(modules)
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                assert {each.name for each in node.names} <= {*modules[node.module].__all__}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("pce", "pce_mpi"):
            assert node.attr in pce.__all__


def test_functions_of_one_name_are_copies():
    found = defaultdict(set)
    for path in EXAMPLES.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name].add(ast.unparse(node))
    several = {name for name, texts in found.items() if len(texts) > 1}
    assert several == {"main", "options", "plot", "cross_entropy", "step", "train"} & several
    assert "compare" in found


# A training takes seconds, and every other program what it always takes.
SHORT = {
    CLASSIFIER: ["--classes=100", "--steps=2", "--batch=8", "--chunk=8", "--validation=8"],
    FIRST_DIFFERENCE: ["--steps=2"],
    LANGUAGE_MODEL: ["--max-files=3", "--steps=2", "--batch=9", "--test-tokens=9", "--write=1"],
    TRANSFORMER: ["--max-files=3", "--steps=2", "--batch=2", "--length=5", "--test-tokens=9", "--write=1"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_runs_alone_in_an_empty_folder(program):
    output = job(2 if program in SHORT else 1, program, *SHORT.get(program, []))  # one rank serves tests below as well
    assert output.returncode == 0 and output.stdout, output.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_says_how_to_start_it(program):
    assert re.search(rf"^    mpiexec -n \d python -m mpi4py {program}( -.*)?$", docstring_of(program), re.MULTILINE)


# ------------------------------------------------------------------------------- each against what one process computes

# Makes one function of the library depend on the number of ranks, and runs an example with it.
PLANTED = """
    import runpy
    import sys

    import pce_mpi

    program, name = sys.argv[1:3]
    sys.argv = [program, *sys.argv[3:]]
    right = getattr(pce_mpi, name)

    def wrong(x, *args):
        return right(x, *args) * (1 + 1e-3 * (x.mesh.size - 1))

    setattr(pce_mpi, name, wrong)
    runpy.run_path(program, run_name="__main__")
    """


@pytest.mark.parametrize(
    ("program", "name", "args"),
    [
        (DATA_AND_MODEL, "mse", []),
        (GRADIENTS, "square", []),
        (LOSS_PARALLEL, "cross_entropy", []),
        (DISTILLATION, "mean", []),
        (LANGUAGE_MODEL, "cross_entropy", [*SLICE, "--steps=3"]),
        (TRANSFORMER, "cross_entropy", [*GPT_SLICE, "--steps=3"]),
    ],
)
def test_example_wrong_on_several_ranks_fails(program, name, args):
    job = launch_source(2, PLANTED, program, name, *args, env=IMPORTABLE)
    assert job.returncode != 0
    assert len(re.findall("further than 1e-0[45] from what one process computes:", job.stderr)) == 1
    assert re.search(r"^  .*loss.* by 1\.0e-03 \(rank 1\)$|^  scale by 1\.0e-03 \(rank 1\)$", job.stderr, re.MULTILINE)
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("where", ["1.5", "np.array([1, 2, np.nan])"])
def test_difference_on_one_rank_ends_whole_job(where):
    job = launch_source(
        2,
        f"""
        from mpi4py import MPI
        import numpy as np

        from data_and_model_parallel import compare

        comm = MPI.COMM_WORLD
        right = np.ones_like({where})
        compare(comm, {{"this": 1.0, "that": {where} if comm.rank == 1 else right}}, {{"this": 1.0, "that": right}})
        print("went on")
        """,
        env=IMPORTABLE,
    )
    assert job.returncode != 0
    assert re.search(r"computes:\n  that by (5\.0e-01|nan) \(rank 1\)\n", job.stderr)
    assert "this" not in job.stderr
    assert not job.stdout


# ---------------------------------------------------------------------------------------------- data_and_model_parallel


def rows_of(table):
    """The lines of a printed trace that are payload, as phase, collective, dims and bytes."""
    pattern = r"^(\w+) +\S+ +(\w+) +payload +(\S.*?)  +\d+ +\d+ +(\d+) "
    return [(*found[:3], int(found[3])) for found in re.findall(pattern, table, re.MULTILINE)]


@pytest.mark.parametrize("ranks", RANKS)
def test_parallelism_of_every_kind_equals_one_process(ranks):
    output = job(ranks, DATA_AND_MODEL)
    assert output.returncode == 0, output.stderr
    assert len(set(re.findall(r"parallelism on Mesh\(.*\): loss (\d\.\d{6})", output.stdout))) == 1
    differences = re.findall(r"those of one process, but for (\S+)", output.stdout)
    assert len(differences) == 3
    assert max(map(float, differences)) < 1e-5


@pytest.mark.parametrize("ranks", RANKS)
def test_parallelism_of_every_kind_sends_its_bytes(ranks):
    output = job(ranks, DATA_AND_MODEL).stdout
    data, model, hybrid = output.split("parallelism on Mesh(")[1:]
    gradients = 4 * (784 * 784 + 784 * 10)
    assert rows_of(data) == [("step", "all_reduce", "data", gradients)]
    assert rows_of(model) == [("forward", "all_reduce", "model", 640)]
    assert [row[:3] for row in rows_of(hybrid)] == [("forward", "all_reduce", "model"), ("step", "all_reduce", "data")]
    assert "dw0                 {'data': Partial('sum')} before the step" in data
    assert "dw0                 {'model': Shard(1)} before the step" in model
    assert "dw0                 {'data': Partial('sum'), 'model': Shard(1)} before the step" in hybrid


# --------------------------------------------------------------------------------------------- gradient_synchronization


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_are_partial_over_ranks_with_other_parts(ranks):
    output = job(ranks, GRADIENTS)
    assert output.returncode == 0, output.stderr
    tables = output.stdout.strip().split("\n\n")
    assert len(tables) == 7
    for table in tables:
        dims = re.findall(r"(\w+) \d", table.splitlines()[0].partition(", within")[0])
        partial = dict(re.findall(r"^(\w+) +((?:[a-z, ]+|-)?)  +\d+%$", table, re.MULTILINE))
        sharded_by_model = ", ".join(dim for dim in dims if dim != "model") or "-"
        expected = dict.fromkeys(["w1", "b1", "w2"], sharded_by_model)
        expected |= dict.fromkeys(["scale", "shift", "b2"], ", ".join(dims))
        assert {name: text.strip() for name, text in partial.items()} == expected


def test_rule_of_batch_axis_suits_data_parallelism_only():
    tables = job(4, GRADIENTS).stdout.strip().split("\n\n")
    off = {table.partition(", within")[0]: list(map(int, re.findall(r"(\d+)%", table))) for table in tables}
    assert off["data 4"] == [0] * 6
    assert min(off["context 4"]) > 20
    assert min(off["data 2, context 2"]) > 20
    scale, shift, w1, b1, w2, b2 = off["model 4"]
    assert min(scale, shift, b2) > 20
    assert max(w1, b1, w2) == 0


# -------------------------------------------------------------------------------------------------------- loss_parallel


@pytest.mark.parametrize("ranks", ON_A_LINE)
def test_loss_parallel_equals_gathered_and_sends_less(ranks):
    output = job(ranks, LOSS_PARALLEL)
    assert output.returncode == 0, output.stderr
    assert re.search(r"left sharded +loss (\d+\.\d+), .*\nlogits gathered first +loss \1, ", output.stdout)
    sent = re.search(r"^in all +(\d+) calls +([\d,]+) bytes +(\d+) calls +([\d,]+) bytes$", output.stdout, re.MULTILINE)
    calls, size, gathered_calls, gathered_size = (int(number.replace(",", "")) for number in sent.groups())
    # 64 rows of 32 features, four times, and of one state of 40 bytes; or of this rank's classes.
    assert (calls, size) == (5, 4 * 64 * 32 * 4 + 64 * 40)
    assert (gathered_calls, gathered_size) == (5, 4 * 64 * 32 * 4 + 64 * -(-10_001 // ranks) * 4)


# ------------------------------------------------------------------------------------------------------- language_model


@pytest.fixture(scope="module")
def trained_on_a_slice(tmp_path_factory):
    """Training on the small slice, by number of ranks: the job and its losses."""
    folder = tmp_path_factory.mktemp("logs")
    results = {}
    for ranks in ON_A_LINE:
        output = launch(ranks, LANGUAGE_MODEL, *SLICE, f"--log={folder / str(ranks)}")
        assert output.returncode == 0, output.stderr
        results[ranks] = output, *losses_in(folder / str(ranks))
    return results


def test_language_model_has_same_losses_on_any_ranks(trained_on_a_slice):
    (_, _, alone), (output, steps, losses) = trained_on_a_slice[1], trained_on_a_slice[3]
    assert re.search(r"^the first steps are those of one process, but for \d", output.stdout)
    assert steps == list(range(1, STEPS + 1))
    # On each number of ranks the gradient of the hidden layer is summed in another order, so that the parameters move
    # apart by about one rounding of float32 a step. A batch's loss is a mean, where most of that cancels.
    np.testing.assert_allclose(losses, alone, rtol=16 * np.finfo(np.float32).eps, atol=0)


def test_language_model_learns(trained_on_a_slice):
    _, _, losses = trained_on_a_slice[1]
    assert losses[-10:].mean() < losses[:10].mean() - 0.3


def test_tape_equals_backward_by_hand_and_finite_differences():
    # In float64, and along a random direction for each parameter: central differences are right to 1e-9 or so there.
    job = launch_source(
        3,
        """
        from argparse import Namespace

        from mpi4py import MPI
        import numpy as np

        from language_model import Model
        import pce_mpi as pce
        from training_step import ByHand

        comm = MPI.COMM_WORLD
        args = Namespace(context=3, embed=5, hidden=7, batch=11, seed=0, rate=1.0, embedding_rate=1.0)
        model = Model(pce.Mesh(comm, classes=comm.size), np.zeros(23), args)
        rng = np.random.default_rng(1)
        values = {name: rng.standard_normal(p.shape) for name, p in model.parameters.items()}
        directions = {name: rng.standard_normal(p.shape) for name, p in model.parameters.items()}
        rows = rng.integers(23, size=(11, 4))

        def put(values):
            for name, p in model.parameters.items():
                placed = pce.distribute(values[name], model.mesh, requires_grad=True, **p.placements)
                model.parameters[name] = placed

        def loss(name, step):
            put(values | {name: values[name] + step * directions[name]})
            with pce.no_grad():
                return model.loss(rows).item()

        put(values)
        model.loss(rows).backward()
        gradients = {name: p.grad.full() for name, p in model.parameters.items()}
        classes = slice(*pce.shard_range(23, comm.size, comm.rank))

        by_hand = ByHand(values, 11, comm)
        by_hand.logits, by_hand.du = by_hand.logits.astype(np.float64), by_hand.du.astype(np.float64)
        by_hand.step(rows[:, :-1], rows[:, -1], 1.0)
        for name in values:
            of = (..., classes) if name in "uc" else ...
            stepped = values[name][of] - vars(by_hand)[name]
            assert np.allclose(gradients[name][of], stepped, rtol=1e-11, atol=1e-14), name
        for name in values:
            slope = np.sum(gradients[name] * directions[name])
            difference = (loss(name, 1e-5) - loss(name, -1e-5)) / 2e-5
            assert np.isclose(slope, difference, rtol=1e-7, atol=0), (name, slope, difference)
        """,
        env=IMPORTABLE,
    )
    assert job.returncode == 0, job.stderr


def test_rank_0_alone_prints_result(trained_on_a_slice):
    output, _, losses = trained_on_a_slice[3]
    perplexities = re.findall(r"^(unigram|this) model +[\d.]+ +([\d.]+)$", output.stdout, re.MULTILINE)
    assert [name for name, _ in perplexities] == ["unigram", "this"]
    assert float(perplexities[1][1]) < float(perplexities[0][1])
    assert output.stdout.count("\nraise ValueError(|") == 1
    # A line that is written again and again, with the time that is left; the last one has the loss of the last step.
    assert re.search(r"training: +\d+%\|.*\| \d+/30 \[00:\d\d<00:\d\d, .*, loss=\d\.\d+\]", output.stderr)
    assert f"{STEPS}/{STEPS} [" in output.stderr
    assert f"loss={losses[-1]:.3f}]" in output.stderr
    *_, seconds = re.findall(r" \[00:(\d\d)<", output.stderr)
    assert output.stderr.count("training:") <= 3 + int(seconds) // 10  # a log has no line for each second


# ---------------------------------------------------------------------------------------------------------- transformer

MESHES = [
    (4, ["--data=2", "--model=2"]),
    (4, ["--context=2", "--model=2", "--sequence-parallel"]),
]


@pytest.fixture(scope="module")
def gpt_losses(tmp_path_factory):
    """The losses of training the transformer on one process, by step, as all meshes are to have them."""
    return trained(1, log=tmp_path_factory.mktemp("logs") / "log")[1]


def trained(ranks, *args, log):
    """The steps and losses of training the transformer."""
    output = launch(ranks, TRANSFORMER, *GPT_SLICE, f"--log={log}", *args)
    assert output.returncode == 0, output.stderr
    assert re.search(r"^the first steps are those of one process, but for \d", output.stdout)
    assert "\nraise ValueError(|" in output.stdout
    steps, losses = losses_in(log)
    assert f" {steps[-1]}/{steps[-1]} [" in output.stderr  # steps of all steps, those before --resume among them
    assert f"loss={losses[-1]:.3f}]" in output.stderr
    return steps, losses


@pytest.mark.parametrize(("ranks", "mesh"), MESHES, ids=lambda value: str(value))
def test_transformer_has_same_losses_on_any_mesh(gpt_losses, ranks, mesh, tmp_path):
    steps, losses = trained(ranks, *mesh, log=tmp_path / "log")
    assert steps == list(range(1, GPT_STEPS + 1))
    # As for the language model: AdamW divides rounding by the gradient's size, but by no less than its eps.
    np.testing.assert_allclose(losses, gpt_losses, rtol=16 * np.finfo(np.float32).eps, atol=0)


def test_transformer_learns():
    output = launch(1, TRANSFORMER, *GPT_SLICE, "--max-files=21", "--steps=80", "--batch=20", "--test-tokens=1000")
    assert output.returncode == 0, output.stderr
    unigram, transformer = re.findall(r"^\w+ model +[\d.]+ +([\d.]+)$", output.stdout, re.MULTILINE)
    assert float(transformer) < 0.9 * float(unigram)


def test_transformer_is_resumed_on_another_mesh(gpt_losses, tmp_path):
    kept = tmp_path / "kept.safetensors"
    steps, losses = trained(2, "--model=2", "--stop=5", f"--save={kept}", log=tmp_path / "first")
    assert steps == [1, 2, 3, 4, 5]
    more_steps, more_losses = trained(3, "--context=3", f"--resume={kept}", log=tmp_path / "second")
    assert steps + more_steps == list(range(1, GPT_STEPS + 1))
    losses = np.concatenate([losses, more_losses])
    np.testing.assert_allclose(losses, gpt_losses, rtol=16 * np.finfo(np.float32).eps, atol=0)


def test_transformer_prints_fingerprint_of_each_step():
    output = launch(1, TRANSFORMER, *GPT_SLICE, "--steps=3", "--test-tokens=1", "--fingerprint")
    assert output.returncode == 0, output.stderr
    lines = re.findall(r"^step (\d)  loss (\d\.\d+)  parameters ([0-9a-f]{64})$", output.stdout, re.MULTILINE)
    assert [number for number, *_ in lines] == ["1", "2", "3"]
    assert len({digits for *_, digits in lines}) == 3


# --------------------------------------------------------------------------------------------------- the command line

# A bad command line, and what is said of it.
COMPLAINTS = [
    (LANGUAGE_MODEL, "--steps=0", "argument --steps: expected a whole number from 1 up to 1e9, got '0'"),
    (LANGUAGE_MODEL, "--max-files=1", "argument --max-files: expected a whole number from 2 up to 1e9, got '1'"),
    (LANGUAGE_MODEL, "--batch=many", "argument --batch: expected a whole number from 1 up to 1e9, got 'many'"),
    (LANGUAGE_MODEL, "--rate=-1", "argument --rate: expected a number from 0 up to 1e9, got '-1'"),
    (LANGUAGE_MODEL, "--log=/no/such/folder/losses", "argument --log: cannot write '/no/such/folder/losses'"),
    (TRANSFORMER, "--resume=/no/such/file", "argument --resume: cannot read '/no/such/file'"),
    (LANGUAGE_MODEL, "--vocabulary=9", "unrecognized arguments: --vocabulary=9"),
    (TRANSFORMER, "--model=3", "data=1, context=1, model=3 has 1 * 1 * 3 = 3 ranks, but comm.size is 2"),
    (TRANSFORMER, "--data=2 --model=2", "data=2, context=1, model=2 has 2 * 1 * 2 = 4 ranks, but comm.size is 2"),
    (TRANSFORMER, "--width=24 --heads=7", "a width of 24 is no multiple of 7 heads"),
    (CLASSIFIER, "--features=README.md", "--features and --labels belong together"),
    (CLASSIFIER, "--validation=20000", "20000 rows leave none to train on beside 20000 for validation"),
    (FIRST_DIFFERENCE, "--axes=xyz", "argument --axes: invalid choice: 'xyz'"),
    (TRANSFORMER, "--max-files=3 --length=10000000", "a length of 10000000 is too long for "),
]

# Runs programs with these arguments, one after the other; what all ranks said of each, and with which status.
RUN_ALL = """
    from contextlib import redirect_stderr, redirect_stdout
    import io
    import json
    import runpy
    import sys

    from mpi4py import MPI

    MPI.Finalize = lambda: None  # another program follows
    told = {}
    for line in sys.argv[1:]:
        sys.argv = line.split()
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
                status = None
            except SystemExit as end:
                status = end.code
        told[line] = MPI.COMM_WORLD.gather((status, out.getvalue(), err.getvalue()))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(told))
    """


@cache
def said():
    """By command line: the exit statuses, and what 2 ranks wrote to stdout and stderr."""
    lines = [f"{program} {arguments}" for program, arguments, _ in COMPLAINTS]
    lines += [f"{program} --help" for program in [*WITH_OPTIONS, IN_ONE_FILE]]
    job = launch_source(2, RUN_ALL, *lines, env=IMPORTABLE)
    assert job.returncode == 0, job.stderr
    parts = {line: zip(*ranks, strict=True) for line, ranks in json.loads(job.stdout).items()}
    return {line: (statuses, "".join(out), "".join(err)) for line, (statuses, out, err) in parts.items()}


@pytest.mark.parametrize("program", [*WITH_OPTIONS, IN_ONE_FILE])
def test_help_of_example_is_printed_once(program):
    statuses, out, err = said()[f"{program} --help"]
    assert statuses == (0, 0)
    assert out.count(docstring_of(program) if program == IN_ONE_FILE else "usage:") == 1
    assert not err


@pytest.mark.parametrize(("program", "arguments", "complaint"), COMPLAINTS, ids=lambda value: value.split("/")[-1])
def test_bad_command_line_is_reported_once(program, arguments, complaint):
    statuses, out, err = said()[f"{program} {arguments}"]
    assert all(statuses)
    assert err.count("error:") == 1
    assert complaint in err
    assert not out


def test_resuming_another_model_says_what_differs(tmp_path):
    kept, options = tmp_path / "kept.safetensors", [*GPT_SLICE, "--steps=1", "--layers=1", "--write=0"]
    assert launch(1, TRANSFORMER, *options, f"--save={kept}").returncode == 0
    job = launch(2, TRANSFORMER, *options, "--width=48", f"--resume={kept}")
    assert job.returncode != 0
    assert "the array has the shape (48,), but the one" in job.stderr and job.stderr.count("error: cannot resume") == 1
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(("arguments", "status"), [("--help", True), ("--steps=0", False), ("--heads=7", False)])
def test_command_line_ends_job_without_abort(arguments, status):
    job = launch(2, TRANSFORMER, arguments)
    assert (job.returncode == 0) is status
    assert job.stderr.count("error:") == (not status)
    assert "Abort" not in job.stderr
    assert "Traceback" not in job.stderr
    assert not job.stdout or status


# ---------------------------------------------------------------------------------------------------------- in_one_file


@cache
def losses_of_package():
    """The losses of examples/in_one_file.py at the steps that it prints, by the package on one rank."""
    rng, rows, classes = np.random.default_rng(0), 30, 7
    mesh = pce.Mesh(MPI.COMM_SELF, model=1)
    x, targets = rng.normal(size=(rows, 5)), rng.integers(classes, size=rows)
    first, second = rng.normal(size=(5, 12)) / 2, rng.normal(size=(12, classes)) / 3
    w = [pce.distribute(each, mesh, requires_grad=True) for each in (first, second)]
    losses, optimizer = [], pce.SGD(w, lr=0.5)
    for _ in range(101):
        loss = pce.cross_entropy(pce.relu(x @ w[0]) @ w[1], targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[::20]


@pytest.mark.parametrize("ranks", [*RANKS, 6])
def test_idea_in_one_file_trains_as_package_does(ranks):
    output = job(ranks, IN_ONE_FILE)
    assert output.returncode == 0, output.stderr
    found = [float(line.split()[-1]) for line in output.stdout.splitlines()]
    np.testing.assert_allclose(found, losses_of_package(), rtol=1e-11)


def test_idea_in_one_file_needs_no_package():
    imported = re.findall(r"^(?:from|import) (\w+)", (ROOT / IN_ONE_FILE).read_text("utf-8"), re.MULTILINE)
    assert set(imported) == {"mpi4py", "numpy", "sys"}


# --------------------------------------------------------------------------------------------------------- sharded_loss


@pytest.mark.parametrize("ranks", RANKS)
def test_sharded_loss_agrees_with_dense_one(ranks):
    output = job(ranks, SHARDED_LOSS)
    assert output.returncode == 0, output.stderr
    assert re.search(r"loss, sharded +([\d.]+)\nloss, dense +\1\ngradients agree on each rank +True\n", output.stdout)


def test_sharded_loss_prints_what_its_docstring_says():
    shown = [line.removeprefix("    ") for line in docstring_of(SHARDED_LOSS).split("prints\n\n")[1].splitlines()]
    assert job(4, SHARDED_LOSS).stdout.splitlines() == shown


# ------------------------------------------------------------------------------------------------------ policy_gradient


def test_policy_gradient_prints_what_its_docstring_says():
    for ranks, groups in ((5, "2, 3"), (1, "1, 0")):
        output = job(ranks, POLICY_GRADIENT)
        assert output.returncode == 0, output.stderr
        text = docstring_of(POLICY_GRADIENT).split("prints\n\n")[1].partition("\n\n")[0]
        shown = [line.removeprefix("    ") for line in text.replace("2, 3", groups).splitlines()]
        assert output.stdout.splitlines() == shown


# --------------------------------------------------------------------------------------------------------- distillation


@pytest.mark.parametrize("ranks", [1, 4])
def test_distillation_prints_what_its_docstring_says(ranks):
    output = job(ranks, DISTILLATION)
    assert output.returncode == 0, output.stderr
    text = docstring_of(DISTILLATION).split("prints\n\n")[1].partition("\n\n")[0]
    assert output.stdout.splitlines() == [line.removeprefix("    ") for line in text.splitlines()]


# ----------------------------------------------------------------------------------------------------- verify_your_loss


def judged(function, *args):
    """The conformance kit's run on a function of the tutorial."""
    command = [sys.executable, "-m", "pce_mpi", "conformance", "-n", "3", "--adapter", "torch-shards"]
    cases = ["--case", "label_smoothing", "--case", "random-logits"]
    return complete([*command, f"{VERIFY_YOUR_LOSS}:{function}", *cases, *args], env=job_environment(3))


def test_tutorial_error_shows_beside_random_logits():
    pytest.importorskip("torch", reason="torch is not installed")
    report = judged("cross_entropy")
    assert report.returncode == 1, report.stderr
    failed = re.findall(r"^FAIL (.+)$", report.stdout, re.MULTILINE)
    assert failed == ["label_smoothing/float32, label_smoothing/bfloat16"]
    assert "label smoothing is spread over the 8 local classes, not over all 24" in " ".join(report.stdout.split())


def test_repair_in_tutorial_passes():
    pytest.importorskip("torch", reason="torch is not installed")
    report = judged("repaired")
    assert report.returncode == 0, report.stdout + report.stderr


def test_tutorial_says_how_to_judge_its_functions():
    commands = re.findall(
        r"^    python -m pce_mpi conformance --adapter .*$", docstring_of(VERIFY_YOUR_LOSS), re.MULTILINE
    )
    start = "    python -m pce_mpi conformance --adapter torch-shards"
    assert commands == [f"{start} {VERIFY_YOUR_LOSS}:{function}" for function in ("cross_entropy", "repaired")]


# -------------------------------------------------------------------------------------------------- pages of the site

# A command and what it printed, as the page of a program shows it; the others show what their docstrings have.
OUTPUTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/outputs").glob("*.txt"))}
# These train for minutes. Fewer steps, files or classes print other numbers in the same form.
IN_SHORT = {
    CLASSIFIER: ["--classes=1000"],
    LANGUAGE_MODEL: [*SLICE, "--steps=3"],
    TRANSFORMER: [*GPT_SLICE, "--steps=3"],
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def test_page_of_every_program_has_its_output():
    in_docstrings = {program for program in PROGRAMS if "\nprints\n\n" in docstring_of(program)}
    assert in_docstrings | {f"examples/{name}.py" for name in OUTPUTS} == set(PROGRAMS)


@pytest.mark.parametrize("name", OUTPUTS)
def test_program_prints_what_its_page_shows(name):
    command, _, page = OUTPUTS[name].partition("\n")
    start, ranks, _, _, _, program, *args = command.removeprefix("$ mpiexec ").split()
    output = job(int(ranks), program, *args, *IN_SHORT.get(program, []))
    assert start == "-n" and output.returncode == 0, output.stderr
    (printed, _, written), (shown, _, text) = (each.partition("\nCompletions") for each in (output.stdout, page))
    forms = [re.sub(" +", " ", NUMBER.sub("#", each)) for each in (printed, shown)]
    assert forms[0] == forms[1]
    assert all(f"\n{prompt}|" in text for prompt in re.findall(r"^(.+)\|", written, re.MULTILINE))
    if program not in IN_SHORT:
        rounded = [re.sub(r"\de-\d\d", "", each) for each in (printed, shown)]  # differences by rounding
        numbers = [[float(number.replace(",", "")) for number in NUMBER.findall(each)] for each in rounded]
        np.testing.assert_allclose(*numbers, rtol=1e-5)
