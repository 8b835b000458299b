"""11. Greedy decoding: the likeliest next token, again and again, for many rows at once, each with its own end.

The encoder runs once. The decoder reads its whole prefix again at every step, which is plain and slow; the torch core
keeps keys and values instead, and this is what it is checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwater.errors import BadInput, BadSetting
from headwater.reference.gradients import Array
from headwater.reference.masks import lay_out
from headwater.reference.model import Memory, Transformer


def greedy(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    stop: int,
    most: int,
    source: Array | None = None,
    source_keep: Array | None = None,
) -> list[list[int]]:
    """Up to `most` new tokens for each prompt, without the prompt and the stop token.

    Prompts of unequal length are padded on the left, so that every row grows at its right end. A row that said stop
    leaves the batch; the others go on.
    """
    if "decoder" not in model.config.stacks:
        raise BadSetting("a next token needs a decoder, got a model of shape 'encoder'; give another model")
    if not prompts or not all(prompts):
        raise BadInput("every prompt must hold at least one token, got an empty one; begin with the start token")
    memory = None if source is None else model.encode(source, source_keep)
    ids, keep = pad_left(prompts)
    found: list[list[int]] = [[] for _ in prompts]
    going = np.arange(len(prompts))
    for _ in range(most):
        logits = model.decode(ids[going], keep[going], memory and _rows(memory, going))
        chosen = logits[:, -1].argmax(axis=-1)
        going, chosen = going[chosen != stop], chosen[chosen != stop]
        if not going.size:
            break
        for row, token in zip(going, chosen, strict=True):
            found[row].append(int(token))
        ids, keep = (np.pad(t, ((0, 0), (0, 1)), constant_values=fill) for t, fill in ((ids, 0), (keep, True)))
        ids[going, -1] = chosen
    return found


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Rows of one length, and which of their tokens are real.

    >>> pad_left([[5], [6, 7]])[0].tolist()
    [[0, 5], [6, 7]]
    """
    longest = max(map(len, prompts))
    ids, keep = np.zeros((len(prompts), longest), np.int64), np.zeros((len(prompts), longest), bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], keep[row, longest - len(prompt) :] = prompt, True
    return ids, keep


def _rows(memory: Memory, rows: Array) -> Memory:
    tokens = lay_out(memory.tokens.ids[rows], documents=memory.tokens.documents[rows])
    return replace(memory, value=memory.value[rows], tokens=tokens)
