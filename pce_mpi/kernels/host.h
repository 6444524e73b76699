// The hot loops on the CPU.
//
// One source for all instruction sets: `instruction_set.h` is compiled for each, by `avx512.cpp`, `avx2.cpp` and
// `baseline.cpp`, and the best one of the processor is chosen at run time. Compile with -ffp-contract=off: contracted
// products and sums have other bits. Call the loops in the standard state of the floating-point unit, which
// `floating_point.h` sets.
#pragma once

#include <stdint.h>
#include <string.h>
#include <type_traits>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "floating_point.h"
#include "merged.h"

namespace pce {

enum Kind { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, KINDS };
constexpr long SIZES[KINDS] = {4, 8, 2, 2};

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

template <class T> constexpr int kind_of();
template <> constexpr int kind_of<float>() { return FLOAT32; }
template <> constexpr int kind_of<double>() { return FLOAT64; }
template <> constexpr int kind_of<Half>() { return FLOAT16; }
template <> constexpr int kind_of<BFloat>() { return BFLOAT16; }

inline double number_of(BFloat v) { return from_bits(uint32_t(v.bits) << 16); }
inline double number_of(Half v) {
    uint32_t u = (v.bits & 0x7fffu) << 13, b = bits(from_bits(u) * 0x1p112f);
    return from_bits((u >= 0x0f800000 ? u | 0x7f800000 : b) | (v.bits & 0x8000u) << 16);
}

// A number rounded once to T.
template <class T> T of_number(double v);
template <> inline float of_number<float>(double v) { return float(v); }
template <> inline double of_number<double>(double v) { return v; }
template <> inline BFloat of_number<BFloat>(double v) {
    uint32_t b = bits(float(cut_for_half(v)));
    return {uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
template <> inline Half of_number<Half>(double v) {
    uint32_t b = bits(float(cut_for_half(v))), sign = b >> 16 & 0x8000;
    b &= 0x7fffffff;
    uint32_t subnormal = bits(from_bits(b) + 0.5f) - 0x3f000000, normal = (b + 0xc8000fff + (b >> 13 & 1)) >> 13;
    uint32_t h = b < 0x38800000 ? subnormal : b < 0x47800000 ? normal : b > 0x7f800000 ? 0x7e00 : 0x7c00;
    return {uint16_t(h | sign)};
}

template <class T> T masked() { return of_number<T>(-infinity()); }

// An array (outer, classes, inner), the class axis in the middle; strides in bytes.
struct Array {
    char *data;
    long shape[3], strides[3];
    int kind;
};

// Arguments of a pass over the logits; arrays of rows are consecutive, and may be absent where so noted.
struct Fill {
    Array logits, probabilities;  // probabilities: may be absent
    const int64_t *columns;       // the target's column, or -1; may be absent
    const double *weight;         // of each class; may be absent
    double kept, share;           // see Weights
    int64_t first_class;
    uint64_t *states;
    Call call;
    bool wide;  // in float64
};
struct Write {
    Array logits, out, probabilities;
    const RowGradient *rows;  // may be absent, and is then computed
    GradientRows computed;
    const double *weight;
    double kept, share;
    Call call;
    bool wide;
};
struct Losses {
    Merged merged;
    const bool *valid;
    LossTerms terms;
    double *losses, *weights;
};
struct Largest {
    const char *rows;
    long count, classes, stride, k;  // rows and classes; the stride in bytes
    int kind;
    double *values;  // k of each row, the largest first
    int64_t *columns;
};
// `Pair` of interface.py: the logits of P and, in the place of probabilities, those of Q.
struct Divergence {
    Array logits, probabilities, out;  // without `out` the sums are wanted, else the gradient
    const double *weight;              // absent
    double kept, share;                // unused
    const RowGradient *p_rows, *q_rows;
    const Difference *differences;
    const double *slope, *less;  // of a gradient, as is `valid`
    const bool *valid;
    uint64_t *sums;
    int of;  // `GradientOf`
    Mean mean;
    bool single;
    Transform transform;
};
// x / (1 + exp(-a x - b x**3)) of numbers, and its slope, which may be absent; exp is 0 where |x| is above `bent`.
struct Gelu {
    const float *x;
    float *y, *slope;
    long count;
    double a, b, bent;
};
// Scores of queries, rows of consecutive columns, stack after stack. Query q sees the first `seen` + q columns; the
// probabilities of the others are 0.
struct Attend {
    float *p;
    long rows, columns, queries, seen;
};
// A pass over rows of consecutive numbers, float32 or float64. NORMAL writes normalized rows to `out`, and three
// statistics of each. From these and the gradient of normalized rows, `upstream`, OF_ROWS writes the gradient of rows to
// `out`, and OF_SCALE adds that of the scale to it, which is float64.
enum NormPass { NORMAL, OF_ROWS, OF_SCALE };
struct Norm {
    NormPass of;
    int kind;
    const char *x, *upstream;
    char *out;
    const double *scale;
    double *statistics;
    long rows, columns;
    double eps;
    bool center;
};
// Lines of float32, rows or columns of a matrix: lines are `stride` bytes apart, and `length` numbers of one `step`.
struct Lines {
    const char *data;
    long count, length, stride, step;
    int32_t *exponents;
};
// The rows of a times the columns of b, to consecutive rows of float32, or of sums of 64 bits.
struct Product {
    Lines a, b;
    float *numbers;
    int64_t *sums;
};
struct Products {
    void (*find_exponents)(const Lines &);
    long (*multiply)(const Product &, char *room);
};
struct Loops {
    void (*fill)(const Fill &);
    void (*write)(const Write &);
    void (*losses)(const Losses &);
    void (*add)(Sum &, const double *numbers, long count);
    void (*find)(const Largest &);
    void (*diverge)(const Divergence &);
    void (*gelu)(const Gelu &);
    void (*attend)(const Attend &);
    void (*norm)(const Norm &);
};

#if defined(__x86_64__)
namespace vnni {
extern const Products PRODUCTS;
}
namespace avx512 {
extern const Loops LOOPS;
extern const Products PRODUCTS;
}
namespace avx2 {
extern const Loops LOOPS;
extern const Products PRODUCTS;
}
#endif
namespace baseline {  // SSE2, NEON, or whatever there is
extern const Loops LOOPS;
extern const Products PRODUCTS;
}

struct InstructionSet {
    const char *name;
    bool (*present)();
    const Loops *loops;
    const Products *products;
};

#if defined(__x86_64__)
// Older compilers do not know all of these by name.
inline bool has_fma_and_halves() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_FMA) && (c & bit_F16C);
}
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && has_fma_and_halves(); }
inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && has_fma_and_halves();
}
inline bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif
inline bool always() { return true; }

// The best first.
const InstructionSet INSTRUCTION_SETS[] = {
#if defined(__x86_64__)
    {"AVX512-VNNI", has_vnni, &avx512::LOOPS, &vnni::PRODUCTS},
    {"AVX-512", has_avx512, &avx512::LOOPS, &avx512::PRODUCTS},
    {"AVX2", has_avx2, &avx2::LOOPS, &avx2::PRODUCTS},
    {"SSE2", always, &baseline::LOOPS, &baseline::PRODUCTS},
#elif defined(__aarch64__)
    {"NEON", always, &baseline::LOOPS, &baseline::PRODUCTS},
#else
    {"no vectors", always, &baseline::LOOPS, &baseline::PRODUCTS},
#endif
};
inline const InstructionSet *chosen;

}  // namespace pce
