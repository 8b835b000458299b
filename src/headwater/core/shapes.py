"""A newcomer's way in: the three shapes of Transformer from a handful of sizes. The defaults are the 2017 paper's.

    model = headwater.transformer(8000, 8000).build()
    model = headwater.decoder(50257, d_model=768, heads=12, layers=12).build(seed=0)

Each function gives a spec (a Model part): print it, change it with dataclasses.replace or parts.swap, then build it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headwater.core.attention import Attention, CrossAttention
from headwater.core.embed import Tokens
from headwater.core.feedforward import FeedForward, GatedFeedForward
from headwater.core.heads import LanguageHead
from headwater.core.init import PAPER, scaled_normal
from headwater.core.kernels import backend as kernel_named
from headwater.core.masks import Everyone, Past
from headwater.core.model import Model
from headwater.core.norms import LayerNorm, NoNorm, RMSNorm
from headwater.core.positions import Alibi, Learned, NoPosition, RelativeBias, RelativeXL, Rotary, Sinusoidal
from headwater.core.stack import Block, Stack, post, pre, sandwich
from headwater.errors import BadSetting, nearest
from headwater.parts import part

PLACEMENTS = {"pre": pre, "post": post, "sandwich": sandwich}
NORMS = {"layer": LayerNorm(), "rms": RMSNorm()}


def _choose(name: str, known: dict[str, Any], what: str) -> Any:
    if name not in known:
        raise BadSetting(f"{what} must be one of {', '.join(known)}, got {name!r}; {nearest(name, known)}")
    return known[name]


@part
class Sizes:
    """What the three shapes have in common, in plain words; parts are made of it below."""

    d_model: int = 512
    heads: int = 8
    layers: int = 6
    d_ff: int | None = None  # 4 · d_model
    dropout: float = 0.1
    attention_dropout: float = 0.0
    placement: str = "post"
    norm: str = "layer"
    activation: str = "relu"
    gated: bool = False
    position: str = "sinusoidal"
    longest: int = 512  # places of a learned table
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = True
    backend: str = "fused"

    @property
    def placed(self) -> Any:
        return _choose(self.placement, PLACEMENTS, "placement")

    @property
    def norm_part(self) -> Any:
        return _choose(self.norm, NORMS, "norm")

    @property
    def ffn(self) -> Any:
        kind = GatedFeedForward if self.gated else FeedForward
        return kind(4 * self.d_model if self.d_ff is None else self.d_ff, self.activation, self.bias)

    def positions(self, two_way: bool) -> dict[str, tuple[Any, Any]]:
        """By name: what acts at the embedding, and what in attention."""
        return {
            "sinusoidal": (Sinusoidal(), NoPosition()),
            "learned": (Learned(self.longest), NoPosition()),
            "rotary": (NoPosition(), Rotary()),
            "alibi": (NoPosition(), Alibi()),
            "relative": (NoPosition(), RelativeBias(two_way=two_way)),
            "xl": (NoPosition(), RelativeXL()),
            "none": (NoPosition(), NoPosition()),
        }

    def stack(self, vocab: int, sees: Any, reads_memory: bool = False) -> Stack:
        known = self.positions(two_way=sees == Everyone())
        at_embedding, in_attention = _choose(self.position, known, "position")
        norm, placed = self.norm_part, self.placed
        shape: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "bias": "qkvo" if self.bias else "",
            "dropout": self.attention_dropout,
            "kernel": kernel_named(self.backend),
        }
        own = placed(norm, self_attn=Attention(**shape, sees=sees, position=in_attention))
        other = (placed(norm, cross_attn=CrossAttention(**shape)),) if reads_memory else ()
        block = Block((own, *other, placed(norm, ffn=self.ffn)), self.dropout)
        scale = 1.0 if self.position == "learned" else self.d_model**0.5  # learned places are drawn as small as tokens
        embed = Tokens(vocab, at_embedding, scale=scale, dropout=self.dropout)
        return Stack(self.d_model, embed, (block,) * self.layers, NoNorm() if placed is post else norm)


def transformer(src_vocab: int, tgt_vocab: int | None = None, *, shared: bool = False, **sizes: Any) -> Model:
    """Encoder-decoder. One vocabulary, or shared=True, means one table for source, target and output (the paper's)."""
    s, one = _sizes(sizes), tgt_vocab is None or shared
    tgt_vocab = src_vocab if tgt_vocab is None else tgt_vocab
    if one and src_vocab != tgt_vocab:
        came = f"{src_vocab} and {tgt_vocab}"
        raise BadSetting(f"shared tables need one vocabulary, got {came}; give one, or shared=False")
    tied = (("head.out", "decoder.embed.tokens"),)
    return Model(
        encoder=s.stack(src_vocab, Everyone()),
        decoder=s.stack(tgt_vocab, Past(), reads_memory=True),
        head=LanguageHead(tgt_vocab),
        tied=((("decoder.embed.tokens", "encoder.embed.tokens"), *tied) if one else tied),
        init=PAPER,
    )


def encoder(vocab: int, head: Any = None, **sizes: Any) -> Model:
    """Encoder-only: every token sees every other. The head is a language head unless one is given."""
    return _alone("encoder", vocab, Everyone(), head, sizes)


def decoder(vocab: int, head: Any = None, **sizes: Any) -> Model:
    """Decoder-only: every token sees itself and what came before."""
    return _alone("decoder", vocab, Past(), head, sizes)


def _alone(side: str, vocab: int, sees: Any, head: Any, sizes: dict[str, Any]) -> Model:
    s = _sizes(sizes)
    tied = (("head.out", f"{side}.embed.tokens"),) if head is None else ()
    init = PAPER if s.placed is post else scaled_normal(s.layers)
    stack, head = s.stack(vocab, sees), LanguageHead(vocab) if head is None else head
    if side == "encoder":
        return Model(head, encoder=stack, tied=tied, init=init)
    return Model(head, decoder=stack, tied=tied, init=init)


def _sizes(given: dict[str, Any]) -> Sizes:
    known = [field.name for field in fields(Sizes)]
    for name in given:
        if name not in known:
            raise BadSetting(f"there is no size called {name!r}; {nearest(name, known)}")
    return Sizes(**given)
