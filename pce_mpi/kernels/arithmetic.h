// Elementary functions whose bits are the same everywhere, for C++ and CUDA; `elementary.py` defines them.
//
// exp(z) = 2^n (1 + t), with n and t functions of z alone. Compile without contraction of a b + c: where one rounding
// is meant, it says `fma32`. CuPy has float32 flush subnormal numbers to 0; functions in PTX here do not.
#pragma once

#if __cplusplus < 201703L
#error "The sources need C++17: compile with -std=c++17 or a later one"
#include "C++17"  // there is no such file, so a compiler stops here
#endif
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "The bits of the loss are those of IEEE arithmetic: compile without -ffast-math and -Ofast, or add -fno-fast-math"
#endif
#if defined(__FLT_EVAL_METHOD__) && (__FLT_EVAL_METHOD__ < 0 || __FLT_EVAL_METHOD__ == 2)
#error "The bits of the loss are those of IEEE arithmetic: compile for SSE2 rather than the x87 unit, with -mfpmath=sse"
#endif

#ifdef __CUDACC_RTC__
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#ifdef __CUDACC__
#define PCE_FUNCTION __device__ inline
#define PCE_INLINED __device__ __forceinline__
#else
#define PCE_FUNCTION inline
#define PCE_INLINED inline __attribute__((always_inline))
#endif

namespace pce {

static_assert(0.1 != 0.1f, "constants are float64: compile without -fsingle-precision-constant");

constexpr float LOG2E32 = 0x1.715476p+0f, HI32 = 0x1.62ep-1f, LO32 = 0x1.0bfbe8p-15f;
constexpr double LOG2E = 0x1.71547652b82fep+0, HI = 0x1.62e42feep-1, LO = 0x1.a39ef35793c76p-33;
constexpr double LN2 = 0x1.62e42fefa39efp-1, LN2_REST = 0x1.abc9e3b39803fp-56;
constexpr float MAGIC32 = 0x1.8p23f;
constexpr int32_t MAGIC32_BITS = 0x4b400000;
constexpr double MAGIC = 0x1.8p52;
constexpr int64_t MAGIC_BITS = 0x4338000000000000;
constexpr float NEAR32 = 2048.0f;
constexpr double NEAR = 0x1p20, HUGE_LOGIT = 0x1p60;
constexpr int64_t HUGE_EXPONENT = int64_t(1) << 61;

// A precision's bits of a fraction and of a digit.
struct Single {
    typedef float Number;
    static constexpr int POINT = 30, WIDTH = 21;
};
struct Double {
    typedef double Number;
    static constexpr int POINT = 62, WIDTH = 36;
};
// float64 with the polynomials of fewer terms, for results in float32.
struct Short : Double {};

#ifdef __CUDACC__
PCE_FUNCTION uint64_t bits(double v) { return __double_as_longlong(v); }
PCE_FUNCTION double from_bits(uint64_t b) { return __longlong_as_double(b); }
PCE_FUNCTION uint32_t bits(float v) { return __float_as_uint(v); }
PCE_FUNCTION float from_bits(uint32_t b) { return __uint_as_float(b); }
PCE_FUNCTION float fma32(float a, float b, float c) { return __fmaf_ieee_rn(a, b, c); }
PCE_FUNCTION float product32(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
PCE_FUNCTION float sum32(float a, float b) {
    float c;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
// a b of less than 2^22, rounded to an integer.
PCE_FUNCTION float whole_of_product(float a, float b, int64_t &whole) {
    float k = fma32(a, b, MAGIC32);
    whole = int32_t(bits(k)) - MAGIC32_BITS;
    return sum32(k, -MAGIC32);
}
PCE_FUNCTION float narrow(double v) {
    float w;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(w) : "d"(v));
    return w;
}
PCE_FUNCTION double wide(float v) {
    double w;
    asm("cvt.f64.f32 %0, %1;" : "=d"(w) : "f"(v));
    return w;
}
#else
PCE_FUNCTION uint64_t bits(double v) { return __builtin_bit_cast(uint64_t, v); }
PCE_FUNCTION double from_bits(uint64_t b) { return __builtin_bit_cast(double, b); }
PCE_FUNCTION uint32_t bits(float v) { return __builtin_bit_cast(uint32_t, v); }
PCE_FUNCTION float from_bits(uint32_t b) { return __builtin_bit_cast(float, b); }
PCE_FUNCTION float fma32(float a, float b, float c) {
#ifdef __aarch64__
    return __builtin_fmaf(a, b, c);
#else
    // A sum rounded to odd in float64 rounds to float32 as the exact sum does; an infinite one has an error of nan.
    double p = double(a) * b, d = c, s = p + d, v = s - p, error = (p - (s - v)) + (d - v);
    if ((error > 0.0 || error < 0.0) && !(bits(s) & 1)) s = from_bits(bits(s) + ((error > 0.0) == (s > 0.0) ? 1 : -1));
    return float(s);
#endif
}
PCE_FUNCTION float product32(float a, float b) { return a * b; }
PCE_FUNCTION float sum32(float a, float b) { return a + b; }
PCE_FUNCTION float whole_of_product(float a, float b, int64_t &whole) {
    double k = double(a) * b + MAGIC;  // the product is exact
    whole = int64_t(bits(k)) - MAGIC_BITS;
    return float(k - MAGIC);
}
PCE_FUNCTION float narrow(double v) { return float(v); }
PCE_FUNCTION double wide(float v) { return v; }
#endif

// v cut to 13 digits, of which the last is 1 if one that is cut off was: two more than a half has, so that a rounding to
// float32 on the way to one is exact.
constexpr int64_t CUT_OFF = (int64_t(1) << 40) - 1;
PCE_FUNCTION double cut_for_half(double v) { return from_bits((bits(v) | ((bits(v) & CUT_OFF) + CUT_OFF)) & ~CUT_OFF); }

struct Transform {
    double scale, softcap;  // softcap 0: none
    double m1 = 1.0, m2 = 0.0, m3 = 0.0;  // the margin of targets

    PCE_FUNCTION bool has_margin() const { return m1 != 1.0 || m2 != 0.0 || m3 != 0.0; }

    // True if float32 can reduce an argument without float64.
    PCE_FUNCTION bool direct() const {
        return softcap == 0.0 && wide(narrow(scale)) == scale;
    }
};

PCE_FUNCTION double infinity() { return from_bits(uint64_t(0x7ff0000000000000)); }
PCE_FUNCTION double not_a_number() { return from_bits(uint64_t(0x7ff8000000000000)); }
PCE_FUNCTION bool finite(double v) { return (bits(v) >> 52 & 0x7ff) != 0x7ff; }
PCE_FUNCTION double magnitude(double v) { return from_bits(bits(v) & 0x7fffffffffffffff); }
PCE_FUNCTION int64_t clip(int64_t n, int64_t low, int64_t high) { return n < low ? low : n > high ? high : n; }
PCE_FUNCTION int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
PCE_FUNCTION double canonical(double v) { return v != v ? not_a_number() : v + 0.0; }

// v rounded to an integer, ties to even.
PCE_FUNCTION double rounded(double v) {
    if (!(magnitude(v) < 0x1p52)) return v;
    double shift = v < 0.0 ? -0x1p52 : 0x1p52;
    return (v + shift) - shift;
}

// 2^n, for n from -1022 to 1023.
PCE_FUNCTION double power(int64_t n) { return from_bits(uint64_t(n + 1023) << 52); }

// v 2^n, rounded once if v is normal.
PCE_FUNCTION double scaled(double v, int64_t n) {
    if (n >= -800 && n <= 800) return v * power(n);
    n = clip(n, -2200, 2200);
    for (int i = 0; i < 3; i++) {
        int64_t step = clip(n, -800, 800);
        v = v * power(step);
        n -= step;
    }
    return v;
}

// A finite v as m 2^e with m in [0.5, 1), or itself and 0.
struct Parts {
    double m;
    int64_t e;
};
PCE_FUNCTION Parts split(double v) {
    if (v == 0.0) return {v, 0};
    int64_t below = 0;
    if (magnitude(v) < 0x1p-1022) v *= 0x1p64, below = 64;
    uint64_t b = bits(v);
    int64_t e = int64_t(b >> 52 & 0x7ff) - 1022 - below;
    return {from_bits((b & 0x800fffffffffffff) | 0x3fe0000000000000), e};
}

// The sum of two float64, the second at most half an ulp of the first.
struct Pair {
    double high, low;
};

PCE_FUNCTION Pair two_sum(double a, double b) {
    double s = a + b, v = s - a;
    return {s, (a - (s - v)) + (b - v)};
}

// a rounded to 26 bits, without an overflow on the way.
PCE_FUNCTION double upper_half(double a) { return from_bits((bits(a) + (1 << 26)) & ~uint64_t((1 << 27) - 1)); }

// The rounding error of a product p = a b of numbers of usual sizes (Dekker).
PCE_FUNCTION double usual_error(double a, double b, double p) {
    double a1 = upper_half(a), a2 = a - a1, b1 = upper_half(b), b2 = b - b1;
    return ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2;
}

// a b and its rounding error, of which subnormal digits are rounded once, as by a fused multiply-add. That of a product
// that is not finite means nothing.
#ifdef __CUDACC__
PCE_FUNCTION Pair two_product(double a, double b) { return {a * b, __fma_rn(a, b, -(a * b))}; }
#else
constexpr double LARGE_FACTOR = 0x1p996, SMALL_PRODUCT = 0x1p-900;  // beyond these a step may overflow or be rounded
PCE_FUNCTION Pair two_product(double a, double b) {
    double p = a * b, size = magnitude(p);
    if ((size > SMALL_PRODUCT && magnitude(a) < LARGE_FACTOR && magnitude(b) < LARGE_FACTOR) || !finite(p))
        return {p, usual_error(a, b, p)};
    if (size < 0x1p-1021) return {p, 0.0};  // the error is at most half of the smallest number
    Parts x = split(a), y = split(b);
    return {p, scaled(usual_error(x.m, y.m, x.m * y.m), x.e + y.e)};
}
#endif

template <class Number> struct Exponential {
    int64_t n;
    Number t;
};

PCE_FUNCTION float polynomial(float f) {
    float q = fma32(0x1.6db642p-10f, f, 0x1.123cep-7f);
    q = fma32(q, f, 0x1.55545cp-5f);
    q = fma32(q, f, 0x1.55548cp-3f);
    q = fma32(q, f, 0x1p-1f);
    return fma32(product32(f, f), q, f);
}

// exp(f) - 1 = f + f^2 Q(f), with the coefficients 1 / k! of Q in pairs, and pairs of those (Estrin): a chain of few
// operations; `curved` is exp(f) - 1 - f. The short ones are fitted, and good to 2^-42 of exp(f). A macro, as a
// function of vectors belongs to an instruction set.
#define PCE_DEFINE_POLYNOMIAL(SPECIFIER, V) \
    SPECIFIER V curved(V f) { \
        V f2 = f * f, f4 = f2 * f2, f8 = f4 * f4; \
        V q0 = (1.0 / 2.0 + 1.0 / 6.0 * f) + (1.0 / 24.0 + 1.0 / 120.0 * f) * f2; \
        V q1 = (1.0 / 720.0 + 1.0 / 5040.0 * f) + (1.0 / 40320.0 + 1.0 / 362880.0 * f) * f2; \
        V q2 = (1.0 / 3628800.0 + 1.0 / 39916800.0 * f) + (1.0 / 479001600.0 + 1.0 / 6227020800.0 * f) * f2; \
        return f2 * ((q0 + q1 * f4) + q2 * f8); \
    } \
    SPECIFIER V polynomial(V f) { return curved(f) + f; } \
    SPECIFIER V short_curved(V f) { \
        V f2 = f * f; \
        V q0 = (0x1.fffffffffe069p-2 + 0x1.5555555554f97p-3 * f) + (0x1.55555565c5602p-5 + 0x1.111111170ad7ap-7 * f) * f2; \
        V q1 = (0x1.6c166be7451fep-10 + 0x1.a019c3721025ap-13 * f) + (0x1.a136b08f4d167p-16 + 0x1.72ad3afdd48dep-19 * f) * f2; \
        return f2 * (q0 + q1 * (f2 * f2)); \
    } \
    SPECIFIER V short_polynomial(V f) { return short_curved(f) + f; }
PCE_DEFINE_POLYNOMIAL(PCE_FUNCTION, double)

// 2 artanh z = log((1 + z) / (1 - z)), for |z| up to 1 / 3; and without 2 z.
#define PCE_DEFINE_TWICE_ATANH(SPECIFIER, V) \
    SPECIFIER V atanh_tail(V z) { \
        V w = z * z, q = 2.0 / 33.0 + V{}; \
        for (int k = 15; k > 0; k--) q = q * w + 2.0 / (2 * k + 1); \
        return z * (w * q); \
    } \
    SPECIFIER V twice_atanh(V z) { return atanh_tail(z) + (z + z); } \
    SPECIFIER V short_atanh_tail(V z) { \
        V w = z * z, q = 0x1.8677a4bf9332ap-3 * w + 0x1.27db2445d4862p-3; \
        q = ((q * w + 0x1.75de5d874a272p-3) * w + 0x1.c70d2f5e45807p-3) * w + 0x1.24926db12eb2ap-2; \
        q = (q * w + 0x1.99999958485b0p-2) * w + 0x1.555555555ed28p-1; \
        return z * (w * q); \
    }
PCE_DEFINE_TWICE_ATANH(PCE_FUNCTION, double)

// n and f = z + low - n log 2; from HUGE_LOGIT on f is 0, and n is beyond that of any other z.
PCE_FUNCTION Exponential<double> reduced(double z, double low) {
    double size = magnitude(z);
    if (!(size < HUGE_LOGIT)) return {z < 0.0 ? -HUGE_EXPONENT : z > 0.0 ? HUGE_EXPONENT : 0, 0.0};
    double k = rounded(z * LOG2E);
    if (!(size > NEAR)) return {int64_t(k), ((z - k * HI) - k * LO) + low};
    Pair product = two_product(k, LN2);
    double rest = (((z - product.high) - product.low) - k * LN2_REST) + low, more = rounded(rest * LOG2E);
    return {int64_t(k) + int64_t(more), rest - more * LN2};
}

// exp(-y) and exp(-y) - 1, for y >= 0.
PCE_FUNCTION Pair exp_of_minus(double y) {
    Exponential<double> e = reduced(-y, 0.0);
    double t = polynomial(e.t), value = scaled(1.0 + t, e.n);
    return {value, e.n == 0 ? t : value - 1.0};
}

// z of a logit as a number and its rounding error.
PCE_FUNCTION Pair transformed(double x, const Transform &transform) {
    if (!finite(x)) return {x, 0.0};  // a masked class stays masked under a softcap
    if (transform.softcap != 0.0) {
        double y = transform.scale * x / transform.softcap, size = magnitude(y);
        Pair e = exp_of_minus(2.0 * (size < 64.0 ? size : size == size ? 64.0 : size));
        double tanh = magnitude(e.low / (1.0 + e.high));
        return {transform.softcap * from_bits(bits(tanh) | (bits(y) & 0x8000000000000000)), 0.0};
    }
    if (transform.scale == 1.0) return {x, 0.0};
    Pair z = two_product(transform.scale, x);
    return {z.high, finite(z.high) ? z.low : 0.0};
}

// The slope of tanh at scale x / softcap.
PCE_FUNCTION double softcap_slope(double x, const Transform &transform) {
    double size = magnitude(transform.scale * x / transform.softcap);
    double e = exp_of_minus(2.0 * (size < 400.0 ? size : size == size ? 400.0 : size)).high;
    return 4.0 * e / ((1.0 + e) * (1.0 + e));
}

// n and z - n log 2 for the z of a finite logit; inlined, as many callers need n alone.
template <class Precision>
PCE_INLINED Exponential<typename Precision::Number> argument(double x, const Transform &transform);

template <> PCE_INLINED Exponential<double> argument<Double>(double x, const Transform &transform) {
    Pair z = transformed(x, transform);
    return reduced(z.high, z.low);
}

template <> PCE_INLINED Exponential<float> argument<Single>(double x, const Transform &transform) {
    if (transform.direct()) {
        float scale = narrow(transform.scale), logit = narrow(x), product = product32(scale, logit);
        if (product >= -NEAR32 && product <= NEAR32) {
            int64_t n;
            float k = whole_of_product(product, LOG2E32, n);
            return {n, fma32(k, -LO32, fma32(logit, scale, product32(k, -HI32)))};
        }
    }
    Exponential<double> e = argument<Double>(x, transform);
    return {e.n, narrow(e.t)};
}

// The exponential of z for a finite logit.
template <class Precision>
PCE_FUNCTION Exponential<typename Precision::Number> exponential(double x, const Transform &transform) {
    auto e = argument<Precision>(x, transform);
    return {e.n, polynomial(e.t)};
}
template <> PCE_FUNCTION Exponential<double> exponential<Short>(double x, const Transform &transform) {
    auto e = argument<Double>(x, transform);
    return {e.n, short_polynomial(e.t)};
}

PCE_FUNCTION uint32_t fixed_point(float t) { return uint32_t(int32_t(product32(t, 0x1p30f)) + (1 << 30)); }
PCE_FUNCTION uint64_t fixed_point(double t) { return uint64_t(int64_t(t * 0x1p62) + (int64_t(1) << 62)); }

// A normal positive v as m 2^k, with m about 1.
struct NearOne {
    double m, k;

    static PCE_FUNCTION NearOne of(double v) {
        Parts parts = split(v);
        bool low = parts.m < 0x1.6a09e667f3bcdp-1;
        return {low ? parts.m + parts.m : parts.m, double(parts.e - low)};
    }
    // The logarithm, from that of m.
    PCE_FUNCTION double with(double of_m) const { return k * HI + (of_m + k * LO); }
};

// log v of a normal positive v.
PCE_FUNCTION double log(double v) {
    NearOne n = NearOne::of(v);
    return n.with(twice_atanh((n.m - 1.0) / (n.m + 1.0)));
}

// log(1 + a) for a >= 0; both cases in one way, as a branch would be taken at random.
PCE_FUNCTION double log1p(double a) {
    Pair s = two_sum(1.0, a);
    NearOne n = NearOne::of(s.high);
    bool small = a < 0.4;
    double result = twice_atanh((small ? a : n.m - 1.0) / (small ? 2.0 + a : n.m + 1.0));
    double sum = n.with(result) + s.low / s.high;
    return small ? result : sum;
}

PCE_FUNCTION double times_log2(int64_t n) { return double(n) * HI + double(n) * LO; }

}  // namespace pce
