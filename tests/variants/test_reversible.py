"""The reversible stack: gradients of ordinary backpropagation from the two last streams alone, for any block."""

from __future__ import annotations

import pytest
import torch

from headwater import core as hw
from headwater.variants import reversible
from headwater.variants.chunked_attention import ChunkedAttention
from headwater.variants.chunked_ffn import ChunkedFeedForward
from headwater.variants.experts import Experts
from headwater.variants.lsh_attention import LSHAttention
from headwater.variants.reversible import ReversibleStack

VOCAB, D_MODEL, HEADS, LENGTH = 23, 16, 4, 24
NORM = hw.LayerNorm()
FFN = hw.pre(NORM, ffn=hw.FeedForward(24, "gelu", dropout=0.1))


def block(attention: hw.Attention, *more: hw.Branch, dropout: float = 0.2) -> hw.Block:
    return hw.Block((hw.pre(NORM, self_attn=attention), *(more or (FFN,))), dropout)


BLOCKS = {
    "plain": block(hw.Attention(HEADS, dropout=0.1)),
    "biased by position": block(hw.Attention(HEADS, position=hw.RelativeBias(8, 12))),
    "rotary, causal": block(hw.Attention(HEADS, mask=hw.Causal(), position=hw.Rotary())),
    "three branches": block(hw.Attention(HEADS), FFN, hw.pre(NORM, second=hw.GatedFeedForward(20))),
    "sandwich": hw.Block(
        (hw.sandwich(NORM, self_attn=hw.Attention(HEADS)), hw.sandwich(NORM, ffn=hw.FeedForward(24))), 0.1
    ),
    "experts": block(hw.Attention(HEADS), hw.pre(NORM, ffn=Experts(hw.FeedForward(16), 3, 2))),
    "chunks": block(ChunkedAttention(HEADS, chunk=4, dropout=0.1), hw.pre(NORM, ffn=ChunkedFeedForward(24, chunk=7))),
    "lsh": block(LSHAttention(HEADS, chunk=4, rounds=2, mask=hw.Causal(), dropout=0.1)),
    "lsh, other directions each time": block(LSHAttention(HEADS, chunk=4, seed=None)),
}


def model_of(layer: hw.Block, layers: int = 3) -> hw.Transformer:
    stack = ReversibleStack(D_MODEL, hw.Embeddings(VOCAB, scale=2.0), (layer,) * layers, NORM)
    spec = hw.Model(hw.LMHead(VOCAB), decoder=stack, init=(("*", hw.Normal(0.3)),))
    return spec.build(seed=1).double().train()


def gradients(model: hw.Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The outputs and all gradients, with dropout."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    out = model(torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0)))
    (out * torch.sin(torch.arange(out.numel(), dtype=out.dtype).view(out.shape))).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ordinary(patch: pytest.MonkeyPatch) -> None:
    """Backpropagation through stored activations."""

    def run_layers(self, x, context):
        return torch.cat(reversible._run(list(self._steps()), x, x, context), -1)

    patch.setattr(reversible.ReversibleTransformerStack, "run_layers", run_layers)


def largest_difference(layer: hw.Block, patch: pytest.MonkeyPatch) -> float:
    model = model_of(layer)
    out, grads = gradients(model)
    with patch.context() as inner:
        ordinary(inner)
        want_out, want = gradients(model)
    assert torch.equal(out, want_out)
    assert grads.keys() == want.keys() and len(grads) == len(list(model.parameters()))
    return max(((grads[name] - want[name]).abs().max() / (1 + want[name].abs().max())).item() for name in want)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_gradient_is_the_ordinary_one(name, monkeypatch):
    assert largest_difference(BLOCKS[name], monkeypatch) < 1e-9


def test_it_reaches_the_encoder_output(monkeypatch):
    """A reversible decoder reads a memory; its gradient goes through every cross-attention."""
    attention = {"heads": HEADS, "mask": hw.Causal()}
    layer = block(hw.Attention(**attention), hw.pre(NORM, cross_attn=hw.CrossAttention(HEADS)), FFN)
    stack = ReversibleStack(D_MODEL, hw.Embeddings(VOCAB, scale=2.0), (layer,) * 2, NORM)
    encoder = hw.Stack(D_MODEL, hw.Embeddings(VOCAB, scale=2.0), (BLOCKS["plain"],), NORM)
    spec = hw.Model(hw.LMHead(VOCAB), decoder=stack, encoder=encoder, init=(("*", hw.Normal(0.3)),))
    model = spec.build(seed=1).double().eval()
    ids = torch.arange(10)[None]

    def encoder_gradients() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(ids, source=ids + 5).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    grads = encoder_gradients()
    with monkeypatch.context() as patch:
        ordinary(patch)
        want = encoder_gradients()
    for name, grad in want.items():
        assert (grads[name] - grad).abs().max() < 1e-9 * (1 + grad.abs().max()), name


def test_a_wrong_random_state_is_seen(monkeypatch):
    monkeypatch.setattr(reversible.torch, "set_rng_state", lambda state: None)
    assert largest_difference(BLOCKS["plain"], monkeypatch) > 1e-3


def test_a_wrong_inversion_is_seen(monkeypatch):
    monkeypatch.setattr(reversible, "rebuilt", lambda after, added: after)
    assert largest_difference(BLOCKS["plain"], monkeypatch) > 1e-3


def stored_bytes(layers: int) -> int:
    """What autograd keeps between the passes, weights left out."""
    model = model_of(block(hw.Attention(HEADS), dropout=0.0), layers).float()
    weights = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, LENGTH, dtype=torch.long))
    return sum(kept.values())


def test_more_layers_store_no_more():
    assert stored_bytes(8) == stored_bytes(2)


def test_the_widths_are_checked():
    stack = ReversibleStack(D_MODEL, hw.Embeddings(VOCAB), (BLOCKS["plain"],), NORM)
    assert stack.output_width == 2 * D_MODEL
    plain = hw.Stack(D_MODEL, hw.Embeddings(VOCAB), (BLOCKS["plain"],), NORM)
    with pytest.raises(hw.model.BadSetting, match="encoder and decoder must have one d_model"):
        hw.Model(hw.LMHead(VOCAB), encoder=stack, decoder=plain).on_meta()
    with pytest.raises(hw.model.BadSetting, match="branches must not have a post_norm"):
        ReversibleStack(D_MODEL, hw.Embeddings(VOCAB), (hw.Block((hw.post(NORM, ffn=hw.FeedForward(8)),)),))
