"""One classification problem, the same on every rank, and what each rank holds of it.

Every rank builds the whole `Problem` from one seed. `Part` says which rows and classes a rank holds: it cuts them out
of arguments and expectations. `evaluate` calls everything there is, `assert_as_dense` compares.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.dense.losses import with_margin
from pce_mpi.kernels import definition
from pce_mpi.kernels.interface import SINGLE, ClassWeights, Pass, StateFields, Transform
from ulps import FLOAT32, FLOAT64, HALF, OPTIONS, errors, ulp

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Logits and targets of all rows and classes, and the options, with the weights of all classes."""

    logits: Array
    targets: Array
    axis: int = -1
    weight: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        return self.logits.shape[self.axis]

    @property
    def rows_shape(self) -> tuple[int, ...]:
        shape = list(self.logits.shape)
        del shape[self.axis]
        return tuple(shape)

    @property
    def with_probabilities(self) -> bool:
        return self.targets.dtype.kind not in "iu"

    @property
    def reduction(self) -> str:
        return self.options.get("reduction", "mean")

    def dense_options(self) -> dict[str, Any]:
        return dict(self.options, axis=self.axis, weight=self.weight)

    def dense(self) -> tuple[Array, Array]:
        """Loss and gradient, by the oracle."""
        return dense.softmax_cross_entropy_value_and_grad(self.logits, self.targets, **self.dense_options())

    def but(self, **changes: Any) -> "Problem":
        return replace(self, **changes)


@dataclass(frozen=True)
class Part:
    """One rank's part: the classes [start, stop), and those rows [first, last) of the first axis that has rows."""

    start: int
    stop: int
    first: int = 0
    last: int | None = None

    def of(self, array: Array, axis: int) -> Array:
        """This part of an array with all axes of the logits; a view."""
        array = np.moveaxis(array, axis, 0)[self.start : self.stop]
        if array.ndim > 1:
            array = array[:, self.first : self.last]
        return np.moveaxis(array, 0, axis)

    def of_rows(self, array: Array) -> Array:
        """This part of an array without the class axis; a view."""
        return array[self.first : self.last] if array.ndim else array

    def on_this_rank(self, problem: Problem, **more: Any) -> tuple[Array, Array, dict[str, Any]]:
        """Logits, targets and options to call a function of the package with."""
        logits = self.of(problem.logits, problem.axis).copy(order="K")
        targets = problem.targets
        targets = self.of(targets, problem.axis) if problem.with_probabilities else self.of_rows(targets)
        options = dict(problem.options, axis=problem.axis, **more)
        if problem.weight is not None:
            options["weight"] = problem.weight[self.start : self.stop].copy()
        return logits, targets.copy(order="K"), options


def softmax_states(rank: int, fields: StateFields, rows: int = 9, classes: int = 7) -> Array:
    """States of the classes of a rank, of whatever fields; the targets are on rank 0."""
    rng = np.random.default_rng(100 + rank)
    logits = rng.normal(0, 3, (rows, classes, 1)).astype(np.float32)
    columns = None
    if fields.target or not fields.hold_largest:
        columns = rng.integers(0, classes, rows) if rank == 0 else np.full(rows, -1)
    weights = ClassWeights(rng.uniform(0, 2, classes))
    return definition.fill_states(logits, columns, Pass(fields, Transform(), SINGLE), weights, rank * classes)


def split(length: int, parts: int, how: str = "balanced", seed: int = 0) -> list[tuple[int, int]]:
    """One range per rank, in rank order, together [0, length); empty ones are among them but for small `parts`."""
    if how == "balanced":
        return [pce.shard_range(length, parts, index) for index in range(parts)]
    if how == "all on the last rank":
        return [(0, 0)] * (parts - 1) + [(0, length)]
    if how == "all on the first rank":
        return [(0, length)] + [(length, length)] * (parts - 1)
    if how == "first class alone":
        ends = [0, min(1, length)] + [min(1, length) + stop for _, stop in split(max(0, length - 1), parts - 1)]
        return list(pairwise(ends)) if parts > 1 else [(0, length)]
    assert how == "uneven"
    inner = np.sort(np.random.default_rng([seed, length, parts]).integers(0, length + 1, parts - 1))
    ends = [0, *inner.tolist(), length]
    return list(pairwise(ends))


def part_of(comm: Any, problem: Problem, how: str = "balanced") -> Part:
    """This rank's classes, of all rows."""
    return Part(*split(problem.classes, comm.size, how)[comm.rank])


# Shards of few classes are computed in float64, wider ones in segments. `WIDE` is wide on each of four ranks, and odd.
NARROW, WIDE = 19, 613
SPLITS = ["balanced", "uneven", "first class alone", "all on the first rank", "all on the last rank"]


def draw(
    *shape: int,
    axis: int = -1,
    dtype: Any = np.float32,
    targets: str = "index",
    weight: bool = False,
    ignored: float = 0.0,
    scale: float = 3.0,
    offset: float = 0.0,
    peaked: bool = False,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """A random problem of that shape; `peaked` puts the target far above, so that its probability is close to 1."""
    rng = np.random.default_rng([seed, *shape])
    classes = shape[axis]
    rows = list(shape)
    del rows[axis]
    numbers = rng.integers(0, classes, tuple(rows))
    logits = rng.normal(0, scale, shape) + offset
    if peaked:
        above = rng.uniform(1, 25, (*rows, 1))
        moved = np.moveaxis(logits, axis, -1)
        np.put_along_axis(moved, numbers[..., None], moved.max(axis=-1, keepdims=True) + above, axis=-1)
    if targets == "probabilities":
        drawn = rng.gamma(0.5, size=shape)
        chosen = (drawn / drawn.sum(axis=axis, keepdims=True)).astype(np.float32)
    else:
        chosen = np.where(rng.random(tuple(rows)) < ignored, options.get("ignore_index", -100), numbers)
    weights = rng.uniform(0.25, 4.0, classes).astype(np.float32) if weight else None
    return Problem(logits.astype(dtype), chosen, axis, weights, options)


def as_cosines(logits: Array) -> Array:
    """Logits in [-1, 1], of the same dtype; those that are not finite stay as they are."""
    return np.where(np.isfinite(logits), np.tanh(logits.astype(np.float64) / 3), logits).astype(logits.dtype)


def sizes_of_terms(problem: Problem) -> tuple[Array, Array]:
    """Return the size of the terms of each row's loss, (rows), and of its gradient, (rows) for the row's largest.

    They are float64, before any reduction. If nothing cancels, they are the loss and the largest entry themselves.
    """
    x = np.moveaxis(problem.logits.astype(np.float64), problem.axis, -1)
    options, classes = problem.options, problem.classes
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
    w = np.ones(classes) if problem.weight is None else np.abs(problem.weight.astype(np.float64))
    with np.errstate(all="ignore"):
        z = scale * x
        slope = np.full_like(x, scale)
        if softcap is not None:
            slope = scale / np.cosh(z / softcap) ** 2
            z = np.where(np.isinf(x), x, softcap * np.tanh(z / softcap))
        if (margin := options.get("margin")) is not None:
            targets = np.clip(problem.targets, 0, classes - 1)[..., None]
            c = np.take_along_axis(x, targets, axis=-1)
            np.put_along_axis(z, targets, with_margin(c, scale, margin)[0], axis=-1)
            c = np.clip(c, -1.0, 1.0)
            sine = np.sqrt((1.0 - c) * (1.0 + c))
            size = np.where(sine > 0, abs(margin[0]) / np.where(sine > 0, sine, 1.0), max(1.0, margin[0] ** 2))
            np.put_along_axis(slope, targets, scale * size, axis=-1)
        top = z.max(axis=-1, keepdims=True, initial=-np.inf)
        e = np.exp(z - top)
        p = e / e.sum(axis=-1, keepdims=True)
        lse = (top + np.log(e.sum(axis=-1, keepdims=True)))[..., 0]
        held = np.zeros(x.shape, bool)
        if problem.with_probabilities:
            u = w * np.abs(np.moveaxis(problem.targets.astype(np.float64), problem.axis, -1))
            u = u * (1.0 - smoothing) + w * smoothing / classes
            np.put_along_axis(held, z.argmax(axis=-1)[..., None], True, axis=-1)
        else:
            np.put_along_axis(held, np.clip(problem.targets, 0, classes - 1)[..., None], True, axis=-1)
            u = w * ((1.0 - smoothing) * held + smoothing / classes)
        rest = np.where(held, 0.0, e).sum(axis=-1, keepdims=True) / e.sum(axis=-1, keepdims=True)  # 1 - p of the held
        odds = np.where(held, 0.0, e).sum(axis=-1, keepdims=True) / np.where(held, e, 0.0).sum(axis=-1, keepdims=True)
        nll = np.where(z == top, 0.0, top - z) + np.log(e.sum(axis=-1, keepdims=True))
        nll = np.where(held & (odds < 0.1), np.log1p(odds), nll)
        # An error of 1 ulp in the sum of exponentials is one of 1 ulp of 1 in its logarithm.
        loss = np.where(u == 0, 0.0, u * nll).sum(axis=-1) + abs(z_loss) * (lse**2 + 2.0 * np.abs(lse))
        u_held = np.where(held, u, 0.0).sum(axis=-1, keepdims=True)
        common = u.sum(axis=-1, keepdims=True) - u_held + 2.0 * abs(z_loss) * (np.abs(lse) + 1.0)[..., None]
        gradient = np.where(held, u * rest + common * p, (u_held + common) * p + u) * slope
        return loss, gradient.max(axis=-1, initial=0.0)


@dataclass(frozen=True)
class Expectation:
    """The results that this rank should get, and the size of the terms that they are made of."""

    loss: Array
    gradient: Array
    loss_size: Array
    gradient_size: Array


def expect(problem: Problem, part: Part, dloss: Any = None) -> Expectation:
    """This rank's part of what dense says; `dloss`, of all rows or a scalar, scales the gradient."""
    loss, gradient = problem.dense()
    loss_size, gradient_size = sizes_of_terms(problem)
    valid = np.ones(problem.rows_shape, bool)
    weight = np.ones(problem.rows_shape)
    if not problem.with_probabilities:
        valid = problem.targets != problem.options.get("ignore_index", -100)
        if problem.weight is not None:
            weight = np.abs(problem.weight.astype(np.float64))[np.where(valid, problem.targets, 0)]
    loss_size = np.where(valid, loss_size, 0.0)
    if problem.reduction != "none":
        divisor = np.where(valid, weight, 0.0).sum() if problem.reduction == "mean" else 1.0
        loss_size = loss_size.sum() / (divisor or 1.0)
        gradient_size = gradient_size / (divisor or 1.0)
    if dloss is not None:
        moved = np.moveaxis(gradient, problem.axis, -1)
        with np.errstate(all="ignore"):
            gradient = np.moveaxis(moved * np.asarray(dloss, np.float64)[..., None], -1, problem.axis)
        gradient_size = gradient_size * np.abs(dloss)
    if problem.reduction == "none":
        loss, loss_size = part.of_rows(loss), part.of_rows(loss_size)
    gradient_size = np.expand_dims(part.of_rows(gradient_size), problem.axis % problem.logits.ndim)
    return Expectation(loss, part.of(gradient, problem.axis), loss_size, gradient_size)


def compute_dtype(problem: Problem, requested: Any = None) -> Any:
    """The dtype of the arithmetic and of the loss, as the design has it."""
    return np.dtype(requested or (np.float64 if problem.logits.dtype == np.float64 else np.float32))


def rounding_of_z(problem: Problem) -> float:
    """Return the error of a softcap in float64, in ulps: z is rounded before it is subtracted; exp makes that relative.

    The logit held apart, the maximum of a shard, that of all shards and what is subtracted for the gradient are rounded
    to half an ulp each: |z| / 2 ulps of 1, or |z| of what is close to 2. The slope of a softcap, about exp(-2u), has
    the rounding of u as well; beyond u = 372 it is 0. Without a softcap logits are subtracted first, and that is exact.
    With a margin z is rounded too, and so are the angle and its sine.
    """
    scale, softcap = problem.options.get("logit_scale", 1.0), problem.options.get("softcap")
    x = np.abs(problem.logits.astype(np.float64))
    largest = float(scale * x.max(initial=0.0, where=np.isfinite(x)))
    if (margin := problem.options.get("margin")) is not None:
        return 4.0 * (max(largest, scale) + scale * abs(margin[2])) + 4.0 * (4.0 * abs(margin[0]) + abs(margin[1]))
    if softcap is None:
        return 0.0
    return 4.0 * min(largest, softcap) + 4.0 * min(largest / softcap, 372.0)


def tolerance(problem: Problem, requested: Any = None) -> float:
    """In ulps of the arithmetic's dtype."""
    if compute_dtype(problem, requested) == np.float64:
        return FLOAT64 + rounding_of_z(problem)
    plain = problem.weight is None and not problem.with_probabilities
    return FLOAT32 if plain and set(problem.options) <= {"reduction", "ignore_index"} else OPTIONS


def excess_of_loss(got: Array, expected: Expectation, problem: Problem, requested: Any = None) -> float:
    """The error of a loss as a share of what is allowed; 1 is the limit."""
    dtype = compute_dtype(problem, requested)
    size = np.where(np.isfinite(expected.loss_size), expected.loss_size, 0.0)
    with np.errstate(over="ignore"):
        wanted = np.where(np.isinf(expected.loss.astype(dtype)), expected.loss.astype(dtype), expected.loss)
    found = errors(got, wanted, dtype, size)
    return float(found.max(initial=0.0)) / tolerance(problem, requested)


def excess_of_gradient(got: Array, expected: Expectation, problem: Problem, requested: Any = None) -> float:
    """The error of a gradient as a share of what is allowed; a rounding to a half precision is allowed on top."""
    dtype = compute_dtype(problem, requested)
    size = np.where(np.isfinite(expected.gradient_size), expected.gradient_size, 0.0)
    size = np.broadcast_to(size, expected.gradient.shape)
    wanted = expected.gradient
    # The slope of a softcap may underflow, and half of a product before the whole.
    allowed = tolerance(problem, requested) * ulp(size, dtype) + float(np.finfo(np.float64).tiny)
    if got.dtype.itemsize < dtype.itemsize:
        with np.errstate(over="ignore"):
            wanted = wanted.astype(got.dtype).astype(np.float64)
        allowed = allowed + HALF * ulp(np.where(np.isfinite(wanted), wanted, 0.0), got.dtype)
    distance = errors(got, wanted, np.float64, np.ones_like(size)) * ulp(1.0, np.float64)
    return float((distance / allowed).max(initial=0.0))


def is_same(got: Array, expected: Array) -> bool:
    """Equal bit for bit, dtype and shape too."""
    return got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


def same_on_every_rank(comm: Any, *arrays: Array) -> bool:
    """Return whether every rank of `comm` has the same bytes; collective."""
    return len(set(comm.allgather(tuple((a.dtype.str, a.shape, a.tobytes()) for a in arrays)))) == 1


@dataclass(frozen=True)
class Results:
    """The results of three ways to a loss and two to a gradient on this rank, and what became of the inputs."""

    losses: dict[str, Array]
    gradients: dict[str, Array]
    changed: list[str]
    aliased: list[str]
    same_everywhere: bool


def evaluate(
    comm: Any,
    problem: Problem,
    part: Part,
    *,
    inputs: tuple[Any, Any, dict[str, Any]] | None = None,
    dloss: Any = None,
    **more: Any,
) -> Results:
    """Call everything there is; collective over `comm`, asserts nothing.

    `inputs` take the place of what `part` would cut out. `dloss` is the gradient of the loss for the backward pass.
    """
    logits, targets, options = inputs or part.on_this_rank(problem)
    options = {**options, "comm": comm, **more}
    given = {"logits": logits, "targets": targets, "weight": options.get("weight")}
    arrays = {name: np.asarray(value) for name, value in given.items() if value is not None}
    before = {name: array.tobytes() for name, array in arrays.items()}
    alone = pce.softmax_cross_entropy(logits, targets, **options)
    forward, residuals = pce.softmax_cross_entropy_forward(logits, targets, **options)
    backward = pce.softmax_cross_entropy_backward(1.0 if dloss is None else dloss, residuals)
    fused_loss, fused = pce.softmax_cross_entropy_value_and_grad(logits, targets, **options)
    losses = {"softmax_cross_entropy": alone, "forward": forward, "value_and_grad": fused_loss}
    gradients = {"backward": backward, "value_and_grad": fused}
    results = [*losses.values(), *gradients.values()]
    return Results(
        losses,
        gradients,
        changed=[name for name, array in arrays.items() if array.tobytes() != before[name]],
        aliased=[name for name, array in arrays.items() if any(np.shares_memory(array, r) for r in results)],
        same_everywhere=comm is None or same_on_every_rank(comm, *losses.values()),
    )


def assert_as_dense(results: Results, problem: Problem, part: Part, dloss: Any = None, requested: Any = None) -> None:
    """Each loss and gradient has the right dtype and shape and is within the tolerance.

    Every rank has the same bits of the losses, and inputs are as they were.
    `dloss` is that of all rows, or a scalar; `requested` the compute dtype, if one was.
    """
    expected = expect(problem, part)
    for name, loss in results.losses.items():
        assert isinstance(loss, np.ndarray), f"{name} gave a {type(loss).__name__}"
        assert loss.dtype == compute_dtype(problem, requested), name
        assert loss.shape == expected.loss.shape, name
        excess = excess_of_loss(loss, expected, problem, requested)
        assert excess <= 1, f"loss of {name}: {excess:.2f} times the tolerance\n{loss}\n{expected.loss}"
    for name, gradient in results.gradients.items():
        wanted = expect(problem, part, dloss) if name == "backward" and dloss is not None else expected
        assert gradient.dtype == problem.logits.dtype, name
        assert gradient.shape == wanted.gradient.shape, name
        excess = excess_of_gradient(gradient, wanted, problem, requested)
        assert excess <= 1, f"gradient of {name}: {excess:.2f} times the tolerance\n{gradient}\n{wanted.gradient}"
    assert results.same_everywhere
    assert results.changed == []
    assert results.aliased == []


def right_results(
    comm: Any, problem: Problem, where: str | Part = "balanced", dloss: Any = None, **more: Any
) -> Results:
    """Evaluate a part, or this rank's part of a split, assert that it is as dense, and return the results."""
    part = where if isinstance(where, Part) else part_of(comm, problem, where)
    results = evaluate(comm, problem, part, dloss=dloss, **more)
    assert_as_dense(results, problem, part, dloss, more.get("compute_dtype"))
    return results


@contextmanager
def grid(comm: Any, rows: int) -> Iterator[tuple[Any, Any]]:
    """`comm` as `rows` x (size / rows): the communicators over the classes and over the rows; collective."""
    columns = comm.size // rows
    over_classes = comm.Split(comm.rank // columns, comm.rank)
    over_rows = comm.Split(comm.rank % columns, comm.rank)
    try:
        yield over_classes, over_rows
    finally:
        over_classes.Free()
        over_rows.Free()


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
