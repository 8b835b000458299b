"""11. Greedy decoding of a batch: the most probable next token, until each row reaches its stop token.

The encoder runs once. The decoder reads its full prefix again at every step, which is simple and slow; the torch core
has a KV cache instead, and is tested against this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.reference.gradients import Array
from headwater.reference.masks import prepare_tokens
from headwater.reference.model import Memory, Transformer


def greedy(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    stop: int,
    max_new_tokens: int,
    source: Array | None = None,
    source_attention_mask: Array | None = None,
) -> list[list[int]]:
    """Greedy decoding: up to max_new_tokens for each prompt, without the prompt and the stop token.

    Prompts of unequal length are padded on the left, so that every row grows at its right end. A row that
    reached the stop token leaves the batch; the others continue.
    """
    if "decoder" not in model.config.stacks:
        raise BadSetting(_("greedy decoding needs a decoder, got a model of shape 'encoder'; give another model"))
    if not prompts or not all(prompts):
        raise BadInput(_("every prompt must hold at least one token, got an empty one; begin with the start token"))

    memory = None if source is None else model.encode(source, source_attention_mask)
    ids, attention_mask = pad_left(prompts)
    generated: list[list[int]] = [[] for _ in prompts]
    active = np.arange(len(prompts))  # the rows that have not stopped
    for _unused in range(max_new_tokens):
        # the most probable next token of each active row
        logits = model.decode(ids[active], attention_mask[active], memory and _select_rows(memory, active))
        next_tokens = logits[:, -1].argmax(axis=-1)

        # rows that reached the stop token leave
        active = active[next_tokens != stop]
        next_tokens = next_tokens[next_tokens != stop]
        if not active.size:
            break

        # the others grow by one column
        for row, token in zip(active, next_tokens, strict=True):
            generated[row].append(int(token))
        ids = np.pad(ids, ((0, 0), (0, 1)))
        attention_mask = np.pad(attention_mask, ((0, 0), (0, 1)), constant_values=True)
        ids[active, -1] = next_tokens
    return generated


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Pad prompts on the left to one length: ids and attention mask.

    >>> pad_left([[5], [6, 7]])[0].tolist()
    [[0, 5], [6, 7]]
    """
    max_length = max(map(len, prompts))
    ids = np.zeros((len(prompts), max_length), np.int64)
    attention_mask = np.zeros((len(prompts), max_length), bool)
    for row, prompt in enumerate(prompts):
        ids[row, max_length - len(prompt) :] = prompt
        attention_mask[row, max_length - len(prompt) :] = True
    return ids, attention_mask


def _select_rows(memory: Memory, rows: Array) -> Memory:
    tokens = prepare_tokens(memory.tokens.ids[rows], document_ids=memory.tokens.document_ids[rows])
    return replace(memory, value=memory.value[rows], tokens=tokens)
