/* Weight formats, and the dot product of one row of weights with one row of activations.

   Weights stay in the format of the file (F32, F16, BF16, or GGUF's blocks Q8_0, Q4_0, Q4_1) and are dequantized in
   registers. For quantized weights the activations are quantized to 8 bits in blocks of 32 with a scale each, so that the
   dot product of a block is a handful of integer instructions. (For many rows see gemm_panels.h.)

   The loops over 32 are written for AVX2 and, without it, in portable C. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include <immintrin.h>
#define HAVE_AVX2 1
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAVE_VNNI 1                                      /* one instruction multiplies bytes and adds four products */
#endif
#endif

enum { BLOCK_SIZE = 32 };                                /* weights of a block, and columns are whole blocks */
enum { F32, F16, BF16, Q8_0, Q4_0, Q4_1 };               /* formats of a matrix */
typedef struct LinearChange LinearChange;                /* of an adapter (decode_adapters.h) */
typedef struct { int32_t kind, rows, cols; const uint8_t *data; const float *bias; const LinearChange *changes; } Matrix;  /* changes [adapters], or none */

/* ------------------------------------------------------------------------------------------------ numbers */

static inline float f16_to_f32(uint16_t h) {
#ifdef HAVE_AVX2
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
static inline float load_f16(const uint8_t *p) { uint16_t h; memcpy(&h, p, 2); return f16_to_f32(h); }
static inline float load_bf16(const uint8_t *p) {        /* BF16: the first two bytes of a float */
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

enum { F32_BYTES = 4 * BLOCK_SIZE, F16_BYTES = 2 * BLOCK_SIZE, BF16_BYTES = 2 * BLOCK_SIZE, Q8_0_BYTES = 34, Q4_0_BYTES = 18, Q4_1_BYTES = 20 };
static const int block_bytes[] = {F32_BYTES, F16_BYTES, BF16_BYTES, Q8_0_BYTES, Q4_0_BYTES, Q4_1_BYTES};  /* of a block, by format */
static inline const uint8_t *matrix_row(const Matrix *m, int r) { return m->data + (size_t)r * (m->cols / BLOCK_SIZE) * block_bytes[m->kind]; }

/* A quantized row of activations, for each block of 32: value = q · d; s = d · Σ q, for the offset of the weights. Groups of
   four are `group_stride` bytes apart: 4, or more where the rows of a tile (gemm_panels.h) are interleaved. */
typedef struct { int8_t *q; float *ds; int group_stride; } QuantizedRow;  /* ds: d and s of each block, side by side */

/* A block with a NaN or an infinity has a NaN as its scale, so that every product with it is NaN. */
static void quantize_row(const float *x, int n, QuantizedRow out) {
    for (int b = 0; b < n / 32; b++, x += 32) {
        float max_abs = 0, nan_or_zero = 0;
        int8_t q[32] = {0};
        int sum = 0;
        for (int j = 0; j < 32; j++) { float a = fabsf(x[j]); max_abs = a > max_abs ? a : max_abs; nan_or_zero += x[j] * 0; }
        float d = max_abs / 127 + nan_or_zero, inverse = max_abs > 0 ? 127 / max_abs : 0;
        if (nan_or_zero == 0) for (int j = 0; j < 32; j++) { int v = (int)rintf(x[j] * inverse); q[j] = (int8_t)v; sum += v; }
        for (int p = 0; p < 8; p++) memcpy(out.q + out.group_stride * (8 * b + p), q + 4 * p, 4);
        out.ds[2 * b] = d;
        out.ds[2 * b + 1] = d * sum;
    }
}

/* eˣ to seven digits, in a form that compilers vectorize: 2ⁿ eʳ with n an integer and |r| ≤ ln 2 / 2. NaN stays NaN. */
static inline float fast_exp(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1 + r * (1 + r * (0.5f + r * (0.166666667f + r * (0.0416664853f + r * (0.00833345205f + r * 0.00139302848f)))));
    int32_t bits = ((n == n ? (int32_t)n : 0) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* Φ(x), the normal CDF, within 2e-7, in a form that compilers vectorize (Abramowitz and Stegun, 7.1.26). NaN stays NaN. */
static inline float normal_cdf(float x) {
    float t = 1 / (1 + 0.231641888f * fabsf(x));
    float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float tail = 0.5f * p * fast_exp(-0.5f * x * x);
    return x > 0 ? 1 - tail : tail;
}

/* ------------------------------------------------------------------------------------------ dot products of one row */

typedef float f32x8 __attribute__((vector_size(32)));
static inline f32x8 load8(const float *p) { f32x8 v; memcpy(&v, p, sizeof v); return v; }
#ifdef HAVE_AVX2
static inline float reduce_sum8(f32x8 v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline __m256i unpack_nibbles(const uint8_t *p) {  /* 16 bytes -> 32 numbers 0..15, low halves first */
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_and_si256(_mm256_srlv_epi32(twice, _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0)), _mm256_set1_epi8(15));
}
static inline __m256 dot_u8_i8(__m256i unsigned8, __m256i signed8) {  /* Σ of four neighbours, as 8 floats */
#ifdef HAVE_VNNI
    return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_setzero_si256(), unsigned8, signed8));
#else
    __m256i pairs = _mm256_maddubs_epi16(unsigned8, signed8);
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
#else
static inline float reduce_sum8(f32x8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
#endif

static float dot_f32(const float *w, const float *x, int n) {
    f32x8 a = {0}, b = a;
    int i = 0;
    for (; i + 16 <= n; i += 16) {                       /* two sums, so that neither waits for the other */
        a += load8(w + i) * load8(x + i);
        b += load8(w + i + 8) * load8(x + i + 8);
    }
    float sum = reduce_sum8(a + b);
    for (; i < n; i++) sum += w[i] * x[i];
    return sum;
}

#ifdef HAVE_AVX2
static inline __m256 load8_halves(int kind, const uint8_t *p) {
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    return kind == F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
#endif

static inline float dot_halves(int kind, const uint8_t *w, const float *x, int n) {
#ifdef HAVE_AVX2
    __m256 a = _mm256_setzero_ps(), b = a;
    for (int i = 0; i < n; i += 16) {
        a = _mm256_fmadd_ps(load8_halves(kind, w + 2 * i), _mm256_loadu_ps(x + i), a);
        b = _mm256_fmadd_ps(load8_halves(kind, w + 2 * i + 16), _mm256_loadu_ps(x + i + 8), b);
    }
    return reduce_sum8(_mm256_add_ps(a, b));
#else
    float a = 0;
    for (int i = 0; i < n; i++) a += (kind == F16 ? load_f16(w + 2 * i) : load_bf16(w + 2 * i)) * x[i];
    return a;
#endif
}

enum { MAX_DOT_ROWS = 6 };                               /* rows of x that share a row of weights; more are faster in panels */
enum { PREFETCH_BYTES = 1536 };                          /* how far ahead weights are prefetched */
#ifdef HAVE_AVX2
static inline __m256 block_q8_0(const uint8_t *w, QuantizedRow x, int b, __m256 sum) {  /* |q| · (x with q's sign) */
    __m256i q = _mm256_loadu_si256((const __m256i *)(w + 2)), v = _mm256_loadu_si256((const __m256i *)(x.q + 32 * b));
    __m256 p = dot_u8_i8(_mm256_sign_epi8(q, q), _mm256_sign_epi8(v, q));
    return _mm256_fmadd_ps(_mm256_set1_ps(load_f16(w) * x.ds[2 * b]), p, sum);
}
#endif

static float dot_q8_0(const uint8_t *w, QuantizedRow x, int n) {  /* d (2 bytes), 32 signed bytes */
#ifdef HAVE_AVX2
    __m256 a = _mm256_setzero_ps(), c = a;
    int b = 0;
    for (; b + 1 < n / 32; b += 2, w += 68) {            /* two sums, so that neither waits for the other */
        _mm_prefetch((const char *)w + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)w + PREFETCH_BYTES + 64, _MM_HINT_T0);
        a = block_q8_0(w, x, b, a);
        c = block_q8_0(w + 34, x, b + 1, c);
    }
    if (b < n / 32) a = block_q8_0(w, x, b, a);
    return reduce_sum8(_mm256_add_ps(a, c));
#else
    float a = 0;
    for (int b = 0; b < n / 32; b++, w += 34) {
        int sum = 0;
        for (int j = 0; j < 32; j++) sum += (int8_t)w[2 + j] * x.q[32 * b + j];
        a += load_f16(w) * x.ds[2 * b] * sum;
    }
    return a;
#endif
}

/* Q4_0: d (2 bytes), 16 bytes of nibbles, value (nibble - 8) · d.  Q4_1: d, m (2 bytes each), value nibble · d + m. */
static float dot_q4_0(const uint8_t *w, QuantizedRow x, int n) {
    float offset = 0;
#ifdef HAVE_AVX2
    __m256 a = _mm256_setzero_ps();
#else
    float a = 0;
#endif
    for (int b = 0; b < n / 32; b++, w += 18) {
        float d = load_f16(w);
        offset -= 8 * d * x.ds[2 * b + 1];
#ifdef HAVE_AVX2
        __m256 p = dot_u8_i8(unpack_nibbles(w + 2), _mm256_loadu_si256((const __m256i *)(x.q + 32 * b)));
        a = _mm256_fmadd_ps(_mm256_set1_ps(d * x.ds[2 * b]), p, a);
    }
    return offset + reduce_sum8(a);
#else
        int sum = 0;
        for (int j = 0; j < 16; j++) sum += (w[2 + j] & 15) * x.q[32 * b + j] + (w[2 + j] >> 4) * x.q[32 * b + 16 + j];
        a += d * x.ds[2 * b] * sum;
    }
    return offset + a;
#endif
}

#ifdef HAVE_AVX2
/* One block: (d, m) · (d of x, s of x) in one multiplication; the first is the block's scale, the second its offset. */
#define ACCUMULATE_BLOCK_Q4_1(a, o, at, b) { \
    int32_t dm; \
    memcpy(&dm, at, 4); \
    __m128 scale = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(dm)), _mm_castpd_ps(_mm_load_sd((const double *)(x.ds + 2 * (b))))); \
    a = _mm256_fmadd_ps(_mm256_broadcastss_ps(scale), dot_u8_i8(unpack_nibbles((at) + 4), _mm256_loadu_si256((const __m256i *)(x.q + 32 * (b)))), a); \
    o = _mm_add_ps(o, scale); }

static float dot_q4_1(const uint8_t *w, QuantizedRow x, int n) {
    __m256 a = _mm256_setzero_ps(), c = a;
    __m128 o = _mm_setzero_ps(), u = o;
    int b = 0;
    for (; b + 1 < n / 32; b += 2, w += 40) {            /* two sums, so that neither waits for the other */
        ACCUMULATE_BLOCK_Q4_1(a, o, w, b)
        ACCUMULATE_BLOCK_Q4_1(c, u, w + 20, b + 1)
    }
    if (b < n / 32) ACCUMULATE_BLOCK_Q4_1(a, o, w, b)
    o = _mm_add_ps(o, u);
    return reduce_sum8(_mm256_add_ps(a, c)) + _mm_cvtss_f32(_mm_movehdup_ps(o));
}
#else
static float dot_q4_1(const uint8_t *w, QuantizedRow x, int n) {
    float a = 0;
    for (int b = 0; b < n / 32; b++, w += 20) {
        int sum = 0;
        for (int j = 0; j < 16; j++) sum += (w[4 + j] & 15) * x.q[32 * b + j] + (w[4 + j] >> 4) * x.q[32 * b + 16 + j];
        a += load_f16(w) * x.ds[2 * b] * sum + load_f16(w + 2) * x.ds[2 * b + 1];
    }
    return a;
}
#endif

static inline float dot(const Matrix *m, const uint8_t *w, const float *x, QuantizedRow r) {
    switch (m->kind) {
        case F32: return dot_f32((const float *)w, x, m->cols);
        case F16: return dot_halves(F16, w, x, m->cols);
        case BF16: return dot_halves(BF16, w, x, m->cols);
        case Q8_0: return dot_q8_0(w, r, m->cols);
        case Q4_0: return dot_q4_0(w, r, m->cols);
        default: return dot_q4_1(w, r, m->cols);
    }
}

#ifdef HAVE_AVX2
/* Four rows of Q4_1 together: x is read once, eight scales and offsets are converted by one instruction, four sums reduced
   by three. One row is bound by its arithmetic; four keep pace with the memory. */
static void dot_4_rows_q4_1(const uint8_t *w, size_t row, QuantizedRow x, int n, float *out) {
    __m256 sum[4], offsets = _mm256_setzero_ps();
    for (int r = 0; r < 4; r++) sum[r] = offsets;
    for (int b = 0; b < n / 32; b++) {
        const uint8_t *at = w + 20 * b;
        int32_t dm[4];
        float scale[8];
        _mm_prefetch((const char *)w + 4 * row + 80 * b, _MM_HINT_T0);
        for (int r = 0; r < 4; r++) memcpy(dm + r, at + r * row, 4);
        __m256 ds = _mm256_castpd_ps(_mm256_broadcast_sd((const double *)(x.ds + 2 * b)));
        __m256 scaled = _mm256_mul_ps(_mm256_cvtph_ps(_mm_set_epi32(dm[3], dm[2], dm[1], dm[0])), ds);
        __m256i v = _mm256_loadu_si256((const __m256i *)(x.q + 32 * b));
        offsets = _mm256_add_ps(offsets, scaled);
        _mm256_storeu_ps(scale, scaled);
        for (int r = 0; r < 4; r++) sum[r] = _mm256_fmadd_ps(_mm256_set1_ps(scale[2 * r]), dot_u8_i8(unpack_nibbles(at + r * row + 4), v), sum[r]);
    }
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
    __m128 odd = _mm_shuffle_ps(_mm256_castps256_ps128(offsets), _mm256_extractf128_ps(offsets, 1), 0xdd);
    _mm_storeu_ps(out, _mm_add_ps(odd, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1))));
}
#endif

#ifdef HAVE_AVX2
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* One row of weights times n rows of x, a `stride` apart: each block is read once. kind and n are constants at each call, so
   that the sums stay in registers. Every row of x has the same sums, in the same order, as when it is alone. */
ALWAYS_INLINE void add_floats(int kind, int n, const uint8_t *w, const float *x, size_t stride, int c, __m256 *sum) {
    __m256 v = kind == F32 ? _mm256_loadu_ps((const float *)w + c) : load8_halves(kind, w + 2 * c);
    for (int i = 0; i < n; i++) sum[i] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + i * stride + c), sum[i]);
}

ALWAYS_INLINE void dot_floats(int kind, int n, const uint8_t *w, const float *x, size_t stride, int cols, float *out) {
    __m256 even[MAX_DOT_ROWS], odd[MAX_DOT_ROWS];
    for (int i = 0; i < n; i++) even[i] = odd[i] = _mm256_setzero_ps();
    for (int c = 0; c < cols; c += 16) {
        add_floats(kind, n, w, x, stride, c, even);
        add_floats(kind, n, w, x, stride, c + 8, odd);
    }
    for (int i = 0; i < n; i++) out[i] = reduce_sum8(_mm256_add_ps(even[i], odd[i]));
}

ALWAYS_INLINE void add_block(int kind, int n, const uint8_t *w, QuantizedRow x, size_t stride, int b, __m256 *sum, float *offsets) {
    float d = load_f16(w), offset = kind == Q4_1 ? load_f16(w + 2) : -8 * d;
    __m256i q = kind == Q8_0 ? _mm256_loadu_si256((const __m256i *)(w + 2)) : unpack_nibbles(w + (kind == Q4_1 ? 4 : 2));
    __m256i size = kind == Q8_0 ? _mm256_sign_epi8(q, q) : q;  /* Q8_0: |q| · (x with q's sign) */
    for (int i = 0; i < n; i++) {
        const float *ds = x.ds + i * stride / 16 + 2 * b;
        __m256i v = _mm256_loadu_si256((const __m256i *)(x.q + i * stride + 32 * b));
        if (kind == Q8_0) v = _mm256_sign_epi8(v, q);
        else offsets[i] += offset * ds[1];
        sum[i] = _mm256_fmadd_ps(_mm256_set1_ps(d * ds[0]), dot_u8_i8(size, v), sum[i]);
    }
}

ALWAYS_INLINE void dot_blocks(int kind, int n, const uint8_t *w, QuantizedRow x, size_t stride, int cols, float *out) {
    __m256 even[MAX_DOT_ROWS], odd[MAX_DOT_ROWS];
    float offsets[MAX_DOT_ROWS];                         /* Q4_0, Q4_1: what the offset of the weights adds */
    int b = 0;
    for (int i = 0; i < n; i++) { even[i] = odd[i] = _mm256_setzero_ps(); offsets[i] = 0; }
    for (; b + 1 < cols / 32; b += 2, w += 2 * block_bytes[kind]) {
        _mm_prefetch((const char *)w + PREFETCH_BYTES, _MM_HINT_T0);
        add_block(kind, n, w, x, stride, b, even, offsets);
        add_block(kind, n, w + block_bytes[kind], x, stride, b + 1, kind == Q4_0 ? even : odd, offsets);
    }
    if (b < cols / 32) add_block(kind, n, w, x, stride, b, even, offsets);
    for (int i = 0; i < n; i++) out[i] = offsets[i] + reduce_sum8(kind == Q4_0 ? even[i] : _mm256_add_ps(even[i], odd[i]));
}

#define DOT_CASES(dot, kind, x) switch (n) { \
    case 2: dot(kind, 2, w, x, stride, m->cols, out); return; \
    case 3: dot(kind, 3, w, x, stride, m->cols, out); return; \
    case 4: dot(kind, 4, w, x, stride, m->cols, out); return; \
    case 5: dot(kind, 5, w, x, stride, m->cols, out); return; \
    default: dot(kind, 6, w, x, stride, m->cols, out); return; }
#endif

/* Dot products of one row w of a matrix with n rows of x, from 2 to MAX_DOT_ROWS, a `stride` apart. */
static void dot_many(const Matrix *m, const uint8_t *w, int n, const float *x, QuantizedRow q, size_t stride, float *out) {
#ifdef HAVE_AVX2
    switch (m->kind) {
        case F32: DOT_CASES(dot_floats, F32, x) break;
        case F16: DOT_CASES(dot_floats, F16, x) break;
        case BF16: DOT_CASES(dot_floats, BF16, x) break;
        case Q8_0: DOT_CASES(dot_blocks, Q8_0, q) break;
        case Q4_0: DOT_CASES(dot_blocks, Q4_0, q) break;
        default: DOT_CASES(dot_blocks, Q4_1, q)
    }
#else
    for (int i = 0; i < n; i++) out[i] = dot(m, w, x + i * stride, (QuantizedRow){q.q + i * stride, q.ds + i * stride / 16, q.group_stride});
#endif
}

/* Whether n rows of x should share each row of weights. Few rows of Q4_1 are faster with four rows of weights at once (dot_rows). */
static inline int rows_share_weights(const Matrix *m, int n) { return n > (m->kind == Q4_1 ? 4 : 1); }

/* Dot products of `count` rows of a matrix from r on, at most four, with one row of activations. */
static inline void dot_rows(const Matrix *m, int r, int count, const float *x, QuantizedRow q, float *out) {
#ifdef HAVE_AVX2
    if (m->kind == Q4_1 && count == 4) { dot_4_rows_q4_1(matrix_row(m, r), matrix_row(m, 1) - m->data, q, m->cols, out); return; }
#endif
    for (int j = 0; j < count; j++) out[j] = dot(m, matrix_row(m, r + j), x, q);
}

/* Dequantize a block: 32 numbers of a row as floats. */
static inline void dequantize_block(int kind, const uint8_t *w, float *out) {
    if (kind == F32) { memcpy(out, w, 4 * 32); return; }
    if (kind == F16) { for (int i = 0; i < 32; i++) out[i] = load_f16(w + 2 * i); return; }
    if (kind == BF16) { for (int i = 0; i < 32; i++) out[i] = load_bf16(w + 2 * i); return; }
    float d = load_f16(w);
    if (kind == Q8_0) { for (int j = 0; j < 32; j++) out[j] = d * (int8_t)w[2 + j]; return; }
    float o = kind == Q4_1 ? load_f16(w + 2) : -8 * d;
    const uint8_t *q = w + (kind == Q4_1 ? 4 : 2);
    for (int j = 0; j < 16; j++) { out[j] = d * (q[j] & 15) + o; out[16 + j] = d * (q[j] >> 4) + o; }
}

/* Dequantize a row of a matrix: the embedding of a token. */
static void dequantize_row(const Matrix *m, int r, float *out) {
    const uint8_t *w = matrix_row(m, r);
    for (int b = 0; b < m->cols / 32; b++, w += block_bytes[m->kind], out += 32) dequantize_block(m->kind, w, out);
}
