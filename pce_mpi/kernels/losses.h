// Losses of rows and the rows of their gradients, for C++ and CUDA; `losses.py` defines them.
#pragma once

#include "gradients.h"

namespace pce {

// `LossTerms` in losses.py.
struct LossTerms {
    double smoothing, share, z_loss;

    // True without the terms that are options.
    PCE_FUNCTION bool is_plain() const { return smoothing == 0.0 && share == 0.0 && z_loss == 0.0; }
};

// The loss of a row, and its weight in a mean.
struct RowLoss {
    double loss, weight;

    static PCE_FUNCTION RowLoss of(const RowSoftmax &row, int fields, bool valid, const LossTerms &terms) {
        if (!valid) return {0.0, 0.0};
        double loss = row.weighted_nll, weight = 1.0;
        if (!(fields & HOLD_LARGEST)) {
            if (fields & HELD_WEIGHT) weight = row.held_weight;
            loss = times((1.0 - terms.smoothing) * weight, row.held_nll);
            if (fields & WEIGHTED_LOGIT) loss = loss + terms.share * row.weighted_nll;
        }
        if (terms.z_loss != 0.0) loss = loss + terms.z_loss * row.logsumexp * row.logsumexp;
        return {loss == loss ? loss : not_a_number(), weight};
    }
};

// `slope` is the gradient of the row's loss times the derivative of z by the logits, without that of a softcap or a
// margin.
PCE_FUNCTION RowGradient gradient_row(const RowSoftmax &row, int fields, bool valid, int64_t column, double slope,
                                      const LossTerms &terms) {
    bool probabilities = fields & HOLD_LARGEST;
    double share = probabilities ? 1.0 : terms.share, held = fields & HELD_WEIGHT ? row.held_weight : 1.0;
    if (!probabilities) {
        double of_target = (1.0 - terms.smoothing) * held;  // nan for smoothing 1 of an infinite weight
        held = of_target == of_target ? (1.0 - terms.smoothing + share) * held : of_target;
    }
    double others = fields & WEIGHTED_LOGIT ? share * row.weight : 0.0;
    double common = terms.z_loss != 0.0 ? 2.0 * terms.z_loss * row.logsumexp : 0.0;
    double total = held + others + common;
    double at_held = held * row.held_minus_one + (others + common) * row.held_probability;
    if (!finite(total)) at_held = total * row.held_probability - held;  // the others have no sum of their own
    double factor = slope * total * row.normalizer;
    at_held = slope * (at_held * row.held_slope);
    return {row.exponent,    column, valid, row.top, row.most, factor, slope * share, at_held, row.held,
            row.held_weight, 0.0,    0.0,   0.0,     -1,       0.0};
}

// Every nan gets the same bits, on every rank.
PCE_FUNCTION double one_nan(double v) { return v == v ? v : not_a_number(); }

// The statistics of a row: `ClassStatistics` in loss/statistics.py, but for `argmax`.
struct RowStatistics {
    double max, sum_exp, logsumexp, log_prob, entropy;

    static PCE_FUNCTION RowStatistics of(const RowSoftmax &row, bool valid) {
        return {one_nan(row.held_z), one_nan(1.0 + row.odds), one_nan(row.logsumexp),
                one_nan(valid ? row.target_log_prob : 0.0), one_nan(row.entropy)};
    }
};

// The gradient of the statistics of a row, from those of three of them. `target`, a column of this shard or none, means
// nothing if there are no targets.
PCE_FUNCTION RowGradient statistics_gradient_row(const RowSoftmax &row, int64_t target, bool has_target,
                                                 int64_t class_start, int64_t classes, double scale, double log_prob,
                                                 double entropy, double logsumexp) {
    int64_t column = row.argmax - class_start;  // of the class held apart
    bool is_held = has_target && target == column;
    double common = logsumexp - entropy * (row.entropy - row.held_nll);
    double held = common * row.held_probability - log_prob * (is_held ? row.held_minus_one : row.held_probability);
    RowGradient gradient = {};
    gradient.exponent = row.exponent;
    gradient.column = column >= 0 && column < classes ? column : -1;
    gradient.valid = log_prob != 0.0 || entropy != 0.0 || logsumexp != 0.0;  // else 0, whatever the logits are
    gradient.top = row.top;
    gradient.most = row.most;
    gradient.factor = scale * row.normalizer;
    gradient.held_gradient = scale * held;
    gradient.constant = common - log_prob;
    gradient.slope = -entropy;
    gradient.origin = row.held;
    gradient.target = !has_target || is_held ? -1 : target;
    gradient.target_gradient = scale * log_prob;
    return gradient;
}

// The loss of a call, and the divisor of its gradient, from the sums of the rows' losses and weights. A mean over rows
// whose weights sum to 0 is nan, and so is its gradient.
struct Loss {
    double value, divisor;

    static PCE_FUNCTION Loss of(const Sum *sums, bool mean) {
        double weights = number_of(sums[1]), divisor = !mean ? 1.0 : weights == 0.0 ? not_a_number() : weights;
        return {one_nan(number_of(sums[0]) / divisor), divisor};
    }
};

}  // namespace pce
