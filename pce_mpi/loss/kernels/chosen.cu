// Elements of chosen columns, and those that are large enough, of rows of any strides. Launched by cuda.py.
#include <groups.cuh>

namespace pce {

// An array (outer, classes, inner), its strides in elements; its rows are the pairs (outer, inner).
struct Strided {
  int64_t classes, inner, outer_stride, class_stride, inner_stride;

  __device__ __forceinline__ int64_t place(int64_t row, int64_t column) const {
    return row / inner * outer_stride + column * class_stride + row % inner * inner_stride;
  }
};

// The bits of the elements in `columns`, (rows, chosen), and `other` where a row has no such column.
template <typename Word>
__global__ void __launch_bounds__(BLOCK_THREADS)
    take_columns(const Word* x, int64_t classes, int64_t inner, int64_t outer_stride, int64_t class_stride,
                 int64_t inner_stride, const int64_t* columns, int64_t count, int64_t chosen, uint64_t other, Word* taken) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i >= count) return;
  const Strided rows = {classes, inner, outer_stride, class_stride, inner_stride};
  const int64_t column = columns[i];
  taken[i] = column >= 0 && column < classes ? x[rows.place(i / chosen, column)] : static_cast<Word>(other);
}

// Put `values`, (rows, chosen), into `columns` of each row, where it has them.
template <typename Word>
__global__ void __launch_bounds__(BLOCK_THREADS)
    put_columns(Word* x, int64_t classes, int64_t inner, int64_t outer_stride, int64_t class_stride, int64_t inner_stride,
                const int64_t* columns, int64_t count, int64_t chosen, const Word* values) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i >= count) return;
  const Strided rows = {classes, inner, outer_stride, class_stride, inner_stride};
  const int64_t column = columns[i];
  if (column >= 0 && column < classes) x[rows.place(i / chosen, column)] = values[i];
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
