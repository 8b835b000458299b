"""Weights of ViT and CLIP under the names of timm, torchvision and OpenAI CLIP are read, and give the same outputs."""

from __future__ import annotations

import json
import re

import pytest
import torch

from headwater.errors import BadFile
from headwater.families.convert import convert
from headwater.families.hf_folder import LoadedModel, save_hf_folder
from headwater.families.load import load
from headwater.families.registry import FAMILIES
from headwater.weights.hf_config import HFConfig
from headwater.weights.shards import open_weights, save_weights

VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
       "patch_size": 8, "num_labels": 3, "layer_norm_eps": 1e-6}  # fmt: skip
TOWER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = TOWER | {"vocab_size": 40, "max_position_embeddings": 9, "eos_token_id": 39}
TEXT = TOWER | {"vocab_size": 40, "max_position_embeddings": 9, "eos_token_id": 39}
CLIP = {"text_config": TEXT, "vision_config": TOWER | {"image_size": 16, "patch_size": 8}, "projection_dim": 12}


def tiny(tmp_path, model_type, head, config):
    config = {"model_type": model_type, **config}
    model = FAMILIES[model_type].read_spec(HFConfig(dict(config)), head).build(seed=0).eval()
    architecture = {"image_classification": "ViTForImageClassification", "similarity": "CLIPModel",
                    "distilled": "DeiTForImageClassificationWithTeacher"}[head]  # fmt: skip
    return save_hf_folder(
        LoadedModel(model, None, {**config, "architectures": [architecture]}, tmp_path, head), tmp_path / "m"
    )


def renamed(folder, target, rules, fused):
    """The folder with other names; fused: (pattern of q, name of q, k and v together)."""
    weights = dict(open_weights(folder))
    out = {}
    for name, tensor in weights.items():
        if match := re.fullmatch(fused[0], name):
            k, v = (weights[name.replace(fused[2], other)] for other in fused[3])
            out[match.expand(fused[1])] = torch.cat((tensor, k, v))
            continue
        if any(other in name for other in fused[3]):
            continue
        for pattern, new in rules:
            if re.search(pattern, name):
                out[re.sub(pattern, new, name)] = tensor.t().contiguous() if name in TRANSPOSED else tensor
                break
        else:
            out[name] = tensor
    target.mkdir()
    save_weights(target, out)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config))
    return target


TRANSPOSED = ("text_projection.weight", "visual_projection.weight")
QKV = "attention.attention.query", ("attention.attention.key", "attention.attention.value")
TIMM = [
    (r"^vit\.embeddings\.cls_token", "cls_token"), (r"^vit\.embeddings\.position_embeddings", "pos_embed"),
    (r"^vit\.embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^vit\.encoder\.layer\.(\d+)\.attention\.output\.dense", r"blocks.\1.attn.proj"),
    (r"^vit\.encoder\.layer\.(\d+)\.layernorm_before", r"blocks.\1.norm1"),
    (r"^vit\.encoder\.layer\.(\d+)\.layernorm_after", r"blocks.\1.norm2"),
    (r"^vit\.encoder\.layer\.(\d+)\.intermediate\.dense", r"blocks.\1.mlp.fc1"),
    (r"^vit\.encoder\.layer\.(\d+)\.output\.dense", r"blocks.\1.mlp.fc2"), (r"^vit\.layernorm", "norm"),
    (r"^classifier", "head"),
]  # fmt: skip
TORCHVISION = [
    (r"^vit\.embeddings\.cls_token", "class_token"),
    (r"^vit\.embeddings\.position_embeddings", "encoder.pos_embedding"),
    (r"^vit\.embeddings\.patch_embeddings\.projection", "conv_proj"),
    (r"^vit\.encoder\.layer\.(\d+)\.attention\.output\.dense",
     r"encoder.layers.encoder_layer_\1.self_attention.out_proj"),
    (r"^vit\.encoder\.layer\.(\d+)\.layernorm_before", r"encoder.layers.encoder_layer_\1.ln_1"),
    (r"^vit\.encoder\.layer\.(\d+)\.layernorm_after", r"encoder.layers.encoder_layer_\1.ln_2"),
    (r"^vit\.encoder\.layer\.(\d+)\.intermediate\.dense", r"encoder.layers.encoder_layer_\1.mlp.0"),
    (r"^vit\.encoder\.layer\.(\d+)\.output\.dense", r"encoder.layers.encoder_layer_\1.mlp.3"),
    (r"^vit\.layernorm", "encoder.ln"), (r"^classifier", "heads.head"),
]  # fmt: skip
FUSED = {
    "timm": (r"vit\.encoder\.layer\.(\d+)\.attention\.attention\.query\.(\w+)", r"blocks.\1.attn.qkv.\2", *QKV),
    "torchvision": (r"vit\.encoder\.layer\.(\d+)\.attention\.attention\.query\.(\w+)",
                    r"encoder.layers.encoder_layer_\1.self_attention.in_proj_\2", *QKV),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "rules"), [("timm", TIMM), ("torchvision", TORCHVISION)])
def test_vit_of_another_library(layout, rules, tmp_path):
    folder = tiny(tmp_path, "vit", "image_classification", VIT)
    pixels = torch.randn(2, 3, 16, 16)
    expected = load(folder).model(pixels)
    other = renamed(folder, tmp_path / "other", rules, FUSED[layout])
    assert not any(name.startswith("vit.") for name in open_weights(other))
    assert torch.equal(load(other).model(pixels), expected)
    again = save_hf_folder(load(other), tmp_path / "again")  # written with the names of transformers
    assert set(open_weights(again)) == set(open_weights(folder))


WIDE = VIT | {"hidden_size": 64, "num_attention_heads": 1}


@pytest.mark.parametrize(("layout", "rules"), [("timm", TIMM), ("torchvision", TORCHVISION)])
def test_a_bare_vit_checkpoint_is_converted(layout, rules, tmp_path):
    folder = tiny(tmp_path, "vit", "image_classification", WIDE)
    other = renamed(folder, tmp_path / "other", rules, FUSED[layout])
    torch.save(dict(open_weights(other)), tmp_path / "vit.pth")
    result = convert(tmp_path / "vit.pth", tmp_path / "converted")
    assert "no image processor" in result.tokenizer_note
    pixels = torch.randn(2, 3, 16, 16)
    assert torch.equal(load(tmp_path / "converted").model(pixels), load(folder).model(pixels))
    narrow = dict(open_weights(renamed(tiny(tmp_path / "n", "vit", "image_classification", VIT), tmp_path / "narrow",
                                       rules, FUSED[layout])))  # fmt: skip
    torch.save(narrow, tmp_path / "narrow.pth")
    with pytest.raises(BadFile, match="heads of 64 channels"):
        convert(tmp_path / "narrow.pth", tmp_path / "refused")


def test_clip_of_openai(tmp_path):
    folder = tiny(tmp_path, "clip", "similarity", CLIP)
    rules = []
    for ours, theirs in (("text_model", "transformer"), ("vision_model", "visual.transformer")):
        layer = rf"^{ours}\.encoder\.layers\.(\d+)\."
        new = rf"{theirs}.resblocks.\1."
        rules += [(layer + r"self_attn\.out_proj", new + "attn.out_proj"), (layer + "layer_norm1", new + "ln_1"),
                  (layer + "layer_norm2", new + "ln_2"), (layer + r"mlp\.fc1", new + "mlp.c_fc"),
                  (layer + r"mlp\.fc2", new + "mlp.c_proj")]  # fmt: skip
    rules += [
        (r"^text_model\.embeddings\.token_embedding", "token_embedding"),
        (r"^text_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
        (r"^text_model\.final_layer_norm", "ln_final"), (r"^text_projection\.weight", "text_projection"),
        (r"^vision_model\.embeddings\.patch_embedding", "visual.conv1"),
        (r"^vision_model\.embeddings\.class_embedding", "visual.class_embedding"),
        (r"^vision_model\.embeddings\.position_embedding\.weight", "visual.positional_embedding"),
        (r"^vision_model\.pre_layrnorm", "visual.ln_pre"), (r"^vision_model\.post_layernorm", "visual.ln_post"),
        (r"^visual_projection\.weight", "visual.proj"),
    ]  # fmt: skip
    ids, pixels = torch.randint(0, 39, (2, 9)), torch.randn(3, 3, 16, 16)
    expected = load(folder).model(ids, source=pixels)
    half = renamed(folder, tmp_path / "half", rules,
                   (r"(text_model)\.encoder\.layers\.(\d+)\.self_attn\.q_proj\.(\w+)",
                    r"transformer.resblocks.\2.attn.in_proj_\3", "q_proj", ("k_proj", "v_proj")))  # fmt: skip
    weights = dict(open_weights(folder))
    out = {name: tensor for name, tensor in open_weights(half).items() if "vision_model" not in name}
    for i in range(2):
        for kind in ("weight", "bias"):
            parts = [weights[f"vision_model.encoder.layers.{i}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            out[f"visual.transformer.resblocks.{i}.attn.in_proj_{kind}"] = torch.cat(parts)
    (tmp_path / "other").mkdir()
    save_weights(tmp_path / "other", out)
    (tmp_path / "other" / "config.json").write_text((folder / "config.json").read_text())
    assert not any(name.startswith(("text_model", "vision_model")) for name in out)
    assert torch.equal(load(tmp_path / "other").model(ids, source=pixels), expected)
