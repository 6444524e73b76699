// Products with AVX512-VNNI.
#include "host.h"

#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,fma,f16c,prefer-vector-width=512")
#endif
#define INLINED static inline __attribute__((always_inline))
#define VECTOR_BYTES 64
#define WITH_VNNI
namespace pce {
namespace vnni {
namespace {
#include "vectors.h"
#include "digits.h"
}  // namespace
extern const Products PRODUCTS = {find_exponents, multiply};
}  // namespace vnni
}  // namespace pce
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
