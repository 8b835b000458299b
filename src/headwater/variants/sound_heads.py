"""Head of a sound classifier (WhisperForAudioClassification): each state is projected, and the mean classified."""

from __future__ import annotations

from torch import Tensor, nn

from headwater.core.base import HeadSpec, check_positive
from headwater.core.embeddings import ModelInputs
from headwater.core.heads import MeanPooling
from headwater.i18n import _
from headwater.parts import part


@part
class SoundClassificationHead(HeadSpec):
    """Logits for each recording, out(mean(projector(x))). width: of the projected states."""

    num_labels: int
    width: int = 256

    def __post_init__(self) -> None:
        check_positive(self, "num_labels", _("give the number of labels"))
        check_positive(self, "width", _("256 is usual"))

    def build(self, d_model: int) -> nn.Module:
        return SoundClassificationHeadLayer(self, d_model)


class SoundClassificationHeadLayer(nn.Module):
    """The module of SoundClassificationHead."""

    def __init__(self, spec: SoundClassificationHead, d_model: int) -> None:
        super().__init__()
        self.pooling = MeanPooling()
        self.projector = nn.Linear(d_model, spec.width)
        self.out = nn.Linear(spec.width, spec.num_labels)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        """[B, Q, D] -> [B, labels]"""
        return self.out(self.pooling.pool(self.projector(x), inputs))
