"""The decoding step in C: checks of all that decode_step.c reads and writes, its scratch buffers, and the call.

Structs with addresses in them are filled here and nowhere else. The sizes come from the caller, who knows what C will
read, never from the tensor itself; a tensor that differs is a TensorMismatch, and the modules do the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_void_p
from itertools import pairwise
from operator import is_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headwater.cpu.build import TensorMismatch, checked_ptr, decode_constants, decode_library, float_ptr
from headwater.cpu.layout import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    FORMAT_CODES,
    NORM_CODES,
    SOURCE_PANEL,
    CLayer,
    CLinearChange,
    CMatrix,
    CModel,
    CNorm,
    CScratch,
    CToken,
)

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # other formats are bytes
MAX_SIZE = 2**31  # sizes are 32 bits wide
MAX_BATCHED_TOKENS = 256  # tokens of one call: more would need more scratch memory and gain nothing
KVPair = tuple[Tensor, Tensor]

# ----------------------------------------------------------------------------------------------------- exported weights


def c_matrix(data: Tensor, block_format: str, rows: int, cols: int, bias: Tensor | None = None) -> CMatrix:
    """A weight matrix [rows, cols] in `block_format`, and a bias of `rows` floats, as C reads them."""
    if cols % BLOCK_SIZE or not (0 < rows < MAX_SIZE and 0 < cols < MAX_SIZE):
        raise TensorMismatch(f"C needs whole blocks of {BLOCK_SIZE} columns, got {rows} × {cols}")
    width = cols if block_format in FLOAT_DTYPES else cols // BLOCK_SIZE * BLOCK_BYTES[block_format]
    address = checked_ptr(data, FLOAT_DTYPES.get(block_format, torch.uint8), rows, width)
    return CMatrix(FORMAT_CODES[block_format], rows, cols, address, float_ptr(bias, rows))


class LinearTerms(NamedTuple):
    """What an adapter changes in a linear layer [out, in]: y = gain · (W (input_gain · x) + b) + shift + B A x.

    a [r, in] and b [out, r], the scale in b; what is None is not there.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None
    input_gain: Tensor | None = None


class WeightExport:
    """Weights of a model as C structs; keeps everything alive whose address it has passed on."""

    def __init__(self) -> None:
        self.keep_alive: list[Tensor] = []
        self._changes: list[ctypes.Array[CLinearChange]] = []
        self.max_rank = 0

    def matrix(self, data: Tensor, block_format: str, rows: int, cols: int, bias: Tensor | None = None) -> CMatrix:
        """A weight matrix; its bias is converted to float32."""
        bias = None if bias is None else self._keep_alive(bias.float())
        return c_matrix(self._keep_alive(data), block_format, rows, cols, bias)

    def norm(self, norm: nn.LayerNorm | nn.RMSNorm, gain: Tensor, bias: Tensor | None, width: int) -> CNorm:
        """A norm over `width` numbers; its vectors are converted to float32."""
        gain = self._keep_alive(gain.float())
        bias = None if bias is None else self._keep_alive(bias.float())
        kind = NORM_CODES["LAYER" if isinstance(norm, nn.LayerNorm) else "RMS"]
        return CNorm(kind, float(norm.eps or 0.0), float_ptr(gain, width), float_ptr(bias, width))

    def changes(self, terms: Sequence[LinearTerms], rows: int, cols: int) -> int:
        """The address of the changes of all adapters in a matrix [rows, cols]; float32 copies of their weights."""
        self._changes.append((CLinearChange * len(terms))(*(self._change(of_one, rows, cols) for of_one in terms)))
        return ctypes.addressof(self._changes[-1])

    def _change(self, terms: LinearTerms, rows: int, cols: int) -> CLinearChange:
        rank = 0 if terms.a is None else len(terms.a)
        self.max_rank = max(self.max_rank, rank)
        sizes = {"a": (rank, cols), "b": (rank, rows), "gain": (rows,), "shift": (rows,), "input_gain": (cols,)}
        addresses = {}
        for name, size in sizes.items():
            tensor = getattr(terms, name)
            if tensor is not None:
                copied = tensor.t() if name == "b" else tensor
                addresses[name] = float_ptr(self._keep_alive(copied.float().contiguous()), *size)
        return CLinearChange(rank, **addresses)

    def _keep_alive(self, tensor: Tensor) -> Tensor:
        """A parameter may be moved to other memory while C runs (model.half()): keep the memory it has now."""
        self.keep_alive.append(tensor.detach())
        return self.keep_alive[-1]


class DecoderExport(Protocol):
    """A model as decode_step.c reads it, and what depends on the length of its cache."""

    c_model: CModel
    layers: ctypes.Array[CLayer]
    attention_shape: tuple[int, int, int, float]  # heads, kv_heads, head_dim, scale
    d_ff: int
    has_cross_attention: bool

    @property
    def max_positions(self) -> float: ...

    def position_embeddings(self, num_positions: int) -> Tensor | None: ...

    def cos_sin(self, num_positions: int) -> tuple[Tensor, Tensor] | None: ...


class ScratchBuffers:
    """Scratch memory of a step, for at most `rows` tokens and exactly `threads` threads."""

    def __init__(self, c_model: CModel, qkv_width: int, max_width: int, rows: int, threads: int) -> None:
        constants = decode_constants()
        tile_rows = constants["TILE_ROWS"]
        self.threads = threads
        self.rows = -(-max(rows, constants["MAX_GEMV_ROWS"] * threads) // tile_rows) * tile_rows  # whole tiles

        row_widths = {
            "x": c_model.d_model,
            "y": max_width,
            "qkv": qkv_width,
            "proj_in": max_width,
            "hidden": 2 * c_model.d_ff,
        }
        sizes = {name: self.rows * width for name, width in row_widths.items()}
        sizes["scores"] = threads * (c_model.length + constants["SOURCE_ROWS"] * c_model.max_source_length)
        sizes["panels"] = threads * constants["PANEL_ROWS"] * max_width
        sizes["low_rank"] = self.rows * constants["MAX_READERS"] * c_model.max_rank
        sizes["update"] = self.rows * c_model.d_model if c_model.adapters else 0
        sizes["q"] = self.rows * max_width  # activations quantized to 8 bits,
        sizes["ds"] = self.rows * max_width * 2 // BLOCK_SIZE  # and two floats for each block of them

        self.buffers = {
            name: torch.zeros(size, dtype=torch.int8 if name == "q" else None) for name, size in sizes.items()
        }
        addresses = {name: checked_ptr(t, t.dtype, sizes[name]) for name, t in self.buffers.items()}
        self.scratch = CScratch(**addresses, threads=threads)

    def fits(self, rows: int, threads: int) -> bool:
        """Whether a step may use it. C starts as many threads as it was allocated for: their number must be equal."""
        return rows <= self.rows and threads == self.threads


# ------------------------------------------------------------------------------------------------ checks before a call


class TokenLimits(NamedTuple):
    """Upper limits of the fields of a token: ids, positions, cache rows, sources, keys that it sees, and adapters."""

    tokens: int
    positions: int
    cache_rows: int
    sources: int
    cache_length: int
    adapters: int


def check_model_sizes(c_model: CModel) -> None:
    """Sizes that the step computes with besides those of its matrices: heads and rotary dimensions."""
    if min(c_model.heads, c_model.kv_heads, c_model.head_dim) < 1 or c_model.heads % c_model.kv_heads:
        raise TensorMismatch(f"kv_heads must divide heads, got {c_model.kv_heads} of {c_model.heads}")
    if c_model.rotary_dim % 2 or not 0 <= c_model.rotary_dim <= c_model.head_dim:
        raise TensorMismatch(f"rotary must turn an even part of a head of {c_model.head_dim}, got {c_model.rotary_dim}")


def check_tokens(token_fields: Sequence[tuple[int, ...]], limits: TokenLimits, has_cross_attention: bool) -> None:
    """Every token (the fields of CToken) lies within the embedding, the KV cache and the sources."""
    tokens, positions, cache_rows, sources, cache_length, adapters = limits
    for fields in token_fields:
        token_id, position, cache_row, source, num_keys, adapter = fields
        inside = (
            0 <= token_id < tokens
            and 0 <= position < positions
            and 0 <= cache_row < cache_rows
            and 0 <= num_keys <= cache_length
            and -1 <= adapter < adapters
        )
        if not inside or (has_cross_attention and not 0 <= source < sources):
            raise TensorMismatch(f"a token must lie within {limits}, got {fields}")


def check_output_rows(output_rows: Sequence[int], rows: int) -> None:
    """Rows whose logits are requested: ascending, each once, below `rows`."""
    if output_rows and not (
        output_rows[0] >= 0 and output_rows[-1] < rows and all(a < b for a, b in pairwise(output_rows))
    ):
        raise TensorMismatch(f"the rows asked for must be ascending and below {rows}, got {list(output_rows[:8])}")


def check_range(values: Tensor, max_value: int) -> None:
    """Integers from 0 to `max_value`."""
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= max_value:
        raise TensorMismatch(f"C needs numbers from 0 to {max_value}, got {int(values.min())} to {int(values.max())}")


# --------------------------------------------------------------------------------------- keys and values of the sources


class SourceKV(NamedTuple):
    """Cross-attention keys and values of each layer as C reads them: floats, or 16 bits in panels."""

    pairs: Sequence[KVPair]
    in_panels: bool


def source_panels(pair: KVPair) -> KVPair | None:
    """Keys and values [sources, G, S, K] in 16 bits as decode_attention.h has them; None if they do not fit 16 bits.

    S is padded to whole panels of 16: keys become [sources, G, S / 16, K, 16], values [sources, G, K / 16, S, 16].
    """
    k, v = (t.half() for t in pair)
    if not all(bool(t.abs().amax() < torch.inf) for t in (k, v)):  # also with a NaN
        return None
    padding = (0, 0, 0, -k.shape[2] % SOURCE_PANEL)
    k, v = (torch.nn.functional.pad(t, padding) for t in (k, v))
    keys = k.unflatten(2, (-1, SOURCE_PANEL)).mT.contiguous()
    values = v.unflatten(3, (-1, SOURCE_PANEL)).transpose(2, 3).contiguous()
    return keys, values


# ------------------------------------------------------------------------------------------------------------- the call


class DecodeRunner:
    """Runs decode_step.c for one stack, whose weights must stay where they are meanwhile."""

    def __init__(self, export: DecoderExport) -> None:
        self.export = export
        self.c_model = export.c_model
        self.layers = export.layers
        heads, kv_heads, head_dim, _ = export.attention_shape
        self.qkv_width = (heads + 2 * kv_heads) * head_dim
        self.max_width = max(self.c_model.d_model, export.d_ff, heads * head_dim)
        self._scratch: ScratchBuffers | None = None
        self._keep_alive: list[Tensor | KVPair | None] = []  # tensors C has addresses of, besides the weights
        self._source = SourceKV((), in_panels=False)
        self._source_tensors: list[Tensor] = []  # those that _source was made of
        self._batch_tensors: tuple[Tensor | None, Tensor | None] = (None, None)
        self._cache_limits = TokenLimits(self.c_model.token_embedding.rows, 0, 0, 0, 0, 0)
        self._limits = self._cache_limits

    def can_embed(self, sequences: Sequence[Sequence[int]], max_length: int) -> bool:
        """Whether all ids and positions have an embedding; the modules refuse the others."""
        ids = [token_id for sequence in sequences for token_id in sequence]
        in_vocabulary = min(ids) >= 0 and max(ids) < self.c_model.token_embedding.rows
        return max_length <= self.export.max_positions and in_vocabulary

    def attach_cache(self, kv_cache: Sequence[KVPair], source_kv: Sequence[KVPair] = ()) -> None:
        """Pass C the KV cache [rows, G, length, K] of each layer, and the sources' [sources, G, source_length, K]."""
        _, kv_heads, head_dim, _ = self.export.attention_shape
        cache_rows, _, length, _ = kv_cache[0][0].shape
        sources, _, source_length, _ = source_kv[0][0].shape if source_kv else (0, 0, 0, 0)
        source = self._source_kv(source_kv)
        if source.in_panels:
            source_length = source.pairs[0][1].shape[3]  # padded
        self.c_model.source_panels = int(source.in_panels)
        self._keep_alive = [*kv_cache, *source.pairs, *self._set_lengths(length, source_length)]

        for layer, pair in zip(self.layers, kv_cache, strict=True):
            layer.keys, layer.values = (float_ptr(t, cache_rows, kv_heads, length, head_dim) for t in pair)
        for layer, pair in zip(self.layers, source.pairs, strict=bool(source_kv)):
            if source.in_panels:
                panels = (source_length // SOURCE_PANEL, head_dim), (head_dim // SOURCE_PANEL, source_length)
                layer.source_keys, layer.source_values = (
                    checked_ptr(t, torch.float16, sources, kv_heads, *of_panels, SOURCE_PANEL)
                    for t, of_panels in zip(pair, panels, strict=True)
                )
            else:
                shape = (sources, kv_heads, source_length, head_dim)
                layer.source_keys, layer.source_values = (float_ptr(t, *shape) for t in pair)

        positions = int(min(length, self.export.max_positions))
        tokens = self.c_model.token_embedding.rows
        self._cache_limits = TokenLimits(tokens, positions, cache_rows, sources, length, self.c_model.adapters)
        self._limits = self._cache_limits

    def _source_kv(self, source_kv: Sequence[KVPair]) -> SourceKV:
        """The sources as C reads them: in panels of 16 bits where the weights have 8 or fewer; else the floats.

        They are made once: a cache that grows attaches the same sources again.
        """
        tensors = [t for pair in source_kv for t in pair]
        if len(tensors) == len(self._source_tensors) and all(map(is_, tensors, self._source_tensors)):
            return self._source
        self._source = SourceKV(source_kv, in_panels=False)
        self._source_tensors = tensors
        _, _, head_dim, _ = self.export.attention_shape
        quantized = all(layer.cross_out.kind >= FORMAT_CODES["Q8_0"] for layer in self.layers)
        if source_kv and quantized and head_dim % SOURCE_PANEL == 0 and decode_constants()["HAVE_SOURCE_PANELS"]:
            panels = [pair for pair in map(source_panels, source_kv) if pair is not None]
            if len(panels) == len(source_kv):
                self._source = SourceKV(panels, in_panels=True)
        return self._source

    def _set_lengths(self, cache_length: int, source_length: int) -> list[Tensor | None]:
        """Pass C the lengths of cache and sources, and the position embeddings and rotary angles of that length."""
        self.c_model.length = cache_length
        self.c_model.max_source_length = source_length

        positions = int(min(cache_length, self.export.max_positions))
        embeddings = self.export.position_embeddings(cache_length)
        self.c_model.position_embeddings = float_ptr(embeddings, positions, self.c_model.d_model)

        cos, sin = self.export.cos_sin(cache_length) or (None, None)
        self.c_model.cos = float_ptr(cos, cache_length, self.c_model.rotary_dim // 2)
        self.c_model.sin = float_ptr(sin, cache_length, self.c_model.rotary_dim // 2)
        self._scratch = None
        return [embeddings, cos, sin]

    def set_batch(self, row_of_token: Tensor | None, source_lengths: Tensor | None) -> None:
        """Pass C the maps of the batch; called before each step.

        row_of_token [rows, length]: the cache row that has each token's keys; source_lengths [sources].
        """
        limits = self._cache_limits
        self._batch_tensors = (row_of_token, source_lengths)  # kept alive
        self.c_model.row_of_token = None
        self.c_model.source_lengths = None
        if row_of_token is not None:
            check_range(row_of_token, limits.cache_rows - 1)
            rows = len(row_of_token)
            self.c_model.row_of_token = checked_ptr(row_of_token, torch.int32, rows, limits.cache_length)
            limits = limits._replace(cache_rows=min(limits.cache_rows, rows))
        if source_lengths is not None:
            check_range(source_lengths, self.c_model.max_source_length)
            self.c_model.source_lengths = checked_ptr(source_lengths, torch.int32, len(source_lengths))
        if self.export.has_cross_attention:
            sources = 0 if source_lengths is None else len(source_lengths)
            limits = limits._replace(sources=min(limits.sources, sources))
        self._limits = limits

    def run(self, token_fields: Sequence[tuple[int, ...]], output_rows: Sequence[int], out: Tensor) -> None:
        """One step over tokens (fields of CToken); writes out [output_rows, V]: logits, or states without a head."""
        check_tokens(token_fields, self._limits, self.export.has_cross_attention)
        check_output_rows(output_rows, len(token_fields))
        logits = c_void_p(checked_ptr(out, torch.float32, len(output_rows), self.c_model.vocab))

        threads = torch.get_num_threads()
        if self._scratch is None or not self._scratch.fits(len(token_fields), threads):
            self._scratch = ScratchBuffers(self.c_model, self.qkv_width, self.max_width, len(token_fields), threads)

        tokens = (CToken * len(token_fields))(*(CToken(*fields) for fields in token_fields))
        library = decode_library()
        assert library is not None
        library.decode_step(
            ctypes.byref(self.c_model),
            tokens,
            len(token_fields),
            (c_int32 * len(output_rows))(*output_rows),
            len(output_rows),
            self._scratch.scratch,
            self.max_width,
            logits,
        )


def token_chunks(sizes: Sequence[int]) -> Iterator[range]:
    """Ranges of neighbouring sequences with at most MAX_BATCHED_TOKENS tokens in all; a longer one is alone."""
    first = 0
    total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > MAX_BATCHED_TOKENS:
            yield range(first, i)
            first = i
            total = 0
        total += size
    yield range(first, len(sizes))
