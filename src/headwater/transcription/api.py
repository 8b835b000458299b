"""headwater.transcribe: the transcript of a recording.

transcript = headwater.transcribe("talk.mp3", "whisper-base", timestamps="word")
print(transcript.language, transcript)              # transcript.py has its segments and words
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from headwater.audio.files import read_audio, samples_at_16khz
from headwater.audio.mel import FRAMES_PER_SECOND, SAMPLE_RATE, LogMel
from headwater.errors import BadSetting
from headwater.families.hf_folder import LoadedModel
from headwater.i18n import _
from headwater.parts import must
from headwater.transcription.journal import Journal
from headwater.transcription.speech_model import SpeechModel, load_speech_model
from headwater.transcription.transcript import Segment, Transcript
from headwater.transcription.windows import Progress, WindowSettings, transcribe_windows

TASKS = ("transcribe", "translate")
TIMESTAMPS = ("none", "segment", "word")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
OnSegments = Callable[[Sequence[Segment], float, float], None]  # segments, seconds done, seconds in all


def transcribe(
    audio: str | Path | Tensor | np.ndarray,
    model: str | Path | LoadedModel | SpeechModel = "whisper-base",
    *,
    rate: int = SAMPLE_RATE,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: str = "segment",
    initial_prompt: str = "",
    vad: bool = True,
    condition_on_previous_text: bool = True,
    temperature: float | Sequence[float] = TEMPERATURES,
    beam_size: int = 5,
    best_of: int = 5,
    seed: int = 0,
    precision: str = "float32",
    on_segments: OnSegments | None = None,
    journal: str | Path | None = None,
) -> Transcript:
    """Transcribe a recording.

    audio                       a file, or samples [N] or [N, channels] at `rate`
    model                       a known name (headwater models), a folder or file of a Whisper, or what load() gives
    language                    its code or English name; where it is not given, it is detected
    task                        "transcribe", or "translate" into English
    timestamps                  "segment", "word", or "none": the text of a window is one segment
    initial_prompt              a text to precede the recording: names and spellings that occur in it
    vad                         voice activity detection: skip silence, and drop text that was invented for it
    condition_on_previous_text  give each window the text before it as its prompt
    temperature                 0 is greedy or beam search; of several the first whose text is plausible
    beam_size                   of the beam search at temperature 0; 1 is greedy
    best_of                     samples at temperatures above 0, of which the most probable is taken
    seed                        the same seed gives the same text
    precision                   "float32", or "int8": faster, and almost the same text
    on_segments                 called after each window: its segments, the seconds that are done, those of all
    journal                     a file that keeps what is done: after an interruption the same call goes on from there
    """
    temperatures = tuple(temperature) if isinstance(temperature, Sequence) else (float(temperature),)
    settings = WindowSettings(
        language="",
        task=task,
        timestamps=timestamps,
        initial_prompt=initial_prompt,
        vad=vad,
        condition_on_previous_text=condition_on_previous_text,
        temperatures=temperatures,
        beam_size=beam_size,
        best_of=best_of,
        seed=seed,
    )
    check_settings(settings)
    speech_model = load_speech_model(model, precision)
    samples = read_audio(audio) if isinstance(audio, str | Path) else samples_at_16khz(audio, rate)
    recording = Recording(speech_model, samples, settings, language)
    source = str(audio) if isinstance(audio, str | Path) else ""
    return recording.transcribe(on_segments, None if journal is None else Journal(Path(journal), source))


class Recording:
    """A recording that is to be transcribed: its spectrogram, and its language."""

    def __init__(
        self, model: SpeechModel, samples: Tensor, settings: WindowSettings, language: str | None = None
    ) -> None:
        self.model = model
        self.mel = LogMel(samples, model.mels)
        self.duration = len(samples) / SAMPLE_RATE
        self.settings = settings
        self.language = None if language is None else model.tokens.find_language(language)
        self.languages: dict[str, float] = {}

    def detect_language(self) -> str:
        """The language of the first window, unless it was given."""
        if self.language is None:
            self.languages = self.model.detect_language(self.model.encode(self.mel.window(0, self.model.frames)))
            self.language = next(iter(self.languages))
        return self.language

    def transcribe(self, on_segments: OnSegments | None = None, journal: Journal | None = None) -> Transcript:
        """The transcript; with a journal, from where an earlier run was interrupted."""
        settings = replace(self.settings, language=self.detect_language())
        segments: list[Segment] = []
        progress: Progress | None = None
        if journal is not None:
            progress = journal.open([repr(settings), str(self.model.loaded.path), str(len(self.mel.samples))], segments)
        if segments and on_segments is not None:
            on_segments(segments, self._seconds(progress), self.duration)
        for done in transcribe_windows(self.model, self.mel, settings, progress):
            segments += done.segments
            if journal is not None:
                journal.append(done)
            if on_segments is not None:
                on_segments(done.segments, self._seconds(done), self.duration)
        return Transcript(tuple(segments), settings.language, self.duration, self.languages)

    def _seconds(self, progress: Progress | None) -> float:
        return 0.0 if progress is None else min(progress.frame / FRAMES_PER_SECOND, self.duration)


def check_settings(settings: WindowSettings) -> None:
    """Refuse settings that cannot be."""
    if settings.task not in TASKS:
        raise BadSetting(
            _("task must be transcribe or translate, got {task!r}; choose one", task=str(settings.task)[:40])
        )
    if settings.timestamps not in TIMESTAMPS:
        raise BadSetting(
            _("timestamps must be none, segment or word, got {got!r}; choose one", got=str(settings.timestamps)[:40])
        )
    for name in ("beam_size", "best_of"):
        value = getattr(settings, name)
        must(1 <= value <= 64, "transcribe", _("{name} must be from 1 to 64", name=name), value, _("5 is usual"))
    valid = bool(settings.temperatures) and all(0 <= value <= 10 for value in settings.temperatures)
    must(valid, "transcribe", _("temperature must be from 0 to 10"), settings.temperatures, _("leave it out"))
