"""Courses: what a batch of examples becomes, and laws that hold whatever the examples are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.core import decoder
from headwater.data.augment import Changing, DeleteWords
from headwater.data.examples import Passage
from headwater.data.learn import learn
from headwater.data.objectives.lesson import IGNORE, Marks
from headwater.data.objectives.texts import causal
from headwater.data.ragged import Ragged
from headwater.errors import BadInput
from headwater.training.courses import Classification, Packed, TextToText, evenly
from headwater.training.material import Material
from headwater.training.objectives import how_many, objective_of, real_tokens, to_tensors, words
from headwater.training.planning import spec_of
from headwater.training.running import TEXTS
from headwater.training.settings import Settings
from headwater.training.spread import without_targets

TEXT = [f"the {a} {b} over the {c}" for a in ("cat", "dog", "hare") for b in ("ran", "leapt") for c in ("wall", "hill")]


@pytest.fixture(scope="module")
def tokenizer():
    return learn(TEXT, vocab=300)


@pytest.fixture(scope="module")
def marks(tokenizer):
    return Marks.of(tokenizer)


def documents(count=9):
    draw = np.random.default_rng(1)
    return Ragged.of([draw.integers(5, 40, draw.integers(2, 20)) for _ in range(count)])


# ------------------------------------------------------------------------------------------------- packed documents


def test_packed_documents_are_learned_as_if_each_were_alone(marks):
    found = documents()
    model = decoder(40, d_model=16, heads=2, layers=2, position="rotary", placement="pre").build(seed=0).double().eval()
    course = Packed(found, 32, marks, 4096, 0)
    batch = to_tensors(course.lesson(np.arange(course.size), 0))
    alone = [to_tensors(causal(found[i][None].astype(np.int64))) for i in range(len(found))]
    with torch.no_grad():
        packed, apart = words(model, batch), sum(words(model, one) for one in alone)
        torch.testing.assert_close(packed, apart)
        assert how_many(batch, words) == sum(how_many(one, words) for one in alone)
        del batch["documents"]
        assert not torch.isclose(words(model, batch), apart), "the test must see a document that sees another"


def test_a_packed_row_has_no_column_of_padding_alone(marks):
    course = Packed(documents(), 32, marks, 4096, 0)
    for row in range(course.size):
        lesson = course.lesson(np.array([row]), 0)
        assert (lesson.documents > 0).all(), "one row is as wide as what it holds"


# --------------------------------------------------------------------------------- masked words and the next sentence


def passages(count):
    return [Passage("\n\n".join("\n".join(TEXT[d : d + 3]) for d in range(count)))]


def test_pairs_are_of_the_same_text_half_the_time_and_specials_stay(tokenizer, marks):
    taught = TEXTS["masked-next"](Settings().but(context=64, batch_tokens=2000), tokenizer, passages(9), [])
    course = taught.train
    lessons = [course.lesson(np.arange(course.size), epoch) for epoch in range(20)]
    share = np.mean([lesson.second.mean() for lesson in lessons])
    assert 0.3 < share < 0.7
    for lesson in lessons:
        hidden = lesson.targets != IGNORE
        assert not np.isin(lesson.targets[hidden], marks.special).any(), "a mark is never hidden"
        assert (lesson.ids[:, 0] == marks.bos).all() and set(np.unique(lesson.kinds)) == {0, 1}
    batch = to_tensors(lessons[0])
    objective = objective_of("language-model", "masked-next")
    assert how_many(batch, objective) == int((lessons[0].targets != IGNORE).sum()) + course.size
    material = Material("language-model", tokenizer, course, course, objective="masked-next")
    model = spec_of(Settings().but(d_model=16, heads=2, layers=1, d_ff=16, position="learned"), material).build(seed=0)
    loss = objective(model, without_targets(batch), 0.0)
    loss.backward()
    assert loss.item() == 0, "a filler micro-batch has no loss, neither of words nor of the next sentence"
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert objective(model, batch, 0.0).item() > 0
    again = course.lesson(np.arange(course.size), 0)
    assert (again.ids == lessons[0].ids).all() and not (lessons[1].ids[:, :4] == lessons[0].ids[:, :4]).all()


def test_too_few_documents_are_refused(tokenizer):
    with pytest.raises(BadInput, match="masked-next needs four documents"):
        TEXTS["masked-next"](Settings().but(context=64, batch_tokens=2000), tokenizer, passages(1), [])
    with pytest.raises(BadInput, match="packed needs two documents"):
        TEXTS["packed"](Settings().but(context=64, batch_tokens=2000), tokenizer, [Passage("one")], [])


# ------------------------------------------------------------------------------------------------------ augmentation


def test_a_change_is_a_function_of_seed_epoch_and_row(tokenizer, marks):
    ids = Ragged.of([tokenizer.encode(text, special=False) for text in TEXT])
    course = TextToText(ids, ids, marks, 500, 0)
    plain = course.lesson(np.arange(12), 0)
    course.changing = Changing(TEXT, (DeleteWords(0.4),), tokenizer, 0, 64)
    first, other = course.lesson(np.arange(12), 0), course.lesson(np.arange(12), 1)
    assert first.source.shape != other.source.shape or (first.source != other.source).any()
    assert (first.targets == plain.targets).all(), "what is to be written stays"
    alone = course.lesson(np.array([7]), 0)
    width = alone.source.shape[1]
    assert (first.source[7, :width] == alone.source[0]).all(), "a row is changed alike in any batch"


def test_evenly():
    assert evenly(3, 10).tolist() == [0, 1, 2] and evenly(10, 3).tolist() == [0, 3, 6] and evenly(0, 3).tolist() == []


# --------------------------------------------------------------------------------------------------- what is counted


def test_tokens_are_what_is_read_without_padding_and_answers_what_is_asked(marks):
    found = documents()
    rows, tokens, lengths = np.arange(len(found)), int(found.lengths.sum()), found.lengths
    assert len(set(lengths)) > 1  # else there would be no padding to leave out
    pairs = to_tensors(TextToText(found, found, marks, 4096, 0).lesson(rows, 0))
    assert real_tokens(pairs) == 2 * tokens + 3 * len(found)  # <bos> and <eos> of what is read, <bos> of what is said
    assert how_many(pairs, words) == tokens + len(found)
    packed = Packed(found, 32, marks, 4096, 0)
    assert real_tokens(to_tensors(packed.lesson(np.arange(packed.size), 0))) == tokens
    labelled = Classification(found, rows % 2, marks, 4096, 0)
    batch = to_tensors(labelled.lesson(rows, 0))
    assert real_tokens(batch) == int(labelled.lengths.sum()) > tokens
    assert how_many(batch, objective_of("classification")) == len(found)
