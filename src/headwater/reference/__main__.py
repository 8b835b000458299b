"""python -m headwater.reference: learn to copy, compare three sizes, draw what attention looks at. No torch needed."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

# Matrices this small are quickest on one thread. NumPy asks once, when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from headwater.errors import BadFile, Fault
from headwater.reference import copy_task as task
from headwater.reference.decode import greedy
from headwater.reference.figures import heat_maps, learning_curves, name, pattern_bars
from headwater.reference.gradients import Array
from headwater.reference.weights import write


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        _writable(chosen.out)  # before a minute of work, not after it
        reports = compare(chosen.seed, chosen.quick)
        draw(reports, chosen.out, chosen.seed)
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
        c = task.SIZES[size]
        print(f"{size:8}{c.d_model:8}{c.heads:7}{c.layers:8}", end="", flush=True)
        reports[size] = r = task.train(c, steps, seed)
        print(f"{r.parameters:12,}{r.seconds:9.1f}{r.losses[-1]:8.3f}{r.exact:8.1%}", flush=True)
    print(f"\nloss: {least_loss():.3f} is the least that smoothed labels allow.")
    print("exact: rows of 500 new ones that greedy decoding copies without a mistake.")
    return reports


def least_loss(smoothing: float = 0.1, vocab: int = task.VOCAB) -> float:
    """The entropy of the smoothed goal: −Σ t log t."""
    rest = smoothing / vocab
    right = 1 - smoothing + rest
    return -right * math.log(right) - (vocab - 1) * rest * math.log(rest)


def draw(reports: dict[str, task.Report], out: Path, seed: int) -> None:
    model = reports["Small"].model
    chance = np.random.default_rng(seed + 2)
    source = chance.integers(task.STOP + 1, task.VOCAB, (64, task.LONGEST))
    entry = np.concatenate([np.full((64, 1), task.START), source[:, :-1]], axis=1)
    seen: dict[str, Array] = {}
    model(entry, source=source, seen=seen)
    said = greedy(model, [[task.START]], task.STOP, task.LONGEST + 2, source[:1])[0]
    read, spoke = [name(t) for t in source[0]], [name(t) for t in entry[0]]
    print(f"\nread  {' '.join(read)}\nsaid  {' '.join(map(name, said))}\n")
    heat_maps(out / "encoder-self-attention.png", seen, "encoder.self_attn", read, read)
    heat_maps(out / "decoder-self-attention.png", seen, "decoder.self_attn", spoke, spoke)
    heat_maps(out / "decoder-cross-attention.png", seen, "decoder.cross_attn", spoke, read)
    pattern_bars(out / "attention-patterns.png", seen)
    learning_curves(out / "learning-curves.png", reports, least_loss())
    write(out / "small.safetensors", model.values)
    for path in sorted(out.iterdir()):
        print(f"wrote {path}")


def _writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(
            f"--out must be a folder that can be written, got {out}: {error.strerror}; choose another"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headwater.reference", description=(__doc__ or "").split(": ", 1)[1]
    )
    parser.add_argument("--out", type=Path, default=Path("reference-figures"), help="folder of the figures and weights")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other weights and other sentences")
    parser.add_argument("--quick", action="store_true", help="a few seconds: two sizes, too few steps to learn it well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
