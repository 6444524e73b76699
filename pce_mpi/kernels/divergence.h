// Divergences of rows, and their gradients; included last for each instruction set.

#define NUMBERS Doubles
INLINED Doubles size_of(Doubles v) { return (Doubles)((Longs)v & INT64_MAX); }
INLINED Doubles constant(double v) { return doubles(v); }
INLINED Doubles power_of(Doubles shifted) { return power((Longs)shifted - MAGIC_BITS); }
#include "divergence_terms.h"
#undef NUMBERS

// At most TERMS classes of a row: their logits, r, and probabilities, with room for a whole vector more.
template <bool single> struct Pairs {
    double logits[TERMS + LANES], r[TERMS + LANES], p[TERMS + LANES], q[TERMS + LANES];
    long count;
    // What is fetched from memory while these are computed with, and the bytes of a logit.
    const char *ahead[2];
    long bytes;

    template <Way way, class T>
    void fill(const Divergence &pass, const T *p_logits, const T *q_logits, long some, long row,
              const RowFactor &p_row, const RowFactor &q_row, const Difference &difference) {
        const Transform transform = pass.transform;
        const Doubles limit = doubles(far_from(single));
        Longs far = {};
        count = some;
        bytes = sizeof(T);
        ahead[0] = (const char *)(p_logits + CHUNK);
        ahead[1] = (const char *)(q_logits + CHUNK);
        for (long i = 0; i < count; i += LANES) {
            Doubles v[2], w[2];
            load_wide(p_logits + i, count - i, v);
            load_wide(q_logits + i, count - i, w);
            for (int k = 0; k < 2; k++) {
                long at = i + k * LANES / 2;
                Doubles low, low_w, z = transformed<way>(v[k], transform, low);
                Doubles z_w = transformed<way>(w[k], transform, low_w);
                Doubles error = way == PLAIN ? Doubles{} : error_of(z_w, low_w) - error_of(z, low);
                Doubles each = log_of_ratio(z_w, z, error, difference, single);
                far |= size_of(each) > limit;
                store(logits + at, v[k]);
                store(r + at, each);
            }
        }
        softmax(p, p_row, pass.p_rows[row].most, transform);
        if (!any_less(far, Longs{}) || (pass.out.data && pass.of == KL_BY_P)) return;
        convert(logits, q_logits, count);
        softmax(q, q_row, pass.q_rows[row].most, transform);
    }
    void softmax(double *to, const RowFactor &row, double most, const Transform &transform) {
        write_chunk<std::conditional_t<single, Short, Double>>(logits, to, count, {}, row, most, {0, transform}, false);
        memset(to + count, 0, LANES * sizeof(double));
    }
    Classes operator[](long i) const {
        for (const char *logits : ahead) __builtin_prefetch(logits + i * bytes, 0, 2);
        Doubles some = load(r + i);
        bool far = any_less(doubles(far_from(single)), size_of(some));
        return {load(p + i), far ? load(q + i) : Doubles{}, some, far, single};
    }
};

// The sums of a row, in units of 2^-60 but the first.
struct DivergenceSums {
    Sum divergence;
    int64_t excess, skewness;
};

template <bool single>
static void add_pairs(DivergenceSums &sums, const Pairs<single> &pairs, const Divergence &pass) {
    double terms[TERMS + LANES];
    Longs excess = {}, skewness = {};
    for (long i = 0; i < pairs.count; i += LANES / 2) {
        const Classes c = pairs[i];
        const Growth growth = growth_of(c);
        excess += truncated(difference(c, growth) * 0x1p60);
        if (!pass.mean.q) {
            store(terms + i, kl_term(c, growth));
            continue;
        }
        Doubles skew;
        store(terms + i, jensen_shannon_term(c, growth, pass.mean, skew));
        skewness += truncated(skew * 0x1p60);
    }
    auto fill = [&](double unit, WideTotal &total) {
        fill_weights(total, unit, terms, pairs.count);
        return true;
    };
    if (sums.divergence.grid >= INFINITE || !add_total(sums.divergence, fill))
        for (long i = 0; i < pairs.count; i++) add_number(sums.divergence, terms[i]);
    sums.excess += int64_t(sum_of((Words)excess));
    sums.skewness += int64_t(sum_of((Words)skewness));
}

template <bool single>
static void write_pairs(double *out, const Pairs<single> &pairs, double slope, double less, const Divergence &pass) {
    for (long i = 0; i < pairs.count; i += LANES / 2) {
        Doubles value = slope * divergence_gradient(pairs[i], pass.of, pass.mean, less);
        store(out + i, value == value ? value : doubles(not_a_number()));
    }
}

template <class T, Way way> static void diverge_in(const Divergence &pass) {
    constexpr bool single = sizeof(T) < 8;
    DivergenceSums sums[TILE_ROWS];
    RowFactor p_rows[TILE_ROWS], q_rows[TILE_ROWS];
    auto begin = [&](long row, long rows) {
        for (long r = 0; r < rows; r++) {
            sums[r] = {{NO_GRID, {0, 0, 0}}, 0, 0};
            p_rows[r] = RowFactor::of(pass.p_rows[row + r], pass.transform);
            q_rows[r] = RowFactor::of(pass.q_rows[row + r], pass.transform);
        }
    };
    auto each = [&](long row, long r, const T *x, long count, long, char *place, const Weights &other) {
        T buffer[CHUNK];
        double values[TERMS + LANES];
        const T *y = numbers_of(other.probabilities, other.kind, count, buffer);
        const Difference difference = pass.differences[row + r];
        const bool usable = finite(difference.delta);
        Pairs<single> pairs;
        for (long at = 0, some; at < count; at += some) {
            some = count - at < TERMS ? count - at : long(TERMS);
            if (usable && (!place || pass.valid[row + r]))
                pairs.template fill<way>(pass, x + at, y + at, some, row + r, p_rows[r], q_rows[r], difference);
            if (!place) {
                if (usable) add_pairs(sums[r], pairs, pass);
                continue;
            }
            if (!pass.valid[row + r])
                memset(values, 0, some * sizeof(double));
            else if (usable)
                write_pairs(values, pairs, pass.slope[row + r], pass.less[row + r], pass);
            else
                for (long i = 0; i < some; i++) values[i] = not_a_number();
            of_kind(pass.out.kind, [&](auto one) { convert((decltype(one) *)place + at, values, some); });
        }
    };
    auto end = [&](long row, long r) {
        if (pass.sums) memcpy(pass.sums + 6 * (row + r), &sums[r], sizeof sums[r]);
    };
    walk<T>(pass, pass.out, begin, each, end);
}

template <class T> static void diverge_of(const Divergence &pass) {
    pass.transform.scale == 1.0 ? diverge_in<T, PLAIN>(pass) : diverge_in<T, SCALED_IN_DOUBLE>(pass);
}

static void diverge(const Divergence &pass) {
    pass.single ? diverge_of<float>(pass) : diverge_of<double>(pass);
}
