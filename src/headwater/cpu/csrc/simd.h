/* Vectors of eight floats, the dropout hash and exp, shared by the training kernels. Plain C, OpenMP and the vector types of
   GCC and clang, so that one source serves every processor. float32 only. */

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
