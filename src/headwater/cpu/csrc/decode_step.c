/* One decoding step of a Transformer: all layers in one call.

   The readable modules in core/ are the definition; this file computes the same, arranged for memory bandwidth. With one to
   a few rows (tokens) the time is that of reading the weights once; many rows (beams, batched requests, prompts) use each
   weight while it is in the cache. The rows of each matrix are partitioned over the threads, which meet at barriers inside
   one parallel region per step.

   Plain C with OpenMP. quant_formats.h has the weight formats and their dot products, gemm_panels.h the products of many rows. */

#include "threads.h"
#include "quant_formats.h"
#include "decode_adapters.h"
#include "decode_attention.h"
#include "gemm_panels.h"
#include "int8.h"
#include "layout.h"

enum { RMS, LAYER };                                     /* norms */
enum { SILU, GELU, GELU_TANH, RELU, QUICK_GELU };        /* activations */
enum { MAX_GEMV_ROWS = MAX_DOT_ROWS };                             /* rows of a matrix-vector product; more rows use panels */

typedef struct { int32_t kind; float eps; const float *weight, *bias; } Norm;  /* without weight: no norm */
typedef struct {                                         /* a branch: x -> post_norm(x + layer(norm(x))) */
    Norm attn_norm, attn_post, cross_norm, cross_post, ffn_norm, ffn_post, q_norm, k_norm;
    Matrix q, k, v, out, cross_q, cross_out, gate, up, down;  /* without data: no matrix */
    int32_t window;                                      /* sliding window: tokens that a token sees, itself included; 0: all */
    float *keys, *values;                                /* KV cache [cache rows][kv_heads][length][head_dim] */
    const void *source_keys, *source_values;             /* floats [sources][kv_heads][max_source_length][head_dim], or 16 bits in panels (decode_attention.h) */
} Layer;
typedef struct {
    int32_t layers, d_model, heads, kv_heads, head_dim, rotary_dim, d_ff, vocab, length, act;
    int32_t max_source_length;                           /* tokens of the longest source */
    int32_t source_panels;                               /* whether keys and values of the sources lie in panels */
    int32_t adapters, max_rank;                          /* adapters in all, and the highest rank among them */
    float scale, embed_scale, head_scale;
    Matrix token_embedding, head;                        /* often the same */
    const float *position_embeddings, *cos, *sin;        /* [length][d_model], or none; rotary [length][rotary_dim / 2] */
    Norm embed_norm, final_norm;
    Layer *layer;
    const int32_t *row_of_token;                         /* [rows][length]: the cache row that has each token's keys; none: its own */
    const int32_t *source_lengths;                       /* [sources] */
} Model;
typedef struct { int32_t token_id, position, cache_row, source, num_keys, adapter; } Token;  /* a token at its position in its cache row, which sees num_keys keys; adapter -1: none */
typedef struct {                                         /* buffers for n rows of max_width columns; cpu/decode.py allocates them */
    float *x, *y, *qkv, *proj_in, *hidden, *scores, *panels;
    float *low_rank, *update;                            /* A x of each row and reader; what a branch adds to x, before it is added */
    int8_t *q;                                           /* activations quantized to 8 bits; ds: their scales */
    float *ds;
    int32_t threads;                                     /* the buffers are allocated for so many */
} Scratch;
typedef struct {
    const Model *m;
    const Token *rows;
    const int32_t *output_rows;                          /* the token of each row; none: of its number */
    int n, max_width, adapted;                           /* adapted: a token has an adapter */
    Scratch s;
} StepContext;

#define BARRIER _Pragma("omp barrier")
/* Few rows are prepared by every thread for itself, which is faster than a barrier; many are distributed over the threads. */
#define FOR_ROWS(i, t) for (int i = (t)->n > MAX_GEMV_ROWS ? omp_get_thread_num() : 0; i < (t)->n; i += (t)->n > MAX_GEMV_ROWS ? omp_get_num_threads() : 1)
#define SYNC_IF_MANY(t) if ((t)->n > MAX_GEMV_ROWS) { BARRIER }
/* A thread's part of 0 .. count: a contiguous range, or every so many-th. */
#define FOR_PARTITION(i, count) for (int i = (int)((int64_t)(count) * omp_get_thread_num() / omp_get_num_threads()), \
    end_##i = (int)((int64_t)(count) * (omp_get_thread_num() + 1) / omp_get_num_threads()); i < end_##i; i++)
#define FOR_STRIDED(i, count) for (int i = omp_get_thread_num(); i < (count); i += omp_get_num_threads())

/* ------------------------------------------------------------------------------------------------ single rows */

static void normalize(const Norm *n, const float *x, int d, float *y) {
    if (!n->weight) { if (y != x) memcpy(y, x, sizeof(float) * d); return; }
    float mean = 0, square = 0;
    if (n->kind == LAYER) { for (int i = 0; i < d; i++) mean += x[i]; mean /= d; }
    for (int i = 0; i < d; i++) square += (x[i] - mean) * (x[i] - mean);
    float scale = 1 / sqrtf(square / d + n->eps);
    for (int i = 0; i < d; i++) y[i] = (x[i] - mean) * scale * n->weight[i] + (n->bias ? n->bias[i] : 0);
}

static void act(int kind, float *h, const float *up, int from, int to) {
    switch (kind) {                                      /* a loop each, so that each is vectorized */
        case SILU: for (int i = from; i < to; i++) h[i] = h[i] / (1 + fast_exp(-h[i])); break;
        case GELU: for (int i = from; i < to; i++) h[i] = h[i] * normal_cdf(h[i]); break;
        case GELU_TANH:                                  /* (1 + tanh a) / 2 = 1 / (1 + e⁻²ᵃ) */
            for (int i = from; i < to; i++) h[i] = h[i] / (1 + fast_exp(-1.59576912f * (h[i] + 0.044715f * h[i] * h[i] * h[i])));
            break;
        case RELU: for (int i = from; i < to; i++) h[i] = h[i] < 0 ? 0 : h[i]; break;  /* NaN stays NaN */
        default: for (int i = from; i < to; i++) h[i] = h[i] / (1 + fast_exp(-1.702f * h[i]));
    }
    if (up) for (int i = from; i < to; i++) h[i] *= up[i];
}

static void apply_rotary(const Model *m, float *h, int position) {
    int half_width = m->rotary_dim / 2;
    const float *cos = m->cos + (size_t)position * half_width, *sin = m->sin + (size_t)position * half_width;
    for (int i = 0; i < half_width; i++) {
        float a = h[i], b = h[i + half_width];
        h[i] = a * cos[i] - b * sin[i];
        h[i + half_width] = b * cos[i] + a * sin[i];
    }
}

/* ------------------------------------------------------------------------------------ all threads together */

/* Where a thread's own rows begin, if there are few rows. */
static size_t thread_offset(const StepContext *t) { return t->n > MAX_GEMV_ROWS ? 0 : (size_t)omp_get_thread_num() * MAX_GEMV_ROWS * t->max_width; }
static float *thread_y(const StepContext *t) { return t->s.y + thread_offset(t); }
static QuantizedRow quantized_row(const StepContext *t, int i, int from) {
    if (t->n > MAX_GEMV_ROWS) return quantized_row_at(t->s.q, t->s.ds, t->max_width, i, from);
    size_t at = thread_offset(t) + (size_t)i * t->max_width + from;
    return (QuantizedRow){t->s.q + at, t->s.ds + at / 16, 4};
}

/* Quantize columns from .. to of row i, if any of the `count` matrices from `readers` on is quantized. */
static void quantize_columns(const StepContext *t, int i, const float *x, int from, int to, const Matrix *readers, int count) {
    int quantized = 0;
    for (const Matrix *m = readers; m < readers + count; m++) quantized |= m->data && m->kind >= Q8_0;
    if (quantized) quantize_row(x + from, to - from, quantized_row(t, i, from));
}

/* What the adapter of row i changes in a matrix; none without an adapter. */
static const LinearChange *change_of(const StepContext *t, const Matrix *m, int i) {
    int adapter = t->rows[t->output_rows ? t->output_rows[i] : i].adapter;
    return m->changes && adapter >= 0 ? m->changes + adapter : NULL;
}

/* A x of row i, of the matrix that is number `reader` of those that read x. */
static float *low_rank_of(const StepContext *t, int i, int reader) {
    size_t row = (t->n > MAX_GEMV_ROWS ? 0 : (size_t)omp_get_thread_num() * MAX_GEMV_ROWS) + i;
    return t->s.low_rank + (row * MAX_READERS + reader) * t->m->max_rank;
}

static void low_rank_products(const StepContext *t, int i, const float *x, const Matrix *readers, int count) {
    if (t->adapted) for (int reader = 0; reader < count; reader++) {
        const LinearChange *c = change_of(t, readers + reader, i);
        if (c) low_rank_product(c, x, readers[reader].cols, low_rank_of(t, i, reader));
    }
}

/* A thread's range of a matrix's rows: whole blocks of 32, and the last thread has the rest. */
typedef struct { int from, to; } RowRange;
static RowRange thread_rows(int rows) {
    int64_t blocks = rows / 32, me = omp_get_thread_num(), all = omp_get_num_threads();
    return (RowRange){(int)(blocks * me / all) * 32, me + 1 == all ? rows : (int)(blocks * (me + 1) / all) * 32};
}

/* y[i][rows of s] (+)= m x[i] + bias. */
static void base_linear(const StepContext *t, const Matrix *m, RowRange s, const float *x, float *y, int y_stride, int accumulate) {
    if (t->n > MAX_GEMV_ROWS) {
        float *panel = t->s.panels + (size_t)omp_get_thread_num() * PANEL_ROWS * t->max_width;
        for (int p = s.from / PANEL_ROWS; p < (s.to + PANEL_ROWS - 1) / PANEL_ROWS; p++)
            panel_gemm(m, p, panel, x, quantized_row(t, 0, 0), t->n, t->max_width, y, y_stride, accumulate);
        return;
    }
    if (rows_share_weights(m, t->n)) {
        for (int r = s.from; r < s.to; r++) {
            float v[MAX_GEMV_ROWS], bias = m->bias ? m->bias[r] : 0;
            dot_many(m, matrix_row(m, r), t->n, x, quantized_row(t, 0, 0), t->max_width, v);
            for (int i = 0; i < t->n; i++) {
                float *to = y + (size_t)i * y_stride + r;
                *to = v[i] + bias + (accumulate ? *to : 0);
            }
        }
        return;
    }
    for (int r = s.from; r < s.to; r += 4) {             /* four rows of weights are used by all activations while they are in the cache */
        int count = s.to - r < 4 ? s.to - r : 4;
        for (int i = 0; i < t->n; i++) {
            float v[4], *to = y + (size_t)i * y_stride + r;
            dot_rows(m, r, count, x + (size_t)i * t->max_width, quantized_row(t, i, 0), v);
            for (int j = 0; j < count; j++) to[j] = v[j] + (m->bias ? m->bias[r + j] : 0) + (accumulate ? to[j] : 0);
        }
    }
}

/* y[i][0..rows) (+)= m x[i] + bias with the change of the row's adapter, the rows of m partitioned over the threads. */
static void partitioned_linear(const StepContext *t, const Matrix *m, int reader, const float *x, float *y, int y_stride, int accumulate) {
    RowRange s = thread_rows(m->rows);
    if (!t->adapted || !m->changes) { base_linear(t, m, s, x, y, y_stride, accumulate); return; }
    float *out = accumulate ? t->s.update : y;
    base_linear(t, m, s, x, out, y_stride, 0);
    for (int i = 0; i < t->n; i++) {
        const LinearChange *c = change_of(t, m, i);
        float *row = out + (size_t)i * y_stride, *to = y + (size_t)i * y_stride;
        if (c) change_output(c, low_rank_of(t, i, reader), m->rows, s.from, s.to, row);
        if (accumulate) for (int j = s.from; j < s.to; j++) to[j] += row[j];
    }
}

/* Between two branches: x = after(x), the last one's post_norm; y = before(x) · scale, the input of the next one's matrices. */
static void begin_branch(const StepContext *t, const Norm *after, const Norm *before, float scale, const Matrix *readers, int count) {
    int D = t->m->d_model;
    if (after->weight) {
        FOR_STRIDED(i, t->n) normalize(after, t->s.x + (size_t)i * D, D, t->s.x + (size_t)i * D);
        BARRIER
    }
    FOR_ROWS(i, t) {
        float *y = thread_y(t) + (size_t)i * t->max_width;
        normalize(before, t->s.x + (size_t)i * D, D, y);
        if (scale != 1) for (int j = 0; j < D; j++) y[j] *= scale;
        quantize_columns(t, i, y, 0, D, readers, count);
        low_rank_products(t, i, y, readers, count);
    }
    SYNC_IF_MANY(t)
}

/* The end of a branch: x += out(proj_in), proj_in [n][max_width]. */
static void end_branch(const StepContext *t, const Matrix *out) {
    BARRIER
    FOR_ROWS(i, t) {
        const float *proj_in = t->s.proj_in + (size_t)i * t->max_width;
        quantize_columns(t, i, proj_in, 0, out->cols, out, 1);
        low_rank_products(t, i, proj_in, out, 1);
    }
    SYNC_IF_MANY(t)
    partitioned_linear(t, out, 0, t->s.proj_in, t->s.x, t->m->d_model, 1);
    BARRIER
}

static float *thread_scores(const StepContext *t) { return t->s.scores + (size_t)omp_get_thread_num() * (t->m->length + SOURCE_ROWS * t->m->max_source_length); }
static float *proj_in_of(const StepContext *t, int i, int head) { return t->s.proj_in + (size_t)i * t->max_width + head * t->m->head_dim; }

static void self_attention(const StepContext *t, const Layer *l) {
    const Model *m = t->m;
    int H = m->heads, G = m->kv_heads, K = m->head_dim, y_stride = (H + 2 * G) * K;
    size_t cache_row_stride = (size_t)G * m->length * K;
    partitioned_linear(t, &l->q, 0, thread_y(t), t->s.qkv, y_stride, 0);
    partitioned_linear(t, &l->k, 1, thread_y(t), t->s.qkv + H * K, y_stride, 0);
    partitioned_linear(t, &l->v, 2, thread_y(t), t->s.qkv + (H + G) * K, y_stride, 0);
    BARRIER
    FOR_PARTITION(job, t->n * G) {                       /* keys: norm, rotary, into the cache; values: into the cache */
        int i = job / G, g = job % G;
        float *k = t->s.qkv + (size_t)i * y_stride + (H + g) * K, *v = k + G * K;
        normalize(&l->k_norm, k, K, k);
        apply_rotary(m, k, t->rows[i].position);
        size_t here = t->rows[i].cache_row * cache_row_stride + ((size_t)g * m->length + t->rows[i].position) * K;
        memcpy(l->keys + here, k, sizeof(float) * K);
        memcpy(l->values + here, v, sizeof(float) * K);
    }
    BARRIER
    FOR_STRIDED(job, t->n * H) {                         /* later tokens see more keys: neighbours go to different threads */
        int i = job / H, h = job % H, last = t->rows[i].num_keys, at = t->rows[i].cache_row;
        float *q = t->s.qkv + (size_t)i * y_stride + h * K;
        normalize(&l->q_norm, q, K, q);
        apply_rotary(m, q, t->rows[i].position);
        const int32_t *row_of_token = m->row_of_token ? m->row_of_token + (size_t)at * m->length : NULL;
        size_t base = (row_of_token ? 0 : at * cache_row_stride) + (size_t)(h / (H / G)) * m->length * K;
        KVView keys = {l->keys + base, row_of_token, cache_row_stride, K}, values = {l->values + base, row_of_token, cache_row_stride, K};
        decode_attention(q, &keys, &values, l->window && last > l->window ? last - l->window : 0, last, m->scale, thread_scores(t), proj_in_of(t, i, h));
    }
    end_branch(t, &l->out);
}

/* The first of the tokens after i that do not read the same source as i, at most SOURCE_ROWS later. */
static int end_of_source_rows(const StepContext *t, int i) {
    int end = i + 1;
    while (end < t->n && end - i < SOURCE_ROWS && t->rows[end].source == t->rows[i].source) end++;
    return end;
}

static void attend_to_source_panels(const StepContext *t, const Layer *l) {
    const Model *m = t->m;
    int H = m->heads, G = m->kv_heads, K = m->head_dim, length = m->max_source_length, job = 0;
    for (int h = 0; h < H; h++)
        for (int i = 0, end; i < t->n; i = end, job++) {
            end = end_of_source_rows(t, i);
            if (job % omp_get_num_threads() != omp_get_thread_num()) continue;
            int source = t->rows[i].source;
            size_t base = ((size_t)source * G + h / (H / G)) * length * K;
            source_attention(end - i, t->s.qkv + ((size_t)i * H + h) * K, (size_t)H * K, (const uint16_t *)l->source_keys + base, (const uint16_t *)l->source_values + base,
                             length, m->source_lengths[source], K, m->scale, thread_scores(t), proj_in_of(t, i, h), t->max_width);
        }
}

static void cross_attention(const StepContext *t, const Layer *l) {
    const Model *m = t->m;
    int H = m->heads, G = m->kv_heads, K = m->head_dim;
    partitioned_linear(t, &l->cross_q, 0, thread_y(t), t->s.qkv, H * K, 0);
    BARRIER
    if (m->source_panels) attend_to_source_panels(t, l);
    else FOR_PARTITION(job, t->n * H) {                  /* a head's keys and values serve all tokens while they are in the cache */
        int i = job % t->n, h = job / t->n, source = t->rows[i].source;
        size_t base = ((size_t)source * G + h / (H / G)) * m->max_source_length * K;
        KVView keys = {(const float *)l->source_keys + base, NULL, 0, K}, values = {(const float *)l->source_values + base, NULL, 0, K};
        decode_attention(t->s.qkv + ((size_t)i * H + h) * K, &keys, &values, 0, m->source_lengths[source], m->scale, thread_scores(t), proj_in_of(t, i, h));
    }
    end_branch(t, &l->cross_out);
}

static void feed_forward(const StepContext *t, const Layer *l) {
    int F = t->m->d_ff, gated = l->gate.data != NULL;
    if (gated) partitioned_linear(t, &l->gate, 0, thread_y(t), t->s.hidden, 2 * F, 0);
    partitioned_linear(t, &l->up, 1, thread_y(t), t->s.hidden + (gated ? F : 0), 2 * F, 0);
    RowRange own_rows = thread_rows(F);                  /* a thread continues with the columns that it has computed */
    SYNC_IF_MANY(t)                                      /* the quantized y is overwritten below: every thread must have read it */
    for (int i = 0; i < t->n; i++) {
        float *h = t->s.hidden + (size_t)i * 2 * F, *proj_in = t->s.proj_in + (size_t)i * t->max_width;
        act(t->m->act, h, gated ? h + F : NULL, own_rows.from, own_rows.to);
        memcpy(proj_in + own_rows.from, h + own_rows.from, sizeof(float) * (own_rows.to - own_rows.from));
        const LinearChange *c = change_of(t, &l->down, i);
        if (c) change_input(c, proj_in, own_rows.from, own_rows.to);
        if (t->n > MAX_GEMV_ROWS) quantize_columns(t, i, proj_in, own_rows.from, own_rows.to, &l->down, 1);
    }
    BARRIER
    FOR_ROWS(i, t) {
        const float *proj_in = t->s.proj_in + (size_t)i * t->max_width;
        if (t->n <= MAX_GEMV_ROWS) quantize_columns(t, i, proj_in, 0, F, &l->down, 1);
        low_rank_products(t, i, proj_in, &l->down, 1);
    }
    if (t->adapted) SYNC_IF_MANY(t)
    partitioned_linear(t, &l->down, 0, t->s.proj_in, t->s.x, t->m->d_model, 1);
    BARRIER
}

static void embed(const StepContext *t) {
    const Model *m = t->m;
    int D = m->d_model;
    FOR_STRIDED(i, t->n) {
        float *x = t->s.x + (size_t)i * D;
        dequantize_row(&m->token_embedding, t->rows[i].token_id, x);
        for (int j = 0; j < D; j++) x[j] = x[j] * m->embed_scale + (m->position_embeddings ? m->position_embeddings[(size_t)t->rows[i].position * D + j] : 0);
    }
    BARRIER
}

/* Returns the norm that is still to be applied to x after the last branch. */
static const Norm *run_layers(const StepContext *t) {
    const Norm *after = &t->m->embed_norm;
    embed(t);
    for (const Layer *l = t->m->layer; l < t->m->layer + t->m->layers; l++) {
        begin_branch(t, after, &l->attn_norm, 1, &l->q, 3);
        self_attention(t, l);
        after = &l->attn_post;
        if (l->cross_q.data) {
            begin_branch(t, after, &l->cross_norm, 1, &l->cross_q, 1);
            cross_attention(t, l);
            after = &l->cross_post;
        }
        begin_branch(t, after, &l->ffn_norm, 1, &l->gate, 2);
        feed_forward(t, l);
        after = &l->ffn_post;
    }
    return after;
}

/* ------------------------------------------------------------------------------------------------ functions that Python calls */

/* n tokens -> logits [count][vocab] of the rows output_rows, ascending; without a head, their hidden states. */
void decode_step(const Model *m, const Token *rows, int n, const int32_t *output_rows, int count, Scratch s, int max_width, float *logits) {
    StepContext all = {.m = m, .rows = rows, .n = n, .max_width = max_width, .s = s};
    for (int i = 0; i < n; i++) all.adapted |= rows[i].adapter >= 0;
    StepContext last = all;
    last.n = count;
    last.output_rows = output_rows;
#pragma omp parallel num_threads(s.threads)
    {
        const Norm *after = run_layers(&all);
        if (omp_get_thread_num() == 0) for (size_t i = 0, D = m->d_model; i < (size_t)count; i++) memmove(s.x + i * D, s.x + (size_t)output_rows[i] * D, sizeof(float) * D);
        BARRIER
        begin_branch(&last, after, &m->final_norm, m->head_scale, &m->head, 1);
        if (m->head.data) partitioned_linear(&last, &m->head, 0, thread_y(&last), logits, m->vocab, 0);
        else FOR_STRIDED(i, count) memcpy(logits + (size_t)i * m->d_model, thread_y(&last) + (size_t)i * max_width, sizeof(float) * m->d_model);
    }
}

void dequantize(const Matrix *m, float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int r = 0; r < m->rows; r++) dequantize_row(m, r, out + (size_t)r * m->cols);
}

/* y [n][rows] = x [n][cols] Wᵀ + b, activations not quantized: W is dequantized into the cache. panels [threads][PANEL_ROWS · cols]: scratch. */
void quantized_linear(const Matrix *m, const float *x, int n, float *y, float *panels, int threads) {
    size_t cols = m->cols;
#pragma omp parallel num_threads(threads)
    {
        float *panel = panels + omp_get_thread_num() * PANEL_ROWS * cols;
        if (n > MAX_GEMV_ROWS) {
            FOR_PARTITION(p, (m->rows + PANEL_ROWS - 1) / PANEL_ROWS) panel_gemm(m, p, panel, x, (QuantizedRow){0}, n, cols, y, m->rows, 0);
        } else FOR_PARTITION(r, m->rows) {
            dequantize_row(m, r, panel);                 /* into the L1 cache */
            for (int i = 0; i < n; i++) y[(size_t)i * m->rows + r] = dot_f32(panel, x + i * cols, m->cols) + (m->bias ? m->bias[r] : 0);
        }
    }
}

/* Sizes and offsets of the structs above, and the values of the constants, for cpu/layout.py to compare. */
const LayoutEntry *layout(void) {
    static const LayoutEntry entries[] = {
        CONSTANT(BLOCK_SIZE), CONSTANT(PANEL_ROWS), CONSTANT(TILE_ROWS), CONSTANT(MAX_GEMV_ROWS), CONSTANT(MAX_READERS), CONSTANT(HAVE_SOURCE_PANELS), CONSTANT(SOURCE_PANEL), CONSTANT(SOURCE_ROWS),
        CONSTANT(HAVE_INT8_LINEAR), CONSTANT(INT8_FEW_ROWS), CONSTANT(INT8_PANEL), CONSTANT(INT8_GROUP), CONSTANT(INT8_MAX_COLUMNS),
        CONSTANT(F32), CONSTANT(F16), CONSTANT(BF16), CONSTANT(Q8_0), CONSTANT(Q4_0), CONSTANT(Q4_1),
        CONSTANT(F32_BYTES), CONSTANT(F16_BYTES), CONSTANT(BF16_BYTES), CONSTANT(Q8_0_BYTES),
        CONSTANT(Q4_0_BYTES), CONSTANT(Q4_1_BYTES),
        CONSTANT(RMS), CONSTANT(LAYER), CONSTANT(SILU), CONSTANT(GELU), CONSTANT(GELU_TANH), CONSTANT(RELU), CONSTANT(QUICK_GELU),
        STRUCT(Matrix), FIELD(Matrix, kind), FIELD(Matrix, rows), FIELD(Matrix, cols), FIELD(Matrix, data), FIELD(Matrix, bias),
        FIELD(Matrix, changes),
        STRUCT(LinearChange), FIELD(LinearChange, rank), FIELD(LinearChange, a), FIELD(LinearChange, b), FIELD(LinearChange, gain),
        FIELD(LinearChange, shift), FIELD(LinearChange, input_gain),
        STRUCT(Norm), FIELD(Norm, kind), FIELD(Norm, eps), FIELD(Norm, weight), FIELD(Norm, bias),
        STRUCT(Layer), FIELD(Layer, attn_norm), FIELD(Layer, attn_post), FIELD(Layer, cross_norm), FIELD(Layer, cross_post),
        FIELD(Layer, ffn_norm), FIELD(Layer, ffn_post), FIELD(Layer, q_norm), FIELD(Layer, k_norm), FIELD(Layer, q), FIELD(Layer, k),
        FIELD(Layer, v), FIELD(Layer, out), FIELD(Layer, cross_q), FIELD(Layer, cross_out), FIELD(Layer, gate), FIELD(Layer, up),
        FIELD(Layer, down), FIELD(Layer, window), FIELD(Layer, keys), FIELD(Layer, values), FIELD(Layer, source_keys),
        FIELD(Layer, source_values),
        STRUCT(Model), FIELD(Model, layers), FIELD(Model, d_model), FIELD(Model, heads), FIELD(Model, kv_heads), FIELD(Model, head_dim),
        FIELD(Model, rotary_dim), FIELD(Model, d_ff), FIELD(Model, vocab), FIELD(Model, length), FIELD(Model, act),
        FIELD(Model, max_source_length), FIELD(Model, source_panels), FIELD(Model, adapters), FIELD(Model, max_rank), FIELD(Model, scale), FIELD(Model, embed_scale), FIELD(Model, head_scale),
        FIELD(Model, token_embedding), FIELD(Model, head), FIELD(Model, position_embeddings), FIELD(Model, cos), FIELD(Model, sin),
        FIELD(Model, embed_norm), FIELD(Model, final_norm), FIELD(Model, layer), FIELD(Model, row_of_token), FIELD(Model, source_lengths),
        STRUCT(Token), FIELD(Token, token_id), FIELD(Token, position), FIELD(Token, cache_row), FIELD(Token, source),
        FIELD(Token, num_keys), FIELD(Token, adapter),
        STRUCT(Scratch), FIELD(Scratch, x), FIELD(Scratch, y), FIELD(Scratch, qkv), FIELD(Scratch, proj_in), FIELD(Scratch, hidden),
        FIELD(Scratch, scores), FIELD(Scratch, panels), FIELD(Scratch, low_rank), FIELD(Scratch, update), FIELD(Scratch, q), FIELD(Scratch, ds), FIELD(Scratch, threads),
        STRUCT(Int8Rows), FIELD(Int8Rows, q), FIELD(Int8Rows, scale), FIELD(Int8Rows, sum), FIELD(Int8Rows, rows), FIELD(Int8Rows, columns),
        END_OF_LAYOUT,
    };
    return entries;
}
