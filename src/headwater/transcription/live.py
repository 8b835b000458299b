"""Live transcription: sound that is still arriving is transcribed at each pause, or when a window is full."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headwater.audio.mel import FRAMES_PER_SECOND, HOP, SAMPLE_RATE, LogMel
from headwater.audio.voice_activity import VoiceActivity
from headwater.transcription.speech_model import SpeechModel
from headwater.transcription.transcript import Segment
from headwater.transcription.windows import Progress, WindowSettings, transcribe_windows

PAUSE_SECONDS = 0.8
SHORTEST_SECONDS = 1.0  # of what is transcribed at a pause
SHORTEST_WORD = 0.3  # seconds: shorter activity is a noise


class LiveTranscriber:
    """Takes samples at 16 kHz as they come, and gives the segments that are finished."""

    def __init__(self, model: SpeechModel, settings: WindowSettings) -> None:
        self.model = model
        self.settings = settings
        self.samples = torch.empty(0)
        self.offset = 0.0  # seconds before the first sample that is kept
        self.highest_level = -math.inf  # decibels
        self.context = tuple(model.tokens.encode(settings.initial_prompt))

    def push(self, samples: Tensor) -> Iterator[Segment]:
        """More sound; the segments that it completes."""
        self.samples = torch.cat((self.samples, samples))
        window = self.model.frames * HOP
        while len(self.samples) >= window:
            yield from self._transcribe(everything=False)
        if self._paused():
            yield from self._transcribe(everything=True)

    def finish(self) -> Iterator[Segment]:
        """The segments of what is left."""
        mel = LogMel(self.samples, self.model.mels)
        if mel.frames and self._voice_activity(mel).active_seconds(0, mel.frames) > SHORTEST_WORD:
            yield from self._transcribe(everything=True)

    def _paused(self) -> bool:
        """Whether speech was followed by a pause; what is silent throughout is dropped."""
        seconds = len(self.samples) / SAMPLE_RATE
        if seconds < SHORTEST_SECONDS + PAUSE_SECONDS:
            return False
        mel = LogMel(self.samples, self.model.mels)
        activity = self._voice_activity(mel)
        pause = round(PAUSE_SECONDS * FRAMES_PER_SECOND)
        if activity.is_active(mel.frames - pause, mel.frames):
            return False
        if activity.active_seconds(0, mel.frames) <= SHORTEST_WORD:
            self._drop(len(self.samples) - pause * HOP)
            return False
        return True

    def _voice_activity(self, mel: LogMel) -> VoiceActivity:
        """The voice activity of the samples that are kept, relative to the highest level so far."""
        activity = VoiceActivity(mel, self.highest_level)
        self.highest_level = max(self.highest_level, float(activity.levels.max()))
        return activity

    def _transcribe(self, everything: bool) -> Iterator[Segment]:
        """Transcribe what is kept: all of it, or its first window."""
        if not self.settings.language:
            window = self.model.encode(LogMel(self.samples, self.model.mels).window(0, self.model.frames))
            self.settings = replace(self.settings, language=next(iter(self.model.detect_language(window))))
        mel = LogMel(self.samples, self.model.mels)
        progress = Progress(context=self.context)
        for done in transcribe_windows(self.model, mel, self.settings, progress, self._voice_activity(mel)):
            progress = done
            for segment in progress.segments:
                yield segment.shifted(self.offset)
            if not everything:
                break
        self.context = progress.context
        self._drop(len(self.samples) if everything else progress.frame * HOP)

    def _drop(self, count: int) -> None:
        """Forget the first samples."""
        count = max(0, min(count, len(self.samples)))
        self.samples = self.samples[count:].clone()
        self.offset += count / SAMPLE_RATE
