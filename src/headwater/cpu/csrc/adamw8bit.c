/* AdamW with 8-bit moments.

   A moment is stored as the top bits of its float32, the exponent and three bits of the fraction, relative to the largest
   number of its block of BLOCK_SIZE; the first moment m has a sign as well. Rounding is stochastic, so that changes smaller
   than the distance between two codes are not lost: on average they are exact. */

#include "simd.h"

static inline void widen_codes(const uint8_t *codes, int32_t *out) { for (int i = 0; i < BLOCK_SIZE; i++) out[i] = codes[i]; }
static inline void narrow_codes(const int32_t *codes, uint8_t *out) { for (int i = 0; i < BLOCK_SIZE; i++) out[i] = (uint8_t)codes[i]; }
static inline i32x8 select8(i32x8 which, i32x8 yes, i32x8 no) { return (yes & which) | (no & ~which); }
static inline i32x8 max_i32x8(i32x8 a, i32x8 b) { return select8(a > b, a, b); }
static inline i32x8 broadcast_i32x8(int32_t x) { return (i32x8){x, x, x, x, x, x, x, x}; }
static inline i32x8 abs_bits8(f32x8 x) { return (i32x8)x & 0x7fffffff; }
static inline f32x8 dequantize8(i32x8 code, int32_t block_exponent) { return (f32x8)(max_i32x8(code + block_exponent, broadcast_i32x8(0)) << DROPPED_BITS & (code > 0)); }
static inline f32x8 sqrt8(f32x8 x) { for (int i = 0; i < 8; i++) x[i] = sqrtf(x[i]); return x; }
static int32_t reduce_max(i32x8 x) { int32_t all = 0; for (int i = 0; i < 8; i++) all = x[i] > all ? x[i] : all; return all; }

/* One block. Code 0 means zero. For v only zero itself has it: a small v rounded up to code 1 makes a step smaller, rounded
   down to 0 it would make the step very large. */
static void adamw_block(float *w, const float *g, uint8_t *m, uint8_t *v, int16_t *block_exponent, uint32_t from, const AdamWParams *s) {
    const u32x8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    f32x8 new_m[BLOCK_SIZE / 8], new_v[BLOCK_SIZE / 8];
    int32_t codes_m[BLOCK_SIZE], codes_v[BLOCK_SIZE];
    widen_codes(m, codes_m), widen_codes(v, codes_v);
    i32x8 max_m = broadcast_i32x8(0), max_v = broadcast_i32x8(0);
    for (int64_t i = 0; i < BLOCK_SIZE; i += 8) {
        i32x8 code = *(const i32x8 *)(codes_m + i);
        f32x8 grad = *(const f32x8 *)(g + i), *x = (f32x8 *)(w + i);
        f32x8 old = (f32x8)((i32x8)dequantize8(code & 127, block_exponent[0]) | (code & 128) << 24);
        f32x8 first = old * s->beta1 + grad * (1 - s->beta1);
        f32x8 second = dequantize8(*(const i32x8 *)(codes_v + i), block_exponent[1]) * s->beta2 + grad * grad * (1 - s->beta2);
        *x -= *x * (s->lr * s->weight_decay) + first * s->inv_bias_correction1 / (sqrt8(second * s->inv_bias_correction2) + s->eps) * s->lr;
        max_m = max_i32x8(max_m, abs_bits8(first)), max_v = max_i32x8(max_v, abs_bits8(second));
        new_m[i / 8] = first, new_v[i / 8] = second;
    }
    /* 126, 254: rounding may add one */
    block_exponent[0] = (int16_t)((reduce_max(max_m) >> DROPPED_BITS) - 126);
    block_exponent[1] = (int16_t)((reduce_max(max_v) >> DROPPED_BITS) - 254);
    for (int64_t i = 0; i < BLOCK_SIZE; i += 8) {
        i32x8 noise = (i32x8)hash8(lanes + from + (uint32_t)i + s->first, s->second);
        i32x8 size = ((abs_bits8(new_m[i / 8]) + (noise >> 12 & 0xfffff)) >> DROPPED_BITS) - block_exponent[0];
        i32x8 code = ((abs_bits8(new_v[i / 8]) + (noise & 0xfffff)) >> DROPPED_BITS) - block_exponent[1];
        *(i32x8 *)(codes_m + i) = max_i32x8(size, broadcast_i32x8(0)) | ((new_m[i / 8] < 0) & 128);
        *(i32x8 *)(codes_v + i) = select8(code < 1, (new_v[i / 8] > 0) & 1, code);
    }
    narrow_codes(codes_m, m), narrow_codes(codes_v, v);
}

/* w and its gradient g [N], codes m and v [N], block_exponents [N / BLOCK_SIZE, 2]: the top bits that code 0 of m and of v stands for. */
void adamw8bit(float *w, const float *g, uint8_t *m, uint8_t *v, int16_t *block_exponents, int64_t n, AdamWParams s) {
    #pragma omp parallel for schedule(static)
    for (int64_t from = 0; from < n; from += BLOCK_SIZE) {
        int64_t left = n - from;
        int16_t *block_exponent = block_exponents + from / BLOCK_SIZE * 2;
        if (left >= BLOCK_SIZE) { adamw_block(w + from, g + from, m + from, v + from, block_exponent, (uint32_t)from, &s); continue; }
        float padded_w[BLOCK_SIZE] = {0}, padded_g[BLOCK_SIZE] = {0};  /* the last block is padded with zeros */
        uint8_t padded_m[BLOCK_SIZE] = {0}, padded_v[BLOCK_SIZE] = {0};
        memcpy(padded_w, w + from, left * sizeof *w); memcpy(padded_g, g + from, left * sizeof *g);
        memcpy(padded_m, m + from, left); memcpy(padded_v, v + from, left);
        adamw_block(padded_w, padded_g, padded_m, padded_v, block_exponent, (uint32_t)from, &s);
        memcpy(w + from, padded_w, left * sizeof *w);
        memcpy(m + from, padded_m, left); memcpy(v + from, padded_v, left);
    }
}
