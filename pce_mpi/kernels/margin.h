// The z of a target with a margin, and its derivative, for C++ and CUDA; `margin.py` defines them.
#pragma once

#include "arithmetic.h"

namespace pce {

// Numbers to some 100 bits

PCE_FUNCTION double root(double v) {
#ifdef __CUDACC__
    return __dsqrt_rn(v);
#else
    return __builtin_sqrt(v);
#endif
}

PCE_FUNCTION Pair negative(const Pair &a) { return {-a.high, -a.low}; }

PCE_FUNCTION Pair sum(const Pair &a, const Pair &b) {
    Pair s = two_sum(a.high, b.high);
    return two_sum(s.high, s.low + (a.low + b.low));
}

PCE_FUNCTION Pair product(const Pair &a, const Pair &b) {
    Pair p = two_product(a.high, b.high);
    return two_sum(p.high, p.low + (a.high * b.low + a.low * b.high));
}

PCE_FUNCTION Pair quotient(const Pair &a, double d) {
    double q = a.high / d;
    Pair p = two_product(q, d);
    return two_sum(q, (((a.high - p.high) - p.low) + a.low) / d);
}

PCE_FUNCTION Pair root(const Pair &a) {
    if (!(a.high > 0.0)) return {0.0, 0.0};
    double r = root(a.high);
    Pair p = two_product(r, r);
    return two_sum(r, (((a.high - p.high) - p.low) + a.low) / (r + r));
}

struct SineCosine {
    Pair sine, cosine;

    // By their series at f = angle - k pi / 2.
    static PCE_FUNCTION SineCosine of(const Pair &angle) {
        double k = rounded(angle.high * 0x1.45f306dc9c883p-1), s = 1.0, c = 1.0;
        Pair f = sum(angle, negative(product({k, 0.0}, {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54})));
        Pair w = product(f, f), one = {1.0, 0.0};
        for (int j = 12; j > 7; j--) {  // float64 suffices for terms this small
            s = 1.0 - s * w.high / (2 * j * (2 * j + 1));
            c = 1.0 - c * w.high / (2 * j * (2 * j - 1));
        }
        Pair sine = {s, 0.0}, cosine = {c, 0.0};
        for (int j = 7; j > 0; j--) {
            sine = sum(one, quotient(product(sine, w), -2 * j * (2 * j + 1)));
            cosine = sum(one, quotient(product(cosine, w), -2 * j * (2 * j - 1)));
        }
        SineCosine found = {product(f, sine), cosine};
        int64_t turns = int64_t(k);
        if (turns & 1) found = {found.cosine, negative(found.sine)};
        return turns & 2 ? SineCosine{negative(found.sine), negative(found.cosine)} : found;
    }
};

// sin(angle - t) of an angle with this sine and cosine.
PCE_FUNCTION Pair sine_beyond(double t, const Pair &sine, double cosine) {
    SineCosine at = SineCosine::of({t, 0.0});
    return sum(product(sine, at.cosine), negative(product({cosine, 0.0}, at.sine)));
}

PCE_FUNCTION Pair arccos(double x, const Pair &sine) {
    double u = 1.0 - magnitude(x), t = root(u + u) * (1.0 + u * (1.0 / 12.0 + u * (3.0 / 160.0)));
    if (x < 0.0) t = 0x1.921fb54442d18p+1 - t;
    double y = sine_beyond(t, sine, x).high;
    t = t + (y + y * y * y / 6.0);
    return sum({t, 0.0}, sine_beyond(t, sine, x));
}

// z of a target, and the derivative of z / scale by its x.
struct Margined {
    Pair z;
    double slope;

    static PCE_FUNCTION Margined of(double x, const Transform &transform) {
        double m1 = transform.m1, m2 = transform.m2, slope = 1.0;
        Pair cosine = {x, 0.0};
        if (m1 != 1.0 || m2 != 0.0) {
            double c = x >= -1.0 ? x < 1.0 ? x : 1.0 : -1.0;
            Pair sine = root(product(two_sum(1.0, c), two_sum(1.0, -c)));
            SineCosine at = SineCosine::of(sum(product({m1, 0.0}, arccos(c, sine)), {m2, 0.0}));
            cosine = at.cosine;
            if (sine.high > 0.0)
                slope = m1 * at.sine.high / sine.high;
            else
                slope = m2 == 0.0 && (c > 0.0 || m1 == rounded(m1)) ? (m1 * m1) * (cosine.high * c) : 0.0;
        }
        Pair z = product({transform.scale, 0.0}, sum(cosine, {-transform.m3, 0.0}));
        if (!finite(x)) return {{x, 0.0}, slope};
        return {{z.high, finite(z.low) ? z.low : 0.0}, slope};
    }
};

}  // namespace pce
