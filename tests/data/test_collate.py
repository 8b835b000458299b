"""Objectives: masked tokens can be restored, rates are as documented, labels are on the right tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data import collate, corruption
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch
from headwater.data.examples import QAExample, TaggedTokens
from headwater.data.ragged import Ragged, build_packed_rows, encode_rows, pack_documents
from headwater.errors import BadInput, BadSetting
from headwater.text.tokenizer import Tokenizer
from headwater.text.train import train_tokenizer

TEXT = "the cat sat on a mat and saw 我们 去 公园 naïve café Ann ran home . ! , very quickly"
WORDS = TEXT.split()
SPECIAL_TOKENS = SpecialTokens(
    pad_id=0,
    bos_id=1,
    eos_id=2,
    mask_id=4,
    vocab_size=1000,
    special_ids=(0, 1, 2, 3, 4),
    sentinel_ids=tuple(range(900, 1000)),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([" ".join(WORDS)] * 5, num_sentinels=10)


def rows(count: int, seed: int = 0, max_length: int = 60, min_length: int = 2) -> Ragged:
    rng = np.random.default_rng(seed)
    return Ragged.from_rows([rng.integers(5, 900, rng.integers(min_length, max_length)) for _ in range(count)])


def assert_independent_of_the_batch(make, count: int) -> None:
    """An example's batch is the same alone as among others: nothing depends on order, batch or padding."""
    batch = make(np.arange(count))
    for i in (0, count // 2, count - 1):
        alone = make(np.array([i]))
        for name in ("ids", "targets", "source"):
            one, many = getattr(alone, name), getattr(batch, name)
            if one is not None:
                assert np.array_equal(one[0], many[i][: one.shape[1]]), name


def test_special_tokens_come_from_the_tokenizer(tokenizer: Tokenizer) -> None:
    special_tokens = SpecialTokens.from_tokenizer(tokenizer)
    ids = (special_tokens.pad_id, special_tokens.bos_id, special_tokens.eos_id, special_tokens.mask_id)
    assert ids == (0, 1, 2, 4)
    assert special_tokens.sentinel_ids == tuple(range(5, 15))
    assert special_tokens.special_ids == tuple(range(15))
    assert tokenizer.encode("the cat") == [1, *tokenizer.encode("the cat", add_special_tokens=False), 2]


def test_teacher_forcing_shifts_by_one() -> None:
    batch = collate.seq2seq_batch(Ragged.from_rows([[7, 8], [9]]), Ragged.from_rows([[5], [5, 6, 7]]), SPECIAL_TOKENS)
    assert batch.source.tolist() == [[1, 7, 8, 2], [1, 9, 2, 0]]
    assert batch.source_attention_mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert batch.ids.tolist() == [[1, 5, 0, 0], [1, 5, 6, 7]]
    assert batch.targets.tolist() == [[5, 2, IGNORE_INDEX, IGNORE_INDEX], [5, 6, 7, 2]]
    assert batch.num_targets == 6
    assert np.array_equal(batch.attention_mask, batch.targets != IGNORE_INDEX)


def test_causal_batch_targets_are_the_next_tokens() -> None:
    batch = collate.causal_batch(np.arange(12).reshape(2, 6))
    assert np.array_equal(batch.targets, batch.ids + 1)
    documents = rows(20, max_length=12)
    packed = build_packed_rows(documents, pack_documents(documents, 16), 16, pad_id=0)
    batch = collate.packed_causal_batch(packed)
    actual = [
        (int(a), int(b)) for a, b in zip(batch.ids.ravel(), batch.targets.ravel(), strict=True) if b != IGNORE_INDEX
    ]
    pairs = [(int(a), int(b)) for i in range(20) for a, b in zip(documents[i], documents[i][1:], strict=False)]
    assert sorted(actual) == sorted(pairs)


def test_masking_rates_are_as_documented() -> None:
    many = rows(600)
    batch = corruption.mlm_batch(many, SPECIAL_TOKENS, np.arange(600), seed=3, epoch=1)
    plain = many.with_affixes([1], [2]).to_padded(0)
    chosen = batch.targets != IGNORE_INDEX
    assert np.array_equal(np.where(chosen, batch.targets, batch.ids), plain)  # the text can be restored
    assert not chosen[plain < 5].any()
    total, picked = len(many.values), int(chosen.sum())
    assert_rate(picked, total, 0.15)
    assert_rate(int((batch.ids[chosen] == 4).sum()), picked, 0.8)
    assert_rate(int((batch.ids[chosen] == plain[chosen]).sum()), picked, 0.1)
    assert batch.ids[chosen][batch.ids[chosen] != 4].min() >= 5
    again = corruption.mlm_batch(many, SPECIAL_TOKENS, np.arange(600), seed=3, epoch=2)
    assert not np.array_equal(again.ids, batch.ids)
    with pytest.raises(AssertionError):  # planted fault: 20 % instead of 15 % is detected
        wrong = corruption.mlm_batch(many, SPECIAL_TOKENS, np.arange(600), 3, 1, mlm_probability=0.2)
        assert_rate(int((wrong.targets != IGNORE_INDEX).sum()), total, 0.15)
    with pytest.raises(BadSetting, match="needs a tokenizer with a mask token"):
        corruption.mlm_batch(many, SpecialTokens(0, 1, 2), np.arange(600), 0, 0)


def assert_rate(count: int, total: int, rate: float) -> None:
    """Within four standard deviations of a binomial."""
    assert abs(count - rate * total) < 4 * (total * rate * (1 - rate)) ** 0.5 + 0.01 * total


def test_collated_examples_do_not_depend_on_the_batch() -> None:
    many, ends = rows(30), np.array([10, 11, 12, 13, 14, 15])
    assert_independent_of_the_batch(lambda i: corruption.mlm_batch(many.take(i), SPECIAL_TOKENS, i, 1, 2), 30)
    assert_independent_of_the_batch(
        lambda i: corruption.span_corruption_batch(many.take(i), SPECIAL_TOKENS, i, 1, 2), 30
    )
    assert_independent_of_the_batch(
        lambda i: corruption.denoising_batch(many.take(i), SPECIAL_TOKENS, ends, i, 1, 2), 30
    )


@given(st.integers(2, 400), st.integers(0, 10**6))
def test_span_corruption_can_be_undone(length: int, index: int) -> None:
    ids = np.random.default_rng(index).integers(5, 900, length)
    source, target = corruption.corrupt_spans(ids, SPECIAL_TOKENS.sentinel_ids, 1, 2, index)
    assert np.array_equal(corruption.restore_spans(source, target, SPECIAL_TOKENS.sentinel_ids), ids)
    noise = max(1, round(0.15 * length))
    masked = target[target < 900]
    assert len(masked) == noise
    sentinels = target[target >= 900]
    assert sentinels.tolist() == list(range(900, 900 + len(sentinels)))
    assert np.array_equal(source[source >= 900], sentinels[:-1])
    assert len(sentinels) - 1 == max(1, round(noise / 3))


def test_span_corruption_reports_missing_sentinels() -> None:
    with pytest.raises(BadSetting, match="needs 6 sentinels, there are 3"):
        corruption.corrupt_spans(np.arange(100), (901, 902, 903), 0, 0, 0)
    with pytest.raises(BadInput, match="at least 2 tokens"):
        corruption.corrupt_spans(np.arange(1), SPECIAL_TOKENS.sentinel_ids, 0, 0, 0)


@given(st.integers(1, 300), st.integers(0, 10**6))
def test_infilling_keeps_the_other_tokens(length: int, index: int) -> None:
    ids = np.arange(5, 5 + length)
    infilled = corruption.text_infilling(ids, 4, 0, 0, index)
    kept = infilled[infilled != 4]
    assert len(kept) == length - round(0.3 * length)
    assert np.array_equal(kept, np.sort(kept))  # in their order
    ends = np.array([7, 11, 30])
    moved = corruption.permute_sentences(ids, ends, 0, 0, index)
    assert np.array_equal(np.sort(moved), ids)
    inside = np.diff(moved) == 1
    assert (~inside).sum() <= 3


def test_infilled_spans_are_poisson() -> None:
    """The mean length of a span is 3 and about 5 % are empty (Poisson: e^-3)."""
    ids = np.arange(5, 2005)
    masks = [int((corruption.text_infilling(ids, 4, 0, 0, i) == 4).sum()) for i in range(40)]
    assert 600 / np.mean(masks) == pytest.approx(3, abs=0.15)


def test_next_sentences() -> None:
    document_of = np.repeat(np.arange(300), 4)
    pairs = corruption.next_sentence_pairs(document_of, seed=0, epoch=0)
    assert_rate(int(pairs.label.sum()), len(pairs.label), 0.5)
    same = document_of[pairs.first] == document_of[pairs.second]
    assert np.array_equal(same, pairs.label == 0)
    assert np.array_equal(pairs.second[same], pairs.first[same] + 1)
    batch = corruption.mlm_nsp_batch(rows(1200, max_length=8), pairs, np.arange(50), SPECIAL_TOKENS, 0, 0)
    assert (batch.ids == 2).sum(1).tolist() == [2] * 50
    assert np.array_equal(batch.next_sentence_labels, pairs.label[:50])
    assert batch.token_types.max(1).tolist() == [1] * 50
    with pytest.raises(BadInput, match="at least two documents"):
        corruption.next_sentence_pairs(np.zeros(5, int), 0, 0)


# ------------------------------------------------------------------------------------------------ labels and answers


@given(
    st.lists(
        st.tuples(st.sampled_from([*WORDS, "unseenword", "日本", "\u200b", "a b"]), st.sampled_from("OXY")), min_size=1
    )
)
def test_tags_are_on_the_first_token_of_their_word(tokenizer: Tokenizer, sentence: list[tuple[str, str]]) -> None:
    words, tags = zip(*sentence, strict=True)
    names = collate.label_names("OXY")
    columns = collate.encode_tagged([TaggedTokens(words, tags)], names, tokenizer)
    batch = collate.tagging_batch(columns["ids"], columns["labels"], SpecialTokens.from_tokenizer(tokenizer))
    assert collate.predicted_tags(np.maximum(batch.targets, 0), batch.targets, names) == [tags]
    assert batch.ids.shape == batch.targets.shape
    assert batch.ids[0, 1:-1].tolist() == [n for pieces in collate.word_token_ids(words, tokenizer) for n in pieces]
    ends = np.flatnonzero(batch.targets[0] != IGNORE_INDEX)
    assert len(ends) == len(words)


def test_classes_and_pairs(tokenizer: Tokenizer) -> None:
    assert collate.label_names(["B-X", "O", "A"]) == ("O", "A", "B-X")
    assert collate.label_ids(["no", "yes"], ("yes", "no")).tolist() == [1, 0]
    with pytest.raises(BadInput, match=r"'yess' is not in the training data; did you mean 'yes'"):
        collate.label_ids(["yess"], ("yes", "no"))
    batch = collate.classification_batch(
        Ragged.from_rows([[7], [8, 9]]), np.array([0, 1]), SPECIAL_TOKENS, Ragged.from_rows([[5, 6], []])
    )
    assert batch.ids.tolist() == [[1, 7, 2, 5, 6, 2], [1, 8, 9, 2, 2, 0]]
    assert batch.token_types.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 0]]


@given(st.lists(st.sampled_from([*WORDS, "日本語", "🙂"]), min_size=1, max_size=60), st.data())
def test_qa_windows_contain_the_answers(tokenizer: Tokenizer, words: list[str], data) -> None:
    context = " ".join(words)
    first = data.draw(st.integers(0, len(words) - 1))
    last = min(len(words) - 1, first + data.draw(st.integers(0, 3)))
    answer = " ".join(words[first : last + 1])
    start = len(" ".join(words[:first])) + (first > 0)
    question = QAExample("Who ran?", context, (answer,), (start,))
    result = collate.qa_windows(question, tokenizer, SpecialTokens.from_tokenizer(tokenizer), max_length=64, stride=16)
    answers = {collate.span_text(context, w, *w.answer_positions) for w in result if w.answer_positions != (0, 0)}
    assert answers == {answer}
    seen = {span for w in result for span in w.offsets}
    assert seen == set(
        tokenizer.encode_with_offsets(context, add_special_tokens=False).offsets
    )  # every token of the text is in a window
    assert max(len(w.ids) for w in result) <= 64
    batch: TrainBatch = collate.qa_batch(result, SpecialTokens.from_tokenizer(tokenizer))
    assert batch.targets.shape == (len(result), 2)


def test_no_answer_is_position_0(tokenizer: Tokenizer) -> None:
    result = collate.qa_windows(QAExample("Who?", "the cat sat"), tokenizer, SpecialTokens.from_tokenizer(tokenizer))
    assert [w.answer_positions for w in result] == [(0, 0)]
    assert collate.span_text("the cat sat", result[0], 0, 0) == ""
    with pytest.raises(BadSetting, match="stride must be from 1 to"):
        collate.qa_windows(
            QAExample("Who?", "the cat"), tokenizer, SpecialTokens.from_tokenizer(tokenizer), max_length=16, stride=20
        )


def test_rows_of_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    result = encode_rows(tokenizer, [*WORDS, "", "the cat sat"])
    assert [result[i].tolist() for i in range(len(result))] == [
        tokenizer.encode(text, add_special_tokens=False) for text in [*WORDS, "", "the cat sat"]]  # fmt: skip
