// The gradient of the logits from merged records, in float32 arithmetic: each logit read once, each entry written once,
// in place if asked. Launched by cuda.py.
#include <row_gradient.cuh>

constexpr int THREADS = 256, LOADS = 4;

// dx_c = factor exp(scale (x_c - max)), `held_gradient` at the column held apart, 0 in rows that are not valid. `out`
// may be the logits; its rows lie as theirs do relative to multiples of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    write_gradient(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int lanes, T* out,
                   int64 out_pitch, const double* max, const double* factor, const int64* held_column,
                   const double* held_gradient, const bool* valid, double scale) {
  const Place place(rows, classes, chunk, lanes);
  if (place.row >= rows) return;
  const T* row = logits + place.row * pitch + place.first;
  T* to = out + place.row * out_pitch + place.first;
  const Stretch<T> stretch(row, place.count);
  RowGradient<ShortExponential<T>, float> gradient(max[place.row], scale);
  gradient.factor = nearest_float(gradient.relative(factor[place.row], max[place.row], scale));
  const int held = place.relative(held_column[place.row]);
  const float at_held = nearest_float(held_gradient[place.row]);
  const bool counts = valid[place.row];

  for (int start = place.lane; start < stretch.body; start += LOADS * lanes) {
    Vector v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (start + i * lanes < stretch.body) v[i] = load_streaming(row + stretch.vector_at(start + i * lanes));
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (start + i * lanes >= stretch.body) break;
      const int at = stretch.vector_at(start + i * lanes);
      const Vector dx = gradient_of<T>(v[i], gradient, static_cast<unsigned>(held - at), at_held);
      store_streaming(to + at, counts ? dx : Vector{0, 0, 0, 0});
    }
  }
  for (int i = place.lane; i < stretch.edges; i += lanes) {
    const int at = stretch.edge_at(i);
    const float dx = at == held ? at_held : gradient(number(row[at]));
    to[at] = rounded<T>(counts ? dx : 0.0f);
  }
}
