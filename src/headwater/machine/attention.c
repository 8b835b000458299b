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
    int64_t window;                                                    /* keys up to its own place that a query sees; 0: all */
    const void *mask;
    int64_t mask_strides[4];                                           /* over B, H, Q, S */
    Drop drop;                                                         /* threshold 0: nothing is dropped */
} Attention;

#define TALL 48                                                        /* queries worked on at a time */
/* rows of scores lie an odd number of cache lines apart: else a column of them would fall on a few lines of the cache */
static inline int64_t apart(int64_t keys) { return (up16(keys) / 16 | 1) * 16; }

/* Queries are worked off in spans, and those in tiles; a span's keys are laid out once. Without a window there is one
   span. The keys of a span and of a tile begin at a multiple of 16, at or before the first that is seen. */
typedef struct { int64_t first, rows, from, seen; } Part;              /* queries first, …; keys from, …, `seen` of them */

static inline int64_t span_of(const Attention *a) { return a->window ? up16(a->window > 512 ? a->window : 512) : a->queries; }
static inline int64_t keys_of(const Attention *a) {                   /* the most a span has */
    int64_t most = span_of(a) + a->window + 16;
    return a->window && most < a->keys ? most : a->keys;
}
static inline Part part(const Attention *a, int64_t first, int64_t most, int64_t end) {
    int64_t rows = end - first < most ? end - first : most, from = a->window && first >= a->window ? (first - a->window + 1) / 16 * 16 : 0;
    return (Part){first, rows, from, (a->causal && first + rows < a->keys ? first + rows : a->keys) - from};
}

/* scores [rows, seen] of a tile, before the softmax; -inf where nothing may be seen. k_turned: from the tile's first key on */
static void scores_of(const Attention *a, int64_t b, int64_t h, Part t, const float *q, int64_t by_place, const float *k_turned,
                      int64_t ld, float *scores) {
    int64_t wide = up16(t.seen);
    product(t.rows, wide, a->width, q + t.first * by_place, by_place, 1, k_turned, a->width, scores, ld, 0);
    for (int64_t i = 0; i < t.rows; i++) {
        float *row = scores + i * ld;
        int64_t here = t.first + i + 1 - t.from, mine = a->causal && here < t.seen ? here : t.seen, lost = a->window ? here - a->window : 0;
        for (int64_t j = 0; j < wide; j += 8) *(v8 *)(row + j) *= a->scale;
        if (a->masked) {
            const int64_t *by = a->mask_strides, at = b * by[0] + h * by[1] + (t.first + i) * by[2] + t.from * by[3];
            if (a->masked == 1) { const uint8_t *m = (const uint8_t *)a->mask + at; for (int64_t j = 0; j < mine; j++) row[j] = m[j * by[3]] ? row[j] : -INFINITY; }
            else { const float *m = (const float *)a->mask + at; for (int64_t j = 0; j < mine; j++) row[j] += m[j * by[3]]; }
        }
        for (int64_t j = 0; j < lost; j++) row[j] = -INFINITY;
        for (int64_t j = mine; j < wide; j++) row[j] = -INFINITY;
    }
}

/* the first of the indices that the hash is asked for: rows begin at multiples of 8, so that lanes never straddle */
static inline uint64_t index_of(const Attention *a, int64_t b, int64_t h, Part t, int64_t i) {
    return (uint64_t)((b * a->heads + h) * a->queries + t.first + i) * (uint64_t)up16(a->keys) + (uint64_t)t.from;
}

/* out = dropout(softmax(scale · q kᵀ + mask)) v, and log Σ e^score of every row [B, H, Q] for the way back */
int attend(Attention a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs, float *out,
           Strides os, float *log_sums) {
    int64_t ld = apart(keys_of(&a)), each = a.heads / a.groups, w = a.width, span = span_of(&a), failed = 0;
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
            const float *key = k + b * ks.batch + g * ks.head, *value = v + b * vs.batch + g * vs.head;
            for (int64_t begin = 0; begin < a.queries; begin += span) {
                Part all = part(&a, begin, span, a.queries);
                turned_panels(key + all.from * ks.place, ks.place, all.seen, w, k_turned);
                panels(value + all.from * vs.place, vs.place, all.seen, w, values);
                for (int64_t h = g * each; h < (g + 1) * each; h++)
                    for (int64_t first = begin; first < begin + all.rows; first += TALL) {
                        Part t = part(&a, first, TALL, begin + all.rows);
                        int64_t skip = t.from - all.from;
                        scores_of(&a, b, h, t, q + b * qs.batch + h * qs.head, qs.place, k_turned + skip * w, ld, scores);
                        float *to = out + b * os.batch + h * os.head + first * os.place, *sums = log_sums + (b * a.heads + h) * a.queries + first;
                        for (int64_t i = 0; i < t.rows; i++) {
                            float most, *row = scores + i * ld, sum = exps(row, up16(t.seen), &most), by = most == -INFINITY ? 0 : 1 / sum;
                            sums[i] = most == -INFINITY ? INFINITY : most + logf(sum);     /* e^(x - inf) = 0: a row that sees nothing */
                            uint64_t index = index_of(&a, b, h, t, i);
                            for (int64_t j = 0; j < t.seen; j += 8)
                                *(v8 *)(row + j) = by == 0 ? all8(0) : *(v8 *)(row + j) * by * (a.drop.threshold ? kept(&a.drop, index + (uint64_t)j) : all8(1));
                        }
                        product(t.rows, w, t.seen, scores, ld, 1, values + skip * 16, all.seen, to, os.place, 0);
                    }
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
    int64_t ld = apart(keys_of(&a)), each = a.heads / a.groups, w = a.width, span = span_of(&a), failed = 0;
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
            const float *key = k + b * ks.batch + g * ks.head, *value = v + b * vs.batch + g * vs.head;
            float *to_k = dk + b * dks.batch + g * dks.head, *to_v = dv + b * dks.batch + g * dks.head;
            for (int64_t s = 0; s < a.keys; s++) {
                memset(to_k + s * dks.place, 0, sizeof(float) * (size_t)w);
                memset(to_v + s * dks.place, 0, sizeof(float) * (size_t)w);
            }
            for (int64_t begin = 0; begin < a.queries; begin += span) {
                Part all = part(&a, begin, span, a.queries);
                turned_panels(key + all.from * ks.place, ks.place, all.seen, w, k_turned);
                turned_panels(value + all.from * vs.place, vs.place, all.seen, w, v_turned);
                panels(key + all.from * ks.place, ks.place, all.seen, w, keys);
                for (int64_t h = g * each; h < (g + 1) * each; h++)
                    for (int64_t first = begin; first < begin + all.rows; first += TALL) {
                        Part t = part(&a, first, TALL, begin + all.rows);
                        int64_t skip = t.from - all.from;
                        const float *query = q + b * qs.batch + h * qs.head, *above = dout + b * os.batch + h * os.head + first * os.place;
                        const float *said = out + b * os.batch + h * os.head + first * os.place, *sums = log_sums + (b * a.heads + h) * a.queries + first;
                        scores_of(&a, b, h, t, query, qs.place, k_turned + skip * w, ld, p);
                        product(t.rows, up16(t.seen), w, above, os.place, 1, v_turned + skip * w, w, ds, ld, 0);
                        panels(query + first * qs.place, qs.place, t.rows, w, queries);
                        panels(above, os.place, t.rows, w, slopes);
                        for (int64_t i = 0; i < t.rows; i++) {
                            float *row = p + i * ld, *slope = ds + i * ld;
                            v8 dot = all8(0);
                            for (int64_t d = 0; d < w; d += 8) dot += *(const v8 *)(above + i * os.place + d) * *(const v8 *)(said + i * os.place + d);
                            float delta = sum8(dot);
                            uint64_t index = index_of(&a, b, h, t, i);
                            for (int64_t j = 0; j < t.seen; j += 8) {
                                v8 weight = exp8(*(v8 *)(row + j) - sums[i]), keep = a.drop.threshold ? kept(&a.drop, index + (uint64_t)j) : all8(1);
                                *(v8 *)(row + j) = weight * keep;
                                *(v8 *)(slope + j) = weight * (*(v8 *)(slope + j) * keep - delta) * a.scale;
                            }
                        }
                        product(t.seen, w, t.rows, p, 1, ld, slopes, t.rows, to_v + t.from * dks.place, dks.place, 1);
                        product(t.seen, w, t.rows, ds, 1, ld, queries, t.rows, to_k + t.from * dks.place, dks.place, 1);
                        product(t.rows, w, t.seen, ds, ld, 1, keys + skip * 16, all.seen, dq + b * dqs.batch + h * dqs.head + first * dqs.place, dqs.place, 0);
                    }
            }
        }
        free(room);
    }
    return failed;
}
