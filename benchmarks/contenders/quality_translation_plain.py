"""Translation with a plain PyTorch loop: nn.Transformer 256/3+3, AdamW, Noam, label smoothing 0.1, batches by length.

8,000 joint BPE tokens, pre-norm, dropout 0.1, 4,096 tokens per step from pools of sorted rows, Noam with 1,000 warmup
steps, gradients clipped at 1. It trains until its time limit.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from plain_translator import Pair, Translator, pairs, translate
from quality_workload import Turns, bleu_metrics
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from train_workload import count

D_MODEL, WARMUP, TOKENS, POOL = 256, 1000, 4096, 3000


def train_tokenizer(files: list[str], vocab: int = 8000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = ["<pad>", "<bos>", "<eos>"]
    tokenizer.train(files, trainers.BpeTrainer(vocab_size=vocab, special_tokens=special_tokens, show_progress=False))
    return tokenizer


def batches(rows: list[Pair], generator: random.Random) -> Iterator[list[Pair]]:
    """Endless batches: shuffled, sorted by length within pools, at most TOKENS each, shuffled within a pool."""
    while True:
        generator.shuffle(rows)
        for first in range(0, len(rows), POOL):
            pool = sorted(rows[first : first + POOL], key=lambda row: (len(row[1]), len(row[0])))
            batches_of_pool: list[list[Pair]] = [[]]
            for row in pool:
                if (len(batches_of_pool[-1]) + 1) * (len(row[0]) + len(row[1]) + 3) > TOKENS:
                    batches_of_pool.append([])
                batches_of_pool[-1].append(row)
            generator.shuffle(batches_of_pool)
            yield from batches_of_pool


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
    tokenizer = train_tokenizer([str(args.folder / f"train.{side}") for side in ("en", "de")])
    model = Translator(tokenizer.get_vocab_size(), D_MODEL, 4, 3, 1024, 0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, fused=True)

    def translate_texts(texts: list[str]) -> list[str]:
        model.eval()
        outputs = translate(model, tokenizer, texts)
        model.train()
        return outputs

    turns = Turns(lambda last: bleu_metrics(translate_texts, args.folder, args.rows, last))
    turns.ready(parameters=count(model))
    for step, rows in enumerate(batches(pairs(args.folder, "train", tokenizer), random.Random(args.seed)), 1):
        model.loss(rows, smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = noam(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if turns.seconds() >= 60 * args.minutes:
            return turns.finish(step)
        turns.after_step(step)


if __name__ == "__main__":
    main()
