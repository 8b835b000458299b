/* The layout of the training library: sizes and offsets of its structs, and the values of its constants. */

#include "layout.h"
#include "training.h"

const LayoutEntry *layout(void) {
    static const LayoutEntry entries[] = {
        CONSTANT(VECTOR_SIZE), CONSTANT(PANEL_COLUMNS), CONSTANT(K_BLOCK), CONSTANT(M_BLOCK), CONSTANT(ROW_BLOCK), CONSTANT(PARTITIONS),
        CONSTANT(ROW_BLOCKS), CONSTANT(BLOCK_SIZE), CONSTANT(DROPPED_BITS),
        CONSTANT(NONE), CONSTANT(RELU), CONSTANT(GELU), CONSTANT(GELU_TANH), CONSTANT(QUICK_GELU), CONSTANT(SILU),
        CONSTANT(MASK_NONE), CONSTANT(MASK_BOOL), CONSTANT(MASK_FLOAT),
        STRUCT(DropoutKey), FIELD(DropoutKey, first), FIELD(DropoutKey, second), FIELD(DropoutKey, threshold), FIELD(DropoutKey, scale),
        STRUCT(Strides), FIELD(Strides, batch), FIELD(Strides, head), FIELD(Strides, position),
        STRUCT(AttentionParams), FIELD(AttentionParams, batch), FIELD(AttentionParams, heads), FIELD(AttentionParams, kv_heads),
        FIELD(AttentionParams, queries), FIELD(AttentionParams, keys), FIELD(AttentionParams, head_dim), FIELD(AttentionParams, back),
        FIELD(AttentionParams, ahead), FIELD(AttentionParams, block), FIELD(AttentionParams, first_query), FIELD(AttentionParams, leading_keys),
        FIELD(AttentionParams, random_blocks), FIELD(AttentionParams, scale), FIELD(AttentionParams, causal), FIELD(AttentionParams, mask_type),
        FIELD(AttentionParams, mask), FIELD(AttentionParams, mask_strides), FIELD(AttentionParams, q_ids), FIELD(AttentionParams, k_ids),
        FIELD(AttentionParams, leading_bias), FIELD(AttentionParams, leading_bias_strides), FIELD(AttentionParams, distance_bias),
        FIELD(AttentionParams, block_numbers), FIELD(AttentionParams, dropout),
        STRUCT(LinearAttentionParams), FIELD(LinearAttentionParams, batch), FIELD(LinearAttentionParams, heads),
        FIELD(LinearAttentionParams, kv_heads), FIELD(LinearAttentionParams, length), FIELD(LinearAttentionParams, key_dim),
        FIELD(LinearAttentionParams, value_dim), FIELD(LinearAttentionParams, eps), FIELD(LinearAttentionParams, keep),
        FIELD(LinearAttentionParams, document_ids),
        STRUCT(FavorParams), FIELD(FavorParams, batch), FIELD(FavorParams, heads), FIELD(FavorParams, kv_heads),
        FIELD(FavorParams, queries), FIELD(FavorParams, keys), FIELD(FavorParams, key_dim), FIELD(FavorParams, value_dim),
        FIELD(FavorParams, features), FIELD(FavorParams, root), FIELD(FavorParams, eps), FIELD(FavorParams, causal),
        FIELD(FavorParams, keep),
        STRUCT(LSHParams), FIELD(LSHParams, batch), FIELD(LSHParams, heads), FIELD(LSHParams, length), FIELD(LSHParams, head_dim),
        FIELD(LSHParams, chunk), FIELD(LSHParams, before), FIELD(LSHParams, after), FIELD(LSHParams, rounds), FIELD(LSHParams, scale),
        FIELD(LSHParams, itself), FIELD(LSHParams, eps), FIELD(LSHParams, causal), FIELD(LSHParams, order), FIELD(LSHParams, keep),
        FIELD(LSHParams, dropout),
        STRUCT(AdamWParams), FIELD(AdamWParams, lr), FIELD(AdamWParams, weight_decay), FIELD(AdamWParams, beta1), FIELD(AdamWParams, beta2),
        FIELD(AdamWParams, eps), FIELD(AdamWParams, inv_bias_correction1), FIELD(AdamWParams, inv_bias_correction2),
        FIELD(AdamWParams, first), FIELD(AdamWParams, second),
        END_OF_LAYOUT,
    };
    return entries;
}
