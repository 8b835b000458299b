/* Eight numbers at a time: what the C files of this folder share. Plain C, OpenMP and the compilers' vector types (GCC,
   clang), so that one text serves every processor. float32 only. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#pragma GCC diagnostic ignored "-Wunused-function"

typedef float v8 __attribute__((vector_size(32), aligned(4)));        /* eight numbers, wherever they lie */
typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4)));
static inline v8 all8(float x) { return (v8){x, x, x, x, x, x, x, x}; }
#ifdef __AVX__
#define HELD(x) __asm__("" : "+x"(x))                                  /* in a register: not read anew for every use */
#else
#define HELD(x)
#endif
#define PIECE 16384                                                    /* numbers a thread takes at a time */

/* ------------------------------------------------------------------------------------------------------- chance */

typedef struct { uint32_t first, second, threshold; float scale; } Drop;   /* kept numbers are multiplied by scale */

static inline u8 mixed(u8 x, uint32_t second) {
    x ^= x >> 16; x *= 0x7feb352du;
    x ^= second;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ x >> 16;
}

/* scale where the number at each index is kept, 0 where it is dropped */
static inline v8 kept(const Drop *drop, uint64_t index) {
    const u8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    u8 x = lanes + (uint32_t)index + drop->first;
    u8 bits = mixed(x, drop->second ^ (uint32_t)(index >> 32) * 0x9e3779b9u);
    return (v8)((bits >= drop->threshold) & (i8)all8(drop->scale));
}

/* ------------------------------------------------------------------------------------------------------ softmax */

/* e^x: 2^n · e^r with |r| <= ln 2 / 2, and a polynomial for e^r; below -87 it is 0. Within 2e-7 of the true value. */
static inline v8 exp8(v8 x) {
    i8 dead = x < -87.0f, large = x > 88.0f;                           /* NaN is neither, and stays NaN */
    x = (v8)(((i8)x & ~large) | ((i8)all8(88.0f) & large));
    v8 n = x * 1.44269504f + 12582912.0f;                              /* adding 1.5 · 2^23 rounds to a whole number */
    i8 whole = (i8)n - 0x4b400000;
    n -= 12582912.0f;
    v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 p = all8(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f; p = p * r * r + r + 1.0f;
    return (v8)(((i8)p + (whole << 23)) & ~dead);
}
static inline float sum8(v8 x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }
static inline v8 max8(v8 a, v8 b) { i8 more = a > b; return (v8)(((i8)a & more) | ((i8)b & ~more)); }
static inline float most8(v8 x) {
    float most = x[0];
    for (int j = 1; j < 8; j++) most = x[j] > most ? x[j] : most;
    return most;
}

/* ----------------------------------------------------------------------------------------- small matrix products */

/* The right-hand side of a product is laid out in panels of 16 columns, so that it is read as one stream:
   panel p holds, for each of its rows, the numbers 16 p .. 16 p + 15 of that row. */
static inline int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }

#define AHEAD 8                                                        /* rows that are asked for before they are read */
static void panels(const float *x, int64_t by_row, int64_t rows, int64_t columns, float *out) {
    for (int64_t i = 0; i < rows; i++, x += by_row, out += 16)
        for (int64_t j = 0; j < columns; j += 16) {
            __builtin_prefetch(x + AHEAD * by_row + j);
            memcpy(out + j * rows, x + j, 16 * sizeof(float));
        }
}
/* The same of the transpose: x [columns, rows] -> [rows, columns], padded with zeros to whole panels; rows is a
   multiple of 8. Eight by eight numbers are turned in registers: pairs, then quarters, then halves change places. */
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
static inline void turn8(const float *x, int64_t by_column, int64_t columns, float *out) {
    v8 r[8], s[8];
    for (int c = 0; c < 8; c++) r[c] = c < columns ? *(const v8 *)(x + c * by_column) : all8(0);
    for (int c = 0; c < 8; c += 2) {
        s[c] = MIX(r[c], r[c + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        s[c + 1] = MIX(r[c], r[c + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int c = 0; c < 8; c += 4)
        for (int o = 0; o < 2; o++) {
            r[c + o] = MIX(s[c + o], s[c + o + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[c + o + 2] = MIX(s[c + o], s[c + o + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int c = 0; c < 4; c++) {
        *(v8 *)(out + 16 * c) = MIX(r[c], r[c + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(v8 *)(out + 16 * (c + 4)) = MIX(r[c], r[c + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
static void turned_panels(const float *x, int64_t by_column, int64_t columns, int64_t rows, float *out) {
    for (int64_t j = 0; j < columns; j += 16, out += 16 * rows)
        for (int64_t half = 0; half < 16; half += 8)
            for (int64_t i = 0; i < rows; i += 8)
                turn8(x + (j + half) * by_column + i, by_column, columns - j - half, out + 16 * i + half);
}

/* C [4, 16] = start + A [4, k] · B [k, 16]. A is known by its two strides, so that it may be read transposed; start is
   C itself, a bias (with no stride), or NOTHING. The sums have names of their own because compilers keep those, and not
   an array, in registers. Of fewer than four rows the last is repeated. */
static const float NOTHING[16];
static inline void tile(int64_t rows, const float *a, int64_t by_row, int64_t by_k, const float *b, int64_t k,
                        const float *start, int64_t by_start, float *c, int64_t ldc) {
    int64_t last = rows - 1, r1 = last < 1 ? last : 1, r2 = last < 2 ? last : 2, r3 = last < 3 ? last : 3;
    const float *a1 = a + r1 * by_row, *a2 = a + r2 * by_row, *a3 = a + r3 * by_row;
    const v8 *from = (const v8 *)start, *from1 = (const v8 *)(start + r1 * by_start), *from2 = (const v8 *)(start + r2 * by_start), *from3 = (const v8 *)(start + r3 * by_start);
    v8 s0 = from[0], s1 = from1[0], s2 = from2[0], s3 = from3[0], t0 = from[1], t1 = from1[1], t2 = from2[1], t3 = from3[1];
    for (int64_t i = 0; i < k; i++, b += 16) {
        v8 left = *(const v8 *)b, right = *(const v8 *)(b + 8), x;
        HELD(left); HELD(right);
        x = all8(a[i * by_k]); s0 += x * left; t0 += x * right;
        x = all8(a1[i * by_k]); s1 += x * left; t1 += x * right;
        x = all8(a2[i * by_k]); s2 += x * left; t2 += x * right;
        x = all8(a3[i * by_k]); s3 += x * left; t3 += x * right;
    }
    v8 *c0 = (v8 *)c, *c1 = (v8 *)(c + r1 * ldc), *c2 = (v8 *)(c + r2 * ldc), *c3 = (v8 *)(c + r3 * ldc);
    c0[0] = s0; c0[1] = t0; c1[0] = s1; c1[1] = t1; c2[0] = s2; c2[1] = t2; c3[0] = s3; c3[1] = t3;
}

/* C [m, n] (+)= A [m, k] · B [k, n], B in panels of `tall` rows of which the first k are used; n is a multiple of 16. */
static void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t by_row, int64_t by_k, const float *b,
                    int64_t tall, float *c, int64_t ldc, int add) {
    for (int64_t j = 0; j < n; j += 16)
        for (int64_t i = 0; i < m; i += 4)
            tile(m - i < 4 ? m - i : 4, a + i * by_row, by_row, by_k, b + j * tall, k, add ? c + i * ldc + j : NOTHING, add ? ldc : 0, c + i * ldc + j, ldc);
}
