"""T5 (1.0, 1.1, Flan) and mT5: pre-norm encoder-decoders without biases, with one relative position bias per stack.

Attention scores are not scaled.
"""

from __future__ import annotations

from typing import Any

from headwater.core import (
    Attention,
    Block,
    Branch,
    Causal,
    CrossAttention,
    Embeddings,
    FeedForward,
    GatedFeedForward,
    LMHead,
    Model,
    NoHead,
    Normal,
    RelativeBias,
    RMSNorm,
    Stack,
    pre,
)
from headwater.families.config_writers import ConfigDict, find_part, register_config_writer, stack_sizes
from headwater.families.registry import ACTIVATIONS, register_family
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map


def stack_names(side: str, ffn_index: int) -> str:
    """The rules of one stack. ffn_index: which sublayer of a block is the feed-forward layer."""
    block = f"{side}.block.{{i}}.layer"
    layer = f"{side}.layers.{{i}}"
    return f"""
    {side}.embed_tokens                                           {side}.embed.tokens
    {block}.0.layer_norm                                          {layer}.self_attn_norm
    {block}.0.SelfAttention.q                                     {layer}.self_attn.q
    {block}.0.SelfAttention.k                                     {layer}.self_attn.k
    {block}.0.SelfAttention.v                                     {layer}.self_attn.v
    {block}.0.SelfAttention.o                                     {layer}.self_attn.out
    {side}.block.0.layer.0.SelfAttention.relative_attention_bias  {side}.position_encodings.0.table
    {block}.{ffn_index}.layer_norm                                      {layer}.ffn_norm
    {block}.{ffn_index}.DenseReluDense.wi                               {layer}.ffn.up  : unless {layer}.ffn.gate
    {block}.{ffn_index}.DenseReluDense.wi_0                             {layer}.ffn.gate
    {block}.{ffn_index}.DenseReluDense.wi_1                             {layer}.ffn.up
    {block}.{ffn_index}.DenseReluDense.wo                               {layer}.ffn.down
    {side}.final_layer_norm                                       {side}.final_norm
"""


CROSS_ATTENTION_RULES = """
    shared                                                            encoder.embed.tokens : unless decoder.embed.tokens
    decoder.block.{i}.layer.1.layer_norm                               decoder.layers.{i}.cross_attn_norm
    decoder.block.{i}.layer.1.EncDecAttention.q                        decoder.layers.{i}.cross_attn.q
    decoder.block.{i}.layer.1.EncDecAttention.k                        decoder.layers.{i}.cross_attn.k
    decoder.block.{i}.layer.1.EncDecAttention.v                        decoder.layers.{i}.cross_attn.v
    decoder.block.{i}.layer.1.EncDecAttention.o                        decoder.layers.{i}.cross_attn.out
    decoder.block.0.layer.1.EncDecAttention.relative_attention_bias    -
"""
BODY_NAMES = name_map(CROSS_ATTENTION_RULES + stack_names("encoder", 1) + stack_names("decoder", 2))
HEAD_NAMES = {"language": name_map("lm_head  head.out"), "hidden_states": name_map("lm_head  -")}


@register_family("t5", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_t5_spec(config: HFConfig, head_type: str) -> Model:
    """T5 1.0 ties the output to the token embeddings and scales the final hidden states; later versions do neither."""
    tie_embeddings = config.get_bool("tie_word_embeddings", default=True)
    return seq2seq_spec(
        config,
        head_type,
        tie_embeddings,
        scale_outputs=config.get_bool("scale_decoder_outputs", default=tie_embeddings),
        default_activation="relu",
    )


@register_family("mt5", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_mt5_spec(config: HFConfig, head_type: str) -> Model:
    """mT5: T5 1.1 with a multilingual vocabulary."""
    return seq2seq_spec(
        config,
        head_type,
        config.get_bool("tie_word_embeddings", default=False),
        scale_outputs=False,
        default_activation="gated-gelu",
    )


def seq2seq_spec(
    config: HFConfig, head_type: str, tie_embeddings: bool, scale_outputs: bool, default_activation: str
) -> Model:
    """The encoder-decoder they have in common. scale_outputs: by 1/√d_model, before the head."""
    norm = RMSNorm(config.get_float("layer_norm_epsilon", default=1e-6))
    d_model = config.get_int("d_model")
    dropout = _dropout_rate(config)
    num_layers = config.get_num_layers("num_layers")
    vocab = config.get_int("vocab_size")

    # Branches of the blocks.
    attn_args: dict[str, Any] = {
        "heads": config.get_int("num_heads"),
        "head_dim": config.get_int("d_kv"),
        "scale": 1.0,
        "dropout": dropout,
    }
    num_buckets = config.get_int("relative_attention_num_buckets", default=32)
    max_distance = config.get_int("relative_attention_max_distance", default=128)
    encoder_bias = RelativeBias(num_buckets, max_distance)
    decoder_bias = RelativeBias(num_buckets, max_distance, bidirectional=False)
    encoder_attn = pre(norm, self_attn=Attention(**attn_args, position=encoder_bias))
    decoder_attn = pre(norm, self_attn=Attention(**attn_args, position=decoder_bias, mask=Causal()))
    cross_attn = pre(norm, cross_attn=CrossAttention(**attn_args))
    ffn = pre(norm, ffn=_feed_forward_spec(config, default_activation))
    embed = Embeddings(vocab, dropout=dropout)

    def stack(branches: tuple[Branch, ...], num_layers: int) -> Stack:
        return Stack(d_model, embed, (Block(branches, dropout),) * num_layers, norm, dropout=dropout)

    # Tied embeddings, and the model.
    tied: tuple[tuple[str, str], ...] = (("decoder.embed.tokens", "encoder.embed.tokens"),)
    if tie_embeddings and head_type == "language":
        tied = (*tied, ("head.out", "encoder.embed.tokens"))
    output_scale = d_model**-0.5 if scale_outputs else 1.0
    return Model(
        encoder=stack((encoder_attn, ffn), num_layers),
        decoder=stack((decoder_attn, cross_attn, ffn), config.get_num_layers("num_decoder_layers", default=num_layers)),
        head=LMHead(vocab, scale=output_scale) if head_type == "language" else NoHead(),
        tied=tied,
        init=_init_spec(config, d_model, attn_args["heads"] * attn_args["head_dim"], attn_args["head_dim"]),
    )


def _feed_forward_spec(config: HFConfig, default_activation: str) -> FeedForward | GatedFeedForward:
    """The feed-forward layer by feed_forward_proj: relu, gated-gelu (which means the tanh form), or gated-<any>."""
    name = config.get_str("feed_forward_proj", default=default_activation)
    config.ignore("dense_act_fn", "is_gated_act")
    activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    checked = HFConfig({"feed_forward_proj": activation}, config.where)
    activation = ACTIVATIONS[checked.get_str("feed_forward_proj", choices=ACTIVATIONS)]
    layer_type = GatedFeedForward if name.startswith("gated-") else FeedForward
    return layer_type(config.get_int("d_ff"), activation, bias=False, dropout=_dropout_rate(config))


def _dropout_rate(config: HFConfig) -> float:
    return config.get_float("dropout_rate", default=0.1)


def _init_spec(config: HFConfig, d_model: int, d_inner: int, d_kv: int) -> tuple[tuple[str, Normal], ...]:
    """Initial weights. Attention scores are not scaled, so the initial query projection has the scale."""
    factor = config.get_float("initializer_factor", default=1.0)
    d_ff = config.get_int("d_ff")
    return (
        ("*.embed.tokens.weight", Normal(factor)),
        ("*_attn.q.weight", Normal(factor * (d_model * d_kv) ** -0.5)),
        ("*_attn.out.weight", Normal(factor * d_inner**-0.5)),
        ("*.ffn.down.weight", Normal(factor * d_ff**-0.5)),
        ("*", Normal(factor * d_model**-0.5)),
    )


# ------------------------------------------------------------------------------------------------ config.json of a spec


def t5_like_config(spec: Model) -> ConfigDict | None:
    """The keys of config.json of T5 and mT5; the inverse of seq2seq_spec()."""
    sizes = stack_sizes(spec.encoder)
    decoder = stack_sizes(spec.decoder)
    if sizes is None or decoder is None:
        return None
    bias = find_part(spec.encoder, RelativeBias) or RelativeBias()
    gated_name = "gelu" if sizes.ffn.activation == "gelu_tanh" else sizes.activation  # `gated-gelu` means the tanh form
    return {
        "vocab_size": sizes.embed.vocab,
        "d_model": sizes.d_model,
        "d_kv": sizes.head_dim,
        "d_ff": sizes.ffn.d_ff,
        "num_layers": sizes.num_layers,
        "num_decoder_layers": decoder.num_layers,
        "num_heads": sizes.num_heads,
        "feed_forward_proj": f"gated-{gated_name}" if isinstance(sizes.ffn, GatedFeedForward) else sizes.activation,
        "relative_attention_num_buckets": bias.num_buckets,
        "relative_attention_max_distance": bias.max_distance,
        "layer_norm_epsilon": sizes.norm.eps,
        "dropout_rate": sizes.dropout,
        "tie_word_embeddings": any(path == "head.out" for path, _ in spec.tied),
        "is_encoder_decoder": True,
    }


@register_config_writer("t5", "T5", lm_suffix="ForConditionalGeneration")
def t5_config(spec: Model) -> ConfigDict | None:
    return t5_like_config(spec)


@register_config_writer("mt5", "MT5", lm_suffix="ForConditionalGeneration")
def mt5_config(spec: Model) -> ConfigDict | None:
    return t5_like_config(spec)
