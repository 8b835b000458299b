"""Why this word: what each token that was read adds to it, and what changes when a head is switched off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headwater.core.heads import ClassScores
from headwater.errors import BadInput
from headwater.inspection.ablation import ablate, ablations
from headwater.inspection.credit import ENOUGH, attribution
from headwater.inspection.results import plain
from headwater.inspection.subjects import Reading, Token
from headwater.inspection.words import Both
from headwater.serving.asking import EachOff, Why, Without, reading_of
from headwater.serving.shelf import Opened
from headwater.serving.tracing import labels

MOST_WHY = 256  # tokens: every one of them may cost a pass


def why(opened: Opened, ask: Why) -> dict[str, Any]:
    """log p of the output, shared out among the tokens; by integrated gradients where they add up, else by blanking."""
    reading = _short(reading_of(opened, ask))
    place, token = _place(reading, ask.place), ask.token
    if not reading.causal and not isinstance(reading.model.head, ClassScores):
        reading, token = _hidden(reading, place), reading.tokens[place].id if token is None else token
    elif token is None and place < len(reading.follows):
        token = reading.follows[place].id
    found = attribution(opened.given, reading, place=place, token=token)
    if not found.gap <= ENOUGH:
        found = attribution(opened.given, reading, place=place, token=token, by="blanked")
    sides = {"tokens": labels(reading.tokens), "source": labels(reading.source), "follows": labels(reading.follows)}
    scores = {"scores": plain(found.scores), "source_scores": plain(found.source_scores)}
    facts = {"place": found.place, "output": found.output, "by": found.by, "log_p": plain(found.value)}
    return {**sides, **scores, **facts, "nothing": plain(found.baseline)}


def _hidden(reading: Reading, place: int) -> Reading:
    """A model that looks both ways would look at the answer: it is hidden where there is a mask."""
    mask = getattr(reading.tokenizer, "mask", None)
    if mask is None:
        return reading
    return replace(reading, tokens=(*reading.tokens[:place], Token(mask, "▢"), *reading.tokens[place + 1 :]))


def without(opened: Opened, ask: Without) -> dict[str, Any]:
    """What the model says with one head switched off, and at which places that tells."""
    reading = _short(reading_of(opened, ask))
    place = _place(reading, ask.place)
    found = ablate(opened.given, reading, ask.layer, ask.head, kind=ask.kind, place=place)
    choices = [{**labels([c.token])[0], "shares": plain([c.before, c.after])} for c in found.choices]
    sides = {"tokens": labels(reading.tokens), "source": labels(reading.source)}
    return {**sides, "choices": choices, "loss": plain(found.loss), "loss_without": plain(found.loss_without),
            "apart": plain(found.apart), "place": place}  # fmt: skip


def _place(reading: Reading, place: int) -> int:
    last = len(reading.tokens) - 1
    return last if place < 0 else min(place, last)


def each_off(opened: Opened, ask: EachOff) -> dict[str, Any]:
    """How much the loss of the text rises without each head of a layer. Asked layer by layer: others want answers."""
    found = ablations(opened.given, _short(reading_of(opened, ask)), kind=ask.kind, layers=[ask.layer])
    return {"kind": found.kind, "layer": ask.layer, "loss": plain(found.loss), "change": plain(found.change[ask.layer])}


def _short(reading: Reading) -> Reading:
    length = max(len(reading.tokens), len(reading.source))
    if length > MOST_WHY:
        en = f"up to {MOST_WHY} tokens can be asked about here, got {length}; shorten the text"
        raise BadInput(Both(en, f"这里最多能问 {MOST_WHY} 个词元,得到 {length} 个;请缩短文字"))
    return reading
