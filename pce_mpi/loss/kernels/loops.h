// The loops over the logits of a row, included once for each instruction set, inside a namespace of its own.
//
// Defined by whoever includes this: VECTOR_BYTES, `fma` on its vectors and, with HARDWARE_HALVES, `load_halves` and
// `store_halves`. Vectors are those of GCC and Clang. A loop takes the logits of one row, at most CHUNK of them, in
// consecutive memory that need not be aligned; it has a fast way for logits that are near 0, and leaves what is rare to
// the scalar functions.

enum { LANES = VECTOR_BYTES / 4 };
constexpr int64_t UPPER_BITS = 0x4538000000000000;  // 0x1.8p84
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t Longs __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef float HalfFloats __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int32_t HalfInts __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES / 2)));

template <class Vector> static inline Vector load_bytes(const void *p) {
    Vector v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class Vector> static inline void store_bytes(void *p, Vector v) { memcpy(p, &v, sizeof v); }
static inline Floats floats(float v) { return v - Floats{}; }  // keeps -0.0
static inline Doubles doubles(double v) { return v - Doubles{}; }
static inline Longs longs(int64_t v) { return Longs{} + v; }

#ifdef HARDWARE_HALVES
static inline Floats from_halves(Shorts h) { return load_halves(h); }
static inline Shorts to_halves(Floats v) { return store_halves(v); }
#else
typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
static inline Floats from_halves(Shorts h) {
    Unsigned wide = __builtin_convertvector(h, Unsigned), u = (wide & 0x7fff) << 13;
    Unsigned b = (Unsigned)((Floats)u * 0x1p112f);  // exact, for subnormal halves too
    b = u >= 0x0f800000 ? u | 0x7f800000 : b;
    return (Floats)(b | (wide & 0x8000) << 16);
}
static inline Shorts to_halves(Floats v) {
    Unsigned b = (Unsigned)v, sign = b >> 16 & 0x8000;
    b &= 0x7fffffff;
    Unsigned subnormal = (Unsigned)((Floats)b + 0.5f) - 0x3f000000, normal = (b + 0xc8000fff + (b >> 13 & 1)) >> 13;
    Unsigned special = b > 0x7f800000 ? Unsigned{} + 0x7e00 : Unsigned{} + 0x7c00;
    Unsigned h = b < 0x38800000 ? subnormal : b < 0x47800000 ? normal : special;
    return __builtin_convertvector(h | sign, Shorts);
}
#endif

static inline Floats load(const float *p) { return load_bytes<Floats>(p); }
static inline Floats load(const Half *p) { return from_halves(load_bytes<Shorts>(p)); }
static inline Floats load(const BFloat *p) {
    typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
    return (Floats)(__builtin_convertvector(load_bytes<Shorts>(p), Unsigned) << 16);
}
static inline void store(float *p, Floats v) { store_bytes(p, v); }
static inline void store(Half *p, Floats v) { store_bytes(p, to_halves(v)); }
static inline void store(BFloat *p, Floats v) {
    typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
    Unsigned b = (Unsigned)v;
    store_bytes(p, __builtin_convertvector((b + 0x7fff + (b >> 16 & 1)) >> 16, Shorts));
}
static inline Doubles load(const double *p) { return load_bytes<Doubles>(p); }
static inline void store(double *p, Doubles v) { store_bytes(p, v); }

// The last few of a row, filled up with masked classes.
template <class T> static inline auto load_some(const T *p, long count) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    T some[lanes];
    for (int i = 0; i < lanes; i++) some[i] = i < count ? p[i] : masked<T>();
    return load(some);
}
template <class T> static inline auto load_up_to(const T *p, long count) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    return count >= lanes ? load(p) : load_some(p, count);
}
template <class T, class Vector> static inline void store_up_to(T *p, Vector v, long count) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    if (count >= lanes) return store(p, v);
    T some[lanes];
    store(some, v);
    memcpy(p, some, count * sizeof(T));
}

// exp(z) = 2^n (1 + t)

static inline Floats polynomial(Floats f) {
    Floats q = fma(floats(0x1.6db642p-10f), f, floats(0x1.123cep-7f));
    q = fma(q, f, floats(0x1.55545cp-5f));
    q = fma(q, f, floats(0x1.55548cp-3f));
    q = fma(q, f, floats(0x1p-1f));
    return fma(f * f, q, f);
}

PCE_DEFINE_POLYNOMIAL(static inline, Doubles)

// How z is made of a logit: the logit itself, times a scale, or in float64 (of any scale, with a softcap).
enum Way { PLAIN, SCALED, CAPPED };

static inline Doubles exponent_and_rest(Doubles z, Doubles low, Longs &n) {
    Doubles shifted = z * LOG2E + MAGIC, k = shifted - MAGIC;
    n = (Longs)shifted - MAGIC_BITS;
    return ((z - k * HI) - k * LO) + low;
}

static inline Doubles upper_half(Doubles a) {
    Doubles c = 134217729.0 * a;
    return c - (c - a);
}

using pce::power;
static inline Doubles power(Longs n) { return (Doubles)((n + 1023) << 52); }

// exp(-y) for 0 <= y <= 800, and minus 1.
static inline Doubles exp_of_minus(Doubles y, Doubles &less_one) {
    Longs n;
    Doubles t = polynomial(exponent_and_rest(-y, Doubles{}, n)), one = 1.0 + t;
    Longs step = n > -800 ? n : longs(-800);
    Doubles e = one * power(step) * power(n - step);
    less_one = n == 0 ? t : e - 1.0;
    return e;
}

template <Way way> static inline Doubles transformed(Doubles x, const Transform &transform, Doubles &low) {
    low = Doubles{};
    if (way == PLAIN) return x;
    if (transform.softcap != 0.0) {
        Doubles y = transform.scale * x / transform.softcap, less_one;
        Longs sign = (Longs)y & INT64_MIN;
        Doubles size = (Doubles)((Longs)y ^ sign);
        Doubles e = exp_of_minus(2.0 * (size < 64.0 ? size : doubles(64.0)), less_one);
        return transform.softcap * (Doubles)(((Longs)(less_one / (1.0 + e)) & INT64_MAX) | sign);
    }
    Doubles z = transform.scale * x, a1 = upper_half(doubles(transform.scale)), a2 = transform.scale - a1;
    Doubles b1 = upper_half(x), b2 = x - b1;
    low = ((a1 * b1 - z) + a1 * b2 + a2 * b1) + a2 * b2;
    return z;
}

template <Way way> static inline void parts(Floats x, const Transform &transform, Ints &n, Floats &t) {
    if (way == CAPPED) {
        Longs n_of[2];
        HalfFloats f_of[2], x_of[2];
        memcpy(x_of, &x, sizeof x);
        for (int half = 0; half < 2; half++) {
            Doubles low, z = transformed<CAPPED>(__builtin_convertvector(x_of[half], Doubles), transform, low);
            f_of[half] = __builtin_convertvector(exponent_and_rest(z, low, n_of[half]), HalfFloats);
        }
        HalfInts narrow[2] = {__builtin_convertvector(n_of[0], HalfInts), __builtin_convertvector(n_of[1], HalfInts)};
        Floats f;
        memcpy(&f, f_of, sizeof f);
        memcpy(&n, narrow, sizeof n);
        t = polynomial(f);
        return;
    }
    float scale = way == SCALED ? float(transform.scale) : 1.0f;
    Floats k = fma(way == SCALED ? scale * x : x, floats(LOG2E32), floats(MAGIC32));
    n = (Ints)k - MAGIC32_BITS;
    k -= MAGIC32;
    Floats f = way == SCALED ? fma(x, floats(scale), -(k * HI32)) : fma(-k, floats(HI32), x);
    t = polynomial(fma(-k, floats(LO32), f));
}

template <Way way> static inline void parts(Doubles x, const Transform &transform, Longs &n, Doubles &t) {
    Doubles low, z = transformed<way>(x, transform, low);
    t = polynomial(exponent_and_rest(z, low, n));
}

// The integer part of numbers below 2^62.
static inline Longs truncated(Doubles v) {
#if VECTOR_BYTES == 64
    return __builtin_convertvector(v, Longs);
#else
    // In two parts, each rounded to an integer that stands in the low bits of a float64.
    Doubles upper = v + 0x1.8p84, rest = v - (upper - 0x1.8p84), lower = rest + MAGIC, rounded = lower - MAGIC;
    Longs too_far = v > 0.0 ? (Longs)(rounded > rest) : -(Longs)(rounded < rest);
    return (((Longs)upper - UPPER_BITS) << 32) + ((Longs)lower - MAGIC_BITS) + too_far;
#endif
}

// Largest logit, or nan if there is a nan or +inf.
template <class T> static double largest(const T *x, long count) {
    typedef decltype(load(x)) Vector;
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    Vector top = load_some(x, 0), strange = Vector{};
    long i = 0;
    for (; i < count; i += lanes) {
        Vector v = load_up_to(x + i, count - i);
        top = v > top ? v : top;
        strange = v < __builtin_inff() ? strange : Vector{} + 1;
    }
    double result = -infinity();
    for (int lane = 0; lane < lanes; lane++) {
        if (strange[lane] != 0) return not_a_number();
        if (top[lane] > result) result = top[lane];
    }
    return result;
}

// Add exponentials to a sum whose grid is at least theirs; logits below `lowest` count for nothing.
template <Way way, class T>
static void add_exponentials(Sum &sum, const T *x, long count, float lowest, const Transform &transform) {
    Ints limit = Ints{} + int32_t(sum.grid * 21 + 20);
    Words total[3] = {};
    for (long i = 0; i < count; i += LANES) {
        Floats v = load_up_to(x + i, count - i);
        Ints n;
        Floats t;
        parts<way>(v > lowest ? v : floats(way == CAPPED ? 0.0f : lowest), transform, n, t);
        Ints shift = limit - n;
        shift = shift < 63 ? shift : Ints{} + 63;
        if (way == CAPPED) shift = v > lowest ? shift : Ints{} + 63;
        Ints fixed = __builtin_convertvector(t * 0x1p30f, Ints) + (1 << 30);
        Words even = ((Words)fixed << 32) >> ((Words)shift & 0xffffffff);
        Words odd = ((Words)fixed & 0xffffffff00000000) >> ((Words)shift >> 32);
        total[0] += even;
        total[0] += odd;
        total[1] += even >> 21;
        total[1] += odd >> 21;
        total[2] += even >> 42;
        total[2] += odd >> 42;
    }
    for (int j = 0; j < 3; j++)
        for (int lane = 0; lane < LANES / 2; lane++) sum.limbs[j] += total[j][lane];
}

template <Way way>
static void add_exponentials(Sum &sum, const double *x, long count, double lowest, const Transform &transform) {
    Longs start = longs(10 - 36 * sum.grid);
    Words total[3] = {};
    for (long i = 0; i < count; i += LANES / 2) {
        Doubles v = load_up_to(x + i, count - i);
        Longs n;
        Doubles t;
        parts<way>(v > lowest ? v : doubles(way == CAPPED ? 0.0 : lowest), transform, n, t);
        Longs s = start + n;
        if (way == CAPPED) s = v > lowest ? s : longs(-200);
        Words fixed = (Words)(truncated(t * 0x1p62) + (int64_t(1) << 62));
        // fixed 2^s in two words, and its limbs; fixed is below 2^63.
        Longs left = s > 0 ? s : Longs{}, right = left - s, above = s > 1 ? 64 - s : longs(63);
        right = right < 63 ? right : longs(63);
        Words low = (fixed << (Words)left) >> (Words)right, high = fixed >> (Words)above;
        total[0] += low;
        total[1] += low >> 36 | high << 28;
        total[2] += high >> 8;
    }
    for (int j = 0; j < 3; j++)
        for (int lane = 0; lane < LANES / 2; lane++) sum.limbs[j] += total[j][lane];
}

// The gradient of the logits that are near 0, without class weights.
template <Way way, class T>
static void write_near(const T *x, T *out, long count, const RowFactor &row, float lowest, const Transform &transform) {
    Floats high = floats(row.high), low = floats(row.low);
    Ints exponent = Ints{} + int32_t(row.exponent);
    for (long i = 0; i < count; i += LANES) {
        Floats v = load_up_to(x + i, count - i);
        Ints n;
        Floats t;
        parts<way>(v > lowest ? v : floats(way == CAPPED ? 0.0f : lowest), transform, n, t);
        n += exponent;
        Ints near = n > -125 ? n : Ints{} - 125;
        near = near < 127 ? near : Ints{} + 127;
        Ints rest = n - near;
        rest = rest > -30 ? rest : Ints{} - 30;
        rest = rest < 30 ? rest : Ints{} + 30;
        Floats value = (high + fma(high, t, low)) * (Floats)((near + 127) << 23) * (Floats)((rest + 127) << 23);
        if (way == CAPPED) value = v > lowest ? value : floats(0.0f * row.high);
        store_up_to(out + i, value, count - i);
    }
}

template <Way way>
static void write_near(const double *x, double *out, long count, const RowFactor &row, double lowest,
                       const Transform &transform) {
    Longs exponent = longs(row.exponent);
    for (long i = 0; i < count; i += LANES / 2) {
        Doubles v = load_up_to(x + i, count - i);
        Longs n;
        Doubles t;
        parts<way>(v > lowest ? v : doubles(way == CAPPED ? 0.0 : lowest), transform, n, t);
        n += exponent;
        Longs near = n > -1020 ? n : longs(-1020);
        near = near < 1023 ? near : longs(1023);
        Longs rest = n - near;
        rest = rest > -60 ? rest : longs(-60);
        rest = rest < 60 ? rest : longs(60);
        Doubles value = (row.m + row.m * t) * power(near) * power(rest);
        if (way == CAPPED) value = v > lowest ? value : doubles(0.0 * row.m);
        store_up_to(out + i, value, count - i);
    }
}

// Sums in digits of WIDE bits

// Some terms, (high + low) 2^exponent, and `more` 2^exponent where z is no logit; unused lanes are 0.
enum { TERMS = 512 };
struct Terms {
    double high[TERMS], low[TERMS], more[TERMS];
    int64_t exponent[TERMS];
};

static inline Longs biased_exponent(Doubles v) { return (Longs)v >> 52 & 0x7ff; }

static inline void add_part(Words total[3], Doubles part, Longs exponent) {
    Longs e = biased_exponent(part), sign = (Longs)part >> 63;
    Words m = (Words)(((Longs)part & 0xfffffffffffff) | ((int64_t)1 << 52));
    m = e == 0 ? Words{} : m;  // a subnormal number is below any unit that there is
    Longs shift = e - 1075 + exponent, left = shift > 0 ? shift : Longs{}, right = left - shift;
    right = right < 63 ? right : longs(63);
    Words low = (m << (Words)left) >> (Words)right, high = (m >> 1) >> (Words)(63 - left);
    Words limbs[3] = {low, low >> 36 | high << 28, high >> 8};
    for (int j = 0; j < 3; j++) total[j] += (limbs[j] ^ (Words)sign) - (Words)sign;
}

// Add terms to a sum. Returns false, with nothing added, for numbers so large or small that they need the scalar way.
// `lowest`: the lowest grid on which no subnormal part counts.
static bool add_terms(Sum &sum, const Terms &terms, long count, int parts, int64_t lowest) {
    constexpr int lanes = LANES / 2;
    constexpr int64_t NOTHING = INT64_MIN / 2;
    Longs most = longs(NOTHING), strange = Longs{};
    for (long i = 0; i < count; i += lanes) {
        Longs e = biased_exponent(load(terms.high + i));
        Longs size = e + load_bytes<Longs>(terms.exponent + i);
        size = e == 0 ? longs(NOTHING) : size;
        most = size > most ? size : most;
        strange |= e > 2000;
        strange |= (e == 0) & ((Longs)load(terms.high + i) << 1 != 0);
        if (parts > 1) strange |= biased_exponent(load(terms.low + i)) > 2000;
        if (parts > 2) strange |= biased_exponent(load(terms.more + i)) > 2000;
    }
    int64_t top = NOTHING;
    for (int lane = 0; lane < lanes; lane++) {
        if (strange[lane]) return false;
        if (most[lane] > top) top = most[lane];
    }
    if (top == NOTHING) return true;
    int64_t grid = floor_div(top - 1023, WIDE);
    if (grid < lowest && sum.grid < lowest) return false;
    sum.raise(grid);
    int64_t unit = WIDE * (sum.grid - 2);
    Words total[3] = {};
    for (long i = 0; i < count; i += lanes) {
        Longs exponent = load_bytes<Longs>(terms.exponent + i) - unit;
        add_part(total, load(terms.high + i), exponent);
        if (parts > 1) add_part(total, load(terms.low + i), exponent);
        if (parts > 2) add_part(total, load(terms.more + i), exponent);
    }
    for (int j = 0; j < 3; j++)
        for (int lane = 0; lane < lanes; lane++) sum.limbs[j] += total[j][lane];
    return true;
}

static inline Doubles product_and_rest(Doubles a, Doubles b, Doubles &rest) {
    Doubles p = a * b, a1 = upper_half(a), a2 = a - a1, b1 = upper_half(b), b2 = b - b1;
    rest = ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2;
    return p;
}

// Fill terms exp(z) z of at most TERMS logits. Returns false if one is neither masked nor near 0.
template <Way way, class T>
static bool fill_entropies(Terms &terms, const T *x, long count, float lowest, const Transform &transform) {
    constexpr Way IN_DOUBLE = way == PLAIN ? PLAIN : CAPPED;
    Ints strange = Ints{};
    for (long i = 0; i < count; i += LANES) {
        Floats v = load_up_to(x + i, count - i);
        Ints masked = v == -__builtin_inff(), n;
        strange |= ~(masked | (v >= lowest));
        v = masked ? Floats{} : v;
        Floats t;
        parts<way>(v, transform, n, t);
        Ints fixed = __builtin_convertvector(t * 0x1p30f, Ints) + (1 << 30);
        HalfFloats v_of[2];
        HalfInts n_of[2], fixed_of[2], masked_of[2];
        memcpy(v_of, &v, sizeof v);
        memcpy(n_of, &n, sizeof n);
        memcpy(fixed_of, &fixed, sizeof fixed);
        memcpy(masked_of, &masked, sizeof masked);
        for (int half = 0; half < 2; half++) {
            Doubles low, rest, factor = __builtin_convertvector(fixed_of[half], Doubles);
            Doubles z = transformed<IN_DOUBLE>(__builtin_convertvector(v_of[half], Doubles), transform, low);
            Longs gone = __builtin_convertvector(masked_of[half], Longs);
            z = gone ? Doubles{} : z;
            long at = i + half * LANES / 2;
            store(terms.high + at, product_and_rest(factor, z, rest));
            store(terms.low + at, rest);
            if (way != PLAIN) store(terms.more + at, gone ? Doubles{} : factor * low);
            store_bytes(terms.exponent + at, __builtin_convertvector(n_of[half], Longs) - 30);
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        if (strange[lane]) return false;
    return true;
}

// Fill terms u z of at most TERMS logits, which end with zeros. Returns false if a masked class has a weight.
static bool fill_weighted(Terms &terms, const double *x, const double *u, long count, bool plain,
                          const Transform &transform) {
    Longs strange = Longs{};
    for (long i = 0; i < count; i += LANES / 2) {
        Doubles v = load(x + i), weight = load(u + i), low, rest;
        Longs usable = (v < infinity()) & (v > -infinity());
        strange |= (v == -infinity()) & (weight != 0.0);
        v = usable ? v : Doubles{};
        Doubles z = plain ? transformed<PLAIN>(v, transform, low) : transformed<CAPPED>(v, transform, low);
        store(terms.high + i, product_and_rest(weight, z, rest));
        store(terms.low + i, rest + weight * low);
        store_bytes(terms.exponent + i, Longs{});
    }
    for (int lane = 0; lane < LANES / 2; lane++)
        if (strange[lane]) return false;
    return true;
}

static inline Doubles load_wide(const double *p) { return load(p); }
static inline Doubles load_wide(const float *p) { return __builtin_convertvector(load_bytes<HalfFloats>(p), Doubles); }
static inline void store_narrow(double *p, Doubles v) { store(p, v); }
static inline void store_narrow(float *p, Doubles v) { store_bytes(p, __builtin_convertvector(v, HalfFloats)); }

static inline Doubles softcap_slope(Doubles x, const Transform &transform) {
    Doubles y = transform.scale * x / transform.softcap, less_one;
    Doubles size = (Doubles)((Longs)y & INT64_MAX);
    Doubles e = exp_of_minus(2.0 * (size < 400.0 ? size : doubles(400.0)), less_one);
    return 4.0 * e / ((1.0 + e) * (1.0 + e));
}

// Subtract weight_factor u from gradients, if there are weights, and multiply them by the slope of a softcap. All
// arrays have room for a whole vector more.
template <class Number>
static void finish_near(Number *gradients, const Number *x, const double *u, long count, double weight_factor,
                        const Transform &transform) {
    for (long i = 0; i < count; i += LANES / 2) {
        Doubles value = load_wide(gradients + i);
        if (u) value = value - weight_factor * load(u + i);
        if (transform.softcap != 0.0) value = value * softcap_slope(load_wide(x + i), transform);
        store_narrow(gradients + i, value);
    }
}
