"""Recordings of a call, one safetensors file for each rank, which may be broken or malicious; and pieces of them, the
problems of some of their rows.

A file has `logits`, with the classes of its rank in the last axis, or `hidden`, the same on every rank, and `w`
(features, classes of its rank); `targets`; any of `loss`, `log_prob`, `entropy` and `gradient`; and `weight`. The
gradient is shaped as the logits, and that of the first of the three before it, summed. The metadata have `rank`,
`ranks` and the options of the call.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
import math
from pathlib import Path
import threading
from typing import Any, NoReturn, TypeVar

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import is_floating
from pce_mpi.conformance.problems.cases import DTYPES, OPTIONS, REDUCTIONS, has_dtype
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.problems.textbook import Textbook
from pce_mpi.distributed.tensor_files import TensorFile
from pce_mpi.jobs.mpiexec import number_of_cores
from pce_mpi.loss.options import Options, checked_numbers
from pce_mpi.loss.problem import target_text
from pce_mpi.text import names_shown, shown

# The results that are one number for a row.
NUMBERS = ("loss", "log_prob", "entropy")
_TENSORS = ("logits", "hidden", "w", "targets", "weight", *NUMBERS, "gradient")
# The features of hidden and w that are multiplied at once.
_FEATURES = 128


def _one_of(*words: str) -> Callable[[str], str]:
    def parsed(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return text

    return parsed


def _dtype(text: str) -> str:
    if not has_dtype(_one_of(*DTYPES)(text)):
        raise ValueError("it needs ml_dtypes: pip install 'pce_mpi[bf16]'")
    return text


def _number(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError("a number is due")
    return number


# The names of metadata, and what their texts say.
_METADATA: dict[str, Callable[[str], Any]] = {
    "rank": int,
    "ranks": int,
    **{name: int if name == "ignore_index" else _number for name in OPTIONS if name != "weight"},
    "reduction": _one_of(*REDUCTIONS),
    "smoothing": _one_of("all", "others"),
    "num_classes": int,
    "logits_dtype": _dtype,
    "top_k": int,
    "top_p": _number,
    "min_p": _number,
}
_IGNORED = {"format"}  # other writers add it


class Recording:
    """An open recording; `ValueError` or `OSError`, which name a file, if there is none.

    path                the folder, or the only file
    rows_shape, rows    the shape of the targets, and how many they are
    targets             (rows,) class numbers; None: probabilities
    splits              the shard of rank r has the classes [splits[r], splits[r + 1]), some of which may be padding
    classes             those that are no padding
    dtype               of the logits, or of hidden
    reduction           of the loss: that of the metadata or, if they have none, what its shape tells
    options             of the metadata, by name
    weight              of all classes, or None
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock, self._open = threading.Lock(), contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._files, self.options = self._opened()
            self._check_shapes()
            self._check_values()
            on_error.pop_all()

    def close(self) -> None:
        self._open.close()

    def has(self, name: str) -> bool:
        """Return True if the files have a tensor of this name."""
        return name in self._first.arrays

    def losses(self, name: str) -> list[Array]:
        """Return one of `NUMBERS` as each rank has it: a number for each row, or one."""
        shape = () if name == "loss" and self.reduction != "none" else (self.rows,)
        return [file.read(name).reshape(shape) for file in self._files]

    def rows_of(self, name: str, rows: Array) -> list[Array]:
        """Return some rows, in ascending order, of a tensor with an axis of classes or features, for each rank."""
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        with self._lock:
            return [
                np.concatenate([file.read_rows(name, int(run[0]), int(run[-1]) + 1) for run in runs])
                for file in self._files
            ]

    def logits(self, rows: Array) -> Array:
        """Return logits of all classes, padding too: as they were recorded, or hidden @ w in float64."""
        if self.has("logits"):
            return np.concatenate(self.rows_of("logits", rows), axis=-1)
        hidden, *others = self.rows_of("hidden", rows)
        if any(other.tobytes() != hidden.tobytes() for other in others):
            self._refuse("hidden is not the same on every rank")
        product = np.zeros((len(rows), self.splits[-1]))
        for start in range(0, hidden.shape[-1], _FEATURES):
            some = np.arange(start, min(start + _FEATURES, hidden.shape[-1]))
            w = np.concatenate(self.rows_of("w", some), axis=-1).astype(np.float64)
            product += hidden[:, some].astype(np.float64) @ w
        return product

    @cached_property
    def largest_of_w(self) -> float:
        """The largest norm of a column of w, without padding."""
        features, squares = self._first.arrays["w"][0], np.zeros(self.splits[-1])
        for start in range(0, features, _FEATURES):
            some = np.arange(start, min(start + _FEATURES, features))
            squares += (np.concatenate(self.rows_of("w", some), axis=-1).astype(np.float64) ** 2).sum(axis=0)
        return math.sqrt(squares[: self.classes].max())

    @property
    def _first(self) -> TensorFile:
        return self._files[0]

    def _refuse(self, reason: str, file: Path | None = None) -> NoReturn:
        raise ValueError(f"{file or self.path}: {reason}")

    def _opened(self) -> tuple[list[TensorFile], dict[str, Any]]:
        """Open the files, in the order of the ranks, and return them and the options."""
        paths = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not paths:
            self._refuse("the folder has no file called *.safetensors")
        by_rank: dict[int, tuple[TensorFile, dict[str, Any]]] = {}
        for path in paths:
            file = self._open.enter_context(TensorFile(path))
            options = self._metadata(path, file.metadata)
            rank, ranks = options.pop("rank"), options.pop("ranks")
            if rank in by_rank or not 0 <= rank < ranks:
                self._refuse(f"it is rank {rank} of {ranks}" + ", as another file" * (rank in by_rank), path)
            if ranks != len(paths):
                self._refuse(f"it is one of {ranks} ranks, and there are {len(paths)} files", path)
            self._check_names(path, file)
            by_rank[rank] = file, options
        (first, options), *others = (by_rank[rank] for rank in range(len(by_rank)))
        for rank, (file, its) in enumerate(others, start=1):
            if its != options:
                self._refuse(f"the options of rank 0 are {shown(options)}, and those of rank {rank} {shown(its)}")
            if file.arrays.keys() != first.arrays.keys():
                self._refuse(f"ranks 0 and {rank} have other tensors")
        return [first, *(file for file, _ in others)], options

    def _metadata(self, path: Path, texts: Mapping[str, str]) -> dict[str, Any]:
        values = {}
        for name, text in texts.items():
            if name in _IGNORED:
                continue
            if name not in _METADATA:
                self._refuse(f"unknown metadata {shown(name)}; known are {', '.join(_METADATA)}", path)
            try:
                values[name] = _METADATA[name](text)
            except ValueError as error:
                self._refuse(f"the metadata {name} = {shown(text)}: {error}", path)
        if missing := [name for name in ("rank", "ranks") if name not in values]:
            self._refuse(f"its metadata have no {missing[0]}", path)
        return values

    def _check_names(self, path: Path, file: TensorFile) -> None:
        names = file.arrays.keys()
        if unknown := sorted(names - set(_TENSORS)):
            self._refuse(f"unknown tensors {names_shown(unknown)}; known are {', '.join(_TENSORS)}", path)
        if "targets" not in names:
            self._refuse("it has no targets", path)
        if (heads := names & {"logits", "hidden", "w"}) not in (set(), {"logits"}, {"hidden", "w"}):
            self._refuse(f"it has {' and '.join(sorted(heads))}, where logits, or hidden and w, are expected", path)
        if "hidden" in names and "gradient" in names:
            self._refuse("a gradient is that of logits, and it has hidden and w in their place", path)
        if file.arrays.get("hidden") == ():
            self._refuse("hidden has shape (), where (..., features) is due", path)
        for name in names:
            try:
                floating = is_floating(file.dtype(name))
            except ValueError as error:
                self._refuse(str(error), path)
            if not floating and (name != "targets" or file.dtype(name).kind not in "iu"):
                self._refuse(f"{name} has dtype {file.dtype(name)}", path)

    def _check_shapes(self) -> None:
        """Compare the shapes of all tensors of all ranks, and set the attributes that follow from them."""
        head = next((name for name in ("logits", "hidden") if self.has(name)), None)
        probabilities = is_floating(self._first.dtype("targets"))
        if probabilities and head != "logits":
            self._refuse("targets that are probabilities need logits")
        self.rows_shape = self._first.arrays["targets"][: -1 if probabilities else None]
        self.rows = math.prod(self.rows_shape)
        columns = {"logits": "logits", "hidden": "w", None: None}[head]
        lengths = [file.arrays[columns][-1] if columns and file.arrays[columns] else 0 for file in self._files]
        self.splits = (0, *accumulate(lengths))
        for rank, (file, local) in enumerate(zip(self._files, lengths, strict=True)):
            features = self._first.arrays["hidden"][-1:] if head == "hidden" else ()
            whole = (*self.rows_shape, local)
            due = {"logits": whole, "gradient": whole, "hidden": (*self.rows_shape, *features), "w": (*features, local)}
            due |= {"weight": (local,), "targets": whole if probabilities else self.rows_shape}
            for name, shape in file.arrays.items():
                if name == "loss" and shape in ((), (1,)):
                    continue
                if shape != due.get(name, self.rows_shape):
                    text = f"{name} has shape {shape} on rank {rank}, where {due.get(name, self.rows_shape)} is due"
                    self._refuse(text)
                if name in ("logits", "hidden", "w") and file.dtype(name) != self._first.dtype(name):
                    self._refuse(f"{name} has dtype {self._first.dtype(name)} on rank 0, {file.dtype(name)} on {rank}")
        if not self.rows or (head and not self.splits[-1]):
            self._refuse(f"it has {self.rows} rows and {self.splits[-1]} classes")
        self.dtype = self._first.dtype(head) if head else np.dtype(np.float32)
        by_shape = "none" if self._first.arrays.get("loss", self.rows_shape) == self.rows_shape else "mean"
        self.reduction = self.options.get("reduction", by_shape)
        if self.has("loss") and self.rows_shape and (self.reduction == "none") != (by_shape == "none"):
            shape = self._first.arrays["loss"]
            self._refuse(f"reduction is {self.reduction!r}, and the loss has shape {shape} for {self.rows} rows")

    def _check_values(self) -> None:
        """Look at options and targets as the loss itself does, and set the attributes that are made of them."""
        options, classes = dict(self.options), self.splits[-1]
        self.classes = options.pop("num_classes", classes)
        of_loss = {name: value for name, value in options.items() if name in {*OPTIONS, "reduction"}}
        try:
            checked_numbers(Options(operation="judge", **of_loss), 2, self.dtype)
        except ValueError as error:
            self._refuse(str(error))
        if not 0 < self.classes <= classes and classes:
            self._refuse(f"num_classes = {self.classes}, and the shards have {classes} classes")
        weights = [file.read("weight") for file in self._files if self.has("weight")]
        self.weight = np.concatenate(weights)[: self.classes] if weights else None
        self.targets = None
        if is_floating(self._first.dtype("targets")):
            return
        targets, *others = (file.read("targets").reshape(-1) for file in self._files)
        for rank, other in enumerate(others, start=1):
            if (different := np.flatnonzero(targets != other)).size:
                self._refuse(f"the targets of rank {rank} differ from those of rank 0 in row {different[0]}")
        last = self.classes if classes else np.iinfo(np.int64).max
        inside = (targets < last) & ((targets >= 0) | (not classes)) | (targets == options.get("ignore_index", -100))
        if not inside.all():
            wrong = target_text(targets, self.rows_shape, int(np.flatnonzero(~inside)[0]))
            self._refuse(f"{wrong} is outside [0, {last})")
        self.targets = targets.astype(np.int64)


T = TypeVar("T")

# A piece has so many logits; where they are products of which w is read again for each piece, more.
LOGITS, _PRODUCTS = 2**18, 2**23


def pieces(recording: Recording) -> list[Array]:
    """Return the numbers of the rows of each piece of a recording."""
    rows = max(1, (_PRODUCTS if recording.has("hidden") else LOGITS) // recording.splits[-1])
    return np.array_split(np.arange(recording.rows), -(-recording.rows // rows))


def each_piece(work: Callable[[Array], T], all_rows: list[Array]) -> Iterator[tuple[Array, T]]:
    """Yield each piece and the result of the work on it; several are worked on at once."""
    # Once a block of this size was freed, the allocator keeps smaller ones: pages of new ones took half of the time.
    np.empty(2**25 - 2**20, np.uint8)
    with ThreadPoolExecutor(number_of_cores()) as pool:
        try:
            yield from zip(all_rows, pool.map(work, all_rows), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, eq=False)
class Piece(Problem):
    """Some rows of a recording; `sums` has the largest sum in the products of each, 0 where logits are recorded.

    `flips` has how much the number of each changes where errors of products round logits to the other neighbour.
    """

    sums: Array = field(default_factory=lambda: np.zeros(0))
    flips: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def largest_sums(self) -> Array:
        """As of `Problem`, whose factors need not be in memory here."""
        return self.sums

    @property
    def room(self) -> Array:
        """As of `Problem`."""
        if self.reduction == "none":
            return self.flips.reshape(self.rows_shape)
        return np.asarray(self.flips.sum() / (Textbook.of(self).divisor if self.reduction == "mean" else 1.0))


def exact_numbers(name: str, problem: Problem, with_gradient: bool = False) -> tuple[Array, Array | None]:
    """Return the exact number of each row and, if wanted, the gradient of their sum; in the arithmetic of float64."""
    options: dict[str, Any] = {**problem.exact_options, "compute_dtype": np.float64}
    out = np.empty(problem.logits.shape) if with_gradient else None
    if name == "loss":
        options["reduction"] = "none"
        if out is None:
            return loss.softmax_cross_entropy(problem.logits, problem.targets, **options), None
        return loss.softmax_cross_entropy_value_and_grad(problem.logits, problem.targets, out=out, **options)
    targets = problem.targets if problem.with_numbers else None
    statistics, residuals = loss.class_statistics_forward(problem.logits, targets, **options)
    numbers = getattr(statistics, name)
    if out is not None:
        loss.class_statistics_backward(residuals, out=out, **{name: np.ones(problem.rows)})
    return numbers, out
