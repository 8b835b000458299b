/* The tiles of attention: which queries and keys they hold, the packed keys and values, and which of them are visible. */

#include "rows.h"

/* ------------------------------------------------------------------------------------------------------ tiles and spans */

#define QUERY_BLOCK 48                                                 /* queries of a tile */
#define MIN_SPAN 512                                                   /* queries of a span, at least */
enum { LEADING, RANDOM, BANDED, GROUPS };

/* Keys in the order of the columns of a tile's scores, packed as right operands of products. */
typedef struct {
    int64_t num_keys, panel_rows, first_column;                        /* panel_rows: keys that were packed together */
    int64_t first_index;                                               /* of the first key in the dropout hash */
    const int32_t *numbers;                                            /* RANDOM: the number of each block */
    float *k_transposed, *v_transposed, *keys, *values;
} KeyGroup;

/* Queries are processed in spans, and spans in tiles; the banded keys of a span are packed once, and begin at a multiple of 16,
   at or before the first visible one, as those of a tile do. Without a band there is one span. */
typedef struct { int64_t b, h, first, num_queries, first_key, num_keys; } Tile;  /* queries first …, banded keys first_key … */

typedef struct {
    KeyGroup groups[GROUPS];
    float *scores, *grad_scores, *queries, *query_panels, *grad_out_panels, *gathered;
    int64_t ld;
    float *memory;
} Workspace;

static inline int64_t band_width(const AttentionParams *a) { return (a->back + 1 + a->ahead) * a->block; }
static inline int64_t span_queries(const AttentionParams *a) {
    int64_t least = band_width(a) > MIN_SPAN ? band_width(a) : MIN_SPAN;
    return (least + a->block - 1) / a->block * a->block;
}
static inline int64_t keys_of_queries(const AttentionParams *a, int64_t queries) { return min_of(a->keys, band_width(a) + queries + a->block + 16); }
static inline int64_t leading_columns(const AttentionParams *a) { return round_up16(a->leading_keys); }

/* The visible keys [begin, end) of a band for query i. */
static inline int64_t visible_begin(const AttentionParams *a, int64_t i) {
    int64_t begin = ((i + a->first_query) / a->block - a->back) * a->block;
    return begin > 0 ? begin : 0;
}
static inline int64_t visible_end(const AttentionParams *a, int64_t i) {
    int64_t end = ((i + a->first_query) / a->block + a->ahead + 1) * a->block;
    return min_of(a->keys, a->causal ? min_of(end, i + a->first_query + 1) : end);
}

static inline Tile make_tile(const AttentionParams *a, int64_t b, int64_t h, int64_t first, int64_t end) {
    int64_t first_key = visible_begin(a, first) / 16 * 16;
    return (Tile){b, h, first, end - first, first_key, visible_end(a, end - 1) - first_key};
}
/* Where the tile that begins at query `first` ends: it does not cross a block if it holds one, or has random keys. */
static inline int64_t tile_end(const AttentionParams *a, int64_t first, int64_t span_end) {
    int64_t end = min_of(first + QUERY_BLOCK, span_end), left = a->block - (first + a->first_query) % a->block;
    return a->block >= QUERY_BLOCK || a->random_blocks ? min_of(end, first + left) : end;
}

/* ------------------------------------------------------------------------------------------------------------- workspace */

/* The memory of one thread: packed keys and values, and the scores of a tile. backward: with the gradients of a tile. */
static int make_workspace(const AttentionParams *a, int backward, Workspace *ws) {
    int64_t w = a->head_dim, random_keys = a->random_blocks * a->block;
    int64_t columns[GROUPS] = {leading_columns(a), round_up16(random_keys), round_up16(keys_of_queries(a, QUERY_BLOCK))};
    int64_t packed[GROUPS] = {columns[LEADING], columns[RANDOM], round_up16(keys_of_queries(a, span_queries(a)))};
    /* The stride is an odd number of cache lines: else a column of scores would fall on a few lines of the cache. */
    ws->ld = ((columns[LEADING] + columns[RANDOM] + columns[BANDED]) / 16 | 1) * 16;
    int64_t panels = (2 + backward) * w * (packed[LEADING] + packed[RANDOM] + packed[BANDED]);
    int64_t tiles = (1 + backward) * QUERY_BLOCK * ws->ld + (1 + 2 * backward) * QUERY_BLOCK * w;
    ws->memory = malloc(sizeof(float) * (size_t)(panels + tiles + random_keys * w));
    if (!ws->memory) return 0;
    float *next = ws->memory;
    int64_t column = 0;
    for (int kind = 0; kind < GROUPS; kind++) {
        KeyGroup *g = ws->groups + kind;
        *g = (KeyGroup){.first_column = column, .first_index = kind == LEADING ? 0 : columns[LEADING]};
        column += columns[kind];
        g->k_transposed = take(&next, w * packed[kind]);
        if (backward) {
            g->v_transposed = take(&next, w * packed[kind]);
            g->keys = take(&next, w * packed[kind]);
        } else g->values = take(&next, w * packed[kind]);
    }
    ws->scores = take(&next, QUERY_BLOCK * ws->ld);
    ws->queries = take(&next, QUERY_BLOCK * w);
    ws->gathered = take(&next, random_keys * w);
    if (backward) {
        ws->grad_scores = take(&next, QUERY_BLOCK * ws->ld);
        ws->query_panels = take(&next, QUERY_BLOCK * w);
        ws->grad_out_panels = take(&next, QUERY_BLOCK * w);
    }
    return 1;
}

static void pack_keys(KeyGroup *g, const float *k, int64_t k_stride, int64_t num_keys, int64_t w) {
    g->num_keys = g->panel_rows = num_keys;
    pack_panels_transposed(k, k_stride, num_keys, w, g->k_transposed);
    if (g->keys) pack_panels(k, k_stride, num_keys, w, g->keys);
}
static void pack_values(KeyGroup *g, const float *v, int64_t v_stride, int64_t num_keys, int64_t w) {
    if (g->values) pack_panels(v, v_stride, num_keys, w, g->values);
    else pack_panels_transposed(v, v_stride, num_keys, w, g->v_transposed);
}

/* Gather and pack the random blocks of the block of queries that begins at query `first`. */
static void pack_random(const AttentionParams *a, Workspace *ws, Tile t, const float *k, int64_t k_stride, const float *v, int64_t v_stride) {
    KeyGroup *g = ws->groups + RANDOM;
    int64_t num_keys = a->random_blocks * a->block, w = a->head_dim, query_blocks = (a->queries + a->block - 1) / a->block;
    g->numbers = a->block_numbers + (t.h * query_blocks + t.first / a->block) * a->random_blocks;
    for (int is_value = 0; is_value < 2; is_value++) {
        for (int64_t j = 0; j < num_keys; j++) {
            int64_t key = g->numbers[j / a->block] * a->block + j % a->block;
            memcpy(ws->gathered + j * w, is_value ? v + key * v_stride : k + key * k_stride, sizeof(float) * (size_t)w);
        }
        if (is_value) pack_values(g, ws->gathered, w, num_keys, w);
        else pack_keys(g, ws->gathered, w, num_keys, w);
    }
}

/* The banded keys of a tile, out of those of its span. */
static KeyGroup tile_group(const AttentionParams *a, const KeyGroup *g, Tile span, Tile t) {
    KeyGroup here = *g;
    int64_t skip = t.first_key - span.first_key;
    here.num_keys = t.num_keys;
    here.first_index = leading_columns(a) + t.first_key;
    here.k_transposed += skip * a->head_dim;
    if (g->values) here.values += skip * 16;
    else {
        here.v_transposed += skip * a->head_dim;
        here.keys += skip * 16;
    }
    return here;
}

/* ---------------------------------------------------------------------------------------------------------------- scores */

static void hide(float *row, int64_t begin, int64_t end) { for (int64_t j = begin; j < end; j++) row[j] = -INFINITY; }

/* Hide the keys of other documents, and those that are padding. */
static void hide_other_ids(const AttentionParams *a, int64_t b, int64_t i, int64_t key, int64_t begin, int64_t end, float *row) {
    const int32_t *ids = a->k_ids + b * a->keys + key, own = a->q_ids[b * a->queries + i];
    for (int64_t j = begin; j < end; j++) row[j] = ids[j] == own ? row[j] : -INFINITY;
}

static void mask_leading(const AttentionParams *a, int64_t b, int64_t h, int64_t i, const KeyGroup *g, float *row) {
    const int64_t *stride = a->leading_bias_strides;
    if (a->leading_bias) {
        const float *bias = a->leading_bias + b * stride[0] + h * stride[1] + i * stride[2];
        for (int64_t j = 0; j < g->num_keys; j++) row[j] += bias[j * stride[3]];
    }
    hide(row, g->num_keys, round_up16(g->num_keys));
}

static void mask_random(const AttentionParams *a, int64_t b, int64_t i, const KeyGroup *g, float *row) {
    for (int64_t r = 0; a->k_ids && r < a->random_blocks; r++)
        hide_other_ids(a, b, i, g->numbers[r] * a->block, 0, a->block, row + r * a->block);
    hide(row, g->num_keys, round_up16(g->num_keys));
}

static void mask_banded(const AttentionParams *a, Tile t, int64_t i, const KeyGroup *g, float *row) {
    int64_t begin = visible_begin(a, i) - t.first_key, end = visible_end(a, i) - t.first_key;
    if (a->mask_type) {
        const int64_t *stride = a->mask_strides, at = t.b * stride[0] + t.h * stride[1] + i * stride[2] + t.first_key * stride[3];
        if (a->mask_type == MASK_BOOL) {
            const uint8_t *m = (const uint8_t *)a->mask + at;
            for (int64_t j = begin; j < end; j++) row[j] = m[j * stride[3]] ? row[j] : -INFINITY;
        } else {
            const float *m = (const float *)a->mask + at;
            for (int64_t j = begin; j < end; j++) row[j] += m[j * stride[3]];
        }
    }
    if (a->distance_bias) {
        const float *bias = a->distance_bias + t.h * band_width(a) + a->back + t.first_key - (i + a->first_query);
        for (int64_t j = begin; j < end; j++) row[j] += bias[j];
    }
    if (a->k_ids) hide_other_ids(a, t.b, i, t.first_key, begin, end, row);
    hide(row, 0, begin);
    hide(row, end, round_up16(g->num_keys));
}
