"""EnCodec, a sound codec: convolutions over the waveform and residual codebooks (Défossez et al. 2022).

    encoder   conv ── for each ratio: residual blocks, ELU, strided conv ── LSTM ── ELU, conv ── K codebooks
    decoder   sum of the books' rows ── conv ── LSTM ── for each ratio: ELU, transposed conv, residual blocks ── conv

A frame stands for the product of the ratios in samples (320 at 24 kHz); its ids are one for each codebook, the first
the coarsest. A sound [B, C, T] becomes ids [B, frames, K].

The 48 kHz model reads chunks of a second, each divided by its level; neighbours overlap by 1 % and are cross-faded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.codecs.base import Codec, CodecSpec
from headwater.codecs.codebook import ResidualCodebooks
from headwater.core.base import check_positive
from headwater.core.embeddings import describe
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part

MAX_LSTM_LAYERS = 4
QUIETEST_LEVEL = 1e-8  # added to the level of a chunk, so that silence can be divided by it


@part
class EnCodec(CodecSpec):
    """EnCodec. ratios: of the decoder, the first the coarsest. causal: no frame depends on later samples.

    group_norm: a norm after each convolution in place of weight normalization. shortcut: a convolution around each
    residual block. compress: the inner channels of a residual block are that many times fewer.
    chunk_seconds: the length of the chunks that are encoded one by one (0: the whole sound is one); overlap: the part
    of each that the next one has too. normalize: each chunk is divided by its level.
    """

    sampling_rate: int = 24000
    channels: int = 1
    filters: int = 32
    width: int = 128
    ratios: tuple[int, ...] = (8, 5, 4, 2)
    blocks: int = 1
    kernel: int = 7
    last_kernel: int = 7
    residual_kernel: int = 3
    dilation_growth: int = 2
    compress: int = 2
    lstm_layers: int = 2
    num_books: int = 32
    num_codes: int = 1024
    causal: bool = True
    group_norm: bool = False
    shortcut: bool = True
    padding: str = "reflect"
    chunk_seconds: float = 0.0
    overlap: float = 0.0
    normalize: bool = False

    def __post_init__(self) -> None:
        sizes = ("sampling_rate", "channels", "filters", "width", "blocks", "compress", "lstm_layers", "num_books")
        for name in (*sizes, "num_codes", "kernel", "last_kernel", "residual_kernel", "dilation_growth"):
            check_positive(self, name, _("see the file's config.json"))
        bounded = self.blocks <= 64 and self.num_books <= 256 and self.lstm_layers <= MAX_LSTM_LAYERS
        must(bounded, self, _("blocks, lstm_layers and num_books must be usual"), self.blocks, _("1, 2 and 32 are"))
        in_range = 1 <= len(self.ratios) <= 10 and all(1 <= ratio <= 1024 for ratio in self.ratios)
        must(in_range, self, _("ratios must be 1 to 10 numbers up to 1024"), self.ratios, _("(8, 5, 4, 2) is usual"))
        known = self.padding in ("reflect", "constant", "replicate")
        must(known, self, _("padding must be reflect, constant or replicate"), self.padding, _("reflect is usual"))
        has_samples = 0 <= self.chunk_seconds <= 3600 and bool(self.chunk_length) == bool(self.chunk_seconds)
        must(has_samples, self, _("chunk_seconds must be from 0 to 3600"), self.chunk_seconds, _("1 is usual"))
        must(0 <= self.overlap < 1, self, _("overlap must be from 0 and below 1"), self.overlap, _("0.01 is usual"))

    @property
    def chunk_length(self) -> int:
        """Samples of a chunk; 0: the whole sound is one."""
        return int(self.chunk_seconds * self.sampling_rate)

    @property
    def chunk_stride(self) -> int:
        """Samples from the beginning of a chunk to that of the next."""
        return max(1, int((1 - self.overlap) * self.chunk_length))

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        return math.prod(self.ratios)

    def build_module(self) -> EnCodecModel:
        return EnCodecModel(self)


class SoundChunk(NamedTuple):
    """A chunk of sounds: its ids [B, frames, K], and its level [B, 1, 1], by which what is decoded is multiplied."""

    ids: Tensor
    level: Tensor


class EnCodecModel(Codec):
    """The encoder, the codebooks and the decoder of EnCodec."""

    def __init__(self, spec: EnCodec) -> None:
        super().__init__(spec, spec.num_codes)
        self.spec: EnCodec = spec
        self.channels = spec.channels
        self.hop = spec.hop
        self.num_books = spec.num_books
        self.frame_rate = spec.sampling_rate / spec.hop
        self.encoder = SoundEncoder(spec)
        self.quantizer = ResidualCodebooks(spec.num_books, spec.num_codes, spec.width)
        self.decoder = SoundDecoder(spec)

    def books_for(self, kilobits: float) -> int:
        """How many codebooks a bit rate, in kilobits a second, has room for."""
        bits = math.log2(self.num_codes) * self.frame_rate
        return min(self.num_books, max(1, int(kilobits * 1000 / bits)))

    @property
    def in_chunks(self) -> bool:
        """Whether a sound is more than its ids: chunks, or a level."""
        return self.spec.normalize or self.spec.chunk_length > 0

    def encode(self, signal: Tensor, num_books: int | None = None) -> Tensor:
        """Sounds [B, C, T] to ids [B, frames, K] of the first num_books codebooks."""
        if self.in_chunks:
            raise BadInput(
                _("codec: it encodes normalized chunks (48 kHz), of which ids are a part; use encode_chunks")
            )
        self._check_sounds(signal)
        return self._ids(signal, num_books)

    def encode_chunks(self, signal: Tensor, num_books: int | None = None) -> list[SoundChunk]:
        """Sounds [B, C, T] to their chunks; the last may be shorter."""
        self._check_sounds(signal)
        length = self.spec.chunk_length or signal.shape[-1]
        stride = self.spec.chunk_stride if self.spec.chunk_length else length
        chunks = []
        for first in range(0, signal.shape[-1], stride):
            chunk = signal[..., first : first + length]
            level = chunk.new_ones(len(chunk), 1, 1)
            if self.spec.normalize:
                mono = chunk.mean(1, keepdim=True)
                level = mono.square().mean(-1, keepdim=True).sqrt() + QUIETEST_LEVEL
            chunks.append(SoundChunk(self._ids(chunk / level, num_books), level))
        return chunks

    def decode_chunks(self, chunks: Sequence[SoundChunk]) -> Tensor:
        """Chunks to sounds [B, C, T], where they overlap cross-faded."""
        if not chunks:
            raise BadInput(_("codec: there must be a chunk at least, got none; encode a sound"))
        sounds = [self._sounds(chunk.ids) * chunk.level for chunk in chunks]
        return cross_fade(sounds, self.spec.chunk_stride) if self.spec.chunk_length else sounds[0]

    def _ids(self, signal: Tensor, num_books: int | None) -> Tensor:
        return self.quantizer.encode(self.encoder(signal).transpose(1, 2), num_books)

    def _check_sounds(self, signal: Tensor) -> None:
        """Refuse what is no batch of sounds with the codec's channels."""
        if (
            not signal.is_floating_point()
            or signal.dim() != 3
            or signal.shape[1] != self.channels
            or not signal.numel()
        ):
            raise BadInput(
                _(
                    "codec: sounds must be floats [batch, {channels}, samples], got {got}; correct its shape",
                    channels=self.channels,
                    got=describe(signal),
                )
            )

    def decode(self, ids: Tensor) -> Tensor:
        """Ids [B, frames, K] of the first K codebooks to sounds [B, C, frames · hop]."""
        if self.in_chunks:
            raise BadInput(_("codec: it decodes normalized chunks (48 kHz), not ids alone; use decode_chunks"))
        return self._sounds(ids)

    def _sounds(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        if ids.dim() != 3 or not 1 <= ids.shape[2] <= self.num_books:
            raise BadInput(
                _(
                    "codec: the ids of sounds must be [batch, frames, 1 to {books}], got {got}; correct their shape",
                    books=self.num_books,
                    got=describe(ids),
                )
            )
        return self.decoder(self.quantizer.decode(ids).transpose(1, 2))


def cross_fade(sounds: Sequence[Tensor], stride: int) -> Tensor:
    """The sum of sounds [B, C, N] that begin `stride` samples after each other, weighted by triangles.

    Where there is one alone the weights cancel; where two overlap, one fades out as the other fades in.
    """
    length = sounds[0].shape[-1]
    times = torch.linspace(0, 1, length + 2, dtype=sounds[0].dtype, device=sounds[0].device)[1:-1]
    triangle = 0.5 - (times - 0.5).abs()  # [N]
    total = sounds[0].new_zeros(*sounds[0].shape[:-1], stride * (len(sounds) - 1) + sounds[-1].shape[-1])
    weights = total.new_zeros(total.shape[-1])
    for number, sound in enumerate(sounds):
        weight = triangle[: sound.shape[-1]]
        place = slice(number * stride, number * stride + sound.shape[-1])
        total[..., place] += weight * sound
        weights[place] += weight
    return total / weights


class SoundEncoder(nn.Module):
    """Sounds [B, C, T] to latents [B, D, frames]."""

    def __init__(self, spec: EnCodec) -> None:
        super().__init__()
        width = spec.filters
        layers: list[nn.Module] = [SoundConv(spec, spec.channels, width, spec.kernel)]
        for ratio in reversed(spec.ratios):
            layers += [SoundResidual(spec, width, spec.dilation_growth**j) for j in range(spec.blocks)]
            layers += [nn.ELU(), SoundConv(spec, width, 2 * width, 2 * ratio, stride=ratio)]
            width *= 2
        layers += [
            ResidualLSTM(width, spec.lstm_layers),
            nn.ELU(),
            SoundConv(spec, width, spec.width, spec.last_kernel),
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SoundDecoder(nn.Module):
    """Latents [B, D, frames] to sounds [B, C, frames · hop]."""

    def __init__(self, spec: EnCodec) -> None:
        super().__init__()
        width = spec.filters * 2 ** len(spec.ratios)
        layers: list[nn.Module] = [SoundConv(spec, spec.width, width, spec.kernel)]
        layers += [ResidualLSTM(width, spec.lstm_layers)]
        for ratio in spec.ratios:
            layers += [nn.ELU(), SoundTransposedConv(spec, width, width // 2, ratio)]
            width //= 2
            layers += [SoundResidual(spec, width, spec.dilation_growth**j) for j in range(spec.blocks)]
        self.layers = nn.Sequential(*layers, nn.ELU(), SoundConv(spec, width, spec.channels, spec.last_kernel))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NormedWeight(nn.Module):
    """The weight of a convolution, normalized: weight = scale · direction / |direction|, by row of dimension 0."""

    def __init__(self, shape: tuple[int, int, int], outgoing: int, group_norm: bool) -> None:
        super().__init__()
        self.group_norm = group_norm
        bound = (shape[1] * shape[2]) ** -0.5
        values = torch.empty(shape).uniform_(-bound, bound)
        self.bias = nn.Parameter(torch.zeros(outgoing))
        self.norm: nn.Module = nn.Identity()
        if group_norm:
            self.weight = nn.Parameter(values)
            self.norm = nn.GroupNorm(1, outgoing)
        else:
            self.scale = nn.Parameter(values.flatten(1).norm(dim=1)[:, None, None])
            self.direction = nn.Parameter(values)

    def kernel_weight(self) -> Tensor:
        """The weight of the convolution."""
        if "weight" in self._parameters:
            return self.weight
        return torch._weight_norm(self.direction, self.scale, 0)


class SoundConv(NormedWeight):
    """A convolution padded so that T samples give ⌈T / stride⌉ frames; causal: on the left, as far as possible."""

    def __init__(
        self, spec: EnCodec, incoming: int, outgoing: int, kernel: int, stride: int = 1, dilation: int = 1
    ) -> None:
        super().__init__((outgoing, incoming, kernel), outgoing, spec.group_norm)
        self.stride = stride
        self.dilation = dilation
        self.causal = spec.causal
        self.mode = spec.padding
        self.total = (kernel - 1) * dilation + 1 - stride  # padding on both sides

    def forward(self, x: Tensor) -> Tensor:
        extra = -x.shape[-1] % self.stride  # so that the last frame is full
        right = 0 if self.causal else self.total // 2
        x = pad(x, self.total - right, right + extra, self.mode)
        return self.norm(F.conv1d(x, self.kernel_weight(), self.bias, self.stride, dilation=self.dilation))


class SoundTransposedConv(NormedWeight):
    """A transposed convolution: each frame gives `ratio` samples, what overhangs is cut."""

    def __init__(self, spec: EnCodec, incoming: int, outgoing: int, ratio: int) -> None:
        super().__init__((incoming, outgoing, 2 * ratio), outgoing, spec.group_norm)
        self.ratio = ratio
        self.right = ratio if spec.causal else ratio // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(F.conv_transpose1d(x, self.kernel_weight(), self.bias, self.ratio))
        return y[..., self.ratio - self.right : y.shape[-1] - self.right]


class SoundResidual(nn.Module):
    """shortcut(x) + two convolutions through fewer channels, an ELU before each."""

    def __init__(self, spec: EnCodec, width: int, dilation: int) -> None:
        super().__init__()
        hidden = max(1, width // spec.compress)
        self.block = nn.Sequential(
            nn.ELU(),
            SoundConv(spec, width, hidden, spec.residual_kernel, dilation=dilation),
            nn.ELU(),
            SoundConv(spec, hidden, width, 1),
        )
        self.shortcut = SoundConv(spec, width, width, 1) if spec.shortcut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.block(x)


class ResidualLSTM(nn.Module):
    """x + LSTM(x) over time, [B, D, T]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.permute(2, 0, 1)  # [T, B, D]
        return (self.lstm(steps)[0] + steps).permute(1, 2, 0)


def pad(x: Tensor, left: int, right: int, mode: str) -> Tensor:
    """Pad time. A sound too short to be reflected is extended by zeros first, which are cut again."""
    short = max(0, max(left, right) - x.shape[-1] + 1) if mode == "reflect" else 0
    padded = F.pad(F.pad(x, (0, short)), (left, right), mode)
    return padded[..., : padded.shape[-1] - short]
