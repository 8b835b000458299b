"""all-MiniLM-L6-v2: sentences as vectors, equal to the public implementation and to the published example."""

from __future__ import annotations

import json

import pytest
import torch

import headwater

# The example of the model's public page, and the similarities shown there.
SOURCE = "That is a happy person"
OTHERS = {"That is a happy dog": 0.6946, "That is a very happy person": 0.9429, "Today is a sunny day": 0.2569}
TEXTS = [
    SOURCE,
    *OTHERS,
    "This is an example sentence",
    "Each sentence is converted",
    "",
    "注意力就是一切 🙂",
    "a longer one, " * 30,
]


@pytest.fixture(scope="module")
def model(files):
    files("minilm")
    return headwater.load("minilm")


def test_the_published_similarities(model):
    vectors = headwater.embed(model, [SOURCE, *OTHERS])
    assert vectors[1:] @ vectors[0] == pytest.approx(list(OTHERS.values()), abs=1e-4)


def test_the_command_prints_the_same(files, command):
    files("minilm")
    rows = command("embed", "minilm", SOURCE, *OTHERS).splitlines()
    assert [float(cosine) for cosine in rows[0].split()[1:4]] == pytest.approx(list(OTHERS.values()), abs=1e-4)
    lines = [json.loads(line) for line in command("embed", "minilm", "--json", SOURCE).splitlines()]
    assert lines[0]["text"] == SOURCE
    assert len(lines[0]["vector"]) == 384


def test_equals_the_public_implementation(files, model):
    import transformers as T

    folder = files("minilm")
    theirs = T.BertModel.from_pretrained(folder).eval()
    given = T.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    ids = model.tokenizer.encode_padded(TEXTS)
    assert torch.equal(ids.ids, given["input_ids"])
    with torch.no_grad():
        states = theirs(**given).last_hidden_state
    keep = given["attention_mask"][..., None].float()
    mean = torch.nn.functional.normalize((states * keep).sum(1) / keep.sum(1), dim=-1)
    assert (headwater.embed(model, TEXTS) - mean).abs().max() < 1e-5


def test_one_at_a_time_is_the_same(model):
    together = headwater.embed(model, TEXTS)
    alone = torch.cat([headwater.embed(model, [text]) for text in TEXTS])
    assert (together - alone).abs().max() < 1e-5
