"""MusicGen (Copet et al. 2023): a T5 encoder reads a text, a decoder writes the codes of all codebooks step by step.

musicgen_decoder   codes [B, Q, K], codebook k delayed by k steps ── K tables summed ── layers ── K heads
musicgen           with a T5 encoder, and a linear layer where the widths differ; its EnCodec: load_nested_codec
"""

from __future__ import annotations

from headwater.codecs.encodec_files import encodec_names
from headwater.core import (
    Attention,
    Block,
    Causal,
    CrossAttention,
    FeedForward,
    LayerNorm,
    Model,
    NoBridge,
    Normal,
    Stack,
    pre,
)
from headwater.families.registry import read_activation, register_family
from headwater.families.t5 import read_t5_spec, stack_names
from headwater.variants.codes import CodeHeads, Codes
from headwater.variants.cosine_positions import CosineSinusoidal
from headwater.variants.linear_bridge import LinearBridge
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map


def decoder_names(prefix: str = "") -> str:
    """The rules of the decoder without its heads. prefix: that of its names in the checkpoint."""
    text = f"""
    {prefix}model.decoder.embed_tokens.{{k}}                decoder.embed.tables.{{k}}
    {prefix}model.decoder.embed_positions.weights          -
    {prefix}model.decoder.layers.{{i}}.fc1                  decoder.layers.{{i}}.ffn.up
    {prefix}model.decoder.layers.{{i}}.fc2                  decoder.layers.{{i}}.ffn.down
    {prefix}model.decoder.layers.{{i}}.final_layer_norm     decoder.layers.{{i}}.ffn_norm
    {prefix}model.decoder.layer_norm                       decoder.final_norm
    """
    for ours, theirs in (("self_attn", "self_attn"), ("cross_attn", "encoder_attn")):
        layer = f"{prefix}model.decoder.layers.{{i}}.{theirs}"
        text += f"""
        {layer}_layer_norm   decoder.layers.{{i}}.{ours}_norm
        {layer}.q_proj       decoder.layers.{{i}}.{ours}.q
        {layer}.k_proj       decoder.layers.{{i}}.{ours}.k
        {layer}.v_proj       decoder.layers.{{i}}.{ours}.v
        {layer}.out_proj     decoder.layers.{{i}}.{ours}.out
        """
    return text


def whole_names() -> str:
    """The rules of MusicGen with its T5 encoder. The codec has its own (codecs/encodec.py)."""
    encoder = "\n".join(
        f"text_encoder.{line.strip()}" for line in stack_names("encoder", 1).splitlines() if line.strip()
    )
    codec = "\n".join(f"audio_encoder.{name}  -" for name in encodec_names())
    return f"""
    text_encoder.shared    encoder.embed.tokens
    {encoder}
    enc_to_dec_proj        bridge.projection
    {decoder_names("decoder.")}
    decoder.lm_heads.{{k}}   head.books.{{k}}
    {codec}
    """


HEADS = {"language": name_map("lm_heads.{k}  head.books.{k}")}


@register_family("musicgen_decoder", body_names=name_map(decoder_names()), head_names=HEADS)
def read_decoder_spec(config: HFConfig, head_type: str) -> Model:
    """The decoder alone: model.decode(codes, memory=…). No linear layer has a bias."""
    d_model = config.get_int("hidden_size", default=1024)
    vocab = config.get_int("vocab_size", default=2048)
    books = config.get_int("num_codebooks", default=4)
    heads = config.get_int("num_attention_heads", default=16)
    dropout = config.get_float("dropout", default=0.1)
    attention_dropout = config.get_float("attention_dropout", default=0.0)
    config.get_int("audio_channels", maximum=2, default=1)  # how the codebooks are delayed (audiolm/delay.py)
    config.ignore("max_position_embeddings", "cross_attention_hidden_size", "add_cross_attention", "is_decoder")
    config.get_bool("scale_embedding", default=False)  # transformers never applies it
    norm = LayerNorm()
    ffn = FeedForward(
        config.get_int("ffn_dim", default=4096),
        read_activation(config, "activation_function"),
        bias=False,
        dropout=config.get_float("activation_dropout", default=0.0),
    )
    block = Block(
        (
            pre(norm, self_attn=Attention(heads, bias="", mask=Causal(), dropout=attention_dropout)),
            pre(norm, cross_attn=CrossAttention(heads, bias="", dropout=attention_dropout)),
            pre(norm, ffn=ffn),
        ),
        dropout,
    )
    embed = Codes(books, vocab + 1, CosineSinusoidal(), dropout)  # the id after the codes is that of no code
    layers = (block,) * config.get_num_layers("num_hidden_layers", default=24)
    std = config.get_float("initializer_factor", default=0.02)
    stack = Stack(d_model, embed, layers, norm)
    return Model(decoder=stack, head=CodeHeads(books, vocab), init=(("*", Normal(std)),))


@register_family("musicgen", body_names=name_map(whole_names()), head_names={"language": name_map("")})
def read_musicgen_spec(config: HFConfig, head_type: str) -> Model:
    """The encoder of a T5, and the decoder."""
    text = config.section("text_encoder")
    config.ignore("audio_encoder")
    sections = (text, config.section("decoder"))
    for section in sections:
        section.ignore("model_type")
    encoder = read_t5_spec(text, "hidden_states").encoder
    decoder = read_decoder_spec(sections[1], head_type)
    assert encoder is not None and decoder.decoder is not None
    widths = (encoder.d_model, decoder.decoder.d_model)
    return Model(
        encoder=encoder,
        bridge=NoBridge() if widths[0] == widths[1] else LinearBridge(*widths),
        decoder=decoder.decoder,
        head=decoder.head,
        init=decoder.init,
    )
