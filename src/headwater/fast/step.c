/* One decoding step of a decoder-only Transformer, for one to a few rows: every layer in one call, no Python between.

   The readable modules in core/ are the definition; this file is the same arithmetic, laid out for memory. At one token
   a step nothing is computed twice, so time is the time to read the weights once: they stay in the form they have in the
   file (F32, F16, or GGUF's blocks Q8_0, Q4_0, Q4_1) and are widened in registers. For quantised weights the activations
   are rounded to 8 bits in blocks of 32 with a scale each, so that a block's product is a handful of integer
   instructions. Threads share the rows of each matrix and meet at barriers, inside one parallel region a step.

   Plain C with OpenMP. The loops over 32 are written for AVX2 and, where that is missing, in portable form. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif
#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include <immintrin.h>
#define WIDE 1
#endif

enum { F32, F16, Q8_0, Q4_0, Q4_1 };                     /* how a matrix is stored; the numbers are shared with plan.py */
enum { RMS, LAYER };                                     /* norms */
enum { SILU, GELU, GELU_TANH, RELU, QUICK_GELU };        /* activations */

typedef struct { int32_t kind, rows, cols; const uint8_t *data; const float *bias; } Matrix;
typedef struct { int32_t kind; float eps; const float *weight, *bias; } Norm;
typedef struct {
    Norm attn_norm, q_norm, k_norm, ffn_norm;            /* a norm without weight is left out */
    Matrix q, k, v, out, gate, up, down;                 /* gate without data: a plain feed-forward */
    int32_t window;                                      /* how many tokens back, itself included; 0 = all */
    float *keys, *values;                                /* [slots][kv_heads][length][head_dim] */
} Layer;
typedef struct {
    int32_t layers, d_model, heads, kv_heads, head_dim, turned, d_ff, vocab, length, act;
    int32_t rounds;                                      /* some matrix is quantised, so activations are rounded */
    float scale, embed_scale, head_scale;
    Matrix table, head;                                  /* tokens, and the output (often the same) */
    const float *places;                                 /* learned places [length][d_model], or none */
    Norm final;
    Layer *layer;
} Model;
typedef struct { int32_t token, place, slot; } Row;      /* a token at its place, in the cache of its slot */

/* ------------------------------------------------------------------------------------------------ numbers */

static inline float half(uint16_t h) {
#ifdef WIDE
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    float f;
    if (rest >= 0x7c00) { uint32_t bits = sign | 0x7f800000 | (rest & 0x3ff) << 13; memcpy(&f, &bits, 4); return f; }
    if (rest < 0x0400) { f = (float)rest * 0x1p-24f; return sign ? -f : f; }
    uint32_t bits = sign | ((rest << 13) + (112u << 23));
    memcpy(&f, &bits, 4);
    return f;
#endif
}
static inline float half_at(const uint8_t *p) { uint16_t h; memcpy(&h, p, 2); return half(h); }

static const int block_bytes[] = {4 * 32, 2 * 32, 34, 18, 20};   /* bytes of 32 numbers, by kind */
static inline const uint8_t *row_of(const Matrix *m, int r) { return m->data + (size_t)r * (m->cols / 32) * block_bytes[m->kind]; }

/* A row of activations rounded to 8 bits, for each block of 32: value = q · d; s = d · Σ q, for Q4_1's offset. */
typedef struct { int8_t *q; float *ds; } Rounded;        /* ds: d and s of each block, side by side */

static void round_row(const Model *m, const float *x, int n, Rounded out) {
    if (!m->rounds) return;
    for (int b = 0; b < n / 32; b++) {
        float most = 0;
        for (int j = 0; j < 32; j++) { float a = fabsf(x[32 * b + j]); most = a > most ? a : most; }
        float d = most / 127, inverse = most > 0 ? 127 / most : 0;
        int sum = 0;
        for (int j = 0; j < 32; j++) {
            int v = (int)rintf(x[32 * b + j] * inverse);
            out.q[32 * b + j] = (int8_t)v;
            sum += v;
        }
        out.ds[2 * b] = d;
        out.ds[2 * b + 1] = d * sum;
    }
}

/* ------------------------------------------------------------------------------------------ products of one row */

#ifdef WIDE
static inline float sum8(__m256 v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline __m256i nibbles(const uint8_t *p) {                     /* 16 bytes -> 32 numbers 0..15, low halves first */
    __m128i b = _mm_loadu_si128((const __m128i *)p);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(b, 4), b), _mm256_set1_epi8(15));
}
static inline __m256 products(__m256i unsigned8, __m256i signed8) {   /* Σ of four neighbours, as 8 floats */
    __m256i pairs = _mm256_maddubs_epi16(unsigned8, signed8);
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

static float dot_f32(const float *w, const float *x, int n) {
    float a = 0;
    for (int i = 0; i < n; i++) a += w[i] * x[i];
    return a;
}

static float dot_f16(const uint8_t *w, const float *x, int n) {
#ifdef WIDE
    __m256 a = _mm256_setzero_ps(), b = a;
    for (int i = 0; i < n; i += 16) {
        a = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w + 2 * i))), _mm256_loadu_ps(x + i), a);
        b = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w + 2 * i + 16))), _mm256_loadu_ps(x + i + 8), b);
    }
    return sum8(_mm256_add_ps(a, b));
#else
    float a = 0;
    for (int i = 0; i < n; i++) a += half_at(w + 2 * i) * x[i];
    return a;
#endif
}

#ifdef WIDE
static inline __m256 block_q8_0(const uint8_t *w, Rounded x, int b, __m256 sum) {   /* |q| · (x with q's sign) */
    __m256i q = _mm256_loadu_si256((const __m256i *)(w + 2)), v = _mm256_loadu_si256((const __m256i *)(x.q + 32 * b));
    __m256 p = products(_mm256_sign_epi8(q, q), _mm256_sign_epi8(v, q));
    return _mm256_fmadd_ps(_mm256_set1_ps(half_at(w) * x.ds[2 * b]), p, sum);
}
#endif

static float dot_q8_0(const uint8_t *w, Rounded x, int n) {           /* d (2 bytes), 32 signed bytes */
#ifdef WIDE
    __m256 a = _mm256_setzero_ps(), c = a;
    int b = 0;
    for (; b + 1 < n / 32; b += 2, w += 68) {            /* two at a time, so that neither waits for the other */
        a = block_q8_0(w, x, b, a);
        c = block_q8_0(w + 34, x, b + 1, c);
    }
    if (b < n / 32) a = block_q8_0(w, x, b, a);
    return sum8(_mm256_add_ps(a, c));
#else
    float a = 0;
    for (int b = 0; b < n / 32; b++, w += 34) {
        int sum = 0;
        for (int j = 0; j < 32; j++) sum += (int8_t)w[2 + j] * x.q[32 * b + j];
        a += half_at(w) * x.ds[2 * b] * sum;
    }
    return a;
#endif
}

/* Q4_0: d (2 bytes), 16 bytes of nibbles, value (nibble - 8) · d.  Q4_1: d, m (2 bytes each), value nibble · d + m. */
static float dot_q4_0(const uint8_t *w, Rounded x, int n) {
    float offset = 0;
#ifdef WIDE
    __m256 a = _mm256_setzero_ps();
#else
    float a = 0;
#endif
    for (int b = 0; b < n / 32; b++, w += 18) {
        float d = half_at(w);
        offset -= 8 * d * x.ds[2 * b + 1];
#ifdef WIDE
        __m256 p = products(nibbles(w + 2), _mm256_loadu_si256((const __m256i *)(x.q + 32 * b)));
        a = _mm256_fmadd_ps(_mm256_set1_ps(d * x.ds[2 * b]), p, a);
    }
    return offset + sum8(a);
#else
        int sum = 0;
        for (int j = 0; j < 16; j++) sum += (w[2 + j] & 15) * x.q[32 * b + j] + (w[2 + j] >> 4) * x.q[32 * b + 16 + j];
        a += d * x.ds[2 * b] * sum;
    }
    return offset + a;
#endif
}

#ifdef WIDE
/* One block: (d, m) · (d of x, s of x) in one product; the first scales the block, the second is its offset. */
#define BLOCK(a, o, at, b) { \
    int32_t dm; \
    memcpy(&dm, at, 4); \
    __m128 by = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(dm)), _mm_castpd_ps(_mm_load_sd((const double *)(x.ds + 2 * (b))))); \
    a = _mm256_fmadd_ps(_mm256_broadcastss_ps(by), products(nibbles((at) + 4), _mm256_loadu_si256((const __m256i *)(x.q + 32 * (b)))), a); \
    o = _mm_add_ps(o, by); }

static float dot_q4_1(const uint8_t *w, Rounded x, int n) {
    __m256 a = _mm256_setzero_ps(), c = a;
    __m128 o = _mm_setzero_ps(), u = o;
    int b = 0;
    for (; b + 1 < n / 32; b += 2, w += 40) {            /* two at a time, so that neither waits for the other */
        BLOCK(a, o, w, b)
        BLOCK(c, u, w + 20, b + 1)
    }
    if (b < n / 32) BLOCK(a, o, w, b)
    o = _mm_add_ps(o, u);
    return sum8(_mm256_add_ps(a, c)) + _mm_cvtss_f32(_mm_movehdup_ps(o));
}
#else
static float dot_q4_1(const uint8_t *w, Rounded x, int n) {
    float a = 0;
    for (int b = 0; b < n / 32; b++, w += 20) {
        int sum = 0;
        for (int j = 0; j < 16; j++) sum += (w[4 + j] & 15) * x.q[32 * b + j] + (w[4 + j] >> 4) * x.q[32 * b + 16 + j];
        a += half_at(w) * x.ds[2 * b] * sum + half_at(w + 2) * x.ds[2 * b + 1];
    }
    return a;
}
#endif

static inline float dot(const Matrix *m, const uint8_t *w, const float *x, Rounded r) {
    switch (m->kind) {
        case F32: return dot_f32((const float *)w, x, m->cols);
        case F16: return dot_f16(w, x, m->cols);
        case Q8_0: return dot_q8_0(w, r, m->cols);
        case Q4_0: return dot_q4_0(w, r, m->cols);
        default: return dot_q4_1(w, r, m->cols);
    }
}

/* A row of a matrix as floats: the embedding of a token. Also what prefill widens whole matrices with. */
static void widen_row(const Matrix *m, int r, float *out) {
    const uint8_t *w = row_of(m, r);
    int n = m->cols;
    if (m->kind == F32) { memcpy(out, w, 4 * (size_t)n); return; }
    if (m->kind == F16) { for (int i = 0; i < n; i++) out[i] = half_at(w + 2 * i); return; }
    for (int b = 0; b < n / 32; b++, w += block_bytes[m->kind], out += 32) {
        float d = half_at(w);
        if (m->kind == Q8_0) { for (int j = 0; j < 32; j++) out[j] = d * (int8_t)w[2 + j]; continue; }
        float o = m->kind == Q4_1 ? half_at(w + 2) : -8 * d;
        const uint8_t *q = w + (m->kind == Q4_1 ? 4 : 2);
        for (int j = 0; j < 16; j++) { out[j] = d * (q[j] & 15) + o; out[16 + j] = d * (q[j] >> 4) + o; }
    }
}

void threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

void widen(const Matrix *m, float *out) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < m->rows; r++) widen_row(m, r, out + (size_t)r * m->cols);
}

/* y [n][rows] = x [n][cols] Wᵀ + b for a few rows of exact floats: a row of W is widened into the nearest cache. */
void product(const Matrix *m, const float *x, int n, float *y) {
#pragma omp parallel
    {
        float w[m->cols];
#pragma omp for schedule(static)
        for (int r = 0; r < m->rows; r++) {
            widen_row(m, r, w);
            for (int i = 0; i < n; i++) {
                y[(size_t)i * m->rows + r] = dot_f32(w, x + (size_t)i * m->cols, m->cols) + (m->bias ? m->bias[r] : 0);
            }
        }
    }
}

/* --------------------------------------------------------------------------------------------- the step itself */

typedef struct {                                         /* scratch for n rows; plan.py asks for its size */
    float *x, *y, *qkv, *mixed, *hidden, *scores;
    int8_t *q8;
    float *ds8;
} Scratch;

static Rounded rounded(const Scratch *s, int i, int most) {
    return (Rounded){s->q8 + (size_t)i * most, s->ds8 + (size_t)i * most / 16};
}

static void normed(const Norm *n, const float *x, int d, float *y) {
    float mean = 0, square = 0;
    if (n->kind == LAYER) { for (int i = 0; i < d; i++) mean += x[i]; mean /= d; }
    for (int i = 0; i < d; i++) square += (x[i] - mean) * (x[i] - mean);
    float by = 1 / sqrtf(square / d + n->eps);
    for (int i = 0; i < d; i++) y[i] = (x[i] - mean) * by * n->weight[i] + (n->bias ? n->bias[i] : 0);
}

/* y[i][0..rows) (+)= m x[i], the thread's share of the rows; every weight row meets all activations while it is near. */
static void share(const Matrix *m, const float *x, const Scratch *s, int n, int most, float *y, int stride, int add) {
    int me = omp_get_thread_num(), all = omp_get_num_threads();
    int from = (int)((int64_t)m->rows * me / all), to = (int)((int64_t)m->rows * (me + 1) / all);
    for (int r = from; r < to; r++) {
        const uint8_t *w = row_of(m, r);
        float bias = m->bias ? m->bias[r] : 0;
        for (int i = 0; i < n; i++) {
            float v = dot(m, w, x + (size_t)i * most, rounded(s, i, most)) + bias;
            if (add) y[(size_t)i * stride + r] += v; else y[(size_t)i * stride + r] = v;
        }
    }
}

static void act(int kind, float *h, const float *up, int from, int to) {
    for (int i = from; i < to; i++) {
        float v = h[i];
        switch (kind) {
            case SILU: v = v / (1 + expf(-v)); break;
            case GELU: v = 0.5f * v * (1 + erff(v * 0.70710678f)); break;
            case GELU_TANH: v = 0.5f * v * (1 + tanhf(0.79788456f * (v + 0.044715f * v * v * v))); break;
            case RELU: v = v > 0 ? v : 0; break;
            default: v = v / (1 + expf(-1.702f * v));
        }
        h[i] = up ? v * up[i] : v;
    }
}

static void turn(float *h, const float *cos, const float *sin, int half_width) {
    for (int i = 0; i < half_width; i++) {
        float a = h[i], b = h[i + half_width];
        h[i] = a * cos[i] - b * sin[i];
        h[i + half_width] = b * cos[i] + a * sin[i];
    }
}

/* softmax(scale · q kᵀ) v of one head over the cached keys it may see. */
static void attend(const Model *m, const Layer *l, const float *q, const float *keys, const float *values, int place,
                   float *scores, float *out) {
    int first = l->window && place + 1 > l->window ? place + 1 - l->window : 0, d = m->head_dim;
    float most = -3e38f, total = 0;
    for (int t = first; t <= place; t++) {
        scores[t] = m->scale * dot_f32(keys + (size_t)t * d, q, d);
        most = scores[t] > most ? scores[t] : most;
    }
    for (int t = first; t <= place; t++) { scores[t] = expf(scores[t] - most); total += scores[t]; }
    for (int i = 0; i < d; i++) out[i] = 0;
    for (int t = first; t <= place; t++) {
        float w = scores[t] / total;
        for (int i = 0; i < d; i++) out[i] += w * values[(size_t)t * d + i];
    }
}

/* tokens at their places -> logits [n][vocab] (or none where logits is NULL). cos, sin [n][turned / 2]. */
void step(const Model *m, const Row *rows, int n, const float *cos, const float *sin, Scratch s, int most, float *logits) {
    int D = m->d_model, H = m->heads, G = m->kv_heads, K = m->head_dim, F = m->d_ff, half_width = m->turned / 2;
    int wide = (H + 2 * G) * K;
    size_t slot = (size_t)G * m->length * K;
#pragma omp parallel
    {
        int me = omp_get_thread_num(), all = omp_get_num_threads();
#define EACH(i, count) for (int i = (int)((int64_t)(count) * me / all), end_##i = (int)((int64_t)(count) * (me + 1) / all); i < end_##i; i++)
#define MEET _Pragma("omp barrier")
        for (int i = me; i < n; i += all) {
            float *x = s.x + (size_t)i * D;
            widen_row(&m->table, rows[i].token, x);
            for (int j = 0; j < D; j++) x[j] = x[j] * m->embed_scale + (m->places ? m->places[(size_t)rows[i].place * D + j] : 0);
        }
        MEET
        for (int at = 0; at < m->layers; at++) {
            const Layer *l = m->layer + at;
            for (int i = me; i < n; i += all) {
                normed(&l->attn_norm, s.x + (size_t)i * D, D, s.y + (size_t)i * most);
                round_row(m, s.y + (size_t)i * most, D, rounded(&s, i, most));
            }
            MEET
            share(&l->q, s.y, &s, n, most, s.qkv, wide, 0);
            share(&l->k, s.y, &s, n, most, s.qkv + H * K, wide, 0);
            share(&l->v, s.y, &s, n, most, s.qkv + (H + G) * K, wide, 0);
            MEET
            EACH(job, n * G) {                           /* keys: norm, turn, keep; values: keep */
                int i = job / G, g = job % G;
                float *k = s.qkv + (size_t)i * wide + (H + g) * K, *v = s.qkv + (size_t)i * wide + (H + G + g) * K;
                if (l->k_norm.weight) normed(&l->k_norm, k, K, k);
                turn(k, cos + (size_t)i * half_width, sin + (size_t)i * half_width, half_width);
                size_t here = rows[i].slot * slot + ((size_t)g * m->length + rows[i].place) * K;
                memcpy(l->keys + here, k, 4 * (size_t)K);
                memcpy(l->values + here, v, 4 * (size_t)K);
            }
            MEET
            EACH(job, n * H) {
                int i = job / H, h = job % H;
                float *q = s.qkv + (size_t)i * wide + h * K;
                if (l->q_norm.weight) normed(&l->q_norm, q, K, q);
                turn(q, cos + (size_t)i * half_width, sin + (size_t)i * half_width, half_width);
                size_t here = rows[i].slot * slot + (size_t)(h / (H / G)) * m->length * K;
                attend(m, l, q, l->keys + here, l->values + here, rows[i].place, s.scores + (size_t)me * m->length, s.mixed + (size_t)i * most + h * K);
            }
            MEET
            for (int i = me; i < n; i += all) round_row(m, s.mixed + (size_t)i * most, H * K, rounded(&s, i, most));
            MEET
            share(&l->out, s.mixed, &s, n, most, s.x, D, 1);
            MEET
            for (int i = me; i < n; i += all) {
                normed(&l->ffn_norm, s.x + (size_t)i * D, D, s.y + (size_t)i * most);
                round_row(m, s.y + (size_t)i * most, D, rounded(&s, i, most));
            }
            MEET
            if (l->gate.data) share(&l->gate, s.y, &s, n, most, s.hidden, 2 * F, 0);
            share(&l->up, s.y, &s, n, most, s.hidden + (l->gate.data ? F : 0), 2 * F, 0);
            MEET
            for (int i = 0; i < n; i++) {                /* blocks of 32, so that a thread can round what it made */
                float *h = s.hidden + (size_t)i * 2 * F;
                int from = F / 32 * me / all * 32, to = F / 32 * (me + 1) / all * 32;
                Rounded r = rounded(&s, i, most);
                act(m->act, h, l->gate.data ? h + F : NULL, from, to);
                memcpy(s.mixed + (size_t)i * most + from, h + from, 4 * (size_t)(to - from));
                round_row(m, h + from, to - from, (Rounded){r.q + from, r.ds + from / 16});
            }
            MEET
            share(&l->down, s.mixed, &s, n, most, s.x, D, 1);
            MEET
        }
        if (logits) {
            for (int i = me; i < n; i += all) {
                normed(&m->final, s.x + (size_t)i * D, D, s.y + (size_t)i * most);
                for (int j = 0; j < D; j++) s.y[(size_t)i * most + j] *= m->head_scale;
                round_row(m, s.y + (size_t)i * most, D, rounded(&s, i, most));
            }
            MEET
            share(&m->head, s.y, &s, n, most, logits, m->vocab, 0);
        }
    }
}
