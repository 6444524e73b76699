// CUDA's half, as far as CuPy's float16 needs it.
#pragma once

struct __half_raw {
  unsigned short x;
};

struct __half {
  _Float16 value;
  __half() = default;
  template <typename T>
  __half(T number) : value(number) {}
  __half(__half_raw raw) : value(bit_cast<_Float16>(raw.x)) {}
  operator float() const { return value; }
  operator __half_raw() const { return {bit_cast<unsigned short>(value)}; }
};
using half = __half;

inline unsigned short __half_as_ushort(half v) { return __half_raw(v).x; }
inline half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
