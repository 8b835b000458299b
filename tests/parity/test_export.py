"""Models built or trained here load in transformers from disk, with the same logits and the same tokens."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headwater
from headwater.core import Embeddings, LayerNorm, Learned, TokenClassificationHead
from headwater.data.dates import dates_dataset
from headwater.families.builders import decoder, encoder, transformer
from headwater.families.convert import convert
from headwater.families.presets import bert, gpt2, llama, t5
from headwater.parts import swap
from headwater.training.predict import load_run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

LIMIT, SHOWS, VOCAB = 2e-5, 1e-3, 53
T.logging.set_verbosity_error()
SIZES: dict[str, Any] = {"d_model": 32, "heads": 4, "layers": 2, "d_ff": 48}
PRE = {"norm_position": "pre", "activation": "gelu"}
# Suffix of the architecture -> the auto class of transformers.
AUTO = {
    "ForCausalLM": T.AutoModelForCausalLM,
    "LMHeadModel": T.AutoModelForCausalLM,
    "MTModel": T.AutoModelForSeq2SeqLM,
    "ForConditionalGeneration": T.AutoModelForSeq2SeqLM,
    "ForMaskedLM": T.AutoModelForMaskedLM,
    "ForTokenClassification": T.AutoModelForTokenClassification,
    "ForQuestionAnswering": T.AutoModelForQuestionAnswering,
}


def with_token_types(spec, count):
    return swap(spec, Embeddings, lambda embed: replace(embed, token_types=count))


# Models that `headwater train` builds, and small versions of the presets.
BUILT = {
    "pegasus": transformer(VOCAB, norm_position="pre", **SIZES),
    "blenderbot": transformer(VOCAB, norm_position="pre", position="learned", max_positions=40, **SIZES),
    "marian": transformer(VOCAB, **SIZES),
    "gpt_neox": decoder(VOCAB, position="rotary", **PRE, **SIZES),
    "gpt2": decoder(VOCAB, position="learned", max_positions=40, **PRE, **SIZES),
    "megatron-bert": with_token_types(
        encoder(VOCAB, TokenClassificationHead(5), position="learned", max_positions=40, **PRE, **SIZES), 2
    ),
    "megatron-bert, answers": with_token_types(
        encoder(VOCAB, TokenClassificationHead(2), position="learned", max_positions=40, **PRE, **SIZES), 3
    ),
    "llama, preset": llama(VOCAB, 32, 4, 2, 48, 2, 1e-5, 1e4).spec(),
    "gpt2, preset": gpt2(32, 4, 2, 40).spec(VOCAB),
    "bert, preset": bert(32, 4, 2).spec(VOCAB),
    "t5, preset": t5(32, 4, 8, 48, 2).spec(VOCAB),
}


def wide(spec) -> headwater.core.Transformer:
    model, draw = spec.build(seed=0).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def open_in_transformers(folder: Path):
    """Load the folder with transformers' auto class; no tensor may be missing, unexpected or of another shape."""
    config = T.AutoConfig.from_pretrained(folder)
    name = config.architectures[0]
    auto = next(auto for end, auto in AUTO.items() if name.endswith(end))
    model, loading_info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    assert type(model).__name__ == name
    return model.eval()


@torch.no_grad()
def max_distance(ours, theirs, vocab: int, seed: int = 0) -> float:
    """The maximum difference of the logits on a batch with padding on the right."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(5, vocab, (3, 11), generator=draw)
    keep = torch.arange(11)[None] < torch.tensor([[11], [7], [4]])
    if ours.encoder is not None and ours.decoder is not None:
        source = torch.randint(5, vocab, (3, 11), generator=draw)
        their_logits = theirs(input_ids=source, attention_mask=keep.long(), decoder_input_ids=rows).logits
        return float((ours(rows, source=source, source_attention_mask=keep) - their_logits).abs().max())
    types = getattr(ours.output_stack.spec.embed, "token_types", 0)
    more = torch.randint(0, types, (3, 11), generator=draw) if types else None
    output = theirs(input_ids=rows, attention_mask=keep.long(), **({"token_type_ids": more} if types else {}))
    logits = torch.stack((output.start_logits, output.end_logits), -1) if "start_logits" in output else output.logits
    return float((ours(rows, attention_mask=keep, token_types=more) - logits)[keep].abs().max())


@pytest.mark.parametrize("name", BUILT)
def test_a_built_model_loads_in_transformers(name, tmp_path):
    model = wide(BUILT[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        headwater.save(model, tmp_path / "m")
    theirs = open_in_transformers(tmp_path / "m")
    assert theirs.config.model_type == name.split(",")[0]
    assert max_distance(model, theirs, VOCAB) < LIMIT
    assert max_distance(headwater.load(tmp_path / "m").model, theirs, VOCAB) < LIMIT


def test_a_wrong_model_would_show(tmp_path):
    """The check above can fail: another eps, or positions one row further, move the logits."""
    model = wide(BUILT["blenderbot"])
    headwater.save(model, tmp_path / "m")
    theirs = open_in_transformers(tmp_path / "m")
    for kind, change in ((LayerNorm, lambda n: replace(n, eps=1e-2)), (Learned, lambda p: replace(p, offset=1))):
        wrong = swap(model.spec, kind, change).build(seed=0).eval()
        wrong.load_state_dict(model.state_dict())
        assert max_distance(wrong, theirs, VOCAB) > SHOWS


# ------------------------------------------------------------------------------------------------ what was trained here

TINY = {"size": "xs", "max_steps": 3, "batch_tokens": 600, "eval_examples": 4, "eval_every": 3, "log_every": 3}
RUNS = {
    "pegasus": ("pairs.tsv", {}),
    "blenderbot": ("pairs.tsv", {"position": "learned"}),
    "gpt_neox": ("running.txt", {}),
    "gpt2": ("running.txt", {"position": "learned", "tokenizer": "char"}),
    "megatron-bert": ("words.conll", {"position": "learned"}),
    "megatron-bert, answers": ("questions.json", {"position": "learned"}),
    "llama": ("running.txt", {"init_from": "llama"}),
}
NATIVE = {"labels.csv": {}, "words.conll": {}, "questions.json": {}, "running.txt": {"objective": "mlm"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One small file for each task, and a LLaMA to start from."""
    folder = tmp_path_factory.mktemp("data")
    pairs = dates_dataset("train", 120)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    (folder / "labels.csv").write_text(
        "text,label\n" + "".join(f"{p.source.replace(',', '')},{'ab'[p.source[0] == '>']}\n" for p in pairs)
    )
    (folder / "words.conll").write_text(
        "\n\n".join("\n".join(f"{w} {'B-NUM' if w[0].isdigit() else 'O'}" for w in p.source.split()) for p in pairs)
    )
    (folder / "running.txt").write_text("\n".join(f"{a} is {b}." for a, b in pairs))
    paragraphs = []
    for number, pair in enumerate(pairs[:40]):
        answers = [{"text": pair.target, "answer_start": 12}]
        question = {"id": str(number), "question": "What day was it?", "answers": answers}
        paragraphs.append({"context": f"The day was {pair.target}. It rained.", "qas": [question]})
    (folder / "questions.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    from headwater.families.hf_folder import LoadedModel
    from headwater.text.train import train_tokenizer

    tokenizer = train_tokenizer([text for pair in pairs for text in pair], "bpe", vocab_size=320)
    model = llama(len(tokenizer), 32, 4, 2, 48, 2, 1e-5, 1e4).spec().build(seed=0)
    headwater.save(LoadedModel(model, tokenizer, {"model_type": "headwater"}, folder), folder / "llama")
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_trained_model_loads_in_transformers(name, files, tmp_path):
    data, more = RUNS[name]
    more = more | ({"init_from": str(files / "llama")} if "init_from" in more else {})
    trained = headwater.train(files / data, out=tmp_path / "run", context_length=32, **TINY, **more)
    done = convert(tmp_path / "run", tmp_path / "m")
    assert done.mismatch is None
    theirs, tokenizer = open_in_transformers(tmp_path / "m"), T.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert theirs.config.model_type == name.split(",")[0]
    vocab = len(trained.tokenizer)
    assert max_distance(trained.model, theirs, vocab) < LIMIT
    again = load_run(tmp_path / "m")
    assert max_distance(again.model, theirs, vocab) < LIMIT
    assert again.metadata == trained.metadata
    if trained.metadata["labels"]:
        assert list(theirs.config.id2label.values()) == trained.metadata["labels"]
    for text in ("15 novembre 2026", "  two spaces\n\ta tab", "天地 naïve", ">>fr 3 May", ""):
        assert tokenizer(text)["input_ids"] == trained.tokenizer.encode(text)
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == trained.tokenizer.decode(
            trained.tokenizer.encode(text)
        )


@pytest.mark.parametrize("data", NATIVE)
def test_a_model_without_family_is_reported_and_saved_natively(data, files, tmp_path):
    trained = headwater.train(files / data, out=tmp_path / "run", context_length=32, **TINY, **NATIVE[data])
    done = convert(tmp_path / "run", tmp_path / "m")
    assert done.mismatch is not None and done.mismatch.family == "megatron-bert"
    assert headwater.load(tmp_path / "m").spec == trained.model.spec
    with pytest.raises(headwater.BadSetting, match="layout 'transformers' cannot express this model"):
        convert(tmp_path / "run", tmp_path / "n", layout="transformers")
    assert not (tmp_path / "n").exists()


def test_transformers_generates_the_same_text(files, tmp_path):
    """Greedy decoding of a briefly trained model: the same text from the run, the folder and transformers."""
    settings = {**TINY, "max_steps": 40, "eval_every": 40, "lr": 1e-2}
    trained = headwater.train(files / "pairs.tsv", out=tmp_path / "run", **settings)
    convert(tmp_path / "run", tmp_path / "m")
    theirs, tokenizer = open_in_transformers(tmp_path / "m"), T.AutoTokenizer.from_pretrained(tmp_path / "m")
    texts = ["15 novembre 2026", "3 May 1999"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    generated = tokenizer.batch_decode(theirs.generate(**inputs, max_new_tokens=12), skip_special_tokens=True)
    assert any(generated), "some text must be generated"
    assert generated == [trained(text, beam=1, max_tokens=12) for text in texts]
    assert generated == [str(headwater.generate(headwater.load(tmp_path / "m"), text, max_tokens=12)) for text in texts]
