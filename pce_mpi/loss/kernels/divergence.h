// Divergences of rows, and their gradients; included last for each instruction set.

PCE_DEFINE_TWICE_ATANH(INLINED, Doubles)
#define NUMBERS Doubles
INLINED Doubles size_of(Doubles v) { return (Doubles)((Longs)v & INT64_MAX); }
INLINED Doubles constant(double v) { return doubles(v); }
#include "divergence_terms.h"
#undef NUMBERS

// The logsumexp of Q less that of P.
struct Difference {
    double delta, rest;
};

// Probabilities of logits near 0, in float64 from exponentials of float32; `out` has room for a whole vector more.
template <Way way>
static void fill_near(const float *x, double *out, long count, const RowFactor &row, float lowest,
                      const Transform &transform) {
    const Longs exponent = longs(row.exponent);
    const Doubles m = doubles(row.m);
    for (long i = 0; i < count; i += LANES) {
        Floats v = load_up_to(x + i, count - i), counted = v > lowest ? v : floats(lowest), t;
        Ints masked = v == -__builtin_inff(), below = (v < lowest) & ~masked, n;
        if (any_less(below, Ints{})) {
            for (long lane = 0; lane < LANES; lane++) out[i + lane] = probability_of<Single>(v[lane], row, transform);
            continue;
        }
        parts<way>(counted, transform, n, t);
        Doubles wide_t[2];
        Longs wide_n[2], none[2];
        widen(t, wide_t);
        widen(n - BIAS<way>, wide_n);
        widen(masked, none);
        for (int k = 0; k < 2; k++) {
            Doubles value = m + m * wide_t[k];
            Longs sum = wide_n[k] + exponent;
            if (any_less(sum, longs(-1000))) {
                Longs near = sum > -1020 ? sum : longs(-1020), rest = sum - near > -60 ? sum - near : longs(-60);
                value = value * power(near) * power(rest);
            } else {
                value *= power(sum);
            }
            store(out + i + k * LANES / 2, none[k] ? Doubles{} : value);
        }
    }
}

template <class Arithmetic, class T>
static void fill_probabilities(const T *x, double *out, long count, const RowFactor &row, double most,
                               const Transform &transform) {
    if constexpr (is_single<Arithmetic>()) {
        double lowest;
        bool in_loops = !row.huge && near<Arithmetic>(most, transform, lowest) && row.exponent < 2700 &&
                        row.exponent > -2700 && transform.scale * most * LOG2E + double(row.exponent) < 100.0;
        if (in_loops)
            in_way<true>(transform, [&](auto chosen) {
                fill_near<decltype(chosen)::way>(x, out, count, row, float(lowest), transform);
            });
        else
            for (long i = 0; i < count; i++) out[i] = probability_of<Arithmetic>(number_at(x, i), row, transform);
    } else {
        write_chunk<Arithmetic>(x, out, count, {}, row, most, {0, transform}, false);
    }
    memset(out + count, 0, LANES * sizeof(double));
}

// At most TERMS classes of a row: their logits and, with room for a whole vector more, their probabilities.
template <class Arithmetic, class T> struct Pairs {
    const T *x, *y;
    double p[TERMS + LANES], q[TERMS + LANES];
    long count;

    template <Way way>
    void at(long i, const Difference &difference, const Transform &transform, Classes classes[2]) const {
        Doubles v[2], w[2];
        load_wide(x + i, count - i, v);
        load_wide(y + i, count - i, w);
        for (int k = 0; k < 2; k++) {
            Doubles low, low_w, z = transformed<way>(v[k], transform, low), z_w = transformed<way>(w[k], transform, low_w);
            Doubles error = way == PLAIN ? Doubles{} : error_of(z_w, low_w) - error_of(z, low);
            Doubles r = ((z_w - z) - difference.delta) + (error - difference.rest);
            Longs masked = (v[k] == -infinity()) & (w[k] == -infinity());
            long at = i + k * LANES / 2;
            classes[k] = {load(p + at), load(q + at), masked ? Doubles{} : r, nearby<Arithmetic>()};
        }
    }
};

// The sums of a row, in units of 2^-60 but the first.
struct DivergenceSums {
    Sum divergence;
    int64_t excess, skewness;
};

template <Way way, class Pairs>
static void add_pairs(DivergenceSums &sums, const Pairs &pairs, const Difference &delta, const Divergence &pass) {
    constexpr int64_t LOWEST = -20;
    Terms terms;
    terms.parts = 1;
    terms.scaled = false;
    Longs excess = {}, skewness = {};
    for (long i = 0; i < pairs.count; i += LANES) {
        Classes classes[2];
        pairs.template at<way>(i, delta, pass.transform, classes);
        for (int k = 0; k < 2; k++) {
            const Classes &c = classes[k];
            double *term = terms.part[0] + i + k * LANES / 2;
            excess += truncated(difference(c) * 0x1p60);
            if (!pass.of) {
                store(term, kl_term(c));
                continue;
            }
            Doubles skew;
            store(term, jensen_shannon_term(c, skew));
            skewness += truncated(skew * 0x1p60);
        }
    }
    if (sums.divergence.grid >= INFINITE || !add_terms(sums.divergence, terms, pairs.count, LOWEST))
        for (long i = 0; i < pairs.count; i++) add_number(sums.divergence, terms.part[0][i]);
    sums.excess += int64_t(sum_of((Words)excess));
    sums.skewness += int64_t(sum_of((Words)skewness));
}

template <Way way, class Pairs>
static void write_pairs(double *out, const Pairs &pairs, const Difference &delta, double slope, double less,
                        const Divergence &pass) {
    for (long i = 0; i < pairs.count; i += LANES) {
        Classes classes[2];
        pairs.template at<way>(i, delta, pass.transform, classes);
        for (int k = 0; k < 2; k++) {
            Doubles value = slope * divergence_gradient(classes[k], pass.of, less);
            store(out + i + k * LANES / 2, value == value ? value : doubles(not_a_number()));
        }
    }
}

template <class Arithmetic, class T, Way way> static void diverge_in(const Divergence &pass) {
    DivergenceSums sums[TILE_ROWS];
    RowFactor p_rows[TILE_ROWS], q_rows[TILE_ROWS];
    auto begin = [&](long row, long r) {
        sums[r] = {{NO_GRID, {0, 0, 0}}, 0, 0};
        p_rows[r] = RowFactor::of(pass.p_rows[row + r], pass.transform);
        q_rows[r] = RowFactor::of(pass.q_rows[row + r], pass.transform);
    };
    auto each = [&](long first, long r, const T *x, long count, long, char *place, const Weights &other) {
        T buffer[CHUNK];
        double values[TERMS + LANES];
        const T *y = numbers_of(other.probabilities, other.kind, count, buffer);
        const long row = first + r;
        const Difference delta = {pass.delta[row], pass.rest[row]};
        const bool usable = finite(delta.delta), counts = !place || pass.valid[row];
        Pairs<Arithmetic, T> pairs;
        for (long at = 0, some; at < count; at += some) {
            some = count - at < TERMS ? count - at : long(TERMS);
            if (usable && counts) {
                pairs.x = x + at, pairs.y = y + at, pairs.count = some;
                fill_probabilities<Arithmetic>(pairs.x, pairs.p, some, p_rows[r], pass.p_rows[row].most, pass.transform);
                if (!place || pass.of != KL_BY_P)
                    fill_probabilities<Arithmetic>(pairs.y, pairs.q, some, q_rows[r], pass.q_rows[row].most,
                                                   pass.transform);
            }
            if (!place) {
                if (usable) add_pairs<way>(sums[r], pairs, delta, pass);
                continue;
            }
            if (counts && usable)
                write_pairs<way>(values, pairs, delta, pass.slope[row], pass.less[row], pass);
            else
                for (long i = 0; i < some; i++) values[i] = counts ? not_a_number() : 0.0;
            of_kind(pass.out.kind, [&](auto one) { convert((decltype(one) *)place + at, values, some); });
        }
    };
    auto end = [&](long row, long r) {
        if (pass.sums) memcpy(pass.sums + 6 * (row + r), &sums[r], sizeof sums[r]);
    };
    walk<T>(pass, pass.out, begin, each, end);
}

template <class Arithmetic, class T> static void diverge_with(const Divergence &pass) {
    pass.transform.scale == 1.0 ? diverge_in<Arithmetic, T, PLAIN>(pass)
                                : diverge_in<Arithmetic, T, SCALED_IN_DOUBLE>(pass);
}

static void diverge(const Divergence &pass) {
    pass.single ? diverge_with<Single, float>(pass) : diverge_with<Double, double>(pass);
}
