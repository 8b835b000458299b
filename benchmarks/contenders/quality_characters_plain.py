"""Character language model with a plain loop: nanoGPT's settings for a CPU, its loop, and torch's fused AdamW.

4 layers, 4 heads, d_model 128, context 64, 12 random rows per step, no dropout; AdamW with betas 0.9 and 0.99 and
weight decay 0.1 on matrices; 100 warmup steps to 1e-3, a cosine to 1e-4 at step 2,000; gradients clipped at 1.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from quality_workload import Turns, read_texts, validation_loss
from torch import nn
from torch.nn import functional as F
from train_plain import GPT
from train_workload import TrainOptions, Workload, count

STEPS, WARMUP, MAX_LR, MIN_LR, BLOCK, ROWS = 2000, 100, 1e-3, 1e-4, 64, 12


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return MAX_LR * (step + 1) / (WARMUP + 1)
    return MIN_LR + 0.5 * (MAX_LR - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=BLOCK)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    texts = read_texts(args.folder)
    id_of = {character: n for n, character in enumerate(sorted(set("".join(texts))))}
    train, valid = (torch.tensor([id_of[character] for character in text]) for text in texts)
    model = GPT(
        TrainOptions(Workload(128, 4, 4, 512, len(id_of), ROWS, BLOCK, is_encoder_decoder=False), 0.0, (), False, "")
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=MAX_LR, betas=(0.9, 0.99), fused=True)
    turns = Turns(lambda last: {"loss": validation_loss(model, valid, args.window)})
    turns.ready(parameters=count(model))
    for step in range(STEPS):
        starts = torch.randint(len(train) - BLOCK, (ROWS,))
        rows = train[starts[:, None] + torch.arange(BLOCK + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step + 1 < STEPS:
            turns.after_step(step + 1)
    turns.finish(STEPS)


if __name__ == "__main__":
    main()
