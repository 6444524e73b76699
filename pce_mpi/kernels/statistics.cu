// Statistics of rows, and the rows of their gradients, from merged states: a thread for each row. Launched by cuda.py.
#include <losses.h>
#include <softmax_of_row.cuh>

namespace pce {

// `valid` is null if all rows count. `statistics` has one row for each member of `RowStatistics`.
template <class Precision>
__global__ void __launch_bounds__(BLOCK_THREADS, ROW_RESIDENT_THREADS / BLOCK_THREADS)
    fill_row_statistics(const uint64_t* states, int64_t rows, double scale, double softcap, int fields,
                        const uint64_t* class_weights, const bool* valid, void* statistics, int dtype,
                        int64_t* argmax) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  const RowSoftmax softmax = softmax_of_row<Precision>(states, row, {fields, {scale, softcap}}, class_weights);
  const RowStatistics found = RowStatistics::of(softmax, valid == nullptr || valid[row]);
  set_element(statistics, dtype, row, found.max);
  set_element(statistics, dtype, rows + row, found.sum_exp);
  set_element(statistics, dtype, 2 * rows + row, found.logsumexp);
  set_element(statistics, dtype, 3 * rows + row, found.log_prob);
  set_element(statistics, dtype, 4 * rows + row, found.entropy);
  argmax[row] = softmax.argmax;
}

// `columns` is null without targets; each upstream gradient is that of `Upstream`.
template <class Precision>
__global__ void __launch_bounds__(BLOCK_THREADS, ROW_RESIDENT_THREADS / BLOCK_THREADS)
    fill_statistics_gradients(const uint64_t* states, int64_t rows, double scale, double softcap, int fields,
                              const uint64_t* class_weights, const bool* valid, const int64_t* columns,
                              int64_t class_start, int64_t classes, const void* log_prob, int log_prob_dtype,
                              int log_prob_for_each_row, double log_prob_number, const void* entropy,
                              int entropy_dtype, int entropy_for_each_row, double entropy_number,
                              const void* logsumexp, int logsumexp_dtype, int logsumexp_for_each_row,
                              double logsumexp_number, RowGradient* gradients) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  const RowSoftmax softmax = softmax_of_row<Precision>(states, row, {fields, {scale, softcap}}, class_weights);
  const Upstream of_log_prob{log_prob, log_prob_dtype, log_prob_for_each_row, log_prob_number};
  const Upstream of_entropy{entropy, entropy_dtype, entropy_for_each_row, entropy_number};
  const Upstream of_logsumexp{logsumexp, logsumexp_dtype, logsumexp_for_each_row, logsumexp_number};
  const double counted = valid == nullptr || valid[row] ? of_log_prob[row] : 0.0;
  gradients[row] = statistics_gradient_row(softmax, columns == nullptr ? -1 : columns[row], columns != nullptr,
                                           class_start, classes, scale, counted, of_entropy[row], of_logsumexp[row]);
}

}  // namespace pce
