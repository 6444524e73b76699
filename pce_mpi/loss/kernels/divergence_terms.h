// What a divergence of P and Q adds up at a class; `divergence.py` defines it.
//
// Included for NUMBERS, which are double or the vector of an instruction set, with `size_of` and `constant` for them.

// The two probabilities of classes, and r = log(q / p): infinite where one of them is masked, 0 where both are.
struct Classes {
    NUMBERS p, q, r;
};

// A rounding error of z counts only where every device computes it.
PCE_INLINED NUMBERS error_of(NUMBERS z, NUMBERS low) {
    auto computed = size_of(z) < HUGE_LOGIT;
    low = size_of(z) >= 0x1p-500 ? low : constant(0.0);
    return computed ? low : constant(0.0);
}

enum { KL_BY_Q, KL_BY_P };  // the first of `GradientOf` of parameters.py

// Up to this size of r, differences of p and q are computed from r.
constexpr double NEARBY = 0.35;

// q - p
PCE_INLINED NUMBERS difference(const Classes &c) {
    auto near = size_of(c.r) <= NEARBY;
    return near ? c.p * polynomial(near ? c.r : constant(0.0)) : c.q - c.p;
}

// p (exp(r) - 1 - r)
PCE_INLINED NUMBERS kl_term(const Classes &c) {
    auto near = size_of(c.r) <= NEARBY;
    NUMBERS far = (c.q - c.p) - (c.p == 0.0 ? constant(0.0) : c.p * c.r);
    far = c.r == -infinity() ? constant(infinity()) : far;
    return near ? c.p * curved(near ? c.r : constant(0.0)) : far;
}

// p (log(p / q) - constant)
PCE_INLINED NUMBERS kl_by_p(const Classes &c, double less) {
    return c.p == 0.0 ? constant(0.0) : c.p * (-c.r - less);
}

// The smaller and the larger probability, and their ratio less 1.
struct Ratio {
    NUMBERS smaller, larger, t;
};
PCE_INLINED Ratio ratio_of(const Classes &c) {
    auto near = size_of(c.r) <= NEARBY, is_larger = c.q > c.p;
    NUMBERS smaller = is_larger ? c.p : c.q, larger = is_larger ? c.q : c.p;
    NUMBERS ratio = smaller / (larger == 0.0 ? constant(1.0) : larger);
    return {smaller, larger, near ? polynomial(-size_of(near ? c.r : constant(0.0))) : ratio - 1.0};
}

// log(2 / (2 + t)), for t in [-1, 0].
PCE_INLINED NUMBERS log_of_share(NUMBERS t) { return twice_atanh(-t / (4.0 + t)); }

PCE_INLINED auto q_is_larger(const Classes &c) { return size_of(c.r) <= NEARBY ? c.r > 0.0 : c.q > c.p; }

// (p log(p / m) + q log(q / m)) / 2, and q log(q / m) - p log(p / m) - (q - p); the first near 1, by the series of (1 + h) log(1 + h) + (1 - h) log(1 - h).
PCE_INLINED NUMBERS jensen_shannon_term(const Classes &c, NUMBERS &skewness) {
    const Ratio ratio = ratio_of(c);
    NUMBERS share = log_of_share(ratio.t);
    NUMBERS h = ratio.t / (2.0 + ratio.t), w = h * h, bent = constant(1.0 / (11 * 21));
    for (int k = 10; k > 0; k--) bent = bent * w + 1.0 / (k * (2 * k - 1));
    NUMBERS less = ratio.smaller == 0.0 ? constant(0.0) : ratio.smaller * size_of(c.r);
    skewness = difference(c) * (share - 1.0) + (q_is_larger(c) ? less : -less);
    NUMBERS far = (ratio.larger + ratio.smaller) * share - less;
    return size_of(c.r) <= NEARBY ? 0.25 * (ratio.larger + ratio.smaller) * (w * bent) : 0.5 * far;
}

// q (log(q / m) - constant)
PCE_INLINED NUMBERS by_q_beside_mean(const Classes &c, double less) {
    NUMBERS share = log_of_share(ratio_of(c).t);
    share = q_is_larger(c) ? share : share - size_of(c.r);
    return c.q == 0.0 ? constant(0.0) : c.q * (share - less);
}

// The gradient of a divergence at a class, but for the slope; `of` is `GradientOf`.
PCE_INLINED NUMBERS divergence_gradient(const Classes &c, int of, double less) {
    if (of == KL_BY_Q) return difference(c);
    return of == KL_BY_P ? kl_by_p(c, less) : by_q_beside_mean(c, less);
}
