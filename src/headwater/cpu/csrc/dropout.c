/* Dropout without a stored mask: whether an element is dropped is a hash of its index, recomputed in the backward pass. */

#include "simd.h"

/* out = x + y · keep_mask; without x: out = y · keep_mask, which is also the backward pass, with y the gradient. */
void dropout_add(const float *x, const float *y, float *out, int64_t n, DropoutKey dropout) {
    #pragma omp parallel for schedule(static) if (n > 2 * CHUNK_SIZE)
    for (int64_t begin = 0; begin < n; begin += CHUNK_SIZE) {
        int64_t end = begin + CHUNK_SIZE < n ? begin + CHUNK_SIZE : n, i = begin;
        for (; i + 8 <= end; i += 8) {
            f32x8 dropped = *(const f32x8 *)(y + i) * keep_mask(&dropout, (uint64_t)i);
            *(f32x8 *)(out + i) = x ? *(const f32x8 *)(x + i) + dropped : dropped;
        }
        f32x8 last = keep_mask(&dropout, (uint64_t)i);
        for (int j = 0; i + j < end; j++) out[i + j] = (x ? x[i + j] : 0) + y[i + j] * last[j];
    }
}
