// The loops over the logits of a row, included once for each instruction set after `vectors.h`.
//
// A loop takes the logits of one row, at most CHUNK of them, in consecutive memory that need not be aligned; it has a
// fast way for logits that are near 0, and leaves rare cases to the scalar functions.

enum { CHUNK = 4096 };

// exp(z) = 2^n (1 + t)

INLINED Floats polynomial(Floats f) {
    Floats q = fma(floats(0x1.6db642p-10f), f, floats(0x1.123cep-7f));
    q = fma(q, f, floats(0x1.55545cp-5f));
    q = fma(q, f, floats(0x1.55548cp-3f));
    q = fma(q, f, floats(0x1p-1f));
    return fma(f * f, q, f);
}

PCE_DEFINE_POLYNOMIAL(INLINED, Doubles)

// Two vectors, one operation after the other: a processor sees two chains of dependent operations at a time.
struct Twin {
    Doubles a, b;
};
INLINED Twin operator+(Twin x, Twin y) { return {x.a + y.a, x.b + y.b}; }
INLINED Twin operator*(Twin x, Twin y) { return {x.a * y.a, x.b * y.b}; }
INLINED Twin operator+(double x, Twin y) { return {x + y.a, x + y.b}; }
INLINED Twin operator*(double x, Twin y) { return {x * y.a, x * y.b}; }
PCE_DEFINE_POLYNOMIAL(INLINED, Twin)

// The function z of a logit: the logit itself, the logit times a scale, this in float64, or with a softcap.
enum Way { PLAIN, SCALED, SCALED_IN_DOUBLE, CAPPED };

// n + MAGIC_BITS, and z - n log 2.
INLINED Doubles exponent_and_rest(Doubles z, Longs &biased) {
    Doubles shifted = z * LOG2E + MAGIC, k = shifted - MAGIC;
    biased = (Longs)shifted;
    return add_product(-k, doubles(HI), z) - k * LO;
}

using pce::power;
static inline Doubles power(Longs n) { return (Doubles)((n + 1023) << 52); }
static inline Floats power(Ints n) { return (Floats)((n + 127) << 23); }

// exp(-y) and exp(-y) - 1, for 0 <= y <= 800.
INLINED Doubles exp_of_minus(Doubles y, Doubles &less_one) {
    Longs n;
    Doubles t = polynomial(exponent_and_rest(-y, n)), one = 1.0 + t;
    n -= MAGIC_BITS;
    Longs step = n > -800 ? n : longs(-800);
    Doubles e = one * power(step) * power(n - step);
    less_one = n == 0 ? t : e - 1.0;
    return e;
}

// The slope of a softcap, from exp(-2 |y|).
INLINED Doubles slope_from(Doubles e) { return 4.0 * e / ((1.0 + e) * (1.0 + e)); }

INLINED Doubles softcap_slope(Doubles x, const Transform &transform) {
    Doubles y = transform.scale * x / transform.softcap, less_one;
    Doubles size = (Doubles)((Longs)y & INT64_MAX);
    return slope_from(exp_of_minus(2.0 * (size < 400.0 ? size : doubles(400.0)), less_one));
}

// z as a sum of two numbers and, if `slope` is given, the slope of a softcap for |z| less than 64 times the softcap.
template <Way way>
INLINED Doubles transformed(Doubles x, const Transform &transform, Doubles &low, Doubles *slope = nullptr) {
    low = Doubles{};
    if (way == PLAIN) return x;
    if (way == CAPPED) {
        Doubles y = transform.scale * x / transform.softcap, less_one;
        Longs sign = (Longs)y & INT64_MIN;
        Doubles size = (Doubles)((Longs)y ^ sign);
        Doubles e = exp_of_minus(2.0 * (size < 64.0 ? size : doubles(64.0)), less_one);
        if (slope) *slope = slope_from(e);
        return transform.softcap * (Doubles)(((Longs)(less_one / (1.0 + e)) & INT64_MAX) | sign);
    }
    Doubles scale = doubles(transform.scale), z = scale * x;
    low = rest_of_product(scale, x, z);
    return z;
}

// What `parts` of float32 adds to n.
template <Way way> constexpr int32_t BIAS = way == PLAIN || way == SCALED ? MAGIC32_BITS : 0;

// n + BIAS, and t. In the ways of float32 x may be any number below 2^22, -inf too: then n is far below that of
// others, modulo 2^32, and t is any number.
template <Way way>
INLINED void parts(Floats x, const Transform &transform, Ints &biased, Floats &t, Doubles *slopes = nullptr) {
    if (way == SCALED_IN_DOUBLE || way == CAPPED) {
        Longs wide[2];
        Doubles f[2];
        widen(x, f);
        for (int k = 0; k < 2; k++) {
            Doubles low, z = transformed<way>(f[k], transform, low, slopes ? slopes + k : nullptr);
            f[k] = exponent_and_rest(z, wide[k]);
            if (way != CAPPED) f[k] += low;
        }
        static_assert(int32_t(MAGIC_BITS) == 0);
        biased = lower_words(wide);
        t = polynomial(narrow(f));
        return;
    }
    float scale = way == SCALED ? float(transform.scale) : 1.0f;
    Floats k = fma(way == SCALED ? scale * x : x, floats(LOG2E32), floats(MAGIC32));
    biased = (Ints)k;
    k -= MAGIC32;
    Floats f = way == SCALED ? fma(x, floats(scale), -(k * HI32)) : fma(-k, floats(HI32), x);
    t = polynomial(fma(-k, floats(LO32), f));
}

using pce::fixed_point;
// 1 + t in fixed point. An addition to the exponent of t multiplies it; a t of 0 becomes a number that is cut to 0.
INLINED Unsigned fixed_point(Floats t) {
    return (Unsigned)__builtin_convertvector((Floats)((Ints)t + (Single::POINT << 23)), Ints) + (1u << Single::POINT);
}

// n + MAGIC_BITS, and t, of two vectors.
template <Way way>
INLINED void parts(const Doubles x[2], const Transform &transform, Longs biased[2], Doubles t[2],
                   Doubles *slopes = nullptr) {
    for (int k = 0; k < 2; k++) {
        Doubles low, z = transformed<way>(x[k], transform, low, slopes ? slopes + k : nullptr);
        t[k] = exponent_and_rest(z, biased[k]);
        if (way == SCALED_IN_DOUBLE) t[k] += low;
    }
    Twin both = polynomial(Twin{t[0], t[1]});
    t[0] = both.a;
    t[1] = both.b;
}

// The largest logit, or nan if there is one.
template <class T> static double largest(const T *x, long count) {
    typedef decltype(load(x)) Vector;
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    Vector top = load_some(x, 0), strange = Vector{};
    for (long i = 0; i < count; i += lanes) {
        Vector v = load_up_to(x + i, count - i);
        top = v > top ? v : top;
        strange = v == v ? strange : Vector{} + 1;
    }
    return any_less(Vector{}, strange) ? not_a_number() : largest_lane(top);
}

// The first place, from `i` on, of a logit equal to `wanted`, which may be nan; `count` if there is none.
template <class T> static long place_of(double wanted, const T *x, long i, long count) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    bool nan = wanted != wanted;
    for (; i < count; i += lanes) {
        auto v = load_up_to(x + i, count - i);
        decltype(v) number = decltype(v){} + decltype(v[0] + v[0])(wanted);
        auto found = nan ? v != v : v == number;
        if (!any_less((Ints)found, Ints{})) continue;
        for (long lane = 0; lane < lanes && i + lane < count; lane++)
            if (found[lane]) return i + lane;
    }
    return count;
}

static inline uint64_t sum_of(Words v) {
    uint64_t sum = 0;
    for (int lane = 0; lane < LANES / 2; lane++) sum += v[lane];
    return sum;
}
// Sums of neighbouring lanes.
INLINED Words pairs_of(Unsigned v) { return ((Words)v & 0xffffffff) + ((Words)v >> 32); }

// Add exponentials to a sum whose grid is at least theirs; logits below `lowest` add nothing.
//
// An exponential is fixed 2^shift, cut to a whole number, in two words of 32 bits, `low` and `high`: a shift by less
// than 0 or more than 31 gives 0. Of each word the bits above a digit's border are summed apart. What is below them has
// a sum that fits a word, and is the sum of all bits less those above, modulo 2^32.
template <Way way, class T>
static void add_exponentials(Sum &sum, const T *x, long count, float lowest, const Transform &transform) {
    constexpr int WIDTH = Single::WIDTH, ABOVE = 2 * WIDTH - 32;
    static_assert(uint64_t(CHUNK / LANES) << WIDTH <= uint64_t(1) << 32);
    const Ints unit = ints(BIAS<way> + int32_t(WIDTH * (sum.grid - 2)) + Single::POINT), next = unit + 32;
    Unsigned lows = {}, low_tops = {}, highs = {}, high_tops = {};
    for (long i = 0; i < count; i += LANES) {
        __builtin_prefetch(x + i + CHUNK, 0, 2);
        Floats v = load_up_to(x + i, count - i), counted = v, t;
        if (way == SCALED_IN_DOUBLE) counted = v > lowest ? v : floats(lowest);
        if (way == CAPPED) counted = v > lowest ? v : Floats{};
        Ints n;
        parts<way>(counted, transform, n, t);
        if (way == CAPPED) n = v > lowest ? n : unit - 64;
        Unsigned fixed = fixed_point(t);
        Unsigned low = shift_left(fixed, n - unit) | shift_right(fixed, unit - n), high = shift_right(fixed, next - n);
        lows += low;
        low_tops += low >> WIDTH;
        highs += high;
        high_tops += high >> ABOVE;
    }
    Words third = pairs_of(high_tops);
    Words second = (third << WIDTH) + pairs_of(low_tops) + (pairs_of(highs - (high_tops << ABOVE)) << (32 - WIDTH));
    Words first = (second << WIDTH) + pairs_of(lows - (low_tops << WIDTH));
    sum.limbs[0] += sum_of(first);
    sum.limbs[1] += sum_of(second);
    sum.limbs[2] += sum_of(third);
}

// Two vectors of logits, of which those that do not count are replaced.
template <Way way>
INLINED void load_pair(const double *x, long count, double lowest, Doubles v[2], Longs counts[2]) {
    for (int k = 0; k < 2; k++) {
        v[k] = load_up_to(x + k * LANES / 2, count - k * LANES / 2);
        counts[k] = v[k] > lowest;
        v[k] = counts[k] ? v[k] : doubles(way == CAPPED ? 0.0 : lowest);
    }
}

template <Way way>
static void add_exponentials(Sum &sum, const double *x, long count, double lowest, const Transform &transform) {
    constexpr int WIDTH = Double::WIDTH, POINT = Double::POINT;
    Longs unit = longs(WIDTH * (sum.grid - 2) + POINT + MAGIC_BITS);
    Words first = {}, second = {}, third = {}, above = {};
    for (long i = 0; i < count; i += LANES) {
        Doubles v[2], t[2];
        Longs n[2], counts[2];
        load_pair<way>(x + i, count - i, lowest, v, counts);
        parts<way>(v, transform, n, t);
        for (int k = 0; k < 2; k++) {
            Longs shift = n[k] - unit;
            if (way == CAPPED) shift = counts[k] ? shift : longs(-64);
            Words fixed = (Words)(truncated(t[k] * 0x1p62) + (int64_t(1) << POINT));
            // fixed 2^shift in two words
            Words low = shift_left(fixed, shift) | shift_right(fixed, -shift), high = shift_right(fixed, 64 - shift);
            first += low;
            second += low >> WIDTH;
            above += high;
            third += high >> (2 * WIDTH - 64);
        }
    }
    sum.limbs[0] += sum_of(first);
    sum.limbs[1] += sum_of(second + (above << (64 - WIDTH)));
    sum.limbs[2] += sum_of(third);
}

// Write a gradient, vector by vector, and the whole vectors past the cache if asked to. That pays if a loop waits for
// memory; in a slower loop, or if half a line is written at a time, it takes twice as long on some processors.
template <class To, class Gradient>
INLINED void write_vectors(To *out, long count, bool past_cache, Gradient gradient) {
    long i = 0;
    if constexpr (sizeof(To) > 2) {
        if (past_cache) {
            i = long(-(uintptr_t)out % (LANES * sizeof(To)) / sizeof(To));
            if (i > count) i = count;
            if (i > 0) store_up_to(out, gradient(0, i), i);
            for (; i + LANES <= count; i += LANES) stream(out + i, gradient(i, LANES));
        }
    }
    for (; i < count; i += LANES) store_up_to(out + i, gradient(i, count - i), count - i);
}

// The gradient of the logits that are near 0, without class weights and the slope of a softcap. The slope is written to
// `slopes`, which have room for a whole vector more.
template <Way way, class T, class To>
static void write_near(const T *x, To *out, long count, const RowFactor &row, float lowest, const Transform &transform,
                       double *slopes, bool past_cache) {
    constexpr bool direct = way == PLAIN || way == SCALED;
    const Floats high = floats(row.high), low = floats(row.low);
    // From `least` on a gradient is normal, and an addition to its exponent multiplies it, unless it is 0. In the ways
    // of float32 n is compared as the float32 that it comes from, as logits may be far below.
    const Ints exponent = ints(int32_t(row.exponent) - BIAS<way>), normal = ints(-125) - exponent;
    const Ints least = row.high != 0.0f ? normal : ints(direct ? 0x7f800000 : INT32_MAX);
    write_vectors(out, count, past_cache && direct, [&](long i, long some) __attribute__((always_inline)) {
        Floats v = load_up_to(x + i, some), above = v > lowest ? v : floats(way == CAPPED ? 0.0f : lowest), t;
        Ints n;
        Doubles slope[2];
        parts<way>(direct ? v : above, transform, n, t, slope);
        if (way == CAPPED)
            for (int k = 0; k < 2; k++) store(slopes + i + k * LANES / 2, slope[k]);
        Floats value = high + fma(high, t, low);
        if (direct ? any_less((Floats)n, (Floats)least) : any_less(n, least)) {
            if (direct) {
                parts<way>(above, transform, n, t);
                value = high + fma(high, t, low);
            }
            Ints sum = n + exponent, near = sum > -125 ? sum : ints(-125);
            Ints rest = sum - near > -30 ? sum - near : ints(-30);
            value = value * power(near) * power(rest);
        } else {
            value = (Floats)((Ints)value + ((n + exponent) << 23));
        }
        return way == CAPPED ? (v > lowest ? value : floats(0.0f * row.high)) : value;
    });
}

template <Way way>
static void write_near(const double *x, double *out, long count, const RowFactor &row, double lowest,
                       const Transform &transform, double *slopes, bool) {
    const Longs exponent = longs(row.exponent - MAGIC_BITS), normal = longs(MAGIC_BITS - 1000 - row.exponent);
    const Doubles m = doubles(row.m);
    for (long i = 0; i < count; i += LANES) {
        Doubles v[2], t[2];
        Longs n[2], counts[2];
        load_pair<way>(x + i, count - i, lowest, v, counts);
        Doubles slope[2];
        parts<way>(v, transform, n, t, slope);
        for (int k = 0; k < 2; k++) {
            if (way == CAPPED) store(slopes + i + k * LANES / 2, slope[k]);
            Doubles value = m + m * t[k];
            if (any_less(n[k], normal)) {
                Longs sum = n[k] + exponent, near = sum > -1020 ? sum : longs(-1020);
                Longs rest = sum - near > -60 ? sum - near : longs(-60);
                value = value * power(near) * power(rest);
            } else {
                value *= power(n[k] + exponent);
            }
            if (way == CAPPED) value = counts[k] ? value : 0.0 * m;
            store_up_to(out + i + k * LANES / 2, value, count - i - k * LANES / 2);
        }
    }
}

// Sums in digits of WIDE bits

// Some terms of a sum, each a few parts times 2^exponent, the first part the largest; unused lanes have none.
enum { TERMS = 512, PARTS = 5 };
struct Terms {
    int parts;
    double part[PARTS][TERMS];
    int64_t exponent[TERMS];
    bool scaled;  // there are exponents
};

static inline Longs biased_exponent(Doubles v) { return (Longs)v >> 52 & 0x7ff; }

// Sums of the digits of numbers below 2^WIDE, cut to a whole number after the third: whole numbers as float64.
struct WideTotal {
    Doubles first = {}, second = {}, third = {};

    __attribute__((always_inline)) void add(Doubles v) {
        constexpr double BASE = double(int64_t(1) << WIDE);
        Doubles digit = whole(v);
        third += digit;
        v = (v - digit) * BASE;
        digit = whole(v);
        second += digit;
        first += whole((v - digit) * BASE);
    }

    void add_to(uint64_t limbs[3]) const {
        uint64_t sum = uint64_t(sum_of(third));
        limbs[2] += sum;
        sum = (sum << WIDE) + uint64_t(sum_of(second));
        limbs[1] += sum;
        limbs[0] += (sum << WIDE) + uint64_t(sum_of(first));
    }

  private:
    static int64_t sum_of(Doubles v) {
        int64_t sum = 0;
        for (int lane = 0; lane < LANES / 2; lane++) sum += int64_t(v[lane]);
        return sum;
    }
};

// Add terms to a sum. Returns false, with nothing added, for numbers so large or small that they need the scalar way.
// `lowest`: the lowest grid on which no subnormal part counts.
static bool add_terms(Sum &sum, const Terms &terms, long count, int64_t lowest) {
    constexpr int lanes = LANES / 2;
    constexpr int64_t NOTHING = INT64_MIN / 2;
    Longs most = longs(NOTHING), largest = Longs{};
    for (long i = 0; i < count; i += lanes) {
        Longs e = biased_exponent(load(terms.part[0] + i));
        largest = e > largest ? e : largest;
        Longs size = terms.scaled ? e + load_bytes<Longs>(terms.exponent + i) : e;
        size = e == 0 ? longs(NOTHING) : size;
        most = size > most ? size : most;
    }
    int64_t top = NOTHING;
    for (int lane = 0; lane < lanes; lane++) {
        if (largest[lane] > 2000) return false;
        if (most[lane] > top) top = most[lane];
    }
    if (top == NOTHING) {
        for (long i = 0; i < count; i++)
            if (terms.part[0][i] != 0.0) return false;
        return true;
    }
    int64_t grid = floor_div(top - 1023, WIDE);
    if (grid < lowest && sum.grid < lowest) return false;
    sum.raise(grid);
    const Longs unit = longs(WIDE * sum.grid);
    Doubles scale = power(-unit);
    WideTotal total;
    for (long i = 0; i < count; i += lanes) {
        if (terms.scaled) {
            Longs n = load_bytes<Longs>(terms.exponent + i) - unit;
            n = n > -1022 ? n : longs(-1022);  // smaller numbers are cut off
            scale = power(n < 1023 ? n : longs(1023));
        }
        for (int part = 0; part < terms.parts; part++) total.add(load(terms.part[part] + i) * scale);
    }
    total.add_to(sum.limbs);
    return true;
}

// Add at most TERMS numbers to a sum of whole numbers and two digits after them, each digit in two halves, which are
// integers of float32. Returns false, with nothing added, if a number is not below 2^22 or the sum is on another grid.
template <class T> static bool add_numbers(Sum &sum, const T *x, long count) {
    constexpr int HALF = WIDE / 2;
    auto load_or_zeros = [&](long i) {
        typename Stored<T>::Vector zeros{};
        return count - i >= LANES ? load(x + i) : widened(load_bytes_of(x + i, count - i, zeros), x);
    };
    Ints most = {};
    for (long i = 0; i < count; i += LANES) {
        Ints size = (Ints)load_or_zeros(i) & INT32_MAX;
        most = size > most ? size : most;
    }
    if (!any_less(Ints{}, most)) return true;
    if (any_less(ints(0x4a7fffff), most)) return false;
    if (any_less(ints(0x3f7fffff), most)) sum.raise(0);
    if (sum.grid != 0) return false;
    Ints whole_numbers = {}, digits[4] = {};
    for (long i = 0; i < count; i += LANES) {
        Floats rest = load_or_zeros(i);
        auto take = [&](Ints &total) __attribute__((always_inline)) {
            Ints digit = __builtin_convertvector(rest, Ints);
            total += digit;
            rest = (rest - __builtin_convertvector(digit, Floats)) * float(1 << HALF);
        };
        take(whole_numbers);
        take(digits[0]);
        take(digits[1]);
        if (!any_less(Ints{}, (Ints)rest & INT32_MAX)) continue;
        take(digits[2]);
        take(digits[3]);
    }
    auto sum_of = [](Ints v) {
        int64_t total = 0;
        for (int lane = 0; lane < LANES; lane++) total += v[lane];
        return uint64_t(total);
    };
    uint64_t total = sum_of(whole_numbers);
    sum.limbs[2] += total;
    for (int j = 1; j >= 0; j--) {
        int half = 2 - 2 * j;
        total = (total << WIDE) + (sum_of(digits[half]) << HALF) + sum_of(digits[half + 1]);
        sum.limbs[j] += total;
    }
    return true;
}

static inline Doubles product_and_rest(Doubles a, Doubles b, Doubles &rest) {
    Doubles p = a * b;
    rest = rest_of_product(a, b, p);
    return p;
}

// Fill terms exp(z) z of at most TERMS logits. Returns false if one is neither masked nor near 0.
template <Way way, class T>
static bool fill_entropies(Terms &terms, const T *x, long count, float lowest, const Transform &transform) {
    constexpr Way IN_DOUBLE = way == SCALED ? SCALED_IN_DOUBLE : way;
    terms.parts = way == PLAIN ? 2 : 3;
    terms.scaled = true;
    Ints strange = Ints{};
    for (long i = 0; i < count; i += LANES) {
        Floats v = load_up_to(x + i, count - i);
        Ints masked = v == -__builtin_inff(), n;
        strange |= ~(masked | (v >= lowest));
        v = masked ? Floats{} : v;
        Floats t;
        parts<way>(v, transform, n, t);
        Ints fixed = masked ? Ints{} : (Ints)fixed_point(t);
        Longs n_of[2], fixed_of[2];
        widen(n - (BIAS<way> + Single::POINT), n_of);
        widen(fixed, fixed_of);
        Doubles wide[2];
        widen(v, wide);
        for (int half = 0; half < 2; half++) {
            Doubles low, rest, factor = __builtin_convertvector(fixed_of[half], Doubles);
            Doubles z = transformed<IN_DOUBLE>(wide[half], transform, low);
            long at = i + half * LANES / 2;
            store(terms.part[0] + at, product_and_rest(factor, z, rest));
            store(terms.part[1] + at, rest);
            if (way != PLAIN) store(terms.part[2] + at, factor * low);
            store_bytes(terms.exponent + at, n_of[half]);
        }
    }
    return !any_less(strange, Ints{});
}

template <Way way>
static bool fill_entropies(Terms &terms, const double *x, long count, double lowest, const Transform &transform) {
    terms.parts = way == PLAIN ? 4 : 5;
    terms.scaled = true;
    Longs strange = Longs{};
    for (long i = 0; i < count; i += LANES) {
        Doubles v[2] = {load_up_to(x + i, count - i), load_up_to(x + i + LANES / 2, count - i - LANES / 2)}, t[2];
        Longs n[2], masked[2];
        for (int k = 0; k < 2; k++) {
            masked[k] = v[k] == -infinity();
            strange |= ~(masked[k] | (v[k] >= lowest));
            v[k] = masked[k] ? Doubles{} : v[k];
        }
        parts<way>(v, transform, n, t);
        for (int k = 0; k < 2; k++) {
            Words fixed = (Words)(truncated(t[k] * 0x1p62) + (int64_t(1) << Double::POINT));
            fixed = masked[k] ? Words{} : fixed;
            // Integers of 31 and 32 bits as float64, by way of the low bits of 2^52
            constexpr uint64_t INTEGER = 0x4330000000000000;
            Doubles upper = ((Doubles)(fixed >> 32 | INTEGER) - 0x1p52) * 0x1p32;
            Doubles lower = (Doubles)((fixed & 0xffffffff) | INTEGER) - 0x1p52;
            Doubles low, rest[2], z = transformed<way>(v[k], transform, low);
            Longs tiny = (z < 0x1p-900) & (z > -0x1p-900) & (z != 0.0);  // some part may be subnormal
            strange |= tiny;
            long at = i + k * LANES / 2;
            store(terms.part[0] + at, product_and_rest(upper, z, rest[0]));
            store(terms.part[1] + at, rest[0]);
            store(terms.part[2] + at, product_and_rest(lower, z, rest[1]));
            store(terms.part[3] + at, rest[1]);
            if (way != PLAIN) store(terms.part[4] + at, __builtin_convertvector((Longs)fixed, Doubles) * low);
            store_bytes(terms.exponent + at, n[k] - (MAGIC_BITS + Double::POINT));
        }
    }
    return !any_less(strange, Longs{});
}

// Fill terms u z of at most TERMS logits; u has room for a whole vector more. Returns false if a masked class has a
// weight, or a logit or a weight is not finite.
template <Way way, class T>
static bool fill_weighted(Terms &terms, const T *x, const double *u, bool ones, long count,
                          const Transform &transform) {
    constexpr bool plain = way == PLAIN;
    terms.parts = plain && ones ? 1 : 2;
    terms.scaled = false;
    Longs strange = Longs{};
    for (long i = 0; i < count; i += LANES) {
        Doubles wide[2];
        load_wide(x + i, count - i, wide);
        for (int k = 0; k < 2; k++) {
            Doubles v = wide[k], weight = load(u + i + k * LANES / 2), low, rest;
            Longs usable = (v < infinity()) & (v > -infinity());
            strange |= (v == -infinity()) & (weight != 0.0);
            v = usable ? v : Doubles{};
            Doubles z = transformed<way>(v, transform, low);
            store(terms.part[0] + i + k * LANES / 2, product_and_rest(weight, z, rest));
            if (terms.parts > 1) store(terms.part[1] + i + k * LANES / 2, plain ? rest : rest + weight * low);
        }
    }
    return !any_less(strange, Longs{});
}

// Finish gradients and write them to `out`: those of statistics have a factor more, where there are weights weight_factor
// u is subtracted, and a softcap has a slope. u has room for a whole vector more.
template <Way way, class Number, class T>
static void finish_near(const Number *values, const T *x, T *out, const double *u, const double *slopes, long count,
                        const RowFactor &row, const Call &call) {
    const Transform &transform = call.transform;
    const double far = 63.0 * transform.softcap / transform.scale;
    for (long i = 0; i < count; i += LANES) {
        Doubles value[2], logit[2];
        load_wide(values + i, count - i, value);
        load_wide(x + i, count - i, logit);
        for (int k = 0; k < 2; k++) {
            if (call.has(ENTROPY)) {
                Doubles low, z = transformed<way>(logit[k], transform, low);
                Doubles factor = row.constant + row.slope * ((z - row.origin.high) + (low - row.origin.low));
                value[k] = value[k] == 0.0 ? Doubles{} : value[k] * factor + 0.0;  // never -0.0
            }
            if (u) value[k] = value[k] - row.weight_factor * load(u + i + k * LANES / 2);
            if (way == CAPPED) {
                Longs rare = ~((logit[k] < far) & (logit[k] > -far));
                Doubles slope = load(slopes + i + k * LANES / 2);
                value[k] = value[k] * (any_less(rare, Longs{}) ? softcap_slope(logit[k], transform) : slope);
            }
            value[k] = value[k] == value[k] ? value[k] : doubles(not_a_number());
        }
        store_narrow(out + i, count - i, value);
    }
}
