"""AudioLM: three models over sound tokens, each of which reads what the one before it wrote (Borsos et al. 2022).

semantic  what is said, or how the music goes: one token after the other     causal
coarse    semantic tokens, then the first codebooks frame by frame           causal
fine      the other codebooks, one after the other, all frames at once       Bark's form

AudioTokens is the layout of the ids; its defaults are those of Bark.
"""

from __future__ import annotations

from dataclasses import field, fields

from torch import Tensor, nn

from headwater.core.embeddings import ModelInputs
from headwater.core.heads import NoHead
from headwater.core.init import InitRules
from headwater.core.model import Model, Transformer
from headwater.core.stack import TransformerStack
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part

STAGES = ("semantic", "coarse", "fine")
MAX_TOKENS = 1 << 24


@part
class AudioTokens:
    """The ids of the three models, and the windows in which they work.

    semantic  ids below semantic_codes are tokens; semantic_end ends them, semantic_infer starts them. text_length:
              places for a text before them, 0 for none; text_offset is added to its ids, text_pad fills it up.
    coarse    codebook k has the ids from coarse_offset + k · codes on, semantic tokens those from semantic_offset on.
              coarse_semantic places for semantic tokens, filled up with coarse_pad; coarse_infer; at most
              coarse_history codes; then coarse_window codes are written before the window moves.
    fine      the id `codes` stands for a code that is not known. fine_length frames at once, of which the first
              fine_history are known.
    """

    semantic_codes: int = 10_000
    semantic_end: int = 10_000
    semantic_infer: int = 129_599
    semantic_rate: float = 49.9  # a second
    semantic_length: int = 768
    text_length: int = 256
    text_offset: int = 10_048
    text_pad: int = 129_595
    codes: int = 1024  # of a codebook
    books: int = 8
    coarse_books: int = 2
    frame_rate: float = 75.0  # a second
    coarse_offset: int = 10_000
    semantic_offset: int = 0
    coarse_pad: int = 12_048
    coarse_infer: int = 12_050
    coarse_semantic: int = 256
    coarse_history: int = 630
    coarse_window: int = 60
    fine_history: int = 512
    fine_length: int = 1024

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            limit = MAX_TOKENS
            must(
                0 <= value <= limit, self, _("{name} must be from 0 to {limit}", name=each.name, limit=limit), value, ""
            )
        for name in ("semantic_codes", "semantic_rate", "codes", "frame_rate", "coarse_books", "coarse_semantic"):
            must(getattr(self, name) > 0, self, _("{name} must be above 0", name=name), 0, "")
        must(
            self.coarse_books < self.books <= 256,
            self,
            _("books must be above coarse_books"),
            self.books,
            _("8 is usual"),
        )
        windows = self.coarse_window > 0 and self.coarse_history > 0
        must(windows, self, _("coarse windows must be above 0"), self.coarse_window, _("60 is usual"))
        fits = 0 < self.fine_history < self.fine_length
        must(fits, self, _("fine_history must be below fine_length"), self.fine_history, _("half is usual"))

    @property
    def ratio(self) -> float:
        """Coarse codes for each semantic token."""
        return self.frame_rate / self.semantic_rate * self.coarse_books

    @property
    def max_semantic_history(self) -> int:
        """Semantic tokens for which there is room for the codes."""
        return int(self.coarse_history // self.ratio)


@part
class AudioLM(Model):
    """The specs of the three models, and the layout of their ids."""

    semantic: Model = field(kw_only=True)
    coarse: Model = field(kw_only=True)
    fine: Model = field(kw_only=True)
    tokens: AudioTokens = field(default=AudioTokens(), kw_only=True)

    def __post_init__(self) -> None:
        empty = self.encoder is None and self.decoder is None and self.head == NoHead()
        must(empty, self, _("encoder, decoder and head must be left out"), "", _("give semantic, coarse and fine"))
        is_untied = not (self.semantic.tied or self.coarse.tied or self.fine.tied)
        must(is_untied, self, _("tied must be given here"), "", _("with the name of the model before the path"))

    @property
    def max_positions(self) -> int | None:
        """The maximum number of tokens of the semantic model."""
        return self.semantic.max_positions

    @property
    def init_rules(self) -> InitRules:
        """The rules of the three models, under their paths."""
        stages = ((name, getattr(self, name)) for name in STAGES)
        return tuple((f"{name}.{pattern}", init) for name, model in stages for pattern, init in model.init)

    def module(self) -> Transformer:
        return AudioLanguageModel(self)


class AudioLanguageModel(Transformer):
    """The three models; built from an AudioLM spec."""

    spec: AudioLM

    def __init__(self, spec: AudioLM) -> None:
        nn.Module.__init__(self)
        self.spec = spec
        self.encoder = None
        self.decoder = None
        self.semantic = Transformer(spec.semantic)
        self.coarse = Transformer(spec.coarse)
        self.fine = Transformer(spec.fine)
        self.tie_weights()

    @property
    def tokens(self) -> AudioTokens:
        """The layout of the ids."""
        return self.spec.tokens

    @property
    def output_stack(self) -> TransformerStack:
        """The stack of the semantic model."""
        return self.semantic.output_stack

    def gradient_checkpointing(self, enabled: bool = True) -> AudioLanguageModel:
        for model in (self.semantic, self.coarse, self.fine):
            model.gradient_checkpointing(enabled)
        return self

    def forward(self, ids: Tensor, **inputs: Tensor | None) -> Tensor:
        raise BadInput(_("model: it has three stages; call model.semantic, model.coarse or model.fine"))

    def hidden_states(self, inputs: ModelInputs, **options: object) -> Tensor:
        raise BadInput(_("model: it has three stages; call model.semantic, model.coarse or model.fine"))
