"""Other layouts of ViT and CLIP weights that are read: timm, torchvision, OpenAI CLIP (and OpenCLIP).

Such a folder needs a config.json of the family; what is saved has the names of transformers.
"""

from __future__ import annotations

from headwater.weights.name_map import NameMap, name_map

TORCHVISION_LAYERS = 48  # its layers are numbered inside a word, encoder_layer_0, so each has rules of its own


def read_only_map(text: str) -> NameMap:
    """A name map for loading alone: the rules before it in a family's table are used for writing."""
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        names, _unused, transforms = line.partition(" : ")
        name, param = names.split()
        written = param.replace("{q,k,v}", "q")
        lines.append(line if param == "-" else f"{name} {param} :{' ' * bool(transforms)}{transforms} unless {written}")
    return name_map("\n".join(lines))


TIMM_NAMES = read_only_map("""
    cls_token                  encoder.embed.class_token : squeeze, squeeze
    dist_token                 encoder.embed.distillation_token : squeeze, squeeze
    pos_embed                  encoder.embed.position.table.weight : squeeze
    patch_embed.proj           encoder.embed.projection
    blocks.{i}.norm1           encoder.layers.{i}.self_attn_norm
    blocks.{i}.attn.qkv        encoder.layers.{i}.self_attn.{q,k,v} : split
    blocks.{i}.attn.proj       encoder.layers.{i}.self_attn.out
    blocks.{i}.norm2           encoder.layers.{i}.ffn_norm
    blocks.{i}.mlp.fc1         encoder.layers.{i}.ffn.up
    blocks.{i}.mlp.fc2         encoder.layers.{i}.ffn.down
    norm                       encoder.final_norm
""")
TIMM_HEAD_NAMES = read_only_map("head  head.out")
TIMM_DISTILLED_NAMES = read_only_map("head  head.class_out\nhead_dist  head.distillation_out")


def torchvision_names() -> NameMap:
    """The names of torchvision's VisionTransformer."""
    names = """
    class_token                encoder.embed.class_token : squeeze, squeeze
    encoder.pos_embedding      encoder.embed.position.table.weight : squeeze
    conv_proj                  encoder.embed.projection
    encoder.ln                 encoder.final_norm
"""
    for i in range(TORCHVISION_LAYERS):
        layer = f"encoder.layers.encoder_layer_{i}"
        names += f"""
    {layer}.ln_1                             encoder.layers.{i}.self_attn_norm
    {layer}.self_attention.in_proj_weight    encoder.layers.{i}.self_attn.{{q,k,v}}.weight : split
    {layer}.self_attention.in_proj_bias      encoder.layers.{i}.self_attn.{{q,k,v}}.bias : split
    {layer}.self_attention.out_proj          encoder.layers.{i}.self_attn.out
    {layer}.ln_2                             encoder.layers.{i}.ffn_norm
    {layer}.mlp.0                            encoder.layers.{i}.ffn.up
    {layer}.mlp.3                            encoder.layers.{i}.ffn.down
    {layer}.mlp.linear_1                     encoder.layers.{i}.ffn.up
    {layer}.mlp.linear_2                     encoder.layers.{i}.ffn.down
"""
    return read_only_map(names)


TORCHVISION_HEAD_NAMES = read_only_map("heads.head  head.out")

OPENAI_LAYER = """
    {0}resblocks.{{i}}.ln_1                 {1}encoder.layers.{{i}}.self_attn_norm
    {0}resblocks.{{i}}.attn.in_proj_weight  {1}encoder.layers.{{i}}.self_attn.{{q,k,v}}.weight : split
    {0}resblocks.{{i}}.attn.in_proj_bias    {1}encoder.layers.{{i}}.self_attn.{{q,k,v}}.bias : split
    {0}resblocks.{{i}}.attn.out_proj        {1}encoder.layers.{{i}}.self_attn.out
    {0}resblocks.{{i}}.ln_2                 {1}encoder.layers.{{i}}.ffn_norm
    {0}resblocks.{{i}}.mlp.c_fc             {1}encoder.layers.{{i}}.ffn.up
    {0}resblocks.{{i}}.mlp.c_proj           {1}encoder.layers.{{i}}.ffn.down
"""
OPENAI_CLIP_NAMES = read_only_map(
    OPENAI_LAYER.format("transformer.", "text.")
    + OPENAI_LAYER.format("visual.transformer.", "image.")
    + """
    token_embedding                    text.encoder.embed.tokens
    positional_embedding               text.encoder.embed.position.table.weight
    ln_final                           text.encoder.final_norm
    text_projection                    text.head.out.weight : transpose
    visual.conv1                       image.encoder.embed.projection
    visual.class_embedding             image.encoder.embed.class_token
    visual.positional_embedding        image.encoder.embed.position.table.weight
    visual.ln_pre                      image.encoder.embed.norm
    visual.ln_post                     image.head.norm
    visual.proj                        image.head.out.weight : transpose
    input_resolution                   -
    context_length                     -
    vocab_size                         -
"""
)
