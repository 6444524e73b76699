// Rows of logits to states, and rows of gradients; included once for each instruction set after `loops.h`.
//
// A row comes in chunks of at most CHUNK classes, which are consecutive in memory.

template <class T> static inline T element(const T *p, long index) {
    T value;
    memcpy(&value, (const char *)p + index * long(sizeof value), sizeof value);
    return value;
}
template <class T> static inline double number_at(const T *p, long index) { return number_of(element(p, index)); }

// Call f with an element of a kind.
template <class Function> static inline void of_kind(int kind, Function f) {
    switch (kind) {
        case FLOAT32:
            return f(float{});
        case FLOAT64:
            return f(double{});
        case FLOAT16:
            return f(Half{});
        default:
            return f(BFloat{});
    }
}

// The weight u of each class of a chunk.
struct Weights {
    const double *weight;       // or none
    const char *probabilities;  // or none
    int kind;
    double kept, share;  // 1 - smoothing, and smoothing / classes; share 0: no smoothing

    bool ones() const { return !weight && !probabilities; }
    double at(long index) const {
        double u;
        fill(&u, index, 1, 1);
        return u;
    }
    // u of some classes, and 0 up to `room`.
    void fill(double *u, long first, long count, long room) const {
        if (probabilities) {
            of_kind(kind, [&](auto one) { convert(u, (const decltype(one) *)probabilities + first, count); });
            for (long i = 0; i < count && share != 0.0; i++) u[i] = u[i] * kept + share;
            for (long i = 0; i < count && weight; i++) u[i] = u[i] * weight[first + i];
        } else {
            for (long i = 0; i < count; i++) u[i] = weight ? weight[first + i] : 1.0;
        }
        for (long i = count; i < room; i++) u[i] = 0.0;
    }
};

// Logits of a chunk as numbers of type T; in the caller's memory if they have that type.
template <class T> static const T *numbers_of(const char *start, int kind, long count, T *buffer) {
    if (kind == kind_of<T>()) return (const T *)start;
    of_kind(kind, [&](auto one) { convert(buffer, (const decltype(one) *)start, count); });
    return buffer;
}

// Call f with the function z of the logits, in float32 if `single`.
template <Way chosen> struct Chosen {
    static constexpr Way way = chosen;
};
template <bool single, class Function> INLINED auto in_way(const Transform &transform, Function f) {
    if (transform.softcap != 0.0) return f(Chosen<CAPPED>{});
    if (transform.scale == 1.0) return f(Chosen<PLAIN>{});
    if constexpr (single)
        if (transform.direct()) return f(Chosen<SCALED>{});
    return f(Chosen<SCALED_IN_DOUBLE>{});
}

// The least logit whose exponential the fast loops compute, and whether they may be used for logits up to `top`.
template <class Arithmetic> static inline bool near(double top, const Transform &transform, double &lowest) {
    constexpr double REACH = Arithmetic::POINT == 30 ? 2048.0 : 0x1p20;
    if (transform.softcap != 0.0) {
        lowest = -infinity();
        return transform.softcap <= 2000.0 && transform.scale <= 0x1p64 && transform.scale >= 0x1p-64;
    }
    if (!(transform.scale <= 0x1p64 && transform.scale >= 0x1p-64)) return false;
    double z = transform.scale * top;
    lowest = -REACH / transform.scale;
    return z <= REACH - 1.0 && z >= -REACH + 200.0;
}

template <class Arithmetic> constexpr bool is_single() { return Arithmetic::POINT == 30; }

template <class Arithmetic, class T>
static void add_near(Sum &sum, const T *x, long count, double lowest, const Transform &transform) {
    in_way<is_single<Arithmetic>()>(transform, [&](auto chosen) {
        add_exponentials<decltype(chosen)::way>(sum, x, count, typename Arithmetic::Number(lowest), transform);
    });
}

template <class Arithmetic, class T>
static bool fill_near_entropies(Terms &terms, const T *x, long count, double lowest, const Transform &transform) {
    return in_way<is_single<Arithmetic>()>(transform, [&](auto chosen) {
        return fill_entropies<decltype(chosen)::way>(terms, x, count, typename Arithmetic::Number(lowest), transform);
    });
}

// Add exp(z) z of classes; none is larger than the classes for which `near` found `lowest`.
template <class Arithmetic, class T>
static void add_near_entropies(Sum &sum, const T *x, long count, double lowest, const Transform &transform) {
    constexpr int64_t ANY = INT64_MIN;  // no part of such a product is subnormal
    Terms terms;
    for (long first = 0, some; first < count; first += some) {
        some = count - first < TERMS ? count - first : long(TERMS);
        if (fill_near_entropies<Arithmetic>(terms, x + first, some, lowest, transform) &&
            add_terms(sum, terms, some, ANY))
            continue;
        for (long i = first; i < first + some; i++) {
            double value = number_at(x, i);
            if (!finite(value) || is_huge(value, transform)) continue;
            auto e = exponential<Arithmetic>(value, transform);
            add_entropy<Arithmetic>(sum, fixed_point(e.t), e.n - Arithmetic::POINT, value, transform);
        }
    }
}

template <class T>
static bool fill_near_weighted(Terms &terms, const T *x, const double *u, bool ones, long count,
                               const Transform &transform) {
    return in_way<false>(transform, [&](auto chosen) {
        return fill_weighted<decltype(chosen)::way>(terms, x, u, ones, count, transform);
    });
}

// Add u and u z of the classes of a chunk from `first` to `end`.
template <class T>
static void add_weights(State &state, const T *x, long first, long end, const Weights &weights, const Call &call) {
    constexpr int64_t LOWEST = -20;
    const Transform &transform = call.transform;
    bool fits = transform.softcap <= 2000.0 && transform.scale >= 0x1p-64;
    Terms terms;
    double u[TERMS + LANES];
    for (long some; first < end; first += some) {
        some = end - first < TERMS ? end - first : long(TERMS);
        weights.fill(u, first, some, some + LANES);
        if (call.has(WEIGHT)) {
            terms.parts = 1;
            terms.scaled = false;
            memcpy(terms.part[0], u, (some + LANES < TERMS ? some + LANES : long(TERMS)) * sizeof(double));
            if (!add_terms(state.weight, terms, some, LOWEST))
                for (long i = 0; i < some; i++) add_wide(state.weight, u + i, 1, 0);
        }
        if (!call.has(WEIGHTED_LOGIT)) continue;
        Sum &sum = state.weighted_logit;
        if constexpr (sizeof(T) < 8)
            if (weights.ones() && transform.scale == 1.0 && transform.softcap == 0.0 && add_numbers(sum, x + first, some))
                continue;
        if (fits && sum.grid < INFINITE && fill_near_weighted(terms, x + first, u, weights.ones(), some, transform) &&
            add_terms(sum, terms, some, LOWEST))
            continue;
        for (long i = 0; i < some; i++) add_weighted_logit(sum, number_at(x, first + i), u[i], transform);
    }
}

// Add the exponentials, and exp(z) z, of classes that are not held.
template <class Arithmetic, class T> static void add_others(State &state, const T *x, long count, const Call &call) {
    const Transform &transform = call.transform;
    double top = largest(x, count), leading = state.held, before = call.has(HOLD_LARGEST) ? -infinity() : state.top;
    if (top == infinity()) top = not_a_number();
    if (!call.has(HOLD_LARGEST)) {
        leading = larger(state.top, top);
        if (leading != state.top && is_huge(leading, transform)) forget_exponentials(state);
        state.top = canonical(leading);
    }
    if (!finite(leading)) return forget_exponentials(state);
    if (top == -infinity()) return;
    double lowest;
    if (!is_huge(leading, transform) && near<Arithmetic>(top, transform, lowest)) {
        if (call.has(ENTROPY)) add_near_entropies<Arithmetic>(state.entropy, x, count, lowest, transform);
        if (top > before) state.sum.raise(grid_of<Arithmetic>(top, transform));
        return add_near<Arithmetic>(state.sum, x, count, lowest, transform);
    }
    Call exponentials = {call.fields & (HOLD_LARGEST | ENTROPY), transform};
    for (long i = 0; i < count; i++) {
        double value = number_at(x, i);
        if (counts(value, leading, call)) add_class<Arithmetic>(state, value, 1.0, exponentials);
    }
}

// The k largest of a row and their columns, the first among equals; nan is larger than numbers. k is at most `count`.
template <class T> static void largest_of(const T *x, long count, long k, double *values, int64_t *columns) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    long held = 0;
    auto comes_before = [](double v, double other) { return v > other || (v != v && other == other); };
    auto take = [&](long column) {
        double v = number_at(x, column);
        if (held == k && !comes_before(v, values[k - 1])) return;
        long place = held < k ? held++ : k - 1;
        for (; place > 0 && comes_before(v, values[place - 1]); place--) {
            values[place] = values[place - 1];
            columns[place] = columns[place - 1];
        }
        values[place] = v;
        columns[place] = column;
    };
    for (long i = 0; i < k; i++) take(i);
    for (long i = k; i < count && values[k - 1] == values[k - 1]; i += lanes) {  // nothing comes before a nan
        auto v = load_up_to(x + i, count - i);
        auto found = (v > decltype(v){} + decltype(v[0] + v[0])(values[k - 1])) | (v != v);
        if (!any_less((Ints)found, Ints{})) continue;
        for (long lane = 0; lane < lanes && i + lane < count; lane++) take(i + lane);
    }
}

// The first of the largest logits or, with weights, of those with most weight; nan is larger than numbers.
template <class T> static long place_of_largest(const T *x, long count, const Weights *weights) {
    double top = largest(x, count);
    long place = place_of(top, x, 0, count);
    if (!weights) return place;
    double most = weights->at(place);
    for (long i = place; (i = place_of(top, x, i + 1, count)) < count;) {
        double u = weights->at(i);
        if (heavier(u, most)) most = u, place = i;
    }
    return place;
}

// Add a chunk of a row, whose first class has the number `first_class`, to a state; its target is at `column`.
template <class Arithmetic, class T>
static void add_chunk(State &total, const T *x, long count, long column, int64_t first_class, const Weights &weights,
                      const Call &call, bool first_chunk) {
    bool largest = call.has(HOLD_LARGEST), here = column >= 0 && column < count;
    State part = State::identity(), &state = largest ? part : total;
    long held = here ? column : -1;
    if (call.has(TARGET) && here) state.target = canonical(number_at(x, held));
    if (largest) {
        held = place_of_largest(x, count, call.has(HELD_WEIGHT) && !call.has(ARGMAX) ? &weights : nullptr);
        state.argmax = first_class + held;
    }
    if (held >= 0) {
        state.held = canonical(number_at(x, held));
        if (call.has(HELD_WEIGHT)) state.held_weight = canonical(weights.at(held));
    }
    long end = held < 0 ? count : held;
    if (end > 0) add_others<Arithmetic>(state, x, end, call);
    if (end + 1 < count) add_others<Arithmetic>(state, x + end + 1, count - end - 1, call);
    if (call.has(WEIGHT) || call.has(WEIGHTED_LOGIT)) {
        add_weights(state, x, 0, end, weights, call);
        add_weights(state, x, end + 1, count, weights, call);
    }
    if (largest && first_chunk)
        total = part;
    else if (largest)
        merge<Arithmetic>(total, part, call);
}

// Gradients of a row

template <class Arithmetic, class T, class To>
static void write_all_near(const T *x, To *out, long count, const RowFactor &row, double lowest,
                           const Transform &transform, double *slopes, bool past_cache) {
    in_way<is_single<Arithmetic>()>(transform, [&](auto chosen) {
        write_near<decltype(chosen)::way>(x, out, count, row, typename Arithmetic::Number(lowest), transform, slopes,
                                          past_cache);
    });
}

template <class Arithmetic, class T>
static void write_chunk(const T *x, T *out, long count, const Weights &weights, const RowFactor &row, double most,
                        const Call &call, bool past_cache) {
    typedef typename Arithmetic::Number Number;
    // Beyond this distance a logit that is not near underflows.
    constexpr int64_t REACH = Arithmetic::POINT == 30 ? 2700 : 1500000;
    const Transform &transform = call.transform;
    double lowest;
    bool in_loops = !row.huge && finite(row.factor) && near<Arithmetic>(most, transform, lowest) &&
                    row.exponent < REACH && row.exponent > -REACH;
    // The scalar functions compute gradients that are larger than any of a loss.
    double largest = transform.softcap != 0.0 ? transform.softcap : transform.scale * most;
    in_loops = in_loops && largest * LOG2E + double(row.exponent) < (Arithmetic::POINT == 30 ? 100.0 : 1000.0);
    if (in_loops && !call.has(WEIGHTED_LOGIT) && !call.has(ENTROPY) && transform.softcap == 0.0)
        return write_all_near<Arithmetic>(x, out, count, row, lowest, transform, nullptr, past_cache);
    if (in_loops) {
        Number values[TERMS + LANES];
        double u[TERMS + LANES], slopes[TERMS + LANES];
        for (long at = 0, some; at < count; at += some) {
            some = count - at < TERMS ? count - at : long(TERMS);
            if (call.has(WEIGHTED_LOGIT)) weights.fill(u, at, some, some + LANES);
            write_all_near<Arithmetic>(x + at, values, some, row, lowest, transform, slopes, false);
            const double *weight = call.has(WEIGHTED_LOGIT) ? u : nullptr;
            in_way<false>(transform, [&](auto chosen) {
                finish_near<decltype(chosen)::way>(values, x + at, out + at, weight, slopes, some, row, call);
            });
        }
        return;
    }
    for (long i = 0; i < count; i++) {
        double u = call.has(WEIGHTED_LOGIT) ? weights.at(i) : 1.0;
        T value = of_number<T>(gradient_of<Arithmetic>(number_at(x, i), u, row, call));
        memcpy((char *)out + i * long(sizeof value), &value, sizeof value);
    }
}
