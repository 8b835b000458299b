"""Self-supervised objectives: masked language modelling, next-sentence prediction, span corruption and denoising.

    mlm              masked language modelling (BERT, Devlin et al. 2018): predict the masked tokens
    mlm-nsp          and next-sentence prediction: does the second sentence follow the first
    span-corruption  T5 (Raffel et al. 2019): spans become sentinels; the target lists each sentinel with its span
    denoising        BART (Lewis et al. 2019): sentences permuted, spans under one mask; the target is the text

What is masked in an example is a function of (seed, epoch, index), not of the batch it is in.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch, length_mask, seq2seq_batch
from headwater.data.ragged import Ragged
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.rng import permutation, randint, random_bits, uniform
from headwater.text.tokenizer import Tokenizer

# ---------------------------------------------------------------- masked language modelling, next-sentence prediction

MLM_PROBABILITY = 0.15
MASK_AND_RANDOM_FRACTIONS = (0.8, 0.1)  # of the chosen tokens 80 % become <mask>, 10 % a random token, 10 % stay


def mlm_batch(
    texts: Ragged,
    special_tokens: SpecialTokens,
    indices: np.ndarray,
    seed: int,
    epoch: int,
    mlm_probability: float = MLM_PROBABILITY,
) -> TrainBatch:
    """<bos> text <eos> with about mlm_probability of the tokens chosen; the targets are the chosen tokens."""
    rows = texts.with_affixes([special_tokens.bos_id], [special_tokens.eos_id])
    ids = rows.to_padded(special_tokens.pad_id)
    attention_mask = length_mask(rows)
    maskable = attention_mask & ~np.isin(ids, special_tokens.special_ids)
    ids, targets = mask_tokens(ids, maskable, special_tokens, indices, seed, epoch, mlm_probability)
    return TrainBatch(ids, attention_mask, targets)


def mask_tokens(
    ids: np.ndarray,
    maskable: np.ndarray,
    special_tokens: SpecialTokens,
    indices: np.ndarray,
    seed: int,
    epoch: int,
    mlm_probability: float = MLM_PROBABILITY,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids with some of the maskable tokens replaced, and targets that count only there. All [B, L]."""
    if special_tokens.mask_id < 0:
        raise BadSetting(
            _("masked language modelling needs a tokenizer with a mask token; train one, or choose another")
        )
    key = (seed, epoch, np.asarray(indices)[:, None])
    positions = np.arange(ids.shape[1])
    chosen = maskable & (uniform(*key, "choose", positions) < mlm_probability)

    # of the chosen: <mask>, a random token, or the token itself
    text_ids = np.setdiff1d(np.arange(special_tokens.vocab_size), special_tokens.special_ids)
    random_ids = text_ids[randint(len(text_ids), *key, "other", positions)]
    draw = uniform(*key, "how", positions)
    replaced = np.where(draw < sum(MASK_AND_RANDOM_FRACTIONS), random_ids, ids)
    replaced = np.where(draw < MASK_AND_RANDOM_FRACTIONS[0], special_tokens.mask_id, replaced)
    return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORE_INDEX)


class SentencePairs(NamedTuple):
    """Sentence pairs by index [P], and labels [P]: 0 the second follows the first, 1 it does not."""

    first: np.ndarray
    second: np.ndarray
    label: np.ndarray


def next_sentence_pairs(document_ids: np.ndarray, seed: int, epoch: int) -> SentencePairs:
    """Next-sentence prediction: half the time the next sentence of the document, else one of another document.

    document_ids [N]: the document of each sentence, ascending.
    """
    first = np.flatnonzero(document_ids[1:] == document_ids[:-1])
    if not len(first) or document_ids[0] == document_ids[-1]:
        raise BadInput(
            _(
                "next-sentence pairs need at least two documents, one of them with two sentences; put a "
                "blank line between documents"
            )
        )
    label = (uniform(seed, epoch, first, "follows") < 0.5).astype(np.int64)
    starts = np.searchsorted(document_ids, document_ids[first], "left")
    ends = np.searchsorted(document_ids, document_ids[first], "right")
    num_others = len(document_ids) - (ends - starts)  # sentences of other documents
    draw = (uniform(seed, epoch, first, "which") * num_others).astype(np.int64)
    other = np.where(draw < starts, draw, draw + (ends - starts))
    return SentencePairs(first, np.where(label, other, first + 1), label)


def mlm_nsp_batch(
    sentences: Ragged, pairs: SentencePairs, rows: np.ndarray, special_tokens: SpecialTokens, seed: int, epoch: int
) -> TrainBatch:
    """<bos> first <eos> second <eos> for these rows of the pairs, with tokens masked, and next-sentence labels."""
    first = sentences.take(pairs.first[rows]).with_affixes([special_tokens.bos_id], [special_tokens.eos_id])
    second = sentences.take(pairs.second[rows]).with_affixes((), [special_tokens.eos_id])
    joined = Ragged.from_rows([np.concatenate([first[i], second[i]]) for i in range(len(rows))], np.int64)
    ids = joined.to_padded(special_tokens.pad_id)
    attention_mask = length_mask(joined)
    in_second = np.arange(ids.shape[1]) >= first.lengths[:, None]
    token_types = (in_second & attention_mask).astype(np.int64)
    maskable = attention_mask & ~np.isin(ids, special_tokens.special_ids)
    ids, targets = mask_tokens(ids, maskable, special_tokens, pairs.first[rows], seed, epoch)
    return TrainBatch(ids, attention_mask, targets, token_types=token_types, next_sentence_labels=pairs.label[rows])


# ---------------------------------------------------------------------------------------------------- span corruption
#
# text     Thank you for inviting me to your party last week
# input    Thank you <0> me to your party <1> week <eos>
# target   <0> for inviting <1> last <2> <eos>

NOISE_DENSITY = 0.15
MEAN_SPAN_LENGTH = 3.0


def span_corruption_batch(
    texts: Ragged, special_tokens: SpecialTokens, indices: np.ndarray, seed: int, epoch: int
) -> TrainBatch:
    """Span corruption as a seq2seq batch: from the corrupted texts to the spans they lack."""
    sides = [corrupt_spans(texts[i], special_tokens.sentinel_ids, seed, epoch, int(n)) for i, n in enumerate(indices)]
    sources, targets = (Ragged.from_rows(side, np.int64) for side in zip(*sides, strict=True))
    return seq2seq_batch(sources, targets, special_tokens)


def corrupt_spans(
    ids: np.ndarray, sentinel_ids: tuple[int, ...], seed: int, epoch: int, index: int
) -> tuple[np.ndarray, np.ndarray]:
    """(input, target) of one text: about NOISE_DENSITY of it masked, in spans of MEAN_SPAN_LENGTH on average."""
    noise = random_spans_noise_mask(len(ids), seed, epoch, index)
    starts = noise & ~np.concatenate([[False], noise[:-1]])
    num_spans = int(starts.sum())
    if num_spans + 1 > len(sentinel_ids):
        raise BadSetting(
            _(
                "a text of {num_ids} tokens needs {spans} sentinels, there are {num_sentinels}; train a "
                "tokenizer with more, or cut the texts",
                num_ids=len(ids),
                spans=num_spans + 1,
                num_sentinels=len(sentinel_ids),
            )
        )
    sentinels = np.array(sentinel_ids)
    source = np.where(starts, sentinels[np.cumsum(starts) - 1], ids)[~noise | starts]
    target = np.insert(ids[noise].astype(np.int64), np.flatnonzero(starts[noise]), sentinels[:num_spans])
    return source, np.append(target, sentinels[num_spans])


def restore_spans(source: np.ndarray, target: np.ndarray, sentinel_ids: tuple[int, ...]) -> np.ndarray:
    """The text from the corrupted text and its target: the inverse of corrupt_spans."""
    is_sentinel = np.isin(target, sentinel_ids)
    spans = np.split(target[~is_sentinel], np.cumsum(~is_sentinel)[is_sentinel][1:])
    span_of_sentinel = dict(zip(target[is_sentinel].tolist(), spans, strict=False))
    pieces = [span_of_sentinel.get(int(n), np.array([n])) for n in source]
    return np.concatenate(pieces) if pieces else source


def random_spans_noise_mask(length: int, seed: int, epoch: int, index: int) -> np.ndarray:
    """[L] True where masked: kept and masked spans in turn, each at least one token, a kept one first."""
    if length < 2:
        raise BadInput(
            _("a text must have at least 2 tokens to mask one, got {length}; leave such texts out", length=length)
        )
    num_noise = min(max(round(length * NOISE_DENSITY), 1), length - 1)
    num_spans = min(max(round(num_noise / MEAN_SPAN_LENGTH), 1), num_noise, length - num_noise)
    noise_lengths = _random_partition(num_noise, num_spans, seed, epoch, index, "hidden")
    kept_lengths = _random_partition(length - num_noise, num_spans, seed, epoch, index, "kept")
    return np.repeat(np.tile([False, True], num_spans), np.stack([kept_lengths, noise_lengths], 1).ravel())


def _random_partition(total: int, num_parts: int, *keys: int | str) -> np.ndarray:
    """num_parts integers of at least 1 that sum to `total`, every such partition equally likely."""
    edges = np.sort(np.argsort(random_bits(*keys, np.arange(total - 1)), kind="stable")[: num_parts - 1]) + 1
    return np.diff(np.concatenate([[0], edges, [total]]))


# ---------------------------------------------------------------------------------------------------------- denoising

INFILLING_RATE = 0.3
INFILLING_POISSON_LAMBDA = 3.0
SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "\n")
POISSON_CDF = np.cumsum(
    [math.exp(-INFILLING_POISSON_LAMBDA) * INFILLING_POISSON_LAMBDA**k / math.factorial(k) for k in range(20)]
)


def denoising_batch(
    texts: Ragged, special_tokens: SpecialTokens, sentence_ends: np.ndarray, indices: np.ndarray, seed: int, epoch: int
) -> TrainBatch:
    """Denoising as a seq2seq batch: from the corrupted texts to the texts."""
    if special_tokens.mask_id < 0:
        raise BadSetting(_("denoising needs a tokenizer with a mask token; train one, or choose another"))
    corrupted = []
    for row, index in enumerate(indices.tolist()):
        permuted = permute_sentences(texts[row], sentence_ends, seed, epoch, index)
        corrupted.append(text_infilling(permuted, special_tokens.mask_id, seed, epoch, index))
    return seq2seq_batch(Ragged.from_rows(corrupted, np.int64), texts, special_tokens)


def sentence_end_ids(tokenizer: Tokenizer) -> np.ndarray:
    """The ids of tokens that end a sentence."""
    return np.array([n for n in range(len(tokenizer)) if tokenizer.piece(n).endswith(SENTENCE_ENDS)], np.int64)


def permute_sentences(ids: np.ndarray, sentence_ends: np.ndarray, seed: int, epoch: int, index: int) -> np.ndarray:
    """Sentence permutation; a sentence ends with a token of sentence_ends."""
    sentences = np.split(ids, np.flatnonzero(np.isin(ids[:-1], sentence_ends)) + 1)
    order = permutation(len(sentences), seed, epoch, index, "sentences")
    return np.concatenate([sentences[i] for i in order])


def text_infilling(ids: np.ndarray, mask_id: int, seed: int, epoch: int, index: int) -> np.ndarray:
    """Text infilling: spans of Poisson length become one <mask> each, INFILLING_RATE of the tokens in all.

    A span of length 0 inserts a mask.
    """
    budget = round(INFILLING_RATE * len(ids))
    lengths = np.searchsorted(POISSON_CDF, uniform(seed, epoch, index, "span", np.arange(len(ids))))
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), budget) + 1] if budget else lengths[:0]
    if budget:
        lengths[-1] -= int(lengths.sum()) - budget  # the last span takes what is left
    num_kept = len(ids) - int(lengths.sum())
    gaps = np.sort((uniform(seed, epoch, index, "gap", np.arange(len(lengths))) * (num_kept + 1)).astype(np.int64))
    starts = gaps + np.cumsum(lengths) - lengths  # spans are between the kept tokens, in order
    out: list[np.ndarray | list[int]] = []
    last = 0
    for start, length in zip(starts, lengths, strict=True):
        out += [ids[last:start], [mask_id]]
        last = start + length
    return np.concatenate([*out, ids[last:]]).astype(np.int64)
