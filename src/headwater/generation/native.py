"""Native (C) forward passes: decoder steps over the batch KV cache, and the encoder (cpu/csrc/decode_step.c).

A built model is exported to the structs of decode_step.c, which computes the same as its modules. A model with anything
in it that decode_step.c does not support is left to its modules: other parts than those below, wrapped or changed
layers, widths that are no multiple of 32, forward hooks. Pointers go to the model's own tensors wherever their dtype
allows it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from copy import deepcopy
from operator import add, is_
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.embeddings import EmbeddingsLayer
from headwater.core.feedforward import ACTIVATIONS, FeedForwardLayer, GatedFeedForwardLayer
from headwater.core.heads import LMHeadLayer
from headwater.core.kernels import Kernel, SDPAKernel
from headwater.core.masks import Bidirectional, Causal, SlidingWindow
from headwater.core.model import Transformer
from headwater.core.norms import LayerNormLayer, NoNormLayer, RMSNormLayer
from headwater.core.positions import LearnedEncoding, PositionEncoding, RotaryEncoding, SinusoidalEncoding
from headwater.core.stack import BlockLayer
from headwater.cpu import decode
from headwater.cpu.build import TensorMismatch, decode_library
from headwater.cpu.decode import FLOAT_DTYPES, DecodeRunner, WeightExport, check_model_sizes, token_chunks
from headwater.cpu.layout import BRANCHES, DECODE_ACTIVATION_CODES, LINEAR_NAMES, CLayer, CMatrix, CModel, CNorm
from headwater.generation.kv_cache import BatchKVCache
from headwater.quantization.int8 import Int8Linear
from headwater.quantization.layers import QuantizedEmbedding, QuantizedLinear, QuantizedModule
from headwater.variants.rope_scaling import DynamicScaling

# ------------------------------------------------------------------------------------------- export to decode_step.c

C_ACTIVATIONS = [ACTIVATIONS[name] for name in DECODE_ACTIVATION_CODES]  # in the order of their codes
FORMAT_OF_DTYPE = {dtype: block_format for block_format, dtype in FLOAT_DTYPES.items()}
LINEAR_TYPES = (nn.Linear, QuantizedLinear)
EMBEDDING_TYPES = (nn.Embedding, QuantizedEmbedding)
C_BRANCH_NAMES = {"self_attn": "attn", "cross_attn": "cross", "ffn": "ffn"}  # role of a branch -> its name in C
MAX_SOURCE_TOKENS = 4096  # of a source; a longer one needs less memory in the modules, a layer at a time


class UnsupportedModel(Exception):
    """A part that decode_step.c does not support; the modules do the work."""


def require(condition: bool) -> None:
    """Raise UnsupportedModel unless the condition holds."""
    if not condition:
        raise UnsupportedModel


class ModelExport:
    """A decoder or encoder stack as the structs of decode_step.c.

    c_model: the struct; position: the rotary encoding of q and k; blocks: the layers in the order in which they run.
    """

    def __init__(self, model: Transformer, stack_name: str = "decoder") -> None:
        require(getattr(model, stack_name) is not None and not model.training)
        require(not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
        self.weights = WeightExport()
        self.stack: Any = getattr(model, stack_name)
        self.is_decoder = stack_name == "decoder"
        self.blocks = [self.stack.layers[index] for index in self.stack.order]
        self.has_cross_attention = self.is_decoder and model.encoder is not None
        roles = list(C_BRANCH_NAMES) if self.has_cross_attention else ["self_attn", "ffn"]
        require(bool(self.blocks) and all(type(block) is BlockLayer for block in self.blocks))
        require(all([names[0] for names in block.names] == roles for block in self.blocks))

        self.position = self._position()
        self.attention_shape = self._attention_shape(self.blocks[0].self_attn)
        self.d_model = self.stack.spec.d_model
        self.act, self.d_ff = self._feed_forward(self.blocks[0].ffn)
        require(self.act in C_ACTIVATIONS)

        try:
            self.layers = (CLayer * len(self.blocks))(*map(self._c_layer, self.blocks))
            self.c_model = self._c_model(self._split_head(model.head) if self.is_decoder else None)
            check_model_sizes(self.c_model)
        except TensorMismatch:
            raise UnsupportedModel from None

    def _split_head(self, head: Any) -> Any:
        """The head that C computes: none where it is of int8 rows, which its own module multiplies faster."""
        self.head_module = head if type(getattr(head, "out", None)) is Int8Linear else None
        return head if self.head_module is None else None

    @staticmethod
    def _attention_shape(attn: Any) -> tuple[int, int, int, float]:
        require(isinstance(attn, AttentionLayer) and type(attn.kernel) in (SDPAKernel, Kernel))
        require(attn.head_dim == attn.v_head_dim)
        return attn.heads, attn.kv_heads, attn.head_dim, attn.kernel.scale

    @staticmethod
    def _feed_forward(ffn: Any) -> tuple[Any, int]:
        require(type(ffn) in (FeedForwardLayer, GatedFeedForwardLayer) and type(ffn.up) in LINEAR_TYPES)
        return ffn.act, ffn.up.out_features

    def _matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """[rows, columns] of every matrix of a layer, as decode_step.c reads them."""
        heads, kv_heads, head_dim, _ = self.attention_shape
        q_width = heads * head_dim
        kv_width = kv_heads * head_dim
        return {
            "q": (q_width, self.d_model),
            "k": (kv_width, self.d_model),
            "v": (kv_width, self.d_model),
            "out": (self.d_model, q_width),
            "cross_q": (q_width, self.d_model),
            "cross_out": (self.d_model, q_width),
            "gate": (self.d_ff, self.d_model),
            "up": (self.d_ff, self.d_model),
            "down": (self.d_model, self.d_ff),
        }

    def _position(self) -> PositionEncoding:
        require(len(self.stack.position_encodings) == 1)
        position: PositionEncoding = self.stack.position_encodings[0]
        require(type(position) in (PositionEncoding, RotaryEncoding))
        require(not isinstance(position, RotaryEncoding) or not isinstance(position.scaling, DynamicScaling))
        return position

    def _c_model(self, head: Any) -> CModel:
        """The struct of the stack: sizes, embeddings, layers, final norm and head."""
        embed = self.stack.embed
        require(type(embed) is EmbeddingsLayer and embed.token_types is None and type(embed.projection) is nn.Identity)
        require(type(embed.position) in (PositionEncoding, LearnedEncoding, SinusoidalEncoding))
        require(head is None or (type(head) is LMHeadLayer and type(head.transform) is nn.Identity))
        require(type(embed.tokens) in EMBEDDING_TYPES and (head is None or type(head.out) in LINEAR_TYPES))

        heads, kv_heads, head_dim, scale = self.attention_shape
        width = self.d_model
        out = CMatrix() if head is None else self._matrix(head.out, head.out.out_features, width)
        rotary_dim = 2 * self.position.inv_freq.numel() if isinstance(self.position, RotaryEncoding) else 0
        return CModel(
            layers=len(self.layers),
            d_model=width,
            d_ff=self.d_ff,
            vocab=out.rows or width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            act=C_ACTIVATIONS.index(self.act),
            scale=scale,
            embed_scale=embed.scale,
            head_scale=1.0 if head is None else head.scale,
            token_embedding=self._weight_matrix(embed.tokens, embed.tokens.num_embeddings, width, None),
            head=out,
            embed_norm=self._norm(embed.norm, width),
            final_norm=self._norm(self.stack.final_norm, width),
            layer=self.layers,
        )

    def _c_layer(self, block: Any) -> CLayer:
        """The struct of one layer: its norms and matrices."""
        attn = block.self_attn
        require(type(attn) is AttentionLayer and self._attention_shape(attn) == self.attention_shape)
        require(self._feed_forward(block.ffn) == (self.act, self.d_ff))

        # norms: of each branch, and of queries and keys
        layer = CLayer()
        branches = BRANCHES if self.has_cross_attention else ("attn", "ffn")
        for branch, name in zip(block.branches, branches, strict=True):
            require(type(branch.out_norm) is NoNormLayer)
            setattr(layer, f"{name}_norm", self._norm(branch.norm, self.d_model))
            setattr(layer, f"{name}_post", self._norm(branch.post_norm, self.d_model))
        layer.q_norm = self._norm(attn.q_norm, attn.head_dim)
        layer.k_norm = self._norm(attn.k_norm, attn.head_dim)

        # weight matrices
        linears = self._linears(block)
        shapes = self._matrix_shapes()
        for name in LINEAR_NAMES:
            setattr(layer, name, self._matrix(linears[name], *shapes[name]) if name in linears else CMatrix())
        layer.window = self._window(self.stack.mask_groups[attn.mask_group].rule)
        return layer

    def _linears(self, block: Any) -> dict[str, Any]:
        """The linear layers of a block by their names in C."""
        attn = block.self_attn
        ffn = block.ffn
        linears = {"q": attn.q, "k": attn.k, "v": attn.v, "out": attn.out, "up": ffn.up, "down": ffn.down}
        if isinstance(ffn, GatedFeedForwardLayer):
            linears["gate"] = ffn.gate
        if self.has_cross_attention:
            cross = block.cross_attn
            require(type(cross) is CrossAttentionLayer and self._attention_shape(cross) == self.attention_shape)
            require(type(cross.q_norm) is NoNormLayer)  # k_norm is in the keys, which its module computes
            linears |= {"cross_q": cross.q, "cross_out": cross.out}
        return linears

    def _window(self, rule: Any) -> int:
        """Sliding window of a mask rule: how many tokens back a token sees, itself included; 0: all of them."""
        require(type(rule) in ((Causal, SlidingWindow) if self.is_decoder else (Bidirectional,)))
        return rule.size if isinstance(rule, SlidingWindow) else 0

    def _norm(self, norm: Any, width: int) -> CNorm:
        if type(norm) is NoNormLayer:
            return CNorm()
        if isinstance(norm, LayerNormLayer):
            return self.weights.norm(norm, norm.weight, norm.bias, width)
        require(isinstance(norm, RMSNormLayer))
        return self.weights.norm(norm, norm.gain(), None, width)

    def _matrix(self, linear: Any, rows: int, cols: int) -> CMatrix:
        require(type(linear) in LINEAR_TYPES)
        return self._weight_matrix(linear, rows, cols, linear.bias)

    def _weight_matrix(self, module: Any, rows: int, cols: int, bias: Tensor | None) -> CMatrix:
        if isinstance(module, QuantizedModule):
            return self.weights.matrix(module.blocks, module.block_format.name, rows, cols, bias)
        require(module.weight.dtype in FORMAT_OF_DTYPE)
        return self.weights.matrix(module.weight, FORMAT_OF_DTYPE[module.weight.dtype], rows, cols, bias)

    @property
    def max_positions(self) -> float:
        """The number of positions that have an embedding."""
        limit = self.stack.spec.max_positions
        return math.inf if limit is None else limit

    def position_embeddings(self, num_positions: int) -> Tensor | None:
        """Position embeddings [num_positions, D] (fewer where a learned table is shorter), or None."""
        position = self.stack.embed.position
        if type(position) is PositionEncoding:
            return None
        num_positions = int(min(num_positions, self.max_positions))
        zeros = torch.zeros(1, num_positions, self.stack.spec.d_model)
        return position.add(zeros, torch.arange(num_positions)[None])[0].float().contiguous()

    def cos_sin(self, num_positions: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [num_positions, rotary_dim / 2] of the rotary angles, or None."""
        cos_sin = deepcopy(self.position).float().cos_sin(torch.arange(num_positions)[None], torch.float32)
        if cos_sin is None:
            return None
        cos, sin = cos_sin
        return cos[0, 0].contiguous(), sin[0, 0].contiguous()


# -------------------------------------------------------------------------------------------------- decoder and encoder


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
        token_fields, output_rows = self._token_fields(cache, new_ids, logits_to_keep)

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
        cache: BatchKVCache, new_ids: Sequence[Sequence[int]], logits_to_keep: int
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """The fields of CToken of all new tokens, and the indices of those whose logits are kept."""
        token_fields: list[tuple[int, ...]] = []
        output_rows: list[int] = []
        source_row_of = cache.source_row_of
        for row, (length, ids) in enumerate(zip(cache.lengths, new_ids, strict=True)):
            source = source_row_of[row]
            for position, token_id in enumerate(ids, start=length):
                token_fields.append((token_id, position, row, source, position + 1))
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

    def supports(self, sources: Sequence[Sequence[int]]) -> bool:
        """Whether no source is empty or too long, and all ids and positions have an embedding."""
        max_length = max(map(len, sources))
        return max_length <= MAX_SOURCE_TOKENS and all(map(len, sources)) and self.can_embed(sources, max_length)

    @torch.inference_mode()
    def encode(self, sources: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [B, S, D] of the sources; zeros beyond the end of each."""
        lengths = [len(source) for source in sources]
        hidden_states = torch.zeros(len(sources), max(lengths), self.c_model.d_model)
        for chunk in token_chunks(lengths):
            self._encode_batch(sources[chunk.start : chunk.stop], hidden_states[chunk.start : chunk.stop])
        return hidden_states

    def _encode_batch(self, sources: Sequence[Sequence[int]], hidden_states: Tensor) -> None:
        """Encode sources together and write their hidden states [B, S, D]."""
        _, kv_heads, head_dim, _ = self.export.attention_shape
        length = max(map(len, sources))
        keys, values = torch.empty(2, len(sources), kv_heads, length, head_dim)
        # the next layer may overwrite a layer's keys and values
        self.attach_cache([(keys, values)] * len(self.layers))
        token_fields = [
            (token_id, position, row, 0, len(source))
            for row, source in enumerate(sources)
            for position, token_id in enumerate(source)
        ]
        out = torch.empty(len(token_fields), self.c_model.d_model)
        self.run(token_fields, range(len(token_fields)), out)
        for row_states, states in zip(hidden_states, out.split([len(source) for source in sources]), strict=True):
            row_states[: len(states)] = states
