"""Parameter counts computed from published configs equal the published counts; no weight is allocated."""

from __future__ import annotations

import time

import pytest

from headwater.families import FAMILIES
from headwater.weights.hf_config import HFConfig

BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
BERT_LARGE = BERT | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
ROBERTA = BERT | {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
ALBERT = BERT | {"vocab_size": 30000, "embedding_size": 128}
DISTILBERT = {
    "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "max_position_embeddings": 512,
}  # fmt: skip
GPT2 = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = LLAMA | {"vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 14336, "rope_theta": 500000.0}
LLAMA32 = LLAMA3 | {
    "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA70 = LLAMA | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672,
}  # fmt: skip
MISTRAL = LLAMA | {"num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096}
MIXTRAL = MISTRAL | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2}
T5 = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
T5_BASE = T5 | {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
V11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MT5 = T5 | V11 | {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
BART = {
    "vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "max_position_embeddings": 1024,
}  # fmt: skip
BART_LARGE = BART | {
    "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
}  # fmt: skip

PUBLISHED = [
    ("bert", "pooler", BERT, 109_482_240),
    ("bert", "language", BERT, 109_514_298),
    ("bert", "pooler", BERT_LARGE, 335_141_888),
    ("roberta", "pooler", ROBERTA, 124_645_632),
    ("roberta", "language", ROBERTA, 124_697_433),
    ("albert", "pooler", ALBERT, 11_683_584),
    ("distilbert", "hidden_states", DISTILBERT, 66_362_880),
    ("gpt2", "language", GPT2, 124_439_808),
    ("gpt2", "language", GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16}, 354_823_168),
    ("llama", "language", LLAMA, 6_738_415_616),
    ("llama", "language", LLAMA3, 8_030_261_248),
    ("llama", "language", LLAMA32, 1_235_814_400),
    ("llama", "language", LLAMA70, 68_976_648_192),
    ("mistral", "language", MISTRAL, 7_241_732_096),
    ("mixtral", "language", MIXTRAL, 46_702_792_704),
    ("t5", "language", T5, 60_506_624),
    ("t5", "language", T5_BASE, 222_903_552),
    ("t5", "language", T5 | V11 | {"d_ff": 1024, "num_layers": 8, "num_heads": 6}, 76_961_152),
    ("t5", "language", T5_BASE | V11 | {"d_ff": 2048}, 247_577_856),
    ("mt5", "language", MT5, 300_176_768),
    ("bart", "hidden_states", BART, 139_420_416),
    ("bart", "hidden_states", BART_LARGE, 406_291_456),
    ("mbart", "hidden_states", BART_LARGE | {"vocab_size": 250027}, 610_851_840),
    ("mbart", "hidden_states", BART_LARGE | {"vocab_size": 250054}, 610_879_488),
]


@pytest.mark.parametrize(
    ("family", "head", "settings", "published"), PUBLISHED, ids=lambda v: v if type(v) in (str, int) else ""
)
def test_parameter_count_is_the_published_one(family: str, head: str, settings: dict, published: int):
    start = time.perf_counter()
    c = HFConfig(dict(settings))
    model = FAMILIES[family].read_spec(c, head).on_meta()
    c.refuse_unread()
    assert sum(p.numel() for p in model.parameters()) == published
    assert all(p.is_meta for p in model.parameters())
    assert time.perf_counter() - start < 5  # under a second on an idle machine
