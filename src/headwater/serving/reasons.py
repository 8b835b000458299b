"""Why this word: what each token that was read adds to it, and what changes when a head is switched off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headwater.core.heads import ClassScores
from headwater.inspection.ablation import ablate, ablations
from headwater.inspection.credit import ENOUGH, attribution
from headwater.inspection.results import plain
from headwater.inspection.scores import language
from headwater.inspection.subjects import Reading, Token, still
from headwater.serving.asking import EachOff, Why, Without, reading_of
from headwater.serving.shelf import Opened
from headwater.serving.tracing import labels

MOST_WHY = 256  # tokens: every one of them may cost a pass


def why(opened: Opened, ask: Why) -> dict[str, Any]:
    """log p of the output, shared out among the tokens; by integrated gradients where they add up, else by blanking."""
    reading = reading_of(opened, ask, MOST_WHY)
    place = first_place(opened, reading) if ask.place is None else _place(reading, ask.place)
    token = ask.token
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


def first_place(opened: Opened, reading: Reading) -> int:
    """A place worth asking about: of a written answer its least certain word, of a gap text the first word, else the
    last place, after which the next token comes. Marks such as <eos> and punctuation are passed over."""
    said = reading.follows if opened.shape == "both" else reading.tokens if opened.shape == "encoder" else ()
    marks = _marks(reading)
    words = [n for n, token in enumerate(said) if token.id not in marks and any(map(str.isalnum, token.text))]
    if not words:
        return len(reading.tokens) - 1
    if opened.shape == "encoder":
        return words[0]
    written = torch.tensor([token.id for token in said])
    with still(reading.model), torch.inference_mode():
        states, rows = reading.states()
        log_p = language(reading.model)(states, rows)[0].float().log_softmax(-1)
    sure = log_p[: len(written)].gather(1, written[:, None])[:, 0]
    return min(words, key=lambda n: float(sure[n]))


def _marks(reading: Reading) -> set[int]:
    """Ids that are no words: those that begin, end, hide or pad."""
    tokenizer = reading.tokenizer
    return {tokenizer.special(role) for role in tokenizer.specials} if tokenizer is not None else set()


def _hidden(reading: Reading, place: int) -> Reading:
    """A model that looks both ways would look at the answer: it is hidden where there is a mask."""
    mask = getattr(reading.tokenizer, "mask", None)
    if mask is None:
        return reading
    return replace(reading, tokens=(*reading.tokens[:place], Token(mask, "▢"), *reading.tokens[place + 1 :]))


def without(opened: Opened, ask: Without) -> dict[str, Any]:
    """What the model says with one head switched off, and at which places that tells."""
    reading = reading_of(opened, ask, MOST_WHY)
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
    found = ablations(opened.given, reading_of(opened, ask, MOST_WHY), kind=ask.kind, layers=[ask.layer])
    return {"kind": found.kind, "layer": ask.layer, "loss": plain(found.loss), "change": plain(found.change[ask.layer])}
