// How the loops walk over the rows of arrays; included once for each instruction set after `rows.h`.

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

// Some classes of some rows of an array, those of a row consecutive in memory: in the array if they are so there, else
// in a tile.
struct Window {
    const Array array;
    char *const tile;
    const bool here;
    char *place = nullptr;  // in the array

    Window(const Array &array, char *tile) : array(array), tile(tile), here(consecutive(array)) {}

    void move(long outer, long row, long first) {
        place = array.data + outer * array.strides[0] + first * array.strides[1] + row * array.strides[2];
    }
    void copy(long rows, long count, bool in) const {
        if (here) return;
        long size = SIZES[array.kind];
        auto copy = size == 8 ? copy_tile<uint64_t> : size == 4 ? copy_tile<uint32_t> : copy_tile<uint16_t>;
        copy(place, array.strides[1], array.strides[2], rows, count, tile, in);
    }
    char *row(long r) const { return here ? place + r * array.strides[2] : tile + r * TILE_DISTANCE; }
};

// Walk over all rows, and the classes of some rows at a time. `begin` takes the number of the first of these rows and
// how many they are, `end` the first of these and the number of a row among them, `each` a chunk of its classes, the
// place for its gradient, and its weights besides.
template <class T, class Pass, class Begin, class Each, class End>
static void walk(const Pass &pass, const Array &to, Begin begin, Each each, End end) {
    char tiles[3][TILE_BYTES];
    Window logits(with_rows_last(pass.logits), tiles[0]), probabilities(with_rows_last(pass.probabilities), tiles[1]);
    Window out(with_rows_last(to), tiles[2]);
    const Pace pace = Pace::of(logits.array, probabilities.array, out.array);
    const long classes = logits.array.shape[1], inner = logits.array.shape[2], all = logits.array.shape[0] * inner;
    const int kind = probabilities.array.kind;
    T buffer[CHUNK];
    long outer = 0, within = 0;
    for (long row = 0, rows; row < all; row += rows, within += rows) {
        if (within == inner) within = 0, outer++;
        rows = inner - within < pace.rows ? inner - within : pace.rows;
        begin(row, rows);
        for (long first = 0, count; first < classes; first += count) {
            count = classes - first < pace.classes ? classes - first : pace.classes;
            logits.move(outer, within, first);
            probabilities.move(outer, within, first);
            out.move(outer, within, first);
            logits.copy(rows, count, true);
            probabilities.copy(rows, count, true);
            const double *weight = pass.weight ? pass.weight + first : nullptr;
            for (long r = 0; r < rows; r++) {
                Weights weights = {weight, probabilities.row(r), kind, pass.kept, pass.share};
                const T *x = numbers_of(logits.row(r), logits.array.kind, count, buffer);
                each(row, r, x, count, first, out.row(r), weights);
            }
            out.copy(rows, count, false);
        }
        for (long r = 0; r < rows; r++) end(row, r);
    }
}
