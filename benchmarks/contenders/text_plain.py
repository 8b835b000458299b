"""Training on text with a plain loop: random batches of 64 rows padded to the longest, nn.Transformer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from plain_translator import Pair, Translator, pairs
from quality_workload import Turns
from tokenizers import Tokenizer
from torch import nn
from torch.utils.data import DataLoader
from train_workload import count


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    rows = pairs(folder, "train", tokenizer)
    model = Translator(tokenizer.get_vocab_size(), 256, 4, 3, 1024, 0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.98), fused=True)
    tokens = 0
    turns = Turns(lambda last: {"tokens": tokens})
    turns.ready(parameters=count(model), rows=len(rows))
    step = 0
    while True:
        batch: list[Pair]
        for batch in DataLoader(rows, batch_size=64, shuffle=True, collate_fn=list):
            model.loss(batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + sum(len(source) + len(target) for source, target in batch)
            turns.after_step(step)


if __name__ == "__main__":
    main()
