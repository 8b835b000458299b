/* Micro-kernel of large matrix products: 6 × 16 sums fill the registers of a processor with sixteen. */

#include "simd.h"

#define MR 6                                                           /* rows of a micro-kernel */
#define PACK_COLUMNS 64                                                /* columns packed at a time */
#define REPEAT6(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define CLAMPED_ROW(i) (last < i ? last : i)                           /* of fewer than six rows the last is repeated */

/* Rows are split into partitions, a multiple of four: balanced for 2 and 4 threads, and their number depends on the rows alone. */
static int64_t num_partitions(int64_t rows) { return (rows + PARTITIONS * ROW_BLOCK - 1) / (PARTITIONS * ROW_BLOCK) * PARTITIONS; }
