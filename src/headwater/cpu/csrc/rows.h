/* What the attention kernels have in common: the memory of a thread, operations on a row of numbers, and the softmax of one. */

#include "gemm.h"

/* ------------------------------------------------------------------------------------------------------- memory and threads */

/* The memory of one thread is one block, which take() cuts. */
static float *take(float **next, int64_t count) {
    float *here = *next;
    *next += count;
    return here;
}
static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* Run each task in a workspace of its thread. failed = 1: out of memory. */
#define FOR_EACH_TASK(tasks, failed, ws, make_workspace, free_workspace, run)                                                       \
    _Pragma("omp parallel")                                                                                                         \
    {                                                                                                                               \
        Workspace ws = {0};                                                                                                         \
        int ready = make_workspace;                                                                                                 \
        if (!ready) {                                                                                                               \
            _Pragma("omp atomic write")                                                                                             \
            failed = 1;                                                                                                             \
        }                                                                                                                           \
        _Pragma("omp for schedule(dynamic)")                                                                                        \
        for (int64_t task = 0; task < (tasks); task++)                                                                              \
            if (ready) run;                                                                                                         \
        free_workspace;                                                                                                             \
    }

/* ------------------------------------------------------------------------------------------------------------------- rows */

static float dot(const float *x, const float *y, int64_t n) {
    f32x8 sum = broadcast8(0);
    for (int64_t d = 0; d < n; d += 8) sum += *(const f32x8 *)(x + d) * *(const f32x8 *)(y + d);
    return reduce_sum8(sum);
}
static float sum_of(const float *x, int64_t n) {
    f32x8 sum = broadcast8(0);
    for (int64_t d = 0; d < n; d += 8) sum += *(const f32x8 *)(x + d);
    return reduce_sum8(sum);
}
static void add_scaled(float *y, float scale, const float *x, int64_t n) {
    for (int64_t d = 0; d < n; d += 8) *(f32x8 *)(y + d) += scale * *(const f32x8 *)(x + d);
}
static void scale_by(float *x, float scale, int64_t n) {
    for (int64_t d = 0; d < n; d += 8) *(f32x8 *)(x + d) *= scale;
}

/* Softmax without its division: x ← e^(x - max), in place; returns their sum, and the maximum in *max_value. n is a multiple of 8. */
static float exp_and_sum(float *x, int64_t n, float *max_value) {
    f32x8 partial_max = broadcast8(-INFINITY), sum = broadcast8(0), is_nan = broadcast8(0);
    for (int64_t j = 0; j < n; j += 8) {
        f32x8 here = *(f32x8 *)(x + j);
        partial_max = max8(partial_max, here);
        is_nan = (f32x8)((i32x8)is_nan | (here != here));              /* a comparison would let NaN slip through */
    }
    *max_value = reduce_sum8((f32x8)((i32x8)is_nan & (i32x8)broadcast8(1))) ? NAN : reduce_max8(partial_max);
    float shift = *max_value == -INFINITY ? 0 : *max_value;            /* a row that sees nothing: all its e^x are 0 */
    for (int64_t j = 0; j < n; j += 8) {
        f32x8 e = exp8(*(f32x8 *)(x + j) - shift);
        *(f32x8 *)(x + j) = e;
        sum += e;
    }
    return reduce_sum8(sum);
}
