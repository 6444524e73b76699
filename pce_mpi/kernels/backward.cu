// Backward in float32, also with label smoothing and of statistics: each logit is read once, each gradient is written
// once. Launched by cuda.py.
#include <groups.cuh>
#include <reduction.cuh>

namespace pce {

// factor exp(z) for logits that are at most `most`, if `usable`.
template <Way way>
class NearGradient {
  float high_, low_;  // of the factor, times 2 if its exponent is odd
  Reduction<way> reduction_;  // adds the even part of the exponent to n
  float lowest_;

 public:
  bool usable;

  // A factor of 0 is treated as one for which no logit is large enough.
  static __device__ __forceinline__ int exponent_of(const RowFactor& row) {
    return row.factor == 0.0 ? -4000 : static_cast<int>(clip(row.exponent, -2700, 2700));
  }

  __device__ __forceinline__ NearGradient(const RowFactor& row, double most, double scale)
      : reduction_(scale, exponent_of(row) & ~1) {
    const bool nought = row.factor == 0.0;
    const int exponent = exponent_of(row), odd = exponent & 1;
    high_ = product32(nought ? 1.0f : row.high, odd ? 2.0f : 1.0f);
    low_ = product32(row.low, odd ? 2.0f : 1.0f);
    // The gradient of this logit is below 2^-150, and so are those of smaller ones.
    lowest_ = narrow(-0.69314718 * (154 + exponent) / scale);
    // No logit is far from 0, and no gradient is 2^124 or larger.
    const double z = scale * most;
    usable = finite(row.factor) && !row.huge && z <= 2047.0 && z >= -1848.0 &&
             (nought || (row.exponent > -2700 && row.exponent < 2700 && z * LOG2E + exponent < 122.0));
  }

  // The logit, or one so low that its gradient is 0 too.
  __device__ __forceinline__ float raised(float x) const { return maximum_or_nan(x, lowest_); }

  // For a logit that was `raised`.
  __device__ __forceinline__ float of(float v) const {
    const Reduced reduced = reduction_(v);
    // The low bits of n are the exponent of the gradient.
    const int n = static_cast<int>(reduced.n), normal = n > MAGIC32_BITS - 125 ? n : MAGIC32_BITS - 125;
    const float value = sum32(high_, fma32(high_, polynomial(reduced.rest), low_));
    // Powers of two are added to the exponent, but for the one that may leave a subnormal number.
    return product32(from_bits(bits(value) + (static_cast<uint32_t>(normal) << 23)),
                     from_bits(static_cast<uint32_t>(n - normal + 127) << 23));
  }
};

// What a group of threads knows of its row. Its last thread computes it for all; tests run threads in order, and would
// not miss the barrier after the first one.
template <Way way>
struct RowConstants {
  RowFactor factor;
  NearGradient<way> near;

  // Whether statistics can be near: no product of these numbers with others leaves the normal ones, and a logit, or its
  // product with the scale, has no rest in float64.
  __device__ __forceinline__ bool usable(int fields) const {
    const auto moderate = [](double v) { return v == 0.0 || (magnitude(v) >= 0x1p-600 && magnitude(v) <= 0x1p600); };
    return near.usable && ((fields & ENTROPY) == 0 || (moderate(factor.constant) && moderate(factor.slope) &&
                                                       finite(factor.origin.high) && factor.origin.low == 0.0));
  }
};

template <Way way>
struct BlockConstants {
  RowConstants<way> of_group[BLOCK_THREADS / 8];  // a group has at least 8 threads
};

// The gradient of logits that are near: less `weight_factor` with the field WEIGHTED_LOGIT, and of statistics with
// ENTROPY.
template <Way way, int FIELDS>
class FullGradient {
  NearGradient<way> near_;
  double weight_factor_, constant_, slope_, origin_, scale_;

  __device__ __forceinline__ double slope_at(float v) const {
    return constant_ + slope_ * (way != PLAIN ? __fma_rn(scale_, wide(v), -origin_) : wide(v) - origin_);
  }

 public:
  __device__ __forceinline__ FullGradient(const RowConstants<way>& row, double scale)
      : near_(row.near),
        weight_factor_(row.factor.weight_factor),
        constant_(row.factor.constant),
        slope_(row.factor.slope),
        origin_(row.factor.origin.high),
        scale_(scale) {}

  __device__ __forceinline__ float of(float x) const {
    const float v = near_.raised(x), gradient = near_.of(v);
    if ((FIELDS & WEIGHTED_LOGIT) != 0) return narrow(wide(gradient) - weight_factor_);
    return (FIELDS & ENTROPY) != 0 ? narrow(__fma_rn(wide(gradient), slope_at(v), 0.0)) : gradient;  // -0 becomes 0
  }

  // Of statistics, where `more` is added to the gradient.
  __device__ __forceinline__ float at_target(float x, double more) const {
    const float v = near_.raised(x);
    return narrow(wide(near_.of(v)) * slope_at(v) + more);
  }
};

// dx_c = factor exp(z_c), and what follows from it with FIELDS. The column held apart gets `held_gradient`, and rows that
// are not valid get 0; where `valid` is negative nothing is written. `out` may be the logits; otherwise its rows have the
// same alignment as theirs.
template <typename T, Way way, int FIELDS>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    write_gradient(const T* logits, int64_t pitch, int64_t rows, int64_t classes, int chunk, int group_size, T* out,
                   int64_t out_pitch, const RowGradient* gradients, double scale) {
  constexpr int WIDTH = Storage<T>::width;
  const RowTile tile(rows, classes, chunk, group_size);
  const Call call = {FIELDS, {scale, 0.0}};
  RowConstants<way>& constants =
      shared_memory<BlockConstants<way>>().of_group[static_cast<int>(threadIdx.x) / group_size];
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
  const FullGradient<way, FIELDS> near(constants, scale);
  const int held = tile.local_index(gradient.column);
  constexpr bool STATISTICS = (FIELDS & ENTROPY) != 0;
  const int target = STATISTICS ? tile.local_index(gradient.target) : -1;
  const float held_dx = narrow(gradient.held_gradient);

  if (gradient.valid <= 0) {
    if (gradient.valid < 0) return;
    for (int i = tile.thread_rank; i < span.vectors; i += group_size)
      store_streaming(to + span.vector_start(i), Vector{0, 0, 0, 0});
    for (int i = tile.thread_rank; i < span.scalars; i += group_size) to[span.scalar_index(i)] = narrowed<T>(0.0f);
    return;
  }
  if (!constants.usable(FIELDS)) {
#pragma unroll 1
    for (int at = tile.thread_rank; at < tile.count; at += group_size) {
      const double more = STATISTICS && at == target ? gradient.target_gradient : 0.0;
      to[at] = narrowed<T>(
          at == held ? held_dx : gradient_of<Single>(number_of(row[at]), 1.0, constants.factor, call, more));
    }
    return;
  }
  // Two classes are not like others. Who writes the others around them writes these once more.
  const bool writes_held = held >= 0 && span.index_of(held) % group_size == tile.thread_rank;
  const bool writes_target = target >= 0 && span.index_of(target) % group_size == tile.thread_rank;
  const float target_dx =
      STATISTICS && writes_target ? near.at_target(widen(row[target]), gradient.target_gradient) : 0.0f;
  for (int start = tile.thread_rank; start < span.vectors; start += LOADS * group_size) {
    Vector v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (start + i * group_size < span.vectors) v[i] = load_streaming(row + span.vector_start(start + i * group_size));
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (start + i * group_size >= span.vectors) break;
      float x[WIDTH];
      unpack<T>(v[i], x);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) x[j] = near.of(x[j]);
      store_streaming(to + span.vector_start(start + i * group_size), pack<T>(x));
    }
  }
  for (int i = tile.thread_rank; i < span.scalars; i += group_size) {
    const int at = span.scalar_index(i);
    to[at] = narrowed<T>(near.of(widen(row[at])));
  }
  if (STATISTICS && writes_target) to[target] = narrowed<T>(target_dx);
  if (writes_held) to[held] = narrowed<T>(held_dx);
}

}  // namespace pce
