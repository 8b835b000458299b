"""Parity of image models: equal to transformers within 2e-5 through files, both ways, at other sizes; exact counts."""

from __future__ import annotations

import functools
import json
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.core import Attention, FeedForward, FirstToken, LastToken, LayerNorm, Transformer
from headwater.core.init import init_buffers
from headwater.errors import BadFile, BadInput
from headwater.families import FAMILIES
from headwater.families.hf_folder import LoadedModel, load_hf_folder, save_hf_folder
from headwater.families.load import load, save
from headwater.parts import swap
from headwater.variants.patches import LinearProjectionLayer
from headwater.weights.hf_config import HFConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

LIMIT, SHOWS = 2e-5, 4e-4
T.logging.set_verbosity_error()
T.logging.disable_progress_bar()
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8, "encoder_stride": 8,
}  # fmt: skip
ODD = (
    {"qkv_bias": False, "layer_norm_eps": 1e-6},
    {"hidden_act": "gelu_new", "num_attention_heads": 8, "num_channels": 1, "num_labels": 5},
    {"image_size": (16, 24), "patch_size": (4, 8)},
)


@dataclass(frozen=True)
class Case:
    family: str
    model: str
    settings: tuple[tuple[str, Any], ...]
    number: int = 0

    @property
    def id(self) -> str:
        return f"{self.model}-{self.number}"

    @property
    def image_shape(self) -> tuple[int, ...]:
        size = dict(self.settings)["image_size"]
        return dict(self.settings).get("num_channels", 3), *(size if isinstance(size, tuple) else (size, size))


def cases(family: str, prefix: str, heads: str) -> list[Case]:
    found = []
    for head in heads.split():
        for number, change in enumerate(({}, *ODD)):
            if "Masked" in head and "patch_size" in change:  # transformers reconstructs square images only
                continue
            found.append(Case(family, prefix + head, tuple({**SIZES, **change}.items()), number))
    return found


CASES = [
    *cases("vit", "ViT", "Model ForImageClassification ForMaskedImageModeling"),
    *cases("deit", "DeiT", "Model ForImageClassification ForImageClassificationWithTeacher ForMaskedImageModeling"),
]
by_id = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
BASE = [case for case in CASES if case.number == 0]


def public(case: Case) -> T.PreTrainedModel:
    """The public model with weights drawn wide enough that a wrong term shows."""
    torch.manual_seed(zlib.crc32(case.id.encode()))
    config = getattr(T, {"vit": "ViTConfig", "deit": "DeiTConfig"}[case.family])(**dict(case.settings))
    model = getattr(T, case.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[Case], tuple[T.PreTrainedModel, Path]]:
    @functools.cache
    def save_case(case: Case) -> tuple[T.PreTrainedModel, Path]:
        model, folder = public(case), tmp_path_factory.mktemp("saved")
        model.save_pretrained(folder)
        return model, folder

    return save_case


def read(out: Any) -> torch.Tensor:
    return next(out[name] for name in ("logits", "reconstruction", "last_hidden_state") if name in out)


@torch.no_grad()
def distance(ours: Transformer, theirs: T.PreTrainedModel, pixels: torch.Tensor, **options: Any) -> float:
    """The maximum difference, relative to the largest output where that is above 1."""
    expected = read(theirs(pixels, **options))
    return (ours(pixels) - expected).abs().max().item() / max(1.0, expected.abs().max().item())


def images(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))


@by_id
def test_outputs_equal_those_of_transformers_in_both_directions(case, saved, tmp_path):
    theirs, folder = saved(case)
    loaded = load_hf_folder(folder)
    pixels = images(case.image_shape)
    assert distance(loaded.model, theirs, pixels) < LIMIT

    back = getattr(T, case.model).from_pretrained(save_hf_folder(loaded, tmp_path / "back"))
    assert distance(loaded.model, back.eval(), pixels) < LIMIT


@pytest.mark.parametrize("case", BASE, ids=lambda case: case.id)
def test_a_model_without_a_config_is_written_for_transformers(case, saved, tmp_path):
    ours = load(saved(case)[1]).model
    config = json.loads((save(ours, tmp_path / "new", layout="transformers") / "config.json").read_text())
    assert config["model_type"] == case.family
    back = getattr(T, case.model).from_pretrained(tmp_path / "new").eval()
    assert distance(ours, back, images(case.image_shape)) < LIMIT


@pytest.mark.parametrize("shape", [(3, 48, 40), (3, 16, 16), (3, 32, 64)], ids=str)
@pytest.mark.parametrize("case", [case for case in BASE if "Masked" not in case.model], ids=lambda case: case.id)
def test_images_of_another_size_get_interpolated_positions(case, shape, saved):
    theirs, folder = saved(case)
    assert distance(load(folder).model, theirs, images(shape), interpolate_pos_encoding=True) < LIMIT


@pytest.mark.parametrize("case", [case for case in BASE if "Masked" in case.model], ids=lambda case: case.id)
def test_masked_patches_are_replaced_by_the_mask_token(case, saved):
    theirs, folder = saved(case)
    ours, pixels = load(folder).model, images(case.image_shape)
    masked = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)) < 0.5
    first = torch.zeros(2, ours.spec.encoder.embed.first_tokens, dtype=torch.long)
    with torch.no_grad():
        expected = theirs(pixels, bool_masked_pos=masked).reconstruction
        got = ours(pixels, token_types=torch.cat((first, masked.long()), 1))
        # what is below a mask is not seen
        below = masked.unflatten(1, (4, 4)).repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None]
        other = torch.where(below, images(case.image_shape, seed=5), pixels)
        assert torch.equal(ours(other, token_types=torch.cat((first, masked.long()), 1)), got)
    assert (got - expected).abs().max() < LIMIT * max(1.0, float(expected.abs().max()))


# ---------------------------------------------------------------------------------------------------- planted faults


def column_major(self: LinearProjectionLayer, pixels: torch.Tensor) -> torch.Tensor:
    height, width = self.kernel_size
    patches = pixels.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    return patches.permute(0, 4, 2, 1, 3, 5).flatten(3).flatten(1, 2)


def channels_last(self: LinearProjectionLayer, pixels: torch.Tensor) -> torch.Tensor:
    height, width = self.kernel_size
    patches = pixels.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


SPEC_FAULTS = {
    "the tanh form of gelu": (FeedForward, lambda part: replace(part, activation="quick_gelu")),
    "another eps": (LayerNorm, lambda part: replace(part, eps=1e-1)),
    "another scale": (Attention, lambda part: replace(part, scale=0.5)),
    "the last token is pooled": (FirstToken, lambda part: LastToken()),
}


def rebuilt(loaded: LoadedModel, kind: type, change: Callable) -> Transformer:
    """The same weights in a model of a changed spec."""
    model = swap(loaded.spec, kind, change).build(seed=0)
    model.load_state_dict(loaded.model.state_dict())
    init_buffers(model)
    return model.eval()


@pytest.mark.parametrize("fault", SPEC_FAULTS)
def test_a_wrong_part_would_show(fault, saved):
    theirs, folder = saved(Case("vit", "ViTForImageClassification", tuple(SIZES.items())))
    assert distance(rebuilt(load(folder), *SPEC_FAULTS[fault]), theirs, images((3, 32, 32))) > SHOWS


@pytest.mark.parametrize("fault", [column_major, channels_last], ids=lambda fault: fault.__name__)
def test_patches_in_a_wrong_order_would_show(fault, saved, monkeypatch):
    theirs, folder = saved(Case("vit", "ViTForImageClassification", tuple(SIZES.items())))
    monkeypatch.setattr(LinearProjectionLayer, "split", fault)
    assert distance(load(folder).model, theirs, images((3, 32, 32))) > SHOWS


def test_the_class_token_last_would_show(saved):
    theirs, folder = saved(Case("vit", "ViTModel", tuple(SIZES.items())))
    with torch.no_grad():
        expected = theirs(images((3, 32, 32))).last_hidden_state
        got = load(folder).model(images((3, 32, 32)))
    assert (got.roll(-1, 1) - expected).abs().max() > SHOWS


# ---------------------------------------------------------------------------------------------------------- bad input


def test_names_of_transformers_5_in_memory_are_read(saved, tmp_path):
    from headwater.weights.shards import open_weights, save_weights

    theirs, folder = saved(Case("vit", "ViTForImageClassification", tuple(SIZES.items())))
    renamed = {name: p.detach() for name, p in theirs.named_parameters()}
    assert set(renamed) != set(open_weights(folder))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_weights(tmp_path, renamed)
    assert distance(load(tmp_path).model, theirs, images((3, 32, 32))) < LIMIT


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (torch.zeros(2, 5, dtype=torch.long), r"float images \[batch, 3, height, width\], got int64 \(2, 5\)"),
        (torch.zeros(2, 1, 32, 32), r"got float32 \(2, 1, 32, 32\); prepare them with the model's image processor"),
        (torch.zeros(2, 3, 30, 32), "multiples of the patch size 8 x 8, got 30 x 32; resize them to 32 x 32"),
        (torch.zeros(2, 3, 0, 32), "got 0 x 32"),
        ("cat.png", "got str"),
    ],
)
def test_inputs_that_are_no_images_of_the_model(pixels, words, saved):
    model = load(saved(Case("vit", "ViTModel", tuple(SIZES.items())))[1]).model
    with pytest.raises(BadInput, match=words):
        model(pixels)
    with pytest.raises(BadInput, match="no mask token"):
        model(torch.zeros(1, 3, 32, 32), token_types=torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"patch_size": 64, "encoder_stride": 64},
            "an image of 32 x 32 must hold from 1 to 65,536 patches of 64 x 64, it holds 0",
        ),
        ({"image_size": 8192, "patch_size": 1, "encoder_stride": 1}, "it holds 67,108,864"),
        ({"image_size": "big"}, "image_size must be an integer, 1 to 8192, or two of them"),
        ({"encoder_stride": 16}, "encoder_stride must be the patch size"),
        ({"patch_sise": 8}, "unknown settings"),
    ],
)
def test_configs_that_cannot_be_built(change, words, saved, tmp_path):
    folder = saved(Case("vit", "ViTForMaskedImageModeling", tuple(SIZES.items())))[1]
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadFile, match=words):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------------- counts

TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
SMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}
HUGE = {"hidden_size": 1280, "num_attention_heads": 16, "intermediate_size": 5120, "num_hidden_layers": 32}
CLASSES = {"num_labels": 1000}
PUBLISHED = [
    ("vit", "image_classification", TINY | CLASSES, 5_717_416),
    ("vit", "pooler", TINY, 5_561_472),
    ("vit", "image_classification", SMALL | CLASSES, 22_050_664),
    ("vit", "image_classification", SMALL | CLASSES | {"patch_size": 32}, 22_878_952),
    ("vit", "image_classification", CLASSES, 86_567_656),
    ("vit", "pooler", {}, 86_389_248),
    ("vit", "hidden_states", {}, 85_798_656),
    ("vit", "image_classification", CLASSES | {"image_size": 384}, 86_859_496),
    ("vit", "image_classification", CLASSES | {"patch_size": 32}, 88_224_232),
    ("vit", "image_classification", LARGE | CLASSES, 304_326_632),
    ("vit", "image_classification", HUGE | CLASSES | {"patch_size": 14}, 632_045_800),
    ("deit", "distilled", TINY | CLASSES, 5_910_800),
    ("deit", "distilled", SMALL | CLASSES, 22_436_432),
    ("deit", "distilled", CLASSES, 87_338_192),
    ("deit", "image_classification", TINY | CLASSES, 5_717_800),
    ("deit", "image_classification", CLASSES, 86_569_192),
]


@pytest.mark.parametrize(("family", "head", "settings", "count"), PUBLISHED)
def test_counts_equal_the_published_ones(family, head, settings, count):
    model = FAMILIES[family].read_spec(HFConfig(dict(settings)), head).on_meta()
    assert sum(p.numel() for p in model.parameters()) == count
