/* Attention of one head and one token: softmax(scale · q kᵀ) v over the keys that the token sees.

   Eight floats at a time, in vectors that every compiler knows; sums stay in registers while keys and values are streamed. */

/* Keys or values [.., length, head_dim] of a head: token t is in its own cache row, or in row_of_token[t]. */
typedef struct { const float *data; const int32_t *row_of_token; size_t cache_row_stride; int head_dim; } KVView;

static inline const float *kv_at(const KVView *k, int t) { return k->data + (k->row_of_token ? k->row_of_token[t] * k->cache_row_stride : 0) + (size_t)t * k->head_dim; }

/* scores[t] = scale · q · k[t] */
static void attention_scores(const float *q, const KVView *k, int first, int last, float scale, float *scores) {
    int t = first, d = k->head_dim;
    for (; t + 4 <= last; t += 4) {                      /* four keys for each load of q */
        const float *key[4] = {kv_at(k, t), kv_at(k, t + 1), kv_at(k, t + 2), kv_at(k, t + 3)};
        f32x8 a = {0}, b = a, c = a, e = a;
        for (int i = 0; i + 8 <= d; i += 8) {
            f32x8 x = load8(q + i);
            a += x * load8(key[0] + i), b += x * load8(key[1] + i), c += x * load8(key[2] + i), e += x * load8(key[3] + i);
        }
        float total[4] = {reduce_sum8(a), reduce_sum8(b), reduce_sum8(c), reduce_sum8(e)};
        for (int j = 0; j < 4; j++) {
            for (int i = d / 8 * 8; i < d; i++) total[j] += q[i] * key[j][i];
            scores[t + j] = scale * total[j];
        }
    }
    for (; t < last; t++) scores[t] = scale * dot_f32(q, kv_at(k, t), d);
}

/* out = scale · Σ weights[t] v[t] */
static void weighted_sum(const float *weights, const KVView *v, int first, int last, float by, float *out) {
    int i = 0, d = v->head_dim;
    for (; i + 32 <= d; i += 32) {                       /* 32 columns, and two tokens at a time */
        f32x8 a[4], b[4];
        for (int j = 0; j < 4; j++) a[j] = b[j] = (f32x8){0};
        int t = first;
        for (; t + 2 <= last; t += 2) {
            const float *v0 = kv_at(v, t) + i, *v1 = kv_at(v, t + 1) + i;
            for (int j = 0; j < 4; j++) {
                a[j] += weights[t] * load8(v0 + 8 * j);
                b[j] += weights[t + 1] * load8(v1 + 8 * j);
            }
        }
        for (int j = 0; j < 4; j++) {
            if (t < last) a[j] += weights[t] * load8(kv_at(v, t) + i + 8 * j);
            a[j] = by * (a[j] + b[j]);
            memcpy(out + i + 8 * j, &a[j], sizeof a[j]);
        }
    }
    for (; i < d; i++) {
        float sum = 0;
        for (int t = first; t < last; t++) sum += weights[t] * kv_at(v, t)[i];
        out[i] = by * sum;
    }
}

/* Zeros if no key is visible. scores [last]: scratch. */
static void decode_attention(const float *q, const KVView *k, const KVView *v, int first, int last, float scale, float *scores, float *out) {
    float max_score = -3e38f, total = 0;
    attention_scores(q, k, first, last, scale, scores);
    for (int t = first; t < last; t++) max_score = scores[t] > max_score ? scores[t] : max_score;
    for (int t = first; t < last; t++) { scores[t] = fast_exp(scores[t] - max_score); total += scores[t]; }
    weighted_sum(scores, v, first, last, total > 0 ? 1 / total : 0, out);
}

/* Attention to a source of thousands of tokens, whose keys and values have 16 bits and lie in panels of SOURCE_PANEL columns:
   keys [length / 16][head_dim][16], values [head_dim / 16][length][16], length a multiple of 16. Tokens that read the same
   source share each load, up to SOURCE_ROWS of them. */
enum { SOURCE_PANEL = 16, SOURCE_ROWS = 5 };
#ifdef HAVE_AVX2
enum { HAVE_SOURCE_PANELS = 1 };

/* out [n][16] = a [n][k] · panel [k][16]; n is a constant at each call, so that the sums stay in registers. */
ALWAYS_INLINE void panel_product(int n, const float *a, size_t stride, const uint16_t *panel, int k, float *out, size_t out_stride, float scale) {
    __m256 left[SOURCE_ROWS], right[SOURCE_ROWS];
    for (int r = 0; r < n; r++) left[r] = right[r] = _mm256_setzero_ps();
    for (int c = 0; c < k; c++, panel += SOURCE_PANEL) {
        __m256 b0 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)panel)), b1 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(panel + 8)));
        for (int r = 0; r < n; r++) {
            __m256 v = _mm256_set1_ps(a[r * stride + c]);
            left[r] = _mm256_fmadd_ps(v, b0, left[r]);
            right[r] = _mm256_fmadd_ps(v, b1, right[r]);
        }
    }
    for (int r = 0; r < n; r++) {
        _mm256_storeu_ps(out + r * out_stride, _mm256_mul_ps(left[r], _mm256_set1_ps(scale)));
        _mm256_storeu_ps(out + r * out_stride + 8, _mm256_mul_ps(right[r], _mm256_set1_ps(scale)));
    }
}

/* q and out: n rows, q_stride and out_stride apart. scores [n][length]: scratch. */
ALWAYS_INLINE void attend_to_panels(int n, const float *q, size_t q_stride, const uint16_t *keys, const uint16_t *values, int length, int last, int head_dim,
                                    float scale, float *scores, float *out, size_t out_stride) {
    int whole = (last + SOURCE_PANEL - 1) / SOURCE_PANEL * SOURCE_PANEL;
    for (int t = 0; t < whole; t += SOURCE_PANEL) panel_product(n, q, q_stride, keys + (size_t)t * head_dim, head_dim, scores + t, length, scale);
    for (int r = 0; r < n; r++) {
        float *s = scores + (size_t)r * length, max_score = -3e38f, total = 0;
        for (int t = 0; t < last; t++) max_score = s[t] > max_score ? s[t] : max_score;
        for (int t = 0; t < last; t++) { s[t] = fast_exp(s[t] - max_score); total += s[t]; }
        for (int t = 0; t < last; t++) s[t] *= total > 0 ? 1 / total : 0;
    }
    for (int c = 0; c < head_dim; c += SOURCE_PANEL) panel_product(n, scores, length, values + (size_t)c * length, last, out + c, out_stride, 1);
}

static void source_attention(int n, const float *q, size_t q_stride, const uint16_t *keys, const uint16_t *values, int length, int last, int head_dim,
                             float scale, float *scores, float *out, size_t out_stride) {
    switch (n) {
        case 1: attend_to_panels(1, q, q_stride, keys, values, length, last, head_dim, scale, scores, out, out_stride); break;
        case 2: attend_to_panels(2, q, q_stride, keys, values, length, last, head_dim, scale, scores, out, out_stride); break;
        case 3: attend_to_panels(3, q, q_stride, keys, values, length, last, head_dim, scale, scores, out, out_stride); break;
        case 4: attend_to_panels(4, q, q_stride, keys, values, length, last, head_dim, scale, scores, out, out_stride); break;
        default: attend_to_panels(5, q, q_stride, keys, values, length, last, head_dim, scale, scores, out, out_stride);
    }
}
#else
enum { HAVE_SOURCE_PANELS = 0 };                         /* Python asks first */
static void source_attention(int n, const float *q, size_t q_stride, const uint16_t *keys, const uint16_t *values, int length, int last, int head_dim,
                             float scale, float *scores, float *out, size_t out_stride) {
    (void)n, (void)q, (void)q_stride, (void)keys, (void)values, (void)length, (void)last, (void)head_dim, (void)scale, (void)scores, (void)out, (void)out_stride;
}
#endif
