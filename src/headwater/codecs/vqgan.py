"""VQGAN, the picture codec of DALL-E mini: residual blocks, attention at the coarsest grid (Esser et al. 2021).

encoder   conv ── levels (residual blocks, attention, halve) ── middle ── norm, swish, conv ── 1x1 ── codebook
decoder   codebook ── 1x1 ── conv ── middle ── levels (residual blocks, attention, double) ── norm, swish, conv
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from headwater.codecs.base import CodecSpec, PictureCodec
from headwater.codecs.codebook import nearest_rows
from headwater.codecs.registry import register_codec
from headwater.core.base import check_positive
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map


@part
class VQGAN(CodecSpec):
    """VQGAN: pictures of size² pixels, halved between levels, to ids of a codebook of num_codes vectors.

    multipliers: the channels of each level, in units of `channels`. attention: the grid sizes that have attention.
    width: of the codebook's vectors. black: the value of a black pixel inside the model, 0 (DALL-E mini) or -1; white
    is 1. encoder: False for a file that holds the decoder alone.
    """

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks: int = 2
    attention: tuple[int, ...] = (16,)
    size: int = 256
    z_channels: int = 256
    width: int = 256
    num_codes: int = 16384
    groups: int = 32
    eps: float = 1e-6
    black: float = 0.0
    encoder: bool = True

    def __post_init__(self) -> None:
        for name in ("channels", "blocks", "z_channels", "width", "num_codes", "groups"):
            check_positive(self, name, _("see the file's config.json"))
        must(self.blocks <= 64, self, _("blocks must be at most {limit}", limit=64), self.blocks, _("2 is usual"))
        must(
            1 <= len(self.multipliers) <= 12, self, _("there must be 1 to 12 levels"), self.multipliers, _("5 is usual")
        )
        fits = self.size > 0 and self.size % self.factor == 0
        must(fits, self, _("size must be a multiple of {factor}", factor=self.factor), self.size, _("256 is usual"))
        divides = all(m >= 1 and self.channels * m % self.groups == 0 for m in self.multipliers)
        must(divides, self, _("groups must divide the channels of every level"), self.groups, _("32 is usual"))

    @property
    def factor(self) -> int:
        """Pixels of a side that one token stands for."""
        return int(2 ** (len(self.multipliers) - 1))

    def build_module(self) -> VQGANCodec:
        return VQGANCodec(self)


class VQGANCodec(PictureCodec):
    """The encoder, the codebook and the decoder of VQGAN."""

    def __init__(self, spec: VQGAN) -> None:
        super().__init__(spec, spec.num_codes, 3, spec.factor, spec.size)
        self.black = spec.black
        self.encoder = VQGANEncoder(spec) if spec.encoder else None
        self.to_codes = nn.Conv2d(spec.z_channels, spec.width, 1) if spec.encoder else None
        self.codebook = nn.Embedding(spec.num_codes, spec.width)
        self.from_codes = nn.Conv2d(spec.width, spec.z_channels, 1)
        self.decoder = VQGANDecoder(spec)

    def encode(self, signal: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] to ids [B, rows · columns]."""
        self.check_pictures(signal)
        if self.encoder is None or self.to_codes is None:
            raise BadInput(_("codec: this file holds the decoder alone, it cannot encode; load one with an encoder"))
        latents = self.to_codes(self.encoder(signal * (1 - self.black) + self.black))  # [B, D, rows, columns]
        return nearest_rows(latents.permute(0, 2, 3, 1), self.codebook.weight).flatten(1)

    def decode(self, ids: Tensor) -> Tensor:
        """Ids [B, rows · columns] to pictures [B, 3, H, W]."""
        latents = self.codebook(self.grid_ids(ids)).permute(0, 3, 1, 2)  # [B, D, rows, columns]
        pixels = self.decoder(self.from_codes(latents))
        return ((pixels - self.black) / (1 - self.black)).clamp(0, 1)


class VQGANEncoder(nn.Module):
    """Pictures to a grid of latents."""

    def __init__(self, spec: VQGAN) -> None:
        super().__init__()
        widths = [spec.channels * m for m in spec.multipliers]
        self.first = nn.Conv2d(3, spec.channels, 3, padding=1)
        self.levels = nn.ModuleList()
        incoming = spec.channels
        for i, width in enumerate(widths):
            is_last = i == len(widths) - 1
            has_attention = spec.size // 2**i in spec.attention
            resample = nn.Identity() if is_last else Halve(width)
            self.levels.append(Level(incoming, width, spec.blocks, has_attention, resample, spec))
            incoming = width
        self.middle = middle_layers(incoming, spec)
        self.norm = group_norm(incoming, spec)
        self.last = nn.Conv2d(incoming, spec.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for level in self.levels:
            x = level(x)
        return self.last(F.silu(self.norm(self.middle(x))))


class VQGANDecoder(nn.Module):
    """A grid of latents to pictures. levels: the finest first, run from the last."""

    def __init__(self, spec: VQGAN) -> None:
        super().__init__()
        widths = [spec.channels * m for m in spec.multipliers]
        self.first = nn.Conv2d(spec.z_channels, widths[-1], 3, padding=1)
        self.middle = middle_layers(widths[-1], spec)
        levels = []
        for i, width in enumerate(widths):
            incoming = widths[min(i + 1, len(widths) - 1)]
            has_attention = spec.size // 2**i in spec.attention
            resample = nn.Identity() if i == 0 else Double(width)
            levels.append(Level(incoming, width, spec.blocks + 1, has_attention, resample, spec))
        self.levels = nn.ModuleList(levels)
        self.norm = group_norm(widths[0], spec)
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x))
        for level in reversed(list(self.levels)):
            x = level(x)
        return self.last(F.silu(self.norm(x)))


class Level(nn.Module):
    """Residual blocks at one resolution, each followed by attention where the level has it, and a change of size."""

    def __init__(
        self, incoming: int, width: int, blocks: int, has_attention: bool, resample: nn.Module, spec: VQGAN
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(incoming if j == 0 else width, width, spec) for j in range(blocks))
        attentions = (GridAttention(width, spec) if has_attention else nn.Identity() for _ in range(blocks))
        self.attentions = nn.ModuleList(attentions)
        self.resample = resample

    def forward(self, x: Tensor) -> Tensor:
        for block, attention in zip(self.blocks, self.attentions, strict=True):
            x = attention(block(x))
        return self.resample(x)


class ResidualBlock(nn.Module):
    """x + conv(swish(norm(conv(swish(norm(x)))))), with a 1x1 convolution around it where the width changes."""

    def __init__(self, incoming: int, width: int, spec: VQGAN) -> None:
        super().__init__()
        self.norm1 = group_norm(incoming, spec)
        self.conv1 = nn.Conv2d(incoming, width, 3, padding=1)
        self.norm2 = group_norm(width, spec)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Identity() if incoming == width else nn.Conv2d(incoming, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class GridAttention(nn.Module):
    """x + out(attention(q, k, v)) of one head over all places of the grid."""

    def __init__(self, width: int, spec: VQGAN) -> None:
        super().__init__()
        self.norm = group_norm(width, spec)
        self.q = nn.Conv2d(width, width, 1)
        self.k = nn.Conv2d(width, width, 1)
        self.v = nn.Conv2d(width, width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))  # [B, H·W, D]
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(mixed.unflatten(2, x.shape[2:]))


class Halve(nn.Module):
    """Half the size: a convolution of stride 2, padded on the right and below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Double(nn.Module):
    """Twice the size: each pixel four times, then a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0))


def middle_layers(width: int, spec: VQGAN) -> nn.Sequential:
    """Residual block, attention, residual block at the coarsest grid."""
    return nn.Sequential(
        ResidualBlock(width, width, spec), GridAttention(width, spec), ResidualBlock(width, width, spec)
    )


def group_norm(width: int, spec: VQGAN) -> nn.GroupNorm:
    return nn.GroupNorm(spec.groups, width, spec.eps)


# -------------------------------------------------------------------------------------------------- published files


def _side_names(side: str, levels: str, resample: str) -> str:
    """The rules of the encoder or the decoder."""
    rules = f"{side}.conv_in  {side}.first\n{side}.norm_out  {side}.norm\n{side}.conv_out  {side}.last\n"
    rules += f"{side}.{levels}.{{i}}.{resample}.conv  {side}.levels.{{i}}.resample.conv\n"
    places = [(f"{levels}.{{i}}.block.{{j}}", "levels.{i}.blocks.{j}"), ("mid.block_1", "middle.0")]
    for old, new in [*places, ("mid.block_2", "middle.2")]:
        rules += f"{side}.{old}.nin_shortcut  {side}.{new}.shortcut\n"
        for name in ("norm1", "conv1", "norm2", "conv2"):
            rules += f"{side}.{old}.{name}  {side}.{new}.{name}\n"
    for old, new in [(f"{levels}.{{i}}.attn.{{j}}", "levels.{i}.attentions.{j}"), ("mid.attn_1", "middle.1")]:
        rules += f"{side}.{old}.proj_out  {side}.{new}.out\n"
        for name in ("norm", "q", "k", "v"):
            rules += f"{side}.{old}.{name}  {side}.{new}.{name}\n"
    return rules


NAMES = name_map(
    _side_names("encoder", "down", "downsample")
    + _side_names("decoder", "up", "upsample")
    + """
    [quantize.]embedding    codebook
    quant_conv              to_codes
    post_quant_conv         from_codes
    """
)


def config_of_vqgan(spec: VQGAN) -> dict[str, object]:
    """The inverse of read_vqgan."""
    return {
        "model_type": "vqgan",
        "ch": spec.channels,
        "ch_mult": list(spec.multipliers),
        "num_res_blocks": spec.blocks,
        "attn_resolutions": list(spec.attention),
        "resolution": spec.size,
        "z_channels": spec.z_channels,
        "embed_dim": spec.width,
        "n_embed": spec.num_codes,
        "num_groups": spec.groups,
        "norm_eps": spec.eps,
        "pixel_range": "signed" if spec.black else "unit",
        "encoder": spec.encoder,
    }


@register_codec("vqgan", NAMES, config_of_vqgan)
def read_vqgan(config: HFConfig) -> VQGAN:
    """The config.json of VQGAN as DALL-E mini publishes it."""
    for key, value in (("in_channels", 3), ("out_ch", 3)):
        config.get_int(key, minimum=value, maximum=value, default=value)
    for key in ("double_z", "give_pre_end"):
        must(not config.get_bool(key, default=False), "vqgan", _("{key} must be false", key=key), True, _("remove it"))
    must(
        config.get_bool("resamp_with_conv", default=True),
        "vqgan",
        _("resamp_with_conv must be true"),
        False,
        _("it is another model"),
    )
    config.ignore("dropout", "is_encoder_decoder")
    signed = config.get_str("pixel_range", choices=("unit", "signed"), default="unit") == "signed"
    return VQGAN(
        config.get_int("ch", default=128),
        tuple(config.get_list("ch_mult", int, [1, 1, 2, 2, 4])),
        config.get_int("num_res_blocks", maximum=64, default=2),
        tuple(config.get_list("attn_resolutions", int, [16])),
        config.get_int("resolution", maximum=1 << 14, default=256),
        config.get_int("z_channels", default=256),
        config.get_int("embed_dim", default=256),
        config.get_int("n_embed", default=16384),
        config.get_int("num_groups", default=32),
        config.get_float("norm_eps", minimum=1e-12, default=1e-6),
        black=-1.0 if signed else 0.0,
        encoder=config.get_bool("encoder", default=True),
    )
