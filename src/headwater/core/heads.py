"""Heads: language modelling, token and sequence classification, pooling. Each takes (x [B, Q, D], inputs)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.core.base import HeadSpec, HeadTransformSpec, NormSpec, PoolingSpec, check_dropout, check_positive
from headwater.core.embeddings import ModelInputs
from headwater.core.feedforward import get_activation
from headwater.core.modules import Dropout
from headwater.i18n import _
from headwater.parts import must, part


@part
class NoHead(HeadSpec):
    """No head: the model returns its last hidden states."""

    def build(self, d_model: int) -> nn.Module:
        return HiddenStates()


class HiddenStates(nn.Module):
    """The last hidden states [B, Q, D]."""

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return x


# ------------------------------------------------------------------------------------------------ outputs per token


@part
class NoTransform(HeadTransformSpec):
    """No transform before the projection to the vocabulary."""

    def build(self, d_model: int, width: int) -> nn.Module:
        must(
            width == d_model,
            "LMHead",
            _("width must be d_model ({d_model})", d_model=d_model),
            width,
            _("or give a transform to it"),
        )
        return nn.Identity()


@part
class MLMTransform(HeadTransformSpec):
    """norm(act(dense(x))): the transform of masked language models before the projection to the vocabulary."""

    activation: str
    norm: NormSpec

    def build(self, d_model: int, width: int) -> nn.Module:
        return MLMTransformLayer(d_model, width, self)


@part
class LMHead(HeadSpec):
    """Language-model head: logits over the vocabulary, out(transform(x) · scale). width: as in Embeddings."""

    vocab: int
    bias: bool = False
    scale: float = 1.0
    transform: HeadTransformSpec = NoTransform()
    width: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "vocab", _("give the number of tokens"))
        check_positive(self, "width", _("leave it out for d_model"))

    def build(self, d_model: int) -> nn.Module:
        return LMHeadLayer(self, d_model)


@part
class TokenClassificationHead(HeadSpec):
    """Token classification: logits for each token; with two labels, the start and end of an answer span."""

    num_labels: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_labels", _("give the number of labels"))
        check_dropout(self)

    def build(self, d_model: int) -> nn.Module:
        return TokenClassificationHeadLayer(self, d_model)


class MLMTransformLayer(nn.Module):
    def __init__(self, d_model: int, width: int, spec: MLMTransform) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, width)
        self.act = get_activation(spec.activation)
        self.norm = spec.norm.build(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.dense(x)))


class LMHeadLayer(nn.Module):
    def __init__(self, spec: LMHead, d_model: int) -> None:
        super().__init__()
        width = spec.width or d_model
        self.scale = spec.scale
        self.transform = spec.transform.build(d_model, width)
        self.out = nn.Linear(width, spec.vocab, spec.bias)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        x = self.transform(x)
        return self.out(x if self.scale == 1.0 else x * self.scale)


class TokenClassificationHeadLayer(nn.Module):
    def __init__(self, spec: TokenClassificationHead, d_model: int) -> None:
        super().__init__()
        self.dropout = Dropout(spec.dropout)
        self.out = nn.Linear(d_model, spec.num_labels)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return self.out(self.dropout(x))


# ------------------------------------------------------------------------------------------------- outputs per row


@part
class FirstToken(PoolingSpec):
    """Pooling: the hidden state of the first token that is not padding."""

    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        if inputs.attention_mask is None:
            return x[:, 0]
        return _select_tokens(x, inputs.attention_mask.long().argmax(1))


@part
class LastToken(PoolingSpec):
    """Pooling: the hidden state of the last token that is not padding."""

    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return x[:, -1] if inputs.attention_mask is None else _select_tokens(x, _last_true(inputs.attention_mask))


@part
class MeanPooling(PoolingSpec):
    """Mean pooling over the tokens that are not padding."""

    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        if inputs.attention_mask is None:
            return x.mean(1)
        weights = inputs.attention_mask[:, :, None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


@part
class Pooler(HeadSpec):
    """One vector per row: act(dense(pooling(x))) (BERT's pooler)."""

    pooling: PoolingSpec = FirstToken()
    activation: str = "tanh"

    def build(self, d_model: int) -> nn.Module:
        return PoolerLayer(self, d_model)


@part
class ClassificationHead(HeadSpec):
    """Sequence classification: logits for each row, out(dropout(pooler(x)))."""

    num_labels: int
    pooler: HeadSpec = Pooler()
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "num_labels", _("give the number of labels"))
        check_dropout(self)

    def build(self, d_model: int) -> nn.Module:
        return ClassificationHeadLayer(self, d_model)


@part
class Pooled(HeadSpec):
    """The pooled state itself, without the dense layer of Pooler."""

    pooling: PoolingSpec = FirstToken()

    def build(self, d_model: int) -> nn.Module:
        return PooledLayer(self)


class PooledLayer(nn.Module):
    def __init__(self, spec: Pooled) -> None:
        super().__init__()
        self.pooling = spec.pooling

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return self.pooling.pool(x, inputs)


class PoolerLayer(nn.Module):
    def __init__(self, spec: Pooler, d_model: int) -> None:
        super().__init__()
        self.pooling = spec.pooling
        self.dense = nn.Linear(d_model, d_model)
        self.act = get_activation(spec.activation)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return self.act(self.dense(self.pooling.pool(x, inputs)))


class ClassificationHeadLayer(nn.Module):
    def __init__(self, spec: ClassificationHead, d_model: int) -> None:
        super().__init__()
        self.pooler = spec.pooler.build(d_model)
        self.dropout = Dropout(spec.dropout)
        self.out = nn.Linear(d_model, spec.num_labels, spec.bias)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return self.out(self.dropout(self.pooler(x, inputs)))


def _last_true(mask: Tensor) -> Tensor:
    """[B] the index of the last True; 0 where there is none."""
    return (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)


def _select_tokens(x: Tensor, index: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device), index]
