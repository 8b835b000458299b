"""Real text from file to weights: real tokens a second on Multi30k, ours beside transformers' Trainer and a plain loop.

    python benchmarks/train_text.py                  needs Multi30k: HEADWATER_DATA, or --files FOLDER

All three read the same files with the same tokenizer and train a model of the same size (256/3+3/4/1024, 8,000 pieces).
The peers take 64 random rows a step and pad them; ours takes as many tokens a step as such a batch holds on average.
Padding, bucketing, loading, logging and checkpoints are on the clock. Tokens of the texts count, source and target.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from multi30k import DATA, unpacked
from side_by_side import Contender, finish, peers_python, report, started

OURS = "headwater train"


def tokenized(folder: Path, vocab: int) -> int:
    """Learns the tokenizer all of them use. Gives the tokens, marks included, of 64 rows on average."""
    from headwater.data.ragged import encode_rows
    from headwater.text.train import train_tokenizer

    texts = [(folder / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")]
    words = train_tokenizer([text for side in texts for text in side], "bpe", vocab)
    (folder / "tokenizer").mkdir()
    words.save(folder / "tokenizer")
    lengths = sum(encode_rows(words, side).lengths for side in texts)
    return round(64 * (float(lengths.mean()) + 3))


def rates(contender: Contender) -> None:
    """From what was reached after each turn to what was done in it."""
    before, found = {"tokens": 0, "seconds": 0.0, "step": 0}, []
    for now in contender.rounds:
        took = now["seconds"] - before["seconds"]
        tokens, steps = now["tokens"] - before["tokens"], now["step"] - before["step"]
        found.append(
            {"real tokens/s": tokens / took, "tokens a step": tokens / steps, "ms a step": 1000 * took / steps}
        )
        before = now
    contender.rounds = found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", default=str(DATA / "multi30k"), help="the folder of Multi30k's task 1")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=20.0, help="seconds a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=0, help="only so many rows (to try the bench)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = unpacked(Path(args.files), Path(scratch), args.rows)
        tokens = tokenized(folder, args.vocab)
        contenders = [
            Contender(OURS, "text_headwater.py", (str(folder), str(tokens))),
            Contender("transformers Trainer", "text_transformers.py", (str(folder),), peers_python()),
            Contender("plain padded loop", "text_plain.py", (str(folder),)),
        ]
        with started(contenders, args.threads) as watch:
            began = time.time()
            for _ in range(args.rounds + 1):
                for contender in contenders:
                    contender.go(str(args.turn))
            others = watch.other_load()
        for contender in contenders:
            rates(contender)
    finish(report(contenders, args.rounds, args.threads, time.time() - began, others), OURS, "train_text")


if __name__ == "__main__":
    main()
