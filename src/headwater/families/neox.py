"""GPT-NeoX and Pythia: attention and feed-forward side by side, a quarter of each head turned."""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    FeedForward,
    LanguageHead,
    LayerNorm,
    Model,
    NoHead,
    Normal,
    ParallelBlock,
    Past,
    Rotary,
    Stack,
    Tokens,
    pre,
)
from headwater.families.family import act, family
from headwater.families.llama import rope_settings, rotary
from headwater.families.writer import Config, decoder_sizes, first, writer
from headwater.weights.names import table
from headwater.weights.settings import Settings

NAMES = table("""
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
HEADS = {"language": table("embed_out  head.out"), "states": table("embed_out  -")}


@family("gpt_neox", names=NAMES, heads=HEADS)
def gpt_neox(c: Settings, kind: str) -> Model:
    norm, vocab = LayerNorm(c.number("layer_norm_eps", default=1e-5)), c.size("vocab_size")
    attn = Attention(
        c.size("num_attention_heads"),
        bias="qkvo" if c.flag("attention_bias", default=True) else "",
        position=rotary(c, partial=0.25),
        sees=Past(),
        dropout=c.number("attention_dropout", default=0.0),
    )
    ffn = FeedForward(c.size("intermediate_size"), act(c, "hidden_act"))
    side_by_side = ParallelBlock if c.flag("use_parallel_residual", default=True) else Block
    block = side_by_side((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), c.number("hidden_dropout", default=0.0))
    stack = Stack(c.size("hidden_size"), Tokens(vocab), (block,) * c.layers("num_hidden_layers"), norm)
    ties = kind == "language" and c.flag("tie_word_embeddings", default=False)
    return Model(
        decoder=stack,
        head=LanguageHead(vocab) if kind == "language" else NoHead(),
        tied=(("head.out", "decoder.embed.tokens"),) if ties else (),
        init=(("*", Normal(c.number("initializer_range", default=0.02))),),
    )


@writer("gpt_neox", "GPTNeoX")
def gpt_neox_config(spec: Model) -> Config | None:
    s = decoder_sizes(spec)
    if s is None:
        return None
    position, rope = s.attn.position, rope_settings(s.attn.position)
    if isinstance(position, Rotary):
        rope["rope_parameters"]["partial_rotary_factor"] = position.share
    return {
        "vocab_size": s.embed.vocab,
        "hidden_size": s.d_model,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": s.ffn.d_ff,
        "hidden_act": s.activation,
        "layer_norm_eps": s.norm.eps,
        "attention_bias": bool(s.attn.bias),
        "use_parallel_residual": first(spec.decoder, ParallelBlock) is not None,
        "attention_dropout": s.attn.dropout,
        "hidden_dropout": s.dropout,
        "tie_word_embeddings": bool(spec.tied),
        **rope,
    }
