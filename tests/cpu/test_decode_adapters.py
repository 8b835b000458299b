"""Adapters in the step in C: one for each row of a batch, equal to the modules, and none touches another's row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwater.core import (
    Attention,
    Block,
    Causal,
    Embeddings,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    RMSNorm,
    Rotary,
    Stack,
    pre,
)
from headwater.cpu.build import TensorMismatch, decode_library, unavailable_reason
from headwater.families.builders import transformer
from headwater.generation.forward import encode_sources, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder, NativeEncoder
from headwater.quantization.layers import QuantizedLinear, quantize
from headwater.tuning import IA3, DoRA, LoRA, RsLoRA, remove_adapter, tune, use_adapter
from headwater.tuning.batches import AdapterIndex, adapter_of_each_row

pytestmark = pytest.mark.skipif(decode_library() is None, reason=f"no compiled step here: {unavailable_reason()}")

ADAPTERS = {
    "low_rank": LoRA(3, target="all-linear"),
    "direction": DoRA(5, target="all-linear"),
    "scales": IA3(),
    "some": RsLoRA(2, target=("*.0.self_attn.q", "*.1.ffn.down")),
    "head": LoRA(2, target="head.out"),
}
NAMES = ["low_rank", None, "direction", "scales", "some", "low_rank", "head", None, "scales"]


def llama() -> Model:
    attention = Attention(4, kv_heads=2, position=Rotary(), mask=Causal())
    block = Block((pre(RMSNorm(), self_attn=attention), pre(RMSNorm(), ffn=GatedFeedForward(96))))
    return Model(decoder=Stack(64, Embeddings(50), (block,) * 2, RMSNorm()), head=LMHead(50))


def gpt2() -> Model:
    attention = Attention(4, bias="qkvo", mask=Causal())
    block = Block((pre(LayerNorm(), self_attn=attention), pre(LayerNorm(), ffn=FeedForward(96, "gelu_tanh"))))
    stack = Stack(64, Embeddings(50, Learned(40)), (block,) * 2, LayerNorm())
    return Model(decoder=stack, head=LMHead(50, bias=True))


SPECS = {"llama": llama(), "gpt2": gpt2(), "translator": transformer(50, d_model=64, heads=4, layers=2, d_ff=96)}


def randomize(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)


def base(name: str, bits: str = "") -> nn.Module:
    model = SPECS[name].build(seed=0).eval()
    randomize(model, 0)
    assert not bits or quantize(model, bits)
    return model


def tuned(name: str, bits: str = "") -> nn.Module:
    model = base(name, bits)
    for seed, (adapter, method) in enumerate(ADAPTERS.items()):
        tune(model, method, name=adapter)
        randomize(model, seed)
    use_adapter(model, None)
    return model


def logits(model: nn.Module, names: list[str | None], native: bool = True, tokens: int = 4) -> Tensor:
    """Logits [tokens, B, V] of a batch whose prompts have 1 to 3 tokens, each row with the adapter of that name."""
    cache = BatchKVCache(model, range(len(names)))
    cache.native_decoder = None if native else (model, None)
    steps: list[Tensor] = []
    with adapter_of_each_row(model, names), pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(NativeEncoder, "try_build", lambda model: None)
        if model.encoder is not None:
            encode_sources(model, cache, [(3, 4 + row, 5)[: 2 + row % 2] for row in range(len(names))])
        steps.append(forward_last(model, cache, [[7 + row] * (1 + row % 3) for row in range(len(names))]))
        for token in range(1, tokens):
            steps.append(forward_last(model, cache, [[9 * token + row] for row in range(len(names))]))
    assert (cache.native_decoder[1] is not None) == native
    return torch.stack(steps)


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("name", SPECS)
def test_each_row_is_that_of_the_modules(name: str, rows: int):
    model = tuned(name)
    if model.encoder is not None:
        assert NativeEncoder.try_build(model) is not None
    fast, plain = logits(model, NAMES[:rows]), logits(model, NAMES[:rows], native=False)
    torch.testing.assert_close(fast, plain, atol=2e-4, rtol=1e-4)
    without = logits(model, [None] * rows)
    changed = (fast - without).abs().amax((0, 2)) > 1e-2
    assert changed.tolist() == [adapter is not None for adapter in NAMES[:rows]]


@pytest.mark.parametrize("bits", ["", "int8", "int4"])
@pytest.mark.parametrize("rows", [3, 9])
def test_an_adapter_never_touches_another_row(bits: str, rows: int):
    """Bit for bit: a row without one is that of the base alone, and a row with one that of a batch with that one."""
    names = NAMES[:rows]
    model = tuned("llama", bits)
    mixed, plain = logits(model, names), logits(base("llama", bits), [None] * rows)
    for row, name in enumerate(names):
        if name is None:
            assert torch.equal(mixed[:, row], plain[:, row])
        else:
            alone = logits(model, [name if other == row else None for other in range(rows)])
            assert torch.equal(mixed[:, row], alone[:, row])
            assert not torch.equal(mixed[:, row], plain[:, row])


def test_an_adapter_of_the_wrong_row_would_be_seen(monkeypatch):
    model = tuned("llama")
    want = logits(model, NAMES[:3], native=False)
    of_rows = AdapterIndex.of_rows
    monkeypatch.setattr(AdapterIndex, "of_rows", lambda self, count: of_rows(self, count)[::-1])
    assert (logits(model, NAMES[:3]) - want).abs().max() > 1e-2


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_packed_bases_differ_by_rounded_activations_alone(bits: str, monkeypatch):
    def rounded(self: QuantizedLinear, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, 32))
        d = blocks.abs().amax(-1, keepdim=True) / 127
        x = (torch.where(d == 0, 0, blocks / d).round() * d).flatten(-2)
        return nn.functional.linear(x, self.weight, self.bias)

    model = tuned("llama", bits)
    names: list[str | None] = ["low_rank", None, "scales"]  # DoRA reads its packed base by multiply(), not forward()
    fast = logits(model, names)
    plain = logits(model, names, native=False)
    monkeypatch.setattr(QuantizedLinear, "forward", rounded)
    alike = logits(model, names, native=False)
    assert (fast - alike).abs().median() < 1e-4 < 0.1 * (fast - plain).abs().median()


def test_the_active_adapter_acts_on_all_rows():
    model = tuned("gpt2")
    use_adapter(model, "direction")
    torch.testing.assert_close(logits(model, [None, None]), logits(model, ["direction"] * 2), atol=0, rtol=0)
    use_adapter(model, None)
    assert torch.equal(logits(model, [None]), logits(base("gpt2"), [None]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bases_of_16_bits(dtype: torch.dtype):
    """The step computes in float32: it equals the modules of the same weights, widened."""
    model, wide = tuned("llama").to(dtype), tuned("llama").to(dtype).float()
    for module in wide.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers()
    names = ["low_rank", None, "scales", "some"]
    torch.testing.assert_close(logits(model, names), logits(wide, names, native=False), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adapters_of_32_bits_on_a_base_of_16(dtype: torch.dtype):
    model = base("llama").to(dtype)
    for name, method in ADAPTERS.items():
        tune(model, method, name=name)
        randomize(model, 1)
    use_adapter(model, None)
    names = NAMES[:5]
    fast, plain = logits(model, names), logits(model, names, native=False)
    assert (fast - plain).abs().max() < 0.1 * plain.abs().max()  # the modules round to 16 bits


def test_adapters_that_come_and_go():
    model = base("llama")
    cache = BatchKVCache(model, ["a"])
    forward_last(model, cache, [[1, 2]])
    before = cache.native_decoder[1]
    tune(model, LoRA(2, target="all-linear"), name="new")
    randomize(model, 1)
    cache.crop([1])
    got = forward_last(model, cache, [[2]])
    assert cache.native_decoder[1] is not before
    remove_adapter(model, "new")
    cache.crop([1])
    plain = forward_last(model, cache, [[2]])
    assert (got - plain).abs().max() > 1e-2
    assert torch.equal(plain, forward_last(base("llama"), BatchKVCache(model, ["b"]), [[1, 2]]))


@pytest.mark.parametrize("adapter", [-2, len(ADAPTERS)])
def test_an_adapter_that_is_not_there_never_reaches_c(adapter: int):
    model = tuned("llama")
    cache = BatchKVCache(model, ["a"])
    forward_last(model, cache, [[1, 2, 3]])
    with pytest.raises(TensorMismatch, match="a token must lie within"):
        cache.native_decoder[1].run([(1, 3, 0, 0, 4, adapter)], [0], torch.empty(1, 50))


def test_changes_that_c_cannot_compute_are_left_to_the_modules():
    for path, size in (("lora_a", (3, 32)), ("lora_b", (32, 3)), ("lora_a", (4, 64))):
        model = tuned("llama")
        change = model.decoder.layers[1].self_attn.q.changes["low_rank"]
        setattr(change, path, nn.Parameter(torch.zeros(size)))
        assert NativeDecoder.try_build(model) is None
    for pattern in ("*.self_attn.q", "*.self_attn.out", "*.ffn.up"):
        model = base("llama")
        tune(model, IA3(target=(), feed_forward=pattern))
        assert NativeDecoder.try_build(model) is None
