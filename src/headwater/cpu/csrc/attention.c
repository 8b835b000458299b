/* Fused attention and its backward pass: softmax attention over the keys of a band (all keys, at its widest), over leading
   keys that every query sees, and over random blocks of keys, with dropout; the scores exist a tile at a time.
   B batch, H heads, G key/value heads, Q queries, S keys, D head_dim, L leading keys, R random blocks. */

#include "attention_tiles.h"

/* All tensors of a call; what follows `os` is for the backward pass only. */
typedef struct {
    const float *q, *k, *v, *leading_k, *leading_v;
    float *out, *logsumexp;
    Strides qs, ks, vs, lks, lvs, os;
    const float *grad_out;
    float *dq, *dk, *dv, *dleading_k, *dleading_v, *grad_distance_bias;
    Strides dqs, dks, dlks;
} Tensors;

/* Pack the leading keys of a group, and the banded keys of a span of queries. */
static void load_leading(const AttentionParams *a, const Tensors *x, Workspace *ws, int64_t b, int64_t g) {
    if (!a->leading_keys) return;
    pack_keys(ws->groups + LEADING, x->leading_k + b * x->lks.batch + g * x->lks.head, x->lks.position, a->leading_keys, a->head_dim);
    pack_values(ws->groups + LEADING, x->leading_v + b * x->lvs.batch + g * x->lvs.head, x->lvs.position, a->leading_keys, a->head_dim);
}
static Tile load_span(const AttentionParams *a, const Tensors *x, Workspace *ws, int64_t b, int64_t g, int64_t begin, int64_t end) {
    Tile all = make_tile(a, b, 0, begin, end);
    pack_keys(ws->groups + BANDED, x->k + b * x->ks.batch + g * x->ks.head + all.first_key * x->ks.position, x->ks.position, all.num_keys, a->head_dim);
    pack_values(ws->groups + BANDED, x->v + b * x->vs.batch + g * x->vs.head + all.first_key * x->vs.position, x->vs.position, all.num_keys, a->head_dim);
    return all;
}
/* The groups of keys of a tile; the random blocks are packed where a block, or a span, begins. */
static void load_groups(const AttentionParams *a, const Tensors *x, Workspace *ws, Tile all, Tile t, int begins_span, KeyGroup *groups) {
    int64_t g = t.h / (a->heads / a->kv_heads);
    if (a->random_blocks && (begins_span || t.first % a->block == 0))
        pack_random(a, ws, t, x->k + t.b * x->ks.batch + g * x->ks.head, x->ks.position, x->v + t.b * x->vs.batch + g * x->vs.head, x->vs.position);
    groups[LEADING] = ws->groups[LEADING];
    groups[RANDOM] = ws->groups[RANDOM];
    groups[BANDED] = tile_group(a, ws->groups + BANDED, all, t);
}

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

/* A span of queries of all heads of a group; task: the row, the group and the span. */
static void forward_span(const AttentionParams *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t span = span_queries(a), spans = (a->queries + span - 1) / span, heads_per_group = a->heads / a->kv_heads;
    int64_t b = task / spans / a->kv_heads, g = task / spans % a->kv_heads, begin = task % spans * span;
    load_leading(a, x, ws, b, g);
    Tile all = load_span(a, x, ws, b, g, begin, min_of(begin + span, a->queries));
    for (int64_t h = g * heads_per_group; h < (g + 1) * heads_per_group; h++)
        for (int64_t first = begin, end; first < begin + all.num_queries; first = end) {
            end = tile_end(a, first, begin + all.num_queries);
            Tile t = make_tile(a, b, h, first, end);
            KeyGroup groups[GROUPS];
            load_groups(a, x, ws, all, t, first == begin, groups);
            forward_tile(a, ws, groups, t, x->q + b * x->qs.batch + h * x->qs.head, x->qs.position,
                         x->out + b * x->os.batch + h * x->os.head + first * x->os.position, x->os.position,
                         x->logsumexp + (b * a->heads + h) * a->queries + first);
        }
}

/* out = dropout(softmax(scale · q kᵀ + bias)) v, and logsumexp [B, H, Q] of the scores for the backward pass.
   0, or 1: out of memory. */
int attention_forward(AttentionParams a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs,
                      const float *leading_k, Strides lks, const float *leading_v, Strides lvs, float *out, Strides os, float *logsumexp) {
    Tensors x = {.q = q, .k = k, .v = v, .leading_k = leading_k, .leading_v = leading_v, .out = out, .logsumexp = logsumexp,
                 .qs = qs, .ks = ks, .vs = vs, .lks = lks, .lvs = lvs, .os = os};
    int64_t spans = (a.queries + span_queries(&a) - 1) / span_queries(&a);
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.kv_heads * spans, failed, ws, make_workspace(&a, 0, &ws), free(ws.memory), forward_span(&a, &x, &ws, task))
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

/* All queries of the heads of a group, whose keys and values they share; task: the row and the group. */
static void backward_group(const AttentionParams *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t w = a->head_dim, b = task / a->kv_heads, g = task % a->kv_heads, heads_per_group = a->heads / a->kv_heads, span = span_queries(a);
    Rows grad_k = head_of(x->dk, x->dks, b, g), grad_v = head_of(x->dv, x->dks, b, g);
    Rows grad_leading_k = head_of(x->dleading_k, x->dlks, b, g), grad_leading_v = head_of(x->dleading_v, x->dlks, b, g);
    zero_rows(grad_k, a->keys, w);
    zero_rows(grad_v, a->keys, w);
    zero_rows(grad_leading_k, a->leading_keys, w);
    zero_rows(grad_leading_v, a->leading_keys, w);
    load_leading(a, x, ws, b, g);
    for (int64_t begin = 0; begin < a->queries; begin += span) {
        Tile all = load_span(a, x, ws, b, g, begin, min_of(begin + span, a->queries));
        for (int64_t h = g * heads_per_group; h < (g + 1) * heads_per_group; h++)
            for (int64_t first = begin, end; first < begin + all.num_queries; first = end) {
                end = tile_end(a, first, begin + all.num_queries);
                Tile t = make_tile(a, b, h, first, end);
                KeyGroup groups[GROUPS];
                load_groups(a, x, ws, all, t, first == begin, groups);
                Rows grad_keys[GROUPS] = {grad_leading_k, grad_k, rows_from(grad_k, t.first_key)};
                Rows grad_values[GROUPS] = {grad_leading_v, grad_v, rows_from(grad_v, t.first_key)};
                int64_t at = b * x->os.batch + h * x->os.head + first * x->os.position;
                backward_tile(a, ws, groups, t, x->q + b * x->qs.batch + h * x->qs.head, x->qs.position, x->out + at, x->grad_out + at, x->os.position,
                              x->logsumexp + (b * a->heads + h) * a->queries + first, grad_keys, grad_values,
                              rows_from(head_of(x->dq, x->dqs, b, h), first),
                              x->grad_distance_bias ? x->grad_distance_bias + (b * a->heads + h) * band_width(a) : NULL);
            }
    }
}

/* The backward pass. With P the weights, M the dropout, δ = rowsum(dout ∘ out):
   dv = (P∘M)ᵀ dout;  dS = P ∘ (M ∘ (dout vᵀ) - δ);  dq = scale · dS k;  dk = scale · dSᵀ q.
   dk and dv, and those of the leading keys, have the same strides; grad_distance_bias [B, H, width] is zero, or NULL. */
int attention_backward(AttentionParams a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs,
                       const float *leading_k, Strides lks, const float *leading_v, Strides lvs, const float *out, const float *dout, Strides os,
                       const float *logsumexp, float *dq, Strides dqs, float *dk, float *dv, Strides dks,
                       float *dleading_k, float *dleading_v, Strides dlks, float *grad_distance_bias) {
    Tensors x = {q, k, v, leading_k, leading_v, (float *)out, (float *)logsumexp, qs, ks, vs, lks, lvs, os,
                 dout, dq, dk, dv, dleading_k, dleading_v, grad_distance_bias, dqs, dks, dlks};
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.kv_heads, failed, ws, make_workspace(&a, 1, &ws), free(ws.memory), backward_group(&a, &x, &ws, task))
    return failed;
}
