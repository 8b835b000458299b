/* Structs and constants that the training kernels share with Python. training_layout.c exports all of them. */

#include <stdint.h>

/* ---------------------------------------------------------------------------------------------------- block sizes */

#define VECTOR_SIZE 8                                                  /* floats of a vector */
#define PANEL_COLUMNS 16                                               /* columns of a packed panel; rows of attention weights are padded to it */
#define K_BLOCK 512                                                    /* linear.c: rows of W in a panel */
#define M_BLOCK 256                                                    /* linear_grad_weight.c: rows summed in registers */
#define ROW_BLOCK 96                                                   /* rows that pass a panel, at most: they stay in the L2 cache */
#define PARTITIONS 4                                                   /* the number of partitions of rows is a multiple of it */
#define ROW_BLOCKS 8                                                   /* norm.c: blocks of rows with partial sums of their own */
#define BLOCK_SIZE 256                                                 /* adamw8bit.c: moments that share an exponent */
#define DROPPED_BITS 20                                                /* adamw8bit.c: low bits of a float32 that are not stored */

/* ---------------------------------------------------------------------------------------------------------- codes */

enum { NONE, RELU, GELU, GELU_TANH, QUICK_GELU, SILU };                /* activations */
enum { MASK_NONE, MASK_BOOL, MASK_FLOAT };                             /* attention masks: True = visible, or a float that is added */

/* -------------------------------------------------------------------------------------------------------- structs */

typedef struct { uint32_t first, second, threshold; float scale; } DropoutKey;  /* kept numbers are multiplied by scale; threshold 0: no dropout */

typedef struct { int64_t batch, head, position; } Strides;             /* of [B, H, S, D], where D is contiguous */
typedef struct {
    int64_t batch, heads, kv_heads, queries, keys, head_dim;
    int64_t back, ahead, block, first_query;                           /* a query sees the keys of its own block, of `back` before and `ahead` after it */
    int64_t leading_keys, random_blocks;                               /* keys that every query sees; further blocks of a block of queries */
    float scale;
    int32_t causal, mask_type;
    const void *mask;                                                  /* of the banded keys, with strides over B, H, Q, S */
    int64_t mask_strides[4];
    const int32_t *q_ids, *k_ids;                                      /* [B, Q], [B, S]: a query sees the keys of its own id; or NULL */
    const float *leading_bias;                                         /* added to the scores of leading keys, strides over B, H, Q, L; or NULL */
    int64_t leading_bias_strides[4];
    const float *distance_bias;                                        /* [H, back + 1 + ahead] added at key - query = -back …; or NULL */
    const int32_t *block_numbers;                                      /* [H, Q / block, random_blocks] */
    DropoutKey dropout;
} AttentionParams;

typedef struct {
    int64_t batch, heads, kv_heads, length, key_dim, value_dim;
    float eps;                                                         /* added to the denominators */
    const uint8_t *keep;                                               /* [B, L] 0 = padding, or NULL */
    const int32_t *document_ids;                                       /* [B, L] each document begins with empty sums; or NULL */
} LinearAttentionParams;

typedef struct {
    int64_t batch, heads, kv_heads, queries, keys, key_dim, value_dim, features;
    float root, eps;                                                   /* root multiplies queries and keys; eps is added to each feature */
    int32_t causal;
    const uint8_t *keep;                                               /* [B, S] 0 = padding, or NULL */
} FavorParams;

typedef struct {
    int64_t batch, heads, length, head_dim;
    int64_t chunk, before, after, rounds;                              /* a chunk of sorted tokens sees itself, and those before and after it in a ring */
    float scale, itself, eps;                                          /* itself: the score of the own key; eps: of the norm of keys */
    int32_t causal;
    const int32_t *order;                                              /* [B, H, rounds · L] the positions in the order of their buckets */
    const uint8_t *keep;                                               /* [B, L] 0 = padding, or NULL */
    DropoutKey dropout;
} LSHParams;

typedef struct {                                                       /* inv_bias_correction: 1 / (1 - beta^step) */
    float lr, weight_decay, beta1, beta2, eps, inv_bias_correction1, inv_bias_correction2;
    uint32_t first, second;                                            /* the key of stochastic rounding */
} AdamWParams;
