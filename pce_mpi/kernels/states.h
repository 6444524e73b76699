// Softmax states of rows, for C++ and CUDA; `states.py` and `row_softmax.py` define them.
#pragma once

#include "margin.h"

namespace pce {

constexpr int WIDE = Double::WIDTH;
constexpr int64_t NO_GRID = -(1 << 14), INFINITE = 1 << 14, MINUS_INFINITE = INFINITE + 1, NOT_A_NUMBER = INFINITE + 2;
constexpr int64_t NO_ENTROPY = -(int64_t(1) << 60), NO_SUM = -(int64_t(1) << 61);
constexpr int64_t FARTHEST = int64_t(1) << 57;  // a grid whose unit still fits 64 bits
constexpr int FORGOTTEN = 255;
constexpr int64_t NO_CLASS = 0x7fffffffffffffff;

enum Field {
    HOLD_LARGEST = 1,
    ARGMAX = 2,
    TARGET = 4,
    HELD_WEIGHT = 8,
    WEIGHT = 16,
    WEIGHTED_LOGIT = 32,
    ENTROPY = 64
};

// A sum in limbs, on a grid.
struct Sum {
    int64_t grid;
    uint64_t limbs[3];

    // Move to a grid, if it is coarser.
    PCE_FUNCTION void raise(int64_t to) {
        if (to <= grid) return;
        int64_t by = to - grid;  // no computed index: registers cannot be indexed
        limbs[0] = by == 1 ? limbs[1] : by == 2 ? limbs[2] : 0;
        limbs[1] = by == 1 ? limbs[2] : 0;
        limbs[2] = 0;
        grid = to;
    }

    // An empty sum has the lowest of all grids, and so no limbs on any other.
    PCE_FUNCTION void add(Sum other) {
        raise(other.grid);
        other.raise(grid);
        for (int j = 0; j < 3; j++) limbs[j] += other.limbs[j];
    }
};

// Add the magnitude m 2^shift, cut to an integer and negated if asked.
PCE_FUNCTION void add_limbs(uint64_t limbs[3], uint64_t m, int64_t shift, int width, bool negative) {
    uint64_t low, high = 0;
    if (shift >= 0) {
        int left = int(shift < 63 ? shift : 63);
        low = m << left;
        high = (m >> 1) >> (63 - left);
    } else {
        low = shift > -64 ? m >> -shift : 0;
    }
    uint64_t parts[3] = {low, (low >> width) | (high << (64 - width)), 0};
    parts[2] = 2 * width >= 64 ? high >> (2 * width - 64) : (low >> 2 * width) | (high << (64 - 2 * width));
    for (int j = 0; j < 3; j++) limbs[j] += negative ? 0 - parts[j] : parts[j];
}

PCE_FUNCTION uint64_t mantissa(const Parts &parts) { return uint64_t(magnitude(parts.m) * 0x1p53); }

// Add parts 2^exponent, of which the first is the largest, to a sum in digits of WIDE bits.
PCE_FUNCTION void add_wide(Sum &sum, const double *parts, int count, int64_t exponent) {
    if (finite(parts[0]) && parts[0] != 0.0) sum.raise(floor_div(split(parts[0]).e - 1 + exponent, WIDE));
    for (int i = 0; i < count; i++) {
        if (!finite(parts[i]) || parts[i] == 0.0) continue;
        Parts p = split(parts[i]);
        add_limbs(sum.limbs, mantissa(p), p.e - 53 + exponent - WIDE * (sum.grid - 2), WIDE, p.m < 0.0);
    }
}

// The value of a sum in units of its grid, correct to 2^-104.
PCE_FUNCTION Pair value_of(const uint64_t limbs[3], int width) {
    int64_t digits[3] = {int64_t(limbs[0] - (limbs[1] << width)), int64_t(limbs[1] - (limbs[2] << width)),
                         int64_t(limbs[2])};
    int64_t mask = (int64_t(1) << width) - 1;
    bool negative = false;
    for (int pass = 0; pass < 2; pass++) {
        for (int j = 0; j < 2; j++) {
            digits[j + 1] += digits[j] >> width;
            digits[j] &= mask;
        }
        if (pass == 0 && digits[2] < 0) {
            negative = true;
            for (int j = 0; j < 3; j++) digits[j] = -digits[j];
        }
    }
    double unit = power(width), square = power(2 * width);
    Pair sum = two_sum(double(digits[2] >> 32 << 32) * square, double(digits[2] & 0xffffffff) * square);
    Pair next = two_sum(sum.high, double(digits[1]) * unit);
    double low = sum.low + next.low;
    sum = two_sum(next.high, double(digits[0]));
    low += sum.low;
    sum = two_sum(sum.high, low);
    return negative ? Pair{-sum.high, -sum.low} : sum;
}

PCE_FUNCTION Pair scaled(Pair pair, int64_t n) { return {scaled(pair.high, n), scaled(pair.low, n)}; }
PCE_FUNCTION int64_t exponent_of_wide(const Sum &sum) { return WIDE * (clip(sum.grid, -100, 100) - 2); }
// Of a sum of numbers, which need not be finite.
PCE_FUNCTION Pair value_of_wide(const Sum &sum) {
    if (sum.grid >= NOT_A_NUMBER) return {not_a_number(), 0.0};
    if (sum.grid >= INFINITE) return {sum.grid == INFINITE ? infinity() : -infinity(), 0.0};
    return scaled(value_of(sum.limbs, WIDE), exponent_of_wide(sum));
}

// What a call computes: its fields, and how.
struct Call {
    int fields;
    Transform transform;

    PCE_FUNCTION bool has(int field) const { return fields & field; }
    // True if it is that of a loss without options.
    PCE_FUNCTION bool is_plain() const {
        return fields == 0 && transform.scale == 1.0 && transform.softcap == 0.0 && !transform.has_margin();
    }
};

// The words of 8 bytes of a state, in the order of `StateFields.dtype`.
PCE_FUNCTION int words_of(int fields) {
    int words = 5;
    if (fields & (HOLD_LARGEST | WEIGHT | WEIGHTED_LOGIT)) words += 1;
    if (fields & HOLD_LARGEST) words -= 1;
    if (fields & ARGMAX) words += 1;
    if (fields & TARGET) words += 1;
    if (fields & HELD_WEIGHT) words += 1;
    if (fields & WEIGHT) words += 3;
    if (fields & WEIGHTED_LOGIT) words += 3;
    if (fields & ENTROPY) words += 4;
    return words;
}

template <class Precision> PCE_FUNCTION int64_t grid_of(double x, const Transform &transform) {
    return floor_div(argument<Precision>(finite(x) ? x : 0.0, transform).n, Precision::WIDTH);
}

PCE_FUNCTION bool is_huge(double x, const Transform &transform) {
    return finite(x) && !(magnitude(transformed(x, transform).high) < HUGE_LOGIT);
}

struct State {
    double held, top;  // top: the largest other logit, kept unless the largest is held
    Sum sum;
    int64_t argmax;
    double target, held_weight;
    Sum weight, weighted_logit, entropy;

    static PCE_FUNCTION State identity() {
        double none = -infinity();
        Sum empty = {NO_GRID, {0, 0, 0}};
        return {none, none, {NO_SUM, {0, 0, 0}}, NO_CLASS, none, 0.0, empty, empty, {NO_ENTROPY, {0, 0, 0}}};
    }

    template <class Precision> static PCE_FUNCTION State load(const uint64_t *words, const Call &call) {
        State state = identity();
        state.held = from_bits(*words++);
        if (!call.has(HOLD_LARGEST)) state.top = from_bits(*words++);
        for (int j = 0; j < 3; j++) state.sum.limbs[j] = *words++;
        int depth = 0;
        if (call.fields & (HOLD_LARGEST | WEIGHT | WEIGHTED_LOGIT)) {
            uint64_t grids = *words++;
            depth = int16_t(grids);
            state.weight.grid = int16_t(grids >> 16);
            state.weighted_logit.grid = int16_t(grids >> 32);
        }
        if (call.has(ARGMAX)) state.argmax = int64_t(*words++);
        if (call.has(TARGET)) state.target = from_bits(*words++);
        if (call.has(HELD_WEIGHT)) state.held_weight = from_bits(*words++);
        if (call.has(WEIGHT))
            for (int j = 0; j < 3; j++) state.weight.limbs[j] = *words++;
        if (call.has(WEIGHTED_LOGIT))
            for (int j = 0; j < 3; j++) state.weighted_logit.limbs[j] = *words++;
        if (call.has(ENTROPY)) {
            state.entropy.grid = int64_t(*words++);
            for (int j = 0; j < 3; j++) state.entropy.limbs[j] = *words++;
        }
        if (call.has(HOLD_LARGEST)) {
            if (depth < FORGOTTEN) state.sum.grid = grid_of<Precision>(state.held, call.transform) - depth;
        } else if (state.top > -infinity()) {
            state.sum.grid = grid_of<Precision>(state.top, call.transform);
        }
        return state;
    }

    template <class Precision> PCE_FUNCTION void store(uint64_t *words, const Call &call) const {
        Sum cut = sum;
        int64_t depth = 0;
        if (call.has(HOLD_LARGEST)) {
            depth = FORGOTTEN;
            if (cut.grid != NO_SUM) {
                depth = grid_of<Precision>(held, call.transform) - cut.grid;
                if (depth >= FORGOTTEN) {
                    depth = FORGOTTEN;
                    cut.raise(cut.grid + 3);
                }
            }
        }
        *words++ = bits(held);
        if (!call.has(HOLD_LARGEST)) *words++ = bits(top);
        for (int j = 0; j < 3; j++) *words++ = cut.limbs[j];
        if (call.fields & (HOLD_LARGEST | WEIGHT | WEIGHTED_LOGIT)) {
            uint64_t first = uint16_t(call.has(WEIGHT) ? weight.grid : NO_GRID);
            uint64_t second = uint16_t(call.has(WEIGHTED_LOGIT) ? weighted_logit.grid : NO_GRID);
            *words++ = uint16_t(depth) | first << 16 | second << 32;
        }
        if (call.has(ARGMAX)) *words++ = uint64_t(argmax);
        if (call.has(TARGET)) *words++ = bits(target);
        if (call.has(HELD_WEIGHT)) *words++ = bits(held_weight);
        if (call.has(WEIGHT))
            for (int j = 0; j < 3; j++) *words++ = weight.limbs[j];
        if (call.has(WEIGHTED_LOGIT))
            for (int j = 0; j < 3; j++) *words++ = weighted_logit.limbs[j];
        if (call.has(ENTROPY)) {
            *words++ = uint64_t(entropy.grid);
            for (int j = 0; j < 3; j++) *words++ = entropy.limbs[j];
        }
    }
};

// Add a number, which need not be finite.
PCE_FUNCTION void add_number(Sum &sum, double v) {
    if (finite(v)) {
        if (sum.grid < INFINITE) add_wide(sum, &v, 1, 0);
        return;
    }
    int64_t grid = v != v ? NOT_A_NUMBER : v > 0.0 ? INFINITE : MINUS_INFINITE;
    sum = {sum.grid < INFINITE || sum.grid == grid ? grid : NOT_A_NUMBER, {0, 0, 0}};
}

// Add two sums of numbers.
PCE_FUNCTION void add_numbers(Sum &sum, const Sum &other) {
    if (sum.grid >= INFINITE && other.grid >= INFINITE && sum.grid != other.grid) sum.grid = NOT_A_NUMBER;
    sum.add(other);
}

PCE_FUNCTION double number_of(const Sum &sum) { return value_of_wide(sum).high; }

// From LARGE_LOGIT on a product with z is computed in units of 2^128.
constexpr double LARGE_LOGIT = 0x1p800;
PCE_FUNCTION int64_t unit_of(double z) { return finite(z) && magnitude(z) >= LARGE_LOGIT ? 128 : 0; }

// Add u z of one class. A sum that is not finite has the kind of the sum of u (-log p): a weight on a masked class makes
// it infinite, and so does an infinite one.
PCE_FUNCTION void add_weighted_logit(Sum &sum, double x, double u, const Transform &transform) {
    Pair z = transformed(x, transform);
    if (!finite(u)) return add_number(sum, u);
    if (!finite(z.high)) {
        if (z.high == -infinity() && u != 0.0) add_number(sum, u > 0.0 ? infinity() : -infinity());
        return;
    }
    int64_t unit = unit_of(z.high);
    z = scaled(z, -unit);
    Pair product = two_product(u, z.high);
    if (!finite(product.high)) return add_number(sum, not_a_number());
    double parts[2] = {product.high, product.low + u * z.low};
    if (sum.grid < INFINITE) add_wide(sum, parts, 2, unit);
}

// Add exp(z) z of one class. Of huge logits nothing is needed: beside one only equal ones count.
template <class Precision>
PCE_FUNCTION void add_entropy(Sum &sum, uint64_t fixed, int64_t exponent, double x, const Transform &transform) {
    constexpr int DIGITS = Precision::POINT > 30 ? Precision::POINT - 30 : 0;
    Pair z = transformed(x, transform);
    if (!(magnitude(z.high) < HUGE_LOGIT)) return;
    uint64_t upper = fixed >> DIGITS << DIGITS;
    Pair a = two_product(double(upper), z.high), b = two_product(double(fixed - upper), z.high);
    double parts[5] = {a.high, a.low, b.high, b.low, double(fixed) * z.low};
    add_wide(sum, parts, 5, exponent);
}

// Add one class that is not held to a state whose grid it may raise.
template <class Precision> PCE_FUNCTION void add_class(State &state, double x, double u, const Call &call) {
    if (call.has(WEIGHT)) add_number(state.weight, u);
    if (call.has(WEIGHTED_LOGIT)) add_weighted_logit(state.weighted_logit, x, u, call.transform);
    if (!finite(x)) return;
    auto e = exponential<Precision>(x, call.transform);
    state.sum.raise(floor_div(e.n, Precision::WIDTH));
    uint64_t fixed = fixed_point(e.t);
    int64_t exponent = e.n - Precision::POINT;
    add_limbs(state.sum.limbs, fixed, exponent - Precision::WIDTH * (state.sum.grid - 2), Precision::WIDTH, false);
    if (call.has(ENTROPY)) add_entropy<Precision>(state.entropy, fixed, exponent, x, call.transform);
}

// True if a weight wins a tie of logits against another one; a nan loses.
PCE_FUNCTION bool heavier(double u, double other) { return u > other || (other != other && u == u); }

// True if b has the class held apart rather than a: a nan before numbers, then the larger logit.
PCE_FUNCTION bool b_is_held(const State &a, const State &b, const Call &call) {
    bool nan_a = a.held != a.held, nan_b = b.held != b.held, first = false;
    if (call.has(ARGMAX))
        first = b.argmax < a.argmax;
    else if (call.has(HELD_WEIGHT))
        first = heavier(b.held_weight, a.held_weight);
    if (nan_a || nan_b) return nan_b && (!nan_a || first);
    return b.held > a.held || (b.held == a.held && first);
}

PCE_FUNCTION double larger(double a, double b) { return a != a ? a : b != b ? b : a < b ? b : a; }

PCE_FUNCTION void forget_exponentials(State &state) {
    state.sum = {NO_SUM, {0, 0, 0}};
    state.entropy = {NO_ENTROPY, {0, 0, 0}};
}

// True if a logit counts beside the largest one: beside a huge one only equal ones do. A sum of exponentials drops by
// itself what is so far below.
PCE_FUNCTION bool counts(double x, double leading, const Call &call) {
    return x == leading || !is_huge(leading, call.transform);
}

// Make `a` the state of the union of two disjoint sets of classes of a row; `b` is used up.
template <class Precision> PCE_FUNCTION void merge(State &a, State &b, const Call &call) {
    double leading;
    if (call.has(HOLD_LARGEST)) {
        if (b_is_held(a, b, call)) {
            State swapped = a;
            a = b;
            b = swapped;
        }
        add_class<Precision>(b, b.held, call.has(HELD_WEIGHT) ? b.held_weight : 0.0, call);
        leading = a.held;
        if (!finite(leading)) forget_exponentials(a);
        if (!finite(leading) || !counts(b.held, leading, call)) forget_exponentials(b);
        a.target = larger(a.target, b.target);
    } else {
        leading = larger(a.top, b.top);
        bool drop = leading != leading;
        if (drop || !counts(a.top, leading, call)) forget_exponentials(a);
        if (drop || !counts(b.top, leading, call)) forget_exponentials(b);
        a.top = leading;
        a.held = larger(a.held, b.held);
        a.held_weight += b.held_weight;
    }
    a.sum.add(b.sum);
    add_numbers(a.weight, b.weight);
    add_numbers(a.weighted_logit, b.weighted_logit);
    a.entropy.add(b.entropy);
}

// One logit x of a row, with e in exp(z) = 2^n e.
struct Logit {
    double z, low;
    bool huge;
    int64_t n;
    double e;

    static PCE_FUNCTION Logit of(double x, const Pair &z) {
        Exponential<double> e = reduced(z.high, z.low);
        return {z.high, z.low, finite(x) && !(magnitude(z.high) < HUGE_LOGIT), e.n, 1.0 + polynomial(e.t)};
    }
};

// weight value; a weight that is 0 or infinite gives itself, whatever the value is but nan.
PCE_FUNCTION double times(double weight, double value) {
    return (weight == 0.0 || !finite(weight)) && value == value ? weight : weight * value;
}

// weight z - weighted 2^exponent, `times` if z is infinite; digits cancel if all logits are far from 0.
PCE_FUNCTION double gap_of(const Pair &weight, const Logit &logit, const Pair &weighted, int64_t exponent) {
    if (!finite(logit.z)) return times(weight.high, logit.z);
    int64_t unit = unit_of(logit.z);
    Pair z = scaled({logit.z, logit.low}, -unit), w = scaled(weighted, exponent - unit);
    Pair product = two_product(weight.high, z.high);
    double error = product.low + (weight.high * z.low + weight.low * z.high);
    Pair s = two_sum(product.high, -w.high);
    return scaled(s.high + (s.low + (error - w.low)), unit);
}

// The softmax of a row, from its merged state; nan for a row with a nan, a +inf or no class.
struct RowSoftmax {
    // The columns of `ROW_SOFTMAX` in interface.py.
    double held_nll, held_probability, held_minus_one, normalizer;
    int64_t exponent;
    double logsumexp, weight, weighted_nll, entropy, target_log_prob, held_z, odds, top, most, held, held_weight;
    int64_t argmax;
    double held_slope;

    template <class Precision>
    static PCE_FUNCTION RowSoftmax of(const State &state, const Call &call, const Sum &class_weights) {
        const Transform &transform = call.transform;
        RowSoftmax row = {};
        bool largest = call.has(HOLD_LARGEST);
        double inf = infinity(), held = state.held, top = largest ? state.held : state.top;
        row.held = held;
        row.held_weight = state.held_weight;
        row.argmax = call.has(ARGMAX) ? state.argmax : 0;
        row.top = top;
        row.most = held > top ? held : top;
        bool bad = top != top || !(held < inf) || (top == -inf && held == -inf), none = held == -inf;
        Margined target = {{}, 1.0};
        if (transform.has_margin()) target = Margined::of(held, transform);
        row.held_slope = target.slope;
        Logit held_z = Logit::of(held, transform.has_margin() ? target.z : transformed(held, transform));
        Logit top_z = Logit::of(top, transformed(top, transform));
        int64_t grid = grid_of<Precision>(top, transform), unit;
        if (transform.has_margin()) held = held_z.z, top = top_z.z;  // whose order is not that of the logits
        Pair sum = value_of(state.sum.limbs, Precision::WIDTH);
        if (largest) {
            int64_t depth = state.sum.grid == NO_SUM ? FORGOTTEN : grid - state.sum.grid;
            grid -= depth < FORGOTTEN ? depth : FORGOTTEN;
        }
        unit = Precision::WIDTH * (grid - 2);
        double s = sum.high;
        // If one of two different logits is huge, only the larger counts.
        bool apart = (held_z.huge || top_z.huge) && held != top && s > 0.0 && !none;
        bool held_alone = apart && held > top, others_alone = apart && held < top;
        if (held_alone) s = 0.0;
        double quotient = s / held_z.e;
        double odds = bad ? not_a_number() : others_alone || none ? inf : scaled(quotient, unit - held_z.n);
        int64_t larger_n = top_z.n > held_z.n ? top_z.n : held_z.n;
        row.exponent = s > 0.0 ? (none || others_alone ? top_z.n : larger_n) : held_z.n;
        double e = none || others_alone ? 0.0 : scaled(held_z.e, held_z.n - row.exponent);
        double others = scaled(s, unit - row.exponent);
        row.normalizer = bad ? not_a_number() : held_alone ? 0.0 : 1.0 / (others + e);
        double total = (others + e) / top_z.e, nll;
        double above = log(total > 0.0 ? total : 1.0) + times_log2(row.exponent - top_z.n);
        if (others_alone) {
            int64_t from = top_z.huge ? top_z.n : 0;
            nll = ((top_z.huge ? top_z.z : 0.0) + (times_log2(unit - from) + log(s > 0.0 ? s : 1.0))) - held_z.z;
        } else if (odds > 0x1p60) {
            double d = double(unit - held_z.n);
            nll = d * HI + (log(quotient > 0.0 ? quotient : 1.0) + d * LO);
        } else {
            nll = log1p(odds);
        }
        row.held_nll = bad ? not_a_number() : none ? inf : nll;
        row.held_z = held_z.z;
        row.odds = odds;
        row.held_probability = 1.0 / (1.0 + odds);
        double inverse = 1.0 / odds;
        bool likely = odds <= 1.0;  // no branch, which would be taken at random
        row.held_minus_one = (likely ? -odds : -1.0) / (1.0 + (likely ? odds : inverse));
        double gap = (held_z.z - top_z.z) + (held_z.low - top_z.low);
        double above_top = bad ? not_a_number() : held >= top ? gap + row.held_nll : above;
        row.logsumexp = bad ? not_a_number() : held >= top ? held_z.z + row.held_nll : top_z.z + above;
        if (call.has(WEIGHTED_LOGIT)) {
            double held_weight = call.has(HELD_WEIGHT) ? state.held_weight : 1.0;
            Sum weights = state.weight;
            if (!call.has(WEIGHT)) {
                weights = class_weights;
                if (finite(held_weight) && held_weight != 0.0) {
                    Parts p = split(held_weight);
                    add_limbs(weights.limbs, mantissa(p), p.e - 53 - WIDE * (weights.grid - 2), WIDE, !(p.m < 0.0));
                }
            }
            Pair weight = value_of_wide(weights);
            row.weight = weight.high;
            double away = gap_of(weight, top_z, value_of(state.weighted_logit.limbs, WIDE),
                                 exponent_of_wide(state.weighted_logit));
            double of_held = times(held_weight, row.held_nll);
            row.weighted_nll = (of_held + times(weight.high, above_top)) + away;
            if (weights.grid >= INFINITE || state.weighted_logit.grid >= INFINITE)
                row.weighted_nll = of_held + number_of(state.weighted_logit);
        }
        if (call.has(ENTROPY)) {
            Pair total_sum = scaled(sum, unit - row.exponent);
            double away = gap_of(total_sum, top_z, value_of(state.entropy.limbs, WIDE),
                                 WIDE * (clip(state.entropy.grid, -FARTHEST, FARTHEST) - 2) - row.exponent);
            if (top_z.huge) away = 0.0;  // all that count are equal
            double rest = (times(total_sum.high, row.held_nll) + away) * row.normalizer;
            row.entropy = times(row.held_probability, row.held_nll) + (others == 0.0 ? 0.0 : rest);
        }
        if (call.has(TARGET)) {
            Pair target_z = transformed(state.target, transform);
            double below = (target_z.high - held_z.z) + (target_z.low - held_z.low);
            row.target_log_prob = (below != below ? below : below < 0.0 ? below : 0.0) - row.held_nll;
        }
        return row;
    }
};

}  // namespace pce
