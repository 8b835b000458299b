/* Linear maps: Y [M, N] = X [M, K] · W + bias, and what a feed-forward layer does to it next. K and N are multiples of 16.

   W is laid out in panels of 16 columns (vector.h), at most DEEP of its rows at a time, so that a panel stays in the
   first cache while TALL rows of X, in the second, pass it six at a time: six by sixteen sums live in registers. */

#include "six.h"

#define DEEP 512                                                       /* rows of W in a panel */

/* C [rows, 16] = start + A [rows, k] · B [k, 16]; start is C itself, a bias (with no stride), or NOTHING. */
static inline void six(int64_t rows, const float *a, int64_t by_a, const float *b, int64_t k, const float *start, int64_t by_start,
                       float *c, int64_t by_c) {
    int64_t last = rows - 1;
    #define BEGIN(i) const float *a##i = a + AT(i) * by_a, *from##i = start + AT(i) * by_start; \
        v8 s##i = *(const v8 *)from##i, t##i = *(const v8 *)(from##i + 8); __builtin_prefetch(c + AT(i) * by_c + 15, 1);
    #define ADD(i) x = all8(a##i[p]); s##i += x * left; t##i += x * right;
    #define END(i) *(v8 *)(c + AT(i) * by_c) = s##i; *(v8 *)(c + AT(i) * by_c + 8) = t##i;
    SIX(BEGIN)
    _Pragma("GCC unroll 4")
    for (int64_t p = 0; p < k; p++, b += 16) {
        v8 left = *(const v8 *)b, right = *(const v8 *)(b + 8), x;
        HELD(left); HELD(right);
        SIX(ADD)
    }
    SIX(END)
}

/* Columns from .. to of six rows are asked for: they are on their way into the second cache while others are worked on. */
static inline void ahead(const float *x, int64_t by_row, int64_t rows, int64_t from, int64_t to) {
    for (int64_t c = from / 16 * 16; c < to; c += 16)
        for (int64_t r = 0; r < HIGH && r < rows; r++) __builtin_prefetch(x + r * by_row + c, 0, 2);
}

/* ---------------------------------------------------------------------------------------- activations, and their slopes */

enum { NONE, RELU, GELU };                                             /* as linear.py numbers them */

/* Φ(x), the share of a normal law below x, within 2e-7; and its density φ(x). (Abramowitz and Stegun, 7.1.26) */
static inline v8 normal8(v8 x, v8 *density) {
    v8 size = (v8)((i8)x & 0x7fffffff), t = 1.0f / (size * 0.231641888f + 1.0f), bell = exp8(x * x * -0.5f);
    v8 p = all8(1.061405429f);
    p = p * t - 1.453152027f; p = p * t + 1.421413741f; p = p * t - 0.284496736f; p = p * t + 0.254829592f;
    v8 tail = p * t * bell * 0.5f;
    i8 above = x > 0;
    *density = bell * 0.398942280f;
    return (v8)(((i8)(1.0f - tail) & above) | ((i8)tail & ~above));
}

static inline v8 acted(int act, v8 z) {
    v8 density;
    return act == RELU ? (v8)((i8)z & ~(z <= 0)) : z * normal8(z, &density);  /* NaN stays NaN */
}

/* from z; of a ReLU its result does as well, dropped or not, for it is above 0 where the slope is 1 */
static inline v8 slope(int act, v8 z) {
    v8 density, share;
    if (act == RELU) return (v8)((i8)all8(1) & ~(z <= 0));
    share = normal8(z, &density);
    return share + z * density;
}

/* What comes next to a tile of Y, at `at`, while it is in the first cache: H = dropout(act(Y)), */
static inline void forth(int64_t rows, int64_t n, int64_t at, int act, const Drop *drop, const float *y, float *h) {
    for (int64_t r = 0; r < 2 * rows; r++) {
        int64_t here = at + r / 2 * n + r % 2 * 8;
        v8 done = acted(act, *(const v8 *)(y + here));
        *(v8 *)(h + here) = drop->threshold ? done * kept(drop, here) : done;
    }
}

/* or the way back through that: Y · kept · act'(z), and its sums over the rows. */
static inline void back(int64_t rows, int64_t n, int64_t at, int act, const Drop *drop, const float *z, float *y, v8 *sums) {
    for (int64_t r = 0; r < 2 * rows; r++) {
        int64_t here = at + r / 2 * n + r % 2 * 8;
        v8 done = *(const v8 *)(y + here) * slope(act, *(const v8 *)(z + here));
        if (drop->threshold) done *= act == RELU ? all8(drop->scale) : kept(drop, here);
        *(v8 *)(y + here) = done;
        sums[r % 2] += done;
    }
}

/* With `more` Y is added to. Forward there is no z, and H may stand in the memory of Y if it is a ReLU's. Back,
   sums [shares_of(M), N] are those over rows. Every row is worked out alone: its result does not depend on the others, nor on the number of threads. */
static void mapped(const float *x, const float *w, int turned, const float *bias, int more, int64_t m, int64_t n, int64_t k, int act,
                   Drop drop, const float *z, float *y, float *h, float *sums, float *space) {
    int64_t parts = (k + DEEP - 1) / DEEP, deep = (k / 16 + parts - 1) / parts * 16;
    int64_t tiles = (m + HIGH - 1) / HIGH, shares = shares_of(m);
    #pragma omp parallel
    for (int64_t p = 0; p < k; p += deep) {
        int64_t d = k - p < deep ? k - p : deep;
        int next = p + d == k ? act : NONE;
        #pragma omp for schedule(static)
        for (int64_t j = 0; j < n; j += WIDE) {
            int64_t wide = n - j < WIDE ? n - j : WIDE;
            if (turned) turned_panels(w + j * k + p, k, wide, d, space + j * d);
            else panels(w + p * n + j, n, d, wide, space + j * d);
        }
        #pragma omp for schedule(static)
        for (int64_t share = 0; share < shares; share++) {
            int64_t first = tiles * share / shares * HIGH, end = tiles * (share + 1) / shares * HIGH;
            for (int64_t j = 0; j < n; j += 16) {
                int64_t from = j * d / n, to = n <= k ? (j + 16) * d / n : 0;  /* a wide Y keeps a row of X long enough */
                v8 total[2] = {all8(0), all8(0)};
                for (int64_t i = first; i < end && i < m; i += HIGH) {
                    int64_t rows = m - i < HIGH ? m - i : HIGH, at = i * n + j, later = i - first + end;
                    const float *start = p || more ? y + at : bias ? bias + j : NOTHING;
                    for (int64_t r = 0; z && next && r < rows; r++) __builtin_prefetch(z + at + r * n + 15);
                    ahead(x + later * k + p, k, m - later, from, to);
                    six(rows, x + i * k + p, k, space + j * d, d, start, p || more ? n : 0, y + at, n);
                    if (next && z) back(rows, n, at, act, &drop, z, y, total);
                    else if (next) forth(rows, n, at, act, &drop, y, h);
                }
                if (next && z) memcpy(sums + share * n + j, total, sizeof total);
            }
        }
    }
}

/* w is [N, K] where it is turned (Y = X · Wᵀ) and else [K, N]. space [N · min(K, DEEP)] is scratch. */
void linear(const float *x, const float *w, int turned, const float *bias, int more, int64_t m, int64_t n, int64_t k, int act, Drop drop,
            float *y, float *h, float *space) {
    mapped(x, w, turned, bias, more, m, n, k, act, drop, 0, y, h, 0, space);
}

/* The way back from a feed-forward's second map to before its activation: dz = (above · W) · kept · act'(z). */
void linear_back(const float *above, const float *w, int64_t m, int64_t n, int64_t k, int act, Drop drop, const float *z, float *dz,
                 float *sums, float *space) {
    mapped(above, w, 0, 0, 0, m, n, k, act, drop, z, dz, 0, sums, space);
}
