/* softmax(scale · q kᵀ) v of one head and one token, over the keys of the tokens it sees.

   Eight numbers at a time, in vectors that every compiler knows; sums stay in registers while keys and values pass by. */

/* Where keys or values [.., length, width] of a head lie: token t in its own slot, or in that of its home. */
typedef struct { const float *at; const int32_t *home; size_t slot; int width; } Kept;

static inline const float *kept(const Kept *k, int t) { return k->at + (k->home ? k->home[t] * k->slot : 0) + (size_t)t * k->width; }

/* scores[t] = scale · q · k[t] */
static void score(const float *q, const Kept *k, int first, int last, float scale, float *scores) {
    int t = first, d = k->width;
    for (; t + 4 <= last; t += 4) {                      /* four keys meet each piece of q */
        const float *key[4] = {kept(k, t), kept(k, t + 1), kept(k, t + 2), kept(k, t + 3)};
        Eight a = {0}, b = a, c = a, e = a;
        for (int i = 0; i + 8 <= d; i += 8) {
            Eight x = eight_at(q + i);
            a += x * eight_at(key[0] + i), b += x * eight_at(key[1] + i), c += x * eight_at(key[2] + i), e += x * eight_at(key[3] + i);
        }
        float total[4] = {sum_of(a), sum_of(b), sum_of(c), sum_of(e)};
        for (int j = 0; j < 4; j++) {
            for (int i = d / 8 * 8; i < d; i++) total[j] += q[i] * key[j][i];
            scores[t + j] = scale * total[j];
        }
    }
    for (; t < last; t++) scores[t] = scale * dot_f32(q, kept(k, t), d);
}

/* out = by · Σ shares[t] v[t] */
static void mix(const float *shares, const Kept *v, int first, int last, float by, float *out) {
    int i = 0, d = v->width;
    for (; i + 32 <= d; i += 32) {                       /* so many columns, and two tokens at a time */
        Eight a[4], b[4];
        for (int j = 0; j < 4; j++) a[j] = b[j] = (Eight){0};
        int t = first;
        for (; t + 2 <= last; t += 2) {
            const float *one = kept(v, t) + i, *two = kept(v, t + 1) + i;
            for (int j = 0; j < 4; j++) {
                a[j] += shares[t] * eight_at(one + 8 * j);
                b[j] += shares[t + 1] * eight_at(two + 8 * j);
            }
        }
        for (int j = 0; j < 4; j++) {
            if (t < last) a[j] += shares[t] * eight_at(kept(v, t) + i + 8 * j);
            a[j] = by * (a[j] + b[j]);
            memcpy(out + i + 8 * j, &a[j], sizeof a[j]);
        }
    }
    for (; i < d; i++) {
        float sum = 0;
        for (int t = first; t < last; t++) sum += shares[t] * kept(v, t)[i];
        out[i] = by * sum;
    }
}

/* Who sees nothing gets zeros. scores: room for `last` numbers. */
static void attend(const float *q, const Kept *k, const Kept *v, int first, int last, float scale, float *scores, float *out) {
    float most = -3e38f, total = 0;
    score(q, k, first, last, scale, scores);
    for (int t = first; t < last; t++) most = scores[t] > most ? scores[t] : most;
    for (int t = first; t < last; t++) { scores[t] = quick_exp(scores[t] - most); total += scores[t]; }
    mix(scores, v, first, last, total > 0 ? 1 / total : 0, out);
}
