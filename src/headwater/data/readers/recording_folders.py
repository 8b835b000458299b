"""Reading folders of recordings: a text beside each (.txt, .srt), LibriSpeech's *.trans.txt, or folders of classes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.audio.file_names import is_audio
from headwater.data.readers.lines import BadRows, DecodeOptions, iter_lines, skip_bad_lines
from headwater.data.recordings import LabeledSound, Transcribed
from headwater.errors import Fault
from headwater.i18n import _

SPEECH_FOLDER = "speech-folder"
SOUND_FOLDER = "sound-folder"
TRANSCRIPTS = ".trans.txt"  # LibriSpeech: a line for each recording of the folder, "1089-134686-0000 HE HOPED THERE …"
CUE_TIMES = re.compile(r"(\d+):(\d\d):(\d\d)[,.](\d{1,3})\s*-->\s*(\d+):(\d\d):(\d\d)[,.](\d{1,3})")
MARKUP = re.compile(r"<[^>]*>|\{\\[^}]*\}")


def find_files(folder: Path) -> Iterator[Path]:
    """The files of a folder and of the folders in it, in the order of their names; hidden ones are left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith("."))


def find_recordings(folder: Path) -> list[Path]:
    """The recordings among them."""
    return [path for path in find_files(folder) if is_audio(path)]


def transcript_beside(recording: Path) -> Path | None:
    """The .txt or .srt file beside a recording."""
    return next((path for path in map(recording.with_suffix, (".txt", ".srt")) if path.is_file()), None)


def has_transcripts(folder: Path) -> bool:
    """Whether a text or subtitles lie beside some recording of a folder."""
    return any(
        path.name.endswith(TRANSCRIPTS) or (is_audio(path) and transcript_beside(path) is not None)
        for path in find_files(folder)
    )


def read_sound_folder(folders: Sequence[Path], bad_rows: BadRows) -> Iterator[LabeledSound]:
    """The recordings of folders, with the name of the folder they are in as the class."""
    for folder in folders:
        for path in find_recordings(folder):
            yield LabeledSound(str(path), path.relative_to(folder).parts[0])


def read_speech_folder(
    folders: Sequence[Path], decode_options: DecodeOptions, bad_rows: BadRows
) -> Iterator[Transcribed]:
    """The recordings of folders with their transcripts; one without is a bad row."""
    for folder in folders:
        lines = _transcript_lines(folder, decode_options, bad_rows)
        for path in find_recordings(folder):
            if path.stem in lines:
                yield Transcribed(str(path), lines[path.stem], speaker=path.stem.split("-")[0])
                continue
            beside = transcript_beside(path)
            if beside is None:
                bad_rows.add(path, 1, _("no transcript beside it"))
                continue
            try:
                text = _read_text(beside, decode_options, bad_rows)
            except Fault as fault:
                bad_rows.add(beside, 1, str(fault)[:80])
                continue
            yield from _with_text(path, beside, text, bad_rows)


def _read_text(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> str:
    """The lines of a text file that can be decoded."""
    lines = skip_bad_lines(path, iter_lines(path, decode_options, bad_rows), bad_rows)
    return "\n".join(line.text for line in lines)


def _with_text(path: Path, beside: Path, text: str, bad_rows: BadRows) -> Iterator[Transcribed]:
    """The examples of a recording and the text beside it: one, or one for each subtitle."""
    if beside.suffix == ".srt":
        yield from _subtitles(path, beside, text, bad_rows)
    elif joined := " ".join(text.split()):
        yield Transcribed(str(path), joined)
    else:
        bad_rows.add(beside, 1, _("empty {role}", role="text"))


def _transcript_lines(folder: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> dict[str, str]:
    """The lines of all *.trans.txt: the name of a recording, and what is said."""
    lines: dict[str, str] = {}
    for path in (path for path in find_files(folder) if path.name.endswith(TRANSCRIPTS)):
        for number, line in enumerate(_read_text(path, decode_options, bad_rows).splitlines(), 1):
            name, _space, text = line.strip().partition(" ")
            if text.strip():
                lines[name] = " ".join(text.split())
            elif name:
                bad_rows.add(path, number, _("empty {role}", role="text"))
    return lines


def _subtitles(path: Path, beside: Path, text: str, bad_rows: BadRows) -> Iterator[Transcribed]:
    """An example for each subtitle of a SubRip file."""
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        times = CUE_TIMES.search(block)
        if times is None:
            continue
        hours, minutes, seconds, fraction, *rest = times.groups()
        start = _seconds(hours, minutes, seconds, fraction)
        end = _seconds(*rest)
        subtitle = " ".join(MARKUP.sub("", block[times.end() :]).split())
        if subtitle and end > start:
            yield Transcribed(str(path), subtitle, start, end)
        else:
            line = text[: text.index(times[0])].count("\n") + 1
            bad_rows.add(beside, line, _("an empty subtitle, or one that ends before it starts"))


def _seconds(hours: str, minutes: str, seconds: str, fraction: str) -> float:
    return 3600 * int(hours) + 60 * int(minutes) + int(seconds) + int(fraction.ljust(3, "0")) / 1000


def hash_recordings(folder: Path) -> str:
    """SHA-256 of the names and sizes of the recordings of a folder and of the texts beside them."""
    digest = hashlib.sha256()
    for path in find_files(folder):
        if not is_audio(path) and path.suffix not in (".txt", ".srt"):
            continue
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
