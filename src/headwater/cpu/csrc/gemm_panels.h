/* Matrix products of many rows: y [n][rows] (+)= x [n][cols] Wᵀ + b.

   PANEL_ROWS rows of W at a time are packed side by side into a panel that stays in the cache; then TILE_ROWS rows of x are
   multiplied with the panel, all their sums in registers. Quantized weights stay 8 bits wide, and x is quantized to 8 bits
   as well: a few instructions then multiply and add 32 numbers in place of eight floats. They need one unsigned operand.
   With VNNI that is W + 128, which its offset corrects; sums have 32 bits. Without it, two products are added in 16 bits:
   for weights of 8 bits they fit if the signs of W are moved to x, |W| · (x with the sign of W); for weights of 4 bits all
   32 products of a block fit. All sums are exact, so every way gives the same result.
   Quantized rows of x are stored in tiles, [cols / 4][TILE_ROWS][4], in the order in which they are read. */

enum { PANEL_ROWS = 16, TILE_ROWS = 5 };                 /* TILE_ROWS · PANEL_ROWS sums are 10 of the 16 wide registers */
#ifdef HAVE_VNNI
enum { U8_OFFSET = 128 };                                /* added to weights of 8 bits, so that they are unsigned */
#else
enum { U8_OFFSET = 0 };
#endif

/* Row i of the quantized activations, from column `from` on. */
static inline QuantizedRow quantized_row_at(int8_t *q, float *ds, int cols, int i, int from) {
    size_t tile_offset = (size_t)(i / TILE_ROWS) * TILE_ROWS * cols;
    return (QuantizedRow){q + tile_offset + TILE_ROWS * (size_t)from + 4 * (i % TILE_ROWS), ds + ((size_t)i * cols + from) / 16, 4 * TILE_ROWS};
}

#ifdef HAVE_AVX2
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
ALWAYS_INLINE __m256 dequantize8(int kind, const uint8_t *row, int c) {
    if (kind == F32) return _mm256_loadu_ps((const float *)row + c);
    if (kind == F16 || kind == BF16) return load8_halves(kind, row + 2 * c);
    const uint8_t *w = row + (size_t)(c / 32) * block_bytes[kind];
    int at = c % 32;
    __m256 d = _mm256_set1_ps(load_f16(w));
    if (kind == Q8_0) return _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(w + 2 + at)))));
    __m128i pair = _mm_loadl_epi64((const __m128i *)(w + (kind == Q4_1 ? 4 : 2) + at % 16));  /* low halves are columns 0 to 15 */
    __m128i q = _mm_and_si128(at < 16 ? pair : _mm_srli_epi16(pair, 4), _mm_set1_epi8(15));
    __m256 offset = kind == Q4_1 ? _mm256_set1_ps(load_f16(w + 2)) : _mm256_mul_ps(d, _mm256_set1_ps(-8));
    return _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), offset);
}

/* A panel of floats: [cols][PANEL_ROWS], here eight of its rows. */
ALWAYS_INLINE void pack_panel_f32(int kind, const uint8_t *const row[8], int cols, float *out) {
    for (int c = 0; c < cols; c += 8, out += 8 * PANEL_ROWS) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) r[i] = dequantize8(kind, row[i], c);
        transpose8(r);
        for (int i = 0; i < 8; i++) _mm256_storeu_ps(out + i * PANEL_ROWS, r[i]);
    }
}

/* A panel of int8: [cols / 4][PANEL_ROWS][4] bytes, then for each block of 32 columns PANEL_ROWS scales and PANEL_ROWS offsets. */
ALWAYS_INLINE void pack_panel_int8(int kind, const uint8_t *const row[8], int cols, uint8_t *out, float *scales_offsets) {
    for (int b = 0; b < cols / 32; b++, scales_offsets += 2 * PANEL_ROWS) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) {
            const uint8_t *w = row[i] + (size_t)b * block_bytes[kind], *q = w + (kind == Q4_1 ? 4 : 2);
            __m256i v = kind == Q8_0 ? _mm256_add_epi8(_mm256_loadu_si256((const __m256i *)q), _mm256_set1_epi8((char)U8_OFFSET)) : unpack_nibbles(q);
            r[i] = _mm256_castsi256_ps(v);
            scales_offsets[i] = load_f16(w);
            scales_offsets[PANEL_ROWS + i] = kind == Q4_1 ? load_f16(w + 2) : (kind == Q8_0 ? -U8_OFFSET : -8) * scales_offsets[i];
        }
        transpose8(r);
        for (int i = 0; i < 8; i++, out += 4 * PANEL_ROWS) _mm256_storeu_si256((__m256i *)out, _mm256_castps_si256(r[i]));
    }
}

static void pack_panel(const Matrix *m, int first, int keep_int8, float *panel) {
    float *scales_offsets = panel + PANEL_ROWS / 4 * (size_t)m->cols;
    for (int h = 0; h < PANEL_ROWS; h += 8) {
        const uint8_t *row[8];                           /* beyond the last row it is repeated; its results are dropped */
        for (int i = 0; i < 8; i++) row[i] = matrix_row(m, first + h + i < m->rows ? first + h + i : m->rows - 1);
#define PACK_CASE(kind) case kind: \
            if (keep_int8 && kind >= Q8_0) pack_panel_int8(kind, row, m->cols, (uint8_t *)panel + 4 * h, scales_offsets + h); \
            else pack_panel_f32(kind, row, m->cols, panel + h); \
            break;
        switch (m->kind) { PACK_CASE(F32) PACK_CASE(F16) PACK_CASE(BF16) PACK_CASE(Q8_0) PACK_CASE(Q4_0) PACK_CASE(Q4_1) }
    }
}

/* R rows of x times a panel: sums [R][PANEL_ROWS]. R is a constant at each call, so that the accumulators stay in registers. */
ALWAYS_INLINE void gemm_tile_f32(int R, const float *w, int cols, const float *x, size_t stride, float *sums) {
    __m256 acc[TILE_ROWS][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int c = 0; c < cols; c++, w += PANEL_ROWS) {
        __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
        for (int r = 0; r < R; r++) {
            __m256 a = _mm256_set1_ps(x[r * stride + c]);
            acc[r][0] = _mm256_fmadd_ps(a, w0, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(a, w1, acc[r][1]);
        }
    }
    for (int r = 0; r < R; r++) memcpy(sums + r * PANEL_ROWS, acc[r], sizeof acc[r]);
}

/* sum0 += x4 · w0, sum1 += x4 · w1, for four columns of one row of x and sixteen rows of W. is_4bit: weights of 4 bits,
   whose sums have 16 bits without VNNI. */
#ifdef HAVE_VNNI
ALWAYS_INLINE void dot_accumulate(const int8_t *x4, __m256i w0, __m256i w1, int is_4bit, __m256i *sum0, __m256i *sum1) {
    int32_t bytes;
    (void)is_4bit;
    memcpy(&bytes, x4, 4);
    __m256i x = _mm256_set1_epi32(bytes);
    *sum0 = _mm256_dpbusd_epi32(*sum0, w0, x);
    *sum1 = _mm256_dpbusd_epi32(*sum1, w1, x);
}
ALWAYS_INLINE __m256i to_int32(__m256i sum, int is_4bit) { (void)is_4bit; return sum; }
#else
/* In assembly, because all registers are in use here, and compilers that order this themselves spill the sums to memory. */
ALWAYS_INLINE void dot_accumulate(const int8_t *x4, __m256i w0, __m256i w1, int is_4bit, __m256i *sum0, __m256i *sum1) {
    __m256i a, b, c;
    if (is_4bit) {
        __asm__("vpbroadcastd %4, %2\n\tvpmaddubsw %2, %5, %3\n\tvpaddw %3, %0, %0\n\t"
                "vpmaddubsw %2, %6, %2\n\tvpaddw %2, %1, %1"
                : "+x"(*sum0), "+x"(*sum1), "=&x"(a), "=&x"(b) : "m"(*(const int32_t *)x4), "x"(w0), "x"(w1));
    } else {
        const __m256i ones = _mm256_set1_epi16(1);
        __asm__("vpbroadcastd %5, %2\n\tvpsignb %6, %2, %3\n\tvpabsb %6, %4\n\tvpmaddubsw %3, %4, %3\n\tvpmaddwd %8, %3, %3\n\tvpaddd %3, %0, %0\n\t"
                "vpsignb %7, %2, %3\n\tvpabsb %7, %4\n\tvpmaddubsw %3, %4, %3\n\tvpmaddwd %8, %3, %3\n\tvpaddd %3, %1, %1"
                : "+x"(*sum0), "+x"(*sum1), "=&x"(a), "=&x"(b), "=&x"(c) : "m"(*(const int32_t *)x4), "x"(w0), "x"(w1), "m"(ones));
    }
}
ALWAYS_INLINE __m256i to_int32(__m256i sum, int is_4bit) { return is_4bit ? _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) : sum; }
#endif

ALWAYS_INLINE void gemm_tile_int8(int R, int is_4bit, const float *panel, int cols, QuantizedRow x, size_t stride, float *sums) {
    const uint8_t *w = (const uint8_t *)panel;
    const float *scales_offsets = panel + PANEL_ROWS / 4 * (size_t)cols;
    __m256 sum[TILE_ROWS][2];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int b = 0; b < cols / 32; b++, scales_offsets += 2 * PANEL_ROWS) {
        __m256i acc[TILE_ROWS][2];
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++, w += 4 * PANEL_ROWS) {
            __m256i w0 = _mm256_loadu_si256((const __m256i *)w), w1 = _mm256_loadu_si256((const __m256i *)w + 1);
            for (int r = 0; r < R; r++) dot_accumulate(x.q + 4 * (TILE_ROWS * (8 * b + p) + r), w0, w1, is_4bit, &acc[r][0], &acc[r][1]);
        }
        for (int r = 0; r < R; r++) {
            const float *ds = x.ds + r * stride / 16 + 2 * b;
            __m256 d = _mm256_set1_ps(ds[0]), s = _mm256_set1_ps(ds[1]);
            for (int v = 0; v < 2; v++) {
                sum[r][v] = _mm256_fmadd_ps(s, _mm256_loadu_ps(scales_offsets + PANEL_ROWS + 8 * v), sum[r][v]);
                sum[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(to_int32(acc[r][v], is_4bit)), _mm256_mul_ps(d, _mm256_loadu_ps(scales_offsets + 8 * v)), sum[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++) memcpy(sums + r * PANEL_ROWS, sum[r], sizeof sum[r]);
}

/* A function for each number of rows, so that each has all registers. */
#define DEFINE_TILES(R) \
    static __attribute__((noinline)) void f32_tile_##R(const float *panel, int cols, const float *x, size_t stride, float *sums) { \
        gemm_tile_f32(R, panel, cols, x, stride, sums); \
    } \
    static __attribute__((noinline)) void q8_tile_##R(const float *panel, int cols, QuantizedRow x, size_t stride, float *sums) { \
        gemm_tile_int8(R, 0, panel, cols, x, stride, sums); \
    } \
    static __attribute__((noinline)) void q4_tile_##R(const float *panel, int cols, QuantizedRow x, size_t stride, float *sums) { \
        gemm_tile_int8(R, 1, panel, cols, x, stride, sums); \
    }
DEFINE_TILES(1) DEFINE_TILES(2) DEFINE_TILES(3) DEFINE_TILES(4) DEFINE_TILES(5)
typedef void Int8Tile(const float *, int, QuantizedRow, size_t, float *);
static void (*const f32_tiles[TILE_ROWS])(const float *, int, const float *, size_t, float *) = {f32_tile_1, f32_tile_2, f32_tile_3, f32_tile_4, f32_tile_5};
static Int8Tile *const int8_tiles[2][TILE_ROWS] = {{q8_tile_1, q8_tile_2, q8_tile_3, q8_tile_4, q8_tile_5}, {q4_tile_1, q4_tile_2, q4_tile_3, q4_tile_4, q4_tile_5}};

static void gemm_tile(int R, const Matrix *m, const float *panel, const float *x, QuantizedRow q, size_t stride, float *sums) {
    if (q.q && m->kind >= Q8_0) int8_tiles[m->kind != Q8_0][R - 1](panel, m->cols, q, stride, sums);
    else f32_tiles[R - 1](panel, m->cols, x, stride, sums);
}
#else
static void pack_panel(const Matrix *m, int first, int keep_int8, float *panel) {
    (void)keep_int8;
    for (int i = 0; i < PANEL_ROWS; i++) {
        const uint8_t *w = matrix_row(m, first + i < m->rows ? first + i : m->rows - 1);
        float *to = panel + i, block[32];
        for (int b = 0; b < m->cols / 32; b++, w += block_bytes[m->kind]) {
            dequantize_block(m->kind, w, block);
            for (int c = 0; c < 32; c++, to += PANEL_ROWS) *to = block[c];
        }
    }
}

static void gemm_tile(int R, const Matrix *m, const float *panel, const float *x, QuantizedRow q, size_t stride, float *sums) {
    (void)q;
    for (int r = 0; r < R; r++, x += stride, sums += PANEL_ROWS) {
        memset(sums, 0, sizeof(float) * PANEL_ROWS);
        for (int c = 0; c < m->cols; c++) for (int i = 0; i < PANEL_ROWS; i++) sums[i] += x[c] * panel[(size_t)c * PANEL_ROWS + i];
    }
}
#endif

/* Panel p of W times n rows of x, `stride` apart, quantized in q or, without q, exact; the rows of y are `y_stride` apart.
   panel [PANEL_ROWS · cols]: scratch. */
static void panel_gemm(const Matrix *m, int p, float *panel, const float *x, QuantizedRow q, int n, size_t stride, float *y, size_t y_stride, int accumulate) {
    int first = p * PANEL_ROWS, valid_rows = m->rows - first < PANEL_ROWS ? m->rows - first : PANEL_ROWS;
    float sums[TILE_ROWS * PANEL_ROWS];
    pack_panel(m, first, q.q != NULL, panel);
    for (int i = 0; i < n; i += TILE_ROWS) {
        int R = n - i < TILE_ROWS ? n - i : TILE_ROWS;
        gemm_tile(R, m, panel, x + i * stride, q.q ? quantized_row_at(q.q, q.ds, (int)stride, i, 0) : q, stride, sums);
        for (int r = 0; r < R; r++) {
            float *to = y + (i + r) * y_stride + first;
            for (int j = 0; j < valid_rows; j++) {
                float v = sums[r * PANEL_ROWS + j] + (m->bias ? m->bias[first + j] : 0);
                to[j] = accumulate ? to[j] + v : v;
            }
        }
    }
}
