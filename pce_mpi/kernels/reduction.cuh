// The reduction of exponents in loops over vectors of logits.
#pragma once
#include <storage.cuh>

namespace pce {

// z is a logit itself, or its product with a scale that is a float32, or with any other one, in float64.
enum Way { PLAIN, SCALED, SCALED_IN_DOUBLE };

// 2^-896 v, for a finite v, from its bits: a conversion takes as long as 16 additions.
constexpr double RAISED = 0x1p896;
__device__ __forceinline__ double lowered(float v) {
  const int64_t word = static_cast<int32_t>(bits(v));
  return from_bits(static_cast<uint64_t>(word * (1 << 29)) & 0x8fffffffffffffff);
}

// n + MAGIC32_BITS and z - n log 2.
struct Reduced {
  uint32_t n;
  float rest;
};

template <Way way>
class Reduction {
  // The magic numbers round to an integer, ties to even, and add an even number to n.
  float scale_, magic_;
  double factor_, wide_magic_;

 public:
  __device__ __forceinline__ explicit Reduction(double scale, int more = 0)
      : scale_(narrow(scale)),
        magic_(from_bits(static_cast<uint32_t>(MAGIC32_BITS + more))),
        factor_(scale * RAISED),
        wide_magic_(from_bits(static_cast<uint64_t>(MAGIC_BITS + MAGIC32_BITS + more))) {}

  // Of a logit up to 2,047; in float64 also |z| is below 2^20.
  __device__ __forceinline__ Reduced operator()(float v) const {
    if (way == SCALED_IN_DOUBLE) {
      const double x = lowered(v), z = factor_ * x, low = __fma_rn(factor_, x, -z);
      const double shifted = z * LOG2E + wide_magic_, k = shifted - wide_magic_;
      return {static_cast<uint32_t>(bits(shifted)), narrow((__fma_rn(-k, HI, z) - k * LO) + low)};
    }
    float k = fma32(way == SCALED ? product32(v, scale_) : v, LOG2E32, magic_);
    const uint32_t n = bits(k);
    k = sum32(k, -magic_);
    const float f = way == SCALED ? fma32(v, scale_, product32(k, -HI32)) : fma32(k, -HI32, v);
    return {n, fma32(k, -LO32, f)};
  }
};

}  // namespace pce
