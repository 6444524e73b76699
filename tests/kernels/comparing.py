"""Comparison of kernels with the loops for the host in float64, which other tests hold to `dense`."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from kernels.places import OnGpu, OnHost
from pce_mpi.loss.kernels import blockwise
from pce_mpi.loss.kernels.parameters import ClassWeights, RowGradient, Transform
from pce_mpi.loss.softmax_state import RowSoftmax, StateFields
from ulps import FLOAT32, FLOAT64, HALF, errors

F64 = np.dtype(np.float64)
DTYPES = [np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


place: OnHost | OnGpu = OnHost()


def compute_dtype(dtype):
    return F64 if dtype == F64 else np.dtype(np.float32)


def draw(dtype, classes, rows=3, inner=1, seed=0, masked=0.0, spread=3.0):
    rng = np.random.default_rng([seed, classes, rows])
    logits = rng.normal(0, spread, (rows, classes, inner))
    logits[rng.random(logits.shape) < masked] = -np.inf
    columns = rng.integers(0, classes, rows * inner)
    return logits.astype(dtype), columns


def on_device(array):
    return place.on_device(array)


def states_of(cuda, logits, columns, fields, options):
    columns = columns if has_target(fields) else None
    states, references = cuda.fill_states(on_device(logits), columns, fields, **options)
    assert references is None
    assert states.dtype == np.float64
    assert states.shape == (logits.shape[0] * logits.shape[2], len(fields.names))
    place.forget()
    return states.get()


def softmax_of(fields, states):
    return RowSoftmax(fields.by_name(states))


def has_target(fields):
    return fields.target or not fields.hold_largest


def expected_states(logits, columns, fields, options):
    columns = columns if has_target(fields) else None
    weights = options["weights"]
    if weights.probabilities is not None:
        weights = replace(weights, probabilities=weights.probabilities.get())
    wide = dict(options, weights=weights, compute_dtype=F64)
    return blockwise.fill_states(logits.astype(F64), columns, fields, **wide)[0]


def options_of(dtype, **changed):
    given = {
        "weights": ClassWeights(),
        "transform": Transform(),
        "compute_dtype": compute_dtype(dtype),
        "class_start": 0,
    }
    return given | changed


def assert_states(fields, states, expected, dtype, limit=None, capped=False):
    """Everything that follows from the states is as good as it is asked of the host."""
    got, wanted = softmax_of(fields, states), softmax_of(fields, expected)
    narrow = np.float64 if dtype == np.float64 else np.float32
    limit = limit or (FLOAT64 if dtype == np.float64 else FLOAT32)

    def near(name, size=None):
        a, b = getattr(got, name), getattr(wanted, name)
        found = errors(a, b, narrow, b if size is None else size)
        assert found.max(initial=0) <= limit, (name, found.max(), a, b)

    near("held_nll")
    near("logsumexp", np.maximum(1.0, np.abs(wanted.logsumexp)))
    near("held_minus_one")
    # A small probability is the exponential of minus a large loss: its error in ulps grows with the loss.
    with np.errstate(invalid="ignore"):
        near("held_probability", wanted.held_probability * np.maximum(1.0, wanted.held_nll))
    for name in {"target", "largest", "held_weight"} & set(fields.names):
        # The last bit of a softcap's tanh is that of a library.
        assert errors(got.fields[name], wanted.fields[name], np.float64).max(initial=0) <= (2 if capped else 0), name
    if fields.hold_largest:
        np.testing.assert_array_equal(got.fields["argmax"], wanted.fields["argmax"])
    if fields.weights:
        near("weight")
        near("weighted_nll")
    if fields.entropy:
        near("entropy")
    if fields.target and fields.hold_largest:
        near("target_log_prob")
    if fields.scaled:
        assert (got.fields["scale"] == wanted.fields["scale"]).all()


def assert_gradient(found, expected, dtype, limit=None):
    """In ulps of the largest entry of each row, halves in ulps of the correctly rounded entry."""
    if dtype.itemsize == 2:
        distance, limit = errors(found, expected.astype(dtype), dtype), limit or HALF
    else:
        size = np.broadcast_to(np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=0), expected.shape)
        distance, limit = errors(found, expected, dtype, size), limit or (FLOAT64 if dtype == F64 else FLOAT32)
    assert distance.max(initial=0) <= limit, (distance.max(), np.unravel_index(distance.argmax(), distance.shape))


def row_gradient(fields, states, columns, valid, z=0.0, weight_factor=None):
    """A gradient with a slope of its own for each row."""
    softmax = softmax_of(fields, states)
    rows = len(states)
    slope = np.where(valid, np.linspace(0.5, 2.0, rows), 0.0)
    with np.errstate(all="ignore"):
        common = 2 * z * softmax.logsumexp if z else 0.0
        return RowGradient(
            max=softmax.max,
            factor=slope * (1.0 + common) * softmax.normalizer,
            weight_factor=None if weight_factor is None else slope * weight_factor,
            held_column=columns,
            held_gradient=slope * (softmax.held_minus_one + common * softmax.held_probability),
            valid=valid,
        )


def gradient_on_device(gradient):
    given = {name: value for name, value in vars(gradient).items() if value is not None}
    return replace(gradient, **{name: on_device(np.ascontiguousarray(value)) for name, value in given.items()})


def expected_gradient(logits, gradient, options):
    wide = {**options, "compute_dtype": F64}
    del wide["class_start"]
    if options["weights"].probabilities is not None:
        wide["weights"] = replace(options["weights"], probabilities=options["weights"].probabilities.get())
    out = np.empty(logits.shape)
    blockwise.write_gradient(out, logits.astype(F64), gradient, **wide)
    return out


def write_gradient(cuda, out, logits, gradient, options):
    given = {name: value for name, value in options.items() if name != "class_start"}
    cuda.write_gradient(on_device(out), on_device(logits), gradient_on_device(gradient), **given)
    place.bring_back(out)


def check_plain(cuda, dtype, classes, rows=3, **kind):
    """States, gradient, gradient in place, and both at once where they fit."""
    logits, columns = draw(dtype, classes, rows, **kind)
    columns[1::3] = -1
    valid = columns >= 0
    fields, options = StateFields(), options_of(dtype)
    states = states_of(cuda, logits, columns, fields, options)
    expected = expected_states(logits, columns, fields, options)
    assert_states(fields, states, expected, dtype)
    gradient = row_gradient(fields, expected, columns, valid)
    wanted = expected_gradient(logits, gradient, options)
    out = np.empty_like(logits)
    write_gradient(cuda, out, logits, gradient, options)
    assert_gradient(out, wanted, dtype)
    assert not out[~valid[:, None].reshape(rows, 1, 1).repeat(classes, 1)].any()
    in_place = logits.copy()
    write_gradient(cuda, in_place, in_place, gradient, options)
    assert in_place.tobytes() == out.tobytes()
    if cuda.fused_fits(on_device(logits), options["compute_dtype"]):
        check_fused(cuda, logits.copy(), columns, fields, wanted, expected, dtype)


def fused(cuda, out, logits, columns, fields, z_loss=0.0, transform=None, held=None):
    valid = columns >= 0
    rows = len(columns)
    transform = transform or Transform()
    states = cuda.fill_states_and_write_gradient(
        on_device(out),
        on_device(logits),
        columns,
        fields,
        transform=transform,
        compute_dtype=np.dtype(np.float32),
        class_start=0,
        slope=on_device(transform.scale * np.where(valid, np.linspace(0.5, 2.0, rows), 0.0)),
        held=on_device(np.ones(rows) if held is None else held),
        valid=on_device(valid),
        z_loss=z_loss,
    ).get()
    place.bring_back(out)
    return states


def check_fused(cuda, logits, columns, fields, wanted, expected, dtype):
    out = np.empty_like(logits)
    states = fused(cuda, out, logits, columns, fields)
    assert_states(fields, states, expected, dtype)
    assert_gradient(out, wanted, dtype)
    again = fused(cuda, logits, logits, columns, fields)
    assert (again.tobytes(), logits.tobytes()) == (states.tobytes(), out.tobytes())
