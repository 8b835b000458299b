"""Builders: transformer(), encoder() and decoder() give a Model spec from a few sizes.

The defaults are those of Vaswani et al. 2017.

    model = headwater.transformer(8000, 8000).build()
    model = headwater.decoder(50257, d_model=768, heads=12, layers=12).build(seed=0)

Each function returns a spec (a Model): print it, change it with dataclasses.replace or parts.swap, then build it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from headwater.core.attention import Attention, CrossAttention
from headwater.core.base import HeadSpec, KernelSpec, NormSpec, PositionSpec, choose
from headwater.core.embeddings import Embeddings
from headwater.core.feedforward import FeedForward, GatedFeedForward
from headwater.core.heads import LMHead
from headwater.core.init import PAPER_INIT, scaled_normal
from headwater.core.kernels import SDPA, Eager
from headwater.core.masks import Bidirectional, Causal, MaskRule
from headwater.core.model import Model
from headwater.core.norms import LayerNorm, NoNorm, RMSNorm
from headwater.core.positions import Alibi, Learned, NoPosition, RelativeBias, Rotary, Sinusoidal
from headwater.core.stack import Block, Stack, post, pre, sandwich
from headwater.errors import BadSetting, nearest
from headwater.families.attentions import choose_attention
from headwater.i18n import _
from headwater.parts import must, part, swap
from headwater.variants.transformer_xl import RelativeXL
from headwater.variants.xformers import XFormers

NORM_POSITIONS = {"pre": pre, "post": post, "sandwich": sandwich}
NORMS: dict[str, NormSpec] = {"layer": LayerNorm(), "rms": RMSNorm()}
BACKENDS: dict[str, KernelSpec] = {"sdpa": SDPA(), "eager": Eager(), "xformers": XFormers()}


@part
class TransformerConfig:
    """The sizes and choices that transformer(), encoder() and decoder() have in common."""

    d_model: int = 512
    heads: int = 8
    layers: int = 6
    d_ff: int | None = None  # 4 · d_model
    dropout: float = 0.1
    attention_dropout: float = 0.0
    norm_position: str = "post"
    norm: str = "layer"
    activation: str = "relu"
    gated: bool = False
    position: str = "sinusoidal"
    max_positions: int = 512  # of learned position embeddings
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = True
    backend: str = "sdpa"
    attention: str = "full"  # a name in attentions.py, with its sizes: window:size=256
    encoder_attention: str = ""  # another one for the encoder
    decoder_attention: str = ""

    @property
    def ffn(self) -> FeedForward | GatedFeedForward:
        """The spec of the feed-forward layer."""
        layer = GatedFeedForward if self.gated else FeedForward
        d_ff = 4 * self.d_model if self.d_ff is None else self.d_ff
        return layer(d_ff, self.activation, self.bias)

    def _position_specs(self, bidirectional: bool) -> dict[str, tuple[PositionSpec, PositionSpec]]:
        """By name: the position encoding of the embedding, and that of attention."""
        return {
            "sinusoidal": (Sinusoidal(), NoPosition()),
            "learned": (Learned(self.max_positions), NoPosition()),
            "rotary": (NoPosition(), Rotary()),
            "alibi": (NoPosition(), Alibi()),
            "relative": (NoPosition(), RelativeBias(bidirectional=bidirectional)),
            "xl": (NoPosition(), RelativeXL()),
            "none": (NoPosition(), NoPosition()),
        }

    def stack(self, vocab: int, mask: MaskRule, cross_attention: bool = False) -> Stack:
        """The spec of an encoder or decoder stack."""
        known = self._position_specs(bidirectional=mask == Bidirectional())
        at_embedding, in_attention = choose(self.position, known, "position")
        norm = choose(self.norm, NORMS, "norm")
        branch = choose(self.norm_position, NORM_POSITIONS, "norm_position")
        shape: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "bias": "qkvo" if self.bias else "",
            "dropout": self.attention_dropout,
            "kernel": choose(self.backend, BACKENDS, "backend"),
        }
        causal = mask != Bidirectional()
        by_stack = self.decoder_attention if causal else self.encoder_attention
        plain = Attention(**shape, mask=mask, position=in_attention)
        blocks = []
        for attention in choose_attention(by_stack or self.attention, plain, causal):
            branches = [branch(norm, self_attn=attention)]
            if cross_attention:
                branches.append(branch(norm, cross_attn=CrossAttention(**shape)))
            branches.append(branch(norm, ffn=self.ffn))
            blocks.append(Block(tuple(branches), self.dropout))
        layers = tuple(blocks[i % len(blocks)] for i in range(self.layers))
        scale = 1.0 if self.position == "learned" else self.d_model**0.5  # learned positions start as small as tokens
        embed = Embeddings(vocab, at_embedding, scale=scale, dropout=self.dropout)
        return Stack(self.d_model, embed, layers, NoNorm() if branch is post else norm)


def transformer(src_vocab: int, tgt_vocab: int | None = None, *, shared: bool = False, **config: Any) -> Model:
    """An encoder-decoder spec, by default the model of the 2017 paper.

    src_vocab, tgt_vocab  vocabulary sizes; without tgt_vocab, one vocabulary and one embedding for all
    shared                one embedding for source, target and output
    config                the fields of TransformerConfig: d_model, heads, layers, d_ff, dropout, position, …
    """
    sizes = _config(config)
    one_table = tgt_vocab is None or shared
    tgt_vocab = src_vocab if tgt_vocab is None else tgt_vocab
    if one_table and src_vocab != tgt_vocab:
        got = _("{src_vocab} and {tgt_vocab}", src_vocab=src_vocab, tgt_vocab=tgt_vocab)
        raise BadSetting(_("shared tables need one vocabulary, got {got}; give one, or shared=False", got=got))
    tied = (("head.out", "decoder.embed.tokens"),)
    return Model(
        encoder=sizes.stack(src_vocab, Bidirectional()),
        decoder=sizes.stack(tgt_vocab, Causal(), cross_attention=True),
        head=LMHead(tgt_vocab),
        tied=((("decoder.embed.tokens", "encoder.embed.tokens"), *tied) if one_table else tied),
        init=PAPER_INIT,
    )


def encoder(vocab: int, head: HeadSpec | None = None, **config: Any) -> Model:
    """An encoder-only spec, with bidirectional attention.

    vocab   vocabulary size
    head    the spec of another head than a language-model head
    config  the fields of TransformerConfig: d_model, heads, layers, d_ff, dropout, position, …
    """
    return _single_stack("encoder", vocab, Bidirectional(), head, config)


def decoder(vocab: int, head: HeadSpec | None = None, **config: Any) -> Model:
    """A decoder-only spec, with causal attention.

    vocab   vocabulary size
    head    the spec of another head than a language-model head
    config  the fields of TransformerConfig: d_model, heads, layers, d_ff, dropout, position, …
    """
    return _single_stack("decoder", vocab, Causal(), head, config)


def _single_stack(side: str, vocab: int, mask: MaskRule, head: HeadSpec | None, config: dict[str, Any]) -> Model:
    sizes = _config(config)
    other = "encoder_attention" if side == "decoder" else "decoder_attention"
    no_stack = _("{setting} must be left out, for this model has one stack", setting=other)
    must(not getattr(sizes, other), side, no_stack, getattr(sizes, other), _("use attention"))
    tied = (("head.out", f"{side}.embed.tokens"),) if head is None else ()
    init = PAPER_INIT if sizes.norm_position == "post" else scaled_normal(sizes.layers)
    stack = sizes.stack(vocab, mask)
    head = LMHead(vocab) if head is None else head
    if side == "encoder":
        return Model(head, encoder=stack, tied=tied, init=init)
    return Model(head, decoder=stack, tied=tied, init=init)


def _config(kwargs: dict[str, Any]) -> TransformerConfig:
    known = [field.name for field in fields(TransformerConfig)]
    for name in kwargs:
        if name not in known:
            raise BadSetting(_("there is no size called {name!r}; {nearest}", name=name, nearest=nearest(name, known)))
    return TransformerConfig(**kwargs)


def with_token_types(spec: Model, token_types: int) -> Model:
    """The spec with an embedding of this many token types."""
    return swap(spec, Embeddings, lambda embed: replace(embed, token_types=token_types))
