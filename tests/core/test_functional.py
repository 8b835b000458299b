"""Core has one seam to C: with the kernels and without them it gives the same numbers, and one file imports them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater import core as hw
from headwater.core import functional
from headwater.cpu import build, linear
from headwater.families import builders
from headwater.parts import swap

CORE = Path(hw.__file__).parent
SIZES = {"d_model": 64, "heads": 4, "layers": 2, "d_ff": 128, "dropout": 0.1, "attention_dropout": 0.1}
MODELS = {
    "post-norm": builders.transformer(50, **SIZES),
    "pre-norm, gelu": builders.decoder(50, norm_position="pre", activation="gelu", position="learned", **SIZES),
    "gated, rms, grouped": builders.decoder(50, norm="rms", gated=True, kv_heads=2, position="rotary", **SIZES),
    "window": swap(
        builders.decoder(50, position="none", **SIZES), hw.Attention, lambda a: replace(a, mask=hw.SlidingWindow(9))
    ),
    "bias": builders.encoder(50, position="relative", **SIZES),
    "query bias": builders.decoder(50, position="xl", **SIZES),
}

needs_c = pytest.mark.skipif(build.training_library() is None, reason="nothing is compiled here")


@pytest.fixture(autouse=True)
def small_products_too(monkeypatch):
    monkeypatch.setattr(linear, "MIN_MACS", 0)


def train_step(name: str) -> Tensor:
    """The logits and all gradients of one training step, as one vector."""
    model = MODELS[name].build(seed=1).train()
    ids = torch.arange(2 * 270).view(2, 270) * 7 % 50
    sources = {"source": ids[:, :40]} if model.encoder is not None and model.decoder is not None else {}
    torch.manual_seed(3)
    logits = model(ids, **sources)
    logits.square().mean().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([logits.detach().flatten(), *grads])


def without_c(work: Callable[[], Tensor]) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "training_library", lambda: None)
        return work()


def assert_same(with_c: Tensor, in_torch: Tensor) -> None:
    assert (with_c - in_torch).norm() <= 1e-4 * in_torch.norm()


@needs_c
@pytest.mark.parametrize("name", MODELS)
def test_core_without_cpu_gives_the_same_numbers(name):
    assert_same(train_step(name), without_c(lambda: train_step(name)))


# Each operation, and a formula for it that is wrong: the comparison above must see it.
WRONG_FORMULAS = {
    "linear": lambda x, layer: layer(x) * 1.01,
    "dropout": lambda x, p: x,
    "add_dropout": lambda x, y, p: x + y,
    "eager_attention": lambda q, k, v, attn_mask, scale, p: 0 * (q @ k.mT) @ v,
}


@needs_c
@pytest.mark.parametrize("operation", WRONG_FORMULAS)
def test_a_wrong_formula_would_be_seen(operation, monkeypatch):
    name = "post-norm"
    with_c = train_step(name)
    monkeypatch.setattr(functional, operation, WRONG_FORMULAS[operation])
    with pytest.raises(AssertionError):
        assert_same(with_c, without_c(lambda: train_step(name)))


FUSED = {
    "post-norm": ("_Linears", "_FeedForward", "_AddDropoutNorm", "_FusedAttention"),
    "pre-norm, gelu": ("_Linears", "_FeedForward", "_AddDropoutNorm", "_DropoutAdd", "_FusedAttention"),
    "gated, rms, grouped": ("_Linears", "_AddDropoutNorm", "_FusedAttention"),
    "window": ("_Linears", "_FusedAttention"),
}


def kernels_used(name: str) -> set[str]:
    """The autograd functions in the graph of a training step."""
    model = MODELS[name].build(seed=1).train()
    ids = torch.arange(2 * 270).view(2, 270) * 7 % 50
    out = model(ids, **({"source": ids[:, :40]} if model.encoder is not None else {}))
    found, queue = set(), [out.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.add(node)
            queue += [parent for parent, _ in node.next_functions]
    return {type(node).__name__.removesuffix("Backward") for node in found}


@needs_c
@pytest.mark.parametrize("name", FUSED)
def test_training_takes_the_fused_kernels(name):
    assert set(FUSED[name]) <= kernels_used(name)
    assert not without_c(lambda: kernels_used(name)) & {kernel for kernels in FUSED.values() for kernel in kernels}


def imports_cpu(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if any(f"{name}.".startswith("headwater.cpu.") for name in names):
            return True
    return False


def test_one_file_of_core_imports_the_kernels():
    users = [path.name for path in sorted(CORE.rglob("*.py")) if imports_cpu(path.read_text(encoding="utf-8"))]
    assert users == ["functional.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from headwater.cpu.norm import norm_supported",
        "from headwater import cpu",
        "def f():\n    import headwater.cpu",
    ],
)
def test_a_second_seam_would_be_seen(line):
    assert imports_cpu(line)
    assert not imports_cpu("from headwater.core import functional")


def test_a_position_encoding_says_which_biases_it_has():
    def subclasses(cls: type) -> list[type]:
        return [cls, *(sub for child in cls.__subclasses__() for sub in subclasses(child))]

    base = hw.positions.PositionEncoding
    for cls in subclasses(base):
        assert cls.has_bias == (cls.bias is not base.bias), cls
        assert cls.has_query_bias == (cls.query_bias is not base.query_bias), cls
