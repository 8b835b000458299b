"""The number of threads changes nothing: every C kernel gives the same bits with 1, 2, 3, 4 and 8 threads.

What a thread computes depends on its rows alone, so any difference is a data race. Shapes are large enough for threads
to overlap: with tiny ones each is done before the next has begun, and a race is never seen.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwater.core import (
    Attention,
    Block,
    Causal,
    Embeddings,
    GatedFeedForward,
    LMHead,
    Model,
    RMSNorm,
    Rotary,
    Stack,
    pre,
)
from headwater.cpu.build import decode_library, unavailable_reason
from headwater.cpu.loss import topk_logprobs
from headwater.families.builders import transformer
from headwater.generation.forward import encode_sources, forward_last, forward_single
from headwater.generation.kv_cache import BatchKVCache
from headwater.quantization.layers import BLOCK_FORMATS, QUANTIZERS, QuantizedLinear, quantize, replace_module
from headwater.tuning import IA3, DoRA, LoRA, tune, use_adapter
from headwater.tuning.batches import adapter_of_each_row
from headwater.tuning.lowrank import LowRankDirection

pytestmark = pytest.mark.skipif(decode_library() is None, reason=f"no compiled step here: {unavailable_reason()}")

ROWS = range(1, 65)
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
VOCAB, D_MODEL, D_FF = 301, 128, 384


def q4_0(weights: Tensor) -> Tensor:
    """[..., n] -> [..., 18 n / 32] bytes: a scale and 32 numbers from -8 to 7."""
    blocks = weights.float().reshape(-1, 32)
    d = (blocks.abs().amax(1, keepdim=True) / 7).half()
    q = (blocks / d.float()).round().clamp(-8, 7).add(8).to(torch.uint8)
    return torch.cat((d.view(torch.uint8), q[:, :16] | q[:, 16:] << 4), 1).view(*weights.shape[:-1], -1)


def stored_as(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The model with its linear layers in one of the formats of quant_formats.h."""
    if name in ("F16", "BF16"):
        return model.to({"F16": torch.float16, "BF16": torch.bfloat16}[name])
    if name in ("Q8_0", "Q4_1"):
        assert quantize(model, {"Q8_0": "int8", "Q4_1": "int4"}[name])
    if name == "Q4_0":
        linears = [(path, m) for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
        for path, linear in linears:
            replace_module(
                model, path, QuantizedLinear(q4_0(linear.weight.detach()), BLOCK_FORMATS["Q4_0"], linear.bias)
            )
    return model


def randomized(spec: Model) -> torch.nn.Module:
    model, draw = spec.build(seed=0).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def decoder() -> torch.nn.Module:
    attention = Attention(4, kv_heads=2, position=Rotary(), mask=Causal(), bias="qkvo")
    block = Block((pre(RMSNorm(), self_attn=attention), pre(RMSNorm(), ffn=GatedFeedForward(D_FF))))
    return randomized(Model(decoder=Stack(D_MODEL, Embeddings(VOCAB), (block,) * 2, RMSNorm()), head=LMHead(VOCAB)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_of_any_length(name: str, same_bits):
    """The whole step of a decoder: prompts of 1 to 64 tokens, and the scores of all of them."""
    model = stored_as(decoder(), name)

    def scores() -> Tensor:
        found = []
        for rows in ROWS:
            slots = BatchKVCache(model, ["a"])
            found.append(forward_single(model, slots, [(7 * i + rows) % VOCAB for i in range(rows)], rows))
            assert slots.native_decoder[1] is not None
        return torch.cat(found)

    same_bits(scores)


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_of_any_size(name: str, same_bits):
    """1 to 64 streams that go on token by token: each has a cache of its own."""
    model = stored_as(decoder(), name)

    def scores() -> Tensor:
        found = []
        for rows in (*range(1, 17), 24, 31, 32, 33, 48, 63, 64):
            slots = BatchKVCache(model, range(rows))
            found += [forward_last(model, slots, [[(token + n) % VOCAB] for n in range(rows)]) for token in (1, 5)]
            assert slots.native_decoder[1] is not None
        return torch.cat(found)

    same_bits(scores)


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_a_batch_whose_rows_have_adapters(name: str, same_bits, monkeypatch):
    """Three adapters and none, in turn; prompts first, so that few and many tokens are computed.

    The norms of DoRA are torch's own product, whose last bits depend on its threads: here they are those of the base.
    """
    monkeypatch.setattr(LowRankDirection, "direction_norms", lambda self: self.base_norms)
    model = stored_as(decoder(), name)
    methods = {"a": LoRA(7, target="all-linear"), "b": DoRA(4, target="all-linear"), "c": IA3()}
    for adapter, method in methods.items():
        tune(model, method, name=adapter)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    use_adapter(model, None)

    def scores() -> Tensor:
        found = []
        for rows in (1, 2, 4, 5, 8, 17, 32):
            slots = BatchKVCache(model, range(rows))
            with adapter_of_each_row(model, [("a", "b", None, "c")[n % 4] for n in range(rows)]):
                found.append(forward_last(model, slots, [[n + 1] * (1 + n % 3) for n in range(rows)]))
                found += [forward_last(model, slots, [[(token + n) % VOCAB] for n in range(rows)]) for token in (1, 5)]
            assert slots.native_decoder[1] is not None
        return torch.cat(found)

    same_bits(scores)


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_0", "Q4_1"])
def test_an_encoder_and_its_decoder(name: str, same_bits):
    """Without 16 bits: there the source's keys are torch's own product, whose last bits depend on its threads."""
    spec = transformer(VOCAB, d_model=D_MODEL, heads=4, layers=2, d_ff=D_FF)
    model = stored_as(randomized(spec), name)

    def scores() -> Tensor:
        found = []
        for rows in (1, 3, 4, 5, 7, 12, 20):
            slots = BatchKVCache(model, range(rows))
            encode_sources(model, slots, [tuple(range(3, 5 + n % 9)) for n in range(rows)])
            found += [forward_last(model, slots, [[token + n] for n in range(rows)]).float() for token in (1, 9)]
        return torch.cat(found)

    same_bits(scores)


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_products_of_packed_weights(name: str, same_bits):
    draw = torch.Generator().manual_seed(1)
    weight, x = torch.randn(333, 256, generator=draw), torch.randn(64, 256, generator=draw)
    layer = QuantizedLinear(QUANTIZERS[name](weight), BLOCK_FORMATS[name], torch.randn(333, generator=draw))
    with torch.inference_mode():
        same_bits(lambda: torch.cat([layer(x[:rows]) for rows in ROWS]))
        same_bits(lambda: layer.weight)


def test_the_best_few_of_each_row(same_bits):
    scores = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2))
    same_bits(lambda: torch.tensor([topk_logprobs(scores[:rows], 8).logprobs[-1] for rows in ROWS]))
