"""Logits processors that penalize, suppress, allow or force tokens: repetition penalty, no-repeat n-gram and others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.generation.sampling import LogitsProcessor, TokenHistory
from headwater.i18n import _
from headwater.parts import MAX_INT, must, part

# ------------------------------------------------------------------------------------------- penalties of repetition


@part
class RepetitionPenalty(LogitsProcessor):
    """Repetition penalty (Keskar et al. 2019) for each token of the prompt and the output.

    A logit above 0 is divided by the penalty, one below 0 is multiplied by it.
    """

    penalty: float

    def __post_init__(self) -> None:
        must(
            0.01 <= self.penalty <= 100,
            self,
            _("penalty must be from 0.01 to 100"),
            self.penalty,
            _("1.1 is usual; 1 does nothing"),
        )

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        logits = logits.clone()
        for row, history in zip(logits, histories, strict=True):
            ids = _token_tensor({*history.prompt_ids, *history.output_ids}, row)
            row[ids] = torch.where(row[ids] > 0, row[ids] / self.penalty, row[ids] * self.penalty)
        return logits


@part
class FrequencyPenalty(LogitsProcessor):
    """Frequency penalty: subtracted once for each time the token occurs in the output; the prompt does not count."""

    penalty: float

    def __post_init__(self) -> None:
        must(
            abs(self.penalty) <= 100,
            self,
            _("penalty must be from -100 to 100"),
            self.penalty,
            _("0.5 is usual; 0 does nothing"),
        )

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        counts = [
            torch.bincount(_token_tensor(history.output_ids, row), minlength=len(row))
            for row, history in zip(logits, histories, strict=True)
        ]
        return logits - self.penalty * torch.stack(counts)  # [B, V]


@part
class PresencePenalty(LogitsProcessor):
    """Presence penalty: subtracted once if the token occurs in the output; the prompt does not count."""

    penalty: float

    def __post_init__(self) -> None:
        must(
            abs(self.penalty) <= 100,
            self,
            _("penalty must be from -100 to 100"),
            self.penalty,
            _("0.5 is usual; 0 does nothing"),
        )

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        logits = logits.clone()
        for row, history in zip(logits, histories, strict=True):
            row[_token_tensor(set(history.output_ids), row)] -= self.penalty
        return logits


# ----------------------------------------------------------------------------------- forbidden, allowed, forced tokens


@part
class NoRepeatNgram(LogitsProcessor):
    """No-repeat n-gram: no sequence of ngram_size tokens occurs twice in prompt and output together."""

    ngram_size: int

    def __post_init__(self) -> None:
        must(self.ngram_size >= 1, self, _("ngram_size must be at least 1"), self.ngram_size, _("3 is usual"))

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        logits = logits.clone()
        for row, history in zip(logits, histories, strict=True):
            banned = self._banned_tokens([*history.prompt_ids, *history.output_ids])
            row[_token_tensor(banned, row)] = -torch.inf
        return logits

    def _banned_tokens(self, token_ids: list[int]) -> set[int]:
        """The tokens that followed an earlier occurrence of the last ngram_size - 1 tokens."""
        context = self.ngram_size - 1
        if len(token_ids) < context:
            return set()
        last = token_ids[len(token_ids) - context :]
        starts = range(len(token_ids) - context)
        return {token_ids[i + context] for i in starts if token_ids[i : i + context] == last}


@part
class SuppressTokens(LogitsProcessor):
    """Suppressed tokens: these are never sampled."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.tokens)

    def check_vocab(self, vocab_size: int) -> None:
        _check_in_vocab(self, self.tokens, vocab_size)

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        return logits.index_fill(-1, _token_tensor(self.tokens, logits), -torch.inf)


@part
class AllowedTokens(LogitsProcessor):
    """Allowed tokens: only these are sampled."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.tokens)
        must(
            bool(self.tokens),
            self,
            _("tokens must name at least one"),
            self.tokens,
            _("leave AllowedTokens out to allow all"),
        )

    def check_vocab(self, vocab_size: int) -> None:
        _check_in_vocab(self, self.tokens, vocab_size)

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        ids = _token_tensor(self.tokens, logits)
        return torch.full_like(logits, -torch.inf).index_copy(-1, ids, logits[:, ids])


@part
class ForcedPrefix(LogitsProcessor):
    """Forced prefix: the output begins with these tokens."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.tokens)

    def check_vocab(self, vocab_size: int) -> None:
        _check_in_vocab(self, self.tokens, vocab_size)

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        logits = logits.clone()
        for row, history in zip(logits, histories, strict=True):
            step = len(history.output_ids)
            if step < len(self.tokens):
                row.fill_(-torch.inf)
                row[self.tokens[step]] = 0.0
        return logits


@part
class MinTokens(LogitsProcessor):
    """Minimum length: no end-of-sequence token before the output has min_tokens tokens."""

    min_tokens: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.eos_ids)

    def check_vocab(self, vocab_size: int) -> None:
        _check_in_vocab(self, self.eos_ids, vocab_size)

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        too_short = [len(history.output_ids) < self.min_tokens for history in histories]
        without_eos = logits.index_fill(-1, _token_tensor(self.eos_ids, logits), -torch.inf)
        return torch.where(torch.tensor(too_short, device=logits.device)[:, None], without_eos, logits)


def _token_tensor(tokens: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=like.device)


def _check_tokens(processor: LogitsProcessor, tokens: Any) -> None:
    valid = isinstance(tokens, tuple) and len(tokens) <= 2**20
    must(
        valid and all(type(token) is int and 0 <= token <= MAX_INT for token in tokens),
        processor,
        _("tokens must be integers from 0, at most 2**20 of them"),
        str(tokens)[:60],
        _("give token ids"),
    )


def _check_in_vocab(processor: LogitsProcessor, tokens: Sequence[int], vocab_size: int) -> None:
    out_of_range = [t for t in tokens if t >= vocab_size]
    must(
        not out_of_range,
        processor,
        _("tokens must be below the vocabulary's size {vocab_size}", vocab_size=vocab_size),
        out_of_range[:1],
        _("is it another tokenizer's?"),
    )
