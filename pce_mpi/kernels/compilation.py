"""Sources and options for the CUDA compiler, the names of all kernels, and launch configurations.

A launch configuration has the sizes of thread blocks, and how a grid of them covers the rows of logits. The sizes that
the kernels need reach `constants.cuh` by the options. This file needs neither CuPy nor a GPU.
"""

from __future__ import annotations

from functools import cache, lru_cache
import hashlib
from pathlib import Path
from typing import NamedTuple

from pce_mpi.kernels.interface import StateFields

WARP_SIZE = 32
#: bytes that one instruction loads or stores for one thread
VECTOR_BYTES = 16
#: threads that must fit on a multiprocessor at once: the compiler keeps each to 65,536 / 1,024 registers. With twice
#: the registers, and nothing spilled to memory, loops with options take 1.03 to 1.3 times as long on an H200.
RESIDENT_THREADS = 1024
#: for kernels that handle the state of a row in each thread: these need up to 128 registers
ROW_RESIDENT_THREADS = 512

#: the largest block of the forward and backward kernels
BLOCK_THREADS = 256
_MIN_BLOCK_THREADS = 128
#: vectors that a thread loads before it uses the first; their latencies overlap
LOADS = 4
# (classes, threads): the group of threads for a row of up to that many classes.
_GROUP_SIZES = [(64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128)]
# The largest group of the forward kernel where there are enough rows to fill a GPU with such groups.
_FEW_THREADS = 64
# Rows are split until the grid has four blocks for each multiprocessor, but not below 16 KiB a split.
_TARGET_BLOCKS = 4
_MIN_SPLIT_BYTES = 2**14
_MAX_SPLIT_CLASSES = 2**30  # in a split the kernels count classes with 32 bits
_MAX_GRID_Y = 65535

#: the block of the merge kernel, which has one warp for each row
MERGE_BLOCK_THREADS = 128
#: numbers that one block adds up; more are added up by several blocks first
VALUES_OF_BLOCK = 2048


class LaunchConfig(NamedTuple):
    """A grid of (`blocks`, `splits`) blocks of `block_threads` threads.

    Each row is divided into `splits` chunks of `chunk` classes. One group of `group_size` threads works on one chunk;
    the groups of a block work on different rows.
    """

    group_size: int
    block_threads: int
    chunk: int
    splits: int
    blocks: int

    @classmethod
    def with_splits(cls, rows: int, classes: int, size: int, splits: int, most: int = BLOCK_THREADS) -> LaunchConfig:
        """Configure for logits of `size` bytes and `splits` chunks a row, or more if these would be too long.

        A group has at most `most` threads.
        """
        width = VECTOR_BYTES // size
        splits = max(splits, -(-classes // _MAX_SPLIT_CLASSES))
        chunk = -(-classes // (splits * width)) * width
        group_size = min(most, next((threads for limit, threads in _GROUP_SIZES if chunk <= limit), BLOCK_THREADS))
        block_threads = max(_MIN_BLOCK_THREADS, group_size)
        return cls(group_size, block_threads, chunk, -(-classes // chunk), -(-rows // (block_threads // group_size)))

    @classmethod
    @lru_cache(maxsize=1024)
    def for_forward(cls, rows: int, classes: int, size: int, *, multiprocessors: int) -> LaunchConfig:
        """Use one split, unless there are too few rows to fill a GPU with that number of multiprocessors."""
        splits = min(-(-_TARGET_BLOCKS * multiprocessors // rows), classes * size // _MIN_SPLIT_BYTES)
        # On an H200 groups of two warps took 0.82 of the time of larger ones at 32,000 classes, 0.96 at 131,072.
        fills = rows * _FEW_THREADS >= RESIDENT_THREADS * multiprocessors
        return cls.with_splits(rows, classes, size, max(1, splits), _FEW_THREADS if fills else BLOCK_THREADS)

    @classmethod
    @lru_cache(maxsize=1024)
    def for_backward(cls, rows: int, classes: int, size: int) -> LaunchConfig:
        """Use splits of two rounds of loads for each thread; there may be many splits, as they need no merge."""
        chunk = BLOCK_THREADS * (VECTOR_BYTES // size) * LOADS * 2
        return cls.with_splits(rows, classes, size, min(_MAX_GRID_Y, -(-classes // chunk)))


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
        Kernel("targets.cu", "pce::fill_target_columns"),
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
