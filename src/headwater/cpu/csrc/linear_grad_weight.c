/* The gradient of a linear layer's weight: dW [N, K] = dYᵀ · X, a sum over the M rows of dY [M, N] and X [M, K].

   M_BLOCK rows at a time: X is packed into panels of 16 columns (gemm.h), dY into slivers of MR, so that both are read as
   streams; the sums of a tile are added to dW after M_BLOCK rows. K and N are multiples of 16. */

#include "gemm.h"

#define SLIVER_SIZE(rows) (MR * (rows) + 16)                           /* with padding: slivers are written side by side */

/* Pack x [rows, columns] into slivers, one after another: MR numbers of each row, the last repeated if there are fewer. LANES
   are written where `safe` numbers of a row may be read, and those of the next row overwrite the extra ones. */
static void pack_slivers(const float *x, int64_t row_stride, int64_t rows, int64_t columns, int64_t safe, float *out) {
    for (int64_t i = 0; i < rows; i++, x += row_stride, out += MR) {
        int64_t j = 0;
        for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(x + PREFETCH_ROWS * row_stride + c);
        for (; j + MR <= columns && j + LANES <= safe; j += MR) *(vec *)(out + j / MR * SLIVER_SIZE(rows)) = *(const vec *)(x + j);
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
            for (int64_t j = 0; j < k; j += NR)
                for (int64_t i = first; i < end; i += MR) {
                    float *to = grad_weight + i * k + j;
                    gemm_tile(MR, end - i < MR ? end - i : MR, k - j, packed_grad_out + (i - first) / MR * SLIVER_SIZE(d), 1, MR, workspace + j * d, d, d,
                              p ? to : ZEROS, p ? k : 0, to, k);
                }
        }
    }
}
