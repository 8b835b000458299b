/* FAVOR+ attention (Performer) and its backward pass: exp(q · k) is estimated by φ(q) · φ(k), φ(x) = exp(W x - |x|² / 2 - c) + ε,
   so that sums over the keys so far stand for them. c of a key is the maximum of W k - |k|² / 2 so far; sums of before a new maximum
   shrink by exp(old - new), and ε is added by sums of its own, Σ v and the number of keys. Features exist for a chunk of tokens
   at a time, and are computed again in the backward pass.
   B batch, H heads, G key/value heads, Q queries, S keys, D width of a query or key head, V of a value head, M features. */

#include "rows.h"

enum { CHUNK = 64, SCORE_STRIDE = CHUNK + 16 };                        /* an odd number of cache lines */
#define NO_KEY -1e30f                                                  /* the maximum over no keys */
#define TINY 1.17549435e-38f
typedef FavorParams Params;

/* All tensors of a call. The sums are of the keys before the first, on return after the last; in the backward pass the other
   way round, their gradients. */
typedef struct {
    const float *q, *k, *v, *projection;
    Strides qs, ks, vs;
    const float *kv, *total, *values, *size, *maximum;                 /* [B, G, M, V], [B, G, M], [B, G, V], [B, G], [B, G]; or NULL */
    float *out, *denominators, *maxima;                                /* denominators [B, H, Q], maxima [B, G, S] */
    Strides os;
    float *kv_after, *total_after, *values_after, *size_after, *maximum_after;
    const float *grad_out;                                             /* from here on for the backward pass only */
    float *dq, *dk, *dv;
    Strides dqs, dks, dvs;
    float *grad_kv, *grad_total, *grad_values;
} Tensors;

typedef struct { float *kv, *total, *values; float size, maximum; } Sums;   /* Σ e vᵀ [M, V], Σ e [M], Σ v [V], of e = φ - ε */

typedef struct {
    float *w_transposed, *w_panels;                                    /* W as a right operand, [D, M] and [M, D] */
    float *keys, *queries;                                             /* scaled, [CHUNK, D] */
    float *key_features, *query_features;                              /* e of keys, φ of queries [CHUNK, M] */
    float *small, *present, *shrink, *denominators;                    /* [CHUNK] ε Σ φ(q); 0 = padding; exp(before - maximum) */
    float *scores, *factors, *k_transposed, *value_panels, *kv_panels, *from_sums;
    float *key_panels, *query_panels, *grad_panels, *v_transposed;     /* from here on for the backward pass only */
    float *grad_out, *shrunk_grad, *grad_denominators, *grad_scores, *grad_features;
    Sums sums, grads;
    float *memory;
} Workspace;

static int make_workspace(const Params *a, const Tensors *x, Workspace *ws) {
    int64_t m = a->features, d = a->key_dim, v = a->value_dim, chunk = CHUNK;
    int64_t count = 2 * m * d + chunk * (2 * d + 6 * m + 5 * v + 3 * SCORE_STRIDE + 5) + 3 * m * v + 2 * m + 2 * v;
    ws->memory = malloc(sizeof(float) * (size_t)count);
    if (!ws->memory) return 0;
    float *next = ws->memory;
    ws->w_transposed = take(&next, m * d);
    ws->w_panels = take(&next, m * d);
    ws->keys = take(&next, chunk * d);
    ws->queries = take(&next, chunk * d);
    ws->key_features = take(&next, chunk * m);
    ws->query_features = take(&next, chunk * m);
    ws->k_transposed = take(&next, chunk * m);
    ws->key_panels = take(&next, chunk * m);
    ws->query_panels = take(&next, chunk * m);
    ws->grad_features = take(&next, chunk * m);
    ws->value_panels = take(&next, chunk * v);
    ws->v_transposed = take(&next, chunk * v);
    ws->from_sums = ws->shrunk_grad = take(&next, chunk * v);          /* of the forward pass, of the backward pass */
    ws->grad_out = take(&next, chunk * v);
    ws->grad_panels = take(&next, chunk * v);
    ws->scores = take(&next, chunk * SCORE_STRIDE);
    ws->factors = take(&next, chunk * SCORE_STRIDE);
    ws->grad_scores = take(&next, chunk * SCORE_STRIDE);
    ws->small = take(&next, chunk);
    ws->present = take(&next, chunk);
    ws->shrink = take(&next, chunk);
    ws->denominators = take(&next, chunk);
    ws->grad_denominators = take(&next, chunk);
    ws->kv_panels = take(&next, m * v);
    ws->sums = (Sums){take(&next, m * v), take(&next, m), take(&next, v), 0, NO_KEY};
    ws->grads = (Sums){take(&next, m * v), take(&next, m), take(&next, v), 0, 0};
    pack_panels_transposed(x->projection, d, m, d, ws->w_transposed);
    pack_panels(x->projection, d, m, d, ws->w_panels);
    return 1;
}

/* ------------------------------------------------------------------------------------------------------------------- sums */

static void copy_or_clear(float *to, const float *from, int64_t count) {
    if (from) memcpy(to, from, sizeof(float) * (size_t)count);
    else memset(to, 0, sizeof(float) * (size_t)count);
}
static void load_sums(const Params *a, const Tensors *x, int64_t head, Sums *s) {
    int64_t m = a->features, v = a->value_dim;
    copy_or_clear(s->kv, x->kv ? x->kv + head * m * v : NULL, m * v);
    copy_or_clear(s->total, x->kv ? x->total + head * m : NULL, m);
    copy_or_clear(s->values, x->kv ? x->values + head * v : NULL, v);
    s->size = x->kv ? x->size[head] : 0;
    s->maximum = s->size > 0 ? x->maximum[head] : NO_KEY;
}
static void store(const Params *a, const Sums *s, int64_t head, float *kv, float *total, float *values) {
    int64_t m = a->features, v = a->value_dim;
    memcpy(kv + head * m * v, s->kv, sizeof(float) * (size_t)(m * v));
    memcpy(total + head * m, s->total, sizeof(float) * (size_t)m);
    memcpy(values + head * v, s->values, sizeof(float) * (size_t)v);
}
static void shrink_sums(const Params *a, Sums *s, float factor) {
    if (factor == 1) return;
    scale_by(s->kv, factor, a->features * a->value_dim);
    scale_by(s->total, factor, a->features);
}

/* --------------------------------------------------------------------------------------------------------------- features */

static void load_scaled(const float *x, int64_t stride, int64_t rows, int64_t width, float scale, float *out) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < width; d += 8) *(f32x8 *)(out + i * width + d) = *(const f32x8 *)(x + i * stride + d) * scale;
}
static float maximum_of(const float *x, int64_t n) {
    f32x8 top = *(const f32x8 *)x;
    for (int64_t j = 8; j < n; j += 8) top = max8(top, *(const f32x8 *)(x + j));
    return reduce_max8(top);
}
/* x ← e^(x - shift) + added; returns the sum. */
static float exponentials(float *x, int64_t n, float shift, float added) {
    f32x8 sum = broadcast8(0);
    for (int64_t j = 0; j < n; j += 8) {
        f32x8 e = exp8(*(f32x8 *)(x + j) - shift) + added;
        *(f32x8 *)(x + j) = e;
        sum += e;
    }
    return reduce_sum8(sum);
}

/* The keys of a chunk: scaled, e = exp(W k - |k|² / 2 - maximum), 0 for padding. maxima: the maximum up to each key, computed from
   the one before, or known (then `before` is not used). Packs the values as well. */
static void load_keys(const Params *a, Workspace *ws, const Tensors *x, int64_t b, int64_t g, int64_t begin, int64_t rows, float before,
                      float *maxima, int known) {
    int64_t m = a->features, d = a->key_dim;
    const float *values = x->v + b * x->vs.batch + g * x->vs.head + begin * x->vs.position;
    load_scaled(x->k + b * x->ks.batch + g * x->ks.head + begin * x->ks.position, x->ks.position, rows, d, a->root, ws->keys);
    gemm(rows, m, d, ws->keys, d, 1, ws->w_transposed, d, ws->key_features, m, 0);
    for (int64_t i = 0; i < rows; i++) {
        float *e = ws->key_features + i * m;
        float half = dot(ws->keys + i * d, ws->keys + i * d, d) / 2;
        float top = maximum_of(e, m) - half;
        ws->present[i] = a->keep && !a->keep[b * a->keys + begin + i] ? 0 : 1;
        if (!known) maxima[i] = before = ws->present[i] && top > before ? top : before;
        if (ws->present[i]) exponentials(e, m, half + maxima[i], 0);
        else memset(e, 0, sizeof(float) * (size_t)m);
    }
    pack_panels(values, x->vs.position, rows, a->value_dim, ws->value_panels);
}

/* The queries of a chunk: scaled, and φ with a maximum for each, which leaves |q|² / 2 out. */
static void load_queries(const Params *a, Workspace *ws, const float *q, int64_t stride, int64_t rows) {
    int64_t m = a->features, d = a->key_dim;
    load_scaled(q, stride, rows, d, a->root, ws->queries);
    gemm(rows, m, d, ws->queries, d, 1, ws->w_transposed, d, ws->query_features, m, 0);
    for (int64_t i = 0; i < rows; i++) {
        float *phi = ws->query_features + i * m;
        ws->small[i] = a->eps * exponentials(phi, m, maximum_of(phi, m), a->eps);
    }
}

/* How the sums of before the chunk, and its earlier keys, shrink until each token: exp(before - maximum), exp(maximum_j - maximum_i). */
static void load_factors(Workspace *ws, int64_t rows, float before, const float *maxima) {
    for (int64_t i = 0; i < rows; i++) {
        ws->shrink[i] = expf(before - maxima[i]);
        for (int64_t j = 0; j <= i; j++) ws->factors[i * SCORE_STRIDE + j] = maxima[j] == maxima[i] ? 1 : expf(maxima[j] - maxima[i]);
    }
}
/* Of keys at or before each query: scores = factor · φ(q) e + ε Σ φ(q), with the sum of each row in ws->denominators. */
static void triangle_of_scores(const Params *a, Workspace *ws, int64_t rows) {
    gemm(rows, round_up16(rows), a->features, ws->query_features, a->features, 1, ws->k_transposed, a->features, ws->scores, SCORE_STRIDE, 0);
    for (int64_t i = 0; i < rows; i++) {
        float *row = ws->scores + i * SCORE_STRIDE;
        const float *factor = ws->factors + i * SCORE_STRIDE;
        for (int64_t j = 0; j <= i; j++) row[j] = row[j] * factor[j] + ws->small[i] * ws->present[j];
        for (int64_t j = i + 1; j < round_up16(rows); j++) row[j] = 0;
        ws->denominators[i] = sum_of(row, round_up16(rows));
    }
}

/* The sums after a chunk of keys; e of the keys is then relative to the last maximum. */
static void add_keys(const Params *a, Workspace *ws, const Tensors *x, int64_t b, int64_t g, int64_t begin, int64_t rows, const float *maxima) {
    int64_t m = a->features, v = a->value_dim;
    Sums *s = &ws->sums;
    float last = maxima[rows - 1];
    shrink_sums(a, s, expf(s->maximum - last));
    s->maximum = last;
    for (int64_t i = 0; i < rows; i++) {
        if (!ws->present[i]) continue;
        if (maxima[i] != last) scale_by(ws->key_features + i * m, expf(maxima[i] - last), m);
        add_scaled(s->total, 1, ws->key_features + i * m, m);
        add_scaled(s->values, 1, x->v + b * x->vs.batch + g * x->vs.head + (begin + i) * x->vs.position, v);
        s->size += 1;
    }
    gemm(m, v, rows, ws->key_features, 1, m, ws->value_panels, rows, s->kv, v, 1);
}

/* ---------------------------------------------------------------------------------------------------------------- forward */

/* out of a chunk of queries of one head; ws->kv_panels: the sums. In causal attention ws->shrink belongs to them. */
static void chunk_out(const Params *a, Workspace *ws, const float *q, int64_t q_stride, int64_t rows, float *out, int64_t stride, float *denominators) {
    int64_t m = a->features, v = a->value_dim;
    const Sums *s = &ws->sums;
    load_queries(a, ws, q, q_stride, rows);
    if (a->causal) {
        triangle_of_scores(a, ws, rows);
        gemm(rows, v, rows, ws->scores, SCORE_STRIDE, 1, ws->value_panels, rows, out, stride, 0);
    }
    gemm(rows, v, m, ws->query_features, m, 1, ws->kv_panels, m, ws->from_sums, v, 0);
    for (int64_t i = 0; i < rows; i++) {
        float shrink = a->causal ? ws->shrink[i] : 1, within = a->causal ? ws->denominators[i] : 0, *to = out + i * stride;
        float denominator = within + shrink * dot(ws->query_features + i * m, s->total, m) + ws->small[i] * s->size;
        denominators[i] = denominator > TINY ? denominator : TINY;     /* 0 where there is no key yet */
        for (int64_t d = 0; d < v; d += 8) {
            f32x8 inside = a->causal ? *(f32x8 *)(to + d) : broadcast8(0);
            f32x8 sums = shrink * *(f32x8 *)(ws->from_sums + i * v + d) + ws->small[i] * *(f32x8 *)(s->values + d);
            *(f32x8 *)(to + d) = (inside + sums) / denominators[i];
        }
    }
}

static void forward_head(const Params *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t b = task / a->kv_heads, g = task % a->kv_heads, per_group = a->heads / a->kv_heads, m = a->features, v = a->value_dim;
    load_sums(a, x, task, &ws->sums);
    for (int64_t begin = 0; begin < a->keys; begin += CHUNK) {
        int64_t rows = min_of(CHUNK, a->keys - begin);
        float *maxima = x->maxima + task * a->keys + begin;
        load_keys(a, ws, x, b, g, begin, rows, ws->sums.maximum, maxima, 0);
        if (a->causal) {
            load_factors(ws, rows, ws->sums.maximum, maxima);
            pack_panels_transposed(ws->key_features, m, rows, m, ws->k_transposed);
            pack_panels(ws->sums.kv, v, m, v, ws->kv_panels);
            for (int64_t h = g * per_group; h < (g + 1) * per_group; h++)
                chunk_out(a, ws, x->q + b * x->qs.batch + h * x->qs.head + begin * x->qs.position, x->qs.position, rows,
                          x->out + b * x->os.batch + h * x->os.head + begin * x->os.position, x->os.position,
                          x->denominators + (b * a->heads + h) * a->queries + begin);
        }
        add_keys(a, ws, x, b, g, begin, rows, maxima);
    }
    store(a, &ws->sums, task, x->kv_after, x->total_after, x->values_after);
    x->size_after[task] = ws->sums.size;
    x->maximum_after[task] = ws->sums.maximum;
    if (a->causal) return;
    pack_panels(ws->sums.kv, v, m, v, ws->kv_panels);
    for (int64_t h = g * per_group; h < (g + 1) * per_group; h++)
        for (int64_t begin = 0; begin < a->queries; begin += CHUNK)
            chunk_out(a, ws, x->q + b * x->qs.batch + h * x->qs.head + begin * x->qs.position, x->qs.position, min_of(CHUNK, a->queries - begin),
                      x->out + b * x->os.batch + h * x->os.head + begin * x->os.position, x->os.position,
                      x->denominators + (b * a->heads + h) * a->queries + begin);
}

/* out = φ(q) Σ φ(k) vᵀ / φ(q) Σ φ(k) over the keys so far (causal) or over all, and the sums after the last key. 0, or 1: out of memory. */
int favor_forward(Params a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs, const float *projection,
                  const float *kv, const float *total, const float *values, const float *size, const float *maximum, float *out, Strides os,
                  float *denominators, float *maxima, float *kv_after, float *total_after, float *values_after, float *size_after, float *maximum_after) {
    Tensors x = {q, k, v, projection, qs, ks, vs, kv, total, values, size, maximum, out, denominators, maxima, os,
                 kv_after, total_after, values_after, size_after, maximum_after};
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.kv_heads, failed, ws, make_workspace(&a, &x, &ws), free(ws.memory), forward_head(&a, &x, &ws, task))
    return failed;
}

/* --------------------------------------------------------------------------------------------------------------- backward */

/* A chunk of queries of one head: φ, and ĝ = dout / denominator, c = -(dout · out) / denominator, the gradients of numerator and
   denominator; in causal attention the triangle of ĝ vᵀ + c, the gradient of the scores. */
static void load_gradients(const Params *a, Workspace *ws, const Tensors *x, int64_t b, int64_t h, int64_t begin, int64_t rows) {
    int64_t v = a->value_dim, at = b * x->os.batch + h * x->os.head + begin * x->os.position;
    const float *denominators = x->denominators + (b * a->heads + h) * a->queries + begin;
    load_queries(a, ws, x->q + b * x->qs.batch + h * x->qs.head + begin * x->qs.position, x->qs.position, rows);
    for (int64_t i = 0; i < rows; i++) {
        const float *grad = x->grad_out + at + i * x->os.position;
        float inverse = denominators[i] > TINY ? 1 / denominators[i] : 0, shrink = a->causal ? ws->shrink[i] : 1;
        ws->grad_denominators[i] = -dot(grad, x->out + at + i * x->os.position, v) * inverse;
        for (int64_t d = 0; d < v; d += 8) {
            f32x8 here = *(const f32x8 *)(grad + d) * inverse;
            *(f32x8 *)(ws->grad_out + i * v + d) = here;
            *(f32x8 *)(ws->shrunk_grad + i * v + d) = here * shrink;
        }
    }
    if (!a->causal) return;
    gemm(rows, round_up16(rows), v, ws->grad_out, v, 1, ws->v_transposed, v, ws->grad_scores, SCORE_STRIDE, 0);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < round_up16(rows); j++) {
            float *here = ws->grad_scores + i * SCORE_STRIDE + j;
            *here = j <= i ? (*here + ws->grad_denominators[i]) * ws->present[j] : 0;
        }
}
/* The gradient of features becomes that of w = W x - |x|² / 2, and that of x: root · (dw W - Σ dw x). */
static void through_features(const Params *a, Workspace *ws, const float *phi, float eps, const float *scaled, int64_t rows, float *out, int64_t stride) {
    int64_t m = a->features, d = a->key_dim;
    float *grad = ws->grad_features;
    for (int64_t i = 0; i < rows * m; i += 8) *(f32x8 *)(grad + i) *= *(const f32x8 *)(phi + i) - eps;
    gemm(rows, d, m, grad, m, 1, ws->w_panels, m, out, stride, 0);
    for (int64_t i = 0; i < rows; i++) {
        float sum = sum_of(grad + i * m, m), *to = out + i * stride;
        for (int64_t j = 0; j < d; j += 8) *(f32x8 *)(to + j) = (*(f32x8 *)(to + j) - sum * *(const f32x8 *)(scaled + i * d + j)) * a->root;
    }
}

/* dφ(q) = (ĝ vᵀ + c) e of the chunk + ĝ Sᵀ + c z of the sums, and ε times the same of ones. ws->kv_panels: Sᵀ. */
static void chunk_grad_q(const Params *a, Workspace *ws, const Tensors *x, int64_t b, int64_t h, int64_t begin, int64_t rows) {
    int64_t m = a->features, v = a->value_dim;
    const Sums *s = &ws->sums;
    load_gradients(a, ws, x, b, h, begin, rows);
    gemm(rows, m, v, ws->shrunk_grad, v, 1, ws->kv_panels, v, ws->grad_features, m, 0);
    for (int64_t i = 0; i < rows; i++) {
        float shrink = a->causal ? ws->shrink[i] : 1, within = a->causal ? sum_of(ws->grad_scores + i * SCORE_STRIDE, round_up16(rows)) : 0;
        float small = a->eps * (within + dot(ws->grad_out + i * v, s->values, v) + ws->grad_denominators[i] * s->size);
        float *grad = ws->grad_features + i * m;
        for (int64_t j = 0; j < m; j += 8) *(f32x8 *)(grad + j) += shrink * ws->grad_denominators[i] * *(f32x8 *)(s->total + j) + small;
        for (int64_t j = 0; a->causal && j <= i; j++) ws->grad_scores[i * SCORE_STRIDE + j] *= ws->factors[i * SCORE_STRIDE + j];
    }
    if (a->causal) gemm(rows, m, rows, ws->grad_scores, SCORE_STRIDE, 1, ws->key_panels, rows, ws->grad_features, m, 1);
    through_features(a, ws, ws->query_features, a->eps, ws->queries, rows,
                     x->dq + b * x->dqs.batch + h * x->dqs.head + begin * x->dqs.position, x->dqs.position);
}

/* R += φ(q)ᵀ ĝ, r += Σ c φ(q), and Σ ε φ(q) ĝ: what earlier keys get from a chunk of queries. */
static void add_queries(const Params *a, Workspace *ws, int64_t rows) {
    int64_t m = a->features, v = a->value_dim;
    pack_panels(ws->shrunk_grad, v, rows, v, ws->grad_panels);
    gemm(m, v, rows, ws->query_features, 1, m, ws->grad_panels, rows, ws->grads.kv, v, 1);
    for (int64_t i = 0; i < rows; i++) {
        float shrink = a->causal ? ws->shrink[i] : 1;
        add_scaled(ws->grads.total, shrink * ws->grad_denominators[i], ws->query_features + i * m, m);
        add_scaled(ws->grads.values, ws->small[i], ws->grad_out + i * v, v);
    }
}

/* de = R v + r, dv = Rᵀ e + Σ ε φ(q) ĝ: what a chunk of keys gets from all later queries. last: the maximum that R is relative to. */
static void keys_from_later(const Params *a, Workspace *ws, const float *values, int64_t stride, int64_t rows, const float *maxima, float last,
                            float *dv, int64_t dv_stride) {
    int64_t m = a->features, v = a->value_dim;
    pack_panels_transposed(ws->grads.kv, v, m, v, ws->kv_panels);
    gemm(rows, m, v, values, stride, 1, ws->kv_panels, v, ws->grad_features, m, 0);
    pack_panels(ws->grads.kv, v, m, v, ws->kv_panels);
    gemm(rows, v, m, ws->key_features, m, 1, ws->kv_panels, m, dv, dv_stride, 0);
    for (int64_t i = 0; i < rows; i++) {
        float factor = expf(maxima[i] - last);
        add_scaled(ws->grad_features + i * m, 1, ws->grads.total, m);
        if (factor != 1) {
            scale_by(ws->grad_features + i * m, factor, m);
            scale_by(dv + i * dv_stride, factor, v);
        }
        add_scaled(dv + i * dv_stride, ws->present[i], ws->grads.values, v);
    }
}
/* de += (ĝ vᵀ + c)ᵀ φ(q), dv += scoresᵀ ĝ: what it gets from a head's queries of the same chunk. */
static void keys_from_chunk(const Params *a, Workspace *ws, int64_t rows, float *dv, int64_t stride) {
    int64_t m = a->features, v = a->value_dim;
    triangle_of_scores(a, ws, rows);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j <= i; j++) ws->grad_scores[i * SCORE_STRIDE + j] *= ws->factors[i * SCORE_STRIDE + j];
    pack_panels(ws->query_features, m, rows, m, ws->query_panels);
    gemm(rows, m, rows, ws->grad_scores, 1, SCORE_STRIDE, ws->query_panels, rows, ws->grad_features, m, 1);
    pack_panels(ws->grad_out, v, rows, v, ws->grad_panels);
    gemm(rows, v, rows, ws->scores, 1, SCORE_STRIDE, ws->grad_panels, rows, dv, stride, 1);
}

/* Causal: forwards with the sums again, for dq; backwards with the gradients of the sums, for dk and dv. Otherwise: the sums of all
   keys, then all queries, then all keys. */
static void backward_head(const Params *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t b = task / a->kv_heads, g = task % a->kv_heads, per_group = a->heads / a->kv_heads, m = a->features, v = a->value_dim;
    float *maxima = x->maxima + task * a->keys;

    /* the sums, and dq */
    load_sums(a, x, task, &ws->sums);
    float before_all = ws->sums.maximum;
    for (int64_t begin = 0; begin < a->keys; begin += CHUNK) {
        int64_t rows = min_of(CHUNK, a->keys - begin);
        load_keys(a, ws, x, b, g, begin, rows, 0, maxima + begin, 1);
        if (a->causal) {
            load_factors(ws, rows, ws->sums.maximum, maxima + begin);
            pack_panels_transposed(x->v + b * x->vs.batch + g * x->vs.head + begin * x->vs.position, x->vs.position, rows, v, ws->v_transposed);
            pack_panels_transposed(ws->sums.kv, v, m, v, ws->kv_panels);
            pack_panels(ws->key_features, m, rows, m, ws->key_panels);
            for (int64_t h = g * per_group; h < (g + 1) * per_group; h++) chunk_grad_q(a, ws, x, b, h, begin, rows);
        }
        add_keys(a, ws, x, b, g, begin, rows, maxima + begin);
    }
    copy_or_clear(ws->grads.kv, x->grad_kv + task * m * v, m * v);
    copy_or_clear(ws->grads.total, x->grad_total + task * m, m);
    copy_or_clear(ws->grads.values, x->grad_values + task * v, v);
    if (!a->causal) {
        pack_panels_transposed(ws->sums.kv, v, m, v, ws->kv_panels);
        for (int64_t h = g * per_group; h < (g + 1) * per_group; h++)
            for (int64_t begin = 0; begin < a->queries; begin += CHUNK) {
                int64_t rows = min_of(CHUNK, a->queries - begin);
                chunk_grad_q(a, ws, x, b, h, begin, rows);
                add_queries(a, ws, rows);
            }
    }

    /* dk and dv */
    for (int64_t begin = (a->keys - 1) / CHUNK * CHUNK; begin >= 0; begin -= CHUNK) {
        int64_t rows = min_of(CHUNK, a->keys - begin);
        const float *values = x->v + b * x->vs.batch + g * x->vs.head + begin * x->vs.position;
        float *dv = x->dv + b * x->dvs.batch + g * x->dvs.head + begin * x->dvs.position;
        float before = begin ? maxima[begin - 1] : before_all, last = a->causal ? maxima[begin + rows - 1] : ws->sums.maximum;
        load_keys(a, ws, x, b, g, begin, rows, 0, maxima + begin, 1);
        keys_from_later(a, ws, values, x->vs.position, rows, maxima + begin, last, dv, x->dvs.position);
        if (a->causal) {
            load_factors(ws, rows, before, maxima + begin);
            shrink_sums(a, &ws->grads, expf(before - last));
            pack_panels_transposed(values, x->vs.position, rows, v, ws->v_transposed);
            pack_panels_transposed(ws->key_features, m, rows, m, ws->k_transposed);
            for (int64_t h = g * per_group; h < (g + 1) * per_group; h++) {
                load_gradients(a, ws, x, b, h, begin, rows);
                keys_from_chunk(a, ws, rows, dv, x->dvs.position);
                add_queries(a, ws, rows);
            }
        }
        through_features(a, ws, ws->key_features, 0, ws->keys, rows,
                         x->dk + b * x->dks.batch + g * x->dks.head + begin * x->dks.position, x->dks.position);
    }
    store(a, &ws->grads, task, x->grad_kv, x->grad_total, x->grad_values);
}

/* grad_kv, grad_total, grad_values: the gradients of the sums after the last key, on return of those before the first. */
int favor_backward(Params a, const float *q, Strides qs, const float *k, Strides ks, const float *v, Strides vs, const float *projection,
                   const float *kv, const float *total, const float *values, const float *size, const float *maximum, const float *out,
                   const float *dout, Strides os, const float *denominators, const float *maxima, float *dq, Strides dqs, float *dk, Strides dks,
                   float *dv, Strides dvs, float *grad_kv, float *grad_total, float *grad_values) {
    Tensors x = {q, k, v, projection, qs, ks, vs, kv, total, values, size, maximum, (float *)out, (float *)denominators, (float *)maxima, os,
                 NULL, NULL, NULL, NULL, NULL, dout, dq, dk, dv, dqs, dks, dvs, grad_kv, grad_total, grad_values};
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.kv_heads, failed, ws, make_workspace(&a, &x, &ws), free(ws.memory), backward_head(&a, &x, &ws, task))
    return failed;
}
