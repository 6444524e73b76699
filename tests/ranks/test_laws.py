"""Laws that hold of every public call on plain arrays, whatever it computes; `calls.py` has the calls."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard
from pce_mpi.arrays import to_host
from pce_mpi.testing import in_step
from ranks.calls import AXES, CALLS, CLASSES, IGNORED, ROWS, Call, axes_of, named
from ranks.grids import mesh_of, squarest
from ranks.problems import SPLITS, split
from ulps import FINITE_DIFFERENCE, OPERATION, ROUNDED_ONCE, SHARDED, errors, ulp, worst

# One rank, and shards of several lengths. The laws of bits and of the tape run on more.
pytestmark = pytest.mark.ranks(1, 3)
by_call = pytest.mark.parametrize("call", CALLS, ids=str)
by_dtype = pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda dtype: dtype.__name__
)
ALL = slice(None)


def cut(name: str, x: Any, rows: slice = ALL, classes: slice = ALL) -> Any:
    """These rows and classes of an operand, a gradient or a result, which has rows first if it has as many elements."""
    if name == "support":
        ids, offsets = x
        first, last, _ = rows.indices(ROWS)
        return ids[offsets[first] : offsets[last]], offsets[first : last + 1] - offsets[first]
    if name in AXES or name[1:] in AXES:
        where = {"r": rows, "c": classes}
        return x[tuple(where.get(axis, ALL) for axis in axes_of(name)[: np.ndim(x)])].copy()
    return x[rows] if np.shape(x)[:1] == (ROWS,) else x


def cut_all(given: dict[str, Any], rows: slice = ALL, classes: slice = ALL) -> dict[str, Any]:
    return {name: cut(name, x, rows, classes) for name, x in given.items()}


def shard_of(comm: Any, call: Call, operands: dict[str, Any], how: str = "uneven") -> tuple[dict[str, Any], slice]:
    """The arguments of this rank, with the place of its classes; ranks have them in reverse order."""
    mine = slice(*split(CLASSES, comm.size, how)[::-1][comm.rank])
    place = {"comm": comm, "num_classes": CLASSES, "class_start": mine.start}
    return cut_all(operands, classes=mine) | call.options | place, mine


def same(found: Any, expected: Any) -> bool:
    """True if two arrays have equal bits, but for which of the many nan a nan is."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.dtype.kind not in "iub":
        nan = np.isnan(expected)
        if not np.array_equal(np.isnan(found), nan):
            return False
        found, expected = (np.where(nan, x.dtype.type(0), x) for x in (found, expected))
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def check(call: Call, found: dict[str, Any], expected: dict[str, Any], text: object = "") -> None:
    """Assert that all bits are the same, or most where products have no promised bits."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        if call.same_bits:
            assert same(found[name], right), (name, text)
        else:
            size = np.abs(right, dtype=np.float64).max(initial=1.0)
            kind = np.float64 if np.asarray(right).dtype == np.float64 else np.float32
            assert worst(found[name], right, kind, size) <= SHARDED, (name, text)


@by_dtype
@by_call
def test_call_is_that_of_the_oracle(comm, call, dtype):
    operands, upstream = call.operands(dtype), call.upstream_gradients()
    given, mine = shard_of(comm, call, operands)
    found = call.run(given, upstream)
    expected = cut_all(call.oracle(operands | call.options, upstream), classes=mine)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        kind = found[name].dtype
        if kind.kind in "iu":
            assert same(found[name], right), name
            continue
        size = np.abs(right[np.isfinite(right)]).max(initial=1.0)
        allowed = OPERATION * ulp(size, np.float64 if dtype is np.float64 else np.float32)
        if kind.itemsize < 4:
            allowed = allowed + ROUNDED_ONCE * ulp(right, kind)
        assert np.all(errors(found[name], right, np.float64, 1.0) * ulp(1.0, np.float64) <= allowed), name


@pytest.mark.ranks(1)  # the next law shows that others have the same bits
@by_call
def test_gradient_is_the_finite_difference(call):
    operands, upstream = call.operands(np.float64), call.upstream_gradients()
    for name in call.wrt:
        operands[name] = np.maximum(operands[name], -5.0)  # no loss may be infinite
    results, _ = call.forward(operands | call.options)
    upstream = {name: np.where(np.isfinite(results[name]), g, 0.0) for name, g in upstream.items()}
    found = call.run(operands | call.options, upstream)
    step, rng = np.finfo(np.float64).eps ** (1 / 3), np.random.default_rng(8)
    for name in call.wrt:
        along = rng.standard_normal(operands[name].shape)
        ends = []
        for sign in (1, -1):
            moved = operands | call.options | {name: operands[name] + sign * step * along}
            results, _ = call.forward(moved)
            ends.append(sum((g * np.where(g == 0, 0.0, results[each])).sum() for each, g in upstream.items()))
        slope = (found[f"d{name}"] * along).sum()
        limit = FINITE_DIFFERENCE * np.finfo(np.float64).eps * max(1.0, abs(slope))
        assert abs(slope - (ends[0] - ends[1]) / (2 * step)) <= limit, name


@pytest.mark.ranks(2, 3, 4)  # MPI joins powers of two in another way
@by_dtype
@by_call
def test_call_has_bits_of_one_process(comm, call, dtype):
    operands, upstream = call.operands(dtype), call.upstream_gradients()
    whole = call.run(operands | call.options, upstream)
    for how in SPLITS:
        given, mine = shard_of(comm, call, operands, how)
        found = call.run(given, upstream)
        with in_step(comm):
            check(call, found, cut_all(whole, classes=mine), how)


@by_call
def test_call_sends_its_bytes_and_backward_nothing(comm, call):
    given, _ = shard_of(comm, call, call.operands(np.float32))
    with pce.trace() as trace:
        _, residuals = call.forward(given)
    if call.bytes_a_row is not None:
        assert trace.bytes("all_reduce") == call.bytes_a_row * ROWS
    with pce.trace() as trace:
        dict(call.gradients(residuals, call.upstream_gradients()))
    assert call.wrt[:1] == ("hidden",) or trace.count(purpose=None) == 0


@by_call
def test_each_way_to_call_gives_the_same(comm, call):
    given, _ = shard_of(comm, call, call.operands(np.float32))
    results, residuals = call.forward(given)
    check(call, named(call.function_of("")(**given)), results)
    if fused := call.function_of("_value_and_grad"):
        ones = {name: np.ones(shape) for name, shape in call.upstream.items()}
        gradient = next(x for _, x in call.gradients(residuals, ones))
        assert all(map(same, fused(**given), (results["result"], gradient)))


@by_call
def test_call_leaves_arguments_alone(comm, call):
    given, _ = shard_of(comm, call, call.operands(np.float32))
    upstream = call.upstream_gradients()
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    before = {name: x.tobytes() for name, x in arrays.items()}
    found = call.run(given, upstream)
    assert {name: x.tobytes() for name, x in arrays.items()} == before
    assert not [name for name, result in found.items() if any(np.shares_memory(result, x) for x in arrays.values())]
    # Neither the small arguments nor the results are needed by the backward pass.
    results, residuals = call.forward(given)
    for name, x in given.items():
        for each in x if name == "support" else (x,):
            if name not in call.wrt and isinstance(each, np.ndarray):
                each[...] = 0
    for x in results.values():
        x[...] = 0
    check(call, dict(call.gradients(residuals, upstream)), {name: found[name] for name in found if name not in results})


@by_call
def test_call_takes_any_axis_and_strides(comm, call):
    given, _ = shard_of(comm, call, call.operands(np.float32))
    upstream, axis = call.upstream_gradients(), "axis" in call.parameters

    def folded(name: str, x: Any) -> Any:
        """Rows of two axes, the class axis between them if it may be; of any strides."""
        axes = AXES.get(name, "")[: np.ndim(x)] if isinstance(x, np.ndarray) else ""
        if axes[:1] != "r":
            return np.asfortranarray(x) if axes else x
        x = np.repeat(x.reshape(3, 3, *x.shape[1:]), 2, axis=1)[:, ::2]
        return np.moveaxis(x, -1, 1) if axis and x.ndim == 3 else x

    def unfolded(x: Any) -> Any:
        if np.shape(x)[:1] != (3,) or np.ndim(x) < 2:
            return x
        return (np.moveaxis(x, 1, -1) if axis and x.ndim == 3 else x).reshape(ROWS, *([-1] * (x.ndim - 2)))

    found = call.run(given, upstream)
    more = {"axis": 1} if axis else {}
    again = call.run(
        {name: folded(name, x) for name, x in given.items()} | more,
        {name: folded(name, x) for name, x in upstream.items()},
    )
    check(call, {name: unfolded(x) for name, x in again.items()}, found)


@pytest.mark.parametrize("call", [call for call in CALLS if call.takes_out], ids=str)
def test_gradient_may_be_written_to_any_memory(comm, call):
    operands, upstream = call.operands(np.float32), call.upstream_gradients()
    given, _ = shard_of(comm, call, operands)
    expected = {name: x for name, x in call.run(given, upstream).items() if name[1:] in call.wrt}
    _, residuals = call.forward(given)
    out = {name: np.empty((*x.shape, 2))[::-1, :, 0] for name, x in expected.items()}
    for name, found in call.gradients(residuals, upstream, **out):
        assert found is out[name]
        assert same(found.astype(np.float32), expected[name]), name
    for name in call.wrt:  # into the operand itself, after which residuals are used up
        given, _ = shard_of(comm, call, operands)
        _, residuals = call.forward(given)
        over = {f"d{each}": given[each] if each == name else np.empty_like(given[each]) for each in call.wrt}
        for each, found in call.gradients(residuals, upstream, **over):
            if each == f"d{name}":
                assert found is given[name]
                break
        assert same(given[name], expected[f"d{name}"])
        if given[name].size:
            with pytest.raises(RuntimeError, match="used up"):
                dict(call.gradients(residuals, upstream))


@by_call
def test_call_takes_no_rows(comm, call):
    for how in ("balanced", "all on the last rank"):
        given, _ = shard_of(comm, call, call.operands(np.float32), how)
        none = slice(0, 0)
        found = call.run(cut_all(given, none), cut_all(call.upstream_gradients(), none))
        for name, x in found.items():
            if name[1:] in call.wrt:
                assert x.shape == cut_all(given, none)[name[1:]].shape
                assert not x.any()
            else:
                assert np.shape(x)[:1] in ((), (0,)) or (name, x.tolist()) == ("offsets", [0])


@pytest.mark.parametrize("call", [call for call in CALLS if call.ignores_rows], ids=str)
def test_ignored_row_may_hold_nan(comm, call):
    operands, upstream = call.operands(np.float64), call.upstream_gradients()
    clean = call.run(shard_of(comm, call, operands)[0], upstream)
    for name in call.wrt:
        if "r" in axes_of(name):
            operands[name][IGNORED] = np.nan
    found = call.run(shard_of(comm, call, operands)[0], upstream)
    names = [name for name in clean if name in upstream or name[1:] in call.wrt]
    check(call, {name: found[name] for name in names}, {name: clean[name] for name in names})


@by_call
def test_rows_may_be_split_over_ranks(comm, call):
    operands, upstream = call.operands(np.float32), call.upstream_gradients()
    whole = call.run(operands | call.options, upstream)
    rows = slice(*pce.shard_range(ROWS, comm.size, comm.rank))
    given = cut_all(operands, rows) | call.options
    if "batch_comm" in call.parameters:
        given["batch_comm"] = comm
    found = call.run(given, cut_all(upstream, rows))
    expected = cut_all(whole, rows)
    if call.function == "nucleus":
        expected["ids"], expected["offsets"] = cut("support", (whole["ids"], whole["offsets"]), rows)
    for name in call.wrt:
        if "r" not in axes_of(name):  # each rank has the gradient of its rows
            found[f"d{name}"] = comm.allreduce(found[f"d{name}"])
    check(call, found, expected)


OTHERS = {
    **{"reduction": "sum", "label_smoothing": 0.3, "z_loss": 0.2, "logit_scale": 1.25, "softcap": 4.0, "chunk": 3},
    **{"direction": "reverse", "margin": (1.0, 0.0, 0.1), "outside": "-inf", "k": 5, "top_k": 5, "top_p": 0.7},
    **{"min_p": 0.1, "ignore_index": 3, "compute_dtype": np.float64, "rounded_gradient": True},
}


@pytest.mark.ranks(3)  # one rank differs from several
@by_call
def test_options_and_operands_that_differ_are_named(comm, call):
    given, _ = shard_of(comm, call, call.operands(np.float32))
    apart = {"margin": "softcap", "softcap": "margin"}
    changes = [
        (name, {name: other})
        for name, other in OTHERS.items()
        if name in call.parameters
        and given.get(name) != other
        and apart.get(name) not in given
        and (name != "outside" or "support" in given)
    ]
    for name in sorted(given.keys() & {"targets", "ids", "rows", "hidden"}):
        other = given[name].copy()
        other[0] = ~other[0] if name == "rows" else (other[0] + 1) % 3
        changes.append((f"values of {name}", {name: other}))
    if "support" in given:
        changes.append(("support", {"support": call.operands(np.float32, seed=2)["support"]}))
    floats = given.keys() & {*(call.wrt or ("logits",))}
    changes.append(("dtype", {name: given[name].astype(np.float64) for name in floats}))
    for text, change in changes:
        with pytest.raises(pce.CollectiveError, match=text):
            call.run(given | (change if comm.rank == 0 else {}), call.upstream_gradients())
    call.run(given, call.upstream_gradients())


@pytest.mark.ranks(1, 3, 4)  # a line, and two by two
@pytest.mark.parametrize("placed", [("model",), ("data",), ("data", "model")], ids="-".join)
@by_call
def test_call_on_the_tape_is_the_plain_one(comm, call, placed):
    operands, upstream = call.operands(np.float32), call.upstream_gradients()
    whole = call.run(operands | call.options, upstream)
    mesh, arrays = mesh_of(comm, *squarest(comm.size)), {}
    for name in call.wrt or ("logits",):
        axes = {"data": axes_of(name).find("r"), "model": axes_of(name).find("c")}
        places = {dim: Shard(axes[dim]) for dim in placed if axes[dim] >= 0}
        arrays[name] = pce.distribute(operands[name], mesh, requires_grad=bool(call.wrt), **places)
    with pce.trace() as forward:
        found = getattr(pce, call.tape or call.function)(**operands | arrays | call.options)
    results = named(found)
    if "loss" in upstream:
        results = {"loss": results["result"]}
    if call.wrt:
        total = sum(pce.sum(results[name] * x.astype(results[name].dtype)) for name, x in upstream.items())
        with pce.trace() as backward:
            total.backward()
        assert backward.count() == 0
    if placed == ("model",) and call.bytes_a_row is not None:
        assert forward.bytes("all_reduce") == call.bytes_a_row * ROWS
    results = {name: x.full() if isinstance(x, pce.DistArray) else x for name, x in results.items()}
    results |= {f"d{name}": x.grad.full() for name, x in arrays.items() if call.wrt}
    check(call, results, whole)


@pytest.mark.ranks(1, 2)  # as many as GPUs are tested with
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@by_call
def test_cupy_arrays_give_the_same(comm, cupy, call, dtype):
    given, _ = shard_of(comm, call, call.operands(dtype))
    upstream = call.upstream_gradients()

    def there(x: Any) -> Any:
        return tuple(map(there, x)) if isinstance(x, tuple) else cupy.asarray(x) if isinstance(x, np.ndarray) else x

    wanted = call.run(given, upstream)
    arrays = {name: there(x) if name in AXES or name == "support" else x for name, x in given.items()}
    found = call.run(arrays, {name: there(x) for name, x in upstream.items()})
    assert all(isinstance(x, cupy.ndarray) for x in found.values())
    check(call, {name: to_host(x) for name, x in found.items()}, wanted)
