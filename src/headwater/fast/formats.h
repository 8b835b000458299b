/* How weights lie in memory, and the product of one row of them with one row of activations.

   Weights stay in the form they have in the file (F32, F16, BF16, or GGUF's blocks Q8_0, Q4_0, Q4_1) and are widened in
   registers. For quantised weights the activations are rounded to 8 bits in blocks of 32 with a scale each, so that a
   block's product is a handful of integer instructions. (For many rows see panels.h.)

   The loops over 32 are written for AVX2 and, where that is missing, in portable form. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include <immintrin.h>
#define WIDE 1
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define VNNI 1                                           /* one instruction multiplies bytes and adds four of them up */
#endif
#endif

enum { F32, F16, BF16, Q8_0, Q4_0, Q4_1 };               /* how a matrix is stored; structures.py has the same numbers */
typedef struct { int32_t kind, rows, cols; const uint8_t *data; const float *bias; } Matrix;

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
static inline float upper_half_at(const uint8_t *p) {    /* BF16: the first two bytes of a float */
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static const int block_bytes[] = {4 * 32, 2 * 32, 2 * 32, 34, 18, 20};   /* bytes of 32 numbers, by kind */
static inline const uint8_t *row_of(const Matrix *m, int r) { return m->data + (size_t)r * (m->cols / 32) * block_bytes[m->kind]; }

/* A row of activations rounded, for each block of 32: value = q · d; s = d · Σ q, for the offset of the weights. The fours
   of a row lie `apart` bytes from each other: 4, or further where the rows that meet a panel (panels.h) lie between. */
typedef struct { int8_t *q; float *ds; int apart; } Rounded;         /* ds: d and s of each block, side by side */

/* A block with a NaN or an infinity in it has a NaN for its scale: what is no number stays none in every product. */
static void round_row(const float *x, int n, Rounded out) {
    for (int b = 0; b < n / 32; b++, x += 32) {
        float most = 0, zero = 0;
        int8_t q[32] = {0};
        int sum = 0;
        for (int j = 0; j < 32; j++) { float a = fabsf(x[j]); most = a > most ? a : most; zero += x[j] * 0; }
        float d = most / 127 + zero, inverse = most > 0 ? 127 / most : 0;
        if (zero == 0) for (int j = 0; j < 32; j++) { int v = (int)rintf(x[j] * inverse); q[j] = (int8_t)v; sum += v; }
        for (int p = 0; p < 8; p++) memcpy(out.q + out.apart * (8 * b + p), q + 4 * p, 4);
        out.ds[2 * b] = d;
        out.ds[2 * b + 1] = d * sum;
    }
}

/* eˣ to seven digits, in a form that compilers turn into vectors: 2ⁿ eʳ with n whole and |r| ≤ ln 2 / 2. NaN stays NaN. */
static inline float quick_exp(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1 + r * (1 + r * (0.5f + r * (0.166666667f + r * (0.0416664853f + r * (0.00833345205f + r * 0.00139302848f)))));
    int32_t bits = ((n == n ? (int32_t)n : 0) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* ------------------------------------------------------------------------------------------ products of one row */

typedef float Eight __attribute__((vector_size(32)));
static inline Eight eight_at(const float *p) { Eight v; memcpy(&v, p, sizeof v); return v; }
#ifdef WIDE
static inline float sum_of(Eight v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline __m256i nibbles(const uint8_t *p) {                     /* 16 bytes -> 32 numbers 0..15, low halves first */
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_and_si256(_mm256_srlv_epi32(twice, _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0)), _mm256_set1_epi8(15));
}
static inline __m256 products(__m256i unsigned8, __m256i signed8) {   /* Σ of four neighbours, as 8 floats */
    __m256i pairs = _mm256_maddubs_epi16(unsigned8, signed8);
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
static inline float sum_of(Eight v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
#endif

static float dot_f32(const float *w, const float *x, int n) {
    Eight a = {0}, b = a;
    int i = 0;
    for (; i + 16 <= n; i += 16) {                       /* two at a time, so that neither waits for the other */
        a += eight_at(w + i) * eight_at(x + i);
        b += eight_at(w + i + 8) * eight_at(x + i + 8);
    }
    float sum = sum_of(a + b);
    for (; i < n; i++) sum += w[i] * x[i];
    return sum;
}

#ifdef WIDE
static inline __m256 eight_halves(int kind, const uint8_t *p) {
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    return kind == F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
#endif

static inline float dot_halves(int kind, const uint8_t *w, const float *x, int n) {
#ifdef WIDE
    __m256 a = _mm256_setzero_ps(), b = a;
    for (int i = 0; i < n; i += 16) {
        a = _mm256_fmadd_ps(eight_halves(kind, w + 2 * i), _mm256_loadu_ps(x + i), a);
        b = _mm256_fmadd_ps(eight_halves(kind, w + 2 * i + 16), _mm256_loadu_ps(x + i + 8), b);
    }
    return sum_of(_mm256_add_ps(a, b));
#else
    float a = 0;
    for (int i = 0; i < n; i++) a += (kind == F16 ? half_at(w + 2 * i) : upper_half_at(w + 2 * i)) * x[i];
    return a;
#endif
}

enum { AHEAD = 1536 };                                   /* bytes: weights are on their way when they are needed */
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
        _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)w + AHEAD + 64, _MM_HINT_T0);
        a = block_q8_0(w, x, b, a);
        c = block_q8_0(w + 34, x, b + 1, c);
    }
    if (b < n / 32) a = block_q8_0(w, x, b, a);
    return sum_of(_mm256_add_ps(a, c));
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
    return offset + sum_of(a);
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
    return sum_of(_mm256_add_ps(a, c)) + _mm_cvtss_f32(_mm_movehdup_ps(o));
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
        case F16: return dot_halves(F16, w, x, m->cols);
        case BF16: return dot_halves(BF16, w, x, m->cols);
        case Q8_0: return dot_q8_0(w, r, m->cols);
        case Q4_0: return dot_q4_0(w, r, m->cols);
        default: return dot_q4_1(w, r, m->cols);
    }
}

#ifdef WIDE
/* Four rows of Q4_1 together: x is read once, eight scales and offsets are widened by one instruction, four sums added up
   by three. A row alone is bound by its arithmetic; four keep pace with the memory. */
static void four_q4_1(const uint8_t *w, size_t row, Rounded x, int n, float *out) {
    __m256 sum[4], offsets = _mm256_setzero_ps();
    for (int r = 0; r < 4; r++) sum[r] = offsets;
    for (int b = 0; b < n / 32; b++) {
        const uint8_t *at = w + 20 * b;
        int32_t dm[4];
        float by[8];
        _mm_prefetch((const char *)w + 4 * row + 80 * b, _MM_HINT_T0);
        for (int r = 0; r < 4; r++) memcpy(dm + r, at + r * row, 4);
        __m256 ds = _mm256_castpd_ps(_mm256_broadcast_sd((const double *)(x.ds + 2 * b)));
        __m256 scaled = _mm256_mul_ps(_mm256_cvtph_ps(_mm_set_epi32(dm[3], dm[2], dm[1], dm[0])), ds);
        __m256i v = _mm256_loadu_si256((const __m256i *)(x.q + 32 * b));
        offsets = _mm256_add_ps(offsets, scaled);
        _mm256_storeu_ps(by, scaled);
        for (int r = 0; r < 4; r++) sum[r] = _mm256_fmadd_ps(_mm256_set1_ps(by[2 * r]), products(nibbles(at + r * row + 4), v), sum[r]);
    }
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
    __m128 odd = _mm_shuffle_ps(_mm256_castps256_ps128(offsets), _mm256_extractf128_ps(offsets, 1), 0xdd);
    _mm_storeu_ps(out, _mm_add_ps(odd, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1))));
}
#endif

/* `count` rows of a matrix from r on, at most four, with one row of activations. */
static inline void dots(const Matrix *m, int r, int count, const float *x, Rounded q, float *out) {
#ifdef WIDE
    if (m->kind == Q4_1 && count == 4) { four_q4_1(row_of(m, r), row_of(m, 1) - m->data, q, m->cols, out); return; }
#endif
    for (int j = 0; j < count; j++) out[j] = dot(m, row_of(m, r + j), x, q);
}

/* 32 numbers of a row as floats: a block of the quantised formats. */
static inline void widen_block(int kind, const uint8_t *w, float *out) {
    if (kind == F32) { memcpy(out, w, 4 * 32); return; }
    if (kind == F16) { for (int i = 0; i < 32; i++) out[i] = half_at(w + 2 * i); return; }
    if (kind == BF16) { for (int i = 0; i < 32; i++) out[i] = upper_half_at(w + 2 * i); return; }
    float d = half_at(w);
    if (kind == Q8_0) { for (int j = 0; j < 32; j++) out[j] = d * (int8_t)w[2 + j]; return; }
    float o = kind == Q4_1 ? half_at(w + 2) : -8 * d;
    const uint8_t *q = w + (kind == Q4_1 ? 4 : 2);
    for (int j = 0; j < 16; j++) { out[j] = d * (q[j] & 15) + o; out[16 + j] = d * (q[j] >> 4) + o; }
}

/* A row of a matrix as floats: the embedding of a token. Also what prefill widens whole matrices with. */
static void widen_row(const Matrix *m, int r, float *out) {
    const uint8_t *w = row_of(m, r);
    for (int b = 0; b < m->cols / 32; b++, w += block_bytes[m->kind], out += 32) widen_block(m->kind, w, out);
}
