"""The loops of AudioLM's three stages, by the rules of Bark: which ids a stage reads, in which windows, and may write.

write_semantic    after a text and a voice (Bark), or after the semantic tokens of a recording
write_coarse      semantic tokens and the last codes ── a window of codes, then both move on
write_fine        codebook after codebook, all frames of a window at once
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.audiolm.voice import Voice
from headwater.core.cache import dynamic_cache
from headwater.core.model import Transformer
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.variants.audiolm import AudioLanguageModel, AudioTokens


@dataclass(frozen=True)
class SamplingRule:
    """How ids are chosen: temperature 0 takes the most probable; top_k 0 allows all."""

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100 or self.top_k < 0:
            raise BadSetting(
                _(
                    "temperature must be from 0 to 100 and top_k at least 0, got {temperature:g} and {top_k}; 0.7 and "
                    "0 are usual",
                    temperature=self.temperature,
                    top_k=self.top_k,
                )
            )

    def generator(self, stage: int) -> torch.Generator:
        """The random numbers of one stage."""
        return torch.Generator().manual_seed(self.seed * 3 + stage)

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Logits [..., V] -> ids [...]."""
        if not self.temperature:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k and self.top_k < logits.shape[-1]:
            threshold = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < threshold, -math.inf)
        probs = logits.softmax(-1)
        rows = probs.reshape(-1, probs.shape[-1])
        return torch.multinomial(rows, 1, generator=generator).view(logits.shape[:-1])


GREEDY = SamplingRule()


# ------------------------------------------------------------------------------------------------------------ semantic


@torch.inference_mode()
def write_semantic(
    model: AudioLanguageModel,
    tokens: AudioTokens,
    voice: Voice,
    *,
    text: Sequence[int] | None = None,
    max_tokens: int | None = None,
    rule: SamplingRule = GREEDY,
) -> Tensor:
    """New semantic tokens [N]: those of a text in a voice, which end by themselves, or a continuation of max_tokens."""
    generator = rule.generator(0)
    if text is not None:
        limit = max_tokens or tokens.semantic_length
        return _semantic_window(model.semantic, tokens, _text_prompt(tokens, voice, text), limit, True, rule, generator)

    # without a text: windows of which the first half is known
    history = voice.semantic
    wanted = len(history) + (max_tokens or tokens.semantic_length)
    while len(history) < wanted:
        known = history[-(tokens.semantic_length // 2) :]
        count = min(tokens.semantic_length - len(known), wanted - len(history))
        prompt = [torch.cat((torch.tensor([tokens.semantic_infer]), known))[None]]
        history = torch.cat((history, _semantic_window(model.semantic, tokens, prompt, count, False, rule, generator)))
    return history[len(voice.semantic) :]


def _text_prompt(tokens: AudioTokens, voice: Voice, text: Sequence[int]) -> list[Tensor]:
    """Pairs of a text id and a semantic token of the voice [1, T, 2], whose vectors are added; then the start."""
    places = tokens.text_length
    texts = torch.full((places,), tokens.text_pad)
    texts[: min(len(text), places)] = torch.tensor(list(text[:places]), dtype=torch.long) + tokens.text_offset
    voices = torch.full((places,), tokens.semantic_end)
    known = voice.semantic[-places:]
    voices[: len(known)] = known
    return [torch.stack((texts, voices), -1)[None], torch.tensor([[tokens.semantic_infer]])]


def _semantic_window(
    model: Transformer,
    tokens: AudioTokens,
    prompt: list[Tensor],
    max_tokens: int,
    may_end: bool,
    rule: SamplingRule,
    generator: torch.Generator,
) -> Tensor:
    """Semantic tokens after a prompt."""
    cache = dynamic_cache(model)
    for part in prompt:
        logits = model.decode(part, cache=cache)[0, -1]
    written: list[int] = []
    while len(written) < max_tokens:
        allowed = logits[: tokens.semantic_codes]
        if may_end:
            allowed = torch.cat((allowed, logits[tokens.semantic_end : tokens.semantic_end + 1]))
        id = int(rule.choose(allowed, generator))
        if id == tokens.semantic_codes:  # the end
            break
        written.append(id)
        if len(written) < max_tokens:
            logits = model.decode(torch.tensor([[id]]), cache=cache)[0, -1]
    return torch.tensor(written, dtype=torch.long)


# -------------------------------------------------------------------------------------------------------------- coarse


@torch.inference_mode()
def write_coarse(
    model: AudioLanguageModel, tokens: AudioTokens, semantic: Tensor, voice: Voice, rule: SamplingRule = GREEDY
) -> Tensor:
    """Codes [M, coarse_books] for semantic tokens [N], after those of a voice."""
    generator = rule.generator(1)
    known_semantic, known = coarse_history(tokens, voice)
    wanted = int(len(semantic) * tokens.ratio / tokens.coarse_books) * tokens.coarse_books
    semantic = torch.cat((known_semantic, semantic))
    ids = flatten_codes(tokens, known)
    start = len(ids)
    while len(ids) - start < wanted:
        # the semantic tokens of the codes that are known and of those that follow
        now = len(known_semantic) + round((len(ids) - start) / tokens.ratio)
        first = max(0, now - tokens.max_semantic_history)
        prompt = coarse_prompt(tokens, semantic[first:], ids[-tokens.coarse_history :])
        count = min(tokens.coarse_window, wanted - (len(ids) - start))
        ids = torch.cat((ids, _coarse_window(model.coarse, tokens, prompt, count, rule, generator)))
    return unflatten_codes(tokens, ids[start:])


def coarse_history(tokens: AudioTokens, voice: Voice) -> tuple[Tensor, Tensor]:
    """The last semantic tokens of a voice and their codes [M, coarse_books], as many as the windows hold."""
    codes = voice.fine[:, : tokens.coarse_books]
    count = min(
        tokens.max_semantic_history, len(voice.semantic) - len(voice.semantic) % 2, int(codes.numel() // tokens.ratio)
    )
    num_codes = round(count * tokens.ratio)
    flat = codes.flatten()[len(codes.flatten()) - num_codes :]
    flat = flat[: max(0, len(flat) - tokens.coarse_books)]  # the last frame is left out, as Bark does
    return voice.semantic[len(voice.semantic) - count :], flat


def flatten_codes(tokens: AudioTokens, codes: Tensor) -> Tensor:
    """Codes, flattened frame by frame, as ids of the coarse model. A cut first frame lacks its first codebooks."""
    books = (torch.arange(len(codes)) - len(codes)) % tokens.coarse_books  # the last code is of the last codebook
    return tokens.coarse_offset + books * tokens.codes + codes


def unflatten_codes(tokens: AudioTokens, ids: Tensor) -> Tensor:
    """Ids of the coarse model as codes [M, coarse_books]."""
    return ((ids - tokens.coarse_offset) % tokens.codes).view(-1, tokens.coarse_books)


def coarse_prompt(tokens: AudioTokens, semantic: Tensor, ids: Tensor) -> Tensor:
    """[1, S] semantic tokens, filled up; the start; then ids of codes."""
    padded = torch.full((tokens.coarse_semantic,), tokens.coarse_pad)
    semantic = semantic[: tokens.coarse_semantic]
    padded[: len(semantic)] = semantic + tokens.semantic_offset
    return torch.cat((padded, torch.tensor([tokens.coarse_infer]), ids))[None]


def _coarse_window(
    model: Transformer, tokens: AudioTokens, prompt: Tensor, count: int, rule: SamplingRule, generator: torch.Generator
) -> Tensor:
    """`count` ids after a prompt, the codebooks in turn."""
    cache = dynamic_cache(model)
    ids: list[Tensor] = []
    step = prompt
    for n in range(count):
        first = tokens.coarse_offset + n % tokens.coarse_books * tokens.codes
        logits = model.decode(step, cache=cache)[0, -1, first : first + tokens.codes]
        ids.append(first + rule.choose(logits, generator))
        step = ids[-1].view(1, 1)
    return torch.stack(ids)


# ---------------------------------------------------------------------------------------------------------------- fine


@torch.inference_mode()
def write_fine(
    model: AudioLanguageModel, tokens: AudioTokens, coarse: Tensor, voice: Voice, rule: SamplingRule = GREEDY
) -> Tensor:
    """The codes of all codebooks [M, books] for coarse ones [M, coarse_books], after those of a voice."""
    generator = rule.generator(2)
    known = voice.fine[-tokens.fine_history :]
    unknown = torch.full((len(coarse), tokens.books - tokens.coarse_books), tokens.codes)
    codes = torch.cat((known, torch.cat((coarse, unknown), 1)))
    missing = max(0, tokens.fine_length - len(codes))  # not causal: it reads a whole window
    codes = torch.cat((codes, torch.full((missing, tokens.books), tokens.codes)))

    moves = max(0, math.ceil((len(coarse) - (tokens.fine_length - len(known))) / tokens.fine_history))
    for n in range(moves + 1):
        start = min(n * tokens.fine_history, len(codes) - tokens.fine_length)
        fill = min(len(known) + n * tokens.fine_history, len(codes) - tokens.fine_history) - start
        window = codes[start : start + tokens.fine_length]  # a view: what is written is seen by the next window
        for book in range(tokens.coarse_books, tokens.books):
            logits = model.fine(window[None, :, : book + 1])[0, fill:, : tokens.codes]
            window[fill:, book] = rule.choose(logits, generator)
    return codes[len(known) : len(known) + len(coarse)]
