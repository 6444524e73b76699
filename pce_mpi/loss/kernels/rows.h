// Rows of logits to states, and rows of gradients; included once for each instruction set after `loops.h`.

enum { CHUNK = 4096 };

// A row's logits, or its probabilities, at a constant distance in memory.
struct Line {
    const char *start;
    long stride;
    int kind;  // a Kind

    template <class T> T at(long index) const {
        T value;
        memcpy(&value, start + index * stride, sizeof value);
        return value;
    }
    double number(long index) const {
        switch (kind) {
            case FLOAT32:
                return at<float>(index);
            case FLOAT64:
                return at<double>(index);
            case FLOAT16:
                return number_of(at<Half>(index));
            default:
                return number_of(at<BFloat>(index));
        }
    }
};

// The weight u of each class of a row.
struct Weights {
    const double *weight;  // or none
    Line probabilities;    // start: none
    double kept, share;    // 1 - smoothing, and smoothing / classes; share 0: no smoothing

    double at(long index) const {
        double u = 1.0;
        if (probabilities.start) {
            u = probabilities.number(index);
            if (share != 0.0) u = u * kept + share;
            return weight ? u * weight[index] : u;
        }
        return weight ? weight[index] : u;
    }
};

// Logits of a chunk as numbers of type T, in the caller's memory where it is consecutive.
template <class T> static const T *chunk_of(const Line &row, long first, long count, T *buffer) {
    if (row.kind == kind_of<T>() && row.stride == long(sizeof(T))) return (const T *)(row.start + first * row.stride);
    for (long i = 0; i < count; i++) {
        if (row.kind == kind_of<T>())
            buffer[i] = row.at<T>(first + i);
        else
            buffer[i] = of_number<T>(row.number(first + i));
    }
    return buffer;
}

static Line row_of(const Array &array, long outer, long inner) {
    return {array.data + outer * array.strides[0] + inner * array.strides[2], array.strides[1], array.kind};
}

static inline Way way_of(const Transform &transform, bool single) {
    if (transform.softcap != 0.0) return GENERAL;
    if (transform.scale == 1.0) return PLAIN;
    return single && !transform.direct() ? GENERAL : SCALED;
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

template <class Arithmetic, class T>
static void add_near(Sum &sum, const T *x, long count, double lowest, const Transform &transform) {
    typedef typename Arithmetic::Number Number;
    switch (way_of(transform, Arithmetic::POINT == 30)) {
        case PLAIN:
            return add_exponentials<PLAIN>(sum, x, count, Number(lowest), transform);
        case SCALED:
            if constexpr (Arithmetic::POINT == 30)
                return add_exponentials<SCALED>(sum, x, count, Number(lowest), transform);
        default:
            return add_exponentials<GENERAL>(sum, x, count, Number(lowest), transform);
    }
}

template <class T>
static bool fill_near_entropies(Terms &terms, const T *x, long count, double lowest, const Transform &transform) {
    switch (way_of(transform, true)) {
        case PLAIN:
            return fill_entropies<PLAIN>(terms, x, count, float(lowest), transform);
        case SCALED:
            return fill_entropies<SCALED>(terms, x, count, float(lowest), transform);
        default:
            return fill_entropies<GENERAL>(terms, x, count, float(lowest), transform);
    }
}

// Add exp(z) z of classes none of which is larger than those for which `near` found `lowest`.
template <class T>
static void add_near_entropies(Sum &sum, const T *x, long count, double lowest, const Transform &transform) {
    constexpr int64_t ANY = INT64_MIN;  // no part of such a product is subnormal
    Terms terms;
    for (long first = 0, some; first < count; first += some) {
        some = count - first < TERMS ? count - first : long(TERMS);
        const int parts = way_of(transform, true) == PLAIN ? 2 : 3;
        if (fill_near_entropies(terms, x + first, some, lowest, transform) && add_terms(sum, terms, some, parts, ANY))
            continue;
        for (long i = first; i < first + some; i++) {
            double value = number_of(x[i]);
            if (!finite(value)) continue;
            auto e = exponential<Single>(value, transform);
            add_entropy<Single>(sum, fixed_point(e.t), e.n - Single::POINT, value, transform);
        }
    }
}

// Add u and u z of some classes.
template <class T>
static void add_weights(State &state, const T *x, long count, long first_class, const Weights &weights,
                        const Call &call) {
    constexpr int64_t LOWEST = -20;
    const Transform &transform = call.transform;
    bool plain = transform.softcap == 0.0 && transform.scale == 1.0,
         fits = transform.softcap <= 2000.0 && transform.scale >= 0x1p-64;
    Terms terms = {};
    double u[TERMS], z[TERMS];
    for (long first = 0, some; first < count; first += some) {
        some = count - first < TERMS ? count - first : long(TERMS);
        for (long i = 0; i < TERMS; i++) u[i] = i < some ? weights.at(first_class + first + i) : 0.0;
        if (call.has(WEIGHT)) {
            memcpy(terms.high, u, sizeof u);
            memset(terms.exponent, 0, sizeof terms.exponent);
            if (!add_terms(state.weight, terms, some, 1, LOWEST))
                for (long i = 0; i < some; i++) add_wide(state.weight, u + i, 1, 0);
        }
        if (!call.has(WEIGHTED_LOGIT)) continue;
        Sum &sum = state.weighted_logit;
        for (long i = 0; i < TERMS; i++) z[i] = i < some ? double(number_of(x[first + i])) : 0.0;
        if (fits && sum.grid < INFINITE && fill_weighted(terms, z, u, some, plain, transform) &&
            add_terms(sum, terms, some, 2, LOWEST))
            continue;
        for (long i = 0; i < some; i++) add_weighted_logit(sum, z[i], u[i], transform);
    }
}

// Add the exponentials, and exp(z) z, of classes that are not held.
template <class Arithmetic, class T> static void add_others(State &state, const T *x, long count, const Call &call) {
    const Transform &transform = call.transform;
    double top = largest(x, count), leading = state.held;
    if (!call.has(HOLD_LARGEST)) {
        leading = larger(state.top, top);
        if (leading != state.top && is_huge(leading, transform)) forget_exponentials(state);
        state.top = canonical(leading);
    }
    if (!finite(leading)) return forget_exponentials(state);
    if (top == -infinity()) return;
    double lowest;
    bool huge = is_huge(leading, transform);
    bool in_loops = Arithmetic::POINT == 30 || !call.has(ENTROPY);
    if (!huge && in_loops && near<Arithmetic>(top, transform, lowest)) {
        if constexpr (Arithmetic::POINT == 30)
            if (call.has(ENTROPY)) add_near_entropies(state.entropy, x, count, lowest, transform);
        int64_t grid = grid_of<Arithmetic>(top, transform);
        if (grid + 4 < state.sum.grid) return;
        state.sum.raise(grid);
        return add_near<Arithmetic>(state.sum, x, count, lowest, transform);
    }
    Call exponentials = {call.fields & (HOLD_LARGEST | ENTROPY), transform};
    for (long i = 0; i < count; i++) {
        double value = number_of(x[i]);
        if (!huge || value == leading) add_class<Arithmetic>(state, value, 1.0, exponentials);
    }
}

template <class T> static long place_of_largest(const T *x, long count) {
    long place = 0;
    double top = number_of(x[0]);
    for (long i = 1; i < count && top == top; i++) {
        double value = number_of(x[i]);
        if (value > top || value != value) top = value, place = i;
    }
    return place;
}

template <class T> static long place_of_largest(const T *x, long count, const Weights &weights, long first) {
    long place = place_of_largest(x, count);
    double top = number_of(x[place]), most = weights.at(first + place);
    for (long i = place + 1; i < count; i++) {
        double value = number_of(x[i]);
        if ((value == top || (value != value && top != top)) && weights.at(first + i) > most) {
            most = weights.at(first + i);
            place = i;
        }
    }
    return place;
}

template <class Arithmetic, class T>
static State state_of(const Line &row, long classes, long column, long first_class, const Weights &weights,
                      const Call &call) {
    State total = State::identity();
    T buffer[CHUNK];
    for (long first = 0, count; first < classes; first += count) {
        count = classes - first < CHUNK ? classes - first : long(CHUNK);
        const T *x = chunk_of(row, first, count, buffer);
        bool largest = call.has(HOLD_LARGEST), here = column >= first && column < first + count;
        State part = State::identity(), &state = largest ? part : total;
        long held = here ? column - first : -1;
        if (call.has(TARGET) && here) state.target = canonical(number_of(x[held]));
        if (largest) {
            bool by_weight = call.has(HELD_WEIGHT) && !call.has(ARGMAX);
            held = by_weight ? place_of_largest(x, count, weights, first) : place_of_largest(x, count);
            state.argmax = first_class + first + held;
        }
        if (held >= 0) {
            state.held = canonical(number_of(x[held]));
            state.held_weight = weights.at(first + held);
        }
        long end = held < 0 ? count : held;
        if (end > 0) add_others<Arithmetic>(state, x, end, call);
        if (end + 1 < count) add_others<Arithmetic>(state, x + end + 1, count - end - 1, call);
        if (call.has(WEIGHT) || call.has(WEIGHTED_LOGIT)) {
            add_weights(state, x, end, first, weights, call);
            if (end + 1 < count) add_weights(state, x + end + 1, count - end - 1, first + end + 1, weights, call);
        }
        if (largest && first == 0)
            total = part;
        else if (largest)
            merge<Arithmetic>(total, part, call);
    }
    return total;
}

// Gradients of a row

template <class Arithmetic, class T>
static void write_all_near(const T *x, T *out, long count, const RowFactor &row, double lowest,
                           const Transform &transform) {
    typedef typename Arithmetic::Number Number;
    switch (way_of(transform, Arithmetic::POINT == 30)) {
        case PLAIN:
            return write_near<PLAIN>(x, out, count, row, Number(lowest), transform);
        case SCALED:
            if constexpr (Arithmetic::POINT == 30)
                return write_near<SCALED>(x, out, count, row, Number(lowest), transform);
        default:
            return write_near<GENERAL>(x, out, count, row, Number(lowest), transform);
    }
}

template <class Arithmetic, class T>
static void write_chunk(const T *x, T *out, long count, long first, const Weights &weights, const RowFactor &row,
                        double most, const Call &call) {
    typedef typename Arithmetic::Number Number;
    // So far from it that a logit which is not near underflows.
    constexpr int64_t REACH = Arithmetic::POINT == 30 ? 2700 : 1500000;
    const Transform &transform = call.transform;
    double lowest;
    bool in_loops = !row.huge && finite(row.factor) && near<Arithmetic>(most, transform, lowest) &&
                    row.exponent < REACH && row.exponent > -REACH;
    // Larger gradients than any that a loss has are left to the scalar functions.
    double largest = transform.softcap != 0.0 ? transform.softcap : transform.scale * most;
    in_loops = in_loops && largest * LOG2E + double(row.exponent) < (Arithmetic::POINT == 30 ? 100.0 : 1000.0);
    if (in_loops && !call.has(WEIGHTED_LOGIT) && transform.softcap == 0.0)
        return write_all_near<Arithmetic>(x, out, count, row, lowest, transform);
    if (in_loops) {
        Number logits[CHUNK + LANES], values[CHUNK + LANES];
        double u[CHUNK + LANES];
        for (long i = 0; i < count; i++) {
            logits[i] = Number(number_of(x[i]));
            u[i] = call.has(WEIGHTED_LOGIT) ? weights.at(first + i) : 0.0;
        }
        for (long i = count; i < count + LANES; i++) logits[i] = values[i] = 0, u[i] = 0.0;
        write_all_near<Arithmetic>(logits, values, count, row, lowest, transform);
        finish_near(values, logits, call.has(WEIGHTED_LOGIT) ? u : nullptr, count, row.weight_factor, transform);
        for (long i = 0; i < count; i++) {
            Number value = values[i];
            out[i] = of_number<T>(value == value ? value : Number(not_a_number()));
        }
        return;
    }
    for (long i = 0; i < count; i++) {
        double u = call.has(WEIGHTED_LOGIT) ? weights.at(first + i) : 1.0;
        out[i] = of_number<T>(gradient_of<Arithmetic>(number_of(x[i]), u, row, call));
    }
}
