"""Choosers that weigh or forbid tokens: for having been said already, or by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.generation.narrowing import Chooser, Said
from headwater.parts import LARGEST, must, part

# --------------------------------------------------------------------------------------- what was said weighs less


@part
class RepetitionPenalty(Chooser):
    """Tokens of the prompt and of the answer: a score above 0 is divided by the factor, one below multiplied."""

    factor: float

    def __post_init__(self) -> None:
        must(
            0.01 <= self.factor <= 100,
            self,
            "factor must be from 0.01 to 100",
            self.factor,
            "1.1 is usual; 1 does nothing",
        )

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        scores = scores.clone()
        for row, (prompt, new) in zip(scores, said, strict=True):
            ids = _ids({*prompt, *new}, row)
            row[ids] = torch.where(row[ids] > 0, row[ids] / self.factor, row[ids] * self.factor)
        return scores


@part
class FrequencyPenalty(Chooser):
    """Minus amount for every time the answer has used the token; the prompt does not count."""

    amount: float

    def __post_init__(self) -> None:
        must(
            abs(self.amount) <= 100,
            self,
            "amount must be from -100 to 100",
            self.amount,
            "0.5 is usual; 0 does nothing",
        )

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        uses = torch.stack(
            [torch.bincount(_ids(new, row), minlength=len(row)) for row, (_, new) in zip(scores, said, strict=True)]
        )
        return scores - self.amount * uses


@part
class PresencePenalty(Chooser):
    """Minus amount once for each token the answer has used; the prompt does not count."""

    amount: float

    def __post_init__(self) -> None:
        must(
            abs(self.amount) <= 100,
            self,
            "amount must be from -100 to 100",
            self.amount,
            "0.5 is usual; 0 does nothing",
        )

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        scores = scores.clone()
        for row, (_, new) in zip(scores, said, strict=True):
            row[_ids(set(new), row)] -= self.amount
        return scores


# ----------------------------------------------------------------------------------------- what must not or must be


@part
class NoRepeatNgram(Chooser):
    """No run of `size` tokens occurs twice in prompt and answer together."""

    size: int

    def __post_init__(self) -> None:
        must(self.size >= 1, self, "size must be at least 1", self.size, "3 is usual")

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        scores = scores.clone()
        for row, (prompt, new) in zip(scores, said, strict=True):
            row[_ids(self._repeats([*prompt, *new]), row)] = -torch.inf
        return scores

    def _repeats(self, text: list[int]) -> set[int]:
        """The tokens that came after an earlier occurrence of the last size - 1 tokens."""
        before = self.size - 1
        if len(text) < before:
            return set()
        last = text[len(text) - before :]
        return {text[i + before] for i in range(len(text) - before) if text[i : i + before] == last}


@part
class Ban(Chooser):
    """Never these tokens."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.tokens)

    def check(self, vocab: int) -> None:
        _check_below(self, self.tokens, vocab)

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        return scores.index_fill(-1, _ids(self.tokens, scores), -torch.inf)


@part
class Allow(Chooser):
    """Only these tokens."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.tokens)
        must(bool(self.tokens), self, "tokens must name at least one", self.tokens, "leave Allow out to allow all")

    def check(self, vocab: int) -> None:
        _check_below(self, self.tokens, vocab)

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        ids = _ids(self.tokens, scores)
        return torch.full_like(scores, -torch.inf).index_copy(-1, ids, scores[:, ids])


@part
class ForcedPrefix(Chooser):
    """The answer begins with these tokens."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.tokens)

    def check(self, vocab: int) -> None:
        _check_below(self, self.tokens, vocab)

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        scores = scores.clone()
        for row, (_, new) in zip(scores, said, strict=True):
            if len(new) < len(self.tokens):
                row.fill_(-torch.inf)
                row[self.tokens[len(new)]] = 0.0
        return scores


@part
class MinTokens(Chooser):
    """None of the end tokens before the answer has `count` tokens."""

    count: int
    end: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tokens(self, self.end)

    def check(self, vocab: int) -> None:
        _check_below(self, self.end, vocab)

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        early = torch.tensor([len(new) < self.count for _, new in said], device=scores.device)
        return torch.where(early[:, None], scores.index_fill(-1, _ids(self.end, scores), -torch.inf), scores)


def _ids(tokens: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=like.device)


def _check_tokens(who: Chooser, tokens: Any) -> None:
    right = (
        isinstance(tokens, tuple) and len(tokens) <= 2**20 and all(type(t) is int and 0 <= t <= LARGEST for t in tokens)
    )
    must(right, who, "tokens must be whole numbers from 0, at most 2**20 of them", str(tokens)[:60], "give token ids")


def _check_below(who: Chooser, tokens: Sequence[int], vocab: int) -> None:
    beyond = [t for t in tokens if t >= vocab]
    must(
        not beyond, who, f"tokens must be below the vocabulary's size {vocab}", beyond[:1], "is it another tokenizer's?"
    )
