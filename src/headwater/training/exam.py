"""Exams: how good a model is at its task, in the task's own measures, with samples to look at.

All of them give the loss; `metric` says which measure decides what is best ("auto": the task's usual one).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.data.examples import Question, Tagged
from headwater.data.metrics.answers import squad_scores
from headwater.data.metrics.labels import accuracy, class_f1, entity_f1, perplexity
from headwater.data.metrics.rouge import rouge
from headwater.data.metrics.translation import bleu, chrf
from headwater.data.objectives.answers import Window, said
from headwater.data.objectives.labels import tags_said
from headwater.errors import BadSetting, nearest
from headwater.training.courses import Answers, TextToText, evenly
from headwater.training.decode import greedy
from headwater.training.loop import Scored
from headwater.training.material import Material
from headwater.training.objectives import how_many, objective_of, to_tensors

SMALLER_IS_BETTER = ("loss", "perplexity")
USUAL = {
    "text-to-text": "bleu",
    "language-model": "loss",
    "classification": "accuracy",
    "tagging": "f1",
    "answers": "f1",
}
OF_TEXTS, FAINT = ("bleu", "chrf", "rougeL"), 1.0  # points below which texts agree by accident: the loss decides there
LONGEST_ANSWER = 30  # tokens of an answer that is a span
NO_ANSWER = "(no answer)"  # how a sample shows an empty answer
Said = tuple[list[int], list[Any], list[Any]]  # numbers of the rows, outputs and references


@dataclass
class Exam:
    """Called with a model in eval mode. rows: how many are measured; samples: how many are shown."""

    material: Material
    metric: str = "auto"
    rows: int = 2000
    samples: int = 4

    def __call__(self, model: Any) -> Scored:
        scores = {"loss": self.loss(model)}
        shown: tuple[Mapping[str, Any], ...] = ()
        if self.material.task == "language-model":
            if self.material.objective != "masked-next":  # there the loss is of words and of sentences
                scores["perplexity"] = perplexity(scores["loss"], 1)
        else:
            rows, outputs, wanted = ANSWERS[self.material.task](self, model)
            scores |= MEASURES[self.material.task](outputs, wanted, self.material)
            shown = tuple(self.shown(rows, outputs, wanted))
        return Scored(self._score(scores), scores, shown)

    def loss(self, model: Any) -> float:
        """The mean loss of an answer, without smoothing."""
        objective, total, count = objective_of(self.material.task, self.material.objective), 0.0, 0
        for batch in self.batches(model):
            total += float(objective(model, batch[1], 0.0))
            count += how_many(batch[1], objective)
        return total / max(count, 1)

    def batches(self, model: Any) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        device, course = next(model.parameters()).device, self.material.valid
        for rows in course.in_order(self.rows):
            yield rows, to_tensors(course.lesson(rows, 0), device)

    def _score(self, scores: Mapping[str, float]) -> tuple[float, ...]:
        """The measure that decides, and the loss where that is a draw."""
        name = USUAL[self.material.task] if self.metric == "auto" else self.metric
        if name not in scores:
            raise BadSetting(f"metric: {self.material.task} has no {name!r}; {nearest(name, scores)}")
        value = -scores[name] if name in SMALLER_IS_BETTER else scores[name]
        return 0.0 if name in OF_TEXTS and value < FAINT else value, -scores["loss"]

    def shown(self, rows: Sequence[int], outputs: list[Any], wanted: list[Any]) -> Iterator[Mapping[str, Any]]:
        """A few of the outputs, evenly from all, beside what was expected."""
        for at in evenly(len(rows), self.samples):
            example = self.material.examples[rows[at]]
            output, right = (said_of(example, value) for value in (outputs[at], wanted[at]))
            yield {"input": _input(example), "output": output, "expected": right}


def _input(example: Any) -> str:
    return " ".join(example.words) if isinstance(example, Tagged) else str(example[0])


def said_of(example: Any, value: Any) -> str:
    """An output as one line: of tags only the words that have one, of accepted answers the first."""
    if isinstance(example, Question) and not value:
        return NO_ANSWER
    if isinstance(example, Tagged):
        return tagged_words(zip(example.words, value, strict=True), named_only=True)
    if isinstance(value, str):
        return value
    return str(value[0]) if value else ""


def tagged_words(words: Iterable[tuple[str, str]], named_only: bool = False) -> str:
    """Tags other than O stand behind their word."""
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in words if tag != "O" or not named_only)


# ------------------------------------------------------------------------------------------- what the model answers


def written(exam: Exam, model: Any) -> Said:
    """Texts, by greedy decoding."""
    m, course = exam.material, exam.material.valid
    assert isinstance(course, TextToText)
    outputs: dict[int, str] = {}
    for rows, batch in exam.batches(model):
        most = 2 * int(course.lengths[rows, 1].max()) + 10
        ids = greedy(model, batch["source"], batch.get("source_keep"), course.marks.bos, course.marks.eos, most)
        outputs |= {int(row): m.tokenizer.decode(said) for row, said in zip(rows, ids, strict=True)}
    return _in_order(outputs, lambda row: m.examples[row][1])


def classes(exam: Exam, model: Any) -> Said:
    found: dict[int, str] = {}
    for rows, batch in exam.batches(model):
        chosen = scores(model, batch).argmax(-1).tolist()
        found |= {int(row): exam.material.labels[n] for row, n in zip(rows, chosen, strict=True)}
    examples: Any = exam.material.examples
    return _in_order(found, lambda row: examples[row].label)


def tags(exam: Exam, model: Any) -> Said:
    found: dict[int, Any] = {}
    for rows, batch in exam.batches(model):
        chosen = scores(model, batch).argmax(-1).cpu().numpy()
        row_tags = tags_said(chosen, batch["targets"].cpu().numpy(), exam.material.labels)
        found |= {int(row): said for row, said in zip(rows, row_tags, strict=True)}
    examples: Any = exam.material.examples
    return _in_order(found, lambda row: examples[row].tags)


def spans(exam: Exam, model: Any) -> Said:
    """The predicted answer of each question, from the logits of all its windows."""
    course, threshold = exam.material.valid, exam.material.null_threshold
    assert isinstance(course, Answers)
    examples: Any = exam.material.examples
    found: dict[int, SpanPrediction] = defaultdict(SpanPrediction)
    for rows, batch in exam.batches(model):
        starts, ends = scores(model, batch).float().unbind(-1)
        for row, start, end in zip(rows, starts, ends, strict=True):
            number = int(course.owner[row])
            found[number].add(examples[number].context, course.windows[row], start, end)
    predicted = {number: prediction.answer(threshold) for number, prediction in found.items()}
    return _in_order(predicted, lambda number: examples[number].answers)


@dataclass
class SpanPrediction:
    """The best span of one question over its windows, beside the score of no answer (SQuAD 2.0, Rajpurkar et al. 2018).

    A window scores no answer by its position 0: start_logits[0] + end_logits[0]. The null score is the minimum over the
    windows, because a window without the answer says only that the answer is elsewhere.
    """

    text: str = ""
    score: float = -math.inf
    null_score: float = math.inf

    def add(self, context: str, window: Window, start_logits: Tensor, end_logits: Tensor) -> None:
        """Take the logits [L] of one more window into account."""
        self.null_score = min(self.null_score, float(start_logits[0] + end_logits[0]))
        if not window.spans:
            return
        score, first, last = best_span(start_logits, end_logits, window.start, window.start + len(window.spans))
        if score > self.score:
            self.score = score
            self.text = said(context, window, first, last)

    def answer(self, null_threshold: float | None) -> str:
        """The best span, or '' where the null score exceeds its score by more than the threshold (None: never)."""
        if null_threshold is not None and self.null_score - self.score > null_threshold:
            return ""
        return self.text


def _in_order(outputs: Mapping[int, Any], wanted: Callable[[int], Any]) -> Said:
    rows = sorted(outputs)
    return rows, [outputs[row] for row in rows], [wanted(row) for row in rows]


def best_span(start: Tensor, end: Tensor, low: int, high: int) -> tuple[float, int, int]:
    """The most probable first and last place within [low, high), not too far apart."""
    both = start[low:high, None] + end[None, low:high]
    width = high - low
    place = torch.arange(width, device=start.device)
    far = (place[None] < place[:, None]) | (place[None] - place[:, None] >= LONGEST_ANSWER)
    both = both.masked_fill(far, -torch.inf)
    at = int(both.argmax())
    return float(both.flatten()[at]), low + at // width, low + at % width


def scores(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    given = {k: v for k, v in batch.items() if k in ("keep", "kinds", "documents")}
    answer: Tensor = model(batch["ids"], **given)
    return answer


ANSWERS: dict[str, Callable[[Exam, Any], Said]] = {
    "text-to-text": written, "classification": classes, "tagging": tags, "answers": spans}  # fmt: skip


# ------------------------------------------------------------------------------------------------ how good they are


def _of_texts(outputs: list[str], wanted: list[str], m: Material) -> dict[str, float]:
    language = m.languages[1] if len(m.languages) == 2 else ""
    found = {"bleu": bleu(outputs, wanted, language), "chrf": chrf(outputs, wanted)}
    return {**found, "rougeL": rouge(outputs, wanted)["rougeL"], "exact": accuracy(outputs, wanted)}


MEASURES: dict[str, Callable[[list[Any], list[Any], Material], dict[str, float]]] = {
    "text-to-text": _of_texts,
    "classification": lambda said, wanted, m: {
        "accuracy": accuracy(said, wanted),
        "macro_f1": class_f1(said, wanted)["macro"],
    },
    "tagging": lambda said, wanted, m: entity_f1(said, wanted),
    "answers": lambda said, wanted, m: squad_scores(said, wanted),
}
