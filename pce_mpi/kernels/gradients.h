// Gradients of logits, for C++ and CUDA; `gradients.py` defines them.
#pragma once

#include "states.h"

namespace pce {

// The columns of `ROW_GRADIENT` in interface.py.
struct RowGradient {
    int64_t exponent, column, valid;  // of the normalizer; of the class held, or -1; 0: the row does not count
    double top, most;                 // the logit that only counts if it is huge; the largest logit
    double factor, weight_factor;
    double held_gradient;
    double held, held_weight;  // with probabilities every class with this logit and weight is held
    double constant, slope, origin;  // of statistics; the origin is a logit
    int64_t target;                  // the class to which `target_gradient` is added, or -1
    double target_gradient;
};

// The factors of a row's gradient: factor = (high + low) 2^k = m 2^k, and `exponent` is k less that of the normalizer.
struct RowFactor {
    double factor, m, weight_factor, top, constant, slope;
    Pair origin;
    float high, low;
    int64_t exponent;
    bool huge;

    static PCE_INLINED RowFactor of(const RowGradient &gradient, const Transform &transform) {
        RowFactor row = {};
        row.factor = gradient.factor + 0.0;  // never -0.0, whose products depend on the way
        row.weight_factor = gradient.weight_factor;
        row.top = gradient.top;
        row.constant = gradient.constant;
        row.slope = gradient.slope;
        row.origin = transformed(gradient.origin, transform);
        row.huge = is_huge(row.top, transform);
        Parts parts = finite(row.factor) ? split(row.factor) : Parts{row.factor, 0};
        row.m = parts.m + parts.m;
        row.high = narrow(row.m);
        row.low = narrow(row.m - wide(row.high));
        row.exponent = parts.e - 1 - gradient.exponent;
        return row;
    }
};

// The logsumexp of Q less that of P of a row: the difference of their largest z, its rounding error, and all else.
struct Difference {
    double delta, error, rest;
};
// `Mean` of interface.py; both weights are 0 where there is none.
struct Mean {
    double p, q, log_p, log_q;
};

PCE_FUNCTION float gradient_of(const RowFactor &row, const Exponential<float> &e) {
    int64_t n = e.n + row.exponent, near = clip(n, -125, 127);
    float value = sum32(row.high, fma32(row.high, e.t, row.low));
    value = product32(value, narrow(power(near)));
    return product32(value, narrow(power(clip(n - near, -30, 30))));
}

PCE_FUNCTION double gradient_of(const RowFactor &row, const Exponential<double> &e) {
    int64_t n = e.n + row.exponent, near = clip(n, -1020, 1023);
    return (row.m + row.m * e.t) * power(near) * power(clip(n - near, -60, 60));
}

PCE_FUNCTION double number_of(float v) { return wide(v); }
PCE_FUNCTION double number_of(double v) { return v; }
PCE_FUNCTION void assign(float &to, double v) { to = narrow(v); }
PCE_FUNCTION void assign(double &to, double v) { to = v; }

// The gradient of a logit x with the weight u that is not held; for the target of statistics `more` is added.
template <class Precision>
PCE_FUNCTION typename Precision::Number gradient_of(double x, double u, const RowFactor &row, const Call &call,
                                                     double more = 0.0) {
    typename Precision::Number value;
    const bool counts = x != -infinity() && (!row.huge || x == row.top);
    if (!counts || !finite(row.factor))
        assign(value, row.factor * (counts ? 1.0 : 0.0));
    else
        value = gradient_of(row, exponential<Precision>(x, call.transform));
    double result = number_of(value);
    if (call.has(ENTROPY)) {
        Pair z = transformed(x, call.transform);
        double factor = row.constant + row.slope * ((z.high - row.origin.high) + (z.low - row.origin.low));
        result = (result == 0.0 ? 0.0 : result * factor) + more;  // a masked class has 0, and its z is infinite
    }
    if (call.has(WEIGHTED_LOGIT)) result = result - row.weight_factor * u;
    if (call.transform.softcap != 0.0) result = result * softcap_slope(x, call.transform);
    assign(value, result == result ? result : not_a_number());
    return value;
}

}  // namespace pce
