"""When each word was said: the decoder's cross-attention follows the speech, and dynamic time warping reads it off.

The decoder runs once over the finished text. The attention weights of a few heads, which look at what is being spoken,
are normalized over the tokens, smoothed over time by a median filter, and averaged: [tokens, frames]. The path through
it that only moves forward and passes the most weight gives each token its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headwater.audio.mel import FRAMES_PER_SECOND
from headwater.families.whisper import FRAMES_PER_SLOT
from headwater.transcription.speech_model import EncodedWindow, SpeechModel
from headwater.transcription.tokens import SECONDS_PER_STAMP
from headwater.transcription.transcript import Segment, Word

if TYPE_CHECKING:
    from headwater.transcription.windows import WindowSettings

MEDIAN_WIDTH = 7
LONGEST_MEDIAN = 0.7  # seconds: the median length of a word is at most this
OPENING = "\"'“¿([{-"  # punctuation that belongs to the next word
CLOSING = "\"'.。,，!！?？:：”)]}、"  # and to the one before
SENTENCE_END = ".。!！?？"


@dataclass
class TimedWord:
    """A word, the number of its tokens, its times in the window, and the mean probability of its tokens."""

    text: str
    tokens: int
    start: float
    end: float
    probability: float

    @property
    def length(self) -> float:
        return self.end - self.start


def align_words(
    model: SpeechModel,
    window: EncodedWindow,
    segments: Sequence[Segment],
    settings: WindowSettings,
    first: int,
    size: int,
    last_speech: float,
) -> list[Segment]:
    """The segments of a window with the times of their words; a segment begins and ends with them."""
    text_ids = [[token for token in segment.tokens if token < model.tokens.end] for segment in segments]
    timed = time_words(model, window, [token for ids in text_ids for token in ids], settings, size)
    lengths = [word.length for word in timed if word.length]
    median = min(LONGEST_MEDIAN, float(np.median(lengths))) if lengths else 0.0
    if lengths:
        _shorten_at_sentence_ends(timed, 2 * median)
    _merge_punctuation(timed)

    offset = first / FRAMES_PER_SECOND
    remaining = iter(timed)
    result = []
    for segment, ids in zip(segments, text_ids, strict=True):
        words: list[Word] = []
        count = 0
        while count < len(ids) and (word := next(remaining, None)) is not None:
            count += word.tokens
            if word.text:
                start = round(offset + word.start, 2)
                words.append(Word(word.text, start, round(offset + word.end, 2), word.probability))
        if words:
            segment = _fit_words(segment, words, median, last_speech)
            last_speech = segment.end
        result.append(segment)
    return result


def last_word_end(segments: Sequence[Segment]) -> float | None:
    """When the last word ends."""
    return next((segment.words[-1].end for segment in reversed(segments) if segment.words), None)


# ------------------------------------------------------------------------------------------------------- alignment


def time_words(
    model: SpeechModel, window: EncodedWindow, text_ids: Sequence[int], settings: WindowSettings, size: int
) -> list[TimedWord]:
    """The words of a window's text with their times."""
    if not text_ids:
        return []
    start = model.tokens.prompt((), settings.language, settings.task, timestamps=False)
    weights, probabilities = attention_over_speech(model, window, start, text_ids, size // FRAMES_PER_SLOT)
    token_index, frame_index = dynamic_time_warping(-alignment_matrix(weights)[len(start) - 1 : -1])
    is_jump = np.diff(token_index, prepend=-1) > 0
    times = frame_index[is_jump] * SECONDS_PER_STAMP  # of each token, and of the end of text

    words = model.tokens.words(text_ids, settings.language)
    bounds = np.cumsum([0, *(len(ids) for _text, ids in words)])
    return [
        TimedWord(text, len(ids), float(times[a]), float(times[b]), float(np.mean(probabilities[a:b])))
        for (text, ids), (a, b) in zip(words, pairwise(bounds), strict=True)
    ]


@torch.inference_mode()
def attention_over_speech(
    model: SpeechModel, window: EncodedWindow, start: Sequence[int], text_ids: Sequence[int], frames: int
) -> tuple[Tensor, list[float]]:
    """The weights [heads, tokens, frames] of the alignment heads, and the probability of each text token."""
    ids = torch.tensor([[*start, *text_ids, model.tokens.end]])
    taken: dict[int, Tensor] = {}
    handles = []
    for layer in sorted({layer for layer, _head in model.alignment_heads}):
        tap = model.transformer.get_submodule(f"decoder.layers.{layer}.cross_attn.kernel.weights")
        hook = lambda _tap, _inputs, weights, layer=layer: taken.__setitem__(layer, weights[0])  # noqa: E731
        handles.append(tap.register_forward_hook(hook))
    try:
        logits = model.transformer.decode(ids, memory=window.memory)[0]  # [Q, V]
    finally:
        for handle in handles:
            handle.remove()
    weights = torch.stack([taken[layer][head] for layer, head in model.alignment_heads])[:, :, :frames]
    after = logits[len(start) - 1 : len(start) - 1 + len(text_ids), : model.tokens.end].softmax(-1)
    return weights / weights.sum(-1, keepdim=True), after[range(len(text_ids)), list(text_ids)].tolist()


def alignment_matrix(weights: Tensor) -> np.ndarray:
    """Weights [heads, tokens, frames], normalized over the tokens, median-filtered over time, averaged over heads."""
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    weights = (weights - mean) / deviation
    pad = MEDIAN_WIDTH // 2
    if weights.shape[-1] > pad:
        padded = torch.nn.functional.pad(weights, (pad, pad), mode="reflect")
        weights = padded.unfold(-1, MEDIAN_WIDTH, 1).sort().values[..., pad]
    return weights.mean(0).double().numpy()


def dynamic_time_warping(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest path through cost [N, M] from corner to corner by steps of one: its row and column indices.

    All cells of an antidiagonal depend on the two before it alone, so each is computed at once.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    step = np.zeros((rows + 1, columns + 1), np.int8)  # 0 diagonal, 1 down, 2 right
    step[0, :] = 2
    step[1:, 0] = 1
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both = total[i - 1, j - 1]
        down = total[i - 1, j]
        right = total[i, j - 1]
        is_both = (both < down) & (both < right)
        is_down = (down < both) & (down < right)
        total[i, j] = cost[i - 1, j - 1] + np.where(is_both, both, np.where(is_down, down, right))
        step[i, j] = np.where(is_both, 0, np.where(is_down, 1, 2))
    path = []
    i = rows
    j = columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        kind = step[i, j]
        i -= kind != 2
        j -= kind != 1
    token_index, frame_index = np.array(path[::-1]).T
    return token_index, frame_index


# -------------------------------------------------------------------------------- corrections of unlikely lengths


def _shorten_at_sentence_ends(words: list[TimedWord], longest: float) -> None:
    """A word beside the end of a sentence is not longer than twice the median: the rest is a pause."""
    for previous, word in pairwise(words):
        if word.length > longest:
            if word.text in SENTENCE_END:
                word.end = word.start + longest
            elif previous.text in SENTENCE_END:
                word.start = word.end - longest


def _merge_punctuation(words: list[TimedWord]) -> None:
    """Opening punctuation becomes part of the next word, closing of the one before; their own text is then empty."""
    following = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        if words[i].text.startswith(" ") and words[i].text.strip() in OPENING:
            words[following].text = words[i].text + words[following].text
            words[following].tokens += words[i].tokens
            words[i].text = ""
            words[i].tokens = 0
        else:
            following = i
    previous = 0
    for j in range(1, len(words)):
        if not words[previous].text.endswith(" ") and words[j].text in CLOSING:
            words[previous].text += words[j].text
            words[previous].tokens += words[j].tokens
            words[j].text = ""
            words[j].tokens = 0
        else:
            previous = j


def _fit_words(segment: Segment, words: list[Word], median: float, last_speech: float) -> Segment:
    """A segment with its words, whose times agree; after a pause the first words are not overlong."""
    longest = 2 * median
    first = words[0]
    overlong = first.end - first.start > longest
    overlong |= len(words) > 1 and words[1].end - first.start > 2 * longest
    if first.end - last_speech > 4 * median and overlong:
        if len(words) > 1 and words[1].end - words[1].start > longest:
            boundary = max(words[1].end / 2, words[1].end - longest)
            first = replace(first, end=boundary)
            words[1] = replace(words[1], start=boundary)
        first = replace(first, start=max(0.0, first.end - longest))

    # where a stamp and a word are far apart, the stamp is right about a word that would be too long
    start = segment.start
    if start < first.end and start - 0.5 > first.start:
        first = replace(first, start=max(0.0, min(first.end - median, start)))
    else:
        start = first.start
    words[0] = first
    last = words[-1]
    end = segment.end
    if end > last.start and end + 0.5 < last.end:
        words[-1] = replace(last, end=max(last.start + median, end))
    else:
        end = last.end
    return replace(segment, start=start, end=end, words=tuple(words))
