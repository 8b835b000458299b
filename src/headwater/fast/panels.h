/* Products of many rows: y [n][rows] (+)= x [n][cols] Wᵀ + b.

   Sixteen rows of W at a time are laid out as a panel that a near cache holds, the sixteen side by side; then TILE rows
   of x meet the panel, all their sums in registers. Quantised weights stay 8 bits wide and x is rounded to 8 bits as
   well: a few instructions then multiply and add 32 numbers in place of eight floats. They want one side without a sign.
   With VNNI that is W, moved up by 128, which its offset takes back; sums have 32 bits. Without it, two products are
   added in 16 bits: beside weights of 8 bits they fit if the signs of W are given to x, |W| · (x with the sign of W);
   beside weights of 4 bits all 32 products of a block fit. All sums are exact, so every way gives the same numbers.
   Rounded rows lie by tiles, [cols / 4][TILE][4], in the order in which they are read. */

enum { PANEL = 16, TILE = 5 };                           /* TILE · PANEL sums are 10 of the 16 wide registers */
#ifdef VNNI
enum { RAISED = 128 };                                   /* what is added to weights of 8 bits, so that they have no sign */
#else
enum { RAISED = 0 };
#endif

/* Where row i of rounded activations begins, from column `from` on. */
static inline Rounded rounded_at(int8_t *q, float *ds, int cols, int i, int from) {
    size_t tile_begins = (size_t)(i / TILE) * TILE * cols;
    return (Rounded){q + tile_begins + TILE * (size_t)from + 4 * (i % TILE), ds + ((size_t)i * cols + from) / 16, 4 * TILE};
}

#ifdef WIDE
#define INLINED static inline __attribute__((always_inline))

static inline void transpose8(__m256 r[8]) {             /* 8 × 8 numbers of 32 bits */
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
            u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
        }
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/* Columns c to c + 8 of a row, c a multiple of 8. */
INLINED __m256 eight(int kind, const uint8_t *row, int c) {
    if (kind == F32) return _mm256_loadu_ps((const float *)row + c);
    if (kind == F16 || kind == BF16) return eight_halves(kind, row + 2 * c);
    const uint8_t *w = row + (size_t)(c / 32) * block_bytes[kind];
    int at = c % 32;
    __m256 d = _mm256_set1_ps(half_at(w));
    if (kind == Q8_0) return _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(w + 2 + at)))));
    __m128i pair = _mm_loadl_epi64((const __m128i *)(w + (kind == Q4_1 ? 4 : 2) + at % 16));   /* low halves are columns 0 to 15 */
    __m128i q = _mm_and_si128(at < 16 ? pair : _mm_srli_epi16(pair, 4), _mm_set1_epi8(15));
    __m256 offset = kind == Q4_1 ? _mm256_set1_ps(half_at(w + 2)) : _mm256_mul_ps(d, _mm256_set1_ps(-8));
    return _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), offset);
}

/* Floats: [cols][PANEL], here for eight of the rows. */
INLINED void lay_floats(int kind, const uint8_t *const row[8], int cols, float *out) {
    for (int c = 0; c < cols; c += 8, out += 8 * PANEL) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) r[i] = eight(kind, row[i], c);
        transpose8(r);
        for (int i = 0; i < 8; i++) _mm256_storeu_ps(out + i * PANEL, r[i]);
    }
}

/* Rounded: [cols / 4][PANEL][4] bytes, then for each block of 32 columns, PANEL each: scales, offsets. */
INLINED void lay_rounded(int kind, const uint8_t *const row[8], int cols, uint8_t *out, float *notes) {
    for (int b = 0; b < cols / 32; b++, notes += 2 * PANEL) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) {
            const uint8_t *w = row[i] + (size_t)b * block_bytes[kind], *q = w + (kind == Q4_1 ? 4 : 2);
            __m256i v = kind == Q8_0 ? _mm256_add_epi8(_mm256_loadu_si256((const __m256i *)q), _mm256_set1_epi8((char)RAISED)) : nibbles(q);
            r[i] = _mm256_castsi256_ps(v);
            notes[i] = half_at(w);
            notes[PANEL + i] = kind == Q4_1 ? half_at(w + 2) : (kind == Q8_0 ? -RAISED : -8) * notes[i];
        }
        transpose8(r);
        for (int i = 0; i < 8; i++, out += 4 * PANEL) _mm256_storeu_si256((__m256i *)out, _mm256_castps_si256(r[i]));
    }
}

static void lay(const Matrix *m, int first, int round, float *panel) {
    float *notes = panel + PANEL / 4 * (size_t)m->cols;
    for (int h = 0; h < PANEL; h += 8) {
        const uint8_t *row[8];                           /* beyond the last row: that one again, which no one keeps */
        for (int i = 0; i < 8; i++) row[i] = row_of(m, first + h + i < m->rows ? first + h + i : m->rows - 1);
#define LAY(kind) case kind: \
            if (round && kind >= Q8_0) lay_rounded(kind, row, m->cols, (uint8_t *)panel + 4 * h, notes + h); \
            else lay_floats(kind, row, m->cols, panel + h); \
            break;
        switch (m->kind) { LAY(F32) LAY(F16) LAY(BF16) LAY(Q8_0) LAY(Q4_0) LAY(Q4_1) }
    }
}

/* R rows of x with a panel: sums [R][PANEL]. R is known where this is called, so that what is added to stays in registers. */
INLINED void tile_floats(int R, const float *w, int cols, const float *x, size_t stride, float *sums) {
    __m256 acc[TILE][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int c = 0; c < cols; c++, w += PANEL) {
        __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
        for (int r = 0; r < R; r++) {
            __m256 a = _mm256_set1_ps(x[r * stride + c]);
            acc[r][0] = _mm256_fmadd_ps(a, w0, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(a, w1, acc[r][1]);
        }
    }
    for (int r = 0; r < R; r++) memcpy(sums + r * PANEL, acc[r], sizeof acc[r]);
}

/* sum0 += four · w0, sum1 += four · w1, for four columns of one row of x and sixteen rows of W. small: weights of 4 bits,
   whose sums have 16 bits where there is no VNNI. */
#ifdef VNNI
INLINED void meet(const int8_t *four, __m256i w0, __m256i w1, int small, __m256i *sum0, __m256i *sum1) {
    int32_t bytes;
    (void)small;
    memcpy(&bytes, four, 4);
    __m256i x = _mm256_set1_epi32(bytes);
    *sum0 = _mm256_dpbusd_epi32(*sum0, w0, x);
    *sum1 = _mm256_dpbusd_epi32(*sum1, w1, x);
}
INLINED __m256i whole(__m256i sum, int small) { (void)small; return sum; }
#else
/* Written out, because all registers are in use here and compilers, left to order this themselves, put the sums into memory. */
INLINED void meet(const int8_t *four, __m256i w0, __m256i w1, int small, __m256i *sum0, __m256i *sum1) {
    __m256i a, b, c;
    if (small) {
        __asm__("vpbroadcastd %4, %2\n\tvpmaddubsw %2, %5, %3\n\tvpaddw %3, %0, %0\n\t"
                "vpmaddubsw %2, %6, %2\n\tvpaddw %2, %1, %1"
                : "+x"(*sum0), "+x"(*sum1), "=&x"(a), "=&x"(b) : "m"(*(const int32_t *)four), "x"(w0), "x"(w1));
    } else {
        const __m256i ones = _mm256_set1_epi16(1);
        __asm__("vpbroadcastd %5, %2\n\tvpsignb %6, %2, %3\n\tvpabsb %6, %4\n\tvpmaddubsw %3, %4, %3\n\tvpmaddwd %8, %3, %3\n\tvpaddd %3, %0, %0\n\t"
                "vpsignb %7, %2, %3\n\tvpabsb %7, %4\n\tvpmaddubsw %3, %4, %3\n\tvpmaddwd %8, %3, %3\n\tvpaddd %3, %1, %1"
                : "+x"(*sum0), "+x"(*sum1), "=&x"(a), "=&x"(b), "=&x"(c) : "m"(*(const int32_t *)four), "x"(w0), "x"(w1), "m"(ones));
    }
}
INLINED __m256i whole(__m256i sum, int small) { return small ? _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) : sum; }
#endif

INLINED void tile_rounded(int R, int small, const float *panel, int cols, Rounded x, size_t stride, float *sums) {
    const uint8_t *w = (const uint8_t *)panel;
    const float *notes = panel + PANEL / 4 * (size_t)cols;
    __m256 sum[TILE][2];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int b = 0; b < cols / 32; b++, notes += 2 * PANEL) {
        __m256i acc[TILE][2];
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++, w += 4 * PANEL) {
            __m256i w0 = _mm256_loadu_si256((const __m256i *)w), w1 = _mm256_loadu_si256((const __m256i *)w + 1);
            for (int r = 0; r < R; r++) meet(x.q + 4 * (TILE * (8 * b + p) + r), w0, w1, small, &acc[r][0], &acc[r][1]);
        }
        for (int r = 0; r < R; r++) {
            const float *ds = x.ds + r * stride / 16 + 2 * b;
            __m256 d = _mm256_set1_ps(ds[0]), s = _mm256_set1_ps(ds[1]);
            for (int v = 0; v < 2; v++) {
                sum[r][v] = _mm256_fmadd_ps(s, _mm256_loadu_ps(notes + PANEL + 8 * v), sum[r][v]);
                sum[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole(acc[r][v], small)), _mm256_mul_ps(d, _mm256_loadu_ps(notes + 8 * v)), sum[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++) memcpy(sums + r * PANEL, sum[r], sizeof sum[r]);
}

/* A function for each number of rows, so that each has the registers to itself. */
#define TILES(R) \
    static __attribute__((noinline)) void floats_##R(const float *panel, int cols, const float *x, size_t stride, float *sums) { \
        tile_floats(R, panel, cols, x, stride, sums); \
    } \
    static __attribute__((noinline)) void bytes_##R(const float *panel, int cols, Rounded x, size_t stride, float *sums) { \
        tile_rounded(R, 0, panel, cols, x, stride, sums); \
    } \
    static __attribute__((noinline)) void halves_##R(const float *panel, int cols, Rounded x, size_t stride, float *sums) { \
        tile_rounded(R, 1, panel, cols, x, stride, sums); \
    }
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5)
typedef void Rounding(const float *, int, Rounded, size_t, float *);
static void (*const floats[TILE])(const float *, int, const float *, size_t, float *) = {floats_1, floats_2, floats_3, floats_4, floats_5};
static Rounding *const bytes[2][TILE] = {{bytes_1, bytes_2, bytes_3, bytes_4, bytes_5}, {halves_1, halves_2, halves_3, halves_4, halves_5}};

static void tile(int R, const Matrix *m, const float *panel, const float *x, Rounded q, size_t stride, float *sums) {
    if (q.q && m->kind >= Q8_0) bytes[m->kind != Q8_0][R - 1](panel, m->cols, q, stride, sums);
    else floats[R - 1](panel, m->cols, x, stride, sums);
}
#else
static void lay(const Matrix *m, int first, int round, float *panel) {
    (void)round;
    for (int i = 0; i < PANEL; i++) {
        const uint8_t *w = row_of(m, first + i < m->rows ? first + i : m->rows - 1);
        float *to = panel + i, block[32];
        for (int b = 0; b < m->cols / 32; b++, w += block_bytes[m->kind]) {
            widen_block(m->kind, w, block);
            for (int c = 0; c < 32; c++, to += PANEL) *to = block[c];
        }
    }
}

static void tile(int R, const Matrix *m, const float *panel, const float *x, Rounded q, size_t stride, float *sums) {
    (void)q;
    for (int r = 0; r < R; r++, x += stride, sums += PANEL) {
        memset(sums, 0, sizeof(float) * PANEL);
        for (int c = 0; c < m->cols; c++) for (int i = 0; i < PANEL; i++) sums[i] += x[c] * panel[(size_t)c * PANEL + i];
    }
}
#endif

/* Panel number p of W with n rows of x, `stride` apart, rounded in q or, without q, exact; y has rows of `wide`. panel has
   room for PANEL · cols floats. */
static void panel_product(const Matrix *m, int p, float *panel, const float *x, Rounded q, int n, size_t stride, float *y, size_t wide, int add) {
    int first = p * PANEL, live = m->rows - first < PANEL ? m->rows - first : PANEL;
    float sums[TILE * PANEL];
    lay(m, first, q.q != NULL, panel);
    for (int i = 0; i < n; i += TILE) {
        int R = n - i < TILE ? n - i : TILE;
        tile(R, m, panel, x + i * stride, q.q ? rounded_at(q.q, q.ds, (int)stride, i, 0) : q, stride, sums);
        for (int r = 0; r < R; r++) {
            float *to = y + (i + r) * wide + first;
            for (int j = 0; j < live; j++) {
                float v = sums[r * PANEL + j] + (m->bias ? m->bias[first + j] : 0);
                to[j] = add ? to[j] + v : v;
            }
        }
    }
}
