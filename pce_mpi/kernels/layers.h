// The loops of layers, gelu, the softmax of attention and the normalization of rows; included once for each instruction
// set after `loops.h`.
//
// Numbers are computed in float64, but for the softmax. `ops/elementwise.py`, `ops/attention.py` and
// `ops/normalization.py` do the same with other arrays.

// exp(z) with the bits of `exact/functions.py` but for those of a nan, for z up to 709.
INLINED Doubles exp_of(Doubles z) {
    z = z > -746.0 ? z : doubles(-746.0);
    Doubles shifted = z * LOG2E + MAGIC, k = shifted - MAGIC, near = z - k * HI, far = k * LO, f = near - far;
    Doubles head = 1.0 + f, tail = ((f - (head - 1.0)) + ((near - f) - far)) + curved(f);
    Longs n = (Longs)shifted - MAGIC_BITS, half = n >> 1;
    return ((head + tail) * power(half)) * power(n - half);
}

static void gelu(const Gelu &pass) {
    const double a = pass.a, b = pass.b, bent = pass.bent;
    for (long i = 0; i < pass.count; i += LANES) {
        Doubles x[2], y[2], slope[2];
        load_wide(pass.x + i, pass.count - i, x);
        for (int k = 0; k < 2; k++) {
            Doubles above = x[k] < -bent ? doubles(-bent) : x[k], z = above > bent ? doubles(bent) : above;
            Doubles square = z * z, size = (Doubles)((Longs)z & INT64_MAX);
            Doubles e = exp_of(size * (-a - b * square)), both = 1.0 + e;
            Longs negative = x[k] < 0.0;
            Doubles share = (negative ? e : doubles(1.0)) / both, other = (negative ? doubles(1.0) : e) / both;
            y[k] = above * share;
            slope[k] = share * (1.0 + z * (a + 3.0 * b * square) * other);
        }
        store_narrow(pass.y + i, pass.count - i, y);
        if (pass.slope) store_narrow(pass.slope + i, pass.count - i, slope);
    }
}

static inline Floats rounded_twice(Floats a, Floats b, Floats c) { return a * b + c; }

// exp(z) for z from -150 to 0, to an ulp or two; a fused product and sum takes long where processors have none.
INLINED Floats exp_of(Floats z) {
    Floats shifted = z * LOG2E32 + MAGIC32, k = shifted - MAGIC32, f = (z - k * HI32) - k * LO32;
    Ints n = (Ints)shifted - MAGIC32_BITS, half = n >> 1;
    return (1.0f + polynomial<rounded_twice>(f)) * power(half) * power(n - half);
}

static inline float sum_of(Floats v) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) v[lane] += v[lane + half];
    return v[0];
}

// The softmax of each row of scores, in their place; see `Attend`.
static void attend(const Attend &pass) {
    enum { SHORT_SUM = 64 * LANES };  // so many exponentials are added up in float32
    const long columns = pass.columns;
    Ints place;
    for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
    for (long row = 0; row < pass.rows; row++) {
        float *p = pass.p + row * columns;
        const long seen = pass.seen + row % pass.queries, count = seen < columns ? seen : columns;
        const Floats top = floats(float(largest(p, count)));
        double sum = 0.0;
        long i = 0;
        while (i < count) {
            Floats sums = {};
            for (const long end = count - i < SHORT_SUM ? count : i + SHORT_SUM; i < end; i += LANES) {
                Floats z = load_up_to(p + i, columns - i) - top, e = exp_of(z < -150.0f ? floats(-150.0f) : z);
                // Whole vectors are stored: what a part of a vector was stored to is slow to load.
                e = place < ints(count - i < LANES ? int(count - i) : LANES) ? e : Floats{};
                store_up_to(p + i, e, columns - i);
                sums += e;
            }
            sum += sum_of(sums);
        }
        const float divisor = float(sum);
        for (i = 0; i < count; i += LANES) store_up_to(p + i, load_up_to(p + i, columns - i) / divisor, columns - i);
        for (; i < columns; i++) p[i] = 0.0f / divisor;  // nan in a row with nan
    }
}

// Sums over a row, of numbers and of products.
struct RowSums {
    double plain, product;
};
enum { GROUP = 512 };  // numbers that are added up in vectors, one by one; groups are added up in pairs
template <class Term> INLINED RowSums sums_of_group(long first, long end, Term term) {
    double plain = 0.0, product = 0.0;
#pragma omp simd reduction(+ : plain, product)
    for (long i = first; i < end; i++) {
        const RowSums terms = term(i);
        plain += terms.plain;
        product += terms.product;
    }
    return {plain, product};
}
template <class Term> static RowSums sums_of_groups(long first, long end, Term term) {
    if (end - first <= GROUP) return sums_of_group(first, end, term);
    const long middle = first + (end - first) / 2 / LANES * LANES;
    const RowSums a = sums_of_groups(first, middle, term), b = sums_of_groups(middle, end, term);
    return {a.plain + b.plain, a.product + b.product};
}
template <class Term> INLINED RowSums sums_of(long count, Term term) {
    return count <= GROUP ? sums_of_group(0, count, term) : sums_of_groups(0, count, term);
}

// A row, and its normalized numbers: those less two numbers, divided by the deviation.
template <class T> struct NormalRow {
    const T *x;
    double first, second, deviation;

    NormalRow(const Norm &pass, long row) : x((const T *)pass.x + row * pass.columns) {
        const double *statistics = pass.statistics + 3 * row;
        first = statistics[0], second = statistics[1], deviation = statistics[2];
    }
    __attribute__((always_inline)) double operator[](long i) const { return ((x[i] - first) - second) / deviation; }
};

template <class T> static void normalize(const Norm &pass) {
    const long count = pass.columns;
    for (long row = 0; row < pass.rows; row++) {
        const T *x = (const T *)pass.x + row * count;
        T *__restrict out = (T *)pass.out + row * count;
        double *statistics = pass.statistics + 3 * row, first = 0.0, mean = 0.0;
        if (pass.center) first = sums_of(count, [=](long i) { return RowSums{x[i], 0.0}; }).plain / double(count);
        RowSums sums = sums_of(count, [=](long i) {
            double near = x[i] - first;
            return RowSums{near, near * near};
        });
        if (pass.center) mean = sums.plain / double(count);
        statistics[0] = first, statistics[1] = mean;
        statistics[2] = __builtin_sqrt(sums.product / double(count) - mean * mean + pass.eps);
        const NormalRow<T> normal(pass, row);
        for (long i = 0; i < count; i++) out[i] = T(normal[i] * pass.scale[i]);
    }
}

template <class T> static void write_norm_gradient(const Norm &pass) {
    const long count = pass.columns;
    for (long row = 0; row < pass.rows; row++) {
        const T *upstream = (const T *)pass.upstream + row * count;
        T *__restrict out = (T *)pass.out + row * count;
        const double *scale = pass.scale;
        const NormalRow<T> normal(pass, row);
        RowSums sums = sums_of(count, [=](long i) {
            double pull = upstream[i] * scale[i];
            return RowSums{pull, pull * normal[i]};
        });
        const double plain = pass.center ? sums.plain / double(count) : 0.0, product = sums.product / double(count);
        for (long i = 0; i < count; i++)
            out[i] = T((upstream[i] * scale[i] - (normal[i] * product + plain)) / normal.deviation);
    }
}

template <class T> static void add_scale_gradient(const Norm &pass) {
    double *__restrict sums = (double *)pass.out;
    for (long row = 0; row < pass.rows; row++) {
        const T *upstream = (const T *)pass.upstream + row * pass.columns;
        const NormalRow<T> normal(pass, row);
        for (long i = 0; i < pass.columns; i++) sums[i] += upstream[i] * normal[i];
    }
}

static void norm(const Norm &pass) {
    auto run = [&](auto one) {
        typedef decltype(one) T;
        if (pass.of == NORMAL) normalize<T>(pass);
        if (pass.of == OF_ROWS) write_norm_gradient<T>(pass);
        if (pass.of == OF_SCALE) add_scale_gradient<T>(pass);
    };
    pass.kind == FLOAT64 ? run(double{}) : run(float{});
}
