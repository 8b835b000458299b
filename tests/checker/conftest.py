"""A small GPT in the usual style, independent of headwater, whose methods can be replaced by planted faults."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn


class NanoAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, keep=None, past=None):
        q, k, v = self.split(x)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        mask = self.mask(q.shape[2], k.shape[2]).expand(x.shape[0], 1, -1, -1)
        mask = mask if keep is None else self.hide(mask, keep)
        mixed = self.weights(scores, mask) @ v
        return self.out(mixed.transpose(1, 2).flatten(2)), self.present(k, v)

    def split(self, x):
        return (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def mask(self, queries, keys):
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def hide(self, mask, keep):
        return mask & keep[:, None, None, :]

    def weights(self, scores, mask):
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)

    def present(self, k, v):
        return k, v


class NanoBlock(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x, keep=None, past=None):
        mixed, present = self.attn(self.ln_1(x), keep, past)
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), present


class NanoGPT(nn.Module):
    def __init__(self, attention=NanoAttention, block=NanoBlock, vocab=37, width=24, layers=2):
        super().__init__()
        torch.manual_seed(1)
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(block(width, 4, attention) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def position_ids(self, ids, keep, first):
        if keep is None:
            return first + torch.arange(ids.shape[1])[None]
        return (keep.cumsum(1) - 1).clamp(min=0)[:, first:]

    def run(self, ids, keep=None, past=None):
        first = past[0][0].shape[2] if past else 0
        x, present = self.drop(self.wte(ids) + self.wpe(self.position_ids(ids, keep, first))), []
        for nth, block in enumerate(self.h):
            x, now = block(x, keep, past[nth] if past else None)
            present.append(now)
        return self.lm_head(self.ln_f(x)), present

    def forward(self, idx, mask=None):
        return self.run(idx, mask)[0]

    def step(self, ids, state, attention_mask=None):
        """The step function of headwater.check; state is (keys and values, attention mask of the earlier tokens)."""
        past, past_mask = state or (None, None)
        keep = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask
        full_mask = keep if past_mask is None else torch.cat((past_mask, keep), 1)
        logits, present = self.run(ids, full_mask, past)
        return logits, (present, full_mask)


@pytest.fixture(scope="session")
def nano():
    return types.SimpleNamespace(Attention=NanoAttention, Block=NanoBlock, GPT=NanoGPT)
