"""The discrete VAE of DALL-E, OpenAI's picture codec: 8192 codes, one for each 8 x 8 pixels (Ramesh et al. 2021).

encoder   conv 7x7 ── 4 groups of bottleneck blocks, max-pooled between ── relu, 1x1: logits over the codes
decoder   one-hot, 1x1 ── 4 groups, each pixel four times between ── relu, 1x1: 3 means and 3 scales of pixels
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from headwater.codecs.base import CodecSpec, PictureCodec
from headwater.codecs.registry import register_codec
from headwater.core.base import check_positive
from headwater.i18n import _
from headwater.parts import must, part
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

GROUPS = (1, 2, 4, 8)  # channels of the groups, in units of `channels`; the encoder's order
MAX_BLOCKS = 4  # of a group
PIXEL_MARGIN = 0.1  # pixels are mapped to 0.1 … 0.9, where the logit-Laplace distribution is well-behaved


@part
class DVAE(CodecSpec):
    """OpenAI's dVAE. channels: of the first group; start: of the decoder's input; blocks: of each group."""

    channels: int = 256
    start: int = 128
    blocks: int = 2
    num_codes: int = 8192
    size: int = 256

    def __post_init__(self) -> None:
        for name in ("channels", "start", "blocks", "num_codes"):
            check_positive(self, name, _("see the file's config.json"))
        limit = MAX_BLOCKS
        must(self.blocks <= limit, self, _("blocks must be at most {limit}", limit=limit), self.blocks, _("2 is usual"))
        must(self.channels % 4 == 0, self, _("channels must be a multiple of 4"), self.channels, _("256 is usual"))
        fits = self.size > 0 and self.size % 8 == 0
        must(fits, self, _("size must be a multiple of 8"), self.size, _("256 is usual"))

    def build_module(self) -> DVAECodec:
        return DVAECodec(self)


class DVAECodec(PictureCodec):
    """The encoder and the decoder of the dVAE."""

    def __init__(self, spec: DVAE) -> None:
        super().__init__(spec, spec.num_codes, 3, 8, spec.size)
        widths = [spec.channels * m for m in GROUPS]
        gain = 1 / (len(GROUPS) * spec.blocks) ** 2
        self.encoder = DVAEHalf(3, 7, widths, spec.num_codes, spec.blocks, gain, nn.MaxPool2d(2), (3, 3, 3, 1))
        double = nn.Upsample(scale_factor=2)
        self.decoder = DVAEHalf(
            spec.num_codes, 1, widths[::-1], 6, spec.blocks, gain, double, (1, 3, 3, 3), start=spec.start
        )

    def encode(self, signal: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] to ids [B, rows · columns]."""
        self.check_pictures(signal)
        return self.encoder((1 - 2 * PIXEL_MARGIN) * signal + PIXEL_MARGIN).argmax(1).flatten(1)

    def decode(self, ids: Tensor) -> Tensor:
        """Ids [B, rows · columns] to pictures [B, 3, H, W]: the means of the pixels."""
        first = self.decoder.first
        assert first.bias is not None
        x = F.embedding(self.grid_ids(ids), first.weight[:, :, 0, 0].T) + first.bias  # the 1x1 convolution of one-hots
        means = self.decoder.after_first(x.permute(0, 3, 1, 2))[:, :3]
        return ((means.sigmoid() - PIXEL_MARGIN) / (1 - 2 * PIXEL_MARGIN)).clamp(0, 1)


class DVAEHalf(nn.Module):
    """A convolution, groups of blocks with a change of size between them, relu and a 1x1 convolution."""

    def __init__(
        self,
        incoming: int,
        kernel: int,
        widths: list[int],
        outgoing: int,
        blocks: int,
        gain: float,
        resample: nn.Module,
        kernels: tuple[int, ...],
        start: int = 0,
    ) -> None:
        super().__init__()
        start = start or widths[0]
        self.first = same_conv(incoming, start, kernel)
        self.groups = nn.ModuleList()
        for width in widths:
            group = [Bottleneck(start if j == 0 else width, width, gain, kernels) for j in range(blocks)]
            self.groups.append(nn.Sequential(*group))
            start = width
        self.resample = resample
        self.last = same_conv(start, outgoing, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_first(self.first(x))

    def after_first(self, x: Tensor) -> Tensor:
        """All but the first convolution."""
        for i, group in enumerate(self.groups):
            x = group(x if i == 0 else self.resample(x))
        return self.last(x.relu())


class Bottleneck(nn.Module):
    """shortcut(x) + gain · four convolutions through a quarter of the channels, a relu before each."""

    def __init__(self, incoming: int, width: int, gain: float, kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.gain = gain
        hidden = width // 4
        sizes = [incoming, hidden, hidden, hidden, width]
        convs = (same_conv(a, b, kernel) for a, b, kernel in zip(sizes, sizes[1:], kernels, strict=False))
        self.convs = nn.ModuleList(convs)
        self.shortcut = nn.Identity() if incoming == width else same_conv(incoming, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for conv in self.convs:
            hidden = conv(hidden.relu())
        return self.shortcut(x) + self.gain * hidden


def same_conv(incoming: int, outgoing: int, kernel: int) -> nn.Conv2d:
    """A convolution that keeps the size; normal weights of std 1/√(inputs of a value), no bias at first."""
    conv = nn.Conv2d(incoming, outgoing, kernel, padding=(kernel - 1) // 2)
    if not conv.weight.is_meta:
        assert conv.bias is not None
        nn.init.normal_(conv.weight, std=(incoming * kernel * kernel) ** -0.5)
        nn.init.zeros_(conv.bias)
    return conv


# -------------------------------------------------------------------------------------------------- published files


def _names() -> str:
    """The rules of both halves; the published convolutions call their tensors w and b."""
    rules = []
    for side in ("encoder", "decoder"):
        places = [("input", "first"), ("output.conv", "last")]
        for group in range(len(GROUPS)):
            for block in range(MAX_BLOCKS):
                old = f"group_{group + 1}.block_{block + 1}"
                new = f"groups.{group}.{block}"
                places += [(f"{old}.id_path", f"{new}.shortcut")]
                places += [(f"{old}.res_path.conv_{n + 1}", f"{new}.convs.{n}") for n in range(4)]
        for old, new in places:
            rules += [f"{side}.blocks.{old}.{a}  {side}.{new}.{b}" for a, b in (("w", "weight"), ("b", "bias"))]
    return "\n".join(rules)


NAMES = name_map(_names())


def config_of_dvae(spec: DVAE) -> dict[str, object]:
    """The inverse of read_dvae."""
    return {
        "model_type": "dall_e_dvae",
        "n_hid": spec.channels,
        "n_init": spec.start,
        "n_blk_per_group": spec.blocks,
        "vocab_size": spec.num_codes,
        "image_size": spec.size,
    }


@register_codec("dall_e_dvae", NAMES, config_of_dvae)
def read_dvae(config: HFConfig) -> DVAE:
    """A config.json with the arguments of the published classes."""
    return DVAE(
        config.get_int("n_hid", default=256),
        config.get_int("n_init", default=128),
        config.get_int("n_blk_per_group", maximum=MAX_BLOCKS, default=2),
        config.get_int("vocab_size", default=8192),
        config.get_int("image_size", maximum=1 << 14, default=256),
    )
