/* Products of many rows: y [n][rows] (+)= x [n][cols] Wᵀ + b, exact in floats whatever the weights are stored in.

   Sixteen rows of W at a time are widened into a panel that a near cache holds, the sixteen side by side; then TILE rows
   of x meet the panel, all their sums in registers. (Sixteen bits in place of floats were tried: no faster here.) */

enum { TILE = 6, PANEL = 16 };                           /* 6 · 16 sums are 12 of the 16 wide registers */

#ifdef WIDE
static inline void transpose8(__m256 r[8]) {             /* 8 × 8 floats */
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
static inline __m256 eight(int kind, const uint8_t *row, int c) {
    if (kind == F32) return _mm256_loadu_ps((const float *)row + c);
    if (kind == F16) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * c)));
    const uint8_t *w = row + (size_t)(c / 32) * block_bytes[kind];
    int at = c % 32;
    __m256 d = _mm256_set1_ps(half_at(w));
    if (kind == Q8_0) return _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(w + 2 + at)))));
    __m128i pair = _mm_loadl_epi64((const __m128i *)(w + (kind == Q4_1 ? 4 : 2) + at % 16));   /* low halves are columns 0 to 15 */
    __m128i q = _mm_and_si128(at < 16 ? pair : _mm_srli_epi16(pair, 4), _mm_set1_epi8(15));
    __m256 offset = kind == Q4_1 ? _mm256_set1_ps(half_at(w + 2)) : _mm256_mul_ps(d, _mm256_set1_ps(-8));
    return _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), offset);
}

static inline __attribute__((always_inline)) void lay_kind(int kind, const uint8_t *const *row, int cols, float *panel) {
    for (int c = 0; c < cols; c += 8) {
        for (int h = 0; h < PANEL; h += 8) {
            __m256 r[8];
            for (int i = 0; i < 8; i++) r[i] = eight(kind, row[h + i], c);
            transpose8(r);
            for (int i = 0; i < 8; i++) _mm256_storeu_ps(panel + (size_t)(c + i) * PANEL + h, r[i]);
        }
    }
}

/* R rows of x with a panel: sums [R][PANEL]. R is known where this is called, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(int R, const float *w, int cols, const float *x, size_t stride, float *sums) {
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
#else
static void tile(int R, const float *w, int cols, const float *x, size_t stride, float *sums) {
    for (int r = 0; r < R; r++, x += stride, sums += PANEL) {
        memset(sums, 0, sizeof(float) * PANEL);
        for (int c = 0; c < cols; c++) for (int i = 0; i < PANEL; i++) sums[i] += x[c] * w[(size_t)c * PANEL + i];
    }
}
#endif

/* PANEL rows of W from `first` on, side by side: [cols][PANEL]. Beyond the last row: that one again, which no one keeps. */
static void lay(const Matrix *m, int first, float *panel) {
#ifdef WIDE
    const uint8_t *row[PANEL];
    for (int i = 0; i < PANEL; i++) row[i] = row_of(m, first + i < m->rows ? first + i : m->rows - 1);
    switch (m->kind) {
        case F32: lay_kind(F32, row, m->cols, panel); break;
        case F16: lay_kind(F16, row, m->cols, panel); break;
        case Q8_0: lay_kind(Q8_0, row, m->cols, panel); break;
        case Q4_0: lay_kind(Q4_0, row, m->cols, panel); break;
        default: lay_kind(Q4_1, row, m->cols, panel);
    }
#else
    float row[m->cols];
    for (int i = 0; i < PANEL; i++) {
        widen_row(m, first + i < m->rows ? first + i : m->rows - 1, row);
        for (int c = 0; c < m->cols; c++) panel[(size_t)c * PANEL + i] = row[c];
    }
#endif
}

/* Panel number p of W with n rows of x, `stride` apart; y has rows of `wide`. */
static void panel_product(const Matrix *m, int p, float *panel, const float *x, int n, size_t stride, float *y, size_t wide, int add) {
    int first = p * PANEL, live = m->rows - first < PANEL ? m->rows - first : PANEL;
    float sums[TILE * PANEL];
    lay(m, first, panel);
    for (int i = 0; i < n; i += TILE) {
        const float *rows = x + i * stride;
        switch (n - i) {
            case 1: tile(1, panel, m->cols, rows, stride, sums); break;
            case 2: tile(2, panel, m->cols, rows, stride, sums); break;
            case 3: tile(3, panel, m->cols, rows, stride, sums); break;
            case 4: tile(4, panel, m->cols, rows, stride, sums); break;
            case 5: tile(5, panel, m->cols, rows, stride, sums); break;
            default: tile(TILE, panel, m->cols, rows, stride, sums);
        }
        for (int r = 0; r < TILE && i + r < n; r++) {
            float *to = y + (i + r) * wide + first;
            for (int j = 0; j < live; j++) {
                float v = sums[r * PANEL + j] + (m->bias ? m->bias[first + j] : 0);
                to[j] = add ? to[j] + v : v;
            }
        }
    }
}
