"""Forward passes over a KV cache: logits after new tokens, and the encoder's output for sources.

A model whose attention cannot be cached reads every row again from its start: the same functions, more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.core.modules import eval_mode
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder, NativeEncoder


def forward_last(model: Transformer, cache: BatchKVCache, new_ids: Sequence[Sequence[int]]) -> Tensor:
    """Forward new tokens, at least one a row; logits [B, V] after each row's last token.

    Rows may differ in length: a shorter one is padded with its own last token, which no query attends to, and the cache
    is cropped again. A recurrent state cannot be cropped, so there the padding is masked.
    """
    if native := _native_decoder(model, cache, new_ids):
        return native.forward(cache, new_ids)
    lengths = cache.lengths
    states = _hidden_states(model, cache, new_ids)  # [B, Q, D]
    cache.crop(length + len(ids) for length, ids in zip(lengths, new_ids, strict=True))

    rows = torch.arange(len(new_ids), device=cache.device)
    last = torch.tensor([len(ids) - 1 for ids in new_ids], device=cache.device)
    return _lm_head(model, states[rows, last][:, None])[:, 0]  # [B, V]


def forward_each(
    model: Transformer, cache: BatchKVCache, new_ids: Sequence[Sequence[int]], logits_to_keep: Sequence[int]
) -> list[Tensor]:
    """Forward new tokens, at least one a row; for each row logits [K, V] after its last K = logits_to_keep tokens."""
    sizes = [len(ids) for ids in new_ids]
    if native := _native_decoder(model, cache, new_ids):
        max_keep = max(logits_to_keep)
        rows = native.forward(cache, new_ids, max_keep).split([min(max_keep, size) for size in sizes])
        return [logits[-keep:] for logits, keep in zip(rows, logits_to_keep, strict=True)]
    lengths = cache.lengths
    states = _hidden_states(model, cache, new_ids)  # [B, Q, D]
    cache.crop(length + size for length, size in zip(lengths, sizes, strict=True))

    # The states of all rows' last tokens in one sequence [1, sum of K, D], so that the head runs once.
    last = [row[size - keep : size] for row, size, keep in zip(states, sizes, logits_to_keep, strict=True)]
    return list(_lm_head(model, torch.cat(last)[None])[0].split(list(logits_to_keep)))


def forward_single(model: Transformer, cache: BatchKVCache, new_ids: Sequence[int], logits_to_keep: int) -> Tensor:
    """Forward new tokens of a single row; logits [K, V] after each of its last K = logits_to_keep tokens."""
    return forward_each(model, cache, [new_ids], [logits_to_keep])[0]


def _native_decoder(model: Transformer, cache: BatchKVCache, new_ids: Sequence[Sequence[int]]) -> NativeDecoder | None:
    """The native decoder, for a model that it supports; built once for a cache."""
    native = cache.native_decoder and cache.native_decoder[1]
    if cache.native_decoder is None or (native is not None and not native.adapters.is_current()):
        cache.native_decoder = (model, NativeDecoder.try_build(model))
    native_model, native = cache.native_decoder
    if native is None or native_model is not model or not native.supports(cache, new_ids):
        return None
    return native


@torch.inference_mode()
def encode_sources(model: Transformer, cache: BatchKVCache, sources: Sequence[Sequence[int]]) -> None:
    """Encode the sources; the cross-attention K/V of them are computed in the decoder's first forward pass."""
    ids = pad_right(sources, cache.device)  # [B, S]
    attention_mask = padding_mask(sources, cache.device)
    native = NativeEncoder.try_build(model)
    with _eval_mode(model):
        if native is not None and native.supports(sources):
            states = native.encode(sources).to(next(model.parameters()).dtype)
            cache.set_encoder_output(model.bridge(ModelInputs(ids, attention_mask, hidden_states=states)))
        else:
            cache.set_encoder_output(model.encode(ids, attention_mask=attention_mask))


@torch.inference_mode()
def _hidden_states(model: Transformer, cache: BatchKVCache, new_ids: Sequence[Sequence[int]]) -> Tensor:
    """The hidden states [B, Q, D] of new tokens. If anything interrupts the model, the cache is restored."""
    rows = cache.rows
    states = dict(cache.states)
    try:
        with _eval_mode(model):
            if cache.rereads:
                return _read_again(model, cache, new_ids)
            attention_mask = padding_mask(new_ids, cache.device) if cache.recurrent_groups else None
            inputs = model.inputs(pad_right(new_ids, cache.device), attention_mask)
            hidden_states = model.hidden_states(inputs, memory=cache.memory, cache=cache)
            cache.encoder_output = None
            return hidden_states
    except BaseException:
        cache.rows = rows
        cache.states = states
        raise


def _read_again(model: Transformer, cache: BatchKVCache, new_ids: Sequence[Sequence[int]]) -> Tensor:
    """The hidden states [B, Q, D] of new tokens of a model without a KV cache: each row is read from its start.

    Chunks and buckets depend on the length of a row, so only rows of one length are read together, without padding.
    """
    ids = cache.append_ids(pad_right(new_ids, cache.device))  # [B, C]
    source = cache.source()
    cache.encoder_output = None
    lengths = [length + len(new) for length, new in zip(cache.lengths, new_ids, strict=True)]
    states: dict[int, Tensor] = {}  # of each row's new tokens [Q, D]
    for length in sorted(set(lengths)):
        rows = [row for row, of_row in enumerate(lengths) if of_row == length]
        memory = None if source is None else _select_source(source, rows)
        read = model.hidden_states(model.inputs(ids[rows, :length]), memory=memory)  # [R, length, D]
        for row, of_row in zip(rows, read, strict=True):
            states[row] = of_row[length - len(new_ids[row]) :]
    cache.advance(max(map(len, new_ids)), None)
    return pad_sequence([states[row] for row in range(len(new_ids))], batch_first=True)


def _select_source(source: ModelInputs, rows: list[int]) -> ModelInputs:
    assert source.hidden_states is not None and source.attention_mask is not None
    mask = source.attention_mask[rows]
    return replace(source, ids=source.ids[rows], attention_mask=mask, hidden_states=source.hidden_states[rows])


@torch.inference_mode()
def _lm_head(model: Transformer, hidden_states: Tensor) -> Tensor:
    with _eval_mode(model):
        return model.head(hidden_states, None)


def _eval_mode(model: torch.nn.Module) -> AbstractContextManager[None]:
    """eval_mode, but free of cost if the model is in evaluation mode already: this runs for every token."""
    return eval_mode(model) if model.training else nullcontext()


def pad_right(token_ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [B, Q]; a shorter row is padded with its own last token."""
    width = max(map(len, token_ids))
    padded = [[*ids, *[ids[-1]] * (width - len(ids))] for ids in token_ids]
    return torch.tensor(padded, device=device)


def padding_mask(token_ids: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """[B, Q] True where pad_right() has a token of the row itself; None where all rows have one length."""
    sizes = torch.tensor([len(ids) for ids in token_ids], device=device)
    mask = torch.arange(int(sizes.max()), device=device) < sizes[:, None]
    return None if bool(mask.all()) else mask
