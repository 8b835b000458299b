"""Semantic tokens of sounds: k-means over features of 20 ms, 50 a second.

features   a log-mel spectrogram, its mean over the recording taken off: works for any sound
           or the states of a Whisper encoder's layer, which follow what is said and not who says it

AudioLM takes a layer of w2v-BERT; each dimension is normalized over the training set before k-means.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwater.audio.frames import Frames
from headwater.audio.mel import SAMPLE_RATE, LogMel
from headwater.codecs.base import Codec, CodecSpec
from headwater.codecs.codebook import nearest_rows
from headwater.core.base import check_positive
from headwater.core.embeddings import describe
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part

if TYPE_CHECKING:
    from headwater.core.model import Transformer

RATE = 50  # tokens a second
FRAMES_PER_TOKEN = 2  # of a log-mel spectrogram
MELS = 40
WINDOW_SECONDS = 30  # of a Whisper encoder
MAX_VECTORS = 40_000  # that k-means learns from
ROUNDS = 25


@part
class SemanticTokens(CodecSpec):
    """K-means over features. whisper: a Whisper whose encoder states they are, '' for a log-mel spectrogram.

    layer: whose states; width: of the features, that of the encoder or mels · 2.
    """

    num_codes: int = 256
    whisper: str = ""
    layer: int = 2
    width: int = MELS * FRAMES_PER_TOKEN

    def __post_init__(self) -> None:
        check_positive(self, "num_codes", _("256 is usual"))
        check_positive(self, "width", _("leave it out for log-mels"))
        must(self.layer > 0, self, _("layer must be above 0"), self.layer, _("2 is usual"))

    def build_module(self) -> SemanticCodec:
        return SemanticCodec(self)


class SemanticCodec(Codec):
    """The mean and deviation of the features, and the centers of k-means."""

    sample_rate = SAMPLE_RATE
    rate = RATE

    def __init__(self, spec: SemanticTokens) -> None:
        super().__init__(spec, spec.num_codes)
        self.spec: SemanticTokens = spec
        self.mean = nn.Parameter(torch.zeros(spec.width), requires_grad=False)
        self.deviation = nn.Parameter(torch.ones(spec.width), requires_grad=False)
        self.centers = nn.Parameter(torch.randn(spec.num_codes, spec.width), requires_grad=False)

    @cached_property
    def whisper(self) -> Transformer:
        """The encoder whose states are the features."""
        from headwater.families.load import load

        model = load(self.spec.whisper).model
        encoder = model.encoder
        if (
            encoder is None
            or not isinstance(encoder.spec.embed, Frames)
            or len(encoder.layers) < self.spec.layer
            or encoder.spec.d_model != self.spec.width
        ):
            raise BadInput(
                _(
                    "{name} must be a Whisper with {layers} encoder layers at least; give another one",
                    name=self.spec.whisper,
                    layers=self.spec.layer,
                )
            )
        return model

    @classmethod
    def of(cls, num_codes: int, whisper: str, seed: int) -> SemanticCodec:
        """A codec before it learns, for the states of a Whisper or, without one, for log-mel spectrograms."""
        spec = SemanticTokens(num_codes)
        if whisper:
            from headwater.families.load import load_spec

            stack = load_spec(whisper).encoder
            spec = SemanticTokens(num_codes, whisper, width=1 if stack is None else stack.d_model)
        codec = spec.build(seed)
        assert isinstance(codec, SemanticCodec)
        return codec.eval()

    @torch.inference_mode()
    def features(self, samples: Tensor) -> Tensor:
        """Samples [N] at 16 kHz to features [frames, D]."""
        frames = max(1, len(samples) * RATE // SAMPLE_RATE)
        if self.spec.whisper:
            return self._encoder_states(samples, frames)
        mels = LogMel(samples, MELS).window(0, frames * FRAMES_PER_TOKEN).T  # [2 · frames, mels]
        mels = mels - mels.mean(0)
        return mels.reshape(frames, -1)

    def _encoder_states(self, samples: Tensor, frames: int) -> Tensor:
        """The states of the encoder's layer, a window after the other."""
        encoder = self.whisper.encoder
        assert encoder is not None and isinstance(encoder.spec.embed, Frames)
        states: list[Tensor] = []
        handle = encoder.layers[self.spec.layer - 1].register_forward_hook(lambda *args: states.append(args[2][0]))
        try:
            mels = LogMel(samples, encoder.spec.embed.mels)
            step = WINDOW_SECONDS * RATE
            for first in range(0, frames, step):
                window = mels.window(first * FRAMES_PER_TOKEN, step * FRAMES_PER_TOKEN)
                self.whisper.encode(window[None])
        finally:
            handle.remove()
        return torch.cat(states)[:frames].float()

    @torch.inference_mode()
    def encode(self, signal: Tensor) -> Tensor:
        """Sounds [B, N] at 16 kHz to tokens [B, frames]."""
        if not signal.is_floating_point() or signal.dim() != 2 or not signal.shape[1]:
            raise BadInput(_("codec: sounds must be floats [batch, samples], got {got}", got=describe(signal)))
        rows = [nearest_rows(self.normalize(self.features(row)), self.centers) for row in signal]
        return torch.stack(rows)

    def normalize(self, features: Tensor) -> Tensor:
        """Features with the mean and deviation of the training set taken off."""
        return (features - self.mean) / self.deviation

    @torch.no_grad()
    def fit(self, features: Tensor, seed: int = 0) -> SemanticCodec:
        """Learn mean, deviation and centers from features [N, D] (Lloyd's algorithm), the same from the same seed."""
        generator = torch.Generator().manual_seed(seed)
        if len(features) > MAX_VECTORS:
            features = features[torch.randperm(len(features), generator=generator)[:MAX_VECTORS]]
        self.mean.copy_(features.mean(0))
        self.deviation.copy_(features.std(0).nan_to_num(1.0).clamp(min=1e-4))
        x = self.normalize(features)
        centers = x[torch.randint(len(x), (self.num_codes,), generator=generator)].clone()
        for _round in range(ROUNDS):
            ids = nearest_rows(x, centers)
            counts = torch.bincount(ids, minlength=len(centers))
            sums = torch.zeros_like(centers).index_add_(0, ids, x)
            empty = counts == 0
            centers = sums / counts.clamp(min=1)[:, None]
            centers[empty] = x[torch.randint(len(x), (int(empty.sum()),), generator=generator)]
        self.centers.copy_(centers)
        return self
