// The loops with AVX-512.
#include "host.h"

#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,f16c,prefer-vector-width=512")
#endif
#define INSTRUCTION_SET avx512
#define VECTOR_BYTES 64
#include "instruction_set.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
