"""Long recordings, window after window: each is decoded, checked, cut into segments, and tells where the next begins.

The rules are those of the published implementation. A window of 30 seconds is decoded at temperature 0; if its text
repeats itself, or is improbable, again at 0.2, 0.4 … 1. It is cut where an end stamp and a start stamp meet. If it ends
with text and one stamp, the next window follows it; if it ends within a segment, the next begins at the last stamp.
The text so far is the prompt of the next window, unless the temperature had to rise above one half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from headwater.audio.mel import FRAMES_PER_SECOND, LogMel
from headwater.audio.voice_activity import VoiceActivity
from headwater.families.whisper import FRAMES_PER_SLOT
from headwater.transcription.search import SearchSettings, WindowOutput, decode_window
from headwater.transcription.speech_model import EncodedWindow, SpeechModel
from headwater.transcription.transcript import Segment
from headwater.transcription.words import align_words, last_word_end

PROMPT_RESET_TEMPERATURE = 0.5
PAUSE_FRAMES = 20


@dataclass(frozen=True)
class WindowSettings:
    """How a recording is transcribed; the fields are those of headwater.transcribe."""

    language: str
    task: str = "transcribe"
    timestamps: str = "segment"
    initial_prompt: str = ""
    vad: bool = True
    condition_on_previous_text: bool = True
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    beam_size: int = 5
    best_of: int = 5
    max_compression: float = 2.4
    min_logprob: float = -1.0
    max_no_speech: float = 0.6
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a recording has been transcribed: all that the next window depends on.

    frame: where it begins. context: the tokens of the text before it. last_speech: when the last word ended.
    """

    frame: int = 0
    context: tuple[int, ...] = ()
    last_speech: float = 0.0
    segments: tuple[Segment, ...] = field(default=(), compare=False)  # those of the last window


def transcribe_windows(
    model: SpeechModel,
    mel: LogMel,
    settings: WindowSettings,
    progress: Progress | None = None,
    activity: VoiceActivity | None = None,
) -> Iterator[Progress]:
    """Transcribe window after window, from a progress on; each yields the next progress with its segments."""
    if progress is None:
        progress = Progress(context=tuple(model.tokens.encode(settings.initial_prompt)))
    activity = (activity or VoiceActivity(mel)) if settings.vad else None
    while progress.frame < mel.frames:
        progress = next_window(model, mel, settings, progress, activity)
        yield progress


def next_window(
    model: SpeechModel, mel: LogMel, settings: WindowSettings, progress: Progress, activity: VoiceActivity | None
) -> Progress:
    """Transcribe the window at a progress."""
    first = progress.frame
    stamps = settings.timestamps != "none" and model.tokens.timestamps
    size = min(model.frames, mel.frames - first)
    if not stamps and first + size < mel.frames:
        size = size_to_pause(mel, first, size)
    if activity is not None and not activity.is_active(first, first + size):
        return replace(progress, frame=first + size, segments=())

    # decode; silence is passed over
    window = model.encode(window_features(model, mel, first, size))
    prompt = model.tokens.prompt(progress.context, settings.language, settings.task, stamps)
    output = decode_with_fallback(model, window, prompt, settings, first)
    if output.no_speech > settings.max_no_speech and output.avg_logprob <= settings.min_logprob:
        return replace(progress, frame=first + size, segments=())

    # segments, and the times of their words
    segments, after = split_segments(model, output, first, size)
    last_speech = progress.last_speech
    if settings.timestamps == "word":
        segments = align_words(model, window, segments, settings, first, size, last_speech)
        word_end = last_word_end(segments)
        if word_end is not None:
            last_speech = word_end
            if stamps and not _ends_with_one_stamp(model, output.ids) and word_end > first / FRAMES_PER_SECOND:
                after = round(word_end * FRAMES_PER_SECOND)
    segments = [segment for segment in segments if segment.text.strip() and segment.start != segment.end]
    if activity is not None:
        segments = [segment for segment in segments if activity.is_active_between(segment.start, segment.end)]

    context = progress.context + tuple(token for segment in segments for token in segment.tokens)
    if not settings.condition_on_previous_text or output.temperature > PROMPT_RESET_TEMPERATURE:
        context = ()
    return Progress(max(after, first + 1), context[-model.max_positions :], last_speech, tuple(segments))


def window_features(model: SpeechModel, mel: LogMel, first: int, size: int) -> torch.Tensor:
    """The spectrogram [mels, frames] of a window. What follows is zero, as in the published implementation.

    A model that was trained here on single recordings knows silence after them.
    """
    if model.tokens.continues:
        return torch.nn.functional.pad(mel.window(first, size), (0, model.frames - size))
    if first + size >= mel.frames:
        return mel.window(first, model.frames)
    return torch.nn.functional.pad(mel.window(first, size), (0, model.frames - size), value=mel.floor)


def size_to_pause(mel: LogMel, first: int, size: int) -> int:
    """The frames of a window up to the quietest fifth of a second of its last third, to cut there."""
    begin = size - size // 3
    levels = mel.window(first + begin, size - begin).mean(0)
    if len(levels) < PAUSE_FRAMES:
        return size
    means = levels.unfold(0, PAUSE_FRAMES, 1).mean(1)
    return begin + int(means.argmin()) + PAUSE_FRAMES // 2


def decode_with_fallback(
    model: SpeechModel, window: EncodedWindow, prompt: Sequence[int], settings: WindowSettings, first: int
) -> WindowOutput:
    """Decode at rising temperatures until the text neither repeats itself nor is improbable, or is silence."""
    outputs = []
    for temperature in settings.temperatures:
        stamps = settings.timestamps != "none" and model.tokens.timestamps
        search = SearchSettings(temperature, settings.beam_size, settings.best_of, stamps, settings.seed + first)
        output = decode_window(model, window, prompt, search)
        outputs.append(output)
        improbable = output.avg_logprob < settings.min_logprob
        silent = improbable and output.no_speech > settings.max_no_speech
        if silent or not (improbable or output.compression > settings.max_compression):
            return output
    plain = [output for output in outputs if output.compression <= settings.max_compression]
    best = max(plain or outputs, key=lambda output: output.avg_logprob)
    return replace(best, temperature=settings.temperatures[-1])


def _ends_with_one_stamp(model: SpeechModel, ids: Sequence[int]) -> bool:
    """Whether the output ends with text and one stamp: nobody speaks after it."""
    stamps = [model.tokens.is_stamp(token) for token in ids[-2:]]
    return stamps == [False, True]


def split_segments(model: SpeechModel, output: WindowOutput, first: int, size: int) -> tuple[list[Segment], int]:
    """The segments of an output, and the frame where the next window begins."""
    tokens = model.tokens
    ids = output.ids
    offset = first / FRAMES_PER_SECOND
    cuts = [i for i in range(1, len(ids)) if tokens.is_stamp(ids[i - 1]) and tokens.is_stamp(ids[i])]
    one_stamp = _ends_with_one_stamp(model, ids)

    def segment(piece: Sequence[int], start: float, end: float) -> Segment:
        return Segment(
            start=round(offset + start, 3),
            end=round(offset + end, 3),
            text=tokens.text(piece),
            tokens=tuple(piece),
            avg_logprob=output.avg_logprob,
            no_speech=output.no_speech,
            temperature=output.temperature,
            compression=output.compression,
        )

    if not cuts:  # one segment, to the last stamp if there is one
        stamps = [token for token in ids if tokens.is_stamp(token)]
        known = stamps and stamps[-1] != tokens.first_stamp
        end = tokens.seconds(stamps[-1]) if known else size / FRAMES_PER_SECOND
        return [segment(ids, 0.0, end)], first + size
    bounds = [0, *cuts, *([len(ids)] if one_stamp else [])]
    pieces = [ids[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    segments = [segment(piece, tokens.seconds(piece[0]), tokens.seconds(piece[-1])) for piece in pieces]
    if one_stamp:
        return segments, first + size
    return segments, first + FRAMES_PER_SLOT * (ids[bounds[-1] - 1] - tokens.first_stamp)
