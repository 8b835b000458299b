"""One adapter per request in one batch of the engine: each sequence is that of its adapter alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny

from headwater import tune
from headwater.errors import BadInput, BadSetting, NotFound
from headwater.generation.engine import Engine
from headwater.generation.prefix_cache import Prefix
from headwater.generation.request import Request
from headwater.generation.speculative import PromptLookup
from headwater.tuning import DoRA, Full, Houlsby, LoRA, PromptTuning, use_adapter

NAMES = ("a", "b", "c")
PROMPTS = ((5, 9, 3), (7, 7, 7, 7, 7, 7, 8), (4, 6), (5, 9, 3), (11, 12, 13, 14))


@pytest.fixture
def model(random_weights):
    model = tiny("llama").model
    for name, method in zip(NAMES, (LoRA(3, target="all-linear"), DoRA(2), Houlsby(4)), strict=True):
        tune(model, method, name=name)
        random_weights(model)
    use_adapter(model, None)
    return model


def alone(model, prompt, name, tokens=6):
    """Greedy decoding without a cache, with one adapter for all."""
    use_adapter(model, name)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _token in range(tokens):
            ids = torch.cat((ids, model(ids)[:, -1].argmax(-1)[:, None]), 1)
    use_adapter(model, None)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["plain", "speculative"])
def test_each_sequence_is_that_of_its_adapter(model, drafter):
    names = ["a", None, "b", "c", "a"]
    engine = Engine(model, max_num_seqs=4, max_seq_len=32, max_prefill_tokens=8, drafter=drafter)
    sequences = [
        engine.submit(Request(prompt, max_tokens=6, adapter=name)) for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    engine.run()
    want = [alone(model, prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
    assert [sequence.output_ids for sequence in sequences] == want
    assert want[0] != alone(model, PROMPTS[0], None)


def test_rows_in_the_wrong_order_would_be_seen(model, monkeypatch):
    from headwater.tuning.base import Selection

    right = Selection.per_row
    monkeypatch.setattr(Selection, "per_row", lambda self, names: right(self, list(reversed(names))))
    engine = Engine(model, max_num_seqs=2, max_seq_len=32)
    sequences = [engine.submit(Request(PROMPTS[0], max_tokens=6, adapter=name)) for name in ("a", "b")]
    engine.run()
    assert [s.output_ids for s in sequences] != [alone(model, PROMPTS[0], name) for name in ("a", "b")]


def test_without_a_name_the_active_adapter_answers(model):
    use_adapter(model, "b")
    engine = Engine(model, max_seq_len=32)
    sequences = [engine.submit(Request(PROMPTS[0], max_tokens=6, adapter=name)) for name in (None, "a")]
    engine.run()
    assert [s.output_ids for s in sequences] == [alone(model, PROMPTS[0], name) for name in ("b", "a")]


def test_what_cannot_share_a_batch_is_refused_when_it_is_submitted(model):
    tune(model, PromptTuning(2), name="longer")
    tune(model, LoRA(2, target="head.out"), name="head")
    tune(model, Full("decoder.final_norm.*"), name="whole")
    engine = Engine(model, max_seq_len=32)
    for name, words in (
        ("longer", "it adds tokens and cannot share a batch"),
        ("head", "it changes the head and cannot share a batch"),
        ("whole", "it has weights in place of the base's"),
    ):
        with pytest.raises(BadInput, match=words):
            engine.submit(Request((5,), max_tokens=2, adapter=name))
    with pytest.raises(NotFound, match="no adapter of this model is called 'd'"):
        engine.submit(Request((5,), max_tokens=2, adapter="d"))
    with pytest.raises(BadSetting, match="the model has no adapter"):
        Engine(tiny("llama").model, max_seq_len=32).submit(Request((5,), max_tokens=2, adapter="a"))
    use_adapter(model, None)
    with pytest.raises(BadSetting, match="must have no prefix"):
        engine.submit(Request((5, 6), max_tokens=2, adapter="a", prefix=Prefix(model, [5])))
    assert not engine.step()
