"""Cross-attention over keys and values of 16 bits in panels: what the modules compute, for any rows and sources."""

from __future__ import annotations

import pytest
import torch

from headwater.cpu.build import decode_constants, decode_library, unavailable_reason
from headwater.cpu.decode import source_panels
from headwater.families.builders import transformer
from headwater.generation.forward import encode_sources, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.quantization.layers import quantize

pytestmark = [
    pytest.mark.skipif(decode_library() is None, reason=f"nothing is compiled here: {unavailable_reason()}"),
    pytest.mark.skipif(
        decode_library() is not None and not decode_constants()["HAVE_SOURCE_PANELS"],
        reason="this processor has no F16C",
    ),
]
VOCAB = 90


def quantized_model(heads: int = 2):
    torch.manual_seed(0)
    model = transformer(VOCAB, d_model=64, heads=heads, layers=2, d_ff=96, dropout=0.0).build(seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    assert quantize(model, "int8")
    return model


def logits_of(model, sources, rows):
    """Logits of two steps, and whether the sources were in panels."""
    cache = BatchKVCache(model, range(len(sources)))
    encode_sources(model, cache, sources)
    first = forward_last(model, cache, [[3]] * len(sources))
    cache.reorder(rows)
    second = forward_last(model, cache, [[5 + n] for n in range(len(rows))])
    native = cache.native_decoder[1]
    return torch.cat((first, second)), native is not None and native.c_model.source_panels


SOURCES = {
    "one source, as many beams as share a load": ([range(3, 40)], [0] * 5),
    "more beams than that": ([range(3, 20)], [0] * 13),
    "beams of two sources": ([range(3, 40), range(5, 9)], [0, 0, 0, 1, 1, 1]),
    "sources in turn": ([range(3, 20), range(4, 20), range(3, 36)], [2, 0, 1, 2, 0, 1]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_equals_the_exact_floats(name, monkeypatch):
    sources, rows = SOURCES[name]
    model = quantized_model()
    ours, in_panels = logits_of(model, [tuple(source) for source in sources], rows)
    assert in_panels
    monkeypatch.setattr("headwater.cpu.decode.source_panels", lambda pair: None)
    exact, in_panels = logits_of(model, [tuple(source) for source in sources], rows)
    assert not in_panels
    assert (ours - exact).norm() < 0.01 * exact.norm()


def test_a_fault_in_the_panels_would_be_seen(monkeypatch):
    sources, rows = SOURCES["beams of two sources"]
    model = quantized_model()
    exact, _panels = logits_of(model, [tuple(source) for source in sources], rows)

    def shifted(pair):
        keys, values = source_panels(pair)
        return keys, values.roll(1, 3)  # the values of the token before

    monkeypatch.setattr("headwater.cpu.decode.source_panels", shifted)
    wrong, _panels = logits_of(model, [tuple(source) for source in sources], rows)
    assert (wrong - exact).norm() > 0.03 * exact.norm()


def test_heads_that_are_no_whole_panels_stay_floats():
    model = quantized_model(heads=8)  # of 8 columns
    assert not logits_of(model, [(3, 4, 5)], [0])[1]


def test_what_does_not_fit_16_bits_stays_floats():
    keys = torch.zeros(1, 2, 3, 16)
    assert source_panels((keys, keys)) is not None
    for value in (1e6, torch.nan, -torch.inf):
        large = keys.clone()
        large[0, 1, 2, 3] = value
        assert source_panels((keys, large)) is None
        assert source_panels((large, keys)) is None


@pytest.mark.parametrize("name", SOURCES)
def test_with_any_number_of_threads(name, same_bits):
    sources, rows = SOURCES[name]
    model = quantized_model()
    same_bits(lambda: logits_of(model, [tuple(source) for source in sources], rows)[0])
