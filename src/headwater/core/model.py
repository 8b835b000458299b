"""The Transformer model: an encoder, a decoder or both, and a head. One forward pass for all of them.

encoder-only    ids ── encoder ── head
decoder-only    ids ── decoder ── head
encoder-decoder source ── encoder ── bridge ── memory ─┐
                ids ── decoder (reads the memory) ─────┴── head
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.base import BridgeSpec, HeadSpec, InitSpec
from headwater.core.cache import KVCache, NoCache
from headwater.core.embeddings import ModelInputs, describe
from headwater.core.heads import NoHead
from headwater.core.init import PAPER_INIT, InitRules, SkipInit, materialize
from headwater.core.stack import Stack, TransformerStack
from headwater.errors import BadInput, BadSetting, Unavailable
from headwater.i18n import _
from headwater.parts import must, part

MASK_HINTS = {  # the inputs that are masks
    "attention_mask": _("True = real token; use mask.bool()"),
    "global_tokens": _("True = sees all tokens; give one bool for each token"),
}


@part
class NoBridge(BridgeSpec):
    """The decoder reads the encoder output as it is."""

    def build(self) -> nn.Module:
        return nn.Identity()


@part
class Model:
    """The spec of a model: stacks, head, tied weights and initialization.

    tied: pairs of module paths that share the weight of the second: (("head.out", "decoder.embed.tokens"),).
    init: rules for the initial weights (see init.py); a loaded model does not use them.
    """

    head: HeadSpec = NoHead()
    decoder: Stack | None = None
    encoder: Stack | None = None
    bridge: BridgeSpec = NoBridge()
    tied: tuple[tuple[str, str], ...] = ()
    init: tuple[tuple[str, InitSpec], ...] = PAPER_INIT

    def __post_init__(self) -> None:
        has_stack = self.encoder is not None or self.decoder is not None
        must(has_stack, self, _("encoder or decoder must be given"), None, _("give a Stack"))

    @property
    def max_positions(self) -> int | None:
        """The maximum number of tokens that every stack has positions for; None: no limit."""
        limits = [stack.max_positions for stack in (self.encoder, self.decoder) if stack is not None]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def init_rules(self) -> InitRules:
        """The rules for the initial weights of the whole model."""
        return self.init

    def module(self) -> Transformer:
        """The module of this spec, on the default device."""
        return Transformer(self)

    def build(self, seed: int | None = None, device: torch.device | str = "cpu") -> Transformer:
        """Build the model with initial weights. The spec is checked before any memory is allocated."""
        model = self.on_meta()
        if str(device) != "meta":
            try:
                materialize(model, self.init_rules, seed, device)
            except RuntimeError as error:
                if "allocate" not in str(error):
                    raise
                size = sum(p.numel() * p.element_size() for p in self.on_meta().parameters()) / 1e9
                raise Unavailable(
                    _(
                        "model: {device} lacks {size:,.1f} GB for weights; choose smaller sizes",
                        device=device,
                        size=size,
                    )
                ) from None
        return model

    def on_meta(self) -> Transformer:
        """The model on the meta device: shapes and parameter counts without memory."""
        try:
            with torch.device("meta"), SkipInit():
                return self.module()
        except RuntimeError as error:  # only a size beyond 2**63 bytes fails without memory
            raise BadSetting(
                _("Model: every tensor must have a size a machine can name, {error}; correct it", error=error)
            ) from None


class Transformer(nn.Module):
    """An encoder, a decoder or both, and a head; built from a Model spec."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = spec.encoder.build() if spec.encoder is not None else None
        self.bridge = spec.bridge.build()
        self.decoder = spec.decoder.build() if spec.decoder is not None else None
        if self.encoder is not None and self.decoder is not None:
            widths = (spec.bridge.output_width(self.encoder.spec.output_width), self.decoder.spec.d_model)
            must(
                widths[0] == widths[1],
                spec,
                _("encoder and decoder must have one d_model"),
                widths,
                _("make them equal"),
            )
        self.head = spec.head.build(self.output_stack.spec.output_width)
        self.tie_weights()

    @property
    def output_stack(self) -> TransformerStack:
        """The stack whose hidden states the head reads: the decoder if there is one."""
        stack = self.decoder if self.decoder is not None else self.encoder
        assert stack is not None  # a Model has one of them
        return stack

    def tie_weights(self) -> None:
        """Weight tying: make each tied pair one tensor."""
        for path, home in self.spec.tied:
            target, source = (_get_module(self, name) for name in (path, home))
            weights = [getattr(module, "weight", None) for module in (target, source)]
            must(
                None not in weights,
                "tied",
                _("both paths must have a weight"),
                (path, home),
                _("name layers or tables"),
            )
            shapes = tuple(target.weight.shape), tuple(source.weight.shape)
            must(
                shapes[0] == shapes[1],
                "tied",
                _("{path} and {home} must have one shape", path=path, home=home),
                shapes,
                _("untie them"),
            )
            target.weight = source.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        """As nn.Module; leaving the meta device splits tied tensors, so the weights are tied again."""
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    def forward(
        self,
        ids: Tensor,
        *,
        source: Tensor | None = None,
        attention_mask: Tensor | None = None,
        source_attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        source_document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
        global_tokens: Tensor | None = None,
        source_global_tokens: Tensor | None = None,
    ) -> Tensor:
        """ids [B, Q] -> the output of the head, logits [B, Q, vocab] for a language-model head.

        source [B, S]: the tokens that the encoder of an encoder-decoder reads. See ModelInputs for the other arguments.
        """
        memory = None
        if self.encoder is not None and self.decoder is not None:
            if source is None:
                raise BadInput(_("model: an encoder-decoder needs a source, got none; call model(ids, source=...)"))
            memory = self.encode(
                source,
                attention_mask=source_attention_mask,
                document_ids=source_document_ids,
                global_tokens=source_global_tokens,
            )
        elif source is not None:
            raise BadInput(_("model: it has one stack and takes no source, got one; call model(ids)"))
        inputs = self.inputs(ids, attention_mask, document_ids, positions, token_types, global_tokens)
        return self.head(self.hidden_states(inputs, memory=memory), inputs)

    def encode(
        self,
        source: Tensor,
        *,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        global_tokens: Tensor | None = None,
    ) -> ModelInputs:
        """Run the encoder. The result is the memory that decode() reads: hidden states, padding and document ids."""
        if self.encoder is None:
            raise BadInput(_("model: only an encoder can read a source, there is none; call model(ids)"))
        inputs = self.inputs(source, attention_mask, document_ids, global_tokens=global_tokens, name="source")
        hidden_states = self.encoder(inputs, NoCache())
        return self.bridge(
            ModelInputs(inputs.ids, inputs.attention_mask, inputs.document_ids, hidden_states=hidden_states)
        )

    def decode(
        self,
        ids: Tensor,
        *,
        memory: ModelInputs | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """As forward, with a KV cache: ids [B, Q] are the new tokens, attention_mask is False for their padding."""
        inputs = self.inputs(ids, attention_mask, positions=positions)
        return self.head(self.hidden_states(inputs, memory=memory, cache=cache), inputs)

    def hidden_states(
        self, inputs: ModelInputs, *, memory: ModelInputs | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """The last hidden states [B, Q, D], before the head."""
        if memory is not None:
            _check_memory(memory, inputs)
        if cache is None:
            return self.output_stack(inputs, NoCache(), memory)
        if not torch.compiler.is_compiling():
            if cache.spec is not self.output_stack.spec and cache.spec != self.output_stack.spec:
                raise BadInput(
                    _(
                        "cache: it was made for another model; "
                        "make one with dynamic_cache(model), sliding_cache or static_cache"
                    )
                )
            cache.check_capacity(*inputs.ids.shape)
        return self.output_stack(inputs, cache, memory)

    def inputs(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
        global_tokens: Tensor | None = None,
        name: str = "ids",
    ) -> ModelInputs:
        """The arguments of a forward pass, each checked for dtype and shape. ids: what the embedding reads."""
        stack = self.encoder if name == "source" and self.encoder is not None else self.output_stack
        inputs = replace(
            stack.embed.read(ids, name),
            attention_mask=attention_mask,
            document_ids=document_ids,
            positions=positions,
            token_types=token_types,
            global_tokens=global_tokens,
        )
        for argument in ("attention_mask", "document_ids", "positions", "token_types", "global_tokens"):
            _check_input(inputs, argument, name)
        if global_tokens is not None and not stack.uses_global_tokens:
            raise BadInput(
                _("model: no layer that reads {name} has global tokens, got some; leave global_tokens out", name=name)
            )
        return inputs

    def gradient_checkpointing(self, enabled: bool = True) -> Transformer:
        """Switch gradient checkpointing: less memory for activations, about a third more time, the same results."""
        for stack in (self.encoder, self.decoder):
            if stack is not None:
                stack.gradient_checkpointing = enabled
        return self


def _check_input(inputs: ModelInputs, argument: str, ids_name: str) -> None:
    """Refuse an argument of another dtype or shape than that of the ids."""
    ids = inputs.ids
    value = getattr(inputs, argument)
    if value is None:
        return
    dtype = "bool" if argument in MASK_HINTS else "int"
    allowed = (torch.bool,) if dtype == "bool" else (torch.int64, torch.int32)
    if not isinstance(value, Tensor) or value.dtype not in allowed:
        hint = MASK_HINTS.get(argument, _("use .long()"))
        raise BadInput(
            _(
                "model: {argument} must be {dtype}, got {got}; {hint}",
                argument=argument,
                dtype=dtype,
                got=describe(value),
                hint=hint,
            )
        )
    rows = (1, ids.shape[0]) if argument == "positions" else (ids.shape[0],)
    if value.dim() != 2 or value.shape[1] != ids.shape[1] or value.shape[0] not in rows:
        raise BadInput(
            _(
                "model: {argument} must have the shape of {name} {shape}, got {got}; correct its shape",
                argument=argument,
                name=ids_name,
                shape=tuple(ids.shape),
                got=describe(value),
            )
        )


def _check_memory(memory: ModelInputs, inputs: ModelInputs) -> None:
    """Refuse a memory that is no encoder output, or not of these rows."""
    hidden_states = getattr(memory, "hidden_states", None)
    if hidden_states is None:
        raise BadInput(
            _("model: memory must come from encode(), got {got}; memory = model.encode(source)", got=describe(memory))
        )
    if hidden_states.shape[0] not in (1, inputs.ids.shape[0]):
        got = _("{shape} and {shape2}", shape=hidden_states.shape[0], shape2=inputs.ids.shape[0])
        raise BadInput(_("model: source and ids must have as many rows, got {got}; give each row its source", got=got))
    if (memory.document_ids is None) != (inputs.document_ids is None):
        raise BadInput(
            _("model: document_ids and source_document_ids belong together, got one of them; give both or neither")
        )


def _get_module(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        must(False, "tied", _("every path must name a module"), path, _("see model.named_modules()"))
