"""Translation, the plain way: nn.Transformer 256/3+3, AdamW and Noam, label smoothing 0.1, batches by length.

A decent loop: 8,000 joint BPE pieces, pre-norm, dropout 0.1, 4,096 tokens a step from pools of sorted rows, Noam with
1,000 warm-up steps, gradients clipped at 1. It learns until its minutes are over.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from plain_translator import Pair, Translator, pairs, translate
from quality_work import Turns, scored
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from train_work import count

D_MODEL, WARMUP, TOKENS, POOL = 256, 1000, 4096, 3000


def tokenizer(files: list[str], vocab: int = 8000) -> Tokenizer:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<pad>", "<bos>", "<eos>"]
    words.train(files, trainers.BpeTrainer(vocab_size=vocab, special_tokens=marks, show_progress=False))
    return words


def batches(rows: list[Pair], chance: random.Random) -> Iterator[list[Pair]]:
    """Endless: shuffled, sorted by length within pools, cut at TOKENS, the batches of a pool in random order."""
    while True:
        chance.shuffle(rows)
        for first in range(0, len(rows), POOL):
            pool = sorted(rows[first : first + POOL], key=lambda row: (len(row[1]), len(row[0])))
            cut: list[list[Pair]] = [[]]
            for row in pool:
                if (len(cut[-1]) + 1) * (len(row[0]) + len(row[1]) + 3) > TOKENS:
                    cut.append([])
                cut[-1].append(row)
            chance.shuffle(cut)
            yield from cut


def noam(step: int) -> float:
    return D_MODEL**-0.5 * min(step**-0.5, step * WARMUP**-1.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    words = tokenizer([str(args.folder / f"train.{side}") for side in ("en", "de")])
    model = Translator(words.get_vocab_size(), D_MODEL, 4, 3, 1024, 0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, fused=True)

    def said(texts: list[str]) -> list[str]:
        model.eval()
        found = translate(model, words, texts)
        model.train()
        return found

    turns = Turns(lambda last: scored(said, args.folder, args.rows, last))
    turns.ready(parameters=count(model))
    for step, rows in enumerate(batches(pairs(args.folder, "train", words), random.Random(args.seed)), 1):
        model.loss(rows, smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = noam(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if turns.seconds() >= 60 * args.minutes:
            return turns.over(step)
        turns.after_step(step)


if __name__ == "__main__":
    main()
