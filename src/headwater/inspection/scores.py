"""From states to scores over the vocabulary, some places at a time; and the loss that a text gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.embed import Rows
from headwater.core.heads import ClassScores, LanguageScores, SeveralHeads, TokenScores
from headwater.errors import BadInput
from headwater.inspection.subjects import Reading
from headwater.inspection.words import Both
from headwater.training.losses import cross_entropy

TOGETHER = 1 << 24  # scores that exist at one time: 64 MB


def language(model: Any) -> nn.Module:
    """The head that says tokens; a model without one is refused."""
    heads = list(model.head.values()) if isinstance(model.head, SeveralHeads) else [model.head]
    found = next((head for head in heads if isinstance(head, LanguageScores)), None)
    if found is None:
        kind = type(model.head).__name__
        en = f"this needs a head that says tokens, the model has {kind}; load it with head='language'"
        raise BadInput(Both(en, f"这要有会说词元的输出头，模型的是 {kind}；用 head='language' 载入"))
    return found


def says_tokens(model: Any) -> bool:
    heads = list(model.head.values()) if isinstance(model.head, SeveralHeads) else [model.head]
    return any(isinstance(head, LanguageScores) for head in heads)


def in_parts(head: nn.Module, states: Tensor, rows: Rows, vocab: int) -> Iterator[tuple[int, Tensor]]:
    """log p [places, V] in float32 for some places at a time, with the first of them. states [1, Q, D]."""
    size = max(1, TOGETHER // vocab)
    for first in range(0, states.shape[1], size):
        yield first, head(states[:, first : first + size], rows)[0].float().log_softmax(-1)


def vocabulary(head: Any) -> int:
    return int(head.out.out_features)


# ------------------------------------------------------------------------------------------------------------- the loss


def loss(reading: Reading) -> tuple[Tensor, str]:
    """A number to learn from, with its gradient, and what it is in words.

    A model that writes: the mean surprise of what follows. One that fills gaps: that of every seventh token, hidden.
    One that names classes or tags: the surprise of what it says itself. States alone: half their mean square.
    """
    if reading.causal:
        language(reading.model)
        ids = torch.tensor([[token.id for token in reading.follows]])
        if not ids.shape[1]:
            raise BadInput(
                Both(
                    "a loss needs two tokens or more, got one; give a longer text", "至少要有两个词元才有损失；请写长些"
                )
            )
        return _mean(_tokens(reading.answer())[:, : ids.shape[1]], ids), "mean surprise of the tokens"
    if says_tokens(reading.model) and (mask := getattr(reading.tokenizer, "mask", None)) is not None:
        hidden, at = reading.ids, slice(1, None, 7) if len(reading.tokens) > 1 else slice(0, 1)
        asked = hidden[:, at].clone()
        hidden[:, at] = mask
        return _mean(_tokens(reading.model(hidden))[:, at], asked), "mean surprise of every seventh token, hidden"
    answer = reading.answer()
    if isinstance(reading.model.head, (ClassScores, TokenScores)):
        return _mean(answer, answer.argmax(-1)), "surprise of the label it gives itself"
    answer = _tokens(answer) if isinstance(answer, dict) else answer
    return answer.float().square().mean() / 2, "half the mean square of the states"


def _tokens(answer: Any) -> Tensor:
    """The scores over tokens; of several heads, those of the one that says tokens."""
    return max(answer.values(), key=lambda t: t.shape[-1]) if isinstance(answer, dict) else answer


def _mean(scores: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(scores, ids) / ids.numel()
