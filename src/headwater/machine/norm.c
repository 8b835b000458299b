/* Normalisation of rows, with the sum of a residual branch (and its dropout) taken in by the way. N rows, D width, a
   multiple of 8. u is a row's unit form: (s - mean) / √(var + ε), or s / √(mean(s²) + ε), of s = x + y · kept. */

#include "vector.h"

#define BLOCKS 8                                                       /* of rows: their sums do not depend on the number of threads */
#define STEEPEST 16                                                    /* |bias / weight|: beyond it a digit would be lost */
#define ROW(x) ((x) + i * width)
#define AT(x) (*(v8 *)((x) + j))
#define OVER(j) for (int64_t j = 0; j < width; j += 8)

/* Whether u = (out - bias) / weight keeps its digits: no weight is 0, or small beside its bias. */
int comes_back(const float *weight, const float *bias, int64_t width) {
    for (int64_t j = 0; j < width; j++)
        if (!(fabsf(weight[j]) > 1e-30f) || (bias && !(fabsf(bias[j]) <= STEEPEST * fabsf(weight[j])))) return 0;
    return 1;
}

/* out = u · weight + bias; by = 1 / √…, a number a row. u is written down where it is asked for. */
void norm(const float *x, const float *y, Drop drop, const float *weight, const float *bias, int64_t rows, int64_t width, float eps,
          int centred, float *out, float *unit, float *by) {
    #pragma omp parallel for schedule(static) if (rows * width > 2 * PIECE)
    for (int64_t i = 0; i < rows; i++) {
        const float *given = ROW(x);
        float *row = ROW(out), mean = 0;
        v8 sum = all8(0), square = all8(0);
        OVER(j) {
            v8 s = *(const v8 *)(given + j);
            if (y) s += drop.threshold ? *(const v8 *)(ROW(y) + j) * kept(&drop, i * width + j) : *(const v8 *)(ROW(y) + j);
            AT(row) = s; sum += s;
        }
        if (centred) mean = sum8(sum) / width;
        OVER(j) { v8 s = AT(row) - mean; square += s * s; }
        float scale = by[i] = 1 / sqrtf(sum8(square) / width + eps);
        OVER(j) {
            v8 u = (AT(row) - mean) * scale;
            if (unit) AT(ROW(unit)) = u;
            AT(row) = bias ? u * *(const v8 *)(weight + j) + *(const v8 *)(bias + j) : u * *(const v8 *)(weight + j);
        }
    }
}

/* With g from above and t = g · weight:  d_weight = Σ g u,  d_bias = Σ g,  dx = by · (t - mean(t) - u · mean(t u)),
   dy = dx · kept. Where u was not written down it is (out - bias) / weight. sums [BLOCKS, 2, D]: scratch, zeros. */
void norm_back(const float *above, const float *out, const float *unit, const float *weight, const float *bias, const float *by,
               int64_t rows, int64_t width, int centred, Drop drop, float *dx, float *dy, float *sums, float *d_weight, float *d_bias) {
    #pragma omp parallel for schedule(static) if (rows * width > 2 * PIECE)
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int64_t i = rows * block / BLOCKS; i < rows * (block + 1) / BLOCKS; i++) {
            float *row = ROW(dx), *of_weight = sums + 2 * block * width, *of_bias = of_weight + width;
            v8 plain = all8(0), turned = all8(0);
            OVER(j) {
                v8 g = *(const v8 *)(ROW(above) + j), w = *(const v8 *)(weight + j), t = g * w, u;
                if (unit) u = *(const v8 *)(ROW(unit) + j);
                else u = (*(const v8 *)(ROW(out) + j) - (bias ? *(const v8 *)(bias + j) : all8(0))) / w;
                AT(row) = u; plain += t; turned += t * u;
                AT(of_weight) += g * u; AT(of_bias) += g;
            }
            float mean = centred ? sum8(plain) / width : 0, along = sum8(turned) / width;
            OVER(j) {
                v8 d = (*(const v8 *)(ROW(above) + j) * *(const v8 *)(weight + j) - mean - AT(row) * along) * by[i];
                AT(row) = d;
                if (dy) AT(ROW(dy)) = d * kept(&drop, i * width + j);
            }
        }
    for (int64_t block = 0; block < BLOCKS; block++)
        OVER(j) {
            AT(d_weight) += *(v8 *)(sums + 2 * block * width + j);
            if (d_bias) AT(d_bias) += *(v8 *)(sums + (2 * block + 1) * width + j);
        }
}
