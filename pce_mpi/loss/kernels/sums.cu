// Sums over rows, and their values. Launched by cuda.py.
#include <groups.cuh>

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

__global__ void __launch_bounds__(BLOCK_THREADS) fill_values(const Sum* sums, int64_t count, double* values) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i < count) values[i] = number_of(sums[i]);
}

}  // namespace pce
