"""Decoding of one window: greedy, sampling, or beam search, under the rules of the output."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.generation.forward import forward_each, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.rng import allowed_tokens, fork_seed, gumbel_max
from headwater.transcription.rules import OutputRules
from headwater.transcription.speech_model import EncodedWindow, SpeechModel

MAX_OUTPUT_TOKENS = 224
MAX_ADVANTAGE = math.log(100)  # of an unfinished output: improbable are those that are finished, if it has more


@dataclass(frozen=True)
class WindowOutput:
    """What a window was decoded to.

    ids: the output without the end of text. avg_logprob: its log-probability for each token, the end included.
    no_speech: the probability that nobody speaks. compression: bytes of the text over those of it zipped.
    """

    ids: tuple[int, ...]
    avg_logprob: float
    no_speech: float
    temperature: float
    compression: float


@dataclass(frozen=True)
class PartialOutput:
    """A partial or finished output and its log-probability."""

    ids: tuple[int, ...] = ()
    logprob: float = 0.0

    @property
    def score(self) -> float:
        """Log-probability for each token."""
        return self.logprob / max(len(self.ids), 1)


@dataclass(frozen=True)
class SearchSettings:
    """How a window is decoded. At temperature 0: greedy or beam search; above: the best of several samples."""

    temperature: float = 0.0
    beam_size: int = 1
    best_of: int = 5
    timestamps: bool = True
    seed: int = 0


@torch.inference_mode()
def decode_window(
    model: SpeechModel, window: EncodedWindow, prompt: Sequence[int], settings: SearchSettings
) -> WindowOutput:
    """The best output of a window after a prompt."""
    tokens = model.tokens
    rules = OutputRules(tokens, settings.timestamps)
    limit = min(MAX_OUTPUT_TOKENS, model.max_positions - len(prompt))

    # the prompt; the logits at the start of the transcript tell whether anyone speaks
    cache = model.new_cache(window)
    after_start = len(prompt) - list(prompt).index(tokens.start)
    logits = forward_each(model.transformer, cache, [list(prompt)], [after_start])[0]  # [after_start, V]
    no_speech = float(logits[0].softmax(0)[tokens.no_speech])

    first = logits[-1:].clone()
    if settings.temperature > 0:
        best = _sample(model, cache, first, rules, settings, limit)
    elif settings.beam_size > 1:
        best = _beam_search(model, cache, first, rules, settings.beam_size, limit)
    else:
        best = _greedy(model, cache, first, rules, limit)
    ids = tuple(token for token in best.ids if token != tokens.end)
    text = tokens.text(ids).strip()
    average = best.logprob / (len(ids) + 1)
    return WindowOutput(ids, average, no_speech, settings.temperature, compression_ratio(text))


def compression_ratio(text: str) -> float:
    """The bytes of a text over those of it zipped: high where it repeats itself."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def _greedy(model: SpeechModel, cache: BatchKVCache, logits: Tensor, rules: OutputRules, limit: int) -> PartialOutput:
    """The most probable token in each step."""
    ids: list[int] = []
    total = 0.0
    while True:
        row = rules.apply(logits, [ids])[0]
        token = int(row.argmax())
        total += float(row[token] - row.logsumexp(0))
        ids.append(token)
        if token == model.tokens.end or len(ids) >= limit:
            return PartialOutput(tuple(ids), total)
        logits = forward_last(model.transformer, cache, [[token]])


def _sample(
    model: SpeechModel, cache: BatchKVCache, logits: Tensor, rules: OutputRules, settings: SearchSettings, limit: int
) -> PartialOutput:
    """The best of several sampled outputs; sample n of one seed is the same in every run."""
    end = model.tokens.end
    running = [PartialOutput() for _unused in range(settings.best_of)]
    seeds = [fork_seed(settings.seed, n) for n in range(settings.best_of)]
    finished: list[PartialOutput] = []
    cache.reorder([0] * len(running))
    logits = logits.expand(len(running), -1).clone()
    for step in range(limit):
        rules.apply(logits, [hypothesis.ids for hypothesis in running])
        scaled = logits / settings.temperature
        picked = [
            gumbel_max(row, allowed, seed, step)
            for row, allowed, seed in zip(scaled, allowed_tokens(scaled), seeds, strict=True)
        ]
        logprobs = logits.log_softmax(1)[range(len(picked)), picked].tolist()
        extended = [
            PartialOutput((*hypothesis.ids, token), hypothesis.logprob + logprob)
            for hypothesis, token, logprob in zip(running, picked, logprobs, strict=True)
        ]
        going_on = [row for row, token in enumerate(picked) if token != end and step + 1 < limit]
        finished += [hypothesis for row, hypothesis in enumerate(extended) if row not in going_on]
        if not going_on:
            break
        running = [extended[row] for row in going_on]
        seeds = [seeds[row] for row in going_on]
        cache.reorder(going_on)
        logits = forward_last(model.transformer, cache, [[hypothesis.ids[-1]] for hypothesis in running])
    return max(finished, key=lambda hypothesis: hypothesis.score)


def _beam_search(
    model: SpeechModel, cache: BatchKVCache, logits: Tensor, rules: OutputRules, beam_size: int, limit: int
) -> PartialOutput:
    """Beam search until as many outputs are finished as there are beams, and not all of them are improbable.

    The published implementation does not ask the second: where the model is sure of each token, outputs that end too
    early are as many as the beams before the right one is finished. With the published weights of Whisper no output
    that goes on has had such an advantage, and both rules give the same.
    """
    end = model.tokens.end
    running = [PartialOutput()]
    finished: list[PartialOutput] = []
    for step in range(limit):
        rules.apply(logits, [hypothesis.ids for hypothesis in running])
        logprobs, ids = logits.log_softmax(1).topk(beam_size + 1, 1)
        candidates = [
            (PartialOutput((*hypothesis.ids, token), hypothesis.logprob + logprob), row)
            for row, hypothesis in enumerate(running)
            for token, logprob in zip(ids[row].tolist(), logprobs[row].tolist(), strict=True)
            if logprob > -math.inf
        ]
        candidates.sort(key=lambda candidate: -candidate[0].logprob)
        rows: list[int] = []
        running = []
        for hypothesis, row in candidates:
            if hypothesis.ids[-1] == end:
                finished.append(hypothesis)
            else:
                running.append(hypothesis)
                rows.append(row)
            if len(running) == beam_size:
                break
        if not running or step + 1 == limit:
            break
        if len(finished) >= beam_size:
            most_probable = max(output.logprob for output in finished)
            if most_probable > running[0].logprob - MAX_ADVANTAGE:
                break
        cache.reorder(rows)
        logits = forward_last(model.transformer, cache, [[hypothesis.ids[-1]] for hypothesis in running])
    complete = finished if len(finished) >= beam_size else [*finished, *running]
    return max(complete, key=lambda hypothesis: hypothesis.score)
