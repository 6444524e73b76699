// Sums over rows, and the loss that they make. Launched by cuda.py.
#include <groups.cuh>
#include <losses.h>

namespace pce {

__device__ __forceinline__ void add_item(Sum& sum, double number) { add_number(sum, number); }
__device__ __forceinline__ void add_item(Sum& sum, const Sum& other) { add_numbers(sum, other); }

// The sum of every `step`-th item, numbers or sums of numbers, from `first` on; all threads of a block get the sum of
// the block.
template <class Item>
__device__ __forceinline__ Sum sum_of_block(const Item* items, int64_t count, int64_t first, int64_t step) {
  Sum sum = {NO_GRID, {0, 0, 0}};
#pragma unroll 1
  for (int64_t i = first; i < count; i += step) add_item(sum, items[i]);
  // Grids of sums that are not finite are kinds: two different ones make a nan.
  const int64_t least = reduce(sum.grid >= INFINITE ? sum.grid : NOT_A_NUMBER + 1, BLOCK_THREADS,
                               [](int64_t a, int64_t b) { return a < b ? a : b; });
  reduce_sums(sum, BLOCK_THREADS);
  if (sum.grid >= INFINITE && least != sum.grid) sum.grid = NOT_A_NUMBER;
  return sum;
}

// `items` is (arrays, count), `sums` (arrays, blocks); the grid is (blocks, arrays).
template <class Item>
__global__ void __launch_bounds__(BLOCK_THREADS) sum_items(const Item* items, int64_t count, Sum* sums) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * BLOCK_THREADS;
  const Sum sum = sum_of_block(items + static_cast<int64_t>(blockIdx.y) * count, count, first, step);
  if (threadIdx.x == 0) sums[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// `items` is (2, count), of losses and of weights; by one block.
template <class Item>
__global__ void __launch_bounds__(BLOCK_THREADS)
    fill_loss(const Item* items, int64_t count, bool mean, void* loss, int dtype, double* divisor) {
  const Sum sums[2] = {sum_of_block(items, count, threadIdx.x, BLOCK_THREADS),
                       sum_of_block(items + count, count, threadIdx.x, BLOCK_THREADS)};
  if (threadIdx.x != 0) return;
  const Loss found = Loss::of(sums, mean);
  set_element(loss, dtype, 0, found.value);
  *divisor = found.divisor;
}

}  // namespace pce
