"""Objectives: what a model must say about a batch, as a sum of losses. Which places count is in the targets.

A batch is a dict of tensors: ids [B, Q], perhaps source [B, S], keep, source_keep, documents, kinds, and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.embed import Rows
from headwater.data.objectives.lesson import Lesson
from headwater.training.losses import counted, cross_entropy, span_loss, vocabulary_loss

Batch = Mapping[str, Tensor]
Objective = Callable[[Any, Batch, float], Tensor]


def hidden(model: Any, batch: Batch) -> tuple[Tensor, Rows]:
    """The last states of the stack that writes, before the head."""
    memory = None
    if "source" in batch:
        memory = model.encode(batch["source"], keep=batch.get("source_keep"), documents=batch.get("source_documents"))
    rows = model.rows(batch["ids"], batch.get("keep"), batch.get("documents"), None, batch.get("kinds"))
    return model.states(rows, memory=memory), rows


def words(model: Any, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """A piece of the vocabulary at each place that is asked: the next (causal, seq2seq) or a hidden one (masked)."""
    states, rows = hidden(model, batch)
    return _of_words(model.head, states, rows, batch["targets"], smoothing)


def words_and_next(model: Any, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Hidden words, and whether the second sentence follows the first: every answer counts the same."""
    states, rows = hidden(model, batch)
    hidden_words = _of_words(model.head["language"], states, rows, batch["targets"], smoothing)
    return hidden_words + cross_entropy(model.head["next"](states, rows), batch["second"])


def _of_words(head: Any, states: Tensor, rows: Rows, targets: Tensor, smoothing: float) -> Tensor:
    if type(getattr(head, "out", None)) is not nn.Linear:  # a head that is more than a matrix works out its own scores
        return cross_entropy(head(states, rows), targets, smoothing)
    states = head.transform(states)
    states = states if head.scale == 1.0 else states * head.scale
    return vocabulary_loss(states, head.out.weight, head.out.bias, targets, smoothing)


def labels(model: Any, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """A class for each row, or a tag for each token: whichever the head says."""
    states, rows = hidden(model, batch)
    return cross_entropy(model.head(states, rows), batch["targets"], smoothing)


def spans(model: Any, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The first and the last token of an answer, among the real ones: targets [B, 2]."""
    states, rows = hidden(model, batch)
    starts, ends = batch["targets"].unbind(1)
    return span_loss(model.head(states, rows), starts, ends, batch.get("keep"))


def how_many(batch: Batch, objective: Objective) -> int:
    """The answers of a batch: tokens, rows or spans. The loss of a step is divided by them."""
    asked = batch["targets"][:, 0] if objective is spans else batch["targets"]
    return int(counted(asked)) + len(batch.get("second", ()))


def real_tokens(batch: Batch) -> int:
    """What a model reads in a batch, and what it writes of a source it has read (every place of it is asked).

    Padding is left out: the speed of a step is counted in these.
    """
    if "source" in batch:
        return _kept(batch["source"], batch.get("source_keep")) + int(counted(batch["targets"]))
    return _kept(batch["ids"], batch.get("keep"))


def _kept(ids: Tensor, keep: Tensor | None) -> int:
    return ids.numel() if keep is None else int(keep.sum())


OBJECTIVES: dict[str, Objective] = {
    "text-to-text": words,
    "language-model": words,
    "classification": labels,
    "tagging": labels,
    "answers": spans,
    "masked-next": words_and_next,
}


def objective_of(task: str, objective: str = "") -> Objective:
    """How a task is learned; running text may have an objective of its own."""
    return OBJECTIVES.get(objective) or OBJECTIVES[task]


def to_tensors(lesson: Lesson, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A lesson's arrays as tensors. A keep that hides nothing is left out: attention is quicker without a mask."""
    given = {f.name: getattr(lesson, f.name) for f in fields(lesson)}
    found = {name: torch.from_numpy(value) for name, value in given.items() if value is not None}
    full = [name for name in ("keep", "source_keep") if name in found and bool(found[name].all())]
    return {name: t.to(device, non_blocking=True) for name, t in found.items() if name not in full}
