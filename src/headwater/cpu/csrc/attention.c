/* Fused attention and its backward pass: softmax attention over the keys of a band (all keys, at its widest), over leading
   keys that every query sees, and over random blocks of keys, with dropout; the scores exist a tile at a time.
   B batch, H heads, G key/value heads, Q queries, S keys, D head_dim, L leading keys, R random blocks. */

#include "attention_tiles.h"

/* Scores of a tile before the softmax, for the keys of all groups side by side; -inf where a key is not visible. */
static int64_t tile_scores(const AttentionParams *a, Workspace *ws, const KeyGroup *groups, Tile t, const float *q, int64_t q_stride) {
    int64_t w = a->head_dim, columns = 0;
    for (int64_t i = 0; i < t.num_queries; i++)
        for (int64_t d = 0; d < w; d += 8) *(f32x8 *)(ws->queries + i * w + d) = *(const f32x8 *)(q + (t.first + i) * q_stride + d) * a->scale;
    for (int kind = 0; kind < GROUPS; kind++) {
        const KeyGroup *g = groups + kind;
        if (!g->num_keys) continue;
        columns = g->first_column + round_up16(g->num_keys);
        gemm(t.num_queries, round_up16(g->num_keys), w, ws->queries, w, 1, g->k_transposed, w, ws->scores + g->first_column, ws->ld, 0);
        for (int64_t i = 0; i < t.num_queries; i++) {
            float *row = ws->scores + i * ws->ld + g->first_column;
            if (kind == LEADING) mask_leading(a, t.b, t.h, t.first + i, g, row);
            else if (kind == RANDOM) mask_random(a, t.b, t.first + i, g, row);
            else mask_banded(a, t, t.first + i, g, row);
        }
    }
    return columns;
}

/* Softmax without its division: x ← e^(x - max), in place; returns their sum, and the maximum in *max_value. n is a multiple of 8. */
static float exp_and_sum(float *x, int64_t n, float *max_value) {
    f32x8 partial_max = broadcast8(-INFINITY), sum = broadcast8(0), is_nan = broadcast8(0);
    for (int64_t j = 0; j < n; j += 8) {
        f32x8 here = *(f32x8 *)(x + j);
        partial_max = max8(partial_max, here);
        is_nan = (f32x8)((i32x8)is_nan | (here != here));              /* a comparison would let NaN slip through */
    }
    *max_value = reduce_sum8((f32x8)((i32x8)is_nan & (i32x8)broadcast8(1))) ? NAN : reduce_max8(partial_max);
    float shift = *max_value == -INFINITY ? 0 : *max_value;            /* a row that sees nothing: all its e^x are 0 */
    for (int64_t j = 0; j < n; j += 8) {
        f32x8 e = exp8(*(f32x8 *)(x + j) - shift);
        *(f32x8 *)(x + j) = e;
        sum += e;
    }
    return reduce_sum8(sum);
}

/* The dropout mask of eight weights of row i from key j of a group on. Rows begin at multiples of 16 in the hash, and blocks
   at multiples of 8: vectors never straddle two. */
static inline f32x8 keep_weights(const AttentionParams *a, Tile t, int64_t i, const KeyGroup *g, int64_t j) {
    uint64_t row = (uint64_t)((t.b * a->heads + t.h) * a->queries + t.first + i) * (uint64_t)(leading_columns(a) + round_up16(a->keys));
    int64_t key = g->numbers ? g->numbers[j / a->block] * a->block + j % a->block : j;
    return keep_mask(&a->dropout, row + (uint64_t)(g->first_index + key));
}

/* --------------------------------------------------------------------------------------------------------------- forward */

/* out of one tile, and the logsumexp of its rows. */
static void forward_tile(const AttentionParams *a, Workspace *ws, const KeyGroup *groups, Tile t, const float *q, int64_t q_stride,
                         float *out, int64_t out_stride, float *logsumexp) {
    int64_t w = a->head_dim, columns = tile_scores(a, ws, groups, t, q, q_stride);
    float inv_sum[QUERY_BLOCK];
    for (int64_t i = 0; i < t.num_queries; i++) {
        float row_max, *row = ws->scores + i * ws->ld, sum = exp_and_sum(row, columns, &row_max);
        inv_sum[i] = row_max == -INFINITY ? 0 : 1 / sum;
        logsumexp[i] = row_max == -INFINITY ? INFINITY : row_max + logf(sum);  /* e^(x - inf) = 0: a row that sees nothing */
        for (int kind = 0; a->dropout.threshold && kind < GROUPS; kind++) {
            const KeyGroup *g = groups + kind;
            for (int64_t j = 0; j < g->num_keys; j += 8) *(f32x8 *)(row + g->first_column + j) *= keep_weights(a, t, i, g, j);
        }
    }
    int accumulate = 0;
    for (int kind = 0; kind < GROUPS; kind++) {
        const KeyGroup *g = groups + kind;
        if (!g->num_keys) continue;
        gemm(t.num_queries, w, g->num_keys, ws->scores + g->first_column, ws->ld, 1, g->values, g->panel_rows, out, out_stride, accumulate);
        accumulate = 1;
    }
    for (int64_t i = 0; i < t.num_queries; i++)
        for (int64_t d = 0; d < w; d += 8) *(f32x8 *)(out + i * out_stride + d) *= inv_sum[i];
}

/* out = dropout(softmax(scale · q kᵀ + bias)) v, and logsumexp [B, H, Q] of the scores for the backward pass.
   0, or 1: out of memory. */
int attention_forward(AttentionParams a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs,
                      const float *leading_k, Strides lks, const float *leading_v, Strides lvs, float *out, Strides os, float *logsumexp) {
    int64_t w = a.head_dim, heads_per_group = a.heads / a.kv_heads, span = span_queries(&a), failed = 0;
    int64_t spans = (a.queries + span - 1) / span;
    #pragma omp parallel
    {
        Workspace ws = {0};
        int ready = make_workspace(&a, 0, &ws);
        if (!ready) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.batch * a.kv_heads * spans; task++) {
            if (!ready) continue;
            int64_t b = task / spans / a.kv_heads, g = task / spans % a.kv_heads, begin = task % spans * span;
            const float *key = k + b * ks.batch + g * ks.head, *value = v + b * vs.batch + g * vs.head;
            if (a.leading_keys) {
                pack_keys(ws.groups + LEADING, leading_k + b * lks.batch + g * lks.head, lks.position, a.leading_keys, w);
                pack_values(ws.groups + LEADING, leading_v + b * lvs.batch + g * lvs.head, lvs.position, a.leading_keys, w);
            }
            Tile all = make_tile(&a, b, 0, begin, min_of(begin + span, a.queries));
            pack_keys(ws.groups + BANDED, key + all.first_key * ks.position, ks.position, all.num_keys, w);
            pack_values(ws.groups + BANDED, value + all.first_key * vs.position, vs.position, all.num_keys, w);
            for (int64_t h = g * heads_per_group; h < (g + 1) * heads_per_group; h++)
                for (int64_t first = begin, end; first < begin + all.num_queries; first = end) {
                    end = tile_end(&a, first, begin + all.num_queries);
                    Tile t = make_tile(&a, b, h, first, end);
                    if (a.random_blocks && (first == begin || first % a.block == 0)) pack_random(&a, &ws, t, key, ks.position, value, vs.position);
                    KeyGroup groups[GROUPS] = {ws.groups[LEADING], ws.groups[RANDOM], tile_group(&a, ws.groups + BANDED, all, t)};
                    forward_tile(&a, &ws, groups, t, q + b * qs.batch + h * qs.head, qs.position,
                                 out + b * os.batch + h * os.head + first * os.position, os.position, logsumexp + (b * a.heads + h) * a.queries + first);
                }
        }
        free(ws.memory);
    }
    return failed;
}

/* -------------------------------------------------------------------------------------------------------------- backward */

typedef struct { float *data; int64_t stride; } Rows;                  /* of one head, [S, D] */

/* Weights (P∘M) and the gradient of the scores dS = P ∘ (M ∘ (dout vᵀ) - δ) of a tile, in ws->scores and ws->grad_scores. */
static void tile_gradients(const AttentionParams *a, Workspace *ws, const KeyGroup *groups, Tile t, const float *grad_out, const float *out,
                           int64_t out_stride, const float *logsumexp, float *grad_distance_bias) {
    int64_t w = a->head_dim;
    for (int kind = 0; kind < GROUPS; kind++) {
        const KeyGroup *g = groups + kind;
        if (!g->num_keys) continue;
        gemm(t.num_queries, round_up16(g->num_keys), w, grad_out, out_stride, 1, g->v_transposed, w, ws->grad_scores + g->first_column, ws->ld, 0);
        for (int64_t i = 0; i < t.num_queries; i++) {
            float *row = ws->scores + i * ws->ld + g->first_column, *grad_row = ws->grad_scores + i * ws->ld + g->first_column;
            f32x8 dot = broadcast8(0);
            for (int64_t d = 0; d < w; d += 8) dot += *(const f32x8 *)(grad_out + i * out_stride + d) * *(const f32x8 *)(out + i * out_stride + d);
            float delta = reduce_sum8(dot);
            for (int64_t j = 0; j < g->num_keys; j += 8) {
                f32x8 weight = exp8(*(f32x8 *)(row + j) - logsumexp[i]);
                f32x8 keep = a->dropout.threshold ? keep_weights(a, t, i, g, j) : broadcast8(1);
                *(f32x8 *)(row + j) = weight * keep;
                *(f32x8 *)(grad_row + j) = weight * (*(f32x8 *)(grad_row + j) * keep - delta);
            }
            if (kind == BANDED && grad_distance_bias) {
                float *grad_bias = grad_distance_bias + a->back + t.first_key - (t.first + i + a->first_query);
                int64_t end = visible_end(a, t.first + i) - t.first_key;
                for (int64_t j = visible_begin(a, t.first + i) - t.first_key; j < end; j++) grad_bias[j] += grad_row[j];
            }
        }
    }
}

/* Add a tile's weightsᵀ · (rows in panels) to the gradients of the keys of a group: of dk with dS and q, of dv with P∘M and dout. */
static void add_to_keys(const AttentionParams *a, const Workspace *ws, const KeyGroup *g, Tile t, const float *weights, const float *panels, Rows grad) {
    const float *columns = weights + g->first_column;
    int64_t blocks = g->numbers ? a->random_blocks : 1, per_block = g->num_keys / blocks;
    for (int64_t r = 0; r < blocks; r++) {
        int64_t first_key = g->numbers ? g->numbers[r] * a->block : 0;
        gemm(per_block, a->head_dim, t.num_queries, columns + r * per_block, 1, ws->ld, panels, t.num_queries,
             grad.data + first_key * grad.stride, grad.stride, 1);
    }
}

static void backward_tile(const AttentionParams *a, Workspace *ws, const KeyGroup *groups, Tile t, const float *q, int64_t q_stride, const float *out,
                          const float *grad_out, int64_t out_stride, const float *logsumexp, const Rows *grad_keys, const Rows *grad_values,
                          Rows grad_q, float *grad_distance_bias) {
    int64_t w = a->head_dim;
    tile_scores(a, ws, groups, t, q, q_stride);
    tile_gradients(a, ws, groups, t, grad_out, out, out_stride, logsumexp, grad_distance_bias);
    pack_panels(ws->queries, w, t.num_queries, w, ws->query_panels);   /* scale · q */
    pack_panels(grad_out, out_stride, t.num_queries, w, ws->grad_out_panels);
    int accumulate = 0;
    for (int kind = 0; kind < GROUPS; kind++) {
        const KeyGroup *g = groups + kind;
        if (!g->num_keys) continue;
        add_to_keys(a, ws, g, t, ws->scores, ws->grad_out_panels, grad_values[kind]);
        add_to_keys(a, ws, g, t, ws->grad_scores, ws->query_panels, grad_keys[kind]);
        gemm(t.num_queries, w, g->num_keys, ws->grad_scores + g->first_column, ws->ld, 1, g->keys, g->panel_rows, grad_q.data, grad_q.stride, accumulate);
        accumulate = 1;
    }
    for (int64_t i = 0; i < t.num_queries; i++)
        for (int64_t d = 0; d < w; d += 8) *(f32x8 *)(grad_q.data + i * grad_q.stride + d) *= a->scale;
}

static Rows head_of(float *x, Strides s, int64_t b, int64_t h) { return (Rows){x ? x + b * s.batch + h * s.head : NULL, s.position}; }
static Rows rows_from(Rows rows, int64_t first) { return (Rows){rows.data + first * rows.stride, rows.stride}; }
static void zero_rows(Rows rows, int64_t count, int64_t w) {
    for (int64_t i = 0; i < count; i++) memset(rows.data + i * rows.stride, 0, sizeof(float) * (size_t)w);
}

/* The backward pass. With P the weights, M the dropout, δ = rowsum(dout ∘ out):
   dv = (P∘M)ᵀ dout;  dS = P ∘ (M ∘ (dout vᵀ) - δ);  dq = scale · dS k;  dk = scale · dSᵀ q.
   dk and dv, and those of the leading keys, have the same strides; grad_distance_bias [B, H, width] is zero, or NULL. */
int attention_backward(AttentionParams a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs,
                       const float *leading_k, Strides lks, const float *leading_v, Strides lvs, const float *out, const float *dout, Strides os,
                       const float *logsumexp, float *dq, Strides dqs, float *dk, float *dv, Strides dks,
                       float *dleading_k, float *dleading_v, Strides dlks, float *grad_distance_bias) {
    int64_t w = a.head_dim, heads_per_group = a.heads / a.kv_heads, span = span_queries(&a), failed = 0;
    #pragma omp parallel
    {
        Workspace ws = {0};
        int ready = make_workspace(&a, 1, &ws);
        if (!ready) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.batch * a.kv_heads; task++) {
            if (!ready) continue;
            int64_t b = task / a.kv_heads, g = task % a.kv_heads;
            const float *key = k + b * ks.batch + g * ks.head, *value = v + b * vs.batch + g * vs.head;
            Rows grad_k = head_of(dk, dks, b, g), grad_v = head_of(dv, dks, b, g);
            Rows grad_leading_k = head_of(dleading_k, dlks, b, g), grad_leading_v = head_of(dleading_v, dlks, b, g);
            zero_rows(grad_k, a.keys, w);
            zero_rows(grad_v, a.keys, w);
            zero_rows(grad_leading_k, a.leading_keys, w);
            zero_rows(grad_leading_v, a.leading_keys, w);
            if (a.leading_keys) {
                pack_keys(ws.groups + LEADING, leading_k + b * lks.batch + g * lks.head, lks.position, a.leading_keys, w);
                pack_values(ws.groups + LEADING, leading_v + b * lvs.batch + g * lvs.head, lvs.position, a.leading_keys, w);
            }
            for (int64_t begin = 0; begin < a.queries; begin += span) {
                Tile all = make_tile(&a, b, 0, begin, min_of(begin + span, a.queries));
                pack_keys(ws.groups + BANDED, key + all.first_key * ks.position, ks.position, all.num_keys, w);
                pack_values(ws.groups + BANDED, value + all.first_key * vs.position, vs.position, all.num_keys, w);
                for (int64_t h = g * heads_per_group; h < (g + 1) * heads_per_group; h++)
                    for (int64_t first = begin, end; first < begin + all.num_queries; first = end) {
                        end = tile_end(&a, first, begin + all.num_queries);
                        Tile t = make_tile(&a, b, h, first, end);
                        if (a.random_blocks && (first == begin || first % a.block == 0)) pack_random(&a, &ws, t, key, ks.position, value, vs.position);
                        KeyGroup groups[GROUPS] = {ws.groups[LEADING], ws.groups[RANDOM], tile_group(&a, ws.groups + BANDED, all, t)};
                        Rows grad_keys[GROUPS] = {grad_leading_k, grad_k, rows_from(grad_k, t.first_key)};
                        Rows grad_values[GROUPS] = {grad_leading_v, grad_v, rows_from(grad_v, t.first_key)};
                        int64_t at = b * os.batch + h * os.head + first * os.position;
                        backward_tile(&a, &ws, groups, t, q + b * qs.batch + h * qs.head, qs.position, out + at, dout + at, os.position,
                                      logsumexp + (b * a.heads + h) * a.queries + first, grad_keys, grad_values,
                                      rows_from(head_of(dq, dqs, b, h), first),
                                      grad_distance_bias ? grad_distance_bias + (b * a.heads + h) * band_width(&a) : NULL);
                    }
            }
        }
        free(ws.memory);
    }
    return failed;
}
