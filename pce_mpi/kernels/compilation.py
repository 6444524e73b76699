"""Sources and options for the CUDA compiler, and the names of all kernels; needs neither CuPy nor a GPU."""

from __future__ import annotations

from functools import cache
import hashlib
from pathlib import Path
from typing import NamedTuple

from pce_mpi.kernels.launch_config import (
    BLOCK_THREADS,
    LOADS,
    MERGE_BLOCK_THREADS,
    RESIDENT_THREADS,
    ROW_RESIDENT_THREADS,
    VECTOR_BYTES,
    WARP_SIZE,
)
from pce_mpi.kernels.softmax_state import StateFields

source_folder = Path(__file__).parent

#: the C++ type of each dtype of logits
CPP_TYPES = {"float16": "pce::float16", "bfloat16": "pce::bfloat16", "float32": "float", "float64": "double"}
#: unsigned integers by their bytes
WORDS = {2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
#: the C++ types of `elementary.SINGLE` and `DOUBLE`
PRECISIONS = ("pce::Single", "pce::Double")
#: `DType` in constants.cuh
DTYPE_CODES = {name: code for code, name in enumerate(CPP_TYPES)}

# Macros without their prefix PCE_. Python has the only copy of these constants.
_DEFINES = {
    "WARP_SIZE": WARP_SIZE,
    "VECTOR_BYTES": VECTOR_BYTES,
    "RESIDENT_THREADS": RESIDENT_THREADS,
    "ROW_RESIDENT_THREADS": ROW_RESIDENT_THREADS,
    "BLOCK_THREADS": BLOCK_THREADS,
    "LOADS": LOADS,
    "MERGE_BLOCK_THREADS": MERGE_BLOCK_THREADS,
    **{f"DTYPE_{name.upper()}": code for name, code in DTYPE_CODES.items()},
}

#: for NVRTC and nvcc; -fmad=false, as the source itself fuses multiply-adds, so that all compilers round alike
OPTIONS = (
    "-std=c++17",
    "-fmad=false",
    *(f"-DPCE_{name}={value}" for name, value in _DEFINES.items()),
    f"-I{source_folder}",
)


HOLD_LARGEST, WEIGHTED_LOGIT, ENTROPY = (
    StateFields(**{name: True}).flags for name in ("hold_largest", "weighted_logit", "entropy")
)
DIVERGENCE = ("sum_divergences", "fill_divergences", "fill_logsumexp_differences", "write_divergence_gradient")


class Kernel(NamedTuple):
    """A kernel: its file, and its name as a C++ expression."""

    file: str
    name: str


# The fields that change the loop over vectors of logits, and those for which there is one, with each `Way`.
WAYS = ("PLAIN", "SCALED", "SCALED_IN_DOUBLE")
_FORWARD = [(fields, WAYS[0]) for fields in (0, WEIGHTED_LOGIT, HOLD_LARGEST, HOLD_LARGEST | ENTROPY)]
_FORWARD += [(0, way) for way in WAYS[1:]]
_BACKWARD = [(fields, way) for fields in (0, WEIGHTED_LOGIT) for way in WAYS]
_BACKWARD += [(ENTROPY, way) for way in WAYS[:2]]


def loop(function: str, dtype: str, way: str, fields: int) -> Kernel:
    """Return the kernel with a loop over vectors of logits, which `LOOPS` need not have."""
    file = "forward.cu" if function == "fill_states" else "backward.cu"
    return Kernel(file, f"pce::{function}<{CPP_TYPES[dtype]}, pce::{way}, {fields}>")


#: all kernels with such a loop
LOOPS = [
    loop(function, dtype, way, fields)
    for function, kinds in (("fill_states", _FORWARD), ("write_gradient", _BACKWARD))
    for dtype in list(CPP_TYPES)[:3]
    for fields, way in kinds
]


def instantiations() -> list[Kernel]:
    """Return every kernel that can be launched."""
    types = list(CPP_TYPES.values())
    statistics, summed = ("row_statistics", "statistics_gradients"), ("double", "pce::Sum")
    general = [(t, a) for t in types for a in PRECISIONS if (t, a) != ("double", "pce::Single")]
    return [
        *LOOPS,
        *(Kernel("general_forward.cu", f"pce::fill_general_states<{t}, {a}>") for t, a in general),
        *(Kernel("merge.cu", f"pce::merge_states<{a}>") for a in PRECISIONS),
        *(Kernel("row_softmax.cu", f"pce::fill_row_softmax<{a}>") for a in PRECISIONS),
        *(Kernel("losses.cu", f"pce::fill_row_{name}<{a}>") for name in ("losses", "gradients") for a in PRECISIONS),
        *(Kernel("statistics.cu", f"pce::fill_{name}<{a}>") for name in statistics for a in PRECISIONS),
        *(Kernel("sums.cu", f"pce::{name}<{item}>") for name in ("sum_items", "fill_loss") for item in summed),
        *(Kernel("divergence.cu", f"pce::{name}") for name in DIVERGENCE),
        *(Kernel("conversion.cu", f"pce::{name}") for name in ("convert", "split_halves")),
        Kernel("chosen.cu", "pce::keep_at_least"),
        *(Kernel("chosen.cu", f"pce::{name}_elements<{word}>") for name in ("take", "put") for word in WORDS.values()),
        *(Kernel("general_backward.cu", f"pce::write_general_gradient<{t}, {a}>") for t, a in general),
    ]


@cache
def source_of(file: str) -> str:
    """Return the source of a .cu file with a digest of the headers, as this text is the key of CuPy's cache."""
    digest = hashlib.sha256()
    for path in sorted([*source_folder.glob("*.cuh"), *source_folder.glob("*.h")]):
        digest.update(path.read_bytes())
    return f"// {digest.hexdigest()}\n" + (source_folder / file).read_text(encoding="utf-8")
