// The entry points of an instruction set; included last in its namespace.

// Rows whose classes are not consecutive are copied to tiles: a few neighbouring rows at a time, so that all of a cache
// line is used while it is in the cache.
enum { TILE_CLASSES = 512, TILE_ROWS = 16 };
enum { TILE_DISTANCE = TILE_CLASSES * 8 + 64, TILE_BYTES = TILE_ROWS * TILE_DISTANCE };

static inline bool consecutive(const Array &array) { return !array.data || array.strides[1] == SIZES[array.kind]; }

// How many rows and classes are handled at a time.
struct Pace {
    long rows, classes;

    static Pace of(const Array &logits, const Array &a, const Array &b) {
        if (consecutive(logits) && consecutive(a) && consecutive(b)) return {1, CHUNK};
        return {TILE_ROWS, TILE_CLASSES};
    }
};

// The class axis in the middle and, of the others, the one that varies in neighbouring rows last.
static Array with_rows_last(Array array) {
    if (array.shape[2] == 1) {
        array.shape[2] = array.shape[0];
        array.strides[2] = array.strides[0];
        array.shape[0] = 1;
    }
    return array;
}

// Copy an element of each of some rows to `column`, or from there.
template <class Bits>
static inline void copy_column(char *place, long row_stride, long rows, Bits column[TILE_ROWS], bool in) {
    if (rows == TILE_ROWS && row_stride == long(sizeof(Bits))) {
        in ? memcpy(column, place, TILE_ROWS * sizeof(Bits)) : memcpy(place, column, TILE_ROWS * sizeof(Bits));
        return;
    }
    for (long r = 0; r < rows; r++, place += row_stride)
        in ? memcpy(column + r, place, sizeof(Bits)) : memcpy(place, column + r, sizeof(Bits));
}

// Copy classes of some rows to a tile, row after row, or from there. The copy goes through a small square: its rows and
// columns do not share one place in the cache, as those of arrays do whose strides are powers of two.
template <class Bits>
static void copy_tile(char *place, long class_stride, long row_stride, long rows, long count, char *tile, bool in) {
    enum { SIDE = 16 };
    Bits square[SIDE][TILE_ROWS];
    for (long first = 0; first < count; first += SIDE) {
        long some = count - first < SIDE ? count - first : long(SIDE);
        for (long c = 0; c < some; c++) {
            char *column = place + (first + c) * class_stride;
            __builtin_prefetch(column + SIDE * class_stride);
            if (in) copy_column(column, row_stride, rows, square[c], true);
        }
        for (long r = 0; r < rows; r++) {
            char *row = tile + r * TILE_DISTANCE + first * long(sizeof(Bits));
            for (long c = 0; c < some; c++, row += sizeof(Bits))
                in ? memcpy(row, &square[c][r], sizeof(Bits)) : memcpy(&square[c][r], row, sizeof(Bits));
        }
        for (long c = 0; !in && c < some; c++)
            copy_column(place + (first + c) * class_stride, row_stride, rows, square[c], false);
    }
}

// Some classes of some rows, those of a row consecutive in memory: in the array if they are so there, else in a tile.
struct Block {
    char *place;  // in the array
    long class_stride, row_stride, rows, count;
    int kind;
    char *start;
    long distance;  // from a row to the next

    static Block of(const Array &array, long outer, long row, long rows, long first, long count, char *tile) {
        if (!array.data) return {};
        char *place = array.data + outer * array.strides[0] + first * array.strides[1] + row * array.strides[2];
        bool here = consecutive(array);
        return {place,
                array.strides[1],
                array.strides[2],
                rows,
                count,
                array.kind,
                here ? place : tile,
                here ? array.strides[2] : long(TILE_DISTANCE)};
    }
    void copy(bool in) const {
        if (start == place) return;
        long size = SIZES[kind];
        auto copy = size == 8 ? copy_tile<uint64_t> : size == 4 ? copy_tile<uint32_t> : copy_tile<uint16_t>;
        copy(place, class_stride, row_stride, rows, count, start, in);
    }
    char *row(long r) const { return start ? start + r * distance : nullptr; }
};

// Walk over all rows, and the classes of some rows at a time. `begin` and `end` take the number of the first of these
// rows and that of a row among them, `each` a chunk of its classes, the place for its gradient, and its weights besides.
template <class T, class Pass, class Begin, class Each, class End>
static void walk(const Pass &pass, Array out, Begin begin, Each each, End end) {
    const Array logits = with_rows_last(pass.logits), probabilities = with_rows_last(pass.probabilities);
    out = with_rows_last(out);
    const Pace pace = Pace::of(logits, probabilities, out);
    long classes = logits.shape[1], inner = logits.shape[2];
    T buffer[CHUNK];
    char tile[TILE_BYTES], another[TILE_BYTES], results[TILE_BYTES];
    for (long row = 0, rows; row < logits.shape[0] * inner; row += rows) {
        long outer = row / inner, within = row % inner;
        rows = inner - within < pace.rows ? inner - within : pace.rows;
        for (long r = 0; r < rows; r++) begin(row, r);
        for (long first = 0, count; first < classes; first += count) {
            count = classes - first < pace.classes ? classes - first : pace.classes;
            Block x = Block::of(logits, outer, within, rows, first, count, tile);
            Block p = Block::of(probabilities, outer, within, rows, first, count, another);
            Block to = Block::of(out, outer, within, rows, first, count, results);
            x.copy(true);
            p.copy(true);
            const double *weight = pass.weight ? pass.weight + first : nullptr;
            for (long r = 0; r < rows; r++) {
                Weights weights = {weight, p.row(r), p.kind, pass.kept, pass.share};
                each(row, r, numbers_of(x.row(r), x.kind, count, buffer), count, first, to.row(r), weights);
            }
            to.copy(false);
        }
        for (long r = 0; r < rows; r++) end(row, r);
    }
}

template <class Arithmetic, class T> static void fill_rows(const Fill &fill) {
    State states[TILE_ROWS];
    auto begin = [&](long, long r) { states[r] = State::identity(); };
    auto add = [&](long row, long r, const T *x, long count, long first, char *, const Weights &weights) {
        long column = fill.columns ? long(fill.columns[row + r]) - first : -1;
        add_chunk<Arithmetic>(states[r], x, count, column, fill.first_class + first, weights, fill.call, first == 0);
    };
    auto store = [&](long row, long r) {
        states[r].template store<Arithmetic>(fill.states + (row + r) * words_of(fill.call.fields), fill.call);
    };
    walk<T>(fill, {}, begin, add, store);
}

static void fill(const Fill &fill) {
    if (fill.wide) return fill_rows<Double, double>(fill);
    switch (fill.logits.kind) {
        case FLOAT32:
            return fill_rows<Single, float>(fill);
        case FLOAT16:
            return fill_rows<Single, Half>(fill);
        default:
            return fill_rows<Single, BFloat>(fill);
    }
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
template <class Arithmetic, class T>
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
    typename Arithmetic::Number value = gradient.held_gradient * slope;
    if (!(value == value)) value = not_a_number();
    bool is_target = call.has(ENTROPY) && target >= 0 && target < count && target != column;
    typename Arithmetic::Number at_target = 0;
    if (is_target) at_target = gradient_of<Arithmetic>(number_at(x, target), 1.0, row, call, gradient.target_gradient);
    bool direct = kind == kind_of<T>();
    write_chunk<Arithmetic>(x, direct ? (T *)out : result, count, weights, row, gradient.most, call,
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

template <class Arithmetic, class T> static void write_rows(const Write &write) {
    const Array &out = write.out;
    const long row_bytes = out.shape[1] * SIZES[out.kind], bytes = out.shape[0] * out.shape[2] * row_bytes;
    bool past_cache = consecutive(out) && out.data != write.logits.data && bytes >= LARGE && row_bytes >= LONG_ROW;
    RowFactor factors[TILE_ROWS];
    auto begin = [&](long row, long r) { factors[r] = RowFactor::of(write.rows[row + r], write.call.transform); };
    auto put = [&](long row, long r, const T *x, long count, long first, char *place, const Weights &weights) {
        write_row<Arithmetic>(x, place, out.kind, count, first, weights, write.rows[row + r], factors[r],
                              write.call, past_cache);
    };
    walk<T>(write, out, begin, put, [](long, long) {});
    if (past_cache) finish_stream();
}

static void write(const Write &write) {
    if (write.wide) return write_rows<Double, double>(write);
    // A gradient array of another dtype than the logits' is rounded by way of float32.
    if (write.out.kind != write.logits.kind) return write_rows<Single, float>(write);
    switch (write.logits.kind) {
        case FLOAT32:
            return write_rows<Single, float>(write);
        case FLOAT16:
            return write_rows<Single, Half>(write);
        default:
            return write_rows<Single, BFloat>(write);
    }
}

static void find(const Largest &largest) {
    of_kind(largest.kind, [&](auto one) {
        for (long r = 0; r < largest.count; r++)
            largest_of((const decltype(one) *)(largest.rows + r * largest.stride), largest.classes, largest.k,
                       largest.values + r * largest.k, largest.columns + r * largest.k);
    });
}

static const Loops LOOPS = {fill, write, find};
