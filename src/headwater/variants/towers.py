"""Two towers (CLIP, SigLIP): a text model and an image model whose vectors of one width are compared.

ids ──── text tower ── [T, W] ─┐
                               ├── exp(logit_scale) · cosine (+ logit_offset) ── logits [T, I]
pixels ─ image tower ─ [I, W] ─┘
"""

from __future__ import annotations

import math
from dataclasses import field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.base import InitSpec
from headwater.core.embeddings import ModelInputs
from headwater.core.heads import NoHead
from headwater.core.init import InitRules
from headwater.core.model import Model, Transformer
from headwater.core.stack import TransformerStack
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part

MAX_TEXT = 512  # tokens of a text, where the text tower has no limit
MAX_LOGIT_SCALE = math.log(100)  # training keeps the factor of the cosines from 1 to 100


@part
class Constant(InitSpec):
    """One value in every place."""

    value: float

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.fill_(self.value)


@part
class Towers(Model):
    """A text model and an image model, each with a head that gives one vector per row.

    logit_scale: the initial logarithm of the factor of the cosines. logit_offset: the initial value of what is added to
    them (SigLIP), None for nothing.
    """

    text: Model = field(kw_only=True)
    image: Model = field(kw_only=True)
    logit_scale: float = field(default=math.log(1 / 0.07), kw_only=True)
    logit_offset: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        empty = self.encoder is None and self.decoder is None and self.head == NoHead()
        must(empty, self, _("encoder, decoder and head must be left out"), "", _("give text and image"))

    @property
    def max_positions(self) -> int | None:
        """The maximum number of tokens of a text."""
        return self.text.max_positions

    @property
    def init_rules(self) -> InitRules:
        """The rules of both towers, under their paths, and the initial scale."""
        rules: list[tuple[str, InitSpec]] = [("logit_scale", Constant(self.logit_scale))]
        rules.append(("logit_offset", Constant(self.logit_offset or 0.0)))
        for name, tower in (("text", self.text), ("image", self.image)):
            rules += [(f"{name}.{pattern}", init) for pattern, init in tower.init]
        return tuple(rules)

    def module(self) -> Transformer:
        return TwoTowers(self)


class TwoTowers(Transformer):
    """The text tower, the image tower and the scale; built from a Towers spec."""

    def __init__(self, spec: Towers) -> None:
        nn.Module.__init__(self)
        self.spec = spec
        self.encoder = None
        self.decoder = None
        self.text = Transformer(spec.text)
        self.image = Transformer(spec.image)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_offset = None if spec.logit_offset is None else nn.Parameter(torch.empty(()))

    @property
    def output_stack(self) -> TransformerStack:
        """The stack of the text tower, which reads the ids."""
        return self.text.output_stack

    @property
    def max_text(self) -> int:
        """The maximum number of tokens of a text."""
        return self.spec.max_positions or MAX_TEXT

    def tie_weights(self) -> None:
        self.text.tie_weights()
        self.image.tie_weights()

    def gradient_checkpointing(self, enabled: bool = True) -> TwoTowers:
        self.text.gradient_checkpointing(enabled)
        self.image.gradient_checkpointing(enabled)
        return self

    def forward(
        self,
        ids: Tensor,
        *,
        source: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **unused: Tensor | None,
    ) -> Tensor:
        """ids [T, Q] and source, the pixels [I, C, H, W] -> logits [T, I]."""
        if source is None:
            raise BadInput(_("model: two towers compare texts with images; call model(ids, source=pixels)"))
        return self.similarity(self.text_vectors(ids, attention_mask), self.image_vectors(source))

    def hidden_states(self, inputs: ModelInputs, **options: object) -> Tensor:
        raise BadInput(_("model: two towers have no common hidden states; use model.text or model.image"))

    def text_vectors(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Texts [T, Q] -> unit vectors [T, W]."""
        return F.normalize(self.text(ids, attention_mask=attention_mask), dim=-1)

    def image_vectors(self, pixels: Tensor) -> Tensor:
        """Images [I, C, H, W] -> unit vectors [I, W]."""
        return F.normalize(self.image(pixels), dim=-1)

    def similarity(self, texts: Tensor, images: Tensor) -> Tensor:
        """Unit vectors [T, W] and [I, W] -> logits [T, I]."""
        logits = self.logit_scale.exp() * texts @ images.T
        return logits if self.logit_offset is None else logits + self.logit_offset

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Keep the factor of the cosines from 1 to 100, as after every training step of CLIP."""
        self.logit_scale.clamp_(0, MAX_LOGIT_SCALE)
