// The weight u of a class in a sum over classes.
#pragma once
#include <storage.cuh>

namespace pce {

// u = weight (probability keep + spread); a null array means ones. Classes are counted from the first of a
// tile, which is weight[0] and element `first` of the probabilities.
struct ClassWeights {
  const double* weight;
  const void* probabilities;
  int dtype;  // of the probabilities
  int64_t first;
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

}  // namespace pce
