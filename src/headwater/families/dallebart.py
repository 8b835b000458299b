"""DALL-E mini and mega: an encoder-decoder from text to the ids of a picture codec, with NormFormer's extra norms.

Each attention branch has a norm before and after it; the feed-forward layer is gated, with a norm inside. The codec
(VQGAN) is a model of its own in the folder `codec` beside this one.
"""

from __future__ import annotations

from typing import Any

from headwater.core import (
    Attention,
    Block,
    Causal,
    CrossAttention,
    Embeddings,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoHead,
    Normal,
    Stack,
    pre,
    sandwich,
)
from headwater.errors import BadFile
from headwater.families.registry import read_activation, register_family
from headwater.i18n import _
from headwater.io.files import quote
from headwater.variants.normed_ffn import NormedGatedFeedForward
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map


def _attention_names(side: str, checkpoint_name: str, param_name: str) -> str:
    """The rules of one attention layer, and of the norms before and after it."""
    old = f"{side}.layers.{{i}}"
    new = f"{side}.layers.{{i}}.{param_name}"
    return f"""
    {old}.pre_{checkpoint_name}_layer_norm   {new}_norm
    {old}.{checkpoint_name}_layer_norm       {new}_out_norm
    {old}.{checkpoint_name}.q_proj           {new}.q
    {old}.{checkpoint_name}.k_proj           {new}.k
    {old}.{checkpoint_name}.v_proj           {new}.v
    {old}.{checkpoint_name}.out_proj         {new}.out
    """


def _stack_names(side: str) -> str:
    """The rules of one stack."""
    return f"""
    {side}.embed_tokens            {side}.embed.tokens
    {side}.embed_positions         {side}.embed.position.table
    {side}.layernorm_embedding     {side}.embed.norm
    {side}.final_ln                {side}.final_norm
    {side}.layers.{{i}}.glu.ln0    {side}.layers.{{i}}.ffn_norm
    {side}.layers.{{i}}.glu.fc0    {side}.layers.{{i}}.ffn.gate
    {side}.layers.{{i}}.glu.fc1    {side}.layers.{{i}}.ffn.up
    {side}.layers.{{i}}.glu.ln1    {side}.layers.{{i}}.ffn.norm
    {side}.layers.{{i}}.glu.fc2    {side}.layers.{{i}}.ffn.down
    """ + _attention_names(side, "self_attn", "self_attn")


BODY_NAMES = name_map(
    _stack_names("encoder") + _stack_names("decoder") + _attention_names("decoder", "encoder_attn", "cross_attn")
)
HEAD_NAMES = {"language": name_map("decoder.lm_head  head.out"), "hidden_states": name_map("decoder.lm_head  -")}
# Norms that feed a linear layer have no scale in the original: it would be one with the matrix.
OPTIONAL_SCALES = tuple(f"*.{name}.weight" for name in ("*_attn_norm", "ffn_norm", "ffn.norm", "final_norm"))

# Settings with which the architecture is the one below; any other value is another model.
FIXED_SETTINGS: dict[str, Any] = {
    "ln_type": "layernorm",
    "ln_positions": "normformer",
    "use_glu": True,
    "use_bias": False,
    "use_absolute_position_embeddings": True,
    "use_final_ln_encoder": True,
    "use_final_ln_decoder": True,
    "scale_embedding": False,
    "force_ln_scale": False,
    "tie_word_embeddings": False,
    "use_head_scale": False,
    "use_cosine_attention": False,
    "use_swin_position_embeddings": False,
    "use_deepnet_scaling": False,
    "use_subln_init": False,
    "use_scan": None,
    "sinkhorn_iters": 1,
    "tau_init": None,
    "do_sample": None,
    "static_argnums": None,
}


def _check_fixed_settings(config: HFConfig) -> None:
    """Refuse the switches of DALL-E mini that build another network."""
    for key, expected in FIXED_SETTINGS.items():
        if expected is None:  # without effect on the outputs
            config.ignore(key)
            continue
        if isinstance(expected, bool):
            value: object = config.get_bool(key, default=expected)
        elif isinstance(expected, int):
            value = config.get_int(key, default=expected)
        else:
            value = config.get_str(key, default=expected)
        if value != expected:
            raise BadFile(
                _(
                    "{where}: {key} must be {expected}, got {value}; this form of DALL-E mini is not known",
                    where=config.where,
                    key=key,
                    expected=expected,
                    value=quote(value),
                )
            )


@register_family("dallebart", body_names=BODY_NAMES, head_names=HEAD_NAMES, optional_params=OPTIONAL_SCALES)
def read_dallebart_spec(config: HFConfig, head_type: str) -> Model:
    """One more row than the codec has codes: the id that starts a picture."""
    _check_fixed_settings(config)
    config.ignore("normalize_text")
    norm = LayerNorm()
    d_model = config.get_int("d_model", default=1024)
    dropout = config.get_float("dropout", default=0.0)
    image_vocab = config.get_int("image_vocab_size", default=16384) + 1

    def stack(side: str, vocab: int, positions: int, mask_args: dict[str, Any], cross_attends: bool) -> Stack:
        """The encoder or the decoder."""
        heads = config.get_int(f"{side}_attention_heads", default=16)
        attn_dropout = config.get_float("attention_dropout", default=0.0)
        ffn = NormedGatedFeedForward(
            config.get_int(f"{side}_ffn_dim", default=2730),
            norm,
            read_activation(config, "activation_function"),
            dropout=config.get_float("activation_dropout", default=0.0),
        )
        cross = CrossAttention(heads, dropout=attn_dropout)
        branches = (
            sandwich(norm, self_attn=Attention(heads, dropout=attn_dropout, **mask_args)),
            *((sandwich(norm, cross_attn=cross),) if cross_attends else ()),
            pre(norm, ffn=ffn),
        )
        embed = Embeddings(vocab, Learned(positions), norm=norm, dropout=dropout)
        num_layers = config.get_num_layers(f"{side}_layers", "num_hidden_layers", default=12)
        return Stack(d_model, embed, (Block(branches, dropout),) * num_layers, norm)

    text_vocab = config.get_int("encoder_vocab_size", default=50264)
    text_length = config.get_int("max_text_length", default=64)
    return Model(
        encoder=stack("encoder", text_vocab, text_length, {}, cross_attends=False),
        decoder=stack("decoder", image_vocab, config.get_int("image_length", default=256), {"mask": Causal()}, True),
        head=LMHead(image_vocab) if head_type == "language" else NoHead(),
        init=(("*", Normal(config.get_float("init_std", default=0.02))),),
    )
