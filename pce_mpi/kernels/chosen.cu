// Chosen elements of an array of any strides, and the large elements of rows. Launched by cuda.py.
#include <groups.cuh>

namespace pce {

// The place of an element that an array does not have.
constexpr int64_t NOWHERE = static_cast<int64_t>(uint64_t(1) << 63);

// The bits of the elements at `places`, in elements from the first one, and `other` for those that `x` does not have.
template <typename Word>
__global__ void __launch_bounds__(BLOCK_THREADS)
    take_elements(const Word* x, const int64_t* places, int64_t count, uint64_t other, Word* taken) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i < count) taken[i] = places[i] == NOWHERE ? static_cast<Word>(other) : x[places[i]];
}

template <typename Word>
__global__ void __launch_bounds__(BLOCK_THREADS)
    put_elements(Word* x, const int64_t* places, int64_t count, const Word* values) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i < count && places[i] != NOWHERE) x[places[i]] = values[i];
}

// Each row of `x`, of consecutive elements, with -inf in place of those below its value; and how many are not, a nan among
// them. A block has one row.
__global__ void __launch_bounds__(BLOCK_THREADS) keep_at_least(const void* x, int dtype, int64_t pitch, int64_t classes,
                                                               const double* least, void* kept, int64_t* counts) {
  const int64_t row = blockIdx.x;
  const double value = least[row];
  int64_t count = 0;
  for (int64_t i = threadIdx.x; i < classes; i += BLOCK_THREADS) {
    const double found = element(x, dtype, row * pitch + i);
    set_element(kept, dtype, row * classes + i, found < value ? -infinity() : found);
    count += !(found < value);
  }
  count = reduce(count, BLOCK_THREADS, [](int64_t a, int64_t b) { return a + b; });
  if (threadIdx.x == 0) counts[row] = count;
}

}  // namespace pce
