"""A journal of a transcription: what is done, one line a window, so that an interrupted one goes on where it was.

The first line says which recording it is of and with which settings; if they differ, a new journal begins. A last
line that was cut off by the interruption is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import atomic_write, reason
from headwater.transcription.transcript import Segment
from headwater.transcription.windows import Progress

MAX_BYTES = 256 << 20


class Journal:
    """The journal file of one recording."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self.source = source

    def open(self, identity: Sequence[str], segments: list[Segment]) -> Progress | None:
        """The progress to go on from, and the segments before it; None at the beginning."""
        first_line = json.dumps([self.source, self._file_state(), *identity])
        lines = self._complete_lines()
        progress: Progress | None = None
        if lines and lines[0] == first_line:
            for line in lines[1:]:
                progress = _parse(line, segments)
                if progress is None:
                    lines = []
                    break
        else:
            lines = []
        if not lines:
            segments.clear()
            progress = None
        with atomic_write(self.path) as file:
            file.write("".join(line + "\n" for line in lines or [first_line]).encode())
        return progress

    def append(self, progress: Progress) -> None:
        """Add what one window gave."""
        entry = {
            "frame": progress.frame,
            "context": progress.context,
            "last_speech": progress.last_speech,
            "segments": [asdict(segment) for segment in progress.segments],
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadFile(
                _(
                    "{path} cannot be written: {reason}; make room, and start again: what is in it is kept",
                    path=self.path,
                    reason=reason(error),
                )
            ) from None

    def remove(self) -> None:
        """Delete the journal of a transcription that is complete."""
        self.path.unlink(missing_ok=True)

    def _complete_lines(self) -> list[str]:
        """The lines that were written whole."""
        if not self.path.is_file() or self.path.stat().st_size > MAX_BYTES:
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def _file_state(self) -> list[int]:
        """Size and time of the recording: another file of the same name is another recording."""
        if not self.source or not os.path.isfile(self.source):
            return []
        state = os.stat(self.source)
        return [state.st_size, state.st_mtime_ns]


def _parse(line: str, segments: list[Segment]) -> Progress | None:
    """One window's entry; its segments are appended. None where it is damaged."""
    try:
        entry: dict[str, Any] = json.loads(line)
        restored = [Segment.from_dict(fields) for fields in entry["segments"]]
        progress = Progress(int(entry["frame"]), tuple(map(int, entry["context"])), float(entry["last_speech"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    segments += restored
    return progress
