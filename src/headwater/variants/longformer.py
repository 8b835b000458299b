"""Longformer: a sliding window both ways, and global tokens with their own projections (Beltagy et al. 2020).

            keys               window of 2, token 0 global
            ■ ■ ■ ■ ■ ■ ■      a global token sees every token, through q_global, k_global, v_global
            ■ ■ ■ · · · ·
            ■ ■ ■ ■ · · ·      every other token sees its window and the global tokens, through q, k, v
            ■ · ■ ■ ■ · ·
    queries ■ · · ■ ■ ■ ·
            ■ · · · ■ ■ ■
            ■ · · · · ■ ■

Time and memory are O(S · (window + global tokens)). Global tokens come with the call (ModelInputs.global_tokens); where
it has none, a rule of the spec chooses them.
B batch, H heads, G key/value heads, S tokens, E global tokens of the row that has most, K head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import functional
from headwater.core.attention import Attention, AttentionLayer, ForwardContext, MaskGroup, split_heads
from headwater.core.banded import Band, GivenRows, LeadingIndex
from headwater.core.embeddings import ModelInputs
from headwater.core.kernels import SDPA, Eager
from headwater.core.masks import LocalWindow, MaskRule, WindowSize
from headwater.core.model import Transformer
from headwater.core.positions import CosSin, PositionEncoding
from headwater.errors import BadInput
from headwater.i18n import Message, _
from headwater.parts import must, part, swap

# ------------------------------------------------------------------------------------------- which tokens are global


class GlobalTokens(ABC):
    """A rule that chooses the global tokens where the call names none."""

    @abstractmethod
    def select(self, inputs: ModelInputs) -> Tensor | None:
        """[B, S], True = global; None: no token is."""


@part
class NoGlobalTokens(GlobalTokens):
    """No token is global unless the call says so."""

    def select(self, inputs: ModelInputs) -> Tensor | None:
        return None


@part
class FirstTokenIsGlobal(GlobalTokens):
    """The first token that is not padding, of each document: what a classifier reads."""

    def select(self, inputs: ModelInputs) -> Tensor | None:
        mask = inputs.attention_mask
        documents = inputs.document_ids
        if documents is not None:
            return (documents != F.pad(documents[:, :-1], (1, 0))) & (documents > 0)
        first = torch.zeros_like(inputs.ids, dtype=torch.bool)
        first[:, 0] = True
        return first if mask is None else mask & (mask.cumsum(1) == 1)


@part
class QuestionIsGlobal(GlobalTokens):
    """The tokens before the first separator; a row must have exactly `count` separators."""

    separator: int
    count: int = 3

    def select(self, inputs: ModelInputs) -> Tensor | None:
        separators = (inputs.ids == self.separator).cumsum(1)
        if separators.is_meta:
            return None
        wrong = separators[:, -1] != self.count
        if wrong.any():
            raise BadInput(
                _(
                    "QuestionIsGlobal: each row must have {count} separators (id {separator}), got {got}; "
                    "mark the question with global_tokens=",
                    count=self.count,
                    separator=self.separator,
                    got=int(separators[wrong][0, -1]),
                )
            )
        return separators == 0


def global_tokens_at(ids: Tensor, positions: Sequence[int]) -> Tensor:
    """[B, S]: True at these positions of every row, for model(ids, global_tokens=...)."""
    length = ids.shape[1]
    for position in positions:
        if not 0 <= position < length:
            raise BadInput(
                _(
                    "global_tokens: a position must be from 0 to {last}, got {position}; the row has {length} tokens",
                    last=length - 1,
                    position=position,
                    length=length,
                )
            )
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, list(positions)] = True
    return mask


# -------------------------------------------------------------------------------------------------------- the attention


@part
class LongformerAttention(Attention):
    """Longformer's self-attention: the window of `mask`, and global tokens (see GlobalTokens). For encoders.

    A token sees the keys of its window and the global tokens; a global token sees every token.
    """

    mask: MaskRule = LocalWindow(256)
    global_tokens: GlobalTokens = NoGlobalTokens()

    def __post_init__(self) -> None:
        super().__post_init__()
        back, ahead = self.mask.window_size
        hint = _("give LocalWindow(size) in an encoder; a decoder takes Attention with SlidingWindow(size)")
        must(back is not None and bool(ahead), self, _("mask must be a window on both sides"), self.mask, hint)
        hint = _("the kernel is its own")
        must(self.kernel in (SDPA(), Eager()), self, _("kernel must be SDPA or Eager"), self.kernel, hint)

    @property
    def unsupported(self) -> Mapping[str, Message]:
        return {"bias": _("use position learned, sinusoidal or rotary")}

    @property
    def receptive_field(self) -> WindowSize:
        return self.mask.window_size if self.global_tokens == NoGlobalTokens() else (None, None)

    def build(self, d_model: int) -> AttentionLayer:
        return LongformerLayer(self, d_model)


@dataclass(frozen=True)
class GlobalIndex:
    """The global tokens of each row, E places a row. index [B, E]: which tokens; present [B, E]: False for a filler."""

    is_global: Tensor  # [B, S]
    index: Tensor
    present: Tensor

    @staticmethod
    def build(is_global: Tensor | None, inputs: ModelInputs) -> GlobalIndex | None:
        """None where no token is global. A padded token is not."""
        if is_global is None or is_global.is_meta:
            return None
        if inputs.attention_mask is not None:
            is_global = is_global & inputs.attention_mask
        width = int(is_global.sum(1).max())
        index = is_global.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        return GlobalIndex(is_global, index, is_global.gather(1, index)) if width else None

    def gather(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> [B, E, ...]: the values of the global tokens."""
        rows = torch.arange(len(self.index), device=x.device)[:, None]
        return x[rows, self.index]

    def rotary(self, cos_sin: CosSin | None) -> CosSin | None:
        """The rotary tables at the global tokens: [B|1, 1, S, n] -> [B, 1, E, n]."""
        if cos_sin is None:
            return None
        cos, sin = (self.gather(t[:, 0].expand(len(self.index), -1, -1))[:, None] for t in cos_sin)
        return cos, sin

    def rows_of(self, out: Tensor, order: Tensor | None) -> GivenRows:
        """out [B, H, E, K] of the global tokens as rows of the output; order [B, S]: that of the tokens, if changed."""
        rows, places = self.present.nonzero(as_tuple=True)
        query = self.index[rows, places]
        if order is not None:
            query = order.argsort(1)[rows, query]
        return GivenRows(rows, query, out.transpose(1, 2)[rows, places])


class LongformerLayer(AttentionLayer):
    """The projections of LongformerAttention, and a second set for global tokens."""

    uses_global_tokens = True
    calls_kernel = False
    spec: LongformerAttention

    def __init__(self, spec: LongformerAttention, d_model: int) -> None:
        super().__init__(spec, d_model)
        self.q_global = nn.Linear(d_model, self.q.out_features, "q" in spec.bias)
        self.k_global = nn.Linear(d_model, self.k.out_features, "k" in spec.bias)
        self.v_global = nn.Linear(d_model, self.v.out_features, "v" in spec.bias)

    @property
    def needs_mask_tensor(self) -> bool:
        return False

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        inputs = context.inputs
        chosen = self.spec.global_tokens.select(inputs) if inputs.global_tokens is None else inputs.global_tokens
        globals_ = GlobalIndex.build(chosen, inputs)
        group = context.mask_groups[self.mask_group]
        q, k, v = self._project(x, group)
        if self.kernel.weights.has_hooks:
            return self.merge_heads(self._dense(x, (q, k, v), inputs, globals_, group))

        # global tokens see every token, the others their window and the global tokens
        out_global = None if globals_ is None else self._global_rows(x, inputs, globals_, group)
        out = self._windowed(q, k, v, inputs, globals_, out_global)  # [B, H, S, K]
        if inputs.attention_mask is not None:
            out = out.masked_fill(~inputs.attention_mask[:, None, :, None], 0)  # padding sees nothing
        return self.merge_heads(out)

    def _project(self, x: Tensor, group: MaskGroup) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, S, K], k and v [B, G, S, K] of every token."""
        q, k, v = functional.linears(x, self.q, self.k, self.v)
        q = self.q_norm(split_heads(q, self.heads))
        k = self.k_norm(split_heads(k, self.kv_heads))
        q, k = group.mask.position.rotate(q, k, group.cos_sin)
        return q, k, split_heads(v, self.kv_heads)

    def _project_global(self, x: Tensor, group: MaskGroup) -> tuple[Tensor, Tensor]:
        """k and v [B, G, S, K] of every token, for global tokens to see."""
        k, v = (split_heads(t, self.kv_heads) for t in functional.linears(x, self.k_global, self.v_global))
        return _rotated(k, group.mask.position, group.cos_sin), v

    def _windowed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: ModelInputs,
        globals_: GlobalIndex | None,
        out_global: Tensor | None,
    ) -> Tensor:
        """The window and the global tokens as keys: [B, H, S, K]. A global token in the window counts once.

        out_global [B, H, E, K]: the rows of the global tokens.
        """
        leading = None if globals_ is None else _global_keys(inputs, globals_, k.dtype)
        key_mask = inputs.attention_mask
        if globals_ is not None:
            key_mask = ~globals_.is_global if key_mask is None else key_mask & ~globals_.is_global
        documents = inputs.document_ids

        # a window counts real tokens: where padding stands between them, they are brought together
        order = None if inputs.contiguous_mask else _real_tokens_first(inputs)  # [B, S]
        if order is not None:
            q, k, v = (_take(t, order) for t in (q, k, v))
            key_mask, documents = (None if t is None else t.gather(1, order) for t in (key_mask, documents))
            if leading is not None:
                leading = _in_order(leading, order)

        back, ahead = self.spec.mask.window_size
        assert back is not None and ahead is not None
        out = functional.banded_attention(
            q,
            k,
            v,
            Band(back, ahead),
            self.kernel.scale,
            self.kernel.dropout_rate,
            key_mask=key_mask,
            document_ids=documents,
            leading=leading,
            given_rows=None if globals_ is None or out_global is None else globals_.rows_of(out_global, order),
        )
        return out if order is None else _take(out, order.argsort(1))

    def _global_rows(self, x: Tensor, inputs: ModelInputs, globals_: GlobalIndex, group: MaskGroup) -> Tensor:
        """[B, H, E, K]: full attention of the global tokens."""
        k, v = self._project_global(x, group)
        q = split_heads(functional.linear(globals_.gather(x), self.q_global), self.heads)
        q = _rotated(q, group.mask.position, globals_.rotary(group.cos_sin))
        visible = _visible_keys(inputs)
        if inputs.document_ids is not None:
            documents = globals_.gather(inputs.document_ids)
            same = documents[:, None, :, None] == inputs.document_ids[:, None, None, :]  # [B, 1, E, S]
            visible = same if visible is None else visible & same
        return functional.attention(q, k, v, visible, False, self.kernel.scale, self.kernel.dropout_rate)

    def _dense(
        self,
        x: Tensor,
        projections: tuple[Tensor, Tensor, Tensor],
        inputs: ModelInputs,
        globals_: GlobalIndex | None,
        group: MaskGroup,
    ) -> Tensor:
        """The formula with all attention weights [B, H, S, S], for those who look at them."""
        visible = _visible_keys(inputs)
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=x.device) if visible is None else visible & visible.mT
        if inputs.document_ids is not None:
            visible = visible & (inputs.document_ids[:, None, :, None] == inputs.document_ids[:, None, None, :])
        position = inputs.positions_from(0)
        near = self.spec.mask.allows(position[:, None, :, None], position[:, None, None, :])
        assert near is not None

        # two sets of scores: each row takes its own
        q, k, v = projections
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        scores = q @ k.mT
        if globals_ is not None:
            is_global = globals_.is_global[:, None]  # [B, 1, S]
            k_all, v_all = self._project_global(x, group)
            k_all, v_all = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k_all, v_all))
            q_all = split_heads(functional.linear(x, self.q_global), self.heads)
            scores_all = _rotated(q_all, group.mask.position, group.cos_sin) @ k_all.mT
            scores = torch.where(is_global[..., None], scores_all, scores)
            near = near | is_global[..., None] | is_global[:, :, None]
        hidden = ~(near & visible)
        scores = (self.kernel.scale * scores).masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = self.kernel.weights(scores.softmax(-1).masked_fill(hidden, 0))
        weights = functional.attention_dropout(weights, self.kernel.dropout_rate)
        if globals_ is None:
            return weights @ v
        return torch.where(is_global[..., None], weights @ v_all, weights @ v)


def _global_keys(inputs: ModelInputs, globals_: GlobalIndex, dtype: torch.dtype) -> LeadingIndex:
    """The global tokens as keys that every token of their document sees."""
    visible = globals_.present[:, None, None, :]  # [B, 1, 1, E]
    if inputs.document_ids is not None:
        documents = globals_.gather(inputs.document_ids)
        visible = visible & (inputs.document_ids[:, None, :, None] == documents[:, None, None, :])
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)
    return LeadingIndex(globals_.index, bias)


def _in_order(leading: LeadingIndex, order: Tensor) -> LeadingIndex:
    """The same keys where the tokens stand in another order [B, S]."""
    bias = leading.bias
    if bias is not None and bias.shape[2] > 1:
        bias = _take(bias, order)
    return LeadingIndex(order.argsort(1).gather(1, leading.index), bias)


def make_first_token_global(model: Transformer) -> None:
    """Where an encoder has no global token by its own rule, make its first one global: usual in summarization."""

    def with_rule(attention: LongformerAttention) -> LongformerAttention:
        plain = attention.global_tokens == NoGlobalTokens()
        return replace(attention, global_tokens=FirstTokenIsGlobal()) if plain else attention

    if model.encoder is None:
        return
    model.spec = swap(model.spec, LongformerAttention, with_rule)
    model.encoder.spec = swap(model.encoder.spec, LongformerAttention, with_rule)
    for module in model.encoder.modules():
        if isinstance(module, LongformerLayer):
            module.spec = with_rule(module.spec)


def _rotated(x: Tensor, position: PositionEncoding, cos_sin: CosSin | None) -> Tensor:
    """Queries or keys [B, H, S, K], rotated where the positions are rotary."""
    return position.rotate(x, x, cos_sin)[0]


def _visible_keys(inputs: ModelInputs) -> Tensor | None:
    """[B, 1, 1, S]: False where a key is padding."""
    return None if inputs.attention_mask is None else inputs.attention_mask[:, None, None, :]


def _real_tokens_first(inputs: ModelInputs) -> Tensor:
    """[B, S] the order of tokens that brings padding to the end of each row."""
    assert inputs.attention_mask is not None
    return (~inputs.attention_mask).byte().argsort(dim=1, stable=True)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, S, K] in another order of its tokens [B, S]."""
    return torch.take_along_dim(x, order[:, None, :, None], 2)
