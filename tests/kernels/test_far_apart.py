"""Elements and classes beyond 2**31: what counts them, and the distance between them, has 64 bits."""

import mmap

import numpy as np

from cuda_on_host.module import RawModule
from kernels.comparing import (
    Problem,
    assert_equal,
    assert_states,
    expected_gradient,
    on_device,
    rows_of,
    states_on_device,
    write_gradient,
)
from pce_mpi.kernels import compilation
from pce_mpi.kernels.compilation import LaunchConfig
from pce_mpi.kernels.interface import StateFields


def test_rows_beyond_2_to_31_elements(stand_in, cuda):
    # Rows 2**31 + 24 elements apart, in memory of which only what is touched exists.
    pitch, classes = 2**31 + 24, 100
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 2 * (2 * pitch + classes), flags), np.float16)
    strided = np.lib.stride_tricks.as_strided(memory, (3, classes, 1), (2 * pitch, 2, 2))
    logits = np.random.default_rng(15).normal(0, 3, (3, classes)).astype(np.float16)
    for fields in (StateFields(), StateFields(held_weight=True, weighted_logit=True)):
        strided[:, :, 0] = logits
        problem = Problem(logits, np.array([0, 99, 50]), fields)
        rows = rows_of(problem, 0)
        assert_states(states_on_device(cuda, problem, strided), problem)
        write_gradient(cuda, problem, rows, strided, strided)
        assert_equal(strided[:, :, 0], expected_gradient(problem, rows, logits.dtype))


TILES = """
#include <storage.cuh>
__global__ void tiles(int64_t rows, int64_t classes, int chunk, int group_size, int64_t column, int64_t* found) {
  const pce::RowTile tile(rows, classes, chunk, group_size);
  int64_t* to = found + 4 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  to[0] = tile.row;
  to[1] = tile.first_class;
  to[2] = tile.count;
  to[3] = tile.local_index(column);
}
"""


def test_classes_beyond_2_to_31_have_tile(stand_in):
    classes, column = 5 * 2**30 + 7, 4 * 2**30 + 5
    config = LaunchConfig.with_splits(1, classes, 2, 1)
    assert (config.splits, config.group_size, config.block_threads) == (6, 256, 256)
    found = np.zeros((config.splits, config.block_threads, 4), np.int64)
    tiles = RawModule(code=TILES, options=compilation.OPTIONS, name_expressions=["tiles"]).get_function("tiles")
    numbers = np.int64(1), np.int64(classes), np.int32(config.chunk), np.int32(config.group_size), np.int64(column)
    tiles((1, config.splits, 1), (config.block_threads, 1, 1), (*numbers, on_device(found)))
    assert (found[:, :, 0] == 0).all()
    assert found[:, 0, 1].tolist() == [split * config.chunk for split in range(config.splits)]
    assert found[:, 0, 2].sum() == classes
    local = [column % config.chunk if split == column // config.chunk else -1 for split in range(config.splits)]
    assert found[:, 0, 3].tolist() == local
