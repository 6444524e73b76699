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
    // Whether u are numbers of float32.
    bool short_ones() const { return !weight && share == 0.0 && !(probabilities && kind == FLOAT64); }
    double at(long index) const {
        double buffer[2 * LANES];
        return of(index, 1, buffer)[0];
    }
    // u of some classes, and 0 in unused lanes of the last vector; the buffer has room for LANES more.
    const double *of(long first, long count, double *u) const {
        if (weight && !probabilities && count % LANES == 0) return weight + first;
        if (probabilities)
            of_kind(kind, [&](auto one) { convert(u, (const decltype(one) *)probabilities + first, count); });
        else if (weight)
            convert(u, weight + first, count);
        else
            for (long i = 0; i < count; i += LANES / 2) store(u + i, doubles(1.0));
        const Doubles factor = doubles(kept), more = doubles(share);
        for (long i = 0; probabilities && share != 0.0 && i < count; i += LANES / 2) {
            Doubles some = load_or_zeros(u + i, count - i);
            store(u + i, some * factor + more);
        }
        for (long i = 0; probabilities && weight && i < count; i += LANES / 2) {
            Doubles some = load_or_zeros(u + i, count - i);
            store(u + i, some * load_or_zeros(weight + first + i, count - i));
        }
        for (long i = 0; i < LANES; i++) u[count + i] = 0.0;
        return u;
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
template <class Precision> static inline bool near(double top, const Transform &transform, double &lowest) {
    constexpr double REACH = Precision::POINT == 30 ? 2048.0 : 0x1p20;
    if (transform.softcap != 0.0) {
        lowest = -infinity();
        return transform.softcap <= 2000.0 && transform.scale <= 0x1p64 && transform.scale >= 0x1p-64;
    }
    if (!(transform.scale <= 0x1p64 && transform.scale >= 0x1p-64)) return false;
    double z = transform.scale * top;
    lowest = -REACH / transform.scale;
    return z <= REACH - 1.0 && z >= -REACH + 200.0;
}

template <class Precision> constexpr bool is_single() { return Precision::POINT == 30; }

// Add the exponentials, and exp(z) z if asked to, of classes of which the largest is `top`.
template <class Precision, class T>
static void add_near(State &state, const T *x, long count, double top, double lowest, const Call &call) {
    typedef typename Precision::Number Number;
    typedef decltype(fixed_point(Number{})) Integer;
    constexpr int64_t ANY = INT64_MIN;  // no part of exp(z) z is subnormal
    const Transform &transform = call.transform;
    in_way<is_single<Precision>()>(transform, [&](auto chosen) {
        constexpr Way way = decltype(chosen)::way;
        auto add = [&](const T *logits, long some, auto each) {
            if constexpr (!is_single<Precision>()) {
                add_exponentials<way>(state.sum, logits, some, lowest, transform, each);
            } else if constexpr (is_direct(way)) {
                add_exponentials<way>(state.sum, logits, nullptr, some, transform, each);
            } else {
                Reduced reduced;
                reduce<way, false>(reduced, logits, some, Number(lowest), transform, nullptr);
                add_exponentials<REDUCED>(state.sum, reduced.rest, reduced.n, some, transform, each);
            }
        };
        bool entropy = call.has(ENTROPY);
        if (entropy) {  // the largest logit has the grid of the sum, most often
            auto e = exponential<Precision>(top, transform);
            Sum alone = {NO_ENTROPY, {0, 0, 0}};
            add_entropy<Precision>(alone, fixed_point(e.t), e.n - Precision::POINT, top, transform);
            state.entropy.raise(alone.grid);
        }
        const bool whole = !entropy && (!is_single<Precision>() || is_direct(way));
        Integer n[BLOCK], fixed[BLOCK];
        for (long some; count > 0; x += some, count -= some) {
            some = whole || count < BLOCK ? count : long(BLOCK);
            if (!entropy) {
                add(x, some, [](auto...) {});
                continue;
            }
            add(x, some, [&](long i, auto n_of, auto fixed_of, auto...) {
                store_bytes(n + i, n_of);
                store_bytes(fixed + i, fixed_of);
            });
            int64_t guess = state.entropy.grid == NO_ENTROPY ? 0 : state.entropy.grid;
            auto fill = [&](int64_t grid, WideTotal &total) {
                constexpr Way in_double = way == SCALED ? SCALED_IN_DOUBLE : way;
                bool guessed = grid != state.entropy.grid;
                return fill_entropies<in_double>(total, grid, guessed, x, n, fixed, BIAS<way>, some, Number(lowest),
                                                 transform);
            };
            if (guess < 1 << 20 && add_total(state.entropy, guess, ANY, fill)) continue;
            for (long i = 0; i < some; i++) {
                double value = number_at(x, i);
                if (!finite(value)) continue;
                auto e = exponential<Precision>(value, transform);
                add_entropy<Precision>(state.entropy, fixed_point(e.t), e.n - Precision::POINT, value, transform);
            }
        }
    });
}

// Add u and u z of the classes of a chunk from `first` to `end`.
template <class T>
static void add_weights(State &state, const T *x, long first, long end, const Weights &weights, const Call &call) {
    const Transform &transform = call.transform;
    bool fits = transform.softcap <= 2000.0 && transform.scale >= 0x1p-64;
    bool exact = sizeof(T) < 8 && weights.short_ones();
    double buffer[TERMS + LANES];
    for (long some; first < end; first += some) {
        some = end - first < TERMS ? end - first : long(TERMS);
        const T *logits = x + first;
        Sum &sum = state.weighted_logit;
        if constexpr (sizeof(T) < 8)
            if (weights.ones() && transform.scale == 1.0 && transform.softcap == 0.0 && add_numbers(sum, logits, some))
                continue;
        const double *u = weights.of(first, some, buffer);
        auto fill = [&](double unit, WideTotal &total) {
            fill_weights(total, unit, u, some);
            return true;
        };
        if (call.has(WEIGHT) && !add_total(state.weight, fill))
            for (long i = 0; i < some; i++) add_number(state.weight, u[i]);
        if (!call.has(WEIGHTED_LOGIT)) continue;
        auto fill_products = [&](double unit, WideTotal &total) {
            return in_way<false>(transform, [&](auto chosen) {
                return fill_weighted<decltype(chosen)::way>(total, unit, logits, u, some, exact, transform);
            });
        };
        if (fits && sum.grid < INFINITE && add_total(sum, fill_products)) continue;
        for (long i = 0; i < some; i++) add_weighted_logit(sum, number_at(logits, i), u[i], transform);
    }
}

// Return the largest logit of some classes, and add their exponentials to `trial` on the way, if it has a grid, a guess,
// and float32 can reduce them as they are. Otherwise `trial` has no grid then.
template <class T> static double largest(Sum &trial, const T *x, long count, const Transform &transform) {
    if constexpr (sizeof(T) < 8) {
        if (trial.grid != NO_SUM && transform.direct()) {
            Top<Floats> top = {floats(-__builtin_inff())};
            auto see = [&](long, auto, auto, Floats v) __attribute__((always_inline)) { top.add(v); };
            transform.scale == 1.0 ? add_exponentials<PLAIN>(trial, x, nullptr, count, transform, see)
                                   : add_exponentials<SCALED>(trial, x, nullptr, count, transform, see);
            return top.value();
        }
    }
    trial.grid = NO_SUM;
    return largest(x, count);
}

// The grid that the sum of a row may have: that with which the row before began, if the one before it did too.
struct Guess {
    int64_t grid = 0;
    bool sure = true;

    int64_t of(const State &state) const { return state.sum.grid != NO_SUM ? state.sum.grid : sure ? grid : NO_SUM; }
    void begin(int64_t found) {
        sure = found == grid;
        grid = found;
    }
};

// Add the exponentials, and exp(z) z, of classes that are not held.
template <class Precision, class T>
static void add_others(State &state, const T *x, long count, Guess &guess, const Call &call) {
    const Transform &transform = call.transform;
    const bool begins = state.sum.grid == NO_SUM;
    Sum trial = {call.has(ENTROPY) ? NO_SUM : guess.of(state), {0, 0, 0}};
    double top = largest(trial, x, count, transform);
    double leading = state.held, before = call.has(HOLD_LARGEST) ? -infinity() : state.top;
    if (top == infinity()) top = not_a_number();
    if (!call.has(HOLD_LARGEST)) {
        leading = larger(state.top, top);
        if (leading != state.top && is_huge(leading, transform)) forget_exponentials(state);
        state.top = canonical(leading);
    }
    if (!finite(leading)) return forget_exponentials(state);
    if (top == -infinity()) return;
    double lowest;
    if (!is_huge(leading, transform) && near<Precision>(top, transform, lowest)) {
        if (top > before) state.sum.raise(grid_of<Precision>(top, transform));
        if (begins) guess.begin(state.sum.grid);
        if (state.sum.grid == trial.grid) return state.sum.add(trial);
        return add_near<Precision>(state, x, count, top, lowest, call);
    }
    Call exponentials = {call.fields & (HOLD_LARGEST | ENTROPY), transform};
    for (long i = 0; i < count; i++) {
        double value = number_at(x, i);
        if (counts(value, leading, call)) add_class<Precision>(state, value, 1.0, exponentials);
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

// A short row is copied, and the class held apart masked in the copy: two loops over its parts take longer.
enum { SHORT = 1024 };
template <class T> static inline void copy_without(long held, const T *x, long count, T *to) {
    typedef typename Stored<T>::Vector Vector;
    constexpr long lanes = sizeof(Vector) / sizeof(T);
    long i = 0;
    for (; i + lanes <= count; i += lanes) {
        __builtin_prefetch(x + i + CHUNK, 0, 2);
        store_bytes(to + i, load_bytes<Vector>(x + i));
    }
    store_bytes(to + i, load_bytes_of(x + i, count - i, Vector{}));
    to[held] = masked<T>();
}

// Add a chunk of a row, whose first class has the number `first_class`, to a state; its target is at `column`.
template <class Precision, class T>
static void add_chunk(State &total, const T *x, long count, long column, int64_t first_class, const Weights &weights,
                      const Call &call, bool first_chunk, Guess &guess) {
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
    if (held >= 0 && count <= SHORT) {
        T others[SHORT + LANES];
        copy_without(held, x, count, others);
        add_others<Precision>(state, others, count, guess, call);
    } else {
        if (end > 0) add_others<Precision>(state, x, end, guess, call);
        if (end + 1 < count) add_others<Precision>(state, x + end + 1, count - end - 1, guess, call);
    }
    if (call.has(WEIGHT) || call.has(WEIGHTED_LOGIT)) {
        add_weights(state, x, 0, end, weights, call);
        add_weights(state, x, end + 1, count, weights, call);
    }
    if (largest && first_chunk)
        total = part;
    else if (largest)
        merge<Precision>(total, part, call);
}

// Gradients of a row

constexpr double LARGEST_EXPONENT = 100.0;  // of a gradient in a loop of float32

template <class Precision, class T>
static void write_chunk(const T *x, T *out, long count, const Weights &weights, const RowFactor &row, double most,
                        const Call &call, bool past_cache) {
    typedef typename Precision::Number Number;
    // Beyond this distance a logit that is not near underflows.
    constexpr int64_t REACH = Precision::POINT == 30 ? 2700 : 1500000;
    const Transform &transform = call.transform;
    double lowest;
    bool in_loops = !row.huge && finite(row.factor) && near<Precision>(most, transform, lowest) &&
                    row.exponent < REACH && row.exponent > -REACH;
    // The scalar functions compute gradients that are larger than any of a loss.
    double largest = transform.softcap != 0.0 ? transform.softcap : transform.scale * most;
    in_loops = in_loops && largest * LOG2E + double(row.exponent) < (Precision::POINT == 30 ? LARGEST_EXPONENT : 1000.0);
    if (in_loops) {
        const bool weighted = call.has(WEIGHTED_LOGIT);
        const bool finished = weighted || call.has(ENTROPY) || transform.softcap != 0.0;
        in_way<is_single<Precision>()>(transform, [&](auto chosen) {
            constexpr Way way = decltype(chosen)::way;
            double slopes[BLOCK], buffer[BLOCK + LANES];
            Number values[BLOCK];
            auto write = [&](const T *logits, auto *to, long some) {
                if constexpr (!is_single<Precision>()) {
                    constexpr bool is_short = std::is_same<Precision, Short>::value;
                    write_near<way, is_short>(logits, to, some, row, lowest, transform, slopes);
                } else if constexpr (is_direct(way)) {
                    write_near<way>(logits, nullptr, to, some, row, Number(lowest), transform, past_cache && !finished);
                } else {
                    Reduced reduced;
                    reduce<way, way == CAPPED>(reduced, logits, some, Number(lowest), transform, slopes);
                    write_near<REDUCED>(reduced.rest, reduced.n, to, some, row, Number(lowest), transform, false);
                }
            };
            if (!finished && (!is_single<Precision>() || is_direct(way))) return write(x, out, count);
            for (long at = 0, some; at < count; at += some) {
                some = count - at < BLOCK ? count - at : long(BLOCK);
                if (!finished) {
                    write(x + at, out + at, some);
                    continue;
                }
                const double *u = weighted && !weights.ones() ? weights.of(at, some, buffer) : nullptr;
                write(x + at, values, some);
                constexpr Way in_double = way == SCALED ? SCALED_IN_DOUBLE : way;
                finish_near<in_double>(values, x + at, out + at, u, slopes, some, row, call);
            }
        });
        return;
    }
    for (long i = 0; i < count; i++) {
        double u = call.has(WEIGHTED_LOGIT) ? weights.at(i) : 1.0;
        T value = of_number<T>(gradient_of<Precision>(number_at(x, i), u, row, call));
        memcpy((char *)out + i * long(sizeof value), &value, sizeof value);
    }
}
