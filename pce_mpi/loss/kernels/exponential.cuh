// exp(scale (x - reference)), to the last bits and without one exponential more than needed.
//
// Float32 holds scale (x - reference) to 2**-21 where it is 10, and many classes may round alike: that would cost 4 ulp
// of their sum. So 2**(scale log2(e) x) is taken apart into a whole power of two and the rest, in [-1/2, 1/2], which
// two fused multiply-adds give to 2**-25. The reference is a whole power of two as well: to change it is exact.
// Far from 0, x - base comes first, base being close to all x that matter, and that difference is exact.
#pragma once
#include <storage.cuh>

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

template <typename T, typename A>
class Exponential;

template <typename T>
class Exponential<T, float> {
  // 1.5 * 2**23: what is added to it is rounded to a whole number, which its bits then show.
  static constexpr float MAGIC = 12582912.0f, BIAS = 127.0f;
  // x is close enough to 0 to be multiplied as it is.
  static constexpr float NEAR = 1024.0f;

  float high_, low_;  // scale log2(e)
  float base_, magic_, lowest_;

  __device__ __forceinline__ float shift() const { return MAGIC + BIAS - magic_; }

  __device__ __forceinline__ static float exp2_of_fraction(float f) {
    // Halves are asked for no more than what the special function unit gives.
    if constexpr (Storage<T>::width == 8) return approximate_exp2(f);
    // Minimax in the relative error: 2**-28.9, and 0.66 * 2**-23 with all roundings.
    float p = 0x1.41fb2ep-13f;
    p = fmaf(p, f, 0x1.5f3f30p-10f);
    p = fmaf(p, f, 0x1.3b2d50p-7f);
    p = fmaf(p, f, 0x1.c6aee6p-5f);
    p = fmaf(p, f, 0x1.ebfbdcp-3f);
    p = fmaf(p, f, 0x1.62e430p-1f);
    return fmaf(p, f, 1.0f);
  }

 public:
  float limit;  // no x may exceed it

  __device__ __forceinline__ explicit Exponential(double scale)
      : high_(static_cast<float>(scale * LOG2_E)), low_(static_cast<float>(scale * LOG2_E - high_)) {
    refer_to(0.0f);
    limit = -infinity<float>();  // until there is a number
  }

  // Take a finite number close to the largest x, or above.
  __device__ __forceinline__ void refer_to(float top) {
    base_ = fabsf(top * high_) < NEAR ? 0.0f : top;
    const float shift = rintf((top - base_) * high_);
    magic_ = MAGIC + BIAS - shift;
    lowest_ = (shift - BIAS) / high_;
    limit = base_ + (shift + 12.0f) / high_;
  }

  // The exponential as a number around 1 and a power of two: 0 for -inf, or where it is below 2**-126.
  __device__ __forceinline__ void parts(float x, float& fraction, float& power) const {
    const float below = maximum_or_nan(x - base_, lowest_);
    const float sum = fmaf(below, high_, magic_);
    const float whole = sum - magic_;
    fraction = exp2_of_fraction(fmaf(below, low_, fmaf(below, high_, -whole)));
    power = bits_as<float>(bits_as<unsigned>(sum) << 23);
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
      // The product with a power of two is exact.
      pair[i / 2] = i % 2 ? fmaf(fraction, power, pair[i / 2]) : fraction * power;
    }
#pragma unroll
    for (int step = 1; step < (N + 1) / 2; step *= 2)
#pragma unroll
      for (int i = 0; i + step < (N + 1) / 2; i += 2 * step) pair[i] += pair[i + step];
    return pair[0];
  }

  // log of what these exponentials are multiplied by to be relative to another reference.
  __device__ __forceinline__ double over(const Exponential& other, double scale) const {
    return scale * (static_cast<double>(base_) - other.base_) + LN_2 * (static_cast<double>(shift()) - other.shift());
  }
  __device__ __forceinline__ double over(double reference, double scale) const {
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

  __device__ __forceinline__ void refer_to(double top) {
    base_ = top;
    limit = top + 8.0 / scale_;
  }

  __device__ __forceinline__ double operator()(double x) const { return exp(scale_ * (x - base_)); }

  __device__ __forceinline__ double over(const Exponential& other, double scale) const {
    return scale * (base_ - other.base_);
  }
  __device__ __forceinline__ double over(double reference, double scale) const { return scale * (base_ - reference); }
};

// For gradients that are rounded to as few bits as the logits have: shorter, and good to 2**-17 or so.
template <typename T>
class ShortExponential {
  float factor_, base_;

 public:
  __device__ __forceinline__ explicit ShortExponential(double scale)
      : factor_(static_cast<float>(scale * LOG2_E)), base_(0.0f) {}
  __device__ __forceinline__ void refer_to(float top) { base_ = top; }
  __device__ __forceinline__ float operator()(float x) const { return approximate_exp2((x - base_) * factor_); }
  __device__ __forceinline__ double over(double reference, double scale) const { return scale * (base_ - reference); }
};

template <>
class ShortExponential<float> : public Exponential<float, float> {
  using Exponential<float, float>::Exponential;
};
