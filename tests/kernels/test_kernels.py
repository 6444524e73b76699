"""The CUDA kernels, run on the CPU (see tests/cuda_on_host): the same sources, threads and barriers.

What they are compared with is the loops for the host, in float64, which other tests compare with `dense`.
"""

from dataclasses import replace
from importlib import import_module
import mmap
import shutil

import ml_dtypes
import numpy as np
import pytest

from cuda_on_host.module import KernelFault, RawModule
from kernels.device_arrays import rows_in_memory
from kernels.places import OnGpu, OnHost
from pce_mpi.kernels import blockwise
from pce_mpi.kernels.grids import Grid
from pce_mpi.kernels.terms import ClassWeights, RowGradient, Transform
from pce_mpi.records import Layout, RowSoftmax, merge
from ulps import FLOAT32, FLOAT64, HALF, OPTIONS, STATISTICS, errors

F64 = np.dtype(np.float64)
DTYPES = [np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
# Every boundary of the code: vectors, lanes a row, parts of a row, blocks of a cluster.
SHORT = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257, 1023]
LONG = [3072, 3073, 6145, 8191, 12_289, 16_385, 33_001]


place = OnHost()


@pytest.fixture
def cuda(request, cupy, monkeypatch):
    if request.config.option.gpu:
        monkeypatch.setitem(globals(), "place", OnGpu(cupy))
    with cupy.cuda.using_allocator(None):  # every array in memory of its own, for compute-sanitizer to know its end
        yield import_module("pce_mpi.kernels.cuda")


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


def records_of(cuda, logits, columns, layout, options):
    columns = columns if has_target(layout) else None
    records, references = cuda.fill_records(on_device(logits), columns, layout, **options)
    assert references is None
    assert records.dtype == np.float64
    assert records.shape == (logits.shape[0] * logits.shape[2], len(layout.names))
    place.forget()
    return records.get()


def softmax_of(layout, records):
    return RowSoftmax(layout.fields(records))


def has_target(layout):
    return layout.target or not layout.hold_largest


def expected_records(logits, columns, layout, options):
    columns = columns if has_target(layout) else None
    weights = options["weights"]
    if weights.probabilities is not None:
        weights = replace(weights, probabilities=weights.probabilities.get())
    wide = dict(options, weights=weights, compute_dtype=F64)
    return blockwise.fill_records(logits.astype(F64), columns, layout, **wide)[0]


def options_of(dtype, **changed):
    given = {
        "weights": ClassWeights(),
        "transform": Transform(),
        "compute_dtype": compute_dtype(dtype),
        "class_start": 0,
    }
    return given | changed


def assert_records(layout, records, expected, dtype, limit=None, capped=False):
    """Everything that follows from the records is as good as it is asked of the host."""
    got, wanted = softmax_of(layout, records), softmax_of(layout, expected)
    narrow = np.float64 if dtype == np.float64 else np.float32
    limit = limit or (FLOAT64 if dtype == np.float64 else FLOAT32)

    def near(name, size=None):
        a, b = getattr(got, name), getattr(wanted, name)
        found = errors(a, b, narrow, b if size is None else size)
        assert found.max(initial=0) <= limit, (name, found.max(), a, b)

    near("held_nll")
    near("logsumexp", np.maximum(1.0, np.abs(wanted.logsumexp)))
    near("held_minus_one")
    # Of small ones, what the exponential is taken of has few bits left: it is as large as the loss.
    with np.errstate(invalid="ignore"):
        near("held_probability", wanted.held_probability * np.maximum(1.0, wanted.held_nll))
    for name in {"target", "largest", "held_weight"} & set(layout.names):
        # The last bit of a softcap's tanh is that of a library.
        assert errors(got.fields[name], wanted.fields[name], np.float64).max(initial=0) <= (2 if capped else 0), name
    if layout.hold_largest:
        np.testing.assert_array_equal(got.fields["argmax"], wanted.fields["argmax"])
    if layout.weights:
        near("weight")
        near("weighted_nll")
    if layout.entropy:
        near("entropy")
    if layout.target and layout.hold_largest:
        near("target_log_prob")
    if layout.scaled:
        assert (got.fields["scale"] == wanted.fields["scale"]).all()


def assert_gradient(found, expected, dtype, limit=None):
    """In ulps of the largest entry of each row, halves in ulps of the correctly rounded entry."""
    if dtype.itemsize == 2:
        distance, limit = errors(found, expected.astype(dtype), dtype), limit or HALF
    else:
        size = np.broadcast_to(np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=0), expected.shape)
        distance, limit = errors(found, expected, dtype, size), limit or (FLOAT64 if dtype == F64 else FLOAT32)
    assert distance.max(initial=0) <= limit, (distance.max(), np.unravel_index(distance.argmax(), distance.shape))


def row_gradient(layout, records, columns, valid, z=0.0, weight_factor=None):
    """A gradient with a slope of its own for each row."""
    softmax = softmax_of(layout, records)
    rows = len(records)
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
    """Records, gradient, gradient in place, and both at once where they fit."""
    logits, columns = draw(dtype, classes, rows, **kind)
    columns[1::3] = -1
    valid = columns >= 0
    layout, options = Layout(), options_of(dtype)
    records = records_of(cuda, logits, columns, layout, options)
    expected = expected_records(logits, columns, layout, options)
    assert_records(layout, records, expected, dtype)
    gradient = row_gradient(layout, expected, columns, valid)
    wanted = expected_gradient(logits, gradient, options)
    out = np.empty_like(logits)
    write_gradient(cuda, out, logits, gradient, options)
    assert_gradient(out, wanted, dtype)
    assert not out[~valid[:, None].reshape(rows, 1, 1).repeat(classes, 1)].any()
    in_place = logits.copy()
    write_gradient(cuda, in_place, in_place, gradient, options)
    assert in_place.tobytes() == out.tobytes()
    if cuda.fused_fits(on_device(logits), options["compute_dtype"]):
        check_fused(cuda, logits.copy(), columns, layout, wanted, expected, dtype)


def fused(cuda, out, logits, columns, layout, z_loss=0.0, transform=None, held=None):
    valid = columns >= 0
    rows = len(columns)
    transform = transform or Transform()
    records = cuda.fill_records_and_write_gradient(
        on_device(out),
        on_device(logits),
        columns,
        layout,
        transform=transform,
        compute_dtype=np.dtype(np.float32),
        class_start=0,
        slope=on_device(transform.scale * np.where(valid, np.linspace(0.5, 2.0, rows), 0.0)),
        held=on_device(np.ones(rows) if held is None else held),
        valid=on_device(valid),
        z_loss=z_loss,
    ).get()
    place.bring_back(out)
    return records


def check_fused(cuda, logits, columns, layout, wanted, expected, dtype):
    out = np.empty_like(logits)
    records = fused(cuda, out, logits, columns, layout)
    assert_records(layout, records, expected, dtype)
    assert_gradient(out, wanted, dtype)
    again = fused(cuda, logits, logits, columns, layout)
    assert (again.tobytes(), logits.tobytes()) == (records.tobytes(), out.tobytes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_length_at_the_boundaries_of_the_code(cuda, dtype):
    for classes in SHORT:
        check_plain(cuda, dtype, classes, rows=17 if classes < 70 else 5)
    for classes in LONG:
        check_plain(cuda, dtype, classes, rows=2, seed=1)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_row_over_the_blocks_of_a_cluster_gives_what_one_block_gives(cuda, dtype):
    block = 512 * (4 * 8 if dtype.itemsize == 2 else 6 * 4)
    for classes in (block, block + 1, 2 * block + 5, 8 * block):
        check_plain(cuda, dtype, classes, rows=1, seed=2)
    with_one_more, _ = draw(dtype, 8 * block + 1, 1)
    assert not cuda.fused_fits(on_device(with_one_more), np.dtype(np.float32))


def test_gpus_without_clusters_have_a_kernel_for_rows_that_fit_one_block(cuda, cupy, monkeypatch):
    logits = cupy.empty((1, 16_384, 1), np.float16)
    longer = cupy.empty((1, 16_385, 1), np.float16)
    assert cuda.fused_fits(longer, np.dtype(np.float32))
    monkeypatch.setattr(cuda.cupy.cuda, "Device", lambda: type("Device", (), {"compute_capability": "80", "id": 0}))
    assert cuda.fused_fits(logits, np.dtype(np.float32))
    assert not cuda.fused_fits(longer, np.dtype(np.float32))
    assert not cuda.fused_fits(logits, F64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_start_anywhere_are_read_and_written_and_nothing_beside_them(cuda, dtype):
    layout, options = Layout(), options_of(dtype)
    width = 16 // dtype.itemsize
    for classes in (1, width - 1, 3 * width + 1, 41, 300):
        logits, columns = draw(dtype, classes, 3, seed=3)
        columns[:] = 0, classes - 1, classes // 2
        valid = np.ones(3, np.bool_)
        expected = expected_records(logits, columns, layout, options)
        gradient = row_gradient(layout, expected, columns, valid)
        wanted = expected_gradient(logits, gradient, options)
        for shift in range(width):
            pitch = classes + (shift * 5) % 7
            lying, fence = rows_in_memory(logits, pitch=pitch, shift=shift, at_end=shift == 1)
            out, out_fence = rows_in_memory(logits, pitch=pitch, shift=(shift * 3) % width)
            assert_records(layout, records_of(cuda, lying, columns, layout, options), expected, dtype)
            write_gradient(cuda, out, lying, gradient, options)
            assert_gradient(out, wanted, dtype)
            if dtype != F64:
                out[...] = 0
                assert_records(layout, fused(cuda, out, lying, columns, layout), expected, dtype)
                assert_gradient(out, wanted, dtype)
            write_gradient(cuda, lying, lying, gradient, options)
            assert_gradient(lying, wanted, dtype)
            assert fence.is_whole()
            assert out_fence.is_whole()
            between = np.lib.stride_tricks.as_strided(lying[0, -1:, 0], (pitch - classes + 1,), (dtype.itemsize,))[1:]
            assert (between.view(np.uint8) == 0xA7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_whose_classes_do_not_lie_side_by_side_are_copied_and_their_gradient_copied_back(cuda, dtype):
    layout, options = Layout(), options_of(dtype)
    values, columns = draw(dtype, 37, 4, inner=3, seed=4)
    expected = expected_records(values, columns, layout, options)
    gradient = row_gradient(layout, expected, columns, np.ones(12, np.bool_))
    wanted = expected_gradient(values, gradient, options)
    for lying in (values, np.asfortranarray(values), values[:, ::-1][:, ::-1], values[::-1].copy()[::-1]):
        before = lying.copy()
        assert_records(layout, records_of(cuda, lying, columns, layout, options), expected, dtype)
        out = np.zeros_like(lying)
        write_gradient(cuda, out, lying, gradient, options)
        assert_gradient(out, wanted, dtype)
        if dtype != F64:
            out[...] = 0
            assert_records(layout, fused(cuda, out, lying, columns, layout), expected, dtype)
            assert_gradient(out, wanted, dtype)
        assert lying.tobytes() == before.tobytes()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_a_gradient_of_another_dtype_is_rounded_once(cuda, out_dtype):
    layout = Layout()
    for dtype in DTYPES:
        options = options_of(dtype)
        logits, columns = draw(dtype, 45, seed=5)
        expected = expected_records(logits, columns, layout, options)
        gradient = row_gradient(layout, expected, columns, np.ones(3, np.bool_))
        wanted = expected_gradient(logits, gradient, options)
        out = np.empty(logits.shape, out_dtype)
        write_gradient(cuda, out, logits, gradient, options)
        as_computed = out_dtype if out_dtype.itemsize < 4 or dtype == F64 else np.dtype(np.float32)
        assert_gradient(out, wanted, as_computed)
        if dtype != F64:
            out[...] = 0
            fused(cuda, out, logits, columns, layout)
            assert_gradient(out, wanted, as_computed)


GENERAL = {
    "statistics": Layout(hold_largest=True, target=True, entropy=True),
    "smoothing": Layout(weights=True),
    "probabilities": Layout(hold_largest=True, weights=True),
    "all fields": Layout(scaled=True, hold_largest=True, target=True, weights=True, entropy=True),
}


@pytest.mark.parametrize("transform", [Transform(), Transform(3.0), Transform(0.7, 4.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GENERAL)
def test_every_option_in_every_dtype(cuda, name, dtype, transform):
    layout = replace(GENERAL[name], scaled=transform.of_differences != 1.0 or GENERAL[name].scaled)
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
        expected = expected_records(logits, columns, layout, options)
        records = records_of(cuda, logits, columns, layout, options)
        limit = FLOAT64 if dtype == F64 else max(STATISTICS, OPTIONS)
        assert_records(layout, records, expected, dtype, limit, transform.softcap is not None)
        held = expected["argmax"] - 1000 if layout.hold_largest else columns
        gradient = row_gradient(layout, expected, held, np.arange(rows) % 4 != 1, weight_factor=0.125)
        out = np.empty_like(logits)
        write_gradient(cuda, out, logits, gradient, options)
        assert_gradient(
            out, expected_gradient(logits, gradient, options), dtype, OPTIONS if dtype == np.float32 else None
        )


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_float64_arithmetic_on_narrower_logits_keeps_its_bits(cuda, dtype):
    layout = Layout(held_weight=True)
    for classes in (5, 1000):
        logits, columns = draw(dtype, classes, seed=7)
        weights = ClassWeights(np.random.default_rng(0).uniform(0.5, 2, classes))
        options = options_of(dtype, compute_dtype=F64, weights=weights)
        expected = expected_records(logits, columns, layout, options)
        assert_records(layout, records_of(cuda, logits, columns, layout, options), expected, F64)
        gradient = row_gradient(layout, expected, columns, np.ones(3, np.bool_), z=0.01)
        out = np.empty(logits.shape)
        write_gradient(cuda, out, logits, gradient, options)
        assert_gradient(out, expected_gradient(logits, gradient, options), F64)


@pytest.mark.parametrize("scale", [1.0, 0.3, 30.0, 1e-30, 1e35, 1e-40])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 3e7, 1e30])
def test_logits_far_from_0_and_scales_of_any_size(cuda, offset, scale):
    layout = Layout(scaled=scale != 1.0)
    rng = np.random.default_rng(8)
    z = rng.normal(0, 3, (3, 500, 1)) + offset * rng.uniform(0.999999, 1, (3, 500, 1))
    logits = np.clip(z / scale, -3e38, 3e38).astype(np.float32)
    columns = np.array([3, 499, 70])
    options = options_of(np.dtype(np.float32), transform=Transform(scale))
    expected = expected_records(logits, columns, layout, options)
    assert_records(layout, records_of(cuda, logits, columns, layout, options), expected, np.float32)
    gradient = row_gradient(layout, expected, columns, np.ones(3, np.bool_))
    out = np.empty_like(logits)
    write_gradient(cuda, out, logits, gradient, options)
    assert_gradient(out, expected_gradient(logits, gradient, options), np.dtype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_many_classes_that_all_round_the_same_way(cuda, dtype):
    # Without the rest of each difference the sum of a thousand equal exponentials would be off by up to 4 ulp.
    rng = np.random.default_rng(9)
    for others in rng.uniform(-12, -5, 25).astype(dtype):
        logits = np.full((1, 3000, 1), others, dtype)
        logits[0, 1] = dtype(1e-4)
        logits[0, 0] = 8 + others / 16
        columns, layout = np.array([0]), Layout()
        options = options_of(np.dtype(dtype))
        expected = expected_records(logits, columns, layout, options)
        assert_records(layout, records_of(cuda, logits, columns, layout, options), expected, dtype)


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
@pytest.mark.parametrize("layout", [Layout(), *GENERAL.values()], ids=["plain", *GENERAL])
def test_what_is_no_number_gives_what_it_gives_on_the_host(cuda, dtype, layout):
    for name, values in BAD.items():
        for classes in (45, 1):
            logits, columns = draw(dtype, classes, 2, seed=10)
            columns[0] = min(3, classes - 1)
            for where, value in values:
                logits[0, where if classes > 1 else 0, 0] = value
            options = options_of(dtype)
            expected = expected_records(logits, columns, layout, options)
            records = records_of(cuda, logits, columns, layout, options)
            with np.errstate(all="ignore"):
                got, wanted = softmax_of(layout, records), softmax_of(layout, expected)
                quantities = ["held_nll", "logsumexp", "normalizer", "held_probability", "held_minus_one"]
                quantities += ["entropy"] * layout.entropy + ["weighted_nll", "weight"] * layout.weights
                for quantity in quantities:
                    a, b = getattr(got, quantity), getattr(wanted, quantity)
                    np.testing.assert_array_equal(np.isnan(a), np.isnan(b), f"{name}: {quantity}")
                    if quantity != "normalizer":  # that is relative to max, which may be a little more
                        np.testing.assert_allclose(a, b, 1e-6, 1e-30, err_msg=f"{name}: {quantity}")
            if layout.hold_largest:
                np.testing.assert_array_equal(got.fields["argmax"], wanted.fields["argmax"], name)
                continue
            gradient = row_gradient(layout, expected, columns, np.array([True, True]))
            out = np.empty_like(logits)
            write_gradient(cuda, out, logits, gradient, options)
            exact = expected_gradient(logits, gradient, options)
            np.testing.assert_allclose(out.astype(F64), exact, 0.01, 1e-3, err_msg=name)
            assert (out[np.isneginf(logits) & (exact == 0)] == 0).all()
            if dtype != F64 and layout == Layout():
                out[...] = 7
                fused(cuda, out, logits, columns, layout)
                np.testing.assert_allclose(out.astype(F64), exact, 0.01, 1e-3, err_msg=f"fused, {name}")
                fused(cuda, out, logits, np.full(2, -1), layout)
                assert not out.any()  # rows that do not count, whatever their logits


def test_ties_and_nan_are_held_as_on_the_host(cuda):
    layout = Layout(hold_largest=True, entropy=True)
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
            expected = expected_records(cut, None, layout, options)
            records = records_of(cuda, cut, None, layout, options)
            assert (layout.fields(records)["argmax"] == expected["argmax"]).all()


def test_no_rows_or_no_classes_launch_nothing(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "_launch", lambda *_: pytest.fail("launched"))
    for layout in (Layout(), *GENERAL.values()):
        for shape in ((0, 5, 1), (3, 0, 1), (0, 0, 0), (2, 0, 3), (2, 5, 0)):
            logits = np.empty(shape, np.float32)
            rows = shape[0] * shape[2]
            options = options_of(np.dtype(np.float32))
            records = records_of(cuda, logits, np.full(rows, -1), layout, options)
            identity = layout.identity(rows)
            if layout.scaled:
                identity["scale"] = 1.0
            assert records.tobytes() == identity.tobytes()
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


def test_records_of_many_parts_are_those_of_the_whole_and_merge_with_those_of_the_host(cuda, monkeypatch):
    rng = np.random.default_rng(11)
    for layout in (Layout(held_weight=True), *GENERAL.values()):
        logits, columns = draw(np.dtype(np.float32), 3000, 3, seed=12)
        weights = ClassWeights(rng.uniform(0.5, 2, 3000)) if layout.weights or layout.held_weight else ClassWeights()
        options = options_of(np.dtype(np.float32), weights=weights)
        expected = expected_records(logits, columns, layout, options)
        for parts in (2, 31, 33, 70):
            with monkeypatch.context() as patch:
                patch.setattr(Grid, "reading", lambda rows, classes, size, n=parts: Grid.of(rows, classes, size, n))
                records = records_of(cuda, logits, columns, layout, options)
            assert_records(layout, records, expected, np.float32, OPTIONS)
        # The first classes from one side, the others from the other.
        there = np.where(columns < 1000, columns, -1)
        first = dict(options, weights=ClassWeights(None if weights.weight is None else weights.weight[:1000]))
        rest = dict(options, weights=ClassWeights(None if weights.weight is None else weights.weight[1000:]))
        a = records_of(cuda, logits[:, :1000], there, layout, first).view(layout.dtype)[:, 0]
        here = np.where(columns >= 1000, columns - 1000, -1)
        b = expected_records(logits[:, 1000:], here, layout, dict(rest, class_start=1000))
        assert_records(layout, merge(a, b), expected, np.float32, OPTIONS)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_z_loss_class_weights_and_scale_in_the_fused_kernel(cuda, dtype):
    layout = Layout(scaled=True, held_weight=True)
    transform = Transform(1.7)
    logits, columns = draw(dtype, 301, 6, seed=13)
    columns[2] = -1
    valid = columns >= 0
    options = options_of(dtype, transform=transform)
    expected = expected_records(logits, columns, layout, options)
    softmax = softmax_of(layout, expected)
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
    records = fused(cuda, out, logits, columns, layout, 0.1, transform, held)
    assert_gradient(out, expected_gradient(logits, gradient, options), dtype)
    expected["held_weight"] = np.where(valid, held, 0.0)
    assert_records(layout, records, expected, dtype)


def test_equal_arguments_give_equal_bits(cuda):
    logits, columns = draw(np.dtype(np.float32), 20_000, 1, seed=14)
    for layout in (Layout(), *GENERAL.values()):
        first, second = (records_of(cuda, logits, columns, layout, options_of(logits.dtype)) for _ in range(2))
        assert first.tobytes() == second.tobytes()


def test_rows_that_lie_beyond_2_to_the_31_elements(stand_in, cuda):
    # Rows 2**31 + 24 elements apart, in memory of which only what is touched exists.
    pitch, classes = 2**31 + 24, 100
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 2 * (2 * pitch + classes), flags), np.float16)
    lying = np.lib.stride_tricks.as_strided(memory, (3, classes, 1), (2 * pitch, 2, 2))
    logits, columns = draw(np.dtype(np.float16), classes, 3, seed=15)
    lying[...] = logits
    layout, options = Layout(), options_of(np.dtype(np.float16))
    expected = expected_records(logits, columns, layout, options)
    assert_records(layout, records_of(cuda, lying, columns, layout, options), expected, np.float16)
    gradient = row_gradient(layout, expected, columns, np.ones(3, np.bool_))
    wanted = expected_gradient(logits, gradient, options)
    fused(cuda, logits.copy(), lying, columns, layout)
    write_gradient(cuda, lying, lying, gradient, options)
    assert_gradient(lying, wanted, logits.dtype)


PLACES = """
#include <storage.cuh>
__global__ void places(long long rows, long long classes, int chunk, int lanes, long long column, long long* found) {
  const Place place(rows, classes, chunk, lanes);
  long long* to = found + 4 * (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x);
  to[0] = place.row;
  to[1] = place.first;
  to[2] = place.count;
  to[3] = place.relative(column);
}
"""


def test_classes_beyond_2_to_the_31_have_their_place(stand_in, cuda):
    classes, column = 5 * 2**30 + 7, 4 * 2**30 + 5
    grid = Grid.of(1, classes, 2, 1)
    assert (grid.parts, grid.lanes, grid.threads) == (6, 256, 256)
    found = np.zeros((grid.parts, grid.threads, 4), np.int64)
    places = RawModule(code=PLACES, options=cuda.OPTIONS, name_expressions=["places"]).get_function("places")
    numbers = np.int64(1), np.int64(classes), np.int32(grid.chunk), np.int32(grid.lanes), np.int64(column)
    places((1, grid.parts, 1), (grid.threads, 1, 1), (*numbers, on_device(found)))
    assert (found[:, :, 0] == 0).all()
    assert found[:, 0, 1].tolist() == [part * grid.chunk for part in range(grid.parts)]
    assert found[:, 0, 2].sum() == classes
    part = column // grid.chunk
    assert found[:, 0, 3].tolist() == [column % grid.chunk if each == part else -1 for each in range(grid.parts)]


def faulty(cuda, monkeypatch, tmp_path, file, correct, wrong):
    """The kernels with a fault, put into a copy of theirs."""
    folder = tmp_path / "kernels"
    shutil.copytree(cuda.source_folder, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (folder / file).read_text()
    assert text.count(correct) == 1, f"{correct!r} is not once in {file}"
    (folder / file).write_text(text.replace(correct, wrong))
    options = (*cuda.OPTIONS[:-1], f"-I{folder}")

    def function(kernel, _):
        source = (folder / kernel.file).read_text()
        return RawModule(code=source, options=options, name_expressions=[kernel.name]).get_function(kernel.name)

    monkeypatch.setattr(cuda, "_function", function)


def few_rows():
    """Of many vectors and of few, rising to the end, over several blocks; and columns at both edges."""
    dtype = DTYPES[0]
    for classes in (13, 301, 2500):
        logits, columns = draw(dtype, classes, 2, seed=16)
        columns[:] = 0, classes - 1
        for values in (logits, np.sort(logits * 5, axis=1)):
            lying, _ = rows_in_memory(values, pitch=classes + 3, shift=3)
            options = options_of(dtype)
            expected = expected_records(lying, columns, Layout(), options)
            gradient = row_gradient(Layout(), expected, columns, np.ones(2, np.bool_))
            yield lying, columns, options, expected, gradient


def check_forward(cuda):
    for lying, columns, options, expected, _ in few_rows():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Grid, "reading", lambda *_: Grid(64, 128, 2**14, 1, 1))
            assert_records(Layout(), records_of(cuda, lying, columns, Layout(), options), expected, lying.dtype)


def check_backward(cuda):
    for lying, _, options, _, gradient in few_rows():
        wanted = expected_gradient(lying, gradient, options)
        write_gradient(cuda, lying, lying, gradient, options)
        assert_gradient(lying, wanted, lying.dtype)


def check_cluster(cuda):
    check_plain(cuda, DTYPES[0], 33_001, rows=1, seed=16)


FAULTS = [
    (check_forward, "storage.cuh", "- static_cast<int>(beyond)) % width", "- static_cast<int>(beyond) - 1) % width"),
    (check_forward, "storage.cuh", "index < head ? index : index + body * width", "index"),
    (check_forward, "storage.cuh", "edges = count - body * width", "edges = head"),
    (check_forward, "storage.cuh", "v.word[i] >> 16)})", "v.word[i] & 0xffffu)})"),
    (check_forward, "forward.cu", "start += step)", "start += 2 * step)"),
    (check_forward, "forward.cu", "exp(before.over(exponential, scale))", "exp(exponential.over(before, scale))"),
    (check_forward, "forward.cu", "start >= 0 || place_of_target == 0", "start >= 0"),
    (check_forward, "record.cuh", "sum *= exp(exponential.over(static_cast<double>(max), scale))", "sum *= 1.0"),
    (check_forward, "record.cuh", "for (int i = 1; i < warps; ++i) value", "for (int i = 2; i < warps; ++i) value"),
    (check_forward, "record.cuh", "__syncthreads();\n  value = of_warps[first]", "value = of_warps[first]"),
    (check_backward, "storage.cuh", "edges = count - body * width", "edges = head"),
    (check_backward, "backward.cu", "at == held ? at_held :", "at == held + 1 ? at_held :"),
    (check_backward, "row_gradient.cuh", "if (held_place == i) x[i] = at_held", "if (held_place == i) x[i] += at_held"),
    (check_cluster, "fused.cu", "cluster_wait();\n  } else", "} else"),
    (check_cluster, "fused.cu", "(&told.sum[block], thread, sum)", "(&told.sum[block], block, sum)"),
]


@pytest.mark.parametrize("check", [check_forward, check_backward, check_cluster])
def test_comparisons_that_find_faults_pass_without_one(cuda, check):
    check(cuda)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[1]}: {fault[3]}")
def test_a_planted_fault_is_caught(stand_in, cuda, monkeypatch, tmp_path, fault):
    check, *change = fault
    faulty(cuda, monkeypatch, tmp_path, *change)
    with pytest.raises((AssertionError, KernelFault)):
        check(cuda)
