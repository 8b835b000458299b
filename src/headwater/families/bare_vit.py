"""ViT checkpoints of timm and torchvision without a config.json, which follows from the shapes of their tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import atomic_write
from headwater.weights.pickles import PickleContents
from headwater.weights.shards import save_weights

HEAD_DIM = 64  # of every published size but H, which has 80
HUGE_WIDTH = 1280
# of timm and torchvision: class token, patch convolution, positions, an up projection, head
VIT_TENSORS = (
    ("cls_token", "patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight", "head.weight"),
    ("class_token", "conv_proj.weight", "encoder.pos_embedding", "encoder.layers.encoder_layer_0.mlp.0.weight",
     "heads.head.weight"),
    ("class_token", "conv_proj.weight", "encoder.pos_embedding", "encoder.layers.encoder_layer_0.mlp.linear_1.weight",
     "heads.head.weight"),
)  # fmt: skip


def is_bare_vit(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of a ViT classifier of timm or torchvision."""
    return any(all(name in tensors for name in names) for names in VIT_TENSORS)


def vit_config(tensors: Mapping[str, Tensor], where: object) -> dict[str, Any]:
    """config.json of a ViT classifier of timm or torchvision, from the shapes of its tensors."""
    names = next(names for names in VIT_TENSORS if all(name in tensors for name in names))
    class_token, patches, positions, up, head = (tuple(tensors[name].shape) for name in names)
    numbered = [re.search(r"(?:blocks\.|encoder_layer_)(\d+)\.", name) for name in tensors]
    layers = {match[1] for match in numbered if match}
    grid = round((positions[1] - 1) ** 0.5) if len(positions) == 3 else 0
    width = class_token[-1]
    fits = len(patches) == 4 and patches[2] == patches[3] and grid**2 == positions[1] - 1 and width % HEAD_DIM == 0
    if not fits:
        raise BadFile(
            _(
                "{where}: a ViT without config.json must have square patches and images and heads of {width} channels; "
                "write a config.json beside it",
                where=where,
                width=HEAD_DIM,
            )
        )
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 16 if width == HUGE_WIDTH else width // HEAD_DIM,
        "intermediate_size": up[0],
        "image_size": grid * patches[2],
        "patch_size": patches[2],
        "num_channels": patches[1],
        "layer_norm_eps": 1e-6,
        "id2label": {str(n): f"LABEL_{n}" for n in range(head[0])},
    }


def write_vit_folder(
    folder: Path, contents: PickleContents, output_dir: Path, vocabulary: Path
) -> tuple[dict[str, Tensor], str]:
    """Write a Hugging Face folder of the checkpoint; returns its tensors and a note on what it lacks."""
    tensors = dict(contents.tensors)
    with atomic_write(output_dir / "config.json") as file:
        file.write(json.dumps(vit_config(tensors, folder), indent=2).encode())
    save_weights(output_dir, tensors)
    return tensors, _("the checkpoint has no labels and no image processor; add preprocessor_config.json")
