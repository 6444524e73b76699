// The gradient at the classes of one row, but for the one held apart.
#pragma once
#include <exponential.cuh>

// factor exp(scale (x - max)). Where max is no number, all logits are -inf or the factor is nan: any reference will do.
template <typename E, typename A>
struct RowGradient {
  E exponential;
  float factor = 0.0f;

  __device__ __forceinline__ RowGradient(double max, double scale) : exponential(scale) {
    const A top = static_cast<A>(max);
    if (is_finite(top)) exponential.refer_to(top);
  }

  // What the factor is relative to the reference.
  __device__ __forceinline__ double relative(double factor, double max, double scale) const {
    return is_finite(static_cast<A>(max)) ? factor * exp(exponential.over(max, scale)) : factor;
  }

  __device__ __forceinline__ float operator()(float x) const { return product(exponential(x), factor); }
};

// That of a vector of logits, with `at_held` at one place, if that is one of them.
template <typename T>
__device__ __forceinline__ Vector gradient_of(const Vector& v, const RowGradient<ShortExponential<T>, float>& gradient,
                                              unsigned held_place, float at_held) {
  float x[Storage<T>::width];
  unpack<T>(v, x);
#pragma unroll
  for (int i = 0; i < Storage<T>::width; ++i) x[i] = gradient(x[i]);
  if (held_place < Storage<T>::width) {
#pragma unroll
    for (unsigned i = 0; i < Storage<T>::width; ++i)
      if (held_place == i) x[i] = at_held;
  }
  return pack<T>(x);
}

template <typename T>
__device__ __forceinline__ T rounded(float x) {
  if constexpr (Storage<T>::kind == FLOAT16)
    return T{static_cast<unsigned short>(halves_of_floats(x, 0.0f))};
  else if constexpr (Storage<T>::kind == BFLOAT16)
    return T{static_cast<unsigned short>(bfloat16s_of_floats(x, 0.0f))};
  else
    return x;
}
