"""headwater bench: training steps compared with torch.nn.Transformer, decoding speed, hardware limits, CPU load."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.model import Model
from headwater.data.collate import TrainBatch
from headwater.data.dataset import IndexBatch, StatelessData
from headwater.doctor import environment
from headwater.families.builders import decoder, transformer
from headwater.tasks.language_model import lm_loss
from headwater.training.config import parse_config
from headwater.training.schedules import ConstantSchedule
from headwater.training.setup import prepare_model
from headwater.training.trainer import Trainer

MAX_OTHER_LOAD = 0.05  # fraction of the CPUs that other processes may use in a valid measurement
BASELINE = "torch.nn.Transformer"


class LoadMonitor:
    """The CPU load of other processes: 1 is all CPUs; None if the system does not report it."""

    def __init__(self) -> None:
        self.start_time = time.monotonic()
        self.total_seconds = busy_cpu_seconds()
        self.process_seconds = time.process_time()

    def other_load(self) -> float | None:
        """The mean load of other processes since this monitor was created."""
        now = busy_cpu_seconds()
        if now is None or self.total_seconds is None:
            return None
        available = (time.monotonic() - self.start_time) * (os.cpu_count() or 1)
        process_seconds = time.process_time() - self.process_seconds
        return max(0.0, now - self.total_seconds - process_seconds) / max(available, 1e-9)


def busy_cpu_seconds() -> float | None:
    """CPU seconds of all processes, from /proc/stat; None if it does not exist."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        parts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(parts) - parts[3] - parts[4]) / os.sysconf("SC_CLK_TCK")
    return None


def quartiles(values: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    values = sorted(values)
    quarter = len(values) // 4
    return {"median": statistics.median(values), "low": values[quarter], "high": values[-1 - quarter]}


def hardware_limits() -> dict[str, float]:
    """The measured peak speed of matrix products and memory."""
    speed = environment.measure_speed()
    return {name: speed[name] for name in ("matmul fp32 GFLOP/s", "memory GB/s") if name in speed}


def bench_training(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a training step, interleaved with torch.nn.Transformer; speedup, fraction of the matmul peak."""
    workload = WORKLOADS[name]
    steps = {"headwater": headwater_step(workload), BASELINE: torch_step(workload)}
    times = time_interleaved(steps, workload, rounds)
    step_ms = {contender: quartiles([1000 * t for t in values]) for contender, values in times.items()}
    median = step_ms["headwater"]["median"]
    peak = environment.matmul_gflops(torch.float32, 0.3)
    return {
        "step_ms": step_ms,
        "speedup": step_ms[BASELINE]["median"] / median,
        "matmul_peak_fraction": workload.flops_per_step / 1e6 / median / peak,
    }


def bench_decoding(
    model: str, max_new_tokens: int, rounds: int, prompt_length: int = 32
) -> dict[str, dict[str, float]]:
    """Tokens per second of one sequence: prefill of a prompt, and greedy decoding after it."""
    from headwater.families.load import load
    from headwater.generation.forward import forward_last
    from headwater.generation.kv_cache import BatchKVCache

    loaded = load(model)
    ids = [n % 97 + 3 for n in range(prompt_length)]
    speeds = []
    for _ in range(rounds + 1):
        cache = BatchKVCache(loaded.model, [0], max_columns=prompt_length + max_new_tokens)
        start = time.perf_counter()
        token = int(forward_last(loaded.model, cache, [ids]).argmax())
        prefilled = time.perf_counter()
        for _ in range(max_new_tokens - 1):
            token = int(forward_last(loaded.model, cache, [[token]]).argmax())
        end = time.perf_counter()
        speeds.append((prompt_length / (prefilled - start), (max_new_tokens - 1) / (end - prefilled)))
    speeds = speeds[1:]  # the first round warms up
    return {
        "prompt tokens/s": quartiles([prefill for prefill, _ in speeds]),
        "generated tokens/s": quartiles([decode for _, decode in speeds]),
    }


def run_benchmarks(
    workloads: list[str], rounds: int, model: str | None = None, max_new_tokens: int = 64
) -> dict[str, Any]:
    """All benchmarks, as JSON data."""
    monitor = LoadMonitor()
    report: dict[str, Any] = {"threads": torch.get_num_threads(), "rounds": rounds, "limits": hardware_limits()}
    report["training"] = {name: bench_training(name, rounds) for name in workloads}
    if model is not None:
        report["decoding"] = {model: bench_decoding(model, max_new_tokens, rounds)}
    other_load = monitor.other_load()
    quiet = None if other_load is None else other_load <= MAX_OTHER_LOAD
    return {**report, "other_load": other_load, "quiet": quiet}


# ------------------------------------------------------------------------------------------------------- training steps
# Headwater: the step of the Trainer. Baseline: the usual loop of loss, backward, clipping, fused AdamW. No dropout.

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0


class TokenBatch(NamedTuple):
    """source [B, S] (for an encoder), ids [B, Q], targets [B, Q]."""

    source: Tensor
    ids: Tensor
    targets: Tensor


StepFunction = Callable[[TokenBatch], float]


class Workload(NamedTuple):
    """Sizes of a model and of its batch."""

    d_model: int
    heads: int
    layers: int
    d_ff: int
    vocab: int
    batch_size: int
    seq_length: int
    is_encoder_decoder: bool  # else decoder-only

    def random_batch(self, seed: int = 0) -> TokenBatch:
        generator = torch.Generator().manual_seed(seed)
        return TokenBatch(*torch.randint(4, self.vocab, (3, self.batch_size, self.seq_length), generator=generator))

    @property
    def flops_per_step(self) -> float:
        """FLOPs of the matrix products of a step: backward twice forward, attention over all pairs of positions."""
        d = self.d_model
        tokens = self.batch_size * self.seq_length
        attention = 2 * tokens * (4 * d * d) + 4 * tokens * self.seq_length * d
        forward_flops = attention + 2 * tokens * (2 * d * self.d_ff)
        layers = 2 * forward_flops + attention if self.is_encoder_decoder else forward_flops
        return 3 * (self.layers * layers + 2 * tokens * d * self.vocab)


WORKLOADS = {
    "a": Workload(256, 4, 3, 1024, 8_000, 64, 32, is_encoder_decoder=True),
    "c": Workload(384, 6, 6, 1536, 65, 12, 256, is_encoder_decoder=False),
    "small": Workload(128, 4, 2, 512, 2_000, 32, 32, is_encoder_decoder=True),
}


class RepeatedBatch(StatelessData):
    """A training dataset that always returns the same batch."""

    size = 1
    batch: TokenBatch

    def __init__(self, is_encoder_decoder: bool) -> None:
        self.is_encoder_decoder = is_encoder_decoder

    def batches_from(self, position: int) -> Iterator[IndexBatch]:
        return iter(())

    def micro_batches(self, examples: np.ndarray, max_tokens: int) -> list[np.ndarray]:
        return [examples]

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        source, ids, targets = (part.numpy() for part in self.batch)
        mask = np.ones(ids.shape, bool)
        if self.is_encoder_decoder:
            return TrainBatch(ids, mask, targets, source, mask)
        return TrainBatch(ids, mask, targets)


def trainer_step(spec: Model, **settings: Any) -> StepFunction:
    """The Trainer's own step for a model of this spec."""
    model = spec.build(seed=0).train()
    dataset = RepeatedBatch(spec.encoder is not None)
    defaults = {
        "lr": LEARNING_RATE,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    config = parse_config({**defaults, "max_steps": 10**6, "batch_tokens": 10**9, **settings})
    prepare_model(model, config)
    losses: list[float] = []
    trainer = Trainer(
        model,
        lm_loss,
        dataset,
        ConstantSchedule(LEARNING_RATE),
        config,
        callbacks=[lambda event: losses.append(getattr(event, "loss", 0.0))],
    )

    def step(batch: TokenBatch) -> float:
        dataset.batch = batch
        trainer.step(IndexBatch(np.arange(len(batch.ids)), 0, 0))
        return losses[-1]

    return step


def headwater_step(workload: Workload) -> StepFunction:
    """A training step of headwater."""
    sizes: dict[str, Any] = {
        "d_model": workload.d_model,
        "heads": workload.heads,
        "layers": workload.layers,
        "d_ff": workload.d_ff,
        "dropout": 0.0,
    }
    if workload.is_encoder_decoder:
        return trainer_step(transformer(workload.vocab, **sizes))
    gpt2 = decoder(
        workload.vocab,
        **sizes,
        norm_position="pre",
        activation="gelu",
        position="learned",
        max_positions=workload.seq_length,
    )
    return trainer_step(gpt2)


class TorchTransformer(nn.Module):
    """torch.nn.Transformer, or its encoder with a causal mask, with tied input and output embeddings."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.is_encoder_decoder = workload.is_encoder_decoder
        self.tokens = nn.Embedding(workload.vocab, workload.d_model)
        self.positions = nn.Embedding(workload.seq_length, workload.d_model)
        shape = (workload.d_model, workload.heads)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        if workload.is_encoder_decoder:
            self.transformer: Any = nn.Transformer(
                *shape, workload.layers, workload.layers, workload.d_ff, 0.0, batch_first=True
            )
        else:
            layer = nn.TransformerEncoderLayer(*shape, workload.d_ff, 0.0, "gelu", batch_first=True, norm_first=True)
            norm = nn.LayerNorm(workload.d_model)
            self.transformer = nn.TransformerEncoder(layer, workload.layers, norm, enable_nested_tensor=False)
        self.causal_mask = nn.Transformer.generate_square_subsequent_mask(workload.seq_length)

    def forward(self, batch: TokenBatch) -> Tensor:
        """The loss of a batch."""
        source, target = (self.tokens(ids) + self.positions.weight[: ids.shape[1]] for ids in batch[:2])  # [B, L, D]
        if self.is_encoder_decoder:
            states = self.transformer(source, target, tgt_mask=self.causal_mask, tgt_is_causal=True)
        else:
            states = self.transformer(target, mask=self.causal_mask, is_causal=True)
        logits = F.linear(states, self.tokens.weight)  # [B, L, V]
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def torch_step(workload: Workload) -> StepFunction:
    """A training step of torch.nn.Transformer."""
    model = TorchTransformer(workload)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(batch: TokenBatch) -> float:
        loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def time_interleaved(steps: dict[str, StepFunction], workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, one of each per round; two more rounds warm up."""
    batch = workload.random_batch()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-2, rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step(batch)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    return times
