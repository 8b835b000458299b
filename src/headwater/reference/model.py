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
from headwater.i18n import _
from headwater.reference.attention import AttentionContext, multi_head
from headwater.reference.config import Config, check_weights, init_weights
from headwater.reference.gradients import Array, Backward, Layer, Parameters, chain, identity
from headwater.reference.masks import Tokens, cross_mask, prepare_tokens, self_mask
from headwater.reference.ops import NORMS, feed_forward, linear, lookup, no_dropout
from headwater.reference.positions import POSITIONS, NoPosition


@dataclass
class Memory:
    """The encoder's output, read by every layer of the decoder; their gradients are summed in `gradient`."""

    value: Array  # [B, S, D]
    tokens: Tokens
    gradient: Array


@dataclass(frozen=True)
class ForwardContext:
    """The arguments of a forward pass that every layer needs: config, parameters, dropout, attention weights."""

    config: Config
    w: Parameters
    drop: Layer
    attention_weights: dict[str, Array]  # [B, H, Q, S], by path


def norm(x: Array, w: Parameters, config: Config) -> tuple[Array, Backward]:
    """LayerNorm or RMSNorm; the identity where there is no weight."""
    return NORMS[config.norm](x, w, config.eps) if "weight" in w else (x, identity)


def branch(x: Array, role: str, layer: Layer, w: Parameters, context: ForwardContext) -> tuple[Array, Backward]:
    """Residual branch: x → post_norm(x + dropout(out_norm(layer(norm(x)))))."""
    y, norm_backward = norm(x, w / f"{role}_norm", context.config)
    y, layer_backward = layer(y)
    y, out_norm_backward = norm(y, w / f"{role}_out_norm", context.config)
    y, drop_backward = context.drop(y)
    y, post_norm_backward = norm(x + y, w / f"{role}_post_norm", context.config)

    def backward(dy: Array) -> Array:
        # the gradient reaches x on two paths: along the residual stream, and through the layer
        dsum = post_norm_backward(dy)
        return dsum + norm_backward(layer_backward(out_norm_backward(drop_backward(dsum))))

    return y, backward


def block(
    x: Array,
    w: Parameters,
    context: ForwardContext,
    self_context: AttentionContext,
    cross_context: AttentionContext | None,
    memory: Memory | None,
) -> tuple[Array, Backward]:
    """One Transformer layer: self-attention, cross-attention if there is a memory, feed-forward."""
    heads = context.config.heads

    def self_attn(x: Array) -> tuple[Array, Backward]:
        y, attention_backward = multi_head(x, x, w / "self_attn", heads, self_context)
        return y, lambda dy: sum(attention_backward(dy))  # x is query, key and value

    def cross_attn(x: Array) -> tuple[Array, Backward]:
        assert memory is not None and cross_context is not None
        y, attention_backward = multi_head(x, memory.value, w / "cross_attn", heads, cross_context)

        def backward(dy: Array) -> Array:
            dx, dmemory = attention_backward(dy)
            memory.gradient = memory.gradient + dmemory
            return dx

        return y, backward

    def ffn(x: Array) -> tuple[Array, Backward]:
        return feed_forward(x, w / "ffn", context.config.activation, context.drop)

    x, self_backward = branch(x, "self_attn", self_attn, w, context)
    x, cross_backward = branch(x, "cross_attn", cross_attn, w, context) if memory else (x, identity)
    x, ffn_backward = branch(x, "ffn", ffn, w, context)
    return x, chain([self_backward, cross_backward, ffn_backward])


def embed(tokens: Tokens, stack: str, context: ForwardContext) -> tuple[Array, Backward]:
    """Input embedding: x = dropout(√D · E[ids] + position); not scaled if the positions are learned."""
    scale = 1.0 if context.config.position == "learned" else math.sqrt(context.config.d_model)
    vectors, table_backward = lookup(tokens.ids, context.w / context.config.table(stack))
    position = POSITIONS[context.config.position](context.config, context.w / stack)
    x, position_backward = position.add(vectors * scale, tokens.positions)
    x, drop_backward = context.drop(x)
    return x, lambda dx: table_backward(position_backward(drop_backward(dx)) * scale)


def run_stack(
    tokens: Tokens, stack: str, context: ForwardContext, memory: Memory | None = None
) -> tuple[Array, Backward]:
    """Embedding, layers, final norm: [B, Q] ids → [B, Q, D]. A decoder is causal, an encoder bidirectional."""
    # masks
    config = context.config
    w = context.w / stack
    positions = tokens.positions
    allowed = self_mask(tokens, causal=stack == "decoder", window=config.window)
    cross_context = None
    if memory is not None:
        no_position = NoPosition(config, w)
        source_tokens = memory.tokens
        cross_context = AttentionContext(
            cross_mask(tokens, source_tokens),
            positions,
            source_tokens.positions,
            no_position,
            context.drop,
            context.attention_weights,
        )

    # embedding, layers, final norm
    x, backward = embed(tokens, stack, context)
    backwards = [backward]
    for i in range(config.layers):
        self_context = AttentionContext(
            allowed,
            positions,
            positions,
            POSITIONS[config.position](config, w, layer=i),
            context.drop,
            context.attention_weights,
        )
        x, backward = block(x, w / f"layers.{i}", context, self_context, cross_context, memory)
        backwards.append(backward)
    x, backward = norm(x, w / "final_norm", config)
    return x, chain([*backwards, backward])


class Transformer:
    """The Transformer: a config and its weights. A call returns logits [B, Q, vocab] and the backward function.

    >>> model = Transformer(Config(vocab=11, shape="decoder", d_model=8, heads=2, layers=1, d_ff=16))
    >>> logits, backward = model(np.array([[1, 2, 3]]))
    >>> gradients = backward(np.ones_like(logits))
    >>> logits.shape, gradients.keys() == model.values.keys()
    ((1, 3, 11), True)
    """

    def __init__(self, config: Config, values: dict[str, Array] | None = None, seed: int = 0) -> None:
        self.config = config
        self.values = init_weights(config, seed) if values is None else check_weights(config, values)

    def __call__(
        self,
        ids: Array,
        *,
        source: Array | None = None,
        attention_mask: Array | None = None,
        source_attention_mask: Array | None = None,
        document_ids: Array | None = None,
        source_document_ids: Array | None = None,
        drop: Layer = no_dropout,
        attention_weights: dict[str, Array] | None = None,
    ) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
        """Logits [B, Q, vocab] of token ids [B, Q], and the backward function.

        attention_mask: False = padding. attention_weights: a dict that receives them, [B, H, Q, S] by path.
        """
        self._check_source(source is not None)
        if source is not None and (document_ids is None) != (source_document_ids is None):
            raise BadInput(_("document_ids must be given for ids and source, got one of them; number both alike"))
        context = ForwardContext(
            self.config, Parameters(self.values), drop, {} if attention_weights is None else attention_weights
        )

        # encoder, if there is a source, then the last stack
        memory: Memory | None = None
        encoder_backward: Backward = identity
        if source is not None:
            memory, encoder_backward = self._encode(source, source_attention_mask, source_document_ids, context)
        logits, decoder_backward = self._decode(ids, attention_mask, document_ids, memory, context)

        def backward(dlogits: Array) -> dict[str, Array]:
            context.w.gradients.clear()  # a second call starts again from zero
            if memory is not None:
                memory.gradient = np.zeros_like(memory.value)
            decoder_backward(dlogits)
            if memory is not None:
                encoder_backward(memory.gradient)
            return dict(context.w.gradients)

        return logits, backward

    def encode(self, source: Array, attention_mask: Array | None = None) -> Memory:
        """The encoder output, to be read by many calls of `decode`."""
        return self._encode(
            source, attention_mask, None, ForwardContext(self.config, Parameters(self.values), no_dropout, {})
        )[0]

    def decode(self, ids: Array, attention_mask: Array | None = None, memory: Memory | None = None) -> Array:
        """The logits, without a backward function: for decoding."""
        self._check_source(memory is not None)
        return self._decode(
            ids, attention_mask, None, memory, ForwardContext(self.config, Parameters(self.values), no_dropout, {})
        )[0]

    def _check_source(self, has_source: bool) -> None:
        """Raise BadInput unless there is a source exactly where the model has two stacks."""
        if has_source != (self.config.shape == "encoder_decoder"):
            expected, got = (_("no source"), _("one")) if has_source else (_("a source"), _("none"))
            raise BadInput(
                _(
                    "a model of shape {shape} must be given {expected}, got {got}; correct the call",
                    shape=self.config.shape,
                    expected=expected,
                    got=got,
                )
            )

    def _encode(
        self, source: Array, attention_mask: Array | None, document_ids: Array | None, context: ForwardContext
    ) -> tuple[Memory, Backward]:
        check_ids(source, "source", self.config.source_vocab)
        tokens = prepare_tokens(source, attention_mask, document_ids)
        value, backward = run_stack(tokens, "encoder", context)
        return Memory(value, tokens, np.zeros_like(value)), backward

    def _decode(
        self,
        ids: Array,
        attention_mask: Array | None,
        document_ids: Array | None,
        memory: Memory | None,
        context: ForwardContext,
    ) -> tuple[Array, Backward]:
        """The last stack, whichever it is, and the projection to the vocabulary."""
        check_ids(ids, "ids", self.config.vocab)
        hidden, stack_backward = run_stack(
            prepare_tokens(ids, attention_mask, document_ids), self.config.stacks[-1], context, memory
        )
        logits, head_backward = linear(hidden, context.w / self.config.output)
        return logits, chain([stack_backward, head_backward])


def check_ids(ids: Array, name: str, vocab: int) -> None:
    """Raise BadInput unless these are token ids [B, Q] of the vocabulary."""
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        got = f"{ids.dtype} {list(ids.shape)}"
        raise BadInput(
            _("{name} must be integers [batch, length], got {got}; add a batch dimension", name=name, got=got)
        )
    if not 0 <= ids.min() <= ids.max() < vocab:
        got = _("{min} to {max}", min=ids.min(), max=ids.max())
        raise BadInput(
            _(
                "{name} must be from 0 to {max}, got {got}; is it another model's vocabulary?",
                name=name,
                max=vocab - 1,
                got=got,
            )
        )
