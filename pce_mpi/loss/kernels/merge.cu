// Merges the states of each row's splits, (rows, splits, fields), to one: a warp for each row. Launched by cuda.py.
#include <softmax_state.cuh>

// A thread has a second state beside its own, that of the split that it merges next.
static_assert(2 * MERGE_BLOCK_THREADS <= BLOCK_THREADS, "shared memory has two states for each thread");

__global__ void __launch_bounds__(MERGE_BLOCK_THREADS, RESIDENT_THREADS / MERGE_BLOCK_THREADS)
    merge_states(const double* split_states, int64 rows, int splits, double scale, unsigned fields,
                  double* states) {
  const int64 row = static_cast<int64>(blockIdx.x) * (MERGE_BLOCK_THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE;
  State* own = thread_state();
  *own = identity();
  for (int first = 0; first < splits; first += WARP_SIZE) {
    const int split = first + lane;
    State& other = own[MERGE_BLOCK_THREADS];
    other = row < rows && split < splits ? load(split_states + (row * splits + split) * num_fields(fields), fields)
                                         : identity();
    __syncwarp();  // or the compiler would keep both states in registers
    merge(*own, other, fields, scale);
  }
  merge_group(WARP_SIZE, fields, scale);
  if (row < rows && lane == 0) store(*own, states + row * num_fields(fields), fields, scale);
}
