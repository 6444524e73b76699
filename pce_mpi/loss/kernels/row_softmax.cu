// The numbers that follow from the merged state of a row: a thread for each row. Launched by cuda.py.
#include <softmax_of_row.cuh>

namespace pce {

template <class Arithmetic>
__global__ void __launch_bounds__(BLOCK_THREADS, GENERAL_RESIDENT_THREADS / BLOCK_THREADS)
    fill_row_softmax(const uint64_t* states, int64_t rows, double scale, double softcap, int fields,
                     const uint64_t* class_weights, RowSoftmax* softmax) {
  const int64_t row = row_of_thread();
  if (row < rows) softmax[row] = softmax_of_row<Arithmetic>(states, row, {fields, {scale, softcap}}, class_weights);
}

}  // namespace pce
