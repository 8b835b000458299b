"""LLaMA 1, 2, 3, Mistral, Qwen 2 and 3, Gemma, Mixtral: pre-norm decoders with RoPE and a gated feed-forward layer."""

from __future__ import annotations

from typing import Any

from headwater.core import (
    Attention,
    Block,
    Causal,
    ClassificationHead,
    Embeddings,
    GatedFeedForward,
    LastToken,
    LMHead,
    Model,
    NoHead,
    NoNorm,
    Normal,
    NoScaling,
    OffsetRMSNorm,
    Pooled,
    RMSNorm,
    Rotary,
    SlidingWindow,
    Stack,
    pre,
)
from headwater.core.base import NormSpec, PositionSpec
from headwater.core.masks import MaskRule
from headwater.core.positions import RopeScaling
from headwater.errors import BadFile
from headwater.families.config_writers import (
    DEFAULT_MAX_POSITIONS,
    ConfigDict,
    decoder_sizes,
    find_part,
    register_config_writer,
)
from headwater.families.registry import read_activation, register_family
from headwater.i18n import _
from headwater.variants.experts import Experts
from headwater.variants.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from headwater.weights.hf_config import HFConfig, read_rope_config
from headwater.weights.name_map import name_map

ATTENTION_RULES = """
    [model.]embed_tokens                           decoder.embed.tokens
    [model.]layers.{i}.input_layernorm             decoder.layers.{i}.self_attn_norm
    [model.]layers.{i}.self_attn.q_proj            decoder.layers.{i}.self_attn.q
    [model.]layers.{i}.self_attn.k_proj            decoder.layers.{i}.self_attn.k
    [model.]layers.{i}.self_attn.v_proj            decoder.layers.{i}.self_attn.v
    [model.]layers.{i}.self_attn.o_proj            decoder.layers.{i}.self_attn.out
    [model.]layers.{i}.self_attn.q_norm            decoder.layers.{i}.self_attn.q_norm
    [model.]layers.{i}.self_attn.k_norm            decoder.layers.{i}.self_attn.k_norm
    [model.]layers.{i}.post_attention_layernorm    decoder.layers.{i}.ffn_norm
    [model.]norm                                   decoder.final_norm
    [model.]layers.{i}.self_attn.rotary_emb.inv_freq  -
"""
BODY_NAMES = name_map(
    ATTENTION_RULES
    + """
    [model.]layers.{i}.mlp.gate_proj               decoder.layers.{i}.ffn.gate
    [model.]layers.{i}.mlp.up_proj                 decoder.layers.{i}.ffn.up
    [model.]layers.{i}.mlp.down_proj               decoder.layers.{i}.ffn.down
"""
)
MOE_BODY_NAMES = name_map(
    ATTENTION_RULES
    + """
    [model.]layers.{i}.block_sparse_moe.gate             decoder.layers.{i}.ffn.router
    [model.]layers.{i}.block_sparse_moe.experts.{j}.w1   decoder.layers.{i}.ffn.experts.{j}.gate
    [model.]layers.{i}.block_sparse_moe.experts.{j}.w2   decoder.layers.{i}.ffn.experts.{j}.down
    [model.]layers.{i}.block_sparse_moe.experts.{j}.w3   decoder.layers.{i}.ffn.experts.{j}.up
"""
)
HEAD_NAMES = {
    "language": name_map("lm_head  head.out"),
    "hidden_states": name_map("lm_head  -"),
    "sequence_classification": name_map("score  head.out"),
}


def decoder_spec(config: HFConfig, head_type: str, norm: NormSpec, **overrides: Any) -> Model:
    """The decoder they have in common.

    overrides: bias, qk_norm, mask (one rule, or a list with one per layer), scale, ffn, tie_embeddings.
    """
    # one block for each mask
    vocab = config.get_int("vocab_size")
    num_layers = config.get_num_layers("num_hidden_layers")
    ffn = GatedFeedForward(
        config.get_int("intermediate_size"),
        read_activation(config, "hidden_act", "hidden_activation", default="silu"),
        config.get_bool("mlp_bias", default=False),
    )
    make_ffn = overrides.get("ffn", lambda dense: dense)
    position = rotary_spec(config)

    def block(mask: MaskRule) -> Block:
        attn = Attention(
            config.get_int("num_attention_heads"),
            config.get_optional("get_int", "num_key_value_heads"),
            config.get_optional("get_int", "head_dim"),
            bias=overrides.get("bias", ""),
            mask=mask,
            position=position,
            qk_norm=overrides.get("qk_norm", NoNorm()),
            dropout=config.get_float("attention_dropout", default=0.0),
        )
        return Block((pre(norm, self_attn=attn), pre(norm, ffn=make_ffn(ffn))))

    mask = overrides.get("mask", Causal())
    masks = mask if isinstance(mask, list) else [mask] * num_layers
    blocks = {rule: block(rule) for rule in dict.fromkeys(masks)}
    embed = Embeddings(vocab, scale=overrides.get("scale", 1.0))
    stack = Stack(config.get_int("hidden_size"), embed, tuple(blocks[rule] for rule in masks), norm)

    # the head, which may be tied to the embedding
    heads = {
        "language": LMHead(vocab),
        "hidden_states": NoHead(),
        "sequence_classification": ClassificationHead(len(config.get_labels()), Pooled(LastToken()), bias=False),
    }
    ties = head_type == "language" and config.get_bool(
        "tie_word_embeddings", default=overrides.get("tie_embeddings", False)
    )
    return Model(
        decoder=stack,
        head=heads[head_type],
        tied=(("head.out", "decoder.embed.tokens"),) if ties else (),
        init=(("*", Normal(config.get_float("initializer_range", default=0.02))),),
    )


def rotary_spec(config: HFConfig, partial_rotary_factor: float = 1.0) -> Rotary:
    """RoPE and its scaling, from either form of config.json."""
    rope = read_rope_config(config, partial_rotary_factor=partial_rotary_factor)
    max_positions = config.get_int("max_position_embeddings", default=2048)
    params = dict(rope.parameters)
    original = int(params.get("original_max_position_embeddings", max_positions))
    if rope.rope_type == "linear":
        scaling: RopeScaling = LinearScaling(params["factor"])
    elif rope.rope_type == "dynamic":
        scaling = DynamicScaling(params["factor"], original)
    elif rope.rope_type == "llama3":
        scaling = Llama3Scaling(params["factor"], params["low_freq_factor"], params["high_freq_factor"], original)
    elif rope.rope_type == "yarn" and not {"mscale", "mscale_all_dim"} & set(params):
        scaling = YarnScaling(
            params["factor"],
            original,
            params.get("beta_fast", 32.0),
            params.get("beta_slow", 1.0),
            params.get("attention_factor"),
        )
    elif rope.rope_type == "default":
        scaling = NoScaling()
    else:
        raise BadFile(
            _(
                "{where}: rope scaling {rope_type!r} with these parameters is not supported; known: default, "
                "linear, dynamic, llama3, yarn",
                where=config.where,
                rope_type=rope.rope_type,
            )
        )
    return Rotary(rope.theta, rope.partial_rotary_factor, scaling)


def layer_masks(config: HFConfig, num_layers: int) -> list[MaskRule]:
    """Qwen's attention mask of each layer: sliding windows by layer_types, or by the older max_window_layers."""
    window_size = config.get_optional("get_int", "sliding_window")
    enabled = config.get_bool("use_sliding_window", default=False)
    first_windowed = config.get_int("max_window_layers", minimum=0, default=num_layers)
    layer_types = config.get_list("layer_types", str, None)
    if layer_types is None:
        num_full = first_windowed if enabled and window_size else num_layers
        layer_types = ["full_attention" if i < num_full else "sliding_attention" for i in range(num_layers)]
    if len(layer_types) != num_layers or not set(layer_types) <= {"full_attention", "sliding_attention"}:
        raise BadFile(
            _(
                "{where}: layer_types must name full_attention or sliding_attention for each of {layers} layers",
                where=config.where,
                layers=num_layers,
            )
        )
    window: MaskRule = SlidingWindow(window_size) if window_size else Causal()
    return [window if layer_type == "sliding_attention" else Causal() for layer_type in layer_types]


def rms_norm_eps(config: HFConfig, default: float = 1e-6) -> float:
    return config.get_float("rms_norm_eps", default=default)


@register_family("llama", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_llama_spec(config: HFConfig, head_type: str) -> Model:
    """LLaMA: optional biases on the attention projections."""
    return decoder_spec(
        config,
        head_type,
        RMSNorm(rms_norm_eps(config)),
        bias="qkvo" if config.get_bool("attention_bias", default=False) else "",
    )


@register_family("mistral", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_mistral_spec(config: HFConfig, head_type: str) -> Model:
    """Mistral: a sliding window in every layer."""
    window_size = config.get_optional("get_int", "sliding_window")
    mask = SlidingWindow(window_size) if window_size else Causal()
    return decoder_spec(config, head_type, RMSNorm(rms_norm_eps(config)), mask=mask)


@register_family("qwen2", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_qwen2_spec(config: HFConfig, head_type: str) -> Model:
    """Qwen 2: biases on q, k and v; a sliding window in some layers."""
    return decoder_spec(
        config,
        head_type,
        RMSNorm(rms_norm_eps(config)),
        bias="qkv",
        mask=layer_masks(config, config.get_num_layers("num_hidden_layers")),
    )


@register_family("qwen3", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_qwen3_spec(config: HFConfig, head_type: str) -> Model:
    """Qwen 3: RMSNorm on queries and keys (QK-norm)."""
    norm = RMSNorm(rms_norm_eps(config))
    bias = "qkvo" if config.get_bool("attention_bias", default=False) else ""
    return decoder_spec(
        config,
        head_type,
        norm,
        bias=bias,
        qk_norm=norm,
        mask=layer_masks(config, config.get_num_layers("num_hidden_layers")),
    )


@register_family("gemma", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_gemma_spec(config: HFConfig, head_type: str) -> Model:
    """Gemma: norm weights stored minus 1, embeddings scaled by √d_model and tied to the output."""
    bias = "qkvo" if config.get_bool("attention_bias", default=False) else ""
    return decoder_spec(
        config,
        head_type,
        OffsetRMSNorm(rms_norm_eps(config)),
        bias=bias,
        scale=config.get_int("hidden_size") ** 0.5,
        tie_embeddings=True,
    )


@register_family("mixtral", body_names=MOE_BODY_NAMES, head_names=HEAD_NAMES)
def read_mixtral_spec(config: HFConfig, head_type: str) -> Model:
    """Mixtral: Mistral with a mixture of experts in place of the feed-forward layer."""
    window_size = config.get_optional("get_int", "sliding_window")
    num_experts = config.get_int("num_local_experts")
    top_k = config.get_int("num_experts_per_tok")
    return decoder_spec(
        config,
        head_type,
        RMSNorm(rms_norm_eps(config, 1e-5)),
        mask=SlidingWindow(window_size) if window_size else Causal(),
        ffn=lambda dense: Experts(dense, num_experts, top_k),
    )


# ------------------------------------------------------------------------------------------------ config.json of a spec


def llama_like_config(spec: Model) -> ConfigDict | None:
    """The keys of config.json they have in common; the config writers below add their own."""
    sizes = decoder_sizes(spec)
    if sizes is None:
        return None
    return {
        "vocab_size": sizes.embed.vocab,
        "hidden_size": sizes.d_model,
        "intermediate_size": sizes.ffn.d_ff,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.attn.kv_heads or sizes.num_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": sizes.activation,
        "rms_norm_eps": sizes.norm.eps,
        "attention_dropout": sizes.attn.dropout,
        "tie_word_embeddings": bool(spec.tied),
        **rope_config(sizes.attn.position),
    }


def rope_config(position: PositionSpec) -> ConfigDict:
    """The inverse of rotary_spec(). A scaling that transformers lacks is left out, so it never matches."""
    if not isinstance(position, Rotary):
        return {"max_position_embeddings": DEFAULT_MAX_POSITIONS}
    scaling = position.scaling
    max_positions = DEFAULT_MAX_POSITIONS
    rope: ConfigDict = {"rope_type": "default", "rope_theta": position.theta}
    if isinstance(scaling, LinearScaling):
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, DynamicScaling):
        rope |= {"rope_type": "dynamic", "factor": scaling.factor}
        max_positions = scaling.original_max_positions
    elif isinstance(scaling, Llama3Scaling):
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
        max_positions = int(scaling.factor * scaling.original_max_positions)
    elif isinstance(scaling, YarnScaling):
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
        if scaling.attention_factor is not None:
            rope["attention_factor"] = scaling.attention_factor
        max_positions = int(scaling.factor * scaling.original_max_positions)
    return {"max_position_embeddings": max_positions, "rope_parameters": rope}


def _window_size(spec: Model) -> int | None:
    window = find_part(spec.decoder, SlidingWindow)
    return None if window is None else window.size


def _has_attention_bias(spec: Model) -> bool:
    attn = find_part(spec.decoder, Attention)
    return attn is not None and bool(attn.bias)


def _layer_types_config(spec: Model) -> ConfigDict:
    """The keys of Qwen's sliding windows: their size, and which layers have one."""
    stack: Any = spec.decoder
    window_size = _window_size(spec)
    layer_types = [
        "full_attention" if find_part(layer, SlidingWindow) is None else "sliding_attention" for layer in stack.layers
    ]
    return {"use_sliding_window": window_size is not None, "sliding_window": window_size, "layer_types": layer_types}


@register_config_writer("llama", "Llama")
def llama_config(spec: Model) -> ConfigDict | None:
    config = llama_like_config(spec)
    if config is None:
        return None
    ffn = find_part(spec.decoder, GatedFeedForward)
    return config | {"attention_bias": _has_attention_bias(spec), "mlp_bias": ffn is not None and ffn.bias}


@register_config_writer("mistral", "Mistral")
def mistral_config(spec: Model) -> ConfigDict | None:
    config = llama_like_config(spec)
    return None if config is None else config | {"sliding_window": _window_size(spec)}


@register_config_writer("qwen2", "Qwen2")
def qwen2_config(spec: Model) -> ConfigDict | None:
    config = llama_like_config(spec)
    return None if config is None else config | _layer_types_config(spec)


@register_config_writer("qwen3", "Qwen3")
def qwen3_config(spec: Model) -> ConfigDict | None:
    config = llama_like_config(spec)
    if config is None:
        return None
    return config | _layer_types_config(spec) | {"attention_bias": _has_attention_bias(spec)}


@register_config_writer("gemma", "Gemma")
def gemma_config(spec: Model) -> ConfigDict | None:
    config = llama_like_config(spec)
    return None if config is None else config | {"attention_bias": _has_attention_bias(spec)}


@register_config_writer("mixtral", "Mixtral")
def mixtral_config(spec: Model) -> ConfigDict | None:
    config = llama_like_config(spec)
    experts = find_part(spec.decoder, Experts)
    if config is None or experts is None:
        return None
    moe = {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}
    return config | moe | {"sliding_window": _window_size(spec)}
