// The options of the general kernels: the weight u of a class in a sum over classes, and the softcap of a logit.
#pragma once
#include <storage.cuh>

// u = weight (probability keep + spread); an array that is null counts as ones. Classes are counted from the first of a
// tile, which is weight[0] and element `first` of the probabilities.
struct ClassWeights {
  const double* weight;
  const void* probabilities;
  int dtype;  // of the probabilities
  int64 first;
  double keep, spread;

  __device__ __forceinline__ double operator[](int at) const {
    double u = 1.0;
    if (probabilities != nullptr) {
      u = element(probabilities, dtype, first + at);
      if (spread != 0.0) u = u * keep + spread;
    }
    return weight == nullptr ? u : u * weight[at];
  }
};

// softcap tanh(slope x), or x itself if softcap is 0. -inf stays a masked class, and +inf an error.
template <typename A>
__device__ __forceinline__ A capped(A x, double softcap, double slope) {
  if constexpr (sizeof(A) == sizeof(double)) {
    if (softcap != 0.0 && fabs(x) != infinity<double>()) return softcap * tanh(slope * x);
  }
  return x;
}

// The derivative of softcap tanh(slope x) divided by softcap slope: sech(slope x)**2, by an exponential that cannot
// overflow.
__device__ __forceinline__ double cap_slope(double x, double slope) {
  const double e = exp(-2.0 * slope * fabs(x));
  return 4.0 * e / ((1.0 + e) * (1.0 + e));
}
