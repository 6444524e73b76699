// States and gradients of all rows; included once for each instruction set after `walk.h`.

template <class Precision, class T> static void fill_rows(const Fill &fill) {
    State states[TILE_ROWS];
    Guess guess;
    auto begin = [&](long, long rows) {
        for (long r = 0; r < rows; r++) new (&states[r]) State(State::identity());  // without a copy, which would wait
    };
    auto add = [&](long row, long r, const T *x, long count, long first, char *, const Weights &weights) {
        long column = fill.columns ? long(fill.columns[row + r]) - first : -1;
        add_chunk<Precision>(states[r], x, count, column, fill.first_class + first, weights, fill.call, first == 0,
                              guess);
    };
    auto store = [&](long row, long r) {
        states[r].template store<Precision>(fill.states + (row + r) * words_of(fill.call.fields), fill.call);
    };
    walk<T>(fill, {}, begin, add, store);
}

// The places of the classes of a chunk that are held, of which there may be several with probabilities.
template <class T>
static long places_held(const T *x, long count, long column, const Weights &weights, const RowGradient &row,
                        uint16_t *places) {
    if (!weights.probabilities) {
        if (column < 0 || column >= count) return 0;
        places[0] = uint16_t(column);
        return 1;
    }
    long found = 0;
    for (long i = place_of(row.held, x, 0, count); i < count; i = place_of(row.held, x, i + 1, count))
        if (weights.at(i) == row.held_weight) places[found++] = uint16_t(i);
    return found;
}

// Write the gradient of a chunk of a row; one in the caller's memory past the cache, if asked to.
template <class Precision, class T>
static void write_row(const T *x, char *out, int kind, long count, long first, const Weights &weights,
                      const RowGradient &gradient, const RowFactor &row, const Call &call, bool past_cache) {
    long column = long(gradient.column) - first, target = long(gradient.target) - first;
    T result[CHUNK];
    if (!gradient.valid) {
        memset(out, 0, count * SIZES[kind]);
        return;
    }
    // The gradient may be written over the logits, so the classes held are found first.
    uint16_t held[CHUNK];
    long held_count = places_held(x, count, column, weights, gradient, held);
    double slope = 1.0;
    if (call.transform.softcap != 0.0 && held_count) slope = softcap_slope(number_at(x, held[0]), call.transform);
    typename Precision::Number value = gradient.held_gradient * slope;
    if (!(value == value)) value = not_a_number();
    bool is_target = call.has(ENTROPY) && target >= 0 && target < count && target != column;
    typename Precision::Number at_target = 0;
    if (is_target) at_target = gradient_of<Precision>(number_at(x, target), 1.0, row, call, gradient.target_gradient);
    bool direct = kind == kind_of<T>();
    write_chunk<Precision>(x, direct ? (T *)out : result, count, weights, row, gradient.most, call,
                            direct && past_cache);
    of_kind(kind, [&](auto one) {
        typedef decltype(one) To;
        if (!direct) convert((To *)out, result, count);
        one = of_number<To>(value);
        for (long i = 0; i < held_count; i++) memcpy(out + held[i] * long(sizeof one), &one, sizeof one);
        if (is_target) {
            one = of_number<To>(number_of(at_target));
            memcpy(out + target * long(sizeof one), &one, sizeof one);
        }
    });
}

// A gradient of so many bytes, with rows of so many, is written past the caches: it would not stay in them, and lines
// that they have to read first cost more than the ends of rows, which are written through them.
enum { LARGE = 1 << 22, LONG_ROW = 1 << 13 };
static bool goes_past_cache(const Write &write) {
    const Array &out = write.out;
    const long row_bytes = out.shape[1] * SIZES[out.kind], bytes = out.shape[0] * out.shape[2] * row_bytes;
    const bool aligned = (long(out.data) | out.strides[0] | out.strides[2]) % SIZES[out.kind] == 0;
    return consecutive(out) && aligned && out.data != write.logits.data && bytes >= LARGE && row_bytes >= LONG_ROW;
}

// The rows of a gradient, in memory or computed some at a time.
enum { ROW_BLOCK = 64 };
struct GradientBlock {
    const Write &write;
    long first = 0, end = 0;
    RowGradient rows[ROW_BLOCK];

    explicit GradientBlock(const Write &write) : write(write) {}

    // Have the next `count` rows from this one on, at most TILE_ROWS.
    void move(long row, long count) {
        if (write.rows || row + count <= end) return;
        const long all = write.computed.merged.rows;
        first = row;
        end = all - row < ROW_BLOCK ? all : row + ROW_BLOCK;
        write.computed.fill(first, end - first, rows);
    }
    const RowGradient &operator[](long row) const { return write.rows ? write.rows[row] : rows[row - first]; }
};

template <class Precision, class T> static void write_rows(const Write &write) {
    const bool past_cache = goes_past_cache(write);
    RowFactor factors[TILE_ROWS];
    GradientBlock gradients(write);
    auto begin = [&](long row, long rows) {
        gradients.move(row, rows);
        for (long r = 0; r < rows; r++)
            new (&factors[r]) RowFactor(RowFactor::of(gradients[row + r], write.call.transform));
    };
    auto put = [&](long row, long r, const T *x, long count, long first, char *place, const Weights &weights) {
        write_row<Precision>(x, place, write.out.kind, count, first, weights, gradients[row + r], factors[r], write.call,
                              past_cache);
    };
    walk<T>(write, write.out, begin, put, [](long, long) {});
    if (past_cache) finish_stream();
}

static void find(const Largest &largest) {
    of_kind(largest.kind, [&](auto one) {
        for (long r = 0; r < largest.count; r++)
            largest_of((const decltype(one) *)(largest.rows + r * largest.stride), largest.classes, largest.k,
                       largest.values + r * largest.k, largest.columns + r * largest.k);
    });
}
