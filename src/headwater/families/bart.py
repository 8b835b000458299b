"""BART, mBART, Marian (the 2017 Transformer), PEGASUS and Blenderbot: encoder-decoders that share tensor names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwater.core import (
    Attention,
    Block,
    Branch,
    Causal,
    ClassificationHead,
    CrossAttention,
    Embeddings,
    FeedForward,
    LastToken,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoHead,
    NoNorm,
    Normal,
    Pooler,
    SinusoidalHalves,
    Stack,
    TokenClassificationHead,
    post,
    pre,
)
from headwater.core.base import HeadSpec, NormSpec, PositionSpec
from headwater.families.config_writers import ConfigDict, head_dropout, register_config_writer, stack_sizes
from headwater.families.registry import read_activation, register_family
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map


def attention_names(side: str, checkpoint_name: str, param_name: str, norm_name: str, prefix: str = "model") -> str:
    """The rules of one attention layer and its norm."""
    return f"""
    [{prefix}.]{side}.layers.{{i}}.{checkpoint_name}.q_proj      {side}.layers.{{i}}.{param_name}.q
    [{prefix}.]{side}.layers.{{i}}.{checkpoint_name}.k_proj      {side}.layers.{{i}}.{param_name}.k
    [{prefix}.]{side}.layers.{{i}}.{checkpoint_name}.v_proj      {side}.layers.{{i}}.{param_name}.v
    [{prefix}.]{side}.layers.{{i}}.{checkpoint_name}.out_proj    {side}.layers.{{i}}.{param_name}.out
    [{prefix}.]{side}.layers.{{i}}.{checkpoint_name}_layer_norm  {side}.layers.{{i}}.{param_name}_{norm_name}
"""


def seq2seq_names(norm_name: str, extra_rules: str, prefix: str = "model") -> NameMap:
    """The name map of an encoder-decoder. norm_name: "norm" (pre-norm) or "post_norm". prefix: of every name."""
    text = f"[{prefix}.]shared  encoder.embed.tokens : unless decoder.embed.tokens\n"
    for side in ("encoder", "decoder"):
        text += f"""
    [{prefix}.]{side}.embed_tokens                  {side}.embed.tokens
    [{prefix}.]{side}.layers.{{i}}.fc1              {side}.layers.{{i}}.ffn.up
    [{prefix}.]{side}.layers.{{i}}.fc2              {side}.layers.{{i}}.ffn.down
    [{prefix}.]{side}.layers.{{i}}.final_layer_norm {side}.layers.{{i}}.ffn_{norm_name}
    [{prefix}.]{side}.version                       -
    """ + attention_names(side, "self_attn", "self_attn", norm_name, prefix)
        text += extra_rules.format(side=side, prefix=prefix)
    return name_map(text + attention_names("decoder", "encoder_attn", "cross_attn", norm_name, prefix))


POSITION_TABLE = "[{prefix}.]{side}.embed_positions  {side}.embed.position.table\n"
EMBED_NORM = "[{prefix}.]{side}.layernorm_embedding  {side}.embed.norm\n"
FINAL_NORM = "[{prefix}.]{side}.layer_norm  {side}.final_norm\n"
IGNORED_POSITION_TABLE = "[{prefix}.]{side}.embed_positions  -\n"
IGNORED_LM_HEAD = name_map("lm_head  -\nfinal_logits_bias  -")
HEAD_NAMES = {
    "language": name_map("lm_head  head.out\nfinal_logits_bias  head.out.bias : squeeze"),
    "hidden_states": IGNORED_LM_HEAD,
    "sequence_classification": IGNORED_LM_HEAD
    + name_map("classification_head.dense  head.pooler.dense\nclassification_head.out_proj  head.out"),
    "question_answering": IGNORED_LM_HEAD + name_map("qa_outputs  head.out"),
}
OPTIONAL_BIAS = ("head.out.bias",)
LM_HEAD_NAMES = {kind: HEAD_NAMES[kind] for kind in ("language", "hidden_states")}


def seq2seq_spec(
    config: HFConfig,
    head_type: str,
    make_branch: Callable[..., Branch],
    final_norm: NormSpec,
    position: PositionSpec,
    embed_norm: NormSpec,
    labels: int = 3,
) -> Model:
    """The encoder-decoder they have in common. make_branch: pre or post. labels: of a classifier, if none are named."""
    # sizes that both stacks share
    norm = LayerNorm()
    d_model = config.get_int("d_model")
    dropout = config.get_float("dropout", default=0.1)
    scale = d_model**0.5 if config.get_bool("scale_embedding", default=False) else 1.0
    vocab = config.get_int("vocab_size")
    target_vocab = config.get_int("decoder_vocab_size", default=vocab)

    def stack(side: str, vocab_size: int, mask_args: dict[str, Any], cross_attends: bool) -> Stack:
        """The encoder or the decoder."""
        attn_args: dict[str, Any] = {
            "heads": config.get_int(f"{side}_attention_heads"),
            "bias": "qkvo",
            "dropout": config.get_float("attention_dropout", default=0.0),
        }
        ffn = FeedForward(
            config.get_int(f"{side}_ffn_dim"),
            read_activation(config, "activation_function"),
            dropout=config.get_float("activation_dropout", default=0.0),
        )
        cross = (make_branch(norm, cross_attn=CrossAttention(**attn_args)),) if cross_attends else ()
        branches = (
            make_branch(norm, self_attn=Attention(**attn_args, **mask_args)),
            *cross,
            make_branch(norm, ffn=ffn),
        )
        embed = Embeddings(vocab_size, position, scale, norm=embed_norm, dropout=dropout)
        num_layers = config.get_num_layers(f"{side}_layers", "num_hidden_layers")
        return Stack(d_model, embed, (Block(branches, dropout),) * num_layers, final_norm)

    # heads by type; only the one that is needed is built
    heads: dict[str, Callable[[], HeadSpec]] = {
        "language": lambda: LMHead(target_vocab, bias=True),
        "hidden_states": NoHead,
        "sequence_classification": lambda: ClassificationHead(
            len(config.get_labels(labels)), Pooler(LastToken()), config.get_float("classifier_dropout", default=0.0)
        ),
        "question_answering": lambda: TokenClassificationHead(2),
    }

    # tied embeddings, and the model
    shared = () if _has_separate_vocabularies(config) else (("decoder.embed.tokens", "encoder.embed.tokens"),)
    return Model(
        encoder=stack("encoder", vocab, {}, cross_attends=False),
        decoder=stack("decoder", target_vocab, {"mask": Causal()}, cross_attends=True),
        head=heads[head_type](),
        tied=(*shared, ("head.out", "decoder.embed.tokens")) if head_type == "language" else shared,
        init=(("*", Normal(config.get_float("init_std", default=0.02))),),
    )


def _has_separate_vocabularies(config: HFConfig) -> bool:
    """Whether each language has its own token embeddings, as in some Marian models."""
    return not config.get_bool("share_encoder_decoder_embeddings", default=True)


def learned_positions(config: HFConfig) -> Learned:
    """Learned positions that start at row 2: the first rows were for the padding id."""
    return Learned(config.get_int("max_position_embeddings") + 2, offset=2)


@register_family(
    "bart",
    body_names=seq2seq_names("post_norm", POSITION_TABLE + EMBED_NORM),
    head_names=HEAD_NAMES,
    optional_params=OPTIONAL_BIAS,
)
def read_bart_spec(config: HFConfig, head_type: str) -> Model:
    return seq2seq_spec(config, head_type, post, NoNorm(), learned_positions(config), LayerNorm())


@register_family(
    "mbart",
    body_names=seq2seq_names("norm", POSITION_TABLE + EMBED_NORM + FINAL_NORM),
    head_names=HEAD_NAMES,
    optional_params=OPTIONAL_BIAS,
)
def read_mbart_spec(config: HFConfig, head_type: str) -> Model:
    config.ignore("normalize_before", "add_final_layer_norm")
    return seq2seq_spec(config, head_type, pre, LayerNorm(), learned_positions(config), LayerNorm())


@register_family(
    "marian",
    body_names=seq2seq_names("post_norm", IGNORED_POSITION_TABLE),
    head_names=HEAD_NAMES,
    optional_params=OPTIONAL_BIAS,
)
def read_marian_spec(config: HFConfig, head_type: str) -> Model:
    config.get_int("max_position_embeddings", default=512)  # not needed by sinusoidal positions
    return seq2seq_spec(config, head_type, post, NoNorm(), SinusoidalHalves(), NoNorm())


@register_family(
    "pegasus",
    body_names=seq2seq_names("norm", IGNORED_POSITION_TABLE + FINAL_NORM),
    head_names=LM_HEAD_NAMES,
    optional_params=OPTIONAL_BIAS,
)
def read_pegasus_spec(config: HFConfig, head_type: str) -> Model:
    config.get_int("max_position_embeddings", default=1024)  # not needed by sinusoidal positions
    config.ignore("normalize_before", "add_final_layer_norm")
    return seq2seq_spec(config, head_type, pre, LayerNorm(), SinusoidalHalves(), NoNorm())


@register_family(
    "blenderbot",
    body_names=seq2seq_names("norm", POSITION_TABLE + FINAL_NORM),
    head_names=LM_HEAD_NAMES,
    optional_params=OPTIONAL_BIAS,
)
def read_blenderbot_spec(config: HFConfig, head_type: str) -> Model:
    config.ignore("normalize_before", "add_final_layer_norm", "layernorm_variant")
    return seq2seq_spec(
        config, head_type, pre, LayerNorm(), Learned(config.get_int("max_position_embeddings")), NoNorm()
    )


# ------------------------------------------------------------------------------------------------ config.json of a spec


def bart_like_config(spec: Model, position_offset: int = 0) -> ConfigDict | None:
    """The keys of config.json they have in common; the inverse of seq2seq_spec().

    position_offset: rows of the position table before position 0.
    """
    encoder = stack_sizes(spec.encoder)
    decoder = stack_sizes(spec.decoder)
    if encoder is None or decoder is None:
        return None
    position = encoder.embed.position
    return {
        "vocab_size": encoder.embed.vocab,
        "d_model": encoder.d_model,
        "encoder_layers": encoder.num_layers,
        "encoder_attention_heads": encoder.num_heads,
        "encoder_ffn_dim": encoder.ffn.d_ff,
        "decoder_layers": decoder.num_layers,
        "decoder_attention_heads": decoder.num_heads,
        "decoder_ffn_dim": decoder.ffn.d_ff,
        "activation_function": encoder.activation,
        "scale_embedding": encoder.embed.scale != 1.0,
        "max_position_embeddings": position.size - position_offset if isinstance(position, Learned) else 1024,
        "dropout": encoder.embed.dropout,
        "attention_dropout": encoder.attn.dropout,
        "activation_dropout": encoder.ffn.dropout,
        "classifier_dropout": head_dropout(spec),
        "is_encoder_decoder": True,
    }


def sinusoidal_tables(spec: Model, config: ConfigDict) -> dict[str, Tensor]:
    """The position tables that transformers expects in a PEGASUS file though they are computed, one per stack."""
    encoding = SinusoidalHalves().build(config["d_model"])
    encoding.init_buffers()
    positions = torch.arange(config["max_position_embeddings"])
    table = encoding.add(torch.zeros(len(positions), config["d_model"]), positions)
    return {f"model.{side}.embed_positions.weight": table for side in ("encoder", "decoder")}


@register_config_writer("bart", "Bart", lm_suffix="ForConditionalGeneration")
def bart_config(spec: Model) -> ConfigDict | None:
    return bart_like_config(spec, position_offset=2)


@register_config_writer("mbart", "MBart", lm_suffix="ForConditionalGeneration")
def mbart_config(spec: Model) -> ConfigDict | None:
    return bart_like_config(spec, position_offset=2)


@register_config_writer("marian", "Marian", lm_suffix="MTModel")
def marian_config(spec: Model) -> ConfigDict | None:
    config = bart_like_config(spec)
    decoder = stack_sizes(spec.decoder)
    if config is None or decoder is None:
        return None
    shared = ("decoder.embed.tokens", "encoder.embed.tokens") in spec.tied
    return config | {"decoder_vocab_size": decoder.embed.vocab, "share_encoder_decoder_embeddings": shared}


@register_config_writer("pegasus", "Pegasus", lm_suffix="ForConditionalGeneration", extra_tensors=sinusoidal_tables)
def pegasus_config(spec: Model) -> ConfigDict | None:
    return bart_like_config(spec)


@register_config_writer("blenderbot", "Blenderbot", lm_suffix="ForConditionalGeneration")
def blenderbot_config(spec: Model) -> ConfigDict | None:
    return bart_like_config(spec)
