"""Keys of public config.json files that no family needs to read, and keys that no one may write.

A key nobody reads may change the maths, so it is refused by name (settings.py). These lists are the exceptions: what is
known not to matter, gathered from the files that transformers 2 to 5 wrote and from published model cards.
"""

from __future__ import annotations

from typing import Any

# They ask to run code that came with the weights, or to look it up elsewhere.
FORBIDDEN = frozenset(
    [
        "auto_map",
        "trust_remote_code",
        "custom_pipelines",
        "code_revision",
        "_attn_implementation_internal",
        "_experts_implementation_internal",
        "custom_generate",
        "custom_code",
    ]
)

_NOTES = """
    _name_or_path name_or_path architectures model_type transformers_version torch_dtype dtype torchscript
    _commit_hash finetuning_task task_specific_params prefix problem_type language languages license tags
    pipeline_tag tokenizer_class tokenizer_name processor_class feature_extractor_type _num_labels num_labels
    id2label label2id directionality _diffusers_version adapters keys_to_ignore_at_inference is_composition
    xla_device tf_legacy_loss use_bfloat16 transformers.js_config about
"""
_RUNNING = """
    use_cache output_past output_attentions output_hidden_states output_scores output_logits output_router_logits
    return_dict return_dict_in_generate gradient_checkpointing _attn_implementation_autoset attn_implementation
    _attn_implementation _flash_attn_2_enabled use_flash_attn pretraining_tp memory_efficient_attention
"""
_DECODING = """
    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p min_p repetition_penalty encoder_no_repeat_ngram_size
    no_repeat_ngram_size length_penalty bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id forced_decoder_ids force_bos_token_to_be_generated num_return_sequences
    remove_invalid_values exponential_decay_length_penalty renormalize_logits guidance_scale bos_token_id
    eos_token_id eos_token_ids pad_token_id decoder_start_token_id sep_token_id unk_token_id cls_token_id mask_token_id
    n_special
    predict_special_tokens
"""
_TRAINING = """
    initializer_range initializer_factor init_std initializer_cutoff_factor layerdrop encoder_layerdrop
    decoder_layerdrop attention_dropout attention_probs_dropout_prob hidden_dropout_prob hidden_dropout dropout
    dropout_rate activation_dropout activation_dropout_prob classifier_dropout classifier_dropout_prob
    classif_dropout seq_classif_dropout qa_dropout attn_pdrop embd_pdrop resid_pdrop embed_dropout
    summary_first_dropout router_aux_loss_coef router_jitter_noise apply_spec_augment mask_time_prob
    mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks
"""
_SHAPES_SAID_ELSEWHERE = """
    is_encoder_decoder tie_word_embeddings n_ctx total_flos net_structure_type num_memory_blocks down_scale_factor
    gap_size pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    add_bias_logits static_position_embeddings extra_pos_embeddings normalize_embedding classifier_dim
    classifier_proj_size median_filter_width summary_activation summary_proj_to_labels summary_type summary_use_proj
    is_gated_act dense_act_fn
"""
HARMLESS = frozenset(" ".join((_NOTES, _RUNNING, _DECODING, _TRAINING, _SHAPES_SAID_ELSEWHERE)).split())

# Harmless with these values alone: with another they would change the maths.
HARMLESS_WHEN: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "position_embedding_type": ("absolute", None),
    "normalize_before": (False, None),
    "add_final_layer_norm": (False, None),
    "use_weighted_layer_sum": (False, None),
    "sinusoidal_pos_embds": (False, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "reorder_and_upcast_attn": (False, None),
    "use_bidirectional_attention": (False, None),
}
