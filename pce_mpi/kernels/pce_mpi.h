// The arithmetic of the loss for programs in C++ and CUDA: `pce_mpi.get_include()` names the folder of this file.
//
// Every function here is inline and works on one row, in `Single` for logits of up to 32 bits or in `Double` for others.
// docs/the-bits.md specifies the bits. Compile for C++17 without contraction (-ffp-contract=off; nvcc: -fmad=false)
// and without fast math. A rank or a block of threads has the state of its classes; `merge` makes those of all of
// them, in any order, to the same bits; `RowSoftmax`, `RowLoss` and `gradient_row` follow from that.
#pragma once

#include "losses.h"

namespace pce {

// The state of one class of a row, for a loss of class numbers.
template <class Precision> PCE_FUNCTION State state_of_class(double x, bool is_target, const Call &call) {
    State state = State::identity();
    if (is_target) {
        state.held = canonical(x);
    } else {
        state.top = x < infinity() ? canonical(x) : not_a_number();
        add_class<Precision>(state, x, 1.0, call);
    }
    return state;
}

// The state of `count` consecutive classes, of which `column` is the target, if it is among them.
template <class Precision, class T>
PCE_FUNCTION State state_of_classes(const T *logits, int64_t count, int64_t column, const Call &call) {
    State state = State::identity();
    for (int64_t c = 0; c < count; c++) {
        State one = state_of_class<Precision>(double(logits[c]), c == column, call);
        merge<Precision>(state, one, call);
    }
    return state;
}

// The gradient of a class, from that of its row.
template <class Precision>
PCE_FUNCTION typename Precision::Number gradient_of_class(double x, bool is_target, const RowGradient &row,
                                                           const Call &call) {
    typename Precision::Number value = 0;
    if (!row.valid) return value;
    if (!is_target) return gradient_of<Precision>(x, 1.0, RowFactor::of(row, call.transform), call);
    double slope = call.transform.softcap != 0.0 ? softcap_slope(x, call.transform) : 1.0;
    assign(value, one_nan(row.held_gradient * slope));
    return value;
}

}  // namespace pce
