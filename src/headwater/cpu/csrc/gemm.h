/* Matrix products, shared by linear layers, attention and linear attention: packed panels, and one micro-kernel.

   The sums of a tile of C, MR rows and two vectors wide, are all in registers: 12 × 32 where the processor has AVX-512 (32
   registers of sixteen floats), else 6 × 16 (of eight floats, where sixteen registers would do). The last rows of a product
   are a tile of SHORT_TILE rows where those are enough. */

#include "simd.h"

#ifdef __AVX512F__
#define MR 12                                                          /* rows of a tile */
#define LANES 16                                                       /* columns of a vector */
#define REPEAT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define BROADCAST(x) (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#else
#define MR 6
#define LANES 8
#define REPEAT(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define BROADCAST(x) broadcast8(x)
#endif
#define SHORT_TILE 4                                                   /* rows of a short tile */
#define NR (2 * LANES)                                                 /* columns of a tile: one panel, or two */
#define PACK_COLUMNS 64                                                /* columns packed at a time */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

/* ------------------------------------------------------------------------------------------------------------------ panels */

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

/* ------------------------------------------------------------------------------------------------------------ micro-kernel */

static const float ZEROS[NR];

/* How far the right half of a tile is from its left half: in B, whose panels have `panel_rows` rows, and in C. At the end of C,
   where 16 columns are left and a tile would have 32, the right half is the left one, computed twice. */
static inline int64_t right_in_b(int64_t columns, int64_t panel_rows) { return LANES == 8 ? 8 : columns > 16 ? 16 * panel_rows : 0; }
static inline int64_t right_in_c(int64_t columns) { return columns > LANES ? LANES : 0; }

/* C [rows, NR] = start + A [rows, k] · B [k, NR]. A has two strides, so that it may be read transposed; start is C itself, a bias
   (with stride 0), or ZEROS. tile_rows, a constant, at most MR: of fewer rows the last is repeated. The sums are single variables
   because compilers keep those, and not an array, in registers. */
static inline __attribute__((always_inline)) void gemm_tile(
    const int64_t tile_rows, int64_t rows, int64_t columns, const float *a, int64_t row_stride, int64_t k_stride, const float *b, int64_t panel_rows, int64_t k,
    const float *start, int64_t start_stride, float *c, int64_t c_stride) {
    int64_t last = rows - 1, b_right = right_in_b(columns, panel_rows), c_right = right_in_c(columns);
    #define ROW(i) (last < i ? last : i)
    #define BEGIN(i) const float *a##i = a + ROW(i) * row_stride, *from##i = start + ROW(i) * start_stride; \
        vec s##i = BROADCAST(0), t##i = BROADCAST(0); __builtin_prefetch(c + ROW(i) * c_stride + NR - 1, 1);
    #define ADD(i) if (i < tile_rows) { x = BROADCAST(a##i[p * k_stride]); s##i += x * left; t##i += x * right; }
    #define START(i) if (i < tile_rows) { s##i += *(const vec *)from##i; t##i += *(const vec *)(from##i + c_right); }
    #define END(i) if (i < tile_rows) { *(vec *)(c + ROW(i) * c_stride) = s##i; *(vec *)(c + ROW(i) * c_stride + c_right) = t##i; }
    REPEAT(BEGIN)
    for (int64_t p = 0; p < k; p++, b += 16) {
        vec left = *(const vec *)b, right = *(const vec *)(b + b_right), x;
        KEEP_IN_REGISTER(left); KEEP_IN_REGISTER(right);
        REPEAT(ADD)
    }
    REPEAT(START)
    REPEAT(END)
    #undef ROW
    #undef BEGIN
    #undef ADD
    #undef START
    #undef END
}

/* C [m, n] (+)= A [m, k] · B [k, n], B in panels of `panel_rows` rows of which the first k are used; n is a multiple of 16. */
static void gemm(int64_t m, int64_t n, int64_t k, const float *a, int64_t row_stride, int64_t k_stride, const float *b,
                 int64_t panel_rows, float *c, int64_t ldc, int accumulate) {
    for (int64_t j = 0; j < n; j += NR)
        for (int64_t i = 0; i < m; i += MR) {
            const float *from = a + i * row_stride, *panel = b + j * panel_rows;
            float *to = c + i * ldc + j;
            const float *start = accumulate ? to : ZEROS;
            int64_t start_stride = accumulate ? ldc : 0;
            if (m - i <= SHORT_TILE) gemm_tile(SHORT_TILE, m - i, n - j, from, row_stride, k_stride, panel, panel_rows, k, start, start_stride, to, ldc);
            else gemm_tile(MR, m - i < MR ? m - i : MR, n - j, from, row_stride, k_stride, panel, panel_rows, k, start, start_stride, to, ldc);
        }
}

/* Rows are split into partitions, a multiple of four: balanced for 2 and 4 threads, and their number depends on the rows alone. */
static int64_t num_partitions(int64_t rows) { return (rows + PARTITIONS * ROW_BLOCK - 1) / (PARTITIONS * ROW_BLOCK) * PARTITIONS; }
