"""7. The Transformer: one block, stacked; an encoder, a decoder, or both.

      x ─┬─ norm ─ layer ─ out_norm ─ dropout ─ + ─ post_norm ─→      layer: self_attn, cross_attn, ffn
         └──────────────────────────────────────┘
pre-norm has only `norm`, post-norm (the 2017 paper) only `post_norm`, sandwich both `norm` and `out_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headwater.errors import BadInput
from headwater.reference.attention import View, multi_head
from headwater.reference.config import Config, checked, initial
from headwater.reference.gradients import Array, Back, Layer, Parameters, chain, identity
from headwater.reference.masks import Tokens, cross_mask, lay_out, self_mask
from headwater.reference.ops import NORMS, feed_forward, linear, lookup, no_dropout
from headwater.reference.positions import POSITIONS, NoPosition


@dataclass
class Memory:
    """An encoder's output, read by every layer of the decoder; their gradients gather here."""

    value: Array  # [B, S, D]
    tokens: Tokens
    gradient: Array


@dataclass(frozen=True)
class Run:
    """What one forward pass carries along."""

    config: Config
    w: Parameters
    drop: Layer
    seen: dict[str, Array]


def norm(x: Array, w: Parameters, config: Config) -> tuple[Array, Back]:
    """The norm of a slot; a slot without weights is empty and changes nothing."""
    return NORMS[config.norm](x, w, config.eps) if "weight" in w else (x, identity)


def branch(x: Array, role: str, layer: Layer, w: Parameters, run: Run) -> tuple[Array, Back]:
    """x → post_norm(x + dropout(out_norm(layer(norm(x)))))"""
    y, norm_back = norm(x, w / f"{role}_norm", run.config)
    y, layer_back = layer(y)
    y, out_norm_back = norm(y, w / f"{role}_out_norm", run.config)
    y, drop_back = run.drop(y)
    y, post_norm_back = norm(x + y, w / f"{role}_post_norm", run.config)

    def back(dy: Array) -> Array:
        # the gradient reaches x twice: straight along the residual stream, and through the layer
        dsum = post_norm_back(dy)
        return dsum + norm_back(layer_back(out_norm_back(drop_back(dsum))))

    return y, back


def block(
    x: Array, w: Parameters, run: Run, own: View, other: View | None, memory: Memory | None
) -> tuple[Array, Back]:
    """Tokens read one another, then what the encoder wrote if there is one, then each thinks alone."""
    heads = run.config.heads

    def self_attn(x: Array) -> tuple[Array, Back]:
        y, attention_back = multi_head(x, x, w / "self_attn", heads, own)
        return y, lambda dy: sum(attention_back(dy))  # x asked, and x answered

    def cross_attn(x: Array) -> tuple[Array, Back]:
        assert memory is not None and other is not None
        y, attention_back = multi_head(x, memory.value, w / "cross_attn", heads, other)

        def back(dy: Array) -> Array:
            dx, dmemory = attention_back(dy)
            memory.gradient = memory.gradient + dmemory
            return dx

        return y, back

    def ffn(x: Array) -> tuple[Array, Back]:
        return feed_forward(x, w / "ffn", run.config.activation, run.drop)

    x, self_back = branch(x, "self_attn", self_attn, w, run)
    x, cross_back = branch(x, "cross_attn", cross_attn, w, run) if memory else (x, identity)
    x, ffn_back = branch(x, "ffn", ffn, w, run)
    return x, chain([self_back, cross_back, ffn_back])


def embed(tokens: Tokens, stack: str, run: Run) -> tuple[Array, Back]:
    """x = dropout(√D · E[ids] + position): only the embedding is scaled, and not beside a learned table."""
    scale = 1.0 if run.config.position == "learned" else math.sqrt(run.config.d_model)
    vectors, table_back = lookup(tokens.ids, run.w / run.config.table(stack))
    position = POSITIONS[run.config.position](run.config, run.w / stack)
    x, position_back = position.add(vectors * scale, tokens.places)
    x, drop_back = run.drop(x)
    return x, lambda dx: table_back(position_back(drop_back(dx)) * scale)


def run_stack(tokens: Tokens, stack: str, run: Run, memory: Memory | None = None) -> tuple[Array, Back]:
    """Embedding, blocks, last norm: [B, Q] ids → [B, Q, D]. A decoder sees the past, an encoder everyone."""
    config, w, places = run.config, run.w / stack, tokens.places
    allowed, other = self_mask(tokens, causal=stack == "decoder", window=config.window), None
    if memory is not None:
        nowhere, there = NoPosition(config, w), memory.tokens
        other = View(cross_mask(tokens, there), places, there.places, nowhere, run.drop, run.seen)
    x, back = embed(tokens, stack, run)
    backs = [back]
    for i in range(config.layers):
        own = View(allowed, places, places, POSITIONS[config.position](config, w, layer=i), run.drop, run.seen)
        x, back = block(x, w / f"layers.{i}", run, own, other, memory)
        backs.append(back)
    x, back = norm(x, w / "final_norm", config)
    return x, chain([*backs, back])


class Transformer:
    """A config and its weights. A call gives logits [B, Q, vocab], and the way back to the gradient of every weight.

    >>> model = Transformer(Config(vocab=11, shape="decoder", d_model=8, heads=2, layers=1, d_ff=16))
    >>> logits, back = model(np.array([[1, 2, 3]]))
    >>> gradients = back(np.ones_like(logits))
    >>> logits.shape, gradients.keys() == model.values.keys()
    ((1, 3, 11), True)
    """

    def __init__(self, config: Config, values: dict[str, Array] | None = None, seed: int = 0) -> None:
        self.config = config
        self.values = initial(config, seed) if values is None else checked(config, values)

    def __call__(
        self,
        ids: Array,
        *,
        source: Array | None = None,
        keep: Array | None = None,
        source_keep: Array | None = None,
        documents: Array | None = None,
        source_documents: Array | None = None,
        drop: Layer = no_dropout,
        seen: dict[str, Array] | None = None,
    ) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
        """keep: True = a real token. seen, if given, is filled with the attention weights [B, H, Q, S] by path."""
        self._check_source(given=source is not None)
        if source is not None and (documents is None) != (source_documents is None):
            raise BadInput("documents must be given for ids and source, got one of them; number both alike")
        run = Run(self.config, Parameters(self.values), drop, {} if seen is None else seen)
        memory: Memory | None = None
        encoder_back: Back = identity
        if source is not None:
            memory, encoder_back = self._encode(source, source_keep, source_documents, run)
        logits, decoder_back = self._decode(ids, keep, documents, memory, run)

        def back(dlogits: Array) -> dict[str, Array]:
            run.w.gradients.clear()  # asked a second time, it begins anew
            if memory is not None:
                memory.gradient = np.zeros_like(memory.value)
            decoder_back(dlogits)
            if memory is not None:
                encoder_back(memory.gradient)
            return dict(run.w.gradients)

        return logits, back

    def encode(self, source: Array, keep: Array | None = None) -> Memory:
        """What the encoder writes, to be read by many calls of `decode`."""
        return self._encode(source, keep, None, Run(self.config, Parameters(self.values), no_dropout, {}))[0]

    def decode(self, ids: Array, keep: Array | None = None, memory: Memory | None = None) -> Array:
        """The logits alone."""
        self._check_source(given=memory is not None)
        return self._decode(ids, keep, None, memory, Run(self.config, Parameters(self.values), no_dropout, {}))[0]

    def _check_source(self, given: bool) -> None:
        if given != (self.config.shape == "encoder_decoder"):
            wanted, came = ("no source", "one") if given else ("a source", "none")
            raise BadInput(f"a model of shape {self.config.shape} must be given {wanted}, got {came}; mend the call")

    def _encode(self, source: Array, keep: Array | None, documents: Array | None, run: Run) -> tuple[Memory, Back]:
        check_ids(source, "source", self.config.source_vocab)
        tokens = lay_out(source, keep, documents)
        value, back = run_stack(tokens, "encoder", run)
        return Memory(value, tokens, np.zeros_like(value)), back

    def _decode(
        self, ids: Array, keep: Array | None, documents: Array | None, memory: Memory | None, run: Run
    ) -> tuple[Array, Back]:
        """Through the last stack, whichever it is, and the map to the vocabulary."""
        check_ids(ids, "ids", self.config.vocab)
        hidden, stack_back = run_stack(lay_out(ids, keep, documents), self.config.stacks[-1], run, memory)
        logits, head_back = linear(hidden, run.w / self.config.output)
        return logits, chain([stack_back, head_back])


def check_ids(ids: Array, name: str, vocab: int) -> None:
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        came = f"{ids.dtype} {list(ids.shape)}"
        raise BadInput(f"{name} must be whole numbers [batch, length], got {came}; add a batch dimension")
    if not 0 <= ids.min() <= ids.max() < vocab:
        came = f"{ids.min()} to {ids.max()}"
        raise BadInput(f"{name} must be from 0 to {vocab - 1}, got {came}; is it another model's vocabulary?")
