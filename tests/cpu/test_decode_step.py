"""The step in C is the modules' own arithmetic: law over the parts it knows, and it steps aside for the others."""

from __future__ import annotations

from functools import partial

import pytest
import torch

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
    OffsetRMSNorm,
    RelativeBias,
    RMSNorm,
    Rotary,
    SlidingWindow,
    Stack,
    post,
    pre,
    sandwich,
)
from headwater.cpu.build import decode_library, unavailable_reason
from headwater.cpu.layout import CMatrix, CNorm
from headwater.cpu.loss import topk_logprobs
from headwater.families.builders import transformer
from headwater.generation.beam import Beam, beam_search
from headwater.generation.forward import encode_sources, forward_last, forward_single
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder, NativeEncoder
from headwater.generation.request import Request
from headwater.quantization.layers import QuantizedLinear, quantize
from headwater.variants.parallel_block import ParallelBlock
from headwater.variants.rope_scaling import YarnScaling

needs_a_compiler = pytest.mark.skipif(decode_library() is None, reason=f"no compiled step here: {unavailable_reason()}")


PLAIN_TOKENS = Embeddings(50)


def decoder(attn, ffn, norm, embed=PLAIN_TOKENS, place=pre, kind=Block, scale=1.0):
    block = kind((place(norm, self_attn=attn), place(norm, ffn=ffn)))
    stack = Stack(64, embed, (block,) * 3, norm)
    tied = (("head.out", "decoder.embed.tokens"),)
    return Model(decoder=stack, head=LMHead(50, scale=scale), tied=tied)


GATED, ROPE = GatedFeedForward(96), {"position": Rotary(), "mask": Causal()}
KNOWN = {
    "llama": decoder(Attention(4, kv_heads=2, **ROPE), GATED, RMSNorm()),
    "gpt2": decoder(
        Attention(4, bias="qkvo", mask=Causal()), FeedForward(96, "gelu_tanh"), LayerNorm(), Embeddings(50, Learned(64))
    ),
    "qwen2": decoder(Attention(4, kv_heads=1, bias="qkv", **ROPE), GATED, RMSNorm()),
    "qwen3": decoder(Attention(4, head_dim=32, qk_norm=RMSNorm(), **ROPE), GATED, RMSNorm()),
    "gemma": decoder(
        Attention(4, **ROPE), GatedFeedForward(96, "gelu_tanh"), OffsetRMSNorm(), Embeddings(50, scale=8.0)
    ),
    "window": decoder(Attention(4, position=Rotary(), mask=SlidingWindow(5)), GATED, RMSNorm()),
    "partial": decoder(
        Attention(4, position=Rotary(partial_factor=0.5), mask=Causal()), FeedForward(96, "gelu"), LayerNorm()
    ),
    "yarn": decoder(Attention(4, position=Rotary(scaling=YarnScaling(4.0, 8)), mask=Causal()), GATED, RMSNorm()),
    "no places": decoder(Attention(4, mask=Causal()), FeedForward(96, "relu", bias=False), RMSNorm()),
    "post-norm": decoder(Attention(4, **ROPE), GATED, RMSNorm(), place=post),
    "quick": decoder(Attention(4, scale=0.3, **ROPE), FeedForward(96, "quick_gelu"), LayerNorm(), scale=0.5),
}
UNKNOWN = {
    "sandwich": decoder(Attention(4, **ROPE), GATED, RMSNorm(), place=sandwich),
    "side by side": decoder(Attention(4, **ROPE), GATED, RMSNorm(), kind=ParallelBlock),
    "buckets": decoder(Attention(4, position=RelativeBias(bidirectional=False), mask=Causal()), GATED, RMSNorm()),
    "odd width": decoder(Attention(4, **ROPE), GatedFeedForward(90), RMSNorm()),
    "wide values": decoder(Attention(4, v_head_dim=32, **ROPE), GATED, RMSNorm()),
}


def built(spec: Model, seed: int = 0):
    model = spec.build(seed=seed).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def said(model, fast: bool, change=lambda stepper: None, first: int = 9) -> torch.Tensor:
    """Scores of a prompt read whole, tokens one by one, two rows of different length, and several tokens at once."""
    ids = torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    slots = BatchKVCache(model, ["a"])
    slots.native_decoder = (model, NativeDecoder.try_build(model) if fast else None)
    if fast:
        change(slots.native_decoder[1])
    scores = [forward_last(model, slots, [ids[:first]])]
    scores += [forward_last(model, slots, [[token]]) for token in ids[first:14]]
    scores.append(forward_single(model, slots, ids[14:18], 4))
    other = BatchKVCache(model, ["b"])
    other.native_decoder = slots.native_decoder
    forward_last(model, other, [ids[2 : 2 + first]])
    slots.append_rows(other)
    scores += [forward_last(model, slots, [[token], [token + 1]]) for token in ids[18:22]]
    return torch.cat(scores)


def distance(model, change=lambda stepper: None) -> float:
    assert NativeDecoder.try_build(model) is not None
    return (said(model, True, change) - said(model, False)).abs().max().item()


@needs_a_compiler
@pytest.mark.parametrize("name", KNOWN)
def test_step_equals_the_modules(name: str):
    assert distance(built(KNOWN[name])) < 2e-5


@needs_a_compiler
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_packed_weights_differ_only_by_rounded_activations(name: str, bits: str, monkeypatch):
    """Against modules whose activations are rounded to 8 bits in blocks of 32 as well, next to nothing is left, until a
    number falls on the edge between two roundings: its token then stays different for all that come after it.
    """
    model = built(KNOWN[name])
    assert quantize(model, bits)
    fast, plain = said(model, True, first=4), said(model, False, first=4)  # few enough to be rounded alike

    def rounded(self, x):
        blocks = x.unflatten(-1, (-1, 32))
        d = blocks.abs().amax(-1, keepdim=True) / 127
        x = (torch.where(d == 0, 0, blocks / d).round() * d).flatten(-2)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    monkeypatch.setattr(QuantizedLinear, "forward", rounded)
    alike = said(model, False, first=4)
    assert ((fast - alike).abs().mean(-1) < 1e-5).sum() >= 4 and ((fast - plain).abs().mean(-1) > 1e-3).all()
    assert (fast - alike).abs().mean() < 0.5 * (fast - plain).abs().mean()
    assert (fast - plain).abs().mean() < 0.1  # logits are about 4


@needs_a_compiler
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "post-norm"])
def test_weights_of_16_bits_are_read_as_they_lie(name: str, kind: torch.dtype):
    """In the step nothing but the weights is rounded: it equals the modules of the same weights widened."""
    model = built(KNOWN[name]).to(kind)
    stepper = NativeDecoder.try_build(model)
    assert stepper.layers[0].up.data == model.decoder.layers[0].ffn.up.weight.data_ptr()
    wide = built(KNOWN[name]).to(kind).float()
    for module in wide.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers()
    assert (said(model, True) - said(wide, False)).abs().max() < 2e-5
    assert (said(model, True) - said(built(KNOWN[name]), False)).abs().max() > 1e-4  # they are rounded indeed


@needs_a_compiler
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_translator_of_16_bits(kind: torch.dtype):
    model, wide = built(TRANSLATORS["paper"]).to(kind), built(TRANSLATORS["paper"]).to(kind).float()
    assert (received(model, True, 3) - received(wide, False, 3)).abs().max() < (0.02 if kind == torch.float16 else 0.2)


# ------------------------------------------------------------------------- an encoder, many rows, and beams by index

SIZES = {"d_model": 64, "heads": 4, "layers": 2, "d_ff": 96}
TRANSLATORS = {
    "paper": transformer(50, **SIZES),
    "pre-norm": transformer(50, 40, norm_position="pre", activation="gelu", **SIZES),
    "learned": transformer(50, position="learned", max_positions=40, kv_heads=2, **SIZES),
    "rotary": transformer(50, position="rotary", norm="rms", gated=True, activation="silu", **SIZES),
}
SOURCES = [tuple(range(3, 3 + n)) for n in (5, 2, 9, 4)]


def translations(model, fast: bool, monkeypatch, change=lambda stepper: None):
    of = NativeDecoder.try_build

    def made(given):
        stepper = of(given) if fast else None
        assert bool(stepper) == fast
        if fast:
            change(stepper)
        return stepper

    with monkeypatch.context() as patch:
        patch.setattr(NativeDecoder, "try_build", made)
        patch.setattr(NativeEncoder, "try_build", NativeEncoder.try_build if fast else lambda model: None)
        asked = [Request((1,), source, max_tokens=12, stop_token_ids=frozenset({0})) for source in SOURCES]
        found = beam_search(model, asked, Beam(3, num_return_sequences=3))
    return [(row.output_ids, score) for one in found for row, score in one]


@needs_a_compiler
@pytest.mark.parametrize("name", TRANSLATORS)
def test_beams_of_a_translator_are_those_of_its_modules(name: str, monkeypatch):
    model = built(TRANSLATORS[name])
    fast, plain = (translations(model, way, monkeypatch) for way in (True, False))
    assert [text for text, _ in fast] == [text for text, _ in plain]
    assert [score for _, score in fast] == pytest.approx([score for _, score in plain], abs=1e-4)


def received(model, fast: bool, rows: int) -> torch.Tensor:
    """Scores of so many translations, token by token."""
    slots = BatchKVCache(model, range(rows))
    slots.native_decoder = (model, NativeDecoder.try_build(model) if fast else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeEncoder, "try_build", NativeEncoder.try_build if fast else lambda model: None)
        encode_sources(model, slots, [tuple(range(3, 5 + n % 6)) for n in range(rows)])
    return torch.cat([forward_last(model, slots, [[token + n % 9] for n in range(rows)]) for token in (1, 9, 8, 7)])


@needs_a_compiler
@pytest.mark.parametrize("rows", [1, 8, 9, 23])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_few_rows_and_many(name: str, rows: int):
    model = built(TRANSLATORS[name])
    torch.testing.assert_close(received(model, True, rows), received(model, False, rows), atol=3e-5, rtol=0)


@needs_a_compiler
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_many_rows_of_packed_weights(bits: str):
    """Rounded activations are all that differs. Beside weights of 8 bits they have 7, which costs at most twice what
    rounding the weights does; beside weights of 4 bits they have 8, which costs a fifth of that at most.
    """
    model, whole = built(TRANSLATORS["paper"]), built(TRANSLATORS["paper"])
    quantize(model, bits)
    fast, plain, exact = received(model, True, 23), received(model, False, 23), received(whole, False, 23)
    assert 0 < (fast - plain).abs().mean() < (2 if bits == "int8" else 0.2) * (plain - exact).abs().mean()


def states(model, fast: bool, sources, change=lambda listener: None) -> torch.Tensor:
    listener = NativeEncoder.try_build(model)
    change(listener)
    if fast:
        assert listener.supports(sources)
        return torch.cat([row[: len(one)] for row, one in zip(listener.encode(sources), sources, strict=True)])
    return torch.cat([model.encode(torch.tensor([one])).hidden_states[0] for one in sources])


@needs_a_compiler
@pytest.mark.parametrize("together", [3, 8, 256])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_sources_are_heard_as_the_modules_hear_them(name: str, together: int, monkeypatch):
    """Read together and in lots, few tokens and many; a longer neighbour changes nothing."""
    monkeypatch.setattr("headwater.cpu.decode.MAX_BATCHED_TOKENS", together)
    model = built(TRANSLATORS[name])
    with torch.inference_mode():
        torch.testing.assert_close(states(model, True, SOURCES), states(model, False, SOURCES), atol=3e-5, rtol=0)


@needs_a_compiler
def test_an_encoder_that_looks_back_only_would_be_seen(monkeypatch):
    model = built(TRANSLATORS["paper"])
    with torch.inference_mode():
        want, narrow = states(model, False, SOURCES), lambda s: [setattr(layer, "window", 2) for layer in s.layers]
        assert (states(model, True, SOURCES, narrow) - want).abs().max() > 1e-3
    assert not NativeEncoder.try_build(model).supports([(3, 50)]) and not NativeEncoder.try_build(model).supports(
        [(3,), ()]
    )
    model.encoder.layers[1].ffn.up = torch.nn.Sequential(model.encoder.layers[1].ffn.up)
    assert NativeEncoder.try_build(model) is None


def without_rows(set_batch, row_of_token, source_lengths):
    set_batch(None, source_lengths)


FORGOTTEN = {
    "whose keys they are": lambda s: setattr(s, "set_batch", partial(without_rows, s.set_batch)),
    "the norm after the source": lambda s: [setattr(layer, "cross_post", CNorm()) for layer in s.layers],
    "the source": lambda s: [setattr(layer, "cross_q", CMatrix()) for layer in s.layers],
}


@needs_a_compiler
@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_beams_would_see(what: str, monkeypatch):
    model = built(TRANSLATORS["paper"])
    assert translations(model, True, monkeypatch, FORGOTTEN[what]) != translations(model, True, monkeypatch)


@pytest.mark.parametrize("count", [1, 5, 8])
def test_the_best_few_and_the_mass(count: int, monkeypatch):
    scores = torch.randn(7, 301, generator=torch.Generator().manual_seed(1))
    scores[3, 200] = scores[3, 100] = 9.0  # equals: the first
    fast = topk_logprobs(scores, count)
    monkeypatch.setattr("headwater.cpu.loss.decode_library", lambda: None)
    plain = topk_logprobs(scores, count)
    assert fast.ids == plain.ids and fast.ids[3][0] == 100
    torch.testing.assert_close(torch.tensor(fast.logprobs), scores.log_softmax(-1).topk(count).values)
    torch.testing.assert_close(torch.tensor(fast.logsumexp), torch.tensor(plain.logsumexp))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_have_no_mass(bad: float):
    scores = torch.zeros(2, 100)
    scores[1, 70] = bad
    mass = topk_logprobs(scores, 3).logsumexp
    assert mass[0] == pytest.approx(4.60517, abs=1e-4) and mass[1] != mass[1]


FAULTS = {
    "another scale": lambda s: setattr(s.c_model, "scale", 1.0),
    "another eps": lambda s: setattr(s.c_model.final_norm, "eps", 1.0),
    "another activation": lambda s: setattr(s.c_model, "act", 3),
    "a rotation by other angles": lambda s: setattr(s.export, "cos_sin", partial(other_angles, s.export.cos_sin)),
    "a window": lambda s: [setattr(layer, "window", 3) for layer in s.layers],
    "keys of the layer before": lambda s: setattr(s.layers[1], "k", s.layers[0].k),
}


def other_angles(angles, count):
    return tuple(t.flip(0) for t in angles(count))


@needs_a_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_would_see(fault: str):
    assert distance(built(KNOWN["llama"]), FAULTS[fault]) > 1e-3


@pytest.mark.parametrize("name", UNKNOWN)
def test_it_steps_aside_for_parts_it_does_not_know(name: str):
    model = built(UNKNOWN[name])
    assert NativeDecoder.try_build(model) is None
    slots = BatchKVCache(model, ["a"])
    assert forward_last(model, slots, [[1, 2, 3]]).shape == (1, 50)


def test_it_steps_aside_for_a_listener_and_a_changed_layer():
    model = built(KNOWN["llama"])
    handle = model.decoder.layers[0].self_attn.kernel.weights.register_forward_hook(lambda *_: None)
    assert NativeDecoder.try_build(model) is None
    handle.remove()
    model.decoder.layers[1].ffn.up = torch.nn.Sequential(model.decoder.layers[1].ffn.up)
    assert NativeDecoder.try_build(model) is None


def test_without_a_compiler_the_modules_do_the_work(monkeypatch):
    monkeypatch.setattr("headwater.generation.native.decode_library", lambda: None)
    assert NativeDecoder.try_build(built(KNOWN["llama"])) is None
