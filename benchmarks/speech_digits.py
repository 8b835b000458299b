"""Spoken digits from scratch: five speakers to learn from, the sixth is held out.

    python benchmarks/speech_digits.py fsdd_recordings.zip --out FOLDER [--speaker theo] [--steps 2000]

The Free Spoken Digit Dataset (CC BY-SA 4.0): 3,000 recordings at 8 kHz, six speakers, fifty times each digit. The
figure is the accuracy over all 500 recordings of the held-out speaker, of whom nothing was seen, not to choose a model
either: the last weights are taken. The recipe is one `headwater train` of a folder, with Whisper's encoder in small.
"""

from __future__ import annotations

import argparse
import time
import zipfile
from pathlib import Path

import headwater
from headwater.training.evaluate import evaluate_files

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RECIPE = {
    "d_model": 128,
    "heads": 4,
    "layers": 3,
    "d_ff": 512,
    "optimizer": "muon",
    "lr": 5e-3,
    "label_smoothing": 0.1,
    "weight_decay": 0.05,
    "warmup": 100,
    "batch_tokens": 1632,  # 32 windows of a second
    "dtype": "bf16",
    "augment": "speed=0.3,equalizer=15,noise=12,shift=0.2,time_mask=8,mel_mask=10",
    "window_seconds": 1.0,
}


def write_folders(archive: Path, folder: Path, speaker: str, unused: str) -> tuple[Path, Path]:
    """learn/DIGIT/*.wav of the others, and held_out/DIGIT/*.wav of one speaker; an unused speaker is in neither."""
    with zipfile.ZipFile(archive) as recordings:
        for name in recordings.namelist():
            digit, who, *_rest = Path(name).stem.split("_")
            if not name.endswith(".wav") or not digit.isdigit() or who == unused:
                continue
            path = folder / ("held_out" if who == speaker else "learn") / DIGITS[int(digit)] / Path(name).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(recordings.read(name))
    return folder / "learn", folder / "held_out"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--speaker", default="theo")
    parser.add_argument("--unused", default="", help="a speaker of whom nothing is used, to choose a recipe")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    learn, held_out = write_folders(args.archive, args.out, args.speaker, args.unused)

    begin = time.process_time()
    run = args.out / "run"
    headwater.train(
        learn,
        out=run,
        max_steps=args.steps,
        seed=args.seed,
        metric="loss",
        eval_every=args.steps,
        eval_examples=100,
        **RECIPE,
    )
    minutes = (time.process_time() - begin) / 60
    report = evaluate_files(run, [str(held_out)])
    for sample in report.samples:
        print(f"  {sample['input']}  →  {sample['output']}")
    accuracy, rows = report.metrics["accuracy"], report.report["rows"]
    print(f"\n{args.speaker}, held out: accuracy {accuracy:.1f} % of {rows} recordings")
    print(f"{minutes:.1f} minutes of processor time")


if __name__ == "__main__":
    main()
