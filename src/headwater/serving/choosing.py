"""The next token: what the model says, and what is left of it after each chooser; a hidden token; the logit lens.

Choosing is generation's own code, so the page, Python and the command line agree to the last digit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadInput, Fault
from headwater.generation.ask import Voice
from headwater.generation.choosers import Chooser
from headwater.generation.choosers import named as choosers_named
from headwater.generation.picking import Choice, Stage, choose
from headwater.generation.requests import Event, Request, Row
from headwater.inspection.logit_lens import lens
from headwater.inspection.results import plain
from headwater.inspection.scores import in_parts, language, vocabulary
from headwater.inspection.subjects import Reading, Token, still
from headwater.inspection.words import Both
from headwater.serving.asking import Chosen, Hidden, OfText, reading_of
from headwater.serving.asking import Lens as LensAsk
from headwater.serving.shelf import Opened
from headwater.serving.tracing import labels

HELD = 8


class Said:
    """The scores after a text, and how probable each of its tokens was. Kept for the sliders, which ask again."""

    def __init__(self) -> None:
        self.held: OrderedDict[Any, tuple[Tensor, list[float | None]]] = OrderedDict()

    def of(self, opened: Opened, reading: Reading) -> tuple[Tensor, list[float | None]]:
        key = (opened.key, tuple(t.id for t in reading.tokens), tuple(t.id for t in reading.source))
        if key not in self.held:
            self.held[key] = scored(reading)
            while len(self.held) > HELD:
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key]


def scored(reading: Reading) -> tuple[Tensor, list[float | None]]:
    """The scores [V] after the last token, and the share the model gave each token; None for the first."""
    head = language(reading.model)
    shares: list[float | None] = [None]
    with still(reading.model), torch.inference_mode():
        states, rows = reading.states()
        scores = head(states[:, -1:], rows)[0, 0].float()
        ids = reading.ids[0, 1:]
        for first, log_p in in_parts(head, states[:, :-1], rows, vocabulary(head)):
            own = log_p.gather(1, ids[first : first + len(log_p), None])
            shares += own[:, 0].exp().tolist()
    return scores, shares


def next_token(opened: Opened, ask: Chosen, said: Said) -> dict[str, Any]:
    if opened.shape == "encoder":
        raise BadInput(
            Both(
                "an encoder alone has no next token: it fills gaps; hide a token instead",
                "编码器没有下一个词元，它填空；请改为遮住一个词元",
            )
        )
    reading = begun(opened, ask)
    scores, shares = said.of(opened, reading)
    row = row_of(opened, reading, ask, len(scores))
    choice = chosen(row, scores)
    return {
        "tokens": labels(reading.tokens),
        "source": labels(reading.source),
        "shares": plain(shares),
        "token": choice.token,
        "ends": choice.token in opened.subject.ends,
        "stages": [{"by": "the model", "value": None}, *map(stage_name, row.request.choosers)],
        "left": left(row, scores),
        "rows": candidates(reading, choice.stages, choice.token, ask.shown),
    }


def begun(opened: Opened, ask: OfText) -> Reading:
    """What has been read when the next token is asked for. A decoder with a source begins with its first token."""
    if opened.shape == "both" and ask.ids is None:
        start = opened.subject.start
        if start is None:
            raise BadInput(
                Both("this model names no token to begin with; give ids", "这个模型没有指明开头的词元；请给 ids")
            )
        ids = [start]
        if ask.text:
            written = opened.subject.target(ask.text)
            ids += written[:-1] if written[-1] in opened.subject.ends else written
        ask = ask.model_copy(update={"ids": ids})
    return reading_of(opened, ask)


def row_of(opened: Opened, reading: Reading, ask: Chosen, vocab: int) -> Row:
    """The request as generate would make it: the number of tokens said is the step, so a seed gives one answer."""
    voice = Voice.of(opened.subject.voice)
    ids = tuple(t.id for t in reading.tokens)
    choosers = (*voice.rules, *choosers_named(**ask.choosers()))
    for chooser in choosers:
        chooser.check(vocab)
    prompt, new = ids[: len(ids) - ask.new], ids[len(ids) - ask.new :]
    row = Row(Request(prompt, None, choosers, len(new) + 1, seed=ask.seed, trace=True), len(new) + 1)
    row.events = [Event(token, "", 0.0, (), None) for token in new]
    return row


def chosen(row: Row, scores: Tensor) -> Choice:
    (choice,) = choose(scores[None], [row])
    if isinstance(choice, Fault):
        raise choice
    return choice


def stage_name(chooser: Chooser) -> dict[str, Any]:
    """The kind of a chooser and its number, for the page to put into words."""
    settings = [getattr(chooser, field.name) for field in fields(chooser)]  # type: ignore[arg-type]
    value = next((setting for setting in settings if isinstance(setting, (int, float))), None)
    return {"by": type(chooser).__name__, "value": value}


def left(row: Row, scores: Tensor) -> list[int]:
    """How many tokens may still be chosen after each stage: those whose score is not −∞.

    Counted before the softmax, in which a low temperature makes some probabilities too small for a float.
    """
    counts, now = [], scores[None]
    for step in (None, *row.request.choosers):
        now = now if step is None else step(now, [row.said])
        counts.append(int((now > -torch.inf).sum()))
    return counts


def candidates(reading: Reading, stages: Any, token: int, count: int) -> list[dict[str, Any]]:
    """The most probable tokens before any chooser, and the chosen one, each with its share after every stage."""
    ids = [i for i, _ in Stage.top(stages[0], count)]
    ids += [] if token in ids else [token]
    return [{**_named(reading, i), "shares": plain([float(stage.shares[i]) for stage in stages])} for i in ids]


def _named(reading: Reading, token: int) -> dict[str, Any]:
    return labels([reading.name(token)])[0]


def hidden(opened: Opened, ask: Hidden) -> dict[str, Any]:
    """What the model puts in a place whose token is hidden by its mask (or not hidden, where it has none)."""
    reading = reading_of(opened, ask)
    if opened.shape != "encoder":
        raise BadInput(
            Both(
                "only an encoder fills gaps; this model writes one token after another",
                "只有编码器填空；这个模型逐个写词元",
            )
        )
    if not 0 <= ask.place < len(reading.tokens):
        n = len(reading.tokens)
        raise BadInput(Both(f"place must be below {n}, got {ask.place}", f"位置应小于 {n}，得到 {ask.place}"))
    mask = getattr(reading.tokenizer, "mask", None)
    was = reading.tokens[ask.place]
    if mask is not None:
        gap = Token(mask, "▢")
        reading = replace(reading, tokens=(*reading.tokens[: ask.place], gap, *reading.tokens[ask.place + 1 :]))
    head = language(reading.model)
    with still(reading.model), torch.inference_mode():
        states, rows = reading.states()
        scores = head(states[:, ask.place : ask.place + 1], rows)[0, 0].float()
    stage = Stage("the model", scores.softmax(-1))
    rows_told = candidates(reading, [stage], was.id, ask.shown)
    return {"tokens": labels(reading.tokens), "masked": mask is not None, "was": labels([was])[0], "rows": rows_told}


def lens_of(opened: Opened, ask: LensAsk) -> dict[str, Any]:
    """Layer by layer what would be said, at the last places."""
    reading = reading_of(opened, ask) if opened.shape == "encoder" else begun(opened, ask)
    first = max(0, len(reading.tokens) - ask.places)
    found = lens(opened.given, reading, top=5, places=range(first, len(reading.tokens)))
    cells = [
        [
            [{**_named(reading, int(i)), "share": plain(float(p))} for i, p in zip(ids, shares, strict=True)]
            for ids, shares in zip(row_ids, row_shares, strict=True)
        ]
        for row_ids, row_shares in zip(found.ids, found.shares, strict=True)
    ]
    return {
        "tokens": labels(reading.tokens[first:]),
        "layers": list(found.layers),
        "cells": cells,
        "entropy": plain(found.entropy),
        "answer": labels(found.answer),
        "answer_shares": plain(found.answer_shares),
    }
