/* AdamW whose moments are kept in eight bits a number.

   A number is kept as the top of its own bits, its exponent and three bits of its fraction, counted from the largest number
   of its BLOCK; that of m has a sign as well. Whether it is rounded up or down is left to chance, so that changes smaller
   than a step between two codes are not lost: on average they are exact. */

#include "vector.h"

#define BLOCK 256
#define LOW 20                                                         /* bits of a float that are left out */

typedef struct { float lr, decay, beta1, beta2, eps, by1, by2; uint32_t first, second; } Step;  /* by: 1 / (1 - beta^step) */

static inline void widened(const uint8_t *codes, int32_t *out) { for (int i = 0; i < BLOCK; i++) out[i] = codes[i]; }
static inline void narrowed(const int32_t *codes, uint8_t *out) { for (int i = 0; i < BLOCK; i++) out[i] = (uint8_t)codes[i]; }
static inline i8 either(i8 which, i8 yes, i8 no) { return (yes & which) | (no & ~which); }
static inline i8 most(i8 a, i8 b) { return either(a > b, a, b); }
static inline i8 same8(int32_t x) { return (i8){x, x, x, x, x, x, x, x}; }
static inline i8 bits(v8 x) { return (i8)x & 0x7fffffff; }
static inline v8 number(i8 code, int32_t base) { return (v8)(most(code + base, same8(0)) << LOW & (code > 0)); }
static inline v8 root8(v8 x) { for (int i = 0; i < 8; i++) x[i] = sqrtf(x[i]); return x; }
static int32_t largest(i8 x) { int32_t all = 0; for (int i = 0; i < 8; i++) all = x[i] > all ? x[i] : all; return all; }

/* One whole block. A code of 0 is no number but zero; of v only zero itself is: a small v raised to code 1 makes a step
   smaller, dropped to 0 it would make it very large. */
static void block(float *w, const float *g, uint8_t *m, uint8_t *v, int16_t *base, uint32_t from, const Step *s) {
    const u8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    v8 new_m[BLOCK / 8], new_v[BLOCK / 8];
    int32_t of_m[BLOCK], of_v[BLOCK];
    widened(m, of_m), widened(v, of_v);
    i8 most_m = same8(0), most_v = same8(0);
    for (int64_t i = 0; i < BLOCK; i += 8) {
        i8 code = *(const i8 *)(of_m + i);
        v8 slope = *(const v8 *)(g + i), old = (v8)((i8)number(code & 127, base[0]) | (code & 128) << 24), *x = (v8 *)(w + i);
        v8 first = old * s->beta1 + slope * (1 - s->beta1), second = number(*(const i8 *)(of_v + i), base[1]) * s->beta2 + slope * slope * (1 - s->beta2);
        *x -= *x * (s->lr * s->decay) + first * s->by1 / (root8(second * s->by2) + s->eps) * s->lr;
        most_m = most(most_m, bits(first)), most_v = most(most_v, bits(second));
        new_m[i / 8] = first, new_v[i / 8] = second;
    }
    base[0] = (int16_t)((largest(most_m) >> LOW) - 126), base[1] = (int16_t)((largest(most_v) >> LOW) - 254);  /* one more by chance */
    for (int64_t i = 0; i < BLOCK; i += 8) {
        i8 noise = (i8)mixed(lanes + from + (uint32_t)i + s->first, s->second);
        i8 size = ((bits(new_m[i / 8]) + (noise >> 12 & 0xfffff)) >> LOW) - base[0];
        i8 code = ((bits(new_v[i / 8]) + (noise & 0xfffff)) >> LOW) - base[1];
        *(i8 *)(of_m + i) = most(size, same8(0)) | ((new_m[i / 8] < 0) & 128);
        *(i8 *)(of_v + i) = either(code < 1, (new_v[i / 8] > 0) & 1, code);
    }
    narrowed(of_m, m), narrowed(of_v, v);
}

/* w and its slope g [N], codes m and v [N], bases [N / BLOCK, 2]: what code 0 of m and of v would be. */
void adamw8(float *w, const float *g, uint8_t *m, uint8_t *v, int16_t *bases, int64_t n, Step s) {
    #pragma omp parallel for schedule(static)
    for (int64_t from = 0; from < n; from += BLOCK) {
        int64_t left = n - from;
        int16_t *base = bases + from / BLOCK * 2;
        if (left >= BLOCK) { block(w + from, g + from, m + from, v + from, base, (uint32_t)from, &s); continue; }
        float some_w[BLOCK] = {0}, some_g[BLOCK] = {0};                /* the last block is filled up with zeros */
        uint8_t some_m[BLOCK] = {0}, some_v[BLOCK] = {0};
        memcpy(some_w, w + from, left * sizeof *w); memcpy(some_g, g + from, left * sizeof *g);
        memcpy(some_m, m + from, left); memcpy(some_v, v + from, left);
        block(some_w, some_g, some_m, some_v, base, (uint32_t)from, &s);
        memcpy(w + from, some_w, left * sizeof *w);
        memcpy(m + from, some_m, left); memcpy(v + from, some_v, left);
    }
}
