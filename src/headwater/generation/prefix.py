"""A beginning that many prompts share, read once.

    prefix = Prefix(model, ids)                      # reads ids
    generate(model, [*ids, 5, 6], prefix=prefix)     # reads 5 and 6

A prompt takes over as much of the prefix as it has in common with it, all but its own last token at most (which must
be read to know what follows). It must not be kept while weights change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.errors import BadInput
from headwater.generation.reading import read
from headwater.generation.requests import Request, check
from headwater.generation.slots import Slots


class Prefix:
    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        if model.encoder is not None and model.decoder is not None:
            raise BadInput(
                "prefix: what a decoder keeps depends on its source, so it cannot be shared; give whole prompts"
            )
        self.model, self.slots = model, Slots(model, [self])
        self.ids: tuple[int, ...] = ()
        self.grow(ids)

    def grow(self, ids: Sequence[int]) -> None:
        """Become another beginning, reading only what is new in it: how a conversation goes on."""
        check(Request(tuple(ids), max_tokens=0), self.model)
        self.slots.crop([self.common(ids)])
        read(self.model, self.slots, [ids[self.slots.lengths[0] :]])
        self.ids = tuple(ids)

    def common(self, prompt: Sequence[int]) -> int:
        """How many of the prompt's first tokens need not be read."""
        most = min(len(self.ids), len(prompt) - 1)
        return next((i for i in range(most) if self.ids[i] != prompt[i]), most)

    def copy(self, owner: Any, prompt: Sequence[int]) -> Slots:
        """A cache of one row that has read what prompt and prefix have in common."""
        made = Slots(self.model, [])
        made.join(self.slots)
        made.held = [made.held[0]._replace(owner=owner)]
        made.crop([self.common(prompt)])
        return made
