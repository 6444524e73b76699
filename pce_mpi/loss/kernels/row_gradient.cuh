// The gradient at the classes of one row, except the class held apart.
#pragma once
#include <exponential.cuh>

// factor exp(scale (x - max)). If max is not finite, all logits are -inf or the factor is nan: any reference will do.
template <typename E, typename A>
struct RowGradient {
  E exponential;
  float factor = 0.0f;

  __device__ __forceinline__ RowGradient(double max, double scale) : exponential(scale) {
    const A top = static_cast<A>(max);
    if (is_finite(top)) exponential.set_reference(top);
  }

  // The factor, relative to the reference instead of max.
  __device__ __forceinline__ double rescaled(double factor, double max, double scale) const {
    return is_finite(static_cast<A>(max)) ? factor * exp(exponential.log_rescale(max, scale)) : factor;
  }

  __device__ __forceinline__ float operator()(float x) const { return product(exponential(x), factor); }
};

// The gradient of a vector of logits, with `held_dx` at `held_index` if the vector has that element.
template <typename T>
__device__ __forceinline__ Vector gradient_of(const Vector& v, const RowGradient<ShortExponential<T>, float>& gradient,
                                              unsigned held_index, float held_dx) {
  float x[Storage<T>::width];
  unpack<T>(v, x);
#pragma unroll
  for (int i = 0; i < Storage<T>::width; ++i) x[i] = gradient(x[i]);
  if (held_index < Storage<T>::width) {
#pragma unroll
    for (unsigned i = 0; i < Storage<T>::width; ++i)
      if (held_index == i) x[i] = held_dx;
  }
  return pack<T>(x);
}

template <typename T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (Storage<T>::dtype == FLOAT16)
    return T{static_cast<unsigned short>(halves_of_floats(x, 0.0f))};
  else if constexpr (Storage<T>::dtype == BFLOAT16)
    return T{static_cast<unsigned short>(bfloat16s_of_floats(x, 0.0f))};
  else
    return x;
}
