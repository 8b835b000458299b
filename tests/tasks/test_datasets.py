"""Datasets of the tasks: what a batch of examples becomes, and laws that hold whatever the examples are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.data.augment import Augmenter, DeleteWords
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, causal_batch
from headwater.data.dataset import evenly_spaced
from headwater.data.examples import DocumentChunk
from headwater.data.ragged import Ragged
from headwater.errors import BadInput
from headwater.families.builders import decoder
from headwater.tasks import OBJECTIVES, get_task
from headwater.tasks.batch import num_targets, num_tokens, to_tensors
from headwater.tasks.classification import ClassificationDataset
from headwater.tasks.language_model import PackedDataset, lm_loss
from headwater.tasks.seq2seq import Seq2SeqDataset
from headwater.text.train import train_tokenizer
from headwater.training.config import TrainConfig
from headwater.training.distributed import without_targets
from headwater.training.setup import build_spec

TEXT = [f"the {a} {b} over the {c}" for a in ("cat", "dog", "hare") for b in ("ran", "leapt") for c in ("wall", "hill")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, vocab_size=300)


@pytest.fixture(scope="module")
def marks(tokenizer):
    return SpecialTokens.from_tokenizer(tokenizer)


def documents(count=9):
    draw = np.random.default_rng(1)
    return Ragged.from_rows([draw.integers(5, 40, draw.integers(2, 20)) for _ in range(count)])


# ------------------------------------------------------------------------------------------------- packed documents


def test_packed_documents_are_learned_as_if_each_were_alone(marks):
    found = documents()
    model = (
        decoder(40, d_model=16, heads=2, layers=2, position="rotary", norm_position="pre").build(seed=0).double().eval()
    )
    dataset = PackedDataset(found, 32, marks, 4096, 0)
    batch = to_tensors(dataset.collate(np.arange(dataset.size), 0))
    alone = [to_tensors(causal_batch(found[i][None].astype(np.int64))) for i in range(len(found))]
    with torch.no_grad():
        packed, apart = lm_loss(model, batch), sum(lm_loss(model, one) for one in alone)
        torch.testing.assert_close(packed, apart)
        assert num_targets(batch) == sum(num_targets(one) for one in alone)
        del batch["document_ids"]
        assert not torch.isclose(lm_loss(model, batch), apart), "the test must see a document that sees another"


def test_a_packed_row_has_no_column_of_padding_alone(marks):
    dataset = PackedDataset(documents(), 32, marks, 4096, 0)
    for row in range(dataset.size):
        one = dataset.collate(np.array([row]), 0)
        assert (one.document_ids > 0).all(), "one row is as wide as what it holds"


# --------------------------------------------------------------------------------- masked words and the next sentence


def passages(count):
    return [DocumentChunk("\n\n".join("\n".join(TEXT[d : d + 3]) for d in range(count)))]


def test_pairs_are_of_the_same_text_half_the_time_and_specials_stay(tokenizer, marks):
    task = OBJECTIVES["mlm-nsp"]
    data = task.build_data(TrainConfig().replace(context_length=64, batch_tokens=2000), tokenizer, passages(9), [])
    dataset = data.train
    batches = [dataset.collate(np.arange(dataset.size), epoch) for epoch in range(20)]
    share = np.mean([one.next_sentence_labels.mean() for one in batches])
    assert 0.3 < share < 0.7
    for one in batches:
        hidden = one.targets != IGNORE_INDEX
        assert not np.isin(one.targets[hidden], marks.special_ids).any(), "a mark is never hidden"
        assert (one.ids[:, 0] == marks.bos_id).all() and set(np.unique(one.token_types)) == {0, 1}
    batch = to_tensors(batches[0])
    assert task.num_targets(batch) == int((batches[0].targets != IGNORE_INDEX).sum()) + dataset.size
    config = TrainConfig().replace(d_model=16, heads=2, layers=1, d_ff=16, position="learned")
    model = build_spec(config, data).build(seed=0)
    loss = task.loss(model, without_targets(batch), 0.0)
    loss.backward()
    assert loss.item() == 0, "a filler micro-batch has no loss, neither of words nor of the next sentence"
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert task.loss(model, batch, 0.0).item() > 0
    again = dataset.collate(np.arange(dataset.size), 0)
    assert (again.ids == batches[0].ids).all() and not (batches[1].ids[:, :4] == batches[0].ids[:, :4]).all()


def test_too_few_documents_are_refused(tokenizer):
    with pytest.raises(BadInput, match="mlm-nsp needs four documents"):
        OBJECTIVES["mlm-nsp"].build_data(
            TrainConfig().replace(context_length=64, batch_tokens=2000), tokenizer, passages(1), []
        )
    with pytest.raises(BadInput, match="packed needs two documents"):
        OBJECTIVES["packed"].build_data(
            TrainConfig().replace(context_length=64, batch_tokens=2000), tokenizer, [DocumentChunk("one")], []
        )


# ------------------------------------------------------------------------------------------------------ augmentation


def test_a_change_is_a_function_of_seed_epoch_and_row(tokenizer, marks):
    ids = Ragged.from_rows([tokenizer.encode(text, add_special_tokens=False) for text in TEXT])
    dataset = Seq2SeqDataset(ids, ids, marks, 500, 0)
    plain = dataset.collate(np.arange(12), 0)
    dataset.augmenter = Augmenter(TEXT, (DeleteWords(0.4),), tokenizer, 0, 64)
    first, other = dataset.collate(np.arange(12), 0), dataset.collate(np.arange(12), 1)
    assert first.source.shape != other.source.shape or (first.source != other.source).any()
    assert (first.targets == plain.targets).all(), "what is to be written stays"
    alone = dataset.collate(np.array([7]), 0)
    width = alone.source.shape[1]
    assert (first.source[7, :width] == alone.source[0]).all(), "a row is changed alike in any batch"


def test_evenly():
    assert (
        evenly_spaced(3, 10).tolist() == [0, 1, 2]
        and evenly_spaced(10, 3).tolist() == [0, 3, 6]
        and evenly_spaced(0, 3).tolist() == []
    )


# --------------------------------------------------------------------------------------------------- what is counted


def test_tokens_are_what_is_read_without_padding_and_answers_what_is_asked(marks):
    found = documents()
    rows, tokens, lengths = np.arange(len(found)), int(found.lengths.sum()), found.lengths
    assert len(set(lengths)) > 1  # else there would be no padding to leave out
    pairs = to_tensors(Seq2SeqDataset(found, found, marks, 4096, 0).collate(rows, 0))
    assert num_tokens(pairs) == 2 * tokens + 3 * len(found)  # <bos> and <eos> of what is read, <bos> of what is said
    assert num_targets(pairs) == tokens + len(found)
    packed = PackedDataset(found, 32, marks, 4096, 0)
    assert num_tokens(to_tensors(packed.collate(np.arange(packed.size), 0))) == tokens
    labelled = ClassificationDataset(found, rows % 2, marks, 4096, 0)
    batch = to_tensors(labelled.collate(rows, 0))
    assert num_tokens(batch) == int(labelled.lengths.sum()) > tokens
    assert get_task("classification").num_targets(batch) == len(found)
