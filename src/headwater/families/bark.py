"""Bark's causal models, the released shape of AudioLM: text to semantic tokens, and semantic to coarse sound tokens.

semantic          text + 10,048                   -> tokens of what is said, 50 a second
coarse_acoustics  semantic tokens, then the first two EnCodec codebooks frame by frame, each with an offset
"""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    Causal,
    Embeddings,
    FeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    Normal,
    Stack,
    pre,
)
from headwater.families.registry import register_family
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

BODY_NAMES = name_map("""
    input_embeds_layer               decoder.embed.tokens
    position_embeds_layer            decoder.embed.position.table
    layers.{i}.layernorm_1           decoder.layers.{i}.self_attn_norm
    layers.{i}.attn.att_proj         decoder.layers.{i}.self_attn.{q,k,v}  : split
    layers.{i}.attn.out_proj         decoder.layers.{i}.self_attn.out
    layers.{i}.attn.bias             -
    layers.{i}.layernorm_2           decoder.layers.{i}.ffn_norm
    layers.{i}.mlp.in_proj           decoder.layers.{i}.ffn.up
    layers.{i}.mlp.out_proj          decoder.layers.{i}.ffn.down
    layernorm_final                  decoder.final_norm
""")
HEAD_NAMES = {"language": name_map("lm_head  head.out")}  # the published classes always have one


@register_family("semantic", "coarse_acoustics", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_bark_spec(config: HFConfig, head_type: str) -> Model:
    """Without biases the norms have none either. The output vocabulary may be smaller than that of the input."""
    has_bias = config.get_bool("bias", default=True)
    d_model = config.get_int("hidden_size", default=768)
    dropout = config.get_float("dropout", default=0.0)
    norm = LayerNorm(bias=has_bias)
    attn = Attention(
        config.get_int("num_heads", "num_attention_heads", default=12),
        bias="qkvo" if has_bias else "",
        mask=Causal(),
        dropout=dropout,
    )
    ffn = FeedForward(4 * d_model, "gelu", bias=has_bias)
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), dropout)
    vocab = config.get_int("input_vocab_size", "vocab_size", default=10_048)
    embed = Embeddings(vocab, Learned(config.get_int("block_size", "window_size", default=1024)), dropout=dropout)
    layers = (block,) * config.get_num_layers("num_layers", "num_hidden_layers", default=12)
    head = LMHead(config.get_int("output_vocab_size", default=10_048))
    std = config.get_float("initializer_range", default=0.02)
    return Model(decoder=Stack(d_model, embed, layers, norm), head=head, init=(("*", Normal(std)),))
