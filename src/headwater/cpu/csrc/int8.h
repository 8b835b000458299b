/* Matrices whose rows are int8 with a scale each, and the sizes of the tiles in which int8.c multiplies them. */

#ifndef INT8_H
#define INT8_H
#include <stdint.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
enum { HAVE_INT8_LINEAR = 1 };
#define WITH_INT8_LINEAR 1
#else
enum { HAVE_INT8_LINEAR = 0 };
#endif
enum { INT8_FEW_ROWS = 8, INT8_TILE = 12, INT8_PANEL = 32, INT8_GROUP = 64, INT8_MAX_COLUMNS = 65536 };  /* sums of more columns could overflow */

typedef struct { const int8_t *q; const float *scale; const int32_t *sum; int64_t rows, columns; } Int8Rows;  /* x = q · scale; sum [rows] = Σ q, of activations */
#endif
