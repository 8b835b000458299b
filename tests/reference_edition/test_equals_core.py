"""NumPy edition = core: with the same weights, outputs and every gradient are equal within 1e-5.

Both run in float64, so that a difference is in the formula and not rounding; float32 and files have their own tests.
The tolerance of a gradient is relative to the largest entry of its tensor, so that small gradients are checked too.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.core import Attention, Bidirectional, Causal, CrossAttention, LocalWindow, SlidingWindow
from headwater.core.positions import RelativeBias, T5Bias
from headwater.families.builders import decoder, encoder, transformer
from headwater.parts import swap
from headwater.reference import attention, loss, model
from headwater.reference.config import Config
from headwater.reference.decode import greedy
from headwater.reference.loss import cross_entropy
from headwater.reference.model import Transformer
from headwater.reference.positions import POSITIONS, relative_bucket
from headwater.reference.weights import read
from headwater.weights import safetensors

SHAPES = ("encoder_decoder", "encoder", "decoder")
NORM_POSITIONS = ("pre", "post", "sandwich")
VOCAB, SOURCE_VOCAB, PADDING = 13, 17, 0
SMALL = {"d_model": 16, "heads": 4, "layers": 2, "d_ff": 10, "max_positions": 16}


def torch_model(c: Config):
    """The core's model of the same sizes, with weights far from their initial values."""
    names = (
        "d_model",
        "heads",
        "kv_heads",
        "head_dim",
        "layers",
        "d_ff",
        "activation",
        "gated",
        "bias",
        "norm",
        "norm_position",
    )
    sizes = {name: getattr(c, name) for name in (*names, "position", "max_positions")} | {"dropout": 0.0}
    if c.shape == "encoder_decoder":
        spec = transformer(c.source_vocab, c.vocab, shared=c.shared, **sizes)
    else:
        spec = (encoder if c.shape == "encoder" else decoder)(c.vocab, **sizes)
    if c.window:
        masks = {Causal(): SlidingWindow(c.window), Bidirectional(): LocalWindow(c.window - 1)}
        spec = swap(spec, Attention, lambda part: dataclasses.replace(part, mask=masks[part.mask]))
    if c.v_head_dim != c.head_dim:
        for kind in (Attention, CrossAttention):
            spec = swap(spec, kind, lambda part: dataclasses.replace(part, v_head_dim=c.v_head_dim))
    if not c.tied:
        spec = dataclasses.replace(spec, tied=tuple(pair for pair in spec.tied if pair[0] != "head.out"))
    built = spec.build(seed=1).double()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in built.parameters():
            p += 0.2 * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return built


def arrays(built) -> dict[str, np.ndarray]:
    """Parameters by path; a tied tensor is listed under the path of its owner, as in the reference edition."""
    tied = dict(built.spec.tied)
    owner = {
        path: tied.get(path.removesuffix(".weight"), path.removesuffix(".weight"))
        for path, _ in built.named_parameters()
    }
    return {(owner[path] + ".weight" if path.endswith(".weight") else path): p for path, p in built.named_parameters()}


def both(c: Config, dtype: torch.dtype = torch.float64):
    built = torch_model(c).to(dtype)
    return built, Transformer(c, {path: p.detach().numpy().copy() for path, p in arrays(built).items()})


def batch(c: Config, length: int = 7, source_length: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    result = {"ids": rng.integers(0, c.vocab, (3, length))}
    if c.shape == "encoder_decoder":
        result["source"] = rng.integers(0, c.source_vocab, (3, source_length))
    return result


def assert_equal(c: Config, tolerance: float = 1e-5, dtype: torch.dtype = torch.float64, **masks: np.ndarray) -> None:
    """Logits of real tokens, the smoothed loss over them, and the gradient of every weight."""
    built, ours = both(c, dtype)
    inputs = batch(c)
    real = masks.get("attention_mask", masks.get("document_ids", np.ones((3, 7)))) != 0
    targets = np.where(real, np.random.default_rng(1).integers(1, c.vocab, (3, 7)), PADDING)

    theirs = built(torch.tensor(inputs.pop("ids")), **{k: torch.tensor(v) for k, v in (inputs | masks).items()})
    their_loss = torch.nn.functional.cross_entropy(
        theirs.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=PADDING, label_smoothing=0.1
    )
    their_loss.backward()

    logits, backward = ours(**batch(c), **masks)
    our_loss, loss_backward = loss.cross_entropy(logits, targets, PADDING, smoothing=0.1)
    gradients = backward(loss_backward())

    np.testing.assert_allclose(logits[real], theirs.detach().numpy()[real], rtol=tolerance, atol=tolerance)
    assert abs(our_loss - their_loss.item()) < tolerance
    parameters = arrays(built)
    assert gradients.keys() == parameters.keys()
    for path, p in parameters.items():
        expected = p.grad.numpy()
        atol = tolerance * max(np.abs(expected).max(), 1e-3)
        np.testing.assert_allclose(gradients[path], expected, rtol=0, atol=atol, err_msg=path)


def config(shape: str, **changes) -> Config:
    return Config(VOCAB, shape, source_vocab=SOURCE_VOCAB if shape == "encoder_decoder" else 0, **(SMALL | changes))


LEFT = np.array([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0, 0, 0, 0, 0, 1, 1]], bool)
SOURCE_LEFT = np.array([[0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [1] * 5], bool)
DOCUMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2]])
SOURCE_DOCUMENTS = np.array([[1, 1, 2, 2, 2], [1, 2, 2, 3, 0], [1, 1, 1, 2, 2]])
MASKS = {
    "none": {},
    "left": {"attention_mask": LEFT, "source_attention_mask": SOURCE_LEFT},
    "right": {"attention_mask": LEFT[:, ::-1].copy(), "source_attention_mask": SOURCE_LEFT[:, ::-1].copy()},
    "documents": {"document_ids": DOCUMENTS, "source_document_ids": SOURCE_DOCUMENTS},
}


def masks_of(name: str, shape: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in MASKS[name].items() if shape == "encoder_decoder" or not k.startswith("source")}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_under_every_mask(shape: str, position: str, mask: str) -> None:
    assert_equal(config(shape, position=position), **masks_of(mask, shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("norm", "norm_position", "gated"), [*itertools.product(("layer", "rms"), NORM_POSITIONS, (False, True))]
)
def test_every_norm_position(shape: str, norm: str, norm_position: str, gated: bool) -> None:
    c = config(shape, norm=norm, norm_position=norm_position, gated=gated, kv_heads=2, bias=not gated)
    assert_equal(c, **masks_of("left", shape))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("norm", "norm_position"), [*itertools.product(("layer", "rms"), NORM_POSITIONS)])
def test_all_combinations(shape: str, norm: str, norm_position: str, mask: str) -> None:
    for position, window in itertools.product(POSITIONS, (0, 3)):
        c = config(shape, norm=norm, norm_position=norm_position, position=position, window=window)
        assert_equal(c, **masks_of(mask, shape))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_activation_with_and_without_a_gate(shape: str, activation: str) -> None:
    for gated in (False, True):
        assert_equal(config(shape, activation=activation, gated=gated))


@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_windows(shape: str, window: int, mask: str) -> None:
    assert_equal(config(shape, window=window, position="rotary"), **masks_of(mask, shape))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_query_attention_with_its_own_head_dim(kv_heads: int) -> None:
    for position in ("rotary", "xl", "alibi", "relative"):
        assert_equal(config("decoder", kv_heads=kv_heads, head_dim=6, position=position), **masks_of("left", "decoder"))


@pytest.mark.parametrize("shape", SHAPES)
def test_values_with_their_own_head_dim(shape: str) -> None:
    assert_equal(config(shape, kv_heads=2, v_head_dim=7), **masks_of("right", shape))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_shared_tables(tied: bool) -> None:
    assert_equal(Config(VOCAB, shared=True, tied=tied, **SMALL))
    for shape in SHAPES:
        assert_equal(config(shape, tied=tied))


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_too(shape: str) -> None:
    assert_equal(config(shape, norm_position="pre"), tolerance=1e-4, dtype=torch.float32, **masks_of("right", shape))


def test_t5_buckets_agree_at_every_distance() -> None:
    distance = np.arange(-700, 701)[None]
    for bidirectional in (True, False):
        theirs = T5Bias(RelativeBias(bidirectional=bidirectional), heads=1).bucket(torch.tensor(distance))
        np.testing.assert_array_equal(relative_bucket(distance, bidirectional), theirs.numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_weights_have_the_same_paths_as_taps(shape: str) -> None:
    built, ours = both(config(shape))
    captured: dict[str, np.ndarray] = {}
    for path, module in built.named_modules():
        if path.endswith("kernel.weights"):
            module.register_forward_hook(
                lambda m, args, out, path=path: captured.__setitem__(path, out.detach().numpy())
            )
    inputs, seen = batch(ours.config), {}
    built(torch.tensor(inputs.pop("ids")), **{k: torch.tensor(v) for k, v in inputs.items()})
    ours(**batch(ours.config), attention_weights=seen)
    assert seen.keys() == captured.keys()
    for path in seen:
        np.testing.assert_allclose(seen[path], captured[path], atol=1e-5, err_msg=path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_saved_by_the_core_are_read_and_decoded(tmp_path: Path, dtype: torch.dtype) -> None:
    """The file has the core's rounded weights; both sides decode with those."""
    c = config("decoder", position="rotary", norm_position="pre", norm="rms", tied=False)
    built = torch_model(c)
    safetensors.write_safetensors(
        tmp_path / "model.safetensors", {path: p.detach().to(dtype) for path, p in arrays(built).items()}
    )
    values = read(tmp_path / "model.safetensors")
    wide = np.float64 if dtype == torch.float64 else np.float16 if dtype == torch.float16 else np.float32
    assert {v.dtype.type for v in values.values()} == {wide}
    ours, built = Transformer(c, {path: v.astype(np.float64) for path, v in values.items()}), built.to(dtype).double()
    prompts = [[1, 2, 3], [4]]
    generated = greedy(ours, prompts, stop=-1, max_new_tokens=8)
    for prompt, row in zip(prompts, generated, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(8):
            ids = torch.cat((ids, built(ids)[:, -1:].argmax(-1)), 1)
        assert row == ids[0, len(prompt) :].tolist()


# ---------------------------------------------------------------------------------------------------- planted faults


def scaled_by_the_wrong_width(q, k, v, allowed, bias, drop):
    return attention_attend(q / 1.01, k, v, allowed, bias, drop)


attention_attend = attention.attend
FAULTS = {
    "scale": (attention, "attend", scaled_by_the_wrong_width),
    "positions under left padding": (model, "prepare_tokens", lambda *args: without_padding_positions(*args)),
    "smoothing over all but the right id": (
        loss,
        "cross_entropy",
        lambda x, t, p, smoothing: cross_entropy(x, t, p, smoothing * 13 / 12),
    ),
}


def without_padding_positions(ids, attention_mask, document_ids):
    tokens = prepare_tokens(ids, attention_mask, document_ids)
    return dataclasses.replace(tokens, positions=np.broadcast_to(np.arange(ids.shape[1]), ids.shape))


prepare_tokens = model.prepare_tokens


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_detects(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        assert_equal(config("decoder"), **masks_of("left", "decoder"))
