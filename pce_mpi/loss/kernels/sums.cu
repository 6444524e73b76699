// Sums over rows, and their values. Launched by cuda.py.
#include <groups.cuh>

namespace pce {

// The sum of all values, by one block.
__global__ void __launch_bounds__(BLOCK_THREADS) sum_values(const double* values, int64_t count, Sum* total) {
  Sum sum = {NO_GRID, {0, 0, 0}};
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count; i += BLOCK_THREADS) add_wide(sum, values + i, 1, 0);
  reduce_sums(sum, BLOCK_THREADS);
  if (threadIdx.x == 0) *total = sum;
}

__global__ void __launch_bounds__(BLOCK_THREADS) fill_values(const Sum* sums, int64_t count, double* values) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i < count) values[i] = value_of_wide(sums[i]).high;
}

}  // namespace pce
