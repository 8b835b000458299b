/* Six rows by sixteen columns of sums fill the registers of a processor with sixteen: what large products share. */

#include "vector.h"

#define HIGH 6                                                         /* rows at a time */
#define TALL 96                                                        /* rows that pass a panel, at most: they stay in the second cache */
#define WIDE 64                                                        /* columns laid out at a time */
#define SIX(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define AT(i) (last < i ? last : i)                                    /* of fewer than six rows the last is repeated */

/* Rows are dealt out in shares: a multiple of four, even for 2 and 4 threads, and their number depends on the rows alone. */
static int64_t shares_of(int64_t rows) { return (rows + 4 * TALL - 1) / (4 * TALL) * 4; }
