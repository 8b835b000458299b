"""Prefix caching: the KV cache of a prefix that many prompts share, computed once.

    prefix = Prefix(model, ids)                      # prefill of ids
    generate(model, [*ids, 5, 6], prefix=prefix)     # prefill of 5 and 6 alone

A prompt reuses as much of the prefix as it has in common with it, but never its own last token (whose logits are
needed). A prefix is invalid once the weights change.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.model import Transformer
from headwater.errors import BadInput
from headwater.generation.forward import forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.request import Request, validate_request
from headwater.i18n import _


class Prefix:
    """A shared prefix of prompts with its KV cache."""

    def __init__(self, model: Transformer, ids: Sequence[int]) -> None:
        if model.encoder is not None and model.decoder is not None:
            raise BadInput(
                _("prefix: what a decoder keeps depends on its source, so it cannot be shared; give whole prompts")
            )
        self.model = model
        self.cache = BatchKVCache(model, [self])
        self.ids: tuple[int, ...] = ()
        self.update(ids)

    def update(self, ids: Sequence[int]) -> None:
        """Replace the prefix, computing only what is new in it: how a conversation grows."""
        validate_request(Request(tuple(ids), max_tokens=0), self.model)
        self.cache.crop([self.common_length(ids)])
        forward_last(self.model, self.cache, [ids[self.cache.lengths[0] :]])
        self.ids = tuple(ids)

    def common_length(self, prompt: Sequence[int]) -> int:
        """The number of the prompt's first tokens that are in the cache."""
        limit = min(len(self.ids), len(prompt) - 1)
        return next((i for i in range(limit) if self.ids[i] != prompt[i]), limit)

    def copy_cache(self, owner: object, prompt: Sequence[int]) -> BatchKVCache:
        """A KV cache of one row, for owner, with what prompt and prefix have in common."""
        cache = BatchKVCache(self.model, [])
        cache.append_rows(self.cache)
        cache.rows = [cache.rows[0]._replace(owner=owner)]
        cache.crop([self.common_length(prompt)])
        return cache
