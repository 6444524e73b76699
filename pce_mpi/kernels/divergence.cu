// Divergences of rows and their gradients, in float64 and for any dtypes: a block for each row. Launched by cuda.py.
#include <losses.h>
#include <softmax_of_row.cuh>

namespace pce {

__device__ __forceinline__ double size_of(double v) { return magnitude(v); }
__device__ __forceinline__ double constant(double v) { return v; }
__device__ __forceinline__ bool any_less(double a, double b) { return a < b; }
__device__ __forceinline__ double power_of(double shifted) {
  return power(static_cast<int64_t>(bits(shifted)) - MAGIC_BITS);
}
#define NUMBERS double
#include <divergence_terms.h>
#undef NUMBERS

// `Pair` of interface.py. Both arrays have rows of consecutive classes at a pitch.
struct ClassesOfRow {
  const void *p, *q;
  int p_dtype, q_dtype;
  int64_t p_start, q_start;
  const Difference* difference;  // in memory, as registers are few
  RowFactor p_row, q_row;
  Transform transform;
  bool single;

  __device__ __forceinline__ double probability(double x, const RowFactor& row) const {
    const Call call = {0, transform};
    return single ? gradient_of<Short>(x, 1.0, row, call) : gradient_of<Double>(x, 1.0, row, call);
  }

  __device__ __forceinline__ Classes operator[](int64_t i) const {
    const double v = element(p, p_dtype, p_start + i), w = element(q, q_dtype, q_start + i);
    const Pair z = transformed(v, transform), z_w = transformed(w, transform);
    const double error = error_of(z_w.high, z_w.low) - error_of(z.high, z.low);
    const double r = log_of_ratio(z_w.high, z.high, error, *difference, single);
    const bool far = magnitude(r) > far_from(single);
    return {probability(v, p_row), far ? probability(w, q_row) : 0.0, r, far, single};
  }
};

// The sums of a row; the last two in units of 2^-60.
struct DivergenceSums {
  Sum divergence;
  int64_t excess, skewness;
};

// `row_divergences` of divergence.py.
struct RowDivergence {
  double divergence, low, skewness;

  static __device__ __forceinline__ RowDivergence of(const DivergenceSums& sums, double mean_p, double mean_q) {
    double skewness = static_cast<double>(sums.skewness) * 0x1p-60;
    double divergence = number_of(sums.divergence), a = static_cast<double>(sums.excess) * 0x1p-60;
    if (magnitude(a) < 0x1p-50) a = 0.0;
    const double curve = a * a * (0.5 - a * (1.0 / 3.0)), low = a - curve;
    if (mean_q) {
      const double bias = (mean_p - mean_q) / mean_p;
      const double first = low * (mean_q * divergence + mean_p * (skewness + bias * divergence));
      divergence = divergence - (first + 0.5 * mean_p * mean_q * (low * low));
      skewness = skewness + bias * divergence;
    } else {
      divergence = divergence - curve;
    }
    return {divergence > 0.0 ? divergence : 0.0, low, skewness};
  }
};

__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    sum_divergences(const void* p, int p_dtype, int64_t p_pitch, const void* q, int q_dtype, int64_t q_pitch,
                    const RowGradient* p_rows, const RowGradient* q_rows, const Difference* differences,
                    double scale, double mean_p, double mean_q, double log_p, double log_q, bool single, int64_t classes,
                    DivergenceSums* sums) {
  const int64_t row = blockIdx.x;
  const Mean mean = {mean_p, mean_q, log_p, log_q};
  const Transform transform = {scale, 0.0};
  const ClassesOfRow all{p, q, p_dtype, q_dtype, row * p_pitch, row * q_pitch, differences + row,
                         RowFactor::of(p_rows[row], transform), RowFactor::of(q_rows[row], transform), transform, single};
  DivergenceSums sum = {{NO_GRID, {0, 0, 0}}, 0, 0};
#pragma unroll 1
  for (int64_t i = threadIdx.x; finite(all.difference->delta) && i < classes; i += BLOCK_THREADS) {
    const Classes c = all[i];
    const Growth growth = growth_of(c);
    double skewness = 0.0;
    add_number(sum.divergence, mean.q ? jensen_shannon_term(c, growth, mean, skewness) : kl_term(c, growth));
    sum.excess += static_cast<int64_t>(difference(c, growth) * 0x1p60);
    sum.skewness += static_cast<int64_t>(skewness * 0x1p60);
  }
  const auto add = [](int64_t a, int64_t b) { return a + b; };
  sum.excess = reduce(sum.excess, BLOCK_THREADS, add);
  sum.skewness = reduce(sum.skewness, BLOCK_THREADS, add);
  reduce_sums(sum.divergence, BLOCK_THREADS);
  if (threadIdx.x == 0) sums[row] = sum;
}

// `divergences` is (3, rows).
__global__ void __launch_bounds__(BLOCK_THREADS)
    fill_divergences(const DivergenceSums* sums, int64_t rows, double mean_p, double mean_q, double* divergences) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  const RowDivergence found = RowDivergence::of(sums[row], mean_p, mean_q);
  divergences[row] = found.divergence;
  divergences[rows + row] = found.low;
  divergences[2 * rows + row] = found.skewness;
}

// `held` and `held_nll` have all rows of Q, then those of P.
__global__ void __launch_bounds__(BLOCK_THREADS)
    fill_logsumexp_differences(const double* held, const double* held_nll, int64_t rows, double scale,
                               Difference* differences) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  const Pair p = transformed(held[rows + row], {scale, 0.0}), q = transformed(held[row], {scale, 0.0});
  const double rest = (error_of(q.high, q.low) - error_of(p.high, p.low)) + (held_nll[row] - held_nll[rows + row]);
  const Pair delta = two_sum(q.high, -p.high);
  differences[row] = {finite(rest) ? delta.high : not_a_number(), delta.low, rest};
}

// `out` may be the logits of either.
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    write_divergence_gradient(const void* p, int p_dtype, int64_t p_pitch, const void* q, int q_dtype, int64_t q_pitch,
                              const RowGradient* p_rows, const RowGradient* q_rows, const Difference* differences,
                              double scale, double mean_p, double mean_q, double log_p, double log_q, bool single,
                              int64_t classes, int of, const double* slope, const double* less, const bool* valid, void* out, int out_dtype, int64_t out_pitch) {
  const int64_t row = blockIdx.x;
  const Mean mean = {mean_p, mean_q, log_p, log_q};
  const Transform transform = {scale, 0.0};
  const ClassesOfRow all{p, q, p_dtype, q_dtype, row * p_pitch, row * q_pitch, differences + row,
                         RowFactor::of(p_rows[row], transform), RowFactor::of(q_rows[row], transform), transform, single};
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < classes; i += BLOCK_THREADS) {
    double value = finite(all.difference->delta) ? slope[row] * divergence_gradient(all[i], of, mean, less[row]) : not_a_number();
    if (value != value) value = not_a_number();
    set_element(out, out_dtype, row * out_pitch + i, valid[row] ? value : 0.0);
  }
}

}  // namespace pce
