/* LSH attention (Reformer) and its backward pass: tokens in the order of their buckets stand in chunks, and a chunk sees itself and
   its neighbours in the ring of all rounds. Queries and keys are one vector; keys are brought to one length here. Rows are gathered
   by the order and scattered back a chunk at a time, so no sorted copy exists. All rounds of a token are one softmax.
   B batch, H heads, L length, R rounds, C chunks of all rounds, D head_dim. */

#include "rows.h"

enum { QUERIES = 64 };                                                 /* of a tile */
#define HIDDEN_KEY INT32_MAX                                           /* visible_from of padding */
typedef LSHParams Params;

typedef struct {
    const float *qk, *v;
    float *out, *logsumexp;                                            /* logsumexp [B, H, L] */
    Strides qks, vs, os;
    const float *grad_out;                                             /* from here on for the backward pass only */
    float *grad_qk, *grad_v;
    Strides grad_qks, grad_vs;
} Tensors;

/* One chunk of keys, packed as right operands. visible_from: the first position that sees the key. */
typedef struct {
    int64_t first;                                                     /* its first token in the order */
    int32_t *places, *visible_from;
    float *k_transposed, *values;                                      /* values: as rows, in the backward pass transposed */
    float *keys, *grad_keys, *grad_values;                             /* for the backward pass only */
} Slot;

typedef struct {
    Slot *slots;                                                       /* before + 1 + after; chunk i is in slot i modulo their number */
    float *gathered, *queries, *scores, *out, *top, *total;            /* top, total [L]: maximum and sum over the rounds */
    float *grad_scores, *grad_out, *query_panels, *grad_panels, *grad_keys;   /* for the backward pass only; grad_keys [L, D] */
    float *memory;
} Workspace;

static int64_t slots_of(const Params *a) { return a->before + 1 + a->after; }
static int64_t columns_of(const Params *a) { return slots_of(a) * a->chunk; }
static int64_t tokens_of(const Params *a) { return a->rounds * a->length; }
static int64_t modulo(int64_t i, int64_t n) { return (i % n + n) % n; }        /* for negative i too */

static int make_workspace(const Params *a, int backward, Workspace *ws) {
    int64_t d = a->head_dim, n = a->chunk, slots = slots_of(a), columns = columns_of(a) + 16;
    int64_t per_slot = n * (2 + d * (backward ? 5 : 2)), tile = QUERIES * (columns + 2 * d);
    int64_t only_backward = backward ? QUERIES * (columns + 3 * d) + a->length * d : 2 * a->length;
    ws->slots = calloc((size_t)slots, sizeof(Slot));
    ws->memory = malloc(sizeof(float) * (size_t)(slots * per_slot + n * d + tile + only_backward));
    if (!ws->slots || !ws->memory) return 0;
    float *next = ws->memory;
    for (int64_t i = 0; i < slots; i++) {
        Slot *s = ws->slots + i;
        s->places = (int32_t *)take(&next, n);
        s->visible_from = (int32_t *)take(&next, n);
        s->k_transposed = take(&next, n * d);
        s->values = take(&next, n * d);
        if (!backward) continue;
        s->keys = take(&next, n * d);
        s->grad_keys = take(&next, n * d);
        s->grad_values = take(&next, n * d);
    }
    ws->gathered = take(&next, n * d);
    ws->queries = take(&next, QUERIES * d);
    ws->out = take(&next, QUERIES * d);
    ws->scores = take(&next, QUERIES * columns);
    if (backward) {
        ws->grad_scores = take(&next, QUERIES * columns);
        ws->grad_out = take(&next, QUERIES * d);
        ws->query_panels = take(&next, QUERIES * d);
        ws->grad_panels = take(&next, QUERIES * d);
        ws->grad_keys = take(&next, a->length * d);
    } else {
        ws->top = take(&next, a->length);
        ws->total = take(&next, a->length);
    }
    return 1;
}
static void free_workspace(Workspace *ws) {
    free(ws->slots);
    free(ws->memory);
}

/* ------------------------------------------------------------------------------------------------------- gather and scatter */

/* to [count, D] = the rows `places` of x, times scale. */
static void gather_rows(const float *x, int64_t stride, const int32_t *places, int64_t count, int64_t d, float scale, float *to) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < d; j += 8) *(f32x8 *)(to + i * d + j) = *(const f32x8 *)(x + places[i] * stride + j) * scale;
}
static void scatter_add(const float *x, const int32_t *places, int64_t count, int64_t d, float *to, int64_t stride) {
    for (int64_t i = 0; i < count; i++) add_scaled(to + places[i] * stride, 1, x + i * d, d);
}
static float inverse_norm(const Params *a, const float *x) { return 1 / sqrtf(dot(x, x, a->head_dim) / (float)a->head_dim + a->eps); }

/* The keys and values of chunk i, -before ≤ i < C + after, into its slot. */
static Slot *load_slot(const Params *a, const Tensors *x, Workspace *ws, int64_t b, int64_t h, int64_t i) {
    int64_t n = a->chunk, d = a->head_dim, chunks = tokens_of(a) / n;
    Slot *s = ws->slots + modulo(i, slots_of(a));
    s->first = modulo(i, chunks) * n;                                  /* a short ring has a chunk in several slots */
    memcpy(s->places, a->order + (b * a->heads + h) * tokens_of(a) + s->first, sizeof(int32_t) * (size_t)n);
    for (int64_t j = 0; j < n; j++) {
        int32_t place = s->places[j];
        s->visible_from[j] = a->keep && !a->keep[b * a->length + place] ? HIDDEN_KEY : a->causal ? place : 0;
    }
    gather_rows(x->qk + b * x->qks.batch + h * x->qks.head, x->qks.position, s->places, n, d, 1, ws->gathered);
    for (int64_t j = 0; j < n; j++) scale_by(ws->gathered + j * d, inverse_norm(a, ws->gathered + j * d), d);
    pack_panels_transposed(ws->gathered, d, n, d, s->k_transposed);
    if (s->keys) pack_panels(ws->gathered, d, n, d, s->keys);
    gather_rows(x->v + b * x->vs.batch + h * x->vs.head, x->vs.position, s->places, n, d, 1, ws->gathered);
    if (s->keys) pack_panels_transposed(ws->gathered, d, n, d, s->values);
    else pack_panels(ws->gathered, d, n, d, s->values);
    if (s->keys) memset(s->grad_keys, 0, 2 * sizeof(float) * (size_t)(n * d));   /* and grad_values, which follows it */
    return s;
}

/* ------------------------------------------------------------------------------------------------------------------ scores */

/* The scores of `rows` queries for the keys of all slots, in the order of the slots. */
static void tile_scores(const Params *a, Workspace *ws, const int32_t *places, int64_t rows) {
    int64_t n = a->chunk, d = a->head_dim, stride = columns_of(a) + 16;
    for (int64_t t = 0; t < slots_of(a); t++) {
        const Slot *s = ws->slots + t;
        gemm(rows, n, d, ws->queries, d, 1, s->k_transposed, d, ws->scores + t * n, stride, 0);
        for (int64_t i = 0; i < rows; i++) {
            float *row = ws->scores + i * stride + t * n;
            for (int64_t j = 0; j < n; j += 8) {
                i32x8 visible = *(i32x8 *)(s->visible_from + j) <= places[i], own = *(i32x8 *)(s->places + j) == places[i];
                i32x8 score = (*(i32x8 *)(row + j) & visible) | ((i32x8)broadcast8(-INFINITY) & ~visible);
                *(i32x8 *)(row + j) = (score & ~own) | ((i32x8)broadcast8(a->itself) & own);
            }
        }
    }
}
/* The dropout mask of eight weights of a slot from key j on; `token` of the order reads, chunk i. */
static f32x8 keep_weights(const Params *a, int64_t head, int64_t token, int64_t i, int64_t t, int64_t j) {
    int64_t from_first = modulo(t - (i - a->before), slots_of(a));     /* which of the chunks it sees */
    uint64_t row = (uint64_t)(head * tokens_of(a) + token) * (uint64_t)columns_of(a);
    return keep_mask(&a->dropout, row + (uint64_t)(from_first * a->chunk + j));
}

/* ---------------------------------------------------------------------------------------------------------------- forward */

/* The answers of one round, added to those of the rounds before, relative to the greatest logsumexp so far. */
static void add_round(const Params *a, Workspace *ws, int64_t place, const float *here, float logsumexp, float *out) {
    float *top = ws->top + place, *total = ws->total + place;
    float most = logsumexp > *top ? logsumexp : *top, before = expf(*top - most), now = expf(logsumexp - most);
    for (int64_t d = 0; d < a->head_dim; d += 8) {
        f32x8 old = before == 0 ? broadcast8(0) : *(f32x8 *)(out + d) * before;
        *(f32x8 *)(out + d) = old + *(const f32x8 *)(here + d) * now;
    }
    *total = *total * before + now;
    *top = most;
}

static void forward_head(const Params *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t b = task / a->heads, h = task % a->heads, n = a->chunk, d = a->head_dim, stride = columns_of(a) + 16, columns = columns_of(a);
    float *out = x->out + b * x->os.batch + h * x->os.head;
    for (int64_t i = 0; i < a->length; i++) {
        ws->top[i] = -INFINITY;
        ws->total[i] = 0;
    }
    for (int64_t i = -a->before; i < a->after; i++) load_slot(a, x, ws, b, h, i);
    for (int64_t i = 0; i < tokens_of(a) / n; i++) {
        load_slot(a, x, ws, b, h, i + a->after);
        for (int64_t first = i * n; first < (i + 1) * n; first += QUERIES) {
            int64_t rows = min_of(QUERIES, (i + 1) * n - first);
            const int32_t *places = a->order + task * tokens_of(a) + first;
            gather_rows(x->qk + b * x->qks.batch + h * x->qks.head, x->qks.position, places, rows, d, a->scale, ws->queries);
            tile_scores(a, ws, places, rows);
            float inv_sum[QUERIES], logsumexp[QUERIES];
            for (int64_t r = 0; r < rows; r++) {
                float top, *row = ws->scores + r * stride, sum = exp_and_sum(row, columns, &top);
                logsumexp[r] = top + logf(sum);                        /* a query sees itself, so the sum is not 0 */
                inv_sum[r] = expf(top - logsumexp[r]);                 /* as the backward pass rounds it */
                for (int64_t t = 0; a->dropout.threshold && t < slots_of(a); t++)
                    for (int64_t j = 0; j < n; j += 8) *(f32x8 *)(row + t * n + j) *= keep_weights(a, task, first + r, i, t, j);
            }
            for (int64_t t = 0; t < slots_of(a); t++) gemm(rows, d, n, ws->scores + t * n, stride, 1, ws->slots[t].values, n, ws->out, d, t > 0);
            for (int64_t r = 0; r < rows; r++) {
                scale_by(ws->out + r * d, inv_sum[r], d);
                add_round(a, ws, places[r], ws->out + r * d, logsumexp[r], out + places[r] * x->os.position);
            }
        }
    }
    for (int64_t i = 0; i < a->length; i++) {
        float logsumexp = ws->top[i] + logf(ws->total[i]);
        if (a->rounds > 1) scale_by(out + i * x->os.position, expf(ws->top[i] - logsumexp), d);
        x->logsumexp[task * a->length + i] = logsumexp;
    }
}

/* out = Σ over the rounds of dropout(softmax) v, and logsumexp [B, H, L] of the scores of all rounds. 0, or 1: out of memory. */
int lsh_attention_forward(Params a, const float *qk, Strides qks, const float *v, Strides vs, float *out, Strides os, float *logsumexp) {
    Tensors x = {.qk = qk, .v = v, .out = out, .logsumexp = logsumexp, .qks = qks, .vs = vs, .os = os};
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.heads, failed, ws, make_workspace(&a, 0, &ws), free_workspace(&ws), forward_head(&a, &x, &ws, task))
    return failed;
}

/* --------------------------------------------------------------------------------------------------------------- backward */

/* Weights (P∘M), and the gradient of the scores dS = P ∘ (M ∘ (dout vᵀ) - δ), 0 for the own key, whose score is a constant. */
static void tile_gradients(const Params *a, const Tensors *x, Workspace *ws, int64_t task, int64_t i, int64_t first, int64_t rows) {
    int64_t n = a->chunk, d = a->head_dim, stride = columns_of(a) + 16, b = task / a->heads, h = task % a->heads;
    const int32_t *places = a->order + task * tokens_of(a) + first;
    gather_rows(x->grad_out + b * x->os.batch + h * x->os.head, x->os.position, places, rows, d, 1, ws->grad_out);
    for (int64_t t = 0; t < slots_of(a); t++) {
        const Slot *s = ws->slots + t;
        gemm(rows, n, d, ws->grad_out, d, 1, s->values, d, ws->grad_scores + t * n, stride, 0);
        for (int64_t r = 0; r < rows; r++) {
            float *row = ws->scores + r * stride + t * n, *grad_row = ws->grad_scores + r * stride + t * n;
            float delta = dot(ws->grad_out + r * d, x->out + b * x->os.batch + h * x->os.head + places[r] * x->os.position, d);
            float logsumexp = x->logsumexp[task * a->length + places[r]];
            for (int64_t j = 0; j < n; j += 8) {
                f32x8 weight = exp8(*(f32x8 *)(row + j) - logsumexp);
                f32x8 keep = a->dropout.threshold ? keep_weights(a, task, first + r, i, t, j) : broadcast8(1);
                i32x8 others = *(i32x8 *)(s->places + j) != places[r];
                *(f32x8 *)(row + j) = weight * keep;
                *(f32x8 *)(grad_row + j) = (f32x8)((i32x8)(weight * (*(f32x8 *)(grad_row + j) * keep - delta)) & others);
            }
        }
    }
}
/* What the keys of a chunk got from all their queries. */
static void flush_slot(const Params *a, const Tensors *x, Workspace *ws, int64_t b, int64_t h, int64_t i) {
    const Slot *s = ws->slots + modulo(i, slots_of(a));
    scatter_add(s->grad_keys, s->places, a->chunk, a->head_dim, ws->grad_keys, a->head_dim);
    scatter_add(s->grad_values, s->places, a->chunk, a->head_dim, x->grad_v + b * x->grad_vs.batch + h * x->grad_vs.head, x->grad_vs.position);
}

static void backward_head(const Params *a, const Tensors *x, Workspace *ws, int64_t task) {
    int64_t b = task / a->heads, h = task % a->heads, n = a->chunk, d = a->head_dim, stride = columns_of(a) + 16;
    const float *qk = x->qk + b * x->qks.batch + h * x->qks.head;
    float *grad_qk = x->grad_qk + b * x->grad_qks.batch + h * x->grad_qks.head, *grad_v = x->grad_v + b * x->grad_vs.batch + h * x->grad_vs.head;
    memset(ws->grad_keys, 0, sizeof(float) * (size_t)(a->length * d));
    for (int64_t i = 0; i < a->length; i++) {
        memset(grad_qk + i * x->grad_qks.position, 0, sizeof(float) * (size_t)d);
        memset(grad_v + i * x->grad_vs.position, 0, sizeof(float) * (size_t)d);
    }
    int64_t chunks = tokens_of(a) / n;
    for (int64_t i = -a->before; i < a->after; i++) load_slot(a, x, ws, b, h, i);
    for (int64_t i = 0; i < chunks; i++) {
        load_slot(a, x, ws, b, h, i + a->after);
        for (int64_t first = i * n; first < (i + 1) * n; first += QUERIES) {
            int64_t rows = min_of(QUERIES, (i + 1) * n - first);
            const int32_t *places = a->order + task * tokens_of(a) + first;
            gather_rows(qk, x->qks.position, places, rows, d, a->scale, ws->queries);
            tile_scores(a, ws, places, rows);
            tile_gradients(a, x, ws, task, i, first, rows);
            pack_panels(ws->queries, d, rows, d, ws->query_panels);    /* scale · q */
            pack_panels(ws->grad_out, d, rows, d, ws->grad_panels);
            for (int64_t t = 0; t < slots_of(a); t++) {
                Slot *s = ws->slots + t;
                gemm(n, d, rows, ws->scores + t * n, 1, stride, ws->grad_panels, rows, s->grad_values, d, 1);
                gemm(n, d, rows, ws->grad_scores + t * n, 1, stride, ws->query_panels, rows, s->grad_keys, d, 1);
                gemm(rows, d, n, ws->grad_scores + t * n, stride, 1, s->keys, n, ws->out, d, t > 0);
            }
            scale_by(ws->out, a->scale, rows * d);
            scatter_add(ws->out, places, rows, d, grad_qk, x->grad_qks.position);
        }
        flush_slot(a, x, ws, b, h, i - a->before);
    }
    for (int64_t i = chunks - a->before; i < chunks + a->after; i++) flush_slot(a, x, ws, b, h, i);

    /* through keys = x / norm: dx = (dk - k (k · dk) / D) / norm */
    for (int64_t i = 0; i < a->length; i++) {
        const float *vector = qk + i * x->qks.position, *grad = ws->grad_keys + i * d;
        float inverse = inverse_norm(a, vector), along = dot(vector, grad, d) * inverse / (float)d;
        add_scaled(grad_qk + i * x->grad_qks.position, inverse, grad, d);
        add_scaled(grad_qk + i * x->grad_qks.position, -along * inverse * inverse, vector, d);
    }
}

int lsh_attention_backward(Params a, const float *qk, Strides qks, const float *v, Strides vs, const float *out, const float *dout, Strides os,
                           const float *logsumexp, float *grad_qk, Strides grad_qks, float *grad_v, Strides grad_vs) {
    Tensors x = {qk, v, (float *)out, (float *)logsumexp, qks, vs, os, dout, grad_qk, grad_v, grad_qks, grad_vs};
    int failed = 0;
    FOR_EACH_TASK(a.batch * a.heads, failed, ws, make_workspace(&a, 1, &ws), free_workspace(&ws), backward_head(&a, &x, &ws, task))
    return failed;
}
