/* Dropout with nothing stored: whether a number is dropped is a hash of its index, asked again on the way back. */

#include "vector.h"

/* out = x + y · kept; without x: out = y · kept. Also the way back: what comes from above is y. */
void drop_add(const float *x, const float *y, float *out, int64_t n, Drop drop) {
    #pragma omp parallel for schedule(static) if (n > 2 * PIECE)
    for (int64_t begin = 0; begin < n; begin += PIECE) {
        int64_t end = begin + PIECE < n ? begin + PIECE : n, i = begin;
        for (; i + 8 <= end; i += 8) {
            v8 dropped = *(const v8 *)(y + i) * kept(&drop, (uint64_t)i);
            *(v8 *)(out + i) = x ? *(const v8 *)(x + i) + dropped : dropped;
        }
        v8 last = kept(&drop, (uint64_t)i);
        for (int j = 0; i + j < end; j++) out[i + j] = (x ? x[i + j] : 0) + y[i + j] * last[j];
    }
}
