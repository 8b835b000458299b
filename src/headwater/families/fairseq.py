"""The 2017 Transformer as fairseq trains it, with fairseq's own names for weights and settings.

fairseq keeps its settings inside the checkpoint; `headwater convert` writes those that matter into a config.json, with
the model_type `fairseq` (norms after each branch, as in the paper) or `fairseq_prenorm` (before it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.core import (
    Attention,
    Block,
    CrossAttention,
    FeedForward,
    LanguageHead,
    LayerNorm,
    Learned,
    Model,
    NoHead,
    NoNorm,
    Past,
    SinusoidalHalves,
    Stack,
    Tokens,
    post,
    pre,
)
from headwater.core.positions import Position, Sines
from headwater.errors import BadFile
from headwater.families.bart import EMBED_NORM, FINAL_NORM, TABLE, pair_names
from headwater.families.family import act, family
from headwater.parts import must, part
from headwater.weights.names import table
from headwater.weights.settings import Settings

PAD = 1  # fairseq's first ids are <s> <pad> </s> <unk>; places begin after the padding's


@part
class LateSines(SinusoidalHalves):
    """All sines, then all cosines, of (place + first) · base^(-i / (D/2 - 1)), i < D/2."""

    first: int = PAD + 1

    def build(self, width: int, heads: int = 1) -> Position:
        must(width % 2 == 0 and width > 2, self, "the width must be even and above 2", width, "choose another d_model")
        return LateWaves(width, self.base, self.first)


class LateWaves(Sines):
    def __init__(self, width: int, base: float, first: int) -> None:
        super().__init__(width, base, halves=True)
        self.first = first

    def constants(self) -> None:
        count = self.speed.numel()
        i = torch.arange(count, dtype=torch.float64, device=self.speed.device)
        self.speed.copy_(self.base ** (-i / (count - 1)))

    def add(self, x: Tensor, places: Tensor) -> Tensor:
        return super().add(x, places + self.first)


# ----------------------------------------------------------------------------------------------------------- settings

_KEPT = """
    activation_fn activation_dropout attention_dropout dropout no_scale_embedding
    max_source_positions max_target_positions layernorm_embedding
    encoder_embed_dim encoder_ffn_embed_dim encoder_layers encoder_attention_heads encoder_learned_pos
    decoder_embed_dim decoder_ffn_embed_dim decoder_layers decoder_attention_heads decoder_learned_pos
"""

# With any other value the model computes something that is not built here.
ONLY: dict[str, tuple[Any, ...]] = {
    "adaptive_softmax_cutoff": (None, False),
    "adaptive_input": (None, False),
    "cross_self_attention": (None, False),
    "no_cross_attention": (None, False),
    "encoder_layers_to_keep": (None,),
    "decoder_layers_to_keep": (None,),
    "no_token_positional_embeddings": (None, False),
}


def config_from(args: dict[str, Any], where: object) -> dict[str, Any]:
    """config.json from the settings in a fairseq checkpoint; what would change the maths unseen is refused."""
    for name, known in ONLY.items():
        if args.get(name) not in known:
            raise BadFile(f"{where}: fairseq's {name} = {str(args[name])[:40]!r} is not built here; it must be unset")
    before = {bool(args.get(f"{side}_normalize_before")) for side in ("encoder", "decoder")}
    width = args.get("decoder_embed_dim")
    narrow = {args.get(name) or width for name in ("encoder_embed_dim", "decoder_input_dim", "decoder_output_dim")}
    if len(before) > 1 or narrow != {width}:
        raise BadFile(f"{where}: encoder and decoder must have one width and one place for their norms; they differ")
    return {
        "model_type": "fairseq_prenorm" if before == {True} else "fairseq",
        "pad_token_id": PAD,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        **{name: args[name] for name in _KEPT.split() if args.get(name) is not None},
    }


# ------------------------------------------------------------------------------------------------------------- family

MORE = TABLE + EMBED_NORM + "[model.]{side}.embed_positions._float_tensor  -\n"
HEADS = {
    "language": table("[model.]decoder.output_projection  head.out"),
    "states": table("[model.]decoder.output_projection  -"),
}


@family("fairseq", names=pair_names("post_norm", MORE), heads=HEADS)
def fairseq(c: Settings, kind: str) -> Model:
    return _pair(c, kind, post, NoNorm())


@family("fairseq_prenorm", names=pair_names("norm", MORE + FINAL_NORM), heads=HEADS)
def fairseq_prenorm(c: Settings, kind: str) -> Model:
    return _pair(c, kind, pre, LayerNorm())


def _pair(c: Settings, kind: str, place: Any, last: Any) -> Model:
    words = c.size("vocab_size", "target_vocab_size")
    head = LanguageHead(words) if kind == "language" else NoHead()
    tied = (("head.out", "decoder.embed.tokens"),) if kind == "language" else ()
    return Model(
        encoder=_stack(c, "encoder", c.size("source_vocab_size", default=words), place, last),
        decoder=_stack(c, "decoder", words, place, last),
        head=head,
        tied=tied,
    )


def _stack(c: Settings, side: str, vocab: int, place: Any, last: Any) -> Stack:
    d_model, dropout, norm = c.size(f"{side}_embed_dim"), c.number("dropout", default=0.1), LayerNorm()
    shape: dict[str, Any] = {
        "heads": c.size(f"{side}_attention_heads"),
        "bias": "qkvo",
        "dropout": c.number("attention_dropout", default=0.0),
    }
    within = c.number("activation_dropout", default=0.0)
    words = act(c, "activation_fn", default="relu")
    ffn = place(norm, ffn=FeedForward(c.size(f"{side}_ffn_embed_dim"), words, dropout=within))
    if side == "encoder":
        before: tuple[Any, ...] = (place(norm, self_attn=Attention(**shape)),)
    else:
        looks = place(norm, cross_attn=CrossAttention(**shape))
        before = place(norm, self_attn=Attention(**shape, sees=Past())), looks
    room = c.size(f"max_{'source' if side == 'encoder' else 'target'}_positions", default=1024)
    learned = c.flag(f"{side}_learned_pos", default=False)
    embed = Tokens(
        vocab,
        Learned(room + PAD + 1, first=PAD + 1) if learned else LateSines(),
        1.0 if c.flag("no_scale_embedding", default=False) else d_model**0.5,
        norm=norm if c.flag("layernorm_embedding", default=False) else NoNorm(),
        dropout=dropout,
    )
    return Stack(d_model, embed, (Block((*before, ffn), dropout),) * c.layers(f"{side}_layers"), last)
