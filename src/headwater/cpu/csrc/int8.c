/* Rows of floats to int8 and back, around a product of int8 matrices: a scale for each row of activations and each output. */

#include <math.h>
#include <stdint.h>

/* q [n][k] = round(x / scale), scale [n] = max|x| / 127 of a row. A row with a NaN or an infinity has a NaN as its scale. */
void quantize_rows(const float *x, int64_t n, int64_t k, int8_t *q, float *scale, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; i++) {
        const float *row = x + i * k;
        float max_abs = 1e-30f, nan_or_zero = 0;
        for (int64_t j = 0; j < k; j++) { float a = fabsf(row[j]); max_abs = a > max_abs ? a : max_abs; nan_or_zero += row[j] * 0; }
        float inverse = nan_or_zero == 0 ? 127 / max_abs : 0;
        for (int64_t j = 0; j < k; j++) q[i * k + j] = nan_or_zero == 0 ? (int8_t)rintf(row[j] * inverse) : 0;
        scale[i] = max_abs / 127 + nan_or_zero;
    }
}

/* y [n][m] = product · row_scale · column_scale + bias, product [n][m] int32; without bias: 0. */
void dequantize_rows(const int32_t *product, int64_t n, int64_t m, const float *row_scale, const float *column_scale, const float *bias, float *y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m; j++) y[i * m + j] = (float)product[i * m + j] * (row_scale[i] * column_scale[j]) + (bias ? bias[j] : 0);
}
