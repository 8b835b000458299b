"""Audio files to samples, 16 kHz and mono: soundfile reads wav, flac, ogg, mp3 and aiff; ffmpeg, if there, the rest.

A file is decoded a block at a time: channels are averaged, the block is resampled, and every sample must be a finite
number. What is longer than a few minutes goes to a temporary file that is mapped into memory, so a recording of ten
hours needs no more memory than one of ten minutes. Length, rate and channels are checked before anything is decoded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor

from headwater.audio.mel import SAMPLE_RATE
from headwater.audio.resample import Resampler
from headwater.errors import BadFile, BadInput, NotFound, Unavailable
from headwater.i18n import _
from headwater.io.files import quote, reason

MAX_SECONDS = 24 * 3600
IN_MEMORY_SECONDS = 300  # of a longer recording the samples are in a temporary file
BLOCK_SECONDS = 20
MIN_RATE = 1_000
MAX_RATE = 768_000
MAX_CHANNELS = 64
NO_SUCH_FILE = 7  # libsndfile's code
_STDERR_LOCK = threading.Lock()


def read_audio(path: str | Path, *, max_seconds: float = MAX_SECONDS, rate: int = SAMPLE_RATE) -> Tensor:
    """The samples [N] of a recording at 16 kHz or another rate, mono, in [-1, 1]."""
    path = Path(path)
    if not path.exists():
        raise NotFound(_("{path} does not exist; check the path", path=path))
    if not path.is_file():
        raise BadFile(_("{path} must be a regular file; it is a folder, a pipe or a device", path=path))
    return collect(decode(path, max_seconds), path, max_seconds, rate)


def samples_at_16khz(samples: Tensor | np.ndarray, rate: int, where: object = "audio") -> Tensor:
    """Samples from memory, [N] or [N, channels] at any rate, as read_audio() gives those of a file."""
    array = np.asarray(samples)
    if array.dtype.kind not in "fi" or array.ndim not in (1, 2) or not MIN_RATE <= rate <= MAX_RATE:
        raise BadInput(
            _(
                "{where}: samples must be numbers [N] or [N, channels] at {min_rate} to {max_rate} Hz, got {dtype} "
                "{shape} at {rate}; correct them",
                where=where,
                min_rate=MIN_RATE,
                max_rate=MAX_RATE,
                dtype=array.dtype,
                shape=list(array.shape),
                rate=rate,
            )
        )
    if array.dtype.kind == "i":
        array = array / -float(np.iinfo(array.dtype).min)
    array = array.astype(np.float32, copy=False)
    return collect([_mono(array.reshape(len(array), -1), rate)], where, MAX_SECONDS)


class AudioBlock(NamedTuple):
    """Mono samples [N] and their rate."""

    samples: Tensor
    rate: int = SAMPLE_RATE


def decode(path: Path, max_seconds: float) -> Iterator[AudioBlock]:
    """The blocks of a file."""
    muted = _muted_stderr if _is_mpeg(path) else contextlib.nullcontext
    try:
        with muted():
            file = soundfile.SoundFile(str(path))
        with file:
            _check_format(path, file.samplerate, file.channels, file.frames / max(file.samplerate, 1), max_seconds)
            blocks = file.blocks(BLOCK_SECONDS * file.samplerate, dtype="float32", always_2d=True)
            while True:
                with muted():
                    block = next(blocks, None)
                if block is None:
                    return
                yield _mono(block, file.samplerate)
    except soundfile.LibsndfileError as error:
        yield from _decode_with_ffmpeg(path, max_seconds, error)


def _is_mpeg(path: Path) -> bool:
    """Whether libsndfile may take a file for mp3: by its ending, an ID3 tag, or the first byte of a frame."""
    try:
        with path.open("rb") as file:
            head = file.read(3)
    except OSError as error:
        raise BadFile(_("{path} cannot be read: {reason}", path=path, reason=reason(error))) from None
    return path.suffix.lower() == ".mp3" or head == b"ID3" or head[:1] == b"\xff"


@contextlib.contextmanager
def _muted_stderr() -> Iterator[None]:
    """The file descriptor of stderr goes nowhere: the mp3 decoder of libsndfile writes about damaged frames there."""
    with _STDERR_LOCK, open(os.devnull, "wb") as nowhere:
        before = os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def _mono(samples: np.ndarray, rate: int) -> AudioBlock:
    """The mean of the channels of samples [N, channels]."""
    with np.errstate(invalid="ignore"):  # what is no number is refused later
        mean = samples.mean(1, dtype=np.float32)
    return AudioBlock(torch.from_numpy(np.ascontiguousarray(mean)), rate)


def _check_format(path: Path, rate: int, channels: int, seconds: float, max_seconds: float) -> None:
    """Refuse a file by what its header says."""
    if not MIN_RATE <= rate <= MAX_RATE or not 1 <= channels <= MAX_CHANNELS:
        raise BadFile(
            _(
                "{path}: it must have {min_rate} to {max_rate} samples a second and at most {max_channels} channels, "
                "it has {rate} and {channels}; is it damaged?",
                path=path,
                min_rate=MIN_RATE,
                max_rate=MAX_RATE,
                max_channels=MAX_CHANNELS,
                rate=rate,
                channels=channels,
            )
        )
    if seconds > max_seconds:
        _refuse_length(path, seconds, max_seconds)


def _refuse_length(where: object, seconds: float, max_seconds: float) -> None:
    raise BadInput(
        _(
            "{where}: a recording may last {max_seconds:g} s, this one lasts {seconds:g} s or more; cut it in two",
            where=where,
            max_seconds=max_seconds,
            seconds=round(seconds, 1),
        )
    )


# ----------------------------------------------------------------------------------------------------------- ffmpeg


def _decode_with_ffmpeg(path: Path, max_seconds: float, error: soundfile.LibsndfileError) -> Iterator[AudioBlock]:
    """What ffmpeg makes of a file that soundfile does not read: 16 kHz, mono, 16 bits."""
    program = shutil.which("ffmpeg")
    if program is None:
        raise Unavailable(
            _(
                "{path}: not a wav, flac, ogg or mp3 file that can be read ({reason}); install ffmpeg to read other "
                "formats, or convert it",
                path=path,
                reason=quote(_reason(error), 100),
            )
        ) from None
    limits = ["-t", str(max_seconds + 1), "-threads", "1"]
    source = ["-protocol_whitelist", "file", "-i", f"file:{path}", "-map", "0:a:0"]
    target = ["-vn", "-sn", "-dn", "-ac", "1", "-ar", str(SAMPLE_RATE), "-f", "s16le", "pipe:1"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [program, "-nostdin", "-v", "error", *source, *limits, *target],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        has_sound = False
        try:
            assert process.stdout is not None
            while block := process.stdout.read(2 * SAMPLE_RATE * BLOCK_SECONDS):
                has_sound = True
                samples = np.frombuffer(block[: len(block) // 2 * 2], "<i2").astype(np.float32) / 32768
                yield AudioBlock(torch.from_numpy(samples))
            process.wait()
        finally:
            process.kill()
            process.wait()
        if not has_sound:
            raise BadFile(
                _(
                    "{path}: neither soundfile nor ffmpeg finds sound in it ({reason}); is it a recording?",
                    path=path,
                    reason=quote(_last_line(errors) or _reason(error), 100),
                )
            )


def _reason(error: soundfile.LibsndfileError) -> str:
    """What libsndfile says of a file that it does not read. Of an .mp3 without frames it says that there is no file."""
    return "Format not recognised." if error.code == NO_SUCH_FILE else str(error.error_string)


def _last_line(errors: BinaryIO) -> str:
    """The last line that a program wrote."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 1000))
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


# ------------------------------------------------------------------------------------------------------- collecting


class SampleStore:
    """Collects the samples of a recording: in memory, and beyond a few minutes in a temporary file without a name."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.total = 0
        self.file: BinaryIO | None = None

    def add(self, samples: Tensor) -> None:
        """More samples."""
        self.parts.append(samples)
        self.total += len(samples)
        if self.total > IN_MEMORY_SECONDS * SAMPLE_RATE:
            self.file = self.file or tempfile.TemporaryFile(prefix="headwater-audio-")  # noqa: SIM115
            for part in self.parts:
                self.file.write(part.numpy().tobytes())
            self.parts = []

    def tensor(self) -> Tensor:
        """All samples [N]; those in a file are mapped, and the map keeps the file."""
        if self.file is None:
            return torch.cat(self.parts)
        self.file.flush()
        return torch.from_numpy(np.memmap(self.file, np.float32, "r+", shape=(self.total,)))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self.file is not None:
            self.file.close()


def collect(blocks: Iterable[AudioBlock], where: object, max_seconds: float, target_rate: int = SAMPLE_RATE) -> Tensor:
    """The blocks of a recording, resampled, as one tensor."""
    resampler: Resampler | None = None
    with contextlib.closing(SampleStore()) as store:
        for samples, rate in blocks:
            _check_finite(samples, rate, where, store.total / target_rate)
            if rate != target_rate:
                resampler = resampler or Resampler(rate, target_rate)
                samples = resampler.push(samples)
            store.add(samples)
            if store.total > max_seconds * target_rate:
                _refuse_length(where, store.total / target_rate, max_seconds)
        if resampler is not None:
            store.add(resampler.finish())
        if not store.total:
            raise BadInput(_("{where}: it has no samples; is the recording empty?", where=where))
        return store.tensor()


def _check_finite(samples: Tensor, rate: int, where: object, before: float) -> None:
    """Refuse NaN and infinity, and say where they are. before: the seconds before these samples."""
    finite = samples.isfinite()
    if not bool(finite.all()):
        seconds = before + int((~finite).int().argmax()) / rate
        raise BadInput(
            _(
                "{where}: the sample at {seconds:.2f} s is not a finite number; repair the file",
                where=where,
                seconds=seconds,
            )
        )
