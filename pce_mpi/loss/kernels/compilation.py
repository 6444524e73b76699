"""Sources and options for the CUDA compiler, and the names of all kernels; needs neither CuPy nor a GPU."""

from __future__ import annotations

from functools import cache
import hashlib
from pathlib import Path
from typing import NamedTuple

from pce_mpi.loss.kernels.launch_config import (
    BLOCK_THREADS,
    CLUSTER_CAPABILITY,
    CLUSTER_SIZES,
    FUSED_BLOCK_THREADS,
    FUSED_VECTORS,
    LOADS,
    MERGE_BLOCK_THREADS,
    RESIDENT_THREADS,
    VECTOR_BYTES,
    WARP_SIZE,
)
from pce_mpi.loss.softmax_state import NO_CLASS

source_folder = Path(__file__).parent

#: the C++ type of each dtype of logits
CPP_TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
#: `DType` in constants.cuh
DTYPE_CODES = {name: code for code, name in enumerate(CPP_TYPES)}
_FIELDS = (
    "held",
    "max",
    "sum_exp",
    "scale",
    "target",
    "held_weight",
    "weight",
    "weighted_gap",
    "exp_gap",
    "argmax",
)
#: `Field` in constants.cuh
FIELD_BITS = {name: 1 << index for index, name in enumerate(_FIELDS)}

# Macros without their prefix PCE_. Python has the only copy of these constants.
_DEFINES = {
    "WARP_SIZE": WARP_SIZE,
    "VECTOR_BYTES": VECTOR_BYTES,
    "RESIDENT_THREADS": RESIDENT_THREADS,
    "BLOCK_THREADS": BLOCK_THREADS,
    "LOADS": LOADS,
    "MERGE_BLOCK_THREADS": MERGE_BLOCK_THREADS,
    "FUSED_BLOCK_THREADS": FUSED_BLOCK_THREADS,
    **{f"FUSED_VECTORS_OF_{size}_BYTES": vectors for size, vectors in FUSED_VECTORS.items()},
    "MAX_CLUSTER_SIZE": CLUSTER_SIZES[-1],
    "CLUSTER_CAPABILITY": CLUSTER_CAPABILITY,
    "NO_CLASS": NO_CLASS,
    **{f"DTYPE_{name.upper()}": code for name, code in DTYPE_CODES.items()},
    **{f"FIELD_{name.upper()}": bit for name, bit in FIELD_BITS.items()},
}

#: for NVRTC and nvcc; -fmad=false, as the source says which multiply-adds are fused, so that all compilers round alike
OPTIONS = (
    "-std=c++17",
    "-fmad=false",
    *(f"-DPCE_{name}={value}" for name, value in _DEFINES.items()),
    f"-I{source_folder}",
)


class Kernel(NamedTuple):
    """A kernel: its file, its name as a C++ expression, and the least compute capability that it needs."""

    file: str
    name: str
    capability: int = 80


def instantiations() -> list[Kernel]:
    """Return every kernel that can be launched."""
    types = list(CPP_TYPES.values())
    general = [(t, a) for t in types for a in ("float", "double") if (t, a) != ("double", "float")]
    return [
        *(Kernel("forward.cu", f"fill_states<{t}>") for t in types[:3]),
        *(Kernel("general_forward.cu", f"fill_general_states<{t}, {a}>") for t, a in general),
        Kernel("merge.cu", "merge_states"),
        *(Kernel("backward.cu", f"write_gradient<{t}>") for t in types[:3]),
        *(Kernel("general_backward.cu", f"write_general_gradient<{t}, {a}>") for t, a in general),
        *(fused_kernel(t, blocks) for t in types[:3] for blocks in CLUSTER_SIZES),
    ]


def fused_kernel(cpp_type: str, blocks: int) -> Kernel:
    """Return the fused kernel for rows of which each is shared by `blocks` blocks."""
    capability = CLUSTER_CAPABILITY if blocks > 1 else 80
    return Kernel("fused.cu", f"fill_states_and_write_gradient<{cpp_type}, {blocks}>", capability)


@cache
def source_of(file: str) -> str:
    """Return the source of a .cu file with a digest of the headers, as this text is the key of CuPy's cache."""
    digest = hashlib.sha256()
    for path in sorted(source_folder.glob("*.cuh")):
        digest.update(path.read_bytes())
    return f"// {digest.hexdigest()}\n" + (source_folder / file).read_text(encoding="utf-8")
