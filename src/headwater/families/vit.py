"""ViT and DeiT: encoders of image patches, for classes or for the pixels of masked patches."""

from __future__ import annotations

from headwater.core import (
    Attention,
    Block,
    ClassificationHead,
    FeedForward,
    FirstToken,
    LayerNorm,
    Model,
    NoHead,
    Normal,
    Pooled,
    Pooler,
    Stack,
    pre,
)
from headwater.core.base import HeadSpec
from headwater.core.init import Zero
from headwater.errors import BadFile
from headwater.families.config_writers import HF_ACTIVATIONS, ConfigDict, find_part, register_config_writer
from headwater.families.registry import read_activation, register_family
from headwater.families.vision_layouts import (
    TIMM_DISTILLED_NAMES,
    TIMM_HEAD_NAMES,
    TIMM_NAMES,
    TORCHVISION_HEAD_NAMES,
    torchvision_names,
)
from headwater.i18n import _
from headwater.variants.image_heads import DistilledHead, PixelHead
from headwater.variants.patches import LinearProjection, Patches
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map

MAX_IMAGE_SIDE = 8192
MAX_PATCHES = 65_536  # of one image: the attention of more takes more memory than a machine has

BODY_TEMPLATE = """
    [{0}.]embeddings.cls_token                                 encoder.embed.class_token : squeeze, squeeze
    [{0}.]embeddings.distillation_token                        encoder.embed.distillation_token : squeeze, squeeze
    [{0}.]embeddings.mask_token                                encoder.embed.mask_token : squeeze, squeeze
    [{0}.]embeddings.position_embeddings                       encoder.embed.position.table.weight : squeeze
    [{0}.]embeddings.patch_embeddings.projection               encoder.embed.projection
    [{0}.]encoder.layer.{{i}}.attention.attention.query        encoder.layers.{{i}}.self_attn.q
    [{0}.]encoder.layer.{{i}}.attention.attention.key          encoder.layers.{{i}}.self_attn.k
    [{0}.]encoder.layer.{{i}}.attention.attention.value        encoder.layers.{{i}}.self_attn.v
    [{0}.]encoder.layer.{{i}}.attention.output.dense           encoder.layers.{{i}}.self_attn.out
    [{0}.]encoder.layer.{{i}}.layernorm_before                 encoder.layers.{{i}}.self_attn_norm
    [{0}.]encoder.layer.{{i}}.intermediate.dense               encoder.layers.{{i}}.ffn.up
    [{0}.]encoder.layer.{{i}}.output.dense                     encoder.layers.{{i}}.ffn.down
    [{0}.]encoder.layer.{{i}}.layernorm_after                  encoder.layers.{{i}}.ffn_norm
    [{0}.]layernorm                                            encoder.final_norm
"""
# the names that transformers 5 has in memory
RENAMED_TEMPLATE = """
    [{0}.]layers.{{i}}.attention.q_proj                        encoder.layers.{{i}}.self_attn.q
    [{0}.]layers.{{i}}.attention.k_proj                        encoder.layers.{{i}}.self_attn.k
    [{0}.]layers.{{i}}.attention.v_proj                        encoder.layers.{{i}}.self_attn.v
    [{0}.]layers.{{i}}.attention.o_proj                        encoder.layers.{{i}}.self_attn.out
    [{0}.]layers.{{i}}.layernorm_before                        encoder.layers.{{i}}.self_attn_norm
    [{0}.]layers.{{i}}.layernorm_after                         encoder.layers.{{i}}.ffn_norm
    [{0}.]layers.{{i}}.mlp.fc1                                 encoder.layers.{{i}}.ffn.up
    [{0}.]layers.{{i}}.mlp.fc2                                 encoder.layers.{{i}}.ffn.down
"""


def body_names(prefix: str) -> NameMap:
    """The names of the body on disk; those of transformers 5 in memory, timm and torchvision are read too."""
    ours = name_map(BODY_TEMPLATE.format(prefix)) + name_map(RENAMED_TEMPLATE.format(prefix))
    return ours + TIMM_NAMES + torchvision_names()


def head_names(prefix: str) -> dict[str, NameMap]:
    """The names of each head; what another head of the same checkpoint holds is ignored."""
    pooler = name_map(f"[{prefix}.]pooler.dense  -")
    mask = name_map(f"[{prefix}.]embeddings.mask_token  -")
    return {
        "image_classification": name_map("classifier  head.out")
        + TIMM_HEAD_NAMES
        + TORCHVISION_HEAD_NAMES
        + pooler
        + mask,
        "hidden_states": pooler + mask,
        "pooler": name_map(f"[{prefix}.]pooler.dense  head.dense") + mask,
        "masked_image": name_map("decoder.0  head.out") + pooler,
    }


def encoder_spec(config: HFConfig, head: HeadSpec, first_tokens: int, mask_token: bool) -> Model:
    """The encoder of ViT and DeiT: pre-norm, bidirectional, a norm after the last layer."""
    norm = LayerNorm(config.get_float("layer_norm_eps", default=1e-12))
    dropout = config.get_float("hidden_dropout_prob", default=0.0)
    embed = read_patches(config, first_tokens, mask_token, dropout)
    attn = Attention(
        config.get_int("num_attention_heads", default=12),
        head_dim=config.get_optional("get_int", "head_dim"),
        bias="qkvo" if config.get_bool("qkv_bias", default=True) else "o",
        dropout=config.get_float("attention_probs_dropout_prob", default=0.0),
    )
    ffn = FeedForward(config.get_int("intermediate_size", default=3072), read_activation(config, "hidden_act"))
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), dropout)
    num_layers = config.get_num_layers("num_hidden_layers", default=12)
    stack = Stack(config.get_int("hidden_size", default=768), embed, (block,) * num_layers, norm)
    std = config.get_float("initializer_range", default=0.02)
    return Model(encoder=stack, head=head, init=(("*mask_token", Zero()), ("*", Normal(std))))


def read_patches(config: HFConfig, first_tokens: int, mask_token: bool, dropout: float) -> Patches:
    """The patch embedding of ViT and DeiT. The number of patches is bounded before anything is built."""
    image = config.get_pair("image_size", maximum=MAX_IMAGE_SIDE, default=224)
    patch = config.get_pair("patch_size", maximum=MAX_IMAGE_SIDE, default=16)
    check_patches(image, patch, config.where)
    channels = config.get_int("num_channels", maximum=1024, default=3)
    return Patches(image, patch, channels, first_tokens, mask_token=mask_token, dropout=dropout)


def check_patches(image: tuple[int, int], patch: tuple[int, int], where: object) -> None:
    """Refuse an image with no whole patch, or with too many."""
    count = (image[0] // patch[0]) * (image[1] // patch[1])
    if not 1 <= count <= MAX_PATCHES:
        raise BadFile(
            _(
                "{where}: an image of {image} must hold from 1 to {maximum:,} patches of {patch}, it holds {count:,}",
                where=where,
                image="{} x {}".format(*image),
                patch="{} x {}".format(*patch),
                maximum=MAX_PATCHES,
                count=count,
            )
        )


def image_heads(config: HFConfig, head_type: str) -> HeadSpec:
    """The head of a type that ViT and DeiT share."""
    config.ignore("encoder_stride", "pooler_act", "pooler_output_size")
    if head_type == "image_classification":
        return ClassificationHead(len(config.get_labels()), Pooled(FirstToken()))
    if head_type == "pooler":
        return Pooler(FirstToken(), read_activation(config, "pooler_act", default="tanh"))
    if head_type == "masked_image":
        stride = config.get_int("encoder_stride", maximum=MAX_IMAGE_SIDE, default=16)
        if (stride, stride) != config.get_pair("patch_size", default=16):
            raise BadFile(
                _("{where}: encoder_stride must be the patch size, got {stride}", where=config.where, stride=stride)
            )
        return PixelHead(stride, config.get_int("num_channels", default=3))
    return NoHead()


@register_family("vit", body_names=body_names("vit"), head_names=head_names("vit"))
def read_vit_spec(config: HFConfig, head_type: str) -> Model:
    """A class token, then the patches."""
    return encoder_spec(config, image_heads(config, head_type), 1, mask_token=head_type == "masked_image")


DEIT_HEADS = {
    "distilled": name_map("""
        cls_classifier             head.class_out
        distillation_classifier    head.distillation_out
        [deit.]pooler.dense        -
        [deit.]embeddings.mask_token  -
    """)
    + TIMM_DISTILLED_NAMES,
    **head_names("deit"),
}


@register_family("deit", body_names=body_names("deit"), head_names=DEIT_HEADS)
def read_deit_spec(config: HFConfig, head_type: str) -> Model:
    """A class token and a distillation token, then the patches; two heads, whose logits are averaged."""
    head = image_heads(config, head_type)
    if head_type == "distilled":
        head = DistilledHead(len(config.get_labels()))
    return encoder_spec(config, head, 2, mask_token=head_type == "masked_image")


# ------------------------------------------------------------------------------------------------------------ writing


@register_config_writer("vit", "ViT")
def vit_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_vit_spec()."""
    return _image_config(spec, first_tokens=1)


@register_config_writer("deit", "DeiT")
def deit_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_deit_spec()."""
    return _image_config(spec, first_tokens=2)


def _image_config(spec: Model, first_tokens: int) -> ConfigDict | None:
    """The keys of config.json for an encoder of patches with so many first tokens; None for any other model."""
    embed = find_part(spec.encoder, Patches)
    attn = find_part(spec.encoder, Attention)
    ffn = find_part(spec.encoder, FeedForward)
    norm = find_part(getattr(spec.encoder, "layers", ()), LayerNorm)
    if spec.encoder is None or spec.decoder is not None or embed is None or embed.first_tokens != first_tokens:
        return None
    if attn is None or ffn is None or norm is None or embed.projection != LinearProjection():
        return None
    config: ConfigDict = {
        "hidden_size": spec.encoder.d_model,
        "num_hidden_layers": len(spec.encoder.order) or len(spec.encoder.layers),
        "num_attention_heads": attn.heads,
        "intermediate_size": ffn.d_ff,
        "hidden_act": HF_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "layer_norm_eps": norm.eps,
        "image_size": _number_or_pair(embed.image_size),
        "patch_size": _number_or_pair(embed.patch_size),
        "num_channels": embed.channels,
        "qkv_bias": "q" in attn.bias,
        "encoder_stride": embed.patch_size[0],
    }
    if attn.head_dim not in (None, spec.encoder.d_model // attn.heads):
        config["head_dim"] = attn.head_dim
    return config


def _number_or_pair(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
