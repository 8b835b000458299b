"""A built model as the structs of cpu/csrc/decode_step.c.

A model with anything in it that decode_step.c does not support is left to its modules: other parts than those below,
wrapped layers, widths that are no multiple of 32, forward hooks. Pointers go to the model's own tensors wherever their
dtype allows it; what adapters change is copied.
"""

from __future__ import annotations

import math
from copy import deepcopy
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
from headwater.cpu.build import TensorMismatch
from headwater.cpu.decode import FLOAT_DTYPES, WeightExport, check_model_sizes
from headwater.cpu.layout import BRANCHES, DECODE_ACTIVATION_CODES, LINEAR_NAMES, CLayer, CMatrix, CModel, CNorm
from headwater.quantization.int8 import Int8Linear
from headwater.quantization.layers import QuantizedEmbedding, QuantizedLinear, QuantizedModule
from headwater.tuning.batches import AdapterIndex
from headwater.tuning.linear import TunedLinear
from headwater.variants.rope_scaling import DynamicScaling

C_ACTIVATIONS = [ACTIVATIONS[name] for name in DECODE_ACTIVATION_CODES]  # in the order of their codes
FORMAT_OF_DTYPE = {dtype: block_format for block_format, dtype in FLOAT_DTYPES.items()}
LINEAR_TYPES = (nn.Linear, QuantizedLinear)
INPUT_GAIN_NAME = "down"  # the matrix whose input an adapter may scale: the others share theirs
EMBEDDING_TYPES = (nn.Embedding, QuantizedEmbedding)
C_BRANCH_NAMES = {"self_attn": "attn", "cross_attn": "cross", "ffn": "ffn"}  # role of a branch -> its name in C


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
        self.adapters = AdapterIndex(model)
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
        require(type(ffn) in (FeedForwardLayer, GatedFeedForwardLayer))
        require(type(ffn.up) in (*LINEAR_TYPES, TunedLinear))
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
        require(type(embed.tokens) in EMBEDDING_TYPES)

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
            adapters=len(self.adapters.names),
            max_rank=self.weights.max_rank,
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
            if name in linears:
                setattr(layer, name, self._matrix(linears[name], *shapes[name], name == INPUT_GAIN_NAME))
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

    def _matrix(self, linear: Any, rows: int, cols: int, can_scale_input: bool = False) -> CMatrix:
        """A linear layer, with what the adapters change in it."""
        if type(linear) is TunedLinear:
            matrix = self._matrix(linear.base, rows, cols)
            terms = linear.terms(self.adapters.names)
            require(can_scale_input or all(of_one.input_gain is None for of_one in terms))
            matrix.changes = self.weights.changes(terms, rows, cols)
            return matrix
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
