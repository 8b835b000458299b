"""Transcripts as files: plain text, SubRip (srt), WebVTT (vtt), tab-separated values, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.transcription.transcript import Segment, Transcript, Word


@dataclass(frozen=True)
class LineLimits:
    """The width of a subtitle's lines in characters, and how many it may have; 0: as the segments are."""

    width: int = 0
    lines: int = 2


@dataclass(frozen=True)
class Cue:
    """A subtitle."""

    start: float
    end: float
    text: str


def cues(segments: Sequence[Segment], limits: LineLimits) -> Iterator[Cue]:
    """The subtitles of segments; with a line width a long segment becomes several, at the times of its words."""
    for segment in segments:
        if not limits.width:
            yield Cue(segment.start, segment.end, segment.text.strip())
            continue
        words = list(segment.words) or _guessed_words(segment)
        lines: list[list[Word]] = []
        for word in words:
            width = len(_text(lines[-1] + [word])) if lines else 0
            if lines and width <= limits.width:
                lines[-1].append(word)
            else:
                lines.append([word])
        for first in range(0, len(lines), limits.lines):
            group = lines[first : first + limits.lines]
            yield Cue(group[0][0].start, group[-1][-1].end, "\n".join(map(_text, group)))


def _text(words: Sequence[Word]) -> str:
    return "".join(word.text for word in words).strip()


def _guessed_words(segment: Segment) -> list[Word]:
    """The words of a segment without word times: each lasts as long as its share of the characters."""
    spaced = segment.text.strip().split(" ")
    pieces = [" " + word for word in spaced] if len(spaced) > 1 else list(segment.text.strip())
    total = sum(map(len, pieces)) or 1
    words = []
    seen = 0
    for piece in pieces:
        start = segment.start + (segment.end - segment.start) * seen / total
        seen += len(piece)
        words.append(Word(piece, start, segment.start + (segment.end - segment.start) * seen / total, 0.0))
    return words


def clock(seconds: float, decimal: str) -> str:
    """A time as 00:01:02,345.

    >>> clock(62.345, ",")
    '00:01:02,345'
    """
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{decimal}{rest % 1000:03d}"


def to_txt(transcript: Transcript, limits: LineLimits) -> str:
    """One segment a line."""
    return "".join(cue.text + "\n" for cue in cues(transcript.segments, limits))


def to_srt(transcript: Transcript, limits: LineLimits) -> str:
    """SubRip: number, times, text."""
    return "".join(
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{cue.text.replace('-->', '->')}\n\n"
        for number, cue in enumerate(cues(transcript.segments, limits), start=1)
    )


def to_vtt(transcript: Transcript, limits: LineLimits) -> str:
    """WebVTT: times, text."""
    return "WEBVTT\n\n" + "".join(
        f"{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{_escape_vtt(cue.text)}\n\n"
        for cue in cues(transcript.segments, limits)
    )


def _escape_vtt(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_tsv(transcript: Transcript, limits: LineLimits) -> str:
    """Start and end in milliseconds, and the text."""
    rows = (
        f"{round(cue.start * 1000)}\t{round(cue.end * 1000)}\t{' '.join(cue.text.split())}\n"
        for cue in cues(transcript.segments, limits)
    )
    return "start\tend\ttext\n" + "".join(rows)


def to_json(transcript: Transcript, limits: LineLimits) -> str:
    """Everything that is known."""
    return json.dumps(transcript.to_dict(), ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Transcript, LineLimits], str]] = {
    "txt": to_txt,
    "srt": to_srt,
    "vtt": to_vtt,
    "tsv": to_tsv,
    "json": to_json,
}


def write_transcript(transcript: Transcript, layout: str, limits: LineLimits | None = None) -> str:
    """A transcript in one of the formats."""
    if layout not in FORMATS:
        raise BadSetting(
            _("the format must be one of {known}, got {got!r}; {nearest}", known=", ".join(FORMATS), got=layout[:40],
              nearest=nearest(layout[:40], FORMATS))
        )  # fmt: skip
    return FORMATS[layout](transcript, limits or LineLimits())
