"""Patch embedding of images (ViT): a vector for each patch, class tokens, a grid of positions.

pixels [B, C, H, W] ── patches, row by row ── projection ─┐
class token, distillation token ──────────────────────────┴─ + position ── norm ── dropout ── [B, first + N, D]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.base import EmbeddingSpec, NormSpec, PositionSpec, check_dropout, check_positive
from headwater.core.embeddings import InputEmbedding, ModelInputs, describe, signal_inputs
from headwater.core.modules import Dropout
from headwater.core.norms import NoNorm
from headwater.core.positions import LearnedEncoding
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part

MAX_FIRST_TOKENS = 2  # the class token, and DeiT's distillation token


@part
class Grid(PositionSpec):
    """Learned positions of a grid of patches, row by row, after those of the first tokens.

    Another grid gets the table interpolated (bicubic), so an image may have another size than those of training.
    """

    rows: int
    columns: int
    first_tokens: int = 0
    applies_to: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        check_positive(self, "rows", _("give the number of patches in a column"))
        check_positive(self, "columns", _("give the number of patches in a row"))

    def build(self, width: int, heads: int = 1) -> GridEncoding:
        return GridEncoding(self, width)


class GridEncoding(LearnedEncoding):
    """The table of Grid, [first_tokens + rows · columns, D]."""

    def __init__(self, spec: Grid, width: int) -> None:
        super().__init__(spec.first_tokens + spec.rows * spec.columns, width, offset=0)
        self.spec = spec

    def resized(self, rows: int, columns: int) -> Tensor:
        """[first_tokens + rows · columns, D]: the table for another grid. The positions of the first tokens stay."""
        spec = self.spec
        table = self.table.weight
        if (rows, columns) == (spec.rows, spec.columns):
            return table
        first, patches = table.split((spec.first_tokens, spec.rows * spec.columns))
        grid = patches.T.reshape(1, -1, spec.rows, spec.columns).float()  # [1, D, rows, columns]
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((first, grid[0].flatten(1).T.to(table.dtype)))


class PatchProjectionSpec(ABC):
    """What makes a vector of each patch, before the positions.

    sees_one_patch: the vector of a patch depends on its pixels alone.
    """

    sees_one_patch: ClassVar[bool] = True

    @abstractmethod
    def build(self, patches: Patches, d_model: int) -> nn.Module:
        """A module that turns images [B, C, H, W] into [B, rows · columns, D], row by row."""


@part
class LinearProjection(PatchProjectionSpec):
    """A linear layer on the pixels of each patch: a convolution whose stride is its kernel (ViT)."""

    def build(self, patches: Patches, d_model: int) -> nn.Module:
        return LinearProjectionLayer(
            patches.channels, d_model, patches.patch_size, patches.patch_size, bias=patches.bias
        )


class LinearProjectionLayer(nn.Conv2d):
    """The convolution of LinearProjection, computed as one matrix product."""

    def forward(self, pixels: Tensor) -> Tensor:
        return F.linear(self.split(pixels), self.weight.flatten(1), self.bias)  # [B, N, D]

    def split(self, pixels: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, C · h · w]: the patches row by row, each with its channels first."""
        height, width = self.kernel_size
        rows = pixels.shape[2] // height
        columns = pixels.shape[3] // width
        divisible = pixels[..., : rows * height, : columns * width]
        patches = divisible.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # [B, C, rows, h, columns, w]
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


@part
class Patches(EmbeddingSpec):
    """Patch embedding: images [B, C, H, W] to a vector for each patch (ViT, Dosovitskiy et al. 2020).

    image_size, patch_size: height and width in pixels. first_tokens: learned vectors before the patches, none (SigLIP),
    the class token, or the class token and the distillation token (DeiT). mask_token: a learned vector in place of a
    patch whose token type is 1 (masked image modeling). norm: of the sum (CLIP). projection: of pixels to vectors.
    """

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    channels: int = 3
    first_tokens: int = 1
    bias: bool = True
    mask_token: bool = False
    norm: NormSpec = NoNorm()
    dropout: float = 0.0
    projection: PatchProjectionSpec = LinearProjection()

    def __post_init__(self) -> None:
        check_positive(self, "channels", _("3 is color, 1 is gray"))
        check_dropout(self)
        fits = all(1 <= patch <= side for patch, side in zip(self.patch_size, self.image_size, strict=True))
        must(
            fits,
            self,
            _("patch_size must be from 1 to image_size {image_size}", image_size=self.image_size),
            self.patch_size,
            _("(16, 16) is usual"),
        )
        must(
            self.first_tokens <= MAX_FIRST_TOKENS,
            self,
            _("first_tokens must be at most {maximum}", maximum=MAX_FIRST_TOKENS),
            self.first_tokens,
            _("1 is the class token"),
        )
        must(
            self.projection.sees_one_patch or not self.mask_token,
            self,
            _("a mask token needs a projection that sees each patch alone"),
            self.projection,
            _("leave out the mask token, or take LinearProjection()"),
        )

    @property
    def position(self) -> Grid:
        """The position encoding: one row of a table for each first token and each patch."""
        return Grid(*self.grid(*self.image_size), self.first_tokens)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """The rows and columns of patches of an image. Pixels beyond the last whole patch are not read."""
        return height // self.patch_size[0], width // self.patch_size[1]

    def build(self, d_model: int) -> InputEmbedding:
        return PatchesLayer(self, d_model)


class PatchesLayer(InputEmbedding):
    """The projection, the first tokens and the positions of Patches."""

    def __init__(self, spec: Patches, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.projection = spec.projection.build(spec, d_model)
        self.class_token = _token(d_model, spec.first_tokens >= 1)
        self.distillation_token = _token(d_model, spec.first_tokens >= 2)
        self.mask_token = _token(d_model, spec.mask_token)
        self.position = spec.position.build(d_model)
        self.norm = spec.norm.build(d_model)
        self.dropout = Dropout(spec.dropout)

    @torch.no_grad()
    def resize(self, image_size: tuple[int, int]) -> None:
        """Images of another size from now on: the table of positions is interpolated once, in place."""
        spec = replace(self.spec, image_size=image_size)
        table = self.position.resized(*spec.grid(*image_size)).clone()
        self.spec = spec
        self.position = spec.position.build(table.shape[1])
        self.position.table = nn.Embedding.from_pretrained(table, freeze=False)

    def random_input(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Random images [rows, C, H, W] of the size of the model, whatever the length."""
        return torch.randn(rows, self.spec.channels, *self.spec.image_size, generator=generator)

    def read(self, x: Tensor, name: str) -> ModelInputs:
        """Images [B, C, H, W] as ModelInputs: float, with the model's channels, of its size or of whole patches."""
        spec = self.spec
        is_image = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 4 and x.shape[1] == spec.channels
        if not is_image:
            raise BadInput(
                _(
                    "model: {name} must be float images [batch, {channels}, height, width], got {got}; prepare them "
                    "with the model's image processor",
                    name=name,
                    channels=spec.channels,
                    got=describe(x),
                )
            )
        height, width = x.shape[2:]
        patch_height, patch_width = spec.patch_size
        is_whole = height > 0 and width > 0 and height % patch_height == width % patch_width == 0
        if not is_whole and (height, width) != spec.image_size:  # 384 pixels in patches of 14 are published (SigLIP)
            raise BadInput(
                _(
                    "model: the height and width of images must be multiples of the patch size {patch}, got {got}; "
                    "resize them to {size}",
                    patch=f"{patch_height} x {patch_width}",
                    got=f"{height} x {width}",
                    size="{} x {}".format(*spec.image_size),
                )
            )
        rows, columns = spec.grid(height, width)
        return signal_inputs(x, spec.first_tokens + rows * columns)

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """signal [B, C, H, W] -> [B, first + N, D]"""
        assert inputs.signal is not None  # read() sets it
        grid = self.spec.grid(*inputs.signal.shape[2:])
        x = self.projection(inputs.signal)  # [B, N, D]
        if inputs.token_types is not None:
            x = self._masked(x, inputs.token_types[:, self.spec.first_tokens :])
        first = [
            token.expand(len(x), 1, -1) for token in (self.class_token, self.distillation_token) if token is not None
        ]
        x = torch.cat((*first, x), 1) + self.position.resized(*grid)
        return self.dropout(self.norm(x))

    def _masked(self, x: Tensor, token_types: Tensor) -> Tensor:
        """The mask token in place of the patches whose token type is 1."""
        if self.mask_token is None:
            raise BadInput(_("embed: this model has no mask token, got token types; leave token_types out"))
        return torch.where(token_types[..., None] == 1, self.mask_token, x)


def _token(d_model: int, exists: bool) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(d_model)) if exists else None
