/* One decoding step of a Transformer's decoder: every layer in one call, no Python between.

   The readable modules in core/ are the definition; this file is the same arithmetic, laid out for memory. For one to a
   few rows nothing is computed twice, so time is the time to read the weights once; many rows (the beams of many
   sentences, many requests) meet each weight while it is near. Threads share the rows of each matrix and meet at
   barriers, inside one parallel region a step.

   Plain C with OpenMP. formats.h has the formats of weights and their products, panels.h the products of many rows. */

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif
#include "formats.h"
#include "attend.h"
#include "panels.h"

enum { RMS, LAYER };                                     /* norms */
enum { SILU, GELU, GELU_TANH, RELU, QUICK_GELU };        /* activations */
enum { FEW = 4 };                                        /* rows; beyond them panels are the better way. structures.py knows it, too */

typedef struct { int32_t kind; float eps; const float *weight, *bias; } Norm;      /* without weight: left out */
typedef struct {                                         /* a branch: x -> post_norm(x + layer(norm(x))) */
    Norm attn_norm, attn_post, cross_norm, cross_post, ffn_norm, ffn_post, q_norm, k_norm;
    Matrix q, k, v, out, cross_q, cross_out, gate, up, down;                /* without data: there is none */
    int32_t window;                                      /* how many tokens back, itself included; 0 = all */
    float *keys, *values;                                /* [slots][kv_heads][length][head_dim] */
    const float *source_keys, *source_values;            /* [sources][kv_heads][heard][head_dim] */
} Layer;
typedef struct {
    int32_t layers, d_model, heads, kv_heads, head_dim, turned, d_ff, vocab, length, act;
    int32_t heard;                                       /* tokens of the longest source */
    float scale, embed_scale, head_scale;
    Matrix table, head;                                  /* tokens, and the output (often the same) */
    const float *places, *cos, *sin;                     /* what is added at each place [length][d_model], or none; angles [length][turned / 2] */
    Norm embed_norm, final;
    Layer *layer;
    const int32_t *home;                                 /* [slots][length]: in whose slot a token's keys lie; none: its own */
    const int32_t *source_length;                        /* [sources] */
} Model;
typedef struct { int32_t token, place, slot, source, sees; } Row;    /* a token at its place in the cache of its slot, which sees so many */
typedef struct {                                         /* room for n rows, `most` columns each; stepping.py makes it */
    float *x, *y, *qkv, *mixed, *hidden, *scores, *panels;
    int8_t *q;                                           /* activations rounded; ds: their scales */
    float *ds;
    int32_t threads;                                     /* so many may share it */
} Scratch;
typedef struct {
    const Model *m;
    const Row *rows;
    int n, most;
    Scratch s;
} Step;

#define MEET _Pragma("omp barrier")
/* Few rows are made ready by every thread for itself, which takes less time than to wait for another; many in turn. */
#define MADE_READY(i, t) for (int i = (t)->n > FEW ? omp_get_thread_num() : 0; i < (t)->n; i += (t)->n > FEW ? omp_get_num_threads() : 1)
#define READY(t) if ((t)->n > FEW) { MEET }
/* A thread's share of 0 .. count: neighbours, or every so many-th. */
#define EACH(i, count) for (int i = (int)((int64_t)(count) * omp_get_thread_num() / omp_get_num_threads()), \
    end_##i = (int)((int64_t)(count) * (omp_get_thread_num() + 1) / omp_get_num_threads()); i < end_##i; i++)
#define IN_TURN(i, count) for (int i = omp_get_thread_num(); i < (count); i += omp_get_num_threads())

/* ------------------------------------------------------------------------------------------------ single rows */

static void normed(const Norm *n, const float *x, int d, float *y) {
    if (!n->weight) { if (y != x) memcpy(y, x, sizeof(float) * d); return; }
    float mean = 0, square = 0;
    if (n->kind == LAYER) { for (int i = 0; i < d; i++) mean += x[i]; mean /= d; }
    for (int i = 0; i < d; i++) square += (x[i] - mean) * (x[i] - mean);
    float by = 1 / sqrtf(square / d + n->eps);
    for (int i = 0; i < d; i++) y[i] = (x[i] - mean) * by * n->weight[i] + (n->bias ? n->bias[i] : 0);
}

static void act(int kind, float *h, const float *up, int from, int to) {
    switch (kind) {                                      /* a loop each, so that each becomes vectors */
        case SILU: for (int i = from; i < to; i++) h[i] = h[i] / (1 + quick_exp(-h[i])); break;
        case GELU: for (int i = from; i < to; i++) h[i] = 0.5f * h[i] * (1 + erff(h[i] * 0.70710678f)); break;
        case GELU_TANH:                                  /* (1 + tanh a) / 2 = 1 / (1 + e⁻²ᵃ) */
            for (int i = from; i < to; i++) h[i] = h[i] / (1 + quick_exp(-1.59576912f * (h[i] + 0.044715f * h[i] * h[i] * h[i])));
            break;
        case RELU: for (int i = from; i < to; i++) h[i] = h[i] < 0 ? 0 : h[i]; break;   /* NaN stays NaN */
        default: for (int i = from; i < to; i++) h[i] = h[i] / (1 + quick_exp(-1.702f * h[i]));
    }
    if (up) for (int i = from; i < to; i++) h[i] *= up[i];
}

static void turn(const Model *m, float *h, int place) {
    int half_width = m->turned / 2;
    const float *cos = m->cos + (size_t)place * half_width, *sin = m->sin + (size_t)place * half_width;
    for (int i = 0; i < half_width; i++) {
        float a = h[i], b = h[i + half_width];
        h[i] = a * cos[i] - b * sin[i];
        h[i + half_width] = b * cos[i] + a * sin[i];
    }
}

/* ------------------------------------------------------------------------------------ what all threads do together */

/* Where a thread's own rows begin, while they are few. */
static size_t own(const Step *t) { return t->n > FEW ? 0 : (size_t)omp_get_thread_num() * FEW * t->most; }
static float *y_of(const Step *t) { return t->s.y + own(t); }
static Rounded rounded(const Step *t, int i, int from) {
    if (t->n > FEW) return rounded_at(t->s.q, t->s.ds, t->most, i, from);
    size_t at = own(t) + (size_t)i * t->most + from;
    return (Rounded){t->s.q + at, t->s.ds + at / 16, 4};
}

/* Columns from .. to of row i rounded, as those who read them need it: `count` matrices from `readers` on. */
static void round_some(const Step *t, int i, const float *x, int from, int to, const Matrix *readers, int count) {
    int quantised = 0;
    for (const Matrix *m = readers; m < readers + count; m++) quantised |= m->data && m->kind >= Q8_0;
    if (quantised) round_row(x + from, to - from, rounded(t, i, from));
}

/* A thread's share of a matrix's rows: whole blocks of 32, and the last thread has what is left. */
typedef struct { int from, to; } Share;
static Share share_of(int rows) {
    int64_t blocks = rows / 32, me = omp_get_thread_num(), all = omp_get_num_threads();
    return (Share){(int)(blocks * me / all) * 32, me + 1 == all ? rows : (int)(blocks * (me + 1) / all) * 32};
}

/* y[i][0..rows) (+)= m x[i] + bias, a thread its share of the rows of m. */
static void share(const Step *t, const Matrix *m, const float *x, float *y, int wide, int add) {
    Share s = share_of(m->rows);
    if (t->n > FEW) {
        float *panel = t->s.panels + (size_t)omp_get_thread_num() * PANEL * t->most;
        for (int p = s.from / PANEL; p < (s.to + PANEL - 1) / PANEL; p++)
            panel_product(m, p, panel, x, rounded(t, 0, 0), t->n, t->most, y, wide, add);
        return;
    }
    for (int r = s.from; r < s.to; r += 4) {             /* rows of weights meet all activations while they are near */
        int count = s.to - r < 4 ? s.to - r : 4;
        for (int i = 0; i < t->n; i++) {
            float v[4], *to = y + (size_t)i * wide + r;
            dots(m, r, count, x + (size_t)i * t->most, rounded(t, i, 0), v);
            for (int j = 0; j < count; j++) to[j] = v[j] + (m->bias ? m->bias[r + j] : 0) + (add ? to[j] : 0);
        }
    }
}

/* Between two branches: x = after(x), the last one's post_norm; y = before(x) · by, what the next one's matrices read. */
static void enter(const Step *t, const Norm *after, const Norm *before, float by, const Matrix *readers, int count) {
    int D = t->m->d_model;
    if (after->weight) {
        IN_TURN(i, t->n) normed(after, t->s.x + (size_t)i * D, D, t->s.x + (size_t)i * D);
        MEET
    }
    MADE_READY(i, t) {
        float *y = y_of(t) + (size_t)i * t->most;
        normed(before, t->s.x + (size_t)i * D, D, y);
        if (by != 1) for (int j = 0; j < D; j++) y[j] *= by;
        round_some(t, i, y, 0, D, readers, count);
    }
    READY(t)
}

/* The end of a branch: x += out(mixed), mixed [n][width]. */
static void leave(const Step *t, const Matrix *out) {
    MEET
    MADE_READY(i, t) round_some(t, i, t->s.mixed + (size_t)i * t->most, 0, out->cols, out, 1);
    READY(t)
    share(t, out, t->s.mixed, t->s.x, t->m->d_model, 1);
    MEET
}

static float *scores_of(const Step *t) { return t->s.scores + (size_t)omp_get_thread_num() * (t->m->length + t->m->heard); }
static float *mixed_of(const Step *t, int i, int head) { return t->s.mixed + (size_t)i * t->most + head * t->m->head_dim; }

static void self_attention(const Step *t, const Layer *l) {
    const Model *m = t->m;
    int H = m->heads, G = m->kv_heads, K = m->head_dim, wide = (H + 2 * G) * K;
    size_t slot = (size_t)G * m->length * K;
    share(t, &l->q, y_of(t), t->s.qkv, wide, 0);
    share(t, &l->k, y_of(t), t->s.qkv + H * K, wide, 0);
    share(t, &l->v, y_of(t), t->s.qkv + (H + G) * K, wide, 0);
    MEET
    EACH(job, t->n * G) {                                /* keys: norm, turn, keep; values: keep */
        int i = job / G, g = job % G;
        float *k = t->s.qkv + (size_t)i * wide + (H + g) * K, *v = k + G * K;
        normed(&l->k_norm, k, K, k);
        turn(m, k, t->rows[i].place);
        size_t here = t->rows[i].slot * slot + ((size_t)g * m->length + t->rows[i].place) * K;
        memcpy(l->keys + here, k, sizeof(float) * K);
        memcpy(l->values + here, v, sizeof(float) * K);
    }
    MEET
    IN_TURN(job, t->n * H) {                             /* later tokens see more: neighbours go to different threads */
        int i = job / H, h = job % H, last = t->rows[i].sees, at = t->rows[i].slot;
        float *q = t->s.qkv + (size_t)i * wide + h * K;
        normed(&l->q_norm, q, K, q);
        turn(m, q, t->rows[i].place);
        const int32_t *home = m->home ? m->home + (size_t)at * m->length : NULL;
        size_t base = (home ? 0 : at * slot) + (size_t)(h / (H / G)) * m->length * K;
        Kept keys = {l->keys + base, home, slot, K}, values = {l->values + base, home, slot, K};
        attend(q, &keys, &values, l->window && last > l->window ? last - l->window : 0, last, m->scale, scores_of(t), mixed_of(t, i, h));
    }
    leave(t, &l->out);
}

static void cross_attention(const Step *t, const Layer *l) {
    const Model *m = t->m;
    int H = m->heads, G = m->kv_heads, K = m->head_dim;
    share(t, &l->cross_q, y_of(t), t->s.qkv, H * K, 0);
    MEET
    EACH(job, t->n * H) {
        int i = job / H, h = job % H, source = t->rows[i].source;
        size_t base = ((size_t)source * G + h / (H / G)) * m->heard * K;
        Kept keys = {l->source_keys + base, NULL, 0, K}, values = {l->source_values + base, NULL, 0, K};
        attend(t->s.qkv + ((size_t)i * H + h) * K, &keys, &values, 0, m->source_length[source], m->scale, scores_of(t), mixed_of(t, i, h));
    }
    leave(t, &l->cross_out);
}

static void feed_forward(const Step *t, const Layer *l) {
    int F = t->m->d_ff, gated = l->gate.data != NULL;
    if (gated) share(t, &l->gate, y_of(t), t->s.hidden, 2 * F, 0);
    share(t, &l->up, y_of(t), t->s.hidden + (gated ? F : 0), 2 * F, 0);
    Share mine = share_of(F);                            /* what a thread has made, it goes on with */
    READY(t)                                             /* the rounded y is overwritten below: every thread must have read it */
    for (int i = 0; i < t->n; i++) {
        float *h = t->s.hidden + (size_t)i * 2 * F, *mixed = t->s.mixed + (size_t)i * t->most;
        act(t->m->act, h, gated ? h + F : NULL, mine.from, mine.to);
        memcpy(mixed + mine.from, h + mine.from, sizeof(float) * (mine.to - mine.from));
        if (t->n > FEW) round_some(t, i, mixed, mine.from, mine.to, &l->down, 1);
    }
    MEET
    if (t->n <= FEW) MADE_READY(i, t) round_some(t, i, t->s.mixed + (size_t)i * t->most, 0, F, &l->down, 1);
    share(t, &l->down, t->s.mixed, t->s.x, t->m->d_model, 1);
    MEET
}

static void embed(const Step *t) {
    const Model *m = t->m;
    int D = m->d_model;
    IN_TURN(i, t->n) {
        float *x = t->s.x + (size_t)i * D;
        widen_row(&m->table, t->rows[i].token, x);
        for (int j = 0; j < D; j++) x[j] = x[j] * m->embed_scale + (m->places ? m->places[(size_t)t->rows[i].place * D + j] : 0);
    }
    MEET
}

/* What is left to do with x after the last branch. */
static const Norm *through_the_layers(const Step *t) {
    const Norm *after = &t->m->embed_norm;
    embed(t);
    for (const Layer *l = t->m->layer; l < t->m->layer + t->m->layers; l++) {
        enter(t, after, &l->attn_norm, 1, &l->q, 3);
        self_attention(t, l);
        after = &l->attn_post;
        if (l->cross_q.data) {
            enter(t, after, &l->cross_norm, 1, &l->cross_q, 1);
            cross_attention(t, l);
            after = &l->cross_post;
        }
        enter(t, after, &l->ffn_norm, 1, &l->gate, 2);
        feed_forward(t, l);
        after = &l->ffn_post;
    }
    return after;
}

/* ------------------------------------------------------------------------------------------------ what Python calls */

/* Tokens at their places -> logits [count][vocab] of the rows that are asked for, ascending; without a head, their states. */
void step(const Model *m, const Row *rows, int n, const int32_t *asked, int count, Scratch s, int most, float *logits) {
    Step all = {m, rows, n, most, s}, last = all;
    last.n = count;
#pragma omp parallel num_threads(s.threads)
    {
        const Norm *after = through_the_layers(&all);
        if (omp_get_thread_num() == 0) for (size_t i = 0, D = m->d_model; i < (size_t)count; i++) memmove(s.x + i * D, s.x + (size_t)asked[i] * D, sizeof(float) * D);
        MEET
        enter(&last, after, &m->final, m->head_scale, &m->head, 1);
        if (m->head.data) share(&last, &m->head, y_of(&last), logits, m->vocab, 0);
        else IN_TURN(i, count) memcpy(logits + (size_t)i * m->d_model, y_of(&last) + (size_t)i * most, sizeof(float) * m->d_model);
    }
}

void widen(const Matrix *m, float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int r = 0; r < m->rows; r++) widen_row(m, r, out + (size_t)r * m->cols);
}

/* y [n][rows] = x [n][cols] Wᵀ + b, nothing rounded: W is widened into a near cache. panels [threads][PANEL · cols]: scratch. */
void product(const Matrix *m, const float *x, int n, float *y, float *panels, int threads) {
    size_t cols = m->cols;
#pragma omp parallel num_threads(threads)
    {
        float *panel = panels + omp_get_thread_num() * PANEL * cols;
        if (n > FEW) {
            EACH(p, (m->rows + PANEL - 1) / PANEL) panel_product(m, p, panel, x, (Rounded){0}, n, cols, y, m->rows, 0);
        } else EACH(r, m->rows) {
            widen_row(m, r, panel);                      /* into the nearest cache */
            for (int i = 0; i < n; i++) y[(size_t)i * m->rows + r] = dot_f32(panel, x + i * cols, m->cols) + (m->bias ? m->bias[r] : 0);
        }
    }
}

/* Of each row of logits [n][vocab] the `count` best with their ids, best first, and log Σ exp. Of equals, the first. */
void best(const float *logits, int n, int vocab, int count, float *values, int32_t *ids, float *mass, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int i = 0; i < n; i++) {
        const float *row = logits + (size_t)i * vocab;
        float *value = values + (size_t)i * count, total = 0;
        int32_t *id = ids + (size_t)i * count;
        for (int j = 0; j < count; j++) value[j] = -INFINITY, id[j] = 0;
        for (int from = 0; from < vocab; from += 64) {
            int to = from + 64 < vocab ? from + 64 : vocab;
            float most = row[from];
            for (int j = from; j < to; j++) most = row[j] > most ? row[j] : most;
            if (most <= value[count - 1]) continue;      /* nothing among these 64 */
            for (int j = from; j < to; j++) {
                int at = count;
                while (at && row[j] > value[at - 1]) at--;
                if (at == count) continue;
                memmove(value + at + 1, value + at, sizeof(float) * (count - 1 - at));
                memmove(id + at + 1, id + at, sizeof(int32_t) * (count - 1 - at));
                value[at] = row[j], id[at] = j;
            }
        }
        for (int j = 0; j < vocab; j++) total += quick_exp(row[j] - value[0]);
        mass[i] = value[0] + logf(total);
    }
}
