// What follows from the merged states of rows on the CPU: their losses, and the rows of their gradients.
//
// All is computed from the states, which are small, wherever it is needed. A processor works on several rows at a time
// if what it does for each is short: so a plain loss has functions that the compiler cuts down to what it needs, and
// logarithms, which are long chains, a loop of their own.
#pragma once

#include <new>

#include "losses.h"

#define FLAT __attribute__((flatten))

namespace pce {

// A call; that of a plain loss, if it is one, is known to the compiler.
template <bool plain> inline Call known(const Call &call) { return plain ? Call{0, {1.0, 0.0}} : call; }

template <class Precision, bool plain> void merge_rows(const uint64_t *a, uint64_t *b, long rows, const Call &given) {
    const Call call = known<plain>(given);
    const long words = words_of(call.fields);
    for (long r = 0; r < rows; r++, a += words, b += words) {
        State union_of = State::load<Precision>(a, call), other = State::load<Precision>(b, call);
        merge<Precision>(union_of, other, call);
        union_of.store<Precision>(b, call);
    }
}
template <class Precision> FLAT void merge_plain_rows(const uint64_t *a, uint64_t *b, long rows, const Call &call) {
    merge_rows<Precision, true>(a, b, rows, call);
}

// Merge the states `a` into the states `b`.
inline void merge_rows(const uint64_t *a, uint64_t *b, long rows, const Call &call, bool wide) {
    auto merge = call.is_plain() ? wide ? merge_plain_rows<Double> : merge_plain_rows<Single>
                                 : wide ? merge_rows<Double, false> : merge_rows<Single, false>;
    merge(a, b, rows, call);
}

struct Merged {
    const uint64_t *states;
    long rows;
    Call call;
    bool wide;  // in float64
    Sum class_weights;

    // True for a loss without options.
    bool is_plain(const LossTerms &terms) const { return call.is_plain() && terms.is_plain(); }

    // Call `each` with the place of each of some rows, its softmax, which is without logarithms if `plain`, as only
    // calls may be that are, and the fields of its state.
    template <bool plain, class Each> void softmax(long first, long count, Each each) const {
        if constexpr (plain)
            wide ? plain_softmax<Double>(first, count, each) : plain_softmax<Single>(first, count, each);
        else
            wide ? softmax_in<Double, false>(first, count, each) : softmax_in<Single, false>(first, count, each);
    }

  private:
    template <class Precision, bool plain, class Each> void softmax_in(long first, long count, Each each) const {
        const Call of_call = known<plain>(call);
        const long words = words_of(of_call.fields);
        for (long r = 0; r < count; r++) {
            State state = State::load<Precision>(states + (first + r) * words, of_call);
            each(r, RowSoftmax::of<Precision, !plain>(state, of_call, class_weights), of_call.fields);
        }
    }
    template <class Precision, class Each> FLAT void plain_softmax(long first, long count, Each each) const {
        softmax_in<Precision, true>(first, count, each);
    }
};

enum { ROW_BLOCK = 64 };

// Fill the losses of rows and their weights.
inline void fill_losses(const Merged &merged, const bool *valid, const LossTerms &terms, double *losses,
                        double *weights) {
    const bool plain = merged.is_plain(terms);
    for (long first = 0, count; first < merged.rows; first += count) {
        count = merged.rows - first < ROW_BLOCK ? merged.rows - first : long(ROW_BLOCK);
        auto fill = [&](long r, const RowSoftmax &row, int fields) {
            RowLoss loss = RowLoss::of(row, fields, valid[first + r], terms);
            losses[first + r] = loss.loss;
            weights[first + r] = loss.weight;
        };
        if (!plain) {
            merged.softmax<false>(first, count, fill);
            continue;
        }
        RowSoftmax row = {};
        double odds[ROW_BLOCK], nll[ROW_BLOCK];
        merged.softmax<true>(first, count, [&](long r, const RowSoftmax &softmax, int) { odds[r] = softmax.odds; });
        for (long r = 0; r < count; r++) nll[r] = log1p(odds[r]);
        for (long r = 0; r < count; r++) {
            row.held_nll = nll[r];
            if (odds[r] <= 0x1p60)
                fill(r, row, 0);
            else
                merged.softmax<false>(first + r, 1, [&](long, const RowSoftmax &other, int) { fill(r, other, 0); });
        }
    }
}

// Fill the statistics of rows, five arrays one after the other, and their largest classes.
inline void fill_statistics(const Merged &merged, const bool *valid, double *statistics, int64_t *argmax) {
    const long rows = merged.rows;
    merged.softmax<false>(0, rows, [&](long r, const RowSoftmax &row, int) {
        RowStatistics found = RowStatistics::of(row, valid[r]);
        double each[] = {found.max, found.sum_exp, found.logsumexp, found.log_prob, found.entropy};
        for (long k = 0; k < 5; k++) statistics[k * rows + r] = each[k];
        argmax[r] = row.argmax;
    });
}

// A gradient from above: one number, or one for each row.
struct Upstream {
    const double *numbers;
    bool one;

    double operator[](long row) const { return numbers[one ? 0 : row]; }
};

// The rows of a gradient, from what `row_gradients` of losses.py takes.
struct GradientRows {
    Merged merged;
    const bool *valid;
    const int64_t *columns;  // may be absent
    Upstream upstream;
    double divisor, scale;
    LossTerms terms;

    void fill(long first, long count, RowGradient *rows) const {
        auto each = [&](long r, const RowSoftmax &row, int fields) {
            const long place = first + r;
            double slope = scale * (valid[place] ? upstream[place] / divisor : 0.0);
            int64_t column = columns ? columns[place] : -1;
            new (&rows[r]) RowGradient(gradient_row(row, fields, valid[place], column, slope, terms));
        };
        merged.is_plain(terms) ? merged.softmax<true>(first, count, each) : merged.softmax<false>(first, count, each);
    }
};

}  // namespace pce
