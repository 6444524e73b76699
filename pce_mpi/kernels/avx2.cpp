// The loops with AVX2.
#include "host.h"

#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,prefer-vector-width=256")
#endif
#define INSTRUCTION_SET avx2
#define VECTOR_BYTES 32
#include "instruction_set.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
