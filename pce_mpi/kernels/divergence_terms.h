// What a divergence of P and Q adds up at a class; `divergence.py` defines it.
//
// Included for NUMBERS, which are double or the vector of an instruction set, with `size_of`, `constant`, `any_less`, and
// `power_of`, 2^k of k + MAGIC, for them.

// The probabilities of classes, and r = log(q / p): infinite where one of them is masked, 0 where both are. If some of
// them are `far` there is q, else it is p exp(r). With `single` polynomials are those of `Short`.
struct Classes {
    NUMBERS p, q, r;
    bool far, single;
};

// r of two z, which may have a common offset of any size; `low` is the difference of their rounding errors. With
// `single` the rounding error of their difference counts from this size of it on.
constexpr double APART = 1024.0;
PCE_INLINED NUMBERS log_of_ratio(NUMBERS z_q, NUMBERS z_p, NUMBERS low, const Difference &of_row, bool single) {
    NUMBERS d = z_q - z_p, error = constant(0.0);
    if (!single || any_less(constant(APART), size_of(d))) {
        NUMBERS v = d - z_q;
        error = (z_q - (d - v)) - (z_p + v);
        error = (error == error ? error : constant(0.0)) - of_row.error;  // a nan if one is masked
        if (single) error = size_of(d) > APART ? error : constant(0.0);
    }
    NUMBERS r = ((d - of_row.delta) + error) + (low - of_row.rest);
    return r == r ? r : constant(0.0);  // a nan if both are
}

// A rounding error of z counts only where every device computes it.
PCE_INLINED NUMBERS error_of(NUMBERS z, NUMBERS low) {
    auto computed = size_of(z) < HUGE_LOGIT;
    low = size_of(z) >= 0x1p-500 ? low : constant(0.0);
    return computed ? low : constant(0.0);
}

enum { KL_BY_Q, KL_BY_P };  // the first of `GradientOf` of interface.py

// Up to this size of r, q is p exp(r), which loses as many of its last digits as r has before the point.
constexpr double FAR = 4.0, FURTHEST = 44.0;
PCE_INLINED double far_from(bool single) { return single ? FURTHEST : FAR; }

// exp(r), exp(r) - 1 and exp(r) - 1 - r, of an r cut to FURTHEST; and 0 where r is up to log 2 / 2.
struct Growth {
    NUMBERS exp, less_one, curve, near;
};
PCE_INLINED Growth growth_of(const Classes &c) {
    NUMBERS r = c.r;
    if (c.far) {
        NUMBERS bound = r > 0.0 ? constant(FURTHEST) : constant(-FURTHEST);
        r = size_of(r) <= FURTHEST ? r : bound;
    }
    NUMBERS shifted = r * LOG2E + MAGIC, k = shifted - MAGIC, f = (r - k * HI) - k * LO;
    NUMBERS curve = c.single ? short_curved(f) : curved(f), scale = power_of(shifted);
    NUMBERS t = scale * (curve + f), less_one = t + (scale - 1.0);
    return {t + scale, less_one, k == 0.0 ? curve : less_one - r, k};
}

// q - p
PCE_INLINED NUMBERS difference(const Classes &c, const Growth &growth) {
    NUMBERS near = c.p * growth.less_one;
    if (!c.far) return near;
    return size_of(c.r) <= far_from(c.single) ? near : c.q - c.p;
}

// p (exp(r) - 1 - r)
PCE_INLINED NUMBERS kl_term(const Classes &c, const Growth &growth) {
    NUMBERS near = c.p * growth.curve;
    if (!c.far) return near;
    NUMBERS far = (c.q - c.p) - (c.p == 0.0 ? constant(0.0) : c.p * c.r);
    far = c.r == -infinity() ? constant(infinity()) : far;
    return size_of(c.r) <= far_from(c.single) ? near : far;
}

// p (log(p / q) - constant)
PCE_INLINED NUMBERS kl_by_p(const Classes &c, double less) {
    return c.p == 0.0 ? constant(0.0) : c.p * (-c.r - less);
}

// q
PCE_INLINED NUMBERS other(const Classes &c, const Growth &growth) {
    NUMBERS near = c.p * growth.exp;
    if (!c.far) return near;
    return size_of(c.r) <= far_from(c.single) ? near : c.q;
}

// The log of m by the larger of its summands, and whether that is of q, from 2 artanh of `z`; or from that of `near`.
struct Share {
    NUMBERS z, tail, log;
    decltype(NUMBERS{} < NUMBERS{}) q_leads;
};
// log of m / q
PCE_INLINED NUMBERS log_by_q(const Share &share, const Mean &mean, NUMBERS r) {
    return share.q_leads ? mean.log_q + share.log : (mean.log_p + share.log) - r;
}
PCE_INLINED Share share_of(const Classes &c, const Mean &mean, NUMBERS q, NUMBERS near,
                              decltype(NUMBERS{} < NUMBERS{}) is_close) {
    NUMBERS a = mean.p * c.p, b = mean.q * q;
    auto q_leads = a < b;
    NUMBERS larger = q_leads ? b : a, smaller = q_leads ? a : b, y = larger == 0.0 ? constant(0.0) : smaller / larger;
    NUMBERS z = is_close ? near : y / (2.0 + y), tail = c.single ? short_atanh_tail(z) : atanh_tail(z);
    return {z, tail, tail + (z + z), q_leads};
}

// a p log(p / m) + b q log(q / m), near 1 by psi; and the skewness
PCE_INLINED NUMBERS jensen_shannon_term(const Classes &c, const Growth &growth, const Mean &mean, NUMBERS &skewness) {
    NUMBERS q = other(c, growth), u = growth.less_one, x = mean.q * u;
    auto is_close = size_of(c.r) <= 1.0;
    const Share share = share_of(c, mean, q, x / (2.0 + x), is_close);
    NUMBERS psi = u * c.r - growth.curve;
    NUMBERS term = c.p * (mean.q * psi - (share.tail + share.z * share.log) * (1.0 + 0.5 * x));
    NUMBERS near = c.p * (psi - u * share.log);
    NUMBERS log_by_p = share.q_leads ? (mean.log_q + share.log) + c.r : mean.log_p + share.log;
    NUMBERS of_p = c.p == 0.0 ? constant(0.0) : c.p * log_by_p;
    NUMBERS of_q = q == 0.0 ? constant(0.0) : q * log_by_q(share, mean, c.r);
    skewness = mean.q * (is_close ? near : (of_p - of_q) - difference(c, growth));
    term = is_close ? term : -(mean.p * of_p + mean.q * of_q);
    term = term > 0.0 ? term : constant(0.0);
    skewness = skewness - ((mean.p - mean.q) / mean.p) * term;
    return term;
}

// q (log(q / m) - constant)
PCE_INLINED NUMBERS by_q_beside_mean(const Classes &c, const Growth &growth, const Mean &mean, double less) {
    NUMBERS q = other(c, growth), u = growth.less_one;
    const Share share = share_of(c, mean, q, -(mean.p * u) / (2.0 + (1.0 + mean.q) * u), growth.near == 0.0);
    NUMBERS log = growth.near == 0.0 ? share.log : log_by_q(share, mean, c.r);
    return q == 0.0 ? constant(0.0) : q * (-log - less);
}

// The gradient of a divergence at a class, but for the slope; `of` is `GradientOf`.
PCE_INLINED NUMBERS divergence_gradient(const Classes &c, int of, const Mean &mean, double less) {
    if (of == KL_BY_P) return kl_by_p(c, less);
    const Growth growth = growth_of(c);
    return of == KL_BY_Q ? difference(c, growth) : by_q_beside_mean(c, growth, mean, less);
}
