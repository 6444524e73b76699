// What options make of a class: its weight u in a sum over classes, and its logit under a softcap.
#pragma once
#include <storage.cuh>

// u = weight (probability keep + spread), either array null or from a block's first class on: that of the
// probabilities is element `first`.
struct ClassWeights {
  const double* weight;
  const void* probabilities;
  int kind;
  int64 first;
  double keep, spread;

  __device__ __forceinline__ double operator[](int at) const {
    double u = 1.0;
    if (probabilities != nullptr) {
      u = element(probabilities, kind, first + at);
      if (spread != 0.0) u = u * keep + spread;
    }
    return weight == nullptr ? u : u * weight[at];
  }
};

// softcap tanh(slope x), but a masked class stays masked, and +inf an error; x itself where softcap is 0.
template <typename A>
__device__ __forceinline__ A capped(A x, double softcap, double slope) {
  if constexpr (sizeof(A) == sizeof(double)) {
    if (softcap != 0.0 && fabs(x) != infinity<double>()) return softcap * tanh(slope * x);
  }
  return x;
}

// The slope of `capped` over that of slope x: sech(slope x)**2, by one exponential that cannot overflow.
__device__ __forceinline__ double cap_slope(double x, double slope) {
  const double e = exp(-2.0 * slope * fabs(x));
  return 4.0 * e / ((1.0 + e) * (1.0 + e));
}
