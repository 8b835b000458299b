"""GPT-NeoX and Pythia: decoders with parallel attention and feed-forward layers, and RoPE on a quarter of each head."""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    Causal,
    Embeddings,
    FeedForward,
    LayerNorm,
    LMHead,
    Model,
    NoHead,
    Normal,
    Rotary,
    Stack,
    pre,
)
from headwater.families.config_writers import ConfigDict, decoder_sizes, find_part, register_config_writer
from headwater.families.llama import rope_config, rotary_spec
from headwater.families.registry import read_activation, register_family
from headwater.variants.parallel_block import ParallelBlock
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

BODY_NAMES = name_map("""
    [gpt_neox.]embed_in                                 decoder.embed.tokens
    [gpt_neox.]layers.{i}.input_layernorm               decoder.layers.{i}.self_attn_norm
    [gpt_neox.]layers.{i}.post_attention_layernorm      decoder.layers.{i}.ffn_norm
    [gpt_neox.]layers.{i}.attention.query_key_value     decoder.layers.{i}.self_attn.{q,k,v}  : split by heads
    [gpt_neox.]layers.{i}.attention.dense               decoder.layers.{i}.self_attn.out
    [gpt_neox.]layers.{i}.mlp.dense_h_to_4h             decoder.layers.{i}.ffn.up
    [gpt_neox.]layers.{i}.mlp.dense_4h_to_h             decoder.layers.{i}.ffn.down
    [gpt_neox.]final_layer_norm                         decoder.final_norm
    [gpt_neox.]layers.{i}.attention.bias                -
    [gpt_neox.]layers.{i}.attention.masked_bias         -
    [gpt_neox.]layers.{i}.attention.rotary_emb.inv_freq -
""")
HEAD_NAMES = {"language": name_map("embed_out  head.out"), "hidden_states": name_map("embed_out  -")}


@register_family("gpt_neox", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_gpt_neox_spec(config: HFConfig, head_type: str) -> Model:
    """A decoder of parallel blocks, or of sequential ones where use_parallel_residual is false."""
    norm = LayerNorm(config.get_float("layer_norm_eps", default=1e-5))
    vocab = config.get_int("vocab_size")
    attn = Attention(
        config.get_int("num_attention_heads"),
        bias="qkvo" if config.get_bool("attention_bias", default=True) else "",
        position=rotary_spec(config, partial_rotary_factor=0.25),
        mask=Causal(),
        dropout=config.get_float("attention_dropout", default=0.0),
    )
    ffn = FeedForward(config.get_int("intermediate_size"), read_activation(config, "hidden_act"))
    block_type = ParallelBlock if config.get_bool("use_parallel_residual", default=True) else Block
    dropout = config.get_float("hidden_dropout", default=0.0)
    block = block_type((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), dropout)
    stack = Stack(
        config.get_int("hidden_size"), Embeddings(vocab), (block,) * config.get_num_layers("num_hidden_layers"), norm
    )
    tied = head_type == "language" and config.get_bool("tie_word_embeddings", default=False)
    return Model(
        decoder=stack,
        head=LMHead(vocab) if head_type == "language" else NoHead(),
        tied=(("head.out", "decoder.embed.tokens"),) if tied else (),
        init=(("*", Normal(config.get_float("initializer_range", default=0.02))),),
    )


@register_config_writer("gpt_neox", "GPTNeoX")
def gpt_neox_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_gpt_neox_spec()."""
    sizes = decoder_sizes(spec)
    if sizes is None:
        return None
    position = sizes.attn.position
    rope = rope_config(position)
    if isinstance(position, Rotary):
        rope["rope_parameters"]["partial_rotary_factor"] = position.partial_factor
    return {
        "vocab_size": sizes.embed.vocab,
        "hidden_size": sizes.d_model,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "intermediate_size": sizes.ffn.d_ff,
        "hidden_act": sizes.activation,
        "layer_norm_eps": sizes.norm.eps,
        "attention_bias": bool(sizes.attn.bias),
        "use_parallel_residual": find_part(spec.decoder, ParallelBlock) is not None,
        "attention_dropout": sizes.attn.dropout,
        "hidden_dropout": sizes.dropout,
        "tie_word_embeddings": bool(spec.tied),
        **rope,
    }
