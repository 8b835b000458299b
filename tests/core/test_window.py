"""A window is worked off in blocks: the same answers as one dense mask, in time and memory that grow as the length."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwater import core as hw
from headwater.core import masks
from headwater.core.masks import AttentionMask
from headwater.core.positions import PositionEncoding
from headwater.variants.soft_cap import SoftCap
from headwater.variants.transformer_xl import RelativeXL

RULES = {
    "window": hw.SlidingWindow(5),
    "wide window": hw.SlidingWindow(90),
    "around": hw.LocalWindow(4),
    "only itself": hw.SlidingWindow(1),
    "both": hw.And(hw.Causal(), hw.LocalWindow(70)),
}


def model_of(rule, position="none", kernel=None, layers=2):
    attention = hw.Attention(2, mask=rule, position=POSITIONS[position][1], kernel=kernel or hw.SDPA())
    block = hw.Block((hw.pre(hw.LayerNorm(), self_attn=attention), hw.pre(hw.LayerNorm(), ffn=hw.FeedForward(16))))
    stack = hw.Stack(8, hw.Embeddings(11, POSITIONS[position][0]), (block,) * layers)
    side = "decoder" if rule.window_size[1] == 0 else "encoder"
    return hw.Model(**{side: stack}, head=hw.LMHead(11), init=(("*", hw.Normal(0.5)),)).build(seed=0).double()


POSITIONS = {
    "none": (hw.NoPosition(), hw.NoPosition()),
    "sines": (hw.Sinusoidal(), hw.NoPosition()),
    "rotary": (hw.NoPosition(), hw.Rotary()),
    "alibi": (hw.NoPosition(), hw.Alibi()),
    "relative": (hw.NoPosition(), hw.RelativeBias(8, 40)),
    "xl": (hw.NoPosition(), RelativeXL()),
}
LENGTH = 290  # above three blocks of 64, and no multiple of one


@pytest.fixture
def dense(monkeypatch):
    """Call it and blocks are off."""
    return lambda: monkeypatch.setattr(masks.AttentionMask, "block_size", None)


def padding(kind: str) -> dict:
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    if kind == "left":
        keep[1, :150] = False
    if kind == "right":
        keep[1, 111:] = False
    if kind == "holes":
        keep[1] = torch.rand(LENGTH, generator=torch.Generator().manual_seed(1)) < 0.4
    if kind == "packed":
        numbers = torch.tensor([1] * 100 + [2] * 3 + [3] * 140 + [0] * 47)
        return {"document_ids": torch.stack((numbers, numbers.roll(30).where(torch.arange(LENGTH) >= 30, 9)))}
    return {} if kind == "whole" else {"attention_mask": keep}


def answers(model, given):
    ids = torch.randint(11, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    out = model(ids, **given)
    real = given.get("attention_mask", given.get("document_ids", torch.ones_like(ids)) != 0)
    model.zero_grad()
    (out[real] * torch.sin(torch.arange(out[real].numel()).view(out[real].shape))).sum().backward()
    return out.detach()[real], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


TRIALS = [(rule, "rotary", kind) for rule in RULES for kind in ("whole", "left", "right", "holes", "packed")]
TRIALS += [("window", position, kind) for position in POSITIONS for kind in ("whole", "left", "packed")]


@pytest.mark.parametrize(("rule", "position", "kind"), TRIALS)
def test_blocks_are_the_dense_mask(rule, position, kind, dense):
    model, given = model_of(RULES[rule], position), padding(kind)
    got, got_grads = answers(model, given)
    dense()
    want, want_grads = answers(model, given)
    assert (got - want).abs().max() < 1e-9
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).abs().max() < 1e-8 * max(1, grad.abs().max()), name


@pytest.mark.parametrize("kernel", [hw.Eager(), SoftCap(3.0)], ids=repr)
def test_every_kernel_works_in_blocks(kernel, dense):
    model = model_of(RULES["window"], "alibi", kernel)
    got, _ = answers(model, {})
    dense()
    assert (got - answers(model, {})[0]).abs().max() < 1e-9


@pytest.mark.parametrize("make", [hw.dynamic_cache, hw.sliding_cache])
def test_a_long_prompt_in_blocks_then_steps(make):
    model, ids = model_of(RULES["window"], "rotary").eval(), torch.randint(11, (2, LENGTH))
    with torch.no_grad():
        whole, cache = model(ids), make(model)
        steps = [model.decode(part, cache=cache) for part in ids.split((LENGTH - 3, 1, 2), 1)]
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-9


def test_a_block_that_forgets_its_neighbour_would_show(monkeypatch, dense):
    model = model_of(RULES["wide window"], "rotary")
    monkeypatch.setattr(masks.SlidingWindow, "window_size", (0, 0))
    got, _ = answers(model, {})
    dense()
    assert (got - answers(model, {})[0]).abs().max() > 1e-3


@pytest.mark.parametrize("rule", [hw.Bidirectional(), hw.Causal(), *RULES.values()], ids=repr)
def test_a_rule_allows_exactly_the_keys_of_its_window(rule):
    distance = torch.arange(200)[None, :] - torch.arange(200)[:, None]  # k - q
    back, ahead = rule.window_size
    inside = torch.ones_like(distance, dtype=torch.bool)
    if back is not None:
        inside &= distance >= -back
    if ahead is not None:
        inside &= distance <= ahead
    allowed = rule.allows(torch.arange(200)[:, None], torch.arange(200)[None, :])
    assert torch.equal(inside if allowed is None else allowed, inside)


# ------------------------------------------------------------------------------------------------------- what it costs


class Made(TorchDispatchMode):
    """Counts the bytes of every tensor an operation makes: what a run costs, free of noise."""

    def __init__(self):
        super().__init__()
        self.bytes, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        seen = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in seen:
                self.bytes += t.untyped_storage().nbytes()
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


def cost(length: int, size: int = 64, causal: bool = False) -> Made:
    rule = hw.Causal() if causal else hw.SlidingWindow(size)
    kernel, positions = hw.Attention(4, scale=0.25, kernel=hw.Eager()).build_kernel(8), torch.arange(length)[None]
    tensors = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    mask = AttentionMask(rule, PositionEncoding(), positions, positions, aligned=True)
    with Made() as made:
        kernel(*tensors, mask, None).sum().backward()
    return made


def test_what_is_made_grows_as_the_length():
    made = [cost(length).bytes for length in (1024, 2048, 4096)]
    assert all(1.8 < b / a < 2.2 for a, b in zip(made, made[1:], strict=False)), made
    assert cost(2048, causal=True).bytes > 5 * cost(2048).bytes  # the n × n of a dense mask, for comparison
    assert cost(4096).largest < 3 * cost(2048).largest


def test_what_is_made_grows_as_the_window():
    made = [cost(4096, size).bytes for size in (128, 256, 512)]
    assert all(1.4 < b / a < 2.4 for a, b in zip(made, made[1:], strict=False)), made


def test_a_dense_mask_would_show(dense):
    dense()
    made = [cost(length).bytes for length in (1024, 2048)]
    assert made[1] / made[0] > 3


PEAK = """
import sys, torch
from headwater import core as hw
from headwater.core.masks import AttentionMask
from headwater.core.positions import PositionEncoding

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

torch.set_num_threads(1)
n = int(sys.argv[1])
kernel, places = hw.Attention(8, scale=0.25).build_kernel(64), torch.arange(n)[None]
q, k, v = (torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3))
open("/proc/self/clear_refs", "w").write("5")  # the highest so far is forgotten
before = kilobytes("VmRSS")
mask = AttentionMask(hw.SlidingWindow(256), PositionEncoding(), places, places, aligned=True)
kernel(q, k, v, mask, None).sum().backward()
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure a peak")
def test_peak_memory_doubles_with_the_length():
    def peak(length: int) -> int:
        return int(subprocess.run([sys.executable, "-c", PEAK, str(length)], check=True, capture_output=True).stdout)

    peaks = [peak(length) for length in (2048, 4096, 8192, 16384)]
    assert all(b / a < 2.6 for a, b in zip(peaks, peaks[1:], strict=False)), peaks


@pytest.mark.slow
def test_time_doubles_with_the_length():
    kernel = hw.Attention(4, scale=0.25, kernel=hw.SDPA()).build_kernel(8)

    def seconds(length: int) -> float:
        positions = torch.arange(length)[None]
        tensors = [torch.randn(1, 4, length, 32, requires_grad=True) for _ in range(3)]
        mask, taken = AttentionMask(hw.SlidingWindow(256), PositionEncoding(), positions, positions, aligned=True), []
        for _ in range(5):
            begun = time.process_time()
            kernel(*tensors, mask, None).sum().backward()
            taken.append(time.process_time() - begun)
        return statistics.median(taken)

    seconds(1024)
    times = [seconds(length) for length in (1024, 2048, 4096, 8192, 16384)]
    assert all(b / a < 2.6 for a, b in zip(times, times[1:], strict=False)), times
    assert times[-1] / times[0] < 2.3**4


def test_long_sight_is_not_cut_into_blocks():
    """A dense mask costs less where the window spans most of the text."""
    positions = torch.arange(200)[None]
    near = AttentionMask(hw.SlidingWindow(8), PositionEncoding(), positions, positions, aligned=True)
    assert near.block_size and not replace(near, rule=hw.SlidingWindow(190)).block_size
    assert not replace(near, rule=hw.Causal()).block_size and not replace(near, aligned=False).block_size
