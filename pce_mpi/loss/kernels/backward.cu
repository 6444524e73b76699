// Backward without options, in float32: each logit is read once, each gradient is written once. Launched by cuda.py.
#include <row_gradient.cuh>

// dx_c = factor exp(scale (x_c - max)). The column held apart gets `held_gradient`, and rows that are not valid get 0.
// `out` may be the logits; otherwise its rows have the same alignment as theirs.
template <typename T>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    write_gradient(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int group_size, T* out,
                   int64 out_pitch, const double* max, const double* factor, const int64* held_column,
                   const double* held_gradient, const bool* valid, double scale) {
  const RowTile tile(rows, classes, chunk, group_size);
  if (tile.row >= rows) return;
  const T* row = logits + tile.row * pitch + tile.first_class;
  T* to = out + tile.row * out_pitch + tile.first_class;
  const VectorizedSpan<T> span(row, tile.count);
  RowGradient<ShortExponential<T>, float> gradient(max[tile.row], scale);
  gradient.factor = nearest_float(gradient.rescaled(factor[tile.row], max[tile.row], scale));
  const int held = tile.local_index(held_column[tile.row]);
  const float held_dx = nearest_float(held_gradient[tile.row]);
  const bool is_valid = valid[tile.row];

  for (int start = tile.thread_rank; start < span.vectors; start += LOADS * group_size) {
    Vector v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (start + i * group_size < span.vectors) v[i] = load_streaming(row + span.vector_start(start + i * group_size));
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (start + i * group_size >= span.vectors) break;
      const int at = span.vector_start(start + i * group_size);
      const Vector dx = gradient_of<T>(v[i], gradient, static_cast<unsigned>(held - at), held_dx);
      store_streaming(to + at, is_valid ? dx : Vector{0, 0, 0, 0});
    }
  }
  for (int i = tile.thread_rank; i < span.scalars; i += group_size) {
    const int at = span.scalar_index(i);
    const float dx = at == held ? held_dx : gradient(widen(row[at]));
    to[at] = narrow<T>(is_valid ? dx : 0.0f);
  }
}
