"""Correct models pass: headwater models of every kind, a small GPT, PyTorch layers, models of transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import headwater
import headwater.core as core
from headwater.checker.api import LAWS, check
from headwater.errors import BadInput, BadSetting
from headwater.families import builders
from headwater.i18n import translated
from headwater.parts import swap
from headwater.variants.mean_pool_bridge import MeanPoolBridge

SMALL = {"d_model": 24, "heads": 4, "layers": 2, "d_ff": 48}


def with_mask(rule):
    spec = builders.decoder(37, **SMALL) if rule.window_size[1] == 0 else builders.encoder(37, **SMALL)
    return swap(spec, core.Attention, lambda a: dataclasses.replace(a, mask=rule))


HEADWATER_SPECS = {
    **{f"decoder, {p}": builders.decoder(37, **SMALL, position=p)
       for p in ("sinusoidal", "learned", "rotary", "alibi", "relative", "xl", "none")},
    "decoder, pre-norm, grouped, gated": builders.decoder(37, **SMALL, norm_position="pre", norm="rms", kv_heads=2,
                                                      gated=True, activation="silu", position="rotary"),
    "decoder, plain formula": builders.decoder(37, **SMALL, backend="eager"),
    "decoder, window": with_mask(core.SlidingWindow(3)),
    "encoder": builders.encoder(37, **SMALL),
    "encoder, around": with_mask(core.LocalWindow(2)),
    "encoder, classes": builders.encoder(37, core.ClassificationHead(3, core.Pooler(core.MeanPooling())), **SMALL),
    "encoder, first token": builders.encoder(37, core.ClassificationHead(3), **SMALL),
    "both": builders.transformer(37, 41, **SMALL),
    "both, pooled source": dataclasses.replace(builders.transformer(37, **SMALL), bridge=MeanPoolBridge(2)),
    "no head": builders.encoder(37, core.NoHead(), **SMALL),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADWATER_SPECS)
def test_headwater_models_pass_every_law(name):
    report = check(HEADWATER_SPECS[name].build(seed=0))
    assert report.ok, report
    passed = {verdict.law for verdict in report.verdicts if verdict.status == "passed"}
    assert {"batch", "padding", "backend", "numbers", "gradients"} <= passed
    assert ("future" in passed) == ("cache" in passed) == (not name.startswith(("encoder", "no head")))
    assert ("window" in passed) == ("window" in name or "around" in name)


def test_a_small_gpt(nano):
    model = nano.GPT()
    report = check(model, step=model.step)
    assert report.ok, report
    passed_laws = [verdict.law for verdict in report.verdicts if verdict.status == "passed"]
    assert passed_laws == [law for law in LAWS if law not in ("window", "documents")]
    assert "mask=" in report.call and "causal" in report.call


def test_a_gpt_that_returns_only_the_last_logits_without_targets(nano):
    class LastLogitsOnly(nano.GPT):
        def forward(self, idx, targets=None):
            logits, _ = self.run(idx)
            return (logits, logits.sum()) if targets is not None else (logits[:, [-1]], None)

    report = check(LastLogitsOnly())
    assert report.ok and report["future"].status == "passed" and report["padding"].status == "skipped"


class TorchLayers(nn.Module):
    """nn.TransformerEncoder with its mask conventions: True above the diagonal, True where a key is padding."""

    def __init__(self, causal):
        super().__init__()
        self.causal, self.embed = causal, nn.Embedding(37, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not causal)
        self.head = nn.Linear(24, 37)

    def forward(self, x, src_key_padding_mask=None):
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        return self.head(self.layers(self.embed(x), mask, src_key_padding_mask))


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize(("causal", "sides"), [(False, ("left", "right")), (True, ("right",))])
def test_pytorch_layers(causal, sides):
    torch.manual_seed(0)
    report = check(TorchLayers(causal), causal=causal, padding_sides=sides)
    assert report.ok, report
    assert "True = padding" in report.call and report["padding"].status == "passed"


def test_pytorch_layers_give_nan_where_a_row_attends_to_no_key():
    """Causal and padded on the left: a real NaN, and no other failure."""
    torch.manual_seed(0)
    report = check(TorchLayers(causal=True))
    assert [verdict.law for verdict in report.failed] == ["numbers"] and "with padding" in report["numbers"].message
    assert report["positions"].status == "skipped" and "NaN" in report["positions"].message


def test_pytorch_layers_with_a_wrong_mask():
    torch.manual_seed(0)
    report = check(TorchLayers(causal=False), causal=True)
    assert report["future"].status == "failed" and report["future"].module.startswith("layers.layers.0")


class TorchPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(41, 24), nn.Embedding(37, 24)
        self.body, self.head = nn.Transformer(24, 4, 2, 2, 48, batch_first=True), nn.Linear(24, 37)

    def forward(self, src, tgt, src_key_padding_mask=None, tgt_key_padding_mask=None):
        hidden = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.body(
            self.source(src), self.target(tgt), tgt_mask=hidden, src_key_padding_mask=src_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask, tgt_key_padding_mask=tgt_key_padding_mask))  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_pytorch_encoder_decoder():
    torch.manual_seed(0)
    report = check(TorchPair(), vocab=37, padding_sides=["right"])
    assert report.ok, report
    assert "src=source, tgt=ids" in report.call and report["padding"].status == "passed"


# ------------------------------------------------------------------------------------------------- the public library


def transformers_model(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {
        "vocab_size": 53,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    match name:
        case "GPT2":
            config = transformers.GPT2Config(vocab_size=53, n_embd=24, n_layer=2, n_head=4, n_positions=64)
            return transformers.GPT2LMHeadModel(config)
        case "LLaMA":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=2))
        case "BERT":
            return transformers.BertForMaskedLM(transformers.BertConfig(**small))
        case "BERT body":
            return transformers.BertModel(transformers.BertConfig(**small))
    sizes = {"vocab_size": 53, "d_model": 24, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize("name", ["GPT2", "LLaMA", "BERT", "BERT body", "T5"])
def test_transformers_models(name):
    model = transformers_model(name)
    report = check(model)
    assert report.ok, report
    passed_laws = {verdict.law for verdict in report.verdicts if verdict.status == "passed"}
    assert {"padding", "batch", "backend", "numbers", "gradients"} <= passed_laws
    assert ({"future", "cache"} <= passed_laws) == (not name.startswith("BERT"))


def test_a_transformers_model_with_a_planted_fault(monkeypatch):
    model = transformers_model("GPT2")
    forward = model.transformer.h[1].attn.forward
    monkeypatch.setattr(
        model.transformer.h[1].attn, "forward", lambda x, *a, **k: forward(x + x.mean(1, keepdim=True), *a, **k)
    )
    verdict = check(model)["future"]
    assert verdict.status == "failed" and verdict.module.startswith("transformer.h.1.attn"), verdict


# --------------------------------------------------------------------------------------------------- state is preserved


def test_the_state_of_the_model_is_preserved(nano):
    model = nano.GPT()
    model.drop = nn.Sequential(nn.Dropout(0.1), nn.Identity(), nn.BatchNorm1d(13))
    model.train()
    model.h[1].eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes, hooks = [m.training for m in model.modules()], [len(m._forward_hooks) for m in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check(model, length=13)
    assert torch.equal(torch.rand(3), expected), "the random number generator is restored"
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_same_seed_gives_the_same_report(nano):
    first, second = (dataclasses.replace(check(nano.GPT(), seed=3), seconds=0) for _ in range(2))
    assert first == second


def test_headwater_check_is_public():
    assert headwater.check is check


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"laws": ["futur"]}, BadSetting, "did you mean 'future'"),
        ({"padding_sides": ["top"]}, BadSetting, "no side 'top'"),
        ({"call": lambda ids: torch.zeros(2, 1, 37)}, BadInput, "pass call="),
        ({"num_probes": 0}, BadSetting, "at least 1"),
        ({"length": 999}, BadInput, "another length="),
        ({"call": lambda ids: None}, BadInput, "pass call="),
    ],
)
def test_invalid_arguments_are_rejected(nano, arguments, kind, message):
    with pytest.raises(kind, match=message):
        check(nano.GPT(), **arguments)


def test_a_meta_model_and_a_spec_are_rejected():
    spec = builders.decoder(37, **SMALL)
    with pytest.raises(BadInput, match="meta device"):
        check(spec.on_meta())
    with pytest.raises(BadSetting, match=r"\.build\(seed=0\)"):
        check(spec)


def test_a_model_without_embedding_needs_a_vocabulary_size():
    class OneHot(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(11, 11)

        def forward(self, ids):
            return self.out(nn.functional.one_hot(ids, 11).float())

    with pytest.raises(BadSetting, match="vocab="):
        check(OneHot())
    assert check(OneHot(), vocab=11).ok


def test_laws_share_forward_passes():
    """Laws reuse the forward passes of other laws, so that a large model is checked in half a minute."""
    report = check(builders.decoder(37, **SMALL).build(seed=0))
    assert report.ok and report.forward_passes <= 30, report
    assert f"{report.forward_passes} forward passes" in " ".join(str(report).split())
    alone = [check(builders.decoder(37, **SMALL).build(seed=0), laws=[law]).forward_passes for law in LAWS]
    assert sum(alone) > 1.3 * report.forward_passes


@pytest.mark.parametrize("spec", ["decoder, window", "encoder", "encoder, classes", "both"])
def test_every_message_has_a_chinese_translation(spec):
    report = check(HEADWATER_SPECS[spec].build(seed=0))
    for verdict in report.verdicts:
        assert is_chinese(translated(verdict.message, "zh")) and (
            not verdict.remedy or is_chinese(translated(verdict.remedy, "zh"))
        ), verdict
    text = "\n".join(report.lines(80, "zh"))
    assert "规则全部守住" in text and "all laws hold" not in text
    assert report.to_dict()["verdicts"][0]["message_zh"] == translated(report.verdicts[0].message, "zh")


def is_chinese(text):
    return any("\u4e00" <= c <= "\u9fff" for c in text)
