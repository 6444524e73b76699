"""Take the differences between a trainer's log-probabilities and a rollout's apart: which part comes from what.

From the first recording to the second, one thing changes at a time: the dtype that the head rounds its logits to, the
temperature, the padded classes, and the classes that top-k, top-p and min-p leave. The exact log-probabilities before
and after each change differ by its part; the rest is neither's, or an error of one of the two. Options that the second
recording does not have are those of the first.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.judging.comparing import coarsest
from pce_mpi.conformance.offline.recording_errors import LEAST_ROWS, fitted_sampling, spread
from pce_mpi.conformance.offline.recordings import LOGITS, Recording, each_piece, pieces
from pce_mpi.conformance.problems.problem import Array
from pce_mpi.kernels import standard_arithmetic
from pce_mpi.loss import class_statistics
from pce_mpi.loss.nucleus import Limits, nucleus_of
from pce_mpi.loss.options import Options

# The options of the second recording that have a part.
_READ = {"logits_dtype", "logit_scale", "num_classes", *Limits._fields}
# ... and what others say that is said by leaving them out.
_SAYS_NOTHING = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "smoothing": "all"}
# Kernels that round otherwise leave differences of a smaller mean size. The rest is looked at in so many tokens.
_SMALL, _ROWS = 1e-3, 8
PARTS = ("head", "temperature", "padded classes", "kept mass", "rest")


class Differences:
    """Takes the differences of all tokens apart: first `run`, to its end; `ValueError` if recordings do not fit.

    targets  (rows,) class numbers
    whole    (rows,) the second recording's log-probability less the first one's
    parts    by the name of each part, (rows,); they add up to `whole`
    valid    (rows,) the tokens that are not ignored
    outside  (rows,) the tokens that top-k, top-p and min-p of the second recording do not keep
    """

    def __init__(self, first: Recording, second: Recording) -> None:
        for recording in (first, second):
            if not recording.has("log_prob") or recording.targets is None:
                raise ValueError(f"{recording.path}: differences need a log_prob of targets that are class numbers")
        for name, value in second.options.items():
            if name not in _READ and first.options.get(name, _SAYS_NOTHING.get(name)) != value:
                raise ValueError(f"{second.path}: {name} = {value} is not an option of {first.path}, and has no part")
        self.targets: Array = np.asarray(first.targets)
        if not np.array_equal(self.targets, np.asarray(second.targets)):
            raise ValueError(f"{second.path}: its targets are not those of {first.path}")
        self._first, self._second = first, second
        self._classes = second.options.get("num_classes", first.classes)
        if not int(self.targets.max(initial=0)) < self._classes <= first.splits[-1]:
            raise ValueError(f"{second.path}: num_classes = {self._classes} does not fit the targets or the logits")
        self._limits = Limits(*(second.options.get(name) for name in Limits._fields))
        try:
            self._limits.checked()
        except ValueError as error:
            raise ValueError(f"{second.path}: {error}") from error
        self.whole = second.losses("log_prob")[0].astype(np.float64) - first.losses("log_prob")[0].astype(np.float64)
        self.parts = {name: np.zeros(first.rows) for name in PARTS}
        self.valid = self.targets != first.options.get("ignore_index", -100)
        self.outside = np.zeros(self.targets.shape, np.bool_)

    @property
    def compared(self) -> Array:
        """The rows of tokens that have a mean and a place in a table: those whose difference is finite."""
        return np.flatnonzero(self.valid & np.isfinite(self.whole))

    def left_out(self) -> Iterator[tuple[str, Array]]:
        """Yield in words why tokens that count have a difference that is not finite, and their rows."""
        infinite = self.valid & ~np.isfinite(self.whole)
        unlikely = infinite & self.outside & (self.whole == -np.inf)
        words = {"top_k": "top-k {}", "top_p": "top-p {:g}", "min_p": "min-p {:g}"}
        limits = [words[name].format(value) for name, value in self._limits._asdict().items() if value is not None]
        for text, rows in (
            (f"outside what {' and '.join(limits)} keeps: the rollout gives them probability 0", unlikely),
            ("of a difference that is not finite, and nothing that was recorded tells why", infinite & ~unlikely),
        ):
            if rows.any():
                yield text, np.flatnonzero(rows)

    @property
    def unknown_head(self) -> str:
        """Say why nothing is known of the second head; '' if something is."""
        wanted, dtype = self._second.options.get("logits_dtype", ""), self._first.dtype.name
        if wanted in ("", dtype) or self._first.has("hidden") or coarsest(wanted, dtype) == wanted:
            return ""
        return f"the head's part is in the rest: logits that were recorded in {dtype} do not tell those in {wanted}"

    def run(self) -> Iterator[int]:
        """Fill in all parts; yield now and then how many rows are done."""
        for rows, _ in each_piece(self._measure, pieces(self._first)):
            yield int(rows[-1]) + 1
        with np.errstate(invalid="ignore"):
            self.parts["rest"] = self.whole - sum(self.parts[name] for name in PARTS[:-1])

    @np.errstate(all="ignore")
    def explanation(self) -> str:
        """Say which options, not recorded, would explain the rest; '' if it is small. Looks at some tokens."""
        rest, known = self.parts["rest"], self._second.options
        rows = spread(np.flatnonzero(self.valid & np.isfinite(rest)), max(_ROWS, LOGITS // self._classes))
        size = float(np.abs(rest[rows]).mean()) if len(rows) else 0.0
        wanted = ["logit_scale"] * ("logit_scale" not in known) + ["top_p"] * (not known.keys() & set(Limits._fields))
        if size < _SMALL or len(rows) < LEAST_ROWS or not wanted:
            return ""
        scale, softcap = self._scales[1], self._first.options.get("softcap")
        logits = self._heads(self._first.logits(rows))[1][:, : self._classes]
        fitted = fitted_sampling(logits, self.targets[rows], rest[rows], scale, softcap, wanted)
        if fitted is None:
            names = " and no ".join({"logit_scale": "temperature", "top_p": "top-p"}[name] for name in wanted)
            return f"the rest has a mean size of {size:.3g}, and no {names} explains it"
        options, left = fitted
        words = {"logit_scale": lambda value: f"a temperature of {scale / value:.4g}{' more' * (scale != 1.0)}"}
        words["top_p"] = lambda value: f"top-p {value:g}"
        causes = " and ".join(words[name](value) for name, value in options.items())
        told = ", ".join(f"{name}={value:.6g}" for name, value in options.items())
        return (
            f"{causes} would explain the rest: {left:.3g} of its mean size of {size:.3g} would be left; where that is "
            f"meant, record {told} with the rollout"
        )

    @property
    def _scales(self) -> list[float]:
        """The logit_scale of both recordings."""
        scale = self._first.options.get("logit_scale", 1.0)
        return [scale, self._second.options.get("logit_scale", scale)]

    def _heads(self, logits: Array) -> list[Array]:
        """Return logits as the heads of both recordings round them."""
        first, second = self._first, self._second
        own = compute_dtype_of(first.dtype).name if first.has("hidden") else first.dtype.name
        dtypes = [first.options.get("logits_dtype", own)]
        dtypes.append(dtypes[0] if self.unknown_head else second.options.get("logits_dtype", dtypes[0]))
        return [logits.astype(dtype_named(dtype)).astype(np.float64) for dtype in dtypes]

    @np.errstate(all="ignore")
    def _measure(self, rows: Array) -> None:
        first, targets = self._first, self.targets[rows]
        heads, scales = self._heads(first.logits(rows)), self._scales
        ignored = first.options.get("ignore_index", -100)
        softcap = first.options.get("softcap")
        known: dict[str, Any] = {"ignore_index": ignored, "softcap": softcap}

        def log_prob(head: int, scale: int, classes: int) -> Array:
            z = heads[head][:, :classes]
            return np.asarray(class_statistics(z, targets, logit_scale=scales[scale], **known).log_prob)

        changes = (0, 0, first.classes), (1, 0, first.classes), (1, 1, first.classes), (1, 1, self._classes)
        numbers = [log_prob(*each) for each in changes]
        for name, before, after in zip(("head", "temperature", "padded classes"), numbers, numbers[1:], strict=False):
            self.parts[name][rows] = after - before
        if any(limit is not None for limit in self._limits):
            z = scales[1] * heads[1][:, : self._classes]
            z = z if softcap is None else np.where(np.isinf(z), z, softcap * np.tanh(z / softcap))
            with standard_arithmetic():
                kept = nucleus_of(Options(operation="nucleus"), z, self._limits)
            support = kept.ids, kept.offsets
            of_row = np.repeat(np.arange(len(rows)), np.diff(kept.offsets))
            self.outside[rows] = ~np.isin(np.arange(len(rows)), of_row[kept.ids == targets[of_row]])
            within = class_statistics(z, targets, ignore_index=ignored, support=support, outside="add").log_prob
            self.parts["kept mass"][rows] = within - numbers[-1]
