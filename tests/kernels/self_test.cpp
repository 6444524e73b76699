// Prints a digest of the states and gradients of a fixed set of problems for each instruction set of this processor.
// `test_instruction_sets.py` compiles and runs it.
#include <fenv.h>
#include <stdio.h>

#include "host.h"

using namespace pce;

namespace {

uint64_t seed = 1;
uint64_t next() {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

uint64_t hash = 0xcbf29ce484222325;
void add(uint64_t word) { hash = (hash ^ word) * 0x100000001b3; }

template <class T> void put_bits(const T &value) {
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    double number = number_of(value);
    add(number == number ? word : 0x7ff8);  // one nan of the many
}

enum { ROWS = 4, CLASSES = 4203 };  // more classes than a chunk has
// One byte off any alignment.
char memory[2][1 + ROWS * CLASSES * 8];
char *const logits = memory[0] + 1, *const gradient = memory[1] + 1;
uint64_t states[ROWS * 16];
RowGradient rows[ROWS];
int64_t columns[ROWS];
double weight[CLASSES];

Array array_of(char *data, int kind) {
    long size = SIZES[kind];
    return {data, {ROWS, CLASSES, 1}, {CLASSES * size, size, size}, kind};
}

template <class T> void fill_logits(double spread, double offset) {
    for (long i = 0; i < ROWS * CLASSES; i++) {
        double value = (double(int64_t(next() >> 40)) / 0x1p23 - 1.0) * spread + offset;
        if (next() % 64 == 0) value = -infinity();
        T element = of_number<T>(value);
        memcpy(logits + i * sizeof element, &element, sizeof element);
    }
}

template <class Arithmetic, class T>
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
    Sum class_weights = {NO_GRID, {0, 0, 0}};
    for (double each : weight) add_number(class_weights, each);
    for (long r = 0; r < ROWS; r++) {
        for (long w = 0; w < words; w++) add(states[r * words + w]);
        RowSoftmax softmax =
            RowSoftmax::of<Arithmetic>(State::load<Arithmetic>(states + r * words, call), call, class_weights);
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
    Write write = {};
    write.logits = array_of(logits, kind);
    write.out = array_of(gradient, kind);
    write.rows = rows;
    write.weight = fill.weight;
    write.kept = 1.0;
    write.call = call;
    write.wide = wide;
    loops.write(write);
    for (long i = 0; i < ROWS * CLASSES; i++) {
        T value;
        memcpy(&value, gradient + i * sizeof value, sizeof value);
        put_bits(value);
    }
}

template <class T> void run_kind(const Loops &loops, int kind) {
    const int fields[] = {0, HELD_WEIGHT | WEIGHTED_LOGIT, HOLD_LARGEST | ARGMAX | ENTROPY};
    const Transform transforms[] = {{1.0, 0.0}, {0.5, 0.0}, {0.7, 0.0}, {1.3, 30.0}};
    const double spreads[] = {4.0, 60.0, 1e4}, offsets[] = {0.0, 1e4};
    for (int problem = 0; problem < 6; problem++) {
        fill_logits<T>(spreads[problem % 3], offsets[problem / 3]);
        for (int f = 0; f < 3; f++) {  // all fields with all transforms, by turns
            const Transform &transform = transforms[(problem + f) % 4];
            run<Double, T>(loops, kind, fields[f], transform, true);
            if (kind != FLOAT64) run<Single, T>(loops, kind, fields[f], transform, false);
        }
    }
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
        hash = 0xcbf29ce484222325;
        for (long r = 0; r < ROWS; r++) columns[r] = int64_t(next() % CLASSES);
        for (double &one : weight) one = double(next() % 9) / 4.0;
        run_kind<float>(*each.loops, FLOAT32);
        run_kind<double>(*each.loops, FLOAT64);
        run_kind<Half>(*each.loops, FLOAT16);
        run_kind<BFloat>(*each.loops, BFLOAT16);
        printf("%s %016llx\n", each.name, (unsigned long long)hash);
    }
    set_floating_point(before);
    return fegetround() != FE_UPWARD;
}
