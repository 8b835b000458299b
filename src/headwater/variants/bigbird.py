"""BigBird: a block sees its neighbours, the first and the last block, and random blocks (Zaheer et al. 2020).

            blocks of keys
            ■ ■ ■ ■ ■ ■ ■ ■    the first and the last block see all
            ■ ■ ■ ▫ · · · ■
            ■ ■ ■ ■ · · ▫ ■    ■ neighbours, first and last block      ▫ a random block
            ■ · ■ ■ ■ ▫ · ■
    queries ■ ▫ · ■ ■ ■ · ■
            ■ · ▫ · ■ ■ ■ ■
            ■ · · ▫ · ■ ■ ■
            ■ ■ ■ ■ ■ ■ ■ ■

Time and memory are O(S · block · (5 + random blocks)). A row of up to 5 + 2 · random blocks has full attention.
B batch, H heads, G key/value heads, S tokens, b tokens a block, M blocks, R random blocks of a block, K head width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import functional
from headwater.core.attention import Attention, AttentionLayer, ForwardContext, split_heads
from headwater.core.banded import Band, GivenRows, LeadingIndex
from headwater.core.base import HeadSpec, NormSpec, check_dropout, check_positive
from headwater.core.embeddings import ModelInputs
from headwater.core.feedforward import get_activation
from headwater.core.kernels import SDPA, Eager
from headwater.core.masks import Bidirectional
from headwater.core.modules import Dropout
from headwater.core.norms import LayerNorm
from headwater.i18n import Message, _
from headwater.parts import must, part

# --------------------------------------------------------------------------------------------------- the random blocks


class RandomBlocks(ABC):
    """Which further blocks a block sees. count: how many."""

    count: int

    def first_block_bias(self, training: bool) -> float:
        """Added to the scores of the first block."""
        return 0.0

    @abstractmethod
    def choose(self, heads: int, blocks: int, layer: int, training: bool) -> Tensor | None:
        """[H, M - 2, R] for the blocks between the first and the last; None: no further blocks."""


@part
class SeededBlocks(RandomBlocks):
    """Random blocks drawn once from a seed: the same in each forward pass, others for each head and layer."""

    count: int = 3
    seed: int = 0

    def choose(self, heads: int, blocks: int, layer: int, training: bool) -> Tensor | None:
        return draw_blocks(heads, blocks, self.count, self.seed, layer) if self.count else None


@part
class FirstBlockInEvaluation(RandomBlocks):
    """Random blocks in training; in evaluation the first block `count` times more, as transformers computes BigBird.

    A key that stands in a softmax 1 + count times has ln(1 + count) added to its score.
    """

    count: int = 3
    seed: int = 0

    def first_block_bias(self, training: bool) -> float:
        return 0.0 if training else math.log(1 + self.count)

    def choose(self, heads: int, blocks: int, layer: int, training: bool) -> Tensor | None:
        return draw_blocks(heads, blocks, self.count, self.seed, layer) if self.count and training else None


def draw_blocks(heads: int, blocks: int, count: int, seed: int, layer: int) -> Tensor:
    """[H, M - 2, R] distinct random blocks for each block, none of them the first, the last or a neighbour."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
    block = torch.arange(1, blocks - 1)  # those between the first and the last
    near = torch.stack((block - 1, block, block + 1), -1)
    ends = torch.tensor([0, blocks - 1]).expand(len(block), 2)
    taken = torch.cat((ends, near), -1).sort(-1).values.expand(heads, -1, -1)  # [H, M - 2, 5], an end may be twice
    drawn = []
    for _draw in range(count):
        # a random number below the count of blocks that are left, then the block of that number: skip the taken ones
        is_first = F.pad(taken[..., 1:] != taken[..., :-1], (1, 0), value=True)
        left = blocks - is_first.sum(-1)  # [H, M - 2]
        chosen = (torch.rand(left.shape, generator=generator, dtype=torch.float64) * left).long()
        for n in range(taken.shape[-1]):
            chosen = chosen + (is_first[..., n] & (chosen >= taken[..., n]))
        drawn.append(chosen)
        taken = torch.cat((taken, chosen[..., None]), -1).sort(-1).values
    return torch.stack(drawn, -1)


# -------------------------------------------------------------------------------------------------------- the attention


@part
class BigBirdAttention(Attention):
    """BigBird's self-attention, for encoders: blocks of `block_size` tokens (see the drawing in this file)."""

    block_size: int = 64
    random_blocks: RandomBlocks = SeededBlocks()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "block_size", _("64 is usual"))
        hint = _("its last block sees all tokens and is seen by all; a decoder takes SlidingWindow(size)")
        must(self.mask == Bidirectional(), self, _("mask must be Bidirectional"), self.mask, hint)
        hint = _("the kernel is its own")
        must(self.kernel in (SDPA(), Eager()), self, _("kernel must be SDPA or Eager"), self.kernel, hint)

    @property
    def unsupported(self) -> Mapping[str, Message]:
        return {
            "bias": _("use position learned, sinusoidal or rotary"),
            "packing": _("the first and the last block would see all documents; give each document its own row"),
            "left_padding": _("blocks are counted from the start of a row; pad on the right"),
        }

    def keys_per_query(self, length: int) -> int:
        blocks = 5 + self.random_blocks.count
        return length if self.reads_all(length) else min(length, blocks * self.block_size)

    def reads_all(self, length: int) -> bool:
        """Whether a row is so short that full attention costs less."""
        return length <= (5 + 2 * self.random_blocks.count) * self.block_size

    def build(self, d_model: int) -> AttentionLayer:
        return BigBirdLayer(self, d_model)


class BigBirdLayer(AttentionLayer):
    """The module of BigBirdAttention."""

    calls_kernel = False
    spec: BigBirdAttention

    @property
    def needs_mask_tensor(self) -> bool:
        return False

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        group = context.mask_groups[self.mask_group]
        q, k, v = functional.linears(x, self.q, self.k, self.v)
        q = self.q_norm(split_heads(q, self.heads))  # [B, H, S, K]
        k = self.k_norm(split_heads(k, self.kv_heads))
        v = split_heads(v, self.kv_heads)
        q, k = group.mask.position.rotate(q, k, group.cos_sin)

        key_mask = context.inputs.attention_mask
        if self.kernel.weights.has_hooks:
            out = self.kernel.eager(q, k, v, self._dense_bias(q, key_mask, step))
        elif self.spec.reads_all(x.shape[1]):
            out = self._attention(q, k, v, key_mask)
        else:
            out = self._sparse(q, k, v, key_mask, step)
        return self.merge_heads(out if key_mask is None else out.masked_fill(~key_mask[:, None, :, None], 0))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Full attention."""
        mask = None if key_mask is None else key_mask[:, None, None, :]
        return functional.attention(q, k, v, mask, False, self.kernel.scale, self.kernel.dropout_rate)

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, step: int) -> Tensor:
        """[B, H, S, K]: whole blocks, of which the first and the last see all."""
        length = q.shape[2]
        size = self.spec.block_size

        # whole blocks
        padding = -length % size
        if padding:
            q, k, v = (F.pad(t, (0, 0, 0, padding)) for t in (q, k, v))
            key_mask = q.new_ones(q.shape[0], length, dtype=torch.bool) if key_mask is None else key_mask
            key_mask = F.pad(key_mask, (0, padding))

        # the first and the last block see all
        ends = q.index_select(2, _end_index(q.shape[2], size, q.device))
        end_rows = self._end_rows(self._attention(ends, k, v, key_mask), q.shape[2])

        # those between them: neighbours, both ends as leading keys, random blocks
        inner_mask = torch.zeros(q.shape[0], k.shape[2], dtype=torch.bool, device=q.device)
        inner_mask[:, size:-size] = True if key_mask is None else key_mask[:, size:-size]
        random_blocks = self.spec.random_blocks.choose(self.heads, k.shape[2] // size, step, self.training)
        out = functional.banded_attention(
            q,
            k,
            v,
            Band(1, 1, block=size),
            self.kernel.scale,
            self.kernel.dropout_rate,
            key_mask=inner_mask,
            leading=self._end_keys(k, key_mask),
            random_blocks=None if random_blocks is None else F.pad(random_blocks, (0, 0, 1, 1)).to(q.device),
            given_rows=end_rows,
        )
        return out[:, :, :length] if padding else out

    def _end_rows(self, out: Tensor, length: int) -> GivenRows:
        """The answers of the first and the last block [B, H, 2 · block, K] as rows of the output."""
        size = self.spec.block_size
        query = _end_index(length, size, out.device).repeat(len(out))
        row = torch.arange(len(out), device=out.device).repeat_interleave(2 * size)
        return GivenRows(row, query, out.transpose(1, 2).flatten(0, 1))

    def _end_keys(self, k: Tensor, key_mask: Tensor | None) -> LeadingIndex:
        """The first and the last block, as keys that every token sees."""
        size = self.spec.block_size
        bias = torch.zeros(1, 1, 1, 2 * size, dtype=k.dtype, device=k.device)
        bias[..., :size] = self.spec.random_blocks.first_block_bias(self.training)
        if key_mask is not None:
            visible = torch.cat((key_mask[:, :size], key_mask[:, -size:]), 1)
            bias = bias.masked_fill(~visible[:, None, None], -torch.inf)
        return LeadingIndex(_end_index(k.shape[2], size, k.device).expand(len(k), -1), bias)

    def _dense_bias(self, q: Tensor, key_mask: Tensor | None, step: int) -> Tensor:
        """[B, H, S, S] what is added to the scores, -inf where nothing is seen: for those who look at the weights."""
        length = q.shape[2]
        spec = self.spec
        bias = torch.zeros(q.shape[0], self.heads, length, length, dtype=q.dtype, device=q.device)
        if not spec.reads_all(length):
            blocks = -(-length // spec.block_size)
            allowed = torch.zeros(self.heads, blocks, blocks, dtype=torch.bool)
            allowed[:, :, [0, -1]] = True
            allowed[:, [0, -1]] = True
            block = torch.arange(blocks)
            allowed |= (block[:, None] - block).abs() <= 1
            random_blocks = spec.random_blocks.choose(self.heads, blocks, step, self.training)
            if random_blocks is not None:
                allowed[:, 1:-1].scatter_(2, random_blocks, True)
            index = torch.arange(length) // spec.block_size
            bias = bias.masked_fill(~allowed[:, index][:, :, index].to(q.device), -torch.inf)
            inner = slice(spec.block_size, (blocks - 1) * spec.block_size)
            bias[:, :, inner, : spec.block_size] += spec.random_blocks.first_block_bias(self.training)
        return bias if key_mask is None else bias.masked_fill(~key_mask[:, None, None, :], -torch.inf)


def _end_index(length: int, size: int, device: torch.device) -> Tensor:
    """[2 · size] the positions of the first and of the last block."""
    index = torch.arange(size, device=device)
    return torch.cat((index, length - size + index))


# ------------------------------------------------------------------------------------------------------------- the head

NO_ANSWER_SCORE = -1e6  # added to the scores of the question


@part
class AnswerSpanHead(HeadSpec):
    """Start and end scores of an answer, after one more feed-forward layer; none in the question (BigBird).

    separator: the id of the token that ends the question. The first token may be chosen: it means no answer.
    """

    d_ff: int
    separator: int
    activation: str = "gelu_tanh"
    norm: NormSpec = LayerNorm()
    dropout: float = 0.0
    num_labels = 2

    def __post_init__(self) -> None:
        check_positive(self, "d_ff", _("give the width of the feed-forward layer"))
        check_dropout(self)

    def build(self, d_model: int) -> nn.Module:
        return AnswerSpanHeadLayer(self, d_model)


class AnswerSpanHeadLayer(nn.Module):
    """out(norm(x + down(act(up(x)))))"""

    def __init__(self, spec: AnswerSpanHead, d_model: int) -> None:
        super().__init__()
        self.separator = spec.separator
        self.dropout = Dropout(spec.dropout)
        self.up = nn.Linear(d_model, spec.d_ff)
        self.act = get_activation(spec.activation)
        self.down = nn.Linear(spec.d_ff, d_model)
        self.norm = spec.norm.build(d_model)
        self.out = nn.Linear(d_model, 2)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        """x [B, S, D] -> [B, S, 2]"""
        hidden = self.dropout(self.down(self.act(self.up(self.dropout(x)))))
        logits = self.out(self.norm(hidden + x))
        first_separator = (inputs.ids == self.separator).int().argmax(1, keepdim=True)
        index = torch.arange(x.shape[1], device=x.device)
        in_question = (index > 0) & (index <= first_separator)  # [B, S]
        return logits + NO_ANSWER_SCORE * in_question[..., None]
