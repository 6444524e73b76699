// Backward with every option, in float32 or float64 and into any dtype. Launched by cuda.py.
#include <groups.cuh>
#include <weights.cuh>

namespace pce {

// dx_c = factor exp(z_c) - weight_factor u_c, or that of statistics, times the slope of the softcap; classes held get
// `held_gradient` in place of the difference. Rows that are not valid get 0; where `valid` is negative nothing is written.
// `out` may be the logits.
template <typename T, typename Precision>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    write_general_gradient(const T* logits, int64_t pitch, int64_t rows, int64_t classes, int chunk, int group_size,
                           void* out, int64_t out_pitch, const RowGradient* gradients, double scale, int fields,
                           int out_dtype, double softcap, const double* weight, const void* probabilities,
                           int probability_dtype, int64_t probability_pitch, double keep, double spread) {
  const RowTile tile(rows, classes, chunk, group_size);
  if (tile.row >= rows) return;
  const T* row = logits + tile.row * pitch + tile.first_class;
  const int64_t to = tile.row * out_pitch + tile.first_class;
  const ClassWeights weights{weight == nullptr ? nullptr : weight + tile.first_class, probabilities, probability_dtype,
                             tile.row * probability_pitch + tile.first_class, keep, spread};
  const Call call = {fields, {scale, softcap}};
  const RowGradient& gradient = gradients[tile.row];
  if (gradient.valid < 0) return;
  const RowFactor factor = RowFactor::of(gradient, call.transform);
  const int held = tile.local_index(gradient.column);
  const int target = (fields & ENTROPY) != 0 ? tile.local_index(gradient.target) : -1;

#pragma unroll 1
  for (int at = tile.thread_rank; at < tile.count; at += group_size) {
    double dx = 0.0;
    if (gradient.valid != 0) {
      const double x = number_of(row[at]), u = weights[at];
      const bool is_held = probabilities == nullptr ? at == held : x == gradient.held && u == gradient.held_weight;
      if (is_held) {
        typename Precision::Number value;
        assign(value, gradient.held_gradient * (softcap != 0.0 ? softcap_slope(x, call.transform) : 1.0));
        dx = number_of(value);
      } else {
        dx = number_of(gradient_of<Precision>(x, u, factor, call, at == target ? gradient.target_gradient : 0.0));
      }
    }
    set_element(out, out_dtype, to + at, dx);
  }
}

}  // namespace pce
