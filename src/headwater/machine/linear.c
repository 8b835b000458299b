/* Linear maps: Y [M, N] = X [M, K] · W + bias, and what a feed-forward layer does to it next. K and N are multiples of 16.

   W is laid out in panels of 16 columns (vector.h), at most DEEP of its rows at a time, so that a panel stays in the
   first cache while TALL rows of X, in the second, pass it six at a time: six by sixteen sums live in registers. */

#include "vector.h"

#define DEEP 512                                                       /* rows of W in a panel */
#define TALL 96                                                        /* rows of X that pass a panel, at most */
#define HIGH 6                                                         /* rows of X at a time */
#define WIDE 64                                                        /* columns of W laid out at a time */
#define ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define AT(i) (last < i ? last : i)                                    /* of fewer than six rows the last is repeated */

/* C [rows, 16] = start + A [rows, k] · B [k, 16]; start is C itself, a bias (with no stride), or NOTHING. */
static inline void six(int64_t rows, const float *a, int64_t by_a, const float *b, int64_t k, const float *start, int64_t by_start,
                       float *c, int64_t by_c) {
    int64_t last = rows - 1;
    #define BEGIN(i) const float *a##i = a + AT(i) * by_a, *from##i = start + AT(i) * by_start; \
        v8 s##i = *(const v8 *)from##i, t##i = *(const v8 *)(from##i + 8); __builtin_prefetch(c + AT(i) * by_c + 15, 1);
    #define ADD(i) x = all8(a##i[p]); s##i += x * left; t##i += x * right;
    #define END(i) *(v8 *)(c + AT(i) * by_c) = s##i; *(v8 *)(c + AT(i) * by_c + 8) = t##i;
    ROWS(BEGIN)
    _Pragma("GCC unroll 4")
    for (int64_t p = 0; p < k; p++, b += 16) {
        v8 left = *(const v8 *)b, right = *(const v8 *)(b + 8), x;
        HELD(left); HELD(right);
        ROWS(ADD)
    }
    ROWS(END)
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

/* w is [N, K] where it is turned (Y = X · Wᵀ) and else [K, N]. With an activation, H = dropout(act(Y)) besides: a ReLU's
   may stand in the memory of Y. space [N · min(K, DEEP)] is scratch. Every row is worked out alone: its result does not
   depend on the others, nor on the number of threads. */
void linear(const float *x, const float *w, int turned, const float *bias, int64_t m, int64_t n, int64_t k, int act, Drop drop,
            float *y, float *h, float *space) {
    int64_t parts = (k + DEEP - 1) / DEEP, deep = (k / 16 + parts - 1) / parts * 16;
    int64_t tiles = (m + HIGH - 1) / HIGH, shares = (m + 4 * TALL - 1) / (4 * TALL) * 4;  /* a multiple of four: even for 2 and 4 threads */
    #pragma omp parallel
    for (int64_t p = 0; p < k; p += deep) {
        int64_t d = k - p < deep ? k - p : deep;
        #pragma omp for schedule(static)
        for (int64_t j = 0; j < n; j += WIDE) {
            int64_t wide = n - j < WIDE ? n - j : WIDE;
            if (turned) turned_panels(w + j * k + p, k, wide, d, space + j * d);
            else panels(w + p * n + j, n, d, wide, space + j * d);
        }
        #pragma omp for schedule(static)
        for (int64_t share = 0; share < shares; share++)
            for (int64_t j = 0; j < n; j += 16)
                for (int64_t i = tiles * share / shares * HIGH; i < tiles * (share + 1) / shares * HIGH && i < m; i += HIGH) {
                    int64_t rows = m - i < HIGH ? m - i : HIGH, at = i * n + j;
                    const float *start = p ? y + at : bias ? bias + j : NOTHING;
                    six(rows, x + i * k + p, k, space + j * d, d, start, p ? n : 0, y + at, n);
                    if (!act || p + d < k) continue;
                    for (int64_t r = 0; r < 2 * rows; r++) {
                        int64_t here = at + r / 2 * n + r % 2 * 8;
                        v8 a = acted(act, *(const v8 *)(y + here));
                        *(v8 *)(h + here) = drop.threshold ? a * kept(&drop, here) : a;
                    }
                }
    }
}

/* The way back through dropout(act(.)): dz = above · kept · act'(z), and d_bias = Σ dz over the rows. sums [BLOCKS, N] and
   d_bias are zeros. */
#define BLOCKS 8                                                       /* of rows: their sums do not depend on the number of threads */
void act_back(const float *z, const float *above, int64_t m, int64_t n, int act, Drop drop, float *dz, float *sums, float *d_bias) {
    #pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int64_t i = m * block / BLOCKS; i < m * (block + 1) / BLOCKS; i++)
            for (int64_t j = 0; j < n; j += 8) {
                int64_t here = i * n + j;
                v8 d = *(const v8 *)(above + here) * slope(act, *(const v8 *)(z + here));
                if (drop.threshold) d *= act == RELU ? all8(drop.scale) : kept(&drop, here);
                *(v8 *)(dz + here) = d;
                *(v8 *)(sums + block * n + j) += d;
            }
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int64_t j = 0; j < n; j += 8) *(v8 *)(d_bias + j) += *(v8 *)(sums + block * n + j);
}
