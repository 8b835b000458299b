"""A translation model in plain PyTorch: nn.Transformer with padding masks, tied embeddings, greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from train_torch import sines

PAD, BOS, EOS = 0, 1, 2
Pair = tuple[list[int], list[int]]


def lines(path: str | Path) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def pairs(folder: Path, name: str, tokenizer: Tokenizer) -> list[Pair]:
    """The rows of name.en and name.de as ids, without special tokens."""
    sides = [
        tokenizer.encode_batch(lines(folder / f"{name}.{side}"), add_special_tokens=False) for side in ("en", "de")
    ]
    return [(source.ids, target.ids) for source, target in zip(*sides, strict=True)]


def collate(rows: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """source <bos> … <eos>, decoder input <bos> …, targets … <eos>."""
    source = [torch.tensor([BOS, *row[0], EOS]) for row in rows]
    decoder_input = [torch.tensor([BOS, *row[1]]) for row in rows]
    targets = [torch.tensor([*row[1], EOS]) for row in rows]
    return tuple(pad_sequence(part, batch_first=True, padding_value=PAD) for part in (source, decoder_input, targets))


class Translator(nn.Module):
    def __init__(self, vocab: int, d_model: int, heads: int, layers: int, d_ff: int, p: float) -> None:
        super().__init__()
        self.scale, self.drop = d_model**0.5, nn.Dropout(p)
        self.tokens = nn.Embedding(vocab, d_model, padding_idx=PAD)
        self.register_buffer("positions", sines(512, d_model))
        self.body = nn.Transformer(d_model, heads, layers, layers, d_ff, p, batch_first=True, norm_first=True)
        for weights in self.parameters():
            if weights.dim() > 1:
                nn.init.xavier_uniform_(weights)
        nn.init.normal_(self.tokens.weight, std=d_model**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        return F.linear(self.decode(ids, self.encode(source), source == PAD), self.tokens.weight)

    def encode(self, source: Tensor) -> Tensor:
        return self.body.encoder(self.embed(source), src_key_padding_mask=source == PAD)

    def decode(self, ids: Tensor, memory: Tensor, source_padding: Tensor) -> Tensor:
        causal_mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.body.decoder(
            self.embed(ids),
            memory,
            causal_mask,
            memory_key_padding_mask=source_padding,
            tgt_key_padding_mask=ids == PAD,
        )

    def loss(self, rows: Sequence[Pair], smoothing: float = 0.0) -> Tensor:
        source, decoder_input, targets = collate(rows)
        logits = self(source, decoder_input).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=PAD, label_smoothing=smoothing)

    @torch.no_grad()
    def greedy(self, sources: Sequence[list[int]]) -> list[list[int]]:
        source = collate([(ids, []) for ids in sources])[0]
        max_length = source.shape[1] * 3 // 2 + 10
        memory, ids = self.encode(source), torch.full((len(source), 1), BOS)
        finished = torch.zeros(len(source), dtype=torch.bool)
        while ids.shape[1] <= max_length and not finished.all():
            states = self.decode(ids, memory, source == PAD)[:, -1]
            word = F.linear(states, self.tokens.weight).argmax(-1).masked_fill(finished, EOS)
            ids, finished = torch.cat([ids, word[:, None]], 1), finished | (word == EOS)
        return [[word for word in row if word > EOS] for row in ids[:, 1:].tolist()]


def translate(model: Translator, tokenizer: Tokenizer, texts: Sequence[str], batch_size: int = 100) -> list[str]:
    """Greedy translations, in batches of similar length."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    order = sorted(range(len(ids)), key=lambda n: len(ids[n]))
    outputs: dict[int, str] = {}
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        outputs |= zip(batch, tokenizer.decode_batch(model.greedy([ids[n] for n in batch])), strict=True)
    return [outputs[n] for n in range(len(ids))]
