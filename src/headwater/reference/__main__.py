"""python -m headwater.reference: train three sizes on the copy task, draw the attention weights. No torch needed."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from headwater.i18n import _

# Matrices this small are fastest on one thread. NumPy reads the variable once, when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from headwater.errors import BadFile, Fault
from headwater.reference import copy_task as task
from headwater.reference.decode import greedy
from headwater.reference.figures import heat_maps, learning_curves, pattern_bars, token_label
from headwater.reference.gradients import Array
from headwater.reference.weights import write


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    args = _parser().parse_args(arguments)
    try:
        _make_output_folder(args.out)  # fail before a minute of training, not after it
        reports = compare(args.seed, args.quick)
        draw(reports, args.out, args.seed)
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_code
    return 0


def compare(seed: int, quick: bool) -> dict[str, task.Report]:
    """Train each size on the same sentences, for the same number of steps."""
    steps, sizes = (60, ["Mini", "Small"]) if quick else (300, list(task.SIZES))
    print(f"Copying {task.SHORTEST} to {task.LONGEST} symbols out of {task.SYMBOLS}: {steps} steps of 32 rows\n")
    print(f"{'':8}{'d_model':>8}{'heads':>7}{'layers':>8}{'parameters':>12}{'seconds':>9}{'loss':>8}{'exact':>8}")
    reports = {}
    for size in sizes:
        config = task.SIZES[size]
        print(f"{size:8}{config.d_model:8}{config.heads:7}{config.layers:8}", end="", flush=True)
        report = task.train(config, steps, seed)
        print(f"{report.parameters:12,}{report.seconds:9.1f}{report.losses[-1]:8.3f}{report.exact:8.1%}", flush=True)
        reports[size] = report
    print(f"\nloss: {min_loss():.3f} is the minimum with smoothed labels.")
    print("exact: exact match of greedy decoding on 500 new rows.")
    return reports


def min_loss(smoothing: float = 0.1, vocab: int = task.VOCAB) -> float:
    """The smallest possible loss, the entropy of the smoothed target distribution: −Σ t log t."""
    other_prob = smoothing / vocab
    target_prob = 1 - smoothing + other_prob
    return -target_prob * math.log(target_prob) - (vocab - 1) * other_prob * math.log(other_prob)


def draw(reports: dict[str, task.Report], out: Path, seed: int) -> None:
    """Draw the attention weights of the small model and the learning curves, and save the model."""
    model = reports["Small"].model
    rng = np.random.default_rng(seed + 2)
    source = rng.integers(task.STOP + 1, task.VOCAB, (64, task.LONGEST))
    decoder_input = np.concatenate([np.full((64, 1), task.START), source[:, :-1]], axis=1)
    attention_weights: dict[str, Array] = {}
    model(decoder_input, source=source, attention_weights=attention_weights)
    generated = greedy(model, [[task.START]], task.STOP, task.LONGEST + 2, source[:1])[0]
    source_labels = [token_label(t) for t in source[0]]
    target_labels = [token_label(t) for t in decoder_input[0]]
    print(f"\nsource     {' '.join(source_labels)}\ngenerated  {' '.join(map(token_label, generated))}\n")
    heat_maps(out / "encoder-self-attention.png", attention_weights, "encoder.self_attn", source_labels, source_labels)
    heat_maps(out / "decoder-self-attention.png", attention_weights, "decoder.self_attn", target_labels, target_labels)
    heat_maps(
        out / "decoder-cross-attention.png", attention_weights, "decoder.cross_attn", target_labels, source_labels
    )
    pattern_bars(out / "attention-patterns.png", attention_weights)
    learning_curves(out / "learning-curves.png", reports, min_loss())
    write(out / "small.safetensors", model.values)
    for path in sorted(out.iterdir()):
        print(f"wrote {path}")


def _make_output_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(
            _(
                "--out must be a folder that can be written, got {out}: {strerror}; choose another",
                out=out,
                strerror=error.strerror,
            )
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headwater.reference", description=(__doc__ or "").split(": ", 1)[1]
    )
    parser.add_argument("--out", type=Path, default=Path("reference-figures"), help="folder of the figures and weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the sentences")
    parser.add_argument("--quick", action="store_true", help="a few seconds: two sizes, fewer steps")
    return parser


if __name__ == "__main__":
    sys.exit(main())
