"""A model: up to two stacks and a head. One forward pass serves the whole family.

encoder-only    ids ── encoder ── head
decoder-only    ids ── decoder ── head
both            source ── encoder ── bridge ── memory ─┐
                ids ── decoder (reads the memory) ─────┴── head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.cache import NoCache
from headwater.core.embed import Rows
from headwater.core.heads import NoHead
from headwater.core.init import PAPER, NoFirstWeights, materialise
from headwater.core.kinds import Between, Filling, Head
from headwater.core.stack import Stack
from headwater.errors import BadInput, BadSetting, Unavailable
from headwater.parts import must, part


@part
class NoBridge(Between):
    """The decoder reads what the encoder wrote."""

    def build(self) -> nn.Module:
        return Bridge()


@part
class MeanPool(Between):
    """Cross-attention down-sampling: the decoder reads the means of each `factor` neighbouring states."""

    factor: int

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, "factor must be at least 1", self.factor, "2 halves the source")

    def build(self) -> nn.Module:
        return MeanPoolBridge(self.factor)


class Bridge(nn.Module):
    def forward(self, memory: Rows) -> Rows:
        return memory


class MeanPoolBridge(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, memory: Rows) -> Rows:
        x = memory.states
        if x is None or memory.documents is not None:
            raise BadInput("bridge: packed documents cannot be pooled, got some; give one document a row")
        spare = -x.shape[1] % self.factor
        keep = torch.ones_like(memory.ids, dtype=torch.bool) if memory.keep is None else memory.keep
        if memory.keep is not None:  # real states to the front, so that padding on the left shifts no group
            order = (~keep).byte().argsort(dim=1, stable=True)
            keep, x = keep.gather(1, order), torch.take_along_dim(x, order[:, :, None], 1)
        keep = nn.functional.pad(keep, (0, spare)).unflatten(1, (-1, self.factor))
        x = nn.functional.pad(x, (0, 0, 0, spare)).unflatten(1, (-1, self.factor))
        real = keep[..., None].to(x.dtype)
        pooled = (x * real).sum(2) / real.sum(2).clamp(min=1)
        return Rows(memory.ids, keep.any(2), states=pooled)


@part
class Model:
    """tied: pairs of paths that share one weight, the second its home: (("head.out", "decoder.embed.tokens"),).

    init: rules for the first weights (see init.py). They change no answer of a loaded model.
    """

    head: Head = NoHead()
    decoder: Stack | None = None
    encoder: Stack | None = None
    bridge: Between = NoBridge()
    tied: tuple[tuple[str, str], ...] = ()
    init: tuple[tuple[str, Filling], ...] = PAPER

    def __post_init__(self) -> None:
        some = self.encoder is not None or self.decoder is not None
        must(some, self, "encoder or decoder must be given", None, "give a Stack")

    def build(self, seed: int | None = None, device: torch.device | str = "cpu") -> Transformer:
        """The model with its first weights. Everything is checked, and counted, before any memory is asked for."""
        model = self.skeleton()
        if str(device) != "meta":
            try:
                materialise(model, self.init, seed, device)
            except RuntimeError as error:
                if "allocate" not in str(error):
                    raise
                size = sum(p.numel() * p.element_size() for p in self.skeleton().parameters()) / 1e9
                raise Unavailable(f"model: {device} lacks {size:,.1f} GB for weights; choose smaller sizes") from None
        return model

    def skeleton(self) -> Transformer:
        """The model without memory (meta device): shapes and counts only."""
        try:
            with torch.device("meta"), NoFirstWeights():
                return Transformer(self)
        except RuntimeError as error:  # only a size beyond 2**63 bytes fails without memory
            raise BadSetting(f"Model: every tensor must have a size a machine can name, {error}; correct it") from None


class Transformer(nn.Module):
    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = spec.encoder.build() if spec.encoder is not None else None
        self.bridge = spec.bridge.build()
        self.decoder = spec.decoder.build() if spec.decoder is not None else None
        if self.encoder is not None and self.decoder is not None:
            widths = self.encoder.spec.d_model, self.decoder.spec.d_model
            must(widths[0] == widths[1], spec, "encoder and decoder must have one d_model", widths, "make them equal")
        self.head = spec.head.build(self.writer.spec.d_model)
        self.tie()

    @property
    def writer(self) -> Any:
        """The stack whose states the head reads."""
        return self.decoder if self.decoder is not None else self.encoder

    def tie(self) -> None:
        """Make each tied pair one tensor."""
        for path, home in self.spec.tied:
            target, source = (_module(self, name) for name in (path, home))
            weights = [getattr(module, "weight", None) for module in (target, source)]
            must(None not in weights, "tied", "both paths must have a weight", (path, home), "name layers or tables")
            shapes = tuple(target.weight.shape), tuple(source.weight.shape)
            must(shapes[0] == shapes[1], "tied", f"{path} and {home} must have one shape", shapes, "untie them")
            target.weight = source.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        """As every module moves; but on leaving meta each user of a tied tensor gets its own, so tie them anew."""
        super()._apply(fn, recurse)
        self.tie()
        return self

    def forward(
        self,
        ids: Tensor,
        *,
        source: Tensor | None = None,
        keep: Tensor | None = None,
        source_keep: Tensor | None = None,
        documents: Tensor | None = None,
        source_documents: Tensor | None = None,
        places: Tensor | None = None,
        kinds: Tensor | None = None,
    ) -> Tensor:
        """ids [B, Q] -> what the head says, [B, Q, vocab] for a language head. See Rows for the other arguments."""
        memory = None
        if self.encoder is not None and self.decoder is not None:
            if source is None:
                raise BadInput("model: an encoder-decoder needs a source, got none; call model(ids, source=...)")
            memory = self.encode(source, keep=source_keep, documents=source_documents)
        elif source is not None:
            raise BadInput("model: it has one stack and takes no source, got one; call model(ids)")
        rows = self.rows(ids, keep, documents, places, kinds)
        return self.head(self.states(rows, memory=memory), rows)

    def encode(self, source: Tensor, *, keep: Tensor | None = None, documents: Tensor | None = None) -> Rows:
        """The memory that decode() reads: the encoder's states, with what is known of the source."""
        if self.encoder is None:
            raise BadInput("model: only an encoder can read a source, there is none; call model(ids)")
        rows = self.rows(source, keep, documents, None, None, "source")
        states = self.encoder(rows, NoCache())
        return self.bridge(Rows(rows.ids, rows.keep, rows.documents, states=states))

    def decode(
        self,
        ids: Tensor,
        *,
        memory: Rows | None = None,
        keep: Tensor | None = None,
        places: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """As forward, after a cache: ids are the new tokens only, keep says which of them are real."""
        rows = self.rows(ids, keep, None, places, None)
        return self.head(self.states(rows, memory=memory, cache=cache), rows)

    def states(self, rows: Rows, *, memory: Rows | None = None, cache: Any = None) -> Tensor:
        """The last hidden states [B, Q, D], before the head."""
        if memory is not None:
            _check_memory(memory, rows)
        if cache is None:
            return self.writer(rows, NoCache(), memory)
        if not torch.compiler.is_compiling():
            if cache.made_for is not self.writer.spec and cache.made_for != self.writer.spec:
                raise BadInput("cache: it was made for another model; make one with growing(model), rolling or fixed")
            cache.admit(*rows.ids.shape)
        return self.writer(rows, cache, memory)

    def rows(
        self,
        ids: Tensor,
        keep: Tensor | None,
        documents: Tensor | None,
        places: Tensor | None,
        kinds: Tensor | None,
        name: str = "ids",
    ) -> Rows:
        """The arguments of a call, each checked for kind and shape."""
        whole = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32) and ids.dim() == 2
        if not whole or not ids.shape[1]:
            came = _told(ids)
            raise BadInput(f"model: {name} must be int64 or int32 [batch, length], got {came}; mend its type or shape")
        for what, given, kind in (
            ("keep", keep, "bool"),
            ("documents", documents, "int"),
            ("places", places, "int"),
            ("kinds", kinds, "int"),
        ):
            if given is not None:
                _check(what, given, kind, ids, name)
        return Rows(ids, keep, documents, places, kinds)

    def recompute(self, on: bool = True) -> Transformer:
        """Gradient checkpointing: less memory for activations, about a third more time. Answers do not change."""
        for stack in (self.encoder, self.decoder):
            if stack is not None:
                stack.recompute = on
        return self


def _check(what: str, given: Tensor, kind: str, ids: Tensor, name: str) -> None:
    kinds = (torch.bool,) if kind == "bool" else (torch.int64, torch.int32)
    if not isinstance(given, Tensor) or given.dtype not in kinds:
        hint = "True = real token; use mask.bool()" if kind == "bool" else "use .long()"
        raise BadInput(f"model: {what} must be {kind}, got {_told(given)}; {hint}")
    rows = (1, ids.shape[0]) if what == "places" else (ids.shape[0],)
    if given.dim() != 2 or given.shape[1] != ids.shape[1] or given.shape[0] not in rows:
        came = _told(given)
        raise BadInput(f"model: {what} must have the shape of {name} {tuple(ids.shape)}, got {came}; mend its shape")


def _check_memory(memory: Rows, rows: Rows) -> None:
    states = getattr(memory, "states", None)
    if states is None:
        raise BadInput(f"model: memory must come from encode(), got {_told(memory)}; memory = model.encode(source)")
    if states.shape[0] not in (1, rows.ids.shape[0]):
        came = f"{states.shape[0]} and {rows.ids.shape[0]}"
        raise BadInput(f"model: source and ids must have as many rows, got {came}; give each row its source")
    if (memory.documents is None) != (rows.documents is None):
        raise BadInput("model: documents and source_documents belong together, got one of them; give both or neither")


def _told(t: Any) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__


def _module(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        must(False, "tied", "every path must name a module", path, "see model.named_modules()")
