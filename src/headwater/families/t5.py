"""T5 (1.0, 1.1, Flan) and mT5: pre-norm, no biases, distance buckets shared by all layers, scores not scaled."""

from __future__ import annotations

from typing import Any

from headwater.core import (
    Attention,
    Block,
    CrossAttention,
    FeedForward,
    GatedFeedForward,
    LanguageHead,
    Model,
    NoHead,
    Normal,
    Past,
    RelativeBias,
    RMSNorm,
    Stack,
    Tokens,
    pre,
)
from headwater.families.family import ACTIVATIONS, family
from headwater.families.writer import Config, first, sizes_of, writer
from headwater.weights.names import table
from headwater.weights.settings import Settings


def _side(side: str, ffn: int) -> str:
    block, ours = f"{side}.block.{{i}}.layer", f"{side}.layers.{{i}}"
    return f"""
    {side}.embed_tokens                                           {side}.embed.tokens
    {block}.0.layer_norm                                          {ours}.self_attn_norm
    {block}.0.SelfAttention.q                                     {ours}.self_attn.q
    {block}.0.SelfAttention.k                                     {ours}.self_attn.k
    {block}.0.SelfAttention.v                                     {ours}.self_attn.v
    {block}.0.SelfAttention.o                                     {ours}.self_attn.out
    {side}.block.0.layer.0.SelfAttention.relative_attention_bias  {side}.positions.0.table
    {block}.{ffn}.layer_norm                                      {ours}.ffn_norm
    {block}.{ffn}.DenseReluDense.wi                               {ours}.ffn.up  : unless {ours}.ffn.gate
    {block}.{ffn}.DenseReluDense.wi_0                             {ours}.ffn.gate
    {block}.{ffn}.DenseReluDense.wi_1                             {ours}.ffn.up
    {block}.{ffn}.DenseReluDense.wo                               {ours}.ffn.down
    {side}.final_layer_norm                                       {side}.final_norm
"""


CROSS = """
    shared                                                            encoder.embed.tokens : unless decoder.embed.tokens
    decoder.block.{i}.layer.1.layer_norm                               decoder.layers.{i}.cross_attn_norm
    decoder.block.{i}.layer.1.EncDecAttention.q                        decoder.layers.{i}.cross_attn.q
    decoder.block.{i}.layer.1.EncDecAttention.k                        decoder.layers.{i}.cross_attn.k
    decoder.block.{i}.layer.1.EncDecAttention.v                        decoder.layers.{i}.cross_attn.v
    decoder.block.{i}.layer.1.EncDecAttention.o                        decoder.layers.{i}.cross_attn.out
    decoder.block.0.layer.1.EncDecAttention.relative_attention_bias    -
"""
NAMES = table(CROSS + _side("encoder", 1) + _side("decoder", 2))
HEADS = {"language": table("lm_head  head.out"), "states": table("lm_head  -")}


@family("t5", names=NAMES, heads=HEADS)
def t5(c: Settings, kind: str) -> Model:
    """Files of T5 1.0 tie the output to the token table and scale the last states; later ones do neither."""
    ties = c.flag("tie_word_embeddings", default=True)
    return _pair(c, kind, ties, scaled=c.flag("scale_decoder_outputs", default=ties), ffn_default="relu")


@family("mt5", names=NAMES, heads=HEADS)
def mt5(c: Settings, kind: str) -> Model:
    return _pair(c, kind, c.flag("tie_word_embeddings", default=False), scaled=False, ffn_default="gated-gelu")


def _pair(c: Settings, kind: str, ties: bool, scaled: bool, ffn_default: str) -> Model:
    norm, d_model, dropout = RMSNorm(c.number("layer_norm_epsilon", default=1e-6)), c.size("d_model"), _dropout(c)
    layers, vocab = c.layers("num_layers"), c.size("vocab_size")
    shape: dict[str, Any] = {
        "heads": c.size("num_heads"),
        "head_dim": c.size("d_kv"),
        "scale": 1.0,
        "dropout": dropout,
    }
    buckets = c.size("relative_attention_num_buckets", default=32)
    reach = c.size("relative_attention_max_distance", default=128)
    ffn = pre(norm, ffn=_ffn(c, ffn_default))
    reads = pre(norm, self_attn=Attention(**shape, position=RelativeBias(buckets, reach)))
    writes = pre(norm, self_attn=Attention(**shape, position=RelativeBias(buckets, reach, two_way=False), sees=Past()))
    looks = pre(norm, cross_attn=CrossAttention(**shape))
    embed = Tokens(vocab, dropout=dropout)

    def stack(branches: tuple[Any, ...], depth: int) -> Stack:
        return Stack(d_model, embed, (Block(branches, dropout),) * depth, norm, dropout=dropout)

    shared = (("decoder.embed.tokens", "encoder.embed.tokens"),)
    head = LanguageHead(vocab, scale=d_model**-0.5 if scaled else 1.0) if kind == "language" else NoHead()
    return Model(
        encoder=stack((reads, ffn), layers),
        decoder=stack((writes, looks, ffn), c.layers("num_decoder_layers", default=layers)),
        head=head,
        tied=(*shared, ("head.out", "encoder.embed.tokens")) if ties and kind == "language" else shared,
        init=_init(c, d_model, shape["heads"] * shape["head_dim"], shape["head_dim"]),
    )


def _ffn(c: Settings, default: str) -> Any:
    """relu, or gated-gelu (which means the tanh form), or gated-<any>."""
    name, d_ff, dropout = c.word("feed_forward_proj", default=default), c.size("d_ff"), _dropout(c)
    c.read_by_now("dense_act_fn", "is_gated_act")
    gated, plain = name.startswith("gated-"), name.removeprefix("gated-")
    plain = "gelu_new" if name == "gated-gelu" else plain
    inner = Settings({"feed_forward_proj": plain}, c.where).word("feed_forward_proj", known=ACTIVATIONS)
    kind = GatedFeedForward if gated else FeedForward
    return kind(d_ff, ACTIVATIONS[inner], bias=False, dropout=dropout)


def _dropout(c: Settings) -> float:
    return c.number("dropout_rate", default=0.1)


def _init(c: Settings, d_model: int, inner: int, d_kv: int) -> tuple[tuple[str, Normal], ...]:
    """The scores are not scaled, so the scale is in the first queries."""
    f, d_ff = c.number("initializer_factor", default=1.0), c.size("d_ff")
    return (
        ("*.embed.tokens.weight", Normal(f)),
        ("*_attn.q.weight", Normal(f * (d_model * d_kv) ** -0.5)),
        ("*_attn.out.weight", Normal(f * inner**-0.5)),
        ("*.ffn.down.weight", Normal(f * d_ff**-0.5)),
        ("*", Normal(f * d_model**-0.5)),
    )


# ------------------------------------------------------------------------------------------------ config.json of a spec


def settings(spec: Model) -> Config | None:
    """The inverse of _pair()."""
    s, decoder = sizes_of(spec.encoder), sizes_of(spec.decoder)
    if s is None or decoder is None:
        return None
    buckets = first(spec.encoder, RelativeBias) or RelativeBias()
    named = "gelu" if s.ffn.activation == "gelu_tanh" else s.activation  # `gated-gelu` means the tanh form
    return {
        "vocab_size": s.embed.vocab,
        "d_model": s.d_model,
        "d_kv": s.head_dim,
        "d_ff": s.ffn.d_ff,
        "num_layers": s.layers,
        "num_decoder_layers": decoder.layers,
        "num_heads": s.heads,
        "feed_forward_proj": f"gated-{named}" if isinstance(s.ffn, GatedFeedForward) else s.activation,
        "relative_attention_num_buckets": buckets.buckets,
        "relative_attention_max_distance": buckets.reach,
        "layer_norm_epsilon": s.norm.eps,
        "dropout_rate": s.dropout,
        "tie_word_embeddings": any(path == "head.out" for path, _ in spec.tied),
        "is_encoder_decoder": True,
    }


@writer("t5", "T5", language="ForConditionalGeneration")
def t5_config(spec: Model) -> Config | None:
    return settings(spec)


@writer("mt5", "MT5", language="ForConditionalGeneration")
def mt5_config(spec: Model) -> Config | None:
    return settings(spec)
