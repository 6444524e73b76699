// Backward with every option, in float32 or float64 and into any dtype. Launched by cuda.py.
#include <row_gradient.cuh>
#include <weights.cuh>

// dx_c = factor exp(scale (z_c - max)) - weight_factor u_c, or without the last term if `weight_factor` is null; the
// column held apart gets `held_gradient`. Under a softcap all are multiplied by sech(slope x_c)**2. Rows that are not
// valid get 0. `out` may be the logits.
template <typename T, typename A>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    write_general_gradient(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int group_size,
                           void* out, int64 out_pitch, const double* max, const double* factor,
                           const int64* held_column, const double* held_gradient, const bool* valid, double scale,
                           int out_dtype, const double* weight_factor, const double* weight, const void* probabilities,
                           int probability_dtype, int64 probability_pitch, double keep, double spread, double softcap,
                           double slope) {
  const RowTile tile(rows, classes, chunk, group_size);
  if (tile.row >= rows) return;
  const T* row = logits + tile.row * pitch + tile.first_class;
  const int64 to = tile.row * out_pitch + tile.first_class;
  const VectorizedSpan<T> span(row, tile.count);
  const RowGradient<Exponential<float, A>, A> gradient(max[tile.row], scale);
  const double row_factor = gradient.rescaled(factor[tile.row], max[tile.row], scale);
  const int held = tile.local_index(held_column[tile.row]);
  const bool is_valid = valid[tile.row];
  const ClassWeights weights{weight == nullptr ? nullptr : weight + tile.first_class, probabilities, probability_dtype,
                             tile.row * probability_pitch + tile.first_class, keep, spread};

  for (int i = tile.thread_rank; i < span.vectors + span.scalars; i += group_size) {
    const bool single = i >= span.vectors;
    int at = single ? span.scalar_index(i - span.vectors) : span.vector_start(i);
    Vector v = single ? vector_of(row[at]) : load_streaming(row + at);  // all of it, before any is overwritten
#pragma unroll 1
    for (const int end = at + (single ? 1 : Storage<T>::width); at < end; ++at) {
      const A x = static_cast<A>(widen(pop_front<T>(v)));
      // The slope first: computed later, it would need more registers.
      const double cap_factor = softcap == 0.0 ? 1.0 : cap_slope(x, slope);
      double dz = row_factor * static_cast<double>(gradient.exponential(capped(x, softcap, slope)));
      if (weight_factor != nullptr) dz -= weight_factor[tile.row] * weights[at];
      if (at == held) dz = held_gradient[tile.row];
      set_element(out, out_dtype, to + at, is_valid ? dz * cap_factor : 0.0);
    }
  }
}
