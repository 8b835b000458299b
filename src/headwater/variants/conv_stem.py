"""Convolutional stem: the patch embedding of an image model as a few small convolutions in place of one linear layer.

pixels [B, C, H, W] ── (3 x 3 convolution, norm, ReLU) · n ── linear ── [B, rows · columns, D]

Small models that are trained from scratch learn faster with it, and bear higher learning rates.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.base import NormSpec
from headwater.core.init import Xavier
from headwater.core.norms import LayerNorm
from headwater.i18n import _
from headwater.parts import must, part
from headwater.variants.patches import Patches, PatchProjectionSpec

MIN_CHANNELS = 8
CONV_INIT = (("*.convs.*", Xavier()),)  # rules before those of a model


@part
class ConvStem(PatchProjectionSpec):
    """Convolutional stem ("Early Convolutions Help Transformers See Better", Xiao et al. 2021).

    channels: the output channels of each convolution. The last log2(patch size) of them have stride 2, those before
    stride 1. norm: of the channels of each pixel, so that no image depends on the others of its batch.
    """

    sees_one_patch: ClassVar[bool] = False

    channels: tuple[int, ...]
    norm: NormSpec = LayerNorm(1e-6)

    def __post_init__(self) -> None:
        must(
            bool(self.channels) and min(self.channels) >= 1,
            self,
            _("channels must be positive, at least one"),
            self.channels,
            _("(32, 64, 128) is usual for patches of 4"),
        )

    def build(self, patches: Patches, d_model: int) -> nn.Module:
        return ConvStemLayer(self, patches, d_model)

    def strides(self, patches: Patches) -> list[int]:
        """The stride of each convolution; their product is the patch size."""
        height, width = patches.patch_size
        halvings = height.bit_length() - 1
        must(
            height == width == 2**halvings and halvings <= len(self.channels),
            self,
            _(
                "patch_size must be one power of 2 in both directions, at most 2 to the number of convolutions {count}",
                count=len(self.channels),
            ),
            patches.patch_size,
            _("(4, 4) is usual for small images"),
        )
        return [1] * (len(self.channels) - halvings) + [2] * halvings


class ConvStemLayer(nn.Module):
    """The convolutions of ConvStem, with the channels last in memory, and the linear layer behind them."""

    def __init__(self, spec: ConvStem, patches: Patches, d_model: int) -> None:
        super().__init__()
        inputs = (patches.channels, *spec.channels[:-1])
        sizes = zip(inputs, spec.channels, spec.strides(patches), strict=True)
        self.convs = nn.ModuleList(
            nn.Conv2d(size_in, size_out, 3, stride, padding=1, bias=False) for size_in, size_out, stride in sizes
        )
        self.norms = nn.ModuleList(spec.norm.build(channels) for channels in spec.channels)
        self.out = nn.Linear(spec.channels[-1], d_model, bias=patches.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, rows · columns, D]"""
        x = pixels.permute(0, 2, 3, 1).contiguous()  # [B, H, W, C]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            x = F.relu(norm(x))
        return self.out(x.flatten(1, 2))


def conv_stem_for(patch_size: int, d_model: int) -> ConvStem:
    """One convolution at the full size, then one for each halving; channels double up to d_model."""
    convolutions = patch_size.bit_length()
    return ConvStem(tuple(max(MIN_CHANNELS, d_model >> halvings) for halvings in reversed(range(convolutions))))
