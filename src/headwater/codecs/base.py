"""Codecs: small models that turn a picture or a sound into token ids and back. Base classes of their specs and modules.

    codec = DVAE().build(seed=0)
    ids = codec.encode(pictures)      # [B, 3, H, W] in 0 … 1 -> [B, rows · columns]
    pictures = codec.decode(ids)

What a tokenizer is to text, a codec is to signals: a Transformer over its ids models pictures or sounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from headwater.core.embeddings import describe
from headwater.errors import BadInput
from headwater.i18n import _


class CodecSpec(ABC):
    """The spec of a codec: a part that builds it."""

    @abstractmethod
    def build_module(self) -> Codec:
        """The modules with the initial weights of torch."""

    def build(self, seed: int | None = None, device: torch.device | str = "cpu") -> Codec:
        """Build the codec; the same seed gives the same weights."""
        if str(device) == "meta":
            return self.on_meta()
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            return self.build_module().to(device)

    def on_meta(self) -> Codec:
        """The codec on the meta device: shapes without memory."""
        with torch.device("meta"):
            return self.build_module()


class Codec(nn.Module):
    """Base class of codecs. num_codes: the ids of one codebook are below it."""

    def __init__(self, spec: CodecSpec, num_codes: int) -> None:
        super().__init__()
        self.spec = spec
        self.num_codes = num_codes

    def encode(self, signal: Tensor) -> Tensor:
        """Token ids of signals."""
        raise NotImplementedError

    def decode(self, ids: Tensor) -> Tensor:
        """Signals from token ids."""
        raise NotImplementedError

    def check_ids(self, ids: Tensor) -> None:
        """Refuse ids that are not of this codebook."""
        if ids.dtype not in (torch.int64, torch.int32) or not bool(((ids >= 0) & (ids < self.num_codes)).all()):
            raise BadInput(
                _(
                    "codec: ids must be integers from 0 to {max}, got {got}; were they made by another codec?",
                    max=self.num_codes - 1,
                    got=_range_of(ids),
                )
            )


class PictureCodec(Codec):
    """A codec of pictures [B, C, H, W] with values from 0 to 1; ids [B, rows · columns], row by row.

    factor: pixels of a side that one token stands for. size: pixels of a side of the pictures it was made for.
    """

    def __init__(self, spec: CodecSpec, num_codes: int, channels: int, factor: int, size: int) -> None:
        super().__init__(spec, num_codes)
        self.channels = channels
        self.factor = factor
        self.size = size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the tokens of a picture."""
        return self.size // self.factor, self.size // self.factor

    def check_pictures(self, pictures: Tensor) -> None:
        """Refuse what is no batch of pictures whose sides the factor divides."""
        is_batch = pictures.is_floating_point() and pictures.dim() == 4 and pictures.shape[1] == self.channels
        if not is_batch or any(side % self.factor or not side for side in pictures.shape[2:]):
            raise BadInput(
                _(
                    "codec: pictures must be floats [batch, {channels}, height, width] with sides divisible by "
                    "{factor}, got {got}; resize them",
                    channels=self.channels,
                    factor=self.factor,
                    got=describe(pictures),
                )
            )

    def grid_ids(self, ids: Tensor) -> Tensor:
        """Ids [B, N] of square pictures, or [B, rows, columns], as [B, rows, columns]."""
        self.check_ids(ids)
        if ids.dim() == 3:
            return ids
        side = round(ids.shape[-1] ** 0.5)
        if ids.dim() != 2 or side * side != ids.shape[1]:
            raise BadInput(
                _(
                    "codec: the ids of square pictures must be [batch, side · side], got {got}; "
                    "give [batch, rows, columns] for others",
                    got=describe(ids),
                )
            )
        return ids.unflatten(1, (side, side))


def _range_of(ids: Tensor) -> str:
    """The dtype of ids and the values they span."""
    if not ids.numel():
        return describe(ids)
    return f"{describe(ids)} {float(ids.min()):g} … {float(ids.max()):g}"
