/* Cross-entropy over a vocabulary and its gradient, in one pass while a row is in the cache. N rows, V vocabulary. */

#include "simd.h"

/* Cross-entropy of each row of logits [N, V] with its label, with label smoothing ε; the gradient replaces the logits:
   loss = Σ (1 - ε)·(-log p[label]) + ε·mean(-log p);  gradient = p - (1 - ε)·onehot(label) - ε/V.
   losses [N] is scratch: they are added up in order, whatever the number of threads. */
double cross_entropy_grad(float *logits, const int64_t *labels, int64_t rows, int64_t vocab, float label_smoothing, double *losses) {
    double total = 0;
    #pragma omp parallel for schedule(static) if (rows * vocab > 2 * CHUNK_SIZE)
    for (int64_t i = 0; i < rows; i++) {
        float *row = logits + i * vocab, row_max = -INFINITY, target_logit = row[labels[i]];
        int64_t j, vector_end = vocab / 8 * 8;
        double logit_sum = 0;
        f32x8 partial_sums = broadcast8(0), partial_max = broadcast8(-INFINITY);
        for (j = 0; j < vector_end; j += 8) { f32x8 x = *(f32x8 *)(row + j); partial_sums += x; partial_max = max8(partial_max, x); }
        row_max = reduce_max8(partial_max); logit_sum = reduce_sum8(partial_sums);
        for (; j < vocab; j++) { row_max = row[j] > row_max ? row[j] : row_max; logit_sum += row[j]; }
        partial_sums = broadcast8(0);
        for (j = 0; j < vector_end; j += 8) { f32x8 e = exp8(*(f32x8 *)(row + j) - row_max); *(f32x8 *)(row + j) = e; partial_sums += e; }
        double sum = reduce_sum8(partial_sums);
        for (; j < vocab; j++) { row[j] = expf(row[j] - row_max); sum += row[j]; }
        double smoothing_per_class = label_smoothing / (double)vocab;
        double max_minus_target = (double)row_max - target_logit;  /* differences: nothing cancels */
        losses[i] = log(sum) + (1 - label_smoothing) * max_minus_target + (label_smoothing ? smoothing_per_class * ((double)row_max * vocab - logit_sum) : 0);
        float inv_sum = (float)(1 / sum), smoothing_term = (float)smoothing_per_class;
        for (j = 0; j < vector_end; j += 8) *(f32x8 *)(row + j) = *(f32x8 *)(row + j) * inv_sum - smoothing_term;
        for (; j < vocab; j++) row[j] = row[j] * inv_sum - smoothing_term;
        row[labels[i]] -= 1 - label_smoothing;
    }
    for (int64_t i = 0; i < rows; i++) total += losses[i];
    return total;
}
