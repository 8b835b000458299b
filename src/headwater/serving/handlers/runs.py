"""Handlers for training runs: metrics, samples and checkpoints from their files, and one head at a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headwater.serving.handlers.attention import AttentionTrace, token_dicts
from headwater.serving.model_store import ModelStore, checkpoint_steps, is_tuned_run
from headwater.serving.schemas import CheckpointRequest, RunRequest, TextRequest, tokenize_request
from headwater.training.loggers import read_jsonl

MAX_POINTS = 2000
MAX_SAMPLES = 400
LIVE_SECONDS = 120.0  # a run without a stop reason and without a new line for this time is unfinished
NOT_METRICS = ("step", "split", "best", "num_examples", "time")


def summarize_run(name: str, folder: Path) -> dict[str, Any]:
    """State, last step, best validation metrics and checkpoints of a run."""
    lines = read_jsonl(folder / "metrics.jsonl")
    best: dict[str, Any] = {}
    for line in lines:
        if line.get("split") in ("valid", "final") and line.get("best"):
            best = line
    return {
        "run": name,
        "state": run_state(lines),
        "step": lines[-1]["step"] if lines else 0,
        "best_metrics": {k: v for k, v in best.items() if k not in NOT_METRICS and isinstance(v, (int, float))},
        "checkpoints": checkpoint_steps(folder),
        "has_base": is_tuned_run(folder),
    }


def run_state(lines: list[dict[str, Any]]) -> str:
    """State of a run from its metrics: the stop reason, running or unfinished."""
    last = lines[-1] if lines else {}
    if "stop_reason" in last:
        return str(last["stop_reason"])
    last_time = last.get("time", 0)
    running = isinstance(last_time, (int, float)) and time.time() - last_time < LIVE_SECONDS
    return "running" if running else "unfinished"


def read_run(model_store: ModelStore, request: RunRequest) -> dict[str, Any]:
    """Metrics after line after_line, samples and the summary of a run."""
    folder = model_store.run_dir(request.run)
    lines = read_jsonl(folder / "metrics.jsonl")
    new = [{"line": n, **line} for n, line in enumerate(lines) if n > request.after_line]
    samples = read_jsonl(folder / "samples.jsonl")
    return {
        **summarize_run(request.run, folder),
        "metrics": downsample(new),
        "last_line": len(lines) - 1,
        "samples": samples[-MAX_SAMPLES:],
        "has_model": (folder / "model" / "config.json").is_file(),
    }


def downsample(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MAX_POINTS training lines, evenly spaced; all evaluations and notes are kept."""
    train = [n for n, line in enumerate(lines) if line.get("split") == "train"]
    if len(train) <= MAX_POINTS:
        return lines
    stride = len(train) / MAX_POINTS
    sampled = {train[int(n * stride)] for n in range(MAX_POINTS)} | {train[-1]}
    return [line for n, line in enumerate(lines) if line.get("split") != "train" or n in sampled]


def inspect_checkpoint(model_store: ModelStore, request: CheckpointRequest) -> dict[str, Any]:
    """Attention weights of one head (at most 48 × 48) and the generated text at one checkpoint."""
    open_model = model_store.open(f"{request.run}@{request.checkpoint}")
    text_request = TextRequest(model=request.run, text=request.text, source=request.source)
    inputs = tokenize_request(open_model, text_request)
    trace = AttentionTrace("checkpoint", inputs)
    weights = trace.head_weights(request.kind, request.layer, request.head)[:48, :48]
    group = trace.kinds[request.kind]
    return {
        "checkpoint": request.checkpoint,
        "weights": [[round(x, 6) for x in row] for row in weights.tolist()],
        "generated_text": "".join(token.text for token in inputs.next_tokens) if inputs.generated else "",
        "tokens": token_dicts(inputs.tokens),
        "source": token_dicts(inputs.source),
        "layers": len(group.sites),
        "heads": group.shape[0],
        "kinds": list(trace.kinds),
    }
