"""Image models in the checker: token ids stand for patches of random pixels, so that every law applies to them.

ids [B, first + N] ── the patch of each id, row by row ── images [B, C, H, W] ── model
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.variants.patches import PatchesLayer

NUM_PATCHES = 64  # different ones


class PatchCall:
    """Calls an image model with ids in place of images. The ids of its first tokens change nothing.

    token_types [B, first + N]: 1 for a masked patch; by default the last is, so that the mask token has a gradient.
    embedding_only: the vectors of the patches [B, first + N, D] in place of the output.
    """

    accepts = frozenset({"token_types", "embedding_only"})

    def __init__(self, model: Transformer, embed: PatchesLayer, seed: int = 0) -> None:
        self.model = model
        self.embed = embed
        self.first_tokens = embed.spec.first_tokens
        self.rows, self.columns = embed.spec.grid(*embed.spec.image_size)
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_PATCHES, embed.spec.channels, *embed.spec.patch_size)
        self.patches = torch.randn(shape, generator=generator)

    @property
    def length(self) -> int:
        """The positions of an image of the model's size."""
        return self.first_tokens + self.rows * self.columns

    @property
    def is_maskable(self) -> bool:
        return self.embed.mask_token is not None

    def images(self, ids: Tensor) -> Tensor:
        """ids [B, first + N] -> [B, C, H, W]. More ids than the model has patches make a higher image."""
        weight = next(self.model.parameters())
        grid = ids[:, self.first_tokens :].unflatten(1, (-1, self.columns))
        patches = self.patches.to(weight)[grid]  # [B, rows, columns, C, h, w]
        return patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    def __call__(self, ids: Tensor, token_types: Tensor | None = None, embedding_only: Tensor | None = None) -> Any:
        images = self.images(ids)
        if token_types is None and self.is_maskable:
            token_types = torch.zeros_like(ids)
            token_types[:, -1] = 1
        if embedding_only is None:
            output = self.model(images, token_types=token_types)
            return output if output.dim() < 4 else output.flatten(1)  # pixels: one output for each row
        inputs = self.embed.read(images, "images")
        return self.embed(replace(inputs, token_types=token_types), torch.empty(0))
