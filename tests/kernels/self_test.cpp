// Prints four digests of a fixed set of problems for each instruction set of this processor: of the states and
// gradients of losses and statistics, of the sums and gradients of divergences, of gelu and its slope, and of products.
// The softmax of attention and normalized rows, whose bits differ, are compared with float64.
// `test_instruction_sets.py` compiles and runs it.
#include <fenv.h>
#include <initializer_list>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "host.h"

using namespace pce;

namespace {

uint64_t seed = 1;
uint64_t next() {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

constexpr uint64_t BEGIN = 0xcbf29ce484222325;
uint64_t hash = BEGIN;
void add(uint64_t word) { hash = (hash ^ word) * 0x100000001b3; }

template <class T> void put_bits(const T &value) {
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    double number = number_of(value);
    add(number == number ? word : 0x7ff8);  // one nan of the many
}

enum { ROWS = 4, CLASSES = 4203 };  // more classes than a chunk has
// One byte off any alignment.
char memory[3][1 + ROWS * CLASSES * 8];
char *const logits = memory[0] + 1, *const gradient = memory[1] + 1, *const teacher = memory[2] + 1;
uint64_t states[ROWS * 16];
RowGradient rows[ROWS];
int64_t columns[ROWS];
double weight[CLASSES];

Array array_of(char *data, int kind) {
    long size = SIZES[kind];
    return {data, {ROWS, CLASSES, 1}, {CLASSES * size, size, size}, kind};
}

template <class T> void fill_logits(char *logits, double spread, double offset) {
    for (long i = 0; i < ROWS * CLASSES; i++) {
        double value = (double(int64_t(next() >> 40)) / 0x1p23 - 1.0) * spread + offset;
        if (next() % 64 == 0) value = -infinity();
        T element = of_number<T>(value);
        memcpy(logits + i * sizeof element, &element, sizeof element);
    }
}

template <class T> void write_gradient(const Loops &loops, const Write &write) {
    loops.write(write);
    for (long i = 0; i < ROWS * CLASSES; i++) {
        T value;
        memcpy(&value, gradient + i * sizeof value, sizeof value);
        put_bits(value);
    }
}

template <class Precision, class T>
void run(const Loops &loops, int kind, int fields, Transform transform, bool wide) {
    Call call = {fields, transform};
    Fill fill = {};
    fill.logits = array_of(logits, kind);
    fill.columns = fields & HOLD_LARGEST ? nullptr : columns;
    fill.weight = fields & HELD_WEIGHT ? weight : nullptr;
    fill.kept = 1.0;
    fill.states = states;
    fill.call = call;
    fill.wide = wide;
    loops.fill(fill);
    long words = words_of(fields);
    Sum class_weights = {NO_GRID, {0, 0, 0}}, added = class_weights;
    for (double each : weight) add_number(class_weights, each);
    loops.add(added, weight, CLASSES);
    for (uint64_t limb : added.limbs) add(limb);
    for (long r = 0; r < ROWS; r++) {
        for (long w = 0; w < words; w++) add(states[r * words + w]);
        RowSoftmax softmax =
            RowSoftmax::of<Precision>(State::load<Precision>(states + r * words, call), call, class_weights);
        const double numbers[] = {softmax.held_nll, softmax.held_minus_one, softmax.logsumexp, softmax.weighted_nll,
                                  softmax.entropy};
        for (double each : numbers) put_bits(each);
        rows[r] = {softmax.exponent,
                   columns[r],
                   r != 3,
                   softmax.top,
                   softmax.most,
                   softmax.normalizer * (r - 2.5),
                   0.125,
                   0.5,
                   0.0,
                   0.0,
                   0.75,
                   -0.25,
                   softmax.held,
                   (columns[r] + 1) % CLASSES,
                   0.375};
    }
    const bool valid[ROWS] = {true, true, false, true};
    double losses[2 * ROWS];
    const Merged merged = {states, ROWS, call, wide, class_weights};
    loops.losses({merged, valid, {}, losses, losses + ROWS});
    for (double each : losses) put_bits(each);
    Write write = {};
    write.logits = array_of(logits, kind);
    write.out = array_of(gradient, kind);
    write.rows = rows;
    write.weight = fill.weight;
    write.kept = 1.0;
    write.call = call;
    write.wide = wide;
    write_gradient<T>(loops, write);
    if (fields != 0) return;
    const double upstream[ROWS] = {1.0, -0.5, 2.0, 3.0};
    write.rows = nullptr;
    write.computed = {merged, valid, columns, {upstream, false}, 3.0, transform.scale, {}};
    write_gradient<T>(loops, write);
    fill.logits.shape[1] = 600;  // short rows
    loops.fill(fill);
    for (long w = 0; w < ROWS * words; w++) add(states[w]);
}

template <class T> void run_kind(const Loops &loops, int kind) {
    const int fields[] = {0, HELD_WEIGHT | WEIGHTED_LOGIT, HOLD_LARGEST | ARGMAX | ENTROPY};
    const Transform transforms[] = {{1.0, 0.0}, {0.5, 0.0}, {0.7, 0.0}, {1.3, 30.0}};
    const double spreads[] = {4.0, 60.0, 1e4}, offsets[] = {0.0, 1e4};
    for (int problem = 0; problem < 6; problem++) {
        fill_logits<T>(logits, spreads[problem % 3], offsets[problem / 3]);
        for (int f = 0; f < 3; f++) {  // all fields with all transforms, by turns
            const Transform &transform = transforms[(problem + f) % 4];
            run<Double, T>(loops, kind, fields[f], transform, true);
            if (kind != FLOAT64) run<Single, T>(loops, kind, fields[f], transform, false);
        }
    }
}

// Divergences of the softmax of `teacher` from that of `logits`, and their gradients.
template <class Precision, class T> void diverge(const Loops &loops, int kind, Transform transform) {
    const Call call = {HOLD_LARGEST, transform};
    static RowGradient both[2][ROWS];
    double z[2][ROWS], nll[2][ROWS];
    Difference differences[ROWS];
    for (int side = 0; side < 2; side++) {
        Fill fill = {};
        fill.logits = array_of(side ? teacher : logits, kind);
        fill.states = states;
        fill.call = call;
        fill.wide = kind == FLOAT64;
        loops.fill(fill);
        for (long r = 0; r < ROWS; r++) {
            const uint64_t *words = states + r * words_of(HOLD_LARGEST);
            RowSoftmax row = RowSoftmax::of<Precision>(State::load<Precision>(words, call), call, {});
            both[side][r] = {row.exponent, -1, 1, row.top, row.most, row.normalizer, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
                             -1, 0.0};
            z[side][r] = row.held_z;
            nll[side][r] = row.held_nll;
        }
    }
    for (long r = 0; r < ROWS; r++) {
        const Pair delta = two_sum(z[1][r], -z[0][r]);
        differences[r] = {delta.high, delta.low, nll[1][r] - nll[0][r]};
    }
    const double slope[ROWS] = {1.0, 0.5, -2.0, 1.0}, less[ROWS] = {0.125, 0.25, 0.0, 1.0};
    const bool valid[ROWS] = {true, true, true, false};
    uint64_t sums[ROWS * 6];
    Divergence pass = {};
    pass.logits = array_of(logits, kind), pass.probabilities = array_of(teacher, kind);
    pass.p_rows = both[0], pass.q_rows = both[1];
    pass.differences = differences, pass.slope = slope, pass.less = less, pass.valid = valid;
    pass.transform = transform;
    pass.single = kind != FLOAT64;
    for (pass.of = 0; pass.of < 2; pass.of++) {
        pass.sums = sums;
        loops.diverge(pass);
        for (uint64_t word : sums) add(word);
    }
    pass.sums = nullptr;
    pass.out = array_of(gradient, kind);
    for (pass.of = 0; pass.of < 3; pass.of++) {
        loops.diverge(pass);
        for (long i = 0; i < ROWS * CLASSES; i++) {
            T value;
            memcpy(&value, gradient + i * sizeof value, sizeof value);
            put_bits(value);
        }
    }
}

template <class Precision, class T> void diverge_kind(const Loops &loops, int kind) {
    for (double distance : {0.01, 3.0}) {
        fill_logits<T>(logits, 4.0, 0.0);
        fill_logits<T>(teacher, distance, 0.0);
        for (long i = 0; i < ROWS * CLASSES; i++) {
            T x, y;
            memcpy(&x, logits + i * sizeof x, sizeof x);
            memcpy(&y, teacher + i * sizeof y, sizeof y);
            y = of_number<T>(number_of(x) + number_of(y));
            memcpy(teacher + i * sizeof y, &y, sizeof y);
        }
        for (double scale : {1.0, 0.7}) diverge<Precision, T>(loops, kind, {scale, 0.0});
    }
}

void activate(const Loops &loops) {
    const long count = ROWS * CLASSES;
    fill_logits<float>(logits, 30.0, 0.0);
    loops.gelu({(const float *)logits, (float *)gradient, (float *)teacher, count, 1.5, 0.07, 24.0});
    for (const char *written : {gradient, teacher})
        for (long i = 0; i < count; i++) {
            float value;
            memcpy(&value, written + i * sizeof value, sizeof value);
            put_bits(value);
        }
}

void expect(double got, double right, double error, const char *what) {
    if (fabs(got - right) <= error) return;
    fprintf(stderr, "%s: %.9g in place of %.9g\n", what, got, right);
    exit(1);
}

void attend(const Loops &loops) {
    enum { QUERIES = 5, KEYS = 77, SEEN = 3 };
    static float p[2 * QUERIES][KEYS];
    fill_logits<float>(logits, 20.0, 0.0);
    memcpy(p, logits, sizeof p);
    double right[2 * QUERIES][KEYS] = {};
    for (int row = 0; row < 2 * QUERIES; row++) {
        const int seen = SEEN + row % QUERIES;
        p[row][1] = 0.0f;  // of some scores -inf
        double top = -infinity(), sum = 0.0;
        for (int k = 0; k < seen; k++) top = p[row][k] > top ? p[row][k] : top;
        for (int k = 0; k < seen; k++) sum += right[row][k] = exp(p[row][k] - top);
        for (int k = 0; k < seen; k++) right[row][k] /= sum;
    }
    loops.attend({&p[0][0], 2 * QUERIES, KEYS, QUERIES, SEEN});
    for (int row = 0; row < 2 * QUERIES; row++)
        for (int k = 0; k < KEYS; k++) expect(p[row][k], right[row][k], 4e-6 * right[row][k], "attention");
}

template <class T> void normalize(const Loops &loops, int kind) {
    enum { COUNT = 3, LENGTH = 1101 };
    const double eps = 1e-5, error = sizeof(T) == 4 ? 1e-5 : 1e-12;
    static T x[COUNT][LENGTH], g[COUNT][LENGTH], y[COUNT][LENGTH], dx[COUNT][LENGTH];
    double scale[LENGTH], statistics[COUNT][3], dscale[LENGTH] = {}, right[LENGTH] = {};
    auto number = [] { return double(int64_t(next() >> 40)) / 0x1p23 - 1.0; };
    for (int row = 0; row < COUNT; row++)
        for (int i = 0; i < LENGTH; i++) x[row][i] = T(number() + 3.0), g[row][i] = T(number());
    for (double &each : scale) each = number();
    Norm pass = {NORMAL, kind, (char *)x, nullptr, (char *)y, scale, *statistics, COUNT, LENGTH, eps, true};
    loops.norm(pass);
    pass.of = OF_ROWS, pass.upstream = (char *)g, pass.out = (char *)dx;
    loops.norm(pass);
    pass.of = OF_SCALE, pass.out = (char *)dscale;
    loops.norm(pass);
    for (int row = 0; row < COUNT; row++) {
        double mean = 0.0, variance = 0.0, plain = 0.0, product = 0.0, normal[LENGTH];
        for (T each : x[row]) mean += each / LENGTH;
        for (T each : x[row]) variance += (each - mean) * (each - mean) / LENGTH;
        for (int i = 0; i < LENGTH; i++) {
            normal[i] = (x[row][i] - mean) / sqrt(variance + eps);
            plain += g[row][i] * scale[i] / LENGTH;
            product += g[row][i] * scale[i] * normal[i] / LENGTH;
            right[i] += g[row][i] * normal[i];
        }
        for (int i = 0; i < LENGTH; i++) {
            expect(y[row][i], normal[i] * scale[i], error, "norm");
            double of_row = (g[row][i] * scale[i] - plain - normal[i] * product) / sqrt(variance + eps);
            expect(dx[row][i], of_row, error, "gradient of norm");
        }
    }
    for (int i = 0; i < LENGTH; i++) expect(dscale[i], right[i], error, "gradient of scale");
}

void multiply(const Products &products) {
    enum { M = 11, K = 1100, N = 15 };
    for (char *memory : {logits, teacher}) {
        fill_logits<float>(memory, 4.0, 0.0);
        const float masked = -float(infinity()), none = 0.0f;
        for (char *at = memory; at < memory + ROWS * CLASSES * 4; at += 4)
            if (memcmp(at, &masked, 4) == 0) memcpy(at, &none, 4);
    }
    int32_t e[M], f[N];
    float numbers[M * N];
    int64_t sums[M * N];
    const Product product = {{logits, M, K, 4 * K, 4, e}, {teacher, N, K, 4, 4 * N, f}, numbers, sums};
    products.find_exponents(product.a);
    products.find_exponents(product.b);
    char *room = (char *)malloc(products.multiply(product, nullptr));
    products.multiply(product, room);
    free(room);
    for (int64_t each : sums) add(each);
    for (float each : numbers) put_bits(each);
}

// A state in which everything has other bits: it rounds upwards and, if that can be set, takes subnormal numbers for 0.
void set_other_state() {
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    set_floating_point(floating_point() | 0x8040);
#elif defined(__aarch64__)
    set_floating_point(floating_point() | 1 << 24);
#endif
}

}  // namespace

int main() {
    set_other_state();
    FloatingPoint before = floating_point();
    set_standard_floating_point();
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (const InstructionSet &each : INSTRUCTION_SETS) {
        if (!each.present()) continue;
        seed = 1;
        hash = BEGIN;
        for (long r = 0; r < ROWS; r++) columns[r] = int64_t(next() % CLASSES);
        for (double &one : weight) one = double(next() % 9) / 4.0;
        run_kind<float>(*each.loops, FLOAT32);
        run_kind<double>(*each.loops, FLOAT64);
        run_kind<Half>(*each.loops, FLOAT16);
        run_kind<BFloat>(*each.loops, BFLOAT16);
        const uint64_t losses = hash;
        hash = BEGIN;
        diverge_kind<Single, float>(*each.loops, FLOAT32);
        diverge_kind<Double, double>(*each.loops, FLOAT64);
        diverge_kind<Single, BFloat>(*each.loops, BFLOAT16);
        const uint64_t divergences = hash;
        hash = BEGIN;
        activate(*each.loops);
        attend(*each.loops);
        normalize<float>(*each.loops, FLOAT32);
        normalize<double>(*each.loops, FLOAT64);
        const uint64_t layers = hash;
        hash = BEGIN;
        multiply(*each.products);
        printf("%s", each.name);
        for (uint64_t digest : {losses, divergences, layers, hash}) printf(" %016llx", (unsigned long long)digest);
        puts("");
    }
    set_floating_point(before);
    return fegetround() != FE_UPWARD;
}
