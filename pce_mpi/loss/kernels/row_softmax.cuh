// What follows from the merged state of a row, as in RowSoftmax in pce_mpi/loss/softmax_state.py.
#pragma once
#include <softmax_state.cuh>

// exp(scale (a - b)), corrected for the rounding error of the difference (Knuth's TwoSum).
__device__ inline double exp_difference(double a, double b, double scale) {
  const double difference = a - b, apart = difference - a;
  const double error = (a - (difference - apart)) - (b + apart);
  // The error is large, infinite or nan only if the difference is far outside the domain of exp.
  const double e = exp(scale * difference);
  return fabs(error) < 1.0 && e < infinity<double>() ? e + e * (scale * error) : e;
}

__device__ inline double log_add_exp(double a, double b) {
  if (a == b) return a + 0.6931471805599453;
  const double difference = a - b;
  return difference > 0.0 ? a + log1p(exp(-difference)) : difference <= 0.0 ? b + log1p(exp(difference)) : difference;
}

struct RowSoftmax {
  double normalizer, held_minus_one, held_probability, logsumexp;

  // `logsumexp` is computed only if asked for.
  __device__ inline RowSoftmax(double target, double max, double sum_exp, double scale, bool with_logsumexp) {
    // Held apart, a logit of +inf would not make the sum over the other classes nan.
    const double held = target == infinity<double>() ? bit_cast<double>(0x7ff8000000000000ull) : target;
    double held_over_max = 0.0, max_over_held = 0.0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {  // a loop takes fewer registers
      max_over_held = exp_difference(i ? max : held, i ? held : max, scale);
      if (i == 0) held_over_max = max_over_held;
    }
    normalizer = 1.0 / (sum_exp + held_over_max);
    held_minus_one = -sum_exp * normalizer;
    const double odds = sum_exp * max_over_held;
    held_probability = 1.0 / (1.0 + odds);
    logsumexp = 0.0;
    if (!with_logsumexp) return;
    if (held >= max)
      logsumexp = scale * held + log1p(odds);
    else
      logsumexp = scale * max + log_add_exp(log(sum_exp), scale * (held - max));
  }
};
