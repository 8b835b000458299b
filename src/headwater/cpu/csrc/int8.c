/* Linear layers whose weights and activations are rows of int8 with one scale each: y = (q_x · q_Wᵀ) s_x s_W + bias.

   With AVX-512 VNNI the product is computed here (int8_linear): one instruction multiplies 64 bytes and adds four products
   each. One operand must be unsigned: that is W + 128, and 128 Σ q_x is subtracted again. All sums are exact integers.
   On other processors torch multiplies, between quantize_rows and dequantize_rows. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#include "int8.h"
#include "threads.h"
#ifdef WITH_INT8_LINEAR
#include <immintrin.h>
#endif

/* q [n][k] = round(x / scale), scale [n] = max|x| / 127 of a row, sum [n] = Σ q. A row with a NaN or an infinity has a NaN as its scale. */
void quantize_rows(const float *x, int64_t n, int64_t k, int8_t *q, float *scale, int32_t *sum, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; i++) {
        const float *row = x + i * k;
        float max_abs = 1e-30f, nan_or_zero = 0;
        int32_t total = 0;
        for (int64_t j = 0; j < k; j++) { float a = fabsf(row[j]); max_abs = a > max_abs ? a : max_abs; nan_or_zero += row[j] * 0; }
        float inverse = nan_or_zero == 0 ? 127 / max_abs : 0;
        for (int64_t j = 0; j < k; j++) {
            int32_t v = nan_or_zero == 0 ? (int32_t)rintf(row[j] * inverse) : 0;
            q[i * k + j] = (int8_t)v;
            total += v;
        }
        scale[i] = max_abs / 127 + nan_or_zero;
        sum[i] = total;
    }
}

/* y [n][m] = product · x_scale · w_scale + bias, product [n][m] int32; without bias: 0. */
void dequantize_rows(const int32_t *product, int64_t n, int64_t m, const float *x_scale, const float *w_scale, const float *bias, float *y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m; j++) y[i * m + j] = (float)product[i * m + j] * (x_scale[i] * w_scale[j]) + (bias ? bias[j] : 0);
}

#ifdef WITH_INT8_LINEAR
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define OFFSET _mm512_set1_epi8((char)128)

/* ------------------------------------------------------------------------------------------------------------- few rows */

/* One row of W times R rows of x, R a constant: each 64 weights are read once. */
ALWAYS_INLINE void dot_few(int R, const int8_t *w, const int8_t *x, int64_t k, int32_t *out) {
    __m512i total[INT8_FEW_ROWS];
    for (int r = 0; r < R; r++) total[r] = _mm512_setzero_si512();
    for (int64_t c = 0; c < k; c += 64) {
        __m512i weights = _mm512_xor_si512(_mm512_loadu_si512(w + c), OFFSET);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r] = _mm512_dpbusd_epi32(total[r], weights, _mm512_loadu_si512(x + r * k + c));
    }
    for (int r = 0; r < R; r++) out[r] = _mm512_reduce_add_epi32(total[r]);
}

static void few_rows(const Int8Rows *x, const Int8Rows *w, const float *bias, float *y, int threads) {
    int64_t k = x->columns, m = w->rows;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t j = 0; j < m; j++) {
        const int8_t *row = w->q + j * k;
        int32_t product[INT8_FEW_ROWS];
        switch (x->rows) {                               /* a function for each number of rows, so that all sums are in registers */
            case 1: dot_few(1, row, x->q, k, product); break;
            case 2: dot_few(2, row, x->q, k, product); break;
            case 3: dot_few(3, row, x->q, k, product); break;
            case 4: dot_few(4, row, x->q, k, product); break;
            case 5: dot_few(5, row, x->q, k, product); break;
            case 6: dot_few(6, row, x->q, k, product); break;
            case 7: dot_few(7, row, x->q, k, product); break;
            default: dot_few(8, row, x->q, k, product);
        }
        for (int64_t i = 0; i < x->rows; i++) y[i * m + j] = (float)(product[i] - 128 * x->sum[i]) * (x->scale[i] * w->scale[j]) + (bias ? bias[j] : 0);
    }
}

/* ------------------------------------------------------------------------------------------------------------ many rows */

/* Rows first … first + 31 of W, beyond the last it is repeated: panel [k / 4][32] groups of four bytes. */
static void pack_panel(const Int8Rows *w, int64_t first, uint32_t *panel) {
    for (int64_t j = 0; j < INT8_PANEL; j++) {
        const int8_t *row = w->q + (first + j < w->rows ? first + j : w->rows - 1) * w->columns;
        for (int64_t c = 0; c < w->columns / 4; c++) {
            uint32_t four;
            memcpy(&four, row + 4 * c, 4);
            panel[c * INT8_PANEL + j] = four ^ 0x80808080u;
        }
    }
}

/* Sixteen columns of a row of y: integers to floats. */
ALWAYS_INLINE void dequantize16(__m512i product, int32_t sum, float x_scale, const float *w_scale, const float *bias, int64_t columns, float *y) {
    __mmask16 mask = columns >= 16 ? 0xffff : columns > 0 ? (__mmask16)((1 << columns) - 1) : 0;
    __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(product, _mm512_set1_epi32(128 * sum)));
    __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x_scale), _mm512_maskz_loadu_ps(mask, w_scale));
    __m512 offset = bias ? _mm512_maskz_loadu_ps(mask, bias) : _mm512_setzero_ps();
    _mm512_mask_storeu_ps(y, mask, _mm512_fmadd_ps(value, scale, offset));
}

/* INT8_TILE rows of x from i on times a panel; of fewer rows the last is repeated. */
ALWAYS_INLINE void tile(const Int8Rows *x, int64_t i, const uint32_t *panel, const Int8Rows *w, int64_t first, const float *bias, float *y) {
    const int8_t *row[INT8_TILE];
    __m512i left[INT8_TILE], right[INT8_TILE];
    int64_t rows = x->rows - i < INT8_TILE ? x->rows - i : INT8_TILE, m = w->rows;
#pragma GCC unroll 12
    for (int r = 0; r < INT8_TILE; r++) {
        row[r] = x->q + (i + (r < rows ? r : rows - 1)) * x->columns;
        left[r] = right[r] = _mm512_setzero_si512();
    }
    for (int64_t c = 0; c < x->columns / 4; c++, panel += INT8_PANEL) {
        __m512i w0 = _mm512_loadu_si512(panel), w1 = _mm512_loadu_si512(panel + 16);
#pragma GCC unroll 12
        for (int r = 0; r < INT8_TILE; r++) {
            int32_t four;
            memcpy(&four, row[r] + 4 * c, 4);
            __m512i v = _mm512_set1_epi32(four);
            left[r] = _mm512_dpbusd_epi32(left[r], w0, v);
            right[r] = _mm512_dpbusd_epi32(right[r], w1, v);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < INT8_TILE; r++) if (r < rows) {
        float *to = y + (i + r) * m + first;
        dequantize16(left[r], x->sum[i + r], x->scale[i + r], w->scale + first, bias ? bias + first : NULL, m - first, to);
        if (m - first > 16) dequantize16(right[r], x->sum[i + r], x->scale[i + r], w->scale + first + 16, bias ? bias + first + 16 : NULL, m - first - 16, to + 16);
    }
}

/* y [n][m]; columns are a multiple of 64, at most INT8_MAX_COLUMNS. panels [threads][32 · k] bytes: scratch. */
void int8_linear(const Int8Rows *x, const Int8Rows *w, const float *bias, float *y, uint8_t *panels, int threads) {
    if (x->rows <= INT8_FEW_ROWS) { few_rows(x, w, bias, y, threads); return; }
#pragma omp parallel num_threads(threads)
    {
        uint32_t *panel = (uint32_t *)(panels + (int64_t)omp_get_thread_num() * INT8_PANEL * w->columns);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < w->rows; first += INT8_PANEL) {
            pack_panel(w, first, panel);
            for (int64_t i = 0; i < x->rows; i += INT8_TILE) tile(x, i, panel, w, first, bias, y);
        }
    }
}
#else
void int8_linear(const Int8Rows *x, const Int8Rows *w, const float *bias, float *y, uint8_t *panels, int threads) {
    (void)x, (void)w, (void)bias, (void)y, (void)panels, (void)threads;  /* Python asks HAVE_INT8_LINEAR first */
}
#endif
