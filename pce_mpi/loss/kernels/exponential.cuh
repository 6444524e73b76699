// exp(scale (x - reference)) to the last bits, with one polynomial for each element.
//
// In float32, scale (x - reference) has an error of 2**-21 near 10, and many classes may have the same one: their sum
// would be off by 4 ulp. So the exponent scale log2(e) x is split into an integer and a fraction in [-1/2, 1/2], which
// two fused multiply-adds give with an error of 2**-25. The reference is a power of two: rescaling to another one is
// exact. Far from 0, a base close to the largest x is subtracted first; that difference is exact.
#pragma once
#include <storage.cuh>

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

template <typename T, typename A>
class Exponential;

template <typename T>
class Exponential<T, float> {
  // 1.5 * 2**23: adding a number to it rounds that to an integer, which the low bits of the sum then hold.
  static constexpr float MAGIC = 12582912.0f, BIAS = 127.0f;
  // The largest |scale log2(e) x| that needs no base.
  static constexpr float NEAR = 1024.0f;

  float high_, low_;  // scale log2(e)
  float base_, magic_, lowest_;

  __device__ __forceinline__ float shift() const { return MAGIC + BIAS - magic_; }

  __device__ __forceinline__ static float exp2_of_fraction(float f) {
    // For halves, the precision of the special function unit is enough.
    if constexpr (Storage<T>::width == 8) return approximate_exp2(f);
    // Minimax polynomial: relative error 2**-28.9, and 0.66 * 2**-23 with all roundings.
    float p = 0x1.41fb2ep-13f;
    p = fmaf(p, f, 0x1.5f3f30p-10f);
    p = fmaf(p, f, 0x1.3b2d50p-7f);
    p = fmaf(p, f, 0x1.c6aee6p-5f);
    p = fmaf(p, f, 0x1.ebfbdcp-3f);
    p = fmaf(p, f, 0x1.62e430p-1f);
    return fmaf(p, f, 1.0f);
  }

 public:
  float limit;  // for a larger x, set another reference first

  __device__ __forceinline__ explicit Exponential(double scale)
      : high_(static_cast<float>(scale * LOG2_E)), low_(static_cast<float>(scale * LOG2_E - high_)) {
    set_reference(0.0f);
    limit = -infinity<float>();  // the first number sets a reference
  }

  // `top` is finite, and at least about the largest x.
  __device__ __forceinline__ void set_reference(float top) {
    base_ = fabsf(top * high_) < NEAR ? 0.0f : top;
    const float shift = rintf((top - base_) * high_);
    magic_ = MAGIC + BIAS - shift;
    lowest_ = (shift - BIAS) / high_;
    limit = base_ + (shift + 12.0f) / high_;
  }

  // The exponential as fraction * power, a number around 1 and a power of two; 0 for -inf and below 2**-126.
  __device__ __forceinline__ void parts(float x, float& fraction, float& power) const {
    const float below = maximum_or_nan(x - base_, lowest_);
    const float sum = fmaf(below, high_, magic_);
    const float whole = sum - magic_;
    fraction = exp2_of_fraction(fmaf(below, low_, fmaf(below, high_, -whole)));
    power = bit_cast<float>(bit_cast<unsigned>(sum) << 23);
  }

  __device__ __forceinline__ float operator()(float x) const {
    float fraction, power;
    parts(x, fraction, power);
    return fraction * power;
  }

  template <int N>
  __device__ __forceinline__ float sum_of(const float (&x)[N]) const {
    float pair[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float fraction, power;
      parts(x[i], fraction, power);
      // Exact products: fmaf rounds as a multiplication followed by an addition would.
      pair[i / 2] = i % 2 ? fmaf(fraction, power, pair[i / 2]) : fraction * power;
    }
#pragma unroll
    for (int step = 1; step < (N + 1) / 2; step *= 2)
#pragma unroll
      for (int i = 0; i + step < (N + 1) / 2; i += 2 * step) pair[i] += pair[i + step];
    return pair[0];
  }

  // The logarithm of the factor that turns these exponentials into those relative to another reference.
  __device__ __forceinline__ double log_rescale(const Exponential& other, double scale) const {
    return scale * (static_cast<double>(base_) - other.base_) + LN_2 * (static_cast<double>(shift()) - other.shift());
  }
  __device__ __forceinline__ double log_rescale(double reference, double scale) const {
    return scale * (static_cast<double>(base_) - reference) + LN_2 * static_cast<double>(shift());
  }
};

template <typename T>
class Exponential<T, double> {
  double scale_, base_;

 public:
  double limit;

  __device__ __forceinline__ explicit Exponential(double scale)
      : scale_(scale), base_(0.0), limit(-infinity<double>()) {}

  __device__ __forceinline__ void set_reference(double top) {
    base_ = top;
    limit = top + 8.0 / scale_;
  }

  __device__ __forceinline__ double operator()(double x) const { return exp(scale_ * (x - base_)); }

  __device__ __forceinline__ double log_rescale(const Exponential& other, double scale) const {
    return scale * (base_ - other.base_);
  }
  __device__ __forceinline__ double log_rescale(double reference, double scale) const {
    return scale * (base_ - reference);
  }
};

// For gradients in the dtype of the logits: cheaper for halves, with a relative error of about 2**-17.
template <typename T>
class ShortExponential {
  float factor_, base_;

 public:
  __device__ __forceinline__ explicit ShortExponential(double scale)
      : factor_(static_cast<float>(scale * LOG2_E)), base_(0.0f) {}
  __device__ __forceinline__ void set_reference(float top) { base_ = top; }
  __device__ __forceinline__ float operator()(float x) const { return approximate_exp2((x - base_) * factor_); }
  __device__ __forceinline__ double log_rescale(double reference, double scale) const {
    return scale * (base_ - reference);
  }
};

template <>
class ShortExponential<float> : public Exponential<float, float> {
  using Exponential<float, float>::Exponential;
};
