"""BART, mBART, Marian (the 2017 Transformer as it was published), PEGASUS and Blenderbot: encoder-decoders with the
same names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.core import (
    Attention,
    Block,
    ClassHead,
    CrossAttention,
    FeedForward,
    LanguageHead,
    LastToken,
    LayerNorm,
    Learned,
    Model,
    NoHead,
    NoNorm,
    Normal,
    Past,
    Pool,
    SinusoidalHalves,
    Stack,
    TokenHead,
    Tokens,
    post,
    pre,
)
from headwater.families.family import act, family
from headwater.families.writer import Config, head_dropout, sizes_of, writer
from headwater.weights.names import Names, table
from headwater.weights.settings import Settings


def _attention(side: str, theirs: str, ours: str, place: str) -> str:
    return f"""
    [model.]{side}.layers.{{i}}.{theirs}.q_proj      {side}.layers.{{i}}.{ours}.q
    [model.]{side}.layers.{{i}}.{theirs}.k_proj      {side}.layers.{{i}}.{ours}.k
    [model.]{side}.layers.{{i}}.{theirs}.v_proj      {side}.layers.{{i}}.{ours}.v
    [model.]{side}.layers.{{i}}.{theirs}.out_proj    {side}.layers.{{i}}.{ours}.out
    [model.]{side}.layers.{{i}}.{theirs}_layer_norm  {side}.layers.{{i}}.{ours}_{place}
"""


def pair_names(place: str, more: str) -> Names:
    """place: where the norms stand, norm (pre) or post_norm."""
    text = "[model.]shared  encoder.embed.tokens : unless decoder.embed.tokens\n"
    for side in ("encoder", "decoder"):
        text += f"""
    [model.]{side}.embed_tokens                  {side}.embed.tokens
    [model.]{side}.layers.{{i}}.fc1              {side}.layers.{{i}}.ffn.up
    [model.]{side}.layers.{{i}}.fc2              {side}.layers.{{i}}.ffn.down
    [model.]{side}.layers.{{i}}.final_layer_norm {side}.layers.{{i}}.ffn_{place}
    [model.]{side}.version                       -
    """ + _attention(side, "self_attn", "self_attn", place)
        text += more.format(side=side)
    return table(text + _attention("decoder", "encoder_attn", "cross_attn", place))


TABLE = "[model.]{side}.embed_positions  {side}.embed.position.table\n"
EMBED_NORM = "[model.]{side}.layernorm_embedding  {side}.embed.norm\n"
FINAL_NORM = "[model.]{side}.layer_norm  {side}.final_norm\n"
NO_TABLE = "[model.]{side}.embed_positions  -\n"
NO_WORDS = table("lm_head  -\nfinal_logits_bias  -")
HEADS = {
    "language": table("lm_head  head.out\nfinal_logits_bias  head.out.bias : row"),
    "states": NO_WORDS,
    "class": NO_WORDS + table("classification_head.dense  head.pooled.dense\nclassification_head.out_proj  head.out"),
    "span": NO_WORDS + table("qa_outputs  head.out"),
}
NO_BIAS = ("head.out.bias",)
WORDS = {kind: HEADS[kind] for kind in ("language", "states")}


def pair(c: Settings, kind: str, place: Any, last: Any, position: Any, embed_norm: Any) -> Model:
    norm, d_model, dropout = LayerNorm(), c.size("d_model"), c.number("dropout", default=0.1)
    scale = d_model**0.5 if c.flag("scale_embedding", default=False) else 1.0
    vocab = c.size("vocab_size")
    target_vocab = c.size("decoder_vocab_size", default=vocab)

    def stack(side: str, size: int, sees: dict[str, Any], looks: bool) -> Stack:
        shape: dict[str, Any] = {
            "heads": c.size(f"{side}_attention_heads"),
            "bias": "qkvo",
            "dropout": c.number("attention_dropout", default=0.0),
        }
        ffn = FeedForward(
            c.size(f"{side}_ffn_dim"),
            act(c, "activation_function"),
            dropout=c.number("activation_dropout", default=0.0),
        )
        cross = (place(norm, cross_attn=CrossAttention(**shape)),) if looks else ()
        branches = (place(norm, self_attn=Attention(**shape, **sees)), *cross, place(norm, ffn=ffn))
        embed = Tokens(size, position, scale, norm=embed_norm, dropout=dropout)
        return Stack(
            d_model, embed, (Block(branches, dropout),) * c.layers(f"{side}_layers", "num_hidden_layers"), last
        )

    heads = {
        "language": lambda: LanguageHead(target_vocab, bias=True),
        "states": NoHead,
        "class": lambda: ClassHead(len(c.labels(3)), Pool(LastToken()), c.number("classifier_dropout", default=0.0)),
        "span": lambda: TokenHead(2),
    }
    shared = () if _two(c) else (("decoder.embed.tokens", "encoder.embed.tokens"),)
    return Model(
        encoder=stack("encoder", vocab, {}, looks=False),
        decoder=stack("decoder", target_vocab, {"sees": Past()}, looks=True),
        head=heads[kind](),
        tied=(*shared, ("head.out", "decoder.embed.tokens")) if kind == "language" else shared,
        init=(("*", Normal(c.number("init_std", default=0.02))),),
    )


def _two(c: Settings) -> bool:
    """Marian may have a table of its own for each language."""
    return not c.flag("share_encoder_decoder_embeddings", default=True)


def places(c: Settings) -> Learned:
    """The first two rows of the table are never used: it began as one with a padding id."""
    return Learned(c.size("max_position_embeddings") + 2, first=2)


@family("bart", names=pair_names("post_norm", TABLE + EMBED_NORM), heads=HEADS, optional=NO_BIAS)
def bart(c: Settings, kind: str) -> Model:
    return pair(c, kind, post, NoNorm(), places(c), LayerNorm())


@family("mbart", names=pair_names("norm", TABLE + EMBED_NORM + FINAL_NORM), heads=HEADS, optional=NO_BIAS)
def mbart(c: Settings, kind: str) -> Model:
    c.read_by_now("normalize_before", "add_final_layer_norm")
    return pair(c, kind, pre, LayerNorm(), places(c), LayerNorm())


@family("marian", names=pair_names("post_norm", NO_TABLE), heads=HEADS, optional=NO_BIAS)
def marian(c: Settings, kind: str) -> Model:
    c.size("max_position_embeddings", default=512)  # sines have no end
    return pair(c, kind, post, NoNorm(), SinusoidalHalves(), NoNorm())


@family("pegasus", names=pair_names("norm", NO_TABLE + FINAL_NORM), heads=WORDS, optional=NO_BIAS)
def pegasus(c: Settings, kind: str) -> Model:
    c.size("max_position_embeddings", default=1024)  # sines have no end
    c.read_by_now("normalize_before", "add_final_layer_norm")
    return pair(c, kind, pre, LayerNorm(), SinusoidalHalves(), NoNorm())


@family("blenderbot", names=pair_names("norm", TABLE + FINAL_NORM), heads=WORDS, optional=NO_BIAS)
def blenderbot(c: Settings, kind: str) -> Model:
    c.read_by_now("normalize_before", "add_final_layer_norm", "layernorm_variant")
    return pair(c, kind, pre, LayerNorm(), Learned(c.size("max_position_embeddings")), NoNorm())


# ------------------------------------------------------------------------------------------------ config.json of a spec


def settings(spec: Model, first: int = 0) -> Config | None:
    """The inverse of pair(). first: rows of a learned table of positions that are never used."""
    encoder, decoder = sizes_of(spec.encoder), sizes_of(spec.decoder)
    if encoder is None or decoder is None:
        return None
    position = encoder.embed.position
    sides = {
        f"{side}_{name}": value
        for side, s in (("encoder", encoder), ("decoder", decoder))
        for name, value in (("layers", s.layers), ("attention_heads", s.heads), ("ffn_dim", s.ffn.d_ff))
    }
    return {
        "vocab_size": encoder.embed.vocab,
        "d_model": encoder.d_model,
        **sides,
        "activation_function": encoder.activation,
        "scale_embedding": encoder.embed.scale != 1.0,
        "max_position_embeddings": position.size - first if isinstance(position, Learned) else 1024,
        "dropout": encoder.embed.dropout,
        "attention_dropout": encoder.attn.dropout,
        "activation_dropout": encoder.ffn.dropout,
        "classifier_dropout": head_dropout(spec),
        "is_encoder_decoder": True,
    }


def sines(spec: Model, config: Config) -> dict[str, Tensor]:
    """PEGASUS keeps its computed position table in the file, once for each stack."""
    model = SinusoidalHalves().build(config["d_model"])
    model.constants()
    places = torch.arange(config["max_position_embeddings"])
    table = model.add(torch.zeros(len(places), config["d_model"]), places)
    return {f"model.{side}.embed_positions.weight": table for side in ("encoder", "decoder")}


@writer("bart", "Bart", language="ForConditionalGeneration")
def bart_config(spec: Model) -> Config | None:
    return settings(spec, first=2)


@writer("mbart", "MBart", language="ForConditionalGeneration")
def mbart_config(spec: Model) -> Config | None:
    return settings(spec, first=2)


@writer("marian", "Marian", language="MTModel")
def marian_config(spec: Model) -> Config | None:
    said, decoder = settings(spec), sizes_of(spec.decoder)
    if said is None or decoder is None:
        return None
    shared = ("decoder.embed.tokens", "encoder.embed.tokens") in spec.tied
    return said | {"decoder_vocab_size": decoder.embed.vocab, "share_encoder_decoder_embeddings": shared}


@writer("pegasus", "Pegasus", language="ForConditionalGeneration", constants=sines)
def pegasus_config(spec: Model) -> Config | None:
    return settings(spec)


@writer("blenderbot", "Blenderbot", language="ForConditionalGeneration")
def blenderbot_config(spec: Model) -> Config | None:
    return settings(spec)
