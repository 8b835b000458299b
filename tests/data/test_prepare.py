"""From files to lessons in one line, for every objective, with and without the cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headwater.data.batches import Batches
from headwater.data.learn import learn
from headwater.data.objectives.lesson import IGNORE
from headwater.data.prepare import OBJECTIVES, prepare
from headwater.data.reading.settle import settle
from headwater.errors import BadInput, BadSetting, NotFound

WORDS = ["cat", "dog", "tree", "house", "river", "stone"]
SENTENCES = [f"The {WORDS[i % 6]} saw the {WORDS[i % 5]} {i} times. It ran." for i in range(200)]


@pytest.fixture(scope="module")
def tokenizer():
    return learn(SENTENCES, vocab=420, sentinels=100)


def write(folder: Path, task: str) -> Path:
    tags = ["".join(f"{w}\t{'B-X' if w in WORDS else 'O'}\n" for w in s.split()) for s in SENTENCES]
    asks = [
        {"question": "Who?", "context": s, "answers": [{"text": s.split()[1], "answer_start": 4}]} for s in SENTENCES
    ]
    name, text = {
        "text-to-text": ("d.tsv", "source\ttarget\n" + "".join(f"{s}\t{s[::-1]}\n" for s in SENTENCES)),
        "classification": ("d.tsv", "text\tlabel\n" + "".join(f"{s}\t{'ab'[len(s) % 2]}\n" for s in SENTENCES)),
        "tagging": ("d.conll", "\n".join(tags)),
        "answers": ("d.jsonl", "\n".join(map(json.dumps, asks))),
        "language-model": ("d.txt", "\n".join(SENTENCES)),
    }[task]
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_from_a_file(tmp_path: Path, tokenizer, objective: str) -> None:
    recipe = settle([write(tmp_path, OBJECTIVES[objective])])
    train = prepare(recipe, "train", tokenizer, objective=objective, context=32, cache=tmp_path / "cache")
    valid = prepare(recipe, "valid", tokenizer, objective=objective, context=32, names=train.names, share=0.2)
    again = prepare(recipe, "train", tokenizer, objective=objective, context=32, cache=tmp_path / "cache")
    assert 0 < len(valid) < len(train)
    assert len(train.lengths) == len(train)
    seen = []
    for batch in Batches(train.lengths, 400, seed=1).epoch(0):
        lesson = train.lesson(batch.examples, 1, 0)
        same = again.lesson(batch.examples, 1, 0)
        assert np.array_equal(lesson.ids, same.ids)
        assert np.array_equal(lesson.targets, same.targets)
        assert lesson.ids.shape == lesson.keep.shape
        assert len(lesson.ids) == len(lesson.targets) == len(batch.examples)
        assert 0 <= lesson.ids.min() <= lesson.ids.max() < len(tokenizer)
        if objective not in ("span-corruption", "denoising"):  # these change the length a little
            sides = lesson.ids.size + (lesson.source.size if lesson.source is not None else 0)
            assert sides <= 400
        seen += batch.examples.tolist()
    assert sorted(seen) == list(range(len(train)))
    assert lesson.counted >= 0
    assert set(np.unique(lesson.targets[lesson.targets < 0])) <= {IGNORE}


def test_train_and_valid_share_nothing(tmp_path: Path, tokenizer) -> None:
    recipe = settle([write(tmp_path, "text-to-text")])
    train, valid = (prepare(recipe, split, tokenizer, share=0.2) for split in ("train", "valid"))
    texts = [{tokenizer.decode(r.columns["source"][i].tolist()) for i in range(len(r))} for r in (train, valid)]
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == set(SENTENCES)


def test_running_text_is_cut_at_one_place(tmp_path: Path, tokenizer) -> None:
    recipe = settle([write(tmp_path, "language-model")])
    train, valid = (prepare(recipe, split, tokenizer, context=16, share=0.1) for split in ("train", "valid"))
    both = np.concatenate([train.columns["text"].values, valid.columns["text"].values])
    assert tokenizer.decode(both.tolist()) == "\n".join(SENTENCES) + "\n"
    with pytest.raises(BadSetting, match="cannot be split"):
        prepare(recipe, "train", tokenizer, context=10_000)


def test_what_does_not_fit_is_refused(tmp_path: Path, tokenizer) -> None:
    recipe = settle([write(tmp_path, "classification")])
    with pytest.raises(BadSetting, match="'causal' cannot be learned from classification data; known: classification"):
        prepare(recipe, "train", tokenizer, objective="causal")
    with pytest.raises(NotFound, match="no set called 'test'"):
        prepare(recipe, "test", tokenizer)
    with pytest.raises(BadInput, match="the label 'b' is not in the training data"):
        prepare(recipe, "train", tokenizer, names=("a",))
