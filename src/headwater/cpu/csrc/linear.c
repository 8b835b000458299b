/* Linear layers (GEMM): Y [M, N] = X [M, K] · W + bias, and the activation and dropout of a feed-forward layer. K and N are
   multiples of 16.

   W is packed into panels of 16 columns (gemm.h), at most K_BLOCK of its rows at a time, so that those of a tile stay in the
   nearest caches while ROW_BLOCK rows of X, in the L2 cache, are multiplied with them, MR at a time. */

#include "gemm.h"

/* Prefetch columns from .. to of MR rows into the L2 cache while others are computed. */
static inline void prefetch_rows(const float *x, int64_t row_stride, int64_t rows, int64_t from, int64_t to) {
    for (int64_t c = from / 16 * 16; c < to; c += 16)
        for (int64_t r = 0; r < MR && r < rows; r++) __builtin_prefetch(x + r * row_stride + c, 0, 2);
}

/* ---------------------------------------------------------------------------------------- activations and their gradients */

/* Φ(x), the normal CDF, within 2e-7; and its density φ(x). (Abramowitz and Stegun, 7.1.26) */
static inline f32x8 normal_cdf8(f32x8 x, f32x8 *density) {
    f32x8 size = (f32x8)((i32x8)x & 0x7fffffff), t = 1.0f / (size * 0.231641888f + 1.0f), bell = exp8(x * x * -0.5f);
    f32x8 p = broadcast8(1.061405429f);
    p = p * t - 1.453152027f; p = p * t + 1.421413741f; p = p * t - 0.284496736f; p = p * t + 0.254829592f;
    f32x8 tail = p * t * bell * 0.5f;
    i32x8 above = x > 0;
    *density = bell * 0.398942280f;
    return (f32x8)(((i32x8)(1.0f - tail) & above) | ((i32x8)tail & ~above));
}

/* The others are z · σ(gate): gate is a multiple of z (QUICK_GELU, SILU), or a polynomial (GELU_TANH: (1 + tanh a) / 2 = σ(2 a)). */
static inline f32x8 gate8(int act, f32x8 z) {
    return act == SILU ? z : act == QUICK_GELU ? z * 1.702f : z * (z * z * 0.0713548163f + 1.59576912f);
}
static inline f32x8 gate_grad8(int act, f32x8 z) {
    return act == SILU ? broadcast8(1) : act == QUICK_GELU ? broadcast8(1.702f) : z * z * 0.214064449f + 1.59576912f;
}
static inline f32x8 sigmoid8(f32x8 x) { return 1.0f / (exp8(-x) + 1.0f); }

/* NaN stays NaN. */
static inline f32x8 activation8(int act, f32x8 z) {
    f32x8 density;
    if (act == RELU) return (f32x8)((i32x8)z & ~(z <= 0));
    return z * (act == GELU ? normal_cdf8(z, &density) : sigmoid8(gate8(act, z)));
}

/* act'(z). For ReLU its output will do as z, after dropout too: it is above 0 only where the gradient is 1. */
static inline f32x8 activation_grad8(int act, f32x8 z) {
    f32x8 density, cdf;
    if (act == RELU) return (f32x8)((i32x8)broadcast8(1) & ~(z <= 0));
    if (act != GELU) {
        f32x8 open = sigmoid8(gate8(act, z));
        return open + z * open * (1.0f - open) * gate_grad8(act, z);
    }
    cdf = normal_cdf8(z, &density);
    return cdf + z * density;
}

/* Epilogue of the forward pass on a tile of Y at `at`, while it is in the L1 cache: H = dropout(act(Y)). */
static inline void apply_activation(int64_t rows, int64_t columns, int64_t n, int64_t at, int act, const DropoutKey *dropout, const float *y, float *h) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t here = at + r * n; here < at + r * n + columns; here += 8) {
            f32x8 result = activation8(act, *(const f32x8 *)(y + here));
            *(f32x8 *)(h + here) = dropout->threshold ? result * keep_mask(dropout, here) : result;
        }
}

/* Epilogue of the backward pass: Y · keep_mask · act'(z), and its sums over the rows. */
static inline void apply_activation_grad(int64_t rows, int64_t columns, int64_t n, int64_t at, int act, const DropoutKey *dropout, const float *z, float *y,
                                         f32x8 *sums) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j += 8) {
            int64_t here = at + r * n + j;
            f32x8 result = *(const f32x8 *)(y + here) * activation_grad8(act, *(const f32x8 *)(z + here));
            if (dropout->threshold) result *= act == RELU ? broadcast8(dropout->scale) : keep_mask(dropout, here);
            *(f32x8 *)(y + here) = result;
            sums[j / 8] += result;
        }
}

/* `accumulate`: the product is added to Y. In the forward pass there is no z, and H may be the memory of Y. In the
   backward pass sums [num_partitions(M), N] are over rows. Every row is computed alone: its result depends neither on the
   other rows nor on the number of threads. */
static void gemm_blocked(const float *x, const float *w, int transposed, const float *bias, int accumulate, int64_t m, int64_t n, int64_t k, int act,
                   DropoutKey dropout, const float *z, float *y, float *h, float *sums, float *workspace) {
    int64_t parts = (k + K_BLOCK - 1) / K_BLOCK, k_block = (k / 16 + parts - 1) / parts * 16;
    int64_t tiles = (m + MR - 1) / MR, partitions = num_partitions(m);
    #pragma omp parallel
    for (int64_t p = 0; p < k; p += k_block) {
        int64_t d = k - p < k_block ? k - p : k_block;
        int fused_act = p + d == k ? act : NONE;
        #pragma omp for schedule(static)
        for (int64_t j = 0; j < n; j += PACK_COLUMNS) {
            int64_t wide = n - j < PACK_COLUMNS ? n - j : PACK_COLUMNS;
            if (transposed) pack_panels_transposed(w + j * k + p, k, wide, d, workspace + j * d);
            else pack_panels(w + p * n + j, n, d, wide, workspace + j * d);
        }
        #pragma omp for schedule(static)
        for (int64_t partition = 0; partition < partitions; partition++) {
            int64_t first = tiles * partition / partitions * MR, end = tiles * (partition + 1) / partitions * MR;
            for (int64_t j = 0; j < n; j += NR) {
                int64_t columns = n - j < NR ? n - j : NR;
                int64_t from = j * d / n, to = n <= k ? (j + columns) * d / n : 0;  /* no prefetch if Y is wide: a row of X is used long enough */
                f32x8 total[NR / 8] = {{0}};
                for (int64_t i = first; i < end && i < m; i += MR) {
                    int64_t rows = m - i < MR ? m - i : MR, at = i * n + j, later = i - first + end;
                    const float *start = p || accumulate ? y + at : bias ? bias + j : ZEROS;
                    for (int64_t r = 0; z && fused_act && r < rows; r++) __builtin_prefetch(z + at + r * n + columns - 1);
                    prefetch_rows(x + later * k + p, k, m - later, from, to);
                    gemm_tile(MR, rows, columns, x + i * k + p, k, 1, workspace + j * d, d, d, start, p || accumulate ? n : 0, y + at, n);
                    if (fused_act && z) apply_activation_grad(rows, columns, n, at, act, &dropout, z, y, total);
                    else if (fused_act) apply_activation(rows, columns, n, at, act, &dropout, y, h);
                }
                if (fused_act && z) memcpy(sums + partition * n + j, total, sizeof(float) * (size_t)columns);
            }
        }
    }
}

/* w is [N, K] if transposed (Y = X · Wᵀ), else [K, N]. workspace [N · min(K, K_BLOCK)] is scratch. */
void gemm_bias_act(const float *x, const float *w, int transposed, const float *bias, int accumulate, int64_t m, int64_t n, int64_t k, int act, DropoutKey dropout,
            float *y, float *h, float *workspace) {
    gemm_blocked(x, w, transposed, bias, accumulate, m, n, k, act, dropout, 0, y, h, 0, workspace);
}

/* Backward pass of a feed-forward layer, from its output to before its activation: grad_z = (grad_out · W) · keep_mask · act'(z). */
void linear_grad_input_act(const float *grad_out, const float *w, int64_t m, int64_t n, int64_t k, int act, DropoutKey dropout, const float *z, float *grad_z,
                 float *sums, float *workspace) {
    gemm_blocked(grad_out, w, 0, 0, 0, m, n, k, act, dropout, z, grad_z, 0, sums, workspace);
}
