"""KV cache of a running batch: rows of different lengths are appended, removed, cropped and reordered.

Column c of a row holds the keys and values of its token at position c, so nothing is ever padded: what lies beyond a
row's length is later than any of its queries, and the causal mask hides it. To remove tokens is therefore only to set a
smaller length, which is how rejected drafts are dropped and how an interrupted step is undone.

A recurrent layer (linear attention) has a state for each row instead of columns, however long the row is. It does not
keep tokens apart, so a cropped row goes back to its state before the last step, or to none; the rest is computed again.

Where attention cannot be cached (LSH attention, chunks), the columns hold token ids, and forward.py reads whole rows.

    rows      [ a b c d . . . ]   lengths 4, 7, 2
              [ e f g h i j k ]
              [ l m . . . . . ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.core.cache import CacheKey, KeyPositions, KVPair, State
from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.errors import BadInput
from headwater.i18n import _

TOKEN_IDS: CacheKey = (-1, 0)  # the entry of a cache that holds token ids instead of keys and values


class CacheRow(NamedTuple):
    """A row of the cache: the sequence it belongs to, and how many of its tokens are cached."""

    owner: Any
    length: int


class BatchKVCache:
    """A KVCache (core/cache.py), and what a running batch needs beyond it.

    kv: k and v [R, G, C, D] of each attention, R and C at least the rows and columns in use.
    cross_kv: k and v [R, H, S, D] of the source, for cross-attention; source_mask [R, S] is True where it is real.
    rereads: the model has no KV cache, so token ids are kept, and the states of a source.
    states: of recurrent layers, tensors [R, …]; before_step: the lengths and states before the last forward pass.
    row_of_token [B, C]: after reorder(), which physical row holds each token's K/V (None: its own). source_rows [B]:
    likewise for the cross-attention K/V.
    max_columns: no more columns are allocated than that, as long as no row needs them.
    rows is always replaced as one list, after the tensors are in order: an interruption finds the old rows or the new.
    """

    def __init__(self, model: Transformer, owners: Iterable[Any] = (), max_columns: int | None = None) -> None:
        mask_groups = model.output_stack.mask_groups
        if not mask_groups or any(group.rule.window_size[1] != 0 for group in mask_groups):
            raise BadInput(
                _("generate: every token may only see what came before it, this model looks ahead; use a decoder")
            )
        self.rereads = "cache" in model.output_stack.unsupported
        self.spec = model.output_stack.spec
        self.device = next(model.parameters()).device
        self.left_windows = [group.rule.window_size[0] for group in mask_groups]  # None: without a limit
        self.recurrent_groups = [i for i, group in enumerate(mask_groups) if group.is_recurrent and not self.rereads]
        self.rows = [CacheRow(owner, 0) for owner in owners]
        self.max_columns = max_columns
        self.kv: dict[CacheKey, KVPair] = {}
        self.cross_kv: dict[CacheKey, KVPair] = {}
        self.states: dict[CacheKey, State] = {}
        self.before_step: tuple[list[int], dict[CacheKey, State]] = [], {}
        self.source_mask: Tensor | None = None
        self.row_of_token: Tensor | None = None
        self.source_rows: list[int] | None = None
        self.encoder_output: ModelInputs | None = None
        self.native_decoder: Any = None  # forward.py: (model, NativeDecoder), for as long as the cache lives

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    # ----------------------------------------------------------------------------------------- the KVCache protocol

    @property
    def seen_tokens(self) -> Tensor:
        """[B, 1], or [1, 1] where all rows have one length: the position of each row's next token."""
        lengths = self.lengths
        return torch.tensor(lengths[:1] if len(set(lengths)) == 1 else lengths, device=self.device)[:, None]

    @property
    def aligned(self) -> bool:
        return not any(self.lengths)

    def check_capacity(self, rows: int, tokens: int) -> None:
        if rows != len(self.rows):
            raise BadInput(
                _(
                    "cache: it has {num_rows} rows, got {rows}; append_rows() and remove_row() change their number",
                    num_rows=len(self.rows),
                    rows=rows,
                )
            )
        self.materialize()

    def update_positions(self, mask_group: int, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions:
        """The positions of the cached keys: columns are positions, from the first that some row can still attend to."""
        self.start_positions = self.lengths
        self.num_new_tokens = positions.shape[1]
        if self.aligned or mask_group in self.recurrent_groups:
            return positions, attention_mask
        first = self._first_visible(mask_group)
        last = max(self.start_positions) + self.num_new_tokens
        return torch.arange(first, last, device=self.device)[None], None

    def _first_visible(self, mask_group: int) -> int:
        left = self.left_windows[mask_group]
        return 0 if left is None else max(0, min(self.start_positions) - left)

    def advance(self, tokens: int, attention_mask: Tensor | None) -> None:
        if self.recurrent_groups:
            self.before_step = self.lengths, dict(self.states)
        new = [tokens] * len(self.rows) if attention_mask is None else attention_mask.sum(1).tolist()
        self.rows = [CacheRow(row.owner, row.length + size) for row, size in zip(self.rows, new, strict=True)]

    def state(self, key: CacheKey) -> State | None:
        state = self.states.get(key)
        return None if state is None else tuple(t[: len(self.rows)] for t in state)

    def set_state(self, key: CacheKey, state: State) -> None:
        self.states[key] = state

    def update(self, mask_group: int, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        """Write the new k and v [B, G, Q, D]; returns all that the mask group can attend to."""
        rows = len(self.start_positions)
        last = max(self.start_positions) + self.num_new_tokens
        buffer = _grow(self.kv.get(key), (k, v), rows, last, self._grown_columns(last))
        self.kv[key] = buffer
        for cached, new in zip(buffer, (k, v), strict=True):
            self._write_new(cached, new, rows)
        if not any(self.start_positions):
            return k, v
        first = self._first_visible(mask_group)
        return buffer[0][:rows, :, first:last], buffer[1][:rows, :, first:last]

    def reserve(self, keys: Iterable[CacheKey], columns: int, heads: int, head_dim: int) -> None:
        """Allocate columns for every row, the same number for all keys (an interrupted growth may differ)."""
        widest = max([columns, *(k.shape[2] for k, _v in self.kv.values())])
        capacity = self._grown_columns(columns) if widest == columns else widest
        for key in keys:
            like = self.kv.get(key) or (torch.zeros(1, heads, 1, head_dim), torch.zeros(1, heads, 1, head_dim))
            k, v = _grow(self.kv.get(key), like, len(self.rows), widest, capacity)
            self.kv[key] = k.contiguous(), v.contiguous()

    def _grown_columns(self, columns: int) -> int:
        """The number of columns to allocate when there are too few: half as many again, so that copies stay rare."""
        capacity = columns + max(64, columns // 2)
        return capacity if self.max_columns is None else max(columns, min(capacity, self.max_columns))

    def _write_new(self, buffer: Tensor, new: Tensor, rows: int) -> None:
        """Write new [B, G, Q, D] after each row's tokens."""
        if len(set(self.start_positions)) == 1:
            start = self.start_positions[0]
            buffer[:rows, :, start : start + self.num_new_tokens] = new
            return
        starts = torch.tensor(self.start_positions, device=self.device)[:, None]
        columns = starts + torch.arange(self.num_new_tokens, device=self.device)  # [B, Q]
        buffer[torch.arange(rows, device=self.device)[:, None], :, columns] = new.transpose(1, 2)

    def cross(self, key: CacheKey, compute: Callable[[], KVPair]) -> KVPair:
        """The cross-attention K/V of the source, computed once."""
        if key not in self.cross_kv:
            self.cross_kv[key] = compute()
        k, v = self.cross_kv[key]
        return k[: len(self.start_positions)], v[: len(self.start_positions)]

    def append_ids(self, ids: Tensor) -> Tensor:
        """Keep the ids [B, Q] of new tokens; returns the ids [B, C] of whole rows, padded on the right."""
        self.check_capacity(*ids.shape)
        self.start_positions = self.lengths
        self.num_new_tokens = ids.shape[1]
        column = ids[:, None, :, None]  # [B, 1, Q, 1]
        self.update(0, TOKEN_IDS, column, column[..., :0])
        return self.kv[TOKEN_IDS][0][: len(ids), 0, : max(self.start_positions) + self.num_new_tokens, 0]

    def source(self) -> ModelInputs | None:
        """The encoder's output for the decoder to read again; of a single stack None."""
        memory = self.memory
        if memory is None or memory.hidden_states is None or self.source_mask is None:
            return None
        new = memory.hidden_states[:, None]  # [B, 1, S, D]
        states, _empty = self.cross(TOKEN_IDS, lambda: (new, new[..., :0]))
        return ModelInputs(memory.ids, self.source_mask, hidden_states=states[:, 0, : self.source_mask.shape[1]])

    # ------------------------------------------------------------------------------------- adding and removing rows

    def set_encoder_output(self, memory: ModelInputs) -> None:
        """Keep the encoder's output until the cross-attention K/V are cached, and its mask."""
        assert memory.hidden_states is not None
        mask = memory.attention_mask
        if mask is None:
            mask = torch.ones(memory.hidden_states.shape[:2], dtype=torch.bool, device=self.device)
        self.encoder_output = memory
        self.source_mask = mask

    @property
    def memory(self) -> ModelInputs | None:
        """The encoder's output for the model. Once the cross-attention K/V are cached, only its shape matters."""
        if self.encoder_output is not None or self.source_mask is None:
            return self.encoder_output
        mask = self.source_mask[self.source_row_of]  # [B, S]
        placeholder = torch.zeros(1, 1, 1, device=self.device).expand(*mask.shape, 1)
        return ModelInputs(mask.long(), mask, hidden_states=placeholder)

    @torch.inference_mode()
    def append_rows(self, other: BatchKVCache) -> None:
        """Append the rows of another cache of the same model."""
        self.materialize()
        other.materialize()
        first = len(self.rows)
        last = first + len(other.rows)
        columns = max([*self.lengths, *other.lengths])
        source_length = _max_source_length(self.source_mask, other.source_mask)

        self.before_step = [], {}
        for key, new in other.states.items():
            old = self.states.get(key) or tuple(t[:0] for t in new)
            self.states[key] = tuple(torch.cat((a[:first], b[: last - first])) for a, b in zip(old, new, strict=True))
        for key, pair in other.kv.items():
            self.kv[key] = _grow(self.kv.get(key), pair, last, columns, self._grown_columns(columns))
            _copy_rows(self.kv[key], pair, first, last)
        for key, pair in other.cross_kv.items():
            self.cross_kv[key] = _grow(self.cross_kv.get(key), pair, last, source_length, source_length)
            _copy_rows(self.cross_kv[key], pair, first, last)
        self.source_mask = _append_mask_rows(self.source_mask, other.source_mask, first, last)
        self.rows = [*self.rows, *other.rows]

    @torch.inference_mode()
    def remove_row(self, row: int) -> None:
        """Remove a row; the last one is moved into it. To repeat this after an interruption does no harm."""
        self.materialize()
        last = len(self.rows) - 1
        if row != last:
            for pair in (*self.kv.values(), *self.cross_kv.values()):
                for cached in pair:
                    cached[row] = cached[last]
            moved = torch.arange(last + 1, device=self.device)
            moved[row] = last
            self.states = {key: tuple(t[moved] for t in state) for key, state in self.states.items()}
            self.before_step = [], {}
            if self.source_mask is not None:
                self.source_mask[row] = self.source_mask[last]
        self.rows = [self.rows[last] if i == row else one for i, one in enumerate(self.rows[:last])]

    @torch.inference_mode()
    def reorder(self, rows: Sequence[int]) -> None:
        """Select rows in this order, some perhaps more than once, as beam search needs it. No K/V are copied."""
        if list(rows) == list(range(len(self.rows))):
            return
        columns = max(self.lengths)
        row_of_token = self.token_rows(columns)
        if row_of_token is None:
            row_of_token = _identity_rows(len(self.rows), columns)
        selected = [self.rows[row] for row in rows]
        source_rows = [self.source_row_of[row] for row in rows]
        lengths = torch.tensor([row.length for row in selected])
        is_cached = torch.arange(columns) < lengths[:, None]  # [B, C]
        self.row_of_token = torch.where(is_cached, row_of_token[list(rows)], _identity_rows(len(rows), columns))
        self.source_rows = source_rows
        self.states = {key: tuple(t[list(rows)] for t in state) for key, state in self.states.items()}
        self.before_step = [], {}
        self.rows = selected
        if _would_overwrite(self.row_of_token, lengths):
            self.materialize()

    @property
    def source_row_of(self) -> list[int]:
        """The physical row of each row's cross-attention K/V."""
        return list(range(len(self.rows))) if self.source_rows is None else self.source_rows

    def token_rows(self, columns: int) -> Tensor | None:
        """[B, columns] int32: the physical row of each token; a token after the last reorder() is in its own."""
        if self.row_of_token is None:
            return None
        rows, known = self.row_of_token.shape
        later = _identity_rows(rows, max(0, columns - known))
        return torch.cat((self.row_of_token, later), 1)[:, :columns].contiguous()

    @torch.inference_mode()
    def materialize(self) -> None:
        """Copy the K/V of every token into its own row, as the modules need it."""
        row_of_token = self.token_rows(max(self.lengths, default=0))
        if row_of_token is not None:
            row_of_token = row_of_token.long().to(self.device)  # [B, C]
            columns = torch.arange(row_of_token.shape[1], device=self.device)
            self.kv = {
                key: (_gather_rows(k, row_of_token, columns), _gather_rows(v, row_of_token, columns))
                for key, (k, v) in self.kv.items()
            }
            self.row_of_token = None
        if self.source_rows is not None:
            rows = torch.tensor(self.source_rows, device=self.device)
            self.cross_kv = {key: (k[rows], v[rows]) for key, (k, v) in self.cross_kv.items()}
            self.source_mask = None if self.source_mask is None else self.source_mask[rows]
            self.source_rows = None

    def crop(self, lengths: Iterable[int]) -> None:
        """Crop each row to a number of tokens, or to fewer if it has states; a row that is shorter stays as it is."""
        lengths = self._crop_states(list(lengths)) if self.recurrent_groups else list(lengths)
        if any(length < row.length for row, length in zip(self.rows, lengths, strict=True)):
            self.materialize()  # the columns that become free may hold K/V that another row refers to
        self.rows = [
            CacheRow(row.owner, min(row.length, length)) for row, length in zip(self.rows, lengths, strict=True)
        ]

    def _crop_states(self, lengths: list[int]) -> list[int]:
        """Give each row that is to be cropped its state before the last step, or none; returns the new lengths."""
        before, old_states = self.before_step
        cropped = [length < row.length for length, row in zip(lengths, self.rows, strict=True)]
        if not any(cropped):
            return lengths
        before = before if len(before) == len(lengths) else [0] * len(lengths)
        kept = [old if old <= length else 0 for old, length in zip(before, lengths, strict=True)]
        for key, state in self.states.items():
            old = old_states.get(key) or tuple(torch.zeros_like(t) for t in state)
            started = [_select(kept, a, torch.zeros_like(a)) for a in old]
            self.states[key] = tuple(_select(cropped, a, b) for a, b in zip(started, state, strict=True))
        return [keep if crop else length for keep, crop, length in zip(kept, cropped, lengths, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys, values and states."""
        pairs = (*self.kv.values(), *self.cross_kv.values(), *self.states.values())
        return sum(tensor.numel() * tensor.element_size() for pair in pairs for tensor in pair)


# ------------------------------------------------------------------------------------------------- buffers and masks


def _grow(old: KVPair | None, like: KVPair, rows: int, columns: int, capacity: int) -> KVPair:
    """Buffers [rows, G, columns, D] or larger with the old contents; where columns are too few, `capacity` of them."""
    if old is not None and old[0].shape[0] >= rows and old[0].shape[2] >= columns:
        return old
    old_rows = 0 if old is None else old[0].shape[0]
    old_columns = 0 if old is None else old[0].shape[2]
    rows = max(rows, old_rows)
    columns = old_columns if columns <= old_columns else capacity

    def grown(index: int) -> Tensor:
        buffer = like[index].new_zeros(rows, like[index].shape[1], columns, like[index].shape[3])
        if old is not None:
            buffer[:old_rows, :, :old_columns] = old[index]
        return buffer

    return grown(0), grown(1)


def _copy_rows(buffer: KVPair, source: KVPair, first: int, last: int) -> None:
    """Write rows first to last; the columns beyond become 0, because a NaN left there would spread even if masked."""
    for cached, new in zip(buffer, source, strict=True):
        width = min(cached.shape[2], new.shape[2])
        cached[first:last, :, :width] = new[: last - first, :, :width]
        cached[first:last, :, width:] = 0


def _select(condition: Sequence[int], yes: Tensor, no: Tensor) -> Tensor:
    """The rows of yes where the condition [B] holds, else those of no."""
    rows = torch.tensor(condition, device=yes.device) > 0
    return torch.where(rows.view(-1, *[1] * (yes.dim() - 1)), yes[: len(condition)], no[: len(condition)])


def _identity_rows(rows: int, columns: int) -> Tensor:
    """[rows, columns] int32: each token is in its own row."""
    return torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, columns)


def _gather_rows(buffer: Tensor, row_of_token: Tensor, columns: Tensor) -> Tensor:
    """[B, G, C, D]: every token from its physical row [B, C]; beyond a row's length it may be anything."""
    return buffer[row_of_token.clamp(max=len(buffer) - 1), :, columns].transpose(1, 2)


def _would_overwrite(row_of_token: Tensor, lengths: Tensor) -> bool:
    """Whether a row's next token would overwrite one that a longer row refers to. row_of_token [B, C], lengths [B]."""
    rows = len(lengths)
    columns = torch.arange(row_of_token.shape[1])
    writer_lengths = lengths[row_of_token.long().clamp(max=rows - 1)]  # of the row that now writes there
    is_cached = columns < lengths[:, None]
    return bool((is_cached & (row_of_token < rows) & (columns >= writer_lengths)).any())


def _max_source_length(*masks: Tensor | None) -> int:
    return max((mask.shape[1] for mask in masks if mask is not None), default=0)


def _append_mask_rows(mask: Tensor | None, other: Tensor | None, first: int, last: int) -> Tensor | None:
    if other is None:
        return mask
    combined = other.new_zeros(last, _max_source_length(mask, other))  # [R, S]
    if mask is not None:
        combined[:first, : mask.shape[1]] = mask[:first]
    combined[first:, : other.shape[1]] = other[: last - first]
    return combined
