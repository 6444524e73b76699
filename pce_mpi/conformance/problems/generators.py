"""Draw logits, targets, weights and split points from the seed of a setting alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.problems.cases import Setting
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.distributed.placements import shard_range
from pce_mpi.loss.options import ROWS

Splits = tuple[int, ...]


def generator(setting: Setting, shape: Sequence[int]) -> np.random.Generator:
    """Return the generator for logits of this shape; it depends on the seed and the shape alone."""
    return np.random.default_rng([setting.seed, *shape])


def rounded(setting: Setting, values: Any) -> Array:
    """Round `values` to the candidate's dtype."""
    return np.asarray(values, np.float64).astype(dtype_named(setting.dtype))


def even(setting: Setting) -> Splits:
    """Split points of the most equal shards that the offer allows; equal ones may have more classes than asked for."""
    ranks, classes = setting.ranks, setting.classes
    if setting.shards == "array_split":
        classes = max(classes, ranks)
    if setting.shards in ("any", "array_split"):
        return (*(shard_range(classes, ranks, rank)[0] for rank in range(ranks)), classes)
    if setting.shards == "chunks":
        return chunks(classes, ranks)
    each = max(1, math.ceil(classes / ranks))
    return tuple(each * rank for rank in range(ranks + 1))


def uneven(setting: Setting) -> Splits:
    """Split points of non-empty shards of different lengths, as far as the offer allows them."""
    ranks, classes = setting.ranks, setting.classes
    if setting.shards == "equal" or ranks == 1:
        return even(setting)
    if setting.shards != "any":
        return even(replace(setting, classes=classes - (classes % ranks == 0 and classes > ranks)))
    if classes <= ranks:
        return even(setting)
    # 1, 2, 3, 1, 2, 3, ... shares; the last rank takes the remainder
    shares = [1 + rank % 3 for rank in range(ranks)]
    lengths = [max(1, classes * share // (sum(shares) + 1)) for share in shares]
    lengths[-1] += classes - sum(lengths)
    return (0, *accumulate(lengths)) if lengths[-1] > 0 else even(setting)


def chunks(classes: int, ranks: int) -> Splits:
    """Split points of torch.chunk: shards of ceil(classes / ranks), the last ones shorter or empty."""
    each = math.ceil(classes / ranks)
    return tuple(min(classes, each * rank) for rank in range(ranks + 1))


def rows_shape(setting: Setting, axes: int) -> tuple[int, ...]:
    """Return a shape of that many axes of different lengths, or with all rows in the first axis if there are few."""
    shape = (2, 3, 2, 3)[:axes]
    if axes < 2 or setting.rows < math.prod(shape) or (not setting.any_rows and math.prod(shape) % setting.ranks):
        return (setting.rows, *(1,) * (axes - 1))[:axes]
    return shape


def normal_logits(setting: Setting, shape: Sequence[int], scale: float = 3.0) -> Array:
    """Draw normal logits, float64, not yet rounded."""
    return scale * generator(setting, shape).standard_normal(shape)


def random_targets(setting: Setting, shape: Sequence[int], classes: int) -> Array:
    """Draw class numbers, int64, independent of the logits."""
    return np.random.default_rng([setting.seed, 1]).integers(0, classes, shape)


def option_values(setting: Setting, names: Sequence[str], classes: int) -> dict[str, Any]:
    """Return a value for each of these options that changes the loss."""
    rng = np.random.default_rng([setting.seed, 2])
    values: dict[str, Any] = {
        "weight": rounded(setting, rng.uniform(0.25, 2.0, classes)),
        "ignore_index": setting.ignore_index,
        "temperature": 1.75,
        "bias": rounded(setting, np.random.default_rng([setting.seed, 9]).standard_normal(classes)),
    }
    return {name: values[name] if name in values else ROWS[name]["sample"] for name in names}


def random_problem(
    setting: Setting,
    splits: Splits | None = None,
    *,
    options: Sequence[str] = (),
    axes: int = 1,
    axis: int = -1,
    scale: float = 3.0,
    **fields: Any,
) -> Problem:
    """Build a problem of normal logits and random targets; with `ignore_index`, every third row is ignored."""
    splits = even(setting) if splits is None else splits
    classes = splits[-1]
    rows = rows_shape(setting, axes)
    targets = random_targets(setting, rows, classes)
    values = option_values(setting, options, classes)
    if "ignore_index" in values:
        targets.reshape(-1)[1::3] = values["ignore_index"]
    logits = np.moveaxis(normal_logits(setting, (*rows, classes), scale), -1, axis)
    problem = Problem(rounded(setting, logits), targets, splits, setting.kind, values, setting.reduction, axis)
    return replace(problem, **fields)
