"""CLIP and SigLIP: a text encoder and an image encoder, compared by their vectors; and each of the towers alone."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core import (
    Attention,
    Bidirectional,
    Block,
    Causal,
    ClassificationHead,
    Embeddings,
    FeedForward,
    FirstToken,
    LayerNorm,
    Learned,
    Model,
    NoHead,
    NoNorm,
    Normal,
    Pooled,
    Stack,
    pre,
)
from headwater.core.base import HeadSpec, PoolingSpec
from headwater.core.init import InitRules
from headwater.families.registry import read_activation, register_family
from headwater.families.vision_layouts import OPENAI_CLIP_NAMES
from headwater.families.vit import MAX_IMAGE_SIDE, check_patches
from headwater.variants.image_heads import (
    AttentionPooling,
    FinalToken,
    FirstTokenOf,
    HighestToken,
    NormedPool,
    PatchMean,
    ProjectionHead,
)
from headwater.variants.patches import Patches
from headwater.variants.towers import Towers
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map

OLD_EOS_ID = 2  # in the config of the first CLIP models, which pool the highest id


@dataclass(frozen=True)
class TowerDefaults:
    """What CLIP and SigLIP assume where their config.json says nothing."""

    vocab: int
    max_positions: int
    text_width: int
    text_d_ff: int
    text_heads: int
    patch: int
    activation: str
    eps: float


CLIP = TowerDefaults(49408, 77, 512, 2048, 8, 32, "quick_gelu", 1e-5)
SIGLIP = TowerDefaults(32000, 64, 768, 3072, 12, 16, "gelu_pytorch_tanh", 1e-6)

# -------------------------------------------------------------------------------------------------------------- names

LAYER_TEMPLATE = """
    {0}encoder.layers.{{i}}.self_attn.q_proj    {1}encoder.layers.{{i}}.self_attn.q
    {0}encoder.layers.{{i}}.self_attn.k_proj    {1}encoder.layers.{{i}}.self_attn.k
    {0}encoder.layers.{{i}}.self_attn.v_proj    {1}encoder.layers.{{i}}.self_attn.v
    {0}encoder.layers.{{i}}.self_attn.out_proj  {1}encoder.layers.{{i}}.self_attn.out
    {0}encoder.layers.{{i}}.layer_norm1         {1}encoder.layers.{{i}}.self_attn_norm
    {0}encoder.layers.{{i}}.layer_norm2         {1}encoder.layers.{{i}}.ffn_norm
    {0}encoder.layers.{{i}}.mlp.fc1             {1}encoder.layers.{{i}}.ffn.up
    {0}encoder.layers.{{i}}.mlp.fc2             {1}encoder.layers.{{i}}.ffn.down
    {0}embeddings.position_ids                  -
"""
TEXT_TEMPLATE = """
    {0}embeddings.token_embedding               {1}encoder.embed.tokens
    {0}embeddings.position_embedding            {1}encoder.embed.position.table
    {0}final_layer_norm                         {1}encoder.final_norm
"""
IMAGE_TEMPLATE = """
    {0}embeddings.class_embedding               {1}encoder.embed.class_token
    {0}embeddings.patch_embedding               {1}encoder.embed.projection
    {0}embeddings.position_embedding            {1}encoder.embed.position.table
    {0}pre_layrnorm                             {1}encoder.embed.norm
"""
POOL_TEMPLATE = """
    {0}head.probe                               {1}head.probe : squeeze, squeeze
    {0}head.attention.in_proj_weight            {1}head.{{q,k,v}}.weight : split
    {0}head.attention.in_proj_bias              {1}head.{{q,k,v}}.bias : split
    {0}head.attention.out_proj                  {1}head.out
    {0}head.layernorm                           {1}head.norm
    {0}head.mlp.fc1                             {1}head.ffn.up
    {0}head.mlp.fc2                             {1}head.ffn.down
"""
IGNORED_POOL = name_map(
    "\n".join(
        f"[vision_model.]head.{name}  -"
        for name in (
            "probe", "attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj", "layernorm",
            "mlp.fc1", "mlp.fc2",
        )
    )
)  # fmt: skip


def text_names(file: str, ours: str = "") -> NameMap:
    """The names of a text tower: file, its prefix in the checkpoint; ours, that of its parameters."""
    return name_map((LAYER_TEMPLATE + TEXT_TEMPLATE).format(file, ours))


def image_names(file: str, ours: str = "") -> NameMap:
    """The names of an image tower, without its head."""
    return name_map((LAYER_TEMPLATE + IMAGE_TEMPLATE).format(file, ours))


# a tower that was saved alone may lack the prefix
ALONE_TEXT = "[text_model.]"
ALONE_IMAGE = "[vision_model.]"
NO_NAMES = name_map("")
CLIP_HEADS = {
    "similarity": text_names("text_model.", "text.")
    + image_names("vision_model.", "image.")
    + name_map("""
        vision_model.post_layernorm  image.head.norm
        text_projection.weight       text.head.out.weight
        visual_projection            image.head.out
        logit_scale                  logit_scale
    """)
    + OPENAI_CLIP_NAMES,
    "image_classification": image_names("vision_model.")
    + name_map("classifier  head.out\nvision_model.post_layernorm  -"),
}
SIGLIP_HEADS = {
    "similarity": text_names("text_model.", "text.")
    + image_names("vision_model.", "image.")
    + name_map(POOL_TEMPLATE.format("vision_model.", "image."))
    + name_map("""
        vision_model.post_layernorm  image.encoder.final_norm
        text_model.head              text.head.out
        logit_scale                  logit_scale : squeeze
        logit_bias                   logit_offset : squeeze
    """),
    "image_classification": image_names("vision_model.")
    + name_map("classifier  head.out\nvision_model.post_layernorm  encoder.final_norm")
    + IGNORED_POOL,
}

# -------------------------------------------------------------------------------------------------------------- specs


def block_of(config: HFConfig, defaults: TowerDefaults, heads: int, d_ff: int, causal: bool) -> Block:
    """A pre-norm layer of either tower."""
    norm = LayerNorm(config.get_float("layer_norm_eps", default=defaults.eps))
    attn = Attention(
        config.get_int("num_attention_heads", default=heads),
        bias="qkvo",
        mask=Causal() if causal else Bidirectional(),
        dropout=config.get_float("attention_dropout", default=0.0),
    )
    activation = read_activation(config, "hidden_act", default=defaults.activation)
    ffn = FeedForward(config.get_int("intermediate_size", default=d_ff), activation)
    return Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)))


def text_model(config: HFConfig, defaults: TowerDefaults, head: HeadSpec, causal: bool) -> Model:
    """The text tower: tokens and learned positions, and a norm after the last layer."""
    config.ignore("projection_dim", "projection_size")
    block = block_of(config, defaults, defaults.text_heads, defaults.text_d_ff, causal)
    position = Learned(config.get_int("max_position_embeddings", default=defaults.max_positions))
    embed = Embeddings(config.get_int("vocab_size", default=defaults.vocab), position)
    d_model = config.get_int("hidden_size", default=defaults.text_width)
    layers = (block,) * config.get_num_layers("num_hidden_layers", default=12)
    stack = Stack(d_model, embed, layers, block.branches[0].norm)
    return Model(encoder=stack, head=head, init=clip_init(d_model, len(layers)))


def image_model(config: HFConfig, defaults: TowerDefaults, head: HeadSpec, class_token: bool) -> Model:
    """The image tower: CLIP's has a class token and a norm before its layers, SigLIP's a norm after them."""
    config.ignore("projection_dim")
    block = block_of(config, defaults, 12, 3072, causal=False)
    norm = block.branches[0].norm
    image = config.get_pair("image_size", maximum=MAX_IMAGE_SIDE, default=224)
    patch = config.get_pair("patch_size", maximum=MAX_IMAGE_SIDE, default=defaults.patch)
    check_patches(image, patch, config.where)
    channels = config.get_int("num_channels", maximum=1024, default=3)
    embed_norm = norm if class_token else NoNorm()
    embed = Patches(image, patch, channels, int(class_token), bias=not class_token, norm=embed_norm)
    d_model = config.get_int("hidden_size", default=768)
    layers = (block,) * config.get_num_layers("num_hidden_layers", default=12)
    stack = Stack(d_model, embed, layers, NoNorm() if class_token else norm)
    return Model(encoder=stack, head=head, init=clip_init(d_model, len(layers)))


def clip_init(d_model: int, num_layers: int) -> InitRules:
    """The initialization of the original CLIP: by the width, and smaller where the residual stream is written."""
    width = d_model**-0.5
    written = Normal(width * (2 * max(num_layers, 1)) ** -0.5)
    return (
        ("*embed.tokens.weight", Normal(0.02)),
        ("*embed.position.table.weight", Normal(0.01)),
        ("*embed.*", Normal(0.02)),
        ("*self_attn.out.weight", written),
        ("*ffn.down.weight", written),
        ("*ffn.up.weight", Normal((2 * d_model) ** -0.5)),
        ("*", Normal(width)),
    )


def eos_pooling(config: HFConfig) -> PoolingSpec:
    """The state of the end of text: its first place, or the highest id in the config of the first models."""
    eos = config.get_int("eos_token_id", minimum=0, default=49407)
    return HighestToken() if eos == OLD_EOS_ID else FirstTokenOf(eos)


def siglip_pooling(config: HFConfig) -> AttentionPooling:
    """A learned query over the patches."""
    norm = LayerNorm(config.get_float("layer_norm_eps", default=SIGLIP.eps))
    activation = read_activation(config, "hidden_act", default=SIGLIP.activation)
    d_ff = config.get_int("intermediate_size", default=3072)
    return AttentionPooling(config.get_int("num_attention_heads", default=12), d_ff, norm, activation)


def siglip_text_head(config: HFConfig) -> ProjectionHead:
    """A linear layer on the last position."""
    width = config.get_int("projection_size", default=config.get_int("hidden_size", default=SIGLIP.text_width))
    return ProjectionHead(width, FinalToken(), bias=True)


@register_family("clip", body_names=NO_NAMES, head_names=CLIP_HEADS)
def read_clip_spec(config: HFConfig, head_type: str) -> Model:
    """A causal text tower and an image tower with a class token."""
    scale = config.get_float("logit_scale_init_value", default=2.6592)
    width = config.get_int("projection_dim", default=512)
    image = config.section("vision_config", override="vision_config_dict")
    norm = LayerNorm(image.get_float("layer_norm_eps", default=CLIP.eps))
    if head_type == "image_classification":
        config.ignore("text_config", "text_config_dict")
        return image_model(image, CLIP, ClassificationHead(len(config.get_labels()), Pooled(PatchMean(1))), True)
    text = config.section("text_config", override="text_config_dict")
    return Towers(
        text=text_model(text, CLIP, ProjectionHead(width, eos_pooling(text)), causal=True),
        image=image_model(image, CLIP, ProjectionHead(width, FirstToken(), norm), class_token=True),
        logit_scale=scale,
    )


@register_family("siglip", body_names=NO_NAMES, head_names=SIGLIP_HEADS)
def read_siglip_spec(config: HFConfig, head_type: str) -> Model:
    """A bidirectional text tower that pools its last position, and an image tower that pools by attention."""
    config.ignore("projection_dim", "logit_scale_init_value")
    image = config.section("vision_config", override="vision_config_dict")
    if head_type == "image_classification":
        config.ignore("text_config", "text_config_dict")
        return image_model(image, SIGLIP, ClassificationHead(len(config.get_labels()), Pooled(PatchMean(0))), False)
    text = config.section("text_config", override="text_config_dict")
    return Towers(
        text=text_model(text, SIGLIP, siglip_text_head(text), causal=False),
        image=image_model(image, SIGLIP, siglip_pooling(image), class_token=False),
        logit_scale=2.302585,
        logit_offset=-10.0,
    )


@register_family(
    "clip_text_model",
    body_names=text_names(ALONE_TEXT),
    head_names={"hidden_states": NO_NAMES, "projection": name_map("text_projection  head.out")},
)
def read_clip_text_spec(config: HFConfig, head_type: str) -> Model:
    """The text tower of CLIP."""
    width = config.get_int("projection_dim", default=512)
    head = ProjectionHead(width, eos_pooling(config)) if head_type == "projection" else NoHead()
    return text_model(config, CLIP, head, causal=True)


@register_family(
    "clip_vision_model",
    body_names=image_names(ALONE_IMAGE),
    head_names={
        "pooler": name_map(f"{ALONE_IMAGE}post_layernorm  head.norm"),
        "hidden_states": name_map(f"{ALONE_IMAGE}post_layernorm  -"),
        "projection": name_map(f"{ALONE_IMAGE}post_layernorm  head.norm\nvisual_projection  head.out"),
    },
)
def read_clip_vision_spec(config: HFConfig, head_type: str) -> Model:
    """The image tower of CLIP."""
    norm = LayerNorm(config.get_float("layer_norm_eps", default=CLIP.eps))
    width = config.get_int("projection_dim", default=512)
    heads: dict[str, HeadSpec] = {
        "projection": ProjectionHead(width, FirstToken(), norm),
        "pooler": NormedPool(FirstToken(), norm),
        "hidden_states": NoHead(),
    }
    return image_model(config, CLIP, heads[head_type], class_token=True)


@register_family(
    "siglip_text_model",
    body_names=text_names(ALONE_TEXT),
    head_names={"pooler": name_map(f"{ALONE_TEXT}head  head.out"), "hidden_states": name_map(f"{ALONE_TEXT}head  -")},
)
def read_siglip_text_spec(config: HFConfig, head_type: str) -> Model:
    """The text tower of SigLIP."""
    head = siglip_text_head(config) if head_type == "pooler" else NoHead()
    return text_model(config, SIGLIP, head, causal=False)


@register_family(
    "siglip_vision_model",
    body_names=image_names(ALONE_IMAGE) + name_map(f"{ALONE_IMAGE}post_layernorm  encoder.final_norm"),
    head_names={"pooler": name_map(POOL_TEMPLATE.format(ALONE_IMAGE, "")), "hidden_states": IGNORED_POOL},
)
def read_siglip_vision_spec(config: HFConfig, head_type: str) -> Model:
    """The image tower of SigLIP."""
    head = siglip_pooling(config) if head_type == "pooler" else NoHead()
    return image_model(config, SIGLIP, head, class_token=False)
