/* LayerNorm and RMSNorm, fused with the residual addition and its dropout. N rows of width D, a multiple of 8. u (x_hat) is
   the normalized row: (s - mean) / √(var + ε), or s / √(mean(s²) + ε), of s = x + y · keep_mask. */

#include "simd.h"

#define MAX_BIAS_RATIO 16                                              /* |bias / weight|: beyond it the inversion would lose a digit */
#define ROW(x) ((x) + i * width)
#define VEC(x) (*(f32x8 *)((x) + j))
#define FOR_COLUMNS(j) for (int64_t j = 0; j < width; j += 8)

/* Whether u = (out - bias) / weight keeps its precision: no weight is 0, or small relative to its bias. */
int invertible(const float *weight, const float *bias, int64_t width) {
    for (int64_t j = 0; j < width; j++)
        if (!(fabsf(weight[j]) > 1e-30f) || (bias && !(fabsf(bias[j]) <= MAX_BIAS_RATIO * fabsf(weight[j])))) return 0;
    return 1;
}

/* out = u · weight + bias; rstd [N] = 1 / √…; x_hat, if any, gets u. */
void add_dropout_norm(const float *x, const float *y, DropoutKey dropout, const float *weight, const float *bias, int64_t rows, int64_t width, float eps,
          int centered, float *out, float *x_hat, float *rstd) {
    #pragma omp parallel for schedule(static) if (rows * width > 2 * CHUNK_SIZE)
    for (int64_t i = 0; i < rows; i++) {
        const float *x_row = ROW(x);
        float *row = ROW(out), mean = 0;
        f32x8 sum = broadcast8(0), square = broadcast8(0);
        FOR_COLUMNS(j) {
            f32x8 s = *(const f32x8 *)(x_row + j);
            if (y) s += dropout.threshold ? *(const f32x8 *)(ROW(y) + j) * keep_mask(&dropout, i * width + j) : *(const f32x8 *)(ROW(y) + j);
            VEC(row) = s; sum += s;
        }
        if (centered) mean = reduce_sum8(sum) / width;
        FOR_COLUMNS(j) { f32x8 s = VEC(row) - mean; square += s * s; }
        float scale = rstd[i] = 1 / sqrtf(reduce_sum8(square) / width + eps);
        FOR_COLUMNS(j) {
            f32x8 u = (VEC(row) - mean) * scale;
            if (x_hat) VEC(ROW(x_hat)) = u;
            VEC(row) = bias ? u * *(const f32x8 *)(weight + j) + *(const f32x8 *)(bias + j) : u * *(const f32x8 *)(weight + j);
        }
    }
}

/* With g the gradient of out and t = g · weight:  grad_weight = Σ g u,  grad_bias = Σ g,
   grad_x = rstd · (t - mean(t) - u · mean(t u)),  grad_y = grad_x · keep_mask. Without x_hat, u is (out - bias) / weight.
   sums [ROW_BLOCKS, 2, D]: scratch, zeros; each block of rows has its own, so that results do not depend on the threads. */
void add_dropout_norm_backward(const float *grad_out, const float *out, const float *x_hat, const float *weight, const float *bias, const float *rstd,
               int64_t rows, int64_t width, int centered, DropoutKey dropout, float *grad_x, float *grad_y, float *sums, float *grad_weight, float *grad_bias) {
    #pragma omp parallel for schedule(static) if (rows * width > 2 * CHUNK_SIZE)
    for (int64_t block = 0; block < ROW_BLOCKS; block++)
        for (int64_t i = rows * block / ROW_BLOCKS; i < rows * (block + 1) / ROW_BLOCKS; i++) {
            float *row = ROW(grad_x), *weight_sums = sums + 2 * block * width, *bias_sums = weight_sums + width;
            f32x8 sum_t = broadcast8(0), sum_tu = broadcast8(0);
            FOR_COLUMNS(j) {
                f32x8 g = *(const f32x8 *)(ROW(grad_out) + j), w = *(const f32x8 *)(weight + j), t = g * w, u;
                if (x_hat) u = *(const f32x8 *)(ROW(x_hat) + j);
                else u = (*(const f32x8 *)(ROW(out) + j) - (bias ? *(const f32x8 *)(bias + j) : broadcast8(0))) / w;
                VEC(row) = u; sum_t += t; sum_tu += t * u;
                VEC(weight_sums) += g * u; VEC(bias_sums) += g;
            }
            float mean = centered ? reduce_sum8(sum_t) / width : 0, mean_tu = reduce_sum8(sum_tu) / width;
            FOR_COLUMNS(j) {
                f32x8 d = (*(const f32x8 *)(ROW(grad_out) + j) * *(const f32x8 *)(weight + j) - mean - VEC(row) * mean_tu) * rstd[i];
                VEC(row) = d;
                if (grad_y) VEC(ROW(grad_y)) = d * keep_mask(&dropout, i * width + j);
            }
        }
    for (int64_t block = 0; block < ROW_BLOCKS; block++)
        FOR_COLUMNS(j) {
            VEC(grad_weight) += *(f32x8 *)(sums + 2 * block * width + j);
            if (grad_bias) VEC(grad_bias) += *(f32x8 *)(sums + (2 * block + 1) * width + j);
        }
}
