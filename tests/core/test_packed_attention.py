"""Packed documents are within a window as wide as the longest: the outputs of one dense mask, in less time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwater import core as hw
from headwater.core import masks
from headwater.core.base import KernelConfig
from headwater.core.embeddings import longest_document
from headwater.core.masks import AttentionMask
from headwater.core.positions import PositionEncoding
from headwater.cpu.build import training_library

LENGTH = 300
RULES = {
    "causal": hw.Causal(),
    "both directions": hw.Bidirectional(),
    "window": hw.SlidingWindow(7),
    "wide window": hw.SlidingWindow(200),
}
POSITIONS = {"none": hw.NoPosition(), "rotary": hw.Rotary(), "alibi": hw.Alibi(), "bias": hw.RelativeBias(8, 40)}


def packed(longest: int) -> Tensor:
    """[2, LENGTH] documents of several lengths up to the longest, with padding at the end of the second row."""
    first = torch.arange(LENGTH) // longest + 1
    second = torch.repeat_interleave(torch.arange(1, LENGTH + 1), longest // 2)[:LENGTH].clone()
    second[-10:] = 0
    return torch.stack((first, second))


def model_of(rule: masks.MaskRule, position: hw.PositionSpec, dropout: float = 0.0) -> hw.Transformer:
    attention = hw.Attention(2, mask=rule, position=position, dropout=dropout)
    block = hw.Block((hw.pre(hw.LayerNorm(), self_attn=attention), hw.pre(hw.LayerNorm(), ffn=hw.FeedForward(16))))
    stack = hw.Stack(32, hw.Embeddings(11, hw.NoPosition()), (block, block))
    side = "decoder" if rule.window_size[1] == 0 else "encoder"
    return hw.Model(**{side: stack}, head=hw.LMHead(11), init=(("*", hw.Normal(0.3)),)).build(seed=0)


def outputs(model: hw.Transformer, documents: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of real tokens, and the gradients of a loss that reads them all."""
    ids = torch.randint(11, documents.shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    out = model(ids, document_ids=documents)[documents != 0]
    model.zero_grad()
    (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def dense(monkeypatch):
    """Call it, and every mask is one tensor."""
    return lambda: monkeypatch.setattr(AttentionMask, "block_size", None)


def difference(got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> float:
    """The largest one of an output, or of a gradient relative to the largest of its tensor."""
    gradients = [
        float((got[1][name] - grad).abs().max() / grad.abs().max().clamp(min=1)) for name, grad in wanted[1].items()
    ]
    return max(float((got[0] - wanted[0]).abs().max()), *gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("rule", RULES)
def test_short_documents_equal_one_dense_mask(rule, position, dtype, dense):
    model = model_of(RULES[rule], POSITIONS[position]).to(dtype)
    documents = packed(40)
    got = outputs(model, documents)
    dense()
    wanted = outputs(model, documents)
    assert difference(got, wanted) < (1e-9 if dtype == torch.float64 else 2e-5)


def test_dropout_drops_the_same_weights(dense):
    model = model_of(hw.Causal(), hw.Rotary(), dropout=0.3).train()
    documents = packed(40)
    got = outputs(model, documents)
    dense()
    assert difference(got, outputs(model, documents)) < 2e-5


@pytest.mark.skipif(training_library() is None, reason="needs the C kernels")
@pytest.mark.parametrize("longest", [40, LENGTH])
def test_training_in_bfloat16_attends_in_float32(longest, monkeypatch):
    """The attention is that of its rounded inputs, bit for bit; without C torch computes in bfloat16, and differs."""
    kernel = hw.SDPA().build(KernelConfig("attention", 2, 16, 0.25, 0.0, hw.Causal(), hw.NoPosition()))
    documents = packed(longest)
    positions = torch.arange(documents.shape[1])[None]
    mask = AttentionMask(
        hw.Causal(), PositionEncoding(), positions, positions, None, documents, documents, True, longest
    )
    draw = torch.Generator().manual_seed(0)
    rounded = [torch.randn(len(documents), 2, LENGTH, 16, generator=draw).bfloat16() for _name in "qkv"]

    def attend(dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in rounded]
        out = kernel(*inputs, mask, None if mask.block_size else mask.additive(dtype)).bfloat16()
        out.backward(rounded[0])
        return [out, *(t.grad.bfloat16() for t in inputs)]

    wanted = attend(torch.float32)
    assert all(map(torch.equal, attend(torch.bfloat16), wanted))
    monkeypatch.setattr("headwater.core.functional.is_faster_in_float32", lambda q, k, v: False)
    assert not all(map(torch.equal, attend(torch.bfloat16), wanted))


def test_a_limit_below_the_longest_document_would_show(dense, monkeypatch):
    model = model_of(hw.Causal(), hw.Rotary())
    documents = packed(40)
    monkeypatch.setattr("headwater.core.stack.longest_document", lambda ids: 39)
    got = outputs(model, documents)
    dense()
    assert difference(got, outputs(model, documents)) > 1e-3


def test_a_document_in_two_parts_is_as_long_as_both_and_what_is_between():
    ids = torch.tensor([[5, 5, 7, 7, 7, 5, 0, 0], [1, 2, 3, 4, 10**12, 6, 7, 8]])
    assert longest_document(ids) == 6
    assert longest_document(ids[1:]) == 1
    assert longest_document(ids.to("meta")) is None


def test_documents_without_a_limit_have_one_dense_mask():
    positions = torch.arange(LENGTH)[None]
    mask = AttentionMask(hw.Causal(), PositionEncoding(), positions, positions, aligned=True, longest_document=40)
    assert mask.block_size
    assert mask.window_size == (39, 0)
    assert not replace(mask, longest_document=None).block_size
    assert not replace(mask, longest_document=250).block_size
    assert replace(mask, rule=hw.LocalWindow(3)).window_size == (3, 3)
