"""Attentions by name, with their sizes: full, window, linear, … for the builders and for --attention NAME:size=value.

A row is a function that changes the plain attention of a stack: attention, whether it is causal, and the sizes by
keyword with their defaults. It may return a tuple, which the layers of the stack then take in turn.

    decoder(8000, attention="window:size=256")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from headwater.core.attention import Attention
from headwater.core.base import choose
from headwater.core.masks import LocalWindow, SlidingWindow
from headwater.core.positions import Alibi, RelativeBias
from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.parts import must
from headwater.variants.bigbird import BigBirdAttention, SeededBlocks
from headwater.variants.chunked_attention import ChunkedAttention
from headwater.variants.linear_attention import LinearAttention
from headwater.variants.linformer import Linformer
from headwater.variants.longformer import FirstTokenIsGlobal, LongformerAttention
from headwater.variants.lsh_attention import LSHAttention
from headwater.variants.performer import Performer
from headwater.variants.transformer_xl import xl_attention
from headwater.variants.transient_global import RelativeBiasWithSummaries, TransientGlobalAttention

Choice = Callable[..., Attention | tuple[Attention, ...]]
ATTENTIONS: dict[str, Choice] = {}


def attention_choice(name: str) -> Callable[[Choice], Choice]:
    """Register a row of ATTENTIONS."""

    def register(function: Choice) -> Choice:
        ATTENTIONS[name] = function
        return function

    return register


def choose_attention(text: str, plain: Attention, causal: bool) -> tuple[Attention, ...]:
    """The attention specs that "name" or "name:size=value,…" gives, which the layers take in turn."""
    name, _colon, sizes = text.partition(":")
    function = choose(name, ATTENTIONS, "attention")
    chosen = function(plain, causal, **parse_sizes(name, sizes))
    return chosen if isinstance(chosen, tuple) else (chosen,)


def attention_sizes(name: str) -> dict[str, int]:
    """The sizes that an attention takes, with their defaults."""
    parameters = list(inspect.signature(ATTENTIONS[name]).parameters.values())
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def parse_sizes(name: str, text: str) -> dict[str, int]:
    """Sizes written as "size=256,blocks=3"."""
    known = attention_sizes(name)
    sizes: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        size, _equals, value = item.partition("=")
        if size not in known:
            usual = ", ".join(f"{key}={default}" for key, default in known.items()) or _("none")
            raise BadSetting(
                _(
                    "attention {name} has no size {size!r}, its sizes are {usual}; {nearest}",
                    name=name,
                    size=size,
                    usual=usual,
                    nearest=nearest(size, known),
                )
            )
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise BadSetting(
                _(
                    "attention {name}: {size} must be an integer, got {value!r}; write {name}:{size}={usual}",
                    name=name,
                    size=size,
                    value=value,
                    usual=known[size],
                )
            )
        sizes[size] = int(value)
    return sizes


# --------------------------------------------------------------------------------------------------------- the rows


@attention_choice("full")
def full(plain: Attention, causal: bool) -> Attention:
    """Attention to every token, or to every earlier one."""
    return plain


@attention_choice("window")
def window(plain: Attention, causal: bool, *, size: int = 256) -> Attention:
    """A sliding window: causal, the last `size` tokens; else `size` // 2 on either side."""
    return replace(plain, mask=SlidingWindow(size) if causal else LocalWindow(size // 2))


@attention_choice("linear")
def linear(plain: Attention, causal: bool) -> Attention:
    """Linear attention, elu(x) + 1 in place of the softmax: a state of constant size in decoding."""
    return replace(plain, kernel=LinearAttention())


@attention_choice("xl")
def xl(plain: Attention, causal: bool, *, memory: int = 256) -> Attention:
    """Transformer-XL, for decoders: relative positions, and a memory of the last `memory` tokens."""
    if not causal:
        raise BadSetting(_("attention xl remembers what came before, an encoder cannot; use decoder_attention"))
    _own_position("xl", plain, (Alibi, RelativeBias))
    return xl_attention(plain, memory)


@attention_choice("longformer")
def longformer(plain: Attention, causal: bool, *, window: int = 512) -> Attention:
    """Longformer, for encoders: `window` // 2 tokens on either side, and global tokens; the first token is one."""
    _encoder_only("longformer", causal)
    is_even = window >= 2 and window % 2 == 0
    must(is_even, "longformer", _("window must be even, from 2"), window, _("half of it lies on either side"))
    settings = {**_settings(plain), "mask": LocalWindow(window // 2)}
    return LongformerAttention(**settings, global_tokens=FirstTokenIsGlobal())


@attention_choice("bigbird")
def bigbird(plain: Attention, causal: bool, *, block: int = 64, random: int = 3) -> Attention:
    """BigBird, for encoders: blocks of tokens see their neighbours, the first and last block, and random blocks."""
    _encoder_only("bigbird", causal)
    return BigBirdAttention(**_settings(plain), block_size=block, random_blocks=SeededBlocks(random))


@attention_choice("performer")
def performer(plain: Attention, causal: bool, *, features: int = 256) -> Attention:
    """Performer: softmax attention estimated by random features; a state of constant size in decoding."""
    return replace(plain, kernel=Performer(features))


@attention_choice("linformer")
def linformer(plain: Attention, causal: bool, *, length: int = 4096, features: int = 256) -> Attention:
    """Linformer: `features` learned mixtures of at most `length` positions. Encoders only."""
    _encoder_only("linformer", causal)
    return replace(plain, kernel=Linformer(length, features))


@attention_choice("lsh")
def lsh(plain: Attention, causal: bool, *, chunk: int = 64, rounds: int = 1) -> Attention:
    """LSH attention: chunks of tokens sorted by a hash of their vectors."""
    return LSHAttention(**_settings(plain), chunk=chunk, rounds=rounds)


@attention_choice("reformer")
def reformer(plain: Attention, causal: bool, *, chunk: int = 64, rounds: int = 1) -> tuple[Attention, ...]:
    """Reformer: layers with chunks of neighbours and layers with LSH attention, in turn."""
    settings = _settings(plain)
    local = ChunkedAttention(**settings, chunk=chunk, after=0 if causal else 1, paired_chunk=chunk)
    return local, LSHAttention(**settings, chunk=chunk, rounds=rounds, paired_chunk=chunk)


@attention_choice("longt5")
def longt5(plain: Attention, causal: bool, *, radius: int = 127, block: int = 16) -> Attention:
    """LongT5, for encoders: `radius` tokens on either side, and a summary of each block; its positions are relative."""
    _encoder_only("longt5", causal)
    _own_position("longt5", plain, (Alibi,))
    settings = {**_settings(plain), "mask": LocalWindow(radius), "position": RelativeBiasWithSummaries()}
    return TransientGlobalAttention(**settings, block_size=block)


def _settings(plain: Attention) -> dict[str, Any]:
    """The fields of an attention, for another attention of the same sizes."""
    return {field.name: getattr(plain, field.name) for field in fields(plain)}


def _own_position(name: str, plain: Attention, refused: tuple[type, ...]) -> None:
    """Refuse another bias of the scores beside the relative positions that an attention has itself."""
    position = plain.position
    requirement = _("position must add no bias, for this attention has relative positions of its own")
    must(not isinstance(position, refused), name, requirement, type(position).__name__, _("leave position out"))


def _encoder_only(name: str, causal: bool) -> None:
    if causal:
        raise BadSetting(
            _("attention {name} reads both directions, a decoder cannot; use window, or encoder_attention", name=name)
        )
