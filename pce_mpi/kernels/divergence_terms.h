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

enum { KL_BY_Q, KL_BY_P };  // the first of `GradientOf` of parameters.py

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

// log of the larger of p and q by m = (p + q) / 2
PCE_INLINED NUMBERS log_of_share(const Classes &c, const Growth &growth) {
    NUMBERS w = growth.less_one, larger = c.r > 0.0 ? 3.0 * w : w;
    NUMBERS z = size_of(w) / (4.0 + larger);
    return c.single ? short_twice_atanh(z) : twice_atanh(z);
}

// (p log(p / m) + q log(q / m)) / 2, and q log(q / m) - p log(p / m) - (q - p); the first near 1, by the series of (1 + h) log(1 + h) + (1 - h) log(1 - h).
PCE_INLINED NUMBERS jensen_shannon_term(const Classes &c, const Growth &growth, NUMBERS &skewness) {
    NUMBERS share = log_of_share(c, growth), q = other(c, growth), sum = c.p + q;
    NUMBERS h = growth.less_one / (2.0 + growth.less_one), w = h * h, bent = constant(c.single ? 0x1.7f02e324522d1p-6 : 1.0 / (11 * 21));
    if (c.single)
        bent = (((bent * w + 0x1.245333dc00d92p-5) * w + 0x1.111166619be70p-4) * w + 0x1.5555552d0f56ap-3) * w +
               0x1.0000000000c25p+0;
    else
        for (int k = 10; k > 0; k--) bent = bent * w + 1.0 / (k * (2 * k - 1));
    NUMBERS smaller = c.r > 0.0 ? c.p : q, less = smaller == 0.0 ? constant(0.0) : smaller * size_of(c.r);
    skewness = difference(c, growth) * (share - 1.0) + (c.r > 0.0 ? less : -less);
    return growth.near == 0.0 ? 0.25 * sum * (w * bent) : 0.5 * (sum * share - less);
}

// q (log(q / m) - constant)
PCE_INLINED NUMBERS by_q_beside_mean(const Classes &c, const Growth &growth, double less) {
    NUMBERS share = log_of_share(c, growth), q = other(c, growth);
    share = c.r > 0.0 ? share : share - size_of(c.r);
    return q == 0.0 ? constant(0.0) : q * (share - less);
}

// The gradient of a divergence at a class, but for the slope; `of` is `GradientOf`.
PCE_INLINED NUMBERS divergence_gradient(const Classes &c, int of, double less) {
    if (of == KL_BY_P) return kl_by_p(c, less);
    const Growth growth = growth_of(c);
    return of == KL_BY_Q ? difference(c, growth) : by_q_beside_mean(c, growth, less);
}
