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
from headwater.core.masks import Everyone, Past, Window
from headwater.core.positions import LearnedTable, Position, Sines, Turn
from headwater.core.rope import DynamicScaling
from headwater.core.stack import BlockLayer
from headwater.fast.contract import DTYPES, Weights, check_sizes
from headwater.fast.packed import Packed, PackedLinear, PackedTable
from headwater.fast.structures import BRANCHES, LINEARS, Layer, Matrix, Norm, Whole
from headwater.machine.linear import Linear
from headwater.machine.pointers import Misfit
from headwater.machine.table import Table

ACTS = [ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_tanh", "relu", "quick_gelu")]  # as step.c numbers them
STORED = {dtype: kind for kind, dtype in DTYPES.items()}
LINEAR, TABLES = (nn.Linear, Linear, PackedLinear), (nn.Embedding, Table, PackedTable)
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
        self.weights = Weights()
        self.stack, self.writes = getattr(model, part), part == "decoder"
        self.blocks = [self.stack.layers[index] for index in self.stack.order]
        self.crosses = self.writes and model.encoder is not None
        roles = list(ROLES) if self.crosses else ["self_attn", "ffn"]
        known(bool(self.blocks) and all(type(block) is BlockLayer for block in self.blocks))
        known(all([names[0] for names in block.names] == roles for block in self.blocks))
        self.position = self._position()
        self.shape, self.d_model = self._shape(self.blocks[0].self_attn), self.stack.spec.d_model
        self.act, self.d_ff = self._feed_forward(self.blocks[0].ffn)
        known(self.act in ACTS)
        try:
            self.layers = (Layer * len(self.blocks))(*map(self._layer, self.blocks))
            self.whole = self._whole(model.head if self.writes else None)
            check_sizes(self.whole)
        except Misfit:
            raise Unknown from None

    @staticmethod
    def _shape(attn: Any) -> tuple[int, int, int, float]:
        known(isinstance(attn, AttentionLayer) and type(attn.kernel) in (FusedKernel, Kernel))
        known(attn.head_dim == attn.v_head_dim)
        return attn.heads, attn.kv_heads, attn.head_dim, attn.kernel.scale

    @staticmethod
    def _feed_forward(ffn: Any) -> tuple[Any, int]:
        known(type(ffn) in (FeedForwardLayer, GatedFeedForwardLayer) and type(ffn.up) in LINEAR)
        return ffn.act, ffn.up.out_features

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """[rows, columns] of every matrix of a layer, as step.c reads them."""
        heads, kv_heads, head_dim, _ = self.shape
        queries, keys, width = heads * head_dim, kv_heads * head_dim, self.d_model
        to_queries, from_queries = (queries, width), (width, queries)
        return {
            "q": to_queries, "k": (keys, width), "v": (keys, width), "out": from_queries,
            "cross_q": to_queries, "cross_out": from_queries,
            "gate": (self.d_ff, width), "up": (self.d_ff, width), "down": (width, self.d_ff),
        }  # fmt: skip

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
        known(type(embed.tokens) in TABLES and (head is None or type(head.out) in LINEAR))
        width = self.d_model
        out = Matrix() if head is None else self._matrix(head.out, head.out.out_features, width)
        turned = 2 * self.position.speed.numel() if isinstance(self.position, Turn) else 0
        return Whole(
            layers=len(self.layers), d_model=width, d_ff=self.d_ff, vocab=out.rows or width,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, turned=turned, act=ACTS.index(self.act),
            scale=scale, embed_scale=embed.scale, head_scale=1.0 if head is None else head.scale,
            table=self._stored(embed.tokens, embed.tokens.num_embeddings, width, None), head=out,
            embed_norm=self._norm(embed.norm, width), final=self._norm(self.stack.final_norm, width), layer=self.layers,
        )  # fmt: skip

    def _layer(self, block: Any) -> Layer:
        attn, ffn, made = block.self_attn, block.ffn, Layer()
        known(type(attn) is AttentionLayer and self._shape(attn) == self.shape)
        known(self._feed_forward(ffn) == (self.act, self.d_ff))
        for (role, *_), branch in zip(block.names, (BRANCHES if self.crosses else ("attn", "ffn")), strict=True):
            known(type(getattr(block, f"{role}_out_norm")) is nn.Identity)
            setattr(made, f"{branch}_norm", self._norm(getattr(block, f"{role}_norm"), self.d_model))
            setattr(made, f"{branch}_post", self._norm(getattr(block, f"{role}_post_norm"), self.d_model))
        made.q_norm, made.k_norm = (self._norm(norm, attn.head_dim) for norm in (attn.q_norm, attn.k_norm))
        linears = {"q": attn.q, "k": attn.k, "v": attn.v, "out": attn.out, "up": ffn.up, "down": ffn.down}
        if isinstance(ffn, GatedFeedForwardLayer):
            linears["gate"] = ffn.gate
        if self.crosses:
            cross = block.cross_attn
            known(type(cross) is CrossAttentionLayer and self._shape(cross) == self.shape)
            known(type(cross.q_norm) is nn.Identity)  # k_norm is in the keys, which its module makes
            linears |= {"cross_q": cross.q, "cross_out": cross.out}
        shapes = self._shapes()
        for name in LINEARS:
            setattr(made, name, self._matrix(linears[name], *shapes[name]) if name in linears else Matrix())
        made.window = self._window(self.stack.lanes[attn.lane][0])
        return made

    def _window(self, rule: Any) -> int:
        """How many tokens back a token sees, itself included; 0 = all. Rules that hide more than that are not known."""
        known(type(rule) in ((Past, Window) if self.writes else (Everyone,)))
        return rule.size if isinstance(rule, Window) else 0

    def _norm(self, norm: Any, width: int) -> Norm:
        if type(norm) is nn.Identity:
            return Norm()
        known(hasattr(norm, "takes_branch"))
        layer = isinstance(norm, nn.LayerNorm)
        return self.weights.norm(norm, norm.weight if layer else norm.gain(), norm.bias if layer else None, width)

    def _matrix(self, linear: Any, rows: int, cols: int) -> Matrix:
        known(type(linear) in LINEAR)
        return self._stored(linear, rows, cols, linear.bias)

    def _stored(self, module: Any, rows: int, cols: int, bias: Tensor | None) -> Matrix:
        if isinstance(module, Packed):
            return self.weights.matrix(module.blocks, module.kind.name, rows, cols, bias)
        known(module.weight.dtype in STORED)
        return self.weights.matrix(module.weight, STORED[module.weight.dtype], rows, cols, bias)

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
        return None if angles is None else (angles[0][0, 0].contiguous(), angles[1][0, 0].contiguous())
