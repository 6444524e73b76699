"""A fault in a kernel is found by comparing what it gives with what is right."""

import shutil

import numpy as np
import pytest

from cuda_on_host.module import KernelFault, RawModule
from kernels.comparing import (
    DTYPES,
    assert_gradient,
    assert_states,
    check_plain,
    draw,
    expected_gradient,
    expected_states,
    options_of,
    row_gradient,
    states_of,
    write_gradient,
)
from kernels.device_arrays import rows_in_memory
from pce_mpi.loss.kernels import compilation
from pce_mpi.loss.kernels.launch_config import LaunchConfig
from pce_mpi.loss.softmax_state import StateFields


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


def few_rows():
    """Yield rows of many vectors and of few, also rising to the end, over several blocks; columns at both edges."""
    dtype = DTYPES[0]
    for classes in (13, 301, 2500):
        logits, columns = draw(dtype, classes, 2, seed=16)
        columns[:] = 0, classes - 1
        for values in (logits, np.sort(logits * 5, axis=1)):
            strided, _ = rows_in_memory(values, pitch=classes + 3, shift=3)
            options = options_of(dtype)
            expected = expected_states(strided, columns, StateFields(), options)
            gradient = row_gradient(StateFields(), expected, columns, np.ones(2, np.bool_))
            yield strided, columns, options, expected, gradient


def check_forward(cuda):
    for strided, columns, options, expected, _ in few_rows():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LaunchConfig, "for_forward", lambda *_: LaunchConfig(64, 128, 2**14, 1, 1))
            assert_states(
                StateFields(), states_of(cuda, strided, columns, StateFields(), options), expected, strided.dtype
            )


def check_backward(cuda):
    for strided, _, options, _, gradient in few_rows():
        wanted = expected_gradient(strided, gradient, options)
        write_gradient(cuda, strided, strided, gradient, options)
        assert_gradient(strided, wanted, strided.dtype)


def check_cluster(cuda):
    check_plain(cuda, DTYPES[0], 33_001, rows=1, seed=16)


FAULTS = [
    (check_forward, "storage.cuh", "(misaligned)) % width", "(misaligned) - 1) % width"),
    (check_forward, "storage.cuh", "index < head ? index : index + vectors * width", "index"),
    (check_forward, "storage.cuh", "scalars = count - vectors * width", "scalars = head"),
    (check_forward, "storage.cuh", "v.word[i] >> 16)})", "v.word[i] & 0xffffu)})"),
    (check_forward, "forward.cu", "start += step)", "start += 2 * step)"),
    (check_forward, "forward.cu", "before.log_rescale(exponential, scale)", "exponential.log_rescale(before, scale)"),
    (check_forward, "forward.cu", "start >= 0 || target_index == 0", "start >= 0"),
    (
        check_forward,
        "softmax_state.cuh",
        "sum *= exp(exponential.log_rescale(static_cast<double>(max), scale))",
        "sum *= 1.0",
    ),
    (
        check_forward,
        "softmax_state.cuh",
        "for (int i = 1; i < warps; ++i) value",
        "for (int i = 2; i < warps; ++i) value",
    ),
    (
        check_forward,
        "softmax_state.cuh",
        "__syncthreads();\n  value = warp_values[first]",
        "value = warp_values[first]",
    ),
    (check_backward, "storage.cuh", "scalars = count - vectors * width", "scalars = head"),
    (check_backward, "backward.cu", "at == held ? held_dx :", "at == held + 1 ? held_dx :"),
    (check_backward, "row_gradient.cuh", "if (held_index == i) x[i] = held_dx", "if (held_index == i) x[i] += held_dx"),
    (check_cluster, "fused.cu", "cluster_wait();\n  } else", "} else"),
    (check_cluster, "fused.cu", "(&shared.sum[block], thread, sum)", "(&shared.sum[block], block, sum)"),
]


@pytest.mark.parametrize("check", [check_forward, check_backward, check_cluster])
def test_comparisons_that_find_faults_pass_without_one(cuda, check):
    check(cuda)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[1]}: {fault[3]}")
def test_planted_fault_is_caught(stand_in, cuda, monkeypatch, tmp_path, fault):
    check, *change = fault
    faulty(cuda, monkeypatch, tmp_path, *change)
    with pytest.raises((AssertionError, KernelFault)):
        check(cuda)
