// The numbers that follow from the merged state of a row: a thread for each row. Launched by cuda.py.
#include <softmax_of_row.cuh>

namespace pce {

template <class Precision>
__global__ void __launch_bounds__(BLOCK_THREADS, ROW_RESIDENT_THREADS / BLOCK_THREADS)
    fill_row_softmax(const uint64_t* states, int64_t rows, double scale, double softcap, int fields,
                     const uint64_t* class_weights, double m1, double m2, double m3, RowSoftmax* softmax) {
  const int64_t row = row_of_thread();
  const Call call = {fields, {scale, softcap, m1, m2, m3}};
  if (row < rows) softmax[row] = softmax_of_row<Precision>(states, row, call, class_weights);
}

}  // namespace pce
