"""Parity of CLIP and SigLIP: towers, projections and logits equal transformers within 2e-5 through files, both ways."""

from __future__ import annotations

import functools
import json
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.core import Causal, FeedForward, LayerNorm, Transformer
from headwater.core.init import init_buffers
from headwater.errors import BadFile, BadInput
from headwater.families import FAMILIES
from headwater.families.hf_folder import load_hf_folder, save_hf_folder
from headwater.families.load import load, save
from headwater.parts import swap
from headwater.variants.image_heads import FinalToken, FirstTokenOf, HighestToken
from headwater.variants.towers import MAX_LOGIT_SCALE, TwoTowers
from headwater.weights.hf_config import HFConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

LIMIT, SHOWS = 2e-5, 4e-4
T.logging.set_verbosity_error()
T.logging.disable_progress_bar()
EOS = 59
TEXT: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 12, "projection_dim": 24, "eos_token_id": EOS,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "projection_dim": 24,
}  # fmt: skip
NAMES = (
    "CLIPModel", "CLIPTextModel", "CLIPVisionModel", "CLIPTextModelWithProjection", "CLIPVisionModelWithProjection",
    "CLIPForImageClassification", "SiglipModel", "SiglipTextModel", "SiglipVisionModel", "SiglipForImageClassification",
)  # fmt: skip
IDS = torch.randint(5, 50, (3, 12), generator=torch.Generator().manual_seed(0))
IDS[0, 5] = IDS[0, 8] = IDS[1, 11] = IDS[2, 3] = EOS
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def config_of(name: str, **changes: Any) -> Any:
    family = "CLIP" if name.startswith("CLIP") else "Siglip"
    if "Text" in name:
        return getattr(T, f"{family}TextConfig")(**TEXT | changes)
    if "Vision" in name:
        return getattr(T, f"{family}VisionConfig")(**IMAGE | changes)
    text = TEXT | changes | ({"projection_size": 40} if family == "Siglip" else {})
    return getattr(T, f"{family}Config")(text_config=text, vision_config=IMAGE, projection_dim=24)


def public(name: str, **changes: Any) -> T.PreTrainedModel:
    torch.manual_seed(zlib.crc32(name.encode()))
    model = getattr(T, name)(config_of(name, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], tuple[T.PreTrainedModel, Path]]:
    @functools.cache
    def save_case(name: str) -> tuple[T.PreTrainedModel, Path]:
        model, folder = public(name), tmp_path_factory.mktemp("saved")
        model.save_pretrained(folder)
        return model, folder

    return save_case


@torch.no_grad()
def theirs_of(model: T.PreTrainedModel, pooled: bool = False) -> torch.Tensor:
    """The output of a public model, in the form of our heads."""
    name = type(model).__name__
    if name in ("CLIPModel", "SiglipModel"):
        return model(input_ids=IDS, pixel_values=PIXELS).logits_per_text
    out = model(input_ids=IDS) if "Text" in name else model(pixel_values=PIXELS)
    keys = ("logits", "text_embeds", "image_embeds", "pooler_output" if pooled else "last_hidden_state")
    return next(out[key] for key in keys if key in out)


@torch.no_grad()
def ours_of(model: Transformer, name: str) -> torch.Tensor:
    if isinstance(model, TwoTowers):
        return model(IDS, source=PIXELS)
    return model(IDS if "Text" in name else PIXELS)


def distance(ours: Transformer, theirs: T.PreTrainedModel, pooled: bool = False) -> float:
    expected = theirs_of(theirs, pooled)
    got = ours_of(ours, type(theirs).__name__)
    return (got - expected).abs().max().item() / max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_those_of_transformers_in_both_directions(name, saved, tmp_path):
    theirs, folder = saved(name)
    loaded = load_hf_folder(folder)
    assert distance(loaded.model, theirs) < LIMIT
    back = getattr(T, name).from_pretrained(save_hf_folder(loaded, tmp_path / "back")).eval()
    assert distance(loaded.model, back) < LIMIT


@pytest.mark.parametrize("name", ["CLIPVisionModel", "SiglipTextModel", "SiglipVisionModel"])
def test_pooled_outputs_equal_those_of_transformers(name, saved):
    theirs, folder = saved(name)
    assert distance(load(folder, head="pooler").model, theirs, pooled=True) < LIMIT


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_two_towers_without_a_config_are_written_for_transformers(name, saved, tmp_path):
    theirs, folder = saved(name)
    ours = load(folder).model
    back = getattr(T, name).from_pretrained(save(ours, tmp_path / "new", layout="transformers")).eval()
    assert distance(ours, back) < LIMIT
    native = load(save(ours, tmp_path / "native", layout="headwater")).model
    weights = ours.state_dict()
    assert all(torch.equal(tensor, weights[path]) for path, tensor in native.state_dict().items())
    assert distance(native, theirs) < LIMIT


def test_the_end_of_text_of_the_first_clip_models_is_the_highest_id(tmp_path):
    theirs = public("CLIPTextModelWithProjection", eos_token_id=2)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path).model
    assert isinstance(ours.spec.head.pooling, HighestToken)
    assert distance(ours, theirs) < LIMIT


def test_old_files_of_a_tower_have_a_prefix(saved, tmp_path):
    from headwater.weights.shards import open_weights, save_weights

    theirs, folder = saved("CLIPTextModel")
    weights = open_weights(folder)
    save_weights(tmp_path, {f"text_model.{name}": weights[name] for name in weights})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert distance(load(tmp_path).model, theirs) < LIMIT


def test_a_second_dictionary_overrides_the_first(saved, tmp_path):
    """Old configs hold text_config_dict beside text_config."""
    folder = saved("CLIPModel")[1]
    config = json.loads((folder / "config.json").read_text())
    config["text_config_dict"] = {"hidden_act": "gelu"}
    config["vision_config_dict"] = None
    spec = FAMILIES["clip"].read_spec(HFConfig(config), "similarity")
    assert spec.text.encoder.layers[0].branches[1].layer.activation == "gelu"
    assert spec.image.encoder.layers[0].branches[1].layer.activation == "quick_gelu"


def test_an_image_of_another_size_is_interpolated(saved):
    theirs, folder = saved("CLIPVisionModelWithProjection")
    pixels = torch.randn(1, 3, 48, 40)
    with torch.no_grad():
        expected = theirs(pixel_values=pixels, interpolate_pos_encoding=True).image_embeds
        assert (load(folder).model(pixels) - expected).abs().max() < LIMIT * float(expected.abs().max())


@torch.no_grad()
def test_pixels_beyond_the_last_whole_patch_are_not_read(tmp_path):
    theirs = public("SiglipVisionModel", image_size=30)  # as the 384 pixels in patches of 14 of the large SigLIP
    theirs.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 30, 30)
    expected = theirs(pixel_values=pixels).last_hidden_state
    got = load(tmp_path).model(pixels)
    assert got.shape == expected.shape == (2, 9, 40)
    assert (got - expected).abs().max() < LIMIT * float(expected.abs().max())


# ------------------------------------------------------------------------------------------------------ planted faults

FAULTS = {
    "gelu for quick_gelu": ("CLIPModel", FeedForward, lambda part: replace(part, activation="gelu")),
    "another eps": ("CLIPModel", LayerNorm, lambda part: replace(part, eps=1e-1)),
    "the highest id for the first end of text": (
        "CLIPTextModelWithProjection",
        FirstTokenOf,
        lambda part: FinalToken(),
    ),
    "SigLIP pools the first place": ("SiglipModel", FinalToken, lambda part: FirstTokenOf(int(IDS[0, 0]))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_part_would_show(fault, saved):
    name, kind, change = FAULTS[fault]
    theirs, folder = saved(name)
    loaded = load(folder)
    model = swap(loaded.spec, kind, change).build(seed=0)
    model.load_state_dict(loaded.model.state_dict())
    init_buffers(model)
    assert distance(model.eval(), theirs) > SHOWS


def test_a_text_tower_that_sees_the_future_would_show(saved):
    from headwater.core import Attention, Bidirectional

    theirs, folder = saved("CLIPModel")
    loaded = load(folder)
    spec = swap(loaded.spec, Attention, lambda attn: replace(attn, mask=Bidirectional()))
    assert any(attn.mask == Causal() for attn in [loaded.spec.text.encoder.layers[0].branches[0].layer])
    model = spec.build(seed=0)
    model.load_state_dict(loaded.model.state_dict())
    assert distance(model.eval(), theirs) > SHOWS


# ----------------------------------------------------------------------------------------------- scale, counts, faults


def test_the_scale_is_clamped():
    model = FAMILIES["clip"].read_spec(HFConfig({"text_config": TEXT, "vision_config": IMAGE}), "similarity").build(0)
    for value, expected in ((9.0, MAX_LOGIT_SCALE), (-1.0, 0.0), (3.0, 3.0)):
        model.logit_scale.data.fill_(value)
        model.clamp_scale()
        assert float(model.logit_scale) == pytest.approx(expected)


def test_initial_weights_are_those_of_the_original_clip():
    model = FAMILIES["clip"].read_spec(HFConfig({"text_config": TEXT, "vision_config": IMAGE}), "similarity").build(0)
    assert float(model.logit_scale.exp()) == pytest.approx(1 / 0.07, rel=1e-3)
    layer = model.text.encoder.layers[0]
    assert float(layer.self_attn.q.weight.std()) == pytest.approx(32**-0.5, rel=0.1)
    assert float(layer.self_attn.out.weight.std()) == pytest.approx(32**-0.5 * 4**-0.5, rel=0.1)
    assert float(layer.ffn.up.weight.std()) == pytest.approx(64**-0.5, rel=0.1)


def test_two_towers_need_both_inputs(saved):
    model = load(saved("CLIPModel")[1]).model
    with pytest.raises(BadInput, match="two towers compare texts with images"):
        model(IDS)
    with pytest.raises(BadInput, match="no common hidden states"):
        model.hidden_states(model.inputs(IDS))


def test_a_config_with_a_wrong_key_in_a_tower_is_refused(saved, tmp_path):
    folder = saved("CLIPModel")[1]
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_sise"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadFile, match="vision_config: unknown settings.*patch_sise"):
        load(tmp_path)


B16, L14 = {"patch_size": 16}, {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                                "num_attention_heads": 16, "patch_size": 14}  # fmt: skip
WIDE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("family", "settings", "count"),
    [
        ("clip", {}, 151_277_313),
        ("clip", {"vision_config": B16}, 149_620_737),
        ("clip", {"text_config": WIDE, "vision_config": L14, "projection_dim": 768}, 427_616_513),
        ("clip", {"text_config": WIDE, "vision_config": L14 | {"image_size": 336}, "projection_dim": 768}, 427_944_193),
        ("siglip", {}, 203_155_970),
        ("siglip", {"vision_config": {"image_size": 256}}, 203_202_050),
        (
            "siglip",
            {"text_config": SO400M, "vision_config": SO400M | {"image_size": 384, "patch_size": 14}},
            877_960_498,
        ),
    ],
)
def test_counts_equal_the_published_ones(family, settings, count):
    model = FAMILIES[family].read_spec(HFConfig(settings), "similarity").on_meta()
    assert sum(p.numel() for p in model.parameters()) == count
