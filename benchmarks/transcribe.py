"""Speech to text with Whisper tiny.en and base: Headwater compared with faster-whisper and whisper.cpp.

    python benchmarks/transcribe.py FILE [--threads 2] [--rounds 5] [--beam-size 1 5] [--models whisper-tiny.en]

The figure is how many times faster than real time: seconds of sound for each second of clock, from the samples to the
text. Both read the same weights (headwater models), hear the same file, search with the same number of beams at
temperature 0, and have the same number of threads; neither has voice activity detection. A contender whose text has
more than a few words that faster-whisper in float32 does not have gets no ratio. make bench installs the peer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from correctness import end_if_wrong
from side_by_side import BENCH_PYTHON, Contender, compare, table, write

from headwater.audio.files import read_audio
from headwater.audio.mel import SAMPLE_RATE
from headwater.audio.write import write_wav
from headwater.families.hub import find_installed
from headwater.families.load import load, save

FIRST = "headwater int8"
REFERENCE = "faster-whisper float32"
MAX_WORD_ERROR_RATE = 0.1


def word_errors(text: str, reference: str) -> float:
    """Word error rate, without case and punctuation: the edit distance over the number of words of the reference."""
    words, wanted = (["".join(c for c in w if c.isalnum()) for w in t.lower().split()] for t in (text, reference))
    row = list(range(len(wanted) + 1))
    for i, word in enumerate(words, 1):
        last = row
        row = [i]
        for j, want in enumerate(wanted, 1):
            row.append(min(row[-1] + 1, last[j] + 1, last[j - 1] + (word != want)))
    return row[-1] / max(len(wanted), 1)


def check_texts(report: dict) -> str:
    """Set report["wrong"] for contenders whose text is another one; returns the error rates as a table."""
    texts = {name: facts["texts"] for name, facts in report["facts"].items() if "texts" in facts}
    report["wrong"] = {}
    if REFERENCE not in texts:
        report["wrong"] = dict.fromkeys(report["figures"], f"{REFERENCE} is missing, nothing to compare with")
        return f"\nNo ratio: {REFERENCE} is missing."
    lines = [f"\n| word error rate compared with {REFERENCE} | beams | rate | allowed |", "|---|---|---|---|"]
    for name, by_beam in texts.items():
        for beam, text in by_beam.items():
            rate = word_errors(text, texts[REFERENCE][beam])
            lines.append(f"| {name} | {beam} | {rate:.1%} | {MAX_WORD_ERROR_RATE:.0%} |")
            if rate > MAX_WORD_ERROR_RATE:
                report["wrong"][name] = f"its text is wrong: {rate:.0%} of the words"
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a recording of English speech")
    parser.add_argument("--models", nargs="+", default=["whisper-tiny.en", "whisper-base"])
    parser.add_argument("--beam-size", nargs="+", default=["1", "5"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        compare_models(args, Path(scratch))


def compare_models(args: argparse.Namespace, scratch: Path) -> None:
    """One table for each model."""
    sound = scratch / "speech.wav"
    write_wav(sound, read_audio(args.file), SAMPLE_RATE)  # whisper.cpp takes samples of 16 kHz: the same for all
    for model in args.models:
        folder = str(find_installed(model))
        ggml = str(scratch / f"ggml-{model}.bin")
        save(load(model), ggml)  # whisper.cpp reads the same weights in 16 bits
        arguments = (folder, str(sound), *args.beam_size)
        contenders = [
            Contender(FIRST, "transcribe_headwater.py", ("int8", *arguments)),
            Contender("headwater float32", "transcribe_headwater.py", ("float32", *arguments)),
            Contender("faster-whisper int8", "transcribe_faster_whisper.py", ("int8", *arguments), BENCH_PYTHON),
            Contender(REFERENCE, "transcribe_faster_whisper.py", ("float32", *arguments), BENCH_PYTHON),
            Contender("whisper.cpp", "transcribe_whisper_cpp.py", (ggml, *arguments[1:]), BENCH_PYTHON),
        ]
        report = compare(contenders, args.rounds, args.threads)
        texts = check_texts(report)
        print(f"\n{model}, {args.file.name}")
        write(report, table(report, FIRST) + "\n" + texts, f"transcribe-{model}")
        end_if_wrong(report, FIRST)


if __name__ == "__main__":
    main()
