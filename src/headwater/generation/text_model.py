"""TextModel: a model with its tokenizer and special tokens; and the requests that prompts to it become."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import nn

from headwater.core.model import Transformer
from headwater.errors import BadInput, TooLong
from headwater.families.load import LoadedModel
from headwater.generation.penalties import ForcedPrefix, SuppressTokens
from headwater.generation.prefix_cache import Prefix
from headwater.generation.request import Request, ValidRequest, validate_request, vocab_size
from headwater.generation.sampling import LogitsProcessor
from headwater.generation.sampling_params import SamplingParams
from headwater.generation.streaming import NoTextStream, TextStream, build_stop_strings
from headwater.i18n import _
from headwater.parts import must
from headwater.rng import check_seed

MAX_PROMPT_CHARS = 2**24
MAX_TRACE_BYTES = 2**29


class TokenizerLike(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def check_not_meta(model: nn.Module) -> None:
    """Raise BadInput for a model on the meta device, which has shapes and no weights."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise BadInput(
            _(
                "generate: the model must have weights, this one is on the meta device and has only "
                "shapes; load it (headwater.load), or build its spec: spec.build(seed=0)"
            )
        )


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer, its special tokens and the logits processors of its generation config."""

    model: Transformer
    tokenizer: TokenizerLike | None = None
    eos_ids: tuple[int, ...] = ()
    decoder_start_id: int | None = None
    context_length: int | None = None
    processors: tuple[LogitsProcessor, ...] = ()

    @classmethod
    def wrap(cls, model: AnyModel) -> TextModel:
        """A TextModel of what headwater.load gives, or of a model alone."""
        if isinstance(model, TextModel):
            return model
        if isinstance(model, nn.Module):
            check_not_meta(model)
            return cls(model)
        check_not_meta(model.model)
        return cls(
            model.model,
            model.tokenizer,
            model.eos_ids,
            model.decoder_start_id,
            model.max_positions,
            _generation_config_processors(model.generation_setting),
        )

    def encode_prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt in text or ids. Special tokens written in the text stay text."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise BadInput(
                _(
                    "generate: a model alone reads token ids, got the text {prompt!r}; give ids, or headwater.load",
                    prompt=prompt[:40],
                )
            )
        max_chars = MAX_PROMPT_CHARS
        if self.context_length is not None:
            max_chars = min(MAX_PROMPT_CHARS, 1024 * self.context_length)
        if len(prompt) > max_chars:
            raise TooLong(
                _(
                    "generate: a prompt may have {max_chars} characters, got {num_chars}; shorten it",
                    max_chars=max_chars,
                    num_chars=len(prompt),
                )
            )
        if surrogate := re.search("[\ud800-\udfff]", prompt):
            raise BadInput(
                _(
                    "generate: a prompt must be whole text, got half a character at {start}; decode it as UTF-8",
                    start=surrogate.start(),
                )
            )
        ids = tuple(self.tokenizer.encode(prompt))
        if not ids and self.tokenizer.bos_id is not None:
            return (self.tokenizer.bos_id,)
        return ids

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.encoder is not None and self.model.decoder is not None


AnyModel: TypeAlias = Transformer | LoadedModel | TextModel


def _generation_config_processors(setting: Callable[[str], Any]) -> tuple[LogitsProcessor, ...]:
    """Logits processors of a model's own files: suppressed and forced tokens. Temperature etc. are left to the user."""
    processors: tuple[LogitsProcessor, ...] = ()
    suppressed = [token for token in setting("suppress_tokens") or [] if type(token) is int and token >= 0]
    suppressed += [word[0] for word in setting("bad_words_ids") or [] if isinstance(word, list) and len(word) == 1]
    if suppressed:
        processors += (SuppressTokens(tuple(suppressed)),)
    forced_bos = setting("forced_bos_token_id")
    if type(forced_bos) is int:
        processors += (ForcedPrefix((forced_bos,)),)
    return processors


# --------------------------------------------------------------------------------------------- from prompts to requests


def build_requests(
    model: AnyModel, prompts: Sequence[Any], params: SamplingParams, prefix: Prefix | None = None
) -> list[ValidRequest]:
    """A validated request for each prompt."""
    text_model = TextModel.wrap(model)

    # Stop strings and stop tokens.
    stop = (params.stop,) if isinstance(params.stop, (str, int)) else tuple(params.stop)
    stop_strings = build_stop_strings([item for item in stop if type(item) is not int])  # type: ignore[misc]
    stop_token_ids = frozenset({*text_model.eos_ids, *(item for item in stop if type(item) is int)})
    must(
        text_model.tokenizer is not None or not stop_strings,
        "generate",
        _("stop strings need a tokenizer"),
        stop,
        _("give token ids"),
    )

    processors = (*text_model.processors, *params.processors())
    requests = []
    for prompt, seed in zip(prompts, _seed_per_prompt(params.seed, len(prompts)), strict=True):
        prompt_ids = text_model.encode_prompt(prompt)
        source_ids = None
        if text_model.is_encoder_decoder:
            source_ids = prompt_ids
            prompt_ids = _decoder_start(params.decoder_start_ids, text_model)
        text_stream: TextStream | NoTextStream = NoTextStream()
        if text_model.tokenizer is not None:
            text_stream = TextStream.after_prompt(text_model.tokenizer.decode, prompt_ids, stop_strings)
        request = Request(
            prompt_ids,
            source_ids,
            processors,
            max_tokens=params.max_tokens,
            stop_token_ids=stop_token_ids,
            seed=seed,
            top_logprobs=params.top_logprobs,
            trace=params.trace,
            timeout=params.timeout,
            text_stream=text_stream,
            prefix=prefix,
        )
        valid_request = validate_request(request, text_model.model, text_model.context_length)
        _check_trace_size(valid_request, vocab_size(text_model.model))
        requests.append(valid_request)
    return requests


def _seed_per_prompt(seed: int | Sequence[int], num_prompts: int) -> list[int]:
    seeds: list[Any] = list(seed) if isinstance(seed, (list, tuple)) else [seed] * num_prompts
    must(
        len(seeds) == num_prompts,
        "generate",
        _("there must be one seed, or one for each of {num_prompts} prompts", num_prompts=num_prompts),
        len(seeds),
        _("correct it"),
    )
    for item in seeds:
        check_seed(item)
    return seeds


def _decoder_start(decoder_start_ids: Sequence[int] | None, text_model: TextModel) -> tuple[int, ...]:
    if decoder_start_ids is not None:
        return tuple(decoder_start_ids)
    if text_model.decoder_start_id is None:
        raise BadInput(
            _("generate: a decoder needs a token to begin with, this model names none; give decoder_start_ids=[id]")
        )
    return (text_model.decoder_start_id,)


def _check_trace_size(request: ValidRequest, vocab_size: int) -> None:
    """Raise BadSetting if the distributions of all steps, before and after each processor, would take too much."""
    if not request.trace:
        return
    num_bytes = request.max_new_tokens * vocab_size * 4 * (1 + len(request.processors))
    must(
        num_bytes <= MAX_TRACE_BYTES,
        "generate",
        _("a trace may take {limit} bytes", limit=MAX_TRACE_BYTES),
        num_bytes,
        _("ask for fewer max_tokens"),
    )
