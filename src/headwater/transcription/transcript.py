"""Transcripts: what was said and when, as segments and words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Word:
    """A word with its times in seconds, and the probability of its tokens."""

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment:
    """A passage with its times in seconds; how it was decoded; and its words where they were asked for."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    avg_logprob: float = 0.0
    no_speech: float = 0.0
    temperature: float = 0.0
    compression: float = 0.0
    words: tuple[Word, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The segment for people: numbers rounded, and no words where there are none."""
        fields = asdict(self)
        for name in ("avg_logprob", "no_speech", "temperature", "compression"):
            fields[name] = round(fields[name], 5)
        fields["words"] = [{**word, "probability": round(word["probability"], 4)} for word in fields["words"]]
        return {name: value for name, value in fields.items() if name != "words" or value}

    def shifted(self, seconds: float) -> Segment:
        """The same, later."""
        words = tuple(replace(word, start=word.start + seconds, end=word.end + seconds) for word in self.words)
        return replace(self, start=self.start + seconds, end=self.end + seconds, words=words)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Segment:
        """A segment from its fields, as JSON has them."""
        words = tuple(Word(**word) for word in fields.get("words", []))
        return Segment(**{**fields, "tokens": tuple(fields.get("tokens", [])), "words": words})


@dataclass(frozen=True)
class Transcript:
    """What was said in a recording of `duration` seconds; languages: their probabilities, the best first."""

    segments: tuple[Segment, ...]
    language: str
    duration: float
    languages: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> tuple[Word, ...]:
        """All words."""
        return tuple(word for segment in self.segments for word in segment.words)

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The transcript as JSON."""
        return {
            "text": self.text,
            "language": self.language,
            "language_probability": round(self.languages.get(self.language, 1.0), 4),
            "duration": round(self.duration, 3),
            "segments": [{"id": n, **segment.to_dict()} for n, segment in enumerate(self.segments)],
        }
