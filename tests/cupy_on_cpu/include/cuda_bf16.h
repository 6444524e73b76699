// CUDA's bfloat16, as far as CuPy's needs it.
#pragma once

struct __nv_bfloat16 {
  unsigned short bits = 0;
  __nv_bfloat16() = default;
  __nv_bfloat16(float number) : bits(bfloat16_of_float(number)) {}
  operator float() const { return bit_cast<float>(unsigned(bits) << 16); }
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return bit_cast<__nv_bfloat16>(bits); }
inline bool __hisnan(__nv_bfloat16 v) { return (v.bits & 0x7fff) > 0x7f80; }
inline bool __hisinf(__nv_bfloat16 v) { return (v.bits & 0x7fff) == 0x7f80; }
