// Products of float32 matrices by digits, whose integers `exact/products.py` defines; included once for each instruction
// set after `vectors.h`, and once more where WITH_VNNI: a processor then multiplies four digits of 8 bits at a time, and
// otherwise two integers of 16.
//
// Lines are rows of a or columns of b. Their integers are packed in panels of neighbouring lines: for each chunk of terms
// one segment after another, and in a segment words, each of PER terms of a line, for all lines of the panel.

constexpr long BLOCK_TERMS = 8, BLOCK_BYTES = 1 << 18;
constexpr int SEGMENTS = 4, KEPT = 30, DROPPED = 24, NOT_FINITE = 2000;

// Products of segments of a and b, which are added up in 32 bits and then count 2^shift times.
struct Level {
    int shift, count;
    struct {
        int a, b;
    } pairs[4];
};

#ifdef WITH_VNNI
// Segment i has digit i. The digits of a are raised by 128, as one factor has no sign: `excess` is what b adds by that.
constexpr long PER = 4, CHUNK_TERMS = 1024;
constexpr int LEFT_SEGMENTS = 4, RAISED = int(0x80808080);
constexpr Level LEVELS[] = {{24, 1, {{0, 0}}},
                            {16, 2, {{0, 1}, {1, 0}}},
                            {8, 3, {{0, 2}, {1, 1}, {2, 0}}},
                            {0, 4, {{0, 3}, {1, 2}, {2, 1}, {3, 0}}}};
static inline Ints add_products(Ints sum, Ints a, Ints b) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
#else
// Segments of a: the four digits, and the first two as one integer; of b: the first two as one, and digits 2, 3 and 0.
// A sum of so many terms has less than 31 bits.
constexpr long PER = 2, CHUNK_TERMS = 256;
constexpr int LEFT_SEGMENTS = 5, RAISED = 0;
constexpr Level LEVELS[] = {
    {16, 1, {{0, 0}}}, {8, 1, {{1, 0}}}, {0, 4, {{4, 1}, {0, 2}, {2, 0}, {3, 3}}}};
static inline Ints add_products(Ints sum, Ints a, Ints b) {
#if VECTOR_BYTES == 64
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VECTOR_BYTES == 32
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return sum + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return sum + (Ints)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
#endif
// A tile of the product: so many rows, and columns.
constexpr int ROWS_OF_TILE = VECTOR_BYTES == 64 ? 8 : 4, VECTORS = VECTOR_BYTES == 64 ? 3 : 2, WIDTH = VECTORS * LANES;

// Copy terms of LANES lines, and 0 for those that are not there.
static inline void load_block(const Lines &x, long first, long term, float block[BLOCK_TERMS][LANES]) {
    const char *p = x.data + first * x.stride + term * x.step;
    const long lines = x.count - first < LANES ? x.count - first : LANES;
    const long terms = x.length - term < BLOCK_TERMS ? x.length - term : BLOCK_TERMS;
    if (terms < BLOCK_TERMS || lines < LANES) memset(block, 0, sizeof(float[BLOCK_TERMS][LANES]));
    if (x.stride == 4) {
        for (long z = 0; z < terms; z++) store(block[z], load_or_zeros((const float *)(p + z * x.step), lines));
    } else {
        for (long lane = 0; lane < lines; lane++)
            for (long z = 0; z < terms; z++) memcpy(&block[z][lane], p + lane * x.stride + z * x.step, 4);
    }
}

// The exponent of the largest number of each line, as `exponents` of exact/sums.py.
static void find_exponents(const Lines &x) {
    for (long first = 0; first < x.count; first += LANES) {
        Ints most = {};
        for (long term = 0; term < x.length; term += BLOCK_TERMS) {
            float block[BLOCK_TERMS][LANES];
            load_block(x, first, term, block);
            for (auto &each : block) {
                Ints size = load_bytes<Ints>(each) & INT32_MAX;
                most = size > most ? size : most;
            }
        }
        for (long lane = 0; lane < LANES && first + lane < x.count; lane++) {
            const int32_t size = most[lane];
            const int normal = (size >> 23) - 126, subnormal = size ? -117 - __builtin_clz(size) : -NOT_FINITE;
            x.exponents[first + lane] = size >= 0x7f800000 ? NOT_FINITE : size >> 23 ? normal : subnormal;
        }
    }
}

static inline Ints nearest(Floats v) {
    Ints sign = (Ints)v >> 31;
    Floats size = (Floats)((Ints)v & INT32_MAX), near = (size + 0x1p23f) - 0x1p23f;
    return (__builtin_convertvector(size < 0x1p23f ? near : size, Ints) ^ sign) - sign;
}

static inline long word_count(long terms) { return (terms + BLOCK_TERMS - 1) / BLOCK_TERMS * (BLOCK_TERMS / PER); }

// Pack lines from `first` on in a panel of `vectors` vectors; `excess`, one for each line, is of b alone.
static void pack(const Lines &x, long first, int vectors, int32_t *panel, int64_t *excess) {
    const int segments = excess ? SEGMENTS : LEFT_SEGMENTS;
    const long width = vectors * LANES;
    for (int vector = 0; vector < vectors; vector++, first += LANES) {
        Ints scale[2] = {};
        for (long lane = 0; lane < LANES && first + lane < x.count; lane++) {
            const int up = KEPT - x.exponents[first + lane];
            scale[0][lane] = up < 127 ? up : 127;
            scale[1][lane] = up < 127 ? 0 : up - 127;
        }
        const Floats near = (Floats)((scale[0] + 127) << 23), far = (Floats)((scale[1] + 127) << 23);
        for (long chunk = 0; chunk < x.length; chunk += CHUNK_TERMS) {
            const long terms = x.length - chunk < CHUNK_TERMS ? x.length - chunk : CHUNK_TERMS, words = word_count(terms);
            int32_t *to = panel + word_count(chunk) * segments * width + vector * LANES;
            Ints sums[SEGMENTS] = {};
            for (long term = 0; term < terms; term += BLOCK_TERMS) {
                float block[BLOCK_TERMS][LANES];
                load_block(x, first, chunk + term, block);
                for (int word = 0; word < BLOCK_TERMS / PER; word++, to += width) {
                    Ints packed[LEFT_SEGMENTS] = {};
                    for (int z = 0; z < PER; z++) {
                        Ints heads[SEGMENTS + 1] = {nearest(load(block[word * PER + z]) * near * far)}, digits[SEGMENTS];
                        for (int i = SEGMENTS - 1; i > 0; i--) {
                            const Ints head = heads[SEGMENTS - 1 - i];
                            heads[SEGMENTS - i] = (head + 128) >> 8;
                            digits[i] = head - (heads[SEGMENTS - i] << 8);
                        }
                        digits[0] = heads[3];
#ifdef WITH_VNNI
                        for (int i = 0; i < SEGMENTS; i++) {
                            sums[i] += digits[i];
                            packed[i] |= (digits[i] & 255) << 8 * z;
                        }
#else
                        const Ints left[] = {digits[0], digits[1], digits[2], digits[3], heads[2]};
                        const Ints right[] = {heads[2], digits[2], digits[3], digits[0]};
                        for (int i = 0; i < segments; i++) packed[i] |= ((excess ? right : left)[i] & 65535) << 16 * z;
#endif
                    }
                    for (int i = 0; i < segments; i++)
                        store_bytes(to + i * words * width, excess ? packed[i] : packed[i] ^ RAISED);
                }
            }
            if (RAISED != 0 && excess)
                for (long lane = 0; lane < LANES; lane++)
                    for (const Level &level : LEVELS)
                        for (int i = 0; i < level.count; i++)
                            excess[vector * LANES + lane] += int64_t(sums[level.pairs[i].b][lane]) * (128L << level.shift);
        }
    }
}

// Add the products of a chunk of `words` for one tile.
INLINED void add_tile(const int32_t *a, const int32_t *b, long words, const Level &level, int64_t *sums) {
    Ints tile[ROWS_OF_TILE][VECTORS] = {};
    for (int pair = 0; pair < level.count; pair++) {
        const int32_t *left = a + level.pairs[pair].a * words * LANES, *right = b + level.pairs[pair].b * words * WIDTH;
        for (long word = 0; word < words; word++, left += LANES, right += WIDTH) {
            Ints columns[VECTORS];
            for (int j = 0; j < VECTORS; j++) columns[j] = load_bytes<Ints>(right + j * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS_OF_TILE; i++)
                for (int j = 0; j < VECTORS; j++) tile[i][j] = add_products(tile[i][j], ints(left[i]), columns[j]);
        }
    }
    for (int i = 0; i < ROWS_OF_TILE; i++)
        for (int j = 0; j < VECTORS; j++) {
            Longs wide[2];
            widen(tile[i][j], wide);
            for (Longs &each : wide) {
                store_bytes(sums, load_bytes<Longs>(sums) + (each << level.shift));
                sums += LANES / 2;
            }
        }
}

// Rounded once, as one sum of two exact parts.
static inline Doubles to_doubles(Longs v) {
#if VECTOR_BYTES == 64
    return __builtin_convertvector(v, Doubles);
#else
    Doubles upper = (Doubles)((Longs)((Words)v >> 32) ^ 0x4530000080000000), lower = (Doubles)((v & 0xffffffff) | 0x4330000000000000);
    return (upper - 0x1.000008p84) + (lower - 0x1p52);
#endif
}

// Write rows of a tile to the result.
static void store_tile(const Product &p, long row, long column, const int64_t *sums, const int64_t *excess, const double *scale) {
    const long rows = p.a.count - row < ROWS_OF_TILE ? p.a.count - row : ROWS_OF_TILE;
    for (long i = 0; i < rows; i++) {
        const double left = power(p.a.exponents[row + i] + DROPPED - 2 * KEPT);
        const long at = (row + i) * p.b.count + column;
        for (long j = 0; j < WIDTH && column + j < p.b.count; j += LANES) {
            Doubles wide[2];
            for (int k = 0; k < 2; k++) {
                const long c = j + k * LANES / 2, count = p.b.count - column - c;
                Longs sum = load_bytes<Longs>(sums + i * WIDTH + c) - load_bytes<Longs>(excess + c);
                wide[k] = to_doubles(sum) * left * load(scale + c);
                if (p.sums) store_up_to((double *)p.sums + at + c, (Doubles)sum, count);
            }
            if (p.numbers) store_narrow(p.numbers + at + j, p.b.count - column - j, wide);
        }
    }
}

// Compute a product; without room only return how many bytes of it are needed.
static long multiply(const Product &p, char *room) {
    const long words = word_count(p.a.length), panels = (p.b.count + WIDTH - 1) / WIDTH, columns = panels * WIDTH;
    const long row_bytes = 4 * LEFT_SEGMENTS * words, fit = BLOCK_BYTES / (row_bytes + 1) / LANES * LANES;
    const long all = (p.a.count + LANES - 1) / LANES * LANES, block = fit < LANES ? LANES : fit < all ? fit : all;
    const long sizes[] = {columns * 4 * SEGMENTS * words, columns * 8, columns * 8, block * row_bytes};
    if (!room) return sizes[0] + sizes[1] + sizes[2] + sizes[3];
    int32_t *right = (int32_t *)room, *left = (int32_t *)(room + sizes[0] + sizes[1] + sizes[2]);
    int64_t *excess = (int64_t *)(room + sizes[0]);
    double *scale = (double *)(room + sizes[0] + sizes[1]);
    memset(excess, 0, sizes[1]);
    for (long j = 0; j < columns; j++) scale[j] = power(j < p.b.count ? p.b.exponents[j] : 0);
    for (long j = 0; j < panels; j++) pack(p.b, j * WIDTH, VECTORS, right + j * WIDTH * SEGMENTS * words, excess + j * WIDTH);
    for (long first = 0; first < p.a.count; first += block) {
        const long end = p.a.count - first < block ? p.a.count - first : block;
        for (long i = 0; i < end; i += LANES) pack(p.a, first + i, 1, left + i * LEFT_SEGMENTS * words, nullptr);
        for (long j = 0; j < columns; j += WIDTH)
            for (long i = 0; i < end; i += ROWS_OF_TILE) {
                int64_t sums[ROWS_OF_TILE * WIDTH] = {};
                const int32_t *a = left + i / LANES * LANES * LEFT_SEGMENTS * words + i % LANES;
                const int32_t *b = right + j * SEGMENTS * words;
                for (long chunk = 0; chunk < p.a.length; chunk += CHUNK_TERMS) {
                    const long rest = p.a.length - chunk, before = word_count(chunk);
                    for (const Level &level : LEVELS)
                        add_tile(a + before * LEFT_SEGMENTS * LANES, b + before * SEGMENTS * WIDTH,
                                 word_count(rest < CHUNK_TERMS ? rest : CHUNK_TERMS), level, sums);
                }
                store_tile(p, first + i, j, sums, excess + j, scale + j);
            }
    }
    return 0;
}
