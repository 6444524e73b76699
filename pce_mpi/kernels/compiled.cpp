// The hot loops on the CPU as a Python module; `compiled.py` calls it.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "host.h"

namespace pce {
namespace {

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

// Do work without the lock of Python.
template <class Work> PyObject *unlocked(Work work) {
    Py_BEGIN_ALLOW_THREADS;
    work();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

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
    if (!x.take(logits, PyBUF_STRIDES) || !c.take(columns) || !w.take(weight) ||
        !p.take(probabilities, PyBUF_STRIDES) || !s.take(states, PyBUF_WRITABLE))
        return nullptr;
    fill.logits = x.array(kind);
    fill.probabilities = p.array(probabilities_kind);
    fill.columns = c.of<int64_t>();
    fill.weight = w.of<double>();
    fill.first_class = first_class;
    fill.states = s.of<uint64_t>();
    fill.wide = wide;
    return unlocked([&, loops = chosen->loops] { loops->fill(fill); });
}

// Merge the states `a` into the states `b`.
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
    return unlocked([&] { merge_rows(from.of<uint64_t>(), to.of<uint64_t>(), rows, call, wide); });
}

// The merged states of rows, from what `MergedStates.given` of compiled.py has.
struct MergedBuffers {
    Buffer states, class_weights;
    Merged merged = {};

    bool take(PyObject *given) {
        PyObject *from, *weights;
        int wide;
        Call &call = merged.call;
        Transform &transform = call.transform;
        if (!PyArg_ParseTuple(given, "OOiddpddd", &from, &weights, &call.fields, &transform.scale, &transform.softcap,
                              &wide, &transform.m1, &transform.m2, &transform.m3))
            return false;
        if (!states.take(from) || !class_weights.take(weights)) return false;
        merged.states = states.of<uint64_t>();
        merged.rows = long(states.view.len) / (8 * words_of(call.fields));
        merged.wide = wide;
        merged.class_weights = class_weights.held ? *class_weights.of<Sum>() : Sum{NO_GRID, {0, 0, 0}};
        return true;
    }
};

// Fill rows of RowSoftmax from merged states.
PyObject *row_softmax(PyObject *, PyObject *arguments) {
    PyObject *given, *out;
    MergedBuffers from;
    Buffer to;
    if (!PyArg_ParseTuple(arguments, "OO:row_softmax", &given, &out) || !from.take(given) ||
        !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE))
        return nullptr;
    const Merged &merged = from.merged;
    RowSoftmax *rows = to.of<RowSoftmax>();
    auto keep = [=](long r, const RowSoftmax &row, int) { rows[r] = row; };
    return unlocked([&] { merged.softmax(0, merged.rows, keep); });
}

// Fill the losses of rows, and then their weights, from merged states.
PyObject *row_losses(PyObject *, PyObject *arguments) {
    PyObject *given, *valid, *out, *terms;
    MergedBuffers from;
    Buffer v, to, t;
    if (!PyArg_ParseTuple(arguments, "OOOO:row_losses", &given, &valid, &out, &terms) || !from.take(given) ||
        !v.take(valid) || !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE) || !t.take(terms))
        return nullptr;
    double *losses = to.of<double>();
    Losses pass = {from.merged, v.of<bool>(), *t.of<LossTerms>(), losses, losses + from.merged.rows};
    return unlocked([&, loops = chosen->loops] { loops->losses(pass); });
}

// Fill the statistics of rows, and their largest classes, from merged states.
PyObject *row_statistics(PyObject *, PyObject *arguments) {
    PyObject *given, *valid, *out, *largest;
    MergedBuffers from;
    Buffer v, to, l;
    if (!PyArg_ParseTuple(arguments, "OOOO:row_statistics", &given, &valid, &out, &largest) || !from.take(given) ||
        !v.take(valid) || !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE) || !l.take(largest, PyBUF_WRITABLE))
        return nullptr;
    return unlocked([&] { fill_statistics(from.merged, v.of<bool>(), to.of<double>(), l.of<int64_t>()); });
}

Upstream upstream_of(const Buffer &numbers) { return {numbers.of<const double>(), numbers.view.len == 8}; }

// Fill rows of RowGradient for statistics, from merged states.
PyObject *statistics_gradients(PyObject *, PyObject *arguments) {
    PyObject *given, *valid, *columns, *log_prob, *entropy, *logsumexp, *out;
    long long class_start, classes;
    double scale;
    MergedBuffers from;
    Buffer v, c, p, e, l, to;
    if (!PyArg_ParseTuple(arguments, "OOOLLdOOOO:statistics_gradients", &given, &valid, &columns, &class_start,
                          &classes, &scale, &log_prob, &entropy, &logsumexp, &out) ||
        !from.take(given) || !v.take(valid) || !c.take(columns) || !p.take(log_prob) || !e.take(entropy) ||
        !l.take(logsumexp) || !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE))
        return nullptr;
    const bool *counts = v.of<bool>();
    const int64_t *column = c.of<int64_t>();
    const Upstream of_log_prob = upstream_of(p), of_entropy = upstream_of(e), of_logsumexp = upstream_of(l);
    RowGradient *rows = to.of<RowGradient>();
    return unlocked([&] {
        from.merged.softmax(0, from.merged.rows, [&](long r, const RowSoftmax &row, int) {
            rows[r] = statistics_gradient_row(row, column ? column[r] : -1, column != nullptr, class_start, classes,
                                              scale, counts[r] ? of_log_prob[r] : 0.0, of_entropy[r], of_logsumexp[r]);
        });
    });
}

// The rows of a gradient: an array of RowGradient, or a tuple, `GradientRows` of compiled.py.
struct GradientBuffers {
    MergedBuffers merged;
    Buffer rows, valid, columns, upstream, divisor, terms;
    GradientRows computed = {};

    bool take(PyObject *given) {
        if (!PyTuple_Check(given)) return rows.take(given);
        PyObject *from, *v, *c, *u, *d, *t;
        if (!PyArg_ParseTuple(given, "OOOOOdO", &from, &v, &c, &u, &d, &computed.scale, &t) || !merged.take(from) ||
            !valid.take(v) || !columns.take(c) || !upstream.take(u) || !divisor.take(d) || !terms.take(t))
            return false;
        computed.merged = merged.merged;
        computed.valid = valid.of<const bool>();
        computed.columns = columns.of<const int64_t>();
        computed.upstream = upstream_of(upstream);
        computed.divisor = *divisor.of<double>();
        computed.terms = *terms.of<LossTerms>();
        return true;
    }
};

PyObject *write_gradient(PyObject *, PyObject *arguments) {
    PyObject *logits, *out, *rows, *weight, *probabilities;
    Write write = {};
    int kind, out_kind, probabilities_kind, wide;
    if (!PyArg_ParseTuple(arguments, "OiOiOOOiddiddp:write_gradient", &logits, &kind, &out, &out_kind, &rows, &weight,
                          &probabilities, &probabilities_kind, &write.kept, &write.share, &write.call.fields,
                          &write.call.transform.scale, &write.call.transform.softcap, &wide))
        return nullptr;
    Buffer x, o, w, p;
    GradientBuffers r;
    if (!x.take(logits, PyBUF_STRIDES) || !o.take(out, PyBUF_STRIDES | PyBUF_WRITABLE) || !r.take(rows) ||
        !w.take(weight) || !p.take(probabilities, PyBUF_STRIDES))
        return nullptr;
    write.logits = x.array(kind);
    write.out = o.array(out_kind);
    write.probabilities = p.array(probabilities_kind);
    write.rows = r.rows.of<const RowGradient>();
    write.computed = r.computed;
    write.weight = w.of<double>();
    write.wide = wide;
    return unlocked([&, loops = chosen->loops] { loops->write(write); });
}

// Fill the k largest logits of each row, (rows, k), and their columns.
PyObject *largest_of(PyObject *, PyObject *arguments) {
    PyObject *logits, *values, *columns;
    Largest largest = {};
    if (!PyArg_ParseTuple(arguments, "OilOO:largest_of", &logits, &largest.kind, &largest.k, &values, &columns))
        return nullptr;
    Buffer x, v, c;
    if (!x.take(logits, PyBUF_STRIDES) || !v.take(values, PyBUF_WRITABLE) || !c.take(columns, PyBUF_WRITABLE))
        return nullptr;
    largest.rows = x.of<const char>();
    largest.count = long(x.view.shape[0]);
    largest.classes = long(x.view.shape[1]);
    largest.stride = long(x.view.strides[0]);
    largest.values = v.of<double>();
    largest.columns = c.of<int64_t>();
    return unlocked([&, loops = chosen->loops] { loops->find(largest); });
}

// Fill the sums of divergences of rows, or write their gradients; the arguments of gradients are None for sums.
PyObject *diverge(PyObject *, PyObject *arguments) {
    PyObject *p, *q, *p_rows, *q_rows, *differences, *sums, *out, *slope, *less, *valid;
    Divergence pass = {};
    int p_kind, q_kind, out_kind, single;
    if (!PyArg_ParseTuple(arguments, "OiOiOOOdpddddiOOiOOO:diverge", &p, &p_kind, &q, &q_kind, &p_rows, &q_rows,
                          &differences, &pass.transform.scale, &single, &pass.mean.p, &pass.mean.q, &pass.mean.log_p,
                          &pass.mean.log_q, &pass.of, &sums, &out, &out_kind, &slope, &less, &valid))
        return nullptr;
    Buffer x, y, x_rows, y_rows, d, s, to, m, l, v;
    if (!x.take(p, PyBUF_STRIDES) || !y.take(q, PyBUF_STRIDES) || !x_rows.take(p_rows) || !y_rows.take(q_rows) ||
        !d.take(differences) || !s.take(sums, PyBUF_WRITABLE) || !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE) ||
        !m.take(slope) || !l.take(less) || !v.take(valid))
        return nullptr;
    pass.single = single;
    pass.logits = x.array(p_kind);
    pass.probabilities = y.array(q_kind);
    pass.out = to.array(out_kind);
    pass.p_rows = x_rows.of<const RowGradient>();
    pass.q_rows = y_rows.of<const RowGradient>();
    pass.differences = d.of<const Difference>();
    pass.sums = s.of<uint64_t>();
    pass.slope = m.of<const double>();
    pass.less = l.of<const double>();
    pass.valid = v.of<const bool>();
    return unlocked([&, loops = chosen->loops] { loops->diverge(pass); });
}

PyObject *gelu(PyObject *, PyObject *arguments) {
    PyObject *x, *y, *slope;
    Gelu pass = {};
    if (!PyArg_ParseTuple(arguments, "OOOddd:gelu", &x, &y, &slope, &pass.a, &pass.b, &pass.bent)) return nullptr;
    Buffer from, to, s;
    if (!from.take(x) || !to.take(y, PyBUF_WRITABLE) || !s.take(slope, PyBUF_WRITABLE)) return nullptr;
    pass.x = from.of<const float>();
    pass.y = to.of<float>();
    pass.slope = s.of<float>();
    pass.count = long(from.view.len / 4);
    return unlocked([&, loops = chosen->loops] { loops->gelu(pass); });
}

PyObject *attend(PyObject *, PyObject *arguments) {
    PyObject *scores;
    Attend pass = {};
    if (!PyArg_ParseTuple(arguments, "Olll:attend", &scores, &pass.columns, &pass.queries, &pass.seen)) return nullptr;
    Buffer p;
    if (!p.take(scores, PyBUF_WRITABLE)) return nullptr;
    pass.p = p.of<float>();
    pass.rows = pass.columns ? long(p.view.len / 4) / pass.columns : 0;
    return unlocked([&, loops = chosen->loops] { loops->attend(pass); });
}

PyObject *norm(PyObject *, PyObject *arguments) {
    PyObject *upstream, *x, *scale, *statistics, *out;
    Norm pass = {};
    int of, center;
    if (!PyArg_ParseTuple(arguments, "iiOOOOOdp:norm", &of, &pass.kind, &upstream, &x, &scale, &statistics, &out,
                          &pass.eps, &center))
        return nullptr;
    Buffer g, from, factors, kept, to;
    if (!g.take(upstream) || !from.take(x, PyBUF_STRIDES) || !factors.take(scale) ||
        !kept.take(statistics, of == NORMAL ? PyBUF_WRITABLE : PyBUF_SIMPLE) || !to.take(out, PyBUF_WRITABLE))
        return nullptr;
    pass.of = NormPass(of);
    pass.x = from.of<const char>();
    pass.upstream = g.of<const char>();
    pass.out = to.of<char>();
    pass.scale = factors.of<const double>();
    pass.statistics = kept.of<double>();
    pass.rows = long(from.view.shape[0]);
    pass.columns = long(from.view.shape[1]);
    pass.center = center;
    return unlocked([&, loops = chosen->loops] { loops->norm(pass); });
}

// One of the matrices of a stack, whose rows are lines, or whose columns are if `across`; and their exponents.
Lines lines_of(const Py_buffer &x, const Py_buffer &exponents, long index, bool across) {
    const int row = x.ndim - 2, column = x.ndim - 1;
    Lines lines = {(const char *)x.buf, long(x.shape[across ? column : row]), long(x.shape[across ? row : column]),
                   long(x.strides[across ? column : row]), long(x.strides[across ? row : column]), nullptr};
    char *to = (char *)exponents.buf;
    for (int axis = row - 1; axis >= 0; index /= long(x.shape[axis--])) {
        lines.data += index % long(x.shape[axis]) * x.strides[axis];
        to += index % long(x.shape[axis]) * exponents.strides[axis];
    }
    lines.exponents = (int32_t *)to;
    return lines;
}

long matrices_of(const Py_buffer &x) {
    long count = 1;
    for (int axis = 0; axis < x.ndim - 2; axis++) count *= long(x.shape[axis]);
    return count;
}

// Fill the exponents of the rows of matrices, or of their columns if `across`.
PyObject *find_exponents(PyObject *, PyObject *arguments) {
    PyObject *numbers, *out;
    int across;
    if (!PyArg_ParseTuple(arguments, "OpO:find_exponents", &numbers, &across, &out)) return nullptr;
    Buffer x, e;
    if (!x.take(numbers, PyBUF_STRIDES) || !e.take(out, PyBUF_STRIDES | PyBUF_WRITABLE)) return nullptr;
    return unlocked([&, products = chosen->products] {
        for (long i = 0; i < matrices_of(x.view); i++) products->find_exponents(lines_of(x.view, e.view, i, across));
    });
}

// Fill the products of stacks of matrices of one shape, float32, or their sums, int64.
PyObject *multiply(PyObject *, PyObject *arguments) {
    PyObject *first, *second, *of_rows, *of_columns, *out;
    if (!PyArg_ParseTuple(arguments, "OOOOO:multiply", &first, &second, &of_rows, &of_columns, &out)) return nullptr;
    Buffer a, b, e, f, to;
    if (!a.take(first, PyBUF_STRIDES) || !b.take(second, PyBUF_STRIDES) || !e.take(of_rows, PyBUF_STRIDES) ||
        !f.take(of_columns, PyBUF_STRIDES) || !to.take(out, PyBUF_STRIDES | PyBUF_WRITABLE))
        return nullptr;
    if (matrices_of(to.view) == 0) Py_RETURN_NONE;
    const Products &products = *chosen->products;
    auto product = [&](long i) {
        Product p = {lines_of(a.view, e.view, i, false), lines_of(b.view, f.view, i, true), nullptr, nullptr};
        if (to.view.itemsize == 4)
            p.numbers = to.of<float>() + i * p.a.count * p.b.count;
        else
            p.sums = to.of<int64_t>() + i * p.a.count * p.b.count;
        return p;
    };
    char *room = (char *)PyMem_Malloc(size_t(products.multiply(product(0), nullptr)));
    if (!room) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    for (long i = 0; i < matrices_of(to.view); i++) products.multiply(product(i), room);
    Py_END_ALLOW_THREADS;
    PyMem_Free(room);
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
        const Loops *loops = chosen->loops;
        Py_BEGIN_ALLOW_THREADS;
        loops->add(sum, from.of<double>(), long(from.view.len / 8));
        Py_END_ALLOW_THREADS;
        to.of<Sum>()[i] = sum;
    }
    Py_RETURN_NONE;
}

// Add the sums `a` to the sums `b`.
PyObject *add_sums(PyObject *, PyObject *arguments) {
    PyObject *a, *b;
    if (!PyArg_ParseTuple(arguments, "OO:add_sums", &a, &b)) return nullptr;
    Buffer from, to;
    if (!from.take(a) || !to.take(b, PyBUF_WRITABLE)) return nullptr;
    for (long i = 0; i < long(to.view.len / long(sizeof(Sum))); i++) add_numbers(to.of<Sum>()[i], from.of<Sum>()[i]);
    Py_RETURN_NONE;
}

// Fill in which rows count, those with another target than `ignored`; return whether all do, and the largest of their
// targets as an unsigned number.
PyObject *valid_rows(PyObject *, PyObject *arguments) {
    PyObject *targets, *ignore_index, *out;
    if (!PyArg_ParseTuple(arguments, "OO!O:valid_rows", &targets, &PyLong_Type, &ignore_index, &out)) return nullptr;
    int none;  // has a number that does not fit
    int64_t ignored = PyLong_AsLongLongAndOverflow(ignore_index, &none);
    Buffer from, to;
    if (!from.take(targets) || !to.take(out, PyBUF_WRITABLE)) return nullptr;
    bool all = true;
    uint64_t highest = 0;
    for (long r = 0; r < long(to.view.len); r++) {
        int64_t target = from.of<int64_t>()[r];
        bool valid = to.of<bool>()[r] = none || target != ignored;
        all = all && valid;
        if (valid && uint64_t(target) > highest) highest = uint64_t(target);
    }
    return Py_BuildValue("NK", PyBool_FromLong(all), (unsigned long long)highest);
}

// The loss, a float or a double, and its divisor, from the sums of the losses and weights of rows.
PyObject *loss_of(PyObject *, PyObject *arguments) {
    PyObject *sums, *out, *divisor;
    int mean;
    if (!PyArg_ParseTuple(arguments, "OpOO:loss_of", &sums, &mean, &out, &divisor)) return nullptr;
    Buffer from, to, d;
    if (!from.take(sums) || !to.take(out, PyBUF_WRITABLE) || !d.take(divisor, PyBUF_WRITABLE)) return nullptr;
    Loss loss = Loss::of(from.of<const Sum>(), mean);
    if (to.view.len == 4)
        *to.of<float>() = float(loss.value);
    else
        *to.of<double>() = loss.value;
    *d.of<double>() = loss.divisor;
    Py_RETURN_NONE;
}

// A block of Python in which the floating-point unit of this thread has its standard state.
struct StandardArithmetic {
    PyObject_HEAD;
    FloatingPoint before;
};

PyObject *enter_block(PyObject *self, PyObject *) {
    ((StandardArithmetic *)self)->before = floating_point();
    set_standard_floating_point();
    Py_RETURN_NONE;
}

PyObject *leave_block(PyObject *self, PyObject *) {
    set_floating_point(((StandardArithmetic *)self)->before);
    Py_RETURN_NONE;
}

PyMethodDef BLOCK_METHODS[] = {{"__enter__", enter_block, METH_NOARGS, nullptr},
                               {"__exit__", leave_block, METH_VARARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};
PyType_Slot BLOCK_SLOTS[] = {{Py_tp_methods, BLOCK_METHODS}, {0, nullptr}};
PyType_Spec BLOCK = {"pce_mpi.kernels._compiled.StandardArithmetic", sizeof(StandardArithmetic), 0,
                     Py_TPFLAGS_DEFAULT, BLOCK_SLOTS};

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
        if (!names || !each.present()) continue;
        PyObject *name = PyUnicode_FromString(each.name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyMethodDef METHODS[] = {{"fill_states", fill_states, METH_VARARGS, nullptr},
                         {"write_gradient", write_gradient, METH_VARARGS, nullptr},
                         {"merge_states", merge_states, METH_VARARGS, nullptr},
                         {"row_softmax", row_softmax, METH_VARARGS, nullptr},
                         {"row_losses", row_losses, METH_VARARGS, nullptr},
                         {"row_statistics", row_statistics, METH_VARARGS, nullptr},
                         {"statistics_gradients", statistics_gradients, METH_VARARGS, nullptr},
                         {"largest_of", largest_of, METH_VARARGS, nullptr},
                         {"diverge", diverge, METH_VARARGS, nullptr},
                         {"gelu", gelu, METH_VARARGS, nullptr},
                         {"attend", attend, METH_VARARGS, nullptr},
                         {"norm", norm, METH_VARARGS, nullptr},
                         {"find_exponents", find_exponents, METH_VARARGS, nullptr},
                         {"multiply", multiply, METH_VARARGS, nullptr},
                         {"sums_of", sums_of, METH_VARARGS, nullptr},
                         {"add_sums", add_sums, METH_VARARGS, nullptr},
                         {"valid_rows", valid_rows, METH_VARARGS, nullptr},
                         {"loss_of", loss_of, METH_VARARGS, nullptr},
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
    PyObject *module = PyModule_Create(&pce::MODULE), *block = PyType_FromSpec(&pce::BLOCK);
    if (module && (!block || PyModule_AddObjectRef(module, "StandardArithmetic", block) < 0)) Py_CLEAR(module);
    Py_XDECREF(block);
    return module;
}
