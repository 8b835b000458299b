"""A cache of decoded recordings: each is read once, as 16-bit samples at 16 kHz, in memory mapped from one file.

The file is in the user's cache folder under a hash of the recordings, so a second run or a resumed one reads it as it
is. What is computed of the samples (spectrograms, the states of a frozen encoder) is kept beside it in the same way.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.audio.files import read_audio
from headwater.audio.mel import SAMPLE_RATE
from headwater.errors import BadFile, BadInput, Fault
from headwater.i18n import _
from headwater.io.files import atomic_write

INT16 = 32768.0


class Clip(NamedTuple):
    """A recording, or the part of it between two times in seconds; end 0: to its end."""

    path: str
    start: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows of unequal length [n, width] in one mapped file. Row i is values[offsets[i]:offsets[i + 1]]."""

    values: np.ndarray  # [total, width]
    offsets: np.ndarray  # [N + 1]
    key: str  # of the file: what is computed of these rows is kept under it

    def __getitem__(self, row: int) -> np.ndarray:
        rows: np.ndarray = self.values[self.offsets[row] : self.offsets[row + 1]]
        return rows

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


class DecodedClips(NamedTuple):
    """The samples of the clips that can be read, their indices, and the reasons for the others."""

    samples: CachedRows  # [n, 1] int16
    readable: np.ndarray  # [N] index of each in the clips that were given
    problems: list[str]

    def row(self, index: int) -> Tensor:
        """The samples [n] of one clip, in [-1, 1]."""
        return torch.from_numpy(self.samples[index][:, 0].astype(np.float32) / INT16)


def cache_folder() -> Path:
    """HEADWATER_CACHE, or headwater/ in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEADWATER_CACHE") or Path(base) / "headwater") / "sounds"


def decode_clips(clips: Sequence[Clip]) -> DecodedClips:
    """The samples of clips, from the cache where they are in it. What cannot be read is left out."""
    key = _clips_key(clips)
    problems: list[str] = []
    index = cache_folder() / f"{key}.problems"

    def rows() -> Iterator[np.ndarray]:
        for samples in _read_clips(clips):
            problems.append(samples if isinstance(samples, str) else "")
            if not isinstance(samples, str):
                scaled = (samples * INT16).round().clamp(-INT16, INT16 - 1)
                yield scaled.to(torch.int16).numpy()[:, None]

    def write_problems() -> None:
        with atomic_write(index) as file:  # another process may read it at the same time
            file.write("\n".join(problems).encode("utf-8", "surrogateescape"))

    samples = cached_rows(key, rows, np.int16, 1, after=write_problems)
    states = index.read_text("utf-8", "surrogateescape").split("\n")
    readable = np.array([i for i, state in enumerate(states) if not state], np.int64)
    return DecodedClips(samples, readable, [state for state in states if state])


def _read_clips(clips: Sequence[Clip]) -> Iterator[Tensor | str]:
    """The samples of each clip, or in one line why there are none. Clips of one file that follow are read at once."""
    path: str | None = None
    recording: Tensor | str = ""
    for clip in clips:
        if clip.path != path:
            path = clip.path
            try:
                recording = read_audio(path)
            except Fault as fault:
                recording = " ".join(str(fault).split())
        if isinstance(recording, str):
            yield recording
            continue
        part = recording[int(clip.start * SAMPLE_RATE) : int(clip.end * SAMPLE_RATE) if clip.end else None]
        too_short = _("{path}: it ends before {start:g} s", path=path, start=clip.start)
        yield part if len(part) else " ".join(too_short.split())


def _clips_key(clips: Sequence[Clip]) -> str:
    """A hash of the files (name, size, time of change) and of the times."""
    digest = hashlib.sha256()
    for clip in clips:
        name = str(Path(clip.path).absolute())
        try:
            status = os.stat(name)
            state = f"{status.st_size}\0{status.st_mtime_ns}"
        except (OSError, ValueError):
            state = "missing"
        digest.update(f"{name}\0{state}\0{clip.start}\0{clip.end}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


# --------------------------------------------------------------------------------------------------------------- files


def cached_rows(
    key: str,
    rows: Callable[[], Iterable[np.ndarray]],
    dtype: type[np.generic],
    width: int,
    after: Callable[[], object] = lambda: None,
) -> CachedRows:
    """The rows [n, width] under a key: those of the file, or computed and written; after: called then."""
    file = cache_folder() / f"{key}.rows"
    ends = file.with_suffix(".npy")
    if not ends.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{key}.{os.getpid()}.part")
        lengths = [0]
        try:
            with part.open("wb") as out:
                for row in rows():
                    lengths.append(len(row))
                    out.write(np.ascontiguousarray(row, dtype).tobytes())
            _publish(part, file, np.cumsum(lengths), after)
        except OSError as error:
            raise _no_room(file.parent, error) from None
        finally:
            part.unlink(missing_ok=True)
    offsets = np.load(ends)
    if not offsets[-1]:
        return CachedRows(np.zeros((0, width), dtype), offsets, key)
    values = np.memmap(file, dtype, "r", shape=(int(offsets[-1]), width))
    return CachedRows(values, offsets, key)


def _publish(part: Path, file: Path, offsets: np.ndarray, after: Callable[[], object]) -> None:
    """Give the finished files their names; that of the offsets last, because it says that all is there."""
    os.replace(part, file)
    after()
    offsets_part = part.with_suffix(".offsets.npy")
    np.save(offsets_part, offsets)
    os.replace(offsets_part, file.with_suffix(".npy"))


def _no_room(folder: Path, error: OSError) -> BadFile:
    free = shutil.disk_usage(folder).free / 1e9
    return BadFile(
        _(
            "the decoded recordings cannot be written into {folder} ({reason}; {free:,.1f} GB are free); set "
            "HEADWATER_CACHE to a larger disk",
            folder=folder,
            reason=error.strerror or error,
            free=free,
        )
    )


def load_clips(clips: Sequence[Clip], split: str, notes: list[str]) -> DecodedClips:
    """The clips that can be read; a note counts the others and names some."""
    decoded = decode_clips(clips)
    if decoded.problems:
        notes.append(
            _(
                "{count:,} of {total:,} {split} recordings cannot be read and are left out: {problems}",
                count=len(decoded.problems),
                total=len(clips),
                split=split,
                problems="; ".join(decoded.problems[:3]),
            )
        )
    if not len(decoded.readable):
        raise BadInput(
            _(
                "{split}: no recording can be read; {problem}",
                split=split,
                problem=(decoded.problems or [_("none given")])[0],
            )
        )
    return decoded
