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
            case FLOAT32: return at<float>(index);
            case FLOAT64: return at<double>(index);
            case FLOAT16: return number_of(at<Half>(index));
            default: return number_of(at<BFloat>(index));
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
    if (transform.softcap != 0.0) return CAPPED;
    if (transform.scale == 1.0) return PLAIN;
    return single && !transform.direct() ? CAPPED : SCALED;
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
        case PLAIN: return add_exponentials<PLAIN>(sum, x, count, Number(lowest), transform);
        case SCALED:
            if constexpr (Arithmetic::POINT == 30) return add_exponentials<SCALED>(sum, x, count, Number(lowest), transform);
        default: return add_exponentials<CAPPED>(sum, x, count, Number(lowest), transform);
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
    if (!huge && !call.has(ENTROPY) && near<Arithmetic>(top, transform, lowest)) {
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
static State state_of(const Line &row, long classes, long column, long first_class, const Weights &weights, const Call &call) {
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
            for (long i = 0; i < count; i++) {
                if (i == held) continue;
                double u = weights.at(first + i);
                if (call.has(WEIGHT)) add_wide(state.weight, &u, 1, 0);
                if (call.has(WEIGHTED_LOGIT)) add_weighted_logit(state.weighted_logit, number_of(x[i]), u, call.transform);
            }
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
static void write_chunk(const T *x, T *out, long count, long first, const Weights &weights, const RowFactor &row, double most, const Call &call) {
    typedef typename Arithmetic::Number Number;
    // So far from it that a logit which is not near underflows.
    constexpr int64_t REACH = Arithmetic::POINT == 30 ? 2700 : 1500000;
    const Transform &transform = call.transform;
    double lowest;
    bool plain = !call.has(WEIGHTED_LOGIT) && transform.softcap == 0.0;
    if (plain && !row.huge && finite(row.factor) && near<Arithmetic>(most, transform, lowest) &&
        row.exponent < REACH && row.exponent > -REACH) {
        switch (way_of(transform, Arithmetic::POINT == 30)) {
            case PLAIN: return write_near<PLAIN>(x, out, count, row, Number(lowest), transform);
            case SCALED:
                if constexpr (Arithmetic::POINT == 30) return write_near<SCALED>(x, out, count, row, Number(lowest), transform);
            default: return write_near<CAPPED>(x, out, count, row, Number(lowest), transform);
        }
    }
    for (long i = 0; i < count; i++) {
        double u = call.has(WEIGHTED_LOGIT) ? weights.at(first + i) : 1.0;
        out[i] = of_number<T>(gradient_of<Arithmetic>(number_of(x[i]), u, row, call));
    }
}
