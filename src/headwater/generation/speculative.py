"""Speculative decoding: drafted tokens are verified in one forward pass; the output does not change.

The sampling noise depends on (seed, step, token) alone, see rng.py. So the token that the model samples at each step is
known as soon as its logits are, and a drafted token either equals it or is rejected. The output is the one without
drafts: greedy or sampled, with any logits processors. A drafter only decides how many tokens are accepted.

    Draft(model)      a smaller model with the same vocabulary drafts, with the same processors and the same noise
    PromptLookup()    prompt lookup decoding: what followed the last tokens where they occurred before in the text

The engine calls the drafter before each step (engine.py); rejected tokens are cropped from the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwater.core.model import Transformer
from headwater.errors import BadSetting, Fault
from headwater.generation.forward import forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.request import Request, SequenceState, vocab_size
from headwater.generation.sampling import sample
from headwater.i18n import _
from headwater.parts import must, part


class Drafter(Protocol):
    """Proposes draft tokens for speculative decoding."""

    def propose(self, sequence: SequenceState, max_tokens: int) -> Sequence[int]:
        """At most max_tokens tokens that may follow the sequence."""
        ...


@part
class PromptLookup:
    """Prompt lookup decoding: the draft is what followed an earlier occurrence of the last tokens.

    The longest n-gram of at most max_ngram_size last tokens counts, and its latest occurrence.
    """

    max_ngram_size: int = 3

    def __post_init__(self) -> None:
        must(
            1 <= self.max_ngram_size <= 32,
            self,
            _("max_ngram_size must be from 1 to 32"),
            self.max_ngram_size,
            _("3 is usual"),
        )

    def propose(self, sequence: SequenceState, max_tokens: int) -> Sequence[int]:
        ids = [*(sequence.request.source_ids or ()), *sequence.tokens_from(0)]
        for size in range(min(self.max_ngram_size, len(ids) - 1), 0, -1):
            ngram = ids[-size:]
            for start in range(len(ids) - size - 1, -1, -1):
                if ids[start : start + size] == ngram:
                    return ids[start + size : start + size + max_tokens]
        return ()


class Draft:
    """A smaller draft model with a KV cache of its own, for one sequence at a time."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache = BatchKVCache(model, [None])
        self.cached_ids: list[int] = []
        if model.encoder is not None and model.decoder is not None:
            raise BadSetting(
                _("Draft: the draft model must have one stack, got an encoder-decoder; use PromptLookup()")
            )

    def propose(self, sequence: SequenceState, max_tokens: int) -> Sequence[int]:
        max_positions = self.model.output_stack.spec.max_positions
        if max_positions is not None:
            max_tokens = min(max_tokens, max_positions - len(sequence))
        draft = _trial_copy(sequence)
        for _unused in range(max(0, max_tokens)):
            ids = draft.tokens_from(0)
            self.cache.crop([min(_common_prefix_length(self.cached_ids, ids), len(ids) - 1)])
            logits = forward_last(self.model, self.cache, [ids[self.cache.lengths[0] :]])
            self.cached_ids = ids
            sampled = sample(logits, [draft])[0]
            if isinstance(sampled, Fault) or draft.append(sampled).finish_reason:
                break
        return draft.output_ids[len(sequence.events) :]


def _common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of first tokens that two sequences have in common."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def _trial_copy(sequence: SequenceState) -> SequenceState:
    """A copy of the sequence to append a draft to; without text, because only the tokens matter."""
    request = sequence.request
    ids_only = Request(
        request.prompt_ids, processors=request.processors, stop_token_ids=request.stop_token_ids, seed=request.seed
    )
    copy = SequenceState(ids_only, sequence.max_new_tokens)
    copy.events = list(sequence.events)
    return copy


def check_same_vocab(drafter: Drafter, model: Transformer) -> None:
    """Raise BadSetting for a draft model with another vocabulary."""
    if not isinstance(drafter, Draft):
        return
    draft_size = vocab_size(drafter.model)
    size = vocab_size(model)
    if draft_size != size:
        raise BadSetting(
            _(
                "Draft: both models must have one vocabulary, got {draft_size} and {size}; choose a relative",
                draft_size=draft_size,
                size=size,
            )
        )
