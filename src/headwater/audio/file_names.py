"""Which file names are those of recordings; without the libraries that read them."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = frozenset(
    (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".aifc", ".au", ".caf", ".w64", ".m4a", ".m4b")
    + (".aac", ".wma", ".amr", ".mp4", ".webm", ".mkv", ".mov", ".avi", ".3gp")
)


def is_audio(path: Path) -> bool:
    """Whether a file name ends as those of recordings do.

    >>> [is_audio(Path(name)) for name in ("a.WAV", "talk.mp3", "talk.srt")]
    [True, True, False]
    """
    return path.suffix.lower() in SUFFIXES
