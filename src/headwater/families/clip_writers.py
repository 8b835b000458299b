"""Config writers of CLIP and SigLIP: from two towers, or one of them, to the config.json that transformers opens."""

from __future__ import annotations

from collections.abc import Callable

from headwater.core import Attention, Embeddings, FeedForward, LayerNorm, Learned, Model
from headwater.families.clip import OLD_EOS_ID
from headwater.families.config_writers import HF_ACTIVATIONS, ConfigDict, find_part, register_config_writer
from headwater.variants.image_heads import FirstTokenOf, ProjectionHead
from headwater.variants.patches import LinearProjection, Patches
from headwater.variants.towers import Towers


def tower_config(tower: Model) -> ConfigDict | None:
    """The keys that the text tower and the image tower share; None for another kind of model."""
    attn = find_part(tower.encoder, Attention)
    ffn = find_part(tower.encoder, FeedForward)
    norm = find_part(getattr(tower.encoder, "layers", ()), LayerNorm)
    if tower.encoder is None or tower.decoder is not None or attn is None or ffn is None or norm is None:
        return None
    return {
        "hidden_size": tower.encoder.d_model,
        "num_hidden_layers": len(tower.encoder.order) or len(tower.encoder.layers),
        "num_attention_heads": attn.heads,
        "intermediate_size": ffn.d_ff,
        "hidden_act": HF_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "layer_norm_eps": norm.eps,
        "attention_dropout": attn.dropout,
    }


def text_config(tower: Model) -> ConfigDict | None:
    """The config of a text tower."""
    config = tower_config(tower)
    embed = find_part(tower.encoder, Embeddings)
    position = getattr(embed, "position", None)
    if config is None or embed is None or not isinstance(position, Learned):
        return None
    pooling = find_part(tower.head, FirstTokenOf)
    width = projection_width(tower)
    return {
        **config,
        "vocab_size": embed.vocab,
        "max_position_embeddings": position.size,
        "projection_dim": width,
        "projection_size": width,
        "eos_token_id": OLD_EOS_ID if pooling is None else pooling.token_id,
    }


def image_config(tower: Model) -> ConfigDict | None:
    """The config of an image tower."""
    config = tower_config(tower)
    embed = find_part(tower.encoder, Patches)
    if config is None or embed is None or embed.projection != LinearProjection():
        return None
    return {
        **config,
        "image_size": embed.image_size[0] if len(set(embed.image_size)) == 1 else list(embed.image_size),
        "patch_size": embed.patch_size[0] if len(set(embed.patch_size)) == 1 else list(embed.patch_size),
        "num_channels": embed.channels,
        "projection_dim": projection_width(tower),
    }


def projection_width(tower: Model) -> int:
    """The width of the vectors of a tower; that of its states where it has no projection."""
    projection = find_part(tower.head, ProjectionHead)
    width = 0 if tower.encoder is None else tower.encoder.d_model
    return width if projection is None else projection.width


def towers_config(family: str) -> Callable[[Model], ConfigDict | None]:
    """The writer of both towers, and of an image tower with classes."""

    def write(spec: Model) -> ConfigDict | None:
        towers = spec if isinstance(spec, Towers) else None
        image = image_config(spec if towers is None else towers.image)
        text = {} if towers is None else text_config(towers.text)
        if image is None or text is None:
            return None
        config: ConfigDict = {"vision_config": {"model_type": f"{family}_vision_model", **image}}
        if towers is not None:
            config["text_config"] = {"model_type": f"{family}_text_model", **text}
            config |= {"projection_dim": projection_width(towers.text), "logit_scale_init_value": towers.logit_scale}
        return config

    return write


def without_towers(write: Callable[[Model], ConfigDict | None]) -> Callable[[Model], ConfigDict | None]:
    """The writer of one tower; None for both."""
    return lambda spec: None if isinstance(spec, Towers) else write(spec)


register_config_writer("clip", "CLIP")(towers_config("clip"))
register_config_writer("siglip", "Siglip")(towers_config("siglip"))
for family_name, prefix in (("clip", "CLIP"), ("siglip", "Siglip")):
    register_config_writer(f"{family_name}_text_model", f"{prefix}Text")(without_towers(text_config))
    register_config_writer(f"{family_name}_vision_model", f"{prefix}Vision")(without_towers(image_config))
