"""Speech of another kind: each word is a tone, so that a tiny model learns to write it in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

TONES = {"low": 300.0, "middle": 900.0, "high": 2400.0}
RATE = 16_000
WORD_SECONDS = 0.15


def speak(words: str, rng: np.random.Generator, rate: int = RATE) -> np.ndarray:
    """The samples of a sentence: a tone for each word, noise over it."""
    time = np.arange(int(WORD_SECONDS * rate)) / rate
    fade = np.minimum(1, 20 * np.minimum(time, time[::-1]))
    tones = [fade * np.sin(2 * np.pi * TONES[word] * (1 + 0.03 * rng.normal()) * time) for word in words.split()]
    samples = 0.3 * np.concatenate(tones)
    return samples + 0.01 * rng.normal(size=len(samples))


def sentences(count: int, seed: int = 0, longest: int = 3) -> list[str]:
    """Random sentences of one to three words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(list(TONES), rng.integers(1, longest + 1))) for _unused in range(count)]


def record(folder: Path, texts: list[str], seed: int = 0, suffix: str = ".wav", with_text: bool = True) -> list[Path]:
    """A recording of each text, 000.wav …, and its text beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = []
    for number, text in enumerate(texts):
        path = folder / f"{number:03}{suffix}"
        soundfile.write(path, speak(text, rng), RATE)
        if with_text:
            path.with_suffix(".txt").write_text(text + "\n")
        paths.append(path)
    return paths
