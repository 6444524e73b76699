// Losses of rows, and the rows of their gradients: a thread for each row. Launched by cuda.py.
#include <groups.cuh>
#include <losses.h>

namespace pce {

// `losses` has all losses, and then the weights of the rows.
__global__ void __launch_bounds__(BLOCK_THREADS)
    fill_row_losses(const RowSoftmax* softmax, int64_t rows, int fields, const bool* valid, double smoothing,
                    double share, double z_loss, double* losses) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row >= rows) return;
  const RowLoss loss = RowLoss::of(softmax[row], fields, valid[row], {smoothing, share, z_loss});
  losses[row] = loss.loss;
  losses[rows + row] = loss.weight;
}

// `columns` may be null; `upstream` has one number, or one `for_each_row`.
__global__ void __launch_bounds__(BLOCK_THREADS)
    fill_row_gradients(const RowSoftmax* softmax, int64_t rows, int fields, const bool* valid, const int64_t* columns,
                       const double* upstream, int for_each_row, const double* divisor, double scale,
                       double smoothing, double share, double z_loss, RowGradient* gradients) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (row >= rows) return;
  const double slope = scale * (valid[row] ? upstream[for_each_row ? row : 0] / *divisor : 0.0);
  gradients[row] = gradient_row(softmax[row], fields, valid[row], columns == nullptr ? -1 : columns[row], slope,
                                {smoothing, share, z_loss});
}

}  // namespace pce
