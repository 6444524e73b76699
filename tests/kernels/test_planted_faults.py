"""A fault in a kernel is found by comparing what it gives with what is right."""

import shutil

import numpy as np
import pytest

from cuda_on_host.module import KernelFault, RawModule
from kernels.comparing import (
    Problem,
    assert_equal,
    assert_states,
    expected_gradient,
    rows_of,
    states_on_device,
    write_gradient,
)
from kernels.device_arrays import rows_in_memory
from kernels.test_kernels import (
    check_chosen,
    check_entropies_beside_far_logits,
    check_entropies_on_grids,
    check_large_elements,
    check_scales_beyond_float32,
    check_statistics_beside_huge_logit,
    check_targets,
)
from pce_mpi.kernels import compilation
from pce_mpi.kernels.compilation import LaunchConfig
from pce_mpi.kernels.interface import ROW_GRADIENT, Transform
from ranks.test_definition import FIELDS


def faulty(cuda, monkeypatch, tmp_path, file, correct, wrong):
    """The kernels with a fault, put into a copy of theirs."""
    folder = tmp_path / "kernels"
    shutil.copytree(compilation.source_folder, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (folder / file).read_text()
    assert text.count(correct) == 1, f"{correct!r} is not once in {file}"
    (folder / file).write_text(text.replace(correct, wrong))
    options = (*compilation.OPTIONS[:-1], f"-I{folder}")

    def function(kernel, _):
        source = (folder / kernel.file).read_text()
        return RawModule(code=source, options=options, name_expressions=[kernel.name]).get_function(kernel.name)

    monkeypatch.setattr(cuda, "_function", function)


def few_rows(fields="plain", scale=1.0):
    """Yield problems of many vectors and of few, also in order or with huge logits first, and logits in memory."""
    for classes in (13, 301, 2500):
        drawn = np.random.default_rng([16, classes]).normal(0, 3, (4, classes))
        huge = np.where(np.arange(classes) < classes // 3, 1e36, drawn)
        low = np.where(np.arange(classes) % 5 == 1, -1e12, drawn)
        for values in (drawn, np.sort(drawn * 5), np.sort(drawn * 300), huge, low):
            logits = values.astype(np.float32 if np.abs(values).max() > 1e9 or classes == 301 else np.float16)
            columns = np.array([classes // 2, classes - 1, 0, classes // 3])
            problem = Problem(logits, columns, FIELDS[fields], transform=Transform(scale))
            strided, _ = rows_in_memory(logits[:, :, None], pitch=classes + 3, shift=3)
            yield problem, strided


def check_forward(cuda, fields="plain", splits=1, scale=1.0):
    for problem, strided in few_rows(fields, scale):
        with pytest.MonkeyPatch.context() as patch:
            chunk = 2**14 if splits == 1 else problem.logits.shape[1] // splits // 8 * 8 + 8
            splits_of_row = -(-problem.logits.shape[1] // chunk)
            config = LaunchConfig(64, 128, chunk, splits_of_row, 2)
            patch.setattr(LaunchConfig, "for_forward", lambda *_, config=config, **options: config)
            assert_states(states_on_device(cuda, problem, strided), problem)


def check_general(cuda):
    check_forward(cuda, "statistics", splits=3, scale=0.7)


def check_smoothing(cuda):
    check_forward(cuda, "smoothed")


def check_statistics(cuda):
    check_forward(cuda, "statistics")


def check_grids(cuda):
    check_entropies_on_grids(cuda, np.dtype(np.float32))


def check_far(cuda):
    check_entropies_beside_far_logits(cuda, np.dtype(np.float32))


def check_any_scale(cuda):
    check_scales_beyond_float32(cuda, [np.dtype(np.float32)])


def check_forward_of_any_scale(cuda):
    check_forward(cuda, scale=0.7)


def check_backward(cuda, config=None, fields="plain", scale=1.0):
    for problem, strided in few_rows(fields, scale):
        rows = rows_of(problem, 1)
        rows.view(np.int64)[:, ROW_GRADIENT["valid"]] = 1, 1, 1, 0
        with pytest.MonkeyPatch.context() as patch:
            if config is not None:
                patch.setattr(LaunchConfig, "for_backward", lambda *_: config)
            write_gradient(cuda, problem, rows, strided, strided)
        assert_equal(strided[:, :, 0], expected_gradient(problem, rows, strided.dtype))


def check_backward_of_two_warps(cuda):
    check_backward(cuda, LaunchConfig(64, 128, 2**14, 1, 2))


def check_backward_of_any_scale(cuda):
    check_backward(cuda, scale=0.7)


def check_backward_of_smoothing(cuda):
    check_backward(cuda, fields="smoothed")


def check_backward_of_statistics(cuda):
    check_backward(cuda, fields="statistics")


FAULTS = [
    (check_chosen, "chosen.cu", "static_cast<Word>(other)", "0"),
    (check_chosen, "chosen.cu", "x[places[i]] = values[i]", "x[places[i]] = values[0]"),
    (check_large_elements, "chosen.cu", "found < value ? -infinity() : found", "found >= value ? found : -infinity()"),
    (check_large_elements, "chosen.cu", "least[row]", "least[0]"),
    (check_targets, "targets.cu", "!can_be || target != ignored", "target != ignored"),
    (check_targets, "targets.cu", "if (counts && !is_class)", "if (!is_class)"),
    (check_targets, "targets.cu", "target < num_classes;", "target <= num_classes;"),
    (check_forward, "storage.cuh", "(misaligned)) % width", "(misaligned) - 1) % width"),
    (check_forward, "storage.cuh", "index < head ? index : index + vectors * width", "index"),
    (check_forward, "storage.cuh", "scalars = count - vectors * width", "scalars = head"),
    (check_forward, "storage.cuh", "v.word[i] >> 16)})", "v.word[i] & 0xffffu)})"),
    (check_forward, "forward.cu", "start += step)", "start += 2 * step)"),
    (check_forward, "forward.cu", "if (!single || target == place(start, i))", "if (!single)"),
    (check_forward, "forward.cu", "< static_cast<unsigned>(step * WIDTH)", "< static_cast<unsigned>(step)"),
    (
        check_forward,
        "forward.cu",
        "    digits.raise(floor_div(n, Single::WIDTH));\n",
        "    digits.grid = floor_div(n, 21);\n",
    ),
    (check_forward, "forward.cu", "if (!HOLDS && at == target) continue;", ""),
    (check_forward, "forward.cu", "if (largest > 4096) return false;", ""),
    (
        check_forward,
        "forward.cu",
        "const double end = static_cast<double>(largest)",
        "const double end = 2.0 * static_cast<double>(largest)",
    ),
    (check_forward, "groups.cuh", "sum.raise(reduce(sum.grid,", "(void)(reduce(sum.grid,"),
    (check_forward, "groups.cuh", "for (int i = 1; i < warps; ++i) value", "for (int i = 2; i < warps; ++i) value"),
    (check_forward, "groups.cuh", "__syncthreads();\n  value = warp_values[first]", "value = warp_values[first]"),
    (check_any_scale, "forward.cu", "|| way == SCALED_IN_DOUBLE ? maximum", "? maximum"),
    (check_forward_of_any_scale, "forward.cu", ": -4096.0f", ": -4.0f"),
    (check_forward_of_any_scale, "reduction.cuh", "0x8fffffffffffffff", "0xffffffffffffffff"),
    (check_any_scale, "reduction.cuh", "- k * LO", ""),
    (check_any_scale, "reduction.cuh", "factor_(scale * RAISED)", "factor_(wide(narrow(scale)) * RAISED)"),
    (check_backward_of_any_scale, "reduction.cuh", "MAGIC32_BITS + more))) {}", "MAGIC32_BITS))) {}"),
    (check_backward_of_any_scale, "backward.cu", "(154 + exponent) / scale", "(154 + exponent)"),
    (check_smoothing, "forward.cu", "load(start, 0);", "load(start, 0x3c003c00);"),
    (check_smoothing, "forward.cu", "magnitude(sum) <= 0x1p16", "magnitude(sum) <= 0x1p60"),
    (check_smoothing, "forward.cu", "if (largest_ >= 1.0f)", "if (largest_ >= 0.1f)"),
    (check_smoothing, "forward.cu", "static_cast<int>(x[j])", "static_cast<int>(x[j] + 0.5f)"),
    (check_statistics, "forward.cu", "if (bits(larger) != bits(top_of_vectors)) top", "top"),
    (check_statistics, "forward.cu", "span.scalars ? first_place(first_round) : NONE", "NONE"),
    (check_statistics, "forward.cu", "if (!holds_top && (i == 0 || has_top))", "if (i == 0 || has_top)"),
    (check_statistics, "forward.cu", "if (!holds_top && (i == 0 || has_top))", "if (!holds_top && i == 0)"),
    (check_statistics, "forward.cu", "word_of<T>(swapped)", "Storage<T>::minus_inf"),
    (check_statistics, "forward.cu", "i == out ? wide(swapped) : number_of", "number_of"),
    (check_statistics, "forward.cu", "if (!exact) add_below_one", "if (false) add_below_one"),
    (check_statistics, "forward.cu", "    second_ += digit;\n", "    second_ += v;\n"),
    (check_grids, "forward.cu", "narrow(end - log(end))", "narrow(end)"),
    (check_grids, "forward.cu", "if (limbs_.grid < -1) return false;", ""),
    (check_far, "forward.cu", "if (limbs_.grid > COARSEST) return false;", ""),
    (check_far, "forward.cu", "COARSEST = 12", "COARSEST = 13"),
    (check_statistics_beside_huge_logit, "forward.cu", "!is_huge(wide(exponentials.top), call.transform) &&", ""),
    (check_statistics, "forward.cu", "for (int j = 0; away && j < 3; ++j)", "for (int j = 0; away && j < 2; ++j)"),
    (check_general, "groups.cuh", "*own, own[step], call);\n    __syncthreads();", "*own, own[step], call);"),
    (check_general, "general_forward.cu", "      x = before;\n", ""),
    (check_general, "general_forward.cu", "class_start + tile.first_class + at,", "class_start + at,"),
    (check_general, "merge.cu", "split += WARP_SIZE", "split += 2"),
    (check_general, "merge.cu", "int split = lane;", "int split = lane + 1;"),
    (check_backward, "storage.cuh", "scalars = count - vectors * width", "scalars = head"),
    (check_backward, "backward.cu", "span.index_of(held) % group_size", "0"),
    (check_backward, "backward.cu", "exponent_of(row) & ~1", "exponent_of(row)"),
    (check_backward, "backward.cu", "(154 + exponent)", "(100 + exponent)"),
    (check_backward, "backward.cu", "Vector{0, 0, 0, 0}", "Vector{0, 0, 0, 1}"),
    (check_backward_of_smoothing, "backward.cu", "wide(gradient) - weight_factor_", "wide(gradient)"),
    (check_backward_of_statistics, "backward.cu", ": wide(v) - origin_)", ": wide(v))"),
    (check_backward_of_statistics, "backward.cu", "slope_at(v) + more", "slope_at(v)"),
    (check_backward_of_statistics, "backward.cu", "span.index_of(target) % group_size", "0"),
    (check_backward_of_two_warps, "backward.cu", "  __syncthreads();\n", ""),
    (check_backward_of_two_warps, "backward.cu", "threadIdx.x) / group_size]", "threadIdx.x) / WARP_SIZE]"),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for check, *_ in FAULTS), ids=lambda check: check.__name__)
def test_comparisons_that_find_faults_pass_without_one(cuda, check):
    check(cuda)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[1]}: {fault[3]}")
def test_planted_fault_is_caught(stand_in, cuda, monkeypatch, tmp_path, fault):
    check, *change = fault
    faulty(cuda, monkeypatch, tmp_path, *change)
    with pytest.raises((AssertionError, KernelFault)):
        check(cuda)
