// The loops over the logits of a row, included once for each instruction set after `vectors.h`.
//
// A loop takes the logits of one row, at most CHUNK of them, in consecutive memory that need not be aligned; it has a
// fast way for logits that are near 0, and leaves rare cases to the scalar functions.

enum { CHUNK = 4096 };

// exp(z) = 2^n (1 + t)

template <Floats (*add)(Floats, Floats, Floats)> INLINED Floats polynomial(Floats f) {
    Floats q = add(floats(0x1.6db642p-10f), f, floats(0x1.123cep-7f));
    q = add(q, f, floats(0x1.55545cp-5f));
    q = add(q, f, floats(0x1.55548cp-3f));
    q = add(q, f, floats(0x1p-1f));
    return add(f * f, q, f);
}
INLINED Floats polynomial(Floats f) { return polynomial<fma>(f); }

PCE_DEFINE_POLYNOMIAL(INLINED, Doubles)
PCE_DEFINE_TWICE_ATANH(INLINED, Doubles)

// Two vectors, one operation after the other: a processor sees two chains of dependent operations at a time.
struct Twin {
    Doubles a, b;
};
INLINED Twin operator+(Twin x, Twin y) { return {x.a + y.a, x.b + y.b}; }
INLINED Twin operator*(Twin x, Twin y) { return {x.a * y.a, x.b * y.b}; }
INLINED Twin operator+(double x, Twin y) { return {x + y.a, x + y.b}; }
INLINED Twin operator*(double x, Twin y) { return {x * y.a, x * y.b}; }
PCE_DEFINE_POLYNOMIAL(INLINED, Twin)

// The function z of a logit: the logit itself, the logit times a scale, this in float64, or with a softcap. In float32
// the last two are REDUCED by a loop of their own: n, and z - n log 2 in place of the logit.
enum Way { PLAIN, SCALED, SCALED_IN_DOUBLE, CAPPED, REDUCED };

constexpr bool is_direct(Way way) { return way == PLAIN || way == SCALED; }

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

// z of a softcap by an approximation for |y| <= 1, with an error below |z| 2^-46: y times a polynomial of y^2.
INLINED Doubles near_capped(Doubles x, const Transform &transform) {
    constexpr double FACTORS[] = {0x1.ffffffffffff1p-1, -0x1.5555555552851p-2, 0x1.1111110fa1769p-3,
                                  -0x1.ba1ba125ae1fap-5, 0x1.664f38cc44f3bp-6, -0x1.226d34cb9f78fp-7,
                                  0x1.d6be73df2922dp-9, -0x1.7d07485ca9072p-10, 0x1.3231a817e2f1bp-11,
                                  -0x1.de0dffec9bd96p-13, 0x1.5721b535f762bp-14, -0x1.98cb7afdba537p-16,
                                  0x1.563125ac0b575p-18, -0x1.211c7373454bbp-21};
    constexpr int COUNT = 14;
    double ratio = transform.scale / transform.softcap, factor = transform.scale, of_logit[COUNT];
    for (int k = 0; k < COUNT; k++, factor *= ratio * ratio) of_logit[k] = factor * FACTORS[k];
    Doubles power = x * x, sums[COUNT / 2];
    for (int k = 0; k < 7; k++) sums[k] = add_product(power, doubles(of_logit[2 * k + 1]), doubles(of_logit[2 * k]));
    power *= power;
    for (int k = 0; k < 3; k++) sums[k] = add_product(power, sums[2 * k + 1], sums[2 * k]);
    power *= power;
    Doubles upper = add_product(power, sums[6], sums[2]), lower = add_product(power, sums[1], sums[0]);
    return x * add_product(power * power, upper, lower);
}

// n + MAGIC_BITS, and z - n log 2 rounded to float32.
template <Way way>
INLINED void reduce(Floats x, const Transform &transform, Ints &n, Floats &rest, Doubles slopes[2]) {
    Longs wide[2];
    Doubles f[2];
    widen(x, f);
    for (int k = 0; k < 2; k++) {
        Doubles low, z = transformed<way>(f[k], transform, low, way == CAPPED ? slopes + k : nullptr);
        f[k] = exponent_and_rest(z, wide[k]);
        if (way != CAPPED) f[k] += low;
    }
    static_assert(int32_t(MAGIC_BITS) == 0);
    n = lower_words(wide);
    rest = narrow(f);
}

// The same of a softcap by an approximation of z. Returns whether n and the rest are surely those of the exact way; the
// error of slopes is below 2^-42 of them.
INLINED bool reduce_near(Floats x, const Transform &transform, Ints &n, Floats &rest, Doubles slopes[2]) {
    constexpr float BORDER = 0.346573f;  // of n: log 2 / 2 less 6e-7
    // Of other ratios a power, or that of a logit, may be subnormal.
    const double ratio = transform.scale / transform.softcap;
    const float far = ratio <= 0x1p32 && ratio >= 0x1p-32 ? float(1.0 / ratio) : 0.0f;
    const Doubles inverse = doubles(1.0 / transform.softcap);
    Longs wide[2];
    Doubles most[2], least[2], logit[2];
    widen(x, logit);
    for (int k = 0; k < 2; k++) {
        Doubles z = near_capped(logit[k], transform), tanh = z * inverse;
        Doubles shifted = add_product(z, doubles(LOG2E), doubles(MAGIC)), whole = shifted - MAGIC;
        Doubles f = add_product(whole, doubles(-LO), add_product(whole, doubles(-HI), z));
        wide[k] = (Longs)shifted;
        most[k] = add_product(z, doubles(0x1p-45), f);
        least[k] = add_product(z, doubles(-0x1p-45), f);
        slopes[k] = add_product(tanh, -tanh, doubles(1.0));
    }
    rest = narrow(most);
    n = lower_words(wide);
    Floats size = (Floats)((Ints)rest & INT32_MAX), logit_size = (Floats)((Ints)x & INT32_MAX);
    return !any_less(ints(-1), (rest == narrow(least)) & (size < BORDER) & (logit_size < far));
}

// Some logits reduced. A processor works on more vectors at a time if a loop is short.
enum { BLOCK = 1024 };
struct Reduced {
    float rest[BLOCK];
    int32_t n[BLOCK];
};

template <Way way, bool with_slopes, class T>
static void reduce(Reduced &result, const T *x, long count, float lowest, const Transform transform, double *slope) {
    constexpr int32_t NOTHING = -(1 << 24);  // n of a masked class
    for (long i = 0; i < count; i += LANES) {
        Floats v = load_up_to(x + i, count - i), rest;
        Ints counts = v > lowest, n;
        Doubles slopes[2] = {};
        v = counts ? v : floats(way == CAPPED ? 0.0f : lowest);
        if (way != CAPPED || !reduce_near(v, transform, n, rest, slopes)) reduce<way>(v, transform, n, rest, slopes);
        store(result.rest + i, rest);
        store_bytes(result.n + i, way == CAPPED ? (counts ? n : ints(NOTHING)) : n);
        for (int k = 0; with_slopes && k < 2; k++) store(slope + i + k * LANES / 2, slopes[k]);
    }
}

// What `parts` of float32 adds to n.
template <Way way> constexpr int32_t BIAS = way == PLAIN || way == SCALED ? MAGIC32_BITS : 0;

// n + BIAS, and t. In the ways of float32 x may be any number below 2^22, -inf too: then n is far below that of
// others, modulo 2^32, and t is any number.
template <Way way> INLINED void parts(Floats x, const int32_t *n, const Transform &transform, Ints &biased, Floats &t) {
    if (way == REDUCED) {
        biased = load_bytes<Ints>(n);
        t = polynomial(x);
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
                   Doubles *slopes = nullptr, bool is_short = false) {
    for (int k = 0; k < 2; k++) {
        Doubles low, z = transformed<way>(x[k], transform, low, slopes ? slopes + k : nullptr);
        t[k] = exponent_and_rest(z, biased[k]);
        if (way == SCALED_IN_DOUBLE) t[k] += low;
    }
    Twin both = is_short ? short_polynomial(Twin{t[0], t[1]}) : polynomial(Twin{t[0], t[1]});
    t[0] = both.a;
    t[1] = both.b;
}

// The largest of the logits in some vectors, or nan if there is one.
template <class Vector> struct Top {
    Vector top, strange = Vector{};

    __attribute__((always_inline)) void add(Vector v) {
        top = v > top ? v : top;
        strange = v == v ? strange : Vector{} + 1;
    }
    double value() const { return any_less(Vector{}, strange) ? not_a_number() : largest_lane(top); }
};

// A vector of which one lane, if it is in it, is masked.
INLINED Floats without(Floats v, long place) {
    Ints lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    return lanes == int32_t(place) ? floats(-__builtin_inff()) : v;
}

template <class T> static double largest(const T *x, long count) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    Top<decltype(load(x))> top = {load_some(x, 0)};
    for (long i = 0; i < count; i += lanes) top.add(load_up_to(x + i, count - i));
    return top.value();
}
// The largest of all but one of the float32 logits.
template <class T> static double largest_without(long held, const T *x, long count) {
    Top<Floats> top = {floats(-__builtin_inff())};
    for (long i = 0; i < count; i += LANES) top.add(without(load_up_to(x + i, count - i), held - i));
    return top.value();
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

// Add exponentials to a sum whose grid is at least theirs, or that is of no use afterwards; logits below `lowest` add
// nothing, and with `masks` nor does the class `held`. `each` takes places, n + BIAS, 1 + t in fixed point and, in
// float32, logits.
//
// An exponential is fixed 2^shift, cut to a whole number, in two words of 32 bits, `low` and `high`: a shift by less
// than 0 or more than 31 gives 0. Of each word the bits above a digit's border are summed apart. What is below them has
// a sum that fits a word, and is the sum of all bits less those above, modulo 2^32.
template <Way way, bool masks = false, class T, class Each>
static void add_exponentials(Sum &sum, const T *x, const int32_t *reduced, long count, const Transform transform,
                             Each each, long held = -1) {
    constexpr int WIDTH = Single::WIDTH, ABOVE = 2 * WIDTH - 32;
    static_assert(uint64_t(CHUNK / LANES) << WIDTH <= uint64_t(1) << 32);
    const Ints unit = ints(BIAS<way> + int32_t(WIDTH * (sum.grid - 2)) + Single::POINT), next = unit + 32;
    Unsigned lows = {}, low_tops = {}, highs = {}, high_tops = {};
    for (long i = 0; i < count; i += LANES) {
        __builtin_prefetch(x + i + CHUNK, 0, 2);
        Floats t;
        Ints n;
        Floats v = load_up_to(x + i, count - i);
        if (masks) v = without(v, held - i);
        parts<way>(v, reduced + i, transform, n, t);
        Unsigned fixed = fixed_point(t);
        each(i, n, fixed, v);
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

template <Way way, class Each>
static void add_exponentials(Sum &sum, const double *x, long count, double lowest, const Transform transform,
                             Each each) {
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
            each(i + k * LANES / 2, n[k], fixed);
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

// The gradient of the logits that are near 0, without class weights and the slope of a softcap.
template <Way way, class T, class To>
static void write_near(const T *x, const int32_t *reduced, To *out, long count, const RowFactor &row, float lowest,
                       const Transform transform, bool past_cache) {
    constexpr bool direct = way != REDUCED;
    const Floats high = floats(row.high), low = floats(row.low);
    // From `least` on a gradient is normal, and an addition to its exponent multiplies it, unless it is 0. In the ways
    // of float32 n is compared as the float32 that it comes from, as logits may be far below.
    const Ints exponent = ints(int32_t(row.exponent) - BIAS<way>), normal = ints(-125) - exponent;
    const Ints least = row.high != 0.0f ? normal : ints(direct ? 0x7f800000 : INT32_MAX);
    write_vectors(out, count, past_cache && direct, [&](long i, long some) __attribute__((always_inline)) {
        Floats v = load_repeated(x + i, some), t;
        Ints n;
        parts<way>(v, reduced + i, transform, n, t);
        Floats value = high + fma(high, t, low);
        if (direct ? any_less((Floats)n, (Floats)least) : any_less(n, least)) {
            if (direct) {
                parts<way>(v > lowest ? v : floats(lowest), reduced + i, transform, n, t);
                value = high + fma(high, t, low);
            }
            Ints sum = n + exponent, near = sum > -125 ? sum : ints(-125);
            Ints rest = sum - near > -30 ? sum - near : ints(-30);
            value = value * power(near) * power(rest);
        } else {
            value = (Floats)((Ints)value + ((n + exponent) << 23));
        }
        return value;
    });
}

template <Way way, bool is_short>
static void write_near(const double *x, double *out, long count, const RowFactor &row, double lowest,
                       const Transform transform, double *slopes) {
    const Longs exponent = longs(row.exponent - MAGIC_BITS), normal = longs(MAGIC_BITS - 1000 - row.exponent);
    const Doubles m = doubles(row.m);
    for (long i = 0; i < count; i += LANES) {
        Doubles v[2], t[2];
        Longs n[2], counts[2];
        load_pair<way>(x + i, count - i, lowest, v, counts);
        Doubles slope[2];
        parts<way>(v, transform, n, t, slope, is_short);
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

// Sums of numbers in units of a grid, each number in digits and cut to a whole number after the third: whole numbers as
// float64, of at most CHUNK numbers.
struct WideTotal {
    static constexpr double BASE = double(int64_t(1) << WIDE);
    Doubles first = {}, second = {}, third = {};
    Longs largest = {};  // as bits, the sign aside

    __attribute__((always_inline)) void add(Doubles v) {
        Longs size = (Longs)v & INT64_MAX;
        largest = size > largest ? size : largest;
        Doubles digit = whole(v);
        third += digit;
        add_below_one((v - digit) * BASE);
    }
    // A number below 1, times BASE.
    __attribute__((always_inline)) void add_below_one(Doubles v) {
        Doubles digit = whole(v);
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

// Add to a sum what `fill` adds to a total in units of a grid; first on the grid `guess`, and again if the sum is on
// another one after it. Returns false, with nothing added, if `fill` does, and for numbers so large or small that they
// need the scalar way. `lowest`: the lowest grid on which no subnormal part counts.
template <class Fill> static bool add_total(Sum &sum, int64_t guess, int64_t lowest, Fill fill) {
    for (int64_t grid = guess;; grid = sum.grid) {
        WideTotal total;
        if (!fill(grid, total)) return false;
        int64_t top = 0;
        for (int lane = 0; lane < LANES / 2; lane++)
            if (total.largest[lane] > top) top = total.largest[lane];
        if (top == 0) return true;
        int64_t exponent = top >> 52, needed = grid + floor_div(exponent - 1023, WIDE);
        if (exponent > 2000 || (needed < lowest && sum.grid < lowest)) return false;
        sum.raise(needed);
        if (sum.grid != grid) continue;
        total.add_to(sum.limbs);
        return true;
    }
}

// The same of numbers without exponents of their own.
template <class Fill> static bool add_total(Sum &sum, Fill fill) {
    constexpr int64_t LOWEST = -20, HIGHEST = 28;
    if (sum.grid > HIGHEST) return false;
    return add_total(sum, sum.grid < LOWEST ? 0 : sum.grid, LOWEST, [&](int64_t grid, WideTotal &total) {
        return fill(power(-WIDE * grid), total);
    });
}

enum { TERMS = 512 };

// Add at most TERMS numbers to a sum of whole numbers and two digits after them, each digit in two halves, which are
// integers of float32. Returns false, with nothing added, if a number is not below 2^22 or the sum is on another grid.
template <class T> static bool add_numbers(Sum &sum, const T *x, long count) {
    constexpr int HALF = WIDE / 2;
    Ints most = {};
    for (long i = 0; i < count; i += LANES) {
        Ints size = (Ints)load_or_zeros(x + i, count - i) & INT32_MAX;
        most = size > most ? size : most;
    }
    if (!any_less(Ints{}, most)) return true;
    if (any_less(ints(0x4a7fffff), most)) return false;
    if (any_less(ints(0x3f7fffff), most)) sum.raise(0);
    if (sum.grid != 0) return false;
    Ints whole_numbers = {}, digits[4] = {};
    for (long i = 0; i < count; i += LANES) {
        Floats rest = load_or_zeros(x + i, count - i);
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

// Fill a total with exp(z) z, from n, with a bias, and 1 + t in fixed point. Returns false if a logit is neither masked
// nor near 0, or cut off by a grid that is only guessed.
template <Way way, class T>
static bool fill_entropies(WideTotal &result, int64_t grid, bool guessed, const T *x, const uint32_t *n_of,
                           const uint32_t *fixed, int32_t bias, long count, float lowest, const Transform transform) {
    const Ints unit = ints(bias + Single::POINT + int32_t(WIDE * grid));
    Ints strange = Ints{};
    WideTotal total;
    for (long i = 0; i < count; i += LANES) {
        Floats v = load_up_to(x + i, count - i);
        Ints masked = v == -__builtin_inff(), n = load_bytes<Ints>(n_of + i) - unit;
        strange |= ~(masked | (v >= lowest));
        v = masked ? Floats{} : v;
        if (guessed) strange |= (n < -1022) & (v != 0.0f);
        n = n > -1022 ? n : ints(-1022);  // smaller numbers are cut off
        n = n < 1023 ? n : ints(1023);
        Longs exponent[2], factor[2];
        Doubles wide[2];
        widen(n, exponent);
        widen(masked ? Ints{} : load_bytes<Ints>(fixed + i), factor);
        widen(v, wide);
        for (int k = 0; k < 2; k++) {
            Doubles low, rest, number = __builtin_convertvector(factor[k], Doubles), scale = power(exponent[k]);
            Doubles z = transformed<way>(wide[k], transform, low);
            total.add(product_and_rest(number, z * scale, rest));
            total.add_below_one(rest * WideTotal::BASE);
            if (way == SCALED_IN_DOUBLE) total.add_below_one(number * low * scale * WideTotal::BASE);
        }
    }
    result = total;
    return !any_less(strange, Ints{});
}

template <Way way>
static bool fill_entropies(WideTotal &result, int64_t grid, bool guessed, const double *x, const uint64_t *n_of,
                           const uint64_t *fixed, int32_t, long count, double lowest, const Transform transform) {
    const Longs unit = longs(MAGIC_BITS + Double::POINT + WIDE * grid);
    Longs strange = Longs{};
    WideTotal total;
    for (long i = 0; i < count; i += LANES / 2) {
        Doubles v = load_up_to(x + i, count - i);
        Longs masked = v == -infinity(), n = load_bytes<Longs>(n_of + i) - unit;
        strange |= ~(masked | (v >= lowest));
        v = masked ? Doubles{} : v;
        if (guessed) strange |= (n < -1022) & (v != 0.0);
        n = n > -1022 ? n : longs(-1022);  // smaller numbers are cut off
        Doubles scale = power(n < 1023 ? n : longs(1023));
        Words factor = masked ? Words{} : load_bytes<Words>(fixed + i);
        // Integers of 31 and 32 bits as float64, by way of the low bits of 2^52
        constexpr uint64_t INTEGER = 0x4330000000000000;
        Doubles upper = ((Doubles)(factor >> 32 | INTEGER) - 0x1p52) * 0x1p32;
        Doubles lower = (Doubles)((factor & 0xffffffff) | INTEGER) - 0x1p52;
        Doubles low, rest[2], z = transformed<way>(v, transform, low);
        strange |= (z < 0x1p-900) & (z > -0x1p-900) & (z != 0.0);  // some part may be subnormal
        total.add(product_and_rest(upper, z, rest[0]) * scale);
        total.add_below_one(rest[0] * scale * WideTotal::BASE);
        total.add(product_and_rest(lower, z, rest[1]) * scale);
        total.add_below_one(rest[1] * scale * WideTotal::BASE);
        if (way == SCALED_IN_DOUBLE)
            total.add_below_one(__builtin_convertvector((Longs)factor, Doubles) * low * scale * WideTotal::BASE);
    }
    result = total;
    return !any_less(strange, Longs{});
}

// Fill a total with u, and with u z of logits, in some unit: false if a masked class has a weight. `exact` if products
// are.
static void fill_weights(WideTotal &result, double unit, const double *u, long count) {
    WideTotal total;
    for (long i = 0; i < count; i += LANES / 2) total.add(load(u + i) * unit);
    result = total;
}

template <Way way, class T>
static bool fill_weighted(WideTotal &result, double unit, const T *x, const double *u_of, long count, bool exact,
                          const Transform transform) {
    Longs strange = Longs{};
    WideTotal total;
    for (long i = 0; i < count; i += LANES) {
        Doubles logit[2];
        load_wide(x + i, count - i, logit);
        for (int k = 0; k < 2; k++) {
            long at = i + k * LANES / 2;
            Doubles v = logit[k], low, rest, u = load(u_of + at);
            Longs usable = (v < infinity()) & (v > -infinity());
            strange |= (v == -infinity()) & (u != 0.0);
            v = usable ? v : Doubles{};
            Doubles z = transformed<way>(v, transform, low);
            total.add(product_and_rest(u, z, rest) * unit);
            if (way != PLAIN || !exact)
                total.add_below_one((way == PLAIN ? rest : rest + u * low) * (unit * WideTotal::BASE));
        }
    }
    result = total;
    return !any_less(strange, Longs{});
}

// Finish gradients and write them to `out`: those of statistics have a factor more, where there are weights weight_factor
// u is subtracted, and a softcap has a slope, in float32 an approximation.
template <Way way, class Number, class T>
static void finish_near(const Number *values, const T *x, T *out, const double *u, const double *slopes, long count,
                        const RowFactor &row, const Call &call) {
    const Transform transform = call.transform;
    const double far = 63.0 * transform.softcap / transform.scale, error = 0x1p-41;
    for (long i = 0; i < count; i += LANES) {
        Doubles value[2], logit[2], product[2], most[2], least[2];
        Longs sure = longs(-1);
        load_wide(values + i, count - i, value);
        load_wide(x + i, count - i, logit);
        for (int k = 0; k < 2; k++) {
            long at = i + k * LANES / 2;
            if (call.has(ENTROPY)) {
                Doubles low, z = transformed<way>(logit[k], transform, low);
                Doubles factor = row.constant + row.slope * ((z - row.origin.high) + (low - row.origin.low));
                value[k] = value[k] == 0.0 ? Doubles{} : value[k] * factor + 0.0;  // never -0.0
            }
            if (call.has(WEIGHTED_LOGIT))
                value[k] -= row.weight_factor * (u ? load(u + at) : doubles(1.0));
            if (way == CAPPED) {
                product[k] = value[k] * load(slopes + at);
                most[k] = product[k] + product[k] * error;
                least[k] = product[k] - product[k] * error;
                sure &= (logit[k] < far) & (logit[k] > -far);
            }
        }
        if (way == CAPPED) {
            bool unsure = any_less(longs(-1), sure);
            if constexpr (sizeof(T) < 8) unsure = unsure || any_less(ints(-1), narrow(most) == narrow(least));
            for (int k = 0; k < 2; k++) value[k] = unsure ? value[k] * softcap_slope(logit[k], transform) : product[k];
        }
        for (int k = 0; k < 2; k++) value[k] = value[k] == value[k] ? value[k] : doubles(not_a_number());
        store_narrow(out + i, count - i, value);
    }
}
