// Merges the states of each row's splits, (rows, splits, words), to one: a warp for each row. Launched by cuda.py.
#include <groups.cuh>

namespace pce {

// A thread has a second state besides its own: that of the split that it merges next.
static_assert(2 * MERGE_BLOCK_THREADS <= BLOCK_THREADS, "shared memory has two states for each thread");

template <class Precision>
__global__ void __launch_bounds__(MERGE_BLOCK_THREADS, ROW_RESIDENT_THREADS / MERGE_BLOCK_THREADS)
    merge_states(const uint64_t* split_states, int64_t rows, int splits, double scale, double softcap, int fields,
                 uint64_t* states) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (MERGE_BLOCK_THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE, words = words_of(fields);
  const Call call = {fields, {scale, softcap}};
  State* own = thread_state();
  *own = State::identity();
#pragma unroll 1
  for (int split = lane; row < rows && split < splits; split += WARP_SIZE) {
    State& other = own[MERGE_BLOCK_THREADS];
    other = State::load<Precision>(split_states + (row * splits + split) * words, call);
    merge<Precision>(*own, other, call);
  }
  merge_group<Precision>(WARP_SIZE, call);
  if (row < rows && lane == 0) own->template store<Precision>(states + row * words, call);
}

}  // namespace pce
