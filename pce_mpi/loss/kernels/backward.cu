// Backward without options, in float32: each logit is read once, each gradient is written once. Launched by cuda.py.
#include <groups.cuh>

namespace pce {

// factor exp(z) for logits none of which is larger than `most`.
template <bool SCALED>
class NearGradient {
  RowFactor row_;
  float scale_, lowest_;
  uint32_t shift_;  // an exponent n of the gradient is `bits(k)` in `of`, less it

 public:
  bool usable;

  __device__ __forceinline__ NearGradient(const RowFactor& row, double most, double scale)
      : row_(row), scale_(narrow(scale)), lowest_(narrow(-2048.0 / scale)) {
    const double z = scale * most;
    shift_ = static_cast<uint32_t>(MAGIC32_BITS - static_cast<int>(clip(row.exponent, -2700, 2700)));
    // The largest gradient is below 2^124, and a logit below -2,048 has none.
    usable = finite(row.factor) && row.factor != 0.0 && !row.huge && z <= 2047.0 && z >= -1848.0 &&
             row.exponent > -2700 && row.exponent < 2700 && z * LOG2E + static_cast<double>(row.exponent) < 122.0;
  }

  __device__ __forceinline__ float of(float x) const {
    const float v = maximum_or_nan(x, lowest_);
    float k = fma32(SCALED ? product32(v, scale_) : v, LOG2E32, MAGIC32);
    const int n = static_cast<int>(bits(k) - shift_), normal = n > -125 ? n : -125;
    const int rest = n - normal > -30 ? n - normal : -30;
    k = sum32(k, -MAGIC32);
    const float f = SCALED ? fma32(v, scale_, product32(k, -HI32)) : fma32(k, -HI32, v);
    const float t = polynomial(fma32(k, -LO32, f)), value = sum32(row_.high, fma32(row_.high, t, row_.low));
    // Powers of two are added to the exponent, but for the one that may leave a subnormal number.
    return product32(from_bits(bits(value) + (static_cast<uint32_t>(normal) << 23)),
                     from_bits(static_cast<uint32_t>(rest + 127) << 23));
  }
};

// dx_c = factor exp(z_c). The column held apart gets `held_gradient`, and rows that are not valid get 0. `out` may be
// the logits; otherwise its rows have the same alignment as theirs.
template <typename T, bool SCALED>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    write_gradient(const T* logits, int64_t pitch, int64_t rows, int64_t classes, int chunk, int group_size, T* out,
                   int64_t out_pitch, const RowGradient* gradients, double scale) {
  constexpr int WIDTH = Storage<T>::width;
  const RowTile tile(rows, classes, chunk, group_size);
  if (tile.row >= rows) return;
  const T* row = logits + tile.row * pitch + tile.first_class;
  T* to = out + tile.row * out_pitch + tile.first_class;
  const VectorizedSpan<T> span(row, tile.count);
  const RowGradient& gradient = gradients[tile.row];
  const Call call = {0, {scale, 0.0}};
  const RowFactor factor = RowFactor::of(gradient, call.transform);
  const NearGradient<SCALED> near(factor, gradient.most, scale);
  const bool is_valid = gradient.valid != 0, nought = !is_valid || factor.factor == 0.0;
  const int held = is_valid ? tile.local_index(gradient.column) : -1;
  const float held_dx = narrow(gradient.held_gradient);

  if (!nought && !near.usable) {
#pragma unroll 1
    for (int at = tile.thread_rank; at < tile.count; at += group_size)
      to[at] = narrowed<T>(at == held ? held_dx : gradient_of<Single>(number_of(row[at]), 1.0, factor, call));
    return;
  }
  for (int start = tile.thread_rank; start < span.vectors; start += LOADS * group_size) {
    Vector v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (start + i * group_size < span.vectors) v[i] = load_streaming(row + span.vector_start(start + i * group_size));
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (start + i * group_size >= span.vectors) break;
      const int at = span.vector_start(start + i * group_size);
      float x[WIDTH];
      unpack<T>(v[i], x);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) x[j] = nought ? 0.0f : near.of(x[j]);
      const unsigned index = static_cast<unsigned>(held - at);
      if (index < WIDTH) {
#pragma unroll
        for (unsigned j = 0; j < WIDTH; ++j)
          if (index == j) x[j] = held_dx;
      }
      store_streaming(to + at, pack<T>(x));
    }
  }
  for (int i = tile.thread_rank; i < span.scalars; i += group_size) {
    const int at = span.scalar_index(i);
    to[at] = narrowed<T>(at == held ? held_dx : nought ? 0.0f : near.of(widen(row[at])));
  }
}

}  // namespace pce
