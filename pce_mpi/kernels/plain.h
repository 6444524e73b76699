// Losses without options, for which what a row takes besides its logits is cut down; included once for each instruction
// set after `tables.h`, whose functions define the bits and take the rows that are not ordinary.
//
// What follows from merged states is computed for a vector of rows at a time.

enum { ROWS = LANES / 2 };

// Whole numbers of less than 52 bits to float64, and back.
INLINED Doubles from_whole(Words v) { return (Doubles)(v | 0x4330000000000000) - 0x1p52; }
INLINED Doubles from_whole(Longs v) { return (Doubles)(v + MAGIC_BITS) - MAGIC; }
INLINED Longs to_whole(Doubles v) { return (Longs)(v + MAGIC) - MAGIC_BITS; }
// Normal numbers as m 2^e, with m in [1, 2) and the sign of v.
INLINED Doubles parts_of(Doubles v, Longs &e) {
    e = ((Longs)v >> 52 & 0x7ff) - 1023;
    return (Doubles)(((Longs)v & 0x800fffffffffffff) | 0x3ff0000000000000);
}
INLINED Doubles sum_and_rest(Doubles a, Doubles b, Doubles &rest) {
    Doubles s = a + b, v = s - a;
    rest = (a - (s - v)) + (b - v);
    return s;
}

// `log1p` of arithmetic.h.
INLINED Doubles log_of_one_and(Doubles a) {
    Longs e, small = a < 0.4;
    Doubles rest, s = sum_and_rest(doubles(1.0), a, rest), m = parts_of(s, e);
    Longs halve = m >= 0x1.6a09e667f3bcdp+0;
    m = halve ? 0.5 * m : m;
    Doubles k = from_whole(e - halve);
    Doubles result = twice_atanh((small ? a : m - 1.0) / (small ? 2.0 + a : m + 1.0));
    return small ? result : (k * HI + (result + k * LO)) + rest / s;
}

// `RowSoftmax` of states.h for some rows, of those that are valid.
struct PlainRows {
    Doubles top, most, odds, normalizer;
    Longs exponent, valid;

    // False if one has a logit that is not near 0.
    template <class Precision> bool take(const uint64_t *states, const bool *are_valid) {
        constexpr int WIDTH = Precision::WIDTH, ABOVE = 64;  // - WIDTH ABOVE is below all n
        constexpr double FAR = 256.0;                        // all powers of two have exponents up to 800
        uint64_t words[5][ROWS];
        int64_t flags[ROWS];
        for (long r = 0; r < ROWS; r++) {
            for (long k = 0; k < 5; k++) words[k][r] = states[5 * r + k];
            flags[r] = -int64_t(are_valid[r]);
        }
        valid = load_bytes<Longs>(flags);
        Doubles held = valid ? load_bytes<Doubles>(words[0]) : Doubles{};
        top = valid ? load_bytes<Doubles>(words[1]) : Doubles{};
        most = held > top ? held : top;
        Words digits[3];
        for (int j = 0; j < 3; j++) digits[j] = load_bytes<Words>(words[2 + j]);
        for (int j = 0; j < 2; j++) digits[j] -= digits[j + 1] << WIDTH;
        Longs usable = (most < FAR) & (held > -FAR) & (top > -FAR);
        usable &= (Longs)(digits[0] | digits[1] | digits[2] | digits[2] << 12) >= 0;
        for (int j = 0; j < 2; j++) {
            digits[j + 1] += digits[j] >> WIDTH;
            digits[j] &= (uint64_t(1) << WIDTH) - 1;
        }
        Longs n, n_top;
        Doubles e = 1.0 + polynomial(exponent_and_rest(held, n));
        exponent_and_rest(top, n_top);
        n -= MAGIC_BITS;
        n_top -= MAGIC_BITS;
        constexpr bool single = Precision::POINT == Single::POINT;
        Doubles n_of_grid = single ? (top * LOG2E32 + MAGIC) - MAGIC : from_whole(n_top);
        // A quotient is half of 1 / WIDTH away from whole numbers.
        Doubles grid = whole((n_of_grid + (WIDTH * ABOVE + 0.5)) * (1.0 / WIDTH)) - ABOVE;
        Longs unit = to_whole(WIDTH * (grid - 2.0));
        const double digit = pce::power(WIDTH), square = pce::power(2 * WIDTH);
        Doubles high = from_whole(digits[2] >> 32) * 0x1p32 * square, low = from_whole(digits[2] & 0xffffffff) * square;
        Doubles rests[3], s = sum_and_rest(high, low, rests[0]);
        s = sum_and_rest(s, from_whole(digits[1]) * digit, rests[1]);
        s = sum_and_rest(s, from_whole(digits[0]), rests[2]);
        s += (rests[0] + rests[1]) + rests[2];
        odds = s / e * power(unit - n);
        exponent = n_top > n ? n_top : n;
        normalizer = 1.0 / (s * power(unit - exponent) + e * power(n - exponent));
        usable &= s > 0.0;
        return !any_less(valid, usable);
    }
};

// Fill the losses of rows and their weights.
static void fill_losses(const Losses &pass) {
    const Merged &merged = pass.merged;
    const bool plain = merged.is_plain(pass.terms);
    for (long first = 0, count; first < merged.rows; first += count) {
        count = merged.rows - first < ROWS ? merged.rows - first : long(ROWS);
        const bool *valid = pass.valid + first;
        const uint64_t *states = merged.states + 5 * first;
        PlainRows rows;
        const bool is_taken = plain && count == ROWS &&
                              (merged.wide ? rows.take<Double>(states, valid) : rows.take<Single>(states, valid));
        if (is_taken && !any_less(doubles(0x1p60), rows.odds)) {
            store(pass.losses + first, rows.valid ? log_of_one_and(rows.odds) : Doubles{});
            store(pass.weights + first, rows.valid ? doubles(1.0) : Doubles{});
            continue;
        }
        merged.softmax(first, count, [&](long r, const RowSoftmax &row, int fields) {
            RowLoss loss = RowLoss::of(row, fields, valid[r], pass.terms);
            pass.losses[first + r] = loss.loss;
            pass.weights[first + r] = loss.weight;
        });
    }
}

// Add numbers, finite or not, to a sum.
static void add_all(Sum &sum, const double *numbers, long count) {
    for (long some; count > 0; numbers += some, count -= some) {
        some = count < TERMS ? count : long(TERMS);
        const long in_vectors = some / (LANES / 2) * (LANES / 2);
        bool added = add_total(sum, [&](double unit, WideTotal &total) {
            fill_weights(total, unit, numbers, in_vectors);
            return true;
        });
        for (long i = added ? in_vectors : 0; i < some; i++) add_number(sum, numbers[i]);
    }
}

// True if a pass is that of a loss without options, by float32 arithmetic, and classes are consecutive in both arrays.
template <class Pass> static bool is_plain(const Pass &pass, const Array &out) {
    const Array &x = pass.logits;
    return !pass.wide && pass.call.is_plain() && x.kind == out.kind && x.shape[2] == 1 && consecutive(x) &&
           consecutive(out);
}

// States of rows of at most SHORT classes, most of them in one loop, as in `add_others`.
template <class T> static void fill_short_rows(const Fill &fill) {
    const long count = fill.logits.shape[1];
    const Transform plain = {1.0, 0.0};
    Guess guess, of_chunks;
    for (long row = 0; row < fill.logits.shape[0]; row++) {
        const T *x = (const T *)(fill.logits.data + row * fill.logits.strides[0]);
        const long column = fill.columns ? long(fill.columns[row]) : -1, held = column >= 0 && column < count ? column : -1;
        State state = State::identity();
        double lowest, top = guess.sure ? 0.0 : largest_without(held, x, count);
        int64_t grid = guess.grid;
        bool usable = near<Single>(top, plain, lowest);
        if (usable && !guess.sure) grid = grid_of<Single>(top, plain);
        while (usable) {
            Top<Floats> largest = {floats(-__builtin_inff())};
            auto see = [&](long, auto, auto, Floats v) __attribute__((always_inline)) { largest.add(v); };
            state.sum = {grid, {0, 0, 0}};
            add_exponentials<PLAIN, true>(state.sum, x, nullptr, count, plain, see, held);
            top = largest.value();
            usable = near<Single>(top, plain, lowest);
            if (usable) grid = grid_of<Single>(top, plain);
            if (grid == state.sum.grid) break;
        }
        if (usable) {
            state.top = top + 0.0;
            if (held >= 0) state.held = canonical(number_at(x, held));
            guess.begin(grid);
        } else {
            state = State::identity();
            add_chunk<Single>(state, x, count, column, 0, {}, fill.call, true, of_chunks);
        }
        state.store<Single>(fill.states + row * 5, fill.call);
    }
}

// The factors of some rows' gradients, and the gradients of the classes held.
struct PlainFactors {
    float high[ROWS], low[ROWS], at_held[ROWS];
    int64_t exponents[ROWS];

    // False if a row needs another way.
    bool take(const GradientRows &given, long first) {
        PlainRows rows;
        if (!rows.take<Single>(given.merged.states + 5 * first, given.valid + first)) return false;
        double upstream[ROWS];
        for (long r = 0; r < ROWS; r++) upstream[r] = given.upstream[first + r];
        Doubles slope = load(upstream) / given.divisor;
        Longs e, likely = rows.odds <= 1.0;
        Doubles less_one = (likely ? -rows.odds : doubles(-1.0)) / (1.0 + (likely ? rows.odds : 1.0 / rows.odds));
        Doubles m = parts_of(slope * rows.normalizer, e);
        Longs exponent = e - rows.exponent;
        HalfFloats upper = __builtin_convertvector(m, HalfFloats);
        store_bytes(high, upper);
        store_bytes(low, __builtin_convertvector(m - __builtin_convertvector(upper, Doubles), HalfFloats));
        store_bytes(at_held, __builtin_convertvector(slope * less_one, HalfFloats));
        store_bytes(exponents, exponent);
        Longs usable = (e > -1000) & (e < 1000) & (rows.most * LOG2E + from_whole(exponent) < LARGEST_EXPONENT);
        return !any_less(rows.valid, usable);
    }
};

template <class T> static void write_plain_rows(const Write &write) {
    const GradientRows &given = write.computed;
    const long classes = write.logits.shape[1], rows = given.merged.rows;
    const bool past_cache = goes_past_cache(write);
    const Transform plain = {1.0, 0.0};
    double lowest;
    near<Single>(0.0, plain, lowest);
    for (long first = 0, count; first < rows; first += count) {
        count = rows - first < ROWS ? rows - first : long(ROWS);
        PlainFactors factors;
        RowGradient gradients[ROWS];
        const bool usable = count == ROWS && factors.take(given, first);
        if (!usable) given.fill(first, count, gradients);
        for (long r = 0, row = first; r < count; r++, row++) {
            const T *x = (const T *)(write.logits.data + row * write.logits.strides[0]);
            T *out = (T *)(write.out.data + row * write.out.strides[0]);
            RowFactor factor;
            if (usable)
                factor.high = factors.high[r], factor.low = factors.low[r], factor.exponent = factors.exponents[r];
            else
                factor = RowFactor::of(gradients[r], plain);
            for (long from = 0, some; from < classes; from += some) {
                some = classes - from < CHUNK ? classes - from : long(CHUNK);
                if (!usable)
                    write_row<Single>(x + from, (char *)(out + from), write.out.kind, some, from, {}, gradients[r],
                                      factor, write.call, past_cache);
                else if (given.valid[row])
                    write_near<PLAIN>(x + from, nullptr, out + from, some, factor, lowest, plain, past_cache);
                else
                    memset((char *)(out + from), 0, some * sizeof(T));
            }
            const long column = given.columns ? long(given.columns[row]) : -1;
            if (usable && given.valid[row] && column >= 0 && column < classes) {
                T value = of_number<T>(factors.at_held[r]);
                memcpy((char *)(out + column), &value, sizeof value);
            }
        }
    }
    if (past_cache) finish_stream();
}

static void fill(const Fill &fill) {
    const bool is_short = is_plain(fill, fill.logits) && fill.logits.shape[1] <= SHORT;
    if (fill.wide) return fill_rows<Double, double>(fill);
    of_kind(fill.logits.kind, [&](auto one) {
        typedef decltype(one) T;
        if constexpr (sizeof(T) < 8) is_short ? fill_short_rows<T>(fill) : fill_rows<Single, T>(fill);
    });
}

static void write(const Write &write) {
    const GradientRows &given = write.computed;
    const bool plain = !write.rows && given.merged.is_plain(given.terms) && is_plain(write, write.out);
    if (write.wide) return write_rows<Double, double>(write);
    // A gradient array of another dtype than the logits' is rounded by way of float32.
    if (write.out.kind != write.logits.kind) return write_rows<Single, float>(write);
    of_kind(write.logits.kind, [&](auto one) {
        typedef decltype(one) T;
        if constexpr (sizeof(T) < 8) plain ? write_plain_rows<T>(write) : write_rows<Single, T>(write);
    });
}
