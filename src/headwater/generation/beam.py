"""Beam search: the `width` best beginnings are carried along, and an answer is as good as its log-probability a token.

    score = log p(answer) / length ** length_penalty          (length counts the answer's tokens, its end included)

In each step all continuations of a prompt's beginnings compete. Of the best `width`, those that end are finished
answers; the best that do not end are carried on. A search is over when no beginning can still beat the worst of
`width` finished answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.errors import BadSetting, CheckFailed
from headwater.fast.best import Best, best
from headwater.generation.choosers import Said
from headwater.generation.picking import Choice
from headwater.generation.reading import listen, read
from headwater.generation.requests import Request, Row, check
from headwater.generation.slots import Slots
from headwater.parts import must, part

MOST_ROWS = 128  # read together; more prompts than that are searched one lot after another
OVER = {"sure": "no beginning can still win", "full": "there are `width` answers, though a better one might follow"}


@part
class Beam:
    """length_penalty above 0 favours long answers, below 0 short ones. answers: how many of the best to give.

    groups share the width; in each step a group's tokens cost the later groups `diversity` each, so that answers
    differ. over: "sure", when no beginning can still win; "full", sooner, when there are `width` answers.
    """

    width: int = 4
    length_penalty: float = 1.0
    answers: int = 1
    groups: int = 1
    diversity: float = 0.0
    over: str = "sure"

    def __post_init__(self) -> None:
        must(1 <= self.width <= 1024, self, "width must be from 1 to 1024", self.width, "4 is usual")
        must(
            abs(self.length_penalty) <= 10,
            self,
            "length_penalty must be from -10 to 10",
            self.length_penalty,
            "1 is usual",
        )
        law = f"answers must be from 1 to the width ({self.width})"
        must(1 <= self.answers <= self.width, self, law, self.answers, "widen the beam")
        fits = self.groups >= 1 and self.width % self.groups == 0
        must(fits, self, f"groups must divide the width ({self.width})", self.groups, "choose a divisor")
        must(0 <= self.diversity <= 100, self, "diversity must be from 0 to 100", self.diversity, "0.5 is usual")
        must(self.over in OVER, self, f"over must be one of {', '.join(OVER)}", self.over, "sure is usual")


class Beginning(NamedTuple):
    """Tokens chosen so far, their log-probabilities, the sum that counts (after choosers), and the row that has read
    them.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    row: int = 0


class Option(NamedTuple):
    """A token that may follow a beginning."""

    total: float
    gain: float
    token: int
    after: Beginning


TOTAL = itemgetter(0)


class Found(NamedTuple):
    score: float
    answer: Beginning


class Search:
    """The beams of one prompt, or of one group of them."""

    def __init__(self, request: Request, limit: int, beam: Beam, row: int) -> None:
        self.request, self.limit, self.beam, self.width = request, limit, beam, beam.width // beam.groups
        self.choosers = [chooser for chooser in request.choosers if not chooser.certain]
        self.running = [Beginning(row=row)] if limit else []
        self.found = [] if limit else [Found(0.0, Beginning())]

    @property
    def count(self) -> int:
        """So many continuations are enough to go on with: the best `width`, and as many that do not end."""
        return self.width * max(2, 1 + len(self.request.end))

    def step(self, scores: Tensor, found: Best | None, chosen: Counter[int]) -> None:
        """scores [B, V] of all rows, found the best of each; chosen: how often earlier groups took each token."""
        last = len(self.running[0].tokens) + 1 == self.limit
        options = self._options(scores, found, chosen)[: self.count]
        self.running = []
        for rank, (total, gain, token, one) in enumerate(options):
            longer = Beginning((*one.tokens, token), (*one.logprobs, gain), total, one.row)
            if last or token in self.request.end:
                self.found += [Found(self._score(total, len(longer.tokens)), longer)] if rank < self.width else []
            elif len(self.running) < self.width:
                self.running.append(longer)
        chosen.update(one.tokens[-1] for one in self.running)
        self._settle()

    def _options(self, scores: Tensor, found: Best | None, chosen: Counter[int]) -> list[Option]:
        """The best continuations that are possible, best first."""
        if found is None:
            return self._guided(scores, chosen)
        gains, ids = found.logprobs, found.ids
        options = [
            Option(one.total + gain, gain, token, one)
            for one in self.running
            for token, gain in zip(ids[one.row], gains[one.row], strict=True)
            if gain > -math.inf
        ]
        return sorted(options, key=TOTAL, reverse=True)  # stable: of equals, the first

    def _guided(self, scores: Tensor, chosen: Counter[int]) -> list[Option]:
        """The same where choosers or other groups have a say, so that all scores must be looked at."""
        exact = torch.promote_types(scores.dtype, torch.float32)
        logprobs = scores[[one.row for one in self.running]].log_softmax(-1, dtype=exact)
        totals = self._weighed(logprobs) + logprobs.new_tensor([[one.total] for one in self.running])
        guide = totals.clone()
        for token, times in chosen.items():
            guide[:, token] -= self.beam.diversity * times
        values, places = guide.flatten().topk(min(self.count, guide.numel()))
        options = []
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            if value > -math.inf:
                number, token = divmod(place, guide.shape[1])
                gain, total = float(logprobs[number, token]), float(totals[number, token])
                options.append(Option(total, gain, token, self.running[number]))
        return options

    def _weighed(self, logprobs: Tensor) -> Tensor:
        said = [Said(self.request.prompt, one.tokens) for one in self.running]
        for chooser in self.choosers:
            logprobs = chooser(logprobs, said)
        return logprobs

    def _score(self, total: float, length: int) -> float:
        return total / length**self.beam.length_penalty

    def _settle(self) -> None:
        """Keep the best `width` answers, and stop when the search is over."""
        self.found = sorted(self.found, key=lambda found: -found.score)[: self.width]
        if len(self.found) < self.width or not self.running:
            return
        longest = self.limit if self.beam.length_penalty > 0 else len(self.running[0].tokens)
        best = self._score(max(one.total for one in self.running), longest)
        if self.beam.over == "full" or best <= self.found[-1].score:
            self.running = []


def search(
    model: Any, requests: Sequence[Request], beam: Beam, context: int | None = None
) -> list[list[tuple[Row, float]]]:
    """For each request its best answers with their scores, best first."""
    limits = [check(request, model, context) for request in requests]
    lot = max(1, MOST_ROWS // beam.width)
    found = []
    for first in range(0, len(requests), lot):
        found += _search(model, requests[first : first + lot], limits[first : first + lot], beam)
    return found


def _search(
    model: Any, requests: Sequence[Request], limits: Sequence[int], beam: Beam
) -> list[list[tuple[Row, float]]]:
    most = max(len(request.prompt) + limit for request, limit in zip(requests, limits, strict=True))
    slots = Slots(model, range(len(requests)), most)
    if requests[0].source is not None:
        listen(model, slots, [request.source or () for request in requests])
    prompts = [
        [Search(request, limit, beam, row) for _ in range(beam.groups)]
        for row, (request, limit) in enumerate(zip(requests, limits, strict=True))
    ]
    if any(limits):
        scores = read(model, slots, [request.prompt for request in requests])
    while any(group.running for groups in prompts for group in groups):
        count = min(scores.shape[1], max(groups[0].count for groups in prompts))
        found = _sound(best(scores, count))
        for groups in prompts:
            chosen: Counter[int] = Counter()
            for group in groups:
                if group.running:
                    group.step(scores, None if group.choosers or beam.diversity else found, chosen)
        scores = _read_on(model, slots, [group for groups in prompts for group in groups])
    return [_best(groups, limit) for groups, limit in zip(prompts, limits, strict=True)]


def _read_on(model: Any, slots: Slots, searches: Sequence[Search]) -> Tensor:
    """Move each beginning into a row of its own, and read its last token there."""
    rows = [one.row for search in searches for one in search.running]
    if not rows:
        return torch.empty(0)
    slots.select(rows)
    tails = [one.tokens[-1:] for search in searches for one in search.running]
    fresh = iter(range(len(rows)))
    for each in searches:
        each.running = [one._replace(row=next(fresh)) for one in each.running]
    return read(model, slots, tails)


def _sound(found: Best) -> Best:
    if not all(map(math.isfinite, found.mass)):
        raise CheckFailed("generate: the model's scores must be numbers, got NaN or inf; its weights are broken")
    return found


def _best(groups: Sequence[Search], limit: int) -> list[tuple[Row, float]]:
    found = sorted((one for group in groups for one in group.found), key=lambda found: -found.score)
    if not found:
        raise BadSetting("generate: at least one token must be left in each step, the choosers left none; ban fewer")
    answers = []
    for score, answer in found[: groups[0].beam.answers]:
        row = Row(groups[0].request, limit)
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
            row.take(Choice(token, logprob))
        answers.append((row, score))
    return answers
