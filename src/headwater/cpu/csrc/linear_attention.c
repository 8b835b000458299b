/* Causal linear attention and its backward pass: softmax is replaced by features φ(x) = elu(x) + 1, so that sums over the keys
   so far, S = Σ φ(k) vᵀ and z = Σ φ(k), stand for them. Tokens are processed in chunks: a triangle of scores within each, and
   the sums of all before it. B batch, H heads, G key/value heads, L length, K width of a query or key head, V of a value head. */

#include "rows.h"

enum { CHUNK = 64, SCORE_STRIDE = CHUNK + 16 };                        /* an odd number of cache lines */
typedef LinearAttentionParams Params;

/* All tensors of a call: inputs, the sums before the first key (or NULL), results; what follows is for the backward pass only. */
typedef struct {
    const float *q, *k, *v, *kv, *total;
    float *out, *denominators, *kv_after, *total_after;
    Strides qs, ks, vs, os;
    const float *grad_out;
    float *dq, *dk, *dv, *grad_kv, *grad_total;
    Strides dqs, dks, dvs;
} Tensors;

typedef struct {
    float *queries, *keys, *scores, *kv, *total;                       /* φ(q), φ(k) of a chunk [CHUNK, K]; S [K, V], z [K] */
    float *k_transposed, *value_panels, *kv_panels;
    float *key_panels, *v_transposed, *query_panels, *grad_panels;     /* from here on for the backward pass only */
    float *grad_scores, *grad_out, *grad_features, *grad_denominators;
    int64_t *begins;                                                   /* of the chunks of a row, and its length */
    int64_t chunks;
    float *memory;
} Workspace;

static int make_workspace(const Params *a, Workspace *ws) {
    int64_t k = a->key_dim, v = a->value_dim, chunk = CHUNK;
    ws->memory = malloc(sizeof(float) * (size_t)(chunk * (7 * k + 4 * v + 2 * SCORE_STRIDE + 1) + 2 * k * v + k));
    ws->begins = malloc(sizeof(int64_t) * (size_t)(a->length + 1));
    if (!ws->memory || !ws->begins) return 0;
    float *next = ws->memory;
    ws->queries = take(&next, chunk * k);
    ws->keys = take(&next, chunk * k);
    ws->k_transposed = take(&next, chunk * k);
    ws->key_panels = take(&next, chunk * k);
    ws->query_panels = take(&next, chunk * k);
    ws->grad_features = take(&next, 2 * chunk * k);
    ws->value_panels = take(&next, chunk * v);
    ws->v_transposed = take(&next, chunk * v);
    ws->grad_panels = take(&next, chunk * v);
    ws->grad_out = take(&next, chunk * v);
    ws->scores = take(&next, chunk * SCORE_STRIDE);
    ws->grad_scores = take(&next, chunk * SCORE_STRIDE);
    ws->grad_denominators = take(&next, chunk);
    ws->kv = take(&next, k * v);
    ws->kv_panels = take(&next, k * v);
    ws->total = take(&next, k);
    return 1;
}
static void free_workspace(Workspace *ws) {
    free(ws->memory);
    free(ws->begins);
}

/* ----------------------------------------------------------------------------------------------------------------- pieces */

/* Where the chunks of row b begin: every CHUNK tokens, and where a document begins. */
static void find_chunks(const Params *a, int64_t b, Workspace *ws) {
    const int32_t *ids = a->document_ids ? a->document_ids + b * a->length : NULL;
    ws->chunks = 0;
    for (int64_t i = 0, begin = 0; i < a->length; i++)
        if (i == 0 || i - begin == CHUNK || (ids && ids[i] != ids[i - 1])) ws->begins[ws->chunks++] = begin = i;
    ws->begins[ws->chunks] = a->length;
}
static int begins_document(const Params *a, int64_t b, int64_t i) {
    return i > 0 && a->document_ids && a->document_ids[b * a->length + i] != a->document_ids[b * a->length + i - 1];
}

/* φ(x) of `rows` rows; keep: 0 where a row counts as zeros (padding), or NULL. */
static void features(const float *x, int64_t stride, int64_t rows, int64_t width, const uint8_t *keep, float *out) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < width; d += 8) {
            f32x8 here = *(const f32x8 *)(x + i * stride + d);
            i32x8 positive = here > 0.0f;
            f32x8 phi = (f32x8)(((i32x8)(here + 1.0f) & positive) | ((i32x8)exp8(here) & ~positive));
            *(f32x8 *)(out + i * width + d) = keep && !keep[i] ? broadcast8(0) : phi;
        }
}
/* φ'(x) = 1 where x > 0, else e^x = φ(x): the smaller of φ and 1; 0 for padding. */
static void through_features(const float *grad, const float *phi, int64_t rows, int64_t width, float *out, int64_t stride) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < width; d += 8) {
            f32x8 here = *(const f32x8 *)(phi + i * width + d);
            i32x8 above = here > 1.0f;
            f32x8 slope = (f32x8)(((i32x8)broadcast8(1) & above) | ((i32x8)here & ~above));
            *(f32x8 *)(out + i * stride + d) = *(const f32x8 *)(grad + i * width + d) * slope;
        }
}
/* Keep the triangle of scores of keys at or before each query, with `bias` of the query added; the rest becomes 0. */
static void keep_triangle(float *scores, int64_t rows, const float *bias) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < round_up16(rows); j++) scores[i * SCORE_STRIDE + j] = j <= i ? scores[i * SCORE_STRIDE + j] + (bias ? bias[i] : 0) : 0;
}
/* S += φ(k)ᵀ v, z += Σ φ(k); the same with φ(q) and the gradients of the backward pass. panels: v, or the gradients. */
static void add_to_sums(const Params *a, Workspace *ws, int64_t rows, const float *phi, const float *panels, const float *weights) {
    gemm(a->key_dim, a->value_dim, rows, phi, 1, a->key_dim, panels, rows, ws->kv, a->value_dim, 1);
    for (int64_t i = 0; i < rows; i++) add_scaled(ws->total, weights ? weights[i] : 1, phi + i * a->key_dim, a->key_dim);
}
static void clear_sums(const Params *a, Workspace *ws) {
    memset(ws->kv, 0, sizeof(float) * (size_t)(a->key_dim * a->value_dim));
    memset(ws->total, 0, sizeof(float) * (size_t)a->key_dim);
}
static void load_sums(const Params *a, Workspace *ws, const float *kv, const float *total, int64_t head) {
    int64_t size = a->key_dim * a->value_dim;
    if (!kv) clear_sums(a, ws);
    else {
        memcpy(ws->kv, kv + head * size, sizeof(float) * (size_t)size);
        memcpy(ws->total, total + head * a->key_dim, sizeof(float) * (size_t)a->key_dim);
    }
}
static void store_sums(const Params *a, const Workspace *ws, float *kv, float *total, int64_t head) {
    int64_t size = a->key_dim * a->value_dim;
    memcpy(kv + head * size, ws->kv, sizeof(float) * (size_t)size);
    memcpy(total + head * a->key_dim, ws->total, sizeof(float) * (size_t)a->key_dim);
}

/* ---------------------------------------------------------------------------------------------------------------- forward */

/* A chunk of queries of one head: the triangle within the chunk, and the sums of before. */
static void chunk_out(const Params *a, Workspace *ws, const float *q, int64_t q_stride, int64_t rows, float *out, int64_t stride, float *denominators) {
    int64_t K = a->key_dim, V = a->value_dim;
    features(q, q_stride, rows, K, NULL, ws->queries);
    gemm(rows, round_up16(rows), K, ws->queries, K, 1, ws->k_transposed, K, ws->scores, SCORE_STRIDE, 0);
    keep_triangle(ws->scores, rows, NULL);
    gemm(rows, V, rows, ws->scores, SCORE_STRIDE, 1, ws->value_panels, rows, out, stride, 0);
    gemm(rows, V, K, ws->queries, K, 1, ws->kv_panels, K, out, stride, 1);
    for (int64_t i = 0; i < rows; i++) {
        denominators[i] = sum_of(ws->scores + i * SCORE_STRIDE, round_up16(rows)) + dot(ws->queries + i * K, ws->total, K) + a->eps;
        for (int64_t d = 0; d < V; d += 8) *(f32x8 *)(out + i * stride + d) /= denominators[i];
    }
}

static void forward_head(const Params *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t b = task / a->kv_heads, g = task % a->kv_heads, per_group = a->heads / a->kv_heads, K = a->key_dim, V = a->value_dim;
    const uint8_t *keep = a->keep ? a->keep + b * a->length : NULL;
    find_chunks(a, b, ws);
    load_sums(a, ws, x->kv, x->total, task);
    for (int64_t c = 0; c < ws->chunks; c++) {
        int64_t begin = ws->begins[c], rows = ws->begins[c + 1] - begin;
        if (begins_document(a, b, begin)) clear_sums(a, ws);
        features(x->k + b * x->ks.batch + g * x->ks.head + begin * x->ks.position, x->ks.position, rows, K, keep ? keep + begin : NULL, ws->keys);
        pack_panels_transposed(ws->keys, K, rows, K, ws->k_transposed);
        pack_panels(x->v + b * x->vs.batch + g * x->vs.head + begin * x->vs.position, x->vs.position, rows, V, ws->value_panels);
        pack_panels(ws->kv, V, K, V, ws->kv_panels);
        for (int64_t h = g * per_group; h < (g + 1) * per_group; h++)
            chunk_out(a, ws, x->q + b * x->qs.batch + h * x->qs.head + begin * x->qs.position, x->qs.position, rows,
                      x->out + b * x->os.batch + h * x->os.head + begin * x->os.position, x->os.position,
                      x->denominators + (b * a->heads + h) * a->length + begin);
        add_to_sums(a, ws, rows, ws->keys, ws->value_panels, NULL);
    }
    store_sums(a, ws, x->kv_after, x->total_after, task);
}

/* out = φ(q) S / (φ(q) z + ε) with the sums up to each query, the denominators [B, H, L], and the sums after the last key.
   kv, total: the sums before the first key, or NULL. 0, or 1: out of memory. */
int linear_attention_forward(Params a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs, const float *kv,
                             const float *total, float *out, Strides os, float *denominators, float *kv_after, float *total_after) {
    Tensors x = {.q = q, .k = k, .v = v, .kv = kv, .total = total, .out = out, .denominators = denominators, .kv_after = kv_after,
                 .total_after = total_after, .qs = qs, .ks = ks, .vs = vs, .os = os};
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.kv_heads, failed, ws, make_workspace(&a, &ws), free_workspace(&ws), forward_head(&a, &x, &ws, task))
    return failed;
}

/* --------------------------------------------------------------------------------------------------------------- backward */

/* Of the tensors of one head from row `begin` on. */
typedef struct { const float *q, *out, *grad_out, *denominators; int64_t q_stride, out_stride; } HeadRows;

static HeadRows head_rows(const Params *a, const Tensors *x, int64_t b, int64_t h, int64_t begin) {
    int64_t at = b * x->os.batch + h * x->os.head + begin * x->os.position;
    return (HeadRows){x->q + b * x->qs.batch + h * x->qs.head + begin * x->qs.position, x->out + at, x->grad_out + at,
                      x->denominators + (b * a->heads + h) * a->length + begin, x->qs.position, x->os.position};
}

/* ĝ = dout / denominator and c = -(dout · out) / denominator of a chunk of queries: the gradients of numerator and denominator. */
static void load_gradients(const Params *a, Workspace *ws, HeadRows x, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
        float inverse = 1 / x.denominators[i];
        const float *grad = x.grad_out + i * x.out_stride;
        ws->grad_denominators[i] = -dot(grad, x.out + i * x.out_stride, a->value_dim) * inverse;
        for (int64_t d = 0; d < a->value_dim; d += 8) *(f32x8 *)(ws->grad_out + i * a->value_dim + d) = *(const f32x8 *)(grad + d) * inverse;
    }
    features(x.q, x.q_stride, rows, a->key_dim, NULL, ws->queries);
    gemm(rows, round_up16(rows), a->value_dim, ws->grad_out, a->value_dim, 1, ws->v_transposed, a->value_dim, ws->grad_scores, SCORE_STRIDE, 0);
    keep_triangle(ws->grad_scores, rows, ws->grad_denominators);
}

/* dφ(q) = M φ(k) + ĝ Sᵀ + c zᵀ, with M the triangle of ĝ vᵀ + c. */
static void chunk_grad_q(const Params *a, Workspace *ws, HeadRows x, int64_t rows, float *dq, int64_t stride) {
    int64_t K = a->key_dim, V = a->value_dim;
    load_gradients(a, ws, x, rows);
    gemm(rows, K, rows, ws->grad_scores, SCORE_STRIDE, 1, ws->key_panels, rows, ws->grad_features, K, 0);
    gemm(rows, K, V, ws->grad_out, V, 1, ws->kv_panels, V, ws->grad_features, K, 1);
    for (int64_t i = 0; i < rows; i++) add_scaled(ws->grad_features + i * K, ws->grad_denominators[i], ws->total, K);
    through_features(ws->grad_features, ws->queries, rows, K, dq, stride);
}

/* dφ(k) += Mᵀ φ(q), dv += Aᵀ ĝ with A the triangle of φ(q) φ(k)ᵀ; R += φ(q)ᵀ ĝ, r += Σ c φ(q), in place of S and z. */
static void chunk_grad_kv(const Params *a, Workspace *ws, HeadRows x, int64_t rows, float *dv, int64_t stride) {
    int64_t K = a->key_dim, V = a->value_dim;
    load_gradients(a, ws, x, rows);
    gemm(rows, round_up16(rows), K, ws->queries, K, 1, ws->k_transposed, K, ws->scores, SCORE_STRIDE, 0);
    keep_triangle(ws->scores, rows, NULL);
    pack_panels(ws->queries, K, rows, K, ws->query_panels);
    pack_panels(ws->grad_out, V, rows, V, ws->grad_panels);
    gemm(rows, K, rows, ws->grad_scores, 1, SCORE_STRIDE, ws->query_panels, rows, ws->grad_features, K, 1);
    gemm(rows, V, rows, ws->scores, 1, SCORE_STRIDE, ws->grad_panels, rows, dv, stride, 1);
    add_to_sums(a, ws, rows, ws->queries, ws->grad_panels, ws->grad_denominators);
}

/* The chunks forwards, with S and z again, for dq. */
static void backward_queries(const Params *a, const Tensors *x, Workspace *ws, int64_t b, int64_t g, const uint8_t *keep) {
    int64_t per_group = a->heads / a->kv_heads, K = a->key_dim, V = a->value_dim;
    load_sums(a, ws, x->kv, x->total, b * a->kv_heads + g);
    for (int64_t c = 0; c < ws->chunks; c++) {
        int64_t begin = ws->begins[c], rows = ws->begins[c + 1] - begin;
        const float *values = x->v + b * x->vs.batch + g * x->vs.head + begin * x->vs.position;
        if (begins_document(a, b, begin)) clear_sums(a, ws);
        features(x->k + b * x->ks.batch + g * x->ks.head + begin * x->ks.position, x->ks.position, rows, K, keep ? keep + begin : NULL, ws->keys);
        pack_panels_transposed(values, x->vs.position, rows, V, ws->v_transposed);
        pack_panels_transposed(ws->kv, V, K, V, ws->kv_panels);        /* of Sᵀ */
        pack_panels(ws->keys, K, rows, K, ws->key_panels);
        pack_panels(values, x->vs.position, rows, V, ws->value_panels);
        for (int64_t h = g * per_group; h < (g + 1) * per_group; h++)
            chunk_grad_q(a, ws, head_rows(a, x, b, h, begin), rows, x->dq + b * x->dqs.batch + h * x->dqs.head + begin * x->dqs.position, x->dqs.position);
        add_to_sums(a, ws, rows, ws->keys, ws->value_panels, NULL);
    }
}

/* The chunks backwards, with R = Σ φ(q) ĝᵀ and r = Σ c φ(q) of the queries from here on: dφ(k) = … + v Rᵀ + r, dv = … + φ(k) R. */
static void backward_keys(const Params *a, const Tensors *x, Workspace *ws, int64_t b, int64_t g, const uint8_t *keep) {
    int64_t per_group = a->heads / a->kv_heads, K = a->key_dim, V = a->value_dim;
    load_sums(a, ws, x->grad_kv, x->grad_total, b * a->kv_heads + g);
    for (int64_t c = ws->chunks - 1; c >= 0; c--) {
        int64_t begin = ws->begins[c], rows = ws->begins[c + 1] - begin;
        const float *values = x->v + b * x->vs.batch + g * x->vs.head + begin * x->vs.position;
        float *dv = x->dv + b * x->dvs.batch + g * x->dvs.head + begin * x->dvs.position;
        features(x->k + b * x->ks.batch + g * x->ks.head + begin * x->ks.position, x->ks.position, rows, K, keep ? keep + begin : NULL, ws->keys);
        pack_panels_transposed(values, x->vs.position, rows, V, ws->v_transposed);
        pack_panels_transposed(ws->keys, K, rows, K, ws->k_transposed);
        pack_panels_transposed(ws->kv, V, K, V, ws->kv_panels);        /* of Rᵀ */
        gemm(rows, K, V, values, x->vs.position, 1, ws->kv_panels, V, ws->grad_features, K, 0);
        for (int64_t i = 0; i < rows; i++) add_scaled(ws->grad_features + i * K, 1, ws->total, K);
        pack_panels(ws->kv, V, K, V, ws->kv_panels);
        gemm(rows, V, K, ws->keys, K, 1, ws->kv_panels, K, dv, x->dvs.position, 0);
        for (int64_t h = g * per_group; h < (g + 1) * per_group; h++) chunk_grad_kv(a, ws, head_rows(a, x, b, h, begin), rows, dv, x->dvs.position);
        through_features(ws->grad_features, ws->keys, rows, K, x->dk + b * x->dks.batch + g * x->dks.head + begin * x->dks.position, x->dks.position);
        if (begins_document(a, b, begin)) clear_sums(a, ws);
    }
    store_sums(a, ws, x->grad_kv, x->grad_total, b * a->kv_heads + g);
}

static void backward_head(const Params *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t b = task / a->kv_heads, g = task % a->kv_heads;
    const uint8_t *keep = a->keep ? a->keep + b * a->length : NULL;
    find_chunks(a, b, ws);
    backward_queries(a, x, ws, b, g, keep);
    backward_keys(a, x, ws, b, g, keep);
}

/* grad_kv, grad_total: the gradients of the sums after the last key, on return of those before the first. */
int linear_attention_backward(Params a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs, const float *kv,
                              const float *total, const float *out, const float *dout, Strides os, const float *denominators,
                              float *dq, Strides dqs, float *dk, Strides dks, float *dv, Strides dvs, float *grad_kv, float *grad_total) {
    Tensors x = {q, k, v, kv, total, (float *)out, (float *)denominators, NULL, NULL, qs, ks, vs, os,
                 dout, dq, dk, dv, grad_kv, grad_total, dqs, dks, dvs};
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.kv_heads, failed, ws, make_workspace(&a, &ws), free_workspace(&ws), backward_head(&a, &x, &ws, task))
    return failed;
}
