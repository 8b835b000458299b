/* Attention and its way back with dropout inside; no matrix of scores larger than a tile exists.
   B batch, H heads, G key/value heads, Q queries, S keys, D head width. */

#include "vector.h"

/* x ← e^(x - its largest); their sum; the largest goes to *largest. n is a multiple of 8. */
static float exps(float *x, int64_t n, float *largest) {
    v8 most = all8(-INFINITY), sum = all8(0), none = all8(0);
    for (int64_t j = 0; j < n; j += 8) {
        v8 here = *(v8 *)(x + j);
        most = max8(most, here);
        none = (v8)((i8)none | (here != here));                       /* a comparison would let NaN slip through */
    }
    *largest = sum8((v8)((i8)none & (i8)all8(1))) ? NAN : most8(most);
    for (int64_t j = 0; j < n; j += 8) {
        v8 e = exp8(*(v8 *)(x + j) - *largest);
        *(v8 *)(x + j) = e;
        sum += e;
    }
    return sum8(sum);
}

typedef struct { int64_t batch, head, place; } Strides;               /* of [B, H, S, D] with D side by side */
typedef struct {
    int64_t batch, heads, groups, queries, keys, width;               /* groups: key/value heads */
    float scale;
    int32_t causal, masked;                                            /* masked: 0 no, 1 bool, 2 float to add */
    const void *mask;
    int64_t mask_strides[4];                                           /* over B, H, Q, S */
    Drop drop;                                                         /* threshold 0: nothing is dropped */
} Attention;

#define TALL 48                                                        /* queries worked on at a time */
/* rows of scores lie an odd number of cache lines apart: else a column of them would fall on a few lines of the cache */
static inline int64_t apart(int64_t keys) { return (up16(keys) / 16 | 1) * 16; }

/* scores [rows, seen] of the queries from `first` on, before the softmax; -inf where nothing may be seen */
static void scores_of(const Attention *a, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t seen,
                      const float *q, int64_t by_place, const float *k_turned, int64_t ld, float *scores) {
    product(rows, up16(seen), a->width, q + first * by_place, by_place, 1, k_turned, a->width, scores, ld, 0);
    for (int64_t i = 0; i < rows; i++) {
        float *row = scores + i * ld;
        int64_t mine = a->causal && first + i + 1 < seen ? first + i + 1 : seen, wide = up16(seen);
        for (int64_t j = 0; j < wide; j += 8) *(v8 *)(row + j) *= a->scale;
        if (a->masked) {
            int64_t at = b * a->mask_strides[0] + h * a->mask_strides[1] + (first + i) * a->mask_strides[2], by = a->mask_strides[3];
            if (a->masked == 1) { const uint8_t *m = (const uint8_t *)a->mask + at; for (int64_t j = 0; j < mine; j++) row[j] = m[j * by] ? row[j] : -INFINITY; }
            else { const float *m = (const float *)a->mask + at; for (int64_t j = 0; j < mine; j++) row[j] += m[j * by]; }
        }
        for (int64_t j = mine; j < wide; j++) row[j] = -INFINITY;
    }
}

/* the first of the indices that the hash is asked for: rows begin at multiples of 8, so that lanes never straddle */
static inline uint64_t index_of(const Attention *a, int64_t b, int64_t h, int64_t i) {
    return (uint64_t)((b * a->heads + h) * a->queries + i) * (uint64_t)up16(a->keys);
}

/* out = dropout(softmax(scale · q kᵀ + mask)) v, and log Σ e^score of every row [B, H, Q] for the way back */
int attend(Attention a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs, float *out,
           Strides os, float *log_sums) {
    int64_t ld = apart(a.keys), each = a.heads / a.groups, w = a.width, failed = 0;
    #pragma omp parallel
    {
        float *room = malloc(sizeof(float) * (size_t)((2 * w + TALL) * ld));
        float *k_turned = room, *values = k_turned + w * ld, *scores = values + w * ld;
        if (!room) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.batch * a.groups; task++) {
            if (!room) continue;
            int64_t b = task / a.groups, g = task % a.groups;
            turned_panels(k + b * ks.batch + g * ks.head, ks.place, a.keys, w, k_turned);
            panels(v + b * vs.batch + g * vs.head, vs.place, a.keys, w, values);
            for (int64_t h = g * each; h < (g + 1) * each; h++)
                for (int64_t first = 0; first < a.queries; first += TALL) {
                    int64_t rows = a.queries - first < TALL ? a.queries - first : TALL;
                    int64_t seen = a.causal && first + rows < a.keys ? first + rows : a.keys;
                    scores_of(&a, b, h, first, rows, seen, q + b * qs.batch + h * qs.head, qs.place, k_turned, ld, scores);
                    float *to = out + b * os.batch + h * os.head + first * os.place, *sums = log_sums + (b * a.heads + h) * a.queries + first;
                    for (int64_t i = 0; i < rows; i++) {
                        float most, *row = scores + i * ld, sum = exps(row, up16(seen), &most), by = most == -INFINITY ? 0 : 1 / sum;
                        sums[i] = most == -INFINITY ? INFINITY : most + logf(sum);     /* e^(x - inf) = 0: a row that sees nothing */
                        uint64_t index = index_of(&a, b, h, first + i);
                        for (int64_t j = 0; j < seen; j += 8)
                            *(v8 *)(row + j) = by == 0 ? all8(0) : *(v8 *)(row + j) * by * (a.drop.threshold ? kept(&a.drop, index + (uint64_t)j) : all8(1));
                    }
                    product(rows, w, seen, scores, ld, 1, values, a.keys, to, os.place, 0);
                }
        }
        free(room);
    }
    return failed;
}

/* The way back. With P the weights, M the dropout, δ = rowsum(dout ∘ out):
   dv = (P∘M)ᵀ dout;  dS = P ∘ (M ∘ (dout vᵀ) - δ);  dq = scale · dS k;  dk = scale · dSᵀ q. */
int attend_back(Attention a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs,
                const float *out, const float *dout, Strides os, const float *log_sums, float *dq, Strides dqs, float *dk,
                float *dv, Strides dks) {
    int64_t ld = apart(a.keys), each = a.heads / a.groups, w = a.width, failed = 0;
    #pragma omp parallel
    {
        float *room = malloc(sizeof(float) * (size_t)((3 * w + 2 * TALL) * ld + 2 * w * TALL));
        float *k_turned = room, *v_turned = k_turned + w * ld, *keys = v_turned + w * ld, *p = keys + w * ld;
        float *ds = p + TALL * ld, *queries = ds + TALL * ld, *slopes = queries + w * TALL;
        if (!room) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.batch * a.groups; task++) {
            if (!room) continue;
            int64_t b = task / a.groups, g = task % a.groups;
            float *to_k = dk + b * dks.batch + g * dks.head, *to_v = dv + b * dks.batch + g * dks.head;
            turned_panels(k + b * ks.batch + g * ks.head, ks.place, a.keys, w, k_turned);
            turned_panels(v + b * vs.batch + g * vs.head, vs.place, a.keys, w, v_turned);
            panels(k + b * ks.batch + g * ks.head, ks.place, a.keys, w, keys);
            for (int64_t s = 0; s < a.keys; s++) {
                memset(to_k + s * dks.place, 0, sizeof(float) * (size_t)w);
                memset(to_v + s * dks.place, 0, sizeof(float) * (size_t)w);
            }
            for (int64_t h = g * each; h < (g + 1) * each; h++)
                for (int64_t first = 0; first < a.queries; first += TALL) {
                    int64_t rows = a.queries - first < TALL ? a.queries - first : TALL;
                    int64_t seen = a.causal && first + rows < a.keys ? first + rows : a.keys;
                    const float *query = q + b * qs.batch + h * qs.head, *above = dout + b * os.batch + h * os.head + first * os.place;
                    const float *said = out + b * os.batch + h * os.head + first * os.place, *sums = log_sums + (b * a.heads + h) * a.queries + first;
                    scores_of(&a, b, h, first, rows, seen, query, qs.place, k_turned, ld, p);
                    product(rows, up16(seen), w, above, os.place, 1, v_turned, w, ds, ld, 0);
                    panels(query + first * qs.place, qs.place, rows, w, queries);
                    panels(above, os.place, rows, w, slopes);
                    for (int64_t i = 0; i < rows; i++) {
                        float *row = p + i * ld, *slope = ds + i * ld;
                        v8 dot = all8(0);
                        for (int64_t d = 0; d < w; d += 8) dot += *(const v8 *)(above + i * os.place + d) * *(const v8 *)(said + i * os.place + d);
                        float delta = sum8(dot);
                        uint64_t index = index_of(&a, b, h, first + i);
                        for (int64_t j = 0; j < seen; j += 8) {
                            v8 weight = exp8(*(v8 *)(row + j) - sums[i]), keep = a.drop.threshold ? kept(&a.drop, index + (uint64_t)j) : all8(1);
                            *(v8 *)(row + j) = weight * keep;
                            *(v8 *)(slope + j) = weight * (*(v8 *)(slope + j) * keep - delta) * a.scale;
                        }
                    }
                    product(seen, w, rows, p, 1, ld, slopes, rows, to_v, dks.place, 1);
                    product(seen, w, rows, ds, 1, ld, queries, rows, to_k, dks.place, 1);
                    product(rows, w, seen, ds, ld, 1, keys, a.keys, dq + b * dqs.batch + h * dqs.head + first * dqs.place, dqs.place, 0);
                }
        }
        free(room);
    }
    return failed;
}
