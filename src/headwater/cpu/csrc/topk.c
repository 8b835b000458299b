/* The best tokens of each row of logits, and the logarithm of the sum of their exponentials. */

#include "quant_formats.h"

/* Top-k: of each row of logits [n][vocab] the `count` largest with their ids, largest first, and logsumexp. Of equals, the first. */
void topk_logprobs(const float *logits, int n, int vocab, int count, float *values, int32_t *ids, float *logsumexp, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int i = 0; i < n; i++) {
        const float *row = logits + (size_t)i * vocab;
        float *value = values + (size_t)i * count, total = 0;
        int32_t *id = ids + (size_t)i * count;
        for (int j = 0; j < count; j++) value[j] = -INFINITY, id[j] = 0;
        for (int from = 0; from < vocab; from += 64) {
            int to = from + 64 < vocab ? from + 64 : vocab;
            float block_max = row[from];
            for (int j = from; j < to; j++) block_max = row[j] > block_max ? row[j] : block_max;
            if (block_max <= value[count - 1]) continue;  /* none of these 64 */
            for (int j = from; j < to; j++) {
                int at = count;
                while (at && row[j] > value[at - 1]) at--;
                if (at == count) continue;
                memmove(value + at + 1, value + at, sizeof(float) * (count - 1 - at));
                memmove(id + at + 1, id + at, sizeof(int32_t) * (count - 1 - at));
                value[at] = row[j], id[at] = j;
            }
        }
        for (int j = 0; j < vocab; j++) total += fast_exp(row[j] - value[0]);
        logsumexp[i] = value[0] + logf(total);
    }
}
