/* Vectors of eight floats, the dropout hash, exp, and small matrix products, shared by the training kernels. Plain C, OpenMP
   and the vector types of GCC and clang, so that one source serves every processor. float32 only. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "training.h"
#pragma GCC diagnostic ignored "-Wunused-function"

typedef float f32x8 __attribute__((vector_size(32), aligned(4)));      /* at any address */
typedef int32_t i32x8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u32x8 __attribute__((vector_size(32), aligned(4)));
static inline f32x8 broadcast8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }
#ifdef __AVX__
#define KEEP_IN_REGISTER(x) __asm__("" : "+x"(x))                      /* not loaded again for every use */
#else
#define KEEP_IN_REGISTER(x)
#endif
#define CHUNK_SIZE 16384                                               /* numbers a thread processes at a time */

/* ------------------------------------------------------------------------------------------------------- dropout hash */

static inline u32x8 hash8(u32x8 x, uint32_t second) {
    x ^= x >> 16; x *= 0x7feb352du;
    x ^= second;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ x >> 16;
}

/* The dropout mask of eight indices: scale where an element is kept, 0 where it is dropped. */
static inline f32x8 keep_mask(const DropoutKey *key, uint64_t index) {
    const u32x8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    u32x8 x = lanes + (uint32_t)index + key->first;
    u32x8 bits = hash8(x, key->second ^ (uint32_t)(index >> 32) * 0x9e3779b9u);
    return (f32x8)((bits >= key->threshold) & (i32x8)broadcast8(key->scale));
}

/* ------------------------------------------------------------------------------------------------------ exponential */

/* e^x: 2^n · e^r with |r| <= ln 2 / 2, and a polynomial for e^r; below -87 it is 0. Within 2e-7 of the true value. */
static inline f32x8 exp8(f32x8 x) {
    i32x8 underflow = x < -87.0f, overflow = x > 88.0f;                /* NaN is neither, and stays NaN */
    x = (f32x8)(((i32x8)x & ~overflow) | ((i32x8)broadcast8(88.0f) & overflow));
    f32x8 n = x * 1.44269504f + 12582912.0f;                           /* adding 1.5 · 2^23 rounds to an integer */
    i32x8 exponent = (i32x8)n - 0x4b400000;
    n -= 12582912.0f;
    f32x8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f32x8 p = broadcast8(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f; p = p * r * r + r + 1.0f;
    return (f32x8)(((i32x8)p + (exponent << 23)) & ~underflow);
}
static inline float reduce_sum8(f32x8 x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }
static inline f32x8 max8(f32x8 a, f32x8 b) { i32x8 more = a > b; return (f32x8)(((i32x8)a & more) | ((i32x8)b & ~more)); }
static inline float reduce_max8(f32x8 x) {
    float largest = x[0];
    for (int j = 1; j < 8; j++) largest = x[j] > largest ? x[j] : largest;
    return largest;
}

/* ----------------------------------------------------------------------------------------- small matrix products */

/* The right operand of a product is packed into panels of 16 columns, so that it is read as one stream:
   panel p has, for each row, the numbers 16 p .. 16 p + 15 of that row. */
static inline int64_t round_up16(int64_t n) { return (n + PANEL_COLUMNS - 1) / PANEL_COLUMNS * PANEL_COLUMNS; }

#define PREFETCH_ROWS 8                                                /* how many rows ahead are prefetched */
static void pack_panels(const float *x, int64_t row_stride, int64_t rows, int64_t columns, float *out) {
    for (int64_t i = 0; i < rows; i++, x += row_stride, out += 16)
        for (int64_t j = 0; j < columns; j += 16) {
            __builtin_prefetch(x + PREFETCH_ROWS * row_stride + j);
            memcpy(out + j * rows, x + j, 16 * sizeof(float));
        }
}
/* Pack the transpose: x [columns, rows] -> panels of [rows, columns], padded with zeros to whole panels; rows is a multiple
   of 8. 8 × 8 numbers are transposed in registers: pairs, then quarters, then halves are exchanged. */
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
static inline void transpose8x8(const float *x, int64_t column_stride, int64_t columns, float *out) {
    f32x8 r[8], s[8];
    for (int c = 0; c < 8; c++) r[c] = c < columns ? *(const f32x8 *)(x + c * column_stride) : broadcast8(0);
    for (int c = 0; c < 8; c += 2) {
        s[c] = SHUFFLE(r[c], r[c + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        s[c + 1] = SHUFFLE(r[c], r[c + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int c = 0; c < 8; c += 4)
        for (int o = 0; o < 2; o++) {
            r[c + o] = SHUFFLE(s[c + o], s[c + o + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[c + o + 2] = SHUFFLE(s[c + o], s[c + o + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int c = 0; c < 4; c++) {
        *(f32x8 *)(out + 16 * c) = SHUFFLE(r[c], r[c + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(f32x8 *)(out + 16 * (c + 4)) = SHUFFLE(r[c], r[c + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
static void pack_panels_transposed(const float *x, int64_t column_stride, int64_t columns, int64_t rows, float *out) {
    for (int64_t j = 0; j < columns; j += 16, out += 16 * rows)
        for (int64_t half = 0; half < 16; half += 8)
            for (int64_t i = 0; i < rows; i += 8)
                transpose8x8(x + (j + half) * column_stride + i, column_stride, columns - j - half, out + 16 * i + half);
}

/* C [4, 16] = start + A [4, k] · B [k, 16]. A has two strides, so that it may be read transposed; start is C itself, a bias
   (with stride 0), or ZEROS. The sums are single variables because compilers keep those, and not an array, in registers. Of
   fewer than four rows the last is repeated. */
static const float ZEROS[16];
static inline void gemm4x16(int64_t rows, const float *a, int64_t row_stride, int64_t k_stride, const float *b, int64_t k,
                        const float *start, int64_t start_stride, float *c, int64_t ldc) {
    int64_t last = rows - 1, r1 = last < 1 ? last : 1, r2 = last < 2 ? last : 2, r3 = last < 3 ? last : 3;
    const float *a1 = a + r1 * row_stride, *a2 = a + r2 * row_stride, *a3 = a + r3 * row_stride;
    const f32x8 *from = (const f32x8 *)start, *from1 = (const f32x8 *)(start + r1 * start_stride);
    const f32x8 *from2 = (const f32x8 *)(start + r2 * start_stride), *from3 = (const f32x8 *)(start + r3 * start_stride);
    f32x8 s0 = from[0], s1 = from1[0], s2 = from2[0], s3 = from3[0], t0 = from[1], t1 = from1[1], t2 = from2[1], t3 = from3[1];
    for (int64_t i = 0; i < k; i++, b += 16) {
        f32x8 left = *(const f32x8 *)b, right = *(const f32x8 *)(b + 8), x;
        KEEP_IN_REGISTER(left); KEEP_IN_REGISTER(right);
        x = broadcast8(a[i * k_stride]); s0 += x * left; t0 += x * right;
        x = broadcast8(a1[i * k_stride]); s1 += x * left; t1 += x * right;
        x = broadcast8(a2[i * k_stride]); s2 += x * left; t2 += x * right;
        x = broadcast8(a3[i * k_stride]); s3 += x * left; t3 += x * right;
    }
    f32x8 *c0 = (f32x8 *)c, *c1 = (f32x8 *)(c + r1 * ldc), *c2 = (f32x8 *)(c + r2 * ldc), *c3 = (f32x8 *)(c + r3 * ldc);
    c0[0] = s0; c0[1] = t0; c1[0] = s1; c1[1] = t1; c2[0] = s2; c2[1] = t2; c3[0] = s3; c3[1] = t3;
}

#ifdef __AVX512F__
/* The same with registers of sixteen floats, of which there are twice as many: 6 rows × 16 · panels, panels = 1 or 2, a constant
   at each call. Of fewer than six rows the last is repeated. */
typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
static inline f32x16 broadcast16(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
enum { GEMM_ROWS = 6 };
static inline __attribute__((always_inline)) void gemm6x32(int panels, int64_t rows, const float *a, int64_t row_stride, int64_t k_stride,
                                                           const float *b, int64_t panel_stride, int64_t k, float *c, int64_t ldc, int accumulate) {
    f32x16 sums[GEMM_ROWS][2];
    const float *row[GEMM_ROWS];
    for (int r = 0; r < GEMM_ROWS; r++) {
        int64_t here = r < rows ? r : rows - 1;
        row[r] = a + here * row_stride;
        for (int p = 0; p < panels; p++) sums[r][p] = accumulate ? *(const f32x16 *)(c + here * ldc + 16 * p) : broadcast16(0);
    }
    for (int64_t i = 0; i < k; i++, b += 16) {
        f32x16 right[2];
        for (int p = 0; p < panels; p++) right[p] = *(const f32x16 *)(b + p * panel_stride);
        for (int r = 0; r < GEMM_ROWS; r++) {
            f32x16 x = broadcast16(row[r][i * k_stride]);
            for (int p = 0; p < panels; p++) sums[r][p] += x * right[p];
        }
    }
    for (int r = 0; r < GEMM_ROWS && r < rows; r++)
        for (int p = 0; p < panels; p++) *(f32x16 *)(c + r * ldc + 16 * p) = sums[r][p];
}

/* C [m, n] (+)= A [m, k] · B [k, n], B in panels of `panel_rows` rows of which the first k are used; n is a multiple of 16. */
static void gemm(int64_t m, int64_t n, int64_t k, const float *a, int64_t row_stride, int64_t k_stride, const float *b,
                    int64_t panel_rows, float *c, int64_t ldc, int accumulate) {
    for (int64_t j = 0; j < n; j += 32)
        for (int64_t i = 0; i < m; i += GEMM_ROWS) {
            const float *from = a + i * row_stride, *panel = b + j * panel_rows;
            float *to = c + i * ldc + j;
            if (n - j > 16) gemm6x32(2, m - i, from, row_stride, k_stride, panel, 16 * panel_rows, k, to, ldc, accumulate);
            else gemm6x32(1, m - i, from, row_stride, k_stride, panel, 0, k, to, ldc, accumulate);
        }
}
#else
/* C [m, n] (+)= A [m, k] · B [k, n], B in panels of `panel_rows` rows of which the first k are used; n is a multiple of 16. */
static void gemm(int64_t m, int64_t n, int64_t k, const float *a, int64_t row_stride, int64_t k_stride, const float *b,
                    int64_t panel_rows, float *c, int64_t ldc, int accumulate) {
    for (int64_t j = 0; j < n; j += 16)
        for (int64_t i = 0; i < m; i += 4)
            gemm4x16(m - i < 4 ? m - i : 4, a + i * row_stride, row_stride, k_stride, b + j * panel_rows, k,
                     accumulate ? c + i * ldc + j : ZEROS, accumulate ? ldc : 0, c + i * ldc + j, ldc);
}
#endif
