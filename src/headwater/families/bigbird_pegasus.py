"""BigBird-Pegasus: PEGASUS whose encoder reads blocks, as BigBird does."""

from __future__ import annotations

from dataclasses import replace

from headwater.core import Attention, CrossAttention, LayerNorm, Learned, Model, NoNorm, pre
from headwater.families.bart import (
    HEAD_NAMES,
    OPTIONAL_BIAS,
    POSITION_TABLE,
    bart_like_config,
    seq2seq_names,
    seq2seq_spec,
)
from headwater.families.bigbird import bigbird_attention, bigbird_sizes
from headwater.families.config_writers import ConfigDict, find_part, register_config_writer
from headwater.families.registry import register_family
from headwater.parts import swap
from headwater.variants.bigbird import BigBirdAttention
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map

FINAL_NORM = "[{prefix}.]{side}.layernorm_embedding  {side}.final_norm\n"  # its name says otherwise


def _names() -> NameMap:
    """BART's names, and those of the encoder's attention."""
    attention = name_map("""
        [model.]encoder.layers.{i}.self_attn.self.query  encoder.layers.{i}.self_attn.q
        [model.]encoder.layers.{i}.self_attn.self.key    encoder.layers.{i}.self_attn.k
        [model.]encoder.layers.{i}.self_attn.self.value  encoder.layers.{i}.self_attn.v
        [model.]encoder.layers.{i}.self_attn.output      encoder.layers.{i}.self_attn.out
    """)
    return attention + seq2seq_names("norm", POSITION_TABLE + FINAL_NORM)


@register_family("bigbird_pegasus", body_names=_names(), head_names=HEAD_NAMES, optional_params=OPTIONAL_BIAS)
def read_bigbird_pegasus_spec(config: HFConfig, head_type: str) -> Model:
    """Pre-norm, learned positions from row 0, and attention without biases unless use_bias."""
    position = Learned(config.get_int("max_position_embeddings", default=4096))
    model = seq2seq_spec(config, head_type, pre, LayerNorm(), position, NoNorm(), labels=2)
    bias = "qkvo" if config.get_bool("use_bias", default=False) else ""
    for kind in (Attention, CrossAttention):
        model = swap(model, kind, lambda attention: replace(attention, bias=bias))
    return replace(model, encoder=swap(model.encoder, Attention, lambda plain: bigbird_attention(config, plain)))


@register_config_writer("bigbird_pegasus", "BigBirdPegasus", lm_suffix="ForConditionalGeneration")
def bigbird_pegasus_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_bigbird_pegasus_spec()."""
    config = bart_like_config(spec)
    attention = find_part(spec.encoder, Attention)
    if config is None or attention is None:
        return None
    return config | {**bigbird_sizes(find_part(spec.encoder, BigBirdAttention)), "use_bias": "q" in attention.bias}
