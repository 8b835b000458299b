"""A built model read off into the structures of step.c, if there is nothing in it that step.c does not know.

Unknown are: other parts than those below, tuned or changed layers, widths that are no multiple of 32, someone listening
at a tap. Pointers go to the model's own tensors wherever their form allows it.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.embed import TokenEmbedding
from headwater.core.feedforward import ACTIVATIONS, FeedForwardLayer, GatedFeedForwardLayer
from headwater.core.heads import LanguageScores
from headwater.core.kernels import FusedKernel, Kernel
from headwater.core.positions import LearnedTable, Position, Sines, Turn
from headwater.core.rope import DynamicScaling
from headwater.core.stack import BlockLayer
from headwater.fast.packed import PackedLinear, PackedTable
from headwater.fast.structures import BRANCHES, CODES, LINEARS, Layer, Matrix, Norm, Whole
from headwater.machine.linear import Linear
from headwater.machine.table import Table

ACTS = [ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_tanh", "relu", "quick_gelu")]  # as step.c numbers them
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ROLES = {"self_attn": "attn", "cross_attn": "cross", "ffn": "ffn"}  # ours, step.c's


class Unknown(Exception):
    """A part step.c does not know; the modules do the work."""


def known(holds: bool) -> None:
    if not holds:
        raise Unknown


class Plan:
    """whole: what step.c gets. position: what turns q and k. blocks: the layers in the order in which they run."""

    def __init__(self, model: Any, part: str = "decoder") -> None:
        known(getattr(model, part) is not None and not model.training)
        known(not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
        self.kept: list[Tensor] = []  # what C holds pointers to
        self.stack, self.writes = getattr(model, part), part == "decoder"
        self.blocks = [self.stack.layers[index] for index in self.stack.order]
        known(bool(self.blocks) and all(type(block) is BlockLayer for block in self.blocks))
        self.crosses = self.writes and model.encoder is not None
        self.position = self._position()
        self.attn = self.blocks[0].self_attn
        self.shape = self._shape(self.attn)
        self.act, self.d_ff = self.blocks[0].ffn.act, self.blocks[0].ffn.up.out_features
        known(self.act in ACTS)
        self.layers = (Layer * len(self.blocks))(*map(self._layer, self.blocks))
        self.whole = self._whole(model.head if self.writes else None)

    @staticmethod
    def _shape(attn: Any) -> tuple[int, int, int, float]:
        known(isinstance(attn, AttentionLayer) and type(attn.kernel) in (FusedKernel, Kernel))
        known(attn.head_dim == attn.v_head_dim)
        return attn.heads, attn.kv_heads, attn.head_dim, attn.kernel.scale

    def _position(self) -> Position:
        known(len(self.stack.positions) == 1 and type(self.stack.positions[0]) in (Position, Turn))
        position: Position = self.stack.positions[0]
        known(not isinstance(position, Turn) or not isinstance(position.scaling, DynamicScaling))
        return position

    def _whole(self, head: Any) -> Whole:
        embed, (heads, kv_heads, head_dim, scale) = self.stack.embed, self.shape
        known(type(embed) is TokenEmbedding and embed.kinds is None and type(embed.project) is nn.Identity)
        known(type(embed.position) in (Position, LearnedTable, Sines))
        known(head is None or (type(head) is LanguageScores and type(head.transform) is nn.Identity))
        width, out = self.stack.spec.d_model, Matrix() if head is None else self._matrix(head.out)
        turned = 2 * self.position.speed.numel() if isinstance(self.position, Turn) else 0
        return Whole(
            layers=len(self.layers), d_model=width, d_ff=self.d_ff, vocab=out.rows or width,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, turned=turned, act=ACTS.index(self.act),
            scale=scale, embed_scale=embed.scale, head_scale=1.0 if head is None else head.scale,
            table=self._table(embed.tokens), head=out, embed_norm=self._norm(embed.norm),
            final=self._norm(self.stack.final_norm), layer=self.layers,
        )  # fmt: skip

    def _layer(self, block: Any) -> Layer:
        roles = [names[0] for names in block.names]
        known(roles == (list(ROLES) if self.crosses else ["self_attn", "ffn"]))
        attn, ffn, made = block.self_attn, block.ffn, Layer()
        known(type(attn) is AttentionLayer and self._shape(attn) == self.shape)
        known(type(ffn) in (FeedForwardLayer, GatedFeedForwardLayer) and ffn.act is self.act)
        for role, branch in zip(roles, (BRANCHES if self.crosses else ("attn", "ffn")), strict=True):
            known(type(getattr(block, f"{role}_out_norm")) is nn.Identity)
            setattr(made, f"{branch}_norm", self._norm(getattr(block, f"{role}_norm")))
            setattr(made, f"{branch}_post", self._norm(getattr(block, f"{role}_post_norm")))
        made.q_norm, made.k_norm = self._norm(attn.q_norm), self._norm(attn.k_norm)
        linears = {"q": attn.q, "k": attn.k, "v": attn.v, "out": attn.out, "up": ffn.up, "down": ffn.down}
        if isinstance(ffn, GatedFeedForwardLayer):
            linears["gate"] = ffn.gate
        if self.crosses:
            cross = block.cross_attn
            known(type(cross) is CrossAttentionLayer and self._shape(cross) == self.shape)
            known(type(cross.q_norm) is nn.Identity)  # k_norm is in the keys, which its module makes
            linears |= {"cross_q": cross.q, "cross_out": cross.out}
        for name in LINEARS:
            setattr(made, name, self._matrix(linears[name]) if name in linears else Matrix())
        rule, _ = self.stack.lanes[attn.lane]
        back, ahead = rule.reach
        known(ahead == 0 if self.writes else back is ahead is None)
        made.window = 0 if back is None else back + 1
        return made

    def _norm(self, norm: Any) -> Norm:
        if type(norm) is nn.Identity:
            return Norm()
        known(hasattr(norm, "takes_branch"))
        layer = isinstance(norm, nn.LayerNorm)
        told = self.pointer(norm.bias) if layer and norm.bias is not None else None
        return Norm(int(layer), float(norm.eps), self.pointer(norm.weight if layer else norm.gain()), told)

    def _matrix(self, linear: Any) -> Matrix:
        known(type(linear) in (nn.Linear, Linear, PackedLinear) and linear.in_features % 32 == 0)
        bias = None if linear.bias is None else self.pointer(linear.bias)
        if isinstance(linear, PackedLinear):
            return Matrix(CODES[linear.kind.name], linear.rows, linear.columns, self.lies(linear.blocks), bias)
        return self._plain(linear.weight, bias)

    def _table(self, table: Any) -> Matrix:
        known(type(table) in (nn.Embedding, Table, PackedTable))
        if isinstance(table, PackedTable):
            return Matrix(CODES[table.kind.name], table.rows, table.columns, self.lies(table.blocks), None)
        return self._plain(table.weight, None)

    def _plain(self, weight: Tensor, bias: int | None) -> Matrix:
        known(weight.dtype in STORED)
        return Matrix(CODES[STORED[weight.dtype]], *weight.shape, self.lies(weight), bias)

    def pointer(self, tensor: Tensor) -> int:
        """Vectors are read as floats: where they are stored in fewer bits, a copy."""
        known(tensor.dtype in STORED)
        return self.lies(tensor.float())

    def lies(self, tensor: Tensor) -> int:
        known(tensor.device.type == "cpu" and tensor.is_contiguous())
        self.kept.append(tensor)
        return tensor.data_ptr()

    @property
    def longest(self) -> float:
        """So many places there are."""
        position = self.stack.embed.position
        return position.table.num_embeddings - position.first if isinstance(position, LearnedTable) else math.inf

    def places(self, count: int) -> Tensor | None:
        """[count, D] what the embedding adds at each place (fewer where a learned table is shorter)."""
        position = self.stack.embed.position
        if type(position) is Position:
            return None
        count = int(min(count, self.longest))
        nothing = torch.zeros(1, count, self.stack.spec.d_model)
        return position.add(nothing, torch.arange(count)[None])[0].float().contiguous()

    def angles(self, count: int) -> tuple[Tensor, Tensor] | None:
        """[count, n] cos and sin of what q and k are turned by at each place."""
        angles = deepcopy(self.position).float().angles(torch.arange(count)[None], torch.float32)
        return None if angles is None else (angles[0].contiguous(), angles[1].contiguous())
