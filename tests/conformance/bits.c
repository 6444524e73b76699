/* The bits of a softmax cross entropy, from the page "The bits" alone: a filter from problems to results. A problem is
 * 8-byte little-endian numbers, i64 (i) or f64 (d):  i rows, classes, shards, double arithmetic?, dtype of the gradient
 *   (0: f64, 1: f32, 2: f16, 3: bf16), reduction (0: none, 1: sum, 2: mean), statistics?, weights?, ignore_index;
 *   d scale, softcap (0: none), smoothing, z_loss;  i split points [shards + 1], order of the merges [shards],
 *   targets [rows];  d logits [rows][classes], weights [classes] (1 without weights), gradients of the losses [rows].
 * Its results are f64: of each row the loss and its gradient [classes]; then the reduced loss; then the states of the
 * rows, of each shard and merged. For statistics there follow, of each row, log_prob, entropy, logsumexp and their
 * gradients [classes] for the gradients 1, 0.5, 0.25; 1, 0, 0 and 0, 0, -2^-1074; then the states. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef int64_t i64; typedef uint64_t u64;
typedef struct { double high, low; } Pair;
typedef struct { i64 grid; u64 limb[3]; } Sum; /* of a wide sum that is not finite the grid is one of the last three */
typedef struct { double t; i64 n; } Exp; /* 2^n (1 + t), or, with a residue f as t, 2^n exp(t) */
typedef struct { Pair z; i64 n; double e; int huge; } View; /* a logit as the end of the loss sees it, in f64 */
typedef struct { double held, top, target, held_weight; i64 argmax; Sum sum, weighted, entropy; } State;
typedef struct { State s; View H, T; Pair G; double nll, p, p1, N, R, logsumexp, rise; i64 E; } Row;
static struct { i64 rows, classes, shards, dbl, dtype, reduction, statistics, weights, ignore;
                double scale, softcap, smoothing, z_loss; } in;
static double *logits, *weight, *dloss;
static i64 *split, *order, *targets;
static int stats, width, point; /* stats: whether the states at hand are those of the statistics */
static const i64 HUGE_N = (i64)1 << 61;
enum { WIDE = 36, DEPTH = 255, INF_GRID = 1 << 14, MINUS_GRID, NAN_GRID };
static const double LOG2E = 0x1.71547652b82fep+0, HI = 0x1.62e42feep-1, LO = 0x1.a39ef35793c76p-33;
static const double LN2 = 0x1.62e42fefa39efp-1, LN2_REST = 0x1.abc9e3b39803fp-56, SQRT_HALF = 0x1.6a09e667f3bcdp-1;
#define EMPTY {-((i64)1 << 60), {0}}
static const State NO_CLASSES = {-INFINITY, -INFINITY, -INFINITY, 0, INT64_MAX, EMPTY, {-INF_GRID, {0}}, EMPTY};
static i64 clamp(i64 v, i64 least, i64 most) { return v < least ? least : v > most ? most : v; }
static i64 floordiv(i64 a, i64 b) { return a / b - (a % b < 0); }
static double two(i64 n) { return ldexp(1, n); }
static double times(double a, double b) { return (a == 0 || isinf(a)) && !isnan(b) ? a : a * b; }
static double single(double v) { return in.dbl ? v : (double)(float)v; }
static int before(double a, double b) { return isnan(a) ? !isnan(b) : a > b; }
static double larger(double a, double b) { return before(a, b) ? a : b; }
static Pair twosum(double a, double b) { double s = a + b, t = s - a; return (Pair){s, (a - (s - t)) + (b - t)}; }
static Pair twoprod(double a, double b) { return (Pair){a * b, fma(a, b, -(a * b))}; }
static double scaled(double v, i64 n) { /* v 2^n; beyond 2400 it is 0 or infinite */
    for (int i = 0; i < 3; i++) v *= two(clamp(n, -800, 800)), n -= clamp(n, -800, 800);
    return v;
}
static Pair scaled_pair(Pair v, i64 n) { return (Pair){scaled(v.high, n), scaled(v.low, n)}; }
static double poly(double f) {
    static const double c[] = {1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320, 1. / 362880,
                               1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800}; /* 1 / 2! to 1 / 13! */
    double f2 = f * f, f4 = f2 * f2, q[3];
    for (int i = 0; i < 3; i++) q[i] = (c[4 * i] + c[4 * i + 1] * f) + (c[4 * i + 2] + c[4 * i + 3] * f) * f2;
    return f2 * ((q[0] + q[1] * f4) + q[2] * (f4 * f4)) + f;
}
static float poly32(float f) {
    float q = fmaf(fmaf(fmaf(fmaf(0x1.6db642p-10f, f, 0x1.123cep-7f), f, 0x1.55545cp-5f), f, 0x1.55548cp-3f), f, 0.5f);
    return fmaf(f * f, q, f);
}
static Exp reduce(Pair v) {
    double z = v.high, k = rint(z * LOG2E);
    if (fabs(z) >= 0x1p60) return (Exp){0, z < 0 ? -HUGE_N : HUGE_N};
    if (fabs(z) <= 0x1p20) return (Exp){((z - k * HI) - k * LO) + v.low, (i64)k};
    Pair p = twoprod(k, LN2);
    double q = (((z - p.high) - p.low) - k * LN2_REST) + v.low, j = rint(q * LOG2E);
    return (Exp){q - j * LN2, (i64)k + (i64)j};
}
static Pair expm(double y) { /* exp(-y) and exp(-y) - 1, for y >= 0 */
    Exp r = reduce((Pair){-y, 0});
    double t = poly(r.t), e = scaled(1 + t, r.n);
    return (Pair){e, r.n ? e - 1 : t};
}
static double tanh_of(double y) { Pair e = expm(2 * fmin(fabs(y), 64)); return copysign(-e.low / (1 + e.high), y); }
static double slope(double x) { /* the derivative of tanh; 4 / (2 * 2) without a softcap */
    double e = in.softcap ? expm(2 * fmin(fabs((in.scale * x) / in.softcap), 400)).high : 1;
    return (4 * e) / ((1 + e) * (1 + e));
}
static double atanh2(double v) {
    double w = v * v, q = 2.0 / 33;
    for (int k = 15; k > 0; k--) q = q * w + 2.0 / (2 * k + 1);
    return v * (w * q) + (v + v);
}
static double log_of(double v) {
    int e; double m = frexp(v, &e);
    if (m < SQRT_HALF) m = m + m, e--;
    return e * HI + (atanh2((m - 1) / (m + 1)) + e * LO);
}
static double log1p_of(double a) {
    Pair s = twosum(1, a);
    return a < 0.4 ? atanh2(a / (2 + a)) : log_of(s.high) + s.low / s.high;
}
static double logtwo(double n) { return n * HI + n * LO; } /* log(2^n); n is rounded to f64 before */
static Pair transform(double x) {
    if (!isfinite(x) || (in.scale == 1 && !in.softcap)) return (Pair){x, 0};
    if (in.softcap) return (Pair){in.softcap * tanh_of((in.scale * x) / in.softcap), 0};
    Pair p = twoprod(in.scale, x);
    return (Pair){p.high, isfinite(p.low) ? p.low : 0};
}
static View view(double x) {
    Exp r = isfinite(x) ? reduce(transform(x)) : (Exp){0, 0};
    return (View){transform(x), r.n, 1 + poly(r.t), r.n == HUGE_N || r.n == -HUGE_N};
}
static Exp seen(double x) { /* a finite logit, as its arithmetic sees it */
    Exp r = reduce(transform(x)); /* in f64, for double and where f32 is not enough */
    float s = (float)in.scale, y = s * (float)x;
    if (in.dbl) return (Exp){poly(r.t), r.n};
    if (in.softcap || s != in.scale || fabsf(y) > 2048) return (Exp){poly32((float)r.t), r.n};
    float k = (float)rint((double)y * 0x1.715476p+0f), g = fmaf((float)x, s, -(k * 0x1.62ep-1f));
    return (Exp){poly32(fmaf(-k, 0x1.0bfbe8p-15f, g)), (i64)k};
}
static i64 grid_of(double x) { return isfinite(x) ? floordiv(seen(x).n, width) : 0; }
static int counts(double x, double top) { /* in a sum of exponentials with this largest logit */
    return isfinite(x) && isfinite(top) && (x == top || !view(top).huge);
}
static void coarsen(Sum *s, i64 grid) { /* the limbs overlap, so this is a move without any carry */
    for (i64 j = 0, d = grid - s->grid; j < 3 && d > 0; j++) s->limb[j] = d < 3 - j ? s->limb[j + d] : 0;
    s->grid = grid > s->grid ? grid : s->grid;
}
static void join(Sum *a, Sum b) { /* modulo 2^64, so that the order of sums makes no difference */
    coarsen(a, b.grid), coarsen(&b, a->grid);
    for (int j = 0; j < 3; j++) a->limb[j] += b.limb[j];
}
static i64 unit(Sum s, int w) { return w * (clamp(s.grid, -((i64)1 << 57), INT64_MAX) - 2); } /* no overflow */
static void add(Sum *s, int w, u64 v, i64 e, i64 sign) { /* v 2^e, on the grid that is there */
    for (i64 j = 0, n = e - unit(*s, w); j < 3; j++, n -= w)
        s->limb[j] += (u64)sign * (n >= 64 || n <= -64 ? 0 : n >= 0 ? v << n : v >> -n);
}
static void join_wide(Sum *a, Sum b) { /* infinities of both signs make a nan */
    int mixed = a->grid >= INF_GRID && b.grid >= INF_GRID && a->grid != b.grid;
    join(a, b), a->grid = mixed ? NAN_GRID : a->grid;
}
static void add_wide(Sum *s, double v, i64 e, int first) { /* v 2^e; the first part decides the grid */
    if (!isfinite(v)) join_wide(s, (Sum){v > 0 ? INF_GRID : v < 0 ? MINUS_GRID : NAN_GRID, {0}}), v = 0;
    int k; u64 digits = (u64)ldexp(fabs(frexp(v, &k)), 53);
    if (first && v != 0) coarsen(s, floordiv(k - 1 + e, WIDE));
    add(s, WIDE, digits, k - 53 + e, v < 0 ? -1 : 1);
}
static Pair value(Sum s, int w) { /* in units of the sum */
    i64 d[] = {(i64)(s.limb[0] - (s.limb[1] << w)), (i64)(s.limb[1] - (s.limb[2] << w)), (i64)s.limb[2]}, sign = 1;
    for (int again = 0; again < 2; again++) {
        for (int j = 0; j < 2; j++) d[j + 1] += floordiv(d[j], (i64)1 << w), d[j] &= ((i64)1 << w) - 1;
        if (d[2] < 0) sign = -1, d[0] = -d[0], d[1] = -d[1], d[2] = -d[2]; /* the first time only */
    }
    Pair r, h = twosum((double)(d[2] >> 32) * two(32 + 2 * w), (double)(d[2] & 0xffffffff) * two(2 * w));
    for (int j = 1; j >= 0; j--) r = twosum(h.high, (double)d[j] * two(w * j)), h = (Pair){r.high, h.low + r.low};
    return twosum(sign * h.high, sign * h.low);
}
static Pair wide_value(Sum s) {
    double kinds[] = {INFINITY, -INFINITY, NAN};
    return s.grid >= INF_GRID ? (Pair){kinds[s.grid - INF_GRID], 0} : scaled_pair(value(s, WIDE), unit(s, WIDE));
}
static int shrunk(Pair *z) { return fabs(z->high) >= 0x1p800 ? *z = scaled_pair(*z, -128), 128 : 0; } /* by 2^-128 */
static void add_weighted(Sum *s, double w, double x) { /* w z */
    Pair z = transform(x);
    int e = shrunk(&z);
    double p = w * z.high, r = fma(w, z.high, -p) + w * z.low;
    if (!isfinite(w)) add_wide(s, w, 0, 1);
    else if (z.high == -INFINITY) add_wide(s, times(w, INFINITY), 0, 1);
    else if (isfinite(z.high)) add_wide(s, isfinite(p) ? p : NAN, e, 1), add_wide(s, isfinite(p) ? r : 0, e, 0);
}
static double largest(State s) { return stats ? s.held : s.top; }
static void add_class(State *s, double x, double w) { /* if it counts: exp(z); for statistics also exp(z) z */
    if (!stats && in.smoothing) add_weighted(&s->weighted, w, x);
    if (!counts(x, largest(*s))) return;
    Exp r = seen(x);
    Pair z = transform(x);
    u64 P = (u64)((i64)trunc(ldexp(r.t, point)) + ((i64)1 << point)), U = in.dbl ? P >> 32 << 32 : P;
    coarsen(&s->sum, floordiv(r.n, width)), add(&s->sum, width, P, r.n - point, 1);
    if (!stats || view(x).huge) return;
    Pair p = twoprod((double)U, z.high), q = twoprod((double)(P - U), z.high);
    double parts[] = {p.high, p.low, q.high, q.low, (double)P * z.low};
    for (int i = 0; i < 5; i++) add_wide(&s->entropy, parts[i], r.n - point, i == 0);
}
static State sent(State s, int print) { /* by way of its bytes, on a little-endian machine */
    int loss = !stats, smooth = loss && in.smoothing;
    int16_t grids[] = {stats ? clamp(grid_of(s.held) - s.sum.grid, 0, DEPTH) : 0, -INF_GRID, s.weighted.grid, 0};
    unsigned char bytes[88], *at = bytes;
    struct { void *value; int size; } f[] = {
        {&s.held, 8}, {&s.top, 8 * loss}, {s.sum.limb, 24}, {grids, 8 * (stats || smooth)}, {&s.argmax, 8 * stats},
        {&s.target, 8 * stats}, {&s.held_weight, 8 * (loss && in.weights)}, {s.weighted.limb, 24 * smooth},
        {&s.entropy.grid, 8 * stats}, {s.entropy.limb, 24 * stats}};
    if (stats && grids[0] == DEPTH) s.sum.limb[0] = s.sum.limb[1] = s.sum.limb[2] = 0;
    for (int i = 0; i < 10; at += f[i++].size) memcpy(at, f[i].value, f[i].size);
    if (print) fwrite(bytes, 1, at - bytes, stdout);
    s = NO_CLASSES, at = bytes;
    for (int i = 0; i < 10; at += f[i++].size) memcpy(f[i].value, at, f[i].size);
    return s.weighted.grid = grids[2], s.sum.grid = grid_of(largest(s)) - (stats ? grids[0] : 0), s;
}
static State shard(i64 row, i64 from, i64 to) { /* what one rank knows of a row; after the rows, of the weights */
    const double *x = logits + row * in.classes;
    State s = NO_CLASSES;
    if (row == in.rows) {
        for (i64 k = from; k < to; k++) add_wide(&s.weighted, weight[k], 0, 1);
        return s;
    }
    i64 target = targets[row] == in.ignore ? -1 : targets[row];
    if (target >= from && target < to) s.target = x[target], s.held_weight = weight[target];
    if (!stats) s.held = s.target, s.argmax = target;
    for (i64 k = from; k < to; k++)
        if (!stats && k != target) s.top = larger(s.top, x[k] == INFINITY ? NAN : x[k]);
        else if (stats && (s.argmax == INT64_MAX || before(x[k], s.held))) s.held = x[k], s.argmax = k;
    for (i64 k = from; k < to; k++)
        if (k != s.argmax) add_class(&s, x[k], weight[k]);
    return s;
}
static State merge(State a, State b) {
    if (stats && (before(b.held, a.held) || (!before(a.held, b.held) && b.argmax < a.argmax))) return merge(b, a);
    State m = {larger(a.held, b.held), larger(a.top, b.top), larger(a.target, b.target), a.held_weight + b.held_weight,
               a.argmax, EMPTY, a.weighted, EMPTY};
    join_wide(&m.weighted, b.weighted);
    if (counts(largest(a), largest(m))) join(&m.sum, a.sum), join(&m.entropy, a.entropy);
    if (counts(largest(b), largest(m))) join(&m.sum, b.sum), join(&m.entropy, b.entropy);
    if (stats) add_class(&m, b.held, 0);
    return m;
}
static State merged(i64 i) { /* of row i, as ranks do it: the states of shards are sent and merged */
    State s = NO_CLASSES;
    for (i64 k = 0, r = *order; k < in.shards; r = order[++k % in.shards])
        s = sent(merge(s, sent(shard(i, split[r], split[r + 1]), 0)), 0);
    return s;
}
static void put_states(void) {
    i64 rows = in.rows + (!stats && in.smoothing && in.weights);
    for (i64 r = 0; r < in.shards; r++)
        for (i64 i = 0; i < rows; i++) sent(shard(i, split[r], split[r + 1]), 1);
    for (i64 i = 0; i < rows; i++) sent(merged(i), 1);
}
static Row finish(i64 i) {
    State s = merged(i);
    double held = s.held, top = largest(s);
    View H = view(held), T = view(top);
    Row r = {s, H, T, value(s.sum, width), NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0};
    i64 u = unit(s.sum, width), d = u - H.n, base = T.huge ? T.n : 0;
    double S = r.G.high;
    int none = held == -INFINITY, alone = (H.huge || T.huge) && held != top && S > 0 && !none, less = held < top;
    if (isnan(top) || isnan(held) || held == INFINITY || (none && top == -INFINITY)) return r; /* nan */
    if (alone && !less) S = 0; /* the class held outweighs them by any factor */
    int without = none || (alone && less); /* the class held has no part in the sum */
    double Q = S / H.e, a = without ? INFINITY : scaled(Q, d), e;
    r.E = without || (S > 0 && T.n > H.n) ? T.n : H.n, e = without ? 0 : scaled(H.e, H.n - r.E);
    r.R = scaled(S, u - r.E), r.G = scaled_pair(r.G, u - r.E), r.N = alone && !less ? 0 : 1 / (r.R + e);
    if (without) r.nll = none ? INFINITY : ((T.huge ? T.z.high : 0) + (logtwo(u - base) + log_of(S))) - H.z.high;
    else r.nll = a > 0x1p60 ? d * HI + (log_of(Q) + d * LO) : log1p_of(a);
    r.p = 1 / (1 + a), r.p1 = a <= 1 ? -a / (1 + a) : -1 / (1 + 1 / a);
    if (less) r.rise = log_of((r.R + e) / T.e) + logtwo(r.E - T.n), r.logsumexp = T.z.high + r.rise;
    else r.rise = ((H.z.high - T.z.high) + (H.z.low - T.z.low)) + r.nll, r.logsumexp = H.z.high + r.nll;
    return r;
}
static double gap(Pair W, Pair z, Sum sum, i64 E) { /* in units of 2^E */
    if (!isfinite(z.high)) return times(W.high, z.high);
    int e = shrunk(&z);
    double p = W.high * z.high, r = fma(W.high, z.high, -p) + (W.high * z.low + W.low * z.high);
    Pair v = scaled_pair(value(sum, WIDE), unit(sum, WIDE) - E - e), s = twosum(p, -v.high);
    return (s.high + (s.low + (r - v.low))) * two(e);
}
static double exponential(double F, double x, const Row *r) { /* F exp(z) 2^-E */
    F += 0.0; /* never -0 */
    if (x == -INFINITY || (r->T.huge && x != largest(r->s))) return F * 0;
    if (!isfinite(F)) return F;
    int k; double m = 2 * frexp(F, &k), t = seen(x).t;
    float high = (float)m, low = (float)(m - high), v = high + fmaf(high, (float)t, low);
    i64 M = seen(x).n + (k - 1) - r->E, a = clamp(M, in.dbl ? -1020 : -125, in.dbl ? 1023 : 127);
    i64 b = clamp(M - a, in.dbl ? -60 : -30, in.dbl ? 60 : 30);
    return in.dbl ? (m + m * t) * two(a) * two(b) : v * (float)two(a) * (float)two(b);
}
static void put(double v) { v = isnan(v) ? NAN : v, fwrite(&v, 8, 1, stdout); } /* there is one nan */
static void put_element(double v) { /* rounded to the dtype of the gradient */
    int e, half = in.dtype == 2;
    v = in.dtype == 1 ? (double)(float)single(v) : single(v), frexp(v, &e);
    e = (int)clamp(e, half ? -13 : -125, 1024) - (half ? 11 : 8);
    if (in.dtype >= 2) v = ldexp(rint(ldexp(v, -e)), e), v *= fabs(v) >= (half ? 0x1p16 : 0x1p128) ? INFINITY : 1;
    put(v);
}
static void losses(void) {
    double s = in.smoothing, share = s / (double)in.classes;
    Sum all = EMPTY, total = EMPTY, sum = EMPTY; /* of the weights of all classes and of the rows; of the losses */
    for (i64 k = 0; k < in.classes; k++) add_wide(&all, weight[k], 0, 1);
    for (i64 i = 0; i < in.rows; i++) add_wide(&total, targets[i] == in.ignore ? 0 : weight[targets[i]], 0, 1);
    double divisor = in.reduction == 2 ? wide_value(total).high : 1;
    if (divisor == 0) divisor = NAN;
    for (i64 i = 0; i < in.rows; i++) {
        int ignored = targets[i] == in.ignore;
        Row r = finish(i);
        double w = ignored ? 0 : in.weights ? r.s.held_weight : 1, loss = times((1 - s) * w, r.nll);
        Sum others = all, logit = r.s.weighted;
        if (isfinite(w)) add_wide(&others, -w, 0, 0);
        Pair W = s ? wide_value(others) : (Pair){0, 0};
        double X = times(w, r.nll) + times(W.high, r.rise);
        X = fmax(logit.grid, all.grid) >= INF_GRID ? times(w, r.nll) + wide_value(logit).high : X + gap(W, r.T.z, logit, 0);
        if (s) loss += share * X;
        if (in.z_loss) loss += (in.z_loss * r.logsumexp) * r.logsumexp;
        loss = ignored ? 0 : loss, add_wide(&sum, loss, 0, 1), put(single(loss));
        double t = (1 - s) * w, h = isnan(t) ? t : (1 - s + share) * w, o = share * W.high, l = in.z_loss ? (2 * in.z_loss) * r.logsumexp : 0;
        double G = in.scale * (dloss[i] / divisor);
        for (i64 k = i * in.classes, j = 0; j < in.classes; k++, j++) {
            double g = exponential((G * ((h + o) + l)) * r.N, logits[k], &r) - (s ? (G * share) * weight[j] : 0);
            if (j == targets[i]) g = G * (isfinite(h + o + l) ? h * r.p1 + (o + l) * r.p : (h + o + l) * r.p - h);
            put_element(ignored ? 0 : g * slope(logits[k]));
        }
    }
    put(single(wide_value(sum).high / divisor)), put_states();
}
static void put_gradient(i64 i, const Row *r, double entropy, double a, double b, double c) { /* of statistics */
    double l = c - b * (entropy - r->nll);
    int none = a == 0 && b == 0 && c == 0;
    for (i64 k = i * in.classes, j = 0; j < in.classes; k++, j++) {
        Pair z = transform(logits[k]), h = r->H.z;
        double q = (l - a) + (-b) * ((z.high - h.high) + (z.low - h.low));
        double g = exponential(in.scale * r->N, logits[k], r);
        int is_target = j == targets[i] && j != in.ignore;
        g = (g == 0 ? 0 : g * q) + (is_target ? in.scale * a : 0);
        if (j == r->s.argmax) g = in.scale * (l * r->p - a * (is_target ? r->p1 : r->p));
        put_element(none ? 0 : g * slope(logits[k]));
    }
}
static void statistics(void) {
    for (i64 i = 0; i < in.rows; i++) {
        Row r = finish(i);
        Pair h = r.H.z, y = transform(r.s.target);
        double d = (y.high - h.high) + (y.low - h.low), a = targets[i] == in.ignore ? 0 : 1;
        double D = r.H.huge ? 0 : gap(r.G, h, r.s.entropy, r.E), O = r.R == 0 ? 0 : (times(r.G.high, r.nll) + D) * r.N;
        double entropy = times(r.p, r.nll) + O;
        put(single(a == 0 ? 0 : (d < 0 || isnan(d) ? d : 0) - r.nll)), put(single(entropy)), put(single(r.logsumexp));
        put_gradient(i, &r, entropy, a, 0.5, 0.25), put_gradient(i, &r, entropy, a, 0, 0);
        put_gradient(i, &r, entropy, 0, 0, -0x1p-1074);
    }
    put_states();
}
static void *numbers(void *v, size_t n) {
    return (v = realloc(v, 8 * n + 8)) && fread(v, 8, n, stdin) == n ? v : (exit(2), NULL);
}
int main(void) {
    while (fread(&in, sizeof in, 1, stdin) == 1) {
        width = in.dbl ? 36 : 21, point = in.dbl ? 62 : 30;
        split = numbers(split, in.shards + 1), order = numbers(order, in.shards), targets = numbers(targets, in.rows);
        logits = numbers(logits, in.rows * in.classes), weight = numbers(weight, in.classes);
        dloss = numbers(dloss, in.rows);
        for (i64 k = 0; k < in.rows * in.classes; k++) logits[k] = isnan(logits[k]) ? NAN : logits[k] + 0.0; /* no -0 */
        for (stats = 0; stats <= in.statistics; stats++) stats ? statistics() : losses();
    }
}
