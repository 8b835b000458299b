"""Whisper base, tuned on recordings of one language: word error rate of sentences it never heard, before and after.

    apt-get download asterisk-core-sounds-ru asterisk-core-sounds-ru-wav
    python benchmarks/speech_tune.py *.deb --language ru --out FOLDER [--epochs 12] [--model whisper-base] …

The two packages hold the prompts of a telephone exchange as recordings (8 kHz, one voice) and as a list of texts
(CC-BY). Sentences are split by a hash of their words, so none is in both parts. Every word error rate is that of
`headwater transcribe --beam-size 1` with the language given, over the held-out recordings; before and after are
measured in the same way. Texts are compared as headwater.data.error_rates says, with е for the Russian letter ё: the
list of texts has both for the same words. The window is cut to 8 seconds: sentences are short.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
import time
from pathlib import Path

import headwater
from headwater.data.error_rates import error_rates, normalize_transcript
from headwater.data.examples import text_hash
from headwater.transcription.speech_model import SpeechModel, load_speech_model

HELD_OUT = 0.2
BATCH = 32  # windows
TOKENS_PER_SECOND = 60  # 50 states of the encoder, and the text
LINE = re.compile(r"([\w/-]+):\s*(.+)")
Row = tuple[Path, str]


def read_prompts(packages: list[Path], scratch: Path) -> list[Row]:
    """The recordings and their texts, from Debian packages."""
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
    (listing,) = scratch.glob("usr/share/doc/*/core-sounds-*.txt.gz")
    recordings = {path.stem: path for path in sorted(scratch.glob("usr/share/asterisk/sounds/*/*.wav"))}
    rows = []
    for line in gzip.decompress(listing.read_bytes()).decode("utf-8", "replace").splitlines():
        match = LINE.match(line.strip())
        if match and match[1] in recordings and not match[2].startswith("["):
            rows.append((recordings[match[1]], one_spelling(match[2].removeprefix(f"{match[1]}:").strip())))
    return rows


def one_spelling(text: str) -> str:
    return text.replace("ё", "е").replace("Ё", "Е")


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; equal sentences are in one part."""
    held_out = [text_hash(normalize_transcript(text)) < HELD_OUT * 2**64 for _path, text in rows]
    pairs = list(zip(rows, held_out, strict=True))
    return [row for row, out in pairs if not out], [row for row, out in pairs if out]


def write_table(rows: list[Row], path: Path) -> None:
    lines = ["path\ttext", *(f"{recording.resolve()}\t{text}" for recording, text in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure(model: SpeechModel, rows: list[Row], language: str) -> tuple[dict[str, float], list[str]]:
    """The error rates of a model, and its texts."""
    heard = (headwater.transcribe(path, model, language=language, beam_size=1) for path, _text in rows)
    texts = [one_spelling(each.text) for each in heard]
    return error_rates(texts, [text for _path, text in rows]), texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--language", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--tune", default="full")
    parser.add_argument("--epochs", type=float, default=12)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--augment", default="speed=0.1,equalizer=6,noise=30")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--window-seconds", type=int, default=8)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    train_rows, held_out = split(read_prompts(args.packages, args.out / "data"))
    write_table(train_rows, args.out / "train.tsv")
    write_table(held_out, args.out / "held_out.tsv")
    print(f"{len(train_rows)} recordings to learn from, {len(held_out)} held out", flush=True)

    before, texts_before = measure(load_speech_model(args.model), held_out, args.language)
    print(f"before: WER {before['wer']:.1f}, CER {before['cer']:.1f}", flush=True)

    begin = time.monotonic(), time.process_time()
    headwater.train(
        args.out / "train.tsv",
        valid=[str(args.out / "held_out.tsv")],
        init_from=args.model,
        tune=args.tune,
        language=args.language,
        epochs=args.epochs,
        lr=args.lr,
        augment=args.augment or {},
        ema=0.95,
        dtype=args.dtype,
        window_seconds=args.window_seconds,
        batch_tokens=BATCH * TOKENS_PER_SECOND * args.window_seconds,
        eval_every=10**6,
        eval_examples=16,
        final_eval_examples=16,
        out=args.out / "run",
    )
    minutes = (time.monotonic() - begin[0]) / 60, (time.process_time() - begin[1]) / 60

    after, texts_after = measure(load_speech_model(args.out / "run"), held_out, args.language)
    print(f"\n{'sentence':40} | {'before':40} | after")
    for (_path, text), one, other in list(zip(held_out, texts_before, texts_after, strict=True))[:10]:
        print(f"{text[:40]:40} | {one.strip()[:40]:40} | {other.strip()[:40]}")
    print(f"\nbefore: WER {before['wer']:.1f}, CER {before['cer']:.1f}")
    print(f"after:  WER {after['wer']:.1f}, CER {after['cer']:.1f}")
    print(f"training: {minutes[0]:.1f} minutes, {minutes[1]:.1f} of processor time")


if __name__ == "__main__":
    main()
