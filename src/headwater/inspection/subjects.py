"""What is looked at: a model, and the tokens of a text as the model reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.embed import Rows
from headwater.core.model import Transformer
from headwater.errors import BadInput, TooLong
from headwater.inspection.words import Both
from headwater.text.pieces import joined
from headwater.text.tokenizer import Tokenizer

SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "␣"}
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Token:
    """text: what it stands for. A character made of several tokens is the text of each; part says which one it is."""

    id: int
    text: str
    part: int = 1
    parts: int = 1

    @property
    def label(self) -> str:
        """For an axis: no spaces around it, signs for what cannot be seen, a raised number for a part of a character.

        >>> Token(5, " cat").label, Token(6, "\\n").label, Token(7, "你", 2, 3).label
        ('cat', '⏎', '你²')
        """
        bare = self.text.strip(" ") or self.text
        shown = "".join(SIGNS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in bare)
        return shown + (str(self.part).translate(RAISED) if self.parts > 1 else "")


@dataclass(frozen=True, eq=False)
class Reading:
    """One text as a model reads it. tokens: what the stack before the head reads; source: what the encoder reads, if
    there are two stacks. follows: what comes after each token, as far as it is known; nothing where it looks both ways.
    """

    model: Transformer = field(repr=False)
    tokenizer: Any = field(repr=False)
    tokens: tuple[Token, ...]
    source: tuple[Token, ...] = ()
    follows: tuple[Token, ...] = ()
    generated: bool = False
    labels: tuple[str, ...] = ()

    @property
    def ids(self) -> Tensor:
        return torch.tensor([[token.id for token in self.tokens]])

    @property
    def extras(self) -> dict[str, Tensor]:
        """What the model is called with beside its ids."""
        return {"source": torch.tensor([[token.id for token in self.source]])} if self.source else {}

    @property
    def causal(self) -> bool:
        return self.model.decoder is not None

    def answer(self) -> Any:
        """What the model says, as it says it."""
        return self.model(self.ids, **self.extras)

    def states(self) -> tuple[Tensor, Rows]:
        """What the head reads [1, Q, D]. Of a long text the whole answer over the vocabulary is never wanted."""
        memory = self.model.encode(self.extras["source"]) if self.source else None
        rows = self.model.rows(self.ids, None, None, None, None)
        return self.model.states(rows, memory=memory), rows

    def name(self, token: int) -> Token:
        """A token of what the model writes."""
        return named([token], self.tokenizer)[0]


def named(ids: Sequence[int], tokenizer: Any, source: bool = False) -> tuple[Token, ...]:
    """Ids with the text of each. source: in the tokenizer that reads, where another one writes."""
    if tokenizer is None:
        return tuple(Token(n, str(n)) for n in ids)
    piece = (lambda n: Tokenizer.piece_bytes(tokenizer, n)) if source else tokenizer.piece_bytes
    made: list[Token] = []
    for text, size in joined([piece(n) if n < len(tokenizer) else b"?" for n in ids]):
        made += [Token(ids[len(made) + part], text, part + 1, size) for part in range(size)]
    return tuple(made)


@contextlib.contextmanager
def still(model: nn.Module, learning: bool = False) -> Iterator[None]:
    """In evaluation mode, given back as it came; without gradients, unless they are what is looked for."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.set_grad_enabled(learning):
            yield
    finally:
        for module, training in modes:
            module.training = training


# ----------------------------------------------------------------------------------------------------- from text to ids


@dataclass(frozen=True)
class Subject:
    """A model with what is needed to ask it in words. about: what a model trained here says of itself."""

    model: Any
    tokenizer: Any = None
    ends: tuple[int, ...] = ()
    start: int | None = None
    longest: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    where: Path | None = None
    voice: Any = None

    @classmethod
    def of(cls, given: Any) -> Subject:
        model = getattr(given, "model", given)
        if not isinstance(model, Transformer):
            raise BadInput(f"inspection: a model of ours must be given, got {type(given).__name__}; use headwater.load")
        if model is given:
            return cls(model, voice=model)
        about = getattr(given, "about", None) or getattr(given, "config", {}).get("about") or {}
        if "task" in about:
            return cls._trained_here(given, about)
        named: dict[str, Any] = {key: getattr(given, key, None) for key in ("start", "longest", "where")}
        return cls(model, given.tokenizer, tuple(given.ends), **named, labels=tuple(given.labels), voice=given)

    @classmethod
    def _trained_here(cls, given: Any, about: dict[str, Any]) -> Subject:
        from headwater.data.objectives.lesson import Marks
        from headwater.generation.ask import Voice

        marks = Marks.of(given.tokenizer)
        voice = Voice(given.model, given.tokenizer, ends=(marks.eos,), start=marks.bos)
        labels = tuple(about.get("labels") or ())
        return cls(given.model, given.tokenizer, (marks.eos,), marks.bos, None, about, labels, None, voice)

    @property
    def two(self) -> bool:
        return self.model.encoder is not None and self.model.decoder is not None

    def prompt(self, text: Any) -> list[int]:
        """Ids of what the model reads. A model that fills gaps may be shown one: its mask acts where it is typed."""
        if not isinstance(text, str):
            return [int(n) for n in text]
        if self.tokenizer is None:
            raise BadInput(f"inspection: a model alone reads token ids, got {text[:40]!r}; give ids, or headwater.load")
        if self.about.get("task") == "language-model":
            ids = self.tokenizer.encode(text, special=False)
        elif self.about.get("task") in ("text-to-text", "tagging", "answers"):
            ids = [self.start, *self.tokenizer.encode(text, special=False), *self.ends]
        else:
            gaps = self.model.decoder is None and self.tokenizer.mask is not None
            ids = self.tokenizer.encode(text, control=gaps)
        if not ids and self.tokenizer.bos is not None:
            ids = [self.tokenizer.bos]
        return self._fitting(ids)

    def _fitting(self, ids: list[int]) -> list[int]:
        if not ids:
            raise BadInput(
                Both(
                    "inspection: a text must have a token, got none; give some words",
                    "文字里至少要有一个词元；请写点什么",
                )
            )
        if self.longest is not None and len(ids) > self.longest:
            en = f"inspection: the model reads {self.longest} tokens, got {len(ids)}; shorten the text"
            raise TooLong(Both(en, f"模型最多读 {self.longest} 个词元，得到 {len(ids)} 个；请缩短文字"))
        return ids

    def target(self, text: Any) -> list[int]:
        """Ids that the decoder shall write, with the token that ends them."""
        if not isinstance(text, str):
            return [int(n) for n in text]
        if self.tokenizer is None:
            raise BadInput("inspection: a model alone writes token ids, got a text; give ids, or headwater.load")
        ids = self._writes().encode(text, special=not self.about)
        return self._fitting(ids if ids and ids[-1] in self.ends else [*ids, *self.ends[:1]])

    def _writes(self) -> Any:
        """The tokenizer of what is written, which a translator may have beside the one that reads."""
        if self.where is not None and (self.where / "target.spm").exists():
            from headwater.text.load import load_target

            return load_target(self.where)
        return getattr(self.tokenizer, "target", self.tokenizer)


def read(model: Any, text: Any, target: Any = None, *, most: int = 128) -> Reading:
    """The tokens of a text as the model reads them. An encoder-decoder without a target writes `most` tokens itself."""
    if isinstance(text, Reading):
        return text
    subject = Subject.of(model)
    ids, tokenizer = subject.prompt(text), subject.tokenizer
    if not subject.two:
        if target is not None:
            raise BadInput("inspection: only an encoder-decoder has a target, got one; leave it out")
        tokens = named(ids, tokenizer, source=True)
        return Reading(
            subject.model, tokenizer, tokens, (), tokens[1:] if subject.model.decoder is not None else (),
            labels=subject.labels,
        )  # fmt: skip
    start, written = subject.start, _written(subject, ids, target, most)
    if start is None:
        raise BadInput(
            Both(
                "inspection: a decoder needs a token to begin with, this model names none; give headwater.load",
                "解码器要有开头的词元，这个模型没有指明",
            )
        )
    tokens = named([start, *written[:-1]], tokenizer)
    source, follows = named(ids, tokenizer, source=True), named(written, tokenizer)
    return Reading(subject.model, tokenizer, tokens, source, follows, generated=target is None)


def _written(subject: Subject, source: list[int], target: Any, most: int) -> list[int]:
    if target is not None:
        return subject.target(target)
    from headwater.generation.ask import generate

    if subject.start is None:
        raise BadInput("inspection: this model names no token to begin with, so it cannot write; give a target")
    return list(generate(subject.voice, source, max_tokens=most).ids)
