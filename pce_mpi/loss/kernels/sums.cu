// Sums over rows, and the loss that they make. Launched by cuda.py.
#include <groups.cuh>
#include <losses.h>

namespace pce {

// The sum of all values, by one block.
__global__ void __launch_bounds__(BLOCK_THREADS) sum_values(const double* values, int64_t count, Sum* total) {
  Sum sum = {NO_GRID, {0, 0, 0}};
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count; i += BLOCK_THREADS) add_number(sum, values[i]);
  // Grids of sums that are not finite are kinds: two different ones make a nan.
  const int64_t least = reduce(sum.grid >= INFINITE ? sum.grid : NOT_A_NUMBER + 1, BLOCK_THREADS,
                               [](int64_t a, int64_t b) { return a < b ? a : b; });
  reduce_sums(sum, BLOCK_THREADS);
  if (sum.grid >= INFINITE && least != sum.grid) sum.grid = NOT_A_NUMBER;
  if (threadIdx.x == 0) *total = sum;
}

__global__ void __launch_bounds__(WARP_SIZE) fill_loss(const Sum* sums, bool mean, Loss* loss) {
  if (threadIdx.x == 0) *loss = Loss::of(sums, mean);
}

}  // namespace pce
