/* Cross-entropy over a vocabulary and its slope, each row while it is in the cache. N rows, V vocabulary. */

#include "vector.h"

/* Cross-entropy of each row of scores [N, V] with its label, and its slope in the memory of the scores:
   loss = Σ (1 - ε)·(-log p[label]) + ε·mean(-log p);  slope = p - (1 - ε)·onehot(label) - ε/V.
   losses [N] is scratch: they are added up in their order, whatever the number of threads. */
double slope_of_loss(float *scores, const int64_t *labels, int64_t rows, int64_t vocab, float smoothing, double *losses) {
    double total = 0;
    #pragma omp parallel for schedule(static) if (rows * vocab > 2 * PIECE)
    for (int64_t i = 0; i < rows; i++) {
        float *row = scores + i * vocab, most = -INFINITY, chosen = row[labels[i]];
        int64_t j, even = vocab / 8 * 8;
        double all = 0;
        v8 some = all8(0), top = all8(-INFINITY);
        for (j = 0; j < even; j += 8) { v8 x = *(v8 *)(row + j); some += x; top = max8(top, x); }
        most = most8(top); all = sum8(some);
        for (; j < vocab; j++) { most = row[j] > most ? row[j] : most; all += row[j]; }
        some = all8(0);
        for (j = 0; j < even; j += 8) { v8 e = exp8(*(v8 *)(row + j) - most); *(v8 *)(row + j) = e; some += e; }
        double sum = sum8(some);
        for (; j < vocab; j++) { row[j] = expf(row[j] - most); sum += row[j]; }
        double even_share = smoothing / (double)vocab, below = (double)most - chosen;      /* differences: nothing cancels */
        losses[i] = log(sum) + (1 - smoothing) * below + (smoothing ? even_share * ((double)most * vocab - all) : 0);
        float by = (float)(1 / sum), less = (float)even_share;
        for (j = 0; j < even; j += 8) *(v8 *)(row + j) = *(v8 *)(row + j) * by - less;
        for (; j < vocab; j++) row[j] = row[j] * by - less;
        row[labels[i]] -= 1 - smoothing;
    }
    for (int64_t i = 0; i < rows; i++) total += losses[i];
    return total;
}
