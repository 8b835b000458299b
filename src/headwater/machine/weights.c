/* The slope of a linear map's weights: dW [N, K] = dYᵀ · X, a sum over the M rows of dY [M, N] and X [M, K].

   DEEP rows at a time: X is laid out in panels of 16 columns (vector.h), dY in slivers of six, so that both are read as
   streams; six by sixteen sums live in registers, and are added to dW after DEEP rows. K and N are multiples of 16. */

#include "six.h"

#define DEEP 256                                                       /* rows summed in registers */
#define SLIVER(rows) (HIGH * (rows) + 16)                              /* room between slivers: they are written side by side */

/* C [rows, 16] = A · B over k, or C + A · B where there is more; A [k, 6] is a sliver, B [k, 16] a panel. */
static inline void outer(int64_t rows, const float *a, const float *b, int64_t k, int more, float *c, int64_t by_c) {
    int64_t last = rows - 1;
    #define BEGIN(i) v8 s##i = all8(0), t##i = all8(0), *c##i = (v8 *)(c + AT(i) * by_c); __builtin_prefetch((float *)c##i + 15, 1);
    #define ADD(i) x = all8(a[i]); s##i += x * left; t##i += x * right;
    #define MORE(i) s##i += c##i[0]; t##i += c##i[1];
    #define END(i) c##i[0] = s##i; c##i[1] = t##i;
    SIX(BEGIN)
    _Pragma("GCC unroll 4")
    for (int64_t p = 0; p < k; p++, b += 16, a += HIGH) {
        v8 left = *(const v8 *)b, right = *(const v8 *)(b + 8), x;
        HELD(left); HELD(right);
        SIX(ADD)
    }
    if (more) { SIX(MORE) }
    SIX(END)
}

/* x [rows, columns] in slivers, one after another: of each row six numbers, the last repeated where there are fewer. Eight are
   written where `safe` numbers of a row may be read, and the next row's overwrite the two too many. */
static void slivers(const float *x, int64_t by_row, int64_t rows, int64_t columns, int64_t safe, float *out) {
    for (int64_t i = 0; i < rows; i++, x += by_row, out += HIGH) {
        int64_t j = 0;
        for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(x + AHEAD * by_row + c);
        for (; j + HIGH <= columns && j + 8 <= safe; j += HIGH) *(v8 *)(out + j / HIGH * SLIVER(rows)) = *(const v8 *)(x + j);
        for (; j < columns; j += HIGH)
            for (int64_t r = 0; r < HIGH; r++) out[j / HIGH * SLIVER(rows) + r] = x[j + r < columns ? j + r : columns - 1];
    }
}

/* space [K · DEEP] is scratch. The sums do not depend on the number of threads. */
void weights_back(const float *dy, const float *x, int64_t m, int64_t n, int64_t k, float *dw, float *space) {
    int64_t parts = (m + DEEP - 1) / DEEP, deep = (m + parts - 1) / parts;
    int64_t tiles = (n + HIGH - 1) / HIGH, shares = shares_of(n);
    #pragma omp parallel
    for (int64_t p = 0; p < m; p += deep) {
        int64_t d = m - p < deep ? m - p : deep;
        float mine[(TALL / HIGH + 1) * SLIVER(DEEP)];
        #pragma omp for schedule(static)
        for (int64_t j = 0; j < k; j += WIDE) panels(x + p * k + j, k, d, k - j < WIDE ? k - j : WIDE, space + j * d);
        #pragma omp for schedule(static)
        for (int64_t share = 0; share < shares; share++) {
            int64_t first = tiles * share / shares * HIGH, end = tiles * (share + 1) / shares * HIGH;
            if (end > n) end = n;
            slivers(dy + p * n + first, n, d, end - first, n - first, mine);
            for (int64_t j = 0; j < k; j += 16)
                for (int64_t i = first; i < end; i += HIGH)
                    outer(end - i < HIGH ? end - i : HIGH, mine + (i - first) / HIGH * SLIVER(d), space + j * d, d, p > 0,
                          dw + i * k + j, k);
        }
    }
}
