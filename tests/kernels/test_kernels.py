"""The CUDA kernels, run on the CPU (see tests/cuda_on_host): the same sources, threads and barriers."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from kernels.comparing import (
    DTYPES,
    TRANSFORMS,
    Divergences,
    Problem,
    assert_equal,
    assert_states,
    check_everything,
    check_softmax,
    expected_gradient,
    on_device,
    problem_of,
    rows_of,
    states_on_device,
    write_gradient,
)
from kernels.device_arrays import rows_in_memory
from pce_mpi.kernels import compilation, definition
from pce_mpi.kernels.compilation import LaunchConfig
from pce_mpi.kernels.interface import DOUBLE, ROW_GRADIENT, SINGLE, ClassWeights, StateFields, Transform
from ranks.test_definition import FIELDS, KINDS, logits_of
from ranks.test_divergence import sums_and_gradients

# Every boundary of the code: vectors, threads of a row, splits of a row.
SHORT = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257, 1023]
LONG = [3072, 3073, 6145, 8191, 16_385, 33_001]


def in_splits(splits):
    """`LaunchConfig.for_forward` that cuts each row into so many parts."""
    return lambda *sizes, multiprocessors: LaunchConfig.with_splits(*sizes, splits)


def plain(dtype, classes, rows=3, seed=0, spread=3.0):
    rng = np.random.default_rng([seed, classes, rows])
    logits = rng.normal(0, spread, (rows, classes)).astype(dtype)
    columns = rng.integers(0, classes, rows)
    columns[1::3] = -1
    return Problem(logits, columns, precision=DOUBLE if dtype == np.float64 else SINGLE)


@pytest.mark.parametrize("kind", KINDS)
def test_random_problems_have_bits_of_definition(cuda, monkeypatch, kind):
    for seed in range(30):
        problem, rng = problem_of(seed, kind), np.random.default_rng(seed)
        width = 16 // problem.logits.dtype.itemsize
        with monkeypatch.context() as patch:
            if seed % 2:
                splits = int(rng.integers(1, 5))
                patch.setattr(LaunchConfig, "for_forward", in_splits(splits))
            pitch = problem.logits.shape[1] + int(rng.integers(0, 9))
            check_everything(cuda, problem, seed, pitch=pitch, shift=int(rng.integers(0, width)))


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_have_bits_of_definition(cuda, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for dtype, scale in itertools.product(DTYPES, (1.0, 0.7)):
        for classes in (1, 300):
            student, teacher = (logits_of(kind, classes, dtype, rng)[0] for _ in range(2))
            teacher = np.where(rng.random(teacher.shape) < 0.5, student, teacher)
            given = student, teacher, Transform(scale), dtype is not np.float64 and scale == 1.0
            for got, wanted in zip(
                sums_and_gradients(Divergences(cuda), *given), sums_and_gradients(definition, *given), strict=True
            ):
                assert_equal(got, wanted)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_every_option_has_bits_of_definition(cuda, name, transform):
    for seed, dtype in enumerate(DTYPES):
        check_everything(cuda, problem_of(seed, "special", name, dtype, transform), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_length_at_boundaries_of_code(cuda, dtype):
    for classes in SHORT:
        check_everything(cuda, plain(dtype, classes, rows=17 if classes < 70 else 5), 0)
    for classes in LONG:
        check_everything(cuda, plain(dtype, classes, rows=2), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_start_anywhere_are_written_alone(cuda, dtype):
    width = 16 // dtype.itemsize
    for classes in (1, width - 1, 3 * width + 1, 41, 300):
        problem = plain(dtype, classes)
        problem.columns[:] = 0, classes - 1, classes // 2
        given, rows = problem.logits[:, :, None], rows_of(problem, 3)
        wanted = expected_gradient(problem, rows, dtype)[:, :, None]
        for shift in range(width):
            pitch = classes + (shift * 5) % 7
            strided, fence = rows_in_memory(given, pitch=pitch, shift=shift, at_end=shift == 1)
            out, out_fence = rows_in_memory(given, pitch=pitch, shift=(shift * 3) % width)
            assert_states(states_on_device(cuda, problem, strided), problem)
            write_gradient(cuda, problem, rows, out, strided)
            assert_equal(out, wanted)
            write_gradient(cuda, problem, rows, strided, strided)
            assert_equal(strided, wanted)
            assert fence.is_whole()
            assert out_fence.is_whole()
            between = np.lib.stride_tricks.as_strided(strided[0, -1:, 0], (pitch - classes + 1,), (dtype.itemsize,))[1:]
            assert (between.view(np.uint8) == 0xA7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_with_strided_classes_are_copied(cuda, dtype):
    problem = plain(dtype, 37, rows=12)
    rows = rows_of(problem, 4)
    values, wanted = (
        array.reshape(4, 3, 37).transpose(0, 2, 1)
        for array in (problem.logits, expected_gradient(problem, rows, dtype))
    )
    for strided in (values, np.asfortranarray(values), values[:, ::-1][:, ::-1], values[::-1].copy()[::-1]):
        before = strided.copy()
        assert_states(states_on_device(cuda, problem, strided), problem)
        out = np.zeros_like(strided)
        write_gradient(cuda, problem, rows, out, strided)
        assert_equal(out, wanted)
        assert strided.tobytes() == before.tobytes()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_gradient_of_another_dtype_is_rounded_once(cuda, out_dtype):
    for dtype in DTYPES:
        problem = plain(dtype, 45)
        rows, out = rows_of(problem, 5), np.empty((3, 45, 1), out_dtype)
        write_gradient(cuda, problem, rows, out, problem.logits[:, :, None])
        assert_equal(out[:, :, 0], expected_gradient(problem, rows, out_dtype))


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0**-20, 0.7])
@pytest.mark.parametrize("offset", [2040.0, 2047.5, 2100.0, -1840.0, -1900.0, -2050.0, 1e5, -1e30, 3e38])
def test_logits_at_ends_of_fast_way(cuda, offset, scale):
    # Beside them logits around 0 and masked ones, so that threads of one row go different ways.
    rng = np.random.default_rng(8)
    for ordered in (False, True):
        z = np.where(rng.random((3, 2500)) < 0.1, offset + rng.normal(0, 9, (3, 2500)), rng.normal(0, 9, (3, 2500)))
        z[2] = offset + rng.normal(0, 9, 2500)
        z[rng.random(z.shape) < 0.1] = -np.inf
        logits = np.clip(np.sort(z, axis=1) if ordered else z, None, 3e38 * scale) / scale
        problem = Problem(logits.astype(np.float32), np.array([3, 2499, 70]), transform=Transform(scale))
        check_everything(cuda, problem, 8)


def check_scales_beyond_float32(cuda, dtypes=DTYPES[:3]):
    # z is near 0, or as far as the fast way goes and farther; a logit has any size, also that of a subnormal number.
    for dtype, scale in itertools.product(dtypes, (0.7, 1 / 3, 1e-3, 64.1, 1e-19, 1e19)):
        rng, width = np.random.default_rng(9), 16 // dtype.itemsize
        z = rng.normal(0, 3, (7, 40 * width + 3))
        z[1], z[2], z[3] = z[1] * 300, z[2] * 1e6, z[3] + 2040.0
        z[3, ::2] = -1850.0
        z[4, ::3] = -np.inf
        with np.errstate(over="ignore", under="ignore"):
            logits = (z / scale).astype(dtype)
            logits[6] = (rng.normal(0, 1, z.shape[1]) * 10.0 ** rng.integers(-46, 0, z.shape[1])).astype(dtype)
            # Their n ends in 32 bits that could be those of the largest logit.
            logits[4, 1:40:3] = (np.arange(1, 14) * -(2.0**32) * np.log(2) / scale).astype(dtype)
        logits[0, 5], logits[5, 9] = -0.0, np.nan
        columns = np.array([0, width - 1, width, 2 * width - 1, 39 * width, -1, z.shape[1] - 1])
        for fields in ("plain", "weighted"):
            check_everything(cuda, Problem(logits, columns, FIELDS[fields], transform=Transform(scale)), 9)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_scales_beyond_float32_have_bits_of_definition(cuda, monkeypatch, dtype):
    launched, launch = set(), cuda._launch
    monkeypatch.setattr(cuda, "_launch", lambda kernel, *a, **k: (launched.add(kernel), launch(kernel, *a, **k)))
    check_scales_beyond_float32(cuda, [dtype])
    loops = {compilation.loop(name, dtype.name, "SCALED_IN_DOUBLE", 0) for name in ("fill_states", "write_gradient")}
    assert loops <= launched
    assert not any("fill_general_states" in kernel.name for kernel in launched)


def check_entropies_on_grids(cuda, dtype):
    # The sum of exp(z) z has another grid from 21.9 on, and from 46.1 on; below 0.57, -28.3 and -54 it is fine.
    rng = np.random.default_rng(5)
    tops = np.concatenate([np.arange(-60, 3, 3), np.arange(18.0, 28.0, 0.5), np.arange(42, 50)])
    logits = tops[:, None] - np.abs(rng.normal(0, 8, (len(tops), 2600)))
    logits[::2] = np.sort(logits[::2], axis=1)
    logits[10:20, 7:9] = 0.0  # one of them is held apart
    problem = Problem(logits.astype(dtype), None, FIELDS["statistics"])
    assert_states(states_on_device(cuda, problem), problem)


def check_entropies_beside_far_logits(cuda, dtype):
    # Some logits are summed one by one, on grids that are too coarse for the others; -inf stands for padding too.
    rng = np.random.default_rng(6)
    tops = np.repeat([255.0, 290.0, 330.0, 400.0, 800.0, 3000.0, 3e4], 4)
    logits = rng.normal(0, 3, (len(tops), 3001))
    for number, (row, top) in enumerate(zip(logits, tops, strict=True)):
        row[slice(0, 2) if number % 2 else rng.integers(0, 3001, 300)] += top
        if number % 4 > 1:
            row[rng.integers(0, 3001, 20)] = -np.inf
    problem = Problem(logits.astype(dtype), None, FIELDS["statistics"])
    assert_states(states_on_device(cuda, problem), problem)


def check_statistics_beside_huge_logit(cuda):
    logits = np.array([[3e38, 42.75, 0.365, 2e-4, 6e-5, 2e-5, 1e-5, 3e-6]] * 4, np.float32)
    logits[1:3, 0] = -3e38
    logits[2, 1:] = [0.5, *[-3e38] * 3, *[-2e38] * 3]  # of all others the exponential is 0
    logits[3] = -3e38
    problem = Problem(logits, None, FIELDS["statistics"])
    assert_states(states_on_device(cuda, problem), problem)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_entropies_beside_far_logits_are_right(cuda, dtype):
    check_entropies_beside_far_logits(cuda, dtype)


def test_huge_logit_leaves_no_entropy_of_others(cuda):
    check_statistics_beside_huge_logit(cuda)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_entropies_have_bits_of_definition_on_grids(cuda, dtype):
    check_entropies_on_grids(cuda, dtype)


@pytest.mark.parametrize("fields", ["smoothed", "statistics"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
def test_sums_of_very_long_rows_are_exact(cuda, monkeypatch, dtype, fields):
    # A thread adds 2**18 numbers below the end of the grid of exp(z) z, 2**36: float64 has no such sum.
    logits = np.random.default_rng(0).uniform(21.6, 21.73, (1, 2**21 + 5)).astype(dtype)
    logits[0, ::50] = -21.6
    monkeypatch.setattr(LaunchConfig, "for_forward", lambda *_, multiprocessors: LaunchConfig(8, 128, 2**22, 1, 1))
    problem = Problem(logits, np.array([5]), FIELDS[fields])
    assert_states(states_on_device(cuda, problem), problem)


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_subnormal_logits_count_at_large_scales(cuda, dtype):
    logits = (np.arange(-40, 41) * 2.0**-133)[None, :].astype(dtype)
    assert (np.abs(logits[logits != 0].astype(np.float64)) < 2.0**-126).all()
    problem = Problem(logits, np.array([3]), transform=Transform(2.0**126))
    assert len(np.unique(problem.softmax()["odds"])) == 1
    assert problem.softmax()["odds"][0] > 81
    check_everything(cuda, problem, 0)


@pytest.mark.parametrize("out_dtype", [np.float32, np.float64])
def test_gradient_keeps_subnormal_entries(cuda, out_dtype):
    # Others have probabilities of e**-89 and less; a GPU that flushed would make them 0.
    logits = np.random.default_rng(3).uniform(-4, 0, (2, 45)).astype(np.float32)
    logits[[0, 1], [3, 44]] = 88.0
    problem = Problem(logits, np.array([3, 44]))
    rows = rows_of(problem, 0)
    rows.view(np.int64)[:, ROW_GRADIENT["valid"]] = 1
    rows[:, ROW_GRADIENT["factor"]] = problem.softmax()["normalizer"]
    wanted = expected_gradient(problem, rows, np.dtype(out_dtype))
    others = np.delete(wanted[0], 3)
    assert ((0 < others) & (others < 2.0**-126)).all()
    out = np.zeros((2, 45, 1), out_dtype)
    write_gradient(cuda, problem, rows, out, logits[:, :, None])
    assert_equal(out[:, :, 0], wanted)


def test_states_of_splits_merge_to_same_bits(cuda, monkeypatch):
    for name, splits in zip(FIELDS, (2, 31, 33, 70, 3, 40), strict=True):
        problem = plain(np.dtype(np.float32), 3000, seed=12)
        columns = None if name in ("probabilities", "softmax") else problem.columns
        problem = Problem(problem.logits, columns, FIELDS[name], ClassWeights(np.linspace(0.1, 2, 3000)))
        monkeypatch.setattr(LaunchConfig, "for_forward", in_splits(splits))
        assert_states(states_on_device(cuda, problem), problem)


def test_no_rows_or_no_classes_launch_nothing(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "_launch", lambda *_, **__: pytest.fail("launched"))
    for fields in FIELDS.values():
        for shape in ((0, 5, 1), (3, 0, 1), (0, 0, 0), (2, 0, 3), (2, 5, 0)):
            logits, rows = np.empty(shape, np.float32), shape[0] * shape[2]
            problem = Problem(np.empty((rows, shape[1]), np.float32), np.full(rows, -1), fields)
            states = states_on_device(cuda, problem, logits)
            assert states.tobytes() == fields.identity(rows).tobytes()
            write_gradient(cuda, problem, np.empty((rows, len(ROW_GRADIENT))), logits, logits)
    check_softmax(cuda, Problem(np.empty((0, 5), np.float32), np.empty(0, np.int64)))


@pytest.mark.parametrize("size", [0, 1, 31, 256, 257, 3000, 5000])
def test_sums_of_numbers_have_bits_of_definition(cuda, size):
    rng = np.random.default_rng(size)
    strange = [[], [np.inf], [-np.inf], [np.nan], [np.inf, -np.inf], [np.inf, np.nan]]
    for exponent, more in zip((-300, -20, 0, 200, 0, 0), strange, strict=True):
        values = rng.standard_normal(size) * 10.0 ** rng.integers(exponent - 20, exponent + 20, size)
        values[::7] = 0
        values = rng.permutation(np.append(values, more))
        expected = definition.sums_of(values, values[::2])
        found = cuda.sums_of(on_device(values), on_device(values[::2].copy())).get()
        assert found.tobytes() == expected.tobytes()
        losses = np.array([values, values[::-1]])
        given = {"loss_of": expected, "loss_of_rows": losses}
        for name, mean in itertools.product(given, (True, False)):
            both = (cuda, on_device(given[name])), (definition, given[name])
            ours, theirs = (getattr(kernel, name)(each, mean, np.dtype(np.float32)) for kernel, each in both)
            for one, other in zip(ours, theirs, strict=True):
                assert_equal(one.get(), other)


@pytest.mark.parametrize("scale", [None, np.float32(2.0**20)])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_halves_are_nearest_and_rest(cuda, dtype, scale):
    rng = np.random.default_rng(7)
    values = rng.standard_normal((5, 700)) * 10.0 ** rng.integers(-44, 3, (5, 700))
    values = values.astype(np.float32)[:, 3:300]
    with np.errstate(over="ignore"):
        scaled = values if scale is None else values * scale
        high = scaled.astype(dtype)
    given = on_device(values), dtype, None if scale is None else on_device(np.array(scale))
    with np.errstate(invalid="ignore"):
        low = (scaled - high.astype(np.float32)).astype(dtype)
    for count in (1, 2):
        found = cuda.halves_of(*given, count)
        assert len(found) == count
        for ours, expected in zip(found, (high, low), strict=False):
            assert_equal(ours.get(), expected)


def test_bits_of_fields_are_those_of_header():
    header = (compilation.source_folder / "states.h").read_text(encoding="utf-8")
    bits = {
        name.lower(): int(bit)
        for name, bit in re.findall(r"(\w+) = (\d+)", re.search(r"enum Field \{(.*?)\}", header, re.DOTALL)[1])
    }
    assert len(bits) == 7
    for name, bit in bits.items():
        assert StateFields(**{name: True}).flags == bit


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_equal_arguments_give_equal_bits(cuda, dtype):
    problem = plain(np.dtype(dtype), 20_000, rows=1)
    first, second = (states_on_device(cuda, problem) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def check_chosen(cuda):
    rng = np.random.default_rng(8)
    for dtype, axis in itertools.product(DTYPES, range(3)):
        x = rng.standard_normal((5, 4, 6)).astype(dtype).swapaxes(0, 1)[:, ::2]
        columns = rng.integers(-2, x.shape[axis] + 2, (x.size // x.shape[axis], 7))
        wanted, here = definition.taken(x, axis, columns, 3), on_device(x)
        for order in "CF":
            found = cuda.taken(here, axis, np.array(columns, order=order), 3).get()
            assert found.tobytes() == wanted.tobytes()
        columns = np.sort(columns, axis=1)[:, ::7]  # one a row
        values = rng.standard_normal(columns.shape).astype(dtype)
        definition.put(changed := x.copy(), axis, columns, values)
        cuda.put(here, axis, columns, on_device(values))
        assert here.get().tobytes() == changed.tobytes()


def test_chosen_columns_have_bits_of_host(cuda):
    check_chosen(cuda)


def check_targets(cuda):
    pairs = (np.int64, -100), (np.int16, 7), (np.uint64, -100), (np.uint64, 7), (np.int64, 2**70), (np.uint8, -(2**70))
    pairs += (np.uint64, 2**63), (np.uint64, 2**64 - 1), (np.int64, 2**64 - 1)
    for dtype, ignored in pairs:
        of_classes = np.arange(600) % 10
        held = ignored if -(2**63) <= ignored < 2**63 or (dtype is np.uint64 and ignored < 2**64) else 5
        for more in ([], [held], [10], [-1], [-(2**15), 9]):
            targets = (
                np.array([*of_classes.tolist(), *(number % 2**64 for number in more)], np.uint64)
                .astype(np.int64)
                .astype(dtype)
            )
            columns, valid, wrong = (each.get() for each in cuda.columns_of(on_device(targets), ignored, 3, 10))
            known = (targets < 10) & (targets >= 0)
            counts = np.array([int(target) != ignored for target in targets])
            assert valid.tolist() == counts.tolist()
            assert columns.tolist() == np.where(counts & known, targets.astype(np.int64) - 3, -1).tolist()
            assert wrong.tolist() == [int((counts & ~known).any())]


def test_class_numbers_become_columns_of_this_shard(cuda):
    check_targets(cuda)


def check_large_elements(cuda):
    rng = np.random.default_rng(9)
    for dtype in DTYPES:
        x = rng.standard_normal((5, 700)).astype(dtype)[:, 3:]
        x[0, :6] = np.nan, np.inf, -np.inf, 0.0, -0.0, ml_dtypes.finfo(dtype).smallest_subnormal
        least = np.array([0.0, np.inf, -2.0, 0.5, float(x[4, 40])])
        kept, counts = cuda.kept_at_least(on_device(x), least)
        wide = x.astype(np.float64)
        is_less = wide < least[:, None]
        assert counts.get().tolist() == np.count_nonzero(~is_less, axis=1).tolist()
        assert_equal(kept.get(), np.where(is_less, -np.inf, wide).astype(dtype))


def test_elements_below_value_become_minus_inf(cuda):
    check_large_elements(cuda)
