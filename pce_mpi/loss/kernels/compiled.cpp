// The hot loops on the CPU as a Python module; `compiled.py` calls it.
//
// One source for all instruction sets: `loops.h` and `rows.h` are compiled for each, and the best that the processor has
// is chosen at run time. Compile with -ffp-contract=off: an arithmetic that contracts a b + c has other bits.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "gradients.h"

namespace pce {
namespace {

enum Kind { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, KINDS };
constexpr long SIZES[KINDS] = {4, 8, 2, 2};

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

template <class T> constexpr int kind_of();
template <> constexpr int kind_of<float>() { return FLOAT32; }
template <> constexpr int kind_of<double>() { return FLOAT64; }
template <> constexpr int kind_of<Half>() { return FLOAT16; }
template <> constexpr int kind_of<BFloat>() { return BFLOAT16; }

using pce::number_of;
inline double number_of(BFloat v) { return from_bits(uint32_t(v.bits) << 16); }
inline double number_of(Half v) {
    uint32_t u = (v.bits & 0x7fffu) << 13, b = bits(from_bits(u) * 0x1p112f);
    return from_bits((u >= 0x0f800000 ? u | 0x7f800000 : b) | (v.bits & 0x8000u) << 16);
}

// A number rounded to float32, and then to T.
template <class T> T of_number(double v);
template <> inline float of_number<float>(double v) { return float(v); }
template <> inline double of_number<double>(double v) { return v; }
template <> inline BFloat of_number<BFloat>(double v) {
    uint32_t b = bits(float(v));
    return {uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
template <> inline Half of_number<Half>(double v) {
    uint32_t b = bits(float(v)), sign = b >> 16 & 0x8000;
    b &= 0x7fffffff;
    uint32_t subnormal = bits(from_bits(b) + 0.5f) - 0x3f000000, normal = (b + 0xc8000fff + (b >> 13 & 1)) >> 13;
    uint32_t h = b < 0x38800000 ? subnormal : b < 0x47800000 ? normal : b > 0x7f800000 ? 0x7e00 : 0x7c00;
    return {uint16_t(h | sign)};
}

template <class T> T masked() { return of_number<T>(-infinity()); }

// An array (outer, classes, inner), the class axis in the middle; strides in bytes.
struct Array {
    char *data;
    long shape[3], strides[3];
    int kind;
};

// Arguments of a pass over the logits; arrays of rows are consecutive, and may be absent where so noted.
struct Fill {
    Array logits, probabilities;  // probabilities: may be absent
    const int64_t *columns;       // the target's column, or -1; may be absent
    const double *weight;         // of each class; may be absent
    double kept, share;           // see Weights
    int64_t first_class;
    uint64_t *states;
    Call call;
    bool wide;  // in float64
};
struct Write {
    Array logits, out, probabilities;
    const RowGradient *rows;
    const double *weight;
    double kept, share;
    Call call;
    bool wide;
};
struct Loops {
    void (*fill)(const Fill &);
    void (*write)(const Write &);
};

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,f16c,prefer-vector-width=512")
namespace avx512 {
#define VECTOR_BYTES 64
#define HARDWARE_HALVES
typedef float Lanes __attribute__((vector_size(64)));
typedef uint16_t HalfLanes __attribute__((vector_size(32)));
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline Lanes load_halves(HalfLanes h) { return (Lanes)_mm512_cvtph_ps((__m256i)h); }
static inline HalfLanes store_halves(Lanes v) { return (HalfLanes)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#include "loops.h"
#include "rows.h"
#include "tables.h"
#undef VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,prefer-vector-width=256")
namespace avx2 {
#define VECTOR_BYTES 32
typedef float Lanes __attribute__((vector_size(32)));
typedef uint16_t HalfLanes __attribute__((vector_size(16)));
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static inline Lanes load_halves(HalfLanes h) { return (Lanes)_mm256_cvtph_ps((__m128i)h); }
static inline HalfLanes store_halves(Lanes v) { return (HalfLanes)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#include "loops.h"
#include "rows.h"
#include "tables.h"
#undef VECTOR_BYTES
#undef HARDWARE_HALVES
}  // namespace avx2
#pragma GCC pop_options
#endif

// SSE2, NEON, or whatever there is.
namespace baseline {
#define VECTOR_BYTES 16
typedef float Lanes __attribute__((vector_size(16)));
#if defined(__aarch64__)
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    Lanes result;
    for (int lane = 0; lane < 4; lane++) result[lane] = fma32(a[lane], b[lane], c[lane]);
    return result;
}
#endif
#include "loops.h"
#include "rows.h"
#include "tables.h"
#undef VECTOR_BYTES
}  // namespace baseline

struct InstructionSet {
    const char *name;
    bool (*present)();
    const Loops *loops;
};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
#endif
bool always() { return true; }

// The best first.
const InstructionSet INSTRUCTION_SETS[] = {
#if defined(__x86_64__)
    {"AVX-512", has_avx512, &avx512::LOOPS},
    {"AVX2", has_avx2, &avx2::LOOPS},
    {"SSE2", always, &baseline::LOOPS},
#elif defined(__aarch64__)
    {"NEON", always, &baseline::LOOPS},
#else
    {"no vectors", always, &baseline::LOOPS},
#endif
};
const InstructionSet *chosen;

// Arguments from Python

// A buffer of an object, released at the end of a block.
struct Buffer {
    Py_buffer view = {};
    bool held = false;
    ~Buffer() {
        if (held) PyBuffer_Release(&view);
    }
    // None gives no buffer. False with an exception set. Without PyBUF_STRIDES the memory must be consecutive.
    bool take(PyObject *object, int flags = PyBUF_SIMPLE) {
        if (object == Py_None) return true;
        held = PyObject_GetBuffer(object, &view, flags) == 0;
        return held;
    }
    template <class T> T *of() const { return held ? (T *)view.buf : nullptr; }
    Array array(int kind) const {
        Array array = {};
        array.kind = kind;
        if (!held) return array;
        array.data = (char *)view.buf;
        for (int axis = 0; axis < 3; axis++) {
            array.shape[axis] = long(view.shape[axis]);
            array.strides[axis] = long(view.strides[axis]);
        }
        return array;
    }
};

PyObject *fill_states(PyObject *, PyObject *arguments) {
    PyObject *logits, *columns, *weight, *probabilities, *states;
    Fill fill = {};
    int kind, probabilities_kind, wide;
    long long first_class;
    if (!PyArg_ParseTuple(arguments, "OiOOOiddLOiddp:fill_states", &logits, &kind, &columns, &weight, &probabilities,
                          &probabilities_kind, &fill.kept, &fill.share, &first_class, &states, &fill.call.fields,
                          &fill.call.transform.scale, &fill.call.transform.softcap, &wide))
        return nullptr;
    Buffer x, c, w, p, s;
    if (!x.take(logits, PyBUF_STRIDES) || !c.take(columns) || !w.take(weight) || !p.take(probabilities, PyBUF_STRIDES) || !s.take(states, PyBUF_WRITABLE))
        return nullptr;
    fill.logits = x.array(kind);
    fill.probabilities = p.array(probabilities_kind);
    fill.columns = c.of<int64_t>();
    fill.weight = w.of<double>();
    fill.first_class = first_class;
    fill.states = s.of<uint64_t>();
    fill.wide = wide;
    Py_BEGIN_ALLOW_THREADS;
    chosen->loops->fill(fill);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *write_gradient(PyObject *, PyObject *arguments) {
    PyObject *logits, *out, *rows, *weight, *probabilities;
    Write write = {};
    int kind, out_kind, probabilities_kind, wide;
    if (!PyArg_ParseTuple(arguments, "OiOiOOOiddiddp:write_gradient", &logits, &kind, &out, &out_kind, &rows, &weight,
                          &probabilities, &probabilities_kind, &write.kept, &write.share, &write.call.fields,
                          &write.call.transform.scale, &write.call.transform.softcap, &wide))
        return nullptr;
    Buffer x, o, r, w, p;
    if (!x.take(logits, PyBUF_STRIDES) || !o.take(out, PyBUF_STRIDES | PyBUF_WRITABLE) || !r.take(rows) || !w.take(weight) || !p.take(probabilities, PyBUF_STRIDES))
        return nullptr;
    write.logits = x.array(kind);
    write.out = o.array(out_kind);
    write.probabilities = p.array(probabilities_kind);
    write.rows = r.of<const RowGradient>();
    write.weight = w.of<double>();
    write.wide = wide;
    Py_BEGIN_ALLOW_THREADS;
    chosen->loops->write(write);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

template <class Arithmetic> void merge_rows(const uint64_t *a, uint64_t *b, long rows, const Call &call) {
    long words = words_of(call.fields);
    for (long r = 0; r < rows; r++, a += words, b += words)
        merged<Arithmetic>(State::load<Arithmetic>(a, call), State::load<Arithmetic>(b, call), call).template store<Arithmetic>(b, call);
}

// Merge the states of a into those of b.
PyObject *merge_states(PyObject *, PyObject *arguments) {
    PyObject *a, *b;
    Call call = {};
    int wide;
    if (!PyArg_ParseTuple(arguments, "OOiddp:merge_states", &a, &b, &call.fields, &call.transform.scale,
                          &call.transform.softcap, &wide))
        return nullptr;
    Buffer from, to;
    if (!from.take(a) || !to.take(b, PyBUF_WRITABLE)) return nullptr;
    long rows = long(to.view.len) / (8 * words_of(call.fields));
    Py_BEGIN_ALLOW_THREADS;
    wide ? merge_rows<Double>(from.of<uint64_t>(), to.of<uint64_t>(), rows, call)
         : merge_rows<Single>(from.of<uint64_t>(), to.of<uint64_t>(), rows, call);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

template <class Arithmetic>
void softmax_rows(const uint64_t *states, RowSoftmax *out, long rows, const Call &call, const Sum &class_weights) {
    long words = words_of(call.fields);
    for (long r = 0; r < rows; r++)
        out[r] = RowSoftmax::of<Arithmetic>(State::load<Arithmetic>(states + r * words, call), call, class_weights);
}

// Fill rows of RowSoftmax from merged states; the sum of all class weights is 4 words, or None.
PyObject *row_softmax(PyObject *, PyObject *arguments) {
    PyObject *states, *class_weights, *out;
    Call call = {};
    int wide;
    if (!PyArg_ParseTuple(arguments, "OOOiddp:row_softmax", &states, &class_weights, &out, &call.fields,
                          &call.transform.scale, &call.transform.softcap, &wide))
        return nullptr;
    Buffer from, weights, to;
    if (!from.take(states) || !weights.take(class_weights) || !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE)) return nullptr;
    Sum sum = weights.held ? *weights.of<Sum>() : Sum{NO_GRID, {0, 0, 0}};
    long rows = long(to.view.len / long(sizeof(RowSoftmax)));
    Py_BEGIN_ALLOW_THREADS;
    wide ? softmax_rows<Double>(from.of<uint64_t>(), to.of<RowSoftmax>(), rows, call, sum)
         : softmax_rows<Single>(from.of<uint64_t>(), to.of<RowSoftmax>(), rows, call, sum);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// Sum each of the arrays of float64 numbers in a tuple, into 4 words each: a grid and limbs.
PyObject *sums_of(PyObject *, PyObject *arguments) {
    PyObject *arrays, *out;
    if (!PyArg_ParseTuple(arguments, "O!O:sums_of", &PyTuple_Type, &arrays, &out)) return nullptr;
    Buffer to;
    if (!to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE)) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_Size(arrays); i++) {
        Buffer from;
        if (!from.take(PyTuple_GetItem(arrays, i))) return nullptr;
        Sum sum = {NO_GRID, {0, 0, 0}};
        const double *values = from.of<double>();
        long count = long(from.view.len / 8);
        Py_BEGIN_ALLOW_THREADS;
        for (long j = 0; j < count; j++) add_number(sum, values[j]);
        Py_END_ALLOW_THREADS;
        to.of<Sum>()[i] = sum;
    }
    Py_RETURN_NONE;
}

// Add the sums of a to those of b.
PyObject *add_sums(PyObject *, PyObject *arguments) {
    PyObject *a, *b;
    if (!PyArg_ParseTuple(arguments, "OO:add_sums", &a, &b)) return nullptr;
    Buffer from, to;
    if (!from.take(a) || !to.take(b, PyBUF_WRITABLE)) return nullptr;
    for (long i = 0; i < long(to.view.len / long(sizeof(Sum))); i++) add_numbers(to.of<Sum>()[i], from.of<Sum>()[i]);
    Py_RETURN_NONE;
}

// The values of sums as float64.
PyObject *values_of(PyObject *, PyObject *arguments) {
    PyObject *sums, *out;
    if (!PyArg_ParseTuple(arguments, "OO:values_of", &sums, &out)) return nullptr;
    Buffer from, to;
    if (!from.take(sums) || !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE)) return nullptr;
    for (long i = 0; i < long(to.view.len / 8); i++) to.of<double>()[i] = number_of(from.of<Sum>()[i]);
    Py_RETURN_NONE;
}

// Use the instruction set of this name, which must be present.
PyObject *use(PyObject *, PyObject *arguments) {
    const char *name;
    if (!PyArg_ParseTuple(arguments, "s:use", &name)) return nullptr;
    for (const InstructionSet &each : INSTRUCTION_SETS)
        if (strcmp(each.name, name) == 0 && each.present()) chosen = &each;
    Py_RETURN_NONE;
}

PyObject *instruction_set(PyObject *, PyObject *) { return PyUnicode_FromString(chosen->name); }

PyObject *instruction_sets(PyObject *, PyObject *) {
    PyObject *names = PyList_New(0);
    for (const InstructionSet &each : INSTRUCTION_SETS) {
        PyObject *name = each.present() ? PyUnicode_FromString(each.name) : nullptr;
        if (name) PyList_Append(names, name);
        Py_XDECREF(name);
    }
    return names;
}

PyMethodDef METHODS[] = {{"fill_states", fill_states, METH_VARARGS, nullptr},
                         {"write_gradient", write_gradient, METH_VARARGS, nullptr},
                         {"merge_states", merge_states, METH_VARARGS, nullptr},
                         {"row_softmax", row_softmax, METH_VARARGS, nullptr},
                         {"sums_of", sums_of, METH_VARARGS, nullptr},
                         {"add_sums", add_sums, METH_VARARGS, nullptr},
                         {"values_of", values_of, METH_VARARGS, nullptr},
                         {"use", use, METH_VARARGS, nullptr},
                         {"instruction_set", instruction_set, METH_NOARGS, nullptr},
                         {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_compiled", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace pce

PyMODINIT_FUNC PyInit__compiled() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (const auto &each : pce::INSTRUCTION_SETS)
        if (!pce::chosen && each.present()) pce::chosen = &each;
    return PyModule_Create(&pce::MODULE);
}
