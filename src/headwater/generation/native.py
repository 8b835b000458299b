"""Native (C) forward passes: decoder steps over the batch KV cache, and the encoder (cpu/csrc/decode_step.c).

native_export.py has the model as C reads it; decode_step.c computes the same as the modules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import add, is_

import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.cpu import decode
from headwater.cpu.build import decode_library
from headwater.cpu.decode import DecodeRunner, token_chunks
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native_export import ModelExport, UnsupportedModel, require

MAX_SOURCE_TOKENS = 4096  # of a source; a longer one needs less memory in the modules, a layer at a time


class NativeDecoder(DecodeRunner):
    """Decoder steps in C over the batch KV cache; computes the same as the model's modules."""

    @classmethod
    def try_build(cls, model: Transformer) -> NativeDecoder | None:
        """The native decoder of a model, or None where C does not support the model or is unavailable."""
        try:
            require(decode_library() is not None)
            return cls(ModelExport(model))
        except UnsupportedModel:
            return None

    def __init__(self, export: ModelExport) -> None:
        super().__init__(export)
        self.adapters = export.adapters
        self.blocks = export.blocks
        self.head_module = export.head_module
        self.cache_keys = [block.self_attn.cache_key(step) for step, block in enumerate(self.blocks)]
        self.cross_cache_keys = [
            block.cross_attn.cache_key(step) for step, block in enumerate(self.blocks) if export.has_cross_attention
        ]
        self._attached_kv: list[tuple[Tensor, Tensor]] = []

    def supports(self, cache: BatchKVCache, new_ids: Sequence[Sequence[int]]) -> bool:
        """Whether all ids and positions have an embedding."""
        return self.can_embed(new_ids, max(map(add, cache.lengths, map(len, new_ids))))

    @torch.inference_mode()
    def forward(self, cache: BatchKVCache, new_ids: Sequence[Sequence[int]], logits_to_keep: int = 1) -> Tensor:
        """Logits [.., V] of the last `logits_to_keep` new tokens of each row, row after row; extends the cache."""
        lengths = cache.lengths
        adapters = self.adapters.of_rows(len(new_ids))
        token_fields, output_rows = self._token_fields(cache, new_ids, adapters, logits_to_keep)

        self._attach_cache(cache, max(map(add, lengths, map(len, new_ids))))
        self.set_batch(
            cache.token_rows(self.c_model.length),
            None if cache.source_mask is None else cache.source_mask.sum(1, dtype=torch.int32),
        )

        # a chunk of tokens at a time; output rows are ascending, so each chunk has a slice of the logits
        logits = torch.empty(len(output_rows), self.c_model.vocab)
        for first in range(0, len(token_fields), decode.MAX_BATCHED_TOKENS):
            chunk = token_fields[first : first + decode.MAX_BATCHED_TOKENS]
            begin = bisect_left(output_rows, first)
            end = bisect_left(output_rows, first + len(chunk))
            self.run(chunk, [row - first for row in output_rows[begin:end]], logits[begin:end])

        cache.rows = [row._replace(length=row.length + len(ids)) for row, ids in zip(cache.rows, new_ids, strict=True)]
        return logits if self.head_module is None else self.head_module(logits, None)

    @staticmethod
    def _token_fields(
        cache: BatchKVCache, new_ids: Sequence[Sequence[int]], adapters: Sequence[int], logits_to_keep: int
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """The fields of CToken of all new tokens, and the indices of those whose logits are kept."""
        token_fields: list[tuple[int, ...]] = []
        output_rows: list[int] = []
        source_row_of = cache.source_row_of
        for row, (length, ids, adapter) in enumerate(zip(cache.lengths, new_ids, adapters, strict=True)):
            source = source_row_of[row]
            for position, token_id in enumerate(ids, start=length):
                token_fields.append((token_id, position, row, source, position + 1, adapter))
            end = len(token_fields)
            output_rows += range(end - min(logits_to_keep, len(ids)), end)
        return token_fields, output_rows

    def _attach_cache(self, cache: BatchKVCache, columns: int) -> None:
        """Pass C the addresses of keys and values, if they have moved since the last step."""
        current = [*map(cache.kv.get, self.cache_keys), *map(cache.cross_kv.get, self.cross_cache_keys)]
        unchanged = len(current) == len(self._attached_kv) and all(map(is_, current, self._attached_kv))
        if unchanged and columns <= self.c_model.length and len(cache.rows) <= self._attached_kv[0][0].shape[0]:
            return
        self._attached_kv = []  # until all of them are attached
        _, kv_heads, head_dim, _ = self.export.attention_shape
        cache.reserve(self.cache_keys, columns, kv_heads, head_dim)
        self_kv = [cache.kv[key] for key in self.cache_keys]
        cross_kv = self._cross_kv(cache)
        self.attach_cache(self_kv, cross_kv)
        self._attached_kv = [*self_kv, *cross_kv]

    def _cross_kv(self, cache: BatchKVCache) -> list[tuple[Tensor, Tensor]]:
        """Cross-attention keys and values of each layer, computed once for a source."""
        for key, block in zip(self.cross_cache_keys, self.blocks, strict=bool(self.cross_cache_keys)):
            if key not in cache.cross_kv:
                assert cache.encoder_output is not None
                cache.cross_kv[key] = block.cross_attn.project_kv(cache.encoder_output.hidden_states)
            k, v = cache.cross_kv[key]
            cache.cross_kv[key] = k.float().contiguous(), v.float().contiguous()
        cache.encoder_output = None
        return [cache.cross_kv[key] for key in self.cross_cache_keys]


class NativeEncoder(DecodeRunner):
    """The encoder in C: each token attends to all tokens of its own source."""

    @classmethod
    def try_build(cls, model: Transformer) -> NativeEncoder | None:
        """The native encoder of a model, or None where C does not support the model or is unavailable."""
        try:
            require(decode_library() is not None)
            return cls(ModelExport(model, "encoder"))
        except UnsupportedModel:
            return None

    def __init__(self, export: ModelExport) -> None:
        super().__init__(export)
        self.adapters = export.adapters

    def supports(self, sources: Sequence[Sequence[int]]) -> bool:
        """Whether no source is empty or too long, and all ids and positions have an embedding."""
        max_length = max(map(len, sources))
        return max_length <= MAX_SOURCE_TOKENS and all(map(len, sources)) and self.can_embed(sources, max_length)

    @torch.inference_mode()
    def encode(self, sources: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [B, S, D] of the sources; zeros beyond the end of each."""
        lengths = [len(source) for source in sources]
        hidden_states = torch.zeros(len(sources), max(lengths), self.c_model.d_model)
        adapters = self.adapters.of_rows(len(sources))
        for chunk in token_chunks(lengths):
            part = slice(chunk.start, chunk.stop)
            self._encode_batch(sources[part], adapters[part], hidden_states[part])
        return hidden_states

    def _encode_batch(self, sources: Sequence[Sequence[int]], adapters: Sequence[int], hidden_states: Tensor) -> None:
        """Encode sources together and write their hidden states [B, S, D]."""
        _, kv_heads, head_dim, _ = self.export.attention_shape
        length = max(map(len, sources))
        keys, values = torch.empty(2, len(sources), kv_heads, length, head_dim)
        # the next layer may overwrite a layer's keys and values
        self.attach_cache([(keys, values)] * len(self.layers))
        token_fields = [
            (token_id, position, row, 0, len(source), adapters[row])
            for row, source in enumerate(sources)
            for position, token_id in enumerate(source)
        ]
        out = torch.empty(len(token_fields), self.c_model.d_model)
        self.run(token_fields, range(len(token_fields)), out)
        for row_states, states in zip(hidden_states, out.split([len(source) for source in sources]), strict=True):
            row_states[: len(states)] = states
