"""A running batch that requests join and leave between steps (continuous batching), as a plain object.

    engine = Engine(model)
    row = engine.submit(Request(prompt))        # refused here, if it can not be answered
    while engine.step(): ...                    # each step gives every running row one token
    row.text, row.stopped

Requests are taken in the order in which they came. In each step at most `prefill` tokens of new prompts are read, so
that one long prompt does not hold up those who are already being answered. The cache never has more than rows ×
columns places. Every answer is the one its request would have got alone. A fault ends the row it belongs to and no
other, and after an interruption (Ctrl-C) the next step goes on as if nothing had happened: what the cache knows beyond
a row's text is taken back before anything is read.

With a drafter (by=LookUp(), see speculative.py) a few tokens of each row are guessed before a step, which reads them
too: those that are what the row says anyway come in the same step. FEW tokens are read in much less time than in as
many steps, so they are shared out among the rows; where more than half as many rows run, none is guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.errors import Fault, TooLong, Unavailable
from headwater.generation.picking import choose
from headwater.generation.reading import listen, read, read_each
from headwater.generation.requests import Event, Request, Row, check
from headwater.generation.slots import Slots
from headwater.generation.speculative import Drafter, fits
from headwater.parts import must

FEW = 8  # tokens that a step reads at most, where some of them are guesses


class Joining:
    """Rows whose prompts are being read, in a cache of their own: several short ones together, or a long one in
    pieces.
    """

    def __init__(self, model: Any, rows: Sequence[Row]) -> None:
        self.model, self.rows = model, rows
        prefix = rows[0].request.prefix
        self.slots = prefix.copy(rows[0], rows[0].request.prompt) if prefix else Slots(model, rows)
        self.scores: Tensor | None = None

    def read(self, budget: int) -> bool:
        """Read the next piece; True when all is read."""
        if self.rows[0].request.source is not None and self.slots.heard is None:
            listen(self.model, self.slots, [row.request.source or () for row in self.rows])
        prompts = [row.request.prompt for row in self.rows]
        self.slots.crop(len(prompt) - 1 for prompt in prompts)  # takes something back only after an interruption
        most = budget if len(self.rows) == 1 else None
        pieces = [prompt[n:][:most] for prompt, n in zip(prompts, self.slots.lengths, strict=True)]
        self.scores = read(self.model, self.slots, pieces)
        return self.slots.lengths == [len(prompt) for prompt in prompts]


class Engine:
    def __init__(
        self,
        model: Any,
        *,
        rows: int = 8,
        columns: int = 4096,
        prefill: int = 512,
        context: int | None = None,
        queue: int = 1024,
        by: Drafter | None = None,
        guesses: int = 5,
    ) -> None:
        must(1 <= guesses <= 64, "Engine", "guesses must be from 1 to 64", guesses, "5 is usual")
        for name, value in (("rows", rows), ("columns", columns), ("prefill", prefill), ("queue", queue)):
            must(
                type(value) is int and 1 <= value <= 2**24,
                "Engine",
                f"{name} must be from 1 to 2**24",
                value,
                "correct it",
            )
        self.model, self.context, self.queue = model, context, queue
        self.rows, self.prefill, self.columns = rows, prefill, columns
        self.by, self.guesses = by, guesses
        if by is not None:
            fits(by, model)
        self.slots = Slots(model, most=columns)
        self.waiting: deque[Row] = deque()
        self.joining: Joining | None = None

    # ------------------------------------------------------------------------------------------------- asking

    def submit(self, request: Request) -> Row:
        """Take a request in, or refuse it at once."""
        limit = check(request, self.model, self.context)
        need = len(request.prompt) + limit
        if need > self.columns:
            raise TooLong(
                f"Engine: there are {self.columns} columns a row, got a request for {need}; ask for fewer tokens"
            )
        if len(self.waiting) >= self.queue:
            raise Unavailable(f"Engine: at most {self.queue} requests may wait, got one more; come again later")
        if request.prefix is not None and request.prefix.model is not self.model:
            must(
                False,
                "Engine",
                "a prefix must have been read by the same model",
                "another's",
                "make it with this model",
            )
        row = Row(request, limit)
        if not row.stopped:
            self.waiting.append(row)
        return row

    def cancel(self, row: Row) -> None:
        """End a row; its place is free for the next step."""
        row.cancelled = True

    @property
    def running(self) -> list[Row]:
        return [held.owner for held in self.slots.held]

    # ------------------------------------------------------------------------------------------------- answering

    def step(self) -> bool:
        """One token for each running row (and its guesses that come true), and a piece of the prompts of those who
        join. False when there is nothing to do.
        """
        self._let_go()
        rows = self.running
        if rows:
            self._read_on(rows)
        self._admit()
        return bool(self.waiting) or any(not row.stopped for row in self.running)

    def run(self) -> None:
        while self.step():
            pass

    def stream(self) -> Iterator[tuple[Row, Event]]:
        """Steps until all is answered; each event once, with its row."""
        seen: dict[int, int] = {}
        more = True
        while more:
            rows = [*self.running, *self.waiting]
            more = self.step()
            for row in rows:
                for event in row.events[seen.get(id(row), 0) :]:
                    seen[id(row)] = seen.get(id(row), 0) + 1
                    yield row, event

    def _read_on(self, rows: list[Row]) -> None:
        self.slots.crop(len(row) - 1 for row in rows)  # takes back wrong guesses, and an interrupted step
        tails = [row.after(length) for row, length in zip(rows, self.slots.lengths, strict=True)]
        guesses = [list(self._guess(row, len(rows))) for row in rows]
        if not any(guesses):
            self._take(read(self.model, self.slots, tails), rows)
            return
        texts = [[*tail, *guess] for tail, guess in zip(tails, guesses, strict=True)]
        self._take_guessed(read_each(self.model, self.slots, texts, [1 + len(g) for g in guesses]), rows, guesses)

    def _guess(self, row: Row, rows: int) -> Sequence[int]:
        most = min(self.guesses, max(FEW, 1 + self.guesses) // rows - 1, row.limit - len(row.events) - 1)
        return () if self.by is None or most < 1 or not row.trust.granted() else self.by.guess(row, most)

    def _take_guessed(self, scores: list[Tensor], rows: list[Row], guesses: list[list[int]]) -> None:
        """scores [1 + guesses, V] of each row, which says on for as long as its guesses come true."""
        left, place = list(zip(rows, scores, guesses, strict=True)), 0
        while left:
            self._take(torch.stack([found[place] for _, found, _ in left]), [row for row, _, _ in left])
            going = []
            for row, found, guess in left:
                true = row.new[-1:] == guess[place : place + 1]
                if true and not row.stopped:
                    going.append((row, found, guess))
                else:
                    row.trust.learn(len(guess), place + true)
            left, place = going, place + 1

    def _take(self, scores: Tensor, rows: Sequence[Row]) -> None:
        for row, choice in zip(rows, choose(scores, rows), strict=True):
            if isinstance(choice, Fault):
                row.fault = choice
            else:
                row.take(choice)

    def _let_go(self) -> None:
        for number in reversed(range(len(self.slots.held))):
            if self.slots.held[number].owner.stopped:
                self.slots.leave(number)

    # ------------------------------------------------------------------------------------------------- joining

    def _admit(self) -> None:
        """Read prompts in their order, up to the budget, while there is room for their rows."""
        budget = self.prefill
        while budget > 0 and (group := self._next(budget)):
            if self.joining is None or list(self.joining.rows) != group:
                self.joining = Joining(self.model, group)
            budget -= max(len(row.request.prompt) for row in group) * len(group)
            if self._reads(self.joining):
                self.joining = None
        self._forget_joined()

    def _forget_joined(self) -> None:
        inside = {id(row) for row in self.running}
        while self.waiting and (self.waiting[0].stopped or id(self.waiting[0]) in inside):
            self.waiting.popleft()

    def _next(self, budget: int) -> list[Row]:
        """The rows that read together next: as many of the first waiting ones as fit, one at least."""
        self._forget_joined()
        if self.joining is not None and self.waiting and self.joining.rows[0] is self.waiting[0]:
            return list(self.joining.rows)
        group: list[Row] = []
        widest = 0
        for row in self.waiting:
            widest = max(widest, len(row.request.prompt), len(row.request.source or ()))
            alone = row.request.prefix is not None
            full = len(self.slots.held) + len(group) >= self.rows
            if full or row.stopped or (group and (alone or widest * (len(group) + 1) > budget)):
                break
            group.append(row)
            if alone:
                break
        return group

    def _reads(self, joining: Joining) -> bool:
        """True when the rows have joined, or ended with a fault."""
        try:
            if not joining.read(self.prefill):
                return False
        except Fault as fault:
            if len(joining.rows) == 1:
                joining.rows[0].fault = fault
                return True
            for row in joining.rows:
                self._reads(Joining(self.model, [row]))
            return True
        self.slots.join(joining.slots)
        assert joining.scores is not None
        self._take(joining.scores, joining.rows)
        return True
