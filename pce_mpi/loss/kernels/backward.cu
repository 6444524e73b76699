// Backward without options, in float32: each logit is read once, each gradient is written once. Launched by cuda.py.
#include <groups.cuh>

namespace pce {

// factor exp(z) for logits that are at most `most`, if `usable`.
template <bool SCALED>
class NearGradient {
  float high_, low_;  // of the factor, times 2 if its exponent is odd
  float scale_, lowest_;
  float magic_;  // rounds to an integer, ties to even, and adds the even part of the exponent

 public:
  bool usable;

  __device__ __forceinline__ NearGradient(const RowFactor& row, double most, double scale) : scale_(narrow(scale)) {
    // A factor of 0 is treated as one for which no logit is large enough.
    const bool nought = row.factor == 0.0;
    const int exponent = nought ? -4000 : static_cast<int>(clip(row.exponent, -2700, 2700)), odd = exponent & 1;
    high_ = product32(nought ? 1.0f : row.high, odd ? 2.0f : 1.0f);
    low_ = product32(row.low, odd ? 2.0f : 1.0f);
    magic_ = sum32(MAGIC32, static_cast<float>(exponent - odd));
    // The gradient of this logit is below 2^-150, and so are those of smaller ones.
    lowest_ = narrow(-0.69314718 * (154 + exponent) / scale);
    // No logit is far from 0, and no gradient is 2^124 or larger.
    const double z = scale * most;
    usable = finite(row.factor) && !row.huge && z <= 2047.0 && z >= -1848.0 &&
             (nought || (row.exponent > -2700 && row.exponent < 2700 && z * LOG2E + exponent < 122.0));
  }

  __device__ __forceinline__ float of(float x) const {
    const float v = maximum_or_nan(x, lowest_);
    float k = fma32(SCALED ? product32(v, scale_) : v, LOG2E32, magic_);
    // The low bits of n are the exponent of the gradient.
    const int n = static_cast<int>(bits(k)), normal = n > MAGIC32_BITS - 125 ? n : MAGIC32_BITS - 125;
    k = sum32(k, -magic_);
    const float f = SCALED ? fma32(v, scale_, product32(k, -HI32)) : fma32(k, -HI32, v);
    const float t = polynomial(fma32(k, -LO32, f)), value = sum32(high_, fma32(high_, t, low_));
    // Powers of two are added to the exponent, but for the one that may leave a subnormal number.
    return product32(from_bits(bits(value) + (static_cast<uint32_t>(normal) << 23)),
                     from_bits(static_cast<uint32_t>(n - normal + 127) << 23));
  }
};

// What a group of threads knows of its row. Its last thread computes it for all; tests run threads in order, and would
// not miss the barrier after the first one.
template <bool SCALED>
struct RowConstants {
  RowFactor factor;
  NearGradient<SCALED> near;
};

template <bool SCALED>
struct BlockConstants {
  RowConstants<SCALED> of_group[BLOCK_THREADS / 8];  // a group has at least 8 threads
};

// dx_c = factor exp(z_c). The column held apart gets `held_gradient`, and rows that are not valid get 0. `out` may be
// the logits; otherwise its rows have the same alignment as theirs.
template <typename T, bool SCALED>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    write_gradient(const T* logits, int64_t pitch, int64_t rows, int64_t classes, int chunk, int group_size, T* out,
                   int64_t out_pitch, const RowGradient* gradients, double scale) {
  constexpr int WIDTH = Storage<T>::width;
  const RowTile tile(rows, classes, chunk, group_size);
  const Call call = {0, {scale, 0.0}};
  RowConstants<SCALED>& constants =
      shared_memory<BlockConstants<SCALED>>().of_group[static_cast<int>(threadIdx.x) / group_size];
  if (tile.thread_rank == group_size - 1 && tile.row < rows) {
    const RowFactor factor = RowFactor::of(gradients[tile.row], call.transform);
    constants = {factor, {factor, gradients[tile.row].most, scale}};
  }
  __syncthreads();
  if (tile.row >= rows) return;
  const T* row = logits + tile.row * pitch + tile.first_class;
  T* to = out + tile.row * out_pitch + tile.first_class;
  const VectorizedSpan<T> span(row, tile.count);
  const RowGradient& gradient = gradients[tile.row];
  const NearGradient<SCALED> near = constants.near;
  const int held = tile.local_index(gradient.column);
  const float held_dx = narrow(gradient.held_gradient);

  if (gradient.valid == 0) {
    for (int i = tile.thread_rank; i < span.vectors; i += group_size)
      store_streaming(to + span.vector_start(i), Vector{0, 0, 0, 0});
    for (int i = tile.thread_rank; i < span.scalars; i += group_size) to[span.scalar_index(i)] = narrowed<T>(0.0f);
    return;
  }
  if (!near.usable) {
#pragma unroll 1
    for (int at = tile.thread_rank; at < tile.count; at += group_size)
      to[at] = narrowed<T>(at == held ? held_dx : gradient_of<Single>(number_of(row[at]), 1.0, constants.factor, call));
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
      for (int j = 0; j < WIDTH; ++j) x[j] = near.of(x[j]);
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
    to[at] = narrowed<T>(at == held ? held_dx : near.of(widen(row[at])));
  }
}

}  // namespace pce
