"""An hour of speech and silence: transcribed in bounded memory, and killed and resumed with the same text.

    python benchmarks/long_recording.py jfk.wav beckett.wav two_cities.wav --out FOLDER [--minutes 60 --model NAME]

The recordings follow each other with pauses of 1 to 20 seconds until the time is full. `headwater transcribe --out`
transcribes the file, and one of a sixth of the length for comparison; then again, with SIGKILL sent in the middle, and
once more, which resumes. Printed are the peaks of memory: all of it, and without the mapped samples (which are a
temporary file on disk, whose pages the system takes back when it needs them).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from headwater.audio.files import read_audio
from headwater.audio.mel import SAMPLE_RATE
from headwater.audio.write import write_wav

MAX_GROWTH_MB = 60  # of the memory that is not mapped from the file, when the recording is six times longer


class Outcome(NamedTuple):
    """A run of the command: exit status, processor seconds, peak memory in MB, and without mapped files."""

    status: int
    seconds: float
    peak: float
    anonymous: float


def concatenate(recordings: list[Path], seconds: float, seed: int = 0) -> torch.Tensor:
    """The recordings one after the other, with pauses, for so many seconds."""
    random = np.random.default_rng(seed)
    sounds = [read_audio(path) for path in recordings]
    parts: list[torch.Tensor] = []
    total, wanted = 0, round(seconds * SAMPLE_RATE)
    while total < wanted:
        parts += [sounds[len(parts) // 2 % len(sounds)], torch.zeros(int(random.uniform(1, 20) * SAMPLE_RATE))]
        total += len(parts[-2]) + len(parts[-1])
    return torch.cat(parts)[:wanted]


def run(command: list[str], journal: Path, kill_at_window: int = 0) -> Outcome:
    """Run a command; with kill_at_window, kill it when its journal has so many windows."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    anonymous = 0.0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            break
        anonymous = max(anonymous, anonymous_megabytes(process.pid))
        if kill_at_window and journal.is_file() and journal.read_bytes().count(b"\n") > kill_at_window:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.05)
    return Outcome(process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, anonymous)


def anonymous_megabytes(pid: int) -> float:
    """The memory of a process that is not mapped from a file, from Linux's /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--model", default="whisper-tiny.en")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    short, long = args.out / "short.wav", args.out / "long.wav"
    write_wav(short, concatenate(args.recordings, 10 * args.minutes), SAMPLE_RATE)
    write_wav(long, concatenate(args.recordings, 60 * args.minutes), SAMPLE_RATE)

    def transcribe(path: Path, folder: str, kill_at_window: int = 0) -> Outcome:
        begin = [sys.executable, "-m", "headwater", "transcribe", str(path), "--out", str(args.out / folder)]
        flags = ["--model", args.model, "--to", "tsv", "--beam-size", "1", "--int8"]
        return run([*begin, *flags], args.out / folder / f".{path.stem}.tsv.journal", kill_at_window)

    windows = round(2 * args.minutes)
    outcomes = {
        f"{args.minutes / 6:g} minutes": transcribe(short, "whole"),
        f"{args.minutes:g} minutes": transcribe(long, "whole"),
        "killed": transcribe(long, "resumed", kill_at_window=windows // 2),
        "resumed": transcribe(long, "resumed"),
    }
    print(f"{'':12}{'status':>8}{'processor s':>13}{'peak MB':>10}{'without map':>13}")
    for name, one in outcomes.items():
        print(f"{name:12}{one.status:>8}{one.seconds:>13.1f}{one.peak:>10.0f}{one.anonymous:>13.0f}")

    short_run, long_run, _killed, resumed = outcomes.values()
    whole, again = ((args.out / folder / "long.tsv").read_text() for folder in ("whole", "resumed"))
    segments = whole.count("\n") - 1
    assert [one.status for one in outcomes.values()] == [0, 0, -signal.SIGKILL, 0]
    assert long_run.anonymous < short_run.anonymous + MAX_GROWTH_MB, "memory grows with the length"
    assert resumed.seconds < 0.8 * long_run.seconds, "the resumed run began anew"
    assert whole == again and segments > args.minutes, "the text after the kill is another one"
    print(f"\n{segments} segments, {len(whole.split())} words; killed and resumed: the same text and times")
    print(f"{60 * args.minutes / long_run.seconds:.1f} s of sound for each second of processor time")


if __name__ == "__main__":
    main()
