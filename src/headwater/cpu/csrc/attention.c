/* Fused attention and its backward pass, with dropout; the scores exist a tile at a time.
   B batch, H heads, G key/value heads, Q queries, S keys, D head_dim. */

#include "simd.h"

/* Softmax without its division: x ← e^(x - max), in place; returns their sum, and the maximum in *max_value. n is a multiple of 8. */
static float exp_and_sum(float *x, int64_t n, float *max_value) {
    f32x8 partial_max = broadcast8(-INFINITY), sum = broadcast8(0), is_nan = broadcast8(0);
    for (int64_t j = 0; j < n; j += 8) {
        f32x8 here = *(f32x8 *)(x + j);
        partial_max = max8(partial_max, here);
        is_nan = (f32x8)((i32x8)is_nan | (here != here));              /* a comparison would let NaN slip through */
    }
    *max_value = reduce_sum8((f32x8)((i32x8)is_nan & (i32x8)broadcast8(1))) ? NAN : reduce_max8(partial_max);
    for (int64_t j = 0; j < n; j += 8) {
        f32x8 e = exp8(*(f32x8 *)(x + j) - *max_value);
        *(f32x8 *)(x + j) = e;
        sum += e;
    }
    return reduce_sum8(sum);
}

#define QUERY_BLOCK 48                                                 /* queries of a tile */
/* The stride of rows of scores is an odd number of cache lines: else a column of them would fall on a few lines of the cache. */
static inline int64_t score_stride(int64_t keys) { return (round_up16(keys) / 16 | 1) * 16; }

/* Queries are processed in spans, and spans in tiles; the keys of a span are packed once. Without a window there is one
   span. The keys of a span and of a tile begin at a multiple of 16, at or before the first visible one. */
typedef struct { int64_t first, num_queries, first_key, num_keys; } Tile;  /* queries first …, keys first_key … */

static inline int64_t span_queries(const AttentionParams *a) { return a->window ? round_up16(a->window > 512 ? a->window : 512) : a->queries; }
static inline int64_t span_keys(const AttentionParams *a) {            /* the maximum of any span */
    int64_t limit = span_queries(a) + a->window + 16;
    return a->window && limit < a->keys ? limit : a->keys;
}
static inline Tile make_tile(const AttentionParams *a, int64_t first, int64_t limit, int64_t end) {
    int64_t num_queries = end - first < limit ? end - first : limit, first_key = a->window && first >= a->window ? (first - a->window + 1) / 16 * 16 : 0;
    return (Tile){first, num_queries, first_key, (a->causal && first + num_queries < a->keys ? first + num_queries : a->keys) - first_key};
}

/* Scores [num_queries, num_keys] of a tile before the softmax; -inf where a key is not visible. k_transposed: from the tile's first key on */
static void tile_scores(const AttentionParams *a, int64_t b, int64_t h, Tile t, const float *q, int64_t position_stride, const float *k_transposed,
                      int64_t ld, float *scores) {
    int64_t padded_keys = round_up16(t.num_keys);
    gemm(t.num_queries, padded_keys, a->head_dim, q + t.first * position_stride, position_stride, 1, k_transposed, a->head_dim, scores, ld, 0);
    for (int64_t i = 0; i < t.num_queries; i++) {
        float *row = scores + i * ld;
        int64_t here = t.first + i + 1 - t.first_key;
        int64_t visible_end = a->causal && here < t.num_keys ? here : t.num_keys;
        int64_t visible_begin = a->window ? here - a->window : 0;
        for (int64_t j = 0; j < padded_keys; j += 8) *(f32x8 *)(row + j) *= a->scale;
        if (a->mask_type) {
            const int64_t *stride = a->mask_strides, at = b * stride[0] + h * stride[1] + (t.first + i) * stride[2] + t.first_key * stride[3];
            if (a->mask_type == MASK_BOOL) {
                const uint8_t *m = (const uint8_t *)a->mask + at;
                for (int64_t j = 0; j < visible_end; j++) row[j] = m[j * stride[3]] ? row[j] : -INFINITY;
            } else {
                const float *m = (const float *)a->mask + at;
                for (int64_t j = 0; j < visible_end; j++) row[j] += m[j * stride[3]];
            }
        }
        for (int64_t j = 0; j < visible_begin; j++) row[j] = -INFINITY;
        for (int64_t j = visible_end; j < padded_keys; j++) row[j] = -INFINITY;
    }
}

/* The index of a row's first weight in the dropout hash: rows begin at multiples of 16, so that vectors never straddle two. */
static inline uint64_t dropout_index(const AttentionParams *a, int64_t b, int64_t h, Tile t, int64_t i) {
    return (uint64_t)((b * a->heads + h) * a->queries + t.first + i) * (uint64_t)round_up16(a->keys) + (uint64_t)t.first_key;
}

/* out = dropout(softmax(scale · q kᵀ + mask)) v, and logsumexp [B, H, Q] of the scores for the backward pass. 0, or 1: out of memory. */
int attention_forward(AttentionParams a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs, float *out,
           Strides os, float *logsumexp) {
    int64_t ld = score_stride(span_keys(&a)), heads_per_group = a.heads / a.kv_heads, w = a.head_dim, span = span_queries(&a), failed = 0;
    #pragma omp parallel
    {
        float *workspace = malloc(sizeof(float) * (size_t)((2 * w + QUERY_BLOCK) * ld));
        float *k_transposed = workspace, *values = k_transposed + w * ld, *scores = values + w * ld;
        if (!workspace) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.batch * a.kv_heads; task++) {
            if (!workspace) continue;
            int64_t b = task / a.kv_heads, g = task % a.kv_heads;
            const float *key = k + b * ks.batch + g * ks.head, *value = v + b * vs.batch + g * vs.head;
            for (int64_t begin = 0; begin < a.queries; begin += span) {
                Tile all = make_tile(&a, begin, span, a.queries);
                pack_panels_transposed(key + all.first_key * ks.position, ks.position, all.num_keys, w, k_transposed);
                pack_panels(value + all.first_key * vs.position, vs.position, all.num_keys, w, values);
                for (int64_t h = g * heads_per_group; h < (g + 1) * heads_per_group; h++)
                    for (int64_t first = begin; first < begin + all.num_queries; first += QUERY_BLOCK) {
                        Tile t = make_tile(&a, first, QUERY_BLOCK, begin + all.num_queries);
                        int64_t skip = t.first_key - all.first_key;
                        tile_scores(&a, b, h, t, q + b * qs.batch + h * qs.head, qs.position, k_transposed + skip * w, ld, scores);
                        float *to = out + b * os.batch + h * os.head + first * os.position;
                        float *row_logsumexp = logsumexp + (b * a.heads + h) * a.queries + first;
                        for (int64_t i = 0; i < t.num_queries; i++) {
                            float row_max, *row = scores + i * ld, sum = exp_and_sum(row, round_up16(t.num_keys), &row_max);
                            float inv_sum = row_max == -INFINITY ? 0 : 1 / sum;
                            row_logsumexp[i] = row_max == -INFINITY ? INFINITY : row_max + logf(sum);  /* e^(x - inf) = 0: a row that sees nothing */
                            uint64_t index = dropout_index(&a, b, h, t, i);
                            for (int64_t j = 0; j < t.num_keys; j += 8)
                                *(f32x8 *)(row + j) = inv_sum == 0 ? broadcast8(0) : *(f32x8 *)(row + j) * inv_sum *
                                    (a.dropout.threshold ? keep_mask(&a.dropout, index + (uint64_t)j) : broadcast8(1));
                        }
                        gemm(t.num_queries, w, t.num_keys, scores, ld, 1, values + skip * 16, all.num_keys, to, os.position, 0);
                    }
            }
        }
        free(workspace);
    }
    return failed;
}

/* The backward pass. With P the weights, M the dropout, δ = rowsum(dout ∘ out):
   dv = (P∘M)ᵀ dout;  dS = P ∘ (M ∘ (dout vᵀ) - δ);  dq = scale · dS k;  dk = scale · dSᵀ q. */
int attention_backward(AttentionParams a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs,
                const float *out, const float *dout, Strides os, const float *logsumexp, float *dq, Strides dqs, float *dk,
                float *dv, Strides dks) {
    int64_t ld = score_stride(span_keys(&a)), heads_per_group = a.heads / a.kv_heads, w = a.head_dim, span = span_queries(&a), failed = 0;
    #pragma omp parallel
    {
        float *workspace = malloc(sizeof(float) * (size_t)((3 * w + 2 * QUERY_BLOCK) * ld + 2 * w * QUERY_BLOCK));
        float *k_transposed = workspace, *v_transposed = k_transposed + w * ld, *keys = v_transposed + w * ld, *p = keys + w * ld;
        float *ds = p + QUERY_BLOCK * ld, *queries = ds + QUERY_BLOCK * ld, *grad_out_panels = queries + w * QUERY_BLOCK;
        if (!workspace) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.batch * a.kv_heads; task++) {
            if (!workspace) continue;
            int64_t b = task / a.kv_heads, g = task % a.kv_heads;
            const float *key = k + b * ks.batch + g * ks.head, *value = v + b * vs.batch + g * vs.head;
            float *dk_head = dk + b * dks.batch + g * dks.head, *dv_head = dv + b * dks.batch + g * dks.head;
            for (int64_t s = 0; s < a.keys; s++) {
                memset(dk_head + s * dks.position, 0, sizeof(float) * (size_t)w);
                memset(dv_head + s * dks.position, 0, sizeof(float) * (size_t)w);
            }
            for (int64_t begin = 0; begin < a.queries; begin += span) {
                Tile all = make_tile(&a, begin, span, a.queries);
                pack_panels_transposed(key + all.first_key * ks.position, ks.position, all.num_keys, w, k_transposed);
                pack_panels_transposed(value + all.first_key * vs.position, vs.position, all.num_keys, w, v_transposed);
                pack_panels(key + all.first_key * ks.position, ks.position, all.num_keys, w, keys);
                for (int64_t h = g * heads_per_group; h < (g + 1) * heads_per_group; h++)
                    for (int64_t first = begin; first < begin + all.num_queries; first += QUERY_BLOCK) {
                        Tile t = make_tile(&a, first, QUERY_BLOCK, begin + all.num_queries);
                        int64_t skip = t.first_key - all.first_key;
                        const float *query = q + b * qs.batch + h * qs.head;
                        const float *grad_out_tile = dout + b * os.batch + h * os.head + first * os.position;
                        const float *out_tile = out + b * os.batch + h * os.head + first * os.position;
                        const float *row_logsumexp = logsumexp + (b * a.heads + h) * a.queries + first;
                        tile_scores(&a, b, h, t, query, qs.position, k_transposed + skip * w, ld, p);
                        gemm(t.num_queries, round_up16(t.num_keys), w, grad_out_tile, os.position, 1, v_transposed + skip * w, w, ds, ld, 0);
                        pack_panels(query + first * qs.position, qs.position, t.num_queries, w, queries);
                        pack_panels(grad_out_tile, os.position, t.num_queries, w, grad_out_panels);
                        for (int64_t i = 0; i < t.num_queries; i++) {
                            float *row = p + i * ld, *ds_row = ds + i * ld;
                            f32x8 dot = broadcast8(0);
                            for (int64_t d = 0; d < w; d += 8) dot += *(const f32x8 *)(grad_out_tile + i * os.position + d) * *(const f32x8 *)(out_tile + i * os.position + d);
                            float delta = reduce_sum8(dot);
                            uint64_t index = dropout_index(&a, b, h, t, i);
                            for (int64_t j = 0; j < t.num_keys; j += 8) {
                                f32x8 weight = exp8(*(f32x8 *)(row + j) - row_logsumexp[i]);
                                f32x8 keep = a.dropout.threshold ? keep_mask(&a.dropout, index + (uint64_t)j) : broadcast8(1);
                                *(f32x8 *)(row + j) = weight * keep;
                                *(f32x8 *)(ds_row + j) = weight * (*(f32x8 *)(ds_row + j) * keep - delta) * a.scale;
                            }
                        }
                        gemm(t.num_keys, w, t.num_queries, p, 1, ld, grad_out_panels, t.num_queries, dv_head + t.first_key * dks.position, dks.position, 1);
                        gemm(t.num_keys, w, t.num_queries, ds, 1, ld, queries, t.num_queries, dk_head + t.first_key * dks.position, dks.position, 1);
                        gemm(t.num_queries, w, t.num_keys, ds, ld, 1, keys + skip * 16, all.num_keys, dq + b * dqs.batch + h * dqs.head + first * dqs.position, dqs.position, 0);
                    }
            }
        }
        free(workspace);
    }
    return failed;
}
