"""Heads and poolings of image models and two-tower models: DeiT's two heads, masked pixels, CLIP's projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.base import HeadSpec, NormSpec, PoolingSpec, check_positive
from headwater.core.embeddings import ModelInputs
from headwater.core.feedforward import FeedForward
from headwater.core.heads import FirstToken
from headwater.core.norms import NoNorm
from headwater.i18n import _
from headwater.parts import part


@part
class FirstTokenOf(PoolingSpec):
    """Pooling: the hidden state of the first token with this id (CLIP's end of text), else of the first token.

    Padding is not looked at.
    """

    token_id: int

    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        is_wanted = inputs.ids == self.token_id
        if inputs.attention_mask is None:
            return _rows_at(x, is_wanted.int().argmax(1))
        is_token = inputs.attention_mask.int()
        return _rows_at(x, (is_token + is_token * is_wanted.int()).argmax(1))  # 2 where found, 1 at other tokens


@part
class HighestToken(PoolingSpec):
    """Pooling: the hidden state of the token with the highest id (the end of text of the first CLIP models)."""

    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        ids = inputs.ids.int()
        if inputs.attention_mask is not None:
            ids = ids.masked_fill(~inputs.attention_mask, -1)
        return _rows_at(x, ids.argmax(1))


@part
class FinalToken(PoolingSpec):
    """Pooling: the hidden state of the last position, padding or not (SigLIP's texts always have one length)."""

    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return x[:, -1]


@part
class PatchMean(PoolingSpec):
    """Pooling: the mean over the patches, without the first tokens."""

    first_tokens: int = 1

    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return x[:, self.first_tokens :].mean(1)


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device), index]


# ------------------------------------------------------------------------------------------------------- projections


@part
class ProjectionHead(HeadSpec):
    """One vector per row, out(norm(pooling(x))): what CLIP compares. out has no bias."""

    width: int
    pooling: PoolingSpec = FirstToken()
    norm: NormSpec = NoNorm()
    bias: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "width", _("512 is usual"))

    def build(self, d_model: int) -> nn.Module:
        return ProjectionHeadLayer(self, d_model)


class ProjectionHeadLayer(nn.Module):
    """The module of ProjectionHead."""

    def __init__(self, spec: ProjectionHead, d_model: int) -> None:
        super().__init__()
        self.pooling = spec.pooling
        self.norm = spec.norm.build(d_model)
        self.out = nn.Linear(d_model, spec.width, spec.bias)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return self.out(self.norm(self.pooling.pool(x, inputs)))


@part
class NormedPool(HeadSpec):
    """One vector per row, norm(pooling(x)), without a projection."""

    pooling: PoolingSpec = FirstToken()
    norm: NormSpec = NoNorm()

    def build(self, d_model: int) -> nn.Module:
        return NormedPoolLayer(self, d_model)


class NormedPoolLayer(nn.Module):
    """The module of NormedPool."""

    def __init__(self, spec: NormedPool, d_model: int) -> None:
        super().__init__()
        self.pooling = spec.pooling
        self.norm = spec.norm.build(d_model)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return self.norm(self.pooling.pool(x, inputs))


@part
class AttentionPooling(HeadSpec):
    """One vector per row: a learned query attends to all states; y + ffn(norm(y)) of its output y (SigLIP)."""

    heads: int
    d_ff: int
    norm: NormSpec
    activation: str = "gelu_tanh"

    def build(self, d_model: int) -> nn.Module:
        return AttentionPoolingLayer(self, d_model)


class AttentionPoolingLayer(nn.Module):
    """The module of AttentionPooling."""

    def __init__(self, spec: AttentionPooling, d_model: int) -> None:
        super().__init__()
        self.heads = spec.heads
        self.probe = nn.Parameter(torch.empty(d_model))
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.norm = spec.norm.build(d_model)
        self.ffn = FeedForward(spec.d_ff, spec.activation).build(d_model)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        """x [B, Q, D] -> [B, D]"""
        query = self.q(self.probe).expand(len(x), 1, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, self.k(x), self.v(x)))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[:, 0]
        return y + self.ffn(self.norm(y))


# ----------------------------------------------------------------------------------------------- classes and pixels


@part
class DistilledHead(HeadSpec):
    """DeiT's classes: the mean of the logits of the class token and of the distillation token."""

    num_labels: int

    def __post_init__(self) -> None:
        check_positive(self, "num_labels", _("give the number of labels"))

    def build(self, d_model: int) -> nn.Module:
        return DistilledHeadLayer(self, d_model)


class DistilledHeadLayer(nn.Module):
    """The module of DistilledHead."""

    def __init__(self, spec: DistilledHead, d_model: int) -> None:
        super().__init__()
        self.class_out = nn.Linear(d_model, spec.num_labels)
        self.distillation_out = nn.Linear(d_model, spec.num_labels)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return (self.class_out(x[:, 0]) + self.distillation_out(x[:, 1])) / 2


@part
class PixelHead(HeadSpec):
    """Masked image modeling: the pixels [B, C, H, W] of an image of patches of stride · stride pixels."""

    stride: int
    channels: int = 3

    def __post_init__(self) -> None:
        check_positive(self, "stride", _("give the patch size"))
        check_positive(self, "channels", _("3 is color, 1 is gray"))

    def build(self, d_model: int) -> nn.Module:
        return PixelHeadLayer(self, d_model)


class PixelHeadLayer(nn.Module):
    """The module of PixelHead: a linear layer (a 1 x 1 convolution), and its outputs as the pixels of each patch."""

    def __init__(self, spec: PixelHead, d_model: int) -> None:
        super().__init__()
        self.stride = spec.stride
        self.out = nn.Conv2d(d_model, spec.stride**2 * spec.channels, 1)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        assert inputs.signal is not None  # images have one
        rows, columns = (side // self.stride for side in inputs.signal.shape[2:])
        patches = x[:, -rows * columns :]  # after the first tokens
        grid = patches.transpose(1, 2).unflatten(2, (rows, columns))  # [B, D, rows, columns]
        return F.pixel_shuffle(self.out(grid), self.stride)
