"""The training workloads, the same for every contender, and the loop that times one step per line of stdin.

    (a) encoder-decoder 256/3+3/4/1024, vocabulary 8,000, batch 64 × 32 tokens
    (b) the base model of 2017 512/6+6/8/2048, vocabulary 32,000, tied embeddings, batch 16 × 64
    (c) a GPT 384/6/6 over 65 characters, batch 12 × 256

Dropout sites: the embedding, every branch before it is added to the residual stream, the attention weights, and inside
the feed-forward layer. A contender reports the sites that it supports.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DROPOUT_SITES = {
    "none": (),
    "residual": ("embedding", "residual"),
    "attention": ("embedding", "residual", "attention"),
    "everywhere": ("embedding", "residual", "attention", "ffn"),
}
LEARNING_RATE, MAX_GRAD_NORM, BETAS, WEIGHT_DECAY = 1e-4, 1.0, (0.9, 0.98), 0.01


class Workload(NamedTuple):
    d_model: int
    heads: int
    layers: int
    d_ff: int
    vocab: int
    rows: int
    length: int
    is_encoder_decoder: bool  # else decoder-only
    tied: bool = True

    @property
    def flops_per_step(self) -> float:
        """FLOPs of the matrix products of a step: backward twice forward, attention over all pairs of positions."""
        d, tokens = self.d_model, self.rows * self.length
        attention = 2 * tokens * (4 * d * d) + 4 * tokens * self.length * d
        layer = attention + 2 * tokens * (2 * d * self.d_ff)
        layers = 2 * layer + attention if self.is_encoder_decoder else layer
        return 3 * (self.layers * layers + 2 * tokens * d * self.vocab)


WORKLOADS = {
    "a": Workload(256, 4, 3, 1024, 8_000, 64, 32, is_encoder_decoder=True),
    "b": Workload(512, 8, 6, 2048, 32_000, 16, 64, is_encoder_decoder=True),
    "c": Workload(384, 6, 6, 1536, 65, 12, 256, is_encoder_decoder=False),
    "tiny": Workload(64, 4, 2, 256, 1_000, 8, 16, is_encoder_decoder=True),  # to try the benchmark
    "tiny-gpt": Workload(64, 4, 2, 256, 65, 4, 64, is_encoder_decoder=False),
}


class Batch(NamedTuple):
    """source [B, S] (unused by a decoder-only model), ids [B, Q]: decoder input, targets [B, Q]."""

    source: Tensor
    ids: Tensor
    targets: Tensor


def batches(work: Workload, number: int = 8) -> list[Batch]:
    """Random tokens, the same for every contender; ids 0 to 3 are reserved for special tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (number, 3, work.rows, work.length)
    return [Batch(*tensors) for tensors in torch.randint(4, work.vocab, shape, generator=generator)]


class TrainOptions(NamedTuple):
    workload: Workload
    p: float  # dropout probability
    dropout_sites: tuple[str, ...]
    compiled: bool
    kind: str


def parse_options() -> TrainOptions:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--dropout-sites", choices=DROPOUT_SITES, default="none")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--kind", default="")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    sites = DROPOUT_SITES[args.dropout_sites]
    return TrainOptions(WORKLOADS[args.workload], args.dropout if sites else 0.0, sites, args.compile, args.kind)


Loss = Callable[[Batch], Tensor]


def plain_step(model: nn.Module, loss: Loss) -> Callable[[Batch], float]:
    """The usual training step: forward, backward, gradient clipping, torch's fused AdamW."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(batch: Batch) -> float:
        value = loss(batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    return step


def serve(
    step: Callable[[Batch], float], work: Workload, dropout_sites: Iterable[str], parameters: int, warmup: int = 2
) -> None:
    """Warm up, report facts, then time one step per line of stdin."""
    step_batches, start = batches(work), time.perf_counter()
    losses = [step(batch) for batch in step_batches[:warmup]]
    seconds = time.perf_counter() - start
    facts = {
        "parameters": parameters,
        "dropout_sites": list(dropout_sites),
        "warmup seconds": seconds,
        "losses": losses,
    }
    print(json.dumps(facts), flush=True)
    for turn, _ in enumerate(sys.stdin):
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(step_batches[turn % len(step_batches)])
        elapsed, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        figures = {
            "ms per step": 1000 * elapsed,
            "CPU ms": 1000 * cpu_time,
            "tokens/s": work.rows * work.length / elapsed,
        }
        figures["loss"] = loss
        print(json.dumps(figures), flush=True)


def serve_model(model: nn.Module, loss: Loss, options: TrainOptions, supported: Iterable[str]) -> None:
    """Time a model with the plain step. supported: the dropout sites that the model has."""
    model.train()
    sites = [site for site in supported if options.p]
    serve(plain_step(model, loss), options.workload, sites, count(model))


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def maybe_compiled(model: Any, options: TrainOptions) -> Any:
    return torch.compile(model) if options.compiled else model
