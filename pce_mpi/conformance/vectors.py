"""Export the cases as files, for code without MPI or Python, and judge the results of such code.

`export` writes problems and their exact answers as safetensors files, an index in JSON, and a page that explains them;
`judged` compares a file of results, written in any language, with them. Only cases about numbers are exported, not
those about modified inputs, repeated bits or deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata, resources
import inspect
import os
from pathlib import Path
import shlex
from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating
from pce_mpi.conformance import judging
from pce_mpi.conformance.cases import Case, Expects, Problem, problem_of
from pce_mpi.conformance.catalogue import cases
from pce_mpi.conformance.index import Entry, Index, read
from pce_mpi.conformance.judging import Answer, judge
from pce_mpi.conformance.offers import EVERYTHING, Gradient
from pce_mpi.conformance.orders import KIT, Orders
from pce_mpi.conformance.outcomes import Finding, Outcome, Report, Verdict, shaped
from pce_mpi.conformance.units import Tolerance
from pce_mpi.distributed.tensor_files import TensorFile, shortened, shown
from pce_mpi.loss.options import Options
from pce_mpi.loss.problem import check

Array = np.ndarray[Any, Any]


def export(
    folder: str | os.PathLike[str],
    *,
    ranks: Iterable[int] = (4,),
    seed: int = 0,
    pattern: str | Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
) -> int:
    """Write the vectors for shards over each number of `ranks` to `folder`, and return how many there are.

    `pattern` and `dtypes` select cases as in `cases`. Other files in `folder` are left alone. Needs safetensors. Raises
    `ValueError` if no case fits a pattern.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    selected = [case for case in cases(EVERYTHING, pattern=pattern, dtypes=dtypes) if _numbers_show(case)]
    entries = []
    for size in dict.fromkeys(ranks):
        for case in selected:
            problem = problem_of(case, EVERYTHING, size, seed=seed)
            if problem.gathered or {problem.memory, problem.target_memory, problem.dloss_memory} != {"C"}:
                continue  # the same numbers as in another case
            name = f"{case.name}/{size}-ranks"
            path = folder / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: np.array(array, order="C") for key, array in _tensors(case, problem)}, path)
            entries.append(_entry(name, case, problem))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(_page(), encoding="utf-8")
    Index(seed, entries).write(folder)
    return len(entries)


def judged(
    folder: str | os.PathLike[str], results: str | os.PathLike[str], *, strict: bool = False, tolerance: float = 1.0
) -> Report:
    """Compare the safetensors file `results` with the vectors in `folder`.

    For the vector NAME the file has NAME/loss and, if there is one, NAME/dlogits, of all classes; or NAME/refused, with
    any content. A vector that the file does not have is not offered.

    Raises `FileNotFoundError` if there is no index or no file, `ValueError` for a malformed index, safetensors file or
    vector, and for results of no vector.
    """
    index = read(Path(folder))
    entries = index.vectors
    given = _read(Path(results))
    known = {f"{entry.name}/{key}" for entry in entries for key in ("loss", "dlogits", "refused")}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{results} has {shown(unknown[0])}, which is the result of no vector in {folder}")
    settings = Orders("", strict=strict, tolerance=tolerance).settings()
    command = [*KIT, "--vectors", str(folder), "--results", str(results), *settings]
    outcomes = [_outcome(Path(folder), entry, given, Tolerance(strict, tolerance)) for entry in entries]
    for outcome in outcomes:
        outcome.rerun = shlex.join(command)
    return Report(
        candidate=str(results),
        offer=EVERYTHING,
        ranks=tuple(sorted({outcome.ranks for outcome in outcomes})),
        versions={"pce_mpi": metadata.version("pce_mpi"), "numpy": np.__version__},
        seed=index.seed,
        strict=strict,
        tolerance=tolerance,
        outcomes=outcomes,
    )


def _numbers_show(case: Case) -> bool:
    needs = case.needs
    about_bits = needs.deterministic or needs.same_bits or case.name == "same-on-every-rank"
    return case.procedure == "plain" and not (about_bits or needs.keeps_logits or case.form)


def _tensors(case: Case, problem: Problem) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a vector's file, by name."""
    yield "logits", problem.logits
    yield "targets", problem.targets
    if "weight" in problem.options:
        yield "weight", problem.options["weight"]
    if problem.dloss is not None:
        yield "dloss", problem.dloss
    if problem.may_be_nan is not None:
        yield "may_be_nan", problem.may_be_nan
    if case.expects is not Expects.REFUSAL:
        loss, dlogits = problem.expected
        yield "expected_loss", loss
        yield "expected_dlogits", dlogits


def _entry(name: str, case: Case, problem: Problem) -> Entry:
    return Entry(
        name=name,
        file=f"{name}.safetensors",
        catches=case.catches,
        expects=case.expects,
        gradient=case.needs.gradient is not Gradient.NONE,
        dtype=problem.dtype.name,
        axis=problem.axis % problem.logits.ndim,
        splits=problem.splits,
        reduction=problem.reduction,
        options={option: value for option, value in problem.options.items() if option != "weight"},
    )


def _page() -> str:
    page = resources.files(__package__).joinpath("vectors.md").read_text(encoding="utf-8")
    return f"{page}\n## How results are judged\n\n{inspect.cleandoc(judging.__doc__ or '')}\n"


def _read(path: Path) -> dict[str, Array]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.arrays}


def _problem(folder: Path, entry: Entry) -> Problem:
    """Read a problem from its file: another version of this package may draw other numbers."""
    try:
        tensors = _read(folder / entry.file)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise ValueError(f"{shown(entry.file)} is no file: {error.strerror or error}") from error
    try:
        if missing := {"logits", "targets"} - tensors.keys():
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        problem = Problem(
            logits=tensors["logits"],
            targets=tensors["targets"],
            splits=entry.splits,
            options=entry.options | {name: tensors[name] for name in ("weight",) if name in tensors},
            reduction=entry.reduction,
            axis=entry.axis,
            dloss=tensors.get("dloss"),
            may_be_nan=tensors.get("may_be_nan"),
        )
        _check(problem, entry)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / entry.file} is no problem: {shortened(str(error))}") from error
    return problem


def _check(problem: Problem, entry: Entry) -> None:
    """Raise if the problem cannot be computed, or contradicts its entry."""
    checked = check(
        Options(operation="judged", axis=problem.axis, reduction=problem.reduction, **problem.options),
        problem.logits,
        problem.targets,
    )
    if problem.dtype.name != entry.dtype:
        raise ValueError(f"the logits are {problem.dtype}, and the index says {entry.dtype}")
    if problem.classes != entry.splits[-1] or not problem.classes:
        raise ValueError(f"the logits have {problem.classes} classes, and the splits end at {entry.splits[-1]}")
    if checked.targets is not None and entry.expects != Expects.REFUSAL:
        counted = checked.targets[checked.valid]
        if (counted < 0).any() or (counted >= problem.classes).any():
            raise ValueError(f"a target is outside [0, {problem.classes}), and an answer is due")
    dloss, may_be_nan = problem.dloss, problem.may_be_nan
    if dloss is not None and (dloss.shape not in ((), problem.loss_shape) or not is_floating(dloss.dtype)):
        raise ValueError(f"dloss must be floating-point and shaped as the loss, got {dloss.dtype} {dloss.shape}")
    if may_be_nan is not None and (may_be_nan.shape != (problem.rows,) or may_be_nan.dtype != np.bool_):
        raise ValueError(f"may_be_nan must be one bool for each row, got {may_be_nan.dtype} {may_be_nan.shape}")


def _outcome(folder: Path, entry: Entry, given: Mapping[str, Array], tolerance: Tolerance) -> Outcome:
    problem = _problem(folder, entry)
    name, expects = entry.name, entry.expects
    outcome = Outcome(name, entry.catches, Verdict.PASS, ranks=problem.ranks, dtype=problem.dtype.name)
    outcome = shaped(outcome, problem)
    loss, dlogits = given.get(f"{name}/loss"), given.get(f"{name}/dlogits")
    if f"{name}/refused" in given:
        if expects is Expects.ANSWER:
            outcome.verdict = Verdict.REFUSED
            outcome.findings = [Finding("refused", "refused, and an answer was due")]
        else:
            outcome.note = "refused, as is due"
    elif loss is None:
        outcome.verdict, outcome.note = Verdict.NOT_OFFERED, "not among the results"
    elif expects is Expects.REFUSAL:
        outcome.findings = [Finding("not refused", "gives an answer, and a refusal was due")]
    elif dlogits is None and entry.gradient:
        outcome.verdict, outcome.note = Verdict.NOT_OFFERED, "its gradient is not among the results"
    else:
        outcome.findings = _malformed(problem, loss, dlogits)
        if not outcome.findings:
            answers = [
                Answer(loss, None if dlogits is None else problem.part(dlogits, rank)) for rank in range(problem.ranks)
            ]
            judgement = judge(problem, answers, tolerance)
            outcome.findings = judgement.findings + judgement.form
            outcome.accuracies, outcome.picture = judgement.accuracies, judgement.picture
    if outcome.findings and outcome.verdict is Verdict.PASS:
        outcome.verdict = Verdict.FAIL
    return outcome


def _malformed(problem: Problem, loss: Array, dlogits: Array | None) -> list[Finding]:
    """Return the faults that keep these arrays from being split into the results of ranks."""
    found = []
    if not is_floating(loss.dtype):
        found.append(Finding("dtype", f"the loss has dtype {loss.dtype}, and a floating-point one was expected"))
    if dlogits is not None and dlogits.shape != problem.logits.shape:
        text = f"the gradient has shape {dlogits.shape}, and the logits of all classes have {problem.logits.shape}"
        found.append(Finding("shape", text))
    return found
