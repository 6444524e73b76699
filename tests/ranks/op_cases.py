"""Every public operation with operands of a few shapes, and what plain NumPy makes of them in float64.

`CASES` is the table, and `evaluate` runs one line of it: forward, and backward from one random projection of the
results. Numbers are multiples of 1/256, so that the terms of a Partial operand add up to it exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from operator import add
from typing import Any
import zlib

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi import DistArray, Mesh, Partial, Replicate, Rule, Shard, dense, from_local
from pce_mpi.arrays import array_namespace, to_host
from pce_mpi.distributed.array import OPERATIONS
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.testing.gradients import normal_numbers as numbers
from ranks.grids import local_of, mesh_of
from ulps import worst

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One line of the table.

    call         the operation, of distributed operands; gives one array or a list
    reference    the same of NumPy arrays
    has_gradient for each operand
    what         what is special about it
    size         of the largest numbers on the way, which rounding errors are relative to
    smooth       a function with the same derivatives; None: differences do not say what the gradient is
    dtype        of the results, where it is not that of the real operands
    parameters   those of the operation by name, where its function is called with the operands and them alone
    """

    op: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    operands: tuple[Array, ...]
    has_gradient: tuple[bool, ...]
    what: str = ""
    size: float = 1.0
    smooth: Callable[..., Any] | None = None
    dtype: Any = None
    parameters: dict[str, Any] | None = None
    projections: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        with np.errstate(all="ignore"):
            results = listed(self.reference(*self.operands))
        # An element that is not finite has no derivative.
        drawn = [np.where(np.isfinite(result), numbers(rng, result.shape), 0.0) for result in results]
        object.__setattr__(self, "projections", drawn)

    @property
    def name(self) -> str:
        shapes = ", ".join(str(operand.shape) for operand in self.operands)
        return f"{self.op} of {shapes}" + (f", {self.what}" if self.what else "")

    def in_dtype(self, dtype: Any) -> tuple[Array, ...]:
        """The operands, real ones as `dtype`."""
        return tuple(x.astype(dtype) if x.dtype == np.float64 else x for x in self.operands)

    def rounded(self, dtype: Any) -> "Case":
        """Return the case with numbers that `dtype` has."""

        def rounded(x: Array) -> Array:
            return x.astype(dtype).astype(np.float64) if x.dtype == np.float64 else x

        case = replace(self, operands=tuple(map(rounded, self.operands)))
        case.projections[:] = map(rounded, self.projections)
        return case


def listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


# ------------------------------------------------------------------------------------------------------ their numbers

_rng = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return numbers(_rng, shape)


def positive(*shape: int) -> Array:
    return np.asarray(np.abs(normal(*shape)) + 0.5)


def integers(high: int, *shape: int) -> Array:
    return np.asarray(_rng.integers(0, high, shape))


def booleans(*shape: int) -> Array:
    return integers(2, *shape).astype(bool)


def probabilities(*shape: int) -> Array:
    """Not quite: they need not sum to 1."""
    return np.asarray(np.round(_rng.random(shape) * 64) / 64)


# Rows that have an infinite element, or no other, or one that is no number.
SPECIAL = np.array([[-np.inf] * 3, [np.inf, 0.0, 1.0], [0.0, np.inf, np.inf], [0.5, np.nan, 0.0], [1.0, 2.0, -np.inf]])


def masked(*shape: int) -> Array:
    drawn = normal(*shape)
    drawn[(0,) * len(shape)] = -np.inf
    drawn[(-1,) * len(shape)] = -np.inf
    return drawn


# --------------------------------------------------------------------------------------------------------- references


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def logsumexp(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
    largest = x.max(axis=axis, keepdims=True)
    total = np.exp(x - largest).sum(axis=axis, keepdims=True)
    found = largest + np.log(total)
    return found if keepdims else found.reshape(x.sum(axis=axis).shape)


def softmax(x: Array, axis: int = -1) -> Array:
    return np.exp(x - logsumexp(x, axis, keepdims=True))


def log_softmax(x: Array, axis: int = -1) -> Array:
    return x - logsumexp(x, axis, keepdims=True)


def attention(q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None) -> Array:
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ np.swapaxes(k, -1, -2))
    seen = np.tri(*scores.shape[-2:]) > 0 if causal else True
    return softmax(np.where(seen, scores, -np.inf)) @ v


def _along(vector: Array, x: Array, axis: int) -> Array:
    return vector.reshape([-1 if index == axis % x.ndim else 1 for index in range(x.ndim)])


def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, axis: int = -1, eps: float = 1e-5
) -> Array:
    y = rms_norm(x - x.mean(axis, keepdims=True), scale, axis, eps)
    return y if bias is None else y + _along(bias, x, axis)


def rms_norm(x: Array, scale: Array | None = None, axis: int = -1, eps: float = 1e-5) -> Array:
    y = x / np.sqrt((x * x).mean(axis, keepdims=True) + eps)
    return y if scale is None else y * _along(scale, x, axis)


def moved_to(placement: Any) -> Callable[[DistArray], DistArray]:
    """To the same placement along every dim."""
    return lambda x: x.redistribute(**dict.fromkeys(x.mesh.dims, placement))


# Operations of a user's own: one without a rule, which runs replicated, and one with.
running_sum: Any = pce.op(
    lambda x: array_namespace(x).cumsum(x, 0), lambda g, y, x: running_sum(g[::-1])[::-1], name="running_sum"
)
outer = pce.op(
    lambda x, y: x[:, None, :] * y,
    [
        lambda g, y, a, b: pce.sum(g * b, 1),
        lambda g, y, a, b: pce.sum(g * pce.reshape(a, (a.shape[0], 1, a.shape[1])), 0),
    ],
    lambda a, b: Rule.of("ab,cb->acb", a, b, linear=[[0], [1]]),
    name="outer",
)


# ---------------------------------------------------------------------------------------------------------- the table


def case(op: str, call: Any, reference: Any, *operands: Array, gradient: Any = None, **more: Any) -> Case:
    """All real operands have a gradient, unless `gradient` says which."""
    has_gradient = tuple(x.dtype == np.float64 for x in operands) if gradient is None else tuple(gradient)
    return Case(op, call, reference, operands, has_gradient, **{"smooth": reference, **more})


def both(op: str, call: Any, *operands: Array, **more: Any) -> Case:
    """Return a case that is written alike for distributed arrays and for NumPy's."""
    return case(op, call, call, *operands, **more)


def named(
    op: str, *operands: Array, reference: Any = None, dtype: Any = None, gradient: Any = None, **parameters: Any
) -> Case:
    """An operation that NumPy has too."""
    what = ", ".join(f"{name}={value}" for name, value in parameters.items())
    reference = reference or getattr(np, op)
    call = partial(OPERATIONS[op], **parameters)
    more: dict[str, Any] = {"what": what, "dtype": dtype, "gradient": gradient, "parameters": parameters}
    return case(op, call, partial(reference, **parameters), *operands, **more)


ELEMENTWISE = [
    *(named(op, normal(3, 4)) for op in ("negative", "square", "exp", "tanh", "sin", "cos", "abs")),
    *(named(op, positive(3, 4)) for op in ("log", "sqrt", "log1p")),
    *(named("exp", normal(*shape)) for shape in ((), (5,), (2, 0), (2, 1, 3))),
    named("sigmoid", normal(3, 4) * 4, reference=sigmoid),
    named("relu", normal(3, 4), reference=lambda x: np.maximum(x, 0)),
    named("gelu", normal(3, 4), reference=gelu),
    *(
        named(op, normal(*a), (positive if op == "divide" else normal)(*b))
        for op in ("add", "subtract", "multiply", "divide", "maximum")
        for a, b in (((3, 4), (3, 4)), ((3, 4), (4,)), ((2, 1), (1, 5)))
    ),
    named("minimum", normal(3, 4), normal(4)),
    named("minimum", normal(3, 4).round(), normal(3, 4).round()),
    *(named(op, normal(3, 4) * 4, positive(4)) for op in ("floor_divide", "remainder")),
    both("floor_divide", lambda x: x // 3, integers(20, 3, 4) - 9, what="whole numbers", dtype=np.int64),
    both("remainder", lambda x: 20 % (x % 4 - 5), integers(20, 4), what="whole numbers", dtype=np.int64),
    *(named(op, booleans(3, 4), booleans(4), dtype=np.bool_) for op in ("bitwise_and", "bitwise_or")),
    both("bitwise_and", lambda x: (x & 6 | 1) & ~x, integers(99, 5), what="whole numbers", dtype=np.int64),
    named("invert", booleans(5), dtype=np.bool_),
    # NumPy 2.0 has other names for them.
    named("clip", normal(3, 4), reference=lambda x, min, max: np.clip(x, min, max), min=-0.25, max=0.5),
    case("clip", pce.clip, np.clip, normal(3, 4), -positive(4), positive(3, 1), what="arrays"),
    case("clip", partial(pce.clip, max=0.5), lambda x: np.minimum(x, 0.5), normal(5), what="no lower bound"),
    named("maximum", normal(3, 4).round(), normal(3, 4).round()),
    named("power", positive(3, 4), normal(3, 4)),
    named("power", positive(3, 1), normal(1, 4)),
    named("add", normal(2, 3, 4), normal(3, 1)),
    named("multiply", normal(), normal(4)),
    named("multiply", normal(0, 3), normal(1, 3)),
    *(both("power", lambda x, y=y: x**y, positive(3, 4), what=f"x**{y}") for y in (2, 3, -1, 0.5, 0, 1)),
    both("power", lambda x: x**2, normal(3, 4) * np.array([[1], [0], [-1]]), what="x**2 at 0"),
    case("power", pce.power, np.power, np.array([0.0, 0.0, 0.0, 2.0]), np.arange(4.0) % 3, what="at 0", smooth=None),
    both("power", lambda x: 2**x, normal(3, 4), what="2**x"),
    both("add", lambda x: 2.5 + x + 1, normal(3, 4), what="numbers"),
    both("subtract", lambda x: 1 - x - 2, normal(3, 4), what="numbers"),
    both("multiply", lambda x: 3 * x * 0.5, normal(3, 4), what="numbers"),
    both("divide", lambda x: 1 / (x / 4), positive(3, 4), what="numbers"),
    case("maximum", lambda x: pce.maximum(x, 0.25), lambda x: np.maximum(x, 0.25), normal(3, 4), what="a number"),
    case(
        "equal",
        OPERATIONS["equal"],
        np.equal,
        normal(3, 4).round(),
        normal(4).round(),
        gradient=[False] * 2,
        dtype=np.bool_,
        parameters={},
    ),
    named("where", booleans(3, 4), normal(3, 4), normal(3, 4)),
    named("where", booleans(4), normal(3, 1), normal(3, 4)),
    named("where", booleans(3, 1), normal(3, 4), normal()),
    case("where", lambda c, x: pce.where(c, x, 0), lambda c, x: np.where(c, x, 0), booleans(3, 4), normal(3, 4)),
    case(
        "astype",
        lambda x: x.astype(np.float32),
        lambda x: x.astype(np.float32),
        normal(3, 4),
        smooth=lambda x: x,
        dtype=np.float32,
        parameters={"dtype": np.float32},
    ),
    *(
        both("astype", lambda x, dtype=dtype: x.astype(dtype), x, what=dtype.__name__, gradient=[False], dtype=dtype)
        for x, dtype in [(integers(9, 3, 4), np.float64), (normal(3, 4) * 9, np.int64), (integers(2, 4), np.bool_)]
    ),
    both("add", lambda x, y: x + y * 2, integers(9, 3, 4), integers(9, 4), what="whole numbers", dtype=np.int64),
]

MATMUL = [
    named("matmul", normal(*a), normal(*b))
    for a, b in [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 3)),
        ((3, 4), (2, 4, 3)),
        ((2, 1, 3, 4), (3, 4, 2)),
        ((4,), (4, 3)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 3, 4), (4,)),
        ((4,), (2, 4, 3)),
        ((3, 0), (0, 2)),
        ((2, 0, 4), (4, 3)),
    ]
]
MATMUL += [
    both("matmul", lambda x, y: x @ y, booleans(2, 3, 4), booleans(*shape), what="booleans", dtype=np.bool_)
    for shape in [(4, 2), (2, 4, 3), (4,)]
]

# The largest numbers of each row are two, and so are the smallest.
PAIRS = np.array([[3.0, 0.0, 0.0, 3.0], [1.0, 2.0, 1.0, 2.0], [5.0, 5.0, -1.0, -1.0]])

AXES: list[dict[str, Any]] = [{}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"axis": (0, 2)}, {"axis": (-2, 0)}]

PRODUCTS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("bk,km->bm", [(3, 4), (4, 2)]),
    ("hqd,hkd->hqk", [(1, 3, 2), (2, 2, 2)]),
    ("ij, j, ik -> k", [(3, 2), (2,), (3, 4)]),
    ("ba", [(3, 4)]),
    ("ij->i", [(3, 4)]),
    ("iji,i->j", [(2, 3, 2), (2,)]),
    ("...k,k...", [(2, 3, 4), (4, 3)]),
]
EINSUM = [
    case(
        "einsum",
        partial(pce.einsum, subscripts),
        partial(np.einsum, subscripts),
        *(normal(*shape) for shape in shapes),
        what=subscripts,
        parameters={"subscripts": subscripts},
    )
    for subscripts, shapes in PRODUCTS
]
EINSUM += [both("einsum", lambda x: np.einsum("ij->j", x), booleans(3, 2), what="booleans", dtype=np.bool_)]

REDUCTIONS = [
    *(named(op, normal(2, 3, 4), **parameters) for op in ("sum", "mean") for parameters in AXES),
    *(named("logsumexp", normal(2, 3, 4), reference=logsumexp, **parameters) for parameters in AXES),
    *(
        named(op, np.asarray(_rng.permutation(24).reshape(2, 3, 4) / 4.0), **parameters)
        for op in ("max", "min")
        for parameters in AXES
    ),
    *(named(op, normal(5)) for op in ("sum", "mean", "max", "min")),
    *(named("var", normal(2, 3, 4), **parameters) for parameters in (AXES[0], AXES[2], AXES[3] | {"ddof": 1})),
    *(named("std", normal(3, 4), **parameters) for parameters in ({"ddof": 1}, {"axis": 0})),
    case("var", partial(pce.var, axis=0), partial(np.var, axis=0), integers(9, 3, 2), what="whole", dtype=np.float64),
    case("var", pce.var, np.var, normal(5) + 1e4, what="far from 0", size=1e4),
    named("cumsum", normal(3, 4), axis=1),
    named("cumsum", normal(2, 3)),
    case("cumsum", partial(pce.cumsum, axis=0), partial(np.cumsum, axis=0), booleans(5, 2), dtype=np.int64),
    named("logsumexp", normal(3), reference=logsumexp),
    named("logsumexp", normal(3), reference=logsumexp, axis=0),
    *(named(op, normal(), axis=()) for op in ("sum", "mean", "max")),
    named("sum", normal(0, 3), axis=0),
    named("sum", normal(0, 3), axis=1),
    named("sum", normal(3, 4), axis=()),
    *(case(op, getattr(pce, op), getattr(np, op), PAIRS[0], what="ties") for op in ("max", "min")),
    *(
        case(op, partial(getattr(pce, op), axis=1), partial(getattr(np, op), axis=1), PAIRS, what="ties, axis=1")
        for op in ("max", "min")
    ),
    case("max", pce.max, np.max, np.array([[1.0, 2.0, 2.0], [0.0, 2.0, 1.0]]), what="three ties", smooth=None),
    *(
        case(op, partial(call, axis=1), partial(reference, axis=1), normal(3, 4) + 1e4, what="far from 0", size=1e4)
        for op, call, reference in (
            ("mean", pce.mean, np.mean),
            ("max", pce.max, np.max),
            ("logsumexp", pce.logsumexp, logsumexp),
        )
    ),
    case("sum", pce.sum, np.sum, integers(5, 3, 4), what="whole numbers", dtype=np.int64),
    case("sum", partial(pce.sum, axis=0), partial(np.sum, axis=0), booleans(5, 2), what="booleans", dtype=np.int64),
    case(
        "mean", partial(pce.mean, axis=0), partial(np.mean, axis=0), integers(5, 3, 4), what="whole", dtype=np.float64
    ),
    case("max", pce.max, np.max, integers(99, 3, 4) - 50, what="whole numbers", dtype=np.int64),
    case("min", partial(pce.min, axis=0), partial(np.min, axis=0), booleans(3, 4), what="booleans", dtype=np.bool_),
    case("logsumexp", pce.logsumexp, logsumexp, masked(3, 4), what="-inf"),
    case("logsumexp", partial(pce.logsumexp, axis=1), partial(logsumexp, axis=1), masked(3, 4), what="-inf, axis=1"),
]

TO_JOIN: list[tuple[int, list[tuple[int, ...]]]] = [
    (0, [(2, 3), (1, 3)]),
    (-1, [(3, 2), (3, 4)]),
    (1, [(2, 1, 3), (2, 4, 3)]),
    (0, [(2,), (0,), (3,)]),
    (0, [(3, 2)]),
]

SHAPES = [
    *(
        named("reshape", normal(*before), reference=lambda x, shape: x.reshape(shape), shape=after)
        for before, after in [
            ((4, 6), (24,)),
            ((4, 6), (-1,)),
            ((24,), (4, 6)),
            ((24,), (4, -1, 2)),
            ((2, 3, 4), (6, 4)),
            ((2, 3, 4), (2, 12)),
            ((6, 4), (4, 6)),
            ((6, 4), (2, 3, 2, 2)),
            ((1, 4, 1), (4,)),
            ((4,), (1, 4, 1)),
            ((2, 3), (3, 2)),
            ((), (1, 1)),
            ((1, 1), ()),
            ((0, 3), (3, 0)),
            ((2, 0), (-1, 2)),
        ]
    ),
    named("transpose", normal(2, 3, 4)),
    named("transpose", normal(2, 3, 4), axes=(1, 2, 0)),
    both("transpose", lambda x: x.transpose(1, 2, 0).T.transpose(), normal(2, 3, 4), what="as methods"),
    named("swapaxes", normal(2, 3, 4), axis1=0, axis2=-1),
    *(
        case(
            "concatenate",
            lambda *arrays, axis=axis: pce.concatenate(arrays, axis),
            lambda *arrays, axis=axis: np.concatenate(arrays, axis),
            *(normal(*shape) for shape in shapes),
            what=f"axis={axis}",
            parameters={"axis": axis},
        )
        for axis, shapes in TO_JOIN
    ),
    *(
        case(
            "stack",
            lambda *arrays, axis=axis: pce.stack(arrays, axis),
            lambda *arrays, axis=axis: np.stack(arrays, axis),
            *(normal(3, 2) for _ in range(count)),
            what=f"axis={axis}",
            parameters={"axis": axis},
        )
        for axis, count in ((0, 1), (-2, 2))
    ),
    named("squeeze", normal(1, 4, 1)),
    named("squeeze", normal(1, 4, 1), axis=-1),
    named("expand_dims", normal(3, 2), axis=1),
    named("expand_dims", normal(3), axis=(0, -1)),
    *(
        named("split", normal(4, 6), indices_or_sections=where, axis=axis)
        for where, axis in [(2, 0), (3, 1), ([1, 4], -1), ([0, 3, 9], 0)]
    ),
    *(
        both("slice", lambda x, at=index: x[at], normal(3, 4, 2), what=str(index), parameters={"index": index})
        for index in [
            (1,),
            (slice(1, None),),
            (slice(None), slice(None, None, -1)),
            (slice(None), slice(3, 0, -2), -1),
            (slice(None), None, slice(1, 3)),
            (..., 0),
            (..., None),
            (-1, ..., slice(0, 0)),
            (slice(None), slice(-10, None, -1)),
            (slice(5, 1), 2),
            (slice(None),),
        ]
    ),
    both("slice", lambda x: x[2], normal(5), what="an element"),
    *(
        both("slice", lambda x, at=index: x[at], normal(3, 4, 2), what=f"arrays {number}", parameters={"index": index})
        for number, index in enumerate(
            [
                ([2, 0, 2, -1],),
                (slice(None), [[3, 1], [1, 0]]),
                (slice(1, None), [0, 0, 3], [[1], [0]]),
                (-1, slice(None), None, [1, 1]),
                (..., [True, False]),
                ((np.arange(12).reshape(3, 4) % 5 == 1).tolist(),),
                (slice(None), []),
            ]
        )
    ),
    both("slice", lambda x, at: x[:, at], normal(3, 4), integers(4, 5), what="distributed indices"),
    both("slice", lambda x, at: x[at], normal(3, 2), np.array([True, False, True]), what="a distributed mask"),
    *(
        named("broadcast_to", normal(*before), shape=after)
        for before, after in [((3, 1), (2, 3, 4)), ((), (3,)), ((4,), (3, 4)), ((1, 3), (1, 3)), ((1, 3), (0, 3))]
    ),
    *(
        case("redistribute", moved_to(placement), lambda x: x, normal(5, 3), what=str(placement))
        for placement in [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg"), Partial("max")]
    ),
    case("op", running_sum, partial(np.cumsum, axis=0), normal(4, 3), what="running_sum"),
    case("op", outer, partial(np.einsum, "ab,cb->acb"), normal(2, 3), normal(4, 3), what="outer"),
]


EMBEDDING = [
    named("embedding", ids, normal(5, 3), reference=lambda ids, table: table[ids])
    for ids in (np.array([4, 0, 4, 4]), np.array([[1, 3, 1], [0, 2, 3]]), np.array(2), np.zeros((0,), np.int64))
]

NORMALIZATION = [
    *(
        named(op, x, reference=reference, axis=axis)
        for op, reference in (("softmax", softmax), ("log_softmax", log_softmax))
        for x, axis in [(normal(3, 4), -1), (normal(3, 4), 0), (normal(2, 3, 2), 1), (normal(5), 0)]
    ),
    *(
        case(op, call, reference, normal(3, 4) + 1e4, what="far from 0", size=1e4)
        for op, call, reference in [("softmax", pce.softmax, softmax), ("log_softmax", pce.log_softmax, log_softmax)]
    ),
    *(
        case(op, call, reference, masked(3, 4), what="-inf")
        for op, call, reference in [("softmax", pce.softmax, softmax), ("log_softmax", pce.log_softmax, log_softmax)]
    ),
    named("scaled_dot_product_attention", normal(3, 4), normal(5, 4), normal(5, 2), reference=attention),
    named("scaled_dot_product_attention", *(normal(5, 3) for _ in "qkv"), reference=attention, causal=True),
    named(
        "scaled_dot_product_attention",
        *(normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 6)),
        reference=attention,
        causal=True,
        scale=2.0,
    ),
    named("layer_norm", normal(3, 4), reference=layer_norm),
    named("layer_norm", normal(3, 4), normal(4), reference=layer_norm),
    named("layer_norm", normal(2, 3, 4), normal(4), normal(4), reference=layer_norm, eps=0.01),
    named("layer_norm", normal(2, 5, 3), normal(5), normal(5), reference=layer_norm, axis=1),
    named("rms_norm", normal(3, 4), reference=rms_norm),
    named("rms_norm", normal(3, 4), normal(3), reference=rms_norm, axis=0, eps=0.01),
    named("rms_norm", normal(2, 3, 4), normal(4), reference=rms_norm),
]


def _special(op: str, reference: Any) -> Case:
    call = partial(getattr(pce, op), axis=1)
    return case(op, call, partial(reference, axis=1), SPECIAL, what="special values", smooth=None)


SPECIALS = [
    *(_special(op, getattr(np, op)) for op in ("sum", "mean", "max", "min")),
    _special("logsumexp", lambda x, axis: np.log(np.exp(x).sum(axis))),  # `logsumexp` subtracts an infinity
    *(_special(op, reference) for op, reference in (("softmax", softmax), ("log_softmax", log_softmax))),
]


def _cross_entropy(logits: Array, targets: Array, weight: Array | None = None, **options: Any) -> Case:
    operands = [logits, targets] + ([] if weight is None else [weight])
    what = ", ".join(f"{name}={value}" for name, value in options.items())
    dtype = options.get("compute_dtype")

    def call(logits: Any, targets: Any, *weight: Any) -> Any:
        return pce.cross_entropy(logits, targets, weight=weight[0] if weight else None, **options)

    def reference(logits: Any, targets: Any, *weight: Any) -> Any:
        return np.asarray(dense.softmax_cross_entropy(logits, targets, weight=weight[0] if weight else None, **options))

    gradient = [True] + [False] * (len(operands) - 1)
    parameters = options if weight is None else None
    more = {"what": what, "dtype": dtype, "parameters": parameters}
    return case("cross_entropy", call, reference, *operands, gradient=gradient, **more)


def _linear_cross_entropy(
    hidden: Array, w: Array, targets: Array, weight: Array | None = None, bias: Array | None = None, **options: Any
) -> Case:
    more = {name: array for name, array in (("weight", weight), ("bias", bias)) if array is not None}

    def call(hidden: Any, w: Any, targets: Any, *arrays: Any) -> Any:
        return pce.linear_cross_entropy(hidden, w, targets, **dict(zip(more, arrays, strict=True)), **options)

    def reference(*arrays: Any) -> Any:
        given = {name: value for name, value in options.items() if name != "chunk"}
        given |= dict(zip(more, arrays[3:], strict=True))
        return np.asarray(dense.linear_cross_entropy_value_and_grad(*arrays[:3], **given).loss)

    what = ", ".join([f"{name}={value}" for name, value in options.items()] + ["bias"] * (bias is not None))
    gradient = [True, True, False, *(name == "bias" for name in more)]
    last: dict[str, Any] = {"what": what, "gradient": gradient, "parameters": None if more else options}
    return case("linear_cross_entropy", call, reference, hidden, w, targets, *more.values(), **last)


LINEAR_LOSSES = [
    _linear_cross_entropy(normal(5, 3), normal(3, 4), integers(4, 5)),
    _linear_cross_entropy(normal(5, 3), normal(3, 4), np.array([0, -100, 3, 1, -100]), reduction="sum", chunk=2),
    _linear_cross_entropy(normal(5, 3), normal(3, 4), integers(4, 5), positive(4), label_smoothing=0.1, chunk=1),
    _linear_cross_entropy(normal(2, 3, 4), normal(4, 5), integers(5, 2, 3), z_loss=0.1, softcap=2.0, chunk=4),
    _linear_cross_entropy(normal(5, 3), normal(3, 4), integers(4, 5), bias=normal(4), chunk=2),
    _linear_cross_entropy(normal(5, 3) / 4, normal(3, 4) / 4, integers(4, 5), margin=(1.0, 0.5, 0.1), logit_scale=4.0),
]


def _kl_divergence(student: Array, teacher: Array, counted: Array | None = None, **options: Any) -> Case:
    operands = [student, teacher] + ([] if counted is None else [counted])
    what = ", ".join(f"{name}={value}" for name, value in options.items())

    def call(student: Any, teacher: Any, *counted: Any) -> Any:
        return pce.kl_divergence(student, teacher, rows=counted[0] if counted else None, **options)

    def reference(student: Any, teacher: Any, *counted: Any) -> Any:
        given = {"rows": counted[0] if counted else None, **options}
        return np.asarray(dense.kl_divergence_value_and_grad(student, teacher, **given).divergence)

    more = {"what": what, "parameters": options if counted is None else None}
    return case("kl_divergence", call, reference, *operands, gradient=[True, True, False][: len(operands)], **more)


LOSSES = [
    _kl_divergence(normal(5, 4), normal(5, 4)),
    _kl_divergence(normal(4, 5), normal(4, 5), booleans(5), axis=0, direction="reverse", logit_scale=0.5),
    _kl_divergence(normal(2, 4, 3), normal(2, 4, 3), booleans(2, 3), axis=1, reduction="none"),
    _kl_divergence(normal(5, 4), normal(5, 4), direction="jensen-shannon", reduction="sum", logit_scale=2.0),
    _cross_entropy(normal(5, 4), integers(4, 5)),
    _cross_entropy(normal(5, 4) * 4, np.array([0, -100, 3, 1, -100]), reduction="sum"),
    _cross_entropy(normal(5, 4), np.array([0, 1, 3, 1, 0]), positive(4), ignore_index=1),
    _cross_entropy(normal(5, 4), integers(4, 5), positive(4), label_smoothing=0.1, reduction="none"),
    _cross_entropy(normal(3, 4), integers(4, 3), z_loss=0.1, logit_scale=0.5),
    _cross_entropy(normal(3, 4), integers(4, 3), softcap=2.0, logit_scale=1.5, reduction="sum"),
    _cross_entropy(normal(5, 4) / 4, integers(4, 5), margin=(1.35, 0.5, 0.1), logit_scale=4.0),
    _cross_entropy(normal(4, 5), integers(4, 5), axis=0),
    _cross_entropy(normal(5, 4), integers(4, 5), compute_dtype=np.float64),
    _cross_entropy(normal(2, 4, 3), integers(4, 2, 3), axis=1, reduction="none"),
    _cross_entropy(normal(2, 4, 3), integers(4, 2, 3), positive(4), axis=-2, label_smoothing=0.3, z_loss=0.01),
    _cross_entropy(normal(5), np.array(3), axis=0),
    _cross_entropy(normal(5, 4), probabilities(5, 4)),
    _cross_entropy(normal(4, 3), probabilities(4, 3), positive(4), axis=0, reduction="none"),
    _cross_entropy(normal(3, 4), probabilities(3, 4), positive(4), label_smoothing=0.2, softcap=3.0, reduction="sum"),
    _cross_entropy(normal(0, 4), integers(4, 0), reduction="sum"),
    named("mse", normal(3, 4), normal(3, 4), reference=lambda x, y: np.mean((x - y) ** 2)),
    named("mse", normal(3, 4), normal(4), reference=lambda x, y: np.mean((x - y) ** 2)),
]


def _class_statistics(logits: Array, targets: Array, **options: Any) -> Case:
    """Those that have a gradient; `targets` may be several a row."""

    def call(logits: Any, targets: Any) -> Any:
        found = pce.class_statistics(logits, targets, **options)
        return [found.entropy, found.logsumexp, found.log_prob]

    def reference(logits: Any, targets: Any) -> Any:
        axis = options.get("axis", -1)
        scaled = np.moveaxis(options.get("logit_scale", 1.0) * logits, axis, -1)
        if "support" in options:
            ids, offsets = options["support"]
            outside = np.full(scaled.shape, -1e3)  # nothing, but with a derivative that complex numbers can take
            for row, place in enumerate(np.ndindex(scaled.shape[:-1])):
                outside[place][ids[offsets[row] : offsets[row + 1]]] = 0.0
            scaled = scaled + outside
        log_p = log_softmax(scaled)
        several = targets.ndim == logits.ndim
        each = np.moveaxis(targets, axis, -1) if several else targets[..., None]
        of_target = np.where(each == -100, 0.0, np.take_along_axis(log_p, np.maximum(each, 0), -1))
        entropy = -(np.exp(log_p) * log_p).sum(-1)
        log_prob = np.moveaxis(of_target, -1, axis) if several else of_target[..., 0]
        return [entropy, logsumexp(scaled, -1), log_prob]

    what = ", ".join(f"{name}={value}" for name, value in options.items())
    return case(
        "class_statistics", call, reference, logits, targets, gradient=[True, False], what=what, parameters=options
    )


def _linear_class_statistics(
    hidden: Array, w: Array, targets: Array | None = None, bias: Array | None = None, **options: Any
) -> Case:
    """Those that have a gradient."""
    more = {name: array for name, array in (("targets", targets), ("bias", bias)) if array is not None}
    names = ["log_prob", "entropy", "logsumexp"] if targets is not None else ["entropy", "logsumexp"]

    def call(hidden: Any, w: Any, *arrays: Any) -> Any:
        found = pce.linear_class_statistics(hidden, w, **dict(zip(more, arrays, strict=True)), **options)
        return [getattr(found, name) for name in names]

    def reference(hidden: Any, w: Any, *arrays: Any) -> Any:
        given = {name: value for name, value in options.items() if name != "chunk"}
        found = dense.linear_class_statistics(hidden, w, **dict(zip(more, arrays, strict=True)), **given)
        return [getattr(found, name) for name in names]

    what = ", ".join([f"{name}={value}" for name, value in options.items()] + [*more])
    gradient = [True, True, *(name == "bias" for name in more)]
    last: dict[str, Any] = {"what": what, "gradient": gradient, "parameters": options if bias is None else None}
    return case("linear_class_statistics", call, reference, hidden, w, *more.values(), **last)


def _take_classes(logits: Array, ids: Array, axis: int = -1) -> Case:
    return case(
        "take_classes",
        lambda x, ids: pce.take_classes(x, ids, axis=axis),
        lambda x, ids: np.take_along_axis(x, ids, axis),
        logits,
        ids,
        gradient=[True, False],
        parameters={"axis": axis},
    )


def _top_k(logits: Array, k: int, axis: int = -1) -> Case:
    def reference(x: Array) -> Array:
        return np.flip(np.sort(x, axis), axis).take(range(k), axis)

    parameters = {"k": k, "axis": axis}
    return case("top_k", lambda x: [pce.top_k(x, k, axis=axis)[0]], reference, logits, parameters=parameters)


STATISTICS = [
    _class_statistics(normal(3, 4), integers(4, 3)),
    _class_statistics(normal(4, 3, 2), np.array([[0, -100], [3, 3], [2, 1]]), axis=0, logit_scale=0.5),
    _class_statistics(normal(3, 4), integers(4, 3, 2)),
    _class_statistics(normal(2, 4, 2), np.array([[[0, -100], [3, 3], [0, 1]]] * 2), axis=1, logit_scale=0.5),
    _class_statistics(normal(3, 4), np.array([1, 0, 3]), support=([1, 2, 0, 3, 0, 1], [0, 2, 3, 6])),
    _linear_class_statistics(normal(5, 3), normal(3, 4), integers(4, 5), chunk=2),
    _linear_class_statistics(normal(2, 3, 4), normal(4, 5), bias=normal(5), softcap=2.0, chunk=4),
    _linear_class_statistics(normal(5, 3), normal(3, 4), np.array([0, -100, 3, 1, -100]), normal(4), logit_scale=0.5),
    _take_classes(normal(3, 5), integers(5, 3, 2)),
    _take_classes(normal(5, 2, 3), integers(5, 4, 2, 3), axis=0),
    _top_k(np.asarray(_rng.permutation(15).reshape(3, 5) / 4.0), 2),
    _top_k(np.asarray(_rng.permutation(12).reshape(4, 3) / 4.0), 4, axis=0),
    *(named("argmax", integers(4, 4, 3) / 2, gradient=[False], dtype=np.int64, axis=axis) for axis in (0, 1)),
    named("argmax", integers(4, 3, 5), dtype=np.int64, axis=-1),
]

NUMBERS = [
    named("add", normal(6, 2), reference=lambda x, y: x + y, y=2),
    named("power", normal(6, 2), reference=lambda x, y: x**y, y=2),
    named("power", positive(6, 2), reference=lambda x, y: x**y, y=2.5),
    named("divide", normal(6, 2), reference=lambda x, y: x / y, y=2),
    named("where", booleans(5, 1), normal(5, 3), reference=lambda c, x, y: np.where(c, x, y), y=0.0),
]

CASES = [
    *ELEMENTWISE,
    *MATMUL,
    *EINSUM,
    *REDUCTIONS,
    *SHAPES,
    *EMBEDDING,
    *NORMALIZATION,
    *SPECIALS,
    *LOSSES,
    *LINEAR_LOSSES,
    *STATISTICS,
    *NUMBERS,
]
OPS = list(dict.fromkeys(case.op for case in CASES))
# The operations that the package defines by their own names. The six comparisons are one operation.
DEFINED = {name for name in OPERATIONS if not name.startswith("_")}
DEFINED -= {"slice", "not_equal", "greater", "greater_equal", "less", "less_equal"}


def cases_of(op: str) -> list[Case]:
    return [case for case in CASES if case.op == op]


# ------------------------------------------------------------------------------------------------------- to run a case


@dataclass(frozen=True)
class Outcome:
    """The arrays that this rank holds in the end; `gradients` has None for an operand that no gradient was asked of.

    `changed` are the operands that were written to.
    """

    operands: list[DistArray]
    results: list[DistArray]
    gradients: list[DistArray | None]
    changed: list[int]

    @property
    def arrays(self) -> list[DistArray]:
        return [*self.results, *(gradient for gradient in self.gradients if gradient is not None)]


def evaluate(
    case: Case,
    mesh: Mesh,
    shardings: Sequence[Sharding],
    *,
    dtype: Any = np.float64,
    library: Any = np,
    required: Sequence[bool] | None = None,
    agreed: bool = False,
    seed: int = 0,
) -> Outcome:
    """Forward, and backward from the projections of the results; collective over `mesh`.

    `required` are the operands to find the gradient of, all that have one if it is None. In the end those are
    written to, as a step would: no gradient may share their memory. `agreed`: ranks find out how operands are
    placed by `from_local`, and are not told.
    """
    wanted = case.has_gradient if required is None else required
    operands, given = [], []
    for index, (whole, sharding) in enumerate(zip(case.in_dtype(dtype), shardings, strict=True)):
        local = local_of(whole, sharding, mesh.coordinates, seed=[seed, index])
        given.append(local.copy())
        held = library.asarray(local)
        if agreed:
            placed = dict(sharding.by_dim)
            operands.append(from_local(held, mesh, shape=whole.shape, requires_grad=wanted[index], **placed))
        else:
            operands.append(DistArray(held, mesh, sharding, requires_grad=wanted[index]))
    results = listed(case.call(*operands))
    kept = [DistArray(x.local.copy(), mesh, x.sharding) for x in results]
    if any(wanted):
        losses = [
            pce.sum(result * library.asarray(projection.astype(result.dtype)))
            for result, projection in zip(results, case.projections, strict=True)
        ]
        reduce(add, losses).backward()
    changed = [
        index
        for index, (x, before) in enumerate(zip(operands, given, strict=True))
        if to_host(x.local).tobytes() != before.tobytes()
    ]
    for x in operands:
        if x.requires_grad:
            x.local[...] = 77
    return Outcome(operands, kept, [x.grad for x in operands], changed)


def replicated(case: Case, mesh: Mesh) -> list[Sharding]:
    """Every operand on every rank."""
    return [Sharding.of(mesh.dim_sizes, x.shape, {}) for x in case.operands]


def alone() -> Mesh:
    """A mesh of this process."""
    return mesh_of(MPI.COMM_SELF, 1)


@cache
def one_process(case: Case) -> tuple[list[Array], list[Array | None]]:
    """Results and gradients where one process holds everything."""
    outcome = evaluate(case, alone(), replicated(case, alone()))
    return [x.local for x in outcome.results], [None if x is None else x.local for x in outcome.gradients]


def error_of(case: Case, got: Array, expected: Array, dtype: Any = np.float64) -> float:
    """In ulps that the largest number of `expected`, or on the way to it, has in `dtype`."""
    finite = np.abs(expected[np.isfinite(expected)], dtype=np.float64)
    return worst(got, expected, dtype, max(case.size, float(finite.max(initial=1.0))))
