"""Training on real text: real tokens per second on Multi30k, compared with transformers' Trainer and a plain loop.

    python benchmarks/train_text.py                  needs Multi30k: HEADWATER_DATA, or --files FOLDER

All three read the same files with the same tokenizer and train a model of the same size (256/3+3/4/1024, 8,000 tokens).
The peers take 64 random rows per step and pad them; Headwater takes as many tokens per step as such a batch has on
average. Padding, bucketing, loading, logging and checkpoints are timed. Real tokens count, of source and target.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from multi30k import DATA, prepare_files
from side_by_side import Contender, finish, peers_python, report, started

OURS = "headwater train"


def train_common_tokenizer(folder: Path, vocab: int) -> int:
    """Train the common tokenizer; returns the mean number of tokens of 64 rows, special tokens included."""
    from headwater.data.ragged import encode_rows
    from headwater.text.train import train_tokenizer

    texts = [(folder / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")]
    tokenizer = train_tokenizer([text for side in texts for text in side], "bpe", vocab)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    lengths = sum(encode_rows(tokenizer, side).lengths for side in texts)
    return round(64 * (float(lengths.mean()) + 3))


def compute_rates(contender: Contender) -> None:
    """Replace the cumulative numbers of each turn by the rates within the turn."""
    before, rates_by_turn = {"tokens": 0, "seconds": 0.0, "step": 0}, []
    for now in contender.rounds:
        elapsed = now["seconds"] - before["seconds"]
        tokens, steps = now["tokens"] - before["tokens"], now["step"] - before["step"]
        rates_by_turn.append(
            {
                "real tokens/s": tokens / elapsed,
                "tokens per step": tokens / steps,
                "ms per step": 1000 * elapsed / steps,
            }
        )
        before = now
    contender.rounds = rates_by_turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", default=str(DATA / "multi30k"), help="the folder of Multi30k's task 1")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=20.0, help="seconds per turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=0, help="number of rows, to try the benchmark (0: all)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare_files(Path(args.files), Path(scratch), args.rows)
        tokens = train_common_tokenizer(folder, args.vocab)
        contenders = [
            Contender(OURS, "text_headwater.py", (str(folder), str(tokens))),
            Contender("transformers Trainer", "text_transformers.py", (str(folder),), peers_python()),
            Contender("plain padded loop", "text_plain.py", (str(folder),)),
        ]
        with started(contenders, args.threads) as monitor:
            start = time.time()
            for _ in range(args.rounds + 1):
                for contender in contenders:
                    contender.run_round(str(args.turn))
            other_load = monitor.other_load()
        for contender in contenders:
            compute_rates(contender)
    finish(report(contenders, args.rounds, args.threads, time.time() - start, other_load), OURS, "train_text")


if __name__ == "__main__":
    main()
