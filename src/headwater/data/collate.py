"""Collate functions: token ids of examples -> TrainBatch.

seq2seq_batch           source -> target, teacher forcing
causal_batch            next-token prediction on rows of a stream; packed_causal_batch on packed documents
classification_batch    sequence classification, one text or a pair
tagging_batch           token classification
qa_batch                extractive question answering, in overlapping windows
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwater.data.examples import QAExample, TaggedTokens
from headwater.data.metrics import UNSPACED_CHARACTER, WORD_PATTERN, split_words
from headwater.data.ragged import PackedRows, Ragged
from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.text.tokenizer import Tokenizer

IGNORE_INDEX = -100  # a target that the loss ignores
TARGET_FIELDS = ("targets", "next_sentence_labels")


@dataclass(frozen=True)
class TrainBatch:
    """A collated batch: the arrays of one forward pass; those an objective does not use are None.

    ids and attention_mask [B, Q] (True: a token, not padding) go to the model, source and source_attention_mask [B, S]
    to its encoder. targets are [B, Q] ids, [B] classes or [B, 2] first and last position; IGNORE_INDEX is not counted.
    """

    ids: np.ndarray
    attention_mask: np.ndarray
    targets: np.ndarray
    source: np.ndarray | None = None
    source_attention_mask: np.ndarray | None = None
    token_types: np.ndarray | None = None  # [B, Q] 0 first text, 1 second
    document_ids: np.ndarray | None = None  # [B, Q] packed documents, 0 is padding
    global_tokens: np.ndarray | None = None  # [B, Q] for a model with global tokens: True where a token sees all
    signal: np.ndarray | None = None  # [B, …] what the model reads in place of ids, which are then its slots
    encoder_states: np.ndarray | None = None  # [B, S, D] what a frozen encoder made of the signal, in place of it
    code_targets: np.ndarray | None = (
        None  # [B, F] the codes of the last codebook in signal, where it is to be predicted
    )
    mixed_targets: np.ndarray | None = None  # [B] the second class of an image mixed of two
    image_ids: np.ndarray | None = None  # [B] equal where two rows have the same image
    own_shares: np.ndarray | None = None  # [B] the weight of its first class
    segments: np.ndarray | None = None  # [B, 3] of rows that continue: number of the dataset, row, segment
    next_sentence_labels: np.ndarray | None = None  # [B] 0: the second sentence follows the first, 1: it does not

    @property
    def num_targets(self) -> int:
        """Number of targets that count: what the summed loss is divided by."""
        return int((self.targets != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the special tokens an objective may need."""

    pad_id: int
    bos_id: int
    eos_id: int
    mask_id: int = -1
    vocab_size: int = 0
    special_ids: tuple[int, ...] = ()  # never masked, never drawn as a random token
    sentinel_ids: tuple[int, ...] = ()

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """The special tokens of a tokenizer; one without bos or pad uses its eos for them, as public models do."""
        ids = {role: tokenizer.special_id(role) for role in ("pad", "bos", "eos", "mask", "cls", "sep")}
        eos = _first_not_none(ids["eos"], ids["sep"])
        if eos is None:
            raise BadSetting(
                _("the tokenizer must have an eos or a sep token, it has neither; choose another tokenizer")
            )
        pad = _first_not_none(ids["pad"], eos)
        bos = _first_not_none(ids["bos"], ids["cls"], eos)
        mask = _first_not_none(ids["mask"], -1)
        sentinels = [tokenizer.token_to_id(f"<extra_id_{n}>") for n in range(100)]
        sentinel_ids = tuple(n for n in sentinels if n is not None)
        special = tuple(sorted({tokenizer.token_to_id(text) or 0 for text in tokenizer.special_tokens}))
        return cls(pad or 0, bos or 0, eos, -1 if mask is None else mask, len(tokenizer), special, sentinel_ids)


def _first_not_none(*ids: int | None) -> int | None:
    return next((n for n in ids if n is not None), None)


# ------------------------------------------------------------------------------ seq2seq and causal language modelling


def seq2seq_batch(sources: Ragged, targets: Ragged, special_tokens: SpecialTokens) -> TrainBatch:
    """Teacher forcing: encoder input <bos> source <eos>, decoder input <bos> y1 … yn, targets y1 … yn <eos>."""
    encoder_inputs = sources.with_affixes([special_tokens.bos_id], [special_tokens.eos_id])
    decoder_inputs = targets.with_affixes([special_tokens.bos_id])
    labels = targets.with_affixes((), [special_tokens.eos_id])
    return TrainBatch(
        ids=decoder_inputs.to_padded(special_tokens.pad_id),
        attention_mask=length_mask(decoder_inputs),
        targets=labels.to_padded(IGNORE_INDEX),
        source=encoder_inputs.to_padded(special_tokens.pad_id),
        source_attention_mask=length_mask(encoder_inputs),
    )


def without_padding_mask(batch: TrainBatch) -> TrainBatch:
    """Without the decoder's padding mask: padding on the right is never in the past of a token."""
    return replace(batch, attention_mask=np.ones_like(batch.attention_mask))


def causal_batch(rows: np.ndarray) -> TrainBatch:
    """Rows [B, C + 1] of a stream: the inputs are all tokens but the last, the targets all but the first."""
    return TrainBatch(rows[:, :-1], np.ones(rows[:, :-1].shape, bool), rows[:, 1:])


def packed_causal_batch(rows: PackedRows) -> TrainBatch:
    """Packed documents: the target is the next token of the same document; its last token has none."""
    same_document = (rows.document_ids[:, 1:] == rows.document_ids[:, :-1]) & (rows.document_ids[:, 1:] > 0)
    targets = np.full(rows.ids.shape, IGNORE_INDEX, np.int64)
    targets[:, :-1][same_document] = rows.ids[:, 1:][same_document]
    return TrainBatch(rows.ids, rows.document_ids > 0, targets, document_ids=rows.document_ids)


def length_mask(rows: Ragged) -> np.ndarray:
    """[B, L]: True where a row has a token."""
    lengths = rows.lengths
    mask: np.ndarray = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    return mask


# ---------------------------------------------------------------------------------- sequence and token classification


def label_names(labels: Iterable[str]) -> tuple[str, ...]:
    """The distinct labels, sorted; O, the tag outside any entity, first."""
    return tuple(sorted(set(labels), key=lambda name: (name != "O", name)))


def label_ids(labels: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """The class id of each label. A label that is not in the training data is refused."""
    ids = {name: number for number, name in enumerate(names)}
    for label in labels:
        if label not in ids:
            raise BadInput(
                _(
                    "the label {label!r} is not in the training data; {nearest}",
                    label=label,
                    nearest=nearest(label, names),
                )
            )
    return np.array([ids[label] for label in labels], np.int64)


def classification_batch(
    texts: Ragged, labels: np.ndarray, special_tokens: SpecialTokens, text_pairs: Ragged | None = None
) -> TrainBatch:
    """<bos> text <eos>, or <bos> text <eos> text_pair <eos>; targets are the classes [B]. <bos> is global."""
    rows = texts.with_affixes([special_tokens.bos_id], [special_tokens.eos_id])
    if text_pairs is None:
        mask = length_mask(rows)
        return TrainBatch(rows.to_padded(special_tokens.pad_id), mask, labels, global_tokens=_first_tokens(mask, 1))
    second = text_pairs.with_affixes((), [special_tokens.eos_id])
    joined = Ragged.from_rows([np.concatenate([rows[i], second[i]]) for i in range(len(rows))], np.int64)
    mask = length_mask(joined)
    in_second = np.arange(mask.shape[1]) >= rows.lengths[:, None]
    token_types = (in_second & mask).astype(np.int64)
    first = _first_tokens(mask, 1)
    return TrainBatch(
        joined.to_padded(special_tokens.pad_id), mask, labels, token_types=token_types, global_tokens=first
    )


def _first_tokens(mask: np.ndarray, counts: int | np.ndarray) -> np.ndarray:
    """[B, L]: True for the first tokens of each row, as many as `counts` says."""
    first: np.ndarray = np.arange(mask.shape[1]) < np.broadcast_to(counts, len(mask))[:, None]
    return first


def encode_tagged(examples: Iterable[TaggedTokens], names: Sequence[str], tokenizer: Tokenizer) -> dict[str, Ragged]:
    """Token ids of the words, and labels: the tag on the first token of a word, IGNORE_INDEX on its others.

    A word without tokens (only characters the tokenizer drops) becomes <unk>, so that no word loses its tag.
    """
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    for example in examples:
        row_ids: list[int] = []
        row_labels: list[int] = []
        words = word_token_ids(example.words, tokenizer)
        for token_ids, tag in zip(words, label_ids(example.tags, names), strict=True):
            row_ids += token_ids
            row_labels += [int(tag), *[IGNORE_INDEX] * (len(token_ids) - 1)]
        ids.append(row_ids)
        labels.append(row_labels)
    return {"ids": Ragged.from_rows(ids), "labels": Ragged.from_rows(labels)}


def word_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each word; <unk> for a word without tokens."""
    encoding = tokenizer.encode_with_offsets(list(words), add_special_tokens=False)
    ids: list[list[int]] = [[] for _ in words]
    for token, word in zip(encoding.ids, encoding.word_ids, strict=True):
        if word is not None:
            ids[word].append(token)
    unk_id = tokenizer.special_id("unk") or 0
    return [token_ids or [unk_id] for token_ids in ids]


def tagging_batch(ids: Ragged, labels: Ragged, special_tokens: SpecialTokens) -> TrainBatch:
    """Token classification: <bos> tokens <eos>; targets [B, L] on the first token of each word."""
    rows = ids.with_affixes([special_tokens.bos_id], [special_tokens.eos_id])
    targets = labels.with_affixes([IGNORE_INDEX], [IGNORE_INDEX])
    return TrainBatch(rows.to_padded(special_tokens.pad_id), length_mask(rows), targets.to_padded(IGNORE_INDEX))


def predicted_tags(predictions: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The tag of each word, from the predicted classes [B, L] at the positions that have a target."""
    return [
        tuple(names[int(n)] for n in row[target != IGNORE_INDEX])
        for row, target in zip(predictions, targets, strict=True)
    ]


# -------------------------------------------------------------------------------------- extractive question answering
#
# <bos> question <eos> window of the context <eos>    token types: 0 question, 1 context, 2 context word of the question
#
# Token type 2 marks where question and context overlap, which would otherwise take many questions to learn.


@dataclass(frozen=True)
class QAWindow:
    """A question with one window of its context. Position 0 (<bos>) as the answer means: no answer in this window."""

    ids: tuple[int, ...]
    token_types: tuple[int, ...]
    answer_positions: tuple[int, int]  # first and last position, inclusive
    offsets: tuple[tuple[int, int], ...]  # characters of each context token
    context_start: int  # position of the first context token


def qa_windows(
    example: QAExample, tokenizer: Tokenizer, special_tokens: SpecialTokens, max_length: int = 384, stride: int = 128
) -> list[QAWindow]:
    """Overlapping windows that together hold every token of the context. The first answer is the target."""
    # question, context, and the number of context tokens per window
    question = tokenizer.encode(example.question, add_special_tokens=False)[: max_length // 2]
    context = tokenizer.encode_with_offsets(example.context, add_special_tokens=False)
    size = max_length - len(question) - 3  # context tokens of a window
    if not 0 < stride <= size:
        raise BadSetting(
            _(
                "a window of {max_length} tokens has {size} tokens of context, so the stride must be from 1 "
                "to {size}, got {stride}",
                max_length=max_length,
                size=size,
                stride=stride,
            )
        )

    # first and last token of the answer, and the token types of the context
    answer = answer_span(context.offsets, example)
    context_types = [1 + overlaps for overlaps in question_overlap(context.offsets, example)]
    context_start = len(question) + 2

    # <bos> question <eos> window <eos>, every `stride` tokens
    windows = []
    bos = special_tokens.bos_id
    eos = special_tokens.eos_id
    for first in range(0, max(1, len(context.ids) - size + stride), stride):
        last = min(first + size, len(context.ids))
        positions = (0, 0)
        if answer is not None and first <= answer[0] and answer[1] < last:
            positions = (answer[0] - first + context_start, answer[1] - first + context_start)
        ids = (bos, *question, eos, *context.ids[first:last], eos)
        token_types = (*(0,) * context_start, *context_types[first:last], 1)
        windows.append(QAWindow(ids, token_types, positions, tuple(context.offsets[first:last]), context_start))
        if last == len(context.ids):
            break
    return windows


def answer_span(offsets: Sequence[tuple[int, int]], example: QAExample) -> tuple[int, int] | None:
    """The first and last token of the first answer: those with its first and its last character."""
    if not example.answers:
        return None
    start = example.answer_starts[0]
    end = start + len(example.answers[0])
    tokens = [n for n, (a, b) in enumerate(offsets) if a < end and b > start]
    return (tokens[0], tokens[-1]) if tokens else None


def question_overlap(offsets: Sequence[tuple[int, int]], example: QAExample) -> list[bool]:
    """Whether the word of each context token is in the question (two characters, where words have no spaces).

    >>> question_overlap([(0, 5), (6, 8), (8, 9)], QAExample("Which FOX jumps?", "Quick fox"))
    [False, True, True]
    """
    question_words = split_words(example.question)
    context_words = list(WORD_PATTERN.finditer(example.context))
    overlaps = np.zeros(len(example.context) + 1, bool)  # by character
    for n in (1, 2):  # single Chinese characters occur everywhere: of these only bigrams count
        question_ngrams = set(zip(*(question_words[i:] for i in range(n)), strict=False))
        for matches in zip(*(context_words[i:] for i in range(n)), strict=False):
            ngram = tuple(match[0].lower() for match in matches)
            is_single_character = n == 1 and re.fullmatch(UNSPACED_CHARACTER, ngram[0])
            if ngram in question_ngrams and not is_single_character:
                overlaps[matches[0].start() : matches[-1].end()] = True
    return [bool(overlaps[a:b].any()) for a, b in offsets]


def qa_batch(windows: Sequence[QAWindow], special_tokens: SpecialTokens) -> TrainBatch:
    """Extractive question answering; targets [B, 2]: first and last position of the answer. The question is global."""
    rows = Ragged.from_rows([w.ids for w in windows], np.int64)
    token_types = Ragged.from_rows([w.token_types for w in windows], np.int64).to_padded(0)
    targets = np.array([w.answer_positions for w in windows], np.int64)
    mask = length_mask(rows)
    question = _first_tokens(mask, np.array([w.context_start - 1 for w in windows]))  # <bos> and the question
    return TrainBatch(
        rows.to_padded(special_tokens.pad_id), mask, targets, token_types=token_types, global_tokens=question
    )


def span_text(context: str, window: QAWindow, first: int, last: int) -> str:
    """The context between two positions of a window, extended to whole words; '' for no answer."""
    if first < window.context_start or last < first or last >= window.context_start + len(window.offsets):
        return ""
    start = window.offsets[first - window.context_start][0]
    end = window.offsets[last - window.context_start][1]
    words = [word.span() for word in WORD_PATTERN.finditer(context) if word.start() < end and word.end() > start]
    start = min([start, *(a for a, _ in words)])
    end = max([end, *(b for _, b in words)])
    return context[start:end].strip()
