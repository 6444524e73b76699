// The numbers that follow from the merged state of a row: a thread for each row. Launched by cuda.py.
#include <groups.cuh>

namespace pce {

// `class_weights`, the words of one sum, may be null.
template <class Arithmetic>
__global__ void __launch_bounds__(BLOCK_THREADS, GENERAL_RESIDENT_THREADS / BLOCK_THREADS)
    fill_row_softmax(const uint64_t* states, int64_t rows, double scale, double softcap, int fields,
                     const uint64_t* class_weights, RowSoftmax* softmax) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row >= rows) return;
  const Call call = {fields, {scale, softcap}};
  Sum weights = {NO_GRID, {0, 0, 0}};
  if (class_weights != nullptr) weights = *reinterpret_cast<const Sum*>(class_weights);
  const State state = State::load<Arithmetic>(states + row * words_of(fields), call);
  softmax[row] = RowSoftmax::of<Arithmetic>(state, call, weights);
}

}  // namespace pce
