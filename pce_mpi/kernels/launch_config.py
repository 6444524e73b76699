"""Launch configurations: the sizes of thread blocks, and how a grid of them covers the rows of logits.

`compilation` hands the sizes that the kernels need over to `constants.cuh`.
"""

from __future__ import annotations

from typing import NamedTuple

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
    def for_forward(cls, rows: int, classes: int, size: int, *, multiprocessors: int) -> LaunchConfig:
        """Use one split, unless there are too few rows to fill a GPU with that number of multiprocessors."""
        splits = min(-(-_TARGET_BLOCKS * multiprocessors // rows), classes * size // _MIN_SPLIT_BYTES)
        # On an H200 groups of two warps took 0.82 of the time of larger ones at 32,000 classes, 0.96 at 131,072.
        fills = rows * _FEW_THREADS >= RESIDENT_THREADS * multiprocessors
        return cls.with_splits(rows, classes, size, max(1, splits), _FEW_THREADS if fills else BLOCK_THREADS)

    @classmethod
    def for_backward(cls, rows: int, classes: int, size: int) -> LaunchConfig:
        """Use splits of two rounds of loads for each thread; there may be many splits, as they need no merge."""
        chunk = BLOCK_THREADS * (VECTOR_BYTES // size) * LOADS * 2
        return cls.with_splits(rows, classes, size, min(_MAX_GRID_Y, -(-classes // chunk)))
