"""A trained model at work: what a run's folder holds, called with a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.data.encode import encode_rows
from headwater.data.examples import Question
from headwater.data.objectives.answers import answered, windows
from headwater.data.objectives.labels import classified, word_pieces
from headwater.data.objectives.lesson import Marks
from headwater.errors import BadInput, BadSetting, NotFound
from headwater.families.loading import load
from headwater.generation.ask import Voice, generate
from headwater.generation.beam import Beam
from headwater.text.load import load as load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.training.exam import SpanPrediction, scores
from headwater.training.material import STRIDE, WINDOW
from headwater.training.objectives import to_tensors

TOGETHER = 64


@dataclass
class Trained:
    """trained(text) answers in the way of its task: a text, a label, (word, tag) pairs. Lists give lists."""

    folder: Path
    model: Any
    tokenizer: Tokenizer
    about: dict[str, Any]
    outcome: Any = None

    @property
    def task(self) -> str:
        return str(self.about["task"])

    @property
    def columns(self) -> dict[str, str]:
        """Role -> column of the table it was trained on; empty where the data was no table."""
        return dict(self.about.get("columns") or {})

    def __call__(self, text: Any, **how: Any) -> Any:
        single = isinstance(text, (str, Question))
        found = ANSWER[self.task](self, [text] if single else list(text), **how)
        return found[0] if single else found

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        return f"Trained({str(self.folder)!r}, task={self.task!r}, {size:,} weights)"


def load_run(folder: str | Path, outcome: Any = None) -> Trained:
    """The best model of a run, or a model folder of ours."""
    folder = Path(folder)
    where = folder / "model" if (folder / "config.yaml").is_file() else folder
    if not where.is_dir():
        raise NotFound(f"{folder} is not the folder of a run or of a model; `headwater runs` lists the runs here")
    loaded = load(where)
    about = loaded.config.get("about") or {}
    if "task" not in about:
        raise BadInput(f"{where} does not say what it was trained for; use headwater.load for a model without a task")
    return Trained(folder, loaded.model, loaded.tokenizer or load_tokenizer(where), about, outcome)


def write(trained: Trained, texts: Sequence[str], beam: int = 4, **settings: Any) -> list[str]:
    """Text to text, by beam search."""
    if beam < 1:
        raise BadSetting(f"beam must be at least 1 (which is greedy), got {beam}; 4 is usual")
    marks = Marks.of(trained.tokenizer)
    voice = Voice(trained.model, trained.tokenizer, ends=(marks.eos,), start=marks.bos)
    read = [trained.tokenizer.encode(text, special=False)[: trained.about.get("cut") or None] for text in texts]
    prompts = [(marks.bos, *ids, marks.eos) for ids in read]
    found = []
    for first in range(0, len(prompts), TOGETHER):
        some = prompts[first : first + TOGETHER]
        longest = {"max_tokens": 2 * max(map(len, some)) + 20, **settings}
        found += generate(voice, some, by=Beam(beam) if beam > 1 else None, **longest)
    return [answer.text for answer in found]


def go_on(trained: Trained, texts: Sequence[str], **settings: Any) -> list[str]:
    """A language model goes on with a text."""
    marks = Marks.of(trained.tokenizer)
    voice = Voice(trained.model, trained.tokenizer, ends=(marks.eos,), start=marks.bos)
    prompts = [tuple(trained.tokenizer.encode(text, special=False)) or (marks.bos,) for text in texts]
    return [text + answer.text for text, answer in zip(texts, generate(voice, prompts, **settings), strict=True)]


@torch.no_grad()
def classify(trained: Trained, texts: Sequence[str | tuple[str, str]]) -> list[dict[str, float]]:
    """For each text its labels with their probabilities, the most probable first.

    Two texts are a tuple, or stand in one text with a tab between them.
    """
    marks, names = Marks.of(trained.tokenizer), trained.about["labels"]
    pairs = [text.partition("\t")[::2] if isinstance(text, str) else text for text in texts]
    firsts, seconds = zip(*pairs, strict=True)
    rows, more = (encode_rows(trained.tokenizer, side) for side in (firsts, seconds))
    rows = rows.cut(trained.about.get("cut") or int(rows.lengths.max(initial=0)))
    lesson = classified(rows, np.zeros(len(texts), np.int64), marks, more if any(seconds) else None)
    shares = scores(trained.model, to_tensors(lesson)).softmax(-1)
    orders = shares.argsort(descending=True).tolist()
    return [{names[n]: round(float(row[n]), 4) for n in order} for row, order in zip(shares, orders, strict=True)]


@torch.no_grad()
def tag(trained: Trained, texts: Sequence[str | Sequence[str]]) -> list[list[tuple[str, str]]]:
    """Words, each with its tag. A text is cut at spaces; a list of words is taken as it is."""
    marks, found = Marks.of(trained.tokenizer), []
    for text in texts:
        words = text.split() if isinstance(text, str) else list(text)
        pieces = word_pieces(words, trained.tokenizer)
        ids = torch.tensor([[marks.bos, *(n for word in pieces for n in word), marks.eos]])
        chosen = trained.model(ids)[0].argmax(-1).tolist()
        firsts = [1 + sum(map(len, pieces[:n])) for n in range(len(words))]
        found.append([(word, trained.about["labels"][chosen[at]]) for word, at in zip(words, firsts, strict=True)])
    return found


@torch.no_grad()
def answer(trained: Trained, questions: Sequence[Question], null_threshold: float | None = None) -> list[str]:
    """The span of its text that answers each question; '' where no answer scores better by more than the threshold.

    The threshold is the run's own (0, as in SQuAD 2.0) unless it is given. A run whose training questions all had an
    answer has none: its model was never taught to say that there is no answer.
    """
    if null_threshold is None:
        null_threshold = trained.about.get("null_threshold", 0.0)
    marks, found = Marks.of(trained.tokenizer), []
    for question in questions:
        prediction = SpanPrediction()
        for window in windows(question, trained.tokenizer, marks, WINDOW, STRIDE):
            batch = to_tensors(answered([window], marks))
            start_logits, end_logits = scores(trained.model, batch)[0].float().unbind(-1)
            prediction.add(question.context, window, start_logits, end_logits)
        found.append(prediction.answer(null_threshold))
    return found


ANSWER: dict[str, Any] = {
    "text-to-text": write,
    "language-model": go_on,
    "classification": classify,
    "tagging": tag,
    "answers": answer,
}
