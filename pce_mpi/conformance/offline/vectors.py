"""Export the cases as files, for code without MPI or Python, and judge the results of such code.

`export` writes problems and their exact answers as safetensors files, an index in JSON, and a page that explains them
(`export_bits` the same with bits in place of exact answers); `judged` compares a file of results, written in any
language, with them. Only cases about numbers are exported, not those about modified inputs, repeated bits or deadlocks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata, resources
import inspect
from itertools import pairwise
import json
import os
from pathlib import Path
import shlex
from typing import Any

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import dtype_named
from pce_mpi.conformance import judging
from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.candidates.fitting import problem_of
from pce_mpi.conformance.candidates.offers import EVERYTHING
from pce_mpi.conformance.judging.comparing import Tolerance, difference
from pce_mpi.conformance.judging.judge import Answer
from pce_mpi.conformance.judging.outcomes import Finding, Outcome, Report, Verdict, agree, shaped
from pce_mpi.conformance.problems.cases import Case, Expects, Gradient
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.runs.orders import KIT, Orders
from pce_mpi.conformance.runs.running import settle
from pce_mpi.conformance.serialization import from_json, to_json
from pce_mpi.distributed.tensor_files import TensorFile
from pce_mpi.kernels.elementary import VERSION
from pce_mpi.kernels.interface import Pass, StateFields
from pce_mpi.loss.options import Options
from pce_mpi.loss.passes import loss_fields, with_class_weights
from pce_mpi.loss.problem import Problem as LossProblem, check, rows_and_classes
from pce_mpi.loss.statistics import statistics_fields
from pce_mpi.text import shortened, shown

_FORMAT = {"format": "pce_mpi conformance vectors", "version": 2}
_INDEX = "index.json"
# The results of the vector NAME are called NAME/loss, ...; those of one with bits as the bits are.
_RESULTS = ("loss", "dlogits", "refused")


PathLike = str | os.PathLike[str]
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class Entry:
    """One vector in the index; the page for its users, `vectors.md`, explains the fields."""

    name: str
    file: str
    catches: str
    expects: Expects
    gradient: bool
    dtype: str
    axis: int
    splits: tuple[int, ...]
    reduction: str
    options: dict[str, Any]
    bits: tuple[str, ...] = ()


Vector = tuple[Entry, Tensors]


def export(
    folder: PathLike,
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
    selected = [case for case in cases(EVERYTHING, pattern=pattern, dtypes=dtypes) if _numbers_show(case)]

    def vectors() -> Iterator[Vector]:
        for size in dict.fromkeys(ranks):
            for case in selected:
                problem = problem_of(case, EVERYTHING, size, seed=seed)
                # Other memory has the same numbers as in another case.
                if not problem.gathered and {problem.memory, problem.target_memory, problem.dloss_memory} == {"C"}:
                    entry = _entry(f"{case.name}/{size}-ranks", problem, case.catches, case.expects)
                    yield (
                        replace(entry, gradient=case.needs.gradient is not Gradient.NONE),
                        dict(_tensors(case, problem)),
                    )

    return write(Path(folder), vectors(), seed)


def judged(folder: PathLike, results: PathLike, *, strict: bool = False, tolerance: float = 1.0) -> Report:
    """Compare the safetensors file `results` with the vectors in `folder`; `vectors.md` says what the file has.

    Raises `FileNotFoundError` if there is no index or no file, `ValueError` for a malformed index, safetensors file or
    vector, and for results of no vector.
    """
    seed, entries = _index(Path(folder) / _INDEX)
    arrays = _read(Path(results))
    known = {f"{entry.name}/{key}" for entry in entries for key in entry.bits or _RESULTS}
    if unknown := sorted(arrays.keys() - known):
        raise ValueError(f"{results} has {shown(unknown[0])}, which is the result of no vector in {folder}")
    settings = Orders("", strict=strict, tolerance=tolerance).settings()
    command = [*KIT, "--vectors", str(folder), "--results", str(results), *settings]
    outcomes = [_outcome(Path(folder), entry, arrays, Tolerance(strict, tolerance)) for entry in entries]
    agree(outcomes)
    for outcome in outcomes:
        outcome.rerun = shlex.join(command)
    return Report(
        candidate=str(results),
        offer=EVERYTHING,
        ranks=tuple(sorted({outcome.ranks for outcome in outcomes})),
        versions={"pce_mpi": metadata.version("pce_mpi"), "numpy": np.__version__, "arithmetic": str(VERSION)},
        seed=seed,
        strict=strict,
        tolerance=tolerance,
        outcomes=outcomes,
    )


def _numbers_show(case: Case) -> bool:
    return case.procedure == "plain" and not (case.of_bits or case.needs.keeps_logits or case.form)


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


def _entry(name: str, problem: Problem, catches: str, expects: Expects = Expects.ANSWER) -> Entry:
    return Entry(
        name=name,
        file=f"{name}.safetensors",
        catches=catches,
        expects=expects,
        gradient=True,
        dtype=problem.dtype.name,
        axis=problem.axis % problem.logits.ndim,
        splits=problem.splits,
        reduction=problem.reduction,
        options={option: value for option, value in problem.options.items() if option != "weight"},
    )


def write(folder: Path, vectors: Iterable[Vector], seed: int = 0) -> int:
    """Write the tensors of each entry, the page and the index; return how many entries there are."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for entry, tensors in vectors:
        path = folder / entry.file
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: np.array(array, order="C") for name, array in tensors.items()}, path)
        entries.append(entry)
    page = resources.files(__package__).joinpath("vectors.md").read_text(encoding="utf-8")
    page += f"\n## How results are judged\n\n{inspect.cleandoc(judging.__doc__ or '')}\n"
    (folder / "README.md").write_text(page, encoding="utf-8")
    content = {**_FORMAT, "arithmetic": VERSION, "seed": seed, "vectors": to_json(entries)}
    (folder / _INDEX).write_text(f"{json.dumps(content, indent=1, allow_nan=False)}\n", encoding="utf-8")
    return len(entries)


def _read(path: Path) -> dict[str, Array]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.arrays}


def _index(path: Path) -> tuple[int, list[Entry]]:
    """Return the seed and the vectors of an index; raise `ValueError` if it is malformed, or of other bits."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or not content.items() >= _FORMAT.items():
            raise ValueError(f"it must be {' of version '.join(map(str, _FORMAT.values()))}")
        seed, entries = from_json(int, content["seed"]), from_json(list[Entry], content["vectors"])
        if any(entry.bits for entry in entries) and (arithmetic := from_json(int, content["arithmetic"])) != VERSION:
            raise ValueError(
                f"its bits are those of arithmetic {arithmetic}, and this package has arithmetic {VERSION}"
            )
        return seed, entries
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be used: {shortened(str(error))}") from error


def _problem(entry: Entry, tensors: Tensors) -> Problem:
    """Return the problem of a file: another version of this package may draw other numbers."""
    if missing := {"logits", "targets"} - tensors.keys():
        raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
    problem = Problem(
        logits=tensors["logits"],
        targets=tensors["targets"],
        splits=entry.splits,
        kind=KINDS["loss"],
        options=entry.options | {name: tensors[name] for name in ("weight",) if name in tensors},
        reduction=entry.reduction,
        axis=entry.axis,
        dloss=tensors.get("dloss"),
        may_be_nan=tensors.get("may_be_nan"),
    )
    options = Options(operation="judged", axis=problem.axis, reduction=problem.reduction, **problem.options)
    check(options, problem.logits, problem.targets)
    if (problem.dtype.name, problem.classes) != (entry.dtype, entry.splits[-1]):
        listed = f"{entry.splits[-1]} classes in {entry.dtype}"
        raise ValueError(f"the logits have {problem.classes} classes in {problem.dtype}, and the index says {listed}")
    return problem


def _outcome(folder: Path, entry: Entry, arrays: Tensors, tolerance: Tolerance) -> Outcome:
    path = folder / entry.file
    outcome = Outcome(entry.name, entry.catches, Verdict.PASS, ranks=len(entry.splits) - 1, dtype=entry.dtype)
    try:
        tensors = _read(path)
        if entry.bits:
            return _with_bits(outcome, entry, tensors, arrays)
        return _judged(outcome, entry, _problem(entry, tensors), arrays, tolerance)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no problem: {shortened(str(error))}") from error


def _with_bits(outcome: Outcome, entry: Entry, tensors: Tensors, arrays: Tensors) -> Outcome:
    """Compare the bits of what is given of a vector with those that it must have."""
    answers = {name: arrays[f"{entry.name}/{name}"] for name in entry.bits if f"{entry.name}/{name}" in arrays}
    if not answers:
        return replace(outcome, verdict=Verdict.NOT_OFFERED, note="none of its results is given")
    texts = {name: difference(got, tensors[f"expected_{name}"], _place(got)) for name, got in answers.items()}
    outcome.findings = [Finding("other bits", f"{name}{text}") for name, text in texts.items() if text]
    return replace(outcome, verdict=Verdict.FAIL if outcome.findings else Verdict.PASS)


def _place(answer: Array) -> Callable[[int], str]:
    return lambda place: f" at {[int(each) for each in np.unravel_index(place, answer.shape)]}"


def _judged(outcome: Outcome, entry: Entry, problem: Problem, arrays: Tensors, tolerance: Tolerance) -> Outcome:
    outcome = shaped(outcome, problem)
    loss, dlogits, refused = (arrays.get(f"{entry.name}/{each}") for each in _RESULTS)
    refusable = entry.expects is Expects.REFUSAL
    if refused is None and (loss is None or (dlogits is None and entry.gradient and not refusable)):
        outcome.verdict, outcome.note = Verdict.NOT_OFFERED, "it, or its gradient, is not among the results"
    elif refused is None and refusable:
        outcome.verdict = Verdict.FAIL
        outcome.findings = [Finding("not refused", "gives an answer, and a refusal was due")]
    else:
        case = Case(entry.name, entry.catches, entry.dtype, lambda setting: problem, expects=entry.expects, form=True)
        answers = [Answer(loss, _part(problem, dlogits, rank)) for rank in range(problem.ranks)]  # type: ignore[arg-type]
        returned = [([(0, "", answer)], list[Finding]()) for answer in answers]
        errors = [None if refused is None else "no answer is given"] * problem.ranks
        settle(outcome, case, lambda which: problem, errors, returned, tolerance, {})
    return outcome


def _part(problem: Problem, dlogits: Array | None, rank: int) -> Array | None:
    """Return a rank's part of a gradient; of one of another shape, which the judge tells, the whole."""
    return dlogits if dlogits is None or dlogits.shape != problem.logits.shape else problem.part(dlogits, rank)


# Vectors with bits: `docs/the-bits.md` specifies the arithmetic that gives them. All logits are integers times powers
# of two, so that no generator of another version draws others.

_BIT_DTYPES = "float32", "bfloat16", "float16", "float64"
_ROWS, _CLASSES, _SPLITS = 6, 37, (0, 5, 5, 21, 37)
# The gradients of the statistics from which `dstatistics` follows, and those of one of them alone: products with the
# second are zeros with a sign.
_UPSTREAM = {"log_prob": 1.0, "entropy": 0.5, "logsumexp": 0.25}
_UPSTREAM_OF_ONE = {"log_prob": 1.0, "logsumexp": -(2.0**-1074)}
_MOST = float(np.finfo(np.float64).max)
# Options by name; statistics have those that are functions of the logits.
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half-scale": {"reduction": "none", "logit_scale": 0.5},
    "scale": {"reduction": "sum", "logit_scale": 0.7},
    "softcap": {"reduction": "none", "softcap": 30.0},
    "weight": {"weight": True},
    "z_loss": {"reduction": "none", "z_loss": 0.01},
    "smoothing": {"reduction": "none", "label_smoothing": 0.1},
    "everything": {"weight": True, "label_smoothing": 0.25, "z_loss": 0.125, "logit_scale": 1.5},
    "double": {"reduction": "none", "compute_dtype": "float64"},
}
_OF_LOGITS = {"logit_scale", "softcap", "compute_dtype", "ignore_index"}
_BIT_KINDS = ("ordinary", "peaked", "offset", "sizes", "huge", "special", "ties", "halfway")


def export_bits(folder: PathLike) -> int:
    """Write the vectors to `folder`, and return how many there are. Needs safetensors."""
    return write(Path(folder), bit_vectors())


def bit_vectors() -> Iterator[Vector]:
    """Yield each vector with bits, with its tensors: the problem, and its results."""
    for dtype in _BIT_DTYPES:
        for name, options in _OPTIONS.items():
            for kind in _BIT_KINDS:
                if (dtype, kind) == ("float16", "huge") or (dtype, name) == ("float64", "double"):
                    continue  # its logits cannot be huge; its arithmetic is double anyway
                chosen = {"reduction": "mean", **options}
                more = {"weight": _weight()} if chosen.pop("weight", False) else {}
                yield vector_of(f"{dtype}/{name}/{kind}", chosen, *_drawn(dtype, kind), **more)
    for called, options, problem in _edges():
        yield vector_of(called, options, **problem)


def vector_of(called: str, options: dict[str, Any], logits: Array, targets: Array, **more: Array) -> Vector:
    """Return a vector with bits, of a problem whose classes are cut at `_SPLITS`."""
    tensors = {"logits": logits, "targets": targets, **more}
    results = _results_of(options, **tensors)
    others = {name: value for name, value in options.items() if name != "reduction"}
    problem = Problem(logits, targets, _SPLITS, KINDS["loss"], others, options["reduction"])
    entry = replace(_entry(called, problem, "other bits"), bits=tuple(results))
    return entry, tensors | {f"expected_{name}": array for name, array in results.items()}


def _weight() -> Array:
    return (np.arange(_CLASSES) % 7 + 1) / 4


def _results_of(
    options: dict[str, Any], logits: Array, targets: Array, weight: Array | None = None, dloss: Any = 1.0
) -> dict[str, Array]:
    """Return the results of a problem by name, in one process."""
    value, residuals = loss.softmax_cross_entropy_forward(logits, targets, weight=weight, **options)
    results = {"loss": value, "dlogits": loss.softmax_cross_entropy_backward(dloss, residuals)}
    results["loss_states"] = _states_of(residuals.problem, loss_fields(residuals.problem))
    if weight is None and not options.keys() - _OF_LOGITS - {"reduction"}:
        of_logits: Any = {name: options[name] for name in _OF_LOGITS & options.keys()}
        statistics, of_statistics = loss.class_statistics_forward(logits, targets, **of_logits)
        results |= {name: np.asarray(getattr(statistics, name)) for name in _UPSTREAM}
        results["dstatistics"] = loss.class_statistics_backward(of_statistics, **_UPSTREAM)
        results["statistics_states"] = _states_of(of_statistics.problem, statistics_fields(with_targets=True))
        if "ignore_index" in options:
            for name, gradient in _UPSTREAM_OF_ONE.items():
                results[f"d{name}"] = loss.class_statistics_backward(of_statistics, **{name: gradient})
    return results


def _states_of(problem: LossProblem, fields: StateFields) -> Array:
    """Return the states of the shards, and last what they merge to, (shards + 1, rows, bytes)."""
    kernel, how, weights = problem.kernel, Pass(fields, problem.transform, problem.precision), problem.class_weights
    logits, columns = rows_and_classes(problem.logits, problem.options.axis), problem.target_column
    assert columns is not None  # targets are class numbers
    shards = []
    for start, stop in pairwise(_SPLITS):
        weight = None if weights.weight is None else weights.weight[start:stop]
        of_shard = weights._replace(weight=weight)
        states = kernel.fill_states(logits[:, start:stop], columns - start, how, of_shard, start)
        if fields.weighted_logit and weight is not None:
            states = with_class_weights(states, kernel.sums_of(weight)[0], fields, np)
        shards.append(states)
    merged = shards[0].copy()
    for states in shards[1:]:
        kernel.merge(states, merged, how)
    every = np.array([*shards, merged])
    return every.view(np.uint8).reshape(*every.shape, fields.dtype.itemsize)


def _edges() -> Iterator[tuple[str, dict[str, Any], dict[str, Array]]]:
    """Yield the name, the options and the tensors of problems at the edges of what the page says."""
    none, smoothing = {"reduction": "none"}, {"label_smoothing": 0.125}
    small, large = _drawn("float32", "ordinary")[0], _drawn("float64", "ordinary")[0]

    x, ignoring = small.copy(), {"ignore_index": 9, **none}
    x[0, 5], x[1, 6], x[2:4], x[4, 7] = np.nan, np.inf, -np.inf, np.nan
    problem = {"logits": x, "targets": np.array([0, 1, 2, 9, 9, 3])}
    yield "float32/edges/no-upstream", ignoring, problem
    yield "float32/edges/no-softmax", ignoring, problem | {"weight": np.where(np.arange(_CLASSES) < 3, 0.0, 1.5)}

    x = large.copy()
    x[:, ::5] = -np.inf
    problem = {"logits": x, "targets": np.array([1, 2, 3, 4, 6, 7]), "weight": np.arange(_CLASSES) % 2 / 1.0}
    problem["dloss"] = np.array([-0.0, -1.5, 0.0, 2.0, -0.0, np.inf])
    yield "float64/edges/zero-factor", none, problem

    x, weight = large.copy(), _weight()
    x[2, 8:], x[3, 20:], x[4, 1], x[5, 3] = -np.inf, -np.inf, np.nan, -np.inf
    weight[3] = np.inf
    problem = {"logits": x, "targets": np.array([3, 1, 2, 3, 4, 5]), "weight": weight}
    yield "float64/edges/infinite-weight", smoothing | none, problem

    x, weight = small.copy(), _weight()
    x[0, 8], x[1, 10], x[2, 8:], x[3, 9], x[4, [4, 8]], x[5, 8] = [-np.inf] * 6
    weight[8:10] = -1.0, 0.0
    problem = {"logits": x, "targets": np.array([1, 1, 2, 3, 4, 8]), "weight": weight}
    yield "float32/edges/masked-weight", smoothing | none, problem

    x, most = large.copy(), 1.75 * 2.0**1023
    x[0, 3], x[1, 4], x[2, 5], x[3, [6, 7]], x[4, [7, 8]], x[5, 9] = most, most, -most, most, [most, most / 1.5], -most
    problem = {"logits": x, "targets": np.array([0, 4, 1, 6, 8, 9])}
    yield "float64/edges/overflow", none | {"logit_scale": 64.0}, problem
    yield "float64/edges/smooth-overflow", none | smoothing | {"logit_scale": 64.0}, problem

    yield from _edges_of_size(large)

    weight = _weight()
    weight[1:3] = 1.0, -1.0
    problem = {"logits": small, "targets": np.array([1, 2, 1, 2, -100, -100]), "weight": weight}
    yield "float32/edges/no-weight", {"reduction": "mean", **smoothing}, problem | {"dloss": np.array(2.0)}


def _edges_of_size(ordinary: Array) -> Iterator[tuple[str, dict[str, Any], dict[str, Array]]]:
    """Yield problems whose logits, weights or gradients are as large or as small as float64 has them, or zeros."""
    none, targets = {"reduction": "none"}, np.arange(3, 9)

    x = ordinary.copy()
    x[0, [3, 4]], x[1, [3, 4]], x[2], x[4, 7] = _MOST, 2.0**997, -(2.0**997), _MOST
    x[3, [6, 30]], x[4, 9], x[5, [4, 6]] = 1.125 * 2.0**62, np.nextafter(_MOST, 0.0), 1.25 * 2.0**100
    yield "float64/edges/ties-of-large", none | {"logit_scale": 0.001}, {"logits": x, "targets": targets}

    problem = {"logits": _MOST - (ordinary + 8.0) * 2.0**999, "targets": targets}
    yield "float64/edges/low-of-large", none | {"logit_scale": 1e-300}, problem

    offsets = np.array([2.0**21, -(2.0**22), 2.0**24, 2.0**26, -(2.0**28), 2.0**29])
    yield "float64/edges/far", none, {"logits": ordinary + offsets[:, None], "targets": targets}

    x = ordinary.copy()
    x[0, 3], x[1, 4], x[2, 9], x[3, [6, 7]], x[4, 9] = 2.0**70, _MOST, 2.0**80, [2.0**80, 2.0**70], -(2.0**997)
    problem = {"logits": x, "targets": targets, "dloss": np.full(_ROWS, -1.5)}
    yield "float64/edges/held-alone", none, problem

    # A class number that is ignored is the target of no row; -0.0 is held, and the largest of others.
    x = np.full((_ROWS, _CLASSES), 5.0)
    x[1::2] = -0.0
    x[2:4, 2:] = -np.inf
    problem = {"logits": x, "targets": np.array([0, 1, 0, 1, 1, 0])}
    yield "float64/edges/ignored-class", none | {"ignore_index": 0}, problem
    yield "float32/edges/ignored-class", none | {"ignore_index": 0}, problem | {"logits": x.astype(np.float32)}

    # Between two numbers of half precision, but for a digit that float32 does not have.
    for dtype, digits in ("float16", 11), ("bfloat16", 8):
        x = np.full((_ROWS, _CLASSES), -np.inf)
        x[:, [3, 20]] = 0.0
        dloss = 2.0 + 2.0 ** (1 - digits) + np.array([0.0, 1.0, -1.0, 2.0, -2.0, 4.0]) * 2.0**-40
        problem = {"logits": x.astype(dtype_named(dtype)), "targets": np.full(_ROWS, 3), "dloss": dloss}
        yield f"{dtype}/edges/between", none | {"compute_dtype": "float64"}, problem

    yield from _edges_of_weights(ordinary, targets)


def _edges_of_weights(ordinary: Array, targets: Array) -> Iterator[tuple[str, dict[str, Any], dict[str, Array]]]:
    """Yield problems whose weights, or products with them, are at the ends of float64."""
    none, smoothing = {"reduction": "none"}, {"label_smoothing": 0.125}

    x, weight = ordinary.copy(), _weight()
    x[1, 9], weight[9] = 2.0**34, _MOST
    problem = {"logits": x, "targets": targets, "weight": weight}
    yield "float64/edges/large-weight", none | {"label_smoothing": 1e-10}, problem

    x, weight = np.zeros((_ROWS, _CLASSES)), _weight()
    weight[20:23] = 2.0**40, 1.0 + 2.0**-52, -1.5
    x[0, 20], x[1, 20], x[3, 22], x[4] = 2.0**1000, -(2.0**1000), 2.0**900, 1.25 * 2.0**1000
    x[2, 21] = 1.0 - 2.0**-52  # the product is rounded to 1, and needs a coarser grid than it would exactly
    yield "float64/edges/large-products", none | smoothing, {"logits": x, "targets": targets, "weight": weight}

    x, weight = ordinary.copy(), _weight()
    x[0, 9], x[1, 9], x[2, 9], x[3, 6], x[5] = np.nan, _MOST, -_MOST, _MOST, -_MOST
    weight[3:6] = 0.0
    problem = {"logits": x, "targets": targets, "weight": weight}
    yield "float64/edges/zero-weight", none | smoothing | {"logit_scale": 64.0}, problem

    x, weight = ordinary.copy(), _weight()
    x[0], x[0, 3], x[1, 9], weight[3:6], weight[6] = -np.inf, 1.0, np.inf, np.inf, -1.0
    problem = {"logits": x, "targets": targets, "weight": weight}
    yield "float64/edges/certain-infinite-weight", none, problem
    yield "float64/edges/infinite-mean", {"reduction": "mean"}, problem
    yield "float32/edges/infinite-mean", {"reduction": "mean"}, problem | {"logits": x.astype(np.float32)}
    yield "float64/edges/only-smoothing", none | {"label_smoothing": 1.0}, problem

    problem = {"logits": ordinary + 64.0, "targets": targets, "weight": _weight() * 2.0**1023}
    yield "float64/edges/large-total", none | {"z_loss": 2.0**1015}, problem

    x, weight = np.full((_ROWS, _CLASSES), -(2.0**38)), np.zeros(_CLASSES)
    x[:, 3:6] = np.array([-4343872457926681 / 2.0**14, -453932013787835 / 2.0**16, 7732713948642155 / 2.0**36])
    x[1::2] = ordinary[1::2] - 2.0**40
    weight[3:6] = np.array([8.0, 13.0, 454.0]) * 2.0**-1074
    weight[6:] = (1.0 + np.arange(6, _CLASSES) / _CLASSES) * 2.0**-1015  # whose products have subnormal errors
    problem = {"logits": x, "targets": np.array([3, 4, 5, 3, 4, 5]), "weight": weight}
    yield "float64/edges/subnormal-weights", none | {"label_smoothing": 1.0}, problem


def _drawn(dtype: str, kind: str) -> tuple[Array, Array]:
    """Return logits and targets."""
    rng = np.random.default_rng(_BIT_KINDS.index(kind))
    x: Array = rng.integers(-(2**12), 2**12, (_ROWS, _CLASSES)) / 2.0**9
    targets = rng.integers(0, _CLASSES, _ROWS)
    rows, most = np.arange(_ROWS), 2.0 ** {"float16": 14, "float64": 900}.get(dtype, 120)
    if kind == "peaked":
        x[rows, targets] += 2.0 ** np.arange(2, 8)
        x[0, targets[0]] = -300.0
    elif kind == "offset":
        x += np.array([2040.0, -2048.0, 3000.0, -30000.0, 512.0, 50.0])[:, None]
        x[4] *= 4.0
    elif kind == "sizes":
        x *= 2.0 ** rng.integers(-30, 12, x.shape)
    elif kind == "huge":
        x *= 2.0 ** rng.integers(15, 60, x.shape)
        x[0, :3] = most, most, -most
        x[1, 7], x[1, targets[1]] = 2.0**61, -(2.0**61)
        x[2] = -most
        x[3], x[3, targets[3]] = x[3] / 2.0**50, most
    elif kind == "special":
        x[0, ::3], x[0, targets[0]] = -np.inf, 0.0
        x[1, targets[1]], x[2] = -np.inf, -np.inf
        x[3, 5], x[4, 6], targets[5] = np.inf, np.nan, -100
    elif kind == "ties":
        x = np.sign(x)
    elif kind == "halfway":  # between two n, which float32 and float64 round apart
        x[:] = (rng.integers(2800, 2950, x.shape) + 0.5) * 0.6931471805599453
    with np.errstate(over="ignore"):
        return x.astype(dtype_named(dtype)), targets
