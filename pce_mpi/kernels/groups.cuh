// Reductions over a group of threads, and the states of the threads of a block.
#pragma once
#include <storage.cuh>

namespace pce {

template <typename V>
struct WarpValues {
  V value[WARP_SIZE];  // a block has at most as many warps as a warp has threads
};

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
  return bit_cast<float>(::shuffle_xor(bit_cast<unsigned>(value), lane_mask));
}

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t value, int lane_mask) {
  const auto low = ::shuffle_xor(static_cast<unsigned>(value), lane_mask);
  const auto high = ::shuffle_xor(static_cast<unsigned>(value >> 32), lane_mask);
  return static_cast<uint64_t>(high) << 32 | low;
}

__device__ __forceinline__ int64_t shuffle_xor(int64_t value, int lane_mask) {
  return static_cast<int64_t>(shuffle_xor(static_cast<uint64_t>(value), lane_mask));
}

// Reduce the values of a group of threads with `op`. The size of a group is a power of two up to a warp, or any number
// of whole warps. Every thread of the group gets the result. Every thread of the block must call.
template <typename V, typename Op>
__device__ __forceinline__ V reduce(V value, int group_size, Op op) {
  for (int mask = 1; mask < (group_size < WARP_SIZE ? group_size : WARP_SIZE); mask *= 2)
    value = op(value, shuffle_xor(value, mask));
  if (group_size <= WARP_SIZE) return value;
  V* warp_values = shared_memory<WarpValues<V>>().value;
  const int thread = static_cast<int>(threadIdx.x), warps = group_size / WARP_SIZE;
  const int first = thread / group_size * warps;
  if (thread % WARP_SIZE == 0) warp_values[thread / WARP_SIZE] = value;
  __syncthreads();
  value = warp_values[first];
  for (int i = 1; i < warps; ++i) value = op(value, warp_values[first + i]);
  __syncthreads();
  return value;
}

// Reduce the sums of a group of threads to one, on the coarsest of their grids.
__device__ __forceinline__ void reduce_sums(Sum& sum, int group_size) {
  sum.raise(reduce(sum.grid, group_size, [](int64_t a, int64_t b) { return a > b ? a : b; }));
#pragma unroll
  for (int j = 0; j < 3; ++j)
    sum.limbs[j] = reduce(sum.limbs[j], group_size, [](uint64_t a, uint64_t b) { return a + b; });
}

// One state for each thread, in shared memory: two in registers would spill.
struct BlockStates {
  State state[BLOCK_THREADS];
};

__device__ __forceinline__ State* thread_state() { return shared_memory<BlockStates>().state + threadIdx.x; }

// Merge the states of a group of `group_size` threads, a power of two, into that of its first thread. Every thread of
// the block must call.
template <class Precision>
__device__ __forceinline__ void merge_group(int group_size, const Call& call) {
  State* own = thread_state();
  const int thread_rank = static_cast<int>(threadIdx.x) % group_size;
  __syncthreads();
#pragma unroll 1
  for (int step = group_size / 2; step > 0; step /= 2) {
    if (thread_rank < step) merge<Precision>(*own, own[step], call);
    __syncthreads();
  }
}

}  // namespace pce
