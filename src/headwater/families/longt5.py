"""LongT5: T5 whose encoder has a window, or a window and a summary of each block (transient-global attention)."""

from __future__ import annotations

from dataclasses import fields, replace

from headwater.core import Attention, LocalWindow, Model, RelativeBias, RMSNorm
from headwater.families.config_writers import ConfigDict, find_part, register_config_writer
from headwater.families.registry import register_family
from headwater.families.t5 import CROSS_ATTENTION_RULES, HEAD_NAMES, seq2seq_spec, stack_names, t5_like_config
from headwater.parts import swap
from headwater.variants.transient_global import RelativeBiasWithSummaries, TransientGlobalAttention
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

ATTENTION_TYPES = ("local", "transient-global")


def _encoder_names() -> str:
    """The encoder's rules, with the two names of its attention."""
    rules = stack_names("encoder", 1)
    attention = [line for line in rules.splitlines() if "SelfAttention" in line]
    others = [line for line in rules.splitlines() if "SelfAttention" not in line]
    first = "encoder.block.0.layer.0.TransientGlobalSelfAttention"
    further = [
        "encoder.block.{i}.layer.0.TransientGlobalSelfAttention.global_input_layer_norm"
        "  encoder.layers.{i}.self_attn.summary_norm",
        f"{first}.global_relative_attention_bias  encoder.position_encodings.0.summary_table",
    ]
    local = [
        line.replace("SelfAttention", "LocalSelfAttention")
        + f" : unless encoder.layers.{'0' if 'relative' in line else '{i}'}.self_attn.summary_norm"
        for line in attention
    ]
    transient = [line.replace("SelfAttention", "TransientGlobalSelfAttention") for line in attention]
    return "\n".join([*others, *further, *local, *transient])


BODY_NAMES = name_map(CROSS_ATTENTION_RULES + _encoder_names() + "\n" + stack_names("decoder", 2))


@register_family("longt5", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_longt5_spec(config: HFConfig, head_type: str) -> Model:
    """T5 with another attention in the encoder."""
    window = LocalWindow(config.get_int("local_radius", default=127))
    block_size = config.get_int("global_block_size", default=16)
    kind = config.get_str("encoder_attention_type", choices=ATTENTION_TYPES, default="local")
    tie_embeddings = config.get_bool("tie_word_embeddings", default=True)
    model = seq2seq_spec(
        config,
        head_type,
        tie_embeddings,
        scale_outputs=config.get_bool("scale_decoder_outputs", default=tie_embeddings),
        default_activation="relu",
    )
    summary_norm = RMSNorm(config.get_float("layer_norm_epsilon", default=1e-6))

    def attention(plain: Attention) -> Attention:
        if kind == "local":
            return replace(plain, mask=window)
        bias = plain.position
        assert isinstance(bias, RelativeBias)
        position = RelativeBiasWithSummaries(bias.num_buckets, bias.max_distance)
        settings = {field.name: getattr(plain, field.name) for field in fields(plain)}
        settings |= {"mask": window, "position": position}
        return TransientGlobalAttention(**settings, block_size=block_size, summary_norm=summary_norm)

    return replace(model, encoder=swap(model.encoder, Attention, attention))


@register_config_writer("longt5", "LongT5", lm_suffix="ForConditionalGeneration")
def longt5_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_longt5_spec()."""
    config = t5_like_config(spec)
    attention = find_part(spec.encoder, Attention)
    if config is None or attention is None or not isinstance(attention.mask, LocalWindow):
        return None
    scaled = getattr(spec.head, "scale", 1.0) != 1.0
    sizes = {"local_radius": attention.mask.size, "scale_decoder_outputs": scaled, "tie_word_embeddings": scaled}
    if not isinstance(attention, TransientGlobalAttention):
        return config | {**sizes, "encoder_attention_type": "local"}
    return config | {**sizes, "encoder_attention_type": "transient-global", "global_block_size": attention.block_size}
