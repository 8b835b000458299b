/* What adapters change in a linear layer of a decoding step. Each token has an adapter of its own, or none.

       y = gain · (W (input_gain · x) + b) + shift + Bᵀ A x

   LoRA has A and B alone, DoRA a gain and a shift beside them, IA3 a gain or an input_gain. The tokens of other adapters, and
   those without one, have the bits that they would have alone. */

enum { MAX_READERS = 3 };                                /* matrices that read the same x: q, k and v */

struct LinearChange {                                    /* of one adapter in one matrix */
    int32_t rank;
    const float *a, *b;                                  /* [rank][cols]; [rank][rows], with the scale */
    const float *gain, *shift, *input_gain;              /* [rows], [rows], [cols], or none */
};

/* A x, so many numbers as the rank. */
static void low_rank_product(const LinearChange *c, const float *x, int cols, float *hidden) {
    for (int k = 0; k < c->rank; k++) hidden[k] = dot_f32(c->a + (size_t)k * cols, x, cols);
}

/* Columns from .. to of x, the input of the matrix. */
static void change_input(const LinearChange *c, float *x, int from, int to) {
    if (c->input_gain) for (int j = from; j < to; j++) x[j] *= c->input_gain[j];
}

/* Rows from .. to of y, the output of the matrix, from hidden = A x. */
static void change_output(const LinearChange *c, const float *hidden, int rows, int from, int to, float *y) {
    if (c->gain) for (int j = from; j < to; j++) y[j] *= c->gain[j];
    if (c->shift) for (int j = from; j < to; j++) y[j] += c->shift[j];
    for (int k = 0; k < c->rank; k++) {
        const float *b = c->b + (size_t)k * rows;
        for (int j = from; j < to; j++) y[j] += hidden[k] * b[j];
    }
}
