/* The gradient of a linear layer's weight: dW [N, K] = dYᵀ · X, a sum over the M rows of dY [M, N] and X [M, K].

   M_BLOCK rows at a time: X is packed into panels of 16 columns (simd.h), dY into slivers of six, so that both are read as
   streams; 6 × 16 sums are in registers, and are added to dW after M_BLOCK rows. K and N are multiples of 16. */

#include "gemm6x16.h"

#define SLIVER_SIZE(rows) (MR * (rows) + 16)                           /* with padding: slivers are written side by side */

/* C [rows, 16] = A · B over k, or C + A · B with `accumulate`; A [k, 6] is a sliver, B [k, 16] a panel. */
static inline void outer_product6x16(int64_t rows, const float *a, const float *b, int64_t k, int accumulate, float *c, int64_t c_stride) {
    int64_t last = rows - 1;
    #define BEGIN(i) f32x8 s##i = broadcast8(0), t##i = broadcast8(0), *c##i = (f32x8 *)(c + CLAMPED_ROW(i) * c_stride); __builtin_prefetch((float *)c##i + 15, 1);
    #define ADD(i) x = broadcast8(a[i]); s##i += x * left; t##i += x * right;
    #define ACCUMULATE(i) s##i += c##i[0]; t##i += c##i[1];
    #define END(i) c##i[0] = s##i; c##i[1] = t##i;
    REPEAT6(BEGIN)
    _Pragma("GCC unroll 4")
    for (int64_t p = 0; p < k; p++, b += 16, a += MR) {
        f32x8 left = *(const f32x8 *)b, right = *(const f32x8 *)(b + 8), x;
        KEEP_IN_REGISTER(left); KEEP_IN_REGISTER(right);
        REPEAT6(ADD)
    }
    if (accumulate) { REPEAT6(ACCUMULATE) }
    REPEAT6(END)
}

/* Pack x [rows, columns] into slivers, one after another: six numbers of each row, the last repeated if there are fewer. Eight
   are written where `safe` numbers of a row may be read, and those of the next row overwrite the two extra ones. */
static void pack_slivers(const float *x, int64_t row_stride, int64_t rows, int64_t columns, int64_t safe, float *out) {
    for (int64_t i = 0; i < rows; i++, x += row_stride, out += MR) {
        int64_t j = 0;
        for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(x + PREFETCH_ROWS * row_stride + c);
        for (; j + MR <= columns && j + 8 <= safe; j += MR) *(f32x8 *)(out + j / MR * SLIVER_SIZE(rows)) = *(const f32x8 *)(x + j);
        for (; j < columns; j += MR)
            for (int64_t r = 0; r < MR; r++) out[j / MR * SLIVER_SIZE(rows) + r] = x[j + r < columns ? j + r : columns - 1];
    }
}

/* workspace [K · M_BLOCK] is scratch. The sums do not depend on the number of threads. */
void linear_grad_weight(const float *grad_out, const float *x, int64_t m, int64_t n, int64_t k, float *grad_weight, float *workspace) {
    int64_t parts = (m + M_BLOCK - 1) / M_BLOCK, m_block = (m + parts - 1) / parts;
    int64_t tiles = (n + MR - 1) / MR, partitions = num_partitions(n);
    #pragma omp parallel
    for (int64_t p = 0; p < m; p += m_block) {
        int64_t d = m - p < m_block ? m - p : m_block;
        float packed_grad_out[(ROW_BLOCK / MR + 1) * SLIVER_SIZE(M_BLOCK)];
        #pragma omp for schedule(static)
        for (int64_t j = 0; j < k; j += PACK_COLUMNS) pack_panels(x + p * k + j, k, d, k - j < PACK_COLUMNS ? k - j : PACK_COLUMNS, workspace + j * d);
        #pragma omp for schedule(static)
        for (int64_t partition = 0; partition < partitions; partition++) {
            int64_t first = tiles * partition / partitions * MR, end = tiles * (partition + 1) / partitions * MR;
            if (end > n) end = n;
            pack_slivers(grad_out + p * n + first, n, d, end - first, n - first, packed_grad_out);
            for (int64_t j = 0; j < k; j += 16)
                for (int64_t i = first; i < end; i += MR)
                    outer_product6x16(end - i < MR ? end - i : MR, packed_grad_out + (i - first) / MR * SLIVER_SIZE(d), workspace + j * d, d, p > 0,
                          grad_weight + i * k + j, k);
        }
    }
}
