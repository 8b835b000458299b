"""One step of a decoder in C (fast/step.c), read off the built model: the same arithmetic as its modules.

A model with anything in it that step.c does not know (another part, a tuned layer, someone listening at a tap) is left
to its modules; nothing has to be asked for, and nothing is lost but time. A law in the tests says that both agree.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer
from headwater.core.embed import TokenEmbedding
from headwater.core.feedforward import ACTIVATIONS, FeedForwardLayer, GatedFeedForwardLayer
from headwater.core.heads import LanguageScores
from headwater.core.kernels import FusedKernel, Kernel
from headwater.core.norms import OffsetRMSNormLayer
from headwater.core.positions import LearnedTable, Position, Turn
from headwater.core.rope import DynamicScaling
from headwater.core.stack import BlockLayer
from headwater.fast.compiled import library
from headwater.fast.packed import CODES, Matrix, PackedLinear, PackedTable
from headwater.generation.slots import Slots

FEW = 8  # tokens a call; beyond it, matrix products of the modules are the better way
ACTS = [ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_tanh", "relu", "quick_gelu")]  # as step.c numbers them

SIZES = ("layers", "d_model", "heads", "kv_heads", "head_dim", "turned", "d_ff", "vocab", "length", "act", "rounds")
ROOMS = ("x", "y", "qkv", "mixed", "hidden", "scores", "q8", "ds8")


class Norm(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Norm) for name in ("attn_norm", "q_norm", "k_norm", "ffn_norm")),
        *((name, Matrix) for name in ("q", "k", "v", "out", "gate", "up", "down")),
        ("window", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Whole(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in SIZES),
        *((name, c_float) for name in ("scale", "embed_scale", "head_scale")),
        ("table", Matrix),
        ("head", Matrix),
        ("places", c_void_p),
        ("final", Norm),
        ("layer", ctypes.POINTER(Layer)),
    )


class Token(ctypes.Structure):
    _fields_ = (("token", c_int32), ("place", c_int32), ("slot", c_int32))


class Scratch(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ROOMS)


class Unknown(Exception):
    """A part step.c does not know; the modules do the work."""


def known(holds: bool) -> None:
    if not holds:
        raise Unknown


class Stepper:
    """step.c for one model whose weights stay where they are while it lives."""

    @classmethod
    def of(cls, model: Any) -> Stepper | None:
        try:
            known(library() is not None)
            return cls(model)
        except Unknown:
            return None

    def __init__(self, model: Any) -> None:
        known(model.encoder is None and not model.training)
        known(not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
        self.kept: list[Tensor] = []  # what C holds pointers to
        stack, self.rounds = model.decoder, False
        self.position = self._position(stack)
        blocks = [stack.layers[index] for index in stack.order]
        known(bool(blocks) and type(model.head) is LanguageScores and type(model.head.transform) is nn.Identity)
        attn, self.act = blocks[0].self_attn, blocks[0].ffn.act
        known(self.act in ACTS)
        self.shape = (attn.heads, attn.kv_heads, attn.head_dim, attn.kernel.scale)
        self.layers = (Layer * len(blocks))(*(self._layer(block, stack) for block in blocks))
        self.d_ff = blocks[0].ffn.up.out_features
        self.whole = self._whole(model, stack, attn)
        self.slots = [attention.slot(step) for step, attention in enumerate(b.self_attn for b in blocks)]
        self.most = max(self.whole.d_model, self.d_ff, attn.heads * attn.head_dim)
        self._pinned: tuple[int, ...] = ()
        self._scratch: dict[int, tuple[Scratch, list[Tensor]]] = {}

    # -------------------------------------------------------------------------------- from modules to structures

    def _position(self, stack: Any) -> Position:
        known(len(stack.positions) == 1 and type(stack.positions[0]) in (Position, Turn))
        position: Position = stack.positions[0]
        known(not isinstance(position, Turn) or not isinstance(position.scaling, DynamicScaling))
        return position

    def _whole(self, model: Any, stack: Any, attn: AttentionLayer) -> Whole:
        embed, head = stack.embed, model.head
        plain = type(embed) is TokenEmbedding and embed.kinds is None
        known(plain and type(embed.norm) is nn.Identity and type(embed.project) is nn.Identity)
        known(type(embed.position) in (Position, LearnedTable))
        table, out = self._table(embed.tokens), self._matrix(head.out)
        places = None
        if isinstance(embed.position, LearnedTable):
            rows = embed.position.table.weight[embed.position.first :]
            places = self._pointer(rows.contiguous())
        final = self._norm(stack.final_norm)
        turned = 2 * self.position.speed.numel() if isinstance(self.position, Turn) else 0
        sizes = (len(self.layers), stack.spec.d_model, attn.heads, attn.kv_heads, attn.head_dim, turned, self.d_ff)
        numbers = (head.out.out_features, 0, ACTS.index(self.act), int(self.rounds))
        scales = (attn.kernel.scale, embed.scale, head.scale)
        return Whole(*sizes, *numbers, *scales, table, out, places, final, self.layers)

    def _layer(self, block: Any, stack: Any) -> Layer:
        roles = [names[0] for names in block.names] if type(block) is BlockLayer else []
        known(roles == ["self_attn", "ffn"])
        attn, ffn = block.self_attn, block.ffn
        known(type(attn) is AttentionLayer and type(attn.kernel) in (FusedKernel, Kernel))
        known((attn.heads, attn.kv_heads, attn.head_dim, attn.kernel.scale) == self.shape)
        known(attn.head_dim == attn.v_head_dim and type(ffn) in (FeedForwardLayer, GatedFeedForwardLayer))
        known(ffn.act is self.act)
        idle = [getattr(block, f"{role}_{end}") for role in roles for end in ("out_norm", "post_norm")]
        known(all(type(norm) is nn.Identity for norm in idle))
        rule, _ = stack.lanes[attn.lane]
        back, ahead = rule.reach
        known(ahead == 0)
        norms = (block.self_attn_norm, attn.q_norm, attn.k_norm, block.ffn_norm)
        gate = self._matrix(ffn.gate) if isinstance(ffn, GatedFeedForwardLayer) else Matrix()
        linears = [self._matrix(m) for m in (attn.q, attn.k, attn.v, attn.out)]
        rest = (gate, self._matrix(ffn.up), self._matrix(ffn.down))
        return Layer(*(self._norm(norm) for norm in norms), *linears, *rest, 0 if back is None else back + 1)

    def _norm(self, norm: Any) -> Norm:
        if type(norm) is nn.Identity:
            return Norm()
        known(type(norm) in (nn.RMSNorm, nn.LayerNorm, OffsetRMSNormLayer))
        weight, bias = norm.weight, getattr(norm, "bias", None)
        weight = weight + 1 if type(norm) is OffsetRMSNormLayer else weight
        eps = float(norm.eps)
        return Norm(
            int(type(norm) is nn.LayerNorm), eps, self._pointer(weight), bias if bias is None else self._pointer(bias)
        )

    def _matrix(self, linear: Any) -> Matrix:
        known(type(linear) in (nn.Linear, PackedLinear) and linear.in_features % 32 == 0)
        bias = None if linear.bias is None else self._pointer(linear.bias)
        if isinstance(linear, PackedLinear):
            self.rounds = True
            return Matrix(CODES[linear.kind.name], linear.rows, linear.columns, self._pointer(linear.blocks), bias)
        return Matrix(CODES["F32"], *linear.weight.shape, self._pointer(linear.weight), bias)

    def _table(self, table: Any) -> Matrix:
        known(type(table) in (nn.Embedding, PackedTable))
        if isinstance(table, PackedTable):
            return Matrix(CODES[table.kind.name], table.rows, table.columns, self._pointer(table.blocks), None)
        return Matrix(CODES["F32"], *table.weight.shape, self._pointer(table.weight), None)

    def _pointer(self, tensor: Tensor) -> int:
        known(tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.uint8))
        self.kept.append(tensor)
        return tensor.data_ptr()

    # ---------------------------------------------------------------------------------------------------- running

    @torch.inference_mode()
    def read(self, slots: Slots, texts: list[list[int]]) -> Tensor:
        """Read one or a few new tokens a row; scores [tokens, V] after each, row after row. FEW tokens at most."""
        begins = slots.lengths
        places = [begins[row] + i for row, text in enumerate(texts) for i in range(len(text))]
        rows = [row for row, text in enumerate(texts) for _ in text]
        tokens = [token for text in texts for token in text]
        self._pin(slots, max(places) + 1)
        given = (Token * len(tokens))(*map(Token, tokens, places, rows))
        cos, sin = self._angles(places)
        logits = torch.empty(len(tokens), self.whole.vocab)
        pointers = [c_void_p(t.data_ptr()) for t in (cos, sin)]
        library().step(  # type: ignore[union-attr]
            ctypes.byref(self.whole), given, len(tokens), *pointers, self._room(len(tokens)), self.most,
            c_void_p(logits.data_ptr()),
        )  # fmt: skip
        slots.held = [
            held._replace(length=held.length + len(text)) for held, text in zip(slots.held, texts, strict=True)
        ]
        return logits

    def _angles(self, places: list[int]) -> tuple[Tensor, Tensor]:
        angles = self.position.angles(torch.tensor([places]), torch.float32)
        if angles is None:
            return torch.empty(0), torch.empty(0)
        return angles[0].contiguous(), angles[1].contiguous()

    def _pin(self, slots: Slots, columns: int) -> None:
        """Tell C where the keys and values lie, where they have moved since the last step."""
        _, kv_heads, head_dim, _ = self.shape
        slots.reserve(self.slots, columns, kv_heads, head_dim)
        pairs = [slots.room[slot] for slot in self.slots]
        pinned = tuple(kept.data_ptr() for pair in pairs for kept in pair)
        if pinned == self._pinned:
            return
        self.whole.length = pairs[0][0].shape[2]
        assert all(kept.shape[2] == self.whole.length and kept.is_contiguous() for pair in pairs for kept in pair)
        for layer, (k, v) in zip(self.layers, pairs, strict=True):
            layer.keys, layer.values = k.data_ptr(), v.data_ptr()
        self._pinned = pinned
        self._scratch = {}

    def _room(self, rows: int) -> Scratch:
        if rows not in self._scratch:
            heads, kv_heads, head_dim, _ = self.shape
            wide, most = (heads + 2 * kv_heads) * head_dim, self.most
            threads = torch.get_num_threads()
            library().threads(threads)  # type: ignore[union-attr]
            floats = (self.whole.d_model, most, wide, most, 2 * self.d_ff)
            tensors = [torch.zeros(rows * n) for n in floats] + [torch.zeros(threads * self.whole.length)]
            tensors += [torch.zeros(rows * most, dtype=torch.int8), torch.zeros(rows * most // 16)]
            self._scratch[rows] = Scratch(*(t.data_ptr() for t in tensors)), tensors
        return self._scratch[rows][0]
