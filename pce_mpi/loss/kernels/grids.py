"""How the threads of a GPU are spread over rows of logits: `Grid` for two passes, and clusters of blocks for one."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CLUSTERS", "VECTOR", "Grid", "blocks_of_cluster", "threads_of_block"]

#: bytes that a thread reads or writes at once
VECTOR = 16
# Vectors that a thread asks for before it needs the first: LOADS in forward.cu and backward.cu.
_LOADS = 4
# Threads for a row of up to so many classes: what softmax kernels elsewhere take.
_LANES = [(64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128)]
_MOST_LANES = 256
# Rows are cut into parts until there are four blocks for each multiprocessor of an H200, of 16 KiB or more.
_BLOCKS = 4 * 132
_LEAST_PART = 2**14
_LONGEST_PART = 2**30  # classes that the kernels count with 32 bits
_MOST_PARTS = 65535  # what a grid's second dimension may be

#: the blocks that a row may be spread over in the fused kernel
CLUSTERS = (1, 2, 4, 8)
# THREADS and VECTORS in fused.cu, the latter by the size of a logit.
_FUSED_THREADS = 512
_FUSED_VECTORS = {2: 4, 4: 6}


class Grid(NamedTuple):
    """`lanes` threads for each of the `parts` of a row, of `chunk` classes; `blocks` of `threads` for a part of all."""

    lanes: int
    threads: int
    chunk: int
    parts: int
    blocks: int

    @classmethod
    def of(cls, rows: int, classes: int, size: int, parts: int) -> Grid:
        """For logits of `size` bytes, each row in so many parts, or more where those would be too long."""
        width = VECTOR // size
        parts = max(parts, -(-classes // _LONGEST_PART))
        chunk = -(-classes // (parts * width)) * width
        lanes = next((lanes for most, lanes in _LANES if chunk <= most), _MOST_LANES)
        threads = max(128, lanes)
        return cls(lanes, threads, chunk, -(-classes // chunk), -(-rows // (threads // lanes)))

    @classmethod
    def reading(cls, rows: int, classes: int, size: int) -> Grid:
        """For the records: a row is one part, unless rows are few."""
        return cls.of(rows, classes, size, max(1, min(-(-_BLOCKS // rows), classes * size // _LEAST_PART)))

    @classmethod
    def writing(cls, rows: int, classes: int, size: int) -> Grid:
        """For the gradient: each thread goes twice round its loads."""
        part = _MOST_LANES * (VECTOR // size) * _LOADS * 2
        return cls.of(rows, classes, size, min(_MOST_PARTS, -(-classes // part)))


def blocks_of_cluster(classes: int, size: int) -> int:
    """How many blocks keep a row on the chip: a power of two, and more than `CLUSTERS` has if it does not fit."""
    vectors = -(-classes * size // VECTOR)
    blocks = -(-vectors // (_FUSED_THREADS * _FUSED_VECTORS[size]))
    return 1 << (blocks - 1).bit_length()


def threads_of_block(classes: int, size: int, blocks: int) -> int:
    """The threads of each of the blocks that keep a row: whole warps, and no more than the row needs."""
    of_a_warp = 32 * _FUSED_VECTORS[size] * (VECTOR // size)
    return 32 * -(-classes // (of_a_warp * blocks))
