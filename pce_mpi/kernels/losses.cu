// Losses of rows, and the rows of their gradients, from merged states: a thread for each row. Launched by cuda.py.
#include <losses.h>
#include <softmax_of_row.cuh>

namespace pce {

// `valid` is null if all rows count. `losses` has all losses, and then the weights of the rows.
template <class Precision>
__global__ void __launch_bounds__(BLOCK_THREADS, ROW_RESIDENT_THREADS / BLOCK_THREADS)
    fill_row_losses(const uint64_t* states, int64_t rows, double scale, double softcap, int fields,
                    const uint64_t* class_weights, double m1, double m2, double m3, const bool* valid, double smoothing,
                    double share, double z_loss, double* losses) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  const Call call = {fields, {scale, softcap, m1, m2, m3}};
  const RowSoftmax softmax = softmax_of_row<Precision>(states, row, call, class_weights);
  const RowLoss loss = RowLoss::of(softmax, fields, valid == nullptr || valid[row], {smoothing, share, z_loss});
  losses[row] = loss.loss;
  losses[rows + row] = loss.weight;
}

// `columns` may be null, and so may `divisor`, which is then 1. If `wrong` is not null and 1, no row is to be written.
template <class Precision>
__global__ void __launch_bounds__(BLOCK_THREADS, ROW_RESIDENT_THREADS / BLOCK_THREADS)
    fill_row_gradients(const uint64_t* states, int64_t rows, double scale, double softcap, int fields,
                       const uint64_t* class_weights, double m1, double m2, double m3, const bool* valid,
                       double smoothing, double share, double z_loss, const int64_t* columns, const void* upstream,
                       int upstream_dtype, int for_each_row, double upstream_number, const double* divisor,
                       const int* wrong, RowGradient* gradients) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  const Call call = {fields, {scale, softcap, m1, m2, m3}};
  const RowSoftmax softmax = softmax_of_row<Precision>(states, row, call, class_weights);
  const bool counts = valid == nullptr || valid[row];
  const double given = Upstream{upstream, upstream_dtype, for_each_row, upstream_number}[row];
  const double slope = scale * (counts ? given / (divisor == nullptr ? 1.0 : *divisor) : 0.0);
  gradients[row] = gradient_row(softmax, fields, counts, columns == nullptr ? -1 : columns[row], slope,
                                {smoothing, share, z_loss});
  if (wrong != nullptr && *wrong != 0) gradients[row].valid = -1;
}

}  // namespace pce
