"""Global tokens that a task passes: the question of an encoder with windows, the first token of a source."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import headwater
from headwater.data.examples import QAExample
from headwater.parts import swap
from headwater.text.train import train_tokenizer
from headwater.training.api import train
from headwater.training.predict import load_run
from headwater.variants.longformer import (
    FirstTokenIsGlobal,
    LongformerAttention,
    LongformerLayer,
    NoGlobalTokens,
    make_first_token_global,
)
from headwater.weights.native import save_native

SIZES = {"d_model": 16, "heads": 2, "layers": 2, "d_ff": 16, "max_positions": 256}
TINY = {"max_steps": 2, "valid_fraction": 0.2, "quiet": True}
TEXT = "Ada lives in Paris and works in Rome. Where does Ada live?"


def without_rule(spec):
    """As the public models: no token is global unless the call says so."""
    return swap(spec, LongformerAttention, lambda plain: replace(plain, global_tokens=NoGlobalTokens()))


def saved(spec, folder, task):
    tokenizer = train_tokenizer([TEXT] * 20, "bpe", 300)
    model = spec(len(tokenizer)).build(seed=0)
    save_native(folder, model, {"task": task})
    tokenizer.save(folder)
    return folder


@pytest.fixture
def longformer(tmp_path):
    attention = {"attention": "longformer:window=8", "position": "learned"}
    return saved(lambda n: without_rule(headwater.encoder(n, **SIZES, **attention)), tmp_path / "longformer", "mlm")


@pytest.fixture
def led(tmp_path):
    attention = {"encoder_attention": "longformer:window=8", "position": "learned"}
    return saved(lambda n: without_rule(headwater.transformer(n, **SIZES, **attention)), tmp_path / "led", "seq2seq")


def test_the_question_is_global_in_question_answering(longformer, tmp_path, monkeypatch):
    answers = {"text": ["Paris"], "answer_start": [13]}
    rows = [{"question": f"Where does Ada live {n}?", "context": f"{TEXT} {n}", "answers": answers} for n in range(12)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = []
    forward = LongformerLayer.forward

    def spy(layer, x, context, step):
        chosen.append(context.inputs.global_tokens)
        return forward(layer, x, context, step)

    monkeypatch.setattr(LongformerLayer, "forward", spy)
    predictor = train(tmp_path / "qa.jsonl", out=tmp_path / "run", init_from=str(longformer), **TINY)
    assert chosen and all(tokens is not None for tokens in chosen)
    assert is_a_beginning(chosen[0][0])
    chosen.clear()
    predictor(QAExample("Where does Ada live 3?", TEXT))
    assert is_a_beginning(chosen[0][0])


def is_a_beginning(global_tokens):
    """Some of the first tokens, the question, and no later one."""
    count = int(global_tokens.sum())
    return 1 < count < len(global_tokens) / 2 and bool(global_tokens[:count].all())


def test_the_first_token_of_a_source_is_global(led, tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{n} {TEXT}\tParis\n" for n in range(12)))
    train(tmp_path / "pairs.tsv", out=tmp_path / "run", init_from=str(led), **TINY)
    model = load_run(tmp_path / "run").model
    rules = {layer.spec.global_tokens for layer in model.modules() if isinstance(layer, LongformerLayer)}
    assert rules == {FirstTokenIsGlobal()}, "the run keeps it, so that generation has it"


def test_a_rule_of_its_own_is_kept():
    spec = headwater.encoder(20, **SIZES, attention="longformer:window=8")
    model = spec.build(seed=0)
    make_first_token_global(model)
    assert model.spec == spec
    plain = headwater.encoder(20, **SIZES).build(seed=0)
    make_first_token_global(plain)
    assert plain.spec == headwater.encoder(20, **SIZES)
