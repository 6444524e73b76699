// What follows from the merged states of rows on the CPU: their losses, and the rows of their gradients. All is computed
// from the states, which are small, wherever it is needed. `plain.h` does it for losses without options.
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

    // Call `each` with the place of each of some rows, its softmax, and the fields of its state.
    template <class Each> void softmax(long first, long count, Each each) const {
        wide ? softmax_in<Double>(first, count, each) : softmax_in<Single>(first, count, each);
    }

  private:
    template <class Precision, class Each> void softmax_in(long first, long count, Each each) const {
        const long words = words_of(call.fields);
        for (long r = 0; r < count; r++) {
            State state = State::load<Precision>(states + (first + r) * words, call);
            each(r, RowSoftmax::of<Precision>(state, call, class_weights), call.fields);
        }
    }
};

// Fill the statistics of rows, five arrays one after the other, and their largest classes.
inline void fill_statistics(const Merged &merged, const bool *valid, double *statistics, int64_t *argmax) {
    const long rows = merged.rows;
    merged.softmax(0, rows, [&](long r, const RowSoftmax &row, int) {
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
        merged.softmax(first, count, [&](long r, const RowSoftmax &row, int fields) {
            const long place = first + r;
            double slope = scale * (valid[place] ? upstream[place] / divisor : 0.0);
            int64_t column = columns ? columns[place] : -1;
            new (&rows[r]) RowGradient(gradient_row(row, fields, valid[place], column, slope, terms));
        });
    }
};

}  // namespace pce
