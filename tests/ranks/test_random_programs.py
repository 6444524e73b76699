"""Random programs over the operations of the tape: values and gradients are those of NumPy in one process.

A program is a few lines of Python, which every rank draws from the same seed and which a failure shows. They run on
distributed arrays and on whole NumPy arrays. There a parameter has an imaginary part of 1e-30 times a direction; that
of the loss, divided by 1e-30, is then its derivative along that direction, to the last digits (complex-step method).

To run a program again, changed or not, call `faults_of` with its text.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
import traceback
from types import SimpleNamespace
from typing import Any
import warnings
import zlib

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import DistArray, Mesh, Partial, Replicate, Shard, from_local
from pce_mpi.distributed.array import OPERATIONS
from pce_mpi.hollow import hollow
from pce_mpi.ops import arithmetic
from pce_mpi.testing.gradients import normal_numbers
from ranks import op_cases
from ranks.grids import NAMES, Array, factorizations, local_of, mesh_of, spread
from ulps import PROGRAM, worst

# The number of programs that run on meshes of so many dims, in turn on each mesh of the ranks that has them.
PROGRAMS = {1: 120, 2: 120}
# Numbers beyond that lose digits in what is computed of them: the line is drawn again.
LARGEST = 50.0
STEP = 1e-30
# Unlike 0 or 1, no result that is exact in one arithmetic and rounded in another is likely to be at this number.
THRESHOLD = 0.0371


# On whole NumPy arrays


def whole_numbers(high: int, shape: tuple[int, ...], number: int) -> Array:
    return np.random.default_rng(number).integers(0, high, shape)


def whole_of(shape: tuple[int, ...], number: int) -> Array:
    return normal_numbers(np.random.default_rng(number), shape)


def maximum(x: Any, y: Any) -> Array:
    return chosen(np.real(x) > np.real(y), x, y)


def minimum(x: Any, y: Any) -> Array:
    return chosen(np.real(x) < np.real(y), x, y)


def chosen(first: Array, x: Any, y: Any) -> Array:
    """Equal elements share the derivative."""
    return np.where(np.real(x) == np.real(y), (x + y) / 2, np.where(first, x, y))


def extreme(largest: Callable[..., Array]) -> Callable[..., Array]:
    def reduced(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        equal = np.real(x) == largest(np.real(x), axis=axis, keepdims=True)
        return np.where(equal, x, 0).sum(axis, keepdims=keepdims) / equal.sum(axis, keepdims=keepdims)

    return reduced


def reduced(losses: Array, reduction: str) -> Array:
    return losses if reduction == "none" else losses.sum() / (losses.size if reduction == "mean" else 1)


def cross_entropy(x: Array, targets: Array, axis: int, reduction: str, label_smoothing: float) -> Array:
    log_p = np.moveaxis(op_cases.log_softmax(x, axis), axis, -1)
    if targets.shape == x.shape:
        q = np.moveaxis(targets, axis, -1)
        losses = -(log_p * (q * (1 - label_smoothing) + label_smoothing / log_p.shape[-1])).sum(-1)
    else:
        of_target = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        losses = -(1 - label_smoothing) * of_target - label_smoothing * log_p.mean(-1)
    return reduced(losses, reduction)


def kl_divergence(student: Array, teacher: Array, axis: int, direction: str, reduction: str) -> Array:
    s, t = (op_cases.log_softmax(x, axis) for x in (student, teacher))
    m = np.log((np.exp(s) + np.exp(t)) / 2)
    pairs = {"forward": [(t, s)], "reverse": [(s, t)], "jensen-shannon": [(s, m), (t, m)]}[direction]
    return reduced(np.mean([(np.exp(p) * (p - q)).sum(axis) for p, q in pairs], 0), reduction)


def take_classes(x: Array, ids: Array, axis: int) -> Array:
    if not x.shape[axis]:
        raise ValueError("there are no classes")
    return np.take_along_axis(x, ids, axis)


def class_statistics(x: Array, targets: Array, axis: int) -> Any:
    log_p = op_cases.log_softmax(x, axis)
    return SimpleNamespace(
        log_prob=np.take_along_axis(log_p, targets, axis),
        entropy=-(np.exp(log_p) * log_p).sum(axis),
        logsumexp=op_cases.logsumexp(x, axis),
    )


def embedding(ids: Array, table: Array) -> Array:
    if table.ndim != 2:
        raise ValueError("a table has two axes")
    return table[ids]


WHOLE: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in ("negative", "square", "exp", "log", "sqrt", "tanh", "sin", "cumsum", "stack")
    },
    "abs": lambda x: np.where(np.real(x) < 0, -x, x),
    "var": lambda x, axis=None, keepdims=False: np.square(x - x.mean(axis, keepdims=True)).mean(
        axis, keepdims=keepdims
    ),
    "einsum": np.einsum,
    **{name: getattr(np, name) for name in ("add", "subtract", "multiply", "divide", "power", "matmul", "where")},
    **{name: getattr(np, name) for name in ("sum", "mean")},
    **{name: getattr(np, name) for name in ("reshape", "transpose", "swapaxes", "concatenate", "split")},
    **{name: getattr(op_cases, name) for name in ("sigmoid", "gelu", "logsumexp", "softmax", "log_softmax")},
    **{name: getattr(op_cases, name) for name in ("rms_norm", "layer_norm")},
    **{each.__name__: each for each in (cross_entropy, kl_divergence, take_classes, class_statistics)},
    "relu": lambda x: np.where(np.real(x) > 0, x, 0),
    "maximum": maximum,
    "minimum": minimum,
    "max": extreme(np.max),
    "min": extreme(np.min),
    "broadcast_to": np.broadcast_to,
    "embedding": embedding,
    "mse": lambda x, y: np.square(x - y).mean(),
    "running_sum": lambda x: np.cumsum(x, 0),
    "astype": lambda x, dtype: x,
    "redistribute": lambda x, **placements: x,
    "full": np.real,
    "array": lambda shape, number, **placed: whole_of(shape, number),
    "integers": lambda high, shape, number, **placed: whole_numbers(high, shape, number),
    "booleans": lambda shape, number, **placed: whole_numbers(2, shape, number).astype(bool),
    "constant": whole_of,
}
VALUES = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial, "float32": np.float32}


def on_whole_arrays(directions: dict[int, Array]) -> dict[str, Any]:
    """Return the meanings of names in a program; parameters whose number has a direction are imaginary along it."""

    def parameter(shape: tuple[int, ...], number: int, **placed: Any) -> Array:
        whole = whole_of(shape, number)
        return whole + 1j * STEP * directions[number] if number in directions else whole

    return {**WHOLE, **VALUES, "parameter": parameter}


# On distributed arrays


def on_ranks(mesh: Mesh, parameters: dict[int, DistArray]) -> dict[str, Any]:
    """Return the meanings of names in a program; `parameters` takes those that are made, by their numbers.

    Shards of a `ragged` array end anywhere.
    """

    def of(whole: Array, number: int, ragged: bool, placements: Any, requires_grad: bool = False) -> DistArray:
        placed = (placements.get(dim, Replicate()) for dim in mesh.dims)
        sharding = spread(mesh.dim_sizes, whole.shape, *placed, seed=[number] if ragged else None)
        if mesh.is_hollow:  # `from_local` would not know the shards of other ranks
            nothing = hollow(sharding.local_shape(mesh.coordinates), whole.dtype)
            return DistArray(nothing, mesh, sharding, requires_grad=requires_grad)
        local = local_of(whole, sharding, mesh.coordinates, seed=number)
        # Each rank chooses the order of its elements in memory.
        local = np.asarray(local, order="F" if (number + mesh.rank) % 2 else "C")
        return from_local(local, mesh, shape=whole.shape, requires_grad=requires_grad, **placements)

    def made(kind: str) -> Callable[..., DistArray]:
        def distributed(*given: Any, ragged: bool = False, **placements: Any) -> DistArray:
            number = given[-1]
            if kind != "parameter":
                return of(WHOLE[kind](*given), number, ragged, placements)
            parameters[number] = of(whole_of(*given), number, ragged, placements, requires_grad=True)
            return parameters[number]

        return distributed

    return {
        **{name: OPERATIONS[name] for name in op_cases.DEFINED},
        "einsum": pce.einsum,  # subscripts come first
        **VALUES,
        "redistribute": DistArray.redistribute,
        "full": DistArray.full,
        "running_sum": op_cases.running_sum,
        "constant": whole_of,
        **{kind: made(kind) for kind in ("parameter", "array", "integers", "booleans")},
    }


def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    """The variables of a program after its last line."""
    variables: dict[str, Any] = {}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing
        exec(source, names, variables)
    return variables


# To draw a program


class Writer:
    """Draws a program, line by line; what it would be on whole arrays says what can come next."""

    def __init__(self, seed: Any, dims: list[str], ranks: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dims = dims
        self.lines: list[str] = []
        self.names = on_whole_arrays({})
        self.variables: dict[str, Any] = {}
        self.numbers = count(int(self.rng.integers(1000)) * 1000)
        # Few different lengths, so that shapes often fit each other.
        self.lengths = [int(each) for each in self.rng.choice([0, 1, 1, 2, 3, 3, 4, 5, 7, ranks + 1], 3)]

    def one(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def below(self, high: int) -> int:
        return int(self.rng.integers(high))

    def shape(self, *lengths_of_axes: int) -> tuple[int, ...]:
        return tuple(self.one(*self.lengths) for _ in range(self.one(*lengths_of_axes)))

    def placements(self, ndim: int, *families: tuple[str, ...]) -> str:
        """Arguments that place each dim; operators of one family may meet."""
        operators = self.one(*families)
        chosen = []
        for dim in self.dims:
            kinds: list[Any] = [Replicate(), *(Shard(self.below(ndim)) for _ in range(3 * bool(ndim)))]
            kinds += [Partial(operator) for operator in operators]
            chosen.append(f", {dim}={self.one(*kinds)}")
        return "".join(chosen)

    def placed(self, ndim: int, *families: tuple[str, ...]) -> str:
        return f"{next(self.numbers)}{self.placements(ndim, *families)}{', ragged=True' * self.chance(0.3)}"

    def made(self, kind: str, shape: tuple[int, ...], high: int = 0) -> str:
        """An expression for a new array."""
        families = {"integers": [(), ("sum",)], "booleans": [(), ("max",), ("min",)]}.get(kind, FAMILIES)
        first = f"{high}, " if high else ""
        return f"{kind}({first}{shape}, {self.placed(len(shape), *families)})"

    def like(self, shape: tuple[int, ...]) -> str:
        """An array of this shape: one there is, or a new one, on all ranks or distributed."""
        there = [name for name, value in self.variables.items() if value.shape == shape]
        new = [self.made("parameter", shape), self.made("array", shape), f"constant({shape}, {next(self.numbers)})"]
        new += [self.made("integers", shape, 5), self.made("booleans", shape)]
        return self.one(*there, *there, *new)

    def append(self, expression: str) -> bool:
        """One line more, if it has a value on whole arrays that is worth to be computed with."""
        name = f"x{len(self.variables)}"
        try:
            value = np.asarray(run(f"{name} = {expression}", {**self.names, **self.variables})[name])
        except (ValueError, IndexError):
            return False
        if value.size > 2000 or value.ndim > 4 or not (np.abs(value) <= LARGEST).all():
            return False
        self.lines.append(f"{name} = {expression}")
        self.variables[name] = value
        return True

    def operand(self) -> str:
        """A distributed array, the last one more often than others."""
        names = [name for name, line in zip(self.variables, self.lines, strict=True) if " = full(" not in line]
        return names[-1] if self.chance(0.4) else self.one(*names)

    def program(self) -> str:
        for _ in range(self.one(1, 2)):
            while not self.append(self.made("parameter", self.shape(1, 2, 2, 3))):
                pass  # too large, on many ranks
        wanted = len(self.lines) + self.one(3, 5, 8)
        while len(self.lines) < wanted:
            x = self.operand()
            drawn = self.one(*LINES, *LINES_WITH_AXES * bool(self.variables[x].ndim))(self, x)
            if self.append(drawn) and drawn.startswith("redistribute") and self.chance(0.4):
                self.append(drawn)
        weighted = []
        for name in dict.fromkeys([self.operand(), self.operand(), self.operand()]):
            shape = self.variables[name].shape
            weights = self.one(f"constant({shape}, {next(self.numbers)})", self.made("array", shape))
            weighted.append(f"sum(multiply({name}, {weights}))")
        self.lines.append(f"loss = {' + '.join(weighted)}")
        return "\n".join(self.lines)

    def axis(self, x: str) -> int:
        """One of the axes of `x`, from either end."""
        ndim = self.variables[x].ndim
        return int(self.rng.integers(-ndim, ndim))

    def axes(self, x: str) -> str:
        """Arguments of a reduction."""
        ndim = self.variables[x].ndim
        several = tuple(sorted(self.rng.permutation(ndim)[: self.below(ndim + 1)].tolist()))
        return f"axis={self.one(None, self.axis(x), several)}{', keepdims=True' * self.chance(0.4)}"


FAMILIES: list[tuple[str, ...]] = [(), ("sum",), ("sum", "avg"), ("max",), ("min",)]

Line = Callable[[Writer, str], str]


def unary(w: Writer, x: str) -> str:
    positive = [f"log(square({x}) + 1)", f"sqrt(square({x}) + 0.5)"]
    called = [f"{name}({x})" for name in ("negative", "square", "exp", "tanh", "sigmoid", "relu", "gelu")]
    called += [f"sin({x})", f"abs({x})"]
    called += [f"running_sum({x})", f"cumsum({x}, -1)"] * bool(w.variables[x].ndim)
    # A square root has no derivative at 0.
    return w.one(*called, *positive, f"{x} ** {w.one(3, -2, 1.5)}", f"power(2.0, {x})")


def binary(w: Writer, x: str) -> str:
    name = w.one("add", "subtract", "multiply", "maximum", "minimum", "divide", "power")
    shape = tuple(w.one(length, length, 1) for length in w.variables[x].shape[w.one(0, 0, 1) :])
    y = w.one(w.like(shape), w.like(shape), w.one(*w.variables), "2", "0.75")
    if name == "divide":
        return f"divide({x}, {y} ** 2 + 0.5)"
    if name == "power":
        return f"power(square({x}) + 0.5, {y})"
    x, y = w.one((x, y), (y, x))
    return f"{name}({x}, {y})"


def product(w: Writer, x: str) -> str:
    shape = w.variables[x].shape
    if w.chance(0.5):
        other = (*shape[:-2][: w.one(0, 2)], *shape[-1:], *w.shape(0, 1, 1, 1))
        return f"matmul({x}, {w.like(other)})"
    if w.chance(0.2):
        return f"einsum('...i,...i->...', {x}, {w.like(shape)})"
    other = (*w.shape(0, 1, 1), *shape[-2:-1])
    return f"matmul({w.like(other)}, {x})"


def reduction(w: Writer, x: str) -> str:
    return f"{w.one('sum', 'mean', 'var', 'max', 'min', 'logsumexp')}({x}, {w.axes(x)})"


def along_an_axis(w: Writer, x: str) -> str:
    axis = w.axis(x)
    scale, bias = (w.like(w.variables[x].shape[axis:][:1]) for _ in range(2))
    return w.one(
        f"softmax({x}, {axis})",
        f"log_softmax({x}, {axis})",
        f"layer_norm({x}, axis={axis})",
        f"layer_norm({x}, {scale}, {bias}, axis={axis})",
        f"rms_norm({x}, {scale}, axis={axis})",
        f"rms_norm({x}, axis={axis})",
    )


def reshape(w: Writer, x: str) -> str:
    shape = w.variables[x].shape
    after: list[int] = []
    for length in shape:  # merged with the one before, split, or left alone
        way = w.below(4)
        if way == 0 and after:
            after[-1] *= length
        elif way == 1 and length % 2 == 0:
            after += [length // 2, 2]
        else:
            after.append(length)
    if w.chance(0.3):
        after.insert(w.below(len(after) + 1), 1)
    wanted = w.one(tuple(after), -1, tuple(w.rng.permutation(after).tolist()))
    return f"reshape({x}, {wanted})"


def order(w: Writer, x: str) -> str:
    axes = tuple(w.rng.permutation(w.variables[x].ndim).tolist())
    return w.one(f"transpose({x})", f"transpose({x}, {axes})", f"swapaxes({x}, {w.axis(x)}, {w.axis(x)})")


def index(w: Writer, x: str) -> str:
    def entry(length: int) -> str:
        start, stop = (w.one("", w.below(length + 2) - w.one(0, length)) for _ in range(2))
        some = [w.below(length) for _ in range(2)] if length else []
        return w.one(
            ":", ":", f"{start}:{stop}", some, f"{start}:{stop}:{w.one(-1, 2, -2)}", w.below(length + 1), "None"
        )

    shape = w.variables[x].shape
    entries = [str(entry(length)) for length in shape[: w.below(len(shape) + 1)]]
    if w.chance(0.3):
        entries.insert(w.below(len(entries) + 1), "...")
    return f"{x}[{', '.join(entries) or '...'}]"


def join(w: Writer, x: str) -> str:
    axis, shape = w.axis(x), list(w.variables[x].shape)
    shape[axis] = w.one(*w.lengths)
    arrays = w.one([x, x], [x, w.like(tuple(shape))], [w.like(tuple(shape)), x, w.one(*w.variables)])
    if w.chance(0.2):
        return f"stack([{x}, {w.like(w.variables[x].shape)}], {axis})"
    return f"concatenate([{', '.join(arrays)}], {axis})"


def part(w: Writer, x: str) -> str:
    axis = w.axis(x)
    ends = sorted(w.below(w.variables[x].shape[axis] + 1) for _ in range(2))
    return f"split({x}, {ends}, {axis})[{w.below(3)}]"


def stretch(w: Writer, x: str) -> str:
    shape = w.variables[x].shape
    after = tuple(w.one(*w.lengths) if length == 1 else length for length in shape)
    return f"broadcast_to({x}, {(*w.shape(0, 1), *after)})"


def choice(w: Writer, x: str) -> str:
    shape = w.variables[x].shape
    some = tuple(w.one(length, length, 1) for length in shape)
    condition = w.one(f"{w.operand()} > {THRESHOLD}", w.made("booleans", shape), w.made("booleans", some))
    return f"where({condition}, {', '.join(w.one([x, w.like(some)], [w.like(shape), x], [x, '0'], ['0.5', x]))})"


def rows(w: Writer, x: str) -> str:
    return f"embedding({w.made('integers', w.shape(0, 1, 1, 2), max((1, *w.variables[x].shape[:1])))}, {x})"


def loss(w: Writer, x: str) -> str:
    if w.chance(0.2):
        return f"mse({x}, {w.like(w.variables[x].shape)})"
    axis, shape = w.axis(x), list(w.variables[x].shape)
    classes = shape.pop(axis)
    targets = w.one(w.made("integers", tuple(shape), max(1, classes)), f"constant({w.variables[x].shape}, 1) ** 2")
    reduction = w.one("none", "sum", "mean")
    return f"cross_entropy({x}, {targets}, axis={axis}, reduction={reduction!r}, label_smoothing={w.one(0.0, 0.1)})"


def neighbour(w: Writer, x: str) -> str:
    axis, shape = w.axis(x), list(w.variables[x].shape)
    if w.chance(0.4):
        direction, reduction = w.one("forward", "reverse", "jensen-shannon"), w.one("none", "sum", "mean")
        teacher = f"0.5 * {w.like(tuple(shape))}"
        return f"kl_divergence({x}, {teacher}, axis={axis}, {direction=}, {reduction=})"
    classes, shape[axis] = shape[axis], w.one(1, 2, 3)
    given = f"({x}, {w.made('integers', tuple(shape), max(1, classes))}, axis={axis})"
    return w.one(f"take_classes{given}", f"class_statistics{given}.{w.one('log_prob', 'entropy', 'logsumexp')}")


def elsewhere(w: Writer, x: str) -> str:
    if w.chance(0.15):
        return f"full({x})"
    if w.chance(0.1):
        return f"astype({x}, float32)"
    return f"redistribute({x}{w.placements(w.variables[x].ndim, *FAMILIES)})"


LINES: list[Line] = [*(unary, binary, binary, reshape, index, stretch, choice), *[elsewhere] * 4]
LINES_WITH_AXES: list[Line] = [product, reduction, along_an_axis, order, join, part, rows, loss, neighbour]


# The check


def error_of(got: Any, expected: Any, source: str) -> float:
    """In ulps of the largest number, or of 1; those of float32 where the program has such."""
    size = max(1.0, float(np.abs(expected).max(initial=0.0)))
    return worst(got, expected, np.float32 if "float32" in source else np.float64, size)


def faults_of(program: str, mesh: Mesh) -> tuple[list[str], int]:
    """Return the faults of a program on `mesh`, and a checksum of all that it computes; collective."""
    expected = run(program, on_whole_arrays({}))
    parameters: dict[int, DistArray] = {}
    found = run(program, on_ranks(mesh, parameters))
    arrays = {name: value for name, value in found.items() if isinstance(value, DistArray)}
    if arrays["loss"].requires_grad:
        arrays["loss"].backward()
    values = {name: x.full() for name, x in arrays.items()}
    gradients = {number: x.grad.full() for number, x in parameters.items() if x.grad is not None}
    faults = []
    for name, value in values.items():
        if not error_of(value, expected[name], program) <= PROGRAM:
            faults.append(f"{name} is\n{value}\nwhere NumPy has\n{expected[name]}")
    for number, x in parameters.items():
        direction = whole_of(x.shape, number + 1)
        slope = np.imag(run(program, on_whole_arrays({number: direction}))["loss"]) / STEP
        terms = gradients.get(number, np.zeros(x.shape)) * direction
        got = terms.sum()
        size = max(1.0, np.abs(terms).sum())
        if not error_of(got / size, slope / size, program) <= PROGRAM:
            faults.append(f"the derivative by parameter {number}, along a direction, is {got}, not {slope}")
    for x in parameters.values():
        x.local[...] = 77.0  # as a step of an optimizer does
    for name, x in arrays.items():
        whole = x.redistribute(**dict.fromkeys(mesh.dims, Replicate())).full()
        if not np.array_equal(whole, x.full()):
            faults.append(f"after a step {name} is\n{x.full()}\nbut Replicate it is\n{whole}")
    checksum = 0
    for array in (*values.values(), *gradients.values()):
        checksum = zlib.crc32(array.tobytes(), checksum)
    return faults, checksum


def text_of_faults(comm: Any, program: str, mesh: Mesh) -> str:
    """Return the faults as a text that is the same on every rank; collective."""
    try:
        faults, checksum = faults_of(program, mesh)
    except Exception as error:
        faults, checksum = ["".join(traceback.format_exception(error))], 0
    everywhere = comm.allgather((faults, checksum))
    if not any(faults for faults, _ in everywhere) and len({checksum for _, checksum in everywhere}) > 1:
        return "the ranks have different bits"
    return "\n".join(f"rank {rank}: {fault}" for rank, (faults, _) in enumerate(everywhere) for fault in faults[:1])


def program_of(seed: int, mesh: Mesh) -> str:
    return Writer([seed, *mesh.dims.values()], list(mesh.dims), mesh.size).program()


# Shards of several lengths, and two dims of two ranks each.
@pytest.mark.parametrize("ndim", [pytest.param(ndim, marks=pytest.mark.ranks(2 + ndim)) for ndim in PROGRAMS])
def test_random_programs_are_those_of_numpy(comm, impatient, ndim):
    meshes = [Mesh(comm, **dict(zip(NAMES, sizes, strict=False))) for sizes in factorizations(comm.size, ndim)]
    for seed in range(PROGRAMS[ndim]):
        mesh = meshes[seed % len(meshes)]
        program = program_of(seed, mesh)
        faults = text_of_faults(comm, program, mesh)
        assert not faults, f"program {seed} on {mesh}:\n\n{program}\n\n{faults}"


@pytest.mark.ranks(2)  # a vjp is wrong at any size
def test_planted_vjp_is_found(comm, monkeypatch):
    right = arithmetic._WHERE
    wrong = [rule and (lambda *given, rule=rule, **named: rule(*given, **named) * 1.001) for rule in right.vjps]
    monkeypatch.setattr(arithmetic, "_WHERE", replace(right, vjps=wrong))
    mesh = mesh_of(comm, comm.size)
    programs = (program_of(seed, mesh) for seed in range(1000))
    faults = (text_of_faults(comm, program, mesh) for program in programs if "where(" in program)
    assert "derivative" in next(filter(None, faults), "")
