"""Heads: what is read off the last hidden states x [B, Q, D]. Every head takes (x, rows)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.core.dropout import Dropout
from headwater.core.embed import Rows
from headwater.core.feedforward import activation
from headwater.core.kinds import BeforeHead, Head, Norm, Pooling
from headwater.parts import must, part


@part
class NoHead(Head):
    """The hidden states themselves."""

    def build(self, d_model: int) -> nn.Module:
        return States()


class States(nn.Module):
    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return x


# ----------------------------------------------------------------------------------------------- one answer a token


@part
class NoTransform(BeforeHead):
    def build(self, d_model: int, width: int) -> nn.Module:
        must(width == d_model, "LanguageHead", f"width must be d_model ({d_model})", width, "or give a transform to it")
        return nn.Identity()


@part
class Transform(BeforeHead):
    """norm(act(dense(x))): what masked language models do before the vocabulary."""

    activation: str
    norm: Norm

    def build(self, d_model: int, width: int) -> nn.Module:
        return TransformLayer(d_model, width, self)


@part
class LanguageHead(Head):
    """Scores over the vocabulary: out(transform(x) · scale). width: that of a narrow table (ALBERT)."""

    vocab: int
    bias: bool = False
    scale: float = 1.0
    transform: BeforeHead = NoTransform()
    width: int | None = None

    def __post_init__(self) -> None:
        must(self.vocab >= 1, self, "vocab must be at least 1", self.vocab, "give the number of tokens")
        must(self.width != 0, self, "width must be at least 1", 0, "leave it out for d_model")

    def build(self, d_model: int) -> nn.Module:
        return LanguageScores(self, d_model)


@part
class TokenHead(Head):
    """Scores for each token: tags, or with two outputs the start and the end of an answer."""

    outputs: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        must(self.outputs >= 1, self, "outputs must be at least 1", self.outputs, "give the number of labels")
        must(0 <= self.dropout < 1, self, "dropout must be from 0 up to 1", self.dropout, "0.1 is usual")

    def build(self, d_model: int) -> nn.Module:
        return TokenScores(self, d_model)


class TransformLayer(nn.Module):
    def __init__(self, d_model: int, width: int, spec: Transform) -> None:
        super().__init__()
        self.dense, self.act, self.norm = nn.Linear(d_model, width), activation(spec.activation), spec.norm.build(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.dense(x)))


class LanguageScores(nn.Module):
    def __init__(self, spec: LanguageHead, d_model: int) -> None:
        super().__init__()
        width = spec.width or d_model
        self.scale, self.transform = spec.scale, spec.transform.build(d_model, width)
        self.out = nn.Linear(width, spec.vocab, spec.bias)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        x = self.transform(x)
        return self.out(x if self.scale == 1.0 else x * self.scale)


class TokenScores(nn.Module):
    def __init__(self, spec: TokenHead, d_model: int) -> None:
        super().__init__()
        self.dropout, self.out = Dropout(spec.dropout), nn.Linear(d_model, spec.outputs)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.out(self.dropout(x))


# -------------------------------------------------------------------------------------------------- one answer a row


@part
class FirstToken(Pooling):
    """The state of the first real token."""

    def pick(self, x: Tensor, rows: Rows) -> Tensor:
        if rows.keep is None:
            return x[:, 0]
        return _at(x, rows.keep.long().argmax(1))


@part
class LastToken(Pooling):
    """The state of the last real token."""

    def pick(self, x: Tensor, rows: Rows) -> Tensor:
        return x[:, -1] if rows.keep is None else _at(x, _last(rows.keep))


@part
class Mean(Pooling):
    """The mean state of the real tokens."""

    def pick(self, x: Tensor, rows: Rows) -> Tensor:
        if rows.keep is None:
            return x.mean(1)
        share = rows.keep[:, :, None].to(x.dtype)
        return (x * share).sum(1) / share.sum(1).clamp(min=1)


@part
class Pool(Head):
    """One vector a row: act(dense(pick(x)))."""

    pool: Pooling = FirstToken()
    activation: str = "tanh"

    def build(self, d_model: int) -> nn.Module:
        return PoolLayer(self, d_model)


@part
class ClassHead(Head):
    """Scores for the whole row: out(dropout(pooled))."""

    classes: int
    pooled: Head = Pool()
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        must(self.classes >= 1, self, "classes must be at least 1", self.classes, "give the number of labels")
        must(0 <= self.dropout < 1, self, "dropout must be from 0 up to 1", self.dropout, "0.1 is usual")

    def build(self, d_model: int) -> nn.Module:
        return ClassScores(self, d_model)


@part
class Picked(Head):
    """The picked state as it is, where Pool would change it."""

    pool: Pooling = FirstToken()

    def build(self, d_model: int) -> nn.Module:
        return PickedLayer(self)


class PickedLayer(nn.Module):
    def __init__(self, spec: Picked) -> None:
        super().__init__()
        self.pool = spec.pool

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.pool.pick(x, rows)


class PoolLayer(nn.Module):
    def __init__(self, spec: Pool, d_model: int) -> None:
        super().__init__()
        self.pool, self.dense, self.act = spec.pool, nn.Linear(d_model, d_model), activation(spec.activation)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.act(self.dense(self.pool.pick(x, rows)))


class ClassScores(nn.Module):
    def __init__(self, spec: ClassHead, d_model: int) -> None:
        super().__init__()
        self.pooled, self.dropout = spec.pooled.build(d_model), Dropout(spec.dropout)
        self.out = nn.Linear(d_model, spec.classes, spec.bias)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.out(self.dropout(self.pooled(x, rows)))


@part
class Several(Head):
    """Several heads on the same states, answered by name: masked words and the next sentence (BERT's pre-training)."""

    heads: tuple[tuple[str, Head], ...]

    def build(self, d_model: int) -> nn.Module:
        return SeveralHeads(self, d_model)


class SeveralHeads(nn.ModuleDict):
    def __init__(self, spec: Several, d_model: int) -> None:
        super().__init__({name: head.build(d_model) for name, head in spec.heads})

    def forward(self, x: Tensor, rows: Rows) -> dict[str, Tensor]:
        return {name: head(x, rows) for name, head in self.items()}


def _last(marks: Tensor) -> Tensor:
    """[B] the index of the last True; 0 where there is none."""
    return (marks * torch.arange(1, marks.shape[1] + 1, device=marks.device)).argmax(1)


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device), index]
