"""Every planted fault is detected, in the right module, at the right positions, with a matching remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import headwater.core as core
from headwater.checker.api import check
from headwater.checker.laws import CLAIMS_BY_LAW
from headwater.core import embeddings, masks
from headwater.core import model as core_model
from headwater.errors import CheckFailed
from headwater.families import builders
from headwater.i18n import translated

# ------------------------------------------------------------------------ faults in a foreign attention layer


def faulty_gpt(nano, **methods):
    """A small GPT whose attention has some methods replaced, and its step, so that its KV cache is checked."""
    kind = type("Wrong", (nano.Attention,), methods)
    model = nano.GPT(kind)
    return model, model.step


def triangle(queries, keys, diagonal):
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)


def without_last(t):
    return torch.cat((t[:, :, :-1], torch.zeros_like(t[:, :, -1:])), 2)


def misread_additive_mask(self, scores, mask):
    """An additive mask (0 and -inf) passed to code that masks where the mask is 0."""
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return scores.masked_fill(additive == 0, -1e9).softmax(-1)


# name -> (methods, law, module, words of the remedy)
ATTENTION_FAULTS = {
    "no mask at all": (
        dict(mask=lambda self, q, k: torch.ones(q, k, dtype=torch.bool)),
        "future",
        "h.0.attn",
        "causal=False",
    ),
    "inverted mask": (dict(mask=lambda self, q, k: ~triangle(q, k, k - q - 1)), "future", "h.0.attn", "inverted"),
    "additive mask read as a boolean": (dict(weights=misread_additive_mask), "future", "h.0.attn", "inverted"),
    "off by one": (dict(mask=lambda self, q, k: triangle(q, k, k - q + 1)), "future", "h.0.attn", "off by one"),
    "mask after the softmax": (
        dict(weights=lambda self, s, m: s.softmax(-1) * m),
        "future",
        "h.0.attn",
        "before the softmax",
    ),
    "mask added as 0 and 1": (
        dict(weights=lambda self, s, m: (s + m).softmax(-1)),
        "future",
        "h.0.attn",
        "before the softmax",
    ),
    "mask of -10": (
        dict(weights=lambda self, s, m: (s - 10.0 * ~m).softmax(-1)),
        "future",
        "h.0.attn",
        "before the softmax",
    ),
    "padding visible": (dict(hide=lambda self, m, keep: m), "padding", "h.0.attn", "padded keys"),
    "padding hidden after the softmax": (
        dict(
            hide=lambda self, m, keep: setattr(self, "keep", keep) or m,
            weights=lambda self, s, m: (
                s.masked_fill(~m, -torch.inf).softmax(-1) * getattr(self, "keep", m)[:, None, None, :]
                if hasattr(self, "keep") and self.keep.shape[1] == s.shape[3] and self.keep.shape[0] == s.shape[0]
                else s.masked_fill(~m, -torch.inf).softmax(-1)
            ),
        ),
        "padding",
        "h.0.attn",
        "padded keys",
    ),
    "top-left causal with a cache": (
        dict(mask=lambda self, q, k: triangle(q, k, 0)),
        "cache",
        "h.0.attn",
        "bottom right",
    ),
    "a cache that drops a token": (
        dict(present=lambda self, k, v: (without_last(k), without_last(v))),
        "cache",
        "h.0.attn",
        "Keep every earlier token",
    ),
    "keys of another row": (
        dict(
            split=lambda self, x: [t if n == 0 else t.flip(0) for n, t in enumerate(super(type(self), self).split(x))]
        ),
        "batch",
        "h.0.attn",
        "batch axis",
    ),
}


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
def test_an_attention_fault_is_detected(nano, fault):
    methods, law, module, words = ATTENTION_FAULTS[fault]
    model, step = faulty_gpt(nano, **methods)
    report = check(model, step=step)
    verdict = report[law]
    assert not report.ok and verdict.status == "failed", report
    assert module is None or verdict.module == module, report
    assert words in verdict.remedy, report
    assert verdict.difference > 0 and verdict.position is not None
    assert all(
        max(text) >= "\u4e00" for text in (translated(text, "zh") for text in (verdict.message, verdict.remedy))
    ), "in Chinese too"
    with pytest.raises(CheckFailed, match=f"{report.failed[0].law}: .* in "):
        report.raise_if_failed()


def test_a_leak_is_reported_with_its_positions(nano):
    model, _ = faulty_gpt(nano, mask=lambda self, q, k: triangle(q, k, k - q + 1))
    verdict = check(model, laws=["future"])["future"]
    assert 1 <= verdict.key - verdict.position <= 2, "two layers, each one ahead"
    assert (
        f"position {verdict.position} of row {verdict.row}" in verdict.message
        and f"position {verdict.key}" in verdict.message
    )


def test_only_the_violated_law_fails(nano):
    model, step = faulty_gpt(nano, mask=lambda self, q, k: triangle(q, k, 0))
    report = check(model, step=step)
    assert [verdict.law for verdict in report.failed] == ["cache"]
    assert "tokens 5 to 5 after 5" in report["cache"].message


def test_a_fault_is_reported_once(nano):
    padding = check(faulty_gpt(nano, hide=lambda self, m, keep: m)[0])
    assert [verdict.law for verdict in padding.failed] == ["padding"] and "follows from padding" in padding[
        "positions"
    ].message
    leaks = check(faulty_gpt(nano, mask=lambda self, q, k: triangle(q, k, k - q + 1))[0])
    assert [verdict.law for verdict in leaks.failed] == ["future"] and "follows from future" in leaks[
        "gradients"
    ].message


# ------------------------------------------------------------------------ faults in other modules


def test_positions_that_count_the_padding_are_detected(nano):
    class Wrong(nano.GPT):
        def position_ids(self, ids, keep, first):
            return first + torch.arange(ids.shape[1])[None]

    report = check(Wrong())
    assert [verdict.law for verdict in report.failed] == ["positions"]
    assert report["positions"].module == "wpe" and "cumsum" in report["positions"].remedy


def windowed(nano, size):
    def mask(self, queries, keys):
        return triangle(queries, keys, keys - queries) & ~triangle(queries, keys, keys - queries - size)

    return faulty_gpt(nano, mask=mask)[0]


def test_a_window_one_too_long_is_detected(nano):
    assert check(windowed(nano, 3), receptive_field=(4, 0)).ok, "two layers with windows of 3 reach 4 back"
    report = check(windowed(nano, 4), receptive_field=(4, 0))
    assert [verdict.law for verdict in report.failed] == ["window"]
    assert report["window"].position - report["window"].key > 4 and "q - k" in report["window"].remedy


class Mixing(nn.Module):
    """A module between two blocks that mixes what it must not."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return self.mix(x)


class BatchNormOverPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(24)

    def forward(self, x):
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


class BidirectionalConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(24, 24, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


MIXERS = {
    "a mean over the row": (
        lambda: Mixing(lambda x: x + x.mean(1, keepdim=True)),
        "future",
        "drop.1",
        "before the softmax",
    ),
    "a convolution that looks ahead": (BidirectionalConv, "future", "drop.1.conv", "off by one"),
    "BatchNorm over positions": (BatchNormOverPositions, "future", "drop.1.bn", "normalise each position"),
    "a softmax over the batch": (lambda: Mixing(lambda x: x * x.softmax(0)), "batch", "drop.1", "batch axis"),
    "a detached branch": (
        lambda: nn.Sequential(nn.Linear(24, 24), Mixing(lambda x: x.detach())),
        "gradients",
        "wte",
        "detach",
    ),
    "a root of nothing": (lambda: Mixing(lambda x: (x - x).sqrt() + x), "gradients", "drop.1", "divides"),
    "a logarithm of nothing": (lambda: Mixing(lambda x: x + (x - x).log() * 0), "numbers", "drop.1", "divides"),
}


@pytest.mark.parametrize("fault", MIXERS)
def test_a_faulty_module_is_detected(nano, fault):
    make, law, module, words = MIXERS[fault]
    model = nano.GPT()
    model.drop = nn.Sequential(nn.Dropout(0.0), make())
    report = check(model)
    assert report[law].status == "failed", report
    assert report[law].module == module and words in report[law].remedy, report


def test_batchnorm_fails_only_in_training_mode(nano):
    model = nano.GPT()
    model.drop = BatchNormOverPositions()
    report = check(model, laws=["future", "batch"])
    assert all("training mode" in verdict.message for verdict in report.failed) and len(report.failed) == 2


def test_minus_1e9_twice_in_half_precision_is_nan(nano):
    """Two additive masks of -1e9 in fp16: a row without visible keys adds -inf to -inf, and softmax gives NaN."""

    def weights(self, scores, mask):
        hidden = torch.where(mask, 0.0, -1e9).to(scores.dtype)
        return (scores + hidden + hidden).softmax(-1)

    model, _ = faulty_gpt(nano, weights=weights)
    report = check(model.half(), laws=["numbers"])
    verdict = report["numbers"]
    assert verdict.status == "failed" and verdict.module == "h.0.attn", report
    assert (verdict.row, verdict.position) == (1, 0) and "-1e9" in verdict.remedy and "padding" in verdict.message


def test_an_unused_parameter_is_a_warning_not_a_failure(nano):
    model = nano.GPT()
    model.spare = nn.Linear(3, 3)
    report = check(model)
    assert report.ok and report["gradients"].status == "warning" and "spare.weight" in report["gradients"].message


# ------------------------------------------------------------------------ headwater models with planted faults


def decoder(**sizes):
    return builders.decoder(37, d_model=24, heads=4, layers=2, d_ff=48, **sizes).build(seed=0)


def with_window(size):
    from headwater.parts import swap

    spec = builders.decoder(37, d_model=24, heads=4, layers=2, d_ff=48)
    return swap(spec, core.Attention, lambda a: dataclasses.replace(a, mask=core.SlidingWindow(size))).build(seed=0)


def test_headwater_with_an_inverted_mask(monkeypatch):
    monkeypatch.setattr(masks.AttentionMask, "is_causal", property(lambda self: False))
    monkeypatch.setattr(masks.Causal, "allows", lambda self, q, k: k > q)
    verdict = check(decoder())["future"]
    assert (
        verdict.status == "failed"
        and verdict.module == "decoder.layers.0.self_attn.kernel"
        and "inverted" in verdict.remedy
    )


def test_headwater_with_a_mask_off_by_one(monkeypatch):
    monkeypatch.setattr(masks.AttentionMask, "is_causal", property(lambda self: False))
    monkeypatch.setattr(masks.Causal, "allows", lambda self, q, k: k <= q + 1)
    verdict = check(decoder())["future"]
    assert verdict.module == "decoder.layers.0.self_attn.kernel" and "off by one" in verdict.remedy


def test_headwater_with_a_top_left_mask_and_a_cache(monkeypatch):
    """is_causal with one query and many keys aligns the mask to the top left."""
    monkeypatch.setattr(
        masks.AttentionMask,
        "is_causal",
        property(lambda self: self.rule.window_size[1] == 0 and self.attention_mask is None),
    )
    report = check(decoder())
    assert report["cache"].module == "decoder.layers.0.self_attn.kernel" and report["future"].status == "passed"


def test_headwater_with_a_window_one_too_long(monkeypatch):
    assert check(with_window(3)).ok
    monkeypatch.setattr(masks.SlidingWindow, "allows", lambda self, q, k: (k <= q) & (q - k <= self.size))
    verdict = check(with_window(3))["window"]
    assert verdict.status == "failed" and verdict.module == "decoder.layers.0.self_attn.kernel", verdict


def test_headwater_with_leaking_documents(monkeypatch):
    monkeypatch.setattr(masks.AttentionMask, "boolean", lambda self: self.rule.allows(
        self.q_positions[:, :, None], self.k_positions[:, None, :])[:, None])  # fmt: skip
    report = check(decoder())
    assert report["documents"].status == report["padding"].status == "failed"
    assert report["documents"].module == "decoder.layers.0.self_attn.kernel"
    assert "document 2 sees document 1" in report["documents"].message and "document ids" in report["documents"].remedy


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_headwater_with_positions_that_count_the_padding(monkeypatch, position):
    def plain(self, count):
        return count + torch.arange(self.ids.shape[1])[None]

    monkeypatch.setattr(embeddings.ModelInputs, "positions_from", plain)
    report = check(decoder(position=position), laws=["positions", "padding"])
    assert [verdict.law for verdict in report.failed] == ["positions"]
    assert report["positions"].module.startswith("decoder.embed"), report


def test_headwater_with_visible_source_padding(monkeypatch):
    model = builders.transformer(37, d_model=24, heads=4, layers=2, d_ff=48).build(seed=0)
    assert check(model).ok
    rows = core_model.Transformer.inputs

    def without_source_mask(self, ids, attention_mask=None, *arguments, name="ids", **named):
        return rows(self, ids, None if name == "source" else attention_mask, *arguments, name=name, **named)

    monkeypatch.setattr(core_model.Transformer, "inputs", without_source_mask)
    report = check(model)
    assert [verdict.law for verdict in report.failed][:1] == ["padding"] and "source" in report["padding"].message
    assert report["padding"].module.startswith("encoder.") or "cross_attn" in report["padding"].module


def test_every_law_has_a_fault_that_breaks_it():
    """Each law is named by a fault above."""
    text = Path(__file__).read_text(encoding="utf-8")
    for law in (*CLAIMS_BY_LAW, "numbers", "gradients"):
        assert law == "backend" or f'"{law}"' in text


def test_a_back_end_that_differs_is_detected(monkeypatch):
    from headwater.core import kernels

    fused = kernels.SDPAKernel.attend
    monkeypatch.setattr(
        kernels.SDPAKernel, "attend", lambda self, q, k, v, mask, causal: 1.01 * fused(self, q, k, v, mask, causal)
    )
    report = check(decoder(), laws=["backend"])
    assert report["backend"].status == "failed" and report["backend"].module.endswith("kernel")
