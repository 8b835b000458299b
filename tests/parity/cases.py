"""Parity cases: for each family its config class, tiny sizes, unusual settings, and one model class per head."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import transformers as T

VOCAB = 53
WIDE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
ENCODER = {**WIDE, "max_position_embeddings": 40}
DECODER = {**WIDE, "max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0}
PAIR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "vocab_size": VOCAB, "max_position_embeddings": 40, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": VOCAB,
    "decoder_start_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Case:
    family: str
    model: str
    config: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def id(self) -> str:
        return f"{self.model}-{self.number}"

    number: int = 0

    def build(self) -> Any:
        config = getattr(T, self.config)(**dict(self.settings))
        return getattr(T, self.model)(config)


def cases(family: str, config: str, models: str, base: dict[str, Any], *odd: dict[str, Any]) -> list[Case]:
    """Every model class with the base settings and each variation. Question answering ignores num_labels."""
    return [
        Case(family, model, config, tuple({**base, **_without_labels(change, model)}.items()), number)
        for model, (number, change) in itertools.product(models.split(), enumerate([{}, *odd]))
    ]


def _without_labels(change: dict[str, Any], model: str) -> dict[str, Any]:
    return {k: v for k, v in change.items() if k != "num_labels" or not model.endswith("QuestionAnswering")}


ENCODER_ODD = (
    {"type_vocab_size": 3, "layer_norm_eps": 1e-5},
    {"hidden_act": "relu", "num_attention_heads": 8},
    {"hidden_act": "gelu_new", "num_hidden_layers": 1},
    {"intermediate_size": 20, "num_attention_heads": 1, "num_labels": 5},
)
LLAMA_ODD = (
    {"head_dim": 12, "num_key_value_heads": 1, "tie_word_embeddings": True},
    {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3},
    {"rope_parameters": YARN, "num_key_value_heads": 4},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 8},
)

CASES = [
    *cases("bert", "BertConfig", "BertModel BertForMaskedLM BertForSequenceClassification BertForTokenClassification "
           "BertForQuestionAnswering BertForNextSentencePrediction BertForPreTraining", ENCODER, *ENCODER_ODD),
    *cases("roberta", "RobertaConfig", "RobertaModel RobertaForMaskedLM RobertaForSequenceClassification "
           "RobertaForTokenClassification RobertaForQuestionAnswering", {**ENCODER, "pad_token_id": 1}, *ENCODER_ODD),
    *cases("albert", "AlbertConfig", "AlbertModel AlbertForMaskedLM AlbertForSequenceClassification "
           "AlbertForTokenClassification AlbertForQuestionAnswering AlbertForPreTraining", {**ENCODER,
           "embedding_size": 16},
           {"num_hidden_groups": 2, "num_hidden_layers": 5}, {"embedding_size": 32}, *ENCODER_ODD[1:3]),
    *cases("distilbert", "DistilBertConfig",
           "DistilBertModel DistilBertForMaskedLM DistilBertForSequenceClassification "
           "DistilBertForTokenClassification DistilBertForQuestionAnswering",
           {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB,
           "max_position_embeddings": 40},
           {"activation": "relu"}, {"n_heads": 8}, {"sinusoidal_pos_embds": True}, {"n_layers": 1, "num_labels": 4}),
    *cases("gpt2", "GPT2Config", "GPT2Model GPT2LMHeadModel GPT2ForSequenceClassification GPT2ForTokenClassification "
           "GPT2ForQuestionAnswering",
           {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB, "pad_token_id": 0},
           {"n_inner": 20}, {"activation_function": "relu"}, {"n_head": 8, "layer_norm_epsilon": 1e-3},
           {"tie_word_embeddings": False, "n_layer": 1}),
    *cases("llama", "LlamaConfig", "LlamaModel LlamaForCausalLM LlamaForSequenceClassification", DECODER,
           {"attention_bias": True, "mlp_bias": True}, *LLAMA_ODD),
    *cases("mistral", "MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": 5}, {"sliding_window": None},
           *LLAMA_ODD[:3]),
    *cases("qwen2", "Qwen2Config", "Qwen2ForCausalLM", DECODER,
           {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, {"num_key_value_heads": 1},
           {"tie_word_embeddings": True}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    *cases("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 8}, *LLAMA_ODD[:2],
           {"attention_bias": True}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    *cases("gemma", "GemmaConfig", "GemmaForCausalLM", {**DECODER, "head_dim": 8}, {"head_dim": 16},
           {"num_key_value_heads": 1}, {"tie_word_embeddings": False}, {"hidden_act": "gelu"}),
    *cases("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM",
           {**WIDE, "max_position_embeddings": 64, "num_attention_heads": 2},
           {"use_parallel_residual": False}, {"attention_bias": False}, {"tie_word_embeddings": True},
           {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    *cases("mixtral", "MixtralConfig", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4},
           {"num_experts_per_tok": 1}, {"num_experts_per_tok": 4}, {"head_dim": 12}, {"sliding_window": 5}),
    *cases("t5", "T5Config", "T5Model T5ForConditionalGeneration", T5,
           {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {"d_kv": 6, "num_heads": 5},
           {"feed_forward_proj": "gated-silu"}, {"relative_attention_num_buckets": 8,
           "relative_attention_max_distance": 9}),
    *cases("mt5", "MT5Config", "MT5ForConditionalGeneration", T5, {"tie_word_embeddings": False}, {"num_heads": 2},
           {"feed_forward_proj": "gated-silu"}, {"num_decoder_layers": 1}),
    *cases("bart", "BartConfig", "BartModel BartForConditionalGeneration BartForSequenceClassification "
           "BartForQuestionAnswering", PAIR, {"scale_embedding": True}, {"activation_function": "relu"},
           {"encoder_attention_heads": 8}, {"decoder_layers": 1}),
    *cases("mbart", "MBartConfig", "MBartModel MBartForConditionalGeneration", PAIR, {"scale_embedding": True},
           {"activation_function": "relu"}, {"encoder_attention_heads": 8}, {"decoder_layers": 1}),
    *cases("marian", "MarianConfig", "MarianModel MarianMTModel", {**PAIR, "decoder_vocab_size": VOCAB},
           {"scale_embedding": True, "activation_function": "swish"}, {"encoder_attention_heads": 8},
           {"decoder_layers": 1},
           {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37}),
    *cases("pegasus", "PegasusConfig", "PegasusModel PegasusForConditionalGeneration", PAIR, {"scale_embedding": True},
           {"activation_function": "relu"}, {"encoder_attention_heads": 8}, {"decoder_layers": 1}),
    *cases("blenderbot", "BlenderbotConfig", "BlenderbotModel BlenderbotForConditionalGeneration", PAIR,
           {"scale_embedding": True}, {"activation_function": "relu"}, {"encoder_attention_heads": 8},
           {"decoder_layers": 1}),
    *cases("megatron-bert", "MegatronBertConfig", "MegatronBertModel MegatronBertForMaskedLM "
           "MegatronBertForSequenceClassification MegatronBertForTokenClassification MegatronBertForQuestionAnswering "
           "MegatronBertForNextSentencePrediction MegatronBertForPreTraining", ENCODER, *ENCODER_ODD),
]  # fmt: skip
