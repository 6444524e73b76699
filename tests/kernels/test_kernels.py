"""The CUDA kernels, run on the CPU (see tests/cuda_on_host): the same sources, threads and barriers."""

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from kernels.comparing import (
    DTYPES,
    F64,
    assert_gradient,
    assert_states,
    check_plain,
    draw,
    expected_gradient,
    expected_states,
    fused,
    on_device,
    options_of,
    row_gradient,
    softmax_of,
    states_of,
    write_gradient,
)
from kernels.device_arrays import rows_in_memory
from pce_mpi.loss.kernels.launch_config import LaunchConfig
from pce_mpi.loss.kernels.parameters import ClassWeights, RowGradient, Transform
from pce_mpi.loss.softmax_state import StateFields, merge
from ulps import FLOAT64, OPTIONS, STATISTICS

# Every boundary of the code: vectors, threads of a row, splits of a row, blocks of a cluster.
SHORT = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257, 1023]
LONG = [3072, 3073, 6145, 8191, 12_289, 16_385, 33_001]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_length_at_boundaries_of_code(cuda, dtype):
    for classes in SHORT:
        check_plain(cuda, dtype, classes, rows=17 if classes < 70 else 5)
    for classes in LONG:
        check_plain(cuda, dtype, classes, rows=2, seed=1)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_row_over_cluster_equals_row_of_one_block(cuda, dtype):
    block = 512 * (4 * 8 if dtype.itemsize == 2 else 6 * 4)
    for classes in (block, block + 1, 2 * block + 5, 8 * block):
        check_plain(cuda, dtype, classes, rows=1, seed=2)
    with_one_more, _ = draw(dtype, 8 * block + 1, 1)
    assert not cuda.fused_fits(on_device(with_one_more), np.dtype(np.float32))


def test_gpus_without_clusters_have_kernel_of_one_block(cuda, cupy, monkeypatch):
    logits = cupy.empty((1, 16_384, 1), np.float16)
    longer = cupy.empty((1, 16_385, 1), np.float16)
    assert cuda.fused_fits(longer, np.dtype(np.float32))
    monkeypatch.setattr(cuda.cupy.cuda, "Device", lambda: type("Device", (), {"compute_capability": "80", "id": 0}))
    assert cuda.fused_fits(logits, np.dtype(np.float32))
    assert not cuda.fused_fits(longer, np.dtype(np.float32))
    assert not cuda.fused_fits(logits, F64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_start_anywhere_are_written_alone(cuda, dtype):
    fields, options = StateFields(), options_of(dtype)
    width = 16 // dtype.itemsize
    for classes in (1, width - 1, 3 * width + 1, 41, 300):
        logits, columns = draw(dtype, classes, 3, seed=3)
        columns[:] = 0, classes - 1, classes // 2
        valid = np.ones(3, np.bool_)
        expected = expected_states(logits, columns, fields, options)
        gradient = row_gradient(fields, expected, columns, valid)
        wanted = expected_gradient(logits, gradient, options)
        for shift in range(width):
            pitch = classes + (shift * 5) % 7
            strided, fence = rows_in_memory(logits, pitch=pitch, shift=shift, at_end=shift == 1)
            out, out_fence = rows_in_memory(logits, pitch=pitch, shift=(shift * 3) % width)
            assert_states(fields, states_of(cuda, strided, columns, fields, options), expected, dtype)
            write_gradient(cuda, out, strided, gradient, options)
            assert_gradient(out, wanted, dtype)
            if dtype != F64:
                out[...] = 0
                assert_states(fields, fused(cuda, out, strided, columns, fields), expected, dtype)
                assert_gradient(out, wanted, dtype)
            write_gradient(cuda, strided, strided, gradient, options)
            assert_gradient(strided, wanted, dtype)
            assert fence.is_whole()
            assert out_fence.is_whole()
            between = np.lib.stride_tricks.as_strided(strided[0, -1:, 0], (pitch - classes + 1,), (dtype.itemsize,))[1:]
            assert (between.view(np.uint8) == 0xA7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_with_strided_classes_are_copied(cuda, dtype):
    fields, options = StateFields(), options_of(dtype)
    values, columns = draw(dtype, 37, 4, inner=3, seed=4)
    expected = expected_states(values, columns, fields, options)
    gradient = row_gradient(fields, expected, columns, np.ones(12, np.bool_))
    wanted = expected_gradient(values, gradient, options)
    for strided in (values, np.asfortranarray(values), values[:, ::-1][:, ::-1], values[::-1].copy()[::-1]):
        before = strided.copy()
        assert_states(fields, states_of(cuda, strided, columns, fields, options), expected, dtype)
        out = np.zeros_like(strided)
        write_gradient(cuda, out, strided, gradient, options)
        assert_gradient(out, wanted, dtype)
        if dtype != F64:
            out[...] = 0
            assert_states(fields, fused(cuda, out, strided, columns, fields), expected, dtype)
            assert_gradient(out, wanted, dtype)
        assert strided.tobytes() == before.tobytes()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_gradient_of_another_dtype_is_rounded_once(cuda, out_dtype):
    fields = StateFields()
    for dtype in DTYPES:
        options = options_of(dtype)
        logits, columns = draw(dtype, 45, seed=5)
        expected = expected_states(logits, columns, fields, options)
        gradient = row_gradient(fields, expected, columns, np.ones(3, np.bool_))
        wanted = expected_gradient(logits, gradient, options)
        out = np.empty(logits.shape, out_dtype)
        write_gradient(cuda, out, logits, gradient, options)
        as_computed = out_dtype if out_dtype.itemsize < 4 or dtype == F64 else np.dtype(np.float32)
        assert_gradient(out, wanted, as_computed)
        if dtype != F64:
            out[...] = 0
            fused(cuda, out, logits, columns, fields)
            assert_gradient(out, wanted, as_computed)


GENERAL = {
    "statistics": StateFields(hold_largest=True, target=True, entropy=True),
    "smoothing": StateFields(weights=True),
    "probabilities": StateFields(hold_largest=True, weights=True),
    "all fields": StateFields(scaled=True, hold_largest=True, target=True, weights=True, entropy=True),
}


@pytest.mark.parametrize("transform", [Transform(), Transform(3.0), Transform(0.7, 4.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GENERAL)
def test_every_option_in_every_dtype(cuda, name, dtype, transform):
    fields = replace(GENERAL[name], scaled=transform.of_differences != 1.0 or GENERAL[name].scaled)
    for classes, rows, masked in ((1, 2, 0), (13, 5, 0.3), (133, 2, 0.1), (8195, 1, 0)):
        logits, columns = draw(dtype, classes, rows, seed=6, masked=masked)
        rng = np.random.default_rng(classes)
        kind = DTYPES[classes % 4]
        probabilities = rng.random(logits.shape).astype(kind)
        probabilities[np.isinf(logits)] = 0
        weights = ClassWeights()
        if name in ("probabilities", "all fields"):
            weight = None if classes == 13 else rng.uniform(0.5, 2, classes)
            smoothing = 0.25 if masked == 0 else 0.0
            weights = ClassWeights(weight, on_device(probabilities), smoothing, classes)
        elif name == "smoothing" and masked == 0:
            weights = ClassWeights(rng.uniform(0.5, 2, classes))
        options = options_of(dtype, weights=weights, transform=transform, class_start=1000)
        expected = expected_states(logits, columns, fields, options)
        states = states_of(cuda, logits, columns, fields, options)
        limit = FLOAT64 if dtype == F64 else max(STATISTICS, OPTIONS)
        assert_states(fields, states, expected, dtype, limit, transform.softcap is not None)
        held = expected["argmax"] - 1000 if fields.hold_largest else columns
        gradient = row_gradient(fields, expected, held, np.arange(rows) % 4 != 1, weight_factor=0.125)
        out = np.empty_like(logits)
        write_gradient(cuda, out, logits, gradient, options)
        assert_gradient(
            out, expected_gradient(logits, gradient, options), dtype, OPTIONS if dtype == np.float32 else None
        )


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_float64_arithmetic_on_narrower_logits_keeps_its_bits(cuda, dtype):
    fields = StateFields(held_weight=True)
    for classes in (5, 1000):
        logits, columns = draw(dtype, classes, seed=7)
        weights = ClassWeights(np.random.default_rng(0).uniform(0.5, 2, classes))
        options = options_of(dtype, compute_dtype=F64, weights=weights)
        expected = expected_states(logits, columns, fields, options)
        assert_states(fields, states_of(cuda, logits, columns, fields, options), expected, F64)
        gradient = row_gradient(fields, expected, columns, np.ones(3, np.bool_), z=0.01)
        out = np.empty(logits.shape)
        write_gradient(cuda, out, logits, gradient, options)
        assert_gradient(out, expected_gradient(logits, gradient, options), F64)


@pytest.mark.parametrize("scale", [1.0, 0.3, 30.0, 1e-30, 1e35, 1e-40])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 3e7, 1e30])
def test_logits_far_from_0_at_any_scale(cuda, offset, scale):
    fields = StateFields(scaled=scale != 1.0)
    rng = np.random.default_rng(8)
    z = rng.normal(0, 3, (3, 500, 1)) + offset * rng.uniform(0.999999, 1, (3, 500, 1))
    logits = np.clip(z / scale, -3e38, 3e38).astype(np.float32)
    columns = np.array([3, 499, 70])
    options = options_of(np.dtype(np.float32), transform=Transform(scale))
    expected = expected_states(logits, columns, fields, options)
    assert_states(fields, states_of(cuda, logits, columns, fields, options), expected, np.float32)
    gradient = row_gradient(fields, expected, columns, np.ones(3, np.bool_))
    out = np.empty_like(logits)
    write_gradient(cuda, out, logits, gradient, options)
    assert_gradient(out, expected_gradient(logits, gradient, options), np.dtype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_many_classes_that_all_round_same_way(cuda, dtype):
    # Without the rest of each difference the sum of a thousand equal exponentials would be off by up to 4 ulp.
    rng = np.random.default_rng(9)
    for others in rng.uniform(-12, -5, 25).astype(dtype):
        logits = np.full((1, 3000, 1), others, dtype)
        logits[0, 1] = dtype(1e-4)
        logits[0, 0] = 8 + others / 16
        columns, fields = np.array([0]), StateFields()
        options = options_of(np.dtype(dtype))
        expected = expected_states(logits, columns, fields, options)
        assert_states(fields, states_of(cuda, logits, columns, fields, options), expected, dtype)


BAD = {
    "nan": [(5, np.nan)],
    "nan at the target": [(3, np.nan)],
    "+inf": [(40, np.inf)],
    "+inf at the target": [(3, np.inf)],
    "nan and +inf": [(0, np.inf), (44, np.nan)],
    "all nan": [(slice(None), np.nan)],
    "all -inf": [(slice(None), -np.inf)],
    "all +inf": [(slice(None), np.inf)],
    "target -inf": [(3, -np.inf)],
    "all but the target -inf": [(slice(0, 3), -np.inf), (slice(4, None), -np.inf)],
    "a first run of -inf": [(slice(0, 40), -np.inf)],
    "huge and -inf": [(slice(0, 30), -3e4), (31, -np.inf)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fields", [StateFields(), *GENERAL.values()], ids=["plain", *GENERAL])
def test_special_values_equal_those_of_host(cuda, dtype, fields):
    for name, values in BAD.items():
        for classes in (45, 1):
            logits, columns = draw(dtype, classes, 2, seed=10)
            columns[0] = min(3, classes - 1)
            for where, value in values:
                logits[0, where if classes > 1 else 0, 0] = value
            options = options_of(dtype)
            expected = expected_states(logits, columns, fields, options)
            states = states_of(cuda, logits, columns, fields, options)
            with np.errstate(all="ignore"):
                limit = None if fields == StateFields() else FLOAT64 if dtype == F64 else max(STATISTICS, OPTIONS)
                assert_states(fields, states, expected, dtype, limit)
                # Its numbers are relative to max, which may be a little more.
                normalizers = (softmax_of(fields, each).normalizer for each in (states, expected))
                np.testing.assert_array_equal(*map(np.isnan, normalizers), name)
            if fields.hold_largest:
                continue
            gradient = row_gradient(fields, expected, columns, np.array([True, True]))
            out = np.empty_like(logits)
            write_gradient(cuda, out, logits, gradient, options)
            exact = expected_gradient(logits, gradient, options)
            assert_gradient(out, exact, dtype)
            assert (out[np.isneginf(logits) & (exact == 0)] == 0).all()
            if dtype != F64 and fields == StateFields():
                out[...] = 7
                fused(cuda, out, logits, columns, fields)
                assert_gradient(out, exact, dtype)
                fused(cuda, out, logits, np.full(2, -1), fields)
                assert not out.any()  # rows that do not count, whatever their logits


def test_ties_and_nan_are_held_as_on_host(cuda):
    fields = StateFields(hold_largest=True, entropy=True)
    for dtype in DTYPES:
        logits = np.zeros((6, 700, 1), dtype)
        logits[1, [650, 4, 300]] = 2
        logits[2, [699, 699]] = 2
        logits[3, [30, 600]] = np.nan
        logits[4] = -np.inf
        logits[5, ::7] = -0.0
        for start in (0, 1, 5):
            cut = logits[:, start:]
            options = options_of(dtype, class_start=start)
            expected = expected_states(cut, None, fields, options)
            states = states_of(cuda, cut, None, fields, options)
            assert (fields.by_name(states)["argmax"] == expected["argmax"]).all()


def test_no_rows_or_no_classes_launch_nothing(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "_launch", lambda *_: pytest.fail("launched"))
    for fields in (StateFields(), *GENERAL.values()):
        for shape in ((0, 5, 1), (3, 0, 1), (0, 0, 0), (2, 0, 3), (2, 5, 0)):
            logits = np.empty(shape, np.float32)
            rows = shape[0] * shape[2]
            options = options_of(np.dtype(np.float32))
            states = states_of(cuda, logits, np.full(rows, -1), fields, options)
            identity = fields.identity(rows)
            if fields.scaled:
                identity["scale"] = 1.0
            assert states.tobytes() == identity.tobytes()
            assert not cuda.fused_fits(on_device(logits), np.dtype(np.float32))
            gradient = RowGradient(*(on_device(np.empty(rows)) for _ in range(6)))
            cuda.write_gradient(
                on_device(logits),
                on_device(logits),
                gradient,
                weights=ClassWeights(),
                transform=Transform(),
                compute_dtype=np.dtype(np.float32),
            )


def test_states_of_splits_merge_with_states_of_host(cuda, monkeypatch):
    rng = np.random.default_rng(11)
    for fields in (StateFields(held_weight=True), *GENERAL.values()):
        logits, columns = draw(np.dtype(np.float32), 3000, 3, seed=12)
        weights = ClassWeights(rng.uniform(0.5, 2, 3000)) if fields.weights or fields.held_weight else ClassWeights()
        options = options_of(np.dtype(np.float32), weights=weights)
        expected = expected_states(logits, columns, fields, options)
        for splits in (2, 31, 33, 70):
            with monkeypatch.context() as patch:
                patch.setattr(LaunchConfig, "for_forward", partial(LaunchConfig.with_splits, splits=splits))
                states = states_of(cuda, logits, columns, fields, options)
            assert_states(fields, states, expected, np.float32, OPTIONS)
        # The first classes from one side, the others from the other.
        there = np.where(columns < 1000, columns, -1)
        first = dict(options, weights=ClassWeights(None if weights.weight is None else weights.weight[:1000]))
        rest = dict(options, weights=ClassWeights(None if weights.weight is None else weights.weight[1000:]))
        a = states_of(cuda, logits[:, :1000], there, fields, first).view(fields.dtype)[:, 0]
        here = np.where(columns >= 1000, columns - 1000, -1)
        b = expected_states(logits[:, 1000:], here, fields, dict(rest, class_start=1000))
        assert_states(fields, merge(a, b), expected, np.float32, OPTIONS)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_options_in_fused_kernel_equal_host(cuda, dtype):
    fields = StateFields(scaled=True, held_weight=True)
    transform = Transform(1.7)
    logits, columns = draw(dtype, 301, 6, seed=13)
    columns[2] = -1
    valid = columns >= 0
    options = options_of(dtype, transform=transform)
    expected = expected_states(logits, columns, fields, options)
    softmax = softmax_of(fields, expected)
    held = np.linspace(0.5, 3, 6)
    slope = transform.scale * np.where(valid, np.linspace(0.5, 2.0, 6), 0.0)
    common = 2 * 0.1 * softmax.logsumexp
    gradient = RowGradient(
        max=softmax.max,
        factor=slope * (held + common) * softmax.normalizer,
        weight_factor=None,
        held_column=columns,
        held_gradient=slope * (held * softmax.held_minus_one + common * softmax.held_probability),
        valid=valid,
    )
    out = np.empty_like(logits)
    states = fused(cuda, out, logits, columns, fields, 0.1, transform, held)
    assert_gradient(out, expected_gradient(logits, gradient, options), dtype)
    expected["held_weight"] = np.where(valid, held, 0.0)
    assert_states(fields, states, expected, dtype)


def test_equal_arguments_give_equal_bits(cuda):
    logits, columns = draw(np.dtype(np.float32), 20_000, 1, seed=14)
    for fields in (StateFields(), *GENERAL.values()):
        first, second = (states_of(cuda, logits, columns, fields, options_of(logits.dtype)) for _ in range(2))
        assert first.tobytes() == second.tobytes()
