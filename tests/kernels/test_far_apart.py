"""Elements and classes beyond 2**31: what counts them, and the distance between them, has 64 bits."""

import mmap

import numpy as np

from cuda_on_host.module import RawModule
from kernels.comparing import (
    assert_gradient,
    assert_records,
    draw,
    expected_gradient,
    expected_records,
    fused,
    on_device,
    options_of,
    records_of,
    row_gradient,
    write_gradient,
)
from pce_mpi.loss.kernels.grids import Grid
from pce_mpi.loss.records import Layout


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
