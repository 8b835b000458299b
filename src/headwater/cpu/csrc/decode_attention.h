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
