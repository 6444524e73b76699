// Vectors of an instruction set, those of GCC and Clang; included once for each, in a namespace of its own.
//
// VECTOR_BYTES says which: 64 AVX-512, 32 AVX2, 16 NEON, SSE2 or whatever there is. Memory need not be aligned.

enum { LANES = VECTOR_BYTES / 4 };
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t Longs __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef float HalfFloats __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int32_t HalfInts __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES / 2)));

template <class Vector> static inline Vector load_bytes(const void *p) {
    Vector v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class Vector> static inline void store_bytes(void *p, Vector v) { memcpy(p, &v, sizeof v); }
static inline Floats floats(float v) { return v - Floats{}; }  // keeps -0.0
static inline Doubles doubles(double v) { return v - Doubles{}; }
static inline Ints ints(int32_t v) { return Ints{} + v; }
static inline Longs longs(int64_t v) { return Longs{} + v; }

// What instruction sets have each in its own way: `fma`, float16 to and from float32, `whole`, `truncated` (the integer
// part of numbers below 2^62), shifts that give 0 for counts that the lanes do not have, `any_less`, `largest_lane`,
// `stream_bytes` (a store past the cache, to memory aligned to the vector), the numbers of a vector in two of wider
// ones, and back.
#if VECTOR_BYTES == 64
static inline Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
static inline Doubles fma(Doubles a, Doubles b, Doubles c) {
    return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
// In one instruction each; compilers take three.
static inline Unsigned to_words(Shorts v) { return (Unsigned)_mm512_cvtepu16_epi32((__m256i)v); }
static inline Shorts to_shorts(Unsigned v) { return (Shorts)_mm512_cvtepi32_epi16((__m512i)v); }
static inline Floats from_halves(Shorts h) { return (Floats)_mm512_cvtph_ps((__m256i)h); }
static inline Shorts to_halves(Floats v) {
    return (Shorts)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline Doubles whole(Doubles v) {
    return (Doubles)_mm512_roundscale_pd((__m512d)v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
static inline Longs truncated(Doubles v) { return __builtin_convertvector(v, Longs); }
static inline Words shift_left(Words v, Longs n) { return (Words)_mm512_sllv_epi64((__m512i)v, (__m512i)n); }
static inline Words shift_right(Words v, Longs n) { return (Words)_mm512_srlv_epi64((__m512i)v, (__m512i)n); }
static inline Unsigned shift_left(Unsigned v, Ints n) { return (Unsigned)_mm512_sllv_epi32((__m512i)v, (__m512i)n); }
static inline Unsigned shift_right(Unsigned v, Ints n) { return (Unsigned)_mm512_srlv_epi32((__m512i)v, (__m512i)n); }
static inline bool any_less(Longs a, Longs b) { return _mm512_cmplt_epi64_mask((__m512i)a, (__m512i)b); }
static inline bool any_less(Ints a, Ints b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
static inline bool any_less(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
static inline bool any_less(Doubles a, Doubles b) { return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_LT_OQ); }
static inline double largest_lane(Floats v) { return _mm512_reduce_max_ps((__m512)v); }
static inline double largest_lane(Doubles v) { return _mm512_reduce_max_pd((__m512d)v); }
static inline void stream_bytes(void *p, Floats v) { _mm512_stream_ps((float *)p, (__m512)v); }
static inline void widen(Floats v, Doubles wide[2]) {
    wide[0] = (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    wide[1] = (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
}
static inline Floats narrow(const Doubles wide[2]) {
    __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)wide[0]));
    return (Floats)_mm512_insertf32x8(low, _mm512_cvtpd_ps((__m512d)wide[1]), 1);
}
static inline void widen(Ints v, Longs wide[2]) {
    wide[0] = (Longs)_mm512_cvtepi32_epi64(_mm512_castsi512_si256((__m512i)v));
    wide[1] = (Longs)_mm512_cvtepi32_epi64(_mm512_extracti32x8_epi32((__m512i)v, 1));
}
static inline Ints lower_words(const Longs wide[2]) {
    __m512i low = _mm512_castsi256_si512(_mm512_cvtepi64_epi32((__m512i)wide[0]));
    return (Ints)_mm512_inserti32x8(low, _mm512_cvtepi64_epi32((__m512i)wide[1]), 1);
}
#elif VECTOR_BYTES == 32
static inline Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
static inline Doubles fma(Doubles a, Doubles b, Doubles c) {
    return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
static inline Floats from_halves(Shorts h) { return (Floats)_mm256_cvtph_ps((__m128i)h); }
static inline Shorts to_halves(Floats v) { return (Shorts)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
static inline Doubles whole(Doubles v) {
    return (Doubles)_mm256_round_pd((__m256d)v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
static inline Words shift_left(Words v, Longs n) { return (Words)_mm256_sllv_epi64((__m256i)v, (__m256i)n); }
static inline Words shift_right(Words v, Longs n) { return (Words)_mm256_srlv_epi64((__m256i)v, (__m256i)n); }
static inline Unsigned shift_left(Unsigned v, Ints n) { return (Unsigned)_mm256_sllv_epi32((__m256i)v, (__m256i)n); }
static inline Unsigned shift_right(Unsigned v, Ints n) { return (Unsigned)_mm256_srlv_epi32((__m256i)v, (__m256i)n); }
static inline bool any_less(Longs a, Longs b) { return _mm256_movemask_pd((__m256d)(a < b)); }
static inline bool any_less(Ints a, Ints b) { return _mm256_movemask_ps((__m256)(a < b)); }
static inline bool any_less(Floats a, Floats b) { return _mm256_movemask_ps((__m256)(a < b)); }
static inline bool any_less(Doubles a, Doubles b) { return _mm256_movemask_pd((__m256d)(a < b)); }
static inline void stream_bytes(void *p, Floats v) { _mm256_stream_ps((float *)p, (__m256)v); }
static inline void widen(Floats v, Doubles wide[2]) {
    wide[0] = (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
    wide[1] = (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
}
static inline Floats narrow(const Doubles wide[2]) {
    __m256 low = _mm256_castps128_ps256(_mm256_cvtpd_ps((__m256d)wide[0]));
    return (Floats)_mm256_insertf128_ps(low, _mm256_cvtpd_ps((__m256d)wide[1]), 1);
}
static inline void widen(Ints v, Longs wide[2]) {
    wide[0] = (Longs)_mm256_cvtepi32_epi64(_mm256_castsi256_si128((__m256i)v));
    wide[1] = (Longs)_mm256_cvtepi32_epi64(_mm256_extracti128_si256((__m256i)v, 1));
}
static inline Ints lower_words(const Longs wide[2]) {
    // 128 bits of each, and then the other 128 bits of each
    __m256 mixed = _mm256_shuffle_ps((__m256)wide[0], (__m256)wide[1], 0x88);
    return (Ints)_mm256_permute4x64_epi64((__m256i)mixed, 0xd8);
}
#else
#if defined(__aarch64__)
static inline Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
static inline Doubles fma(Doubles a, Doubles b, Doubles c) {
    return (Doubles)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
static inline Doubles whole(Doubles v) { return (Doubles)vrndq_f64((float64x2_t)v); }
#else
#define NO_FMA
static inline Floats fma(Floats a, Floats b, Floats c) {
    Floats result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = fma32(a[lane], b[lane], c[lane]);
    return result;
}
static inline Doubles whole(Doubles v) {
    Longs sign = (Longs)v & INT64_MIN;
    Doubles size = (Doubles)((Longs)v ^ sign), near = (size + 0x1p52) - 0x1p52;
    near = size < 0x1p52 ? near - (near > size ? doubles(1.0) : Doubles{}) : size;
    return (Doubles)((Longs)near | sign);
}
#endif
static inline Floats from_halves(Shorts h) {
    Unsigned wide = __builtin_convertvector(h, Unsigned), u = (wide & 0x7fff) << 13;
    Unsigned b = (Unsigned)((Floats)u * 0x1p112f);  // exact, for subnormal halves too
    b = u >= 0x0f800000 ? u | 0x7f800000 : b;
    return (Floats)(b | (wide & 0x8000) << 16);
}
static inline Shorts to_halves(Floats v) {
    Unsigned b = (Unsigned)v, sign = b >> 16 & 0x8000;
    b &= 0x7fffffff;
    Unsigned subnormal = (Unsigned)((Floats)b + 0.5f) - 0x3f000000, normal = (b + 0xc8000fff + (b >> 13 & 1)) >> 13;
    Unsigned special = b > 0x7f800000 ? Unsigned{} + 0x7e00 : Unsigned{} + 0x7c00;
    Unsigned h = b < 0x38800000 ? subnormal : b < 0x47800000 ? normal : special;
    return __builtin_convertvector(h | sign, Shorts);
}
static inline Words shift_left(Words v, Longs n) {
    for (int lane = 0; lane < LANES / 2; lane++) v[lane] = uint64_t(n[lane]) < 64 ? v[lane] << n[lane] : 0;
    return v;
}
static inline Words shift_right(Words v, Longs n) {
    for (int lane = 0; lane < LANES / 2; lane++) v[lane] = uint64_t(n[lane]) < 64 ? v[lane] >> n[lane] : 0;
    return v;
}
static inline Unsigned shift_left(Unsigned v, Ints n) {
    for (int lane = 0; lane < LANES; lane++) v[lane] = uint32_t(n[lane]) < 32 ? v[lane] << n[lane] : 0;
    return v;
}
static inline Unsigned shift_right(Unsigned v, Ints n) {
    for (int lane = 0; lane < LANES; lane++) v[lane] = uint32_t(n[lane]) < 32 ? v[lane] >> n[lane] : 0;
    return v;
}
static inline bool any_less(Longs a, Longs b) { return a[0] < b[0] || a[1] < b[1]; }
static inline bool any_less(Ints a, Ints b) {
    Longs less = (Longs)(a < b);
    return less[0] | less[1];
}
static inline bool any_less(Floats a, Floats b) {
    Longs less = (Longs)(a < b);
    return less[0] | less[1];
}
static inline bool any_less(Doubles a, Doubles b) { return a[0] < b[0] || a[1] < b[1]; }
template <class Vector> static inline void stream_bytes(void *p, Vector v) { store_bytes(p, v); }
static inline void widen(Floats v, Doubles wide[2]) {
    HalfFloats halves[2];
    memcpy(halves, &v, sizeof v);
    for (int k = 0; k < 2; k++) wide[k] = __builtin_convertvector(halves[k], Doubles);
}
static inline Floats narrow(const Doubles wide[2]) {
    HalfFloats halves[2];
    for (int k = 0; k < 2; k++) halves[k] = __builtin_convertvector(wide[k], HalfFloats);
    return load_bytes<Floats>(halves);
}
static inline void widen(Ints v, Longs wide[2]) {
    HalfInts halves[2];
    memcpy(halves, &v, sizeof v);
    for (int k = 0; k < 2; k++) wide[k] = __builtin_convertvector(halves[k], Longs);
}
static inline Ints lower_words(const Longs wide[2]) {
    HalfInts halves[2];
    for (int k = 0; k < 2; k++) halves[k] = __builtin_convertvector(wide[k], HalfInts);
    return load_bytes<Ints>(halves);
}
#endif
#ifdef NO_FMA
static inline Doubles upper_half(Doubles a) { return (Doubles)(((Longs)a + (1 << 26)) & -(int64_t(1) << 27)); }
// The rounding error of a product p = a b.
static inline Doubles rest_of_product(Doubles a, Doubles b, Doubles p) {
    Doubles a1 = upper_half(a), a2 = a - a1, b1 = upper_half(b), b2 = b - b1;
    Doubles rest = ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2;
    Doubles sizes[] = {(Doubles)((Longs)a & INT64_MAX), (Doubles)((Longs)b & INT64_MAX), (Doubles)((Longs)p & INT64_MAX)};
    Longs is_small = (sizes[2] < SMALL_PRODUCT) & (a != 0.0) & (b != 0.0);
    if (any_less(is_small | (sizes[0] >= LARGE_FACTOR) | (sizes[1] >= LARGE_FACTOR), Longs{}))
        for (int lane = 0; lane < LANES / 2; lane++) rest[lane] = two_product(a[lane], b[lane]).low;
    return rest;
}
// a b + c, where a b is exact.
static inline Doubles add_product(Doubles a, Doubles b, Doubles c) { return a * b + c; }
#else
static inline Doubles rest_of_product(Doubles a, Doubles b, Doubles p) { return fma(a, b, -p); }
static inline Doubles add_product(Doubles a, Doubles b, Doubles c) { return fma(a, b, c); }
#endif
#if VECTOR_BYTES != 64
static inline Unsigned to_words(Shorts v) { return __builtin_convertvector(v, Unsigned); }
static inline Shorts to_shorts(Unsigned v) { return __builtin_convertvector(v, Shorts); }
template <class Vector> static inline double largest_lane(Vector v) {
    double result = v[0];
    for (unsigned lane = 1; lane < sizeof v / sizeof v[0]; lane++)
        if (v[lane] > result) result = v[lane];
    return result;
}
static inline Longs truncated(Doubles v) {
    // In two parts, each an integer that stands in the low bits of a float64.
    v = whole(v);
    Doubles upper = v + 0x1.8p84, lower = v - (upper - 0x1.8p84) + MAGIC;
    return ((Longs)upper << 32) + (Longs)lower - MAGIC_BITS;
}
#endif

// Let other threads and processes see what was streamed.
static inline void finish_stream() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// The vector of a type of numbers in memory.
template <class T> struct Stored {
    typedef Shorts Vector;
};
template <> struct Stored<float> {
    typedef Floats Vector;
};
template <> struct Stored<double> {
    typedef Doubles Vector;
};
static inline Floats widened(Floats v, const float *) { return v; }
static inline Doubles widened(Doubles v, const double *) { return v; }
static inline Floats widened(Shorts v, const Half *) { return from_halves(v); }
static inline Floats widened(Shorts v, const BFloat *) { return (Floats)(to_words(v) << 16); }
template <class T> static inline auto load(const T *p) {
    return widened(load_bytes<typename Stored<T>::Vector>(p), p);
}
static inline Floats rounded(Floats v, float *) { return v; }
static inline Doubles rounded(Doubles v, double *) { return v; }
static inline Shorts rounded(Floats v, Half *) { return to_halves(v); }
static inline Shorts rounded(Floats v, BFloat *) {
    Unsigned b = (Unsigned)v;
    return to_shorts((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
template <class T, class Vector> static inline void store(T *p, Vector v) { store_bytes(p, rounded(v, p)); }
template <class T, class Vector> static inline void stream(T *p, Vector v) { stream_bytes(p, rounded(v, p)); }

// The first `count` numbers at p, of fewer than a vector has, filled up with others; and to p.
#if VECTOR_BYTES == 64
static inline uint32_t first_lanes(long count) { return count > 0 ? (1u << count) - 1 : 0; }
static inline Floats load_bytes_of(const void *p, long count, Floats others) {
    return (Floats)_mm512_mask_loadu_ps((__m512)others, first_lanes(count), p);
}
static inline Doubles load_bytes_of(const void *p, long count, Doubles others) {
    return (Doubles)_mm512_mask_loadu_pd((__m512d)others, first_lanes(count), p);
}
static inline Shorts load_bytes_of(const void *p, long count, Shorts others) {
    return (Shorts)_mm256_mask_loadu_epi16((__m256i)others, first_lanes(count), p);
}
static inline void store_bytes_of(void *p, long count, Floats v) {
    _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)v);
}
static inline void store_bytes_of(void *p, long count, Doubles v) {
    _mm512_mask_storeu_pd(p, first_lanes(count), (__m512d)v);
}
static inline void store_bytes_of(void *p, long count, Shorts v) {
    _mm256_mask_storeu_epi16(p, first_lanes(count), (__m256i)v);
}
#else
template <class Vector> static inline Vector load_bytes_of(const void *p, long count, Vector others) {
    if (count > 0) memcpy(&others, p, count * sizeof others[0]);
    return others;
}
template <class Vector> static inline void store_bytes_of(void *p, long count, Vector v) {
    if (count > 0) memcpy(p, &v, count * sizeof v[0]);
}
#endif

// The last few of a row, filled up with masked classes.
template <class T> static inline auto load_some(const T *p, long count) {
    typedef typename Stored<T>::Vector Vector;
    T others[sizeof(Vector) / sizeof(T)];
    for (T &each : others) each = masked<T>();
    return widened(load_bytes_of(p, count, load_bytes<Vector>(others)), p);
}
template <class T> static inline auto load_up_to(const T *p, long count) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    return count >= lanes ? load(p) : load_some(p, count);
}
// Filled up with the first of them.
template <class T> static inline auto load_repeated(const T *p, long count) {
    typedef typename Stored<T>::Vector Vector;
    constexpr int lanes = sizeof(Vector) / sizeof(T);
    if (count >= lanes) return load(p);
    std::remove_reference_t<decltype(Vector{}[0])> first;
    memcpy(&first, p, sizeof(T));
    return widened(load_bytes_of(p, count, Vector{} + first), p);
}
template <class T> static inline auto load_or_zeros(const T *p, long count) {
    typedef typename Stored<T>::Vector Vector;
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    return count >= lanes ? load(p) : widened(load_bytes_of(p, count, Vector{}), p);
}
template <class T, class Vector> static inline void store_up_to(T *p, Vector v, long count) {
    constexpr int lanes = sizeof(T) == 8 ? LANES / 2 : LANES;
    count >= lanes ? store(p, v) : store_bytes_of(p, count, rounded(v, p));
}

// Up to LANES numbers as float64.
template <class T> static inline void load_wide(const T *p, long count, Doubles wide[2]) {
    if constexpr (sizeof(T) == 8)
        for (int k = 0; k < 2; k++) wide[k] = load_up_to(p + k * LANES / 2, count - k * LANES / 2);
    else
        widen(load_up_to(p, count), wide);
}
// Up to LANES numbers, rounded to float32 first, but for float64.
template <class T> static inline void store_narrow(T *p, long count, const Doubles wide[2]) {
    if constexpr (sizeof(T) == 8) {
        for (int k = 0; k < 2; k++) store_up_to(p + k * LANES / 2, wide[k], count - k * LANES / 2);
    } else {
        store_up_to(p, narrow(wide), count);
    }
}

static inline Doubles cut_for_half(Doubles v) {
    return (Doubles)(((Longs)v | (((Longs)v & CUT_OFF) + CUT_OFF)) & ~CUT_OFF);
}

// Copy numbers, rounded once.
template <class To, class From> static void convert(To *to, const From *from, long count) {
    for (long i = 0; i < count; i += LANES) {
        if constexpr (sizeof(To) == 8 || sizeof(From) == 8) {
            Doubles wide[2];
            load_wide(from + i, count - i, wide);
            for (Doubles &each : wide)
                if (sizeof(To) == 2) each = cut_for_half(each);
            store_narrow(to + i, count - i, wide);
        } else {
            store_up_to(to + i, load_up_to(from + i, count - i), count - i);
        }
    }
}
