"""Sampling parameters: the settings of generate() and stream() as one frozen value, and the processors they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.errors import BadSetting, nearest
from headwater.generation.penalties import (
    AllowedTokens,
    ForcedPrefix,
    FrequencyPenalty,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
    SuppressTokens,
)
from headwater.generation.sampling import Greedy, LogitsProcessor, MinP, Temperature, TopK, TopP
from headwater.i18n import _

# Setting -> logits processor, in the order in which they act: penalties, temperature, then top-k, top-p and min-p.
PROCESSORS: dict[str, type[LogitsProcessor]] = {
    "repetition_penalty": RepetitionPenalty,
    "frequency_penalty": FrequencyPenalty,
    "presence_penalty": PresencePenalty,
    "no_repeat_ngram_size": NoRepeatNgram,
    "suppress_tokens": SuppressTokens,
    "allowed_tokens": AllowedTokens,
    "forced_prefix": ForcedPrefix,
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
}
SAMPLING = {"temperature", "top_k", "top_p", "min_p"}  # decoding is greedy unless one of these is given


def build_processors(**settings: Any) -> tuple[LogitsProcessor, ...]:
    """Logits processors from settings by name, None meaning not given; greedy unless one of SAMPLING is given.

    >>> build_processors(top_k=5, repetition_penalty=1.1)
    (RepetitionPenalty(penalty=1.1), TopK(k=5))
    """
    for name in settings:
        if name not in PROCESSORS:
            raise BadSetting(
                _("generation has no setting {name!r}; {nearest}", name=name, nearest=nearest(name, PROCESSORS))
            )
    values = {name: value for name, value in settings.items() if value is not None}
    processors = tuple(cls(values[name]) for name, cls in PROCESSORS.items() if name in values)  # type: ignore[call-arg]
    return processors if SAMPLING & values.keys() else (*processors, Greedy())


@dataclass(frozen=True)
class SamplingParams:
    """Settings of generate() and stream(): how tokens are sampled, when to stop, and what to report.

        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=50)
        generate(model, "Once upon a time", params=params)

    Decoding is greedy unless one of temperature, top_k, top_p and min_p is given.
    """

    max_tokens: int | None = None
    """maximum number of output tokens; None: what fits, at most 256"""
    stop: str | int | Sequence[str | int] = ()
    """strings or token ids that end the output, besides the model's own; the text is cut before a string"""
    seed: int | Sequence[int] = 0
    """the same seed gives the same text, alone or in a batch; a list: one for each prompt"""
    temperature: float | None = None
    """0 is greedy; higher is more varied"""
    top_k: int | None = None
    """only the K most probable tokens"""
    top_p: float | None = None
    """only the most probable tokens whose probabilities sum to this (nucleus sampling)"""
    min_p: float | None = None
    """only tokens at least this many times as probable as the most probable one"""
    repetition_penalty: float | None = None
    """above 1: tokens of the prompt and the output become less probable"""
    frequency_penalty: float | None = None
    """subtracted from a logit for each time the token occurs in the output"""
    presence_penalty: float | None = None
    """subtracted from a logit once, if the token occurs in the output"""
    no_repeat_ngram_size: int | None = None
    """no sequence of N tokens occurs twice"""
    suppress_tokens: Sequence[int] | None = None
    """token ids that are never sampled"""
    allowed_tokens: Sequence[int] | None = None
    """the only token ids that may be sampled"""
    forced_prefix: Sequence[int] | None = None
    """token ids that the output begins with"""
    top_logprobs: int = 0
    """how many of the most probable tokens to report with each output token"""
    trace: bool = False
    """keep the distribution at each step, before and after each logits processor"""
    decoder_start_ids: Sequence[int] | None = None
    """an encoder-decoder: the first ids of the decoder; None: the model's own"""
    timeout: float | None = None
    """seconds after which the output ends"""

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """The logits processors that these settings name."""
        return build_processors(**{name: getattr(self, name) for name in PROCESSORS})
