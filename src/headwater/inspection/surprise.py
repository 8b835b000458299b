"""How sure the model is: the next token, and the surprise of each token that is there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.errors import BadInput, BadSetting
from headwater.inspection.results import Result
from headwater.inspection.scores import in_parts, language, vocabulary
from headwater.inspection.subjects import Reading, Token, read, still

ROWS = 1 << 12  # tokens that are read together where each is hidden in turn


@dataclass(frozen=True)
class NextToken:
    token: Token
    share: float


@dataclass(frozen=True, eq=False)
class NextTokens(Result):
    """The most probable tokens at one place. after: the tokens until there; place: the last of them, or the gap."""

    place: int
    after: tuple[Token, ...]
    choices: tuple[NextToken, ...]
    entropy: float

    def lines(self) -> list[str]:
        said = "   ".join(f"{choice.token.text!r} {choice.share:.1%}" for choice in self.choices)
        before = "".join(token.text for token in self.after if token.part == 1)[-24:]
        return [f"next token after {before!r}: {said}   (entropy {self.entropy / math.log(2):.1f} bits)"]


def next_tokens(model: Any, text: Any, n: int = 10, target: Any = None, *, place: int | None = None) -> NextTokens:
    """The n most probable tokens after a text; after `target` (or at its beginning) where a source is read; at the
    first mask where the model fills gaps; or after another place.
    """
    if n < 1:
        raise BadSetting(f"next_tokens: n must be at least 1, got {n}; 10 is usual")
    reading = text if isinstance(text, Reading) else _until(model, text, target)
    place = last_place(reading) if place is None else range(len(reading.tokens))[place]
    with still(reading.model):
        states, rows = reading.states()
        head = language(reading.model)
        log_p = head(states[:, place : place + 1], rows)[0, 0].float().log_softmax(-1)
    top = log_p.topk(min(n, log_p.numel()))
    choices = tuple(
        NextToken(reading.name(i), math.exp(p)) for i, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
    return NextTokens(place, reading.tokens[: place + 1], choices, float(-(log_p.exp() * log_p.nan_to_num()).sum()))


def _until(model: Any, text: Any, target: Any) -> Reading:
    """What has been read when the next token is asked for: the whole target that was given, without an end."""
    reading = read(model, text, target if target is not None else _nothing(model))
    if not reading.source or target is None:
        return reading
    from dataclasses import replace

    from headwater.inspection.subjects import Subject

    ended = reading.follows[-1].id in Subject.of(model).ends
    return reading if ended else replace(reading, tokens=(*reading.tokens, reading.follows[-1]))


def _nothing(model: Any) -> Any:
    """The target of an encoder-decoder that has written nothing yet: its end alone, so that only the start is read."""
    inner = getattr(model, "model", model)
    return [0] if inner.encoder is not None and inner.decoder is not None else None


def last_place(reading: Reading) -> int:
    """Where the next token is asked for."""
    if reading.causal:
        return len(reading.tokens) - 1
    mask = getattr(reading.tokenizer, "mask", None)
    gaps = [n for n, token in enumerate(reading.tokens) if token.id == mask]
    if not gaps:
        name = reading.tokenizer.specials.get("mask", "[MASK]") if reading.tokenizer is not None else "a mask"
        raise BadInput(f"next_tokens: a model that looks both ways fills gaps, got none; put {name} into the text")
    return gaps[0]


# ------------------------------------------------------------------------------------------------------ token by token


@dataclass(frozen=True, eq=False)
class TokenLosses(Result):
    """losses [T] in nats, of tokens [T]: -log p of each given what the model may see. best: what it expected instead.

    ranks [T]: how many tokens were more probable.
    """

    tokens: tuple[Token, ...]
    losses: np.ndarray
    ranks: np.ndarray
    best: tuple[Token, ...]
    best_shares: np.ndarray
    how: str

    @property
    def mean(self) -> float:
        return float(self.losses.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700))

    def lines(self) -> list[str]:
        worst = sorted(range(len(self.tokens)), key=lambda n: -self.losses[n])[:5]
        said = "   ".join(
            f"{self.tokens[n].text!r} {math.exp(-self.losses[n]):.1%} (expected {self.best[n].text!r})" for n in worst
        )
        return [
            f"surprise: {self.mean:.2f} nats a token, perplexity {self.perplexity:.1f} ({self.how})",
            f"least expected: {said}",
        ]


def token_losses(model: Any, text: Any, target: Any = None) -> TokenLosses:
    """-log p of every token: given what came before it; or, where the model looks both ways, hidden in turn."""
    reading = read(model, text, target)
    head = language(reading.model)
    with still(reading.model):
        found = _before(reading, head) if reading.causal else _hidden(reading, head)
    tokens, how, (losses, ranks, best, shares) = found
    return TokenLosses(tokens, losses, ranks, tuple(reading.name(int(n)) for n in best), shares, how)


def _before(reading: Reading, head: Any) -> tuple[tuple[Token, ...], str, tuple[np.ndarray, ...]]:
    if not reading.follows:
        raise BadInput("token_losses: a text must have two tokens or more, got one; the first has nothing before it")
    states, rows = reading.states()
    ids = torch.tensor([token.id for token in reading.follows])
    parts = [
        _measured(log_p, ids[first : first + len(log_p)])
        for first, log_p in in_parts(head, states[:, : len(ids)], rows, vocabulary(head))
    ]
    return reading.follows, "each given what came before", _joined(parts)


def _hidden(reading: Reading, head: Any) -> tuple[tuple[Token, ...], str, tuple[np.ndarray, ...]]:
    """Each token that is no control token is hidden in turn; as many rows at a time as ROWS tokens make."""
    mask = getattr(reading.tokenizer, "mask", None)
    if mask is None:
        raise BadInput("token_losses: a model that looks both ways needs a mask token, its tokenizer has none")
    ids, length = reading.ids[0], len(reading.tokens)
    places = [n for n, token in enumerate(reading.tokens) if token.text not in reading.tokenizer.controls]
    parts = []
    for some in torch.tensor(places).split(max(1, ROWS // length)):
        batch = ids.repeat(len(some), 1)
        batch[torch.arange(len(some)), some] = mask
        rows = reading.model.rows(batch, None, None, None, None)
        asked = reading.model.states(rows)[torch.arange(len(some)), some]
        parts += [
            _measured(log_p, ids[some][first : first + len(log_p)])
            for first, log_p in in_parts(head, asked[None], rows, vocabulary(head))
        ]
    return tuple(reading.tokens[n] for n in places), "each hidden in turn", _joined(parts)


def _measured(log_p: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """For log p [T, V]: the loss and rank of each id, the best token and its share."""
    own = log_p.gather(1, ids[:, None])
    share, best = log_p.max(1)
    return -own[:, 0], (log_p > own).sum(1), best, share.exp()


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[np.ndarray, ...]:
    return tuple(torch.cat(columns).numpy() for columns in zip(*parts, strict=True))
