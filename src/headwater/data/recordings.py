"""Examples of recordings: with a transcript (speech recognition), or with a class; and how tables name them."""

from __future__ import annotations

from typing import NamedTuple, Self

from headwater.data.examples import EXAMPLE_FORMATS, Cells, ExampleFormat, Roles, file_hash, text_cell
from headwater.i18n import _


class Transcribed(NamedTuple):
    """A recording, or the part of it from start to end in seconds (end 0: to its end), and what is said."""

    path: str
    text: str
    start: float = 0.0
    end: float = 0.0
    speaker: str = ""
    language: str = ""

    @property
    def input_text(self) -> str:
        """The speaker, so that nobody is in two splits; without one, the file."""
        return self.speaker or file_hash(self.path)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        start, end = (seconds_cell(role, cells, roles) for role in ("start", "end"))
        if end and end <= start:
            raise ValueError(_("end is not after start"))
        speaker, language = (str(cells.get(roles.get(role, "")) or "") for role in ("speaker", "language"))
        text = text_cell("text", cells.get(roles["text"])).strip()
        return cls(text_cell("path", cells.get(roles["path"])), text, start, end, speaker, language)


class LabeledSound(NamedTuple):
    """A recording and its class."""

    path: str
    label: str
    speaker: str = ""

    @property
    def input_text(self) -> str:
        """The speaker, so that nobody is in two splits; without one, the file."""
        return self.speaker or file_hash(self.path)

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        label = text_cell("label", cells.get(roles["label"])).strip()
        return cls(text_cell("path", cells.get(roles["path"])), label, str(cells.get(roles.get("speaker", "")) or ""))


class SoundFile(NamedTuple):
    """A recording, or a file of its tokens."""

    path: str

    @property
    def input_text(self) -> str:
        """The hash of the file: copies of a recording are in one split, wherever they are."""
        return file_hash(self.path)

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        return cls(text_cell("path", cells.get(roles["path"])))


def sound_format(task: str) -> ExampleFormat:
    """The examples of a task that reads sounds alone: folders, or tables with a column path."""
    return ExampleFormat(task, SoundFile, ("path",), input_role="path", file_role="path", inferred=False)


def seconds_cell(role: str, cells: Cells, roles: Roles) -> float:
    """A time in seconds; 0 where the table has no such column, or the cell is empty."""
    value = cells.get(roles.get(role, ""))
    if value is None or value == "":
        return 0.0
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ValueError(_("{role} is not a time in seconds", role=role))
    return seconds


SPEECH = "speech-recognition"
SOUNDS = "audio-classification"
AUDIO_TASKS = {"image-text": SPEECH, "image-classification": SOUNDS}  # of the same columns, where the files are sounds
EXAMPLE_FORMATS[SPEECH] = ExampleFormat(
    SPEECH,
    Transcribed,
    ("path", "text"),
    ("speaker", "language", "start", "end"),
    input_role="path",
    file_role="path",
    inferred=False,
)
EXAMPLE_FORMATS[SOUNDS] = ExampleFormat(
    SOUNDS, LabeledSound, ("path", "label"), ("speaker",), input_role="path", file_role="path", inferred=False
)
