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
