"""Bark, the released shape of AudioLM: text to semantic tokens, to coarse sound tokens, to fine ones.

semantic          text + 10,048                   -> tokens of what is said, 50 a second
coarse_acoustics  semantic tokens, then the first two EnCodec codebooks frame by frame, each with an offset
fine_acoustics    codebooks 0 … k of all frames   -> codebook k, not causal
bark              all three in one folder, with EnCodec (variants/audiolm.py)
"""

from __future__ import annotations

from dataclasses import replace

from headwater.codecs.encodec_files import encodec_names
from headwater.core import (
    Attention,
    Bidirectional,
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
from headwater.core.base import EmbeddingSpec, NormSpec
from headwater.core.masks import MaskRule
from headwater.families.registry import register_family
from headwater.parts import swap
from headwater.variants.audiolm import AudioLM, AudioTokens
from headwater.variants.codes import Codes, LastCodeHead, SummedPairs
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map


def layer_names(file: str, ours: str) -> str:
    """The rules of a stack. file: its prefix in the checkpoint; ours: the path of the stack."""
    return f"""
    {file}position_embeds_layer            {ours}.embed.position.table
    {file}layers.{{i}}.layernorm_1           {ours}.layers.{{i}}.self_attn_norm
    {file}layers.{{i}}.attn.att_proj         {ours}.layers.{{i}}.self_attn.{{q,k,v}}  : split
    {file}layers.{{i}}.attn.out_proj         {ours}.layers.{{i}}.self_attn.out
    {file}layers.{{i}}.attn.bias             -
    {file}layers.{{i}}.layernorm_2           {ours}.layers.{{i}}.ffn_norm
    {file}layers.{{i}}.mlp.in_proj           {ours}.layers.{{i}}.ffn.up
    {file}layers.{{i}}.mlp.out_proj          {ours}.layers.{{i}}.ffn.down
    {file}layernorm_final                  {ours}.final_norm
    """


def causal_names(file: str = "", ours: str = "") -> str:
    """The rules of a causal model without its head."""
    return layer_names(file, f"{ours}decoder") + f"\n{file}input_embeds_layer  {ours}decoder.embed.tokens\n"


def fine_names(file: str = "", ours: str = "") -> str:
    """The rules of the fine model without its heads."""
    tables = f"\n{file}input_embeds_layers.{{k}}  {ours}encoder.embed.tables.{{k}}\n"
    return layer_names(file, f"{ours}encoder") + tables


def bark_names() -> str:
    """The rules of the three models. The codec has its own (codecs/encodec.py)."""
    rules = ""
    for stage in ("semantic", "coarse"):
        file = "semantic." if stage == "semantic" else "coarse_acoustics."
        rules += causal_names(file, f"{stage}.") + f"\n{file}lm_head  {stage}.head.out\n"
    rules += fine_names("fine_acoustics.", "fine.") + "\nfine_acoustics.lm_heads.{k}  fine.head.books.{k}\n"
    return rules + "\n".join(f"codec_model.{name}  -" for name in encodec_names())


CAUSAL_HEAD = {"language": name_map("lm_head  head.out")}  # the published classes always have one
FINE_HEAD = {"language": name_map("lm_heads.{k}  head.books.{k}")}


@register_family("semantic", "coarse_acoustics", body_names=name_map(causal_names()), head_names=CAUSAL_HEAD)
def read_causal_spec(config: HFConfig, head_type: str) -> Model:
    """Without biases the norms have none either. The output vocabulary may be smaller than that of the input."""
    has_bias = config.get_bool("bias", default=True)
    vocab = config.get_int("input_vocab_size", "vocab_size", default=10_048)
    embed = Embeddings(vocab, _positions(config), dropout=config.get_float("dropout", default=0.0))
    stack = _read_stack(config, embed, LayerNorm(bias=has_bias), Causal(), has_bias)
    head = LMHead(config.get_int("output_vocab_size", default=10_048))
    return Model(decoder=stack, head=head, init=_init(config))


@register_family("fine_acoustics", body_names=name_map(fine_names()), head_names=FINE_HEAD)
def read_fine_spec(config: HFConfig, head_type: str) -> Model:
    """The norms always have biases. The head of codebook k shares the table of codebook k."""
    has_bias = config.get_bool("bias", default=True)
    vocab = config.get_int("input_vocab_size", "vocab_size", default=10_048)
    books = config.get_int("n_codes_total", default=8)
    num_given = config.get_int("n_codes_given", default=1)
    embed = Codes(books, vocab, _positions(config), config.get_float("dropout", default=0.0))
    stack = _read_stack(config, embed, LayerNorm(), Bidirectional(), has_bias)
    head = LastCodeHead(books, config.get_int("output_vocab_size", default=10_048), num_given)
    tied = tuple(
        (f"head.books.{k - num_given}", f"encoder.embed.tables.{k - num_given + 1}") for k in range(num_given, books)
    )
    return Model(encoder=stack, head=head, tied=tied, init=_init(config))


@register_family("bark", body_names=name_map(bark_names()), head_names={"language": name_map("")})
def read_bark_spec(config: HFConfig, head_type: str) -> AudioLM:
    """The three models of BarkModel; its codec is read by codecs.load_codec."""
    sections = [config.section(f"{name}_config") for name in ("semantic", "coarse_acoustics", "fine_acoustics")]
    for section in sections:
        section.ignore("model_type")
    config.ignore("codec_config")
    semantic = read_causal_spec(sections[0], head_type)
    semantic = swap(semantic, Embeddings, lambda e: SummedPairs(e.vocab, e.position, dropout=e.dropout))
    coarse = read_causal_spec(sections[1], head_type)
    fine = read_fine_spec(sections[2], head_type)
    return AudioLM(
        semantic=semantic,
        coarse=coarse,
        fine=replace(fine, tied=()),
        tokens=AudioTokens(),
        tied=tuple((f"fine.{head}", f"fine.{table}") for head, table in fine.tied),
    )


def _positions(config: HFConfig) -> Learned:
    return Learned(config.get_int("block_size", "window_size", default=1024))


def _read_stack(config: HFConfig, embed: EmbeddingSpec, norm: NormSpec, mask: MaskRule, has_bias: bool) -> Stack:
    """The layers that the three models have in common."""
    d_model = config.get_int("hidden_size", default=768)
    dropout = config.get_float("dropout", default=0.0)
    heads = config.get_int("num_heads", "num_attention_heads", default=12)
    attn = Attention(heads, bias="qkvo" if has_bias else "", mask=mask, dropout=dropout)
    ffn = FeedForward(4 * d_model, "gelu", bias=has_bias)
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), dropout)
    num_layers = config.get_num_layers("num_layers", "num_hidden_layers", default=12)
    return Stack(d_model, embed, (block,) * num_layers, norm)


def _init(config: HFConfig) -> tuple[tuple[str, Normal], ...]:
    return (("*", Normal(config.get_float("initializer_range", default=0.02))),)
